// The block family: norm, column, activation, row, residual, norm, residual, with dropout by global
// index. Every parameter's gradient is judged; bounds come from the running error of the whole
// chain.
#include "reference/block.hpp"

#include <algorithm>
#include <cmath>

#include "fixtures/random.hpp"
#include "oracle/registry.hpp"
#include "primitives/block.hpp"
#include "suites/ours.hpp"
#include "suites/reading.hpp"
#include "suites/replicated.hpp"

namespace shardproof {
namespace {

using namespace linears;
using namespace replicated;
using reference::Values;

bool centred(const Case& c) { return c.text("norm") == "layer"; }

reference::BlockShape shape_of(const Case& c) {
  reference::BlockShape s;
  s.tokens = c.at("tokens"), s.hidden = c.at("hidden"), s.ffn = c.at("ffn");
  s.activation =
      reference::activation_from(c.text("activation")).value_or(reference::Activation::gelu);
  s.norm = {s.hidden, reading::norm_eps, centred(c), !offset_data(c)};
  return s;
}

std::vector<Operand> operands(const Case& c) {
  const int64_t h = c.at("hidden"), f = c.at("ffn");
  const auto x = token_shape(c, h);
  const Layout tokens = tokens_on(tokens_on_tp(c)), copies = parameter_on(I());
  std::vector<Operand> list{{"x", Operand::input, x, tokens, true, last(x)}};
  auto parameter = [&](const char* name, std::vector<int64_t> shape, const Layout& layout) {
    list.push_back({name, Operand::parameter, std::move(shape), layout});
  };
  parameter("norm1.gamma", {h}, copies);
  if (centred(c)) parameter("norm1.beta", {h}, copies);
  parameter("w1", {f, h}, parameter_on(S(0)));
  parameter("b1", {f}, parameter_on(S(0)));
  parameter("w2", {h, f}, parameter_on(S(1)));
  parameter("b2", {h}, copies);
  parameter("norm2.gamma", {h}, copies);
  if (centred(c)) parameter("norm2.beta", {h}, copies);
  list.push_back({"y", Operand::output, x, tokens, true, 0});
  return list;
}

// 0 or 1/keep by the global index of the element, as the line's seed and draw say.
Values dropout(const Case& c, uint32_t site) {
  Values factor(size_t(c.at("tokens") * c.at("hidden")), 1.0);
  const double keep = reading::kept_share(c), limit = keep * 0x1p32;
  if (keep == 1) return factor;
  const uint64_t seed = c.seed();
  for (size_t i = 0; i < factor.size(); ++i) {
    const uint64_t block = i / 4;
    const auto words =
        philox({uint32_t(block), uint32_t(block >> 32), site, uint32_t(c.at("draw"))},
               {uint32_t(seed), uint32_t(seed >> 32)});
    factor[i] = words[i % 4] < limit ? 1 / keep : 0;
  }
  return factor;
}

// Each mask by itself: with a second linear of zeros, m = b2 and norm2(r) = beta2 (without beta
// gamma2, but for eps), so that y = 1 + mask where one of the two is 1 and the other 0.
std::vector<Drawn> drawn(const Case& c) {
  const double keep = std::ceil(reading::kept_share(c) * 0x1p32) * 0x1p-32;
  if (keep == 1) return {};
  const double bits = -std::log2(keep * keep + (1 - keep) * (1 - keep));
  const auto mask = [&](const char* name, double first, double second) {
    Drawn d{name, "y", {{"x", 1}, {"b2", first}, {"norm2.gamma", second}}, bits};
    for (const char* zero : {"norm1.gamma", "w1", "b1", "w2"}) d.given.emplace_back(zero, 0);
    if (centred(c))
      d.given.emplace_back("norm1.beta", 0), d.given.emplace_back("norm2.beta", second);
    return d;
  };
  return {mask("dropout1.mask", 1, 0), mask("dropout2.mask", 0, 1)};
}

struct Arguments {
  Values dropout1, dropout2;
  reference::BlockInputs in;

