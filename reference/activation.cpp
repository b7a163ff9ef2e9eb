#include "reference/activation.hpp"

#include <cmath>
#include <numbers>
#include <stdexcept>

namespace shardproof::reference {
namespace {

double normal_density(double x) { return std::exp(-0.5 * x * x) / std::sqrt(2 * std::numbers::pi); }
// erfc keeps the digits of the left tail that 1 + erf loses.
double normal_distribution(double x) { return 0.5 * std::erfc(-x / std::numbers::sqrt2); }
double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

const double tanh_scale = std::sqrt(2 / std::numbers::pi);
constexpr double tanh_cubic = 0.044715;
double gelu_angle(double x) { return std::tanh(tanh_scale * (x + tanh_cubic * x * x * x)); }

void require_rows(size_t values, int64_t width) {
  if (width <= 0 || values % size_t(width))
    throw std::invalid_argument(
        "reference activation: the number of values must be a multiple of the row");
}

}  // namespace

std::optional<Activation> activation_from(std::string_view word) {
  if (word == "identity") return Activation::identity;
  if (word == "gelu") return Activation::gelu;
  if (word == "gelu_tanh") return Activation::gelu_tanh;
  if (word == "silu") return Activation::silu;
  return std::nullopt;
}

double activate(Activation a, double x) {
  switch (a) {
    case Activation::identity:
      return x;
    case Activation::gelu:
      return x * normal_distribution(x);
    case Activation::gelu_tanh:
      return 0.5 * x * (1 + gelu_angle(x));
    case Activation::silu:
      return x * sigmoid(x);
  }
  throw std::invalid_argument("reference activation: not one of the list");
}

double slope(Activation a, double x) {
  switch (a) {
    case Activation::identity:
      return 1;
    case Activation::gelu:
      return normal_distribution(x) + x * normal_density(x);
    case Activation::gelu_tanh: {
      const double t = gelu_angle(x);
      return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * tanh_scale * (1 + 3 * tanh_cubic * x * x);
    }
    case Activation::silu:
      return sigmoid(x) * (1 + x * (1 - sigmoid(x)));
  }
  throw std::invalid_argument("reference activation: not one of the list");
}

// gelu''(x) = phi(x) (2 - x^2), largest at 0: 2 phi(0) < 0.8; the tanh form has the same value and
// maximum at 0. silu''(0) = 1/2 is the largest of silu''.
double greatest_curvature(Activation a) {
  switch (a) {
    case Activation::identity:
      return 0;
    case Activation::gelu:
    case Activation::gelu_tanh:
      return 0.8;
    case Activation::silu:
      return 0.5;
  }
  throw std::invalid_argument("reference activation: not one of the list");
}

Values activate(Activation a, In x) {
  Values y(x.size());
  for (size_t i = 0; i < x.size(); ++i) y[i] = activate(a, x[i]);
  return y;
}

Values activate_backward(Activation a, In x, In g) {
  Values d(x.size());
  for (size_t i = 0; i < x.size(); ++i) d[i] = g[i] * slope(a, x[i]);
  return d;
}

Values swiglu(In z, int64_t ffn) {
  require_rows(z.size(), 2 * ffn);
  const size_t f = size_t(ffn), rows = z.size() / (2 * f);
  Values h(rows * f);
  for (size_t t = 0; t < rows; ++t)
    for (size_t j = 0; j < f; ++j)
      h[t * f + j] = activate(Activation::silu, z[2 * t * f + j]) * z[(2 * t + 1) * f + j];
  return h;
}

Values swiglu_backward(In z, In g, int64_t ffn) {
  require_rows(z.size(), 2 * ffn);
  const size_t f = size_t(ffn), rows = z.size() / (2 * f);
  Values d(z.size());
  for (size_t t = 0; t < rows; ++t)
    for (size_t j = 0; j < f; ++j) {
      const size_t gate = 2 * t * f + j, up = gate + f;
      d[gate] = g[t * f + j] * z[up] * slope(Activation::silu, z[gate]);
      d[up] = g[t * f + j] * activate(Activation::silu, z[gate]);
    }
  return d;
}

}  // namespace shardproof::reference
