// Two reports side by side.
#include "oracle/report_diff.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "oracle/joined.hpp"
#include "oracle/report_parts.hpp"
#include "oracle/verdict.hpp"

namespace shardproof {

namespace {

using telling::lets_pass;

constexpr const char* not_there = "not there";
constexpr double much = 3;  // a ratio that grew by less is noise

using Key = std::pair<std::string, std::string>;  // line, check or control

// The worse of two entries of one key: a report may hold a line twice.
int badness(const EarlierCheck& c) {
  return c.verdict == "passed" ? 0 : c.verdict == "skipped" ? 1 : 2;
}
int badness(const EarlierControl& c) {
  if (c.outcome == "caught") return c.weak() ? 2 : 0;
  return c.outcome == "equivalent" || c.outcome == "unproven" ? 1 : 3;
}
Key key_of(const EarlierCheck& c) { return {c.line, c.check}; }
Key key_of(const EarlierControl& c) { return {c.line, c.control}; }

template <class Entry>
std::map<Key, const Entry*> by_key(const std::vector<Entry>& entries) {
  std::map<Key, const Entry*> known;
  for (const Entry& e : entries) {
    const auto [at, fresh] = known.try_emplace(key_of(e), &e);
    if (!fresh && badness(e) > badness(*at->second)) at->second = &e;
  }
  return known;
}

std::string ratio_text(double x) { return telling::ratio(x); }

std::string margin_text(const EarlierControl& c) {
  return c.exact ? "exact" : c.margin ? ratio_text(*c.margin) : "none";
}

// How many times `before` goes into `after`: from an exact 0 to anything is infinitely much.
double growth(double before, double after) {
  if (std::isnan(before) || std::isnan(after) || after <= before) return 0;
  return after / before;
}

class Comparison {
 public:
  Comparison(const EarlierReport& before, const EarlierReport& after)
      : before_(before), after_(after) {
    diff_.old_path = before.path, diff_.new_path = after.path;
    diff_.old_verdict = before.verdict, diff_.new_verdict = after.verdict;
    diff_.old_complete = before.complete, diff_.new_complete = after.complete;
  }

  ReportDiff made() {
    checks();
    controls();
    lanes();
    whole();
    what_was_judged();
    for (auto* list : {&diff_.lost, &diff_.worse, &diff_.changed, &diff_.gained})
      std::stable_sort(list->begin(), list->end(), [](const Change& a, const Change& b) {
        return std::pair(order(a.what), -a.weight) < std::pair(order(b.what), -b.weight);
      });
    return std::move(diff_);
  }

 private:
  static int order(const std::string& what) {
    static const std::vector<std::string> kinds = {"run",  "verdict", "control", "margin",
                                                   "lane", "ratio",   "traffic"};
    return int(std::find(kinds.begin(), kinds.end(), what) - kinds.begin());
  }

  // Where a change goes that loses nothing.
  std::vector<Change>& better_or_other(const std::string& now) {
    return now == "passed" || now == "caught" || now == "equivalent" ? diff_.gained : diff_.changed;
  }

  // A run of other lines is another run, of which the lines that do not pass are told; but one that
  // is no judgement keeps nothing.
  void whole() {
    if (before_.verdict == after_.verdict) return;
    std::string now = after_.verdict;
    if (!after_.reasons.empty()) now += " (" + joined(after_.reasons, "; ") + ")";
    Change c{"run", "as a whole", before_.verdict, now, "", 0};
    const bool same = !diff_.only_old.any() && !diff_.only_new.any();
    if ((before_.verdict == "passed" && same) || after_.verdict == "no judgement")
      diff_.lost.push_back(c);
    else
      better_or_other(after_.verdict).push_back(c);
  }

  // What NEW did not judge is not kept: it ended early, or judged nothing that OLD did.
  void what_was_judged() {
    if (!after_.complete)
      diff_.lost.push_back({"run", "as a whole",
                            before_.complete ? "ran to its end" : "did not run to its end",
                            "did not run to its end", "", 0});
    if (diff_.checks == 0 && !before_.checks.empty())
      diff_.lost.push_back(
          {"run", "as a whole", number_of(diff_.only_old.checks, "check"), "none of these", "", 0});
  }

  void checks() {
    const auto old = by_key(before_.checks), now = by_key(after_.checks);
    std::set<std::string> told;  // lines whose traffic was compared
    for (const auto& [key, a] : old)
      if (const auto found = now.find(key); found != now.end()) {
        diff_.checks++;
        compare(*a, *found->second);
        if (told.insert(key.first).second) compare_traffic(*a, *found->second);
      }
    alone(old, now, diff_.only_old);
    alone(now, old, diff_.only_new);
    for (const auto& [key, b] : now)
      if (!old.contains(key) && !lets_pass(b->verdict))
        diff_.lost.push_back(
            {"verdict", b->shown + "   " + b->check, not_there, b->verdict, replay(b->replay), 0});
  }

  // Which of both, and how many lines they are.
  static void alone(const std::map<Key, const EarlierCheck*>& here,
                    const std::map<Key, const EarlierCheck*>& there, Alone& only) {
    std::set<std::string> lines;
    for (const auto& [key, check] : here) {
      if (there.contains(key)) continue;
      if (only.checks++ == 0) only.first_line = check->shown;
      if (check->verdict != "passed" && check->verdict != "skipped" && only.not_passed++ == 0)
        only.first_not_passed = check->shown;
      lines.insert(key.first);
    }
    only.lines = int64_t(lines.size());
  }

