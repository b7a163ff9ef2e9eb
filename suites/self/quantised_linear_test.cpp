// A linear of factors in 8-bit floating point: values, gradients and bounds on numbers that are
// followed by hand, against torchao (fixtures/goldens), against float in both orders of scaling,
// what shares a scale, ranges of integers, traffic, and that the data of every line leave few codes
// open.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "oracle/check.hpp"
#include "oracle/drawn.hpp"
#include "oracle/registry.hpp"
#include "primitives/quantised_linear.hpp"
#include "reference/quantised.hpp"
#include "suites/self/goldens.hpp"
#include "suites/self/on_threads.hpp"

namespace shardproof {

void family_quantised_linear(Registry&);
void controls_quantised_linear(Registry&);

namespace {
namespace quantised_linear_test {

using reference::EightBitFormat;
using reference::Quantiser;
using reference::Uncertain;
using reference::Values;

const Registry& families() {
  static const Registry registry = [] {
    Registry r;
    family_quantised_linear(r);
    controls_quantised_linear(r);
    return r;
  }();
  return registry;
}
Case line_of(const std::string& words) { return parse("quantised_linear " + words, families()); }
const Contract& contract() { return families().contract("quantised_linear"); }

// ---- The reference

// Group 0 holds 3.5 (s = 128), group 1 holds 7 (s = 64), where 1.0625 is 68: a tie of 64 and 72
// that goes to 64 (even). At 128 it is 136, a tie of 128 and 144 that goes to 128.
TEST(ReferenceQuantisedLinear, GroupsHaveScalesOfTheirOwn) {
  const Quantiser q{EightBitFormat::e4m3()};
  const Values x{3.5, 7, 1.0625, 1.0625, -9.0 / 128, 0};
  const std::vector<int64_t> group{0, 1, 0, 1, 0, 1};
  const Uncertain r = reference::quantised_by_group(q, x, group);
  EXPECT_EQ(r.value, (Values{3.5, 7, 1, 1, -9.0 / 128, 0}));
  EXPECT_EQ(r.error, Values(6, 0));
}

// At s = 448/3, no power of two, a value is off by three roundings; 1.044 is 155.9, well inside of
// 152 to 168.
TEST(ReferenceQuantisedLinear, ValuesAreOffByThreeRoundings) {
  const Quantiser q{EightBitFormat::e4m3(), false, 0x1p-24};
  const std::vector<int64_t> group{0, 0};
  const Uncertain r = reference::quantised_by_group(q, Values{3, 1.044}, group);
  EXPECT_DOUBLE_EQ(r.value[1], 160 / (448.0 / 3));
  for (size_t i = 0; i < 2; ++i) EXPECT_NEAR(r.error[i], 3 * 0x1p-24 * r.value[i], 0x1p-40) << i;
}

TEST(ReferenceQuantisedLinear, ATurnedMatrixIsItsTranspose) {
  EXPECT_EQ(reference::turned(Values{1, 2, 3, 4, 5, 6}, 2), (Values{1, 4, 2, 5, 3, 6}));
  EXPECT_EQ(reference::turned(Uncertain{{1, 2}, {3, 4}}, 2).error, (Values{3, 4}));
}

// |a'b' - ab| for factors that are off by all that they may be, to first order in u.
TEST(ReferenceQuantisedLinear, ErrorsOfBothFactorsEnterASum) {
  const Uncertain a{{2, -3}, {0.5, 0.25}}, b{{1, 4}, {0, 0.125}};
  reference::Rounding r;
  const auto exact = reference::linear_loss({1, 2, 1}, a, b, {}, r);
  EXPECT_DOUBLE_EQ(exact.error[0], 0.5 * 1 + 0.25 * 4.125 + 3 * 0.125);
  EXPECT_DOUBLE_EQ(exact.magnitude[0], 2.5 * 1 + 3.25 * 4.125);
  r.accumulate = 0x1p-30;
  const auto rounded = reference::linear_loss({1, 2, 1}, a, b, Values{-8}, r);
  EXPECT_NEAR(rounded.error[0] - exact.error[0], 3 * 0x1p-30 * (exact.magnitude[0] + 8), 0x1p-50);
}

// ---- Against float: dequantised factors, and codes whose sum is scaled

struct Matrices {
  int64_t m, k, n;
  std::vector<float> a, b;
};

// Sevenths of the greatest and their neighbours: many of them ties, on either side of which
// roundings may lead.
Matrices near_ties(float most) {
  Matrices x{8, 12, 6, {}, {}};
  const auto& numbers = EightBitFormat::e4m3().numbers();
  for (int64_t i = 0; i < x.m * x.k; ++i) {
    const size_t c = 40 + size_t(i * 29 % 86);
    const float tie = float((numbers[c] + numbers[c + 1]) / 2 * (double(most) / 448));
    x.a.push_back(i % 2 ? -tie : i % 3 ? std::nextafter(tie, 0.0F) : tie);
  }
  x.a[5] = most;
  for (int64_t i = 0; i < x.n * x.k; ++i) x.b.push_back(float(std::sin(double(i) + 1)) * most);
  return x;
}

struct InFloat {
  std::vector<float> code;
  float scale;
};
InFloat in_float(const std::vector<float>& v) {
  const auto& format = EightBitFormat::e4m3();
  float most = 0;
  for (float x : v) most = std::max(most, std::abs(x));
  InFloat r{{}, 448.0F / most};
  for (float x : v)
    r.code.push_back(
        std::copysign(float(format.numbers()[format.nearest(std::abs(double(x * r.scale)))]), x));
  return r;
}

TEST(ReferenceQuantisedLinear, FloatStaysInItsBounds) {
  size_t open = 0, beyond = 0;
  double closest = 0;
  for (float most : {5.0F, 3.0F, 11.0F, 0.3F}) {
    const Matrices x = near_ties(most);
    const auto doubles = [](const std::vector<float>& v) { return Values(v.begin(), v.end()); };
    const double u = 0x1p-24 + 0x1p-53;
    const Quantiser q{EightBitFormat::e4m3(), false, u};
    const Uncertain a = reference::quantised_by_group(q, doubles(x.a),
                                                      std::vector<int64_t>(x.a.size())),
                    b = reference::quantised_by_group(q, doubles(x.b),
                                                      std::vector<int64_t>(x.b.size()));
    reference::Rounding r;
    r.accumulate = u;
    const auto loss = reference::linear_loss({x.m, x.k, x.n}, a, b, {}, r);
    const Values want = reference::linear({x.m, x.k, x.n}, a.value, b.value, {});
    const InFloat fa = in_float(x.a), fb = in_float(x.b);
    for (double e : a.error) open += e > 1e-3 * most / 448;
    for (int64_t i = 0; i < x.m; ++i)
      for (int64_t j = 0; j < x.n; ++j) {
        float values = 0, codes = 0;
        for (int64_t l = 0; l < x.k; ++l) {
          const float ca = fa.code[size_t(i * x.k + l)], cb = fb.code[size_t(j * x.k + l)];
          values += (ca / fa.scale) * (cb / fb.scale), codes += ca * cb;
        }
        const size_t at = size_t(i * x.n + j);
        for (float got : {values, codes * (1 / fa.scale * (1 / fb.scale))}) {
          const double off = std::abs(got - want[at]);
          EXPECT_LE(off, loss.error[at]) << most << " " << i << " " << j;
          beyond += off > 1e-5 * loss.magnitude[at];
          closest = std::max(closest, off / loss.error[at]);
        }
      }
  }
  EXPECT_GT(open, 100);
  EXPECT_GT(beyond, 20);
  EXPECT_GT(closest, 0.1);
}

// ---- The contract, by hand

struct Linear {
  std::vector<Whole> y, gradients;
  std::vector<Gauge> of_y, of_gradients;
};
Linear linear(const std::string& words, const std::vector<Whole>& in, const Whole& g) {
  const Case line = line_of(words);
  Linear l;
  l.y = contract().forward(line, in, &l.of_y);
  const std::vector<Whole> cotangents{g};
  l.gradients = contract().backward(line, in, cotangents, &l.of_gradients);
  return l;
}

// X: amax 3.5, s = 128; 1.0625 becomes 1. W: amax 7, s = 64; 1.0625 becomes 1, -2 stays. G: amax
// 14, s = 57344/14 = 2^12; 1.1 lies between 1 and 1.25 and becomes 1. db sums 14 and 1.1 as they
// came.
TEST(QuantisedLinear, ByHand) {
  const std::vector<Whole> in{{{2, 2}, {3.5, 1.0625, -2, 0}}, {{1, 2}, {7, 1.0625}}, {{1}, {0.1}}};
  const Linear l = linear("tokens=2 in=2 out=1", in, {{2, 1}, {14, 1.1}});
  EXPECT_EQ(l.y[0].value, (Values{3.5 * 7 + 1 + 0.1, -14 + 0.1}));
  EXPECT_EQ(l.gradients[0].value, (Values{14 * 7, 14, 7, 1}));
  EXPECT_EQ(l.gradients[1].value, (Values{14 * 3.5 - 2, 14}));
  EXPECT_EQ(l.gradients[2].value, (Values{14 + 1.1}));
}

// In E4M3 s = 448/14 = 32, and 1.1 becomes 1.125.
TEST(QuantisedLinear, TheGradientHasAFormatOfItsOwn) {
  const std::vector<Whole> in{{{2, 1}, {1, 1}}, {{1, 1}, {1}}};
  const Whole g{{2, 1}, {14, 1.1}};
  EXPECT_EQ(linear("tokens=2 in=1 out=1 bias=off", in, g).gradients[0].value, (Values{14, 1}));
  EXPECT_EQ(linear("tokens=2 in=1 out=1 bias=off grad_format=e4m3", in, g).gradients[0].value,
            (Values{14, 1.125}));
}

// wgrad=high: 14 (1.0625) + 1.1 (0); dX from the rounded factors all the same.
TEST(QuantisedLinear, AWeightGradientOfFactorsAsTheyCame) {
  const std::vector<Whole> in{{{2, 2}, {3.5, 1.0625, -2, 0.25}}, {{1, 2}, {7, 1.0625}}};
  const Linear l = linear("tokens=2 in=2 out=1 bias=off wgrad=high", in, {{2, 1}, {14, 1.1}});
  EXPECT_EQ(l.gradients[0].value, (Values{14 * 7, 14, 7, 1}));
  EXPECT_EQ(l.gradients[1].value, (Values{14 * 3.5 + 1.1 * -2, 14 * 1.0625 + 1.1 * 0.25}));
}

// 1.0625 beside 3.5 (s = 128) becomes 1, beside 1.75 (s = 256) it is 272, a tie of 256 and 288 that
// goes to 256; 1.1 beside 1.75 is 281.6 and becomes 288 / 256 = 1.125; beside 3.5 it is 140.8, and
// 144 / 128 = 1.125; beside 2.5 (s = 179.2) 197.12, and 192 / 179.2.
TEST(QuantisedLinear, WhatSharesAScale) {
  const auto rounded = [](const std::string& words, const Values& x, const Values& w) {
    const int64_t rows = 4;
    const Linear l =
        linear("tokens=4 bias=off " + words,
               {{{rows, int64_t(x.size()) / rows}, x},
                {{int64_t(w.size() * 4 / x.size()), int64_t(x.size()) / rows}, w}},
               {{rows, int64_t(w.size() * 4 / x.size())}, Values(w.size() * 16 / x.size(), 1)});
    return l.y[0].value;
  };
  const Values x{1.1, 3.5, 1.1, 2.5}, one{1};
  const double by_most = 1.125, by_own = 192 / 179.2;
  // Tokens of one rank of dp; of both.
  EXPECT_EQ(rounded("in=1 out=1 dp=2", x, one), (Values{by_most, 3.5, by_own, 2.5}));
  EXPECT_EQ(rounded("in=1 out=1 dp=2 over=all", x, one)[2], by_most);
  EXPECT_EQ(rounded("in=1 out=1 cp=2", x, one)[2], by_own);
  // Ranks of tp share it, by rows of X or of W; amax=shard: the own rows of W.
  EXPECT_EQ(rounded("in=1 out=2 tp=2 sp=on", x, {1, 1})[4], by_most);
  const Values ones(4, 1), w{1.1, 3.5, 1.1, 2.5};
  EXPECT_EQ(rounded("in=1 out=4 tp=2", ones, w)[2], by_most);
  EXPECT_EQ(rounded("in=1 out=4 tp=2 amax=shard", ones, w)[2], by_own);
  EXPECT_EQ(rounded("in=1 out=2 tp=2 sp=on amax=shard", x, {1, 1})[4], by_most);
  // Shards of tp, of the tokens of each rank of dp.
  EXPECT_EQ(rounded("in=2 out=1 tp=2 dp=2 parallel=row amax=shard",
                    {1.1, 0, 3.5, 0, 1.1, 0, 2.5, 0}, {1, 1})[2],
            by_own);
  // Columns of X and of W under parallel=row: token 0 sums 1.1 + 3.5 + 1.1 + 2.5.
  const Values four{1.1, 3.5, 1.1, 2.5, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0};
  EXPECT_EQ(rounded("in=4 out=1 tp=2 parallel=row", four, ones)[0], by_most + 3.5 + by_most + 2.5);
  EXPECT_DOUBLE_EQ(rounded("in=4 out=1 tp=2 parallel=row amax=shard", four, ones)[0],
                   by_most + 3.5 + by_own + 2.5);
}

// X, of one row a token: blocks of a row are (1.1, 3.5) and (1.1, 2.5); blocks of a column of two
// tokens are (1.1, 1.1), s = 448/1.1, and so on: nothing is rounded but by its own column.
TEST(QuantisedLinear, BlocksLieAlongTheSum) {
  const Values x{1.1, 3.5, 1.1, 2.5, 2.5, 1, 1, 3};
  const std::vector<Whole> in{{{2, 4}, x}, {{2, 4}, {1, 1, 1, 1, 0, 0, 0, 0}}};
  const Linear l = linear("tokens=2 in=4 out=2 block=2 bias=off", in, {{2, 2}, {1, 0, 0, 1}});
  const auto q = [](double v, double most) {
    const auto& f = EightBitFormat::e4m3();
    const double s = 448 / most;
    return f.numbers()[f.nearest(v * s)] / s;
  };
  EXPECT_DOUBLE_EQ(l.y[0].value[0], q(1.1, 3.5) + 3.5 + q(1.1, 2.5) + 2.5);
  EXPECT_DOUBLE_EQ(l.y[0].value[2], 2.5 + q(1, 2.5) + q(1, 3) + 3);
  // dW sums over the two tokens: row 0 is that of token 0, row 1 that of token 1.
  const Values due{q(1.1, 2.5), 3.5, 1.1, q(2.5, 3), 2.5, q(1, 3.5), q(1, 1.1), 3};
  for (size_t i = 0; i < due.size(); ++i) EXPECT_DOUBLE_EQ(l.gradients[1].value[i], due[i]) << i;
}

// dX sums over the rows of W, in blocks of two: (1.1, 3.5), (1.1, 2.5).
TEST(QuantisedLinear, BlocksOfAWeightLieAlongItsRowsInTheBackward) {
  const std::vector<Whole> in{{{2, 2}, {1, 1, 1, 1}}, {{4, 2}, {1.1, 1, 3.5, 1, 1.1, 1, 2.5, 1}}};
  const Linear l =
      linear("tokens=2 in=2 out=4 block=2 bias=off", in, {{2, 4}, {1, 0, 1, 0, 0, 1, 0, 1}});
  EXPECT_EQ(l.gradients[0].value, (Values{1.125 + 192 / 179.2, 2, 6, 2}));
}

// Squares of W: (1.1, 1; 3.5, 1) and (1.1, 2; 2.5, 1), s = 128 and 179.2, in both directions.
TEST(QuantisedLinear, SquaresOfAWeightServeBothProducts) {
  const std::vector<Whole> in{{{2, 2}, {1, 0, 0, 1}}, {{4, 2}, {1.1, 1, 3.5, 1, 1.1, 2, 2.5, 1}}};
  const Linear l = linear("tokens=2 in=2 out=4 block=2 weight_block=square bias=off", in,
                          {{2, 4}, {1, 0, 0, 0, 0, 0, 1, 1}});
  const double small = 192 / 179.2, two = 352 / 179.2, one = 176 / 179.2;
  EXPECT_EQ(l.y[0].value, (Values{1.125, 3.5, small, 2.5, 1, 1, two, one}));
  EXPECT_EQ(l.gradients[0].value, (Values{1.125, 1, small + 2.5, two + one}));
}

// Tiles of 128 rows and columns, in one of which 3.5 is greatest: 1.1 is 140.8 of it, and the code
// of 144. In the other 1.1 is greatest itself, and 448.
TEST(QuantisedLinear, TilesAreAsLargeAsThoseOfARecipe) {
  Whole x{{128, 128}, Values(128 * 128)}, w{{256, 128}, Values(256 * 128, 1.1)};
  x.value[0] = 1, w.value[5 * 128 + 7] = 3.5;
  const Linear l = linear("tokens=128 in=128 out=256 block=128 weight_block=square bias=off",
                          {x, w}, {{128, 256}, Values(128 * 256, 1)});
  EXPECT_EQ(l.y[0].value[0], 1.125);
  EXPECT_EQ(l.y[0].value[127], 1.125);
  EXPECT_NEAR(l.y[0].value[128], 1.1, 1e-15);
  EXPECT_NEAR(l.y[0].value[255], 1.1, 1e-15);
}

// A row linear under sp sums db of the own tokens, and then of the ranks; without sp every rank has
// all tokens.
TEST(QuantisedLinear, TheBiasGradientCountsWhoAddsWhat) {
  const auto counts = [](const std::string& words) {
    const Case line = line_of(words);
    std::vector<Whole> in, cotangents;
    for (const Operand& o : contract().operands(line))
      (o.role == Operand::output ? cotangents : in)
          .push_back({o.shape, Values(size_t(product(o.shape)), 1)});
    std::vector<Gauge> gauges;
    contract().backward(line, in, cotangents, &gauges);
    return std::pair(gauges.at(2).terms, gauges.at(2).reduced);
  };
  EXPECT_EQ(counts("tp=4 parallel=row sp=on tokens=8"), std::pair(int64_t(2), int64_t(4)));
  EXPECT_EQ(counts("tp=4 parallel=row tokens=8"), std::pair(int64_t(8), int64_t(1)));
}

// At s = 448/3 a factor is off by three roundings, at s = 256 by none; two products and a bias may
// be rounded three times, and each of two ranks that add a row linear's output up rounds it once. A
// rounding counts twice, for the subject and for the reference: 2 (3 + 3 + 2) 2 (3) 1.75.
TEST(QuantisedLinear, BoundsByHand) {
  const auto bound = [](const std::string& words) {
    const std::vector<Whole> in{{{2, 2}, {3, 3, 3, 3}}, {{2, 2}, {1.75, 1.75, 1.75, 1.75}}};
    return linear("tokens=2 in=2 out=2 bias=off tp=2 " + words, in, {{2, 2}, {1, 1, 1, 1}})
        .of_y.at(0)
        .bound.at(0);
  };
  EXPECT_NEAR(bound("parallel=row"), 2 * 8 * 10.5, 1e-9);
  EXPECT_NEAR(bound(""), 2 * 6 * 10.5, 1e-9);
}

// ---- Against torchao

Values golden_values(const goldens::Golden& g, const char* part, const std::string& name) {
  return goldens::values(g, part, name.c_str());
}

void expect_within(const Whole& got, const Gauge& gauge, const Values& want) {
  ASSERT_EQ(got.value.size(), want.size());
  for (size_t i = 0; i < want.size(); ++i) {
    const double terms = gauge.magnitude[i],
                 allowed = gauge.bound.empty() ? 16 * 0x1p-24 * terms : 0x1p-24 * gauge.bound[i];
    EXPECT_NEAR(got.value[i], want[i], allowed + 0x1p-24 * std::abs(want[i])) << i;
    EXPECT_LT(allowed, 32 * 0x1p-24 * terms) << "a bound that shows nothing";
  }
}

const std::pair<const char*, const char*> recipes[] = {
    {"exact", ""}, {"pow2", "scaling=pow2"}, {"high", "wgrad=high"}};

TEST(QuantisedLinear, IsThatOfTorchao) {
  const auto g = goldens::golden("float8_linear");
  const std::vector<Whole> in{{{4, 6}, golden_values(g, "inputs", "x")},
                              {{8, 6}, golden_values(g, "inputs", "w")},
                              {{8}, golden_values(g, "inputs", "b")}};
  const Whole cotangent{{4, 8}, golden_values(g, "cotangents", "y")};
  for (const auto& [name, words] : recipes) {
    const Linear l = linear("tokens=4 in=6 out=8 dtype=f32 " + std::string(words), in, cotangent);
    const std::string suffix = std::string("_") + name;
    expect_within(l.y[0], l.of_y[0], golden_values(g, "outputs", "y" + suffix));
    for (size_t i = 0; i < 3; ++i)
      expect_within(l.gradients[i], l.of_gradients[i],
                    golden_values(g, "gradients", "xwb"[i] + suffix));
  }
}

// The kernel, on two threads that share scales.
TEST(QuantisedLinear, OfTwoRanksIsThatOfTorchao) {
  const auto g = goldens::golden("float8_linear");
  const std::vector<Values> in{golden_values(g, "inputs", "x"), golden_values(g, "inputs", "w"),
                               golden_values(g, "inputs", "b")};
  for (const char* cut : {"", "sp=on", "parallel=row", "parallel=row sp=on"})
    for (const auto& [name, words] : recipes) {
      const Case line =
          line_of("tokens=4 in=6 out=8 tp=2 dtype=f32 " + std::string(cut) + " " + words);
      const auto run = on_threads::run_kernels(
          line, contract().operands(line),
          [] { return std::make_unique<primitives::QuantisedLinear>(); }, in,
          {golden_values(g, "cotangents", "y")}, [](int, Kernel&) {});
      for (const std::string& thrown : run.thrown) EXPECT_EQ(thrown, "");
      const auto near = [&](const Values& got, const Values& want) {
        for (size_t i = 0; i < want.size(); ++i)
          EXPECT_NEAR(got[i], want[i], 1e-5 * (1 + std::abs(want[i]))) << cut << " " << name;
      };
      const std::string suffix = std::string("_") + name;
      near(run.outputs[0], golden_values(g, "outputs", "y" + suffix));
      for (size_t i = 0; i < 3; ++i)
        near(run.gradients[i], golden_values(g, "gradients", "xwb"[i] + suffix));
    }
}

Values drawn(const Case& line, size_t operand, bool cotangent, Fill fill = Fill::normal) {
  const auto operands = contract().operands(line);
  Feed feed;
  feed.fill = fill, feed.seed = line.seed();
  if (const auto range = contract().integer_range(line)) feed.range = *range;
  return drawn_whole(
      {line, operands[operand], cotangent, feed, line.dtype(), operands[operand].shape});
}

// ---- Delayed scaling

// x = 3 at a scale of 448/2 is beyond the greatest, which stands for 2; w = 2 at 448/4 is a code.
// g = 8 at 57344/1 is beyond, too, and stands for 1; b has it as it came.
TEST(QuantisedLinear, ScalesOfEarlierStepsAreFollowedByHand) {
  const Case line = line_of("tokens=1 in=1 out=1 history=2");
  const std::vector<Whole> in{{{1, 1}, {3}}, {{1, 1}, {2}}, {{1}, {0}},
                              {{2}, {1, 2}}, {{2}, {4, 1}}, {{2}, {1, 0.5}}};
  const auto y = contract().forward(line, in, nullptr);
  EXPECT_EQ(y[0].value, (Values{4}));
  EXPECT_EQ(y[1].value, (Values{3, 1}));
  EXPECT_EQ(y[2].value, (Values{2, 4}));
  const std::vector<Whole> cotangents{{{1, 1}, {8}}, {{2}, {0, 0}}, {{2}, {0, 0}}};
  const auto d = contract().backward(line, in, cotangents, nullptr);
  EXPECT_EQ(d[0].value, (Values{2}));
  EXPECT_EQ(d[1].value, (Values{2}));
  EXPECT_EQ(d[2].value, (Values{8}));
  EXPECT_TRUE(d[3].value.empty() && d[4].value.empty());
  EXPECT_EQ(d[5].value, (Values{8, 1}));
}

// The greatest of the histories are at three places, so that each of them counts; and what is drawn
// is greater than they are, so that something is beyond the greatest number.
TEST(QuantisedLinear, HistoriesShowWhichOfThemCounts) {
  const Case line = line_of("history=3");
  const size_t at[] = {2, 0, 1};
  for (size_t k = 0; k < 3; ++k) {
    const Values h = drawn(line, 3 + k, false);
    ASSERT_EQ(h.size(), 3u);
    EXPECT_EQ(size_t(std::ranges::max_element(h) - h.begin()), at[k]);
    const bool of_cotangent = k == 2;
    const Values x = drawn(line, of_cotangent ? 6 : k, of_cotangent);
    EXPECT_GT(reference::greatest_magnitude(x), *std::ranges::max_element(h)) << k;
  }
}

// ---- Data and bounds

// Of X and W along the dim that four ranks cut: the greatest lies on neither end, and not on the
// same rank.
TEST(QuantisedLinear, RanksDifferInTheirAmax) {
  const Case line = line_of("tp=4 parallel=row");
  const auto of_ranks = [&](size_t operand, int64_t rows) {
    const Values v = drawn(line, operand, false);
    Values most(4);
    for (int64_t i = 0; i < int64_t(v.size()); ++i) {
      double& m = most[size_t(i % 48 / 12)];
      m = std::max(m, std::abs(v[size_t(i)]));
    }
    EXPECT_EQ(int64_t(v.size()), 48 * rows);
    return most;
  };
  const Values x = of_ranks(0, 24), w = of_ranks(1, 10);
  EXPECT_EQ(std::ranges::max_element(x) - x.begin(), 2);
  EXPECT_EQ(std::ranges::max_element(w) - w.begin(), 1);
  EXPECT_EQ(std::set<double>(x.begin(), x.end()).size(), 4);
}

// Sums of what the range allows, at its worst: every factor rounded up, all terms alike.
TEST(QuantisedLinear, IntegersOfTheRangeStayExact) {
  for (const char* words : {"scaling=pow2", "scaling=pow2 dtype=f32", "scaling=pow2 spread=0",
                            "scaling=pow2 dtype=f32 spread=0 microbatches=3 parallel=row",
                            "scaling=pow2 dtype=bf16 in=4 out=3 tokens=4 spread=0"}) {
    const Case line = line_of(words);
    const auto range = contract().integer_range(line);
    ASSERT_TRUE(range) << words;
    const auto up = [](double v, int bits) {  // to a number of so many bits, at least v
      int e = 0;
      const double s = std::frexp(v, &e);
      return std::ldexp(std::ceil(std::ldexp(s, bits)), e - bits);
    };
    const double unit = std::ldexp(1, -6 * int(line.at("spread")));
    const int64_t longest =
        std::max({line.at("in") + 1, line.at("out"), line.at("tokens") * line.at("microbatches")});
    EXPECT_LE(double(longest) * up(double(*range), 4) * up(double(*range), 3) / unit,
              std::ldexp(1, significand_bits(line.dtype())))
        << words;
  }
  EXPECT_FALSE(contract().integer_range(line_of("")));
  EXPECT_FALSE(contract().integer_range(line_of("scaling=pow2 dtype=bf16")));
  EXPECT_FALSE(contract().integer_range(line_of("scaling=pow2 spread=8 tokens=16777216")));
}

// Integers that codes round, or the exact lines would show no rounding.
TEST(QuantisedLinear, IntegersAreRounded) {
  for (const char* words : {"scaling=pow2 fill=integers", "scaling=pow2 fill=integers dtype=f32"}) {
    const Case line = line_of(words);
    const Values x = drawn(line, 0, false, Fill::integers);
    const Uncertain q = reference::quantised_by_group({EightBitFormat::e4m3(), true}, x,
                                                      std::vector<int64_t>(x.size()));
    size_t moved = 0;
    for (size_t i = 0; i < x.size(); ++i) moved += q.value[i] != x[i];
    EXPECT_GT(moved, x.size() / 4) << words;
  }
}

// An open code widens what it enters by a step, which proves little: of the results of a line few
// may be so.
TEST(QuantisedLinear, FewCodesAreOpen) {
  for (const std::string& text : contract().cases("ci")) {
    Case line = parse(text, families());
    if (line.text("fill") == "integers" || expands(line)) continue;
    line.set("tp", "1");  // no part is rounded on its way
    std::vector<Whole> in;
    const auto operands = contract().operands(line);
    const size_t inputs = size_t(std::ranges::count_if(
        operands, [](const Operand& o) { return o.role != Operand::output; }));
    for (size_t i = 0; i < inputs; ++i)
      in.push_back({operands[i].shape, drawn(line, i, false, fill_of(line))});
    const Whole g{operands[inputs].shape, drawn(line, inputs, true, fill_of(line))};
    std::vector<Gauge> gauges, more;
    contract().forward(line, in, &gauges);
    const std::vector<Whole> cotangents{g};
    contract().backward(line, in, cotangents, &more);
    gauges.insert(gauges.end(), more.begin(), more.end());
    size_t open = 0, all = 0;
    for (const Gauge& gauge : gauges)
      for (size_t i = 0; i < gauge.bound.size(); ++i, ++all)
        open += gauge.bound[i] > 1000 * gauge.magnitude[i];
    EXPECT_GT(all, 0) << text;
    EXPECT_LE(double(open), 0.05 * double(all)) << text;
  }
}

// ---- Traffic

TEST(QuantisedLinear, TrafficByHand) {
  const auto due = [](const std::string& words) {
    std::vector<std::tuple<Op, std::string, bool, int64_t, DType>> list;
    for (const Traffic& t : contract().traffic(line_of("dtype=bf16 " + words), "", 0)) {
      list.emplace_back(t.op, t.label, t.backward, t.count, t.dtype);
      EXPECT_EQ(t.reduce, t.op == Op::all_gather                   ? Reduce::none
                          : t.op == Op::all_reduce && t.count == 1 ? Reduce::max
                                                                   : Reduce::sum);
    }
    return list;
  };
  using List = decltype(due(""));
  constexpr auto reduce = Op::all_reduce, gather = Op::all_gather, scatter = Op::reduce_scatter;
  constexpr auto f32 = DType::f32, i32 = DType::i32, bf16 = DType::bf16;
  EXPECT_EQ(due(""), List{});
  // X is whole on every rank; W and the gradient, 24 x 48, are not.
  EXPECT_EQ(due("tp=2"), (List{{reduce, "tp", false, 1, f32},
                               {reduce, "tp", true, 1, f32},
                               {reduce, "tp", true, 240, bf16}}));
  EXPECT_EQ(due("tp=2 amax=shard wire=f32"), (List{{reduce, "tp", true, 240, f32}}));
  // 6 x 10 codes of the own tokens in 15 words, twice.
  EXPECT_EQ(due("tp=4 sp=on"), (List{{reduce, "tp", false, 1, f32},
                                     {reduce, "tp", false, 1, f32},
                                     {gather, "tp", false, 15, i32},
                                     {reduce, "tp", true, 1, f32},
                                     {gather, "tp", true, 15, i32},
                                     {scatter, "tp", true, 240, bf16}}));
  EXPECT_EQ(due("tp=2 cp=2 dp=2 over=all sp=on"), (List{{reduce, "tp,cp,dp", false, 1, f32},
                                                        {reduce, "tp", false, 1, f32},
                                                        {gather, "tp", false, 8, i32},
                                                        {reduce, "tp,cp,dp", true, 1, f32},
                                                        {gather, "tp", true, 8, i32},
                                                        {scatter, "tp", true, 60, bf16}}));
  EXPECT_EQ(due("dp=2 over=all"),
            (List{{reduce, "dp", false, 1, f32}, {reduce, "dp", true, 1, f32}}));
  // Row: X, W over tp; 12 x 10 codes of the gradient.
  EXPECT_EQ(due("tp=2 parallel=row sp=on"), (List{{reduce, "tp", false, 1, f32},
                                                  {reduce, "tp", false, 1, f32},
                                                  {scatter, "tp", false, 240, bf16},
                                                  {reduce, "tp", true, 1, f32},
                                                  {gather, "tp", true, 30, i32},
                                                  {reduce, "tp", true, 10, bf16}}));
  EXPECT_EQ(due("tp=2 parallel=row sp=on amax=shard bias=off"),
            (List{{scatter, "tp", false, 240, bf16},
                  {reduce, "tp", true, 1, f32},
                  {gather, "tp", true, 30, i32}}));
  EXPECT_EQ(due("tp=2 parallel=row sp=on wgrad=high bias=off"),
            (List{{reduce, "tp", false, 1, f32},
                  {reduce, "tp", false, 1, f32},
                  {scatter, "tp", false, 240, bf16},
                  {gather, "tp", true, 120, bf16}}));
  EXPECT_EQ(due("tp=2 sp=on wgrad=high amax=shard"), (List{{reduce, "tp", false, 1, f32},
                                                           {gather, "tp", false, 30, i32},
                                                           {gather, "tp", true, 120, bf16},
                                                           {scatter, "tp", true, 240, bf16}}));
  // 120 codes, 60 scales; the gradient of y in both copies.
  EXPECT_EQ(due("tp=2 sp=on block=2"), (List{{gather, "tp", false, 30, i32},
                                             {gather, "tp", false, 60, f32},
                                             {gather, "tp", true, 30, i32},
                                             {gather, "tp", true, 60, f32},
                                             {scatter, "tp", true, 240, bf16}}));
  EXPECT_EQ(due("tp=2 parallel=row sp=on block=2 bias=off"),
            (List{{scatter, "tp", false, 240, bf16},
                  {gather, "tp", true, 30, i32},
                  {gather, "tp", true, 60, f32},
                  {gather, "tp", true, 30, i32},
                  {gather, "tp", true, 60, f32}}));
}

}  // namespace quantised_linear_test
}  // namespace
}  // namespace shardproof
