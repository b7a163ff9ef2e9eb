// Pairs of a row (query, head) and a key: which of them are seen, and what their scores are.
// Shapes: q [queries, heads, dk], k [keys, kv_heads, dk], v [keys, kv_heads, dv]; labels [n, 2] are
// (sequence, position), sequence -1 sees nothing and is not seen.
//
//   s = scale q.k, softcap: c tanh(s / c)
#pragma once
#include <cmath>

#include "primitives/element.hpp"

namespace shardproof::primitives {

struct TokenLabel {
  int64_t sequence, position;
};

// Which keys a query of their sequence sees, by how far ahead of it they are.
struct AttentionMask {
  int64_t left = -1, right = -1;  // window, -1 without limit
  bool causal = false;

  SHARDPROOF_HD bool shows(int64_t ahead) const { return shows_some(ahead, ahead); }
  // Where pairs of a tile are `least` to `most` ahead: whether one may be seen, and whether all
  // are.
  SHARDPROOF_HD bool shows_some(int64_t least, int64_t most) const {
    return (least <= 0 || !causal) && (left < 0 || -most <= left) && (right < 0 || least <= right);
  }
  SHARDPROOF_HD bool shows_all(int64_t least, int64_t most) const {
    return (most <= 0 || !causal) && (left < 0 || -least <= left) && (right < 0 || most <= right);
  }
};

// Queries or keys as the rows of one group of heads, those of a token one after the other.
struct AttentionSide {
  const Tensor& labels;
  const Tensor* operands[2];  // q or k, dk wide; g or v, dv wide; null: none
  int64_t heads, shared, group;

  SHARDPROOF_HD int64_t count() const { return labels.elements / 2 * shared; }
  // Its number among the rows of all heads.
  SHARDPROOF_HD int64_t line(int64_t n) const {
    return n / shared * heads + group * shared + n % shared;
  }
  SHARDPROOF_HD TokenLabel label(int64_t n) const {
    if (n >= count()) return {-1, 0};
    const int64_t token = n / shared;
    return {labels.integer(2 * token), labels.integer(2 * token + 1)};
  }
};

struct AttentionPairs {
  Tensor q, k, v, queries, keys;
  int64_t heads = 1, kv_heads = 1, key_dim = 1, value_dim = 1;
  double scale = 1, softcap = 0;
  AttentionMask mask;
  // Sums are made in f64 where that is said. Halves: q, k, v and cotangents are of this type, and
  // so are P and dS as factors of the second products; sums in f32.
  Number factors = Number::f32;

  template <class F>
  void each_tensor(F f) {
    f(q), f(k), f(v), f(queries), f(keys);
  }
  SHARDPROOF_HD int64_t heads_of_group() const { return heads / kv_heads; }
  SHARDPROOF_HD AttentionSide query_side(int64_t group, const Tensor* g = nullptr) const {
    return {queries, {&q, g}, heads, heads_of_group(), group};
  }
  SHARDPROOF_HD AttentionSide key_side(int64_t group) const {
    return {keys, {&k, &v}, kv_heads, 1, group};
  }
  SHARDPROOF_HD int64_t width(int operand) const { return operand == 0 ? key_dim : value_dim; }
  // `slope`: of the softcap there.
  template <class A>
  SHARDPROOF_HD A score(A dot, A& slope) const {
    const A s = A(scale) * dot;
    slope = 1;
    if (softcap == 0) return s;
    const A t = std::tanh(s / A(softcap));
    slope = A(1) - t * t;
    return A(softcap) * t;
  }
};

}  // namespace shardproof::primitives
