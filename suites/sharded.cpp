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

// tp cuts W by rows (column), by columns (row) or not at all.
bool is_column(const Case& c) { return c.text("parallel") == "column"; }
bool is_row(const Case& c) { return c.text("parallel") == "row"; }
// Tokens of the same rank of dp and cp lie apart on the ranks of tp: b meets the own ones alone.
bool cuts_row_bias(const Case& c) { return is_row(c) && c.on("sp") && c.ranks(Axis::tp) > 1; }

int64_t rows_behind_tp(const Case& c) {
  return c.at("out") / (is_column(c) ? c.ranks(Axis::tp) : 1);
}
int64_t columns_behind_tp(const Case& c) {
  return c.at("in") / (is_row(c) ? c.ranks(Axis::tp) : 1);
}

// Rows of a block: every rank's but those of the last ones.
int64_t block_rows(const Case& c) {
  const int64_t p = ranks_of_shards(c), rows = rows_behind_tp(c);
  return rows / p + (rows % p > 0 ? 1 : 0);
}

// Elements of a flat shard, padding and all.
int64_t flat_elements(const Case& c) {
  return block_rows(c) * (columns_behind_tp(c) + (c.on("bias") ? 1 : 0));
}

// Over tp first, if at all; what is left over dp, blocks of all its cp ranks together; then over
// cp. Copies are one tensor: the layer sums their gradients. Handed whole, a parameter is cut by
// the subject, and its gradient is the own rows among zeros.
Layout shards(const Case& c, const Placement& on_tp) {
  const Placement copies = I();
  if (c.on("whole_weight"))
    return {{Axis::tp, on_tp.kind == Placement::shard ? R() : on_tp},
            {Axis::dp, copied_over_dp(c) ? copies : R()},
            {Axis::cp, R()}};
  const int64_t rows = block_rows(c);
  return {{Axis::tp, on_tp},
          {Axis::dp, copied_over_dp(c) ? copies : S(0, chunk_map(rows * c.ranks(Axis::cp)))},
          {Axis::cp, S(0, chunk_map(rows))}};
}

LinearSums sums_of(const Case& c) {
  const Local l(c);
  const int64_t in = c.at("in"), out = c.at("out"), p = ranks_with_tokens(c);
  LinearSums s = on_own_tokens({c.at("tokens"), in, out}, l.tokens, p);
  if (is_column(c)) s.x = {out / l.p, l.p};
  if (is_row(c)) s.y = {in / l.p + 1, l.p};
  if (cuts_row_bias(c)) s.b = {l.tokens / l.p, l.p * p};
  return s;
}

// ---- The contract

std::vector<Operand> operands(const Case& c) {
  const auto x = token_shape(c, c.at("in")), y = token_shape(c, c.at("out"));
  const Placement tokens = c.on("sp") ? S(0) : I();
  const bool trained = !c.on("frozen");
  std::vector<Operand> list{
      {"x", Operand::input, x, tokens_on(is_row(c) ? S(last(x)) : tokens), true, last(x)},
      {"w",
       Operand::parameter,
       {c.at("out"), c.at("in")},
       shards(c, is_column(c) ? S(0)
                 : is_row(c)  ? S(1)
                              : I()),
       trained,
       0}};
  if (c.on("bias"))
    list.push_back(
        {"b", Operand::parameter, {c.at("out")}, shards(c, is_column(c) ? S(0) : I()), trained});
  list.push_back({"y", Operand::output, y, tokens_on(is_column(c) ? S(last(y)) : tokens), true, 0});
  return list;
}

// Sums over tp are made in the storage type: where the wire's is another, their own.
bool sums_apart_over_tp(const Case& c) { return c.ranks(Axis::tp) > 1 && wire_of(c) != c.dtype(); }
void bound_over_tp(const Case& c, const Sums& s, Gauge& g) {
  if (s.reduced > 1)
    g = gauge_of(Relative(c).sum(s.terms).reduced(s.reduced, c.dtype()), std::move(g.magnitude));
}

std::vector<Whole> forward(const Case& c, std::span<const Whole> in, std::vector<Gauge>* gauges) {
  const LinearSums s = sums_of(c);
  auto out = linear_forward(s, token_shape(c, c.at("out")), in, gauges);
  if (gauges && sums_apart_over_tp(c)) bound_over_tp(c, s.y, (*gauges)[0]);
  return out;
}

