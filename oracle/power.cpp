// Power of the checks from the results of a run.
#include "oracle/power.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <sstream>

#include "oracle/joined.hpp"
#include "oracle/report_parts.hpp"

namespace shardproof {
namespace {

class Table {
 public:
  void add(const CaseResult& c) {
    for (const CheckResult& check : c.checks) {
      if (check.verdict != Verdict::passed) continue;
      Power& p = of(c.family, check.check);
      ++p.passed;
      p.exact = p.exact && (check.exact || check.ratio == 0);
      if (!(check.ratio > p.worst_healthy)) continue;
      p.worst_healthy = check.ratio;
      p.worst_line = c.line;
    }
  }

  void add(const ControlResult& c) {
    if (c.outcome == ControlResult::caught)
      for (const Catch& seen : c.catches) add(c, seen);
    else if (c.outcome == ControlResult::escaped || c.outcome == ControlResult::wrong_check)
      for (const std::string& check : unseen(c)) of(c.family, check).escaped.push_back(c.name);
  }

  std::vector<Power> rows;

 private:
  void add(const ControlResult& c, const Catch& seen) {
    Power& p = of(c.family, seen.check);
    ++p.caught;
    if (seen.exact || !(p.weakest.empty() || seen.margin < p.margin || std::isnan(seen.margin)))
      return;
    p.weakest = c.name;
    p.witness = c.witness;
    p.ratio = seen.ratio;
    p.margin = seen.margin;
  }

  // The checks that had to fire and did not: all that were due where nothing is known.
  static std::vector<std::string> unseen(const ControlResult& c) {
    std::vector<std::string> list;
    std::istringstream expected(c.expected_check);
    const std::string fired = "," + c.caught_by + ",";
    for (std::string check; std::getline(expected, check, ',');)
      if (fired.find("," + check + ",") == std::string::npos) list.push_back(check);
    return list;
  }

  Power& of(const std::string& family, const std::string& check) {
    for (Power& p : rows)
      if (p.family == family && p.check == check) return p;
    Power& p = rows.emplace_back();
    p.family = family;
    p.check = check;
    return p;
  }
};

bool low(const Power& p) { return !p.weakest.empty() && !(p.margin >= least_margin); }

}  // namespace

std::string Power::state() const {
  if (!escaped.empty()) return "BLIND";
  if (low(*this)) return "LOW";
  if (!weakest.empty()) return "seen";
  return caught > 0 ? "exact" : "no control";
}

std::vector<Power> power_of(const Report& report) {
  Table table;
  for (const CaseResult& c : report.cases) table.add(c);
  for (const ControlResult& c : report.controls) table.add(c);
  std::stable_sort(table.rows.begin(), table.rows.end(), [&](const Power& a, const Power& b) {
    const auto place = [&](const Power& p) {
      return std::find_if(table.rows.begin(), table.rows.end(),
                          [&](const Power& q) { return q.family == p.family; }) -
             table.rows.begin();
    };
    return place(a) < place(b);
  });
  return std::move(table.rows);
}

const std::vector<BlindSpot>& blind_spots() {
  static const std::vector<BlindSpot> spots = {
      {"forward", "an error of the backward alone", "gradient, adjoint, gradcheck"},
      {"forward", "a term lost from a long sum of a narrow type",
       "the same line on integers or f64"},
      {"gradient", "a mistake that reference and subject share", "gradcheck"},
      {"adjoint", "an error that forward and transpose share", "forward"},
      {"adjoint", "a bias summed over another axis", "gradient"},
      {"gradcheck", "an error of the forward that its gradient follows", "forward"},
      {"gradcheck", "copies that part", "replica"},
      {"replica", "replicas that are wrong alike", "forward, gradient"},
      {"replica", "equal draws of shards that hold few random bits", "forward"},
      {"replica", "own order of sums at two ranks or on integers", "normal data at three ranks"},
      {"ledger", "calls made past the communicator", "nothing: its lane is not proven"},
      {"ledger", "right calls on wrong buffers", "forward, gradient"},
      {"lockstep", "wrong calls that all ranks make alike", "ledger"},
      {"memory", "wrong values written in the right place", "forward, gradient"},
      {"repeat", "an error that is the same every time", "forward, gradient"},
      {"stream", "a stream that the kernel made by itself, held by nobody", "memory, repeat"},
      {"mask", "a wrong value at a pair that is due", "forward"},
      {"coverage", "a pair that is due and computed wrongly", "forward, mask"},
      {"leak", "an error inside one sequence", "forward, gradient"},
      {"accumulate", "an error of a single microbatch", "forward, gradient"},
      {"rejection", "a wrong result on a legal line", "forward, gradient"},
  };
  return spots;
}

std::string blind_to(const std::string& check) {
  std::string text;
  for (const BlindSpot& spot : blind_spots())
    if (spot.check == check)
      text += fmt::format("{}{} ({})", text.empty() ? "" : "; ", spot.fault, spot.seen_by);
  return text;
}

namespace {

// "scale_p (3 times), stale": each once.
std::string each_once(const std::vector<std::string>& names) {
  std::vector<std::string> told;
  for (auto name = names.begin(); name != names.end(); ++name) {
    if (std::find(names.begin(), name, *name) != name) continue;
    const auto times = std::count(name, names.end(), *name);
    told.push_back(times == 1 ? *name : fmt::format("{} ({} times)", *name, times));
  }
  return joined(told);
}

}  // namespace

std::vector<std::string> power_columns() {
  return {"family", "check",           "state",     "healthy passed", "worst ratio",
          "caught", "weakest control", "its ratio", "margin",         "cannot see (who does)"};
}

std::vector<std::vector<std::string>> power_rows(const Report& report) {
  std::vector<Power> all = power_of(report);
  std::stable_partition(all.begin(), all.end(),
                        [](const Power& p) { return !p.escaped.empty() || low(p); });
  std::vector<std::vector<std::string>> rows;
  for (const Power& p : all) {
    const bool bounded = !p.weakest.empty();
    const std::string weakest = !p.escaped.empty() ? "escaped: " + each_once(p.escaped)
                                : bounded          ? p.weakest
                                                   : "";
    rows.push_back({p.family, p.check, p.state(), std::to_string(p.passed),
                    p.passed == 0 ? ""
                    : p.exact     ? "exact"
                                  : telling::ratio(p.worst_healthy),
                    std::to_string(p.caught), weakest, bounded ? telling::ratio(p.ratio) : "",
                    bounded        ? telling::ratio(p.margin)
                    : p.caught > 0 ? "exact"
                                   : "",
                    blind_to(p.check)});
  }
  return rows;
}

std::vector<std::string> power_warnings(const Report& report) {
  std::vector<std::string> warnings;
  for (const Power& p : power_of(report)) {
    if (!p.escaped.empty())
      warnings.push_back(
          fmt::format("{} of {} does not see {}: its bound is too wide, or its witness "
                      "does not show it",
                      p.check, p.family, each_once(p.escaped)));
    if (low(p))
      warnings.push_back(
          fmt::format("{} of {} sees {} at {} times the healthy ratio only, at least {} "
                      "are due",
                      p.check, p.family, p.weakest, telling::ratio(p.margin), least_margin));
  }
  return warnings;
}

}  // namespace shardproof
