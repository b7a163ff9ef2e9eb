// The runtime's code as a number.
#pragma once
#include <cuda_runtime.h>

namespace shardproof::primitives::cuda {

// A failed call leaves its code behind, which the next launch would report as its own.
inline int noted(cudaError_t code) {
  if (code != cudaSuccess) cudaGetLastError();
  return code;
}

}  // namespace shardproof::primitives::cuda
