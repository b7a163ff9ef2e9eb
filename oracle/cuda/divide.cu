#include "oracle/cuda/divide.hpp"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "primitives/cuda/noted.hpp"

namespace shardproof {
namespace {

using primitives::cuda::noted_launch;

__device__ double divided(double x, int p) { return x / p; }
__device__ float divided(float x, int p) { return __fdiv_rn(x, float(p)); }
__device__ __nv_bfloat16 divided(__nv_bfloat16 x, int p) {
  return __float2bfloat16_rn(__fdiv_rn(__bfloat162float(x), float(p)));
}
__device__ __half divided(__half x, int p) {
  return __float2half_rn(__fdiv_rn(__half2float(x), float(p)));
}
__device__ long long divided(long long x, int p) { return x / p; }
__device__ int divided(int x, int p) { return x / p; }

template <class T>
__global__ void divide_all(T* x, int64_t n, int p) {
  const int64_t step = int64_t(gridDim.x) * blockDim.x;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += step)
    x[i] = divided(x[i], p);
}

template <class T>
int launch(void* x, int64_t n, int p, void* stream) {
  constexpr int threads = 256;
  constexpr int64_t most_blocks = 1 << 16;
  const int64_t wanted = (n + threads - 1) / threads;
  const auto blocks = unsigned(wanted < most_blocks ? wanted : most_blocks);
  return noted_launch(divide_all<T>, blocks, threads, stream, static_cast<T*>(x), n, p);
}

}  // namespace

int divide(void* x, int64_t n, int dtype, int p, void* stream) {
  if (n == 0) return cudaSuccess;
  switch (dtype) {
    case 0:
      return launch<double>(x, n, p, stream);
    case 1:
      return launch<float>(x, n, p, stream);
    case 2:
      return launch<__nv_bfloat16>(x, n, p, stream);
    case 3:
      return launch<__half>(x, n, p, stream);
    case 4:
      return launch<long long>(x, n, p, stream);
    case 5:
      return launch<int>(x, n, p, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace shardproof
