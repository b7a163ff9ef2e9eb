// Layer normalisation and root-mean-square normalisation over the last dim, in double.
//
//   layer_norm  xhat = (x - mean) / sqrt(var + eps), var biased;  y = gamma xhat + beta
//   rms_norm    xhat = x / sqrt(mean x^2 + eps);                  y = gamma xhat
// x is rows of `width` values; gamma and beta have `width`.
#pragma once
#include <cstdint>

#include "reference/linear.hpp"

namespace shardproof::reference {

struct NormGradients {
  Values x, gamma, beta;  // beta is empty for rms_norm
};

Values layer_norm(In x, In gamma, In beta, int64_t width, double eps);
NormGradients layer_norm_backward(In x, In gamma, In g, int64_t width, double eps);

Values rms_norm(In x, In gamma, int64_t width, double eps);
NormGradients rms_norm_backward(In x, In gamma, In g, int64_t width, double eps);

}  // namespace shardproof::reference
