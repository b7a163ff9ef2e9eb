#include "reference/rotary.hpp"

#include <cmath>
#include <stdexcept>
#include <string>

namespace shardproof::reference {
namespace {

void require_shape(const Rotary& r, std::span<const int64_t> positions, In x) {
  const size_t expected = positions.size() * size_t(r.heads * r.head_dim);
  if (r.head_dim % 2 == 0 && x.size() == expected) return;
  throw std::invalid_argument("reference rotary: expected an even head_dim and " +
                              std::to_string(expected) + " elements, met head_dim " +
                              std::to_string(r.head_dim) + " and " + std::to_string(x.size()));
}

// Calls visit(place of x_i, place of x_{i+d/2}, angle) for every pair.
template <class Visit>
void each_pair(const Rotary& r, std::span<const int64_t> positions, const Visit& visit) {
  const int64_t half = r.head_dim / 2;
  for (size_t t = 0; t < positions.size(); ++t)
    for (int64_t h = 0; h < r.heads; ++h)
      for (int64_t i = 0; i < half; ++i) {
        const size_t at = size_t((int64_t(t) * r.heads + h) * r.head_dim + i);
        visit(at, at + size_t(half), rotary_angle(r, positions[t], i));
      }
}

Values turned(const Rotary& r, std::span<const int64_t> positions, In x, double sense) {
  require_shape(r, positions, x);
  Values y(x.size());
  each_pair(r, positions, [&](size_t a, size_t b, double angle) {
    const double c = std::cos(angle), s = sense * std::sin(angle);
    y[a] = x[a] * c - x[b] * s;
    y[b] = x[b] * c + x[a] * s;
  });
  return y;
}

}  // namespace

double rotary_angle(const Rotary& r, int64_t position, int64_t pair) {
  return double(position) * std::pow(r.base, -2.0 * double(pair) / double(r.head_dim));
}

Values rotary(const Rotary& r, std::span<const int64_t> positions, In x) {
  return turned(r, positions, x, 1);
}

Values rotary_backward(const Rotary& r, std::span<const int64_t> positions, In g) {
  return turned(r, positions, g, -1);
}

Values rotary_bounds(const Rotary& r, std::span<const int64_t> positions, In x, double u) {
  require_shape(r, positions, x);
  Values bound(x.size());
  each_pair(r, positions, [&](size_t a, size_t b, double angle) {
    const double of_theta = 0x1p-53 * 8 * std::abs(angle);
    const double error =
        (u * (2 * std::abs(angle) + 4) + of_theta) * (std::abs(x[a]) + std::abs(x[b]));
    bound[a] = bound[b] = error;
  });
  return bound;
}

Values rotary_errors(const Rotary& r, std::span<const int64_t> positions, In e) {
  require_shape(r, positions, e);
  Values turned(e.size());
  each_pair(r, positions, [&](size_t a, size_t b, double angle) {
    const double c = std::abs(std::cos(angle)), s = std::abs(std::sin(angle));
    turned[a] = c * e[a] + s * e[b];
    turned[b] = c * e[b] + s * e[a];
  });
  return turned;
}

}  // namespace shardproof::reference
