// summary.md: the report as it reads in a pull request. The answer first, then what failed, then
// the tables. It stays below the 65,536 characters that a comment may have.
#include <fmt/format.h>

#include <algorithm>

#include "oracle/joined.hpp"
#include "oracle/markdown.hpp"
#include "oracle/power.hpp"
#include "oracle/report.hpp"
#include "oracle/report_parts.hpp"

namespace shardproof {

using namespace telling;
using namespace markdown;

namespace {

constexpr size_t most_characters = 60000;
constexpr size_t most_blocks = 20;

std::string families_table(const Report& report) {
  std::string table =
      table_head({"family", "contracts", "checks", "did not pass", "skipped", "controls caught",
                  "equivalent", "escaped or wrong check", "unjudged", "margin", "seconds"},
                 [](size_t i) { return i > 0 && i != 9; });
  for (const Family& f : families(report)) {
    const Counts& n = f.counts;
    auto text = [](int64_t x) { return std::to_string(x); };
    table += table_row({f.name, text(int64_t(f.contracts.size())), text(n.checks),
                        text(n.checks - n.passed - n.skipped), text(n.skipped), text(n.caught),
                        text(n.equivalent), text(n.escaped + n.wrong_check), text(n.unjudged),
                        margin(f), fmt::format("{:.1f}", f.seconds)});
  }
  return table + "\n";
}

std::string lanes_list(const Report& report) {
  if (report.lanes.empty()) return "";
  std::string text = "Lanes: ";
  std::vector<std::string> phrases;
  for (const std::string& phrase : lanes(report)) phrases.push_back(cell(phrase));
  return text + joined(phrases, "; ") + ".\n\n";
}

std::vector<std::string> blocks(const Report& report) {
  std::vector<std::string> texts;
  for (const CaseResult& c : report.cases) {
    const CheckResult* first = headline(c);
    if (!first || !lets_pass(first->verdict)) texts.push_back(block(c, report.program));
  }
  for (const ControlResult& c : report.controls)
    if (c.outcome == ControlResult::escaped || c.outcome == ControlResult::wrong_check || weak(c))
      texts.push_back(block(c, report.program));
  return texts;
}

std::string failures(const Report& report) {
  const std::vector<std::string> texts = blocks(report);
  if (texts.empty()) return "";
  std::string all = "### What did not pass\n\n";
  size_t shown = 0;
  for (; shown < std::min(texts.size(), most_blocks); shown++) {
    if (all.size() + texts[shown].size() > most_characters / 2) break;
    all += fenced(texts[shown]);
  }
  if (shown < texts.size()) all += fmt::format("{} more in report.json.\n\n", texts.size() - shown);
  return all;
}

std::string controls_details(const Report& report, size_t room) {
  const std::vector<std::vector<std::string>> rows = control_rows(report);
  if (rows.empty()) return "";
  std::string text = fmt::format("<details><summary>{}</summary>\n\n",
                                 number_of(int64_t(report.controls.size()), "broken run"));
  text += table_head(control_columns(), is_number_column);
  size_t shown = 0;
  for (; shown < rows.size() && text.size() + 200 < room; shown++) text += table_row(rows[shown]);
  text += "\n";
  if (shown < rows.size())
    text += fmt::format("{} more rows in report.json.\n\n", rows.size() - shown);
  return text + "</details>\n\n";
}

std::string power_details(const Report& report, size_t room) {
  const std::vector<std::vector<std::string>> rows = power_rows(report);
  if (report.controls.empty() || rows.empty()) return "";
  std::string text = "<details><summary>What each check sees, and what it cannot</summary>\n\n";
  text += table_head(power_columns(), [](size_t i) { return i >= 3 && i != 6 && i != 9; });
  size_t shown = 0;
  for (; shown < rows.size() && text.size() + 400 < room; shown++) text += table_row(rows[shown]);
  text += "\n";
  if (shown < rows.size())
    text += fmt::format("{} more rows in report.json.\n\n", rows.size() - shown);
  return text + "</details>\n\n";
}

std::string made_by(const Report& report) {
  std::string text = "Command: <code>" + cell(report.command) + "</code>";
  std::vector<std::string> versions;
  for (const auto& [what, version] : report.versions) versions.push_back(what + " " + version);
  if (!versions.empty()) text += ". Versions: " + cell(joined(versions));
  return text + ".\n";
}

}  // namespace

std::string summary_markdown(const Report& report) {
  const Ending end = ending(report);
  std::string text = fmt::format("## Shardproof: {}\n\n{} ({}).\n\n", end.word, cell(end.sentence),
                                 telling::seconds(report.wall_seconds));
  text += families_table(report) + lanes_list(report) + failures(report);
  text += power_details(report, most_characters / 4);
  text += controls_details(report, most_characters - std::min(most_characters, text.size()));
  return text + made_by(report);
}

}  // namespace shardproof
