// Ranks that torchrun started, or whatever else sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT
// as it does: they find each other by sockets, which carry what they say to each other beside NCCL.
#pragma once
#include "oracle/comm/mpi_protocol.hpp"

namespace shardproof {

// Rank 0 listens at MASTER_PORT or at one of the ports behind it: that port itself may be held by
// torchrun's own store. Throws Infrastructure where not all ranks come within 120 s.
MpiSession* open_tcp_session();

}  // namespace shardproof
