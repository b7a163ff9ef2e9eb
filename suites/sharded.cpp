// The sharded family: parameters of which each data-parallel rank keeps a block of rows. What is
// judged is whether the whole that a rank computes with is the whole, and whether the gradients of
// all tokens reach the rows that they belong to, once, where blocks are uneven or empty, too.
#include <algorithm>

#include "fixtures/fills.hpp"
#include "fixtures/index_maps.hpp"
#include "oracle/check.hpp"
#include "oracle/registry.hpp"
#include "primitives/sharded.hpp"
#include "reference/running_error.hpp"
#include "suites/linear.hpp"
#include "suites/ours.hpp"
#include "suites/reading.hpp"

namespace shardproof {
namespace {

using namespace linears;

// ---- What is read from a line

bool copied_over_dp(const Case& c) { return c.text("shard") == "cp"; }
int64_t ranks_with_tokens(const Case& c) { return int64_t(c.ranks(Axis::dp)) * c.ranks(Axis::cp); }
int64_t ranks_of_shards(const Case& c) {
  return copied_over_dp(c) ? c.ranks(Axis::cp) : ranks_with_tokens(c);
}

// Type that a rank keeps its own gradient in before it is summed; none: that which comes next, the
// wire's or the result's.
std::optional<DType> type_of_local_gradient(const Case& c) {
  return dtype_from(c.text("local_grad"));
}

// Rows of a block: every rank's but those of the last ones.
int64_t block_rows(const Case& c) {
  const int64_t p = ranks_of_shards(c), rows = c.at("out");
  return rows / p + (rows % p > 0 ? 1 : 0);
}

// Elements of a flat shard, padding and all.
int64_t flat_elements(const Case& c) {
  return block_rows(c) * (c.at("in") + (c.on("bias") ? 1 : 0));
}

// Over dp first, blocks of all its cp ranks together; then over cp. Copies are one tensor: the
// layer sums their gradients.
Layout cut_by_rows(const Case& c) {
  const int64_t rows = block_rows(c);
  return {{Axis::dp, copied_over_dp(c) ? I() : S(0, chunk_map(rows * c.ranks(Axis::cp)))},
          {Axis::cp, S(0, chunk_map(rows))},
          {Axis::tp, I()}};
}

OwnTokens own_tokens(const Case& c) {
  return {{c.at("tokens"), c.at("in"), c.at("out")}, Local(c).tokens, ranks_with_tokens(c)};
}

// ---- The contract

std::vector<Operand> operands(const Case& c) {
  const auto x = token_shape(c, c.at("in")), y = token_shape(c, c.at("out"));
  const Layout tokens = tokens_on(I());
  const bool trained = !c.on("frozen");
  std::vector<Operand> list{
      {"x", Operand::input, x, tokens, true, last(x)},
      {"w", Operand::parameter, {c.at("out"), c.at("in")}, cut_by_rows(c), trained, 0}};
  if (c.on("bias"))
    list.push_back({"b", Operand::parameter, {c.at("out")}, cut_by_rows(c), trained});
  list.push_back({"y", Operand::output, y, tokens, true, 0});
  return list;
}

std::vector<Whole> forward(const Case& c, std::span<const Whole> in, std::vector<Gauge>* gauges) {
  return forward_of_own_tokens(own_tokens(c), token_shape(c, c.at("out")), in, gauges);
}

// A rank's gradient is accumulated and then rounded to a type of its own: each of the two is
// relative to the sum of the terms' magnitudes.
void round_before_the_sum(const Case& c, DType to, Gauge& g) {
  const Precision p = precision_of(c, Declared{});
  const double summed = reference::gamma_of(double(g.terms), p.u_acc), kept = unit_roundoff(to),
               whole = reference::gamma_of(double(g.terms * g.reduced), unit_roundoff(DType::f64)),
               relative = summed + kept + summed * kept + whole;
  for (double m : g.magnitude) g.bound.push_back(m * relative / p.u_acc);
}

std::vector<Whole> backward(const Case& c, std::span<const Whole> in, std::span<const Whole> cot,
                            std::vector<Gauge>* gauges) {
  auto out = backward_of_own_tokens(own_tokens(c), in, cot, gauges);
  const auto local = type_of_local_gradient(c);
  for (size_t i = 1; i < out.size(); ++i) {
    if (c.on("frozen")) out[i] = {};
    if (gauges && local) round_before_the_sum(c, *local, (*gauges)[i]);
  }
  return out;
}

std::vector<Traffic> traffic(const Case& c, const std::string&, int) {
  std::vector<Axis> cut, copied;
  for (Axis a : {Axis::cp, Axis::dp})
    if (c.ranks(a) > 1) (a == Axis::dp && copied_over_dp(c) ? copied : cut).push_back(a);
  const int64_t own = flat_elements(c);
  std::vector<Traffic> due;
  const auto add = [&](const std::vector<Axis>& axes, Op op, bool backward, int64_t count) {
    if (axes.empty()) return;
    due.push_back(call(op, backward, count, op == Op::all_gather ? c.dtype() : wire_of(c)));
    due.back().label = reading::label(axes);
  };
  add(cut, Op::all_gather, false, own);
  if (c.on("reshard")) add(cut, Op::all_gather, true, own);
  if (c.on("frozen")) return due;
  add(cut, Op::reduce_scatter, true, own * ranks_of_shards(c));
  add(copied, Op::all_reduce, true, own);
  return due;
}

std::vector<Key> keys() {
  std::vector<Key> list = token_keys();
  list.push_back(extent("in", "7", 1, "columns of w"));
  // Two rows a rank at 8 ranks, but for the last: one, and none.
  list.push_back(
      extent("out", "13", 1, "rows of w; ceil(out/p) a rank, the last ranks fewer or none"));
  list.push_back(toggle("bias", "on", "add b; it travels with w"));
  Key shard{"shard", "all",
            "ranks that rows are cut over: all, those of dp and cp; cp, and each of dp has a copy"};
  shard.choices = {"all", "cp"};
  list.push_back(shard);
  list.push_back(toggle("reshard", "on", "gather again in backward; off: keep what was gathered"));
  list.push_back(toggle("frozen", "off", "no gradient of w and b"));
  Key local{
      "local_grad", "",
      "type that a rank keeps its own gradient in before the sum, as autograd leaves it in the "
      "storage type; left out: the wire type"};
  local.choices = {"f64", "f32", "bf16", "f16"};
  list.push_back(local);
  list.push_back(microbatches_key());
  return list;
}

std::vector<std::string> cases(const std::string& tier) {
  const auto smoke =
      crossed({"sharded_linear"}, {"dp=2", "dp=4", "dp=4 out=5", "dp=2 cp=2 reshard=off",
                                   "dp=2 cp=2 shard=cp", "dp=2 frozen=on bias=off",
                                   "dp=4 dtype=bf16 wire=f32 fill=normal", "dp=2 microbatches=2"});
  if (tier == "smoke") return smoke;
  const std::vector<std::string> ranks{"sharded_linear",      "sharded_linear dp=2",
                                       "sharded_linear dp=3", "sharded_linear dp=4",
                                       "sharded_linear dp=8", "sharded_linear dp=4 cp=2"};
  const std::vector<std::string> some{"sharded_linear dp=2", "sharded_linear dp=4 out=5"};
  const std::vector<std::string> attributes{
      "reshard=off",    "frozen=on",      "frozen=on reshard=off",      "bias=off",
      "seq=24 batch=2", "microbatches=2", "microbatches=3 reshard=off", "strides=transposed"};
  const auto ci = together(
      {smoke,
       crossed(ranks, {"", "dtype=f32", "dtype=bf16", "dtype=f16", "reshard=off out=16"}),
       crossed(some, attributes),
       crossed(
           {"sharded_linear dp=3", "sharded_linear dp=8 out=9", "sharded_linear cp=4",
            "sharded_linear dp=2 cp=2", "sharded_linear dp=2 cp=4 shard=cp"},
           {"fill=normal", "dtype=f32 fill=normal", "dtype=bf16 fill=normal",
            "dtype=f16 fill=normal", "dtype=bf16 wire=f32 fill=normal",
            "dtype=bf16 wire=f32 grad=f32 fill=normal",
            "dtype=bf16 wire=f32 grad=f32 local_grad=bf16 fill=normal",
            "dtype=f32 acc=f64 fill=normal", "dtype=f32 fill=large", "dtype=f32 fill=cancelling"}),
       {"sharded_linear dtype=bf16 grad=f32 local_grad=bf16 fill=normal",
        "sharded_linear dp=4 dtype=f32 wire=bf16 fill=normal",
        "sharded_linear dp=2 local_grad=bf16", "sharded_linear dp=2 shard=cp",
        "sharded_linear dp=3 shard=cp", "sharded_linear cp=3 shard=cp",
        "sharded_linear dp=4 cp=2 shard=cp reshard=off frozen=on",
        "sharded_linear dp=2 cp=2 shard=cp microbatches=2",
        "sharded_linear dp=4 shard=cp microbatches=2 dtype=bf16 wire=f32 grad=f32 fill=normal",
        "sharded_linear dp=2 cp=2 shard=cp order=dp,cp", "sharded_linear dp=2 cp=2 order=dp,cp",
        "sharded_linear dp=2 cp=4 out=11", "sharded_linear dp=4 out=1",
        "sharded_linear dp=4 out=12",
        "sharded_linear dp=4 microbatches=2 dtype=bf16 grad=f32 wire=f32 "
        "fill=normal",
        "sharded_linear dp=4 strides=expanded", "sharded_linear dp=4 strides=expanded_inputs"}});
  if (tier != "nightly") return ci;
  return together({ci, crossed(crossed({"sharded_linear dp=8 out=241 in=65 tokens=240",
                                        "sharded_linear dp=6 out=50 tokens=240",
                                        "sharded_linear dp=5 tokens=25"},
                                       {"", "reshard=off", "bias=off"}),
                               {"", "dtype=f32 fill=normal", "dtype=bf16 wire=f32 fill=normal",
                                "dtype=f32 fill=cancelling"})});
}

Contract sharded_linear() {
  Contract c;
  c.name = "sharded_linear";
  c.family = "sharded";
  c.summary = "Y = X W^T + b on the own tokens, rows of W and b cut over dp and cp and gathered";
  c.linear = true;
  c.keys = keys();
  c.precondition = primitives::refused_sharded_linear;
  c.operands = operands;
  c.forward = forward;
  c.backward = backward;
  c.traffic = traffic;
  c.integer_range = [](const Case& line) {
    const int64_t terms =
        std::max({line.at("in") + 1, line.at("out"), line.at("tokens") * line.at("microbatches")});
    const auto range = range_of_products(line, terms);
    const auto local = type_of_local_gradient(line);
    if (!range || !local) return range;
    const auto kept = exact_range(*local, terms, 2);
    return kept ? std::optional(std::min(*range, *kept)) : std::nullopt;
  };
  c.cases = cases;
  c.gemms = [](const Case& line, int) {
    const int64_t own = Local(line).tokens, in = line.at("in"), out = line.at("out");
    std::vector<Gemm> due{{"Y = X W^T", false, own, out, in}, {"dX = dY W", true, own, in, out}};
    if (!line.on("frozen")) due.push_back({"dW = dY^T X", true, out, in, own});
    return due;
  };
  c.illegal = {"sharded_linear dp=2 tp=2",          "sharded_linear dp=2 ep=2",
               "sharded_linear dp=2 pp=2",          "sharded_linear dp=4 tokens=10",
               "sharded_linear dp=2 cp=2 tokens=6", "sharded_linear dp=2 seq=3 batch=2",
               "sharded_linear dp=2 batch=2",       "sharded_linear dp=2 seq=8 batch=3 tokens=20"};
  c.witnesses = {"sharded_linear dp=2",
                 "sharded_linear dp=3",
                 "sharded_linear dp=4",
                 "sharded_linear dp=2 cp=2",
                 "sharded_linear dp=2 cp=2 shard=cp",
                 "sharded_linear dp=3 shard=cp"};
  return c;
}

}  // namespace

void family_sharded(Registry& r) {
  r.add(sharded_linear());
  add_ours<primitives::ShardedLinear>(r, "sharded_linear");
}

}  // namespace shardproof
