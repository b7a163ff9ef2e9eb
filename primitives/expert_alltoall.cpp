#include "primitives/expert_alltoall.hpp"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>

#include "primitives/expert_rows.hpp"
#include "primitives/gemm.hpp"
#include "primitives/line.hpp"

namespace shardproof::primitives {
namespace {

using Numbers = std::vector<int64_t>;

int64_t sum_of(const Numbers& v) { return std::accumulate(v.begin(), v.end(), int64_t(0)); }

// places[order[i]] = i; -1 where nothing is.
Numbers inverse(const Numbers& order, size_t size) {
  Numbers places(size, -1);
  for (size_t i = 0; i < order.size(); ++i)
    if (order[i] >= 0) places[size_t(order[i])] = int64_t(i);
  return places;
}

// What the others say that they send has to add up before anything is sent by it.
void require_counts(const Numbers& counts, const Numbers& own, int64_t me, int64_t rows) {
  const int64_t experts = int64_t(own.size());
  for (int64_t a = 0; a * experts < int64_t(counts.size()); ++a) {
    const auto first = counts.begin() + a * experts;
    // A count that no member can have is met before it is added to others.
    const bool possible =
        std::all_of(first, first + experts, [&](int64_t n) { return n >= 0 && n <= rows; });
    if (!possible || sum_of({first, first + experts}) != rows ||
        (a == me && !std::equal(own.begin(), own.end(), first)))
      throw std::runtime_error("expected counts of member " + std::to_string(a) +
                               " that add up to " + std::to_string(rows) +
                               " rows, its own among them, met others");
  }
}

// Calls each(own expert, its first row, its rows).
template <class Each>
void each_expert(const Dispatch& d, Each each) {
  int64_t first = 0;
  for (size_t e = 0; e < d.rows_of.size(); ++e) {
    each(int64_t(e), first, d.rows_of[e]);
    first += d.rows_of[e];
  }
}

View rows_like(Rank& rank, int64_t rows, const View& like) {
  return rank.workspace(like.dtype, {rows, like.shape.back()});
}

}  // namespace

ExpertPlace ExpertAlltoall::place_of(int64_t expert, int64_t experts, int64_t members) const {
  const int64_t own = experts / members;
  return {expert / own, expert % own};
}

Numbers ExpertAlltoall::by_priority(int64_t slots, int64_t choices) const {
  Numbers order;
  for (int64_t j = 0; j < choices; ++j)
    for (int64_t slot = j; slot < slots; slot += choices) order.push_back(slot);
  return order;
}

void ExpertAlltoall::take_rows(const View& from, const View& index, const View& to) const {
  perform(TakeRows{tensor(from), tensor(index), tensor(to), from.shape.back()}, "rows by a list");
}

Numbers ExpertAlltoall::order_of(const Numbers& counts, int64_t experts, int64_t me) const {
  const int64_t members = int64_t(counts.size()) / experts, own = experts / members;
  Numbers order;
  for (int64_t e = 0; e < own; ++e) {
    int64_t at = 0;
    for (int64_t a = 0; a < members; ++a)
      for (int64_t l = 0; l < own; ++l) {
        const int64_t n = counts[size_t(a * experts + me * own + l)];
        if (l == e)
          for (int64_t i = 0; i < n; ++i) order.push_back(at + i);
        at += n;
      }
  }
  return order;
}

bool ExpertAlltoall::cuts_tokens(const ExpertLine& line) const { return line.replicated; }
int ExpertAlltoall::share_of(Parallel& p) const { return p.tp.rank(); }
View ExpertAlltoall::weights(Rank&, const ExpertSaved& saved) const { return saved.probs; }
View ExpertAlltoall::places_of(const ExpertSaved& saved) const { return saved.places.view(); }
void ExpertAlltoall::idle_expert(const View& gradient) const { set_zero(gradient); }
const View& ExpertAlltoall::way_back(const ExpertSaved& saved, bool) const {
  return saved.back.view();
}
bool ExpertAlltoall::takes_part(const ExpertSaved&) const { return true; }

std::vector<Axis> ExpertAlltoall::summed_over(const Case& line) const {
  return with_ranks(line, {Axis::cp, Axis::dp});
}

void ExpertAlltoall::sum_gradients(Parallel& p, const Parts& parts, const std::vector<Axis>& axes) {
  coalesced_all_reduce(p, parts, axes);
}

void ExpertAlltoall::prob_gradient(Rank& rank, const ExpertSaved& saved, const View& g,
                                   const View& to) const {
  const View& z = saved.results.view();
  perform(ProbGradient{tensor(g), tensor(z), tensor(places_of(saved)), tensor(to), z.shape.back(),
                       ExpertLine(rank.line()).choices, !in_single(rank.line())},
          "gradients of weights");
}

Numbers ExpertAlltoall::all_counts(Rank& rank, Communicator& group, const Numbers& mine) const {
  const int64_t experts = int64_t(mine.size());
  const Kept counted = uploaded(mine);
  const View all = rank.workspace(DType::i64, {group.size(), experts});
  all_gather(rank, group, view_of(counted.view().data, DType::i64, {1, experts}, all.space), all,
             0);
  return downloaded(all);
}

Numbers ExpertAlltoall::all_rows(Rank& rank, const ExpertLine& line, const Numbers& by_slot,
                                 Dispatch& d) const {
  Communicator& group = rank.along(line.axes);
  Numbers mine(static_cast<size_t>(line.experts));
  for (int64_t expert : by_slot) ++mine[size_t(expert)];
  d.slots.resize(by_slot.size());
  std::iota(d.slots.begin(), d.slots.end(), 0);
  std::stable_sort(d.slots.begin(), d.slots.end(),
                   [&](int64_t a, int64_t b) { return by_slot[size_t(a)] < by_slot[size_t(b)]; });
  Numbers counts = all_counts(rank, group, mine);
  require_counts(counts, mine, group.rank(), int64_t(by_slot.size()));
  return counts;
}

Numbers ExpertAlltoall::rows_within_capacity(Rank& rank, const ExpertLine& line,
                                             const Numbers& by_slot, Dispatch& d) const {
  d.slots.assign(size_t(line.experts * line.capacity), -1);
  Numbers taken(static_cast<size_t>(line.experts));
  for (int64_t slot : by_priority(int64_t(by_slot.size()), line.choices)) {
    const int64_t expert = by_slot[size_t(slot)], place = taken[size_t(expert)]++;
    if (place < line.capacity) d.slots[size_t(expert * line.capacity + place)] = slot;
  }
  return Numbers(size_t(rank.along(line.axes).size() * line.experts), line.capacity);
}

void ExpertAlltoall::plan(Rank& rank, const ExpertLine& line, const View& chosen,
                          ExpertSaved& saved) const {
  Communicator& group = rank.along(line.axes);
  const int64_t members = group.size(), experts = line.experts, own = experts / members,
                me = group.rank();
  Numbers by_slot = downloaded(chosen);
  for (int64_t& expert : by_slot) {
    if (expert < 0 || expert >= experts)
      throw std::invalid_argument("expected an expert from 0 to " + std::to_string(experts - 1) +
                                  ", met " + std::to_string(expert));
    const ExpertPlace place = place_of(expert, experts, members);
    expert = place.member * own + place.own;
  }
  Dispatch& d = saved.dispatch;
  const Numbers counts = line.capacity > 0 ? rows_within_capacity(rank, line, by_slot, d)
                                           : all_rows(rank, line, by_slot, d);
  const auto rows = [&](int64_t sender, int64_t first, int64_t n) {
    const auto from = counts.begin() + sender * experts + first;
    return sum_of({from, from + n});
  };
  for (int64_t a = 0; a < members; ++a) {
    d.received.push_back(rows(a, me * own, own));
    d.sent.push_back(rows(me, a * own, own));
  }
  for (int64_t e = 0; e < own; ++e) {
    d.rows_of.push_back(0);
    for (int64_t a = 0; a < members; ++a) d.rows_of.back() += rows(a, me * own + e, 1);
  }
  d.order = order_of(counts, experts, me);
  saved.slots = uploaded(d.slots);
  saved.places = uploaded(inverse(d.slots, by_slot.size()));
  saved.order = uploaded(d.order);
  saved.back = uploaded(inverse(d.order, d.order.size()));
}

// ---- Tokens that all ranks of tp hold

View ExpertAlltoall::own_tokens(Parallel& p, const ExpertLine& line, const View& all) const {
  if (!cuts_tokens(line)) return all;
  const int64_t own = all.shape[0] / p.tp.size();
  return all.narrow(0, own * share_of(p), own);
}

View ExpertAlltoall::own_result(Parallel& p, const ExpertLine& line, const View& all) const {
  if (!cuts_tokens(line)) return all;
  return p.workspace(all.dtype, with_extent(all.shape, 0, all.shape[0] / p.tp.size()));
}

void ExpertAlltoall::gather_tokens(Parallel& p, const ExpertLine& line, const View& own,
                                   const View& all) const {
  if (cuts_tokens(line)) all_gather(p.rank, p.tp, own, all, 0);
}

// ---- The two ways

// Rows as they leave -> rows by own expert.
View ExpertAlltoall::to_experts(Rank& rank, Communicator& group, const ExpertSaved& saved,
                                const View& rows) const {
  const Dispatch& d = saved.dispatch;
  const View arrived = rows_like(rank, d.arriving(), rows);
  all_to_all(rank, group, rows, arrived, 0, 0, d.sent, d.received);
  const View by_expert = rows_like(rank, d.arriving(), rows);
  take_rows(arrived, saved.order.view(), by_expert);
  return by_expert;
}

void ExpertAlltoall::from_experts(Rank& rank, Communicator& group, const ExpertSaved& saved,
                                  const View& by_expert, const View& to, bool backward) const {
  const Dispatch& d = saved.dispatch;
  const View leaving = rows_like(rank, d.arriving(), by_expert);
  take_rows(by_expert, way_back(saved, backward), leaving);
  all_to_all(rank, group, leaving, to, 0, 0, d.received, d.sent);
}

// inputs x, chosen, probs, w; output y.
std::unique_ptr<Saved> ExpertAlltoall::forward(Rank& rank, std::span<const View> inputs,
                                               std::span<const View> outputs) {
  if (auto refused = refused_experts(rank.line())) throw *refused;
  Parallel p(rank);
  const ExpertLine line(rank.line());
  Communicator& group = rank.along(line.axes);
  auto saved = std::make_unique<ExpertSaved>();
  const View x = own_tokens(p, line, inputs[0]);
  saved->probs = own_tokens(p, line, inputs[2]);
  saved->w = inputs[3];
  plan(rank, line, own_tokens(p, line, inputs[1]), *saved);
  const Dispatch& d = saved->dispatch;
  const int64_t rows = int64_t(d.slots.size());

  Numbers tokens = d.slots;
  for (int64_t& slot : tokens) slot = slot < 0 ? -1 : slot / line.choices;
  const Kept by_token = uploaded(tokens);
  const View leaving = rows_like(rank, rows, x);
  take_rows(x, by_token.view(), leaving);
  const View arrived = to_experts(rank, group, *saved, leaving);
  saved->rows = Kept(x.dtype, arrived.shape);
  convert(arrived, saved->rows.view());

  const View y = own_result(p, line, outputs[0]);
  const View z = rows_like(rank, d.arriving(), y);
  each_expert(d, [&](int64_t e, int64_t first, int64_t n) {
    if (n > 0)
      gemm(plain(saved->rows.view().narrow(0, first, n)), turned(saved->w.narrow(0, e, 1)),
           z.narrow(0, first, n), p.accumulate);
  });
  saved->results = Kept(y.dtype, {rows, y.shape.back()});
  from_experts(rank, group, *saved, z, saved->results.view(), false);

  perform(RowsOfToken{tensor(saved->results.view()), tensor(places_of(*saved)),
                      tensor(weights(rank, *saved)), tensor(y), y.shape.back(), line.choices,
                      !in_single(rank.line())},
          "rows of a token");
  gather_tokens(p, line, y, outputs[0]);
  return saved;
}

void ExpertAlltoall::backward(Rank& rank, Saved& state, std::span<const View> cotangents,
                              std::span<const View> gradients) {
  Parallel p(rank);
  const ExpertLine line(rank.line());
  Communicator& group = rank.along(line.axes);
  const auto& saved = static_cast<const ExpertSaved&>(state);
  const Dispatch& d = saved.dispatch;
  const int64_t rows = int64_t(d.slots.size());
  const bool wide = !in_single(rank.line());
  const View g = own_tokens(p, line, cotangents[0]), dx = own_result(p, line, gradients[0]),
             dprobs = own_result(p, line, gradients[2]);
  prob_gradient(rank, saved, g, dprobs);

  const View leaving = rows_like(rank, rows, g);
  perform(WeighedRows{tensor(g), tensor(weights(rank, saved)), tensor(saved.slots.view()),
                      tensor(leaving), g.shape.back(), line.choices, wide},
          "weighed rows");
  const View of_rows = to_experts(rank, group, saved, leaving),
             back = rows_like(rank, d.arriving(), dx);
  const View dw = rank.accumulates() ? fresh_gradient(p, gradients[3]) : gradients[3],
             partial = partial_like(p, dw);
  each_expert(d, [&](int64_t e, int64_t first, int64_t n) {
    const View own = partial.narrow(0, e, 1), of_own = of_rows.narrow(0, first, n);
    if (n == 0) return idle_expert(own);
    gemm(turned(of_own), plain(saved.rows.view().narrow(0, first, n)), own, p.accumulate);
    gemm(plain(of_own), plain(saved.w.narrow(0, e, 1)), back.narrow(0, first, n), p.accumulate);
  });
  const View returned = rows_like(rank, rows, dx);
  if (takes_part(saved)) from_experts(rank, group, saved, back, returned, true);
  perform(RowsOfToken{tensor(returned),
                      tensor(places_of(saved)),
                      {},
                      tensor(dx),
                      dx.shape.back(),
                      line.choices,
                      wide},
          "rows of a token");
  gather_tokens(p, line, dx, gradients[0]);
  gather_tokens(p, line, dprobs, gradients[2]);
  sum_gradients(p, {{partial, dw}}, summed_over(rank.line()));
  if (rank.accumulates()) add_into(dw, gradients[3]);
}

}  // namespace shardproof::primitives
