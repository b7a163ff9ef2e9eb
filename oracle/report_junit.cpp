// junit.xml, for the page of a CI, some of which refuse large files: a suite a contract; a test
// case for each line of which every check passed, or was skipped for one reason, and for each check
// of any other; one for each control. What a verdict of the whole run needs beyond them (the
// judge's own suite, lanes, an empty run) is one more test case, so that no red run has a green
// page. Controls that are equivalent on a case were not put to the test there and do not appear;
// those whose healthy twin failed, or for which the machine is too small, are skipped with that
// reason. Names hold the line as it is printed, which `run` takes.
#include <fmt/format.h>

#include <algorithm>
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

TestCase passed(const std::string& contract, std::string name, double seconds) {
  return {contract, std::move(name), seconds, TestCase::passed, "", "", ""};
}

TestCase skipped(TestCase t, const std::string& why) {
  t.what = TestCase::skipped;
  t.message = why;
  return t;
}

TestCase failed(TestCase t, const std::string& type, const std::string& text) {
  t.what = TestCase::failure;
  t.type = type;
  t.message = first_line(text);
  t.text = text;
  return t;
}

TestCase test_of(const CaseResult& c, const CheckResult& check, const std::string& program) {
  TestCase t = passed(c.contract, c.line + " " + check.check, c.seconds / double(c.checks.size()));
  if (check.verdict == Verdict::passed) return t;
  if (check.verdict == Verdict::skipped) return skipped(std::move(t), check.note);
  return failed(std::move(t), name(check.verdict), block_about(c, check, program));
}

// A line that says as much as its checks.
TestCase test_of(const CaseResult& c, const std::string& program) {
  TestCase t = passed(c.contract, c.line, c.seconds);
  if (c.checks.empty()) return failed(std::move(t), name(Verdict::untested), block(c, program));
  if (c.checks[0].verdict == Verdict::passed) return t;
  return skipped(std::move(t), c.checks[0].note);
}

bool says_as_much_as_its_checks(const CaseResult& c) {
  const auto like_the_first = [&](const CheckResult& check) {
    const CheckResult& first = c.checks[0];
    return check.verdict == first.verdict &&
           (check.verdict == Verdict::passed ||
            (check.verdict == Verdict::skipped && check.note == first.note));
  };
  return std::all_of(c.checks.begin(), c.checks.end(), like_the_first);
}

TestCase test_of(const ControlResult& c, const std::string& program) {
  TestCase t = passed(c.contract, fmt::format("{} control {}", c.witness, c.name), c.seconds);
  if (c.outcome == ControlResult::caught && !weak(c)) return t;
  if (c.outcome == ControlResult::unjudged || c.outcome == ControlResult::unproven)
    return skipped(std::move(t), c.reason);
  return failed(std::move(t), weak(c) ? "weak" : name(c.outcome), block(c, program));
}

TestCase judgement_of(const Report& report) {
  TestCase t = passed("shardproof", "judgement", report.self.seconds);
  std::vector<std::string> why = no_judgement(report);
  const char* type = "no judgement";
  if (why.empty() && !report.complete) type = "incomplete", why = {unfinished(report)};
  if (why.empty()) return t;
  t = failed(std::move(t), type, closing(report));
  t.message = joined(why, "; ");
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
    if (says_as_much_as_its_checks(c))
      add(test_of(c, report.program));
    else
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
