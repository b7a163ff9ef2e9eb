// The linear family: Y = X W^T + b with W cut by rows (linear_column) or by columns (linear_row).
// Both are linear in each operand, so integers make every intermediate exact at any rank count.
#include "suites/linear.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "fixtures/fills.hpp"
#include "fixtures/index_maps.hpp"
#include "oracle/check.hpp"
#include "oracle/registry.hpp"
#include "primitives/linear.hpp"
#include "primitives/linear_line.hpp"
#include "reference/running_error.hpp"
#include "suites/ours.hpp"
#include "suites/reading.hpp"

namespace shardproof {
namespace linears {

Key extent(const char* name, const char* fallback, int64_t low, const char* help, int64_t high) {
  Key k{name, fallback, help};
  k.low = low, k.high = high;
  return k;
}

Key choice(const char* name, const char* fallback, std::vector<std::string> choices,
           const char* help) {
  Key k{name, fallback, help};
  k.choices = std::move(choices);
  return k;
}

Key toggle(const char* name, const char* fallback, const char* help) {
  Key k{name, fallback, help};
  k.choices = {"on", "off"};
  return k;
}

Key choice(const char* name, std::vector<std::string> choices, const char* help) {
  const std::string first = choices[0];
  return choice(name, first.c_str(), std::move(choices), help);
}

Key share(const char* name, const char* fallback, const char* help) {
  Key k{name, fallback, help};
  k.valid = [](std::string_view text) {
    const bool digits = text.find_first_not_of("0123456789.") == std::string_view::npos;
    const auto v = reading::decimal(text);
    if (digits && v && *v >= 0 && *v < 1) return std::string();
    return std::string("a number from 0 to below 1, such as 0.1");
  };
  return k;
}

Key positive(const char* name, const char* fallback, const char* help) {
  Key k{name, fallback, help};
  k.valid = [](std::string_view text) {
    return reading::decimal(text).value_or(0) > 0 ? std::string() : std::string("a number above 0");
  };
  return k;
}

std::vector<Key> token_keys() {
  Key tokens = extent("tokens", "", 1, "rows of x; left out: seq*batch, or 24");
  tokens.derive = [](const Case& c) {
    return c.at("seq") > 0 ? std::to_string(c.at("seq") * c.at("batch")) : std::string("24");
  };
  return {tokens,
          extent("seq", "0", 0, "x is [seq,batch,features], cut by seq; 0: [tokens,features]"),
          extent("batch", "1", 1, "dim 1 of x where seq is given")};
}

Key microbatches_key() {
  return extent("microbatches", "1", 1, "forwards and backwards in a step of `accumulate`", 16);
}

std::vector<int64_t> token_shape(const Case& c, int64_t features) {
  if (c.at("seq") > 0) return {c.at("seq"), c.at("batch"), features};
  return {c.at("tokens"), features};
}

Layout tokens_on(const Placement& tp) {
  return {{Axis::dp, S(0)}, {Axis::cp, S(0)}, {Axis::tp, tp}};
}
Layout parameter_on(const Placement& tp) {
  return {{Axis::dp, R()}, {Axis::cp, R()}, {Axis::tp, tp}};
}
int last(const std::vector<int64_t>& shape) { return int(shape.size()) - 1; }

Local::Local(const Case& c)
    : p(c.ranks(Axis::tp)),
      tokens(c.at("tokens") / (int64_t(c.ranks(Axis::dp)) * c.ranks(Axis::cp))),
      sp(c.has("sp") && c.on("sp")) {}

DType wire_of(const Case& c) { return dtype_from(c.text("wire")).value_or(c.dtype()); }
DType loss_type(const Case& c) { return c.dtype() == DType::f64 ? DType::f64 : DType::f32; }
DType accumulation_of(const Case& c) {
  const bool wide = c.dtype() == DType::f64 || dtype_from(c.text("acc")) == DType::f64;
  return wide ? DType::f64 : DType::f32;
}

std::optional<int64_t> range_of_products(const Case& c, int64_t terms, int factors) {
  DType narrowest = c.dtype();
  for (const char* key : {"acc", "wire", "grad"})
    if (const auto type = dtype_from(c.text(key)))
      if (significand_bits(*type) < significand_bits(narrowest)) narrowest = *type;
  return exact_range(narrowest, terms, factors);
}

Traffic call(Op op, bool backward, int64_t count, DType dtype) {
  const bool sums = op == Op::all_reduce || op == Op::reduce_scatter;
  return {op, sums ? Reduce::sum : Reduce::none, "tp", backward, count, dtype};
}

Whole whole(std::vector<int64_t> shape, reference::Values value) {
  return {std::move(shape), std::move(value)};
}

Gauge gauge(reference::Values magnitude, reference::Values squares, int64_t terms, int64_t reduced,
            bool independent) {
  Gauge g;
  g.magnitude = std::move(magnitude), g.squares = std::move(squares);
  g.terms = terms, g.reduced = reduced, g.independent = independent;
  return g;
}

reference::Values sum_of_stack(const Whole& w, int64_t elements) {
  reference::Values sum(static_cast<size_t>(elements));
  for (size_t i = 0; i < w.value.size(); ++i) sum[i % size_t(elements)] += w.value[i];
  return sum;
}

namespace {
const reference::Values& as_is(const reference::Values& v) { return v; }
}  // namespace

LinearSums on_own_tokens(const reference::LinearShape& s, int64_t own, int64_t ranks) {
  return {s, {s.in + 1, 1}, {s.out, 1}, {own, ranks}, {own, ranks}};
}

std::vector<Whole> linear_forward(const LinearSums& o, std::vector<int64_t> y,
                                  std::span<const Whole> in, std::vector<Gauge>* gauges) {
  const reference::Values none;
  const reference::Values& b = in.size() > 2 ? in[2].value : none;
  auto product = [&](auto size) {
    return reference::linear(o.shape, size(in[0].value), size(in[1].value), size(b));
  };
  if (gauges)
    *gauges = listed(
        gauge(product(reference::absolute), product(reference::squared), o.y.terms, o.y.reduced));
  return listed(whole(std::move(y), product(as_is)));
}

std::vector<Whole> linear_backward(const LinearSums& o, std::span<const Whole> in,
                                   std::span<const Whole> cot, std::vector<Gauge>* gauges) {
  auto gradients = [&](auto size) {
    return reference::linear_backward(o.shape, size(in[0].value), size(in[1].value),
                                      size(cot[0].value));
  };
  auto d = gradients(as_is);
  auto out = listed(whole(in[0].shape, std::move(d.x)), whole(in[1].shape, std::move(d.w)));
  if (in.size() > 2) out.push_back(whole(in[2].shape, std::move(d.b)));
  if (!gauges) return out;
  auto m = gradients(reference::absolute), s = gradients(reference::squared);
  *gauges = listed(gauge(std::move(m.x), std::move(s.x), o.x.terms, o.x.reduced),
                   gauge(std::move(m.w), std::move(s.w), o.w.terms, o.w.reduced));
  if (in.size() > 2)
    gauges->push_back(gauge(std::move(m.b), std::move(s.b), o.b.terms, o.b.reduced));
  return out;
}

// ---- Bounds of sums whose parts pass several types

Relative::Relative(const Case& c) : p_(precision_of(c, Declared{})) {}
Relative Relative::sum(int64_t terms) const {
  return with(reference::gamma_of(double(terms), p_.u_acc + unit_roundoff(DType::f64)));
}
Relative Relative::rounded(DType type) const { return with(unit_roundoff(type)); }
Relative Relative::stored() const { return with(p_.u_out); }
Relative Relative::reduced(int64_t ranks) const { return on_wire(ranks, p_.u_wire); }
Relative Relative::reduced(int64_t ranks, DType wire) const {
  return on_wire(ranks, unit_roundoff(wire));
}
Relative Relative::on_wire(int64_t ranks, double u) const {
  return ranks > 1 ? with(reference::gamma_of(double(ranks), u)) : *this;
}
Relative Relative::with(double more) const {
  Relative r = *this;
  r.error_ += more + error_ * more;
  return r;
}

Gauge gauge_of(const Relative& r, reference::Values magnitude) {
  Gauge g;
  for (double m : magnitude) g.bound.push_back(r.of(m));
  g.magnitude = std::move(magnitude);
  return g;
}

// ---- Calls and products over tp

namespace {

bool says(const Case& c, const char* key) { return c.has(key) && c.on(key); }
bool wants_input_gradient(const Case& c) { return !c.has("input_grad") || c.on("input_grad"); }
// x comes whole, and the own columns are taken here.
bool scatters_input(const Case& c) {
  return c.has("input_is_parallel") && !c.on("input_is_parallel");
}
// Calls over tokens are rings of shifts, products those of one rank's block each.
bool in_ring(const Case& c) { return c.has("overlap") && c.text("overlap") == "ring"; }
// A block of every rank, or a sum of blocks, from each rank to the next until all have seen it.
void go_round(std::vector<Traffic>& due, const Local& l, bool backward, int64_t block,
              DType dtype) {
  Traffic hop = call(Op::shift, backward, block, dtype);
  hop.hop = 1;
  due.insert(due.end(), size_t(l.p - 1), hop);
}
// Calls over tokens are cut into chunks of the n rows that a rank gives or gets, products likewise.
bool in_chunks(const Case& c) { return c.has("overlap") && c.text("overlap") == "chunks"; }
int64_t tokens_of_row(const Case& c) { return c.at("seq") > 0 ? c.at("batch") : 1; }
int64_t rows_of_call(const Case& c, const Local& l) {
  return l.tokens / tokens_of_row(c) / (l.sp ? l.p : 1);
}
std::vector<int64_t> rows_of_chunks(const Case& c, const Local& l) {
  const int64_t n = rows_of_call(c, l), chunks = c.at("chunks");
  std::vector<int64_t> rows;
  for (int64_t i = 0; i < chunks; ++i) rows.push_back(n / chunks + (i < n % chunks));
  return rows;
}
void add_call(std::vector<Traffic>& due, const Case& c, const Local& l, const Traffic& whole) {
  if (!in_chunks(c)) return due.push_back(whole);
  for (int64_t rows : rows_of_chunks(c, l)) {
    due.push_back(whole);
    due.back().count = whole.count / rows_of_call(c, l) * rows;
  }
}
// Tokens of each product whose factor or result travels.
std::vector<int64_t> tokens_of_products(const Case& c) {
  const Local l(c);
  if (l.p == 1) return {l.tokens};
  if (in_ring(c)) return std::vector<int64_t>(size_t(l.p), l.tokens / l.p);
  if (!in_chunks(c)) return {l.tokens};
  std::vector<int64_t> tokens;
  for (int64_t rows : rows_of_chunks(c, l))
    tokens.insert(tokens.end(), size_t(l.sp ? l.p : 1), rows * tokens_of_row(c));
  return tokens;
}
// A product of all tokens, or, where it is taken apart, one of each block of them.
void multiply_blocks(std::vector<Gemm>& due, const Case& c, const Gemm& whole,
                     int64_t Gemm::*tokens, bool travels) {
  if (!travels) return due.push_back(whole);
  for (int64_t n : tokens_of_products(c)) {
    due.push_back(whole);
    due.back().*tokens = n;
  }
}

}  // namespace

std::vector<Traffic> column_calls(const Case& c, DType sums) {
  const Local l(c);
  std::vector<Traffic> due;
  if (l.p == 1) return due;
  const int64_t x = l.tokens * c.at("in");
  if (in_ring(c)) {
    go_round(due, l, false, x / l.p, c.dtype());
    if (!c.on("frozen")) go_round(due, l, true, x / l.p, c.dtype());
    if (wants_input_gradient(c)) go_round(due, l, true, x / l.p, sums);
    return due;
  }
  if (l.sp) add_call(due, c, l, call(Op::all_gather, false, x / l.p, c.dtype()));
  if (says(c, "gather_output"))
    due.push_back(call(Op::all_gather, false, l.tokens * c.at("out") / l.p, c.dtype()));
  if (l.sp && !c.on("frozen")) add_call(due, c, l, call(Op::all_gather, true, x / l.p, c.dtype()));
  if (wants_input_gradient(c))
    add_call(due, c, l, call(l.sp ? Op::reduce_scatter : Op::all_reduce, true, x, sums));
  return due;
}

std::vector<Traffic> row_calls(const Case& c, DType sums, DType bias) {
  const Local l(c);
  std::vector<Traffic> due;
  if (l.p == 1) return due;
  const int64_t y = l.tokens * c.at("out");
  if (in_ring(c)) {
    go_round(due, l, false, y / l.p, sums);
    go_round(due, l, true, y / l.p, c.dtype());
    if (c.on("bias") && !c.on("frozen"))
      due.push_back(call(Op::all_reduce, true, c.at("out"), bias));
    return due;
  }
  add_call(due, c, l, call(l.sp ? Op::reduce_scatter : Op::all_reduce, false, y, sums));
  if (l.sp) add_call(due, c, l, call(Op::all_gather, true, y / l.p, c.dtype()));
  if (l.sp && c.on("bias") && !c.on("frozen"))
    due.push_back(call(Op::all_reduce, true, c.at("out"), bias));
  if (scatters_input(c) && wants_input_gradient(c))
    due.push_back(call(Op::all_gather, true, l.tokens * c.at("in") / l.p, c.dtype()));
  return due;
}

std::vector<Gemm> column_gemms(const Case& c) {
  const Local l(c);
  const int64_t out = c.at("out") / l.p, in = c.at("in");
  std::vector<Gemm> due;
  multiply_blocks(due, c, {"Y = X W^T", false, l.tokens, out, in}, &Gemm::m, l.sp);
  if (!c.on("frozen"))
    multiply_blocks(due, c, {"dW = dY^T X", true, out, in, l.tokens}, &Gemm::k, l.sp);
  if (wants_input_gradient(c))
    multiply_blocks(due, c, {"dX = dY W", true, l.tokens, in, out}, &Gemm::m, true);
  return due;
}

std::vector<Gemm> row_gemms(const Case& c) {
  const Local l(c);
  const int64_t in = c.at("in") / l.p, out = c.at("out");
  std::vector<Gemm> due;
  multiply_blocks(due, c, {"Z = X W^T", false, l.tokens, out, in}, &Gemm::m, true);
  if (wants_input_gradient(c))
    multiply_blocks(due, c, {"dX = dY W", true, l.tokens, in, out}, &Gemm::m, l.sp);
  if (!c.on("frozen"))
    multiply_blocks(due, c, {"dW = dY^T X", true, out, in, l.tokens}, &Gemm::k, l.sp);
  return due;
}

std::vector<std::string> crossed(const std::vector<std::string>& heads,
                                 const std::vector<std::string>& with) {
  std::vector<std::string> lines;
  for (const std::string& head : heads)
    for (const std::string& words : with)
      lines.push_back(words.empty() ? head : head + " " + words);
  return lines;
}

std::vector<std::string> together(std::vector<std::vector<std::string>> lists) {
  std::vector<std::string> all;
  for (auto& list : lists)
    for (std::string& line : list)
      if (std::find(all.begin(), all.end(), line) == all.end()) all.push_back(std::move(line));
  return all;
}

}  // namespace linears

namespace {

using namespace linears;
using reference::Values;

// ---- What both linears read from a line

bool has_bias(const Case& c) { return c.on("bias"); }
bool hands_bias_back(const Case& c) { return c.on("skip_bias_add"); }

reference::LinearShape shape_of(const Case& c) { return {c.at("tokens"), c.at("in"), c.at("out")}; }

// Layouts of X, W, b, Y and of the bias that is handed back, on tp.
struct OnTp {
  Placement x, w, b, y, b_out;
};

std::vector<Operand> operands(const Case& c, const OnTp& on) {
  const auto x = token_shape(c, c.at("in")), y = token_shape(c, c.at("out"));
  const bool trained = !c.on("frozen");
  // `cancelling` pairs one factor of each product along its contraction: x along in (Y), w along
  // out (dX), the cotangent of y along tokens (dW). Two paired factors would not cancel.
  std::vector<Operand> list{
      {"x", Operand::input, x, tokens_on(on.x), c.on("input_grad"), last(x)},
      {"w", Operand::parameter, {c.at("out"), c.at("in")}, parameter_on(on.w), trained, 0}};
  if (has_bias(c))
    list.push_back({"b", Operand::parameter, {c.at("out")}, parameter_on(on.b), trained});
  list.push_back({"y", Operand::output, y, tokens_on(on.y), true, 0});
  if (hands_bias_back(c))
    list.push_back({"b_out", Operand::output, {c.at("out")}, parameter_on(on.b_out)});
  return list;
}

template <class Compute>
Gauge gauge_of(const Sums& s, const Compute& compute) {
  return gauge(compute(reference::absolute), compute(reference::squared), s.terms, s.reduced);
}

std::vector<Whole> forward(const Case& c, std::span<const Whole> in, std::vector<Gauge>* gauges,
                           const Sums& sums) {
  const bool adds = has_bias(c) && !hands_bias_back(c);
  const Values none;
  const Values& b = adds ? in[2].value : none;
  auto out = listed(whole(token_shape(c, c.at("out")),
                          reference::linear(shape_of(c), in[0].value, in[1].value, b)));
  if (hands_bias_back(c)) out.push_back(in[2]);
  if (gauges) {
    *gauges = listed(gauge_of(sums, [&](auto size) {
      return reference::linear(shape_of(c), size(in[0].value), size(in[1].value), size(b));
    }));
    if (hands_bias_back(c)) gauges->push_back({});  // moved, not computed
  }
  return out;
}

struct GradientSums {
  Sums x, w, b;
};

std::vector<Whole> backward(const Case& c, std::span<const Whole> in, std::span<const Whole> cot,
                            std::vector<Gauge>* gauges, const GradientSums& sums) {
  const auto shape = shape_of(c);
  auto gradients = [&](auto size) {
    return reference::linear_backward(shape, size(in[0].value), size(in[1].value),
                                      size(cot[0].value));
  };
  auto d = gradients(as_is);
  if (hands_bias_back(c)) d.b = sum_of_stack(cot[1], shape.out);

  const bool due[] = {c.on("input_grad"), !c.on("frozen"), has_bias(c) && !c.on("frozen")};
  auto out = listed(due[0] ? whole(in[0].shape, std::move(d.x)) : Whole{},
                    due[1] ? whole(in[1].shape, std::move(d.w)) : Whole{});
  if (has_bias(c)) out.push_back(due[2] ? whole(in[2].shape, std::move(d.b)) : Whole{});
  if (!gauges) return out;

  auto sizes = gradients(reference::absolute), squares = gradients(reference::squared);
  const auto moved = [](Values& magnitude, Values& square, const Sums& s) {
    return gauge(std::move(magnitude), std::move(square), s.terms, s.reduced);
  };
  *gauges = listed(moved(sizes.x, squares.x, sums.x), moved(sizes.w, squares.w, sums.w));
  if (!has_bias(c)) return out;
  if (!hands_bias_back(c)) {
    gauges->push_back(moved(sizes.b, squares.b, sums.b));
  } else {
    Whole absolute{cot[1].shape, reference::absolute(cot[1].value)},
        squared{cot[1].shape, reference::squared(cot[1].value)};
    gauges->push_back(gauge(sum_of_stack(absolute, shape.out), sum_of_stack(squared, shape.out), 1,
                            sums.b.reduced));
  }
  return out;
}

// Sums of Y (and its bias), dX, dW over the microbatches of a step: the longest decides.
std::optional<int64_t> integer_range(const Case& c) {
  return range_of_products(
      c, std::max({c.at("in") + 1, c.at("out"), c.at("tokens") * c.at("microbatches")}));
}

std::vector<Key> common_keys(Key in, Key out) {
  std::vector<Key> keys = token_keys();
  keys.push_back(std::move(in));
  keys.push_back(std::move(out));
  keys.push_back(toggle("bias", "on", "add b"));
  keys.push_back(
      toggle("sp", "off", "sequence parallel: tokens are cut over tp outside the layer"));
  keys.push_back(choice("overlap", {"off", "ring", "chunks"},
                        "calls over tokens that are under way while blocks are multiplied; ring: "
                        "under sp, as shifts; chunks: as many calls as chunks= says"));
  Key chunks = extent("chunks", "", 1, "runs of a rank's rows, each a call; left out: 2, or 1");
  chunks.derive = [](const Case& c) {
    return std::string(c.text("overlap") == "chunks" ? "2" : "1");
  };
  keys.push_back(chunks);
  keys.push_back(toggle("skip_bias_add", "off", "hand b back instead of adding it"));
  keys.push_back(toggle("frozen", "off", "no gradient of w and b"));
  keys.push_back(toggle("input_grad", "on", "gradient of x"));
  keys.push_back(microbatches_key());
  return keys;
}

// Lines of either linear whose calls over tokens are taken apart.
std::vector<std::string> ring_cases(const std::string& contract,
                                    const std::vector<std::string>& attributes) {
  const auto on = [&](std::initializer_list<const char*> heads) {
    std::vector<std::string> lines;
    for (const char* head : heads) lines.push_back(contract + head + " sp=on overlap=ring");
    return lines;
  };
  return together(
      {crossed(on({"", " tp=2", " tp=3", " tp=4", " tp=8"}),
               {"", "dtype=f32", "dtype=bf16", "dtype=f16"}),
       crossed(
           on({" tp=3", " tp=8"}),
           {"fill=normal", "dtype=f32 fill=normal", "dtype=bf16 fill=normal",
            "dtype=f16 fill=normal", "dtype=bf16 wire=f32 fill=normal",
            "dtype=f32 acc=f64 fill=normal", "dtype=f32 fill=large", "dtype=f32 fill=cancelling"}),
       crossed(on({" tp=4"}),
               {"skip_bias_add=on", "frozen=on", "input_grad=off", "bias=off", "seq=24 batch=2",
                "microbatches=2", "microbatches=3 dtype=f32 fill=normal",
                "microbatches=2 dtype=bf16 grad=f32 fill=normal", "strides=transposed",
                "strides=transposed seq=24 batch=2", "strides=expanded_inputs"}),
       on({" tp=2 dp=2", " tp=4 dp=2", " tp=2 cp=2 dp=2", " tp=2 dp=2 order=dp,tp"}),
       crossed(on({" tp=4"}), attributes)});
}

std::vector<std::string> chunk_cases(const std::string& contract,
                                     const std::vector<std::string>& attributes) {
  const std::string in_four = contract + " tp=4 sp=on overlap=chunks chunks=4";  // 2, 2, 1, 1 rows
  const std::vector<std::string> ways{"overlap=chunks", "sp=on overlap=chunks"};
  return together(
      {crossed(crossed({contract}, {"", "tp=2", "tp=3", "tp=4", "tp=8"}), ways),
       crossed(crossed({contract + " tp=4 dtype=bf16"}, ways), {"", "wire=f32 fill=normal"}),
       crossed({contract + " tp=3 overlap=chunks chunks=5"},
               {"dtype=f16 fill=normal", "dtype=f32 fill=cancelling"}),
       crossed({contract + " tp=8 sp=on overlap=chunks"},
               {"dtype=f32 fill=normal", "dtype=bf16 fill=normal"}),
       crossed({in_four},
               {"skip_bias_add=on", "frozen=on", "input_grad=off", "bias=off", "seq=24 batch=2",
                "microbatches=2", "microbatches=2 dtype=bf16 grad=f32 fill=normal",
                "strides=transposed", "strides=expanded_inputs"}),
       crossed({contract + " tp=4 overlap=chunks chunks=5"},
               {"frozen=on", "seq=8 batch=3", "microbatches=2", "strides=transposed"}),
       crossed({contract}, {"tp=2 dp=2 sp=on overlap=chunks", "tp=4 dp=2 overlap=chunks chunks=3",
                            "tp=2 cp=2 dp=2 sp=on overlap=chunks chunks=3"}),
       crossed({in_four}, attributes)});
}

// ---- Column

const IndexMap& rows_map(const Case& c) {
  // A line that will be refused has operands, too.
  if (c.at("heads") > 0 && c.at("kv_heads") > 0)
    return head_group_map(c.at("heads"), c.at("kv_heads"), c.at("head_dim"));
  return c.on("swiglu") ? interleaved_map(2) : contiguous_map();
}

std::vector<Operand> column_operands(const Case& c) {
  const IndexMap& map = rows_map(c);
  const int features = last(token_shape(c, 1));
  const Placement rows = c.on("whole_weight") ? R() : S(0, map);
  return operands(c, {c.on("sp") ? S(0) : I(), rows, rows,
                      c.on("gather_output") ? I() : S(features, map), S(0, map)});
}

std::vector<Key> column_keys() {
  Key kv = extent("kv_heads", "", 0, "key and value heads of a fused QKV weight; left out: heads");
  kv.derive = [](const Case& c) { return c.text("heads"); };
  Key d = extent("head_dim", "", 0, "rows of a head");
  d.derive = [](const Case& c) { return std::string(c.at("heads") > 0 ? "3" : "0"); };
  Key out = extent("out", "", 1, "rows of w; left out: (heads + 2 kv_heads) head_dim, or 48");
  out.derive = [](const Case& c) {
    const int64_t n = c.at("heads");
    return std::to_string(n > 0 ? (n + 2 * c.at("kv_heads")) * c.at("head_dim") : 48);
  };
  std::vector<Key> keys{
      extent("heads", "0", 0,
             "query heads where w is [Q heads | K heads | V heads], cut by groups"),
      kv, d};
  for (Key& k : common_keys(extent("in", "7", 1, "columns of w"), out)) keys.push_back(k);
  keys.push_back(toggle("gather_output", "off", "gather y over its features"));
  keys.push_back(toggle("swiglu", "off", "w is [gate rows | up rows], each cut over tp"));
  keys.push_back(toggle("whole_weight", "off", "w and b are handed whole and cut by the subject"));
  return keys;
}

std::vector<std::string> column_cases(const std::string& tier) {
  const std::vector<std::string> attributes{"gather_output=on",
                                            "skip_bias_add=on",
                                            "skip_bias_add=on sp=on",
                                            "frozen=on",
                                            "frozen=on sp=on",
                                            "input_grad=off",
                                            "input_grad=off sp=on",
                                            "bias=off",
                                            "seq=24 batch=2 sp=on",
                                            "seq=8 batch=3",
                                            "heads=8 kv_heads=4",
                                            "swiglu=on sp=on",
                                            "whole_weight=on",
                                            "whole_weight=on heads=8 kv_heads=4 sp=on",
                                            "microbatches=2",
                                            "microbatches=2 whole_weight=on skip_bias_add=on",
                                            "whole_weight=on swiglu=on gather_output=off"};
  const auto smoke = together(
      {crossed({"linear_column"},
               {"tp=2", "tp=4", "tp=2 sp=on", "tp=4 sp=on", "tp=2 sp=on dtype=bf16",
                "tp=4 dtype=f32 fill=normal", "tp=2 dp=2 sp=on"}),
       crossed({"linear_column tp=2"}, {"gather_output=on", "frozen=on", "seq=8 batch=3 sp=on",
                                        "heads=8 kv_heads=4", "microbatches=2"}),
       {"linear_column tp=4 sp=on overlap=ring", "linear_column tp=2 sp=on overlap=ring dtype=bf16",
        "linear_column tp=4 sp=on overlap=chunks chunks=4"},
       crossed({"linear_column tp=4"}, {"swiglu=on", "skip_bias_add=on", "whole_weight=on"})});
  if (tier == "smoke") return smoke;
  const std::vector<std::string> ranks{"linear_column", "linear_column tp=2", "linear_column tp=3",
                                       "linear_column tp=4", "linear_column tp=8"};
  const std::vector<std::string> some{"linear_column tp=2", "linear_column tp=4"};
  const auto ci = together(
      {smoke,
       crossed(crossed(ranks, {"", "sp=on"}), {"", "dtype=f32", "dtype=bf16", "dtype=f16"}),
       crossed(some, attributes),
       crossed({"linear_column"}, {"gather_output=on", "whole_weight=on"}),
       crossed(some, {"microbatches=3 sp=on dtype=f32 fill=normal", "microbatches=2 dtype=bf16",
                      "microbatches=2 dtype=bf16 grad=f32 fill=normal"}),
       crossed(
           {"linear_column tp=3 sp=on", "linear_column tp=8"},
           {"fill=normal", "dtype=f32 fill=normal", "dtype=bf16 fill=normal",
            "dtype=f16 fill=normal", "dtype=bf16 wire=f32 fill=normal",
            "dtype=f32 acc=f64 fill=normal", "dtype=f32 fill=large", "dtype=f32 fill=cancelling"}),
       crossed({"linear_column tp=2 dp=2", "linear_column tp=4 dp=2", "linear_column tp=2 dp=4",
                "linear_column tp=2 cp=2 dp=2", "linear_column tp=2 dp=2 order=dp,tp"},
               {"", "sp=on"}),
       crossed({"linear_column tp=4 strides=transposed"},
               {"", "sp=on", "gather_output=on", "seq=24 batch=2 sp=on", "whole_weight=on",
                "skip_bias_add=on", "microbatches=2"}),
       crossed({"linear_column tp=2"},
               {"gather_output=on skip_bias_add=on", "gather_output=on seq=8 batch=3",
                "strides=expanded", "strides=expanded_inputs"}),
       ring_cases("linear_column", {"swiglu=on", "whole_weight=on heads=8 kv_heads=4",
                                    "whole_weight=on microbatches=2 skip_bias_add=on"}),
       chunk_cases("linear_column",
                   {"swiglu=on", "whole_weight=on microbatches=2 skip_bias_add=on"}),
       {"linear_column tp=4 overlap=chunks gather_output=on"},
       // Own rows of W of an odd number, where what goes two by two has one left.
       crossed({"linear_column tp=2 out=10", "linear_column tp=4 out=12"}, {"", "dtype=bf16"})});
  if (tier != "nightly") return ci;
  return together(
      {ci, crossed(crossed(some, attributes), {"dtype=f32", "dtype=bf16 fill=normal"}),
       crossed(crossed({"linear_column tp=5 out=50", "linear_column tp=6",
                        "linear_column tp=8 out=240 in=130"},
                       {"tokens=240", "tokens=240 sp=on", "tokens=240 sp=on overlap=ring",
                        "tokens=240 sp=on overlap=chunks chunks=7"}),
               {"", "dtype=f32 fill=normal", "dtype=f32 fill=cancelling"})});
}

Contract linear_column() {
  Contract c;
  c.name = "linear_column";
  c.family = "linear";
  c.summary = "Y = X W^T + b, rows of W and b cut over tp";
  c.linear = true;
  c.keys = column_keys();
  c.precondition = primitives::refused_column;
  c.operands = column_operands;
  c.forward = [](const Case& line, std::span<const Whole> in, std::vector<Gauge>* gauges) {
    return forward(line, in, gauges, {line.at("in") + 1, 1});
  };
  c.backward = [](const Case& line, std::span<const Whole> in, std::span<const Whole> cot,
                  std::vector<Gauge>* gauges) {
    const Local l(line);
    return backward(line, in, cot, gauges,
                    {{line.at("out") / l.p, l.p}, {l.tokens, 1}, {l.tokens, 1}});
  };
  c.traffic = [](const Case& line, const std::string&, int) {
    return column_calls(line, wire_of(line));
  };
  c.integer_range = integer_range;
  c.cases = column_cases;
  c.gemms = [](const Case& line, int) { return column_gemms(line); };
  c.illegal = {"linear_column tp=2 sp=on seq=3 batch=2",
               "linear_column tp=4 sp=on tokens=10",
               "linear_column tp=4 out=10",
               "linear_column tp=2 dp=2 tokens=9",
               "linear_column tp=2 sp=on gather_output=on",
               "linear_column tp=2 bias=off skip_bias_add=on",
               "linear_column tp=2 frozen=on input_grad=off",
               "linear_column tp=4 heads=8 kv_heads=2",
               "linear_column tp=2 heads=8 kv_heads=4 out=50",
               "linear_column tp=4 swiglu=on out=12",
               "linear_column tp=2 batch=2",
               "linear_column tp=2 ep=2",
               "linear_column tp=2 swiglu=on gather_output=on",
               "linear_column tp=2 heads=8 kv_heads=0 head_dim=2 out=16",
               "linear_column tp=4 heads=6 kv_heads=6 head_dim=2 out=36",
               "linear_column tp=2 heads=8 kv_heads=3 head_dim=2 out=28",
               "linear_column tp=2 heads=8 kv_heads=4 head_dim=2 out=32 swiglu=on",
               "linear_column tp=2 kv_heads=4",
               "linear_column tp=2 seq=8 batch=3 tokens=20",
               "linear_column tp=2 overlap=ring",
               "linear_column tp=4 sp=on overlap=ring tokens=10",
               "linear_column tp=2 chunks=3",
               "linear_column tp=2 overlap=chunks chunks=1",
               "linear_column tp=4 sp=on overlap=chunks chunks=7"};
  c.witnesses = {"linear_column tp=2 gather_output=on",
                 "linear_column tp=3 sp=on",
                 "linear_column tp=4 sp=on",
                 "linear_column tp=2 dp=2 sp=on",
                 "linear_column tp=4",
                 "linear_column tp=3 sp=on overlap=ring",
                 "linear_column tp=3 sp=on overlap=chunks"};
  return c;
}

// ---- Row

std::vector<Operand> row_operands(const Case& c) {
  const int features = last(token_shape(c, 1));
  const bool sp = c.on("sp");
  // Handed back, b is added to the own tokens outside: used by each rank alone under sp.
  return operands(c, {c.on("input_is_parallel") ? S(features) : I(), S(1), I(), sp ? S(0) : I(),
                      sp ? R() : I()});
}

std::vector<Key> row_keys() {
  std::vector<Key> keys =
      common_keys(extent("in", "48", 1, "columns of w"), extent("out", "7", 1, "rows of w"));
  keys.push_back(toggle("input_is_parallel", "on", "x comes cut by features; off: whole"));
  return keys;
}

std::vector<std::string> row_cases(const std::string& tier) {
  const std::vector<std::string> attributes{
      "input_is_parallel=off",  "skip_bias_add=on",
      "skip_bias_add=on sp=on", "frozen=on",
      "frozen=on sp=on",        "input_grad=off",
      "input_grad=off sp=on",   "bias=off",
      "bias=off sp=on",         "seq=24 batch=2 sp=on",
      "seq=8 batch=3",          "frozen=on input_is_parallel=off",
      "microbatches=2 sp=on",   "microbatches=2"};
  const auto smoke = together(
      {crossed({"linear_row"}, {"tp=2", "tp=4", "tp=2 sp=on", "tp=4 sp=on", "tp=2 sp=on dtype=bf16",
                                "tp=4 dtype=f32 fill=normal", "tp=2 dp=2 sp=on"}),
       crossed({"linear_row tp=2"}, {"input_is_parallel=off", "frozen=on", "seq=8 batch=3 sp=on",
                                     "microbatches=2 sp=on"}),
       {"linear_row tp=4 sp=on overlap=ring", "linear_row tp=2 sp=on overlap=ring dtype=bf16",
        "linear_row tp=4 sp=on overlap=chunks chunks=4"},
       crossed({"linear_row tp=4"}, {"skip_bias_add=on sp=on", "bias=off"})});
  if (tier == "smoke") return smoke;
  const std::vector<std::string> ranks{"linear_row", "linear_row tp=2", "linear_row tp=3",
                                       "linear_row tp=4", "linear_row tp=8"};
  const std::vector<std::string> some{"linear_row tp=2", "linear_row tp=4"};
  const auto ci = together(
      {smoke,
       crossed(crossed(ranks, {"", "sp=on"}), {"", "dtype=f32", "dtype=bf16", "dtype=f16"}),
       crossed(some, attributes),
       crossed({"linear_row"}, {"input_is_parallel=off"}),
       crossed(some, {"microbatches=2 dtype=bf16 grad=f32 fill=normal",
                      "microbatches=2 skip_bias_add=on sp=on dtype=bf16"}),
       crossed(
           {"linear_row tp=3 sp=on", "linear_row tp=8"},
           {"fill=normal", "dtype=f32 fill=normal", "dtype=bf16 fill=normal",
            "dtype=f16 fill=normal", "dtype=bf16 wire=f32 fill=normal",
            "dtype=f32 acc=f64 fill=normal", "dtype=f32 fill=large", "dtype=f32 fill=cancelling"}),
       crossed({"linear_row tp=2 dp=2", "linear_row tp=4 dp=2", "linear_row tp=2 dp=4",
                "linear_row tp=2 cp=2 dp=2", "linear_row tp=2 dp=2 order=dp,tp"},
               {"", "sp=on"}),
       crossed({"linear_row tp=4 strides=transposed"},
               {"", "sp=on", "input_is_parallel=off", "seq=24 batch=2 sp=on", "microbatches=2"}),
       {"linear_row tp=2 dp=2 sp=on skip_bias_add=on",
        "linear_row tp=4 sp=on skip_bias_add=on dtype=bf16 wire=f32 fill=normal",
        "linear_row tp=2 seq=8 batch=3 input_is_parallel=off", "linear_row tp=2 tokens=8 in=1060",
        "linear_row tp=2 strides=expanded", "linear_row tp=2 strides=expanded_inputs"},
       ring_cases("linear_row", {"microbatches=2 skip_bias_add=on dtype=bf16"}),
       chunk_cases("linear_row", {"microbatches=2 skip_bias_add=on dtype=bf16"}),
       {"linear_row tp=4 overlap=chunks input_is_parallel=off"},
       crossed({"linear_row tp=2 in=10", "linear_row tp=4 in=12"}, {"", "dtype=bf16"})});
  if (tier != "nightly") return ci;
  return together(
      {ci, crossed(crossed(some, attributes), {"dtype=f32", "dtype=bf16 fill=normal"}),
       crossed(
           crossed({"linear_row tp=5 in=50", "linear_row tp=6", "linear_row tp=8 in=240 out=130"},
                   {"tokens=240", "tokens=240 sp=on", "tokens=240 sp=on overlap=ring",
                    "tokens=240 sp=on overlap=chunks chunks=7"}),
           {"", "dtype=f32 fill=normal", "dtype=f32 fill=cancelling"})});
}

Contract linear_row() {
  Contract c;
  c.name = "linear_row";
  c.family = "linear";
  c.summary = "Y = X W^T + b, columns of W and X cut over tp";
  c.linear = true;
  c.keys = row_keys();
  c.precondition = primitives::refused_row;
  c.operands = row_operands;
  c.forward = [](const Case& line, std::span<const Whole> in, std::vector<Gauge>* gauges) {
    const Local l(line);
    return forward(line, in, gauges, {line.at("in") / l.p + 1, l.p});
  };
  c.backward = [](const Case& line, std::span<const Whole> in, std::span<const Whole> cot,
                  std::vector<Gauge>* gauges) {
    const Local l(line);
    const Sums bias = l.sp ? Sums{l.tokens / l.p, l.p} : Sums{l.tokens, 1};
    return backward(line, in, cot, gauges, {{line.at("out"), 1}, {l.tokens, 1}, bias});
  };
  c.traffic = [](const Case& line, const std::string&, int) {
    return row_calls(line, wire_of(line), wire_of(line));
  };
  c.integer_range = integer_range;
  c.cases = row_cases;
  c.gemms = [](const Case& line, int) { return row_gemms(line); };
  c.illegal = {"linear_row tp=2 sp=on seq=3 batch=2",
               "linear_row tp=4 sp=on tokens=10",
               "linear_row tp=4 in=10",
               "linear_row tp=2 dp=2 tokens=9",
               "linear_row tp=2 sp=on input_is_parallel=off",
               "linear_row tp=2 bias=off skip_bias_add=on",
               "linear_row tp=2 frozen=on input_grad=off",
               "linear_row tp=2 batch=2",
               "linear_row tp=2 pp=2",
               "linear_row tp=2 seq=8 batch=3 tokens=20",
               "linear_row tp=2 overlap=ring",
               "linear_row tp=4 sp=on overlap=ring tokens=10",
               "linear_row tp=2 chunks=3",
               "linear_row tp=2 overlap=chunks chunks=1",
               "linear_row tp=4 sp=on overlap=chunks chunks=7"};
  c.witnesses = {"linear_row tp=2 input_is_parallel=off",
                 "linear_row tp=3 sp=on",
                 "linear_row tp=4 sp=on",
                 "linear_row tp=2 dp=2 sp=on",
                 "linear_row tp=4",
                 "linear_row tp=3 sp=on overlap=ring",
                 "linear_row tp=3 sp=on overlap=chunks"};
  return c;
}

}  // namespace

void family_linear(Registry& r) {
  r.add(linear_column());
  r.add(linear_row());
  add_ours<primitives::LinearColumn>(r, "linear_column");
  add_ours<primitives::LinearRow>(r, "linear_row");
  for (const char* contract : {"linear_column", "linear_row"}) add_ours_in_tf32(r, contract);
}

}  // namespace shardproof
