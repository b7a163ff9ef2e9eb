// The runtime's code as a number, of any call and of a launch.
#pragma once
#include <cuda_runtime.h>

namespace shardproof::primitives::cuda {

// A failed call leaves its code behind, which the next launch would report as its own.
inline int noted(cudaError_t code) {
  if (code != cudaSuccess) cudaGetLastError();
  return code;
}

// A kernel on a stream, with the code of its launch. The runtime's function, and not <<< >>>, so
// that a compiler of the host alone reads it too.
template <class... Parameters, class... Arguments>
int noted_launch(void (*kernel)(Parameters...), unsigned blocks, unsigned threads, void* stream,
                 const Arguments&... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = blocks, config.blockDim = threads;
  config.stream = static_cast<cudaStream_t>(stream);
  return noted(cudaLaunchKernelEx(&config, kernel, arguments...));
}

}  // namespace shardproof::primitives::cuda
