// What a control throws where this machine has less than it needs to show its bug: it stays
// unproven, for this reason.
#pragma once
#include "oracle/comm/door.hpp"

namespace shardproof {

struct MachineTooSmall : Infrastructure {
  using Infrastructure::Infrastructure;
};

}  // namespace shardproof
