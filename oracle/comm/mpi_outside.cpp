// The whole program under somebody else's launcher (`mpiexec -n 4 shardproof gate`, srun): rank 0
// plans, judges and is a rank itself; the others run what it hands out. A crash ends the run: no
// parent is left to go on. What was judged before stands in the records that the ranks leave.
#include <fcntl.h>

#include <unistd.h>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include <fmt/format.h>

#include "oracle/case.hpp"
#include "oracle/comm/leaks.hpp"
#include "oracle/comm/mpi.hpp"
#include "oracle/comm/mpi_protocol.hpp"
#include "oracle/comm/nccl_door.hpp"
#include "oracle/comm/rank_loop.hpp"
#include "oracle/comm/standing.hpp"
#include "oracle/comm/tcp_session.hpp"

namespace shardproof {
namespace {

// open comes once, before the first job: all ranks open their doors together, with rank 0's scale
// of deadlines.
enum class Word : uint32_t { open, job, end };
struct Order {
  Word word = Word::job;
  uint32_t number = 0;  // of the job; end: exit code
  double deadline = 0;  // of the job; open: scale
  uint32_t nccl = 0;    // 1: the job runs over NCCL
};

std::optional<int> number(const char* variable) {
  const char* text = std::getenv(variable);
  if (!text || !*text) return std::nullopt;
  char* end = nullptr;
  const long value = std::strtol(text, &end, 10);
  return *end ? std::nullopt : std::optional<int>(int(value));
}

MpiPage* page() {
  static MpiPage one;
  return &one;
}

// Words of a signal handler, put together without the heap: the signal may have come while it was
// locked.
class LastWords {
 public:
  LastWords& operator<<(const char* text) {
    while (text && *text && length_ < sizeof text_) text_[length_++] = *text++;
    return *this;
  }
  LastWords& operator<<(int64_t n) {
    char digits[24];
    char* at = digits + sizeof digits;
    *--at = 0;
    uint64_t left = n < 0 ? -uint64_t(n) : uint64_t(n);
    do *--at = char('0' + left % 10);
    while (left /= 10);
    if (n < 0) *--at = '-';
    return *this << at;
  }
  // "in call 3 of backward: all_reduce, tp, at linear_row.cpp:41"
  LastWords& operator<<(const Trace& t) {
    if (t.group_size == 0) return *this << "before its first call";
    if (t.state == Trace::waiting)
      *this << "in call " << int64_t(t.calls_in_phase) << " of " << name(t.phase);
    else
      *this << "in " << name(t.phase) << ", after call " << int64_t(t.calls_in_phase);
    *this << ": " << name(t.op) << ", " << t.label;
    return t.site[0] ? *this << ", at " << t.site : *this;
  }
  [[noreturn]] void say_and_end(int code) const {
    (void)!::write(2, text_, length_);
    ::_exit(code);
  }

