// The two half types as numbers that are stored, and their conversions: bf16 here, f16 in
// cuda_fp16.h.
#pragma once
#include <cuda_runtime.h>

namespace cuda_on_host {

// To nearest, ties to even, by doubling the spacing of what is kept: a binary format of 16 bits.
template <int exponent_bits>
uint16_t rounded_half(float value) {
  constexpr int fraction_bits = 15 - exponent_bits, bias = (1 << (exponent_bits - 1)) - 1;
  constexpr unsigned infinity = ((1u << exponent_bits) - 1) << fraction_bits;
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const unsigned sign = bits >> 31 << 15;
  if (value != value) return uint16_t(sign | infinity | 1u << (fraction_bits - 1));
  const double magnitude = value < 0 ? -double(value) : double(value);
  if (magnitude == 0) return uint16_t(sign);
  if (magnitude > __FLT_MAX__) return uint16_t(sign | infinity);
  int exponent = int(bits >> 23 & 0xFF) - 127;  // of a float that is no subnormal
  if (exponent < 1 - bias) exponent = 1 - bias;
  // A multiple of the spacing 2^(exponent - fraction_bits), by adding 2^52 spacings and taking them
  // away: double rounds at that place.
  double spacing = 1;
  for (int e = exponent - fraction_bits; e != 0; e += e < 0 ? 1 : -1) spacing *= e < 0 ? 0.5 : 2;
  const auto steps = uint64_t((magnitude / spacing + 0x1p52) - 0x1p52);
  const uint64_t coded = steps + (uint64_t(exponent + bias - 1) << fraction_bits);
  return uint16_t(sign | (coded < infinity ? coded : infinity));
}
template <int exponent_bits>
float widened_half(uint16_t half) {
  constexpr int fraction_bits = 15 - exponent_bits, bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = half >> fraction_bits & ((1 << exponent_bits) - 1),
            fraction = half & ((1 << fraction_bits) - 1);
  const float sign = half >> 15 ? -1.0f : 1.0f;
  if (exponent == (1 << exponent_bits) - 1)
    return fraction ? __builtin_nanf("") : sign * __builtin_inff();
  const int steps = exponent ? fraction + (1 << fraction_bits) : fraction;
  return float(sign * __builtin_ldexp(steps, (exponent ? exponent : 1) - bias - fraction_bits));
}

template <int exponent_bits>
struct HalfNumber {
  uint16_t bits;
  HalfNumber() = default;
  explicit HalfNumber(float value) : bits(rounded_half<exponent_bits>(value)) {}
  explicit operator float() const { return widened_half<exponent_bits>(bits); }
};

}  // namespace cuda_on_host

using __nv_bfloat16 = cuda_on_host::HalfNumber<8>;
inline float __bfloat162float(__nv_bfloat16 x) { return float(x); }
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return __nv_bfloat16(x); }
inline __nv_bfloat16 __float2bfloat16(float x) { return __nv_bfloat16(x); }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) {
  __nv_bfloat16 x;
  x.bits = bits;
  return x;
}
