// The report says exactly what was seen: blocks as they are documented, exit codes for every way in
// which a run can lie, files that strict readers accept whatever a subject threw.
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <limits>
#include <sstream>

#include "oracle/case.hpp"
#include "oracle/checks/patterns.hpp"
#include "oracle/comm/door.hpp"
#include "oracle/report.hpp"
#include "oracle/report_parts.hpp"
#include "oracle/time_left.hpp"

namespace shardproof {
namespace {
namespace report_test {

constexpr double inf = std::numeric_limits<double>::infinity();
constexpr double nan = std::numeric_limits<double>::quiet_NaN();

// ---- what the tests tell about
// --------------------------------------------------------------------

CheckResult check(const std::string& name, Verdict v, double ratio = 0, bool exact = false) {
  CheckResult c;
  c.check = name;
  c.verdict = v;
  c.ratio = ratio;
  c.exact = exact;
  return c;
}

CaseResult healthy(const std::string& line = "linear_row tp=4", double ratio = 0.25) {
  CaseResult c;
  c.line = line;
  c.canonical = line + " dtype=f64 fill=normal seed=1";
  c.replay = "run " + line;
  c.family = "linear";
  c.contract = "linear_row";
  c.lane = "processes.np4";
  c.checks = {check("forward", Verdict::passed, ratio), check("ledger", Verdict::passed)};
  c.seconds = 0.5;
  return c;
}

CaseResult with(Verdict v) {
  CaseResult c = healthy();
  c.checks[0].verdict = v;
  return c;
}

// The example of a bias gradient that was summed twice: 4 ranks, 7 elements, integers.
CaseResult bias_summed_twice() {
  CaseResult c = healthy("linear_row tp=4 sp=on");
  c.canonical = "linear_row tp=4 sp=on dtype=f64 fill=integers seed=1";
  c.replay = "run linear_row tp=4 sp=on --check gradient";
  CheckResult gradient = check("gradient", Verdict::failed, inf, true);
  Finding f;
  f.check = "gradient";
  f.tensor = "gradient of b";
  f.means = "a sum that was already whole was summed again; replicas agree, a hash cannot see this";
  f.where = "b[0]";
  f.index = {0};
  f.rank = 0;
  f.ranks = {0, 1, 2, 3};
  f.numeric = true;
  f.got = 12;
  f.want = 3;
  f.error = 9;
  f.ratio = inf;
  f.wrong = f.compared = 7;
  f.pattern = "all x 4.000 = tp";
  gradient.findings = {f};
  c.checks = {check("forward", Verdict::passed, 0, true), gradient,
              check("adjoint", Verdict::passed, 0, true), check("ledger", Verdict::passed)};
  return c;
}

ControlResult caught(const std::string& name = "bias_before_reduce", double margin = 41) {
  ControlResult c;
  c.name = name;
  c.family = "linear";
  c.contract = "linear_row";
  c.lane = "processes.np4";
  c.imitates = "huggingface/text-generation-inference 1036";
  c.expected_check = c.caught_by = "forward";
  c.witness = "linear_row tp=4 control=" + name;
  c.replay = "run " + c.witness;
  c.outcome = ControlResult::caught;
  c.ratio = 100;
  c.margin = margin;
  c.bound = 1e-12;
  return c;
}

ControlResult with(ControlResult::Outcome o) {
  ControlResult c = caught();
  c.outcome = o;
  return c;
}

Report report_of(std::vector<CaseResult> cases, std::vector<ControlResult> controls = {caught()}) {
  Report r;
  r.complete = true;
  r.program = "build/shardproof";
  r.command = "build/shardproof gate";
  r.cases = std::move(cases);
  r.controls = std::move(controls);
  r.lanes = {{"processes.np4", true, ""}};
  r.wall_seconds = 34;
  return r;
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}
size_t occurrences(const std::string& text, const std::string& part) {
  size_t n = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + part.size()))
    n++;
  return n;
}

// ---- a strict reader of JSON (RFC 8259) of its own: path -> literal text
// ---------------------------

class StrictJson {
 public:
  explicit StrictJson(const std::string& text) : s_(text) {
    value("");
    blank();
    if (at_ != s_.size()) fail("text behind the value");
  }
  // "summary.cases" -> 2, "cases[0].ratio" -> "inf" with its quotes; "" where there is none.
  std::string operator[](const std::string& path) const {
    auto found = values_.find(path);
    return found == values_.end() ? "" : found->second;
  }

 private:
  void fail(const std::string& what) const {
    throw std::runtime_error(what + " at byte " + std::to_string(at_));
  }
  void blank() {
    while (at_ < s_.size() && std::string_view(" \n\r\t").find(s_[at_]) != std::string_view::npos)
      at_++;
  }
  char peek() {
    blank();
    return at_ < s_.size() ? s_[at_] : '\0';
  }
  void expect(char c) {
    if (peek() != c) fail(std::string("no ") + c);
    at_++;
  }
  std::string string() {
    expect('"');
    std::string raw;
    while (at_ < s_.size() && s_[at_] != '"') {
      if (uint8_t(s_[at_]) < 0x20) fail("a control character in a string");
      if (s_[at_] == '\\') raw += s_[at_++];
      raw += s_[at_++];
    }
    expect('"');
    return raw;
  }
  void value(const std::string& path) {
    const char c = peek();
    if (c == '{') return object(path);
    if (c == '[') return array(path);
    if (c == '"') {
      values_[path] = '"' + string() + '"';
      return;
    }
    const size_t from = at_;
    while (at_ < s_.size() && std::string_view(",]} \n").find(s_[at_]) == std::string_view::npos)
      at_++;
    const std::string word = s_.substr(from, at_ - from);
    if (word != "null" && word != "true" && word != "false") {
      if (word.find_first_not_of("0123456789+-.eE") != std::string::npos || word.empty())
        fail("not JSON: " + word);
    }
    values_[path] = word;
  }
  void object(const std::string& path) {
    expect('{');
    if (peek() == '}') return expect('}');
    while (true) {
      blank();
      const std::string key = string();
      const std::string inner = path.empty() ? key : path + "." + key;
      expect(':');
      value(inner);
      if (peek() != ',') break;
      expect(',');
    }
    expect('}');
  }
  void array(const std::string& path) {
    int n = 0;
    expect('[');
    if (peek() != ']') {
      value(path + "[0]");
      n = 1;
      while (peek() == ',') {
        expect(',');
        value(path + "[" + std::to_string(n++) + "]");
      }
    }
    expect(']');
    values_[path + ".length"] = std::to_string(n);
  }