// A rank's gradient is accumulated and then rounded to a type of its own, in which that of a row
// bias is summed over tp; then it travels over dp and cp.
void bound_in_stages(const Case& c, const Sums& s, bool over_tp, Gauge& g) {
  const auto local = type_of_local_gradient(c);
  Relative r = Relative(c).sum(s.terms);
  if (over_tp)
    r = r.reduced(c.ranks(Axis::tp), local.value_or(wire_of(c)));
  else if (local)
    r = r.rounded(*local);
  g = gauge_of(r.reduced(ranks_with_tokens(c), wire_of(c)), std::move(g.magnitude));
}

std::vector<Whole> backward(const Case& c, std::span<const Whole> in, std::span<const Whole> cot,
                            std::vector<Gauge>* gauges) {
  const LinearSums s = sums_of(c);
  auto out = linear_backward(s, in, cot, gauges);
  for (size_t i = 1; i < out.size(); ++i)
    if (c.on("frozen")) out[i] = {};
  if (!gauges) return out;
  if (sums_apart_over_tp(c)) bound_over_tp(c, s.x, (*gauges)[0]);
  for (size_t i = 1; i < out.size(); ++i) {
    const bool over_tp = i == 2 && cuts_row_bias(c);
    if (over_tp || type_of_local_gradient(c))
      bound_in_stages(c, i == 1 ? s.w : s.b, over_tp, (*gauges)[i]);
    (*gauges)[i].deferred = c.text("sync") != "each";
  }
  return out;
}

std::vector<Traffic> calls_over_tp(const Case& c) {
  if (is_column(c)) return column_calls(c, c.dtype());
  if (is_row(c)) return row_calls(c, c.dtype(), type_of_local_gradient(c).value_or(wire_of(c)));
  return {};
}

std::vector<Traffic> traffic(const Case& c, const std::string&, int) {
  std::vector<Axis> cut, copied;
  for (Axis a : {Axis::cp, Axis::dp})
    if (c.ranks(a) > 1) (a == Axis::dp && copied_over_dp(c) ? copied : cut).push_back(a);
  const int64_t own = flat_elements(c);
  std::vector<Traffic> due;
  const auto add = [&](const std::vector<Axis>& axes, Op op, bool backward, int64_t count,
                       bool once = false) {
    if (axes.empty()) return;
    due.push_back(call(op, backward, count, op == Op::all_gather ? c.dtype() : wire_of(c)));
    due.back().label = reading::label(axes);
    due.back().once_a_step = once;
  };
  const auto over_tp = [&](bool backward) {
    for (const Traffic& t : calls_over_tp(c))
      if (t.backward == backward) due.push_back(t);
  };
  add(cut, Op::all_gather, false, own);
  over_tp(false);
  if (c.on("reshard")) add(cut, Op::all_gather, true, own);
  over_tp(true);
  if (c.on("frozen")) return due;
  const std::string& sync = c.text("sync");
  add(cut, Op::reduce_scatter, true, own * ranks_of_shards(c), sync == "last");
  add(copied, Op::all_reduce, true, own, sync != "each");
  return due;
}

std::vector<Gemm> gemms(const Case& c, int) { return is_row(c) ? row_gemms(c) : column_gemms(c); }

// So many for each rank that cuts them.
Key derived(const char* name, bool (*cut)(const Case&), int64_t each, const char* help) {
  Key k = extent(name, "", 1, help);
  k.derive = [=](const Case& c) { return std::to_string(each * (cut(c) ? c.ranks(Axis::tp) : 1)); };
  return k;
}

