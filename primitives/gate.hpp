// Bodies between the two linears of a feed-forward block: activations, gated ones too, and the norm
// over the FFN dim whose statistics the ranks share.
//
//   value(t,j) = act(z[t,j]), gated: act(z[t,j]) z[t,f+j] of [gate | up], f own columns
//   n = value, or gamma value / rms with rms^2 = mean value^2 + eps over the FFN dim of all ranks
//   with s = gamma dn, xhat = value / rms: dvalue = (s - xhat mean(s xhat)) / rms
#pragma once
#include "primitives/activation.hpp"
#include "primitives/element.hpp"

namespace shardproof::primitives {

struct Gate {
  Tensor z;
  Activation act = Activation::identity;
  bool gated = false;
  int64_t columns = 1;  // of the result

  SHARDPROOF_HD int64_t gate(int64_t t, int64_t j) const {
    return gated ? 2 * t * columns + j : t * columns + j;
  }
  SHARDPROOF_HD int64_t up(int64_t t, int64_t j) const { return gate(t, j) + columns; }
  template <class A>
  SHARDPROOF_HD A value(int64_t t, int64_t j) const {
    const A a = activate(act, z.load<A>(gate(t, j)));
    return gated ? A(a * z.load<A>(up(t, j))) : a;
  }
  template <class A>
  SHARDPROOF_HD void pull_back(int64_t t, int64_t j, A d, const Tensor& dz) const {
    const A g = z.load<A>(gate(t, j));
    if (!gated) return dz.store(gate(t, j), A(d * slope(act, g)));
    dz.store(gate(t, j), A(d * z.load<A>(up(t, j)) * slope(act, g)));
    dz.store(up(t, j), A(d * activate(act, g)));
  }
};

// n = value, scaled by the row's 1/rms and gamma where there are any.
struct Activated {
  static constexpr Shape shape = Shape::elements;
  Gate gate;
  Tensor inverse_rms, gamma, n;
  bool wide = false;
  template <class F>
  void each_tensor(F f) {
    f(gate.z), f(inverse_rms), f(gamma), f(n);
  }
  SHARDPROOF_HD int64_t count() const { return n.elements; }
  template <class A>
  SHARDPROOF_HD void in(int64_t i) const {
    const int64_t t = i / gate.columns, j = i % gate.columns;
    A a = gate.value<A>(t, j);
    if (gamma.there()) a *= inverse_rms.load<A>(t) * gamma.load<A>(j);
    n.store(i, a);
  }
  SHARDPROOF_HD void at(int64_t i) const { wide ? in<double>(i) : in<float>(i); }
};

// squares[t] = sum over the own columns of value^2.
struct ActivatedSquares {
  static constexpr Shape shape = Shape::rows;
  Gate gate;
  Tensor squares;
  bool wide = false;
  template <class F>
  void each_tensor(F f) {
    f(gate.z), f(squares);
  }
  SHARDPROOF_HD int64_t rows() const { return squares.elements; }
  template <class A, class Team>
  SHARDPROOF_HD void row(int64_t t, const Team& team) const {
    A own = 0;
    for (int64_t j = team.first(); j < gate.columns; j += team.step()) {
      const A a = gate.value<A>(t, j);
      own += a * a;
    }
    const A sum = team.sum(own);
    if (team.leads()) squares.store(t, sum);
  }
};

struct InverseRoot {
  static constexpr Shape shape = Shape::elements;
  Tensor means, inverse;
  double eps = 0;
  bool wide = false;
  template <class F>
  void each_tensor(F f) {
    f(means), f(inverse);
  }
  SHARDPROOF_HD int64_t count() const { return inverse.elements; }
  template <class A>
  SHARDPROOF_HD void in(int64_t i) const {
    inverse.store(i, A(1) / std::sqrt(means.load<A>(i) + A(eps)));
  }
  SHARDPROOF_HD void at(int64_t i) const { wide ? in<double>(i) : in<float>(i); }
};

// along[t] = sum over the own columns of gamma dn xhat.
struct AlongValue {
  static constexpr Shape shape = Shape::rows;
  Gate gate;
  Tensor dn, gamma, inverse_rms, along;
  bool wide = false;
  template <class F>
  void each_tensor(F f) {
    f(gate.z), f(dn), f(gamma), f(inverse_rms), f(along);
  }
  SHARDPROOF_HD int64_t rows() const { return along.elements; }
  template <class A, class Team>
  SHARDPROOF_HD void row(int64_t t, const Team& team) const {
    const A inverse = inverse_rms.load<A>(t);
    A own = 0;
    for (int64_t j = team.first(); j < gate.columns; j += team.step()) {
      const A xhat = gate.value<A>(t, j) * inverse;
      own += dn.load<A>(t * gate.columns + j) * gamma.load<A>(j) * xhat;
    }
    const A sum = team.sum(own);
    if (team.leads()) along.store(t, sum);
  }
};

// dgamma[j] = sum over tokens of dn xhat.
struct GammaOfGate {
  static constexpr Shape shape = Shape::columns;
  Gate gate;
  Tensor dn, inverse_rms, dgamma;
  bool wide = false;
  template <class F>
  void each_tensor(F f) {
    f(gate.z), f(dn), f(inverse_rms), f(dgamma);
  }
  SHARDPROOF_HD int64_t columns() const { return gate.columns; }
  SHARDPROOF_HD int64_t rows() const { return inverse_rms.elements; }
  template <class A>
  SHARDPROOF_HD A term(int64_t t, int64_t j) const {
    return dn.load<A>(t * gate.columns + j) * (gate.value<A>(t, j) * inverse_rms.load<A>(t));
  }
  template <class A>
  SHARDPROOF_HD void put(int64_t j, A sum) const {
    dgamma.store(j, sum);
  }
};

// dz from dn; with gamma through the norm, `means` being the mean of s xhat over all ranks'
// columns.
struct ActivatedBackward {
  static constexpr Shape shape = Shape::elements;
  Gate gate;
  Tensor dn, gamma, inverse_rms, means, dz;
  bool wide = false;
  template <class F>
  void each_tensor(F f) {
    f(gate.z), f(dn), f(gamma), f(inverse_rms), f(means), f(dz);
  }
  SHARDPROOF_HD int64_t count() const { return dn.elements; }
  template <class A>
  SHARDPROOF_HD void in(int64_t i) const {
    const int64_t t = i / gate.columns, j = i % gate.columns;
    A d = dn.load<A>(i);
    if (gamma.there()) {
      const A inverse = inverse_rms.load<A>(t), xhat = gate.value<A>(t, j) * inverse;
      d = (d * gamma.load<A>(j) - xhat * means.load<A>(t)) * inverse;
    }
    gate.pull_back(t, j, d, dz);
  }
  SHARDPROOF_HD void at(int64_t i) const { wide ? in<double>(i) : in<float>(i); }
};

}  // namespace shardproof::primitives