  void compare(const EarlierCheck& a, const EarlierCheck& b) {
    const std::string on = b.shown + "   " + b.check;
    if (a.verdict != b.verdict) {
      const Change c{"verdict", on, a.verdict, b.verdict, replay(b.replay), 0};
      const bool lost = (lets_pass(a.verdict) && !lets_pass(b.verdict)) ||
                        (a.verdict == "passed" && b.verdict == "skipped");
      (lost ? diff_.lost : better_or_other(b.verdict)).push_back(c);
      return;
    }
    if (a.verdict != "passed" || !a.ratio || !b.ratio) return;
    if (const double times = growth(*a.ratio, *b.ratio); times >= much)
      diff_.worse.push_back(
          {"ratio", on, ratio_text(*a.ratio), ratio_text(*b.ratio), replay(b.replay), *b.ratio});
  }

  void compare_traffic(const EarlierCheck& a, const EarlierCheck& b) {
    if (!a.calls || !b.calls || !a.bytes || !b.bytes) return;
    if (a.calls == b.calls && a.bytes == b.bytes) return;
    const auto text = [](const EarlierCheck& c) {
      return number_of(*c.calls, "call") + ", " + number_of(*c.bytes, "byte");
    };
    diff_.changed.push_back({"traffic", b.shown, text(a), text(b), replay(b.replay),
                             double(std::abs(*b.bytes - *a.bytes))});
  }

  void controls() {
    const auto old = by_key(before_.controls), now = by_key(after_.controls);
    for (const auto& [key, a] : old) {
      const auto found = now.find(key);
      if (found == now.end()) {
        diff_.only_old.controls++;
        continue;
      }
      diff_.controls++;
      compare(*a, *found->second);
    }
    for (const auto& [key, b] : now) {
      if (old.contains(key)) continue;
      diff_.only_new.controls++;
      // One that is unjudged says nothing: what fails by itself beside it is told.
      if (b->outcome == "escaped" || b->outcome == "wrong_check" || b->weak())
        diff_.lost.push_back({"control", b->control + " on " + b->shown, not_there,
                              b->weak() ? "margin " + margin_text(*b) : b->outcome,
                              replay(b->replay), 0});
    }
  }

  void compare(const EarlierControl& a, const EarlierControl& b) {
    const std::string on = b.control + " on " + b.shown;
    if (a.outcome != b.outcome) {
      const Change c{"control", on, a.outcome, b.outcome, replay(b.replay), 0};
      const bool lost = badness(b) > badness(a);
      (lost ? diff_.lost : better_or_other(b.outcome)).push_back(c);
      return;
    }
    if (a.outcome != "caught") return;
    const Change c{"margin", on, margin_text(a), margin_text(b), replay(b.replay), 0};
    if (b.weak() && !a.weak()) return diff_.lost.push_back(c);
    if (a.weak() && !b.weak()) return diff_.gained.push_back(c);
    if (a.exact || b.exact || !a.margin || !b.margin || std::isinf(*a.margin)) return;
    if (growth(*b.margin, *a.margin) >= much) {
      diff_.worse.push_back(c);
      diff_.worse.back().weight = -*b.margin;
    }
  }

  void lanes() {
    const auto find = [](const EarlierReport& r, const std::string& name) -> const EarlierLane* {
      for (const EarlierLane& l : r.lanes)
        if (l.name == name) return &l;
      return nullptr;
    };
    for (const EarlierLane& a : before_.lanes) {
      if (!a.proven) continue;
      if (const EarlierLane* b = find(after_, a.name))
        compare(a, *b);
      else if (const EarlierLane* all = find(after_, a.name.substr(0, a.name.find('.')));
               all && !was_not_asked_for(*all))
        compare(a, *all);
      else
        diff_.only_old.lanes.push_back(a.name);
    }
    for (const EarlierLane& b : after_.lanes) {
      if (!b.proven) continue;
      const EarlierLane* a = find(before_, b.name);
      if (!a)
        diff_.only_new.lanes.push_back(b.name);
      else if (!a->proven)
        diff_.gained.push_back({"lane", b.name, state(*a), state(b), "", 0});
    }
  }

  // A transport that this selection left out, against one that cannot be had any more.
  static bool was_not_asked_for(const EarlierLane& l) { return l.reason == "not asked for"; }

  static std::string state(const EarlierLane& l) {
    return l.proven ? "proven" : l.reason.empty() ? "not proven" : "not proven (" + l.reason + ")";
  }

  void compare(const EarlierLane& a, const EarlierLane& b) {
    if (!b.proven) diff_.lost.push_back({"lane", a.name, state(a), state(b), "", 0});
  }

  std::string replay(const std::string& call) const {
    return call.empty() ? "" : after_.program.empty() ? call : after_.program + " " + call;
  }

  const EarlierReport &before_, &after_;
  ReportDiff diff_;
};

}  // namespace

ReportDiff diff_reports(const EarlierReport& before, const EarlierReport& after) {
  return Comparison(before, after).made();
}

}  // namespace shardproof
