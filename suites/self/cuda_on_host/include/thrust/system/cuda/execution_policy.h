#pragma once
#include <cuda_runtime.h>

namespace thrust::cuda {

template <class Allocator>
struct InOrderOf {
  Allocator* memory;
  cudaStream_t stream = nullptr;
  InOrderOf on(cudaStream_t s) const { return {memory, s}; }
};
template <class Allocator>
InOrderOf<Allocator> par_nosync(Allocator& memory) {
  return {&memory};
}

}  // namespace thrust::cuda