  std::string s_;
  size_t at_ = 0;
  std::map<std::string, std::string> values_;
};

class Folder {
 public:
  Folder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "report_test_XXXXXX").string();
    path_ = mkdtemp(pattern.data());
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

std::string read(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

// ---- the exit code
// --------------------------------------------------------------------------------

TEST(ExitCode, PassesOnlyWhenEverythingDuePassed) {
  EXPECT_EQ(exit_code(report_of({healthy()})), 0);
  EXPECT_EQ(exit_code(report_of({healthy(), with(Verdict::skipped)})), 0);
}

TEST(ExitCode, BlamesASubjectThatFailedHungOrCrashed) {
  for (Verdict v : {Verdict::failed, Verdict::hung, Verdict::crashed})
    EXPECT_EQ(exit_code(report_of({healthy(), with(v)})), 1) << name(v);
}

TEST(ExitCode, GivesNoJudgementWhereNothingWasJudged) {
  EXPECT_EQ(exit_code(Report{}), 3);
  EXPECT_EQ(exit_code(report_of({}, {})), 3);
  for (Verdict v : {Verdict::untested, Verdict::vacuous})
    EXPECT_EQ(exit_code(report_of({healthy(), with(v)})), 3) << name(v);
  CaseResult skips = healthy();
  for (CheckResult& c : skips.checks) c.verdict = Verdict::skipped;
  EXPECT_EQ(exit_code(report_of({skips, skips}, {})), 3);
  EXPECT_EQ(exit_code(report_of({skips, skips}, {caught()})), 3);
  CaseResult empty = healthy();
  empty.checks.clear();
  EXPECT_EQ(exit_code(report_of({healthy(), empty})), 3);
}

// A check that a crash left without an answer is explained by the crash.
TEST(ExitCode, ACrashExplainsWhatCouldNotBeTested) {
  CaseResult c = with(Verdict::crashed);
  c.checks[1].verdict = Verdict::untested;
  EXPECT_EQ(exit_code(report_of({healthy(), c})), 1);
}

TEST(ExitCode, AnUnfitJudgeBlamesNobody) {
  for (auto outcome : {ControlResult::escaped, ControlResult::wrong_check}) {
    EXPECT_EQ(exit_code(report_of({healthy()}, {caught(), with(outcome)})), 3) << name(outcome);
    EXPECT_EQ(exit_code(report_of({with(Verdict::failed)}, {with(outcome)})), 3) << name(outcome);
  }
  EXPECT_EQ(exit_code(report_of({healthy()}, {with(ControlResult::equivalent)})), 0);
}

// What a wrong subject leaves unjudged says nothing about the judge; without a failure it needs
// one.
TEST(ExitCode, AControlWithoutAHealthyTwinIsExplainedByTheFailure) {
  const auto unjudged = with(ControlResult::unjudged);
  EXPECT_EQ(exit_code(report_of({with(Verdict::failed)}, {caught(), unjudged})), 1);
  EXPECT_EQ(exit_code(report_of({healthy()}, {caught(), unjudged})), 3);
  EXPECT_EQ(counts(report_of({}, {unjudged})).unjudged, 1);
  ControlResult open = unjudged;
  open.name = "left_open";
  open.reason = "the launcher was killed";
  EXPECT_EQ(no_judgement(report_of({healthy()}, {open})),
            std::vector<std::string>{"1 control unjudged (left_open): the launcher was killed"});
}

// Nobody is blamed for a machine that is too small for a control, and none is counted as caught.
TEST(ExitCode, AControlForWhichTheMachineIsTooSmallIsCountedApart) {
  const auto unproven = with(ControlResult::unproven);
  EXPECT_EQ(exit_code(report_of({healthy()}, {caught(), unproven})), 0);
  const Counts n = counts(report_of({}, {caught(), unproven}));
  EXPECT_EQ(n.unproven, 1);
  EXPECT_EQ(n.caught, 1);
}

TEST(ExitCode, AMarginUnderTenProvesNothingUnlessExact) {
  EXPECT_EQ(exit_code(report_of({healthy()}, {caught("c", 9.99)})), 3);
  EXPECT_EQ(exit_code(report_of({healthy()}, {caught("c", 10)})), 0);
  EXPECT_EQ(exit_code(report_of({healthy()}, {caught("c", inf)})), 0);
  EXPECT_EQ(exit_code(report_of({healthy()}, {caught("c", nan)})), 3);
  ControlResult exact = caught("c", 0);
  exact.exact = true;
  EXPECT_EQ(exit_code(report_of({healthy()}, {exact})), 0);
  ControlResult equivalent = caught("c", 0);
  equivalent.outcome = ControlResult::equivalent;
  EXPECT_EQ(exit_code(report_of({healthy()}, {equivalent})), 0);
}

TEST(ExitCode, TheSelfSuiteMustNameEveryPlantedFault) {
  Report r = report_of({healthy()});
  r.self = {48, 48, {}, 1.1};
  EXPECT_EQ(exit_code(r), 0);
  r.self.named = 47;
  EXPECT_EQ(exit_code(r), 3);
  r.self = {48, 48, {"transport self-test: mpi.np4"}, 1.1};
  EXPECT_EQ(exit_code(r), 3);
}

TEST(ExitCode, RequiredLanesMustBeProven) {
  Report r = report_of({healthy()});
  r.lanes = {{"processes.np4", true, ""}, {"mpi.np4", true, ""}, {"mpi.np8", false, "skipped"}};
  r.required = {"processes.np4", "mpi.np4"};
  EXPECT_EQ(exit_code(r), 0);
  for (const char* lane : {"mpi.np8", "mpi", "mpi.np2", "nccl.np2", "mpi.np"}) {
    r.required = {lane};
    EXPECT_EQ(exit_code(r), 3) << lane;
  }
  // One rank is not the sixteen whose name begins alike.
  r.lanes = {{"mpi.np16", true, ""}};
  r.required = {"mpi.np1"};
  EXPECT_EQ(exit_code(r), 3);
}

// Stopped at the first failure: the failure stands. Stopped for any other reason: no judgement.
TEST(ExitCode, ARunThatDidNotEndCannotPass) {
  Report r = report_of({healthy()});
  r.complete = false;
  EXPECT_EQ(exit_code(r), 3);
  r.cases.push_back(with(Verdict::failed));
  EXPECT_EQ(exit_code(r), 1);
}

// What failed until then stands, and every form says that there was more to come.
TEST(Reports, OfARunThatDidNotEndSayIt) {
  Report r = report_of({bias_summed_twice()});
  const std::string said = "the run did not reach its end";
  EXPECT_FALSE(contains(report_json(r) + junit_xml(r) + summary_markdown(r) + closing(r), said));
  r.complete = false;
  EXPECT_TRUE(contains(report_json(r), "\"reasons\": [\"" + said + "\"]")) << report_json(r);
  EXPECT_TRUE(contains(junit_xml(r), "<failure type=\"incomplete\" message=\"" + said + "\""))
      << junit_xml(r);
  EXPECT_TRUE(contains(summary_markdown(r), "in 1 of 1 case; " + said)) << summary_markdown(r);
  EXPECT_TRUE(contains(closing(r), said));
}

// Of a few lines all, of many the first ones.
TEST(Reports, SayWhichLinesWereLeftOut) {
  Report r = report_of({healthy()});
  EXPECT_FALSE(contains(closing(r), "left out"));
  r.left_out = {"a", "b", "c", "d"};
  EXPECT_TRUE(contains(closing(r), "left out   4 lines: a, b, c, d\n")) << closing(r);
  r.left_out.push_back("e");
  EXPECT_TRUE(contains(closing(r), "left out   5 lines: a, b, c and 2 more\n")) << closing(r);
  EXPECT_TRUE(contains(report_json(r), "\"e\"")) << report_json(r);
}

// In the report as in the exit code, whatever was judged.
TEST(ExitCode, WhatCouldNotBeDumpedIsNoJudgement) {
  for (Verdict v : {Verdict::passed, Verdict::failed}) {
    Report r = report_of({with(v)});
    r.dump_error = "expected a file that can be written, met 'File too large'";
    EXPECT_EQ(exit_code(r), 3);
    EXPECT_NE(report_json(r).find("\"exit_code\": 3"), std::string::npos);
    EXPECT_NE(report_json(r).find("[\"--dump: expected a file"), std::string::npos);
  }
}

TEST(Counts, ChecksAndCasesAreCountedApart) {
  const Counts n = counts(report_of({healthy(), with(Verdict::failed), with(Verdict::hung)},
                                    {caught(), with(ControlResult::escaped)}));
  EXPECT_EQ(n.cases, 3);
  EXPECT_EQ(n.checks, 6);
  EXPECT_EQ(n.passed, 4);
  EXPECT_EQ(n.failed, 1);
  EXPECT_EQ(n.hung, 1);
  EXPECT_EQ(n.controls, 2);
  EXPECT_EQ(n.caught, 1);
  EXPECT_EQ(n.escaped, 1);
}

// ---- the terminal
// ---------------------------------------------------------------------------------

TEST(Block, AFailureSaysWhereWhatItMeansAndHowToReplay) {
  EXPECT_EQ(
      block(bias_summed_twice(), "build/shardproof"),
      "FAILED     linear_row tp=4 sp=on    gradient of b\n"
      "at         b[0], every rank   got 12   want 3   bound 0 (integers)   7 of 7 elements, all x "
      "4.000 = tp\n"
      "means      a sum that was already whole was summed again; replicas agree, a hash cannot see "
      "this\n"
      "passed     forward, adjoint, ledger\n"
      "replay     build/shardproof run linear_row tp=4 sp=on --check gradient\n");
}

// A forward that is wrong, and a pairing of it with the backward that fails as `f` says.
CaseResult wrong_forward(Verdict gradient, Finding f) {
  CaseResult c = healthy();
  CheckResult forward = check("forward", Verdict::failed, inf, true),
              adjoint = check("adjoint", Verdict::failed, inf, true);
  forward.findings = {Finding{}};
  forward.findings[0].tensor = "forward of y";
  f.tensor = "gradient of b", f.numeric = true;
  adjoint.findings = {std::move(f)};
  c.checks = {forward, check("gradient", gradient), adjoint};
  return c;
}

// rhs/lhs = 1/p with right gradients: it is the forward that has the operand p times.
TEST(Block, RightGradientsPutTheBlameOnTheForward) {
  Finding f;
  f.got = 3, f.want = 12;
  f.means = "a reduction is missing, or a mean stands in place of a sum";
  CaseResult c = wrong_forward(Verdict::passed, f);
  EXPECT_TRUE(contains(block(c, "p"),
                       "means      the gradients are right, and the forward counts b 4 times: "))
      << block(c, "p");
  for (const double none : {3.003, 13.0, 24.0}) {  // about once, 4 1/3 times, 8 times on 4 ranks
    c.checks[2].findings[0].want = none;
    EXPECT_TRUE(contains(block(c, "p"),
                         "means      the gradients are right: what the forward computes is not"))
        << block(c, "p");
  }
  // The block of the pairing itself, as junit.xml has it.
  EXPECT_TRUE(contains(telling::block_about(c, c.checks[2], "p"),
                       "means      the gradients are right: what the forward computes is not"))
      << telling::block_about(c, c.checks[2], "p");
}

// A wrong forward and a backward that does not fit it: which of them the pairing means it cannot
// say.
TEST(Block, OfAWrongForwardNoBackwardIsToBlame) {
  Finding f;
  f.got = 3, f.want = 4;
  f.means = "the backward is not the transpose of the forward";
  CaseResult c = wrong_forward(Verdict::failed, f);
  const CheckResult forward = c.checks[0], adjoint = c.checks[2];
  const auto says = [&](const std::string& means) {
    const std::string text = block(c, "p");
    EXPECT_TRUE(contains(text, "means      " + means)) << text;
  };
  says("the gradients are wrong as well, and not those of what the forward computes");
  c.checks[2] = check("adjoint", Verdict::passed);
  says("the gradients are those of what the forward computes: one mistake in both");
  c.checks = {forward, adjoint};
  says("the forward is wrong by itself");
  c.checks = {forward, check("gradient", Verdict::failed)};
  EXPECT_FALSE(contains(block(c, "p"), "means ")) << block(c, "p");
  // That a forward has a kink is said of the forward.
  CheckResult kink = check("gradcheck", Verdict::failed, inf);
  f.tensor = "gradient of x", f.means = "the forward is not smooth here";
  kink.findings = {f};
  c.checks.push_back(kink);
  says("gradcheck of gradient of x: the forward is not smooth here");
  // A right forward leaves the backward alone with it.
  c.checks = {check("forward", Verdict::passed), adjoint};
  says("the backward is not the transpose of the forward\n");
}

// Values that no rounding explains are not explained by the roundings of another tensor.
TEST(Block, RoundingsElsewhereDoNotExplainWrongValues) {
  CaseResult c = bias_summed_twice();
  ASSERT_EQ(c.checks[1].check, "gradient");
  Finding rounded = c.checks[1].findings[0];
  rounded.tensor = "gradient of w", rounded.means = means_of_roundings;
  c.checks[1].findings[0].means.clear(), c.checks[1].findings[0].numeric = true;
  c.checks[1].findings.push_back(rounded);
  CheckResult replica = check("replica", Verdict::failed, inf);
  replica.findings = {rounded};
  c.checks.push_back(replica);
  EXPECT_FALSE(contains(block(c, "p"), "means ")) << block(c, "p");
  c.checks[1].findings = {rounded};
  EXPECT_TRUE(contains(block(c, "p"), "means      a rounding more than is due")) << block(c, "p");
  // What has no values may be the work of a rounding.
  c.checks[1].findings.clear();
  Finding parted;
  parted.message = "copies differ";
  c.checks[1].findings = {parted};
  EXPECT_TRUE(contains(block(c, "p"), "means      replica of gradient of w: a rounding more"))
      << block(c, "p");
}

Finding pairing_of(const std::string& operand, double got, double want) {
  Finding f;
  f.tensor = "gradient of " + operand, f.numeric = true;
  f.got = got, f.want = want;
  return f;
}

// Wrong gradients that fit a wrong forward blame none; the one that does not is where to look.
TEST(Block, TheOperandInWhichBothHalvesPartIsNamed) {
  CaseResult c = wrong_forward(Verdict::failed, {});
  const auto says = [&](const std::string& means) {
    const std::string text = block(c, "p");
    EXPECT_TRUE(contains(text, "means      " + means)) << text;
  };
  c.checks[1].findings = {pairing_of("x", 1, 2), pairing_of("d", 1, 2), pairing_of("w", 1, 2),
                          pairing_of("u", 1, 2)};
  c.checks[2].findings = {pairing_of("d", 3, 4)};
  says("but for d the gradients are those of what the forward computes: it is read at one place");
  c.checks[2].findings.push_back(pairing_of("w", 3, 4));
  c.checks[2].findings.push_back(pairing_of("x", 3, 4));
  says("the gradients are wrong as well, and not those of what the forward computes");
  c.checks[2].findings.pop_back();
  c.checks[1].findings.push_back(pairing_of("v", 1, 2));
  says("but for d and w the gradients are those of what the forward computes: they are read");
  // One that the forward does not move with.
  c.checks[2].findings = {pairing_of("b", 3, 0)};
  says("the forward does not move with b, which it leaves out: the other gradients are those");
  c.checks[1] = check("gradient", Verdict::passed);
  says("the gradients are right, and the forward does not move with b, which it leaves out\n");
  // What all is mostly right of says less.
  c.checks[0].findings[0].means = means_of_near;
  says("the gradients are right, and the forward does not move with b, which it leaves out\n");
}

// Of a gradient that is mostly right behind a wrong forward nothing is said before what a document
// that reads another is told.
TEST(Block, ALeakGoesBeforeWhatComesOfIt) {
  CaseResult c = wrong_forward(Verdict::failed, {});
  Finding near = pairing_of("d", 1, 1.1), leak;
  near.means = means_of_near;
  leak.tensor = "forward of y", leak.means = "one sequence is read by another";
  c.checks[1].findings = {near};
  c.checks[2] = check("adjoint", Verdict::passed);
  const auto means = [&] {
    const std::string text = block(c, "p");
    const size_t at = text.find("means      ") + 11;
    return text.substr(at, text.find('\n', at) - at);
  };
  EXPECT_EQ(means().find("the gradients are those of what the forward computes"), 0u) << means();
  c.checks.push_back(check("leak", Verdict::failed, inf, true));
  c.checks.back().findings = {leak};
  EXPECT_EQ(means(), "one sequence is read by another");
  c.canonical += " layout=zigzag";
  EXPECT_EQ(means(),
            "one sequence is read by another; or rows are in another order than that of "
            "layout=zigzag");
  // Alone it is told.
  c.checks = {check("forward", Verdict::passed), c.checks[1]};
  EXPECT_EQ(means(), means_of_near);
}

// What another check found is said of that.
TEST(Block, WhatAnotherCheckMeansIsSaidOfIt) {
  CaseResult c = bias_summed_twice();
  c.checks[1].findings[0].means.clear();
  CheckResult ledger = check("ledger", Verdict::failed, inf, true);
  Finding f;
  f.check = "ledger", f.means = "a call that is due was not made";
  ledger.findings = {f};
  c.checks[3] = ledger;
  EXPECT_TRUE(contains(block(c, "p"), "means      ledger: a call that is due was not made\n"))
      << block(c, "p");
  f.tensor = "gradient of b";  // that of the first rows
  c.checks[3].findings = {f};
  EXPECT_TRUE(contains(block(c, "p"), "means      a call that is due was not made\n"))
      << block(c, "p");
}

TEST(Block, AnArgumentThatWasWrittenToIsTheCause) {
  CaseResult c = bias_summed_twice();
  CheckResult memory = check("memory", Verdict::failed, inf, true);
  Finding f;
  f.tensor = "w", f.message = "an argument was written to", f.means = "arguments are read-only";
  memory.findings = {f};
  c.checks.push_back(memory);
  EXPECT_TRUE(
      contains(block(c, "p"),
               "means      memory of w: an argument was written to; arguments are read-only\n"))
      << block(c, "p");
}

// A sentence about another result than that of the first rows names it.
TEST(Block, WhatAFindingBehindTheFirstMeansIsSaidOfItsTensor) {
  CaseResult c = bias_summed_twice();
  for (CheckResult& one : c.checks)
    if (one.verdict == Verdict::failed) {
      one.findings[0].means.clear();
      Finding f = one.findings[0];
      f.tensor = "gradient of w", f.means = "rows of another rank";
      one.findings.push_back(f);
    }
  EXPECT_TRUE(contains(block(c, "p"), "means      gradient of w: rows of another rank\n"))
      << block(c, "p");
}

TEST(Block, AHangPrintsWhereEveryRankStands) {
  CaseResult c = with(Verdict::hung);
  c.line = "attention_ring cp=4";
  c.replay = "run attention_ring cp=4";
  c.checks = {check("forward", Verdict::hung), check("gradient", Verdict::hung)};
  c.checks[1].note = "backward, no progress for 10.0 s";
  c.state = {"rank 2     left backward after call 6 of 7", "rank 3     waits in call 7"};
  EXPECT_EQ(block(c, "build/shardproof"),
            "HUNG       attention_ring cp=4    backward, no progress for 10.0 s\n"
            "rank 2     left backward after call 6 of 7\n"
            "rank 3     waits in call 7\n"
            "replay     build/shardproof run attention_ring cp=4 --check forward\n");
}

TEST(Block, NumbersHaveTheDigitsThatTellThemApart) {
  CaseResult c = bias_summed_twice();
  Finding& f = c.checks[1].findings[0];
  f.got = 0.1 + 0.2;
  f.want = 0.3;
  f.bound = 1e-17;
  f.ratio = 5.5511151231257827;
  const std::string text = block(c, "shardproof");
  EXPECT_TRUE(contains(text, "got 0.30000000000000004   want 0.29999999999999999")) << text;
  EXPECT_TRUE(contains(text, "bound 1e-17   ratio 5.6")) << text;
  f.got = nan;
  EXPECT_TRUE(contains(block(c, "shardproof"), "got nan   want 0.3   ")) << text;
  f.got = 123456789;
  f.want = 123456788;
  EXPECT_TRUE(contains(block(c, "shardproof"), "got 123456789   want 123456788 ")) << text;
  f.got = 1e20;
  f.want = 1;
  EXPECT_TRUE(contains(block(c, "shardproof"), "got 1e+20   want 1 ")) << text;
}

TEST(Block, FurtherFindingsAndChecksAreNamed) {
  CaseResult c = bias_summed_twice();
  Finding second = c.checks[1].findings[0];
  second.tensor = "gradient of W";
  second.where = "W[1,2]";
  second.ranks = {1, 2, 3};
  c.checks[1].findings.push_back(second);
  c.checks[2].verdict = Verdict::failed;
  c.checks[2].note = "ratio 4.000: a sum taken twice";
  c.checks[3].verdict = Verdict::skipped;
  c.checks[3].note = "no ledger here";
  c.steady_known = true;
  const std::string text = block(c, "shardproof");
  EXPECT_TRUE(contains(text, "\nalso       gradient of W: W[1,2], ranks 1-3   got 12   want 3"))
      << text;
  EXPECT_TRUE(contains(text, "\nalso       adjoint: ratio 4.000: a sum taken twice\n")) << text;
  EXPECT_TRUE(contains(text, "\nskipped    ledger (no ledger here)\n")) << text;
  EXPECT_TRUE(contains(text, "\nagain      intermittent")) << text;
  EXPECT_TRUE(contains(text, "\npassed     forward\n")) << text;
  EXPECT_TRUE(contains(telling::block_about(c, c.checks[2], "p"), "sp=on --check adjoint\n"));
  // Four of five, and how many are left; of another check the first one goes before.
  for (int i = 0; i < 3; ++i) c.checks[1].findings.push_back(second);
  const std::string five = block(c, "shardproof");
  EXPECT_LT(five.find("\nalso       adjoint: ratio"), five.find("\nalso       gradient of W"));
  EXPECT_EQ(occurrences(five, "\nalso       gradient of W"), 3u) << five;
  EXPECT_TRUE(contains(five, "\nalso       1 more; --report DIR writes all of them\n")) << five;
  // What the first row says is not said again.
  CaseResult vacuous = with(Verdict::vacuous);
  vacuous.checks[0].note = "nothing was asked";
  EXPECT_EQ(block(vacuous, "p"),
            "VACUOUS    linear_row tp=4    forward: nothing was asked\n"
            "passed     ledger\n"
            "replay     p run linear_row tp=4 --check forward\n");
}

// Of a sharded weight the element that is shown lies on one rank, while all of them are wrong.
TEST(Block, NamesTheOwnerOfTheElementAndAllThatAreWrong) {
  CaseResult c = bias_summed_twice();
  Finding& f = c.checks[1].findings[0];
  f.where = "b[5]";
  f.holders = {2};
  EXPECT_TRUE(contains(block(c, "shardproof"),
                       "\nat         b[5], rank 2   got 12   want 3   bound 0 (integers)   7 of 7 "
                       "elements on every rank, all x 4.000 = tp\n"))
      << block(c, "shardproof");
  // Where these are the same they are named once.
  c.lane = "processes.np2";
  f.ranks = f.holders = {0, 1};
  EXPECT_TRUE(
      contains(block(c, "shardproof"),
               "\nat         b[5], every rank   got 12   want 3   bound 0 (integers)   7 of "
               "7 elements, all x 4.000 = tp\n"))
      << block(c, "shardproof");
}

TEST(Printable, CutsLongWordsOfAMessageAndSaysHowLongTheyAre) {
  const std::string letters(201, 'x'), path = "/" + std::string(250, 'p');
  std::string list = "docs=1";
  for (int i = 0; i < 20000; ++i) list += ",1";
  EXPECT_EQ(telling::with_long_words_cut("met " + list + "; write"),
            "met " + list.substr(0, 60) + "... (20001 entries); write");
  EXPECT_EQ(telling::with_long_words_cut("met " + list + ", which needs"),
            "met " + list.substr(0, 60) + "... (20001 entries), which needs");
  EXPECT_EQ(telling::with_long_words_cut(letters), std::string(60, 'x') + "... (201 characters)");
  for (const std::string& whole : {letters.substr(1), path, std::string(" a  b "), std::string()})
    EXPECT_EQ(telling::with_long_words_cut(whole), whole);
}

// U+009B begins a sequence as ESC [ does; U+00E9 does not.
TEST(Printable, EscapesWhatSteersATerminal) {
  EXPECT_EQ(telling::printable("a\x1b[31m\x7f\t\xc2\x9b\xc3\xa9\xff\n"),
            "a\\x1b[31m\\x7f\\x09\\xc2\\x9b\xc3\xa9\\xff\n");
  EXPECT_EQ(telling::in_quotes("a\nb", 2), "'a\\x0a...' (3 characters)");
  EXPECT_EQ(telling::in_quotes("7,1,8", 4), "'7,1,...' (3 entries)");
  EXPECT_EQ(telling::one_line("a\nb\x1b"), "a\\x0ab\\x1b");
}

TEST(Printable, AWordOfAShellComesOutAsItWas) {
  EXPECT_EQ(telling::shell_word("tp=2"), "tp=2");
  EXPECT_EQ(telling::shell_word(""), "''");
  EXPECT_EQ(telling::shell_path("-d"), "./-d");
  EXPECT_EQ(telling::shell_word("a b"), "'a b'");
  EXPECT_EQ(telling::shell_word("it's $x"), "'it'\\''s $x'");
  EXPECT_EQ(telling::shell_word("a\nit's \\ \x1b"), "$'a\\x0ait\\'s \\\\ \\x1b'");
}

// A subject's exception may hold anything; it must not steer the terminal nor break the layout.
TEST(Block, TextOfASubjectCannotSteerTheTerminal) {
  CaseResult c = bias_summed_twice();
  Finding& f = c.checks[1].findings[0];
  f.numeric = false;
  f.message = "threw: \033[2Jgone\nsecond \xff line \xc3\xa9";
  const std::string text = block(c, "shardproof");
  EXPECT_EQ(text.find('\033'), std::string::npos);
  EXPECT_TRUE(contains(text, "\\x1b[2Jgone\n           second \\xff line \xc3\xa9")) << text;
}

TEST(Block, AControlThatWasNotCaughtNamesItsCheckAndItsBug) {
  ControlResult c = with(ControlResult::wrong_check);
  c.caught_by = "ledger";
  c.reason = "forward did not see it";
  EXPECT_EQ(block(c, "shardproof"),
            "WRONG CHECK bias_before_reduce on linear_row tp=4 control=bias_before_reduce    due: "
            "forward\n"
            "caught by  ledger\n"
            "saw        forward did not see it\n"
            "imitates   huggingface/text-generation-inference 1036\n"
            "means      the bug was noticed, but not by the check that exists for it\n"
            "replay     shardproof run linear_row tp=4 control=bias_before_reduce\n");
  c.expected_check.clear();  // of an operator under which no run came to its end
  EXPECT_TRUE(contains(block(c, "s"), "control=bias_before_reduce    no check could be named\n"));
  EXPECT_TRUE(
      block(with(ControlResult::escaped), "s").starts_with("ESCAPED    bias_before_reduce"));
  EXPECT_TRUE(contains(block(caught("c", 4.2), "s"), "margin 4.2, at least 10 is due"));
  ControlResult same = with(ControlResult::equivalent);
  same.reason = "one rank";
  EXPECT_EQ(occurrences(block(same, "s"), "one rank"), 1u) << block(same, "s");
}

TEST(PassedLine, IsOneLineWithTheRatioOfEveryCheck) {
  CaseResult c = healthy();
  c.checks.push_back(check("adjoint", Verdict::passed, 0, true));
  EXPECT_EQ(passed_line(c),
            "PASSED     linear_row tp=4    forward 0.25, ledger, adjoint exact   0.5 s\n");
}

// Whichever check has one: how much it asked, or what of it could not be asked.
TEST(PassedLine, IsFollowedByTheNotesOfItsChecks) {
  CaseResult c = healthy();
  c.checks[0].note = "12 of 12 elements";
  c.checks.push_back(check("leak", Verdict::skipped));
  c.checks.back().note = "built without it";
  EXPECT_EQ(passed_line(c),
            "SKIPPED    linear_row tp=4    forward 0.25, ledger, leak skipped (built without it)   "
            "0.5 s\n"
            "note       forward: 12 of 12 elements\n");
  c.checks.push_back(check("mask", Verdict::skipped));
  c.checks.back().note = "and without that";
  EXPECT_TRUE(contains(passed_line(c), "leak skipped, mask skipped (built without it)   "))
      << passed_line(c);
}

Report two_families() {
  CaseResult mapping = healthy("mapping_copy tp=2", 0);
  mapping.family = "mapping";
  mapping.contract = "mapping_copy";
  mapping.seconds = 9.8;
  CaseResult row = healthy("linear_row tp=8 dtype=bf16", 0.31),
             column = healthy("linear_column tp=2");
  column.contract = "linear_column";
  column.seconds = 11.7;
  ControlResult exact = caught("gather_backward_slices");
  exact.family = "mapping";
  exact.contract = "mapping_copy";
  exact.exact = true;
  ControlResult same = exact;
  same.outcome = ControlResult::equivalent;
  std::vector<ControlResult> controls(10, exact);
  controls.insert(controls.end(), {same, caught("round_before_reduce", 41), caught()});
  Report r = report_of({mapping, row, column}, controls);
  r.controls.back().margin = 5000;
  r.self = {48, 48, {}, 1.1};
  r.lanes.clear();
  for (int np : {1, 2, 3, 4, 8}) r.lanes.push_back({"processes.np" + std::to_string(np), true, ""});
  for (int np : {1, 2}) r.lanes.push_back({"mpi.np" + std::to_string(np), true, ""});
  r.lanes.push_back({"mpi.np8", false, "2 cores"});
  r.lanes.push_back({"staged", false, "no driver, 35"});
  r.lanes.push_back({"nccl.np2", false, "no driver, 35"});
  return r;
}

TEST(Closing, AlignsFamiliesFoldsLanesAndNamesTheWeakestControl) {
  std::istringstream text(closing(two_families()));
  std::vector<std::string> lines;
  for (std::string line; std::getline(text, line);) lines.push_back(line);
  ASSERT_EQ(lines.size(), 6u);
  const std::vector<std::string> starts = {
      "self       48 faults planted in the judge, 48 named   ",
      "mapping    1 contract   2 checks   controls 10 caught, 1 equivalent   margin exact   ",
      "linear     2 contracts  4 checks   controls  2 caught, 0 equivalent   margin 41 "
      "(round_before_reduce)   ",
      "lanes      processes 1 2 3 4 8 proven   mpi 1 2 proven, 8 NOT PROVEN (2 cores)   staged, "
      "nccl "
      "NOT PROVEN (no driver, 35)",
      "PASSED     6 checks, 0 skipped, worst healthy ratio 0.31 (linear_row tp=8 dtype=bf16)   ",
      "try        build/shardproof run linear_row tp=4 control=bias_before_reduce       (shows a "
      "caught bug)"};
  for (size_t i = 0; i < lines.size(); i++)
    EXPECT_TRUE(lines[i].starts_with(starts[i])) << lines[i];
  const std::vector<std::pair<size_t, std::string>> seconds = {
      {0, " 1.1 s"}, {1, " 9.8 s"}, {2, " 12 s"}, {4, " 34 s"}};
  for (const auto& [i, end] : seconds) {
    EXPECT_TRUE(lines[i].ends_with(end)) << lines[i];
    EXPECT_EQ(lines[i].size(), lines[0].size());
  }
}

TEST(Closing, AFailureEndsWithItsReplayLines) {
  Report r = report_of({healthy(), bias_summed_twice()});
  const std::string text = closing(r);
  EXPECT_TRUE(contains(text, "\nFAILED     6 checks: 1 failed, 0 skipped; in 1 of 2 cases"))
      << text;
  EXPECT_TRUE(contains(text, "6 checks, 1 FAILED")) << text;
  EXPECT_TRUE(
      text.ends_with("replay     build/shardproof run linear_row tp=4 sp=on --check gradient\n"))
      << text;
  EXPECT_FALSE(contains(text, "try "));
}

TEST(Closing, NoJudgementNamesItsReasonsAndBlamesNobody) {
  Report r = report_of({bias_summed_twice()}, {with(ControlResult::escaped)});
  r.required = {"mpi.np8"};
  const std::string text = closing(r);
  EXPECT_TRUE(contains(text,
                       "\nNO JUDGEMENT  1 control escaped (bias_before_reduce); required lane "
                       "mpi.np8 did not run; 1 check that did not pass blames nobody"))
      << text;
  EXPECT_TRUE(contains(text, "1 ESCAPED"));
}

TEST(Closing, ControlsAloneAreSaidToBeAllThatWasJudged) {
  Report r = report_of({}, {caught(), with(ControlResult::equivalent)});
  EXPECT_TRUE(contains(
      closing(r),
      "\nPASSED     no check of a subject was selected; of 2 controls 1 caught, 1 equivalent "))
      << closing(r);
}

TEST(Closing, NamesWhatSpeaksAgainstTheJudge) {
  Report r = report_of({healthy()}, {caught("near", 9)});
  r.self = {2, 1, {"missed: expected failed, met passed"}, 1};
  r.dumped = "1 of 1 case that did not pass, in tensors";
  const std::string text = closing(r);
  EXPECT_TRUE(contains(text, "\n              missed: expected failed, met passed\n")) << text;
  EXPECT_TRUE(contains(text, "replay        build/shardproof run linear_row tp=4 control=near\n"))
      << text;
  EXPECT_TRUE(contains(text, "\ndumped        1 of 1 case that did not pass, in tensors\n"))
      << text;
}

std::string reasons(const Report& r) {
  std::string all;
  for (const std::string& reason : no_judgement(r)) all += reason + "\n";
  return all;
}

TEST(Closing, CountsTheFaultsThatTheJudgeMissed) {
  Report r = report_of({healthy()});
  r.self = {48, 45, {}, 1};
  EXPECT_EQ(reasons(r), "the judge missed 3 of the 48 faults planted in it\n");
}

TEST(Closing, NamesControlsOnceAndSomeOfMany) {
  std::vector<ControlResult> escaped(2, with(ControlResult::escaped));
  EXPECT_EQ(reasons(report_of({healthy()}, escaped)), "2 controls escaped (bias_before_reduce)\n");
  escaped.clear();
  for (const char* name : {"a", "b", "c", "d", "e"}) {
    escaped.push_back(with(ControlResult::escaped));
    escaped.back().name = name;
  }
  EXPECT_EQ(reasons(report_of({healthy()}, escaped)), "5 controls escaped (a, b, c and 2 more)\n");
}

TEST(Closing, SaysWhyARequiredLaneIsNotProven) {
  Report r = report_of({healthy()});
  r.lanes = {{"mpi.np4", true, ""}, {"mpi.np8", false, "2 cores"}, {"mpi.np16", false, ""}};
  r.required = {"mpi"};
  EXPECT_EQ(reasons(r),
            "required lane mpi.np8 is not proven (2 cores)\nrequired lane mpi.np16 is not "
            "proven\n");
  EXPECT_TRUE(
      contains(closing(r), "lanes         mpi 4 proven, 8 NOT PROVEN (2 cores), 16 NOT PROVEN\n"))
      << closing(r);
}

TEST(Closing, TellsWhatControlsCameTo) {
  const auto family = [](std::vector<CaseResult> cases, std::vector<ControlResult> controls) {
    const std::string text = closing(report_of(std::move(cases), std::move(controls)));
    const size_t at = text.find("   controls ");
    return at == text.npos ? "" : text.substr(at, text.find('\n', at) - at);
  };
  EXPECT_TRUE(contains(family({healthy()}, {with(ControlResult::wrong_check)}), ", 1 WRONG CHECK"));
  EXPECT_TRUE(contains(family({healthy()}, {with(ControlResult::unproven)}), ", 1 NOT PROVEN"));
  const auto unjudged = with(ControlResult::unjudged);
  EXPECT_TRUE(contains(family({healthy()}, {unjudged}), ", 1 unjudged  "));
  EXPECT_TRUE(
      contains(family({bias_summed_twice()}, {unjudged}), ", 1 unjudged (healthy code fails)"));
  EXPECT_FALSE(contains(family({healthy()}, {with(ControlResult::equivalent)}), "margin"));
  EXPECT_TRUE(contains(family({healthy()}, {caught("c", inf)}), "   margin inf  "));
  // No number is the least that can be known, whenever it comes.
  const auto none = caught("none", nan), some = caught("some", 41);
  EXPECT_TRUE(contains(family({healthy()}, {some, none}), "   margin nan (none)"));
  EXPECT_TRUE(contains(family({healthy()}, {none, some}), "   margin nan (none)"));
}

TEST(Closing, NamesTenReplaysAndCountsTheRest) {
  const auto failures = [](int n) {
    std::vector<CaseResult> cases(size_t(n), bias_summed_twice());
    return closing(report_of(std::move(cases)));
  };
  EXPECT_FALSE(contains(failures(10), "more"));
  EXPECT_EQ(occurrences(failures(10), "--check gradient"), 10u);
  EXPECT_TRUE(contains(failures(11), "and 1 more\n")) << failures(11);
  EXPECT_TRUE(contains(failures(12), "and 2 more\n")) << failures(12);
  EXPECT_EQ(occurrences(failures(12), "--check gradient"), 10u);
  EXPECT_TRUE(contains(closing(report_of({healthy(), with(Verdict::untested)})),
                       "replay        build/shardproof run linear_row tp=4\n"));
}

TEST(Closing, TriesTheShortestLineThatCaughtABug) {
  const std::string tries = "try        build/shardproof run linear_row tp=4 control=";
  const auto low = caught("short"), high = caught("much_longer");
  for (const auto& controls : {std::vector{low, high}, {high, low}})
    EXPECT_TRUE(contains(closing(report_of({healthy()}, controls)), tries + "short "));
  auto equivalent = low;
  equivalent.outcome = ControlResult::equivalent;
  EXPECT_TRUE(
      contains(closing(report_of({healthy()}, {equivalent, high})), tries + "much_longer "));
}

TEST(Headline, IsTheCheckThatSaysMost) {
  const Verdict most_first[] = {Verdict::crashed, Verdict::failed,   Verdict::hung,
                                Verdict::vacuous, Verdict::untested, Verdict::skipped,
                                Verdict::passed};
  CaseResult c = healthy();
  c.checks.clear();
  EXPECT_EQ(telling::headline(c), nullptr);
  for (size_t i = std::size(most_first); i-- > 0;) {
    c.checks.push_back(check(name(most_first[i]), most_first[i]));
    EXPECT_EQ(telling::headline(c), &c.checks.back()) << name(most_first[i]);
  }
}

TEST(Words, TheWorstHealthyRatioIsOfWhatPassed) {
  CaseResult failed = with(Verdict::failed);
  failed.checks[0].ratio = 5;
  EXPECT_EQ(telling::worst_healthy(report_of({healthy(), failed})).ratio, 0.25);
  // Of equal ones the first.
  const Report two = report_of({healthy("linear_row tp=2"), healthy()});
  EXPECT_EQ(telling::worst_healthy(two).on, &two.cases[0]);
}

TEST(Words, ACheckWithABoundHasNumbers) {
  CheckResult c = check("forward", Verdict::passed);
  EXPECT_FALSE(telling::is_numeric(c));
  c.bound = 1e-12;
  EXPECT_TRUE(telling::is_numeric(c));
}

// A broken collective shows less of what a kernel's author would do.
TEST(Closing, TriesAControlWithAName) {
  ControlResult broken = caught();
  broken.kind = "scale", broken.replay = "run x";
  EXPECT_TRUE(contains(closing(report_of({healthy()}, {broken, caught()})),
                       "try        build/shardproof run linear_row tp=4 control="));
}

TEST(Closing, WhatIsNotDueOfAContractIsOneLine) {
  Report r = report_of({healthy()});
  r.not_due = {"clip: gradient, accumulate", "clip: gradient, gradcheck, accumulate",
               "clip: heads"};
  EXPECT_TRUE(
      contains(closing(r), "\nnot due    clip: gradient, accumulate (2 times), gradcheck, heads\n"))
      << closing(r);
}

TEST(Closing, WhatIsNotDueIsCounted) {
  Report r = report_of({healthy()});
  r.not_due = {"mine: no backward", "other: talks by itself", "mine: no backward"};
  EXPECT_TRUE(contains(closing(r), "\nnot due    mine: no backward (2 times)\nnot due    other: "));
}

TEST(ControlsTable, ShowsFailuresFirstAndSumsOperators) {
  ControlResult op = caught("scale_p", 500);
  op.kind = "scale";
  ControlResult same = op, lost = op;
  same.outcome = ControlResult::equivalent;
  lost.outcome = ControlResult::escaped;
  std::istringstream table(
      controls_table(report_of({healthy()}, {op, caught(), op, same, with(ControlResult::escaped),
                                             caught("faint", 2), lost})));
  std::vector<std::string> lines;
  for (std::string line; std::getline(table, line);) lines.push_back(line);
  ASSERT_EQ(lines.size(), 6u);
  EXPECT_TRUE(lines[0].starts_with("outcome"));
  EXPECT_TRUE(lines[1].starts_with("ESCAPED ")) << lines[1];
  EXPECT_TRUE(lines[2].starts_with("WEAK ") && contains(lines[2], "faint")) << lines[2];
  EXPECT_TRUE(lines[3].starts_with("ESCAPED ") && contains(lines[3], "scale_p")) << lines[3];
  EXPECT_TRUE(lines[4].starts_with("caught ") && contains(lines[4], "bias_before_reduce"))
      << lines[4];
  EXPECT_TRUE(lines[5].starts_with("2 caught, 1 equivalent  operator scale on linear "))
      << lines[5];
  EXPECT_TRUE(lines[5].ends_with("4 runs")) << lines[5];
}

TEST(ControlsTable, SaysWhatFiredInPlaceOfTheDueCheckAndWhatIsExact) {
  ControlResult wrong = with(ControlResult::wrong_check), exact = caught("exact_one");
  wrong.caught_by = "", wrong.reason = "ledger did not see it";
  exact.exact = true;
  ControlResult op = caught("scale_p", 500), open = op;
  op.kind = open.kind = "scale";
  open.outcome = ControlResult::unjudged;
  const std::string table = controls_table(report_of({healthy()}, {wrong, exact, op, open}));
  EXPECT_TRUE(contains(table, "  ledger did not see it  ")) << table;
  const size_t row = table.find("exact_one");
  EXPECT_TRUE(contains(table.substr(row, table.find('\n', row) - row), " exact ")) << table;
  EXPECT_TRUE(contains(table, "1 caught, 0 equivalent, 1 unjudged  operator scale")) << table;
}

TEST(Words, RowsIndentWhatFollowsAndEndWithoutBlanks) {
  EXPECT_EQ(telling::row("at", "first \n\nsecond\n"), "at         first\n\n           second\n");
  EXPECT_EQ(telling::row("at", ""), "at\n");
  EXPECT_EQ(telling::row("a long label", "x"), "a long label x\n");
}

TEST(Words, Seconds) {
  EXPECT_EQ(telling::seconds(0.0123), "12 ms");
  EXPECT_EQ(telling::seconds(9.8), "9.8 s");
  EXPECT_EQ(telling::seconds(34.2), "34 s");
}

TEST(Words, RatiosAndRanks) {
  EXPECT_EQ(telling::number(-0.03125), "-0.03125");
  EXPECT_EQ(telling::number(std::copysign(std::nan(""), -1)), "nan");
  EXPECT_EQ(telling::ratio(0.31), "0.31");
  EXPECT_EQ(telling::ratio(0.999), "1.0");
  EXPECT_EQ(telling::ratio(9.96), "10");
  EXPECT_EQ(telling::ratio(149), "149");
  EXPECT_EQ(telling::ratio(3.1e9), "3.1e+09");
  EXPECT_EQ(telling::ratio(inf), "inf");
  EXPECT_EQ(telling::ranks({3}), "rank 3");
  EXPECT_EQ(telling::ranks({1, 0}), "ranks 0, 1");
  EXPECT_EQ(telling::ranks({6, 0, 1, 2, 3}), "ranks 0-3, 6");
}

TEST(Colour, IsForTerminalsThatWantIt) {
  unsetenv("NO_COLOR");
  setenv("TERM", "xterm", 1);
  EXPECT_TRUE(wants_colour(true));
  EXPECT_FALSE(wants_colour(false));
  setenv("NO_COLOR", "1", 1);
  EXPECT_FALSE(wants_colour(true));
  setenv("NO_COLOR", "", 1);
  EXPECT_TRUE(wants_colour(true));  // no-color.org: "when present and not an empty string"
  unsetenv("NO_COLOR");
  setenv("TERM", "dumb", 1);
  EXPECT_FALSE(wants_colour(true));
  EXPECT_EQ(paint("FAILED     x\nat         FAILED\nPASSED"),
            "\033[1;31mFAILED\033[0m     x\nat         FAILED\nPASSED");
}

// ---- progress
// -------------------------------------------------------------------------------------

class Told {
 public:
  explicit Told(bool terminal) : out_(std::tmpfile()) {
    setenv("TERM", "dumb", 1);
    progress = terminal_progress(out_, "shardproof", terminal, [this] { return now; });
  }
  ~Told() {
    progress.reset();
    std::fclose(out_);
  }
  std::string text() {
    std::fflush(out_);
    std::string all(size_t(std::ftell(out_)), '\0');
    std::rewind(out_);
    const size_t n = std::fread(all.data(), 1, all.size(), out_);
    std::fseek(out_, 0, SEEK_END);
    return all.substr(0, n);
  }
  double now = 1000;
  std::unique_ptr<Progress> progress;

 private:
  std::FILE* out_;
};

TEST(ProgressLine, IsDrawnAtMostTenTimesASecond) {
  Told told(true);
  told.progress->begin(100, 0);
  for (int i = 0; i < 1000; i++) {
    told.now += 0.002;
    told.progress->tick();
  }
  const size_t drawn = occurrences(told.text(), "\r\033[K");
  EXPECT_LE(drawn, 21u);  // two seconds
  EXPECT_GE(drawn, 19u);
}

TEST(ProgressLine, ElsewhereIsALineEveryTenSeconds) {
  // Of half a second each, on four processes.
  Told told(false);
  told.progress->expect({Pace::a_case, "linear_row"}, 400, 1);
  told.progress->begin(400, 0);
  for (int i = 0; i < 200; i++) {
    told.now += 0.125;
    told.progress->done(healthy());
  }
  EXPECT_EQ(told.text(),
            "progress   80 of 400 cases   0 did not pass   about 40 s left\n"
            "progress   160 of 400 cases   0 did not pass   about 30 s left\n");
}

// The case that has been under way for longest is named, and for how long.
TEST(ProgressLine, ASlowCaseIsNamed) {
  Told told(false);
  told.progress->begin(3, 0);
  told.now += 2;
  told.progress->begun(11, "linear_row tp=8");
  told.progress->begun(12, "linear_row tp=2");
  told.now += 4;
  told.progress->begun(12, "linear_row tp=4");
  told.now += 5;
  told.progress->tick();
  told.now += 10;
  told.progress->begun(11, "");
  told.progress->tick();
  told.now += 1;
  told.progress->begun(12, "norm_sequence tp=2");
  told.now += 10;
  told.progress->begun(12, "norm_sequence tp=4");
  told.progress->tick();
  EXPECT_EQ(told.text(),
            "progress   0 of 3 cases   0 did not pass   9 s in linear_row tp=8\n"
            "progress   0 of 3 cases   0 did not pass   15 s in linear_row tp=4\n"
            "progress   0 of 3 cases   0 did not pass\n");
}

// Broken calls are most of the work, and how many there are shows when their witness is tried.
TEST(ProgressLine, TimeIsToldWhenAWitnessHasBeenTried) {
  Told told(false);
  told.progress->expect({Pace::a_case, "linear_row"}, 20, 1);
  told.progress->expect({Pace::a_witness, "linear_row"}, 3, 1);
  told.progress->begin(20, 0);
  for (int i = 0; i < 20; i++) {
    told.now += 0.501;
    told.progress->done(healthy());
  }
  for (int i = 0; i < 2; i++) {
    told.now += 10;
    told.progress->tried({Pace::a_witness, "linear_row"}, 10);
    told.progress->tick();
  }
  EXPECT_EQ(told.text(),
            "progress   20 of 20 cases   0 did not pass\n"
            "progress   20 of 20 cases   0 did not pass   about 20 s left\n"
            "progress   20 of 20 cases   0 did not pass   about 10 s left\n");
}

TEST(TimeLeft, IsUnknownWhileAKindThatIsDueHasNotBeenMet) {
  TimeLeft left;
  left.due({Pace::a_case, "a"}, 2);
  left.due({Pace::a_control, "a"}, 1);
  left.due({Pace::a_witness, "b"}, 1);
  left.done({Pace::a_case, "a"}, 1);
  EXPECT_FALSE(left.seconds(1));
  left.done({Pace::a_control, "a"}, 1);
  EXPECT_FALSE(left.seconds(2));
  left.done({Pace::a_witness, "b"}, 4);
  EXPECT_EQ(left.seconds(6), 1);
}

TEST(TimeLeft, IsUnknownBeforeANinthHasPassed) {
  TimeLeft left;
  left.due({Pace::a_case, "a"}, 90);
  for (int i = 0; i < 9; ++i) left.done({Pace::a_case, "a"}, 1);
  EXPECT_FALSE(left.seconds(9)) << "81 s from 9 s";
  left.done({Pace::a_case, "a"}, 1);
  EXPECT_EQ(left.seconds(10), 80);
}

// Contracts at their own means, one that has none by its weight.
TEST(TimeLeft, EachContractHasItsOwnPace) {
  TimeLeft left;
  left.due({Pace::a_case, "a"}, 4, 8);
  left.due({Pace::a_case, "b"}, 1, 2);
  left.due({Pace::a_case, "c"}, 1, 6);
  left.done({Pace::a_case, "a"}, 2);
  left.done({Pace::a_case, "a"}, 4);
  EXPECT_EQ(left.seconds(6), 2 * 3 + (2 + 6) * 0.375) << "b and c by 6 s of weight 16";
  left.done({Pace::a_case, "b"}, 3);
  EXPECT_EQ(left.seconds(9), 2 * 3 + 6 * 0.5) << "c by 9 s of weight 18";
  EXPECT_EQ(left.seconds(4.5), 3 + 1.5) << "two at once";
}

// MPI ranks run when the others are through, one case at a time.
TEST(TimeLeft, WhatRunsAloneIsNotDivided) {
  TimeLeft left;
  left.due({Pace::a_case, "a"}, 4);
  left.due({Pace::a_case, "a", true}, 3);
  for (int i = 0; i < 4; ++i) left.done({Pace::a_case, "a"}, 1);
  EXPECT_EQ(left.seconds(2), 1.5) << "3 s of work, of which 2 s are done in one";
  left.done({Pace::a_case, "a", true}, 5);
  EXPECT_EQ(left.seconds(7), 10);
}

// Of the calls of a witness that is tried once more on MPI few are new: what it took elsewhere says
// nothing of it.
TEST(TimeLeft, ASampledWitnessTakesWhatACaseTakesUntilOneHasBeenMet) {
  TimeLeft left;
  left.due({Pace::a_case, "a"}, 4);
  left.due({Pace::a_witness, "a"}, 1);
  left.due({Pace::a_case, "a", true}, 2);
  left.due({Pace::a_sampled_witness, "a", true}, 3);
  for (int i = 0; i < 4; ++i) left.done({Pace::a_case, "a"}, 1);
  left.done({Pace::a_witness, "a"}, 50);
  EXPECT_EQ(left.seconds(54), 2 + 3) << "at the pace of its cases elsewhere";
  for (int i = 0; i < 2; ++i) left.done({Pace::a_case, "a", true}, 2);
  EXPECT_EQ(left.seconds(58), 3 * 2) << "at the pace of its cases there";
  left.done({Pace::a_sampled_witness, "a", true}, 5);
  EXPECT_EQ(left.seconds(63), 2 * 5) << "at its own";
}

// As a gate goes: two processes take the contracts by turns, the dearest first, and of each its
// cases, then its witnesses; MPI ends it.
TEST(TimeLeft, IsRightByAFactorOfTwoThroughAGate) {
  struct Step {
    Pace pace;
    double seconds, ends;
  };
  std::vector<Step> steps;
  TimeLeft left;
  double at[2] = {0, 0};
  const double each[] = {0.4, 0.3, 0.1, 0.06, 0.05, 0.04}, weights[] = {8, 8, 4, 1, 1, 1};
  const auto put = [&](Pace pace, double seconds, double& clock) {
    left.due(pace, 1, weights[pace.contract[0] - 'a']);
    steps.push_back({pace, seconds, clock += seconds});
  };
  for (int c = 0; c < 6; ++c) {
    double& clock = at[at[1] < at[0]];
    const std::string contract(1, char('a' + c));
    for (int i = 0; i < 60; ++i) put({Pace::a_case, contract}, each[c], clock);
    for (int i = 0; i < 10; ++i) put({Pace::a_control, contract}, each[c], clock);
    for (int i = 0; i < 6; ++i) put({Pace::a_witness, contract}, 40 * each[c], clock);
  }
  double end = std::max(at[0], at[1]);
  for (int c = 0; c < 6; ++c)
    for (int i = 0; i < 30; ++i)
      put({Pace::a_case, std::string(1, char('a' + c)), true}, each[c], end);
  std::sort(steps.begin(), steps.end(),
            [](const Step& a, const Step& b) { return a.ends < b.ends; });
  int told = 0;
  for (const Step& s : steps) {
    left.done(s.pace, s.seconds);
    const auto seconds = left.seconds(s.ends);
    const double due = end - s.ends;
    if (!seconds || due < 5) continue;
    ++told;
    EXPECT_LT(*seconds, 2 * due) << s.ends << " of " << end;
    EXPECT_GT(*seconds, due / 2) << s.ends << " of " << end;
  }
  EXPECT_GT(told, int(steps.size()) / 3);
}

TEST(ProgressLine, BlocksComeAtOnceAndAreFullTwentyTimes) {
  Told told(false);
  told.progress->begin(30, 2);
  for (int i = 0; i < 23; i++) told.progress->done(bias_summed_twice());
  told.progress->done(with(ControlResult::escaped));
  told.progress->done(caught());
  const std::string text = told.text();
  EXPECT_EQ(occurrences(text, "FAILED     "), 23u);
  EXPECT_EQ(occurrences(text, "replay     "), 20u);
  EXPECT_TRUE(contains(text, "\nESCAPED    bias_before_reduce on ")) << text;
  EXPECT_FALSE(contains(text, "CAUGHT"));
}

TEST(ProgressLine, OperatorsBeyondThePlanAreCountedNotPromised) {
  Told told(false);
  told.progress->begin(1, 1);
  told.progress->done(healthy());
  for (int i = 0; i < 5; i++) told.progress->done(caught());
  told.now += 11;
  told.progress->tick();
  EXPECT_EQ(told.text(), "progress   1 of 1 case, 5 controls   0 did not pass\n");
}

TEST(ProgressLine, HealthyRunsOfWitnessesBeyondThePlanAreCounted) {
  Told told(false);
  told.progress->begin(1, 1);
  for (int i = 0; i < 3; i++) told.progress->done(healthy());
  for (int i = 0; i < 5; i++) told.progress->done(caught());
  told.now += 11;
  told.progress->tick();
  EXPECT_EQ(told.text(), "progress   3 cases, 5 controls   0 did not pass\n");
}

// ---- report.json
// ----------------------------------------------------------------------------------

TEST(ReportJson, HoldsOneEntryForEachCheckOnEachCase) {
  Report r =
      report_of({healthy(), bias_summed_twice()}, {caught(), with(ControlResult::equivalent)});
  r.versions = {{"mpi", "MPICH 4.0.2"}};
  r.placement = {{"0", "node1"}, {"1", "node1:cuda0"}};
  const StrictJson j(report_json(r));
  EXPECT_EQ(j["schema"], "1");
  EXPECT_EQ(j["complete"], "true");
  EXPECT_EQ(j["exit_code"], "1");
  EXPECT_EQ(j["versions.mpi"], "\"MPICH 4.0.2\"");
  EXPECT_EQ(j["placement[1].rank"], "1");
  EXPECT_EQ(j["placement[1].host"], "\"node1\"");
  EXPECT_EQ(j["placement[1].device"], "\"cuda0\"");
  EXPECT_EQ(j["placement[0].device"], "null");
  EXPECT_EQ(j["lanes[0].name"], "\"processes.np4\"");
  EXPECT_EQ(j["lanes[0].proven"], "true");
  EXPECT_EQ(j["summary.cases"], "2");
  EXPECT_EQ(j["summary.checks"], "6");
  EXPECT_EQ(j["summary.passed"], "5");
  EXPECT_EQ(j["summary.failed"], "1");
  for (const char* none : {"vacuous", "skipped", "untested", "hung", "crashed", "controls_escaped",
                           "controls_wrong_check"})
    EXPECT_EQ(j[std::string("summary.") + none], "0") << none;
  EXPECT_EQ(j["summary.controls"], "2");
  EXPECT_EQ(j["summary.controls_caught"], "1");
  EXPECT_EQ(j["summary.controls_equivalent"], "1");
  EXPECT_EQ(j["summary.wall_seconds"], "34.0");
  EXPECT_EQ(j["cases.length"], "6");
  EXPECT_EQ(j["cases[0].line"], "\"linear_row tp=4 dtype=f64 fill=normal seed=1\"");
  EXPECT_EQ(j["cases[0].verdict"], "\"passed\"");
  EXPECT_EQ(j["cases[0].ratio"], "0.25");
  EXPECT_EQ(j["cases[1].check"], "\"ledger\"");
  EXPECT_EQ(j["cases[1].ratio"], "null");
  EXPECT_EQ(j["cases[1].rank"], "null");
  EXPECT_EQ(j["cases[3].verdict"], "\"failed\"");
  EXPECT_EQ(j["cases[3].rank"], "0");
  EXPECT_EQ(j["cases[3].index[0]"], "0");
  EXPECT_EQ(j["cases[3].bound"], "0.0");
  EXPECT_EQ(j["cases[3].got"], "12.0");
  EXPECT_EQ(j["controls.length"], "2");
  EXPECT_EQ(j["controls[0].outcome"], "\"caught\"");
  EXPECT_EQ(j["controls[0].expected_check"], "\"forward\"");
  EXPECT_EQ(j["controls[0].caught_by"], "\"forward\"");
  EXPECT_EQ(j["controls[0].imitates"], "\"huggingface/text-generation-inference 1036\"");
  EXPECT_EQ(j["controls[0].margin"], "41.0");
}

// A margin is of what was caught, and infinite where that was exact; a lane is required by its own
// name or that of its transport; a rerun says something where there was one.
TEST(ReportJson, HoldsWhatIsKnownAlone) {
  ControlResult exact = caught("exact", 2);
  exact.exact = true;
  CaseResult c = bias_summed_twice();
  c.checks[1].findings[0].holders = {2};
  Report r = report_of({c}, {exact, with(ControlResult::escaped)});
  r.lanes = {{"mpi.np4", true, ""}, {"mpi2.np4", true, ""}};
  r.required = {"mpi"};
  const StrictJson j(report_json(r));
  for (const auto& [member, value] : {std::pair{"controls[0].margin", "\"inf\""},
                                      {"controls[1].margin", "null"},
                                      {"lanes[0].required", "true"},
                                      {"lanes[1].required", "false"},
                                      {"cases[1].holders[0]", "2"},
                                      {"cases[1].holders.length", "1"},
                                      {"cases[1].steady", ""}})
    EXPECT_EQ(j[member], value) << member;
}

TEST(ReportJson, NumbersThatJsonCannotHoldAreWords) {
  CaseResult c = bias_summed_twice();
  c.checks[1].findings[0].got = nan;
  c.checks[1].findings[0].want = -inf;
  const StrictJson j(report_json(report_of({c})));
  EXPECT_EQ(j["cases[1].ratio"], "\"inf\"");
  EXPECT_EQ(j["cases[1].got"], "\"nan\"");
  EXPECT_EQ(j["cases[1].want"], "\"-inf\"");
}

TEST(ReportJson, SurvivesBytesThatAreNotText) {
  CaseResult c = bias_summed_twice();
  c.checks[1].findings[0].message = "\xff\x01\"quote\"\n\xc3";
  const std::string text = report_json(report_of({c}));
  EXPECT_NO_THROW(StrictJson{text});
  EXPECT_TRUE(contains(text, "\xef\xbf\xbd\\u0001\\\"quote\\\"\\n\xef\xbf\xbd"));
}

TEST(ReportJson, APassedCheckKeepsItsWorstElement) {
  CaseResult c = healthy();
  c.checks[0].bound = 1e-15;
  c.checks[0].rank = 3;
  c.checks[0].index = {5, 2};
  const StrictJson j(report_json(report_of({c})));
  EXPECT_EQ(j["cases[0].bound"], "1e-15");
  EXPECT_EQ(j["cases[0].rank"], "3");
  EXPECT_EQ(j["cases[0].index[1]"], "2");
}

// ---- junit.xml and summary.md
// ---------------------------------------------------------------------

TEST(JunitXml, EscapesEveryCharacterThatXmlForbids) {
  EXPECT_EQ(telling::xml_text("a<b>&\"c\"'"), "a&lt;b&gt;&amp;&quot;c&quot;'");
  EXPECT_EQ(telling::xml_text("l\n\t\r"), "l&#10;&#9;&#13;");
  const std::string unknown = "\xef\xbf\xbd";
  EXPECT_EQ(telling::xml_text(std::string("\0\x1b", 2)), unknown + unknown);
  EXPECT_EQ(telling::xml_text("\xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80"),
            "\xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80");
  EXPECT_EQ(telling::xml_text("\xc3"), unknown);                              // cut short
  EXPECT_EQ(telling::xml_text("\xc0\xaf"), unknown + unknown);                // overlong /
  EXPECT_EQ(telling::xml_text("\xed\xa0\x80"), unknown + unknown + unknown);  // surrogate
  EXPECT_EQ(telling::xml_text("\xef\xbf\xbf"), unknown + unknown + unknown);  // U+FFFF
}

// A page of a CI is no place for 66 thousand checks that passed: a line of these is one test case.
TEST(JunitXml, HasATestCaseForEachLineThatPassedAndForEachCheckOfAnyOther) {
  Report r = report_of({healthy(), bias_summed_twice(), with(Verdict::skipped)},
                       {caught(), with(ControlResult::equivalent)});
  r.cases[2].checks[0].note = "no \"device\" <here>";
  const std::string xml = junit_xml(r);
  // The judgement; the first line; four checks of the second, two of the third; a control.
  EXPECT_TRUE(contains(xml,
                       "<testsuites name=\"shardproof\" tests=\"9\" failures=\"1\" errors=\"0\" "
                       "skipped=\"1\" time=\"1.500\">"))
      << xml;
  EXPECT_EQ(occurrences(xml, "<testcase "), 9u);
  EXPECT_TRUE(
      contains(xml, "<testcase classname=\"linear_row\" name=\"linear_row tp=4\" time=\"0.500\"/>"))
      << xml;
  EXPECT_TRUE(contains(xml, "name=\"linear_row tp=4 sp=on ledger\" time=\"0.125\"/>")) << xml;
  EXPECT_TRUE(contains(xml,
                       "name=\"linear_row tp=4 sp=on gradient\" time=\"0.125\"><failure "
                       "type=\"failed\" message=\"FAILED     linear_row tp=4 sp=on    "
                       "gradient of b\">FAILED     linear_row tp=4 sp=on    gradient of b&#10;at "))
      << xml;
  EXPECT_TRUE(contains(xml,
                       "name=\"linear_row tp=4 forward\" time=\"0.250\"><skipped message=\"no "
                       "&quot;device&quot; &lt;here&gt;\"/>"))
      << xml;
  EXPECT_TRUE(contains(xml, "name=\"linear_row tp=4 ledger\" time=\"0.250\"/>")) << xml;
  EXPECT_TRUE(contains(xml, "control bias_before_reduce\""));
  ControlResult unproven = with(ControlResult::unproven);
  unproven.reason = "too few cores";
  const std::string controls = junit_xml(report_of({healthy()}, {caught("faint", 2), unproven}));
  EXPECT_TRUE(contains(controls, "control faint\" time=\"0.000\"><failure type=\"weak\""))
      << controls;
  EXPECT_TRUE(contains(controls, "<skipped message=\"too few cores\"/>")) << controls;
}

// A lane that cannot run here has one reason for all checks of its lines.
TEST(JunitXml, ALineThatIsSkippedForOneReasonIsOneTestCase) {
  CaseResult c = with(Verdict::skipped);
  c.checks[1].verdict = Verdict::skipped;
  c.checks[0].note = c.checks[1].note = "no mpiexec";
  std::string xml = junit_xml(report_of({c}, {}));
  EXPECT_TRUE(
      contains(xml, "name=\"linear_row tp=4\" time=\"0.500\"><skipped message=\"no mpiexec\""))
      << xml;
  EXPECT_TRUE(contains(xml, "tests=\"2\"")) << xml;
  c.checks[1].note = "too slow";
  xml = junit_xml(report_of({c}, {}));
  EXPECT_TRUE(contains(xml, "tp=4 forward\" time=\"0.250\"><skipped message=\"no mpiexec\""))
      << xml;
  EXPECT_TRUE(contains(xml, "tp=4 ledger\" time=\"0.250\"><skipped message=\"too slow\"")) << xml;
}

// A page of a CI that reads nothing but JUnit must be red whenever the exit code is not 0.
TEST(JunitXml, IsRedWheneverTheExitCodeIsNotZero) {
  Report lane = report_of({healthy()});
  lane.required = {"mpi.np8"};
  Report self = report_of({healthy()});
  self.self = {2, 1, {}, 0};
  CaseResult empty = healthy();
  empty.checks.clear();
  EXPECT_TRUE(
      contains(junit_xml(report_of({empty})), "tp=4\" time=\"0.500\"><failure type=\"untested\""));
  for (const Report& r : {report_of({healthy()}), report_of({empty}), report_of({}, {}), lane, self,
                          report_of({with(Verdict::hung)}), report_of({with(Verdict::vacuous)}),
                          report_of({healthy()}, {caught("c", 2)}),
                          report_of({healthy()}, {with(ControlResult::escaped)})})
    EXPECT_EQ(contains(junit_xml(r), "<failure"), exit_code(r) != 0) << closing(r);
}

TEST(Summary, RendersInAPullRequest) {
  CaseResult c = bias_summed_twice();
  c.checks[1].findings[0].means = "```\nfences";
  ControlResult odd = caught("odd|name<b>");
  const std::string text = summary_markdown(report_of({c}, {odd}));
  EXPECT_TRUE(text.starts_with("## Shardproof: FAILED\n\n4 checks: 1 failed")) << text;
  EXPECT_TRUE(contains(text, "\n````text\nFAILED     linear_row tp=4 sp=on    gradient of b\n"))
      << text;
  EXPECT_TRUE(contains(text, "odd\\|name&lt;b&gt;")) << text;
  EXPECT_TRUE(contains(text, "\n| linear | 1 | 4 | 1 | 0 | 1 | 0 | 0 | 0 | 41 "));
}

TEST(Summary, StaysBelowTheLengthOfAComment) {
  std::vector<CaseResult> cases(3000, bias_summed_twice());
  cases[0].checks[1].findings[0].means = std::string(100000, 'm');
  std::vector<ControlResult> controls(3000, with(ControlResult::escaped));
  const std::string text = summary_markdown(report_of(cases, controls));
  EXPECT_LT(text.size(), 65536u);
  EXPECT_TRUE(contains(text, "more in report.json"));
}

// ---- annotations
// ----------------------------------------------------------------------------------

TEST(Github, AnnotatesTheTenWorstAndPointsToTheRest) {
  std::vector<CaseResult> cases = {healthy()};
  for (int i = 1; i <= 10; i++) {
    CaseResult c = bias_summed_twice();
    c.line = "linear_row tp=" + std::to_string(i);
    c.checks[1].findings[0].ratio = c.checks[1].ratio = i;
    cases.push_back(c);
  }
  cases.push_back(with(Verdict::crashed));
  const std::string text = github_annotations(report_of(cases), "out");
  std::istringstream in(text);
  std::vector<std::string> lines;
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  ASSERT_EQ(lines.size(), 11u) << text;
  EXPECT_TRUE(lines[0].starts_with("::error title=linear_row%3A forward crashed::CRASHED    "))
      << lines[0];
  EXPECT_TRUE(lines[1].starts_with(
      "::error title=linear_row%3A gradient failed::FAILED     linear_row tp=10 "))
      << lines[1];
  EXPECT_TRUE(contains(lines[1], "%0Aat         b[0], every rank   got 12   want 3"));
  EXPECT_TRUE(contains(lines[9], "linear_row tp=2 ")) << lines[9];  // tp=1 is the eleventh
  EXPECT_EQ(lines[10],
            "::error title=Shardproof::1 more finding; out/summary.md and out/index.html show all "
            "of them");
  EXPECT_EQ(github_annotations(report_of({healthy()}), ""), "");
}

TEST(Github, AnUnfitJudgeComesFirst) {
  const std::string text =
      github_annotations(report_of({with(Verdict::crashed)}, {with(ControlResult::escaped)}), "");
  EXPECT_TRUE(text.starts_with("::error title=no judgement::1 control escaped")) << text;
  EXPECT_TRUE(
      contains(text, "\n::error title=linear_row%3A control bias_before_reduce escaped::ESCAPED "));
  EXPECT_EQ(occurrences(text, "\n"), 3u);
}

// A text of a subject stays inside of its annotation.
TEST(Github, EscapesWhatWouldEndAnAnnotation) {
  CaseResult c = bias_summed_twice();
  c.contract = "a,b:c%d\r\n::warning::x";
  c.checks[1].findings[0].numeric = false;
  c.checks[1].findings[0].message = "100%\r\n::error::forged";
  const std::string text = github_annotations(report_of({c}), "");
  EXPECT_TRUE(text.starts_with(
      "::error title=a%2Cb%3Ac%25d\\x0d%0A%3A%3Awarning%3A%3Ax%3A gradient failed::"))
      << text;
  EXPECT_TRUE(contains(text, "100%25\\x0d%0A           ::error::forged   7 of 7")) << text;
  EXPECT_EQ(occurrences(text, "\n"), 1u);
  c.checks[1].findings[0].message = std::string(100000, 'm');
  EXPECT_LT(github_annotations(report_of({c}), "").size(), 4096u);
}

// ---- files
// ----------------------------------------------------------------------------------------

TEST(ReportFolder, HoldsTheFourFilesAndNothingElse) {
  Folder folder;
  const Report r = report_of({healthy(), bias_summed_twice()});
  check_report_folder(folder / "new/deeper");
  write_report(r, folder / "new/deeper");
  write_report(r, folder / "new/deeper");
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder / "new/deeper"))
    names.insert(entry.path().filename().string());
  EXPECT_EQ(names, (std::set<std::string>{"report.json", "junit.xml", "summary.md", "index.html"}));
  EXPECT_EQ(read(folder / "new/deeper/report.json"), report_json(r));
  EXPECT_EQ(read(folder / "new/deeper/junit.xml"), junit_xml(r));
}

