// Context-parallel attention whose tensors stay where they lie: the strategies of attention.hpp on
// the bodies of attention_tiles.hpp, for an executor on a device. Two stages, either may be absent:
//
//   exchange   tokens for heads inside a group, and back      alltoall: cp; hierarchical: a run
//   travel     keys and values to the queries                 allgather: gathered; ring: they turn;
//                                                             hierarchical: turn across the runs
//
// Calls, wire types and what they carry are those of the host's kernels.
#pragma once
#include <memory>

#include "oracle/subject.hpp"

namespace shardproof::primitives {

enum class Strategy { allgather, ring, alltoall, hierarchical };

std::unique_ptr<Kernel> blockwise_attention(Strategy);
std::unique_ptr<Kernel> blockwise_attention_block();  // a layer's attention around such a core

}  // namespace shardproof::primitives
