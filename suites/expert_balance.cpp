// Load balance of a router whose tokens are cut over ranks: a product of two sums over all ranks.
#include <algorithm>
#include <limits>
#include <optional>

#include "fixtures/fills.hpp"
#include "oracle/check.hpp"
#include "oracle/registry.hpp"
#include "primitives/expert_balance.hpp"
#include "reference/expert.hpp"
#include "reference/running_error.hpp"
#include "suites/expert.hpp"
#include "suites/linear.hpp"
#include "suites/ours.hpp"
#include "suites/reading.hpp"
#include "suites/replicated.hpp"

namespace shardproof {
namespace {

using linears::crossed;
using linears::extent;
using linears::loss_type;
using linears::together;
using linears::whole;

std::vector<Axis> axes_of_tokens(const Case& c) {
  std::vector<Axis> axes;
  for (const auto& [axis, cuts] :
       {std::pair(Axis::tp, c.on("sp")), {Axis::cp, true}, {Axis::ep, true}, {Axis::dp, true}})
    if (cuts && c.ranks(axis) > 1) axes.push_back(axis);
  return axes;
}

// A loss is kept in f32 at least.
std::vector<Operand> operands(const Case& c) {
  const int64_t T = c.at("tokens");
  const Layout tokens{
      {Axis::dp, S(0)}, {Axis::cp, S(0)}, {Axis::ep, S(0)}, {Axis::tp, c.on("sp") ? S(0) : I()}},
      one{{Axis::dp, I()}, {Axis::cp, I()}, {Axis::ep, I()}, {Axis::tp, I()}};
  Operand loss{"loss", Operand::output, {1}, one};
  loss.dtype_override = loss_type(c), loss.fixed_dtype = true;
  return {{"probs", Operand::input, {T, c.at("experts")}, tokens},
          experts::chosen_operand(c, tokens),
          loss};
}

reference::BalanceShape shape_of(const Case& c) {
  return {c.at("tokens"), c.at("topk"), c.at("experts")};
}

double bound_of(const Case& c, double terms, double magnitude) {
  const Precision p = precision_of(c, Declared{});
  return reference::gamma_of(terms, p.u_acc + unit_roundoff(DType::f64)) * magnitude / p.u_acc;
}

// A term is rounded by the additions over the own tokens, its product, the additions over experts
// and those over ranks.
std::vector<Whole> forward(const Case& c, std::span<const Whole> in, std::vector<Gauge>* gauges) {
  if (gauges) {
    const int64_t ranks = replicated::ranks_of(c, axes_of_tokens(c)),
                  terms = c.at("tokens") / ranks + 1 + c.at("experts") + ranks;
    Gauge g;
    g.magnitude = {reference::balance(shape_of(c), reference::absolute(in[0].value), in[1].value)};
    g.bound = {bound_of(c, double(terms), g.magnitude[0])};
    *gauges = {g};
  }
  return {whole({1}, {reference::balance(shape_of(c), in[0].value, in[1].value)})};
}

// One product.
std::vector<Whole> backward(const Case& c, std::span<const Whole> in, std::span<const Whole> cot,
                            std::vector<Gauge>* gauges) {
  auto d = reference::balance_backward(shape_of(c), in[1].value, cot[0].value[0]);
  if (gauges) {
    Gauge g;
    g.magnitude = reference::absolute(d);
    for (double m : g.magnitude) g.bound.push_back(bound_of(c, 1, m));
    *gauges = {g, {}};
  }
  return {whole(in[0].shape, std::move(d)), {}};
}

std::vector<Traffic> traffic(const Case& c, const std::string&, int) {
  const auto axes = axes_of_tokens(c);
  if (axes.empty()) return {};
  const std::string group = reading::label(axes);
  const DType type = linears::accumulation_of(c);
  return {{Op::all_reduce, Reduce::sum, group, false, c.at("experts"), type},
          {Op::all_reduce, Reduce::sum, group, false, 1, type}};
}

// Where all tokens choose the same experts, a rank counts 257 and all of them 1028: neither is a
// number of bf16, or of 8 bits.
std::vector<std::string> cases(const std::string& tier) {
  const auto smoke =
      crossed({"expert_balance"}, {"ep=2", "ep=4 route=skewed", "tp=2 dp=2 sp=on", "tp=2 ep=2",
                                   "cp=2 ep=2 tokens=1028 route=one dtype=bf16 fill=normal"});
  if (tier == "smoke") return smoke;
  const auto ci = together(
      {smoke,
       crossed({"expert_balance", "expert_balance ep=2", "expert_balance dp=3",
                "expert_balance ep=4", "expert_balance ep=8", "expert_balance tp=2 cp=2 ep=2 sp=on",
                "expert_balance tp=2 ep=2 dp=2 order=dp,ep"},
               {"", "route=one topk=3", "route=even fill=normal", "dtype=f32 fill=normal",
                "dtype=bf16 fill=normal", "strides=transposed"}),
       crossed({"expert_balance ep=4"},
               {"dtype=f16 fill=normal", "strides=expanded", "strides=expanded_inputs", "seed=2",
                "tokens=4 topk=1", "topk=6", "fill=cancelling", "dtype=f32 fill=large",
                "tokens=1024 experts=33 dtype=f32 fill=normal"})});
  if (tier != "nightly") return ci;
  return together({ci,
                   crossed({"expert_balance ep=6", "expert_balance tp=2 ep=4 sp=on tokens=480"},
                           {"route=skewed", "dtype=f32 fill=normal experts=65", "topk=4 seed=3"}),
                   {"expert_balance ep=6 dtype=f16 fill=normal"}});
}

Contract expert_balance() {
  Contract c;
  c.name = "expert_balance";
  c.family = "expert";
  c.summary = "load balance of a router: the sum over experts of their choices times their probs";
  c.linear = true;
  c.keys = {extent("tokens", "48", 1, "rows of probs"),
            extent("experts", "6", 1, "columns of probs"), experts::topk_key(),
            experts::route_key(), replicated::sp_key()};
  c.precondition = primitives::refused_balance;
  c.operands = operands;
  c.forward = forward;
  c.backward = backward;
  c.traffic = traffic;
  // T E terms, each a prob times at most T; T^2 alone is below 2^49.
  c.integer_range = [](const Case& line) -> std::optional<int64_t> {
    const int64_t square = line.at("tokens") * line.at("tokens"), experts = line.at("experts");
    if (square > std::numeric_limits<int64_t>::max() / experts) return std::nullopt;
    return linears::range_of_products(line, square * experts, 1);
  };
  c.cases = cases;
  c.illegal = {"expert_balance ep=4 tokens=10", "expert_balance tp=2 sp=on tokens=9",
               "expert_balance ep=2 topk=7", "expert_balance ep=2 dp=2 tokens=6",
               "expert_balance ep=2 pp=2"};
  c.witnesses = {"expert_balance ep=2", "expert_balance ep=3", "expert_balance ep=4",
                 "expert_balance tp=2 ep=2"};
  return c;
}

}  // namespace

void family_expert_balance(Registry& r) {
  r.add(expert_balance());
  add_ours<primitives::ExpertBalance>(r, "expert_balance");
}

}  // namespace shardproof
