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

void StateContext::decays_of(Rank& rank, const View& logarithms, const View& decays) {
  perform(DecayOfLogarithm{tensor(logarithms), {}, tensor(decays), !in_single(rank.line())},
          "decays of their logarithms");
}

void StateContext::gradient_of_logarithms(Rank& rank, const View& of_decays, const View& decays,
                                          const View& gradient) {
  perform(DecayOfLogarithm{tensor(of_decays), tensor(decays), tensor(gradient),
                           !in_single(rank.line())},
          "the gradient of logarithms of decays");
}

View StateContext::factors(Rank& rank, const View& a, Kept& kept) {
  if (!decays_are_logarithms(rank.line())) return a;
  kept = Kept(accumulation_of(rank.line()), a.shape);
  decays_of(rank, a, kept.view());
  return kept.view();
}

View StateContext::decay_gradient(Rank& rank, const View& gradient) {
  const Case& line = rank.line();
  return decays_are_logarithms(line) ? rank.workspace(accumulation_of(line), gradient.shape)
                                     : gradient;
}

void StateContext::hand_out(Rank& rank, const View& of_decays, const View& decays,
                            const View& gradient) {
  if (decays_are_logarithms(rank.line())) gradient_of_logarithms(rank, of_decays, decays, gradient);
}

std::vector<int64_t> StateContext::reach(const ContextLine& c, int r) const {
  return tokens_before(c, r);
}

std::vector<int64_t> StateContext::passes(const ContextLine& c) const {
  std::vector<int64_t> list;
  for (int r = 0; r < c.ranks; ++r) {
    const auto of_block = tokens_before(c, r);
    list.push_back(*std::min_element(of_block.begin(), of_block.end()) > 0);
  }
  return list;
}

std::vector<int64_t> StateContext::before(int r, int) const {
  std::vector<int64_t> list;
  for (int i = 0; i < r; ++i) list.push_back(i);
  return list;
}

std::vector<int64_t> StateContext::behind(int r, int p) const {
  std::vector<int64_t> list;
  for (int i = p - 1; i > r; --i) list.push_back(i);
  return list;
}

void StateContext::gather(Rank& rank, const View& own, const View& all, bool) {
  all_gather(rank, rank.along(Axis::cp), own, all, 0);
}

View StateContext::decays(Rank&, const View& a) const { return a; }
View StateContext::decays_handed_on(Rank&, const View& a) const { return a; }
View StateContext::state_before(Rank&, const View& entering) const { return entering; }

}  // namespace shardproof::primitives
