// What makes a green run lie, planted: calls that do not match, ranks that leave without a word,
// exit codes that cancel each other, launchers of another MPI, empty selections. On 2, 4 and 8
// ranks of processes and, where this build has it, MPI.
//
// MPI ranks are this program started again, so what they do is a scene by name and not a closure;
// forked ranks play the same scenes. The parent believes records and wait statuses only.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <numeric>
#include <sstream>
#include <thread>

#include "oracle/comm/leaks.hpp"
#include "oracle/comm/mpi.hpp"
#include "oracle/comm/mpi_protocol.hpp"
#include "oracle/comm/world.hpp"
#include "oracle/interrupt.hpp"
#include "oracle/report.hpp"
#include "oracle/worker.hpp"
#include "suites/self/planted.hpp"

namespace shardproof {
namespace {

using Clock = std::chrono::steady_clock;
using Bytes = std::vector<std::byte>;
using Words = std::vector<std::string>;

double seconds_since(Clock::time_point t) {
  return std::chrono::duration<double>(Clock::now() - t).count();
}

Bytes bytes_of(const std::string& text) {
  const auto* first = reinterpret_cast<const std::byte*>(text.data());
  return {first, first + text.size()};
}
std::string text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}
Words words_of(const std::string& text) {
  std::istringstream in(text);
  return {std::istream_iterator<std::string>(in), {}};
}
bool holds(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// ---- Scenes: what ranks do
// ------------------------------------------------------------------------

volatile bool for_ever = true;

Group group_of(std::vector<int> members, int rank, const std::string& label) {
  Group g;
  g.members = std::move(members);
  g.me = int(std::find(g.members.begin(), g.members.end(), rank) - g.members.begin());
  g.label = label;
  g.id = group_id(g.members);
  return g;
}
Group everyone(const RankHost& host) {
  std::vector<int> members(size_t(host.size));
  std::iota(members.begin(), members.end(), 0);
  return group_of(members, host.rank, "world");
}

// A call of `op` on buffers that are large enough for any of them.
struct Play {
  Play(const RankHost& host, const Group& group)
      : door(*host.door), p(group.size()), in(size_t(4 * p), 1.0), out(size_t(4 * p * p)) {
    call.group = &group;
    call.count = 4 * p;
    call.dtype = DType::f64;
    call.file = "subject.cpp";
  }
  void make() {
    const int64_t n = call.count;
    const int64_t results = call.op == Op::all_gather       ? n * p
                            : call.op == Op::reduce_scatter ? n / p
                            : call.op == Op::shift          ? expects
                                                            : n;
    if (call.op == Op::barrier) call.count = 0;
    const View from = view_of(data(in), call.dtype, {call.op == Op::barrier ? 0 : n});
    const View to = view_of(data(out), call.dtype, {call.op == Op::barrier ? 0 : results});
    door.wait(door.start(call, from, to, nullptr), nullptr);
  }
  static std::byte* data(std::vector<double>& v) { return reinterpret_cast<std::byte*>(v.data()); }

  Door& door;
  int64_t p;
  std::vector<double> in, out;
  Call call;
  int64_t expects = 4 * p;
};

// The call that all make, and how one of them departs from it.
struct Field {
  const char* name;
  Op op;
  Reduce reduce;
  std::function<void(Play&)> change;
};
const std::vector<Field>& fields() {
  static const std::vector<Field> all{
      {"operation", Op::all_reduce, Reduce::sum, [](Play& p) { p.call.op = Op::reduce_scatter; }},
      {"reduction", Op::all_reduce, Reduce::sum, [](Play& p) { p.call.reduce = Reduce::max; }},
      {"dtype", Op::all_reduce, Reduce::sum, [](Play& p) { p.call.dtype = DType::i64; }},
      {"count", Op::all_gather, Reduce::none, [](Play& p) { p.call.count -= 1; }},
      {"root", Op::broadcast, Reduce::none, [](Play& p) { p.call.root_or_hop = 1; }},
      {"length", Op::shift, Reduce::none, [](Play& p) { p.expects -= 1; }},
  };
  return all;
}

std::string mismatched(RankHost& host, const Words& words) {  // FIELD CULPRIT
  const Field& field = fields().at(size_t(std::stoi(words.at(1))));
  const Group world = everyone(host);
  host.state->phase = Phase::backward;
  Play play(host, world);
  play.call.op = field.op;
  play.call.reduce = field.reduce;
  play.call.line = 5;
  if (field.op == Op::shift) play.call.root_or_hop = 1;
  if (host.rank == std::stoi(words.at(2))) {
    field.change(play);
    play.call.line = 6;
  }
  play.make();
  return "not released";
}

// Calls of every kind on the world and on its halves; sums are looked at.
std::string clean(RankHost& host, const Words& words) {  // CALLS
  const Group world = everyone(host);
  std::vector<int> half;
  for (int r = host.rank % 2; r < host.size; r += 2) half.push_back(r);
  const Group mine = group_of(half, host.rank, "half");
  const Op ops[] = {Op::all_reduce, Op::all_gather, Op::shift,     Op::reduce_scatter,
                    Op::barrier,    Op::broadcast,  Op::all_reduce};
  for (int i = 0; i < std::stoi(words.at(1)); ++i) {
    const Group& group = i % 3 == 2 && mine.size() > 1 ? mine : world;
    Play play(host, group);
    play.call.op = ops[i % 7];
    const bool sums = play.call.op == Op::all_reduce || play.call.op == Op::reduce_scatter;
    if (sums) play.call.reduce = Reduce::sum;
    if (play.call.op == Op::shift) play.call.root_or_hop = i % 2 ? 1 : -1;
    play.call.line = host.rank + 1;  // call sites may differ in right code
    play.make();
    if (sums && play.out[0] != double(group.size())) return fmt::format("wrong in call {}", i);
  }
  return "done";
}

// A good call, then one or all ranks leave while the others are in the next one.
std::string left(RankHost& host, const Words& words) {  // exit|signal|throw CODE RANK|each
  const Group world = everyone(host);
  Play play(host, world);
  host.state->phase = Phase::forward;
  play.call.op = Op::all_reduce;
  play.call.reduce = Reduce::sum;
  play.call.line = 11;
  play.make();
  const bool each = words.at(3) == "each";
  const int code = std::stoi(words.at(2)) + (each ? host.rank : 0);
  if (each || std::stoi(words.at(3)) == host.rank) {
    if (words.at(1) == "throw") throw std::runtime_error(fmt::format("no such tile {}", code));
    words.at(1) == "exit" ? _exit(code) : void(raise(code));
  }
  play.call.line = 12;
  play.make();
  return "not released";
}

std::string absent(RankHost& host, const Words& words) {  // RANK that makes one call less
  const Group world = everyone(host);
  host.state->phase = Phase::backward;
  const int calls = std::stoi(words.at(1)) == host.rank ? 2 : 3;
  for (int i = 0; i < calls; ++i) {
    Play play(host, world);
    play.call.line = 20 + i;
    play.make();
  }
  return "done";
}

std::string groups_crossed(RankHost& host, const Words&) {
  const Group world = everyone(host);
  std::vector<int> turned(world.members.rbegin(), world.members.rend());
  const Group back = group_of(turned, host.rank, "turned");
  Play play(host, host.rank == 0 ? back : world);
  play.make();
  return "not released";
}

std::string endless(RankHost& host, const Words& words) {  // RANK: deaf to TERM
  if (std::stoi(words.at(1)) == host.rank) {
    signal(SIGTERM, SIG_IGN);
    while (for_ever) {
    }
  }
  const Group world = everyone(host);
  Play(host, world).make();
  return "not released";
}

std::string barriers(RankHost& host, const Words&) {
  const Group world = everyone(host);
  while (for_ever) Play(host, world).make();
  return "not released";
}

std::string reads_stdin(RankHost&, const Words&) {
  char c;
  return fmt::format("read {}", read(STDIN_FILENO, &c, 1));
}

// The head of a record on the way to the parent, and no more.
std::string half_a_record(RankHost& host, const Words& words) {  // RANK
  if (std::stoi(words.at(1)) != host.rank) return "whole";
  for (int fd = 3; fd < 256; ++fd) {
    int type = 0, domain = 0;
    socklen_t size = sizeof type;
    if (getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &size) != 0 || domain != AF_UNIX) continue;
    sockaddr_storage peer = {};
    socklen_t length = sizeof peer;
    if (getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &length) != 0) continue;
    if (!holds(reinterpret_cast<const char*>(&peer) + 2, "/parent")) continue;
    const Frame head{Frame::record, 0, 1000};
    if (write(fd, &head, sizeof head) == ssize_t(sizeof head)) _exit(0);
  }
  return "no connection to the parent was found";
}

