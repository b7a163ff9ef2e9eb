// Experts that are feed-forward blocks, of which each is cut over tp by its ffn dimension: rows
// that arrive over ep are gathered over tp and their results reduce-scattered, or, where the tokens
// are the same on tp, all-reduced. The activation rounds: bounds come from the running error of
// reference/expert_mlp.cpp.
#include <algorithm>
#include <string>

#include "fixtures/index_maps.hpp"
#include "oracle/check.hpp"
#include "oracle/registry.hpp"
#include "primitives/expert_mlp.hpp"
#include "reference/expert_mlp.hpp"
#include "suites/expert.hpp"
#include "suites/linear.hpp"
#include "suites/ours.hpp"
#include "suites/reading.hpp"
#include "suites/replicated.hpp"

namespace shardproof {
namespace {

using linears::crossed;
using linears::extent;
using linears::together;
using linears::whole;
using reference::Loss;
using reference::Values;
using replicated::gauge_of;
using replicated::rounding_of;

reference::ExpertMlpShape shape_of(const Case& c) {
  const auto activation = reference::activation_from(c.text("activation"));
  return {c.at("tokens"),
          c.at("topk"),
          c.at("experts"),
          c.at("hidden"),
          c.at("ffn"),
          activation.value_or(reference::Activation::silu),
          c.text("activation") == "swiglu"};
}

// ---- Operands

std::vector<Operand> operands(const Case& c) {
  const int64_t T = c.at("tokens"), k = c.at("topk"), h = c.at("hidden"), E = c.at("experts");
  const auto s = shape_of(c);
  const auto owners = [](const Placement& tp) {
    return Layout{{Axis::dp, I()}, {Axis::cp, I()}, {Axis::ep, S(0)}, {Axis::tp, tp}};
  };
  const Layout tokens = experts::tokens_on(c);
  const Placement rows = S(1, s.gated ? interleaved_map(2) : contiguous_map());
  return {{"x", Operand::input, {T, h}, tokens},
          experts::chosen_operand(c, tokens),
          {"probs", Operand::input, {T, k}, tokens},
          {"w1", Operand::parameter, {E, s.expert(0).width(), h}, owners(rows), true, 1},
          {"w2", Operand::parameter, {E, h, s.ffn}, owners(S(2)), true, 1},
          {"y", Operand::output, {T, h}, tokens, true, 0}};
}

// ---- Reference

reference::ExpertMlpInputs arguments(std::span<const Whole> in, const Values& weights) {
  return {in[0].value, in[1].value, weights, in[3].value, in[4].value};
}
Values weights_of(const Case& c, std::span<const Whole> in) {
  Values w = in[2].value;
  experts::drop(c, in[1], w);
  return w;
}

std::vector<Whole> forward(const Case& c, std::span<const Whole> in, std::vector<Gauge>* gauges) {
  const Values weights = weights_of(c, in);
  const auto a = arguments(in, weights);
  if (gauges) {
    const Precision p = precision_of(c, Declared{});
    *gauges = {gauge_of(
        reference::expert_mlp_loss(shape_of(c), a, rounding_of(c, p, c.ranks(Axis::tp))), p)};
  }
  return {whole(in[0].shape, reference::expert_mlp(shape_of(c), a))};
}

void append(Loss& all, const Loss& more) {
  all.error.insert(all.error.end(), more.error.begin(), more.error.end());
  all.magnitude.insert(all.magnitude.end(), more.magnitude.begin(), more.magnitude.end());
}
void add(Loss& sum, const Loss& more) {
  if (sum.error.empty()) sum = {Values(more.error.size()), Values(more.error.size())};
  for (size_t i = 0; i < more.error.size(); ++i)
    sum.error[i] += more.error[i], sum.magnitude[i] += more.magnitude[i];
}

// Of each group's tokens; copies of the experts are summed.
reference::ExpertMlpLosses backward_loss(const Case& c, const reference::ExpertMlpInputs& in,
                                         reference::In g, const Precision& p) {
  auto shape = shape_of(c);
  shape.tokens /= experts::groups(c);
  const auto of_rows = size_t(shape.tokens * shape.hidden),
             of_slots = size_t(shape.tokens * shape.choices);
  reference::ExpertMlpLosses all;
  for (size_t i = 0; i < size_t(experts::groups(c)); ++i) {
    const auto rows = [&](reference::In v) { return v.subspan(i * of_rows, of_rows); };
    const auto slots = [&](reference::In v) { return v.subspan(i * of_slots, of_slots); };
    const auto own = reference::expert_mlp_backward_loss(
        shape, {rows(in.x), slots(in.chosen), slots(in.probs), in.w1, in.w2}, rows(g),
        rounding_of(c, p, c.ranks(Axis::tp)));
    append(all.x, own.x), append(all.probs, own.probs);
    add(all.w1, own.w1), add(all.w2, own.w2);
  }
  const auto copies = rounding_of(c, p, experts::groups(c));
  all.w1 = reduced(std::move(all.w1), copies), all.w2 = reduced(std::move(all.w2), copies);
  return all;
}

std::vector<Whole> backward(const Case& c, std::span<const Whole> in, std::span<const Whole> cot,
                            std::vector<Gauge>* gauges) {
  const Values weights = weights_of(c, in);
  const auto a = arguments(in, weights);
  auto d = reference::expert_mlp_backward(shape_of(c), a, cot[0].value);
  experts::drop(c, in[1], d.probs);
  if (gauges) {
    const Precision p = precision_of(c, Declared{});
    auto loss = backward_loss(c, a, cot[0].value, p);
    experts::drop(c, in[1], loss.probs.error), experts::drop(c, in[1], loss.probs.magnitude);
    *gauges = {gauge_of(loss.x, p),
               {},
               gauge_of(loss.probs, p),
               gauge_of(loss.w1, p),
               gauge_of(loss.w2, p)};
  }
  return linears::listed(whole(in[0].shape, std::move(d.x)), Whole{},
                         whole(in[2].shape, std::move(d.probs)),
                         whole(in[3].shape, std::move(d.w1)), whole(in[4].shape, std::move(d.w2)));
}

// Sums of products of four integers are exact for the identity alone.
std::optional<int64_t> integer_range(const Case& c) {
  if (c.text("activation") != "identity") return {};
  const int64_t k = c.at("topk"), h = c.at("hidden"), f = c.at("ffn"),
                T = c.at("tokens") * c.at("microbatches");
  return linears::range_of_products(c, h * std::max({k * f, h * f, T}), 4);
}

// ---- Traffic

std::vector<Traffic> traffic(const Case& c, const std::string&, int rank) {
  const experts::Load load = experts::load_of(c, experts::routing(c, c.seed()), rank);
  const int64_t h = c.at("hidden"), s = experts::shares(c), tp = c.ranks(Axis::tp);
  const bool ep = c.ranks(Axis::ep) > 1;
  const DType own = c.dtype(), wire = linears::wire_of(c);
  std::vector<Traffic> due;
  const auto call = [&](Op op, const char* group, bool backward, int64_t count, DType type) {
    const bool sums = op == Op::all_reduce || op == Op::reduce_scatter;
    due.push_back({op, sums ? Reduce::sum : Reduce::none, group, backward, count, type});
  };
  if (c.at("capacity") == 0 && (ep || s > 1))
    call(Op::all_gather, s == 1 ? "ep" : ep ? "tp,ep" : "tp", false, c.at("experts"), DType::i64);
  for (const bool backward : {false, true}) {
    if (ep) call(Op::all_to_all, "ep", backward, load.sent * h, own);
    if (s > 1) call(Op::all_gather, "tp", backward, load.block * h, own);
    if (s > 1)
      call(Op::reduce_scatter, "tp", backward, s * load.block * h, wire);
    else if (tp > 1)
      call(Op::all_reduce, "tp", backward, load.rows * h, wire);
    if (ep) call(Op::all_to_all, "ep", backward, load.received * h, own);
  }
  const int64_t of_expert = (shape_of(c).expert(0).width() + c.at("ffn")) / tp * h;
  for (const Traffic& t : replicated::coalesced(c, reading::summed_axes(c, false),
                                                c.at("experts") / c.ranks(Axis::ep) * of_expert))
    due.push_back(t);
  return due;
}

std::vector<Gemm> gemms(const Case& c, int rank) {
  const auto rows = experts::own_rows(c, rank);
  const int64_t h = c.at("hidden"), tp = c.ranks(Axis::tp), f = c.at("ffn") / tp,
                width = shape_of(c).expert(0).width() / tp, first = experts::first_expert(c, rank);
  std::vector<Gemm> list;
  for (size_t e = 0; e < rows.size(); ++e) {
    const std::string of = " of expert " + std::to_string(first + int64_t(e));
    const int64_t n = rows[e];
    for (const Gemm& g :
         {Gemm{"Z1 = X W1^T" + of, false, n, width, h}, Gemm{"Z = A W2^T" + of, false, n, h, f},
          Gemm{"dW2 = G^T A" + of, true, h, f, n}, Gemm{"dA = G W2" + of, true, n, f, h},
          Gemm{"dW1 = dZ1^T X" + of, true, width, h, n},
          Gemm{"dX = dZ1 W1" + of, true, n, h, width}})
      list.push_back(g);
  }
  return list;
}

// ---- Keys and lines

std::vector<Key> keys() {
  Key act{"activation", "swiglu", "between the linears of an expert; gelu is the exact one"};
  act.choices = {"gelu", "gelu_tanh", "silu", "swiglu", "identity"};
  return {extent("tokens", "48", 1, "rows of x"),
          extent("hidden", "7", 1, "columns of x and y"),
          extent("ffn", "24", 1, "columns between the linears, cut over tp; swiglu: of each half"),
          act,
          experts::experts_key("experts; left out: three for each rank of ep"),
          experts::topk_key(),
          experts::route_key(),
          experts::capacity_key(),
          replicated::sp_key(),
          linears::microbatches_key()};
}

std::vector<std::string> cases(const std::string& tier) {
  const std::vector<std::string> head{"expert_mlp"};
  const auto smoke = crossed(head, {"tp=2 activation=identity fill=integers", "tp=2 ep=2",
                                    "tp=2 ep=2 sp=on", "tp=4 sp=on dtype=bf16"});
  if (tier == "smoke") return smoke;
  const std::vector<std::string> meshes{"expert_mlp tp=3 sp=on", "expert_mlp tp=2 ep=2 dp=2 sp=on",
                                        "expert_mlp tp=4 ep=2 sp=on", "expert_mlp tp=2 ep=4"};
  const auto ci = together(
      {smoke,
       crossed({"expert_mlp", "expert_mlp tp=2", "expert_mlp tp=8 sp=on", "expert_mlp ep=8"},
               {"", "activation=identity fill=integers"}),
       crossed(meshes, {"activation=gelu", "activation=identity fill=integers route=skewed",
                        "dtype=bf16", "capacity=2"}),
       crossed({"expert_mlp tp=2 ep=2 sp=on"},
               {"activation=identity fill=integers", "route=one topk=1",
                "route=skewed topk=3 dtype=f32", "dtype=f16", "activation=gelu_tanh dtype=f32",
                "activation=silu", "capacity=5 route=even", "strides=transposed",
                "strides=expanded_inputs", "order=ep,tp seed=2", "fill=cancelling",
                "dtype=bf16 wire=f32", "experts=8 tokens=8 microbatches=2"}),
       {"expert_mlp ep=2", "expert_mlp tp=2 ep=2 cp=2",
        "expert_mlp tp=2 ep=2 strides=transposed capacity=3",
        "expert_mlp tp=2 dp=2 sp=on dtype=bf16 grad=f32 microbatches=2"}});
  if (tier != "nightly") return ci;
  return together({ci, crossed(crossed(meshes, {"route=skewed topk=3", "route=one topk=3",
                                                "tokens=96 hidden=33 ffn=48"}),
                               {"dtype=f32", "dtype=f16", "activation=gelu seed=3",
                                "strides=transposed activation=silu"})});
}

Contract expert_mlp() {
  Contract c;
  c.name = "expert_mlp";
  c.family = "expert";
  c.summary = "tokens to feed-forward experts that tp cuts by their ffn dimension, and back";
  c.keys = keys();
  c.precondition = primitives::refused_experts;
  c.operands = operands;
  c.forward = forward;
  c.backward = backward;
  c.traffic = traffic;
  c.integer_range = integer_range;
  c.cases = cases;
  c.gemms = gemms;
  c.illegal = {"expert_mlp ep=2 experts=5",        "expert_mlp tp=4 ffn=10",
               "expert_mlp tp=2 sp=on tokens=9",   "expert_mlp tp=2 ep=2 experts=4 topk=5",
               "expert_mlp ep=2 dp=2 tokens=6",    "expert_mlp ep=2 pp=2",
               "expert_mlp tp=2 sp=on capacity=25"};
  c.witnesses = {"expert_mlp tp=2", "expert_mlp tp=3 sp=on route=even", "expert_mlp tp=2 ep=2",
                 "expert_mlp tp=2 ep=2 sp=on"};
  return c;
}

}  // namespace

void family_expert_mlp(Registry& r) {
  r.add(expert_mlp());
  add_ours<primitives::ExpertMlp>(r, "expert_mlp");
}

}  // namespace shardproof
