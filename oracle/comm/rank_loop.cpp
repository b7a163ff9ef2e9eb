// The loop of a rank, and what a process must be before ranks live in it.
#include "oracle/comm/rank_loop.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <malloc.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstring>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "oracle/comm/copies.hpp"
#include "oracle/comm/rendezvous.hpp"

namespace shardproof {
namespace {

struct sigaction earlier[NSIG];  // a sanitizer's handler, or the default
thread_local CrashPage* own_crash_page = nullptr;
std::atomic<int> home_process{0};

// The kernel then ends the process by the same signal: the faulting instruction runs again, a
// signal that somebody sent is sent again.
void on_crash(int signal, siginfo_t* info, void*) {
  CrashPage* crash = own_crash_page;
  const bool fault = info->si_code > 0;
  if (crash && getpid() == home_process.load() && crash->signal.load() == 0) {
    crash->address = uint64_t(reinterpret_cast<uintptr_t>(info->si_addr));
    crash->has_address = fault && signal != SIGABRT;
    crash->signal.store(signal);
  }
  sigaction(signal, &earlier[signal], nullptr);
  if (!fault) raise(signal);
}

void hand_in(const Arena& arena, int rank, std::span<const std::byte> record) {
  RankPage& page = arena.page(rank);
  if (int64_t(record.size()) > arena.area()) {
    throw Infrastructure(fmt::format(
        "expected a record of {} bytes at most, met one of {}; smaller extents or fewer "
        "checks make it shorter",
        arena.area(), record.size()));
  }
  if (!record.empty()) std::memcpy(arena.record(rank), record.data(), record.size());
  page.record_bytes = int64_t(record.size());
  page.record_sum = checksum(record);
}

// The rank leaves the job; peers that still wait for it now wait in vain.
void leave(const Arena& arena, int rank) {
  Locked hold(arena, rank);
  RankPage& page = arena.page(rank);
  page.trace.state = Trace::left;
  page.trace.since_ns = monotonic_ns();
  --arena.head().live;
  arena.release_if_deadlocked();
}

// No job starts before every rank has left the one before: the parent sees to that, from another
// process, which thread sanitizer cannot follow from one rank to the next. This tells it.
std::atomic<uint32_t> left_by_threads{0};

void run_job(const Arena& arena, uint32_t number, RankHost& host, const RankMain& main) {
  RankPage& page = arena.page(host.rank);
  say_what_is_thrown(
      [&] {
        const auto record = main(host, {arena.job(), size_t(arena.head().job_bytes)});
        end_a_copy(&page.trace);
        hand_in(arena, host.rank, record);
      },
      [&](const char* what, uint32_t who) {
        end_a_copy(&page.trace);
        std::snprintf(page.text, sizeof(page.text), "%s", what);
        page.threw = who;
      });
  leave(arena, host.rank);
  left_by_threads.fetch_add(1, std::memory_order_acq_rel);
  // Sequentially consistent with the parent's release and its look at `finished`: one sees the
  // other.
  page.finished.store(number);
  const bool last = int(arena.head().done.fetch_add(1)) + 1 == arena.ranks;
  if (last || arena.head().released.load()) arena.poke_parent();
}

}  // namespace

uint64_t checksum(std::span<const std::byte> bytes) {
  return XXH3_64bits(bytes.data(), bytes.size());
}

void serve(const Arena& arena, int rank, bool threads, const RankMain& main) {
  RankState state;
  state.rank = rank;
  state.size = arena.ranks;
  state.trace = &arena.page(rank).trace;
  ArenaDoor door(arena, state);
  ArenaHead& head = arena.head();
  uint32_t seen = 0;
  for (;;) {
    uint32_t number = head.job.load(std::memory_order_acquire);
    while (number == seen) {
      futex_sleep(head.job, seen, 0);
      number = head.job.load(std::memory_order_acquire);
    }
    if (head.quit.load()) return;
    left_by_threads.load(std::memory_order_acquire);
    seen = number;
    state.phase = Phase::idle;
    state.shot = 0;
    state.case_number = head.case_number;
    state.mesh = nullptr;
    door.new_job();
    RankHost host{rank, arena.ranks, &door, state.trace, threads, &state, rank};
    run_job(arena, number, host, main);
  }
}

void keep_freed_memory() {
#ifdef M_MMAP_THRESHOLD
  constexpr int largest_threshold = 32 << 20;  // that glibc takes
  mallopt(M_MMAP_THRESHOLD, largest_threshold);
  mallopt(M_TRIM_THRESHOLD, 2 * largest_threshold);
#endif
}

void become_rank_process(int parent) {
  keep_freed_memory();
  setpgid(0, 0);
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(0);  // it died before it could be watched
  for (int signal :
       {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGPIPE, SIGALRM, SIGUSR1, SIGUSR2, SIGCHLD}) {
    std::signal(signal, SIG_DFL);
  }
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  const rlimit no_core{0, 0};
  setrlimit(RLIMIT_CORE, &no_core);
  const int null = open("/dev/null", O_RDONLY);
  if (null >= 0) {
    dup2(null, STDIN_FILENO);
    if (null != STDIN_FILENO) close(null);
  }
  home_process = getpid();
  watch_for_copies();
  for (int signal : crash_signals) {
    struct sigaction action = {};
    action.sa_sigaction = on_crash;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigemptyset(&action.sa_mask);
    sigaction(signal, &action, &earlier[signal]);
  }
}

void report_crashes(const Arena& arena, int rank) {
  own_crash_page = &arena.page(rank).crash;
  stack_t alternate = {};
  sigaltstack(nullptr, &alternate);
  if (!(alternate.ss_flags & SS_DISABLE)) return;  // a sanitizer's, which it frees itself
  constexpr size_t stack_bytes = 64 << 10;
  static thread_local std::vector<std::byte> stack(stack_bytes);
  alternate = {};
  alternate.ss_sp = stack.data();
  alternate.ss_size = stack_bytes;
  sigaltstack(&alternate, nullptr);
}

}  // namespace shardproof
