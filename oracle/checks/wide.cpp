// Each loop is written once and compiled for two widths; the last few elements are taken one by
// one. No product is fused with a sum: that rounds otherwise.
#include "oracle/checks/wide.hpp"

#include <cmath>
#include <cstdint>
#include <cstring>

namespace shardproof::wide {
namespace {

// To the nearest whole number and back, right up to 2^51.
constexpr double rounding = 0x1.8p52;
constexpr double largest_factor = 0x1p20;

bool is_whole(double v) { return std::abs(v) < largest_factor && (v + rounding) - rounding == v; }

#define SHARDPROOF_WIDE(NAME, TARGET, WIDTH)                                                     \
  struct NAME {                                                                                  \
    typedef double Doubles __attribute__((vector_size(8 * WIDTH)));                              \
    typedef int64_t Words __attribute__((vector_size(8 * WIDTH)));                               \
    typedef float Floats __attribute__((vector_size(4 * WIDTH)));                                \
    typedef uint32_t Halves __attribute__((vector_size(4 * WIDTH)));                             \
    typedef uint16_t Quarters __attribute__((vector_size(2 * WIDTH)));                           \
                                                                                                 \
    TARGET static size_t floats(const std::byte* from, size_t n, double* to) {                   \
      size_t i = 0;                                                                              \
      for (; i + WIDTH <= n; i += WIDTH) {                                                       \
        Floats v;                                                                                \
        std::memcpy(&v, from + 4 * i, sizeof v);                                                 \
        const Doubles d = __builtin_convertvector(v, Doubles);                                   \
        std::memcpy(to + i, &d, sizeof d);                                                       \
      }                                                                                          \
      return i;                                                                                  \
    }                                                                                            \
    TARGET static size_t brain_floats(const std::byte* from, size_t n, double* to) {             \
      size_t i = 0;                                                                              \
      for (; i + WIDTH <= n; i += WIDTH) {                                                       \
        Quarters v;                                                                              \
        std::memcpy(&v, from + 2 * i, sizeof v);                                                 \
        const Halves bits = __builtin_convertvector(v, Halves) << 16;                            \
        const Doubles d = __builtin_convertvector((Floats)bits, Doubles);                        \
        std::memcpy(to + i, &d, sizeof d);                                                       \
      }                                                                                          \
      return i;                                                                                  \
    }                                                                                            \
    TARGET static size_t equal(const double* a, const double* b, size_t n, bool& all) {          \
      Words same = Words{} == Words{};                                                           \
      size_t i = 0;                                                                              \
      for (; i + WIDTH <= n; i += WIDTH) {                                                       \
        Doubles x, y;                                                                            \
        std::memcpy(&x, a + i, sizeof x);                                                        \
        std::memcpy(&y, b + i, sizeof y);                                                        \
        same &= x == y;                                                                          \
      }                                                                                          \
      for (int k = 0; k < WIDTH; ++k) all = all && same[k] != 0;                                 \
      return i;                                                                                  \
    }                                                                                            \
    TARGET static size_t products(const double* a, const double* b, size_t n, double& sum,       \
                                  double& magnitude, bool& whole) {                              \
      const Words no_sign = Words{} + INT64_MAX;                                                 \
      Words fit = Words{} == Words{};                                                            \
      Doubles sums = {}, magnitudes = {};                                                        \
      size_t i = 0;                                                                              \
      for (; i + WIDTH <= n; i += WIDTH) {                                                       \
        Doubles x, y;                                                                            \
        std::memcpy(&x, a + i, sizeof x);                                                        \
        std::memcpy(&y, b + i, sizeof y);                                                        \
        const Doubles product = x * y;                                                           \
        sums += product;                                                                         \
        magnitudes += (Doubles)((Words)product & no_sign);                                       \
        fit &=                                                                                   \
            ((x + rounding) - rounding == x) & ((Doubles)((Words)x & no_sign) < largest_factor); \
        fit &=                                                                                   \
            ((y + rounding) - rounding == y) & ((Doubles)((Words)y & no_sign) < largest_factor); \
      }                                                                                          \
      for (int k = 0; k < WIDTH; ++k) {                                                          \
        sum += sums[k], magnitude += magnitudes[k];                                              \
        whole = whole && fit[k] != 0;                                                            \
      }                                                                                          \
      return i;                                                                                  \
    }                                                                                            \
  };

#if defined(__x86_64__) && defined(__GNUC__)
SHARDPROOF_WIDE(Avx2, __attribute__((target("avx2"))), 4)
#endif
SHARDPROOF_WIDE(Portable, , 2)
#undef SHARDPROOF_WIDE

// The form that runs on this processor.
template <class Loop>
size_t with_form(const Loop& loop) {
#if defined(__x86_64__) && defined(__GNUC__)
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

bool equal(const double* a, const double* b, size_t n) {
  bool all = true;
  size_t i = with_form([&](auto form) { return form.equal(a, b, n, all); });
  for (; i < n; ++i) all = all && a[i] == b[i];
  return all;
}

bool whole_products(const double* a, const double* b, size_t n, double& sum, double& magnitude) {
  bool whole = true;
  sum = magnitude = 0;
  size_t i = with_form([&](auto form) { return form.products(a, b, n, sum, magnitude, whole); });
  for (; i < n; ++i) {
    whole = whole && is_whole(a[i]) && is_whole(b[i]);
    sum += a[i] * b[i];
    magnitude += std::abs(a[i] * b[i]);
  }
  return whole;
}

}  // namespace shardproof::wide
