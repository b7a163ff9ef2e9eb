// The step of a distributed optimizer (ZeRO stages 1 and 2). What is judged is whether every
// element of every parameter is updated once, by the gradient of all ranks and by its own master
// and moments, where borders of shards fall inside of parameters, and whether all ranks end with
// the same parameters.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "fixtures/fills.hpp"
#include "fixtures/index_maps.hpp"
#include "fixtures/sharding.hpp"
#include "oracle/check.hpp"
#include "oracle/registry.hpp"
#include "primitives/sharded_step.hpp"
#include "reference/optimizer.hpp"
#include "suites/ours.hpp"
#include "suites/reading.hpp"
#include "suites/replicated.hpp"
#include "suites/step_keys.hpp"

namespace shardproof {
namespace {

using namespace linears;
using namespace replicated;
using reference::Uncertain;
using reference::Values;

// ---- What is read from a line

bool adamw(const Case& c) { return c.text("rule") == "adamw"; }
bool clips(const Case& c) { return !c.text("clip").empty(); }
int64_t microbatches(const Case& c) { return c.at("microbatches"); }
bool keeps_masters(const Case& c) { return c.text("master") == "kept"; }
bool scales(const Case& c) { return c.text("loss_scale") != "off"; }
double scale_of_loss(const Case& c) { return scales(c) ? reading::number(c, "loss_scale") : 1; }
bool overflows(const Case& c) { return c.on("overflow"); }
using reading::with_ranks;

std::vector<Axis> cut_over(const Case& c) {
  return c.text("shard") == "cp" ? with_ranks(c, {Axis::cp}) : with_ranks(c, {Axis::cp, Axis::dp});
}
std::vector<Axis> copied_over(const Case& c) {
  return c.text("shard") == "cp" ? with_ranks(c, {Axis::dp}) : std::vector<Axis>{};
}
int64_t ranks_with_gradients(const Case& c) {
  return int64_t(c.ranks(Axis::dp)) * c.ranks(Axis::cp);
}

// Over how many of its terms the sum of all gradients is averaged: ranks, and microbatches.
int64_t averaged(const Case& c) {
  const int64_t n = c.text("loss") == "mean" ? microbatches(c) : 1;
  if (c.text("reduce") == "sum") return n;
  return n * (c.text("reduce") == "mean" ? ranks_with_gradients(c) : c.ranks(Axis::dp));
}

struct Parameter {
  std::string name;
  std::vector<int64_t> shape;
};
// In the order of the flat buffer: a matrix between two vectors.
std::vector<Parameter> parameters(const Case& c) {
  const int64_t hidden = c.at("hidden"), rows = c.at("rows");
  return {{"gamma", {hidden}}, {"w", {rows, hidden}}, {"b", {rows}}};
}

int64_t elements(const Case& c) {
  int64_t n = 0;
  for (const Parameter& p : parameters(c)) n += product(p.shape);
  return n;
}

// Elements of a shard, padding and all.
int64_t elements_of_shard(const Case& c) {
  const int64_t p = ranks_of(c, cut_over(c)), n = elements(c);
  return n / p + (n % p > 0 ? 1 : 0);
}

std::vector<bool> matrices(const Case& c) {
  std::vector<bool> decays;
  for (const Parameter& p : parameters(c))
    decays.insert(decays.end(), size_t(product(p.shape)), p.shape.size() > 1);
  return decays;
}

reference::StepRule rule(const Case& c) {
  reference::StepRule r;
  r.adamw = adamw(c);
  r.lr = reading::number(c, "lr"), r.decay = reading::number(c, "decay");
  r.momentum = 0.5, r.beta1 = 0.9, r.beta2 = 0.95;
  r.eps = reading::number(c, "eps"), r.step = c.at("step");
  return r;
}

// ---- The contract

// What tp cuts, each of its ranks has parameters of its own of.
Layout on_every_rank(const Placement& of) { return {{Axis::dp, of}, {Axis::cp, of}}; }

Layout shards(const Case& c) {
  const int64_t own = elements_of_shard(c);
  const bool copies = c.text("shard") == "cp";
  return {{Axis::dp, copies ? I() : S(0, chunk_map(own * c.ranks(Axis::cp)))},
          {Axis::cp, S(0, chunk_map(own))}};
}

// One behind the other where there are several microbatches.
std::vector<int64_t> gradient_shape(const Case& c, const Parameter& p) {
  std::vector<int64_t> shape = p.shape;
  if (microbatches(c) > 1) shape.insert(shape.begin(), microbatches(c));
  return shape;
}

// The element that is infinite under overflow=on: the last of b in the last microbatch, on the
// first rank of dp and cp and the last of tp. It lies in the shard of another rank, where there is
// one.
int64_t infinite_element(const Case& c, const Operand& gradient) {
  int64_t stack = 0;
  for (const Axis axis : stacked_axes(gradient.layout, c.mesh(), /*denoted=*/false))
    stack = stack * c.ranks(axis) + (axis == Axis::tp ? c.ranks(axis) - 1 : 0);
  return (stack + 1) * product(gradient.shape) - 1;
}

std::vector<Operand> operands(const Case& c) {
  std::vector<Operand> list;
  for (const Parameter& p : parameters(c))
    list.push_back({p.name, Operand::input, p.shape, on_every_rank(I())});
  for (const Parameter& p : parameters(c))
    list.push_back({"g_" + p.name, Operand::input, gradient_shape(c, p), on_every_rank(P())});
  if (overflows(c))
    list.back().factor = [at = infinite_element(c, list.back())](int64_t i) {
      return i == at ? std::numeric_limits<double>::infinity() : 1;
    };
  std::vector<std::string> states{"m"};
  if (keeps_masters(c)) states.insert(states.begin(), "master");
  if (adamw(c)) states.push_back("v");
  const auto state = [&](const std::string& name, Operand::Role role, const Layout& layout) {
    Operand o{name, role, {elements(c)}, layout};
    o.fixed_dtype = true, o.dtype_override = accumulation_of(c), o.magnitude = name == "v";
    list.push_back(o);
  };
  for (const std::string& name : states)
    state(name, Operand::input, c.text("state") == "whole" ? on_every_rank(I()) : shards(c));
  for (const Parameter& p : parameters(c))
    list.push_back({"next_" + p.name, Operand::output, p.shape, on_every_rank(I())});
  state("next_master", Operand::output, shards(c));
  state("next_m", Operand::output, shards(c));
  if (adamw(c)) state("next_v", Operand::output, shards(c));
  const auto number = [&](const char* name, const Layout& layout) {
    list.push_back({name, Operand::output, {1}, layout});
    list.back().fixed_dtype = true, list.back().dtype_override = accumulation_of(c);
  };
  if (clips(c)) number("norm", on_every_rank(I()));
  // One of all ranks, those of tp included.
  if (scales(c)) number("next_scale", {{Axis::dp, I()}, {Axis::cp, I()}, {Axis::tp, I()}});
  return list;
}

// Values of one rank of tp by operand, and what its gradients have in magnitude.
struct Given {
  Values parameters, master, m, v, gradient, magnitude;
};

const Whole& named(const Case& c, std::span<const Whole> in, const std::string& name) {
  const auto list = operands(c);
  for (size_t i = 0; i < in.size(); ++i)
    if (list[i].name == name) return in[i];
  throw std::out_of_range("sharded_step has no input " + name);
}

void append(Values& to, const Whole& w, size_t stack, size_t n) {
  to.insert(to.end(), w.value.begin() + ptrdiff_t(stack * n),
            w.value.begin() + ptrdiff_t((stack + 1) * n));
}

// Values of one rank of tp, its microbatches added up.
void append_sums(Values& to, const Whole& w, size_t stack, size_t count, int64_t microbatches) {
  Values all, sum(count);
  append(all, w, stack, count * size_t(microbatches));
  for (size_t i = 0; i < all.size(); ++i) sum[i % count] += all[i];
  to.insert(to.end(), sum.begin(), sum.end());
}

Given given(const Case& c, std::span<const Whole> in, size_t stack) {
  Given of;
  const size_t n = size_t(elements(c));
  const auto state = [&](const char* name, Values& to) {
    append(to, named(c, in, name), stack, n);
  };
  for (const Parameter& p : parameters(c)) {
    const size_t count = size_t(product(p.shape));
    const Operand o{"", Operand::input, gradient_shape(c, p), on_every_rank(P())};
    const Whole& g = named(c, in, "g_" + p.name);
    const auto sums = [&](const Whole& parts, Values& to) {
      append_sums(to, denoted(o, o.layout, c.mesh(), parts), stack, count, microbatches(c));
    };
    sums(g, of.gradient), sums(absolute(g), of.magnitude);
    append(of.parameters, named(c, in, p.name), stack, count);
  }
  if (keeps_masters(c))
    state("master", of.master);
  else
    of.master = of.parameters;
  state("m", of.m);
  if (adamw(c)) state("v", of.v);
  return of;
}

struct Results {
  Uncertain parameters;
  reference::Step step;
  Uncertain norm, scale;
};

bool infinite(const Values& gradient) {
  return !std::all_of(gradient.begin(), gradient.end(), [](double g) { return std::isfinite(g); });
}

// `skipped`: on some rank a gradient is not finite, and all of them leave everything as it is.
Results results(const Case& c, const Given& of, bool skipped) {
  const double loss_scale = scale_of_loss(c);
  const auto with_scale = [&](double factor) {
    return reference::certain(Values{loss_scale * factor});
  };
  if (skipped)
    return {reference::certain(of.parameters),
            {reference::certain(of.master), reference::certain(of.m), reference::certain(of.v)},
            {},
            with_scale(0.5)};
  const reference::Rounding r =
      rounding_of(c, precision_of(c, Declared{}), ranks_with_gradients(c));
  Uncertain g = reference::sum_of_parts(of.gradient, of.magnitude,
                                        {double(ranks_with_gradients(c)), double(microbatches(c)),
                                         1 / (double(averaged(c)) * loss_scale)},
                                        r);
  Results out;
  out.scale = with_scale(c.on("grows") ? 2 : 1);
  if (clips(c)) {
    out.norm = reference::norm_of(g, elements(c) + ranks_of(c, cut_over(c)), r.accumulate);
    g = reference::clipped(g, out.norm, reading::number(c, "clip"), r.accumulate);
  }
  out.step = reference::step(rule(c), of.master, of.m, of.v, g, matrices(c), r.accumulate);
  out.parameters = out.step.master;
  return out;
}

Uncertain slice(const Uncertain& x, int64_t first, int64_t count) {
  const auto part = [&](const Values& v) {
    return Values(v.begin() + first, v.begin() + first + count);
  };
  return {part(x.value), part(x.error)};
}

// In the order of the outputs.
std::vector<Uncertain> outputs(const Case& c, const Results& r) {
  std::vector<Uncertain> list;
  int64_t at = 0;
  for (const Parameter& p : parameters(c)) {
    list.push_back(slice(r.parameters, at, product(p.shape)));
    at += product(p.shape);
  }
  list.push_back(r.step.master), list.push_back(r.step.m);
  if (adamw(c)) list.push_back(r.step.v);
  if (clips(c)) list.push_back(r.norm);
  if (scales(c)) list.push_back(r.scale);
  return list;
}

std::vector<Whole> forward(const Case& c, std::span<const Whole> in, std::vector<Gauge>* gauges) {
  std::vector<Whole> out;
  std::vector<Uncertain> all;
  for (const Operand& o : operands(c))
    if (o.role == Operand::output) out.push_back({denoted_shape(o.shape, o.layout, c.mesh()), {}});
  all.resize(out.size());
  std::vector<Given> by_tp;
  for (size_t stack = 0; stack < size_t(c.ranks(Axis::tp)); ++stack)
    by_tp.push_back(given(c, in, stack));
  const bool skipped = scales(c) && std::any_of(by_tp.begin(), by_tp.end(), [](const Given& of) {
                         return infinite(of.gradient);
                       });
  for (const Given& of : by_tp) {
    const auto own = outputs(c, results(c, of, skipped));
    for (size_t i = 0; i < out.size(); ++i) {
      if (int64_t(out[i].value.size()) == product(out[i].shape)) continue;  // one of all of tp
      out[i].value.insert(out[i].value.end(), own[i].value.begin(), own[i].value.end());
      all[i].error.insert(all[i].error.end(), own[i].error.begin(), own[i].error.end());
    }
  }
  if (!gauges) return out;
  gauges->clear();
  for (size_t i = 0; i < out.size(); ++i) {
    all[i].value = out[i].value;
    gauges->push_back(gauge_of(all[i], precision_of(c, Declared{})));
  }
  return out;
}

// A call averages where the mean is over all of its ranks.
Reduce reduction(const Case& c, const std::vector<Axis>& axes) {
  const std::string& how = c.text("reduce");
  const bool dp_alone = axes == std::vector{Axis::dp};
  return how == "mean" || (how == "mean_dp" && dp_alone) ? Reduce::avg : Reduce::sum;
}

std::vector<Traffic> traffic(const Case& c, const std::string&, int) {
  std::vector<Traffic> due;
  const auto add = [&](const std::vector<Axis>& axes, Op op, int64_t count, DType type,
                       Reduce reduce) {
    if (axes.empty()) return;
    due.push_back(call(op, false, count, type));
    due.back().label = reading::label(axes);
    due.back().reduce = reduce;
  };
  const int64_t own = elements_of_shard(c);
  add(cut_over(c), Op::reduce_scatter, own * ranks_of(c, cut_over(c)), wire_of(c),
      reduction(c, cut_over(c)));
  add(copied_over(c), Op::all_reduce, own, wire_of(c), reduction(c, copied_over(c)));
  if (scales(c))
    add(with_ranks(c, {Axis::tp, Axis::cp, Axis::dp}), Op::all_reduce, 1, accumulation_of(c),
        Reduce::max);
  if (overflows(c)) return due;
  if (clips(c)) add(cut_over(c), Op::all_reduce, 1, accumulation_of(c), Reduce::sum);
  add(cut_over(c), Op::all_gather, own, c.dtype(), Reduce::none);
  return due;
}

// Every result of SGD is a multiple of lr decay, and of a share of that where a mean is taken or a
// scaled loss is unscaled: of so many of them at most. AdamW and a norm take roots.
std::optional<int64_t> integer_range(const Case& c) {
  const int64_t parts = ranks_with_gradients(c) * microbatches(c),
                mean = averaged(c) * int64_t(scale_of_loss(c));
  if (adamw(c) || clips(c) || (mean & (mean - 1)) != 0) return std::nullopt;
  const double decay = reading::number(c, "decay");
  const int64_t lr = std::llround(1 / reading::number(c, "lr")),
                share = decay > 0 ? std::llround(1 / decay) : 2;
  return range_of_products(c, mean * (lr * share + 1 + share / 2) + share * parts, 1);
}

std::vector<Key> keys() {
  return {
      extent("rows", "5", 1, "rows of the matrix w, elements of the bias b"),
      extent("hidden", "7", 1, "columns of w, elements of the gain gamma"),
      choice(
          "rule", "adamw", {"adamw", "sgd"},
          "adamw, betas 0.9 and 0.95, decay decoupled; sgd, momentum 1/2, decay in the gradient"),
      choice("shard", "all", {"all", "cp"},
             "ranks that the flat buffer is cut over: all, those of dp and cp; cp, and each of dp "
             "has a copy"),
      choice("reduce", "sum", {"sum", "mean", "mean_dp"},
             "what of the ranks' gradients is spent; mean_dp: the mean over dp of what is summed "
             "over cp, whose ranks have tokens of one loss"),
      extent("microbatches", "1", 1, "gradients that each rank adds up before they are reduced",
             16),
      choice("loss", "sum", {"sum", "mean"},
             "what of the microbatches' gradients is spent: the gradient of the sum of their "
             "losses, or of the mean"),
      choice("master", "kept", {"kept", "loaded"},
             "kept: masters are handed in; loaded: they begin as the parameters"),
      choice("state", "shards", {"shards", "whole"},
             "masters and moments are handed as own shards, or whole and cut by the subject"),
      step_keys::chosen("loss_scale", "off", {"off", "16", "1024"},
                        "gradients are of the loss times this, and are divided by it behind their "
                        "sum; off: there is no scaler, and nobody asks whether they are finite",
                        step_keys::powers_of_two),
      choice(
          "overflow", "off", {"off", "on"},
          "on: an element of one rank's gradient is infinite. No rank takes the step or gathers, "
          "all of them halve the scale"),
      choice("grows", "off", {"off", "on"},
             "on: the scale is doubled behind this step, where it is taken"),
      positive("clip", "", "gradients are scaled down to this norm; left out: they are not"),
      step_keys::step_size(),
      step_keys::decay("weight decay of matrices; vectors have none"),
      positive("eps", "0.001", "added to the root of the second moment"),
      extent("step", "3", 1,
             "number of this step, the first is 1: bias correction of the moments")};
}

std::vector<std::string> at_all_ranks() {
  return {"sharded_step",           "sharded_step dp=2",      "sharded_step dp=3",
          "sharded_step dp=4",      "sharded_step dp=8",      "sharded_step cp=4",
          "sharded_step dp=2 cp=2", "sharded_step dp=4 cp=2", "sharded_step dp=2 cp=2 shard=cp"};
}

std::vector<std::string> cases(const std::string& tier) {
  const auto smoke = crossed(
      {"sharded_step"}, {"dp=2", "dp=4 rule=sgd fill=integers", "dp=4 dtype=bf16 wire=f32 clip=1",
                         "dp=2 cp=2 reduce=mean rule=sgd fill=integers",
                         "dp=2 cp=2 shard=cp master=loaded dtype=bf16", "dp=2 state=whole",
                         "dp=2 cp=2 reduce=mean_dp microbatches=2 loss=mean rule=sgd fill=integers",
                         "dp=4 loss_scale=16 overflow=on master=loaded"});
  if (tier == "smoke") return smoke;
  const std::vector<std::string> some{"sharded_step dp=2", "sharded_step dp=4",
                                      "sharded_step dp=2 cp=2 shard=cp"};
  const auto ci = together(
      {smoke,
       crossed(at_all_ranks(),
               {"", "rule=sgd fill=integers", "dtype=f32 clip=1", "dtype=bf16 wire=f32"}),
       crossed({"sharded_step", "sharded_step dp=4", "sharded_step dp=8", "sharded_step dp=4 cp=2",
                "sharded_step dp=2 cp=2 shard=cp"},
               {"rule=sgd reduce=mean fill=integers", "rule=sgd reduce=mean dtype=f32"}),
       crossed(some,
               {"dtype=f16", "dtype=bf16", "dtype=bf16 wire=f32 master=loaded reduce=mean clip=2",
                "rule=sgd fill=integers dtype=bf16", "rule=sgd dtype=f32 fill=normal decay=0",
                "state=whole dtype=f32", "strides=transposed", "dtype=f32 step=1 decay=0",
                "clip=1000", "dtype=f32 fill=cancelling", "fill=large", "dtype=f32 eps=0.00000001",
                "dtype=f32 wire=bf16", "dtype=f32 acc=f64"}),
       {"sharded_step dp=4 cp=2 reduce=mean_dp microbatches=3 loss=mean",
        "sharded_step dp=2 cp=2 shard=cp reduce=mean_dp microbatches=2 dtype=f32",
        "sharded_step dp=2 cp=2 shard=cp order=dp,cp reduce=mean_dp rule=sgd fill=integers",
        "sharded_step dp=3 reduce=mean_dp microbatches=2 loss=mean clip=1 dtype=f32",
        "sharded_step cp=2 reduce=mean_dp microbatches=4 dtype=bf16 wire=f32",
        "sharded_step microbatches=2 rule=sgd fill=integers strides=transposed"},
       crossed({"sharded_step dp=2", "sharded_step dp=4 cp=2", "sharded_step dp=2 cp=2 shard=cp",
                "sharded_step tp=2 dp=2"},
               {"loss_scale=16 overflow=on master=loaded", "loss_scale=16 rule=sgd fill=integers",
                "loss_scale=1024 dtype=f16 wire=f32 grows=on",
                "loss_scale=16 overflow=on dtype=f16 master=loaded microbatches=2"}),
       {"sharded_step dp=4 loss_scale=1024 clip=1 dtype=f32",
        "sharded_step dp=3 loss_scale=1024 reduce=mean microbatches=2 loss=mean dtype=bf16 "
        "wire=f32",
        "sharded_step loss_scale=16 overflow=on master=loaded grows=on",
        "sharded_step dp=8 rows=1 hidden=1 loss_scale=16 overflow=on master=loaded rule=sgd "
        "fill=integers",
        "sharded_step dp=2 cp=2 order=dp,cp state=whole loss_scale=16 overflow=on master=loaded "
        "grows=on",
        "sharded_step tp=2 cp=2 loss_scale=16 overflow=on master=loaded rule=sgd dtype=bf16"},
       // 8, 5, 3 and 153 elements over 8 ranks: one each, ranks without any, one beyond a multiple.
       crossed({"sharded_step dp=8", "sharded_step dp=4 cp=2"},
               {"rows=2 hidden=2", "rows=1 hidden=2", "rows=1 hidden=1 rule=sgd fill=integers",
                "rows=1 hidden=2 dtype=bf16 wire=f32 clip=1", "rows=13 hidden=10"}),
       {"sharded_step dp=4 rows=1 hidden=1", "sharded_step dp=2 cp=2 order=dp,cp state=whole",
        "sharded_step dp=2 cp=2 order=dp,cp rule=sgd fill=integers", "sharded_step tp=2 dp=2",
        "sharded_step tp=2 dp=2 rule=sgd fill=integers master=loaded", "sharded_step dp=2 shard=cp",
        "sharded_step dp=3 shard=cp rule=sgd fill=integers",
        "sharded_step dp=3 shard=cp clip=1 dtype=f32",
        "sharded_step dp=2 cp=4 shard=cp reduce=mean dtype=f32",
        "sharded_step dp=3 reduce=mean rule=sgd dtype=f32", "sharded_step dp=2 step=1000000",
        "sharded_step dp=4 cp=2 shard=cp clip=1 state=whole order=dp,cp"}});
  if (tier != "nightly") return ci;
  return together(
      {ci, crossed({"sharded_step dp=8 rows=65 hidden=33", "sharded_step dp=5",
                    "sharded_step dp=3 cp=2 rows=31 hidden=50"},
                   {"", "rule=sgd fill=integers", "dtype=bf16 wire=f32 clip=1", "dtype=f16",
                    "dtype=bf16 reduce=mean master=loaded", "state=whole"})});
}

Contract sharded_step() {
  Contract c;
  c.name = "sharded_step";
  c.family = "sharded";
  c.summary =
      "gradients reduced to shards of a flat buffer, masters and moments stepped, parameters "
      "gathered";
  c.keys = keys();
  c.precondition = primitives::refused_sharded_step;
  c.operands = operands;
  c.forward = forward;
  c.traffic = traffic;
  c.integer_range = integer_range;
  c.cases = cases;
  c.illegal = {"sharded_step dp=2 ep=2",
               "sharded_step dp=2 pp=2",
               "sharded_step tp=2 dp=2 clip=1",
               "sharded_step dp=2 overflow=on",
               "sharded_step dp=2 grows=on",
               "sharded_step dp=2 loss_scale=16 overflow=on master=loaded clip=1",
               "sharded_step dp=2 loss_scale=16 overflow=on"};
  c.witnesses = {"sharded_step dp=2 clip=1", "sharded_step dp=3 clip=1",
                 "sharded_step dp=4 clip=1 seed=2", "sharded_step dp=2 cp=2 clip=1 seed=2",
                 "sharded_step dp=2 cp=2 shard=cp clip=1"};
  return c;
}

}  // namespace

void family_sharded_step(Registry& r) {
  r.add(sharded_step());
  add_ours<primitives::ShardedStep>(r, "sharded_step");
}

}  // namespace shardproof
