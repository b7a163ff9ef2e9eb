#include "reference/running_error.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "reference/norm.hpp"

namespace shardproof::reference {
namespace {

// Ulps of one evaluation of erf, tanh, exp and the few operations around it. glibc documents at
// most 2 ulps for each of them in double and float; the formulas need three operations more.
constexpr double function_ulps = 8;

void add(Values& sum, const Values& more) {
  for (size_t i = 0; i < sum.size(); ++i) sum[i] += more[i];
}

// One row of a norm: xhat = (x - mean) / scale, inverse = 1 / scale.
struct Row {
  Uncertain centred, xhat;
  double inverse = 0, inverse_error = 0;
  double inverse_most() const { return inverse + inverse_error; }
};

// x - mean(x), or x itself. `own` is what the computed mean is off by rounding.
//
//   one sum       gamma_(n+1) mean |x|
//   merged means  each merge of n_m values rounds by (3 max|x| + 4 range) u at most, be it
//                 M_A + (M_B - M_A) n_B/n_m or M_A n_A/n_m + M_B n_B/n_m, and enters the mean of n
//                 with the weight n_m/n; over a tree of n leaves sum n_m < n (n + 1)/2, which a
//                 chain comes closest to
Uncertain centre(const NormShape& s, const Uncertain& x, size_t first, double u, double& own) {
  const size_t n = size_t(s.width);
  double mean = 0, error = 0, magnitude = 0, most = 0, low = x.value[first], high = low, off = 0;
  for (size_t j = first; j < first + n; ++j) {
    mean += x.value[j] / double(n);
    error += x.error[j] / double(n);
    magnitude += x.most(j) / double(n);
    most = std::max(most, x.most(j));
    low = std::min(low, x.value[j]), high = std::max(high, x.value[j]);
    off = std::max(off, x.error[j]);
  }
  const double merged = 1.5 * most + 2 * (high - low + 2 * off);
  own = gamma_of(double(n) + 1, u) * (s.uncentred_variance ? magnitude : merged);
  error += own;
  Uncertain c{Values(n), Values(n)};
  for (size_t j = 0; j < n; ++j) {
    c.value[j] = x.value[first + j] - (s.centred ? mean : 0);
    c.error[j] = x.error[first + j];
    if (s.centred) c.error[j] += error + u * (std::abs(c.value[j]) + c.error[j] + error);
  }
  return c;
}

// What merging adds to the error of a sum of squares S of n centred values. A merge adds d^2 w with
// d = M_B - M_A, off by 2e where every mean is off by e, and w = n_A n_B / n_m; the d^2 w add up to
// S. By Cauchy sum w (4e|d| + 4e^2) <= 4e sqrt(W S) + 4e^2 W, and W = sum w <= n/4 log2 n, since
// 4p(1-p) is at most the entropy of p in bits. Two passes, whose values are all off by one e, add
// at most 2e sqrt(n S) + n e^2, which is less from n = 2 on. A term passes 2n additions and 8
// roundings.
double merging_error(double n, double squares, double e, double u) {
  const double weights = n / 4 * std::log2(n);
  const double off = 4 * e * std::sqrt(weights * squares) + 4 * e * e * weights;
  return off + gamma_of(2 * n + 8, u) * (squares + off);
}

// With theta the relative error of scale^2, 1/sqrt(1 - theta) - 1 <= theta / (2 (1 - theta)) for
// theta < 1; beyond, the computed scale is at least sqrt(eps).
void invert(const NormShape& s, const Uncertain& x, size_t first, double u, double own, Row& row) {
  const size_t n = size_t(s.width);
  const bool merges = s.centred && !s.uncentred_variance;
  double exact = s.eps, greatest = s.eps, plain = 0;
  for (size_t j = 0; j < n; ++j) {
    exact += row.centred.value[j] * row.centred.value[j] / double(n);
    const double given = row.centred.most(j) - (merges ? own : 0);  // off by its inputs alone
    greatest += given * given / double(n);
    plain += x.most(first + j) * x.most(first + j) / double(n);
  }
  const double gamma = gamma_of(double(n) + 4, u);
  double error = greatest - exact + gamma * greatest;
  if (merges)
    error += merging_error(double(n), double(n) * greatest, own, u) / double(n);
  else if (s.centred)
    error += 2 * gamma * plain;  // mean x^2 - mean^2 loses what the two have in common
  const double theta = error / exact;
  row.inverse = 1 / std::sqrt(exact);
  row.inverse_error =
      theta < 1 ? row.inverse * (theta / (2 * (1 - theta)) + 3 * u) : 1 / std::sqrt(s.eps);
}

Row normalise(const NormShape& s, const Uncertain& x, size_t first, double u) {
  Row row;
  double own = 0;
  row.centred = centre(s, x, first, u, own);
  invert(s, x, first, u, own, row);
  const size_t n = size_t(s.width);
  row.xhat = {Values(n), Values(n)};
  for (size_t j = 0; j < n; ++j) {
    row.xhat.value[j] = row.centred.value[j] * row.inverse;
    row.xhat.error[j] =
        product_error(row.xhat.value[j], row.centred.most(j) * row.inverse_most(), 1, u);
  }
  return row;
}

// mean of t and of t xhat over a row, t = gamma g.
struct Means {
  double plain = 0, plain_error = 0, along = 0, along_error = 0;
};

Means means_of(const Row& row, In gamma, const Uncertain& g, size_t first, double u) {
  const size_t n = gamma.size();
  const double rounding = gamma_of(double(n) + 2, u);
  Means m;
  for (size_t j = 0; j < n; ++j) {
    const double weight = std::abs(gamma[j]) / double(n),
                 dot = g.most(first + j) * row.xhat.most(j),
                 exact = std::abs(g.value[first + j] * row.xhat.value[j]);
    m.plain += gamma[j] * g.value[first + j] / double(n);
    m.plain_error += weight * (g.error[first + j] + rounding * g.most(first + j));
    m.along += gamma[j] * g.value[first + j] * row.xhat.value[j] / double(n);
    m.along_error += weight * (dot - exact + rounding * dot);
  }
  return m;
}

}  // namespace

double gamma_of(double terms, double u) {
  return terms * u < 1 ? terms * u / (1 - terms * u) : std::numeric_limits<double>::infinity();
}

double product_error(double exact, double most, double operations, double u) {
  return most - std::abs(exact) + operations * u * most;
}

// |act(x)| <= |x| and every factor of x in it is accurate to a few u absolutely.
double value_error(Activation a, double x, double e, double u) {
  if (a == Activation::identity) return e;
  return std::abs(slope(a, x)) * e + 0.5 * greatest_curvature(a) * e * e +
         function_ulps * u * (std::abs(x) + e);
}
// 1 - t^2 of the tanh form loses digits that its factor x (1 + 3 a x^2) multiplies: hence the cube.
double slope_error(Activation a, double x, double e, double u) {
  if (a == Activation::identity) return 0;
  const double m = std::abs(x) + e, cube = a == Activation::gelu_tanh ? 0.14 * m * m * m : 0;
  return greatest_curvature(a) * e + function_ulps * u * (1 + m + cube);
}

double Uncertain::most(size_t i) const { return std::abs(value[i]) + error[i]; }

Uncertain certain(In x) { return {Values(x.begin(), x.end()), Values(x.size())}; }

Values most(const Uncertain& x) {
  Values m(x.size());
  for (size_t i = 0; i < m.size(); ++i) m[i] = x.most(i);
  return m;
}

Values factor_error(const Uncertain& x, double gamma) {
  Values e(x.size());
  for (size_t i = 0; i < e.size(); ++i) e[i] = x.error[i] + gamma * x.most(i);
  return e;
}

Values times(In x, double c) {
  Values y = absolute(x);
  for (double& v : y) v *= c;
  return y;
}

void store(Uncertain& x, const Rounding& r) {
  for (size_t i = 0; i < x.size(); ++i) x.error[i] += r.store * x.most(i) + r.tiny;
}

Loss reduced(Loss loss, const Rounding& r) {
  if (r.ranks > 1)
    for (size_t i = 0; i < loss.error.size(); ++i)
      loss.error[i] += r.ranks * (r.wire * (loss.magnitude[i] + loss.error[i]) + r.wire_tiny);
  return loss;
}

Loss linear_loss(const LinearShape& s, const Uncertain& x, In w, In b, const Rounding& r) {
  const double gamma = gamma_of(double(s.in) + 1, r.accumulate);
  const Values size = absolute(w);
  return {linear(s, factor_error(x, gamma), size, times(b, gamma)),
          linear(s, most(x), size, absolute(b))};
}

// |x|most |w|most - |x||w| = ex |w|most + |x| ew.
Loss linear_loss(const LinearShape& s, const Uncertain& x, const Uncertain& w, In b,
                 const Rounding& r) {
  Loss loss = linear_loss(s, x, most(w), b, r);
  add(loss.error, linear(s, absolute(x.value), w.error, {}));
  return loss;
}

LinearLosses linear_backward_loss(const LinearShape& s, const Uncertain& x, In w,
                                  const Uncertain& g, const Rounding& r) {
  const double gamma_out = gamma_of(double(s.out), r.accumulate),
               gamma_tokens = gamma_of(double(s.tokens) + 1, r.accumulate);
  const Values weights = absolute(w);
  LinearGradients sizes = linear_backward(s, most(x), weights, most(g));
  LinearLosses loss;
  loss.x.error = linear_backward(s, most(x), weights, factor_error(g, gamma_out)).x;
  // |G|most |X|most - |G||X| = |G|most ex + eg |X|.
  loss.w.error = linear_backward(s, factor_error(x, gamma_tokens), weights, most(g)).w;
  add(loss.w.error, linear_backward(s, absolute(x.value), weights, g.error).w);
  loss.b.error = linear_backward(s, most(x), weights, factor_error(g, gamma_tokens)).b;
  loss.x.magnitude = std::move(sizes.x);
  loss.w.magnitude = std::move(sizes.w);
  loss.b.magnitude = std::move(sizes.b);
  return loss;
}

Uncertain activate(Activation a, const Uncertain& x, const Rounding& r) {
  Uncertain y{activate(a, x.value), Values(x.size())};
  for (size_t i = 0; i < y.size(); ++i)
    y.error[i] = value_error(a, x.value[i], x.error[i], r.accumulate);
  return y;
}

Uncertain activate_backward(Activation a, const Uncertain& x, const Uncertain& g,
                            const Rounding& r) {
  Uncertain d{activate_backward(a, x.value, g.value), Values(x.size())};
  for (size_t i = 0; i < d.size(); ++i) {
    const double steep =
        std::abs(slope(a, x.value[i])) + slope_error(a, x.value[i], x.error[i], r.accumulate);
    d.error[i] = product_error(d.value[i], g.most(i) * steep, 1, r.accumulate);
  }
  return d;
}

// The factor itself, 1/keep, is rounded once.
Uncertain scaled(const Uncertain& a, In factor, const Rounding& r) {
  Uncertain y{Values(a.size()), Values(a.size())};
  for (size_t i = 0; i < a.size(); ++i) {
    y.value[i] = a.value[i] * factor[i];
    y.error[i] = product_error(y.value[i], a.most(i) * std::abs(factor[i]), 2, r.accumulate);
  }
  return y;
}

Uncertain sum(const Uncertain& x, const Uncertain& y, const Rounding& r) {
  Uncertain z{Values(x.size()), Values(x.size())};
  for (size_t i = 0; i < x.size(); ++i) {
    z.value[i] = x.value[i] + y.value[i];
    z.error[i] = x.error[i] + y.error[i];
    z.error[i] += r.accumulate * z.most(i);
  }
  return z;
}

Uncertain norm(const NormShape& s, const Uncertain& x, In gamma, In beta, const Rounding& r) {
  const size_t n = size_t(s.width);
  const double u = r.accumulate;
  Uncertain y{Values(x.size()), Values(x.size())};
  for (size_t first = 0; first < x.size(); first += n) {
    const Row row = normalise(s, x, first, u);
    for (size_t j = 0; j < n; ++j) {
      const double weight = std::abs(gamma[j]), shift = beta.empty() ? 0 : beta[j];
      y.value[first + j] = gamma[j] * row.xhat.value[j] + shift;
      y.error[first + j] =
          weight * row.xhat.error[j] + 2 * u * (weight * row.xhat.most(j) + std::abs(shift));
    }
  }
  return y;
}

NormLosses norm_backward_loss(const NormShape& s, const Uncertain& x, In gamma, const Uncertain& g,
                              const Rounding& r) {
  const size_t n = size_t(s.width), rows = x.size() / n;
  const double u = r.accumulate, over_rows = gamma_of(double(rows) + 1, u);
  NormLosses d{
      {Values(x.size()), Values(x.size())}, {Values(n), Values(n)}, {Values(n), Values(n)}};
  for (size_t first = 0; first < x.size(); first += n) {
    const Row row = normalise(s, x, first, u);
    const Means m = means_of(row, gamma, g, first, u);
    for (size_t j = 0; j < n; ++j) {
      const size_t i = first + j;
      const double weight = std::abs(gamma[j]), exact = std::abs(g.value[i] * row.xhat.value[j]),
                   dot = g.most(i) * row.xhat.most(j);
      d.gamma.error[j] += dot - exact + over_rows * dot;
      d.gamma.magnitude[j] += dot;
      d.beta.error[j] += g.error[i] + over_rows * g.most(i);
      d.beta.magnitude[j] += g.most(i);

      // dx = (t - [mean t] - xhat mean(t xhat)) / scale
      const double mean = s.centred ? m.plain : 0, mean_error = s.centred ? m.plain_error : 0;
      const double along = row.xhat.value[j] * m.along,
                   along_most = row.xhat.most(j) * (std::abs(m.along) + m.along_error);
      const double inner = gamma[j] * g.value[i] - mean - along;
      const double inner_error =
          weight * g.error[i] + mean_error + along_most - std::abs(along) +
          4 * u * (weight * g.most(i) + std::abs(mean) + mean_error + along_most);
      d.x.value[i] = inner * row.inverse;
      d.x.error[i] =
          product_error(d.x.value[i], (std::abs(inner) + inner_error) * row.inverse_most(), 1, u);
    }
  }
  return d;
}

}  // namespace shardproof::reference
