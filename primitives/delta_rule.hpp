// Bodies of the gated delta rule, a state S [d_k, d_v] of a head and a sequence:
//
//   S_t = (I - b_t k_t k_t^T) Diag(a_t) S_(t-1) + b_t k_t v_t^T
//
// Columns of a state do not meet: what a token does to one of them needs that column alone. Tokens,
// reach and padding are those of recurrences.hpp; `th` counts heads of tokens, `sh` heads of
// sequences.
#pragma once
#include "primitives/recurrences.hpp"

namespace shardproof::primitives {

// What acts on states. a [tokens, heads, gates], gates 1 or d_k; b [tokens, heads].
struct DeltaRule {
  Chunk chunk;
  Tensor k, b;
  int64_t gates = 1;

  template <class F>
  void each_tensor(F f) {
    f(chunk.a), f(chunk.reach), f(k), f(b);
  }
  SHARDPROOF_HD int64_t states() const { return chunk.batch * chunk.heads; }
  SHARDPROOF_HD int64_t sees(int64_t th) const { return chunk.reach.integer(th / chunk.heads); }
  template <class A>
  SHARDPROOF_HD A decay(int64_t th, int64_t i) const {
    return chunk.a.load<A>(gates == 1 ? th : th * gates + i);
  }
  template <class A>
  SHARDPROOF_HD A key(int64_t th, int64_t i) const {
    return k.load<A>(th * chunk.key_dim + i);
  }
  // Of the state before token th, which is read where a token of its document comes before.
  template <class A>
  SHARDPROOF_HD A before(const Tensor& entering, const Tensor& all, int64_t th, int64_t i,
                         int64_t j) const {
    if (sees(th) <= 0) return A(0);
    const int64_t at = (th * chunk.key_dim + i) * chunk.value_dim + j,
                  earlier = at - states() * chunk.key_dim * chunk.value_dim;
    return earlier < 0 ? entering.load<A>(at) : all.load<A>(earlier);
  }
};

// States from `entering` on, or from 0, or, without v, from the unit matrix: then S is what a state
// is multiplied by on its way through. By column; `running` is the last of them when it is done.
struct DeltaStates {
  static constexpr Shape shape = Shape::elements;
  DeltaRule rule;
  Tensor v, entering, states, running;
  int64_t columns = 1;
  bool wide = false;
  template <class F>
  void each_tensor(F f) {
    rule.each_tensor(f), f(v), f(entering), f(states), f(running);
  }
  SHARDPROOF_HD int64_t count() const { return rule.states() * columns; }
  template <class A>
  SHARDPROOF_HD void in(int64_t column) const {
    const int64_t sh = column / columns, j = column % columns, keys = rule.chunk.key_dim,
                  first = sh * keys * columns + j;
    for (int64_t i = 0; i < keys; ++i) {
      const A start = entering.there() ? entering.load<A>(first + i * columns)
                                       : A(!v.there() && i == j ? 1 : 0);
      running.store(first + i * columns, start);
    }
    for (int64_t row = 0; row < rule.chunk.rows(); ++row) {
      const int64_t th = row * rule.states() + sh, sees = rule.sees(th);
      A known = 0;
      for (int64_t i = 0; i < keys; ++i) {
        const int64_t at = first + i * columns;
        const A s = sees > 0 ? A(rule.decay<A>(th, i) * running.load<A>(at)) : A(0);
        running.store(at, s);
        if (sees > 0) known += rule.key<A>(th, i) * s;
      }
      A added = 0;
      if (sees >= 0) {
        const A value = v.there() ? v.load<A>(th * columns + j) : A(0);
        added = rule.b.load<A>(th) * (value - known);
      }
      for (int64_t i = 0; i < keys; ++i) {
        const int64_t at = first + i * columns;
        const A s = sees < 0 ? A(0) : A(running.load<A>(at) + rule.key<A>(th, i) * added);
        running.store(at, s);
        if (states.there()) states.store((th * keys + i) * columns + j, s);
      }
    }
  }
  SHARDPROOF_HD void at(int64_t column) const { wide ? in<double>(column) : in<float>(column); }
};

// Their cotangents, from the last token to the first:
//   G_t = q_t g_t^T + what comes from behind,  Diag(a_t) (I - b_t k_t k_t^T) G_t goes on
// `running` ends as that of the state before the first token.
struct DeltaAdjoints {
  static constexpr Shape shape = Shape::elements;
  DeltaRule rule;
  Tensor q, g, entering, adjoints, running;
  bool wide = false;
  template <class F>
  void each_tensor(F f) {
    rule.each_tensor(f), f(q), f(g), f(entering), f(adjoints), f(running);
  }
  SHARDPROOF_HD int64_t count() const { return rule.states() * rule.chunk.value_dim; }
  template <class A>
  SHARDPROOF_HD void in(int64_t column) const {
    const int64_t columns = rule.chunk.value_dim, keys = rule.chunk.key_dim;
    const int64_t sh = column / columns, j = column % columns, first = sh * keys * columns + j;
    for (int64_t i = 0; i < keys; ++i) {
      const int64_t at = first + i * columns;
      running.store(at, entering.there() ? entering.load<A>(at) : A(0));
    }
    for (int64_t row = rule.chunk.rows(); row-- > 0;) {
      const int64_t th = row * rule.states() + sh, sees = rule.sees(th);
      A known = 0;
      for (int64_t i = 0; i < keys; ++i) {
        const int64_t at = first + i * columns;
        const A s =
            sees < 0
                ? A(0)
                : A(running.load<A>(at) + q.load<A>(th * keys + i) * g.load<A>(th * columns + j));
        running.store(at, s);
        if (adjoints.there()) adjoints.store((th * keys + i) * columns + j, s);
        if (sees > 0) known += rule.key<A>(th, i) * s;
      }
      const A taken = sees > 0 ? A(rule.b.load<A>(th) * known) : A(0);
      for (int64_t i = 0; i < keys; ++i) {
        const int64_t at = first + i * columns;
        running.store(at, sees > 0 ? A(rule.decay<A>(th, i) *
                                       (running.load<A>(at) - rule.key<A>(th, i) * taken))
                                   : A(0));
      }
    }
  }
  SHARDPROOF_HD void at(int64_t column) const { wide ? in<double>(column) : in<float>(column); }
};

// after = M before + part, or M^T where turned; without M, part alone. M [heads, d_k, d_k].
struct TakeThrough {
  static constexpr Shape shape = Shape::elements;
  Tensor m, part, before, after;
  int64_t key_dim = 1, value_dim = 1;
  bool turned = false, wide = false;
  template <class F>
  void each_tensor(F f) {
    f(m), f(part), f(before), f(after);
  }
  SHARDPROOF_HD int64_t count() const { return after.elements; }
  template <class A>
  SHARDPROOF_HD void in(int64_t entry) const {
    const int64_t j = entry % value_dim, i = entry / value_dim % key_dim,
                  sh = entry / value_dim / key_dim;
    A sum = 0;
    for (int64_t n = 0; m.there() && n < key_dim; ++n)
      sum += m.load<A>((sh * key_dim + (turned ? n : i)) * key_dim + (turned ? i : n)) *
             before.load<A>((sh * key_dim + n) * value_dim + j);
    after.store(entry, part.load<A>(entry) + sum);
  }
  SHARDPROOF_HD void at(int64_t entry) const { wide ? in<double>(entry) : in<float>(entry); }
};

// By value of a token's head: e = v - S'^T k with S' = Diag(a) S_(t-1), w = G^T k, and dv = b w.
struct DeltaErrors {
  static constexpr Shape shape = Shape::elements;
  DeltaRule rule;
  Tensor v, entering, states, adjoints, errors, weights, dv;
  bool wide = false;
  template <class F>
  void each_tensor(F f) {
    rule.each_tensor(f), f(v), f(entering), f(states), f(adjoints), f(errors), f(weights), f(dv);
  }
  SHARDPROOF_HD int64_t count() const { return dv.elements; }
  template <class A>
  SHARDPROOF_HD void in(int64_t element) const {
    const int64_t columns = rule.chunk.value_dim, keys = rule.chunk.key_dim;
    const int64_t th = element / columns, j = element % columns;
    const bool token = rule.sees(th) >= 0;
    A known = 0, weight = 0;
    for (int64_t i = 0; token && i < keys; ++i) {
      if (rule.sees(th) > 0)
        known += rule.key<A>(th, i) *
                 A(rule.decay<A>(th, i) * rule.before<A>(entering, states, th, i, j));
      weight += rule.key<A>(th, i) * adjoints.load<A>((th * keys + i) * columns + j);
    }
    errors.store(element, token ? A(v.load<A>(element) - known) : A(0));
    weights.store(element, weight);
    dv.store(element, token ? A(rule.b.load<A>(th) * weight) : A(0));
  }
  SHARDPROOF_HD void at(int64_t element) const { wide ? in<double>(element) : in<float>(element); }
};

// By key of a token's head, G' = (I - b k k^T) G the cotangent of S':
//   dk = b (G e - S' w)     terms of da: sum_j G'_ij S_(t-1)_ij
struct DeltaKeys {
  static constexpr Shape shape = Shape::elements;
  DeltaRule rule;
  Tensor entering, states, adjoints, errors, weights, dk, terms;
  bool wide = false;
  template <class F>
  void each_tensor(F f) {
    rule.each_tensor(f), f(entering), f(states), f(adjoints), f(errors), f(weights), f(dk),
        f(terms);
  }
  SHARDPROOF_HD int64_t count() const { return dk.elements; }
  template <class A>
  SHARDPROOF_HD void in(int64_t element) const {
    const int64_t columns = rule.chunk.value_dim, keys = rule.chunk.key_dim;
    const int64_t th = element / keys, i = element % keys, sees = rule.sees(th);
    A of_key = 0, of_decay = 0;
    for (int64_t j = 0; sees >= 0 && j < columns; ++j) {
      const A step = rule.b.load<A>(th), adjoint = adjoints.load<A>(element * columns + j);
      of_key += adjoint * A(step * errors.load<A>(th * columns + j));
      if (sees == 0) continue;
      const A taken = step * weights.load<A>(th * columns + j),
              before = rule.before<A>(entering, states, th, i, j);
      of_key -= taken * A(rule.decay<A>(th, i) * before);
      of_decay += A(adjoint - rule.key<A>(th, i) * taken) * before;
    }
    dk.store(element, of_key);
    terms.store(element, of_decay);
  }
  SHARDPROOF_HD void at(int64_t element) const { wide ? in<double>(element) : in<float>(element); }
};

// By head of a token: db = w e, and da, where one decay is all features'.
struct DeltaSteps {
  static constexpr Shape shape = Shape::elements;
  Tensor errors, weights, terms, db, da;
  int64_t key_dim = 1, value_dim = 1;
  bool wide = false;
  template <class F>
  void each_tensor(F f) {
    f(errors), f(weights), f(terms), f(db), f(da);
  }
  SHARDPROOF_HD int64_t count() const { return db.elements; }
  template <class A>
  SHARDPROOF_HD void in(int64_t th) const {
    A of_step = 0, of_decay = 0;
    for (int64_t j = 0; j < value_dim; ++j)
      of_step += weights.load<A>(th * value_dim + j) * errors.load<A>(th * value_dim + j);
    db.store(th, of_step);
    if (!da.there()) return;
    for (int64_t i = 0; i < key_dim; ++i) of_decay += terms.load<A>(th * key_dim + i);
    da.store(th, of_decay);
  }
  SHARDPROOF_HD void at(int64_t th) const { wide ? in<double>(th) : in<float>(th); }
};

}  // namespace shardproof::primitives
