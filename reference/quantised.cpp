#include "reference/quantised.hpp"

#include <algorithm>
#include <cmath>

namespace shardproof::reference {
namespace {

bool is_power_of_two(double s) {
  int exponent = 0;
  return std::frexp(s, &exponent) == 0.5;
}

// How far the neighbour is that x s may be rounded to as well; 0 where there is none.
double open_step(const EightBitFormat& format, double z, double e) {
  const Values& n = format.numbers();
  const size_t code = format.nearest(z);
  double step = 0;
  if (code + 1 < n.size() && z + e >= (n[code] + n[code + 1]) / 2) step = n[code + 1] - n[code];
  if (code > 0 && z - e <= (n[code] + n[code - 1]) / 2)
    step = std::max(step, n[code] - n[code - 1]);
  return step;
}

}  // namespace

EightBitFormat::EightBitFormat(int exponent_bits, int fraction_bits, int codes) {
  const int bias = (1 << (exponent_bits - 1)) - 1, steps = 1 << fraction_bits;
  for (int code = 0; code < codes; ++code) {
    const int exponent = code / steps, fraction = code % steps;
    numbers_.push_back(exponent == 0
                           ? std::ldexp(fraction, 1 - bias - fraction_bits)
                           : std::ldexp(steps + fraction, exponent - bias - fraction_bits));
  }
}

// The last code of sign + is NaN.
const EightBitFormat& EightBitFormat::e4m3() {
  static const EightBitFormat format(4, 3, 127);
  return format;
}
// The last exponent is that of infinity and NaN.
const EightBitFormat& EightBitFormat::e5m2() {
  static const EightBitFormat format(5, 2, 124);
  return format;
}

size_t EightBitFormat::nearest(double magnitude) const {
  const auto above = std::upper_bound(numbers_.begin(), numbers_.end(), magnitude);
  const size_t floor = size_t(above - numbers_.begin()) - 1;
  if (above == numbers_.end()) return floor;
  const double below = magnitude - numbers_[floor], left = *above - magnitude;
  if (below == left) return floor + floor % 2;
  return below < left ? floor : floor + 1;
}

double greatest_magnitude(In x) {
  double most = 0;
  for (double v : x) most = std::max(most, std::abs(v));
  return most;
}

double scale_of(const Quantiser& q, double amax) {
  if (amax == 0) return 1;
  const double s = q.format.greatest() / amax;
  return q.power_of_two ? std::ldexp(1, std::ilogb(s)) : s;
}

double scale_error(const Quantiser& q, double scale) {
  return is_power_of_two(scale) ? 0 : gamma_of(2, q.u) * scale;
}

namespace {

void append(Quantised& r, const Quantiser& q, double x, double s) {
  const double z = std::abs(x) * s, gamma = is_power_of_two(s) ? 0 : gamma_of(3, q.u),
               y = q.format.numbers()[q.format.nearest(z)] / s,
               step = gamma > 0 ? open_step(q.format, z, gamma * z) / s : 0;
  r.value.push_back(std::copysign(y, x));
  r.error.push_back(gamma * (y + step));
  r.step.push_back(step);
}

}  // namespace

namespace {

Uncertain with_steps(Quantised r) {
  for (size_t i = 0; i < r.error.size(); ++i) r.error[i] += r.step[i];
  return {std::move(r.value), std::move(r.error)};
}

}  // namespace

Quantised quantised(const Quantiser& q, In x, In scales, int64_t group) {
  Quantised r;
  for (size_t i = 0; i < x.size(); ++i) append(r, q, x[i], scales[i / size_t(group)]);
  return r;
}

Uncertain quantised_by_group(const Quantiser& q, In x, std::span<const int64_t> group) {
  Values amax(1 + size_t(*std::max_element(group.begin(), group.end())));
  for (size_t i = 0; i < x.size(); ++i) {
    double& most = amax[size_t(group[i])];
    most = std::max(most, std::abs(x[i]));
  }
  Quantised r;
  for (size_t i = 0; i < x.size(); ++i) append(r, q, x[i], scale_of(q, amax[size_t(group[i])]));
  return with_steps(std::move(r));
}

Uncertain quantised_at(const Quantiser& q, In x, double scale) {
  return with_steps(quantised(q, x, Values{scale}, int64_t(x.size())));
}

Values turned(In x, int64_t rows) {
  const size_t m = size_t(rows), n = m ? x.size() / m : 0;
  Values t(x.size());
  for (size_t i = 0; i < x.size(); ++i) t[i % n * m + i / n] = x[i];
  return t;
}

Uncertain turned(const Uncertain& x, int64_t rows) {
  return {turned(x.value, rows), turned(x.error, rows)};
}

}  // namespace shardproof::reference
