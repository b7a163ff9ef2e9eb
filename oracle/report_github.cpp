// The worst findings as annotations of a GitHub workflow, one line each:
//
//   ::error title=linear_row: gradient failed::FAILED     linear_row tp=4 ...%0Aat         b[0],
//   ...
//
// A page shows ten errors of a step; the rest is a pointer to the report. Source of the escapes:
// @actions/core, command.ts (escapeData, escapeProperty).
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "oracle/joined.hpp"
#include "oracle/report.hpp"
#include "oracle/report_parts.hpp"

namespace shardproof {

using namespace telling;

namespace {

constexpr size_t most_annotations = 10;
constexpr size_t most_characters = 3000;  // of a message: the page shows little of it

std::string escaped(const std::string& text, const char* characters) {
  std::string safe;
  for (const char c : text) {
    if (std::string_view(characters).find(c) != std::string_view::npos)
      safe += fmt::format("%{:02X}", int(c));
    else
      safe += c;
  }
  return safe;
}

struct Annotation {
  int kind = 0;      // an unfit judge before a rank that died before a wrong value
  double worse = 0;  // of the same kind, the greater comes first
  std::string title, text;
};

std::string line_of(const char* level, const std::string& title, const std::string& text) {
  std::string shown = printable(text.substr(0, most_characters));
  if (text.size() > most_characters) shown += "\n... (cut)";
  return fmt::format("::{} title={}::{}\n", level, escaped(printable(title), "%\r\n:,"),
                     escaped(shown, "%\r\n"));
}

int kind_of(Verdict v) {
  return v == Verdict::crashed ? 2 : v == Verdict::hung ? 3 : v == Verdict::failed ? 4 : 5;
}

double worst_ratio(const CheckResult& check) {
  double worst = check.ratio;
  for (const Finding& f : check.findings) worst = std::max(worst, f.ratio);
  return std::isnan(worst) ? INFINITY : worst;
}

std::vector<Annotation> annotations(const Report& report) {
  std::vector<Annotation> all;
  for (const std::string& why : no_judgement(report)) all.push_back({0, 0, "no judgement", why});
  for (const ControlResult& c : report.controls)
    if (c.outcome == ControlResult::escaped || c.outcome == ControlResult::wrong_check || weak(c))
      all.push_back(
          {1, 0,
           fmt::format("{}: control {} {}", c.contract, c.name,
                       weak(c)                               ? "has a weak margin"
                       : c.outcome == ControlResult::escaped ? "escaped"
                                                             : "was caught by another check"),
           block(c, report.program)});
  for (const CaseResult& c : report.cases) {
    const CheckResult* first = headline(c);
    if (!first || lets_pass(first->verdict)) continue;
    all.push_back({kind_of(first->verdict), worst_ratio(*first),
                   fmt::format("{}: {} {}", c.contract, first->check, name(first->verdict)),
                   block(c, report.program)});
  }
  std::stable_sort(all.begin(), all.end(), [](const Annotation& a, const Annotation& b) {
    return a.kind != b.kind ? a.kind < b.kind : a.worse > b.worse;
  });
  return all;
}

}  // namespace

std::string github_annotations(const Report& report, const std::string& folder) {
  const std::vector<Annotation> all = annotations(report);
  std::string text;
  for (size_t i = 0; i < std::min(all.size(), most_annotations); i++)
    text += line_of("error", all[i].title, all[i].text);
  const std::string where =
      folder.empty() ? "run with --report DIR for all of them"
                     : folder + "/summary.md and " + folder + "/index.html show all of them";
  if (all.size() > most_annotations)
    text +=
        line_of("error", "Shardproof",
                number_of(int64_t(all.size() - most_annotations), "more finding") + "; " + where);
  return text;
}

}  // namespace shardproof
