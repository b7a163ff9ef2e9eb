// Bodies of blockwise attention: a tile of rows against the keys of one block, or of keys against
// the rows that see them, tile by tile, so that no matrix of all scores exists. Pairs that are
// masked are no terms of any sum: padding may hold anything.
//
//   p = e^(s-lse)   ds = scale p (g.v - delta) (1 - tanh^2)   delta = g.o - g_lse
//   dq = sum ds k   dk = sum ds q   dv = sum p g
//
// A result wider than a strip is made strip by strip, each with the scores of its own. Nothing is
// added up by more than one team, so that bits do not depend on which comes first.
#pragma once
#include "primitives/attention_softmax.hpp"

namespace shardproof::primitives {

struct NoRow {
  SHARDPROOF_HD void operator()(int, int64_t) const {}
};

// How tiles of a side's rows are numbered: groups of heads side by side.
template <class Size>
SHARDPROOF_HD int64_t tiles_of(const AttentionSide& side, int64_t groups) {
  return (side.count() + Size::own - 1) / Size::own * groups;
}

// Merges a block of keys into m, l [queries, heads] and a [queries, heads, dv].
struct AttendBlock {
  static constexpr Shape shape = Shape::tiles;
  static constexpr int blocks = 3;
  AttentionPairs of;
  Tensor m, l, a;
  template <class F>
  void each_tensor(F f) {
    of.each_tensor(f), f(m), f(l), f(a);
  }
  Number factors() const { return of.factors; }
  template <class Math, class Team>
  using Room = SoftmaxRoom<Math, Team>;
  template <class Math, class Team>
  SHARDPROOF_HD int64_t tiles() const {
    return tiles_of<typename Team::template Size<Math>>(of.query_side(0), of.kv_heads);
  }
  // The last queries come first: under a causal mask they see the most.
  template <class Math, class Team>
  SHARDPROOF_HD void tile(int64_t i, const Team& team, Room<Math, Team>& room) const {
    using Size = typename Team::template Size<Math>;
    const int64_t from_last = tiles<Math, Team>() - 1 - i;
    const AttentionSide own = of.query_side(from_last % of.kv_heads),
                        other = of.key_side(from_last % of.kv_heads);
    AttentionWalk<Math, Team, 1> walk(team, room, of, own, from_last / of.kv_heads * Size::own,
                                      other, false, NoRow{});
    for (int64_t strip = 0; strip == 0 || strip < of.value_dim; strip += Size::strip)
      attend(team, room, walk, strip);
    each_row(team, walk.extent(), [&](int r) {
      m.store(room.own_rows.line[r], room.top[r]);
      l.store(room.own_rows.line[r], room.sum[r]);
    });
  }

