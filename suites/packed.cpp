// What depends on where documents begin: rotary positions, the loss of next-token prediction, and
// the exchange of rows between a loader's blocks and a balanced layout.
#include <fmt/format.h>

#include <algorithm>

#include "fixtures/fills.hpp"
#include "oracle/check.hpp"
#include "oracle/registry.hpp"
#include "primitives/loss_packed.hpp"
#include "primitives/rotary_context.hpp"
#include "primitives/zigzag_exchange.hpp"
#include "reference/loss.hpp"
#include "reference/rotary.hpp"
#include "suites/attention.hpp"
#include "suites/linear.hpp"
#include "suites/ours.hpp"
#include "suites/reading.hpp"

namespace shardproof {
namespace {

using namespace contexts;
using linears::crossed;
using linears::extent;
using linears::loss_type;
using linears::together;

// A bound of the family in unit roundoffs of the accumulation; the reference rounds too.
double unit_of(const Case& c) { return precision_of(c, Declared{}).u_acc; }
double accumulation_of(const Case& c) { return unit_of(c) + unit_roundoff(DType::f64); }

Gauge gauge_of(const Case& c, const reference::Values& bound) {
  Gauge g;
  for (double b : bound) g.bound.push_back(b / unit_of(c));
  return g;
}

// ---- Rotary positions

double base_of(const Case& c) { return reading::number(c, "base", 10000); }
reference::Rotary rotary_of(const Case& c) { return {c.at("heads"), c.at("head_dim"), base_of(c)}; }
std::vector<int64_t> positions_of(const Case& c) {
  std::vector<int64_t> list;
  for (const PackedToken& t : labels_of(c, false)) list.push_back(t.position);
  return list;
}

std::vector<Operand> rotary_operands(const Case& c) {
  const auto shape = token_shape(c, false, {c.at("heads"), c.at("head_dim")});
  const Layout layout = tokens_on(c, S(c.at("seq") > 0 ? 2 : 1));
  return {{"x", Operand::input, shape, layout}, {"y", Operand::output, shape, layout}};
}

std::vector<Key> rotary_keys() {
  std::vector<Key> keys = token_keys("48");
  keys.push_back(extent("heads", "6", 1, "heads of x"));
  keys.push_back(extent("head_dim", "4", 1, "features of a head, turned in pairs (i, i + d/2)"));
  keys.push_back(base_key());
  return keys;
}

std::vector<std::string> rotary_cases(const std::string& tier) {
  const auto smoke =
      crossed({"rotary_context"}, {"cp=2 layout=zigzag docs=7,1,8", "cp=4 layout=zigzag", "cp=4",
                                   "cp=4 layout=zigzag_row docs=7,1,8 dtype=bf16", "cp=2 tp=2"});
  if (tier == "smoke") return smoke;
  const std::vector<std::string> ranks{"rotary_context", "rotary_context cp=2",
                                       "rotary_context cp=3", "rotary_context cp=4",
                                       "rotary_context cp=8"};
  const auto ci = together(
      {smoke,
       crossed(ranks, {"", "layout=zigzag", "docs=7,1,8", "layout=zigzag docs=0,5,0,0,7",
                       "layout=zigzag_row docs=17,1,2", "layout=zigzag docs=7,1,8 dtype=f32"}),
       crossed({"rotary_context cp=4 layout=zigzag"},
               {"dtype=f32 tokens=4096 heads=2", "dtype=f16", "seq=8 batch=3", "head_dim=2",
                "seq=16 batch=2 dp=2", "strides=transposed docs=9,7", "strides=expanded docs=9,7",
                "strides=expanded_inputs dtype=f32", "base=500000 head_dim=8",
                "dtype=bf16 tokens=1024 heads=2", "dtype=f16 tokens=8192 heads=1"}),
       {"rotary_context tp=2 cp=2 layout=zigzag"}});
  if (tier != "nightly") return ci;
  return together({ci, crossed(ranks, {"dtype=f32 tokens=24576 heads=2", "docs=1,2,3,4,5,6,7",
                                       "layout=zigzag docs=1,2,3,4,5,6,7 dtype=bf16"})});
}

Contract rotary_context() {
  Contract c;
  c.name = "rotary_context";
  c.family = "packed";
  c.summary = "rotary position embedding of a shard of packed documents";
  c.keys = rotary_keys();
  c.precondition = primitives::refused_rotary;
  c.operands = rotary_operands;
  c.forward = [](const Case& line, std::span<const Whole> in, std::vector<Gauge>* gauges) {
    const auto positions = positions_of(line);
    if (gauges)
      *gauges = {gauge_of(line, reference::rotary_bounds(rotary_of(line), positions, in[0].value,
                                                         accumulation_of(line)))};
    return std::vector<Whole>{
        {in[0].shape, reference::rotary(rotary_of(line), positions, in[0].value)}};
  };
  c.backward = [](const Case& line, std::span<const Whole> in, std::span<const Whole> cot,
                  std::vector<Gauge>* gauges) {
    const auto positions = positions_of(line);
    if (gauges)
      *gauges = {gauge_of(line, reference::rotary_bounds(rotary_of(line), positions, cot[0].value,
                                                         accumulation_of(line)))};
    return std::vector<Whole>{
        {in[0].shape, reference::rotary_backward(rotary_of(line), positions, cot[0].value)}};
  };
  c.traffic = [](const Case&, const std::string&, int) { return std::vector<Traffic>{}; };
  c.cases = rotary_cases;
  c.sequences = sequences_of;
  c.illegal = {"rotary_context cp=2 head_dim=3", "rotary_context cp=2 seq=8 batch=3 tokens=20",
               "rotary_context cp=4 tokens=10",  "rotary_context cp=2 docs=7,-1,8",
               "rotary_context tp=4 heads=6",    "rotary_context cp=2 docs=7,1 tokens=9"};
  c.witnesses = {};
  return c;
}

// ---- Loss

reference::Normalisation normalisation_of(const Case& c) {
  return c.text("normalise") == "tokens" ? reference::Normalisation::tokens
                                         : reference::Normalisation::groups;
}

// By token: what it predicts, its weight, the dp rank that it belongs to.
struct Targets {
  std::vector<int64_t> labels, groups;
  reference::Values weights, factors;
};

Targets targets_of(const Case& c, std::span<const double> ids) {
  const auto tokens = labels_of(c, false);
  const int64_t batch = batch_of(c), groups = c.ranks(Axis::dp), prompt = c.at("prompt");
  Targets t;
  for (size_t i = 0; i < tokens.size(); ++i) {
    const PackedToken& own = tokens[i];
    const size_t next = i + size_t(batch);
    const bool predicts =
        own.document >= 0 && next < tokens.size() && tokens[next].document == own.document;
    t.labels.push_back(predicts ? int64_t(ids[next]) : reference::ignored_label);
    t.groups.push_back(int64_t(i) % batch / (batch / std::min(groups, batch)));
    t.weights.push_back(own.position < prompt * (1 + own.document % 3) ? 0 : 1);
  }
  t.factors = reference::loss_factors(normalisation_of(c), t.labels, t.weights, t.groups, groups);
  return t;
}

std::vector<Operand> loss_operands(const Case& c) {
  const Layout rows = tokens_on(c, I());
  Layout whole{{Axis::cp, R()}, {Axis::tp, I()}},
      scalar{{Axis::dp, I()}, {Axis::cp, I()}, {Axis::tp, I()}};
  if (c.at("seq") > 0) whole.insert(whole.begin(), {Axis::dp, S(1)});
  Operand ids{"ids", Operand::index, token_shape(c, false, {}), whole, false};
  ids.dtype_override = DType::i64, ids.fixed_dtype = true, ids.below = c.at("vocab");
  Operand loss{"loss", Operand::output, {1}, scalar};
  loss.dtype_override = loss_type(c), loss.fixed_dtype = true;
  std::vector<Operand> list{
      {"logits", Operand::input, token_shape(c, false, {c.at("vocab")}), rows}, ids};
  for (Operand& cu : offset_operands(c)) list.push_back(std::move(cu));
  list.push_back(loss);
  return list;
}

std::vector<Whole> loss_forward(const Case& c, std::span<const Whole> in,
                                std::vector<Gauge>* gauges) {
  const Targets t = targets_of(c, in[1].value);
  const auto losses = reference::cross_entropy(in[0].value, t.labels, c.at("vocab"), 0);
  double sum = 0;
  for (size_t i = 0; i < losses.size(); ++i) sum += t.factors[i] * losses[i];
  if (gauges) {
    // Errors of the losses, one rounding for each term of their sum, for each rank, and three more.
    const double u = accumulation_of(c);
    const auto e = reference::cross_entropy_errors(in[0].value, t.labels, c.at("vocab"), u);
    const double terms = double(losses.size()) + c.ranks(Axis::cp) * c.ranks(Axis::dp) + 4;
    double bound = 0;
    for (size_t i = 0; i < losses.size(); ++i)
      bound += t.factors[i] * (e.loss[i] + terms * u * (losses[i] + e.loss[i]));
    *gauges = {gauge_of(c, {bound})};
  }
  return {{{1}, {sum}}};
}

std::vector<Whole> loss_backward(const Case& c, std::span<const Whole> in,
                                 std::span<const Whole> cot, std::vector<Gauge>* gauges) {
  const Targets t = targets_of(c, in[1].value);
  reference::Values g(t.factors);
  for (double& x : g) x *= cot[0].value[0];
  auto d = reference::cross_entropy_backward(in[0].value, t.labels, c.at("vocab"), 0, g);
  if (gauges) {
    const double u = accumulation_of(c);
    auto e = reference::cross_entropy_errors(in[0].value, t.labels, c.at("vocab"), u).logits;
    for (size_t i = 0; i < e.size(); ++i) {
      const double factor = std::abs(g[i / size_t(c.at("vocab"))]);
      e[i] = factor * e[i] + 4 * u * (std::abs(d[i]) + factor * e[i]);
    }
    *gauges = {gauge_of(c, e)};
    gauges->resize(in.size());
  }
  std::vector<Whole> gradients{{in[0].shape, std::move(d)}};
  gradients.resize(in.size());
  return gradients;
}

std::vector<Traffic> loss_traffic(const Case& c, const std::string&, int) {
  const DType dtype = linears::accumulation_of(c);
  const int64_t cp = c.ranks(Axis::cp), dp = c.ranks(Axis::dp);
  auto sum = [&](const char* group, int64_t count) {
    return Traffic{Op::all_reduce, Reduce::sum, group, false, count, dtype};
  };
  if (c.text("normalise") == "groups") return {sum("cp", 2), sum("dp", 1)};
  return cp * dp > 1 ? std::vector<Traffic>{sum("cp,dp", 2)} : std::vector<Traffic>{};
}

std::vector<Key> loss_keys() {
  std::vector<Key> keys = token_keys("48");
  keys.push_back(extent("vocab", "11", 2, "classes"));
  keys.push_back(
      extent("prompt", "1", 0, "document d masks its first prompt * (1 + d mod 3) tokens"));
  keys.push_back(index_key());
  Key how{"normalise", "tokens",
          "tokens: all tokens alike; groups: mean of each dp rank's own mean"};
  how.choices = {"tokens", "groups"};
  keys.push_back(how);
  return keys;
}

std::vector<std::string> loss_cases(const std::string& tier) {
  const auto smoke = crossed({"loss_packed"},
                             {"cp=2 layout=zigzag docs=7,1,8", "cp=4 layout=zigzag docs=7,1,8",
                              "cp=2 dp=2 seq=8 batch=4 normalise=groups", "cp=2 dp=2 seq=8 batch=4",
                              "cp=4 dtype=bf16", "cp=2 layout=zigzag dtype=f32"});
  if (tier == "smoke") return smoke;
  const std::vector<std::string> ranks{"loss_packed", "loss_packed cp=2", "loss_packed cp=3",
                                       "loss_packed cp=4", "loss_packed cp=8"};
  const auto ci = together(
      {smoke,
       crossed(ranks, {"", "layout=zigzag", "docs=7,1,8", "layout=zigzag docs=0,5,0,0,9",
                       "layout=zigzag_row docs=17,1,2", "layout=zigzag docs=7,1,8 dtype=f32"}),
       crossed({"loss_packed cp=2 dp=2 seq=8 batch=4"},
               {"prompt=3", "prompt=3 normalise=groups", "prompt=0 layout=zigzag dtype=f32"}),
       crossed({"loss_packed cp=4 layout=zigzag"},
               {"docs=9,7 prompt=2", "dtype=f16", "docs=7,8,9 strides=transposed", "vocab=2",
                "docs=7,8,9 strides=expanded", "strides=expanded_inputs dtype=f32",
                "docs=7,1,8 index=i32", "cu_seqlens=0,0,5,5,14 index=i64 strides=transposed"}),
       {"loss_packed cp=2 fill=large", "loss_packed cp=2 docs=7,1,8 normalise=groups",
        "loss_packed cp=2 vocab=131"},
       {"loss_packed cp=2 docs=9,7 index=i64", "loss_packed cp=2 docs=7,9 index=i64",
        "loss_packed cp=4 layout=zigzag_row docs=17,1,2 index=i32 dtype=bf16"},
       // A dp rank whose tokens are all masked: its count is taken for 1.
       {"loss_packed cp=2 dp=2 seq=4 batch=2 prompt=2 normalise=groups",
        "loss_packed dp=2 seq=4 batch=2 prompt=2"}});
  if (tier != "nightly") return ci;
  return together(
      {ci, crossed(ranks, {"docs=1,2,3,4,5,6,7", "layout=zigzag docs=1,2,3,4,5,6,7 dtype=f32"}),
       crossed(crossed({"loss_packed cp=4 dp=2", "loss_packed cp=2 dp=4"}, {"seq=16 batch=8"}),
               {"", "normalise=groups", "prompt=4 layout=zigzag", "dtype=bf16"})});
}

Contract loss_packed() {
  Contract c;
  c.name = "loss_packed";
  c.family = "packed";
  c.summary = "loss of next-token prediction on packed documents, normalised over cp and dp";
  c.keys = loss_keys();
  c.precondition = primitives::refused_loss;
  c.operands = loss_operands;
  c.forward = loss_forward;
  c.backward = loss_backward;
  c.traffic = loss_traffic;
  c.cases = loss_cases;
  c.illegal = {"loss_packed cp=4 tokens=10",
               "loss_packed cp=2 seq=8 batch=3 tokens=20",
               "loss_packed tp=2",
               "loss_packed cp=2 docs=7,-1,8",
               "loss_packed dp=2",
               "loss_packed cp=2 docs=7,1 tokens=9",
               "loss_packed cp=2 index=i32",
               "loss_packed cp=2 cu_seqlens=1,8,9,17 index=i32",
               "loss_packed cp=2 cu_seqlens=0,7,5,16 index=i64",
               "loss_packed cp=2 cu_seqlens=0,7,8,15 tokens=16 index=i64",
               "loss_packed cp=2 cu_seqlens=0,7,8,17 tokens=16 index=i32"};
  c.witnesses = {"loss_packed cp=2 layout=zigzag docs=7,1,8",
                 "loss_packed cp=3 layout=zigzag docs=7,1,8",
                 "loss_packed cp=4 layout=zigzag docs=7,1,8",
                 "loss_packed cp=2 dp=2 seq=8 batch=4 normalise=groups"};
  return c;
}

// ---- Exchange of rows: moved, not computed

std::vector<Operand> exchange_operands(const Case& c) {
  const auto shape = token_shape(c, false, {c.at("features")});
  Layout blocks = tokens_on(c, I());
  for (auto& [axis, placement] : blocks)
    if (axis == Axis::cp) placement = S(0);
  return {{"x", Operand::input, shape, blocks}, {"y", Operand::output, shape, tokens_on(c, I())}};
}

std::vector<Key> exchange_keys() {
  std::vector<Key> keys = token_keys("48");
  for (Key& k : keys)
    if (k.name == "layout") k.fallback = "zigzag";
  keys.push_back(extent("features", "5", 1, "columns of x and y"));
  return keys;
}

std::vector<std::string> exchange_cases(const std::string& tier) {
  const auto smoke = crossed({"zigzag_exchange"},
                             {"cp=2", "cp=4", "cp=2 docs=7,1,8", "cp=4 docs=7,1,8 dtype=bf16",
                              "cp=4 layout=zigzag_row docs=7,1,8", "cp=2 dp=2 seq=8 batch=4"});
  if (tier == "smoke") return smoke;
  const std::vector<std::string> ranks{"zigzag_exchange", "zigzag_exchange cp=2",
                                       "zigzag_exchange cp=3", "zigzag_exchange cp=4",
                                       "zigzag_exchange cp=8"};
  return together({smoke,
                   crossed(ranks, {"", "docs=7,1,8", "docs=0,5,0,0,7", "docs=1,1,2,1",
                                   "layout=zigzag_row docs=17,1,2", "dtype=f32"}),
                   crossed({"zigzag_exchange cp=4"},
                           {"strides=transposed", "docs=9,7 strides=transposed", "seq=8 batch=3",
                            "strides=expanded", "strides=expanded_inputs docs=9,7", "dtype=f16",
                            "tokens=8", "features=1"})});
}

Contract zigzag_exchange() {
  Contract c;
  c.name = "zigzag_exchange";
  c.family = "packed";
  c.summary = "rows of a shard from blocks to zigzag, one all-to-all";
  c.linear = true;
  c.keys = exchange_keys();
  c.precondition = primitives::refused_exchange;
  c.operands = exchange_operands;
  c.forward = [](const Case&, std::span<const Whole> in, std::vector<Gauge>* gauges) {
    if (gauges) *gauges = {{}};
    return std::vector<Whole>{in[0]};
  };
  c.backward = [](const Case&, std::span<const Whole>, std::span<const Whole> cot,
                  std::vector<Gauge>* gauges) {
    if (gauges) *gauges = {{}};
    return std::vector<Whole>{cot[0]};
  };
  c.traffic = [](const Case& line, const std::string&, int) {
    const int64_t n = rows_of(line, false) / ranks(line) * batch_of(line) / line.ranks(Axis::dp) *
                      line.at("features");
    std::vector<Traffic> due;
    for (const bool backward : {false, true})
      due.push_back({Op::all_to_all, Reduce::none, "cp", backward, n, line.dtype()});
    return due;
  };
  c.integer_range = [](const Case& line) { return exact_range(line.dtype(), 1, 1); };
  c.cases = exchange_cases;
  c.sequences = sequences_of;
  c.illegal = {
      "zigzag_exchange cp=2 layout=contiguous", "zigzag_exchange cp=2 seq=8 batch=3 tokens=20",
      "zigzag_exchange cp=4 tokens=12",         "zigzag_exchange tp=2",
      "zigzag_exchange cp=2 docs=7,-1,8",       "zigzag_exchange cp=2 layout=zigzag_row"};
  c.witnesses = {"zigzag_exchange cp=2 docs=7,1,8", "zigzag_exchange cp=3 docs=7,1,8",
                 "zigzag_exchange cp=4", "zigzag_exchange cp=2 dp=2 seq=8 batch=4"};
  return c;
}

}  // namespace

void family_packed(Registry& r) {
  r.add(rotary_context());
  r.add(loss_packed());
  r.add(zigzag_exchange());
  add_ours<primitives::ZigzagExchange>(r, "zigzag_exchange");
  add_ours<primitives::RotaryContext>(r, "rotary_context");
  add_ours<primitives::LossPacked>(r, "loss_packed");
}

}  // namespace shardproof
