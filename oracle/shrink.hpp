// Makes a failing line minimal: fewer ranks first, then default attributes and numbers, then
// smaller extents, as long as the same check keeps finding the same kind of fault in the same
// tensor.
//
// Greedy and deterministic. A step takes the first simpler line that still fails alike; it ends
// where none does. Every step lowers (ranks, keys off their default, extents) in that order, so it
// does end.
#pragma once
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "oracle/gate.hpp"
#include "oracle/registry.hpp"
#include "oracle/verdict.hpp"

namespace shardproof {

// How a line fails. kind: what the finding means, or the class of its pattern or message, numbers
// left out ("block of rank 3" and "blocks of ranks 0, 1" are one class); empty where wrong values
// have no pattern, and then any wrong values of the tensor are alike.
struct Symptom {
  std::string check, tensor, kind;
  Verdict verdict = Verdict::failed;
  bool operator==(const Symptom&) const = default;
};
// Of the check that opens the block of the case; empty where it passes.
std::optional<Symptom> symptom_of(const CaseResult&);
// Does the same check still find this, among other things?
bool shows(const CaseResult&, const Symptom&);
std::string class_of(const std::string& pattern);

// Lines one step simpler, in the order in which they are to be tried: ranks, words, extents. They
// may be illegal. Keys subject, control, fault and device are what is under test and stay; the rank
// of a fault follows the world.
std::vector<Case> simpler(const Case&, const Registry&);

// Judges a line; empty: it cannot be judged (the contract refuses it, or the check is not due).
using JudgeLine = std::function<std::optional<CaseResult>(const Case&)>;
struct Shrunk {
  Case line;
  CaseResult result;  // of the last line that failed alike
  int judged = 0, kept = 0;
};
// `most`: lines that are judged at most.
Shrunk shrink(const Case&, const CaseResult& failing, const Symptom&, const Registry&,
              const JudgeLine&, int most = 1000);

// The command: judges the line, makes it minimal, judges what is left with every check again.
// Throws BadInput for a line that cannot run, Infrastructure where this machine cannot run it.
struct ShrinkOutcome {
  bool failed = false;
  std::string text;  // the line that passed, or the minimal line with its block
};
ShrinkOutcome shrink_line(const Case&, const Options&, const Registry&);

}  // namespace shardproof
