// Norms and replicated parameters before any rank runs: numbers that can be followed by hand,
// derivatives of the block by differences, running errors against float, layouts of shared key
// heads, traffic in closed form, known answers of the generator behind masks.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <set>

#include "fixtures/random.hpp"
#include "fixtures/sharding.hpp"
#include "oracle/checks/draws.hpp"
#include "oracle/drawn.hpp"
#include "oracle/registry.hpp"
#include "oracle/run.hpp"
#include "primitives/philox.hpp"
#include "primitives/replicated_layers.hpp"
#include "reference/block.hpp"
#include "reference/norm.hpp"
#include "reference/replicated.hpp"

namespace shardproof {

void family_norm(Registry&);
void family_replicated(Registry&);
void family_block(Registry&);
void controls_norm(Registry&);
void controls_replicated(Registry&);
void controls_block(Registry&);

namespace {
namespace norm_test {

using reference::Values;
using Shape = std::vector<int64_t>;

const Registry& registry() {
  static const Registry r = [] {
    Registry all;
    family_norm(all), family_replicated(all), family_block(all);
    controls_norm(all), controls_replicated(all), controls_block(all);
    return all;
  }();
  return r;
}

Case line_of(const std::string& text) { return parse(text, registry()); }
const Contract& contract_of(const Case& line) { return registry().contract(line.contract); }

Operand operand(const std::string& text, const std::string& name) {
  const Case line = line_of(text);
  for (const Operand& o : contract_of(line).operands(line))
    if (o.name == name) return o;
  ADD_FAILURE() << text << " has no operand " << name;
  return {};
}

Values normals(size_t n, const char* name) {
  const Stream123 stream(1, name);
  Values v(n);
  for (size_t i = 0; i < n; ++i) v[i] = stream.normal(i);
  return v;
}

// ---- What the block draws

// 1 / keep where the word of the element says so, else 0 (Philox, counter (i / 4, site, draw)).
double mask(const Case& line, uint32_t site, uint32_t draw, size_t i) {
  const double keep = 1 - std::stod(line.text("dropout"));
  const auto words = philox({uint32_t(i / 4), 0, site, draw}, {uint32_t(line.seed()), 0});
  return words[i % 4] < keep * 0x1p32 ? 1 / keep : 0;
}

// On the inputs of a look, y = 1 + mask, whatever the norm; without beta norm2(1) is 1/sqrt(1 +
// eps).
TEST(BlockDraws, AreSeenInTheOutput) {
  for (const char* text : {"block tp=2 sp=on seed=5", "block tp=2 sp=on norm=rms draw=3",
                           "block tp=4 dp=2 sp=on dropout=0.5 activation=silu"}) {
    const Case line = line_of(text);
    const Contract& c = contract_of(line);
    const auto operands = c.operands(line);
    const auto looks = looks_at_draws(c, line);
    ASSERT_EQ(looks.size(), 2u);
    for (uint32_t site : {1u, 2u})
      for (int k : {0, 2}) {
        const Feed feed = feed_of_draw(c, line, looks[site - 1], k, Feed{});
        std::vector<Whole> in;
        for (size_t i = 0; i + 1 < operands.size(); ++i) {
          ASSERT_EQ(feed.given.at(i).operand, int(i)) << "an input that the look leaves open";
          in.push_back({operands[i].shape, feed.given[i].value});
        }
        Case drawn = line;
        for (const auto& [key, value] : feed.keys) drawn.set(key, value);
        const uint32_t draw = uint32_t(line.at("draw") + k);
        const auto y = c.forward(drawn, in, nullptr).at(0).value;
        for (size_t i = 0; i < y.size(); ++i)
          ASSERT_NEAR(y[i], 1 + mask(line, site, draw, i), 2e-5) << text << " " << site << " " << i;
      }
  }
}

// 20 elements of a fair mask on a rank, 6 pairs of 4 shards and 2 masks: 60 + log2(12) = 63.6 bits
// are due, so 4 draws. 3 elements are 48 bits in the 16 draws that are the most.
TEST(BlockDraws, AreAsManyAsMakeAClashByChanceUnlikely) {
  const auto look = [](const std::string& text) {
    const Case line = line_of("block " + text);
    const auto looks = looks_at_draws(contract_of(line), line);
    return looks.empty() ? Look{} : looks[0];
  };
  const Look four = look("tp=4 sp=on tokens=8 dropout=0.5");
  EXPECT_EQ(four.times, 4);
  EXPECT_DOUBLE_EQ(four.bits, 80);
  EXPECT_TRUE(four.judges_shards());
  EXPECT_EQ(four.shards, std::vector<Axis>{Axis::tp});
  // A tenth dropped: -log2(0.9^2 + 0.1^2) = 0.28630 bits.
  EXPECT_NEAR(look("tp=2 sp=on tokens=200").drawn.bits, 0.28630, 1e-5);
  const Look few = look("tp=4 sp=on tokens=4 hidden=3 dropout=0.5");
  EXPECT_FALSE(few.judges_shards());
  EXPECT_EQ(few.times, 1);
  EXPECT_EQ(few.not_judged,
            "not applicable: 16 draws of 3 elements are equal by chance with 2^-48, and 2^-63.6 is "
            "due");
  const Look copies = look("tp=2 dp=2");
  EXPECT_EQ(copies.copies, std::vector<Axis>{Axis::tp});
  EXPECT_EQ(copies.shards, std::vector<Axis>{Axis::dp});
  EXPECT_EQ(look("tp=2 sp=on dropout=0").operand, -1) << "nothing is drawn";
  EXPECT_EQ(look("sp=on").operand, -1) << "there is one rank";
}

TEST(BlockDraws, GoOnFromTheLinesOwnAndWrapAtTheEnd) {
  const Case line = line_of("block tp=2 sp=on draw=4294967294");
  std::vector<std::string> numbers;
  for (int k = 0; k < 3; ++k) numbers.push_back(draw_keys(contract_of(line), line, k).at(0).second);
  EXPECT_EQ(numbers, (std::vector<std::string>{"4294967294", "4294967295", "0"}));
}

// ---- Lines

TEST(ReplicatedLines, OfEveryTierAreLegalAndDistinct) {
  for (const std::string tier : {"smoke", "ci", "nightly"})
    for (const Contract& c : registry().contracts()) {
      std::set<std::string> seen;
      for (const std::string& text : c.cases(tier)) {
        const Case line = line_of(text);
        EXPECT_FALSE(c.precondition(line)) << text;
        EXPECT_TRUE(seen.insert(print_canonical(line)).second) << text;
      }
    }
}

TEST(ReplicatedLines, IllegalOnesAreRefusedAndWitnessesAreLegal) {
  for (const Contract& c : registry().contracts()) {
    for (const std::string& text : c.illegal) EXPECT_TRUE(c.precondition(line_of(text))) << text;
    for (const std::string& text : c.witnesses) EXPECT_FALSE(c.precondition(line_of(text))) << text;
  }
  for (const Control& c : registry().controls())
    EXPECT_FALSE(registry().contract(c.contract).precondition(line_of(c.witness))) << c.name;
}

// ---- Shared key heads: tp = kv x rep

TEST(SharedKeyHeads, FourRanksTwoHeads) {
  const Mesh mesh = line_of("replicated_qkv tp=4 kv_heads=2").mesh();
  EXPECT_EQ(mesh.size(Axis::kv), 2);
  EXPECT_EQ(mesh.size(Axis::rep), 2);
  EXPECT_EQ(mesh.groups({Axis::rep}), (std::vector<std::vector<int>>{{0, 1}, {2, 3}}));
  EXPECT_EQ(mesh.groups({Axis::kv}), (std::vector<std::vector<int>>{{0, 2}, {1, 3}}));
  // wk [2*6, 10]: the rows of head 0 on ranks 0 and 1, those of head 1 on ranks 2 and 3.
  const Operand wk = operand("replicated_qkv tp=4 kv_heads=2", "wk");
  for (int r = 0; r < 4; ++r) {
    EXPECT_EQ(local_shape(wk.shape, wk.layout, mesh, r), (Shape{6, 10}));
    EXPECT_EQ(whole_indices(wk.shape, wk.layout, mesh, r)[0], r / 2 * 60);
  }
  EXPECT_EQ(pairing_weight(wk.layout, mesh), 0.5);  // 1/rep
  EXPECT_EQ(whole_shape(wk.shape, wk.layout, mesh), (Shape{12, 10}));
}

TEST(SharedKeyHeads, CotangentsOfTheirUsersAreParts) {
  const Mesh mesh = line_of("replicated_qkv tp=4 kv_heads=2").mesh();
  const Operand k = operand("replicated_qkv tp=4 kv_heads=2", "k");
  // One part a rank of rep, then [tokens, 2 heads of 6].
  EXPECT_EQ(whole_shape(k.shape, dual(k.layout), mesh), (Shape{2, 24, 12}));
  EXPECT_EQ(denoted_shape(k.shape, dual(k.layout), mesh), (Shape{24, 12}));
  EXPECT_EQ(whole_indices(k.shape, dual(k.layout), mesh, 3)[0], 24 * 12 + 6);
}

TEST(SharedKeyHeads, WithEnoughHeadsNothingIsShared) {
  for (const char* line : {"replicated_qkv tp=2 kv_heads=4", "replicated_qkv tp=4 kv_heads=4"})
    EXPECT_EQ(line_of(line).at("kv_replicas"), 1) << line;
  EXPECT_EQ(line_of("replicated_qkv tp=8 kv_heads=1").at("kv_replicas"), 8);
}

// Also for more axes: tp=4 dp=2 in the order dp,tp: ranks 0, 2, 4, 6 are tp 0 .. 3 of dp 0.
TEST(SharedKeyHeads, TheMeshIsSplitInAnyOrder) {
  const Mesh mesh = line_of("replicated_qkv tp=4 dp=2 kv_heads=2 order=dp,tp").mesh();
  EXPECT_EQ(mesh.group({Axis::rep}, 0), (std::vector<int>{0, 2}));
  EXPECT_EQ(mesh.group({Axis::rep}, 7), (std::vector<int>{5, 7}));
  EXPECT_EQ(mesh.group({Axis::kv}, 3), (std::vector<int>{3, 7}));
  EXPECT_THROW(Mesh({{Axis::tp, 4}}).split_tp(3), std::invalid_argument);
}

TEST(SharedKeyHeads, FusedRowsGoGroupByGroup) {
  // 4 query heads, 2 key heads, 1 value each: Q 0..3, K 4 5, V 6 7.
  EXPECT_EQ(reference::grouped_rows({1, 1, 4, 2, 1}), (Shape{0, 1, 4, 6, 2, 3, 5, 7}));
  EXPECT_THROW(reference::grouped_rows({1, 1, 4, 3, 1}), std::invalid_argument);
}

// ---- Norm of all gradients

TEST(GlobalNorm, ThreeFourFive) {
  const Values a{3}, b{0, 4};
  EXPECT_EQ(reference::global_norm({a, b}), 5);
  EXPECT_EQ(reference::clip_factor(5, 10), 1);
  EXPECT_NEAR(reference::clip_factor(5, 1), 0.2, 1e-7);
}

// ---- The block

reference::BlockShape small_block(bool centred) {
  reference::BlockShape s;
  s.tokens = 3, s.hidden = 4, s.ffn = 5;
  s.activation = reference::Activation::silu;
  s.norm = {4, 1e-5, centred};
  return s;
}

struct BlockData {
  Values x = normals(12, "x"), gamma1 = normals(4, "g1"), beta1 = normals(4, "be1"),
         w1 = normals(20, "w1"), b1 = normals(5, "b1"), w2 = normals(20, "w2"),
         b2 = normals(4, "b2"), gamma2 = normals(4, "g2"), beta2 = normals(4, "be2"),
         dropout1 = {0, 2, 2, 0, 2, 2, 0, 2, 2, 2, 0, 2},
         dropout2 = {2, 0, 2, 2, 2, 0, 2, 2, 0, 2, 2, 2};
  reference::BlockInputs inputs(bool centred) const {
    reference::BlockInputs in{x, gamma1, beta1, w1, b1, w2, b2, gamma2, beta2, dropout1, dropout2};
    if (!centred) in.beta1 = in.beta2 = {};
    return in;
  }
};

TEST(ReferenceBlock, WithoutWeightsOnlyTheSecondNormIsLeft) {
  BlockData d;
  std::fill(d.w2.begin(), d.w2.end(), 0.0);
  std::fill(d.b2.begin(), d.b2.end(), 0.0);
  std::fill(d.dropout2.begin(), d.dropout2.end(), 1.0);
  const Values y = reference::block(small_block(true), d.inputs(true)),
               n = reference::layer_norm(d.x, d.gamma2, d.beta2, 4, 1e-5);
  for (size_t i = 0; i < y.size(); ++i) EXPECT_NEAR(y[i], d.x[i] + n[i], 1e-15);
}

// Fourth-order differences of <g, block> in every element of every argument.
TEST(ReferenceBlock, GradientsAreTheDerivatives) {
  for (const bool centred : {true, false}) {
    BlockData d;
    const auto s = small_block(centred);
    const Values g = normals(12, "g");
    const auto grads = reference::block_backward(s, d.inputs(centred), g);
    auto phi = [&] {
      const Values y = reference::block(s, d.inputs(centred));
      double sum = 0;
      for (size_t i = 0; i < y.size(); ++i) sum += g[i] * y[i];
      return sum;
    };
    auto check = [&](Values& x, const Values& gradient, const char* what) {
      ASSERT_EQ(x.size(), gradient.size()) << what;
      for (size_t i = 0; i < x.size(); ++i) {
        const double at = x[i], h = 1e-3;
        auto moved = [&](double t) {
          x[i] = at + t;
          const double v = phi();
          x[i] = at;
          return v;
        };
        const double slope =
            (8 * (moved(h) - moved(-h)) - (moved(2 * h) - moved(-2 * h))) / (12 * h);
        EXPECT_NEAR(gradient[i], slope, 1e-8 * std::max(1.0, std::abs(slope))) << what << i;
      }
    };
    check(d.x, grads.x, "x"), check(d.gamma1, grads.gamma1, "gamma1"), check(d.w1, grads.w1, "w1");
    check(d.b1, grads.b1, "b1"), check(d.w2, grads.w2, "w2"), check(d.b2, grads.b2, "b2");
    check(d.gamma2, grads.gamma2, "gamma2");
    if (centred) check(d.beta1, grads.beta1, "beta1"), check(d.beta2, grads.beta2, "beta2");
  }
}

// ---- Running errors

reference::Rounding float_rounding() {
  reference::Rounding r;
  r.accumulate = 0x1p-24 + 0x1p-53;
  return r;
}

// Layer norm in float, in two passes and as mean x^2 - mean^2: both within the bound, which is no
// more than a thousand roundings of the largest value.
TEST(RunningError, OfANormHoldsForBothFormulasOfTheVariance) {
  const size_t n = 33;
  Values x = normals(40 * n, "x"), gamma = normals(n, "gamma"), beta = normals(n, "beta");
  for (Values* v : {&x, &gamma, &beta})
    for (double& e : *v) e = double(float(e));
  for (double& e : x) e = double(float(e + 1.5));
  const auto y = reference::norm({int64_t(n), 1e-5, true}, reference::certain(x), gamma, beta,
                                 float_rounding());
  const Values exact = reference::layer_norm(x, gamma, beta, int64_t(n), 1e-5);
  double worst = 0;
  for (const bool two_passes : {true, false})
    for (size_t t = 0; t < 40; ++t) {
      float mean = 0, square = 0;
      for (size_t j = 0; j < n; ++j) mean += float(x[t * n + j]) / float(n);
      for (size_t j = 0; j < n; ++j) {
        const float c = float(x[t * n + j]) - (two_passes ? mean : 0.0f);
        square += c * c;
      }
      const float variance = square / float(n) - (two_passes ? 0.0f : mean * mean);
      const float inverse = 1 / std::sqrt(variance + 1e-5f);
      for (size_t j = 0; j < n; ++j) {
        const size_t i = t * n + j;
        const float got = float(gamma[j]) * ((float(x[i]) - mean) * inverse) + float(beta[j]);
        EXPECT_NEAR(y.value[i], exact[i], 1e-12);
        const double off = std::abs(double(got) - exact[i]);
        EXPECT_LE(off, y.error[i]) << i;
        EXPECT_LE(y.error[i], 1000 * 0x1p-24 * (std::abs(exact[i]) + std::abs(gamma[j]) + 1));
        worst = std::max(worst, off / y.error[i]);
      }
    }
  EXPECT_GT(worst, 1e-3);
}

// The statistics of a part of a row, in float.
struct Part {
  float n = 0, mean = 0, squares = 0;
};
Part part_of(const double* x, size_t n, float mean_of_all) {
  Part p{float(n), mean_of_all, 0};
  for (size_t j = 0; j < n; ++j) {
    const float c = float(x[j]) - mean_of_all;
    p.squares += c * c;
  }
  return p;
}
// Chan, Golub and LeVeque's update, and the form that weighs both means.
Part merged(const Part& a, const Part& b, bool weighs) {
  const float n = a.n + b.n, d = b.mean - a.mean;
  const float mean = weighs ? a.mean * (a.n / n) + b.mean * (b.n / n) : a.mean + d * b.n / n;
  return {n, mean, a.squares + b.squares + d * d * a.n * b.n / n};
}
Part in_halves(const double* x, size_t n, bool weighs) {
  if (n == 1) return {1, float(*x), 0};
  return merged(in_halves(x, n / 2, weighs), in_halves(x + n / 2, n - n / 2, weighs), weighs);
}
Part one_by_one(const double* x, size_t n) {  // Welford
  Part p;
  for (size_t j = 0; j < n; ++j) {
    p.n += 1;
    const float d = float(x[j]) - p.mean;
    p.mean += d / p.n;
    p.squares += d * (float(x[j]) - p.mean);
  }
  return p;
}
float plain_mean(const double* x, size_t n) {
  float sum = 0;
  for (size_t j = 0; j < n; ++j) sum += float(x[j]);
  return sum / float(n);
}

// A mean of 2^12 beside a deviation of 1: every way that centres the values is within the bound,
// the one that does not is far beyond it.
TEST(RunningError, OfANormOnOffsetDataHoldsForCentredFormulasAlone) {
  const std::function<Part(const double*, size_t)> ways[] = {
      [](const double* x, size_t n) { return part_of(x, n, plain_mean(x, n)); }, one_by_one,
      [](const double* x, size_t n) { return in_halves(x, n, false); },
      [](const double* x, size_t n) { return in_halves(x, n, true); },
      [](const double* x, size_t n) {
        const float mean = plain_mean(x, n);
        const Part p = part_of(x, n, 0);
        return Part{float(n), mean, std::max(0.0f, p.squares - float(n) * mean * mean)};
      }};
  for (const size_t n : {2, 3, 10, 33, 130}) {
    const Values gamma(n, 1.0), beta(n, 0.0);
    Values x = normals(40 * n, "x");
    for (double& e : x) e = double(float(e + 4096));
    const auto y = reference::norm({int64_t(n), 1e-5, true, /*uncentred_variance=*/false},
                                   reference::certain(x), gamma, beta, float_rounding());
    for (const auto& way : ways) {
      const bool centred = &way != &ways[4];
      double worst = 0;
      for (size_t t = 0; t < 40; ++t) {
        const Part p = way(&x[t * n], n);
        const float inverse = 1 / std::sqrt(p.squares / float(n) + 1e-5f);
        for (size_t i = t * n; i < (t + 1) * n; ++i) {
          const float got = (float(x[i]) - p.mean) * inverse;
          worst = std::max(worst, std::abs(double(got) - y.value[i]) / y.error[i]);
        }
      }
      if (centred)
        EXPECT_LE(worst, 1) << "way " << &way - ways << " of n = " << n;
      else
        EXPECT_GT(worst, 10) << "n = " << n;
    }
  }
}

// ---- Roundings that conspire
//
// The model allows each operation an error of u of its result, of either sign. Where all of them
// push one way an error comes near its bound: a bound that lacks the term which covers it fails,
// and one that is wider than it has to be is far from every error.
struct Conspiring {
  double u;
  double operator()(double exact) const { return exact * (1 + u); }
  double sum(const Values& v) const {
    double s = v[0];
    for (size_t j = 1; j < v.size(); ++j) s = (*this)(s + v[j]);
    return s;
  }
  double squares(Values v) const {
    for (double& e : v) e = (*this)(e * e);
    return sum(v);
  }
  // One value after the other, both means weighed: three roundings of each summand.
  double merged_mean(const Values& v) const {
    const auto& r = *this;
    double mean = v[0];
    for (size_t j = 1; j < v.size(); ++j) {
      const double k = double(j);
      mean = r(r(mean * r(k / (k + 1))) + r(v[j] * r(1 / (k + 1))));
    }
    return mean;
  }
};

constexpr double no_eps = 1e-30;

// So fine that products of errors do not count, and double counts as exact.
reference::Rounding fine_rounding() {
  reference::Rounding r;
  r.accumulate = 0x1p-40;
  return r;
}
const double fine = fine_rounding().accumulate;

// The error of one element of a norm without weights, over its bound.
double share_of_bound(const reference::NormShape& s, const Values& x, size_t at, double got) {
  const Values ones(x.size(), 1.0), zeros(x.size(), 0.0);
  const auto y = reference::norm(s, reference::certain(x), ones, zeros, fine_rounding());
  return std::abs(got - y.value[at]) / y.error[at];
}

// Two halves with the means M -+ d/2, each a chain of n/2 that rounds away from the other and is
// off by e' = 3/4 n u M: half of e = 3/2 n u M, what a mean is allowed. They are merged at last,
// with w = n/4 and d = sqrt(2) sigma, half of S = n sigma^2: S is off by 2 w d (2 e'). Two values
// hold the other half, |xhat| = sqrt(n)/2, and err by sqrt(n)/2 (2 w d e / S) / 2 = sqrt(2 n)/8
// e / sigma. The mean alone is allowed e / sigma; merging |xhat| 4 e sqrt(W S) / (2 S) = sqrt(n
// log2 n)/2 e / sigma, sqrt(8 log2 n) times the error.
TEST(RunningError, OfMergedPartsIsMoreThanThatOfTheMean) {
  const size_t n = 1024;
  const double M = 4096, far = std::sqrt(double(n)) / 2, d = std::sqrt(2.0);
  Values low(n / 2, M - d / 2);
  const Values high(n / 2, M + d / 2);
  low[0] += far, low[1] -= far;
  Values x = low;
  x.insert(x.end(), high.begin(), high.end());
  const double apart = Conspiring{fine}.merged_mean(high) - Conspiring{-fine}.merged_mean(low);
  const double squares = 2 * far * far + apart * apart * double(n) / 4;
  const double share = share_of_bound({int64_t(n), no_eps, true, /*uncentred_variance=*/false}, x,
                                      0, (x[0] - M) / std::sqrt(squares / double(n)));
  EXPECT_LE(share, 1);
  EXPECT_GT(share, 0.9 / std::sqrt(8 * std::log2(double(n))));
}

// mean x^2 above, mean^2 below: n/2 u of the one and n u of the other, out of 2 (n + 4) u of each.
TEST(RunningError, OfAnUncentredVarianceIsNearlyReached) {
  const size_t n = 64;
  Values x(n, 63);
  std::fill(x.begin() + n / 2, x.end(), 65);
  const double mean = Conspiring{-fine}.sum(x) / double(n);
  const double variance = Conspiring{fine}.squares(x) / double(n) - mean * mean;
  const double share = share_of_bound({int64_t(n), no_eps}, x, 0, -1 / std::sqrt(variance));
  EXPECT_LE(share, 1);
  EXPECT_GT(share, 0.6);
}

// A sum that begins with what is by far its largest term takes every rounding in full.
Values one_first(size_t n) {
  Values v(n, 0x1p-20);
  v[0] = 1;
  return v;
}

// Squares and their n - 1 additions that all round up are off by n u, out of (n + 4) u.
TEST(RunningError, OfAnRmsNormIsReached) {
  const size_t n = 512;
  const Values x = one_first(n);
  const double squares = Conspiring{fine}.squares(x);
  const double share = share_of_bound({int64_t(n), no_eps, /*centred=*/false}, x, 0,
                                      x[0] / std::sqrt(squares / double(n)));
  EXPECT_LE(share, 1);
  EXPECT_GT(share, 0.9);
}

// With t = xhat the two terms of dx cancel. Squares that round down make each xhat n/2 u too large,
// m = mean(t xhat) as much and n u for its own sum, and dx = (t - xhat m) / rms off by 2 n u.
TEST(RunningError, OfTheGradientOfAnRmsNormIsReached) {
  const size_t n = 512;
  const Values x = one_first(n), ones(n, 1.0);
  const reference::NormShape s{int64_t(n), no_eps, /*centred=*/false};
  const double inverse = 1 / std::sqrt(Conspiring{-fine}.squares(x) / double(n)),
               exact = 1 / std::sqrt(Conspiring{0}.squares(x) / double(n));
  Values t(n), products(n);
  for (size_t j = 0; j < n; ++j) t[j] = x[j] * exact, products[j] = t[j] * x[j] * inverse;
  const double along = Conspiring{fine}.sum(products) / double(n);
  const auto d = reference::norm_backward_loss(s, reference::certain(x), ones,
                                               reference::certain(t), fine_rounding());
  const double got = (t[0] - x[0] * inverse * along) * inverse;
  const double share = std::abs(got - d.x.value[0]) / d.x.error[0];
  EXPECT_LE(share, 1);
  EXPECT_GT(share, 0.9);
}

// Gradients of the weights are sums over the rows: off by n u, out of (rows + 1) u.
TEST(RunningError, OfTheGradientOfWeightsIsReached) {
  const size_t rows = 512;
  const Values x(rows, 3.0), g = one_first(rows), gamma(1, 1.0);
  const double off = Conspiring{fine}.sum(g) - Conspiring{0}.sum(g);
  const auto d =
      reference::norm_backward_loss({1, no_eps, /*centred=*/false}, reference::certain(x), gamma,
                                    reference::certain(g), fine_rounding());
  for (const reference::Loss* loss : {&d.gamma, &d.beta}) {
    EXPECT_LE(off / loss->error[0], 1);
    EXPECT_GT(off / loss->error[0], 0.9);
  }
}

// Activations have a mean far from zero, and nothing else has.
TEST(Offset, IsOfInputsAlone) {
  const Case line = line_of("norm_sequence tp=2 sp=on dtype=f32 fill=offset");
  Feed feed;
  feed.fill = fill_of(line);
  const auto mean_of = [&](const char* name, bool cotangent) {
    const Operand o = operand(print(line), name);
    double sum = 0;
    for (double v : drawn_whole({line, o, cotangent, feed, DType::f32, o.shape})) sum += v;
    return sum / double(product(o.shape));
  };
  EXPECT_NEAR(mean_of("x", false), 4096, 0.5);  // 240 normal numbers: a deviation of 0.065
  EXPECT_NEAR(mean_of("gamma", false), 0, 2);   // 10
  EXPECT_NEAR(mean_of("y", true), 0, 0.5);
}

TEST(RunningError, OfAKnownSumIsTheTextbookOne) {
  // One row, K = 4 terms of size 1, no bias: gamma_5 sum |a||b|.
  reference::Rounding r = float_rounding();
  const Values one(4, 1.0);
  const auto loss = reference::linear_loss({1, 4, 1}, reference::certain(one), one, {}, r);
  EXPECT_DOUBLE_EQ(loss.error[0], reference::gamma_of(5, r.accumulate) * 4);
  r.ranks = 2, r.wire = 0x1p-8;  // two parts in bf16: 2 u (4 + error)
  const auto sent = reference::reduced(loss, r);
  EXPECT_DOUBLE_EQ(sent.error[0], loss.error[0] + 2 * 0x1p-8 * (4 + loss.error[0]));
}

// n u / (1 - n u) says nothing from n u = 1 on: it would be negative, and each right value a
// failure.
TEST(RunningError, OfSumsAsLongAsOneOverUIsUnbounded) {
  EXPECT_EQ(reference::gamma_of(255, 0x1p-8), 255);
  for (double n : {256.0, 257.0, 1024.0}) EXPECT_TRUE(std::isinf(reference::gamma_of(n, 0x1p-8)));
}

// Tokens without a loss: the first half of dim 0 in each of the stacked parts, of cotangents alone.
TEST(SilentHalf, IsOfCotangentsInEveryPart) {
  const Case line = line_of("norm_sequence tp=2 sp=on");
  Feed feed;
  feed.fill = Fill::integers, feed.silent_half = true;
  const Operand o{"y", Operand::output, {6, 2}, {{Axis::tp, R()}}};  // cotangents are parts
  const Shape whole{2, 6, 2};
  const auto of_cotangent = drawn_whole({line, o, /*cotangent=*/true, feed, DType::f64, whole});
  for (size_t i = 0; i < 24; ++i) EXPECT_EQ(of_cotangent[i] == 0, i / 2 % 6 < 3) << i;
  for (double v : drawn_whole({line, o, /*cotangent=*/false, feed, DType::f64, whole}))
    EXPECT_NE(v, 0);
}

// An expand over tokens: rows repeat, features differ.
TEST(Expanded, InputsRepeatAlongTheLastDimButOne) {
  const Case line = line_of("norm_sequence tp=2 strides=expanded_inputs");
  Feed feed;
  feed.fill = Fill::normal;
  const Operand o{"x", Operand::input, {2, 3, 4}, {}};
  const auto x = drawn_whole({line, o, /*cotangent=*/false, feed, DType::f64, Shape{2, 3, 4}});
  for (size_t i = 0; i < 24; ++i) EXPECT_EQ(x[i], x[i / 12 * 12 + i % 4]) << i;
  EXPECT_EQ(std::set<double>(x.begin(), x.end()).size(), 8u);
}

// ---- Traffic in closed form

int64_t elements(const std::string& text, Op op, bool backward, const std::string& label) {
  const Case line = line_of(text);
  int64_t n = 0;
  for (const Traffic& t : contract_of(line).traffic(line, "", 0))
    if (t.op == op && t.backward == backward && t.label == label) n += t.count;
  return n;
}
size_t calls(const std::string& text) {
  const Case line = line_of(text);
  return contract_of(line).traffic(line, "", 0).size();
}

TEST(ReplicatedTraffic, OneCoalescedCall) {
  EXPECT_EQ(calls("norm_sequence tp=4 sp=on"), 1u);
  EXPECT_EQ(elements("norm_sequence tp=4 sp=on", Op::all_reduce, true, "tp"), 20);
  EXPECT_EQ(elements("norm_sequence tp=4 sp=on norm=rms", Op::all_reduce, true, "tp"), 10);
  EXPECT_EQ(elements("norm_sequence tp=2 cp=2 dp=2 sp=on", Op::all_reduce, true, "tp,cp,dp"), 20);
  EXPECT_EQ(elements("norm_sequence tp=2 dp=2 sp=on reduce=tp", Op::all_reduce, true, "tp"), 20);
  EXPECT_EQ(calls("norm_sequence tp=4"), 0u);  // whole on every rank: nothing is summed
  EXPECT_EQ(calls("norm_sequence"), 0u);
  // Both norms and b2 of the block: 5 h.
  EXPECT_EQ(elements("block tp=2 sp=on", Op::all_reduce, true, "tp"), 50);
}

TEST(ReplicatedTraffic, OfKeyHeadsGoesOverTheRanksThatShareThem) {
  // wk and wv of one head of 6 rows and 10 columns.
  EXPECT_EQ(elements("replicated_qkv tp=4 kv_heads=2", Op::all_reduce, true, "rep"), 2 * 6 * 10);
  EXPECT_EQ(elements("replicated_qkv tp=4 kv_heads=4", Op::all_reduce, true, "rep"), 0);
  // form=gather: T (n_h + 2 n_g) d forward and backward.
  const std::string gather = "replicated_qkv tp=4 kv_heads=2 form=gather";
  EXPECT_EQ(elements(gather, Op::all_gather, false, "tp") * 4, 24 * 12 * 6);
  EXPECT_EQ(elements(gather, Op::reduce_scatter, true, "tp"), 24 * 12 * 6);
}

// ---- Masks

// Random123's known answers of Philox4x32-10 (kat_vectors), for the primitives' own generator.
TEST(PrimitivesPhilox, KnownAnswers) {
  using primitives::philox4x32;
  using Words = std::array<uint32_t, 4>;
  EXPECT_EQ(philox4x32({0, 0, 0, 0}, {0, 0}),
            (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  const uint32_t ones = 0xffffffff;
  EXPECT_EQ(philox4x32({ones, ones, ones, ones}, {ones, ones}),
            (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(PrimitivesPhilox, WordsFollowTheIndex) {
  const auto block = primitives::philox4x32({2, 0, 7, 9}, {5, 0});
  for (uint64_t i = 8; i < 12; ++i) EXPECT_EQ(primitives::word_of(5, i, 7, 9), block[i - 8]);
  EXPECT_EQ(primitives::word_of(5, uint64_t(4) << 32, 0, 0),
            primitives::philox4x32({0, 1, 0, 0}, {5, 0})[0]);
}

}  // namespace norm_test
}  // namespace
}  // namespace shardproof
