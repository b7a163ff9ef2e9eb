#include "oracle/cuda/spin.hpp"

#include <cuda_runtime.h>

#include "primitives/cuda/noted.hpp"

namespace shardproof {
namespace {

using primitives::cuda::noted_launch;

// Where processes share a device the clock goes on in their turns, and may be another
// multiprocessor's afterwards: all streams of this one stood still, so that a turn counts for one
// look and no more.
__global__ void count_cycles(int64_t cycles) {
  constexpr int64_t longest_look = 1024;
  int64_t spent = 0;
  for (int64_t before = clock64(); spent < cycles;) {
    const int64_t now = clock64(), passed = now - before;
    spent += passed < 0 || passed > longest_look ? longest_look : passed;
    before = now;
  }
}

// A clock that runs slower than its highest rate makes the pause longer, never shorter. Where a
// device keeps its rate to itself, none is known to be faster than this.
int highest_kilohertz(int64_t& rate) {
  constexpr int fastest = 3'000'000;
  int device = 0, kilohertz = 0;
  if (int code = cudaGetDevice(&device)) return code;
  const int code = cudaDeviceGetAttribute(&kilohertz, cudaDevAttrClockRate, device);
  rate = kilohertz > 0 ? kilohertz : fastest;
  return code;
}

}  // namespace

int spin(int64_t nanoseconds, void* stream) {
  int64_t kilohertz = 0;
  if (int code = highest_kilohertz(kilohertz)) return code;
  return noted_launch(count_cycles, 1, 1, stream, nanoseconds * kilohertz / 1'000'000);
}

}  // namespace shardproof
