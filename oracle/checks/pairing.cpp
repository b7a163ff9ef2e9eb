// One formula covers all types: w times the sum over ranks of local dots, w = 1/p for each axis
// typed I. A value and its cotangent have equal local shapes, so rank r pairs its local result with
// its own shard of the dual's whole.
#include "oracle/checks/pairing.hpp"

#include <fmt/format.h>

#include <cmath>
#include <limits>
#include <numeric>
#include <optional>

#include "fixtures/sharding.hpp"
#include "oracle/checks/judging.hpp"
#include "oracle/checks/pieces.hpp"
#include "oracle/checks/wide.hpp"
#include "oracle/drawn.hpp"

namespace shardproof {
namespace {

using judging::result_layout;

// v in units of 2^-16, where it is a whole number of them.
bool in_units(double v, int64_t& units) {
  const double scaled = v * 0x1p16;
  if (!(std::abs(scaled) <= 0x1p50)) return false;
  units = static_cast<int64_t>(scaled);
  return static_cast<double>(units) == scaled;
}

constexpr __int128 most_units = static_cast<__int128>(1) << 126;

// Whether a rank is the first one, of those that hold a copy, on each axis with a placement of that
// kind.
template <class OfKind>
bool is_first(const Layout& layout, const Mesh& mesh, int rank, const OfKind& of_kind) {
  for (const auto& [axis, placement] : layout)
    if (of_kind(placement) &&
        place_of_copy(placement, mesh.size(axis), mesh.coordinate(rank, axis)) != 0)
      return false;
  return true;
}

bool holds_first_copy(const Layout& layout, const Mesh& mesh, int rank) {
  return is_first(layout, mesh, rank, equal_bits);
}

// The layout of what a rank is fed of an operand.
Layout fed_layout(const Evidence& e, int operand) {
  return judging::result_layout(e.operands[size_t(operand)], /*gradient=*/operand >= e.inputs);
}

// Whole values, from the files that the ranks were fed. Empty: there are none, or they are indices,
// which no file that is written to meanwhile may choose.
std::optional<Whole> from_files(const Evidence& e, int shot, int feed, int operand) {
  const Operand& o = e.operands[size_t(operand)];
  if (!e.fed || o.role == Operand::index || !e.fed(0, shot, feed, operand)) return std::nullopt;
  const Layout layout = fed_layout(e, operand);
  Whole w{whole_shape(o.shape, layout, e.mesh), {}};
  const auto elements = size_t(product(w.shape));
  w.value.reserve(elements);
  constexpr size_t few = 64;  // that are not worth a look at the file
  std::vector<double> local;
  for (int r = 0; r < e.mesh.world(); ++r) {
    if (!holds_first_copy(layout, e.mesh, r)) continue;
    const ResultTensor& t = *e.fed(r, shot, feed, operand);
    const Places places(Places::Of::whole, o.shape, layout, e.mesh, r);
    judging::each_piece(places.size(), [&](size_t first, size_t n) {
      local.clear();
      places.each_run(first, n, [&](size_t i, int64_t at, size_t count) {
        w.value.resize(std::max(w.value.size(), size_t(at) + count));
        double* to = w.value.data() + at;
        if (count > few) return judging::read(t, first + i, count, to);
        if (local.empty()) judging::read(t, first, n, local);
        std::copy_n(local.begin() + std::ptrdiff_t(i), count, to);
      });
    });
  }
  w.value.resize(elements);
  return w;
}

// Values that results are paired with: given as a whole, or those of an operand that the first feed
// of a shot has. Where files hold these they are read there, rank by rank.
class Dual {
 public:
  explicit Dual(const Whole& whole) : whole_(&whole) {}
  Dual(const Evidence& e, int shot, int operand) : e_(&e), shot_(shot), operand_(operand) {}
  Dual(const Dual&) = delete;
  Dual& operator=(const Dual&) = delete;

  const Whole& whole() const {
    if (whole_) return *whole_;
    if (!made_)
      made_ = drawn(*e_, e_->shots[size_t(shot_)].feeds[0], operand_, operand_ >= e_->inputs);
    return *made_;
  }
  // Of `n` elements of a rank from `first` on.
  void read(int rank, const Places& places, size_t first, size_t n,
            std::vector<double>& values) const {
    if (const ResultTensor* t = e_ && e_->fed ? e_->fed(rank, shot_, 0, operand_) : nullptr)
      return judging::read(*t, first, n, values);
    const double* from = whole().value.data();
    values.resize(n);
    places.each_run(first, n, [&](size_t i, int64_t at, size_t count) {
      std::copy_n(from + at, count, values.begin() + std::ptrdiff_t(i));
    });
  }

