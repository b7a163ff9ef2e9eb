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
#pragma once
#include <cstdint>

#include "reference/linear.hpp"

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
double scale_error(const Quantiser&, double scale);  // two roundings; none of a power of two

}  // namespace shardproof::reference
