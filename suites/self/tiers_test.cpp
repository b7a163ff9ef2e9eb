// The statistical bounds against real dot products: several orders of summation in f32 and in bf16
// over f32, lengths up to 16,384. And where they do not hold: truncation, constant data.
#include <gtest/gtest.h>

#include <cfenv>
#include <cmath>

#include "fixtures/random.hpp"
#include "suites/self/toy_evidence.hpp"

namespace shardproof {
namespace {
namespace tiers_test {

using namespace toy;

struct Setting {
  Registry registry;
  Case line;
  Contract c;
  Evidence e;
  Feed feed;
  explicit Setting(const std::string& keys, Placement to = I())
      : c(contract({4}, on_tp(P()), on_tp(to))) {
    registry.add(c);
    line = parse("toy " + keys, registry);
    e.line = &line;
    e.contract = &c;
    e.mesh = line.mesh();
    e.operands = c.operands(line);
    e.inputs = 1;
    feed.fill = fill_of(line);
  }
  Setting(const Setting&) = delete;
  double bound(double want, const Gauge& g) const {
    const Whole w{{1}, {want}};
    return bound_of(e, feed, e.operands[1], false, w, g)(0);
  }
  bool has_scale(const Gauge& g) const {
    return bool(scale_of(e, feed, e.operands[1], false, {{1}, {1.0}}, g));
  }
  double scale(double want, const Gauge& g) const {
    const Whole w{{1}, {want}};
    return scale_of(e, feed, e.operands[1], false, w, g)(0);
  }
};

struct Terms {
  std::vector<float> a, b;
  double value = 0;
  Gauge gauge;
};

template <class Draw>
Terms terms(int64_t k, DType dtype, const Draw& draw) {
  Terms t;
  long double value = 0, magnitude = 0, squares = 0;
  for (int64_t i = 0; i < k; ++i) {
    t.a.push_back(float(round_to(draw(i, 0), dtype)));
    t.b.push_back(float(round_to(draw(i, 1), dtype)));
    const long double product = (long double)t.a.back() * t.b.back();
    value += product, magnitude += std::abs(product), squares += product * product;
  }
  t.value = double(value);
  t.gauge.magnitude = {double(magnitude)};
  t.gauge.squares = {double(squares)};
  t.gauge.terms = k;
  return t;
}

Terms normals(int64_t k, DType dtype, uint64_t seed) {
  const Stream123 as(seed, "a"), bs(seed, "b");
  return terms(k, dtype, [&](int64_t i, int which) {
    return which ? bs.normal(uint64_t(i)) : as.normal(uint64_t(i));
  });
}

float forwards(const Terms& t) {
  float s = 0;
  for (size_t i = 0; i < t.a.size(); ++i) s += t.a[i] * t.b[i];
  return s;
}
float backwards(const Terms& t) {
  float s = 0;
  for (size_t i = t.a.size(); i-- > 0;) s += t.a[i] * t.b[i];
  return s;
}
float in_lanes(const Terms& t) {  // as vector units do
  float lane[8] = {};
  for (size_t i = 0; i < t.a.size(); ++i) lane[i % 8] += t.a[i] * t.b[i];
  return ((lane[0] + lane[1]) + (lane[2] + lane[3])) + ((lane[4] + lane[5]) + (lane[6] + lane[7]));
}
float in_pairs(const Terms& t, size_t begin, size_t end) {
  if (end - begin == 1) return t.a[begin] * t.b[begin];
  const size_t middle = begin + (end - begin) / 2;
  return in_pairs(t, begin, middle) + in_pairs(t, middle, end);
}
std::vector<float> in_every_order(const Terms& t) {
  return {forwards(t), backwards(t), in_lanes(t), in_pairs(t, 0, t.a.size())};
}

struct Measured {
  double worst = 0, squares = 0;
  int64_t sums = 0, alarms = 0;
  double rms() const { return std::sqrt(squares / double(sums)); }
};

Measured measure(const Setting& s, DType dtype, int64_t k, int seeds) {
  Measured m;
  for (int seed = 1; seed <= seeds; ++seed) {
    const Terms t = normals(k, dtype, uint64_t(seed) * 77 + uint64_t(k));
    const double bound = s.bound(t.value, t.gauge), scale = s.scale(t.value, t.gauge);
    for (const float sum : in_every_order(t)) {
      const double error = std::abs(round_to(sum, dtype) - t.value);
      m.worst = std::max(m.worst, error / bound);
      m.squares += error * error / (scale * scale);
      m.alarms += !(error <= bound);
      ++m.sums;
    }
  }
  return m;
}

TEST(TierA, DotProductsOfEveryOrderStayInside) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const Setting s("tp=1 fill=normal dtype=" + std::string(name(dtype)));
    for (const int64_t k : {64, 1024, 4096, 16384}) {
      const Measured m = measure(s, dtype, k, 60);
      EXPECT_EQ(m.alarms, 0) << name(dtype) << " K = " << k;
      EXPECT_LT(m.worst, 1) << name(dtype) << " K = " << k;
      EXPECT_GT(m.worst, 0.01) << "a bound this wide sees nothing, " << name(dtype) << " " << k;
      EXPECT_LE(m.rms(), rms_limit(m.sums)) << name(dtype) << " K = " << k;
      EXPECT_LE(m.rms(), 1) << "the mean of z^2 is at most 1";
      EXPECT_GT(m.rms(), 0.01);
    }
  }
}

// Results that are partial sums: each of the ranks' parts is rounded as it is stored, the judge
// adds them in double. In bf16 the rounding of the parts is nearly all of the error.
TEST(TierA, PartsOfASumAreRoundedEach) {
  constexpr int64_t k = 256, parts = 4;
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const Setting s("tp=4 fill=normal dtype=" + std::string(name(dtype)), P());
    Measured m;
    for (int seed = 1; seed <= 200; ++seed) {
      Terms t = normals(k * parts, dtype, uint64_t(seed) * 31);
      t.gauge.terms = k;
      double sum = 0;
      for (size_t r = 0; r < parts; ++r) {
        float part = 0;
        for (size_t i = r * k; i < (r + 1) * k; ++i) part += t.a[i] * t.b[i];
        sum += round_to(part, dtype);
      }
      const double error = std::abs(sum - t.value), scale = s.scale(t.value, t.gauge);
      m.squares += error * error / (scale * scale);
      m.alarms += !(error <= s.bound(t.value, t.gauge));
      ++m.sums;
    }
    EXPECT_EQ(m.alarms, 0) << name(dtype);
    EXPECT_LE(m.rms(), 1) << name(dtype);
    EXPECT_GT(m.rms(), 0.1) << "a scale this wide sees nothing, " << name(dtype);
  }
}

