// Elements of tensors as host and device code read and write them: one text for both. Plain data,
// C++17, nothing of the project, so that a device's compiler sees no more than this.
//
// A body is a struct of tensors and numbers with a function for one element, one row or one column
// of its result; launch.hpp says who runs bodies. Indices and offsets are 64 bits wide.
#pragma once
#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define SHARDPROOF_HD __host__ __device__
#else
#define SHARDPROOF_HD
#endif

namespace shardproof::primitives {

enum class Number : int { f64, f32, bf16, f16, i64, i32 };

SHARDPROOF_HD inline int bytes_of(Number n) {
  switch (n) {
    case Number::f64:
    case Number::i64:
      return 8;
    case Number::f32:
    case Number::i32:
      return 4;
    default:
      return 2;
  }
}

template <class To, class From>
SHARDPROOF_HD To same_bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

// An element of memory, whatever it was written as.
template <class T>
SHARDPROOF_HD T read_element(const void* from) {
#ifdef __CUDA_ARCH__
  return *static_cast<const T*>(from);
#else
  T value;
  memcpy(&value, from, sizeof value);
  return value;
#endif
}
template <class T>
SHARDPROOF_HD void write_element(void* to, T value) {
#ifdef __CUDA_ARCH__
  *static_cast<T*>(to) = value;
#else
  memcpy(to, &value, sizeof value);
#endif
}

// A binary interchange format of 16 bits: sign, exponent, fraction.
struct HalfFormat {
  int exponent_bits, fraction_bits;
  SHARDPROOF_HD constexpr int bias() const { return (1 << (exponent_bits - 1)) - 1; }
  SHARDPROOF_HD constexpr uint16_t infinity() const {
    return uint16_t(((1 << exponent_bits) - 1) << fraction_bits);
  }
};

// To nearest, ties to even, in one rounding from double; carries move into the exponent.
SHARDPROOF_HD inline uint16_t narrowed(double value, HalfFormat half) {
  const uint64_t bits = same_bits<uint64_t>(value);
  const uint16_t sign = uint16_t(bits >> 63 << 15);
  const uint64_t fraction = bits & ((uint64_t(1) << 52) - 1);
  const int exponent = int(bits >> 52 & 0x7FF) - 1023;
  if (exponent == 1024) {  // infinity, or NaN: quiet, with the leading bits of its payload
    const uint16_t quiet = uint16_t(1 << (half.fraction_bits - 1));
    const uint16_t payload = uint16_t(fraction >> (52 - half.fraction_bits));
    return uint16_t(sign | half.infinity() | (fraction == 0 ? 0 : quiet | payload));
  }
  const int lowest = 1 - half.bias();
  const int shift = 52 - half.fraction_bits + (exponent < lowest ? lowest - exponent : 0);
  if (shift > 53) return sign;
  const uint64_t significand = fraction | uint64_t(1) << 52;
  const uint64_t rest = significand & ((uint64_t(1) << shift) - 1);
  const uint64_t middle = uint64_t(1) << (shift - 1), floor = significand >> shift;
  const uint64_t kept = floor + (rest > middle || (rest == middle && (floor & 1)));
  const uint64_t below = exponent < lowest ? 0 : uint64_t(exponent - lowest) << half.fraction_bits;
  const uint64_t magnitude = below + kept;
  return uint16_t(sign | (magnitude < half.infinity() ? magnitude : half.infinity()));
}

SHARDPROOF_HD inline float widened_bf16(uint16_t bits) {
  return same_bits<float>(uint32_t(bits) << 16);
}
SHARDPROOF_HD inline float widened_f16(uint16_t bits) {
  const uint32_t sign = uint32_t(bits & 0x8000) << 16, exponent = bits >> 10 & 0x1F,
                 fraction = bits & 0x3FF;
  if (exponent == 0) {  // subnormal: fraction * 2^-24, exact in float
    const float magnitude = float(fraction) * 0x1p-24f;
    return sign ? -magnitude : magnitude;
  }
  const uint32_t wide = exponent == 0x1F ? 0xFF : exponent + (127 - 15);
  return same_bits<float>(sign | wide << 23 | fraction << 13);
}

// As a factor: no product keeps the payload of a NaN, and a device has an instruction for the rest.
SHARDPROOF_HD inline float factor_of_f16(uint16_t bits) {
#if defined(__NVCC__) && defined(__CUDA_ARCH__)
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
#else
  return widened_f16(bits);
#endif
}

// As `narrowed` rounds; a device has an instruction for it.
template <Number half>
SHARDPROOF_HD uint16_t rounded_half(float value) {
  static_assert(half == Number::bf16 || half == Number::f16);
#if defined(__NVCC__) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  uint16_t bits;
  if constexpr (half == Number::bf16)
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  else
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
#else
  return half == Number::bf16 ? narrowed(value, {8, 7}) : narrowed(value, {5, 10});
#endif
}

inline constexpr int most_dims = 5;

// Strides count elements; row-major order of the indices numbers the elements. Null: no tensor.
struct Tensor {
  void* data = nullptr;
  Number number = Number::f64;
  int dims = 0;
  int64_t shape[most_dims] = {}, strides[most_dims] = {};
  int64_t elements = 0;

