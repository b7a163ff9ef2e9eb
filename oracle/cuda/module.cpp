// shardproof_cuda.so: the table of device.hpp over the CUDA runtime, and our kernels on it. The one
// object file of the project that calls CUDA from the host, beside the kernels themselves; cuBLAS
// and NCCL are linked here and nowhere else.
#include <cublas_v2.h>
#include <cuda_runtime.h>
#include <nccl.h>

#include <cstdlib>
#include <cstring>
#include <string>

#include "oracle/cuda/digest.hpp"
#include "oracle/cuda/divide.hpp"
#include "oracle/cuda/spin.hpp"
#include "primitives/cuda/blas.hpp"
#include "primitives/cuda/device_kernels.hpp"
#include "primitives/cuda/memory.hpp"
#include "primitives/cuda/noted.hpp"

namespace shardproof {
namespace {

static_assert(no_driver == cudaErrorInsufficientDriver && no_device == cudaErrorNoDevice &&
              out_of_memory == cudaErrorMemoryAllocation && not_ready == cudaErrorNotReady &&
              primitives::executor::out_of_memory == out_of_memory);
static_assert(nccl_success == ncclSuccess && nccl_device_error == ncclUnhandledCudaError &&
              nccl_remote_error == ncclRemoteError && nccl_in_progress == ncclInProgress &&
              nccl_id_bytes == sizeof(ncclUniqueId) && sizeof(NcclComm) == sizeof(ncclComm_t));
static_assert(sizeof(Stream) == sizeof(cudaStream_t) && sizeof(Event) == sizeof(cudaEvent_t));

cudaStream_t stream_of(Stream s) { return static_cast<cudaStream_t>(s); }
cudaEvent_t event_of(Event e) { return static_cast<cudaEvent_t>(e); }

using primitives::cuda::noted;

constexpr DeviceApi cuda_runtime = {
    .count = [](int* devices) { return noted(cudaGetDeviceCount(devices)); },
    // Ranks and worlds side by side are often more than cores: one that waits lets others go on.
    .use =
        [](int device) {
          int code =
              noted(cudaInitDevice(device, cudaDeviceScheduleYield, cudaInitDeviceFlagsAreValid));
          if (!code) code = noted(cudaSetDevice(device));
          return code ? code : primitives::cuda::keep_memory(device);
        },
    .allocate = [](void** memory, size_t bytes) { return noted(cudaMalloc(memory, bytes)); },
    .release = [](void* memory) { return noted(cudaFree(memory)); },
    .allocate_pinned = [](void** memory,
                          size_t bytes) { return noted(cudaMallocHost(memory, bytes)); },
    .release_pinned = [](void* memory) { return noted(cudaFreeHost(memory)); },
    .copy_in =
        [](void* to, const void* from, size_t bytes, Stream s) {
          return noted(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream_of(s)));
        },
    .copy_out =
        [](void* to, const void* from, size_t bytes, Stream s) {
          return noted(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream_of(s)));
        },
    .copy_within =
        [](void* to, const void* from, size_t bytes, Stream s) {
          return noted(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream_of(s)));
        },
    .fill = [](void* memory, int byte, size_t bytes,
               Stream s) { return noted(cudaMemsetAsync(memory, byte, bytes, stream_of(s))); },
    // Not ordered with the default stream: what a kernel puts there by mistake is seen to be
    // unordered.
    .create_stream =
        [](Stream* s) {
          return noted(
              cudaStreamCreateWithFlags(reinterpret_cast<cudaStream_t*>(s), cudaStreamNonBlocking));
        },
    .destroy_stream = [](Stream s) { return noted(cudaStreamDestroy(stream_of(s))); },
    .synchronise = [](Stream s) { return noted(cudaStreamSynchronize(stream_of(s))); },
    .create_event =
        [](Event* e) {
          return noted(
              cudaEventCreateWithFlags(reinterpret_cast<cudaEvent_t*>(e), cudaEventDisableTiming));
        },
    .destroy_event = [](Event e) { return noted(cudaEventDestroy(event_of(e))); },
    .record = [](Event e, Stream s) { return noted(cudaEventRecord(event_of(e), stream_of(s))); },
    .await = [](Event e) { return noted(cudaEventSynchronize(event_of(e))); },
    .query = [](Event e) { return noted(cudaEventQuery(event_of(e))); },
    .order = [](Stream s,
                Event e) { return noted(cudaStreamWaitEvent(stream_of(s), event_of(e), 0)); },
    .divide =
        [](void* memory, int64_t elements, DType dtype, int ranks, Stream s) {
          return noted(cudaError_t(divide(memory, elements, int(dtype), ranks, s)));
        },
    .text = [](int code) { return primitives::cuda::text_of(code); },
    .spin = [](Stream s, int64_t nanoseconds) { return noted(cudaError_t(spin(nanoseconds, s))); },
    .digest =
        [](const void* memory, uint64_t elements, const shardproof_hash& hash, uint64_t first,
           DigestParts parts, shardproof_digest* sum, Stream s) {
          return noted(cudaError_t(digest_on_device(memory, elements, hash, first, parts, sum, s)));
        },
};

