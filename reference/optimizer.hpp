// What a step of an optimizer makes of masters and moments, in double, and how far an
// implementation may be from it.
#pragma once
#include <cstdint>

#include "reference/running_error.hpp"

namespace shardproof::reference {

// As PyTorch documents its optimizers (torch.optim.AdamW; torch.optim.SGD with momentum, no
// dampening).
//   adamw  m' = beta1 m + (1 - beta1) g, v' = beta2 v + (1 - beta2) g^2
//          x' = x (1 - lr decay) - lr m^ / (sqrt(v^) + eps),   m^ = m' / (1 - beta1^step), v^ alike
//   sgd    m' = momentum m + g + decay x, x' = x - lr m'
struct StepRule {
  bool adamw = true;
  double lr = 0, decay = 0, momentum = 0, beta1 = 0, beta2 = 0, eps = 0;
  int64_t step = 1;
};

// A number and how far what is computed of it may be off.
struct Off {
  double value = 0, error = 0;
  double low() const { return value - error; }
  double high() const { return value + error; }
  double most() const;  // bound of |computed|
};
// b a + w x, as it stands or, where w is 1 - b, as a + w (x - a), b rounded before w is formed or
// not.
Off mixed(double b, const Off& a, double w, const Off& x, double u);
// x (1 - shrunk) - lr r, in any arrangement.
Off moved(double x, double shrunk, double lr, const Off& r, double u);

// What a step begins with: a sum of microbatches on each of the ranks, and of that over the ranks,
// or a share of it.
struct Parts {
  double ranks = 1, microbatches = 1, share = 1;
};
// Each part is rounded to the wire type and added there, by microbatches first; of the ranks and of
// the microbatches a share is taken anywhere on that way, and the result is converted once more.
// One part of one rank is exact.
Uncertain sum_of_parts(Values sum, In magnitude, const Parts&, const Rounding&);

struct Step {
  Uncertain master, m, v;
};
// x, m and v are exact, g is off by its error; `matrix` says of each element whether it decays. In
// arithmetic of unit roundoff u, betas and lr among its numbers.
Step step(const StepRule&, In x, In m, In v, const Uncertain& g, const std::vector<bool>& matrix,
          double u);

// The norm of what is off by its error, n squares added in any order, and what is scaled down to a
// norm of at most `limit`.
Uncertain norm_of(const Uncertain& g, int64_t terms, double u);
Uncertain clipped(const Uncertain& g, const Uncertain& norm, double limit, double u);

}  // namespace shardproof::reference
