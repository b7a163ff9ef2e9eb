// What index.html is drawn from. A whole gate judges tens of thousands of checks: those that passed
// are summed by contract, check and lane, controls by family and name; what did not pass is listed,
// up to a limit, with its block.
#include "oracle/report_page.hpp"

#include <algorithm>
#include <cmath>
#include <map>
#include <sstream>
#include <string_view>
#include <tuple>

#include "oracle/joined.hpp"
#include "oracle/json.hpp"
#include "oracle/json_write.hpp"
#include "oracle/power.hpp"
#include "oracle/report.hpp"
#include "oracle/report_parts.hpp"

namespace shardproof {

extern const char* const page_template;  // oracle/page/, joined when the build is configured

using json_write::list;
using json_write::number;
using json_write::object;
using json_write::texts;

namespace {

using telling::block_about;
using telling::Ending;
using telling::Family;
using telling::is_numeric;
using telling::lets_pass;
using telling::printable;

constexpr size_t most_findings = 500;
constexpr size_t most_block = 4000;      // characters of one
constexpr size_t most_blocks = 1 << 20;  // characters of all
constexpr size_t most_text = 2000;       // of a line, a reason

std::string integer(int64_t n) { return std::to_string(n); }
std::string truth(bool yes) { return yes ? "true" : "false"; }

// Cut where a character begins.
std::string cut(const std::string& words, size_t most) {
  if (words.size() <= most) return words;
  while (most > 0 && (words[most] & 0xc0) == 0x80) --most;
  return words.substr(0, most) + "...";
}
std::string brief(const std::string& words) { return json_text(cut(words, most_text)); }

// Numbers texts in the order in which they are first met.
class Names {
 public:
  size_t operator()(const std::string& name) {
    const auto [at, fresh] = known_.try_emplace(name, known_.size());
    if (fresh) names_.push_back(name);
    return at->second;
  }
  const std::vector<std::string>& all() const { return names_; }
  std::string json() const { return texts(names_); }

 private:
  std::map<std::string, size_t> known_;
  std::vector<std::string> names_;
};

// ---- what passed

struct Passed {
  int64_t count = 0;
  double worst = 0;
  bool numeric = false;
  std::string line;  // of the worst ratio, else the first
};

std::string passing(const Report& report) {
  Names contracts, checks, lanes, verdicts, lines;
  std::map<std::string, std::string> family;
  std::map<std::tuple<size_t, size_t, size_t, size_t>, Passed> sums;
  for (const CaseResult& c : report.cases)
    for (const CheckResult& check : c.checks) {
      if (!lets_pass(check.verdict)) continue;
      family.try_emplace(c.contract, c.family);
      Passed& p = sums[{contracts(c.contract), checks(check.check), lanes(c.lane),
                        verdicts(name(check.verdict))}];
      p.numeric |= is_numeric(check);
      if (p.count++ == 0 || check.ratio > p.worst) p.worst = check.ratio, p.line = c.line;
    }
  std::vector<std::string> rows, named;
  for (const auto& [key, p] : sums) {
    const auto [contract, check, lane, verdict] = key;
    rows.push_back(
        list({integer(int64_t(contract)), integer(int64_t(check)), integer(int64_t(lane)),
              integer(int64_t(verdict)), integer(p.count), p.numeric ? number(p.worst) : "null",
              integer(int64_t(lines(cut(p.line, most_text))))}));
  }
  for (const std::string& contract : contracts.all())
    named.push_back(texts({contract, family[contract]}));
  return object({{"contracts", list(named)},
                 {"checks", checks.json()},
                 {"lanes", lanes.json()},
                 {"verdicts", verdicts.json()},
                 {"lines", lines.json()},
                 {"rows", list(rows)}});
}

// ---- what did not

bool failed(const ControlResult& c) {
  return c.outcome == ControlResult::escaped || c.outcome == ControlResult::wrong_check || weak(c);
}

class Findings {
 public:
  explicit Findings(const Report& report) {
    for (const ControlResult& c : report.controls)
      if (failed(c)) add(c, report.program);
    for (const CaseResult& c : report.cases)
      for (const CheckResult& check : c.checks)
        if (!lets_pass(check.verdict)) add(c, check, report.program);
  }
  std::string json() const { return list(rows_); }
  std::string left_out() const { return integer(left_out_); }

