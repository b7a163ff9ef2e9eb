// Memory of the executor on a device: allocated, filled and released in order of the stream.
#include <cuda_runtime.h>

#include "primitives/launch.hpp"

namespace shardproof::primitives::executor {

bool on_device() { return true; }

int allocate(void** memory, size_t bytes, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  const cudaError_t code = cudaMallocAsync(memory, bytes ? bytes : 1, s);
  return code ? code : cudaMemsetAsync(*memory, 0xFF, bytes, s);
}
int release(void* memory, void* stream) {
  return cudaFreeAsync(memory, static_cast<cudaStream_t>(stream));
}
// From pageable memory: the runtime has taken a copy when it returns.
int upload(void* to, const void* from, size_t bytes, void* stream) {
  return cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice,
                         static_cast<cudaStream_t>(stream));
}

int download(void* to, const void* from, size_t bytes, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  const cudaError_t code = cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, s);
  return code ? code : cudaStreamSynchronize(s);
}

int create_stream(void** stream) {
  return cudaStreamCreateWithFlags(reinterpret_cast<cudaStream_t*>(stream), cudaStreamNonBlocking);
}
int synchronise(void* stream) { return cudaStreamSynchronize(static_cast<cudaStream_t>(stream)); }

}  // namespace shardproof::primitives::executor
