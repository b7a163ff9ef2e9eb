#include "primitives/expert_layer.hpp"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>

#include "primitives/expert_rows.hpp"
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

}  // namespace

int64_t SentRows::of(int64_t member, int64_t share, int64_t first, int64_t n) const {
  const auto from = counts.begin() + (member * shares + share) * experts + first;
  return sum_of({from, from + n});
}

int64_t SentRows::arriving(int64_t receiver, int64_t share) const {
  int64_t rows = 0;
  for (int64_t a = 0; a < members; ++a) rows += to(receiver, a, share);
  return rows;
}

int64_t SentRows::rows_of(int64_t expert) const {
  int64_t rows = 0;
  for (int64_t a = 0; a < members; ++a)
    for (int64_t i = 0; i < shares; ++i) rows += of(a, i, expert, 1);
  return rows;
}

int64_t SentRows::block(int64_t receiver) const {
  int64_t most = 0;
  for (int64_t i = 0; i < shares; ++i) most = std::max(most, arriving(receiver, i));
  return most;
}

int64_t Dispatch::arriving() const { return sum_of(received); }

View rows_like(Rank& rank, int64_t rows, const View& like) {
  return rank.workspace(like.dtype, {rows, like.shape.back()});
}

ExpertPlace ExpertLayer::place_of(int64_t expert, int64_t experts, int64_t members) const {
  const int64_t own = experts / members;
  return {expert / own, expert % own};
}

Numbers ExpertLayer::by_priority(int64_t slots, int64_t choices) const {
  Numbers order;
  for (int64_t j = 0; j < choices; ++j)
    for (int64_t slot = j; slot < slots; slot += choices) order.push_back(slot);
  return order;
}

void ExpertLayer::take_rows(const View& from, const View& index, const View& to) const {
  perform(TakeRows{tensor(from), tensor(index), tensor(to), from.shape.back()}, "rows by a list");
}

Numbers ExpertLayer::order_of(const SentRows& sent, int64_t me) const {
  const int64_t own = sent.own(), block = sent.block(me);
  Numbers next;  // by share, then member: its first row that has no place yet
  for (int64_t i = 0; i < sent.shares; ++i) {
    int64_t at = i * block;
    for (int64_t a = 0; a < sent.members; at += sent.to(me, a++, i)) next.push_back(at);
  }
  Numbers order;
  for (int64_t e = 0; e < own; ++e)
    for (int64_t i = 0; i < sent.shares; ++i)
      for (int64_t a = 0; a < sent.members; ++a)
        for (int64_t n = sent.of(a, i, me * own + e, 1); n > 0; --n)
          order.push_back(next[size_t(i * sent.members + a)]++);
  return order;
}

View ExpertLayer::gathered(Parallel&, const ExpertSaved&, const View& arrived) const {
  return arrived;
}
View ExpertLayer::reduced(Parallel&, const ExpertSaved&, const View& results, Phase) const {
  return results;
}
bool ExpertLayer::gathers(const ExpertLine&) const { return false; }
bool ExpertLayer::cuts_tokens(const ExpertLine& line) const { return line.replicated; }
int ExpertLayer::share_of(Parallel& p) const { return p.tp.rank(); }
View ExpertLayer::weights(Rank&, const ExpertSaved& saved) const { return saved.probs; }
View ExpertLayer::places_of(const ExpertSaved& saved) const { return saved.places.view(); }
void ExpertLayer::idle_expert(const View& gradient) const { set_zero(gradient); }
const View& ExpertLayer::way_back(const ExpertSaved& saved, Phase) const {
  return saved.back.view();
}
bool ExpertLayer::takes_part(const ExpertSaved&) const { return true; }

std::vector<Axis> ExpertLayer::summed_over(const Case& line) const {
  return with_ranks(line, {Axis::cp, Axis::dp});
}

void ExpertLayer::sum_gradients(Parallel& p, const Parts& parts, const std::vector<Axis>& axes) {
  coalesced_all_reduce(p, parts, axes);
}

void ExpertLayer::rows_of_tokens(Rank&, const ExpertSaved&, const View& x, const View& tokens,
                                 const View& to) const {
  take_rows(x, tokens, to);
}