// Someone who presses Ctrl-C again while it is written gets all files of this run, and no half of
// one.
TEST(ReportFolder, IsWholeWheneverTheRunIsEnded) {
  Folder folder;
  const Report r = report_of(std::vector<CaseResult>(5000, bias_summed_twice()));
  const pid_t writer = fork();
  if (writer == 0) {
    write_report(r, folder / ".");
    _exit(0);
  }
  while (!std::filesystem::exists(folder / "report.json")) usleep(100);
  kill(writer, SIGTERM);
  int status = 0;
  waitpid(writer, &status, 0);
  EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGTERM) << "it was through before";
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder / "."))
    names.insert(entry.path().filename().string());
  EXPECT_EQ(names, (std::set<std::string>{"report.json", "junit.xml", "summary.md", "index.html"}));
}

TEST(ReportFolder, ThatCannotBeWrittenIsSaidBeforeTheRun) {
  Folder folder;
  std::ofstream(folder / "file") << "x";
  EXPECT_THROW(check_report_folder(folder / "file"), BadInput);
  EXPECT_THROW(check_report_folder(folder / "file/below"), BadInput);
  EXPECT_THROW(write_report(report_of({healthy()}), folder / "file/below"), Infrastructure);
}

TEST(FailedLines, AreTheLinesThatDidNotPassEachOnce) {
  Folder folder;
  CaseResult twice = bias_summed_twice();
  twice.checks[2].verdict = Verdict::crashed;
  ControlResult escaped = with(ControlResult::escaped);
  escaped.canonical = "linear_row tp=4 seed=1 control=escaped";
  ControlResult feeble = caught("feeble", 3), blind = caught("blind", nan);
  write_report(
      report_of({healthy(), twice, with(Verdict::skipped)}, {escaped, caught(), feeble, blind}),
      folder.path());
  const std::vector<std::pair<std::string, bool>> due = {
      {"linear_row tp=4 sp=on dtype=f64 fill=integers seed=1", false},
      {"linear_row tp=4 seed=1 control=escaped", true},
      {"linear_row tp=4 control=feeble", true},
      {"linear_row tp=4 control=blind", true}};
  std::vector<std::pair<std::string, bool>> met;
  for (const FailedLine& l : failed_lines(folder.path())) met.emplace_back(l.line, l.control);
  EXPECT_EQ(met, due);
}

TEST(FailedLines, SayWhetherThatRunReachedItsEnd) {
  Folder folder;
  Report r = report_of({healthy()});
  bool complete = false;
  write_report(r, folder.path());
  failed_lines(folder.path(), &complete);
  EXPECT_TRUE(complete);
  r.complete = false;
  write_report(r, folder.path());
  EXPECT_TRUE(failed_lines(folder.path(), &complete).empty());
  EXPECT_FALSE(complete);
}

TEST(FailedLines, RefuseWhatIsNotAReport) {
  Folder folder;
  EXPECT_THROW(failed_lines(folder / "none"), BadInput);
  for (const char* text :
       {"", "{", "[]", "{}", "{\"schema\": 2, \"cases\": [], \"controls\": []}", "{\"schema\": 1}",
        "{\"schema\": 1, \"cases\": [1], \"controls\": []}",
        "{\"schema\": 1, \"cases\": [{\"verdict\": \"failed\", \"line\": 3}], \"controls\": []}"}) {
    std::ofstream(folder / "report.json") << text;
    EXPECT_THROW(failed_lines(folder.path()), BadInput) << text;
  }
}

}  // namespace report_test
}  // namespace
}  // namespace shardproof
