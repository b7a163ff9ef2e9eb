#include "reference/optimizer.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "reference/replicated.hpp"

namespace shardproof::reference {
namespace {

// Roundings of any arrangement of these formulas: at most six operations on a term, constants
// rounded among them.
constexpr double operations = 6;

Off moment(double b, double a, const Off& x, double u) { return mixed(b, {a, 0}, 1 - b, x, u); }

Off square(const Off& x) {
  return {x.value * x.value, x.error * (2 * std::abs(x.value) + x.error)};
}

// 1 - b^t: t roundings of b, t of products, 1 of the difference.
Off correction(double b, double t, double u) {
  const double power = std::pow(b, t);
  return {1 - power, (power > 0 ? gamma_of(2 * t + 1, u) * power : 0) + u};
}

// m / (c1 (sqrt(v / c2) + eps)). All of it grows or falls in each of its numbers: it is farthest
// off where they are. v is a sum of squares, and what is computed of it is not below 0.
Off ratio(const Off& m, const Off& v, const Off& c1, const Off& c2, double eps, double u) {
  const auto below = [eps](double square, double first, double second) {
    return first * (std::sqrt(square / second) + eps);
  };
  if (c1.low() <= 0 || c2.low() <= 0) return {0, std::numeric_limits<double>::infinity()};
  const double value = m.value / below(v.value, c1.value, c2.value),
               low = below(std::max(0.0, v.low()), c1.low(), c2.high()),
               high = below(v.high(), c1.high(), c2.low());
  double error = 0;
  for (double above : {m.low(), m.high()})
    for (double under : {low, high}) error = std::max(error, std::abs(above / under - value));
  return {value, error + gamma_of(operations, u) * (std::abs(value) + error)};
}

void put(Uncertain& all, size_t i, const Off& x) { all.value[i] = x.value, all.error[i] = x.error; }

}  // namespace

double Off::most() const { return std::abs(value) + error; }

// Where b is rounded before 1 - b is formed both weights move by u b.
Off mixed(double b, const Off& a, double w, const Off& x, double u) {
  return {b * a.value + w * x.value, b * a.error + w * x.error +
                                         gamma_of(operations, u) * (a.most() + w * x.most()) +
                                         u * b * (a.most() + x.most())};
}

Off moved(double x, double shrunk, double lr, const Off& r, double u) {
  return {x - shrunk * x - lr * r.value,
          lr * r.error + gamma_of(operations, u) * (std::abs(x) * (1 + shrunk) + lr * r.most())};
}

// A term meets its rounding, n - 1 sums of microbatches, p - 1 of ranks, two shares and a
// conversion: n + p + 2 roundings. Below the normal range each of n p parts loses its rounding
// alone, and sums nothing.
Uncertain sum_of_parts(Values sum, In magnitude, const Parts& of, const Rounding& r) {
  const double n = of.microbatches, p = of.ranks;
  Uncertain g{std::move(sum), Values(magnitude.size())};
  for (size_t i = 0; i < g.size(); ++i) {
    g.value[i] *= of.share;
    if (n * p > 1)
      g.error[i] = gamma_of(n + p + 2, r.wire) * magnitude[i] * of.share + n * p * r.wire_tiny;
  }
  return g;
}

Step step(const StepRule& rule, In x, In m, In v, const Uncertain& g,
          const std::vector<bool>& matrix, double u) {
  const size_t n = x.size();
  const Uncertain none{Values(n), Values(n)};
  Step s{none, none, rule.adamw ? none : Uncertain{}};
  const double t = double(rule.step);
  const Off c1 = correction(rule.beta1, t, u), c2 = correction(rule.beta2, t, u);
  for (size_t i = 0; i < n; ++i) {
    const Off g_i{g.value[i], g.error[i]};
    const double decay = matrix[i] ? rule.decay : 0;
    if (rule.adamw) {
      const Off m_i = moment(rule.beta1, m[i], g_i, u),
                v_i = moment(rule.beta2, v[i], square(g_i), u);
      put(s.m, i, m_i), put(s.v, i, v_i);
      put(s.master, i,
          moved(x[i], rule.lr * decay, rule.lr, ratio(m_i, v_i, c1, c2, rule.eps, u), u));
    } else {
      const double magnitude = rule.momentum * std::abs(m[i]) + g_i.most() + decay * std::abs(x[i]);
      const Off m_i{rule.momentum * m[i] + g_i.value + decay * x[i],
                    g_i.error + gamma_of(operations, u) * magnitude};
      put(s.m, i, m_i);
      put(s.master, i, moved(x[i], 0, rule.lr, m_i, u));
    }
  }
  return s;
}

// | |g'| - |g| | <= |g' - g|; a sum of squares that is off by a share of itself has a root off by
// half of that, and is rounded once more.
Uncertain norm_of(const Uncertain& g, int64_t terms, double u) {
  const double norm = global_norm({g.value}), off = global_norm({g.error});
  return {{norm}, {off + (gamma_of(double(terms) + 1, u) / 2 + 2 * u) * (norm + off)}};
}

Uncertain clipped(const Uncertain& g, const Uncertain& norm, double limit, double u) {
  const double n = norm.value[0], e = norm.error[0], factor = clip_factor(n, limit),
               off = std::max(clip_factor(std::max(0.0, n - e), limit) - factor,
                              factor - clip_factor(n + e, limit));
  Uncertain c = g;
  for (size_t i = 0; i < g.size(); ++i) {
    const double most = std::abs(g.value[i]) + g.error[i];
    c.value[i] = factor * g.value[i];
    c.error[i] = factor * g.error[i] + off * most + gamma_of(operations, u) * (factor + off) * most;
  }
  return c;
}

}  // namespace shardproof::reference
