// A transport is tested before anything is blamed on a primitive: operations x reductions x dtypes
// x sizes x groups x roots, in place and not, two in flight, against values that follow from (rank,
// index) by a formula.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "oracle/comm/world.hpp"

namespace shardproof {

struct SelfTestResult {
  int64_t calls = 0;                  // made and judged, over all ranks
  std::vector<std::string> failures;  // each is the transport's
  double seconds = 0;
};

// Runs on a world from start_world (or one whose RankMain went through with_self_test). Without
// `all`: a selection in which every pair of values of two parameters occurs.
SelfTestResult transport_self_test(World&, bool all, double deadline = case_deadline_seconds);

// Passes the jobs of the self-test to it, all others on.
RankMain with_self_test(RankMain);
// On a rank: part `part` of `parts` of the test, as a record.
std::vector<std::byte> transport_self_test_rank(RankHost&, bool all, int part = 0, int parts = 1);

}  // namespace shardproof
