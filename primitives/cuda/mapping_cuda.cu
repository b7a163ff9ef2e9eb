// The kernels of kernels.hpp: one thread an element, grid-stride, 64-bit indices.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "primitives/cuda/kernels.hpp"

namespace shardproof::cuda {
namespace {

constexpr int block_threads = 256;
constexpr int64_t most_blocks = 65535;

int blocks_for(int64_t elements) {
  const int64_t blocks = (elements + block_threads - 1) / block_threads;
  return int(blocks < most_blocks ? blocks : most_blocks);
}

__device__ int64_t first() { return int64_t(blockIdx.x) * blockDim.x + threadIdx.x; }
__device__ int64_t step() { return int64_t(gridDim.x) * blockDim.x; }

// Place of the row-major number in memory, in elements.
__device__ int64_t place(const Strided& t, int64_t number) {
  int64_t offset = 0;
  for (int d = t.dims - 1; d >= 0; --d) {
    offset += number % t.shape[d] * t.strides[d];
    number /= t.shape[d];
  }
  return offset;
}

template <class Bits>
__global__ void copy_elements(Strided from, Strided to) {
  for (int64_t i = first(); i < to.elements; i += step())
    static_cast<Bits*>(to.data)[place(to, i)] = static_cast<const Bits*>(from.data)[place(from, i)];
}

template <class Bits>
__global__ void zero_elements(Strided t) {
  for (int64_t i = first(); i < t.elements; i += step())
    static_cast<Bits*>(t.data)[place(t, i)] = 0;
}

__device__ double widen(double x) { return x; }
__device__ double widen(float x) { return x; }
__device__ double widen(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ double widen(__half x) { return __half2float(x); }
__device__ void narrow(double x, double& to) { to = x; }
__device__ void narrow(double x, float& to) { to = __double2float_rn(x); }
__device__ void narrow(double x, __nv_bfloat16& to) { to = __double2bfloat16(x); }
__device__ void narrow(double x, __half& to) { to = __double2half(x); }

template <class T>
__global__ void scale_elements(Strided t, double factor) {
  for (int64_t i = first(); i < t.elements; i += step()) {
    T& x = static_cast<T*>(t.data)[place(t, i)];
    narrow(factor * widen(x), x);
  }
}

// A grid without a block is refused by the runtime; nothing is to be done then.
template <class... Parameters, class... Arguments>
int launch(void (*kernel)(Parameters...), int64_t elements, void* stream, Arguments... arguments) {
  if (elements == 0) return cudaSuccess;
  kernel<<<blocks_for(elements), block_threads, 0, static_cast<cudaStream_t>(stream)>>>(
      arguments...);
  return cudaGetLastError();
}

}  // namespace

int copy(const Strided& from, const Strided& to, void* stream) {
  switch (to.element_bytes) {
    case 8:
      return launch(copy_elements<uint64_t>, to.elements, stream, from, to);
    case 4:
      return launch(copy_elements<uint32_t>, to.elements, stream, from, to);
    case 2:
      return launch(copy_elements<uint16_t>, to.elements, stream, from, to);
  }
  return cudaErrorInvalidValue;
}

int set_zero(const Strided& t, void* stream) {
  switch (t.element_bytes) {
    case 8:
      return launch(zero_elements<uint64_t>, t.elements, stream, t);
    case 4:
      return launch(zero_elements<uint32_t>, t.elements, stream, t);
    case 2:
      return launch(zero_elements<uint16_t>, t.elements, stream, t);
  }
  return cudaErrorInvalidValue;
}

int scale(const Strided& t, Number number, double factor, void* stream) {
  switch (number) {
    case Number::f64:
      return launch(scale_elements<double>, t.elements, stream, t, factor);
    case Number::f32:
      return launch(scale_elements<float>, t.elements, stream, t, factor);
    case Number::bf16:
      return launch(scale_elements<__nv_bfloat16>, t.elements, stream, t, factor);
    case Number::f16:
      return launch(scale_elements<__half>, t.elements, stream, t, factor);
  }
  return cudaErrorInvalidValue;
}

}  // namespace shardproof::cuda
