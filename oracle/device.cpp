// Finding, loading and probing the module of devices.
#include "oracle/device.hpp"

#include <dlfcn.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>
#include <mutex>
#include <optional>
#include <sstream>

#include "oracle/comm/mpi_protocol.hpp"
#include "oracle/registry.hpp"

namespace shardproof {
namespace {

const DeviceModule& load_module() {
  std::string tried;
  const std::string file = find_module(device_module_name, &tried);
  if (file.empty())
    throw Infrastructure(
        fmt::format("device=cuda: expected the module {} in one of {}; build with CUDA",
                    device_module_name, tried));
  void* handle = ::dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!handle) throw Infrastructure(fmt::format("cannot load {}: {}", file, ::dlerror()));
  const auto open = reinterpret_cast<OpenDeviceModule>(::dlsym(handle, open_device_module_name));
  const DeviceModule* module = open ? open() : nullptr;
  if (!module || module->interface != DeviceModule::current)
    throw Infrastructure(
        fmt::format("{}: expected a module of interface {}, met {}; build program and module "
                    "from one tree",
                    file, DeviceModule::current,
                    module ? std::to_string(module->interface) : "one without an entry"));
  return *module;
}

// Plain data for a pipe.
struct Answer {
  int32_t code = 0, devices = 0, loaded = 0;
  char text[512] = {}, module[128] = {}, settings[4096] = {};
};

Answer ask_here() {
  Answer a;
  try {
    const DeviceModule& module = load_module();
    int devices = 0;
    a.code = module.api.count(&devices);
    a.devices = devices;
    a.loaded = 1;
    std::snprintf(a.module, sizeof a.module, "%s", module.description);
    std::snprintf(a.text, sizeof a.text, "%s", module.api.text(a.code));
    std::snprintf(a.settings, sizeof a.settings, "%s", module.settings().c_str());
  } catch (const std::exception& e) {
    std::snprintf(a.text, sizeof a.text, "%s", e.what());
  }
  return a;
}

bool read_answer(int fd, Answer& answer) {
  constexpr int patience_ms = 120'000;  // the first call on a device
  size_t got = 0;
  while (got < sizeof answer) {
    pollfd p{fd, POLLIN, 0};
    const int ready = ::poll(&p, 1, patience_ms);
    if (ready < 0 && errno == EINTR) continue;
    if (ready <= 0) return false;
    const ssize_t n = ::read(fd, reinterpret_cast<char*>(&answer) + got, sizeof answer - got);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    got += size_t(n);
  }
  return true;
}

std::string reason_of(const DeviceProbe& probe) {
  if (probe.code == no_driver) return fmt::format("no driver, {}", no_driver);
  if (probe.code == no_device || (probe.code == 0 && probe.devices == 0))
    return fmt::format("no device, {}", no_device);
  if (probe.code == 0) return "";
  throw Infrastructure(
      fmt::format("device=cuda: expected the device count, or code {} (no driver) or {} (no "
                  "device), met {}: {}; repair the driver, or run without --device cuda",
                  no_driver, no_device, probe.code, probe.text));
}

std::optional<DeviceProbe> probed;  // once a process: devices do not come and go

}  // namespace

const DeviceModule& device_module() {
  static std::mutex lock;
  static const DeviceModule* loaded = nullptr;
  std::lock_guard hold(lock);
  if (!loaded) loaded = &load_module();
  return *loaded;
}

std::unique_ptr<Kernel> make_device_kernel(const std::string& contract, const std::string& control,
                                           const std::string& subject) {
  const DeviceModule& module = device_module();
  for (const DeviceKernel& k : module.kernels)
    if (k.contract == contract && k.control == control &&
        (!control.empty() || k.subject == subject))
      return k.make();
  throw Infrastructure(
      fmt::format("expected a kernel for {}{} in {} ({}), met {} others; build "
                  "program and module from one tree",
                  contract, control.empty() ? "" : " control=" + control, device_module_name,
                  module.description, module.kernels.size()));
}

void add_ours_on_device(Registry& registry, const std::string& contract, Declared declared) {
  registry.add(Subject{device_subject, contract,
                       [contract] { return make_device_kernel(contract); }, std::move(declared)});
}

const Subject& subject_under_test(const Case& line, const Registry& registry) {
  const std::string& named = line.text("subject");
  if (on_device(line) && named.empty())
    for (const Subject& s : registry.subjects())
      if (s.contract == line.contract && s.name == device_subject) return s;
  return registry.subject(line.contract, named);
}

bool on_device(const Control& c, const Registry& registry) {
  return c.make && on_device(parse(c.witness, registry));
}

bool on_device(const Case& line) { return line.has("device") && line.text("device") == "cuda"; }

DeviceProbe probe_devices() {
  int ends[2];
  if (::pipe(ends) != 0)
    throw Infrastructure(fmt::format("no pipe to ask for devices: {}", std::strerror(errno)));
  const pid_t child = ::fork();
  if (child < 0) throw Infrastructure(fmt::format("fork: {}", std::strerror(errno)));
  if (child == 0) {
    const Answer a = ask_here();
    const bool sent = ::write(ends[1], &a, sizeof a) == ssize_t(sizeof a);
    ::_exit(sent ? 0 : 1);
  }
  ::close(ends[1]);
  Answer answer;
  const bool whole = read_answer(ends[0], answer);
  ::close(ends[0]);
  if (!whole) ::kill(child, SIGKILL);
  int status = 0;
  while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  if (!whole)
    throw Infrastructure(fmt::format(
        "the process that asked for devices brought no answer ({}); does {} load on this machine?",
        WIFSIGNALED(status) ? fmt::format("signal {}", WTERMSIG(status))
                            : fmt::format("exit code {}", WEXITSTATUS(status)),
        device_module_name));
  if (!answer.loaded) throw Infrastructure(answer.text);
  return {answer.code, answer.devices, answer.text, answer.module, answer.settings};
}

std::string device_missing() {
  if (find_module(device_module_name).empty()) return device_missing_unasked();
  if (!probed) probed = probe_devices();
  return reason_of(*probed);
}

std::map<std::string, std::string> device_settings() {
  std::map<std::string, std::string> settings;
  std::istringstream lines(probed ? probed->settings : "");
  for (std::string line; std::getline(lines, line);)
    if (const size_t at = line.find('='); at != std::string::npos)
      settings["device." + line.substr(0, at)] = line.substr(at + 1);
  return settings;
}

int devices_probed() { return probed ? probed->devices : 0; }

std::string device_description() { return probed ? probed->module : ""; }

std::string device_missing_unasked() {
  return find_module(device_module_name).empty() ? "no CUDA in this build" : "not asked for";
}

}  // namespace shardproof
