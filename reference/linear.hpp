// Y = X W^T + b and its gradients on whole tensors, in double, by one process.
//
//   X [T,i]   W [o,i]   b [o] or empty   Y [T,o]
//
// Every tensor is row-major. Fed with absolute values the same sums are the magnitudes, fed with
// squares the sums of squared terms, that error bounds are made of.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

namespace shardproof::reference {

using Values = std::vector<double>;
using In = std::span<const double>;

struct LinearShape {
  int64_t tokens = 0, in = 0, out = 0;  // T, i, o
};

Values linear(const LinearShape&, In x, In w, In b);

struct LinearGradients {
  Values x, w, b;  // shapes of X, W, b
};
// g is the cotangent of Y, [T,o].
LinearGradients linear_backward(const LinearShape&, In x, In w, In g);

Values absolute(In);
Values squared(In);

}  // namespace shardproof::reference
