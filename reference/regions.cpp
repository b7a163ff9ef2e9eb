// Every tensor is seen as [outer, extent of dim, inner], row-major; a block of dim is then a run of
// extent * inner elements in each outer row.
#include "reference/regions.hpp"

#include <functional>
#include <numeric>

namespace shardproof::reference {
namespace {

int64_t product(std::span<const int64_t> extents) {
  return std::accumulate(extents.begin(), extents.end(), int64_t{1}, std::multiplies<>());
}
int64_t outer(const Array& a, int dim) { return product({a.shape.data(), size_t(dim)}); }
int64_t inner(const Array& a, int dim) {
  return product({a.shape.data() + dim + 1, a.shape.size() - size_t(dim) - 1});
}
Array zeros(std::vector<int64_t> shape) {
  const int64_t n = product(shape);
  return {std::move(shape), std::vector<double>(size_t(n), 0.0)};
}
Array zeros_with(const Array& like, int dim, int64_t extent) {
  std::vector<int64_t> shape = like.shape;
  shape[size_t(dim)] = extent;
  return zeros(std::move(shape));
}

// Elements [start, start + extent of block) of dim in `whole` are those of `block`, in order.
template <class Move>
void for_block(const Array& whole, const Array& block, int dim, int64_t start, Move move) {
  const int64_t n = whole.shape[size_t(dim)], m = block.shape[size_t(dim)], k = inner(whole, dim);
  for (int64_t o = 0; o < outer(whole, dim); ++o)
    for (int64_t i = 0; i < m * k; ++i)
      move(size_t((o * n + start) * k + i), size_t(o * m * k + i));
}
Array cut(const Array& whole, int dim, int64_t start, int64_t extent) {
  Array block = zeros_with(whole, dim, extent);
  for_block(whole, block, dim, start, [&](size_t w, size_t b) { block.value[b] = whole.value[w]; });
  return block;
}
void place(const Array& block, Array& whole, int dim, int64_t start) {
  for_block(whole, block, dim, start, [&](size_t w, size_t b) { whole.value[w] = block.value[b]; });
}
int64_t extent_of_all(const Ranks& x, int dim) {
  int64_t n = 0;
  for (const Array& a : x) n += a.shape[size_t(dim)];
  return n;
}

}  // namespace

Ranks copies(const Array& whole, int ranks) { return Ranks(size_t(ranks), whole); }

Ranks blocks(const Array& whole, int dim, Extents extents) {
  return own_block(copies(whole, int(extents.size())), dim, extents);
}

Array joined(const Ranks& x, int dim) {
  Array whole = zeros_with(x[0], dim, extent_of_all(x, dim));
  int64_t start = 0;
  for (const Array& block : x) {
    place(block, whole, dim, start);
    start += block.shape[size_t(dim)];
  }
  return whole;
}

Array total(const Ranks& x) {
  Array sum = zeros(x[0].shape);
  for (const Array& a : x)
    for (size_t i = 0; i < sum.value.size(); ++i) sum.value[i] += a.value[i];
  return sum;
}

Ranks all_reduce(const Ranks& x) { return copies(total(x), int(x.size())); }

Ranks all_gather(const Ranks& x, int dim) { return copies(joined(x, dim), int(x.size())); }

Ranks reduce_scatter(const Ranks& x, int dim, Extents extents) {
  return blocks(total(x), dim, extents);
}

Ranks own_block(const Ranks& x, int dim, Extents extents) {
  Ranks y;
  int64_t start = 0;
  for (size_t r = 0; r < x.size(); ++r) {
    y.push_back(cut(x[r], dim, start, extents[r]));
    start += extents[r];
  }
  return y;
}

Ranks in_zeros(const Ranks& x, int dim) {
  Ranks y;
  int64_t start = 0;
  for (const Array& block : x) {
    y.push_back(zeros_with(block, dim, extent_of_all(x, dim)));
    place(block, y.back(), dim, start);
    start += block.shape[size_t(dim)];
  }
  return y;
}

Ranks first_only(const Ranks& x) {
  Ranks y;
  for (const Array& a : x) y.push_back(y.empty() ? a : zeros(a.shape));
  return y;
}

Ranks scaled(const Ranks& x, double factor) {
  Ranks y = x;
  for (Array& a : y)
    for (double& v : a.value) v *= factor;
  return y;
}

Ranks exchange(const Ranks& x, int split_dim, int join_dim, Extents split) {
  Ranks y;
  int64_t start = 0;
  for (const int64_t extent : split) {
    Ranks received;
    for (const Array& sender : x) received.push_back(cut(sender, split_dim, start, extent));
    y.push_back(joined(received, join_dim));
    start += extent;
  }
  return y;
}

}  // namespace shardproof::reference
