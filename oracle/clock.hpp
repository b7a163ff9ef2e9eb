#pragma once
#include <chrono>

namespace shardproof {

// Seconds of a clock that is never set.
inline double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace shardproof
