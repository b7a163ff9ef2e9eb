// The parent of a world over an arena: it believes records, wait statuses and the arena, nothing
// else.
#include "oracle/comm/arena_world.hpp"

#include <fmt/format.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>

#include "oracle/comm/crowd.hpp"
#include "oracle/comm/leaks.hpp"
#include "oracle/comm/rank_loop.hpp"
#include "oracle/comm/standing.hpp"
#include "oracle/interrupt.hpp"

namespace shardproof {
namespace {

constexpr int64_t millisecond = 1'000'000, second = 1'000 * millisecond;
constexpr int64_t kept_record_bytes = 4 << 20;

// Time that survivors have to hand in their records once the world is released: what a rank that
// computes may take to its next call, which is more where others want its core too. One that
// waited only has to be given a core to hear of it: it is no rank that hangs.
int64_t grace_ns(double scale) {
  const double of_a_core = std::clamp(crowding(), 1.0, 10.0);
  return int64_t(std::clamp(scale * double(second), double(second) / 5, 5. * second) * of_a_core);
}

// "SIGSEGV at address 0x0"
std::string crash_text(int signal, const CrashPage& crash) {
  const bool told = crash.signal.load() == signal && crash.has_address;
  return signal_name(signal) + (told ? fmt::format(" at address {:#x}", crash.address) : "");
}

// The zombie still owns its process group: what the rank has started ends with it.
bool reap_if_ended(RankProcess& p, int flags) {
  siginfo_t info = {};
  int failed = 0;
  do {
    failed = waitid(P_PID, id_t(p.pid), &info, WEXITED | WNOWAIT | flags);
  } while (failed && errno == EINTR);
  if (!failed && info.si_pid == 0) return false;
  kill(-p.pid, SIGKILL);
  waitpid(p.pid, &p.status, 0);
  if (p.handle >= 0) close(p.handle);
  p.handle = -1;
  p.reaped = true;
  return true;
}

// A parent that was started with SIGCHLD ignored would never learn how its ranks end.
void keep_wait_statuses() {
  struct sigaction action = {};
  sigaction(SIGCHLD, nullptr, &action);
  if (action.sa_handler == SIG_IGN) std::signal(SIGCHLD, SIG_DFL);
}

}  // namespace

RankProcess fork_ranks(int first_rank, int ranks, const std::function<void()>& body) {
  keep_wait_statuses();
  std::fflush(nullptr);  // else the child prints the parent's buffers again
  const int parent = getpid();
  RankProcess process;
  process.first_rank = first_rank;
  process.ranks = ranks;
  process.pid = fork();
  if (process.pid == 0) {
    [&]() noexcept {  // nothing may unwind into the parent's frames
      become_rank_process(parent);
      body();
      if (const std::string words = leaks_of_this_process(); !words.empty())
        note_leak(ranks == 1 ? fmt::format("rank {}", first_rank)
                             : fmt::format("the process of {} ranks", ranks),
                  words);
    }();
    std::fflush(nullptr);
    _exit(0);
  }
  if (process.pid < 0) {
    throw Infrastructure(
        fmt::format("fork of rank {} failed ({}): raise `ulimit -u`, or run fewer ranks",
                    first_rank, std::strerror(errno)));
  }
#ifdef SYS_pidfd_open
  process.handle = int(syscall(SYS_pidfd_open, process.pid, 0));
#endif
  return process;
}

ArenaWorld::ArenaWorld(const WorldSpec& spec, std::shared_ptr<Arena> arena)
    : spec_(spec), arena_(std::move(arena)) {}

ArenaWorld::~ArenaWorld() {
  arena_->quit();
  const int64_t patience = monotonic_ns() + (leaks_are_looked_for() ? 20 * second : second / 2);
  const auto left = [&] {
    return std::any_of(processes_.begin(), processes_.end(), [](auto& p) { return !p.reaped; });
  };
  for (reap(); left() && monotonic_ns() < patience; reap()) poll_until(patience);
  end_processes();
}

bool ArenaWorld::alive() const {
  reap();
  return !dead_ &&
         std::none_of(processes_.begin(), processes_.end(), [](auto& p) { return p.reaped; });
}

std::string ArenaWorld::lost() {
  if (alive() || dead_) return "";
  const auto p = std::find_if(processes_.begin(), processes_.end(),
                              [](const RankProcess& one) { return one.reaped; });
  const int signal = signal_that_ended(p->first_rank);
  return fmt::format("rank {} (process {}) {}", p->first_rank, p->pid,
                     signal ? fmt::format("was killed by signal {} ({})", signal,
                                          crash_text(signal, arena_->page(p->first_rank).crash))
                            : fmt::format("left with exit code {}", WEXITSTATUS(p->status)));
}

std::string ArenaWorld::description() const {
  return fmt::format("{}, {} rank{}", spec_.transport, spec_.ranks, spec_.ranks == 1 ? "" : "s");
}

std::vector<RankOutcome> ArenaWorld::run(std::span<const std::byte> job, uint32_t case_number,
                                         double deadline) {
  // A rank that died since the last job is found in this one, and told as if it had died there.
  if (dead_) throw Infrastructure("this world is dead: start another one for the next job");
  arena_->head().patience = deadline / case_deadline_seconds;
  arena_->begin_job(job, case_number);
  const uint32_t number = arena_->head().job.load();
  const End end = watch(deadline);
  look_for_stopped();
  if (!everyone_settled(number) || lost_rank(number) >= 0) end_processes();
  std::vector<RankOutcome> outcomes;
  for (int rank = 0; rank < spec_.ranks; ++rank) outcomes.push_back(outcome(rank, number, end));
  for (const RankOutcome& o : outcomes) {
    if (o.end != RankOutcome::finished && o.end != RankOutcome::threw) dead_ = true;
  }
  if (dead_) end_processes();
  // Nobody is blamed for what the harness of a rank could not do.
  for (int rank = 0; rank < spec_.ranks; ++rank)
    if (const RankPage& page = arena_->page(rank);
        page.threw == harness_threw && outcomes[size_t(rank)].end == RankOutcome::threw)
      throw Infrastructure(fmt::format("rank {}: {}", rank, outcomes[size_t(rank)].text));
  return outcomes;
}

ArenaWorld::End ArenaWorld::watch(double deadline) {
  const uint32_t number = arena_->head().job.load();
  const int64_t kill_after = int64_t((deadline + kill_after_seconds - case_deadline_seconds) *
                                     spec_.deadline_scale * double(second));
  const int64_t overdue_at = monotonic_ns() + kill_after;
  int64_t stop_at = INT64_MAX, stop_waiting_at = INT64_MAX;
  End end = End::all_done;
  for (;;) {
    reap();
    const int lost = lost_rank(number);
    if (lost >= 0) give_up(lost);
    if (everyone_settled(number)) return end;
    if (interrupted()) return End::interrupted;
    spec_.meanwhile();

    const int64_t now = monotonic_ns();
    const ArenaHead& head = arena_->head();
    const bool late = head.released.load() && head.cause == Released::deadline;
    if (end == End::all_done && (lost >= 0 || late || now >= overdue_at)) {
      end = lost >= 0 ? End::peer_lost : End::overdue;
      const int64_t grace = grace_ns(spec_.deadline_scale);
      stop_at = now + grace;
      stop_waiting_at = now + graces_of_one_that_waited * grace;
      if (end == End::overdue) {
        const std::string advice =
            hung_or_slow_text(crowding(), spec_.deadline_scale);  // reads a file: before the lock
        arena_->lock_by_force([&](int) { return false; });
        arena_->release(
            Released::overdue,
            fmt::format("the job's deadline of {:g} s has passed{}\n{}",
                        deadline * spec_.deadline_scale, advice, arena_->standings_text()));
        arena_->unlock();
      }
    }
    if (end == End::all_done) {  // how ranks stand is not told before the release
      poll_until(std::max(overdue_at, now + millisecond));
      continue;
    }
    if (now >= (is_due(Stood::waiting, number) ? stop_waiting_at : stop_at))
      return end == End::overdue && !is_due(Stood::running, number) ? End::deaf : end;
    poll_until(now < stop_at ? stop_at : stop_waiting_at);
  }
}

// Sleeps until a rank ends, the last record or a release comes in, or the time is up.
void ArenaWorld::poll_until(int64_t wake_ns) const {
  std::vector<pollfd> watched{{arena_->parent_event(), POLLIN, 0}};
  int64_t longest = second;
  for (const RankProcess& p : processes_) {
    if (p.reaped) continue;
    if (p.handle >= 0) {
      watched.push_back({p.handle, POLLIN, 0});
    } else {
      longest = 2 * millisecond;  // no handle: look again soon
    }
  }
  const int64_t pause = std::clamp<int64_t>(wake_ns - monotonic_ns(), 0, longest);
  poll(watched.data(), watched.size(), int((pause + millisecond - 1) / millisecond));
  uint64_t pokes = 0;
  [[maybe_unused]] const ssize_t got = read(arena_->parent_event(), &pokes, sizeof(pokes));
}

void ArenaWorld::reap() const {
  for (RankProcess& p : processes_) {
    if (!p.reaped) reap_if_ended(p, WNOHANG);
  }
}

const RankProcess* ArenaWorld::process_of(int rank) const {
  for (const RankProcess& p : processes_) {
    if (p.holds(rank)) return &p;
  }
  return nullptr;
}

bool ArenaWorld::everyone_settled(uint32_t number) const {
  for (int rank = 0; rank < spec_.ranks; ++rank)
    if (is_due(rank, number)) return false;
  return true;
}

bool ArenaWorld::is_due(int rank, uint32_t number) const {
  const RankProcess* p = process_of(rank);
  return arena_->page(rank).finished.load() != number && (!p || !p->reaped);
}

// Of the ranks that stood so when the world was released.
bool ArenaWorld::is_due(Stood stood, uint32_t number) const {
  for (int rank = 0; rank < spec_.ranks; ++rank)
    if (bool(arena_->page(rank).stood_waiting) == (stood == Stood::waiting) && is_due(rank, number))
      return true;
  return false;
}

// A rank whose process died by itself before its record was whole; one that can say why comes
// first.
int ArenaWorld::lost_rank(uint32_t number) const {
  int lost = -1;
  for (int rank = spec_.ranks - 1; rank >= 0; --rank) {
    const RankProcess* p = process_of(rank);
    if (!p || !p->reaped || p->ended_by_us) continue;
    if (arena_->page(rank).finished.load() == number) continue;
    if (lost < 0 || arena_->page(rank).crash.signal.load() ||
        !arena_->page(lost).crash.signal.load()) {
      lost = rank;
    }
  }
  return lost;
}

// Releases all who might wait for it.
void ArenaWorld::give_up(int rank) {
  if (arena_->page(rank).lost) return;
  const RankProcess& gone = *process_of(rank);
  arena_->lock_by_force([&](int owner) { return gone.holds(owner); });
  arena_->release(Released::peer_lost, fmt::format("rank {} {}", rank, how_it_ended(rank)));
  arena_->page(rank).lost = 1;
  arena_->unlock();
}

int ArenaWorld::signal_that_ended(int rank) const {
  const RankProcess& p = *process_of(rank);
  const int crash = arena_->page(rank).crash.signal.load();
  return crash ? crash : WIFSIGNALED(p.status) ? WTERMSIG(p.status) : 0;
}

std::string ArenaWorld::how_it_ended(int rank) const {
  const RankProcess& p = *process_of(rank);
  const RankPage& page = arena_->page(rank);
  const std::string where = place(snapshot(page.trace));
  const int signal = signal_that_ended(rank);
  if (!signal)
    return fmt::format("left its process with exit code {} {}", WEXITSTATUS(p.status), where);
  return fmt::format("was killed by signal {} ({}) {}", signal, crash_text(signal, page.crash),
                     where);
}

RankOutcome ArenaWorld::outcome(int rank, uint32_t number, End end) const {
  const RankPage& page = arena_->page(rank);
  const RankProcess* p = process_of(rank);
  RankOutcome o;
  o.trace = snapshot(page.trace);
  const bool whole = page.finished.load(std::memory_order_acquire) == number;
  const bool died = p && p->reaped && !p->ended_by_us;
  if (whole) read_record(rank, o);
  if (!died || (whole && p->ranks > 1)) {
    if (whole) return o;
    const bool hung = end == End::deaf || (end == End::overdue && !page.stood_waiting);
    o.end = hung ? RankOutcome::hung : RankOutcome::ended;
    if (hung && p) o.code = p->stopped_by;
    o.text =
        fmt::format("{} {}", hung ? "no progress until the deadline," : "ended with its world,",
                    place(o.trace));
    return o;
  }
  tell_death(rank, *p, number, o);
  return o;
}

// The rank's process died by itself.
void ArenaWorld::tell_death(int rank, const RankProcess& p, uint32_t number, RankOutcome& o) const {
  const RankPage& page = arena_->page(rank);
  o.trace.state = Trace::dead;
  const int crash = page.crash.signal.load(), culprit = lost_rank(number);
  if (!crash && culprit != rank && p.holds(culprit) && arena_->page(culprit).crash.signal.load()) {
    o.end = RankOutcome::ended;
    o.text = fmt::format("its process died by rank {}", culprit);
    return;
  }
  if (crash || WIFSIGNALED(p.status)) {
    o.end = RankOutcome::signalled;
    o.code = crash ? crash : WTERMSIG(p.status);
    o.text = crash_text(o.code, page.crash);
    return;
  }
  // Of several ranks in a process that exits, those that wait did not call exit.
  o.end = p.ranks > 1 && page.stood_waiting ? RankOutcome::ended : RankOutcome::exited;
  o.code = WEXITSTATUS(p.status);
  o.text = fmt::format("left its process with exit code {} {}", o.code, place(o.trace));
}

void ArenaWorld::read_record(int rank, RankOutcome& o) const {
  const RankPage& page = arena_->page(rank);
  if (page.threw) {
    o.end = RankOutcome::threw;
    o.text = page.text;
    return;
  }
  const int64_t bytes = page.record_bytes;
  std::byte* record = arena_->record(rank);
  if (bytes < 0 || bytes > arena_->area() || checksum({record, size_t(bytes)}) != page.record_sum) {
    // As if the rank had crashed: it or a peer wrote where it had no business.
    o.end = RankOutcome::signalled;
    o.text =
        "handed in a record that does not match its checksum: something wrote over the memory "
        "that the ranks share";
    return;
  }
  o.end = RankOutcome::finished;
  o.record.assign(record, record + bytes);
  if (bytes > kept_record_bytes) madvise(record, size_t(bytes), MADV_REMOVE);
}

// Of a debugger's stop a parent is told nothing.
void ArenaWorld::look_for_stopped() {
  for (RankProcess& p : processes_) {
    siginfo_t how{};
    if (!p.reaped) ::waitid(P_PID, id_t(p.pid), &how, WSTOPPED | WNOHANG | WNOWAIT);
    p.stopped_by = how.si_pid ? how.si_status : 0;
  }
}

// TERM, a moment, KILL.
void ArenaWorld::end_processes() {
  dead_ = true;
  reap();
  for (RankProcess& p : processes_) {
    if (p.reaped) continue;
    p.ended_by_us = true;
    kill(p.pid, SIGTERM);
    kill(p.pid, SIGCONT);
  }
  const int64_t patience = monotonic_ns() + 50 * millisecond;
  for (RankProcess& p : processes_) {
    while (!p.reaped && monotonic_ns() < patience) {
      if (reap_if_ended(p, WNOHANG)) break;
      pollfd handle{p.handle, POLLIN, 0};
      poll(&handle, p.handle >= 0 ? 1 : 0, p.handle >= 0 ? 50 : 1);
    }
    if (p.reaped) continue;
    kill(p.pid, SIGKILL);
    reap_if_ended(p, 0);
  }
}

}  // namespace shardproof
