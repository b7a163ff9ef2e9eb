// The MLP of the linear family: Y = norm(act(X W1^T + b1)) W2^T + b2, W1 cut by rows and W2 by
// columns over tp, so that it communicates at its borders only. Its activation rounds: bounds come
// from the running error of reference/mlp_bound.cpp.
#include <fmt/format.h>

#include <algorithm>

#include "fixtures/fills.hpp"
#include "fixtures/index_maps.hpp"
#include "oracle/check.hpp"
#include "oracle/registry.hpp"
#include "primitives/linear_line.hpp"
#include "primitives/mlp.hpp"
#include "reference/mlp.hpp"
#include "suites/linear.hpp"
#include "suites/ours.hpp"
#include "suites/replicated.hpp"

namespace shardproof {
namespace {

using namespace linears;
using reference::MlpInputs;
using reference::MlpShape;

bool gated(const Case& c) { return c.text("activation") == "swiglu"; }
bool normalised(const Case& c) { return c.text("between") != "none"; }

MlpShape shape_of(const Case& c) {
  MlpShape s;
  s.tokens = c.at("tokens"), s.hidden = c.at("hidden"), s.ffn = c.at("ffn");
  s.gated = gated(c);
  s.normalised = normalised(c);
  s.activation =
      reference::activation_from(c.text("activation")).value_or(reference::Activation::silu);
  s.eps = 1e-6;
  return s;
}

// ---- Operands x, w1, [b1], [gamma], w2, [b2]

std::vector<Operand> operands(const Case& c) {
  const MlpShape s = shape_of(c);
  const auto x = token_shape(c, s.hidden);
  const Placement tokens = c.on("sp") ? S(0) : I(),
                  rows = c.on("whole_weight")
                             ? R()
                             : S(0, gated(c) ? interleaved_map(2) : contiguous_map());
  std::vector<Operand> list{
      {"x", Operand::input, x, tokens_on(tokens), true, last(x)},
      {"w1", Operand::parameter, {s.width(), s.hidden}, parameter_on(rows), true, 0}};
  if (c.on("bias")) list.push_back({"b1", Operand::parameter, {s.width()}, parameter_on(rows)});
  if (normalised(c)) list.push_back({"gamma", Operand::parameter, {s.ffn}, parameter_on(S(0))});
  list.push_back({"w2", Operand::parameter, {s.hidden, s.ffn}, parameter_on(S(1)), true, 1});
  if (c.on("bias")) list.push_back({"b2", Operand::parameter, {s.hidden}, parameter_on(I())});
  list.push_back({"y", Operand::output, x, tokens_on(tokens), true, 0});
  return list;
}

MlpInputs arguments(const Case& c, std::span<const Whole> in) {
  MlpInputs a;
  size_t next = 0;
  a.x = in[next++].value;
  a.w1 = in[next++].value;
  if (c.on("bias")) a.b1 = in[next++].value;
  if (normalised(c)) a.gamma = in[next++].value;
  a.w2 = in[next++].value;
  if (c.on("bias")) a.b2 = in[next++].value;
  return a;
}

// The parts of a result that belong to the operands of the line, in their order.
template <class Part, class All>
std::vector<Part> in_order(const Case& c, All& all) {
  std::vector<Part> list{std::move(all.x), std::move(all.w1)};
  if (c.on("bias")) list.push_back(std::move(all.b1));
  if (normalised(c)) list.push_back(std::move(all.gamma));
  list.push_back(std::move(all.w2));
  if (c.on("bias")) list.push_back(std::move(all.b2));
  return list;
}

// ---- Bounds

using replicated::gauge_of;

reference::Rounding rounding_of(const Case& c, const Precision& p) {
  return replicated::rounding_of(c, p, c.ranks(Axis::tp));
}

std::vector<Whole> forward(const Case& c, std::span<const Whole> in, std::vector<Gauge>* gauges) {
  const MlpShape s = shape_of(c);
  const MlpInputs a = arguments(c, in);
  if (gauges) {
    const Precision p = precision_of(c, Declared{});
    *gauges = {gauge_of(reference::mlp_loss(s, a, rounding_of(c, p)), p)};
  }
  return listed(whole(in[0].shape, reference::mlp(s, a)));
}

std::vector<Whole> backward(const Case& c, std::span<const Whole> in, std::span<const Whole> cot,
                            std::vector<Gauge>* gauges) {
  const MlpShape s = shape_of(c);
  const MlpInputs a = arguments(c, in);
  const std::vector<double>& g = cot[0].value;
  auto gradients = reference::mlp_backward(s, a, g);
  std::vector<Whole> out;
  for (auto& value : in_order<reference::Values>(c, gradients))
    out.push_back(whole(in[out.size()].shape, std::move(value)));
  if (!gauges) return out;
  const Precision p = precision_of(c, Declared{});
  auto losses = reference::mlp_backward_loss(s, a, g, rounding_of(c, p));
  gauges->clear();
  for (const auto& loss : in_order<reference::Loss>(c, losses))
    gauges->push_back(gauge_of(loss, p));
  return out;
}

// Sums of products of three or more integers are exact for the identity alone: |Z| <= (h+1) B^2,
// |Y| <= f (h+1) B^3 + B, the gradients alike.
std::optional<int64_t> integer_range(const Case& c) {
  if (c.text("activation") != "identity" || normalised(c)) return {};
  const int64_t T = c.at("tokens") * c.at("microbatches"), h = c.at("hidden") + 1, f = c.at("ffn");
  return range_of_products(c, std::max({f * h + 1, T * h}), 3);
}

// ---- Traffic: the borders, and T statistics each way where a norm needs them

std::vector<Traffic> traffic(const Case& c, const std::string&, int) {
  const Local l(c);
  std::vector<Traffic> due;
  if (l.p == 1) return due;
  const int64_t n = l.tokens * c.at("hidden");
  const DType own = c.dtype(), wire = wire_of(c);
  const Traffic leaving = call(l.sp ? Op::reduce_scatter : Op::all_reduce, false, n, wire),
                statistics = call(Op::all_reduce, false, l.tokens, accumulation_of(c));
  auto backward = [](Traffic t) {
    t.backward = true;
    return t;
  };
  if (l.sp) due.push_back(call(Op::all_gather, false, n / l.p, own));
  if (normalised(c)) due.push_back(statistics);
  due.push_back(leaving);
  if (l.sp) due.push_back(call(Op::all_gather, true, n / l.p, own));  // dY
  if (l.sp && c.on("bias")) due.push_back(call(Op::all_reduce, true, c.at("hidden"), wire));
  if (normalised(c)) due.push_back(backward(statistics));
  if (l.sp) due.push_back(call(Op::all_gather, true, n / l.p, own));  // X again, for dW1
  due.push_back(backward(leaving));
  return due;
}

std::vector<Gemm> gemms(const Case& c, int) {
  const Local l(c);
  const MlpShape s = shape_of(c);
  const int64_t T = l.tokens, h = s.hidden, f = s.ffn / l.p, width = s.width() / l.p;
  return {{"Z = X W1^T", false, T, width, h},  {"Y = N W2^T", false, T, h, f},
          {"dN = dY W2", true, T, f, h},       {"dW2 = dY^T N", true, h, f, T},
          {"dW1 = dZ^T X", true, width, h, T}, {"dX = dZ W1", true, T, h, width}};
}

// ---- Keys and cases

std::vector<Key> keys() {
  std::vector<Key> list = token_keys();
  list.push_back(extent("hidden", "10", 1, "features of x and y"));
  list.push_back(extent("ffn", "48", 1, "columns between the linears; swiglu: of gate and of up"));
  Key act{"activation", "gelu", "between the linears; gelu is the exact one"};
  act.choices = {"gelu", "gelu_tanh", "silu", "swiglu", "identity"};
  list.push_back(act);
  Key between{"between", "none",
              "after the activation; norm_reduced: RMS norm, statistics summed, eps 1e-6"};
  between.choices = {"none", "norm_reduced", "norm", "softmax", "topk"};
  list.push_back(between);
  list.push_back(toggle("bias", "on", "b1 and b2"));
  list.push_back(
      toggle("sp", "off", "sequence parallel: tokens are cut over tp outside the layer"));
  list.push_back(
      toggle("whole_weight", "off", "w1 and b1 are handed whole and cut by the subject"));
  list.push_back(microbatches_key());
  return list;
}

std::vector<std::string> cases(const std::string& tier) {
  const auto smoke = together(
      {crossed({"mlp"}, {"tp=2", "tp=4", "tp=2 sp=on", "tp=4 sp=on", "tp=2 activation=swiglu",
                         "tp=4 sp=on activation=swiglu dtype=bf16", "tp=2 dp=2 sp=on",
                         "tp=4 activation=gelu_tanh dtype=f32"}),
       crossed({"mlp tp=2"}, {"activation=silu sp=on", "between=norm_reduced",
                              "activation=identity fill=integers",
                              "seq=8 batch=3 sp=on activation=swiglu bias=off"})});
  if (tier == "smoke") return smoke;
  const std::vector<std::string> ranks{"mlp", "mlp tp=2", "mlp tp=3", "mlp tp=4", "mlp tp=8"};
  const std::vector<std::string> activations{"", "activation=gelu_tanh", "activation=silu",
                                             "activation=swiglu"};
  const auto ci = together(
      {smoke,
       crossed(crossed(ranks, {"", "sp=on"}), activations),
       crossed(crossed({"mlp tp=2", "mlp tp=8 sp=on"}, activations),
               {"dtype=f32", "dtype=bf16", "dtype=f16"}),
       crossed(crossed(ranks, {"hidden=2 ffn=24 activation=identity fill=integers"}),
               {"", "dtype=f32", "dtype=bf16", "dtype=bf16 sp=on"}),
       crossed({"mlp tp=3", "mlp tp=4 sp=on"},
               {"between=norm_reduced", "between=norm_reduced dtype=f32 activation=swiglu",
                "between=norm_reduced dtype=bf16", "activation=identity dtype=f32",
                "dtype=bf16 wire=f32", "dtype=f32 acc=f64", "bias=off", "fill=cancelling",
                "whole_weight=on activation=swiglu", "whole_weight=on", "seq=24 batch=2",
                "microbatches=2", "microbatches=2 dtype=bf16 grad=f32",
                "activation=swiglu strides=transposed", "between=norm_reduced strides=transposed"}),
       crossed({"mlp tp=2 dp=2", "mlp tp=4 dp=2", "mlp tp=2 dp=4", "mlp tp=2 cp=2 dp=2"},
               {"activation=swiglu", "sp=on"}),
       {"mlp tp=2 activation=silu fill=large", "mlp tp=2 dp=2 between=norm_reduced",
        "mlp tp=2 between=norm_reduced bias=off",
        "mlp tp=2 whole_weight=on activation=swiglu microbatches=2"}});
  if (tier != "nightly") return ci;
  return together({ci, crossed(crossed(crossed(ranks, {"", "sp=on"}), activations),
                               {"between=norm_reduced", "dtype=f32", "dtype=bf16 wire=f32",
                                "tokens=96 hidden=50 ffn=240", "dtype=f32 seed=2"})});
}

Contract mlp() {
  Contract c;
  c.name = "mlp";
  c.family = "linear";
  c.summary = "feed-forward block, W1 cut by rows and W2 by columns over tp";
  c.keys = keys();
  c.precondition = primitives::refused_mlp;
  c.operands = operands;
  c.forward = forward;
  c.backward = backward;
  c.traffic = traffic;
  c.integer_range = integer_range;
  c.cases = cases;
  c.gemms = gemms;
  c.illegal = {"mlp tp=2 sp=on seq=3 batch=2",
               "mlp tp=4 ffn=10",
               "mlp tp=4 sp=on tokens=10",
               "mlp tp=2 between=norm",
               "mlp tp=2 between=softmax",
               "mlp tp=2 between=topk",
               "mlp tp=2 ep=2",
               "mlp tp=2 seq=8 batch=3 tokens=20"};
  // At p = 2 the norm: at larger p a sum in each rank's own order would reach no replicated result
  // through its statistics, which every rank uses on its own columns.
  c.witnesses = {"mlp tp=2 between=norm_reduced", "mlp tp=3 sp=on",
                 "mlp tp=4 sp=on activation=swiglu", "mlp tp=2 dp=2 activation=swiglu"};
  return c;
}

}  // namespace

void family_mlp(Registry& r) {
  r.add(mlp());
  add_ours<primitives::Mlp>(r, "mlp");
}

}  // namespace shardproof
