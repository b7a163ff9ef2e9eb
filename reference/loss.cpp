#include "reference/loss.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

namespace shardproof::reference {
namespace {

// log sum exp of a row, and the sum of its logits.
struct RowSums {
  double lse, total;
};

RowSums sums_of(In row) {
  const double greatest = *std::max_element(row.begin(), row.end());
  double sum = 0, total = 0;
  for (double z : row) sum += std::exp(z - greatest), total += z;
  return {greatest + std::log(sum), total};
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

}  // namespace

Values cross_entropy(In logits, std::span<const int64_t> labels, int64_t classes,
                     double smoothing) {
  require_labels(logits, labels, classes);
  Values loss(labels.size());
  for (size_t t = 0; t < labels.size(); ++t) {
    if (labels[t] == ignored_label) continue;
    const In row = logits.subspan(t * size_t(classes), size_t(classes));
    const RowSums s = sums_of(row);
    loss[t] = (1 - smoothing) * (s.lse - row[size_t(labels[t])]) +
              smoothing * (s.lse - s.total / double(classes));
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
    const double lse = sums_of(logits.subspan(first, size_t(classes))).lse;
    for (int64_t j = 0; j < classes; ++j)
      d[first + size_t(j)] =
          g[t] * (std::exp(logits[first + size_t(j)] - lse) - (j == labels[t] ? 1 - smoothing : 0) -
                  smoothing / double(classes));
  }
  return d;
}

CrossEntropyErrors cross_entropy_errors(In logits, std::span<const int64_t> labels, int64_t classes,
                                        double u) {
  require_labels(logits, labels, classes);
  constexpr double function_ulps = 4;  // exp, log with the operations around them
  CrossEntropyErrors e{Values(labels.size()), Values(logits.size())};
  for (size_t t = 0; t < labels.size(); ++t) {
    if (labels[t] == ignored_label) continue;
    const In row = logits.subspan(t * size_t(classes), size_t(classes));
    const double greatest = *std::max_element(row.begin(), row.end()), lse = sums_of(row).lse;
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
