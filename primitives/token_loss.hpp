// Bodies of the next-token loss. Token t predicts ids[next[t]]; next < 0 or weight 0: nothing.
//
//   loss_t = w_t (lse(z_t) - z_t[label])     dz_t = c w_t (softmax(z_t) - e_label) / (N groups)
//   sums = (sum of loss_t, sum of w_t), over ranks (S, N); loss = S / max(1, N) / groups
#pragma once
#include <cmath>

#include "primitives/element.hpp"

namespace shardproof::primitives {

struct Predictions {
  Tensor z, ids, next, weights;
  int64_t classes = 1;

  SHARDPROOF_HD bool counts(int64_t t) const {
    return next.integer(t) >= 0 && weights.load(t) != 0;
  }
  SHARDPROOF_HD int64_t label(int64_t t) const { return ids.integer(next.integer(t)); }
  template <class A, class Team>
  SHARDPROOF_HD A lse(int64_t t, const Team& team) const {
    A greatest = z.load<A>(t * classes), sum = 0;
    for (int64_t j = team.first(); j < classes; j += team.step()) {
      const A score = z.load<A>(t * classes + j);
      greatest = greatest < score ? score : greatest;
    }
    greatest = team.greatest(greatest);
    for (int64_t j = team.first(); j < classes; j += team.step())
      sum += std::exp(z.load<A>(t * classes + j) - greatest);
    return greatest + std::log(team.sum(sum));
  }
};

struct TokenLoss {
  static constexpr Shape shape = Shape::rows;
  Predictions of;
  Tensor losses;
  bool wide = false;
  template <class F>
  void each_tensor(F f) {
    f(of.z), f(of.ids), f(of.next), f(of.weights), f(losses);
  }
  SHARDPROOF_HD int64_t rows() const { return losses.elements; }
  template <class A, class Team>
  SHARDPROOF_HD void row(int64_t t, const Team& team) const {
    A loss = 0;
    if (of.counts(t))
      loss =
          of.weights.load<A>(t) * (of.lse<A>(t, team) - of.z.load<A>(t * of.classes + of.label(t)));
    if (team.leads()) losses.store(t, loss);
  }
};

struct LossSums {
  static constexpr Shape shape = Shape::rows;
  Tensor losses, next, weights, sums;
  bool wide = false;
  template <class F>
  void each_tensor(F f) {
    f(losses), f(next), f(weights), f(sums);
  }
  SHARDPROOF_HD int64_t rows() const { return 1; }
  template <class A, class Team>
  SHARDPROOF_HD void row(int64_t, const Team& team) const {
    A loss = 0, count = 0;
    for (int64_t t = team.first(); t < losses.elements; t += team.step()) {
      loss += losses.load<A>(t);
      if (next.integer(t) >= 0) count += weights.load<A>(t);
    }
    loss = team.sum(loss);
    count = team.sum(count);
    if (!team.leads()) return;
    sums.store(0, loss);
    sums.store(1, count);
  }
};

// mean = S / max(1, N), in double.
struct LossMean {
  static constexpr Shape shape = Shape::elements;
  Tensor sums, mean;
  template <class F>
  void each_tensor(F f) {
    f(sums), f(mean);
  }
  SHARDPROOF_HD int64_t count() const { return 1; }
  SHARDPROOF_HD void at(int64_t) const {
    const double n = sums.load(1);
    mean.store(0, sums.load(0) / (n > 1 ? n : 1));
  }
};

struct LossGradient {
  static constexpr Shape shape = Shape::rows;
  Predictions of;
  Tensor cotangent, sums, dz;
  double groups = 1;
  bool wide = false;
  template <class F>
  void each_tensor(F f) {
    f(of.z), f(of.ids), f(of.next), f(of.weights), f(cotangent), f(sums), f(dz);
  }
  SHARDPROOF_HD int64_t rows() const { return of.next.elements; }
  template <class A, class Team>
  SHARDPROOF_HD void row(int64_t t, const Team& team) const {
    const int64_t first = t * of.classes;
    if (!of.counts(t)) {
      for (int64_t j = team.first(); j < of.classes; j += team.step()) dz.store(first + j, A(0));
      return;
    }
    const double n = sums.load(1);
    const A scale = A(cotangent.load(0) * (1 / ((n > 1 ? n : 1) * groups))) * of.weights.load<A>(t);
    const A lse = of.lse<A>(t, team);
    const int64_t label = of.label(t);
    for (int64_t j = team.first(); j < of.classes; j += team.step())
      dz.store(first + j,
               A(scale * (std::exp(of.z.load<A>(first + j) - lse) - A(j == label ? 1 : 0))));
  }
};

}  // namespace shardproof::primitives
