// Two reports side by side: what counts as lost, what is only said, what is refused. The reports
// are written out here, field by field, as their schema has them.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>

#include "oracle/case.hpp"
#include "oracle/gate.hpp"
#include "oracle/registry.hpp"
#include "oracle/report.hpp"
#include "oracle/report_diff.hpp"

namespace shardproof {
namespace {
namespace diff_test {

using Texts = std::vector<std::string>;

class Folder {
 public:
  Folder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "diff_test_XXXXXX").string();
    path_ = mkdtemp(pattern.data());
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

std::string check(const std::string& line, const std::string& name, const std::string& verdict,
                  const std::string& ratio = "null", const std::string& traffic = "4, 512") {
  const size_t comma = traffic.find(", ");
  return fmt::format(
      R"({{"line": "{}", "contract": "c", "check": "{}", "verdict": "{}", "ratio": {}, "calls": {},)"
      R"( "bytes": {}, "replay": "run {}"}})",
      line, name, verdict, ratio, traffic.substr(0, comma), traffic.substr(comma + 2), line);
}

std::string control(const std::string& name, const std::string& outcome, const std::string& margin,
                    bool exact = false) {
  return fmt::format(
      R"({{"line": "c tp=2 control={}", "control": "{}", "outcome": "{}", "margin": {}, "exact": {},)"
      R"( "replay": "run c tp=2 control={}"}})",
      name, name, outcome, margin, exact, name);
}

std::string lane(const std::string& name, bool proven, const std::string& reason = "") {
  return fmt::format(R"({{"name": "{}", "proven": {}, "reason": "{}"}})", name, proven, reason);
}

struct Given {
  Texts checks = {check("c tp=2", "forward", "passed", "0.25")};
  Texts controls = {control("twin", "caught", "41.0")};
  Texts lanes = {lane("processes.np2", true)};
  std::string verdict = "passed", schema = "1";
  bool complete = true;
  std::string text() const {
    return fmt::format(
        R"({{"schema": {}, "complete": {}, "verdict": "{}", "reasons": [], "program": "sp", "lanes": [{}],)"
        R"( "cases": [{}], "controls": [{}]}})",
        schema, complete, verdict, fmt::join(lanes, ","), fmt::join(checks, ","),
        fmt::join(controls, ","));
  }
};

class Diff : public testing::Test {
 protected:
  EarlierReport read(const std::string& text) {
    std::ofstream(folder_ / "report.json") << text;
    return read_report(folder_ / "report.json", "OLD");
  }
  ReportDiff diff(const Given& before, const Given& after) {
    const EarlierReport old = read(before.text());
    return diff_reports(old, read(after.text()));
  }
  Folder folder_;
};

Texts told(const std::vector<Change>& changes) {
  Texts texts;
  for (const Change& c : changes)
    texts.push_back(fmt::format("{} | {} | {} -> {}", c.what, c.on, c.before, c.after));
  return texts;
}

TEST_F(Diff, OfAReportWithItselfLosesNothing) {
  const ReportDiff d = diff({}, {});
  for (const auto* list : {&d.lost, &d.worse, &d.changed, &d.gained}) EXPECT_TRUE(list->empty());
  EXPECT_FALSE(d.only_old.any() || d.only_new.any());
  EXPECT_EQ(d.checks, 1);
  EXPECT_EQ(d.controls, 1);
}

// Every way from one verdict to another: what let a gate pass and does not is lost, and so is what
// was compared and is not any more.
TEST_F(Diff, VerdictsThatFlipped) {
  struct Step {
    const char *from, *to, *goes;
  };
  const std::vector<Step> steps = {
      {"passed", "failed", "lost"},     {"passed", "skipped", "lost"},
      {"passed", "hung", "lost"},       {"passed", "vacuous", "lost"},
      {"skipped", "failed", "lost"},    {"skipped", "passed", "gained"},
      {"failed", "passed", "gained"},   {"hung", "failed", "changed"},
      {"failed", "skipped", "changed"},
  };
  for (const Step& s : steps) {
    Given before, after;
    before.checks = {check("c tp=2", "forward", s.from)};
    after.checks = {check("c tp=2", "forward", s.to)};
    const ReportDiff d = diff(before, after);
    const Texts one = {fmt::format("verdict | c tp=2   forward | {} -> {}", s.from, s.to)};
    EXPECT_EQ(told(d.lost), std::string(s.goes) == "lost" ? one : Texts{}) << s.from << s.to;
    EXPECT_EQ(told(d.gained), std::string(s.goes) == "gained" ? one : Texts{}) << s.from << s.to;
    EXPECT_EQ(told(d.changed), std::string(s.goes) == "changed" ? one : Texts{}) << s.from << s.to;
  }
}

TEST_F(Diff, TheRunAsAWhole) {
  Given failed;
  failed.verdict = "no judgement";
  EXPECT_EQ(told(diff({}, failed).lost), (Texts{"run | as a whole | passed -> no judgement"}));
  EXPECT_EQ(told(diff(failed, {}).gained), (Texts{"run | as a whole | no judgement -> passed"}));
  // Of other lines: each that does not pass is told, and no judgement keeps nothing.
  failed.checks.push_back(check("c tp=4", "forward", "passed"));
  EXPECT_EQ(told(diff({}, failed).lost), (Texts{"run | as a whole | passed -> no judgement"}));
  failed.verdict = "failed";
  EXPECT_TRUE(diff({}, failed).lost.empty());
  EXPECT_EQ(told(diff({}, failed).changed), (Texts{"run | as a whole | passed -> failed"}));
  Given unfit = failed;
  unfit.verdict = "no judgement";
  EXPECT_EQ(told(diff(failed, unfit).lost), (Texts{"run | as a whole | failed -> no judgement"}));
  EXPECT_TRUE(diff(unfit, unfit).lost.empty());
}

// A CI that tolerates what failed before would turn green on it.
TEST_F(Diff, WhatFailsInNewAloneIsLost) {
  for (const char* verdict : {"failed", "hung", "crashed", "vacuous", "untested"}) {
    Given a, b;
    a.checks.push_back(check("c tp=4", "forward", "failed"));
    b.checks = a.checks;
    EXPECT_TRUE(diff(a, b).lost.empty());
    b.checks.push_back(check("c tp=8", "forward", verdict));   // a new line
    b.checks.push_back(check("c tp=2", "gradient", verdict));  // a new check of an old one
    b.checks.push_back(check("c tp=6", "forward", "passed"));
    b.checks.push_back(check("c tp=6", "gradient", "skipped"));
    const std::string flipped = std::string(" | not there -> ") + verdict;
    EXPECT_EQ(told(diff(a, b).lost), (Texts{"verdict | c tp=2   gradient" + flipped,
                                            "verdict | c tp=8   forward" + flipped}));
    EXPECT_TRUE(diff(b, a).lost.empty());  // it is gone
  }
}

TEST_F(Diff, ControlsOfNewAloneThatAreNotCaughtAreLost) {
  const auto lost = [&](const std::string& other) {
    Given b;
    b.controls.push_back(other);
    EXPECT_TRUE(diff(b, {}).lost.empty());
    return told(diff({}, b).lost);
  };
  const std::string on = "control | other on c tp=2 control=other | not there -> ";
  EXPECT_EQ(lost(control("other", "escaped", "null")), Texts{on + "escaped"});
  EXPECT_EQ(lost(control("other", "wrong_check", "null")), Texts{on + "wrong_check"});
  EXPECT_EQ(lost(control("other", "caught", "9.0")), Texts{on + "margin 9.0"});
  // Of one that is unjudged what fails beside it decides.
  for (const char* outcome : {"equivalent", "unproven", "unjudged"})
    EXPECT_EQ(lost(control("other", outcome, "null")), Texts{}) << outcome;
  EXPECT_EQ(lost(control("other", "caught", "10.0")), Texts{});
  EXPECT_EQ(lost(control("other", "caught", "\"inf\"", true)), Texts{});
}

TEST_F(Diff, WhatWasNotJudgedIsNotKept) {
  Given cut, other, none;
  cut.complete = false;
  EXPECT_EQ(told(diff({}, cut).lost),
            (Texts{"run | as a whole | ran to its end -> did not run to its end"}));
  EXPECT_EQ(told(diff(cut, cut).lost),
            (Texts{"run | as a whole | did not run to its end -> did not run to its end"}));
  EXPECT_TRUE(diff(cut, {}).lost.empty());
  other.checks = {check("c tp=8", "forward", "passed")}, none.checks = {};
  EXPECT_EQ(told(diff({}, other).lost), (Texts{"run | as a whole | 1 check -> none of these"}));
  EXPECT_EQ(told(diff({}, none).lost), (Texts{"run | as a whole | 1 check -> none of these"}));
  EXPECT_TRUE(diff(none, other).lost.empty());
}

TEST_F(Diff, RatiosThatGrewByThree) {
  const auto worse = [&](const char* before, const char* after) {
    Given a, b;
    a.checks = {check("c tp=2", "forward", "passed", before)};
    b.checks = {check("c tp=2", "forward", "passed", after)};
    const ReportDiff d = diff(a, b);
    EXPECT_TRUE(d.lost.empty());
    return told(d.worse);
  };
  EXPECT_EQ(worse("0.125", "0.375"), (Texts{"ratio | c tp=2   forward | 0.12 -> 0.38"}));
  EXPECT_EQ(worse("0.125", "0.3749"), Texts{});
  EXPECT_EQ(worse("0.375", "0.125"), Texts{});
  EXPECT_EQ(worse("0.0", "0.5"), (Texts{"ratio | c tp=2   forward | 0 -> 0.5"}));
  EXPECT_EQ(worse("0.0", "0.0"), Texts{});
  EXPECT_EQ(worse("null", "0.5"), Texts{});
}

TEST_F(Diff, OfOneKindTheGreatestComesFirst) {
  Given a, b;
  a.checks = {check("c tp=2", "forward", "passed", "0.125"),
              check("c tp=4", "forward", "passed", "0.125")};
  b.checks = {check("c tp=2", "forward", "passed", "0.5"),
              check("c tp=4", "forward", "passed", "0.75")};
  EXPECT_EQ(told(diff(a, b).worse), (Texts{"ratio | c tp=4   forward | 0.12 -> 0.75",
                                           "ratio | c tp=2   forward | 0.12 -> 0.5"}));
}

TEST_F(Diff, CallsAndBytesThatChangedAreSaidOnceALine) {
  Given a, b;
  a.checks = {check("c tp=2", "forward", "passed"), check("c tp=2", "ledger", "passed"),
              check("c tp=4", "forward", "passed", "null", "null, null")};
  b.checks = {check("c tp=2", "forward", "passed", "null", "5, 512"),
              check("c tp=2", "ledger", "passed", "null", "5, 512"),
              check("c tp=4", "forward", "passed")};
  const ReportDiff d = diff(a, b);
  EXPECT_EQ(told(d.changed),
            (Texts{"traffic | c tp=2 | 4 calls, 512 bytes -> 5 calls, 512 bytes"}));
  EXPECT_TRUE(d.lost.empty());
}

TEST_F(Diff, OtherBytesInAsManyCallsAreSaid) {
  Given a, b;
  a.checks = {check("c tp=2", "forward", "passed")};
  b.checks = {check("c tp=2", "forward", "passed", "null", "4, 1024")};
  EXPECT_EQ(told(diff(a, b).changed),
            (Texts{"traffic | c tp=2 | 4 calls, 512 bytes -> 4 calls, 1024 bytes"}));
  // The largest change first, whichever way it goes.
  a.checks.push_back(check("c tp=4", "forward", "passed", "null", "4, 4096"));
  b.checks.push_back(check("c tp=4", "forward", "passed", "null", "4, 512"));
  EXPECT_EQ(told(diff(a, b).changed),
            (Texts{"traffic | c tp=4 | 4 calls, 4096 bytes -> 4 calls, 512 bytes",
                   "traffic | c tp=2 | 4 calls, 512 bytes -> 4 calls, 1024 bytes"}));
}

TEST_F(Diff, MarginsThatFellToAThird) {
  const auto worse = [&](const char* before, const char* after) {
    Given a, b;
    a.controls = {control("twin", "caught", before)};
    b.controls = {control("twin", "caught", after)};
    const ReportDiff d = diff(a, b);
    EXPECT_TRUE(d.lost.empty());
    return told(d.worse);
  };
  EXPECT_EQ(worse("60.0", "20.0"), (Texts{"margin | twin on c tp=2 control=twin | 60 -> 20"}));
  EXPECT_EQ(worse("60.0", "20.1"), Texts{});
  EXPECT_EQ(worse("20.0", "60.0"), Texts{});
}

TEST_F(Diff, ControlsAndMarginsThatWereLost) {
  const auto lost = [&](const std::string& before, const std::string& after) {
    Given a, b;
    a.controls = {before}, b.controls = {after};
    return told(diff(a, b).lost);
  };
  const Texts none;
  const std::string on = "twin on c tp=2 control=twin | ";
  const std::string strong = control("twin", "caught", "41.0"),
                    edge = control("twin", "caught", "10.0"),
                    weak = control("twin", "caught", "9.99"),
                    exact = control("twin", "caught", "\"inf\"", true),
                    unknown = control("twin", "caught", "\"nan\""),
                    same = control("twin", "equivalent", "null");
  EXPECT_EQ(lost(strong, control("twin", "escaped", "null")),
            (Texts{"control | " + on + "caught -> escaped"}));
  EXPECT_EQ(lost(strong, same), (Texts{"control | " + on + "caught -> equivalent"}));
  EXPECT_EQ(lost(same, control("twin", "wrong_check", "null")),
            (Texts{"control | " + on + "equivalent -> wrong_check"}));
  EXPECT_EQ(lost(same, weak), (Texts{"control | " + on + "equivalent -> caught"}));
  EXPECT_EQ(lost(same, strong), none);
  EXPECT_EQ(lost(strong, edge), none);
  EXPECT_EQ(lost(strong, weak), (Texts{"margin | " + on + "41 -> 10"}));
  EXPECT_EQ(lost(exact, weak), (Texts{"margin | " + on + "exact -> 10"}));
  EXPECT_EQ(lost(strong, unknown), (Texts{"margin | " + on + "41 -> nan"}));
  EXPECT_EQ(lost(weak, weak), none);
  EXPECT_EQ(lost(weak, strong), none);
  EXPECT_EQ(lost(exact, strong), none);
}

// A line that stands in a report twice is as bad as the worse of its entries, in either order.
TEST_F(Diff, OfEqualLinesTheWorseCounts) {
  Given twice;
  for (const bool first : {true, false}) {
    twice.controls = {control("twin", first ? "escaped" : "caught", "41.0"),
                      control("twin", first ? "caught" : "escaped", "41.0")};
    twice.checks = {check("c tp=2", "forward", first ? "failed" : "passed"),
                    check("c tp=2", "forward", first ? "passed" : "failed")};
    EXPECT_EQ(diff({}, twice).lost.size(), 2u);
    EXPECT_EQ(diff(twice, twice).lost.size(), 0u);
    Given skips;
    skips.checks = {check("c tp=2", "forward", first ? "skipped" : "passed"),
                    check("c tp=2", "forward", first ? "passed" : "skipped")};
    EXPECT_EQ(diff({}, skips).lost.size(), 1u);
  }
}

TEST_F(Diff, LanesThatWereLost) {
  Given a, b;
  a.lanes = {lane("processes.np2", true), lane("mpi.np8", true), lane("staged.np2", true),
             lane("nccl.np2", true), lane("threads.np2", true)};
  b.lanes = {lane("processes.np2", true), lane("mpi", false, "no mpiexec"),
             lane("staged.np2", false, "skipped"), lane("nccl", false, "not asked for")};
  const ReportDiff d = diff(a, b);
  EXPECT_EQ(told(d.lost), (Texts{"lane | mpi.np8 | proven -> not proven (no mpiexec)",
                                 "lane | staged.np2 | proven -> not proven (skipped)"}));
  EXPECT_EQ(d.only_old.lanes, (Texts{"nccl.np2", "threads.np2"}));
  EXPECT_EQ(told(diff(b, a).gained), (Texts{"lane | staged.np2 | not proven (skipped) -> proven"}));
}

TEST_F(Diff, OtherSelectionsAreComparedWhereTheyMeet) {
  Given a, b;
  a.checks.push_back(check("c tp=4", "forward", "failed"));
  a.checks.push_back(check("c tp=4", "gradient", "failed"));
  b.checks.push_back(check("c tp=8", "forward", "failed"));
  a.controls.push_back(control("old", "caught", "41.0"));
  const ReportDiff d = diff(a, b);
  EXPECT_EQ(told(d.lost), Texts{"verdict | c tp=8   forward | not there -> failed"});
  EXPECT_EQ(d.checks, 1);
  EXPECT_EQ(d.only_old.checks, 2);
  EXPECT_EQ(d.only_old.lines, 1);
  EXPECT_EQ(d.only_old.controls, 1);
  EXPECT_EQ(d.only_new.checks, 1);
  EXPECT_NE(
      diff_text(d).find("\nonly OLD   2 checks on 1 line (the first: c tp=4), 2 of these did not "
                        "pass (the first: c tp=4), 1 control\n"),
      std::string::npos)
      << diff_text(d);
  // How many of the checks of NEW alone fail is said.
  b.checks.insert(b.checks.begin(), check("c tp=6", "forward", "passed"));
  b.checks.push_back(check("c tp=8", "gradient", "skipped"));
  for (const std::string& text : {diff_text(diff(a, b)), diff_markdown(diff(a, b))})
    EXPECT_NE(text.find("1 of these did not pass (the first: c tp=8)"), std::string::npos) << text;
}

TEST_F(Diff, TextSaysWhatWasLostFirstAndHowToReplayIt) {
  Given b;
  b.checks = {check("c tp=2", "forward", "failed", "7.5")};
  b.verdict = "failed";
  ReportDiff d = diff({}, b);
  d.old_path = "old", d.new_path = "new";
  EXPECT_EQ(diff_text(d),
            "OLD        old   passed\n"
            "NEW        new   failed\n"
            "LOST       run      as a whole   passed -> failed\n"
            "LOST       verdict  c tp=2   forward   passed -> failed\n"
            "replay     sp run c tp=2\n"
            "LOST       1 check and 1 control in both, 2 LOST\n");
}

TEST_F(Diff, ChecksOfOneLineAreReplayedOnce) {
  Given a, b;
  for (const char* name : {"gradient", "ledger"}) {
    a.checks.push_back(check("c tp=2", name, "passed"));
    b.checks.push_back(check("c tp=2", name, "failed"));
  }
  const ReportDiff d = diff(a, b);
  ASSERT_EQ(d.lost.size(), 2u);
  for (const std::string& text : {diff_text(d), diff_markdown(d)}) {
    const size_t first = text.find("sp run c tp=2");
    EXPECT_NE(first, std::string::npos) << text;
    EXPECT_EQ(text.find("sp run c tp=2", first + 1), std::string::npos) << text;
  }
}

TEST_F(Diff, MarkdownHoldsWhateverAReportDoes) {
  Given a, b;
  a.checks = b.checks = {};
  for (int i = 0; i < 3000; i++) {
    const std::string line = "x|y<script>" + std::string(600, 'z') + std::to_string(i);
    a.checks.push_back(check(line, "forward", "passed", "0.1"));
    b.checks.push_back(check(line, "forward", i % 2 ? "failed" : "passed", "0.9"));
  }
  const std::string text = diff_markdown(diff(a, b));
  EXPECT_TRUE(text.starts_with("## Shardproof: LOST\n")) << text.substr(0, 100);
  EXPECT_LT(text.size(), 65536u);
  EXPECT_EQ(text.find("<script>"), text.find("run x|y<script>") + 7);  // in a fence only
  EXPECT_NE(text.find("x\\|y&lt;script&gt;"), std::string::npos);
  EXPECT_NE(text.find("\n1480 more.\n"), std::string::npos);
}

TEST_F(Diff, WhatTheGateWritesIsRead) {
  Report r;
  r.complete = true;
  CaseResult c;
  c.line = c.canonical = "c tp=2";
  c.replay = "run c tp=2";
  c.calls = 12, c.bytes = 1152;
  CheckResult k;
  k.check = "forward", k.verdict = Verdict::passed, k.ratio = 0.25;
  c.checks = {k};
  r.cases = {c};
  const EarlierReport e = read(report_json(r));
  ASSERT_EQ(e.checks.size(), 1u);
  EXPECT_EQ(e.checks[0].ratio, 0.25);
  EXPECT_EQ(e.checks[0].calls, 12);
  EXPECT_EQ(e.checks[0].bytes, 1152);
}

// Y = X W^T + b with the inner dim cut over tp: one all-reduce of Y's 24 x 7 doubles on each of two
// ranks in the forward, nothing in the backward.
TEST(Traffic, IsWhatOneForwardAndOneBackwardAskOfOtherRanks) {
  const Registry registry = all_families();
  Progress silent;
  Options options;
  const Report r =
      run_line(parse("linear_row tp=2 tokens=24 out=7", registry), options, registry, silent);
  EXPECT_EQ(r.cases.at(0).calls, 2);
  EXPECT_EQ(r.cases.at(0).bytes, 2 * 24 * 7 * 8);
}

// Jobs of a gate are processes: what they judged arrives whole.
TEST(Traffic, AndCatchesCrossFromTheJobsOfAGate) {
  const Registry registry = all_families();
  Progress silent;
  Options options;
  options.patterns = {"linear_row", "mapping_copy"};
  options.tier = "smoke";
  options.transports = {"processes"};
  options.self = false;
  options.jobs = 2;
  const Report r = run_gate(options, registry, silent);
  ASSERT_GT(r.cases.size(), 10u);
  for (const CaseResult& c : r.cases) EXPECT_GE(c.calls, 0) << c.line;
  size_t caught = 0;
  for (const ControlResult& c : r.controls)
    if (c.outcome == ControlResult::caught) {
      caught++;
      EXPECT_FALSE(c.catches.empty()) << c.witness;
    }
  EXPECT_GT(caught, 10u);
}

struct Refused {
  std::string text, says;
};

TEST_F(Diff, RefusesWhatIsNoReport) {
  const std::string good = Given{}.text();
  const auto with = [&](const std::string& from, const std::string& to) {
    std::string text = good;
    return text.replace(text.find(from), from.size(), to);
  };
  const std::vector<Refused> table = {
      {"", "cut short"},
      {good.substr(0, good.size() / 2), "cut short"},
      {"[]", "opens with its schema"},
      {"[{\"schema\": 1}]", "opens with its schema"},
      {"{}", "opens with its schema"},
      {with("\"schema\": 1", "\"schema\": 2"), "expected schema 1, met 2"},
      {with("\"schema\": 1", "\"schema\": \"1\""), "expected schema 1, met the text"},
      {with("\"complete\": true", "\"complete\": true, \"complete\": true"), "'complete' twice"},
      {with("\"complete\": true", "\"complete\": 1"), "'complete' to be true or false, met 1"},
      {with("\"cases\"", "\"kases\""), "expected a list 'cases', met none"},
      {with("\"verdict\": \"passed\", \"ratio\"", "\"verdict\": 7, \"ratio\""),
       "cases[0]: expected 'verdict' to be a text, met 7"},
      {with("0.25", "\"much\""), "cases[0]: expected 'ratio' to be a number"},
      {with("\"calls\": 4", "\"calls\": -4"), "cases[0]: expected 'calls' to be a count or null"},
      {with("\"outcome\"", "\"income\""), "controls[0]: expected a member 'outcome', met none"},
      {with("\"controls\": [", "\"controls\": [3, "), "controls[0]: expected an object, met 3"},
      {with("0.25", std::string(20, '[') + std::string(20, ']')), "at most 8"},
  };
  for (const Refused& r : table) {
    try {
      read(r.text);
      ADD_FAILURE() << "read " << r.text;
    } catch (const BadInput& e) {
      const std::string what = e.what();
      EXPECT_TRUE(what.starts_with("OLD: ")) << what;
      EXPECT_NE(what.find(r.says), std::string::npos) << what << "\nof " << r.text;
      EXPECT_EQ(what.find('\n'), std::string::npos);
    }
  }
  EXPECT_THROW(read_report(folder_ / "none", "OLD"), BadInput);
  std::ofstream(folder_ / "huge.json").close();
  std::filesystem::resize_file(folder_ / "huge.json", uintmax_t(1) << 40);  // a hole
  EXPECT_THROW(read_report(folder_ / "huge.json", "OLD"), BadInput);
}

}  // namespace diff_test
}  // namespace
}  // namespace shardproof
