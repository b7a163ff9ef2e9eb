// What the linear family states: local shapes, traffic in closed form, refusals, index maps; and
// what its kernels do on ranks where a number is known beforehand.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <set>

#include "fixtures/fills.hpp"
#include "fixtures/index_maps.hpp"
#include "fixtures/sharding.hpp"
#include "oracle/registry.hpp"
#include "oracle/run.hpp"
#include "primitives/gemm.hpp"
#include "primitives/linear.hpp"

namespace shardproof {

void family_linear(Registry&);
void family_mlp(Registry&);
void controls_linear(Registry&);
void controls_linear_ring(Registry&);
void controls_linear_chunks(Registry&);

namespace {
namespace linear_test {

using Shape = std::vector<int64_t>;
using Rows = std::vector<int64_t>;

const Registry& family() {
  static const Registry registry = [] {
    Registry r;
    family_linear(r);
    family_mlp(r);
    controls_linear(r);
    controls_linear_ring(r);
    controls_linear_chunks(r);
    return r;
  }();
  return registry;
}

Case line_of(const std::string& text) { return parse(text, family()); }
const Contract& contract_of(const Case& line) { return family().contract(line.contract); }

Shape local(const std::string& text, const std::string& operand, int rank = 0) {
  const Case line = line_of(text);
  for (const Operand& o : contract_of(line).operands(line))
    if (o.name == operand) return local_shape(o.shape, o.layout, line.mesh(), rank);
  return {};
}

std::string refusal(const std::string& text) {
  const Case line = line_of(text);
  const auto refused = contract_of(line).precondition(line);
  return refused ? refused->what() : "";
}

// ---- Shapes

TEST(LinearShapes, ColumnParallelCutsTheRowsOfTheWeight) {
  // X [s,b,h] = [6,2,5], W [4h,h]: a rank holds W [4h/t,h] and makes Y [s,b,4h/t].
  const std::string line = "linear_column tp=4 seq=6 batch=2 in=5 out=20";
  EXPECT_EQ(local(line, "x"), (Shape{6, 2, 5}));
  EXPECT_EQ(local(line, "w"), (Shape{5, 5}));
  EXPECT_EQ(local(line, "b"), (Shape{5}));
  EXPECT_EQ(local(line, "y"), (Shape{6, 2, 5}));
  EXPECT_EQ(local(line + " gather_output=on", "y"), (Shape{6, 2, 20}));
  EXPECT_EQ(local("linear_column tp=2 seq=6 batch=2 in=5 out=20 sp=on", "x"), (Shape{3, 2, 5}));
}

TEST(LinearShapes, RowParallelUnderSpHandsOutOwnPositions) {
  const std::string line = "linear_row tp=3 sp=on seq=6 batch=2 in=9 out=5";
  EXPECT_EQ(local(line, "x"), (Shape{6, 2, 3}));
  EXPECT_EQ(local(line, "w"), (Shape{5, 3}));
  EXPECT_EQ(local(line, "b"), (Shape{5}));
  EXPECT_EQ(local(line, "y"), (Shape{2, 2, 5}));
  EXPECT_EQ(local("linear_row tp=3 tokens=6 in=9 out=5 input_is_parallel=off", "x"), (Shape{6, 9}));
}

TEST(LinearShapes, TokensAreCutOverDpOutsideTp) {
  // dp outer, tp inner: rank (tp 1, dp 1) of 2x2 holds tokens 9..11 of 12.
  const Case line = line_of("linear_column tp=2 dp=2 sp=on tokens=12 in=1");
  const Operand x = contract_of(line).operands(line)[0];
  EXPECT_EQ(whole_indices(x.shape, x.layout, line.mesh(), 3), (Rows{9, 10, 11}));
}

TEST(LinearShapes, FusedQkvGivesARankItsHeadGroups) {
  // (8 + 2*2) * 3 = 36 rows; half of the heads each: 4*3 + 3 + 3.
  EXPECT_EQ(local("linear_column tp=2 heads=8 kv_heads=2 head_dim=3", "w"), (Shape{18, 7}));
  EXPECT_EQ(line_of("linear_column tp=2 heads=8 kv_heads=2 head_dim=3").at("out"), 36);
}

// ---- Index maps

TEST(IndexMaps, GateAndUpAreCutAlike) {
  // 6 gate rows, 6 up rows, 3 ranks.
  EXPECT_EQ(interleaved_map(2).owned(12, 3, 0), (Rows{0, 1, 6, 7}));
  EXPECT_EQ(interleaved_map(2).owned(12, 3, 2), (Rows{4, 5, 10, 11}));
  EXPECT_EQ(&interleaved_map(2), &interleaved_map(2));
}

TEST(IndexMaps, HeadGroupsKeepQueriesWithTheirKeys) {
  // 4 query heads in 2 groups of one row a head: rows Q0 Q1 Q2 Q3 K0 K1 V0 V1.
  EXPECT_EQ(head_group_map(4, 2, 1).owned(8, 2, 0), (Rows{0, 1, 4, 6}));
  EXPECT_EQ(head_group_map(4, 2, 1).owned(8, 2, 1), (Rows{2, 3, 5, 7}));
  EXPECT_EQ(head_group_map(2, 1, 2).owned(8, 1, 0), (Rows{0, 1, 2, 3, 4, 5, 6, 7}));
}

// The judge's maps and the subject's are written apart: they must name the same rows.
TEST(IndexMaps, AgreeWithTheRowsThatTheSubjectTakes) {
  for (int p : {1, 2, 4})
    for (int r = 0; r < p; ++r) {
      EXPECT_EQ(interleaved_map(2).owned(48, p, r), primitives::rows_of_parts({24, 24}, p, r));
      EXPECT_EQ(head_group_map(8, 4, 3).owned(48, p, r),
                primitives::rows_of_parts({24, 12, 12}, p, r));
    }
}

TEST(IndexMaps, OwnEveryRowOnce) {
  for (int p : {1, 2, 3, 4, 6}) {
    std::set<int64_t> seen;
    for (int r = 0; r < p; ++r)
      for (int64_t row : head_group_map(24, 12, 2).owned(96, p, r))
        EXPECT_TRUE(seen.insert(row).second);
    EXPECT_EQ(seen.size(), 96u);
  }
}

// ---- Refusals

TEST(LinearRefusals, SeqIsWhatIsCut) {
  // 3 * 2 = 6 tokens would divide, but position 1 would be split between the ranks.
  EXPECT_NE(refusal("linear_column tp=2 sp=on seq=3 batch=2").find("seq=3"), std::string::npos);
  EXPECT_NE(refusal("linear_row tp=2 sp=on seq=3 batch=2").find("seq=3"), std::string::npos);
  EXPECT_EQ(refusal("linear_row tp=2 sp=on tokens=6"), "");
  EXPECT_EQ(refusal("linear_column tp=2 seq=3 batch=2"), "");
}

TEST(LinearRefusals, EveryIllegalLineIsRefusedAndNoCaseIs) {
  for (const Contract& c : family().contracts()) {
    EXPECT_GE(c.illegal.size(), 7u);
    for (const std::string& text : c.illegal) EXPECT_NE(refusal(text), "") << text;
    for (const char* tier : {"smoke", "ci", "nightly"})
      for (const std::string& text : c.cases(tier)) EXPECT_EQ(refusal(text), "") << text;
    for (const std::string& text : c.witnesses) EXPECT_EQ(refusal(text), "") << text;
  }
}

TEST(LinearRefusals, ARingTurnsBlocksOfTokens) {
  for (const std::string contract : {"linear_column", "linear_row"}) {
    const std::string met = refusal(contract + " tp=2 overlap=ring");
    for (const char* part : {"sp=on with overlap=ring", "sp=off", "leave overlap out"})
      EXPECT_NE(met.find(part), std::string::npos) << met;
    EXPECT_NE(refusal(contract + " overlap=ring"), "") << "on one rank as on several";
    EXPECT_EQ(refusal(contract + " sp=on overlap=ring"), "");
    EXPECT_EQ(refusal(contract + " tp=2 overlap=off"), "");
  }
  EXPECT_NE(refusal("linear_column tp=2 sp=on overlap=ring gather_output=on"), "");
  EXPECT_NE(refusal("linear_row tp=2 sp=on overlap=ring input_is_parallel=off"), "");
  EXPECT_THROW(line_of("mlp tp=2 sp=on overlap=ring"), BadInput);
}

TEST(LinearRefusals, ChunksAreAsManyAsRowsAtMost) {
  for (const std::string contract : {"linear_column", "linear_row"}) {
    EXPECT_EQ(refusal(contract + " tp=4 overlap=chunks chunks=24"), "");
    EXPECT_NE(refusal(contract + " tp=4 overlap=chunks chunks=25"), "");
    EXPECT_EQ(refusal(contract + " tp=4 sp=on overlap=chunks chunks=6"), "");
    const std::string met = refusal(contract + " tp=4 sp=on overlap=chunks chunks=7");
    for (const char* part : {"rows in a call over tokens, 6", "met chunks=7", "fewer chunks"})
      EXPECT_NE(met.find(part), std::string::npos) << met;
    // What is cut is seq, whose positions have 2 tokens each.
    EXPECT_EQ(refusal(contract + " tp=2 dp=2 seq=8 batch=2 sp=on overlap=chunks"), "");
    EXPECT_NE(refusal(contract + " tp=2 dp=2 seq=8 batch=2 sp=on overlap=chunks chunks=3"), "");
    for (const char* words : {" chunks=2", " sp=on overlap=ring chunks=2"})
      EXPECT_NE(refusal(contract + words).find("write overlap=chunks"), std::string::npos);
    EXPECT_NE(refusal(contract + " overlap=chunks chunks=1").find("at least 2"), std::string::npos);
  }
  EXPECT_EQ(line_of("linear_row overlap=chunks").at("chunks"), 2);
  EXPECT_EQ(line_of("linear_row").at("chunks"), 1);
}

TEST(LinearRefusals, AFullNormBetweenTheLinearsNeedsItsStatisticsReduced) {
  for (const char* between : {"norm", "softmax", "topk"})
    EXPECT_NE(refusal(std::string("mlp tp=2 between=") + between).find("norm_reduced"),
              std::string::npos);
  EXPECT_EQ(refusal("mlp tp=2 between=norm_reduced"), "");
}

TEST(LinearRefusals, CountsBeyondTheIntOfMpi) {
  EXPECT_EQ(refusal("linear_column tokens=32768 in=65535"), "");
  EXPECT_NE(refusal("linear_column tokens=32768 in=65536"), "");
}

// ---- Traffic

int64_t payload(const Traffic& t, int p) {
  return t.count * int64_t(size_of(t.dtype)) * (t.op == Op::all_gather ? p : 1);
}

// Bytes that each rank sends in a ring, both ways.
int64_t ring_bytes(const std::string& text) {
  const Case line = line_of(text);
  const int p = line.ranks(Axis::tp);
  int64_t total = 0;
  for (const Traffic& t : contract_of(line).traffic(line, "", 0))
    total += ring_bytes_total(t.op, payload(t, p), p) / p;
  return total;
}

constexpr int64_t mib = 1 << 20;

TEST(LinearTraffic, RowParallelOfSixtyFourMebibytes) {
  for (const auto& [p, bytes] : {std::pair{2, 64 * mib}, {4, 96 * mib}, {8, 112 * mib}}) {
    const std::string text =
        "linear_row dtype=bf16 seq=4096 batch=1 in=8192 out=8192 tp=" + std::to_string(p);
    const Case line = line_of(text);
    const auto due = contract_of(line).traffic(line, "", 0);
    ASSERT_EQ(due.size(), 1u);  // forward only
    EXPECT_EQ(due[0].op, Op::all_reduce);
    EXPECT_EQ(due[0].backward, false);
    EXPECT_EQ(payload(due[0], p), 64 * mib);
    EXPECT_EQ(ring_bytes(text), bytes);  // 2 (p-1)/p of the payload
  }
}

TEST(LinearTraffic, MlpForwardAndBackwardOnEightRanks) {
  const std::string text = "mlp tp=8 dtype=bf16 seq=4096 batch=1 hidden=8192 ffn=28672 bias=off";
  EXPECT_EQ(ring_bytes(text), 224 * mib);             // 2 all-reduces
  EXPECT_EQ(ring_bytes(text + " sp=on"), 280 * mib);  // AG + RS, AG + RS, AG of X again
}

using Calls = std::vector<std::string>;

Calls calls_of(const std::string& text) {
  const Case line = line_of(text);
  Calls list;
  for (const Traffic& t : contract_of(line).traffic(line, "", 0))
    list.push_back(std::string(t.backward ? "B " : "F ") + name(t.op) + " " +
                   std::to_string(t.count));
  return list;
}

// A ring's own blocks: what its collective sends, it sends.
TEST(LinearTraffic, ARingSendsTheBytesOfTheCallsThatItTakesApart) {
  for (const std::string line : {"linear_column dtype=bf16 seq=4096 batch=1 in=8192 out=28672 tp=8",
                                 "linear_row dtype=bf16 seq=4096 batch=1 in=8192 out=28672 tp=4"})
    EXPECT_EQ(ring_bytes(line + " sp=on overlap=ring"), ring_bytes(line + " sp=on"));
  for (const std::string line : {"linear_column tp=8 tokens=112 sp=on", "linear_row tp=4 seq=36"})
    EXPECT_EQ(ring_bytes(line + " overlap=chunks chunks=5"), ring_bytes(line));
  // Sums in f32, blocks in bf16: T/p in = 3 * 5.
  const Case line =
      line_of("linear_column tp=2 tokens=6 in=5 sp=on overlap=ring dtype=bf16 wire=f32");
  const auto due = contract_of(line).traffic(line, "", 0);
  ASSERT_EQ(due.size(), 3u);
  EXPECT_EQ(due[1].dtype, DType::bf16);
  EXPECT_EQ(due[2].dtype, DType::f32);
  for (const Traffic& t : due) EXPECT_EQ(t.hop, 1);
}

TEST(LinearTraffic, ExplicitCallsInTheirOrder) {
  const auto calls = calls_of;
  EXPECT_EQ(calls("linear_column tp=4 tokens=12 in=5 out=8"), (Calls{"B all_reduce 60"}));
  EXPECT_EQ(calls("linear_column tp=4 tokens=12 in=5 out=8 sp=on"),
            (Calls{"F all_gather 15", "B all_gather 15", "B reduce_scatter 60"}));
  EXPECT_EQ(calls("linear_column tp=4 tokens=12 in=5 out=8 sp=on frozen=on"),
            (Calls{"F all_gather 15", "B reduce_scatter 60"}));
  EXPECT_EQ(calls("linear_column tp=4 tokens=12 in=5 out=8 gather_output=on"),
            (Calls{"F all_gather 24", "B all_reduce 60"}));
  EXPECT_EQ(calls("linear_row tp=4 tokens=12 in=8 out=5 sp=on"),
            (Calls{"F reduce_scatter 60", "B all_gather 15", "B all_reduce 5"}));
  EXPECT_EQ(calls("linear_row tp=4 tokens=12 in=8 out=5 input_is_parallel=off"),
            (Calls{"F all_reduce 60", "B all_gather 24"}));
  EXPECT_EQ(calls("linear_row tp=4 dp=2 tokens=24 in=8 out=5"), (Calls{"F all_reduce 60"}));
  EXPECT_EQ(calls("linear_row"), Calls{});
  const std::string ring = " tp=3 tokens=12 in=6 out=9 sp=on overlap=ring";  // T/p = 4
  EXPECT_EQ(calls("linear_column" + ring), (Calls{"F shift 24", "F shift 24", "B shift 24",
                                                  "B shift 24", "B shift 24", "B shift 24"}));
  EXPECT_EQ(calls("linear_column" + ring + " frozen=on"),
            (Calls{"F shift 24", "F shift 24", "B shift 24", "B shift 24"}));
  EXPECT_EQ(calls("linear_row" + ring),
            (Calls{"F shift 36", "F shift 36", "B shift 36", "B shift 36", "B all_reduce 9"}));
  EXPECT_EQ(calls("linear_row sp=on overlap=ring"), Calls{});
  const std::string chunks = " tp=3 tokens=12 in=6 out=9 overlap=chunks";  // T = 12, T/p = 2 + 2
  EXPECT_EQ(calls("linear_column" + chunks), (Calls{"B all_reduce 36", "B all_reduce 36"}));
  EXPECT_EQ(calls("linear_column" + chunks + " sp=on"),
            (Calls{"F all_gather 12", "F all_gather 12", "B all_gather 12", "B all_gather 12",
                   "B reduce_scatter 36", "B reduce_scatter 36"}));
  EXPECT_EQ(calls("linear_row" + chunks + " chunks=5"),  // 3, 3, 2, 2, 2 rows
            (Calls{"F all_reduce 27", "F all_reduce 27", "F all_reduce 18", "F all_reduce 18",
                   "F all_reduce 18"}));
  EXPECT_EQ(calls("linear_row" + chunks + " sp=on chunks=3"),  // 2, 1, 1 of each of 3 ranks
            (Calls{"F reduce_scatter 54", "F reduce_scatter 27", "F reduce_scatter 27",
                   "B all_gather 18", "B all_gather 9", "B all_gather 9", "B all_reduce 9"}));
  EXPECT_EQ(calls("linear_row tp=2 seq=6 batch=2 in=4 out=5 overlap=chunks chunks=4"),
            (Calls{"F all_reduce 20", "F all_reduce 20", "F all_reduce 10", "F all_reduce 10"}));
  EXPECT_EQ(calls("linear_row overlap=chunks"), Calls{});
}

// ---- The reference under the contract

TEST(LinearContract, HandsTheBiasBackAndSumsItsPartialCotangents) {
  const Case line = line_of("linear_row tp=2 sp=on tokens=2 in=2 out=2 skip_bias_add=on");
  const Contract& c = contract_of(line);
  const std::vector<Whole> in{{{2, 2}, {1, 2, 3, 4}}, {{2, 2}, {1, 0, 0, 1}}, {{2}, {50, 60}}};
  const auto out = c.forward(line, in, nullptr);
  EXPECT_EQ(out[0].value, (std::vector<double>{1, 2, 3, 4}));  // W = 1, no bias
  EXPECT_EQ(out[1].value, (std::vector<double>{50, 60}));
  // b_out is R over tp: its cotangent is partial, one a rank.
  const std::vector<Whole> cotangents{{{2, 2}, {1, 1, 1, 1}}, {{2, 2}, {1, 2, 10, 20}}};
  EXPECT_EQ(c.backward(line, in, cotangents, nullptr)[2].value, (std::vector<double>{11, 22}));
}

TEST(LinearContract, GaugesAreSumsOfTheTerms) {
  const Case line = line_of("linear_row tp=2 tokens=1 in=2 out=1 dtype=f32 fill=normal");
  const std::vector<Whole> in{{{1, 2}, {3, -4}}, {{1, 2}, {5, 6}}, {{1}, {-7}}};
  std::vector<Gauge> gauges;
  EXPECT_EQ(contract_of(line).forward(line, in, &gauges)[0].value, (std::vector<double>{-16}));
  EXPECT_EQ(gauges[0].magnitude, (std::vector<double>{15 + 24 + 7}));
  EXPECT_EQ(gauges[0].squares, (std::vector<double>{225 + 576 + 49}));
  EXPECT_EQ(gauges[0].terms, 2);  // one product on the rank, and b
  EXPECT_EQ(gauges[0].reduced, 2);
}

TEST(LinearContract, IntegerRangesKeepHalfTypesExact) {
  // 48 products and a bias of B^2 each within 2^8 (bf16), 2^11 (f16): B = 2, 6.
  EXPECT_EQ(contract_of(line_of("linear_row")).integer_range(line_of("linear_row dtype=bf16")), 2);
  EXPECT_EQ(contract_of(line_of("linear_row")).integer_range(line_of("linear_row dtype=f16")), 6);
  const Case narrow = line_of("linear_row dtype=f64 wire=bf16");
  EXPECT_EQ(contract_of(narrow).integer_range(narrow), 2);
  const Case none = line_of("linear_row dtype=bf16 in=256");
  EXPECT_EQ(contract_of(none).integer_range(none), std::nullopt);
  // Three factors and 73 terms: 73 * 61^3 <= 2^24 < 73 * 62^3 in f32, and 73 * 1 <= 2^8 < 73 * 8.
  const std::string products = "mlp activation=identity hidden=2 ffn=24 dtype=f32";
  const Case whole = line_of(products);
  EXPECT_EQ(contract_of(whole).integer_range(whole), 61);
  for (const char* key : {" wire=bf16", " grad=bf16", " acc=bf16"}) {
    const Case kept = line_of(products + key);
    EXPECT_EQ(contract_of(kept).integer_range(kept), 1) << key;
  }
}

// ---- On ranks

Judged run(const std::string& text, const std::vector<std::string>& checks = {"forward"}) {
  static Options options;
  static Runner runner(options, family());
  static std::vector<std::unique_ptr<Case>> lines;  // evidence points at its line
  lines.push_back(std::make_unique<Case>(line_of(text)));
  return runner.run(*lines.back(), checks, lane_of(*lines.back()));
}

// Sums longer than 1/u: any value would do, which is neither a failure nor a proof.
TEST(Judge, SaysNothingWhereNoErrorIsTooLarge) {
  for (const auto& [text, check] :
       {std::pair{"linear_row tp=2 in=1024 dtype=bf16 acc=bf16 fill=normal", "adjoint"},
        {"linear_row tp=2 in=1024 dtype=bf16 acc=bf16 fill=normal", "forward"},
        {"linear_row tp=2 tokens=512 in=4 dtype=bf16 acc=bf16 fill=normal", "gradient"},
        {"linear_row tp=2 tokens=512 in=4 dtype=bf16 acc=bf16 fill=normal microbatches=2",
         "accumulate"}}) {
    const CheckResult c = run(text, {check}).result.checks.at(0);
    EXPECT_EQ(c.verdict, Verdict::vacuous) << text << " " << check;
    EXPECT_NE(c.note.find("no error is too large here"), std::string::npos) << c.note;
    EXPECT_NE(c.note.find("; a wider dtype= or acc="), std::string::npos) << c.note;
  }
}

int64_t calls(const Judged& j, Phase phase) {
  int64_t n = 0;
  for (const RankRecord& rank : j.evidence.ranks)
    for (const LedgerEntry& e : rank.shots.at(0).ledger) n += e.phase == phase;
  return n;
}

std::vector<double> result(const Judged& j, int rank, int step, int operand, bool gradient) {
  const ResultTensor* t = j.evidence.result(rank, 0, step, operand, gradient);
  std::vector<double> values;
  if (!t) return values;
  for (size_t i = 0; i < t->bytes.size(); i += size_of(t->dtype))
    values.push_back(load(t->bytes.data() + i, t->dtype));
  return values;
}

TEST(LinearOnRanks, WholeInputsNeedNoCall) {
  const Judged column = run("linear_column tp=4"), row = run("linear_row tp=4");
  ASSERT_TRUE(column.completed && row.completed);
  EXPECT_EQ(calls(column, Phase::forward), 0);
  EXPECT_EQ(calls(column, Phase::backward), 4);  // one all-reduce of dX
  EXPECT_EQ(calls(row, Phase::forward), 4);      // one all-reduce of Y
  EXPECT_EQ(calls(row, Phase::backward), 0);
}

TEST(LinearOnRanks, RowUnderSpReduceScatters) {
  const Judged j = run("linear_row tp=2 sp=on seq=4 batch=3");
  ASSERT_TRUE(j.completed);
  const auto& ledger = j.evidence.ranks[1].shots.at(0).ledger;
  ASSERT_FALSE(ledger.empty());
  EXPECT_EQ(ledger[0].op, Op::reduce_scatter);
  EXPECT_EQ(j.evidence.result(1, 0, 0, 3, false)->shape, (Shape{2, 3, 7}));
}

// On two ranks the one before and the one behind are one: whoever mixes them up is right there.
TEST(LinearOnRanks, TheOtherSideOfARingIsSeenFromThreeRanksOn) {
  for (const std::string contract : {"linear_column", "linear_row"})
    for (const auto& [tp, verdict] : {std::pair{"2", Verdict::passed}, {"3", Verdict::failed}}) {
      const Judged j =
          run(contract + " tp=" + tp + " sp=on overlap=ring control=ring_owner_on_other_side",
              {"forward", "gradient", "adjoint"});
      ASSERT_TRUE(j.completed);
      EXPECT_EQ(j.result.checks[0].verdict, verdict) << contract << " tp=" << tp;
      EXPECT_EQ(j.result.checks[1].verdict, verdict) << contract << " tp=" << tp;
      EXPECT_EQ(j.result.checks[2].verdict, Verdict::passed) << "both passes are wrong alike";
    }
}

// Exact on integers: to the bit what whole calls give, in every type.
void expect_what_whole_calls_give(const std::string& way, const std::string& line) {
  const std::vector<std::string> checks{"forward", "gradient", "adjoint", "ledger"};
  const Judged calls = run(line, checks), apart = run(line + " overlap=" + way, checks);
  ASSERT_TRUE(calls.completed && apart.completed);
  for (const CheckResult& c : apart.result.checks) EXPECT_EQ(c.verdict, Verdict::passed) << line;
  for (int rank = 0; rank < 3; ++rank) {
    ASSERT_FALSE(result(apart, rank, 0, 3, false).empty());
    ASSERT_FALSE(result(apart, rank, 1, 1, true).empty());
    EXPECT_EQ(result(apart, rank, 0, 3, false), result(calls, rank, 0, 3, false)) << line;
    for (int input : {0, 1, 2})
      EXPECT_EQ(result(apart, rank, 1, input, true), result(calls, rank, 1, input, true))
          << line << " gradient of input " << input;
  }
}

TEST(LinearOnRanks, CallsThatAreTakenApartGiveWhatWholeOnesGive) {
  for (const std::string dtype : {"f64", "f32", "bf16", "f16"})
    for (const std::string contract : {"linear_column", "linear_row"}) {
      const std::string line = contract + " tp=3 dtype=" + dtype;
      expect_what_whole_calls_give("ring", line + " sp=on");
      expect_what_whole_calls_give("chunks chunks=3", line + " sp=on");  // 8 rows: 3, 3, 2
      expect_what_whole_calls_give("chunks chunks=5", line);
    }
}

// 12 rows on 2 ranks in 2 chunks: rank 0 has rows 0 to 5, its second chunk is 3 to 5. Cut before
// the owners, the second chunk is 6 to 11, and rank 0's part of it 6 to 8, which are rank 1's
// first.
TEST(LinearOnRanks, RowsOfChunksThatAreCutBeforeTheOwners) {
  const Judged j =
      run("linear_row tp=2 tokens=12 sp=on overlap=chunks control=chunks_cut_before_owners",
          {"forward", "gradient", "adjoint"});
  ASSERT_TRUE(j.completed);
  const CheckResult& forward = j.result.checks[0];
  EXPECT_EQ(forward.verdict, Verdict::failed);
  ASSERT_FALSE(forward.findings.empty());
  EXPECT_EQ(forward.findings[0].wrong, 6 * 7) << "rows 3 to 5 and 6 to 8 of 7 features";
  EXPECT_EQ(forward.findings[0].compared, 12 * 7);
  EXPECT_EQ(forward.findings[0].ranks, (std::vector<int>{0, 1}));
  EXPECT_EQ(j.result.checks[2].verdict, Verdict::passed) << "both passes are wrong alike";
}

// The sum over 4 ranks holds b four times: y is off by exactly 3 b, in every token.
TEST(LinearOnRanks, BiasBeforeTheSumCountsPMinusOneTimesTooOften) {
  const Judged right = run("linear_row tp=4"),
               wrong = run("linear_row tp=4 control=bias_before_reduce");
  ASSERT_TRUE(right.completed && wrong.completed);
  EXPECT_EQ(right.result.checks[0].verdict, Verdict::passed);
  EXPECT_EQ(wrong.result.checks[0].verdict, Verdict::failed);
  const Feed& feed = right.evidence.shots[0].feeds[0];
  const Shape shape{7};
  const auto b = draw_whole({feed.fill, feed.seed, feed.range, -1}, "b", DType::f64, shape);
  const auto y = result(right, 2, 0, 3, false), with = result(wrong, 2, 0, 3, false);
  ASSERT_EQ(y.size(), 24u * 7u);
  for (size_t i = 0; i < y.size(); ++i) EXPECT_EQ(with[i] - y[i], 3 * b[i % 7]);
}

TEST(LinearOnRanks, BiasGradientOfAllTokensSummedAgainIsPTimesIt) {
  const Judged right = run("linear_row tp=4 sp=on"),
               wrong = run("linear_row tp=4 sp=on control=row_bias_gradient_times_p");
  const auto db = result(right, 0, 1, 2, true), got = result(wrong, 0, 1, 2, true);
  ASSERT_EQ(db.size(), 7u);
  for (size_t i = 0; i < db.size(); ++i) EXPECT_EQ(got[i], 4 * db[i]);
}

// Storage in bf16, products and partial sums in f32: with f32 on the wire and results that bf16
// cannot hold, the only rounding left is the last one.
TEST(LinearOnRanks, HalfStorageAccumulatesInFloat) {
  const Judged j = run("linear_row tp=4 dtype=bf16 wire=f32 fill=normal in=240");
  ASSERT_TRUE(j.completed);
  EXPECT_EQ(j.result.checks[0].verdict, Verdict::passed);
  // One rounding to 8 bits: at most half an ulp, up to what f32 loses of 240 terms.
  EXPECT_LE(j.result.checks[0].ratio, 1.0);
  EXPECT_GE(j.result.checks[0].ratio, 0.5);
}

// ---- Host products

struct Held {
  Buffer buffer;
  Held(DType d, Shape shape, const std::vector<double>& v, Strides s = Strides::contiguous)
      : buffer(d, std::move(shape), s) {
    fill_from(buffer.view(), v);
  }
  const View& view() const { return buffer.view(); }
};

TEST(HostGemm, EveryStorageAndStrideGivesTheSameIntegers) {
  // A [2,3], B [3,2]: A B = [22 28; 49 64].
  for (DType d : {DType::f64, DType::f32, DType::bf16, DType::f16})
    for (Strides s : {Strides::contiguous, Strides::transposed})
      for (DType acc : {DType::f32, DType::f64}) {
        const Held a(d, {2, 3}, {1, 2, 3, 4, 5, 6}, s), at(d, {3, 2}, {1, 4, 2, 5, 3, 6}, s),
            b(d, {3, 2}, {1, 2, 3, 4, 5, 6}, s), bt(d, {2, 3}, {1, 3, 5, 2, 4, 6}, s),
            bias(d, {2}, {100, -1}, s);
        const Buffer c(d, {2, 2}, s);
        const std::vector<double> want{22, 28, 49, 64};
        using primitives::plain, primitives::turned;
        primitives::gemm(plain(a.view()), plain(b.view()), c.view(), acc);
        EXPECT_EQ(to_doubles(c.view()), want);
        primitives::gemm(turned(at.view()), plain(b.view()), c.view(), acc);
        EXPECT_EQ(to_doubles(c.view()), want);
        primitives::gemm(plain(a.view()), turned(bt.view()), c.view(), acc, &bias.view());
        EXPECT_EQ(to_doubles(c.view()), (std::vector<double>{122, 27, 149, 63}));
        primitives::gemm(turned(at.view()), turned(bt.view()), c.view(), acc, nullptr, true);
        EXPECT_EQ(to_doubles(c.view()), (std::vector<double>{144, 55, 198, 127}));
        EXPECT_EQ(c.trespass(), std::nullopt);
      }
}

// bf16 next to 1 has the spacing 2^-7. Each 2^-9 by itself is lost in a bf16 sum; the f32 sum
// 1 + 3 2^-9 lies above the middle and rounds up.
TEST(HostGemm, RoundsOnce) {
  const Held a(DType::bf16, {1, 4}, {1, 0x1p-9, 0x1p-9, 0x1p-9}),
      ones(DType::bf16, {4, 1}, {1, 1, 1, 1});
  const Buffer c(DType::bf16, {1, 1});
  primitives::gemm(primitives::plain(a.view()), primitives::plain(ones.view()), c.view(),
                   DType::f32);
  EXPECT_EQ(to_doubles(c.view()), (std::vector<double>{1 + 0x1p-7}));
}

TEST(HostGemm, ShapesThatDoNotMeetAreRefused) {
  const Held a(DType::f64, {2, 3}, std::vector<double>(6)),
      b(DType::f64, {2, 3}, std::vector<double>(6));
  const Buffer c(DType::f64, {2, 3});
  EXPECT_THROW(primitives::gemm(primitives::plain(a.view()), primitives::plain(b.view()), c.view(),
                                DType::f64),
               std::invalid_argument);
}

}  // namespace linear_test
}  // namespace
}  // namespace shardproof