 private:
  template <class Team, class F>
  SHARDPROOF_HD static void each_row(const Team& team, Extent n, F f) {
    for (int r = team.thread(); r < n.own; r += Team::threads) f(r);
  }
  template <class Math, class Team>
  SHARDPROOF_HD void attend(const Team& team, SoftmaxRoom<Math, Team>& room,
                            AttentionWalk<Math, Team, 1>& walk, int64_t strip) const {
    using A = typename Math::Sum;
    typename Team::template Sums<Math> sums(team);
    walk.take(a, of.value_dim, strip, sums);
    each_row(team, walk.extent(), [&](int r) {
      room.top[r] = m.load<A>(room.own_rows.line[r]);
      room.sum[r] = l.load<A>(room.own_rows.line[r]);
    });
    for (walk.again(); walk.next(NoRow{});) {
      {
        typename Team::template Dots<Math> dots(team);
        walk.multiply(0, dots);
        walk.put_scores(dots);
      }
      merge_scores<Math>(team, room, walk.extent(), [&](int r, int c, A dot) {
        A slope;
        return walk.sees(r, c) ? of.score(dot, slope) : -A(INFINITY);
      });
      sums.each(walk.extent(of.value_dim - strip),
                [&](int r, int, A& sum) { sum *= room.kept[r]; });
      walk.add(1, strip, sums);
    }
    walk.give(sums, a, of.value_dim, strip);
  }
};

// o = a / l and lse = m + log l; a row that saw nothing has 0 and -inf. Twice: for the caller, and
// in the accumulation type for the backward.
struct AttentionOutput {
  static constexpr Shape shape = Shape::elements;
  Tensor m, l, a, o, lse, kept_o, kept_lse;
  int64_t value_dim = 1;
  bool wide = false;
  template <class F>
  void each_tensor(F f) {
    f(m), f(l), f(a), f(o), f(lse), f(kept_o), f(kept_lse);
  }
  SHARDPROOF_HD int64_t count() const { return a.elements; }
  template <class A>
  SHARDPROOF_HD void in(int64_t i) const {
    const int64_t r = i / value_dim;
    const A sum = l.load<A>(r), value = sum == 0 ? A(0) : a.load<A>(i) / sum;
    o.store(i, value);
    kept_o.store(i, value);
    if (i % value_dim != 0) return;
    const A total = sum == 0 ? -A(INFINITY) : A(m.load<A>(r) + std::log(sum));
    lse.store(r, total);
    kept_lse.store(r, total);
  }
  SHARDPROOF_HD void at(int64_t i) const { wide ? in<double>(i) : in<float>(i); }
};

struct AttentionDelta {
  static constexpr Shape shape = Shape::rows;
  Tensor o, g, g_lse, delta;
  int64_t value_dim = 1;
  bool wide = false;
  template <class F>
  void each_tensor(F f) {
    f(o), f(g), f(g_lse), f(delta);
  }
  SHARDPROOF_HD int64_t rows() const { return delta.elements; }
  template <class A, class Team>
  SHARDPROOF_HD void row(int64_t r, const Team& team) const {
    A own = 0;
    for (int64_t c = team.first(); c < value_dim; c += team.step())
      own += o.load<A>(r * value_dim + c) * g.load<A>(r * value_dim + c);
    const A sum = team.sum(own);
    if (team.leads()) delta.store(r, g_lse.there() ? A(sum - g_lse.load<A>(r)) : sum);
  }
};

// What a pair of a row (query, head) and a key gives back rests on these.
struct AttentionPull {
  AttentionPairs of;
  Tensor g, lse, delta;
  template <class F>
  void each_tensor(F f) {
    of.each_tensor(f), f(g), f(lse), f(delta);
  }
  SHARDPROOF_HD AttentionSide side(bool keys, int64_t group) const {
    return keys ? of.key_side(group) : of.query_side(group, &g);
  }
};

template <class Math, class Team, int held>
struct PullRoom : WalkRoom<Math, Team, held> {
  using Size = typename Team::template Size<Math>;
  static constexpr int rows = Size::own < Size::other ? Size::other : Size::own;
  typename Math::Sum lse[rows], delta[rows];  // of the queries of the tile
};

// The statistics of queries to the room, as their rows are listed.
template <class Room>
struct StatisticsOf {
  const AttentionPull& pull;
  Room& room;
  bool due;
  SHARDPROOF_HD void operator()(int r, int64_t line) const {
    if (!due || line < 0) return;
    using A = std::remove_reference_t<decltype(room.lse[0])>;
    room.lse[r] = pull.lse.template load<A>(line);
    room.delta[r] = pull.delta.template load<A>(line);
  }
};

// p of a pair, times the slope of the softcap where that is asked for; 0 where it is masked.
template <bool with_slope, class Walk, class A>
SHARDPROOF_HD A probability(const AttentionPull& pull, const Walk& walk, int own, int other, A dot,
                            A lse) {
  if (!walk.sees(own, other)) return 0;
  A slope;
  const A p = std::exp(pull.of.score(dot, slope) - lse);
  return with_slope ? p * slope : p;
}

// Queries: dq += sum of ds k over the keys of a block. Keys: dk += sum of ds q over the queries and
// the heads that a key serves.
template <bool own_keys>
struct ScoreGradient {
  static constexpr Shape shape = Shape::tiles;
  static constexpr int blocks = 2;
  AttentionPull pull;
  Tensor gradient;
  template <class F>
  void each_tensor(F f) {
    pull.each_tensor(f), f(gradient);
  }
  Number factors() const { return pull.of.factors; }
  template <class Math, class Team>
  using Room = PullRoom<Math, Team, 2>;
  template <class Math, class Team>
  SHARDPROOF_HD int64_t tiles() const {
    using Size = typename Team::template Size<Math>;
    return tiles_of<Size>(pull.side(own_keys, 0), pull.of.kv_heads);
  }
  template <class Math, class Team>
  SHARDPROOF_HD void tile(int64_t i, const Team& team, Room<Math, Team>& room) const {
    using Size = typename Team::template Size<Math>;
    const int64_t groups = pull.of.kv_heads, t = own_keys ? i : tiles<Math, Team>() - 1 - i;
    const AttentionSide own = pull.side(own_keys, t % groups),
                        other = pull.side(!own_keys, t % groups);
    using Statistics = StatisticsOf<Room<Math, Team>>;
    AttentionWalk<Math, Team, 2> walk(team, room, pull.of, own, t / groups * Size::own, other,
                                      own_keys, Statistics{pull, room, !own_keys});
    for (int64_t strip = 0; strip < pull.of.key_dim; strip += Size::strip) {
      typename Team::template Sums<Math> sums(team);
      walk.take(gradient, pull.of.key_dim, strip, sums);
      for (walk.again(); walk.next(Statistics{pull, room, own_keys});) {
        factors_of<Math>(team, walk, room);
        walk.add(0, strip, sums);
      }
      walk.give(sums, gradient, pull.of.key_dim, strip);
    }
  }

