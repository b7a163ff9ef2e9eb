// What a tensor core adds up, as published measurements of them have it (Fasi, Higham, Mikaitis and
// Pranesh, "Numerical behavior of NVIDIA tensor cores", 2021; Khattak and Mikaitis, "Accurate
// models of NVIDIA tensor cores", 2025): products of halves are exact; those of a few terms and the
// sum so far are aligned to the greatest of them, cut off behind a bit more than f32 holds, added,
// and the sum is cut off to f32. Never is anything rounded to nearest. The fewer terms at a time
// and the fewer bits, the greater the error: here those of 8.0, the oldest device with these
// instructions.
#pragma once
#include <cmath>
#include <cstdint>

namespace shardproof {

inline constexpr int tensor_core_terms = 8, tensor_core_extra_bits = 1;

inline float toward_zero(double value) {
  const float near = float(value);
  return std::abs(double(near)) > std::abs(value) ? std::nextafter(near, 0.0f) : near;
}

// `sum` and the products of `n` terms at most tensor_core_terms of them; term(i) is exact.
template <class Term>
float tensor_core_step(float sum, int n, Term term) {
  double greatest = std::abs(double(sum)), plain = sum;
  for (int i = 0; i < n; ++i) greatest = std::fmax(greatest, std::abs(term(i))), plain += term(i);
  if (!std::isfinite(plain) || greatest == 0) return float(plain);
  int exponent = 0;
  std::frexp(greatest, &exponent);
  const double unit = std::ldexp(1.0, exponent - 24 - tensor_core_extra_bits);
  double units = std::trunc(double(sum) / unit);
  for (int i = 0; i < n; ++i) units += std::trunc(term(i) / unit);
  return toward_zero(units * unit);
}

}  // namespace shardproof
