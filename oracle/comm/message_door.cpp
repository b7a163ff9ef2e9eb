// Every call is a set of messages, each a fingerprint and a payload, so that lockstep costs no
// message of its own. Reductions are computed here, in member order: MPI has neither bf16 nor an
// average, and its own order may differ between libraries.
//
//   sent to each other member   all_reduce, all_gather: in; reduce_scatter, all_to_all: its block;
//                               shift: in, to one; broadcast: in, from the root; barrier: nothing
//
// Nothing here blocks: messages are looked for, a few yields, then sleeps of 20 us, which leave the
// cores to ranks that compute; where ranks fit the cores, about a millisecond of looks first, in
// which one that has a core answers.
#include "oracle/comm/message_door.hpp"

#include <fmt/format.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <map>

#include "oracle/comm/arena.hpp"
#include "oracle/comm/crowd.hpp"
#include "oracle/comm/lockstep.hpp"
#include "oracle/comm/reduce.hpp"
#include "oracle/comm/standing.hpp"

namespace shardproof {
namespace {

using Message = Wire::Message;

// A call that was begun: what the others have sent so far, by place in the group.
struct Open {
  Call call;
  Group group;
  View out;
  Fingerprint mine;
  std::vector<std::byte> own;  // own contribution
  std::vector<std::optional<Message>> from;
  uint32_t sequence = 0;
  bool meets = false;  // fingerprints alone
};

class Impl final : public MessageDoor {
 public:
  Impl(Wire& wire, const MpiSession::Context& c, bool fits_cores)
      : wire_(wire), c_(c), fits_(fits_cores) {}

  Ticket start(const Call& call, const View& in, const View& out, Stream) override {
    Open o = begin(call, out.elements());
    o.out = out;
    if (in.data && in.bytes() > 0) o.own.assign(in.data, in.data + in.bytes());
    send(o);
    open_.emplace(++last_, std::move(o));
    return last_;
  }

  void meet(const Call& call, int64_t receives) override {
    Open o = begin(call, receives);
    o.meets = true;
    send(o);
    receive(o);
    if (c_.lockstep) compare(o);
    c_.page->progress.fetch_add(1, std::memory_order_relaxed);
  }

  void look() override { look_for_release(); }
  // The others hear of it from the parent, when it has this rank's record.
  void release(Released::Cause, const std::string&) override {}

  void wait(Ticket ticket, Stream) override {
    const auto found = open_.find(ticket);
    if (found == open_.end())
      throw std::invalid_argument(fmt::format(
          "wait: ticket {} is not in flight; each ticket is to be waited for once", ticket));
    Open& o = found->second;
    receive(o);
    if (c_.lockstep) compare(o);
    combine(o);
    open_.erase(found);
    c_.page->progress.fetch_add(1, std::memory_order_relaxed);
  }

  // Messages carry the number of their job: what a call that was left unfinished left behind is
  // thrown away when it is met. False where sends of this job are still on their way: then the
  // world has to be started anew.
  bool end_job() override {
    sequences_.clear();
    stash_.clear();
    open_.clear();
    ++epoch_;
    for (const int64_t until = monotonic_ns() + 50'000'000; !wire_.flush(); ::sched_yield())
      if (monotonic_ns() > until) return false;
    return true;
  }

 private:
  // A message: job (8 bytes, of which 4 are used), fingerprint, payload aligned to 8.
  static constexpr size_t job_bytes = 8, head = job_bytes + (sizeof(Fingerprint) + 7) / 8 * 8;
  static constexpr int yields_first = 10;

  // Does member `from` send to member `to` in this call?
  static bool due(const Open& o, int from, int to) {
    const int p = o.group.size();
    if (o.call.op == Op::shift) {
      const int hop = o.call.root_or_hop;
      return (((from + hop) % p) + p) % p == to;
    }
    return true;  // a broadcast's other members send their fingerprint only
  }

  Open begin(const Call& call, int64_t receives) {
    note(call);
    Open o;
    o.call = call;
    o.group = *call.group;
    o.call.group = nullptr;
    o.sequence = sequences_[o.group.members]++;
    o.mine = fingerprint(call, *c_.state, o.sequence, receives);
    o.from.resize(size_t(o.group.size()));
    return o;
  }

  void send(const Open& o) {
    for (int m = 0; m < o.group.size(); ++m)
      if (m != o.group.me && due(o, o.group.me, m)) send(o, m);
    c_.page->progress.fetch_add(1, std::memory_order_relaxed);
  }

  static std::pair<int64_t, int64_t> block(const Open& o, int to) {  // first element, elements
    if (o.meets) return {0, 0};
    const int p = o.group.size();
    switch (o.call.op) {
      case Op::reduce_scatter:
        return {o.call.count / p * to, o.call.count / p};
      case Op::all_to_all: {
        int64_t first = 0;
        for (int m = 0; m < to; ++m) first += o.call.send[size_t(m)];
        return {first, o.call.send[size_t(to)]};
      }
      case Op::broadcast:
        return {0, o.group.me == o.call.root_or_hop ? o.call.count : 0};
      case Op::barrier:
        return {0, 0};
      default:
        return {0, o.call.count};
    }
  }

