// Fingerprints: known answers, one digest for every layout of a tensor, what each mode and unit
// sees, coverage, and where two tensors part.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <tuple>

#include "fixtures/context_maps.hpp"
#include "fixtures/index_maps.hpp"
#include "fixtures/random.hpp"
#include "fixtures/sharding.hpp"
#include "oracle/comm/ledger.hpp"
#include "oracle/comm/world.hpp"
#include "oracle/digest/bytes_hash.hpp"
#include "oracle/digest/digest.hpp"
#include "oracle/digest/units.hpp"

namespace shardproof::digest {
namespace {
namespace digest_test {

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

// Run by run as index by index, whatever dtype and unit the tensor has.
TEST(DigestCoverage, OfARangeIsTheSumOverItsIndices) {
  for (const DType type : {DType::bf16, DType::f32, DType::f64})
    for (const uint64_t units : {0, 1, 5, 4096, 4097, 10000}) {
      const Hash hash = hash_of("w", type, SHARDPROOF_CANON);
      Digest due{};
      for (uint64_t i = 0; i < units; ++i) shardproof_digest_unit(&due, &hash, i, 7 * i);
      const Digest got = coverage_of(hash, units);
      EXPECT_EQ(got.coverage[0], due.coverage[0]) << units;
      EXPECT_EQ(got.coverage[1], due.coverage[1]) << units;
    }
}

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

TEST(DigestCoverage, NamesTheTensorAndTheRange) {
  const Mesh mesh({{Axis::tp, 4}});
  EXPECT_EQ(cover_fault("w", std::vector<int64_t>{8, 5}, {{Axis::tp, S(0)}}, mesh), "");
  EXPECT_EQ(cover_fault("w", std::vector<int64_t>{8, 5}, {{Axis::tp, I()}}, mesh), "");
  EXPECT_EQ(cover_fault("w", std::vector<int64_t>{8, 5}, {{Axis::tp, P()}}, mesh), "");
  auto of = [](std::vector<int64_t> a, std::vector<int64_t> b) {
    const Holder holders[] = {{"rank 0", std::move(a)}, {"rank 1", std::move(b)}};
    return cover_fault("w1", 8, holders);
  };
  EXPECT_EQ(of({0, 1, 6, 7}, {2, 3, 4, 5}), "");
  EXPECT_EQ(of({0, 1, 2}, {6, 7}), "w1: 3 to 5 are on no rank");
  EXPECT_EQ(of({0, 1, 2, 3}, {3, 4, 5, 6, 7}), "w1: 3 is on rank 0 and on rank 1");
  EXPECT_EQ(of({0, 1, 2, 3, 3}, {4, 5, 6, 7}), "w1: 3 is on rank 0 twice");
  EXPECT_EQ(of({0, 1, 2, 3}, {4, 5, 6, 8}), "w1: index 8 of rank 1 is none of 0 to 7");
}
TEST(DigestCoverage, OfRangesThatAreNotWrittenOut) {
  constexpr int64_t n = int64_t(1) << 40;
  auto of = [](std::vector<HeldRange> ranges) { return cover_fault("w1", n, ranges); };
  EXPECT_EQ(of({{"rank 0", 0, 5}, {"rank 2", 9, n}, {"rank 1", 5, 9}, {"rank 3", 7, 7}}), "");
  EXPECT_EQ(of({{"rank 0", 0, 5}, {"rank 1", 8, n}}), "w1: 5 to 7 are on no rank");
  EXPECT_EQ(of({{"rank 0", 0, 5}, {"rank 1", 4, n}}), "w1: 4 is on rank 0 and on rank 1");
  EXPECT_EQ(of({{"rank 0", 0, 5}, {"rank 1", 5, n - 1}}),
            "w1: " + std::to_string(n - 1) + " is on no rank");
  EXPECT_EQ(of({{"rank 0", 2, n}}), "w1: 0 to 1 are on no rank");
  EXPECT_EQ(of({}), "w1: 0 to " + std::to_string(n - 1) + " are on no rank");
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

TEST(DigestReplicas, RanksWithoutACopyAreNotAsked) {
  const Mesh mesh({{Axis::pp, 3}});
  const Layout ends{{Axis::pp, I(ends_map())}};
  auto digests = of_shards(numbers(6), {6}, ends, mesh);
  EXPECT_FALSE(same(digests[0], digests[1]));
  EXPECT_TRUE(parted(mesh, ends, digests).empty());
  digests[2].lane[0] ^= 1;
  EXPECT_EQ(parted(mesh, ends, digests), (std::vector<int>{2}));
}

// ---- Forms

#ifdef SHARDPROOF_DIGEST_VECTORS
void expect_form(void (*form)(shardproof_sums*, const shardproof_lens*, const unsigned char*,
                              uint64_t, uint64_t)) {
  for (shardproof_dtype type : {SHARDPROOF_F64, SHARDPROOF_F32, SHARDPROOF_BF16, SHARDPROOF_F16}) {
    Hash h = shardproof_hash_plain(type, SHARDPROOF_RAW);
    h.unit = SHARDPROOF_WORD;
    const shardproof_lens lens = shardproof_lens_of(&h);
    const shardproof_format f = shardproof_format_of(type);
    // Every other word in two is a special value in its lowest element.
    std::vector<uint64_t> words(67);
    for (size_t i = 0; i < words.size(); ++i)
      words[i] = i % 4 == 1   ? f.sign
                 : i % 4 == 3 ? f.exponent | (i & 4)
                              : shardproof_fmix(i) & ~lens.step;
    const auto* bytes = reinterpret_cast<const unsigned char*>(words.data());
    for (uint64_t n : {0, 1, 3, 4, 5, 7, 8, 9, 15, 16, 33, 67})
      for (uint64_t first : {uint64_t(0), uint64_t(5), uint64_t(1) << 40}) {
        shardproof_sums due{}, got{};
        shardproof_units_portable(&due, &lens, bytes, n, first);
        form(&got, &lens, bytes, n, first);
        EXPECT_EQ(std::memcmp(&due, &got, sizeof due), 0) << n << " " << first << " " << type;
      }
  }
}
TEST(DigestForms, Avx2AddsTheSameBits) {
  if (!__builtin_cpu_supports("avx2")) GTEST_SKIP() << "this processor has no AVX2";
  expect_form(shardproof_units_avx2);
}
TEST(DigestForms, Avx512AddsTheSameBits) {
  if (!__builtin_cpu_supports("avx512dq")) GTEST_SKIP() << "this processor has no AVX-512 DQ";
  expect_form(shardproof_units_avx512);
}
#endif

// What the threads of a device add, however many share the units: the same digest, and its lanes
// alone.
void expect_of_threads(const Hash& h, const void* data, uint64_t elements, uint64_t first) {
  Digest due{};
  ASSERT_EQ(shardproof_digest_run(&due, &h, data, elements, first), 0);
  Units units;
  ASSERT_TRUE(Units::of(h, data, elements, first, units));
  for (uint64_t threads : {1, 7, 256}) {
    Digest sum{};
    uint64_t one[1] = {}, two[2] = {};
    for (uint64_t t = 0; t < threads; ++t) {
      units.add(t, threads, sum);
      if (h.mode != SHARDPROOF_RAW) continue;
      units.add_lanes(t, threads, one);
      units.add_lanes(t, threads, two);
    }
    EXPECT_EQ(std::memcmp(&sum, &due, sizeof sum), 0) << shardproof_dtype_name(h.dtype) << h.unit;
    if (h.mode != SHARDPROOF_RAW) continue;
    EXPECT_EQ(one[0], due.lane[0]);
    EXPECT_EQ(two[0], due.lane[0]);
    EXPECT_EQ(two[1], due.lane[1]);
  }
}

TEST(DigestForms, ADeviceRefusesRunsThatAreNotOfWords) {
  Hash h = shardproof_hash_plain(SHARDPROOF_BF16, SHARDPROOF_RAW);
  Units units;
  EXPECT_TRUE(Units::of(h, nullptr, 5, 3, units));
  h.unit = SHARDPROOF_WORD;
  EXPECT_TRUE(Units::of(h, nullptr, 8, 4, units));
  EXPECT_EQ(units.units, 2u);
  EXPECT_EQ(units.first, 1u);
  EXPECT_FALSE(Units::of(h, nullptr, 5, 4, units));
  EXPECT_FALSE(Units::of(h, nullptr, 8, 2, units));
}

// By the definition, element by element, whatever the chunks: 1300 elements are three of them.
TEST(DigestForms, RunsAreSumsOfElementsInEveryTypeAndMode) {
  const double special[] = {0.0, -0.0, INFINITY, -INFINITY, std::nan("")};
  std::vector<double> f64(1300);
  std::vector<float> f32(f64.size());
  std::vector<uint16_t> half(f64.size());
  for (size_t i = 0; i < f64.size(); ++i) {
    f64[i] = i % 7 == 2 ? special[i % 5] : double(i) - 400.5;
    f32[i] = float(f64[i]);
    uint32_t bits;
    std::memcpy(&bits, &f32[i], 4);
    half[i] = uint16_t(bits >> 16);
  }
  const std::tuple<shardproof_dtype, const void*> tensors[] = {
      {SHARDPROOF_F64, f64.data()},  {SHARDPROOF_F32, f32.data()}, {SHARDPROOF_BF16, half.data()},
      {SHARDPROOF_F16, half.data()}, {SHARDPROOF_I64, f64.data()}, {SHARDPROOF_I32, f32.data()}};
  for (const auto& [type, data] : tensors)
    for (shardproof_mode mode : {SHARDPROOF_RAW, SHARDPROOF_CANON}) {
      const Hash h = shardproof_hash_plain(type, mode);
      Digest run{}, elements{};
      ASSERT_EQ(shardproof_digest_run(&run, &h, data, f64.size(), 3), 0);
      for (size_t i = 0; i < f64.size(); ++i)
        shardproof_digest_element(
            &elements, &h, static_cast<const std::byte*>(data) + i * shardproof_size(type), i + 3);
      EXPECT_EQ(std::memcmp(&run, &elements, sizeof run), 0) << shardproof_dtype_name(type);
      Hash words = h;
      words.unit = SHARDPROOF_WORD;
      Digest counts{};
      ASSERT_EQ(shardproof_digest_run(&counts, &words, data, f64.size(), 0), 0);
      EXPECT_EQ(counts.nans, elements.nans);
      EXPECT_EQ(counts.infinities, elements.infinities);
      EXPECT_EQ(counts.negative_zeros, elements.negative_zeros);
      EXPECT_EQ(counts.elements, elements.elements);
      expect_of_threads(h, data, f64.size(), 3);
      expect_of_threads(words, data, f64.size(), 8);
    }
}

// ---- Copies of one layout

TEST(BytesHash, EveryBitAndTheSizeCount) {
  std::vector<std::byte> x(37);
  for (size_t i = 0; i < x.size(); ++i) x[i] = std::byte(i);
  const BytesHash due = hash_of_bytes(x);
  EXPECT_EQ(hash_of_bytes(std::vector<std::byte>(x)), due);
  for (size_t i = 0; i < x.size(); ++i)
    for (int bit = 0; bit < 8; ++bit) {
      auto y = x;
      y[i] ^= std::byte(1 << bit);
      EXPECT_NE(hash_of_bytes(y), due);
    }
  auto longer = x;
  longer.push_back(std::byte(0));
  EXPECT_NE(hash_of_bytes(longer), due);
}

// xxHash's own sanity check: XXH3_128bits of no bytes with seed 0 is 99AA06D3014798D8
// 6001C324468D497F.
TEST(BytesHash, IsXXH3) {
  EXPECT_EQ(hash_of_bytes({}), (BytesHash{0x6001C324468D497Fu, 0x99AA06D3014798D8u}));
}

// ---- Where

struct Compared {
  std::vector<float> a, b;
  static Parts parts(const std::vector<float>& x) {
    return parts_of(plain_f32, reinterpret_cast<const std::byte*>(x.data()));
  }
  Located locate(int k) const { return first_difference(int64_t(a.size()), k, parts(a), parts(b)); }
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

// 2^26 elements on two ranks that exchange 1024 words a round: three rounds, since 2^20 < 2^26 <=
// 2^30.
TEST(DigestWhere, TheFirstOf64MillionInThreeRoundsBetweenRanks) {
  constexpr int64_t n = int64_t(1) << 26, first = 41'234'567, second = n - 1;
  WorldSpec spec;
  spec.ranks = 2;
  const auto world = start_world(spec, [&](RankHost& host, std::span<const std::byte>) {
    host.state->rank = host.rank, host.state->size = host.size, host.state->trace = host.trace;
    Group both;
    both.members = {0, 1}, both.me = host.rank, both.label = "world",
    both.id = group_id(both.members);
    LedgerDoor ledger(*host.state, *host.door);
    Communicator copies(both, ledger);
    std::vector<uint16_t> x(static_cast<size_t>(n), uint16_t(0x3f80));
    if (host.rank == 1) x[size_t(first)] = x[size_t(second)] = 0x4000;
    const Located found = first_difference(
        copies, n, 1024,
        parts_of(hash_of("x", DType::bf16), reinterpret_cast<const std::byte*>(x.data())));
    std::vector<std::byte> record(sizeof found);
    std::memcpy(record.data(), &found, sizeof found);
    return record;
  });
  for (const RankOutcome& o : world->run({}, 1, 30)) {
    ASSERT_EQ(o.record.size(), sizeof(Located)) << o.text;
    Located found;
    std::memcpy(&found, o.record.data(), sizeof found);
    EXPECT_EQ(found.index, first);
    EXPECT_EQ(found.rounds, 3);
    EXPECT_EQ(found.bytes, 8192);
  }
}

}  // namespace digest_test
}  // namespace
}  // namespace shardproof::digest
