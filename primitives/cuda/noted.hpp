// The runtime's code as a number, of any call and of a launch.
#pragma once
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

namespace shardproof::primitives::cuda {

// A failed call leaves its code behind, which the next launch would report as its own.
inline int noted(cudaError_t code) {
  if (code != cudaSuccess) cudaGetLastError();
  return code;
}

// What any dimension of a grid may have; each block strides over what is left. The kernels on the
// host have less, so that their tests are soon beyond it.
#ifndef SHARDPROOF_MOST_BLOCKS
#define SHARDPROOF_MOST_BLOCKS 65535
#endif
constexpr int64_t most_blocks = SHARDPROOF_MOST_BLOCKS;
inline unsigned blocks(int64_t wanted) { return unsigned(std::min(wanted, most_blocks)); }

// A kernel on a stream, with the code of its launch, and with bytes of shared memory. The runtime's
// function, and not <<< >>>, so that a compiler of the host alone reads it too.
template <class... Parameters, class... Arguments>
int noted_launch_with(size_t shared, void (*kernel)(Parameters...), unsigned blocks,
                      unsigned threads, void* stream, const Arguments&... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = blocks, config.blockDim = threads, config.dynamicSmemBytes = shared;
  config.stream = static_cast<cudaStream_t>(stream);
  if (shared > 48 << 10) {  // more than a block has unasked
    const auto most = cudaFuncAttributeMaxDynamicSharedMemorySize;
    if (const int code = noted(cudaFuncSetAttribute(kernel, most, int(shared)))) return code;
  }
  return noted(cudaLaunchKernelEx(&config, kernel, arguments...));
}
template <class... Parameters, class... Arguments>
int noted_launch(void (*kernel)(Parameters...), unsigned blocks, unsigned threads, void* stream,
                 const Arguments&... arguments) {
  return noted_launch_with(0, kernel, blocks, threads, stream, arguments...);
}

}  // namespace shardproof::primitives::cuda