  int tag(const Group& g) const { return int(g.id % 0x3fffff); }

  void send(const Open& o, int to) {
    const auto [first, elements] = block(o, to);
    const int64_t e = int64_t(size_of(o.call.dtype));
    Message message(head + size_t(elements * e));
    Fingerprint print = o.mine;
    if (o.meets && o.call.op == Op::all_to_all) print.recv = o.call.send[size_t(to)];
    std::memcpy(message.data(), &epoch_, sizeof epoch_);
    std::memcpy(message.data() + job_bytes, &print, sizeof print);
    if (elements > 0)
      std::memcpy(message.data() + head, o.own.data() + first * e, size_t(elements * e));
    wire_.send(o.group.members[size_t(to)], tag(o.group), std::move(message));
  }

  // Messages of one sender on one group come in the order of its calls; which call one belongs to
  // is in its fingerprint.
  bool look_for(Open& o) {
    bool whole = true;
    for (int m = 0; m < o.group.size(); ++m) {
      if (m == o.group.me || !due(o, m, o.group.me) || o.from[size_t(m)]) continue;
      if (!take(o, m)) whole = false;
    }
    return whole;
  }

  bool take(Open& o, int m) {
    if (take_stashed(o, m)) return true;
    while (auto message = wire_.take(o.group.members[size_t(m)], tag(o.group))) {
      if (uint32_t job = 0; std::memcpy(&job, message->data(), sizeof job), job != epoch_) continue;
      if (print_of(*message).sequence == o.sequence || !c_.lockstep) {
        o.from[size_t(m)] = std::move(*message);
        return true;
      }
      stash_[{o.group.members, m}].push_back(std::move(*message));
    }
    return false;
  }

  bool take_stashed(Open& o, int m) {
    if (stash_.empty()) return false;  // as it mostly is, and this is asked with every look
    const auto found = stash_.find({o.group.members, m});
    if (found == stash_.end()) return false;
    auto& waiting = found->second;
    const auto it = std::find_if(waiting.begin(), waiting.end(), [&](const Message& message) {
      return print_of(message).sequence == o.sequence;
    });
    if (it == waiting.end()) return false;
    o.from[size_t(m)] = std::move(*it);
    waiting.erase(it);
    if (waiting.empty()) stash_.erase(found);
    return true;
  }

  static Fingerprint print_of(const Message& m) {
    Fingerprint f;
    std::memcpy(&f, m.data() + job_bytes, sizeof f);
    return f;
  }

  // The only place that waits.
  void receive(Open& o) {
    if (look_for(o)) return void(wire_.flush());
    Trace& trace = c_.page->trace;
    trace.state = Trace::waiting;
    trace.since_ns = monotonic_ns();
    const double seconds =
        call_deadline_seconds * c_.deadline_scale * (c_.patience ? *c_.patience : 1);
    const int64_t deadline = trace.since_ns + int64_t(seconds * 1e9);
    const uint64_t looks_first = fits_ ? 2000 : 0;
    for (uint64_t looks = 1;; ++looks) {
      c_.page->polls.fetch_add(1, std::memory_order_relaxed);
      wire_.flush();
      if (look_for(o)) break;
      if (looks % 32 == 0) look_for_release();
      if (looks % 256 == 0 && monotonic_ns() > deadline) {
        throw Released(Released::deadline,
                       fmt::format("no progress for {:.1f} s{}: rank {} {}", seconds,
                                   crowded_text(crowding(), c_.deadline_scale), c_.state->rank,
                                   standing(c_.state->rank, trace)));
      }
      if (looks < looks_first) continue;
      if (looks < looks_first + yields_first)
        ::sched_yield();
      else
        ::usleep(20);
    }
    trace.state = Trace::running;
    trace.since_ns = monotonic_ns();
  }

  void look_for_release() {
    if (const auto release = c_.released(c_.self)) {
      throw Released(release->first, release->second);
    }
  }

  void compare(const Open& o) {
    std::optional<std::string> differs;
    if (o.call.op == Op::shift) {
      for (int m = 0; m < o.group.size() && !differs; ++m)
        if (o.from[size_t(m)]) {
          const Fingerprint sender = print_of(*o.from[size_t(m)]);
          differs = pairwise_mismatch(sender, sender.count, o.mine, o.mine.recv);
        }
    } else {
      std::vector<Fingerprint> prints;
      for (int m = 0; m < o.group.size(); ++m)
        prints.push_back(m == o.group.me ? o.mine : print_of(*o.from[size_t(m)]));
      differs = mismatch(prints);
      for (int m = 0; m < o.group.size() && !differs && o.call.op == Op::all_to_all; ++m)
        if (m != o.group.me && received(o, m) != o.call.recv[size_t(m)])
          differs =
              pairwise_mismatch(prints[size_t(m)], received(o, m), o.mine, o.call.recv[size_t(m)]);
    }
    if (!differs) return;
    throw Released(Released::mismatch, "mismatch: " + *differs);
  }

