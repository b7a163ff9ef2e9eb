// A layer of experts that are feed-forward blocks, on whole tensors, in double, by one process.
//
//   X [T,h]   chosen, probs [T,k]   W1 [E,f,h], gated [E,2f,h] (gate, then up)   W2 [E,h,f]
//   y_t = sum over j of probs_tj W2_e act(W1_e x_t), e = chosen_tj
#pragma once
#include "reference/expert.hpp"
#include "reference/mlp.hpp"

namespace shardproof::reference {

struct ExpertMlpShape {
  int64_t tokens = 0, choices = 1, experts = 1;  // T, k, E
  int64_t hidden = 0, ffn = 0;                   // h, f
  Activation activation = Activation::identity;
  bool gated = false;
  MlpShape expert(int64_t rows) const { return {rows, hidden, ffn, activation, gated}; }
};
struct ExpertMlpInputs {
  In x, chosen, probs, w1, w2;
};
struct ExpertMlpGradients {
  Values x, probs, w1, w2;
};

Values expert_mlp(const ExpertMlpShape&, const ExpertMlpInputs&);
ExpertMlpGradients expert_mlp_backward(const ExpertMlpShape&, const ExpertMlpInputs&, In g);

// What an implementation may lose by rounding (mlp.hpp), whose experts are cut over r.ranks ranks.
// Rows that are results are rounded before they travel: those of Z, of probs dy and of D. dW is
// what one copy of the experts makes of these tokens, before copies are summed.
struct ExpertMlpLosses {
  Loss x, probs, w1, w2;
};
Loss expert_mlp_loss(const ExpertMlpShape&, const ExpertMlpInputs&, const Rounding&);
ExpertMlpLosses expert_mlp_backward_loss(const ExpertMlpShape&, const ExpertMlpInputs&, In g,
                                         const Rounding&);

}  // namespace shardproof::reference
