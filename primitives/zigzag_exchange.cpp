#include "primitives/zigzag_exchange.hpp"

#include <algorithm>

#include "primitives/calls.hpp"
#include "primitives/rows.hpp"
#include "primitives/work.hpp"

namespace shardproof::primitives {
namespace {

using Rows = std::vector<int64_t>;

Rows block_of(const ContextLine& c, int r) {
  ContextLine contiguous = c;
  contiguous.layout = "contiguous";
  return owned_rows(contiguous, c.rows, r);
}

// Own local rows in the order of the ranks that get them (or that they come from), and how many
// each: `own` are the rows here, `theirs` those of each rank on the other side.
struct Plan {
  Rows order, counts;
};
Plan plan_of(const Rows& own, const std::vector<Rows>& theirs) {
  Plan plan;
  for (const Rows& rows : theirs) {
    int64_t count = 0;
    // The sender's order of global rows: both sides derive it from the rows alone.
    for (int64_t i = 0; i < int64_t(own.size()); ++i)
      if (std::find(rows.begin(), rows.end(), own[size_t(i)]) != rows.end())
        plan.order.push_back(i), ++count;
    plan.counts.push_back(count);
  }
  return plan;
}

}  // namespace

std::optional<Rejected> refused_exchange(const Case& line) {
  if (auto refused = refused_context(line)) return refused;
  return first_refusal(
      line.text("layout") == "contiguous"
          ? std::optional(Rejected("layout=zigzag or layout=zigzag_row", "layout=contiguous",
                                   "there is nothing to exchange between equal layouts"))
          : std::nullopt,
      line.ranks(Axis::tp) > 1
          ? std::optional(Rejected("tp=1", "tp=" + line.text("tp"), "features are not cut here"))
          : std::nullopt);
}

std::vector<int64_t> ZigzagExchange::rows_after(const ContextLine& c, int r) const {
  return owned_rows(c, c.rows, r);
}

// Rows leave in the sender's local order and are put where the receiver holds them. Within what
// one rank sends to another, blocks and chunks both rise, so that the two orders agree.
void ZigzagExchange::exchange(Rank& rank, const View& from, const View& to, bool back) {
  const ContextLine c(rank.line());
  Communicator& cp = rank.along(Axis::cp);
  std::vector<Rows> before, after;
  for (int r = 0; r < cp.size(); ++r) {
    before.push_back(block_of(c, r));
    after.push_back(rows_after(c, r));
  }
  if (back) std::swap(before, after);
  const size_t me = size_t(cp.rank());
  const Plan out = plan_of(before[me], after), in = plan_of(after[me], before);
  const View sent = rank.workspace(from.dtype, from.shape),
             got = rank.workspace(to.dtype, to.shape);
  each_run(out.order, [&](int64_t row, int64_t at, int64_t n) {
    convert(from.narrow(0, row, n), sent.narrow(0, at, n));
  });
  all_to_all(rank, cp, sent, got, 0, 0, out.counts, in.counts);
  each_run(in.order, [&](int64_t row, int64_t at, int64_t n) {
    convert(got.narrow(0, at, n), to.narrow(0, row, n));
  });
}

std::unique_ptr<Saved> ZigzagExchange::forward(Rank& rank, std::span<const View> inputs,
                                               std::span<const View> outputs) {
  if (auto refused = refused_exchange(rank.line())) throw *refused;
  exchange(rank, inputs[0], outputs[0], false);
  return std::make_unique<Saved>();
}

void ZigzagExchange::backward(Rank& rank, Saved&, std::span<const View> cotangents,
                              std::span<const View> gradients) {
  exchange(rank, cotangents[0], gradients[0], true);
}

}  // namespace shardproof::primitives
