// What the judge asks of a device, as a table of calls that a module offers. The program links no
// CUDA: a rank loads shardproof_cuda.so after it was forked, when a line says device=cuda; the
// parent never does. Whatever offers the table is a device, so everything above it is tested
// without one.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>

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
  int (*await)(Event);            // the host waits; an event that was never recorded is complete
  const char* (*text)(int code);  // of a code of the calls above
};

// NCCL, as far as it can be asked without a device.
struct NcclApi {
  int (*version)(int*);
  int (*unique_id)(void* bytes, size_t capacity);
  const char* (*text)(int code);
};

struct DeviceKernel {
  const char* contract;
  std::unique_ptr<Kernel> (*make)();
};

// What a module returns from its one entry.
struct DeviceModule {
  static constexpr uint32_t current = 1;
  uint32_t interface = current;
  const char* description = "";  // "CUDA runtime 13.0, cuBLAS 13.0, NCCL 2.27.7"
  DeviceApi api;
  NcclApi nccl;
  std::span<const DeviceKernel> kernels;
};
using OpenDeviceModule = const DeviceModule* (*)();
inline constexpr const char* open_device_module_name = "shardproof_device_module";
inline constexpr const char* device_module_name = "shardproof_cuda.so";

// Our subject on a device is registered under this name, and takes the place of ours on lines with
// device=cuda. It is made from the module, on the rank.
inline constexpr const char* device_subject = "cuda";

// A call to the device failed. Codes that outlive the call (a kernel that wrote to a wrong address)
// leave the process without a device: its world is given up after the case.
struct DeviceError : std::runtime_error {
  int code;
  DeviceError(int c, const std::string& why) : std::runtime_error(why), code(c) {}
};

// On a rank, at the first call of the process. Throws Infrastructure.
const DeviceModule& device_module();
std::unique_ptr<Kernel> make_device_kernel(const std::string& contract);
bool on_device(const Case&);  // device=cuda
// What the line's `subject` names: on a device ours is the one registered as device_subject, where
// the contract has one.
class Registry;
const Subject& subject_under_test(const Case&, const Registry&);

// ---- in the parent

// cudaErrorInsufficientDriver, cudaErrorNoDevice, cudaErrorMemoryAllocation
inline constexpr int no_driver = 35, no_device = 100, out_of_memory = 2;

// What a child that is gone again saw.
struct DeviceProbe {
  int code = 0, devices = 0;
  std::string text, module;  // of the code; the module's description
};
// Forks, loads the module there and counts devices. Throws Infrastructure where the child brings
// back no answer.
DeviceProbe probe_devices();

// Why device=cuda cannot be had: no module, no driver, no device; "" where it can. Probes once.
// Every other code is a failure: throws Infrastructure.
std::string device_missing();
// What the module said of itself when it was probed; "" where it was not.
std::string device_description();
// The same as device_missing without a probe, for a run that asks for no device.
std::string device_missing_unasked();

}  // namespace shardproof
