// `shardproof --worker ...`: the program started again as one rank (by mpiexec).
#pragma once

namespace shardproof {

class Registry;
int worker_main(int argc, char** argv, const Registry&);

}  // namespace shardproof
