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

// What exp(-d) errs by where d is off by `off` and the result by a further factor of exp(x).
double error_of_exp_by(double d, double off, double x) {
  return off < 1 ? std::exp(-d) * std::expm1(off + x) : std::exp(off - d + x);
}
double error_of_exp(double d, double u, double x) { return error_of_exp_by(d, u * d, x); }

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

namespace {

// The logits of a row behind the temperature, and what is known of an implementation's.
struct ScoreRow {
  Values x;
  RowSums s;
  double u, tiny, of_x;  // of_x: relative error of an x

  // By a division or a product with 1/T, which is exact where T is a power of two.
  ScoreRow(In z, double temperature, double u = 0, double tiny = 0)
      : x(divided(z, temperature)), s(x), u(u), tiny(tiny) {
    int exponent = 0;
    of_x = std::frexp(temperature, &exponent) == 0.5 ? 0 : 2 * u;
  }
  static Values divided(In z, double temperature) {
    Values x(z.begin(), z.end());
    for (double& each : x) each /= temperature;
    return x;
  }

  bool there(size_t j) const { return std::isfinite(x[j]); }  // else -inf: p is 0, and p d
  double d(size_t j) const { return s.greatest - x[j]; }
  double of_d(size_t j) const { return of_x * (std::abs(x[j]) + std::abs(s.greatest)) + u * d(j); }
  double p(size_t j) const { return std::exp(-d(j)) / s.exps; }
  double mean_d() const {
    double sum = 0;
    for (size_t j = 0; j < x.size(); ++j) sum += there(j) ? std::exp(-d(j)) * d(j) : 0;
    return sum / s.exps;
  }
};

// E of a row, relative to it, and log E.
struct ExpErrors {
  double of_E, of_log;
  bool known;

  explicit ExpErrors(const ScoreRow& r) {
    const double K = double(r.x.size());
    double of_terms = K * r.tiny;
    for (size_t j = 0; j < r.x.size(); ++j)
      if (r.there(j)) of_terms += error_of_exp_by(r.d(j), r.of_d(j), 0) / r.s.exps;
    const double of_sum = (function_ulps + K) * r.u;
    of_E = of_terms + of_sum + of_terms * of_sum;
    known = of_E < 1;  // else nothing is known of its logarithm
    of_log = of_E / (1 - of_E) + function_ulps * r.u * r.s.log_sum();
  }
};

// What sum_j p_j w_j errs by, as sum_j exp(-d_j) w_j / E or with a division of every term; and
// sum_j p_j |w_j|. weight(j): {w_j, its error}.
struct Mean {
  double error = 0, magnitude = 0;

  template <class Weight>
  Mean(const ScoreRow& r, const ExpErrors& e, Weight weight) {
    const double K = double(r.x.size());
    for (size_t j = 0; j < r.x.size(); ++j) {
      if (!r.there(j)) continue;
      const auto [w, of_w] = weight(j);
      const double term = std::exp(-r.d(j)),
                   of_term = error_of_exp_by(r.d(j), r.of_d(j), function_ulps * r.u) + 2 * r.tiny;
      magnitude += term * std::abs(w);
      error += of_term * (std::abs(w) + of_w) + term * of_w;
    }
    error += (K + 2) * r.u * (magnitude + error);
    error /= r.s.exps, magnitude /= r.s.exps;
    error = (error + magnitude * e.of_E) / (1 - e.of_E);
  }
};

// The entropy, and at a class log p + H, by each of the three forms. With q_j = fl(exp(x_j - m))
// and p_j = q_j / fl(sum q), sum p is 1 but for (K + 1) u, so that sum p x - m is sum p (x - m) but
// for m (K + 1) u and what a sum of terms of the size of x rounds.
struct EntropyErrors {
  double of_entropy, of_size;
  Mean shifted, of_logs;

  EntropyErrors(const ScoreRow& r, const ExpErrors& e, double entropy)
      : shifted(r, e, [&](size_t j) { return std::pair(r.d(j), r.of_d(j)); }),
        of_logs(r, e,
                [&](size_t j) { return std::pair(r.d(j) + r.s.log_sum(), of_log_p(r, e, j)); }) {
    const double L = r.s.log_sum(), m = std::abs(r.s.greatest), K = double(r.x.size());
    of_size = (K + 2) * r.u * (2 * m + shifted.magnitude + shifted.error);
    const double by_shifted = e.of_log + shifted.error,
                 by_plain = by_shifted + of_size + r.u * (m + L + e.of_log);
    of_entropy = std::max(by_plain + r.u * (entropy + by_plain), of_logs.error);
  }
  static double of_log_p(const ScoreRow& r, const ExpErrors& e, size_t j) {
    const double into = r.of_d(j) + e.of_log;
    return into + r.u * (r.d(j) + r.s.log_sum() + into);
  }
  // value: log p_j + H.
  double of_slope(const ScoreRow& r, const ExpErrors& e, size_t j, double value) const {
    const double most =
        std::max(r.of_d(j) + shifted.error + of_size, of_log_p(r, e, j) + of_entropy);
    return most + r.u * (std::abs(value) + most);
  }
};

}  // namespace