 private:
  void add(const CaseResult& c, const CheckResult& check, const std::string& program) {
    if (full()) return;
    const Finding* f = check.findings.empty() ? nullptr : &check.findings[0];
    const double ratio = f && f->numeric ? f->ratio : check.ratio;
    const std::string call =
        (c.replay.empty() ? "run " + c.line : c.replay.substr(0, c.replay.find(" --check "))) +
        " --check " + check.check;
    put({{"control", "false"},
         {"verdict", json_text(name(check.verdict))},
         {"family", brief(c.family)},
         {"contract", brief(c.contract)},
         {"check", brief(check.check)},
         {"lane", brief(c.lane)},
         {"line", brief(c.line)},
         {"ratio", is_numeric(check) ? number(ratio) : "null"},
         {"replay", brief(call)}},
        block_about(c, check, program));
  }
  void add(const ControlResult& c, const std::string& program) {
    if (full()) return;
    put({{"control", "true"},
         {"verdict", json_text(weak(c) ? "weak" : name(c.outcome))},
         {"check", brief(c.name + ", due: " + c.expected_check)},
         {"line", brief(c.witness)},
         {"replay", brief(c.replay)}},
        block(c, program));
  }
  bool full() {
    if (rows_.size() < most_findings) return false;
    ++left_out_;
    return true;
  }
  void put(std::vector<std::pair<std::string, std::string>> members, const std::string& told) {
    const std::string shown = cut(printable(told), most_block);
    characters_ += shown.size();
    if (characters_ <= most_blocks) members.emplace_back("block", json_text(shown));
    rows_.push_back(object(members));
  }

