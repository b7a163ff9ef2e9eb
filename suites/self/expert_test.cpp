// Experts that are cut over ranks: the reference on numbers that can be followed by hand, routings,
// who sends how many rows to whom, refusals, bounds to first order.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>

#include "oracle/drawn.hpp"
#include "oracle/drift_ranks.hpp"
#include "oracle/registry.hpp"
#include "oracle/run.hpp"
#include "primitives/expert_rows.hpp"
#include "primitives/work.hpp"
#include "reference/expert.hpp"
#include "suites/expert.hpp"

namespace shardproof {

void family_expert(Registry&);
void family_expert_balance(Registry&);
void family_expert_mlp(Registry&);
void controls_expert(Registry&);

namespace {
namespace expert_test {

using reference::Values;
using Numbers = std::vector<int64_t>;

const Registry& families() {
  static const Registry registry = [] {
    Registry r;
    family_expert(r);
    family_expert_balance(r);
    family_expert_mlp(r);
    controls_expert(r);
    return r;
  }();
  return registry;
}

Case line_of(const std::string& words) {
  return parse(words.starts_with("expert_") ? words : "expert_alltoall " + words, families());
}
const Contract& contract() { return families().contract("expert_alltoall"); }
Numbers routing(const std::string& words, uint64_t seed = 1) {
  return experts::routing(line_of(words), seed);
}

// ---- The reference

// X = [1 2; 3 4], W_0 = [1 0], W_1 = [0 1], W_2 = [1 1]; nothing chooses W_3.
const reference::ExpertShape two_tokens{2, 2, 4, 2, 1};
const Values x{1, 2, 3, 4}, chosen{0, 2, 1, 0}, probs{2, 3, 5, 7}, w{1, 0, 0, 1, 1, 1, 9, 9};

TEST(ReferenceExperts, WeighWhatTheChosenOnesGive) {
  // 2 (1) + 3 (1 + 2); 5 (4) + 7 (3)
  EXPECT_EQ(reference::experts(two_tokens, x, chosen, probs, w), (Values{11, 41}));
}

TEST(ReferenceExperts, GradientsGoBackToThem) {
  const auto d = reference::experts_backward(two_tokens, x, chosen, probs, w, Values{1, 10});
  EXPECT_EQ(d.x, (Values{5, 3, 70, 50}));      // 2 [1 0] + 3 [1 1]; 50 [0 1] + 70 [1 0]
  EXPECT_EQ(d.probs, (Values{1, 3, 40, 30}));  // 1 (1), 1 (3); 10 (4), 10 (3)
  // 2 [1 2] + 70 [3 4]; 50 [3 4]; 3 [1 2]; nothing
  EXPECT_EQ(d.w, (Values{212, 284, 150, 200, 3, 6, 0, 0}));
}

TEST(ReferenceExperts, AnExpertThatIsNoneIsRefused) {
  for (double none : {-1.0, 4.0})
    EXPECT_THROW(reference::experts(two_tokens, x, Values{0, 1, 2, none}, probs, w),
                 std::invalid_argument);
}

// Experts 0 and 2 are chosen by token 0, 2 and 1 by token 1: n = (1, 1, 2).
TEST(ReferenceBalance, CountsTimesSums) {
  const reference::BalanceShape shape{2, 2, 3};
  const Values p{1, 2, 3, 4, 5, 6}, of{0, 2, 2, 1};
  EXPECT_EQ(reference::choices_of_experts(shape, of), (Values{1, 1, 2}));
  EXPECT_EQ(reference::balance(shape, p, of), 5 + 7 + 2 * 9);
  EXPECT_EQ(reference::balance_backward(shape, of, 3), (Values{3, 3, 6, 3, 3, 6}));
}

// Token 0 chooses expert 0, token 1 expert 1, with probs (3, 1) and (1, 3) of them: each rank by
// itself finds 3 and 3, which add up to 6; all together 1 (4) + 1 (4).
TEST(ReferenceBalance, ProductsOfRanksAreNoParts) {
  const reference::BalanceShape one{1, 1, 2}, both{2, 1, 2};
  EXPECT_EQ(reference::balance(one, Values{3, 1}, Values{0}), 3);
  EXPECT_EQ(reference::balance(one, Values{1, 3}, Values{1}), 3);
  EXPECT_EQ(reference::balance(both, Values{3, 1, 1, 3}, Values{0, 1}), 8);
}

// ---- Routings

TEST(Routing, EvenAndOneByHand) {
  EXPECT_EQ(routing("ep=1 tokens=3 topk=2 experts=4 route=even"), (Numbers{0, 1, 2, 3, 0, 1}));
  EXPECT_EQ(routing("ep=1 tokens=3 topk=2 experts=4 route=one"), (Numbers{0, 1, 0, 1, 0, 1}));
}

TEST(Routing, ATokenChoosesAnExpertOnce) {
  for (const char* route : {"random", "even", "skewed", "one"})
    for (int k : {1, 2, 5, 12}) {
      const std::string words =
          "ep=4 topk=" + std::to_string(k) + " route=" + std::string(route);  // 12 experts
      const Numbers all = routing(words);
      ASSERT_EQ(all.size(), size_t(48 * k));
      for (size_t t = 0; t < 48; ++t) {
        const std::set<int64_t> of_token(all.begin() + int64_t(t) * k,
                                         all.begin() + int64_t(t + 1) * k);
        EXPECT_EQ(of_token.size(), size_t(k)) << words;
        EXPECT_GE(*of_token.begin(), 0);
        EXPECT_LT(*of_token.rbegin(), 12);
      }
    }
}

// Of 12 experts and 3 choices: 3 + 9 / 2 = 7 are open.
TEST(Routing, SkewedLeavesExpertsIdle) {
  const Numbers all = routing("ep=4 topk=3 route=skewed");
  EXPECT_EQ(std::set<int64_t>(all.begin(), all.end()), (std::set<int64_t>{0, 1, 2, 3, 4, 5, 6}));
}

TEST(Routing, RandomFollowsTheSeedAndReachesAll) {
  EXPECT_EQ(routing("ep=4", 5), routing("ep=4", 5));
  EXPECT_NE(routing("ep=4", 5), routing("ep=4", 6));
  const Numbers all = routing("ep=4 tokens=480");
  EXPECT_EQ(std::set<int64_t>(all.begin(), all.end()).size(), 12u);
}

// What ranks are handed and what the parent judges by.
TEST(Routing, IsTheIndexOperandOfAFeed) {
  const Case line = line_of("ep=2 dp=2");
  const Operand chosen = contract().operands(line)[1];
  ASSERT_EQ(chosen.name, "chosen");
  EXPECT_EQ(chosen.role, Operand::index);
  for (uint64_t seed : {1u, 9u}) {
    Feed feed;
    feed.seed = seed;
    const Drawing drawing{line, chosen, false, feed, DType::i64, chosen.shape};
    const Numbers due = experts::routing(line, seed);
    EXPECT_EQ(drawn_whole(drawing), std::vector<double>(due.begin(), due.end()));
    EXPECT_EQ(drawn_at(drawing, Numbers{95, 3}),
              (std::vector<double>{double(due[95]), double(due[3])}));
  }
}

TEST(Routing, OfADriftRunIsThatOfItsMicrobatch) {
  const Case line = line_of("ep=2 microbatches=2 seed=7");
  const Operand chosen = contract().operands(line)[1];
  for (const auto& [step, microbatch, seed] : {std::tuple(0, 0, 7), {0, 1, 8}, {1, 1, 10}}) {
    const Numbers due = experts::routing(line, uint64_t(seed));
    EXPECT_EQ(drift::input_of(line, chosen, line.mesh(), step, microbatch).value,
              std::vector<double>(due.begin(), due.end()));
  }
}

// ---- Capacity

std::vector<bool> kept(const std::string& words) {
  const Case line = line_of(words);
  return experts::kept(line, experts::routing(line, line.seed()));
}

// Tokens choose (0,1), (2,0), (1,2): their first choices fill every expert.
TEST(Capacity, FirstChoicesComeBeforeSecondOnes) {
  const std::string words = "tokens=3 topk=2 experts=3 route=even";
  EXPECT_EQ(kept(words + " capacity=1"),
            (std::vector<bool>{true, false, true, false, true, false}));
  EXPECT_EQ(kept(words + " capacity=2"), std::vector<bool>(6, true));
  EXPECT_EQ(kept(words), std::vector<bool>(6, true));
}

// Everybody chooses experts 0 and 1; each rank may send two rows to either.
TEST(Capacity, IsThatOfEachRank) {
  const std::vector<bool> one{true, true, true, true, false, false};
  std::vector<bool> both = one;
  both.insert(both.end(), one.begin(), one.end());
  EXPECT_EQ(kept("ep=2 tokens=6 topk=2 experts=4 route=one capacity=2"), both);
  EXPECT_EQ(kept("ep=2 tokens=6 topk=2 experts=4 route=one capacity=3"),
            std::vector<bool>(12, true));
}

TEST(Capacity, DroppedChoicesGiveNothingAndGetNoGradient) {
  const Case line = line_of("tokens=2 topk=2 experts=3 hidden=2 out=1 route=one capacity=1");
  // Token 1 is dropped by both of its experts: y_0 = 2 (1) + 3 (2), y_1 = 0.
  const std::vector<Whole> in{{{2, 2}, x},
                              {{2, 2}, Values{0, 1, 0, 1}},
                              {{2, 2}, probs},
                              {{3, 1, 2}, Values{1, 0, 0, 1, 1, 1}}};
  EXPECT_EQ(contract().forward(line, in, nullptr)[0].value, (Values{8, 0}));
  const std::vector<Whole> cot{{{2, 1}, Values{1, 10}}};
  const auto d = contract().backward(line, in, cot, nullptr);
  EXPECT_EQ(d[0].value, (Values{2, 3, 0, 0}));
  EXPECT_EQ(d[2].value, (Values{1, 2, 0, 0}));
  EXPECT_EQ(d[3].value, (Values{2, 4, 3, 6, 0, 0}));
}

// ---- Bodies, on strided memory

TEST(Bodies, ANegativeIndexIsNoRow) {
  using namespace primitives;
  Buffer above(DType::f32, {4, 2}, Strides::transposed), taken(DType::f32, {3, 2}),
      index(DType::i64, {3}, Strides::transposed);
  fill_from(above.view(), Values{900, 900, 1, 2, 3, 4, 5, 6});
  const View rows = above.view().narrow(0, 1, 3);  // row -1 holds what nobody must read
  fill_from(index.view(), Values{2, -1, 0});
  perform(TakeRows{tensor(rows), tensor(index.view()), tensor(taken.view()), 2}, "rows");
  EXPECT_EQ(to_doubles(taken.view()), (Values{5, 6, 0, 0, 1, 2}));

  // Two tokens of two choices: rows 1 and none; 0 and 2.
  Buffer places(DType::i64, {2, 2}), weights(DType::f32, {2, 2}), y(DType::f32, {2, 2});
  fill_from(places.view(), Values{1, -1, 0, 2});
  fill_from(weights.view(), Values{10, 100, 2, 3});
  perform(RowsOfToken{tensor(rows), tensor(places.view()), tensor(weights.view()), tensor(y.view()),
                      2, 2, false},
          "sums");
  EXPECT_EQ(to_doubles(y.view()), (Values{30, 40, 17, 22}));
  perform(RowsOfToken{tensor(rows), tensor(places.view()), {}, tensor(y.view()), 2, 2, true},
          "sums");
  EXPECT_EQ(to_doubles(y.view()), (Values{3, 4, 6, 8}));

  Buffer of_weights(DType::f32, {2, 2});  // [1 0] and [0 1] against the rows
  fill_from(y.view(), Values{1, 0, 0, 1});
  perform(ProbGradient{tensor(y.view()), tensor(rows), tensor(places.view()),
                       tensor(of_weights.view()), 2, 2, false},
          "gradients");
  EXPECT_EQ(to_doubles(of_weights.view()), (Values{3, 0, 2, 6}));

  // Rows of slots 3, none, 0: 3 y_1, 10 y_0.
  fill_from(index.view(), Values{3, -1, 0});
  perform(WeighedRows{tensor(y.view()), tensor(weights.view()), tensor(index.view()),
                      tensor(taken.view()), 2, 2, false},
          "weighed");
  EXPECT_EQ(to_doubles(taken.view()), (Values{0, 3, 0, 0, 10, 0}));
}

// ---- Rows and calls

TEST(Load, NothingIsLost) {
  for (const char* words :
       {"ep=2", "ep=3 route=skewed", "ep=4 topk=3", "ep=8 route=one", "ep=2 dp=2", "tp=2 ep=2 cp=2",
        "tp=4 sp=on", "tp=2 ep=4 order=ep,tp seed=3"}) {
    const Case line = line_of(words);
    const Numbers all = experts::routing(line, line.seed());
    int64_t sent = 0, received = 0;
    for (int r = 0; r < line.world(); ++r) {
      const experts::Load load = experts::load_of(line, all, r);
      sent += load.sent, received += load.received;
    }
    EXPECT_EQ(sent, 48 * line.at("topk")) << words;
    EXPECT_EQ(received, 48 * line.at("topk")) << words;
  }
}

// Where tp cuts each expert: its ranks dispatch tokens of their own, or the same ones.
TEST(Load, OfExpertsThatTpCuts) {
  for (const char* words : {"tp=2 ep=2", "tp=2 ep=2 sp=on route=skewed", "tp=4 ep=2 sp=on topk=3",
                            "tp=3 sp=on dp=2 seed=2", "tp=2 ep=4 order=ep,tp sp=on route=one"}) {
    const Case line = line_of("expert_mlp " + std::string(words));
    const Numbers all = experts::routing(line, line.seed());
    const int64_t tp = line.ranks(Axis::tp), due = 48 * line.at("topk") * (line.on("sp") ? 1 : tp);
    int64_t sent = 0, received = 0, rows = 0;
    for (int r = 0; r < line.world(); ++r) {
      const experts::Load load = experts::load_of(line, all, r);
      sent += load.sent, received += load.received, rows += load.rows;
      EXPECT_GE(load.block, load.received) << words;
    }
    EXPECT_EQ(sent, due) << words;
    EXPECT_EQ(received, due) << words;
    EXPECT_EQ(rows, 48 * line.at("topk") * tp) << words;  // each rank of tp computes all
  }
}

struct Due {
  Op op;
  const char* label;
  bool backward;
  int64_t count;
  DType dtype = DType::f64;
};
void expect_due(const std::string& words, int rank, const std::vector<Due>& due) {
  SCOPED_TRACE(words + " rank " + std::to_string(rank));
  const Case line = line_of(words);
  const auto met = families().contract(line.contract).traffic(line, "", rank);
  ASSERT_EQ(met.size(), due.size());
  for (size_t i = 0; i < due.size(); ++i) {
    EXPECT_EQ(met[i].op, due[i].op) << "call " << i;
    EXPECT_EQ(met[i].label, due[i].label) << "call " << i;
    EXPECT_EQ(met[i].backward, due[i].backward) << "call " << i;
    EXPECT_EQ(met[i].count, due[i].count) << "call " << i;
    EXPECT_EQ(met[i].dtype, due[i].dtype) << "call " << i;
  }
}

// Rows of 10 go, rows of 7 come back; backward 7 go and 10 come back.
TEST(Traffic, ByHand) {
  const auto all_to_all = [](const char* label, bool backward, int64_t count) {
    return Due{Op::all_to_all, label, backward, count};
  };
  const auto gather = [](const char* label, bool backward, int64_t count, DType type) {
    return Due{Op::all_gather, label, backward, count, type};
  };
  // Tokens 0 and 2 choose experts 0 and 1, tokens 1 and 3 choose 2 and 3: 4 rows each.
  for (int rank : {0, 1})
    expect_due(
        "ep=2 tokens=4 topk=2 experts=4 route=even", rank,
        {gather("ep", false, 4, DType::i64), all_to_all("ep", false, 40),
         all_to_all("ep", false, 28), all_to_all("ep", true, 28), all_to_all("ep", true, 40)});
  // Expert 0 gets all four tokens, two of each rank.
  const std::string one = "ep=2 tokens=4 topk=1 experts=4 route=one";
  for (const auto& [rank, rows] : {std::pair(0, 4), {1, 0}})
    expect_due(one, rank,
               {gather("ep", false, 4, DType::i64), all_to_all("ep", false, 20),
                all_to_all("ep", false, 7 * rows), all_to_all("ep", true, 14),
                all_to_all("ep", true, 10 * rows)});
  // Tokens on all ranks of tp: one of the four each; copies of experts over dp: 2 of [7,10].
  const std::string four = "tp=2 ep=2 dp=2 tokens=8 topk=1 experts=8 route=one";
  expect_due(four, 0,
             {gather("tp,ep", false, 8, DType::i64), all_to_all("tp,ep", false, 10),
              all_to_all("tp,ep", false, 28), gather("tp", false, 7, DType::f64),
              all_to_all("tp,ep", true, 7), all_to_all("tp,ep", true, 40),
              gather("tp", true, 10, DType::f64), gather("tp", true, 1, DType::f64),
              Due{Op::all_reduce, "dp", true, 140}});
  expect_due(four + " sp=on", 3,
             {gather("tp,ep", false, 8, DType::i64), all_to_all("tp,ep", false, 10),
              all_to_all("tp,ep", false, 0), all_to_all("tp,ep", true, 7),
              all_to_all("tp,ep", true, 0), Due{Op::all_reduce, "dp", true, 140}});
}

// Blocks of two rows for each of four experts, whoever chooses whom.
TEST(Traffic, OfACapacityIsEqualBlocksAndNoCounts) {
  for (const char* route : {"one", "even", "random"})
    for (int rank : {0, 1})
      expect_due(std::string("ep=2 tokens=4 topk=2 experts=4 capacity=2 route=") + route, rank,
                 {Due{Op::all_to_all, "ep", false, 80}, Due{Op::all_to_all, "ep", false, 56},
                  Due{Op::all_to_all, "ep", true, 56}, Due{Op::all_to_all, "ep", true, 80}});
}

// Rows of 7, forward and backward alike: to the experts, gathered and summed over tp, and back.
std::vector<Due> both_ways(const Due& sent, std::vector<Due> over_tp, const Due& back) {
  std::vector<Due> due;
  for (const bool backward : {false, true}) {
    due.push_back(sent);
    due.insert(due.end(), over_tp.begin(), over_tp.end());
    due.push_back(back);
    for (size_t i = due.size() - over_tp.size() - 2; i < due.size(); ++i)
      due[i].backward = backward;
  }
  return due;
}
void expect_ways(const std::string& words, int rank, const char* counts, int64_t experts,
                 int64_t sent, std::vector<Due> over_tp, int64_t back) {
  auto due = both_ways({Op::all_to_all, "ep", false, 7 * sent}, std::move(over_tp),
                       {Op::all_to_all, "ep", false, 7 * back});
  if (counts) due.insert(due.begin(), Due{Op::all_gather, counts, false, experts, DType::i64});
  expect_due("expert_mlp " + words, rank, due);
}

// The same tokens on both ranks of tp. Ranks 0 and 1 are the first of ep, 2 and 3 the second.
TEST(Traffic, OfCutExpertsIsAllReducedWhereTokensAreTheSame) {
  const auto summed = [](int64_t rows) {
    return std::vector<Due>{{Op::all_reduce, "tp", false, 7 * rows}};
  };
  for (int rank : {0, 1, 2, 3}) {
    const int64_t rows = rank < 2 ? 4 : 0;
    expect_ways("tp=2 ep=2 tokens=4 topk=1 experts=4 route=one", rank, "ep", 4, 2, summed(rows),
                rows);
  }
}

// Two tokens a rank, token t chooses expert t mod 6: of ep=0, tp=0 experts 0 and 1, of tp=1 2 and
// 3; of ep=1 4 and 5, then 0 and 1. Experts 0, 1 and 2 get two rows of tokens of tp=0 and three of
// tp=1; experts 3, 4 and 5 two and one.
TEST(Traffic, OfCutExpertsIsGatheredInBlocksOfTheLongest) {
  const int64_t blocks[] = {3, 3, 2, 2}, received[] = {2, 3, 2, 1};
  for (int rank : {0, 1, 2, 3})
    expect_ways("tp=2 ep=2 sp=on tokens=8 topk=1 experts=6 route=even", rank, "tp,ep", 6, 2,
                {{Op::all_gather, "tp", false, 7 * blocks[rank]},
                 {Op::reduce_scatter, "tp", false, 14 * blocks[rank]}},
                received[rank]);
}

TEST(Traffic, OfCutExpertsWithACapacity) {
  expect_ways("tp=2 ep=2 sp=on tokens=8 topk=1 experts=4 capacity=1", 3, nullptr, 0, 4,
              {{Op::all_gather, "tp", false, 28}, {Op::reduce_scatter, "tp", false, 56}}, 4);
}

// Two tokens a rank of dp; of ffn 24 a rank has 12: rows of gate, of up and columns of W2.
TEST(Traffic, OfCutExpertsOnOneRankOfEp) {
  for (const auto& [words, gradients] : {std::pair("", 252), {" activation=gelu", 168}})
    expect_due(std::string("expert_mlp tp=2 dp=2 tokens=4 topk=1 experts=1") + words, 3,
               {Due{Op::all_reduce, "tp", false, 14}, Due{Op::all_reduce, "tp", true, 14},
                Due{Op::all_reduce, "dp", true, gradients}});
  expect_due("expert_mlp", 0, {});
}

// Counts, then the loss, over the axes that cut the tokens.
TEST(Traffic, OfABalance) {
  for (const auto& [words, label] : {std::pair("ep=2 dtype=f32", "ep"),
                                     {"tp=2 ep=2 dtype=bf16", "ep"},
                                     {"tp=2 cp=2 dp=2 sp=on dtype=f16", "tp,cp,dp"}}) {
    const Case line = parse("expert_balance " + std::string(words), families());
    const auto due = families().contract("expert_balance").traffic(line, "", 0);
    ASSERT_EQ(due.size(), 2u);
    for (size_t i = 0; i < 2; ++i) {
      EXPECT_EQ(due[i].op, Op::all_reduce);
      EXPECT_EQ(due[i].reduce, Reduce::sum);
      EXPECT_EQ(due[i].label, label);
      EXPECT_EQ(due[i].count, i == 0 ? 6 : 1);
      EXPECT_EQ(due[i].dtype, DType::f32);
      EXPECT_FALSE(due[i].backward);
    }
  }
  const Case alone = parse("expert_balance tp=2", families());
  EXPECT_TRUE(families().contract("expert_balance").traffic(alone, "", 0).empty());
}

struct Ran {
  Judged judged;
  std::string failed;
  // Elements for (or from) each member in an all-to-all of a rank.
  const LedgerEntry& exchange(int rank, size_t number) const {
    static const LedgerEntry none;
    for (const LedgerEntry& e : judged.evidence.record(rank, 0).ledger)
      if (e.op == Op::all_to_all && number-- == 0) return e;
    ADD_FAILURE() << "rank " << rank << " made fewer exchanges";
    return none;
  }
};
Ran run(const std::string& words) {
  static Options options;
  static Runner runner(options, families());
  const Case line = line_of(words);
  Ran ran{runner.run(line, {"forward", "gradient", "ledger", "memory"}, lane_of(line)), ""};
  for (const CheckResult& c : ran.judged.result.checks)
    if (c.verdict != Verdict::passed) ran.failed += c.check + " ";
  return ran;
}

TEST(OnRanks, OneExpertTakesAllAndTheOthersTakePart) {
  const Ran ran = run("ep=2 tokens=4 topk=1 experts=4 route=one");
  EXPECT_EQ(ran.failed, "");
  for (int rank : {0, 1}) {
    const bool owns = rank == 0;
    const int64_t all = owns ? 1 : 0;
    EXPECT_EQ(ran.exchange(rank, 0).send, (Numbers{20, 0}));
    EXPECT_EQ(ran.exchange(rank, 0).recv, (Numbers{20 * all, 20 * all}));
    EXPECT_EQ(ran.exchange(rank, 1).send, (Numbers{14 * all, 14 * all}));
    EXPECT_EQ(ran.exchange(rank, 1).recv, (Numbers{14, 0}));
    EXPECT_EQ(ran.exchange(rank, 2).send, (Numbers{14, 0}));
    EXPECT_EQ(ran.exchange(rank, 3).send, (Numbers{20 * all, 20 * all}));
    EXPECT_EQ(ran.exchange(rank, 3).recv, (Numbers{20, 0}));
  }
}

// What a member sends is what the other receives, and the way back swaps the two.
TEST(OnRanks, SplitsAreColumnsOfOneTable) {
  const Ran ran = run("ep=3 route=random topk=3");
  EXPECT_EQ(ran.failed, "");
  for (int a = 0; a < 3; ++a)
    for (int b = 0; b < 3; ++b) {
      const int64_t rows = ran.exchange(a, 0).send[size_t(b)] / 10;
      EXPECT_EQ(ran.exchange(b, 0).recv[size_t(a)], 10 * rows);
      EXPECT_EQ(ran.exchange(b, 1).send[size_t(a)], 7 * rows);
      EXPECT_EQ(ran.exchange(a, 1).recv[size_t(b)], 7 * rows);
      EXPECT_EQ(ran.exchange(a, 2).send[size_t(b)], 7 * rows);
      EXPECT_EQ(ran.exchange(b, 3).send[size_t(a)], 10 * rows);
    }
}

TEST(OnRanks, ACapacityCutsBothWays) {
  const Ran ran = run("ep=2 tokens=8 topk=2 experts=4 route=one capacity=3");
  EXPECT_EQ(ran.failed, "");
  for (int rank : {0, 1})
    for (size_t call : {0, 3}) EXPECT_EQ(ran.exchange(rank, call).send, (Numbers{60, 60}));
}

TEST(OnRanks, NoExpertOfARankIsChosen) {
  EXPECT_EQ(run("ep=4 route=skewed").failed, "");
  EXPECT_EQ(run("ep=4 route=one topk=1 dtype=f32 fill=normal").failed, "");
}

// Ranks of tp that are sent other numbers of rows, and experts of ep that are sent none.
TEST(OnRanks, SharesOfOtherLengthsAreGathered) {
  for (const char* words :
       {"tp=2 ep=2 tokens=8 topk=1 experts=6 route=even", "tp=2 ep=4 tokens=8 route=one topk=1",
        "tp=3 route=skewed topk=2", "tp=2 ep=2 route=skewed activation=identity fill=integers"})
    EXPECT_EQ(run(std::string("expert_mlp sp=on ") + words).failed, "") << words;
}

// ---- Refusals

TEST(Refusals, NameWhatDoesNotFit) {
  for (const char* name : {"expert_alltoall", "expert_balance", "expert_mlp"}) {
    const Contract& c = families().contract(name);
    EXPECT_GE(c.illegal.size(), 5u);
    for (const std::string& text : c.illegal)
      EXPECT_TRUE(c.precondition(parse(text, families()))) << text;
  }
  for (const auto& [words, says] :
       {std::pair("ep=2 experts=5", "experts divisible by ep*tp = 2"),
        {"tp=2 ep=2 experts=6", "experts divisible by ep*tp = 4"},
        {"ep=4 tokens=10", "tokens divisible by dp*cp*ep*tp = 4"},
        {"ep=2 experts=4 topk=5", "topk of at most experts"},
        {"ep=4 capacity=13", "capacity of at most the tokens that a rank dispatches, 12"},
        {"ep=2 pp=2", "the axes tp, cp, ep and dp only"},
        {"expert_mlp tp=4 ffn=10", "ffn divisible by tp = 4"},
        {"expert_mlp tp=2 ep=2 experts=5", "experts divisible by ep = 2"},
        {"expert_mlp tp=2 ep=2 tokens=3", "tokens divisible by dp*cp*ep = 2"},
        {"expert_mlp tp=2 ep=2 sp=on tokens=6", "tokens divisible by dp*cp*ep*tp = 4"},
        {"expert_mlp tp=2 sp=on capacity=25",
         "capacity of at most the tokens that a rank "
         "dispatches, 24"},
        {"expert_mlp ffn=65536 hidden=65536", "gradients of all experts"},
        {"expert_mlp tp=2 tokens=4096 experts=4096 capacity=4096 hidden=128", "all capacities"},
        {"tokens=4096 experts=4096 capacity=4096 hidden=128", "all capacities"}}) {
    const auto refused = contract().precondition(line_of(words));
    ASSERT_TRUE(refused) << words;
    EXPECT_NE(std::string(refused->what()).find(says), std::string::npos) << refused->what();
  }
  EXPECT_FALSE(contract().precondition(line_of("ep=2 experts=4 topk=4 tokens=2")));
  EXPECT_FALSE(contract().precondition(line_of("expert_mlp tp=2 ep=2 experts=2 tokens=2")));
}

// ---- Bounds

// One product each: y = p w x is rounded before both exchanges (2^-8 in bf16) and in its two
// products; the gradient of w is sent once, and summed over its rows.
TEST(Bounds, ToFirstOrder) {
  const Case line = line_of("ep=2 tokens=4 topk=1 experts=2 hidden=1 out=1 route=one dtype=bf16");
  const Values ones{1, 1, 1, 1};
  const std::vector<Whole> in{
      {{4, 1}, ones}, {{4, 1}, Values(4)}, {{4, 1}, ones}, {{2, 1, 1}, Values{1, 1}}};
  const double u = 0x1p-24, bf16 = 0x1p-8;
  std::vector<Gauge> y, d;
  contract().forward(line, in, &y);
  for (double b : y[0].bound) EXPECT_NEAR(b * u, 2 * bf16 + 2 * u, bf16 * bf16 + 8 * u * bf16);
  const std::vector<Whole> cot{{{4, 1}, ones}};
  contract().backward(line, in, cot, &d);
  EXPECT_NEAR(d[0].bound[0] * u, 2 * bf16 + 2 * u, bf16 * bf16 + 8 * u * bf16);
  EXPECT_NEAR(d[2].bound[0] * u, bf16 + 2 * u, 8 * u * bf16);
  EXPECT_NEAR(d[3].bound[0] * u, 4 * (bf16 + 4 * u), 32 * u * bf16);  // 4 rows of 1
  EXPECT_EQ(d[3].bound[1], 0);                                        // and none
}

// Of the load balance in f32: a term is added to the other of the 2 own tokens, multiplied, added
// over 2 experts and over 2 ranks, and is rounded at most 2 + 1 + 2 + 2 times. All 4 tokens choose
// expert 0, so the loss is 4 times the sum of 4 ones; its gradient is one product.
TEST(Bounds, OfABalance) {
  const Contract& balance = families().contract("expert_balance");
  const Case line = parse(
      "expert_balance ep=2 tokens=4 experts=2 topk=1 route=one dtype=f32 fill=normal", families());
  const std::vector<Whole> in{{{4, 2}, Values(8, 1.0)}, {{4, 1}, Values(4)}};
  std::vector<Gauge> loss, d;
  EXPECT_EQ(balance.forward(line, in, &loss)[0].value, Values{16});
  EXPECT_NEAR(loss[0].bound[0], 7 * 16, 1e-3);
  balance.backward(line, in, std::vector<Whole>{{{1}, {3}}}, &d);
  for (size_t i = 0; i < 8; ++i) EXPECT_NEAR(d[0].bound[i], i % 2 ? 0 : 3 * 4, 1e-4) << i;
}

// 3 tokens, each of which is counted 3 times at 2 experts: 18 terms of 14 are below 2^8.
TEST(Balance, IntegersKeepItsSumExact) {
  const Case line = parse("expert_balance tokens=3 experts=2 dtype=bf16", families());
  EXPECT_EQ(families().contract("expert_balance").integer_range(line), 14);
}

}  // namespace expert_test
}  // namespace
}  // namespace shardproof