 private:
  char text_[1024];
  size_t length_ = 0;
};

volatile std::sig_atomic_t awaited = 0;  // rank whose record rank 0 waits for; 0: none

// No parent watches a rank here: it ends itself when a case outlasts its deadline, and the run when
// the record of another one does.
void on_alarm(int) {
  LastWords words;
  if (awaited)
    (words
     << "shardproof: rank " << int64_t(awaited)
     << " handed in no record within its deadline; without a parent of its own the run ends here\n")
        .say_and_end(1);
  if (makes_a_communicator())
    (words << "shardproof: a rank was given no communicator within its deadline, and no kernel has "
              "a part in that; it stood "
           << snapshot(page()->trace) << "\n")
        .say_and_end(3);
  (words << "shardproof: a rank made no end within its deadline: it stood "
         << snapshot(page()->trace) << "\n")
      .say_and_end(1);
}

pid_t own_process = 0;

// Says where the rank stood; the exit code of a crash is 1 whatever the launcher makes of signals.
// A process that the rank forked (planted faults crash in such) has a parent that sees how it
// ended.
void on_crash(int signal) {
  if (::getpid() != own_process) {
    std::signal(signal, SIG_DFL);
    ::raise(signal);
    return;
  }
  (LastWords() << "shardproof: a rank was killed by signal " << int64_t(signal) << " ("
               << ::sigabbrev_np(signal) << ") " << snapshot(page()->trace)
               << "; without a parent of its own the run ends here\n")
      .say_and_end(1);
}

constexpr unsigned init_seconds = 120;

// What the environment says of a launcher that may be gone: a shell that was started by one keeps
// its variables.
std::string told_by_environment() {
  const OutsideLaunch launch = outside_launch().value();
  return fmt::format("the environment ({}) says rank {} of {}", launch.variables, launch.rank,
                     launch.size);
}

constexpr const char* no_launcher_there =
    "; unset these where no launcher runs, or start the program with the launcher of this MPI";

bool no_world_here = false;  // MPI was opened, and its world is not the one that was told

// MPI_Init waits for as long as its peers do not come. What is said then is put together before.
std::string& words_of_silent_init() {
  static std::string words;
  return words;
}
void on_silent_init(int) {
  const std::string& words = words_of_silent_init();
  (void)!::write(2, words.data(), words.size());
  ::_exit(3);
}

MpiSession* open_session() {
  const OutsideLaunch launch = outside_launch().value();
  if (launch.launcher == torchrun) return open_tcp_session();
  words_of_silent_init() =
      fmt::format("shardproof: MPI_Init did not come back within {} s, although {}{}\n",
                  init_seconds, told_by_environment(), no_launcher_there);
  std::signal(SIGALRM, on_silent_init);
  ::alarm(init_seconds);
  MpiSession* session = open_mpi_session(nullptr, nullptr);
  ::alarm(0);
  no_world_here = session->size() != launch.size || session->rank() != launch.rank;
  if (no_world_here)
    throw Infrastructure(fmt::format("{}, but MPI ({}) made this rank {} of {}{}",
                                     told_by_environment(), session->library(), session->rank(),
                                     session->size(), no_launcher_there));
  return session;
}

class Participant {
 public:
  Participant() : session(open_session()) {
    state.trace = &page()->trace;
    own_process = ::getpid();
    for (int s : crash_signals) std::signal(s, on_crash);
    std::signal(SIGALRM, on_alarm);
  }

  // Together with all other ranks.
  void open_door(double scale) {
    MpiSession::Context context;
    context.state = &state;
    context.page = page();
    context.deadline_scale = deadline_scale = scale;
    context.patience = &patience;
    context.released = [](void*) -> std::optional<std::pair<Released::Cause, std::string>> {
      return std::nullopt;
    };
    door = session->door(context);
  }

  void leave() {
    if (const std::string words = leaks_of_this_process(); !words.empty())
      note_leak(fmt::format("MPI rank {}", session->rank()), words);
    session->finalize();
  }

  // Throws what the rank threw.
  std::vector<std::byte> work(const RankMain& main, std::span<const std::byte> job,
                              uint32_t case_number, double deadline, bool nccl) {
    page()->trace = Trace{};
    // Others may be making communicators meanwhile.
    patience = nccl ? deadline / (case_deadline_seconds * deadline_scale) : 1;
    page()->trace.case_number = case_number;
    RankHost host{session->rank(), session->size(), door.get(), &page()->trace, false, &state};
    ::alarm(unsigned(deadline) + 2);
    std::vector<std::byte> record = main(host, job);
    ::alarm(0);
    if (!session->end_job())
      throw Infrastructure(
          "messages of a broken call are still on their way; under an outside launcher a world "
          "cannot be started anew: judge this line without one");
    return record;
  }

  MpiSession* session;
  RankState state;
  double deadline_scale = 1, patience = 1;
  std::unique_ptr<Door> door;
};

Participant& participant() {
  static Participant one;
  return one;
}

template <class T>
std::vector<std::byte> as_message(const T& head, std::span<const std::byte> rest) {
  std::vector<std::byte> m(sizeof head + rest.size());
  std::memcpy(m.data(), &head, sizeof head);
  if (!rest.empty()) std::memcpy(m.data() + sizeof head, rest.data(), rest.size());
  return m;
}

class OutsideWorld final : public World {
 public:
  OutsideWorld(const WorldSpec& spec, RankMain main)
      : spec_(spec), main_(std::move(main)), me_(participant()) {
    if (me_.session->size() != spec.ranks)
      throw Infrastructure(
          fmt::format("expected a world of {} ranks, met one of {}: the launcher that started this "
                      "program decides; start it with -n {}",
                      spec.ranks, me_.session->size(), spec.ranks));
    if (me_.door) return;
    for (int r = 1; r < spec_.ranks; ++r)
      me_.session->send(r, as_message(Order{Word::open, 0, spec_.deadline_scale, 0}, {}));
    me_.open_door(spec_.deadline_scale);
  }
  bool alive() const override { return true; }
  std::string description() const override {
    return fmt::format("{}, {} ranks, {}, started from outside", spec_.transport, spec_.ranks,
                       me_.session->library());
  }

