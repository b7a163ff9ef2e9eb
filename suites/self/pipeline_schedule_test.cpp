// Schedules of a pipeline: orders, ticks, calls and what is held that can be followed by hand,
// bounds, refusals, and what the kernel and its twins do where a number is known beforehand.
#include <gtest/gtest.h>

#include <map>
#include <random>
#include <set>

#include "fixtures/sharding.hpp"
#include "oracle/registry.hpp"
#include "oracle/run.hpp"
#include "primitives/pipeline_schedule.hpp"
#include "reference/microbatches.hpp"
#include "suites/self/on_threads.hpp"

namespace shardproof {

void family_pipeline_schedule(Registry&);
void controls_pipeline_schedule(Registry&);

namespace {
namespace pipeline_schedule_test {

using primitives::Action;
using primitives::Plan;
using primitives::Timetable;
using primitives::Unit;
using primitives::Work;
using Doubles = std::vector<double>;
using Lines = std::vector<std::string>;

const Registry& family() {
  static const Registry registry = [] {
    Registry r;
    family_pipeline_schedule(r);
    controls_pipeline_schedule(r);
    return r;
  }();
  return registry;
}

const Contract& contract() { return family().contract("pipeline_schedule"); }
Case line_of(const std::string& words) { return parse("pipeline_schedule " + words, family()); }

// ---- The reference

TEST(Microbatches, AreFollowedByHand) {
  const Doubles x{1, 2, 3}, w0{3}, b0{1}, w1{2}, b1{-1}, dy{1, 10, 100};
  const reference::StackInputs in{3, 1, x, {w0, w1}, {b0, b1}};
  for (const int64_t size : {1, 2, 3}) {
    const auto step = reference::stack_step(in, dy, 1, size, 1);
    EXPECT_EQ(step.y, (Doubles{7, 13, 19}));  // 2 (3 x + 1) - 1
    EXPECT_EQ(step.d.x, (Doubles{6, 60, 600}));
    EXPECT_EQ(step.d.w[1], (Doubles{4 + 70 + 1000}));
    EXPECT_EQ(step.d.b[1], (Doubles{111}));
    EXPECT_EQ(step.d.w[0], (Doubles{2 + 40 + 600}));
    EXPECT_EQ(step.d.b[0], (Doubles{222}));
  }
}

TEST(Microbatches, OfAMeanCountTheirShare) {
  const Doubles x{1, 2, 3, 4}, w{1}, b{0}, dy{8, 8, 4, 4};
  const reference::StackInputs in{4, 1, x, {w}, {b}};
  // Two groups of two tokens, a microbatch each token: two of them in either.
  const auto step = reference::stack_step(in, dy, 2, 1, 2);
  EXPECT_EQ(step.d.x, (Doubles{4, 4, 2, 2}));
  EXPECT_EQ(step.d.w[0], (Doubles{4 + 8 + 6 + 8}));
  // A quotient that is stored is off by a rounding of each.
  reference::Rounding r;
  r.accumulate = 0x1p-20, r.store = 0x1p-8;
  EXPECT_NEAR(reference::divided_cotangent(dy, 2, r).error[0], 4 * (0x1p-8 + 0x1p-20), 0x1p-20);
  EXPECT_EQ(reference::divided_cotangent(dy, 1, r).error, Doubles(4, 0));
}

// ---- Orders

char letter(Work work) { return work == Work::forward ? 'F' : work == Work::backward ? 'B' : 'W'; }

// "F0 F1 B0", chunks behind a point where there are several.
std::string text(const Action& a, bool chunks) {
  return letter(a.work) + std::to_string(a.unit.microbatch) +
         (chunks ? "." + std::to_string(a.unit.chunk) : "");
}

std::string order(const Plan& plan, int64_t stage) {
  std::string words;
  for (const Action& a : order_of(plan, stage))
    words += (words.empty() ? "" : " ") + text(a, plan.rounds > 1);
  return words;
}

// Fig. 4 of Narayanan et al., Efficient Large-Scale Language Model Training (2021), top: 4 stages,
// of 8 microbatches the first ones.
TEST(Orders, OfOneForwardOneBackward) {
  const Plan plan{"1f1b", 4, 1, 5};
  EXPECT_EQ(order(plan, 0), "F0 F1 F2 F3 B0 F4 B1 B2 B3 B4");
  EXPECT_EQ(order(plan, 2), "F0 F1 B0 F2 B1 F3 B2 F4 B3 B4");
  EXPECT_EQ(order(plan, 3), "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4");
  EXPECT_EQ(order({"1f1b", 4, 1, 2}, 0), "F0 F1 B0 B1");
  EXPECT_EQ(order({"gpipe", 4, 1, 3}, 2), "F0 F1 F2 B0 B1 B2");
}

// The same, bottom: device 1 of 4 begins with 1 2 3 4, then these on its second chunk, 5 6 7, and
// device 4 has its first backward behind the first microbatch of its second chunk.
TEST(Orders, OfInterleavedStages) {
  const Plan plan{"interleaved", 4, 2, 8};
  EXPECT_EQ(order(plan, 0).substr(0, 64),
            "F0.0 F1.0 F2.0 F3.0 F0.4 F1.4 F2.4 F3.4 F4.0 F5.0 F6.0 B0.4 F7.0");
  EXPECT_EQ(order(plan, 3).substr(0, 44), "F0.3 F1.3 F2.3 F3.3 F0.7 B0.7 F1.7 B1.7 F2.7");
  // 3 microbatches on 2 stages are one round of 3, 2 of them a round of 2.
  EXPECT_EQ(order({"interleaved", 2, 2, 3}, 1),
            "F0.1 F1.1 F2.1 F0.3 B0.3 F1.3 B1.3 F2.3 B2.3 B0.1 B1.1 B2.1");
  EXPECT_EQ(Plan({"interleaved", 4, 2, 6}).together(), 6);
  EXPECT_EQ(Plan({"interleaved", 4, 2, 8}).together(), 4);
  EXPECT_EQ(Plan({"interleaved", 4, 2, 3}).together(), 3);
}

// ZB-H1 of Qi et al., Zero Bubble Pipeline Parallelism (2024), fig. 3: a W is put off by as many
// backwards as its stage is from the first.
TEST(Orders, OfZeroBubble) {
  const Plan plan{"zero_bubble", 3, 1, 4};
  EXPECT_EQ(order(plan, 0), "F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3");
  EXPECT_EQ(order(plan, 1), "F0 F1 B0 F2 B1 W0 F3 B2 W1 B3 W2 W3");
  EXPECT_EQ(order(plan, 2), "F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3");
}

// ZB-V of the same authors: chunks 0 1 2 lie there, 3 4 5 back.
TEST(Orders, OfThereAndBack) {
  const Plan plan{"zbv", 3, 2, 5};
  EXPECT_EQ(plan.stage_of(2), 2);
  EXPECT_EQ(plan.stage_of(3), 2);
  EXPECT_EQ(plan.stage_of(5), 0);
  EXPECT_EQ(order(plan, 2),
            "F0.2 F0.3 F1.2 F1.3 F2.2 F2.3 B0.3 W0.3 F3.2 B0.2 W0.2 F3.3 B1.3 W1.3 F4.2 B1.2 W1.2 "
            "F4.3 B2.3 W2.3 B2.2 B3.3 B3.2 B4.3 B4.2 W2.2 W3.3 W4.3 W3.2 "
            "W4.2");
}

// ---- Ticks

// A line a stage, '-' where it has nothing to do.
Lines ticks(const Plan& plan) {
  const Timetable table(plan);
  Lines lines;
  for (int64_t stage = 0; stage < plan.stages; ++stage) {
    std::string line;
    for (int64_t tick = 0; tick < table.ticks(); ++tick) {
      const auto action = table.at(tick, stage);
      line += (tick > 0 ? " " : "") + (action ? text(*action, plan.rounds > 1) : "-");
    }
    lines.push_back(line);
  }
  return lines;
}

// What the contract says, and holds calls to; it has a text of its own.
Lines ticks_of_contract(const Plan& plan) {
  const Case line =
      line_of("micro_batch_size=1 layers=8 tokens=" + std::to_string(plan.microbatches) +
              " pp=" + std::to_string(plan.stages) + " virtual=" + std::to_string(plan.rounds) +
              " schedule=" + plan.schedule);
  Lines lines;
  for (const auto& work : contract().timetable(line).work) {
    std::string words;
    for (const std::string& what : work)
      words += (words.empty() ? "" : " ") + (what.empty() ? "-" : what);
    lines.push_back(words);
  }
  return lines;
}

struct Grid {
  Plan plan;
  Lines lines;
};

// Made by hand from the orders of the papers above, a tick for each F, B and W. In the last one a W
// that comes first keeps the stage before waiting, and at the turn nobody waits. W fills what is
// idle with 1F1B: of 3 stages each waits 4 ticks there and 2 with W.
const Grid grids[] = {
    {{"1f1b", 3, 1, 1}, {"F0 - - - - B0", "- F0 - - B0 -", "- - F0 B0 - -"}},
    {{"1f1b", 3, 1, 4},
     {"F0 F1 F2 - - B0 F3 B1 - B2 - B3", "- F0 F1 - B0 F2 B1 F3 B2 - B3 -",
      "- - F0 B0 F1 B1 F2 B2 F3 B3 - -"}},
    {{"gpipe", 2, 1, 3}, {"F0 F1 F2 - - B0 B1 B2", "- F0 F1 F2 B0 B1 B2 -"}},
    {{"interleaved", 2, 2, 4},
     {"F0.0 F1.0 F0.2 F1.2 F2.0 B0.2 F3.0 B1.2 F2.2 B0.0 F3.2 B1.0 - B2.2 - B3.2 B2.0 B3.0",
      "- F0.1 F1.1 F0.3 B0.3 F1.3 B1.3 F2.1 B0.1 F3.1 B1.1 F2.3 B2.3 F3.3 B3.3 B2.1 B3.1 -"}},
    {{"zero_bubble", 2, 1, 3}, {"F0 F1 - B0 W0 F2 B1 W1 B2 W2", "- F0 B0 F1 B1 W0 F2 B2 W1 W2"}},
    {{"zero_bubble", 3, 1, 4},
     {"F0 F1 F2 - - B0 W0 F3 B1 W1 B2 W2 B3 W3", "- F0 F1 - B0 F2 B1 W0 F3 B2 W1 B3 W2 W3",
      "- - F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3"}},
    {{"zbv", 2, 2, 1},
     {"F0.0 - - F0.3 B0.3 W0.3 - - B0.0 W0.0", "- F0.1 F0.2 - - B0.2 W0.2 B0.1 W0.1 -"}},
};

TEST(Ticks, AreThoseOfThePapers) {
  for (const Grid& grid : grids) EXPECT_EQ(ticks(grid.plan), grid.lines) << grid.plan.schedule;
}

TEST(ScheduleContract, TicksAreThoseOfThePapers) {
  for (const Grid& grid : grids)
    EXPECT_EQ(ticks_of_contract(grid.plan), grid.lines) << grid.plan.schedule;
}

// F m on stage s at s + m while it fills, then at s + 2 m; B m at 2 p - 1 - s + 2 m: 2 (M + p - 1)
// ticks, of which p - 1 times two are bubbles of each stage.
TEST(Ticks, OfOneForwardOneBackwardHaveAClosedForm) {
  for (int64_t p : {1, 2, 4, 5})
    for (int64_t m : {1, 3, 8}) {
      const Timetable table(Plan{"1f1b", p, 1, m});
      ASSERT_EQ(table.ticks(), 2 * (m + p - 1));
      for (int64_t s = 0; s < p; ++s)
        for (int64_t i = 0; i < m; ++i) {
          const auto f = table.at(i + s < p ? s + i : s + 2 * i, s),
                     b = table.at(2 * p - 1 - s + 2 * i, s);
          ASSERT_TRUE(f && b);
          EXPECT_EQ(text(*f, false), "F" + std::to_string(i));
          EXPECT_EQ(text(*b, false), "B" + std::to_string(i));
        }
    }
}

TEST(Ticks, EveryStageDoesEachOfItsWorkOnce) {
  for (const char* schedule : {"gpipe", "1f1b", "interleaved", "zero_bubble", "zbv"})
    for (int64_t p : {1, 2, 3, 4, 8})
      for (int64_t v : {1, 2, 3})
        for (int64_t m : {1, 2, 3, 4, 6, 8, 16}) {
          const Plan plan{schedule, p, v, m};
          const std::string words = "tokens=" + std::to_string(m) +
                                    " micro_batch_size=1 pp=" + std::to_string(p) +
                                    " virtual=" + std::to_string(v) + " schedule=" + schedule;
          if (contract().precondition(line_of(words))) continue;
          const Timetable table(plan);
          std::map<std::string, int> seen;
          for (int64_t tick = 0; tick < table.ticks(); ++tick)
            for (int64_t s = 0; s < p; ++s)
              if (const auto a = table.at(tick, s)) {
                EXPECT_EQ(plan.stage_of(a->unit.chunk), s) << words;
                ++seen[text(*a, true)];
              }
          EXPECT_EQ(int64_t(seen.size()), (plan.splits() ? 3 : 2) * m * p * v) << words;
          for (const auto& [what, times] : seen) EXPECT_EQ(times, 1) << words << " " << what;
        }
}

TEST(Ticks, OrdersThatWaitForEachOtherAreNoTimetable) {
  const Plan plan{"1f1b", 1, 1, 1};
  const Action f{Work::forward, {0, 0}}, b{Work::backward, {0, 0}};
  EXPECT_THROW(Timetable(plan, {{b, f}}), std::logic_error);
}

// ---- Traffic

Lines calls(const std::string& words, int rank) {
  Lines list;
  for (const Traffic& t : contract().traffic(line_of(words), "", rank))
    list.push_back(std::string(name(t.op)) + " " + t.label + " " + std::to_string(t.count) + " " +
                   name(t.dtype) + (t.hop ? (t.hop > 0 ? " +1" : " -1") : ""));
  return list;
}

// Microbatches of 2, 2 and 1 rows of 3. F0 F1 - B0 F2 B1 - B2 and - F0 B0 F1 B1 F2 B2 -.
TEST(ScheduleTraffic, IsDueTickByTick) {
  const std::string words = "tokens=5 hidden=3 layers=3 micro_batch_size=2 dtype=bf16 pp=2";
  EXPECT_EQ(calls(words, 0),
            (Lines{"shift pp 6 bf16 +1", "shift pp 6 bf16 +1", "shift pp 0 bf16 -1",
                   "shift pp 3 bf16 +1", "shift pp 0 bf16 -1", "shift pp 0 bf16 -1"}));
  EXPECT_EQ(calls(words, 1),
            (Lines{"shift pp 0 bf16 +1", "shift pp 0 bf16 +1", "shift pp 6 bf16 -1",
                   "shift pp 0 bf16 +1", "shift pp 6 bf16 -1", "shift pp 3 bf16 -1"}));
  EXPECT_EQ(calls(words + " schedule=gpipe", 0)[2], "shift pp 3 bf16 +1");
  EXPECT_EQ(calls("tokens=5", 0), Lines{});
}

TEST(ScheduleTraffic, AStageReducesItsOwnParametersInTheEnd) {
  const std::string words = "tokens=8 hidden=3 layers=3 micro_batch_size=4 pp=2 dp=2 wire=f32";
  EXPECT_EQ(calls(words, 0).back(), "all_reduce dp 24 f32");  // 2 (9 + 3)
  EXPECT_EQ(calls(words, 3).back(), "all_reduce dp 12 f32");
}

// There and back on 2 stages: at the turn nothing travels, and both ways go either direction.
TEST(ScheduleTraffic, TurnsAtTheLastStage) {
  const std::string words =
      "tokens=2 hidden=3 layers=4 micro_batch_size=2 pp=2 virtual=2 "
      "schedule=zbv";
  EXPECT_EQ(calls(words, 0), (Lines{"shift pp 6 f64 +1", "shift pp 0 f64 -1", "shift pp 6 f64 +1",
                                    "shift pp 0 f64 -1"}));
  EXPECT_EQ(calls(words, 1), (Lines{"shift pp 0 f64 +1", "shift pp 6 f64 -1", "shift pp 0 f64 +1",
                                    "shift pp 6 f64 -1"}));
}

// One that has arrived, and those between it and its backward, of p - s stages; 3 elements each.
TEST(ScheduleTraffic, SaysWhatMayBeInFlight) {
  const auto most = [](const std::string& words, int rank, const char* ranks = "pp=4 tokens=8") {
    const auto due = contract().unanswered(
        line_of(std::string(ranks) + " hidden=3 layers=8 micro_batch_size=1 " + words), rank);
    return due ? due->most : -1;
  };
  for (int stage : {1, 2, 3}) {
    EXPECT_EQ(most("schedule=1f1b", stage), 3 * (4 - stage + 1));
    EXPECT_EQ(most("schedule=zero_bubble", stage), 3 * (4 - stage + 1));
    EXPECT_EQ(most("schedule=gpipe", stage), 3 * 8);
    EXPECT_EQ(most("schedule=1f1b", stage, "pp=4 tokens=2"), 3 * 2);
  }
  EXPECT_EQ(most("schedule=1f1b", 0), 0);  // nothing comes from the last stage
  // Stage 1 runs 2 (4 - 1 - 1) + 4 forwards ahead, and one more precedes its first backward.
  EXPECT_EQ(most("schedule=interleaved virtual=2", 2), 3 * 9);
  EXPECT_EQ(most("schedule=zbv virtual=2", 1), -1);
  EXPECT_EQ(most("", 0, "pp=1 tokens=8"), -1);
}

// The most that waits on each stage while the stages do their orders, one action after another;
// `choose` names the stage of several that can go on.
template <class Choose>
std::vector<int64_t> most_waiting(const Plan& plan, Choose choose) {
  std::vector<std::vector<Action>> orders;
  for (int64_t s = 0; s < plan.stages; ++s) orders.push_back(order_of(plan, s));
  std::vector<size_t> at(orders.size(), 0);
  std::vector<int64_t> waiting(orders.size(), 0), most = waiting;
  std::set<std::string> done;
  const auto has = [&](Work work, Unit u) { return done.contains(text({work, u}, true)); };
  const auto ready = [&](size_t s) {
    if (at[s] == orders[s].size()) return false;
    const auto [work, u] = orders[s][at[s]];
    if (work == Work::weights) return has(Work::backward, u);
    if (work == Work::forward)
      return u.chunk == 0 || has(Work::forward, {u.microbatch, u.chunk - 1});
    return u.chunk + 1 == plan.chunks() || has(Work::backward, {u.microbatch, u.chunk + 1});
  };
  while (true) {
    std::vector<size_t> can;
    for (size_t s = 0; s < orders.size(); ++s)
      if (ready(s)) can.push_back(s);
    if (can.empty()) return most;
    const size_t s = can[choose(can.size())];
    const Action a = orders[s][at[s]++];
    done.insert(text(a, true));
    if (a.work == Work::forward && a.unit.chunk + 1 < plan.chunks()) {
      const auto next = size_t(plan.stage_of(a.unit.chunk + 1));
      most[next] = std::max(most[next], ++waiting[next]);
    }
    if (a.work == Work::backward && a.unit.chunk > 0) --waiting[s];
  }
}

// Whatever each action takes: no timing of the order is taken for another schedule, and where the
// stages before run as far ahead as they can, it is reached.
TEST(ScheduleTraffic, NoTimingOfAnOrderHasMoreInFlight) {
  for (const auto& [schedule, v] : {std::pair{"1f1b", 1},
                                    {"gpipe", 1},
                                    {"zero_bubble", 1},
                                    {"interleaved", 2},
                                    {"zero_bubble", 2}})
    for (int64_t p : {2, 3, 4}) {
      const Plan plan{schedule, p, v, 12};
      const std::string words =
          "hidden=1 layers=8 micro_batch_size=1 tokens=12 pp=" + std::to_string(p) +
          " virtual=" + std::to_string(v) + " schedule=" + schedule;
      std::mt19937 random(1);
      std::vector<int64_t> most(size_t(p), 0);
      for (int n = 0; n < 50; ++n) {
        const auto seen = most_waiting(plan, [&](size_t can) { return random() % can; });
        for (size_t s = 0; s < seen.size(); ++s) most[s] = std::max(most[s], seen[s]);
      }
      const auto first = most_waiting(plan, [](size_t) { return size_t(0); });
      for (int s = 0; s < int(p); ++s) {
        const auto due = contract().unanswered(line_of(words), s);
        ASSERT_TRUE(due) << words;
        EXPECT_LE(most[size_t(s)], due->most) << words << " stage " << s;
        if (v == 1 && s > 0) {
          EXPECT_EQ(first[size_t(s)], due->most) << words << " stage " << s;
        }
      }
    }
}

// ---- What a failure means

TEST(ScheduleContract, TellsWhichWayWentWrong) {
  std::string asked;
  const auto means = [&](const Lines& off, const std::string& words = "", bool passes = false) {
    asked.clear();
    return contract().meaning(line_of(words), {off, [&](auto& key, auto& value) {
                                                 asked = key + "=" + value;
                                                 return passes;
                                               }});
  };
  const auto begins = [](const std::string& text, const char* head) {
    return text.starts_with(head) ? "" : text;
  };
  EXPECT_EQ(begins(means({"y", "dx", "dw0", "db0"}), "an activation of another"), "");
  EXPECT_EQ(begins(means({"dx", "dw0"}), "y is right: a cotangent of another"), "");
  EXPECT_EQ(begins(means({"dw0", "dw3"}), "y, dx and the gradients of biases are right"), "");
  EXPECT_EQ(begins(means({"dw0", "db3"}), "y and dx are right: of the sum over micro"), "");
  // A narrower sum is asked after where there is one, and the line does not say it.
  EXPECT_EQ(asked, "");
  EXPECT_NE(means({"dw0"}, "dtype=bf16 fill=normal", true).find("a line with local_grad=bf16"),
            std::string::npos);
  EXPECT_EQ(asked, "local_grad=bf16");
  EXPECT_EQ(begins(means({"dw0"}, "dtype=bf16 fill=normal"), "y, dx and the gradients of b"), "");
  means({"dw0"}, "dtype=bf16 fill=normal local_grad=bf16");
  EXPECT_EQ(asked, "");
}

// ---- Refusals, operands and ranges

std::string refusal(const std::string& words) {
  const auto refused = contract().precondition(line_of(words));
  return refused ? refused->what() : "";
}

TEST(ScheduleRefusals, EveryIllegalLineIsRefusedAndNoCaseIs) {
  for (const std::string& text : contract().illegal)
    EXPECT_TRUE(contract().precondition(parse(text, family()))) << text;
  for (const char* tier : {"smoke", "ci", "nightly"})
    for (const std::string& text : contract().cases(tier)) {
      const Case line = parse(text, family());
      EXPECT_FALSE(contract().precondition(line)) << text;
      EXPECT_TRUE(line.text("fill") != "integers" || contract().integer_range(line)) << text;
    }
  for (const std::string& text : contract().witnesses)
    EXPECT_FALSE(contract().precondition(parse(text, family()))) << text;
}

TEST(ScheduleRefusals, SayWhatIsWrong) {
  EXPECT_NE(refusal("pp=2 virtual=2").find("virtual=1 with schedule=1f1b"), std::string::npos);
  EXPECT_NE(refusal("pp=2 schedule=interleaved").find("virtual=2 or more"), std::string::npos);
  EXPECT_NE(refusal("pp=2 schedule=zbv virtual=3").find("virtual=2 with schedule=zbv"),
            std::string::npos);
  EXPECT_NE(refusal("pp=2 schedule=interleaved virtual=2 tokens=5 micro_batch_size=1")
                .find("5 microbatches"),
            std::string::npos);
  EXPECT_EQ(refusal("pp=2 schedule=interleaved virtual=2 tokens=3 micro_batch_size=1"), "");
  EXPECT_NE(refusal("pp=2 dp=2 tokens=9").find("divisible by dp = 2"), std::string::npos);
}

// The first and the last chunk lie on one stage there.
TEST(ScheduleOperands, LieOnTheStagesOfTheirChunks) {
  const Case line = line_of("pp=2 virtual=2 schedule=zbv layers=4 tokens=4");
  std::map<std::string, int64_t> on_first;
  for (const Operand& o : contract().operands(line))
    on_first[o.name] = local_shape(o.shape, o.layout, line.mesh(), 0)[0];
  EXPECT_EQ(on_first["x"], 4);
  EXPECT_EQ(on_first["dy"], 4);
  EXPECT_EQ(on_first["y"], 4);
  EXPECT_EQ(on_first["dw0"], 3);
  EXPECT_EQ(on_first["dw1"], 0);
  EXPECT_EQ(on_first["dw2"], 0);
  EXPECT_EQ(on_first["db3"], 3);
}

TEST(ScheduleContract, IntegersAreExactWhereTheNumberOfMicrobatchesIsAPowerOfTwo) {
  // Sums of at most 8 3^(2-1) = 24 products of three integers: 24 B^3 <= 2^11.
  const std::string words = "tokens=8 hidden=2 layers=2 dtype=f16 micro_batch_size=";
  EXPECT_EQ(contract().integer_range(line_of(words + "2")), 4);
  EXPECT_EQ(contract().integer_range(line_of(words + "2 loss=mean")), 4);
  EXPECT_EQ(contract().integer_range(line_of(words + "3 loss=mean")), std::nullopt);
  EXPECT_FALSE(contract().inexact(line_of(words + "2 loss=mean")));
  ASSERT_TRUE(contract().inexact(line_of(words + "3 loss=mean")));
}

// ---- Kernels and twins on numbers that are known: two stages, a layer of one column each

struct Ran {
  std::map<std::string, Doubles> results;
  std::vector<on_threads::Workspaces> used;
  const Doubles& operator[](const std::string& name) const { return results.at(name); }
};

Ran run(const std::string& words, const std::vector<Doubles>& inputs,
        const std::string& control = "") {
  const Case line = line_of(words);
  const auto operands = contract().operands(line);
  const auto make = [&] {
    for (const Control& c : family().controls())
      if (c.name == control) return c.make();
    return family().subject("pipeline_schedule", "").make();
  };
  auto ran = on_threads::run_step(line, operands, make, inputs);
  for (const std::string& thrown : ran.thrown) EXPECT_EQ(thrown, "");
  Ran r{{}, std::move(ran.forward)};
  for (size_t i = 0; i < ran.outputs.size(); ++i)
    r.results[operands[inputs.size() + i].name] = ran.outputs[i];
  return r;
}

// w_l = 1, b_l = 0, microbatches {1}, {2}, {3}, {4} with cotangents 1, 10, 100, 1000.
Ran run_four(const std::string& words, const std::string& control = "") {
  return run("pp=2 layers=2 hidden=1 tokens=4 micro_batch_size=1 " + words,
             {{1, 2, 3, 4}, {1}, {0}, {1}, {0}, {1, 10, 100, 1000}}, control);
}

TEST(ScheduleKernel, SumsOverMicrobatchesInAnyOrder) {
  for (const char* schedule : {"gpipe", "1f1b", "zero_bubble"}) {
    const Ran r = run_four("schedule=" + std::string(schedule));
    EXPECT_EQ(r["y"], (Doubles{1, 2, 3, 4}));
    EXPECT_EQ(r["dx"], (Doubles{1, 10, 100, 1000}));
    EXPECT_EQ(r["dw0"], (Doubles{1 + 20 + 300 + 4000}));
    EXPECT_EQ(r["dw1"], (Doubles{1 + 20 + 300 + 4000}));
    EXPECT_EQ(r["db0"], (Doubles{1111}));
    EXPECT_EQ(r["db1"], (Doubles{1111}));
  }
  const Ran mean = run_four("loss=mean");
  EXPECT_EQ(mean["dx"], (Doubles{0.25, 2.5, 25, 250}));
  EXPECT_EQ(mean["dw0"], (Doubles{4321 / 4.0}));
}

TEST(ScheduleTwins, DoWhatTheirNamesSay) {
  const std::string split = "schedule=zero_bubble";
  // Two layers a stage. On the last one W follow one backward late: that of 0 behind B of 1, ..
  const Ran latest = run("pp=2 layers=4 hidden=1 tokens=4 micro_batch_size=1 " + split,
                         {{1, 2, 3, 4}, {1}, {0}, {1}, {0}, {1}, {0}, {1}, {0}, {1, 10, 100, 1000}},
                         "schedule_weights_of_latest_cotangent");
  EXPECT_EQ(latest["dw3"], (Doubles{1 * 10 + 2 * 100 + 3 * 1000 + 4 * 1000}));
  EXPECT_EQ(latest["dw2"], latest["dw3"]);
  EXPECT_EQ(latest["dw1"], (Doubles{4321}));
  EXPECT_EQ(run_four(split, "schedule_deferred_dropped")["dw1"], (Doubles{321}));
  EXPECT_EQ(run_four(split, "schedule_deferred_dropped")["dw0"], (Doubles{4321}));
  EXPECT_EQ(run_four(split, "schedule_deferred_overwrites")["dw1"], (Doubles{4000}));
  // The second microbatch arrives before the backward of the first one; further ones do not.
  EXPECT_EQ(run_four("", "schedule_one_buffer_short")["dw1"], (Doubles{2 * 1 + 20 + 300 + 4000}));
  EXPECT_EQ(run_four("", "schedule_sent_behind_the_next")["y"], (Doubles{2, 3, 4, 4}));
  EXPECT_EQ(run_four("schedule=gpipe", "schedule_loss_of_latest_forward")["dx"], Doubles(4, 1000));
  EXPECT_EQ(run_four("", "schedule_loss_of_latest_forward")["dx"], (Doubles{1, 10, 100, 1000}));
  EXPECT_EQ(run_four("", "schedule_loss_of_next_microbatch")["dx"], (Doubles{10, 100, 1000, 1}));
  EXPECT_EQ(run_four("", "schedule_first_microbatch_alone")["dw0"], (Doubles{1}));
  EXPECT_EQ(run_four("", "schedule_divided_at_each_stage")["dw1"], (Doubles{4321}));
  EXPECT_EQ(run_four("", "schedule_divided_at_each_stage")["dw0"], (Doubles{4321 / 4.0}));
  EXPECT_EQ(run_four("loss=mean", "schedule_not_divided")["dw0"], (Doubles{4321}));
  EXPECT_EQ(run_four("loss=mean", "schedule_divided_by_stages")["dw0"], (Doubles{4321 / 2.0}));
  // w1 is 1, then 1 - 1, 1 - 21 and 1 - 321.
  EXPECT_EQ(run_four("", "schedule_backward_of_updated_weights")["dx"][1], 0);
  // Three layers on each stage, of weights 2, 3, 5 and 1, 1, 1: the second stage is given 30 x and
  // hands it on, and its second microbatch arrives before the backward of the first one.
  const auto again = [](const std::string& control) {
    return run("pp=2 layers=6 hidden=1 tokens=4 micro_batch_size=1 recompute=on",
               {{1, 2, 3, 4},
                {2},
                {0},
                {3},
                {0},
                {5},
                {0},
                {1},
                {0},
                {1},
                {0},
                {1},
                {0},
                {1, 10, 100, 1000}},
               control);
  };
  const Ran right = again(""), of_latest = again("schedule_made_again_of_latest_input"),
            of_chunks = again("schedule_made_again_of_chunks_input");
  EXPECT_EQ(right["dw4"], (Doubles{30 * 4321}));
  EXPECT_EQ(right["dw2"], (Doubles{6 * 4321}));
  EXPECT_EQ(of_latest["dw3"], (Doubles{30 * 4321}));
  EXPECT_EQ(of_latest["dw4"], (Doubles{30 * (2 * 1 + 20 + 300 + 4000)}));
  EXPECT_EQ(of_latest["dw2"], (Doubles{6 * 4321}));
  EXPECT_EQ(of_chunks["dw1"], (Doubles{5 * 2 * 4321}));
  EXPECT_EQ(of_chunks["dw2"], (Doubles{3 * 4321}));
  // 3 microbatches are missing of 4 stages' where there is 1.
  EXPECT_EQ(run("pp=2 layers=2 hidden=1 tokens=1 micro_batch_size=1",
                {{5}, {1}, {0}, {1}, {0}, {7}}, "schedule_bubbles_counted")["dw0"],
            (Doubles{2 * 35}));
}

// ---- What is held

// Blocks of microbatches, one row of three each, that a stage asked for beside what it always has.
int64_t blocks_of(const Ran& r, int stage) {
  const std::vector<int64_t> block{1, 3};
  const auto& shapes = r.used[size_t(stage)].shapes;
  return std::count(shapes.begin(), shapes.end(), block) - 1;  // what leaves
}

TEST(ScheduleKernel, HoldsWhatIsInFlight) {
  const auto held = [&](const std::string& schedule, int64_t microbatches, int stage) {
    const size_t n = size_t(3 * microbatches);
    const Ran r = run(
        "pp=2 layers=2 hidden=3 micro_batch_size=1 tokens=" + std::to_string(microbatches) +
            " schedule=" + schedule,
        {Doubles(n, 1), Doubles(9, 1), Doubles(3, 0), Doubles(9, 1), Doubles(3, 0), Doubles(n, 1)});
    return blocks_of(r, stage);
  };
  // The last stage: the input of the microbatch that it works on, and of the one that arrives.
  for (int64_t m : {4, 8, 16}) EXPECT_EQ(held("1f1b", m, 1), 2);
  for (int64_t m : {4, 8, 16}) EXPECT_EQ(held("gpipe", m, 1), m);
  // The first stage: the cotangent that has arrived; x is not copied.
  for (int64_t m : {4, 8, 16}) EXPECT_EQ(held("1f1b", m, 0), 1);
  EXPECT_EQ(held("1f1b", 1, 1), 1);
  // W is one backward late there, and done in the tick behind which the next input arrives.
  for (int64_t m : {4, 8, 16}) EXPECT_EQ(held("zero_bubble", m, 1), 2);
}

}  // namespace pipeline_schedule_test
}  // namespace
}  // namespace shardproof
