// Pointwise functions of an MLP and their slopes, in the type that is computed in (float, double).
#pragma once
#include <cmath>
#include <stdexcept>
#include <string>
#include <string_view>

#include "primitives/element.hpp"

namespace shardproof::primitives {

enum class Activation { identity, gelu, gelu_tanh, silu };

// swiglu gates with silu: its pointwise part.
inline Activation pointwise(std::string_view word) {
  if (word == "identity") return Activation::identity;
  if (word == "gelu") return Activation::gelu;
  if (word == "gelu_tanh") return Activation::gelu_tanh;
  if (word == "silu" || word == "swiglu") return Activation::silu;
  throw std::invalid_argument(
      "activation: expected identity, gelu, gelu_tanh, silu or swiglu, met '" + std::string(word) +
      "'");
}

template <class T>
SHARDPROOF_HD T sigmoid(T x) {
  return T(1) / (T(1) + std::exp(-x));
}
template <class T>
SHARDPROOF_HD T normal_distribution(T x) {  // Phi
  return T(0.5) * (T(1) + std::erf(x * T(0.70710678118654752440)));
}
template <class T>
SHARDPROOF_HD T gelu_tangent(T x) {  // tanh(sqrt(2/pi) (x + 0.044715 x^3))
  return std::tanh(T(0.79788456080286535588) * (x + T(0.044715) * x * x * x));
}

template <class T>
SHARDPROOF_HD T activate(Activation a, T x) {
  switch (a) {
    case Activation::identity:
      return x;
    case Activation::gelu:
      return x * normal_distribution(x);
    case Activation::gelu_tanh:
      return T(0.5) * x * (T(1) + gelu_tangent(x));
    case Activation::silu:
      return x * sigmoid(x);
  }
  return x;
}

template <class T>
SHARDPROOF_HD T slope(Activation a, T x) {
  switch (a) {
    case Activation::identity:
      return T(1);
    case Activation::gelu:  // Phi(x) + x phi(x)
      return normal_distribution(x) + x * T(0.39894228040143267794) * std::exp(T(-0.5) * x * x);
    case Activation::gelu_tanh: {
      const T t = gelu_tangent(x);
      return T(0.5) * (T(1) + t) +
             T(0.5) * x * (T(1) - t * t) * T(0.79788456080286535588) * (T(1) + T(0.134145) * x * x);
    }
    case Activation::silu: {
      const T s = sigmoid(x);
      return s * (T(1) + x * (T(1) - s));
    }
  }
  return T(1);
}

}  // namespace shardproof::primitives