  std::vector<std::string> rows_;
  size_t characters_ = 0;
  int64_t left_out_ = 0;
};

// ---- controls x checks

struct Cell {
  double margin = INFINITY;
  bool exact = true;
  int64_t runs = 0;
};

struct Row {
  std::string family, name, imitates;
  bool is_operator = false;
  int64_t runs = 0, caught = 0, equivalent = 0, lost = 0;
  std::map<std::string, Cell> cells;
  Names also, unseen;
};

std::vector<std::string> words_of(const std::string& comma_list) {
  std::vector<std::string> words;
  std::istringstream in(comma_list);
  for (std::string word; std::getline(in, word, ',');)
    if (!word.empty()) words.push_back(word);
  return words;
}

void add(Row& row, const ControlResult& c) {
  ++row.runs;
  row.caught += c.outcome == ControlResult::caught;
  row.equivalent += c.outcome == ControlResult::equivalent;
  row.lost += failed(c);
  for (const Catch& seen : c.catches) {
    Cell& cell = row.cells[seen.check];
    ++cell.runs;
    cell.exact = cell.exact && seen.exact;
    if (!seen.exact && !(seen.margin >= cell.margin)) cell.margin = seen.margin;
  }
  if (c.outcome == ControlResult::equivalent || c.outcome == ControlResult::unjudged ||
      c.outcome == ControlResult::unproven)
    return;
  for (const std::string& check : words_of(c.caught_by)) row.also(check);
  if (c.outcome == ControlResult::caught) return;
  const std::vector<std::string> fired = words_of(c.caught_by);
  for (const std::string& check : words_of(c.expected_check))
    if (std::find(fired.begin(), fired.end(), check) == fired.end()) row.unseen(check);
}

std::vector<Row> rows_of(const Report& report) {
  std::vector<Row> rows;
  std::map<std::tuple<std::string, bool, std::string>, size_t> known;
  for (const ControlResult& c : report.controls) {
    const bool is_operator = !c.kind.empty();
    const std::string& name = is_operator ? c.kind : c.name;
    const auto [at, fresh] = known.try_emplace({c.family, is_operator, name}, rows.size());
    if (fresh) {
      Row& row = rows.emplace_back();
      row.family = c.family, row.name = name, row.is_operator = is_operator;
      if (!is_operator) row.imitates = c.imitates;
    }
    add(rows[at->second], c);
  }
  // What was not caught first, then named ones, then operators; families as they came.
  Names families;
  for (const Row& row : rows) families(row.family);
  std::stable_sort(rows.begin(), rows.end(), [&](const Row& a, const Row& b) {
    return std::tuple(families(a.family), a.lost == 0, a.is_operator) <
           std::tuple(families(b.family), b.lost == 0, b.is_operator);
  });
  return rows;
}

std::string json_of(const Row& row) {
  std::vector<std::pair<std::string, std::string>> cells;
  for (const auto& [check, cell] : row.cells)
    cells.emplace_back(check, object({{"margin", number(cell.margin)},
                                      {"exact", truth(cell.exact)},
                                      {"runs", integer(cell.runs)}}));
  return object({{"family", brief(row.family)},
                 {"name", brief(row.name)},
                 {"operator", truth(row.is_operator)},
                 {"imitates", brief(row.imitates)},
                 {"runs", integer(row.runs)},
                 {"caught", integer(row.caught)},
                 {"equivalent", integer(row.equivalent)},
                 {"lost", integer(row.lost)},
                 {"cells", object(cells)},
                 {"also", row.also.json()},
                 {"unseen", row.unseen.json()}});
}

std::string controls(const Report& report) {
  std::vector<std::string> rows;
  for (const Row& row : rows_of(report)) rows.push_back(json_of(row));
  return list(rows);
}

// ---- the rest

std::string families_json(const Report& report, const std::vector<Power>& power) {
  std::vector<std::string> rows;
  for (const Family& f : telling::families(report)) {
    const Counts& n = f.counts;
    double worst = 0;
    for (const Power& p : power)
      if (p.family == f.name) worst = std::max(worst, p.worst_healthy);
    rows.push_back(object({{"name", brief(f.name)},
                           {"contracts", integer(int64_t(f.contracts.size()))},
                           {"checks", integer(n.checks)},
                           {"not_passed", integer(n.checks - n.passed - n.skipped)},
                           {"caught", integer(n.caught)},
                           {"equivalent", integer(n.equivalent)},
                           {"worst", number(worst)},
                           {"margin", json_text(telling::margin(f))},
                           {"seconds", number(f.seconds)}}));
  }
  return list(rows);
}

std::string power_json(const std::vector<Power>& power) {
  std::vector<std::string> rows;
  for (const Power& p : power)
    rows.push_back(object({{"family", brief(p.family)},
                           {"check", brief(p.check)},
                           {"worst", number(p.worst_healthy)},
                           {"worst_line", brief(p.worst_line)},
                           {"weakest", brief(p.weakest)},
                           {"ratio", number(p.weakest.empty() ? 0 : p.ratio)},
                           {"margin", number(p.margin)}}));
  return list(rows);
}

std::string lanes_json(const Report& report) {
  std::vector<std::string> rows;
  for (const Lane& lane : report.lanes)
    rows.push_back(object({{"name", brief(lane.name)},
                           {"proven", truth(lane.proven)},
                           {"reason", brief(lane.reason)}}));
  return list(rows);
}

std::string summary(const Report& report) {
  const Counts n = counts(report);
  return object({{"cases", integer(n.cases)},
                 {"checks", integer(n.checks)},
                 {"passed", integer(n.passed)},
                 {"failed", integer(n.failed)},
                 {"vacuous", integer(n.vacuous)},
                 {"skipped", integer(n.skipped)},
                 {"untested", integer(n.untested)},
                 {"hung", integer(n.hung)},
                 {"crashed", integer(n.crashed)},
                 {"controls", integer(n.controls)},
                 {"controls_caught", integer(n.caught)},
                 {"controls_escaped", integer(n.escaped)},
                 {"controls_wrong_check", integer(n.wrong_check)},
                 {"controls_equivalent", integer(n.equivalent)},
                 {"controls_unjudged", integer(n.unjudged)},
                 {"controls_unproven", integer(n.unproven)},
                 {"controls_weak", integer(n.weak)},
                 {"wall_seconds", number(report.wall_seconds)}});
}

std::string facts(const Report& report) {
  std::vector<std::string> rows, versions, places;
  for (const auto& [what, version] : report.versions) versions.push_back(what + " " + version);
  for (const auto& [rank, place] : report.placement) places.push_back(rank + " on " + place);
  const SelfResult& self = report.self;
  std::vector<std::pair<std::string, std::string>> all = {
      {"judge", self.planted == 0 ? ""
                                  : number_of(self.planted, "fault") + " planted in it, " +
                                        std::to_string(self.named) + " named"},
      {"missed", joined(self.failures, "; ")},
      {"versions", joined(versions)},
      {"ranks", joined(places)},
      {"required", joined(report.required)},
      {"not due", joined(telling::not_due(report), "; ")},
      {"left out", telling::left_out(report)}};
  for (const auto& [name, told] : all) rows.push_back(list({json_text(name), brief(told)}));
  return list(rows);
}

std::string checks_json(const Report& report) {
  Names names;
  for (const CaseResult& c : report.cases)
    for (const CheckResult& check : c.checks) names(check.check);
  for (const ControlResult& c : report.controls) {
    for (const std::string& check : words_of(c.expected_check)) names(check);
    for (const std::string& check : words_of(c.caught_by)) names(check);
  }
  return names.json();
}

}  // namespace

std::string page_around(const std::string& json) {
  constexpr std::string_view place = "/*data*/";
  const std::string_view page = page_template;
  const size_t at = page.find(place);
  return std::string(page.substr(0, at)) + json_write::in_script(json) +
         std::string(page.substr(at + place.size()));
}

std::string index_html(const Report& report) {
  const Ending end = telling::ending(report);
  const Findings findings(report);
  const std::vector<Power> power = power_of(report);
  return page_around(object({{"kind", json_text("gate")},
                             {"word", json_text(end.word)},
                             {"sentence", brief(end.sentence)},
                             {"complete", truth(report.complete)},
                             {"command", brief(report.command)},
                             {"program", brief(report.program)},
                             {"summary", summary(report)},
                             {"failing", findings.json()},
                             {"failing_left_out", findings.left_out()},
                             {"passing", passing(report)},
                             {"families", families_json(report, power)},
                             {"power", power_json(power)},
                             {"checks", checks_json(report)},
                             {"controls", controls(report)},
                             {"lanes", lanes_json(report)},
                             {"facts", facts(report)}}));
}

}  // namespace shardproof