constexpr DeviceBench bench = {
    .sum_of_words =
        [](const void* memory, uint64_t words, uint64_t* sum, Stream s) {
          return noted(cudaError_t(sum_of_words(memory, words, sum, s)));
        },
    .gemm =
        [](DType dtype, int64_t m, int64_t n, int64_t k, const void* a, bool a_turned,
           const void* b, bool b_turned, void* c, Stream s) {
          return primitives::cuda::contiguous_gemm(primitives::Number(int(dtype)), m, n, k, a,
                                                   a_turned, b, b_turned, c, s);
        },
};

ncclComm_t comm_of(NcclComm c) { return static_cast<ncclComm_t>(c); }
ncclDataType_t type_of(DType d) {
  constexpr ncclDataType_t types[] = {ncclFloat64, ncclFloat32, ncclBfloat16,
                                      ncclFloat16, ncclInt64,   ncclInt32};
  return types[int(d)];
}
ncclRedOp_t reduction_of(Reduce r) {
  return r == Reduce::avg ? ncclAvg : r == Reduce::max ? ncclMax : ncclSum;
}

constexpr NcclApi nccl = {
    .version = [](int* v) { return int(ncclGetVersion(v)); },
    .unique_id =
        [](void* bytes, size_t capacity) {
          if (capacity < sizeof(ncclUniqueId)) return int(ncclInvalidArgument);
          ncclUniqueId id;
          const ncclResult_t code = ncclGetUniqueId(&id);
          if (code == ncclSuccess) std::memcpy(bytes, &id, sizeof id);
          return int(code);
        },
    .text = [](int code) { return ncclGetErrorString(ncclResult_t(code)); },
    .last_error = [] { return ncclGetLastError(nullptr); },
    .create =
        [](NcclComm* comm, int ranks, const void* id, int rank) {
          ncclUniqueId unique;
          std::memcpy(&unique, id, sizeof unique);
          ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
          config.blocking = 0;
          return int(ncclCommInitRankConfig(reinterpret_cast<ncclComm_t*>(comm), ranks, unique,
                                            rank, &config));
        },
    .async_error =
        [](NcclComm comm, int* code) {
          ncclResult_t state = ncclSuccess;
          const ncclResult_t asked = ncclCommGetAsyncError(comm_of(comm), &state);
          *code = state;
          return int(asked);
        },
    .abort = [](NcclComm comm) { return int(ncclCommAbort(comm_of(comm))); },
    .group_start = [] { return int(ncclGroupStart()); },
    .group_end = [] { return int(ncclGroupEnd()); },
    .all_reduce =
        [](const void* in, void* out, size_t n, DType d, Reduce r, NcclComm c, Stream s) {
          return int(
              ncclAllReduce(in, out, n, type_of(d), reduction_of(r), comm_of(c), stream_of(s)));
        },
    .all_gather =
        [](const void* in, void* out, size_t n, DType d, NcclComm c, Stream s) {
          return int(ncclAllGather(in, out, n, type_of(d), comm_of(c), stream_of(s)));
        },
    .reduce_scatter =
        [](const void* in, void* out, size_t n, DType d, Reduce r, NcclComm c, Stream s) {
          return int(
              ncclReduceScatter(in, out, n, type_of(d), reduction_of(r), comm_of(c), stream_of(s)));
        },
    .broadcast =
        [](const void* in, void* out, size_t n, DType d, int root, NcclComm c, Stream s) {
          return int(ncclBroadcast(in, out, n, type_of(d), root, comm_of(c), stream_of(s)));
        },
    .send = [](const void* in, size_t n, DType d, int to, NcclComm c,
               Stream s) { return int(ncclSend(in, n, type_of(d), to, comm_of(c), stream_of(s))); },
    .receive =
        [](void* out, size_t n, DType d, int from, NcclComm c, Stream s) {
          return int(ncclRecv(out, n, type_of(d), from, comm_of(c), stream_of(s)));
        },
    // Counts are size_t; some algorithms have held bytes in 32 bits, so a call stays below that.
    .most_elements = int64_t(1) << 28,
};

