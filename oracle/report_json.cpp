// report.json: everything that a run saw, for programs. One entry a line, so that grep and diff
// work.
//
// Schema 1. Fields are added without notice; one that goes or changes its meaning raises `schema`.
//   Numbers that JSON cannot hold are the strings "inf", "-inf" and "nan" (Python's float() takes
//   both forms). null: there is no such number (no ratio in a check that compares no values, no
//   rank).
//
//   schema complete verdict exit_code reasons   verdict: passed | failed | no judgement; reasons:
//   why none command program versions placement          placement: rank, host, device lanes name,
//   proven, reason, required summary                                     cases are case lines;
//   checks and the seven verdicts
//                                               count checks, one for each check due on each case;
//                                               controls are broken runs
//   self not_due
//   power      one entry for each check of a family: state (seen | exact | LOW | BLIND | no
//   control)
//     passed worst_healthy worst_line exact (healthy runs) caught weakest witness ratio margin
//     escaped (broken ones) cannot_see
//   cases      one entry for each check on each case:
//     line (canonical) short family contract lane check verdict
//     ratio (error / bound, worst element) bound exact (the bound was 0) compared wrong
//     rank (of the worst element) ranks (on which it is wrong) holders (of these, of the worst
//     element; where known) index (global) where tensor got want
//     pattern message means note findings (how many) state (hung or crashed: a line a rank)
//     steady (failed again in every rerun; null: not rerun) calls bytes (of one forward and
//     backward, payloads, all ranks together) seconds (of the whole case) replay
//   controls   one entry for each broken run:
//     line (canonical, the witness) short control kind (operator; null: a named control) family
//     contract lane check = expected_check   verdict: of that check on the broken run, "failed"
//     where it was caught, null where that says nothing outcome (caught | escaped | wrong_check |
//     equivalent | unjudged | unproven) caught_by reason imitates ratio bound exact margin ("inf"
//     where exact: any error is infinitely far above the bound) rank index where seconds replay
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <system_error>

#include "oracle/case.hpp"
#include "oracle/comm/door.hpp"
#include "oracle/interrupt.hpp"
#include "oracle/joined.hpp"
#include "oracle/power.hpp"
#include "oracle/report.hpp"
#include "oracle/report_page.hpp"
#include "oracle/report_parts.hpp"
#include "oracle/report_read.hpp"

