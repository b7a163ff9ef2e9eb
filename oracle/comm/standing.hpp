// Where ranks stand, in words: the lines that explain a hang or a loss.
#pragma once
#include <span>
#include <string>
#include <vector>

#include "oracle/comm/door.hpp"

namespace shardproof {

std::string rank_list(std::span<const int> ranks);    // "rank 2", "ranks 0, 1, 3"
std::string member_text(std::span<const int> ranks);  // "{0-3}", "{0,2,4,6}"

std::string signal_name(int signal);  // "SIGKILL"
// Of a rank that was given up: it made no progress, or a signal (0: none) had stopped it.
std::string hung_text(int stopped_by);
std::string signal_text(int signal);  // "signal 9 (SIGKILL)"

// A copy that may be taken while the rank writes: torn at worst in what it says, never in bounds.
Trace snapshot(const Trace&);

// "all_reduce sum, 12 x f32, tp{0-3}, at linear_row.cpp:41"; a shift names its peers as seen from
// `rank`. Empty before the first call.
std::string last_call(int rank, const Trace&);
// What a rank does, without its name: "waits in call 7 of backward: shift ...", "left backward
// after call 6; last: ...". `plural` for several ranks.
std::string standing(int rank, const Trace&, bool plural = false);
// One line for each set of ranks that stand alike.
std::string standings(const std::vector<Trace>& by_rank);
// "in call 3 of backward", "in backward, after call 3", "before its first call".
std::string place(const Trace&);

}  // namespace shardproof
