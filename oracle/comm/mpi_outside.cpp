// The whole program under somebody else's launcher (`mpiexec -n 4 shardproof gate`, srun): rank 0 plans,
// judges and is a rank itself; the others run what it hands out. A crash ends the run: no parent is left
// to go on. What was judged before stands in the records that the ranks leave.
#include <fcntl.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <unistd.h>

#include <fmt/format.h>

#include "oracle/case.hpp"
#include "oracle/comm/leaks.hpp"
#include "oracle/comm/mpi.hpp"
#include "oracle/comm/mpi_protocol.hpp"
#include "oracle/comm/nccl_door.hpp"
#include "oracle/comm/standing.hpp"
#include "oracle/comm/tcp_session.hpp"

namespace shardproof {
namespace {

enum class Word : uint32_t { job, end };
struct Order {
  Word word = Word::job;
  uint32_t number = 0;  // of the job; end: exit code
  double deadline = 0;
  uint32_t nccl = 0;  // 1: the job runs over NCCL
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

// No parent watches a rank here: it ends itself when a case outlasts its deadline.
void on_alarm(int) {
  const Trace t = snapshot(page()->trace);
  const std::string text = "shardproof: a rank made no end within its deadline: " + standing(0, t) + "\n";
  (void)!::write(2, text.data(), text.size());
  ::_exit(1);
}

// Says where the rank stood; the exit code of a crash is 1 whatever the launcher makes of signals.
void on_crash(int signal) {
  const Trace t = snapshot(page()->trace);
  const std::string text = fmt::format("shardproof: a rank was killed by signal {} ({}) {}; without a parent of its own the run ends here\n", signal, ::sigabbrev_np(signal), place(t));
  (void)!::write(2, text.data(), text.size());
  ::_exit(1);
}

constexpr unsigned init_seconds = 120;

// What the environment says of a launcher that may be gone: a shell that was started by one keeps its variables.
std::string told_by_environment() {
  const OutsideLaunch launch = outside_launch().value();
  return fmt::format("the environment ({}) says rank {} of {}", launch.variables, launch.rank, launch.size);
}

constexpr const char* no_launcher_there = "; unset these where no launcher runs, or start the program with the launcher of this MPI";

bool no_world_here = false;  // MPI was opened, and its world is not the one that was told

// MPI_Init waits for as long as its peers do not come.
void on_silent_init(int) {
  const std::string text = fmt::format("shardproof: MPI_Init did not come back within {} s, although {}{}\n", init_seconds, told_by_environment(), no_launcher_there);
  (void)!::write(2, text.data(), text.size());
  ::_exit(3);
}

MpiSession* open_session() {
  const OutsideLaunch launch = outside_launch().value();
  if (launch.launcher == torchrun) return open_tcp_session();
  std::signal(SIGALRM, on_silent_init);
  ::alarm(init_seconds);
  MpiSession* session = open_mpi_session(nullptr, nullptr);
  ::alarm(0);
  no_world_here = session->size() != launch.size || session->rank() != launch.rank;
  if (no_world_here)
    throw Infrastructure(fmt::format("{}, but MPI ({}) made this rank {} of {}{}", told_by_environment(), session->library(), session->rank(), session->size(),
                                     no_launcher_there));
  return session;
}

class Participant {
 public:
  explicit Participant(double scale) : session(open_session()) {
    state.trace = &page()->trace;
    MpiSession::Context context;
    context.state = &state;
    context.page = page();
    context.deadline_scale = scale;
    context.released = [](void*) -> std::optional<std::pair<Released::Cause, std::string>> { return std::nullopt; };
    door = session->door(context);
    for (int s : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}) std::signal(s, on_crash);
    std::signal(SIGALRM, on_alarm);
  }

  void leave() {
    if (const std::string words = leaks_of_this_process(); !words.empty()) note_leak(fmt::format("MPI rank {}", session->rank()), words);
    session->finalize();
  }

