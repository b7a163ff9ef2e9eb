// Words for numbers and sums by family and lane: computed once, told in every form of the report.
#include "oracle/report_parts.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <string_view>

#include "oracle/checks/judging.hpp"
#include "oracle/joined.hpp"

namespace shardproof::telling {

std::string row(const std::string& label, const std::string& text, int width) {
  width = std::max(width, int(label.size()) + 1);
  std::string lines = fmt::format("{:<{}}", label, width);
  auto end_line = [&] { lines.erase(lines.find_last_not_of(' ') + 1); };
  const std::string shown = printable(text);
  const size_t end = shown.find_last_not_of(" \n") + 1;
  for (char c : std::string_view(shown).substr(0, end)) {
    if (c == '\n') {
      end_line();
      lines += '\n' + std::string(size_t(width), ' ');
    } else {
      lines += c;
    }
  }
  end_line();
  return lines + '\n';
}

std::string number(double x) { return judging::number(x, 6); }

std::string ratio(double x) {
  const double size = std::abs(x);
  if (!std::isfinite(x) || x == 0) return fmt::format("{:g}", x);
  if (size >= 1e5 || size < 1e-3) return fmt::format("{:.1e}", x);
  if (size >= 9.95) return fmt::format("{:.0f}", x);
  if (size >= 0.995) return fmt::format("{:.1f}", x);
  return fmt::format("{:.2g}", x);
}

std::string seconds(double s) {
  if (s < 0.0995) return fmt::format("{:.0f} ms", s * 1000);
  return s < 9.95 ? fmt::format("{:.1f} s", s) : fmt::format("{:.0f} s", s);
}

std::pair<std::string, std::string> distinguished(double got, double want) {
  auto whole = [](double x) { return std::abs(x) < 1e15 && x == std::floor(x); };
  if (whole(got) && whole(want)) return {fmt::format("{:.0f}", got), fmt::format("{:.0f}", want)};
  for (int digits = 6; digits < 17; digits += 3) {
    auto texts =
        std::pair(fmt::format("{:.{}g}", got, digits), fmt::format("{:.{}g}", want, digits));
    if (texts.first != texts.second) return texts;
  }
  return {fmt::format("{:.17g}", got), fmt::format("{:.17g}", want)};
}

std::string ranks(const std::vector<int>& given) {
  const std::set<int> sorted(given.begin(), given.end());
  return judging::ranks_text(std::vector<int>(sorted.begin(), sorted.end()), 0);
}

bool is_numeric(const CheckResult& c) {
  return c.exact || c.ratio != 0 || c.bound != 0 ||
         std::any_of(c.findings.begin(), c.findings.end(), [](auto& f) { return f.numeric; });
}

const CheckResult* headline(const CaseResult& c) {
  // Beside what failed there is only a case that was too slow for the checks behind it.
  for (Verdict v : {Verdict::crashed, Verdict::failed, Verdict::hung, Verdict::vacuous,
                    Verdict::untested, Verdict::skipped, Verdict::passed})
    for (const CheckResult& check : c.checks)
      if (check.verdict == v) return &check;
  return nullptr;
}

bool lets_pass(Verdict v) { return v == Verdict::passed || v == Verdict::skipped; }
bool lets_pass(const std::string& verdict) {
  return verdict == name(Verdict::passed) || verdict == name(Verdict::skipped);
}

namespace {

// `weakest`: of the controls that are caught by a margin, the one that proves least; a margin that
// is no number does.
void keep_weakest(const ControlResult*& weakest, const ControlResult& c) {
  if (c.outcome != ControlResult::caught || c.exact) return;
  if (!weakest || (!std::isnan(weakest->margin) && !(c.margin >= weakest->margin))) weakest = &c;
}

}  // namespace

std::vector<Family> families(const Report& report) {
  std::vector<Family> all;
  auto of = [&](const std::string& name) -> Family& {
    for (Family& f : all)
      if (f.name == name) return f;
    all.emplace_back().name = name;
    return all.back();
  };
  for (const CaseResult& c : report.cases) {
    Family& f = of(c.family);
    f.contracts.insert(c.contract);
    f.seconds += c.seconds;
    count(c, f.counts);
  }
  for (const ControlResult& c : report.controls) {
    Family& f = of(c.family);
    f.contracts.insert(c.contract);
    f.seconds += c.seconds;
    count(c, f.counts);
    keep_weakest(f.weakest, c);
  }
  return all;
}

std::string margin(const Family& f) {
  if (f.counts.caught == 0) return "";
  if (!f.weakest) return "exact";
  if (std::isinf(f.weakest->margin)) return "inf";  // healthy runs have no error at all
  return fmt::format("{} ({})", ratio(f.weakest->margin), f.weakest->name);
}

Worst worst_healthy(const Report& report) {
  Worst worst;
  for (const CaseResult& c : report.cases)
    for (const CheckResult& check : c.checks)
      if (check.verdict == Verdict::passed && check.ratio > worst.ratio) worst = {check.ratio, &c};
  return worst;
}

namespace {

// "mpi.np8" -> "mpi", 8. A lane without a rank count keeps its name and has 0.
std::pair<std::string, int> split_lane(const std::string& name) {
  const size_t at = name.rfind(".np");
  if (at == std::string::npos) return {name, 0};
  int ranks = 0;
  for (char c : name.substr(at + 3)) {
    if (c < '0' || c > '9') return {name, 0};
    ranks = ranks * 10 + (c - '0');
  }
  return {name.substr(0, at), ranks};
}

struct Transport {
  std::string name;
  std::set<int> proven;
  std::vector<std::pair<std::string, std::set<int>>> missing;  // by reason

