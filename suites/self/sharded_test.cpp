// What the sharded family states: blocks of rows, flat shards and calls that can be followed by
// hand, bounds, refusals; and what its kernels do on ranks where a number is known beforehand.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>

#include "fixtures/index_maps.hpp"
#include "fixtures/sharding.hpp"
#include "oracle/prepared/prepare.hpp"
#include "oracle/registry.hpp"
#include "oracle/run.hpp"
#include "primitives/sharded.hpp"
#include "suites/self/foreign.hpp"

namespace shardproof {

void family_sharded(Registry&);
void controls_sharded(Registry&);

namespace {
namespace sharded_test {

using Rows = std::vector<int64_t>;
using Doubles = std::vector<double>;
using primitives::FlatShards;

const Registry& family() {
  static const Registry registry = [] {
    Registry r;
    family_sharded(r);
    controls_sharded(r);
    return r;
  }();
  return registry;
}

const Contract& contract() { return family().contract("sharded_linear"); }
Case line_of(const std::string& words) { return parse("sharded_linear " + words, family()); }

// Rows of an operand that each rank owns.
std::vector<Rows> rows_of(const std::string& words, const std::string& operand) {
  const Case line = line_of(words);
  std::vector<Rows> rows;
  for (const Operand& o : contract().operands(line))
    for (int rank = 0; o.name == operand && rank < line.world(); ++rank)
      rows.push_back(whole_indices(o.shape, o.layout, line.mesh(), rank));
  return rows;
}

std::string refusal(const std::string& words) {
  const auto refused = contract().precondition(line_of(words));
  return refused ? refused->what() : "";
}

// ---- Blocks of rows

TEST(Blocks, AreThoseOfTorchChunk) {
  // ceil(7/4) = 2 and ceil(5/4) = 2 rows a rank, as far as they go.
  EXPECT_EQ(rows_of("dp=4 out=7", "b"), (std::vector<Rows>{{0, 1}, {2, 3}, {4, 5}, {6}}));
  EXPECT_EQ(rows_of("dp=4 out=5", "b"), (std::vector<Rows>{{0, 1}, {2, 3}, {4}, {}}));
  EXPECT_EQ(rows_of("dp=4 out=1", "b"), (std::vector<Rows>{{0}, {}, {}, {}}));
  EXPECT_EQ(rows_of("dp=4 out=8", "b"), (std::vector<Rows>{{0, 1}, {2, 3}, {4, 5}, {6, 7}}));
  EXPECT_EQ(rows_of("dp=2 out=3 in=2", "w"), (std::vector<Rows>{{0, 1, 2, 3}, {4, 5}}));
}

TEST(Blocks, RunOverCpFasterThanOverDp) {
  // Blocks in the order (dp 0, cp 0), (dp 0, cp 1), (dp 1, cp 0), (dp 1, cp 1), whoever of the two
  // has neighbouring ranks.
  EXPECT_EQ(rows_of("dp=2 cp=2 out=5", "b"), (std::vector<Rows>{{0, 1}, {2, 3}, {4}, {}}));
  EXPECT_EQ(rows_of("dp=2 cp=2 out=5 order=dp,cp", "b"),
            (std::vector<Rows>{{0, 1}, {4}, {2, 3}, {}}));
}

TEST(Blocks, OfCopiesAreEqual) {
  // ceil(5/2) = 3 rows a rank of cp, the same for both ranks of dp.
  EXPECT_EQ(rows_of("dp=2 cp=2 shard=cp out=5", "b"),
            (std::vector<Rows>{{0, 1, 2}, {3, 4}, {0, 1, 2}, {3, 4}}));
  EXPECT_EQ(rows_of("dp=2 shard=cp out=3", "b"), (std::vector<Rows>{{0, 1, 2}, {0, 1, 2}}));
}

// Ranks in the order (tp 0, dp 0), (tp 1, dp 0), (tp 0, dp 1), (tp 1, dp 1).
TEST(Blocks, AreCutByTpFirst) {
  // 10 rows: 0-4 and 5-9, of which dp=2 takes 3 and 2. Over dp first they were 0-4 and 5-9 again.
  EXPECT_EQ(rows_of("tp=2 dp=2 parallel=column out=10", "b"),
            (std::vector<Rows>{{0, 1, 2}, {5, 6, 7}, {3, 4}, {8, 9}}));
  // 3 rows over dp=4 are 1, 1, 1 and none, in either block.
  EXPECT_EQ(rows_of("tp=2 dp=4 parallel=column out=6", "b"),
            (std::vector<Rows>{{0}, {3}, {1}, {4}, {2}, {5}, {}, {}}));
  // Columns over tp, rows over dp: W [3, 4], and b on each rank of tp.
  EXPECT_EQ(rows_of("tp=2 dp=2 parallel=row out=3 in=4", "w"),
            (std::vector<Rows>{{0, 1, 4, 5}, {2, 3, 6, 7}, {8, 9}, {10, 11}}));
  EXPECT_EQ(rows_of("tp=2 dp=2 parallel=row out=3 in=4", "b"),
            (std::vector<Rows>{{0, 1}, {0, 1}, {2}, {2}}));
  EXPECT_EQ(rows_of("tp=2 dp=2 shard=cp parallel=column out=4", "b"),
            (std::vector<Rows>{{0, 1}, {2, 3}, {0, 1}, {2, 3}}));
}

TEST(Blocks, OfParametersThatAreHandedWholeAreAll) {
  const Rows all{0, 1, 2, 3};
  for (const char* words : {"tp=2 dp=2 parallel=column out=4", "dp=2 cp=2 shard=cp out=4"})
    EXPECT_EQ(rows_of(std::string(words) + " whole_weight=on", "b"),
              (std::vector<Rows>{all, all, all, all}));
}

// The judge's blocks and the subject's are written apart: they must name the same rows.
TEST(Blocks, OfJudgeAndSubjectAreTheSame) {
  for (int64_t rows = 1; rows <= 20; ++rows)
    for (int p = 1; p <= 8; ++p)
      for (int r = 0; r < p; ++r) {
        const FlatShards s(rows, p, r, {1});
        const Rows own = chunk_map((rows + p - 1) / p).owned(rows, p, r);
        ASSERT_EQ(int64_t(own.size()), s.count(r)) << rows << " rows, rank " << r << " of " << p;
        for (size_t i = 0; i < own.size(); ++i) ASSERT_EQ(own[i], s.first[size_t(r)] + int64_t(i));
      }
}

// ---- Flat shards

TEST(FlatShards, HoldParametersOneAfterAnotherEachWithItsPadding) {
  // 7 rows over 4 ranks, W of 3 columns: 2 rows of W are 6 elements, then 2 of b.
  const FlatShards s(7, 4, 3, {3, 1});
  EXPECT_EQ(s.first, (Rows{0, 2, 4, 6, 7}));
  EXPECT_EQ(s.places, (Rows{0, 6}));
  EXPECT_EQ(s.elements, 8);
  EXPECT_EQ(s.count(0), 2);
  EXPECT_EQ(s.count(3), 1);
}

View held(const Buffer& b, const Doubles& values) {
  fill_from(b.view(), values);
  return b.view();
}

TEST(FlatShards, ArePackedAndUnpackedByHand) {
  const Buffer w(DType::f64, {3, 2}), b(DType::f64, {3}), flat(DType::f64, {6}),
      w_again(DType::f64, {3, 2}), b_again(DType::f64, {3});
  const primitives::Views rows{held(w, {1, 2, 3, 4, 5, 6}), held(b, {7, 8, 9})};
  const FlatShards s(3, 2, 1, {2, 1});
  // Rank 0 owns rows 0 and 1, rank 1 row 2 and two places of padding.
  primitives::to_flat(s, rows, 0, 2, held(flat, {0, 0, 0, 0, 0, 0}));
  EXPECT_EQ(to_doubles(flat.view()), (Doubles{1, 2, 3, 4, 7, 8}));
  primitives::to_flat(s, rows, 2, 1, held(flat, {0, 0, 0, 0, 0, 0}));
  EXPECT_EQ(to_doubles(flat.view()), (Doubles{5, 6, 0, 0, 9, 0}));

  const primitives::Views again{held(w_again, Doubles(6, -1)), held(b_again, Doubles(3, -1))};
  primitives::from_flat(s, flat.view(), again, 2, 1);
  EXPECT_EQ(to_doubles(w_again.view()), (Doubles{-1, -1, -1, -1, 5, 6}));
  EXPECT_EQ(to_doubles(b_again.view()), (Doubles{-1, -1, 9}));
}

// ---- Calls

std::vector<std::string> calls(const std::string& words) {
  const Case line = line_of(words);
  std::vector<std::string> list;
  for (const Traffic& t : contract().traffic(line, "", 0))
    list.push_back(std::string(t.backward ? "B " : "F ") + name(t.op) + " " + t.label + " " +
                   std::to_string(t.count) + " " + name(t.dtype));
  return list;
}

TEST(ShardedTraffic, OneCallMovesAllParameters) {
  using Calls = std::vector<std::string>;
  const std::string words = "tokens=8 in=3 out=7 dtype=bf16 wire=f32 dp=4";  // 2 (3 + 1) a rank
  EXPECT_EQ(calls(words), (Calls{"F all_gather dp 8 bf16", "B all_gather dp 8 bf16",
                                 "B reduce_scatter dp 32 f32"}));
  EXPECT_EQ(calls(words + " reshard=off"),
            (Calls{"F all_gather dp 8 bf16", "B reduce_scatter dp 32 f32"}));
  EXPECT_EQ(calls(words + " frozen=on"),
            (Calls{"F all_gather dp 8 bf16", "B all_gather dp 8 bf16"}));
  EXPECT_EQ(calls(words + " bias=off"), (Calls{"F all_gather dp 6 bf16", "B all_gather dp 6 bf16",
                                               "B reduce_scatter dp 24 f32"}));
  EXPECT_EQ(calls("tokens=8 in=3 out=7 dp=2 cp=2"),
            (Calls{"F all_gather cp,dp 8 f64", "B all_gather cp,dp 8 f64",
                   "B reduce_scatter cp,dp 32 f64"}));
  // 4 rows a rank of cp, and the sum over the copies of what a rank has.
  EXPECT_EQ(calls("tokens=8 in=3 out=7 dp=2 cp=2 shard=cp wire=f32"),
            (Calls{"F all_gather cp 16 f64", "B all_gather cp 16 f64", "B reduce_scatter cp 32 f32",
                   "B all_reduce dp 16 f32"}));
  EXPECT_EQ(calls("tokens=8 in=3 out=7 dp=2 shard=cp"), (Calls{"B all_reduce dp 28 f64"}));
  EXPECT_EQ(calls(""), Calls{});
}

// 3 x 4 of W and 3 of b behind tp and dp: 2 rows a rank of dp, 2 (4 + 1) elements; 8 tokens are 4 a
// rank of dp. Over tp activations travel as they are stored, whatever the wire's type.
TEST(ShardedTraffic, InsideTensorParallelismIsThatOfBoth) {
  using Calls = std::vector<std::string>;
  const std::string words = "tokens=8 tp=2 dp=2 dtype=bf16 wire=f32 ";
  EXPECT_EQ(calls(words + "parallel=column in=4 out=6"),
            (Calls{"F all_gather dp 10 bf16", "B all_gather dp 10 bf16", "B all_reduce tp 16 bf16",
                   "B reduce_scatter dp 20 f32"}));
  EXPECT_EQ(calls(words + "parallel=column in=4 out=6 sp=on reshard=off"),
            (Calls{"F all_gather dp 10 bf16", "F all_gather tp 8 bf16", "B all_gather tp 8 bf16",
                   "B reduce_scatter tp 16 bf16", "B reduce_scatter dp 20 f32"}));
  EXPECT_EQ(calls(words + "parallel=row in=8 out=3"),
            (Calls{"F all_gather dp 10 bf16", "F all_reduce tp 12 bf16", "B all_gather dp 10 bf16",
                   "B reduce_scatter dp 20 f32"}));
  // The gradient of b is a sum of the own tokens: over tp in the type in which it is kept.
  const std::string row = words + "parallel=row in=8 out=3 sp=on reshard=off";
  EXPECT_EQ(calls(row), (Calls{"F all_gather dp 10 bf16", "F reduce_scatter tp 12 bf16",
                               "B all_gather tp 6 bf16", "B all_reduce tp 3 f32",
                               "B reduce_scatter dp 20 f32"}));
  EXPECT_EQ(calls(row + " local_grad=bf16")[3], "B all_reduce tp 3 bf16");
  EXPECT_EQ(
      calls(row + " frozen=on"),
      (Calls{"F all_gather dp 10 bf16", "F reduce_scatter tp 12 bf16", "B all_gather tp 6 bf16"}));
}

TEST(ShardedTraffic, SaysWhatAStepMakesOnce) {
  const auto once = [](const std::string& words) {
    std::vector<std::string> list;
    for (const Traffic& t : contract().traffic(line_of(words), "", 0))
      if (t.once_a_step) list.push_back(std::string(name(t.op)) + " " + t.label);
    return list;
  };
  using Calls = std::vector<std::string>;
  EXPECT_EQ(once("dp=2 cp=2 shard=cp"), Calls{});
  EXPECT_EQ(once("dp=2 cp=2 shard=cp sync=last"), (Calls{"reduce_scatter cp", "all_reduce dp"}));
  EXPECT_EQ(once("dp=2 cp=2 shard=cp sync=shards"), (Calls{"all_reduce dp"}));
  EXPECT_EQ(once("tp=2 dp=2 parallel=row sp=on sync=last"), (Calls{"reduce_scatter dp"}));
}

// Bytes that each rank sends in a ring: (p-1)/p of what is gathered, and of what is reduced.
int64_t ring_bytes(const std::string& words) {
  const Case line = line_of(words);
  const int p = line.ranks(Axis::dp);
  int64_t bytes = 0;
  for (const Traffic& t : contract().traffic(line, "", 0))
    bytes += t.count * int64_t(size_of(t.dtype)) * (t.op == Op::all_gather ? p : 1) * (p - 1) / p;
  return bytes;
}

TEST(ShardedTraffic, OfAWeightOfSixtyFourMebielements) {
  constexpr int64_t mib = 1 << 20;
  const std::string words = "in=8192 out=8192 bias=off dtype=bf16 wire=f32 dp=8";
  EXPECT_EQ(ring_bytes(words), (112 + 112 + 224) * mib);
  EXPECT_EQ(ring_bytes(words + " reshard=off"), (112 + 224) * mib);
}

// ---- Refusals

TEST(ShardedRefusals, EveryIllegalLineIsRefusedAndNoCaseIs) {
  for (const std::string& text : contract().illegal)
    EXPECT_TRUE(contract().precondition(parse(text, family()))) << text;
  for (const char* tier : {"smoke", "ci", "nightly"})
    for (const std::string& text : contract().cases(tier))
      EXPECT_FALSE(contract().precondition(parse(text, family()))) << text;
  for (const std::string& text : contract().witnesses)
    EXPECT_FALSE(contract().precondition(parse(text, family()))) << text;
}

TEST(ShardedRefusals, SayWhatIsWrong) {
  EXPECT_NE(refusal("dp=2 tp=2").find("leave tp at 1"), std::string::npos);
  EXPECT_NE(refusal("dp=2 sp=on").find("parallel=column or parallel=row with sp=on"),
            std::string::npos);
  EXPECT_NE(refusal("tp=2 parallel=column out=13").find("out divisible by tp = 2"),
            std::string::npos);
  EXPECT_NE(refusal("tp=2 parallel=row in=7").find("in divisible by tp = 2"), std::string::npos);
  EXPECT_NE(refusal("tp=2 dp=2 parallel=row sp=on tokens=6").find("divisible by dp*cp*tp = 4"),
            std::string::npos);
  EXPECT_EQ(refusal("tp=2 dp=2 parallel=row tokens=6 out=1"), "");
  EXPECT_NE(refusal("dp=2 cp=2 tokens=6").find("divisible by dp*cp = 4"), std::string::npos);
  EXPECT_EQ(refusal("dp=4 out=1"), "");
  // 2^20 - 1 rows on 2 ranks are 2 blocks of 2^19: with 2^11 columns 2^31 elements travel.
  EXPECT_NE(refusal("dp=2 in=2048 out=1048575 bias=off tokens=2").find("2147483648 elements"),
            std::string::npos);
  EXPECT_EQ(refusal("dp=2 in=2047 out=1048575 bias=off tokens=2"), "");
}

// ---- Bounds and ranges

TEST(ShardedContract, ALocalGradientOfATypeOfItsOwnIsOneRoundingMore) {
  const std::vector<Whole> in{{{2, 1}, {3, -4}}, {{1, 1}, {5}}, {{1}, {-7}}},
      cotangents{{{2, 1}, {1, 2}}};
  const auto gauges = [&](const std::string& words) {
    std::vector<Gauge> list;
    const Case line = line_of("tokens=2 in=1 out=1 dtype=f32 fill=normal " + words);
    EXPECT_EQ(contract().backward(line, in, cotangents, &list)[1].value, (Doubles{3 - 8}));
    return list;
  };
  EXPECT_TRUE(gauges("")[1].bound.empty());
  const auto kept = gauges("local_grad=bf16");
  EXPECT_TRUE(kept[0].bound.empty()) << "dX is no sum over ranks";
  EXPECT_EQ(kept[1].magnitude, (Doubles{3 + 8}));
  // Two terms in f32, then 8 bits: 2 u + 2^-8 to first order, in units of u = 2^-24.
  ASSERT_EQ(kept[1].bound.size(), 1u);
  EXPECT_NEAR(kept[1].bound[0], 11 * (2 + 0x1p-8 * 0x1p24), 11 * 0.01);
}

// X [4, 2], W [1, 2] and b [1] over tp=2 and dp=2: a rank has two tokens, under sp one.
TEST(ShardedContract, SumsPassTheTypesOfBothAxes) {
  const std::vector<Whole> in{{{4, 2}, {1, 2, 3, 4, 5, 6, 7, 8}}, {{1, 2}, {1, -1}}, {{1}, {0}}},
      cotangents{{{4, 1}, {1, -2, 3, -4}}};
  const auto bounds = [&](const std::string& words, int result) {
    std::vector<Gauge> list;
    const Case line =
        line_of("tokens=4 in=2 out=1 tp=2 dp=2 parallel=row dtype=bf16 fill=normal " + words);
    if (result < 0)
      contract().forward(line, in, &list);
    else
      contract().backward(line, in, cotangents, &list);
    return list[size_t(std::max(result, 0))];
  };
  const auto near = [](double got, double want) { EXPECT_NEAR(got, want, 0.01 * want); };
  constexpr double bf16 = 0x1p-8 * 0x1p24;  // in units of u = 2^-24
  // One type on both axes: y is a sum over tp, the gradients are sums over dp.
  EXPECT_TRUE(bounds("", -1).bound.empty());
  EXPECT_EQ(bounds("", -1).reduced, 2);
  EXPECT_EQ(bounds("", 1).reduced, 2);
  // The wire's type is another: y travels in bf16, 2 roundings, after 2 in the accumulation.
  near(bounds("wire=f32", -1).bound.at(3), (7 + 8) * (2 + 2 * bf16));
  EXPECT_TRUE(bounds("wire=f32", 1).bound.empty());
  EXPECT_EQ(bounds("wire=f32", 1).reduced, 2);
  // b under sp: one token in the accumulation, over tp in f32 or in the rank's own type, over dp in
  // f32: 2 roundings each.
  near(bounds("wire=f32 sp=on", 2).bound.at(0), 10 * (1 + 2 + 2));
  near(bounds("wire=f32 sp=on local_grad=bf16", 2).bound.at(0), 10 * (1 + 2 * bf16 + 2));
  // W: 2 tokens, one rounding to the own type, 2 on the wire.
  near(bounds("wire=f32 sp=on local_grad=bf16", 1).bound.at(0), (1 + 6 + 15 + 28) * (2 + bf16 + 2));
}

TEST(ShardedContract, SaysWhereMicrobatchesAreAddedUpBeforeTheyAreReduced) {
  const std::vector<Whole> in{{{2, 1}, {3, -4}}, {{1, 1}, {5}}, {{1}, {-7}}},
      cotangents{{{2, 1}, {1, 2}}};
  for (const char* sync : {"each", "last", "shards"}) {
    std::vector<Gauge> list;
    contract().backward(line_of(std::string("tokens=2 in=1 out=1 sync=") + sync), in, cotangents,
                        &list);
    EXPECT_FALSE(list[0].deferred) << "dX is of its own microbatch";
    EXPECT_EQ(list[1].deferred, sync != std::string("each"));
    EXPECT_EQ(list[2].deferred, sync != std::string("each"));
  }
}

TEST(ShardedContract, IntegersFitTheLocalGradientToo) {
  // 24 tokens: 24 B^2 <= 2^8 where a rank keeps its sums in bf16.
  EXPECT_EQ(contract().integer_range(line_of("local_grad=bf16")), 3);
  EXPECT_EQ(contract().integer_range(line_of("dtype=bf16")), 3);
  EXPECT_EQ(contract().integer_range(line_of("local_grad=bf16 tokens=512")), std::nullopt);
}

// ---- On ranks

Judged run(const std::string& words, const std::vector<std::string>& checks) {
  static Options options;
  static Runner runner(options, family());
  static std::vector<std::unique_ptr<Case>> lines;  // evidence points at its line
  lines.push_back(std::make_unique<Case>(line_of(words)));
  return runner.run(*lines.back(), checks, lane_of(*lines.back()));
}

Doubles gradient(const Judged& j, int rank, int operand) {
  const ResultTensor* t = j.evidence.result(rank, 0, 1, operand, true);
  Doubles values;
  for (size_t i = 0; t && i < t->bytes.size(); i += size_of(t->dtype))
    values.push_back(load(t->bytes.data() + i, t->dtype));
  return values;
}

constexpr int w = 1, b = 2;

TEST(ShardedOnRanks, ARankWithoutRowsTakesPartInEveryCall) {
  const Judged j = run("dp=4 out=5", {"forward", "gradient", "ledger", "memory"});
  ASSERT_TRUE(j.completed);
  for (const CheckResult& c : j.result.checks) EXPECT_EQ(c.verdict, Verdict::passed) << c.check;
  EXPECT_EQ(j.evidence.result(3, 0, 1, w, true)->shape, (Rows{0, 7}));
  EXPECT_EQ(j.evidence.ranks[3].shots.at(0).ledger.size(), 3u);
}

TEST(ShardedOnRanks, TheMeanIsTheSumOverP) {
  const Judged sum = run("dp=4", {"gradient"}),
               mean = run("dp=4 control=sharded_gradient_averaged", {"gradient"});
  for (int rank = 0; rank < 4; ++rank)
    for (int operand : {w, b}) {
      const Doubles want = gradient(sum, rank, operand), got = gradient(mean, rank, operand);
      ASSERT_EQ(got.size(), want.size());
      ASSERT_FALSE(got.empty());
      for (size_t i = 0; i < got.size(); ++i) EXPECT_EQ(got[i], want[i] / 4);
    }
}

// Cut over the ranks of dp, or copied on them: the same rows, the same sums.
TEST(ShardedOnRanks, CopiesHaveTheGradientsThatShardsHave) {
  const Judged shards = run("dp=2", {"gradient"}), copies = run("dp=2 shard=cp", {"gradient"});
  for (int operand : {w, b}) {
    Doubles whole = gradient(shards, 0, operand);
    const Doubles rest = gradient(shards, 1, operand);
    whole.insert(whole.end(), rest.begin(), rest.end());
    EXPECT_EQ(gradient(copies, 0, operand), whole);
    EXPECT_EQ(gradient(copies, 1, operand), whole);
  }
}

// What a rank gives back of a parameter that it was handed whole: its rows, zeros elsewhere.
TEST(ShardedOnRanks, WholeParametersAreCutAsTheirShardsAre) {
  for (const std::string words : {"tp=2 dp=2 parallel=column out=10", "tp=2 dp=2 parallel=row",
                                  "dp=4 out=5", "tp=2 dp=2 parallel=row sp=on out=3"}) {
    const Judged cut = run(words, {"gradient"}),
                 all = run(words + " whole_weight=on", {"gradient"});
    for (int rank = 0; rank < 4; ++rank)
      for (int operand : {w, b}) {
        const Operand o = contract().operands(line_of(words))[size_t(operand)];
        Doubles want(size_t(product(o.shape)));
        const Doubles own = gradient(cut, rank, operand);
        const Rows at = whole_indices(o.shape, o.layout, line_of(words).mesh(), rank);
        for (size_t i = 0; i < at.size(); ++i) want[size_t(at[i])] = own.at(i);
        EXPECT_EQ(gradient(all, rank, operand), want) << words << ", rank " << rank;
      }
  }
}

// Out [0, 16) over tp=2, then dp=2, four rows a rank. A mesh [dp, tp] cuts 8 and 8 over dp first:
// ranks 1 and 2 change their rows.
TEST(ShardedOnRanks, CutOverDpFirstChangesTheRowsOfTwoRanks) {
  const std::string words = "tp=2 dp=2 parallel=column whole_weight=on out=16";
  const Judged right = run(words, {"gradient"}),
               wrong = run(words + " control=sharded_rows_returned_dp_first", {"gradient"});
  const auto rows = [](const Doubles& gradient) {
    Rows at;
    for (size_t i = 0; i < gradient.size(); ++i)
      if (gradient[i] != 0) at.push_back(int64_t(i));
    return at;
  };
  EXPECT_EQ(rows(gradient(right, 1, b)), (Rows{8, 9, 10, 11}));
  EXPECT_EQ(rows(gradient(wrong, 1, b)), (Rows{4, 5, 6, 7}));
  EXPECT_EQ(rows(gradient(right, 2, b)), (Rows{4, 5, 6, 7}));
  EXPECT_EQ(rows(gradient(wrong, 2, b)), (Rows{8, 9, 10, 11}));
  for (int rank : {0, 3}) EXPECT_EQ(gradient(wrong, rank, b), gradient(right, rank, b));
}

// Calls of a step of two microbatches, by operation.
std::vector<std::string> calls_of_a_step(const Judged& j) {
  std::vector<std::string> list;
  for (const LedgerEntry& c :
       j.evidence.record(0, j.evidence.find_shot("accumulate:step 1")).ledger)
    list.push_back(std::string(name(c.op)) + " " + c.label);
  return list;
}

TEST(ShardedOnRanks, AStepThatReducesOnceHasTheSumsOfOneThatReducesEach) {
  const std::string words = "dp=2 cp=2 shard=cp microbatches=2 reshard=off ";
  const Judged each = run(words, {"accumulate"}), last = run(words + "sync=last", {"accumulate"}),
               shards = run(words + "sync=shards", {"accumulate"});
  const int step = each.evidence.find_shot("accumulate:step 1");
  for (int rank = 0; rank < 4; ++rank)
    for (int operand : {w, b})
      for (const Judged* other : {&last, &shards}) {
        const ResultTensor *sum = each.evidence.result(rank, step, 3, operand, true),
                           *same = other->evidence.result(rank, step, 3, operand, true);
        ASSERT_TRUE(sum && same);
        EXPECT_EQ(sum->bytes, same->bytes) << "integers: every order is exact";
      }
  using Calls = std::vector<std::string>;
  EXPECT_EQ(calls_of_a_step(each), (Calls{"all_gather cp", "reduce_scatter cp", "all_reduce dp",
                                          "all_gather cp", "reduce_scatter cp", "all_reduce dp"}));
  EXPECT_EQ(calls_of_a_step(shards), (Calls{"all_gather cp", "reduce_scatter cp", "all_gather cp",
                                            "reduce_scatter cp", "all_reduce dp"}));
  EXPECT_EQ(calls_of_a_step(last),
            (Calls{"all_gather cp", "all_gather cp", "reduce_scatter cp", "all_reduce dp"}));
}

// 256 and 1 in bf16 are 256: the second microbatch is lost below the last bit of the first. Beside
// it every call is the due one.
TEST(ShardedOnRanks, WhatIsAddedUpAsStoredIsSeenByItsSums) {
  const Judged j =
      run("dp=2 microbatches=4 sync=last dtype=bf16 wire=f32 grad=f32 fill=normal "
          "control=sharded_added_up_as_stored",
          {"ledger", "accumulate"});
  EXPECT_EQ(j.result.checks.at(0).verdict, Verdict::passed);
  ASSERT_EQ(j.result.checks.at(1).verdict, Verdict::failed);
  EXPECT_EQ(j.result.checks.at(1).findings.at(0).tensor, "gradient of w");
}

// 13 rows over 4 ranks: 4, 4, 4 and 1. Rank 3's flat shard holds b at 28; packed without padding it
// lies at 7, among the padding of W, and 28 is as it was made, 0.
TEST(ShardedOnRanks, WithoutPaddingOnlyTheLastRanksBiasIsLost) {
  const Judged right = run("dp=4", {"gradient"}),
               wrong = run("dp=4 control=sharded_gradients_unpadded", {"gradient"});
  for (int rank = 0; rank < 4; ++rank)
    EXPECT_EQ(gradient(wrong, rank, w), gradient(right, rank, w));
  for (int rank = 0; rank < 3; ++rank)
    EXPECT_EQ(gradient(wrong, rank, b), gradient(right, rank, b));
  EXPECT_NE(gradient(right, 3, b), (Doubles{0}));
  EXPECT_EQ(gradient(wrong, 3, b), (Doubles{0}));
}

TEST(ShardedOnRanks, NoErrorIsTooLargeWhereSumsAreAsLongAsOneOverU) {
  const Judged j =
      run("dp=2 tokens=1024 dtype=bf16 acc=bf16 local_grad=bf16 fill=normal", {"gradient"});
  EXPECT_EQ(j.result.checks.at(0).verdict, Verdict::vacuous);
}

// Folder -> checks that failed and how many passed, the answers by ours or by a control.
struct Answered {
  std::vector<std::string> failed;
  size_t passed = 0;
};

Answered answered(const std::string& words, const std::string& control) {
  const std::string folder =
      std::filesystem::temp_directory_path() / ("sharded" + std::to_string(getpid()));
  std::filesystem::remove_all(folder);
  prepared::prepare_case(line_of(words), {}, folder, family());
  foreign::Answer how;
  how.control = control;
  foreign::answer(folder, family(), how);
  const Report report = foreign::judged(folder, family());
  std::filesystem::remove_all(folder);
  return {foreign::with(report, Verdict::failed), foreign::with(report, Verdict::passed).size()};
}

// Files of a rank without rows hold tensors without elements.
TEST(ShardedFiles, AreAnsweredByARankWithoutRows) {
  const Answered right = answered("dp=4 out=5", "");
  EXPECT_TRUE(right.failed.empty());
  EXPECT_GE(right.passed, 4u);
  const auto failed = answered("dp=4 out=5", "sharded_gradient_left_local").failed;
  EXPECT_NE(std::find(failed.begin(), failed.end(), "gradient"), failed.end());
}

TEST(ShardedFiles, AreAnsweredInsideTensorParallelismAndByStepsThatReduceOnce) {
  const std::string whole = "tp=2 dp=2 parallel=column whole_weight=on",
                    step = "tp=2 dp=2 parallel=row sp=on microbatches=2 sync=last";
  for (const std::string& words : {whole, step}) EXPECT_TRUE(answered(words, "").failed.empty());
  const auto rows = answered(whole, "sharded_cut_over_dp_first").failed;
  EXPECT_NE(std::find(rows.begin(), rows.end(), "forward"), rows.end());
  EXPECT_EQ(answered(step, "sharded_last_microbatch_left_local").failed,
            std::vector<std::string>{"accumulate"});
}

}  // namespace sharded_test
}  // namespace
}  // namespace shardproof
