// Y = X W^T + b with factors in 8-bit floating point, of the quantised family. What is judged is
// whether every product, forward and backward, multiplies the numbers that are due: those of one
// scale where ranks share a tensor, of the format of each factor, quantised along the dim that the
// product sums over; and whether their sums, the calls and the bytes are those of the linear.
#include <algorithm>
#include <cmath>

#include "oracle/check.hpp"
#include "oracle/drawn.hpp"
#include "oracle/registry.hpp"
#include "primitives/quantised_linear.hpp"
#include "reference/quantised.hpp"
#include "suites/ours.hpp"
#include "suites/quantised.hpp"
#include "suites/reading.hpp"
#include "suites/replicated.hpp"

namespace shardproof {
namespace {

using namespace linears;
using reference::Uncertain;
using reference::Values;

// ---- What is read from a line

enum class Of : uint8_t { x, w, g };  // X, W, the cotangent of Y

bool is_row(const Case& c) { return c.text("parallel") == "row"; }
bool one_scale(const Case& c) { return c.at("block") == 0; }
bool has_history(const Case& c) { return c.at("history") > 0; }
bool is_high(const Case& c) { return c.text("wgrad") == "high"; }
bool parts_of_tokens(const Case& c) { return c.on("sp") && c.ranks(Axis::tp) > 1; }

int64_t rows_of(const Case& c, Of of) { return of == Of::w ? c.at("out") : c.at("tokens"); }
int64_t columns_of(const Case& c, Of of) { return of == Of::g ? c.at("out") : c.at("in"); }

// Tokens of X (column) or G (row) are parts on the ranks of tp, that all of them multiply.
bool is_gathered(const Case& c, Of of) {
  return parts_of_tokens(c) && of == (is_row(c) ? Of::g : Of::x);
}
// A row linear that needs G as it came gathers nothing else.
bool gathers_codes(const Case& c, Of of) {
  return is_gathered(c, of) && !(of == Of::g && is_high(c));
}
// The dim that tp cuts for good, of the matrix: W by rows or columns, X (row) and G (column) by
// columns.
std::optional<int> dim_of_shards(const Case& c, Of of) {
  if (of == Of::w) return is_row(c) ? 1 : 0;
  if ((of == Of::x) == is_row(c)) return 1;
  return std::nullopt;
}

// ---- Operands

// Eighths of the dim along which ranks of tp hold parts differ in size, so that ranks differ in
// what is greatest on them, and neither the first nor the last of four has the greatest of all.
// Where a product sums over that dim its factors are greatest in different eighths, and every rank
// counts.
std::function<double(int64_t)> sizes(const Case& c, const Operand& o, Of of) {
  if (!expanded_dims(c, o, /*cotangent=*/of == Of::g).empty()) return [](int64_t) { return 1.0; };
  const int64_t columns = columns_of(c, of), spread = c.at("spread"), peak = of == Of::w ? 2 : 5;
  const bool by_columns = dim_of_shards(c, of).value_or(0) == 1;
  const int64_t extent = by_columns ? columns : rows_of(c, of);
  return [=](int64_t index) {
    const int64_t at = by_columns ? index % columns : index / columns;
    const int64_t away = std::min<int64_t>(3, std::abs(at * 8 / extent - peak));
    return std::ldexp(1, -int(spread * away));
  };
}

// Of X, W and G, in this order, behind the other inputs. That of G has the next one for a gradient:
// it is made in the backward, and nothing else flows back to it. The greatest amax is the oldest of
// X, the newest of W, one between of G.
const std::vector<Axis> sharers{Axis::dp, Axis::cp, Axis::tp};
std::vector<Operand> histories(const Case& c) {
  std::vector<Operand> list;
  const int64_t steps = c.at("history");
  for (const auto& [name, greatest] : {std::pair<const char*, int64_t>{"x_history", steps - 1},
                                       {"w_history", 0},
                                       {"g_history", steps / 2}}) {
    Operand o = delayed::operand(c, name, Operand::input, sharers, name[0] == 'g');
    o.made = [c, o, at = greatest](uint64_t seed) { return delayed::drawn(c, o, seed, 1, at); };
    list.push_back(std::move(o));
  }
  return list;
}

std::vector<Operand> operands(const Case& c) {
  const auto shape_x = token_shape(c, c.at("in")), shape_y = token_shape(c, c.at("out"));
  const Placement tokens = c.on("sp") ? S(0) : I();
  Operand x{"x",  Operand::input, shape_x, tokens_on(is_row(c) ? S(last(shape_x)) : tokens),
            true, last(shape_x)},
      w{"w",
        Operand::parameter,
        {c.at("out"), c.at("in")},
        parameter_on(S(is_row(c) ? 1 : 0)),
        true,
        0},
      y{"y", Operand::output, shape_y, tokens_on(is_row(c) ? tokens : S(last(shape_y))), true, 0};
  x.factor = sizes(c, x, Of::x), w.factor = sizes(c, w, Of::w), y.factor = sizes(c, y, Of::g);
  std::vector<Operand> list{x, w};
  if (c.on("bias"))
    list.push_back({"b", Operand::parameter, {c.at("out")}, parameter_on(is_row(c) ? I() : S(0))});
  if (has_history(c))
    for (Operand& history : histories(c)) list.push_back(std::move(history));
  list.push_back(y);
  if (has_history(c))
    for (const char* name : {"next_x_history", "next_w_history"})
      list.push_back(delayed::operand(c, name, Operand::output, sharers));
  return list;
}

// ---- Scales

reference::Quantiser quantiser(const Case& c, Of of) {
  const bool wide = of == Of::g && c.text("grad_format") == "e5m2";
  return {wide ? reference::EightBitFormat::e5m2() : reference::EightBitFormat::e4m3(),
          c.text("scaling") == "pow2",
          precision_of(c, Declared{}).u_acc + unit_roundoff(DType::f64)};
}

// Which scale an element has. One of a tensor: tokens of other ranks of dp and cp have their own,
// unless over=all; amax=shard: shards of tp, too.
int64_t scale_of_tensor(const Case& c, Of of, int64_t row, int64_t column) {
  const int64_t ranks = int64_t(c.ranks(Axis::dp)) * c.ranks(Axis::cp), p = c.ranks(Axis::tp);
  const bool own_tokens = of != Of::w && c.text("over") == "tp";
  const int64_t share = own_tokens ? row * ranks / rows_of(c, of) : 0;
  const auto dim = dim_of_shards(c, of);
  if (c.text("amax") == "tensor" || !dim) return share;
  return share * p + (*dim == 0 ? row * p / rows_of(c, of) : column * p / columns_of(c, of));
}
// Of a block: so many elements, one behind the other, of what a product sums; across: over rows. Or
// a square of W, whatever is summed.
int64_t scale_of_block(const Case& c, Of of, bool across, int64_t row, int64_t column) {
  const int64_t block = c.at("block");
  if (of == Of::w && c.text("weight_block") == "square")
    return row / block * (columns_of(c, of) / block) + column / block;
  return across ? column * rows_of(c, of) / block + row / block
                : row * columns_of(c, of) / block + column / block;
}

const Whole& history_of(std::span<const Whole> in, Of of) { return in[in.size() - 3 + size_t(of)]; }

Uncertain quantised(const Case& c, std::span<const Whole> in, Of of, bool across, const Values& x) {
  if (has_history(c)) {
    const auto q = quantiser(c, of);
    const double amax = reference::greatest_magnitude(history_of(in, of).value);
    return reference::quantised_at(q, x, reference::scale_of(q, amax));
  }
  const int64_t columns = columns_of(c, of);
  std::vector<int64_t> scale(x.size());
  for (int64_t i = 0; i < int64_t(x.size()); ++i)
    scale[size_t(i)] = one_scale(c) ? scale_of_tensor(c, of, i / columns, i % columns)
                                    : scale_of_block(c, of, across, i / columns, i % columns);
  return reference::quantised_by_group(quantiser(c, of), x, scale);
}
// As a product reads it that sums over the rows: the transpose.
Uncertain quantised_across(const Case& c, std::span<const Whole> in, Of of, const Values& x) {
  return reference::turned(quantised(c, in, of, /*across=*/true, x), rows_of(c, of));
}
Uncertain factor_of_weight_gradient(const Case& c, std::span<const Whole> in, Of of,
                                    const Values& x) {
  if (!is_high(c)) return quantised_across(c, in, of, x);
  return reference::turned(reference::certain(x), rows_of(c, of));
}

// ---- Products

// `ranks` parts of the result travel.
Whole product_of(const Case& c, const reference::LinearShape& s, std::vector<int64_t> shape,
                 const Uncertain& a, const Uncertain& b, const Values& bias, int64_t ranks,
                 std::vector<Gauge>* gauges) {
  if (gauges) {
    const Precision p = precision_of(c, Declared{});
    const auto r = replicated::rounding_of(c, p, ranks);
    gauges->push_back(
        replicated::gauge_of(reference::reduced(reference::linear_loss(s, a, b, bias, r), r), p));
  }
  return whole(std::move(shape), reference::linear(s, a.value, b.value, bias));
}

Whole next_history(const Case& c, std::span<const Whole> in, Of of, const Values& x) {
  return delayed::rolled(c, history_of(in, of), {reference::greatest_magnitude(x)});
}

std::vector<Whole> forward(const Case& c, std::span<const Whole> in, std::vector<Gauge>* gauges) {
  const int64_t in_ = c.at("in"), out = c.at("out");
  if (gauges) gauges->clear();
  auto results = listed(product_of(
      c, {c.at("tokens"), in_, out}, token_shape(c, out),
      quantised(c, in, Of::x, false, in[0].value), quantised(c, in, Of::w, false, in[1].value),
      c.on("bias") ? in[2].value : Values{}, is_row(c) ? c.ranks(Axis::tp) : 1, gauges));
  for (Of of : {Of::x, Of::w})
    if (has_history(c)) {
      results.push_back(next_history(c, in, of, in[size_t(of)].value));
      if (gauges) gauges->push_back({});
    }
  return results;
}

Whole bias_gradient(const Case& c, const Whole& b, const Whole& g, std::vector<Gauge>* gauges) {
  const Local l(c);
  const auto sum = [&](auto size) { return sum_of_stack({{}, size(g.value)}, c.at("out")); };
  const bool in_parts = is_row(c) && parts_of_tokens(c);
  if (gauges)
    gauges->push_back(gauge(sum(reference::absolute), sum(reference::squared),
                            in_parts ? l.tokens / l.p : l.tokens, in_parts ? l.p : 1));
  return whole(b.shape, sum([](const Values& v) { return v; }));
}

std::vector<Whole> backward(const Case& c, std::span<const Whole> in, std::span<const Whole> cot,
                            std::vector<Gauge>* gauges) {
  const int64_t T = c.at("tokens"), in_ = c.at("in"), out = c.at("out");
  const Values &x = in[0].value, &w = in[1].value, &g = cot[0].value;
  if (gauges) gauges->clear();
  auto gradients = listed(
      product_of(c, {T, out, in_}, in[0].shape, quantised(c, in, Of::g, false, g),
                 quantised_across(c, in, Of::w, w), {}, is_row(c) ? 1 : c.ranks(Axis::tp), gauges));
  gradients.push_back(product_of(c, {out, T, in_}, in[1].shape,
                                 factor_of_weight_gradient(c, in, Of::g, g),
                                 factor_of_weight_gradient(c, in, Of::x, x), {}, 1, gauges));
  if (c.on("bias")) gradients.push_back(bias_gradient(c, in[2], cot[0], gauges));
  if (!has_history(c)) return gradients;
  gradients.resize(in.size());
  gradients.back() = next_history(c, in, Of::g, g);
  if (gauges) gauges->resize(in.size());
  return gradients;
}

// Products of integers, each of them rounded up to 9/8 of its size at most, and smaller by 2^(3
// spread) at most: sums of so many units.
std::optional<int64_t> integer_range(const Case& c) {
  if (c.text("scaling") != "pow2" || has_history(c)) return std::nullopt;
  const int64_t terms =
      std::max({c.at("in") + 1, c.at("out"), c.at("tokens") * c.at("microbatches")});
  const int64_t units = 6 * c.at("spread"), most = int64_t(1) << 53;
  if (terms > most >> units) return std::nullopt;
  return range_of_products(c, (terms + terms / 3) << units);
}

// ---- Traffic

std::vector<Axis> axes_of_amax(const Case& c, Of of) {
  const bool shards = dim_of_shards(c, of) && c.text("amax") == "tensor",
             whole_already = of == Of::g && is_high(c) && is_row(c);
  std::vector<Axis> axes;
  if (shards || (is_gathered(c, of) && !whole_already)) axes.push_back(Axis::tp);
  if (of != Of::w && c.text("over") == "all") axes.insert(axes.end(), {Axis::cp, Axis::dp});
  std::erase_if(axes, [&](Axis a) { return c.ranks(a) == 1; });
  return axes;
}

class Calls {
 public:
  explicit Calls(const Case& c) : c_(c), l_(c) {}
  std::vector<Traffic> due;

