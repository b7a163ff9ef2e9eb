// Products of tiles of halves by the tensor cores of a block's warps, sums in f32 where each lane
// holds its own (warp_matrix.cuh). Warps are two by two over a product: each has half of the own
// rows and half of the other rows or columns.
#pragma once
#include "primitives/cuda/warp_matrix.cuh"
#include "primitives/tile_products.hpp"

namespace shardproof::primitives::cuda {

// A warp's part of a product: `down` matrices of 16 rows by `across` of 8 columns.
template <Number half, int down, int across>
class WarpSums {
 public:
  __device__ WarpSums(int thread, int rows, int columns)
      : lane_(thread % 32),
        row_(thread / 32 / 2 * (rows / 2)),
        column_(thread / 32 % 2 * (columns / 2)) {}
  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < down * across * 4; ++i) sum_[i / across / 4][i / 4 % across][i % 4] = 0;
  }
  // 16 terms: those of `a` from column `at` on, of `b` from `k` on. Rows of b are columns of the
  // product, or, turned, terms.
  template <bool turned, class A, class B>
  __device__ void add(const A& a, int at, const B& b, int k) {
    if constexpr (has_warp_matrices)
      add_matrices<turned>(a, at, b, k);
    else
      add_terms<turned>(a, at, b, k);
  }
  // f(row, column, sum) for what this lane holds.
  template <class F>
  __device__ void each(F f) {
#pragma unroll
    for (int i = 0; i < down; ++i) {
#pragma unroll
      for (int j = 0; j < across; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e)
          f(row_ + 16 * i + lane_ / 4 + e / 2 * 8, column_ + 8 * j + lane_ % 4 * 2 + e % 2,
            sum_[i][j][e]);
      }
    }
  }

 private:
  template <bool turned, class A, class B>
  __device__ void add_matrices(const A& a, int at, const B& b, int k) {
    uint32_t factors[down][4];
#pragma unroll
    for (int i = 0; i < down; ++i)
      load_matrices<false>(factors[i], &a.at(row_ + 16 * i + lane_ % 16, at + lane_ / 16 * 8));
#pragma unroll
    for (int j = 0; j < across; j += 2) {
      uint32_t others[4];
      const int column = column_ + 8 * j, high = lane_ / 16 * 8, low = lane_ / 8 % 2 * 8;
      if constexpr (turned)
        load_matrices<true>(others, &b.at(k + low + lane_ % 8, column + high));
      else
        load_matrices<false>(others, &b.at(column + high + lane_ % 8, k + low));
#pragma unroll
      for (int i = 0; i < down; ++i) {
        multiply_matrices<half>(sum_[i][j], factors[i], others[0], others[1]);
        multiply_matrices<half>(sum_[i][j + 1], factors[i], others[2], others[3]);
      }
    }
  }
  // On devices before 8.0.
  template <bool turned, class A, class B>
  __device__ void add_terms(const A& a, int at, const B& b, int k) {
    using Factors = Halves<half>;
    each([&](int row, int column, float& sum) {
#pragma unroll 1
      for (int i = k; i < k + 16; ++i)
        sum = std::fma(Factors::widen(a.at(row, at + i - k)),
                       Factors::widen(turned ? b.at(i, column) : b.at(column, i)), sum);
    });
  }

  int lane_, row_, column_;
  float sum_[down][across][4];
};

template <class Math, class Team>
class TensorDots {
  using Size = typename Team::template Size<Math>;

 public:
  __device__ explicit TensorDots(const Team& team) : sums_(team.thread(), Size::own, Size::other) {}
  __device__ void clear() { sums_.clear(); }
  template <class Own, class Others>
  __device__ void add(const Own& own, int at, const Others& other, Extent n) {
#pragma unroll 2
    for (int k = 0; k < n.columns; k += 16) sums_.template add<false>(own, at + k, other, k);
  }
  template <class F>
  __device__ void each(Extent, F f) {
    sums_.each(f);
  }

 private:
  WarpSums<Math::number, Size::own / 32, Size::other / 16> sums_;
};

template <class Math, class Team>
class TensorSums {
  using Size = typename Team::template Size<Math>;

 public:
  __device__ explicit TensorSums(const Team& team) : sums_(team.thread(), Size::own, Size::strip) {}
  // Where a weight of 0 would meet what is not finite, terms are added one by one instead.
  template <class Weights, class Others>
  __device__ void add(const Team& team, const Weights& weights, int at, const Others& other,
                      Extent n, bool careful) {
    if (careful && team.any(!finite(team, other))) return add_terms(weights, at, other, n);
#pragma unroll 2
    for (int k = 0; k < n.other; k += 16) sums_.template add<true>(weights, at + k, other, k);
  }
  template <class F>
  __device__ void each(Extent, F f) {
    sums_.each(f);
  }

 private:
  template <class Others>
  __device__ static bool finite(const Team& team, const Others& other) {
    constexpr uint16_t infinity = Math::number == Number::bf16 ? 0x7F80 : 0x7C00;
    bool all = true;
    for (int i = team.thread(); i < Others::rows * Others::columns; i += Team::threads)
      all = all && (other.at(i / Others::columns, i % Others::columns) & infinity) != infinity;
    return all;
  }
  template <class Weights, class Others>
  __device__ void add_terms(const Weights& weights, int at, const Others& other, Extent n) {
#pragma unroll 1
    for (int k = 0; k < n.other; ++k)
      sums_.each([&](int row, int column, float& sum) {
        const float weight = Math::widen(weights.at(row, at + k));
        const float with = std::fma(weight, Math::widen(other.at(k, column)), sum);
        sum = weight != 0 ? with : sum;  // no branch, so that a row's and a column's are read once
      });
  }

  WarpSums<Math::number, Size::own / 32, Size::strip / 16> sums_;
};

}  // namespace shardproof::primitives::cuda
