// The feed-forward block of a transformer on whole tensors, in double, by one process.
//
//   Z = X W1^T + b1      [T,f], or [T,2f] = [gate | up] when gated
//   A = act(Z)           gated: silu(gate) o up (SwiGLU)
//   N = A, or gamma A / sqrt(mean A^2 + eps) over the whole FFN dim when normalised
//   Y = N W2^T + b2      [T,h]
//
// W1 is [f,h] or [2f,h] (gate rows, then up rows), W2 is [h,f].
#pragma once
#include "reference/activation.hpp"
#include "reference/norm.hpp"

namespace shardproof::reference {

struct MlpShape {
  int64_t tokens = 0, hidden = 0, ffn = 0;  // T, h, f
  Activation activation = Activation::gelu;
  bool gated = false, normalised = false;
  double eps = 1e-6;
  int64_t width() const { return gated ? 2 * ffn : ffn; }
  LinearShape first() const { return {tokens, hidden, width()}; }
  LinearShape second() const { return {tokens, ffn, hidden}; }
};
struct MlpInputs {
  In x, w1, b1, gamma, w2, b2;  // b1, b2 may be empty; gamma is read when normalised
};
struct MlpGradients {
  Values x, w1, b1, gamma, w2, b2;
};

Values mlp(const MlpShape&, const MlpInputs&);
MlpGradients mlp_backward(const MlpShape&, const MlpInputs&, In g);

// What an implementation may lose by rounding, element by element: the running error of a
// computation that accumulates with unit roundoff `accumulate`, stores Z, N, dN and dZ with `store`
// and sends partial sums of `ranks` ranks with `wire`. The last rounding, that of a result to its
// type, is left to the caller. It never raises a false alarm while the model
// fl(a op b) = (a op b)(1 + d), |d| <= u holds, in any order of sums.
struct Rounding {
  double accumulate = 0, store = 0, wire = 0;
  double tiny = 0;       // half the spacing of subnormals in storage, lost at each store
  double wire_tiny = 0;  // of what ranks send
  int ranks = 1;         // p: partial sums of Y, dX and b2
};
struct Loss {
  Values error, magnitude;  // magnitude: sum of |terms| of the last product or sum
};
struct MlpLosses {
  Loss x, w1, b1, gamma, w2, b2;
};
Loss mlp_loss(const MlpShape&, const MlpInputs&, const Rounding&);
MlpLosses mlp_backward_loss(const MlpShape&, const MlpInputs&, In g, const Rounding&);
// Of a cotangent that is computed itself (running_error.hpp).
struct Uncertain;
MlpLosses mlp_backward_loss(const MlpShape&, const MlpInputs&, const Uncertain& g, const Rounding&);

}  // namespace shardproof::reference
