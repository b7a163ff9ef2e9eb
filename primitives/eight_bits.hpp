// Bodies of scaled 8-bit floating point. A group of elements shares a scale s = greatest / amax;
// codes lie four in a word, the first in the lowest byte, each rank's block in words of its own.
#pragma once
#include <cmath>

#include "primitives/element.hpp"

namespace shardproof::primitives {

// E4M3 and E5M2 of OCP's specification (OFP8, revision 1.0): the lowest exponent is that of
// subnormals, `last` the code of the greatest number.
struct EightBits {
  int exponent_bits = 4, fraction_bits = 3;
  int last = 0x7E;

  SHARDPROOF_HD int bias() const { return (1 << (exponent_bits - 1)) - 1; }
  SHARDPROOF_HD int lowest() const { return 1 - bias(); }
  SHARDPROOF_HD double number(int code) const {
    const int magnitude = code & 0x7F, biased = magnitude >> fraction_bits,
              hidden = biased > 0 ? 1 << fraction_bits : 0,
              fraction = magnitude & ((1 << fraction_bits) - 1);
    const double value =
        std::ldexp(double(hidden + fraction), (biased > 0 ? biased : 1) - bias() - fraction_bits);
    return code & 0x80 ? -value : value;
  }
  // To nearest, ties to even; beyond the greatest number that. NaN stays one.
  SHARDPROOF_HD int code(double value) const {
    const int sign = std::signbit(value) ? 0x80 : 0;
    const double magnitude = std::fabs(value);
    if (magnitude != magnitude) return sign | 0x7F;
    if (magnitude >= number(last)) return sign | last;
    const int exponent = magnitude < std::ldexp(1.0, lowest()) ? lowest() : std::ilogb(magnitude);
    // A carry moves into the exponent.
    const double steps = std::rint(std::ldexp(magnitude, fraction_bits - exponent));
    return sign | (((exponent - lowest()) << fraction_bits) + int(steps));
  }
};
inline constexpr EightBits e4m3{4, 3, 0x7E}, e5m2{5, 2, 0x7B};

SHARDPROOF_HD inline int64_t words_of(int64_t codes) { return (codes + 3) / 4; }

// amax_j = max |x| of group j.
struct AbsoluteMaximum {
  static constexpr Shape shape = Shape::rows;
  Tensor x, amax;
  int64_t group = 1;
  bool wide = false;
  template <class F>
  void each_tensor(F f) {
    f(x), f(amax);
  }
  SHARDPROOF_HD int64_t rows() const { return amax.elements; }
  template <class A, class Team>
  SHARDPROOF_HD void row(int64_t j, const Team& team) const {
    A own = 0;
    for (int64_t i = team.first(); i < group; i += team.step()) {
      const A magnitude = std::fabs(x.load<A>(j * group + i));
      own = own < magnitude ? magnitude : own;
    }
    own = team.greatest(own);
    if (team.leads()) amax.store(j, own);
  }
};

// s = greatest / amax, or the power of two at or below it; 1 where amax is 0. A quotient that is
// below a power of two stays below it when it is rounded, so that the exponent is right.
struct Scales {
  static constexpr Shape shape = Shape::elements;
  Tensor amax, scales;
  double greatest = 448;
  bool power_of_two = false, wide = false;
  template <class F>
  void each_tensor(F f) {
    f(amax), f(scales);
  }
  SHARDPROOF_HD int64_t count() const { return scales.elements; }
  template <class A>
  SHARDPROOF_HD void in(int64_t j) const {
    const A most = amax.load<A>(j);
    A s = most > 0 ? A(A(greatest) / most) : A(1);
    if (power_of_two) s = std::ldexp(A(1), std::ilogb(s));
    scales.store(j, s);
  }
  SHARDPROOF_HD void at(int64_t j) const { wide ? in<double>(j) : in<float>(j); }
};

// The codes of x s: word w holds those of elements 4w to 4w + 3, and zeros behind the last one.
struct Quantise {
  static constexpr Shape shape = Shape::elements;
  Tensor x, scales, words;
  EightBits to;
  int64_t group = 1;
  bool wide = false;
  template <class F>
  void each_tensor(F f) {
    f(x), f(scales), f(words);
  }
  SHARDPROOF_HD int64_t count() const { return words.elements; }
  template <class A>
  SHARDPROOF_HD void in(int64_t w) const {
    uint32_t word = 0;
    for (int k = 0; k < 4 && 4 * w + k < x.elements; ++k) {
      const int64_t i = 4 * w + k;
      const A scaled = x.load<A>(i) * scales.load<A>(i / group);
      word |= uint32_t(to.code(double(scaled))) << (8 * k);
    }
    words.store(w, int64_t(int32_t(word)));
  }
  SHARDPROOF_HD void at(int64_t w) const { wide ? in<double>(w) : in<float>(w); }
};

// y = code / s, of blocks of `own` elements whose words lie one block behind the other.
struct Dequantise {
  static constexpr Shape shape = Shape::elements;
  Tensor words, scales, y;
  EightBits from;
  int64_t own = 1, group = 1;
  bool wide = false;
  template <class F>
  void each_tensor(F f) {
    f(words), f(scales), f(y);
  }
  SHARDPROOF_HD int64_t count() const { return y.elements; }
  template <class A>
  SHARDPROOF_HD void in(int64_t i) const {
    const int64_t place = i % own, word = i / own * words_of(own) + place / 4;
    const int code = int(uint32_t(words.integer(word)) >> (8 * (place % 4)) & 0xFF);
    y.store(i, A(A(from.number(code)) / scales.load<A>(i / group)));
  }
  SHARDPROOF_HD void at(int64_t i) const { wide ? in<double>(i) : in<float>(i); }
};

}  // namespace shardproof::primitives
