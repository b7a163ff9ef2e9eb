// Body of the rotary embedding: the pair (x_i, x_{i+d/2}) of a head turned by the angle
// position * base^(-2i/d), or back.
#pragma once
#include <cmath>

#include "primitives/element.hpp"

namespace shardproof::primitives {

struct RotaryPairs {
  static constexpr Shape shape = Shape::elements;
  Tensor x, positions, y;  // [tokens, heads, dim], [tokens], like x
  int64_t heads = 1, dim = 2;
  double base = 10000;
  int sense = 1;
  bool wide = false;
  template <class F>
  void each_tensor(F f) {
    f(x), f(positions), f(y);
  }
  SHARDPROOF_HD int64_t count() const { return positions.elements * heads * (dim / 2); }
  template <class A>
  SHARDPROOF_HD void in(int64_t pair) const {
    const int64_t half = dim / 2, i = pair % half, head = pair / half, t = head / heads;
    const A frequency = A(std::pow(base, -2.0 * double(i) / double(dim)));
    const A angle = A(positions.integer(t)) * frequency;
    const A c = std::cos(angle), s = A(sense) * std::sin(angle);
    const A a = x.load<A>(head * dim + i), b = x.load<A>(head * dim + i + half);
    y.store(head * dim + i, A(a * c - b * s));
    y.store(head * dim + i + half, A(b * c + a * s));
  }
  SHARDPROOF_HD void at(int64_t pair) const { wide ? in<double>(pair) : in<float>(pair); }
};

}  // namespace shardproof::primitives
