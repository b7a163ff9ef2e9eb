// J: is an illegal line refused by every rank, with one text, before any call?
//
// Never due on an ordinary case: the gate asks it by name of the lines that a contract must refuse.
#include <fmt/format.h>

#include <limits>
#include <map>

#include "oracle/checks/judging.hpp"

namespace shardproof {
namespace {

// Ranks by what they said: one entry, "rejected the line: ...", where refusal is unanimous.
std::map<std::string, std::vector<int>> said(const Evidence& e) {
  std::map<std::string, std::vector<int>> by_text;
  for (int r = 0; r < int(e.ranks.size()); ++r) {
    const auto& shots = e.ranks[size_t(r)].shots;
    by_text[shots.empty() ? "handed in no record" : judging::what_ended(shots[0])].push_back(r);
  }
  return by_text;
}

Finding about(const std::vector<int>& ranks, std::string message, std::string means) {
  Finding f;
  f.rank = ranks[0];
  f.ranks = ranks;
  f.message = std::move(message);
  f.means = std::move(means);
  f.ratio = std::numeric_limits<double>::infinity();
  return f;
}

std::string unchecked(const Case& line) {
  std::string means =
      "a precondition that is not checked on every rank, or not before the first call";
  if (!line.text("subject").empty())
    means += "; rank.require_legal() at the head of forward checks those of the contract";
  return means;
}

void find_dissent(const Evidence& e, std::vector<Finding>& findings) {
  const auto by_text = said(e);
  for (const auto& [text, ranks] : by_text) {
    const auto& shots = e.ranks[size_t(ranks[0])].shots;
    if (!shots.empty() && shots[0].status == ShotRecord::rejected) continue;
    findings.push_back(about(ranks,
                             fmt::format("expected a refusal of every rank, but {} {}",
                                         judging::ranks_text(ranks, 0), text),
                             unchecked(*e.line)));
  }
  if (findings.empty() && by_text.size() > 1)
    for (const auto& [text, ranks] : by_text)
      findings.push_back(about(ranks,
                               fmt::format("expected one text on all ranks, but {} {}",
                                           judging::ranks_text(ranks, 0), text),
                               "a precondition that reads a value of the rank: it must depend on "
                               "what is equal on all of them"));
}

void find_calls(const Evidence& e, std::vector<Finding>& findings) {
  for (int r = 0; r < int(e.ranks.size()); ++r) {
    const auto& shots = e.ranks[size_t(r)].shots;
    if (shots.empty() || shots[0].ledger.empty()) continue;
    findings.push_back(
        about({r},
              fmt::format("expected no call before the refusal, met {} on rank {}: {}",
                          shots[0].ledger.size(), r, text(shots[0].ledger[0])),
              "preconditions come before any communication"));
  }
}

CheckResult judge(const Evidence& e) {
  std::vector<Finding> findings;
  find_dissent(e, findings);
  find_calls(e, findings);
  const int64_t heard = int64_t(e.ranks.size());
  std::string note;
  if (findings.empty() && heard > 0) note = e.record(0, 0).text;
  return judging::conclude("rejection", heard, std::move(findings), std::move(note));
}

}  // namespace

Check rejection_check() {
  return {.name = "rejection",
          .letter = 'J',
          .asks = "is an illegal line refused by every rank alike, before any call",
          .due = [](const Contract&, const Case&, const Declared&) { return false; },
          .plan = nullptr,
          .judge = judge};
}

}  // namespace shardproof
