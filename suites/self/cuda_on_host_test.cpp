// The device's kernels as they stand, run on the host (cuda_on_host/): what their threads do at
// once is done in turns, under several schedules.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <vector>

#include "fixtures/dtype.hpp"
#include "oracle/cuda/digest.hpp"
#include "oracle/cuda/divide.hpp"
#include "oracle/cuda/spin.hpp"
#include "suites/self/cuda_on_host/block.hpp"
#include "suites/self/cuda_on_host/planted.hpp"
#include "suites/self/tensor_core_sum.hpp"

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

// PTX ISA, ldmatrix: lane l has of each matrix the elements 2 (l % 4) and 2 (l % 4) + 1 of row
// l / 4, the first in the lower half; with .trans of column l / 4. Lanes 8 m to 8 m + 7 name the
// rows of matrix m, at multiples of 16 bytes.
TEST(Warps, LoadMatricesAsThePtxIsaLaysThemOut) {
  constexpr unsigned apart = 24;
  alignas(16) uint16_t rows[32 * apart + 1];
  for (unsigned i = 0; i < std::size(rows); ++i) rows[i] = uint16_t(1000 + i);
  for (bool turned : {false, true})
    for (const Schedule& s : schedules()) {
      set_schedule(s);
      uint32_t loaded[32 * 4] = {};
      ASSERT_EQ(planted::load_matrices(rows, apart, loaded, turned), 0) << complaint();
      for (unsigned lane = 0; lane < 32; ++lane)
        for (unsigned m = 0; m < 4; ++m)
          for (unsigned e = 0; e < 2; ++e) {
            const unsigned line = lane / 4, along = 2 * (lane % 4) + e;
            const unsigned row = turned ? along : line, column = turned ? line : along;
            EXPECT_EQ(loaded[4 * lane + m] >> 16 * e & 0xFFFF, rows[(8 * m + row) * apart + column])
                << lane << ' ' << m << ' ' << e;
          }
    }
  uint32_t unused[32 * 4];
  EXPECT_EQ(planted::load_matrices(rows + 1, apart, unused, false), launch_failure);
  EXPECT_NE(complaint().find("no multiple of 16"), std::string::npos) << complaint();
}

// PTX ISA, fragments of mma.m16n8k16 for .f16 and .bf16: element i of a lane's fragment.
struct Place {
  int row, column;
};
Place of_a(int lane, int i) {
  const bool upper = i < 2 || (i >= 4 && i < 6);
  return {lane / 4 + (upper ? 0 : 8), lane % 4 * 2 + (i & 1) + (i < 4 ? 0 : 8)};
}
Place of_b(int lane, int i) { return {lane % 4 * 2 + (i & 1) + (i < 2 ? 0 : 8), lane / 4}; }
Place of_d(int lane, int i) { return {lane / 4 + (i < 2 ? 0 : 8), lane % 4 * 2 + (i & 1)}; }

