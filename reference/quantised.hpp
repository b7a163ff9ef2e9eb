// Scaled 8-bit floating point: q(x s) / s, where q takes the nearest number of a format.
//
//   s = greatest / amax, or the power of two at or below it; 1 where amax is 0
//
// The numbers of a format are enumerated from its definition in OCP's 8-bit floating point
// specification (OFP8, revision 1.0): E4M3 has no infinities and one NaN of each sign, so that
// 1.75 2^8 = 448 is its greatest; E5M2 is laid out as IEEE 754 lays out its formats, with 1.75 2^15
// = 57344. What is beyond the greatest is the greatest. Of two numbers that are equally near it is
// the one of even code.
//
// An implementation computes x s in arithmetic of unit roundoff u, and may land on the other side
// of a boundary where the exact product is near one. Let z = x s and e = gamma_3(u) |z|: three
// roundings are those of amax/greatest, its inverse and the product. The midpoints of neighbours
// are the boundaries.
//
//   no boundary in [|z| - e, |z| + e]   the code is certain; y is off by three roundings at most,
//                                       those of 1/s in any form and the last product
//   else                                the code or its neighbour over the boundary: y is off by
//                                       the distance of the two, over s, more
//   s a power of two                    every operation is exact: e = 0, y is off by nothing
//
// Above the greatest there is no boundary, and the next one below is a sixteenth off at least: what
// is greatest is certain whatever u is.
//
// A sum of K products of such factors a = q(x s)/s, b = q(w t)/t, computed as a' and b':
//
//   e_a = |a' - a| at most, what is said of y above: gamma_3(u)(|a| + step) + step
//   |sum a'b' - sum ab|  <=  sum (e_a (|b| + e_b) + |a| e_b)
//   accumulation         <=  gamma_K(u) sum (|a| + e_a)(|b| + e_b), in any order
//
// So a code that is open enters a sum with its step times the other factor, and no other code
// widens it beyond its roundings. That holds for an implementation that multiplies codes and the
// sum by 1/(s t), too: products of codes are exact (8 bits of significand), and the six roundings
// of 1/s, 1/t (two each), their product and that with the sum are (1 - u)^-6 at most, which
// (1 + gamma_3)^2 = (1 - 3u)^-2 is not below. With a scale for each block of the sum they are made
// block by block, and as many additions are left. Powers of two: e = 0, and integers of few bits
// leave every sum exact.
#pragma once
#include <cstdint>

#include "reference/running_error.hpp"

namespace shardproof::reference {

class EightBitFormat {
 public:
  static const EightBitFormat& e4m3();
  static const EightBitFormat& e5m2();
  double greatest() const { return numbers_.back(); }
  // Those of sign +, by code: ascending.
  const Values& numbers() const { return numbers_; }
  size_t nearest(double magnitude) const;  // its code

 private:
  EightBitFormat(int exponent_bits, int fraction_bits, int codes);
  Values numbers_;
};

struct Quantiser {
  const EightBitFormat& format;
  bool power_of_two = false;
  double u = 0;  // of the implementation's arithmetic, the reference's own included
};
double scale_of(const Quantiser&, double amax);
double greatest_magnitude(In);

// error: how far off a value may be computed, before it is stored; step: how far the neighbour is
// away, where it is right as well, else 0.
struct Quantised {
  Values value, error, step;
};
// Element i has scale i / group.
Quantised quantised(const Quantiser&, In x, In scales, int64_t group);
// Elements of one number of `group` share the scale of their greatest magnitude: the value, and how
// far off it may be computed.
Uncertain quantised_by_group(const Quantiser&, In x, std::span<const int64_t> group);
// All of them have this scale, whatever is greatest: of an amax that was seen earlier.
Uncertain quantised_at(const Quantiser&, In x, double scale);
Values turned(In, int64_t rows);  // the transpose of a matrix of so many rows
Uncertain turned(const Uncertain&, int64_t rows);
double scale_error(const Quantiser&, double scale);  // two roundings; none of a power of two

}  // namespace shardproof::reference