// Writes where no page is, after a call: what a library of MPI installs late is there by then.
std::string astray(RankHost& host, const Words& words) {  // RANK
  const Group world = everyone(host);
  Play play(host, world);
  host.state->phase = Phase::forward;
  play.call.op = Op::all_reduce;
  play.call.reduce = Reduce::sum;
  play.make();
  static const volatile uintptr_t nowhere = 0x10;
  if (std::stoi(words.at(1)) == host.rank) *reinterpret_cast<volatile int*>(nowhere) = 1;
  play.make();
  return "not released";
}

std::string forgetful(RankHost& host, const Words& words) {  // RANK that leaks
  if (std::stoi(words.at(1)) != host.rank) return "done";
  const uintptr_t hidden = ~uintptr_t(::operator new(4321));  // no pointer that could be followed
  return fmt::format("forgot {:x}", hidden);
}

using Scene = std::string (*)(RankHost&, const Words&);
const std::map<std::string, Scene>& scenes() {
  static const std::map<std::string, Scene> all{
      {"mismatched", mismatched},
      {"clean", clean},
      {"left", left},
      {"absent", absent},
      {"crossed", groups_crossed},
      {"endless", endless},
      {"barriers", barriers},
      {"stdin", reads_stdin},
      {"half_a_record", half_a_record},
      {"astray", astray},
      {"forgetful", forgetful},
  };
  return all;
}

