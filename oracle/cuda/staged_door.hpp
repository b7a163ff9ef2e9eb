// Decorator: device buffers over a transport that moves host memory, through pinned memory.
//
//   start   device in -> pinned, on the caller's stream; the host waits for it; the call on pinned
//   wait    the call; pinned out -> device, on the caller's stream
//
// Work that the caller enqueues on its stream after wait sees the result; the host does not wait
// for the copy back. A pinned block is used again only when the event behind its last copy is
// complete. What the transport leaves unwritten reaches the device as poison. Host views pass
// through. In a group of one rank the result is a copy on the device, enqueued by start.
#pragma once
#include <map>
#include <memory>
#include <vector>

#include "oracle/cuda/device_context.hpp"

namespace shardproof {

class StagedDoor : public Door {
 public:
  StagedDoor(const DeviceContext& device, Door& next);
  ~StagedDoor() override;
  Ticket start(const Call&, const View& in, const View& out, Stream) override;
  void wait(Ticket, Stream) override;

 private:
  struct Block;  // pinned memory and the event behind its last use
  struct Flight;
  std::unique_ptr<Block> block(size_t bytes);
  View stage_in(const View& in, Stream, Block&) const;
  const DeviceContext& device_;
  Door& next_;
  std::vector<std::unique_ptr<Block>> free_;
  std::map<Ticket, std::unique_ptr<Flight>> flights_;
  Ticket copies_ = 0;
};

}  // namespace shardproof
