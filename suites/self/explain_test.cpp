// explain on the linears: bytes of groups on nodes and local multiplies, by hand.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "oracle/command.hpp"
#include "oracle/registry.hpp"

namespace shardproof {
namespace {
namespace explain_test {

// Without runs of blanks: columns may move.
std::string squeezed(const std::string& text) {
  std::string squeezed;
  for (char c : text)
    if (c != ' ' || squeezed.empty() || squeezed.back() != ' ') squeezed += c;
  return squeezed;
}
std::string explained(const std::string& line, int nodes = 0) {
  const Registry r = all_families();
  return squeezed(explain_text(parse(line, r), nodes, r));
}

bool holds(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// 12 ranks, 6 a node: of the tp groups {0-3} {4-7} {8-11} the middle one crosses. Each all-reduces
// [4,7] in f64: 224 B, by a ring 2 (p - 1) times that, 1344 B = 1.3125 KiB.
TEST(Explain, BytesOfGroupsThatCrossNodes) {
  const std::string text = explained("linear_row tp=4 dp=3 tokens=12", 2);
  for (const char* part :
       {"groups tp {0-3} {4-7} {8-11} crosses nodes: {4-7}",
        "within a node each of {0-3} {8-11}: forward 1 call 1.3125 KiB, backward 0 calls 0 B",
        "crosses nodes each of {4-7}: forward 1 call 1.3125 KiB, backward 0 calls 0 B"})
    EXPECT_TRUE(holds(text, part)) << part << "\n" << text;
  EXPECT_FALSE(holds(explained("linear_row tp=4 dp=3 tokens=12"), "nodes"));
  EXPECT_TRUE(holds(explained("linear_row dp=2", 2), "nodes no call is due"));
}

// Under sp a column gathers X [24,7] in both directions and scatters dX: 3 calls of (p - 1) 1344 B
// in a group of 4 = 3.9375 KiB, one of them forward.
TEST(Explain, BytesOfSequenceParallelCalls) {
  const std::string text = explained("linear_column tp=4 sp=on", 4);
  EXPECT_TRUE(holds(text,
                    "tp crosses nodes each of {0-3}: forward 1 call 3.9375 KiB, backward 2 "
                    "calls 7.875 KiB"))
      << text;
}

// Of 24 tokens on 4 ranks a block has 6: X [6,7] f64 of 336 B goes 3 hops, and 4 products are made.
TEST(Explain, ARingOfBlocksAndTheirProducts) {
  const std::string text = explained("linear_column tp=4 sp=on overlap=ring", 4);
  for (const char* part :
       {"Y = X W^T M=6 N=12 K=7 4 times", "dW = dY^T X M=12 N=7 K=6 4 times",
        "dX = dY W M=6 N=7 K=12 4 times",
        "tp crosses nodes each of {0-3}: forward 3 calls 3.9375 KiB, backward 6 calls 7.875 KiB"})
    EXPECT_TRUE(holds(text, part)) << part << "\n" << text;
}

// The 6 rows of each of 4 ranks in 2, 2, 1 and 1: 4 products of each chunk, of its rows of a rank.
TEST(Explain, ChunksAndTheirProducts) {
  const std::string text = explained("linear_row tp=4 sp=on overlap=chunks chunks=4", 4);
  for (const char* part :
       {"Z = X W^T M=2 N=7 K=12 8 times", "Z = X W^T M=1 N=7 K=12 8 times",
        "call 2 reduce_scatter sum tp 56 x f64", "call 4 reduce_scatter sum tp 28 x f64",
        "call 1 all_gather tp 14 x f64", "call 4 all_gather tp 7 x f64"})
    EXPECT_TRUE(holds(text, part)) << part << "\n" << text;
}

TEST(Explain, LocalMultipliesAndSmallOnes) {
  // 1024 / 8 rows of W on a rank.
  const std::string wide = explained("linear_column tp=8 tokens=256 in=512 out=1024");
  EXPECT_TRUE(holds(wide, "Y = X W^T M=256 N=128 K=512")) << wide;
  EXPECT_TRUE(holds(wide, "dX = dY W M=256 N=512 K=128")) << wide;
  EXPECT_FALSE(holds(wide, "\nsmall")) << wide;
  // 128 / 8 = 16: N of Y and K of dX are small on each of 8 ranks, dW [16,512] over 256 tokens not.
  const std::string thin = explained("linear_column tp=8 tokens=256 in=512 out=128");
  EXPECT_TRUE(holds(thin, "N or K is under 64 in 16 of 24 local multiplies")) << thin;
  EXPECT_TRUE(holds(thin, "N=16 K=512")) << thin;
  // dW [16,32] over 256 tokens is small, too, and not the smallest.
  const std::string thinner = explained("linear_column tp=8 tokens=256 in=32 out=128");
  EXPECT_TRUE(holds(thinner,
                    "24 of 24 local multiplies of all ranks; the smallest: Y = X W^T with "
                    "N=16 K=32"))
      << thinner;
}

// Microbatches of 2, 2 and 1 rows on two stages; chunks are said where a stage has several.
TEST(Explain, ShowsWhoWorksOnWhatAndWhen) {
  const std::string text = explained("pipeline_schedule pp=2 tokens=5 micro_batch_size=2"),
                    two = explained(
                        "pipeline_schedule pp=2 tokens=2 micro_batch_size=2 "
                        "schedule=zbv virtual=2 layers=4");
  for (const char* part :
       {"8 ticks, 4 of 16 places in them idle (-)\n", "\n tick 0 1 2 3 4 5 6 7\n",
        "\n pp=0 F0 F1 - B0 F2 B1 - B2\n", "\n pp=1 - F0 B0 F1 B1 F2 B2 -\n"})
    EXPECT_TRUE(holds(text, part)) << part << "\n" << text;
  EXPECT_TRUE(holds(two, "\n pp=0 F0.0 - - F0.3 B0.3 W0.3 - - B0.0 W0.0\n")) << two;
  EXPECT_FALSE(holds(explained("pipeline_stages pp=2"), "timetable"));
  // Of many ticks as many as fit side by side, of very many none.
  const std::string wide = explained("pipeline_schedule pp=2 tokens=40 micro_batch_size=1"),
                    huge = explained("pipeline_schedule pp=8 tokens=600 micro_batch_size=1");
  EXPECT_TRUE(holds(wide, "\n tick 0 1 2 ") && holds(wide, "\n tick 22 23 ")) << wide;
  EXPECT_TRUE(holds(huge, "more than 4096 places: ")) << huge;
  EXPECT_FALSE(holds(huge, "\n tick ")) << huge;
}

// What a run needs of data is no matter of groups, calls and ticks: it is said in one line.
TEST(Explain, ShowsALineThatARunRefuses) {
  const std::string inexact = explained("pipeline_schedule pp=64 layers=64"),
                    beyond = explained("linear_row tp=2 dtype=f16 fill=large");
  for (const char* part : {"world 64 ranks", "\ntimetable F0: forward of microbatch 0, the first",
                           "\nrun refuses it: key 'fill': expected a size at which integers stay"})
    EXPECT_TRUE(holds(inexact, part)) << part << "\n" << inexact;
  EXPECT_TRUE(holds(beyond, "\nrun refuses it: fill: expected results within 65504")) << beyond;
  EXPECT_FALSE(holds(explained("pipeline_schedule pp=64 layers=64 fill=normal"), "refuses it"));
  EXPECT_THROW(explained("pipeline_schedule pp=2 tp=2"), BadInput);
}

TEST(Explain, ShowsTheLineThatWasAsked) {
  EXPECT_TRUE(explained("linear_row tp=8", 2).starts_with("line linear_row tp=8 nodes=2\n"));
  EXPECT_TRUE(explained("linear_row tp=8").starts_with("line linear_row tp=8\n"));
}

TEST(Explain, SaysOfABrokenLineThatItShowsTheHealthyKernel) {
  const std::string note = "below is what the healthy kernel is due; what ";
  const std::string twin = explained("linear_row tp=2 control=row_bias_gradient_times_p"),
                    call = explained("linear_row tp=2 fault=skip@forward.tp.1");
  EXPECT_TRUE(holds(twin, note + "control=row_bias_gradient_times_p (")) << twin;
  EXPECT_TRUE(holds(call, note + "fault=skip@forward.tp.1 breaks")) << call;
  EXPECT_FALSE(holds(explained("linear_row tp=2"), note));
}

// One call is all that there is of such a contract: said in the second line.
TEST(Explain, SaysEarlyThatThereIsNoBackward) {
  const std::string text = explained("pipeline_schedule pp=2 dp=2");
  EXPECT_TRUE(holds(text, "(no backward: every result is one of the forward)\nworld")) << text;
  EXPECT_TRUE(holds(text, "\nowed nothing: there is no backward")) << text;
  EXPECT_FALSE(holds(text, "by the layer in its backward")) << text;
  EXPECT_FALSE(holds(explained("linear_row tp=2"), "no backward")) << text;
}

// 13 rows of 7 + 1 elements over 2 ranks are 7 a rank: 112 elements are reduced, by the backward
// that ends a step alone where it says so.
TEST(Explain, SaysWhatAStepMakesOnce) {
  const std::string each = explained("sharded_linear dp=2"),
                    last = explained("sharded_linear dp=2 sync=last"),
                    call = "reduce_scatter sum dp 112 x f64 logical 896 B, ring 448 B a rank";
  EXPECT_TRUE(holds(each, call + "\n")) << each;
  EXPECT_TRUE(holds(last, call + ", once a step\n")) << last;
}

// T/p tokens, 4 key heads, dk = dv = 3 in f64: K, V of 9216/p bytes. Two buffers of them forward,
// two more for dK, dV backward; p - 1 hops, then p - 1 and p.
TEST(Explain, TheRingTurnsInTwoBuffersAtEveryNumberOfRanks) {
  for (int p : {2, 4, 8}) {
    const std::string text = explained("attention_ring tokens=48 cp=" + std::to_string(p));
    const double kib = 9.0 / p;
    if (p > 2) {
      EXPECT_TRUE(holds(
          text, fmt::format("{0} calls, {0} rounds, buffers {1:.5g} KiB logical", p - 1, 2 * kib)))
          << text;
    }
    EXPECT_TRUE(holds(text, fmt::format("{0} calls, {0} rounds, buffers {1:.5g} KiB logical",
                                        2 * p - 1, 4 * kib)))
        << text;
  }
}

// Exchanges in runs of 2 of 4 ranks, a ring of the 2 runs: q, o of 2304 B, k, v and lse 1152, 1152,
// 768, and one hop of K, V in two buffers of 2304.
TEST(Explain, HierarchicalTellsInnerFromOuter) {
  const std::string text = explained("attention_hierarchical tokens=48 cp=4", 2);
  EXPECT_TRUE(holds(text, "all_to_all cp/2 288 x f64 logical 2.25 KiB, ring 1.125 KiB a rank"))
      << text;
  EXPECT_TRUE(holds(text, "shift +1 cp%2 288 x f64 logical 2.25 KiB, ring 2.25 KiB a rank"))
      << text;
  EXPECT_TRUE(holds(text, "6 calls, 6 rounds, buffers 12 KiB")) << text;
  EXPECT_TRUE(holds(text, "cp/2 within a node each of {0,1} {2,3}")) << text;
  EXPECT_TRUE(holds(text, "cp%2 crosses nodes each of {0,2} {1,3}")) << text;
}

// The table's gradient [11,3] in f64 is summed by the ends of the pipeline: 264 B, twice over.
TEST(Explain, TheEndsOfAPipelineAreNoNeighbours) {
  const std::string text = explained("pipeline_tied pp=4", 2);
  EXPECT_TRUE(holds(text,
                    "pp:ends crosses nodes each of {0,3}: forward 0 calls 0 B, backward 1 "
                    "call 528 B"))
      << text;
}

// Three of four stages send [24,3] in f64, 576 B, each way: 1728 B = 1.6875 KiB, whichever of them
// is asked.
TEST(Explain, AShiftMovesWhatEachRankSends) {
  const std::string text = explained("pipeline_stages pp=4 layers=4 tokens=24 hidden=3", 2);
  EXPECT_TRUE(holds(text, "pp crosses nodes each of {0-3}: forward")) << text;
  EXPECT_EQ(text.find("1.6875 KiB"), text.find("KiB") - 7) << text;
}

// Draws of one element each cannot tell shards apart, and what is not judged is not counted.
TEST(Explain, SaysWhichDrawsCannotBeJudged) {
  const std::string text = explained("block tp=2 sp=on dropout=0.5 tokens=2 hidden=1");
  EXPECT_TRUE(holds(text,
                    "dropout1.mask: shards on tp differ (not applicable: 16 draws of 1 "
                    "element are equal by chance with 2^-16, and 2^-61 is due)"))
      << text;
}

// A subject's own calls may be those of one rank, or of all of them: [2,3] in f64 by a ring of four
// is 2 (3) 48 B.
TEST(Explain, CallsThatASubjectStates) {
  Registry r = all_families();
  Declared own;
  own.traffic = [](const Case& line, int) {
    std::vector<Traffic> calls{{Op::all_reduce, Reduce::sum, "world", false, 6, line.dtype()}};
    for (int rank : {0, 1}) {
      calls.push_back({Op::all_reduce, Reduce::sum, "tp", false, 6, line.dtype()});
      calls.back().rank = rank;
    }
    return calls;
  };
  r.add(Subject{"own", "mapping_reduce", nullptr, own});
  const std::string text = squeezed(explain_text(
      parse("mapping_reduce tp=2 dp=2 axis=tp tokens=2 hidden=3 subject=own", r), 2, r));
  EXPECT_TRUE(holds(text, "world crosses nodes each of {0-3}: forward 1 call 288 B")) << text;
  EXPECT_TRUE(holds(text, "tp within a node each of {0,1}: forward 1 call 96 B")) << text;
}

TEST(Explain, OneRankOfCpIsAskedForNothing) {
  for (const char* contract : {"attention_ring", "attention_allgather", "attention_alltoall"})
    EXPECT_TRUE(holds(explained(contract), "backward no call")) << explained(contract);
}

// Everything is gathered: K and V of all ranks, whatever their number.
TEST(Explain, TheGatherHoldsAllKeys) {
  for (int p : {2, 4, 8})
    EXPECT_TRUE(holds(explained("attention_allgather tokens=48 cp=" + std::to_string(p)),
                      fmt::format("2 calls, {} rounds, buffers 9 KiB", 2 * (p - 1))));
}

}  // namespace explain_test
}  // namespace
}  // namespace shardproof
