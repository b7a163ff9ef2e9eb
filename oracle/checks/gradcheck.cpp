// D: are the gradients the derivative of what the subject itself computes?
//
// With phi(t) = <y, F(x + t v)>, y a random cotangent and v a random direction in one input or
// parameter, the derivative phi'(0) is <v, B y>, B y being the subject's own gradient. No reference
// takes part in the comparison, so that a mistake which reference and subject share is seen here.
//
//   D1(h) = (phi(h) - phi(-h)) / 2h      = phi' + h^2 phi'''/6 + ...
//   D2(h) = (4 D1(h/2) - D1(h)) / 3      = phi' - h^4 phi5/480 + ...
//
// phi errs by at most eps, the bounds of the outputs paired with |y|; then D1 errs by eps/h and D2
// by 3 eps/h. The h at which both parts of D2's error balance is (360 eps / |phi5|)^(1/5). All
// steps have to be planned before the ranks run, so phi5 is estimated on the reference. x and v are
// multiples of 2^-16 and h is a power of two: x + t v is exact.
//
// |D2(h/2) - <v, B y>| is allowed |D2(h/2) - D2(h)|, fifteen times the truncation of D2(h/2), and
// 3 eps/(h/2), and what the gradient's own bound leaves open. D1 must converge with order 2, unless
// rounding hides its order: a kink (a maximum, a clamp) between x - hv and x + hv has no derivative
// to compare with.
//
// v moves a whole tensor: copies of type I and R alike, parts of P, S and V by rank.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <map>

#include "fixtures/sharding.hpp"
#include "oracle/checks/judging.hpp"
#include "oracle/checks/pairing.hpp"
#include "oracle/checks/patterns.hpp"

