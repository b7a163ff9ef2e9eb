// Memory of the executor on a device: allocated, filled and released in order of the stream.
#include <cstdint>
#include <memory>
#include <vector>

#include "oracle/cuda/spin.hpp"
#include "primitives/code_text.hpp"
#include "primitives/cuda/blas.hpp"
#include "primitives/cuda/memory.hpp"
#include "primitives/cuda/noted.hpp"
#include "primitives/launch.hpp"

namespace shardproof::primitives {

int cuda::keep_memory(int device) {
  cudaMemPool_t pool = nullptr;
  uint64_t kept = uint64_t(64) << 20;
  const int code = noted(cudaDeviceGetDefaultMemPool(&pool, device));
  return code ? code : noted(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &kept));
}

namespace executor {

using cuda::noted;

const char* text(int code) { return cuda::text_of(code); }
bool on_device() { return true; }
int memory_left(size_t* bytes) {
  size_t whole = 0;
  return noted(cudaMemGetInfo(bytes, &whole));
}

int allocate(void** memory, size_t bytes, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  const int code = noted(cudaMallocAsync(memory, bytes ? bytes : 1, s));
  return code ? code : noted(cudaMemsetAsync(*memory, 0xFF, bytes, s));
}
int release(void* memory, void* stream) {
  return noted(cudaFreeAsync(memory, static_cast<cudaStream_t>(stream)));
}

// Whether the runtime has read pageable memory when it returns depends on the machine: a copy stays
// until the stream is past it.
int upload(void* to, const void* from, size_t bytes, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  const auto* first = static_cast<const char*>(from);
  auto copy = std::make_unique<std::vector<char>>(first, first + bytes);
  int code = noted(cudaMemcpyAsync(to, copy->data(), bytes, cudaMemcpyHostToDevice, s));
  if (code) return code;
  code = noted(cudaLaunchHostFunc(
      s, [](void* p) { delete static_cast<std::vector<char>*>(p); }, copy.get()));
  if (code)
    noted(cudaStreamSynchronize(s));
  else
    copy.release();
  return code;
}

int download(void* to, const void* from, size_t bytes, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  const int code = noted(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, s));
  return code ? code : noted(cudaStreamSynchronize(s));
}

int order(void* later, void* earlier) {
  cudaEvent_t event = nullptr;
  int code = noted(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  if (code) return code;
  code = noted(cudaEventRecord(event, static_cast<cudaStream_t>(earlier)));
  if (!code) code = noted(cudaStreamWaitEvent(static_cast<cudaStream_t>(later), event, 0));
  const int destroyed =
      noted(cudaEventDestroy(event));  // the runtime keeps it until it is complete
  return code ? code : destroyed;
}

int pause(void* stream, int64_t nanoseconds) { return spin(nanoseconds, stream); }

}  // namespace executor
}  // namespace shardproof::primitives
