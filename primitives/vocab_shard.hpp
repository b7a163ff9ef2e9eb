// Bodies of what is cut by the vocabulary: rank r of p holds rows, or classes, r V/p to (r+1) V/p
// of V, of which it knows the first and how many. An id that another rank owns finds 0 here.
//
//   embedding      part_t = w[id_t - first], y = sum over ranks; dw_v = sum of g_t with id_t = v
//   cross-entropy  m_t = max_j z_tj, E_t = sum_j exp(z_tj - m_t), q_t = z_ty - m_t, and where
//                  labels are smoothed Z_t = sum_j (z_tj - m_t): over the classes of all ranks
//                  loss_t = (1-s)(log E_t - q_t) + s (log E_t - Z_t/V)
//                  dz_tj = g_t (exp(z_tj - m_t)/E_t - (1-s) [j = y_t] - s/V)
//                  a label of -100 is ignored: loss 0, dz 0
//   log-softmax    y_tj = (z_tj - m_t) - log E_t; dz_tj = g_tj - exp(z_tj - m_t)/E_t G_t, G_t the
//                  sum of g_tj over the classes of all ranks
//   log-probs      of softmax(z / T): x_tj = (z_tj - m_t) / T, E_t = sum_j exp(x_tj), q_t = x_ty,
//                  S_t = sum_j exp(x_tj) x_tj, over the classes of all ranks
//                  log-prob q_t - log E_t, entropy H_t = log E_t - S_t/E_t, p_tj = exp(x_tj)/E_t
//                  dz_tj = (a_t ([j = y_t] - p_tj) - b_t p_tj (x_tj - S_t/E_t)) / T, a and b the
//                  cotangents of log-prob and entropy; of a label of -100 log-prob and a are 0
#pragma once
#include <cmath>

#include "primitives/element.hpp"

namespace shardproof::primitives {

inline constexpr int64_t ignored_label = -100;

struct OwnIds {
  Tensor ids;
  int64_t first = 0, own = 1;

