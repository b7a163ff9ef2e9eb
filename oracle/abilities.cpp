// What this build and this machine can run, and why not where they cannot.
#include "oracle/abilities.hpp"

#include <fmt/format.h>

#include "oracle/comm/mpi.hpp"
#include "oracle/device.hpp"
#include "oracle/gate.hpp"
#include "oracle/run.hpp"

namespace shardproof {

namespace {

std::string first_of(const std::string& a, const std::string& b) { return a.empty() ? b : a; }

std::vector<Ability> abilities(const std::string& no_mpi, const std::string& no_staged) {
  return {{"processes", true, ""},
          {"threads", true, ""},
          {"mpi", no_mpi.empty(), no_mpi},
          {"staged", no_staged.empty(), no_staged},
          {"nccl", no_staged.empty(), no_staged}};
}

// What a broken driver says is for those who only want to know.
std::string device_missing_in_words() try {
  return device_missing();
} catch (const Infrastructure& e) {
  return e.what();
}

}  // namespace

std::vector<Ability> abilities() { return abilities(mpi_missing(), device_missing_in_words()); }
std::vector<Ability> abilities_unasked() {
  return abilities(mpi_missing(), device_missing_unasked());
}

std::vector<std::string> lane_names() { return {"processes", "threads", "mpi", "staged", "nccl"}; }

std::string reason_unavailable(const std::string& transport, const std::string& device, int ranks) {
  const std::string carried = transport == "mpi" ? mpi_missing() : "";
  if (device != "cuda" && transport != "nccl") return carried;
  const std::string missing = first_of(carried, device_missing());
  // A launcher's ranks may be on many machines: there each looks for its own.
  const bool here = transport == "nccl" && missing.empty() && !outside_launch();
  if (here && ranks > devices_probed())
    return fmt::format("{} ranks need {} devices, {} there", ranks, ranks, devices_probed());
  return missing;
}

}  // namespace shardproof
