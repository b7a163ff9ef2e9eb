// A stack of linears on whole tensors, in double: what the stages of a pipeline compute together.
//
//   X_0 = X,  X_{l+1} = X_l W_l^T + b_l,  Y = X_L        X_l [T,h], W_l [h,h], b_l [h]
#pragma once
#include "reference/running_error.hpp"

namespace shardproof::reference {

struct StackInputs {
  int64_t tokens = 0, hidden = 0;
  In x;
  std::vector<In> w, b;  // by layer
  LinearShape layer() const { return {tokens, hidden, hidden}; }
};
struct StackGradients {
  Values x;
  std::vector<Values> w, b;
};

Values stack(const StackInputs&);
// g is the cotangent of Y.
StackGradients stack_backward(const StackInputs&, In g);

// Running errors of an implementation that stores every X_l and every gradient of one, but for the
// last rounding of a result. Gradients of parameters are sums over `ranks` ranks' own tokens.
Loss stack_loss(const StackInputs&, const Rounding&);
struct StackLosses {
  Loss x;
  std::vector<Loss> w, b;
};
StackLosses stack_backward_loss(const StackInputs&, const Uncertain& g, const Rounding&);

}  // namespace shardproof::reference
