// Softmax attention and its gradients on whole tensors, in double, by one process.
//
//   Q [Tq,n,dk]   K [Tk,g,dk]   V [Tk,g,dv]   O [Tq,n,dv]   lse [Tq,n]
//
// Query head j reads key head floor(j / (n/g)). With S = scale Q K^T (softcap c: c tanh(S/c)) on
// the pairs that the mask allows,
//
//   lse_i = log sum_j exp S_ij     P_ij = exp(S_ij - lse_i)     O_i = sum_j P_ij V_j
//   delta_i = <dO_i, O_i>          dS_ij = P_ij (<dO_i, V_j> - delta_i + dlse_i)
//   dV_j = sum_i P_ij dO_i         dQ_i = scale sum_j dS_ij K_j    dK_j = scale sum_i dS_ij Q_i
//
// Every mask follows from the labels of the tokens and never from where they are stored. A row that
// sees nothing has O = 0, lse = -inf, no gradient, and adds none.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "reference/linear.hpp"

namespace shardproof::reference {

// Which sequence a token belongs to (-1: padding, which sees nothing and is not seen) and its place
// there. Where a sequence has other counts of queries and of keys, the positions of its queries
// start at keys - queries: the last query stands at the last key.
struct Label {
  int64_t sequence = 0, position = 0;
  bool operator==(const Label&) const = default;
};

struct AttentionMask {
  bool causal = false;
  int64_t left = -1, right = -1;  // window around the query's position; -1: unlimited
};
bool visible(const AttentionMask&, const Label& query, const Label& key);

struct Attention {
  int64_t heads = 1, kv_heads = 1, key_dim = 1, value_dim = 1;
  double scale = 1, softcap = 0;  // softcap 0: none
  AttentionMask mask;
  std::vector<Label> queries, keys;  // by token
};

struct AttentionResult {
  Values o, lse;
};
AttentionResult attention(const Attention&, In q, In k, In v);

struct AttentionGradients {
  Values q, k, v;
};
// g_lse is the cotangent of lse; empty: zero.
AttentionGradients attention_backward(const Attention&, In q, In k, In v, In g, In g_lse);

// What an implementation rounds with, in unit roundoffs.
struct AttentionRounding {
  double accumulate = 0;
  double output = 0;      // of O, as far as a backward reads it back
  double statistics = 0;  // of lse, likewise
  double wire = 0;        // of the parts of dK and dV that ranks send
  double tiny = 0;        // what a product or a probability may lose below the normal range
  double wire_tiny = 0;   // and a part that ranks send
  double factors = 0;     // of P and dS where they are factors of the second products
  int ranks = 1;          // blocks of keys that are merged, and parts of dK and dV
};
// How far the inputs of an implementation may be from those that are given, elementwise; empty:
// they are the same.
struct AttentionErrors {
  In q, k, v, g;
};
// Componentwise bounds on the error of an implementation before its results are stored.
struct AttentionBounds {
  Values o, lse, q, k, v;  // q, k, v: of the gradients
  Values k_size, v_size;   // sums of the magnitudes that dK and dV are sums of
};
AttentionBounds attention_bounds(const Attention&, const AttentionRounding&, In q, In k, In v, In g,
                                 In g_lse, const AttentionErrors& = {});

}  // namespace shardproof::reference