  std::vector<RankOutcome> run(std::span<const std::byte> job, uint32_t case_number,
                               double deadline) override {
    const double limit = deadline * spec_.deadline_scale;
    const bool nccl = spec_.transport == "nccl";
    const auto order = as_message(Order{Word::job, case_number, limit, uint32_t(nccl)}, job);
    ::alarm(unsigned(limit) + 4);
    for (int r = 1; r < spec_.ranks; ++r) {
      awaited = r;  // a long order is sent once it is read
      me_.session->send(r, order);
    }
    awaited = 0;
    std::vector<RankOutcome> outcomes(size_t(spec_.ranks));
    outcomes[0].end = RankOutcome::finished;
    outcomes[0].record = me_.work(main_, job, case_number, limit, nccl);
    outcomes[0].trace = snapshot(page()->trace);
    ::alarm(unsigned(limit) + 4);  // a rank that can ends itself after its limit and 2 s
    for (int r = 1; r < spec_.ranks; ++r) {
      awaited = r;
      outcomes[size_t(r)].end = RankOutcome::finished;
      outcomes[size_t(r)].record = me_.session->receive(r);
    }
    ::alarm(0);
    awaited = 0;
    return outcomes;
  }

 private:
  WorldSpec spec_;
  RankMain main_;
  Participant& me_;
};

// A launcher leaves more than numbers: a descriptor or an address to reach it by. PMI_RANK alone is
// what a shell inherited, and MPI would wait for a launcher that is not there.
bool reaches_launcher() {
  if (const auto fd = number("PMI_FD")) return ::fcntl(*fd, F_GETFD) != -1;
  for (const char* address :
       {"PMI_PORT", "PMI_CONTROL_FD", "PMIX_RANK", "PMIX_NAMESPACE", "PMI_JOBID"})
    if (std::getenv(address)) return true;
  return false;
}

}  // namespace

std::optional<OutsideLaunch> outside_launch() {
  const auto from = [](const char* rank, const char* size,
                       const char* name) -> std::optional<OutsideLaunch> {
    const auto r = number(rank), n = number(size);
    if (!r || !n || *n < 2) return std::nullopt;
    return OutsideLaunch{*r, *n, name, fmt::format("{} and {}", rank, size)};
  };
  if (auto l = from("PMI_RANK", "PMI_SIZE", "PMI"); l && reaches_launcher()) return l;
  if (auto l = from("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "Open MPI")) return l;
  if (std::getenv("MASTER_ADDR") && std::getenv("MASTER_PORT"))
    if (auto l = from("RANK", "WORLD_SIZE", torchrun)) return l;
  if (std::getenv("SLURM_STEP_ID")) return from("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "Slurm");
  return std::nullopt;
}

std::unique_ptr<World> start_outside_world(const WorldSpec& spec, RankMain main) {
  return std::make_unique<OutsideWorld>(spec, std::move(main));
}

int serve_outside(const RankMain& main) {
  Participant& me = participant();
  RankMain over_nccl;
  for (;;) {
    const std::vector<std::byte> message = me.session->receive(0);
    Order order;
    if (message.size() < sizeof order)
      throw Infrastructure("rank 0 sent an order that is not whole");
    std::memcpy(&order, message.data(), sizeof order);
    if (order.word == Word::end) {
      me.leave();
      return leaks_noted() > 0 ? 3 : int(order.number);
    }
    if (order.word == Word::open) {
      me.open_door(order.deadline);
      over_nccl = with_nccl(main, order.deadline);
      continue;
    }
    me.session->send(
        0, me.work(order.nccl ? over_nccl : main, std::span(message).subspan(sizeof order),
                   order.number, order.deadline, order.nccl != 0));
  }
}

void release_outside(int exit_code) {
  if (no_world_here) return;
  Participant& me = participant();  // also where nothing was run: the others wait in MPI_Init
  for (int r = 1; r < me.session->size(); ++r)
    me.session->send(r, as_message(Order{Word::end, uint32_t(exit_code), 0, 0}, {}));
  me.leave();
}

}  // namespace shardproof
