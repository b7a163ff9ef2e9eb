// What one forward and one backward of a subject take on ranks, without the judge around them.
#pragma once
#include <string>

#include "oracle/comm/world.hpp"
#include "oracle/registry.hpp"

namespace shardproof {

// On a rank: the job is a case line, the record the seconds of each of a few runs.
RankMain timed_kernel(const Registry&);

// Seconds of the slowest rank over those of the slowest rank of another line, the median of pairs
// of runs that are taken in turns, so that a busy machine disturbs both sides alike.
double seconds_over(const std::string& line, const std::string& against, const Registry&);

}  // namespace shardproof