  Arguments(const Case& c, std::span<const Whole> w)
      : dropout1(dropout(c, 1)), dropout2(dropout(c, 2)) {
    size_t next = 0;
    in.x = w[next++].value, in.gamma1 = w[next++].value;
    if (centred(c)) in.beta1 = w[next++].value;
    in.w1 = w[next++].value, in.b1 = w[next++].value;
    in.w2 = w[next++].value, in.b2 = w[next++].value, in.gamma2 = w[next++].value;
    if (centred(c)) in.beta2 = w[next++].value;
    in.dropout1 = dropout1, in.dropout2 = dropout2;
  }
  Arguments(const Arguments&) = delete;
};

// Parts in the order of the operands.
template <class T>
std::vector<T> in_order(const Case& c, reference::BlockParts<T> d) {
  std::vector<T> list{std::move(d.x), std::move(d.gamma1)};
  if (centred(c)) list.push_back(std::move(d.beta1));
  for (T* part : {&d.w1, &d.b1, &d.w2, &d.b2, &d.gamma2}) list.push_back(std::move(*part));
  if (centred(c)) list.push_back(std::move(d.beta2));
  return list;
}

std::vector<Whole> forward(const Case& c, std::span<const Whole> in, std::vector<Gauge>* gauges) {
  const auto s = shape_of(c);
  const Arguments a(c, in);
  if (gauges) {
    const Precision p = precision_of(c, Declared{});
    *gauges = {gauge_of(reference::block_loss(s, a.in, rounding_of(c, p, c.ranks(Axis::tp))), p)};
  }
  return listed(whole(in[0].shape, reference::block(s, a.in)));
}

std::vector<Whole> backward(const Case& c, std::span<const Whole> in, std::span<const Whole> cot,
                            std::vector<Gauge>* gauges) {
  const auto s = shape_of(c);
  const Arguments a(c, in);
  std::vector<Whole> out;
  for (Values& v : in_order(c, reference::block_backward(s, a.in, cot[0].value)))
    out.push_back(whole(in[out.size()].shape, std::move(v)));
  if (!gauges) return out;
  const Precision p = precision_of(c, Declared{});
  gauges->clear();
  for (const auto& loss :
       in_order(c, reference::block_backward_loss(s, a.in, cot[0].value,
                                                  rounding_of(c, p, c.ranks(Axis::tp)))))
    gauges->push_back(gauge_of(loss, p));
  return out;
}

std::vector<Traffic> traffic(const Case& c, const std::string&, int) {
  const Local l(c);
  std::vector<Traffic> due;
  if (l.p == 1) return due;
  const int64_t n = l.tokens * c.at("hidden");
  const DType own = c.dtype(), wire = wire_of(c);
  const Op leave = l.sp ? Op::reduce_scatter : Op::all_reduce;
  if (l.sp) due.push_back(call(Op::all_gather, false, n / l.p, own));  // u
  due.push_back(call(leave, false, n, wire));                          // m
  if (l.sp) due.push_back(call(Op::all_gather, true, n / l.p, own));   // dm
  if (l.sp) due.push_back(call(Op::all_gather, true, n / l.p, own));   // u again, for dW1
  due.push_back(call(leave, true, n, wire));                           // du
  for (const Traffic& t :
       coalesced(c, reading::axes_of_block(c), c.at("hidden") * (centred(c) ? 5 : 3)))
    due.push_back(t);
  return due;
}

std::vector<Gemm> gemms(const Case& c, int) {
  const Local l(c);
  const int64_t T = l.tokens, h = c.at("hidden"), f = c.at("ffn") / l.p;
  return {{"Z = U W1^T", false, T, f, h},  {"M = A W2^T", false, T, h, f},
          {"dA = dM W2", true, T, f, h},   {"dW2 = dM^T A", true, h, f, T},
          {"dW1 = dZ^T U", true, f, h, T}, {"dU = dZ W1", true, T, h, f}};
}

// A step has samples = microbatch x microbatches x dp, rows of x here; tp and cp do not count.
std::vector<Key> keys() {
  std::vector<Key> list = token_keys();
  list[0].derive = [rows = list[0].derive](const Case& c) {
    if (c.at("samples") == 0) return rows(c);
    return std::to_string(std::max<int64_t>(1, c.at("samples") / c.at("microbatches")));
  };
  list.push_back(extent("hidden", "10", 1, "features of x and y"));
  list.push_back(extent("ffn", "48", 1, "columns between the linears"));
  Key act{"activation", "gelu", "between the linears; gelu is the exact one"};
  act.choices = {"gelu", "gelu_tanh", "silu", "identity"};
  list.push_back(act);
  list.push_back(norm_key());
  list.push_back(share("dropout", "0.1", "share of elements that are set to zero, at two places"));
  Key draw = extent("draw", "0", 0, "number of the draw: step * microbatches + microbatch");
  draw.high = (int64_t(1) << 32) - 1;
  list.push_back(draw);
  list.push_back(sp_key());
  list.push_back(microbatches_key());
  list.push_back(extent("samples", "0", 0,
                        "rows of a step, all dp ranks and microbatches; 0: tokens * microbatches"));
  return list;
}

std::vector<std::string> cases(const std::string& tier) {
  const auto smoke = crossed(
      {"block"}, {"tp=2", "tp=2 sp=on", "tp=4 sp=on", "tp=4 sp=on norm=rms", "tp=2 dp=2 sp=on",
                  "tp=2 sp=on microbatches=2", "tp=2 sp=on dtype=bf16", "tp=4 sp=on dtype=f32"});
  if (tier == "smoke") return smoke;
  const auto ci = together(
      {smoke,
       crossed({"block", "block tp=3", "block tp=4", "block tp=8"},
               {"", "sp=on", "sp=on norm=rms activation=silu"}),
       crossed({"block tp=3 sp=on", "block tp=8 sp=on"},
               {"dtype=f32", "dtype=f32 wire=f64", "dropout=0", "dropout=0.5 draw=7",
                "activation=gelu_tanh", "strides=transposed", "dtype=f32 fill=cancelling",
                "dtype=f32 fill=offset"}),
       crossed({"block tp=2 cp=2 sp=on", "block tp=4 dp=2 sp=on", "block tp=2 dp=4 sp=on",
                "block tp=2 cp=2 dp=2 sp=on order=cp,tp"},
               {"", "norm=rms", "microbatches=2 dtype=f32"}),
       crossed({"block tp=2 sp=on"}, {"seq=8 batch=3", "activation=identity dropout=0", "dtype=f16",
                                      "seed=4294967299", "activation=silu fill=large"}),
       {"block tp=2 dp=2", "block tp=2 cp=2"},
       // So few terms that a half type's bound leaves little open.
       {"block hidden=3 ffn=2 dropout=0 activation=identity dtype=bf16",
        "block hidden=4 ffn=4 dropout=0 dtype=bf16", "block tp=2 sp=on hidden=2 ffn=2 dtype=f16"}});
  if (tier != "nightly") return ci;
  return together({ci, crossed({"block tp=8 sp=on tokens=96 hidden=50 ffn=240", "block tp=6 sp=on",
                                "block tp=5 sp=on tokens=40 ffn=50"},
                               {"", "dtype=f32", "norm=rms seed=2"})});
}

Contract block() {
  Contract c;
  c.name = "block";
  c.family = "block";
  c.summary = "norm, column, activation, row, residual, norm, residual, dropout by global index";
  c.keys = keys();
  c.precondition = primitives::refused_block;
  c.operands = operands;
  c.forward = forward;
  c.backward = backward;
  c.traffic = traffic;
  c.integer_range = [](const Case&) { return std::optional<int64_t>(); };
  c.cases = cases;
  c.drawn = drawn;
  c.draw_key = "draw";
  c.gemms = gemms;
  c.illegal = {"block tp=4 ffn=10",
               "block tp=2 seq=8 batch=3 tokens=20",
               "block tp=4 sp=on tokens=10",
               "block tp=2 sp=on seq=3 batch=2",
               "block tp=2 ep=2",
               "block dp=4 microbatches=2 samples=18",
               "block dp=2 tokens=8 samples=16"};
  c.witnesses = {"block tp=2 sp=on", "block tp=3 sp=on", "block tp=4 sp=on",
                 "block tp=2 dp=2 sp=on"};
  return c;
}

}  // namespace

void family_block(Registry& r) {
  r.add(block());
  add_ours<primitives::Block>(r, "block");
}

}  // namespace shardproof