  SHARDPROOF_HD int64_t local(int64_t t) const {  // -1: of another rank
    const int64_t i = ids.integer(t) - first;
    return i >= 0 && i < own ? i : -1;
  }
  SHARDPROOF_HD bool ignored(int64_t t) const { return ids.integer(t) == ignored_label; }
};

// Rows of w by id, zeros for those of other ranks: bits as they are.
struct LookUp {
  static constexpr Shape shape = Shape::elements;
  OwnIds of;
  Tensor w, part;
  int64_t columns = 1;
  template <class F>
  void each_tensor(F f) {
    f(of.ids), f(w), f(part);
  }
  SHARDPROOF_HD int64_t count() const { return part.elements; }
  SHARDPROOF_HD void at(int64_t i) const {
    const int64_t row = of.local(i / columns);
    if (row < 0)
      part.store(i, 0.0);
    else
      part.copy_from(i, w, row * columns + i % columns);
  }
};

// Every token adds its cotangent to the row that it named, in the order of tokens.
struct ScatterAdd {
  static constexpr Shape shape = Shape::rows;
  OwnIds of;
  Tensor g, dw;
  int64_t columns = 1;
  bool wide = false;
  template <class F>
  void each_tensor(F f) {
    f(of.ids), f(g), f(dw);
  }
  SHARDPROOF_HD int64_t rows() const { return of.own; }
  template <class A, class Team>
  SHARDPROOF_HD void row(int64_t v, const Team& team) const {
    for (int64_t j = team.first(); j < columns; j += team.step()) {
      A sum = 0;
      for (int64_t t = 0; t < of.ids.elements; ++t)
        if (of.local(t) == v) sum += g.load<A>(t * columns + j);
      dw.store(v * columns + j, sum);
    }
  }
};

struct ShardMaximum {
  static constexpr Shape shape = Shape::rows;
  Tensor z, greatest;
  int64_t columns = 1;
  bool wide = false;
  template <class F>
  void each_tensor(F f) {
    f(z), f(greatest);
  }
  SHARDPROOF_HD int64_t rows() const { return greatest.elements; }
  template <class A, class Team>
  SHARDPROOF_HD void row(int64_t t, const Team& team) const {
    A own = z.load<A>(t * columns);
    for (int64_t j = team.first(); j < columns; j += team.step()) {
      const A score = z.load<A>(t * columns + j);
      own = own < score ? score : own;
    }
    own = team.greatest(own);
    if (team.leads()) greatest.store(t, own);
  }
};

// E, q and, where there is room for it, Z of the own classes.
struct ShardSums {
  static constexpr Shape shape = Shape::rows;
  OwnIds labels;
  Tensor z, greatest, exps, target, shifted;
  bool wide = false;
  template <class F>
  void each_tensor(F f) {
    f(labels.ids), f(z), f(greatest), f(exps), f(target), f(shifted);
  }
  SHARDPROOF_HD int64_t rows() const { return greatest.elements; }
  template <class A, class Team>
  SHARDPROOF_HD void row(int64_t t, const Team& team) const {
    const int64_t columns = labels.own, label = labels.local(t);
    const A m = greatest.load<A>(t);
    A exp_sum = 0, sum = 0;
    for (int64_t j = team.first(); j < columns; j += team.step()) {
      const A score = z.load<A>(t * columns + j) - m;
      exp_sum += std::exp(score);
      sum += score;
    }
    exp_sum = team.sum(exp_sum);
    sum = team.sum(sum);
    if (!team.leads()) return;
    exps.store(t, exp_sum);
    target.store(t, label < 0 ? A(0) : A(z.load<A>(t * columns + label) - m));
    if (shifted.there()) shifted.store(t, sum);
  }
};

// E of the own classes.
struct ShardExps {
  static constexpr Shape shape = Shape::rows;
  Tensor z, greatest, exps;
  int64_t columns = 1;
  bool wide = false;
  template <class F>
  void each_tensor(F f) {
    f(z), f(greatest), f(exps);
  }
  SHARDPROOF_HD int64_t rows() const { return greatest.elements; }
  template <class A, class Team>
  SHARDPROOF_HD void row(int64_t t, const Team& team) const {
    const A m = greatest.load<A>(t);
    A sum = 0;
    for (int64_t j = team.first(); j < columns; j += team.step())
      sum += std::exp(z.load<A>(t * columns + j) - m);
    sum = team.sum(sum);
    if (team.leads()) exps.store(t, sum);
  }
};

struct LogProbabilities {
  static constexpr Shape shape = Shape::rows;
  Tensor z, greatest, exps, y;
  int64_t columns = 1;
  bool wide = false;
  template <class F>
  void each_tensor(F f) {
    f(z), f(greatest), f(exps), f(y);
  }
  SHARDPROOF_HD int64_t rows() const { return greatest.elements; }
  template <class A, class Team>
  SHARDPROOF_HD void row(int64_t t, const Team& team) const {
    const A m = greatest.load<A>(t), log_sum = std::log(exps.load<A>(t));
    for (int64_t j = team.first(); j < columns; j += team.step())
      y.store(t * columns + j, (z.load<A>(t * columns + j) - m) - log_sum);
  }
};

// G of the own classes.
struct CotangentSum {
  static constexpr Shape shape = Shape::rows;
  Tensor g, total;
  int64_t columns = 1;
  bool wide = false;
  template <class F>
  void each_tensor(F f) {
    f(g), f(total);
  }
  SHARDPROOF_HD int64_t rows() const { return total.elements; }
  template <class A, class Team>
  SHARDPROOF_HD void row(int64_t t, const Team& team) const {
    A sum = 0;
    for (int64_t j = team.first(); j < columns; j += team.step()) sum += g.load<A>(t * columns + j);
    sum = team.sum(sum);
    if (team.leads()) total.store(t, sum);
  }
};

struct LogSoftmaxGradient {
  static constexpr Shape shape = Shape::rows;
  Tensor z, g, greatest, exps, total, dz;
  int64_t columns = 1;
  bool wide = false;
  template <class F>
  void each_tensor(F f) {
    f(z), f(g), f(greatest), f(exps), f(total), f(dz);
  }
  SHARDPROOF_HD int64_t rows() const { return greatest.elements; }
  template <class A, class Team>
  SHARDPROOF_HD void row(int64_t t, const Team& team) const {
    const A m = greatest.load<A>(t), sum = exps.load<A>(t), all = total.load<A>(t);
    for (int64_t j = team.first(); j < columns; j += team.step()) {
      const int64_t i = t * columns + j;
      dz.store(i, g.load<A>(i) - std::exp(z.load<A>(i) - m) / sum * all);
    }
  }
};

struct LossOfShards {
  static constexpr Shape shape = Shape::elements;
  OwnIds labels;
  Tensor exps, target, shifted, loss;
  double smoothing = 0, classes = 1;  // s, and over how many Z goes
  bool wide = false;
  template <class F>
  void each_tensor(F f) {
    f(labels.ids), f(exps), f(target), f(shifted), f(loss);
  }
  SHARDPROOF_HD int64_t count() const { return loss.elements; }
  template <class A>
  SHARDPROOF_HD A of(int64_t t) const {
    if (labels.ignored(t)) return 0;
    const A log_sum = std::log(exps.load<A>(t)), nll = log_sum - target.load<A>(t);
    if (!shifted.there()) return nll;
    const A even = log_sum - shifted.load<A>(t) / A(classes);
    return A(1 - smoothing) * nll + A(smoothing) * even;
  }
  SHARDPROOF_HD void at(int64_t t) const {
    if (wide)
      loss.store(t, of<double>(t));
    else
      loss.store(t, of<float>(t));
  }
};

struct ShardGradient {
  static constexpr Shape shape = Shape::rows;
  OwnIds labels;
  Tensor z, g, greatest, exps, dz;
  double smoothing = 0, classes = 1;
  bool wide = false;
  template <class F>
  void each_tensor(F f) {
    f(labels.ids), f(z), f(g), f(greatest), f(exps), f(dz);
  }
  SHARDPROOF_HD int64_t rows() const { return greatest.elements; }
  template <class A, class Team>
  SHARDPROOF_HD void row(int64_t t, const Team& team) const {
    const int64_t columns = labels.own, label = labels.local(t);
    const bool ignored = labels.ignored(t);
    const A m = greatest.load<A>(t), sum = exps.load<A>(t), cotangent = g.load<A>(t);
    const A even = A(smoothing / classes), on_label = A(1 - smoothing);
    for (int64_t j = team.first(); j < columns; j += team.step()) {
      const A p = std::exp(z.load<A>(t * columns + j) - m) / sum;
      const A slope = p - (j == label ? on_label : A(0)) - even;
      dz.store(t * columns + j, ignored ? A(0) : A(cotangent * slope));
    }
  }
};

// E, q and S of the own classes.
struct ShardScores {
  static constexpr Shape shape = Shape::rows;
  OwnIds labels;
  Tensor z, greatest, exps, target, scores;
  double temperature = 1;
  bool wide = false;
  template <class F>
  void each_tensor(F f) {
    f(labels.ids), f(z), f(greatest), f(exps), f(target), f(scores);
  }
  SHARDPROOF_HD int64_t rows() const { return greatest.elements; }
  template <class A, class Team>
  SHARDPROOF_HD void row(int64_t t, const Team& team) const {
    const int64_t columns = labels.own, label = labels.local(t);
    const A m = greatest.load<A>(t), T = A(temperature);
    A exp_sum = 0, score_sum = 0;
    for (int64_t j = team.first(); j < columns; j += team.step()) {
      const A score = (z.load<A>(t * columns + j) - m) / T, e = std::exp(score);
      exp_sum += e;
      if (e > 0) score_sum += e * score;  // of a logit of -inf the limit, 0
    }
    exp_sum = team.sum(exp_sum);
    score_sum = team.sum(score_sum);
    if (!team.leads()) return;
    exps.store(t, exp_sum);
    scores.store(t, score_sum);
    target.store(t, label < 0 ? A(0) : A((z.load<A>(t * columns + label) - m) / T));
  }
};

struct TokenLogProbs {
  static constexpr Shape shape = Shape::elements;
  OwnIds labels;
  Tensor exps, target, scores, log_probs, entropy;
  bool wide = false;
  template <class F>
  void each_tensor(F f) {
    f(labels.ids), f(exps), f(target), f(scores), f(log_probs), f(entropy);
  }
  SHARDPROOF_HD int64_t count() const { return log_probs.elements; }
  template <class A>
  SHARDPROOF_HD void of(int64_t t) const {
    const A sum = exps.load<A>(t), log_sum = std::log(sum);
    log_probs.store(t, labels.ignored(t) ? A(0) : A(target.load<A>(t) - log_sum));
    entropy.store(t, log_sum - scores.load<A>(t) / sum);
  }
  SHARDPROOF_HD void at(int64_t t) const {
    if (wide)
      of<double>(t);
    else
      of<float>(t);
  }
};

// divisor: T, by which a gradient of x becomes one of z.
struct LogProbGradient {
  static constexpr Shape shape = Shape::rows;
  OwnIds labels;
  Tensor z, of_log_probs, of_entropy, greatest, exps, scores, dz;
  double temperature = 1, divisor = 1;
  bool wide = false;
  template <class F>
  void each_tensor(F f) {
    f(labels.ids), f(z), f(of_log_probs), f(of_entropy), f(greatest), f(exps), f(scores), f(dz);
  }
  SHARDPROOF_HD int64_t rows() const { return greatest.elements; }
  template <class A, class Team>
  SHARDPROOF_HD void row(int64_t t, const Team& team) const {
    const int64_t columns = labels.own, label = labels.local(t);
    const A m = greatest.load<A>(t), sum = exps.load<A>(t), mean = scores.load<A>(t) / sum;
    const A a = labels.ignored(t) ? A(0) : of_log_probs.load<A>(t), b = of_entropy.load<A>(t);
    for (int64_t j = team.first(); j < columns; j += team.step()) {
      const A score = (z.load<A>(t * columns + j) - m) / A(temperature), p = std::exp(score) / sum;
      const A of_p = a * ((j == label ? A(1) : A(0)) - p),
              of_h = p > 0 ? A(b * (p * (score - mean))) : A(0);
      dz.store(t * columns + j, (of_p - of_h) / A(divisor));
    }
  }
};

}  // namespace shardproof::primitives
