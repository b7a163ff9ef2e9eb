// The shared arena: layout, lock, release.
#include "oracle/comm/arena.hpp"

#include <fmt/format.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <ctime>

#include "oracle/comm/standing.hpp"

namespace shardproof {
namespace {

constexpr uint32_t contended = 0x80000000u;
constexpr int64_t page_bytes = 4096, largest_area = int64_t(4) << 30,
                  smallest_area = int64_t(64) << 20;

static_assert(std::atomic<uint32_t>::is_always_lock_free &&
                  std::atomic<int64_t>::is_always_lock_free,
              "words shared between processes must not hide a lock");
static_assert(sizeof(std::atomic<uint32_t>) == 4, "a futex is a plain 32-bit word");

int64_t whole_pages(int64_t bytes) { return (bytes + page_bytes - 1) / page_bytes * page_bytes; }

int cores() {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 1;
}

long futex(const std::atomic<uint32_t>& word, int operation, uint32_t value,
           const timespec* until) {
  return syscall(SYS_futex, reinterpret_cast<const uint32_t*>(&word), operation, value, until,
                 nullptr, FUTEX_BITSET_MATCH_ANY);
}

void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

int64_t monotonic_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t(t.tv_sec) * 1'000'000'000 + t.tv_nsec;
}

void futex_sleep(const std::atomic<uint32_t>& word, uint32_t seen, int64_t deadline_ns) {
  const timespec until{deadline_ns / 1'000'000'000, deadline_ns % 1'000'000'000};
  futex(word, FUTEX_WAIT_BITSET, seen, deadline_ns ? &until : nullptr);  // absolute, monotonic
}

void Arena::ring(std::atomic<uint32_t>& bell) {
  bell.fetch_add(1, std::memory_order_release);
  futex(bell, FUTEX_WAKE, INT_MAX, nullptr);
}

Arena::Arena(int ranks_, double scale, bool lockstep_)
    : ranks(ranks_),
      deadline_scale(scale),
      lockstep(lockstep_),
      looks(ranks_ <= cores() ? 100 : 0) {  // beyond the cores a look costs a peer's time
  slot_stride_ = int64_t(sizeof(Slot)) + ranks * int64_t(sizeof(Fingerprint) + sizeof(Post));
  slot_stride_ = (slot_stride_ + 63) / 64 * 64;
  pages_ = whole_pages(sizeof(ArenaHead));
  groups_ = pages_ + whole_pages(ranks * int64_t(sizeof(RankPage)));
  slots_ = groups_ + whole_pages(most_groups * int64_t(sizeof(GroupPage)));
  payloads_ = slots_ + whole_pages(most_groups * slots_of_group * slot_stride_);
  // Address space only: a machine that limits it gets smaller areas.
  for (area_ = largest_area; area_ >= smallest_area; area_ /= 2) {
    records_ = payloads_ + ranks * area_;
    job_ = records_ + ranks * area_;
    total_ = job_ + area_;
    void* memory = mmap(nullptr, size_t(total_), PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory != MAP_FAILED) {
      base_ = static_cast<std::byte*>(memory);
      break;
    }
  }
  if (!base_) {
    throw Infrastructure(fmt::format(
        "{} ranks need {} MiB of address space for their shared arena; the system refused it ({}): "
        "raise `ulimit -v`, or run fewer ranks",
        ranks, total_ >> 20, std::strerror(errno)));
  }
  event_ = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  if (event_ < 0) {
    const int error = errno;
    munmap(base_, size_t(total_));
    throw Infrastructure(
        fmt::format("eventfd failed ({}): raise `ulimit -n`", std::strerror(error)));
  }
}

Arena::~Arena() {
  close(event_);
  munmap(base_, size_t(total_));
}

RankPage& Arena::page(int rank) const { return reinterpret_cast<RankPage*>(base_ + pages_)[rank]; }
GroupPage& Arena::group(int g) const { return reinterpret_cast<GroupPage*>(base_ + groups_)[g]; }

// A slot is its head, then the fingerprints of the members, then their posts.
Slot& Arena::slot(int g, int s) const {
  return *reinterpret_cast<Slot*>(base_ + slots_ + (g * slots_of_group + s) * slot_stride_);
}
std::span<Fingerprint> Arena::fingerprints(int g, int s) const {
  auto* first = reinterpret_cast<std::byte*>(&slot(g, s)) + sizeof(Slot);
  return {reinterpret_cast<Fingerprint*>(first), size_t(group(g).size)};
}
Post& Arena::post(int g, int s, int member) const {
  auto* first = reinterpret_cast<std::byte*>(&slot(g, s)) + sizeof(Slot);
  return reinterpret_cast<Post*>(first + ranks * int64_t(sizeof(Fingerprint)))[member];
}

std::atomic<uint32_t>& Arena::bell_at(int64_t offset) const {
  return *reinterpret_cast<std::atomic<uint32_t>*>(base_ + offset);
}
int64_t Arena::offset_of(const std::atomic<uint32_t>& bell) const {
  return reinterpret_cast<const std::byte*>(&bell) - base_;
}

void Arena::lock(int who) const {
  std::atomic<uint32_t>& word = head().lock;
  const uint32_t mine = uint32_t(who) + 1;
  for (int look = 0; look < 60; ++look) {
    uint32_t open = 0;
    if (word.compare_exchange_weak(open, mine, std::memory_order_acquire)) return;
    relax();
  }
  for (;;) {
    uint32_t seen = word.load(std::memory_order_relaxed);
    if (seen == 0) {
      if (word.compare_exchange_weak(seen, mine | contended, std::memory_order_acquire)) return;
      continue;
    }
    if (!(seen & contended) && !word.compare_exchange_weak(seen, seen | contended)) continue;
    futex_sleep(word, seen | contended, 0);
  }
}

void Arena::unlock() const {
  std::atomic<uint32_t>& word = head().lock;
  if (word.exchange(0, std::memory_order_release) & contended) futex(word, FUTEX_WAKE, 1, nullptr);
}

void Arena::lock_by_force(const std::function<bool(int rank)>& is_dead) const {
  std::atomic<uint32_t>& word = head().lock;
  const uint32_t mine = uint32_t(ranks) + 1;
  for (int look = 0; look < 200; ++look) {
    uint32_t seen = 0;
    if (word.compare_exchange_strong(seen, mine | contended, std::memory_order_acquire)) return;
    const int owner = int(seen & ~contended) - 1;
    if (owner >= 0 && owner < ranks && is_dead(owner) &&
        word.compare_exchange_strong(seen, mine | contended)) {
      return;
    }
    const timespec pause{0, 1'000'000};
    nanosleep(&pause, nullptr);
  }
  word.store(mine | contended);
}

void Arena::begin_job(std::span<const std::byte> job, uint32_t case_number) const {
  if (int64_t(job.size()) > area_) {
    throw Infrastructure(fmt::format(
        "a job of {} bytes does not fit the arena's {}: cut it into shots", job.size(), area_));
  }
  ArenaHead& h = head();
  {
    Locked hold(*this, ranks);
    for (int g = 0; g < int(h.groups); ++g) {
      group(g).sleepers = 0;
      for (int s = 0; s < slots_of_group; ++s) {
        Slot& used = slot(g, s);
        if (!used.in_use) continue;
        for (int m = 0; m < group(g).size; ++m) post(g, s, m).here = 0;
        used.arrived = used.read = used.claimed = used.reduced = 0;
        used.in_use = used.sleepers = 0;
        ++used.generation;
      }
    }
    for (int rank = 0; rank < ranks; ++rank) {
      RankPage& p = page(rank);
      p.waiting = 0;
      p.lost = p.stood_waiting = p.threw = 0;
      p.last_call_ns = monotonic_ns();
      p.trace = Trace{};
      p.trace.case_number = case_number;
      p.trace.since_ns = monotonic_ns();
    }
    h.live = ranks;
    h.waiting = 0;
    h.done = 0;
    h.released = 0;
    h.case_number = case_number;
    h.job_bytes = int64_t(job.size());
    if (!job.empty()) std::memcpy(this->job(), job.data(), job.size());
  }
  ring(h.job);
}

void Arena::quit() const {
  head().quit = 1;
  ring(head().job);
}

int Arena::find_group(const Group& wanted) const {
  const auto same = [&](const GroupPage& g) {
    return g.id == wanted.id && g.size == wanted.size() &&
           std::equal(wanted.members.begin(), wanted.members.end(), g.members);
  };
  ArenaHead& h = head();
  for (int g = 0; g < int(h.groups); ++g) {
    if (same(group(g))) return g;
  }
  if (h.groups == most_groups) {
    throw Infrastructure(fmt::format(
        "a world holds {} different groups at most and this is one more: reuse communicators",
        most_groups));
  }
  GroupPage& added = group(int(h.groups));
  added.id = wanted.id;
  added.size = wanted.size();
  std::copy(wanted.members.begin(), wanted.members.end(), added.members);
  return int(h.groups++);
}

void Arena::call_off(int rank) const {
  if (page(rank).waiting.load(std::memory_order_relaxed) == 0) return;
  --head().waiting;
  page(rank).waiting.store(0, std::memory_order_release);
}

void Arena::release(Released::Cause cause, const std::string& why) const {
  ArenaHead& h = head();
  if (h.released.load()) return;
  const size_t length = std::min(why.size(), sizeof(h.why) - 1);
  std::memcpy(h.why, why.data(), length);
  h.why[length] = 0;
  h.cause = cause;
  for (int rank = 0; rank < ranks; ++rank) {
    page(rank).stood_waiting = snapshot(page(rank).trace).state == Trace::waiting;
  }
  h.released.store(1);
  for (int rank = 0; rank < ranks; ++rank) {
    if (!page(rank).waiting.load()) continue;
    call_off(rank);
    ring(bell_at(page(rank).bell.load()));
  }
  poke_parent();
}

void Arena::release_if_deadlocked() const {
  const ArenaHead& h = head();
  if (h.live == 0 || h.waiting < h.live || h.released.load()) return;
  release(Released::deadlock,
          "deadlock: every rank that is left waits for another\n" + standings_text());
}

std::string Arena::standings_text() const {
  std::vector<Trace> traces;
  for (int rank = 0; rank < ranks; ++rank) traces.push_back(snapshot(page(rank).trace));
  return standings(traces);
}

void Arena::poke_parent() const {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(event_, &one, sizeof(one));
}

std::string Arena::released_text() const { return head().why; }

// Who ends a wait says why; one that nobody ended is of a kernel that wrote where it had no
// business.
void Arena::throw_released() const {
  if (!head().released.load(std::memory_order_acquire))
    throw std::runtime_error(
        "its wait for other ranks ended, and they had not come: the kernel of some rank wrote over "
        "the memory that the ranks share");
  throw Released(Released::Cause(head().cause), released_text());
}

}  // namespace shardproof
