// Attention on the ranks of the cp axis: four strategies of one mathematics. It rounds, so bounds
// are the componentwise ones of reference/attention.cpp; what the masks are follows from labels.
#include "suites/attention.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "fixtures/context_maps.hpp"
#include "fixtures/index_maps.hpp"
#include "oracle/check.hpp"
#include "oracle/joined.hpp"
#include "oracle/registry.hpp"
#include "primitives/attention.hpp"
#include "primitives/attention_line.hpp"
#include "reference/attention.hpp"
#include "suites/linear.hpp"
#include "suites/ours.hpp"
#include "suites/reading.hpp"
#include "suites/replicated.hpp"

namespace shardproof {
namespace contexts {

namespace {

// Tokens count no further than an extent may go, so that sums of a few of them are exact.
constexpr int64_t most_tokens = 1 << 24;

bool small(const std::vector<int64_t>& list, bool in_all) {
  int64_t sum = 0;
  for (const int64_t n : list) {
    if (n < -most_tokens || n > most_tokens) return false;
    sum += std::max<int64_t>(n, 0);
    if (in_all && sum > most_tokens) return false;
  }
  return true;
}

std::string too_large(bool in_all) {
  return fmt::format(", at most {}{}", most_tokens, in_all ? " each and in all" : " each");
}

}  // namespace

Key list_key(const char* name, size_t entries, const char* help) {
  Key k{name, "", help};
  k.valid = [name, entries](std::string_view text) -> std::string {
    const std::string expected = entries
                                     ? fmt::format("{} integers with a comma between them", entries)
                                     : "integers with a comma between them, such as 7,1,10";
    try {
      const auto list = parse_list(name, text);
      if (entries && list.size() != entries) return expected;
      return small(list, entries == 0) ? "" : expected + too_large(entries == 0);
    } catch (const BadInput&) {
      return expected;
    }
  };
  k.normal = [name](std::string_view text) { return joined(parse_list(name, text), ","); };
  return k;
}

Key offsets_key(const char* name, const char* help) {
  Key k = list_key(name, 0, help);
  k.valid = [valid = k.valid](std::string_view text) {
    // Each of them may be as large as all lengths together.
    std::string expected = valid(text);
    return expected.ends_with(too_large(true)) && small(parse_list("", text), false) ? std::string()
                                                                                     : expected;
  };
  return k;
}

Key index_key() {
  Key k{"index", "off", "type of cu_seqlens as operands; off: subjects read docs of the line"};
  k.choices = {"off", "i32", "i64"};
  return k;
}

Key number_key(const char* name, double least, double most, const char* help) {
  Key k{name, "", help};
  k.valid = [least, most](std::string_view text) -> std::string {
    if (text.empty()) return "";
    const auto value = reading::decimal(text);
    return value && *value >= least && *value <= most
               ? ""
               : fmt::format("a number from {:g} to {:g}, such as 2.5", least, most);
  };
  return k;
}

// Scores and their gradients, which the scale multiplies, stay far inside the range of f32.
Key scale_key() {
  return number_key("scale", -1e6, 1e6, "of the scores; left out: 1/sqrt(head_dim)");
}

// base^(-2i/d) is a frequency only where the base is positive; at 1e-6 and more it fits f32.
Key base_key() { return number_key("base", 1e-6, 1e12, "of the angles; left out: 10000"); }

namespace {

std::vector<int64_t> list_of(const Case& c, const std::string& key) {
  return c.has(key) && !c.text(key).empty() ? parse_list(key, c.text(key)) : std::vector<int64_t>();
}

// Where documents begin, and where the last one ends, as the line has them.
std::vector<int64_t> offsets_of(const Case& c, bool keys) {
  std::vector<int64_t> offsets = list_of(c, keys ? "cu_seqlens_k" : "cu_seqlens");
  if (!offsets.empty()) return offsets;
  const auto lengths = list_of(c, keys ? "kv_docs" : "docs");
  if (!lengths.empty()) offsets.push_back(0);
  for (int64_t n : lengths) offsets.push_back(offsets.back() + n);
  return offsets;
}

std::string sum_of_documents(const Case& c, bool keys) {
  const auto offsets = offsets_of(c, keys);
  return std::to_string(std::max<int64_t>(offsets.back() - offsets.front(), 1));
}

}  // namespace

std::vector<Operand> offset_operands(const Case& c) {
  std::vector<Operand> list;
  if (c.text("index") == "off") return list;
  for (const bool keys : {false, true}) {
    const auto offsets = offsets_of(c, keys);
    if (offsets.empty()) continue;
    Operand cu{keys ? "cu_seqlens_k" : "cu_seqlens",
               Operand::index,
               {int64_t(offsets.size())},
               {{Axis::dp, R()}, {Axis::cp, R()}, {Axis::tp, R()}},
               false};
    cu.dtype_override = *dtype_from(c.text("index")), cu.fixed_dtype = true;
    cu.stated.assign(offsets.begin(), offsets.end());
    list.push_back(std::move(cu));
  }
  return list;
}

std::vector<Key> token_keys(const char* tokens) {
  Key t = linears::extent("tokens", "", 1, "real tokens; left out: the sum of docs, seq*batch");
  t.derive = [tokens](const Case& c) -> std::string {
    if (packed(c)) return sum_of_documents(c, false);
    return c.at("seq") > 0 ? std::to_string(c.at("seq") * c.at("batch")) : std::string(tokens);
  };
  Key layout{"layout", "contiguous",
             "which rows a cp rank owns: its block, or chunks r and 2p-1-r of each document "
             "(zigzag) or of the whole row"};
  layout.choices = {"contiguous", "zigzag", "zigzag_row"};
  return {t,
          linears::extent("seq", "0", 0, "tensors are [seq,batch,..]; 0: [tokens,..]"),
          linears::extent("batch", "1", 1, "dim 1 where seq is given"),
          list_key("docs", 0, "lengths of packed documents"),
          offsets_key("cu_seqlens", "in place of docs: where documents begin, then the end"),
          layout};
}

Key kv_heads_key(bool cut_by_cp) {
  Key kv = linears::extent("kv_heads", "", 1, "key and value heads; left out: fewer than heads");
  kv.derive = [cut_by_cp](const Case& c) {
    const int64_t n = c.at("heads"), cut = c.ranks(Axis::tp) * (cut_by_cp ? ranks(c) : 1);
    for (const int64_t part : {2, 3})
      if (n % part == 0 && n / part % cut == 0) return std::to_string(n / part);
    return std::to_string(n);
  };
  return kv;
}

std::vector<Key> mask_keys() {
  Key mask{"mask", "full", "which keys of its sequence a query sees; causal: none after itself"};
  mask.choices = {"full", "causal"};
  return {mask,
          list_key("window", 2, "left,right: keys around the query's own position; -1: no limit")};
}

Key probs_key() {
  Key probs{
      "probs", "",
      "type of P and dS as factors of the second products, as kernels that feed half precision "
      "to a tensor core round them; left out: that of acc"};
  probs.choices = {"f64", "f32", "bf16", "f16"};
  return probs;
}

bool packed(const Case& c) { return !c.text("docs").empty() || !c.text("cu_seqlens").empty(); }
bool own_keys(const Case& c) { return !offsets_of(c, true).empty(); }
int64_t ranks(const Case& c) { return c.ranks(Axis::cp); }
int64_t batch_of(const Case& c) { return c.at("seq") > 0 ? c.at("batch") : 1; }

Packing packing(const Case& c, bool keys) {
  const auto offsets = offsets_of(c, keys && own_keys(c));
  // A line that will be refused has operands, too.
  std::vector<int64_t> lengths;
  for (size_t d = 1; d < offsets.size(); ++d)
    lengths.push_back(std::max<int64_t>(offsets[d] - offsets[d - 1], 0));
  if (c.text("layout") == "zigzag") return pack_each(lengths, 2 * ranks(c));
  return pack_row(lengths, c.text("layout") == "contiguous" ? ranks(c) : 2 * ranks(c));
}

int64_t rows_of(const Case& c, bool keys) {
  if (packed(c)) return packing(c, keys).rows;
  const int64_t tokens = keys && c.has("kv_tokens") ? c.at("kv_tokens") : c.at("tokens");
  return tokens / batch_of(c);
}

std::vector<int64_t> token_shape(const Case& c, bool keys, std::vector<int64_t> rest) {
  std::vector<int64_t> shape{rows_of(c, keys)};
  if (c.at("seq") > 0) shape.push_back(batch_of(c));
  shape.insert(shape.end(), rest.begin(), rest.end());
  return shape;
}

Placement rows_on_cp(const Case& c, bool keys) {
  const int64_t chunks = 2 * ranks(c);
  if (c.text("layout") == "contiguous" || rows_of(c, false) % chunks || rows_of(c, true) % chunks)
    return S(0);
  if (packed(c) && c.text("layout") == "zigzag")
    return S(0, zigzag_documents_map(packing(c, keys).lengths));
  return S(0, zigzag_map());
}

Layout tokens_on(const Case& c, const Placement& tp, bool keys) {
  Layout layout{{Axis::cp, rows_on_cp(c, keys)}, {Axis::tp, tp}};
  if (c.at("seq") > 0) layout.insert(layout.begin(), {Axis::dp, S(1)});
  return layout;
}

std::vector<PackedToken> labels_of(const Case& c, bool keys) {
  if (packed(c)) {
    const Packing own = packing(c, keys), other = packing(c, true);
    auto tokens = tokens_of(own);
    for (PackedToken& t : tokens)
      if (t.document >= 0 && size_t(t.document) < other.lengths.size())
        t.position += other.lengths[size_t(t.document)] - own.lengths[size_t(t.document)];
    return tokens;
  }
  const int64_t rows = rows_of(c, keys), batch = batch_of(c),
                first = keys ? 0 : rows_of(c, true) - rows;
  std::vector<PackedToken> labels;
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t b = 0; b < batch; ++b) labels.push_back({b, first + row});
  return labels;
}

std::vector<int64_t> sequences_of(const Case& c, const Operand& o) {
  std::vector<int64_t> list;
  for (const PackedToken& t : labels_of(c, o.name == "k" || o.name == "v"))
    list.push_back(t.document);
  return list;
}

// ---- What a line says

std::vector<int64_t> window_of(const Case& c) {
  if (c.text("window").empty()) return {-1, -1};
  return parse_list("window", c.text("window"));
}
int64_t value_dim_of(const Case& c) { return c.at(c.has("v_dim") ? "v_dim" : "head_dim"); }
bool causal(const Case& c) { return c.text("mask") == "causal"; }
DType lse_type(const Case& c) { return c.dtype() == DType::f64 ? DType::f64 : DType::f32; }
DType sums_of_keys(const Case& c) {
  if (const auto wire = dtype_from(c.text("wire"))) return *wire;
  return linears::accumulation_of(c);
}

reference::Attention attention_of(const Case& c) {
  reference::Attention a;
  a.heads = c.at("heads"), a.kv_heads = c.at("kv_heads");
  a.key_dim = c.at("head_dim"), a.value_dim = value_dim_of(c);
  a.scale = reading::number(c, "scale", 1 / std::sqrt(double(a.key_dim)));
  a.softcap = reading::number(c, "softcap", 0);
  const auto window = window_of(c);
  a.mask = {causal(c), window[0], window[1]};
  for (const PackedToken& t : labels_of(c, false)) a.queries.push_back({t.document, t.position});
  for (const PackedToken& t : labels_of(c, true)) a.keys.push_back({t.document, t.position});
  return a;
}

reference::AttentionRounding attention_rounding(const Case& c) {
  const Precision p = precision_of(c, Declared{});
  const double own = unit_roundoff(DType::f64);  // the reference rounds too
  reference::AttentionRounding r;
  r.accumulate = p.u_acc + own;
  r.output = p.u_out;
  r.statistics = unit_roundoff(lse_type(c));
  r.wire = unit_roundoff(sums_of_keys(c)), r.wire_tiny = smallest_subnormal(sums_of_keys(c)) / 2;
  r.tiny = smallest_subnormal(linears::accumulation_of(c));
  r.ranks = int(ranks(c));
  // The gradient of a key head has as many parts as it has copies: more than ranks, where its query
  // heads have one each.
  if (c.has("uneven_heads") && c.on("uneven_heads") && c.on("kv_replicate"))
    r.ranks = std::max(r.ranks, int(c.at("heads") / std::max<int64_t>(c.at("kv_heads"), 1)));
  if (const auto probs = dtype_from(c.text("probs"))) {
    r.factors = unit_roundoff(*probs);
    r.tiny = std::max(r.tiny, smallest_subnormal(*probs));
  }
  return r;
}

// ---- Traffic in closed form

// Elements of the local q, k, v and o.
struct Local {
  int64_t p, q, k, v, o;
  explicit Local(const Case& c) : p(ranks(c)) {
    const int64_t batch = batch_of(c) / c.ranks(Axis::dp);
    const int64_t queries = rows_of(c, false) / p * batch, keys = rows_of(c, true) / p * batch;
    const reading::OwnHeads own(c);
    q = queries * own.query * own.dim, o = queries * own.query * value_dim_of(c);
    k = keys * own.key * own.dim, v = keys * own.key * value_dim_of(c);
  }
};

Traffic call(Op op, bool backward, int64_t count, DType dtype, int hop = 0) {
  const bool sums = op == Op::reduce_scatter;
  return {op, sums ? Reduce::sum : Reduce::none, "cp", backward, count, dtype, hop};
}

std::vector<Traffic> allgather_traffic(const Case& c) {
  const Local l(c);
  std::vector<Traffic> due;
  for (const bool backward : {false, true})
    for (const int64_t n : {l.k, l.v}) due.push_back(call(Op::all_gather, backward, n, c.dtype()));
  for (const int64_t n : {l.k, l.v})
    due.push_back(call(Op::reduce_scatter, true, n * l.p, sums_of_keys(c)));
  return due;
}

// p-1 hops of K, V; in backward p of dK, dV between them.
std::vector<Traffic> ring_traffic(const Case& c) {
  const Local l(c);
  std::vector<Traffic> due;
  for (int64_t hop = 0; hop + 1 < l.p; ++hop)
    due.push_back(call(Op::shift, false, l.k + l.v, c.dtype(), 1));
  for (int64_t hop = 0; hop < l.p; ++hop) {
    if (hop + 1 < l.p) due.push_back(call(Op::shift, true, l.k + l.v, c.dtype(), 1));
    due.push_back(call(Op::shift, true, l.k + l.v, sums_of_keys(c), 1));
  }
  return due;
}

}  // namespace contexts

