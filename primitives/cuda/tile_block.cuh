// Bodies of tiles as kernels: a block a tile. What its threads share is dynamic shared memory;
// sizes fit into the 99 KiB that every device from compute capability 8.0 on has for a block.
#pragma once
#include "primitives/cuda/noted.hpp"
#include "primitives/cuda/tensor_cores.cuh"

namespace shardproof::primitives::cuda {

template <class Math, class Team>
struct ProductsOf {
  using Dots = FusedDots<Math, Team>;
  using Sums = FusedSums<Math, Team>;
};
template <Number half, class Team>
struct ProductsOf<Halves<half>, Team> {
  using Dots = TensorDots<Halves<half>, Team>;
  using Sums = TensorSums<Halves<half>, Team>;
};

// 128 threads, so that a thread has 8 x 8 sums of a tile of 64 rows and 128 columns.
class BlockTiles {
 public:
  static constexpr int threads = 128;
  using Grid = ThreadGrid<8, 16>;
  template <class Math>
  using Size = typename BlockTile<Math>::Size;
  template <class Math>
  using Dots = typename ProductsOf<Math, BlockTiles>::Dots;
  template <class Math>
  using Sums = typename ProductsOf<Math, BlockTiles>::Sums;
  __device__ int thread() const { return int(threadIdx.x); }
  __device__ void join() const { __syncthreads(); }
  __device__ bool any(bool own) const { return __syncthreads_or(own); }
  __device__ bool all(bool own) const { return __syncthreads_and(own); }
  SHARDPROOF_HD static constexpr int upto(int whole, int) { return whole; }
};

template <class Room>
__device__ Room& shared_room() {
#ifdef __NVCC__
  extern __shared__ __align__(16) unsigned char memory[];
  return *reinterpret_cast<Room*>(memory);
#else
  __shared__ Room room;
  return room;
#endif
}

// Body::blocks: how many a multiprocessor of 9.0 has shared memory for.
template <class Math, class Body>
__global__ void __launch_bounds__(BlockTiles::threads, Body::blocks) each_tile(Body body) {
  using Room = typename Body::template Room<Math, BlockTiles>;
  const int64_t tiles = body.template tiles<Math, BlockTiles>();
  for (int64_t i = blockIdx.x; i < tiles; i += gridDim.x)
    body.template tile<Math>(i, BlockTiles{}, shared_room<Room>());
}

template <class Body>
int run_tiles(const Body& body, void* stream) {
  return in_arithmetic_of(body, [&](auto math) {
    using Math = decltype(math);
    constexpr size_t shared = sizeof(typename Body::template Room<Math, BlockTiles>);
    static_assert(shared <= 99 << 10);
    const int64_t tiles = body.template tiles<Math, BlockTiles>();
    if (tiles == 0) return int(cudaSuccess);
    return noted_launch_with(shared, each_tile<Math, Body>, blocks(tiles), BlockTiles::threads,
                             stream, body);
  });
}

}  // namespace shardproof::primitives::cuda