 private:
  const Whole* whole_ = nullptr;
  const Evidence* e_ = nullptr;
  int shot_ = 0, operand_ = 0;
  mutable std::optional<Whole> made_;
};

// A result of a step, paired.
struct PairedResult {
  int shot = 0, step = 0, sign = +1;
  Dot sum = {};          // sign * w * sum over ranks <result, dual> is added
  bool complete = true;  // no result was missing; nothing is added from there on
};

// Several results of one operand with the same dual, which is read once.
void add_products(const Evidence& e, int operand, bool gradient, const Dual& with,
                  std::vector<PairedResult>& results) {
  const Operand& o = e.operands[size_t(operand)];
  const Layout layout = result_layout(o, gradient);
  const int64_t weight = scaled_weight(e, layout);
  std::vector<const ResultTensor*> tensors(results.size());
  std::vector<double> dual_local;
  for (int r = 0; r < e.mesh.world(); ++r) {
    const Places places(Places::Of::whole, o.shape, dual(layout), e.mesh, r);
    for (size_t i = 0; i < results.size(); ++i) {
      PairedResult& p = results[i];
      const ResultTensor* t = tensors[i] = e.result(r, p.shot, p.step, operand, gradient);
      p.complete = p.complete && t && t->bytes.size() == places.size() * size_of(t->dtype);
    }
    if (std::none_of(results.begin(), results.end(), [](auto& p) { return p.complete; })) return;
    const auto add_piece = [&](size_t first, size_t n) {
      with.read(r, places, first, n, dual_local);
      for (size_t i = 0; i < results.size(); ++i) {
        if (!results[i].complete) continue;
        const ResultTensor& t = *tensors[i];
        results[i].sum.add(t.bytes.data() + first * size_of(t.dtype), t.dtype, dual_local,
                           results[i].sign * weight);
        judging::looked_at(t, first, n);
      }
    };
    judging::each_piece(places.size(), add_piece, wide::few_products);
  }
}

// Of a result that is within its bound everywhere.
long double slack_of(const Evidence& e, const Feed& feed, int operand, bool gradient,
                     const Whole& dual_values) {
  const Operand& o = e.operands[size_t(operand)];
  const Truth& truth = e.truth(feed);
  const size_t k = size_t(gradient ? operand : operand - e.inputs);
  const Whole& want = (gradient ? truth.gradients : truth.outputs).at(k);
  const Gauge& gauge = judging::gauge_of(gradient ? truth.gradient_gauges : truth.output_gauges, k);
  return slack(e, o, gradient, bound_of(e, feed, o, gradient, want, gauge), dual_values);
}

}  // namespace

bool leads(const Layout& layout, const Mesh& mesh, int rank) {
  return is_first(layout, mesh, rank,
                  [](const Placement& p) { return p.kind == Placement::partial; });
}

bool add_dots(const Evidence& e, int shot, int step, int operand, bool gradient,
              const Whole& dual_values, int sign, Dot& sum) {
  std::vector<PairedResult> one{{shot, step, sign, sum}};
  add_products(e, operand, gradient, Dual(dual_values), one);
  sum = one[0].sum;
  return one[0].complete;
}

long double slack(const Evidence& e, const Operand& o, bool gradient,
                  const std::function<double(int64_t)>& bound, const Whole& dual_values) {
  const Layout layout = result_layout(o, gradient);
  long double sum = 0;
  std::vector<int64_t> denoted, whole;
  for (int r = 0; r < e.mesh.world(); ++r) {
    if (!leads(layout, e.mesh, r)) continue;
    const Places from(Places::Of::denoted, o.shape, layout, e.mesh, r),
        to(Places::Of::whole, o.shape, dual(layout), e.mesh, r);
    judging::each_piece(from.size(), [&](size_t first, size_t n) {
      from.read(first, n, denoted);
      to.read(first, n, whole);
      for (size_t i = 0; i < n; ++i)
        sum += (long double)bound(denoted[i]) * std::abs(dual_values.value[size_t(whole[i])]);
    });
  }
  return sum * scaled_weight(e, layout);
}

void Dot::round() {
  if (!is_exact_) return;
  is_exact_ = false;
  rounded_ = static_cast<long double>(exact_) * 0x1p-32L;
  magnitude_ = static_cast<long double>(exact_magnitude_) * 0x1p-32L;
}

void Dot::add(double a, double b, int64_t times) {
  ++products_;
  int64_t x = 0, y = 0;
  if (!(in_units(a, x) && in_units(b, y) && exact_magnitude_ < most_units)) round();
  if (is_exact_) {
    const __int128 product = static_cast<__int128>(x) * y * times;
    exact_ += product;
    exact_magnitude_ += product < 0 ? -product : product;
    return;
  }
  const long double product = static_cast<long double>(a) * b * times;
  rounded_ += product;
  magnitude_ += std::abs(product);
}

template <class Products>
bool Dot::add_whole(size_t n, int64_t times, const Products& products) {
  double sum = 0, magnitude = 0;
  if (!(is_exact_ && exact_magnitude_ < most_units && products(sum, magnitude))) return false;
  products_ += int64_t(n);
  exact_ += (static_cast<__int128>(sum) * times) << 32;
  exact_magnitude_ += (static_cast<__int128>(magnitude) * std::abs(times)) << 32;
  return true;
}

void Dot::add(std::span<const double> a, std::span<const double> b, int64_t times) {
  for (size_t first = 0; first < a.size(); first += wide::few_products) {
    const size_t n = std::min(wide::few_products, a.size() - first);
    if (add_whole(n, times, [&](double& sum, double& magnitude) {
          return wide::whole_products(&a[first], &b[first], n, sum, magnitude);
        }))
      continue;
    for (size_t i = first; i < first + n; ++i) {
      // An infinity that nothing depends on (lse of an empty row) counts for nothing; a NaN counts.
      if (std::isinf(a[i]) && b[i] == 0) continue;
      add(a[i], b[i], times);
    }
  }
}

void Dot::add(const std::byte* elements, DType dtype, std::span<const double> b, int64_t times) {
  for (size_t first = 0; first < b.size(); first += wide::few_products) {
    const size_t n = std::min(wide::few_products, b.size() - first);
    const std::byte* from = elements + first * size_of(dtype);
    if (add_whole(n, times, [&](double& sum, double& magnitude) {
          return wide::whole_products(from, dtype, &b[first], n, sum, magnitude);
        }))
      continue;
    static thread_local std::vector<double> values;
    values.resize(n);
    wide::load(from, dtype, n, values.data());
    add(values, b.subspan(first, n), times);
  }
}

void Dot::add(const Dot& other) {
  products_ += other.products_;
  if (!(is_exact_ && other.is_exact_ && exact_magnitude_ < most_units &&
        other.exact_magnitude_ < most_units)) {
    Dot rounded = other;
    rounded.round();
    round();
    rounded_ += rounded.rounded_;
    magnitude_ += rounded.magnitude_;
    return;
  }
  exact_ += other.exact_;
  exact_magnitude_ += other.exact_magnitude_;
}

long double Dot::error() const {
  return is_exact_ ? 0 : static_cast<long double>(products_) * 0x1p-63L * magnitude_;
}

bool Dot::equals(const Dot& other) const {
  return is_exact_ && other.is_exact_ ? exact_ == other.exact_ : value() == other.value();
}

long double Pairing::error() const { return std::abs(lhs.value() - rhs.value()); }
long double Pairing::tolerance() const { return allowed + lhs.error() + rhs.error(); }

bool Pairing::equal() const {
  if (!complete) return false;
  if (lhs.equals(rhs)) return true;
  const long double tolerated = tolerance();  // 0: exact sums that differ, if by less than an ulp
  return tolerated > 0 && std::isfinite(tolerated) && error() <= tolerated;
}

double Pairing::ratio() const {
  const long double l = lhs.value(), r = rhs.value();
  if (l == 0) return r == 0 ? 1 : std::numeric_limits<double>::infinity();
  return double(r / l);
}

int64_t pairing_scale(const Evidence& e) {
  int64_t common = 1;
  for (const Operand& o : e.operands) {
    int64_t held = 1;
    for (const auto& [axis, placement] : o.layout)
      if (placement.kind == Placement::invariant && placement.map)
        held *= copies(placement, e.mesh.size(axis));
    common = std::lcm(common, held);
  }
  return e.mesh.world() * common;
}

int64_t scaled_weight(const Evidence& e, const Layout& layout) {
  return std::llround(double(pairing_scale(e)) * pairing_weight(layout, e.mesh));
}

std::vector<double> filled(const Evidence& e, const Feed& feed, int operand, bool cotangent) {
  constexpr int64_t most_kept = 1 << 14;
  const Operand& o = e.operands[size_t(operand)];
  const auto shape = whole_shape(o.shape, cotangent ? dual(o.layout) : o.layout, e.mesh);
  const auto draw = [&] {
    return drawn_whole({*e.line, o, cotangent, feed, e.dtype_of(o), shape});
  };
  if (product(shape) > most_kept) return draw();
  return e.kept->get<std::vector<double>>(
      fmt::format("filled:{}:{}:{}:{}:{}:{}:{}", operand, cotangent, int(feed.fill), feed.seed,
                  feed.range, int(e.dtype_of(o)), shape_text(shape)),
      draw);
}

Whole drawn(const Evidence& e, const Feed& feed, int operand, bool cotangent) {
  const Operand& o = e.operands[size_t(operand)];
  for (size_t s = 0; s < e.shots.size(); ++s)
    for (size_t f = 0; f < e.shots[s].feeds.size(); ++f)
      if (&e.shots[s].feeds[f] == &feed)
        if (auto w = from_files(e, int(s), int(f), operand)) return std::move(*w);
  Whole w{whole_shape(o.shape, cotangent ? dual(o.layout) : o.layout, e.mesh), {}};
  for (const Feed::Basis& b : feed.basis)
    if (b.operand == operand) {
      w.value.assign(size_t(product(w.shape)), 0.0);
      if (b.index >= 0) w.value[size_t(b.index)] = 1;
      return w;
    }
  for (const Feed::Given& g : feed.given)
    if (g.operand == operand) {
      const DType dtype = e.dtype_of(o);
      w.value.reserve(g.value.size());
      for (double v : g.value) w.value.push_back(round_to(v, dtype));
      return w;
    }
  w.value = filled(e, feed, operand, cotangent);
  return w;
}

std::vector<Whole> drawn_inputs(const Evidence& e, const Feed& feed) {
  std::vector<Whole> all;
  for (int i = 0; i < e.inputs; ++i) all.push_back(drawn(e, feed, i, /*cotangent=*/false));
  return all;
}

std::vector<Whole> drawn_cotangents(const Evidence& e, const Feed& feed) {
  std::vector<Whole> all;
  for (int i = e.inputs; i < int(e.operands.size()); ++i)
    all.push_back(drawn(e, feed, i, /*cotangent=*/true));
  return all;
}

std::vector<Pairing> pairings_of(const Evidence& e, int shot, const std::vector<Paired>& inputs) {
  std::vector<Pairing> all(inputs.size());
  for (Pairing& p : all) p.complete = true;
  const Feed& feed = e.shots[size_t(shot)].feeds[0];
  const bool rounds = !exact_data(e, feed);
  const int forward = judging::step_of(e.shots[size_t(shot)], "F0"),
            backward = judging::step_of(e.shots[size_t(shot)], "B0");
  for (int o = e.inputs; o < int(e.operands.size()); ++o) {
    const Dual y(e, shot, o);
    std::vector<PairedResult> lhs{{shot, forward}};  // F(.., x, ..), then each F(.., 0, ..)
    for (size_t i = 0; i < all.size(); ++i)
      lhs.push_back({inputs[i].without, 0, -1, {}, all[i].complete && inputs[i].without >= 0});
    add_products(e, o, false, y, lhs);
    const PairedResult& with = lhs[0];
    const long double allowed = rounds ? slack_of(e, feed, o, false, y.whole()) : 0;
    for (size_t i = 0; i < all.size(); ++i) {
      Pairing& p = all[i];
      p.lhs.add(with.sum);
      p.allowed += allowed;
      p.complete = p.complete && with.complete;
      const int without = inputs[i].without;
      if (without < 0) continue;
      if (with.complete) p.lhs.add(lhs[i + 1].sum);
      p.complete = p.complete && lhs[i + 1].complete;
      if (rounds) p.allowed += slack_of(e, e.shots[size_t(without)].feeds[0], o, false, y.whole());
    }
  }
  for (size_t i = 0; i < all.size(); ++i) {
    Pairing& p = all[i];
    const int input = inputs[i].input;
    const Dual x(e, shot, input);
    std::vector<PairedResult> rhs{{shot, backward, +1, {}, p.complete}};
    add_products(e, input, true, x, rhs);
    p.rhs = rhs[0].sum;
    p.complete = rhs[0].complete;
    if (rounds) p.allowed += slack_of(e, feed, input, true, x.whole());
  }
  return all;
}

}  // namespace shardproof
