// Typed inner products: the two sides of <A x, y> = <x, B y>.
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "oracle/check.hpp"

namespace shardproof {

// A sum of products. Exact at least while every factor is a multiple of 2^-16 of at most 2^34 and
// the magnitudes of the products add up to less than 2^94 (2^126 units of 2^-32; one product more
// has at most 2^100, times the ranks of a world); else in long double. Multiples of 2^-16:
// integers, scaled by fractions such as 1/2.
class Dot {
 public:
  void add(double a, double b, int64_t times);
  void add(std::span<const double> a, std::span<const double> b, int64_t times);
  // The first factors as they are stored.
  void add(const std::byte* elements, DType, std::span<const double> b, int64_t times);
  void add(const Dot&);
  long double value() const {
    return is_exact_ ? static_cast<long double>(exact_) * 0x1p-32L : rounded_;
  }
  // What summing may have rounded: 0 where it is exact, else n 2^-63 sum |products|.
  long double error() const;
  bool equals(const Dot&) const;  // false where either side is NaN

 private:
  // Takes products of at most wide::few_products whole numbers, where it still adds such up
  // exactly.
  template <class Products>
  bool add_whole(size_t n, int64_t times, const Products&);
  void round();  // from here on in long double, from the exact sums so far
  bool is_exact_ = true;
  __int128 exact_ = 0, exact_magnitude_ = 0;  // units of 2^-32
  long double rounded_ = 0, magnitude_ = 0;
  int64_t products_ = 0;
};

// Both sides are scaled by the number of ranks of the world, and by how many of an axis hold a copy
// where not all do, so that the weight of a type I is a whole number and a pairing of integers
// stays exact.
struct Pairing {
  Dot lhs, rhs;                   // <A x, y> over all outputs; <x, B y> of one input
  long double allowed = 0;        // of |lhs - rhs|, scaled alike; 0 on exact data
  bool complete = false;          // every result was there
  long double error() const;      // |lhs - rhs|
  long double tolerance() const;  // allowed, and what the judge's own sums may round
  bool equal() const;
  double ratio() const;  // rhs/lhs; 1 for 0/0, infinite for a/0
};

int64_t pairing_scale(const Evidence&);
// The scale times the pairing weight of a layout: how often a local dot counts in a scaled sum.
int64_t scaled_weight(const Evidence&, const Layout&);

// Whole (stacked) values of an input, or of the cotangent of an output, as the fill draws them:
// kept with the line while they are few.
std::vector<double> filled(const Evidence&, const Feed&, int operand, bool cotangent);
// The same with what the feed gives in their place: what the ranks are given. Where files hold what
// they were fed by a feed of the evidence's own shots, it is read there.
Whole drawn(const Evidence&, const Feed&, int operand, bool cotangent);
// What the reference is fed: every input and parameter, or the cotangent of every output.
std::vector<Whole> drawn_inputs(const Evidence&, const Feed&);
std::vector<Whole> drawn_cotangents(const Evidence&, const Feed&);

// Ranks whose denoted values count: of a P group the first.
bool leads(const Layout&, const Mesh&, int rank);

// sum += sign * w * sum over ranks <result, dual>, scaled; `dual_values` are whole.
// False where a result is missing.
bool add_dots(const Evidence&, int shot, int step, int operand, bool gradient,
              const Whole& dual_values, int sign, Dot& sum);

// w * sum over ranks of bound * |dual|, scaled: by how much such a sum may be off when
// each element is within its bound (of what is denoted).
long double slack(const Evidence&, const Operand&, bool gradient,
                  const std::function<double(int64_t)>& bound, const Whole& dual_values);

// <A_k x_k, y> = <x_k, B_k y> for each input k, where A_k x_k = F(.., x_k, ..) - F(.., 0, ..): the
// steps F0 and B0 of `shot` and F0 of `without`, the same feed with input k zero (-1: linear alone,
// F(0) = 0). Together, since y and <F(x), y> are the same for all of them.
struct Paired {
  int input = 0, without = -1;
};
std::vector<Pairing> pairings_of(const Evidence&, int shot, const std::vector<Paired>&);

}  // namespace shardproof
