// Reductions in member order, a chunk at a time: accumulators of a chunk stay in the first cache.
#include "oracle/comm/reduce.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace shardproof {
namespace {

constexpr int64_t chunk = 512;

template <class T>
struct Arithmetic {
  using Sum = T;
  static Sum wide(T x) { return x; }
  static T narrow(Sum x) { return x; }
  static Sum add(Sum a, Sum b) { return a + b; }
};
template <class T>
struct HalfArithmetic {
  using Sum = float;
  static Sum wide(T x) { return to_float(x); }
  static Sum add(Sum a, Sum b) { return a + b; }
};
template <>
struct Arithmetic<bf16> : HalfArithmetic<bf16> {
  static bf16 narrow(float x) { return to_bf16(x); }
};
template <>
struct Arithmetic<f16> : HalfArithmetic<f16> {
  static f16 narrow(float x) { return to_f16(x); }
};
template <class T>
struct IntegerArithmetic {
  using Sum = int64_t;
  static Sum wide(T x) { return x; }
  static T narrow(Sum x) { return T(x); }
  static Sum add(Sum a, Sum b) { return Sum(uint64_t(a) + uint64_t(b)); }
};
template <>
struct Arithmetic<int64_t> : IntegerArithmetic<int64_t> {};
template <>
struct Arithmetic<int32_t> : IntegerArithmetic<int32_t> {};

// A NaN is not below anything: that of a stays, and that of b is taken.
template <class Sum>
Sum larger(Sum a, Sum b) {
  return b != b || a < b ? b : a;
}

template <class T>
void reduce_chunk(Reduce reduce, std::span<const std::byte* const> from, int64_t start,
                  int64_t length, std::byte* out) {
  using A = Arithmetic<T>;
  typename A::Sum sum[chunk];
  const auto contribution = [&](size_t m) { return reinterpret_cast<const T*>(from[m]) + start; };
  for (int64_t i = 0; i < length; ++i) sum[i] = A::wide(contribution(0)[i]);
  for (size_t m = 1; m < from.size(); ++m) {
    const T* next = contribution(m);
    if (reduce == Reduce::max) {
      for (int64_t i = 0; i < length; ++i) sum[i] = larger(sum[i], A::wide(next[i]));
    } else {
      for (int64_t i = 0; i < length; ++i) sum[i] = A::add(sum[i], A::wide(next[i]));
    }
  }
  if (reduce == Reduce::avg) {
    const auto p = typename A::Sum(from.size());
    for (int64_t i = 0; i < length; ++i) sum[i] /= p;
  }
  T result[chunk];
  for (int64_t i = 0; i < length; ++i) result[i] = A::narrow(sum[i]);
  std::memcpy(out + start * int64_t(sizeof(T)), result, size_t(length) * sizeof(T));
}

template <class T>
void reduce_all(Reduce reduce, std::span<const std::byte* const> from, int64_t count,
                std::byte* out) {
  for (int64_t start = 0; start < count; start += chunk) {
    reduce_chunk<T>(reduce, from, start, std::min(chunk, count - start), out);
  }
}

}  // namespace

void reduce_members(Reduce reduce, DType dtype, std::span<const std::byte* const> from,
                    int64_t count, std::byte* out) {
  switch (dtype) {
    case DType::f64:
      return reduce_all<double>(reduce, from, count, out);
    case DType::f32:
      return reduce_all<float>(reduce, from, count, out);
    case DType::bf16:
      return reduce_all<bf16>(reduce, from, count, out);
    case DType::f16:
      return reduce_all<f16>(reduce, from, count, out);
    case DType::i64:
      return reduce_all<int64_t>(reduce, from, count, out);
    case DType::i32:
      return reduce_all<int32_t>(reduce, from, count, out);
  }
}

}  // namespace shardproof
