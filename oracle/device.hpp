// What the judge asks of a device, as a table of calls that a module offers. The program links no
// CUDA: a rank loads shardproof_cuda.so after it was forked, when a line says device=cuda; the
// parent never does. Whatever offers the table is a device, so everything above it is tested
// without one.
#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>

#include "oracle/cuda/digest.hpp"
#include "oracle/subject.hpp"

namespace shardproof {

using Event = void*;

// Each call returns the code of the runtime: 0 is success. Copies and fills are enqueued on the
// stream and complete at the latest when it was synchronised; until then the source must not change
// and the target must not be read.
struct DeviceApi {
  int (*count)(int* devices);
  int (*use)(int device);  // for the calling thread
  int (*allocate)(void** memory, size_t bytes);
  int (*release)(void* memory);
  int (*allocate_pinned)(void** memory, size_t bytes);  // host memory that a device copies at once
  int (*release_pinned)(void* memory);
  int (*copy_in)(void* device, const void* host, size_t bytes, Stream);
  int (*copy_out)(void* host, const void* device, size_t bytes, Stream);
  int (*copy_within)(void* to, const void* from, size_t bytes, Stream);
  int (*fill)(void* device, int byte, size_t bytes, Stream);
  int (*create_stream)(Stream*);
  int (*destroy_stream)(Stream);
  int (*synchronise)(Stream);
  int (*create_event)(Event*);
  int (*destroy_event)(Event);
  int (*record)(Event, Stream);
  int (*await)(Event);          // the host waits; an event that was never recorded is complete
  int (*query)(Event);          // 0 where it is complete, not_ready where it is not
  int (*order)(Stream, Event);  // what comes next on the stream is done behind the event
  // x = x / ranks, rounded once (integers: towards 0)
  int (*divide)(void* memory, int64_t elements, DType, int ranks, Stream);
  const char* (*text)(int code);  // of a code of the calls above
  // What comes next on the stream begins that much later; the host does not wait.
  int (*spin)(Stream, int64_t nanoseconds);
  // oracle/cuda/digest.hpp; `sum` lies on the device and is added to.
  int (*digest)(const void*, uint64_t elements, const shardproof_hash&, uint64_t first, DigestParts,
                shardproof_digest* sum, Stream);
};

// Bare work that the bench measures others against.
struct DeviceBench {
  int (*sum_of_words)(const void*, uint64_t words, uint64_t* sum, Stream);
  // c [m, n] = op(a) op(b) by the module's library, row-major and contiguous, sums as of a linear.
  int (*gemm)(DType, int64_t m, int64_t n, int64_t k, const void* a, bool a_turned, const void* b,
              bool b_turned, void* c, Stream);
};

// NCCL. Each call returns NCCL's code. Communicators do not block: what was asked of one may still
// be under way (nccl_in_progress) until async_error says nccl_success, and until then nothing else
// is asked of it. Reductions are sum, avg (floating types) and max; counts are elements.
using NcclComm = void*;
inline constexpr int nccl_success = 0, nccl_device_error = 1, nccl_remote_error = 6,
                     nccl_in_progress = 7;
inline constexpr size_t nccl_id_bytes = 128;
struct NcclApi {
  int (*version)(int*);
  int (*unique_id)(void* bytes, size_t capacity);
  const char* (*text)(int code);
  const char* (*last_error)();  // in words, of the process
  int (*create)(NcclComm*, int ranks, const void* id, int rank);
  int (*async_error)(NcclComm, int* code);
  int (*abort)(NcclComm);  // ends what it has on its streams, and frees it
  int (*group_start)();
  int (*group_end)();
  int (*all_reduce)(const void* in, void* out, size_t, DType, Reduce, NcclComm, Stream);
  int (*all_gather)(const void* in, void* out, size_t of_each, DType, NcclComm, Stream);
  int (*reduce_scatter)(const void* in, void* out, size_t of_each, DType, Reduce, NcclComm, Stream);
  int (*broadcast)(const void* in, void* out, size_t, DType, int root, NcclComm, Stream);
  int (*send)(const void* in, size_t, DType, int to, NcclComm, Stream);
  int (*receive)(void* out, size_t, DType, int from, NcclComm, Stream);
  int64_t most_elements;  // of a call
};

struct DeviceKernel {
  const char* contract;
  std::unique_ptr<Kernel> (*make)();
  const char* control = "";      // a broken kernel: the name of its control
  const char* subject = "cuda";  // the name under which a healthy one is registered
};

// Our subject on a device is registered under this name, and takes the place of ours on lines with
// device=cuda. It is made from the module, on the rank.
inline constexpr const char* device_subject = "cuda";
// The same with factors of f32 products rounded to TF32: judged where it is asked for by name.
inline constexpr const char* tf32_subject = "cuda_tf32";
inline bool is_device_subject(const std::string& name) {
  return name == device_subject || name == tf32_subject;
}

// What a module returns from its one entry.
struct DeviceModule {
  static constexpr uint32_t current = 4;
  uint32_t interface = current;
  const char* description = "";  // "CUDA runtime 13.0, cuBLAS 13.0, NCCL 2.27.7"
  DeviceApi api;
  NcclApi nccl;
  DeviceBench bench;
  std::span<const DeviceKernel> kernels;
  // Lines "name=value": driver, devices, and what the environment sets of cuBLAS and NCCL.
  std::string (*settings)() = [] { return std::string(); };
};
using OpenDeviceModule = const DeviceModule* (*)();
inline constexpr const char* open_device_module_name = "shardproof_device_module";
inline constexpr const char* device_module_name = "shardproof_cuda.so";

// A call to the device failed. Where the code outlives the call (a kernel that wrote to a wrong
// address), the process is left without a device: the rank ends, and its case is crashed.
struct DeviceError : std::runtime_error {
  int code;
  DeviceError(int c, const std::string& why) : std::runtime_error(why), code(c) {}
};

// On a rank, at the first call of the process. Throws Infrastructure.
const DeviceModule& device_module();
std::unique_ptr<Kernel> make_device_kernel(const std::string& contract,
                                           const std::string& control = "",
                                           const std::string& subject = device_subject);
// Ours on a device, as the module makes it.
class Registry;
void add_ours_on_device(Registry&, const std::string& contract, Declared = {});
bool on_device(const Case&);  // device=cuda
// A broken kernel of a device: its witness says device=cuda, and it is judged nowhere else.
struct Control;
bool on_device(const Control&, const Registry&);
// What the line's `subject` names: on a device ours is the one registered as device_subject, where
// the contract has one.
const Subject& subject_under_test(const Case&, const Registry&);

// ---- in the parent

// cudaErrorInsufficientDriver, cudaErrorNoDevice, cudaErrorMemoryAllocation, cudaErrorNotReady
inline constexpr int no_driver = 35, no_device = 100, out_of_memory = 2, not_ready = 600;

// What a child that is gone again saw.
struct DeviceProbe {
  int code = 0, devices = 0;
  std::string text, module, settings;  // of the code; what the module said of itself
};
// Forks, loads the module there and counts devices. Throws Infrastructure where the child brings
// back no answer.
DeviceProbe probe_devices();

// How many there are, where device_missing has looked; else 0.
int devices_probed();
// Why device=cuda cannot be had: no module, no driver, no device; "" where it can. Probes once.
// Every other code is a failure: throws Infrastructure.
std::string device_missing();
// What the module said of itself when it was probed; "" where it was not.
std::string device_description();
// Driver, devices and effective settings, as it said them then.
std::map<std::string, std::string> device_settings();
// The same as device_missing without a probe, for a run that asks for no device.
std::string device_missing_unasked();

}  // namespace shardproof
