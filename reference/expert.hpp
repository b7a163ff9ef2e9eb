// A layer of linear experts (mixture of experts) on whole tensors, in double, by one process.
//
//   X [T,h]   chosen, probs [T,k]   W [E,o,h]   Y [T,o]
//   y_t = sum over j of probs_tj W_{chosen_tj} x_t
//
// Fed with absolute values the same sums are the magnitudes that error bounds are made of.
#pragma once
#include <cstdint>

#include "reference/linear.hpp"

namespace shardproof::reference {

struct ExpertShape {
  int64_t tokens = 0, choices = 1, experts = 1, in = 0, out = 0;  // T, k, E, h, o
};

Values experts(const ExpertShape&, In x, In chosen, In probs, In w);

struct ExpertGradients {
  Values x, probs, w;  // shapes of X, probs, W; an expert that nothing has chosen has gradient 0
};
// g is the cotangent of Y, [T,o].
ExpertGradients experts_backward(const ExpertShape&, In x, In chosen, In probs, In w, In g);

// Load balance of a router, the caller's factor left out: probs [T,E], chosen [T,k],
//   loss = sum over e of n_e S_e, n_e choices of e by all tokens, S_e the sum of their probs of e
struct BalanceShape {
  int64_t tokens = 0, choices = 1, experts = 1;
};
Values choices_of_experts(const BalanceShape&, In chosen);  // n [E]
double balance(const BalanceShape&, In probs, In chosen);
// g is the cotangent of the loss; the counts have no gradient.
Values balance_backward(const BalanceShape&, In chosen, double g);

}  // namespace shardproof::reference
