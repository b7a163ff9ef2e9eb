// The memory that ranks of one machine share: who lives, who waits and for what, the slots in which
// calls meet, payloads, the job and the records. One anonymous shared mapping, sparse: pages exist
// once they are written. It outlives any rank, so the parent reads in it how a rank ended.
//
// One lock guards everything that the count of waiting ranks depends on. The member that completes
// a call takes the sleepers off that count itself, under the lock: were they to do it after waking,
// a rank that begins to wait in between would see all ranks waiting and cry deadlock.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "oracle/comm/lockstep.hpp"
#include "oracle/comm/world.hpp"

namespace shardproof {

inline constexpr int most_arena_ranks = 64;  // Trace::members
inline constexpr int most_groups = 128;      // of a world
inline constexpr int slots_of_group = 64;    // calls of one group that are begun and not yet read

int64_t monotonic_ns();

// One call of one group while its members meet. Free where in_use is 0; taken by the first member
// that arrives, freed by the last that has read.
struct alignas(64) Slot {
  std::atomic<uint32_t> bell;        // futex of the members that wait here
  std::atomic<uint32_t> arrived;     // members that have posted
  std::atomic<uint32_t> read;        // members that need it no more
  std::atomic<uint32_t> claimed;     // blocks of a shared reduction that somebody works on ...
  std::atomic<uint32_t> reduced;     // ... and that are done
  std::atomic<uint32_t> generation;  // grows when the slot is freed
  uint32_t in_use, sequence, sleepers;
};

// What a member left in a slot beside its fingerprint.
struct Post {
  std::atomic<uint32_t> here;
  int64_t offset, bytes;  // in the payload area of its rank
};

struct alignas(64) GroupPage {
  std::atomic<uint32_t> bell;  // futex of members that wait for a free slot
  uint32_t sleepers;
  uint64_t id;
  int32_t size;
  int16_t members[most_arena_ranks];
};

// What the crash handler could still say.
struct CrashPage {
  std::atomic<int32_t> signal;  // 0: none
  int32_t has_address;
  uint64_t address;
};

struct alignas(64) RankPage {
  std::atomic<uint32_t> waiting;  // cleared by whoever ends the wait, under the lock
  std::atomic<int64_t> last_call_ns;
  std::atomic<uint32_t> finished;  // number of the last job whose record is whole
  std::atomic<int64_t> bell;       // of the wait: offset in the arena
  uint32_t lost;                   // its process ended in this job
  uint32_t stood_waiting;          // at the moment of release, here or in a transport of its own
  uint32_t threw;
  int64_t record_bytes;
  uint64_t record_sum;
  CrashPage crash;
  char text[4096];  // threw: what
  alignas(64) Trace trace;
};

struct alignas(64) ArenaHead {
  std::atomic<uint32_t> lock;  // 0, or owner + 1, with the top bit when somebody sleeps on it
  alignas(64) std::atomic<uint32_t> job;  // futex: number of the job that is on; grows
  std::atomic<uint32_t> quit, done;       // done: records handed in
  std::atomic<uint32_t> released;
  uint32_t cause;
  uint32_t case_number;
  int32_t live, waiting;  // ranks that work on the job; of them, those that wait
  uint32_t groups;
  int64_t job_bytes;
  // Of the job: its deadline over the usual one, which calls wait in proportion to.
  double patience;
  char why[16384];
};

class Arena {
 public:
  // Throws Infrastructure where the machine refuses the memory.
  Arena(int ranks, double deadline_scale, bool lockstep);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  const int ranks;
  const double deadline_scale;
  const bool lockstep;
  const int looks;  // at a slot before sleeping

  ArenaHead& head() const { return *reinterpret_cast<ArenaHead*>(base_); }
  RankPage& page(int rank) const;
  GroupPage& group(int g) const;
  Slot& slot(int g, int s) const;
  Post& post(int g, int s, int member) const;
  std::span<Fingerprint> fingerprints(int g, int s) const;  // one a member
  std::byte* payload(int rank) const { return base_ + payloads_ + rank * area_; }
  std::byte* record(int rank) const { return base_ + records_ + rank * area_; }
  std::byte* job() const { return base_ + job_; }
  int64_t area() const { return area_; }  // bytes of a payload or record area, and of the job's
  int64_t call_deadline_ns() const {
    return int64_t(call_deadline_seconds * deadline_scale * head().patience * 1e9);
  }

  // --- the lock; `who` is a rank, or `ranks` for the parent
  void lock(int who) const;
  void unlock() const;
  // Parent: takes the lock, by force when its owner is dead (`is_dead`) or sits on it (stopped).
  void lock_by_force(const std::function<bool(int rank)>& is_dead) const;

  // --- jobs, parent's side
  void begin_job(std::span<const std::byte> job, uint32_t case_number) const;
  void quit() const;
  std::string released_text() const;  // after `released` was seen

  // --- with the lock held
  int find_group(
      const Group&) const;        // found or added; throws Infrastructure when the table is full
  void call_off(int rank) const;  // its wait has ended
  // The first release wins: everyone who waits or calls from now on throws Released.
  void release(Released::Cause, const std::string& why) const;
  // Every live rank waits: nobody is left who could end a wait.
  void release_if_deadlocked() const;

  std::string standings_text() const;  // traces of all ranks, as lines
  void poke_parent() const;            // wakes the parent's poll
  int parent_event() const { return event_; }
  [[noreturn]] void throw_released() const;

  static void ring(std::atomic<uint32_t>& bell);  // wakes all who sleep on it
  std::atomic<uint32_t>& bell_at(int64_t offset) const;
  int64_t offset_of(const std::atomic<uint32_t>& bell) const;

 private:
  std::byte* base_ = nullptr;
  int64_t total_ = 0, area_ = 0, slot_stride_ = 0;
  int64_t pages_ = 0, groups_ = 0, slots_ = 0, payloads_ = 0, records_ = 0, job_ = 0;
  int event_ = -1;
};

// Holds the lock in a scope.
class Locked {
 public:
  Locked(const Arena& arena, int who) : arena_(arena) { arena_.lock(who); }
  ~Locked() { arena_.unlock(); }
  Locked(const Locked&) = delete;
  Locked& operator=(const Locked&) = delete;

 private:
  const Arena& arena_;
};

// Sleeps while `word` holds `seen`, until `deadline_ns` (monotonic; 0: for ever). May wake for
// nothing.
void futex_sleep(const std::atomic<uint32_t>& word, uint32_t seen, int64_t deadline_ns);

}  // namespace shardproof
