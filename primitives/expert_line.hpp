// What expert-parallel layers read from a line, and which lines they refuse.
#pragma once
#include <optional>
#include <vector>

#include "oracle/subject.hpp"

namespace shardproof::primitives {

struct ExpertLine {
  std::vector<Axis> axes;            // of the expert group: ep, and tp where it cuts no expert
  std::vector<Axis> axes_of_shares;  // and tp where it cuts experts, whose rows it gathers
  int64_t experts, choices, capacity;
  int64_t shares;   // ranks of tp that dispatch tokens of their own to experts that tp cuts
  bool replicated;  // tokens, over tp, of which each rank dispatches a share
  explicit ExpertLine(const Case&);
};

std::optional<Rejected> refused_experts(const Case&);
std::optional<Rejected> refused_balance(const Case&);

}  // namespace shardproof::primitives
