// Products of tiles whose sums each thread of a team holds for itself, in fused multiplications:
//
//   dots   C[own row][other row] += sum over columns of own[row][column] other[row][column]
//   sums   C[own row][column]    += sum over other rows of
//                                   weight[own row][other row] other[other row][column]
//
// The order of a sum is that of its terms, whatever the team. Each is told what is in use of its
// extents; what lies beyond them holds zeros (Team::upto).
#pragma once
#include "primitives/tiles.hpp"

namespace shardproof::primitives {

// Threads as rows and columns; a warp of a device is 4 by 8 of them, so that it reads 4 units of
// one factor and 8 of the other at a time.
template <int rows_, int columns_>
struct ThreadGrid {
  static constexpr int rows = rows_, columns = columns_;
  SHARDPROOF_HD static int row(int thread) {
    if constexpr (rows * columns == 1)
      return 0;
    else
      return thread / (4 * columns) * 4 + thread % 32 / 8;
  }
  SHARDPROOF_HD static int column(int thread) {
    if constexpr (rows * columns == 1)
      return 0;
    else
      return thread / 32 % (columns / 8) * 8 + thread % 8;
  }
};

// A thread has every `Grid::rows`-th own row and every `Grid::columns`-th other one.
template <class Math, class Team>
class FusedDots {
  using A = typename Math::Sum;
  using Size = typename Team::template Size<Math>;
  using Grid = typename Team::Grid;
  static constexpr int rows = Size::own / Grid::rows, others = Size::other / Grid::columns,
                       unit = Unit<typename Math::Factor>::length;

 public:
  SHARDPROOF_HD explicit FusedDots(const Team& team)
      : row_(Grid::row(team.thread())), other_(Grid::column(team.thread())) {}
  SHARDPROOF_HD void clear() {
    SHARDPROOF_UNROLLED
    for (int i = 0; i < rows * others; ++i) sum_[i / others][i % others] = 0;
  }
  // Columns of `own` from `at` on.
  template <class Own, class Others>
  SHARDPROOF_HD void add(const Own& own, int at, const Others& other, Extent n) {
    SHARDPROOF_ROLLED
    for (int c = 0; c < n.columns; c += unit) {
      Unit<typename Math::Factor> b[others];
      SHARDPROOF_UNROLLED
      for (int j = 0; j < Team::upto(others, n.other); ++j)
        b[j] = other.unit_at(other_ + Grid::columns * j, c);
      SHARDPROOF_UNROLLED
      for (int i = 0; i < Team::upto(rows, n.own); ++i) {
        const auto a = own.unit_at(row_ + Grid::rows * i, at + c);
        SHARDPROOF_UNROLLED
        for (int j = 0; j < Team::upto(others, n.other); ++j) {
          SHARDPROOF_UNROLLED
          for (int e = 0; e < unit; ++e)
            sum_[i][j] = std::fma(Math::widen(a.at[e]), Math::widen(b[j].at[e]), sum_[i][j]);
        }
      }
    }
  }
  // f(own row, other row, sum) for what this thread holds.
  template <class F>
  SHARDPROOF_HD void each(Extent n, F f) {
    SHARDPROOF_UNROLLED
    for (int i = 0; i < Team::upto(rows, n.own); ++i) {
      SHARDPROOF_UNROLLED
      for (int j = 0; j < Team::upto(others, n.other); ++j)
        f(row_ + Grid::rows * i, other_ + Grid::columns * j, sum_[i][j]);
    }
  }

 private:
  int row_, other_;
  A sum_[rows][others];
};

// A thread has every `Grid::rows`-th own row and every `Grid::columns`-th unit of columns.
template <class Math, class Team>
class FusedSums {
  using A = typename Math::Sum;
  using Size = typename Team::template Size<Math>;
  using Grid = typename Team::Grid;
  static constexpr int unit = Unit<typename Math::Factor>::length, rows = Size::own / Grid::rows,
                       units = Size::strip / unit / Grid::columns;

 public:
  SHARDPROOF_HD explicit FusedSums(const Team& team)
      : row_(Grid::row(team.thread())), column_(Grid::column(team.thread()) * unit) {}
  // Weights from `at` on meet the rows of `other`. Careful: a weight of 0 is no term, so that what
  // it would be multiplied with may be anything.
  template <class Weights, class Others>
  SHARDPROOF_HD void add(const Team&, const Weights& weights, int at, const Others& other, Extent n,
                         bool careful) {
    careful ? add<true>(weights, at, other, n) : add<false>(weights, at, other, n);
  }
  // f(own row, column, sum) for what this thread holds.
  template <class F>
  SHARDPROOF_HD void each(Extent n, F f) {
    SHARDPROOF_UNROLLED
    for (int i = 0; i < Team::upto(rows, n.own); ++i) {
      SHARDPROOF_UNROLLED
      for (int j = 0; j < units_of(n); ++j) {
        SHARDPROOF_UNROLLED
        for (int e = 0; e < unit; ++e) f(row_ + Grid::rows * i, column(j) + e, sum_[i][j][e]);
      }
    }
  }

 private:
  SHARDPROOF_HD int column(int j) const { return column_ + Grid::columns * unit * j; }
  SHARDPROOF_HD static int units_of(Extent n) {
    return Team::upto(units, (n.columns + unit - 1) / unit);
  }
  template <bool careful, class Weights, class Others>
  SHARDPROOF_HD void add(const Weights& weights, int at, const Others& other, Extent n) {
    SHARDPROOF_ROLLED
    for (int k = 0; k < Team::upto(Others::rows, n.other); k += unit) {
      Unit<typename Math::Factor> w[rows];
      SHARDPROOF_UNROLLED
      for (int i = 0; i < Team::upto(rows, n.own); ++i)
        w[i] = weights.unit_at(row_ + Grid::rows * i, at + k);
      SHARDPROOF_UNROLLED
      for (int e = 0; e < Team::upto(unit, n.other - k < unit ? n.other - k : unit); ++e) {
        SHARDPROOF_UNROLLED
        for (int j = 0; j < units_of(n); ++j)
          add_unit<careful>(w, e, other.unit_at(k + e, column(j)), j, n);
      }
    }
  }
  template <bool careful, class Factors>
  SHARDPROOF_HD void add_unit(const Factors& w, int e, const Unit<typename Math::Factor>& v, int j,
                              Extent n) {
    SHARDPROOF_UNROLLED
    for (int i = 0; i < Team::upto(rows, n.own); ++i) {
      const A weight = Math::widen(w[i].at[e]);
      if (careful && weight == 0) continue;
      SHARDPROOF_UNROLLED
      for (int x = 0; x < unit; ++x)
        sum_[i][j][x] = std::fma(weight, Math::widen(v.at[x]), sum_[i][j][x]);
    }
  }

  int row_, column_;
  A sum_[rows][units][unit];
};

// The team of one. Its tiles are small, so that small tensors have several.
template <class Size_ = TileSize<16, 16, 64, 16, 8, 2>>
struct OneThread {
  static constexpr int threads = 1;
  using Grid = ThreadGrid<1, 1>;
  template <class Math>
  using Size = Size_;
  template <class Math>
  using Dots = FusedDots<Math, OneThread>;
  template <class Math>
  using Sums = FusedSums<Math, OneThread>;
  SHARDPROOF_HD int thread() const { return 0; }
  SHARDPROOF_HD void join() const {}
  SHARDPROOF_HD bool any(bool own) const { return own; }
  SHARDPROOF_HD bool all(bool own) const { return own; }
  SHARDPROOF_HD static int upto(int, int there) { return there; }
};

}  // namespace shardproof::primitives
