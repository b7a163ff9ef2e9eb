// Bodies of blockwise attention: rows (query, head) against the keys of one block, tile by tile, so
// that no matrix of all scores exists. Shapes: q [queries, heads, dk], k [keys, kv_heads, dk],
// v [keys, kv_heads, dv]; labels [n, 2] are (sequence, position), sequence -1 sees nothing and is
// not seen. Pairs that are masked are never touched: padding may hold anything.
//
//   s = scale q.k, softcap: c tanh(s / c)
//   merging a tile into (m, l, a):  m' = max(m, m_t)   l' = e^(m-m') l + sum e^(s-m')
//                                   a' = e^(m-m') a + sum e^(s-m') v
//   p = e^(s-lse)   ds = scale p (g.v - delta) (1 - tanh^2)   delta = g.o - g_lse
//   dq = sum ds k   dk = sum ds q   dv = sum p g
#pragma once
#include <cmath>

#include "primitives/element.hpp"

namespace shardproof::primitives {

struct AttentionPairs {
  Tensor q, k, v, queries, keys;
  int64_t heads = 1, kv_heads = 1, key_dim = 1, value_dim = 1;
  double scale = 1, softcap = 0;
  int64_t left = -1, right = -1;  // window, -1 without limit
  bool causal = false;

  template <class F>
  void each_tensor(F f) {
    f(q), f(k), f(v), f(queries), f(keys);
  }
  SHARDPROOF_HD int64_t query_count() const { return queries.elements / 2; }
  SHARDPROOF_HD int64_t key_count() const { return keys.elements / 2; }
  SHARDPROOF_HD int64_t heads_of_group() const { return heads / kv_heads; }
  SHARDPROOF_HD int64_t key_row(int64_t key, int64_t head) const {
    return key * kv_heads + head / heads_of_group();
  }
  SHARDPROOF_HD bool sees(int64_t query, int64_t key) const {
    const int64_t sequence = queries.integer(2 * query);
    if (sequence < 0 || sequence != keys.integer(2 * key)) return false;
    const int64_t ahead = keys.integer(2 * key + 1) - queries.integer(2 * query + 1);
    return (ahead <= 0 || !causal) && (left < 0 || -ahead <= left) && (right < 0 || ahead <= right);
  }
  template <class A>
  SHARDPROOF_HD static A dot(const Tensor& a, int64_t row_a, const Tensor& b, int64_t row_b,
                             int64_t n) {
    A sum = 0;
    for (int64_t c = 0; c < n; ++c) sum += a.load<A>(row_a * n + c) * b.load<A>(row_b * n + c);
    return sum;
  }
  // Rows of q and k; `slope`: of the softcap there.
  template <class A>
  SHARDPROOF_HD A score(int64_t row, int64_t key, A& slope) const {
    const A s = A(scale) * dot<A>(q, row, k, key, key_dim);
    slope = 1;
    if (softcap == 0) return s;
    const A t = std::tanh(s / A(softcap));
    slope = A(1) - t * t;
    return A(softcap) * t;
  }
};

// Merges a block of keys into m, l [queries, heads] and a [queries, heads, dv].
struct AttendBlock {
  static constexpr Shape shape = Shape::rows;
  AttentionPairs of;
  Tensor m, l, a;
  bool wide = false;
  template <class F>
  void each_tensor(F f) {
    of.each_tensor(f), f(m), f(l), f(a);
  }
  SHARDPROOF_HD int64_t rows() const { return m.elements; }
  template <class A, class Team>
  SHARDPROOF_HD void row(int64_t r, const Team& team) const {
    const int64_t query = r / of.heads, head = r % of.heads, width = of.value_dim;
    const A nothing = -A(INFINITY);
    A* p = team.template scratch<A>();
    A top = m.load<A>(r), sum = l.load<A>(r);
    for (int64_t first = 0; first < of.key_count(); first += Team::tile) {
      const int64_t rest = of.key_count() - first, n = rest < Team::tile ? rest : Team::tile;
      A greatest = nothing, slope;
      for (int64_t t = team.first(); t < n; t += team.step()) {
        p[t] = of.sees(query, first + t) ? of.score<A>(r, of.key_row(first + t, head), slope)
                                         : nothing;
        greatest = greatest < p[t] ? p[t] : greatest;
      }
      greatest = team.greatest(greatest);
      if (greatest == nothing) continue;
      const A before = top;
      top = top < greatest ? greatest : top;
      const A kept = std::exp(before - top);
      A added = 0;
      for (int64_t t = team.first(); t < n; t += team.step()) {
        p[t] = p[t] == nothing ? A(0) : std::exp(p[t] - top);
        added += p[t];
      }
      sum = kept * sum + team.sum(added);
      team.join();
      for (int64_t c = team.first(); c < width; c += team.step()) {
        A value = kept * a.load<A>(r * width + c);
        for (int64_t t = 0; t < n; ++t)
          if (p[t] != 0) value += p[t] * of.v.load<A>(of.key_row(first + t, head) * width + c);
        a.store(r * width + c, value);
      }
      team.join();  // the next tile takes the place of this one
    }
    if (!team.leads()) return;
    m.store(r, top);
    l.store(r, sum);
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

// What a pair of a row (query, head) and a key gives back.
struct AttentionPull {
  AttentionPairs of;
  Tensor g, lse, delta;
  template <class F>
  void each_tensor(F f) {
    of.each_tensor(f), f(g), f(lse), f(delta);
  }
  template <class A>
  SHARDPROOF_HD void pair(int64_t row, int64_t key, A& p, A& ds) const {
    A slope;
    const A s = of.score<A>(row, key, slope);
    p = std::exp(s - lse.load<A>(row));
    const A along = of.dot<A>(g, row, of.v, key, of.value_dim) - delta.load<A>(row);
    ds = A(of.scale) * (p * along * slope);
  }
};

// dq += sum over the keys of a block.
struct QueryGradient {
  static constexpr Shape shape = Shape::rows;
  AttentionPull pull;
  Tensor dq;
  bool wide = false;
  template <class F>
  void each_tensor(F f) {
    pull.each_tensor(f), f(dq);
  }
  SHARDPROOF_HD int64_t rows() const { return pull.delta.elements; }
  template <class A, class Team>
  SHARDPROOF_HD void row(int64_t r, const Team& team) const {
    const AttentionPairs& of = pull.of;
    const int64_t query = r / of.heads, head = r % of.heads, width = of.key_dim;
    A* ds = team.template scratch<A>();
    for (int64_t first = 0; first < of.key_count(); first += Team::tile) {
      const int64_t rest = of.key_count() - first, n = rest < Team::tile ? rest : Team::tile;
      for (int64_t t = team.first(); t < n; t += team.step()) {
        A p;
        ds[t] = 0;
        if (of.sees(query, first + t)) pull.pair(r, of.key_row(first + t, head), p, ds[t]);
      }
      team.join();
      for (int64_t c = team.first(); c < width; c += team.step()) {
        A sum = dq.load<A>(r * width + c);
        for (int64_t t = 0; t < n; ++t)
          if (ds[t] != 0) sum += ds[t] * of.k.load<A>(of.key_row(first + t, head) * width + c);
        dq.store(r * width + c, sum);
      }
      team.join();
    }
  }
};

// dk, dv += sum over the queries and over the heads that a key serves.
struct KeyGradient {
  static constexpr Shape shape = Shape::rows;
  AttentionPull pull;
  Tensor dk, dv;
  bool wide = false;
  template <class F>
  void each_tensor(F f) {
    pull.each_tensor(f), f(dk), f(dv);
  }
  SHARDPROOF_HD int64_t rows() const { return pull.of.key_count() * pull.of.kv_heads; }
  // The n-th row that the key row meets.
  SHARDPROOF_HD int64_t query_of(int64_t n) const { return n / pull.of.heads_of_group(); }
  SHARDPROOF_HD int64_t row_of(int64_t n, int64_t group) const {
    const int64_t shared = pull.of.heads_of_group();
    return query_of(n) * pull.of.heads + group * shared + n % shared;
  }
  template <class A, class Team>
  SHARDPROOF_HD void add(int64_t key_row, const A* factor, int64_t first, int64_t n,
                         const Tensor& of_queries, const Tensor& sums, int64_t width,
                         const Team& team) const {
    for (int64_t c = team.first(); c < width; c += team.step()) {
      A sum = sums.load<A>(key_row * width + c);
      for (int64_t t = 0; t < n; ++t)
        if (factor[t] != 0)
          sum += factor[t] *
                 of_queries.load<A>(row_of(first + t, key_row % pull.of.kv_heads) * width + c);
      sums.store(key_row * width + c, sum);
    }
  }
  template <class A, class Team>
  SHARDPROOF_HD void row(int64_t key_row, const Team& team) const {
    const AttentionPairs& of = pull.of;
    const int64_t key = key_row / of.kv_heads, group = key_row % of.kv_heads,
                  count = of.query_count() * of.heads_of_group();
    A *p = team.template scratch<A>(), *ds = p + Team::tile;
    for (int64_t first = 0; first < count; first += Team::tile) {
      const int64_t rest = count - first, n = rest < Team::tile ? rest : Team::tile;
      for (int64_t t = team.first(); t < n; t += team.step()) {
        p[t] = ds[t] = 0;
        if (of.sees(query_of(first + t), key))
          pull.pair(row_of(first + t, group), key_row, p[t], ds[t]);
      }
      team.join();
      add(key_row, ds, first, n, of.q, dk, of.key_dim, team);
      add(key_row, p, first, n, pull.g, dv, of.value_dim, team);
      team.join();
    }
  }
};

}  // namespace shardproof::primitives
