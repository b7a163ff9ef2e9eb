// The quantised family: tensors that are rounded to 8-bit floating point with one scale for all
// ranks that gather them, or one for each block of a row.
#include <algorithm>
#include <cmath>

#include "fixtures/fills.hpp"
#include "fixtures/sharding.hpp"
#include "oracle/drawn.hpp"
#include "oracle/registry.hpp"
#include "primitives/quantised_gather.hpp"
#include "reference/quantised.hpp"
#include "suites/ours.hpp"
#include "suites/quantised.hpp"
#include "suites/reading.hpp"
#include "suites/replicated.hpp"

namespace shardproof {
namespace delayed {

Key history_key() {
  return linears::extent("history", "0", 0,
                         "delayed scaling: amaxes of so many earlier steps; 0: none", 64);
}

Operand operand(const Case& c, const char* name, Operand::Role role, const std::vector<Axis>& alike,
                bool gradient) {
  Operand o{name, role, {c.at("history")}, {}, gradient};
  for (Axis a : alike) o.layout.emplace_back(a, I());
  o.dtype_override = linears::loss_type(c), o.fixed_dtype = true;
  return o;
}

std::vector<double> drawn(const Case& c, const Operand& o, uint64_t seed, int64_t range,
                          int64_t greatest) {
  const auto shape = whole_shape(o.shape, o.layout, c.mesh());
  const int64_t steps = o.shape[0];
  auto values = draw_whole({fill_of(c), seed, range, -1}, o.name, o.dtype_override, shape);
  const int size = std::ilogb(reference::greatest_magnitude(values));
  const bool fresh = c.has("fresh") && c.on("fresh");
  for (size_t i = 0; i < values.size(); ++i) {
    const int away = int(std::abs(int64_t(i) % steps - greatest));
    int exponent = 0;
    const double significand = std::frexp(std::abs(values[i]), &exponent);
    values[i] = fresh ? 0 : std::ldexp(significand, size - 2 * away);
  }
  return values;
}

Whole rolled(const Case& c, const Whole& history, const std::vector<double>& amax) {
  Whole next = history;
  const size_t steps = size_t(c.at("history"));
  for (size_t i = 0; i < next.value.size(); ++i)
    next.value[i] = i % steps == 0 ? amax[i / steps] : history.value[i - 1];
  return next;
}

}  // namespace delayed

namespace {

using namespace linears;
using namespace replicated;
using reference::Values;

bool gathers(const Case& c) { return c.text("output") != "shard"; }
bool one_scale(const Case& c) { return c.at("block") == 0; }
bool is_e5m2(const Case& c, const char* key) { return c.text(key) == "e5m2"; }

std::vector<Axis> axes_of_scale(const Case& c) {
  std::vector<Axis> axes;
  for (Axis a : reading::axes_in(c, "over"))
    if (c.ranks(a) > 1) axes.push_back(a);
  return axes;
}

// Rows are cut over the axes of `over`, tp within cp within dp; on the others every rank has data
// of its own.
Layout rows_cut(const Case& c, const Placement& on_tp) {
  Layout layout;
  const auto axes = reading::axes_in(c, "over");
  for (Axis a : {Axis::dp, Axis::cp, Axis::tp})
    if (std::find(axes.begin(), axes.end(), a) != axes.end())
      layout.emplace_back(a, a == Axis::tp ? on_tp : S(0));
  return layout;
}

Placement of_result(const Case& c) {
  return c.text("output") == "shard" ? S(0) : c.text("output") == "invariant" ? I() : R();
}

// Rows are the smaller the further they are from the one at three fifths of all: ranks differ in
// what is greatest on them, and neither the first nor the last has the greatest of all.
// Strides that show one row in place of all leave no sizes between rows.
std::function<double(int64_t)> sizes_of_rows(const Case& c, const Operand& o, int64_t zero_every) {
  if (!expanded_dims(c, o, /*cotangent=*/o.role == Operand::output).empty())
    return [](int64_t) { return 1.0; };
  const int64_t rows = c.at("tokens"), columns = c.at("hidden"), spread = c.at("spread");
  return [=](int64_t index) -> double {
    constexpr int64_t most = 40;
    const int64_t row = index / columns % rows;
    if (zero_every > 0 && row % zero_every == zero_every - 1) return 0;
    return std::ldexp(1, -int(std::min(spread * std::abs(row - rows * 3 / 5), most)));
  };
}

// Numbers of five bits, of which every second is a tie of E4M3 and every fourth one of E5M2, as
// they are or moved by one unit in the last place: what is rounded twice, or in a narrower type
// first, falls on the other side.
std::vector<double> ties_of(const Case& c, const Operand& x, uint64_t seed) {
  const auto shape = whole_shape(x.shape, x.layout, c.mesh());
  auto values = draw_whole({Fill::normal, seed, 1, -1}, x.name, c.dtype(), shape);
  for (size_t i = 0; i < values.size(); ++i) {
    int exponent = 0;
    const double significand = std::frexp(values[i] * x.factor(int64_t(i)), &exponent),
                 five = std::ldexp(std::nearbyint(std::ldexp(significand, 5)), exponent - 5);
    values[i] =
        round_to(five * (1 + double(int64_t(i) % 3 - 1) * 2 * unit_roundoff(c.dtype())), c.dtype());
  }
  return values;
}

std::optional<int64_t> range_of(const Case& c) {
  if (c.text("scaling") != "pow2") return std::nullopt;
  return range_of_products(c, c.ranks(Axis::tp), 1);
}

std::vector<Axis> all_of_scale(const Case& c) { return reading::axes_in(c, "over"); }

Operand scale_operand(const Case& c) {
  Operand o{"scale", Operand::output, {1}, {}, false};
  if (one_scale(c))
    o.layout = delayed::operand(c, "", Operand::output, all_of_scale(c)).layout;
  else
    o.shape = {c.at("tokens"), c.at("hidden") / c.at("block")},
    o.layout = rows_cut(c, of_result(c));
  o.dtype_override = loss_type(c), o.fixed_dtype = true;
  return o;
}

std::vector<Operand> operands(const Case& c) {
  const std::vector<int64_t> shape{c.at("tokens"), c.at("hidden")};
  Operand x{"x", Operand::input, shape, rows_cut(c, S(0))},
      y{"y", Operand::output, shape, rows_cut(c, of_result(c))};
  x.factor = sizes_of_rows(c, x, c.at("zero_rows"));
  y.factor = sizes_of_rows(c, y, 0);
  if (c.on("ties")) x.made = [c, x](uint64_t seed) { return ties_of(c, x, seed); };
  if (c.at("history") == 0) return {x, y, scale_operand(c)};
  Operand history = delayed::operand(c, "history", Operand::input, all_of_scale(c));
  history.made = [c, history](uint64_t seed) {
    // The oldest of an odd number of steps, else one between.
    const int64_t steps = c.at("history"), greatest = steps % 2 ? steps - 1 : steps / 2;
    return delayed::drawn(c, history, seed, range_of(c).value_or(1), greatest);
  };
  return {x, history, y, scale_operand(c),
          delayed::operand(c, "next_history", Operand::output, all_of_scale(c))};
}

reference::Quantiser quantiser(const Case& c, const char* key) {
  return {is_e5m2(c, key) ? reference::EightBitFormat::e5m2() : reference::EightBitFormat::e4m3(),
          c.text("scaling") == "pow2",
          precision_of(c, Declared{}).u_acc + unit_roundoff(DType::f64)};
}

// Nothing is allowed where the arithmetic is exact and the result is stored as it is.
Gauge gauge_of_grid(const Case& c, const reference::Quantised& q) {
  const auto is_zero = [](double e) { return e == 0; };
  const auto is_stored = [&](double v) { return round_to(v, c.dtype()) == v; };
  if (std::ranges::all_of(q.error, is_zero) && std::ranges::all_of(q.value, is_stored)) return {};
  Gauge g;
  g.step = q.step;
  for (double e : q.error) g.bound.push_back(e / precision_of(c, Declared{}).u_acc);
  return g;
}

void append(Values& to, const Values& more) { to.insert(to.end(), more.begin(), more.end()); }

// Each list of ranks by itself: its scales come from its own x, or from its history.
struct OfLists {
  reference::Quantised x;
  Values scales, amax;
};
OfLists of_lists(const Case& c, const char* format, const Values& x, const Values* history) {
  const int64_t n = c.at("tokens") * c.at("hidden"), group = one_scale(c) ? n : c.at("block");
  const reference::Quantiser q = quantiser(c, format);
  OfLists all;
  for (size_t at = 0; at < x.size(); at += size_t(n)) {
    const reference::In own = reference::In(x).subspan(at, size_t(n));
    Values scales;
    for (int64_t i = 0; i < n; i += group) {
      double amax = reference::greatest_magnitude(own.subspan(size_t(i), size_t(group)));
      all.amax.push_back(amax);
      if (history) {
        const size_t steps = size_t(c.at("history"));
        amax = reference::greatest_magnitude(
            reference::In(*history).subspan(at / size_t(n) * steps, steps));
      }
      scales.push_back(reference::scale_of(q, amax));
    }
    const reference::Quantised part = reference::quantised(q, own, scales, group);
    append(all.x.value, part.value), append(all.x.error, part.error), append(all.x.step, part.step),
        append(all.scales, scales);
  }
  return all;
}

Gauge gauge_of_scales(const Case& c, const Values& scales) {
  Gauge g;
  const reference::Quantiser q = quantiser(c, "format");
  for (double s : scales)
    g.bound.push_back(reference::scale_error(q, s) / precision_of(c, Declared{}).u_acc);
  return std::ranges::all_of(g.bound, [](double b) { return b == 0; }) ? Gauge{} : g;
}

std::vector<Whole> forward(const Case& c, std::span<const Whole> in, std::vector<Gauge>* gauges) {
  const bool has_history = in.size() > 1;
  OfLists q = of_lists(c, "format", in[0].value, has_history ? &in[1].value : nullptr);
  if (gauges) {
    *gauges = {gauge_of_grid(c, q.x), gauge_of_scales(c, q.scales)};
    if (has_history) gauges->push_back({});
  }
  const Operand scale = scale_operand(c);
  std::vector<Whole> out{
      whole(in[0].shape, std::move(q.x.value)),
      whole(denoted_shape(scale.shape, scale.layout, c.mesh()), std::move(q.scales))};
  if (has_history) out.push_back(delayed::rolled(c, in[1], q.amax));
  return out;
}

// Straight through the rounding.
std::vector<Whole> backward(const Case& c, std::span<const Whole> in, std::span<const Whole> cot,
                            std::vector<Gauge>* gauges) {
  const Operand y = operands(c)[in.size()];
  const auto sum = [&](Values v) {
    return denoted(y, dual(y.layout), c.mesh(), {cot[0].shape, std::move(v)}).value;
  };
  Values dx = sum(cot[0].value);
  Gauge g;
  if (c.text("output") == "replicate" && c.ranks(Axis::tp) > 1)
    g = gauge(sum(reference::absolute(cot[0].value)), sum(reference::squared(cot[0].value)), 1,
              c.ranks(Axis::tp));
  if (c.text("grad_format") != "none") {
    const OfLists q = of_lists(c, "grad_format", dx, nullptr);
    dx = q.x.value, g = gauge_of_grid(c, q.x);
  }
  if (gauges) gauges->assign(in.size(), Gauge{}), (*gauges)[0] = std::move(g);
  std::vector<Whole> gradients(in.size());
  gradients[0] = whole(in[0].shape, std::move(dx));
  return gradients;
}

// n elements of a rank: a scale over the axes of `over`, codes four in a word.
std::vector<Traffic> traffic(const Case& c, const std::string&, int) {
  const auto axes = axes_of_scale(c);
  const std::string group = reading::label(axes);
  const int64_t n = c.at("tokens") * c.at("hidden") / ranks_of(c, axes), p = c.ranks(Axis::tp);
  const DType type = accumulation_of(c);
  std::vector<Traffic> due;
  const auto amax = [&](bool back) {
    if (one_scale(c) && !axes.empty())
      due.push_back({Op::all_reduce, Reduce::max, group, back, 1, type});
  };
  amax(false);
  if (gathers(c) && p > 1) {
    due.push_back({Op::all_gather, Reduce::none, "tp", false, (n + 3) / 4, DType::i32});
    if (!one_scale(c))
      due.push_back({Op::all_gather, Reduce::none, "tp", false, n / c.at("block"), type});
  }
  if (c.text("output") == "replicate" && p > 1)
    due.push_back({Op::reduce_scatter, Reduce::sum, "tp", true, n * p, c.dtype()});
  if (c.text("grad_format") != "none") amax(true);
  return due;
}

Key count(const char* name, const char* fallback, const char* help) {
  return extent(name, fallback, 0, help, 64);
}

std::vector<Key> keys() {
  return {
      extent("tokens", "24", 1, "rows of x, of all ranks of over="),
      extent("hidden", "10", 1, "columns of x"),
      choice("format", {"e4m3", "e5m2"}, "of the codes"),
      choice("scaling", {"exact", "pow2"}, "greatest / amax, or the power of two at or below it"),
      count("block", "0", "elements of a row that share a scale; 0: one scale of all"),
      delayed::history_key(),
      toggle("fresh", "off", "a history of zeros, as the first step meets it"),
      choice("output", {"replicate", "invariant", "shard"},
             "gathered, with a gradient that is partial or whole; shard: not gathered"),
      choice("grad_format", {"none", "e5m2", "e4m3"}, "in which the gradient is rounded"),
      over_key(),
      count("spread", "1", "binary orders between the sizes of neighbouring rows"),
      count("zero_rows", "0", "every so manieth row of x is zero; 0: none"),
      toggle("ties", "off", "x of numbers halfway between two codes, and next to it")};
}

std::vector<std::string> cases(const std::string& tier) {
  const auto smoke = crossed(
      {"quantised_gather"},
      {"tp=2", "tp=4 scaling=pow2 dtype=bf16", "tp=2 dp=2 history=4 output=invariant",
       "tp=2 block=5 zero_rows=7", "tp=2 output=shard grad_format=e5m2 spread=3 scaling=pow2"});
  if (tier == "smoke") return smoke;
  const auto ci = together(
      {smoke,
       crossed({"quantised_gather", "quantised_gather tp=3", "quantised_gather tp=8",
                "quantised_gather tp=2 cp=2 dp=2", "quantised_gather tp=2 dp=2 over=tp",
                "quantised_gather tp=4 dp=2 order=dp,tp"},
               {"", "format=e5m2 dtype=f32", "history=3 output=invariant dtype=f32",
                "block=2 scaling=pow2 dtype=bf16 output=invariant grad_format=e5m2",
                "scaling=pow2 fill=integers output=shard grad_format=e4m3 strides=transposed"}),
       crossed({"quantised_gather tp=4"}, {"dtype=f16",
                                           "dtype=bf16",
                                           "format=e5m2 scaling=pow2 dtype=f16",
                                           "scaling=pow2 history=4 dtype=bf16",
                                           "history=3 fresh=on",
                                           "history=1 zero_rows=5",
                                           "block=10 dtype=f32 zero_rows=3",
                                           "block=1 zero_rows=2",
                                           "output=shard grad_format=e4m3 dtype=f32",
                                           "strides=expanded",
                                           "strides=expanded_inputs history=4",
                                           "strides=expanded output=shard spread=3 dtype=f16",
                                           "fill=large dtype=f32",
                                           "fill=cancelling block=5",
                                           "fill=offset history=3 dtype=bf16",
                                           "scaling=pow2 fill=integers dtype=bf16",
                                           "scaling=pow2 ties=on",
                                           "scaling=pow2 ties=on format=e5m2 dtype=f32",
                                           "scaling=pow2 ties=on dtype=bf16",
                                           "scaling=pow2 ties=on history=4 dtype=f16",
                                           "acc=f64 dtype=bf16",
                                           "spread=0 dtype=f32",
                                           "seed=2",
                                           "tokens=16 hidden=33 dtype=f32 block=11"})});
  if (tier != "nightly") return ci;
  return together(
      {ci, crossed({"quantised_gather tp=6", "quantised_gather tp=8 tokens=48 hidden=65",
                    "quantised_gather cp=4 dp=2"},
                   {"", "history=5 dtype=f32", "block=5 dtype=bf16",
                    "format=e5m2 scaling=pow2 dtype=bf16",
                    "output=invariant grad_format=e5m2 dtype=f16"})});
}

Contract quantised_gather() {
  Contract c;
  c.name = "quantised_gather";
  c.family = "quantised";
  c.summary =
      "y = q(x s) / s in 8-bit floating point (FP8), one scale of all ranks, gathered as codes";
  c.keys = keys();
  c.precondition = primitives::refused_quantised;
  c.operands = operands;
  c.forward = forward;
  c.backward = backward;
  c.traffic = traffic;
  c.integer_range = range_of;
  c.cases = cases;
  c.stiff = [](const Case&) { return true; };  // constant between the boundaries of codes
  c.illegal = {"quantised_gather tp=4 tokens=10",           "quantised_gather tp=2 block=3",
               "quantised_gather tp=2 block=5 history=4",   "quantised_gather tp=2 fresh=on",
               "quantised_gather tp=2 grad_format=e5m2",    "quantised_gather tp=2 dp=2 over=dp",
               "quantised_gather tp=2 dtype=bf16 wire=f32", "quantised_gather tp=2 pp=2",
               "quantised_gather tp=2 zero_rows=1"};
  c.witnesses = {"quantised_gather tp=2", "quantised_gather tp=3 block=5", "quantised_gather tp=4",
                 "quantised_gather tp=2 dp=2 output=invariant grad_format=e5m2"};
  return c;
}

}  // namespace

void family_quantised(Registry& r) {
  r.add(quantised_gather());
  add_ours<primitives::QuantisedGather>(r, "quantised_gather");
}

}  // namespace shardproof
