// What the kernels of this project use of CUDA's language and runtime, on the host (block.hpp).
// Included before a source's first line, as nvcc does.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <tuple>
#include <type_traits>
#include <utility>

#include "suites/self/cuda_on_host/block.hpp"

#define __host__
#define __device__
#define __global__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
// used: by more than the compiler sees, so that it folds nothing.
#define __shared__ static thread_local __attribute__((used))

// ---- The language

inline void __syncthreads() { cuda_on_host::join_block(); }
inline int __syncthreads_or(int own) { return cuda_on_host::join_block_counting(own) > 0; }
inline int __syncthreads_and(int own) { return cuda_on_host::join_block_counting(!own) == 0; }
inline void __syncwarp(unsigned lanes = 0xffffffffu) { cuda_on_host::join_warp(lanes, true); }
inline void __nanosleep(unsigned nanoseconds) { cuda_on_host::sleep(nanoseconds); }
inline long long clock64() { return cuda_on_host::now(); }

namespace cuda_on_host {

template <class T>
T of_lane(unsigned lanes, T own, int source) {
  static_assert(sizeof(T) <= 8, "a shuffle moves up to 8 bytes");
  show(&own, sizeof own);
  join_warp(lanes);
  T value = own;
  if (source != lane()) {
    if (!(lanes & lanes_there() >> source & 1u))
      stop("a shuffle that reads a lane outside of its mask");
    see(source, &value, sizeof value);
  }
  join_warp(lanes);
  return value;
}
// Beyond the lanes of its group, of `width`, a lane has its own value.
inline int lane_or_own(int source, int width) {
  const int first = lane() / width * width;
  return source < first || source >= first + width ? lane() : source;
}

template <class T, class Change>
__attribute__((no_sanitize("thread"))) T changed(T* at, Change change) {
  visible();
  const T before = *at;
  *at = change(before);
  return before;
}

}  // namespace cuda_on_host

template <class T>
T __shfl_sync(unsigned lanes, T own, int source, int width = 32) {
  const int first = cuda_on_host::lane() / width * width;
  return cuda_on_host::of_lane(lanes, own, first + (source & (width - 1)));
}
template <class T>
T __shfl_down_sync(unsigned lanes, T own, unsigned by, int width = 32) {
  return cuda_on_host::of_lane(lanes, own,
                               cuda_on_host::lane_or_own(cuda_on_host::lane() + int(by), width));
}
template <class T>
T __shfl_up_sync(unsigned lanes, T own, unsigned by, int width = 32) {
  return cuda_on_host::of_lane(lanes, own,
                               cuda_on_host::lane_or_own(cuda_on_host::lane() - int(by), width));
}
template <class T>
T __shfl_xor_sync(unsigned lanes, T own, int with, int width = 32) {
  return cuda_on_host::of_lane(lanes, own,
                               cuda_on_host::lane_or_own(cuda_on_host::lane() ^ with, width));
}

template <class T>
T atomicAdd(T* at, T value) {
  return cuda_on_host::changed(at, [value](T before) { return T(before + value); });
}
template <class T>
T atomicMax(T* at, T value) {
  return cuda_on_host::changed(at, [value](T before) { return before < value ? value : before; });
}

inline float __fdiv_rn(float a, float b) { return a / b; }

// ---- The runtime

enum cudaError_t : int {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorLaunchFailure = 719,
};
using cudaStream_t = struct CUstream_st*;
enum cudaDeviceAttr { cudaDevAttrClockRate = 13 };

struct dim3 : cuda_on_host::Extent {
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : Extent{x, y, z} {}
};

inline cudaError_t cudaPeekAtLastError() { return cudaError_t(cuda_on_host::last_error); }
inline cudaError_t cudaGetLastError() {
  return cudaError_t(std::exchange(cuda_on_host::last_error, cudaSuccess));
}
inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  return *value = cuda_on_host::clock_rate(), cudaSuccess;
}

// Memory of the host, counted; none is left where the count says so.
inline cudaError_t cudaMallocAsync(void** memory, size_t bytes, cudaStream_t) {
  const bool there = cuda_on_host::take_allocation();
  *memory = there ? ::operator new(bytes) : nullptr;
  return there ? cudaSuccess : cudaError_t(cuda_on_host::last_error = cudaErrorMemoryAllocation);
}
inline cudaError_t cudaFreeAsync(void* memory, cudaStream_t) {
  cuda_on_host::give_allocation();
  return ::operator delete(memory), cudaSuccess;
}
enum cudaMemcpyKind { cudaMemcpyHostToDevice = 1 };
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                                   cudaStream_t) {
  return std::memcpy(to, from, bytes), cudaSuccess;
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }

enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel* kernel, cudaFuncAttribute, int bytes) {
  return cudaError_t(
      cuda_on_host::allow_shared(reinterpret_cast<const void*>(kernel), size_t(bytes)));
}

struct cudaLaunchAttribute;
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
  cudaLaunchAttribute* attrs = nullptr;
  unsigned numAttrs = 0;
};

namespace cuda_on_host {
template <class... Parameters>
const char* types_of() {
  return __PRETTY_FUNCTION__;
}
}  // namespace cuda_on_host

// Done when it returns: what orders streams is not here.
template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  static_assert((sizeof(Parameters) + ... + 0) <= 4096, "what every device takes of parameters");
  using Kernel = void (*)(Parameters...);
  const std::tuple<Kernel, Parameters...> bound(kernel, std::forward<Arguments>(arguments)...);
  const auto call = [](const void* tuple) {
    std::apply([](Kernel k, const Parameters&... p) { k(p...); },
               *static_cast<const std::tuple<Kernel, Parameters...>*>(tuple));
  };
  return cudaError_t(cuda_on_host::launch(
      {config->gridDim, config->blockDim, config->dynamicSmemBytes, call, &bound,
       reinterpret_cast<const void*>(kernel), cuda_on_host::types_of<Parameters...>()}));
}
