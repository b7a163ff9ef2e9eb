// The one place where an allowed error is computed. oracle/checks/README.md derives every formula.
//
//   tier E   exact data: every intermediate is a number of the format, the allowed error is 0
//   tier D   deterministic: holds for every order of summation, never a false alarm where the
//            arithmetic model fl(a op b) = (a op b)(1 + d), |d| <= u, holds
//   tier A   Azuma: holds but for a share of the false-alarm budget where moreover the d are
//            independent of mean 0 (rounding to nearest) and the terms come in random order
//   tier W   rms of a whole tensor's errors in the scale of tier A: at most 1 where it is large
//
// Each tier is a function of (precision, gauge, element). Where A is valid an element is allowed
// the smaller of D and A.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "oracle/check.hpp"
#include "oracle/drawn.hpp"

namespace shardproof {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr double u_reference = 0x1p-53;  // the reference computes in double
// From here on a family's bound only says that it knows nothing.
constexpr double beyond_any_value = 1e60;

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

bool is_half(DType type) { return type == DType::bf16 || type == DType::f16; }

// Of a result that is stored in `storage`, where its line has no acc=.
DType default_accumulation(const Case& line, const Declared& declared, DType storage) {
  return type_of_sums(line, declared).value_or(is_half(storage) ? DType::f32 : storage);
}

Precision precision_in(const Case& line, const Declared& declared, DType storage) {
  const DType acc =
      keyed_dtype(line, "acc").value_or(default_accumulation(line, declared, storage));
  const DType wire = keyed_dtype(line, "wire").value_or(storage);
  // A tensor core may leave out the lower bits of a factor in place of rounding: a whole unit of
  // 2^-10.
  const double factor = declared.multiplies_in_tf32 && storage == DType::f32 ? 0x1p-10 : 0;
  return {unit_roundoff(acc), unit_roundoff(wire), unit_roundoff(storage), declared.truncates,
          factor};
}

// What an element of tier D needs, with everything that does not depend on the element worked out.
struct Deterministic {
  double growth = 0;  // of sum |terms|: accumulation, then the reduction on the wire
  double family = 0;  // of the family's own componentwise bound, which takes accumulation's place
  double reference = 0;  // of sum |terms|: the reference's own rounding
  double u_out = 0, tiny = 0;
  bool partial = false;  // results are stored as partial sums: each of them is rounded
};

// What roundings lose below the normal range on the way to one part of a result.
double underflow_of_part(const Precision& p, const Gauge& g) {
  const double ranks = double(g.reduced);
  return double(g.terms) * ranks * underflow_of(p.u_acc) + underflow_of(p.u_out) +
         (g.reduced > 1 ? ranks * underflow_of(p.u_wire) : 0);
}

Deterministic deterministic(const Precision& p, const Gauge& g, int64_t parts) {
  const double u_acc = p.truncates ? 2 * p.u_acc : p.u_acc;
  const double terms = double(g.terms), ranks = double(g.reduced);
  const double on_wire = g.reduced > 1 ? gamma(ranks, p.u_wire) : 0;
  const double factors = gamma(2, p.u_factor);
  Deterministic d;
  d.growth = after(factors, g.bound.empty() ? after(gamma(terms, u_acc), on_wire) : on_wire);
  d.family = after(u_acc, factors);
  d.reference = g.bound.empty() ? gamma(terms * ranks, u_reference) : 0;
  d.u_out = p.u_out;
  d.tiny = double(parts) * underflow_of_part(p, g);
  d.partial = parts > 1;
  return d;
}

double element(const Deterministic& d, double want, double magnitude, double family_bound) {
  if (!std::isfinite(want)) return 0;  // an infinity is due as it is
  const double computed = d.growth * magnitude + d.family * family_bound;
  if (!(computed < beyond_any_value)) return infinity;
  const double stored = d.partial ? std::max(magnitude, std::abs(want)) : std::abs(want);
  return computed + d.u_out * (stored + computed) + d.reference * magnitude + d.tiny;
}

// How many parts the judge adds to what a result denotes: 1 where it is whole.
int64_t parts_of(const Layout& layout, const Mesh& mesh) {
  int64_t parts = 1;
  for (const auto& [axis, placement] : layout)
    if (placement.kind == Placement::partial) parts *= mesh.size(axis);
  return parts;
}

// ---- Tier A

// Elements that a run may compare at most: what a counter holds. The factor grows with the root of
// its logarithm only, so that no closer count is worth having.
constexpr double most_elements = 0x1p63;
const double log_alarms = std::log(2 * most_elements / false_alarm_budget);

// E s_k^2 of the sum of k out of n terms in random order is  v x (v2 of all terms) + c x (sum)^2,
// where v2 = sum of squares - sum^2 / n.
struct Moments {
  double v = 0, c = 0;
  Moments& operator+=(const Moments& m) { return v += m.v, c += m.c, *this; }
};
Moments operator*(double by, Moments m) { return {by * m.v, by * m.c}; }

Moments of_sum(double k, double n) {
  return {n > 1 ? k * (n - k) / (n * (n - 1)) : 0, k * k / (n * n)};
}
// Sum of the above over k = 1 .. length.
Moments of_partial_sums(double length, double n) {
  const double sum = length * (length + 1) / 2, squares = sum * (2 * length + 1) / 3;
  return {n > 1 ? (n * sum - squares) / (n * (n - 1)) : 0, squares / (n * n)};
}
// The same over k = step, 2 step .. count step, without the first.
Moments of_hops(double step, double count, double n) {
  const double sum = count * (count + 1) / 2, squares = sum * (2 * count + 1) / 3;
  Moments m{n > 1 ? (n * step * sum - step * step * squares) / (n * (n - 1)) : 0,
            step * step * squares / (n * n)};
  return m += -1 * of_sum(step, n);
}

struct Statistical {
  double n = 1;        // terms in all
  Moments rounded;     // of the variance proxy of an error
  double squares = 0;  // times the sum of squared terms: roundings of the products
  double u_out = 0, tiny = 0;
  bool partial = false;
};

// n = K p q terms: K on a rank, p ranks on the wire, q parts that the judge adds.
Statistical statistical(const Precision& p, const Gauge& g, int64_t parts) {
  const double K = double(g.terms), ranks = double(g.reduced), q = double(parts), n = K * ranks * q;
  const double acc = p.u_acc * p.u_acc, wire = p.u_wire * p.u_wire, out = p.u_out * p.u_out,
               reference = u_reference * u_reference;
  const double widened = (1 + gamma(K, p.u_acc)) * (g.reduced > 1 ? 1 + gamma(ranks, p.u_wire) : 1);
  Statistical s;
  s.n = n;
  s.rounded = (acc * ranks * q) * of_partial_sums(K, n);
  s.rounded += reference * of_partial_sums(n, n);
  s.squares = acc + reference;
  if (g.reduced > 1) {
    s.rounded += (wire * q * ranks) * of_sum(K, n);
    s.rounded += (wire * q) * of_hops(K, ranks, n);
  }
  if (parts > 1) s.rounded += (out * q) * of_sum(K * ranks, n);
  s.rounded = widened * widened * s.rounded;
  s.squares *= widened * widened;
  s.u_out = p.u_out;
  s.partial = parts > 1;
  return s;
}

// Root of the variance proxy of what is computed, before it is stored.
double scale_computed(const Statistical& s, double want, double squares) {
  const double v2 = std::max(0.0, squares - want * want / s.n);
  return std::sqrt(s.rounded.v * v2 + s.rounded.c * want * want + s.squares * squares);
}

double scale_stored(const Statistical& s, double want, double squares) {
  return s.partial ? scale_computed(s, want, squares)
                   : std::hypot(scale_computed(s, want, squares), s.u_out * want);
}

double element(const Statistical& s, double want, double squares) {
  const double computed = std::sqrt(2 * log_alarms) * scale_computed(s, want, squares);
  return computed + (s.partial ? 0 : s.u_out * (std::abs(want) + computed)) + s.tiny;
}

// Rounding to nearest of sums in random order: what tier A takes for granted. Terms that repeat one
// value round alike.
bool sums_in_random_order(const Evidence& e, const Feed& feed, const Precision& p, const Gauge& g) {
  const bool random = feed.fill == Fill::normal || feed.fill == Fill::large;
  return random && !(e.line && expands(*e.line)) && g.independent && !p.truncates &&
         p.u_factor == 0 && g.bound.empty() && !g.squares.empty() &&
         std::isfinite(gamma(double(g.terms), p.u_acc)) && !exact_data(e, feed);
}

// False where ranks call each other and no call is due in the type: nothing is rounded to it. What
// is known of no call counts as one.
bool travels(const Evidence& e, DType type) {
  if (!check_named("ledger").due(*e.contract, *e.line, e.declared)) return true;
  const auto in_a_call = [&] {
    for (int rank = 0; rank < e.mesh.world(); ++rank)
      for (const Traffic& t : traffic_due(*e.contract, e.declared, *e.line, rank))
        if (t.dtype == type) return true;
    return false;
  };
  if (e.declared.traffic) return in_a_call();
  return e.kept->get<bool>(fmt::format("travels:{}:{}", name(type), e.declared.plan), in_a_call);
}

}  // namespace