namespace shardproof {

using namespace telling;
using nlohmann::ordered_json;

namespace {

ordered_json number_or_word(double x) {
  if (std::isnan(x)) return "nan";
  if (std::isinf(x)) return x > 0 ? "inf" : "-inf";
  return x;
}

ordered_json number_if(bool known, double x) { return known ? number_or_word(x) : ordered_json(); }
ordered_json rank_if_known(int rank) { return rank < 0 ? ordered_json() : ordered_json(rank); }
ordered_json number_if_counted(int64_t n) { return n < 0 ? ordered_json() : ordered_json(n); }
ordered_json text_if_any(const std::string& text) {
  return text.empty() ? ordered_json() : ordered_json(text);
}

// Bytes that are not UTF-8 (a subject may throw anything) become U+FFFD.
std::string dump(const ordered_json& j) {
  return j.dump(-1, ' ', false, ordered_json::error_handler_t::replace);
}

ordered_json entry(const CaseResult& c, const CheckResult& check) {
  const bool numeric = is_numeric(check);
  const Finding* f = check.findings.empty() ? nullptr : &check.findings[0];
  const bool numbers = f && f->numeric;
  ordered_json j;
  j["line"] = c.canonical.empty() ? c.line : c.canonical;
  j["short"] = c.line;
  j["family"] = c.family;
  j["contract"] = c.contract;
  j["lane"] = c.lane;
  j["check"] = check.check;
  j["verdict"] = name(check.verdict);
  j["ratio"] = number_if(numeric, numbers ? f->ratio : check.ratio);
  j["bound"] = number_if(numeric, numbers ? f->bound : check.bound);
  j["exact"] = check.exact;
  j["compared"] = check.compared;
  j["wrong"] = f ? f->wrong : 0;
  j["rank"] = rank_if_known(f ? f->rank : check.rank);
  j["ranks"] = f ? f->ranks : std::vector<int>{};
  if (f && !f->holders.empty()) j["holders"] = f->holders;
  j["index"] = f ? f->index : check.index;
  j["where"] = text_if_any(f ? f->where : check.where);
  if (f) {
    j["tensor"] = f->tensor;
    j["got"] = number_if(numbers, f->got);
    j["want"] = number_if(numbers, f->want);
    j["pattern"] = text_if_any(f->pattern);
    j["message"] = text_if_any(f->message);
    j["means"] = text_if_any(f->means);
    j["findings"] = check.findings.size();
  }
  if (!check.note.empty()) j["note"] = check.note;
  if (check.verdict == Verdict::hung || check.verdict == Verdict::crashed) j["state"] = c.state;
  if (c.steady_known) j["steady"] = c.steady;
  j["calls"] = number_if_counted(c.calls);
  j["bytes"] = number_if_counted(c.bytes);
  j["seconds"] = c.seconds;
  j["replay"] = c.replay;
  return j;
}

ordered_json entry(const ControlResult& c) {
  const bool caught = c.outcome == ControlResult::caught;
  ordered_json j;
  j["line"] = c.canonical.empty() ? c.witness : c.canonical;
  j["short"] = c.witness;
  j["control"] = c.name;
  j["kind"] = text_if_any(c.kind);
  j["family"] = c.family;
  j["contract"] = c.contract;
  j["lane"] = c.lane;
  j["check"] = c.expected_check;
  j["expected_check"] = c.expected_check;
  const bool unseen = c.outcome == ControlResult::unjudged || c.outcome == ControlResult::unproven;
  j["verdict"] =
      unseen ? ordered_json() : ordered_json(name(caught ? Verdict::failed : Verdict::passed));
  j["outcome"] = name(c.outcome);
  j["caught_by"] = text_if_any(c.caught_by);
  j["reason"] = text_if_any(c.reason);
  j["imitates"] = text_if_any(c.imitates);
  j["ratio"] = number_if(caught || c.ratio != 0, c.ratio);
  j["bound"] = number_if(caught || c.ratio != 0, c.bound);
  j["exact"] = c.exact;
  j["margin"] = number_if(caught, c.exact ? INFINITY : c.margin);
  j["rank"] = rank_if_known(c.rank);
  j["index"] = c.index;
  j["where"] = text_if_any(c.where);
  j["seconds"] = c.seconds;
  j["replay"] = c.replay;
  return j;
}

ordered_json summary_of(const Report& report) {
  const Counts n = counts(report);
  const Worst worst = worst_healthy(report);
  return {{"cases", n.cases},
          {"checks", n.checks},
          {"passed", n.passed},
          {"failed", n.failed},
          {"vacuous", n.vacuous},
          {"skipped", n.skipped},
          {"untested", n.untested},
          {"hung", n.hung},
          {"crashed", n.crashed},
          {"controls", n.controls},
          {"controls_caught", n.caught},
          {"controls_escaped", n.escaped},
          {"controls_wrong_check", n.wrong_check},
          {"controls_equivalent", n.equivalent},
          {"controls_unjudged", n.unjudged},
          {"controls_unproven", n.unproven},
          {"controls_weak", n.weak},
          {"worst_healthy_ratio", number_or_word(worst.ratio)},
          {"worst_healthy_line", worst.on ? ordered_json(worst.on->canonical) : ordered_json()},
          {"wall_seconds", report.wall_seconds}};
}

bool is_required(const Report& report, const std::string& lane) {
  for (const std::string& required : report.required)
    if (lane == required || lane.starts_with(required + ".")) return true;
  return false;
}

ordered_json lanes_of(const Report& report) {
  ordered_json all = ordered_json::array();
  for (const Lane& lane : report.lanes)
    all.push_back({{"name", lane.name},
                   {"proven", lane.proven},
                   {"reason", text_if_any(lane.reason)},
                   {"required", is_required(report, lane.name)}});
  return all;
}

ordered_json integer_or_text(const std::string& text) {
  const bool digits =
      !text.empty() && text.size() < 9 && text.find_first_not_of("0123456789") == text.npos;
  return digits ? ordered_json(std::stoi(text)) : ordered_json(text);
}

// "host:cuda0" -> host, device.
ordered_json placement_of(const Report& report) {
  ordered_json all = ordered_json::array();
  for (const auto& [rank, place] : report.placement) {
    const size_t colon = place.find(':');
    all.push_back({{"rank", integer_or_text(rank)},
                   {"host", place.substr(0, colon)},
                   {"device", colon == std::string::npos ? ordered_json()
                                                         : ordered_json(place.substr(colon + 1))}});
  }
  return all;
}

// An interrupted run ends with 130 whatever it had judged by then.
std::string verdict_of(int code) {
  if (code == 130) return "interrupted";
  return code == 0 ? "passed" : code == 1 ? "failed" : "no judgement";
}

ordered_json head_of(const Report& report) {
  const int code = interrupted() ? 130 : exit_code(report);
  ordered_json j;
  j["schema"] = report_schema;
  j["complete"] = report.complete;
  j["verdict"] = verdict_of(code);
  j["exit_code"] = code;
  j["reasons"] = no_judgement(report);
  if (!report.complete && counts(report).blamed() > 0) j["reasons"].push_back(unfinished(report));
  j["command"] = report.command;
  j["program"] = report.program;
  j["versions"] = report.versions;
  j["placement"] = placement_of(report);
  j["lanes"] = lanes_of(report);
  j["summary"] = summary_of(report);
  j["self"] = {{"planted", report.self.planted},
               {"named", report.self.named},
               {"failures", report.self.failures},
               {"seconds", report.self.seconds}};
  j["not_due"] = not_due(report);
  j["left_out"] = report.left_out;
  return j;
}

ordered_json entry(const Power& p) {
  const bool bounded = !p.weakest.empty();
  return {{"family", p.family},
          {"check", p.check},
          {"state", p.state()},
          {"passed", p.passed},
          {"worst_healthy", number_if(p.passed > 0, p.worst_healthy)},
          {"worst_line", text_if_any(p.worst_line)},
          {"exact", p.exact},
          {"caught", p.caught},
          {"weakest", text_if_any(p.weakest)},
          {"witness", text_if_any(p.witness)},
          {"ratio", number_if(bounded, p.ratio)},
          {"margin", number_if(bounded || p.caught > 0, bounded ? p.margin : INFINITY)},
          {"escaped", p.escaped},
          {"cannot_see", text_if_any(blind_to(p.check))}};
}

std::string array_of_lines(const std::vector<std::string>& entries) {
  return entries.empty() ? "[]" : "[\n  " + joined(entries, ",\n  ") + "\n ]";
}

}  // namespace

std::string report_json(const Report& report) {
  std::vector<std::string> cases, controls, power;
  for (const CaseResult& c : report.cases)
    for (const CheckResult& check : c.checks) cases.push_back(dump(entry(c, check)));
  for (const ControlResult& c : report.controls) controls.push_back(dump(entry(c)));
  for (const Power& p : power_of(report)) power.push_back(dump(entry(p)));
  std::string text = "{\n";
  const ordered_json head = head_of(report);
  for (const auto& [key, value] : head.items()) text += " \"" + key + "\": " + dump(value) + ",\n";
  text += " \"power\": " + array_of_lines(power) + ",\n";
  text += " \"cases\": " + array_of_lines(cases) + ",\n";
  return text + " \"controls\": " + array_of_lines(controls) + "\n}\n";
}

namespace fs = std::filesystem;

// To a temporary name, then renamed: a reader never meets half a file under the final name.
void write_whole(const std::string& folder, const std::string& name, const std::string& text) {
  const fs::path path = fs::path(folder) / name;
  fs::path temporary = path;
  temporary += ".part" + std::to_string(getpid());
  errno = 0;
  std::ofstream out(temporary, std::ios::binary);
  out << text;
  out.close();
  std::error_code error(out ? 0 : errno ? errno : EIO, std::generic_category());
  if (!error) fs::rename(temporary, path, error);
  if (!error) return;
  std::error_code ignored;
  fs::remove(temporary, ignored);
  throw Infrastructure("expected to write " + path.string() + ", met " + error.message() +
                       "; the verdict above holds, run again with another --report folder");
}

namespace {

// Why nothing can be written into a folder that is there; "" where it can.
std::string unwritable(const fs::path& folder) {
  std::error_code error;
  if (!fs::is_directory(folder, error)) return "a file of that name";
  if (access(folder.c_str(), W_OK | X_OK) == 0) return "";
  return std::error_code(errno, std::generic_category()).message();
}

void refuse_folder(const std::string& folder, const std::string& option, const std::string& met) {
  if (met.empty()) return;
  throw BadInput(option + ": expected a folder that can be written, met " + folder + " (" + met +
                 "); name another folder");
}

}  // namespace

void refuse_unwritable(const std::string& folder, const std::string& option) {
  if (folder.empty()) return;
  std::error_code error;
  const fs::path asked = fs::absolute(folder, error);
  fs::path there = asked;
  while (!fs::exists(there, error) && there.has_relative_path()) there = there.parent_path();
  const std::string met = unwritable(there);
  refuse_folder(folder, option, there != asked && !met.empty() ? there.string() + ": " + met : met);
}

void check_report_folder(const std::string& folder, const std::string& option) {
  std::error_code error;
  fs::create_directories(folder, error);
  refuse_folder(folder, option, error ? error.message() : unwritable(folder));
}

void write_report(const Report& report, const std::string& folder) {
  const InterruptsHeld held;  // the files of a folder are of one run
  std::error_code error;
  fs::create_directories(folder, error);
  write_whole(folder, "report.json", report_json(report));
  write_whole(folder, "junit.xml", junit_xml(report));
  write_whole(folder, "summary.md", summary_markdown(report));
  write_whole(folder, "index.html", index_html(report));
}

std::vector<FailedLine> failed_lines(const std::string& folder, bool* complete) {
  const EarlierReport report = read_report(folder, "--failed");
  if (complete) *complete = report.complete;
  std::vector<FailedLine> lines;
  auto add = [&](const std::string& line, bool control) {
    if (std::none_of(lines.begin(), lines.end(), [&](auto& l) { return l.line == line; }))
      lines.push_back({line, control});
  };
  for (const EarlierCheck& c : report.checks)
    if (c.verdict != "passed" && c.verdict != "skipped") add(c.line, false);
  for (const EarlierControl& c : report.controls)
    if (c.outcome == "escaped" || c.outcome == "wrong_check" || c.weak()) add(c.line, true);
  return lines;
}

}  // namespace shardproof
