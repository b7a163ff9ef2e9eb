// The arithmetic that host and devices share (primitives/element.hpp and what is built on it),
// against the element types of fixtures/ and against memory laid out by hand.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "fixtures/tensor.hpp"
#include "primitives/bodies.hpp"
#include "primitives/cuda/twin_bodies.hpp"
#include "primitives/rows.hpp"
#include "primitives/serial.hpp"
#include "primitives/work.hpp"

namespace shardproof::primitives {
namespace {
namespace bodies_test {

Tensor one(void* data, Number n) { return {data, n, 0, {}, {}, 1}; }

TEST(Element, EveryHalfIsReadAsItsType) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    uint64_t half = bits;
    for (auto [number, dtype] :
         {std::pair(Number::bf16, DType::bf16), std::pair(Number::f16, DType::f16)}) {
      const double met = one(&half, number).load<double>(0),
                   due = load(reinterpret_cast<const std::byte*>(&half), dtype);
      EXPECT_TRUE(std::isnan(due) ? std::isnan(met) : met == due) << bits;
    }
  }
}

// Values beside and upon the middle of two halves, beyond both ends of the range, and at random.
TEST(Element, IsRoundedOnceAsItsTypeIs) {
  std::vector<double> values{0.0, -0.0, 1, 65519.99, 65520, 1e300, -1e300, 5e-324, INFINITY, NAN};
  std::mt19937_64 random(7);
  for (int i = 0; i < 100000; ++i) {
    const double half = load(reinterpret_cast<const std::byte*>(&i), DType::f16);
    for (double v : {half * (1 + 0x1p-11), half * (1 + 0x1p-11 + 0x1p-40), half * (1 + 0x1p-8)})
      values.push_back(v);
    values.push_back(std::ldexp(double(int64_t(random())), int(random() % 300) - 200));
  }
  for (double v : values)
    for (auto [number, dtype] :
         {std::pair(Number::f64, DType::f64), std::pair(Number::f32, DType::f32),
          std::pair(Number::bf16, DType::bf16), std::pair(Number::f16, DType::f16)}) {
      uint64_t met = 0, due = 0;
      one(&met, number).store(0, v);
      store(reinterpret_cast<std::byte*>(&due), dtype, v);
      ASSERT_EQ(met, due) << v << " in " << name(dtype);
    }
}

TEST(Element, PlacesAreThoseOfTheView) {
  for (const std::vector<int64_t>& shape :
       {std::vector<int64_t>{4}, {3, 5}, {2, 1, 3}, {2, 3, 4, 5}, {1, 1}})
    for (Strides strides : {Strides::contiguous, Strides::transposed}) {
      const Buffer b(DType::f32, shape, strides);
      const Tensor t = tensor(b.view());
      EXPECT_EQ(t.elements, b.view().elements());
      for (int64_t i = 0; i < t.elements; ++i)
        EXPECT_EQ(t.at(i), b.view().flat(i)) << shape_text(shape) << " " << i;
      if (strides == Strides::contiguous) {
        EXPECT_LE(t.dims, 1) << shape_text(shape);
      }
    }
  EXPECT_EQ(tensor(Buffer(DType::f64, {0, 3}).view()).elements, 0);
  EXPECT_FALSE(tensor(View{}).there());
}

TEST(Element, ACopyKeepsTheBitsOfANaN) {
  uint64_t from = 0x7FA0DEAD, to = 0;
  Convert{one(&from, Number::f32), one(&to, Number::f32)}.at(0);
  EXPECT_EQ(to, from);
}

// Two rows 4 GiB apart, of which two pages exist: right with 64-bit offsets, wrong in 32 bits.
TEST(Element, OffsetsBeyond32Bits) {
  constexpr int64_t apart = int64_t(1) << 29;  // elements of 8 bytes
  const size_t bytes = size_t(apart) * 8 + 4096;
  void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) GTEST_SKIP() << "no 4 GiB of addresses";
  auto* far = static_cast<double*>(memory);
  double source[4] = {1, 2, 3, 4};
  const Tensor from{source, Number::f64, 1, {4}, {1}, 4},
      to{memory, Number::f64, 2, {2, 2}, {apart, 1}, 4};
  run(Convert{from, to});
  EXPECT_EQ((std::vector{far[0], far[1], far[apart], far[apart + 1]}),
            (std::vector<double>{1, 2, 3, 4}));
  far[0] = far[1] = far[apart] = far[apart + 1] = 0;
  run(CopyNarrowOffset{from, to});
  EXPECT_EQ((std::vector{far[0], far[1], far[apart], far[apart + 1]}),
            (std::vector<double>{3, 4, 0, 0}));
  ::munmap(memory, bytes);
}

// A product of sizes that no tile divides, its columns summed, by hand: [[1,2],[3,4],[5,6]].
TEST(Columns, AreSummedFromTheFirstRowToTheLast) {
  double g[6] = {1, 2, 3, 4, 5, 6}, sums[2] = {};
  run(ColumnSums{{g, Number::f64, 1, {6}, {1}, 6}, {sums, Number::f64, 1, {2}, {1}, 2}, true});
  EXPECT_EQ(sums[0], 9);
  EXPECT_EQ(sums[1], 12);
}

