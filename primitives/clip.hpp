// Bodies of clipping by the norm of all gradients, in double.
#pragma once
#include <cmath>

#include "primitives/element.hpp"

namespace shardproof::primitives {

// sum = sum a^2 + sum b^2, one number.
struct SumOfSquares {
  static constexpr Shape shape = Shape::rows;
  static constexpr bool wide = true;
  Tensor a, b, sum;
  template <class F>
  void each_tensor(F f) {
    f(a), f(b), f(sum);
  }
  SHARDPROOF_HD int64_t rows() const { return 1; }
  template <class A, class Team>
  SHARDPROOF_HD void row(int64_t, const Team& team) const {
    A own = 0;
    for (int64_t i = team.first(); i < a.elements; i += team.step())
      own += a.load<A>(i) * a.load<A>(i);
    for (int64_t i = team.first(); i < b.elements; i += team.step())
      own += b.load<A>(i) * b.load<A>(i);
    const A all = team.sum(own);
    if (team.leads()) sum.store(0, all);
  }
};

struct SquareRoot {
  static constexpr Shape shape = Shape::elements;
  Tensor square, root;
  template <class F>
  void each_tensor(F f) {
    f(square), f(root);
  }
  SHARDPROOF_HD int64_t count() const { return root.elements; }
  SHARDPROOF_HD void at(int64_t i) const { root.store(i, std::sqrt(square.load(i))); }
};

// y = x min(1, max_norm / (norm + 1e-6)).
struct Clipped {
  static constexpr Shape shape = Shape::elements;
  Tensor x, square, y;
  double max_norm = 1;
  template <class F>
  void each_tensor(F f) {
    f(x), f(square), f(y);
  }
  SHARDPROOF_HD int64_t count() const { return y.elements; }
  SHARDPROOF_HD void at(int64_t i) const {
    const double factor = max_norm / (std::sqrt(square.load(0)) + 1e-6);
    y.store(i, x.load(i) * (factor < 1 ? factor : 1));
  }
};

}  // namespace shardproof::primitives