std::vector<Key> keys() {
  std::vector<Key> list = token_keys();
  list.push_back(derived("in", is_row, 7,
                         "columns of w; left out: 7, for each rank of tp under parallel=row"));
  // Two rows a rank at 8 ranks, but for the last: one, and none.
  list.push_back(derived("out", is_column, 13,
                         "rows of w, ceil(out/p) a rank, the last ranks fewer or none; left out: "
                         "13, for each rank of tp under parallel=column"));
  list.push_back(toggle("bias", "on", "add b; it travels with w"));
  Key shard{"shard", "all",
            "ranks that rows are cut over: all, those of dp and cp; cp, and each of dp has a copy"};
  shard.choices = {"all", "cp"};
  list.push_back(shard);
  list.push_back(toggle("reshard", "on", "gather again in backward; off: keep what was gathered"));
  list.push_back(toggle("frozen", "off", "no gradient of w and b"));
  Key parallel{"parallel", "none",
               "how tp cuts w before its rows are: column, rows of w and b; row, columns of w"};
  parallel.choices = {"none", "column", "row"};
  list.push_back(parallel);
  list.push_back(
      toggle("sp", "off", "sequence parallel: tokens are cut over tp outside the linear"));
  list.push_back(toggle("whole_weight", "off", "w and b are handed whole and cut by the subject"));
  Key local{
      "local_grad", "",
      "type that a rank keeps its own gradient in before the sum, as autograd leaves it in the "
      "storage type; left out: the wire type"};
  local.choices = {"f64", "f32", "bf16", "f16"};
  list.push_back(local);
  list.push_back(microbatches_key());
  Key sync{"sync", "each",
           "which microbatches of a step reduce: each; last, what all have added up; shards, each "
           "over the shards, the last over their copies"};
  sync.choices = {"each", "last", "shards"};
  list.push_back(sync);
  return list;
}

// 26 rows over tp=2 are 13, which dp=4 cuts into 4, 4, 4 and 1; out=10 into 2, 2, 1 and none.
std::vector<std::string> inside_tp() {
  const std::vector<std::string> both{"sharded_linear tp=2 dp=2 parallel=column",
                                      "sharded_linear tp=2 dp=2 parallel=row"};
  return together(
      {crossed(both, {"", "dtype=f32 fill=normal", "strides=transposed", "seq=24 batch=2",
                      "bias=off", "whole_weight=on"}),
       crossed(crossed(both, {"sp=on"}),
               {"", "reshard=off", "frozen=on", "bias=off", "whole_weight=on", "shard=cp",
                "microbatches=2", "dtype=bf16 wire=f32 fill=normal",
                "local_grad=bf16 dtype=bf16 wire=f32 grad=f32 fill=normal"}),
       crossed({"sharded_linear tp=2 dp=4", "sharded_linear tp=4 dp=2", "sharded_linear tp=2",
                "sharded_linear tp=3", "sharded_linear tp=2 dp=2 cp=2",
                "sharded_linear tp=2 dp=2 order=dp,tp", "sharded_linear tp=2 dp=2 cp=2 shard=cp"},
               {"parallel=column", "parallel=row", "parallel=column sp=on", "parallel=row sp=on"}),
       crossed({"sharded_linear tp=2 dp=4 out=10"},
               {"parallel=column", "parallel=column sp=on", "parallel=column whole_weight=on",
                "parallel=row sp=on whole_weight=on"}),
       crossed({"sharded_linear tp=2 dp=4 sp=on"},
               {"parallel=column dtype=bf16 fill=normal", "parallel=row dtype=bf16 fill=normal",
                "parallel=row dtype=f16 wire=f32 fill=normal",
                "parallel=column dtype=f32 wire=bf16 fill=normal",
                "parallel=row dtype=f32 fill=cancelling", "parallel=row local_grad=bf16"}),
       {"sharded_linear parallel=column sp=on", "sharded_linear parallel=row sp=on",
        "sharded_linear dp=2 whole_weight=on", "sharded_linear dp=2 cp=2 shard=cp whole_weight=on",
        "sharded_linear dp=4 out=5 whole_weight=on microbatches=2",
        "sharded_linear tp=2 dp=2 order=dp,tp parallel=column whole_weight=on",
        "sharded_linear tp=2 cp=2 dp=2 order=cp,dp,tp parallel=row whole_weight=on",
        "sharded_linear tp=2 cp=2 dp=2 shard=cp parallel=column whole_weight=on"}});
}

std::vector<std::string> inside_tp_at_length() {
  return crossed(crossed({"sharded_linear tp=2 dp=4 tokens=240 out=250 in=130",
                          "sharded_linear tp=3 dp=2 tokens=48 out=51"},
                         {"parallel=column", "parallel=row sp=on", "parallel=column sp=on",
                          "parallel=row whole_weight=on"}),
                 {"", "dtype=f32 fill=normal", "dtype=bf16 wire=f32 fill=normal"});
}

