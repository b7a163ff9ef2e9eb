// Running error analysis: every tensor travels as (value, error), the value that exact arithmetic
// gives and a bound on how far an implementation may be from it, element by element.
//
//   sum of K products   gamma_K(u) sum |a||b|, whatever the order        gamma_K = K u / (1 - K u)
//   product             (|a| + ea)(|b| + eb) - |a||b|, then (1 + u)
//   function            |f'| e + max|f''| e^2 / 2 + its own evaluation
//   store               u (|v| + e) + tiny
//   sum over p ranks    p u sum of the magnitudes: p - 1 additions and the rounding of each part
//
// Operations accumulate with Rounding::accumulate and store nothing: store() adds the rounding of
// a tensor that is kept or handed on. Parameters are exact. A bound never raises a false alarm
// while the model fl(a op b) = (a op b)(1 + d), |d| <= u holds.
#pragma once
#include "reference/activation.hpp"
#include "reference/mlp.hpp"

namespace shardproof::reference {

double gamma_of(double terms, double u);
// Error of a product of computed factors, with `operations` roundings; most bounds the computed
// one.
double product_error(double exact, double most, double operations, double u);
// Of a function and of its slope at x, which is off by e at most.
double value_error(Activation, double x, double e, double u);
double slope_error(Activation, double x, double e, double u);

struct Uncertain {
  Values value, error;
  size_t size() const { return value.size(); }
  double most(size_t i) const;  // bound of |computed|
};
Uncertain certain(In);
Values most(const Uncertain&);
// ex + gamma (|x| + ex): the error of a factor with the accumulation of its sum folded in.
Values factor_error(const Uncertain& x, double gamma);
Values times(In x, double c);  // c |x|
void store(Uncertain&, const Rounding&);
// The result is the sum of r.ranks parts on the wire, and sum |parts| <= magnitude.
Loss reduced(Loss, const Rounding&);

// X W^T + b.
Loss linear_loss(const LinearShape&, const Uncertain& x, In w, In b, const Rounding&);
Loss linear_loss(const LinearShape&, const Uncertain& x, const Uncertain& w, In b, const Rounding&);
struct LinearLosses {
  Loss x, w, b;
};
LinearLosses linear_backward_loss(const LinearShape&, const Uncertain& x, In w, const Uncertain& g,
                                  const Rounding&);

Uncertain activate(Activation, const Uncertain& x, const Rounding&);
Uncertain activate_backward(Activation, const Uncertain& x, const Uncertain& g, const Rounding&);

// a o factor, factor exact; x + y.
Uncertain scaled(const Uncertain& a, In factor, const Rounding&);
Uncertain sum(const Uncertain& x, const Uncertain& y, const Rounding&);

struct NormShape {
  int64_t width = 0;
  double eps = 0;
  bool centred = true;  // layer norm; else rms norm
  // The variance may be computed as mean x^2 - mean^2, too; else in two passes, one value at a time
  // or by merging parts (Welford; Chan, Golub and LeVeque), in any tree.
  bool uncentred_variance = true;
};
Uncertain norm(const NormShape&, const Uncertain& x, In gamma, In beta, const Rounding&);
struct NormLosses {
  Uncertain x;
  Loss gamma, beta;  // sums over all rows, before the ranks' parts travel
};
NormLosses norm_backward_loss(const NormShape&, const Uncertain& x, In gamma, const Uncertain& g,
                              const Rounding&);

}  // namespace shardproof::reference
