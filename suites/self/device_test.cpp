// Device buffers, staged calls and the program's device=cuda, against a double of a device whose
// memory no host code may touch and whose streams do nothing before the host waits. And what the
// real module can show without a device: that it links, and what its runtime answers.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "oracle/comm/ledger.hpp"
#include "oracle/cuda/placed.hpp"
#include "oracle/cuda/staged_door.hpp"
#include "oracle/digest/digest.hpp"
#include "oracle/gate.hpp"
#include "oracle/registry.hpp"
#include "suites/bench/device_rows.hpp"
#include "suites/self/device_double/program.hpp"

namespace shardproof {
namespace {

namespace fs = std::filesystem;
using doubles::double_api, doubles::double_folder, doubles::double_module, doubles::here;
using doubles::fast;
using doubles::open_module;
using doubles::program, doubles::Ran, doubles::shell;

// ---- Device memory is the device's

TEST(DeviceDouble, HostAccessToDeviceMemoryIsACrash) {
  const pid_t child = ::fork();
  if (child == 0) {
    std::signal(SIGSEGV, SIG_DFL);  // a sanitizer's handler would exit
    const DeviceContext device(double_api(), 0);
    volatile std::byte* memory = device.allocate(16);
    [[maybe_unused]] const std::byte read = memory[0];
    ::_exit(0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSIGNALED(status)) << "exit code " << WEXITSTATUS(status);
  EXPECT_EQ(WTERMSIG(status), SIGSEGV);
}

TEST(DeviceDouble, ACopyIsNotThereBeforeTheHostWaits) {
  const DeviceContext device(double_api(), 0);
  std::byte* memory = device.allocate(8);
  const double sent = 42;
  double got = 0;
  device.copy_in(memory, reinterpret_cast<const std::byte*>(&sent), 8, device.stream());
  device.copy_out(reinterpret_cast<std::byte*>(&got), memory, 8, device.stream());
  EXPECT_EQ(got, 0);
  device.synchronise(device.stream());
  EXPECT_EQ(got, 42);
  device.release(memory);
}

TEST(DeviceContext, ACodeIsAnErrorThatNamesCallAndText) {
  DeviceApi broken = double_api();
  broken.synchronise = [](Stream) { return 700; };
  const DeviceContext device(broken, 0);
  try {
    device.synchronise(device.stream());
    FAIL() << "expected DeviceError";
  } catch (const DeviceError& e) {
    EXPECT_EQ(e.code, 700);
    EXPECT_NE(std::string(e.what()).find("synchronising"), std::string::npos) << e.what();
    EXPECT_NE(std::string(e.what()).find("700"), std::string::npos) << e.what();
  }
}

// Copies to the host, as long as pinned memory holds them, are waited for once.
int waits = 0, unpinned = 0;
std::byte *pinned_from = nullptr, *pinned_to = nullptr;
TEST(DeviceContext, CopiesToTheHostGoByWayOfPinnedMemory) {
  DeviceApi noting = double_api();
  noting.allocate_pinned = [](void** memory, size_t bytes) {
    const int code = double_api().allocate_pinned(memory, bytes);
    pinned_from = static_cast<std::byte*>(*memory), pinned_to = pinned_from + bytes;
    return code;
  };
  noting.copy_out = [](void* to, const void* from, size_t bytes, Stream s) {
    unpinned += !(to >= pinned_from && static_cast<std::byte*>(to) + bytes <= pinned_to);
    return double_api().copy_out(to, from, bytes, s);
  };
  noting.synchronise = [](Stream s) {
    ++waits;
    return double_api().synchronise(s);
  };
  const DeviceContext device(noting, 0);
  const std::vector<size_t> sizes{1, 0, 4096, size_t(1) << 21, 3, (size_t(1) << 20) - 4100, 7};
  std::vector<std::vector<std::byte>> got;
  std::vector<std::byte*> memory;
  std::vector<DeviceContext::ToHost> copies;
  for (size_t i = 0; i < sizes.size(); ++i) {
    got.emplace_back(sizes[i]);
    memory.push_back(device.allocate(std::max<size_t>(sizes[i], 1)));
    device.fill(memory[i], int(i + 1), sizes[i], device.stream());
    copies.push_back({got[i].data(), memory[i], sizes[i]});
  }
  device.bring(copies, device.stream());
  EXPECT_EQ(waits, 1);
  EXPECT_EQ(unpinned, 2) << "2^21 bytes, and 7 behind a full 2^20";
  for (size_t i = 0; i < sizes.size(); ++i)
    EXPECT_EQ(got[i], std::vector<std::byte>(sizes[i], std::byte(i + 1))) << i;
  for (std::byte* m : memory) device.release(m);
}

// What was given back may still be written to by a late stream: it is free once that is done.
TEST(DeviceContext, MemoryThatWasGivenBackComesAgainBehindTheStreams) {
  const DeviceContext device(double_api(), 0);
  std::byte* memory = device.take(64);
  device.fill(memory, 5, 64, device.numbered(1));
  device.give_back(memory, 64);
  std::byte* other = device.take(64);
  EXPECT_NE(other, memory) << "nobody has waited for the stream";
  device.recycle();
  std::byte* larger = device.take(65);
  EXPECT_NE(larger, memory) << "an access behind its end would lie within";
  EXPECT_EQ(device.take(64), memory);
  for (auto [m, bytes] : {std::pair(memory, 64), std::pair(other, 64), std::pair(larger, 65)})
    device.give_back(m, size_t(bytes));
}

// ---- Buffers on the device

struct OnDevice : testing::Test {
  DeviceContext device{double_api(), 0};

  // What a kernel would do to device memory.
  void put(std::byte* to, const std::vector<double>& values) const {
    device.copy_in(to, reinterpret_cast<const std::byte*>(values.data()), values.size() * 8,
                   device.stream());
    device.synchronise(device.stream());  // `values` must stay until then
  }
  std::vector<double> get(const View& v) const {
    std::vector<double> values(size_t(v.elements()));
    device.copy_out(reinterpret_cast<std::byte*>(values.data()), v.data, values.size() * 8,
                    device.stream());
    device.synchronise(device.stream());
    return values;
  }
  Placed sent(std::vector<double> values) const {
    Placed p(Buffer(DType::f64, {int64_t(values.size())}), &device);
    fill_from(p.host().view(), values);
    p.send();
    return p;
  }
};

void fetch(Placed& p, const DeviceContext& device) {
  std::vector<DeviceContext::ToHost> copies;
  p.fetch(copies);
  device.bring(copies, device.stream());
}

struct PlacedBuffer : OnDevice {
  void fetch(Placed& p) const { shardproof::fetch(p, device); }
};

TEST_F(PlacedBuffer, ViewIsTheDevicesAndHoldsWhatWasSent) {
  Placed p = sent({1, 2, 3});
  EXPECT_EQ(p.view().space, Space::device);
  EXPECT_NE(p.view().data, p.host().view().data);
  EXPECT_THROW(p.view().as<double>(), std::invalid_argument);
  EXPECT_EQ(get(p.view()), (std::vector<double>{1, 2, 3}));
}

TEST_F(PlacedBuffer, WithoutADeviceItIsTheBuffer) {
  Placed p(Buffer(DType::f64, {3}), nullptr);
  EXPECT_EQ(p.view().space, Space::host);
  EXPECT_EQ(p.view().data, p.host().view().data);
}

TEST_F(PlacedBuffer, UnwrittenElementsAreTheDevices) {
  Placed p(Buffer(DType::f64, {3}), &device);
  p.send();
  put(p.view().data, {7});
  EXPECT_EQ(p.host().unwritten().count, 3) << "before fetch";
  fetch(p);
  EXPECT_EQ(p.host().unwritten().count, 2);
  EXPECT_EQ(p.host().unwritten().first, 1);
}

TEST_F(PlacedBuffer, GuardZonesAreTheDevices) {
  Placed p = sent({1, 2, 3});
  fetch(p);
  EXPECT_FALSE(p.host().trespass());
  put(p.view().data + 3 * 8, {0});
  fetch(p);
  ASSERT_TRUE(p.host().trespass());
  EXPECT_EQ(p.host().trespass()->where, "after");
}

TEST_F(PlacedBuffer, AChangedArgumentIsSeen) {
  Placed p = sent({1, 2, 3});
  const auto before = p.host().snapshot();
  put(p.view().data + 8, {5});
  fetch(p);
  EXPECT_EQ(p.host().changed_since(before), 1);
}

// As the host takes it of the same bytes, in words and, where an odd one is left over, in elements.
TEST_F(PlacedBuffer, ItsDigestIsThatOfItsBytes) {
  for (DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16})
    for (int64_t n : {8, 13}) {
      Placed p(Buffer(dtype, {n}), &device);
      std::vector<double> values;
      for (int64_t i = 0; i < n; ++i) values.push_back(double(i) - 4);
      fill_from(p.host().view(), values);
      p.send();
      p.reserve_digest();
      EXPECT_EQ(p.digest(), nullptr);
      p.take_digest();
      fetch(p);
      ASSERT_NE(p.digest(), nullptr);
      shardproof_digest due{};
      const auto hash = digest::hash_of_run("", dtype, n);
      EXPECT_EQ(hash.unit == SHARDPROOF_WORD, n == 8 || dtype == DType::f64);
      ASSERT_EQ(shardproof_digest_run(&due, &hash, p.host().view().data, uint64_t(n), 0), 0);
      EXPECT_TRUE(digest::same(*p.digest(), due)) << name(dtype) << " " << n;
    }
}

// Between the call of the subject and the fetch of what it left nothing is allocated: the runtime
// may wait for every stream then, and none would be late any more.
int allocations = 0;
TEST_F(PlacedBuffer, ADigestIsTakenWithoutAnAllocation) {
  DeviceApi counting = double_api();
  counting.allocate = [](void** memory, size_t bytes) {
    ++allocations;
    return double_api().allocate(memory, bytes);
  };
  const DeviceContext counted(counting, 0);
  Placed p(Buffer(DType::f64, {3}), &counted), without(Buffer(DType::f64, {3}), &counted);
  p.reserve_digest();
  const int before = allocations;
  p.take_digest();
  without.take_digest();
  shardproof::fetch(p, counted);
  EXPECT_EQ(allocations, before);
  EXPECT_NE(p.digest(), nullptr);
  EXPECT_EQ(without.digest(), nullptr) << "no room was made";
}

TEST_F(PlacedBuffer, MovesKeepItsMemory) {
  Placed a = sent({1, 2}), b = sent({3});
  const std::byte* memory = a.view().data;
  b = std::move(a);
  EXPECT_EQ(b.view().data, memory);
  EXPECT_EQ(get(b.view()), (std::vector<double>{1, 2}));
}

// ---- Staged calls

// A transport of one rank: the result is the input times ten, there when wait returns.
struct TimesTen : Door {
  struct Flight {
    View in, out;
  };
  std::vector<double> seen;  // at start
  std::vector<Space> spaces;
  std::map<Ticket, Flight> flights;
  Ticket last = 0;
  bool writes = true;

