// Rotary position embedding: the pair (x_i, x_{i+d/2}) of a head is turned by position * theta_i,
// theta_i = base^(-2i/d). Its transpose turns back.
//
//   x [T, heads, d], one position for each token
#pragma once
#include <cstdint>
#include <span>

#include "reference/linear.hpp"

namespace shardproof::reference {

struct Rotary {
  int64_t heads = 1, head_dim = 2;
  double base = 10000;
};

double rotary_angle(const Rotary&, int64_t position, int64_t pair);
Values rotary(const Rotary&, std::span<const int64_t> positions, In x);
Values rotary_backward(const Rotary&, std::span<const int64_t> positions, In g);

// |error| of an implementation that takes its angles in unit roundoff u, before its result is
// stored: u (2 |angle| + 4) (|x_i| + |x_{i+d/2}|), the position and theta being rounded as factors;
// and 2^-53 8 |angle| more, since theta is a power in double, which may be off by two ulps (4 u) on
// either side: what CUDA documents of pow, where glibc documents one.
Values rotary_bounds(const Rotary&, std::span<const int64_t> positions, In x, double u);
// What errors of x are at most in y: |cos| e_i + |sin| e_{i+d/2}, whichever way it turns.
Values rotary_errors(const Rotary&, std::span<const int64_t> positions, In e);

}  // namespace shardproof::reference
