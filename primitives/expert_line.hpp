// What expert-parallel layers read from a line, and which lines they refuse.
#pragma once
#include <optional>
#include <vector>

#include "oracle/subject.hpp"

namespace shardproof::primitives {

struct ExpertLine {
  std::vector<Axis> axes;  // of the expert group
  int64_t experts, choices, capacity;
  bool replicated;  // tokens, over tp
  explicit ExpertLine(const Case&);
};

std::optional<Rejected> refused_experts(const Case&);
std::optional<Rejected> refused_balance(const Case&);

}  // namespace shardproof::primitives
