// Every fault planted in the judge as a test of its own: what a gate does beside its cases, one by
// one.
#include <gtest/gtest.h>

#include <set>

#include "oracle/self.hpp"
#include "suites/self/planted.hpp"

namespace shardproof {

void family_mapping(Registry&);

void PrintTo(const Planted& p, std::ostream* out) { *out << p.name; }

namespace {

class PlantedFault : public testing::TestWithParam<Planted> {};
INSTANTIATE_TEST_SUITE_P(Judge, PlantedFault, testing::ValuesIn(planted_faults()),
                         [](const auto& info) { return info.param.name; });

TEST_P(PlantedFault, GetsTheVerdictThatItDeserves) { EXPECT_EQ(GetParam().plant(1), ""); }

TEST(PlantedFaults, AreMany) { EXPECT_GE(planted_faults().size(), 45u); }

// However the cases are judged, beside the judge's own tests or after them, one that is missed
// makes the run a "no judgement".
TEST(PlantedFaults, AreToldByEveryGate) {
  Registry r;
  family_mapping(r);
  r.add(Planted{"seen", [](double) { return std::string(); }});
  r.add(Planted{"missed", [](double) { return std::string("expected failed, met passed"); }});
  Progress silent;
  Options options;
  options.tier = "smoke";
  options.transports = {"processes"};
  options.controls = false;
  const std::vector<std::string> one{"mapping_copy"}, two{"mapping_copy", "mapping_gather"};
  for (const auto& [patterns, jobs] : {std::pair(one, 1), {one, 2}, {two, 1}, {two, 2}}) {
    options.patterns = patterns;
    options.jobs = jobs;
    const size_t due = plan_gate(options, r).size();
    const Report report = run_gate(options, r, silent);
    EXPECT_EQ(report.self.planted, 2);
    EXPECT_EQ(report.self.named, 1);
    EXPECT_EQ(report.self.failures,
              std::vector<std::string>{"missed: expected failed, met passed"});
    EXPECT_EQ(report.cases.size(), due);
    EXPECT_EQ(exit_code(report), 3);
  }
}

// Else a machine so slow that the gate was given more time misses what crashes slowly.
TEST(PlantedFaults, HaveTheDeadlinesOfTheGate) {
  Registry r;
  family_mapping(r);
  r.add(Planted{"scaled", [](double scale) { return scale == 3 ? "" : "met another scale"; }});
  Progress silent;
  Options options;
  options.tier = "smoke";
  options.transports = {"processes"};
  options.controls = false;
  options.patterns = {"mapping_copy"};
  options.deadline_scale = 3;
  for (int jobs : {1, 2}) {
    options.jobs = jobs;
    EXPECT_EQ(run_gate(options, r, silent).self.failures, std::vector<std::string>{});
  }
}

// A subject that hangs on every line costs its deadline twice, and then a tenth of it; others are
// given theirs.
TEST(Runner, WhatHungTwiceIsGivenATenthOfItsDeadline) {
  Options options;
  options.deadline_scale = 0.2;  // healthy ranks have 6 s
  Runner runner(options, planted::registry());
  const auto told = [&](const std::string& subject) {
    const Case line = planted::line_of("mapping_reduce tp=4 tokens=3 hidden=5", subject);
    const Judged j = runner.run(line, {"forward"}, lane_of(line));
    std::string text = name(j.result.checks.at(0).verdict);
    for (const std::string& row : j.result.state)
      if (row.find("2 cases of it hung before") != std::string::npos) text += ", hastily";
    return text;
  };
  for (const char* due : {"hung", "hung", "hung, hastily"}) EXPECT_EQ(told("never_arrives"), due);
  EXPECT_EQ(told(""), "passed");
  EXPECT_EQ(told("never_arrives"), "hung, hastily");
}

TEST(Turns, GiveEachNumberOnceAcrossProcesses) {
  struct Numbers final : ResultSink {
    using ResultSink::put;
    void put(const CaseResult& r) override { found.insert(r.calls); }
    std::multiset<int64_t> found;
  };
  const auto numbers = std::make_shared<Numbers>();
  Turns turns;
  const auto work = [&](ResultSink& sink) {
    for (size_t i; (i = turns.next()) < 100;) {
      CaseResult r;
      r.calls = int64_t(i);
      sink.put(r);
    }
  };
  run_parts({{work, numbers}, {work, numbers}, {work, numbers}}, [] {});
  std::multiset<int64_t> each;
  for (int64_t i = 0; i < 100; ++i) each.insert(i);
  EXPECT_EQ(numbers->found, each);
}

}  // namespace
}  // namespace shardproof
