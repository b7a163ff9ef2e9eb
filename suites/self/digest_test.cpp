// Fingerprints: known answers, one digest for every layout of a tensor, what each mode and unit
// sees, coverage, and where two tensors part.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "fixtures/context_maps.hpp"
#include "fixtures/index_maps.hpp"
#include "fixtures/random.hpp"
#include "fixtures/sharding.hpp"
#include "oracle/digest/digest.hpp"

namespace shardproof::digest {
namespace {

constexpr uint64_t lane0 = 0x243F6A8885A308D3, lane1 = 0x13198A2E03707344;

const Hash plain_f32 = shardproof_hash_plain(SHARDPROOF_F32, SHARDPROOF_RAW);

std::vector<float> numbers(size_t n, uint64_t seed = 1) {
  const Stream123 stream(seed, "x");
  std::vector<float> x(n);
  for (size_t i = 0; i < n; ++i) x[i] = float(stream.normal(i));
  return x;
}

Digest whole(const std::vector<float>& x, const Hash& hash = plain_f32) {
  Digest d{};
  EXPECT_EQ(shardproof_digest_run(&d, &hash, x.data(), x.size(), 0), 0);
  return d;
}

// Digests by rank of the shards of x.
std::vector<Digest> of_shards(const std::vector<float>& x, std::vector<int64_t> shape,
                              const Layout& layout, const Mesh& mesh) {
  std::vector<Digest> digests;
  for (int r = 0; r < mesh.world(); ++r) {
    const auto indices = whole_indices(shape, layout, mesh, r);
    std::vector<float> local;
    for (int64_t i : indices) local.push_back(x[size_t(i)]);
    digests.push_back(
        digest_of(plain_f32, reinterpret_cast<const std::byte*>(local.data()), indices));
  }
  return digests;
}

// ---- Known answers: computed with numpy and independently in C++ when the digest was defined

TEST(DigestKnownAnswers, MixOfBothLanes) {
  EXPECT_EQ(shardproof_mix(lane0, 0, 0), 0xac80634c29b38230u);
  EXPECT_EQ(shardproof_mix(lane0, 0, 0x3f800000), 0x7fd1d2cd786329ffu);
  EXPECT_EQ(shardproof_mix(lane0, 1, 0x3f800000), 0xeba2dcc4b109c7e4u);
  EXPECT_EQ(shardproof_mix(lane0, 12345678901, 0x40490fdb), 0x90928cb294b4b05au);
  EXPECT_EQ(shardproof_mix(lane1, 0, 0), 0x5ae17cd2fa1716b3u);
  EXPECT_EQ(shardproof_mix(lane1, 0, 0x3f800000), 0x1d77208aba9903efu);
  EXPECT_EQ(shardproof_mix(lane1, 1, 0x3f800000), 0x3e115e6006ee0f0fu);
  EXPECT_EQ(shardproof_mix(lane1, 12345678901, 0x40490fdb), 0x6a820b171c695235u);
}

TEST(DigestKnownAnswers, OneToEight) {
  const Digest d = whole({1, 2, 3, 4, 5, 6, 7, 8});
  EXPECT_EQ(d.lane[0], 0x46e8205e5fb7091au);
  EXPECT_EQ(d.lane[1], 0x4117cd1b0334b68eu);
  EXPECT_EQ(text(d), "46e8205e5fb7091a4117cd1b0334b68e");
  EXPECT_EQ(d.elements, 8u);
}

// ---- Layouts

TEST(DigestLayouts, EveryShardingOfATensorHasTheDigestOfTheWhole) {
  const auto x = numbers(24 * 7);
  const Digest due = whole(x);
  for (int p : {1, 2, 3, 4, 8})
    for (const Layout& layout :
         {Layout{{Axis::tp, S(0)}}, Layout{{Axis::tp, S(1)}},
          Layout{{Axis::tp, S(1, uneven_map())}}, Layout{{Axis::tp, S(0, uneven_map())}}}) {
      const auto digests = of_shards(x, {24, 7}, layout, Mesh({{Axis::tp, p}}));
      EXPECT_TRUE(same(sum(digests), due)) << p << " " << shardproof::text(layout);
    }
  const auto zigzag =
      of_shards(x, {24, 7}, {{Axis::cp, S(0, zigzag_map())}}, Mesh({{Axis::cp, 4}}));
  EXPECT_TRUE(same(sum(zigzag), due));
}

TEST(DigestLayouts, FusedGateAndUpAgreeBetweenTwoAndFourRanks) {
  const auto x = numbers(2 * 16 * 5);
  const Layout fused{{Axis::tp, S(0, interleaved_map(2))}};
  const auto two = of_shards(x, {32, 5}, fused, Mesh({{Axis::tp, 2}})),
             four = of_shards(x, {32, 5}, fused, Mesh({{Axis::tp, 4}}));
  EXPECT_TRUE(same(sum(two), sum(four)));
  EXPECT_TRUE(same(sum(two), whole(x)));
  EXPECT_FALSE(same(two[0], two[1]));
}

TEST(DigestLayouts, BlocksOfTheCHeaderAreTheSameShards) {
  // [gate; up] of 2 x 8 rows and 5 columns on 4 ranks: two blocks a rank.
  const auto x = numbers(16 * 5);
  Digest total{};
  for (int64_t r = 0; r < 4; ++r)
    for (int64_t part : {0, 8}) {
      const int64_t shape[] = {16, 5}, start[] = {part + 2 * r, 0}, extent[] = {2, 5};
      ASSERT_EQ(shardproof_digest_block(&total, &plain_f32, &x[size_t(start[0] * 5)], 2, shape,
                                        start, extent),
                0);
    }
  EXPECT_TRUE(same(total, whole(x)));
  // Columns 1..2 of rows 3..4 of a [2,3,4] tensor, and the rest of it.
  const auto y = numbers(24);
  Digest inner{}, by_element{};
  const int64_t shape[] = {2, 3, 4}, start[] = {0, 1, 1}, extent[] = {2, 2, 2};
  std::vector<float> local;
  for (int64_t i : {5, 6, 9, 10, 17, 18, 21, 22}) {
    local.push_back(y[size_t(i)]);
    shardproof_digest_element(&by_element, &plain_f32, &y[size_t(i)], uint64_t(i));
  }
  ASSERT_EQ(shardproof_digest_block(&inner, &plain_f32, local.data(), 3, shape, start, extent), 0);
  EXPECT_TRUE(same(inner, by_element));
}

TEST(DigestLayouts, ABlockBeyondTheTensorIsRefused) {
  Digest d{};
  const float x[4] = {};
  const int64_t shape[] = {4, 4}, start[] = {3, 0}, extent[] = {2, 2};
  EXPECT_EQ(shardproof_digest_block(&d, &plain_f32, x, 2, shape, start, extent), -1);
  EXPECT_EQ(d.elements, 0u);
}

TEST(DigestLayouts, AScalarIsOneElement) {
  Digest d{}, e{};
  const float x[] = {3, 4};
  ASSERT_EQ(shardproof_digest_block(&d, &plain_f32, x, 0, nullptr, nullptr, nullptr), 0);
  shardproof_digest_element(&e, &plain_f32, x, 0);
  EXPECT_TRUE(same(d, e));
}

// ---- What it sees

TEST(DigestSees, OneBitAtEveryPlaceASwapASignAndARotation) {
  const auto x = numbers(64);
  const Digest due = whole(x);
  for (size_t i = 0; i < x.size(); ++i)
    for (int bit = 0; bit < 32; ++bit) {
      auto y = x;
      uint32_t b;
      std::memcpy(&b, &y[i], 4);
      b ^= 1u << bit;
      std::memcpy(&y[i], &b, 4);
      EXPECT_FALSE(same(whole(y), due));
    }
  auto swapped = x;
  std::swap(swapped[3], swapped[4]);
  EXPECT_FALSE(same(whole(swapped), due));
  auto signs = x;
  signs[1] = -signs[1], signs[2] = -signs[2];
  EXPECT_FALSE(same(whole(signs), due));
  auto turned = x;
  std::rotate(turned.begin(), turned.begin() + 1, turned.end());
  EXPECT_FALSE(same(whole(turned), due));
}

TEST(DigestSees, EqualContentsUnderOtherNamesDiffer) {
  const auto x = numbers(8);
  EXPECT_FALSE(same(whole(x, hash_of("gamma", DType::f32)), whole(x, hash_of("beta", DType::f32))));
  EXPECT_TRUE(same(whole(x, hash_of("gamma", DType::f32)), whole(x, hash_of("gamma", DType::f32))));
}

TEST(DigestModes, CanonForgetsTheSignOfZeroAndWhichNaN) {
  uint32_t other_nan = 0xffc12345;
  float odd;
  std::memcpy(&odd, &other_nan, 4);
  const std::vector<float> a{1, 0.0f, std::numeric_limits<float>::quiet_NaN(), INFINITY},
      b{1, -0.0f, odd, INFINITY};
  EXPECT_FALSE(same(whole(a), whole(b)));
  const Hash canon = shardproof_hash_plain(SHARDPROOF_F32, SHARDPROOF_CANON);
  EXPECT_TRUE(same(whole(a, canon), whole(b, canon)));
  const Digest counts = whole(b);
  EXPECT_EQ(counts.nans, 1u);
  EXPECT_EQ(counts.infinities, 1u);
  EXPECT_EQ(counts.negative_zeros, 1u);
  EXPECT_EQ(whole(a).negative_zeros, 0u);
}

// Bit patterns of NaN, -inf and -0 (IEEE 754; bfloat16 is the upper half of binary32).
TEST(DigestModes, CountsInEveryFloatingType) {
  const uint64_t f64[] = {0x7ff8000000000001, 0xfff0000000000000, 0x8000000000000000, 0};
  const uint32_t f32[] = {0x7fc00001, 0xff800000, 0x80000000, 0};
  const uint16_t half[] = {0x7e01, 0xfc00, 0x8000, 0}, brain[] = {0x7fc1, 0xff80, 0x8000, 0};
  auto counts = [](shardproof_dtype type, const void* data) {
    Digest d{};
    const Hash h = shardproof_hash_plain(type, SHARDPROOF_RAW);
    shardproof_digest_run(&d, &h, data, 4, 0);
    return std::vector<uint64_t>{d.nans, d.infinities, d.negative_zeros};
  };
  const std::vector<uint64_t> one_each{1, 1, 1}, none{0, 0, 0};
  EXPECT_EQ(counts(SHARDPROOF_F64, f64), one_each);
  EXPECT_EQ(counts(SHARDPROOF_F32, f32), one_each);
  EXPECT_EQ(counts(SHARDPROOF_F16, half), one_each);
  EXPECT_EQ(counts(SHARDPROOF_BF16, brain), one_each);
  EXPECT_EQ(counts(SHARDPROOF_I64, f64), none);
}

TEST(DigestUnits, WordsAreReadLittleEndAndShardsOfWordsAddUp) {
  Hash words = shardproof_hash_plain(SHARDPROOF_F32, SHARDPROOF_RAW);
  words.unit = SHARDPROOF_WORD;
  const std::vector<float> x{1, 2, 3, 4};  // 3f800000 40000000, 40400000 40800000
  Digest due{};
  shardproof_digest_unit(&due, &words, 0, 0x400000003f800000);
  shardproof_digest_unit(&due, &words, 1, 0x4080000040400000);
  EXPECT_TRUE(same(whole(x, words), due));
  Digest parts{};
  ASSERT_EQ(shardproof_digest_run(&parts, &words, &x[2], 2, 2), 0);
  ASSERT_EQ(shardproof_digest_run(&parts, &words, &x[0], 2, 0), 0);
  EXPECT_TRUE(same(parts, due));
  EXPECT_EQ(parts.elements, 4u);
  EXPECT_EQ(shardproof_digest_run(&parts, &words, &x[1], 2, 1), -1);  // begins within a word
  EXPECT_EQ(shardproof_digest_run(&parts, &words, &x[0], 3, 0), -1);
  EXPECT_TRUE(same(parts, due));
}

// ---- Coverage

TEST(DigestCoverage, SeesALostAndADoubledIndexWhateverTheValues) {
  const auto x = numbers(32);
  const auto indices = [&](int rank) {
    return whole_indices(std::vector<int64_t>{32}, {{Axis::cp, S(0, zigzag_map())}},
                         Mesh({{Axis::cp, 2}}), rank);
  };
  auto both = [&](std::vector<int64_t> second) {
    const std::vector<float> zeros(32);
    const auto* bytes = reinterpret_cast<const std::byte*>(zeros.data());
    const Digest d[] = {digest_of(plain_f32, bytes, indices(0)),
                        digest_of(plain_f32, bytes, second)};
    return sum(d);
  };
  EXPECT_TRUE(covers(both(indices(1)), plain_f32, 32));
  auto lost = indices(1);
  lost.pop_back();
  EXPECT_FALSE(covers(both(lost), plain_f32, 32));
  auto doubled = indices(1);
  doubled.back() = doubled.front();
  EXPECT_FALSE(covers(both(doubled), plain_f32, 32));
  EXPECT_TRUE(covers(whole(x), plain_f32, 32));
}

// ---- Replicas

// Expert parameters are copies over expert-data-parallel ranks: ep=2 x dp=2, ranks {0,2} and {1,3}.
// A checker over the dense group (all four) would flag the healthy state, one over groups of one
// would miss a corrupted copy.
TEST(DigestReplicas, ExpertsAreComparedOverTheirOwnGroup) {
  const Mesh mesh({{Axis::ep, 2}, {Axis::dp, 2}});
  const auto x = numbers(2 * 6);
  const Layout experts{{Axis::dp, I()}, {Axis::ep, S(0)}};
  auto digests = of_shards(x, {2, 6}, experts, mesh);
  EXPECT_TRUE(parted(mesh, experts, digests).empty());
  const Layout dense{{Axis::dp, I()}, {Axis::ep, I()}}, alone{{Axis::ep, S(0)}};
  EXPECT_FALSE(parted(mesh, dense, digests).empty());

  digests[3].lane[0] ^= 1;
  EXPECT_EQ(parted(mesh, experts, digests), (std::vector<int>{3}));
  EXPECT_TRUE(parted(mesh, alone, digests).empty());
}

TEST(DigestReplicas, TheMinorityIsNamedAndShardsAddUpBesideIt) {
  const Mesh mesh({{Axis::tp, 2}, {Axis::dp, 3}});
  const auto x = numbers(20);
  const Layout layout{{Axis::dp, I()}, {Axis::tp, S(0)}};
  auto digests = of_shards(x, {20}, layout, mesh);
  for (int r = 0; r < 6; ++r) EXPECT_TRUE(same(whole_of(mesh, layout, digests, r), whole(x)));
  digests[4].lane[1] += 1;
  EXPECT_EQ(parted(mesh, layout, digests), (std::vector<int>{4}));
  EXPECT_FALSE(same(whole_of(mesh, layout, digests, 5), whole(x)));  // its dp place holds rank 4
  EXPECT_TRUE(same(whole_of(mesh, layout, digests, 3), whole(x)));
}

// ---- Where

struct Compared {
  std::vector<float> a, b;
  RangeDigest range(const std::vector<float>& x) const {
    return [&x](int64_t begin, int64_t end) {
      Digest d{};
      shardproof_digest_run(&d, &plain_f32, &x[size_t(begin)], uint64_t(end - begin),
                            uint64_t(begin));
      return d;
    };
  }
  Located locate(int k) const { return first_difference(int64_t(a.size()), k, range(a), range(b)); }
};

TEST(DigestWhere, TheSmallestOfFiveFaultsInCeilLogKRounds) {
  Compared c{numbers(65536), numbers(65536)};
  for (size_t i : {60000, 41234, 5000, 4999, 65535}) c.b[i] += 1;
  for (const auto& [k, rounds] : {std::pair{2, 16}, {16, 4}, {256, 2}}) {
    const Located found = c.locate(k);
    EXPECT_EQ(found.index, 4999);
    EXPECT_EQ(found.rounds, rounds);
  }
}

TEST(DigestWhere, EveryIndexOfAnOddLengthAndEqualTensors) {
  for (size_t at = 0; at < 37; ++at) {
    Compared c{numbers(37), numbers(37)};
    c.b[at] = 0;
    EXPECT_EQ(c.locate(3).index, int64_t(at));
  }
  EXPECT_EQ((Compared{numbers(37), numbers(37)}.locate(4).index), -1);
}

}  // namespace
}  // namespace shardproof::digest
