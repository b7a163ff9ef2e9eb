// The pipeline family: layers that lie on stages, and microbatches that travel through them. What
// is judged is whether each microbatch meets every layer once, in order, with the state of its own
// forward, and whether every parameter's gradient is the sum over all of them.
#include "suites/pipeline.hpp"

#include <algorithm>

#include "fixtures/fills.hpp"
#include "fixtures/index_maps.hpp"
#include "oracle/check.hpp"
#include "oracle/registry.hpp"
#include "primitives/pipeline.hpp"
#include "reference/tied.hpp"
#include "suites/ours.hpp"
#include "suites/replicated.hpp"

namespace shardproof {
namespace pipelines {

using namespace linears;

// ---- What is read from a line

Shape::Shape(const Case& c)
    : stages(c.ranks(Axis::pp)),
      chunks(stages * c.at("virtual")),
      layers(c.at("layers")),
      hidden(c.at("hidden")),
      tokens(c.at("tokens") / c.ranks(Axis::dp)),
      size(c.at("micro_batch_size")),
      microbatches((tokens + size - 1) / size),
      turns(c.has("schedule") && c.text("schedule") == "zbv") {}

int64_t Shape::stage_of_chunk(int64_t chunk) const {
  return turns && chunk >= stages ? chunks - 1 - chunk : chunk % stages;
}

int64_t Shape::chunk_of(int64_t layer) const {
  const int64_t shorter = layers / chunks, longer = layers % chunks * (shorter + 1);
  return layer < longer ? layer / (shorter + 1) : layers % chunks + (layer - longer) / shorter;
}

int64_t Shape::layers_of(int64_t stage) const {
  int64_t own = 0;
  for (int64_t l = 0; l < layers; ++l) own += stage_of(l) == stage;
  return own;
}

int64_t Shape::elements_of(int64_t microbatch) const {
  return std::min(size, tokens - microbatch * size) * hidden;
}

int stage_of_rank(const Case& c, int rank) { return c.mesh().coordinate(rank, Axis::pp); }

// ---- Operands

std::string numbered(const char* name, int64_t i) { return name + std::to_string(i); }

Layout on_stage(int64_t stage, const Placement& dp) {
  return {{Axis::dp, dp}, {Axis::pp, S(0, on_rank_map(stage))}};
}

void add_layers(const Shape& s, std::vector<Operand>& list) {
  for (int64_t l = 0; l < s.layers; ++l) {
    const Layout own = on_stage(s.stage_of(l), I());
    list.push_back({numbered("w", l), Operand::parameter, {s.hidden, s.hidden}, own, true, 0});
    list.push_back({numbered("b", l), Operand::parameter, {s.hidden}, own});
  }
}

reference::StackInputs stack_of(const Case& c, std::span<const Whole> in) {
  reference::StackInputs s{c.at("tokens"), c.at("hidden"), in[0].value, {}, {}};
  for (size_t i = 1; i < in.size(); i += 2) {
    s.w.push_back(in[i].value);
    s.b.push_back(in[i + 1].value);
  }
  return s;
}

// |X_l| <= (h+1)^l B^(l+1), since h B |X_l| + B <= (h+1) B |X_l|, and a cotangent that has passed n
// layers is at most h^n B^(n+1). So every result is a sum of max(T, h+1) (h+1)^(L-1) terms of L+1
// factors at most.
std::optional<int64_t> range_of_layers(const Case& c, int64_t terms, int64_t layers, int factors) {
  for (int64_t l = 0; l < layers; ++l)
    if (__builtin_mul_overflow(terms, c.at("hidden") + 1, &terms)) return {};
  return range_of_products(c, terms, factors);
}

// Type that a stage keeps its sums over microbatches in; none: that of accumulation.
std::optional<DType> type_of_sums(const Case& c) {
  return c.has("local_grad") ? dtype_from(c.text("local_grad")) : std::nullopt;
}

std::optional<int64_t> range_of_stack(const Case& c, int64_t tokens) {
  const int64_t layers = c.at("layers");
  const auto fitting = [&](DType type) {
    Case narrow = c;
    narrow.set("dtype", name(type));
    if (c.ranks(Axis::dp) == 1) narrow.set("wire", "");  // no sum travels
    return range_of_layers(narrow, std::max(tokens, c.at("hidden") + 1), layers - 1,
                           int(layers) + 1);
  };
  const auto range = fitting(c.dtype());
  const auto kept = type_of_sums(c);
  if (!range || !kept) return range;
  const auto of_sums = fitting(*kept);
  return of_sums ? std::optional(std::min(*range, *of_sums)) : std::nullopt;
}

reference::Rounding rounding_of(const Case& c, const Precision& p) {
  return replicated::rounding_of(c, p, c.ranks(Axis::dp));
}

std::vector<Gauge> gauges_of_gradients(const Case& c, const reference::StackInputs& stack,
                                       const reference::Uncertain& cotangent) {
  const Precision p = precision_of(c, Declared{});
  const auto kept = type_of_sums(c);
  const double more =
      kept ? reference::gamma_of(double(Shape(c).microbatches), unit_roundoff(*kept)) : 0;
  auto losses = reference::stack_backward_loss(stack, cotangent, rounding_of(c, p));
  std::vector<Gauge> gauges;
  for (auto& loss : in_order(losses, losses.x)) {
    const bool parameter = !gauges.empty();
    for (size_t i = 0; parameter && i < loss.error.size(); ++i)
      loss.error[i] += more * (loss.magnitude[i] + loss.error[i]);
    gauges.push_back(replicated::gauge_of(loss, p));
  }
  return gauges;
}

// ---- Traffic

void add_call(std::vector<Traffic>& due, Traffic call, const char* label, int hop) {
  call.label = label, call.hop = hop;
  due.push_back(std::move(call));
}

int64_t elements_of_layers(const Case& c, int rank) {
  const Shape s(c);
  return s.layers_of(stage_of_rank(c, rank)) * (s.hidden + 1) * s.hidden;
}

std::vector<Gemm> gemms_of_stage(const Case& c, int rank, bool backward) {
  const Shape s(c);
  std::vector<Gemm> due;
  for (int64_t l = 0; l < s.layers; ++l) {
    if (s.stage_of(l) != stage_of_rank(c, rank)) continue;
    const std::string n = std::to_string(l);
    due.push_back({"Y = X W" + n + "^T", false, s.tokens, s.hidden, s.hidden});
    due.push_back({"dX = dY W" + n, backward, s.tokens, s.hidden, s.hidden});
    due.push_back({"dW" + n + " = dY^T X", backward, s.hidden, s.hidden, s.tokens});
  }
  return due;
}

// ---- Keys

Key local_grad_key() {
  Key kept{"local_grad", "",
           "type that a stage keeps its sums over microbatches in, as autograd leaves them in the "
           "storage type; left out: that of accumulation"};
  kept.choices = {"f64", "f32", "bf16", "f16"};
  return kept;
}

std::vector<Key> keys_of_layers(const char* layers_by_default) {
  return {extent("tokens", "24", 1, "rows of x and y"),
          extent("hidden", "3", 1, "columns of what travels"),
          extent("layers", layers_by_default, 1, "linears, each [hidden,hidden] with a bias", 64),
          extent("micro_batch_size", "7", 1,
                 "own tokens of a microbatch; the last one has what is left"),
          extent("virtual", "1", 1,
                 "chunks of layers a stage (vpp, virtual stages), interleaved where above 1", 16)};
}

}  // namespace pipelines

namespace {

using namespace pipelines;

// ---- pipeline_stages: operands x, w0, b0, w1, b1, .., y

std::vector<Operand> operands(const Case& c) {
  const Shape s(c);
  const std::vector<int64_t> x{c.at("tokens"), s.hidden};
  std::vector<Operand> list{{"x", Operand::input, x, on_stage(0, S(0)), true, 1}};
  add_layers(s, list);
  list.push_back({"y", Operand::output, x, on_stage(s.stages - 1, S(0)), true, 0});
  return list;
}

std::vector<Whole> forward(const Case& c, std::span<const Whole> in, std::vector<Gauge>* gauges) {
  const auto stack = stack_of(c, in);
  if (gauges) {
    const Precision p = precision_of(c, Declared{});
    *gauges = {replicated::gauge_of(reference::stack_loss(stack, rounding_of(c, p)), p)};
  }
  return listed(whole(in[0].shape, reference::stack(stack)));
}

std::vector<Whole> backward(const Case& c, std::span<const Whole> in, std::span<const Whole> cot,
                            std::vector<Gauge>* gauges) {
  const auto stack = stack_of(c, in);
  auto d = reference::stack_backward(stack, cot[0].value);
  std::vector<Whole> out;
  for (auto& value : in_order(d, d.x)) out.push_back(whole(in[out.size()].shape, std::move(value)));
  if (gauges) *gauges = gauges_of_gradients(c, stack, reference::certain(cot[0].value));
  return out;
}

std::optional<int64_t> integer_range(const Case& c) {
  return range_of_stack(c, c.at("tokens") * c.at("microbatches"));
}

// When the chunk that is n-th in a direction works on the microbatch that is m-th.
int64_t tick_of(const Shape& s, int64_t m, int64_t n) {
  const int64_t group = m / s.stages * s.chunks, round = n / s.stages * s.stages;
  return group + round + m % s.stages + n % s.stages;
}

// Elements that a stage sends after each tick but the last one.
std::vector<int64_t> sent_by(const Shape& s, int64_t stage, bool backward, bool last_first) {
  const int64_t last = s.microbatches - 1;
  std::vector<int64_t> sent(size_t(tick_of(s, last, s.chunks - 1)), 0);
  for (int64_t m = 0; m <= last; ++m)
    for (int64_t n = 0; n + 1 < s.chunks; ++n) {
      const int64_t chunk = backward ? s.chunks - 1 - n : n;
      if (chunk % s.stages != stage) continue;
      sent[size_t(tick_of(s, m, n))] = s.elements_of(backward && last_first ? last - m : m);
    }
  return sent;
}

// The shifts of both directions, and the sum of `own` elements over dp.
std::vector<Traffic> calls_of_stage(const Case& c, int rank, int64_t own) {
  const Shape s(c);
  const bool last_first = c.text("backward_order") == "lifo";
  std::vector<Traffic> due;
  for (const bool backward : {false, true}) {
    if (s.stages == 1) break;
    for (int64_t n : sent_by(s, stage_of_rank(c, rank), backward, last_first))
      add_call(due, call(Op::shift, backward, n, c.dtype()), "pp", backward ? -1 : +1);
  }
  if (c.ranks(Axis::dp) > 1 && own > 0)
    add_call(due, call(Op::all_reduce, true, own, wire_of(c)), "dp");
  return due;
}

std::vector<Traffic> traffic(const Case& c, const std::string&, int rank) {
  return calls_of_stage(c, rank, elements_of_layers(c, rank));
}

std::vector<Key> keys_of_stages(const char* layers_by_default) {
  std::vector<Key> keys = keys_of_layers(layers_by_default);
  keys.push_back(choice("backward_order", "fifo", {"fifo", "lifo"},
                        "microbatches in the backward: in their order (fifo), or the last one "
                        "first (lifo)"));
  keys.push_back(microbatches_key());
  return keys;
}

std::vector<Key> keys() {
  std::vector<Key> list = keys_of_stages("5");
  list.push_back(local_grad_key());
  return list;
}

std::vector<std::string> cases(const std::string& tier) {
  const std::string half = "layers=2 hidden=2 tokens=8 micro_batch_size=3";
  const auto smoke =
      crossed({"pipeline_stages"},
              {"pp=2 tokens=9 micro_batch_size=4 layers=3", "pp=4 tokens=5 micro_batch_size=3",
               "pp=2 virtual=2 tokens=5 micro_batch_size=3",
               "pp=2 dp=2 tokens=8 micro_batch_size=3 layers=3",
               "pp=2 dtype=bf16 fill=normal tokens=9 micro_batch_size=4 layers=2",
               "pp=2 backward_order=lifo microbatches=2 tokens=6 micro_batch_size=4 layers=2"});
  if (tier == "smoke") return smoke;
  const std::vector<std::string> ranks{"pipeline_stages", "pipeline_stages pp=2",
                                       "pipeline_stages pp=3", "pipeline_stages pp=4",
                                       "pipeline_stages pp=8"};
  const std::vector<std::string> grids{"pipeline_stages dp=2",
                                       "pipeline_stages pp=2 dp=2 micro_batch_size=5",
                                       "pipeline_stages pp=2 dp=2 order=pp,dp micro_batch_size=5",
                                       "pipeline_stages pp=4 dp=2 micro_batch_size=5",
                                       "pipeline_stages pp=2 dp=4 micro_batch_size=4",
                                       "pipeline_stages dp=3"};
  const std::vector<std::string> rounding{"fill=normal",
                                          "dtype=f32 fill=normal",
                                          "dtype=bf16 fill=normal",
                                          "dtype=f16 fill=normal",
                                          "dtype=bf16 grad=f32 wire=f32 fill=normal",
                                          "dtype=f32 acc=f64 fill=normal",
                                          "dtype=f32 fill=cancelling"};
  const auto ci = together(
      {smoke,
       crossed(ranks, {"", "dtype=f32", "virtual=2", "backward_order=lifo", "layers=8"}),
       crossed(ranks, {"dtype=bf16 " + half, "dtype=f16 " + half}),
       crossed(grids, {"", "virtual=2"}),
       crossed({"pipeline_stages pp=3", "pipeline_stages pp=2 dp=2 virtual=2 micro_batch_size=5"},
               rounding),
       crossed({"pipeline_stages pp=2", "pipeline_stages pp=4 virtual=2"},
               {"strides=transposed", "strides=expanded", "strides=expanded_inputs",
                "micro_batch_size=6", "micro_batch_size=24", "micro_batch_size=1 tokens=5",
                "layers=1", "layers=3", "microbatches=2 tokens=10 micro_batch_size=4"}),
       crossed({"pipeline_stages pp=2 layers=1 tokens=96 micro_batch_size=8 dtype=bf16",
                "pipeline_stages pp=2 dp=2 layers=2 tokens=96 micro_batch_size=8 dtype=bf16"},
               {"fill=normal", "fill=cancelling", "local_grad=bf16 fill=normal",
                "local_grad=bf16 grad=f32 wire=f32 fill=normal"}),
       {"pipeline_stages pp=2 local_grad=f32", "pipeline_stages pp=2 virtual=3 layers=13",
        "pipeline_stages pp=3 virtual=2 layers=6",
        "pipeline_stages pp=4 virtual=2 layers=11 backward_order=lifo micro_batch_size=5",
        "pipeline_stages virtual=3", "pipeline_stages pp=8 layers=13 tokens=16 micro_batch_size=3",
        "pipeline_stages pp=2 dtype=f32 fill=large layers=2",
        "pipeline_stages pp=2 dp=2 microbatches=3 dtype=bf16 grad=f32 fill=normal layers=3",
        "pipeline_stages pp=2 hidden=1 layers=2", "pipeline_stages pp=4 tokens=1"}});
  if (tier != "nightly") return ci;
  return together(
      {ci, crossed(crossed({"pipeline_stages pp=5 layers=11", "pipeline_stages pp=6 layers=12",
                            "pipeline_stages pp=8 layers=17 tokens=16"},
                           {"", "virtual=2", "virtual=3 backward_order=lifo"}),
                   {"", "dtype=f32 fill=normal hidden=9", "dtype=bf16 fill=normal", "seed=2"})});
}

Contract pipeline_stages() {
  Contract c;
  c.name = "pipeline_stages";
  c.family = "pipeline";
  c.summary = "a stack of linears, its layers on the stages of pp, tokens in microbatches";
  c.linear = true;
  c.keys = keys();
  c.precondition = primitives::refused_pipeline_stages;
  c.operands = operands;
  c.forward = forward;
  c.backward = backward;
  c.traffic = traffic;
  c.integer_range = integer_range;
  c.cases = cases;
  c.gemms = [](const Case& c, int rank) { return gemms_of_stage(c, rank, true); };
  c.illegal = {"pipeline_stages pp=2 tp=2",      "pipeline_stages pp=2 cp=2",
               "pipeline_stages pp=2 ep=2",      "pipeline_stages pp=2 dp=2 tokens=9",
               "pipeline_stages dp=4 tokens=10", "pipeline_stages tp=2"};
  c.witnesses = {"pipeline_stages pp=2 tokens=4 micro_batch_size=3 layers=3",
                 "pipeline_stages pp=3 tokens=5 micro_batch_size=3 layers=4",
                 "pipeline_stages pp=4 tokens=4 micro_batch_size=2",
                 "pipeline_stages pp=2 dp=2 virtual=2 tokens=8 micro_batch_size=2 layers=4"};
  return c;
}

// ---- Tied embedding: operands ids, w, w0, b0, .., y

bool holds_table(const Case& c, int rank) {
  const int stage = stage_of_rank(c, rank);
  return stage == 0 || stage + 1 == c.ranks(Axis::pp);
}

std::vector<Operand> tied_operands(const Case& c) {
  const Shape s(c);
  Operand ids{"ids", Operand::index, {c.at("tokens")}, on_stage(0, S(0)), false};
  ids.dtype_override = *dtype_from(c.text("index")), ids.fixed_dtype = true;
  ids.below = c.at("vocab");
  std::vector<Operand> list{ids,
                            {"w",
                             Operand::parameter,
                             {c.at("vocab"), s.hidden},
                             {{Axis::dp, I()}, {Axis::pp, I(ends_map())}},
                             true,
                             1}};
  add_layers(s, list);
  list.push_back({"y",
                  Operand::output,
                  {c.at("tokens"), c.at("vocab")},
                  on_stage(s.stages - 1, S(0)),
                  true,
                  0});
  return list;
}

reference::TiedInputs tied_of(const Case& c, std::span<const Whole> in) {
  reference::TiedInputs t{
      {in[0].value.begin(), in[0].value.end()}, c.at("vocab"), c.at("hidden"), in[1].value, {}, {}};
  for (size_t i = 2; i < in.size(); i += 2) {
    t.w.push_back(in[i].value);
    t.b.push_back(in[i + 1].value);
  }
  return t;
}

std::vector<Whole> tied_forward(const Case& c, std::span<const Whole> in,
                                std::vector<Gauge>* gauges) {
  const auto t = tied_of(c, in);
  if (gauges) {
    const Precision p = precision_of(c, Declared{});
    *gauges = {replicated::gauge_of(reference::tied_loss(t, rounding_of(c, p)), p)};
  }
  return listed(whole({c.at("tokens"), c.at("vocab")}, reference::tied(t)));
}

std::vector<Whole> tied_backward(const Case& c, std::span<const Whole> in,
                                 std::span<const Whole> cot, std::vector<Gauge>* gauges) {
  const auto t = tied_of(c, in);
  auto d = reference::tied_backward(t, cot[0].value);
  std::vector<Whole> out{{}};
  for (auto& value : in_order(d, d.table))
    out.push_back(whole(in[out.size()].shape, std::move(value)));
  if (!gauges) return out;
  const Precision p = precision_of(c, Declared{});
  const int parts = c.ranks(Axis::dp) * std::min(c.ranks(Axis::pp), 2);
  auto losses = reference::tied_backward_loss(t, cot[0].value, rounding_of(c, p), parts);
  *gauges = {{}};
  for (const auto& loss : in_order(losses, losses.table))
    gauges->push_back(replicated::gauge_of(loss, p));
  return out;
}

// As above with a table before and behind: |logits| <= (h+1)^(L+1) B^(L+2), and a part of a
// gradient of parameters is T V (h+1)^L products at most, the table's other one T (h+1)^L.
std::optional<int64_t> tied_range(const Case& c) {
  const int64_t tokens = c.at("tokens") * c.at("microbatches"), layers = c.at("layers");
  return range_of_layers(c, std::max(tokens * (c.at("vocab") + 1), c.at("hidden") + 1), layers,
                         int(layers) + 2);
}

std::vector<Traffic> tied_traffic(const Case& c, const std::string&, int rank) {
  const int64_t table = holds_table(c, rank) ? c.at("vocab") * c.at("hidden") : 0;
  auto due = calls_of_stage(c, rank, table + elements_of_layers(c, rank));
  if (const int stages = c.ranks(Axis::pp); stages > 1 && table > 0)
    add_call(due, call(Op::all_reduce, true, table, wire_of(c)), stages > 2 ? "pp:ends" : "pp");
  return due;
}

std::vector<Gemm> tied_gemms(const Case& c, int rank) {
  std::vector<Gemm> due = gemms_of_stage(c, rank, true);
  const Shape s(c);
  if (stage_of_rank(c, rank) + 1 < s.stages) return due;
  const int64_t V = c.at("vocab");
  due.push_back({"Y = X W^T", false, s.tokens, V, s.hidden});
  due.push_back({"dX = dY W", true, s.tokens, s.hidden, V});
  due.push_back({"dW = dY^T X", true, V, s.hidden, s.tokens});
  return due;
}

std::vector<std::string> tied_cases(const std::string& tier) {
  const std::string exact = "fill=integers layers=3 hidden=2 ";
  const auto smoke =
      crossed({"pipeline_tied"}, {"pp=2 fill=integers tokens=6 micro_batch_size=4 layers=2",
                                  "pp=4 tokens=4 micro_batch_size=3",
                                  "pp=2 dp=2 tokens=8 micro_batch_size=3 fill=integers layers=3",
                                  "pp=2 microbatches=2 tokens=6 micro_batch_size=4 layers=2"});
  if (tier == "smoke") return smoke;
  const std::vector<std::string> ranks{"pipeline_tied", "pipeline_tied pp=2", "pipeline_tied pp=3",
                                       "pipeline_tied pp=4", "pipeline_tied pp=8"};
  const std::vector<std::string> grids{
      "pipeline_tied dp=2", "pipeline_tied pp=2 dp=2 micro_batch_size=5",
      "pipeline_tied pp=2 dp=2 order=pp,dp micro_batch_size=5",
      "pipeline_tied pp=4 dp=2 micro_batch_size=5", "pipeline_tied pp=2 dp=4 micro_batch_size=4"};
  const auto ci = together(
      {smoke,
       crossed(ranks, {"", "dtype=f32", exact, "virtual=2", "dtype=bf16", "dtype=f16"}),
       crossed(grids, {"", exact, "dtype=bf16 grad=f32 wire=f32"}),
       crossed({"pipeline_tied pp=2", "pipeline_tied pp=4 virtual=2"},
               {"strides=transposed", "strides=expanded", "index=i32", "backward_order=lifo",
                "layers=1", "vocab=2", "microbatches=2 tokens=10 micro_batch_size=4",
                "dtype=f32 acc=f64", "dtype=f32 fill=cancelling",
                "tokens=40 vocab=5 micro_batch_size=9 " + exact}),
       {"pipeline_tied pp=2 dtype=f32 fill=large layers=1", "pipeline_tied pp=4 tokens=1",
        "pipeline_tied pp=2 dp=2 microbatches=3 dtype=bf16 grad=f32 layers=3"}});
  if (tier != "nightly") return ci;
  return together(
      {ci, crossed(crossed({"pipeline_tied pp=5 layers=11", "pipeline_tied pp=8 tokens=16"},
                           {"", "virtual=2", "virtual=3 backward_order=lifo"}),
                   {"", "dtype=f32 hidden=9 vocab=50", "dtype=bf16", "seed=2"})});
}

Contract pipeline_tied() {
  Contract c;
  c.name = "pipeline_tied";
  c.family = "pipeline";
  c.summary =
      "the same between an embedding on the first stage and logits on the last, of one table";
  c.keys = keys_of_stages("4");
  c.keys.push_back(extent("vocab", "11", 1, "rows of w; ids are below it"));
  Key index{"index", "i64", "type of the ids"};
  index.choices = {"i64", "i32"};
  c.keys.push_back(index);
  c.precondition = primitives::refused_pipeline_tied;
  c.operands = tied_operands;
  c.forward = tied_forward;
  c.backward = tied_backward;
  c.traffic = tied_traffic;
  c.integer_range = tied_range;
  c.cases = tied_cases;
  c.gemms = tied_gemms;
  c.illegal = {"pipeline_tied pp=2 tp=2", "pipeline_tied pp=2 cp=2", "pipeline_tied pp=2 ep=2",
               "pipeline_tied dp=2 tokens=9", "pipeline_tied dp=4 tokens=10"};
  c.witnesses = {"pipeline_tied pp=2 tokens=5 micro_batch_size=3 layers=2",
                 "pipeline_tied pp=3 tokens=5 micro_batch_size=3 layers=3",
                 "pipeline_tied pp=4 tokens=4 micro_batch_size=3",
                 "pipeline_tied pp=2 dp=2 tokens=8 micro_batch_size=3 layers=2"};
  return c;
}

}  // namespace

void family_pipeline(Registry& r) {
  r.add(pipeline_stages());
  add_ours<primitives::PipelineStages>(r, "pipeline_stages");
  r.add(pipeline_tied());
  add_ours<primitives::PipelineTied>(r, "pipeline_tied");
}

}  // namespace shardproof