  SHARDPROOF_HD bool there() const { return data != nullptr; }
  SHARDPROOF_HD int64_t place(int64_t i) const {
    if (dims == 0) return 0;
    int64_t offset = 0;
#ifdef __CUDA_ARCH__
#pragma unroll 1  // written out at every load it is most of what ptxas has to do
#endif
    for (int d = dims - 1; d > 0; --d) {
      offset += i % shape[d] * strides[d];
      i /= shape[d];
    }
    return offset + i * strides[0];
  }
  SHARDPROOF_HD void* address(int64_t place) const {
    return static_cast<char*>(data) + place * bytes_of(number);
  }
  SHARDPROOF_HD void* at(int64_t i) const { return address(place(i)); }
  template <class A = double>
  SHARDPROOF_HD A load(int64_t i) const {
    return load_from<A>(place(i));
  }
  template <class A = double>
  SHARDPROOF_HD A load_from(int64_t place) const {
    const void* from = address(place);
    switch (number) {
      case Number::f64:
        return A(read_element<double>(from));
      case Number::f32:
        return A(read_element<float>(from));
      case Number::bf16:
        return A(widened_bf16(read_element<uint16_t>(from)));
      case Number::f16:
        return A(widened_f16(read_element<uint16_t>(from)));
      case Number::i64:
        return A(read_element<int64_t>(from));
      case Number::i32:
        return A(read_element<int32_t>(from));
    }
    return A(0);
  }
  SHARDPROOF_HD int64_t integer(int64_t i) const {
    return number == Number::i64   ? read_element<int64_t>(at(i))
           : number == Number::i32 ? int64_t(read_element<int32_t>(at(i)))
                                   : int64_t(load<double>(i));
  }
  // One rounding.
  template <class A>
  SHARDPROOF_HD void store(int64_t i, A value) const {
    void* to = at(i);
    switch (number) {
      case Number::f64:
        write_element<double>(to, double(value));
        return;
      case Number::f32:
        write_element<float>(to, float(value));
        return;
      case Number::bf16:
        write_element<uint16_t>(to, narrowed(double(value), {8, 7}));
        return;
      case Number::f16:
        write_element<uint16_t>(to, narrowed(double(value), {5, 10}));
        return;
      case Number::i64:
        write_element<int64_t>(to, int64_t(value));
        return;
      case Number::i32:
        write_element<int32_t>(to, int32_t(value));
        return;
    }
  }
  // Bits as they are: a NaN keeps its payload.
  SHARDPROOF_HD void copy_from(int64_t i, const Tensor& from, int64_t j) const {
    switch (bytes_of(number)) {
      case 8:
        write_element(at(i), read_element<uint64_t>(from.at(j)));
        return;
      case 4:
        write_element(at(i), read_element<uint32_t>(from.at(j)));
        return;
      default:
        write_element(at(i), read_element<uint16_t>(from.at(j)));
    }
  }
};

// How a body is run: once an element, or once a row, column or tile (tiles.hpp) by a team of
// threads.
enum class Shape { elements, rows, columns, tiles };

// The team of one: a serial loop. A device's is a block of threads (cuda/grid.cuh).
struct Alone {
  SHARDPROOF_HD int64_t first() const { return 0; }
  SHARDPROOF_HD int64_t step() const { return 1; }
  SHARDPROOF_HD bool leads() const { return true; }
  template <class A>
  SHARDPROOF_HD A sum(A own) const {
    return own;
  }
  template <class A>
  SHARDPROOF_HD A greatest(A own) const {
    return own;
  }
};

}  // namespace shardproof::primitives
