// The judge is tested in every run: faults planted in it, each of which must earn exactly the
// verdict that it deserves, and the transports' own test. A run in which one of them fails blames
// no primitive.
#pragma once
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "oracle/gate.hpp"
#include "oracle/gate_jobs.hpp"

namespace shardproof {

class Worlds;

const std::vector<Planted>&
planted_faults();  // suites/self/planted.cpp; all_families() registers them

// Planted faults and the self-test of each transport that is due, one after the other in this
// process.
void run_self(const Options&, const Registry&, const std::vector<Due>&, Worlds&, SelfResult&);
// The same as parts that run beside the cases. Transports whose ranks are no forked ones are tested
// by this call: their worlds live on for the cases.
std::vector<Part> self_parts(const Options&, const Registry&, const std::vector<Due>&, Worlds&,
                             SelfResult&);

std::map<std::string, std::string> versions();

}  // namespace shardproof