namespace {

using namespace contexts;
using linears::crossed;
using linears::extent;
using linears::together;
using linears::toggle;

enum class Strategy { allgather, ring, alltoall, hierarchical };

// ---- Operands q, k, v; o, lse

// Key heads are cut over tp; where ranks share them, over kv, and each rank uses its copy alone.
Layout key_heads_on(const Case& c, int dim) {
  Layout layout = tokens_on(c, S(dim), true);
  if (c.at("kv_replicas") == 1) return layout;
  std::erase_if(layout, [](const auto& on) { return on.first == Axis::tp; });
  layout.emplace_back(Axis::kv, S(dim));
  layout.emplace_back(Axis::rep, R());
  return layout;
}

// How all-to-all deals the heads of a tp rank: in units of `queries` query heads and a key head
// that is theirs, `copies` of each. Ranks get ceil or floor(units / cp) of them, the larger first.
struct Dealing {
  int64_t units, queries, copies;
  explicit Dealing(const Case& c) {
    const reading::OwnHeads own(c);
    const int64_t group = std::max<int64_t>(own.query / std::max<int64_t>(own.key, 1), 1);
    queries = group;
    if (c.on("kv_replicate"))
      queries = own.query % ranks(c) ? 1 : std::gcd(group, own.query / ranks(c));
    units = own.query / queries, copies = group / queries;
  }
  int64_t on_rank(const Case& c, int rank) const {
    const int64_t place = c.mesh().coordinate(rank, Axis::cp);
    return units / ranks(c) + (place < units % ranks(c) ? 1 : 0);
  }
};

Placement heads_dealt(const Case& c, int dim) {
  const Dealing d(c);
  return d.units % ranks(c) ? S(dim, groups_map(d.queries)) : S(dim);
}

std::vector<Operand> operands(const Case& c, Strategy strategy) {
  const int64_t n = c.at("heads"), g = c.at("kv_heads"), dk = c.at("head_dim"),
                dv = value_dim_of(c);
  const int heads = c.at("seq") > 0 ? 2 : 1;
  const Layout tokens = tokens_on(c, S(heads)), keys = key_heads_on(c, heads);
  std::vector<Operand> list{{"q", Operand::input, token_shape(c, false, {n, dk}), tokens},
                            {"k", Operand::input, token_shape(c, true, {g, dk}), keys},
                            {"v", Operand::input, token_shape(c, true, {g, dv}), keys}};
  for (Operand& cu : offset_operands(c)) list.push_back(std::move(cu));
  list.push_back({"o", Operand::output, token_shape(c, false, {n, dv}), tokens});
  Operand lse{"lse", Operand::output, token_shape(c, false, {n}), tokens};
  // All-to-all leaves it where it was computed: cut by heads over tp and, inside, over cp.
  if (strategy == Strategy::alltoall) {
    lse.layout = {{Axis::tp, S(heads)}, {Axis::cp, heads_dealt(c, heads)}};
    if (c.at("seq") > 0) lse.layout.insert(lse.layout.begin(), {Axis::dp, S(1)});
  }
  lse.gradient = c.on("lse_grad");
  lse.dtype_override = lse_type(c), lse.fixed_dtype = true;
  list.push_back(lse);
  return list;
}

// ---- Reference and bounds

// `sizes` where ranks hold parts of the result: each part is rounded.
Gauge gauge_of(const Case& c, const reference::Values& bound, reference::Values sizes = {}) {
  Gauge g;
  g.magnitude = std::move(sizes);
  g.terms = rows_of(c, true) * batch_of(c);
  const double unit = precision_of(c, Declared{}).u_acc;  // what a family counts a bound in
  for (double b : bound) g.bound.push_back(b / unit);
  return g;
}

std::vector<Whole> forward(const Case& c, std::span<const Whole> in, std::vector<Gauge>* gauges) {
  const auto a = attention_of(c);
  auto r = reference::attention(a, in[0].value, in[1].value, in[2].value);
  if (gauges) {
    const auto b = reference::attention_bounds(a, attention_rounding(c), in[0].value, in[1].value,
                                               in[2].value, {}, {});
    *gauges = {gauge_of(c, b.o), gauge_of(c, b.lse)};
  }
  return {{token_shape(c, false, {a.heads, a.value_dim}), std::move(r.o)},
          {token_shape(c, false, {a.heads}), std::move(r.lse)}};
}

std::vector<Whole> backward(const Case& c, std::span<const Whole> in, std::span<const Whole> cot,
                            std::vector<Gauge>* gauges) {
  const auto a = attention_of(c);
  auto d = reference::attention_backward(a, in[0].value, in[1].value, in[2].value, cot[0].value,
                                         cot[1].value);
  if (gauges) {
    const auto b = reference::attention_bounds(a, attention_rounding(c), in[0].value, in[1].value,
                                               in[2].value, cot[0].value, cot[1].value);
    *gauges = {gauge_of(c, b.q), gauge_of(c, b.k, b.k_size), gauge_of(c, b.v, b.v_size)};
    gauges->resize(in.size());
  }
  std::vector<Whole> gradients{
      {in[0].shape, std::move(d.q)}, {in[1].shape, std::move(d.k)}, {in[2].shape, std::move(d.v)}};
  gradients.resize(in.size());  // none of cu_seqlens
  return gradients;
}

// ---- Masks, pairs and sequences, for the checks that ask for them

std::vector<uint8_t> visible(const Case& c) {
  const auto a = attention_of(c);
  std::vector<uint8_t> pairs;
  for (const auto& q : a.queries)
    for (const auto& k : a.keys) pairs.push_back(reference::visible(a.mask, q, k));
  return pairs;
}

// Keys that a query at position i of a sequence of n keys sees: an interval.
int64_t seen_by(const Case& c, int64_t i, int64_t n) {
  const auto window = window_of(c);
  int64_t first = 0, last = n - 1;
  if (window[0] >= 0) first = std::max(first, i - window[0]);
  if (window[1] >= 0) last = std::min(last, i + window[1]);
  if (causal(c)) last = std::min(last, i);
  return std::max<int64_t>(0, last - first + 1);
}

int64_t pairs(const Case& c, int rank) {
  const Mesh mesh = c.mesh();
  const auto labels = labels_of(c, false);
  const auto lengths = packed(c) ? packing(c, true).lengths
                                 : std::vector<int64_t>(size_t(batch_of(c)), rows_of(c, true));
  const int64_t batch = batch_of(c) / c.ranks(Axis::dp),
                first = batch * (c.at("seq") > 0 ? mesh.coordinate(rank, Axis::dp) : 0);
  int64_t count = 0;
  const Placement rows = rows_on_cp(c, false);
  const IndexMap& map = rows.map ? *rows.map : contiguous_map();
  for (int64_t row : map.owned(rows_of(c, false), int(ranks(c)), mesh.coordinate(rank, Axis::cp)))
    for (int64_t b = first; b < first + batch; ++b) {
      const PackedToken& t = labels[size_t(row * batch_of(c) + b)];
      if (t.document >= 0) count += seen_by(c, t.position, lengths[size_t(t.document)]);
    }
  return count;
}

// By tokens a rank sends all heads of its own; by heads all tokens of those that it was dealt.
std::vector<Traffic> alltoall_traffic(const Case& c, int rank) {
  const Local l(c);
  const Dealing d(c);
  const int64_t k = l.k * d.copies, v = l.v * d.copies, own = d.on_rank(c, rank) * l.p;
  const auto by_heads = [&](int64_t by_tokens) { return by_tokens / d.units * own; };
  std::vector<Traffic> due;
  for (const int64_t n : {l.q, k, v, by_heads(l.o)})
    due.push_back(call(Op::all_to_all, false, n, c.dtype()));
  for (const int64_t n : {l.o, by_heads(l.q)})
    due.push_back(call(Op::all_to_all, true, n, c.dtype()));
  for (const int64_t n : {by_heads(k), by_heads(v)})
    due.push_back(call(Op::all_to_all, true, n, d.copies > 1 ? sums_of_keys(c) : c.dtype()));
  return due;
}

// Exchanges inside runs of u ranks around a ring of p/u of them; its messages are as long as ever:
// u times the tokens, 1/u of the heads.
std::vector<Traffic> hierarchical_traffic(const Case& c) {
  const Local l(c);
  const int64_t u = c.at("inner"), P = l.p / u, lse = l.o / value_dim_of(c);
  const std::string run = u == l.p ? "cp" : fmt::format("cp/{}", u),
                    ring = u == 1 ? "cp" : fmt::format("cp%{}", u);
  std::vector<Traffic> due;
  auto exchange = [&](bool backward, int64_t n, DType dtype) {
    if (u == 1) return;
    due.push_back(call(Op::all_to_all, backward, n, dtype));
    due.back().label = run;
  };
  auto hop = [&](bool backward, DType dtype) {
    due.push_back(call(Op::shift, backward, l.k + l.v, dtype, 1));
    due.back().label = ring;
  };
  for (const int64_t n : {l.q, l.k, l.v}) exchange(false, n, c.dtype());
  for (int64_t i = 0; i + 1 < P; ++i) hop(false, c.dtype());
  exchange(false, l.o, c.dtype());
  exchange(false, lse, lse_type(c));
  exchange(true, l.o, c.dtype());
  if (c.on("lse_grad")) exchange(true, lse, lse_type(c));
  for (int64_t i = 0; i < P && P > 1; ++i) {
    if (i + 1 < P) hop(true, c.dtype());
    hop(true, sums_of_keys(c));
  }
  for (const int64_t n : {l.q, l.k, l.v}) exchange(true, n, c.dtype());
  return due;
}

std::vector<Traffic> traffic(const Case& c, Strategy strategy, int rank) {
  switch (strategy) {
    case Strategy::allgather:
      return allgather_traffic(c);
    case Strategy::ring:
      return ring_traffic(c);
    case Strategy::alltoall:
      return alltoall_traffic(c, rank);
    default:
      return hierarchical_traffic(c);
  }
}

// ---- Keys and cases

std::vector<Key> keys(Strategy strategy) {
  const bool alltoall = strategy == Strategy::alltoall;
  std::vector<Key> list = token_keys("48");
  Key kv_tokens = extent("kv_tokens", "", 1, "keys where there are not as many as queries");
  kv_tokens.derive = [](const Case& c) {
    return own_keys(c) ? sum_of_documents(c, true) : c.text("tokens");
  };
  Key v_dim = extent("v_dim", "", 1, "features of a value head; left out: head_dim");
  v_dim.derive = [](const Case& c) { return c.text("head_dim"); };
  for (Key& k : std::vector<Key>{
           kv_tokens,
           list_key("kv_docs", 0, "keys of packed documents where they are not their queries"),
           offsets_key("cu_seqlens_k", "in place of kv_docs"), index_key(),
           extent("heads", alltoall ? "24" : "8", 1, "query heads"), kv_heads_key(alltoall),
           replicated::copies_key(), extent("head_dim", "3", 1, "features of a query or key head"),
           v_dim, mask_keys()[0], mask_keys()[1], probs_key(),
           number_key("softcap", -1e6, 1e6, "c of c tanh(S/c); left out: none"), scale_key(),
           toggle("lse_grad", "off", "a cotangent on lse as well")})
    list.push_back(std::move(k));
  if (strategy == Strategy::hierarchical) {
    Key inner = extent("inner", "", 1, "ranks of a run that exchanges heads; left out: 2, or 1");
    inner.derive = [](const Case& c) { return std::string(ranks(c) % 2 ? "1" : "2"); };
    list.push_back(inner);
  }
  if (alltoall) {
    list.push_back(toggle("kv_replicate", "off", "copy key heads to the query heads of cp ranks"));
    list.push_back(toggle("uneven_heads", "off", "the first ranks of cp have one head more"));
  }
  return list;
}

std::vector<std::string> cases_of(const std::string& name, const std::string& tier,
                                  Strategy strategy) {
  const bool alltoall = strategy == Strategy::alltoall;
  // The first is a witness of operators, whose healthy run is judged once.
  auto smoke = crossed(
      {name},
      {"cp=2 tokens=16 heads=4 layout=zigzag mask=causal",
       "cp=4 tokens=24 layout=zigzag mask=causal v_dim=5", "cp=4 tokens=24 mask=causal window=5,0",
       "cp=2 layout=zigzag mask=causal docs=7,1,8",
       "cp=4 layout=zigzag mask=causal docs=7,1,8 lse_grad=on",
       "cp=2 tokens=24 layout=zigzag mask=causal dtype=bf16", "cp=2 tp=2 tokens=24 softcap=2"});
  if (alltoall)
    smoke.push_back(name + " cp=4 tokens=16 uneven_heads=on heads=10 layout=zigzag mask=causal");
  if (tier == "smoke") return smoke;
  const std::vector<std::string> all_ranks{name, name + " cp=2", name + " cp=3", name + " cp=4",
                                           name + " cp=8"};
  const std::vector<std::string> masks{"", "mask=causal", "mask=causal window=5,0", "window=3,2"};
  const std::vector<std::string> dense{"", "layout=zigzag"};
  const std::vector<std::string> documents{
      "layout=contiguous docs=7,1,8", "layout=zigzag docs=7,1,8", "layout=zigzag_row docs=7,1,8"};
  // On a shard edge and off it, empty documents, one and many, all shorter than cp.
  const std::vector<std::string> nasty{"docs=0,5,0,0,7,0", "docs=8,8",           "docs=16",
                                       "docs=1,1,2,1",     "docs=9,7",           "docs=7,9",
                                       "docs=3",           "docs=1,2,3,4,5,6,7", "docs=17,1"};
  std::vector<std::string> heads{"heads=8 kv_heads=1", "heads=8 kv_heads=8 head_dim=1",
                                 "heads=4 head_dim=4 v_dim=1"};
  // Key heads: one, fewer than tp, and more.
  std::vector<std::string> shared{"kv_heads=1", "kv_heads=2 head_dim=4", "kv_heads=8 dtype=f32"};
  if (strategy == Strategy::hierarchical) {
    shared = {"kv_heads=1 inner=1", "kv_heads=2 head_dim=4 inner=1", "kv_heads=8 dtype=f32"};
    heads = {"inner=4", "inner=1", "inner=4 lse_grad=on docs=7,1,8",
             "heads=8 kv_heads=2 head_dim=4"};
  }
  if (alltoall) {
    shared = {"kv_heads=1 kv_replicate=on", "kv_heads=2 head_dim=4 kv_replicate=on",
              "kv_heads=8 dtype=f32"};
    heads = {"heads=8 kv_heads=1 kv_replicate=on", "heads=8 kv_heads=2 kv_replicate=on lse_grad=on",
             "heads=8 kv_heads=8 head_dim=1", "heads=8 head_dim=4 v_dim=1"};
  }
  // Key heads that are copied, and heads that cp does not divide: dealt alone, with their key
  // heads, with copies of these.
  const std::vector<std::string> by_heads{
      "cp=4 heads=8 kv_heads=2 kv_replicate=on dtype=bf16",
      "cp=4 heads=8 kv_heads=2 kv_replicate=on seq=16 batch=3",
      "cp=3 uneven_heads=on heads=8 kv_heads=4 docs=7,1,8 lse_grad=on",
      "cp=3 uneven_heads=on heads=8 kv_heads=2 kv_replicate=on dtype=bf16",
      "cp=4 uneven_heads=on heads=12 kv_heads=3 kv_replicate=on strides=transposed mask=causal",
      "tp=2 cp=2 uneven_heads=on heads=12 kv_heads=6 tokens=16 order=cp,tp",
      "cp=8 uneven_heads=on heads=9 seq=16 batch=2 v_dim=5 kv_tokens=64"};
  const auto ci = together(
      {smoke,
       crossed(crossed(all_ranks, dense), masks),
       crossed(crossed(all_ranks, documents), {"mask=causal", "window=3,2"}),
       crossed(crossed({name + " cp=4"}, documents), {"", "mask=causal window=2,0 softcap=2"}),
       crossed({name + " cp=4 layout=zigzag mask=causal"}, nasty),
       crossed({name + " cp=2 mask=causal"}, nasty),
       crossed({name + " tp=2 cp=2 layout=zigzag mask=causal"}, shared),
       {name + " tp=4 cp=2 mask=causal " + shared[1]},
       crossed({name + " cp=2", name + " cp=4 layout=zigzag mask=causal",
                name + " cp=2 layout=zigzag_row mask=causal lse_grad=on"},
               {"docs=7,1,8 kv_docs=5,3,12", "docs=4,0,6,5 kv_docs=0,7,2,5"}),
       crossed({name + " cp=4 layout=zigzag mask=causal"},
               {"docs=7,1,8 index=i32", "docs=0,5,0,0,7,0 index=i64",
                "cu_seqlens=0,7,8,16 cu_seqlens_k=0,5,8,20 index=i32 strides=transposed"}),
       {name + " cp=2 cu_seqlens=0,9,16 index=i64", name + " cp=2 docs=7,9 index=i64 dtype=bf16",
        name + " cp=2 layout=zigzag_row docs=4,0,6,5 kv_docs=0,7,2,5 index=i64 mask=causal",
        name + " tp=2 cp=2 docs=17,1 index=i32 window=3,2",
        // One rank sends nothing: no sum meets the wire's type.
        name + " dtype=f32 wire=bf16"},
       crossed({name + " cp=4 layout=zigzag mask=causal"}, heads),
       crossed({name + " cp=4 layout=zigzag mask=causal", name + " cp=2"},
               {"dtype=f32", "dtype=bf16", "dtype=f16", "dtype=bf16 docs=7,1,8",
                "dtype=bf16 probs=bf16", "dtype=f16 probs=f16 docs=7,1,8 window=3,2",
                "dtype=f32 acc=f64", "strides=transposed lse_grad=on", "scale=300",
                "dtype=f32 scale=40", "softcap=2 lse_grad=on", "seq=16 batch=3 v_dim=5",
                "seq=16 batch=2 dp=2", "kv_tokens=64", "kv_tokens=16 lse_grad=on"}),
       crossed({name + " cp=4 layout=zigzag mask=causal"},
               {"tokens=8", "tokens=8 heads=8 head_dim=1", "strides=transposed docs=7,1,8",
                "strides=transposed seq=8 batch=3", "dtype=bf16 wire=bf16", "strides=expanded",
                "strides=expanded lse_grad=on docs=7,1,8 dtype=f32", "strides=expanded_inputs",
                "strides=expanded_inputs seq=8 batch=3 dtype=bf16"}),
       crossed({name + " cp=2 tp=2 layout=zigzag mask=causal"},
               {"", "docs=7,1,8", "order=cp,tp", "lse_grad=on"}),
       // Keys that meet: a path is taken where two of them are given.
       crossed({name + " cp=4"},
               {"lse_grad=on dtype=bf16", "lse_grad=on seq=16 batch=3", "mask=causal window=5,-1",
                "window=-1,2", "window=0,2", "mask=causal window=5,2",
                "kv_tokens=64 mask=causal window=5,0", "seq=16 batch=3 kv_tokens=96 mask=causal",
                "docs=7,1,8 kv_docs=5,3,12 window=3,2"}),
       {name + " tp=2 cp=2 softcap=2 dtype=f32",
        name + " tp=2 cp=2 dp=2 seq=16 batch=2 mask=causal",
        // More keys of a block than a tile holds.
        name + " cp=2 tokens=272 heads=4 mask=causal layout=zigzag"},
       alltoall ? crossed({name}, by_heads) : std::vector<std::string>{}});
  if (tier != "nightly") return ci;
  return together(
      {ci,
       crossed(crossed(crossed(all_ranks, dense), masks),
               {"softcap=2", "dtype=f32", "dtype=bf16", "seq=48 batch=2", "lse_grad=on"}),
       crossed(crossed(crossed(all_ranks, documents), masks), {"", "dtype=f32 lse_grad=on"}),
       crossed(crossed(all_ranks, nasty), {"mask=causal", "layout=zigzag", "layout=zigzag_row"})});
}

std::vector<std::string> illegal_of(const std::string& name) {
  return crossed(
      {name},
      {"cp=4 tokens=10", "cp=4 layout=zigzag tokens=12", "cp=2 layout=zigzag seq=3 batch=4",
       "cp=2 docs=7,-1,10", "cp=2 docs=7,1,8 tokens=17", "cp=2 docs=0,0 tokens=1",
       "cp=2 layout=zigzag_row", "cp=2 docs=7,1,8 kv_tokens=8", "cp=2 docs=7,1,8 kv_docs=7,9",
       "cp=2 docs=7,1,8 kv_docs=7,-1,10", "cp=2 docs=7,1 kv_docs=0,0", "cp=2 kv_docs=7,1,40",
       "cp=2 docs=7,1,8 kv_docs=7,1,9 kv_tokens=16", "cp=2 kv_tokens=9", "cp=2 heads=8 kv_heads=3",
       "cp=2 window=-2,0", "cp=2 window=0,-2", "cp=2 dp=2 seq=8 batch=3",
       "cp=2 seq=8 batch=3 tokens=20", "cp=2 seq=8 batch=3 kv_tokens=10", "tp=4 heads=6 kv_heads=2",
       "cp=2 batch=2", "cp=2 dp=2", "cp=2 pp=2", "tp=4 heads=12 kv_heads=3",
       "tp=2 heads=8 kv_heads=4 kv_replicas=2", "cp=2 softcap=-1", "cp=2 softcap=1e-320",
       "cp=2 docs=7,1,8 seq=8 batch=2", "cp=2 scale=1e6", "cp=2 scale=-1e6 docs=7,1,8",
       "cp=2 fill=large", "cp=2 docs=7,1,8 cu_seqlens=0,7,8,16",
       "cp=2 docs=7,1,8 kv_docs=7,1,8 cu_seqlens_k=0,7,8,16", "cp=2 index=i32",
       // Malformed as the subject gets them: they do not begin at 0, fall, end
       // short and long, of queries and of keys.
       "cp=2 cu_seqlens=1,8,9,17 index=i32", "cp=2 cu_seqlens=0,7,5,16 index=i64",
       "cp=2 cu_seqlens=0,7,8,15 tokens=16 index=i32",
       "cp=2 cu_seqlens=0,7,8,17 tokens=16 index=i64", "cp=2 cu_seqlens=0 tokens=16 index=i32",
       "cp=2 docs=7,1,8 cu_seqlens_k=1,8,9,17 index=i64",
       "cp=2 docs=7,1,8 cu_seqlens_k=0,7,5,16 index=i32",
       "cp=2 docs=7,1,8 cu_seqlens_k=0,7,8,15 kv_tokens=16 index=i64",
       "cp=2 docs=7,1,8 cu_seqlens_k=0,7,8,17 kv_tokens=16 index=i32"});
}

Contract attention(const char* name, Strategy strategy, const char* summary) {
  Contract c;
  c.name = name;
  c.family = "attention";
  c.summary = summary;
  c.keys = keys(strategy);
  c.precondition = strategy == Strategy::alltoall       ? primitives::refused_attention_alltoall
                   : strategy == Strategy::hierarchical ? primitives::refused_attention_hierarchical
                                                        : primitives::refused_attention;
  c.operands = [strategy](const Case& line) { return operands(line, strategy); };
  c.forward = forward;
  c.backward = backward;
  c.traffic = [strategy](const Case& line, const std::string&, int rank) {
    return ranks(line) == 1 ? std::vector<Traffic>() : traffic(line, strategy, rank);
  };
  c.cases = [=](const std::string& tier) { return cases_of(name, tier, strategy); };
  c.illegal = illegal_of(name);
  c.visible = visible;
  c.pairs = pairs;
  c.sequences = sequences_of;
  // Loud scores switch between keys within steps that no finite difference takes.
  c.stiff = [](const Case& line) { return std::abs(reading::number(line, "scale", 0)) >= 10; };
  const std::string line = name;
  c.witnesses = {line + " cp=2 layout=zigzag mask=causal tokens=16 heads=4 kv_heads=2",
                 line + " cp=3 layout=zigzag mask=causal tokens=12 heads=6 kv_heads=3",
                 line + " cp=4 layout=zigzag mask=causal tokens=16 heads=8 kv_heads=4",
                 line + " cp=2 tp=2 layout=zigzag mask=causal tokens=16 heads=8 kv_heads=4"};
  return c;
}

}  // namespace

