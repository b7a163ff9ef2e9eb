// From single verdicts to the one answer: what is counted, when nobody can be blamed, how to exit.
#include "oracle/verdict.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "oracle/joined.hpp"
#include "oracle/report_parts.hpp"

namespace shardproof {

const char* name(Verdict v) {
  switch (v) {
    case Verdict::untested:
      return "untested";
    case Verdict::passed:
      return "passed";
    case Verdict::failed:
      return "failed";
    case Verdict::vacuous:
      return "vacuous";
    case Verdict::skipped:
      return "skipped";
    case Verdict::hung:
      return "hung";
    case Verdict::crashed:
      return "crashed";
  }
  return "untested";
}

const char* name(ControlResult::Outcome o) {
  switch (o) {
    case ControlResult::caught:
      return "caught";
    case ControlResult::escaped:
      return "escaped";
    case ControlResult::wrong_check:
      return "wrong_check";
    case ControlResult::equivalent:
      return "equivalent";
    case ControlResult::unjudged:
      return "unjudged";
    case ControlResult::unproven:
      return "unproven";
  }
  return "escaped";
}

// Written positively, so that a margin of NaN is weak.
bool weak(const ControlResult& c) {
  return c.outcome == ControlResult::caught && !c.exact && !(c.margin >= least_margin);
}

void count(const CaseResult& c, Counts& n) {
  n.cases++;
  for (const CheckResult& check : c.checks) {
    n.checks++;
    switch (check.verdict) {
      case Verdict::passed:
        n.passed++;
        break;
      case Verdict::failed:
        n.failed++;
        break;
      case Verdict::vacuous:
        n.vacuous++;
        break;
      case Verdict::skipped:
        n.skipped++;
        break;
      case Verdict::hung:
        n.hung++;
        break;
      case Verdict::crashed:
        n.crashed++;
        break;
      case Verdict::untested:
        n.untested++;
        break;
    }
  }
}

void count(const ControlResult& c, Counts& n) {
  n.controls++;
  n.weak += weak(c);
  switch (c.outcome) {
    case ControlResult::caught:
      n.caught++;
      break;
    case ControlResult::escaped:
      n.escaped++;
      break;
    case ControlResult::wrong_check:
      n.wrong_check++;
      break;
    case ControlResult::equivalent:
      n.equivalent++;
      break;
    case ControlResult::unjudged:
      n.unjudged++;
      break;
    case ControlResult::unproven:
      n.unproven++;
      break;
  }
}

Counts counts(const Report& report) {
  Counts n;
  for (const CaseResult& c : report.cases) count(c, n);
  for (const ControlResult& c : report.controls) count(c, n);
  return n;
}

namespace {

// "a, b, c and 4 more": names of the controls that `is` picks, each once.
template <class Predicate>
std::string names_of(const Report& report, Predicate is) {
  std::vector<std::string> names;
  for (const ControlResult& c : report.controls)
    if (is(c) && std::find(names.begin(), names.end(), c.name) == names.end())
      names.push_back(c.name);
  const size_t shown = std::min<size_t>(names.size(), 3);
  std::string text = joined(std::span(names).first(shown));
  if (names.size() > shown) text += fmt::format(" and {} more", names.size() - shown);
  return text;
}

void judge_the_judge(const Report& report, const Counts& n, std::vector<std::string>& why) {
  const SelfResult& self = report.self;
  if (self.named < self.planted)
    why.push_back(fmt::format("the judge missed {} of the {} faults planted in it",
                              self.planted - self.named, self.planted));
  else if (!self.failures.empty())
    why.push_back(number_of(int64_t(self.failures.size()), "test") + " of the judge itself failed");
  if (n.escaped > 0)
    why.push_back(
        fmt::format("{} escaped ({})", number_of(n.escaped, "control"),
                    names_of(report, [](auto& c) { return c.outcome == ControlResult::escaped; })));
  if (n.wrong_check > 0)
    why.push_back(fmt::format(
        "{} caught by another check than the one due ({})", number_of(n.wrong_check, "control"),
        names_of(report, [](auto& c) { return c.outcome == ControlResult::wrong_check; })));
  if (n.weak > 0)
    why.push_back(fmt::format("{} caught with a margin under {} ({})", number_of(n.weak, "control"),
                              least_margin, names_of(report, weak)));
  // The failure of the twin is what is due then; without one nothing explains the silence.
  const auto unjudged = [](const ControlResult& c) { return c.outcome == ControlResult::unjudged; };
  if (n.unjudged > 0 && n.blamed() == 0) {
    const ControlResult& first =
        *std::find_if(report.controls.begin(), report.controls.end(), unjudged);
    why.push_back(fmt::format("{} unjudged ({}){}", number_of(n.unjudged, "control"),
                              names_of(report, unjudged),
                              first.reason.empty() ? "" : ": " + first.reason));
  }
}

// A lane is required by its name ("mpi.np8") or as all lanes of a transport ("mpi").
void judge_lanes(const Report& report, std::vector<std::string>& why) {
  for (const std::string& required : report.required) {
    bool ran = false;
    for (const Lane& lane : report.lanes) {
      if (lane.name != required && !lane.name.starts_with(required + ".")) continue;
      ran = true;
      if (!lane.proven)
        why.push_back(fmt::format("required lane {} is not proven{}", lane.name,
                                  lane.reason.empty() ? "" : " (" + lane.reason + ")"));
    }
    if (!ran) why.push_back(fmt::format("required lane {} did not run", required));
  }
}

// Checks that say nothing, in cases that no failure explains.
struct Silent {
  int64_t untested = 0, vacuous = 0;
};
Silent silent_checks(const Report& report) {
  Silent silent;
  for (const CaseResult& c : report.cases) {
    Counts n;
    count(c, n);
    if (n.blamed() > 0) continue;
    silent.untested += n.untested;
    silent.vacuous += n.vacuous;
    if (n.checks == 0) silent.untested++;
  }
  return silent;
}

void judge_what_ran(const Report& report, const Counts& n, std::vector<std::string>& why) {
  const Silent silent = silent_checks(report);
  if (n.checks == 0 && n.controls == 0) {
    why.push_back("nothing that was due ran");
  } else if (n.checks > 0 && n.skipped == n.checks) {
    why.push_back(fmt::format("nothing ran but skips ({})", number_of(n.skipped, "check")));
  }
  if (silent.untested > 0)
    why.push_back(number_of(silent.untested, "check") + " due and never judged");
  if (silent.vacuous > 0)
    why.push_back(number_of(silent.vacuous, "check") + " vacuous: compared nothing that counts");
  if (!report.complete && n.blamed() == 0) why.push_back(unfinished(report));
}

}  // namespace

std::vector<std::string> no_judgement(const Report& report) {
  const Counts n = counts(report);
  std::vector<std::string> why;
  judge_the_judge(report, n, why);
  judge_lanes(report, why);
  judge_what_ran(report, n, why);
  if (!report.dump_error.empty()) why.push_back("--dump: " + report.dump_error);
  return why;
}

std::string unfinished(const Report& report) {
  return report.missing.empty() ? "the run did not reach its end" : report.missing;
}

int exit_code(const Report& report) {
  if (!no_judgement(report).empty()) return 3;
  return counts(report).blamed() > 0 ? 1 : 0;
}

}  // namespace shardproof