namespace shardproof {
namespace {

constexpr int64_t largest_case = 4096;  // elements of all operands together
constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr const char* base_shot = "gradcheck:at";

bool is_moved(const Operand& o) {
  return o.gradient && o.role != Operand::output && o.role != Operand::index;
}

bool on_one_host(const Case& line) {
  return line.text("transport") == "processes" || line.text("transport") == "threads";
}

int64_t elements_of(const Contract& contract, const Case& line) {
  int64_t elements = 0;
  for (const Operand& o : contract.operands(line))
    elements += product(whole_shape(o.shape, o.layout, line.mesh()));
  return elements;
}

// Where sums are made or travel in half precision its noise hides every difference.
bool passes_halves(const Case& line) {
  const std::vector<DType> types = types_passed(line);
  return std::any_of(types.begin(), types.end(),
                     [](DType t) { return t == DType::bf16 || t == DType::f16; });
}

std::string left_out(const Contract& contract, const Case& line, const Declared& declared) {
  if (!judging::has_gradients(contract, line, declared)) return "";
  const Fill fill = fill_of(line);
  if (line.dtype() != DType::f64 || passes_halves(line)) return "asked in f64";
  if (fill != Fill::integers && fill != Fill::normal) return "asked of fill=integers and normal";
  if (contract.stiff && contract.stiff(line))
    return "asked where values vary more slowly than its steps";
  if (const int64_t n = elements_of(contract, line); n > largest_case)
    return fmt::format("asked of {} elements at most", largest_case);
  return on_one_host(line) ? "" : "asked on one host";
}

bool due(const Contract& contract, const Case& line, const Declared& declared) {
  return judging::has_gradients(contract, line, declared) &&
         left_out(contract, line, declared).empty();
}

// ---- x, v, y and phi

std::vector<double> on_grid(std::vector<double> values) {
  for (double& v : values) v = std::nearbyint(v * 0x1p16) * 0x1p-16;
  return values;
}

Feed fresh_normals(const Feed& base, uint64_t stream) {
  Feed f;
  f.fill = Fill::normal;
  f.range = base.range;
  f.seed = base.seed + stream * 0x2545f491;
  return f;
}

// x: normal values on the grid; indices as the case draws them.
Feed point(const Evidence& e) {
  const Feed& base = e.shots.at(0).feeds.at(0);
  Feed f = fresh_normals(base, 1);
  for (int k = 0; k < e.inputs; ++k) {
    const bool index = e.operands[size_t(k)].role == Operand::index;
    auto values = drawn(e, index ? base : f, k, /*cotangent=*/false).value;
    f.given.push_back({k, index ? std::move(values) : on_grid(std::move(values))});
  }
  return f;
}

Whole direction(const Evidence& e, int operand) {
  const Feed f = fresh_normals(e.shots.at(0).feeds.at(0), uint64_t(operand) + 2);
  Whole v = drawn(e, f, operand, /*cotangent=*/false);
  for (double& each : v.value)
    if (!std::isfinite(each)) each = 0;  // what is masked by -inf is moved by nothing
  v.value = on_grid(std::move(v.value));
  return v;
}

Feed moved(Feed at, int operand, const Whole& v, double t) {
  std::vector<double>& x = at.given[size_t(operand)].value;
  for (size_t i = 0; i < x.size(); ++i) x[i] += t * v.value[i];
  return at;
}

std::vector<Whole> inputs_of(const Evidence& e, const Feed& feed) {
  std::vector<Whole> inputs;
  for (int k = 0; k < e.inputs; ++k) inputs.push_back(drawn(e, feed, k, /*cotangent=*/false));
  return inputs;
}

// Zero where the output is infinite by definition and therefore constant: lse of an empty row.
void drop_infinite(const Evidence& e, const Operand& o, const Whole& output, Whole& y) {
  for (int r = 0; r < e.mesh.world(); ++r) {
    const auto from = denoted_indices(o.shape, o.layout, e.mesh, r),
               at = whole_indices(o.shape, dual(o.layout), e.mesh, r);
    for (size_t i = 0; i < at.size(); ++i)
      if (std::isinf(output.value[size_t(from[i])])) y.value[size_t(at[i])] = 0;
  }
}

// y, by output.
std::vector<Whole> cotangents_of(const Evidence& e, const Feed& feed) {
  std::vector<Whole> y;
  const auto outputs = e.contract->forward(*e.line, inputs_of(e, feed), nullptr);
  for (int o = e.inputs; o < int(e.operands.size()); ++o) {
    y.push_back(drawn(e, feed, o, /*cotangent=*/true));
    drop_infinite(e, e.operands[size_t(o)], outputs[y.size() - 1], y.back());
  }
  return y;
}

struct Value {
  long double value = 0, error = 0;
};

// phi of the reference: outputs that it denotes, paired as the ranks would pair theirs.
long double phi_of_reference(const Evidence& e, const Feed& feed, const std::vector<Whole>& y) {
  const auto outputs = e.contract->forward(*e.line, inputs_of(e, feed), nullptr);
  long double sum = 0;
  for (size_t o = 0; o < outputs.size(); ++o) {
    const Operand& what = e.operands[size_t(e.inputs) + o];
    const int64_t weight = scaled_weight(e, what.layout);
    for (int r = 0; r < e.mesh.world(); ++r) {
      if (!leads(what.layout, e.mesh, r)) continue;
      const auto from = denoted_indices(what.shape, what.layout, e.mesh, r),
                 at = whole_indices(what.shape, dual(what.layout), e.mesh, r);
      for (size_t i = 0; i < at.size(); ++i)
        if (const double factor = y[o].value[size_t(at[i])]; factor != 0)
          sum += (long double)outputs[o].value[size_t(from[i])] * factor * weight;
    }
  }
  return sum / pairing_scale(e);
}

// By how much phi may be off where every output is within its bound.
long double rounding_of_phi(const Evidence& e, const Feed& feed, const std::vector<Whole>& y) {
  std::vector<Gauge> gauges;
  const auto outputs = e.contract->forward(*e.line, inputs_of(e, feed), &gauges);
  long double sum = 0;
  for (size_t o = 0; o < outputs.size(); ++o) {
    const Operand& what = e.operands[size_t(e.inputs) + o];
    const auto bound = bound_of(e, feed, what, false, outputs[o], judging::gauge_of(gauges, o));
    sum += slack(e, what, false, bound, y[o]);
  }
  return sum / pairing_scale(e);
}

// phi of the subject.
std::optional<Value> phi_of_subject(const Evidence& e, int shot, const std::vector<Whole>& y) {
  Dot sum;
  for (size_t o = 0; o < y.size(); ++o)
    if (!add_dots(e, shot, 0, e.inputs + int(o), false, y[o], +1, sum)) return std::nullopt;
  const long double value = sum.value() / pairing_scale(e);
  return Value{value, sum.error() / pairing_scale(e) + std::abs(value) * 0x1p-62L};
}

// ---- plan

constexpr int rungs = 3;             // h, h/2, h/4
constexpr double least_order = 1.5;  // rounds to 2
constexpr int largest_power = -2, smallest_power = -20;

std::string shot_name(const Evidence& e, int operand, int power, int sign) {
  return fmt::format("gradcheck:{}:{}2^{}", e.operands[size_t(operand)].name, sign > 0 ? "+" : "-",
                     power);
}

// |phi5| of the reference near x: the larger of two central differences of fifth order, at k and at
// 2k. Their points overlap.
double fifth_derivative(const Evidence& e, const Feed& at, int operand, const Whole& v,
                        const std::vector<Whole>& y) {
  constexpr double k = 1.0 / 16;
  std::map<int, long double> odd;  // phi(n k v) - phi(-n k v), by n
  for (const int n : {1, 2, 3, 4, 6})
    odd[n] = phi_of_reference(e, moved(at, operand, v, n * k), y) -
             phi_of_reference(e, moved(at, operand, v, -n * k), y);
  double largest = 0;
  for (const int step : {1, 2}) {
    const long double sum = 5 * odd[step] - 4 * odd[2 * step] + odd[3 * step];
    largest = std::max(largest, double(std::abs(sum)) / (2 * std::pow(step * k, 5)));
  }
  return largest;
}

// log2 of the largest h, given how much phi is rounded.
int power_of_step(double eps, double fifth) {
  const double h = std::pow(360 * eps / fifth, 0.2);
  if (!std::isfinite(h)) return largest_power;  // a polynomial: no truncation at any h
  if (!(h > std::ldexp(1.0, smallest_power))) return smallest_power;
  return std::min(int(std::floor(std::log2(h))), largest_power);
}

// What the reference says of a line: x, y and, by operand, v and the largest step.
struct Course {
  Feed at;
  std::vector<Whole> y;
  long double rounding = 0;  // of phi at x
  struct Way {
    Whole direction;
    int power = 0;
  };
  std::map<int, Way> ways;
};

Course course_anew(const Evidence& e) {
  Course c;
  c.at = point(e);
  c.y = cotangents_of(e, c.at);
  c.rounding = rounding_of_phi(e, c.at, c.y);
  const double eps =
      double(c.rounding) + 0x1p-62 * std::abs(double(phi_of_reference(e, c.at, c.y)));
  for (int k = 0; k < e.inputs; ++k) {
    if (!is_moved(e.operands[size_t(k)])) continue;
    Course::Way& way = c.ways[k];
    way.direction = direction(e, k);
    way.power = power_of_step(eps, fifth_derivative(e, c.at, k, way.direction, c.y));
  }
  return c;
}

const Course& course_of(const Evidence& e) {
  return e.kept->get<Course>("gradcheck", [&] { return course_anew(e); });
}

// By how much phi of an operand's steps may be off: at x and at both ends.
long double rounding_along(const Evidence& e, const Course& c, int operand) {
  return e.kept->get<long double>(fmt::format("gradcheck:rounding:{}", operand), [&] {
    const Course::Way& way = c.ways.at(operand);
    const double h = std::ldexp(1.0, way.power);
    long double most = c.rounding;
    for (const double t : {h, -h})
      most = std::max(most, rounding_of_phi(e, moved(c.at, operand, way.direction, t), c.y));
    return most;
  });
}

void plan(const Evidence& e, std::vector<Shot>& shots) {
  const Course& c = course_of(e);
  Shot s;
  s.name = base_shot;
  s.program = "F0 B0";
  s.feeds = {c.at};
  shots.push_back(s);
  s.program = "F0";
  for (const auto& [k, way] : c.ways)
    for (int rung = 0; rung < rungs; ++rung)
      for (const int sign : {+1, -1}) {
        s.name = shot_name(e, k, way.power - rung, sign);
        s.feeds = {moved(c.at, k, way.direction, sign * std::ldexp(1.0, way.power - rung))};
        shots.push_back(s);
      }
}

// ---- judge

struct Differences {
  double h = 0;
  std::array<long double, rungs> first;  // D1 at h, h/2, h/4
  long double eps = 0;
  bool complete = false;

