#include "oracle/cuda/staged_door.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

namespace shardproof {

struct StagedDoor::Block {
  const DeviceContext& device;
  size_t bytes;
  std::byte* memory;
  Event used;
  Block(const DeviceContext& d, size_t n)
      : device(d), bytes(n), memory(d.allocate_pinned(n)), used(d.create_event()) {}
  ~Block() {
    device.destroy(used);
    device.release_pinned(memory);
  }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
};

struct StagedDoor::Flight {
  std::unique_ptr<Block> in, out;  // `out` is empty where the call works in place
  View received;                   // pinned
  View target;                     // the caller's, on the device
};

namespace {

// Marks tickets of calls that the device completes by itself. A barrier of one issues no call.
constexpr Ticket copied = Ticket(1) << 61;

View pinned(const View& like, std::byte* memory) {
  return view_of(memory, like.dtype, like.shape, Space::pinned);
}

bool moves_device_memory(const View& in, const View& out) {
  return in.space == Space::device || out.space == Space::device;
}

}  // namespace

StagedDoor::StagedDoor(const DeviceContext& device, Door& next) : device_(device), next_(next) {}
// A case may end in the middle of a call: what the stream still copies, it copies out of the
// blocks.
StagedDoor::~StagedDoor() {
  try {
    device_.settle();
  } catch (const DeviceError&) {  // reported by the call that caused it
  }
}

// The smallest one that is free, once nothing copies from or to it any more.
std::unique_ptr<StagedDoor::Block> StagedDoor::block(size_t bytes) {
  auto best = free_.end();
  for (auto b = free_.begin(); b != free_.end(); ++b)
    if ((*b)->bytes >= bytes && (best == free_.end() || (*b)->bytes < (*best)->bytes)) best = b;
  if (best == free_.end()) return std::make_unique<Block>(device_, std::max<size_t>(bytes, 256));
  std::unique_ptr<Block> found = std::move(*best);
  free_.erase(best);
  device_.await(found->used);
  return found;
}

View StagedDoor::stage_in(const View& in, Stream stream, Block& b) const {
  device_.copy_out(b.memory, in.data, size_t(in.bytes()), stream);
  return pinned(in, b.memory);
}

Ticket StagedDoor::start(const Call& call, const View& in, const View& out, Stream stream) {
  if (!moves_device_memory(in, out)) {
    device_.synchronise(stream);  // a barrier orders what lies before it, on the device too
    return next_.start(call, in, out, nullptr);
  }
  if (call.group->size() == 1) {
    if (in.data != out.data) device_.copy_within(out.data, in.data, size_t(in.bytes()), stream);
    return copied | ++copies_;
  }
  auto flight = std::make_unique<Flight>();
  const bool in_place = in.data == out.data && in.bytes() == out.bytes();
  flight->in = block(size_t(in.bytes()));
  const View sent = stage_in(in, stream, *flight->in);
  flight->target = out;
  flight->received = sent;
  if (!in_place) {
    flight->out = block(size_t(out.bytes()));
    flight->received = pinned(out, flight->out->memory);
    fill_with_poison(flight->received);
  }
  device_.synchronise(stream);
  const Ticket t = next_.start(call, sent, flight->received, nullptr);
  flights_[t] = std::move(flight);
  return t;
}

void StagedDoor::wait(Ticket t, Stream stream) {
  if (t & copied) return;
  auto node = flights_.extract(t);
  next_.wait(t, nullptr);
  if (node.empty()) return;  // a call on host memory
  Flight& f = *node.mapped();
  device_.copy_in(f.target.data, f.received.data, size_t(f.target.bytes()), stream);
  for (auto* b : {&f.in, &f.out}) {
    if (!*b) continue;
    device_.record((*b)->used, stream);
    free_.push_back(std::move(*b));
  }
}

}  // namespace shardproof
