#include "oracle/cuda/digest.hpp"

#include <cuda_runtime.h>

#include <cub/block/block_reduce.cuh>

#include "oracle/digest/units.hpp"
#include "primitives/cuda/noted.hpp"

namespace shardproof {
namespace {

using primitives::cuda::noted_launch;

using digest::Units;

constexpr int threads = 256;
constexpr uint64_t most_blocks = 132 * 16;  // each strides over what is left

__device__ uint64_t place() { return uint64_t(blockIdx.x) * blockDim.x + threadIdx.x; }
__device__ uint64_t stride() { return uint64_t(gridDim.x) * blockDim.x; }

// The sum over the block into one word of the device; sums of integers have no order.
__device__ void add_to(uint64_t* word, uint64_t own) {
  using Reduce = cub::BlockReduce<unsigned long long, threads>;
  __shared__ typename Reduce::TempStorage room;
  const unsigned long long all = Reduce(room).Sum(own);
  if (threadIdx.x == 0) atomicAdd(reinterpret_cast<unsigned long long*>(word), all);
  __syncthreads();  // the next sum takes the same room
}

__global__ void __launch_bounds__(threads) whole_digest(Units u, shardproof_digest* sum) {
  shardproof_digest own{};
  u.add(place(), stride(), own);
  for (int lane = 0; lane < 2; ++lane) {
    add_to(&sum->lane[lane], own.lane[lane]);
    add_to(&sum->coverage[lane], own.coverage[lane]);
  }
  add_to(&sum->elements, own.elements);
  add_to(&sum->nans, own.nans);
  add_to(&sum->infinities, own.infinities);
  add_to(&sum->negative_zeros, own.negative_zeros);
}

template <int lanes>
__global__ void __launch_bounds__(threads) lanes_of_digest(Units u, shardproof_digest* sum) {
  uint64_t own[lanes] = {};
  u.add_lanes(place(), stride(), own);
  for (int lane = 0; lane < lanes; ++lane) add_to(&sum->lane[lane], own[lane]);
}

unsigned blocks(uint64_t units) {
  const uint64_t wanted = (units + threads - 1) / threads;
  return unsigned(wanted < most_blocks ? wanted : most_blocks);
}

}  // namespace

int digest_on_device(const void* memory, uint64_t elements, const shardproof_hash& hash,
                     uint64_t first, DigestParts parts, shardproof_digest* sum, void* stream) {
  Units u;
  if (!Units::of(hash, memory, elements, first, u)) return cudaErrorInvalidValue;
  if (parts != DigestParts::all && hash.mode != SHARDPROOF_RAW) return cudaErrorInvalidValue;
  if (u.units == 0) return cudaSuccess;
  const auto kernel = parts == DigestParts::all        ? whole_digest
                      : parts == DigestParts::one_lane ? lanes_of_digest<1>
                                                       : lanes_of_digest<2>;
  return noted_launch(kernel, blocks(u.units), threads, stream, u, sum);
}

}  // namespace shardproof
