// Bodies of an optimizer's step on elements of a shard: of masters, moments and gradients, of a
// direction that is scaled by its norm, and of the question whether a step may be taken at all.
#pragma once
#include <cmath>

#include "primitives/element.hpp"

namespace shardproof::primitives {

// What a step is made with. A parameter that does not decay has decay 0.
struct StepNumbers {
  double lr = 0, decay = 0;
  double momentum = 0;                      // of MomentumStep
  double beta1 = 0, beta2 = 0, eps = 0;     // of AdamStep
  double correction1 = 1, correction2 = 1;  // 1 - beta^t
};

// m' = beta1 m + (1 - beta1) g, v' = beta2 v + (1 - beta2) g^2,
// x' = x - lr decay x - lr (m' / correction1) / (sqrt(v' / correction2) + eps).
struct AdamStep {
  static constexpr Shape shape = Shape::elements;
  Tensor x, m, v, g, next_x, next_m, next_v;
  StepNumbers by;
  bool wide = false;
  template <class F>
  void each_tensor(F f) {
    f(x), f(m), f(v), f(g), f(next_x), f(next_m), f(next_v);
  }
  SHARDPROOF_HD int64_t count() const { return next_x.elements; }
  template <class A>
  SHARDPROOF_HD void in(int64_t i) const {
    const A g_i = g.load<A>(i), x_i = x.load<A>(i);
    const A m_i = A(by.beta1) * m.load<A>(i) + A(1 - by.beta1) * g_i;
    const A v_i = A(by.beta2) * v.load<A>(i) + A(1 - by.beta2) * g_i * g_i;
    const A root = A(std::sqrt(v_i / A(by.correction2)));
    next_m.store(i, m_i);
    next_v.store(i, v_i);
    next_x.store(i, A(x_i - A(by.lr * by.decay) * x_i -
                      A(by.lr / by.correction1) * (m_i / (root + A(by.eps)))));
  }
  SHARDPROOF_HD void at(int64_t i) const { wide ? in<double>(i) : in<float>(i); }
};

// m' = momentum m + g + decay x, x' = x - lr m'.
struct MomentumStep {
  static constexpr Shape shape = Shape::elements;
  Tensor x, m, g, next_x, next_m;
  StepNumbers by;
  bool wide = false;
  template <class F>
  void each_tensor(F f) {
    f(x), f(m), f(g), f(next_x), f(next_m);
  }
  SHARDPROOF_HD int64_t count() const { return next_x.elements; }
  template <class A>
  SHARDPROOF_HD void in(int64_t i) const {
    const A x_i = x.load<A>(i);
    const A m_i = A(by.momentum) * m.load<A>(i) + (g.load<A>(i) + A(by.decay) * x_i);
    next_m.store(i, m_i);
    next_x.store(i, A(x_i - A(by.lr) * m_i));
  }
  SHARDPROOF_HD void at(int64_t i) const { wide ? in<double>(i) : in<float>(i); }
};

// y = x / max(sqrt(square), eps), in double, rounded once.
struct Normalised {
  static constexpr Shape shape = Shape::elements;
  Tensor x, square, y;
  double eps = 0;
  template <class F>
  void each_tensor(F f) {
    f(x), f(square), f(y);
  }
  SHARDPROOF_HD int64_t count() const { return y.elements; }
  SHARDPROOF_HD void at(int64_t i) const {
    const double norm = std::sqrt(square.load(0));
    y.store(i, x.load(i) / (norm > eps ? norm : eps));
  }
};

// found = 1 where an element of x is infinite or no number, else 0.
struct NotFinite {
  static constexpr Shape shape = Shape::rows;
  static constexpr bool wide = true;
  Tensor x, found;
  template <class F>
  void each_tensor(F f) {
    f(x), f(found);
  }
  SHARDPROOF_HD int64_t rows() const { return 1; }
  template <class A, class Team>
  SHARDPROOF_HD void row(int64_t, const Team& team) const {
    A own = 0;
    for (int64_t i = team.first(); i < x.elements; i += team.step()) {
      const A x_i = x.load<A>(i);
      if (!(x_i - x_i == 0)) own = 1;
    }
    own = team.greatest(own);
    if (team.leads()) found.store(0, own);
  }
};

}  // namespace shardproof::primitives
