#include "primitives/expert_balance.hpp"

#include "primitives/calls.hpp"
#include "primitives/gemm.hpp"
#include "primitives/line.hpp"
#include "primitives/pointwise.hpp"

namespace shardproof::primitives {
namespace {

struct BalanceSaved : Saved {
  Kept counts;  // of all ranks, [1,E]
};

}  // namespace

std::vector<int64_t> ExpertBalance::own_counts(const std::vector<int64_t>& chosen, int64_t experts,
                                               int64_t) const {
  std::vector<int64_t> n(static_cast<size_t>(experts));
  for (int64_t expert : chosen) ++n.at(size_t(expert));
  return n;
}

std::vector<Axis> ExpertBalance::summed_over(const Case& line) const {
  return line.on("sp") ? with_ranks(line, {Axis::tp, Axis::cp, Axis::ep, Axis::dp})
                       : with_ranks(line, {Axis::cp, Axis::ep, Axis::dp});
}

void ExpertBalance::sum_counts(Rank& rank, Communicator& group, const View& own,
                               const View& all) const {
  all_reduce(rank, group, own, all);
}
void ExpertBalance::sum_loss(Rank& rank, Communicator& group, const View& own,
                             const View& all) const {
  all_reduce(rank, group, own, all);
}

// inputs probs, chosen; output loss.
std::unique_ptr<Saved> ExpertBalance::forward(Rank& rank, std::span<const View> inputs,
                                              std::span<const View> outputs) {
  const Case& line = rank.line();
  if (auto refused = refused_balance(line)) throw *refused;
  const DType type = accumulation_of(line);
  const int64_t experts = line.at("experts");
  const auto axes = summed_over(line);
  const Kept counted = uploaded(own_counts(downloaded(inputs[1]), experts, line.at("topk")));
  const View mine = rank.workspace(type, {1, experts}), sums = rank.workspace(type, {1, experts}),
             part = rank.workspace(type, {1, 1}), loss = rank.workspace(type, {1, 1});
  auto saved = std::make_unique<BalanceSaved>();
  saved->counts = Kept(type, {1, experts});
  const View& counts = saved->counts.view();
  convert(counted.view(), mine);
  column_sums(inputs[0], sums, type);
  if (axes.empty())
    convert(mine, counts);
  else
    sum_counts(rank, rank.along(axes), mine, counts);
  gemm(plain(sums), turned(counts), part, type);
  if (axes.empty())
    convert(part, loss);
  else
    sum_loss(rank, rank.along(axes), part, loss);
  convert(loss, outputs[0]);
  return saved;
}

void ExpertBalance::backward(Rank& rank, Saved& state, std::span<const View> cotangents,
                             std::span<const View> gradients) {
  const DType type = accumulation_of(rank.line());
  const View& counts = static_cast<const BalanceSaved&>(state).counts.view();
  const View& dprobs = gradients[0];
  const View row = rank.workspace(type, counts.shape),
             ones = rank.workspace(type, {dprobs.shape[0], 1}), g = rank.workspace(type, {1, 1});
  convert(cotangents[0], g);
  gemm(plain(g), plain(counts), row, type);
  perform(Fill{tensor(ones), 1}, "ones");
  gemm(plain(ones), plain(row), dprobs, type);
}

}  // namespace shardproof::primitives