  void amax(Of of, bool back) {
    const auto axes = axes_of_amax(c_, of);
    if (one_scale(c_) && !axes.empty())
      due.push_back(
          {Op::all_reduce, Reduce::max, reading::label(axes), back, 1, accumulation_of(c_)});
  }
  // Codes of the own tokens, four in a word, and their scales.
  void codes(Of of, bool back) {
    if (!gathers_codes(c_, of)) return;
    const int64_t n = l_.tokens / l_.p * columns_of(c_, of);
    due.push_back(call(Op::all_gather, back, (n + 3) / 4, DType::i32));
    if (!one_scale(c_))
      due.push_back(call(Op::all_gather, back, n / c_.at("block"), accumulation_of(c_)));
  }
  void as_it_is(Of of) {
    if (is_gathered(c_, of))
      due.push_back(call(Op::all_gather, true, l_.tokens / l_.p * columns_of(c_, of), c_.dtype()));
  }
  void sum(bool back, int64_t columns) {
    if (l_.p > 1)
      due.push_back(call(l_.sp ? Op::reduce_scatter : Op::all_reduce, back, l_.tokens * columns,
                         wire_of(c_)));
  }
  void bias() {
    if (parts_of_tokens(c_) && is_row(c_) && c_.on("bias"))
      due.push_back(call(Op::all_reduce, true, c_.at("out"), wire_of(c_)));
  }

