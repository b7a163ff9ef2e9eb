// The transport over NCCL, without a device: against a table that only notes what is asked of it,
// and against a double of NCCL among forked ranks.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "oracle/comm/nccl_door.hpp"
#include "oracle/comm/tcp_session.hpp"
#include "oracle/comm/transport_self_test.hpp"
#include "oracle/cuda/placed.hpp"
#include "suites/self/device_double/program.hpp"

namespace shardproof {
namespace {

using doubles::double_api, doubles::double_folder, doubles::program, doubles::Ran;
using Words = std::vector<std::string>;

// ---- What is asked of NCCL, in which order

Words asked;  // of the host and of NCCL
int note(std::string word) {
  asked.push_back(std::move(word));
  return nccl_success;
}

// Host side of a group in which everybody makes the same call at once.
struct Alone : Door, Meeting {
  Ticket start(const Call& c, const View& in, const View& out, Stream) override {
    note(fmt::format("host {}", name(c.op)));
    if (c.op == Op::all_reduce) copy(in, out);
    return 0;
  }
  void wait(Ticket, Stream) override {}
  void meet(const Call& c, int64_t receives) override {
    note(fmt::format("meet {} {}", name(c.op), receives));
  }
  void look() override {
    if (trace && !released) stood = trace->state, made = makes_a_communicator();
    if (released) throw Released(cause, why);
  }
  void release(Released::Cause c, const std::string& text) override {
    released = true;
    cause = c;
    why = text;
  }
  bool released = false;
  Released::Cause cause = Released::deadline;
  std::string why;
  const Trace* trace = nullptr;  // of the rank
  Trace::State stood = Trace::left;
  bool made = false;
};

int state_of_communicators = nccl_success;
constexpr NcclApi noting = {
    .version = [](int*) { return nccl_success; },
    .unique_id = [](void*, size_t) { return note("unique_id"); },
    .text = [](int) { return "a text"; },
    .last_error = [] { return "last words"; },
    .create =
        [](NcclComm* c, int ranks, const void*, int rank) {
          static int one;
          *c = &one;
          return note(fmt::format("create {} of {}", rank, ranks));
        },
    .async_error =
        [](NcclComm, int* code) {
          *code = state_of_communicators;
          return nccl_success;
        },
    .abort = [](NcclComm) { return note("abort"); },
    .group_start = [] { return note("group_start"); },
    .group_end = [] { return note("group_end"); },
    .all_reduce = [](const void*, void*, size_t n, DType, Reduce r, NcclComm,
                     Stream) { return note(fmt::format("all_reduce {} {}", name(r), n)); },
    .all_gather = [](const void*, void*, size_t n, DType, NcclComm,
                     Stream) { return note(fmt::format("all_gather {}", n)); },
    .reduce_scatter = [](const void*, void*, size_t n, DType, Reduce r, NcclComm,
                         Stream) { return note(fmt::format("reduce_scatter {} {}", name(r), n)); },
    .broadcast =
        [](const void* in, void* out, size_t n, DType, int root, NcclComm, Stream) {
          return note(
              fmt::format("broadcast {} from {}{}", n, root, in == out ? ", in place" : ""));
        },
    .send = [](const void*, size_t n, DType, int to, NcclComm,
               Stream) { return note(fmt::format("send {} to {}", n, to)); },
    .receive = [](void*, size_t n, DType, int from, NcclComm,
                  Stream) { return note(fmt::format("receive {} from {}", n, from)); },
    .most_elements = 4,
};

struct Asked : testing::Test {
  void SetUp() override {
    ::setenv("SHARDPROOF_DOUBLE_DEVICES", "8", 1);
    asked.clear();
    state_of_communicators = nccl_success;
  }
  void TearDown() override { ::unsetenv("SHARDPROOF_DOUBLE_DEVICES"); }

