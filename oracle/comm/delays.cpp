// Random pauses around calls: they turn an order of events that the machine happens to favour into
// one of many, so that a result which depends on it differs between repeats.
#include <chrono>
#include <thread>

#include "fixtures/random.hpp"
#include "oracle/comm/faults.hpp"

namespace shardproof {

void DelayDoor::pause() {
  if (!on_) return;
  const uint64_t n = count_++;
  const auto bits = philox({uint32_t(n), uint32_t(n >> 32), uint32_t(state_.rank), 0},
                           {uint32_t(seed_), uint32_t(seed_ >> 32)});
  constexpr uint64_t longest_ns = 200'000;
  std::this_thread::sleep_for(std::chrono::nanoseconds(longest_ns * bits[0] >> 32));
}

Ticket DelayDoor::start(const Call& call, const View& in, const View& out, Stream stream) {
  pause();
  return next_.start(call, in, out, stream);
}

void DelayDoor::wait(Ticket ticket, Stream stream) {
  pause();
  next_.wait(ticket, stream);
}

}  // namespace shardproof
