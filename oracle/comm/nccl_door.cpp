#include "oracle/comm/nccl_door.hpp"

#include <fmt/format.h>
#include <sched.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <utility>

#include "oracle/comm/arena.hpp"

namespace shardproof {
namespace {

// A communicator that is not ready in time is given up before the job is, whose deadline (120 s)
// counts from an earlier moment.
constexpr double set_up_seconds = 100, drain_seconds = 1;
constexpr int yields_first = 100;
constexpr const char *creating = "creating a communicator", *issuing = "issuing a call";

bool power_of_two(int p) { return (p & (p - 1)) == 0; }
int modulo(int64_t a, int p) { return int((a % p + p) % p); }

// The trace says where the subject stands; what the door asks of the host beside that, it hides.
class SameTrace {
 public:
  explicit SameTrace(Trace* t) : trace_(t), kept_(t ? *t : Trace{}) {}
  ~SameTrace() {
    if (trace_) *trace_ = kept_;
  }

 private:
  Trace* trace_;
  const Trace kept_;
};

std::atomic<bool> is_made{false};  // read by signal handlers
struct Making {
  Making() { is_made = true; }
  ~Making() { is_made = false; }
};

// A call of the door's own to the members of `call`.
Call beside(const Call& call, Op op, Reduce reduce, int64_t count) {
  Call c;
  c.op = op;
  c.reduce = reduce;
  c.dtype = DType::i32;
  c.count = count;
  c.group = call.group;
  c.file = call.file;
  c.line = call.line;
  return c;
}

}  // namespace

bool makes_a_communicator() { return is_made; }

// What wait needs of a call, and the device memory through which host views go.
struct NcclDoor::Flight {
  explicit Flight(const DeviceContext& d) : device(d), done(d.create_event()) {}
  ~Flight() {
    for (std::byte* memory : {in, out})
      if (memory) device.release(memory);
    device.destroy(done);
  }
  Flight(const Flight&) = delete;
  Flight& operator=(const Flight&) = delete;
  std::byte* brought(const View& host, Stream stream) {
    std::byte* memory = device.allocate(std::max<size_t>(size_t(host.bytes()), 1));
    if (host.bytes() > 0) device.copy_in(memory, host.data, size_t(host.bytes()), stream);
    return memory;
  }

