// The replicated family: parameters of which every rank holds a copy. What is judged is whether
// their gradients are summed exactly where they are parts of a sum, over the right axes, once.
#include <algorithm>
#include <cmath>

#include "fixtures/fills.hpp"
#include "oracle/registry.hpp"
#include "primitives/replicated_layers.hpp"
#include "reference/norm.hpp"
#include "reference/replicated.hpp"
#include "suites/ours.hpp"
#include "suites/reading.hpp"
#include "suites/replicated.hpp"

namespace shardproof {
namespace replicated {

Key over_key() {
  Key k{"over", "", "axes that are reduced over; left out: every axis of tp, cp, dp above 1"};
  k.choices = {"tp", "cp", "dp", "tp,cp", "tp,dp", "cp,dp", "tp,cp,dp"};
  k.derive = [](const Case& c) {
    std::string axes;
    for (Axis a : {Axis::tp, Axis::cp, Axis::dp})
      if (c.ranks(a) > 1) axes += (axes.empty() ? "" : ",") + std::string(name(a));
    return axes.empty() ? std::string("tp") : axes;
  };
  return k;
}

}  // namespace replicated

namespace {

using namespace linears;
using namespace replicated;
using reference::Values;

std::optional<int64_t> range_of_sums(const Case& c, int64_t terms) {
  return linears::range_of_products(c, terms, 1);
}

Whole absolute(const Whole& w) { return {w.shape, reference::absolute(w.value)}; }
Whole squared(const Whole& w) { return {w.shape, reference::squared(w.value)}; }

Key count_key(const char* name, const char* fallback, const char* help) {
  return extent(name, fallback, 0, help, 16);
}

// `inside` on the reduced axes; on the others every rank has data of its own.
Layout over(const Case& c, const Placement& inside) {
  Layout layout;
  for (Axis a : reading::axes_in(c, "over")) layout.emplace_back(a, inside);
  return layout;
}

int64_t ranks_over(const Case& c) { return ranks_of(c, reading::axes_in(c, "over")); }

// ---- replicated_gradients

std::vector<int64_t> gradient_shape(const Case& c, int64_t i) {
  if (i % 2 == 0) return {c.at("hidden") + i};
  return {c.at("rows"), c.at("hidden") + i};
}

std::vector<Operand> gradients_operands(const Case& c) {
  std::vector<Operand> list;
  const int64_t summed = c.at("summed"), averaged = c.at("averaged");
  for (int64_t i = 0; i < summed; ++i)
    list.push_back({"g" + std::to_string(i), Operand::input, gradient_shape(c, i), over(c, P())});
  for (int64_t i = 0; i < averaged; ++i)
    list.push_back({"a" + std::to_string(i), Operand::input, gradient_shape(c, i), over(c, I())});
  for (int64_t i = 0; i < summed; ++i)
    list.push_back(
        {"sum" + std::to_string(i), Operand::output, gradient_shape(c, i), over(c, I())});
  for (int64_t i = 0; i < averaged; ++i)
    list.push_back(
        {"mean" + std::to_string(i), Operand::output, gradient_shape(c, i), over(c, I())});
  return list;
}

std::vector<Whole> gradients_forward(const Case& c, std::span<const Whole> in,
                                     std::vector<Gauge>* gauges) {
  const auto operands = gradients_operands(c);
  std::vector<Whole> out;
  if (gauges) gauges->clear();
  for (size_t i = 0; i < in.size(); ++i) {
    const Operand& o = operands[i];
    const Mesh mesh = c.mesh();
    auto sum = [&](const Whole& w) { return denoted(o, o.layout, mesh, w).value; };
    out.push_back(denoted(o, o.layout, mesh, in[i]));
    // p equal values are no independent terms.
    if (gauges)
      gauges->push_back(gauge(sum(absolute(in[i])), sum(squared(in[i])), 1, ranks_over(c),
                              int64_t(i) < c.at("summed")));
  }
  return out;
}

std::vector<Whole> hand_on(const Case&, std::span<const Whole>, std::span<const Whole> cotangents,
                           std::vector<Gauge>* gauges) {
  if (gauges) gauges->assign(cotangents.size(), Gauge{});
  return {cotangents.begin(), cotangents.end()};
}

int64_t elements_of(const Case& c, int64_t gradients) {
  int64_t n = 0;
  for (int64_t i = 0; i < gradients; ++i) n += product(gradient_shape(c, i));
  return n;
}

std::vector<Traffic> gradients_traffic(const Case& c, const std::string&, int) {
  std::vector<Traffic> due;
  if (ranks_over(c) == 1) return due;
  for (const Traffic& t :
       coalesced(c, reading::axes_in(c, "over"), elements_of(c, c.at("summed")), false))
    due.push_back(t);
  for (const Traffic& t : coalesced(c, reading::axes_in(c, "over"),
                                    elements_of(c, c.at("averaged")), false, Reduce::avg))
    due.push_back(t);
  return due;
}

Contract replicated_gradients() {
  Contract c;
  c.name = "replicated_gradients";
  c.family = "replicated";
  c.summary = "gradients of replicated parameters, summed and averaged, in one call a class";
  c.linear = true;
  c.keys = {extent("hidden", "10", 1, "last extent of the gradients, one more for each next one"),
            extent("rows", "3", 1, "first extent of every second gradient"),
            count_key("summed", "4", "gradients that are parts of a sum"),
            count_key("averaged", "2", "gradients that every rank has whole"), over_key()};
  c.precondition = primitives::refused_gradients;
  c.operands = gradients_operands;
  c.forward = gradients_forward;
  c.backward = hand_on;
  c.traffic = gradients_traffic;
  c.integer_range = [](const Case& line) { return range_of_sums(line, ranks_over(line)); };
  c.cases = [](const std::string& tier) {
    const auto smoke =
        crossed({"replicated_gradients"}, {"tp=2", "tp=4", "tp=2 dp=2", "tp=2 dp=2 over=dp",
                                           "tp=4 dtype=bf16", "cp=2 averaged=0", "tp=2 summed=0"});
    if (tier == "smoke") return smoke;
    const auto ci = together(
        {smoke,
         crossed({"replicated_gradients", "replicated_gradients tp=3", "replicated_gradients tp=8",
                  "replicated_gradients tp=2 cp=2 dp=2 over=tp,cp",
                  "replicated_gradients tp=4 dp=2 over=tp", "replicated_gradients tp=2 dp=4"},
                 {"", "dtype=f32", "dtype=bf16", "dtype=f32 fill=normal", "strides=transposed"}),
         {"replicated_gradients tp=2 cp=2 dp=2 over=tp,cp,dp",
          "replicated_gradients tp=2 dtype=f16",
          "replicated_gradients tp=4 dtype=bf16 wire=f32 fill=normal"}});
    if (tier != "nightly") return ci;
    return together({ci, crossed({"replicated_gradients tp=8 hidden=130 rows=17",
                                  "replicated_gradients tp=6", "replicated_gradients cp=5"},
                                 {"", "dtype=f16", "dtype=f32 fill=cancelling"})});
  };
  c.illegal = {"replicated_gradients tp=2 summed=0 averaged=0", "replicated_gradients tp=2 ep=2"};
  c.witnesses = {"replicated_gradients tp=2", "replicated_gradients tp=3",
                 "replicated_gradients tp=4", "replicated_gradients tp=2 dp=2 over=tp"};
  return c;
}

// ---- replicated_router

std::vector<Operand> router_operands(const Case& c) {
  const auto x = token_shape(c, c.at("hidden")), y = token_shape(c, c.at("experts"));
  const Layout tokens = tokens_on(tokens_on_tp(c)), parameter = parameter_of_tokens(c);
  std::vector<Operand> list{
      {"x", Operand::input, x, tokens, true, last(x)},
      {"w", Operand::parameter, {c.at("experts"), c.at("hidden")}, parameter, true, 0}};
  if (c.on("bias")) list.push_back({"b", Operand::parameter, {c.at("experts")}, parameter});
  list.push_back({"y", Operand::output, y, tokens, true, 0});
  return list;
}

LinearSums router_sums(const Case& c) {
  return on_own_tokens({c.at("tokens"), c.at("hidden"), c.at("experts")},
                       Local(c).tokens / (c.on("sp") ? c.ranks(Axis::tp) : 1),
                       ranks_of(c, reading::axes_of_tokens(c)));
}

std::vector<Whole> router_forward(const Case& c, std::span<const Whole> in,
                                  std::vector<Gauge>* gauges) {
  return linear_forward(router_sums(c), token_shape(c, c.at("experts")), in, gauges);
}

std::vector<Whole> router_backward(const Case& c, std::span<const Whole> in,
                                   std::span<const Whole> cot, std::vector<Gauge>* gauges) {
  return linear_backward(router_sums(c), in, cot, gauges);
}

Contract replicated_router() {
  Contract c;
  c.name = "replicated_router";
  c.family = "replicated";
  c.summary = "Y = X W^T + b on the own tokens, W and b on every rank, their gradients summed";
  c.linear = true;
  c.keys = token_keys();
  c.keys.push_back(extent("hidden", "10", 1, "columns of w"));
  c.keys.push_back(extent("experts", "6", 1, "rows of w"));
  for (Key k : {toggle("bias", "on", "add b"), sp_key(), reduce_key(), microbatches_key()})
    c.keys.push_back(k);
  c.precondition = primitives::refused_router;
  c.operands = router_operands;
  c.forward = router_forward;
  c.backward = router_backward;
  c.traffic = [](const Case& line, const std::string&, int) {
    return coalesced(line, reading::axes_of_tokens(line),
                     line.at("experts") * (line.at("hidden") + (line.on("bias") ? 1 : 0)));
  };
  c.integer_range = [](const Case& line) {
    return range_of_products(line, std::max({line.at("hidden") + 1, line.at("experts"),
                                             line.at("tokens") * line.at("microbatches")}));
  };
  c.cases = [](const std::string& tier) {
    const auto smoke = crossed({"replicated_router"},
                               {"tp=2 sp=on", "tp=4 sp=on", "tp=4", "tp=2 cp=2", "tp=2 dp=2 sp=on",
                                "tp=4 sp=on bias=off", "tp=2 sp=on microbatches=2"});
    if (tier == "smoke") return smoke;
    const auto ci =
        together({smoke,
                  crossed({"replicated_router", "replicated_router tp=3 sp=on",
                           "replicated_router tp=8 sp=on", "replicated_router tp=2 cp=2 dp=2 sp=on",
                           "replicated_router tp=2 dp=2 sp=on reduce=tp",
                           "replicated_router tp=2 dp=2 sp=on order=dp,tp"},
                          {"", "dtype=f32", "dtype=f32 fill=normal", "dtype=bf16 fill=normal",
                           "strides=transposed", "seq=24 batch=2"}),
                  {"replicated_router tp=2 sp=on dtype=bf16 wire=f32 fill=normal",
                   "replicated_router tp=2 sp=on dtype=f16 fill=normal"}});
    if (tier != "nightly") return ci;
    return together(
        {ci, crossed({"replicated_router tp=8 sp=on tokens=240 hidden=65",
                      "replicated_router tp=6 sp=on", "replicated_router cp=4 dp=2 tokens=240"},
                     {"", "dtype=f32 fill=normal", "dtype=f16 fill=normal"})});
  };
  c.gemms = [](const Case& line, int) {
    const int64_t own = Local(line).tokens / (line.on("sp") ? line.ranks(Axis::tp) : 1),
                  h = line.at("hidden"), e = line.at("experts");
    return std::vector<Gemm>{{"Y = X W^T", false, own, e, h},
                             {"dX = dY W", true, own, h, e},
                             {"dW = dY^T X", true, e, h, own}};
  };
  c.illegal = {"replicated_router tp=4 sp=on tokens=10",
               "replicated_router tp=2 seq=8 batch=3 tokens=20", "replicated_router tp=2 pp=2",
               "replicated_router tp=2 sp=on seq=3 batch=2"};
  c.witnesses = {"replicated_router tp=2 sp=on", "replicated_router tp=3 sp=on",
                 "replicated_router tp=4 sp=on", "replicated_router tp=2 dp=2 sp=on"};
  return c;
}

// ---- Heads

std::vector<Key> head_keys() {
  Key kv = extent("kv_heads", "4", 1, "key and value heads");
  return {extent("heads", "8", 1, "query heads"), kv,
          extent("head_dim", "6", 1, "values of a head"), copies_key()};
}

// Key heads as the ranks use them: cut over kv, the same on the ranks of rep.
Layout key_heads(int dim, const Placement& on_rep) {
  return {{Axis::dp, S(0)}, {Axis::cp, S(0)}, {Axis::kv, S(dim)}, {Axis::rep, on_rep}};
}

std::vector<Operand> qk_operands(const Case& c) {
  const int64_t d = c.at("head_dim");
  auto q = token_shape(c, c.at("heads")), k = token_shape(c, c.at("kv_heads"));
  const int heads = last(q);
  q.push_back(d), k.push_back(d);
  const Layout parameter = parameter_of_tokens(c);
  return {{"q", Operand::input, q, tokens_on(S(heads))},
          {"k", Operand::input, k, key_heads(heads, R())},
          {"q_gamma", Operand::parameter, {d}, parameter},
          {"k_gamma", Operand::parameter, {d}, parameter},
          {"q_out", Operand::output, q, tokens_on(S(heads))},
          {"k_out", Operand::output, k, key_heads(heads, R())}};
}

reference::NormShape head_norm(const Case& c) {
  return {c.at("head_dim"), reading::norm_eps, false};
}

std::vector<Whole> qk_forward(const Case& c, std::span<const Whole> in,
                              std::vector<Gauge>* gauges) {
  std::vector<Whole> out;
  const Precision p = precision_of(c, Declared{});
  if (gauges) gauges->clear();
  for (size_t i = 0; i < 2; ++i) {
    out.push_back(whole(in[i].shape, reference::rms_norm(in[i].value, in[i + 2].value,
                                                         c.at("head_dim"), reading::norm_eps)));
    if (gauges)
      gauges->push_back(gauge_of(reference::norm(head_norm(c), reference::certain(in[i].value),
                                                 in[i + 2].value, {}, rounding_of(c, p, 1)),
                                 p));
  }
  return out;
}

// Each rank of rep has a cotangent of its own for the key heads, and rounds with it: the losses of
// the parts add up.
reference::NormLosses qk_losses(const Case& c, const Whole& x, const Whole& gamma,
                                const Whole& cotangent, const reference::Rounding& r) {
  reference::NormLosses sum;
  const size_t n = x.value.size();
  for (size_t at = 0; at < cotangent.value.size(); at += n) {
    auto part = reference::norm_backward_loss(
        head_norm(c), reference::certain(x.value), gamma.value,
        reference::certain(reference::In(cotangent.value).subspan(at, n)), r);
    for (double& v : part.x.value) v = std::abs(v);
    if (at == 0) {
      sum = std::move(part);
      continue;
    }
    auto add = [](Values& to, const Values& more) {
      for (size_t i = 0; i < to.size(); ++i) to[i] += more[i];
    };
    add(sum.x.value, part.x.value), add(sum.x.error, part.x.error);
    add(sum.gamma.error, part.gamma.error), add(sum.gamma.magnitude, part.gamma.magnitude);
  }
  return sum;
}

std::vector<Whole> qk_backward(const Case& c, std::span<const Whole> in, std::span<const Whole> cot,
                               std::vector<Gauge>* gauges) {
  std::vector<Whole> dx, dgamma;
  std::vector<Gauge> gx, ggamma;
  const Precision p = precision_of(c, Declared{});
  const auto r = rounding_of(c, p, ranks_of(c, reading::summed_axes(c, true)));
  for (size_t i = 0; i < 2; ++i) {
    const Values g = sum_of_stack(cot[i], int64_t(in[i].value.size()));
    auto d = reference::rms_norm_backward(in[i].value, in[i + 2].value, g, c.at("head_dim"),
                                          reading::norm_eps);
    dx.push_back(whole(in[i].shape, std::move(d.x)));
    dgamma.push_back(whole(in[i + 2].shape, std::move(d.gamma)));
    if (!gauges) continue;
    const auto loss = qk_losses(c, in[i], in[i + 2], cot[i], r);
    gx.push_back(gauge_of(loss.x, p));
    ggamma.push_back(gauge_of(reference::reduced(loss.gamma, r), p));
  }
  if (gauges) *gauges = {gx[0], gx[1], ggamma[0], ggamma[1]};
  return {dx[0], dx[1], dgamma[0], dgamma[1]};
}

Contract replicated_qk_norm() {
  Contract c;
  c.name = "replicated_qk_norm";
  c.family = "replicated";
  c.summary = "RMS norm of query and key heads cut over tp, one weight for all heads each";
  c.keys = token_keys();
  for (const Key& k : head_keys()) c.keys.push_back(k);
  for (Key k : {sp_key(), reduce_key(), microbatches_key()}) c.keys.push_back(k);
  c.precondition = primitives::refused_qk_norm;
  c.operands = qk_operands;
  c.forward = qk_forward;
  c.backward = qk_backward;
  c.traffic = [](const Case& line, const std::string&, int) {
    return coalesced(line, reading::summed_axes(line, true), 2 * line.at("head_dim"));
  };
  c.integer_range = [](const Case&) { return std::optional<int64_t>(); };
  c.cases = [](const std::string& tier) {
    const auto smoke =
        crossed({"replicated_qk_norm"}, {"tp=2", "tp=4", "tp=4 sp=on", "tp=4 kv_heads=2",
                                         "tp=4 kv_heads=1", "tp=2 dp=2", "tp=2 dtype=bf16"});
    if (tier == "smoke") return smoke;
    const auto ci = together(
        {smoke,
         crossed({"replicated_qk_norm", "replicated_qk_norm tp=8",
                  "replicated_qk_norm tp=8 kv_heads=2", "replicated_qk_norm tp=2 cp=2 dp=2",
                  "replicated_qk_norm tp=4 dp=2 kv_heads=2 reduce=tp"},
                 {"", "dtype=f32", "dtype=bf16", "strides=transposed", "seq=8 batch=3"}),
         {"replicated_qk_norm tp=2 microbatches=2", "replicated_qk_norm tp=2 dtype=f16",
          "replicated_qk_norm tp=4 kv_heads=2 sp=on microbatches=2 dtype=bf16 grad=f32"}});
    if (tier != "nightly") return ci;
    return together({ci, crossed({"replicated_qk_norm tp=8 head_dim=64 tokens=96",
                                  "replicated_qk_norm tp=6 heads=12 kv_heads=3"},
                                 {"", "dtype=f32", "dtype=f16"})});
  };
  c.illegal = {"replicated_qk_norm tp=3", "replicated_qk_norm tp=2 seq=8 batch=3 tokens=20",
               "replicated_qk_norm tp=4 heads=9 kv_heads=3",
               "replicated_qk_norm tp=4 heads=12 kv_heads=3",
               "replicated_qk_norm tp=4 kv_heads=2 kv_replicas=4"};
  c.witnesses = {"replicated_qk_norm tp=2", "replicated_qk_norm tp=3 heads=6 kv_heads=3",
                 "replicated_qk_norm tp=4", "replicated_qk_norm tp=2 dp=2"};
  return c;
}

// ---- replicated_qkv

reference::Heads heads_of(const Case& c) {
  return {c.at("tokens"), c.at("hidden"), c.at("heads"), c.at("kv_heads"), c.at("head_dim")};
}

using reading::gathers;

std::vector<Operand> qkv_operands(const Case& c) {
  const auto h = heads_of(c);
  const auto x = token_shape(c, h.hidden), q = token_shape(c, h.query_rows()),
             k = token_shape(c, h.key_rows());
  std::vector<Operand> list{{"x", Operand::input, x, tokens_on(tokens_on_tp(c)), true, last(x)}};
  const Layout copies{{Axis::dp, R()}, {Axis::cp, R()}, {Axis::kv, S(0)}, {Axis::rep, I()}};
  if (gathers(c)) {
    list.push_back({"wqkv", Operand::parameter, {h.rows(), h.hidden}, parameter_on(S(0)), true, 0});
  } else {
    list.push_back(
        {"wq", Operand::parameter, {h.query_rows(), h.hidden}, parameter_on(S(0)), true, 0});
    list.push_back({"wk", Operand::parameter, {h.key_rows(), h.hidden}, copies, true, 0});
    list.push_back({"wv", Operand::parameter, {h.key_rows(), h.hidden}, copies, true, 0});
  }
  list.push_back({"q", Operand::output, q, tokens_on(S(last(q))), true, 0});
  list.push_back({"k", Operand::output, k, key_heads(last(k), R())});
  list.push_back({"v", Operand::output, k, key_heads(last(k), R())});
  return list;
}

// Weights of Q, K and V, whatever the form.
std::vector<Values> three_weights(const Case& c, std::span<const Whole> in) {
  if (!gathers(c)) return {in[1].value, in[2].value, in[3].value};
  const auto h = heads_of(c);
  const auto order = reference::grouped_rows(h);
  Values all(in[1].value.size());
  for (size_t i = 0; i < order.size(); ++i)
    std::copy_n(&in[1].value[i * size_t(h.hidden)], h.hidden, &all[size_t(order[i] * h.hidden)]);
  const auto keys = all.begin() + h.query_rows() * h.hidden,
             values = keys + h.key_rows() * h.hidden;
  return {Values(all.begin(), keys), Values(keys, values), Values(values, all.end())};
}

// The three as the operands of the line.
std::vector<Values> as_operands(const Case& c, std::vector<Values> three) {
  if (!gathers(c)) return three;
  const auto h = heads_of(c);
  const auto order = reference::grouped_rows(h);
  Values all;
  for (const Values& w : three) all.insert(all.end(), w.begin(), w.end());
  Values fused(all.size());
  for (size_t i = 0; i < order.size(); ++i)
    std::copy_n(&all[size_t(order[i] * h.hidden)], h.hidden, &fused[i * size_t(h.hidden)]);
  return {std::move(fused)};
}

reference::LinearShape part_shape(const Case& c, size_t i) {
  const auto h = heads_of(c);
  return {h.tokens, h.hidden, i == 0 ? h.query_rows() : h.key_rows()};
}

std::vector<Whole> qkv_forward(const Case& c, std::span<const Whole> in,
                               std::vector<Gauge>* gauges) {
  const auto w = three_weights(c, in);
  std::vector<Whole> out;
  if (gauges) gauges->clear();
  for (size_t i = 0; i < 3; ++i) {
    auto product = [&](auto size) {
      return reference::linear(part_shape(c, i), size(in[0].value), size(w[i]), {});
    };
    out.push_back(whole(token_shape(c, part_shape(c, i).out), product([](auto& v) { return v; })));
    if (gauges)
      gauges->push_back(
          gauge(product(reference::absolute), product(reference::squared), c.at("hidden"), 1));
  }
  return out;
}

// Sums over the three parts of X's gradient and of each weight's; cotangents of key heads are the
// sum of what the ranks of rep hold.
struct QkvGradients {
  Values x;
  std::vector<Values> w;
};
template <class Size>
QkvGradients qkv_gradients(const Case& c, std::span<const Whole> in, std::span<const Whole> cot,
                           Size size) {
  QkvGradients d{Values(in[0].value.size()), {}};
  const auto w = three_weights(c, in);
  for (size_t i = 0; i < 3; ++i) {
    const auto s = part_shape(c, i);
    const Values g = sum_of_stack({cot[i].shape, size(cot[i].value)}, s.tokens * s.out);
    auto part = reference::linear_backward(s, size(in[0].value), size(w[i]), g);
    for (size_t k = 0; k < d.x.size(); ++k) d.x[k] += part.x[k];
    d.w.push_back(std::move(part.w));
  }
  return d;
}

std::vector<Whole> qkv_backward(const Case& c, std::span<const Whole> in,
                                std::span<const Whole> cot, std::vector<Gauge>* gauges) {
  auto collect = [&](QkvGradients d) {
    std::vector<Values> list{std::move(d.x)};
    for (Values& w : as_operands(c, std::move(d.w))) list.push_back(std::move(w));
    return list;
  };
  std::vector<Whole> out;
  for (Values& v : collect(qkv_gradients(c, in, cot, [](const Values& v) { return v; })))
    out.push_back(whole(in[out.size()].shape, std::move(v)));
  if (!gauges) return out;
  auto m = collect(qkv_gradients(c, in, cot, reference::absolute)),
       s = collect(qkv_gradients(c, in, cot, reference::squared));
  const Local l(c);
  const int64_t rep = c.at("kv_replicas");
  const reading::OwnHeads h(c);
  // Of X: own heads on a rank, p ranks; gathered cotangents have been added up on the wire before.
  *gauges = {gauge(std::move(m[0]), std::move(s[0]), (h.query + 2 * h.key) * h.dim,
                   l.p + (gathers(c) ? rep : 0))};
  for (size_t i = 1; i < m.size(); ++i)
    gauges->push_back(
        gauge(std::move(m[i]), std::move(s[i]), l.tokens, i == 1 && !gathers(c) ? 1 : rep));
  return out;
}

std::vector<Traffic> qkv_traffic(const Case& c, const std::string&, int) {
  const Local l(c);
  const reading::OwnHeads h(c);
  std::vector<Traffic> due;
  if (l.p == 1) return due;
  const int64_t x = l.tokens * c.at("hidden");
  for (bool backward : {false, true})
    if (l.sp) due.push_back(call(Op::all_gather, backward, x / l.p, c.dtype()));
  if (gathers(c)) {
    due.push_back(call(Op::all_gather, false, l.tokens * h.rows / l.p, c.dtype()));
    due.push_back(call(Op::reduce_scatter, true, l.tokens * h.rows, wire_of(c)));
  } else if (reading::copies_of_keys(c) > 1) {
    Traffic copies = call(Op::all_reduce, true, 2 * h.key * h.dim * c.at("hidden"), wire_of(c));
    copies.label = name(Axis::rep);
    due.push_back(copies);
  }
  due.push_back(call(l.sp ? Op::reduce_scatter : Op::all_reduce, true, x, wire_of(c)));
  return due;
}

Contract replicated_qkv() {
  Contract c;
  c.name = "replicated_qkv";
  c.family = "replicated";
  c.summary = "Q, K, V of X with heads cut over tp; ranks share key heads where these are fewer";
  c.linear = true;
  c.keys = token_keys();
  c.keys.push_back(extent("hidden", "10", 1, "columns of the weights"));
  for (const Key& k : head_keys()) c.keys.push_back(k);
  Key form{"form", "replica", "replica: key weights copied; gather: one weight, results gathered"};
  form.choices = {"replica", "gather"};
  for (Key k : {form, sp_key(), microbatches_key()}) c.keys.push_back(k);
  c.precondition = primitives::refused_qkv;
  c.operands = qkv_operands;
  c.forward = qkv_forward;
  c.backward = qkv_backward;
  c.traffic = qkv_traffic;
  c.integer_range = [](const Case& line) {
    const auto h = heads_of(line);
    const int64_t rep = line.at("kv_replicas");
    return range_of_products(line, std::max({h.hidden, h.query_rows() + 2 * rep * h.key_rows(),
                                             h.tokens * rep * line.at("microbatches")}));
  };
  c.cases = [](const std::string& tier) {
    const auto smoke =
        crossed({"replicated_qkv"},
                {"tp=2", "tp=4 kv_heads=2", "tp=4 kv_heads=2 sp=on", "tp=4 kv_heads=1",
                 "tp=2 kv_heads=1", "tp=2 kv_heads=1 sp=on", "tp=4 kv_heads=2 form=gather",
                 "tp=4 kv_heads=2 form=gather sp=on", "tp=2 dp=2 kv_heads=1"});
    if (tier == "smoke") return smoke;
    const auto ci = together(
        {smoke,
         crossed(crossed({"replicated_qkv", "replicated_qkv tp=4", "replicated_qkv tp=8",
                          "replicated_qkv tp=8 kv_heads=2", "replicated_qkv tp=4 dp=2 kv_heads=2",
                          "replicated_qkv tp=4 cp=2 kv_heads=2 order=cp,tp"},
                         {"", "form=gather"}),
                 {"", "sp=on", "dtype=f32 fill=normal", "sp=on dtype=f32",
                  "sp=on dtype=bf16 fill=normal"}),
         crossed({"replicated_qkv tp=4 kv_heads=2", "replicated_qkv tp=4 kv_heads=2 form=gather"},
                 {"strides=transposed", "seq=8 batch=3 sp=on", "microbatches=2",
                  "microbatches=2 sp=on", "dtype=f16 fill=normal"}),
         {"replicated_qkv tp=2 kv_heads=1 dtype=bf16 grad=f32 fill=normal"}});
    if (tier != "nightly") return ci;
    return together(
        {ci, crossed(crossed({"replicated_qkv tp=8 heads=16 kv_heads=4 head_dim=10 tokens=96",
                              "replicated_qkv tp=6 heads=12 kv_heads=3 head_dim=4"},
                             {"", "form=gather"}),
                     {"", "sp=on dtype=f32 fill=normal", "dtype=f16 fill=normal"})});
  };
  c.gemms = [](const Case& line, int) {
    const Local l(line);
    const reading::OwnHeads p(line);
    const int64_t T = l.tokens, h = line.at("hidden"), f = p.rows / l.p, q = p.query * p.dim,
                  k = p.key * p.dim;
    if (gathers(line))
      return std::vector<Gemm>{{"[Q|K|V] = X W^T", false, T, f, h},
                               {"dW = dY^T X", true, f, h, T},
                               {"dX = dY W", true, T, h, f}};
    return std::vector<Gemm>{{"Q = X Wq^T", false, T, q, h},  {"K = X Wk^T", false, T, k, h},
                             {"V = X Wv^T", false, T, k, h},  {"dWq = dQ^T X", true, q, h, T},
                             {"dWk = dK^T X", true, k, h, T}, {"dWv = dV^T X", true, k, h, T},
                             {"dX = dQ Wq", true, T, h, q},   {"dX += dK Wk", true, T, h, k},
                             {"dX += dV Wv", true, T, h, k}};
  };
  c.illegal = {"replicated_qkv tp=3",
               "replicated_qkv tp=2 seq=8 batch=3 tokens=20",
               "replicated_qkv tp=4 heads=12 kv_heads=3",
               "replicated_qkv tp=4 heads=6 kv_heads=4",
               "replicated_qkv tp=8 heads=8 kv_heads=1 head_dim=3 form=gather",
               "replicated_qkv tp=4 kv_heads=2 kv_replicas=4",
               "replicated_qkv tp=4 sp=on tokens=10"};
  c.witnesses = {"replicated_qkv tp=2 kv_heads=1", "replicated_qkv tp=3 heads=6 kv_heads=3 sp=on",
                 "replicated_qkv tp=4 kv_heads=2 sp=on",
                 "replicated_qkv tp=4 kv_heads=2 form=gather",
                 "replicated_qkv tp=2 dp=2 kv_heads=1"};
  return c;
}

// ---- replicated_clip

std::vector<Operand> clip_operands(const Case& c) {
  const std::vector<int64_t> vector{c.at("hidden")}, matrix{c.at("ffn"), c.at("hidden")};
  const Layout copies{{Axis::dp, I()}, {Axis::cp, I()}, {Axis::tp, I()}},
      shards{{Axis::dp, I()}, {Axis::cp, I()}, {Axis::tp, S(0)}};
  return {{"replicated", Operand::input, vector, copies},
          {"sharded", Operand::input, matrix, shards},
          {"norm", Operand::output, {1}, copies},
          {"replicated_clipped", Operand::output, vector, copies},
          {"sharded_clipped", Operand::output, matrix, shards}};
}

// K squares are summed on a rank and p sums between ranks: the sum is off by gamma_{K+p+1}, its
// root by half of that and one rounding more; the factor and its product by four.
std::vector<Whole> clip_forward(const Case& c, std::span<const Whole> in,
                                std::vector<Gauge>* gauges) {
  const double norm = reference::global_norm({in[0].value, in[1].value}),
               factor = reference::clip_factor(norm, reading::number(c, "max_norm"));
  std::vector<Whole> out{whole({1}, {norm})};
  for (const Whole& g : in) {
    out.push_back(g);
    for (double& v : out.back().value) v *= factor;
  }
  if (!gauges) return out;
  const Precision p = precision_of(c, Declared{});
  const double u = p.u_acc + unit_roundoff(DType::f64),
               terms = double(in[0].value.size() + in[1].value.size()) + c.ranks(Axis::tp) + 1,
               relative = reference::gamma_of(terms, u) / 2;
  gauges->clear();
  for (size_t i = 0; i < out.size(); ++i) {
    Gauge g;
    g.magnitude = reference::absolute(out[i].value);
    for (double v : g.magnitude) g.bound.push_back(v * (relative + (i ? 5 : 2) * u) / p.u_acc);
    gauges->push_back(std::move(g));
  }
  return out;
}

Contract replicated_clip() {
  Contract c;
  c.name = "replicated_clip";
  c.family = "replicated";
  c.summary = "norm of all gradients, replicated ones counted once, and gradients clipped to it";
  c.keys = {extent("hidden", "10", 1, "elements of the replicated gradient"),
            extent("ffn", "48", 1, "rows of the sharded gradient, cut over tp"),
            positive("max_norm", "1", "gradients are scaled down to this norm")};
  c.precondition = primitives::refused_clip;
  c.operands = clip_operands;
  c.forward = clip_forward;
  c.traffic = [](const Case& line, const std::string&, int) {
    std::vector<Traffic> due;
    if (line.ranks(Axis::tp) > 1)
      due.push_back(call(Op::all_reduce, false, 1, accumulation_of(line)));
    return due;
  };
  c.integer_range = [](const Case&) { return std::optional<int64_t>(); };
  c.cases = [](const std::string& tier) {
    const auto smoke = crossed({"replicated_clip"}, {"tp=2", "tp=4", "tp=2 dp=2", "tp=4 dtype=bf16",
                                                     "tp=2 max_norm=1000"});
    if (tier == "smoke") return smoke;
    return together({smoke, crossed({"replicated_clip", "replicated_clip tp=3",
                                     "replicated_clip tp=8", "replicated_clip tp=2 cp=2 dp=2"},
                                    {"", "dtype=f32", "dtype=f16", "dtype=f32 max_norm=0.125",
                                     "dtype=f32 fill=cancelling", "strides=transposed"})});
  };
  c.illegal = {"replicated_clip tp=4 ffn=10", "replicated_clip tp=2 pp=2"};
  c.witnesses = {"replicated_clip tp=2", "replicated_clip tp=3", "replicated_clip tp=4",
                 "replicated_clip tp=2 dp=2"};
  return c;
}

// ---- replicated_step

std::vector<Operand> step_operands(const Case& c) {
  const std::vector<int64_t> shape{c.at("rows"), c.at("hidden")};
  return {{"w", Operand::input, shape, over(c, I())},
          {"g", Operand::input, shape, over(c, P())},
          {"next", Operand::output, shape, over(c, I())}};
}

std::vector<Whole> step_forward(const Case& c, std::span<const Whole> in,
                                std::vector<Gauge>* gauges) {
  const Operand g = step_operands(c)[1];
  const double lr = reading::number(c, "lr");
  const Mesh mesh = c.mesh();
  auto combine = [&](auto size, double sign, double rate) {
    Values v = size(in[0].value);
    const Values d = denoted(g, g.layout, mesh, {in[1].shape, size(in[1].value)}).value;
    for (size_t i = 0; i < v.size(); ++i) v[i] += sign * rate * d[i];
    return v;
  };
  if (gauges)
    *gauges = {gauge(combine(reference::absolute, +1, lr), combine(reference::squared, +1, lr * lr),
                     2, ranks_over(c), false)};
  return {whole(in[0].shape, combine([](const Values& v) { return v; }, -1, lr))};
}

std::vector<Whole> step_backward(const Case& c, std::span<const Whole>, std::span<const Whole> cot,
                                 std::vector<Gauge>* gauges) {
  Whole g = cot[0];
  for (double& v : g.value) v *= -reading::number(c, "lr");
  if (gauges) {
    // A power of two rounds nothing, but below the normal range.
    gauges->assign(2, Gauge{});
    (*gauges)[1].bound.assign(g.value.size(), 0);
  }
  return {cot[0], g};
}

Contract replicated_step() {
  Contract c;
  c.name = "replicated_step";
  c.family = "replicated";
  c.summary = "w' = w - lr g, g the sum of the ranks' gradients: reduced first, then spent";
  c.linear = true;
  Key lr{"lr", "1/8", "step size, a power of two"};
  lr.choices = {"1", "1/2", "1/4", "1/8"};
  c.keys = {extent("rows", "5", 1, "rows of w"), extent("hidden", "10", 1, "columns of w"),
            over_key(), lr};
  c.precondition = primitives::refused_step;
  c.operands = step_operands;
  c.forward = step_forward;
  c.backward = step_backward;
  c.traffic = [](const Case& line, const std::string&, int) {
    std::vector<Traffic> due;
    if (ranks_over(line) > 1)
      due = coalesced(line, reading::axes_in(line, "over"), line.at("rows") * line.at("hidden"),
                      false);
    return due;
  };
  // w' is a multiple of lr: in units of it w counts 1/lr times, g once for each rank.
  c.integer_range = [](const Case& line) {
    return range_of_sums(line, std::llround(1 / reading::number(line, "lr")) + ranks_over(line));
  };
  c.cases = [](const std::string& tier) {
    const auto smoke = crossed(
        {"replicated_step"}, {"tp=2", "tp=4", "tp=2 dp=2 over=dp", "dp=4 dtype=bf16", "tp=2 lr=1"});
    if (tier == "smoke") return smoke;
    return together(
        {smoke,
         crossed({"replicated_step", "replicated_step tp=3", "replicated_step dp=8",
                  "replicated_step tp=2 cp=2 dp=2"},
                 {"", "dtype=f32", "dtype=f16", "dtype=f32 fill=normal", "strides=transposed"}),
         {"replicated_step tp=2 dtype=bf16 wire=f32 fill=normal"}});
  };
  c.illegal = {"replicated_step tp=2 ep=2"};
  c.witnesses = {"replicated_step tp=2", "replicated_step tp=3", "replicated_step tp=4",
                 "replicated_step tp=2 dp=2 over=tp"};
  return c;
}

template <class Kernel_>
void add(Registry& r, Contract c) {
  const std::string name = c.name;
  r.add(std::move(c));
  add_ours<Kernel_>(r, name);
}

}  // namespace

void family_replicated(Registry& r) {
  add<primitives::ReplicatedGradients>(r, replicated_gradients());
  add<primitives::ReplicatedRouter>(r, replicated_router());
  add<primitives::ReplicatedQkNorm>(r, replicated_qk_norm());
  add<primitives::ReplicatedQkv>(r, replicated_qkv());
  add<primitives::ReplicatedClip>(r, replicated_clip());
  add<primitives::ReplicatedStep>(r, replicated_step());
}

}  // namespace shardproof