  void put(int rung, long double plus, long double minus) {
    first[size_t(rung)] = (plus - minus) / (2 * std::ldexp(h, -rung));
  }
  long double second(int rung) const {
    return (4 * first[size_t(rung) + 1] - first[size_t(rung)]) / 3;
  }
  long double allowed() const { return std::abs(second(1) - second(0)) + 3 * eps / (h / 2); }

  // log2 of |D1(h) - D1(h/2)| / |D1(h/2) - D1(h/4)|, each off by what rounding leaves open.
  struct Order {
    double low, high;
  };
  Order order() const {
    const double d1 = double(std::abs(first[0] - first[1])),
                 d2 = double(std::abs(first[1] - first[2])), n1 = double(3 * eps) / h, n2 = 2 * n1;
    return {d1 > n1 ? std::log2((d1 - n1) / (d2 + n2)) : -infinity,
            d2 > n2 ? std::log2((d1 + n1) / (d2 - n2)) : infinity};
  }
};

// Whether the reference's own differences show no better order at the same steps. Asked only of a
// subject that shows a low one.
bool order_is_of_the_function(const Evidence& e, const Course& c, int operand, long double eps) {
  const Course::Way& way = c.ways.at(operand);
  Differences d;
  d.h = std::ldexp(1.0, way.power);
  d.eps = eps;
  for (int rung = 0; rung < rungs; ++rung) {
    const double h = std::ldexp(d.h, -rung);
    d.put(rung, phi_of_reference(e, moved(c.at, operand, way.direction, h), c.y),
          phi_of_reference(e, moved(c.at, operand, way.direction, -h), c.y));
  }
  return d.order().high < least_order;
}

Differences differences_of(const Evidence& e, const Course& c, int operand) {
  Differences d;
  const int power = c.ways.at(operand).power;
  d.h = std::ldexp(1.0, power);
  long double summing = 0;
  for (int rung = 0; rung < rungs; ++rung) {
    const auto plus = phi_of_subject(e, e.find_shot(shot_name(e, operand, power - rung, +1)), c.y),
               minus = phi_of_subject(e, e.find_shot(shot_name(e, operand, power - rung, -1)), c.y);
    if (!plus || !minus) return d;
    d.put(rung, plus->value, minus->value);
    summing = std::max({summing, plus->error, minus->error});
  }
  d.eps = rounding_along(e, c, operand) + summing;
  d.complete = true;
  return d;
}

// <v, B y> and by how much the subject's gradient may be off in it.
std::optional<Value> analytic(const Evidence& e, const Course& c, int operand) {
  const Operand& o = e.operands[size_t(operand)];
  const Whole& v = c.ways.at(operand).direction;
  const int shot = e.find_shot(base_shot);
  Dot sum;
  if (!add_dots(e, shot, judging::step_of(e.shots[size_t(shot)], "B0"), operand, true, v, +1, sum))
    return std::nullopt;
  const Truth& truth = e.truth(c.at);
  const Gauge& gauge = judging::gauge_of(truth.gradient_gauges, size_t(operand));
  const auto bound = bound_of(e, c.at, o, true, truth.gradients.at(size_t(operand)), gauge);
  const long double scale = pairing_scale(e);
  return Value{sum.value() / scale, (slack(e, o, true, bound, v) + sum.error()) / scale};
}

struct Tally {
  int64_t judged = 0;
  double ratio = 0, bound = 0, resolution = 0;
  std::string where, floor;
  std::vector<Finding> findings;
};

Finding finding_of(const Evidence& e, int operand) {
  Finding f;
  f.tensor = judging::tensor_name(e.operands[size_t(operand)], true);
  f.where = "along a random direction of " + e.operands[size_t(operand)].name;
  f.ratio = infinity;
  return f;
}

std::string order_text(const Differences::Order& o) {
  return std::isfinite(o.low) && std::isfinite(o.high)
             ? fmt::format("order {:.2f}", (o.low + o.high) / 2)
             : "order below rounding";
}

void judge_operand(const Evidence& e, const Course& c, int operand, Tally& t) {
  const Differences d = differences_of(e, c, operand);
  const auto got = analytic(e, c, operand);
  const int power = c.ways.at(operand).power;
  Finding f = finding_of(e, operand);
  if (!d.complete || !got) {
    f.message = "expected a result of every rank, met none of some";
    t.findings.push_back(std::move(f));
    return;
  }
  const Differences::Order order = d.order();
  if (order.high < least_order && !order_is_of_the_function(e, c, operand, d.eps)) {
    f.message =
        fmt::format("D1 converges with order {:.2f} at h = 2^{}, expected 2", order.high, power);
    f.means =
        "the forward is not smooth here (a maximum, a clamp, a branch), or not the same "
        "function from call to call";
    t.findings.push_back(std::move(f));
    return;
  }
  const double want = double(d.second(1)), allowed = double(d.allowed() + got->error),
               error = double(std::abs(got->value - d.second(1)));
  const double largest = std::max(std::abs(want), std::abs(double(got->value)));
  if (std::isfinite(allowed) && largest <= allowed) {  // a gradient of zero would pass
    t.floor += (t.floor.empty() ? "" : ", ") + e.operands[size_t(operand)].name;
    return;
  }
  ++t.judged;
  const double ratio = std::isfinite(error / allowed) ? error / allowed : infinity;
  if (t.where.empty() || ratio > t.ratio) {
    t.where = f.where;
    t.bound = allowed;
    t.ratio = ratio;
  }
  t.resolution = std::max(t.resolution, allowed / largest);
  if (std::isfinite(error) && error <= allowed) return;
  f.numeric = true;
  f.got = double(got->value), f.want = want, f.bound = allowed, f.ratio = ratio;
  f.error = std::isfinite(error) ? error : infinity;
  f.wrong = f.compared = 1;
  f.message = fmt::format("<v, B y> against second differences at h = 2^{}, {}", power - 1,
                          order_text(order));
  const double factor = f.got / f.want;
  const std::string name = factor_name(factor, e.mesh);
  f.pattern = "x " + factor_text(factor) + (name.empty() ? "" : " = " + name);
  f.means = factor_means(factor, e.mesh);
  if (f.means.empty()) f.means = "the gradient is not the derivative of what the forward computes";
  t.findings.push_back(std::move(f));
}

std::string note_of(const Evidence& e, const Tally& t) {
  std::string note;
  if (t.judged > 0)
    note = fmt::format("sees relative errors of a gradient down to {:.1e}", t.resolution);
  if (!t.floor.empty())
    note +=
        fmt::format("{}{}: differences at the rounding floor", note.empty() ? "" : "; ", t.floor);
  if (t.judged == 0 && !t.floor.empty())
    note += fmt::format(", so no slope was asked; {}", judging::values_that_can_be_wrong(*e.line));
  return note;
}

CheckResult judge(const Evidence& e) {
  for (const Shot& s : e.shots)
    if (s.name.starts_with("gradcheck:"))
      if (auto f = judging::incomplete(e, s.name)) return judging::conclude("gradcheck", 0, {*f});
  if (auto f = judging::incomplete(e, base_shot)) return judging::conclude("gradcheck", 0, {*f});
  const Course& c = course_of(e);
  Tally t;
  for (const auto& [k, way] : c.ways) judge_operand(e, c, k, t);
  CheckResult result =
      judging::conclude("gradcheck", t.judged, std::move(t.findings), note_of(e, t));
  result.ratio = std::max(result.ratio, t.ratio);
  result.bound = t.bound;
  result.where = t.where;
  return result;
}

}  // namespace

Check gradcheck_check() {
  return {.name = "gradcheck",
          .letter = 'D',
          .asks = "are the gradients the derivative of what the subject itself computes",
          .due = due,
          .left_out = left_out,
          .plan = plan,
          .judge = judge};
}

}  // namespace shardproof
