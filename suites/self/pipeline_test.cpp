// What the pipeline family states: layers on stages, ticks, calls and gradients that can be
// followed by hand, bounds, refusals; and what its kernels and their twins do where a number is
// known beforehand.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <map>

#include "fixtures/sharding.hpp"
#include "oracle/prepared/prepare.hpp"
#include "oracle/registry.hpp"
#include "oracle/run.hpp"
#include "primitives/pipeline.hpp"
#include "reference/tied.hpp"
#include "suites/self/foreign.hpp"
#include "suites/self/on_threads.hpp"

namespace shardproof {

void family_pipeline(Registry&);
void controls_pipeline(Registry&);

namespace {
namespace pipeline_test {

using primitives::Stage;
using primitives::Unit;
using Rows = std::vector<int64_t>;
using Doubles = std::vector<double>;

const Registry& family() {
  static const Registry registry = [] {
    Registry r;
    family_pipeline(r);
    controls_pipeline(r);
    return r;
  }();
  return registry;
}

const Contract& contract() { return family().contract("pipeline_stages"); }
Case line_of(const std::string& words) { return parse("pipeline_stages " + words, family()); }

// ---- The reference

TEST(Stack, IsFollowedByHand) {
  const Doubles x{1, 2}, w0{3}, b0{1}, w1{2}, b1{-1}, g{1, 10};
  const reference::StackInputs in{2, 1, x, {w0, w1}, {b0, b1}};
  EXPECT_EQ(reference::stack(in), (Doubles{7, 13}));  // 2 (3 x + 1) - 1
  const auto d = reference::stack_backward(in, g);
  EXPECT_EQ(d.w[1], (Doubles{1 * 4 + 10 * 7}));
  EXPECT_EQ(d.b[1], (Doubles{11}));
  EXPECT_EQ(d.w[0], (Doubles{2 * 1 + 20 * 2}));
  EXPECT_EQ(d.b[0], (Doubles{22}));
  EXPECT_EQ(d.x, (Doubles{6, 60}));
}

TEST(Stack, MultipliesByTheTransposeOfEachWeight) {
  const Doubles x{5, 6}, w{1, 2, 3, 4}, b{0, 100}, g{1, 10};
  const reference::StackInputs in{1, 2, x, {w}, {b}};
  EXPECT_EQ(reference::stack(in), (Doubles{17, 139}));
  EXPECT_EQ(reference::stack_backward(in, g).x, (Doubles{31, 42}));
  EXPECT_EQ(reference::stack_backward(in, g).w[0], (Doubles{5, 6, 50, 60}));
}

// One token, all factors 1, to first order: X_1 is two roundings and a store, u + u + v, off.
TEST(Stack, ErrorsGrowByHand) {
  constexpr double u = 0x1p-20, v = 0x1p-12;
  const Doubles one{1}, zero{0};
  const reference::StackInputs in{1, 1, one, {one, one}, {zero, zero}};
  reference::Rounding r;
  r.accumulate = u, r.store = v;
  EXPECT_NEAR(reference::stack_loss(in, r).error[0], 2 * u + (2 * u + v), u / 100);
  const auto loss = reference::stack_backward_loss(in, reference::certain(one), r);
  EXPECT_NEAR(loss.w[1].error[0], 2 * u + (2 * u + v), u / 100);
  EXPECT_NEAR(loss.w[0].error[0], 2 * u + (u + v), u / 100);
  EXPECT_NEAR(loss.x.error[0], u + (u + v), u / 100);
  // Two parts of a sum travel: each is rounded, and they are added.
  r.ranks = 2, r.wire = v;
  EXPECT_NEAR(reference::stack_backward_loss(in, reference::certain(one), r).w[0].error[0],
              3 * u + v + 2 * v, 5 * v * v);
}

// Ids 1, 0, 1 on a table of one column; one layer, x -> 2 x + 1.
TEST(Tied, IsFollowedByHand) {
  const Doubles table{3, 5}, w{2}, b{1}, g{1, 0, 0, 10, 100, 0};
  const reference::TiedInputs in{{1, 0, 1}, 2, 1, table, {w}, {b}};
  // X_1 = 11, 7, 11; logits are 3 and 5 times that.
  EXPECT_EQ(reference::tied(in), (Doubles{33, 55, 21, 35, 33, 55}));
  const auto d = reference::tied_backward(in, g);
  // The cotangent of X_1 is 1 3, 10 5, 100 3, and that of X_0 twice as much.
  EXPECT_EQ(d.b[0], (Doubles{3 + 50 + 300}));
  EXPECT_EQ(d.w[0], (Doubles{3 * 5 + 50 * 3 + 300 * 5}));
  // Logits: 1 11 + 100 11 and 10 7; rows: 2 50 of id 0, 2 3 + 2 300 of id 1.
  EXPECT_EQ(d.table, (Doubles{11 + 1100 + 100, 70 + 6 + 600}));
}

// One token, all factors 1, to first order: X_1 is stored, 2 u + v; its cotangent u + v and that of
// X_0 one more product and store; logits' part and rows' part are added, 1 + 1.
TEST(Tied, ErrorsGrowByHand) {
  constexpr double u = 0x1p-20, v = 0x1p-12;
  const Doubles one{1}, zero{0};
  const reference::TiedInputs in{{0}, 1, 1, one, {one}, {zero}};
  reference::Rounding r;
  r.accumulate = u, r.store = v;
  const double small = 10 * v * v;
  EXPECT_NEAR(reference::tied_loss(in, r).error[0], 2 * u + (2 * u + v), small);
  const double logits = 2 * u + (2 * u + v), rows = 2 * u + (2 * u + 2 * v), added = 2 * u;
  EXPECT_NEAR(reference::tied_backward_loss(in, one, r, 1).table.error[0], logits + rows + added,
              small);
  // Two parts travel in a type of roundoff v: twice the sum of both.
  r.wire = v;
  EXPECT_NEAR(reference::tied_backward_loss(in, one, r, 2).table.error[0],
              logits + rows + added + 2 * v * 2, 2 * small);
}

// ---- Layers

// Layers of each stage, as the operands' layout says.
std::vector<Rows> layers_of(const std::string& words) {
  const Case line = line_of(words);
  std::vector<Rows> layers(size_t(line.world()));
  for (const Operand& o : contract().operands(line))
    for (int rank = 0; o.name[0] == 'b' && rank < line.world(); ++rank)
      if (local_shape(o.shape, o.layout, line.mesh(), rank)[0] > 0)
        layers[size_t(rank)].push_back(std::stoll(o.name.substr(1)));
  return layers;
}

TEST(Layers, AreCutIntoRunsTheLongerFirst) {
  EXPECT_EQ(layers_of("pp=2 layers=5"), (std::vector<Rows>{{0, 1, 2}, {3, 4}}));
  EXPECT_EQ(layers_of("pp=4 layers=5"), (std::vector<Rows>{{0, 1}, {2}, {3}, {4}}));
  EXPECT_EQ(layers_of("pp=4 layers=3"), (std::vector<Rows>{{0}, {1}, {2}, {}}));
  EXPECT_EQ(layers_of("pp=4 layers=8"), (std::vector<Rows>{{0, 1}, {2, 3}, {4, 5}, {6, 7}}));
  EXPECT_EQ(layers_of("pp=2 dp=2 layers=2"), (std::vector<Rows>{{0}, {0}, {1}, {1}}));
}

// Both tables of NVIDIA/Megatron-LM 513: 8 layers, 2 stages, 4 and 2 chunks a stage.
TEST(Layers, AreDealtToStagesInChunks) {
  EXPECT_EQ(layers_of("pp=2 virtual=4 layers=8"), (std::vector<Rows>{{0, 2, 4, 6}, {1, 3, 5, 7}}));
  EXPECT_EQ(layers_of("pp=2 virtual=2 layers=8"), (std::vector<Rows>{{0, 1, 4, 5}, {2, 3, 6, 7}}));
  EXPECT_EQ(layers_of("pp=2 virtual=2 layers=5"), (std::vector<Rows>{{0, 1, 3}, {2, 4}}));
  EXPECT_EQ(layers_of("pp=2 virtual=2 layers=3"), (std::vector<Rows>{{0, 2}, {1}}));
}

// The judge's runs and the subject's are written apart.
TEST(Layers, OfJudgeAndSubjectAreTheSame) {
  for (int p : {1, 2, 3, 4})
    for (int v : {1, 2, 3})
      for (int layers = 1; layers <= 14; ++layers) {
        const auto judged = layers_of("pp=" + std::to_string(p) + " virtual=" + std::to_string(v) +
                                      " layers=" + std::to_string(layers));
        for (int own = 0; own < p; ++own) {
          const Stage s(p, own, v, layers, 4, 2);
          Rows mine;
          for (int64_t chunk = own; chunk < s.chunks(); chunk += p)
            for (int64_t l = first_layer_of(s, chunk); l < first_layer_of(s, chunk + 1); ++l)
              mine.push_back(l);
          ASSERT_EQ(mine, judged[size_t(own)]) << layers << " layers, stage " << own << " of " << p;
        }
      }
}

// ---- Ticks

// "0:0 1:0 -": microbatch and chunk at each tick.
std::string work_of(const Stage& s, bool backward = false) {
  std::string text;
  for (int64_t t = 0; t < s.ticks(); ++t) {
    const auto unit = backward ? s.backward_at(t) : s.forward_at(t);
    text += text.empty() ? "" : " ";
    text += unit ? std::to_string(unit->microbatch) + ":" + std::to_string(unit->chunk) : "-";
  }
  return text;
}

TEST(Ticks, OfOneRunOfLayersAreMicrobatchesAndStages) {
  const Stage first(2, 0, 1, 2, 5, 2), last(2, 1, 1, 2, 5, 2);
  EXPECT_EQ(first.microbatches(), 3);
  EXPECT_EQ(work_of(first), "0:0 1:0 2:0 -");
  EXPECT_EQ(work_of(last), "- 0:1 1:1 2:1");
  EXPECT_EQ(work_of(last, true), "0:1 1:1 2:1 -");
  EXPECT_EQ(work_of(first, true), "- 0:0 1:0 2:0");
  EXPECT_EQ(first.rows_of(1), 2);
  EXPECT_EQ(first.rows_of(2), 1);
}

TEST(Ticks, OfChunksTakeAGroupOfMicrobatchesAtATime) {
  // 2 stages, 2 chunks each, 3 microbatches: two of them, then the third.
  EXPECT_EQ(work_of({2, 0, 2, 4, 3, 1}), "0:0 1:0 0:2 1:2 2:0 - 2:2 -");
  EXPECT_EQ(work_of({2, 1, 2, 4, 3, 1}), "- 0:1 1:1 0:3 1:3 2:1 - 2:3");
}

TEST(Ticks, OfTheBackwardMayTakeTheLastMicrobatchFirst) {
  Stage s(2, 1, 1, 2, 5, 2);
  s.last_first = true;
  EXPECT_EQ(work_of(s, true), "2:1 1:1 0:1 -");
}

TEST(Ticks, EveryMicrobatchPassesEveryChunkOneTickAfterAnother) {
  for (int64_t p : {1, 2, 3, 4})
    for (int64_t v : {1, 2, 3})
      for (int64_t m = 1; m <= 9; ++m)
        for (const bool backward : {false, true}) {
          std::map<std::pair<int64_t, int64_t>, int64_t> tick_of;  // microbatch, chunk
          for (int64_t own = 0; own < p; ++own) {
            const Stage s(p, own, v, 1, m, 1);
            for (int64_t t = 0; t < s.ticks(); ++t)
              if (const auto u = backward ? s.backward_at(t) : s.forward_at(t)) {
                ASSERT_EQ(u->chunk % p, own);
                ASSERT_TRUE(tick_of.emplace(std::pair(u->microbatch, u->chunk), t).second);
              }
          }
          ASSERT_EQ(int64_t(tick_of.size()), m * p * v);
          for (const auto& [unit, t] : tick_of) {
            const auto before = tick_of.find({unit.first, unit.second + (backward ? 1 : -1)});
            if (before != tick_of.end()) {
              ASSERT_EQ(before->second + 1, t);
            }
          }
        }
}

// ---- Calls

std::vector<std::string> calls(const std::string& words, int rank) {
  const Case line = line_of(words);
  std::vector<std::string> list;
  for (const Traffic& t : contract().traffic(line, "", rank))
    list.push_back(std::string(t.backward ? "B " : "F ") + name(t.op) + " " + t.label + " " +
                   std::to_string(t.count) + " " + name(t.dtype) +
                   (t.op == Op::shift ? (t.hop > 0 ? " +" : " ") + std::to_string(t.hop) : ""));
  return list;
}

using Calls = std::vector<std::string>;

TEST(PipelineTraffic, EachTickButTheLastIsAShiftAndWhoHasNothingSendsNothing) {
  const std::string words = "tokens=5 hidden=3 layers=3 micro_batch_size=2 dtype=bf16 pp=2";
  EXPECT_EQ(calls(words, 0),
            (Calls{"F shift pp 6 bf16 +1", "F shift pp 6 bf16 +1", "F shift pp 3 bf16 +1",
                   "B shift pp 0 bf16 -1", "B shift pp 0 bf16 -1", "B shift pp 0 bf16 -1"}));
  EXPECT_EQ(calls(words, 1),
            (Calls{"F shift pp 0 bf16 +1", "F shift pp 0 bf16 +1", "F shift pp 0 bf16 +1",
                   "B shift pp 6 bf16 -1", "B shift pp 6 bf16 -1", "B shift pp 3 bf16 -1"}));
  EXPECT_EQ(calls(words + " backward_order=lifo", 1)[3], "B shift pp 3 bf16 -1");
  EXPECT_EQ(calls("tokens=5", 0), Calls{});
}

TEST(PipelineTraffic, TheRingClosesWhereAStageHasSeveralChunks) {
  const std::string words = "tokens=4 hidden=3 layers=4 micro_batch_size=2 pp=2 virtual=2";
  const Calls first = calls(words, 0), last = calls(words, 1);
  EXPECT_EQ(Calls(first.begin(), first.begin() + 4), Calls(4, "F shift pp 6 f64 +1"));
  EXPECT_EQ(Calls(last.begin(), last.begin() + 4),
            (Calls{"F shift pp 0 f64 +1", "F shift pp 6 f64 +1", "F shift pp 6 f64 +1",
                   "F shift pp 0 f64 +1"}));
}

TEST(PipelineTraffic, AStageReducesItsOwnParametersInOneCall) {
  const std::string words = "tokens=8 hidden=3 layers=3 micro_batch_size=4 pp=2 dp=2 wire=f32";
  EXPECT_EQ(calls(words, 0).back(), "B all_reduce dp 24 f32");  // 2 (9 + 3)
  EXPECT_EQ(calls(words, 3).back(), "B all_reduce dp 12 f32");
  EXPECT_EQ(calls("tokens=8 layers=1 pp=2 dp=2 micro_batch_size=4", 2).back(),
            "B shift pp 12 f64 -1");
}

// Bubbles of a schedule are ticks in which a stage sends nothing: 3 of 11 (p - 1 of m + p - 1).
TEST(PipelineTraffic, HasTheBubblesOfTheSchedule) {
  const Calls first = calls("tokens=8 micro_batch_size=1 pp=4 layers=4", 0);
  EXPECT_EQ(std::count(first.begin(), first.end(), "F shift pp 3 f64 +1"), 8);
  EXPECT_EQ(std::count(first.begin(), first.end(), "F shift pp 0 f64 +1"), 2);  // no call at last
}

// ---- Refusals and ranges

std::string refusal(const std::string& words) {
  const auto refused = contract().precondition(line_of(words));
  return refused ? refused->what() : "";
}

TEST(PipelineRefusals, EveryIllegalLineIsRefusedAndNoCaseIs) {
  for (const std::string& text : contract().illegal)
    EXPECT_TRUE(contract().precondition(parse(text, family()))) << text;
  for (const char* tier : {"smoke", "ci", "nightly"})
    for (const std::string& text : contract().cases(tier))
      EXPECT_FALSE(contract().precondition(parse(text, family()))) << text;
  for (const std::string& text : contract().witnesses)
    EXPECT_FALSE(contract().precondition(parse(text, family()))) << text;
}

TEST(PipelineRefusals, SayWhatIsWrong) {
  EXPECT_NE(refusal("pp=2 tp=2").find("leave tp, cp and ep at 1"), std::string::npos);
  EXPECT_NE(refusal("pp=2 dp=2 tokens=9").find("divisible by dp = 2"), std::string::npos);
  EXPECT_NE(refusal("pp=2 hidden=32768 layers=2").find("2147483648 elements"), std::string::npos);
  EXPECT_EQ(refusal("pp=2 tokens=1"), "");
}

TEST(PipelineContract, IntegersFitThePowersOfAStack) {
  // Sums of at most 8 3^(2-1) = 24 products of three integers: 24 B^3 <= 2^11, 2^8.
  const std::string words = "tokens=8 hidden=2 layers=2 dtype=";
  EXPECT_EQ(contract().integer_range(line_of(words + "f16")), 4);
  EXPECT_EQ(contract().integer_range(line_of(words + "bf16")), 2);
  EXPECT_EQ(contract().integer_range(line_of("tokens=8 hidden=3 layers=9 dtype=bf16")),
            std::nullopt);
  EXPECT_EQ(contract().integer_range(line_of("layers=64 hidden=1000")), std::nullopt);
}

TEST(PipelineContract, SumsKeptInANarrowerTypeAreOneRoundingAMicrobatchMore) {
  const std::vector<Whole> in{{{4, 1}, {1, 1, 1, 1}}, {{1, 1}, {1}}, {{1}, {0}}},
      cotangents{{{4, 1}, {1, 1, 1, 1}}};
  const auto bound = [&](const std::string& words) {
    std::vector<Gauge> gauges;
    contract().backward(line_of("tokens=4 hidden=1 layers=1 micro_batch_size=2 dtype=f32 "
                                "fill=normal " +
                                words),
                        in, cotangents, &gauges);
    return gauges[1].bound[0];
  };
  // Two microbatches, in units of 2^-24: a sum of 4 rounded twice to 8 bits more.
  EXPECT_NEAR(bound("local_grad=bf16") - bound(""), 4 * 2 * 0x1p-8 * 0x1p24, 0x1p14);
  EXPECT_EQ(contract().integer_range(line_of("tokens=8 hidden=2 layers=2 local_grad=bf16")), 2);
}

// Sums travel over dp alone.
TEST(PipelineContract, AWireThatNothingTravelsOnNarrowsNoRange) {
  const auto range = [](const std::string& words) {
    return contract().integer_range(line_of("tokens=8 hidden=2 layers=2 pp=2 " + words));
  };
  EXPECT_EQ(range("dtype=f32 wire=f16"), range("dtype=f32"));
  EXPECT_EQ(range("dtype=f32 wire=f16 dp=2"), range("dtype=f16 dp=2"));
  EXPECT_NE(range("dtype=f32"), range("dtype=f16"));
}

// All integers at the end of the range: every sum is still exact.
TEST(PipelineContract, IntegersOfTheRangeDoNotPassIt) {
  const Case line = line_of("tokens=8 hidden=2 layers=2 dtype=f16");
  const double B = double(*contract().integer_range(line));
  const auto operands = contract().operands(line);
  std::vector<Whole> in;
  for (size_t i = 0; i + 1 < operands.size(); ++i)
    in.push_back({operands[i].shape, Doubles(size_t(product(operands[i].shape)), B)});
  const Whole y{operands.back().shape, Doubles(16, B)};
  const std::vector<Whole> cotangents{y};
  double most = 0;
  for (const auto& results :
       {contract().forward(line, in, nullptr), contract().backward(line, in, cotangents, nullptr)})
    for (const Whole& w : results) most = std::max(most, w.value[0]);
  EXPECT_LE(most, 2048);
}

// ---- Kernels and twins on numbers that are known: two stages, a layer of one column each

struct Ran {
  Doubles y, x, w0, b0, w1, b1;
};

// w_l = 1, b_l = 0, microbatches {1,2} and {3,4}, their cotangents {1,1} and {10,10}.
Ran run_two_stages(const std::string& control = "") {
  const Case line = line_of("pp=2 layers=2 hidden=1 tokens=4 micro_batch_size=2");
  const auto make = [&] {
    for (const Control& c : family().controls())
      if (c.name == control) return c.make();
    return family().subject("pipeline_stages", "").make();
  };
  const auto run = on_threads::run_kernels(line, contract().operands(line), make,
                                           {{1, 2, 3, 4}, {1}, {0}, {1}, {0}}, {{1, 1, 10, 10}},
                                           [](int, Kernel&) {});
  for (const std::string& thrown : run.thrown) EXPECT_EQ(thrown, "");
  return {run.outputs[0],   run.gradients[0], run.gradients[1],
          run.gradients[2], run.gradients[3], run.gradients[4]};
}

TEST(PipelineKernel, SumsOverMicrobatches) {
  const Ran r = run_two_stages();
  EXPECT_EQ(r.y, (Doubles{1, 2, 3, 4}));
  EXPECT_EQ(r.x, (Doubles{1, 1, 10, 10}));
  EXPECT_EQ(r.w0, (Doubles{1 + 2 + 30 + 40}));
  EXPECT_EQ(r.w1, (Doubles{1 + 2 + 30 + 40}));
  EXPECT_EQ(r.b0, (Doubles{22}));
  EXPECT_EQ(r.b1, (Doubles{22}));
}

TEST(PipelineTwins, DoWhatTheirNamesSay) {
  // The second microbatch arrives where the first one was kept.
  EXPECT_EQ(run_two_stages("pipeline_arrival_buffer_reused").w1, (Doubles{3 + 4 + 30 + 40}));
  EXPECT_EQ(run_two_stages("pipeline_arrival_buffer_reused").w0, (Doubles{73}));
  EXPECT_EQ(run_two_stages("pipeline_state_of_another_microbatch").w1, (Doubles{3 + 4 + 10 + 20}));
  EXPECT_EQ(run_two_stages("pipeline_cotangent_of_another_microbatch").x, (Doubles{10, 10, 1, 1}));
  EXPECT_EQ(run_two_stages("pipeline_results_in_reverse").y, (Doubles{3, 4, 1, 2}));
  EXPECT_EQ(run_two_stages("pipeline_gradient_overwritten").w1, (Doubles{30 + 40}));
  EXPECT_EQ(run_two_stages("pipeline_last_deferred_gradient_dropped").w1, (Doubles{1 + 2}));
  EXPECT_EQ(run_two_stages("pipeline_divided_by_microbatches").w1, (Doubles{36.5}));
  EXPECT_EQ(run_two_stages("pipeline_scaled_at_each_stage").w1, (Doubles{73}));
  EXPECT_EQ(run_two_stages("pipeline_scaled_at_each_stage").w0, (Doubles{36.5}));
  EXPECT_EQ(run_two_stages("pipeline_detached_between_stages").w0, (Doubles{0}));
  EXPECT_EQ(run_two_stages("pipeline_detached_between_stages").w1, (Doubles{73}));
  EXPECT_EQ(run_two_stages("pipeline_stale_gradient_sent").w0, (Doubles{1 + 2 + 3 + 4}));
  EXPECT_EQ(run_two_stages("pipeline_input_gradient_not_returned").x, (Doubles{0, 0, 0, 0}));
}

// ---- The table at both ends

const Contract& tied() { return family().contract("pipeline_tied"); }
Case tied_line(const std::string& words) { return parse("pipeline_tied " + words, family()); }

TEST(TiedTable, LiesOnTheFirstAndTheLastStage) {
  const Case line = tied_line("pp=4 dp=2");
  const Operand w = tied().operands(line)[1];
  ASSERT_EQ(w.name, "w");
  Rows rows;
  for (int rank = 0; rank < 8; ++rank)
    rows.push_back(local_shape(w.shape, w.layout, line.mesh(), rank)[0]);
  EXPECT_EQ(rows, (Rows{11, 11, 0, 0, 0, 0, 11, 11}));
  EXPECT_EQ(text(w.layout), "dp:I pp:I(ends)");
  // Two copies on pp, two on dp: a quarter each.
  EXPECT_EQ(pairing_weight(w.layout, line.mesh()), 0.25);
  EXPECT_EQ(line.mesh().holders(w.layout, {Axis::pp}),
            (std::vector<std::vector<int>>{{0, 6}, {1, 7}}));
  EXPECT_EQ(line.mesh().holders(w.layout, {Axis::dp}),
            (std::vector<std::vector<int>>{{0, 1}, {6, 7}}));
  // One stage is both ends, and has one copy.
  EXPECT_EQ(pairing_weight(w.layout, tied_line("").mesh()), 1);
  EXPECT_EQ(pairing_weight(w.layout, tied_line("pp=2").mesh()), 0.5);
}

std::vector<std::string> sums(const std::string& words, int rank) {
  std::vector<std::string> list;
  for (const Traffic& t : tied().traffic(tied_line(words), "", rank))
    if (t.op == Op::all_reduce)
      list.push_back(t.label + " " + std::to_string(t.count) + " " + name(t.dtype));
  return list;
}

TEST(TiedTable, IsSummedOverBothEnds) {
  const std::string words = "tokens=8 hidden=3 vocab=7 layers=4 wire=f32 ";
  EXPECT_EQ(sums(words, 0), Calls{});
  EXPECT_EQ(sums(words + "pp=2", 0), (Calls{"pp 21 f32"}));
  EXPECT_EQ(sums(words + "pp=4", 0), (Calls{"pp:ends 21 f32"}));
  EXPECT_EQ(sums(words + "pp=4", 2), Calls{});
  EXPECT_EQ(sums(words + "pp=4", 3), (Calls{"pp:ends 21 f32"}));
  // With the two layers' 2 (9 + 3) over dp before.
  EXPECT_EQ(sums(words + "pp=2 dp=2", 0), (Calls{"dp 45 f32", "pp 21 f32"}));
}

// The table of two stages, a layer of one column on each that changes nothing, ids 1, 0, 1, 1.
Doubles gradient_of_table(int stages, const std::string& control = "") {
  const Case line = tied_line("layers=2 hidden=1 vocab=2 tokens=4 micro_batch_size=2 pp=" +
                              std::to_string(stages));
  const auto make = [&] {
    for (const Control& c : family().controls())
      if (c.name == control) return c.make();
    return family().subject("pipeline_tied", "").make();
  };
  const auto run = on_threads::run_kernels(line, tied().operands(line), make,
                                           {{1, 0, 1, 1}, {3, 5}, {1}, {0}, {1}, {0}},
                                           {{1, 0, 0, 10, 0, 0, 0, 0}}, [](int, Kernel&) {});
  for (const std::string& thrown : run.thrown) EXPECT_EQ(thrown, "");
  EXPECT_EQ(run.outputs[0], (Doubles{15, 25, 9, 15, 15, 25, 15, 25}));
  return run.gradients[1];
}

// Logits: 1 5 to row 0, 10 3 to row 1. Rows: the cotangent of token 0 is 1 3 and adds to row 1,
// that of token 1 is 10 5 and adds to row 0.
TEST(TiedTable, HasAGradientOfTwoParts) {
  const Doubles both{5 + 50, 30 + 3};
  for (int stages : {1, 2, 3}) EXPECT_EQ(gradient_of_table(stages), both) << stages;
  EXPECT_EQ(gradient_of_table(2, "pipeline_table_averaged"), (Doubles{55 / 2.0, 33 / 2.0}));
  EXPECT_EQ(gradient_of_table(2, "pipeline_table_summed_twice"), (Doubles{110, 66}));
  EXPECT_EQ(gradient_of_table(1, "pipeline_table_summed_twice"), (Doubles{110, 66}));
  EXPECT_EQ(gradient_of_table(3, "pipeline_table_summed_over_all_stages"), both);
  EXPECT_EQ(gradient_of_table(2, "pipeline_rows_give_no_gradient"), (Doubles{5, 30}));
  EXPECT_EQ(gradient_of_table(1, "pipeline_rows_overwrite_logits"), (Doubles{50, 3}));
}

TEST(TiedTable, IntegersFitBothEnds) {
  // T (V + 1) (h + 1)^L = 4 3 2 terms of 3 factors at most: 24 B^3 <= 2^11.
  EXPECT_EQ(
      tied().integer_range(tied_line("tokens=4 vocab=2 hidden=1 layers=1 dtype=f16 fill=integers")),
      4);
  for (const char* tier : {"smoke", "ci", "nightly"})
    for (const std::string& line : tied().cases(tier))
      EXPECT_FALSE(tied().precondition(parse(line, family()))) << line;
}

// ---- On ranks

Judged run(const std::string& words, const std::vector<std::string>& checks) {
  static Options options;
  static Runner runner(options, family());
  static std::vector<std::unique_ptr<Case>> lines;  // evidence points at its line
  lines.push_back(std::make_unique<Case>(line_of(words)));
  return runner.run(*lines.back(), checks, lane_of(*lines.back()));
}

TEST(PipelineOnRanks, AStageWithoutLayersTakesPartInEveryShift) {
  const Judged j = run("pp=4 layers=3 tokens=4 micro_batch_size=2",
                       {"forward", "gradient", "adjoint", "ledger", "lockstep", "memory"});
  ASSERT_TRUE(j.completed);
  for (const CheckResult& c : j.result.checks) EXPECT_EQ(c.verdict, Verdict::passed) << c.check;
  // 2 + 4 - 1 ticks, forward and backward.
  for (int rank = 0; rank < 4; ++rank)
    EXPECT_EQ(j.evidence.ranks[size_t(rank)].shots.at(0).ledger.size(), 8u);
}

// Cut into microbatches or not, on one stage or several: the same sums, exactly.
TEST(PipelineOnRanks, HowTheLineIsCutChangesNoNumber) {
  const auto y_of = [](const std::string& words, int last) {
    const Judged j = run(words, {"forward"});
    EXPECT_TRUE(j.completed);
    const ResultTensor* t = j.evidence.result(last, 0, 0, 11, false);
    return t ? t->bytes : std::vector<std::byte>{};
  };
  const auto whole = y_of("micro_batch_size=24", 0);
  EXPECT_EQ(whole.size(), 24 * 3 * sizeof(double));
  EXPECT_EQ(y_of("micro_batch_size=7", 0), whole);
  EXPECT_EQ(y_of("pp=3 micro_batch_size=7", 2), whole);
  EXPECT_EQ(y_of("pp=2 virtual=2 micro_batch_size=5", 1), whole);
}

// Checks that failed, of a folder that the ranks of a line answer.
std::vector<std::string> failed_in_files(const Case& line, const std::string& control) {
  const std::string folder =
      std::filesystem::temp_directory_path() / ("pipeline" + std::to_string(getpid()));
  std::filesystem::remove_all(folder);
  prepared::prepare_case(line, {}, folder, family());
  foreign::Answer how;
  how.control = control;
  foreign::answer(folder, family(), how);
  const Report report = foreign::judged(folder, family());
  std::filesystem::remove_all(folder);
  EXPECT_GE(foreign::with(report, Verdict::passed).size(), 2u);
  return foreign::with(report, Verdict::failed);
}

// A stage without layers, and one between both ends, which holds no table.
TEST(PipelineFiles, AreAnsweredByStages) {
  const Case stages = line_of("pp=4 layers=3 tokens=6 micro_batch_size=2"),
             ends = tied_line("pp=3 layers=3 tokens=5 micro_batch_size=3");
  using Checks = std::vector<std::string>;
  EXPECT_EQ(failed_in_files(stages, ""), Checks{});
  EXPECT_EQ(failed_in_files(ends, ""), Checks{});
  const Checks overwritten = failed_in_files(stages, "pipeline_gradient_overwritten"),
               apart = failed_in_files(ends, "pipeline_table_left_apart");
  EXPECT_NE(std::find(overwritten.begin(), overwritten.end(), "gradient"), overwritten.end());
  EXPECT_NE(std::find(apart.begin(), apart.end(), "replica"), apart.end());
}

}  // namespace pipeline_test
}  // namespace
}  // namespace shardproof
