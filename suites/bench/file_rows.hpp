// What judging from files costs. Files are written below a folder that is named, and removed again.
#pragma once
#include <string>
#include <vector>

#include "oracle/registry.hpp"
#include "suites/bench/row.hpp"

namespace shardproof {

// Seconds of `prepare` and `judge` of the battery of linears at 4 ranks, whose answers our own
// kernels give in between, not counted.
Row prepare_judge_linears(const Registry&, const std::string& folder);

// Judges one case whose files have that many GiB together: memory beyond the reference's own, and
// time against reading and hashing the same files. Throws BadInput where the disk is too full.
std::vector<Row> large_files(const Registry&, const std::string& folder, double gib);

}  // namespace shardproof
