// Ranks as MPI processes.
#pragma once
#include <memory>
#include <optional>
#include <string>

#include "oracle/comm/world.hpp"

namespace shardproof {

std::string mpi_missing();  // why this build has no MPI ranks; "" where it has
std::unique_ptr<World> start_mpi_world(const WorldSpec&, RankMain);
// Started from outside, under mpiexec or srun, by the environment that these set: my rank and how
// many there are. Rank 0 is parent and rank at once, the others serve it; there is no isolation.
struct OutsideLaunch {
  int rank = 0, size = 1;
  std::string launcher;   // "PMI", "Open MPI", torchrun, "Slurm"
  std::string variables;  // that say so: "PMI_RANK and PMI_SIZE"
};
// Its ranks know no MPI: they meet by sockets, and NCCL is all that they can be judged on.
inline constexpr const char* torchrun = "torchrun";
std::optional<OutsideLaunch> outside_launch();
// Ranks 1 and up: run what rank 0 hands out, until its last word, which is the exit code.
int serve_outside(const RankMain&);
// Rank 0, at its end: lets the others go with this exit code.
void release_outside(int exit_code);

// Entry of `shardproof --worker ...`: supervisor and rank. `main` runs the jobs.
int mpi_worker(int argc, char** argv, const RankMain& main);

}  // namespace shardproof