 private:
  // ds, as weights.
  template <class Math, class Team, class Walk>
  SHARDPROOF_HD void factors_of(const Team& team, Walk& walk, Room<Math, Team>& room) const {
    using A = typename Math::Sum;
    typename Team::template Dots<Math> dots(team);
    walk.multiply(0, dots);
    walk.put_scores(dots);
    team.join();
    walk.each_score(walk.extent(), [&](int r, int c, A& value) {
      value = probability<true>(pull, walk, r, c, value, room.lse[own_keys ? c : r]);
    });
    walk.multiply(1, dots);
    team.join();
    dots.each(walk.extent(), [&](int r, int c, A along) {
      const A p = room.score.scores.at(r, c);
      const A ds = p == 0 ? A(0) : A(pull.of.scale) * (p * (along - room.delta[own_keys ? c : r]));
      room.score.weights().at(r, c) = Math::narrow(ds);
    });
  }
};
using QueryGradient = ScoreGradient<false>;
using KeyGradient = ScoreGradient<true>;

// dv += sum of p g over the queries and the heads that a key serves.
struct ValueGradient {
  static constexpr Shape shape = Shape::tiles;
  static constexpr int blocks = 3;
  AttentionPull pull;
  Tensor gradient;
  template <class F>
  void each_tensor(F f) {
    pull.each_tensor(f), f(gradient);
  }
  Number factors() const { return pull.of.factors; }
  template <class Math, class Team>
  using Room = PullRoom<Math, Team, 1>;
  template <class Math, class Team>
  SHARDPROOF_HD int64_t tiles() const {
    return tiles_of<typename Team::template Size<Math>>(pull.of.key_side(0), pull.of.kv_heads);
  }
  template <class Math, class Team>
  SHARDPROOF_HD void tile(int64_t i, const Team& team, Room<Math, Team>& room) const {
    using Size = typename Team::template Size<Math>;
    const int64_t groups = pull.of.kv_heads, width = pull.of.value_dim;
    const AttentionSide own = pull.of.key_side(i % groups),
                        other = pull.of.query_side(i % groups, &pull.g);
    AttentionWalk<Math, Team, 1> walk(team, room, pull.of, own, i / groups * Size::own, other, true,
                                      NoRow{});
    for (int64_t strip = 0; strip < width; strip += Size::strip) {
      typename Team::template Sums<Math> sums(team);
      walk.take(gradient, width, strip, sums);
      for (walk.again(); walk.next(StatisticsOf<Room<Math, Team>>{pull, room, true});) {
        factors_of<Math>(team, walk, room);
        walk.add(1, strip, sums);
      }
      walk.give(sums, gradient, width, strip);
    }
  }

 private:
  // p, as weights.
  template <class Math, class Team, class Walk>
  SHARDPROOF_HD void factors_of(const Team& team, Walk& walk, Room<Math, Team>& room) const {
    using A = typename Math::Sum;
    typename Team::template Dots<Math> dots(team);
    walk.multiply(0, dots);
    walk.put_scores(dots);
    team.join();
    walk.each_score(walk.extent(), [&](int r, int c, A& value) {
      value = probability<false>(pull, walk, r, c, value, room.lse[c]);
      if constexpr (sizeof(typename Math::Factor) < sizeof(A))
        room.score.weights().at(r, c) = Math::narrow(value);
    });
  }
};

}  // namespace shardproof::primitives
