// The attention of a transformer layer on whole tensors, in double, by one process.
//
//   Z = X Wqkv^T + bqkv          [T,(n+2g)d]   columns: all query heads | all key | all value heads
//   Q, K = Z's, turned by the position of each token in its sequence (rotary); V = Z's
//   O = attention(Q, K, V)       [T,n d]
//   Y = O Wo^T + bo              [T,h]
#pragma once
#include "reference/attention.hpp"
#include "reference/rotary.hpp"
#include "reference/running_error.hpp"

namespace shardproof::reference {

struct AttentionBlockShape {
  int64_t hidden = 0;  // h
  double base = 10000;
  Attention core;  // n, g, d = key_dim = value_dim, labels of the T tokens (keys: the same)
  int64_t tokens() const { return int64_t(core.queries.size()); }
  int64_t queries() const { return core.heads * core.key_dim; }
  int64_t keys() const { return core.kv_heads * core.key_dim; }
  LinearShape first() const { return {tokens(), hidden, queries() + 2 * keys()}; }
  LinearShape second() const { return {tokens(), queries(), hidden}; }
};
struct AttentionBlockInputs {
  In x, w_qkv, b_qkv, w_out, b_out;  // biases may be empty
};
template <class T>
struct AttentionBlockParts {
  T x, w_qkv, b_qkv, w_out, b_out;
};

Values attention_block(const AttentionBlockShape&, const AttentionBlockInputs&);
AttentionBlockParts<Values> attention_block_backward(const AttentionBlockShape&,
                                                     const AttentionBlockInputs&, In g);

// What an implementation may lose by rounding where it stores every tensor that is named above and
// in the backward; the last rounding of a result is left to the caller. `linear.ranks` parts are
// summed for Y and dX, `weights` for the gradients of both weights and bqkv, `bias` for that of bo.
// `copies` ranks use the same key heads, and each stores its own part of dK and dV; `gathered`: the
// parts of dZ are added up on the wire before they meet the weight.
struct AttentionBlockRounding {
  Rounding linear;
  AttentionRounding core;
  int weights = 1, bias = 1, copies = 1;
  bool gathered = false;
};
Loss attention_block_loss(const AttentionBlockShape&, const AttentionBlockInputs&,
                          const AttentionBlockRounding&);
AttentionBlockParts<Loss> attention_block_backward_loss(const AttentionBlockShape&,
                                                        const AttentionBlockInputs&, In g,
                                                        const AttentionBlockRounding&);

}  // namespace shardproof::reference
