// `shardproof --worker ...`: the program started again as one rank (by mpiexec). What a transport
// does there is its own business; it hands its entry to the command once, before main.
#pragma once

namespace shardproof {

class Registry;
using WorkerMain = int (*)(int argc, char** argv, const Registry&);
void set_worker_main(WorkerMain);
WorkerMain worker_main();  // null: this build has no transport that starts programs

}  // namespace shardproof
