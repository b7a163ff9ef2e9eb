#include "oracle/cuda/spin.hpp"

#include <cuda_runtime.h>

#include "primitives/cuda/noted.hpp"

namespace shardproof {
namespace {

using primitives::cuda::noted_launch;

__global__ void count_cycles(int64_t cycles) {
  const int64_t begin = clock64();
  while (clock64() - begin < cycles) {
  }
}

// A clock that runs slower than its highest rate makes the pause longer, never shorter.
int highest_kilohertz(int64_t& rate) {
  int device = 0, kilohertz = 0;
  if (int code = cudaGetDevice(&device)) return code;
  const int code = cudaDeviceGetAttribute(&kilohertz, cudaDevAttrClockRate, device);
  rate = kilohertz;
  return code;
}

}  // namespace

int spin(int64_t nanoseconds, void* stream) {
  int64_t kilohertz = 0;
  if (int code = highest_kilohertz(kilohertz)) return code;
  return noted_launch(count_cycles, 1, 1, stream, nanoseconds * kilohertz / 1'000'000);
}

}  // namespace shardproof
