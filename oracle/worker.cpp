// The entry of worker.hpp: the one transport that starts programs is MPI.
#include "oracle/worker.hpp"

#include "oracle/comm/mpi.hpp"
#include "oracle/run.hpp"

namespace shardproof {

int worker_main(int argc, char** argv, const Registry& registry) {
  return mpi_worker(argc, argv, rank_main(registry));
}

}  // namespace shardproof