Fill fill_of(const Case& line) {
  const std::string& word = line.text("fill");
  if (const auto fill = fill_from(word)) return *fill;
  throw BadInput("fill: expected integers, normal, large, cancelling or offset, met '" + word +
                 "'");
}

std::vector<DType> types_passed(const Case& line) {
  std::vector<DType> types{line.dtype()};
  for (const char* key : {"acc", "wire", "grad", "local_grad"})
    if (const auto type = keyed_dtype(line, key)) types.push_back(*type);
  return types;
}

// What no key says is of the storage type, and so is the wire of a gradient. An operand of a type
// of its own (a loss) is sent in that.
std::vector<DType> types_of_result(const Evidence& e, const Operand& o, bool gradient) {
  const Case& line = *e.line;
  std::vector<DType> types{stored_type(line, o, gradient)};
  types.push_back(
      keyed_dtype(line, "acc").value_or(default_accumulation(line, e.declared, e.dtype_of(o))));
  if (const auto wire = keyed_dtype(line, "wire")) {
    if (travels(e, *wire)) types.push_back(*wire);
  } else if (gradient) {
    types.push_back(e.dtype_of(o));
  }
  if (const auto kept = keyed_dtype(line, "local_grad"); kept && (gradient || o.fixed_dtype))
    types.push_back(*kept);
  return types;
}

