// The reference of the mapping family on two or three ranks with numbers that can be followed by
// hand.
#include "reference/regions.hpp"

#include <gtest/gtest.h>

#include <array>

namespace shardproof::reference {
namespace {
namespace reference_regions_test {

// Two ranks hold [2,2] tensors; the sum is {11,22,33,44}.
const Array a{{2, 2}, {1, 2, 3, 4}}, b{{2, 2}, {10, 20, 30, 40}}, sum{{2, 2}, {11, 22, 33, 44}};
const Ranks ab{a, b};
constexpr std::array<int64_t, 2> ones{1, 1};

double dot(const Ranks& x, const Ranks& y) {
  double s = 0;
  for (size_t r = 0; r < x.size(); ++r)
    for (size_t i = 0; i < x[r].value.size(); ++i) s += x[r].value[i] * y[r].value[i];
  return s;
}

TEST(ReferenceRegions, WholeAndLocalValues) {
  EXPECT_EQ(copies(a, 3), (Ranks{a, a, a}));
  EXPECT_EQ(blocks(a, 0, ones), (Ranks{{{1, 2}, {1, 2}}, {{1, 2}, {3, 4}}}));
  EXPECT_EQ(blocks(a, 1, ones), (Ranks{{{2, 1}, {1, 3}}, {{2, 1}, {2, 4}}}));
  EXPECT_EQ(total(ab), sum);
  EXPECT_EQ(joined(ab, 0), (Array{{4, 2}, {1, 2, 3, 4, 10, 20, 30, 40}}));
  EXPECT_EQ(joined(ab, 1), (Array{{2, 4}, {1, 2, 10, 20, 3, 4, 30, 40}}));
}

TEST(ReferenceRegions, UnevenBlocksOfTheMiddleDim) {
  const Array x{{2, 3, 1}, {0, 1, 2, 3, 4, 5}};
  const std::array<int64_t, 2> extents{1, 2};
  const Ranks cut = blocks(x, 1, extents);
  EXPECT_EQ(cut, (Ranks{{{2, 1, 1}, {0, 3}}, {{2, 2, 1}, {1, 2, 4, 5}}}));
  EXPECT_EQ(joined(cut, 1), x);
}

TEST(ReferenceRegions, AllReduceGivesTheSumToEveryRank) {
  EXPECT_EQ(all_reduce(ab), (Ranks{sum, sum}));
}

TEST(ReferenceRegions, AllGatherConcatenatesInRankOrder) {
  const Array rows{{4, 2}, {1, 2, 3, 4, 10, 20, 30, 40}};
  const Array columns{{2, 4}, {1, 2, 10, 20, 3, 4, 30, 40}};
  EXPECT_EQ(all_gather(ab, 0), (Ranks{rows, rows}));
  EXPECT_EQ(all_gather(ab, 1), (Ranks{columns, columns}));
}

TEST(ReferenceRegions, ReduceScatterGivesEachRankItsBlockOfTheSum) {
  EXPECT_EQ(reduce_scatter(ab, 0, ones), (Ranks{{{1, 2}, {11, 22}}, {{1, 2}, {33, 44}}}));
  EXPECT_EQ(reduce_scatter(ab, 1, ones), (Ranks{{{2, 1}, {11, 33}}, {{2, 1}, {22, 44}}}));
}

TEST(ReferenceRegions, OwnBlockAndItsPlaceInZeros) {
  const Ranks own = own_block(ab, 0, ones);
  EXPECT_EQ(own, (Ranks{{{1, 2}, {1, 2}}, {{1, 2}, {30, 40}}}));
  EXPECT_EQ(in_zeros(own, 0), (Ranks{{{2, 2}, {1, 2, 0, 0}}, {{2, 2}, {0, 0, 30, 40}}}));
}

TEST(ReferenceRegions, FirstOnlyKeepsTheDenotedValueOfCopies) {
  const Array nothing{{2, 2}, {0, 0, 0, 0}};
  EXPECT_EQ(first_only(copies(a, 2)), (Ranks{a, nothing}));
  EXPECT_EQ(total(first_only(copies(a, 2))), a);
}

TEST(ReferenceRegions, Scaled) {
  EXPECT_EQ(scaled(ab, -0.5),
            (Ranks{{{2, 2}, {-0.5, -1, -1.5, -2}}, {{2, 2}, {-5, -10, -15, -20}}}));
}

// Rows 0 and 1 of {1,2,3,4} on two ranks become columns: rank 0 holds 1,3 and rank 1 holds 2,4.
TEST(ReferenceRegions, ExchangeMovesTheShardedDim) {
  const Ranks rows = blocks(a, 0, ones), columns = blocks(a, 1, ones);
  EXPECT_EQ(exchange(rows, 1, 0, ones), columns);
  EXPECT_EQ(exchange(columns, 0, 1, ones), rows);
}

// Three rows as 1 + 2, four columns as 1 + 3.
TEST(ReferenceRegions, ExchangeWithUnevenBlocks) {
  const Array x{{3, 4}, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}};
  const std::array<int64_t, 2> rows{1, 2}, columns{1, 3};
  const Ranks y = exchange(blocks(x, 0, rows), 1, 0, columns);
  EXPECT_EQ(y, (Ranks{{{3, 1}, {0, 4, 8}}, {{3, 3}, {1, 2, 3, 5, 6, 7, 9, 10, 11}}}));
  EXPECT_EQ(joined(y, 1), x);
}

// <Ax, y> = <x, By> for each pair of the header, on data whose products differ.
TEST(ReferenceRegions, PairsAreAdjoint) {
  const Ranks y{{{2, 2}, {5, -7, 11, 13}}, {{2, 2}, {-17, 19, 23, 29}}};
  const Ranks tall{{{4, 2}, {1, -2, 3, 5, 7, -11, 13, 17}}, {{4, 2}, {19, 23, 2, 3, 5, 7, -1, 4}}};
  const std::array<int64_t, 2> twos{2, 2};
  EXPECT_EQ(dot(all_reduce(ab), y), dot(ab, all_reduce(y)));
  EXPECT_EQ(dot(all_gather(ab, 0), tall), dot(ab, reduce_scatter(tall, 0, twos)));
  EXPECT_EQ(dot(own_block(tall, 0, twos), y), dot(tall, in_zeros(y, 0)));
  EXPECT_EQ(dot(first_only(ab), y), dot(ab, first_only(y)));
  EXPECT_EQ(dot(scaled(ab, 3), y), dot(ab, scaled(y, 3)));
  const Ranks moved{{{4, 1}, {1, -2, 3, 5}}, {{4, 1}, {7, -11, 13, 17}}};
  EXPECT_EQ(dot(exchange(ab, 1, 0, ones), moved), dot(ab, exchange(moved, 0, 1, twos)));
}

}  // namespace reference_regions_test
}  // namespace
}  // namespace shardproof::reference
