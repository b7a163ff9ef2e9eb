// Ranks over shared memory: collectives are right, and whatever becomes of a rank is named.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstring>
#include <functional>
#include <future>
#include <numeric>
#include <thread>

#include "oracle/case.hpp"
#include "oracle/comm/arena.hpp"
#include "oracle/comm/crowd.hpp"
#include "oracle/comm/ledger.hpp"
#include "oracle/comm/message_door.hpp"
#include "oracle/comm/rendezvous.hpp"
#include "oracle/comm/standing.hpp"
#include "oracle/comm/transport_self_test.hpp"
#include "oracle/comm/world.hpp"
#include "oracle/interrupt.hpp"

namespace shardproof {
namespace {
namespace world_test {

using Bytes = std::vector<std::byte>;

Bytes bytes_of(const std::string& text) {
  const auto* first = reinterpret_cast<const std::byte*>(text.data());
  return {first, first + text.size()};
}
std::string text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

WorldSpec spec(const std::string& transport, int ranks, double scale = 1) {
  WorldSpec s;
  s.transport = transport;
  s.ranks = ranks;
  s.deadline_scale = scale;
  return s;
}

Group group_of(std::vector<int> members, int rank, const std::string& label = "world") {
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
  return group_of(members, host.rank);
}

template <class T>
View view(std::vector<T>& v) {
  return view_of(reinterpret_cast<std::byte*>(v.data()), dtype_of<T>::value, {int64_t(v.size())});
}

template <class T>
Call calling(Op op, Reduce reduce, const Group& group, const std::vector<T>& in, int line,
             int root_or_hop = 0) {
  Call c;
  c.op = op;
  c.reduce = reduce;
  c.dtype = dtype_of<T>::value;
  c.count = int64_t(in.size());
  c.root_or_hop = root_or_hop;
  c.group = &group;
  c.file = "subject.cpp";
  c.line = line;
  return c;
}

template <class T>
std::vector<T> all_reduce(Door& door, const Group& group, std::vector<T> in,
                          Reduce reduce = Reduce::sum, int line = 1) {
  std::vector<T> out(in.size());
  door.wait(
      door.start(calling(Op::all_reduce, reduce, group, in, line), view(in), view(out), nullptr),
      nullptr);
  return out;
}
template <class T>
std::vector<T> all_gather(Door& door, const Group& group, std::vector<T> in, int line = 2) {
  std::vector<T> out(in.size() * size_t(group.size()));
  door.wait(door.start(calling(Op::all_gather, Reduce::none, group, in, line), view(in), view(out),
                       nullptr),
            nullptr);
  return out;
}
void barrier(Door& door, const Group& group, int line = 3) {
  std::vector<double> nothing;
  door.wait(door.start(calling(Op::barrier, Reduce::none, group, nothing, line), view(nothing),
                       view(nothing), nullptr),
            nullptr);
}

// Runs one body as one job; what it returns is the record.
using Body = std::function<std::string(RankHost&)>;
std::vector<RankOutcome> run(const WorldSpec& s, const Body& body) {
  const auto world = start_world(
      s, [&](RankHost& host, std::span<const std::byte>) { return bytes_of(body(host)); });
  return world->run({}, 7, case_deadline_seconds);
}

void expect_all(const std::vector<RankOutcome>& outcomes, const std::string& record) {
  for (size_t rank = 0; rank < outcomes.size(); ++rank) {
    EXPECT_EQ(outcomes[rank].end, RankOutcome::finished)
        << "rank " << rank << ": " << outcomes[rank].text;
    EXPECT_EQ(text_of(outcomes[rank].record), record) << "rank " << rank;
  }
}

// What a rank says when it was released: cause, then the reason.
std::string released_or(const std::function<std::string()>& body) {
  try {
    return body();
  } catch (const Released& r) {
    const char* causes[] = {"mismatch",  "deadlock",    "deadline",
                            "peer_lost", "world_ended", "overdue"};
    return std::string("released by ") + causes[r.cause] + ": " + r.what();
  }
}

void expect_no_child() {
  errno = 0;
  EXPECT_EQ(waitpid(-1, nullptr, WNOHANG), -1);
  EXPECT_EQ(errno, ECHILD);
}

class Transports : public testing::TestWithParam<const char*> {
 protected:
  void TearDown() override { expect_no_child(); }
};
INSTANTIATE_TEST_SUITE_P(World, Transports, testing::Values("processes", "threads"),
                         [](const auto& info) { return std::string(info.param); });

TEST_P(Transports, SumsAreRightAtEverySize) {
  for (int p : {1, 2, 3, 4, 8}) {
    const auto outcomes = run(spec(GetParam(), p), [](RankHost& host) {
      const Group world = everyone(host);
      const int64_t p = host.size, r = host.rank;
      for (int64_t n : {1, 8, 1000, 20000}) {
        std::vector<double> in(size_t(n), 0);
        for (int64_t i = 0; i < n; ++i) in[size_t(i)] = double((r + 1) * (i + 1));
        const auto out = all_reduce(*host.door, world, in);
        for (int64_t i = 0; i < n; ++i) {
          const double whole = double(p * (p + 1) / 2 * (i + 1));
          if (out[size_t(i)] != whole) return "wrong sum at " + std::to_string(i);
        }
      }
      return std::string("right");
    });
    expect_all(outcomes, "right");
  }
}

// (2^27 + 1) - 2^27 is 0 in f32 from member 0 on, and 1 in other orders.
TEST_P(Transports, SumsFollowMemberOrderOnEveryMember) {
  const auto outcomes = run(spec(GetParam(), 3), [](RankHost& host) {
    const float mine[] = {134217728.f, 1.f, -134217728.f};
    return std::to_string(all_reduce<float>(*host.door, everyone(host), {mine[host.rank]})[0]);
  });
  expect_all(outcomes, std::to_string(0.f));
}

// bf16 keeps 8 bits: 1 + 3 * 2^-9 lies above the middle of 1 and 1 + 2^-7. Rounding each partial
// sum would stay at 1.
TEST_P(Transports, HalfTypesAreRoundedOnce) {
  const auto outcomes = run(spec(GetParam(), 4), [](RankHost& host) {
    const std::vector<bf16> in{to_bf16(host.rank == 0 ? 1 : 0x1p-9)};
    return std::to_string(to_float(all_reduce(*host.door, everyone(host), in)[0]));
  });
  expect_all(outcomes, std::to_string(1 + 0x1p-7f));
}

TEST_P(Transports, AverageDividesTheSumAndMaxLetsNanThrough) {
  const auto outcomes = run(spec(GetParam(), 3), [](RankHost& host) {
    const Group world = everyone(host);
    const auto mean = all_reduce<double>(*host.door, world, {double(host.rank), 1}, Reduce::avg);
    const auto most = all_reduce<double>(
        *host.door, world, {double(host.rank), host.rank == 1 ? NAN : 5.}, Reduce::max);
    return std::string(
        mean[0] == 1 && mean[1] == 1 && most[0] == 2 && std::isnan(most[1]) ? "right" : "wrong");
  });
  expect_all(outcomes, "right");
}

TEST_P(Transports, CallsInFlightMayBeWaitedForInAnyOrder) {
  const auto outcomes = run(spec(GetParam(), 4), [](RankHost& host) {
    const Group world = everyone(host);
    constexpr int calls = 40;
    std::vector<std::vector<double>> in(calls), out(calls, std::vector<double>(6000));
    std::vector<Ticket> tickets;
    for (int c = 0; c < calls; ++c) {
      in[size_t(c)].assign(6000, double((host.rank + 1) * (c + 1)));
      tickets.push_back(
          host.door->start(calling(Op::all_reduce, Reduce::sum, world, in[size_t(c)], c),
                           view(in[size_t(c)]), view(out[size_t(c)]), nullptr));
    }
    // Even ranks from the last to the first, odd ranks the other way round.
    for (int i = 0; i < calls; ++i)
      host.door->wait(tickets[size_t(host.rank % 2 ? i : calls - 1 - i)], nullptr);
    for (int c = 0; c < calls; ++c) {
      if (out[size_t(c)] != std::vector<double>(6000, 10. * (c + 1)))
        return "wrong at call " + std::to_string(c);
    }
    return std::string("right");
  });
  expect_all(outcomes, "right");
}

// One rank keeps 64 calls in flight while its peer dawdles: it sleeps until a slot is free.
TEST_P(Transports, AWindowOfCallsWaitsForSlots) {
  const auto outcomes = run(spec(GetParam(), 2), [](RankHost& host) {
    const Group world = everyone(host);
    constexpr int calls = 300, window = 64;
    std::vector<std::vector<int64_t>> in(calls), out(calls, std::vector<int64_t>(1));
    std::vector<Ticket> tickets;
    for (int c = 0; c < calls + window; ++c) {
      if (c >= window) host.door->wait(tickets[size_t(c - window)], nullptr);
      if (host.rank == 1 && c % 50 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));
      if (c >= calls) continue;
      in[size_t(c)] = {c * 10 + host.rank};
      tickets.push_back(
          host.door->start(calling(Op::all_reduce, Reduce::sum, world, in[size_t(c)], c),
                           view(in[size_t(c)]), view(out[size_t(c)]), nullptr));
    }
    for (int c = 0; c < calls; ++c) {
      if (out[size_t(c)][0] != 20 * c + 1) return "wrong at call " + std::to_string(c);
    }
    return std::string("right");
  });
  expect_all(outcomes, "right");
}

TEST_P(Transports, MoreCallsInFlightThanSlotsAreRefused) {
  const auto outcomes = run(spec(GetParam(), 2), [](RankHost& host) {
    const Group world = everyone(host);
    std::vector<double> in(1), out(1);
    try {
      for (int c = 0; c < 65; ++c) {
        host.door->start(calling(Op::all_reduce, Reduce::sum, world, in, 8), view(in), view(out),
                         nullptr);
      }
    } catch (const std::invalid_argument& e) {
      return std::string(e.what());
    }
    return std::string("accepted");
  });
  expect_all(outcomes,
             "all_reduce at subject.cpp:8: 64 calls on group world{0,1} are in flight and that is "
             "the most: "
             "wait for one");
}

TEST_P(Transports, ShiftsInBothDirectionsAtOnce) {
  for (int p : {2, 3, 4}) {
    const auto outcomes = run(spec(GetParam(), p), [](RankHost& host) {
      const Group world = everyone(host);
      const int p = host.size, r = host.rank;
      for (int step = 0; step < 50; ++step) {
        std::vector<int64_t> up{r * 100 + step}, down{-(r * 100 + step)}, from_below(1),
            from_above(1);
        const Ticket a = host.door->start(calling(Op::shift, Reduce::none, world, up, 1, 1),
                                          view(up), view(from_below), nullptr);
        const Ticket b = host.door->start(calling(Op::shift, Reduce::none, world, down, 2, -1),
                                          view(down), view(from_above), nullptr);
        host.door->wait(step % 2 ? a : b, nullptr);
        host.door->wait(step % 2 ? b : a, nullptr);
        if (from_below[0] != (r + p - 1) % p * 100 + step) return std::string("wrong from below");
        if (from_above[0] != -((r + 1) % p * 100 + step)) return std::string("wrong from above");
      }
      return std::string("right");
    });
    expect_all(outcomes, "right");
  }
}

TEST_P(Transports, LivesAcrossJobsAndPassesBytes) {
  const auto world =
      start_world(spec(GetParam(), 4), [](RankHost& host, std::span<const std::byte> job) {
        static thread_local int jobs = 0;
        barrier(*host.door, everyone(host));
        return bytes_of(text_of(job) + " " + std::to_string(++jobs));
      });
  for (int job = 1; job <= 20; ++job) {
    expect_all(world->run(bytes_of("job"), uint32_t(job), 30), "job " + std::to_string(job));
  }
  EXPECT_TRUE(world->alive());
}

TEST_P(Transports, LargeRecordsComeBackWhole) {
  constexpr size_t size = 20'000'001;
  const auto world =
      start_world(spec(GetParam(), 2), [](RankHost& host, std::span<const std::byte>) {
        return Bytes(size, std::byte(host.rank + 1));
      });
  for (int job = 0; job < 2; ++job) {
    const auto outcomes = world->run({}, 1, 30);
    for (int rank = 0; rank < 2; ++rank) {
      EXPECT_TRUE(outcomes[size_t(rank)].record == Bytes(size, std::byte(rank + 1)));
    }
  }
}

TEST_P(Transports, TenThousandCallsAreSilent) {
  const auto outcomes = run(spec(GetParam(), 4), [](RankHost& host) {
    const Group world = everyone(host);
    for (int i = 0; i < 10000; ++i) {
      const auto out = all_reduce<double>(*host.door, world, {double(host.rank + i)});
      if (out[0] != 4. * i + 6) return std::string("wrong");
    }
    return std::string("right");
  });
  expect_all(outcomes, "right");
}

// Ranks that meet on rows, columns and the world in an order that all know, with random pauses.
TEST_P(Transports, NoDeadlockIsInvented) {
  const auto outcomes = run(spec(GetParam(), 4), [](RankHost& host) {
    const int r = host.rank;
    const Group groups[] = {everyone(host), group_of({r / 2 * 2, r / 2 * 2 + 1}, r, "tp"),
                            group_of({r % 2, r % 2 + 2}, r, "cp")};
    uint64_t common = 1, own = uint64_t(r) + 99;
    const auto next = [](uint64_t& state) {
      return (state = state * 6364136223846793005u + 1442695040888963407u) >> 40;
    };
    for (int i = 0; i < 4000; ++i) {
      const Group& g = groups[next(common) % 3];
      const bool shift = next(common) % 3 == 0;
      if (next(own) % 4 == 0) std::this_thread::yield();
      if (next(own) % 64 == 0) std::this_thread::sleep_for(std::chrono::microseconds(50));
      std::vector<int64_t> in{r + i}, out(1);
      const Call call = calling(shift ? Op::shift : Op::all_reduce,
                                shift ? Reduce::none : Reduce::sum, g, in, i, shift ? 1 : 0);
      host.door->wait(host.door->start(call, view(in), view(out), nullptr), nullptr);
      int64_t sum = 0;
      for (int m : g.members) sum += m + i;
      const int64_t from = g.members[size_t((g.me + g.size() - 1) % g.size())] + i;
      if (out[0] != (shift ? from : sum)) return std::string("wrong");
    }
    return std::string("right");
  });
  expect_all(outcomes, "right");
}

TEST_P(Transports, SelfTestPasses) {
  for (int p : {1, 2, 3, 4}) {
    const auto world = start_world(spec(GetParam(), p, 5),
                                   [](RankHost&, std::span<const std::byte>) { return Bytes(); });
    const SelfTestResult result = transport_self_test(*world, false);
    EXPECT_EQ(result.failures, std::vector<std::string>()) << GetParam() << " " << p;
    EXPECT_GE(result.calls, 99 * p);  // 11 operations x 9 sizes
  }
}

// A transport that turns one bit of one result.
TEST(SelfTest, NamesAWrongTransport) {
  struct BitFlip : Door {
    Door& next;
    std::vector<View> outs;
    explicit BitFlip(Door& n) : next(n) {}
    Ticket start(const Call& c, const View& in, const View& out, Stream s) override {
      target = c.op == Op::all_gather && out.elements() == 7 * 3 ? out : View{};
      return next.start(c, in, out, s);
    }
    void wait(Ticket t, Stream s) override {
      next.wait(t, s);
      if (target.data) target.data[0] ^= std::byte{0x40};
    }
    View target;
  };
  const auto outcomes = run(spec("processes", 3), [](RankHost& host) {
    BitFlip door(*host.door);
    RankHost broken = host;
    broken.door = &door;
    return text_of(transport_self_test_rank(broken, false));
  });
  for (const RankOutcome& o : outcomes) {
    EXPECT_NE(text_of(o.record).find("\nall_gather, 7 x "), std::string::npos) << text_of(o.record);
  }
}

// --- what becomes of a rank

volatile bool for_ever = true;
volatile uintptr_t nowhere = 16;

[[gnu::noinline]] int deeper(volatile int* above) {
  volatile int here[4096];
  here[0] = above ? above[0] + 1 : 0;
  return (for_ever ? deeper(here) : 0) + here[0];
}

struct Misdeed {
  const char* name;
  std::function<void()> act;
  RankOutcome::End end;
  int code;
  const char* text;   // in the outcome
  const char* peers;  // in what the others were told
};
void PrintTo(const Misdeed& m, std::ostream* out) { *out << m.name; }

void exhaust_memory() {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  throw std::bad_alloc();  // sanitizers end the process at such a request
#else
  [[maybe_unused]] static void* volatile got;
  got = ::operator new(size_t(1) << 60);
#endif
}

const std::vector<Misdeed>& misdeeds() {
  static const std::vector<Misdeed> all{
      {"segfault", [] { *reinterpret_cast<volatile int*>(nowhere) = 1; }, RankOutcome::signalled,
       SIGSEGV, "SIGSEGV at address 0x10",
       "rank 2 was killed by signal 11 (SIGSEGV at address 0x10) in forward, after call 1"},
      {"abort", [] { std::abort(); }, RankOutcome::signalled, SIGABRT, "SIGABRT",
       "rank 2 was killed by signal 6 (SIGABRT) in forward, after call 1"},
      {"floating_point", [] { raise(SIGFPE); }, RankOutcome::signalled, SIGFPE, "SIGFPE",
       "rank 2 was killed by signal 8 (SIGFPE) in forward, after call 1"},
      {"exit_0", [] { _exit(0); }, RankOutcome::exited, 0, "exit code 0",
       "rank 2 left its process with exit code 0 in forward, after call 1"},
      {"exit_3", [] { _exit(3); }, RankOutcome::exited, 3, "exit code 3",
       "rank 2 left its process with exit code 3 in forward, after call 1"},
      {"stack_overflow", [] { deeper(nullptr); }, RankOutcome::signalled, SIGSEGV,
       "SIGSEGV at address", "rank 2 was killed by signal 11 (SIGSEGV at address"},
      {"killed", [] { kill(getpid(), SIGKILL); }, RankOutcome::signalled, SIGKILL, "SIGKILL",
       "rank 2 was killed by signal 9 (SIGKILL) in forward, after call 1"},
      {"throws", [] { throw std::runtime_error("no such tile"); }, RankOutcome::threw, 0,
       "no such tile", "rank 2 left forward after call 1"},
      {"throws_a_number", [] { throw 5; }, RankOutcome::threw, 0, "not a std::exception",
       "rank 2 left forward after call 1"},
      {"bad_alloc", exhaust_memory, RankOutcome::threw, 0, "bad_alloc",
       "rank 2 left forward after call 1"},
  };
  return all;
}

class Misdeeds : public testing::TestWithParam<Misdeed> {
 protected:
  void TearDown() override { expect_no_child(); }
};
INSTANTIATE_TEST_SUITE_P(World, Misdeeds, testing::ValuesIn(misdeeds()),
                         [](const auto& info) { return info.param.name; });

// One good call, then rank 2 misbehaves while the others are in the next one.
Body misbehaving(const std::function<void()>& act) {
  return [act](RankHost& host) {
    const Group world = everyone(host);
    host.state->phase = Phase::forward;
    all_reduce<double>(*host.door, world, {1}, Reduce::sum, 41);
    if (host.rank == 2) act();
    return released_or([&] {
      all_reduce<double>(*host.door, world, {1}, Reduce::sum, 42);
      return std::string("not released");
    });
  };
}

TEST_P(Misdeeds, OfAProcessCostOneRankAndAreNamed) {
  const Misdeed& m = GetParam();
  const auto outcomes = run(spec("processes", 4), misbehaving(m.act));
  const RankOutcome& culprit = outcomes[2];
  EXPECT_EQ(culprit.end, m.end) << culprit.text;
  EXPECT_EQ(culprit.code, m.code);
  EXPECT_NE(culprit.text.find(m.text), std::string::npos) << culprit.text;
  EXPECT_EQ(culprit.trace.calls_in_phase, 1u);
  for (int rank : {0, 1, 3}) {
    const RankOutcome& peer = outcomes[size_t(rank)];
    EXPECT_EQ(peer.end, RankOutcome::finished) << peer.text;
    const std::string said = text_of(peer.record);
    EXPECT_NE(said.find(m.peers), std::string::npos) << said;
    EXPECT_EQ(said, text_of(outcomes[0].record));
  }
  expect_all(run(spec("processes", 4),
                 [](RankHost& host) {
                   return std::to_string(all_reduce<double>(*host.door, everyone(host), {1})[0]);
                 }),
             std::to_string(4.));
}

TEST_P(Misdeeds, OfAThreadAreNamedOnItsRank) {
  const Misdeed& m = GetParam();
  const auto outcomes = run(spec("threads", 4), misbehaving(m.act));
  if (m.code == SIGKILL) {  // it names no thread
    for (const RankOutcome& o : outcomes) EXPECT_EQ(o.end, RankOutcome::signalled);
    return;
  }
  EXPECT_EQ(outcomes[2].end, m.end) << outcomes[2].text;
  EXPECT_EQ(outcomes[2].code, m.code);
  for (int rank : {0, 1, 3}) {
    const RankOutcome::End end = outcomes[size_t(rank)].end;
    if (m.end == RankOutcome::threw) {
      EXPECT_EQ(end, RankOutcome::finished) << "rank " << rank;
    } else {
      EXPECT_TRUE(end == RankOutcome::ended || (m.end == RankOutcome::exited && end == m.end));
    }
  }
}

TEST(World, SurvivesAThrowAndDiesOfACrash) {
  const auto world =
      start_world(spec("processes", 3), [](RankHost& host, std::span<const std::byte> job) {
        if (text_of(job) == "throw" && host.rank == 1) throw std::runtime_error("as asked");
        if (text_of(job) == "crash" && host.rank == 1) std::abort();
        return bytes_of("fine");
      });
  EXPECT_EQ(world->run(bytes_of("throw"), 1, 30)[1].end, RankOutcome::threw);
  EXPECT_TRUE(world->alive());
  expect_all(world->run(bytes_of("go on"), 2, 30), "fine");
  EXPECT_EQ(world->run(bytes_of("crash"), 3, 30)[1].end, RankOutcome::signalled);
  EXPECT_FALSE(world->alive());
  EXPECT_THROW(world->run({}, 4, 30), Infrastructure);
  expect_no_child();
}

TEST(World, SeesARankThatDiesBetweenJobs) {
  const auto world = start_world(spec("processes", 2), [](RankHost&, std::span<const std::byte>) {
    return bytes_of(std::to_string(getpid()));
  });
  const pid_t victim = pid_t(std::stol(text_of(world->run({}, 1, 30)[1].record)));
  EXPECT_EQ(world->lost(), "");
  kill(victim, SIGKILL);
  siginfo_t info;
  waitid(P_PID, id_t(victim), &info, WEXITED | WNOWAIT);
  EXPECT_FALSE(world->alive());
  EXPECT_EQ(world->lost(),
            "rank 1 (process " + std::to_string(victim) + ") was killed by signal 9 (SIGKILL)");
}

// What became of its ranks was said there.
TEST(World, OfAJobThatRanksDiedInNobodyIsLostAfterwards) {
  const auto world = start_world(spec("processes", 2), [](RankHost& host, auto) {
    if (host.rank == 1) _exit(0);
    return bytes_of("here");
  });
  EXPECT_EQ(world->run({}, 1, 30)[1].end, RankOutcome::exited);
  EXPECT_EQ(world->lost(), "");
}

TEST(World, KillFromOutsideIsNamed) {
  const auto outcomes = run(spec("processes", 4), [](RankHost& host) {
    const Group world = everyone(host);
    const auto pids = all_gather<int64_t>(*host.door, world, {int64_t(getpid())});
    if (host.rank == 0) kill(pid_t(pids[3]), SIGKILL);
    return released_or([&] {
      while (true) barrier(*host.door, world);
      return std::string();
    });
  });
  EXPECT_EQ(outcomes[3].end, RankOutcome::signalled);
  EXPECT_EQ(outcomes[3].code, SIGKILL);
  for (int rank : {0, 1, 2}) {
    EXPECT_EQ(text_of(outcomes[size_t(rank)].record)
                  .find("released by peer_lost: rank 3 was killed by signal 9 (SIGKILL)"),
              0u)
        << text_of(outcomes[size_t(rank)].record);
  }
  expect_no_child();
}

// Calls of the smallest size under a storm of deaths: a lock or a slot that dies with its owner
// holds nobody up.
TEST(World, DeathAtAnyMomentReleasesTheOthers) {
  for (int round = 0; round < 25; ++round) {
    const auto outcomes = run(spec("processes", 4), [round](RankHost& host) {
      const Group world = everyone(host);
      const auto pids = all_gather<int64_t>(*host.door, world, {int64_t(getpid())});
      if (host.rank == 0 && fork() == 0) {
        usleep(useconds_t(100 + 137 * round));
        kill(pid_t(pids[2]), SIGKILL);
        _exit(0);
      }
      return released_or([&] {
        while (true) all_reduce<double>(*host.door, world, {1});
        return std::string();
      });
    });
    EXPECT_EQ(outcomes[2].end, RankOutcome::signalled) << round;
    for (int rank : {0, 1, 3}) {
      EXPECT_EQ(outcomes[size_t(rank)].end, RankOutcome::finished)
          << round << ": " << outcomes[size_t(rank)].text;
      EXPECT_EQ(text_of(outcomes[size_t(rank)].record).find("released by peer_lost: rank 2"), 0u);
    }
  }
  expect_no_child();
}

// A short deadline saves time. Where it passes before the ranks are where they should be, a longer
// one decides. `wrong`: what is not as it should be with deadlines of that scale, "" for nothing.
void expect_with_some_deadline(const std::function<std::string(double scale)>& wrong) {
  std::string why;
  for (const double scale : {0.03, 0.3, 1.})
    if (why = wrong(scale); why.empty()) return;
  ADD_FAILURE() << why;
}

// Processes that only want a core: three to each.
class Crowd {
 public:
  Crowd() {
    for (unsigned n = 0; n < 3 * std::max(1u, std::thread::hardware_concurrency()); ++n) {
      const pid_t pid = fork();
      if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        while (for_ever) {
        }
      }
      if (pid > 0) pids_.push_back(pid);
    }
  }
  ~Crowd() {
    for (const pid_t pid : pids_) kill(pid, SIGKILL);
    for (const pid_t pid : pids_) waitpid(pid, nullptr, 0);
  }

