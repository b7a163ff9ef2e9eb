// Ranks as MPI processes.
#pragma once
#include <memory>
#include <string>

#include "oracle/comm/world.hpp"

namespace shardproof {

std::string mpi_missing();  // why this build has no MPI ranks; "" where it has
std::unique_ptr<World> start_mpi_world(const WorldSpec&, RankMain);
// Entry of `shardproof --worker ...`: supervisor and rank. `main` runs the jobs.
int mpi_worker(int argc, char** argv, const RankMain& main);

}  // namespace shardproof
