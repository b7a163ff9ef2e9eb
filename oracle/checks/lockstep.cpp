// S: do all members of a group make the same calls in the same order?
//
// Calls are compared before any payload moves, by the transport; what it saw comes back as the text
// of a released shot. Where it looked away (lockstep off, so that races are not hidden), the lists
// that the ranks recorded are compared here.
#include <fmt/format.h>

#include <limits>
#include <map>

#include "oracle/checks/judging.hpp"

namespace shardproof {
namespace {

const char* meaning(uint8_t cause) {
  switch (cause) {
    case Released::mismatch:
      return "ranks of one group make different calls; a library would hang here or return garbage";
    case Released::deadlock:
      return "every rank waits for another one: a call that some make and others do not, or in "
             "another order";
    case Released::peer_lost:
      return "a rank left while others wait for it";
    case Released::deadline:
      return "a call that did not end: its peers never made it, or compute for longer than its "
             "deadline, which a larger --deadline-scale tells";
    case Released::overdue:
      return "the case did not end in its time: calls that fit together, and ranks that compute "
             "between them";
    default:
      return "";
  }
}

// A rank that ended for a reason of its own explains why the others were released.
std::string meaning(const Evidence& e, int shot, uint8_t cause) {
  if (cause == Released::mismatch) return meaning(cause);
  std::vector<int> threw;
  for (int r = 0; r < int(e.ranks.size()); ++r)
    if (size_t(shot) < e.ranks[size_t(r)].shots.size() &&
        e.record(r, shot).status == ShotRecord::threw)
      threw.push_back(r);
  if (threw.empty()) return meaning(cause);
  return judging::ranks_text(threw, 0) + " threw; the others waited for " +
         (threw.size() == 1 ? "it" : "them");
}

void find_released(const Evidence& e, std::vector<Finding>& findings) {
  for (size_t s = 0; s < e.shots.size(); ++s)
    for (int r = 0; r < int(e.ranks.size()); ++r) {
      if (s >= e.ranks[size_t(r)].shots.size()) continue;
      const ShotRecord& record = e.record(r, int(s));
      if (record.status != ShotRecord::released) continue;
      const std::string message =
          fmt::format("in '{}': {}", e.shots[s].name, judging::why_released(record));
      auto known = std::find_if(findings.begin(), findings.end(),
                                [&](const Finding& f) { return f.message == message; });
      if (known != findings.end()) {
        known->ranks.push_back(r);
        continue;
      }
      Finding f;
      f.message = message;
      f.means = meaning(e, int(s), record.cause);
      f.rank = r;
      f.ranks = {r};
      f.overdue = record.cause == Released::overdue;
      f.ratio = std::numeric_limits<double>::infinity();
      findings.push_back(std::move(f));
    }
}

bool counts_agree(Op op) { return op != Op::all_to_all && op != Op::shift; }

bool same_call(const LedgerEntry& a, const LedgerEntry& b) {
  return a.op == b.op && a.reduce == b.reduce && a.dtype == b.dtype && a.hop == b.hop &&
         (a.count == b.count || !counts_agree(a.op));
}

// The calls of a rank on one group, in order.
using Calls = std::vector<const LedgerEntry*>;

std::optional<Finding> compare_calls(int first, const Calls& a, int other, const Calls& b) {
  const size_t n = std::min(a.size(), b.size());
  size_t i = 0;
  while (i < n && same_call(*a[i], *b[i])) ++i;
  if (i == a.size() && i == b.size()) return std::nullopt;
  const auto side = [&](int rank, const Calls& calls) {
    return fmt::format("rank {} made {}", rank,
                       i < calls.size() ? text(*calls[i]) : "no further call on this group");
  };
  Finding f;
  f.message = side(first, a) + "; " + side(other, b);
  f.means = meaning(Released::mismatch);
  f.rank = other;
  f.ranks = {first, other};
  f.ratio = std::numeric_limits<double>::infinity();
  return f;
}

// The base shot's recorded calls, group by group, against those of the group's lowest member. Each
// member has a list, which is empty where it made no call.
int64_t compare_lists(const Evidence& e, std::vector<Finding>& findings) {
  std::map<std::vector<int>, std::map<int, Calls>> groups;
  int64_t compared = 0;
  for (int r = 0; r < int(e.ranks.size()); ++r) {
    if (e.ranks[size_t(r)].shots.empty() || e.record(r, 0).status != ShotRecord::ok) return 0;
    for (const LedgerEntry& c : e.record(r, 0).ledger) {
      groups[c.members][r].push_back(&c);
      ++compared;
    }
  }
  for (auto& [members, by_rank] : groups) {
    for (const int member : members) by_rank[member];
    const auto& [first, calls] = *by_rank.begin();
    for (const auto& [rank, others] : by_rank)
      if (auto f = compare_calls(first, calls, rank, others)) findings.push_back(std::move(*f));
  }
  return compared;
}

CheckResult judge(const Evidence& e) {
  std::vector<Finding> findings;
  find_released(e, findings);
  int64_t compared = 0;
  if (findings.empty()) {
    if (auto f = judging::incomplete(e, "base")) return judging::conclude("lockstep", 0, {*f});
    // A subject that makes no call keeps step: each rank that ended its shots counts as heard.
    compared = int64_t(e.ranks.size()) + compare_lists(e, findings);
  }
  return judging::conclude("lockstep", compared, std::move(findings));
}

}  // namespace

Check lockstep_check() {
  return {
      .name = "lockstep",
      .letter = 'S',
      .asks = "do all members of a group make the same calls in the same order",
      .due = [](const Contract&, const Case& line, const Declared&) { return line.world() > 1; },
      .plan = nullptr,
      .judge = judge};
}

}  // namespace shardproof