bool exact_data(const Evidence& e, const Feed& feed) {
  if (feed.fill != Fill::integers) return false;
  // Elsewhere a contract says by its range that every intermediate is exact (mlp without an
  // activation).
  return e.contract->has_exact_data() ||
         (e.line && e.contract->integer_range && e.contract->integer_range(*e.line));
}

std::optional<int64_t> exact_range(const Contract& contract, const Case& line,
                                   const Declared& declared) {
  auto range = contract.integer_range ? contract.integer_range(line) : std::nullopt;
  constexpr int64_t of_tf32 = int64_t(1) << 11;  // as 11 bits of significand hold
  if (range && declared.multiplies_in_tf32 && line.dtype() == DType::f32)
    range = std::min(*range, of_tf32);
  return range;
}

std::optional<DType> type_of_sums(const Case& line, const Declared& declared) {
  if (declared.accumulates_in_f64) return DType::f64;
  if (declared.accumulates_in_storage && is_half(line.dtype())) return line.dtype();
  return std::nullopt;
}

std::optional<DType> type_left_open(const Case& line, const Declared& declared) {
  return line.has("acc") && line.text("acc").empty() ? type_of_sums(line, declared) : std::nullopt;
}

std::vector<Traffic> traffic_due(const Contract& c, const Declared& subject, const Case& line,
                                 int rank) {
  Case judged = line;
  if (const auto sums = type_left_open(line, subject)) judged.set("acc", name(*sums));
  std::vector<Traffic> due =
      subject.traffic ? subject.traffic(line, rank) : c.traffic(judged, subject.plan, rank);
  const Mesh mesh = line.mesh();
  for (Traffic& t : due) t.label = mesh.label(t.label);
  return due;
}

Precision precision_of(const Case& line, const Declared& declared) {
  return precision_in(line, declared, line.dtype());
}

Precision precision_of_result(const Evidence& e, const Operand& o, bool gradient) {
  Precision p = precision_in(*e.line, e.declared, e.dtype_of(o));
  p.u_out = unit_roundoff(stored_type(*e.line, o, gradient));
  return p;
}