// "scene NAME ..."; anything else is a case, whose record SHARDPROOF_TRUNCATE cuts on one rank.
Bytes play(RankHost& host, std::span<const std::byte> job) {
  const std::string text = text_of(job);
  if (!text.starts_with("scene ")) {
    static const RankMain cases = rank_main(planted::registry());
    Bytes record = cases(host, job);
    const char* rank = std::getenv("SHARDPROOF_TRUNCATE");
    if (rank && std::atoi(rank) == host.rank) record.resize(record.size() / 2);
    return record;
  }
  const Words words = words_of(text.substr(6));
  try {
    return bytes_of(scenes().at(words.at(0))(host, words));
  } catch (const Released& r) {
    const char* causes[] = {"mismatch",  "deadlock",    "deadline",
                            "peer_lost", "world_ended", "overdue"};
    return bytes_of(fmt::format("released by {}: {}", causes[r.cause], r.what()));
  }
}

// ---- The parent's side
// ----------------------------------------------------------------------------

// Processes whose command line holds a text.
std::vector<int> processes_with(const std::string& text) {
  std::vector<int> found;
  std::error_code e;
  for (const auto& entry : std::filesystem::directory_iterator("/proc", e)) {
    const int pid = std::atoi(entry.path().filename().c_str());
    if (pid <= 0 || pid == getpid()) continue;
    std::ifstream in(entry.path() / "cmdline");
    std::string line;  // cut short where the process ends meanwhile
    std::getline(in, line);
    if (holds(line, text)) found.push_back(pid);
  }
  return found;
}

