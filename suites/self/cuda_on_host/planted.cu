#include "suites/self/cuda_on_host/planted.hpp"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "primitives/cuda/warp_matrix.cuh"

namespace cuda_on_host::planted {
namespace {

using shardproof::primitives::Number, shardproof::primitives::cuda::load_matrices,
    shardproof::primitives::cuda::multiply_matrices;

template <class... Parameters, class... Arguments>
int launched(void (*kernel)(Parameters...), unsigned blocks, unsigned threads,
             const Arguments&... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = blocks, config.blockDim = threads;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

__global__ void mirror_kernel(const float* from, float* to, bool with_barrier) {
  __shared__ float room[1024];
  room[threadIdx.x] = from[threadIdx.x];
  if (with_barrier) __syncthreads();
  to[threadIdx.x] = room[blockDim.x - 1 - threadIdx.x];
}

__global__ void rounds_kernel(float* sum, bool both_barriers) {
  __shared__ float room[1024];
  float own = 0;
  for (int round = 0; round < 3; ++round) {
    room[threadIdx.x] = float(round);
    __syncthreads();
    own += room[(threadIdx.x + 1) % blockDim.x];
    if (both_barriers) __syncthreads();
  }
  sum[threadIdx.x] = own;
}

__global__ void by_warp_kernel(int* to, bool with_barrier) {
  __shared__ int room[32];
  room[threadIdx.x] = int(threadIdx.x);
  if (with_barrier)
    __syncwarp();
  else
    __shfl_sync(0xffffffffu, 0, 0);  // all have come, but what they wrote may not be there
  to[threadIdx.x] = room[threadIdx.x ^ 1];
}

__global__ void changed_kernel(float* to, unsigned readers, unsigned writer, bool with_barrier) {
  __shared__ float room;
  if (threadIdx.x == 0) room = 1;
  __syncthreads();
  if (threadIdx.x < readers) to[threadIdx.x] = room;
  if (with_barrier) __syncthreads();
  if (threadIdx.x == writer) room = 2;
}

__global__ void last_block_kernel(int* to) { *to = int(blockIdx.x); }
__global__ void read_kernel(const char* f32, float* to) {
  *to = *reinterpret_cast<const float*>(f32);
}

__global__ void divergent_kernel(unsigned left_out, bool at_the_end) {
  if (threadIdx.x != left_out) __syncthreads();
  if (at_the_end) return;
  __syncthreads();
}

__global__ void unwritten_kernel(double* f64, float* f32, uint16_t* half, int64_t* integer) {
  __shared__ double a[3];
  __shared__ float b[3];
  __shared__ uint16_t c[3];
  __shared__ int64_t d[3];
  *f64 = a[1], *f32 = b[1], *half = c[1], *integer = d[1];
}

__global__ void shuffle_kernel(int* to, int width) {
  const int lane = int(threadIdx.x), own = 100 + lane;
  const unsigned all = 0xffffffffu;
  to[lane] = __shfl_sync(all, own, 5, width);
  to[32 + lane] = __shfl_down_sync(all, own, 3, width);
  to[64 + lane] = __shfl_up_sync(all, own, 3, width);
  to[96 + lane] = __shfl_xor_sync(all, own, 9, width);
}
__global__ void outside_kernel() { __shfl_sync(0xffffu, 1, 20); }
__global__ void some_lanes_kernel() {
  if (threadIdx.x % 2) __shfl_sync(0xffffffffu, 1, 0);
}

__global__ void count_kernel(unsigned long long* sum, bool atomic) {
  if (atomic) {
    atomicAdd(sum, 1ull);
  } else {
    const unsigned long long before = *sum;
    visible();
    *sum = before + 1;
  }
}

template <bool turned>
__global__ void load_kernel(const uint16_t* rows, unsigned apart, uint32_t* to) {
  uint32_t r[4];
  load_matrices<turned>(r, rows + threadIdx.x * apart);
  for (int m = 0; m < 4; ++m) to[4 * threadIdx.x + m] = r[m];
}
template <Number half>
__global__ void multiply_kernel(const uint32_t* a, const uint32_t* b, float* d) {
  const unsigned lane = threadIdx.x;
  uint32_t left[4];
  float sum[4];
  for (int i = 0; i < 4; ++i) left[i] = a[4 * lane + i], sum[i] = d[4 * lane + i];
  multiply_matrices<half>(sum, left, b[2 * lane], b[2 * lane + 1]);
  for (int i = 0; i < 4; ++i) d[4 * lane + i] = sum[i];
}

__global__ void nothing_kernel() {}
__global__ void cycles_kernel(int64_t cycles) {
  for (const int64_t begin = clock64(); clock64() - begin < cycles;) {
  }
}

}  // namespace

int mirror(const float* from, float* to, unsigned threads, bool with_barrier) {
  return launched(mirror_kernel, 1, threads, from, to, with_barrier);
}
int rounds(float* sum, unsigned threads, bool both_barriers) {
  return launched(rounds_kernel, 1, threads, sum, both_barriers);
}
int by_warp(int* to, bool with_barrier) {
  return launched(by_warp_kernel, 1, 32, to, with_barrier);
}
int read_and_changed(float* to, unsigned readers, unsigned writer, bool with_barrier) {
  return launched(changed_kernel, 1, 64, to, readers, writer, with_barrier);
}
int last_block_wins(int* to, unsigned blocks) { return launched(last_block_kernel, blocks, 1, to); }
int read_at(const char* f32, float* to) { return launched(read_kernel, 1, 1, f32, to); }
int divergent_barrier(unsigned threads, unsigned left_out) {
  return launched(divergent_kernel, 3, threads, left_out, true);
}
int early_end(unsigned threads, unsigned left_out) {
  return launched(divergent_kernel, 3, threads, left_out, false);
}
int read_before_write(double* f64, float* f32, uint16_t* half, int64_t* integer) {
  return launched(unwritten_kernel, 1, 1, f64, f32, half, integer);
}
int shuffles(int* to, int width) { return launched(shuffle_kernel, 1, 32, to, width); }
int shuffle_outside_of_mask() { return launched(outside_kernel, 1, 16); }
int shuffle_without_all_lanes() { return launched(some_lanes_kernel, 1, 32); }
int count(unsigned blocks, unsigned threads, unsigned long long* sum, bool atomic) {
  return launched(count_kernel, blocks, threads, sum, atomic);
}
int load_matrices(const uint16_t* rows, unsigned apart, uint32_t* to, bool turned) {
  return launched(turned ? load_kernel<true> : load_kernel<false>, 1, 32, rows, apart, to);
}
int multiply_matrices(const uint32_t* a, const uint32_t* b, float* d, bool bf16) {
  return launched(bf16 ? multiply_kernel<Number::bf16> : multiply_kernel<Number::f16>, 1, 32, a, b,
                  d);
}
int grid_of(unsigned x, unsigned y, unsigned z, unsigned threads, unsigned z_threads,
            unsigned shared) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(x, y, z), config.blockDim = dim3(threads, 1, z_threads);
  config.dynamicSmemBytes = shared;
  return cudaLaunchKernelEx(&config, nothing_kernel);
}
int count_cycles_by_the_clock(int64_t cycles) { return launched(cycles_kernel, 1, 1, cycles); }
float widened(uint16_t half, bool bf16) {
  return bf16 ? __bfloat162float(__ushort_as_bfloat16(half)) : __half2float(__ushort_as_half(half));
}
uint16_t rounded(float value, bool bf16) {
  return bf16 ? __float2bfloat16_rn(value).bits : __float2half_rn(value).bits;
}
int last_code() { return cudaGetLastError(); }

}  // namespace cuda_on_host::planted
