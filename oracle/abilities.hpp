// What this build and this machine can run.
#pragma once
#include <string>
#include <vector>

#include "oracle/gate.hpp"

namespace shardproof {

// Names of lanes, whether or not they can be had: transports, and `staged` for device=cuda over
// one.
std::vector<std::string> lane_names();
// As abilities(), without asking for devices: a run on the host does not pay for that.
std::vector<Ability> abilities_unasked();

}  // namespace shardproof
