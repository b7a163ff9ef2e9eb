#include "oracle/overflow.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "oracle/checks/judging.hpp"
#include "oracle/checks/pairing.hpp"
#include "oracle/cost.hpp"
#include "oracle/drawn.hpp"
#include "oracle/memory_watch.hpp"
#include "oracle/run.hpp"

namespace shardproof {

double largest_of(DType type) {
  const int exponent = type == DType::f64 ? 1023 : type == DType::f16 ? 15 : 127;
  return std::ldexp(2 - 2 * unit_roundoff(type), exponent);
}

DType least_range(const std::vector<DType>& types) {
  return *std::min_element(types.begin(), types.end(),
                           [](DType a, DType b) { return largest_of(a) < largest_of(b); });
}

namespace {

// ---- One result

[[noreturn]] void refuse(const Evidence& e, const Operand& o, bool gradient, DType type,
                         double value) {
  throw BeyondRange(fmt::format(
      "fill: expected results within {:g}, the largest {}, met {}, where {}{} is {:.6g}{}; use "
      "{}smaller extents or a wider type",
      largest_of(type), name(type), print(*e.line), gradient ? "the gradient of " : "", o.name,
      value, std::abs(value) > largest_of(type) ? "" : ", which roundings may carry beyond",
      fill_of(*e.line) == Fill::normal ? "" : "fill=normal, "));
}

// Of values and gauges as the reference gives them; without gauges nothing but values is known.
void require_in_range(const Evidence& e, const std::vector<Whole>& values, int first, bool gradient,
                      const std::function<std::function<double(int64_t)>(size_t)>& bound) {
  for (size_t i = 0; i < values.size(); ++i)
    if (const Operand& o = e.operands[size_t(first) + i];
        is_float(e.dtype_of(o)) && (o.gradient || !gradient))
      require_in_range(e, o, gradient, values[i], bound(i));
}

// ---- fill=large and fill=offset

// Terms have up to six factors: of 2^20 under `large`. Under `offset` inputs alone are large, 2^26
// at most and 2^5 in f16: three of them and their sums fit what holds 2^127.
bool terms_may_overflow(const Case& line, Fill fill) {
  const DType least = least_range(types_passed(line));
  if (fill == Fill::large) return least != DType::f64;
  return fill == Fill::offset && least == DType::f16;
}

// The largest sum of |terms| of a result in f16; its value where there are no terms, and in wider
// types: what bounds are computed from holds errors of activations there, which are far from met.
double largest(const Whole& value, const Gauge* gauge, DType type) {
  double most = 0;
  const bool sums = type == DType::f16 && gauge && gauge->magnitude.size() == value.value.size();
  for (size_t i = 0; i < value.value.size(); ++i) {
    const double v = sums ? gauge->magnitude[i] : std::abs(value.value[i]);
    if (std::isfinite(value.value[i])) most = std::max(most, v);
  }
  return most;
}

// What a check has done to the data of its shot, where it is that which is too large.
struct Disturbed {
  std::string how, advice;
};
Disturbed disturbed_by(const Evidence& e, const Shot& s) {
  const std::string sequence = s.name.substr(s.name.find(':') + 1);
  if (!s.name.starts_with("leak:") || e.shots.at(0).name == s.name) return {};
  return {fmt::format(" in the copy for `leak`, of which sequence {} is 2^{} times itself",
                      sequence, judging::binary_orders_of_loud(*e.line)),
          "one document or sequence, --check with the others, "};
}

void refuse_terms(const Evidence& e, const Truth& truth, const Disturbed& disturbed) {
  const DType type = least_range(types_passed(*e.line));
  const auto look = [&](const std::vector<Whole>& values, const std::vector<Gauge>& gauges,
                        size_t first, const char* of) {
    for (size_t i = 0; i < values.size(); ++i) {
      const double met = largest(values[i], i < gauges.size() ? &gauges[i] : nullptr, type);
      if (!(met > largest_of(type))) continue;
      throw BadInput(
          fmt::format("fill: expected results within {:g}, the largest {}, met {}, where terms of "
                      "{}{} add up to {:.3g}{}; use fill=normal, {}smaller extents or a wider type",
                      largest_of(type), name(type), print(*e.line), of, e.operands[first + i].name,
                      met, disturbed.how, disturbed.advice));
    }
  };
  look(truth.outputs, truth.output_gauges, size_t(e.inputs), "");
  look(truth.gradients, truth.gradient_gauges, 0, "the gradient of ");
}

void refuse_terms_of_feeds(const Evidence& e, const Registry& registry) {
  Truths truths(registry);
  for (const Shot& s : e.shots)
    for (const Feed& f : s.feeds)
      if (terms_may_overflow(*e.line, f.fill))
        refuse_terms(e, truths.get(*e.line, e, f), disturbed_by(e, s));
}

// ---- Any fill

// Multiplications that cost less than a start of ranks does.
constexpr double small_case = 1e9;

// Values alone are a fraction of the work that bounds take.
void refuse_values(const Evidence& e) {
  const ReferenceWork work;
  const Feed& feed = e.shots.at(0).feeds.at(0);
  const auto unbounded = [](size_t) { return NoError{}; };
  const auto inputs = drawn_inputs(e, feed);
  require_in_range(e, e.contract->forward(*e.line, inputs, nullptr), e.inputs, false, unbounded);
  if (!e.declared.backward) return;
  const auto cotangents = drawn_cotangents(e, feed);
  require_in_range(e, e.contract->backward(*e.line, inputs, cotangents, nullptr), 0, true,
                   unbounded);
}

}  // namespace

void require_in_range(const Evidence& e, const Operand& o, bool gradient, const Whole& want,
                      const std::function<double(int64_t)>& bound) {
  const DType type = least_range(types_of_result(e, o, gradient));
  const double most = largest_of(type);
  for (size_t i = 0; i < want.value.size(); ++i) {
    const double value = std::abs(want.value[i]);
    if (!(value > most / 2) || std::isinf(value)) continue;
    if (value > most || value + std::min(bound(int64_t(i)), value) > most)
      refuse(e, o, gradient, type, want.value[i]);
  }
}

void require_in_range(const Evidence& e, const Feed& feed, const Truth& truth) {
  if (least_range(types_passed(*e.line)) == DType::f64) return;
  const auto look = [&](const std::vector<Whole>& values, const std::vector<Gauge>& gauges,
                        int first, bool gradient) {
    require_in_range(e, values, first, gradient, [&](size_t i) {
      return bound_of(e, feed, e.operands[size_t(first) + i], gradient, values[i],
                      judging::gauge_of(gauges, i));
    });
  };
  look(truth.outputs, truth.output_gauges, e.inputs, false);
  look(truth.gradients, truth.gradient_gauges, 0, true);
}

void refuse_overflow(const Evidence& e, const Registry& registry) {
  const Case& line = *e.line;
  if (terms_may_overflow(line, fill_of(line))) return refuse_terms_of_feeds(e, registry);
  const DType least = least_range(types_passed(line));
  if (least == DType::f64 || exact_data(e, e.shots.at(0).feeds.at(0))) return;
  if (least == DType::f16 || cost_of(e).pass <= small_case) refuse_values(e);
}

void refuse_infeasible(const Case& line, const std::vector<std::string>& checks,
                       const Registry& registry) {
  refuse_overflow(plan_case(line, declared_of(line, registry), checks, registry), registry);
}

}  // namespace shardproof