  // One call of member `me` among p, on device memory.
  Words calls_of(Op op, Reduce reduce, DType dtype, int64_t in, int64_t out, int hop, int p, int me,
                 std::vector<int64_t> send = {}, std::vector<int64_t> recv = {}) {
    DeviceContext device(api, me);
    state.rank = me;
    state.size = world;
    Group group;
    group.members.resize(size_t(p));
    std::iota(group.members.begin(), group.members.end(), 0);
    group.me = me;
    group.label = "tp";
    Call call;
    call.op = op;
    call.reduce = reduce;
    call.dtype = dtype;
    call.count = in;
    call.root_or_hop = hop;
    call.group = &group;
    call.send = std::move(send);
    call.recv = std::move(recv);
    Placed from(Buffer(dtype, {in}), &device), to(Buffer(dtype, {out}), &device);
    NcclDoor door(device, noting, host, state, 0.001);
    const Ticket t = door.start(call, from.view(), to.view(), device.stream());
    door.wait(t, device.stream());
    device.synchronise(device.stream());
    const Words heard = asked;  // without the abort at the end
    return heard;
  }
  Alone host;
  RankState state;
  DeviceApi api = double_api();
  int world = 8;
  const Words made = {"host all_reduce", "unique_id", "host broadcast"};  // of a communicator
};

Words joined(std::initializer_list<Words> parts) {
  Words all;
  for (const Words& p : parts) all.insert(all.end(), p.begin(), p.end());
  return all;
}

TEST_F(Asked, RanksMeetBeforeNcclIsAskedAndRingExchangesAreGrouped) {
  EXPECT_EQ(
      calls_of(Op::shift, Reduce::none, DType::f32, 3, 2, 1, 3, 0),
      joined({{"meet shift 2"},
              made,
              {"create 0 of 3", "group_start", "send 3 to 1", "receive 2 from 2", "group_end"}}));
}

TEST_F(Asked, BlocksGoToAndComeFromEachMemberInOneGroup) {
  EXPECT_EQ(calls_of(Op::all_to_all, Reduce::none, DType::f32, 5, 3, 0, 2, 0, {2, 3}, {2, 1}),
            joined({{"meet all_to_all 3"},
                    made,
                    {"create 0 of 2", "group_start", "send 2 to 0", "receive 2 from 0",
                     "send 3 to 1", "receive 1 from 1", "group_end"}}));
}

TEST_F(Asked, CountsBeyondTheRangeAreCut) {
  EXPECT_EQ(
      calls_of(Op::all_reduce, Reduce::sum, DType::f32, 10, 10, 0, 2, 0),
      joined({{"meet all_reduce 10"},
              made,
              {"create 0 of 2", "all_reduce sum 4", "all_reduce sum 4", "all_reduce sum 2"}}));
  asked.clear();
  EXPECT_EQ(calls_of(Op::shift, Reduce::none, DType::f32, 5, 5, 1, 2, 0).back(), "group_end");
  EXPECT_EQ(asked[asked.size() - 6], "send 4 to 1");
  EXPECT_EQ(asked[asked.size() - 5], "send 1 to 1");
  asked.clear();
  EXPECT_EQ(calls_of(Op::broadcast, Reduce::none, DType::f32, 6, 6, 1, 2, 0).back(),
            "broadcast 2 from 1, in place");
}

TEST_F(Asked, BlocksBeyondTheRangeAreRefused) {
  EXPECT_THROW(calls_of(Op::all_gather, Reduce::none, DType::f32, 5, 10, 0, 2, 0), Infrastructure);
  EXPECT_THROW(calls_of(Op::reduce_scatter, Reduce::sum, DType::f32, 10, 5, 0, 2, 0),
               Infrastructure);
}

// NCCL averages contributions times 1/p: exact at powers of two alone, and not made for integers.
TEST_F(Asked, AnAverageIsNcclsWhereThatIsExact) {
  EXPECT_EQ(calls_of(Op::all_reduce, Reduce::avg, DType::bf16, 3, 3, 0, 4, 0).back(),
            "all_reduce avg 3");
  EXPECT_EQ(calls_of(Op::all_reduce, Reduce::avg, DType::f32, 3, 3, 0, 3, 0).back(),
            "all_reduce sum 3");
  EXPECT_EQ(calls_of(Op::reduce_scatter, Reduce::avg, DType::i64, 4, 2, 0, 2, 0).back(),
            "reduce_scatter sum 2");
}

TEST_F(Asked, EmptyCallsMeetAndAskNothingMore) {
  const Words heard = calls_of(Op::all_reduce, Reduce::sum, DType::f32, 0, 0, 0, 2, 0);
  EXPECT_EQ(heard.front(), "meet all_reduce 0");
  EXPECT_EQ(heard.back(), "create 0 of 2");
}

TEST_F(Asked, AGroupOfOneCopiesExceptInAWorldOfOne) {
  const auto sums = [&] {
    return calls_of(Op::all_reduce, Reduce::sum, DType::f32, 3, 3, 0, 1, 0);
  };
  EXPECT_EQ(sums(), Words());
  world = 1;
  EXPECT_EQ(sums(), joined({{"meet all_reduce 3"}, made, {"create 0 of 1", "all_reduce sum 3"}}));
}

// That nobody is blamed, in words that hold these.
void expect_infrastructure(const std::function<void()>& calls, const Words& parts) {
  try {
    calls();
    ADD_FAILURE() << "expected Infrastructure";
  } catch (const Infrastructure& e) {
    for (const std::string& part : parts)
      EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << e.what();
  }
}

TEST_F(Asked, AnErrorAbortsAndReleasesTheOthersInNcclsWords) {
  const auto error_of = [&](int code) {
    state_of_communicators = code;
    asked.clear();
    host = {};
    calls_of(Op::all_reduce, Reduce::sum, DType::f32, 3, 3, 0, 2, 1);
  };
  expect_infrastructure([&] { error_of(3); },
                        {"rank 1", "met 3: a text", "last error: last words"});
  EXPECT_TRUE(host.released);
  EXPECT_EQ(asked.back(), "abort");
  EXPECT_THROW(error_of(nccl_device_error), DeviceError);
}

// It would be in progress for ever; the deadline of set-up, 100 s, is 0.1 s here.
TEST_F(Asked, ACommunicatorThatIsNeverReadyIsGivenUpAndNobodysFault) {
  state_of_communicators = nccl_in_progress;
  EXPECT_THROW(calls_of(Op::all_reduce, Reduce::sum, DType::f32, 3, 3, 0, 2, 0), Infrastructure);
  EXPECT_TRUE(host.released);
  EXPECT_NE(host.why.find("creating a communicator"), std::string::npos) << host.why;
  EXPECT_EQ(asked.back(), "abort");
}

// Every member has come to where the communicator is made: no kernel keeps another waiting there.
TEST_F(Asked, AJobsDeadlineWhileACommunicatorIsMadeIsNobodysFault) {
  state_of_communicators = nccl_in_progress;
  host.release(Released::deadline, "the job's deadline has passed");
  expect_infrastructure([&] { calls_of(Op::all_reduce, Reduce::sum, DType::f32, 3, 3, 0, 2, 0); },
                        {"no progress for", "creating a communicator", "the job's deadline"});
  EXPECT_EQ(asked.back(), "abort");
}

TEST_F(Asked, AReleaseByAnotherRankAbortsWhatIsUnderWay) {
  state_of_communicators = nccl_in_progress;
  host.release(Released::mismatch, "another's words");
  try {
    calls_of(Op::all_reduce, Reduce::sum, DType::f32, 3, 3, 0, 2, 0);
    FAIL() << "expected Released";
  } catch (const Released& e) {
    EXPECT_STREQ(e.what(), "another's words");
  }
  EXPECT_EQ(asked.back(), "abort");
}

// Whoever watches the rank takes it for one that waits, and then no longer: while NCCL is asked
// how a call stands, and while its work is on the stream.
TEST_F(Asked, ARankThatWaitsForNcclSaysSo) {
  Trace trace;
  host.trace = state.trace = &trace;
  state_of_communicators = nccl_in_progress;
  const auto all_reduces = [&] {
    calls_of(Op::all_reduce, Reduce::sum, DType::f32, 3, 3, 0, 2, 0);
  };
  EXPECT_THROW(all_reduces(), Infrastructure);
  EXPECT_EQ(host.stood, Trace::waiting);
  EXPECT_TRUE(host.made);
  EXPECT_EQ(trace.state, Trace::running);

  host = {};
  host.trace = &trace;
  state_of_communicators = nccl_success;
  api.query = [](Event e) {  // done, and never told so
    double_api().await(e);
    return not_ready;
  };
  EXPECT_THROW(all_reduces(), Released);
  EXPECT_EQ(host.stood, Trace::waiting);
  EXPECT_FALSE(host.made);
  EXPECT_EQ(trace.state, Trace::running);
}

TEST_F(Asked, ARankWithoutADeviceOfItsOwnIsRefused) {
  ::setenv("SHARDPROOF_DOUBLE_DEVICES", "2", 1);
  expect_infrastructure([&] { calls_of(Op::all_reduce, Reduce::sum, DType::f32, 3, 3, 0, 4, 2); },
                        {"rank 2: expected a device of its own, met 2"});
}

// ---- Streams: the two waits without which a result is not there

// `without`: which call of order (from 1) is left out, 0 for none. `doors_first`: the door's stream
// is as far as it comes before the caller's is looked at.
int orders = 0, left_out = 0;
std::vector<double> sum_over_one(int without, bool doors_first = false) {
  orders = 0;
  left_out = without;
  DeviceApi api = double_api();
  api.order = [](Stream s, Event e) { return ++orders == left_out ? 0 : double_api().order(s, e); };
  NcclApi doubling = noting;  // an all-reduce of two equal ranks, on the stream that is asked
  doubling.most_elements = 100;
  doubling.all_reduce = [](const void* in, void* out, size_t n, DType, Reduce, NcclComm, Stream s) {
    return double_api().copy_within(out, in, n * 8, s);
  };
  DeviceContext device(api, 0);
  RankState state;
  Alone host;
  Group group;
  group.members = {0, 1};
  Call call;
  call.op = Op::all_reduce;
  call.reduce = Reduce::sum;
  call.count = 2;
  call.group = &group;
  const std::vector<double> values{3, 4};
  std::vector<double> got(2);
  Placed in(Buffer(DType::f64, {2}), &device), out(Buffer(DType::f64, {2}), &device);
  fill_from(in.host().view(), values);
  in.send();  // still on the stream
  {
    NcclDoor door(device, doubling, host, state, 1);
    const Ticket t = door.start(call, in.view(), out.view(), device.stream());
    if (doors_first) {
      Call barrier;
      barrier.group = &group;
      door.start(barrier, {}, {}, nullptr);
    }
    door.wait(t, device.stream());
    device.copy_out(reinterpret_cast<std::byte*>(got.data()), out.view().data, 16, device.stream());
    device.synchronise(device.stream());
  }
  return got;
}

TEST_F(Asked, ResultsAreThereForWhatComesNextOnTheStream) {
  EXPECT_EQ(sum_over_one(0), (std::vector<double>{3, 4}));
}
TEST_F(Asked, WithoutTheWaitForTheDoorsStreamTheyAreNot) {
  EXPECT_NE(sum_over_one(2), (std::vector<double>{3, 4}));
}
TEST_F(Asked, WhatTheCallersStreamHoldsComesBeforeTheCall) {
  EXPECT_EQ(sum_over_one(0, true), (std::vector<double>{3, 4}));
}
TEST_F(Asked, WithoutTheWaitForTheCallersStreamItDoesNot) {
  EXPECT_NE(sum_over_one(1, true), (std::vector<double>{3, 4}));
}

// ---- Forked ranks over the double

struct Ranks : testing::Test {
  void SetUp() override {
    ::setenv("SHARDPROOF_MODULES", double_folder().c_str(), 1);
    ::setenv("SHARDPROOF_DOUBLE_DEVICES", "4", 1);
  }
  void TearDown() override {
    for (const char* name :
         {"SHARDPROOF_MODULES", "SHARDPROOF_DOUBLE_DEVICES", "SHARDPROOF_DOUBLE_NCCL"})
      ::unsetenv(name);
  }
  static std::unique_ptr<World> world(int ranks, RankMain main) {
    WorldSpec spec;
    spec.transport = "nccl";
    spec.ranks = ranks;
    spec.deadline_scale = 5;
    return start_world(spec, std::move(main));
  }
};

// One all-reduce of ones on host views; the record is the sum, or what ended it.
std::vector<std::byte> sum_of_ones(RankHost& host, std::span<const std::byte>) {
  Group group;
  group.members.resize(size_t(host.size));
  std::iota(group.members.begin(), group.members.end(), 0);
  group.me = host.rank;
  group.label = "tp";
  group.id = group_id(group.members);
  Call call;
  call.op = Op::all_reduce;
  call.reduce = Reduce::sum;
  call.count = 1;
  call.group = &group;
  double one = 1, sum = 0;
  const auto view = [](double& x) {
    return view_of(reinterpret_cast<std::byte*>(&x), DType::f64, {1});
  };
  std::string text;
  try {
    host.door->wait(host.door->start(call, view(one), view(sum), nullptr), nullptr);
    text = fmt::format("{}", sum);
  } catch (const Released&) {
    text = "released";
  } catch (const Infrastructure&) {
    text = "infrastructure";
  }
  const auto* first = reinterpret_cast<const std::byte*>(text.data());
  return {first, first + text.size()};
}
Words records(const std::vector<RankOutcome>& outcomes) {
  Words all;
  for (const RankOutcome& o : outcomes)
    all.emplace_back(reinterpret_cast<const char*>(o.record.data()), o.record.size());
  return all;
}

TEST_F(Ranks, TheTransportSelfTestPasses) {
  for (int p : {1, 2, 3, 4}) {
    const auto ranks =
        world(p, [](RankHost&, std::span<const std::byte>) { return std::vector<std::byte>(); });
    const SelfTestResult result = transport_self_test(*ranks, false, 120);
    EXPECT_EQ(result.failures, Words()) << p;
    EXPECT_GE(result.calls, 99 * p);
  }
}

TEST_F(Ranks, CommunicatorsLiveAcrossJobsAndAreMadeAnewAfterAnAbort) {
  const auto healthy = world(3, sum_of_ones);
  for (uint32_t job = 1; job < 3; ++job)
    EXPECT_EQ(records(healthy->run({}, job, 120)), Words(3, "3"));
  ::setenv("SHARDPROOF_DOUBLE_NCCL", "fails_once@1", 1);
  const auto broken = world(3, sum_of_ones);
  const Words first = records(broken->run({}, 1, 120));
  EXPECT_EQ(first, (Words{"released", "infrastructure", "released"}));
  ASSERT_TRUE(broken->alive());
  EXPECT_EQ(records(broken->run({}, 2, 120)), Words(3, "3"));
}

TEST_F(Ranks, ARankThatNeverComesReleasesTheOthersByName) {
  const auto ranks = world(3, [](RankHost& host, std::span<const std::byte> job) {
    return host.rank == 1 ? std::vector<std::byte>() : sum_of_ones(host, job);
  });
  EXPECT_EQ(records(ranks->run({}, 1, 120)), (Words{"released", "", "released"}));
}

// ---- The program

const char* eight = "SHARDPROOF_DOUBLE_DEVICES=8";
std::string planted(const std::string& what) {
  return fmt::format("{} SHARDPROOF_DOUBLE_NCCL={}", eight, what);
}

TEST(Program, LanesOfNcclAreProven) {
  const Ran ran = program("gate mapping --tier smoke --transport nccl --require nccl.np2,nccl.np4",
                          fmt::format("{} {}", eight, doubles::fast));
  EXPECT_EQ(ran.exit, 0) << ran.text;
  EXPECT_TRUE(ran.says("nccl 2 4 proven")) << ran.text;
  EXPECT_TRUE(ran.says(", 0 skipped")) << ran.text;
}

// A ring rounds what it passes on at every hop: within the bound, which counts p roundings in the
// type of the wire, on data that rounds; and exact where every sum is an integer of the type.
TEST(Program, HalfTypesAreRoundedAtEveryHopOfTheRing) {
  for (const char* line :
       {"mapping_all_reduce tp=8 dtype=bf16 fill=normal", "mapping_all_reduce tp=8 dtype=bf16",
        "mapping_reduce_scatter tp=4 dtype=f16 fill=normal",
        "linear_row tp=4 dtype=bf16 fill=normal"}) {
    const Ran ran = program(fmt::format("run {} transport=nccl device=cuda", line), eight);
    EXPECT_EQ(ran.exit, 0) << line << "\n" << ran.text;
  }
}

// One device shows that much of NCCL: the lines of one rank go through it.
TEST(Program, ALineOfOneRankGoesThroughNccl) {
  const auto run = [&](const char* what) {
    return program("run mapping_all_reduce transport=nccl device=cuda", planted(what));
  };
  EXPECT_EQ(run("").exit, 0) << run("").text;
  EXPECT_EQ(run("call_fails@0").exit, 3) << "NCCL was not asked";
}

TEST(Program, FewerDevicesThanRanksAreRefusedInOneLineAndNotProven) {
  const Ran ran =
      program("run mapping_reduce tp=4 transport=nccl device=cuda", "SHARDPROOF_DOUBLE_DEVICES=2");
  EXPECT_EQ(ran.exit, 3) << ran.text;
  EXPECT_TRUE(ran.says("4 ranks need 4 devices, 2 there")) << ran.text;
  const Ran required =
      program("gate mapping_reduce --tier smoke --transport nccl --require nccl.np4",
              "SHARDPROOF_DOUBLE_DEVICES=2");
  EXPECT_EQ(required.exit, 3) << required.text;
  EXPECT_TRUE(required.says("required lane nccl.np4 is not proven")) << required.text;
  EXPECT_TRUE(required.says("nccl 2 proven")) << required.text;
}

TEST(Program, FaultsOfCallsAndPayloadsAreSeenOnNccl) {
  for (const char* fault : {"scale_p@forward.tp.1", "skip@forward.tp.1"}) {
    const Ran ran = program(
        fmt::format("run mapping_all_reduce tp=2 transport=nccl device=cuda fault={}", fault),
        eight);
    EXPECT_EQ(ran.exit, 1) << ran.text;
    EXPECT_TRUE(ran.says("forward")) << ran.text;
  }
}

TEST(Program, CallsThatDifferNeverReachNccl) {
  const Ran ran = program(
      "run mapping_all_reduce tp=4 transport=nccl device=cuda "
      "fault=mean_for_sum@forward.tp.1@rank1",
      eight);
  EXPECT_EQ(ran.exit, 1) << ran.text;
  EXPECT_TRUE(ran.says("mismatch: rank 1 differs from the other members in reduction")) << ran.text;
}

TEST(Program, WhatGoesWrongInNcclBlamesNobody) {
  for (const char* what : {"call_fails@1", "async_error@1"}) {
    const Ran ran =
        program("run mapping_all_reduce tp=3 transport=nccl device=cuda", planted(what));
    EXPECT_EQ(ran.exit, 3) << what << "\n" << ran.text;
    EXPECT_TRUE(ran.says("rank 1, NCCL")) << ran.text;
    EXPECT_TRUE(ran.says("last error: the double: planted")) << ran.text;
  }
}

TEST(Program, ACommunicatorThatARankNeverJoinsIsGivenUp) {
  const Ran ran =
      program("run mapping_all_reduce tp=3 transport=nccl device=cuda --deadline-scale 0.02",
              planted("create_hangs@1"));
  EXPECT_EQ(ran.exit, 3) << ran.text;
  EXPECT_TRUE(ran.says("no progress for")) << ran.text;
  EXPECT_TRUE(ran.says("creating a communicator")) << ran.text;
}

TEST(Program, ACallThatNeverCompletesEndsAtItsDeadline) {
  const Ran ran =
      program("run mapping_all_reduce tp=3 transport=nccl device=cuda --deadline-scale 0.2",
              planted("call_hangs@1"));
  EXPECT_EQ(ran.exit, 1) << ran.text;
  EXPECT_TRUE(ran.says("no progress for 2.0 s")) << ran.text;
  EXPECT_TRUE(ran.says("ranks 0, 1, 2")) << ran.text;
}

TEST(Program, ARankThatDiesInACallIsNamedAndTheOthersAreReleased) {
  const Ran ran =
      program("run mapping_all_reduce tp=3 transport=nccl device=cuda", planted("dies@1"));
  EXPECT_EQ(ran.exit, 1) << ran.text;
  EXPECT_TRUE(ran.says("CRASHED")) << ran.text;
  EXPECT_TRUE(ran.says("rank 1 left the process with exit code 7")) << ran.text;
}

// Ranks of a launcher from outside: they meet, and share the id of a communicator, by MPI.
TEST(Program, RanksOfALauncherAreBootstrappedByMpi) {
  if (!std::filesystem::exists(doubles::here() / "shardproof_mpi.so"))
    GTEST_SKIP() << "built without MPI";
  const auto launched = [](const std::string& line) {
    return doubles::shell(
        fmt::format("SHARDPROOF_MODULES={} {} mpiexec -n 3 {} run {} transport=nccl device=cuda",
                    double_folder(), eight, (doubles::here() / "shardproof").string(), line));
  };
  for (const char* line :
       {"mapping_all_reduce tp=3", "mapping_all_to_all tp=3 tokens=11 hidden=13 split=uneven dim=1",
        "mapping_gather tp=3 dtype=bf16"}) {
    const Ran ran = launched(line);
    EXPECT_EQ(ran.exit, 0) << line << "\n" << ran.text;
    EXPECT_TRUE(ran.says("PASSED")) << ran.text;
  }
  const Ran broken = launched("mapping_all_reduce tp=3 fault=mean_for_sum@forward.tp.1@rank1");
  EXPECT_EQ(broken.exit, 1) << broken.text;
  EXPECT_TRUE(broken.says("mismatch: rank 1 differs from the other members in reduction"))
      << broken.text;
}

// As torchrun starts ranks, whose own store may hold the port.
struct Port {
  int socket = ::socket(AF_INET, SOCK_STREAM, 0), number = 0;
  Port() {
    sockaddr_in a{};
    a.sin_family = AF_INET;
    socklen_t n = sizeof a;
    if (::bind(socket, reinterpret_cast<sockaddr*>(&a), sizeof a) == 0 &&
        ::getsockname(socket, reinterpret_cast<sockaddr*>(&a), &n) == 0)
      number = ntohs(a.sin_port);
  }
  ~Port() { ::close(socket); }
};
Ran torch_ranks(int ranks, int port, const std::string& words) {
  std::string all;
  for (int r = 0; r < ranks; ++r)
    all += fmt::format(
        "{} SHARDPROOF_MODULES={} RANK={} LOCAL_RANK={} WORLD_SIZE={} MASTER_ADDR=127.0.0.1 "
        "MASTER_PORT={} {} {} & p{}=$!; ",
        eight, double_folder(), r, r, ranks, port, (doubles::here() / "shardproof").string(), words,
        r);
  for (int r = 1; r < ranks; ++r) all += fmt::format("wait $p{}; ", r);
  return doubles::shell("{ " + all + "wait $p0; }");
}

TEST(Program, RanksOfTorchrunMeetBySockets) {
  for (const bool held : {false, true}) {
    auto port = std::make_unique<Port>();
    const int number = port->number;
    if (held)
      ASSERT_EQ(::listen(port->socket, 8), 0);
    else
      port.reset();
    for (const char* line : {"mapping_all_reduce tp=3",
                             "mapping_all_to_all tp=3 tokens=11 hidden=13 split=uneven dim=1"}) {
      const Ran ran =
          torch_ranks(3, number, fmt::format("run {} transport=nccl device=cuda", line));
      EXPECT_EQ(ran.exit, 0) << line << "\n" << ran.text;
      EXPECT_TRUE(ran.says("PASSED")) << ran.text;
    }
  }
  const Ran host = torch_ranks(2, 29500, "run mapping_all_reduce tp=2");
  EXPECT_EQ(host.exit, 2) << host.text;
  EXPECT_TRUE(host.says("expected a line of 2 ranks with transport=nccl")) << host.text;
}

// A process that finds the other of two ranks; it ends with 0 where it does.
pid_t rank_of_two(int rank, int port) {
  const pid_t pid = ::fork();
  if (pid != 0) return pid;
  ::alarm(60);
  for (const auto& [name, value] :
       {std::pair{"RANK", rank}, {"WORLD_SIZE", 2}, {"MASTER_PORT", port}})
    ::setenv(name, fmt::format("{}", value).c_str(), 1);
  ::setenv("MASTER_ADDR", "127.0.0.1", 1);
  int code = 1;
  try {
    open_tcp_session();
    code = 0;
  } catch (const Infrastructure& e) {
    std::fprintf(stderr, "%s\n", e.what());
  }
  ::_exit(code);
}
bool is_listened_at(int port) {
  std::ifstream table("/proc/net/tcp");
  for (std::string row; std::getline(table, row);)
    if (row.find(fmt::format(":{:04X} 00000000:0000 0A", port)) != row.npos) return true;
  return false;
}

// Longer than a rank waits for an answer at one port, nobody gives rank 0 a core on which it could
// answer: the connections that were left meanwhile are none.
TEST(Torchrun, ARankThatCallsAgainIsMet) {
  const int port = Port().number;
  const pid_t first = rank_of_two(0, port);
  while (!is_listened_at(port)) ::usleep(1000);
  ::kill(first, SIGSTOP);
  const pid_t second = rank_of_two(1, port);
  ::usleep(5'000'000);  // two and a half times as long
  ::kill(first, SIGCONT);
  for (const pid_t rank : {first, second}) {
    int status = -1;
    ::waitpid(rank, &status, 0);
    EXPECT_EQ(status, 0);
  }
}

}  // namespace
}  // namespace shardproof
