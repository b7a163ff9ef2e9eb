// The transports of this machine, as start_world finds them.
#pragma once
#include <memory>

#include "oracle/comm/world.hpp"

namespace shardproof {

std::unique_ptr<World> start_processes(const WorldSpec&, const RankMain&);
std::unique_ptr<World> start_threads(const WorldSpec&, const RankMain&);  // forked, or in_process

}  // namespace shardproof
