#pragma once
#include <cuda_bf16.h>

using __half = cuda_on_host::HalfNumber<5>;
using half = __half;
inline float __half2float(__half x) { return float(x); }
inline __half __float2half_rn(float x) { return __half(x); }
inline __half __float2half(float x) { return __half(x); }
inline __half __ushort_as_half(unsigned short bits) {
  __half x;
  x.bits = bits;
  return x;
}
