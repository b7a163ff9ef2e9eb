// A door over anything that takes messages from rank to rank: MPI, sockets.
#pragma once
#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include "oracle/comm/meeting.hpp"
#include "oracle/comm/mpi_protocol.hpp"

namespace shardproof {

// Messages of one sender with one tag come in their order. Nothing blocks.
struct Wire {
  using Message = std::vector<std::byte>;
  virtual ~Wire() = default;
  virtual void send(int to, int tag, Message) = 0;
  virtual bool flush() = 0;  // goes on sending; true where nothing is left to send
  virtual std::optional<Message> take(int from, int tag) = 0;
};

struct MessageDoor : Door, Meeting {
  // Messages carry the number of their job. False where some of this one are still on their way:
  // then the world has to be started anew.
  virtual bool end_job() = 0;
};
// `fits_cores`: ranks have a core each, so that looking costs nobody's time.
std::unique_ptr<MessageDoor> message_door(Wire&, const MpiSession::Context&, bool fits_cores);

}  // namespace shardproof
