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

int order(void* later, void* earlier) {
  cudaEvent_t event = nullptr;
  int code = cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
  if (code) return code;
  code = cudaEventRecord(event, static_cast<cudaStream_t>(earlier));
  if (!code) code = cudaStreamWaitEvent(static_cast<cudaStream_t>(later), event, 0);
  const int destroyed = cudaEventDestroy(event);  // the runtime keeps it until it is complete
  return code ? code : destroyed;
}

}  // namespace shardproof::primitives::executor