// A folder of this test alone: its name is in the command line of every MPI process.
class Folder {
 public:
  Folder() {
    char name[] = "/tmp/lies.XXXXXX";
    path_ = mkdtemp(name);
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  const std::string& path() const { return path_; }
  // "" once no process of a world that was started here is left; waits for at most `seconds`.
  std::string left(double seconds) const {
    std::vector<int> pids;
    for (const auto begin = Clock::now();;) {
      pids = processes_with(path_);
      if (pids.empty() || seconds_since(begin) > seconds) break;
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    return fmt::format("{}", fmt::join(pids, " "));
  }

 private:
  std::string path_;
};

struct Lane {
  const char* transport;
  int ranks;
};
void PrintTo(const Lane& l, std::ostream* out) { *out << l.transport << ".np" << l.ranks; }

class Lies : public testing::TestWithParam<Lane> {
 protected:
  void SetUp() override {
    if (mpi() && !mpi_missing().empty()) GTEST_SKIP() << mpi_missing();
  }
  void TearDown() override {
    world_.reset();
    EXPECT_EQ(children_.left(), "");
    EXPECT_EQ(folder_.left(5), "") << "MPI processes are left behind";
  }
  bool mpi() const { return GetParam().transport == std::string("mpi"); }
  int p() const { return GetParam().ranks; }

  WorldSpec spec(double scale = 1) const {
    WorldSpec s;
    s.transport = GetParam().transport;
    s.ranks = p();
    s.deadline_scale = scale;
    s.run_directory = folder_.path();
    return s;
  }
  // A message of a shift concerns its two ends only, and under MPI its receiver; others may have
  // ended their call by then.
  bool looks(const Field& field, int rank, int culprit) const {
    const bool sends = !mpi() && rank == (culprit + p() - 1) % p();
    return field.op != Op::shift || rank == culprit || sends;
  }
  // On a world that lives across scenes until one of them ends it.
  void live(double scale = 1) {
    if (world_ && world_->alive() && scale == scale_) return;
    world_.reset();
    world_ = start_world(spec(scale), play);
    scale_ = scale;
  }
  std::vector<RankOutcome> run(const std::string& scene, double scale = 1) {
    live(scale);
    return world_->run(bytes_of("scene " + scene), ++number_, case_deadline_seconds);
  }

  planted::Children children_;
  Folder folder_;
  std::unique_ptr<World> world_;
  double scale_ = 1;
  uint32_t number_ = 0;
};

const Lane lanes[] = {{"processes", 2}, {"processes", 4}, {"processes", 8},
                      {"mpi", 2},       {"mpi", 4},       {"mpi", 8}};
INSTANTIATE_TEST_SUITE_P(Judge, Lies, testing::ValuesIn(lanes), [](const auto& info) {
  return fmt::format("{}_np{}", info.param.transport, info.param.ranks);
});

std::string said(const RankOutcome& o) {
  return o.end == RankOutcome::finished ? text_of(o.record) : o.text;
}

// --- MPICH accepts mismatches and returns garbage; swapped and missing calls hang

// Both sides of the difference with their call sites, and the rank that departs (of two ranks
// nobody can say which one does).
void expect_named(const std::string& text, const Field& field, int culprit, int p) {
  EXPECT_TRUE(text.starts_with("released by mismatch: mismatch: ")) << text;
  EXPECT_TRUE(holds(text, "subject.cpp:5") && holds(text, "subject.cpp:6")) << text;
  const std::string rank = fmt::format("rank {}", culprit);
  if (field.op == Op::shift) {
    EXPECT_TRUE(holds(text, fmt::format("to {}, which expects {}", rank, 4 * p - 1))) << text;
    return;
  }
  EXPECT_TRUE(holds(text.substr(0, text.find("\nrank")), field.name)) << text;
  EXPECT_TRUE(holds(text, rank + ": backward, call 1 on its group: ")) << text;
  if (p > 2) {
    EXPECT_TRUE(holds(text, rank + " differs from the other members in")) << text;
  }
}

TEST_P(Lies, EachFieldOfACallOnEachRankIsNamed) {
  const int count = int(fields().size());
  for (int culprit = 0; culprit < p(); ++culprit)
    for (int f = 0; f < count; ++f) {
      const Field& field = fields()[size_t(f)];
      SCOPED_TRACE(fmt::format("{} on rank {}", field.name, culprit));
      const auto outcomes = run(fmt::format("mismatched {} {}", f, culprit));
      for (int r = 0; r < p(); ++r) {
        EXPECT_EQ(outcomes[size_t(r)].end, RankOutcome::finished) << outcomes[size_t(r)].text;
        if (looks(field, r, culprit)) expect_named(said(outcomes[size_t(r)]), field, culprit, p());
      }
    }
}

TEST_P(Lies, TenThousandCleanCallsAreSilent) {
  for (const RankOutcome& o : run("clean 10000", 10)) {
    EXPECT_EQ(o.end, RankOutcome::finished) << o.text;
    EXPECT_EQ(text_of(o.record), "done");
  }
}

TEST_P(Lies, AMissingCallIsADeadlockAtOnce) {
  for (int missing = 0; missing < p(); ++missing) {
    if (mpi() && missing != 0 && missing != p() - 1) continue;  // each ends an MPI world
    live(10);
    const auto begin = Clock::now();
    const auto outcomes = run(fmt::format("absent {}", missing), 10);
    EXPECT_LT(seconds_since(begin), 90) << "the deadline of a call is 100 s";
    for (int r = 0; r < p(); ++r) {
      const std::string text = said(outcomes[size_t(r)]);
      if (r == missing) {
        EXPECT_EQ(text, "done");
        continue;
      }
      EXPECT_TRUE(text.starts_with("released by deadlock: ")) << text;
      EXPECT_TRUE(holds(text, fmt::format("rank {} left backward after call 2", missing))) << text;
      EXPECT_TRUE(holds(text, "in call 3 of backward: barrier")) << text;
    }
  }
}

TEST_P(Lies, CallsOnOtherGroupsAreADeadlockAtOnce) {
  for (const RankOutcome& o : run("crossed")) {
    const std::string text = said(o);
    EXPECT_TRUE(text.starts_with("released by deadlock: ")) << text;
    EXPECT_TRUE(holds(text, "barrier, turned{") && holds(text, "barrier, world{")) << text;
  }
}

// --- a rank that leaves with _exit(0); exit codes that cancel each other

TEST_P(Lies, ExitWithZeroIsCaughtEveryTime) {
  // Each ends a world, and an MPI world takes a while to start: all 200 of them belong to nightly.
  const char* tier = std::getenv("SHARDPROOF_TEST_TIER");
  const bool nightly = tier && std::string(tier) == "nightly";
  const int times = !mpi() || nightly ? 200 : p() == 2 ? 20 : 40 / p();
  int caught = 0;
  for (int i = 0; i < times; ++i) {
    const int culprit = i % p();
    const auto outcomes = run(fmt::format("left exit 0 {}", culprit));
    const RankOutcome& o = outcomes[size_t(culprit)];
    EXPECT_EQ(o.end, RankOutcome::exited) << o.text;
    EXPECT_EQ(o.code, 0);
    bool told = true;
    for (int r = 0; r < p(); ++r) {
      if (r == culprit) continue;
      const std::string text = said(outcomes[size_t(r)]);
      told = told && holds(text, "released by peer_lost") &&
             holds(text, fmt::format("rank {} left", culprit)) && holds(text, "exit code 0");
      if (!told) ADD_FAILURE() << "rank " << r << ": " << text;
    }
    EXPECT_FALSE(world_->alive());
    caught += o.end == RankOutcome::exited && told;
  }
  EXPECT_EQ(caught, times);
}

TEST_P(Lies, MixedExitCodesAreNobodysSkip) {
  const auto outcomes = run("left exit 77 each");  // 77, 78, ...
  int by_themselves = 0;
  for (int r = 0; r < p(); ++r) {
    const RankOutcome& o = outcomes[size_t(r)];
    if (o.end == RankOutcome::finished) {  // still in the first call when another one left
      EXPECT_TRUE(holds(text_of(o.record), "released by peer_lost")) << text_of(o.record);
    }
    if (o.end != RankOutcome::exited) continue;
    EXPECT_EQ(o.code, 77 + r);
    ++by_themselves;
  }
  EXPECT_GE(by_themselves, 1);
  EXPECT_FALSE(world_->alive());
}

TEST_P(Lies, AKilledRankIsNamed) {
  const int culprit = p() - 1;
  const auto outcomes = run(fmt::format("left signal {} {}", SIGKILL, culprit));
  const RankOutcome& o = outcomes[size_t(culprit)];
  EXPECT_EQ(o.end, RankOutcome::signalled);
  EXPECT_EQ(o.code, SIGKILL);
  EXPECT_TRUE(holds(o.text, "SIGKILL")) << o.text;
  for (int r = 0; r < culprit; ++r) {
    const std::string text = said(outcomes[size_t(r)]);
    EXPECT_TRUE(holds(text, fmt::format("rank {} was killed by", culprit))) << text;
  }
}

// --- an assertion that fails on one rank leaves the others in the next collective

TEST_P(Lies, AThrowSpeaksForItselfAndTheOthersAreReleased) {
  const auto outcomes = run("left throw 4 0");
  EXPECT_EQ(outcomes[0].end, RankOutcome::threw);
  EXPECT_EQ(outcomes[0].text, "no such tile 4");
  for (int r = 1; r < p(); ++r) {
    EXPECT_EQ(outcomes[size_t(r)].end, RankOutcome::finished) << outcomes[size_t(r)].text;
    const std::string text = said(outcomes[size_t(r)]);
    EXPECT_TRUE(text.starts_with("released by deadlock: ")) << text;
    EXPECT_TRUE(holds(text, "rank 0 left forward after call 1")) << text;
  }
}

// --- watchdogs: TERM, then KILL, and nobody is left behind

// A call's deadline counts from when the rank is in it. Where it is given no core for so long that
// the job's passes before, a longer one decides.
TEST_P(Lies, ADeafRankIsHungAndEnded) {
  std::string text;
  for (const double scale : {0.03, 0.3, 1.}) {
    const auto begin = Clock::now();
    const auto outcomes = run("endless 1", scale);
    EXPECT_EQ(outcomes[1].end, RankOutcome::hung) << outcomes[1].text;
    EXPECT_LT(seconds_since(begin), 30 + (kill_after_seconds + 10) * scale);
    EXPECT_FALSE(world_->alive());
    text = said(outcomes[0]);
    if (text.starts_with("released by deadline: ")) break;
  }
  EXPECT_TRUE(text.starts_with("released by deadline: ")) << text;
}

// --- a rank that leaks: it leaves by _exit, and no sanitizer would say so

TEST_P(Lies, ALeakOfOneRankIsToldOnce) {
  if (!leaks_are_looked_for()) GTEST_SKIP() << "built without AddressSanitizer";
  const int culprit = p() - 1, before = leaks_noted();
  run("clean 7");
  world_.reset();
  EXPECT_EQ(leaks_noted(), before) << "healthy ranks";
  testing::internal::CaptureStderr();
  run(fmt::format("forgetful {}", culprit));
  world_.reset();
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_EQ(leaks_noted(), before + 1);
  EXPECT_TRUE(holds(said, fmt::format("rank {}", culprit)) && holds(said, "4321 byte")) << said;
}

// --- ranks read nothing

TEST_P(Lies, StandardInputIsEmpty) {
  for (const RankOutcome& o : run("stdin")) EXPECT_EQ(said(o), "read 0");
}

// --- counts of processes come from the case alone

TEST_P(Lies, NoVariableLimitsTheRanks) {
  setenv("MPIEXEC_MAX_NUMPROCS", "1", 1);
  const auto outcomes = run("clean 7");
  unsetenv("MPIEXEC_MAX_NUMPROCS");
  EXPECT_EQ(int(outcomes.size()), p());
  for (const RankOutcome& o : outcomes) EXPECT_EQ(said(o), "done");
}

// --- a parent that is gone

TEST_P(Lies, NobodyOutlivesTheParent) {
  int ready[2];
  ASSERT_EQ(pipe(ready), 0);
  const pid_t parent = fork();
  ASSERT_GE(parent, 0);
  if (parent == 0) {
    auto world = start_world(spec(), play);
    world->run(bytes_of("scene clean 1"), 1, case_deadline_seconds);
    (void)!write(ready[1], "x", 1);
    world->run(bytes_of("scene barriers"), 2, case_deadline_seconds);
    _exit(0);
  }
  close(ready[1]);
  char c = 0;
  ASSERT_EQ(read(ready[0], &c, 1), 1);
  kill(parent, SIGKILL);
  waitpid(parent, nullptr, 0);
  // Ranks hold the writing end: when all are gone, it is closed.
  std::thread reader([&] { (void)!read(ready[0], &c, 1); });
  const auto begin = Clock::now();
  reader.join();
  EXPECT_LT(seconds_since(begin), 5);
  close(ready[0]);
  EXPECT_EQ(folder_.left(5), "");
}

// ---- MPI's launcher
// -------------------------------------------------------------------------------

constexpr int stranger_seconds = 60;

// Until the other side closes the connection, or for as long as no test waits.
int be_a_stranger(const std::string& address) {
  pollfd p{connect_to(address), POLLIN, 0};
  return p.fd >= 0 && ::poll(&p, 1, stranger_seconds * 1000) > 0 ? 0 : 1;
}

class Launcher : public testing::Test {
 protected:
  void SetUp() override {
    if (!mpi_missing().empty()) GTEST_SKIP() << mpi_missing();
  }
  void TearDown() override {
    EXPECT_EQ(children_.left(), "");
    EXPECT_EQ(folder_.left(5), "");
  }
  WorldSpec spec(int ranks) const {
    WorldSpec s;
    s.transport = "mpi";
    s.ranks = ranks;
    s.run_directory = folder_.path();
    return s;
  }
  std::string refusal(const WorldSpec& s) const {
    try {
      return "started: " + start_world(s, play)->description();
    } catch (const Infrastructure& e) {
      return e.what();
    }
  }
  planted::Children children_;
  Folder folder_;
};

std::string word_of(int pid, const std::string& label) {
  std::ifstream in(fmt::format("/proc/{}/status", pid));
  for (std::string word; in >> word;)
    if (word == label && in >> word) return word;
  return "";
}
std::string name_of(int pid) { return word_of(pid, "Name:"); }

std::vector<int> launchers_with(const std::string& text) {
  std::vector<int> list = processes_with(text);
  std::erase_if(list, [](int pid) {
    return !holds(name_of(pid), "mpiexec") && !holds(name_of(pid), "mpirun");
  });
  return list;
}

// Each is the child of a process of its name, which watches it.
std::vector<int> ranks_with(const std::string& text) {
  std::vector<int> list = processes_with(text);
  std::erase_if(list, [all = list](int pid) {
    const int parent = std::atoi(word_of(pid, "PPid:").c_str());
    return std::ranges::count(all, parent) == 0 || name_of(parent) != name_of(pid);
  });
  return list;
}

TEST_F(Launcher, KilledInTheMiddleLeavesNoRank) {
  auto world = start_world(spec(4), play);
  const std::vector<int> launchers = launchers_with(folder_.path());
  ASSERT_EQ(launchers.size(), 1u);
  const pid_t killer = fork();
  if (killer == 0) {
    usleep(200'000);
    kill(launchers[0], SIGKILL);
    _exit(0);
  }
  const auto begin = Clock::now();
  std::string why = "nobody misses it";
  try {
    world->run(bytes_of("scene barriers"), 1, case_deadline_seconds);
  } catch (const Infrastructure& e) {
    why = e.what();
  }
  EXPECT_LT(seconds_since(begin), 10);
  waitpid(killer, nullptr, 0);
  EXPECT_TRUE(holds(why, "the launcher 'mpiexec' was killed by signal 9 (SIGKILL)")) << why;
  EXPECT_FALSE(world->alive());
  EXPECT_EQ(folder_.left(5), "");
}

// What ends between two jobs is told before the next one, which nobody is blamed in.
TEST_F(Launcher, AnEndBetweenTwoJobsIsTold) {
  const auto told_when_killed = [&](std::vector<int> (*of)(const std::string&), size_t due) {
    auto world = start_world(spec(2), play);
    world->run(bytes_of("scene clean 1"), 1, case_deadline_seconds);
    EXPECT_EQ(world->lost(), "");
    const std::vector<int> found = of(folder_.path());
    EXPECT_EQ(found.size(), due);
    if (found.empty()) return std::pair(0, std::string("none found"));
    kill(found.back(), SIGKILL);
    std::string why;
    for (const auto begin = Clock::now(); why.empty() && seconds_since(begin) < 20; usleep(1000))
      why = world->lost();
    return std::pair(found.back(), why);
  };
  const auto [rank, of_rank] = told_when_killed(ranks_with, 2);
  EXPECT_TRUE(holds(of_rank, fmt::format("(process {}) was killed by signal 9 (SIGKILL)", rank)))
      << of_rank;
  const std::string of_launcher = told_when_killed(launchers_with, 1).second;
  EXPECT_TRUE(holds(of_launcher, "the launcher 'mpiexec' was killed by signal 9 (SIGKILL), and "))
      << of_launcher;
}

TEST_F(Launcher, OfAnotherMpiStartsSingletonsAndIsRefused) {
  const std::string script = folder_.path() + "/mpiexec";
  std::ofstream(script) << "#!/bin/sh\nshift; n=$1; shift\n"
                           "while [ $n -gt 0 ]; do \"$@\" & n=$((n-1)); done; wait\n";
  std::filesystem::permissions(script, std::filesystem::perms::owner_all);
  WorldSpec s = spec(3);
  s.mpiexec = script;
  const std::string why = refusal(s);
  EXPECT_TRUE(holds(why, "expected a world of 3 ranks, met one of 1")) << why;
  EXPECT_TRUE(holds(why, "--mpiexec")) << why;
}

TEST_F(Launcher, ThatIsNotThereIsNamed) {
  WorldSpec s = spec(2);
  s.mpiexec = "no_such_launcher";
  const std::string why = refusal(s);
  EXPECT_TRUE(holds(why, "no_such_launcher") && holds(why, "--mpiexec")) << why;
}

TEST_F(Launcher, ThatEndsAtOnceIsNamedWithItsWords) {
  const std::string script = folder_.path() + "/mpiexec";
  std::ofstream(script) << "#!/bin/sh\necho no slots here >&2\nexit 0\n";
  std::filesystem::permissions(script, std::filesystem::perms::owner_all);
  WorldSpec s = spec(2);
  s.mpiexec = script;
  const std::string why = refusal(s);
  EXPECT_TRUE(holds(why, "no slots here")) << why;
}

TEST_F(Launcher, IsNotWaitedForOnceInterrupted) {
  const std::string script = folder_.path() + "/mpiexec";
  std::ofstream(script) << "#!/bin/sh\nexec sleep 60\n";
  std::filesystem::permissions(script, std::filesystem::perms::owner_all);
  WorldSpec s = spec(2);
  s.mpiexec = script;
  const auto begin = Clock::now();
  const pid_t parent = fork();
  if (parent == 0) {
    catch_interrupts();
    kill(getpid(), SIGINT);
    _exit(holds(refusal(s), "interrupted") ? 42 : 1);
  }
  int status = 0;
  waitpid(parent, &status, 0);
  EXPECT_EQ(WEXITSTATUS(status), 42);
  EXPECT_LT(seconds_since(begin), 30);
}

// Somebody connects to the parent and never says a word.
TEST_F(Launcher, RanksAreNotKeptWaitingByASilentStranger) {
  const std::string script = folder_.path() + "/mpiexec";
  std::ofstream(script)
      << "#!/bin/sh\n\"$3\" --stranger \"$5\" &\nsleep 0.5\nexec mpiexec \"$@\"\n";
  std::filesystem::permissions(script, std::filesystem::perms::owner_all);
  WorldSpec s = spec(2);
  s.mpiexec = script;
  const auto begin = Clock::now();
  EXPECT_TRUE(start_world(s, play)->alive());
  EXPECT_LT(seconds_since(begin), stranger_seconds);
}

// A launcher of MPICH waits for ever for a rank that was killed before its MPI_Init.
TEST_F(Launcher, ARankThatIsKilledBeforeItCalledBackIsNotWaitedFor) {
  setenv("SHARDPROOF_KILLED_EARLY", "1", 1);
  const auto begin = Clock::now();
  const std::string why = refusal(spec(2));
  unsetenv("SHARDPROOF_KILLED_EARLY");
  EXPECT_TRUE(holds(why, "was killed by signal 9 (SIGKILL)") || holds(why, "ended before its 2"))
      << why;
  EXPECT_LT(seconds_since(begin), 60);
}

TEST_F(Launcher, NeedsAFolderThatCanBeWrittenTo) {
  WorldSpec s = spec(2);
  s.run_directory.clear();
  setenv("TMPDIR", "/proc/no/such/folder", 1);
  const std::string why = refusal(s);
  unsetenv("TMPDIR");
  EXPECT_TRUE(holds(why, "/proc/no/such/folder") && holds(why, "TMPDIR")) << why;
}

TEST_F(Launcher, HalfARecordIsNoRecord) {
  auto world = start_world(spec(3), play);
  const auto outcomes = world->run(bytes_of("scene half_a_record 1"), 1, case_deadline_seconds);
  EXPECT_EQ(said(outcomes[0]), "whole");
  EXPECT_EQ(outcomes[1].end, RankOutcome::exited) << said(outcomes[1]);
  EXPECT_EQ(outcomes[1].code, 0);
  EXPECT_TRUE(outcomes[1].record.empty());
  EXPECT_FALSE(world->alive());
}

TEST_F(Launcher, AFaultIsToldWithItsAddressAndASignalWithout) {
  const auto outcomes = start_world(spec(2), play)->run(bytes_of("scene astray 1"), 1, 30);
  EXPECT_EQ(outcomes[1].text, "was killed by signal 11 (SIGSEGV) at address 0x10");
  const auto sent = start_world(spec(2), play)
                        ->run(bytes_of(fmt::format("scene left signal {} 1", SIGSEGV)), 1, 30);
  EXPECT_EQ(sent[1].text, "was killed by signal 11 (SIGSEGV)");
}

// Each call of theirs is met, and all of them together take too long.
TEST_F(Launcher, APassedDeadlineSaysWhereEveryRankStands) {
  WorldSpec s = spec(2);
  s.deadline_scale = 0.02;
  const auto outcomes = start_world(s, play)->run(bytes_of("scene barriers"), 1, 30);
  for (const RankOutcome& o : outcomes) {
    const std::string text = said(o);
    EXPECT_TRUE(text.starts_with("released by overdue: the job's deadline of 0.6 s")) << text;
    EXPECT_TRUE(holds(text, ": barrier, world{0,1}")) << text;
    EXPECT_TRUE(holds(text, "\nranks 0, 1 ") ||
                (holds(text, "\nrank 0 ") && holds(text, "\nrank 1 ")))
        << text;
  }
}

// A case as the gate runs it: the record of one rank is cut on its way.
TEST_F(Launcher, ATruncatedRecordIsNoJudgement) {
  const Case line = planted::line_of("mapping_reduce tp=4 tokens=3 hidden=5 transport=mpi", "");
  EXPECT_EQ(planted::differs(planted::judge(line, {"forward"}), {"forward", Verdict::passed}), "");
  setenv("SHARDPROOF_TRUNCATE", "2", 1);
  std::string why = "judged";
  try {
    planted::judge(line, {"forward"});
  } catch (const Infrastructure& e) {
    why = e.what();
  }
  unsetenv("SHARDPROOF_TRUNCATE");
  EXPECT_TRUE(holds(why, "rank 2") && holds(why, "not whole")) << why;
}

// ---- Counting
// -------------------------------------------------------------------------------------

CaseResult case_with(Verdict v) {
  CaseResult c;
  c.line = c.canonical = "mapping_copy tp=2";
  c.lane = "processes.np2";
  c.checks.emplace_back();
  c.checks[0].check = "forward";
  c.checks[0].verdict = v;
  return c;
}

Report report_of(const std::vector<Verdict>& verdicts) {
  Report r;
  r.complete = true;
  for (Verdict v : verdicts) r.cases.push_back(case_with(v));
  return r;
}

TEST(Counting, NothingAndSkipsOnlyAreNoJudgement) {
  EXPECT_EQ(exit_code(report_of({})), 3);
  EXPECT_EQ(exit_code(report_of({Verdict::skipped, Verdict::skipped})), 3);
  EXPECT_EQ(exit_code(report_of({Verdict::passed, Verdict::skipped})), 0);
}

TEST(Counting, WhatIsDueAndNeverRanIsNoJudgement) {
  EXPECT_EQ(exit_code(report_of({Verdict::passed, Verdict::untested})), 3);
  EXPECT_EQ(exit_code(report_of({Verdict::passed, Verdict::vacuous})), 3);
}

TEST(Counting, OneFailureAmongPassesFails) {
  for (Verdict v : {Verdict::failed, Verdict::hung, Verdict::crashed})
    EXPECT_EQ(exit_code(report_of({Verdict::passed, v, Verdict::passed})), 1) << name(v);
}

TEST(Counting, ARunThatDidNotReachItsEndIsNoJudgement) {
  Report r = report_of({Verdict::passed});
  r.complete = false;
  EXPECT_EQ(exit_code(r), 3);
}

TEST(Counting, NamesHoldNothingThatAFilterReads) {
  for (const char* name : {"order=tp-cp-dp", "a*", "what?", "a:b"}) {
    Registry r;
    Contract c = planted::registry().contract("mapping_copy");
    c.name = name;
    EXPECT_THROW(r.add(std::move(c)), std::invalid_argument) << name;
  }
}

// ---- Retries
// --------------------------------------------------------------------------------------

// A subject that is wrong in the first world only, and right ever after.
TEST(Retries, NeverTurnAFailureIntoAPass) {
  auto* worlds = static_cast<std::atomic<int>*>(
      mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  ASSERT_NE(worlds, MAP_FAILED);
  Registry r;
  r.add(planted::registry().contract("mapping_copy"));
  Declared declared;
  declared.backward = false;
  r.add(Subject{"", "mapping_copy",
                planted::forward([worlds](Rank& rank, const View& in, const View& out) {
                  copy(in, out);
                  const bool first = rank.world_rank() == 0 && worlds->fetch_add(1) == 0;
                  if (first) store(out.flat(2), out.dtype, 12345);
                }),
                declared});
  Options options;
  options.checks = {"forward"};
  Progress quiet;
  const Case line = parse("mapping_copy tp=2 tokens=3 hidden=4", r);
  const Report report = run_line(line, options, r, quiet);
  ASSERT_EQ(report.cases.size(), 1u);
  EXPECT_EQ(report.cases[0].checks.at(0).verdict, Verdict::failed);
  EXPECT_TRUE(report.cases[0].steady_known);
  EXPECT_FALSE(report.cases[0].steady);
  EXPECT_GT(worlds->load(), 1) << "the case was run again, to call it intermittent";
  EXPECT_EQ(exit_code(report), 1);
  munmap(worlds, 4096);
}

// ---- One report
// -----------------------------------------------------------------------------------

// Played by the program that the next test starts: ranks of both transports under one GoogleTest.
TEST(Inner, DISABLED_Passes) {
  for (const char* transport : {"processes", "mpi"}) {
    if (transport == std::string("mpi") && !mpi_missing().empty()) continue;
    WorldSpec s;
    s.transport = transport;
    s.ranks = 4;
    for (const RankOutcome& o : start_world(s, play)->run(bytes_of("scene clean 7"), 1, 30))
      EXPECT_EQ(said(o), "done");
  }
}
TEST(Inner, DISABLED_Fails) {
  WorldSpec s;
  s.ranks = 4;
  for (const RankOutcome& o : start_world(s, play)->run(bytes_of("scene left exit 0 3"), 1, 30))
    EXPECT_EQ(o.end, RankOutcome::finished);
}

size_t count(const std::string& text, const std::string& part) {
  size_t n = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++n;
  return n;
}

TEST(OneReport, RanksNeitherOverwriteNorRepeatIt) {
  const Folder folder;
  const std::string xml = folder.path() + "/report.xml", log = folder.path() + "/log";
  const std::string command = fmt::format(
      "'{}' --gtest_filter='Inner.*' --gtest_also_run_disabled_tests --gtest_shuffle "
      "--gtest_output='xml:{}' > '{}' 2>&1",
      std::filesystem::read_symlink("/proc/self/exe").string(), xml, log);
  const int status = std::system(command.c_str());
  EXPECT_EQ(WEXITSTATUS(status), 1);
  std::ifstream in(xml);
  const std::string report((std::istreambuf_iterator<char>(in)), {});
  EXPECT_EQ(count(report, "<testcase "), 2u) << report;
  EXPECT_TRUE(holds(report, "tests=\"2\" failures=\"1\"")) << report;
  std::ifstream words(log);
  const std::string printed((std::istreambuf_iterator<char>(words)), {});
  EXPECT_EQ(count(printed, "[==========] 2 tests"), 1u) << printed;
}

}  // namespace
}  // namespace shardproof

// The process of the rank that SHARDPROOF_KILLED_EARLY names ends as soon as it is there.
void die_early() {
  const char *doomed = std::getenv("SHARDPROOF_KILLED_EARLY"), *rank = std::getenv("PMI_RANK");
  if (doomed && rank && std::string(doomed) == rank)
    pthread_atfork(nullptr, nullptr, [] { raise(SIGKILL); });
}

int main(int argc, char** argv) {
  if (argc > 1 && std::string(argv[1]) == "--worker") {
    die_early();
    return shardproof::mpi_worker(argc, argv, shardproof::play);
  }
  if (argc > 2 && std::string(argv[1]) == "--stranger") return shardproof::be_a_stranger(argv[2]);
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