  static int64_t received(const Open& o, int m) {
    if (o.meets) return print_of(*o.from[size_t(m)]).recv;
    return int64_t(o.from[size_t(m)]->size() - head) / int64_t(size_of(o.call.dtype));
  }

  // Contribution of a member to what I compute; mine is where it was.
  static const std::byte* part(const Open& o, int m) {
    if (m != o.group.me) return o.from[size_t(m)]->data() + head;
    return o.own.data() + block(o, m).first * int64_t(size_of(o.call.dtype));
  }

  static int64_t bytes_of(const Open& o, int m) {
    if (m == o.group.me) return block(o, m).second * int64_t(size_of(o.call.dtype));
    return int64_t(o.from[size_t(m)]->size() - head);
  }

  // Without lockstep sizes may disagree: nothing is read or written beyond what there is.
  static void place(const std::byte* from, int64_t there, std::byte* to, int64_t room) {
    if (const int64_t n = std::min(there, room); n > 0) std::memcpy(to, from, size_t(n));
  }

  void combine(Open& o) {
    const int p = o.group.size();
    const int64_t e = int64_t(size_of(o.call.dtype));
    std::byte* out = o.out.data;
    switch (o.call.op) {
      case Op::all_reduce:
      case Op::reduce_scatter: {
        std::vector<const std::byte*> parts;
        int64_t count = o.out.elements();
        for (int m = 0; m < p; ++m) {
          parts.push_back(part(o, m));
          count = std::min(count, bytes_of(o, m) / e);
        }
        if (count > 0) reduce_members(o.call.reduce, o.call.dtype, parts, count, out);
        break;
      }
      case Op::all_gather:
        for (int m = 0; m < p; ++m)
          place(part(o, m), bytes_of(o, m), out + m * o.call.count * e, o.call.count * e);
        break;
      case Op::all_to_all:
        for (int m = 0; m < p; ++m) {
          place(part(o, m), bytes_of(o, m), out, o.call.recv[size_t(m)] * e);
          out += o.call.recv[size_t(m)] * e;
        }
        break;
      case Op::shift:
        for (int m = 0; m < p; ++m)
          if (o.from[size_t(m)]) place(part(o, m), bytes_of(o, m), out, o.out.bytes());
        if (due(o, o.group.me, o.group.me))
          place(o.own.data(), int64_t(o.own.size()), out, o.out.bytes());
        break;
      case Op::broadcast: {
        const int root = o.call.root_or_hop;
        place(root == o.group.me ? o.own.data() : part(o, root), bytes_of(o, root), out,
              o.call.count * e);
        break;
      }
      case Op::barrier:
        break;
    }
  }

  // Where no ledger keeps the trace, the door does.
  void note(const Call& call) {
    Trace& t = c_.page->trace;
    if (t.phase != c_.state->phase || t.shot != c_.state->shot) t.calls_in_phase = 0;
    const bool counted_by_ledger =
        t.phase == c_.state->phase && t.shot == c_.state->shot && t.calls_in_phase != noted_;
    if (!counted_by_ledger) ++t.calls_in_phase;
    noted_ = t.calls_in_phase;
    t.phase = c_.state->phase;
    t.shot = c_.state->shot;
    t.op = call.op;
    t.reduce = call.reduce;
    t.dtype = call.dtype;
    t.returned = false;
    t.hop = call.root_or_hop;
    t.count = call.count;
    t.group = call.group->id;
    t.group_size = int16_t(std::min(call.group->size(), 64));
    for (int m = 0; m < t.group_size; ++m) t.members[m] = int16_t(call.group->members[size_t(m)]);
    std::snprintf(t.label, sizeof t.label, "%s", call.group->label.c_str());
    const char* slash = std::strrchr(call.file, '/');
    if (*call.file)
      std::snprintf(t.site, sizeof t.site, "%s:%d", slash ? slash + 1 : call.file, call.line);
  }

  Wire& wire_;
  MpiSession::Context c_;
  bool fits_;
  uint32_t noted_ = 0, epoch_ = 0;
  Ticket last_ = 0;
  std::map<Ticket, Open> open_;
  std::map<std::vector<int>, uint32_t> sequences_;
  std::map<std::pair<std::vector<int>, int>, std::vector<Message>> stash_;
};

}  // namespace

std::unique_ptr<MessageDoor> message_door(Wire& wire, const MpiSession::Context& context,
                                          bool fits_cores) {
  return std::make_unique<Impl>(wire, context, fits_cores);
}

}  // namespace shardproof