void family_attention(Registry& r) {
  r.add(attention("attention_allgather", Strategy::allgather,
                  "attention, keys and values gathered over cp"));
  r.add(attention("attention_ring", Strategy::ring, "attention, keys and values turning on cp"));
  Contract alltoall = attention("attention_alltoall", Strategy::alltoall,
                                "attention, tokens exchanged for heads on cp");
  alltoall.illegal.push_back("attention_alltoall cp=4 heads=8 kv_heads=2");
  alltoall.illegal.push_back("attention_alltoall cp=3 heads=8 kv_heads=8");
  alltoall.illegal.push_back("attention_alltoall cp=4 heads=12 kv_heads=3 kv_replicate=on");
  alltoall.illegal.push_back("attention_alltoall cp=4 heads=8 kv_heads=2 uneven_heads=on");
  alltoall.illegal.push_back(
      "attention_alltoall cp=4 heads=3 kv_heads=1 kv_replicate=on uneven_heads=on");
  r.add(std::move(alltoall));
  Contract hierarchical = attention("attention_hierarchical", Strategy::hierarchical,
                                    "attention, heads exchanged in runs, keys turning across them");
  hierarchical.illegal.push_back("attention_hierarchical cp=4 inner=3");
  hierarchical.illegal.push_back("attention_hierarchical cp=4 inner=4 heads=8 kv_heads=2");
  r.add(std::move(hierarchical));
  const auto ours = [&](const char* contract, auto make) {
    Subject s;
    s.contract = contract;
    s.make = make;
    r.add(std::move(s));
    add_ours_on_device(r, contract);
  };
  ours("attention_allgather", [] { return std::make_unique<primitives::AttentionAllGather>(); });
  ours("attention_ring", [] { return std::make_unique<primitives::AttentionRing>(); });
  ours("attention_hierarchical",
       [] { return std::make_unique<primitives::AttentionHierarchical>(); });
  ours("attention_alltoall", [] { return std::make_unique<primitives::AttentionAllToAll>(); });
}

}  // namespace shardproof
