// What crosses ranks in the layers of hybrid models when their tokens are cut over cp: rows of the
// neighbours in a short convolution, and the state of a linear recurrence.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "oracle/check.hpp"
#include "oracle/registry.hpp"
#include "primitives/conv_context.hpp"
#include "primitives/delta_context.hpp"
#include "primitives/scan_context.hpp"
#include "reference/conv.hpp"
#include "reference/delta.hpp"
#include "reference/scan.hpp"
#include "reference/sequences.hpp"
#include "suites/ours.hpp"
#include "suites/reading.hpp"
#include "suites/recurrent.hpp"

namespace shardproof {
namespace recurrences {

using namespace contexts;

std::vector<int64_t> sequences(const Case& c) {
  std::vector<int64_t> list;
  for (const PackedToken& t : labels_of(c, false)) list.push_back(t.document);
  return list;
}

int64_t longest(const Case& c) {
  std::map<int64_t, int64_t> lengths;
  for (const PackedToken& t : labels_of(c, false))
    if (t.document >= 0) ++lengths[t.document];
  int64_t most = 1;
  for (const auto& [sequence, length] : lengths) most = std::max(most, length);
  return most;
}

Layout on_tokens(const Case& c) { return tokens_on(c, S(c.at("seq") > 0 ? 2 : 1)); }

int64_t own_rows(const Case& c) { return rows_of(c, false) / ranks(c); }
int64_t own_batch(const Case& c) { return batch_of(c) / c.ranks(Axis::dp); }

Traffic over_cp(Op op, bool backward, int64_t count, DType type, int hop) {
  return {op, op == Op::reduce_scatter ? Reduce::sum : Reduce::none, "cp", backward, count, type,
          hop};
}

Key decay_key() {
  return linears::choice("decay", {"factor", "log"},
                         "a is what a state is multiplied by, or its logarithm");
}

namespace {

// A decay of (3/4, 1), so that a state reaches ranks behind the next; of integers their sign, so
// that products are exact.
double decay(double drawn, bool integer) {
  if (integer) return drawn < 0 ? -1 : 1;
  return 1 - 0.25 / (1 + std::exp(drawn));
}

}  // namespace

bool in_logarithms(const Case& c) { return c.text("decay") == "log"; }

Operand decays(const Case& c, int64_t gates) {
  std::vector<int64_t> features{c.at("heads")};
  if (gates) features.push_back(gates);
  Operand a{"a", Operand::input, token_shape(c, false, std::move(features)), on_tokens(c)};
  a.through = decay, a.linear = false;
  if (in_logarithms(c)) a.through = [](double x, bool) { return std::log(decay(x, false)); };
  return a;
}

reference::Values factors(const Case& c, const Whole& a) {
  reference::Values list = a.value;
  for (double& x : list)
    if (in_logarithms(c)) x = std::exp(x);
  return list;
}

int64_t roundings_of_logarithms(const Case& c, const Whole& a) {
  if (!in_logarithms(c)) return 0;
  const size_t columns = a.value.size() / sequences(c).size();
  double most = 0;
  for (const auto& places : reference::places_by_sequence(sequences(c)))
    for (size_t column = 0; column < columns; ++column) {
      double sum = 0;
      for (const size_t t : places) sum += std::abs(a.value[t * columns + column]);
      most = std::max(most, sum);
    }
  const int64_t length = longest(c);
  return int64_t(std::ceil(double(2 * length + 1) * most)) + 4 * length;
}

reference::Values of_logarithms(const Case& c, reference::Values own, const Whole& a,
                                const reference::Values& q, const reference::Values& k,
                                const reference::Values& dq, const reference::Values& dk) {
  const auto decay = factors(c, a);
  const size_t columns = own.size() / sequences(c).size(), features = q.size() / own.size();
  for (const auto& places : reference::places_by_sequence(sequences(c)))
    for (size_t column = 0; column < columns; ++column) {
      double behind = 0;
      for (size_t n = places.size(); n-- > 0;) {
        const size_t at = places[n] * columns + column;
        for (size_t i = at * features; i < (at + 1) * features; ++i)
          behind += std::abs(q[i]) * dq[i] + std::abs(k[i]) * dk[i];
        own[at] = own[at] * decay[at] + behind;
      }
    }
  return own;
}

int64_t roundings_of_gradient(const Case& c, int64_t of_decays, int64_t of_keys, int64_t features) {
  return std::max(of_decays + 1, of_keys + 1 + 2 * features + longest(c));
}

std::optional<Contract::Inexact> logarithms_are_inexact(const Case& c) {
  if (!in_logarithms(c)) return std::nullopt;
  return Contract::Inexact{"decay=log", "fill=normal"};
}

void times(reference::Values& x, const reference::Values& y) {
  for (size_t i = 0; i < x.size(); ++i) x[i] *= y[i];
}

}  // namespace recurrences

namespace {

using namespace contexts;
using namespace recurrences;
using linears::choice;
using linears::crossed;
using linears::extent;
using linears::gauge;
using linears::listed;
using linears::range_of_products;
using linears::together;
using linears::whole;

// In zigzag a rank has two blocks, side by side in its tensors.
int64_t blocks_of_a_rank(const Case& c) {
  return ranks(c) > 1 && c.text("layout") != "contiguous" ? 2 : 1;
}
int64_t blocks_of(const Case& c) { return ranks(c) * blocks_of_a_rank(c); }

// ---- Convolution

reference::Conv conv_of(const Case& c) { return {c.at("channels"), c.at("width")}; }

std::vector<Operand> conv_operands(const Case& c) {
  const auto shape = token_shape(c, false, {c.at("channels")});
  const Layout copies{{Axis::dp, I()}, {Axis::cp, I()}, {Axis::tp, S(0)}};
  return {{"x", Operand::input, shape, on_tokens(c), true, 0},
          {"w", Operand::parameter, {c.at("channels"), c.at("width")}, copies},
          {"b", Operand::parameter, {c.at("channels")}, copies},
          {"y", Operand::output, shape, on_tokens(c)}};
}

// Blocks before a rank's own that it reads; before each of two in zigzag.
int64_t blocks_read(const Case& c) {
  if (blocks_of_a_rank(c) == 2) return std::min<int64_t>(c.at("width") - 1, 1);
  const int64_t own = own_rows(c);
  return std::min(ranks(c) - 1, (c.at("width") - 2 + own) / own);
}

std::vector<Whole> conv_forward(const Case& c, std::span<const Whole> in,
                                std::vector<Gauge>* gauges) {
  const auto of = sequences(c);
  const auto sums = [&](auto size) {
    return reference::conv(conv_of(c), of, size(in[0].value), size(in[1].value), size(in[2].value));
  };
  if (gauges)
    *gauges = listed(gauge(sums(reference::absolute), sums(reference::squared),
                           std::min(c.at("width"), longest(c)) + 1, 1));
  return listed(whole(in[0].shape, sums([](const auto& v) { return v; })));
}

std::vector<Whole> conv_backward(const Case& c, std::span<const Whole> in,
                                 std::span<const Whole> cot, std::vector<Gauge>* gauges) {
  const auto of = sequences(c);
  const auto gradients = [&](auto size) {
    return reference::conv_backward(conv_of(c), of, size(in[0].value), size(in[1].value),
                                    size(cot[0].value));
  };
  auto d = gradients([](const auto& v) { return v; });
  if (gauges) {
    auto m = gradients(reference::absolute), s = gradients(reference::squared);
    const int64_t own = own_rows(c) * own_batch(c), all = ranks(c) * c.ranks(Axis::dp);
    *gauges = listed(gauge(std::move(m.x), std::move(s.x), c.at("width"), blocks_read(c) + 1),
                     gauge(std::move(m.w), std::move(s.w), own, all),
                     gauge(std::move(m.b), std::move(s.b), own, all));
  }
  return listed(whole(in[0].shape, std::move(d.x)), whole(in[1].shape, std::move(d.w)),
                whole(in[2].shape, std::move(d.b)));
}

// Rows that a rank gives to the one `hop` blocks on (or back), or that the h-th block before is
// read of: width - 1 in all.
int64_t rows_over(const Case& c, int64_t hop) {
  return std::min(own_rows(c), c.at("width") - 1 - (hop - 1) * own_rows(c));
}

std::vector<Traffic> conv_traffic(const Case& c, const std::string& plan, int rank) {
  const int64_t p = ranks(c), r = c.mesh().coordinate(rank, Axis::cp),
                channels = c.at("channels") / c.ranks(Axis::tp), row = channels * own_batch(c),
                tail = p > 1 ? std::min(own_rows(c), c.at("width") - 1) * row : 0,
                each = blocks_of_a_rank(c);
  const DType wire = linears::wire_of(c);
  std::vector<Traffic> due;
  if (plan == "allgather" && tail > 0)
    due = {over_cp(Op::all_gather, false, each * tail, c.dtype()),
           over_cp(Op::reduce_scatter, true, each * tail * p, wire)};
  // The first block's rows go up the ranks, the second's down, and their gradients back.
  if (plan.empty() && each == 2 && tail > 0)
    for (const bool backward : {false, true})
      for (const int hop : {1, -1}) {
        const int to = backward ? -hop : hop;
        due.push_back(over_cp(Op::shift, backward, (to > 0 ? r + 1 < p : r >= 1) ? tail : 0,
                              backward ? wire : c.dtype(), to));
      }
  if (plan.empty() && each == 1)
    for (const bool backward : {false, true})
      for (int64_t hop = 1; hop <= blocks_read(c); ++hop) {
        const bool sends = backward ? r >= hop : r + hop < p;
        due.push_back(over_cp(Op::shift, backward, sends ? rows_over(c, hop) * row : 0,
                              backward ? wire : c.dtype(), int(backward ? -hop : hop)));
      }
  const auto axes = reading::summed_axes(c, false);
  if (!axes.empty())
    due.push_back({Op::all_reduce, Reduce::sum, reading::label(axes), true,
                   channels * (c.at("width") + 1), wire});
  return due;
}

// Of a result and of the gradients of both factors.
double conv_work(const Case& c) {
  return 3 * double(rows_of(c, false) * batch_of(c)) * double(c.at("channels")) *
         double(std::min(c.at("width"), longest(c)));
}

std::vector<Key> conv_keys() {
  std::vector<Key> keys = token_keys("48");
  keys.push_back(extent("channels", "6", 1, "each of which is filtered by itself"));
  keys.push_back(extent("width", "4", 1, "tokens that an output sees, its own the last", 1024));
  keys.push_back(linears::microbatches_key());
  return keys;
}

std::vector<std::string> conv_cases(const std::string& tier) {
  const auto smoke = crossed({"conv_context"}, {"cp=2 docs=5,1,6 channels=2", "cp=4 tokens=8",
                                                "cp=2 dtype=bf16 fill=normal tokens=24 channels=3",
                                                "cp=2 tp=2 tokens=12 channels=2"});
  if (tier == "smoke") return smoke;
  const std::vector<std::string> ranks{"conv_context", "conv_context cp=2", "conv_context cp=3",
                                       "conv_context cp=4", "conv_context cp=8"};
  const auto ci = together(
      {smoke,
       crossed(ranks, {"tokens=24", "docs=0,5,0,0,14 dtype=f32 fill=normal"}),
       crossed({"conv_context cp=4 channels=3"},
               {"width=1 docs=9,7", "width=9 tokens=16", "width=9 tokens=8",
                "tokens=8 docs=1,6,1 width=2", "dtype=f16 fill=normal",
                "dtype=bf16 wire=f32 fill=normal tokens=8", "strides=transposed docs=9,7",
                "strides=expanded tokens=16", "fill=cancelling dtype=f32 tokens=16",
                "seq=8 batch=3", "cu_seqlens=0,3,3,13 microbatches=2 dtype=f32"}),
       crossed({"conv_context cp=2 dp=2 seq=8 batch=4 channels=3",
                "conv_context cp=2 tp=2 order=cp,tp tokens=12"},
               {"", "dtype=f32 fill=normal microbatches=2"}),
       {"conv_context cp=2 strides=expanded_inputs dtype=f32 tokens=12",
        "conv_context cp=3 fill=large tokens=12", "conv_context tp=3 tokens=12",
        "conv_context cp=2 layout=zigzag tokens=16 channels=3",
        "conv_context cp=3 layout=zigzag_row docs=9,1,8 channels=3",
        "conv_context cp=4 layout=zigzag seq=24 batch=3 dtype=f32 fill=normal channels=2",
        "conv_context cp=3 layout=zigzag tokens=12 width=1 channels=2",
        "conv_context cp=8 layout=zigzag tokens=48 dtype=bf16 wire=f32 fill=normal channels=2"}});
  if (tier != "nightly") return ci;
  return together({ci, crossed(ranks, {"docs=1,2,3,4,5,6,7", "width=13 tokens=24 dtype=f32",
                                       "width=7 docs=3,9,12 dtype=bf16 fill=normal",
                                       "tokens=1536 dtype=f32 fill=normal"})});
}

Contract conv_context() {
  Contract c;
  c.name = "conv_context";
  c.family = "recurrent";
  c.summary =
      "causal depthwise convolution (Mamba's) of tokens cut over cp, rows of neighbours exchanged";
  c.linear = true;
  c.keys = conv_keys();
  c.precondition = primitives::refused_conv;
  c.operands = conv_operands;
  c.forward = conv_forward;
  c.backward = conv_backward;
  c.traffic = conv_traffic;
  c.plans = {"allgather"};
  c.further_work = conv_work;
  c.integer_range = [](const Case& line) {
    return range_of_products(line,
                             std::max(rows_of(line, false) * batch_of(line), line.at("width") + 1));
  };
  c.cases = conv_cases;
  c.sequences = sequences_of;
  c.illegal = {"conv_context cp=2 layout=zigzag docs=8,8",
               "conv_context cp=4 layout=zigzag tokens=16",
               "conv_context cp=4 tokens=10",
               "conv_context tp=4 channels=6",
               "conv_context cp=2 seq=8 batch=3 tokens=20",
               "conv_context dp=2",
               "conv_context cp=2 docs=7,-1,8",
               "conv_context cp=2 docs=7,1 tokens=9"};
  c.witnesses = {"conv_context cp=2 docs=7,5 channels=2", "conv_context cp=3 tokens=6 channels=2",
                 "conv_context cp=4 tokens=16 channels=2",
                 "conv_context cp=2 dp=2 seq=8 batch=2 channels=2"};
  return c;
}

// ---- Recurrence

reference::Scan scan_of(const Case& c) { return {c.at("heads"), c.at("head_dim"), c.at("v_dim")}; }

std::vector<Operand> scan_operands(const Case& c) {
  const int64_t n = c.at("heads"), dk = c.at("head_dim"), dv = c.at("v_dim");
  return {{"q", Operand::input, token_shape(c, false, {n, dk}), on_tokens(c)},
          {"k", Operand::input, token_shape(c, false, {n, dk}), on_tokens(c)},
          {"v", Operand::input, token_shape(c, false, {n, dv}), on_tokens(c), true, 0},
          decays(c),
          {"o", Operand::output, token_shape(c, false, {n, dv}), on_tokens(c)}};
}

Gauge scan_gauge(const Case& c, int64_t roundings, reference::Values magnitude) {
  Gauge g = linears::gauge_of(linears::Relative(c).sum(roundings), std::move(magnitude));
  g.terms = roundings;
  return g;
}

std::vector<Whole> scan_forward(const Case& c, std::span<const Whole> in,
                                std::vector<Gauge>* gauges) {
  const auto of = sequences(c);
  const auto a = factors(c, in[3]);
  const auto sums = [&](auto size) {
    return reference::scan(scan_of(c), of, size(in[0].value), size(in[1].value), size(in[2].value),
                           size(a));
  };
  if (gauges)
    *gauges = listed(scan_gauge(c,
                                reference::scan_roundings(scan_of(c), longest(c), blocks_of(c)).o +
                                    roundings_of_logarithms(c, in[3]),
                                sums(reference::absolute)));
  return listed(whole(in[2].shape, sums([](const auto& v) { return v; })));
}

std::vector<Whole> scan_backward(const Case& c, std::span<const Whole> in,
                                 std::span<const Whole> cot, std::vector<Gauge>* gauges) {
  const auto of = sequences(c);
  const auto a = factors(c, in[3]);
  const auto gradients = [&](auto size) {
    return reference::scan_backward(scan_of(c), of, size(in[0].value), size(in[1].value),
                                    size(in[2].value), size(a), size(cot[0].value));
  };
  auto d = gradients([](const auto& v) { return v; });
  if (in_logarithms(c)) times(d.a, a);
  if (gauges) {
    auto m = gradients(reference::absolute);
    const auto n = reference::scan_roundings(scan_of(c), longest(c), blocks_of(c));
    const int64_t more = roundings_of_logarithms(c, in[3]);
    if (in_logarithms(c))
      m.a = of_logarithms(c, std::move(m.a), in[3], in[0].value, in[1].value, m.q, m.k);
    const int64_t n_a = in_logarithms(c)
                            ? roundings_of_gradient(c, n.a, std::max(n.q, n.k), c.at("head_dim"))
                            : n.a;
    *gauges = listed(
        scan_gauge(c, n.q + more, std::move(m.q)), scan_gauge(c, n.k + more, std::move(m.k)),
        scan_gauge(c, n.v + more, std::move(m.v)), scan_gauge(c, n_a + more, std::move(m.a)));
  }
  return listed(whole(in[0].shape, std::move(d.q)), whole(in[1].shape, std::move(d.k)),
                whole(in[2].shape, std::move(d.v)), whole(in[3].shape, std::move(d.a)));
}

// States of the own heads and sequences, and `through` numbers with each that say what its block
// does to one. In the ring a rank waits for the one before it, and at tick t rank t (the other way:
// p-1-t) hands on: forward up the ranks and backward down, in zigzag up and then down.
std::vector<Traffic> traffic_of_states(const Case& c, const std::string& plan, int rank,
                                       int64_t through) {
  const int64_t p = ranks(c), r = c.mesh().coordinate(rank, Axis::cp),
                heads = c.at("heads") / c.ranks(Axis::tp) * own_batch(c),
                states = heads * c.at("head_dim") * c.at("v_dim"), each = blocks_of_a_rank(c);
  const DType type = linears::accumulation_of(c);
  std::vector<Traffic> due;
  const auto ring = [&](bool backward, int hop) {
    for (int64_t tick = 0; tick + 1 < p; ++tick)
      due.push_back(
          over_cp(Op::shift, backward, tick == (hop > 0 ? r : p - 1 - r) ? states : 0, type, hop));
  };
  for (const bool backward : {false, true}) {
    const bool both = !backward || plan == "regather";
    if (plan != "ring" && p > 1)
      due.push_back(
          over_cp(Op::all_gather, backward, each * (states + (both ? heads * through : 0)), type));
    if (plan == "ring" && (each > 1 || !backward)) ring(backward, 1);
    if (plan == "ring" && (each > 1 || backward)) ring(backward, -1);
  }
  return due;
}

std::vector<Traffic> scan_traffic(const Case& c, const std::string& plan, int rank) {
  return traffic_of_states(c, plan, rank, 1);
}

// Sums of so many products in o and dv, dq and dk; of four factors in da, whose token has some
// tokens before it and the rest behind.
std::optional<int64_t> scan_range(const Case& c) {
  if (in_logarithms(c)) return std::nullopt;
  const int64_t length = longest(c), dk = c.at("head_dim"), dv = c.at("v_dim");
  const auto three = range_of_products(c, length * std::max(dk, dv), 3),
             four = range_of_products(c, length * length / 4 * dk * dv + 1, 4);
  return three && four ? std::optional(std::min(*three, *four)) : std::nullopt;
}

// The reference sums over all pairs of tokens of a sequence: an outer product, and three products
// each of keys and of values.
double scan_work(const Case& c) {
  const double dk = double(c.at("head_dim")), dv = double(c.at("v_dim"));
  return double(rows_of(c, false) * batch_of(c)) * double(longest(c)) * double(c.at("heads")) *
         (dk * dv + 3 * (dk + dv));
}

std::vector<Key> scan_keys() {
  std::vector<Key> keys = token_keys("48");
  keys.push_back(extent("heads", "6", 1, "each of which has a state"));
  keys.push_back(extent("head_dim", "3", 1, "features of q and k, rows of a state"));
  keys.push_back(extent("v_dim", "2", 1, "features of v and o, columns of a state"));
  keys.push_back(decay_key());
  return keys;
}

std::vector<std::string> scan_cases(const std::string& tier) {
  const auto smoke =
      crossed({"scan_context"},
              {"cp=2 docs=5,1,6 heads=2", "cp=4 docs=6,9,1 heads=3 fill=normal",
               "cp=2 dtype=bf16 fill=normal tokens=24 heads=3", "cp=2 tp=2 tokens=12 heads=2",
               "cp=4 heads=3 decay=log fill=normal docs=9,7"});
  if (tier == "smoke") return smoke;
  const std::vector<std::string> ranks{"scan_context", "scan_context cp=2", "scan_context cp=3",
                                       "scan_context cp=4", "scan_context cp=8"};
  const auto ci = together(
      {smoke,
       crossed(ranks, {"tokens=24", "docs=0,5,0,0,14 dtype=f32 fill=normal heads=3"}),
       crossed(
           {"scan_context cp=4 heads=3"},
           {"dtype=f32 tokens=16", "dtype=f16 fill=normal tokens=16",
            "dtype=bf16 fill=normal docs=9,7", "dtype=f32 acc=f64 fill=normal tokens=16",
            "strides=transposed docs=9,7", "strides=expanded tokens=16",
            "fill=cancelling dtype=f32 tokens=16", "head_dim=1 v_dim=5 tokens=12", "seq=8 batch=3",
            "cu_seqlens=0,3,3,13", "tokens=8 docs=1,6,1 dtype=bf16 wire=bf16 fill=normal",
            "fill=normal", "decay=log fill=normal dtype=f32 tokens=16", "layout=zigzag tokens=16",
            "layout=zigzag_row docs=9,7,5", "layout=zigzag seq=16 batch=3 dtype=f32 fill=normal"}),
       {"scan_context cp=2 dp=2 seq=8 batch=4 heads=3",
        "scan_context cp=2 tp=2 order=cp,tp dtype=f32 fill=normal tokens=12 heads=4",
        "scan_context cp=2 strides=expanded_inputs dtype=f32 tokens=12 heads=3",
        "scan_context cp=3 fill=large dtype=f32 tokens=12 heads=3", "scan_context tp=3 tokens=12",
        "scan_context cp=2 layout=zigzag_row docs=3,1,9 heads=2",
        "scan_context cp=3 layout=zigzag tokens=18 heads=3",
        "scan_context layout=zigzag tokens=12 heads=3",
        "scan_context cp=8 layout=zigzag_row docs=9,20 dtype=f32 fill=normal heads=3"}});
  if (tier != "nightly") return ci;
  return together({ci, crossed(ranks, {"", "docs=1,2,3,4,5,6,7", "dtype=bf16 fill=normal",
                                       "docs=3,9,12 dtype=f16 fill=normal",
                                       "tokens=192 heads=2 dtype=f32 fill=normal"})});
}

// Refused lines, and those on which collectives are broken, of a layer that hands on states.
void say_lines_of_states(Contract& c) {
  c.illegal = crossed({c.name}, {"cp=2 layout=zigzag docs=7,5", "cp=4 tokens=10", "tp=4 heads=6",
                                 "cp=2 seq=8 batch=3 tokens=20", "dp=2", "cp=2 docs=7,-1,8",
                                 "cp=2 docs=7,1 tokens=9"});
  c.witnesses = crossed({c.name}, {"cp=2 docs=7,5 heads=2", "cp=3 tokens=12 heads=2",
                                   "cp=4 tokens=12 heads=2", "cp=2 dp=2 seq=8 batch=2 heads=2"});
}

Contract scan_context() {
  Contract c;
  c.name = "scan_context";
  c.family = "recurrent";
  c.summary =
      "S_t = a_t S_(t-1) + k_t v_t^T, o_t = S_t^T q_t (Mamba-2, gated linear attention), "
      "tokens cut over cp";
  c.linear = true;
  c.keys = scan_keys();
  c.precondition = primitives::refused_scan;
  c.operands = scan_operands;
  c.forward = scan_forward;
  c.backward = scan_backward;
  c.traffic = scan_traffic;
  c.plans = {"ring", "regather"};
  c.further_work = scan_work;
  c.integer_range = scan_range;
  c.inexact = logarithms_are_inexact;
  c.cases = scan_cases;
  c.sequences = sequences_of;
  say_lines_of_states(c);
  return c;
}

// ---- Delta rule

reference::Delta delta_of(const Case& c) {
  const int64_t keys = c.at("head_dim");
  return {c.at("heads"), keys, c.at("v_dim"), c.text("gate") == "channel" ? keys : 1};
}

// A step of (0, 1).
double step(double drawn, bool) { return 1 / (1 + std::exp(-drawn)); }

std::vector<Operand> delta_operands(const Case& c) {
  const reference::Delta d = delta_of(c);
  const auto of = [&](const char* name, Operand::Role role, std::vector<int64_t> features) {
    return Operand{name, role, token_shape(c, false, std::move(features)), on_tokens(c)};
  };
  Operand k = of("k", Operand::input, {d.heads, d.key_dim}),
          v = of("v", Operand::input, {d.heads, d.value_dim}),
          b = of("b", Operand::input, {d.heads});
  // No longer than 1, as keys that were normalised: (I - b k k^T) then lengthens nothing.
  k.through = [n = double(d.key_dim)](double drawn, bool) {
    return std::tanh(drawn) / std::sqrt(n);
  };
  b.through = step;
  k.linear = b.linear = false;
  v.contraction = 0;
  return {of("q", Operand::input, {d.heads, d.key_dim}),
          std::move(k),
          std::move(v),
          decays(c, c.text("gate") == "channel" ? d.key_dim : 0),
          std::move(b),
          of("o", Operand::output, {d.heads, d.value_dim})};
}

std::vector<Whole> delta_forward(const Case& c, std::span<const Whole> in,
                                 std::vector<Gauge>* gauges) {
  const auto of = sequences(c);
  const auto a = factors(c, in[3]);
  reference::Delta d = delta_of(c);
  const auto sums = [&](auto size) {
    return reference::delta(d, of, size(in[0].value), size(in[1].value), size(in[2].value), size(a),
                            size(in[4].value));
  };
  auto o = sums([](const auto& v) { return v; });
  d.magnitudes = true;
  if (gauges)
    *gauges = listed(scan_gauge(c,
                                reference::delta_roundings(d, longest(c), blocks_of(c)).o +
                                    roundings_of_logarithms(c, in[3]),
                                sums(reference::absolute)));
  return listed(whole(in[2].shape, std::move(o)));
}

std::vector<Whole> delta_backward(const Case& c, std::span<const Whole> in,
                                  std::span<const Whole> cot, std::vector<Gauge>* gauges) {
  const auto of = sequences(c);
  const auto a = factors(c, in[3]);
  reference::Delta shape = delta_of(c);
  const auto gradients = [&](auto size) {
    return reference::delta_backward(shape, of, size(in[0].value), size(in[1].value),
                                     size(in[2].value), size(a), size(in[4].value),
                                     size(cot[0].value));
  };
  auto d = gradients([](const auto& v) { return v; });
  if (in_logarithms(c)) times(d.a, a);
  shape.magnitudes = true;
  if (gauges) {
    auto m = gradients(reference::absolute);
    const auto n = reference::delta_roundings(shape, longest(c), blocks_of(c));
    const int64_t more = roundings_of_logarithms(c, in[3]);
    if (in_logarithms(c))
      m.a = of_logarithms(c, std::move(m.a), in[3], in[0].value, in[1].value, m.q, m.k);
    const int64_t n_a = in_logarithms(c)
                            ? roundings_of_gradient(c, n.a, std::max(n.q, n.k), c.at("head_dim"))
                            : n.a;
    *gauges =
        listed(scan_gauge(c, n.q + more, std::move(m.q)), scan_gauge(c, n.k + more, std::move(m.k)),
               scan_gauge(c, n.v + more, std::move(m.v)), scan_gauge(c, n_a + more, std::move(m.a)),
               scan_gauge(c, n.b + more, std::move(m.b)));
  }
  return listed(whole(in[0].shape, std::move(d.q)), whole(in[1].shape, std::move(d.k)),
                whole(in[2].shape, std::move(d.v)), whole(in[3].shape, std::move(d.a)),
                whole(in[4].shape, std::move(d.b)));
}

std::vector<Traffic> delta_traffic(const Case& c, const std::string& plan, int rank) {
  return traffic_of_states(c, plan, rank, c.at("head_dim") * c.at("head_dim"));
}

// Over all pairs of tokens of a sequence: four scores, two outer products, and some products each
// of keys and of values.
double delta_work(const Case& c) {
  const double dk = double(c.at("head_dim")), dv = double(c.at("v_dim"));
  return double(rows_of(c, false) * batch_of(c)) * double(longest(c)) * double(c.at("heads")) *
         (2 * dk * dv + 12 * dk + 6 * dv);
}

std::vector<Key> delta_keys() {
  std::vector<Key> keys = scan_keys();
  keys.push_back(
      choice("gate", {"head", "channel"}, "a decay of each head, or of each feature of its keys"));
  return keys;
}

std::vector<std::string> delta_cases(const std::string& tier) {
  const auto smoke = crossed({"delta_context"},
                             {"cp=2 docs=5,1,6 heads=2", "cp=4 docs=6,9,1 heads=3 gate=channel",
                              "cp=2 dtype=bf16 tokens=24 heads=3", "cp=2 tp=2 tokens=12 heads=2",
                              "cp=4 heads=3 decay=log docs=9,7 gate=channel"});
  if (tier == "smoke") return smoke;
  const std::vector<std::string> ranks{"delta_context", "delta_context cp=2", "delta_context cp=3",
                                       "delta_context cp=4", "delta_context cp=8"};
  const auto ci = together(
      {smoke,
       crossed(ranks, {"tokens=24 heads=3", "docs=0,5,0,0,14 dtype=f32 heads=3",
                       "gate=channel docs=9,7 dtype=f32 heads=2"}),
       crossed({"delta_context cp=4 heads=3"},
               {"dtype=f16 tokens=16", "dtype=bf16 docs=9,7 gate=channel",
                "dtype=f32 acc=f64 tokens=16", "strides=transposed docs=9,7",
                "strides=expanded tokens=16", "fill=cancelling dtype=f32 tokens=16",
                "head_dim=1 v_dim=5 tokens=12", "head_dim=5 v_dim=1 tokens=8",
                "seq=8 batch=3 gate=channel", "cu_seqlens=0,3,3,13",
                "tokens=8 docs=1,6,1 dtype=bf16 wire=bf16", "decay=log dtype=bf16 tokens=16",
                "layout=zigzag tokens=16", "layout=zigzag_row docs=9,7,5 gate=channel",
                "layout=zigzag seq=16 batch=3 dtype=f32"}),
       {"delta_context cp=2 dp=2 seq=8 batch=4 heads=3",
        "delta_context cp=2 tp=2 order=cp,tp dtype=f32 tokens=12 heads=4",
        "delta_context cp=2 strides=expanded_inputs dtype=f32 tokens=12 heads=3",
        "delta_context cp=3 fill=large dtype=f32 tokens=12 heads=3", "delta_context tp=3 tokens=12",
        "delta_context cp=2 layout=zigzag_row docs=3,1,9 heads=2",
        "delta_context cp=3 layout=zigzag tokens=18 heads=3",
        "delta_context layout=zigzag tokens=12 heads=3",
        "delta_context cp=8 layout=zigzag_row docs=9,20 dtype=f32 heads=3"}});
  if (tier != "nightly") return ci;
  return together({ci, crossed(ranks, {"", "docs=1,2,3,4,5,6,7 gate=channel", "dtype=bf16",
                                       "docs=3,9,12 dtype=f16", "tokens=96 heads=2 dtype=f32"})});
}

Contract delta_context() {
  Contract c;
  c.name = "delta_context";
  c.family = "recurrent";
  c.rounds = true;
  c.summary =
      "S_t = (I - b_t k_t k_t^T) a_t S_(t-1) + b_t k_t v_t^T, o_t = S_t^T q_t (Gated DeltaNet, "
      "Kimi Linear), tokens cut over cp";
  c.linear = true;
  c.keys = delta_keys();
  c.precondition = primitives::refused_delta;
  c.operands = delta_operands;
  c.forward = delta_forward;
  c.backward = delta_backward;
  c.traffic = delta_traffic;
  c.plans = {"ring", "regather"};
  c.further_work = delta_work;
  c.cases = delta_cases;
  c.sequences = sequences_of;
  say_lines_of_states(c);
  return c;
}

}  // namespace

void family_recurrent(Registry& r) {
  r.add(conv_context());
  r.add(scan_context());
  r.add(delta_context());
  add_ours<primitives::ConvContext>(r, "conv_context");
  add_ours<primitives::ScanContext>(r, "scan_context");
  add_ours<primitives::DeltaContext>(r, "delta_context");
}

}  // namespace shardproof
