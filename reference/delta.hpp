// Gated delta rule of each head of a sequence, written out. With D(t, s) the products of the decays
// behind s, up to t, one for each key feature i, and u_t what token t adds to the state,
//
//   S_t = (I - b_t k_t k_t^T) Diag(a_t) S_(t-1) + b_t k_t v_t^T,  o_t = S_t^T q_t
//
//   c(t,s) = sum_i k_ti D(t,s)_i k_si      u_t = b_t (v_t - sum_(s<t) c(t,s) u_s)
//   r(t,s) = sum_i q_ti D(t,s)_i k_si      o_t = sum_(s<=t) r(t,s) u_s
//
// and back, l_s the cotangent of u_s:
//
//   l_s = sum_(t>=s) r(t,s) g_t - sum_(t>s) c(t,s) b_t l_t
//   dv_t = b_t l_t     db_t = l_t (v_t - sum_(s<t) c(t,s) u_s)
//   dq_t = sum_(s<=t) (g_t u_s) D(t,s) k_s
//   dk_t = sum_(s>=t) (g_s u_t) D(s,t) q_s - sum_(s>t) b_s (l_s u_t) D(s,t) k_s
//                                          - sum_(s<t) b_t (l_t u_s) D(t,s) k_s
//   da_ri = <sum_(s<r) D(r-1,s)_i k_si u_s, sum_(t>=r) D(t,r)_i (q_ti g_t - b_t k_ti l_t)>
//
//   q, k [T, heads, d_k]   v, o [T, heads, d_v]   b [T, heads]   a [T, heads], or [T, heads, d_k]
//   one sequence number a token
//
// No state runs from token to token. Rows of padding (-1) have o = 0 and no gradient. Source of the
// recurrence: Gated Delta Networks, arXiv:2412.06464; decays of features: Kimi Linear,
// arXiv:2510.26692.
#pragma once
#include "reference/linear.hpp"

namespace shardproof::reference {

struct Delta {
  int64_t heads = 1, key_dim = 1, value_dim = 1;
  int64_t gates = 1;  // decays of a head: 1, or key_dim
  // Differences are sums, as of the magnitudes that error bounds are made of: those of absolute
  // values.
  bool magnitudes = false;
};

Values delta(const Delta&, std::span<const int64_t> sequences, In q, In k, In v, In a, In b);

struct DeltaGradients {
  Values q, k, v, a, b;
};
DeltaGradients delta_backward(const Delta&, std::span<const int64_t> sequences, In q, In k, In v,
                              In a, In b, In g);

// How many roundings any one term of a result passes, on `ranks` blocks of a sequence of `length`
// tokens (README.md).
struct DeltaRoundings {
  int64_t o, q, k, v, a, b;
};
DeltaRoundings delta_roundings(const Delta&, int64_t length, int64_t ranks);

}  // namespace shardproof::reference
