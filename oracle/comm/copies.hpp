// A kernel may fork. The child is a copy of the rank with the harness in it: one that comes back
// from the kernel would make the calls and hand in the record of the rank a second time.
#pragma once
#include "oracle/comm/door.hpp"

namespace shardproof {

// This process is a rank, and no copy of one: on the rank's own thread, before a kernel is there.
void watch_for_copies();
// In a copy: says so in the rank's trace, and ends it. Returns in every other process.
void end_a_copy(Trace*);
// The same; throws std::runtime_error on the rank where a copy of it came back.
void require_no_copy(Trace*);

}  // namespace shardproof