  // Throws what the rank threw.
  std::vector<std::byte> work(const RankMain& main, std::span<const std::byte> job, uint32_t case_number, double deadline) {
    page()->trace = Trace{};
    page()->trace.case_number = case_number;
    RankHost host{session->rank(), session->size(), door.get(), &page()->trace, false, &state};
    ::alarm(unsigned(deadline) + 2);
    std::vector<std::byte> record = main(host, job);
    ::alarm(0);
    if (!session->end_job())
      throw Infrastructure("messages of a broken call are still on their way; under an outside launcher a world cannot be started anew: judge this line without one");
    return record;
  }

  MpiSession* session;
  RankState state;
  std::unique_ptr<Door> door;
};

Participant& participant(double scale) {
  static Participant one(scale);
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
  OutsideWorld(const WorldSpec& spec, RankMain main) : spec_(spec), main_(std::move(main)), me_(participant(spec.deadline_scale)) {
    if (me_.session->size() != spec.ranks)
      throw Infrastructure(fmt::format("expected a world of {} ranks, met one of {}: the launcher that started this program decides; start it with -n {}",
                                       spec.ranks, me_.session->size(), spec.ranks));
  }
  bool alive() const override { return true; }
  std::string description() const override { return fmt::format("{}, {} ranks, {}, started from outside", spec_.transport, spec_.ranks, me_.session->library()); }

  std::vector<RankOutcome> run(std::span<const std::byte> job, uint32_t case_number, double deadline) override {
    const double limit = deadline * spec_.deadline_scale;
    const auto order = as_message(Order{Word::job, case_number, limit, uint32_t(spec_.transport == "nccl")}, job);
    for (int r = 1; r < spec_.ranks; ++r) me_.session->send(r, order);
    std::vector<RankOutcome> outcomes(size_t(spec_.ranks));
    outcomes[0].end = RankOutcome::finished;
    outcomes[0].record = me_.work(main_, job, case_number, limit);
    outcomes[0].trace = snapshot(page()->trace);
    for (int r = 1; r < spec_.ranks; ++r) {
      outcomes[size_t(r)].end = RankOutcome::finished;
      outcomes[size_t(r)].record = me_.session->receive(r);
    }
    return outcomes;
  }

 private:
  WorldSpec spec_;
  RankMain main_;
  Participant& me_;
};

// A launcher leaves more than numbers: a descriptor or an address to reach it by. PMI_RANK alone is what a
// shell inherited, and MPI would wait for a launcher that is not there.
bool reaches_launcher() {
  if (const auto fd = number("PMI_FD")) return ::fcntl(*fd, F_GETFD) != -1;
  for (const char* address : {"PMI_PORT", "PMI_CONTROL_FD", "PMIX_RANK", "PMIX_NAMESPACE", "PMI_JOBID"})
    if (std::getenv(address)) return true;
  return false;
}

}  // namespace

std::optional<OutsideLaunch> outside_launch() {
  const auto from = [](const char* rank, const char* size, const char* name) -> std::optional<OutsideLaunch> {
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

std::unique_ptr<World> start_outside_world(const WorldSpec& spec, RankMain main) { return std::make_unique<OutsideWorld>(spec, std::move(main)); }

int serve_outside(const RankMain& main) {
  Participant& me = participant(1);
  const RankMain over_nccl = with_nccl(main, 1);
  for (;;) {
    const std::vector<std::byte> message = me.session->receive(0);
    Order order;
    if (message.size() < sizeof order) throw Infrastructure("rank 0 sent an order that is not whole");
    std::memcpy(&order, message.data(), sizeof order);
    if (order.word == Word::end) {
      me.leave();
      return leaks_noted() > 0 ? 3 : int(order.number);
    }
    me.session->send(0, me.work(order.nccl ? over_nccl : main, std::span(message).subspan(sizeof order), order.number, order.deadline));
  }
}

void release_outside(int exit_code) {
  if (no_world_here) return;
  Participant& me = participant(1);  // also where nothing was run: the others wait in MPI_Init
  for (int r = 1; r < me.session->size(); ++r) me.session->send(r, as_message(Order{Word::end, uint32_t(exit_code), 0, 0}, {}));
  me.leave();
}

}  // namespace shardproof
