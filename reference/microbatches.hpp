// A training step of a stack of linears, one microbatch after another: forward, then gradients,
// which add up. Which stage does what and when is no matter of mathematics.
#pragma once
#include "reference/stack.hpp"

namespace shardproof::reference {

struct StackStep {
  Values y;
  StackGradients d;  // of x, and of every layer's parameters
};

// Tokens are cut into `groups` runs of equal length, which have microbatches of `size` tokens each;
// the last one of a group has what is left. dy is the cotangent of Y,
// divided by `divisor`.
StackStep stack_step(const StackInputs&, In dy, int64_t groups, int64_t size, double divisor);

// The cotangent that gradients are made of, as a tensor that is stored unless the divisor is 1.
Uncertain divided_cotangent(In dy, double divisor, const Rounding&);

}  // namespace shardproof::reference
