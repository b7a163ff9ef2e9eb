// Bodies of the layers of hybrid models whose tokens depend on the tokens before them.
//
//   reach[t]   how many tokens of its own document come before token t; -1: padding, of which
//              nothing is read and whose results are 0
//   tokens     row by row, `batch` sequences side by side: the one before t is t - batch
//   state      S [d_k, d_v] of a head and a sequence
#pragma once
#include <cmath>

#include "primitives/element.hpp"

namespace shardproof::primitives {

// y_t = b + sum_lag w[c, width-1-lag] x_(t-lag). x begins with width-1 rows of the tokens before.
struct ConvForward {
  static constexpr Shape shape = Shape::elements;
  Tensor x, w, b, reach, y;
  int64_t channels = 1, width = 1, batch = 1;
  bool wide = false;
  template <class F>
  void each_tensor(F f) {
    f(x), f(w), f(b), f(reach), f(y);
  }
  SHARDPROOF_HD int64_t count() const { return y.elements; }
  template <class A>
  SHARDPROOF_HD void in(int64_t i) const {
    const int64_t t = i / channels, c = i % channels, sees = reach.integer(t);
    if (sees < 0) return y.store(i, A(0));
    A sum = b.there() ? b.load<A>(c) : A(0);
    for (int64_t lag = 0; lag < width && lag <= sees; ++lag) {
      const int64_t row = width - 1 - lag;
      sum += w.load<A>(c * width + row) * x.load<A>((t + row * batch) * channels + c);
    }
    y.store(i, sum);
  }
  SHARDPROOF_HD void at(int64_t i) const { wide ? in<double>(i) : in<float>(i); }
};

// The transpose in x: of the own tokens, and before them of the width-1 rows that they read.
struct ConvInput {
  static constexpr Shape shape = Shape::elements;
  Tensor g, w, reach, dx;
  int64_t channels = 1, width = 1, batch = 1;
  bool wide = false;
  template <class F>
  void each_tensor(F f) {
    f(g), f(w), f(reach), f(dx);
  }
  SHARDPROOF_HD int64_t count() const { return dx.elements; }
  template <class A>
  SHARDPROOF_HD void in(int64_t i) const {
    const int64_t c = i % channels;
    A sum = 0;
    for (int64_t lag = 0; lag < width; ++lag) {
      const int64_t t = i / channels - (width - 1 - lag) * batch;
      if (t < 0 || t >= reach.elements || reach.integer(t) < lag) continue;
      sum += w.load<A>(c * width + width - 1 - lag) * g.load<A>(t * channels + c);
    }
    dx.store(i, sum);
  }
  SHARDPROOF_HD void at(int64_t i) const { wide ? in<double>(i) : in<float>(i); }
};

// sum over the own tokens of g_t x_(t-lag), for w[c, width-1-lag]; without x that of g_t.
struct ConvParameter {
  static constexpr Shape shape = Shape::columns;
  Tensor x, g, reach, sums;
  int64_t channels = 1, width = 1, batch = 1;
  bool wide = false;
  template <class F>
  void each_tensor(F f) {
    f(x), f(g), f(reach), f(sums);
  }
  SHARDPROOF_HD int64_t columns() const { return sums.elements; }
  SHARDPROOF_HD int64_t rows() const { return reach.elements; }
  template <class A>
  SHARDPROOF_HD A term(int64_t t, int64_t column) const {
    const int64_t c = column / width, row = column % width;
    if (reach.integer(t) < width - 1 - row) return A(0);
    const A own = g.load<A>(t * channels + c);
    return x.there() ? A(own * x.load<A>((t + row * batch) * channels + c)) : own;
  }
  template <class A>
  SHARDPROOF_HD void put(int64_t column, A sum) const {
    sums.store(column, sum);
  }
};

// A decay of its logarithm; and, with the decay, the gradient of the logarithm of that of the
// decay.
struct DecayOfLogarithm {
  static constexpr Shape shape = Shape::elements;
  Tensor x, decay, out;
  bool wide = false;
  template <class F>
  void each_tensor(F f) {
    f(x), f(decay), f(out);
  }
  SHARDPROOF_HD int64_t count() const { return out.elements; }
  template <class A>
  SHARDPROOF_HD void in(int64_t i) const {
    const A value = x.load<A>(i);
    if (!decay.there()) return out.store(i, std::exp(value));
    out.store(i, value == A(0) ? A(0) : A(value * decay.load<A>(i)));  // of padding it is not read
  }
  SHARDPROOF_HD void at(int64_t i) const { wide ? in<double>(i) : in<float>(i); }
};

// What a recurrence is made over: rows of `batch` sequences with `heads` heads each.
struct Chunk {
  Tensor a, reach;  // a [tokens, heads]
  int64_t batch = 1, heads = 1, key_dim = 1, value_dim = 1;

