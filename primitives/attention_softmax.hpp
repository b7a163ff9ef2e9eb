// The softmax of rows whose scores come tile by tile:
//
//   merging a tile into (m, l, a):  m' = max(m, m_t)   l' = e^(m-m') l + sum e^(s-m')
//                                   a' = e^(m-m') a + sum e^(s-m') v
//
// A pair that is masked has the score -inf and the weight 0. Parts of a row are summed each for
// itself, and the parts in their order, so that the sum does not depend on the team.
#pragma once
#include <cmath>
#include <type_traits>

#include "primitives/attention_walk.hpp"

namespace shardproof::primitives {

template <class Math, class Team>
struct SoftmaxRoom : WalkRoom<Math, Team, 1> {
  using Size = typename Team::template Size<Math>;
  using A = typename Math::Sum;
  A top[Size::own], sum[Size::own], kept[Size::own];  // m, l, e^(m-m')
  A part[Size::parts][Size::own];
};

// f(row, part, its first column, behind its last): of those that this thread has.
template <class Size, class Team, class F>
SHARDPROOF_HD void each_part(const Team& team, Extent n, F f) {
  constexpr int columns = Size::other / Size::parts;
  const int rows = Team::upto(Size::own, n.own), there = Team::upto(Size::other, n.other);
  for (int i = team.thread(); i < rows * Size::parts; i += Team::threads) {
    const int first = i / rows * columns, last = first + columns;
    if (first < there) f(i % rows, i / rows, first, last < there ? last : there);
  }
}

// Products of a part of a row become scores, score(row, column, product); the greatest of them.
template <class Tiles, class Score>
SHARDPROOF_HD auto greatest_score(Tiles& tiles, int row, int first, int last, Score score) {
  using A = std::remove_reference_t<decltype(tiles.scores.at(0, 0))>;
  A greatest = -A(INFINITY);
  SHARDPROOF_ROLLED
  for (int c = first; c < last; c += Unit<A>::length) {
    Unit<A> s = tiles.scores.unit_at(row, c);
    SHARDPROOF_UNROLLED
    for (int e = 0; e < Unit<A>::length; ++e) {
      s.at[e] = c + e < last ? score(row, c + e, s.at[e]) : -A(INFINITY);
      greatest = greatest < s.at[e] ? s.at[e] : greatest;
    }
    tiles.scores.put(row, c, s);
  }
  return greatest;
}

// e^(s-m') of a part of a row, as weights; their sum.
template <class Math, class Tiles>
SHARDPROOF_HD typename Math::Sum weigh(Tiles& tiles, int row, int first, int last,
                                       typename Math::Sum top) {
  using A = typename Math::Sum;
  constexpr int unit = Unit<typename Math::Factor>::length, in_scores = Unit<A>::length;
  A added = 0;
  SHARDPROOF_ROLLED
  for (int c = first; c < last; c += unit) {
    Unit<typename Math::Factor> w;
    SHARDPROOF_UNROLLED
    for (int u = 0; u < unit; u += in_scores) {
      const Unit<A> s = tiles.scores.unit_at(row, c + u);
      SHARDPROOF_UNROLLED
      for (int e = 0; e < in_scores; ++e) {
        const A p = c + u + e >= last || s.at[e] == -A(INFINITY) ? A(0) : std::exp(s.at[e] - top);
        added += p;
        w.at[u + e] = Math::narrow(p);
      }
    }
    tiles.weights().put(row, c, w);
  }
  return added;
}

// Products of the room become scores and these weights, and m, l and e^(m-m') of its rows are
// brought up to them.
template <class Math, class Team, class Score>
SHARDPROOF_HD void merge_scores(const Team& team, SoftmaxRoom<Math, Team>& room, Extent n,
                                Score score) {
  using A = typename Math::Sum;
  using Size = typename Team::template Size<Math>;
  const int rows = Team::upto(Size::own, n.own);
  team.join();
  for (int i = team.thread(); i < rows * Size::parts; i += Team::threads)
    room.part[i / rows][i % rows] = -A(INFINITY);
  each_part<Size>(team, n, [&](int r, int p, int first, int last) {
    room.part[p][r] = greatest_score(room.score, r, first, last, score);
  });
  team.join();
  for (int r = team.thread(); r < rows; r += Team::threads) {
    const A before = room.top[r];
    A top = before;
    for (int p = 0; p < Size::parts; ++p) top = top < room.part[p][r] ? room.part[p][r] : top;
    room.top[r] = top;
    room.kept[r] = top == -A(INFINITY) ? A(1) : std::exp(before - top);
  }
  team.join();
  for (int i = team.thread(); i < rows * Size::parts; i += Team::threads)
    room.part[i / rows][i % rows] = 0;
  each_part<Size>(team, n, [&](int r, int p, int first, int last) {
    room.part[p][r] = weigh<Math>(room.score, r, first, last, room.top[r]);
  });
  team.join();
  for (int r = team.thread(); r < rows; r += Team::threads) {
    A added = 0;
    for (int p = 0; p < Size::parts; ++p) added += room.part[p][r];
    room.sum[r] = std::fma(room.kept[r], room.sum[r], added);
  }
}

}  // namespace shardproof::primitives
