// Pointwise functions between the two linears of an MLP, and their slopes, in double.
//
//   gelu       x Phi(x), Phi the normal distribution function
//   gelu_tanh  x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) / 2
//   silu       x sigma(x)
// The two forms of GELU differ by at most 4.73e-4 in value: which one is meant must be said.
#pragma once
#include <cstdint>
#include <optional>
#include <string_view>

#include "reference/linear.hpp"

namespace shardproof::reference {

enum class Activation : uint8_t { identity, gelu, gelu_tanh, silu };
std::optional<Activation> activation_from(std::string_view);

double activate(Activation, double x);
double slope(Activation, double x);
// An upper bound of |second derivative| over the line: 0, 2 phi(0) = 0.798 (both GELUs), 1/2.
double greatest_curvature(Activation);

Values activate(Activation, In x);
Values activate_backward(Activation, In x, In g);

// H = silu(G) o U of Z = [G | U], rows of 2f values; H has f.
Values swiglu(In z, int64_t ffn);
Values swiglu_backward(In z, In g, int64_t ffn);

}  // namespace shardproof::reference
