// Names of what passes the door, and the identity of a group.
#include "oracle/comm/door.hpp"

namespace shardproof {

const char* name(Op op) {
  switch (op) {
    case Op::all_reduce:
      return "all_reduce";
    case Op::all_gather:
      return "all_gather";
    case Op::reduce_scatter:
      return "reduce_scatter";
    case Op::all_to_all:
      return "all_to_all";
    case Op::shift:
      return "shift";
    case Op::broadcast:
      return "broadcast";
    case Op::barrier:
      return "barrier";
  }
  return "unknown op";
}

const char* name(Reduce reduce) {
  switch (reduce) {
    case Reduce::none:
      return "none";
    case Reduce::sum:
      return "sum";
    case Reduce::avg:
      return "avg";
    case Reduce::max:
      return "max";
  }
  return "unknown reduction";
}

const char* name(Phase phase) {
  switch (phase) {
    case Phase::idle:
      return "idle";
    case Phase::init:
      return "init";
    case Phase::forward:
      return "forward";
    case Phase::backward:
      return "backward";
    case Phase::finish:
      return "finish";
    case Phase::harness:
      return "harness";
  }
  return "unknown phase";
}

// FNV-1a over the members in group order: two orders of one set are two groups.
uint64_t group_id(std::span<const int> members) {
  uint64_t hash = 0xcbf29ce484222325;
  const auto mix = [&hash](uint32_t word) {
    for (int byte = 0; byte < 4; ++byte) {
      hash = (hash ^ ((word >> (8 * byte)) & 0xff)) * 0x100000001b3;
    }
  };
  mix(uint32_t(members.size()));
  for (int member : members) mix(uint32_t(member));
  return hash;
}

}  // namespace shardproof
