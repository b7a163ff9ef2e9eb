#include "reference/loss.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>

namespace shardproof::reference {
namespace {

// Of a row: its greatest logit m, sum exp(z - m), sum (z - m).
struct RowSums {
  double greatest, exps = 0, shifted = 0;

  explicit RowSums(In row) : greatest(*std::max_element(row.begin(), row.end())) {
    for (double z : row) exps += std::exp(z - greatest), shifted += z - greatest;
  }
  double log_sum() const { return std::log(exps); }
  double lse() const { return greatest + log_sum(); }
};

constexpr double function_ulps = 4;  // exp, log with the operations around them

// What exp(-d) errs by where d is off by u d and the result by a further factor of exp(x).
double error_of_exp(double d, double u, double x) {
  return u * d < 1 ? std::exp(-d) * std::expm1(u * d + x) : std::exp((u - 1) * d + x);
}

void require_labels(In logits, std::span<const int64_t> labels, int64_t classes) {
  if (logits.size() != labels.size() * size_t(classes))
    throw std::invalid_argument("reference cross_entropy: expected logits of " +
                                std::to_string(labels.size()) + " x " + std::to_string(classes) +
                                " elements, met " + std::to_string(logits.size()));
  for (size_t t = 0; t < labels.size(); ++t)
    if (labels[t] != ignored_label && (labels[t] < 0 || labels[t] >= classes))
      throw std::invalid_argument("reference cross_entropy: expected labels below " +
                                  std::to_string(classes) + " or -100, met " +
                                  std::to_string(labels[t]) + " at token " + std::to_string(t));
}

// What E errs by, relative to it: exp magnifies the rounding of z - m; its own error, and K - 1
// additions in any order, which err by (K - 1) u of the sum at most, without higher terms
// (Jeannerod and Rump, 2013).
double error_of_exps(In row, const RowSums& s, double u, double tiny) {
  const double K = double(row.size());
  double of_terms = K * tiny;
  for (double z : row) of_terms += error_of_exp(s.greatest - z, u, 0) / s.exps;
  const double of_sum = (function_ulps + K) * u;
  return of_terms + of_sum + of_terms * of_sum;
}

void require_rows(In logits, int64_t classes) {
  if (classes < 1 || logits.size() % size_t(classes) != 0)
    throw std::invalid_argument("reference log_softmax: expected rows of " +
                                std::to_string(classes) + " logits, met " +
                                std::to_string(logits.size()) + " elements");
}

}  // namespace

Values cross_entropy(In logits, std::span<const int64_t> labels, int64_t classes,
                     double smoothing) {
  require_labels(logits, labels, classes);
  Values loss(labels.size());
  for (size_t t = 0; t < labels.size(); ++t) {
    if (labels[t] == ignored_label) continue;
    const In row = logits.subspan(t * size_t(classes), size_t(classes));
    const RowSums s(row);
    loss[t] = (1 - smoothing) * (s.log_sum() - (row[size_t(labels[t])] - s.greatest)) +
              smoothing * (s.log_sum() - s.shifted / double(classes));
  }
  return loss;
}

Values cross_entropy_backward(In logits, std::span<const int64_t> labels, int64_t classes,
                              double smoothing, In g) {
  require_labels(logits, labels, classes);
  Values d(logits.size());
  for (size_t t = 0; t < labels.size(); ++t) {
    if (labels[t] == ignored_label) continue;
    const size_t first = t * size_t(classes);
    const RowSums s(logits.subspan(first, size_t(classes)));
    for (int64_t j = 0; j < classes; ++j)
      d[first + size_t(j)] =
          g[t] * (std::exp(logits[first + size_t(j)] - s.greatest) / s.exps -
                  (j == labels[t] ? 1 - smoothing : 0) - smoothing / double(classes));
  }
  return d;
}

CrossEntropyErrors cross_entropy_errors(In logits, std::span<const int64_t> labels, int64_t classes,
                                        double u) {
  require_labels(logits, labels, classes);
  CrossEntropyErrors e{Values(labels.size()), Values(logits.size())};
  for (size_t t = 0; t < labels.size(); ++t) {
    if (labels[t] == ignored_label) continue;
    const In row = logits.subspan(t * size_t(classes), size_t(classes));
    const RowSums s(row);
    const double greatest = s.greatest, lse = s.lse();
    // log sum exp: the relative errors of the terms, their sum, the logarithm, adding the maximum.
    double lse_error = u * (double(classes) + 2 * function_ulps + std::abs(lse));
    for (double z : row) lse_error += std::exp(z - lse) * u * std::abs(z - greatest);
    const double target = row[size_t(labels[t])];
    e.loss[t] = lse_error + u * (std::abs(lse - target) + lse_error);
    for (int64_t j = 0; j < classes; ++j) {
      const double p = std::exp(row[size_t(j)] - lse), target_here = j == labels[t] ? 1 : 0;
      const double relative =
          std::expm1(u * std::abs(row[size_t(j)] - lse) + lse_error + function_ulps * u);
      e.logits[t * size_t(classes) + size_t(j)] = p * relative + 2 * u * (p + target_here);
    }
  }
  return e;
}

CrossEntropyErrors shifted_cross_entropy_errors(In logits, std::span<const int64_t> labels,
                                                int64_t classes, double smoothing, double u,
                                                double tiny) {
  require_labels(logits, labels, classes);
  const double K = double(classes);
  constexpr double infinity = std::numeric_limits<double>::infinity();
  CrossEntropyErrors e{Values(labels.size()), Values(logits.size())};
  for (size_t t = 0; t < labels.size(); ++t) {
    if (labels[t] == ignored_label) continue;
    const In row = logits.subspan(t * size_t(classes), size_t(classes));
    const RowSums s(row);
    const double L = s.log_sum(), q = row[size_t(labels[t])] - s.greatest;
    const double of_E = error_of_exps(row, s, u, tiny);
    if (!(of_E < 1)) {  // nothing is known of its logarithm
      e.loss[t] = infinity;
      std::fill_n(e.logits.begin() + int64_t(t) * classes, classes, infinity);
      continue;
    }
    const double of_log = of_E / (1 - of_E) + function_ulps * u * L;
    // Each of the two summands: what goes into it, its weight, its product, their sum.
    const auto weighed = [&](double weight, double value, double error) {
      return std::abs(weight) * (error + 3 * u * (std::abs(value) + error));
    };
    const double nll = L - q, into_nll = of_log + u * std::abs(q);
    const double even = L - s.shifted / K,
                 into_even = of_log + (K + 2) * u * std::abs(s.shifted) / K;
    e.loss[t] = weighed(1 - smoothing, nll, into_nll + u * (nll + into_nll)) +
                weighed(smoothing, even, into_even + u * (even + into_even));
    // exp, a division, E: as an exponent.
    const double into_p = std::log1p((function_ulps + 1) * u) - std::log1p(-of_E);
    for (int64_t j = 0; j < classes; ++j) {
      const double d = s.greatest - row[size_t(j)], p = std::exp(-d) / s.exps,
                   of_p = error_of_exp(d, u, into_p) / s.exps + tiny;
      const double taken = (j == labels[t] ? std::abs(1 - smoothing) : 0) + smoothing / K;
      // The weights, two subtractions, the product with the cotangent.
      e.logits[t * size_t(classes) + size_t(j)] = of_p + 4 * u * (p + of_p + taken);
    }
  }
  return e;
}

Values log_softmax(In logits, int64_t classes) {
  require_rows(logits, classes);
  Values y(logits.size());
  for (size_t first = 0; first < logits.size(); first += size_t(classes)) {
    const RowSums s(logits.subspan(first, size_t(classes)));
    for (size_t i = first; i < first + size_t(classes); ++i)
      y[i] = logits[i] - s.greatest - s.log_sum();
  }
  return y;
}

Values log_softmax_backward(In logits, int64_t classes, In g) {
  require_rows(logits, classes);
  Values d(logits.size());
  for (size_t first = 0; first < logits.size(); first += size_t(classes)) {
    const RowSums s(logits.subspan(first, size_t(classes)));
    double sum = 0;
    for (double each : g.subspan(first, size_t(classes))) sum += each;
    for (size_t i = first; i < first + size_t(classes); ++i)
      d[i] = g[i] - std::exp(logits[i] - s.greatest) / s.exps * sum;
  }
  return d;
}

LogSoftmaxErrors log_softmax_errors(In logits, int64_t classes, In g, double u, double u_y,
                                    double tiny) {
  require_rows(logits, classes);
  const double K = double(classes);
  LogSoftmaxErrors e{Values(logits.size()), Values(g.size())};
  for (size_t first = 0; first < logits.size(); first += size_t(classes)) {
    const In row = logits.subspan(first, size_t(classes));
    const RowSums s(row);
    const double of_E = error_of_exps(row, s, u, tiny);
    const bool known = of_E < 1;  // else nothing is known of its logarithm
    const double of_log = of_E / (1 - of_E) + function_ulps * u * s.log_sum();
    double sum = 0, magnitude = 0;  // of g, which exp(z - m)/E or exp(y) is multiplied by
    for (size_t j = 0; !g.empty() && j < row.size(); ++j)
      sum += g[first + j], magnitude += std::abs(g[first + j]);
    const double of_sum = K * u * magnitude, most = std::abs(sum) + of_sum;
    for (size_t j = 0; j < row.size(); ++j) {
      constexpr double infinity = std::numeric_limits<double>::infinity();
      const size_t i = first + j;
      const double d = s.greatest - row[j], y = d + s.log_sum(), into_y = u * d + of_log;
      e.y[i] = known ? into_y + u * (y + into_y) : infinity;
      if (g.empty()) continue;
      // As an exponent: y as it is kept; a division, exp.
      const double p = std::exp(-y),
                   x = of_log + (u + u_y) * (y + into_y) + (function_ulps + 1) * u;
      const double of_p = error_of_exp(d, u, x) / s.exps + tiny;
      const double product = of_p * most + p * of_sum;
      e.logits[i] = known ? product + u * (p * std::abs(sum) + product) +
                                u * (std::abs(g[i]) + p * std::abs(sum) + product)
                          : infinity;
    }
  }
  return e;
}

Values loss_factors(Normalisation how, std::span<const int64_t> labels, In weights,
                    std::span<const int64_t> group_of_token, int64_t groups) {
  const bool one = how == Normalisation::tokens;
  Values count(one ? 1 : size_t(groups)), factor(labels.size());
  auto group = [&](size_t t) { return one ? size_t(0) : size_t(group_of_token[t]); };
  for (size_t t = 0; t < labels.size(); ++t)
    if (labels[t] != ignored_label) count[group(t)] += weights[t];
  for (size_t t = 0; t < labels.size(); ++t)
    if (labels[t] != ignored_label)
      factor[t] = weights[t] / std::max(1.0, count[group(t)]) / double(one ? 1 : groups);
  return factor;
}

}  // namespace shardproof::reference
