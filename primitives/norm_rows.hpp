// Bodies of layer norm and RMS norm over rows of n elements.
//
//   y = gamma xhat + beta, xhat = (x - mean) / sqrt(var + eps); without `centred` mean = 0
//   with t = gamma g: dx = (t - [mean t] - xhat mean(t xhat)) / sqrt(var + eps), [ ] where centred
//   dgamma = sum over rows of g xhat, dbeta = sum over rows of g
#pragma once
#include <cmath>

#include "primitives/element.hpp"

namespace shardproof::primitives {

struct NormForward {
  static constexpr Shape shape = Shape::rows;
  Tensor x, gamma, beta, y, statistics;  // statistics [rows, 2]: mean, 1/sqrt(var + eps)
  int64_t n = 1;
  double eps = 0;
  bool centred = false, wide = false;
  template <class F>
  void each_tensor(F f) {
    f(x), f(gamma), f(beta), f(y), f(statistics);
  }
  SHARDPROOF_HD int64_t rows() const { return y.elements / n; }
  template <class A, class Team>
  SHARDPROOF_HD void row(int64_t t, const Team& team) const {
    A mean = 0, square = 0;
    if (centred) {
      for (int64_t j = team.first(); j < n; j += team.step()) mean += x.load<A>(t * n + j);
      mean = team.sum(mean) / A(n);
    }
    for (int64_t j = team.first(); j < n; j += team.step()) {
      const A d = x.load<A>(t * n + j) - mean;
      square += d * d;
    }
    const A inverse = A(1) / std::sqrt(team.sum(square) / A(n) + A(eps));
    for (int64_t j = team.first(); j < n; j += team.step()) {
      const A scaled = gamma.load<A>(j) * ((x.load<A>(t * n + j) - mean) * inverse);
      y.store(t * n + j, A(scaled + (beta.there() ? beta.load<A>(j) : A(0))));
    }
    if (!team.leads()) return;
    statistics.store(2 * t, mean);
    statistics.store(2 * t + 1, inverse);
  }
};

struct NormBackward {
  static constexpr Shape shape = Shape::rows;
  Tensor x, gamma, statistics, g, dx;
  int64_t n = 1;
  bool centred = false, wide = false;
  template <class F>
  void each_tensor(F f) {
    f(x), f(gamma), f(statistics), f(g), f(dx);
  }
  SHARDPROOF_HD int64_t rows() const { return dx.elements / n; }
  template <class A, class Team>
  SHARDPROOF_HD void row(int64_t t, const Team& team) const {
    const A mean = statistics.load<A>(2 * t), inverse = statistics.load<A>(2 * t + 1);
    A plain = 0, along = 0;
    for (int64_t j = team.first(); j < n; j += team.step()) {
      const A s = gamma.load<A>(j) * g.load<A>(t * n + j);
      plain += s;
      along += s * ((x.load<A>(t * n + j) - mean) * inverse);
    }
    plain = centred ? team.sum(plain) / A(n) : A(0);
    along = team.sum(along) / A(n);
    for (int64_t j = team.first(); j < n; j += team.step()) {
      const A xhat = (x.load<A>(t * n + j) - mean) * inverse;
      const A s = gamma.load<A>(j) * g.load<A>(t * n + j);
      dx.store(t * n + j, A((s - plain - xhat * along) * inverse));
    }
  }
};

// Gradient of gamma; without x that of beta. Rows are added from `first` on, round the end.
struct NormParameter {
  static constexpr Shape shape = Shape::columns;
  Tensor x, statistics, g, sums;
  int64_t first = 0;
  bool wide = false;
  template <class F>
  void each_tensor(F f) {
    f(x), f(statistics), f(g), f(sums);
  }
  SHARDPROOF_HD int64_t columns() const { return sums.elements; }
  SHARDPROOF_HD int64_t rows() const { return columns() ? g.elements / columns() : 0; }
  template <class A>
  SHARDPROOF_HD A term(int64_t row, int64_t j) const {
    const int64_t t = row + first < rows() ? row + first : row + first - rows();
    const int64_t i = t * columns() + j;
    if (!x.there()) return g.load<A>(i);
    const A xhat = (x.load<A>(i) - statistics.load<A>(2 * t)) * statistics.load<A>(2 * t + 1);
    return g.load<A>(i) * xhat;
  }
  template <class A>
  SHARDPROOF_HD void put(int64_t j, A sum) const {
    sums.store(j, sum);
  }
};

}  // namespace shardproof::primitives
