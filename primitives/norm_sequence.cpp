#include "primitives/norm_sequence.hpp"

#include <cmath>
#include <numeric>

#include "primitives/linear_line.hpp"

namespace shardproof::primitives {
namespace {

template <class T>
std::vector<T> read(const View& v) {
  const std::vector<double> d = to_doubles(v);
  return std::vector<T>(d.begin(), d.end());
}
template <class T>
void write(const std::vector<T>& values, const View& v) {
  fill_from(v, std::vector<double>(values.begin(), values.end()));
}

int64_t rows_of(const View& x) { return x.elements() / x.shape.back(); }

struct NormSaved : Saved {
  View x, gamma;
  Buffer statistics;
};

// gamma, [beta] behind x.
View optional(std::span<const View> views, size_t i) {
  return i < views.size() ? views[i] : View{};
}

}  // namespace

template <class T>
void Norm::rows_forward(const View& x, const View& gamma, const View& beta, const View& y,
                        const View& statistics) const {
  const size_t n = size_t(x.shape.back()), rows = size_t(rows_of(x));
  const std::vector<T> values = read<T>(x), weight = read<T>(gamma),
                       shift = beta.data ? read<T>(beta) : std::vector<T>(n);
  std::vector<T> out(values.size()), kept(2 * rows);
  for (size_t t = 0; t < rows; ++t) {
    const T* row = &values[t * n];
    T mean = 0, square = 0;
    if (centred_) mean = std::accumulate(row, row + n, T(0)) / T(n);
    for (size_t j = 0; j < n; ++j) square += (row[j] - mean) * (row[j] - mean);
    const T inverse = T(1) / std::sqrt(square / T(n) + T(norm_eps));
    for (size_t j = 0; j < n; ++j)
      out[t * n + j] = weight[j] * ((row[j] - mean) * inverse) + shift[j];
    kept[2 * t] = mean, kept[2 * t + 1] = inverse;
  }
  write(out, y);
  write(kept, statistics);
}

// With t = gamma g: dx = (t - [mean t] - xhat mean(t xhat)) / scale, the bracket where centred.
template <class T>
void Norm::rows_backward(Parallel& p, const View& x, const View& gamma, const View& statistics,
                         const View& g, const View& dx, const View& dgamma,
                         const View& dbeta) const {
  const size_t n = size_t(x.shape.back());
  const std::vector<T> values = read<T>(x), weight = read<T>(gamma), kept = read<T>(statistics),
                       cotangent = read<T>(g);
  std::vector<T> out(values.size()), sum_gamma(n), sum_beta(n), xhat(n);
  for (int64_t row : row_order(p, rows_of(x))) {
    const size_t first = size_t(row) * n;
    const T mean = kept[2 * size_t(row)], inverse = kept[2 * size_t(row) + 1];
    T plain = 0, along = 0;
    for (size_t j = 0; j < n; ++j) {
      const T d = cotangent[first + j], t = weight[j] * d;
      xhat[j] = (values[first + j] - mean) * inverse;
      plain += t;
      along += t * xhat[j];
      sum_gamma[j] += d * xhat[j];
      sum_beta[j] += d;
    }
    plain = centred_ ? plain / T(n) : T(0);
    along /= T(n);
    for (size_t j = 0; j < n; ++j)
      out[first + j] = (weight[j] * cotangent[first + j] - plain - xhat[j] * along) * inverse;
  }
  if (dx.data) write(out, dx);
  if (dgamma.data) write(sum_gamma, dgamma);
  if (dbeta.data) write(sum_beta, dbeta);
}

std::vector<int64_t> Norm::row_order(Parallel&, int64_t rows) const {
  std::vector<int64_t> order(static_cast<size_t>(rows));
  std::iota(order.begin(), order.end(), 0);
  return order;
}

void Norm::forward(Parallel& p, const View& x, const View& gamma, const View& beta, const View& y,
                   const View& statistics) const {
  if (p.accumulate == DType::f64)
    rows_forward<double>(x, gamma, beta, y, statistics);
  else
    rows_forward<float>(x, gamma, beta, y, statistics);
}

void Norm::backward(Parallel& p, const View& x, const View& gamma, const View& statistics,
                    const View& g, const View& dx, const View& dgamma, const View& dbeta) const {
  if (p.accumulate == DType::f64)
    rows_backward<double>(p, x, gamma, statistics, g, dx, dgamma, dbeta);
  else
    rows_backward<float>(p, x, gamma, statistics, g, dx, dgamma, dbeta);
}

std::optional<Rejected> refused_norm(const Case& line) { return refused_own_tokens(line); }

std::unique_ptr<Norm> NormSequence::norm_of(const Case& line) const {
  return std::make_unique<Norm>(line.text("norm") == "layer");
}

std::vector<Axis> NormSequence::summed_over(const Case& line) const { return axes_of_tokens(line); }

void NormSequence::sum_gradients(Parallel& p, const Parts& parts, const std::vector<Axis>& axes) {
  coalesced_all_reduce(p, parts, axes);
}

// inputs x, gamma, [beta]; output y.
std::unique_ptr<Saved> NormSequence::forward(Rank& rank, std::span<const View> inputs,
                                             std::span<const View> outputs) {
  if (auto refused = refused_norm(rank.line())) throw *refused;
  Parallel p(rank);
  auto saved = std::make_unique<NormSaved>();
  saved->x = inputs[0];
  saved->gamma = inputs[1];
  saved->statistics = Buffer(p.accumulate, {rows_of(inputs[0]), 2});
  norm_of(rank.line())
      ->forward(p, inputs[0], inputs[1], optional(inputs, 2), outputs[0], saved->statistics.view());
  return saved;
}

void NormSequence::backward(Rank& rank, Saved& state, std::span<const View> cotangents,
                            std::span<const View> gradients) {
  Parallel p(rank);
  const auto& saved = static_cast<const NormSaved&>(state);
  into_running_sums(
      p, gradients,
      [&](std::span<const View> own) {
        Parts parts;
        View sums[2];
        for (size_t i = 1; i < own.size(); ++i)
          if (own[i].data) parts.push_back({sums[i - 1] = partial_like(p, own[i]), own[i]});
        norm_of(rank.line())
            ->backward(p, saved.x, saved.gamma, saved.statistics.view(), cotangents[0], own[0],
                       sums[0], sums[1]);
        sum_gradients(p, parts, summed_over(rank.line()));
      },
      add_into);
}

}  // namespace shardproof::primitives
