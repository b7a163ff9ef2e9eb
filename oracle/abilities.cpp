// What this build and this machine can run, and why not where they cannot.
#include "oracle/comm/mpi.hpp"
#include "oracle/gate.hpp"
#include "oracle/run.hpp"

namespace shardproof {

std::vector<Ability> abilities() {
  const std::string no_mpi = mpi_missing();
  return {{"processes", true, ""},
          {"threads", true, ""},
          {"mpi", no_mpi.empty(), no_mpi},
          {"staged", false, "no CUDA subject in this build"},
          {"nccl", false, "no CUDA subject in this build"}};
}

std::string reason_unavailable(const std::string& transport, const std::string& device) {
  const std::string name = device == "cuda" && transport != "nccl" ? "staged" : transport;
  for (const Ability& a : abilities())
    if (a.name == name) return a.available ? "" : a.reason;
  return "unknown transport";
}

}  // namespace shardproof
