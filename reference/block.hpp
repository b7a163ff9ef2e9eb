// A transformer block without its attention, on whole tensors, in double, by one process.
//
//   U = norm1(X)                     [T,h]     layer norm or RMS norm
//   Z = U W1^T + b1, A = act(Z)      [T,f]
//   M = A W2^T + b2                  [T,h]
//   R = X + D1 o M                   D1, D2 [T,h]: 0 or 1/keep (dropout), given as data
//   Y = R + D2 o norm2(R)
#pragma once
#include "reference/running_error.hpp"

namespace shardproof::reference {

struct BlockShape {
  int64_t tokens = 0, hidden = 0, ffn = 0;  // T, h, f
  Activation activation = Activation::gelu;
  NormShape norm;
  LinearShape first() const { return {tokens, hidden, ffn}; }
  LinearShape second() const { return {tokens, ffn, hidden}; }
};
// beta1 and beta2 are empty for RMS norm.
struct BlockInputs {
  In x, gamma1, beta1, w1, b1, w2, b2, gamma2, beta2;
  In dropout1, dropout2;
};
template <class T>
struct BlockParts {
  T x, gamma1, beta1, w1, b1, w2, b2, gamma2, beta2;
};

Values block(const BlockShape&, const BlockInputs&);
BlockParts<Values> block_backward(const BlockShape&, const BlockInputs&, In g);

// What an implementation may lose by rounding where it stores every tensor that is named above and
// in the backward; the last rounding of a result is left to the caller.
Loss block_loss(const BlockShape&, const BlockInputs&, const Rounding&);
BlockParts<Loss> block_backward_loss(const BlockShape&, const BlockInputs&, In g, const Rounding&);

}  // namespace shardproof::reference