// Small integers: exact in halves and in float, in any order.
TEST(Warps, MultiplyFragmentsAsThePtxIsaLaysThemOut) {
  const auto left = [](Place p) { return (p.row * 5 + p.column * 3) % 11 - 5; };
  const auto right = [](Place p) { return (p.row * 7 + p.column) % 9 - 4; };
  const auto before = [](Place p) { return p.row * 8 + p.column; };
  for (bool bf16 : {true, false})
    for (const Schedule& s : schedules()) {
      set_schedule(s);
      uint16_t a[32 * 8], b[32 * 4];
      uint32_t a_pairs[32 * 4], b_pairs[32 * 2];
      float d[32 * 4];
      for (int i = 0; i < 32 * 8; ++i)
        a[i] = planted::rounded(float(left(of_a(i / 8, i % 8))), bf16);
      for (int i = 0; i < 32 * 4; ++i) {
        b[i] = planted::rounded(float(right(of_b(i / 4, i % 4))), bf16);
        d[i] = float(before(of_d(i / 4, i % 4)));
      }
      static_assert(sizeof a == sizeof a_pairs && sizeof b == sizeof b_pairs);
      std::memcpy(a_pairs, a, sizeof a), std::memcpy(b_pairs, b, sizeof b);
      ASSERT_EQ(planted::multiply_matrices(a_pairs, b_pairs, d, bf16), 0) << complaint();
      for (int i = 0; i < 32 * 4; ++i) {
        const Place p = of_d(i / 4, i % 4);
        int sum = before(p);
        for (int k = 0; k < 16; ++k) sum += left({p.row, k}) * right({k, p.column});
        EXPECT_EQ(d[i], float(sum)) << p.row << ' ' << p.column;
      }
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

// ---- What is watched: the first two accesses that no barrier orders, whichever came first

struct Watched : testing::Test {
  void SetUp() override {
    if (!cuda_on_host::can_watch()) GTEST_SKIP() << "a sanitizer has the calls that this needs";
  }
  void TearDown() override { set_schedule({}); }
};
std::vector<Schedule> watched_schedules() {
  std::vector<Schedule> all = schedules();
  for (Schedule& s : all) s.watched = true;
  return all;
}
bool told(const char* what) { return complaint().find(what) != std::string::npos; }

TEST_F(Watched, AReadOfWhatWasWrittenBehindTheLastBarrier) {
  for (const Schedule& s : watched_schedules()) {
    set_schedule(s);
    std::vector<float> from(64, 1), to(64);
    EXPECT_EQ(planted::mirror(from.data(), to.data(), 64, true), 0) << complaint();
    EXPECT_EQ(planted::mirror(from.data(), to.data(), 64, false), launch_failure);
    EXPECT_TRUE(told(" at shared memory + ")) << complaint();
    EXPECT_TRUE(told("has written without a barrier between") ||
                told("has read without a barrier between"))
        << complaint();
  }
}

TEST_F(Watched, AWriteOverWhatOthersMayStillRead) {
  for (const Schedule& s : watched_schedules()) {
    set_schedule(s);
    std::vector<float> sum(64);
    EXPECT_EQ(planted::rounds(sum.data(), 64, true), 0) << complaint();
    EXPECT_EQ(sum, std::vector<float>(64, 3));
    EXPECT_EQ(planted::rounds(sum.data(), 64, false), launch_failure);
  }
}

// In ascending order all have read by then: by one other thread, and by many of whom the last
// writes.
TEST_F(Watched, AWriteBehindReadsThatHaveBeen) {
  set_schedule({Order::ascending, 0, true});
  std::vector<float> to(64);
  for (unsigned readers : {1u, 64u}) {
    EXPECT_EQ(planted::read_and_changed(to.data(), readers, 63, true), 0) << complaint();
    EXPECT_EQ(planted::read_and_changed(to.data(), readers, 63, false), launch_failure);
    EXPECT_TRUE(told("thread 63 writes") && told("has read without a barrier")) << complaint();
  }
}

TEST_F(Watched, AWarpsBarrierOrdersWhatItsLanesWriteAndAShuffleDoesNot) {
  for (const Schedule& s : watched_schedules()) {
    set_schedule(s);
    std::vector<int> to(32);
    EXPECT_EQ(planted::by_warp(to.data(), true), 0) << complaint();
    for (int lane = 0; lane < 32; ++lane) EXPECT_EQ(to[size_t(lane)], lane ^ 1);
    EXPECT_EQ(planted::by_warp(to.data(), false), launch_failure);
  }
}

TEST_F(Watched, BlocksThatWriteToOnePlace) {
  set_schedule({Order::ascending, 0, true});
  int to = 0;
  EXPECT_EQ(planted::last_block_wins(&to, 1), 0) << complaint();
  EXPECT_EQ(planted::last_block_wins(&to, 2), launch_failure);
  EXPECT_TRUE(told("thread 0 writes at 0x") && told("of block 0 has written")) << complaint();
}

TEST_F(Watched, AnAddressThatIsNoMultipleOfTheSize) {
  const std::vector<float> two{1, 2};
  float to = 0;
  EXPECT_EQ(planted::read_at(reinterpret_cast<const char*>(two.data()) + 4, &to), 0);
  EXPECT_EQ(to, 2);
  EXPECT_EQ(planted::read_at(reinterpret_cast<const char*>(two.data()) + 2, &to), launch_failure);
  EXPECT_TRUE(told("no multiple of its size")) << complaint();
}

// ---- The judge's own kernels

// Numbers, and of the floating types NaNs, infinities and zeros of both signs.
std::vector<std::byte> elements_of(DType dtype, int64_t count) {
  std::vector<std::byte> bytes(size_t(count) * size_of(dtype));
  for (int64_t i = 0; i < count; ++i) {
    const double odd[] = {NAN, INFINITY, -INFINITY, -0.0, 0.0};
    const bool takes = is_float(dtype) && i % 7 == 3;
    store(bytes.data() + size_t(i) * size_of(dtype), dtype,
          takes ? odd[i / 7 % 5] : double(i * 31 % 97 - 48));
  }
  return bytes;
}

void digest_is_that_of_the_header(const shardproof_hash& hash, int64_t count, uint64_t first) {
  const std::vector<std::byte> bytes = elements_of(DType(int(hash.dtype)), count);
  shardproof_digest due{}, met{};
  const bool of_units =
      shardproof_digest_run(&due, &hash, bytes.data(), uint64_t(count), first) == 0;
  for (DigestParts parts : {DigestParts::all, DigestParts::one_lane, DigestParts::two_lanes}) {
    const bool legal = of_units && (parts == DigestParts::all || hash.mode == SHARDPROOF_RAW);
    met = {};
    ASSERT_EQ(digest_on_device(bytes.data(), uint64_t(count), hash, first, parts, &met, nullptr),
              legal ? 0 : invalid_value)
        << complaint();
    if (!legal) continue;
    EXPECT_EQ(met.lane[0], due.lane[0]);
    EXPECT_EQ(met.lane[1], parts == DigestParts::one_lane ? 0 : due.lane[1]);
    if (parts != DigestParts::all) continue;
    EXPECT_EQ(std::memcmp(&met, &due, sizeof due), 0);
  }
}

TEST(Digest, IsThatOfTheHeaderInEveryTypeModeAndUnit) {
  for (const Schedule& s : watched_schedules()) {
    set_schedule(s);
    for (int dtype = 0; dtype < 6; ++dtype)
      for (shardproof_mode mode : {SHARDPROOF_RAW, SHARDPROOF_CANON})
        for (shardproof_unit unit : {SHARDPROOF_ELEMENT, SHARDPROOF_WORD})
          for (auto [count, first] : {std::pair(0, 0), {1, 5}, {256, 4}, {1004, 1000}}) {
            shardproof_hash hash = shardproof_hash_named("x", shardproof_dtype(dtype), mode);
            hash.unit = unit;
            digest_is_that_of_the_header(hash, count, uint64_t(first));
          }
  }
}

// More units than the 132 x 16 blocks have threads.
TEST(Digest, StridesOverWhatIsMoreThanItsThreads) {
  if (!cuda_on_host::can_watch()) GTEST_SKIP() << "takes minutes under a sanitizer";
  set_schedule({Order::ascending, 0});
  digest_is_that_of_the_header(shardproof_hash_plain(SHARDPROOF_BF16, SHARDPROOF_RAW),
                               132 * 16 * 256 + 1000, 0);
}

TEST(Digest, AddsToWhatIsThere) {
  const uint64_t word = 7;
  const shardproof_hash hash = shardproof_hash_plain(SHARDPROOF_I64, SHARDPROOF_RAW);
  shardproof_digest due{}, met{};
  for (uint64_t first : {0, 1}) {
    shardproof_digest_run(&due, &hash, &word, 1, first);
    ASSERT_EQ(digest_on_device(&word, 1, hash, first, DigestParts::all, &met, nullptr), 0);
  }
  EXPECT_EQ(std::memcmp(&met, &due, sizeof due), 0);
}

// The halves that CUDA converts are converted by the host's own text here: it has to be right for
// what follows. Every half, and floats beside and upon the middle of two.
TEST(Halves, AreConvertedAsTheirTypesAre) {
  std::vector<float> values{0.0f, -0.0f, 1e-30f, 1e38f, INFINITY, -INFINITY};
  for (uint32_t bits = 0; bits < 0x10000; ++bits)
    for (DType half : {DType::bf16, DType::f16}) {
      const auto coded = uint16_t(bits);
      const double due = load(reinterpret_cast<const std::byte*>(&coded), half);
      const double met = planted::widened(coded, half == DType::bf16);
      ASSERT_TRUE(std::isnan(due) ? std::isnan(met) : met == due) << bits;
      for (double near : {1.0, 1 + 0x1p-8, 1 + 0x1p-11, 1 + 0x1p-11 + 0x1p-20})
        values.push_back(float(due * near));
    }
  for (float value : values)
    for (DType half : {DType::bf16, DType::f16}) {
      if (std::isnan(value)) continue;
      uint16_t due = 0;
      store(reinterpret_cast<std::byte*>(&due), half, value);
      ASSERT_EQ(planted::rounded(value, half == DType::bf16), due) << value;
    }
}

// x / p in its type, in float for halves, rounded once; integers towards 0.
template <class Quotient>
void divides(DType dtype, int64_t count, int ranks, Quotient quotient) {
  std::vector<std::byte> x(size_t(count) * size_of(dtype)), due = x;
  for (int64_t i = 0; i < count; ++i) {
    const double value = double(i * 31 % 97 - 48);
    store(x.data() + size_t(i) * size_of(dtype), dtype, value);
    store(due.data() + size_t(i) * size_of(dtype), dtype, double(quotient(value)));
  }
  ASSERT_EQ(divide(x.data(), count, int(dtype), ranks, nullptr), 0) << complaint();
  EXPECT_EQ(x, due) << name(dtype) << " " << count;
}

TEST(Divide, IsRoundedOnce) {
  for (const Schedule& s : watched_schedules()) {
    set_schedule(s);
    for (int64_t count : {0, 1, 255, 257, 1000})
      for (int ranks : {2, 3, 7}) {
        divides(DType::f64, count, ranks, [ranks](double x) { return x / ranks; });
        for (DType dtype : {DType::f32, DType::bf16, DType::f16})
          divides(dtype, count, ranks, [ranks](double x) { return float(x) / float(ranks); });
        for (DType dtype : {DType::i64, DType::i32})
          divides(dtype, count, ranks, [ranks](double x) { return int64_t(x) / ranks; });
      }
  }
  EXPECT_EQ(divide(nullptr, 5, 6, 2, nullptr), invalid_value) << "no type";
}

// 2^16 blocks of 256 threads, and some elements more.
TEST(Divide, StridesOverWhatIsMoreThanItsThreads) {
  if (!cuda_on_host::can_watch()) GTEST_SKIP() << "takes minutes under a sanitizer";
  set_schedule({Order::ascending, 0});
  divides(DType::bf16, (int64_t(1) << 24) + 300, 3, [](double x) { return float(x) / 3.0f; });
}

// On the host a cycle is a nanosecond, of a clock that only the kernel's looks at it move.
TEST(Spin, TakesTheTimeThatIsAskedForAndLittleMore) {
  for (int64_t nanoseconds : {0, 1, 500'000}) {
    ASSERT_EQ(spin(nanoseconds, nullptr), 0) << complaint();
    EXPECT_GE(cuda_on_host::elapsed(), nanoseconds);
    EXPECT_LE(cuda_on_host::elapsed(), nanoseconds + 3000);
  }
}

// Ulps of 1 are 2^-23. To nearest, the first two would be 1 + 2^-22, and the third as much.
TEST(TensorCoreSum, CutsOffAndNeverRounds) {
  const auto sum = [](float begin, int n, double term) {
    return tensor_core_step(begin, n, [&](int) { return term; });
  };
  EXPECT_EQ(sum(1, 1, 0x1.8p-23), 1 + 0x1p-23f);
  EXPECT_EQ(sum(-1, 1, -0x1.8p-23), -1 - 0x1p-23f);
  EXPECT_EQ(sum(1, tensor_core_terms, 0x1p-25), 1.0f) << "each below the last bit that is kept";
  EXPECT_EQ(sum(0, tensor_core_terms, 0x1p-25), 0x1p-22f);
  EXPECT_EQ(sum(float(1 << 23), 8, -7), float((1 << 23) - 56)) << "integers are exact";
  EXPECT_EQ(sum(INFINITY, 2, 1), INFINITY);
  EXPECT_TRUE(std::isnan(sum(INFINITY, 1, -INFINITY)));
}

// Others have nine tenths of the device. The kernel that reads the clock alone has had a tenth of
// the time that was asked for.
TEST(Spin, DoesNotCountTheTurnsOfOthers) {
  constexpr int64_t asked = 500'000;
  cuda_on_host::set_turns_of_others(100, 900'000);
  const auto own = [] { return cuda_on_host::elapsed() - cuda_on_host::turns_of_others(); };
  ASSERT_EQ(spin(asked, nullptr), 0) << complaint();
  EXPECT_GE(own(), asked - asked / 50);
  EXPECT_LE(own(), asked + 3000);
  ASSERT_EQ(planted::count_cycles_by_the_clock(asked), 0) << complaint();
  EXPECT_LE(own(), asked / 4);
  cuda_on_host::set_turns_of_others(0, 0);
}

TEST(Spin, IsNoShorterWhereADeviceNamesNoClockRate) {
  for (int kilohertz : {0, 2'000'000}) {
    cuda_on_host::set_clock_rate(kilohertz);
    ASSERT_EQ(spin(500'000, nullptr), 0) << complaint();
    EXPECT_GE(cuda_on_host::elapsed(), 1'000'000);
  }
  cuda_on_host::set_clock_rate(1'000'000);
}

TEST(WordSum, IsThatOfALoopAndGivesItsScratchBack) {
  std::vector<uint64_t> words(1000);
  uint64_t due = 0, met = 0;
  for (size_t i = 0; i < words.size(); ++i) due += words[i] = i * 0x9E3779B97F4A7C15u;
  ASSERT_EQ(sum_of_words(words.data(), words.size(), &met, nullptr), 0);
  EXPECT_EQ(met, due);
  EXPECT_EQ(cuda_on_host::allocated(), 0);
}

TEST(WordSum, WithoutMemoryIsTheRuntimesCodeAndLeavesNoneBehind) {
  constexpr int out_of_memory = 2;
  uint64_t word = 7, met = 5;
  cuda_on_host::set_allocations_left(0);
  EXPECT_EQ(sum_of_words(&word, 1, &met, nullptr), out_of_memory);
  cuda_on_host::set_allocations_left(1);
  EXPECT_EQ(met, 5u);
  EXPECT_EQ(planted::last_code(), 0);
  EXPECT_EQ(sum_of_words(&word, 1, &met, nullptr), 0);
  EXPECT_EQ(met, 7u);
}

}  // namespace
}  // namespace shardproof