// 13000 -> "13.0"; cuBLAS and NCCL count alike with another hundred.
std::string dotted(int major, int minor) {
  return std::to_string(major) + "." + std::to_string(minor);
}

std::string description() {
  int runtime = 0, nccl_version = 0, cublas_major = 0, cublas_minor = 0;
  cudaRuntimeGetVersion(&runtime);
  ncclGetVersion(&nccl_version);
  cublasGetProperty(MAJOR_VERSION, &cublas_major);
  cublasGetProperty(MINOR_VERSION, &cublas_minor);
  return "CUDA runtime " + dotted(runtime / 1000, runtime % 1000 / 10) + ", cuBLAS " +
         dotted(cublas_major, cublas_minor) + ", NCCL " +
         dotted(nccl_version / 10000, nccl_version % 10000 / 100);
}

// What may change a result or a time, as it is set where this is asked.
std::string settings() {
  int driver = 0, count = 0;
  cudaDriverGetVersion(&driver);
  std::string text = "driver=" + dotted(driver / 1000, driver % 1000 / 10) + "\n";
  if (cudaGetDeviceCount(&count) != cudaSuccess) count = 0;
  for (int d = 0; d < count; ++d) {
    cudaDeviceProp p{};
    if (cudaGetDeviceProperties(&p, d) != cudaSuccess) continue;
    text += std::to_string(d) + "=" + p.name + ", sm_" + std::to_string(p.major * 10 + p.minor) +
            ", " + std::to_string(p.multiProcessorCount) + " multiprocessors, " +
            std::to_string(p.totalGlobalMem >> 20) + " MiB" + (p.ECCEnabled ? ", ECC" : "") + "\n";
  }
  for (const char* name :
       {"CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS",
        "NVIDIA_TF32_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG", "CUBLAS_EMULATE_SINGLE_PRECISION",
        "CUBLAS_EMULATE_DOUBLE_PRECISION", "CUBLAS_EMULATION_STRATEGY", "NCCL_ALGO", "NCCL_PROTO",
        "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE", "NCCL_NVLS_ENABLE",
        "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS", "NCCL_SOCKET_IFNAME"})
    if (const char* value = std::getenv(name)) text += std::string(name) + "=" + value + "\n";
  if (!std::getenv("NCCL_ALGO")) text += "NCCL_ALGO=Ring (set by the transport)\n";
  return text + primitives::cuda::blas_settings();
}

}  // namespace
}  // namespace shardproof

extern "C" const shardproof::DeviceModule* shardproof_device_module() {
  using namespace shardproof;
  static const std::string text = description();
  static const DeviceModule module{DeviceModule::current, text.c_str(), cuda_runtime, nccl, bench,
                                   cuda::device_kernels,  settings};
  return &module;
}
