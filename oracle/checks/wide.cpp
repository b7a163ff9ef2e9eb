// Each loop is written once and compiled for three widths; the last few elements are taken one by
// one. No product is fused with a sum: that rounds otherwise.
#include "oracle/checks/wide.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#endif

namespace shardproof::wide {
namespace {

// To the nearest whole number and back, right up to 2^51. From there on what comes back the same is
// whole, too, or infinite.
constexpr double rounding = 0x1.8p52;
constexpr double whole_sums = 0x1p53;  // below it sums of whole numbers are exact in any order
constexpr size_t few = 512;            // elements that are loaded at a time

// An f32 wherever it lies.
struct Single {
  std::byte bytes[4];
};
double value(double v) { return v; }
double value(const Single& s) {
  float v;
  std::memcpy(&v, &s, sizeof v);
  return double(v);
}

bool is_whole(double v) { return (v + rounding) - rounding == v; }

#define SHARDPROOF_WIDE(NAME, TARGET, WIDTH, DOUBLES)                                     \
  struct NAME {                                                                           \
    typedef double Doubles __attribute__((vector_size(8 * WIDTH)));                       \
    typedef int64_t Words __attribute__((vector_size(8 * WIDTH)));                        \
    typedef float Floats __attribute__((vector_size(4 * WIDTH)));                         \
    typedef uint32_t Halves __attribute__((vector_size(4 * WIDTH)));                      \
    typedef uint16_t Quarters __attribute__((vector_size(2 * WIDTH)));                    \
                                                                                          \
    TARGET static size_t floats(const std::byte* from, size_t n, double* to) {            \
      size_t i = 0;                                                                       \
      for (; i + WIDTH <= n; i += WIDTH) {                                                \
        Floats v;                                                                         \
        std::memcpy(&v, from + 4 * i, sizeof v);                                          \
        const Doubles d = DOUBLES(v);                                                     \
        std::memcpy(to + i, &d, sizeof d);                                                \
      }                                                                                   \
      return i;                                                                           \
    }                                                                                     \
    TARGET static size_t brain_floats(const std::byte* from, size_t n, double* to) {      \
      size_t i = 0;                                                                       \
      for (; i + WIDTH <= n; i += WIDTH) {                                                \
        Quarters v;                                                                       \
        std::memcpy(&v, from + 2 * i, sizeof v);                                          \
        const Halves bits = __builtin_convertvector(v, Halves) << 16;                     \
        const Doubles d = DOUBLES((Floats)bits);                                          \
        std::memcpy(to + i, &d, sizeof d);                                                \
      }                                                                                   \
      return i;                                                                           \
    }                                                                                     \
    TARGET __attribute__((always_inline)) static Doubles at(const double* from) {         \
      Doubles d;                                                                          \
      std::memcpy(&d, from, sizeof d);                                                    \
      return d;                                                                           \
    }                                                                                     \
    TARGET __attribute__((always_inline)) static Doubles at(const Single* from) {         \
      Floats v;                                                                           \
      std::memcpy(&v, from, sizeof v);                                                    \
      return DOUBLES(v);                                                                  \
    }                                                                                     \
    template <class From>                                                                 \
    TARGET static size_t equal(const From* a, const double* b, size_t n, bool& all) {     \
      Words same = Words{} == Words{};                                                    \
      size_t i = 0;                                                                       \
      for (; i + WIDTH <= n; i += WIDTH) same &= at(a + i) == at(b + i);                  \
      int64_t each = -1;                                                                  \
      for (int k = 0; k < WIDTH; ++k) each &= same[k];                                    \
      all = all && each != 0;                                                             \
      return i;                                                                           \
    }                                                                                     \
    /* Two sums, each of which waits for its last addition. */                            \
    /* A factor that is no whole number is off from the nearest one. */                   \
    template <class From>                                                                 \
    TARGET static size_t products(const From* a, const double* b, size_t n, double& sum,  \
                                  double& magnitude, bool& whole) {                       \
      const Words no_sign = Words{} + INT64_MAX;                                          \
      Words off = {};                                                                     \
      Doubles sums[2] = {}, magnitudes[2] = {};                                           \
      size_t i = 0;                                                                       \
      for (; i + 2 * WIDTH <= n; i += 2 * WIDTH)                                          \
        _Pragma("GCC unroll 2") for (int h = 0; h < 2; ++h) {                             \
          const Doubles x = at(a + i + h * WIDTH), y = at(b + i + h * WIDTH);             \
          const Doubles product = x * y;                                                  \
          sums[h] += product;                                                             \
          magnitudes[h] += (Doubles)((Words)product & no_sign);                           \
          off |= (Words)(((x + rounding) - rounding) - x);                                \
          off |= (Words)(((y + rounding) - rounding) - y);                                \
        }                                                                                 \
      off &= no_sign;                                                                     \
      for (int k = 0; k < WIDTH; ++k) {                                                   \
        sum += sums[0][k] + sums[1][k], magnitude += magnitudes[0][k] + magnitudes[1][k]; \
        whole = whole && off[k] == 0;                                                     \
      }                                                                                   \
      return i;                                                                           \
    }                                                                                     \
  };

#if defined(__x86_64__) && defined(__GNUC__)
// GCC 12 warns about _mm512_cvtps_pd of its own.
#define SHARDPROOF_WITH_A_MASK(v) _mm512_maskz_cvtps_pd(__mmask8(-1), v)
SHARDPROOF_WIDE(Avx512, __attribute__((target("avx512f"))), 8, SHARDPROOF_WITH_A_MASK)
#undef SHARDPROOF_WITH_A_MASK
SHARDPROOF_WIDE(Avx2, __attribute__((target("avx2"))), 4, _mm256_cvtps_pd)
#endif
#define SHARDPROOF_AS_DOUBLES(v) __builtin_convertvector(v, Doubles)
SHARDPROOF_WIDE(Portable, , 2, SHARDPROOF_AS_DOUBLES)
#undef SHARDPROOF_AS_DOUBLES
#undef SHARDPROOF_WIDE

// The form that runs on this processor.
template <class Loop>
size_t with_form(const Loop& loop) {
#if defined(__x86_64__) && defined(__GNUC__)
  if (__builtin_cpu_supports("avx512f")) return loop(Avx512{});
  if (__builtin_cpu_supports("avx2")) return loop(Avx2{});
#endif
  return loop(Portable{});
}

}  // namespace

void load(const std::byte* elements, DType dtype, size_t n, double* values) {
  size_t i = 0;
  if (dtype == DType::f64 && n > 0) std::memcpy(values, elements, n * sizeof *values), i = n;
  if (dtype == DType::f32)
    i = with_form([&](auto form) { return form.floats(elements, n, values); });
  if (dtype == DType::bf16)
    i = with_form([&](auto form) { return form.brain_floats(elements, n, values); });
  const size_t width = size_of(dtype);
  for (; i < n; ++i) values[i] = shardproof::load(elements + i * width, dtype);
}

namespace {

template <class From>
bool equal_values(const From* a, const double* b, size_t n) {
  bool all = true;
  size_t i = with_form([&](auto form) { return form.equal(a, b, n, all); });
  for (; i < n; ++i) all = all && value(a[i]) == b[i];
  return all;
}

template <class From>
bool products_of(const From* a, const double* b, size_t n, double& sum, double& magnitude) {
  bool whole = true;
  sum = magnitude = 0;
  size_t i = with_form([&](auto form) { return form.products(a, b, n, sum, magnitude, whole); });
  for (; i < n; ++i) {
    const double x = value(a[i]);
    whole = whole && is_whole(x) && is_whole(b[i]);
    sum += x * b[i];
    magnitude += std::abs(x * b[i]);
  }
  return whole && magnitude < whole_sums;
}

const Single* singles(const std::byte* elements) {
  return reinterpret_cast<const Single*>(elements);
}

}  // namespace

bool equal(const double* a, const double* b, size_t n) { return equal_values(a, b, n); }

bool equal(const std::byte* elements, DType dtype, const double* b, size_t n) {
  if (dtype == DType::f32) return equal_values(singles(elements), b, n);
  double values[few];
  bool all = true;
  for (size_t i = 0; i < n && all; i += few) {
    const size_t more = std::min(few, n - i);
    load(elements + i * size_of(dtype), dtype, more, values);
    all = equal_values(values, b + i, more);
  }
  return all;
}

bool whole_products(const double* a, const double* b, size_t n, double& sum, double& magnitude) {
  return products_of(a, b, n, sum, magnitude);
}

bool whole_products(const std::byte* elements, DType dtype, const double* b, size_t n, double& sum,
                    double& magnitude) {
  if (dtype == DType::f32) return products_of(singles(elements), b, n, sum, magnitude);
  double values[few];
  double all = 0, all_magnitude = 0;
  bool whole = true;
  for (size_t i = 0; i < n && whole; i += few) {
    const size_t more = std::min(few, n - i);
    load(elements + i * size_of(dtype), dtype, more, values);
    whole = products_of(values, b + i, more, sum, magnitude);
    all += sum, all_magnitude += magnitude;
  }
  sum = all, magnitude = all_magnitude;
  return whole && magnitude < whole_sums;
}

}  // namespace shardproof::wide