void ExpertLayer::prob_gradient(Rank& rank, const ExpertSaved& saved, const View& g,
                                const View& to) const {
  const View& z = saved.results.view();
  perform(ProbGradient{tensor(g), tensor(z), tensor(places_of(saved)), tensor(to), z.shape.back(),
                       ExpertLine(rank.line()).choices, !in_single(rank.line())},
          "gradients of weights");
}

Numbers ExpertLayer::all_counts(Rank& rank, Communicator& group, const Numbers& mine) const {
  const int64_t experts = int64_t(mine.size());
  const Kept counted = uploaded(mine);
  const View all = rank.workspace(DType::i64, {group.size(), experts});
  all_gather(rank, group, view_of(counted.view().data, DType::i64, {1, experts}, all.space), all,
             0);
  return downloaded(all);
}

Communicator& ExpertLayer::senders(Rank& rank, const ExpertLine& line) const {
  return rank.along(gathers(line) ? line.axes_of_shares : line.axes);
}

Numbers ExpertLayer::all_rows(Rank& rank, const ExpertLine& line, const Numbers& by_slot,
                              Dispatch& d) const {
  Communicator& group = senders(rank, line);
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

Numbers ExpertLayer::rows_within_capacity(Rank& rank, const ExpertLine& line,
                                          const Numbers& by_slot, Dispatch& d) const {
  d.slots.assign(size_t(line.experts * line.capacity), -1);
  Numbers taken(static_cast<size_t>(line.experts));
  for (int64_t slot : by_priority(int64_t(by_slot.size()), line.choices)) {
    const int64_t expert = by_slot[size_t(slot)], place = taken[size_t(expert)]++;
    if (place < line.capacity) d.slots[size_t(expert * line.capacity + place)] = slot;
  }
  return Numbers(size_t(senders(rank, line).size() * line.experts), line.capacity);
}

// The place of each choice's expert among all: by member, then by own number.
Numbers ExpertLayer::experts_of(const ExpertLine& line, int64_t members, const View& chosen) const {
  const int64_t own = line.experts / members;
  Numbers by_slot = downloaded(chosen);
  for (int64_t& expert : by_slot) {
    if (expert < 0 || expert >= line.experts)
      throw std::invalid_argument("expected an expert from 0 to " +
                                  std::to_string(line.experts - 1) + ", met " +
                                  std::to_string(expert));
    const ExpertPlace place = place_of(expert, line.experts, members);
    expert = place.member * own + place.own;
  }
  return by_slot;
}

void ExpertLayer::plan(Parallel& p, const ExpertLine& line, const View& chosen,
                       ExpertSaved& saved) const {
  Communicator& group = p.rank.along(line.axes);
  SentRows all{group.size(), senders(p.rank, line).size() / group.size(), line.experts, {}};
  const int64_t me = group.rank(), share = all.shares > 1 ? p.tp.rank() : 0;
  const Numbers by_slot = experts_of(line, all.members, chosen);
  Dispatch& d = saved.dispatch;
  all.counts = line.capacity > 0 ? rows_within_capacity(p.rank, line, by_slot, d)
                                 : all_rows(p.rank, line, by_slot, d);
  for (int64_t a = 0; a < all.members; ++a) {
    d.received.push_back(all.to(me, a, share));
    d.sent.push_back(all.to(a, me, share));
  }
  d.block = all.block(me), d.shares = all.shares;
  for (int64_t e = 0; e < all.own(); ++e) d.rows_of.push_back(all.rows_of(me * all.own() + e));
  d.order = order_of(all, me);
  saved.slots = uploaded(d.slots);
  saved.places = uploaded(inverse(d.slots, by_slot.size()));
  saved.order = uploaded(d.order);
  saved.back = uploaded(inverse(d.order, size_t(d.shares * d.block)));
}

// ---- Tokens that all ranks of tp hold

View ExpertLayer::own_tokens(Parallel& p, const ExpertLine& line, const View& all) const {
  if (!cuts_tokens(line)) return all;
  const int64_t own = all.shape[0] / p.tp.size();
  return all.narrow(0, own * share_of(p), own);
}

View ExpertLayer::own_result(Parallel& p, const ExpertLine& line, const View& all) const {
  if (!cuts_tokens(line)) return all;
  return p.workspace(all.dtype, with_extent(all.shape, 0, all.shape[0] / p.tp.size()));
}

void ExpertLayer::gather_tokens(Parallel& p, const ExpertLine& line, const View& own,
                                const View& all) const {
  if (cuts_tokens(line)) all_gather(p.rank, p.tp, own, all, 0);
}

// ---- The two ways

// Rows as they leave -> rows by own expert.
View ExpertLayer::to_experts(Parallel& p, Communicator& group, const ExpertSaved& saved,
                             const View& rows) const {
  const Dispatch& d = saved.dispatch;
  const View arrived = rows_like(p.rank, d.arriving(), rows);
  all_to_all(p.rank, group, rows, arrived, 0, 0, d.sent, d.received);
  const View all = gathered(p, saved, arrived), by_expert = rows_like(p.rank, d.rows(), rows);
  take_rows(all, saved.order.view(), by_expert);
  return by_expert;
}

void ExpertLayer::from_experts(Parallel& p, Communicator& group, const ExpertSaved& saved,
                               const View& by_expert, const View& to, Phase phase) const {
  const Dispatch& d = saved.dispatch;
  const View results = rows_like(p.rank, d.shares * d.block, by_expert);
  take_rows(by_expert, way_back(saved, phase), results);
  all_to_all(p.rank, group, reduced(p, saved, results, phase), to, 0, 0, d.received, d.sent);
}

std::unique_ptr<Saved> ExpertLayer::forward(Rank& rank, std::span<const View> inputs,
                                            std::span<const View> outputs) {
  if (auto refused = refused_experts(rank.line())) throw *refused;
  Parallel p(rank);
  const ExpertLine line(rank.line());
  Communicator& group = rank.along(line.axes);
  auto state = saved();
  const View x = own_tokens(p, line, inputs[0]);
  state->probs = own_tokens(p, line, inputs[2]);
  state->w.assign(inputs.begin() + 3, inputs.end());
  plan(p, line, own_tokens(p, line, inputs[1]), *state);
  const Dispatch& d = state->dispatch;
  const int64_t rows = int64_t(d.slots.size());

  Numbers tokens = d.slots;
  for (int64_t& slot : tokens) slot = slot < 0 ? -1 : slot / line.choices;
  const Kept by_token = uploaded(tokens);
  const View leaving = rows_like(rank, rows, x);
  rows_of_tokens(rank, *state, x, by_token.view(), leaving);
  const View arrived = to_experts(p, group, *state, leaving);
  state->rows = Kept(x.dtype, arrived.shape);
  convert(arrived, state->rows.view());

  const View y = own_result(p, line, outputs[0]),
             z = p.workspace(result_type(p), {d.rows(), y.shape.back()});
  run_experts(p, *state, z);
  state->results = Kept(y.dtype, {rows, y.shape.back()});
  from_experts(p, group, *state, z, state->results.view(), Phase::forward);

  perform(RowsOfToken{tensor(state->results.view()), tensor(places_of(*state)),
                      tensor(weights(rank, *state)), tensor(y), y.shape.back(), line.choices,
                      !in_single(rank.line())},
          "rows of a token");
  gather_tokens(p, line, y, outputs[0]);
  return state;
}

void ExpertLayer::backward(Rank& rank, Saved& state, std::span<const View> cotangents,
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
  const View of_rows = to_experts(p, group, saved, leaving),
             back = p.workspace(result_type(p), {d.rows(), dx.shape.back()});
  Parts parts;
  std::vector<View> partials;
  for (const View& own : gradients.subspan(3)) {
    const View dw = rank.accumulates() ? fresh_gradient(p, own) : own;
    partials.push_back(partial_like(p, dw));
    parts.push_back({partials.back(), dw});
  }
  run_backward(p, saved, of_rows, back, partials);
  const View returned = rows_like(rank, rows, dx);
  if (takes_part(saved)) from_experts(p, group, saved, back, returned, Phase::backward);
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
  sum_gradients(p, parts, summed_over(rank.line()));
  if (!rank.accumulates()) return;
  for (size_t i = 0; i < parts.size(); ++i) add_into(parts[i].result, gradients[3 + i]);
}

}  // namespace shardproof::primitives
