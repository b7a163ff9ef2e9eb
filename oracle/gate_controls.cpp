#include "oracle/gate_controls.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "oracle/joined.hpp"
#include "oracle/report_parts.hpp"
#include "oracle/words.hpp"

namespace shardproof::gating {
namespace {

bool fires(const CheckResult& c) {
  return c.verdict == Verdict::failed || c.verdict == Verdict::vacuous;
}

// The weakest of the expected findings decides the margin.
void fill_numbers(ControlResult& out, const CaseResult& broken, const CaseResult& healthy,
                  const std::vector<std::string>& expected) {
  out.exact = true;
  out.margin = std::numeric_limits<double>::infinity();
  for (const std::string& name : expected) {
    const CheckResult* c = result_of(broken, name);
    if (!c || c->findings.empty()) continue;
    const Finding& f = c->findings.front();
    if (out.rank < 0) {
      out.rank = f.rank;
      out.where = f.where;
      out.index = f.index;
      out.bound = f.bound;
      out.ratio = f.ratio;
    }
    const bool bounded = f.numeric && f.bound != 0;
    const CheckResult* h = result_of(healthy, name);
    const double base = h ? h->ratio : 0;
    const double margin =
        bounded && base > 0 ? f.ratio / base : std::numeric_limits<double>::infinity();
    out.catches.push_back({name, f.ratio, margin, !bounded});
    if (!bounded) continue;
    if (margin < out.margin) {
      out.margin = margin;
      out.ratio = f.ratio;
      out.bound = f.bound;
    }
    out.exact = false;
  }
}

// Another group of the size of the call's, or the world in its place: only a mesh of two axes has
// one.
bool needs_grid(const FaultOperator& op) {
  return op.kind == "wrong_group" || op.kind == "world_group";
}

template <class Counts>
bool same_where(const Judged& a, const Judged& b, const Counts& counts) {
  for (size_t r = 0; r < a.evidence.ranks.size(); ++r) {
    const auto &x = a.evidence.ranks[r].shots[0], &y = b.evidence.ranks[r].shots[0];
    if (x.status != y.status || x.results.size() != y.results.size()) return false;
    for (size_t i = 0; i < x.results.size(); ++i)
      if (counts(x.results[i]) && x.results[i].bytes != y.results[i].bytes) return false;
  }
  return true;
}

}  // namespace

bool same_results(const Judged& a, const Judged& b, bool gradient) {
  return same_where(a, b, [&](const ResultTensor& t) { return t.gradient == gradient; });
}
bool same_paired_gradients(const Judged& a, const Judged& b) {
  return same_where(a, b, [&](const ResultTensor& t) {
    return t.gradient && a.evidence.operands.at(size_t(t.operand)).linear;
  });
}

bool same_traces(const Judged& a, const Judged& b) {
  for (size_t r = 0; r < a.evidence.ranks.size(); ++r) {
    const auto &x = a.evidence.ranks[r].shots[0], &y = b.evidence.ranks[r].shots[0];
    if (!(x.ledger == y.ledger) || x.memory.size() != y.memory.size()) return false;
  }
  return true;
}

bool argument_written(const Judged& j) {
  for (const RankRecord& r : j.evidence.ranks)
    for (const ShotRecord& s : r.shots)
      for (const MemoryFinding& m : s.memory)
        if (m.what == "argument") return true;
  return false;
}

bool any_active(const Judged& j) {
  for (const RankRecord& r : j.evidence.ranks)
    for (const ShotRecord& s : r.shots)
      if (s.active) return true;
  return false;
}

const CheckResult* result_of(const CaseResult& result, const std::string& check) {
  for (const CheckResult& c : result.checks)
    if (c.check == check) return &c;
  return nullptr;
}

std::string firing(const CaseResult& result) {
  std::string list;
  for (const CheckResult& c : result.checks)
    if (!telling::lets_pass(c.verdict)) list += (list.empty() ? "" : ",") + c.check;
  return list;
}

bool lost_ranks(const CaseResult& result) {
  return std::any_of(result.checks.begin(), result.checks.end(), [](const CheckResult& c) {
    return c.verdict == Verdict::hung || c.verdict == Verdict::crashed;
  });
}

bool left_open(const CaseResult& result) {
  return std::any_of(result.checks.begin(), result.checks.end(),
                     [](const CheckResult& c) { return c.verdict == Verdict::untested; });
}

void conclude(ControlResult& out, const Judged& broken, const Judged& healthy,
              const Expectation& expected) {
  out.expected_check = joined(expected.checks, ",");
  out.caught_by = firing(broken.result);
  const std::string twin = firing(healthy.result);
  if (!twin.empty()) {
    out.outcome = ControlResult::unjudged;
    out.reason = left_open(healthy.result)
                     ? "the healthy twin could not be judged: " + healthy.result.checks.front().note
                     : "the healthy twin does not pass " + twin + " on the same case";
    return;
  }
  for (const CheckResult& c : broken.result.checks)
    if (!broken.completed && (c.verdict == Verdict::crashed || c.verdict == Verdict::hung)) {
      out.outcome = ControlResult::wrong_check;
      out.reason = fmt::format(
          "{}{}: a crash or a hang is not a catch; a kernel that sizes buffers or later calls by "
          "what a call returns has to test it first, and throw",
          name(c.verdict), c.findings.empty() ? "" : ", " + c.findings[0].message);
      return;
    }
  std::vector<std::string> quiet;
  for (const std::string& c : expected.checks) {
    const CheckResult* r = result_of(broken.result, c);
    if (!r || !fires(*r)) quiet.push_back(c);
  }
  if (!quiet.empty()) {
    out.outcome = out.caught_by.empty() ? ControlResult::escaped : ControlResult::wrong_check;
    out.reason = fmt::format("{} did not see it", joined(quiet, ", "));
    return;
  }
  for (const CheckResult& c : broken.result.checks)
    if (fires(c) && (contains(expected.silent, c.check) ||
                     (expected.alone && !contains(expected.checks, c.check)))) {
      out.outcome = ControlResult::wrong_check;
      out.reason = c.check + " fires and must be silent";
      return;
    }
  out.outcome = ControlResult::caught;
  fill_numbers(out, broken.result, healthy.result, expected.checks);
}

// ---- Operators

std::vector<Site> sites_of(const Judged& healthy) {
  std::vector<Site> sites;
  std::set<std::tuple<int, std::string, int>> seen;
  for (const RankRecord& r : healthy.evidence.ranks)
    for (const LedgerEntry& e : r.shots[0].ledger) {
      Site s{e.phase, e.label, e.number, e, int(e.members.size())};
      if (seen.insert(s.key()).second) sites.push_back(std::move(s));
    }
  return sites;
}

std::optional<Traffic> due_at(const Site& site, const Case& line, const Judged& healthy) {
  const Evidence& e = healthy.evidence;
  const int rank = site.call.members.front();
  const bool backward = site.phase == Phase::backward || site.phase == Phase::finish;
  const auto in_phase = [&](const LedgerEntry& c) {
    return backward == (c.phase == Phase::backward || c.phase == Phase::finish);
  };
  size_t before = 0;  // calls on the group in this phase
  for (const LedgerEntry& c : e.record(rank, 0).ledger) {
    if (c.label != site.axis || !in_phase(c)) continue;
    if (c.phase == site.phase && c.number == site.number) break;
    ++before;
  }
  if (!e.contract->traffic && !e.declared.traffic) return std::nullopt;
  for (const Traffic& t : traffic_due(*e.contract, e.declared, line, rank))
    if (t.backward == backward && t.label == site.axis && (t.rank < 0 || t.rank == rank) &&
        before-- == 0)
      return t;
  return std::nullopt;
}

bool applies(const FaultOperator& op, const Site& s, bool rounding, int world) {
  if (needs_grid(op) && s.p == world) return false;
  if (std::find(op.ops.begin(), op.ops.end(), s.call.op) == op.ops.end()) return false;
  if (!op.any_reduce &&
      std::find(op.reduces.begin(), op.reduces.end(), s.call.reduce) == op.reduces.end())
    return false;
  if (s.p < op.smallest_p) return false;
  if (op.needs_rounding && !rounding) return false;
  // On rounding data a flip of a low mantissa bit is within every bound: out of scope.
  return !(rounding && op.name == "bit_weight1");
}

bool stays_equal(const FaultOperator& op) { return !op.call && !op.one_rank; }

Expectation expectation(const FaultOperator& op, const Site& site, bool one_rank,
                        bool outputs_differ, bool gradients_differ, bool paired_differ) {
  Expectation e;
  if (op.name == "own_order") return {{"replica"}, {}, false};
  if (op.name == "arrival_order") return {{"repeat"}, {}, false};
  if (op.kind == "in_place") return {{"memory"}, {}, false};
  if (op.call && one_rank) return {{"lockstep"}, {}, false};
  if (op.call) e.checks.push_back("ledger");
  if (outputs_differ) e.checks.push_back("forward");
  const bool backward = site.phase == Phase::backward || site.phase == Phase::finish;
  if (gradients_differ && (backward || !outputs_differ)) e.checks.push_back("gradient");
  if (backward && gradients_differ && paired_differ && op.kind != "bit" && op.kind != "bf16_wire" &&
      !op.call)
    e.checks.push_back("adjoint");
  return e;
}

std::string Sites::key(const FaultOperator& op, const Site& site, bool one_rank) const {
  const std::string what = alike_ == kind ? op.kind
                                          : fmt::format("{} {} {} {}", op.name, name(site.phase),
                                                        name(site.call.op), name(site.call.reduce));
  return what + (one_rank ? " @rank" : "");
}

}  // namespace shardproof::gating