 private:
  std::vector<pid_t> pids_;
};

// Each call of theirs is met, and all of them together take too long.
TEST(World, AJobsDeadlineThatPassesOnACrowdedMachineSaysSo) {
  const Crowd crowd;
  expect_with_some_deadline([&](double scale) -> std::string {
    const auto outcomes = run(spec("processes", 2, scale), [](RankHost& host) {
      return released_or([&] {
        while (for_ever) barrier(*host.door, everyone(host));
        return std::string();
      });
    });
    for (const RankOutcome& o : outcomes) {
      const std::string said = o.text + text_of(o.record);
      for (const std::string& part :
           {fmt::format("the job's deadline of {:g} s has passed (", 30 * scale),
            std::string("processes want each core")})
        if (said.find(part) == std::string::npos)
          return fmt::format("expected '{}' in {}", part, said);
      const size_t at = said.find("s has passed (") + std::strlen("s has passed (");
      const std::string due =
          fmt::format("--deadline-scale {:g} would", std::stod(said.substr(at)) * scale);
      EXPECT_NE(said.find(due), std::string::npos) << said;
    }
    return "";
  });
}

TEST_P(Transports, AnEndlessLoopIsHungAndItsPeersSayWhere) {
  expect_with_some_deadline([&](double scale) -> std::string {
    const auto outcomes = run(spec(GetParam(), 4, scale), [](RankHost& host) {
      const Group world = everyone(host);
      host.state->phase = Phase::backward;
      barrier(*host.door, world);
      if (host.rank == 1)
        while (for_ever) {
        }
      return released_or([&] {
        all_reduce<double>(*host.door, world, {1}, Reduce::sum, 77);
        return std::string("not released");
      });
    });
    if (outcomes[1].end != RankOutcome::hung) return "rank 1 is not hung: " + outcomes[1].text;
    for (int rank : {0, 2, 3}) {
      const std::string said = text_of(outcomes[size_t(rank)].record);
      if (outcomes[size_t(rank)].end != RankOutcome::finished)
        return "a peer did not end: " + outcomes[size_t(rank)].text;
      if (!said.starts_with(
              fmt::format("released by deadline: no progress for {:.1f} s", 10 * scale)))
        return said;
      for (const char* part : {"rank 1 computes in backward after call 1; last: barrier",
                               "ranks 0, 2, 3 wait in call 2 of backward: all_reduce sum, 1 x f64, "
                               "world{0-3}, at subject.cpp:77"})
        if (said.find(part) == std::string::npos)
          return fmt::format("expected '{}' in {}", part, said);
    }
    return "";
  });
}

// 23 processes on 2 cores: a call that takes 1 s alone takes 12.
TEST(World, ADeadlineThatPassesOnACrowdedMachineSaysHowManyTimesMoreIsDue) {
  EXPECT_EQ(crowded_text(2, 1), "");
  EXPECT_NE(crowded_text(11.5, 1).find("(12 processes want each core"), std::string::npos);
  EXPECT_NE(crowded_text(11.5, 1).find("--deadline-scale 12 "), std::string::npos);
  // Of deadlines that were 5 times, or a fourth of, the usual ones; no more than a command takes.
  EXPECT_NE(crowded_text(11.5, 5).find("--deadline-scale 60 "), std::string::npos);
  EXPECT_NE(hung_or_slow_text(11.5, 0.25).find("--deadline-scale 3 "), std::string::npos);
  EXPECT_NE(crowded_text(11.5, 100).find("--deadline-scale 1000 "), std::string::npos);
  EXPECT_GT(crowding(), 0);  // this process runs
}

// Over anything that takes messages calls wait longer where the job may last longer than others.
TEST(World, ACallThatIsMetByMessagesWaitsInProportion) {
  struct Silent final : Wire {
    void send(int, int, Message) override {}
    bool flush() override { return true; }
    std::optional<Message> take(int, int) override { return std::nullopt; }
  } wire;
  RankState state;
  MpiPage page;
  MpiSession::Context context;
  context.state = &state;
  context.page = &page;
  context.deadline_scale = 0.01;
  double of_job = 1;
  context.patience = &of_job;
  context.released = [](void*) -> std::optional<std::pair<Released::Cause, std::string>> {
    return std::nullopt;
  };
  const auto door = message_door(wire, context, false);
  for (const auto& [patience, says] :
       {std::pair{1, "no progress for 0.1 s"}, {4, "no progress for 0.4 s"}}) {
    of_job = patience;
    const std::string said = released_or([&] {
      barrier(*door, group_of({0, 1}, 0));
      return std::string("not released");
    });
    EXPECT_EQ(said.find(std::string("released by deadline: ") + says), 0u) << said;
  }
}

TEST_P(Transports, AWorldThatNeverCallsIsEndedByTheJobsDeadline) {
  const auto outcomes = run(spec(GetParam(), 2, 0.03), [](RankHost&) {
    while (for_ever) {
    }
    return std::string();
  });
  for (const RankOutcome& o : outcomes) EXPECT_EQ(o.end, RankOutcome::hung) << o.text;
}

TEST(World, ARankThatIgnoresTermIsKilled) {
  const auto outcomes = run(spec("processes", 2, 0.03), [](RankHost&) {
    signal(SIGTERM, SIG_IGN);
    while (for_ever) {
    }
    return std::string();
  });
  for (const RankOutcome& o : outcomes) EXPECT_EQ(o.end, RankOutcome::hung) << o.text;
  expect_no_child();
}

TEST(World, AStoppedRankIsHung) {
  expect_with_some_deadline([&](double scale) -> std::string {
    const auto outcomes = run(spec("processes", 2, scale), [](RankHost& host) {
      if (host.rank == 1) raise(SIGSTOP);
      return released_or([&] {
        barrier(*host.door, everyone(host));
        return std::string();
      });
    });
    return outcomes[0].end == RankOutcome::finished && outcomes[1].end == RankOutcome::hung &&
                   outcomes[1].code == SIGSTOP
               ? ""
               : outcomes[0].text + "; " + outcomes[1].text;
  });
  expect_no_child();
}

// The page of the rank before, which lies before this one's.
const Trace& of_the_rank_before(const RankHost& host) {
  return *reinterpret_cast<const Trace*>(reinterpret_cast<const std::byte*>(host.trace) -
                                         sizeof(RankPage));
}
const RankPage& page_of(const Trace& trace) {
  return *reinterpret_cast<const RankPage*>(reinterpret_cast<const std::byte*>(&trace) -
                                            offsetof(RankPage, trace));
}

// As a rank is left that was stopped within the lock: it was taken by force, and the release saw
// none that waits.
TEST(World, ARankThatBeginsToWaitBehindARelease) {
  const Arena arena(2, /*scale=*/0.2, /*lockstep=*/true);
  arena.begin_job({}, 0);
  arena.head().patience = 1;  // it looks every 0.25 s
  RankState state;
  state.rank = 0;
  state.size = 2;
  state.trace = &arena.page(0).trace;
  ArenaDoor door(arena, state);
  std::future<std::string> said = std::async(std::launch::async, [&] {
    return released_or([&] {
      barrier(door, group_of({0, 1}, 0));
      return std::string("not released");
    });
  });
  const RankPage& page = arena.page(0);
  while (!page.waiting) usleep(100);
  ArenaHead& head = arena.head();
  {
    const Locked hold(arena, 1);
    std::strcpy(head.why, "too late");
    head.cause = Released::overdue;
    head.released = 1;
  }
  const bool heard = said.wait_for(std::chrono::seconds(20)) == std::future_status::ready;
  EXPECT_TRUE(heard);
  if (!heard) {
    const Locked hold(arena, 1);
    arena.call_off(0);
    Arena::ring(arena.bell_at(page.bell));
  }
  EXPECT_EQ(said.get(), "released by overdue: too late");
}

// It stands in a call when the world is given up, and for five times the grace of a rank that
// computes nobody gives it a core on which it could hear of it.
TEST(World, ARankThatWaitedIsHeardThoughItIsGivenNoCoreForLong) {
  const auto outcomes = run(spec("processes", 2, 0.03), [](RankHost& host) {
    const Group world = everyone(host);
    const auto pids = all_gather<int64_t>(*host.door, world, {int64_t(getpid())});
    if (host.rank == 1) {
      for (Trace other; other.state != Trace::waiting || other.op != Op::barrier;)
        other = snapshot(of_the_rank_before(host));
      kill(pid_t(pids[0]), SIGSTOP);
      if (fork() == 0) {
        usleep(2'000'000);  // a deadline of 0.93 s, and then 1 s
        kill(pid_t(pids[0]), SIGCONT);
        _exit(0);
      }
      while (for_ever) {
      }
    }
    return released_or([&] {
      barrier(*host.door, world);
      return std::string("not released");
    });
  });
  EXPECT_EQ(outcomes[0].end, RankOutcome::finished) << outcomes[0].text;
  EXPECT_EQ(text_of(outcomes[0].record).find("released by overdue: "), 0u);
  EXPECT_EQ(outcomes[1].end, RankOutcome::hung) << outcomes[1].text;
  expect_no_child();
}

// Nobody released it, and nobody came.
TEST(World, AWaitThatEndsForNoReasonIsToldAsAWildWrite) {
  const auto outcomes = run(spec("processes", 2, 0.1), [](RankHost& host) {
    if (host.rank == 0) {
      barrier(*host.door, everyone(host));
      return std::string("went on");
    }
    auto& other = const_cast<RankPage&>(page_of(of_the_rank_before(host)));
    while (other.waiting == 0) usleep(100);
    other.waiting = 0;
    while (other.finished == 0) usleep(100);
    return std::string();
  });
  EXPECT_EQ(outcomes[0].end, RankOutcome::threw) << text_of(outcomes[0].record);
  EXPECT_NE(outcomes[0].text.find("wrote over the memory that the ranks share"), std::string::npos)
      << outcomes[0].text;
}

// It is told, and works on: no other rank keeps it from its end.
TEST(World, RanksThatDoNotEndWhenTheirCallIsReleasedAreHung) {
  expect_with_some_deadline([&](double scale) -> std::string {
    const auto outcomes = run(spec("processes", 2, scale), [](RankHost& host) {
      const std::string said = released_or([&] {
        if (host.rank == 0) barrier(*host.door, everyone(host));
        return std::string();
      });
      while (host.rank == 0 && for_ever) {
      }
      return said;
    });
    return outcomes[1].end == RankOutcome::finished && outcomes[0].end == RankOutcome::hung
               ? ""
               : outcomes[0].text + "; " + outcomes[1].text;
  });
}

// --- calls that do not fit together

TEST_P(Transports, SwappedCollectivesAreAMismatch) {
  const auto outcomes = run(spec(GetParam(), 4), [](RankHost& host) {
    const Group world = everyone(host);
    return released_or([&] {
      if (host.rank == 3) all_gather<double>(*host.door, world, {1}, 10);
      all_reduce<double>(*host.door, world, {1}, Reduce::sum, 11);
      if (host.rank != 3) all_gather<double>(*host.door, world, {1}, 12);
      return std::string("not released");
    });
  });
  expect_all(
      outcomes,
      "released by mismatch: mismatch: rank 3 differs from the other members in operation, "
      "reduction\n"
      "ranks 0, 1, 2: idle, call 1 on its group: all_reduce sum, 1 x f64, at subject.cpp:11\n"
      "rank 3: idle, call 1 on its group: all_gather, 1 x f64, at subject.cpp:10");
}

TEST_P(Transports, AMissingCallIsADeadlock) {
  for (int absent = 0; absent < 3; ++absent) {
    const auto outcomes = run(spec(GetParam(), 3), [absent](RankHost& host) {
      const Group world = everyone(host);
      host.state->phase = Phase::backward;
      return released_or([&] {
        const int calls = host.rank == absent ? 6 : 7;
        for (int i = 0; i < calls; ++i)
          all_reduce<float>(*host.door, world, {1}, Reduce::sum, 40 + i);
        return std::string("done");
      });
    });
    for (int rank = 0; rank < 3; ++rank) {
      const std::string said = text_of(outcomes[size_t(rank)].record);
      if (rank == absent) {
        EXPECT_EQ(said, "done");
        continue;
      }
      EXPECT_EQ(said.find("released by deadlock: "), 0u) << said;
      const std::string names = "rank " + std::to_string(absent) +
                                " left backward after call 6; last: all_reduce sum, 1 x f32, "
                                "world{0-2}, at subject.cpp:45";
      EXPECT_NE(said.find(names), std::string::npos) << said;
      EXPECT_NE(
          said.find(
              "wait in call 7 of backward: all_reduce sum, 1 x f32, world{0-2}, at subject.cpp:46"),
          std::string::npos)
          << said;
    }
  }
}

TEST_P(Transports, GroupsInOppositeOrderAreADeadlock) {
  const auto outcomes = run(spec(GetParam(), 2), [](RankHost& host) {
    const Group forth = group_of({0, 1}, host.rank, "forth"),
                back = group_of({1, 0}, host.rank, "back");
    return released_or([&] {
      barrier(*host.door, host.rank ? forth : back);
      return std::string("not released");
    });
  });
  for (const auto& o : outcomes) {
    const std::string said = text_of(o.record);
    EXPECT_EQ(said.find("released by deadlock: "), 0u) << said;
    EXPECT_NE(said.find("barrier, forth{0,1}"), std::string::npos) << said;
    EXPECT_NE(said.find("barrier, back{1,0}"), std::string::npos) << said;
  }
}

struct Odd {
  const char* word;
  std::function<void(Call&)> change;
};

// Two buffers large enough for each of them; one rank differs in one field.
TEST_P(Transports, EachFieldOnEachRankIsNamed) {
  const std::vector<Odd> odd{{"operation", [](Call& c) { c.op = Op::reduce_scatter; }},
                             {"reduction", [](Call& c) { c.reduce = Reduce::max; }},
                             {"dtype", [](Call& c) { c.dtype = DType::i32; }},
                             {"count", [](Call& c) { c.count = 6; }}};
  for (const Odd& field : odd) {
    for (int culprit = 0; culprit < 3; ++culprit) {
      const auto outcomes = run(spec(GetParam(), 3), [&](RankHost& host) {
        const Group world = everyone(host);
        std::vector<float> in(9, 1), out(9);
        Call call = calling(Op::all_reduce, Reduce::sum, world, in, 5);
        if (host.rank == culprit) field.change(call);
        const auto bytes = [](std::vector<float>& v) {
          return reinterpret_cast<std::byte*>(v.data());
        };
        const int64_t n_out = call.op == Op::reduce_scatter ? call.count / 3 : call.count;
        return released_or([&] {
          host.door->wait(host.door->start(call, view_of(bytes(in), call.dtype, {call.count}),
                                           view_of(bytes(out), call.dtype, {n_out}), nullptr),
                          nullptr);
          return std::string("not released");
        });
      });
      const std::string accusation = "released by mismatch: mismatch: rank " +
                                     std::to_string(culprit) +
                                     " differs from the other members in " + field.word;
      for (const RankOutcome& o : outcomes) {
        const std::string said = text_of(o.record);
        EXPECT_EQ(said.substr(0, said.find('\n')), accusation);
      }
    }
  }
}

TEST_P(Transports, RootsAndHopsAreCompared) {
  for (const Op op : {Op::broadcast, Op::shift}) {
    const auto outcomes = run(spec(GetParam(), 3), [op](RankHost& host) {
      const Group world = everyone(host);
      std::vector<float> in(4, 1), out(4);
      const Call call = calling(op, Reduce::none, world, in, 5, host.rank == 1 ? 2 : 1);
      return released_or([&] {
        host.door->wait(host.door->start(call, view(in), view(out), nullptr), nullptr);
        return std::string("not released");
      });
    });
    for (const RankOutcome& o : outcomes) {
      const std::string said = text_of(o.record);
      EXPECT_EQ(said.find("released by mismatch: "), 0u) << said;
      EXPECT_NE(
          said.find(op == Op::shift ? "differ in hop" : "differs from the other members in root"),
          std::string::npos)
          << said;
    }
  }
}

TEST_P(Transports, UnequalPartsOfAnExchangeAreNamed) {
  const auto outcomes = run(spec(GetParam(), 3), [](RankHost& host) {
    const Group world = everyone(host);
    std::vector<double> in(6, 1), out(6);
    Call call = calling(Op::all_to_all, Reduce::none, world, in, 5);
    call.send = {2, 2, 2};
    call.recv = {2, 2, 2};
    if (host.rank == 1) call.send = {2, 1, 3};
    return released_or([&] {
      host.door->wait(host.door->start(call, view(in), view(out), nullptr), nullptr);
      return std::string("not released");
    });
  });
  for (const RankOutcome& o : outcomes) {
    const std::string said = text_of(o.record);
    EXPECT_EQ(
        said.find(
            "released by mismatch: mismatch: rank 1 sends 1 elements to rank 1, which expects 2"),
        0u)
        << said;
  }
}

TEST_P(Transports, AShiftOfAnotherLengthIsNamed) {
  const auto outcomes = run(spec(GetParam(), 3), [](RankHost& host) {
    const Group world = everyone(host);
    std::vector<double> in(host.rank == 1 ? 5 : 4, 1), out(4);
    return released_or([&] {
      host.door->wait(host.door->start(calling(Op::shift, Reduce::none, world, in, 5, 1), view(in),
                                       view(out), nullptr),
                      nullptr);
      return std::string("not released");
    });
  });
  for (int rank : {1, 2}) {
    const std::string said = text_of(outcomes[size_t(rank)].record);
    EXPECT_EQ(
        said.find(
            "released by mismatch: mismatch: rank 1 sends 5 elements to rank 2, which expects 4"),
        0u)
        << said;
  }
}

// Without lockstep a mismatch is not seen, and must not reach beyond what was posted.
TEST_P(Transports, WithoutLockstepMismatchesPassUnseen) {
  WorldSpec blind = spec(GetParam(), 2);
  blind.lockstep = false;
  const auto outcomes = run(blind, [](RankHost& host) {
    const auto out = all_reduce<double>(*host.door, everyone(host),
                                        std::vector<double>(host.rank ? 3 : 100'000, 2.));
    return std::to_string(out[0]);
  });
  expect_all(outcomes, std::to_string(4.));
}

TEST_P(Transports, BuffersThatDoNotFitAreRefusedBeforeTheyTravel) {
  const auto outcomes = run(spec(GetParam(), 2), [](RankHost& host) {
    const Group world = everyone(host);
    std::vector<double> in(4, 1), out(3);
    try {
      host.door->start(calling(Op::all_reduce, Reduce::sum, world, in, 5), view(in), view(out),
                       nullptr);
    } catch (const std::invalid_argument& e) {
      return std::string(e.what());
    }
    return std::string("accepted");
  });
  expect_all(outcomes,
             "all_reduce at subject.cpp:5: the transport expects `out` to be 4 contiguous elements "
             "of f64 in host memory and met 3 of f64");
}

std::string refusal_of(const std::function<void()>& act) {
  try {
    act();
  } catch (const std::invalid_argument& e) {
    return e.what();
  }
  return "accepted";
}

// Each on the rank that asks, with nothing sent: the last call of all is met as the first one.
TEST_P(Transports, EachWrongCallIsRefusedBeforeItTravels) {
  const auto outcomes = run(spec(GetParam(), 2), [](RankHost& host) {
    const Group world = everyone(host);
    std::vector<double> in(4, 1), out(4), eight(8);
    std::vector<float> other(4);
    std::string wrong;
    const auto refused = [&](const std::string& why, Call call, const View& from, const View& to) {
      const std::string said = refusal_of([&] { host.door->start(call, from, to, nullptr); });
      if (said != std::string(name(call.op)) + " at subject.cpp:5: " + why)
        wrong += "expected '" + why + "' in " + said + "\n";
    };
    const auto expects = [](const std::string& which, const std::string& met) {
      return "the transport expects `" + which +
             "` to be 4 contiguous elements of f64 in host "
             "memory and met " +
             met;
    };
    const auto call = [&](Op op, Reduce reduce = Reduce::none, const Group* group = nullptr,
                          int root = 0) {
      return calling(op, reduce, group ? *group : world, in, 5, root);
    };
    const View a = view(in), b = view(out);
    View strided = view_of(eight.data() ? reinterpret_cast<std::byte*>(eight.data()) : nullptr,
                           DType::f64, {4});
    strided.strides = {2};
    View far = a;
    far.space = Space::device;
    const Call sum = call(Op::all_reduce, Reduce::sum);
    refused(expects("in", "4 of f32"), sum, view(other), b);
    refused(expects("in", "4 of f64, strided"), sum, strided, b);
    refused(expects("in", "4 of f64, on a device"), sum, far, b);
    refused(expects("out", "8 of f64"), sum, a, view(eight));
    refused(expects("out", "8 of f64"), call(Op::broadcast), a, view(eight));
    refused("the reduction `none` does not belong to this operation", call(Op::all_reduce), a, b);
    refused("the reduction `sum` does not belong to this operation",
            call(Op::all_gather, Reduce::sum), a, view(eight));
    for (const int root : {-1, 2})
      refused(fmt::format("root {} is not a member of 2", root),
              call(Op::broadcast, Reduce::none, nullptr, root), a, b);
    Call odd = call(Op::reduce_scatter, Reduce::sum);
    odd.count = 3;
    refused("3 elements cannot be cut into 2 blocks", odd, a, b);
    Call exchange = call(Op::all_to_all);
    exchange.send = {2, 2};
    exchange.recv = {4};
    refused("2 send and receive counts are expected, 2 and 1 met", exchange, a, b);
    exchange.recv = {1, 3};
    refused(expects("out", "8 of f64"), exchange, a, view(eight));
    exchange.send = {4};
    refused("2 send and receive counts are expected, 1 and 2 met", exchange, a, b);
    const int me = host.rank, peer = 1 - me;
    const Group of_peer = group_of({0, 1}, peer), beyond = group_of({me, 2}, me),
                before = group_of({me, -1}, me);
    for (const auto& [group, members, place] : {std::tuple{&of_peer, std::string("{0,1}"), peer},
                                                {&beyond, fmt::format("{{{},2}}", me), 0},
                                                {&before, fmt::format("{{{},-1}}", me), 0}})
      refused(
          fmt::format("a group of ranks 0 to 1 with rank {} at its place {} is expected, {} met",
                      me, place, members),
          call(Op::all_reduce, Reduce::sum, group), a, b);
    Call nobody = sum;
    nobody.group = nullptr;
    refused("a group is expected", nobody, a, b);
    const Ticket once = host.door->start(sum, a, b, nullptr);
    host.door->wait(once, nullptr);
    if (out != std::vector<double>(4, 2)) wrong += "a wrong sum\n";
    if (refusal_of([&] { host.door->wait(once, nullptr); }).find("is not in flight") ==
        std::string::npos)
      wrong += "waited twice\n";
    return wrong;
  });
  expect_all(outcomes, "");
}

// Slots are counted by group.
TEST_P(Transports, AFullGroupLeavesTheOthersFree) {
  const auto outcomes = run(spec(GetParam(), 2), [](RankHost& host) {
    const Group world = everyone(host), back = group_of({1, 0}, host.rank, "back");
    std::vector<double> in(1, 1), out(1);
    const auto start = [&](const Group& group) {
      return host.door->start(calling(Op::all_reduce, Reduce::sum, group, in, 8), view(in),
                              view(out), nullptr);
    };
    std::vector<Ticket> tickets;
    for (int c = 0; c < 64; ++c) tickets.push_back(start(world));
    host.door->wait(start(back), nullptr);
    for (const Ticket t : tickets) host.door->wait(t, nullptr);
    return std::to_string(out[0]);
  });
  expect_all(outcomes, std::to_string(2.));
}

// Calls that nobody waited for, ranks that were released, a rank that threw: the next job finds
// nothing of it, and its calls are counted from one.
TEST_P(Transports, WhatAJobLeavesIsForgottenByTheNext) {
  const auto world =
      start_world(spec(GetParam(), 2), [](RankHost& host, std::span<const std::byte> job) {
        const Group all = everyone(host);
        const std::string what = text_of(job);
        std::vector<double> in(20'000, host.rank + 1), out(20'000), one(1), sum(1);
        if (what == "unwaited") {  // in every slot a call with a high number
          for (int c = 0; c < 70; ++c) barrier(*host.door, all);
          const Ticket large = host.door->start(calling(Op::all_reduce, Reduce::sum, all, in, 1),
                                                view(in), view(out), nullptr);
          for (int c = 0; c < 63; ++c)
            host.door->start(calling(Op::all_reduce, Reduce::sum, all, one, 2), view(one),
                             view(sum), nullptr);
          if (host.rank == 0) host.door->wait(large, nullptr);
          return bytes_of("done");
        }
        if (what == "released")
          return bytes_of(released_or([&] {
                            if (host.rank == 0) barrier(*host.door, all);
                            return std::string("done");
                          }).substr(0, 20));
        if (what == "throws" && host.rank == 1) throw std::runtime_error("as asked");
        if (what == "throws") return bytes_of("done");
        const bool right = all_reduce(*host.door, all, in) == std::vector<double>(20'000, 3);
        return bytes_of(right ? "right" : "wrong");
      });
  uint32_t number = 0;
  const auto run = [&](const std::string& job) { return world->run(bytes_of(job), ++number, 30); };
  for (const std::string before : {"unwaited", "released", "throws", "sum"}) {
    const auto left = run(before);
    EXPECT_EQ(text_of(left[0].record), before == "released" ? "released by deadlock"
                                       : before == "sum"    ? "right"
                                                            : "done");
    EXPECT_EQ(left[1].end, before == "throws" ? RankOutcome::threw : RankOutcome::finished);
    const auto outcomes = run("sum");
    expect_all(outcomes, "right");
    for (const RankOutcome& o : outcomes) EXPECT_EQ(o.trace.calls_in_phase, 1u) << before;
  }
}

// The block of a call that one rank alone had begun is none of the next job's.
TEST_P(Transports, AShiftOfTheJobBeforeIsNotReceived) {
  const auto world =
      start_world(spec(GetParam(), 2), [](RankHost& host, std::span<const std::byte> job) {
        std::vector<int64_t> in(1, text_of(job) == "old" ? 7 : 8), out(1);
        const Group all = everyone(host);
        const bool old = text_of(job) == "old";
        if (old && host.rank == 1) return bytes_of("done");
        if (!old && host.rank == 0) std::this_thread::sleep_for(std::chrono::milliseconds(20));
        const Ticket t = host.door->start(calling(Op::shift, Reduce::none, all, in, 1, 1), view(in),
                                          view(out), nullptr);
        if (old) return bytes_of("done");
        host.door->wait(t, nullptr);
        return bytes_of(std::to_string(out[0]));
      });
  expect_all(world->run(bytes_of("old"), 1, 30), "done");
  expect_all(world->run(bytes_of("new"), 2, 30), "8");
}

// Without a ledger above the door it counts by itself, with one it counts nothing twice.
TEST_P(Transports, CallsOfAPhaseAreCounted) {
  for (const bool counted : {false, true}) {
    const auto outcomes = run(spec(GetParam(), 2), [counted](RankHost& host) {
      const Group world = everyone(host);
      LedgerDoor ledger(*host.state, *host.door);
      Door& door = counted ? static_cast<Door&>(ledger) : *host.door;
      host.state->phase = Phase::forward;
      for (int c = 0; c < 3; ++c) barrier(door, world);
      const uint32_t before = host.trace->calls_in_phase;
      host.state->phase = Phase::backward;
      for (int c = 0; c < 2; ++c) barrier(door, world);
      const std::vector<double> nothing;
      Call far = calling(Op::barrier, Reduce::none, world, nothing, 9);
      far.file = "some/where/subject.cpp";
      std::vector<double> none;
      door.wait(door.start(far, view(none), view(none), nullptr), nullptr);
      return fmt::format("{} {} {}", before, host.trace->calls_in_phase, host.trace->site);
    });
    expect_all(outcomes, "3 3 subject.cpp:9");
  }
}

// A rank without lockstep gets what was posted, and nothing that lies behind it.
TEST_P(Transports, WithoutLockstepNoMoreArrivesThanWasSent) {
  WorldSpec blind = spec(GetParam(), 2);
  blind.lockstep = false;
  const auto outcomes = run(blind, [](RankHost& host) {
    std::vector<double> in(2, host.rank), out(4, -1);
    const Group world = everyone(host);
    const Call call = calling(Op::shift, Reduce::none, world, in, 1, 1);
    host.door->wait(host.door->start(call, view(in), view(out), nullptr), nullptr);
    const double peer = 1 - host.rank;
    return std::string(out == std::vector<double>{peer, peer, -1, -1} ? "right" : "wrong");
  });
  expect_all(outcomes, "right");
}

// A call is overdue when nobody whom it waits for makes one: ranks 1 and 2 do, for twice as long.
TEST_P(Transports, AMemberThatMakesOtherCallsIsWaitedFor) {
  expect_with_some_deadline([&](double scale) -> std::string {
    const auto outcomes = run(spec(GetParam(), 3, scale), [scale](RankHost& host) {
      return released_or([&] {
        const auto pause = std::chrono::duration<double>(scale);
        for (int c = 0; c < 20 && host.rank > 0; ++c) {
          barrier(*host.door, group_of({1, 2}, host.rank, "others"));
          std::this_thread::sleep_for(pause);
        }
        barrier(*host.door, everyone(host));
        return std::string("met");
      });
    });
    for (const RankOutcome& o : outcomes)
      if (text_of(o.record) != "met") return text_of(o.record) + o.text;
    return "";
  });
}

// A job that may last twice as long has calls that may, too. `calls`: none is late but the job.
TEST(World, DeadlinesOfCallsAndJobsAreInProportion) {
  for (const bool calls : {false, true})
    expect_with_some_deadline([calls](double scale) -> std::string {
      scale /= 3;
      const auto world = start_world(spec("processes", 2, scale),
                                     [calls](RankHost& host, std::span<const std::byte>) {
                                       return bytes_of(released_or([&] {
                                         for (; for_ever; usleep(1000))
                                           if (host.rank == 0 || calls)
                                             barrier(*host.door, everyone(host));
                                         return std::string();
                                       }));
                                     });
      const auto begin = std::chrono::steady_clock::now();
      const auto outcomes = world->run({}, 1, 2 * case_deadline_seconds);
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
      const std::string due =
          calls ? fmt::format("the job's deadline of {:g} s has passed", 60 * scale)
                : fmt::format("no progress for {:.1f} s", 20 * scale);
      const std::string said = text_of(outcomes[0].record) + outcomes[0].text;
      if (said.find(due) == said.npos) return fmt::format("expected '{}' in {}", due, said);
      return took.count() >= (calls ? 60 : 20) * scale ? "" : fmt::format("after {}", took.count());
    });
}

// Of two ranks of one process that ends one called exit, and the other was in a call.
TEST(World, ARankThatWaitsDidNotEndItsProcess) {
  const auto outcomes = run(spec("threads", 2), [](RankHost& host) {
    if (host.rank == 1) {
      for (Trace other; other.state != Trace::waiting;) other = snapshot(of_the_rank_before(host));
      _exit(3);
    }
    barrier(*host.door, everyone(host));
    return std::string();
  });
  EXPECT_EQ(outcomes[0].end, RankOutcome::ended) << outcomes[0].text;
  EXPECT_EQ(outcomes[1].end, RankOutcome::exited) << outcomes[1].text;
  EXPECT_EQ(outcomes[1].code, 3);
}

// --- parents

// Some programs start others with SIGCHLD ignored, and then the kernel keeps no wait status.
TEST(World, HowARankEndsIsKnownToAParentThatIgnoredItsChildren) {
  const auto before = signal(SIGCHLD, SIG_IGN);
  const auto outcomes = run(spec("processes", 2), [](RankHost& host) {
    if (host.rank == 1) _exit(3);
    return std::string();
  });
  signal(SIGCHLD, before);
  EXPECT_EQ(outcomes[1].end, RankOutcome::exited) << outcomes[1].text;
  EXPECT_EQ(outcomes[1].code, 3);
}

TEST(World, RefusesWhatItCannotBe) {
  const RankMain nothing = [](RankHost&, std::span<const std::byte>) { return Bytes(); };
  EXPECT_THROW(start_world(spec("pigeons", 2), nothing), BadInput);
  EXPECT_THROW(start_world(spec("processes", 0), nothing), BadInput);
  EXPECT_THROW(start_world(spec("processes", 65), nothing), BadInput);
  WorldSpec inside = spec("processes", 2);
  inside.in_process = true;
  EXPECT_THROW(start_world(inside, nothing), BadInput);
}

TEST(World, RunsInsideTheCallingProcess) {
  WorldSpec inside = spec("threads", 4);
  inside.in_process = true;
  const pid_t here = getpid();
  const auto outcomes = run(inside, [here](RankHost& host) {
    EXPECT_TRUE(host.threads);
    return std::to_string(getpid() == here) +
           std::to_string(all_reduce<double>(*host.door, everyone(host), {1})[0]);
  });
  expect_all(outcomes, "1" + std::to_string(4.));
  EXPECT_EQ(start_world(inside, {})->description(), "threads, 4 ranks, in process");
}

TEST(World, RanksReadNothingAndLeaveNoStaticsOfTheParent) {
  const auto outcomes = run(spec("processes", 2), [](RankHost&) {
    char c;
    return std::to_string(read(STDIN_FILENO, &c, 1));
  });
  expect_all(outcomes, "0");
}

// The parent is killed; its ranks, and a process that one of them started, end with it.
TEST(World, NobodyOutlivesTheParent) {
  auto* pids = static_cast<std::atomic<pid_t>*>(
      mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  const pid_t parent = fork();
  if (parent == 0) {
    run(spec("processes", 3), [pids](RankHost& host) {
      pids[host.rank] = getpid();
      while (for_ever) pause();
      return std::string();
    });
    _exit(0);
  }
  for (int rank = 0; rank < 3; ++rank)
    while (pids[rank] == 0) usleep(1000);
  kill(parent, SIGKILL);
  waitpid(parent, nullptr, 0);
  // They are reparented, so they vanish when init reaps them; a zombie counts as ended.
  const auto running = [](pid_t pid) {
    char state = 0;
    const std::string path = "/proc/" + std::to_string(pid) + "/stat";
    if (FILE* f = std::fopen(path.c_str(), "r")) {
      if (std::fscanf(f, "%*d %*s %c", &state) != 1) state = 0;
      std::fclose(f);
    }
    return state != 0 && state != 'Z' && state != 'X';
  };
  for (int rank = 0; rank < 3; ++rank) {
    for (int look = 0; look < 2000 && running(pids[rank]); ++look) usleep(1000);
    EXPECT_FALSE(running(pids[rank])) << "rank " << rank;
  }
  munmap(pids, 4096);
}

// Ctrl-C while ranks hang: the job ends at once, nobody is blamed, nobody stays.
TEST(World, AnInterruptEndsTheJob) {
  const pid_t parent = fork();
  if (parent == 0) {
    catch_interrupts();
    const auto outcomes = run(spec("processes", 2), [](RankHost& host) {
      if (host.rank == 0) kill(getppid(), SIGINT);
      while (for_ever) pause();
      return std::string();
    });
    const bool ended =
        outcomes[0].end == RankOutcome::ended && outcomes[1].end == RankOutcome::ended;
    _exit(ended && waitpid(-1, nullptr, WNOHANG) == -1 ? 42 : 1);
  }
  int status = 0;
  waitpid(parent, &status, 0);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 42);
}

TEST(World, TwoRanksThatEndDifferentlyAreBothNamed) {
  const auto outcomes = run(spec("processes", 3), [](RankHost& host) {
    barrier(*host.door, everyone(host));
    if (host.rank == 0) _exit(3);
    if (host.rank == 1) std::abort();
    return released_or([&] {
      barrier(*host.door, everyone(host));
      return std::string();
    });
  });
  EXPECT_EQ(outcomes[0].end, RankOutcome::exited);
  EXPECT_EQ(outcomes[0].code, 3);
  EXPECT_EQ(outcomes[1].end, RankOutcome::signalled);
  EXPECT_EQ(outcomes[1].code, SIGABRT);
  EXPECT_EQ(outcomes[2].end, RankOutcome::finished);
}

TEST(World, WhatARankStartedEndsWithIt) {
  auto* pid = static_cast<std::atomic<pid_t>*>(
      mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  run(spec("processes", 2), [pid](RankHost& host) {
    if (host.rank == 1) {
      const pid_t child = fork();
      if (child == 0)
        while (for_ever) pause();
      *pid = child;
      std::abort();
    }
    return std::string();
  });
  ASSERT_GT(pid->load(), 0);
  bool there = true;
  for (int look = 0; look < 2000 && there; ++look) {
    FILE* f = std::fopen(("/proc/" + std::to_string(pid->load()) + "/stat").c_str(), "r");
    char state = 0;
    there = f && std::fscanf(f, "%*d %*s %c", &state) == 1 && state != 'Z';
    if (f) std::fclose(f);
    if (there) usleep(1000);
  }
  EXPECT_FALSE(there);
  munmap(pid, 4096);
}

}  // namespace world_test
}  // namespace
}  // namespace shardproof