  const DeviceContext& device;
  Event done;
  View host_out;  // empty: the call went from device memory to device memory
  std::byte *in = nullptr, *out = nullptr;
};

NcclDoor::NcclDoor(DeviceContext& device, const NcclApi& nccl, Door& host, RankState& state,
                   double deadline_scale)
    : device_(device),
      nccl_(nccl),
      host_(host),
      meeting_(dynamic_cast<Meeting&>(host)),
      state_(state),
      scale_(deadline_scale) {
  if (device.shared())
    throw Infrastructure(fmt::format(
        "rank {}: expected a device of its own, met {} for the ranks of this machine, of "
        "which it is number {}; NCCL takes one rank a device: run fewer ranks, or "
        "transport=processes device=cuda",
        state.rank, device.devices(), device.local_rank()));
  own_ = device_.create_stream();
  ready_ = device_.create_event();
  last_ = device_.create_event();
  device_.watched_by(this);
}

NcclDoor::~NcclDoor() {
  abort_all();
  device_.watched_by(nullptr);
  flights_.clear();
  device_.destroy(ready_);
  device_.destroy(last_);
  device_.destroy_stream(own_);
}

void NcclDoor::new_job() {
  for (auto& [members, comm] : comms_) comm.agreed = false;
  flights_.clear();
}

Ticket NcclDoor::start(const Call& call, const View& in, const View& out, Stream stream) {
  const bool on_host = in.space != Space::device && out.space != Space::device;
  if (call.op == Op::barrier) {  // orders what lies before it, on the device too
    device_.synchronise(own_);
    if (stream) device_.synchronise(stream);
    meeting_.meet(call, 0);
    return ++tickets_;
  }
  auto flight = std::make_unique<Flight>(device_);
  if (!on_host) {
    device_.record(ready_, stream);
    device_.order(own_, ready_);
  }
  if (call.group->size() == 1 && state_.size > 1) {  // asks for no other rank
    if (on_host && in.bytes() > 0)
      std::memmove(out.data, in.data, size_t(in.bytes()));
    else if (in.data != out.data)
      device_.copy_within(out.data, in.data, size_t(in.bytes()), own_);
  } else {
    meeting_.meet(call, out.elements());
    const std::byte* from = in.data;
    std::byte* to = out.data;
    if (on_host) {
      flight->host_out = out;
      to = flight->out = flight->brought(out, own_);
      from = in.data == out.data ? to : flight->in = flight->brought(in, own_);
    }
    const NcclComm comm = communicator(call).handle;
    issue(call, comm, from, to, out.elements());
    settle(comm, issuing, call_deadline_seconds);
    device_.record(last_, own_);
    in_flight_ = true;
  }
  device_.record(flight->done, own_);
  flights_.emplace(++tickets_, std::move(flight));
  return tickets_;
}

void NcclDoor::wait(Ticket ticket, Stream stream) {
  const auto node = flights_.extract(ticket);
  if (node.empty()) return;  // a barrier
  const Flight& f = *node.mapped();
  if (!f.out) return device_.order(stream, f.done);
  if (f.host_out.bytes() > 0)
    device_.copy_out(f.host_out.data, f.out, size_t(f.host_out.bytes()), own_);
  device_.synchronise(own_);
}

// ---- communicators

NcclDoor::Comm& NcclDoor::communicator(const Call& call) {
  Comm& comm = comms_[call.group->members];
  if (comm.agreed) return comm;
  if (any_lacks(call, !comm.handle)) {
    if (comm.handle) nccl_.abort(std::exchange(comm.handle, nullptr));
    create(comm, call);
  }
  comm.agreed = true;
  return comm;
}

bool NcclDoor::any_lacks(const Call& call, bool me) {
  int32_t mine = me, any = 0;
  const auto view = [](int32_t& word) {
    return view_of(reinterpret_cast<std::byte*>(&word), DType::i32, {1});
  };
  const Call ask = beside(call, Op::all_reduce, Reduce::max, 1);
  const SameTrace same(state_.trace);
  host_.wait(host_.start(ask, view(mine), view(any), nullptr), nullptr);
  return any != 0;
}

void NcclDoor::create(Comm& comm, const Call& call) {
  std::array<std::byte, nccl_id_bytes> id{};
  share_id(call, id.data());
  check(nccl_.create(&comm.handle, call.group->size(), id.data(), call.group->me), creating);
  const int64_t since = monotonic_ns();
  const Making making;
  try {
    settle(comm.handle, creating, set_up_seconds);
  } catch (const Released& r) {  // every member came here: a deadline is none of theirs
    if (r.cause != Released::deadline) throw;
    throw Infrastructure(fmt::format("no progress for {:.1f} s: rank {}, NCCL, {}: {}",
                                     double(monotonic_ns() - since) / 1e9, state_.rank, creating,
                                     r.what()));
  }
}

// Member 0 makes it, the others are told.
void NcclDoor::share_id(const Call& call, std::byte* id) {
  if (call.group->me == 0) check(nccl_.unique_id(id, nccl_id_bytes), "making a unique id");
  const Call tell = beside(call, Op::broadcast, Reduce::none, nccl_id_bytes / 4);
  const View words = view_of(id, DType::i32, {tell.count});
  const SameTrace same(state_.trace);
  host_.wait(host_.start(tell, words, words, nullptr), nullptr);
}

// ---- calls

void NcclDoor::issue(const Call& call, NcclComm comm, const std::byte* in, std::byte* out,
                     int64_t receives) {
  const size_t e = size_of(call.dtype);
  const auto refuse_beyond = [&](int64_t count) {
    if (count > nccl_.most_elements)
      throw Infrastructure(fmt::format(
          "{} at {}:{}: expected at most {} elements of a member in a call of NCCL, met {}; take "
          "smaller extents",
          name(call.op), call.file, call.line, nccl_.most_elements, count));
  };
  switch (call.op) {
    case Op::all_reduce:
    case Op::reduce_scatter:
      if (call.op == Op::reduce_scatter) refuse_beyond(receives);
      return reduce(call, comm, in, out, receives);
    case Op::all_gather:
      refuse_beyond(call.count);
      if (call.count > 0)
        check(nccl_.all_gather(in, out, size_t(call.count), call.dtype, comm, own_), "all_gather");
      return;
    case Op::broadcast:
      for (int64_t at = 0; at < receives; at += nccl_.most_elements) {
        const size_t n = size_t(std::min(nccl_.most_elements, receives - at)),
                     skip = size_t(at) * e;
        const std::byte* from = call.group->me == call.root_or_hop ? in + skip : out + skip;
        check(nccl_.broadcast(from, out + skip, n, call.dtype, call.root_or_hop, comm, own_),
              "broadcast");
        settle(comm, issuing, call_deadline_seconds);
      }
      return;
    case Op::all_to_all:
    case Op::shift:
      return exchange(call, comm, in, out, receives);
    case Op::barrier:
      return;
  }
}

// NCCL averages by multiplying each contribution by 1/p, which is exact where p is a power of two.
// Elsewhere, and for integers, the sum is divided.
void NcclDoor::reduce(const Call& call, NcclComm comm, const std::byte* in, std::byte* out,
                      int64_t elements) {
  const int p = call.group->size();
  const bool divides = call.reduce == Reduce::avg && !(is_float(call.dtype) && power_of_two(p));
  const Reduce asked = divides ? Reduce::sum : call.reduce;
  for (int64_t at = 0; at < elements; at += nccl_.most_elements) {
    const size_t n = size_t(std::min(nccl_.most_elements, elements - at));
    const size_t skip = size_t(at) * size_of(call.dtype);
    if (call.op == Op::all_reduce)
      check(nccl_.all_reduce(in + skip, out + skip, n, call.dtype, asked, comm, own_),
            "all_reduce");
    else
      check(nccl_.reduce_scatter(in, out, n, call.dtype, asked, comm, own_), "reduce_scatter");
    settle(comm, issuing, call_deadline_seconds);
  }
  if (divides) device_.divide(out, elements, call.dtype, p, own_);
}

// Sends and receives of one call in one group: alone, each would wait for a peer that waits.
void NcclDoor::exchange(const Call& call, NcclComm comm, const std::byte* in, std::byte* out,
                        int64_t receives) {
  const int p = call.group->size(), me = call.group->me;
  const bool shifts = call.op == Op::shift;
  const int to = modulo(int64_t(me) + call.root_or_hop, p);
  const int from = modulo(int64_t(me) - call.root_or_hop, p);
  const size_t e = size_of(call.dtype);
  check(nccl_.group_start(), "group_start");
  for (int m = 0; m < p; ++m) {
    const int64_t sends = shifts ? (m == to ? call.count : 0) : call.send[size_t(m)];
    const int64_t takes = shifts ? (m == from ? receives : 0) : call.recv[size_t(m)];
    for (int64_t left = sends; left > 0; left -= nccl_.most_elements) {
      const size_t n = size_t(std::min(nccl_.most_elements, left));
      check(nccl_.send(in, n, call.dtype, m, comm, own_), "send");
      in += n * e;
    }
    for (int64_t left = takes; left > 0; left -= nccl_.most_elements) {
      const size_t n = size_t(std::min(nccl_.most_elements, left));
      check(nccl_.receive(out, n, call.dtype, m, comm, own_), "receive");
      out += n * e;
    }
  }
  check(nccl_.group_end(), "group_end");
}

// ---- waiting, and how it can end

void NcclDoor::check(int code, const char* call) {
  if (code != nccl_success && code != nccl_in_progress) fail(code, call);
}

void NcclDoor::settle(NcclComm comm, const char* what, double seconds) {
  poll(what, seconds, [&] {
    int code = nccl_success;
    check(nccl_.async_error(comm, &code), "asking for a communicator's state");
    check(code, what);
    return code == nccl_success;
  });
}

template <class Done>
void NcclDoor::poll(const char* what, double seconds, const Done& done) {
  if (done()) return;
  stand(Trace::waiting);
  const int64_t limit = monotonic_ns() + int64_t(seconds * scale_ * 1e9);
  for (int looks = 0; !done(); ++looks) {
    look_at_others();
    if (monotonic_ns() > limit) overdue(what, seconds);
    looks < yields_first ? void(::sched_yield()) : void(::usleep(20));
  }
  stand(Trace::running);
}

// Who watches the rank takes one that waits for no rank that hangs.
void NcclDoor::stand(Trace::State state) noexcept {
  if (!state_.trace || state_.trace->state == state) return;
  state_.trace->state = state;
  state_.trace->since_ns = monotonic_ns();
}

// While the host waits for a stream.
void NcclDoor::look(bool first) {
  if (!in_flight_) return;
  if (first) since_ns_ = monotonic_ns();
  if (device_.complete(last_)) {
    in_flight_ = false;
    return looked();
  }
  stand(Trace::waiting);
  look_at_others();
  if (monotonic_ns() - since_ns_ > int64_t(call_deadline_seconds * scale_ * 1e9))
    overdue("completing a call", call_deadline_seconds);
}

void NcclDoor::drain() noexcept try {
  const int64_t until = monotonic_ns() + int64_t(drain_seconds * scale_ * 1e9);
  while (in_flight_ && !device_.complete(last_) && monotonic_ns() < until) ::usleep(20);
  if (in_flight_ && !device_.complete(last_)) abort_all();
  in_flight_ = false;
} catch (const DeviceError&) {  // then nothing is under way any more
  in_flight_ = false;
}

void NcclDoor::look_at_others() {
  try {
    meeting_.look();
  } catch (const Released&) {
    abort_all();
    stand(Trace::running);
    throw;
  }
  for (const auto& [members, comm] : comms_) {
    if (!comm.handle) continue;
    int code = nccl_success;
    check(nccl_.async_error(comm.handle, &code), "asking for a communicator's state");
    check(code, "a call under way");
  }
}

std::string NcclDoor::errors() const {
  std::string text;
  for (const auto& [members, comm] : comms_) {
    int code = nccl_success;
    if (!comm.handle || nccl_.async_error(comm.handle, &code) != nccl_success) continue;
    if (code != nccl_success)
      text +=
          fmt::format("; communicator {}: {}, {}", members_text(members), code, nccl_.text(code));
  }
  const char* last = nccl_.last_error();
  return text + (last && *last ? fmt::format("; last error: {}", last) : "");
}

void NcclDoor::overdue(const char* what, double seconds) {
  const std::string why = fmt::format("no progress for {:.1f} s: rank {}, NCCL, {}{}",
                                      seconds * scale_, state_.rank, what, errors());
  meeting_.release(Released::deadline, why);
  abort_all();
  stand(Trace::running);
  if (what == creating) throw Infrastructure(why);  // no kernel has a part in it
  meeting_.look();                                  // in the words of the first that gave up
  throw Released(Released::deadline, why);
}

// An error of the device is the kernel's that caused it; any other is nobody's subject. (Where a
// rank has died, its death is what counts.)
void NcclDoor::fail(int code, const char* call) {
  const std::string why = fmt::format("rank {}, NCCL, {}: expected success, met {}: {}{}",
                                      state_.rank, call, code, nccl_.text(code), errors());
  meeting_.release(Released::peer_lost, why);
  abort_all();
  stand(Trace::running);
  if (code == nccl_device_error) throw DeviceError(code, why);
  throw Infrastructure(why);
}

void NcclDoor::abort_all() {
  for (auto& [members, comm] : comms_) {
    if (comm.handle) nccl_.abort(std::exchange(comm.handle, nullptr));
    comm.agreed = false;
  }
  in_flight_ = false;
}

// ---- ranks

namespace {

// In the place of a transport that a rank could not have: the case says why.
struct NoDoor final : Door {
  explicit NoDoor(std::string w) : why(std::move(w)) {}
  Ticket start(const Call&, const View&, const View&, Stream) override {
    throw Infrastructure(why);
  }
  void wait(Ticket, Stream) override { throw Infrastructure(why); }
  std::string why;
};

struct NcclRank {
  std::unique_ptr<NcclDoor> nccl;
  std::unique_ptr<NoDoor> none;

  Door& door(RankHost& host, double scale) {
    if (nccl) nccl->new_job();
    if (!nccl && !none) try {
        ::setenv("NCCL_ALGO", "Ring", 0);
        nccl = std::make_unique<NcclDoor>(device_of_rank(host), device_module().nccl, *host.door,
                                          *host.state, scale);
      } catch (const Infrastructure& e) {
        none = std::make_unique<NoDoor>(e.what());
      }
    if (nccl) return *nccl;
    return *none;
  }
};

}  // namespace

RankMain with_nccl(RankMain main, double deadline_scale) {
  const auto own = std::make_shared<NcclRank>();
  return [own, main = std::move(main), deadline_scale](RankHost& host,
                                                       std::span<const std::byte> job) {
    RankHost through = host;
    through.door = &own->door(host, deadline_scale);
    return main(through, job);
  };
}

}  // namespace shardproof