  void add(const Lane& lane, int np) {
    if (lane.proven) {
      proven.insert(np);
      return;
    }
    for (auto& [reason, counts] : missing)
      if (reason == lane.reason) {
        counts.insert(np);
        return;
      }
    missing.push_back({lane.reason, {np}});
  }
  bool lacks_all_for_one_reason() const { return proven.empty() && missing.size() == 1; }
};

std::string counts_text(const std::set<int>& counts) {
  std::string text;
  for (int n : counts)
    if (n > 0) text += fmt::format(" {}", n);
  return text;
}

std::string not_proven(const std::string& reason) {
  return reason.empty() ? " NOT PROVEN" : " NOT PROVEN (" + reason + ")";
}

std::vector<Transport> transports(const Report& report) {
  std::vector<Transport> all;
  for (const Lane& lane : report.lanes) {
    const auto [name, np] = split_lane(lane.name);
    auto known = std::find_if(all.begin(), all.end(), [&](auto& t) { return t.name == name; });
    if (known == all.end()) {
      all.emplace_back().name = name;
      known = all.end() - 1;
    }
    known->add(lane, np);
  }
  return all;
}

}  // namespace

std::vector<std::string> lanes(const Report& report) {
  std::vector<std::string> phrases;
  std::vector<std::pair<std::string, std::vector<std::string>>> absent;  // reason -> transports
  for (const Transport& t : transports(report)) {
    if (t.lacks_all_for_one_reason()) {
      const std::string& reason = t.missing[0].first;
      auto same =
          std::find_if(absent.begin(), absent.end(), [&](auto& a) { return a.first == reason; });
      if (same == absent.end()) same = absent.insert(absent.end(), {reason, {}});
      same->second.push_back(t.name);
      continue;
    }
    std::string phrase = t.name + counts_text(t.proven) + (t.proven.empty() ? "" : " proven");
    for (const auto& [reason, counts] : t.missing)
      phrase += (phrase == t.name ? "" : ",") + counts_text(counts) + not_proven(reason);
    phrases.push_back(phrase);
  }
  for (const auto& [reason, names] : absent) phrases.push_back(joined(names) + not_proven(reason));
  return phrases;
}

namespace {

// "linear_row: gradient, accumulate" -> of linear_row, two things.
struct NotDue {
  std::string of;
  std::vector<std::pair<std::string, int>> what;  // how often

  void add(const std::string& text) {
    auto known = std::find_if(what.begin(), what.end(), [&](auto& w) { return w.first == text; });
    if (known == what.end())
      what.push_back({text, 1});
    else
      known->second++;
  }

