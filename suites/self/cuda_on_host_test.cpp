// The device's kernels as they stand, run on the host (cuda_on_host/): what their threads do at
// once is done in turns, under several schedules.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

#include "fixtures/dtype.hpp"
#include "suites/self/cuda_on_host/block.hpp"
#include "suites/self/cuda_on_host/planted.hpp"

namespace shardproof {
namespace {

using cuda_on_host::complaint, cuda_on_host::Order, cuda_on_host::Schedule,
    cuda_on_host::set_schedule;
namespace planted = cuda_on_host::planted;

constexpr int launch_failure = 719, invalid_configuration = 9, invalid_value = 1;

std::vector<Schedule> schedules() {
  std::vector<Schedule> all{{Order::ascending, 0}, {Order::descending, 0}};
  for (uint64_t seed = 1; seed <= 3; ++seed)
    all.push_back({Order::shuffled, seed}), all.push_back({Order::torn, seed});
  return all;
}

// ---- The blocks themselves

TEST(Blocks, ABarrierPutsWritesBeforeReadsUnderEverySchedule) {
  for (unsigned threads : {1u, 32u, 100u, 1024u})
    for (const Schedule& s : schedules()) {
      set_schedule(s);
      std::vector<float> from(threads), to(threads);
      std::iota(from.begin(), from.end(), 0.0f);
      ASSERT_EQ(planted::mirror(from.data(), to.data(), threads, true), 0) << complaint();
      for (unsigned i = 0; i < threads; ++i) ASSERT_EQ(to[i], float(threads - 1 - i));
    }
}

TEST(Blocks, AMissingBarrierReadsWhatNobodyHasWritten) {
  for (const Schedule& s : schedules()) {
    set_schedule(s);
    std::vector<float> from(64, 1), to(64);
    ASSERT_EQ(planted::mirror(from.data(), to.data(), 64, false), 0);
    EXPECT_TRUE(std::any_of(to.begin(), to.end(), [](float x) { return std::isnan(x); }));
  }
}

TEST(Blocks, ABarrierThatNotAllReachStopsTheKernelAndIsTold) {
  for (const Schedule& s : schedules()) {
    set_schedule(s);
    EXPECT_EQ(planted::divergent_barrier(64, 7), launch_failure);
    EXPECT_NE(complaint().find("63 at __syncthreads, 1 at the end, in block "), std::string::npos)
        << complaint();
    EXPECT_EQ(planted::last_code(), launch_failure);
    // One barrier that 63 threads meet at their first and one at its only one, and then one of 63.
    EXPECT_EQ(planted::early_end(64, 7), launch_failure);
    std::vector<float> one{0};
    EXPECT_EQ(planted::mirror(one.data(), one.data(), 1, true), 0) << "the next one is sound";
    EXPECT_EQ(complaint(), "");
  }
}

TEST(Blocks, SharedMemoryBeginsAsNaN) {
  double f64 = 0;
  float f32 = 0;
  uint16_t half = 0;
  int64_t integer = 0;
  ASSERT_EQ(planted::read_before_write(&f64, &f32, &half, &integer), 0);
  EXPECT_TRUE(std::isnan(f64));
  EXPECT_TRUE(std::isnan(f32));
  EXPECT_TRUE(std::isnan(load(reinterpret_cast<const std::byte*>(&half), DType::bf16)));
  EXPECT_TRUE(std::isnan(load(reinterpret_cast<const std::byte*>(&half), DType::f16)));
  EXPECT_GT(integer, int64_t(1) << 40) << "no index";
}

// CUDA's programming guide: beyond its group of `width` a lane has its own value; the source of
// __shfl_sync is taken modulo the width.
TEST(Blocks, LanesSeeEachOthersValues) {
  for (int width : {32, 16})
    for (const Schedule& s : schedules()) {
      set_schedule(s);
      std::vector<int> met(128);
      ASSERT_EQ(planted::shuffles(met.data(), width), 0) << complaint();
      for (int lane = 0; lane < 32; ++lane) {
        const int first = lane / width * width, at = lane % width;
        EXPECT_EQ(met[size_t(lane)], 100 + first + 5);
        EXPECT_EQ(met[size_t(32 + lane)], 100 + (at + 3 < width ? lane + 3 : lane));
        EXPECT_EQ(met[size_t(64 + lane)], 100 + (at >= 3 ? lane - 3 : lane));
        EXPECT_EQ(met[size_t(96 + lane)], 100 + (lane ^ 9));
      }
    }
}

TEST(Blocks, AWarpsOperationWantsTheLanesOfItsMask) {
  EXPECT_EQ(planted::shuffle_outside_of_mask(), launch_failure);
  EXPECT_NE(complaint().find("outside of its mask"), std::string::npos) << complaint();
  EXPECT_EQ(planted::shuffle_without_all_lanes(), launch_failure);
  EXPECT_NE(complaint().find("16 in an operation of their warp, 16 at the end"), std::string::npos)
      << complaint();
}

TEST(Blocks, AtomicsLoseNothingAndATornTurnShowsWhatElseDoes) {
  for (const Schedule& s : schedules()) {
    set_schedule(s);
    unsigned long long sum = 0;
    ASSERT_EQ(planted::count(3, 100, &sum, true), 0);
    EXPECT_EQ(sum, 300);
  }
  set_schedule({Order::torn, 1});
  unsigned long long sum = 0;
  ASSERT_EQ(planted::count(1, 100, &sum, false), 0);
  EXPECT_LT(sum, 100);
}

// Small integers: exact in half and in float, in any order.
TEST(Blocks, AWarpMatrixIsTheProduct) {
  for (bool bf16 : {true, false})
    for (const Schedule& s : schedules()) {
      set_schedule(s);
      alignas(32) uint16_t a[16 * 16 + 1], b[16 * 16];
      alignas(32) float c[16 * 16];
      const DType half = bf16 ? DType::bf16 : DType::f16;
      const auto left = [](int i, int k) { return double((i * 5 + k * 3) % 11 - 5); };
      const auto right = [](int k, int j) { return double((k * 7 + j) % 9 - 4); };
      for (int i = 0; i < 256; ++i) {
        store(reinterpret_cast<std::byte*>(a + i), half, left(i / 16, i % 16));
        store(reinterpret_cast<std::byte*>(b + i), half, right(i % 16, i / 16));
      }
      ASSERT_EQ(planted::warp_matrix(a, b, c, bf16, true), 0) << complaint();
      for (int i = 0; i < 256; ++i) {
        double sum = 0;
        for (int k = 0; k < 16; ++k) sum += left(i / 16, k) * right(k, i % 16);
        ASSERT_EQ(c[i], sum) << i;
      }
      EXPECT_EQ(planted::warp_matrix(a, b, c, bf16, false), launch_failure);
      EXPECT_NE(complaint().find("aligned"), std::string::npos) << complaint();
    }
}

// CUDA's programming guide, compute capabilities: 2^31 - 1, 65535 and 65535 blocks; 1024 threads,
// 64 of them along z; 48 KiB of shared memory where nobody asks for more.
TEST(Blocks, GridsThatTheRuntimeRefusesAreRefused) {
  EXPECT_EQ(planted::grid_of(1, 1, 1, 1024, 1, 48 << 10), 0);
  EXPECT_EQ(planted::grid_of(0, 1, 1, 32, 1, 0), invalid_configuration);
  EXPECT_EQ(planted::last_code(), invalid_configuration);
  EXPECT_EQ(planted::last_code(), 0);
  EXPECT_EQ(planted::grid_of(1, 65536, 1, 32, 1, 0), invalid_configuration);
  EXPECT_EQ(planted::grid_of(1u << 31, 1, 1, 32, 1, 0), invalid_configuration);
  EXPECT_EQ(planted::grid_of(1, 1, 1, 0, 1, 0), invalid_configuration);
  EXPECT_EQ(planted::grid_of(1, 1, 1, 1025, 1, 0), invalid_configuration);
  EXPECT_EQ(planted::grid_of(1, 1, 1, 1, 65, 0), invalid_configuration);
  EXPECT_EQ(planted::grid_of(1, 1, 1, 32, 1, (48 << 10) + 1), invalid_value);
}

}  // namespace
}  // namespace shardproof