 private:
  const Case& c_;
  Local l_;
};

std::vector<Traffic> traffic(const Case& c, const std::string&, int) {
  Calls calls(c);
  calls.amax(Of::x, false), calls.amax(Of::w, false);
  calls.codes(Of::x, false);
  if (is_row(c)) calls.sum(false, c.at("out"));
  if (is_high(c)) calls.as_it_is(Of::g);
  calls.amax(Of::g, true);
  calls.codes(Of::g, true);
  if (!one_scale(c)) calls.codes(Of::g, true);  // those of the transpose
  is_high(c) ? calls.as_it_is(Of::x) : calls.codes(Of::x, true);
  calls.bias();
  if (!is_row(c)) calls.sum(true, c.at("in"));
  return calls.due;
}

std::vector<Gemm> gemms(const Case& c, int) {
  const Local l(c);
  const int64_t in = c.at("in") / (is_row(c) ? l.p : 1), out = c.at("out") / (is_row(c) ? 1 : l.p);
  return {{"Y = q(X) q(W)^T", false, l.tokens, out, in},
          {is_high(c) ? "dW = dY^T X" : "dW = q(dY)^T q(X)", true, out, in, l.tokens},
          {"dX = q(dY) q(W)", true, l.tokens, in, out}};
}

// ---- Keys and cases

Key extent_of(const char* name, bool (*long_one)(const Case&), const char* help) {
  Key k = extent(name, "", 1, help);
  k.derive = [=](const Case& c) { return std::string(long_one(c) ? "48" : "10"); };
  return k;
}

std::vector<Key> keys() {
  std::vector<Key> list = token_keys();
  const std::vector<Key> own{
      choice("parallel", {"column", "row"}, "how tp cuts w: column, its rows; row, its columns"),
      extent_of("in", is_row, "columns of w; left out: 10, or 48 under parallel=row"),
      extent_of(
          "out", [](const Case& c) { return !is_row(c); },
          "rows of w; left out: 48, or 10 under parallel=row"),
      toggle("bias", "on", "add b"),
      toggle("sp", "off", "sequence parallel: tokens are cut over tp outside the linear"),
      choice("scaling", {"exact", "pow2"}, "greatest / amax, or the power of two at or below it"),
      choice("amax", {"tensor", "shard"},
             "of the whole tensor that tp cuts; shard: of the own part, unless it is gathered"),
      choice("over", {"tp", "all"},
             "ranks that share a scale of x and of its gradient; all: cp, dp"),
      choice("grad_format", {"e5m2", "e4m3"}, "in which the gradient of y is rounded"),
      choice("wgrad", {"low", "high"}, "factors of dW: in 8 bits, or as they came"),
      delayed::history_key(),
      extent("block", "0", 0, "elements of a sum that share a scale; 0: one scale of all", 4096),
      choice("weight_block", {"row", "square"},
             "of w: elements of a row, and of a column for dX; or as many rows of them"),
      extent("spread", "1", 0, "binary orders between the sizes of neighbouring eighths", 8),
      microbatches_key()};
  list.insert(list.end(), own.begin(), own.end());
  return list;
}

// At 2, 3, 4 and 8 ranks, of either cut.
std::vector<std::string> at_ranks(const std::vector<std::string>& with) {
  return crossed({"quantised_linear", "quantised_linear tp=2", "quantised_linear tp=3 parallel=row",
                  "quantised_linear tp=4", "quantised_linear tp=4 parallel=row",
                  "quantised_linear tp=8 parallel=row"},
                 with);
}

// In bf16 x and amax have so few bits that x s may be a tie of codes, where either is right, on
// many elements: on those of seed=2 it is not.
std::vector<std::string> cases(const std::string& tier) {
  const std::vector<std::string> column{"quantised_linear tp=2", "quantised_linear tp=4"},
      row{"quantised_linear tp=2 parallel=row", "quantised_linear tp=4 parallel=row"};
  const auto smoke = together(
      {{"quantised_linear tp=2 sp=on scaling=pow2 fill=integers"},
       {"quantised_linear tp=4 parallel=row scaling=pow2 fill=integers dtype=f32"},
       {"quantised_linear tp=4 sp=on dtype=f32", "quantised_linear tp=2 parallel=row sp=on",
        "quantised_linear tp=2 sp=on history=3 dtype=f32",
        "quantised_linear tp=2 parallel=row sp=on block=2"}});
  if (tier == "smoke") return smoke;
  const auto ci = together(
      {smoke,
       at_ranks({"", "sp=on dtype=f32", "sp=on scaling=pow2 fill=integers"}),
       crossed({"quantised_linear tp=4 sp=on", "quantised_linear tp=2 parallel=row sp=on"},
               {"dtype=bf16 seed=2", "dtype=f16 scaling=pow2", "dtype=bf16 wire=f32 seed=2",
                "wgrad=high", "wgrad=high block=2 dtype=f32", "block=3 scaling=pow2 in=12 out=24",
                "grad_format=e4m3 amax=shard", "strides=transposed", "seq=12 batch=2",
                "microbatches=2", "spread=8", "fill=cancelling dtype=f32"}),
       crossed({"quantised_linear tp=2 dp=2", "quantised_linear tp=2 dp=2 parallel=row sp=on"},
               {"", "over=all dtype=f32", "block=2", "order=dp,tp"}),
       at_ranks({"history=4 over=all", "history=3 over=all sp=on dtype=f32 scaling=pow2"}),
       crossed({"quantised_linear tp=2 history=3 over=all"},
               {"dtype=bf16 scaling=pow2", "strides=transposed bias=off", "microbatches=2",
                "parallel=row sp=on wgrad=high grad_format=e4m3", "dp=2 sp=on",
                "parallel=row cp=2 dp=2 sp=on dtype=f32", "strides=expanded", "seq=12 batch=2"}),
       {"quantised_linear tp=4 history=1 sp=on", "quantised_linear tp=8 tokens=16 block=2 out=32",
        "quantised_linear tp=2 strides=expanded",
        "quantised_linear tp=2 parallel=row strides=expanded_inputs bias=off",
        "quantised_linear tp=2 cp=2 dp=2 over=all sp=on",
        "quantised_linear tp=2 dp=2 parallel=row amax=shard",
        "quantised_linear tp=4 amax=shard bias=off",
        "quantised_linear tp=2 parallel=row scaling=pow2 fill=integers spread=0 dtype=bf16",
        "quantised_linear tp=3 block=2 sp=on out=12 strides=transposed",
        "quantised_linear tp=4 sp=on block=2 weight_block=square dtype=f32",
        "quantised_linear tp=2 parallel=row block=2 weight_block=square strides=transposed",
        "quantised_linear tp=2 sp=on block=2 weight_block=square scaling=pow2 fill=integers",
        "quantised_linear tp=2 acc=f64 dtype=bf16 seed=2",
        // DeepSeek-V3's tiles of 1 x 128 and 128 x 128.
        "quantised_linear tp=2 tokens=128 in=128 out=256 block=128 weight_block=square "
        "grad_format=e4m3 dtype=f32",
        "quantised_linear tp=2 fill=large dtype=f32",
        "quantised_linear tp=2 scaling=pow2 fill=integers microbatches=2",
        // Parts of dW, subnormal in f16.
        "quantised_linear dp=8 spread=6 dtype=f16 scaling=pow2"}});
  if (tier != "nightly") return ci;
  return together(
      {ci,
       crossed(together({column, row}), {"sp=on", "sp=on dtype=f32 seed=2", "dtype=bf16 seed=2",
                                         "sp=on wgrad=high grad_format=e4m3 dtype=f16",
                                         "sp=on scaling=pow2 fill=integers seed=3",
                                         "sp=on block=2 seq=24 batch=2 strides=transposed"}),
       crossed({"quantised_linear tp=6 out=96 in=130 tokens=96 sp=on",
                "quantised_linear tp=8 in=240 out=33 tokens=64 parallel=row sp=on"},
               {"", "dtype=f32", "dtype=bf16 wire=f32 seed=2", "wgrad=high"})});
}

Contract quantised_linear() {
  Contract c;
  c.name = "quantised_linear";
  c.family = "quantised";
  c.summary = "Y = X W^T + b, forward and backward, of factors in 8-bit floating point (FP8)";
  c.keys = keys();
  c.precondition = primitives::refused_quantised_linear;
  c.operands = operands;
  c.forward = forward;
  c.backward = backward;
  c.traffic = traffic;
  c.integer_range = integer_range;
  c.cases = cases;
  c.gemms = gemms;
  c.stiff = [](const Case&) { return true; };  // constant between the boundaries of codes
  c.illegal = {"quantised_linear tp=4 out=10",
               "quantised_linear tp=4 parallel=row in=10",
               "quantised_linear tp=4 sp=on tokens=10",
               "quantised_linear tp=2 sp=on seq=3 batch=2",
               "quantised_linear tp=2 batch=2",
               "quantised_linear tp=2 pp=2",
               "quantised_linear tp=2 block=2 over=all",
               "quantised_linear tp=2 block=2 amax=shard",
               "quantised_linear tp=2 weight_block=square",
               "quantised_linear tp=2 history=3 block=2",
               "quantised_linear tp=2 history=3 amax=shard",
               "quantised_linear tp=2 dp=2 history=3",
               "quantised_linear tp=4 block=2 out=12",              // 3 columns of y on a rank
               "quantised_linear tp=4 parallel=row block=2 in=12",  // 3 of x
               "quantised_linear tp=4 sp=on block=4 in=8 out=16",   // 6 tokens
               "quantised_linear tp=2 dp=2 block=8 in=8 out=16"};   // 12
  // An amax that is off by a power of two moves subnormal codes alone: spread=5 has rows of them,
  // and no bias outweighs them.
  c.witnesses = {"quantised_linear tp=2 sp=on tokens=8 out=16 spread=5 bias=off",
                 "quantised_linear tp=3 sp=on tokens=9 out=24 spread=5 bias=off",
                 "quantised_linear tp=4 sp=on parallel=row tokens=8 in=16 out=6 block=2",
                 "quantised_linear tp=2 dp=2 sp=on tokens=8 out=16 spread=5 bias=off"};
  return c;
}

}  // namespace

void family_quantised_linear(Registry& r) {
  r.add(quantised_linear());
  add_ours<primitives::QuantisedLinear>(r, "quantised_linear");
}

}  // namespace shardproof
