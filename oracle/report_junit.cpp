// junit.xml, for the page of a CI: a suite a contract, a test case for each check on each case and
// for each control. What a verdict of the whole run needs beyond them (the judge's own suite,
// lanes, an empty run) is one more test case, so that no red run has a green page. Controls that
// are equivalent on a case were not put to the test there and do not appear; those whose healthy
// twin failed, or for which the machine is too small, are skipped with that reason.
#include <fmt/format.h>

#include <map>

#include "oracle/joined.hpp"
#include "oracle/report.hpp"
#include "oracle/report_parts.hpp"
#include "oracle/words.hpp"

namespace shardproof {

using namespace telling;

namespace {

struct TestCase {
  std::string classname, name;
  double seconds = 0;
  enum { passed, failure, skipped } what = passed;
  std::string type, message, text;
};

std::string xml_of(const TestCase& t) {
  std::string xml = fmt::format("    <testcase classname=\"{}\" name=\"{}\" time=\"{:.3f}\"",
                                xml_text(t.classname), xml_text(t.name), t.seconds);
  if (t.what == TestCase::passed) return xml + "/>\n";
  if (t.what == TestCase::skipped)
    return xml + fmt::format("><skipped message=\"{}\"/></testcase>\n", xml_text(t.message));
  return xml + fmt::format("><failure type=\"{}\" message=\"{}\">{}</failure></testcase>\n",
                           xml_text(t.type), xml_text(t.message), xml_text(t.text));
}

TestCase test_of(const CaseResult& c, const CheckResult& check, const std::string& program) {
  TestCase t{c.contract,
             (c.canonical.empty() ? c.line : c.canonical) + " " + check.check,
             c.seconds / double(c.checks.size()),
             TestCase::passed,
             "",
             "",
             ""};
  if (check.verdict == Verdict::skipped) {
    t.what = TestCase::skipped;
    t.message = check.note;
  } else if (check.verdict != Verdict::passed) {
    t.what = TestCase::failure;
    t.type = name(check.verdict);
    t.text = block_about(c, check, program);
    t.message = first_line(t.text);
  }
  return t;
}

TestCase test_of(const ControlResult& c, const std::string& program) {
  TestCase t{c.contract,
             fmt::format("{} control {}", c.canonical.empty() ? c.witness : c.canonical, c.name),
             c.seconds,
             TestCase::passed,
             "",
             "",
             ""};
  if (c.outcome == ControlResult::caught && !weak(c)) return t;
  if (c.outcome == ControlResult::unjudged || c.outcome == ControlResult::unproven) {
    t.what = TestCase::skipped;
    t.message = c.reason;
    return t;
  }
  t.what = TestCase::failure;
  t.type = weak(c) ? "weak" : name(c.outcome);
  t.text = block(c, program);
  t.message = first_line(t.text);
  return t;
}

TestCase judgement_of(const Report& report) {
  TestCase t{"shardproof", "judgement", report.self.seconds, TestCase::passed, "", "", ""};
  std::vector<std::string> why = no_judgement(report);
  t.type = "no judgement";
  if (why.empty() && !report.complete) t.type = "incomplete", why = {unfinished(report)};
  if (why.empty()) return t;
  t.what = TestCase::failure;
  t.message = joined(why, "; ");
  t.text = closing(report);
  return t;
}

using Suites = std::vector<std::pair<std::string, std::vector<TestCase>>>;

Suites suites_of(const Report& report) {
  Suites suites;
  std::map<std::string, size_t> number;
  auto add = [&](TestCase t) {
    auto [known, fresh] = number.try_emplace(t.classname, suites.size());
    if (fresh) suites.push_back({t.classname, {}});
    suites[known->second].second.push_back(std::move(t));
  };
  add(judgement_of(report));
  for (const CaseResult& c : report.cases)
    for (const CheckResult& check : c.checks) add(test_of(c, check, report.program));
  for (const ControlResult& c : report.controls)
    if (c.outcome != ControlResult::equivalent) add(test_of(c, report.program));
  return suites;
}

struct Sums {
  size_t tests = 0, failures = 0, skipped = 0;
  double seconds = 0;
  void add(const TestCase& t) {
    tests++;
    failures += t.what == TestCase::failure;
    skipped += t.what == TestCase::skipped;
    seconds += t.seconds;
  }
  std::string attributes() const {
    return fmt::format("tests=\"{}\" failures=\"{}\" errors=\"0\" skipped=\"{}\" time=\"{:.3f}\"",
                       tests, failures, skipped, seconds);
  }
};

}  // namespace

std::string junit_xml(const Report& report) {
  Sums all;
  std::string body;
  for (const auto& [contract, tests] : suites_of(report)) {
    Sums sums;
    std::string cases;
    for (const TestCase& t : tests) {
      sums.add(t);
      all.add(t);
      cases += xml_of(t);
    }
    body += fmt::format("  <testsuite name=\"{}\" {}>\n{}  </testsuite>\n", xml_text(contract),
                        sums.attributes(), cases);
  }
  return fmt::format(
      "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<testsuites name=\"shardproof\" {}>\n{}"
      "</testsuites>\n",
      all.attributes(), body);
}

}  // namespace shardproof
