// Gated linear recurrence of each head of a sequence, written out: with D(t, s) the product of the
// decays behind s, up to t,
//
//   S_t = a_t S_(t-1) + k_t v_t^T, o_t = S_t^T q_t      o_t  = sum_(s <= t) D(t,s) (q_t k_s) v_s
//
//   dq_t = sum_(s<=t) D(t,s) (v_s g_t) k_s      dk_s = sum_(t>=s) D(t,s) (v_s g_t) q_t
//   dv_s = sum_(t>=s) D(t,s) (q_t k_s) g_t
//   da_i = <sum_(s<i) D(i-1,s) k_s v_s^T, sum_(t>=i) D(t,i) q_t g_t^T>
//
//   q, k [T, heads, d_k]   v, o [T, heads, d_v]   a [T, heads], one sequence number a token
//
// No state runs from token to token. Rows of padding (-1) have o = 0 and no gradient. Of absolute
// values the same sums are the magnitudes that error bounds are made of.
#pragma once
#include "reference/linear.hpp"

namespace shardproof::reference {

struct Scan {
  int64_t heads = 1, key_dim = 1, value_dim = 1;
};

Values scan(const Scan&, std::span<const int64_t> sequences, In q, In k, In v, In a);

struct ScanGradients {
  Values q, k, v, a;
};
ScanGradients scan_backward(const Scan&, std::span<const int64_t> sequences, In q, In k, In v, In a,
                            In g);

// How many roundings any one term of a result passes, on `ranks` blocks of a sequence of `length`
// tokens (README.md).
struct ScanRoundings {
  int64_t o, q, k, v, a;
};
ScanRoundings scan_roundings(const Scan&, int64_t length, int64_t ranks);

}  // namespace shardproof::reference
