// The entry of worker.hpp: one pointer, set by the transport that starts programs.
#include "oracle/worker.hpp"

namespace shardproof {

namespace {
WorkerMain entry = nullptr;
}

void set_worker_main(WorkerMain main) { entry = main; }
WorkerMain worker_main() { return entry; }

}  // namespace shardproof
