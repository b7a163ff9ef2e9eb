// The judge before anyone else: faults planted in results that were right, each of which must earn
// exactly its verdict, and the table of what classic mistakes read in a typed pairing.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>
#include <set>
#include <utility>

#include "fixtures/index_maps.hpp"
#include "oracle/checks/draws.hpp"
#include "oracle/checks/judging.hpp"
#include "oracle/checks/pairing.hpp"
#include "oracle/checks/patterns.hpp"
#include "oracle/checks/wide.hpp"
#include "suites/self/toy_evidence.hpp"

namespace shardproof {

void family_attention(Registry&);

namespace {
namespace checks_test {

using namespace toy;

constexpr double nan_value = std::numeric_limits<double>::quiet_NaN();
constexpr double inf_value = std::numeric_limits<double>::infinity();

Map same() {
  return [](const Locals& x) { return x; };
}
Map sum() {
  return [](const Locals& x) { return all_reduce(x); };
}

// P -> I, all-reduce and identity, on p ranks.
std::unique_ptr<Play> reduce(int p, const std::string& more = "",
                             std::vector<int64_t> shape = {4, 6}) {
  return std::make_unique<Play>(contract(std::move(shape), on_tp(P()), on_tp(I())),
                                "tp=" + std::to_string(p) + " " + more, sum(), same());
}
// S(0) -> I, all-gather and own block.
std::unique_ptr<Play> gather(int p, const std::string& more = "",
                             std::vector<int64_t> shape = {8, 6}) {
  return std::make_unique<Play>(contract(std::move(shape), on_tp(S(0)), on_tp(I())),
                                "tp=" + std::to_string(p) + " " + more, all_gather, own_block);
}
// P -> S(0), reduce-scatter and all-gather.
std::unique_ptr<Play> scatter_sum(int p, const std::string& more = "",
                                  std::vector<int64_t> shape = {8, 6}) {
  return std::make_unique<Play>(contract(std::move(shape), on_tp(P()), on_tp(S(0))),
                                "tp=" + std::to_string(p) + " " + more, reduce_scatter, all_gather);
}

// ---- Values ----

TEST(Forward, HealthyIsExact) {
  const CheckResult r = reduce(4)->judge("forward");
  EXPECT_EQ(r.verdict, Verdict::passed);
  EXPECT_TRUE(r.exact);
  EXPECT_EQ(r.ratio, 0);
  EXPECT_EQ(r.compared, 4 * 24);  // every copy
  EXPECT_EQ(r.where, "y[0,0]");   // of elements that are as right the first
  EXPECT_EQ(r.rank, 0);
  const CheckResult bounded = gather(2, "fill=normal")->judge("forward");
  EXPECT_EQ(bounded.where, "y[0,0]");
  EXPECT_EQ(bounded.rank, 0);
}

TEST(Forward, NaNIsNeverAccepted) {
  for (const char* fill : {"integers", "normal", "large", "cancelling", "offset"}) {
    auto play = reduce(4, std::string("fill=") + fill);
    play->run("forward");
    play->set(2, false, 7, nan_value);
    const CheckResult r = play->judge_again("forward");
    ASSERT_EQ(r.verdict, Verdict::failed) << fill;
    EXPECT_EQ(r.findings[0].rank, 2);
    EXPECT_EQ(r.findings[0].where, "y[1,1]");
    EXPECT_EQ(r.findings[0].wrong, 1);
    EXPECT_TRUE(std::isinf(r.ratio));
    EXPECT_NE(r.findings[0].pattern.find("NaN"), std::string::npos);
  }
}

TEST(Forward, InfinityIsNeverAccepted) {
  for (const char* fill : {"integers", "normal"}) {
    auto play = reduce(3, std::string("fill=") + fill);
    play->run("forward");
    play->set(1, false, 0, -inf_value);
    EXPECT_EQ(play->judge_again("forward").verdict, Verdict::failed) << fill;
  }
}

TEST(Forward, NegativeZeroEqualsZero) {
  auto play = std::make_unique<Play>(contract({2}, on_tp(P()), on_tp(I())), "tp=2", sum(), same());
  Feed& feed = play->e.shots[0].feeds[0];
  feed.given = {{0, {3, 1, -3, 1}}};  // parts of x[0] cancel
  play->run("forward");
  ASSERT_EQ(play->get(0, false, 0), 0);
  for (int r : {0, 1}) play->set(r, false, 0, -0.0);
  EXPECT_TRUE(std::signbit(play->get(0, false, 0)));
  EXPECT_EQ(play->judge_again("forward").verdict, Verdict::passed);
}

TEST(Forward, OneWrongElementInAMillion) {
  auto play = gather(2, "", {1000, 1000});
  play->run("forward");
  play->set(1, false, 123456, play->get(1, false, 123456) + 1);
  const CheckResult r = play->judge_again("forward");
  ASSERT_EQ(r.verdict, Verdict::failed);
  EXPECT_EQ(r.findings[0].where, "y[123,456]");
  EXPECT_EQ(r.findings[0].index, (std::vector<int64_t>{123, 456}));
  EXPECT_EQ(r.findings[0].rank, 1);
  EXPECT_EQ(r.findings[0].wrong, 1);
  EXPECT_EQ(r.findings[0].compared, 2000000);
  EXPECT_EQ(r.findings[0].pattern.rfind("one element", 0), 0u);
}

// Columns of a rank are many short runs of the whole.
TEST(Forward, EveryElementOfARankCounts) {
  for (const char* fill : {"integers", "normal"}) {
    Play play(contract({6, 6}, on_tp(S(0)), on_tp(S(1))), "tp=2 fill=" + std::string(fill),
              rows_to_columns, columns_to_rows);
    EXPECT_EQ(play.judge("forward").verdict, Verdict::passed);
    for (int r : {0, 1})
      for (int64_t i = 0; i < 18; ++i) {
        const double right = play.get(r, false, i);
        play.set(r, false, i, right + 1);
        EXPECT_EQ(play.judge_again("forward").verdict, Verdict::failed) << fill << r << " " << i;
        play.set(r, false, i, right);
      }
  }
}

TEST(Forward, WrongOnTheLastRankOnly) {
  auto play = reduce(8);
  play->run("forward");
  for (int64_t i = 0; i < 24; ++i) play->set(7, false, i, play->get(7, false, i) + 2);
  const CheckResult r = play->judge_again("forward");
  ASSERT_EQ(r.verdict, Verdict::failed);
  EXPECT_EQ(r.findings[0].ranks, std::vector<int>{7});
  EXPECT_EQ(r.findings[0].wrong, 24);
  EXPECT_EQ(r.findings[0].pattern, "copy of rank 7, off by a constant, +2");
}

TEST(Forward, LastBlockOfTheLastRank) {
  auto play = scatter_sum(4);
  play->run("forward");
  for (int64_t i = 0; i < 12; ++i) play->set(3, false, i, 0);
  const CheckResult r = play->judge_again("forward");
  ASSERT_EQ(r.verdict, Verdict::failed);
  EXPECT_EQ(r.findings[0].pattern, "block of rank 3, zero");
  EXPECT_EQ(r.findings[0].rank, 3);
}

TEST(Forward, AllZeroPairIsVacuous) {
  auto play = reduce(4);
  play->e.shots[0].feeds[0].given = {{0, std::vector<double>(4 * 24, 0)}};
  const CheckResult r = play->judge("forward");
  EXPECT_EQ(r.verdict, Verdict::vacuous);
  EXPECT_NE(r.note.find("zero everywhere, so nothing was asked; larger extents"), std::string::npos)
      << r.note;
}

// The smallest number in place of 0 may come of parts that vanish; then there is something to ask.
TEST(Forward, ResultsNextToZeroAreNotZero) {
  auto play = reduce(4, "dtype=f32 fill=normal");
  play->e.shots[0].feeds[0].given = {{0, std::vector<double>(4 * 24, 0)}};
  EXPECT_EQ(play->judge("forward").verdict, Verdict::vacuous);
  play->set(1, false, 3, 0x1p-149);
  EXPECT_EQ(play->judge_again("forward").verdict, Verdict::passed);
}

TEST(Vacuous, LinesOfDocumentsAreToldToMakeThemLonger) {
  const Registry families = all_families();
  for (const auto& [line, told] : std::map<std::string, std::string>{
           {"conv_context cp=2 docs=1,1", "longer documents, larger extents"},
           {"conv_context cp=2 cu_seqlens=0,1,2", "longer documents, larger extents"},
           {"conv_context cp=2 tokens=2", "larger extents"},
           {"linear_row tp=2", "larger extents"}})
    EXPECT_TRUE(judging::values_that_can_be_wrong(parse(line, families)).starts_with(told)) << line;
}

TEST(Forward, NothingComparedIsVacuous) {
  const CheckResult r = reduce(2, "", {0, 6})->judge("forward");
  EXPECT_EQ(r.verdict, Verdict::vacuous);
  EXPECT_FALSE(r.exact);
}

TEST(Forward, ASubjectThatCallsTheReferenceIsVacuous) {
  // f32 sums of 8 normal numbers in a subject's order are not all correctly rounded; those of the
  // reference, rounded once on storing, are.
  const auto through_double = [](const Locals& x) { return all_reduce(x); };
  Play copies(contract({20, 9}, on_tp(P()), on_tp(I())), "tp=8 dtype=f32 fill=normal",
              through_double, same());
  const CheckResult vacuous = copies.judge("forward");
  EXPECT_EQ(vacuous.verdict, Verdict::vacuous);
  EXPECT_NE(vacuous.note.find("correctly rounded"), std::string::npos) << vacuous.note;

  const auto in_float = [](const Locals& x) {
    std::vector<double> sum(x[0].size());
    for (const auto& part : x)
      for (size_t i = 0; i < sum.size(); ++i) sum[i] = float(float(sum[i]) + float(part[i]));
    return Locals(x.size(), sum);
  };
  Play honest(contract({20, 9}, on_tp(P()), on_tp(I())), "tp=8 dtype=f32 fill=normal", in_float,
              same());
  const CheckResult passed = honest.judge("forward");
  EXPECT_EQ(passed.verdict, Verdict::passed) << passed.note;
  EXPECT_GT(passed.ratio, 0);
  EXPECT_LE(passed.ratio, 1);
  // One that declares to accumulate in double is honest, too.
  Play declared(contract({20, 9}, on_tp(P()), on_tp(I())), "tp=8 dtype=f32 fill=normal acc=f64",
                through_double, same());
  EXPECT_EQ(declared.judge("forward").verdict, Verdict::passed);
  copies.e.declared.accumulates_in_f64 = true;
  EXPECT_EQ(copies.judge("forward").verdict, Verdict::passed);
  // So is one whose sums have too few terms to be rounded twice, which any kernel rounds correctly.
  for (const auto& play :
       {gather(2, "dtype=f32 fill=normal", {20, 9}), reduce(2, "dtype=f32 fill=normal", {20, 9}),
        reduce(3, "dtype=f32 fill=normal", {20, 9})})
    EXPECT_EQ(play->judge("forward").verdict, Verdict::passed) << print(*play->e.line);
  // So is one whose line says a type, which it may exceed, one whose results are coarser than its
  // sums, and one of values that cancel or are one value many times, whose sums may be exact.
  for (const char* keys : {"dtype=f32 acc=f32 fill=normal", "dtype=bf16 wire=f32 fill=normal",
                           "dtype=f32 fill=cancelling", "dtype=f32 fill=normal strides=expanded"}) {
    Play other(contract({20, 9}, on_tp(P()), on_tp(I())), "tp=8 " + std::string(keys),
               through_double, same());
    EXPECT_EQ(other.judge("forward").verdict, Verdict::passed) << keys;
  }
}

TEST(Forward, TwiceTheBoundIsCaughtHalfIsNot) {
  for (const char* dtype : {"f64", "f32", "bf16", "f16"})
    for (int p : {2, 3, 8}) {
      auto play = reduce(p, std::string("fill=normal dtype=") + dtype);
      play->run("forward");
      const Feed& feed = play->e.shots[0].feeds[0];
      const Truth& truth = play->e.truth(feed);
      const auto bound =
          bound_of(play->e, play->e.operands[1], false, truth.outputs[0], truth.output_gauges[0]);
      const int64_t at = 13;
      const double want = truth.outputs[0].value[at], b = bound(at);
      const double spacing = 2 * unit_roundoff(play->e.line->dtype()) * std::abs(want + 2 * b);
      ASSERT_GT(b, spacing) << "the plant would be rounded away";
      play->set(p - 1, false, at, want + 2 * b);
      const CheckResult caught = play->judge_again("forward");
      ASSERT_EQ(caught.verdict, Verdict::failed) << dtype << " " << p;
      EXPECT_EQ(caught.findings[0].wrong, 1);
      EXPECT_EQ(caught.findings[0].rank, p - 1);
      EXPECT_NEAR(caught.ratio, 2, spacing / b);
      play->set(p - 1, false, at, want + 0.5 * b);
      const CheckResult passed = play->judge_again("forward");
      EXPECT_EQ(passed.verdict, Verdict::passed) << dtype << " " << p;
      EXPECT_EQ(passed.where, "y[2,1]") << dtype << " " << p;
    }
}

TEST(Forward, PartialResultsAreSummedInTheJudge) {
  // I -> P on rank 0 only: the parts are value, 0, 0, ... and their sum is the value.
  const auto first_only = [](Locals x) {
    for (size_t r = 1; r < x.size(); ++r) x[r].assign(x[r].size(), 0);
    return x;
  };
  Play play(contract({4, 6}, on_tp(I()), on_tp(P())), "tp=3", first_only, same());
  EXPECT_EQ(play.judge("forward").verdict, Verdict::passed);
  play.set(2, false, 5, 1);
  const CheckResult r = play.judge_again("forward");
  ASSERT_EQ(r.verdict, Verdict::failed);
  EXPECT_EQ(r.findings[0].where, "y[0,5]");
  EXPECT_EQ(r.findings[0].ranks, (std::vector<int>{0, 1, 2}));
  EXPECT_EQ(r.findings[0].error, 1);
}

// Parts of 2^20 that cancel are off by 2^-33: what a sum of them in double loses is the judge's.
TEST(Forward, PartsMayBeLargerThanTheirSum) {
  const auto apart = [](Locals x) {
    for (double& v : x[0]) v += 0x1p20;
    x[1].assign(x[1].size(), -0x1p20);
    return x;
  };
  Play play(contract({4, 6}, on_tp(I()), on_tp(P())), "tp=2 fill=cancelling", apart, same());
  const CheckResult passed = play.judge("forward");
  EXPECT_EQ(passed.verdict, Verdict::passed);
  EXPECT_FALSE(passed.exact);
  EXPECT_NEAR(passed.bound, 2 * 0x1p-53 * 0x1p21, 1e-3 * 0x1p-31);
  play.set(0, false, 5, play.get(0, false, 5) + 0x1p-30);
  EXPECT_EQ(play.judge_again("forward").verdict, Verdict::failed);
  // Whole numbers lose nothing in that sum.
  Play exact(contract({4, 6}, on_tp(I()), on_tp(P())), "tp=2", apart, same());
  EXPECT_EQ(exact.judge("forward").verdict, Verdict::passed);
  exact.set(0, false, 5, exact.get(0, false, 5) + 0x1p-32);
  EXPECT_EQ(exact.judge_again("forward").verdict, Verdict::failed);
}

TEST(Forward, VaryingAxesAreJudgedApart) {
  const auto on_pairs = [](const Locals& x) {  // tp=2 fastest: ranks {0,1} and {2,3}
    const Locals a = all_reduce({x[0], x[1]}), b = all_reduce({x[2], x[3]});
    return Locals{a[0], a[1], b[0], b[1]};
  };
  Play play(contract({2, 3}, on_tp(P()), on_tp(I())), "tp=2 dp=2", on_pairs, same());
  EXPECT_EQ(play.judge("forward").verdict, Verdict::passed);
  play.set(3, false, 4, 1e6);
  const CheckResult r = play.judge_again("forward");
  ASSERT_EQ(r.verdict, Verdict::failed);
  EXPECT_EQ(r.findings[0].where, "y[dp=1][1,1]");
  // The sum over the world in place of tp.
  Play world(contract({2, 3}, on_tp(P()), on_tp(I())), "tp=2 dp=2", sum(), same());
  EXPECT_EQ(world.judge("forward").verdict, Verdict::failed);
}

TEST(Forward, AMissingOrShortResultIsAFinding) {
  auto play = reduce(2);
  play->run("forward");
  play->result(1, 0, false).bytes.resize(8);
  EXPECT_NE(play->judge_again("forward").findings.at(0).message.find(
                "expected 24 elements of rank 1, met 1"),
            std::string::npos);
  play->result(1, 0, false).bytes.resize(25 * 8);
  EXPECT_NE(play->judge_again("forward").findings.at(0).message.find(
                "expected 24 elements of rank 1, met 25"),
            std::string::npos);
  play->e.ranks[1].shots[0].results.clear();
  EXPECT_NE(play->judge_again("forward").findings.at(0).message.find("met none of rank 1"),
            std::string::npos);
  // Also where it would have no elements.
  Play one_row(
      contract({1, 6}, on_tp(I()), on_tp(S(0))), "tp=2",
      [](const Locals& x) {
        return Locals{x[0], {}};
      },
      same());
  EXPECT_EQ(one_row.judge("forward").verdict, Verdict::passed);
  std::erase_if(one_row.e.ranks[1].shots[0].results,
                [](const ResultTensor& t) { return !t.gradient; });
  EXPECT_EQ(one_row.judge_again("forward").verdict, Verdict::failed);
}

TEST(Forward, AShotThatEndedEarlyNamesTheRankThatEndedIt) {
  auto play = reduce(3);
  play->run("forward");
  play->e.ranks[0].shots[0].status = ShotRecord::released;
  play->e.ranks[2].shots[0].status = ShotRecord::threw;
  play->e.ranks[2].shots[0].text = "no memory";
  for (const char* check : {"forward", "gradient", "ledger", "memory"}) {
    const CheckResult r = play->judge_again(check);
    ASSERT_EQ(r.verdict, Verdict::failed) << check;
    EXPECT_EQ(r.findings[0].message, "did not complete 'base': rank 2 threw: no memory");
    EXPECT_EQ(r.findings[0].ranks, (std::vector<int>{0, 2}));
    EXPECT_FALSE(r.findings[0].numeric);
  }
  // Of several the first.
  play->e.ranks[1].shots[0].status = ShotRecord::threw;
  play->e.ranks[1].shots[0].text = "no file";
  EXPECT_EQ(play->judge_again("forward").findings.at(0).message,
            "did not complete 'base': rank 1 threw: no file");
}

TEST(Gradient, HealthyAndPlanted) {
  auto play = scatter_sum(4);
  EXPECT_EQ(play->judge("gradient").verdict, Verdict::passed);
  play->set(1, true, 40, play->get(1, true, 40) + 1);
  const CheckResult r = play->judge_again("gradient");
  ASSERT_EQ(r.verdict, Verdict::failed);
  EXPECT_EQ(r.findings[0].tensor, "gradient of x");
  EXPECT_EQ(r.findings[0].where, "x[6,4]");
  EXPECT_EQ(play->judge_again("forward").verdict, Verdict::passed);
}

// An element of a shard is on one rank, of a copy on all of them, whatever else is wrong elsewhere.
TEST(Forward, NamesTheRanksThatHoldTheElementBesideAllThatAreWrong) {
  auto shards = scatter_sum(4);
  shards->run("forward");
  for (int r = 0; r < 4; ++r) shards->set(r, false, 0, shards->get(r, false, 0) + (r == 2 ? 9 : 1));
  const Finding shard = shards->judge_again("forward").findings.at(0);
  EXPECT_EQ(shard.ranks, (std::vector<int>{0, 1, 2, 3}));
  EXPECT_EQ(shard.rank, 2);
  EXPECT_EQ(shard.holders, std::vector<int>{2});
  auto copies = reduce(4);
  copies->run("forward");
  for (int r : {1, 3}) copies->set(r, false, 5, copies->get(r, false, 5) + 1);
  copies->set(0, false, 6, copies->get(0, false, 6) + 0.5);
  const Finding copy = copies->judge_again("forward").findings.at(0);
  EXPECT_EQ(copy.ranks, (std::vector<int>{0, 1, 3}));
  EXPECT_EQ(copy.holders, (std::vector<int>{1, 3}));
}

// ---- Patterns ----

Finding planted(Play& play, const std::function<double(int rank, int64_t i, double right)>& edit) {
  play.run("forward");
  for (int r = 0; r < play.e.mesh.world(); ++r) {
    const auto n = int64_t(play.result(r, 0, false).bytes.size() / size_of(play.e.line->dtype()));
    for (int64_t i = 0; i < n; ++i) play.set(r, false, i, edit(r, i, play.get(r, false, i)));
  }
  const CheckResult r = play.judge_again("forward");
  return r.findings.empty() ? Finding{} : r.findings[0];
}

TEST(Patterns, ExtraAndMissingReductions) {
  auto play = reduce(4);
  Finding f = planted(*play, [](int, int64_t, double v) { return 4 * v; });
  EXPECT_EQ(f.pattern, "all x 4.000 = tp");
  EXPECT_NE(f.means.find("summed again"), std::string::npos);
  EXPECT_NE(f.means.find("replicas agree"), std::string::npos);
  play = reduce(4);
  f = planted(*play, [](int, int64_t, double v) { return v / 4; });
  EXPECT_EQ(f.pattern, "all x 0.250 = 1/tp");
  EXPECT_NE(f.means.find("missing"), std::string::npos);
}

TEST(Patterns, AFactorHasTheDigitsThatTellItFromOne) {
  EXPECT_EQ(factor_text(4), "4.000");
  EXPECT_EQ(factor_text(0.9998684), "0.9998684");
  EXPECT_EQ(factor_text(1.0000001), "1.0000001");
  EXPECT_EQ(factor_text(1 + 0x1p-52), "1.0000000000000002");
}

TEST(Patterns, FactorsOfSeveralAxes) {
  const Mesh mesh({{Axis::tp, 2}, {Axis::cp, 4}});
  EXPECT_EQ(factor_name(8, mesh), "tp*cp");
  EXPECT_EQ(factor_name(0.125, mesh), "1/(tp*cp)");
  EXPECT_EQ(factor_name(2, mesh), "tp");
  EXPECT_EQ(factor_name(3, mesh), "");
  EXPECT_EQ(factor_name(2, Mesh({{Axis::tp, 2}, {Axis::dp, 2}})), "tp or dp");
}

TEST(Patterns, EachRankItsOwnPart) {
  Play play(contract({4, 6}, on_tp(P()), on_tp(I())), "tp=3", same(), same());
  const CheckResult r = play.judge("forward");
  ASSERT_EQ(r.verdict, Verdict::failed);
  EXPECT_NE(r.findings[0].pattern.find("each rank holds its own part"), std::string::npos)
      << r.findings[0].pattern;
  EXPECT_NE(r.findings[0].means.find("the reduction is missing"), std::string::npos);
}

// Of a tensor that tp cuts each rank of tp has an own part of its own block, and cp has the copies.
TEST(Patterns, EachCopyOfAShardItsRanksOwnPart) {
  const Layout shard{{Axis::tp, S(0)}, {Axis::cp, P()}}, sum{{Axis::tp, S(0)}, {Axis::cp, I()}};
  Play play(contract({4, 6}, shard, sum), "tp=2 cp=2", same(), same());
  const Finding f = play.judge("forward").findings.at(0);
  EXPECT_NE(f.pattern.find("each copy along cp is its rank's own part"), std::string::npos)
      << f.pattern;
  EXPECT_NE(f.means.find("ranks along cp add up"), std::string::npos) << f.means;
  EXPECT_EQ(f.ranks.size(), 4u);
  EXPECT_TRUE(f.holders == (std::vector<int>{0, 2}) || f.holders == (std::vector<int>{1, 3}));
}

// Sorted, they would be the truth's values: each is within a rounding of its own.
TEST(Patterns, RoundingsAreNoPermutation) {
  Play play(
      contract({8, 6}, on_tp(P()), on_tp(S(0))), "tp=4",
      [](const Locals& x) {
        Locals y = reduce_scatter(x);
        for (auto& local : y)
          for (size_t i = 0; i < local.size(); ++i) local[i] *= 1 + double(i % 5) * 0x1p-50;
        return y;
      },
      all_gather);
  const CheckResult r = play.judge("forward");
  ASSERT_EQ(r.verdict, Verdict::failed);
  EXPECT_NE(r.findings[0].pattern.find("off by roundings"), std::string::npos)
      << r.findings[0].pattern;
}

TEST(Patterns, BlocksThatWentToTheWrongOwner) {
  Play play(
      contract({8, 6}, on_tp(P()), on_tp(S(0))), "tp=4",
      [](const Locals& x) { return next_owner(reduce_scatter(x)); }, all_gather);
  const CheckResult r = play.judge("forward");
  ASSERT_EQ(r.verdict, Verdict::failed);
  EXPECT_NE(r.findings[0].pattern.find("values of the truth from other places"), std::string::npos)
      << r.findings[0].pattern;
}

TEST(Patterns, PlacesAndContents) {
  struct Row {
    std::string pattern;
    std::function<double(int, int64_t, double)> edit;
  };
  const Row rows[] = {
      {"zero", [](int, int64_t i, double v) { return i / 6 >= 4 && i / 6 <= 7 ? 0 : v; }},
      {"NaN", [](int, int64_t, double) { return nan_value; }},
      {"off by a constant, +7", [](int, int64_t, double v) { return v + 7; }},
  };
  for (const Row& row : rows) {
    auto play = gather(2, "", {12, 6});
    EXPECT_NE(planted(*play, row.edit).pattern.find(row.pattern), std::string::npos) << row.pattern;
  }
  auto play = gather(2, "", {12, 6});
  EXPECT_EQ(
      planted(*play, [](int, int64_t i, double v) { return i / 6 >= 4 && i / 6 <= 7 ? 0 : v; })
          .pattern,
      "rows 4..7, zero");
  play = gather(2, "", {12, 6});
  EXPECT_EQ(planted(*play, [](int, int64_t i, double v) { return i % 2 ? nan_value : v; }).pattern,
            "every 2nd of dim 1, NaN");
  play = gather(2, "", {12, 6});
  EXPECT_EQ(planted(*play, [](int, int64_t i, double v) { return i % 6 == 5 ? 0 : v; }).pattern,
            "column 5, zero");
  play = gather(2, "", {12, 6});
  EXPECT_EQ(
      planted(*play, [](int r, int64_t i, double v) { return r == 1 && i == 0 ? v + 0.25 : v; })
          .pattern,
      "one element of rank 1");
  play = gather(2, "", {12, 6});  // rows 1 and 8: two rows are no stride
  EXPECT_EQ(
      planted(*play, [](int, int64_t i, double v) { return i / 6 == 1 || i / 6 == 8 ? 0 : v; })
          .pattern,
      "zero");
  play = gather(2, "", {12, 6});  // rows 1, 5 and 9 are one
  EXPECT_EQ(planted(*play, [](int, int64_t i, double v) { return i / 6 % 4 == 1 ? 0 : v; }).pattern,
            "every 4th of dim 0, zero");
}

// A place is named where all of it is wrong and nothing else is.
TEST(Patterns, PlacesThatAreWrongInPartAreNotNamed) {
  auto play = gather(2, "", {12, 6});
  const auto rows_4_and_6 = [](int, int64_t i, double v) {
    return i / 6 == 4 || i / 6 == 6 ? nan_value : v;
  };
  EXPECT_EQ(planted(*play, rows_4_and_6).pattern, "NaN");
  Play cut(
      contract({8, 6}, on_tp(P()), on_tp(S(0))), "tp=4",
      [](const Locals& x) { return reduce_scatter(x); }, all_gather);
  const auto three_of_rank_3 = [](int r, int64_t i, double v) {
    return r == 3 && i % 4 == 0 ? nan_value : v;
  };
  EXPECT_EQ(planted(cut, three_of_rank_3).pattern, "NaN");
  play = gather(2, "", {12, 6});
  const auto uneven = [](int, int64_t i, double v) { return v + double(i * i % 7) + 1; };
  EXPECT_EQ(planted(*play, uneven).pattern, "all");
}

// Copies agree where all are wrong alike, and nobody knows of them where some rows are.
TEST(Patterns, OfSomeRowsNothingIsSaidOfReplicas) {
  auto play = reduce(4);
  const Finding f = planted(*play, [](int, int64_t i, double v) { return i < 6 ? 4 * v : v; });
  EXPECT_EQ(f.pattern, "row 0, x 4.000 = tp");
  EXPECT_EQ(f.means.find("replicas agree"), std::string::npos) << f.means;
}

TEST(Patterns, OwnPartsAlongTwoAxes) {
  const Layout parts{{Axis::tp, P()}, {Axis::cp, P()}}, sum{{Axis::tp, I()}, {Axis::cp, I()}};
  Play play(contract({4, 6}, parts, sum), "tp=2 cp=2", same(), same());
  const Finding f = play.judge("forward").findings.at(0);
  EXPECT_EQ(f.pattern, "all, each rank holds its own part");
  EXPECT_EQ(f.means, "the parts of the ranks add up to the truth: the reduction is missing");
}

// Copies along tp were not summed, those along cp agree: the axis of the sum is named.
TEST(Patterns, OwnPartsAlongOneOfTwoAxesOfCopies) {
  const Layout parts{{Axis::tp, P()}, {Axis::cp, I()}}, sum{{Axis::tp, I()}, {Axis::cp, I()}};
  Play play(contract({4, 6}, parts, sum), "tp=2 cp=2", same(), same());
  const Finding f = play.judge("forward").findings.at(0);
  EXPECT_EQ(f.pattern, "all, each copy along tp is its rank's own part");
  EXPECT_EQ(f.means,
            "the parts of the ranks along tp add up to the truth: the reduction is missing");
}

// A part that is a slice is right where its rank has it, and zero elsewhere. A copy that has
// nothing beside one that is whole was lost.
TEST(Patterns, ASliceInZerosIsAnOwnPart) {
  const auto slices = [](int rank, int64_t i, double v) { return i % 4 == rank ? v : 0; };
  auto play = reduce(4);
  const Finding f = planted(*play, slices);
  EXPECT_EQ(f.pattern, "each rank holds its own part");
  EXPECT_EQ(f.means, "the parts of the ranks add up to the truth: the reduction is missing");
  play = reduce(2);
  const Finding lost =
      planted(*play, [](int rank, int64_t, double v) { return rank == 1 ? 0 : v; });
  EXPECT_EQ(lost.pattern, "copy of rank 1, zero");
  EXPECT_NE(lost.means.find("nothing arrived here"), std::string::npos) << lost.means;
}

// One of two elements is a place like any other.
TEST(Patterns, OfFewElementsNoPlaceMeansAnything) {
  const Mesh mesh({{Axis::tp, 1}});
  const WrongElement one[] = {{0, 0, 2, 3}};
  for (const int64_t rows : {2, 8}) {
    const Operand y{"y", Operand::output, {rows, 1}, {}};
    const Whole want{{rows, 1}, std::vector<double>(size_t(rows), 3.0)};
    const Pattern p = pattern_of({one, 1, rows, &want, &y, y.layout, &mesh});
    EXPECT_EQ(p.text, "one element");
    EXPECT_EQ(p.means.empty(), rows < 8) << p.means;
  }
}

// Sums of terms that were rounded to 3 bits are off by an eighth of themselves at most, everywhere;
// sums that are off by a third say nothing certain.
TEST(Patterns, OfSumsOfRoundedTermsAllAreNearTheTruth) {
  for (const auto& [size, told] : {std::pair{0.1, true}, {0.4, false}}) {
    auto play = reduce(2);
    const Finding f = planted(*play, [by = size](int, int64_t i, double v) {
      return v * (1 + by * std::cos(double(i)));
    });
    EXPECT_EQ(f.pattern, "all");
    EXPECT_EQ(f.means.find("codes of 8 bits") != std::string::npos, told) << f.means;
  }
}

// Rows 4..7 are padding, and were written to. Two zeros that are hit may be chance; a part of a sum
// is no padding.
TEST(Patterns, ValuesWhereZeroIsDue) {
  const Mesh mesh({{Axis::tp, 2}});
  const Operand y{"y", Operand::output, {8, 2}, on_tp(S(0))};
  Whole want{{8, 2}, std::vector<double>(16, 3.0)};
  std::vector<WrongElement> wrong;
  for (int64_t at = 8; at < 16; ++at) {
    want.value[size_t(at)] = 0;
    wrong.push_back({at, 1, double(at % 3) + 0.5, 0});
  }
  const auto said = [&](size_t n, bool gradient) {
    return pattern_of(
        {std::span(wrong).first(n), int64_t(n), 16, &want, &y, y.layout, &mesh, gradient});
  };
  EXPECT_EQ(said(8, false).text, "block of rank 1, values where 0 is due");
  EXPECT_EQ(said(8, false).means.find("padding, a place that is masked or a row of no token:"), 0u)
      << said(8, false).means;
  EXPECT_NE(said(8, true).means.find("an input that no result depends on"), std::string::npos);
  EXPECT_EQ(said(2, false).text, "row 4");
  wrong[3].want = 1e-3;
  EXPECT_EQ(said(8, false).text, "block of rank 1");
}

// What a contract says of all that is off goes before what numbers look like.
TEST(Patterns, AContractsWordGoesBeforeAGuess) {
  const auto means = [](const std::function<double(int, int64_t, double)>& edit) {
    auto play = reduce(2);
    Contract knows = *play->e.contract;
    knows.meaning = [](const Case&, const Off& off) { return "of " + off.names.at(0); };
    play->e.contract = &knows;
    return planted(*play, edit).means;
  };
  EXPECT_EQ(means([](int, int64_t i, double v) { return v * (1 + 0.1 * std::cos(double(i))); }),
            "of y");
  const std::string twice = means([](int, int64_t, double v) { return 2 * v; });
  EXPECT_NE(twice.find("summed again"), std::string::npos) << twice;
}

// The first two of ten are there: no place is known, and what they have in common is theirs alone.
TEST(Patterns, OfTheFirstOfManyOnlyTheContentIsSaid) {
  const Mesh mesh({{Axis::tp, 2}});
  const Operand y{"y", Operand::output, {4, 6}, on_tp(S(0))};
  const WrongElement first[] = {{0, 0, 0, 3}, {1, 0, 0, 4}};
  const Whole want{{4, 6}, std::vector<double>(24, 1.0)};
  EXPECT_EQ(pattern_of({first, 10, 24, &want, &y, y.layout, &mesh}).text,
            "zero, as far as the first 2 of them go");
}

// What is lost in a forward has no way back to go.
TEST(Patterns, OfAForwardNoGradientIsSpokenOf) {
  const auto zero = [](int, int64_t i, double v) { return i % 6 == 5 ? 0 : v; };
  auto play = gather(2, "", {12, 6});
  EXPECT_EQ(planted(*play, zero).means,
            "nothing arrived here: a block that was lost, or a part that no rank computes");
  const Mesh mesh({{Axis::tp, 2}});
  const Operand x{"x", Operand::input, {2, 1}, on_tp(S(0))};
  const WrongElement all[] = {{0, 0, 0, 1}, {1, 1, 0, 1}};
  const Whole want{{2, 1}, {1.0, 1.0}};
  EXPECT_EQ(
      pattern_of({all, 2, 2, &want, &x, x.layout, &mesh, /*gradient=*/true}).means,
      "nothing arrived here: a block that was lost, or a gradient that has no way back to its "
      "input");
}

// ---- Adjoint: what the classic mistakes read ----

enum Reads { one, p, one_over_p, other };

struct Mistake {
  const char* name;
  Placement from, to;
  Map forward, backward;
  Reads reads;
  bool replicas_part;
  bool square = false;
};

Map then(Map f, Map g) {
  return [=](const Locals& x) { return g(f(x)); };
}
Map divided() {
  return [](const Locals& x) { return scaled(x, 1.0 / double(x.size())); };
}
Map mean() { return then(sum(), divided()); }

std::vector<Mistake> mistakes() {
  const Map ar = sum(), id = same(), slice = own_block, gathered = all_gather, pad = in_zeros,
            rs = reduce_scatter;
  return {
      {"copy, backward identity", I(), R(), id, id, one_over_p, true},
      {"copy, backward all-reduced twice", I(), R(), id, then(ar, ar), p, false},
      {"copy, backward mean", I(), R(), id, mean(), one_over_p, false},
      {"copy, right", I(), R(), id, ar, one, false},
      {"reduce, right", P(), I(), ar, id, one, false},
      {"reduce, backward all-reduces as well", P(), I(), ar, ar, p, false},
      {"reduce, backward divides by p", P(), I(), ar, divided(), one_over_p, false},
      {"reduce, forward mean, backward identity", P(), I(), mean(), id, p, false},
      {"reduce, forward mean and backward divided: blind", P(), I(), mean(), divided(), one, false},
      {"reduce, forward all-reduce missing", P(), I(), id, id, p, true},
      {"all-reduce with an R output, right", P(), R(), ar, ar, one, false},
      {"scatter, right", I(), S(0), slice, gathered, one, false},
      {"scatter, backward pads and does not gather", I(), S(0), slice, pad, one_over_p, true},
      {"scatter, backward gathers and reduces", I(), S(0), slice, then(gathered, ar), p, false},
      {"gather to I, right", S(0), I(), gathered, slice, one, false},
      {"gather to I, backward reduce-scatters", S(0), I(), gathered, rs, p, false},
      {"gather to R, right", S(0), R(), gathered, rs, one, false},
      {"gather to R, backward slices", S(0), R(), gathered, slice, other, false},
      {"reduce-scatter, right", P(), S(0), rs, gathered, one, false},
      {"reduce-scatter, forward slices and does not reduce", P(), S(0), slice, gathered, other,
       false},
      {"reduce-scatter, backward gathers and divides", P(), S(0), rs, then(gathered, divided()),
       one_over_p, false},
      {"reduce-scatter, wrong owner, backward right", P(), S(0), then(rs, next_owner), gathered,
       other, false},
      {"reduce-scatter, wrong owner, backward alike: blind", P(), S(0), then(rs, next_owner),
       then(previous_owner, gathered), one, false},
      {"all-to-all, right", S(0), S(1), rows_to_columns, columns_to_rows, one, false, true},
      {"all-to-all, backward without the swap", S(0), S(1), rows_to_columns, rows_to_columns, other,
       false, true},
      {"un-slice, right", S(0), P(), pad, slice, one, false},
      {"slice of R, right", R(), S(0), slice, pad, one, false},
  };
}

double read(Reads reads, int ranks) { return reads == one ? 1 : reads == p ? ranks : 1.0 / ranks; }

bool replicas_named(const CheckResult& r) {
  for (const Finding& f : r.findings)
    if (f.message.find("from rank") != std::string::npos) return true;
  return false;
}

// Typed spaces of at most 64 elements: 8 ranks stack 8 x 8.
std::vector<int64_t> small_shape(int ranks, bool square) {
  const int64_t n = ranks == 8 ? 8 : 2 * ranks;
  return square ? std::vector<int64_t>{n, n} : std::vector<int64_t>{n};
}
std::vector<int64_t> large_shape(int ranks, bool square) {
  const int64_t n = 4 * ranks;
  return square ? std::vector<int64_t>{n, n} : std::vector<int64_t>{n, 7};
}

// x/3 is not exact: the pairing of a mean is judged where p is a power of 2.
bool is_thirds(const Mistake& m, int ranks) {
  return ranks == 3 && m.reads == one && std::string(m.name).find("mean") != std::string::npos;
}

// 3 * 5 * 2 is exact; 0.1 is no multiple of 2^-16, and from there on sums are long doubles that err
// by at most n 2^-63 of the sum of all |products|, the exact ones included.
TEST(Dot, IsExactUntilAFactorIsNot) {
  Dot d;
  d.add(3, 5, 2);
  d.add(-7, 2, 1);
  EXPECT_EQ(d.value(), 16);
  EXPECT_EQ(d.error(), 0);
  d.add(0.1, 1, 1);
  EXPECT_EQ(d.value(), 16 + (long double)0.1);
  EXPECT_EQ(d.error(), 3 * 0x1p-63L * (30 + 14 + (long double)0.1));
  Dot other;
  other.add(16, 1, 1);
  EXPECT_FALSE(d.equals(other));
  d.add(std::numeric_limits<double>::quiet_NaN(), 1, 1);
  EXPECT_FALSE(d.equals(d));
}

// As above in two parts each; then sums that 128 bits do not hold in units of 2^-32, and factors of
// which they would hold no product.
TEST(Dot, SumsKeepWhatTheirPartsMayBeOff) {
  Dot exact, rounded;
  exact.add(3, 5, 2);
  for (const double b : {-7.0, 0.1}) {
    Dot part;
    part.add(b, 2, 1);
    exact.add(part);
  }
  EXPECT_EQ(exact.error(), 3 * 0x1p-63L * (30 + 14 + 2 * (long double)0.1));
  rounded.add(0.1, 1, 1);
  Dot other = rounded;
  rounded.add(other);
  EXPECT_EQ(rounded.error(), 2 * 0x1p-63L * (2 * (long double)0.1));
  Dot many, large;
  for (int i = 0; i < 4; ++i) many.add(0x1p34, 0x1p34, 1 << 25);
  EXPECT_EQ(many.value(), 0x1p95L);
  large.add(0x1p46, 0x1p46, 8);
  EXPECT_EQ(large.value(), 0x1p95L);
}

// 2^68 and 2^68 + 2^-32 are one long double and two sums; where nothing limits an error nothing is
// equal.
TEST(Pairing, OfExactSumsIsExactAndWithoutALimitIsNone) {
  Pairing p;
  p.complete = true;
  EXPECT_EQ(p.ratio(), 1);  // 0 and 0
  p.lhs.add(0x1p34, 0x1p34, 1), p.rhs.add(0x1p34, 0x1p34, 1);
  EXPECT_TRUE(p.equal());
  p.rhs.add(0x1p-16, 0x1p-16, 1);
  ASSERT_EQ(p.lhs.value(), p.rhs.value());
  EXPECT_FALSE(p.equal());
  p.allowed = std::numeric_limits<double>::infinity();
  EXPECT_FALSE(p.equal());
}

// However many they are: 3 000 000 products of whole numbers, by one call or by one each; then one
// factor of which doubles hold no exact sum with the others. Of lists of every length that ends in
// the middle of a step.
TEST(Wide, LoadsWhatOneElementLoads) {
  for (const DType dtype :
       {DType::f64, DType::f32, DType::bf16, DType::f16, DType::i64, DType::i32}) {
    const size_t width = size_of(dtype), count = size_t(1) << 16;
    std::vector<std::byte> bytes(1 + count * width);  // at an odd address
    for (uint64_t i = 0; i < count; ++i) {
      const uint64_t bits = width == 2 ? i : (i + 1) * 0x9e3779b97f4a7c15;  // all that 16 bits hold
      std::memcpy(&bytes[1 + i * width], &bits, width);
    }
    for (const size_t n : {size_t(0), size_t(1), size_t(7), size_t(8), count - 1, count}) {
      std::vector<double> values(n);
      wide::load(&bytes[1], dtype, n, values.data());
      for (size_t i = 0; i < n; ++i) {
        const double want = load(&bytes[1 + i * width], dtype);
        ASSERT_TRUE(values[i] == want || (std::isnan(values[i]) && std::isnan(want)))
            << name(dtype) << " " << i << " of " << n;
      }
    }
  }
}

// At an odd address.
std::vector<std::byte> stored(const std::vector<double>& values, DType dtype) {
  std::vector<std::byte> bytes(1 + std::max<size_t>(1, values.size()) * size_of(dtype));
  for (size_t i = 0; i < values.size(); ++i)
    store(&bytes[1 + i * size_of(dtype)], dtype, values[i]);
  return bytes;
}

TEST(Wide, SeesTheOneThatIsOff) {
  for (size_t n = 0; n < 20; ++n) {
    std::vector<double> a(n);
    for (size_t i = 0; i < n; ++i) a[i] = double(i) - 7.5;
    EXPECT_TRUE(wide::equal(a.data(), a.data(), n));
    for (size_t i = 0; i < n; ++i)
      for (const double off : {100.0, nan_value, inf_value}) {
        std::vector<double> b = a;
        b[i] = off;
        EXPECT_FALSE(wide::equal(a.data(), b.data(), n)) << i << " of " << n;
        EXPECT_EQ(wide::equal(b.data(), b.data(), n), !std::isnan(off));
        for (const DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
          const auto was = stored(a, dtype), is = stored(b, dtype);
          EXPECT_TRUE(wide::equal(&was[1], dtype, a.data(), n)) << name(dtype);
          EXPECT_FALSE(wide::equal(&is[1], dtype, a.data(), n)) << name(dtype);
          EXPECT_FALSE(wide::equal(&was[1], dtype, b.data(), n)) << name(dtype);
          EXPECT_EQ(wide::equal(&is[1], dtype, b.data(), n), !std::isnan(off)) << name(dtype);
        }
      }
  }
  std::vector<double> many(2000, 3);  // more than are loaded at a time
  const auto bytes = stored(many, DType::bf16);
  EXPECT_TRUE(wide::equal(&bytes[1], DType::bf16, many.data(), many.size()));
  for (const size_t i : {0, 511, 512, 1999}) {
    std::vector<double> b = many;
    b[i] = 4;
    EXPECT_FALSE(wide::equal(&bytes[1], DType::bf16, b.data(), b.size())) << i;
  }
}

TEST(Wide, ProductsAreWholeOrNot) {
  for (size_t n = 0; n < 40; ++n) {
    std::vector<double> a(n), b(n);
    int64_t sum = 0, magnitude = 0;
    for (size_t i = 0; i < n; ++i) {
      const int64_t x = (i % 2 ? -1 : 1) * int64_t((1 << 20) - 1 - i), y = int64_t(3 * i) - 20;
      a[i] = double(x), b[i] = double(y);
      sum += x * y, magnitude += std::abs(x * y);
    }
    double s = 7, m = 7;
    EXPECT_TRUE(wide::whole_products(a.data(), b.data(), n, s, m));
    EXPECT_EQ(s, double(sum));
    EXPECT_EQ(m, double(magnitude));
    for (const DType dtype : {DType::f64, DType::f32}) {
      EXPECT_TRUE(wide::whole_products(&stored(a, dtype)[1], dtype, b.data(), n, s, m));
      EXPECT_EQ(s, double(sum));
      EXPECT_EQ(m, double(magnitude));
    }
    for (size_t i = 0; i < n; ++i)
      for (const double other :
           {0.5, -0x1p-60, 0x1p51 + 0.5, 0x1p60, 0x1p120, nan_value, inf_value, -inf_value}) {
        std::vector<double> odd = a;
        odd[i] = other;
        EXPECT_FALSE(wide::whole_products(odd.data(), b.data(), n, s, m)) << other << " at " << i;
        EXPECT_FALSE(wide::whole_products(b.data(), odd.data(), n, s, m)) << other << " at " << i;
        for (const DType dtype : {DType::f64, DType::f32})
          if (dtype == DType::f64 || double(float(other)) == other || std::isnan(other)) {
            EXPECT_FALSE(wide::whole_products(&stored(odd, dtype)[1], dtype, b.data(), n, s, m))
                << other << " at " << i << " as " << name(dtype);
          }
      }
  }
}

// 2^53 and beyond: doubles no longer hold every sum. In bf16, more than are loaded at a time.
TEST(Wide, WholeSumsAreBelowWhatDoublesHold) {
  double s = 0, m = 0;
  std::vector<double> a(2048, 0x1p21), b(2048, 0x1p20);  // 2^52 in all
  const auto bytes = stored(a, DType::bf16);
  EXPECT_TRUE(wide::whole_products(a.data(), b.data(), a.size(), s, m));
  EXPECT_EQ(s, 0x1p52);
  EXPECT_TRUE(wide::whole_products(&bytes[1], DType::bf16, b.data(), a.size(), s, m));
  EXPECT_EQ(s, 0x1p52);
  for (double& v : b) v = -0x1p21;  // -2^53
  EXPECT_FALSE(wide::whole_products(a.data(), b.data(), a.size(), s, m));
  EXPECT_FALSE(wide::whole_products(&bytes[1], DType::bf16, b.data(), a.size(), s, m));
  b[2000] = 0.5, b[0] = 0, b[1] = 0;
  EXPECT_FALSE(wide::whole_products(&bytes[1], DType::bf16, b.data(), a.size(), s, m));
}

TEST(Dot, TakesListsAsItTakesSingleProducts) {
  std::vector<double> a(3'000'000), b(a.size());
  for (size_t i = 0; i < a.size(); ++i) a[i] = double(i % 1001) - 500, b[i] = 3 - double(i % 7);
  a[17] = 0x1p30, b[17] = 0x1p20 + 0.5;  // exact, and beyond what is summed as doubles
  Dot list, single, halves;
  list.add(a, b, 2);
  for (size_t i = 0; i < a.size(); ++i) single.add(a[i], b[i], 2);
  Dot half;
  halves.add(std::span(a).first(1'000'000), std::span(b).first(1'000'000), 2);
  half.add(std::span(a).subspan(1'000'000), std::span(b).subspan(1'000'000), 2);
  halves.add(half);
  Dot of_bytes;
  of_bytes.add(reinterpret_cast<const std::byte*>(a.data()), DType::f64, b, 2);
  EXPECT_EQ(list.error(), 0);
  EXPECT_TRUE(list.equals(single) && halves.equals(single) && of_bytes.equals(single));
  int64_t want = 0;  // in halves
  for (size_t i = 0; i < a.size(); ++i) want += int64_t(a[i]) * int64_t(2 * b[i]);
  EXPECT_EQ(list.value(), (long double)want);
  a[17] = 0.1;
  Dot rounded;
  rounded.add(a, b, 2);
  EXPECT_GT(rounded.error(), 0);
  Dot rounded_bytes;
  rounded_bytes.add(reinterpret_cast<const std::byte*>(a.data()), DType::f64, b, 2);
  EXPECT_EQ(rounded_bytes.error(), rounded.error());
  EXPECT_TRUE(rounded_bytes.equals(rounded));
  EXPECT_FALSE(rounded.equals(list));
  halves.add(rounded);
  EXPECT_EQ(halves.value(), list.value() + rounded.value());
  // An infinity against zero counts for nothing, a NaN counts.
  a[17] = std::numeric_limits<double>::infinity(), b[17] = 0;
  Dot infinite;
  infinite.add(a, b, 2);
  EXPECT_TRUE(std::isfinite(infinite.value()));
  a[17] = std::numeric_limits<double>::quiet_NaN();
  Dot nan;
  nan.add(a, b, 2);
  EXPECT_TRUE(std::isnan(nan.value()));
}

TEST(Adjoint, ProbesReadTheTable) {
  for (int ranks : {2, 3, 4, 8})
    for (const Mistake& m : mistakes()) {
      SCOPED_TRACE(std::string(m.name) + ", p = " + std::to_string(ranks));
      Play play(contract(large_shape(ranks, m.square), on_tp(m.from), on_tp(m.to)),
                "transport=mpi tp=" + std::to_string(ranks), m.forward, m.backward);
      const CheckResult r = play.judge("adjoint");
      EXPECT_GE(r.compared, 4);
      for (const char* probe :
           {"adjoint:probe:0", "adjoint:probe:1", "adjoint:probe:2", "adjoint:aligned"}) {
        const int shot = play.e.find_shot(probe);
        ASSERT_GE(shot, 0) << probe;
        const Pairing pairing = pairings_of(play.e, shot, {{}})[0];
        if (m.reads != other)
          EXPECT_NEAR(pairing.ratio(), read(m.reads, ranks), 1e-12) << probe;
        else
          EXPECT_FALSE(pairing.equal()) << probe;
      }
      EXPECT_EQ(replicas_named(r), m.replicas_part);
      if (is_thirds(m, ranks)) continue;
      EXPECT_EQ(r.verdict, m.reads == one ? Verdict::passed : Verdict::failed) << r.note;
      if (m.reads == p) {
        EXPECT_NE(r.note.find("= tp"), std::string::npos) << r.note;
      }
      if (m.reads == one_over_p) {
        EXPECT_NE(r.note.find("= 1/tp"), std::string::npos) << r.note;
      }
    }
}

TEST(Adjoint, ExhaustiveReadsTheTable) {
  for (int ranks : {2, 3, 4, 8})
    for (const Mistake& m : mistakes()) {
      if (m.square && ranks == 8 && m.reads == other)
        continue;  // 8 x 8: blocks of one element, the swap is an involution
      SCOPED_TRACE(std::string(m.name) + ", p = " + std::to_string(ranks));
      Play play(contract(small_shape(ranks, m.square), on_tp(m.from), on_tp(m.to)),
                "tp=" + std::to_string(ranks), m.forward, m.backward);
      const CheckResult r = play.judge("adjoint");
      ASSERT_GE(play.e.find_shot("adjoint:basis:0"), 0);
      EXPECT_GE(play.e.find_shot("adjoint:own"), 0);
      if (is_thirds(m, ranks)) continue;
      EXPECT_EQ(r.verdict, m.reads == one ? Verdict::passed : Verdict::failed) << r.note;
      EXPECT_EQ(replicas_named(r), m.replicas_part);
      EXPECT_EQ(r.findings.size(), size_t(m.reads != one) + size_t(m.replicas_part));
      if (m.reads == p) {
        EXPECT_NE(r.note.find("= tp"), std::string::npos) << r.note;
      }
      if (m.reads == one_over_p) {
        EXPECT_NE(r.note.find("= 1/tp"), std::string::npos) << r.note;
      }
      if (m.reads == other) {
        EXPECT_EQ(r.note.find("= tp"), std::string::npos) << r.note;
      }
    }
}

// Unit vectors survive bf16, and so do small integers: the probe of the case's own fill sees it.
TEST(Adjoint, RoundedPayloadIsSeenOnNormalData) {
  const auto rounds = [](const Locals& y) {
    Locals g = all_reduce(y);
    for (auto& part : g)
      for (double& v : part) v = round_to(v, DType::bf16);
    return g;
  };
  for (const char* shape : {"small", "large"}) {
    const std::vector<int64_t> extents =
        shape == std::string("small") ? small_shape(4, false) : large_shape(4, false);
    for (const char* dtype : {"f64", "f32"}) {
      Play play(contract(extents, on_tp(I()), on_tp(R())),
                std::string("tp=4 fill=normal dtype=") + dtype, same(), rounds);
      const CheckResult r = play.judge("adjoint");
      ASSERT_EQ(r.verdict, Verdict::failed) << shape << " " << dtype;
      EXPECT_GT(r.ratio, 10);
      Play healthy(contract(extents, on_tp(I()), on_tp(R())),
                   std::string("tp=4 fill=normal dtype=") + dtype, same(), sum());
      const CheckResult fine = healthy.judge("adjoint");
      EXPECT_EQ(fine.verdict, Verdict::passed) << fine.note;
      EXPECT_LE(fine.ratio, 1);
    }
  }
}

TEST(Adjoint, HalvesStayExact) {
  const auto half = [](const Locals& x) { return scaled(x, 0.5); };
  Play play(contract({8, 9}, on_tp(P()), on_tp(I())), "tp=2", then(sum(), half), half);
  const CheckResult r = play.judge("adjoint");
  EXPECT_EQ(r.verdict, Verdict::passed) << r.note;
  EXPECT_TRUE(r.exact);
}

TEST(Adjoint, BlindRowsAreSeenByForward) {
  Play permuted(contract({8, 6}, on_tp(P()), on_tp(S(0))), "tp=4", then(reduce_scatter, next_owner),
                then(previous_owner, all_gather));
  EXPECT_EQ(permuted.judge("adjoint").verdict, Verdict::passed);
  EXPECT_EQ(permuted.judge_again("forward").verdict, Verdict::failed);
  Play mean_both(contract({8, 6}, on_tp(P()), on_tp(I())), "tp=4", mean(), divided());
  EXPECT_EQ(mean_both.judge("adjoint").verdict, Verdict::passed);
  EXPECT_EQ(mean_both.judge_again("forward").verdict, Verdict::failed);
}

TEST(Adjoint, NoWayBackReadsZero) {
  const auto nothing = [](const Locals& x) { return scaled(x, 0); };
  Play play(contract({4, 16}, on_tp(P()), on_tp(I())), "tp=2", sum(), nothing);
  const CheckResult r = play.judge("adjoint");
  ASSERT_EQ(r.verdict, Verdict::failed);
  EXPECT_NE(r.note.find("rhs/lhs = 0.000"), std::string::npos) << r.note;
  // Of probes that are as far off the first speaks.
  EXPECT_NE(r.findings[0].message.find("on 'adjoint:aligned'"), std::string::npos)
      << r.findings[0].message;
}

TEST(Adjoint, ExhaustiveNamesTheEntry) {
  auto play = gather(2, "", {4});
  play->run("adjoint");
  const int shot =
      play->e.find_shot("adjoint:basis:2");  // cotangent y[2] comes back to x[2], on rank 1
  ASSERT_EQ(play->get(1, true, 0, shot), 1);
  play->set(1, true, 0, 0, shot);
  const CheckResult r = play->judge_again("adjoint");
  ASSERT_EQ(r.verdict, Verdict::failed);
  EXPECT_EQ(r.findings[0].where, "x[2] with y[2]");
  EXPECT_EQ(r.findings[0].got, 0);
  EXPECT_EQ(r.findings[0].want, 1);
  EXPECT_EQ(r.findings[0].wrong, 1);
  EXPECT_EQ(r.note, "1 of 16 entries of B differ from A^T");
  // One that A lacks is no multiple of it; of entries that are as far off the first is named.
  play->set(1, true, 0, 1, shot);
  play->set(0, true, 0, 1, shot);
  play->set(0, true, 1, 1, shot);
  const CheckResult more = play->judge_again("adjoint");
  ASSERT_EQ(more.verdict, Verdict::failed);
  EXPECT_EQ(more.findings[0].where, "x[0] with y[2]");
  EXPECT_EQ(more.note, "2 of 16 entries of B differ from A^T");
}

// Of a result that is missing, or shorter than it must be, nothing is read.
TEST(Adjoint, AMissingOrShortResultLeavesAPairingOpen) {
  for (const bool gradient : {false, true}) {
    auto play = reduce(2, "transport=mpi");
    play->run("adjoint");
    const int shot = play->e.find_shot("adjoint:aligned");
    ASSERT_TRUE(pairings_of(play->e, shot, {{}})[0].complete);
    play->result(1, shot, gradient).bytes.resize(8);
    EXPECT_FALSE(pairings_of(play->e, shot, {{}})[0].complete) << gradient;
    std::erase_if(play->e.ranks[1].shots[size_t(shot)].results,
                  [&](const ResultTensor& t) { return t.gradient == gradient; });
    EXPECT_FALSE(pairings_of(play->e, shot, {{}})[0].complete) << gradient;
  }
}

// What both sides may be off: a sum that is held by all ranks counts once, each part of x by
// itself.
TEST(Adjoint, ABoundIsThatOfBothSides) {
  auto play = reduce(2, "transport=mpi dtype=f32 fill=normal");
  play->run("adjoint");
  const int shot = play->e.find_shot("adjoint:own");
  ASSERT_GE(shot, 0);
  const Feed& feed = play->e.shots[size_t(shot)].feeds[0];
  const Truth& t = play->e.truth(feed);
  const auto of_y = bound_of(play->e, feed, play->e.operands[1], false, t.outputs[0],
                             t.output_gauges[0]),
             of_x = bound_of(play->e, feed, play->e.operands[0], true, t.gradients[0],
                             t.gradient_gauges[0]);
  double due = 0;
  for (int64_t i = 0; i < 24; ++i) {
    due += of_y(i) * std::abs(t.cotangents[0].value[size_t(i)]);
    for (int64_t part : {i, 24 + i}) due += of_x(i) * std::abs(t.inputs[0].value[size_t(part)]);
  }
  const Pairing p = pairings_of(play->e, shot, {{}})[0];
  EXPECT_NEAR(double(p.allowed / pairing_scale(play->e)), due, 1e-12 * due);
  // And what F(.., 0, ..) may be off, for which the first shot stands here.
  const Feed& other = play->e.shots[0].feeds[0];
  const Truth& without = play->e.truth(other);
  const auto of_other = bound_of(play->e, other, play->e.operands[1], false, without.outputs[0],
                                 without.output_gauges[0]);
  for (int64_t i = 0; i < 24; ++i) due += of_other(i) * std::abs(t.cotangents[0].value[size_t(i)]);
  const Pairing less = pairings_of(play->e, shot, {{0, 0}})[0];
  EXPECT_NEAR(double(less.allowed / pairing_scale(play->e)), due, 1e-12 * due);
}

// In bf16 sums of 8 parts are beyond the integers that stay exact: the cotangent along them is
// shrunk to these, and has an entry with their sign wherever they have one. The other probes are
// drawn, each by itself.
TEST(Adjoint, ProbesAreOneAlongTheResultAndThreeDrawn) {
  auto play = reduce(8, "transport=mpi dtype=bf16", {40, 60});
  play->run("adjoint");
  std::set<uint64_t> seeds;
  for (const char* probe :
       {"adjoint:aligned", "adjoint:probe:0", "adjoint:probe:1", "adjoint:probe:2"})
    seeds.insert(play->e.shots.at(size_t(play->e.find_shot(probe))).feeds[0].seed);
  EXPECT_EQ(seeds.size(), 4u);
  const Feed& f = play->e.shots.at(size_t(play->e.find_shot("adjoint:aligned"))).feeds[0];
  const Whole along =
      play->e.contract->forward(*play->e.line, drawn_inputs(play->e, f), nullptr)[0];
  const std::vector<double>& y = f.given.at(0).value;
  const auto [least, most] = std::minmax_element(along.value.begin(), along.value.end());
  ASSERT_GT(std::max(-*least, *most), 2 * double(f.range));
  for (size_t i = 0; i < y.size(); ++i) {
    EXPECT_LE(std::abs(y[i]), double(f.range));
    EXPECT_EQ((y[i] > 0) - (y[i] < 0), (along.value[i] > 0) - (along.value[i] < 0)) << i;
  }
}

// A block of zeros that nobody handed in is no block of zeros.
TEST(Adjoint, AMissingBlockOfZerosIsMissed) {
  auto play = scatter_sum(2, "", {4, 3});
  EXPECT_EQ(play->judge("adjoint").verdict, Verdict::passed);
  int missing = 0;
  for (size_t s = 1; s < play->e.shots.size(); ++s) {
    auto& results = play->e.ranks[1].shots[s].results;
    if (play->e.shots[s].feeds[0].basis.empty()) continue;
    missing += int(std::erase_if(results, [](const ResultTensor& t) {
      return !t.gradient && std::all_of(t.bytes.begin(), t.bytes.end(),
                                        [](std::byte b) { return b == std::byte{}; });
    }));
  }
  EXPECT_GT(missing, 0);
  EXPECT_EQ(play->judge_again("adjoint").verdict, Verdict::failed);
}

TEST(Adjoint, BothSidesZeroIsVacuous) {
  const auto nothing = [](const Locals& x) {
    return Locals(x.size(), std::vector<double>(x[0].size()));
  };
  for (const char* transport : {"processes", "mpi"}) {
    Play play(contract({4}, on_tp(P()), on_tp(I())), std::string("tp=2 transport=") + transport,
              nothing, nothing);
    EXPECT_EQ(play.judge("adjoint").verdict, Verdict::vacuous) << transport;
  }
}

TEST(Adjoint, ANaNIsNoEquality) {
  for (const char* transport : {"processes", "mpi"}) {
    auto play = gather(2, std::string("transport=") + transport, {4});
    play->run("adjoint");
    const int shot = int(play->e.shots.size()) - 1;
    for (int r : {0, 1}) play->set(r, false, 0, nan_value, shot);
    EXPECT_EQ(play->judge_again("adjoint").verdict, Verdict::failed) << transport;
  }
}

TEST(Adjoint, RoundingDataAreHeldToTheBound) {
  // No integer range: probes on normal data. The pairing of sums in f32 is close, not equal.
  const auto in_float = [](const Locals& x) {
    std::vector<double> sum(x[0].size());
    for (const auto& part : x)
      for (size_t i = 0; i < sum.size(); ++i) sum[i] = float(float(sum[i]) + float(part[i]));
    return Locals(x.size(), sum);
  };
  for (const double fault : {1.0, 1.0 + 1.0 / 1024}) {
    Contract c = contract({16, 9}, on_tp(P()), on_tp(I()));
    c.integer_range = [](const Case&) { return std::optional<int64_t>(); };
    Play play(std::move(c), "tp=4 dtype=f32 fill=normal", in_float,
              [=](const Locals& x) { return scaled(x, fault); });
    const CheckResult r = play.judge("adjoint");
    EXPECT_EQ(r.verdict, fault == 1 ? Verdict::passed : Verdict::failed) << r.note;
    EXPECT_FALSE(r.exact);
    EXPECT_GT(r.ratio, 0);
  }
}

// Two inputs: y = x * w + b on one rank's worth of replicated data, elementwise; every rank alike.
TEST(Adjoint, SeveralInputsAreProbedApart) {
  const std::vector<int64_t> shape{3, 4};
  Contract c = contract(shape, on_tp(I()), on_tp(I()));
  c.operands = [=](const Case&) {
    return std::vector<Operand>{{"x", Operand::input, shape, on_tp(I())},
                                {"w", Operand::parameter, shape, on_tp(I())},
                                {"b", Operand::parameter, shape, on_tp(I())},
                                {"y", Operand::output, shape, on_tp(I())}};
  };
  c.forward = [=](const Case&, std::span<const Whole> in, std::vector<Gauge>*) {
    Whole y{shape, {}};
    for (size_t i = 0; i < 12; ++i)
      y.value.push_back(in[0].value[i] * in[1].value[i] + in[2].value[i]);
    return std::vector<Whole>{y};
  };
  Registry registry;
  registry.add(c);
  const Case line = parse("toy tp=2", registry);
  for (const int broken : {-1, 0, 1, 2}) {
    Evidence e = evidence_of(line, c);
    e.shots[0].feeds[0].range = 5;
    check_named("adjoint").plan(e, e.shots);
    e.ranks.resize(2);
    for (RankRecord& rank : e.ranks)
      for (const Shot& shot : e.shots) {
        ShotRecord record;
        record.status = ShotRecord::ok;
        std::vector<std::vector<double>> in;
        for (int k = 0; k < 3; ++k) in.push_back(drawn(e, shot.feeds[0], k, false).value);
        const std::vector<double> g = drawn(e, shot.feeds[0], 3, true).value;
        const auto put = [&](int step, int operand, bool gradient, auto value) {
          ResultTensor t{step,       operand, gradient,
                         DType::f64, shape,   std::vector<std::byte>(12 * 8)};
          for (size_t i = 0; i < 12; ++i)
            store(t.bytes.data() + 8 * i, DType::f64,
                  value(i) * (gradient && operand == broken ? 2 : 1));
          record.results.push_back(t);
        };
        put(0, 3, false, [&](size_t i) { return in[0][i] * in[1][i] + in[2][i]; });
        put(1, 0, true, [&](size_t i) { return g[i] * in[1][i]; });
        put(1, 1, true, [&](size_t i) { return g[i] * in[0][i]; });
        put(1, 2, true, [&](size_t i) { return g[i]; });
        rank.shots.push_back(std::move(record));
      }
    const CheckResult r = check_named("adjoint").judge(e);
    if (broken < 0) {
      EXPECT_EQ(r.verdict, Verdict::passed) << r.note;
      EXPECT_EQ(r.compared, 3 * 4);
      // Without F(.., 0, ..) nothing is said of A x.
      for (RankRecord& rank : e.ranks)
        rank.shots[size_t(e.find_shot("adjoint:aligned:without w"))].results.clear();
      const CheckResult missing = check_named("adjoint").judge(e);
      ASSERT_EQ(missing.findings.size(), 1u);
      EXPECT_EQ(missing.findings[0].tensor, "gradient of w");
      EXPECT_EQ(missing.findings[0].message,
                "expected results of every rank on 'adjoint:aligned', met none of some");
      continue;
    }
    ASSERT_EQ(r.verdict, Verdict::failed);
    ASSERT_EQ(r.findings.size(), 1u);
    EXPECT_EQ(r.findings[0].tensor, "gradient of " + e.operands[size_t(broken)].name);
    EXPECT_EQ(r.findings[0].got, 2 * r.findings[0].want);
  }
}

// ---- Replicas ----

TEST(Replica, HealthyAndOneFlippedBit) {
  auto play = reduce(4);
  EXPECT_EQ(play->judge("replica").verdict, Verdict::passed);
  ResultTensor& t = play->result(3, 0, false);
  t.bytes.data()[8 * 9] ^= std::byte{1};
  const CheckResult r = play->judge_again("replica");
  ASSERT_EQ(r.verdict, Verdict::failed);
  EXPECT_EQ(r.findings[0].ranks, std::vector<int>{3});
  EXPECT_EQ(r.findings[0].where, "y[1,3]");
  EXPECT_EQ(r.findings[0].wrong, 1);
}

// One place is shown, the first that differs; how far others are off is said without a second one.
TEST(Replica, ShowsTheFirstElementThatDiffers) {
  auto play = reduce(4);
  play->run("replica");
  play->set(3, false, 2, play->get(0, false, 2) + 1);
  play->set(3, false, 7, play->get(0, false, 7) + 50);
  const Finding f = play->judge_again("replica").findings.at(0);
  EXPECT_EQ(f.where, "y[0,2]");
  EXPECT_EQ(f.got, f.want + 1);
  EXPECT_EQ(f.error, 50);
  EXPECT_EQ(
      f.message,
      "rank 3 parts from rank 0 (want; got: rank 3), the first that differs, others by up to 50");
  play->set(3, false, 7, play->get(0, false, 7) - 1);
  EXPECT_EQ(play->judge_again("replica").findings.at(0).message,
            "rank 3 parts from rank 0 (want; got: rank 3)");
}

// What was fetched agrees, what lies on the devices does not.
TEST(Replica, ADigestOfTheDeviceCounts) {
  auto play = reduce(4);
  play->run("replica");
  for (int r = 0; r < 4; ++r) play->result(r, 0, false).on_device = true;
  EXPECT_EQ(play->judge_again("replica").verdict, Verdict::passed);
  play->result(2, 0, false).lanes[1] = 1;
  const CheckResult r = play->judge_again("replica");
  ASSERT_EQ(r.verdict, Verdict::failed);
  EXPECT_EQ(r.findings[0].ranks, std::vector<int>{2});
  EXPECT_NE(r.findings[0].message.find("digests that the devices took"), std::string::npos);
  play->result(2, 0, false).on_device = false;  // none was taken there
  EXPECT_EQ(play->judge_again("replica").verdict, Verdict::passed);
}

TEST(Replica, RankZeroCanBeTheOneThatParts) {
  auto play = reduce(4);
  play->run("replica");
  play->set(0, false, 0, 1e9);
  EXPECT_EQ(play->judge_again("replica").findings.at(0).ranks, std::vector<int>{0});
}

TEST(Replica, ComparesBytes) {
  auto play = reduce(2);
  play->run("replica");
  for (int r : {0, 1}) play->set(r, false, 0, nan_value);
  EXPECT_EQ(play->judge_again("replica").verdict,
            Verdict::passed);  // equal bits; forward names the NaN
  play->set(0, false, 1, 0.0);
  play->set(1, false, 1, -0.0);
  EXPECT_EQ(play->judge_again("replica").verdict, Verdict::failed);
}

// Each rank sums from its own part on: silent on integers, seen by the shot on normal data.
TEST(Replica, OwnOrderOfSummationNeedsRoundingAndThreeRanks) {
  const auto own_order = [](const Locals& x) {
    Locals y;
    for (size_t r = 0; r < x.size(); ++r) {
      std::vector<double> sum(x[0].size());
      for (size_t k = 0; k < x.size(); ++k)
        for (size_t i = 0; i < sum.size(); ++i) sum[i] += x[(r + k) % x.size()][i];
      y.push_back(sum);
    }
    return y;
  };
  for (int ranks : {2, 3, 4, 8}) {
    Play play(contract({9, 7}, on_tp(P()), on_tp(I())), "tp=" + std::to_string(ranks), own_order,
              same());
    const CheckResult r = play.judge("replica");
    EXPECT_EQ(r.verdict, ranks == 2 ? Verdict::passed : Verdict::failed) << ranks;
    EXPECT_EQ(play.judge_again("forward").verdict, Verdict::passed);
    Play on_normal(contract({9, 7}, on_tp(P()), on_tp(I())),
                   "fill=normal tp=" + std::to_string(ranks), own_order, same());
    for (const char* silent : {"forward", "gradient", "adjoint", "repeat"})
      EXPECT_EQ(on_normal.judge(silent).verdict, Verdict::passed) << silent;
    if (ranks > 2) {
      EXPECT_NE(r.findings[0].message.find("replica:normal"), std::string::npos);
    }
  }
}

TEST(Replica, GroupsOfAnotherAxisDoNotCount) {
  const auto on_pairs = [](const Locals& x) {
    const Locals a = all_reduce({x[0], x[1]}), b = all_reduce({x[2], x[3]});
    return Locals{a[0], a[1], b[0], b[1]};
  };
  Play play(contract({2, 3}, on_tp(P()), on_tp(I())), "tp=2 dp=2", on_pairs, same());
  EXPECT_EQ(play.judge("replica").verdict, Verdict::passed);
  play.set(2, false, 0, 77777);
  const CheckResult r = play.judge_again("replica");
  ASSERT_EQ(r.verdict, Verdict::failed);
  EXPECT_EQ(r.findings[0].where.rfind("y[dp=1]", 0), 0u) << r.findings[0].where;
  play.set(0, false, 0, 77777);  // of two groups one finding
  const auto both = play.judge_again("replica").findings;
  ASSERT_EQ(both.size(), 1u);
  EXPECT_EQ(both[0].ranks, (std::vector<int>{1, 3}));  // of two copies the second is told
}

// Both ends of three ranks hold a copy: they are compared, and a pairing counts each half.
TEST(Replica, OfCopiesOnSomeRanksComparesThese) {
  const Layout ends = on_tp(I(ends_map()));
  Play play(contract({2, 3}, ends, ends), "tp=3", same(), same());
  EXPECT_EQ(play.judge("replica").verdict, Verdict::passed);
  play.set(2, false, 4, 77777);
  const CheckResult r = play.judge_again("replica");
  ASSERT_EQ(r.verdict, Verdict::failed);
  EXPECT_EQ(r.findings[0].ranks, std::vector<int>{2});
  EXPECT_EQ(r.findings[0].where, "y[1,1]");

  Play right(contract({2, 3}, ends, ends), "tp=3", same(), same());
  EXPECT_EQ(right.judge("adjoint").verdict, Verdict::passed);
  EXPECT_EQ(pairing_scale(right.e), 3 * 2);
  // Halves of one and thirds of another are whole in sixths.
  static const IndexMap three{"three", [](int64_t extent, int, int r) {
                                return std::vector<int64_t>(size_t(r < 3 ? extent : 0));
                              }};
  const Play both(contract({2, 3}, ends, on_tp(I(three))), "tp=4", same(), same());
  EXPECT_EQ(pairing_scale(both.e), 4 * 6);
  const auto doubled = [](const Locals& x) {
    Locals y = x;
    for (auto& local : y)
      for (double& v : local) v *= 2;
    return y;
  };
  Play wrong(contract({2, 3}, ends, ends), "tp=3", same(), doubled);
  const CheckResult twice = wrong.judge("adjoint");
  ASSERT_EQ(twice.verdict, Verdict::failed);
  EXPECT_EQ(twice.findings[0].got, 2 * twice.findings[0].want);
}

TEST(Replica, NotDueWhereNothingIsReplicated) {
  const auto play = std::make_unique<Play>(contract({4, 4}, on_tp(S(0)), on_tp(S(1))), "tp=2",
                                           rows_to_columns, columns_to_rows);
  EXPECT_FALSE(check_named("replica").due(*play->e.contract, *play->e.line, play->e.declared));
  EXPECT_TRUE(check_named("replica").due(*reduce(2)->e.contract, *reduce(2)->e.line, {}));
}

// ---- Draws ----

// On two ranks, one bit an element.
Contract with_masks(int64_t elements, int masks, const Layout& layout = on_tp(S(0))) {
  Contract c = contract({elements}, layout, layout);
  Key key{"draw", "0", "number of a draw"};
  key.low = 0, key.high = 1000;
  c.keys.push_back(key);
  c.draw_key = key.name;
  c.drawn = [masks](const Case&) {
    return std::vector<Drawn>(size_t(masks), Drawn{"mask", "y", {}, 1});
  };
  return c;
}

// 60 bits are due, and as many more as pairs of shards and masks have.
TEST(Draws, AreAsManyAsMakeAnyClashUnlikely) {
  const auto times = [](int masks, int64_t elements) {
    const Play play(with_masks(elements, masks), "tp=2", same(), same());
    return looks_at_draws(*play.e.contract, *play.e.line).at(0).times;
  };
  EXPECT_EQ(times(1, 20), 6);
  EXPECT_EQ(times(4, 20), 7);
  EXPECT_EQ(times(1, 59), 3);  // the smaller shard has 29
}

// The number of a draw goes round in the range of its key; what a look gives is given whole.
TEST(Draws, AreFedByTheirNumberAndWithWhatIsGiven) {
  const Play play(with_masks(4, 1), "tp=2 draw=999", same(), same());
  auto look = looks_at_draws(*play.e.contract, *play.e.line).at(0);
  look.drawn.given = {{"x", 0.5}};
  for (const auto& [k, number] : {std::pair{1, "1000"}, {2, "0"}}) {
    const Feed f = feed_of_draw(*play.e.contract, *play.e.line, look, k, {});
    using Keys = std::vector<std::pair<std::string, std::string>>;
    EXPECT_EQ(f.keys, (Keys{{"draw", number}}));
    ASSERT_EQ(f.given.size(), 1u);
    EXPECT_EQ(f.given[0].operand, 0);
    EXPECT_EQ(f.given[0].value, std::vector<double>(4, 0.5));
  }
}

// The draws of each rank in turn, as it recorded them.
judging::Agreement of_draws(Play& play,
                            const std::vector<std::vector<std::vector<double>>>& draws) {
  play.e.ranks.assign(draws.size(), RankRecord{});
  for (size_t r = 0; r < draws.size(); ++r) {
    auto& results = play.e.ranks[r].shots.emplace_back().results;
    for (const auto& draw : draws[r]) {
      results.push_back(result_of(1, draw));
      results.back().step = int(results.size()) - 1;
    }
  }
  return judging::same_draws(play.e, looks_at_draws(*play.e.contract, *play.e.line), 0, 0);
}

// Of 30 and 29 elements the 29 count that both have, in each of three draws; one that differs is
// enough to tell shards apart.
TEST(Draws, OfUnevenShardsAreComparedWhereBothHaveThem) {
  Play play(with_masks(59, 1), "tp=2", same(), same());
  std::vector<std::vector<double>> longer, shorter;
  for (int k = 0; k < 3; ++k) longer.emplace_back(30, k), shorter.emplace_back(29, k);
  const auto equal = of_draws(play, {longer, shorter});
  EXPECT_EQ(equal.compared, 3 * 29);
  ASSERT_EQ(equal.findings.size(), 1u);
  EXPECT_EQ(equal.findings[0].wrong, 29);
  EXPECT_EQ(equal.findings[0].ranks, (std::vector<int>{0, 1}));
  shorter[2][28] = -1;
  EXPECT_TRUE(of_draws(play, {longer, shorter}).findings.empty());
}

// Rows of shards on dp, copies on tp: in the first draw rank 3 parts from 2, in the second 1 from 0
// as well. That is told once, with all ranks in order.
TEST(Draws, CopiesThatPartAreToldWithTheirRanksOfAllDraws) {
  Play play(with_masks(62, 1, {{Axis::tp, I()}, {Axis::dp, S(0)}}), "tp=2 dp=2", same(), same());
  ASSERT_EQ(looks_at_draws(*play.e.contract, *play.e.line).at(0).times, 2);
  std::vector<std::vector<std::vector<double>>> draws;
  for (int r = 0; r < 4; ++r)
    draws.push_back(
        {std::vector<double>(31, r < 2 ? 1 : 2), std::vector<double>(31, r < 2 ? 3 : 4)});
  EXPECT_TRUE(of_draws(play, draws).findings.empty());
  draws[3][0][5] = draws[3][1][5] = draws[1][1][5] = 9;
  const auto parted = of_draws(play, draws).findings;
  ASSERT_EQ(parted.size(), 1u);
  EXPECT_EQ(parted[0].ranks, (std::vector<int>{1, 3}));
  // Shards that repeat one another are told by the axes on which they lie apart.
  for (auto& of_rank : draws) of_rank = {std::vector<double>(31, 1), std::vector<double>(31, 2)};
  const auto repeated = of_draws(play, draws).findings;
  ASSERT_EQ(repeated.size(), 1u);
  EXPECT_EQ(repeated[0].ranks, (std::vector<int>{0, 1, 2, 3}));
  EXPECT_NE(repeated[0].message.find("shards on dp must differ"), std::string::npos)
      << repeated[0].message;
  Play grid(with_masks(124, 1, {{Axis::dp, S(0)}, {Axis::tp, S(0)}}), "tp=2 dp=2", same(), same());
  for (auto& of_rank : draws) of_rank.assign(3, std::vector<double>(31, 1));
  for (auto& of_rank : draws) of_rank[1][0] = 2, of_rank[2][0] = 3;
  const auto first = of_draws(grid, draws).findings;
  ASSERT_EQ(first.size(), 1u);
  EXPECT_NE(first[0].message.find("shards on tp must differ: from here on rank 1 repeats what rank "
                                  "0 drew, in 3 draws (by chance: 2^-93)"),
            std::string::npos)
      << first[0].message;
}

// Eight draws of eight bits: equal on both ranks they are no chance, one of them eight times is.
TEST(Draws, OneThatIsGivenManyTimesIsEvidenceOnce) {
  Play play(with_masks(16, 1), "tp=2", same(), same());
  ASSERT_EQ(looks_at_draws(*play.e.contract, *play.e.line).at(0).times, 8);
  for (const bool differ : {true, false}) {
    std::vector<std::vector<double>> draws;
    for (int k = 0; k < 8; ++k) draws.emplace_back(8, differ ? k : 0);
    EXPECT_EQ(of_draws(play, {draws, draws}).findings.size(), differ ? 1u : 0u);
  }
  // Of four masks seven draws of ten bits are due, and six that differ are said to be six.
  Play four(with_masks(20, 4), "tp=2", same(), same());
  std::vector<std::vector<double>> draws;
  for (int k = 0; k < 28; ++k) draws.emplace_back(10, std::min(k % 7, 5));
  const auto findings = of_draws(four, {draws, draws}).findings;
  ASSERT_EQ(findings.size(), 4u);
  EXPECT_NE(findings[0].message.find("in 6 draws (by chance: 2^-60)"), std::string::npos)
      << findings[0].message;
}

// ---- Ledger ----

LedgerEntry made(int rank, bool backward = false) {
  LedgerEntry c;
  c.op = Op::all_reduce;
  c.reduce = Reduce::sum;
  c.count = 24;
  c.label = "tp";
  c.members = {rank / 2 * 2, rank / 2 * 2 + 1};
  c.phase = backward ? Phase::backward : Phase::forward;
  c.number = 1;
  c.site = "toy.cpp:7";
  return c;
}

std::unique_ptr<Play> with_traffic(std::vector<Traffic> due) {
  Contract c = contract({4, 6}, on_tp(P()), on_tp(I()));
  c.traffic = [due](const Case&, const std::string&, int) { return due; };
  auto play = std::make_unique<Play>(std::move(c), "tp=2 dp=2", same(), same());
  play->run("ledger");
  for (int r = 0; r < 4; ++r) play->e.ranks[size_t(r)].shots[0].ledger = {made(r)};
  return play;
}
const Traffic one_all_reduce{Op::all_reduce, Reduce::sum, "tp", false, 24, DType::f64, 0, -1};

// A kernel that does not do what the line asks for is led to the word that says so.
TEST(Ledger, OfASubjectThatDoesNoRingsTheWayOutIsNamed) {
  auto play = with_traffic({{Op::shift, Reduce::none, "tp", false, 24, DType::f64, 1, -1}});
  const auto means = [&](const char* overlap, const char* subject) {
    Case line = *play->e.line;
    line.keys.emplace_back("overlap", overlap);
    line.defaults.push_back("off");
    line.set("subject", subject);
    const Case* const before = std::exchange(play->e.line, &line);
    const std::string told = play->judge_again("ledger").findings.at(0).means;
    play->e.line = before;
    return told;
  };
  const char* const way = "does no overlap=ring says so: declared.without = {\"overlap\"}";
  EXPECT_NE(means("ring", "mine").find(way), std::string::npos) << means("ring", "mine");
  EXPECT_EQ(means("ring", "").find("without"), std::string::npos);
  EXPECT_EQ(means("off", "mine").find("without"), std::string::npos);
}

TEST(Ledger, DueCallsPass) {
  const CheckResult r = with_traffic({one_all_reduce})->judge_again("ledger");
  EXPECT_EQ(r.verdict, Verdict::passed) << (r.findings.empty() ? "" : r.findings[0].message);
  // 24 x 8 B on rank 0; two rings of 2 (p-1) N each.
  EXPECT_EQ(r.note, "1 call and 192 B on rank 0, 768 B in rings over all ranks");
  // A group of one makes no call.
  Traffic alone = one_all_reduce;
  alone.label = "cp";
  EXPECT_EQ(with_traffic({one_all_reduce, alone})->judge_again("ledger").verdict, Verdict::passed);
}

// The own row of an exchange stays: of 2 x 12 elements each of four ranks sends 96 B.
TEST(Ledger, AnExchangeCountsWhatGoesToOthers) {
  auto play = with_traffic({{Op::all_to_all, Reduce::none, "tp", false, 24, DType::f64, 0, -1}});
  for (RankRecord& rank : play->e.ranks) {
    LedgerEntry& c = rank.shots[0].ledger[0];
    c.op = Op::all_to_all, c.reduce = Reduce::none;
    c.send = c.recv = {12, 12};
  }
  EXPECT_EQ(play->judge_again("ledger").note,
            "1 call and 192 B on rank 0, 384 B in rings over all ranks");
}

TEST(Ledger, EndsOfAnAxisAreItsFirstAndLastRank) {
  Contract c = contract({4, 6}, on_tp(P()), on_tp(I()));
  c.traffic = [](const Case&, const std::string&, int) {
    Traffic ends = one_all_reduce;
    ends.label = "tp:ends";
    return std::vector<Traffic>{ends};
  };
  const Play play(std::move(c), "tp=4", same(), same());
  EXPECT_EQ(judging::due_calls(play.e, 0, false).at(0).members, (std::vector<int>{0, 3}));
}

TEST(Ledger, NamesTheFirstPropertyThatDiffers) {
  struct Row {
    const char* word;
    std::function<void(LedgerEntry&)> change;
  };
  const Row rows[] = {
      {"another operation", [](LedgerEntry& c) { c.op = Op::reduce_scatter; }},
      {"another reduction", [](LedgerEntry& c) { c.reduce = Reduce::avg; }},
      {"another group", [](LedgerEntry& c) { c.label = "dp"; }},
      {"another members", [](LedgerEntry& c) { std::swap(c.members[0], c.members[1]); }},
      {"another dtype", [](LedgerEntry& c) { c.dtype = DType::bf16; }},
      {"another count", [](LedgerEntry& c) { c.count = 23; }},
  };
  for (const Row& row : rows) {
    auto play = with_traffic({one_all_reduce});
    row.change(play->e.ranks[3].shots[0].ledger[0]);
    const CheckResult r = play->judge_again("ledger");
    ASSERT_EQ(r.verdict, Verdict::failed) << row.word;
    EXPECT_NE(r.findings[0].message.find(row.word), std::string::npos) << r.findings[0].message;
    EXPECT_NE(r.findings[0].message.find("toy.cpp:7"), std::string::npos) << r.findings[0].message;
    EXPECT_EQ(r.findings[0].ranks, std::vector<int>{3});
  }
}

TEST(Ledger, ExtraAndMissingCalls) {
  auto play = with_traffic({one_all_reduce});
  play->e.ranks[1].shots[0].ledger.push_back(made(1));
  EXPECT_NE(play->judge_again("ledger").findings.at(0).message.find(
                "expected no further call of forward"),
            std::string::npos);
  play = with_traffic({one_all_reduce});
  play->e.ranks[1].shots[0].ledger.clear();
  EXPECT_NE(play->judge_again("ledger").findings.at(0).message.find("met the end of forward"),
            std::string::npos);
  play = with_traffic({});  // silence is due
  EXPECT_EQ(play->judge_again("ledger").verdict, Verdict::failed);
  for (RankRecord& r : play->e.ranks) r.shots[0].ledger.clear();
  EXPECT_EQ(play->judge_again("ledger").verdict, Verdict::passed);
}

// One call too many, or too few, in front of the due ones: that one is told, and not the next as
// another reduction.
TEST(Ledger, ACallInFrontOfTheDueOnesIsOneMore) {
  auto play = with_traffic({one_all_reduce});
  LedgerEntry first = made(1);
  first.reduce = Reduce::max;
  auto& calls = play->e.ranks[1].shots[0].ledger;
  calls.insert(calls.begin(), first);
  Finding f = play->judge_again("ledger").findings.at(0);
  EXPECT_NE(f.message.find(", one call more; 2 of 1 calls"), std::string::npos) << f.message;
  EXPECT_NE(f.means.find("a call that is not due"), std::string::npos) << f.means;
  Traffic largest = one_all_reduce;
  largest.reduce = Reduce::max;
  play = with_traffic({largest, one_all_reduce});
  f = play->judge_again("ledger").findings.at(0);
  EXPECT_NE(f.message.find(", one call less; 1 of 2 calls"), std::string::npos) << f.message;
  EXPECT_EQ(f.means, "a call that is due was not made");
}

// As of a pipeline that runs another schedule: who has nothing to send gives an empty block.
TEST(Ledger, ShiftsInAnotherOrderAreAnotherScheduleAndNoOtherCount) {
  const auto shift = [](int64_t count, int hop) {
    return Traffic{Op::shift, Reduce::none, "tp", false, count, DType::f64, hop, -1};
  };
  const auto finding = [&](std::vector<std::pair<int64_t, int>> calls) {
    auto play = with_traffic({shift(24, 1), shift(12, -1)});
    for (int rank = 0; rank < 4; ++rank) {
      auto& ledger = play->e.ranks[size_t(rank)].shots[0].ledger;
      ledger.clear();
      for (const auto& [count, hop] : calls) {
        LedgerEntry e = made(rank);
        e.op = Op::shift, e.reduce = Reduce::none, e.count = count, e.hop = hop;
        e.number = int(ledger.size()) + 1, e.to = e.from = rank ^ 1;
        ledger.push_back(e);
      }
    }
    return play->judge_again("ledger").findings.at(0);
  };
  const Finding same = finding({{12, -1}, {0, 1}, {24, 1}});
  EXPECT_NE(same.message.find(", the same payloads in another order; 3 of 2 calls"),
            std::string::npos)
      << same.message;
  EXPECT_NE(same.means.find("another schedule"), std::string::npos) << same.means;
  const Finding less = finding({{12, -1}, {0, 1}, {23, 1}});
  EXPECT_NE(less.message.find(", another count"), std::string::npos) << less.message;
}

TEST(Ledger, OrderWithinAPhaseAndPhasesApart) {
  Traffic gather = one_all_reduce;
  gather.op = Op::all_gather, gather.reduce = Reduce::none, gather.backward = true;
  auto play = with_traffic({one_all_reduce, gather});
  for (int r = 0; r < 4; ++r) {
    LedgerEntry c = made(r, true);
    c.op = Op::all_gather, c.reduce = Reduce::none;
    play->e.ranks[size_t(r)].shots[0].ledger.push_back(c);
  }
  EXPECT_EQ(play->judge_again("ledger").verdict, Verdict::passed);
  for (RankRecord& r : play->e.ranks)
    for (LedgerEntry& c : r.shots[0].ledger) c.phase = Phase::forward;
  EXPECT_EQ(play->judge_again("ledger").findings.size(),
            2u);  // forward has one too many, backward none
}

// What a kernel puts off to `finish` belongs to its backward.
TEST(Ledger, CallsOfFinishAreThoseOfTheBackward) {
  Traffic due = one_all_reduce;
  due.backward = true;
  auto play = with_traffic({due});
  for (RankRecord& r : play->e.ranks) r.shots[0].ledger[0].phase = Phase::finish;
  EXPECT_EQ(play->judge_again("ledger").verdict, Verdict::passed);
}

TEST(Ledger, CallsOfOneRankAreDueOfIt) {
  std::vector<Traffic> due(4, one_all_reduce);
  for (int r = 0; r < 4; ++r) due[size_t(r)].rank = r;
  EXPECT_EQ(with_traffic(due)->judge_again("ledger").verdict, Verdict::passed);
  due.pop_back();
  EXPECT_EQ(with_traffic(due)->judge_again("ledger").findings.at(0).ranks, std::vector<int>{3});
}

// Of two ranks each is the other's neighbour both ways, and every rank has a root.
TEST(Ledger, HopsAndRootsAreTheLines) {
  for (const auto& [op, word] :
       {std::pair(Op::shift, "another hop"), {Op::broadcast, "another root"}})
    for (const int hop : {1, 0}) {
      Traffic due = one_all_reduce;
      due.op = op, due.reduce = Reduce::none, due.hop = 1;
      auto play = with_traffic({due});
      for (int rank = 0; rank < 4; ++rank) {
        LedgerEntry& c = play->e.ranks[size_t(rank)].shots[0].ledger[0];
        c.op = op, c.reduce = Reduce::none, c.hop = hop, c.to = c.from = rank ^ 1;
      }
      const CheckResult r = play->judge_again("ledger");
      EXPECT_EQ(r.verdict, hop == 1 ? Verdict::passed : Verdict::failed) << word;
      if (hop != 1) {
        EXPECT_NE(r.findings.at(0).message.find(word), std::string::npos) << word;
      }
    }
}

TEST(Ledger, PeersOfAShift) {
  const Traffic shift{Op::shift, Reduce::none, "tp", false, 24, DType::f64, 1, -1};
  Contract c = contract({4, 6}, on_tp(P()), on_tp(I()));
  c.traffic = [=](const Case&, const std::string&, int) { return std::vector<Traffic>{shift}; };
  Play play(std::move(c), "tp=4", same(), same());
  play.run("ledger");
  const auto turn = [&](int hop) {
    for (int r = 0; r < 4; ++r) {
      LedgerEntry e = made(r);
      e.op = Op::shift, e.reduce = Reduce::none, e.members = {0, 1, 2, 3};
      e.hop = hop, e.to = (r + hop + 4) % 4, e.from = (r - hop + 4) % 4;
      play.e.ranks[size_t(r)].shots[0].ledger = {e};
    }
  };
  turn(1);
  EXPECT_EQ(play.judge_again("ledger").verdict, Verdict::passed);
  const auto parts_at = [&] {
    const CheckResult r = play.judge_again("ledger");
    EXPECT_NE(r.findings.at(0).message.find("another peers"), std::string::npos);
    return r.findings.at(0).ranks;
  };
  turn(-1);
  EXPECT_EQ(parts_at(), (std::vector<int>{0, 1, 2, 3}));
  // One of both is enough.
  turn(1);
  play.e.ranks[2].shots[0].ledger[0].to = 1;
  EXPECT_EQ(parts_at(), std::vector<int>{2});
  turn(1);
  play.e.ranks[3].shots[0].ledger[0].from = 0;
  EXPECT_EQ(parts_at(), std::vector<int>{3});
}

// Of 12 elements each three come and one goes back in between: at the end 24 wait.
TEST(Ledger, WhatWaitsForAnAnswerIsAtMostWhatIsDue) {
  const std::vector<int> hops{1, -1, 1, 1};
  for (const int64_t most : {24, 23}) {
    Contract c = contract({4, 6}, on_tp(P()), on_tp(I()));
    c.traffic = [=](const Case&, const std::string&, int) {
      std::vector<Traffic> due;
      for (int hop : hops)
        due.push_back({Op::shift, Reduce::none, "tp", false, 12, DType::f64, hop, -1});
      return due;
    };
    c.unanswered = [=](const Case&, int) { return Unanswered{"tp", 1, most, "too many"}; };
    Play play(std::move(c), "tp=2", same(), same());
    play.run("ledger");
    for (int r : {0, 1})
      for (int hop : hops) {
        auto& calls = play.e.ranks[size_t(r)].shots[0].ledger;
        LedgerEntry e = made(r);
        e.op = Op::shift, e.reduce = Reduce::none, e.count = 12, e.hop = hop;
        e.to = e.from = 1 - r, e.number = int(calls.size()) + 1;
        calls.push_back(e);
      }
    const CheckResult r = play.judge_again("ledger");
    ASSERT_EQ(r.verdict, most == 24 ? Verdict::passed : Verdict::failed);
    if (most == 24) continue;
    EXPECT_EQ(r.findings[0].means, "too many");
    EXPECT_EQ(r.findings[0].ranks, (std::vector<int>{0, 1}));
    EXPECT_NE(r.findings[0].message.find("at most 23 elements"), std::string::npos);
    EXPECT_NE(r.findings[0].message.find("met 24 behind"), std::string::npos);
  }
}

// Backward through a pipeline the first rank has nobody to send to: three payloads of 192 B travel.
TEST(Ledger, AShiftCountsWhatEachRankSends) {
  const auto sent_by = [](int rank) { return rank == 0 ? 0 : 24; };
  Contract c = contract({4, 6}, on_tp(P()), on_tp(I()));
  c.traffic = [=](const Case&, const std::string&, int rank) {
    return std::vector<Traffic>{
        {Op::shift, Reduce::none, "tp", false, sent_by(rank), DType::f64, -1, -1}};
  };
  Play play(std::move(c), "tp=4", same(), same());
  play.run("ledger");
  for (int r = 0; r < 4; ++r) {
    LedgerEntry e = made(r);
    e.op = Op::shift, e.reduce = Reduce::none, e.members = {0, 1, 2, 3};
    e.count = sent_by(r), e.hop = -1, e.to = (r + 3) % 4, e.from = (r + 1) % 4;
    play.e.ranks[size_t(r)].shots[0].ledger = {e};
  }
  EXPECT_EQ(play.judge_again("ledger").note,
            "1 call and 0 B on rank 0, 576 B in rings over all ranks");
}

TEST(Ledger, NotDueWhereTheSubjectCommunicatesByItself) {
  auto play = with_traffic({});
  Declared own;
  own.own_communication = true;
  EXPECT_FALSE(check_named("ledger").due(*play->e.contract, *play->e.line, own));
}

// Copies are compared in pieces, each of which counts; and so does the type.
TEST(Replica, ADifferenceInAnyPieceCounts) {
  auto play = gather(2, "", {1000, 1000});
  EXPECT_EQ(play->judge("replica").verdict, Verdict::passed);
  for (const int64_t at : {0, 500000, 999999}) {
    const double right = play->get(1, false, at);
    play->set(1, false, at, right + 1);
    EXPECT_EQ(play->judge_again("replica").verdict, Verdict::failed) << at;
    play->set(1, false, at, right);
  }
  play->result(1, 0, false).dtype = DType::i64;
  EXPECT_EQ(play->judge_again("replica").verdict, Verdict::failed);
}

TEST(Memory, OfEveryShotIsTold) {
  auto play = reduce(2);
  play->run("repeat");
  EXPECT_EQ(play->judge_again("memory").verdict, Verdict::passed);
  const int late = play->e.find_shot("repeat:delays");
  play->e.ranks[1].shots[size_t(late)].memory = {{"guard", "y", 1, 0, "seen"}};
  const CheckResult r = play->judge_again("memory");
  ASSERT_EQ(r.verdict, Verdict::failed);
  EXPECT_NE(r.findings[0].message.find("in 'repeat:delays'"), std::string::npos);
}

TEST(Repeat, AResultThatIsMissingIsNoEqualOne) {
  auto play = reduce(2);
  EXPECT_EQ(play->judge("repeat").verdict, Verdict::passed);
  auto& again = play->e.ranks[1].shots[size_t(play->e.find_shot("repeat"))].results;
  std::erase_if(again, [](const ResultTensor& t) { return t.gradient; });
  const CheckResult r = play->judge_again("repeat");
  ASSERT_EQ(r.verdict, Verdict::failed);
  EXPECT_NE(r.findings.at(0).message.find("expected a result of rank 1, met none"),
            std::string::npos)
      << r.findings.at(0).message;
}

// ---- Lockstep ----

TEST(Lockstep, SilentRanksKeepStep) {
  EXPECT_EQ(reduce(3)->judge("lockstep").verdict, Verdict::passed);
}

TEST(Lockstep, ReleasedShotsSpeak) {
  auto play = reduce(3);
  play->run("lockstep");
  for (RankRecord& r : play->e.ranks) {
    r.shots[0].status = ShotRecord::released;
    r.shots[0].cause = Released::mismatch;
    r.shots[0].text = "rank 1 calls all_gather, ranks 0, 2 call all_reduce";
  }
  const CheckResult r = play->judge_again("lockstep");
  ASSERT_EQ(r.verdict, Verdict::failed);
  ASSERT_EQ(r.findings.size(), 1u);  // one text, told once
  EXPECT_EQ(r.findings[0].ranks, (std::vector<int>{0, 1, 2}));
  EXPECT_NE(r.findings[0].message.find("rank 1 calls all_gather"), std::string::npos);
}

TEST(Lockstep, ARankThatThrewExplainsWhyTheOthersWaited) {
  auto play = reduce(3);
  play->run("lockstep");
  for (RankRecord& r : play->e.ranks) {
    r.shots[0].status = ShotRecord::released;
    r.shots[0].cause = Released::deadlock;
    r.shots[0].text = "ranks 0, 2 wait in call 1 of forward";
  }
  play->e.ranks[1].shots[0].status = ShotRecord::threw;
  const CheckResult r = play->judge_again("lockstep");
  ASSERT_EQ(r.findings.size(), 1u);
  EXPECT_EQ(r.findings[0].means, "rank 1 threw; the others waited for it");
  play->e.ranks[1].shots[0].status = ShotRecord::ok;
  EXPECT_NE(play->judge_again("lockstep").findings.at(0).means.find("every rank waits"),
            std::string::npos);
}

// A case out of time is nobody's fault, unless one of its shots says more.
TEST(Lockstep, AMismatchBesideAShotOutOfTimeIsAFailure) {
  auto play = reduce(2);
  play->run("repeat");
  const auto release = [&](size_t rank, size_t shot, Released::Cause cause, const char* text) {
    ShotRecord& record = play->e.ranks[rank].shots[shot];
    record.status = ShotRecord::released, record.cause = cause, record.text = text;
  };
  for (size_t rank : {0, 1}) release(rank, 2, Released::overdue, "released by overdue: 0.6 s");
  EXPECT_EQ(play->judge_again("lockstep").verdict, Verdict::hung);
  for (size_t rank : {0, 1}) release(rank, 1, Released::mismatch, "rank 1 calls all_gather");
  EXPECT_EQ(play->judge_again("lockstep").verdict, Verdict::failed);
}

TEST(Lockstep, RecordedListsAreComparedWithinAGroup) {
  auto play = with_traffic({});
  EXPECT_EQ(play->judge_again("lockstep").verdict, Verdict::passed);
  play->e.ranks[3].shots[0].ledger[0].count = 12;
  const CheckResult r = play->judge_again("lockstep");
  ASSERT_EQ(r.verdict, Verdict::failed);
  EXPECT_EQ(r.findings[0].ranks, (std::vector<int>{2, 3}));
  play = with_traffic({});
  play->e.ranks[1].shots[0].ledger.clear();
  EXPECT_EQ(play->judge_again("lockstep").verdict, Verdict::failed);
}

// But for how much each rank sends where ranks may send differently much.
TEST(Lockstep, EveryPropertyOfARecordedCallCounts) {
  const std::function<void(LedgerEntry&)> changes[] = {
      [](LedgerEntry& c) { c.op = Op::reduce_scatter; }, [](LedgerEntry& c) { c.hop = 1; },
      [](LedgerEntry& c) { c.reduce = Reduce::avg; }, [](LedgerEntry& c) { c.dtype = DType::bf16; },
      [](LedgerEntry& c) { c.count = 23; }};
  for (size_t i = 0; i < std::size(changes); ++i) {
    auto play = with_traffic({});
    changes[i](play->e.ranks[3].shots[0].ledger[0]);
    EXPECT_EQ(play->judge_again("lockstep").verdict, Verdict::failed) << i;
  }
  for (const Op op : {Op::shift, Op::all_to_all}) {
    auto play = with_traffic({});
    for (RankRecord& r : play->e.ranks) r.shots[0].ledger[0].op = op;
    play->e.ranks[3].shots[0].ledger[0].count = 23;
    EXPECT_EQ(play->judge_again("lockstep").verdict, Verdict::passed) << name(op);
  }
}

TEST(Lockstep, ACallThatOnlyTheLastMemberMadeIsSeen) {
  auto play = with_traffic({});
  play->e.ranks[2].shots[0].ledger.clear();
  const CheckResult r = play->judge_again("lockstep");
  ASSERT_EQ(r.verdict, Verdict::failed);
  ASSERT_EQ(r.findings.size(), 1u);
  EXPECT_EQ(r.findings[0].ranks, (std::vector<int>{2, 3}));
  EXPECT_NE(r.findings[0].message.find("rank 2 made no further call"), std::string::npos)
      << r.findings[0].message;
}

// ---- Memory ----

TEST(Memory, WhatRanksSawIsTold) {
  auto play = scatter_sum(4);
  EXPECT_EQ(play->judge("memory").verdict, Verdict::passed);
  play->e.ranks[2].shots[0].memory = {{"unwritten", "y", 3, 7, "never written"}};
  CheckResult r = play->judge_again("memory");
  ASSERT_EQ(r.verdict, Verdict::failed);
  EXPECT_EQ(r.findings[0].message, "3 elements never written");
  EXPECT_EQ(r.findings[0].where, "y[5,1]");  // local [1,1] of rows 4, 5
  play->e.ranks[3].shots[0].memory = {{"unwritten", "y", 3, 7, "never written"}};
  r = play->judge_again("memory");
  EXPECT_EQ(r.findings[0].ranks, (std::vector<int>{2, 3}));
  EXPECT_EQ(r.findings[0].holders, std::vector<int>{2});  // y[5,1] is not on rank 3
  play->e.ranks[3].shots[0].memory.clear();
  // What a call brings is there when it has been waited for: the last of that step is named.
  EXPECT_EQ(r.findings[0].means.find("wait"), std::string::npos) << r.findings[0].means;
  play->e.ranks[2].shots[0].ledger = {made(2), made(2, /*backward=*/true)};
  play->e.ranks[2].shots[0].ledger[1].site = "toy.cpp:9";
  for (const auto& [tensor, site] : {std::pair("y", "toy.cpp:7"), {"gradient of x", "toy.cpp:9"}}) {
    play->e.ranks[2].shots[0].memory = {{"unwritten", tensor, 3, 7, "never written"}};
    const std::string means = play->judge_again("memory").findings.at(0).means;
    for (const char* part : {"read before its wait", "all_reduce", site})
      EXPECT_NE(means.find(part), std::string::npos) << means;
  }
  for (const char* what : {"guard", "argument", "environment", "workspace"}) {
    play->e.ranks[2].shots[0].memory = {{what, "x", 1, 0, "seen"}};
    r = play->judge_again("memory");
    ASSERT_EQ(r.verdict, Verdict::failed) << what;
    EXPECT_EQ(r.findings[0].message, "seen");
    EXPECT_FALSE(r.findings[0].means.empty()) << what;
  }
}

// What is wrong of one tensor is told once, with all its ranks; a byte behind it is no element.
TEST(Memory, EachMistakeOfEachTensorIsToldOnce) {
  auto play = scatter_sum(4);
  play->run("memory");
  for (size_t r : {1, 2})
    play->e.ranks[r].shots[0].memory = {{"unwritten", "y", 3, 11, ""},
                                        {"unwritten", "gradient of x", 1, 47, ""},
                                        {"guard", "y", 1, 0, "seen"},
                                        {"guard", "y", 1, 8, "seen"}};
  const auto findings = play->judge_again("memory").findings;
  ASSERT_EQ(findings.size(), 3u);
  for (const Finding& f : findings) EXPECT_EQ(f.ranks, (std::vector<int>{1, 2})) << f.tensor;
  EXPECT_EQ(findings[0].where, "y[3,5]");  // the last of rows 2 and 3
  EXPECT_EQ(findings[0].wrong, 3);
  EXPECT_EQ(findings[0].holders, std::vector<int>{1});
  EXPECT_EQ(findings[1].where, "x[7,5]");  // of which every rank holds a copy
  EXPECT_EQ(findings[1].holders, (std::vector<int>{1, 2}));
  EXPECT_EQ(findings[2].message, "seen");
  EXPECT_EQ(findings[2].where, "");
}

// ---- Repeat and accumulate ----

TEST(Repeat, StateOfAnEarlierCall) {
  EXPECT_EQ(reduce(3)->judge("repeat").verdict, Verdict::passed);
  auto left_over = std::make_shared<Locals>();
  const auto adds_to_the_last = [left_over](const Locals& x) {
    Locals y = all_reduce(x);
    if (!left_over->empty())
      for (size_t r = 0; r < y.size(); ++r)
        for (size_t i = 0; i < y[r].size(); ++i) y[r][i] += (*left_over)[r][i];
    return *left_over = y;
  };
  Play play(contract({4, 6}, on_tp(P()), on_tp(I())), "tp=3", adds_to_the_last, same());
  const CheckResult r = play.judge("repeat");
  ASSERT_EQ(r.verdict, Verdict::failed);
  EXPECT_EQ(r.findings[0].tensor, "y");
  EXPECT_EQ(play.judge_again("forward").verdict, Verdict::passed);  // the first call was right
}

// The element that is shown is on one rank of a shard, on each rank of a copy.
TEST(Repeat, NamesTheRanksThatHoldTheElement) {
  auto shards = scatter_sum(4);
  shards->run("repeat");
  const int again = shards->e.find_shot("repeat:delays");
  ASSERT_GE(again, 0);
  for (int r = 0; r < 4; ++r)
    shards->set(r, false, 0, shards->get(r, false, 0, again) + (r == 2 ? 9 : 1), again);
  const Finding shard = shards->judge_again("repeat").findings.at(0);
  EXPECT_EQ(judging::same_results(shards->e, {again, 0, 0, 0}).spread, 9);
  EXPECT_EQ(shard.ranks, (std::vector<int>{0, 1, 2, 3}));
  EXPECT_EQ(shard.holders, std::vector<int>{2});
  auto copies = reduce(4);
  copies->run("repeat");
  for (int r : {1, 3}) copies->set(r, false, 5, copies->get(r, false, 5, again) + 1, again);
  copies->set(0, false, 6, copies->get(0, false, 6, again) + 0.5, again);
  Finding copy = copies->judge_again("repeat").findings.at(0);
  EXPECT_EQ(copy.ranks, (std::vector<int>{0, 1, 3}));
  EXPECT_EQ(copy.holders, (std::vector<int>{1, 3}));
  copies->set(0, false, 5, copies->get(1, false, 5, again), again);
  copy = copies->judge_again("repeat").findings.at(0);
  EXPECT_EQ(copy.holders, (std::vector<int>{0, 1, 3}));
}

TEST(Repeat, OneUlpUnderDelays) {
  auto play = reduce(3, "fill=normal dtype=f32");
  play->run("repeat");
  const int shot = play->e.find_shot("repeat:delays");
  ASSERT_GE(shot, 0);
  const float v = float(play->get(1, false, 4, shot));
  play->set(1, false, 4, std::nextafter(v, 2 * v), shot);
  CheckResult r = play->judge_again("repeat");
  ASSERT_EQ(r.verdict, Verdict::failed);
  EXPECT_NE(r.findings[0].means.find("order of arrival"), std::string::npos);
  play->e.declared.deterministic = false;  // then the bound decides, and the spread is told
  r = play->judge_again("repeat");
  EXPECT_EQ(r.verdict, Verdict::passed);
  EXPECT_NE(r.note.find("spread"), std::string::npos);
  play->set(1, false, 4, 2 * double(v), shot);
  EXPECT_EQ(play->judge_again("repeat").verdict, Verdict::failed);
}

// y = x with the gradient x dy, so that the backward needs what its forward has read. `state_for`
// is asked in each backward for the number of the forward whose state it gets.
CheckResult with_states(const std::function<size_t(size_t forwards, size_t backwards)>& state_for) {
  auto states = std::make_shared<std::vector<Locals>>();
  auto backwards = std::make_shared<size_t>(0);
  const auto saves = [=](const Locals& x) {
    states->push_back(x);
    return x;
  };
  const auto uses = [=](const Locals& y) {
    Locals g = y;
    const Locals& x = states->at(state_for(states->size(), (*backwards)++));
    for (size_t r = 0; r < g.size(); ++r)
      for (size_t i = 0; i < g[r].size(); ++i) g[r][i] *= x[r][i];
    return g;
  };
  Contract c = contract({4, 6}, on_tp(I()), on_tp(I()));
  c.backward = [](const Case&, std::span<const Whole> x, std::span<const Whole> y,
                  std::vector<Gauge>*) {
    Whole g = y[0];
    for (size_t i = 0; i < g.value.size(); ++i) g.value[i] *= x[0].value[i];
    return std::vector<Whole>{g};
  };
  return Play(std::move(c), "tp=3", saves, uses).judge("accumulate");
}

TEST(Accumulate, SavedStateThatIsOverwritten) {
  EXPECT_EQ(reduce(3)->judge("accumulate").verdict, Verdict::passed);
  // The backward uses the input of the forward that came last.
  const CheckResult last = with_states([](size_t forwards, size_t) { return forwards - 1; });
  ASSERT_EQ(last.verdict, Verdict::failed);
  EXPECT_EQ(last.findings[0].tensor, "gradient of x");
  EXPECT_NE(last.findings[0].message.find("B0"), std::string::npos);
  EXPECT_NE(last.findings[0].means.find("overwritten"), std::string::npos);
}

// Each of them is right with one forward in flight, and the queue and the pool with two, too. Words
// of the shots are counted: F0 B0, then F0 F1 F2 B1 B0 B2, then F1 B1 F2 B2.
TEST(Accumulate, StatesTakenInTheWrongOrder) {
  const size_t right[] = {0, 2, 1, 3, 4, 5};
  const auto changed_at = [&](std::vector<std::pair<size_t, size_t>> changes) {
    return with_states([&right, changes](size_t, size_t backwards) {
      for (const auto& [at, state] : changes)
        if (at == backwards) return state;
      return right[backwards];
    });
  };
  const auto wrong = [](const CheckResult& r) {
    std::string words;
    for (const Finding& f : r.findings) words += f.message.substr(f.message.find(" of F") - 2, 3);
    return words;
  };
  EXPECT_EQ(wrong(changed_at({})), "");
  EXPECT_EQ(wrong(changed_at({{1, 1}, {2, 2}})), "B0 B1 ");             // a queue
  EXPECT_EQ(wrong(changed_at({{1, 3}, {2, 2}, {3, 1}})), "B0 B1 B2 ");  // a stack
  EXPECT_EQ(wrong(changed_at({{2, 3}})), "B0 ");  // the oldest gives its place to the newest
  EXPECT_EQ(wrong(changed_at({{3, 2}})), "B2 ");  // the newest has no place
}

// Two ranks of which each made one call in the base shot, and two in F1 B1 F2 B2.
auto called_once_and_twice() {
  auto play = reduce(2);
  play->run("accumulate");
  const auto plain = size_t(play->e.find_shot("accumulate:sequential"));
  for (int r = 0; r < 2; ++r) {
    auto& shots = play->e.ranks[size_t(r)].shots;
    shots[0].ledger = {made(r)};
    shots[plain].ledger = {made(r), made(r)};
  }
  return play;
}

// As many calls, and yet others: the first that differs is told.
TEST(Accumulate, TellsTheCallThatIsAnother) {
  const auto play = called_once_and_twice();
  auto& ranks = play->e.ranks;
  const auto plain = size_t(play->e.find_shot("accumulate:sequential"));
  EXPECT_EQ(play->judge_again("accumulate").verdict, Verdict::passed);
  ranks[1].shots[plain].ledger[1].dtype = DType::bf16;
  const CheckResult other = play->judge_again("accumulate");
  ASSERT_EQ(other.verdict, Verdict::failed);
  EXPECT_NE(other.findings[0].message.find(
                "call 2 of the 2 of F1 B1 F2 B2 is another than that of F0 B0"),
            std::string::npos)
      << other.findings[0].message;
  EXPECT_NE(other.findings[0].message.find("x bf16"), std::string::npos)
      << other.findings[0].message;
  EXPECT_NE(other.findings[0].message.find("x f64"), std::string::npos)
      << other.findings[0].message;
  ranks[1].shots[plain].ledger.pop_back();
  const CheckResult fewer = play->judge_again("accumulate");
  EXPECT_NE(fewer.findings.at(0).message.find("makes 1 call, expected twice the 1 of F0 B0"),
            std::string::npos)
      << fewer.findings[0].message;
  EXPECT_NE(fewer.findings[0].message.find("no further call; there"), std::string::npos);
}

// How much a call moves is held against the base shot but where data decide it: a routing.
TEST(Accumulate, TellsAnotherCountWhereDataDoNotDecideIt) {
  const auto play = called_once_and_twice();
  auto& ranks = play->e.ranks;
  const auto plain = size_t(play->e.find_shot("accumulate:sequential"));
  for (RankRecord& r : ranks) r.shots[plain].ledger[1].count += 1;
  const auto verdict = [&] { return play->judge_again("accumulate").verdict; };
  EXPECT_EQ(verdict(), Verdict::failed);
  Operand& x = play->e.operands[0];
  x.made = [](uint64_t) { return std::vector<double>(); };
  EXPECT_EQ(verdict(), Verdict::passed);
  ranks[0].shots[plain].ledger[1].op = Op::all_gather;
  EXPECT_EQ(verdict(), Verdict::failed);
}

// One call a backward, or one a step: F0 B0, then two microbatches, whose gradients are their sum.
auto with_calls_of_a_step(bool once_a_step) {
  Contract c = of_microbatches(contract({4, 6}, on_tp(I()), on_tp(I())), "2");
  Traffic due = one_all_reduce;
  due.backward = true, due.once_a_step = once_a_step;
  c.traffic = [due](const Case&, const std::string&, int) { return std::vector{due}; };
  auto play = std::make_unique<Play>(std::move(c), "tp=2", same(), same());
  play->run("accumulate");
  for (int r = 0; r < 2; ++r) {
    auto& shots = play->e.ranks[size_t(r)].shots;
    const auto calls = [&](size_t n) { return std::vector(n, made(r, /*backward=*/true)); };
    shots[0].ledger = calls(1);
    shots[size_t(play->e.find_shot("accumulate:sequential"))].ledger = calls(2);
    for (const char* name : {"accumulate:step 1", "accumulate:step 2"}) {
      const int shot = play->e.find_shot(name);
      shots[size_t(shot)].ledger = calls(once_a_step ? 1 : 2);
      std::vector<double> sum(24);
      for (const Feed& feed : play->e.shots[size_t(shot)].feeds)
        for (size_t i = 0; i < 24; ++i) sum[i] += play->e.truth(feed).gradients[0].value[i];
      ResultTensor& result = play->result(r, shot, true, /*step=*/3);
      for (size_t i = 0; i < 24; ++i) store(result.bytes.data() + i * 8, DType::f64, sum[i]);
    }
  }
  return play;
}

TEST(Accumulate, HoldsTheCallsOfAStepToThoseOfItsMicrobatches) {
  for (bool once_a_step : {false, true}) {
    const auto play = with_calls_of_a_step(once_a_step);
    EXPECT_EQ(play->judge_again("accumulate").verdict, Verdict::passed) << once_a_step;
    auto& ledger = play->e.ranks[1].shots[size_t(play->e.find_shot("accumulate:step 2"))].ledger;
    ledger.push_back(ledger.back());
    const CheckResult more = play->judge_again("accumulate");
    ASSERT_EQ(more.verdict, Verdict::failed);
    EXPECT_EQ(more.findings[0].rank, 1);
    EXPECT_NE(more.findings[0].message.find(once_a_step
                                                ? "F0 F1 B0 B1 in step 2 makes 2 calls, due are 1"
                                                : "F0 F1 B0 B1 in step 2 makes 3 calls, due are 2"),
              std::string::npos)
        << more.findings[0].message;
    EXPECT_NE(more.findings[0].means.find("once a step"), std::string::npos);
    ledger.resize(ledger.size() - 2);
    const CheckResult fewer = play->judge_again("accumulate");
    ASSERT_EQ(fewer.verdict, Verdict::failed);
    EXPECT_NE(fewer.findings[0].means.find("leaves out a call"), std::string::npos);
  }
}

// Another type in a step than alone is a finding; sizes are none where data decide them.
TEST(Accumulate, HoldsTheCallsOfAStepToTheirKind) {
  const auto play = with_calls_of_a_step(true);
  LedgerEntry& call =
      play->e.ranks[0].shots[size_t(play->e.find_shot("accumulate:step 1"))].ledger[0];
  const auto verdict = [&] { return play->judge_again("accumulate").verdict; };
  call.dtype = DType::f32;
  EXPECT_EQ(verdict(), Verdict::failed);
  call.dtype = DType::f64, call.count += 1;
  EXPECT_EQ(verdict(), Verdict::failed);
  play->e.operands[0].made = [](uint64_t) { return std::vector<double>(); };
  EXPECT_EQ(verdict(), Verdict::passed);
}

// What is wrong with one forward and backward alone is told by `ledger`.
TEST(Accumulate, LeavesOtherCallsThanTheDueToTheLedger) {
  const auto play = with_calls_of_a_step(true);
  for (RankRecord& r : play->e.ranks)
    for (ShotRecord& shot : r.shots)
      for (LedgerEntry& call : shot.ledger) call.dtype = DType::f32;
  EXPECT_EQ(play->judge_again("accumulate").verdict, Verdict::passed);
}

// Of a microbatch the output is its own: the sum of the gradients does not show it.
TEST(Accumulate, HoldsEachOutputOfAStepToItsOwnTruth) {
  const auto play = with_calls_of_a_step(true);
  for (const char* step : {"accumulate:step 1", "accumulate:step 2"}) {
    const int shot = play->e.find_shot(step);
    const Shot& program = play->e.shots[size_t(shot)];
    ResultTensor& y = play->result(1, shot, false, judging::step_of(program, "F1"));
    const double right = load(y.bytes.data() + 40, DType::f64);
    store(y.bytes.data() + 40, DType::f64, right + 1);
    const CheckResult r = play->judge_again("accumulate");
    ASSERT_EQ(r.verdict, Verdict::failed) << step;
    EXPECT_EQ(r.findings[0].tensor, "y") << step;
    EXPECT_EQ(r.findings[0].where, "y[0,5]") << step;
    store(y.bytes.data() + 40, DType::f64, right);
  }
  EXPECT_EQ(play->judge_again("accumulate").verdict, Verdict::passed);
}

// Where the base shot is wrong by itself, whoever repeats it is no second culprit.
TEST(Accumulate, LeavesWhatIsWrongAloneToForward) {
  auto play = reduce(3);
  play->run("accumulate");
  play->set(1, false, 4, play->get(1, false, 4) + 1);
  EXPECT_EQ(play->judge_again("forward").verdict, Verdict::failed);
  EXPECT_EQ(play->judge_again("accumulate").verdict, Verdict::passed);
}

// Half of the second forward's tokens have no loss: ranks that have nothing to say.
TEST(Accumulate, SilencesHalfOfTheSecondFeed) {
  auto play = reduce(3);
  play->run("accumulate");
  for (const char* name : {"accumulate:interleaved", "accumulate:sequential"}) {
    const auto& feeds = play->e.shots[size_t(play->e.find_shot(name))].feeds;
    ASSERT_EQ(feeds.size(), 3u) << name;
    EXPECT_FALSE(feeds[0].silent_half || feeds[2].silent_half) << name;
    EXPECT_TRUE(feeds[1].silent_half) << name;
  }
}

// Wrong on other data than the base ones, state or no state.
TEST(Accumulate, WhatOnlyOtherDataShowMayBeNoStateAtAll) {
  auto base = std::make_shared<Locals>();
  const auto right_on_the_base = [base](const Locals& x) {
    if (base->empty()) *base = x;
    Locals y = all_reduce(x);
    if (x != *base)
      for (auto& local : y) local[0] += 1;
    return y;
  };
  Play play(contract({4, 6}, on_tp(P()), on_tp(I())), "tp=3", right_on_the_base, same());
  const CheckResult r = play.judge("accumulate");
  ASSERT_EQ(r.verdict, Verdict::failed);
  EXPECT_NE(r.findings[0].message.find("F1 of F1 B1 F2 B2"), std::string::npos)
      << r.findings[0].message;
  EXPECT_NE(r.findings[0].means.find("another seed"), std::string::npos) << r.findings[0].means;
}

TEST(Accumulate, EqualFeedsAreVacuous) {
  const auto blind = [](const Locals& x) {
    return Locals(x.size(), std::vector<double>(x[0].size(), 1));
  };
  Play play(contract({4, 6}, on_tp(P()), on_tp(I())), "tp=2", blind, blind);
  EXPECT_EQ(play.judge("accumulate").verdict, Verdict::vacuous);
}

// ---- Where no error is too large ----

// Sums of a thousand in bf16 that are added up in bf16.
std::unique_ptr<Play> without_bounds() {
  Contract c = of_microbatches(contract({4, 6}, on_tp(P()), on_tp(I())), "2");
  const auto forward = c.forward;
  c.forward = [forward](const Case& line, std::span<const Whole> in, std::vector<Gauge>* gauges) {
    auto y = forward(line, in, gauges);
    if (gauges) (*gauges)[0].terms = 1000;
    return y;
  };
  const auto backward = c.backward;
  c.backward = [backward](const Case& line, std::span<const Whole> in, std::span<const Whole> cot,
                          std::vector<Gauge>* gauges) {
    auto d = backward(line, in, cot, gauges);
    if (gauges) (*gauges)[0].terms = 1000;
    return d;
  };
  auto play = std::make_unique<Play>(std::move(c), "tp=2 dtype=bf16 fill=normal", sum(), same());
  play->e.declared.accumulates_in_storage = true;
  return play;
}

TEST(WithoutBounds, NothingIsSaid) {
  for (const char* check : {"forward", "gradient", "adjoint", "accumulate"})
    EXPECT_EQ(without_bounds()->judge(check).verdict, Verdict::vacuous) << check;
}

TEST(WithoutBounds, WhatIsMissingIsMissed) {
  const auto play = without_bounds();
  play->run("adjoint");
  for (const Shot& s : play->e.shots)
    if (s.feeds[0].fill == Fill::normal && s.name != "base")
      play->e.ranks[1].shots[size_t(play->e.find_shot(s.name))].results.clear();
  EXPECT_EQ(play->judge_again("adjoint").verdict, Verdict::failed);
}

// ---- Leak ----

TEST(Leak, IsBitwiseOrWithinWhatBothRunsMayBeOff) {
  Contract c = contract({4, 6}, on_tp(S(0)), on_tp(I()));
  c.sequences = [](const Case&, const Operand&) { return std::vector<int64_t>{0, 0, 1, 1}; };
  Play play(std::move(c), "tp=2 fill=normal", all_gather, own_block);
  // Of each sequence the other's 12 elements, on both ranks in y and on one in the gradient of x.
  EXPECT_EQ(play.judge("leak").compared, 2 * (2 * 12 + 12));
  const Truth& truth = play.e.truth(play.e.shots[0].feeds[0]);
  const double b = bound_of(play.e, play.e.operands[1], false, truth.outputs[0],
                            truth.output_gauges[0])(23),
               right = play.get(0, false, 23);
  const int loud = play.e.find_shot("leak:0");
  const auto off_by = [&](double bounds, bool bitwise) {
    for (int r : {0, 1}) play.set(r, false, 23, right + bounds * b, loud);
    play.e.declared.leak_bitwise = bitwise;
    return play.judge_again("leak");
  };
  const CheckResult bitwise = off_by(1.5, true), within = off_by(1.5, false);
  ASSERT_EQ(bitwise.verdict, Verdict::failed);
  EXPECT_EQ(bitwise.findings[0].ranks, (std::vector<int>{0, 1}));
  EXPECT_TRUE(bitwise.exact);
  EXPECT_EQ(within.verdict, Verdict::passed);
  EXPECT_EQ(within.ratio, std::abs(play.get(0, false, 23, loud) - right) / (2 * b));
  EXPECT_FALSE(within.exact);
  EXPECT_EQ(off_by(3, false).verdict, Verdict::failed);
}

// Two sequences are enough, and one beside padding; also where an input and a result tell them.
TEST(Leak, IsDueWhereSomethingCouldReachAnother) {
  const auto due = [](std::vector<int64_t> of_x, std::vector<int64_t> of_y) {
    Contract c = contract({4, 6}, on_tp(S(0)), on_tp(I()));
    c.sequences = [=](const Case&, const Operand& o) { return o.name == "x" ? of_x : of_y; };
    const Play play(std::move(c), "tp=2", all_gather, own_block);
    return check_named("leak").due(*play.e.contract, *play.e.line, {});
  };
  EXPECT_FALSE(due({0, 0, 0, 0}, {0, 0, 0, 0}));
  EXPECT_TRUE(due({0, 0, 1, 1}, {0, 0, 1, 1}));
  EXPECT_TRUE(due({0, 0, 0, -1}, {0, 0, 0, -1}));
  EXPECT_TRUE(due({0, 0, 0, 0}, {1, 1, 1, 1}));
  EXPECT_FALSE(check_named("leak").due(*gather(2)->e.contract, *gather(2)->e.line, {}));
}

// The backward takes a little of the cotangent two rows on, which is another sequence's: 2^-70 of
// it are below the last bit of any gradient, and 2^36 times that are not.
TEST(Leak, CotangentsAreLoudAsWell) {
  Contract c = contract({4, 6}, on_tp(S(0)), on_tp(I()));
  c.sequences = [](const Case&, const Operand&) { return std::vector<int64_t>{0, 0, 1, 1}; };
  Play play(std::move(c), "tp=2 fill=normal", all_gather, [](const Locals& y) {
    Locals mixed = y;
    for (size_t r = 0; r < y.size(); ++r)
      for (size_t i = 0; i < 24; ++i) mixed[r][i] += std::ldexp(y[r][(i + 12) % 24], -70);
    return own_block(mixed);
  });
  EXPECT_EQ(play.judge("gradient").verdict, Verdict::passed);
  const CheckResult r = play.judge("leak");
  ASSERT_EQ(r.verdict, Verdict::failed);
  EXPECT_EQ(r.findings[0].tensor, "gradient of x");
}

// Nothing that is made of padding is a number, and nothing else is made of it.
TEST(Leak, PaddingIsNoNumber) {
  Contract c = contract({4, 6}, on_tp(S(0)), on_tp(I()));
  c.sequences = [](const Case&, const Operand&) { return std::vector<int64_t>{0, 0, 0, -1}; };
  Play play(std::move(c), "tp=2", all_gather, own_block);
  EXPECT_EQ(play.judge("leak").verdict, Verdict::passed);
  // A row of padding is nobody's to write a sequence into.
  const int other = play.e.find_shot("leak:0");
  const double before = play.get(1, false, 20, other);
  play.set(1, false, 20, before + 1, other);
  EXPECT_EQ(play.judge_again("leak").verdict, Verdict::failed);
  play.set(1, false, 20, before, other);
  EXPECT_EQ(play.judge_again("leak").verdict, Verdict::passed);
  const int loud = play.e.find_shot("leak:padding");
  ASSERT_EQ(play.e.shots[size_t(loud)].feeds[0].given.size(), 2u);  // x and the cotangent of y
  for (const auto& given : play.e.shots[size_t(loud)].feeds[0].given)
    for (size_t i = 0; i < 24; ++i) EXPECT_EQ(std::isnan(given.value[i]), i >= 18) << i;
  play.set(1, false, 7, nan_value, loud);  // 0 times padding
  EXPECT_EQ(play.judge_again("leak").verdict, Verdict::failed);
}

// ---- Mask and coverage ----

// What a query makes of its scores and of the values of all keys; as it stands, of none.
struct Attended {
  double o = 0, lse = -inf_value;
};
using Numbers = std::vector<double>;
using Query = std::function<Attended(int64_t query, const Numbers& scores, const Numbers& values)>;

ShotRecord answered(const Evidence& e, const Shot& shot, int64_t first_query, const Query& attend) {
  const Feed& feed = shot.feeds[0];
  const Numbers q = drawn(e, feed, 0, false).value, k = drawn(e, feed, 1, false).value,
                v = drawn(e, feed, 2, false).value;
  Numbers o, lse;
  for (int64_t query = first_query; query < first_query + 3; ++query) {
    Numbers scores;
    for (double key : k) scores.push_back(q[size_t(query)] * key);
    const Attended a = attend(query, scores, v);
    o.push_back(a.o), lse.push_back(a.lse);
  }
  ShotRecord record;
  record.status = ShotRecord::ok;
  record.results = {result_of(3, o, e.dtype_of(e.operands[3])),
                    result_of(4, lse, e.dtype_of(e.operands[4]))};
  return record;
}

// A sequence of 5 queries and keys, and one of padding: 3 of each on either rank.
CheckResult attended(const std::string& check, const Query& attend, const std::string& more = "") {
  static const Registry registry = [] {
    Registry r;
    family_attention(r);
    return r;
  }();
  const Case line =
      parse("attention_ring cp=2 docs=5 heads=1 kv_heads=1 head_dim=1 " + more, registry);
  const Contract& c = registry.contract("attention_ring");
  Evidence e = evidence_of(line, c);
  Truth truth;
  e.truth = [&](const Feed& feed) -> const Truth& {
    truth.inputs.clear();
    for (int i = 0; i < e.inputs; ++i) truth.inputs.push_back(drawn(e, feed, i, false));
    truth.outputs = c.forward(line, truth.inputs, &truth.output_gauges);
    return truth;
  };
  e.shots[0].feeds[0].fill = fill_of(line);
  check_named(check).plan(e, e.shots);
  e.ranks.resize(2);
  for (size_t rank : {0, 1})
    for (const Shot& shot : e.shots)
      e.ranks[rank].shots.push_back(answered(e, shot, int64_t(3 * rank), attend));
  return check_named(check).judge(e);
}

// In the arithmetic of T.
template <class T>
Attended softmax(const Numbers& scores, const Numbers& values, T subtracted) {
  T sum = 0, o = 0;
  for (size_t key = 0; key < 5; ++key) {
    const T p = std::exp(T(scores[key]) - subtracted);
    sum += p, o += p * T(values[key]);
  }
  return {double(o / sum), double(std::log(sum) + subtracted)};
}
Attended right(int64_t query, const Numbers& scores, const Numbers& values) {
  if (query == 5) return {};
  return softmax(scores, values, *std::max_element(scores.begin(), scores.end() - 1));
}

// The mean of the values of keys, each as often as it is named; lse is the logarithm of how many.
using Keys = std::vector<size_t>;
Attended mean_of(const Keys& keys, const Numbers& values) {
  if (keys.empty()) return {};
  double sum = 0;
  for (size_t key : keys) sum += values[key];
  return {sum / double(keys.size()), std::log(double(keys.size()))};
}

// `other` on one query.
Query but(int64_t odd, const std::function<Attended(const Numbers& values)>& other) {
  return [=](int64_t query, const Numbers& scores, const Numbers& values) {
    return query == odd ? other(values) : right(query, scores, values);
  };
}

TEST(Mask, NamesQueryAndKey) {
  EXPECT_EQ(attended("mask", right).verdict, Verdict::passed);
  const auto first = [](int64_t query, const Keys& keys) {
    const CheckResult r =
        attended("mask", but(query, [&](const Numbers& values) { return mean_of(keys, values); }));
    return r.findings.empty() ? "nothing" : r.findings[0].message;
  };
  EXPECT_EQ(first(2, {0, 1, 2, 4}),
            "query 2 (sequence 0) of head 0 does not see key 3 (sequence 0); 1 of 6 rows differ");
  EXPECT_EQ(first(4, {0, 1, 2, 3, 4, 5}),
            "query 4 (sequence 0) of head 0 sees key 5 (padding); 1 of 6 rows differ");
  EXPECT_EQ(first(5, {1}),
            "query 5 (padding) of head 0 sees key 1 (sequence 0); 1 of 6 rows differ");
}

// Of codes 1, 2, 4, 8 and 16 the fourth is taken twice among six and 5 are counted: 5 39 / 6. The
// logarithm to base 2 of 5 is that to base e of 10.195.
TEST(Mask, TellsWhatIsNoMeanOfACount) {
  const CheckResult weighted =
      attended("mask", but(1, [](const Numbers& values) {
                 return Attended{mean_of({0, 1, 2, 3, 3, 4}, values).o, std::log(5.)};
               }));
  ASSERT_EQ(weighted.verdict, Verdict::failed);
  EXPECT_EQ(weighted.findings[0].message,
            "expected the mean of codes below 2^40 times 5 visits to be an integer, met 32.5; 1 of "
            "6 rows differ");
  EXPECT_EQ(weighted.findings[0].means,
            "keys are weighted unequally although all scores are equal, or visited twice");
  const CheckResult other_base =
      attended("mask", but(3, [](const Numbers& values) {
                 return Attended{mean_of({0, 1, 2, 3, 4}, values).o, std::log2(5.)};
               }));
  ASSERT_EQ(other_base.verdict, Verdict::failed);
  EXPECT_EQ(other_base.findings[0].message.find(
                "expected lse to be the logarithm of a count, met exp(lse) = 10.19"),
            0u)
      << other_base.findings[0].message;
  EXPECT_EQ(other_base.findings[0].rank, 1);
}

// exp(x) is infinite from x = 709.8 on in f64, from 88.8 on in f32.
TEST(Mask, ASoftmaxThatSubtractsNoMaximumOverflows) {
  for (const char* dtype : {"f64", "f32"}) {
    const std::string more = std::string("dtype=") + dtype;
    EXPECT_EQ(attended("mask", right, more).verdict, Verdict::passed) << dtype;
    const CheckResult r = attended(
        "mask",
        [&](int64_t query, const Numbers& scores, const Numbers& values) {
          if (query == 5) return Attended{};
          return more == "dtype=f64" ? softmax(scores, values, 0.) : softmax(scores, values, 0.F);
        },
        more);
    ASSERT_EQ(r.verdict, Verdict::failed) << dtype;
    EXPECT_EQ(r.findings[0].means,
              "the softmax overflows or loses a block: subtract the running maximum");
  }
}

// The last key of the sequence scores -c: exp(2c) of the others is beyond f64.
TEST(Mask, ASoftmaxThatSubtractsTheLastScoreOverflows) {
  const CheckResult r =
      attended("mask", [](int64_t query, const Numbers& scores, const Numbers& values) {
        return query == 5 ? Attended{} : softmax(scores, values, scores[4]);
      });
  ASSERT_EQ(r.verdict, Verdict::failed);
  EXPECT_NE(r.findings[0].message.find("with scores of +c and -c"), std::string::npos);
}

TEST(Coverage, EachPairOnceIsDue) {
  const CheckResult r = attended("coverage", right);
  EXPECT_EQ(r.verdict, Verdict::passed) << r.note;
  EXPECT_EQ(r.compared, 25);
  EXPECT_EQ(r.note, "25 pairs, 15 on rank 0");
}

// Rank 0 has 3 queries of the sequence and owes 15 pairs, rank 1 has 2 and owes 10.
TEST(Coverage, CountsVisitsAndDistinctPairsOfEachRank) {
  const Keys all_twice{0, 1, 2, 3, 4, 0, 1, 2, 3, 4};
  struct {
    const char* what;
    std::map<int64_t, Keys> visits;  // of the queries that differ
    std::vector<int> ranks;
    const char *message, *means;
  } const faults[] = {
      {"all pairs of a rank twice, each of which is there",
       {{3, all_twice}, {4, all_twice}},
       {1},
       "expected 10 (query, key) pairs, met 20 visits of 10 distinct pairs",
       "a block of keys is visited twice"},
      {"a key twice in place of another: as many visits as are due",
       {{2, {0, 0, 2, 3, 4}}},
       {0},
       "expected 15 (query, key) pairs, met 15 visits of 14 distinct pairs",
       "a block of keys is visited twice"},
      {"a query's keys twice, another's never: as many visits as are due",
       {{0, all_twice}, {1, {}}},
       {0},
       "expected 15 (query, key) pairs, met 15 visits of 10 distinct pairs",
       "a block of keys is visited twice"},
      {"a key never, on either rank",
       {{2, {0, 1, 2, 3}}, {4, {1, 2, 3, 4}}},
       {0, 1},
       "expected 15 (query, key) pairs, met 14 visits of 14 distinct pairs",
       "a block of keys is never visited, or masked away"},
      {"a query of the sequence sees padding",
       {{4, {0, 1, 2, 3, 4, 5}}},
       {1},
       "expected 10 (query, key) pairs, met 11 visits of 11 distinct pairs",
       "more keys are visited than the mask shows"},
      {"a query of padding sees a key",
       {{5, {2}}},
       {1},
       "expected 10 (query, key) pairs, met 11 visits of 11 distinct pairs",
       "more keys are visited than the mask shows"},
  };
  for (const auto& fault : faults) {
    SCOPED_TRACE(fault.what);
    const CheckResult r =
        attended("coverage", [&](int64_t query, const Numbers& scores, const Numbers& values) {
          const auto at = fault.visits.find(query);
          return at == fault.visits.end() ? right(query, scores, values)
                                          : mean_of(at->second, values);
        });
    ASSERT_EQ(r.verdict, Verdict::failed);
    EXPECT_EQ(r.findings[0].ranks, fault.ranks);
    EXPECT_EQ(r.findings[0].message, fault.message);
    EXPECT_EQ(r.findings[0].means, fault.means);
  }
}

// ---- Rejection ----

TEST(Rejection, UnanimousSilentAndAlike) {
  auto play = reduce(3);
  play->run("rejection");
  const auto refuse = [&] {
    for (RankRecord& r : play->e.ranks) {
      r.shots[0] = ShotRecord{};
      r.shots[0].status = ShotRecord::rejected;
      r.shots[0].text = "expected tokens divisible by tp=3, met 7; choose a multiple";
    }
  };
  const CheckResult ran = play->judge_again("rejection");
  EXPECT_EQ(ran.verdict, Verdict::failed);
  EXPECT_EQ(ran.findings.at(0).means.find("require_legal"), std::string::npos);
  const Case* const ours = play->e.line;
  Case mine = *ours;
  mine.set("subject", "mine");
  play->e.line = &mine;
  EXPECT_NE(play->judge_again("rejection").findings.at(0).means.find("rank.require_legal()"),
            std::string::npos);
  play->e.line = ours;
  refuse();
  EXPECT_EQ(play->judge_again("rejection").verdict, Verdict::passed);
  play->e.ranks[1].shots[0].status = ShotRecord::released;
  EXPECT_EQ(play->judge_again("rejection").verdict, Verdict::failed);
  refuse();
  play->e.ranks[2].shots[0].text = "expected something else";
  EXPECT_EQ(play->judge_again("rejection").verdict, Verdict::failed);
  refuse();
  play->e.ranks[0].shots[0].ledger = {made(0)};
  EXPECT_EQ(play->judge_again("rejection").verdict, Verdict::failed);
  play->e.ranks.clear();
  EXPECT_EQ(play->judge_again("rejection").verdict, Verdict::vacuous);
}

// ---- The list ----

TEST(Checks, OrderAndLetters) {
  std::string letters;
  for (const Check& c : all_checks()) letters += c.letter;
  EXPECT_EQ(letters, "FGADRLSMNEPCKUJ");
  EXPECT_FALSE(check_named("rejection").due(*reduce(2)->e.contract, *reduce(2)->e.line, {}));
  try {
    check_named("gradients");
    FAIL() << "expected BadInput";
  } catch (const BadInput& e) {
    EXPECT_NE(std::string(e.what()).find("did you mean 'gradient'?"), std::string::npos)
        << e.what();
  }
}

TEST(Checks, ForwardOnlySubjectsOweNoBackward) {
  Declared forward_only;
  forward_only.backward = false;
  const auto play = reduce(2);
  for (const char* check : {"gradient", "adjoint", "accumulate"})
    EXPECT_FALSE(check_named(check).due(*play->e.contract, *play->e.line, forward_only)) << check;
}

TEST(Words, Ranks) {
  EXPECT_EQ(judging::ranks_text(std::vector<int>{2}, 8), "rank 2");
  EXPECT_EQ(judging::ranks_text(std::vector<int>{0, 1}, 8), "ranks 0, 1");
  EXPECT_EQ(judging::ranks_text(std::vector<int>{0, 1, 2, 3, 5}, 8), "ranks 0-3, 5");
  EXPECT_EQ(judging::ranks_text(std::vector<int>{0, 1, 2, 3}, 4), "every rank");
}

}  // namespace checks_test
}  // namespace
}  // namespace shardproof
