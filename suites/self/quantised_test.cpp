// 8-bit floating point: the two formats against their definition, rounding of reference and kernel
// on constructed ties, over every value of 16 bits and against PyTorch, the reference on numbers
// that are followed by hand, bounds where a boundary is near, histories and traffic.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "fixtures/dtype.hpp"
#include "oracle/check.hpp"
#include "oracle/drawn.hpp"
#include "oracle/registry.hpp"
#include "primitives/eight_bits.hpp"
#include "primitives/launch.hpp"
#include "reference/quantised.hpp"
#include "reference/running_error.hpp"
#include "suites/self/goldens.hpp"

namespace shardproof {

void family_quantised(Registry&);
void controls_quantised(Registry&);

namespace {
namespace quantised_test {

using reference::EightBitFormat;
using reference::Values;

const Registry& families() {
  static const Registry registry = [] {
    Registry r;
    family_quantised(r);
    controls_quantised(r);
    return r;
  }();
  return registry;
}
Case line_of(const std::string& words) { return parse("quantised_gather " + words, families()); }
const Contract& contract() { return families().contract("quantised_gather"); }

// ---- The formats, by the table of OFP8 (revision 1.0, section 5)

struct Format {
  const EightBitFormat& reference;
  primitives::EightBits kernel;
  double greatest, lowest_normal, lowest;
  size_t numbers;
};
const Format formats[] = {
    {EightBitFormat::e4m3(), primitives::e4m3, 448, 0x1p-6, 0x1p-9, 127},
    {EightBitFormat::e5m2(), primitives::e5m2, 57344, 0x1p-14, 0x1p-16, 124},
};

TEST(Formats, AreThoseOfTheSpecification) {
  for (const Format& f : formats) {
    const Values& n = f.reference.numbers();
    EXPECT_EQ(n.size(), f.numbers);
    EXPECT_EQ(n.front(), 0);
    EXPECT_EQ(n[1], f.lowest);
    EXPECT_EQ(n.back(), f.greatest);
    EXPECT_EQ(f.reference.greatest(), f.greatest);
    EXPECT_TRUE(std::ranges::find(n, f.lowest_normal) != n.end());
    EXPECT_TRUE(std::ranges::is_sorted(n));
    EXPECT_EQ(std::set<double>(n.begin(), n.end()).size(), n.size());
  }
}

// Every positive number is a multiple of the step of its binade with a significand of so many bits:
// 2^e (1 + k / 2^m) or k lowest, and nothing else lies between the lowest and the greatest.
TEST(Formats, HoldEveryNumberOfTheirWidth) {
  const std::pair<int, int> widths[] = {{3, -6}, {2, -14}};  // fraction bits, lowest exponent
  for (size_t i = 0; i < 2; ++i) {
    const auto [fraction, lowest] = widths[i];
    std::set<double> due{0};
    for (int k = 1; k < 1 << fraction; ++k) due.insert(std::ldexp(k, lowest - fraction));
    for (int e = lowest; std::ldexp(1, e) <= formats[i].greatest; ++e)
      for (int k = 0; k < 1 << fraction; ++k) {
        const double v = std::ldexp((1 << fraction) + k, e - fraction);
        if (v <= formats[i].greatest) due.insert(v);
      }
    EXPECT_EQ(Values(due.begin(), due.end()), formats[i].reference.numbers());
  }
}

TEST(Formats, TheKernelReadsEveryCode) {
  for (const Format& f : formats)
    for (size_t code = 0; code < f.numbers; ++code) {
      EXPECT_EQ(f.kernel.number(int(code)), f.reference.numbers()[code]);
      EXPECT_EQ(f.kernel.number(int(code) | 0x80), -f.reference.numbers()[code]);
      EXPECT_EQ(f.kernel.code(f.reference.numbers()[code]), int(code));
      EXPECT_EQ(f.kernel.code(-f.reference.numbers()[code]), int(code) | 0x80);
    }
}

// ---- Rounding

// By distance to every number: the nearer, of two the one of even code, at most the greatest.
int nearest_by_search(const Format& f, double value) {
  const Values& n = f.reference.numbers();
  const double v = std::clamp(value, -f.greatest, f.greatest);
  size_t best = 0;
  for (size_t c = 1; c < n.size(); ++c) {
    const double d = std::abs(std::abs(v) - n[c]), least = std::abs(std::abs(v) - n[best]);
    if (d < least || (d == least && c % 2 == 0)) best = c;
  }
  return int(best) | (std::signbit(v) ? 0x80 : 0);
}

TEST(Rounding, OfTiesIsToEven) {
  for (const Format& f : formats) {
    const Values& n = f.reference.numbers();
    for (size_t c = 0; c + 1 < n.size(); ++c) {
      const double tie = (n[c] + n[c + 1]) / 2;
      const size_t even = c % 2 == 0 ? c : c + 1;
      EXPECT_EQ(f.reference.nearest(tie), even) << tie;
      EXPECT_EQ(f.kernel.code(tie), int(even)) << tie;
      EXPECT_EQ(f.kernel.code(std::nextafter(tie, 0)), int(c)) << tie;
      EXPECT_EQ(f.kernel.code(std::nextafter(tie, 1e9)), int(c + 1)) << tie;
      EXPECT_EQ(f.reference.nearest(std::nextafter(tie, 0)), c) << tie;
      EXPECT_EQ(f.reference.nearest(std::nextafter(tie, 1e9)), c + 1) << tie;
    }
  }
}

TEST(Rounding, OfEveryHalfIsThatOfReferenceKernelAndSearch) {
  for (const Format& f : formats)
    for (uint32_t bits = 0; bits < 0x10000; ++bits)
      for (float v : {to_float(bf16{uint16_t(bits)}), to_float(f16{uint16_t(bits)})}) {
        if (!std::isfinite(v)) continue;
        const int due = nearest_by_search(f, v);
        ASSERT_EQ(f.kernel.code(v), due) << v;
        ASSERT_EQ(f.reference.nearest(std::abs(v)), size_t(due & 0x7F)) << v;
      }
}

TEST(Rounding, BeyondTheGreatestStaysThere) {
  for (const Format& f : formats)
    for (double v : {f.greatest, f.greatest * 1.5, 1e30, double(INFINITY)}) {
      EXPECT_EQ(f.kernel.number(f.kernel.code(v)), f.greatest);
      EXPECT_EQ(f.kernel.number(f.kernel.code(-v)), -f.greatest);
      EXPECT_EQ(f.reference.numbers()[f.reference.nearest(v)], f.greatest);
    }
}

TEST(Rounding, IsThatOfPyTorch) {
  const auto g = goldens::golden("float8");
  for (const auto& [name, f] : {std::pair{"e4m3", formats[0]}, {"e5m2", formats[1]}}) {
    const auto x = goldens::values(g, "inputs", name), codes = goldens::values(g, "outputs", name);
    ASSERT_EQ(x.size(), codes.size());
    ASSERT_GT(x.size(), 4 * f.numbers - 4);
    for (size_t i = 0; i < x.size(); ++i) {
      EXPECT_EQ(f.kernel.code(x[i]), int(codes[i])) << name << " " << x[i];
      EXPECT_EQ(f.reference.nearest(x[i]), size_t(codes[i])) << name << " " << x[i];
    }
  }
}

TEST(Rounding, OfNaNIsNaN) {
  for (const Format& f : formats) EXPECT_EQ(f.kernel.code(NAN) & 0x7F, 0x7F);
}

// Five codes lie in two words: 1, -2, 448, 2^-9 and 1.5, the first in the lowest byte, then zeros.
TEST(Codes, LieFourInAWord) {
  double x[] = {1, -2, 448, 0x1p-9, 1.5, NAN, NAN, NAN}, scale = 1;
  int32_t words[] = {-1, -1, -1};
  using primitives::Number, primitives::Tensor;
  const Tensor from{x, Number::f64, 1, {5}, {1}, 5}, s{&scale, Number::f64, 1, {1}, {1}, 1},
      to{words, Number::i32, 1, {2}, {1}, 2};
  primitives::executor::launch(
      primitives::Quantise{from, s, to, primitives::e4m3, 5, /*wide=*/true}, nullptr);
  EXPECT_EQ(uint32_t(words[0]), 0x017EC038U);
  EXPECT_EQ(words[1], 0x3C);
  EXPECT_EQ(words[2], -1);
}

// ---- The reference, by hand: amax 3.5 is 448 at s = 128

TEST(ReferenceQuantised, ScaleOfAnAmax) {
  const reference::Quantiser exact{EightBitFormat::e4m3()}, pow2{EightBitFormat::e4m3(), true},
      wide{EightBitFormat::e5m2(), true};
  EXPECT_EQ(reference::scale_of(exact, 3.5), 128);
  EXPECT_EQ(reference::scale_of(exact, 7), 64);
  EXPECT_EQ(reference::scale_of(exact, 4), 112);
  EXPECT_EQ(reference::scale_of(pow2, 4), 64);   // at or below 112
  EXPECT_EQ(reference::scale_of(pow2, 3), 128);  // at or below 149.3
  EXPECT_EQ(reference::scale_of(wide, 3.5), 16384);
  EXPECT_EQ(reference::scale_of(exact, 0), 1);
  EXPECT_EQ(reference::scale_of(pow2, 0), 1);
  EXPECT_EQ(reference::greatest_magnitude(Values{1, -5, 3}), 5);
}

// 448 (1 / amax) is two roundings, and may be off by more than one.
TEST(ReferenceQuantised, AScaleMayBeMadeFromAReciprocal) {
  const reference::Quantiser q{EightBitFormat::e4m3(), false, 0x1p-24};
  double most = 0;
  for (int i = 1; i < 2000; ++i) {
    const float amax = 1 + float(i) / 997, got = 448 * (1 / amax);
    const double due = 448.0 / amax, off = std::abs(got - due);
    EXPECT_LE(off, reference::scale_error(q, due)) << amax;
    most = std::max(most, off / due);
  }
  EXPECT_GT(most, 1.01 * 0x1p-24);
}

// Just above 1.75 2^k the power of two is the next one down: the quotient is below a power of two
// and no rounding brings it there.
TEST(ReferenceQuantised, ScaleNextToAPowerOfTwo) {
  const reference::Quantiser pow2{EightBitFormat::e4m3(), true};
  EXPECT_EQ(reference::scale_of(pow2, 1.75), 256);
  EXPECT_EQ(reference::scale_of(pow2, std::nextafter(1.75, 2)), 128);
  EXPECT_EQ(reference::scale_of(pow2, std::nextafter(1.75, 1)), 256);
  for (float amax : {1.75F, std::nextafter(1.75F, 2.0F), std::nextafter(1.75F, 1.0F)}) {
    float s = 0;
    const primitives::Tensor from{&amax, primitives::Number::f32, 1, {1}, {1}, 1},
        to{&s, primitives::Number::f32, 1, {1}, {1}, 1};
    primitives::executor::launch(primitives::Scales{from, to, 448, true, false}, nullptr);
    EXPECT_EQ(s, amax > 1.75F ? 128 : 256) << amax;
  }
}

// s = 128: 1 is 128; 1/512 is 1/4; 0.0703125 = 9/128 is 9; 1.0625 is 136, a tie of 128 and 144 that
// goes to 128 (even); 1.1875 is 152, a tie of 144 and 160 that goes to 160.
TEST(ReferenceQuantised, ValuesAtAPowerOfTwoAreCertain) {
  const reference::Quantiser q{EightBitFormat::e4m3(), false, 0x1p-24};
  const auto r = reference::quantised(q, Values{3.5, -1, 1.0 / 512, 9.0 / 128, 1.0625, 1.1875, 9},
                                      Values{128}, 7);
  EXPECT_EQ(r.value, (Values{3.5, -1, 1.0 / 512, 9.0 / 128, 1, 1.25, 3.5}));
  EXPECT_EQ(r.error, Values(7, 0));
  EXPECT_EQ(r.step, Values(7, 0));
}

// s = 112: 1 is 112, a number; 1 + 1/14 is 120, a number; 1 + 1/28 is 116, the tie of the two; a
// little more is nearer to 120 than any rounding moves it.
TEST(ReferenceQuantised, ABoundaryThatIsNearLeavesTheNeighbour) {
  const double u = 0x1p-24, e = reference::gamma_of(3, u);
  const reference::Quantiser q{EightBitFormat::e4m3(), false, u};
  const double tie = 116.0 / 112;
  const Values x{
      1, tie, tie * (1 + 0.9 * e), tie * (1 - 0.9 * e), tie * (1 + 1.1 * e), tie * (1 - 1.1 * e)};
  const auto r = reference::quantised(q, x, Values{112}, 6);
  for (size_t i : {1, 2, 3}) EXPECT_DOUBLE_EQ(r.step[i], 8.0 / 112) << i;
  for (size_t i : {0, 4, 5}) EXPECT_EQ(r.step[i], 0) << i;
  for (size_t i = 0; i < x.size(); ++i)
    EXPECT_DOUBLE_EQ(r.error[i], e * (r.value[i] + r.step[i])) << i;
}

// What is greatest is certain, however coarse the arithmetic.
TEST(ReferenceQuantised, TheGreatestIsCertain) {
  for (double u : {0x1p-53, 0x1p-24, 0x1p-8})
    for (double amax : {1.0, 3.3, 0x1.fffp10}) {
      const reference::Quantiser q{EightBitFormat::e4m3(), false, u};
      const double s = reference::scale_of(q, amax);
      const auto r = reference::quantised(q, Values{amax, -amax, 7 * amax}, Values{s}, 3);
      EXPECT_EQ(r.step, Values(3, 0));
      EXPECT_EQ(r.value, (Values{448 / s, -448 / s, 448 / s}));
    }
}

// Arithmetic in float is within what is allowed of every element, in each of the forms of a scale,
// and uses the step where it is given: ties of sevenths are met from both sides.
TEST(ReferenceQuantised, FloatStaysInItsBounds) {
  const double u = 0x1p-24 + 0x1p-53;
  size_t steps = 0, crossed = 0;
  for (float amax : {5.0F, 3.0F, 11.0F, 875.0F, 0.3F}) {
    const reference::Quantiser q{EightBitFormat::e4m3(), false, u};
    const double s = reference::scale_of(q, amax);
    const Values& n = q.format.numbers();
    Values x;
    for (size_t c = 0; c + 1 < n.size(); ++c) {
      const float tie = float((n[c] + n[c + 1]) / 2 / s);
      for (float v : {tie, std::nextafter(tie, 0.0F), std::nextafter(tie, amax), float(n[c] / s)})
        x.push_back(v);
    }
    const auto r = reference::quantised(q, x, Values{s}, int64_t(x.size()));
    for (size_t i = 0; i < x.size(); ++i) {
      const float v = float(x[i]), quotient = 448 / amax, inverse = amax / 448;
      const double codes[] = {v * quotient, v / inverse, v * (1 / inverse)};
      const double in_use[] = {quotient, 1 / inverse, 1 / inverse};
      steps += r.step[i] > 0;
      for (size_t form = 0; form < 3; ++form) {
        const float number = float(n[q.format.nearest(codes[form])]),
                    y = number / float(in_use[form]);
        EXPECT_LE(std::abs(y - r.value[i]), r.error[i] + r.step[i]) << v << " " << form;
        crossed += std::abs(y - r.value[i]) > r.error[i];
      }
    }
  }
  EXPECT_GT(steps, 100);
  EXPECT_GT(crossed, 0);
}

// ---- The contract

// Rows are largest at three fifths; neither the first nor the last rank has the greatest of all.
TEST(Quantised, RanksDifferInTheirAmax) {
  const Case line = line_of("tp=4");
  const auto operands = contract().operands(line);
  Feed feed;
  feed.fill = Fill::normal;
  const std::vector<int64_t> shape{24, 10};
  const auto x = drawn_whole({line, operands[0], false, feed, DType::f64, shape});
  Values amax;
  for (size_t rank = 0; rank < 4; ++rank)
    amax.push_back(reference::greatest_magnitude(reference::In(x).subspan(rank * 60, 60)));
  EXPECT_GT(amax[2], 2 * amax[0]);
  EXPECT_GT(amax[2], 2 * amax[1]);
  EXPECT_GT(amax[2], 2 * amax[3]);
  EXPECT_NE(amax[0], amax[1]);
}

// A third of what is made lies on numbers of five bits, the rest one unit of its type beside them.
TEST(Quantised, TiesAreMetAndNearlyMet) {
  const auto x = contract().operands(line_of("scaling=pow2 ties=on"))[0].made(1);
  const reference::Quantiser q{EightBitFormat::e4m3(), true};
  const double s = reference::scale_of(q, reference::greatest_magnitude(x));
  size_t ties = 0, next = 0;
  for (double v : x) {
    const double z = std::abs(v) * s;
    const size_t code = q.format.nearest(z), near = q.format.nearest(double(float(z)));
    const Values& n = q.format.numbers();
    ties += code > 0 && code + 1 < n.size() &&
            (z == (n[code] + n[code + 1]) / 2 || z == (n[code] + n[code - 1]) / 2);
    next += near != code;
  }
  EXPECT_GT(ties, 20);
  EXPECT_GT(next, 20);
}

TEST(Quantised, HistoriesArePositiveAndGreatestWhereTheySay) {
  for (const auto& [words, at] : {std::pair{"history=4", 2}, {"history=3", 2}}) {
    const Case line = line_of(words);
    const auto values = contract().operands(line)[1].made(5);
    EXPECT_TRUE(std::ranges::all_of(values, [](double v) { return v > 0; }));
    EXPECT_EQ(std::ranges::max_element(values) - values.begin(), at) << words;
    for (double v : contract().operands(line_of(std::string(words) + " fresh=on"))[1].made(5))
      EXPECT_EQ(v, 0);
  }
}

// History (2, 7, 1) gives 448/7; the step's own amax 14 comes first, 1 is dropped; 14 s is 896 and
// saturates at 448, which is 7.
TEST(Quantised, AHistoryScalesTheStepThatFollows) {
  const Case line = line_of("history=3 tokens=1 hidden=2");
  std::vector<Gauge> gauges;
  const std::vector<Whole> in{{{1, 2}, {-14, 3.5}}, {{3}, {2, 7, 1}}};
  const auto out = contract().forward(line, in, &gauges);
  EXPECT_EQ(out[0].value, (Values{-7, 3.5}));
  EXPECT_EQ(out[1].value, (Values{64}));
  EXPECT_EQ(out[2].value, (Values{14, 2, 7}));
}

// Blocks (3.5, 1) and (0, 0): 448/3.5 and 1.
TEST(Quantised, BlocksHaveScalesOfTheirOwn) {
  const Case line = line_of("block=2 tokens=1 hidden=4");
  const std::vector<Whole> in{{{1, 4}, {3.5, 1, 0, 0}}};
  const auto out = contract().forward(line, in, nullptr);
  EXPECT_EQ(out[0].value, (Values{3.5, 1, 0, 0}));
  EXPECT_EQ(out[1].value, (Values{128, 1}));
}

// Straight through; rounded at 57344/7 = 2^13 to E5M2, where 1.1 lies between 1 and 1.25, and at 64
// to E4M3, where it lies between 1 and 1.125.
TEST(Quantised, GradientsPassOrAreRounded) {
  const std::vector<Whole> in{{{1, 2}, {-14, 3.5}}}, cot{{{1, 2}, {7, 1.1}}, {{1}, {0}}};
  const auto gradient = [&](const std::string& words) {
    return contract().backward(line_of("tokens=1 hidden=2 " + words), in, cot, nullptr)[0].value;
  };
  EXPECT_EQ(gradient(""), (Values{7, 1.1}));
  EXPECT_EQ(gradient("output=shard grad_format=e5m2"), (Values{7, 1}));
  EXPECT_EQ(gradient("output=shard grad_format=e4m3"), (Values{7, 1.125}));
}

// Nothing is allowed where every step is exact, something where a quotient rounds.
TEST(Quantised, PowersOfTwoAreExact) {
  const auto gauges_of = [](const std::string& words, const Values& x) {
    std::vector<Gauge> gauges;
    const std::vector<Whole> in{{{1, int64_t(x.size())}, x}};
    contract().forward(line_of("tokens=1 hidden=" + std::to_string(x.size()) + " " + words), in,
                       &gauges);
    return gauges;
  };
  for (const Gauge& g : gauges_of("scaling=pow2 dtype=bf16", {3, 1.0625, -0.01}))
    EXPECT_TRUE(g.bound.empty() && g.magnitude.empty() && g.step.empty());
  for (const Gauge& g : gauges_of("dtype=f32", {3, 1.0625, -0.01})) EXPECT_FALSE(g.bound.empty());
  for (const Gauge& g : gauges_of("dtype=f32", {7, 1.0625, -0.01})) EXPECT_TRUE(g.bound.empty());
}

TEST(Quantised, TrafficByHand) {
  const auto due = [](const std::string& words) {
    std::vector<std::tuple<Op, std::string, bool, int64_t, DType>> list;
    for (const Traffic& t : contract().traffic(line_of(words), "", 0))
      list.emplace_back(t.op, t.label, t.backward, t.count, t.dtype);
    return list;
  };
  using List = decltype(due(""));
  // 24 x 10 over 8 ranks: 30 codes in 8 words.
  EXPECT_EQ(due("tp=8 dtype=bf16"), (List{{Op::all_reduce, "tp", false, 1, DType::f32},
                                          {Op::all_gather, "tp", false, 8, DType::i32},
                                          {Op::reduce_scatter, "tp", true, 240, DType::bf16}}));
  EXPECT_EQ(due("tp=2 block=5 output=invariant grad_format=e5m2"),
            (List{{Op::all_gather, "tp", false, 30, DType::i32},
                  {Op::all_gather, "tp", false, 24, DType::f64}}));
  EXPECT_EQ(due("tp=2 dp=2 output=shard grad_format=e5m2"),
            (List{{Op::all_reduce, "tp,dp", false, 1, DType::f64},
                  {Op::all_reduce, "tp,dp", true, 1, DType::f64}}));
  EXPECT_EQ(due(""), List{});
}

// The step is allowed whatever else is, in no unit, and the neighbour is rounded when it is stored:
// with 1 due and 1 + d as right, half a unit of the type beyond 1 + d is within the bound.
TEST(Quantised, AStepIsAllowedBesideTheBound) {
  for (const auto& [type, u] : {std::pair{"f32", 0x1p-24}, {"bf16", 0x1p-8}}) {
    const Case line = line_of(std::string("tp=2 dtype=") + type);
    Evidence e;
    e.line = &line, e.contract = &contract(), e.mesh = line.mesh();
    e.operands = contract().operands(line);
    Feed feed;
    feed.fill = Fill::normal;
    const double d = 0.125;
    const Whole want{{2}, {1, 1}};
    Gauge without, with;
    without.bound = with.bound = {3, 3};
    with.step = {0, d};
    const auto plain = bound_of(e, feed, e.operands[1], false, want, without),
               stepped = bound_of(e, feed, e.operands[1], false, want, with);
    EXPECT_EQ(stepped(0), plain(0));
    EXPECT_DOUBLE_EQ(stepped(1), plain(1) + (1 + u) * d);
    EXPECT_GE(stepped(1), d + u * (1 + d));
  }
}

}  // namespace quantised_test
}  // namespace
}  // namespace shardproof