  SHARDPROOF_HD int64_t rows() const { return reach.elements / batch; }
  SHARDPROOF_HD int64_t entries() const { return batch * heads * key_dim * value_dim; }
  // Of an element of a state: its token in a row, its keys and its values.
  struct Place {
    int64_t t, head, i, j;
  };
  SHARDPROOF_HD Place place(int64_t entry, int64_t row) const {
    const int64_t j = entry % value_dim, i = entry / value_dim % key_dim,
                  head = entry / (value_dim * key_dim) % heads;
    return {row * batch + entry / (value_dim * key_dim * heads), head, i, j};
  }
  SHARDPROOF_HD int64_t decay(const Place& p) const { return p.t * heads + p.head; }
  SHARDPROOF_HD int64_t key(const Place& p) const { return decay(p) * key_dim + p.i; }
  SHARDPROOF_HD int64_t value(const Place& p) const { return decay(p) * value_dim + p.j; }
  SHARDPROOF_HD int64_t state(const Place& p) const { return key(p) * value_dim + p.j; }
};

// S_t = a_t S_(t-1) + k_t v_t^T from `entering` on; all of them, where they are kept, and the last.
struct States {
  static constexpr Shape shape = Shape::elements;
  Chunk chunk;
  Tensor k, v, entering, states, leaving;  // entering, leaving: an element a state's
  bool wide = false;
  template <class F>
  void each_tensor(F f) {
    f(chunk.a), f(chunk.reach), f(k), f(v), f(entering), f(states), f(leaving);
  }
  SHARDPROOF_HD int64_t count() const { return chunk.entries(); }
  template <class A>
  SHARDPROOF_HD void in(int64_t entry) const {
    A s = entering.there() ? entering.load<A>(entry) : A(0);
    for (int64_t row = 0; row < chunk.rows(); ++row) {
      const Chunk::Place p = chunk.place(entry, row);
      const int64_t sees = chunk.reach.integer(p.t);
      const A passed = sees > 0 ? A(chunk.a.load<A>(chunk.decay(p)) * s) : A(0);
      s = sees < 0 ? A(0) : A(passed + k.load<A>(chunk.key(p)) * v.load<A>(chunk.value(p)));
      if (states.there()) states.store(chunk.state(p), s);
    }
    if (leaving.there()) leaving.store(entry, s);
  }
  SHARDPROOF_HD void at(int64_t entry) const { wide ? in<double>(entry) : in<float>(entry); }
};

// G_t = a_(t+1) G_(t+1) + q_t g_t^T, the cotangent of S_t, from the last token to the first; what
// leaves is that of the state before the first token.
struct Adjoints {
  static constexpr Shape shape = Shape::elements;
  Chunk chunk;
  Tensor q, g, entering, adjoints, leaving;
  bool wide = false;
  template <class F>
  void each_tensor(F f) {
    f(chunk.a), f(chunk.reach), f(q), f(g), f(entering), f(adjoints), f(leaving);
  }
  SHARDPROOF_HD int64_t count() const { return chunk.entries(); }
  template <class A>
  SHARDPROOF_HD void in(int64_t entry) const {
    A s = entering.there() ? entering.load<A>(entry) : A(0);
    for (int64_t row = chunk.rows(); row-- > 0;) {
      const Chunk::Place p = chunk.place(entry, row);
      const int64_t sees = chunk.reach.integer(p.t);
      s = sees < 0 ? A(0) : A(s + q.load<A>(chunk.key(p)) * g.load<A>(chunk.value(p)));
      if (adjoints.there()) adjoints.store(chunk.state(p), s);
      s = sees > 0 ? A(chunk.a.load<A>(chunk.decay(p)) * s) : A(0);
    }
    if (leaving.there()) leaving.store(entry, s);
  }
  SHARDPROOF_HD void at(int64_t entry) const { wide ? in<double>(entry) : in<float>(entry); }
};

// By sequence and head the product of all decays: what a state is multiplied by on its way through.
struct ChunkDecay {
  static constexpr Shape shape = Shape::elements;
  Chunk chunk;
  Tensor product;
  bool wide = false;
  template <class F>
  void each_tensor(F f) {
    f(chunk.a), f(chunk.reach), f(product);
  }
  SHARDPROOF_HD int64_t count() const { return chunk.batch * chunk.heads; }
  template <class A>
  SHARDPROOF_HD void in(int64_t i) const {
    A all = 1;
    for (int64_t row = 0; row < chunk.rows(); ++row)
      all *= chunk.a.load<A>(row * chunk.batch * chunk.heads + i);
    product.store(i, all);
  }
  SHARDPROOF_HD void at(int64_t i) const { wide ? in<double>(i) : in<float>(i); }
};

// The state behind a list of chunks, from what each of them makes of 0 and what it multiplies by:
// S = decay_c S + part_c along `chain`, where what comes to chunk c goes through it (passes_c),
// else S = part_c. A state that does not go through is not read: it may be infinite.
struct FoldStates {
  static constexpr Shape shape = Shape::elements;
  Tensor parts, decays, passes, chain, state;  // parts [chunks, entries], decays [chunks, heads]
  int64_t entries_of_head = 1;
  bool wide = false;
  template <class F>
  void each_tensor(F f) {
    f(parts), f(decays), f(passes), f(chain), f(state);
  }
  SHARDPROOF_HD int64_t count() const { return state.elements; }
  template <class A>
  SHARDPROOF_HD void in(int64_t entry) const {
    const int64_t heads = state.elements / entries_of_head;
    A s = 0;
    for (int64_t i = 0; i < chain.elements; ++i) {
      const int64_t c = chain.integer(i);
      const bool passed = i > 0 && passes.integer(c) != 0;
      const A before = passed ? A(decays.load<A>(c * heads + entry / entries_of_head) * s) : A(0);
      s = before + parts.load<A>(c * state.elements + entry);
    }
    state.store(entry, s);
  }
  SHARDPROOF_HD void at(int64_t entry) const { wide ? in<double>(entry) : in<float>(entry); }
};

// A state of each token and head, times a vector: sum_j m[i,j] x_j, or sum_i m[i,j] x_i where
// turned.
struct StateProduct {
  static constexpr Shape shape = Shape::elements;
  Tensor m, x, reach, out;  // m [tokens, heads, d_k, d_v]
  int64_t heads = 1, key_dim = 1, value_dim = 1;
  bool turned = false, wide = false;
  template <class F>
  void each_tensor(F f) {
    f(m), f(x), f(reach), f(out);
  }
  SHARDPROOF_HD int64_t count() const { return out.elements; }
  template <class A>
  SHARDPROOF_HD void in(int64_t element) const {
    const int64_t own = turned ? value_dim : key_dim, other = turned ? key_dim : value_dim;
    const int64_t th = element / own, at = element % own;
    if (reach.integer(th / heads) < 0) return out.store(element, A(0));
    A sum = 0;
    for (int64_t n = 0; n < other; ++n) {
      const int64_t i = turned ? n : at, j = turned ? at : n;
      sum += m.load<A>((th * key_dim + i) * value_dim + j) * x.load<A>(th * other + n);
    }
    out.store(element, sum);
  }
  SHARDPROOF_HD void at(int64_t element) const { wide ? in<double>(element) : in<float>(element); }
};

// da_t = <G_t, S_(t-1)>, the state before the first token being `entering`.
struct DecayGradient {
  static constexpr Shape shape = Shape::elements;
  Chunk chunk;
  Tensor states, adjoints, entering, da;
  bool wide = false;
  template <class F>
  void each_tensor(F f) {
    f(chunk.a), f(chunk.reach), f(states), f(adjoints), f(entering), f(da);
  }
  SHARDPROOF_HD int64_t count() const { return da.elements; }
  template <class A>
  SHARDPROOF_HD void in(int64_t i) const {
    const int64_t n = chunk.key_dim * chunk.value_dim, before = i - chunk.batch * chunk.heads;
    A sum = 0;
    if (chunk.reach.integer(i / chunk.heads) > 0)
      for (int64_t e = 0; e < n; ++e)
        sum += adjoints.load<A>(i * n + e) *
               (before < 0 ? entering.load<A>(i * n + e) : states.load<A>(before * n + e));
    da.store(i, sum);
  }
  SHARDPROOF_HD void at(int64_t i) const { wide ? in<double>(i) : in<float>(i); }
};

}  // namespace shardproof::primitives
