// Calls meet in slots of the arena.
#include "oracle/comm/rendezvous.hpp"

#include <fmt/format.h>
#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <stdexcept>

#include "oracle/comm/crowd.hpp"
#include "oracle/comm/reduce.hpp"
#include "oracle/comm/standing.hpp"

namespace shardproof {
namespace {

constexpr int64_t alignment = 64;
constexpr int64_t shared_from_bytes = 32
                                      << 10;  // all-reduces from here on are computed together ...
constexpr int64_t block_bytes = 16 << 10;     // ... in blocks
constexpr int64_t kept_bytes = 16 << 20;      // payload memory that stays between jobs

int wrapped(int64_t place, int p) { return int(((place % p) + p) % p); }

int64_t sum(const std::vector<int64_t>& counts) {
  int64_t total = 0;
  for (int64_t c : counts) total += c;
  return total;
}

void require_elements(const Call& call, const char* which, const View& view, int64_t expected) {
  const int64_t met = view.elements();
  if (met == expected && (met == 0 || (view.data && view.dtype == call.dtype && view.contiguous() &&
                                       view.space != Space::device))) {
    return;
  }
  throw std::invalid_argument(fmt::format(
      "{} at {}:{}: the transport expects `{}` to be {} contiguous elements of {} in host memory "
      "and "
      "met {} of {}{}{}",
      name(call.op), call.file, call.line, which, expected, name(call.dtype), met, name(view.dtype),
      view.contiguous() ? "" : ", strided", view.space == Space::device ? ", on a device" : ""));
}

[[noreturn]] void refuse(const Call& call, const std::string& why) {
  throw std::invalid_argument(
      fmt::format("{} at {}:{}: {}", name(call.op), call.file, call.line, why));
}

// Members are ranks of this world, and the caller is the one that it says.
void require_member(const Call& call, const RankState& state) {
  if (!call.group) refuse(call, "a group is expected");
  const std::vector<int>& members = call.group->members;
  const auto in_world = [&](int rank) { return 0 <= rank && rank < state.size; };
  const int me = call.group->me;
  if (!std::all_of(members.begin(), members.end(), in_world) || me < 0 ||
      me >= int(members.size()) || members[size_t(me)] != state.rank) {
    refuse(call,
           fmt::format("a group of ranks 0 to {} with rank {} at its place {} is expected, {} met",
                       state.size - 1, state.rank, me, member_text(members)));
  }
}

// What the views must hold; `in` of a broadcast matters on its root only.
void require_fits(const Call& call, const View& in, const View& out, const RankState& state) {
  require_member(call, state);
  const int p = call.group->size(), me = call.group->me;
  const int64_t n = call.count;
  const bool reduces = call.op == Op::all_reduce || call.op == Op::reduce_scatter;
  if (reduces != (call.reduce != Reduce::none)) {
    refuse(call,
           fmt::format("the reduction `{}` does not belong to this operation", name(call.reduce)));
  }
  switch (call.op) {
    case Op::all_reduce:
      require_elements(call, "in", in, n);
      return require_elements(call, "out", out, n);
    case Op::all_gather:
      require_elements(call, "in", in, n);
      return require_elements(call, "out", out, n * p);
    case Op::reduce_scatter:
      if (n % p != 0) refuse(call, fmt::format("{} elements cannot be cut into {} blocks", n, p));
      require_elements(call, "in", in, n);
      return require_elements(call, "out", out, n / p);
    case Op::all_to_all:
      if (int(call.send.size()) != p || int(call.recv.size()) != p) {
        refuse(call, fmt::format("{} send and receive counts are expected, {} and {} met", p,
                                 call.send.size(), call.recv.size()));
      }
      require_elements(call, "in", in, sum(call.send));
      return require_elements(call, "out", out, sum(call.recv));
    case Op::shift:
      require_elements(call, "in", in, n);
      return require_elements(call, "out", out, out.elements());
    case Op::broadcast:
      if (call.root_or_hop < 0 || call.root_or_hop >= p) {
        refuse(call, fmt::format("root {} is not a member of {}", call.root_or_hop, p));
      }
      if (me == call.root_or_hop) require_elements(call, "in", in, n);
      return require_elements(call, "out", out, n);
    case Op::barrier:
      return;
  }
}

}  // namespace

ArenaDoor::ArenaDoor(const Arena& arena, RankState& state)
    : arena_(arena), state_(state), page_(arena.page(state.rank)) {}

void ArenaDoor::new_job() {
  pending_.clear();
  blocks_.clear();
  std::fill(sequences_.begin(), sequences_.end(), 0);
  last_note_ = page_.trace;
  if (high_water_ > kept_bytes) {
    madvise(arena_.payload(state_.rank), size_t(high_water_), MADV_REMOVE);
    high_water_ = 0;
  }
}

Ticket ArenaDoor::start(const Call& call, const View& in, const View& out, Stream) {
  require_fits(call, in, out, state_);
  const bool sends =
      call.op != Op::barrier && (call.op != Op::broadcast || call.group->me == call.root_or_hop);
  const int64_t bytes = sends ? call.count * int64_t(size_of(call.dtype)) : 0;
  Pending p = begin(call, in, out, bytes, out.elements());
  pending_.push_back(std::move(p));
  return last_ticket_;
}

void ArenaDoor::meet(const Call& call, int64_t receives) {
  require_member(call, state_);
  const Pending p = begin(call, {}, {}, 0, receives);
  arrive(p);
  finish(p);
}

void ArenaDoor::look() {
  if (arena_.head().released.load(std::memory_order_acquire)) arena_.throw_released();
}

void ArenaDoor::release(Released::Cause cause, const std::string& why) {
  Locked hold(arena_, state_.rank);
  arena_.release(cause, why + "\n" + arena_.standings_text());
}

// Leaves what this rank contributes, `bytes` of `in`, where the members meet.
ArenaDoor::Pending ArenaDoor::begin(const Call& call, const View& in, const View& out,
                                    int64_t bytes, int64_t receives) {
  note(call);
  page_.last_call_ns.store(monotonic_ns(), std::memory_order_relaxed);
  look();
  Pending p = pending(call, out);
  const int64_t offset = stage(call, in, bytes);
  const uint32_t sequence = sequences_[size_t(p.group)]++;
  p.slot = slot_for(p.group, sequence);
  if (bytes > 0 || call.op == Op::all_to_all) {
    const Slot& slot = arena_.slot(p.group, p.slot);
    blocks_.back().slot = &slot;
    blocks_.back().generation = slot.generation.load();
  }
  post(p, fingerprint(call, state_, sequence, receives), offset, bytes);
  return p;
}

// The members that this call needs are there, and make the same call.
void ArenaDoor::arrive(const Pending& p) {
  page_.last_call_ns.store(monotonic_ns(), std::memory_order_relaxed);
  await(p);
  if (arena_.lockstep) compare(p);
}

// The call as wait will need it; refused when it could only wait for the caller itself.
ArenaDoor::Pending ArenaDoor::pending(const Call& call, const View& out) {
  Pending p;
  p.group = group_of(*call.group);
  const auto in_flight = std::count_if(pending_.begin(), pending_.end(), [&](const Pending& other) {
    return other.group == p.group;
  });
  if (in_flight == slots_of_group) {
    refuse(call,
           fmt::format("{} calls on group {}{} are in flight and that is the most: wait for one",
                       in_flight, call.group->label, member_text(call.group->members)));
  }
  p.ticket = ++last_ticket_;
  p.me = call.group->me;
  p.op = call.op;
  p.reduce = call.reduce;
  p.dtype = call.dtype;
  p.count = call.count;
  p.root_or_hop = call.root_or_hop;
  p.out = out;
  p.recv = call.recv;
  return p;
}

int ArenaDoor::group_of(const Group& group) {
  const auto known = groups_.find(group.members);
  if (known != groups_.end()) return known->second;
  Locked hold(arena_, state_.rank);
  const int index = arena_.find_group(group);
  groups_.emplace(group.members, index);
  if (int(sequences_.size()) <= index) sequences_.resize(size_t(index) + 1, 0);
  return index;
}

void ArenaDoor::wait(Ticket ticket, Stream) {
  const auto at = std::find_if(pending_.begin(), pending_.end(),
                               [&](const Pending& p) { return p.ticket == ticket; });
  if (at == pending_.end()) {
    throw std::invalid_argument(fmt::format(
        "wait: ticket {} is not in flight; each ticket is to be waited for once, in its own job",
        ticket));
  }
  const Pending p = std::move(*at);
  pending_.erase(at);
  arrive(p);
  compute(p);
  finish(p);
}

// Keeps the trace right where no ledger does it: a ledger has counted this call already, so the
// trace differs from what the last call left.
void ArenaDoor::note(const Call& call) {
  Trace& t = page_.trace;
  const bool same_place = t.phase == state_.phase && t.shot == state_.shot;
  const bool as_left = t.phase == last_note_.phase && t.shot == last_note_.shot &&
                       t.calls_in_phase == last_note_.calls_in_phase;
  if (!same_place) t.calls_in_phase = 0;
  if (!same_place || as_left) ++t.calls_in_phase;
  t.phase = state_.phase;
  t.shot = state_.shot;
  t.op = call.op;
  t.reduce = call.reduce;
  t.dtype = call.dtype;
  t.returned = false;
  t.hop = call.root_or_hop;
  t.count = call.count;
  t.group = call.group->id;
  t.group_size = int16_t(call.group->size());
  std::copy(call.group->members.begin(), call.group->members.end(), t.members);
  std::snprintf(t.label, sizeof(t.label), "%s", call.group->label.c_str());
  const char* slash = std::strrchr(call.file, '/');
  const char* file = slash ? slash + 1 : call.file;
  if (*file) {
    std::snprintf(t.site, sizeof(t.site), "%s:%d", file, call.line);
  } else {
    t.site[0] = 0;
  }
  last_note_.phase = t.phase;
  last_note_.shot = t.shot;
  last_note_.calls_in_phase = t.calls_in_phase;
}

// First fit among the blocks that somebody may still read; kept sorted by offset.
int64_t ArenaDoor::allocate(int64_t bytes) {
  std::erase_if(blocks_, [](const Block& b) {
    return b.slot && b.slot->generation.load(std::memory_order_acquire) != b.generation;
  });
  std::sort(blocks_.begin(), blocks_.end(), [](auto& a, auto& b) { return a.offset < b.offset; });
  int64_t offset = 0;
  for (const Block& b : blocks_) {
    if (b.offset - offset >= bytes) break;
    offset = b.offset + b.bytes;
  }
  if (offset + bytes > arena_.area()) {
    throw Infrastructure(
        fmt::format("rank {} has more than {} MiB of messages in flight, which is all that the "
                    "arena holds for a "
                    "rank: this call adds {} MiB; use smaller extents or wait for earlier calls",
                    state_.rank, arena_.area() >> 20, bytes >> 20));
  }
  high_water_ = std::max(high_water_, offset + bytes);
  return offset;
}

// Copies what this rank contributes: for all_to_all the counts first (sends, then expectations).
int64_t ArenaDoor::stage(const Call& call, const View& in, int64_t bytes) {
  const bool counted = call.op == Op::all_to_all;
  if (bytes == 0 && !counted) return 0;
  const size_t p = size_t(call.group->size());
  const int64_t counts_bytes = counted ? int64_t(2 * p * sizeof(int64_t)) : 0;
  const int64_t whole = (counts_bytes + bytes + alignment - 1) / alignment * alignment;
  const int64_t offset = allocate(whole);
  blocks_.push_back({offset, whole, nullptr, 0});
  std::byte* to = arena_.payload(state_.rank) + offset;
  if (counted) {
    std::memcpy(to, call.send.data(), p * sizeof(int64_t));
    std::memcpy(to + p * sizeof(int64_t), call.recv.data(), p * sizeof(int64_t));
  }
  if (bytes > 0) std::memcpy(to + counts_bytes, in.data, size_t(bytes));
  return offset;
}

// The slot in which call `sequence` of the group meets: taken by the first member that comes.
// Sleeps while all slots hold calls that somebody has not read yet.
int ArenaDoor::slot_for(int group, uint32_t sequence) {
  GroupPage& page = arena_.group(group);
  for (;;) {
    {
      Locked hold(arena_, state_.rank);
      int open = -1;
      for (int s = 0; s < slots_of_group; ++s) {
        const Slot& slot = arena_.slot(group, s);
        if (slot.in_use && slot.sequence == sequence) return s;
        if (!slot.in_use && open < 0) open = s;
        if (!slot.in_use && slot.generation.load(std::memory_order_relaxed) == 0)
          break;  // never used
      }
      if (open >= 0) {
        Slot& slot = arena_.slot(group, open);
        slot.in_use = 1;
        slot.sequence = sequence;
        return open;
      }
      if (arena_.head().released.load()) arena_.throw_released();
      ++page.sleepers;
      begin_waiting(page.bell);
    }
    sleep_until_called(page.bell, page);
    if (arena_.head().released.load(std::memory_order_acquire)) arena_.throw_released();
  }
}

// Leaves the contribution in the slot and calls the members whose call is complete by it.
void ArenaDoor::post(const Pending& p, const Fingerprint& print, int64_t offset, int64_t bytes) {
  Slot& slot = arena_.slot(p.group, p.slot);
  const GroupPage& group = arena_.group(p.group);
  bool called = false;
  {
    Locked hold(arena_, state_.rank);
    arena_.fingerprints(p.group, p.slot)[size_t(p.me)] = print;
    Post& mine = arena_.post(p.group, p.slot, p.me);
    mine.offset = offset;
    mine.bytes = bytes;
    mine.here.store(1, std::memory_order_release);
    slot.arrived.fetch_add(1, std::memory_order_release);
    for (int m = 0; m < group.size && slot.sleepers > 0; ++m) {
      const int rank = group.members[m];
      const RankPage& sleeper = arena_.page(rank);
      if (!sleeper.waiting.load(std::memory_order_relaxed)) continue;
      if (sleeper.bell.load(std::memory_order_relaxed) != arena_.offset_of(slot.bell)) continue;
      if (!met_at(p.group, p.slot, m)) continue;
      arena_.call_off(rank);
      --slot.sleepers;
      called = true;
    }
  }
  if (called) Arena::ring(slot.bell);
}

// Has everyone come whom the call of `member` needs? A shift needs its two peers only.
bool ArenaDoor::met_at(int group, int slot, int member) const {
  const int p = arena_.group(group).size;
  const Slot& s = arena_.slot(group, slot);
  if (int(s.arrived.load(std::memory_order_acquire)) == p) return true;
  const Fingerprint& call = arena_.fingerprints(group, slot)[size_t(member)];
  if (call.op != Op::shift) return false;
  const auto here = [&](int64_t place) {
    return arena_.post(group, slot, wrapped(place, p)).here.load(std::memory_order_acquire) != 0;
  };
  return here(int64_t(member) + call.root_or_hop) && here(int64_t(member) - call.root_or_hop);
}

bool ArenaDoor::met(const Pending& p) const { return met_at(p.group, p.slot, p.me); }

void ArenaDoor::await(const Pending& p) {
  for (int look = 0; look < arena_.looks && !met(p); ++look) sched_yield();
  if (met(p)) return;
  Slot& slot = arena_.slot(p.group, p.slot);
  {
    Locked hold(arena_, state_.rank);
    if (met(p)) return;
    if (arena_.head().released.load()) arena_.throw_released();
    ++slot.sleepers;
    begin_waiting(slot.bell);
  }
  sleep_until_called(slot.bell, arena_.group(p.group));
  if (!met(p)) arena_.throw_released();
}

// With the lock held: from here on this rank counts as waiting, until somebody calls it off.
void ArenaDoor::begin_waiting(std::atomic<uint32_t>& bell) {
  page_.trace.state = Trace::waiting;
  page_.trace.since_ns = monotonic_ns();
  page_.bell.store(arena_.offset_of(bell), std::memory_order_relaxed);
  page_.waiting.store(1, std::memory_order_relaxed);
  ++arena_.head().waiting;
  arena_.release_if_deadlocked();
}

void ArenaDoor::sleep_until_called(std::atomic<uint32_t>& bell, const GroupPage& group) {
  const int64_t begun = page_.trace.since_ns;
  for (;;) {
    const uint32_t seen = bell.load(std::memory_order_acquire);
    if (!page_.waiting.load(std::memory_order_acquire)) break;
    // Stopped within the lock, which was then taken by force: the release did not see that it
    // waits.
    if (arena_.head().released.load(std::memory_order_acquire)) break;
    futex_sleep(bell, seen, monotonic_ns() + arena_.call_deadline_ns() / 8 + 1'000'000);
    release_overdue(group, begun);
  }
  page_.trace.state = Trace::running;
  page_.trace.since_ns = monotonic_ns();
}

// The deadline of a call counts from when the last other member arrived or made its last call.
void ArenaDoor::release_overdue(const GroupPage& group, int64_t begun) {
  int64_t last = begun;
  for (int m = 0; m < group.size; ++m) {
    const int rank = group.members[m];
    if (rank != state_.rank) last = std::max(last, arena_.page(rank).last_call_ns.load());
  }
  const int64_t deadline = arena_.call_deadline_ns();
  if (monotonic_ns() - last < deadline) return;
  const std::string crowded =
      crowded_text(crowding(), arena_.deadline_scale);  // reads a file: before the lock
  Locked hold(arena_, state_.rank);
  if (!page_.waiting.load() || arena_.head().released.load()) return;
  arena_.release(Released::deadline,
                 fmt::format("no progress for {:.1f} s{}\n{}", double(deadline) * 1e-9, crowded,
                             arena_.standings_text()));
}

void ArenaDoor::compare(const Pending& p) {
  const std::optional<std::string> differs = difference(p);
  if (!differs) return;
  {
    Locked hold(arena_, state_.rank);
    arena_.release(Released::mismatch, "mismatch: " + *differs);
  }
  arena_.throw_released();
}

std::optional<std::string> ArenaDoor::difference(const Pending& p) const {
  const std::span<const Fingerprint> prints = arena_.fingerprints(p.group, p.slot);
  const int size = int(prints.size());
  if (p.op == Op::shift) {
    const Fingerprint& mine = prints[size_t(p.me)];
    const Fingerprint& from = prints[size_t(wrapped(int64_t(p.me) - p.root_or_hop, size))];
    const Fingerprint& to = prints[size_t(wrapped(int64_t(p.me) + p.root_or_hop, size))];
    if (auto text = pairwise_mismatch(from, from.count, mine, mine.recv)) return text;
    return pairwise_mismatch(mine, mine.count, to, to.recv);
  }
  if (auto text = mismatch(prints)) return text;
  for (int from = 0; from < size && p.op == Op::all_to_all; ++from) {
    for (int to = 0; to < size; ++to) {
      const int64_t sends = counts_of(p, from)[to], expects = counts_of(p, to)[size + from];
      if (sends == expects) continue;
      return pairwise_mismatch(prints[size_t(from)], sends, prints[size_t(to)], expects);
    }
  }
  return std::nullopt;
}

const int64_t* ArenaDoor::counts_of(const Pending& p, int member) const {
  const int rank = arena_.group(p.group).members[member];
  return reinterpret_cast<const int64_t*>(arena_.payload(rank) +
                                          arena_.post(p.group, p.slot, member).offset);
}

const std::byte* ArenaDoor::payload_of(const Pending& p, int member) const {
  const GroupPage& group = arena_.group(p.group);
  const bool counted = arena_.fingerprints(p.group, p.slot)[size_t(member)].op == Op::all_to_all;
  const int64_t counts_bytes = counted ? 2 * group.size * int64_t(sizeof(int64_t)) : 0;
  return arena_.payload(group.members[member]) + arena_.post(p.group, p.slot, member).offset +
         counts_bytes;
}

void ArenaDoor::compute(const Pending& p) {
  const int size = arena_.group(p.group).size;
  const auto whole_of = [&](int member) {
    take(payload_of(p, member), arena_.post(p.group, p.slot, member).bytes, p.out.bytes(),
         p.out.data);
  };
  switch (p.op) {
    case Op::all_reduce:
      return all_reduce(p);
    case Op::all_gather:
      return all_gather(p);
    case Op::reduce_scatter:
      return reduce_scatter(p);
    case Op::all_to_all:
      return all_to_all(p);
    case Op::shift:
      return whole_of(wrapped(int64_t(p.me) - p.root_or_hop, size));
    case Op::broadcast:
      return whole_of(p.root_or_hop);
    case Op::barrier:
      return;
  }
}

// Copies what there is: without lockstep a peer may have posted less than is expected.
void ArenaDoor::take(const std::byte* from, int64_t available, int64_t bytes, std::byte* to) const {
  const int64_t some = std::clamp<int64_t>(available, 0, bytes);
  if (some > 0) std::memcpy(to, from, size_t(some));
}

int64_t ArenaDoor::least_posted(const Pending& p) const {
  int64_t least = arena_.post(p.group, p.slot, 0).bytes;
  for (int m = 1; m < arena_.group(p.group).size; ++m) {
    least = std::min(least, arena_.post(p.group, p.slot, m).bytes);
  }
  return least;
}

std::vector<const std::byte*> ArenaDoor::payloads(const Pending& p, int64_t skip) const {
  std::vector<const std::byte*> from;
  for (int m = 0; m < arena_.group(p.group).size; ++m) from.push_back(payload_of(p, m) + skip);
  return from;
}

// Somebody died: who waits for a block of his would wait for ever.
void ArenaDoor::give_up_on_the_dead() const {
  const ArenaHead& head = arena_.head();
  if (head.released.load(std::memory_order_acquire) && head.cause == Released::peer_lost) {
    arena_.throw_released();
  }
}

// A small one is summed by every member. A large one is cut into blocks that members take as they
// come and reduce in place, in the payload of member 0: only who took a block touches it. Whoever
// comes first may do all of it, so no member waits for one that is busy elsewhere; the last ones to
// arrive wait only for blocks that are being worked on.
void ArenaDoor::all_reduce(const Pending& p) {
  const int64_t element = int64_t(size_of(p.dtype));
  const int64_t bytes = std::min(p.count * element, least_posted(p)) / element * element;
  if (bytes < shared_from_bytes) {
    return reduce_members(p.reduce, p.dtype, payloads(p, 0), bytes / element, p.out.data);
  }
  Slot& slot = arena_.slot(p.group, p.slot);
  const uint32_t blocks = uint32_t((bytes + block_bytes - 1) / block_bytes);
  auto* result = const_cast<std::byte*>(payload_of(p, 0));
  for (uint32_t block = slot.claimed.load(); block < blocks;) {
    if (!slot.claimed.compare_exchange_weak(block, block + 1)) continue;
    const int64_t start = block * block_bytes, length = std::min(block_bytes, bytes - start);
    reduce_members(p.reduce, p.dtype, payloads(p, start), length / element, result + start);
    slot.reduced.fetch_add(1, std::memory_order_release);
    block = slot.claimed.load();
  }
  while (slot.reduced.load(std::memory_order_acquire) < blocks) {
    give_up_on_the_dead();
    sched_yield();
  }
  take(result, bytes, p.count * element, p.out.data);
}

void ArenaDoor::all_gather(const Pending& p) {
  const int64_t block = p.count * int64_t(size_of(p.dtype));
  for (int m = 0; m < arena_.group(p.group).size; ++m) {
    take(payload_of(p, m), arena_.post(p.group, p.slot, m).bytes, block, p.out.data + m * block);
  }
}

void ArenaDoor::reduce_scatter(const Pending& p) {
  const int64_t element = int64_t(size_of(p.dtype));
  const int64_t count = p.out.elements(), skip = p.me * count * element;
  const int64_t there = std::clamp<int64_t>((least_posted(p) - skip) / element, 0, count);
  reduce_members(p.reduce, p.dtype, payloads(p, skip), there, p.out.data);
}

// Block `me` of each member's buffer, in member order.
void ArenaDoor::all_to_all(const Pending& p) {
  const int64_t element = int64_t(size_of(p.dtype));
  std::byte* to = p.out.data;
  for (int m = 0; m < arena_.group(p.group).size; ++m) {
    const bool counted = arena_.fingerprints(p.group, p.slot)[size_t(m)].op == Op::all_to_all;
    int64_t skip = 0;
    for (int before = 0; before < p.me && counted; ++before)
      skip += counts_of(p, m)[before] * element;
    const int64_t posted = arena_.post(p.group, p.slot, m).bytes;
    const int64_t expected = p.recv[size_t(m)] * element;
    const int64_t sent = counted ? counts_of(p, m)[p.me] * element : posted;
    take(payload_of(p, m) + skip, std::min(sent, posted - skip), expected, to);
    to += expected;
  }
}

// The last member that has read frees the slot, and calls those who lacked one.
void ArenaDoor::finish(const Pending& p) {
  Slot& slot = arena_.slot(p.group, p.slot);
  GroupPage& group = arena_.group(p.group);
  if (int(slot.read.fetch_add(1, std::memory_order_acq_rel)) + 1 < group.size) return;
  bool called = false;
  {
    Locked hold(arena_, state_.rank);
    for (int m = 0; m < group.size; ++m) arena_.post(p.group, p.slot, m).here = 0;
    slot.arrived = slot.read = slot.claimed = slot.reduced = 0;
    slot.in_use = slot.sleepers = 0;
    slot.generation.fetch_add(1, std::memory_order_release);
    for (int m = 0; m < group.size && group.sleepers > 0; ++m) {
      const int rank = group.members[m];
      const RankPage& sleeper = arena_.page(rank);
      if (!sleeper.waiting.load() || sleeper.bell.load() != arena_.offset_of(group.bell)) continue;
      arena_.call_off(rank);
      --group.sleepers;
      called = true;
    }
  }
  if (called) Arena::ring(group.bell);
}

}  // namespace shardproof