  Ticket start(const Call&, const View& in, const View& out, Stream stream) override {
    EXPECT_EQ(stream, nullptr) << "the transport moves host memory";
    seen = in.elements() ? to_doubles(in) : std::vector<double>{};
    spaces = {in.space, out.space};
    flights[++last] = {in, out};
    return last;
  }
  void wait(Ticket t, Stream) override {
    const Flight f = flights.at(t);
    flights.erase(t);
    if (!writes || f.in.elements() == 0) return;
    std::vector<double> values = to_doubles(f.in);
    for (double& v : values) v *= 10;
    fill_from(f.out, values);
  }
};

struct Staged : OnDevice {
  TimesTen transport;
  Group group;
  Call call() {
    Call c;
    c.op = Op::all_reduce;
    c.reduce = Reduce::sum;
    c.group = &group;
    return c;
  }
};

TEST_F(Staged, TheTransportGetsPinnedMemoryThatHoldsTheInput) {
  StagedDoor door(device, transport);
  Placed in = sent({1, 2, 3}), out = sent({0, 0, 0});  // still on the stream
  const Ticket t = door.start(call(), in.view(), out.view(), device.stream());
  EXPECT_EQ(transport.seen, (std::vector<double>{1, 2, 3}));
  EXPECT_EQ(transport.spaces, (std::vector{Space::pinned, Space::pinned}));
  door.wait(t, device.stream());
  EXPECT_EQ(get(out.view()), (std::vector<double>{10, 20, 30}));
  EXPECT_EQ(get(in.view()), (std::vector<double>{1, 2, 3}));
}

// The double sees a missing wait: without one the transport reads what is not there yet.
TEST_F(Staged, WithoutAWaitForTheStreamTheInputIsNotThere) {
  DeviceApi hasty = double_api();
  hasty.synchronise = [](Stream) { return 0; };
  const DeviceContext careless(hasty, 0);
  Placed in = sent({1, 2, 3}), out = sent({0, 0, 0});
  device.synchronise(device.stream());
  StagedDoor door(careless, transport);
  const Ticket t = door.start(call(), in.view(), out.view(), careless.stream());
  EXPECT_NE(transport.seen, (std::vector<double>{1, 2, 3}));
  door.wait(t, careless.stream());
  double_api().synchronise(careless.stream());
}

TEST_F(Staged, InPlaceStaysInPlace) {
  StagedDoor door(device, transport);
  Placed both = sent({1, 2});
  door.wait(door.start(call(), both.view(), both.view(), device.stream()), device.stream());
  EXPECT_EQ(get(both.view()), (std::vector<double>{10, 20}));
}

TEST_F(Staged, CallsInFlightDoNotShareMemory) {
  StagedDoor door(device, transport);
  Placed a = sent({1, 2}), b = sent({3, 4}), x = sent({0, 0}), y = sent({0, 0});
  const Ticket first = door.start(call(), a.view(), x.view(), device.stream());
  const Ticket second = door.start(call(), b.view(), y.view(), device.stream());
  door.wait(second, device.stream());
  door.wait(first, device.stream());
  EXPECT_EQ(get(x.view()), (std::vector<double>{10, 20}));
  EXPECT_EQ(get(y.view()), (std::vector<double>{30, 40}));
}

// The second call takes the pinned memory of the first, whose copy back is still on its stream: on
// another stream nothing but the event orders the two.
TEST_F(Staged, PinnedMemoryIsReusedOnlyBehindItsLastCopy) {
  Stream other = nullptr;
  ASSERT_EQ(double_api().create_stream(&other), 0);
  Placed a = sent({1, 2}), b = sent({3, 4}), x = sent({0, 0}), y = sent({0, 0});
  device.synchronise(device.stream());
  const auto run = [&](const DeviceContext& d) {
    StagedDoor door(d, transport);
    door.wait(door.start(call(), a.view(), x.view(), d.stream()), d.stream());
    door.wait(door.start(call(), b.view(), y.view(), other), other);
    double_api().synchronise(other);
    double_api().synchronise(d.stream());
  };
  run(device);
  EXPECT_EQ(get(x.view()), (std::vector<double>{10, 20}));
  EXPECT_EQ(get(y.view()), (std::vector<double>{30, 40}));

  DeviceApi hasty = double_api();  // and the double sees it where the event is not waited for
  hasty.await = [](Event) { return 0; };
  run(DeviceContext(hasty, 0));
  EXPECT_NE(get(x.view()), (std::vector<double>{10, 20}));
  double_api().destroy_stream(other);
}

TEST_F(Staged, WhatTheTransportLeavesUnwrittenReachesTheDeviceAsPoison) {
  StagedDoor door(device, transport);
  transport.writes = false;
  Placed in = sent({1, 2}), out = sent({0, 0});
  door.wait(door.start(call(), in.view(), out.view(), device.stream()), device.stream());
  fetch(out, device);
  EXPECT_EQ(out.host().unwritten().count, 2);
}

TEST_F(Staged, AGroupOfOneIsACopyOnTheDeviceAndNoCall) {
  StagedDoor staged(device, transport);
  RankState state;
  LedgerDoor ledger(state, staged);
  Group one;
  one.members = {0};
  one.label = "tp";
  Communicator alone(one, ledger, device.stream());
  Placed in = sent({1, 2}), out = sent({0, 0});
  alone.all_reduce(in.view(), out.view());
  EXPECT_EQ(get(out.view()), (std::vector<double>{1, 2}));
  Placed shifted = sent({0, 0});
  alone.wait(alone.shift(in.view(), shifted.view(), 1));
  EXPECT_EQ(get(shifted.view()), (std::vector<double>{1, 2}));
  EXPECT_EQ(transport.last, 0u);
  EXPECT_TRUE(ledger.take().empty());
}

TEST_F(Staged, HostViewsPassThroughBehindTheStream) {
  StagedDoor door(device, transport);
  Placed in(Buffer(DType::f64, {2}), nullptr), out(Buffer(DType::f64, {2}), nullptr);
  const std::vector<double> values{4, 5};
  Placed before = sent({6});
  double copied = 0;
  device.copy_out(reinterpret_cast<std::byte*>(&copied), before.view().data, 8, device.stream());
  fill_from(in.view(), values);
  const Ticket t = door.start(call(), in.view(), out.view(), device.stream());
  EXPECT_EQ(copied, 6) << "what lay before the call on the stream";
  EXPECT_EQ(transport.spaces, (std::vector{Space::host, Space::host}));
  door.wait(t, device.stream());
  EXPECT_EQ(to_doubles(out.view()), (std::vector<double>{40, 50}));
}

// ---- The program, with the double as its module

// What is registered for devices is what a module offers, neither more nor less.
TEST(Registry, DeviceSubjectsAreTheKernelsOfTheModule) {
  std::set<std::string> registered, offered, in_tf32, offered_in_tf32;
  const Registry registry = all_families();
  for (const Subject& s : registry.subjects())
    if (is_device_subject(s.name))
      (s.name == device_subject ? registered : in_tf32).insert(s.contract);
  std::set<std::string> controls, broken;
  for (const Control& c : registry.controls())
    if (on_device(c, registry)) controls.insert(c.contract + " " + c.name);
  for (const DeviceKernel& k : double_module().kernels)
    *k.control ? broken.insert(std::string(k.contract) + " " + k.control)
    : k.subject == std::string(device_subject) ? offered.insert(k.contract)
                                               : offered_in_tf32.insert(k.contract);
  EXPECT_EQ(registered, offered);
  EXPECT_EQ(in_tf32, offered_in_tf32);
  EXPECT_EQ(controls, broken);
  EXPECT_TRUE(broken.contains("mapping_copy event_wait_missing"));
  EXPECT_TRUE(offered.contains("mapping_all_reduce"));
}

TEST(Program, EveryKernelOfTheModuleIsJudgedOnTheDevice) {
  const Ran ran = program("gate --tier smoke --device cuda --require staged.np2,staged.np4", fast);
  EXPECT_EQ(ran.exit, 0) << ran.text;
  EXPECT_TRUE(ran.says("staged 2 4 proven")) << ran.text;
  EXPECT_TRUE(ran.says(", 0 skipped")) << ran.text;
}

// The same cases where nothing is there before somebody waits for it: what `stream` makes late by
// turns is late always. Broken twins are caught above, whatever streams are like.
TEST(Program, EveryKernelOfTheModuleIsRightOnSlowStreams) {
  ::setenv("SHARDPROOF_MODULES", double_folder().c_str(), 1);
  Options healthy;
  healthy.tier = "smoke";
  healthy.devices = {"cuda"};
  healthy.checks = {"forward", "gradient", "adjoint", "gradcheck", "replica",
                    "ledger",  "memory",   "repeat",  "accumulate"};
  healthy.controls = healthy.self = false;
  healthy.jobs = 2;
  Progress silent;
  const Report report = run_gate(healthy, all_families(), silent);
  ::unsetenv("SHARDPROOF_MODULES");
  EXPECT_TRUE(report.complete);
  EXPECT_GT(report.cases.size(), 100u);
  for (const CaseResult& c : report.cases)
    for (const CheckResult& k : c.checks)
      EXPECT_EQ(k.verdict, Verdict::passed) << c.line << ": " << k.check << " " << k.note;
}

TEST(Program, OneDimsUnevenBlocksHalfTypesAndGroupsOfOneRank) {
  for (const char* line :
       {"mapping_all_to_all tp=3 tokens=11 hidden=13 split=uneven dim=1",
        "mapping_all_gather tp=2 dim=1 dtype=bf16",
        "mapping_reduce_scatter tp=2 cp=2 axis=cp dim=1 strides=transposed",
        "mapping_scaled_reduce tp=3 scale=1/3 dtype=f16 fill=normal",
        "mapping_all_reduce tp=2 axis=cp", "mapping_all_reduce tp=2 transport=threads"}) {
    const Ran ran = program(fmt::format("run {} device=cuda", line));
    EXPECT_EQ(ran.exit, 0) << line << "\n" << ran.text;
    EXPECT_TRUE(ran.says("PASSED")) << ran.text;
  }
}

TEST(Program, StagedOverMpi) {
  if (!fs::exists(here() / "shardproof_mpi.so")) GTEST_SKIP() << "built without MPI";
  const Ran ran = program("run mapping_gather tp=2 device=cuda transport=mpi");
  EXPECT_EQ(ran.exit, 0) << ran.text;
}

TEST(Program, FaultsOfCallsAndPayloadsAreSeenOnTheDevice) {
  for (const char* fault : {"scale_p@forward.tp.1", "skip@forward.tp.1"}) {
    const Ran ran = program(fmt::format("run mapping_all_reduce tp=2 device=cuda fault={}", fault));
    EXPECT_EQ(ran.exit, 1) << ran.text;
    EXPECT_TRUE(ran.says("forward")) << ran.text;
  }
}

// Broken kernels of a device, each by its check alone while the ledger is as it should be. On
// streams as fast as a device's may be what only an order of events makes wrong is right in every
// run but that in which the stream that ought to be waited for is late.
TEST(Program, DeviceTwinsAreCaughtByTheirChecks) {
  struct Twin {
    const char *contract, *control, *words, *check, *said, *silent;
  };
  constexpr const char* others = "forward,gradient,memory,repeat";
  for (const Twin& t :
       {Twin{"mapping_copy", "event_wait_missing", "", "stream", "with the side stream 1 late",
             others},
        Twin{"mapping_copy", "input_wait_missing", "", "stream", "with the rank's stream late",
             others},
        Twin{"mapping_copy", "refilled_before_read", "", "stream", "got 0", others},
        Twin{"mapping_copy", "tail_unwritten", "tokens=5 hidden=7", "memory",
             "3 elements never written", "ledger"},
        Twin{"mapping_copy", "dense_read", "strides=transposed", "forward", "forward", "ledger"},
        Twin{"mapping_copy", "offset_in_32_bits", "", "forward", "forward", "ledger"},
        Twin{"linear_column", "tf32_undeclared", "dtype=f32 fill=normal", "forward", "forward",
             "memory"},
        Twin{"linear_row", "tf32_undeclared", "dtype=f32 fill=normal", "gradient", "gradient",
             "memory"},
        Twin{"norm_sequence", "barrier_missing", "hidden=320", "forward", "forward", "memory"}}) {
    const auto run = [&](const char* control, const char* checks) {
      return program(fmt::format("run {} tp=2 device=cuda {} {} --check {}", t.contract, t.words,
                                 control, checks),
                     fast);
    };
    const std::string control = std::string("control=") + t.control;
    const Ran ran = run(control.c_str(), t.check), silent = run(control.c_str(), t.silent);
    EXPECT_EQ(ran.exit, 1) << t.control << "\n" << ran.text;
    EXPECT_TRUE(ran.says(t.said)) << t.control << "\n" << ran.text;
    EXPECT_EQ(silent.exit, 0) << t.control << "\n" << silent.text;
    EXPECT_EQ(run("", t.check).exit, 0) << t.control << ": the healthy kernel";
  }
  // Slow streams show the missing events in every run.
  for (const auto& [name, check, said] :
       {std::tuple("event_wait_missing", "memory", "never written"),
        std::tuple("refilled_before_read", "forward", "got 0")}) {
    const Ran ran = program(
        fmt::format("run mapping_copy tp=2 device=cuda control={} --check {}", name, check));
    EXPECT_EQ(ran.exit, 1) << ran.text;
    EXPECT_TRUE(ran.says(said)) << ran.text;
  }
  const Ran dense = program("run mapping_copy tp=2 device=cuda control=dense_read", fast);
  EXPECT_EQ(dense.exit, 0) << "nothing is strided there\n" << dense.text;
}

// They are caught where EveryKernelOfTheModuleIsJudgedOnTheDevice runs this very gate.
TEST(Program, ControlsOfDevicesAreDueInAGate) {
  const Ran listed = program("gate --tier smoke --device cuda --dry-run", fast);
  for (const char* name : {"event_wait_missing", "input_wait_missing", "refilled_before_read",
                           "tail_unwritten", "dense_read", "offset_in_32_bits", "barrier_missing"})
    EXPECT_TRUE(listed.says(fmt::format("control={}", name))) << name << "\n" << listed.text;
  EXPECT_FALSE(program("gate mapping_copy norm_sequence --tier smoke --ranks 2 --dry-run")
                   .says("device=cuda"));
}

// The same products, declared: within the bound of their factors' 11 bits, exact on integers of
// these.
TEST(Program, ProductsInTf32AreJudgedAsDeclared) {
  for (const char* contract : {"linear_column", "linear_row"})
    for (const char* words : {"fill=normal", "fill=cancelling", "fill=integers",
                              "fill=normal tokens=96 in=320 out=64"}) {
      const Ran ran = program(
          fmt::format("run {} tp=2 dtype=f32 device=cuda subject=cuda_tf32 {}", contract, words),
          fast);
      EXPECT_EQ(ran.exit, 0) << contract << " " << words << "\n" << ran.text;
    }
  EXPECT_EQ(program("run linear_row tp=2 dtype=f32 subject=cuda_tf32").exit, 2) << "on the host";
  EXPECT_EQ(program("run linear_row tp=2 dtype=bf16 device=cuda subject=cuda_tf32").exit, 2);
}

TEST(Program, WorkOnTwoStreamsWithItsWaitsIsHealthy) {
  const std::string healthy = std::string(fast) + " SHARDPROOF_DOUBLE_KERNEL=two_streams";
  for (const std::string& streams :
       {healthy, std::string("SHARDPROOF_DOUBLE_KERNEL=two_streams")}) {
    const Ran ran = program("run mapping_copy tp=2 device=cuda", streams);
    EXPECT_EQ(ran.exit, 0) << ran.text;
    EXPECT_TRUE(ran.says("stream")) << ran.text;
  }
}

// Everything that ours and the transports put on streams is ordered, on fast streams and on slow
// ones.
TEST(Program, OursStandsTheStreamCheckOnEveryTransport) {
  for (const char* line :
       {"attention_ring cp=3", "linear_row tp=2 sp=on", "linear_row tp=2 transport=nccl"})
    for (const char* streams : {fast, ""}) {
      const Ran ran = program(fmt::format("run {} device=cuda --check stream", line),
                              std::string("SHARDPROOF_DOUBLE_DEVICES=2 ") + streams);
      EXPECT_EQ(ran.exit, 0) << line << " " << streams << "\n" << ran.text;
    }
}

// A transport that reads before the caller's stream has written is seen by the stream that is late.
TEST(Program, AKernelOnAStreamOfItsOwnIsSeenWhenTheRanksIsLate) {
  const Ran ran = program("run mapping_copy tp=2 device=cuda --check stream",
                          std::string(fast) + " SHARDPROOF_DOUBLE_KERNEL=null_stream");
  EXPECT_EQ(ran.exit, 1) << ran.text;
  EXPECT_TRUE(ran.says("with the rank's stream late")) << ran.text;
}

TEST(Program, AKernelThatTouchesDeviceMemoryOnTheHostCrashes) {
  const Ran ran =
      program("run mapping_copy tp=2 device=cuda", "SHARDPROOF_DOUBLE_KERNEL=host_access");
  EXPECT_EQ(ran.exit, 1) << ran.text;
  EXPECT_TRUE(ran.says("SIGSEGV")) << ran.text;
}

TEST(Program, AKernelOnAnotherStreamLeavesItsResultUnwritten) {
  const Ran ran =
      program("run mapping_copy tp=2 device=cuda", "SHARDPROOF_DOUBLE_KERNEL=null_stream");
  EXPECT_EQ(ran.exit, 1) << ran.text;
  EXPECT_TRUE(ran.says("never written")) << ran.text;
}

TEST(Program, AKernelThatWritesPastTheEndIsSeenInTheGuardZone) {
  const Ran ran = program("run mapping_copy tp=2 device=cuda --check memory",
                          "SHARDPROOF_DOUBLE_KERNEL=past_the_end");
  EXPECT_EQ(ran.exit, 1) << ran.text;
  EXPECT_TRUE(ran.says("guard zone after")) << ran.text;
}

TEST(Program, ACodeThatOutlivesItsCallEndsTheRankAndTheNextCaseIsSound) {
  const Ran ran = program("gate mapping_copy mapping_scatter tp=2 --tier smoke --device cuda",
                          std::string(fast) + " SHARDPROOF_DOUBLE_KERNEL=sticky_code");
  EXPECT_EQ(ran.exit, 1) << ran.text;
  EXPECT_TRUE(ran.says("700")) << ran.text;
  EXPECT_TRUE(ran.says("CRASHED    mapping_copy")) << ran.text;
  EXPECT_FALSE(ran.says("CRASHED    mapping_scatter")) << ran.text;
  EXPECT_FALSE(ran.says("FAILED     mapping")) << ran.text;
}

TEST(Program, OneBadKernelAmongTwentyCasesIsOneCrash) {
  const fs::path folder =
      fs::temp_directory_path() / fmt::format("shardproof-sticky-{}", ::getpid());
  fs::create_directories(folder);
  const Ran ran =
      program(fmt::format("gate mapping_copy mapping_scatter mapping_slice --ranks 2 --device cuda "
                          "--check forward,memory --jobs 1 --report {}",
                          folder.string()),
              fmt::format("SHARDPROOF_DOUBLE_KERNEL=sticky_once:{}", (folder / "once").string()));
  EXPECT_EQ(ran.exit, 1) << ran.text;
  const size_t first = ran.text.find("CRASHED    ");
  ASSERT_NE(first, std::string::npos) << ran.text;
  EXPECT_EQ(ran.text.find("CRASHED    ", first + 1), std::string::npos) << ran.text;
  const Ran report = shell("cat " + (folder / "report.json").string());
  const auto number = [&](const char* name) {
    const size_t at = report.text.find(fmt::format("\"{}\":", name));
    return at == std::string::npos ? -1
                                   : std::atoi(report.text.c_str() + at + std::strlen(name) + 3);
  };
  EXPECT_GE(number("cases"), 21);
  EXPECT_EQ(number("crashed"), 2) << "the two checks of one case";
  EXPECT_EQ(number("failed"), 0);
  fs::remove_all(folder);
}

TEST(Program, ADeviceWithoutMemoryIsNoFailureOfTheSubjectAndReleasesTheOthers) {
  const Ran all = program("run mapping_copy tp=2 device=cuda", "SHARDPROOF_DOUBLE_FULL=0");
  EXPECT_EQ(all.exit, 3) << all.text;
  EXPECT_TRUE(all.says("met a device without")) << all.text;
  EXPECT_FALSE(all.says("FAILED")) << all.text;
  for (const char* place : {"", "transport=nccl"}) {
    const Ran one = program(fmt::format("run mapping_all_reduce tp=3 device=cuda {}", place),
                            "SHARDPROOF_DOUBLE_DEVICES=3 SHARDPROOF_DOUBLE_FULL=1");
    EXPECT_EQ(one.exit, 3) << one.text;
    EXPECT_TRUE(one.says("memory for rank 1 of this machine, met a device without")) << one.text;
    EXPECT_FALSE(one.says("FAILED")) << one.text;
  }
}

// 2 GiB are less than the 4 GiB of offset_in_32_bits: it is not proven there, and says so;
// everything else is.
TEST(Program, AControlForWhichTheDeviceIsTooSmallIsNotProvenWithAReason) {
  const char* small = "SHARDPROOF_DOUBLE_STREAMS=fast SHARDPROOF_DOUBLE_LEFT=2147483648";
  const Ran ran = program("gate mapping_copy --device cuda --tier smoke --ranks 2,4", small);
  EXPECT_EQ(ran.exit, 0) << ran.text;
  EXPECT_TRUE(ran.says(", 1 NOT PROVEN")) << ran.text;
  EXPECT_TRUE(
      ran.says("control offset_in_32_bits NOT PROVEN (expected 4096 MiB of memory on the "
               "device and a quarter more, met 2048 MiB left"))
      << ran.text;
  const Ran alone = program("run mapping_copy tp=2 device=cuda control=offset_in_32_bits", small);
  EXPECT_EQ(alone.exit, 3) << alone.text;
  EXPECT_TRUE(alone.says("met 2048 MiB left")) << alone.text;
}

TEST(Program, AKernelForWhichThereIsNoMemoryIsNoFailureOfTheSubject) {
  const Ran ran = program("run attention_ring cp=2 device=cuda", "SHARDPROOF_DOUBLE_LEFT=64");
  EXPECT_EQ(ran.exit, 3) << ran.text;
  EXPECT_TRUE(ran.says("expected memory for an allocation, met a device without")) << ran.text;
  EXPECT_FALSE(ran.says("FAILED")) << ran.text;
}

// A shell that Slurm gave says that it is rank 0 of its machine; the ranks that are forked there
// are not.
TEST(Program, ForkedRanksTakeDevicesByTheirOwnNumber) {
  for (const char* place : {"", "transport=nccl"}) {
    const Ran ran = program(fmt::format("run mapping_all_reduce tp=2 device=cuda {}", place),
                            "SLURM_LOCALID=0 LOCAL_RANK=0 SHARDPROOF_DOUBLE_DEVICES=2 "
                            "SHARDPROOF_DOUBLE_FULL=1");
    EXPECT_EQ(ran.exit, 3) << ran.text;
    EXPECT_TRUE(ran.says("memory for rank 1 of this machine, met a device without")) << ran.text;
  }
}

TEST(Program, OperatorsActOnDeviceBuffers) {
  for (const char* place : {"staged", "nccl"}) {
    const Ran ran =
        program(fmt::format("gate mapping_all_reduce --transport {} --ranks 2,3", place),
                "SHARDPROOF_DOUBLE_DEVICES=3");
    EXPECT_EQ(ran.exit, 0) << ran.text;
    EXPECT_TRUE(ran.says(" caught")) << ran.text;
  }
}

TEST(Program, TheReportNamesTheModule) {
  const fs::path folder =
      fs::temp_directory_path() / fmt::format("shardproof-device-{}", ::getpid());
  const Ran ran = program("run mapping_copy tp=2 device=cuda --report " + folder.string());
  EXPECT_EQ(ran.exit, 0) << ran.text;
  const Ran report = shell("cat " + (folder / "report.json").string());
  EXPECT_TRUE(report.says("a double of a device")) << report.text.substr(0, 600);
  EXPECT_TRUE(report.says("\"device.driver\":\"none\"")) << report.text.substr(0, 600);
  EXPECT_TRUE(report.says("\"device\":\"cuda0\"")) << report.text.substr(0, 600);
  fs::remove_all(folder);
}

TEST(Program, WithoutDriverOrDeviceTheLaneIsSkippedAndNotProven) {
  for (const auto& [code, reason] :
       {std::pair("35", "no driver, 35"), std::pair("100", "no device, 100")}) {
    const std::string environment = fmt::format("SHARDPROOF_DOUBLE_CODE={}", code);
    const Ran ran = program("run mapping_reduce tp=2 device=cuda", environment);
    EXPECT_EQ(ran.exit, 3) << ran.text;
    EXPECT_TRUE(ran.says("SKIPPED")) << ran.text;
    EXPECT_TRUE(ran.says(reason)) << ran.text;
    EXPECT_TRUE(
        program("list staged", environment).says(std::string("cannot run here: ") + reason));
  }
  const Ran required = program(
      "gate mapping_reduce --tier smoke --transport processes --device host,cuda --require "
      "staged.np2",
      "SHARDPROOF_DOUBLE_CODE=35");
  EXPECT_EQ(required.exit, 3) << required.text;
  EXPECT_TRUE(required.says("required lane staged.np2 is not proven")) << required.text;
}

TEST(Program, EveryOtherCodeIsAFailureAndNoSkip) {
  for (const char* code : {"1", "36", "101", "802", "999"}) {
    const Ran ran = program("run mapping_reduce tp=2 device=cuda",
                            fmt::format("SHARDPROOF_DOUBLE_CODE={}", code));
    EXPECT_EQ(ran.exit, 3) << ran.text;
    EXPECT_FALSE(ran.says("SKIPPED")) << ran.text;
    EXPECT_TRUE(ran.says(fmt::format("met {}: code {} of the double", code, code))) << ran.text;
  }
}

TEST(Program, ARunOnTheHostAsksForNoDevice) {
  EXPECT_TRUE(program("list staged", "SHARDPROOF_DOUBLE_CODE=999").says("met 999"));
  EXPECT_FALSE(program("list mapping_copy", "SHARDPROOF_DOUBLE_CODE=999").says("999"));
  const Ran ran = program("run mapping_reduce tp=2", "SHARDPROOF_DOUBLE_CODE=999");
  EXPECT_EQ(ran.exit, 0) << ran.text;
}

TEST(Program, BrokenTwinsRunWhereTheyWereMade) {
  for (const char* line : {"linear_row tp=2 device=cuda control=row_bias_gradient_times_p",
                           "mapping_copy tp=2 control=event_wait_missing"}) {
    const Ran ran = program(fmt::format("run {}", line));
    EXPECT_EQ(ran.exit, 2) << ran.text;
    EXPECT_TRUE(ran.says("where the broken twin runs")) << ran.text;
  }
  EXPECT_EQ(program("run mapping_reduce tp=2 subject=cuda").exit, 2);
}

// ---- What the bench measures of a device

TEST(Bench, EveryRowOfADeviceIsMeasured) {
  ::setenv("SHARDPROOF_MODULES", double_folder().c_str(), 1);
  std::vector<std::string> names;
  device_rows(all_families(), 512, [&](const Row& r) {
    names.push_back(r.name);
    EXPECT_TRUE(std::isfinite(r.value) && r.value > 0) << r.name << " " << r.value;
    EXPECT_NE(r.unit, "") << r.name;
    EXPECT_NE(r.against, "") << r.name;
  });
  ::unsetenv("SHARDPROOF_MODULES");
  EXPECT_EQ(names, (std::vector<std::string>{
                       "device_read_bandwidth", "device_digest_words", "device_digest_two_lanes",
                       "device_digest_whole", "device_digest_elements", "device_linear_f32",
                       "device_linear_bf16", "device_attention_f32", "device_attention_bf16"}));
}

// ---- The module that holds CUDA

struct CudaModule : testing::Test {
  void SetUp() override {
    if (!fs::exists(file)) GTEST_SKIP() << "built without CUDA";
  }
  const fs::path file = here() / device_module_name;
};

TEST_F(CudaModule, CublasAndNcclAreLinkedThereAndOnlyThere) {
  const Ran module = shell("readelf -d " + file.string());
  const Ran whole = shell("readelf -d " + (here() / "shardproof").string());
  for (const char* library : {"libcudart.so", "libcublas.so", "libnccl.so"}) {
    EXPECT_TRUE(module.says(library)) << module.text;
    EXPECT_FALSE(whole.says(library)) << whole.text;
  }
  EXPECT_TRUE(whole.says("libc.so")) << whole.text;
}

// In a child: this process must stay without CUDA.
struct Answers {
  int interface = 0, kernels = 0, count_code = 0;
  int nccl_code = -1, nccl_version = 0, small_id_code = 0, id_code = -1;
  int communicator_code = -1;
  char small_id_text[128] = {}, description[128] = {}, nccl_words[256] = {};
  char address[128] = {}, launch[128] = {}, blas[128] = {};  // texts of codes
};
// Of one rank alone, asked until it is ready or has failed.
int code_of_a_communicator(const NcclApi& nccl, const void* id) {
  NcclComm comm = nullptr;
  int code = nccl.create(&comm, 1, id, 0);
  for (int looks = 0; code == nccl_in_progress && looks < 30'000; ++looks) {
    ::usleep(1000);
    if (nccl.async_error(comm, &code) != nccl_success) break;
  }
  if (comm) nccl.abort(comm);
  return code;
}
Answers ask(const fs::path& file) {
  int ends[2];
  if (::pipe(ends) != 0) throw std::runtime_error("pipe");
  const pid_t child = ::fork();
  if (child == 0) {
    Answers a;
    const DeviceModule& m = *open_module(file);
    a.interface = int(m.interface);
    a.kernels = int(m.kernels.size());
    int devices = 0;
    a.count_code = m.api.count(&devices);
    a.nccl_code = m.nccl.version(&a.nccl_version);
    std::array<char, 128> id{};
    a.small_id_code = m.nccl.unique_id(id.data(), 1);
    std::snprintf(a.small_id_text, sizeof a.small_id_text, "%s", m.nccl.text(a.small_id_code));
    a.id_code = m.nccl.unique_id(id.data(), id.size());
    a.communicator_code = code_of_a_communicator(m.nccl, id.data());
    std::snprintf(a.nccl_words, sizeof a.nccl_words, "%s", m.nccl.last_error());
    std::snprintf(a.address, sizeof a.address, "%s", m.api.text(700));
    std::snprintf(a.launch, sizeof a.launch, "%s", m.api.text(13));
    std::snprintf(a.blas, sizeof a.blas, "%s", m.api.text(10'013));
    std::snprintf(a.description, sizeof a.description, "%s", m.description);
    ::_exit(::write(ends[1], &a, sizeof a) == ssize_t(sizeof a) ? 0 : 1);
  }
  ::close(ends[1]);
  Answers a;
  EXPECT_EQ(::read(ends[0], &a, sizeof a), ssize_t(sizeof a));
  ::close(ends[0]);
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  return a;
}

TEST_F(CudaModule, AnswersWithoutADevice) {
  const Answers a = ask(file);
  EXPECT_EQ(a.interface, int(DeviceModule::current));
  EXPECT_EQ(a.kernels, int(double_module().kernels.size()));
  // cudaSuccess, cudaErrorInsufficientDriver or cudaErrorNoDevice: what a machine may be like.
  EXPECT_TRUE(a.count_code == 0 || a.count_code == 35 || a.count_code == 100) << a.count_code;
  EXPECT_EQ(a.nccl_code, 0);
  EXPECT_GE(a.nccl_version, 20000) << "NCCL 2";
  EXPECT_EQ(a.small_id_code, 4) << "ncclInvalidArgument";
  EXPECT_TRUE(std::string(a.small_id_text).starts_with("invalid argument")) << a.small_id_text;
  EXPECT_TRUE(a.id_code >= 0 && a.id_code <= 7) << a.id_code << ": a ncclResult_t";
  if (a.count_code == 0) {
    EXPECT_EQ(a.communicator_code, nccl_success) << a.nccl_words;
  } else {
    EXPECT_TRUE(a.communicator_code >= 1 && a.communicator_code <= 6)
        << a.communicator_code << ": an error of a ncclResult_t, without a device";
    EXPECT_NE(std::string(a.nccl_words), "");
  }
  EXPECT_NE(std::string(a.description).find("cuBLAS"), std::string::npos) << a.description;
  EXPECT_EQ(std::string(a.address), "an illegal memory access was encountered");
  EXPECT_NE(std::string(a.blas), "") << "CUBLAS_STATUS_EXECUTION_FAILED";
  EXPECT_NE(std::string(a.blas), std::string(a.launch));
}

}  // namespace
}  // namespace shardproof