LogProbs log_probs(In logits, std::span<const int64_t> labels, int64_t classes,
                   double temperature) {
  require_labels(logits, labels, classes);
  LogProbs r{Values(labels.size()), Values(labels.size())};
  for (size_t t = 0; t < labels.size(); ++t) {
    const ScoreRow row(logits.subspan(t * size_t(classes), size_t(classes)), temperature);
    if (labels[t] != ignored_label) r.log_probs[t] = -row.d(size_t(labels[t])) - row.s.log_sum();
    r.entropy[t] = row.s.log_sum() + row.mean_d();
  }
  return r;
}

Values log_probs_backward(In logits, std::span<const int64_t> labels, int64_t classes,
                          double temperature, In of_log_probs, In of_entropy) {
  require_labels(logits, labels, classes);
  Values d(logits.size());
  for (size_t t = 0; t < labels.size(); ++t) {
    const size_t first = t * size_t(classes);
    const ScoreRow row(logits.subspan(first, size_t(classes)), temperature);
    const double a = labels[t] == ignored_label ? 0 : of_log_probs[t], mean = row.mean_d();
    for (size_t j = 0; j < row.x.size(); ++j) {
      const double p = row.p(j), here = int64_t(j) == labels[t] ? 1 : 0;
      const double of_p = row.there(j) ? p * (mean - row.d(j)) : 0;
      d[first + j] = (a * (here - p) - of_entropy[t] * of_p) / temperature;
    }
  }
  return d;
}

LogProbErrors log_probs_errors(In logits, std::span<const int64_t> labels, int64_t classes,
                               double temperature, In of_log_probs, In of_entropy, double u,
                               double tiny) {
  require_labels(logits, labels, classes);
  constexpr double infinity = std::numeric_limits<double>::infinity();
  const bool backward = !of_log_probs.empty();
  LogProbErrors e{Values(labels.size()), Values(labels.size()),
                  Values(backward ? logits.size() : 0)};
  for (size_t t = 0; t < labels.size(); ++t) {
    const size_t first = t * size_t(classes);
    const bool ignored = labels[t] == ignored_label;
    const ScoreRow row(logits.subspan(first, size_t(classes)), temperature, u, tiny);
    const ExpErrors of(row);
    if (!of.known) {
      e.log_probs[t] = ignored ? 0 : infinity, e.entropy[t] = infinity;
      if (backward) std::fill_n(e.logits.begin() + int64_t(first), classes, infinity);
      continue;
    }
    const double L = row.s.log_sum(), mean = row.mean_d();
    const EntropyErrors entropy(row, of, L + mean);
    e.entropy[t] = entropy.of_entropy;
    if (!ignored) e.log_probs[t] = EntropyErrors::of_log_p(row, of, size_t(labels[t]));
    if (!backward) continue;
    const double a = ignored ? 0 : std::abs(of_log_probs[t]), b = std::abs(of_entropy[t]);
    for (size_t j = 0; j < row.x.size(); ++j) {
      if (!row.there(j)) continue;  // 0, whatever the cotangents are
      // exp(x - m) / E, or exp of log p: as an exponent.
      const double x =
          std::max(std::log1p((function_ulps + 1) * u) - std::log1p(-of.of_E),
                   of.of_log + u * (row.d(j) + L + row.of_d(j) + of.of_log) + function_ulps * u);
      const double p = row.p(j),
                   of_p = error_of_exp_by(row.d(j), row.of_d(j), x) / row.s.exps + tiny;
      const double slope = std::abs(mean - row.d(j)),
                   of_slope = entropy.of_slope(row, of, j, slope);
      const double error = a * of_p + b * (of_p * (slope + of_slope) + p * of_slope),
                   terms = a * ((int64_t(j) == labels[t] ? 1 : 0) + p) + b * p * slope;
      // A subtraction, two products, their sum, the temperature; of products what is below normal.
      e.logits[first + j] = (error + 6 * u * (terms + error) + 3 * tiny) / temperature;
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
