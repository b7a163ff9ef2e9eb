// The attention of a layer: column linear, rotary embedding, attention over cp, row linear. It
// joins the attention family. Every parameter's gradient is judged, its sums over cp included;
// bounds come from the running error of the whole chain.
#include "reference/attention_block.hpp"

#include <algorithm>
#include <cstdlib>

#include "fixtures/index_maps.hpp"
#include "oracle/registry.hpp"
#include "primitives/attention_block.hpp"
#include "reference/replicated.hpp"
#include "suites/attention.hpp"
#include "suites/ours.hpp"
#include "suites/reading.hpp"
#include "suites/replicated.hpp"

namespace shardproof {
namespace {

using namespace linears;
using contexts::rows_of;
using replicated::gauge_of;
using replicated::ranks_of;

reference::AttentionBlockShape shape_of(const Case& c) {
  reference::AttentionBlockShape s;
  s.hidden = c.at("hidden");
  s.base = reading::number(c, "base", s.base);
  s.core = contexts::attention_of(c);
  return s;
}

// ---- Operands x, w_qkv, [b_qkv], w_out, [b_out]; y. Where ranks of tp share key heads: w_q, w_k,
// w_v and their biases, or the rows of w_qkv group by group

using reading::gathers;

reference::Heads heads_of(const Case& c) {
  return {rows_of(c, false) * contexts::batch_of(c), c.at("hidden"), c.at("heads"),
          c.at("kv_heads"), c.at("head_dim")};
}

std::vector<Operand> operands(const Case& c) {
  const int64_t h = c.at("hidden"), n = c.at("heads"), g = c.at("kv_heads"), d = c.at("head_dim");
  const auto x = contexts::token_shape(c, false, {h});
  const Layout tokens = contexts::tokens_on(c, replicated::tokens_on_tp(c));
  const Placement outside = c.text("reduce") == "all" ? I() : R();
  auto parameter = [&](const std::string& name, std::vector<int64_t> shape, const Placement& tp) {
    return Operand{name, Operand::parameter, std::move(shape),
                   Layout{{Axis::dp, outside}, {Axis::cp, outside}, {Axis::tp, tp}}};
  };
  std::vector<Operand> list{{"x", Operand::input, x, tokens, true, last(x)}};
  const Placement rows = gathers(c) ? S(0) : S(0, head_group_map(n, g, d));
  for (const std::string kind : {"w", "b"}) {
    if (kind == "b" && !c.on("bias")) continue;
    auto add = [&](const char* of, int64_t extent, const Placement& tp) {
      std::vector<int64_t> shape{extent};
      if (kind == "w") shape.push_back(h);
      list.push_back(parameter(kind + of, std::move(shape), tp));
    };
    if (!reading::splits_weights(c)) {
      add("_qkv", (n + 2 * g) * d, rows);
      continue;
    }
    add("_q", n * d, S(0));
    for (const char* of : {"_k", "_v"}) {
      add(of, g * d, I());
      list.back().layout = {
          {Axis::dp, outside}, {Axis::cp, outside}, {Axis::kv, S(0)}, {Axis::rep, I()}};
    }
  }
  list.push_back(parameter("w_out", {h, n * d}, S(1)));
  if (c.on("bias")) list.push_back(parameter("b_out", {h}, I()));
  list.push_back({"y", Operand::output, x, tokens, true, 0});
  return list;
}

// Rows of w_qkv and b_qkv as the reference has them: all query, all key, all value heads.
using reference::Values;

Values in_reference_order(const Case& c, const Values& grouped) {
  const auto order = reference::grouped_rows(heads_of(c));
  const size_t width = grouped.size() / order.size();
  Values rows(grouped.size());
  for (size_t i = 0; i < order.size(); ++i)
    std::copy_n(&grouped[i * width], width, &rows[size_t(order[i]) * width]);
  return rows;
}

Values grouped(const Case& c, const Values& rows) {
  const auto order = reference::grouped_rows(heads_of(c));
  const size_t width = rows.size() / order.size();
  Values all;
  for (int64_t row : order)
    all.insert(all.end(), rows.begin() + row * int64_t(width),
               rows.begin() + (row + 1) * int64_t(width));
  return all;
}

reference::AttentionBlockInputs arguments(const Case& c, std::span<const Whole> in,
                                          std::vector<Values>& fused) {
  size_t next = 0;
  reference::AttentionBlockInputs a;
  a.x = in[next++].value;
  fused.assign(2, {});
  for (size_t kind = 0; kind < (c.on("bias") ? 2 : 1); ++kind) {
    Values& rows = fused[kind];
    for (int part = 0; part < (reading::splits_weights(c) ? 3 : 1); ++part, ++next)
      rows.insert(rows.end(), in[next].value.begin(), in[next].value.end());
    if (gathers(c)) rows = in_reference_order(c, rows);
  }
  a.w_qkv = fused[0], a.b_qkv = fused[1];
  a.w_out = in[next++].value;
  if (c.on("bias")) a.b_out = in[next++].value;
  return a;
}

// Rows of the reference as the operands of the line hold them.
std::vector<Values> as_operands(const Case& c, Values rows) {
  if (gathers(c)) return {grouped(c, rows)};
  if (!reading::splits_weights(c)) return {std::move(rows)};
  const auto h = heads_of(c);
  const int64_t width = int64_t(rows.size()) / h.rows(), q = h.query_rows() * width,
                k = h.key_rows() * width;
  const auto first = rows.begin();
  return {Values(first, first + q), Values(first + q, first + q + k),
          Values(first + q + k, rows.end())};
}
std::vector<reference::Loss> as_operands(const Case& c, reference::Loss loss) {
  std::vector<reference::Loss> parts;
  auto errors = as_operands(c, std::move(loss.error)),
       magnitudes = as_operands(c, std::move(loss.magnitude));
  for (size_t i = 0; i < errors.size(); ++i)
    parts.push_back({std::move(errors[i]), std::move(magnitudes[i])});
  return parts;
}

template <class T>
std::vector<T> in_order(const Case& c, reference::AttentionBlockParts<T> d) {
  std::vector<T> list{std::move(d.x)};
  for (T& part : as_operands(c, std::move(d.w_qkv))) list.push_back(std::move(part));
  if (c.on("bias"))
    for (T& part : as_operands(c, std::move(d.b_qkv))) list.push_back(std::move(part));
  list.push_back(std::move(d.w_out));
  if (c.on("bias")) list.push_back(std::move(d.b_out));
  return list;
}

reference::AttentionBlockRounding rounding_of(const Case& c, const Precision& p) {
  return {replicated::rounding_of(c, p, c.ranks(Axis::tp)),
          contexts::attention_rounding(c),
          int(ranks_of(c, reading::summed_axes(c, false))),
          int(ranks_of(c, reading::axes_of_tokens(c))),
          int(reading::copies_of_keys(c)),
          gathers(c)};
}

std::vector<Whole> forward(const Case& c, std::span<const Whole> in, std::vector<Gauge>* gauges) {
  const auto s = shape_of(c);
  std::vector<Values> fused;
  const auto a = arguments(c, in, fused);
  if (gauges) {
    const Precision p = precision_of(c, Declared{});
    *gauges = {gauge_of(reference::attention_block_loss(s, a, rounding_of(c, p)), p)};
  }
  return listed(whole(in[0].shape, reference::attention_block(s, a)));
}

std::vector<Whole> backward(const Case& c, std::span<const Whole> in, std::span<const Whole> cot,
                            std::vector<Gauge>* gauges) {
  const auto s = shape_of(c);
  std::vector<Values> fused;
  const auto a = arguments(c, in, fused);
  std::vector<Whole> out;
  for (auto& v : in_order(c, reference::attention_block_backward(s, a, cot[0].value)))
    out.push_back(whole(in[out.size()].shape, std::move(v)));
  if (!gauges) return out;
  const Precision p = precision_of(c, Declared{});
  gauges->clear();
  for (const auto& loss :
       in_order(c, reference::attention_block_backward_loss(s, a, cot[0].value, rounding_of(c, p))))
    gauges->push_back(gauge_of(loss, p));
  return out;
}

// ---- Traffic: tp at the borders of the linears, cp inside the core and for the weights

// Tokens of a cp rank, and of a rank where sp cuts them.
int64_t tokens_of_cp_rank(const Case& c) {
  return rows_of(c, false) / c.ranks(Axis::cp) * contexts::batch_of(c) / c.ranks(Axis::dp);
}

std::vector<Traffic> traffic(const Case& c, const std::string&, int) {
  const int64_t p = c.ranks(Axis::tp), n = tokens_of_cp_rank(c) * c.at("hidden");
  const bool sp = c.on("sp") && p > 1;
  const Op leave = c.on("sp") ? Op::reduce_scatter : Op::all_reduce;
  std::vector<Traffic> due;
  auto on_tp = [&](Op op, bool backward) {
    if (p == 1) return;
    due.push_back(op == Op::all_gather ? call(op, backward, n / p, c.dtype())
                                       : call(op, backward, n, wire_of(c)));
  };
  auto in_core = [&](bool backward) {
    if (c.ranks(Axis::cp) == 1) return;
    for (const Traffic& t :
         c.text("core") == "ring" ? contexts::ring_traffic(c) : contexts::allgather_traffic(c))
      if (t.backward == backward) due.push_back(t);
  };
  const int64_t h = c.at("hidden"), d = c.at("head_dim"), heads = c.at("heads"),
                columns = (heads + 2 * c.at("kv_heads")) * d;
  auto exchange_heads = [&](Op op, bool backward, int64_t ranks, DType dtype) {
    if (gathers(c) && p > 1)
      due.push_back(call(op, backward, tokens_of_cp_rank(c) * columns / ranks, dtype));
  };
  if (sp) on_tp(Op::all_gather, false);  // x
  exchange_heads(Op::all_gather, false, p, c.dtype());
  in_core(false);
  on_tp(leave, false);                  // y
  if (sp) on_tp(Op::all_gather, true);  // dy
  in_core(true);
  exchange_heads(Op::reduce_scatter, true, 1, wire_of(c));
  if (sp) on_tp(Op::all_gather, true);  // x again, for dWqkv
  on_tp(leave, true);                   // dx
  const bool split = reading::splits_weights(c);
  const int64_t width = h + (c.on("bias") ? 1 : 0),  // of a row of a weight and its bias
      weights = ((split ? heads * d : columns) * width + h * heads * d) / p;
  for (const auto& sums :
       {replicated::coalesced(c, reading::summed_axes(c, false), weights),
        replicated::coalesced(c, reading::axes_of_copies(c), split ? 2 * d * width : 0),
        replicated::coalesced(c, reading::axes_of_tokens(c), c.on("bias") ? h : 0)})
    due.insert(due.end(), sums.begin(), sums.end());
  return due;
}

std::vector<Gemm> gemms(const Case& c, int) {
  const auto s = shape_of(c);
  const int64_t T = tokens_of_cp_rank(c), h = s.hidden, p = c.ranks(Axis::tp), q = s.queries() / p,
                k = s.keys() * reading::copies_of_keys(c) / p,
                z = gathers(c) ? (s.queries() + 2 * s.keys()) / p : q + 2 * k;
  return {{"Z = X Wqkv^T", false, T, z, h},  {"Y = O Wo^T", false, T, h, q},
          {"dO = dY Wo", true, T, q, h},     {"dWo = dY^T O", true, h, q, T},
          {"dWqkv = dZ^T X", true, z, h, T}, {"dX = dZ Wqkv", true, T, h, z}};
}

// ---- Keys and cases

std::vector<Key> keys() {
  std::vector<Key> list = contexts::token_keys("48");
  Key core{"core", "allgather", "how keys travel over cp"};
  core.choices = {"allgather", "ring"};
  Key form{"form", "replica",
           "key heads that ranks share: replica, weights copied; gather, results gathered"};
  form.choices = {"replica", "gather"};
  for (const Key& k :
       {extent("hidden", "10", 1, "features of x and y"),
        extent("heads", "8", 1, "query heads, cut over tp"), contexts::kv_heads_key(false),
        replicated::copies_key(), form,
        extent("head_dim", "4", 1, "features of a head, turned in pairs"), contexts::mask_keys()[0],
        contexts::mask_keys()[1], contexts::probs_key(), contexts::scale_key(),
        contexts::base_key(), core, toggle("bias", "on", "b_qkv and b_out"), replicated::sp_key(),
        replicated::reduce_key(), microbatches_key()})
    list.push_back(k);
  return list;
}

std::vector<std::string> cases(const std::string& tier) {
  const std::string name = "attention_block", balanced = " layout=zigzag mask=causal";
  const auto smoke = crossed(
      {name},
      {"tp=2 cp=2 tokens=24 sp=on" + balanced, "cp=2 tokens=24 core=ring" + balanced,
       "cp=4 core=ring docs=7,1,8" + balanced, "tp=2 tokens=24 sp=on mask=causal",
       "tp=4 tokens=24 sp=on mask=causal dtype=f32", "tp=4 tokens=24 kv_heads=2 sp=on mask=causal",
       "tp=2 tokens=24 kv_heads=1 form=gather mask=causal", "tp=2 cp=2 dtype=bf16" + balanced,
       "cp=2 dp=2 seq=8 batch=2 microbatches=2 mask=causal"});
  if (tier == "smoke") return smoke;
  const std::vector<std::string> cores{"", "core=ring"};
  const auto ci = together(
      {smoke,
       {name, name + " mask=causal bias=off", name + " docs=7,1,8"},
       crossed(crossed({name + " cp=2", name + " cp=3", name + " cp=4", name + " cp=8"}, cores),
               {"layout=zigzag mask=causal"}),
       crossed({name + " tp=2", name + " tp=4", name + " tp=8 heads=16 kv_heads=8",
                name + " tp=3 heads=6 kv_heads=3"},
               {"mask=causal", "sp=on mask=causal"}),
       crossed(crossed({name + " tp=4 cp=2 sp=on layout=zigzag mask=causal",
                        name + " tp=2 cp=4 sp=on layout=zigzag mask=causal",
                        name + " tp=2 cp=2 dp=2 sp=on seq=16 batch=4 mask=causal order=cp,tp"},
                       cores),
               {"", "dtype=f32"}),
       crossed({name + " tp=2 cp=2 sp=on layout=zigzag mask=causal"},
               {"docs=7,1,8 core=ring", "docs=0,5,0,0,7,0", "dtype=f16", "dtype=bf16 core=ring",
                "dtype=f32 acc=f64", "reduce=tp", "microbatches=2 dtype=bf16 grad=f32", "bias=off",
                "strides=transposed", "strides=transposed seq=8 batch=3", "window=5,0 core=ring",
                "strides=expanded", "strides=expanded_inputs seq=8 batch=3 dtype=f32",
                "base=500000 head_dim=8", "kv_heads=2", "wire=f32 dtype=bf16"}),
       // Key heads fewer than ranks of tp.
       crossed(crossed({name + " tp=4 kv_heads=2 mask=causal", name + " tp=4 kv_heads=1 sp=on"},
                       {"", "form=gather"}),
               {"", "dtype=f32"}),
       {name + " tp=2 cp=2 sp=on kv_heads=1 layout=zigzag mask=causal core=ring docs=7,1,8",
        name + " tp=2 cp=2 kv_heads=1 form=gather layout=zigzag mask=causal dtype=bf16",
        name + " tp=4 cp=2 sp=on kv_heads=2 layout=zigzag mask=causal dtype=bf16 reduce=tp",
        name + " tp=4 cp=2 kv_heads=2 form=gather core=ring mask=causal order=cp,tp",
        name + " tp=2 dp=2 seq=8 batch=4 kv_heads=1 sp=on microbatches=2 bias=off mask=causal",
        name + " tp=2 kv_heads=1 form=gather microbatches=2 dtype=bf16 grad=f32 mask=causal",
        name + " tp=8 heads=16 kv_heads=2 head_dim=2 mask=causal strides=transposed",
        name + " tp=2 heads=8 kv_heads=4 form=gather sp=on mask=causal"},
       // Few and small scores: where a half type's bound is that of the sums, not of their
       // exponents.
       crossed({name + " tp=2 cp=2 layout=zigzag mask=causal hidden=3"},
               {"scale=0.05 heads=4 head_dim=2 dtype=bf16", "scale=0.01 dtype=bf16",
                "scale=0.01 dtype=f16 core=ring"}),
       {name + " cp=2 docs=9,7 mask=causal", name + " cp=2 layout=zigzag_row docs=7,1,8 core=ring",
        name + " cp=4 tokens=8 layout=zigzag mask=causal"}});
  if (tier != "nightly") return ci;
  return together(
      {ci, crossed(crossed({name + " tp=4 cp=2 sp=on layout=zigzag mask=causal tokens=96 hidden=50",
                            name + " tp=2 cp=4 sp=on layout=zigzag mask=causal tokens=96 hidden=50",
                            name + " cp=5 tokens=40 mask=causal"},
                           cores),
                   {"", "dtype=f32", "dtype=bf16", "seed=2"})});
}

Contract attention_block() {
  Contract c;
  c.name = "attention_block";
  c.family = "attention";
  c.summary = "column linear, rotary embedding, attention over cp, row linear, under tp, sp and cp";
  c.keys = keys();
  c.precondition = primitives::refused_attention_block;
  c.operands = operands;
  c.forward = forward;
  c.backward = backward;
  c.traffic = traffic;
  c.integer_range = [](const Case&) { return std::optional<int64_t>(); };
  c.cases = cases;
  c.gemms = gemms;
  c.sequences = contexts::sequences_of;
  c.stiff = [](const Case& line) { return std::abs(reading::number(line, "scale")) >= 10; };
  c.illegal =
      crossed({"attention_block"},
              {"tp=4 sp=on tokens=10", "cp=4 layout=zigzag tokens=12", "cp=2 tp=2 sp=on tokens=6",
               "tp=4 heads=12 kv_heads=3", "tp=8 heads=8 kv_heads=1 head_dim=2 form=gather",
               "tp=4 kv_heads=2 kv_replicas=4", "cp=2 scale=1e6", "cp=2 fill=large",
               "tp=2 head_dim=3", "cp=2 docs=7,-1,10", "cp=2 dp=2", "cp=2 ep=2",
               "tp=2 sp=on docs=7,2", "cp=2 layout=zigzag seq=3 batch=4"});
  // Weights of variance 1 make features of variance hidden + 1 and scores as many times larger than
  // those of a trained layer; softmax is then a choice of one key, whose rounding hides an error of
  // 2^-10 in f32. The scale here brings scores back to variance 1.
  for (const char* line :
       {"tp=2 sp=on cp=1 mask=causal", "cp=3 core=ring layout=zigzag mask=causal",
        "cp=4 layout=zigzag mask=causal", "tp=2 cp=2 sp=on layout=zigzag mask=causal"})
    c.witnesses.push_back("attention_block scale=0.045 " + std::string(line));
  return c;
}

}  // namespace

void family_attention_block(Registry& r) {
  r.add(attention_block());
  add_ours<primitives::AttentionBlock>(r, "attention_block");
}

}  // namespace shardproof
