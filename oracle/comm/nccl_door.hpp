// Transport of device memory by NCCL. Bytes go from device to device; everything that ranks say to
// each other beside them goes over `host`, a transport of host memory that can also meet.
//
//   start   the members meet on the host (lockstep, so that NCCL never sees calls that do not
//           match); what the caller's stream holds comes first, then NCCL's call, on a stream of
//           the door's own
//   wait    what comes next on the caller's stream is done behind the call; the host does not wait
//
// Groups of one rank copy. In a world of one they are NCCL's all the same: it is all that one
// device can show of it.
//
// Communicators do not block: creating one, issuing a call and waiting for a stream are polled, and
// a deadline, an error of NCCL or a release by another rank aborts all of them, so that nothing
// hangs. One for each set of members, made at its first call and kept across cases.
//
// Host views are moved through device memory, and wait then waits for the copy back: the
// transport's self-test and fault operators, which edit host memory, run on NCCL too.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "oracle/comm/meeting.hpp"
#include "oracle/comm/world.hpp"
#include "oracle/cuda/device_context.hpp"

namespace shardproof {

class NcclDoor : public Door, private DeviceContext::Watcher {
 public:
  // `host` is a Meeting as well. Throws Infrastructure where the rank has no device of its own.
  NcclDoor(DeviceContext&, const NcclApi&, Door& host, RankState&, double deadline_scale);
  ~NcclDoor() override;
  NcclDoor(const NcclDoor&) = delete;
  NcclDoor& operator=(const NcclDoor&) = delete;
  Ticket start(const Call&, const View& in, const View& out, Stream) override;
  void wait(Ticket, Stream) override;
  // A rank may have lost a communicator in the job before: members agree on each again.
  void new_job();
  int communicators() const { return int(comms_.size()); }

 private:
  struct Comm {
    NcclComm handle = nullptr;
    bool agreed = false;  // by its members, in this job
  };
  struct Flight;
  template <class Done>
  void poll(const char* what, double seconds, const Done&);
  void settle(NcclComm, const char* what, double seconds);
  Comm& communicator(const Call&);
  bool any_lacks(const Call&, bool me);
  void create(Comm&, const Call&);
  void share_id(const Call&, std::byte* id);
  void issue(const Call&, NcclComm, const std::byte* in, std::byte* out, int64_t receives);
  void reduce(const Call&, NcclComm, const std::byte* in, std::byte* out, int64_t elements);
  void exchange(const Call&, NcclComm, const std::byte* in, std::byte* out, int64_t receives);
  void check(int code, const char* call);
  void look_at_others();
  Stream own_stream() const override { return own_; }
  void look(bool first) override;
  void looked() noexcept override { stand(Trace::running); }
  void stand(Trace::State) noexcept;
  void drain() noexcept override;
  [[noreturn]] void fail(int code, const char* call);
  [[noreturn]] void overdue(const char* what, double seconds);
  std::string errors() const;
  void abort_all();

  DeviceContext& device_;
  const NcclApi& nccl_;
  Door& host_;
  Meeting& meeting_;
  RankState& state_;
  const double scale_;
  Stream own_ = nullptr;
  Event ready_ = nullptr, last_ = nullptr;  // of the caller's stream; behind the last call
  bool in_flight_ = false;                  // last_ may not be complete
  int64_t since_ns_ = 0;                    // the host waits for last_
  std::map<std::vector<int>, Comm> comms_;
  std::map<Ticket, std::unique_ptr<Flight>> flights_;
  Ticket tickets_ = 0;
};

// Of this process: it is no kernel's fault how long that takes.
bool makes_a_communicator();

// Ranks whose jobs run with an NcclDoor over the host's: what `main` gets as its door. NCCL reduces
// in rings, whatever the message's size, unless NCCL_ALGO says otherwise.
RankMain with_nccl(RankMain main, double deadline_scale);

}  // namespace shardproof
