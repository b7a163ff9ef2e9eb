// L: were exactly the due calls made, in order, on the right group, with the right payload?
//
// The contract gives the calls of a rank in closed form; the rank recorded those that it made. Both
// become lists of entries of one kind, which are compared call by call, forward and backward apart
// (a deferred finish belongs to the backward). Equal lists have equal logical and ring bytes: the
// bytes are printed, not judged a second time.
#include <fmt/format.h>

#include <limits>
#include <map>
#include <set>
#include <string>
#include <utility>

#include "oracle/checks/judging.hpp"
#include "oracle/joined.hpp"

namespace shardproof {
namespace {

using Calls = std::vector<LedgerEntry>;

bool in_phase(const LedgerEntry& c, bool backward) {
  return backward ? c.phase == Phase::backward || c.phase == Phase::finish
                  : c.phase == Phase::forward;
}

// "tp" or "rep,cp" -> its members through the rank; "world" -> all; "pp:ends" -> the first and the
// last of them. Empty for another part of a group ("tp/2"), whose members its label alone does not
// give.
std::vector<int> members_of(const std::string& label, const Mesh& mesh, int rank) {
  std::vector<int> members;
  if (label == "world") {
    for (int r = 0; r < mesh.world(); ++r) members.push_back(r);
    return members;
  }
  if (constexpr std::string_view ends = ":ends"; label.ends_with(ends)) {
    members = members_of(label.substr(0, label.size() - ends.size()), mesh, rank);
    if (members.size() > 2) members = {members.front(), members.back()};
    return members;
  }
  const auto axes = axes_of_label(label);
  return axes ? mesh.group(*axes, rank) : members;
}

// The entry that the due call leaves in the ledger of this rank.
LedgerEntry due_entry(const Traffic& t, const Mesh& mesh, int rank) {
  LedgerEntry c;
  c.op = t.op;
  c.reduce = t.reduce;
  c.dtype = t.dtype;
  c.count = t.count;
  c.hop = t.hop;
  c.label = t.label;
  c.members = members_of(t.label, mesh, rank);
  c.phase = t.backward ? Phase::backward : Phase::forward;
  if (t.op == Op::shift && !c.members.empty()) {
    const int p = int(c.members.size());
    int me = 0;
    while (c.members[size_t(me)] != rank) ++me;
    c.to = c.members[size_t(((me + t.hop) % p + p) % p)];
    c.from = c.members[size_t(((me - t.hop) % p + p) % p)];
  }
  return c;
}

// The first property in which a call is not the due one, and what that means; null where none.
struct Mistake {
  const char* what;
  const char* means;
};
std::optional<Mistake> mistake(const LedgerEntry& met, const LedgerEntry& due) {
  if (met.op != due.op)
    return Mistake{
        "operation",
        "another collective than the contract asks for; values may still be right, bytes are not"};
  if (met.label != due.label)
    return Mistake{"group", "a collective over another axis than the contract names"};
  if (!due.members.empty() && met.members != due.members)
    return Mistake{"members", "the group holds other ranks than the axis does"};
  if (met.reduce != due.reduce)
    return Mistake{"reduction", "a sum, a mean and a maximum differ in value"};
  if (met.dtype != due.dtype) return Mistake{"dtype", "the payload travels in another precision"};
  if (met.count != due.count) return Mistake{"count", "more or less data than the contract moves"};
  if (due.op == Op::shift && due.to >= 0 && (met.to != due.to || met.from != due.from))
    return Mistake{"peers", "a ring that turns the other way, or skips ranks"};
  if (due.op == Op::shift && met.hop != due.hop)
    return Mistake{"hop", "a ring that turns the other way, or skips ranks"};
  if (due.op == Op::broadcast && met.hop != due.hop)
    return Mistake{"root", "the data of another rank"};
  return std::nullopt;
}

}  // namespace

// A group of one issues no call.
std::vector<LedgerEntry> judging::due_calls(const Evidence& e, int rank, bool backward,
                                            bool ends_step) {
  Calls due;
  std::map<std::string, int> of_group;
  for (const Traffic& t : traffic_due(*e.contract, e.declared, *e.line, rank)) {
    if (t.backward != backward || (t.rank >= 0 && t.rank != rank)) continue;
    if (t.once_a_step && !ends_step) continue;
    LedgerEntry c = due_entry(t, e.mesh, rank);
    if (c.members.size() == 1) continue;
    c.number = ++of_group[c.label];
    due.push_back(std::move(c));
  }
  return due;
}

bool judging::is_due(const LedgerEntry& met, const LedgerEntry& due) { return !mistake(met, due); }

namespace {

std::string bare(const LedgerEntry& due) {
  std::string s = text(due);
  if (const size_t at = s.rfind(", at "); at != std::string::npos) s.resize(at);
  return s;
}

int64_t bytes(const Calls& calls) {
  int64_t n = 0;
  for (const LedgerEntry& c : calls) n += logical_bytes(c);
  return n;
}

// From one call on each side, the same calls to the end.
bool agree_from(const Calls& met, size_t m, const Calls& due, size_t d) {
  if (m > met.size() || d > due.size() || met.size() - m != due.size() - d) return false;
  for (; m < met.size(); ++m, ++d)
    if (mistake(met[m], due[d])) return false;
  return true;
}

// The same payloads on the same ways, whenever they travel.
bool same_payloads(const Calls& met, const Calls& due) {
  const auto listed = [](const Calls& calls) {
    std::multiset<std::string> list;
    for (LedgerEntry c : calls) {
      c.number = 0;
      if (c.count > 0) list.insert(bare(c));
    }
    return list;
  };
  return listed(met) == listed(due);
}

Finding differ(const Calls& met, const Calls& due, size_t i, int rank, bool backward) {
  Finding f;
  f.rank = rank;
  f.ranks = {rank};
  f.ratio = std::numeric_limits<double>::infinity();
  const std::string expected =
      i < due.size() ? bare(due[i])
                     : fmt::format("no further call of {}", backward ? "backward" : "forward");
  const std::string found = i < met.size()
                                ? text(met[i])
                                : fmt::format("the end of {}", backward ? "backward" : "forward");
  std::string what;
  if (agree_from(met, i + 1, due, i)) {
    what = i < due.size() ? ", one call more" : "";
    f.means = "a call that is not due: redundant traffic, or a result that is changed once more";
  } else if (agree_from(met, i, due, i + 1)) {
    what = i < met.size() ? ", one call less" : "";
    f.means = "a call that is due was not made";
  } else if (i < due.size() && due[i].op == Op::shift && same_payloads(met, due)) {
    what = ", the same payloads in another order";
    f.means = "another schedule than the line's, or other ticks: traffic of its own is declared";
  } else if (i < due.size() && i < met.size()) {
    const Mistake m = *mistake(met[i], due[i]);
    what = std::string(", another ") + m.what;
    f.means = m.means;
  } else if (i < met.size()) {
    f.means = "calls that are not due: redundant traffic, or a result that is changed once more";
  } else {
    f.means = "calls that are due were not made";
  }
  f.message = fmt::format("expected {}, met {}{}; {} of {} calls and {} of {} B logical", expected,
                          found, what, met.size(), due.size(), bytes(met), bytes(due));
  return f;
}

// One finding a phase: the first rank's words, with all ranks that differ.
struct Tally {
  int64_t compared = 0;
  std::optional<Finding> first;
};

void compare_calls(const Calls& met, const Calls& due, int rank, bool backward, Tally& t) {
  t.compared +=
      int64_t(std::max(met.size(), due.size())) + 1;  // that nothing follows is asked, too
  size_t i = 0;
  while (i < met.size() && i < due.size() && !mistake(met[i], due[i])) ++i;
  if (i == met.size() && i == due.size()) return;
  if (t.first)
    t.first->ranks.push_back(rank);
  else
    t.first = differ(met, due, i, rank, backward);
}

// Bytes of rank 0, and of the rings of all groups: told where the calls are the due ones.
struct Volume {
  int64_t calls = 0, logical = 0, ring = 0;
};

// What a ring sends in total is counted by its first member, a shift by each for its own payload,
// an all-to-all by each for its own row.
int64_t ring_bytes(const LedgerEntry& c, int rank) {
  if (c.op == Op::shift) return logical_bytes(c);
  if (c.op != Op::all_to_all)
    return c.members[0] == rank ? ring_bytes_total(c.op, logical_bytes(c), int(c.members.size()))
                                : 0;
  int64_t elements = 0;
  for (size_t m = 0; m < c.send.size(); ++m)
    if (c.members[m] != rank) elements += c.send[m];
  return elements * int64_t(size_of(c.dtype));
}

void count(const Calls& calls, int rank, Volume& v) {
  for (const LedgerEntry& c : calls) {
    if (c.members.empty()) continue;
    v.ring += ring_bytes(c, rank);
    if (rank != 0) continue;
    ++v.calls;
    v.logical += logical_bytes(c);
  }
}

// ---- What has come and waits for an answer, whoever states the calls

// Elements of each call along a group that a rank has sent. Members make their calls in one order,
// so that both ends know it by its number.
std::map<std::pair<Phase, int>, int64_t> sent_over(const Calls& calls, const std::string& label) {
  std::map<std::pair<Phase, int>, int64_t> sent;
  for (const LedgerEntry& c : calls)
    if (c.label == label) sent[{c.phase, c.number}] = c.count;
  return sent;
}

std::optional<Finding> judge_unanswered(const Evidence& e, int rank, const Unanswered& due) {
  int64_t waiting = 0;
  std::map<int, std::map<std::pair<Phase, int>, int64_t>> sent;  // by the rank that sends
  const auto received = [&](const LedgerEntry& c) -> int64_t {
    if (c.from < 0) return 0;
    const auto [from, fresh] = sent.try_emplace(c.from);
    if (fresh) from->second = sent_over(e.record(c.from, 0).ledger, due.label);
    const auto shift = from->second.find({c.phase, c.number});
    return shift == from->second.end() ? 0 : shift->second;
  };
  for (const LedgerEntry& c : e.record(rank, 0).ledger) {
    if (c.op != Op::shift || c.label != due.label) continue;
    waiting += c.hop == due.hop ? received(c) : c.hop == -due.hop ? -c.count : 0;
    if (waiting <= due.most) continue;
    Finding f;
    f.rank = rank, f.ranks = {rank};
    f.ratio = std::numeric_limits<double>::infinity();
    f.message = fmt::format(
        "expected at most {} elements that came by shifts {:+} over {} and wait for what goes "
        "back, met {} behind {}",
        due.most, due.hop, due.label, waiting, text(c));
    f.means = due.means;
    return f;
  }
  return std::nullopt;
}

// One finding: the first rank's words, with all ranks that hold too much.
std::optional<Finding> judge_unanswered(const Evidence& e, int64_t& compared) {
  std::optional<Finding> first;
  for (int r = 0; e.contract->unanswered && r < e.mesh.world(); ++r) {
    const auto due = e.contract->unanswered(*e.line, r);
    if (!due) continue;
    ++compared;
    auto found = judge_unanswered(e, r, *due);
    if (found && first)
      first->ranks.push_back(r);
    else if (found)
      first = std::move(found);
  }
  return first;
}

// Calls under way are asked for by a key that a subject of one's own may not know.
std::string not_done(const Evidence& e) {
  const Case& line = *e.line;
  if (line.text("subject").empty() || e.declared.traffic || !line.has("overlap") ||
      line.text("overlap") == "off")
    return "";
  return fmt::format(
      "; a subject that does no overlap={} says so: declared.without = {{\"overlap\"}}",
      line.text("overlap"));
}

CheckResult judge(const Evidence& e) {
  if (auto f = judging::incomplete(e, "base")) return judging::conclude("ledger", 0, {*f});
  std::vector<Finding> findings;
  int64_t compared = 0;
  Volume volume;
  for (bool backward : {false, true}) {
    if (backward && e.forward_only()) continue;
    Tally t;
    for (int r = 0; r < e.mesh.world(); ++r) {
      Calls met;
      for (const LedgerEntry& c : e.record(r, 0).ledger)
        if (in_phase(c, backward)) met.push_back(c);
      const Calls due = judging::due_calls(e, r, backward);
      compare_calls(met, due, r, backward, t);
      count(met, r, volume);
    }
    compared += t.compared;
    if (t.first) t.first->means += not_done(e);
    if (t.first) findings.push_back(std::move(*t.first));
  }
  if (auto f = judge_unanswered(e, compared)) findings.push_back(std::move(*f));
  CheckResult result = judging::conclude("ledger", compared, std::move(findings));
  result.exact = true;
  if (result.verdict == Verdict::passed)
    result.note = fmt::format("{} and {} B on rank 0, {} B in rings over all ranks",
                              number_of(volume.calls, "call"), volume.logical, volume.ring);
  if (result.verdict == Verdict::passed && e.declared.traffic)
    result.note += "; traffic: the subject's own";
  return result;
}

}  // namespace

Check ledger_check() {
  return {.name = "ledger",
          .letter = 'L',
          .asks =
              "are the calls exactly those that are due: operation, reduction, group, peers, "
              "dtype, count, order",
          .due =
              [](const Contract& c, const Case& line, const Declared& d) {
                return line.world() > 1 && !d.own_communication &&
                       (c.traffic != nullptr || d.traffic != nullptr);
              },
          .plan = nullptr,
          .judge = judge};
}

}  // namespace shardproof