std::function<double(int64_t)> bound_of(const Evidence& e, const Feed& feed, const Operand& o,
                                        bool gradient, const Whole& want, const Gauge& gauge) {
  const bool moved = gauge.magnitude.empty() && gauge.bound.empty();
  if (exact_data(e, feed) || moved) return NoError{};
  const int64_t parts = parts_of(gradient ? dual(o.layout) : o.layout, e.mesh);
  const Precision p = precision_of_result(e, o, gradient);
  const Deterministic d = deterministic(p, gauge, parts);
  const double* value = want.value.data();
  const double* magnitude = gauge.magnitude.empty() ? nullptr : gauge.magnitude.data();
  const double* family = gauge.bound.empty() ? nullptr : gauge.bound.data();
  const double* step = gauge.step.empty() ? nullptr : gauge.step.data();
  const auto in_any_order = [=](int64_t i) {
    return element(d, value[i], magnitude ? magnitude[i] : std::abs(value[i]),
                   family ? family[i] : 0) +
           (step ? (1 + d.u_out) * step[i] : 0);
  };
  if (!sums_in_random_order(e, feed, p, gauge)) return in_any_order;
  Statistical s = statistical(p, gauge, parts);
  s.tiny = d.tiny;
  const double* squares = gauge.squares.data();
  return [=](int64_t i) { return std::min(in_any_order(i), element(s, value[i], squares[i])); };
}

std::function<double(int64_t)> scale_of(const Evidence& e, const Feed& feed, const Operand& o,
                                        bool gradient, const Whole& want, const Gauge& gauge) {
  const Precision p = precision_of_result(e, o, gradient);
  if (!sums_in_random_order(e, feed, p, gauge)) return nullptr;
  const Statistical s =
      statistical(p, gauge, parts_of(gradient ? dual(o.layout) : o.layout, e.mesh));
  const double *value = want.value.data(), *squares = gauge.squares.data();
  return [=](int64_t i) { return scale_stored(s, value[i], squares[i]); };
}

// sum z^2 of n errors in their scales is dominated by chi^2 with n degrees of freedom, whose tail
// beyond n + 2 sqrt(n L) + 2 L has at most probability exp(-L) (Laurent and Massart).
double rms_limit(int64_t elements) {
  const double n = double(elements);
  return std::sqrt(1 + 2 * std::sqrt(log_alarms / n) + 2 * log_alarms / n);
}

// Each microbatch is within its own bound; n - 1 additions to what is there, and each running sum
// rounds: n roundings of what is at most the sum of all |want| + bound. Where ranks add up their
// own parts before these are reduced (Gauge::deferred), n roundings of these to the wire's type
// more: of sums of at most all |terms| + bound.
std::function<double(int64_t)> bound_of_sum(const Evidence& e, const Operand& o,
                                            std::vector<Addend> addends) {
  const Precision p = precision_of_result(e, o, /*gradient=*/true);
  const bool exact =
      std::all_of(addends.begin(), addends.end(), [&](auto& a) { return exact_data(e, a.feed); });
  if (exact) return NoError{};
  std::vector<std::function<double(int64_t)>> bounds;
  for (const Addend& a : addends)
    bounds.push_back(bound_of(e, a.feed, o, /*gradient=*/true, *a.want, *a.gauge));
  const double n = double(addends.size()), added = gamma(n, p.u_acc + p.u_out + u_reference),
               in_parts = gamma(n, p.u_wire);
  return [=](int64_t i) {
    double allowed = 0, magnitude = 0, parts = 0;
    for (size_t a = 0; a < addends.size(); ++a) {
      const double b = bounds[a](i);
      allowed += b;
      magnitude += std::abs(addends[a].want->value[size_t(i)]) + b;
      if (addends[a].gauge->deferred) parts += addends[a].gauge->magnitude[size_t(i)] + b;
    }
    return allowed + added * magnitude + in_parts * parts;
  };
}

std::function<double(int64_t)> bound_of(const Evidence& e, const Operand& o, bool gradient,
                                        const Whole& want, const Gauge& gauge) {
  return bound_of(e, e.shots.at(0).feeds.at(0), o, gradient, want, gauge);
}

}  // namespace shardproof
