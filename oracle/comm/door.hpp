// The one narrow door to other ranks. Everything behind the typed calls of Communicator is a Door:
// a transport, or a decorator that holds the next one.
//
//   subject -> Communicator -> call faults -> ledger -> lockstep -> payload faults -> delays ->
//   transport
#pragma once
#include <cstdint>
#include <cstring>
#include <memory>
#include <source_location>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "fixtures/placement.hpp"
#include "fixtures/tensor.hpp"

namespace shardproof {

enum class Op : uint8_t {
  all_reduce,
  all_gather,
  reduce_scatter,
  all_to_all,
  shift,
  broadcast,
  barrier
};
enum class Reduce : uint8_t { none, sum, avg, max };
const char* name(Op);
const char* name(Reduce);

// Members as world ranks, in group order. Every member builds the same one by itself.
struct Group {
  std::vector<int> members;
  int me = 0;         // my place among the members
  std::string label;  // "tp", "cp", "tp,cp", "world", "tp/2"
  uint64_t id = 0;    // hash of members: equal on all of them (group_id)
  int size() const { return int(members.size()); }
};
uint64_t group_id(std::span<const int> members);

// Buffers at the door are contiguous.
//   all_reduce      in [n], out [n]; in may be out
//   all_gather      in [n], out [p*n], block i from member i
//   reduce_scatter  in [p*n], out [n], my block of the sum
//   all_to_all      in sum(send), out sum(recv) elements; block i goes to / comes from member i
//   shift           in [n] to member (me + hop) mod p, out [m] from member (me - hop) mod p
//   broadcast       in [n] of member root, out [n]
//   barrier         nothing
struct Call {
  Op op = Op::barrier;
  Reduce reduce = Reduce::none;
  DType dtype = DType::f64;
  int64_t count = 0;  // elements of `in` (broadcast: of `out`)
  int root_or_hop = 0;
  const Group* group = nullptr;
  std::vector<int64_t> send, recv;  // all_to_all only: elements by member
  const char* file = "";
  int line = 0;  // the call site in the subject
};
inline const char* file_of(const char* path) {  // "linear_row.cpp"
  const char* slash = std::strrchr(path, '/');
  return slash ? slash + 1 : path;
}

using Stream = void*;  // null on the host
using Ticket = uint64_t;

struct Door {
  virtual ~Door() = default;
  // Begins a call; `in` and `out` stay untouched by the caller until wait returns.
  virtual Ticket start(const Call&, const View& in, const View& out, Stream) = 0;
  // The only place that waits: deadline, deadlock, release of others. Throws Released.
  virtual void wait(Ticket, Stream) = 0;
};

// Another rank's fault (or a deadline) ended this call; `why` is the same text on all ranks where
// it can be.
struct Released : std::runtime_error {
  // deadline: of one call, which others do not make; overdue: of the whole job, calls or none.
  enum Cause : uint8_t { mismatch, deadlock, deadline, peer_lost, world_ended, overdue } cause;
  Released(Cause c, const std::string& why) : std::runtime_error(why), cause(c) {}
};
// The harness or the machine failed; never blamed on a subject.
struct Infrastructure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

enum class Phase : uint8_t { idle, init, forward, backward, finish, harness };
const char* name(Phase);

// Where a rank stands: one a rank, in memory that outlives it (arena page or mapped file). Written
// by the rank, read by the parent and by peers that explain a hang. Plain data, no pointers.
struct Trace {
  enum State : uint8_t { running, waiting, left, dead } state = running;
  Phase phase = Phase::idle;
  Op op = Op::barrier;
  Reduce reduce = Reduce::none;
  DType dtype = DType::f64;
  bool returned = false;  // the call below has ended: the rank is behind it
  bool copied = false;    // a process that the rank forked came back from the kernel
  int32_t hop = 0;
  uint32_t case_number = 0, shot = 0;
  uint32_t calls_in_phase = 0;  // calls begun in this phase so far; the current one included
  int64_t count = 0;
  uint64_t group = 0;
  char label[24] = {};  // the group's
  int16_t members[64] = {};
  int16_t group_size = 0;
  char site[96] = {};    // "linear_row.cpp:41"
  int64_t since_ns = 0;  // monotonic clock, when `state` was entered
};

}  // namespace shardproof
