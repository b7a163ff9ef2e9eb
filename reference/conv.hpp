// Causal depthwise convolution: every channel of a sequence is filtered by itself.
//
//   y_t[c] = b[c] + sum_(j < k) w[c, j] x_(t-k+1+j)[c], nothing before the start of the sequence
//
//   x, y [T, channels], one sequence number a token    w [channels, k]    b [channels]
//
// Rows of padding have y = 0 and no gradient, and add to none. Fed with absolute values, or
// squares, the same sums are those that error bounds are made of.
#pragma once
#include "reference/linear.hpp"

namespace shardproof::reference {

struct Conv {
  int64_t channels = 1, width = 1;
};

Values conv(const Conv&, std::span<const int64_t> sequences, In x, In w, In b);

struct ConvGradients {
  Values x, w, b;
};
ConvGradients conv_backward(const Conv&, std::span<const int64_t> sequences, In x, In w, In g);

}  // namespace shardproof::reference