// D grows with K, A with its root: at K = 16,384 D allows more than 20 times what A does.
// lambda from the budget of 1e-6 and 2^63 elements alone.
TEST(TierA, IsTenPointEightScales) {
  const Setting s("tp=2 dtype=f32 fill=normal");
  Gauge g = normals(4096, DType::f32, 1).gauge;
  g.magnitude[0] = 1e6;  // D is no matter
  EXPECT_NEAR(s.bound(0, g) / s.scale(0, g), std::sqrt(2 * std::log(0x1p64 / 1e-6)), 1e-3);
}

TEST(TierA, IsFarBelowTheDeterministicBoundOfLongSums) {
  const Terms t = normals(16384, DType::f32, 5);
  const Setting random("tp=1 dtype=f32 fill=normal"), paired("tp=1 dtype=f32 fill=cancelling");
  EXPECT_GT(paired.bound(t.value, t.gauge), 20 * random.bound(t.value, t.gauge));
  const Terms few = normals(4, DType::f32, 5);  // short sums: D is the smaller one
  EXPECT_EQ(paired.bound(few.value, few.gauge), random.bound(few.value, few.gauge));
}

TEST(TierA, SeesATermThatIsMissing) {  // one of 4096 in f32, where D does not
  const Setting s("tp=1 dtype=f32 fill=normal");
  int seen = 0;
  for (uint64_t seed = 1; seed <= 50; ++seed) {
    Terms t = normals(4096, DType::f32, seed);
    const double bound = s.bound(t.value, t.gauge);
    t.a[1234] = 0;
    seen += std::abs(forwards(t) - t.value) > bound;
  }
  EXPECT_GE(seen, 45);
}