std::vector<std::string> steps_that_reduce_once() {
  return together(
      {crossed({"sharded_linear", "sharded_linear dp=2", "sharded_linear dp=3",
                "sharded_linear dp=4 out=5", "sharded_linear dp=2 cp=2",
                "sharded_linear dp=2 cp=2 shard=cp", "sharded_linear dp=2 shard=cp",
                "sharded_linear tp=2 dp=2 parallel=column sp=on",
                "sharded_linear tp=2 dp=2 parallel=row sp=on"},
               {"microbatches=2 sync=last", "microbatches=3 sync=last reshard=off"}),
       crossed(
           {"sharded_linear dp=4 microbatches=3", "sharded_linear dp=2 cp=2 microbatches=2"},
           {"sync=last dtype=f32 fill=normal", "sync=last dtype=bf16 fill=normal",
            "sync=last dtype=bf16 wire=f32 grad=f32 fill=normal",
            "sync=last dtype=bf16 wire=f32 grad=f32 local_grad=bf16 fill=normal",
            "sync=last frozen=on", "sync=last whole_weight=on", "sync=last strides=transposed"}),
       crossed({"sharded_linear dp=2 cp=2 shard=cp microbatches=2 sync=shards",
                "sharded_linear dp=2 shard=cp microbatches=3 sync=shards",
                "sharded_linear tp=2 cp=2 dp=2 shard=cp parallel=row sp=on microbatches=2 "
                "sync=shards"},
               {"", "dtype=f32 fill=normal", "dtype=bf16 wire=f32 grad=f32 fill=normal"}),
       {"sharded_linear dp=2 microbatches=2 sync=shards",
        "sharded_linear dp=2 microbatches=2 sync=last bias=off",
        "sharded_linear cp=4 dp=2 shard=cp out=5 microbatches=2 sync=shards",
        "sharded_linear tp=2 dp=4 out=10 parallel=column microbatches=2 sync=last"}});
}

std::vector<std::string> cases(const std::string& tier) {
  const auto smoke =
      crossed({"sharded_linear"},
              {"dp=2", "dp=4", "dp=4 out=5", "dp=2 cp=2 reshard=off", "dp=2 cp=2 shard=cp",
               "dp=2 frozen=on bias=off", "dp=4 dtype=bf16 wire=f32 fill=normal",
               "dp=2 microbatches=2", "dp=2 tp=2 parallel=column sp=on",
               "dp=2 tp=2 parallel=row sp=on", "dp=2 microbatches=2 sync=last"});
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
  const auto all = together({ci, inside_tp(), steps_that_reduce_once()});
  if (tier != "nightly") return all;
  return together(
      {all, inside_tp_at_length(),
       crossed(crossed({"sharded_linear dp=8 out=241 in=65 tokens=240",
                        "sharded_linear dp=6 out=50 tokens=240", "sharded_linear dp=5 tokens=25"},
                       {"", "reshard=off", "bias=off"}),
               {"", "dtype=f32 fill=normal", "dtype=bf16 wire=f32 fill=normal",
                "dtype=f32 fill=cancelling"})});
}

Contract sharded_linear() {
  Contract c;
  c.name = "sharded_linear";
  c.family = "sharded";
  c.summary = "Y = X W^T + b, W and b cut over tp or not, then by rows over dp and cp and gathered";
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
  c.gemms = gemms;
  c.illegal = {"sharded_linear dp=2 tp=2",
               "sharded_linear dp=2 sp=on",
               "sharded_linear dp=2 tp=2 parallel=column out=13",
               "sharded_linear dp=2 tp=2 parallel=row in=7",
               "sharded_linear dp=2 tp=2 parallel=row sp=on tokens=10",
               "sharded_linear dp=2 ep=2",
               "sharded_linear dp=2 pp=2",
               "sharded_linear dp=4 tokens=10",
               "sharded_linear dp=2 cp=2 tokens=6",
               "sharded_linear dp=2 seq=3 batch=2",
               "sharded_linear dp=2 batch=2",
               "sharded_linear dp=2 seq=8 batch=3 tokens=20"};
  c.witnesses = {"sharded_linear dp=2",
                 "sharded_linear dp=3",
                 "sharded_linear dp=4",
                 "sharded_linear dp=2 cp=2",
                 "sharded_linear dp=2 cp=2 shard=cp",
                 "sharded_linear dp=3 shard=cp",
                 "sharded_linear dp=2 tp=2 parallel=column sp=on",
                 "sharded_linear dp=2 tp=2 parallel=row sp=on"};
  return c;
}

}  // namespace

void family_sharded(Registry& r) {
  r.add(sharded_linear());
  add_ours<primitives::ShardedLinear>(r, "sharded_linear");
}

}  // namespace shardproof
