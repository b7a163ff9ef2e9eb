// What a door that moves its payloads elsewhere asks of the ranks' host side.
#pragma once
#include "oracle/comm/door.hpp"

namespace shardproof {

struct Meeting {
  virtual ~Meeting() = default;
  // Meets the members like the call, without its payload: lockstep, deadline and deadlock are those
  // of a call. `receives`: elements of `out`. Throws Released.
  virtual void meet(const Call&, int64_t receives) = 0;
  // Throws Released where another rank's end, or a deadline, has released this one.
  virtual void look() = 0;
  // Releases all ranks with this reason and where each of them stands, as far as is known here.
  virtual void release(Released::Cause, const std::string& why) = 0;
};

}  // namespace shardproof