// sum over k = 1..n of E s_k^2 by enumeration: all orders of four terms.
TEST(TierA, MomentsAgreeWithAllOrdersOfAFewTerms) {
  std::vector<double> term{1, -2, 5, 0.5};
  double sum = 0, squares = 0;
  for (double v : term) sum += v, squares += v * v;
  std::sort(term.begin(), term.end());
  double mean = 0;
  int orders = 0;
  do {
    double partial = 0;
    for (double v : term) partial += v, mean += partial * partial;
    ++orders;
  } while (std::next_permutation(term.begin(), term.end()));
  mean /= orders;
  Gauge g;
  g.magnitude = {8.5};
  g.squares = {squares};
  g.terms = 4;
  const Setting s("tp=1 dtype=f32 fill=normal");
  // scale^2 = u^2 (E sum s_k^2 + q + C^2), to first order in u.
  const double u = 0x1p-24;
  EXPECT_NEAR(s.scale(sum, g) / (u * std::sqrt(mean + squares + sum * sum)), 1, 1e-5);
}

TEST(TierA, IsClaimedOnlyWhereItHolds) {
  const Gauge g = normals(64, DType::f32, 1).gauge;
  EXPECT_TRUE(Setting("tp=1 dtype=f32 fill=normal").has_scale(g));
  EXPECT_TRUE(Setting("tp=1 dtype=f32 fill=large").has_scale(g));
  EXPECT_FALSE(Setting("tp=1 dtype=f32 fill=cancelling").has_scale(g));
  EXPECT_FALSE(Setting("tp=1 dtype=f32").has_scale(g));  // integers are exact
  Setting truncating("tp=1 dtype=f32 fill=normal");
  truncating.e.declared.truncates = true;
  EXPECT_FALSE(truncating.has_scale(g));
  Gauge coherent = g, own = g;
  coherent.independent = false;
  own.bound = {1};
  EXPECT_FALSE(Setting("tp=1 dtype=f32 fill=normal").has_scale(coherent));
  EXPECT_FALSE(Setting("tp=1 dtype=f32 fill=normal").has_scale(own));
}

__attribute__((noinline)) float towards_zero(const Terms& t) {
  std::fesetround(FE_TOWARDZERO);
  const volatile float s = forwards(t);
  std::fesetround(FE_TONEAREST);
  return s;
}

// An accumulator that truncates leaves A and W, and stays inside D of 2u where it says so.
TEST(TierA, DoesNotHoldForTruncation) {
  const Setting nearest("tp=1 dtype=f32 fill=normal");
  Setting truncating("tp=1 dtype=f32 fill=normal");
  truncating.e.declared.truncates = true;
  double squares = 0;
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    // Positive terms, as after a softmax: truncation always takes away.
    const Stream123 as(seed, "a"), bs(seed, "b");
    const Terms t = terms(8192, DType::f32, [&](int64_t i, int which) {
      return which ? bs.uniform(uint64_t(i)) : as.uniform(uint64_t(i));
    });
    const double error = std::abs(towards_zero(t) - t.value);
    squares += std::pow(error / nearest.scale(t.value, t.gauge), 2);
    EXPECT_LE(error, truncating.bound(t.value, t.gauge));
  }
  EXPECT_GT(std::sqrt(squares / 40), rms_limit(40));
}

TEST(TierA, DoesNotHoldForConstantData) {
  const Setting s("tp=1 dtype=f32 fill=normal");
  double worst = 0;
  for (const double value : {1.1, 1.3, 0.7, 1.9, 1.7}) {
    const Terms t = terms(4096, DType::f32, [&](int64_t, int) { return value; });
    worst = std::max(worst, std::abs(forwards(t) - t.value) / s.scale(t.value, t.gauge));
  }
  EXPECT_GT(worst, rms_limit(1000));
}

TEST(TierW, LimitFallsToOne) {
  EXPECT_GT(rms_limit(1), 5);
  EXPECT_LT(rms_limit(1000000), 1.01);
  EXPECT_GT(rms_limit(1000000), 1);
}

}  // namespace tiers_test
}  // namespace
}  // namespace shardproof