TEST(Optimizer, FindsWhatIsNotFiniteWhereverItIs) {
  for (const DType type : {DType::f64, DType::f32, DType::bf16, DType::f16})
    for (size_t at = 0; at < 5; ++at)
      for (const double met : {double(INFINITY), double(-INFINITY), double(NAN), 6e4, 0.0}) {
        std::vector<double> values(5, -1.0);
        values[at] = met;
        const Buffer x(type, {5}), found(DType::f32, {1});
        fill_from(x.view(), values);
        perform(NotFinite{tensor(x.view()), tensor(found.view())}, "a look");
        EXPECT_EQ(to_doubles(found.view())[0], std::isfinite(met) ? 0 : 1) << met << " at " << at;
      }
  const Buffer none(DType::f32, {0}), found(DType::f32, {1});
  perform(NotFinite{tensor(none.view()), tensor(found.view())}, "a look");
  EXPECT_EQ(to_doubles(found.view())[0], 0);
}

// More keys than a tile, in descending order of score and ascending: the running maximum changes in
// every tile or in none. Scores are 0 or log 2: l = 2 a + b counts them, exactly in shape.
TEST(Attention, TilesMergeInAnyOrder) {
  constexpr int64_t keys = 12 * 16 + 5;
  double q = 1, m, l, a;
  std::vector<double> k(keys), v(keys);
  std::vector<int64_t> key_labels(2 * keys, 0), query_label{0, 0};
  for (bool ascending : {false, true}) {
    for (int64_t j = 0; j < keys; ++j) {
      const bool greater = ascending == (j >= 100);
      k[size_t(j)] = greater ? std::log(2.0) : 0;
      v[size_t(j)] = greater ? 1 : 0;
    }
    m = -INFINITY, l = 0, a = 0;
    AttentionPairs of;
    of.q = one(&q, Number::f64);
    of.k = {k.data(), Number::f64, 1, {keys}, {1}, keys};
    of.v = {v.data(), Number::f64, 1, {keys}, {1}, keys};
    of.factors = Number::f64;
    of.queries = {query_label.data(), Number::i64, 1, {2}, {1}, 2};
    of.keys = {key_labels.data(), Number::i64, 1, {2 * keys}, {1}, 2 * keys};
    run(AttendBlock{of, one(&m, Number::f64), one(&l, Number::f64), one(&a, Number::f64)});
    const double greater = ascending ? keys - 100 : 100, less = keys - greater;
    EXPECT_EQ(m, std::log(2.0));
    EXPECT_NEAR(l, greater + less / 2, 1e-12 * keys);
    EXPECT_NEAR(a / l, 2 * greater / (2 * greater + less), 1e-14);
  }
}

TEST(Attention, ARowThatSeesNothingStaysEmpty) {
  double q = 1, k = NAN, v = NAN, m = -INFINITY, l = 0, a = 0, o = 7, lse = 7, ko, klse;
  int64_t query[2] = {0, 0}, key[2] = {-1, 0};  // padding
  AttentionPairs of;
  of.q = one(&q, Number::f64), of.k = one(&k, Number::f64), of.v = one(&v, Number::f64);
  of.queries = {query, Number::i64, 1, {2}, {1}, 2}, of.keys = {key, Number::i64, 1, {2}, {1}, 2};
  const Tensor tm = one(&m, Number::f64), tl = one(&l, Number::f64), ta = one(&a, Number::f64);
  of.factors = Number::f64;
  run(AttendBlock{of, tm, tl, ta});
  run(AttentionOutput{tm, tl, ta, one(&o, Number::f64), one(&lse, Number::f64),
                      one(&ko, Number::f64), one(&klse, Number::f64), 1, true});
  EXPECT_EQ(o, 0);
  EXPECT_EQ(lse, -INFINITY);
}

TEST(Work, GoesToTheStreamOfTheScope) {
  EXPECT_EQ(OnStream::current(), nullptr);
  int outer = 0, inner = 0;
  {
    const OnStream a(&outer);
    {
      const OnStream b(&inner);
      EXPECT_EQ(OnStream::current(), &inner);
    }
    EXPECT_EQ(OnStream::current(), &outer);
  }
  EXPECT_EQ(OnStream::current(), nullptr);
}

TEST(Work, WhatIsKeptStartsAsNaN) {
  const Kept kept(DType::bf16, {3});
  for (double v : to_doubles(kept.view())) EXPECT_TRUE(std::isnan(v));
}

TEST(Work, CopiesOfOtherSizesAreRefused) {
  const Buffer a(DType::f64, {3}), b(DType::f64, {4});
  EXPECT_THROW(convert(a.view(), b.view()), std::invalid_argument);
}

TEST(Rows, ComeAsRuns) {
  std::vector<std::vector<int64_t>> runs;
  each_run({4, 5, 6, 1, 9, 10}, [&](int64_t first, int64_t at, int64_t n) {
    runs.push_back({first, at, n});
  });
  EXPECT_EQ(runs, (std::vector<std::vector<int64_t>>{{4, 0, 3}, {1, 3, 1}, {9, 4, 2}}));
}

}  // namespace bodies_test
}  // namespace
}  // namespace shardproof::primitives
