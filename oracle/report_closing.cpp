// The lines that close a run: the judge itself, a line a family, the lanes, the answer, what to
// try.
//
//   mapping    14 contracts  1260 checks   controls 212 caught, 18 equivalent   margin
//   exact     9.8 s lanes      processes 1 2 3 4 8 proven   staged NOT PROVEN (no driver, 35)
//   PASSED     3204 checks, 0 skipped, worst healthy ratio 0.31 (linear_row tp=8 dtype=bf16)    34
//   s
#include <fmt/format.h>

#include <algorithm>

#include "oracle/joined.hpp"
#include "oracle/power.hpp"
#include "oracle/report.hpp"
#include "oracle/report_parts.hpp"

namespace shardproof {

using namespace telling;

namespace {

constexpr size_t narrowest = 100;    // column in which the seconds end
constexpr size_t most_replays = 10;  // named again below FAILED

struct Line {
  std::string label, text, right;  // right: seconds, flush right
};

// Numbers of a column share its width, so that the units below each other align.
struct Width {
  size_t contracts = 0, checks = 0, caught = 0, equivalent = 0;
};
size_t digits(int64_t n) { return std::to_string(n).size(); }
Width width_of(const std::vector<Family>& families) {
  Width w;
  for (const Family& f : families) {
    w.contracts = std::max(w.contracts, digits(int64_t(f.contracts.size())));
    w.checks = std::max(w.checks, digits(f.counts.checks));
    w.caught = std::max(w.caught, digits(f.counts.caught));
    w.equivalent = std::max(w.equivalent, digits(f.counts.equivalent));
  }
  return w;
}

std::string controls_text(const Family& f, const Width& w) {
  const Counts& n = f.counts;
  if (n.controls == 0) return "";
  std::string text = fmt::format("   controls {:>{}} caught, {:>{}} equivalent", n.caught, w.caught,
                                 n.equivalent, w.equivalent);
  if (n.escaped > 0) text += fmt::format(", {} ESCAPED", n.escaped);
  if (n.wrong_check > 0) text += fmt::format(", {} WRONG CHECK", n.wrong_check);
  if (n.unjudged > 0)
    text +=
        fmt::format(", {} unjudged{}", n.unjudged, n.blamed() > 0 ? " (healthy code fails)" : "");
  if (n.unproven > 0) text += fmt::format(", {} NOT PROVEN", n.unproven);
  if (std::string m = margin(f); !m.empty()) text += "   margin " + m;
  return text;
}

std::string family_text(const Family& f, const Width& w) {
  const size_t contracts = f.contracts.size();
  std::string text = fmt::format("{:>{}} {:<9}  {:>{}} {:<6}", contracts, w.contracts,
                                 contracts == 1 ? "contract" : "contracts", f.counts.checks,
                                 w.checks, f.counts.checks == 1 ? "check" : "checks");
  if (f.counts.blamed() > 0) text += fmt::format(", {} FAILED", f.counts.blamed());
  return text + controls_text(f, w);
}

void add_self(const Report& report, std::vector<Line>& lines) {
  const SelfResult& self = report.self;
  if (self.planted > 0)
    lines.push_back(
        {"self", fmt::format("{} faults planted in the judge, {} named", self.planted, self.named),
         telling::seconds(self.seconds)});
  for (const std::string& failure : self.failures) lines.push_back({"", failure, ""});
}

void add_families(const Report& report, std::vector<Line>& lines) {
  const std::vector<Family> all = families(report);
  const Width w = width_of(all);
  for (const Family& f : all)
    lines.push_back({f.name, family_text(f, w), telling::seconds(f.seconds)});
}

void add_lanes(const Report& report, std::vector<Line>& lines) {
  if (!report.lanes.empty()) lines.push_back({"lanes", joined(lanes(report), "   "), ""});
  for (const std::string& text : not_due(report)) lines.push_back({"not due", text, ""});
  if (std::string text = left_out(report); !text.empty()) lines.push_back({"left out", text, ""});
}

// The control whose replay is the shortest to paste, among those that were caught.
const ControlResult* worth_trying(const Report& report) {
  const ControlResult* best = nullptr;
  for (const ControlResult& c : report.controls)
    if (c.outcome == ControlResult::caught && c.kind.empty() && !c.replay.empty() &&
        (!best || c.replay.size() < best->replay.size()))
      best = &c;
  return best;
}

std::vector<std::string> replays(const Report& report) {
  std::vector<std::string> calls;
  for (const CaseResult& c : report.cases) {
    const CheckResult* first = headline(c);
    if (first && lets_pass(first->verdict)) continue;
    calls.push_back(c.replay.empty() ? "run " + c.line : c.replay);
  }
  for (const ControlResult& c : report.controls)
    if (c.outcome == ControlResult::escaped || c.outcome == ControlResult::wrong_check || weak(c))
      calls.push_back(c.replay.empty() ? "run " + c.witness : c.replay);
  return calls;
}

void add_next(const Report& report, const std::string& ending, std::vector<Line>& lines) {
  if (ending == "PASSED") {
    if (const ControlResult* c = worth_trying(report))
      lines.push_back(
          {"try", report.program + " " + c->replay + "       (shows a caught bug)", ""});
    return;
  }
  const std::vector<std::string> calls = replays(report);
  for (size_t i = 0; i < std::min(calls.size(), most_replays); i++)
    lines.push_back({i == 0 ? "replay" : "", report.program + " " + calls[i], ""});
  if (calls.size() > most_replays)
    lines.push_back({"", fmt::format("and {} more", calls.size() - most_replays), ""});
}

std::string laid_out(const std::vector<Line>& lines) {
  size_t label = label_width, total = narrowest;
  for (const Line& l : lines) label = std::max(label, l.label.size() + 2);
  for (const Line& l : lines)
    if (!l.right.empty()) total = std::max(total, label + l.text.size() + 3 + l.right.size());
  std::string all;
  for (const Line& l : lines) {
    std::string text = l.text;
    if (!l.right.empty())
      text += fmt::format("{:>{}}", l.right, total - std::min(total, label + l.text.size()));
    all += row(l.label, text, int(label));
  }
  return all;
}

}  // namespace

std::string closing(const Report& report) {
  std::vector<Line> lines;
  add_self(report, lines);
  add_families(report, lines);
  add_lanes(report, lines);
  for (const std::string& warning : power_warnings(report)) lines.push_back({"power", warning, ""});
  const Ending end = ending(report);
  lines.push_back({end.word, end.sentence, telling::seconds(report.wall_seconds)});
  if (!report.dumped.empty()) lines.push_back({"dumped", report.dumped, ""});
  add_next(report, end.word, lines);
  return laid_out(lines);
}

std::string controls_table(const Report& report) {
  std::vector<std::vector<std::string>> cells = {control_columns()};
  for (const std::vector<std::string>& r : control_rows(report)) cells.push_back(r);
  std::vector<size_t> widths(cells[0].size(), 0);
  for (const auto& r : cells)
    for (size_t i = 0; i < r.size(); i++) widths[i] = std::max(widths[i], r[i].size());
  std::string table;
  for (const auto& r : cells) {
    std::string line;
    for (size_t i = 0; i < r.size(); i++)
      line += is_number_column(i) ? fmt::format("{:>{}}  ", r[i], widths[i])
                                  : fmt::format("{:<{}}  ", printable(r[i]), widths[i]);
    line.erase(line.find_last_not_of(' ') + 1);
    table += line + '\n';
  }
  return table;
}

}  // namespace shardproof
