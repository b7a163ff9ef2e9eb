// Bodies as kernels: one thread an element, one block a row or a tile (tile_block.cuh), a tile of
// threads a strip of columns.
// Grids are strided by 64-bit indices, so that any size fits; the order of a sum depends on the
// shape alone. A size of zero is no launch: the runtime refuses a grid without a block.
#pragma once
#include <cuda_runtime.h>

#include <cub/block/block_reduce.cuh>

#include "primitives/cuda/noted.hpp"
#include "primitives/cuda/tile_block.cuh"
#include "primitives/launch.hpp"

namespace shardproof::primitives::cuda {

constexpr int block_threads = 256, warp_threads = 32;

// The threads of a block as one team (Alone of element.hpp is the team of one).
class BlockTeam {
 public:
  __device__ int64_t first() const { return threadIdx.x; }
  __device__ int64_t step() const { return blockDim.x; }
  __device__ bool leads() const { return threadIdx.x == 0; }
  template <class A>
  __device__ A sum(A own) const {
    return over_block(own, [](A a, A b) { return a + b; });
  }
  template <class A>
  __device__ A greatest(A own) const {
    return over_block(own, [](A a, A b) { return a < b ? b : a; });
  }

 private:
  template <class A, class Join>
  __device__ A over_block(A own, Join join) const {
    using Reduce = cub::BlockReduce<A, block_threads>;
    __shared__ typename Reduce::TempStorage room;
    __shared__ A all;
    __syncthreads();  // what the call before this one left has been read
    const A whole = Reduce(room).Reduce(own, join);
    if (leads()) all = whole;
    __syncthreads();
    return all;
  }
};

template <class Body>
__global__ void each_element(Body body) {
  const int64_t step = int64_t(gridDim.x) * blockDim.x, count = body.count();
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) body.at(i);
}

template <class A, class Body>
__global__ void each_row(Body body) {
  const int64_t rows = body.rows();
  for (int64_t r = blockIdx.x; r < rows; r += gridDim.x) body.template row<A>(r, BlockTeam{});
}

// Neighbouring threads read neighbouring columns; line k of the tile's threads takes the rows k,
// k + tile_lines, k + 2 tile_lines, ..., and the lines are added in their order.
constexpr int tile_lines = block_threads / warp_threads;

template <class A, class Body>
__global__ void each_column(Body body) {
  __shared__ A of_line[tile_lines][warp_threads];
  const int64_t columns = body.columns(), rows = body.rows();
  const int lane = int(threadIdx.x % warp_threads), line = int(threadIdx.x / warp_threads);
  for (int64_t strip = int64_t(blockIdx.x) * warp_threads; strip < columns;
       strip += int64_t(gridDim.x) * warp_threads) {
    const int64_t column = strip + lane;
    A own = 0;
    if (column < columns)
      for (int64_t r = line; r < rows; r += tile_lines) own += body.template term<A>(r, column);
    __syncthreads();  // the strip before this one has been read
    of_line[line][lane] = own;
    __syncthreads();
    if (line > 0 || column >= columns) continue;
    A sum = 0;
    for (int l = 0; l < tile_lines; ++l) sum += of_line[l][lane];
    body.put(column, sum);
  }
}

template <class Body>
int start(void (*kernel)(Body), int64_t grid, void* stream, const Body& body) {
  return grid == 0 ? cudaSuccess : noted_launch(kernel, blocks(grid), block_threads, stream, body);
}

template <class Body>
int run(const Body& body, void* stream) {
  if constexpr (Body::shape == Shape::elements) {
    return start(each_element<Body>, (body.count() + block_threads - 1) / block_threads, stream,
                 body);
  } else if constexpr (Body::shape == Shape::rows) {
    return start(body.wide ? each_row<double, Body> : each_row<float, Body>, body.rows(), stream,
                 body);
  } else if constexpr (Body::shape == Shape::tiles) {
    return run_tiles(body, stream);
  } else {
    return start(body.wide ? each_column<double, Body> : each_column<float, Body>,
                 (body.columns() + warp_threads - 1) / warp_threads, stream, body);
  }
}

}  // namespace shardproof::primitives::cuda

#define SHARDPROOF_KERNEL(Body)                                                          \
  template <>                                                                            \
  int shardproof::primitives::executor::launch(const shardproof::primitives::Body& body, \
                                               void* stream) {                           \
    return shardproof::primitives::cuda::run(body, stream);                              \
  }
