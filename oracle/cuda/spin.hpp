// A kernel that does nothing for a while: the stream that it is on is late.
#pragma once
#include <cstdint>

namespace shardproof {

// Returns the runtime's code.
int spin(int64_t nanoseconds, void* stream);

}  // namespace shardproof
