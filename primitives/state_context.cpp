#include "primitives/state_context.hpp"

#include <algorithm>

#include "primitives/calls.hpp"

namespace shardproof::primitives {

Summaries summaries(const View& all, int64_t entries) {
  return {all.narrow(1, 0, entries), all.narrow(1, entries, all.shape[1] - entries)};
}

StateExtents::StateExtents(const View& q, const View& v, int64_t batch)
    : tokens(q.elements() / q.shape.back() / q.shape[q.shape.size() - 2]),
      batch(batch),
      heads(q.shape[q.shape.size() - 2]),
      key_dim(q.shape.back()),
      value_dim(v.shape.back()) {}

void WithDecays::decays_of(Rank& rank, const View& logarithms, const View& decays) {
  perform(DecayOfLogarithm{tensor(logarithms), {}, tensor(decays), !in_single(rank.line())},
          "decays of their logarithms");
}

void WithDecays::gradient_of_logarithms(Rank& rank, const View& of_decays, const View& decays,
                                        const View& gradient) {
  perform(DecayOfLogarithm{tensor(of_decays), tensor(decays), tensor(gradient),
                           !in_single(rank.line())},
          "the gradient of logarithms of decays");
}

View WithDecays::factors(Rank& rank, const View& a, Kept& kept) {
  if (!decays_are_logarithms(rank.line())) return a;
  kept = Kept(accumulation_of(rank.line()), a.shape);
  decays_of(rank, a, kept.view());
  return kept.view();
}

View WithDecays::decay_gradient(Rank& rank, const View& gradient) {
  const Case& line = rank.line();
  return decays_are_logarithms(line) ? rank.workspace(accumulation_of(line), gradient.shape)
                                     : gradient;
}

void WithDecays::hand_out(Rank& rank, const View& of_decays, const View& decays,
                          const View& gradient) {
  if (decays_are_logarithms(rank.line())) gradient_of_logarithms(rank, of_decays, decays, gradient);
}

std::vector<int64_t> StateContext::reach(const ContextLine& c, int r) const {
  return tokens_before(c, r);
}

std::vector<int64_t> StateContext::passes(const ContextLine& c) const {
  std::vector<int64_t> list;
  const Blocks blocks(c);
  for (int r = 0; r < c.ranks; ++r) {
    const auto of_rank = tokens_before(c, r);
    const auto n = std::ptrdiff_t(of_rank.size()) / blocks.each;
    for (auto block = of_rank.begin(); block != of_rank.end(); block += n)
      list.push_back(*std::min_element(block, block + n) > 0);
  }
  return list;
}

int StateContext::place(const Blocks& b, int r, int i) const {
  return i == 0 ? r : b.count() - 1 - r;
}

int64_t StateContext::row_of(const Blocks& b, int64_t place) const {
  return place < b.ranks ? place * b.each : (b.count() - 1 - place) * b.each + 1;
}

std::vector<int64_t> StateContext::before(int place, int) const {
  std::vector<int64_t> list;
  for (int i = 0; i < place; ++i) list.push_back(i);
  return list;
}

std::vector<int64_t> StateContext::behind(int place, int p) const {
  std::vector<int64_t> list;
  for (int i = p - 1; i > place; --i) list.push_back(i);
  return list;
}

void StateContext::fold_all(Rank& rank, const Blocks& blocks, const Summaries& all,
                            const View& states, bool backward) {
  const int r = rank.along(Axis::cp).rank();
  for (int n = 0; n < blocks.each; ++n) {
    const int i = backward ? blocks.each - 1 - n : n, at = place(blocks, r, i);
    auto chain = backward ? behind(at, blocks.count()) : before(at, blocks.count());
    for (int64_t& block : chain) block = row_of(blocks, block);
    fold(rank, all, chain, states.narrow(0, i, 1), backward);
  }
}

void StateContext::gather(Rank& rank, const View& own, const View& all, bool) {
  all_gather(rank, rank.along(Axis::cp), own, all, 0);
}

View StateContext::decays(Rank&, const View& a) const { return a; }
View StateContext::decays_handed_on(Rank&, const View& a) const { return a; }
View StateContext::state_before(Rank&, const View& entering) const { return entering; }

}  // namespace shardproof::primitives
