// The one place where an allowed error is computed. oracle/checks/README.md derives every formula.
//
//   tier E   exact data: every intermediate is a number of the format, the allowed error is 0
//   tier D   deterministic: holds for every order of summation, never a false alarm where the
//            arithmetic model fl(a op b) = (a op b)(1 + d), |d| <= u, holds
//
// A tier is a function from (precision, gauge, element) to an error; bound_of chooses among them.
#include <algorithm>
#include <cmath>
#include <limits>

#include "oracle/check.hpp"

namespace shardproof {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr double u_reference = 0x1p-53;  // the reference computes in double

// gamma_n(u) = n u / (1 - n u) bounds |prod_{i<=n} (1 + d_i) - 1|; no statement from n u = 1 on.
double gamma(double n, double u) { return n * u < 1 ? n * u / (1 - n * u) : infinity; }

// Relative errors a, then b on top of it: (1 + a)(1 + b) - 1, infinite where one of them is.
double after(double a, double b) { return a + b + (std::isfinite(a + b) ? a * b : 0); }

// Half the spacing of the subnormals: what a rounding may lose below the normal range.
double underflow_of(double u) {
  for (DType d : {DType::f64, DType::f32, DType::f16, DType::bf16})
    if (unit_roundoff(d) == u) return smallest_subnormal(d) / 2;
  return 0;
}

std::optional<DType> keyed_dtype(const Case& line, std::string_view key) {
  return line.has(key) ? dtype_from(line.text(key)) : std::nullopt;
}

DType default_accumulation(DType storage, const Declared& declared) {
  const bool half = storage == DType::bf16 || storage == DType::f16;
  return half && !declared.accumulates_in_storage ? DType::f32 : storage;
}

Precision precision_in(const Case& line, const Declared& declared, DType storage) {
  const DType acc = keyed_dtype(line, "acc").value_or(default_accumulation(storage, declared));
  const DType wire = keyed_dtype(line, "wire").value_or(storage);
  return {unit_roundoff(acc), unit_roundoff(wire), unit_roundoff(storage), declared.truncates};
}

Precision precision_of_result(const Evidence& e, const Operand& o, bool gradient) {
  Precision p = precision_in(*e.line, e.declared, e.dtype_of(o));
  if (gradient)
    if (const auto grad = keyed_dtype(*e.line, "grad")) p.u_out = unit_roundoff(*grad);
  return p;
}

// What an element of tier D needs, with everything that does not depend on the element worked out.
struct Deterministic {
  double growth = 0;  // of sum |terms|: accumulation, then the reduction on the wire
  double family = 0;  // of the family's own componentwise bound, which takes accumulation's place
  double reference = 0;  // of sum |terms|: the reference's own rounding
  double u_out = 0, tiny = 0;
  bool partial = false;  // results are stored as partial sums: each of them is rounded
};

Deterministic deterministic(const Precision& p, const Gauge& g, bool partial) {
  const double u_acc = p.truncates ? 2 * p.u_acc : p.u_acc;
  const double terms = double(g.terms), ranks = double(g.reduced);
  const double on_wire = g.reduced > 1 ? gamma(ranks, p.u_wire) : 0;
  Deterministic d;
  d.growth = g.bound.empty() ? after(gamma(terms, u_acc), on_wire) : on_wire;
  d.family = u_acc + u_reference;
  d.reference = g.bound.empty() ? gamma(terms * ranks, u_reference) : 0;
  d.u_out = p.u_out;
  d.tiny = terms * ranks * underflow_of(p.u_acc) + underflow_of(p.u_out) +
           (g.reduced > 1 ? ranks * underflow_of(p.u_wire) : 0);
  d.partial = partial;
  return d;
}

double element(const Deterministic& d, double want, double magnitude, double family_bound) {
  if (!std::isfinite(want)) return 0;  // an infinity is due as it is
  const double computed = d.growth * magnitude + d.family * family_bound;
  if (!std::isfinite(computed)) return infinity;
  const double stored = d.partial ? std::max(magnitude, std::abs(want)) : std::abs(want);
  return computed + d.u_out * (stored + computed) + d.reference * magnitude + d.tiny;
}

bool is_partial(const Layout& layout, const Mesh& mesh) {
  for (const auto& [axis, placement] : layout)
    if (placement.kind == Placement::partial && mesh.size(axis) > 1) return true;
  return false;
}

}  // namespace

Fill fill_of(const Case& line) {
  const std::string& word = line.text("fill");
  if (const auto fill = fill_from(word)) return *fill;
  throw BadInput("fill: expected integers, normal, large or cancelling, met '" + word + "'");
}

bool exact_data(const Evidence& e, const Feed& feed) {
  return e.contract->linear && feed.fill == Fill::integers;
}

Precision precision_of(const Case& line, const Declared& declared) {
  return precision_in(line, declared, line.dtype());
}

std::function<double(int64_t)> bound_of(const Evidence& e, const Feed& feed, const Operand& o,
                                        bool gradient, const Whole& want, const Gauge& gauge) {
  const bool moved = gauge.magnitude.empty() && gauge.bound.empty();
  if (exact_data(e, feed) || moved) return [](int64_t) { return 0.0; };
  const bool partial = is_partial(gradient ? dual(o.layout) : o.layout, e.mesh);
  const Deterministic d = deterministic(precision_of_result(e, o, gradient), gauge, partial);
  const double* value = want.value.data();
  const double* magnitude = gauge.magnitude.empty() ? nullptr : gauge.magnitude.data();
  const double* family = gauge.bound.empty() ? nullptr : gauge.bound.data();
  return [=](int64_t i) {
    return element(d, value[i], magnitude ? magnitude[i] : std::abs(value[i]),
                   family ? family[i] : 0);
  };
}

std::function<double(int64_t)> bound_of(const Evidence& e, const Operand& o, bool gradient,
                                        const Whole& want, const Gauge& gauge) {
  return bound_of(e, e.shots.at(0).feeds.at(0), o, gradient, want, gauge);
}

}  // namespace shardproof
