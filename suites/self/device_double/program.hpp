// The double, in the process of a test and as the module of the program.
#pragma once
#include <dlfcn.h>
#include <fmt/format.h>
#include <sys/wait.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <stdexcept>
#include <string>

#include "oracle/device.hpp"

namespace shardproof::doubles {

inline std::filesystem::path here() {
  return std::filesystem::read_symlink("/proc/self/exe").parent_path();
}
inline std::string double_folder() { return (here() / "device_double").string(); }

inline const DeviceModule* open_module(const std::filesystem::path& file) {
  void* handle = ::dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!handle) throw std::runtime_error(::dlerror());
  return reinterpret_cast<OpenDeviceModule>(::dlsym(handle, open_device_module_name))();
}
inline const DeviceModule& double_module() {
  static const DeviceModule* module =
      open_module(std::filesystem::path(double_folder()) / device_module_name);
  return *module;
}
inline const DeviceApi& double_api() { return double_module().api; }

// What a test asks of the double: streams that do nothing before the host waits, where it does not
// say `fast`.
inline const bool lazy_streams = ::setenv("SHARDPROOF_DOUBLE_STREAMS", "lazy", 1) == 0;
inline constexpr const char* fast = "SHARDPROOF_DOUBLE_STREAMS=fast";

struct Ran {
  int exit = -1;
  std::string text;
  bool says(const std::string& part) const { return text.find(part) != std::string::npos; }
};

inline Ran shell(const std::string& command) {
  Ran ran;
  FILE* pipe = ::popen((command + " 2>&1").c_str(), "r");
  std::array<char, 4096> part;
  for (size_t n; (n = std::fread(part.data(), 1, part.size(), pipe)) > 0;)
    ran.text.append(part.data(), n);
  const int status = ::pclose(pipe);
  ran.exit = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  return ran;
}
inline Ran program(const std::string& words, const std::string& environment = "") {
  return shell(fmt::format("SHARDPROOF_MODULES={} {} {} {}", double_folder(), environment,
                           (here() / "shardproof").string(), words));
}

}  // namespace shardproof::doubles
