// The judge is tested before anything else: faults planted in it, each of which must earn exactly
// the verdict that it deserves, and the transports' own test, before a primitive is blamed.
#pragma once
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "oracle/gate.hpp"

namespace shardproof {

class Worlds;

const std::vector<Planted>& planted_faults();  // suites/self/planted.cpp; all_families() registers them

// Planted faults and the self-test of each transport that is due; run by every gate.
SelfResult run_self(const Options&, const Registry&, const std::vector<Due>&, Worlds&);

std::map<std::string, std::string> versions();

}  // namespace shardproof
