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