  // Things that are not due equally often share their number.
  std::string text() const {
    std::vector<std::string> parts;
    std::vector<int> told;
    for (const auto& [first, times] : what) {
      if (std::find(told.begin(), told.end(), times) != told.end()) continue;
      told.push_back(times);
      std::vector<std::string> alike;
      for (const auto& [other, as_often] : what)
        if (as_often == times) alike.push_back(other);
      parts.push_back(joined(alike) + (times == 1 ? "" : fmt::format(" ({} times)", times)));
    }
    return of + ": " + joined(parts);
  }
};

}  // namespace

std::vector<std::string> not_due(const Report& report) {
  std::vector<NotDue> all;
  for (const std::string& text : report.not_due) {
    const size_t colon = std::min(text.find(": "), text.size());
    const std::string of = text.substr(0, colon);
    auto known = std::find_if(all.begin(), all.end(), [&](auto& n) { return n.of == of; });
    if (known == all.end()) known = all.insert(all.end(), {of, {}});
    std::string rest = text.substr(std::min(colon + 2, text.size()));
    for (size_t at = 0; at < rest.size();) {
      const size_t end = std::min(rest.find(", ", at), rest.size());
      known->add(rest.substr(at, end - at));
      at = end + 2;
    }
  }
  std::vector<std::string> texts;
  for (const NotDue& n : all) texts.push_back(n.text());
  return texts;
}

std::string left_out(const Report& report) {
  const std::vector<std::string>& lines = report.left_out;
  if (lines.empty()) return "";
  const size_t shown = lines.size() <= 4 ? lines.size() : 3;
  std::string text = fmt::format("{}: {}", number_of(int64_t(lines.size()), "line"),
                                 joined(std::span(lines).first(shown)));
  if (lines.size() > shown) text += fmt::format(" and {} more", lines.size() - shown);
  return text;
}

std::vector<std::string> control_columns() {
  return {"outcome", "control", "expected", "caught by", "ratio", "margin", "imitates", "witness"};
}
bool is_number_column(size_t i) { return i == 4 || i == 5; }

namespace {

bool failed(const ControlResult& c) {
  return c.outcome == ControlResult::escaped || c.outcome == ControlResult::wrong_check || weak(c);
}

std::string outcome_text(const ControlResult& c) {
  if (weak(c)) return "WEAK";
  if (c.outcome == ControlResult::escaped) return "ESCAPED";
  if (c.outcome == ControlResult::wrong_check) return "WRONG CHECK";
  const bool excused = c.outcome == ControlResult::equivalent ||
                       c.outcome == ControlResult::unjudged || c.outcome == ControlResult::unproven;
  if (excused && !c.reason.empty()) return fmt::format("{}: {}", name(c.outcome), c.reason);
  return name(c.outcome);
}

std::vector<std::string> control_row(const ControlResult& c) {
  const bool caught = c.outcome == ControlResult::caught;
  const std::string& by =
      c.caught_by.empty() && c.outcome == ControlResult::wrong_check ? c.reason : c.caught_by;
  return {outcome_text(c),
          c.name,
          c.expected_check,
          by,
          caught && c.ratio != 0 ? ratio(c.ratio) : "",
          !caught   ? ""
          : c.exact ? "exact"
                    : ratio(c.margin),
          c.imitates,
          c.witness};
}

// One operator on one family: how many sites it broke, and the weakest of them.
struct Broken {
  std::string family, name;
  Counts counts;
  const ControlResult* weakest = nullptr;
};

std::vector<Broken> operators(const Report& report) {
  std::vector<Broken> all;
  for (const ControlResult& c : report.controls) {
    if (c.kind.empty()) continue;
    auto known = std::find_if(all.begin(), all.end(),
                              [&](auto& b) { return b.family == c.family && b.name == c.kind; });
    if (known == all.end()) known = all.insert(all.end(), {c.family, c.kind, {}, nullptr});
    count(c, known->counts);
    keep_weakest(known->weakest, c);
  }
  return all;
}

std::vector<std::string> operator_row(const Broken& b) {
  const Counts& n = b.counts;
  const std::string unjudged = n.unjudged > 0 ? fmt::format(", {} unjudged", n.unjudged) : "";
  return {fmt::format("{} caught, {} equivalent{}", n.caught, n.equivalent, unjudged),
          fmt::format("operator {} on {}", b.name, b.family),
          "",
          "",
          b.weakest ? ratio(b.weakest->ratio) : "",
          b.weakest      ? ratio(b.weakest->margin)
          : n.caught > 0 ? "exact"
                         : "",
          "",
          number_of(n.controls, "run")};
}

}  // namespace

std::vector<std::vector<std::string>> control_rows(const Report& report) {
  std::vector<std::vector<std::string>> rows;
  for (const ControlResult& c : report.controls)
    if (failed(c)) rows.push_back(control_row(c));
  for (const ControlResult& c : report.controls)
    if (!failed(c) && c.kind.empty()) rows.push_back(control_row(c));
  for (const Broken& b : operators(report)) rows.push_back(operator_row(b));
  return rows;
}

namespace {

std::string tally(const Counts& n) {
  std::vector<std::string> parts;
  for (auto [number, word] : {std::pair(n.failed, "failed"),
                              {n.hung, "hung"},
                              {n.crashed, "crashed"},
                              {n.vacuous, "vacuous"},
                              {n.untested, "untested"}})
    if (number > 0) parts.push_back(fmt::format("{} {}", number, word));
  parts.push_back(fmt::format("{} skipped", n.skipped));
  return joined(parts);
}

int64_t blamed_cases(const Report& report) {
  return std::count_if(report.cases.begin(), report.cases.end(), [](const CaseResult& c) {
    Counts n;
    count(c, n);
    return n.blamed() > 0;
  });
}

std::string worst_text(const Report& report) {
  const Worst worst = worst_healthy(report);
  if (!worst.on) return "every value exact";
  return fmt::format("worst healthy ratio {} ({})", ratio(worst.ratio), worst.on->line);
}

}  // namespace

Ending ending(const Report& report) {
  const Counts n = counts(report);
  const std::vector<std::string> why = no_judgement(report);
  if (!why.empty()) {
    std::string sentence = joined(why, "; ");
    if (n.blamed() > 0)
      sentence += fmt::format("; {} that did not pass blame{} nobody until then",
                              number_of(n.blamed(), "check"), n.blamed() == 1 ? "s" : "");
    return {"NO JUDGEMENT", sentence};
  }
  if (n.blamed() > 0)
    return {"FAILED", fmt::format("{}: {}; in {} of {}{}", number_of(n.checks, "check"), tally(n),
                                  blamed_cases(report), number_of(n.cases, "case"),
                                  report.complete ? "" : "; " + unfinished(report))};
  if (n.checks == 0)
    return {"PASSED",
            fmt::format("no check of a subject was selected; of {} {} caught, {} equivalent",
                        number_of(n.controls, "control"), n.caught, n.equivalent)};
  return {"PASSED",
          fmt::format("{}, {}, {}", number_of(n.checks, "check"), tally(n), worst_text(report))};
}

}  // namespace shardproof::telling
