#define THRUST_FORCE_64_BIT_OFFSET_TYPE  // one set of kernels in place of two
#include "oracle/cuda/word_sum.hpp"

#include <cuda_runtime.h>
#include <thrust/system/cuda/execution_policy.h>
#include <thrust/system_error.h>

#include <new>

#include "oracle/cuda/digest.hpp"
#include "primitives/cuda/noted.hpp"

namespace shardproof {
namespace {

using primitives::cuda::noted;

// What Thrust needs beside the words, in order of the stream: no allocation waits for the device.
struct InOrder {
  using value_type = char;
  cudaStream_t stream;
  char* allocate(std::ptrdiff_t bytes) {
    void* memory = nullptr;
    if (noted(cudaMallocAsync(&memory, size_t(bytes), stream))) throw std::bad_alloc();
    return static_cast<char*>(memory);
  }
  void deallocate(char* memory, size_t) { noted(cudaFreeAsync(memory, stream)); }
};

}  // namespace

int sum_of_words(const void* memory, uint64_t count, uint64_t* sum, void* stream) try {
  InOrder beside{static_cast<cudaStream_t>(stream)};
  const uint64_t all = word_sum(thrust::cuda::par_nosync(beside).on(beside.stream),
                                static_cast<const uint64_t*>(memory), count);
  const int code =
      noted(cudaMemcpyAsync(sum, &all, sizeof all, cudaMemcpyHostToDevice, beside.stream));
  return code ? code : noted(cudaStreamSynchronize(beside.stream));
} catch (const thrust::system_error& e) {
  return e.code().value();
} catch (const std::bad_alloc&) {
  return cudaErrorMemoryAllocation;
}

}  // namespace shardproof
