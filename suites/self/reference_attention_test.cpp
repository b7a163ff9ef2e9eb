// The references of attention, rotary embedding and losses: numbers that can be followed by hand,
// then PyTorch's autograd (fixtures/goldens), then finite differences and the bounds against float.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numeric>

#include "fixtures/dtype.hpp"
#include "fixtures/random.hpp"
#include "reference/attention.hpp"
#include "reference/loss.hpp"
#include "reference/rotary.hpp"
#include "suites/self/goldens.hpp"

namespace shardproof::reference {
namespace {
namespace reference_attention_test {

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr double agreement = 1e-13;

void expect_near(const Values& got, const Values& want, double relative) {
  ASSERT_EQ(got.size(), want.size());
  double largest = 1e-300;
  for (double w : want)
    if (std::isfinite(w)) largest = std::max(largest, std::abs(w));
  for (size_t i = 0; i < want.size(); ++i) {
    if (got[i] == want[i]) continue;
    EXPECT_LE(std::abs(got[i] - want[i]), relative * largest) << "element " << i;
  }
}

std::vector<Label> sequence(int64_t tokens, int64_t first = 0) {
  std::vector<Label> labels;
  for (int64_t t = 0; t < tokens; ++t) labels.push_back({0, first + t});
  return labels;
}

Attention one_head(int64_t queries, int64_t keys) {
  Attention a;
  a.queries = sequence(queries, keys - queries);
  a.keys = sequence(keys);
  return a;
}

// ---- By hand

TEST(ReferenceAttention, EqualScoresAverageTheValues) {
  Attention a = one_head(3, 3);
  a.mask.causal = true;
  // Q = 0: every visible key has probability 1/n.
  const auto r = attention(a, Values{0, 0, 0}, Values{7, -2, 5}, Values{3, 6, 12});
  expect_near(r.o, {3, 4.5, 7}, 1e-15);
  expect_near(r.lse, {0, std::log(2.0), std::log(3.0)}, 1e-15);
  // dV_j = sum of dO_i / n_i over the queries that see j: 1 + 1/2 + 1/3, 1/2 + 1/3, 1/3.
  const auto d = attention_backward(a, Values{0, 0, 0}, Values{7, -2, 5}, Values{3, 6, 12},
                                    Values{1, 1, 1}, {});
  expect_near(d.v, {11.0 / 6, 5.0 / 6, 1.0 / 3}, 1e-15);
  expect_near(d.k, {0, 0, 0}, 1e-15);
  // dQ_1 = P_0 (3 - 4.5) 7 + P_1 (6 - 4.5) (-2) = -5.25 - 1.5
  EXPECT_NEAR(d.q[1], -6.75, 1e-14);
  EXPECT_EQ(d.q[0], 0);
}

TEST(ReferenceAttention, TwoKeysOfKnownOdds) {
  // Scores ln 3 and 0: probabilities 3/4 and 1/4.
  Attention a = one_head(1, 2);
  const double score = std::log(3.0);
  const auto r = attention(a, Values{1}, Values{score, 0}, Values{8, 4});
  expect_near(r.o, {7}, 1e-15);
  expect_near(r.lse, {std::log(4.0)}, 1e-15);
  // dS_0 = 3/4 (8 - 7), dS_1 = 1/4 (4 - 7), both for dO = 1.
  const auto d = attention_backward(a, Values{1}, Values{score, 0}, Values{8, 4}, Values{1}, {});
  expect_near(d.k, {0.75, -0.75}, 1e-14);
  expect_near(d.v, {0.75, 0.25}, 1e-15);
  expect_near(d.q, {0.75 * score}, 1e-14);
  // A cotangent on lse alone gives dS = P.
  const auto l =
      attention_backward(a, Values{1}, Values{score, 0}, Values{8, 4}, Values{0}, Values{1});
  expect_near(l.k, {0.75, 0.25}, 1e-15);
  expect_near(l.q, {0.75 * score}, 1e-15);
}

TEST(ReferenceAttention, MaskOfLabels) {
  const Label q{0, 5};
  EXPECT_TRUE(visible({}, q, {0, 9}));
  EXPECT_FALSE(visible({}, q, {1, 5}));
  EXPECT_FALSE(visible({}, {-1, 0}, {-1, 0}));
  EXPECT_TRUE(visible({true}, q, {0, 5}));
  EXPECT_FALSE(visible({true}, q, {0, 6}));
  EXPECT_TRUE(visible({false, 2, 1}, q, {0, 3}));
  EXPECT_FALSE(visible({false, 2, 1}, q, {0, 2}));
  EXPECT_TRUE(visible({false, 2, 1}, q, {0, 6}));
  EXPECT_FALSE(visible({false, 2, 1}, q, {0, 7}));
  EXPECT_FALSE(visible({true, 2, 1}, q, {0, 6}));
  EXPECT_TRUE(visible({false, 0, 0}, q, {0, 5}));
}

TEST(ReferenceAttention, RowThatSeesNothing) {
  Attention a = one_head(3, 1);  // queries at -2, -1, 0
  a.mask.causal = true;
  const auto r = attention(a, Values{1, 1, 1}, Values{1}, Values{5});
  EXPECT_EQ(r.o, (Values{0, 0, 5}));
  EXPECT_EQ(r.lse, (Values{-infinity, -infinity, 1}));
  const auto d = attention_backward(a, Values{1, 1, 1}, Values{1}, Values{5}, Values{9, 9, 2}, {});
  EXPECT_EQ(d.v, (Values{2}));
  EXPECT_EQ(d.q, (Values{0, 0, 0}));
}

TEST(ReferenceAttention, PackedIsEachDocumentAlone) {
  const Stream123 stream(5, "packed");
  const int64_t lengths[] = {7, 1, 10}, heads = 4, kv = 2, dk = 3, dv = 5;
  Attention all;
  all.heads = heads, all.kv_heads = kv, all.key_dim = dk, all.value_dim = dv;
  all.mask.causal = true;
  for (int64_t n : lengths)
    for (int64_t t = 0; t < n; ++t) all.queries.push_back({n, t});
  all.queries.push_back({-1, 0});
  all.keys = all.queries;
  uint64_t next = 0;
  auto drawn = [&](int64_t n) {
    Values v(static_cast<size_t>(n));
    for (double& x : v) x = stream.normal(next++);
    return v;
  };
  const int64_t T = int64_t(all.queries.size());
  const Values q = drawn(T * heads * dk), k = drawn(T * kv * dk), v = drawn(T * kv * dv),
               g = drawn(T * heads * dv);
  const auto whole = attention(all, q, k, v);
  const auto d = attention_backward(all, q, k, v, g, {});
  auto part = [](const Values& x, int64_t from, int64_t n, int64_t row) {
    return Values(x.begin() + from * row, x.begin() + (from + n) * row);
  };
  int64_t first = 0;
  for (int64_t n : lengths) {
    Attention alone = all;
    alone.queries = alone.keys = sequence(n);
    const Values qa = part(q, first, n, heads * dk), ka = part(k, first, n, kv * dk),
                 va = part(v, first, n, kv * dv), ga = part(g, first, n, heads * dv);
    const auto r = attention(alone, qa, ka, va);
    EXPECT_EQ(r.o, part(whole.o, first, n, heads * dv));
    EXPECT_EQ(r.lse, part(whole.lse, first, n, heads));
    const auto da = attention_backward(alone, qa, ka, va, ga, {});
    EXPECT_EQ(da.q, part(d.q, first, n, heads * dk));
    EXPECT_EQ(da.k, part(d.k, first, n, kv * dk));
    EXPECT_EQ(da.v, part(d.v, first, n, kv * dv));
    first += n;
  }
  EXPECT_EQ(part(whole.o, first, 1, heads * dv), Values(size_t(heads * dv)));
  EXPECT_EQ(part(d.k, first, 1, kv * dk), Values(size_t(kv * dk)));
}

TEST(ReferenceAttention, LoudScoresDoNotOverflow) {
  Attention a = one_head(1, 2);
  const auto r = attention(a, Values{1}, Values{800, -800}, Values{2, 3});
  EXPECT_EQ(r.o, (Values{2}));
  EXPECT_EQ(r.lse, (Values{800}));
}

TEST(ReferenceAttention, SizesThatDoNotFitAreRefused) {
  Attention a = one_head(2, 2);
  EXPECT_THROW(attention(a, Values(1), Values(2), Values(2)), std::invalid_argument);
  a.heads = 3, a.kv_heads = 2;
  EXPECT_THROW(attention(a, Values(6), Values(4), Values(4)), std::invalid_argument);
}

TEST(ReferenceRotary, QuarterTurnAndItsTranspose) {
  // d = 2: one pair with theta = 1, turned by the position in radians.
  const Rotary r{1, 2, 10000};
  const int64_t positions[] = {0, 1};
  const Values y = rotary(r, positions, Values{3, 4, 1, 0});
  EXPECT_EQ(y[0], 3);
  EXPECT_EQ(y[1], 4);
  EXPECT_NEAR(y[2], std::cos(1.0), 1e-16);
  EXPECT_NEAR(y[3], std::sin(1.0), 1e-16);
  expect_near(rotary_backward(r, positions, y), {3, 4, 1, 0}, 1e-15);
  EXPECT_DOUBLE_EQ(rotary_angle({1, 4, 10000}, 3, 1), 0.03);  // 3 * 10000^(-1/2)
}

// theta = 4000^(-1/2) = 1.012 2^-6, where an ulp is almost two units: a power that is two ulps off
// is within the bound, and would not be within one that takes theta for rounded.
TEST(ReferenceRotary, BoundInDoubleHoldsForAPowerThatIsTwoUlpsOff) {
  const Rotary r{1, 4, 4000};
  constexpr double u = 0x1p-53;
  int64_t positions[64];
  for (int t = 0; t < 64; ++t) positions[t] = 1000 + t;
  const Values x(64 * 4, 1), y = rotary(r, positions, x), bound = rotary_bounds(r, positions, x, u);
  const auto greatest = [&](int ulps, bool theta_is_rounded) {
    double theta = std::pow(4000.0, -0.5), most = 0;
    for (int i = 0; i < ulps; ++i) theta = std::nextafter(theta, 1.0);
    for (size_t t = 0; t < 64; ++t) {
      const double angle = double(positions[t]) * theta,
                   error = std::abs(std::cos(angle) - std::sin(angle) - y[4 * t + 1]);
      most =
          std::max(most, error / (theta_is_rounded ? u * (2 * angle + 4) * 2 : bound[4 * t + 1]));
    }
    return most;
  };
  EXPECT_LE(greatest(2, false), 1);
  EXPECT_GT(greatest(2, true), 1);
  EXPECT_GT(greatest(16, false), 1);
}

TEST(ReferenceLoss, ThreeClassesByHand) {
  // Logits 0, ln 2, ln 5: probabilities 1/8, 2/8, 5/8.
  const Values z{0, std::log(2.0), std::log(5.0), 1, 2, 3};
  const int64_t labels[] = {1, ignored_label};
  expect_near(cross_entropy(z, labels, 3, 0), {std::log(4.0), 0}, 1e-15);
  expect_near(cross_entropy_backward(z, labels, 3, 0, Values{8, 8}), {1, -6, 5, 0, 0, 0}, 1e-14);
  // alpha = 0.3: 0.7 nll + 0.3 (ln 8 - ln(10)/3); the gradient of a row still sums to 0.
  expect_near(cross_entropy(z, labels, 3, 0.3),
              {0.7 * std::log(4.0) + 0.3 * (std::log(8.0) - std::log(10.0) / 3), 0}, 1e-15);
  const Values d = cross_entropy_backward(z, labels, 3, 0.3, Values{8, 8});
  EXPECT_NEAR(d[0] + d[1] + d[2], 0, 1e-14);
  EXPECT_NEAR(d[0], 8 * (0.125 - 0.1), 1e-14);
  const int64_t wrong[] = {3, 0};
  EXPECT_THROW(cross_entropy(z, wrong, 3, 0), std::invalid_argument);
}

TEST(ReferenceLoss, NormalisationsByHand) {
  // Groups {0,1,2} and {3,4}, counts 2 (one ignored) and 0 by weight.
  const int64_t labels[] = {4, ignored_label, 4, 4, ignored_label}, groups[] = {0, 0, 0, 1, 1};
  const Values w{1, 1, 1, 0, 1};
  expect_near(loss_factors(Normalisation::tokens, labels, w, groups, 2), {0.5, 0, 0.5, 0, 0}, 0);
  expect_near(loss_factors(Normalisation::groups, labels, w, groups, 2), {0.25, 0, 0.25, 0, 0}, 0);
  // N1 weighs tokens alike, N2 groups alike: 3 tokens against 1.
  const int64_t all[] = {1, 1, 1, 1, ignored_label};
  const Values ones{1, 1, 1, 1, 1};
  expect_near(loss_factors(Normalisation::tokens, all, ones, groups, 2),
              {0.25, 0.25, 0.25, 0.25, 0}, 0);
  expect_near(loss_factors(Normalisation::groups, all, ones, groups, 2),
              {1.0 / 6, 1.0 / 6, 1.0 / 6, 0.5, 0}, 1e-16);
}

// ---- PyTorch's autograd

using goldens::extent;
using goldens::golden;
using goldens::values;

Attention of_golden(const goldens::Golden& g) {
  const auto& at = g.at("attributes");
  Attention a;
  a.heads = at.at("heads"), a.kv_heads = at.at("kv_heads");
  a.key_dim = extent(g, "q", 2), a.value_dim = extent(g, "v", 2);
  a.scale = at.at("scale"), a.softcap = at.at("softcap");
  a.mask = {at.at("causal"), at.at("window_left"), at.at("window_right")};
  const int64_t queries = extent(g, "q", 0), keys = extent(g, "k", 0);
  a.queries = sequence(queries, keys - queries), a.keys = sequence(keys);
  if (at.at("documents").is_null()) return a;
  a.queries.clear();
  int64_t document = 0;
  for (int64_t n : goldens::integers(at.at("documents"))) {
    for (int64_t t = 0; t < n; ++t) a.queries.push_back({document, t});
    ++document;
  }
  a.queries.resize(size_t(queries), Label{-1, 0});
  a.keys = a.queries;
  return a;
}

const char* const attention_goldens[] = {"causal_gqa", "cross",         "empty_rows", "full_mqa",
                                         "large",      "lse_cotangent", "packed",     "softcap",
                                         "two_sided",  "window"};

TEST(Goldens, Attention) {
  for (const char* name : attention_goldens) {
    SCOPED_TRACE(name);
    const auto g = golden(std::string("attention_") + name);
    const Attention a = of_golden(g);
    const Values allowed = values(g, "inputs", "allowed");
    for (size_t i = 0; i < a.queries.size(); ++i)
      for (size_t j = 0; j < a.keys.size(); ++j)
        EXPECT_EQ(visible(a.mask, a.queries[i], a.keys[j]), allowed[i * a.keys.size() + j] == 1)
            << "query " << i << ", key " << j;
    const Values q = values(g, "inputs", "q"), k = values(g, "inputs", "k"),
                 v = values(g, "inputs", "v"), go = values(g, "cotangents", "o");
    const auto r = attention(a, q, k, v);
    expect_near(r.o, values(g, "outputs", "o"), agreement);
    expect_near(r.lse, values(g, "outputs", "lse"), agreement);
    const Values gl =
        g.at("cotangents").contains("lse") ? values(g, "cotangents", "lse") : Values{};
    const auto d = attention_backward(a, q, k, v, go, gl);
    expect_near(d.q, values(g, "gradients", "q"), agreement);
    expect_near(d.k, values(g, "gradients", "k"), agreement);
    expect_near(d.v, values(g, "gradients", "v"), agreement);
  }
}

TEST(Goldens, RotaryHalf) {
  const auto g = golden("rotary_half");
  const Rotary r{extent(g, "x", 1), extent(g, "x", 2), g.at("attributes").at("base")};
  const auto positions = goldens::integers(g.at("inputs").at("positions").at("data"));
  expect_near(rotary(r, positions, values(g, "inputs", "x")), values(g, "outputs", "y"), agreement);
  expect_near(rotary_backward(r, positions, values(g, "cotangents", "y")),
              values(g, "gradients", "x"), agreement);
}

TEST(Goldens, CrossEntropy) {
  for (const char* name : {"cross_entropy", "cross_entropy_smoothed"}) {
    SCOPED_TRACE(name);
    const auto g = golden(name);
    const double alpha = g.at("attributes").at("label_smoothing");
    const auto labels = goldens::integers(g.at("inputs").at("labels").at("data"));
    const Values z = values(g, "inputs", "logits");
    const int64_t classes = extent(g, "logits", 1);
    expect_near(cross_entropy(z, labels, classes, alpha), values(g, "outputs", "loss"), agreement);
    expect_near(cross_entropy_backward(z, labels, classes, alpha, values(g, "cotangents", "loss")),
                values(g, "gradients", "logits"), agreement);
  }
}

// ---- Bounds: attention in float by plain loops stays inside, and not by far

using Floats = std::vector<float>;

struct FloatAttention {
  Floats o, lse, q, k, v;
};

// Two passes over all keys with the formulas of the header, every operation in float; P and dS are
// rounded to `factors` before they are multiplied with V, dO, K and Q.
FloatAttention in_float(const Attention& a, const Floats& q, const Floats& k, const Floats& v,
                        const Floats& g, const Floats& gl, DType factors) {
  const auto factor = [&](float x) { return float(round_to(double(x), factors)); };
  const int64_t Tq = int64_t(a.queries.size()), Tk = int64_t(a.keys.size()), n = a.heads,
                kv = a.kv_heads, dk = a.key_dim, dv = a.value_dim;
  FloatAttention r{Floats(size_t(Tq * n * dv)), Floats(size_t(Tq * n)), Floats(q.size()),
                   Floats(k.size()), Floats(v.size())};
  for (int64_t i = 0; i < Tq; ++i)
    for (int64_t h = 0; h < n; ++h) {
      const int64_t at = i * n + h, group = h / (n / kv);
      Floats s(static_cast<size_t>(Tk));
      float m = -INFINITY, l = 0, delta = 0;
      auto sees = [&](int64_t j) {
        return visible(a.mask, a.queries[size_t(i)], a.keys[size_t(j)]);
      };
      for (int64_t j = 0; j < Tk; ++j) {
        for (int64_t c = 0; c < dk; ++c)
          s[size_t(j)] += q[size_t(at * dk + c)] * k[size_t((j * kv + group) * dk + c)];
        s[size_t(j)] *= float(a.scale);
        if (a.softcap > 0)
          s[size_t(j)] = float(a.softcap) * std::tanh(s[size_t(j)] / float(a.softcap));
        if (sees(j)) m = std::max(m, s[size_t(j)]);
      }
      for (int64_t j = 0; j < Tk; ++j) {
        if (!sees(j)) continue;
        const float p = std::exp(s[size_t(j)] - m);
        l += p;
        for (int64_t c = 0; c < dv; ++c)
          r.o[size_t(at * dv + c)] += factor(p) * v[size_t((j * kv + group) * dv + c)];
      }
      for (int64_t c = 0; c < dv; ++c) {
        if (l > 0) r.o[size_t(at * dv + c)] /= l;
        delta += r.o[size_t(at * dv + c)] * g[size_t(at * dv + c)];
      }
      const float lse = r.lse[size_t(at)] = m + std::log(l);
      for (int64_t j = 0; j < Tk; ++j) {
        if (!sees(j)) continue;
        const float p = std::exp(s[size_t(j)] - lse);
        float dp = 0;
        for (int64_t c = 0; c < dv; ++c) {
          dp += g[size_t(at * dv + c)] * v[size_t((j * kv + group) * dv + c)];
          r.v[size_t((j * kv + group) * dv + c)] += factor(p) * g[size_t(at * dv + c)];
        }
        float ds = p * (dp - delta + gl[size_t(at)]);
        if (a.softcap > 0) {
          const float t = s[size_t(j)] / float(a.softcap);
          ds *= 1 - t * t;
        }
        ds = factor(ds) * float(a.scale);
        for (int64_t c = 0; c < dk; ++c) {
          r.q[size_t(at * dk + c)] += ds * k[size_t((j * kv + group) * dk + c)];
          r.k[size_t((j * kv + group) * dk + c)] += ds * q[size_t(at * dk + c)];
        }
      }
    }
  return r;
}

// The largest error over its bound; results are stored in float: one rounding more.
double worst_ratio(const Floats& got, const Values& want, const Values& bound) {
  double worst = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    if (double(got[i]) == want[i]) continue;
    worst = std::max(worst,
                     std::abs(double(got[i]) - want[i]) / (bound[i] + 0x1p-24 * std::abs(want[i])));
  }
  return worst;
}

// Forty queries of four heads, 44 keys of two; scores are `loud` times those of unit variance.
struct Exercise {
  Attention a = one_head(40, 44);
  Floats q, k, v, g, gl;
  AttentionResult want;
  AttentionGradients d;

  explicit Exercise(double loud, double softcap = 0) {
    a.heads = 4, a.kv_heads = 2, a.key_dim = 8, a.value_dim = 6;
    a.scale = loud / std::sqrt(8.0), a.softcap = softcap, a.mask = {true, 30, -1};
    uint64_t next = 0;
    const Stream123 stream(3, "bounds");
    auto drawn = [&](int64_t n) {
      Floats x(static_cast<size_t>(n));
      for (float& one : x) one = float(stream.normal(next++));
      return x;
    };
    q = drawn(40 * 4 * 8), k = drawn(44 * 2 * 8), v = drawn(44 * 2 * 6), g = drawn(40 * 4 * 6);
    gl = drawn(40 * 4);
    want = attention(a, wide(q), wide(k), wide(v));
    d = attention_backward(a, wide(q), wide(k), wide(v), wide(g), wide(gl));
  }
  FloatAttention in(DType factors) const { return in_float(a, q, k, v, g, gl, factors); }
  AttentionBounds bounds(const AttentionRounding& r) const {
    return attention_bounds(a, r, wide(q), wide(k), wide(v), wide(g), wide(gl));
  }
  static Values wide(const Floats& f) { return Values(f.begin(), f.end()); }
};

AttentionRounding single() {
  AttentionRounding r;
  r.accumulate = r.output = r.statistics = 0x1p-24;
  return r;
}

TEST(AttentionBounds, FloatStaysInside) {
  for (const double softcap : {0.0, 2.0})
    for (const double loud : {1.0, 40.0}) {
      const Exercise x(loud, softcap);
      const auto got = x.in(DType::f32);
      const auto b = x.bounds(single());
      const double ratios[] = {worst_ratio(got.o, x.want.o, b.o),
                               worst_ratio(got.lse, x.want.lse, b.lse),
                               worst_ratio(got.q, x.d.q, b.q), worst_ratio(got.k, x.d.k, b.k),
                               worst_ratio(got.v, x.d.v, b.v)};
      for (double r : ratios) {
        EXPECT_LE(r, 1) << "softcap " << softcap << ", scores x " << loud;
        EXPECT_GE(r, 1e-3) << "softcap " << softcap << ", scores x " << loud;
      }
    }
}

// A kernel that feeds P and dS to a tensor core in half precision is right where it says so, and is
// not where it says nothing.
TEST(AttentionBounds, OfHalfPrecisionFactorsAreTheirOwn) {
  const Exercise x(1);
  for (const DType factors : {DType::bf16, DType::f16}) {
    const auto got = x.in(factors);
    AttentionRounding rounding = single();
    rounding.tiny = smallest_subnormal(factors);
    for (const bool said : {true, false}) {
      rounding.factors = said ? unit_roundoff(factors) : 0;
      const auto b = x.bounds(rounding);
      for (const double r : {worst_ratio(got.o, x.want.o, b.o), worst_ratio(got.q, x.d.q, b.q),
                             worst_ratio(got.k, x.d.k, b.k), worst_ratio(got.v, x.d.v, b.v)}) {
        EXPECT_EQ(r <= 1, said) << name(factors) << " " << r;
        EXPECT_GE(r, 1e-2) << name(factors);
      }
    }
  }
}

// From an error of e^4 on nothing is said of a probability.
TEST(AttentionBounds, AreBeyondAnyValueWhereAnExponentMayBeAnything) {
  AttentionRounding rounding;
  const auto o_of = [&](double u) {
    rounding.accumulate = u;
    return attention_bounds(one_head(1, 2), rounding, Values{3}, Values{1, 2}, Values{2, -4}, {},
                            {})
        .o[0];
  };
  EXPECT_LT(o_of(0x1p-8), 1);
  EXPECT_GT(o_of(0.25), 1e60);
}

// Scores 0 and 0, so P = 1/2 each; o = -1, delta = -1, dS = p (<g,v> - delta) = 3/2 and -3/2.
// Nothing rounds but what is lost below the normal range, t a product. O: sum_j t (|v_j| + 1). dV:
// t (|g| + 1). dS errs by p times the error 8t of delta, by t (3 + 8t) and by 2t; dQ by that times
// |k|, and t a key.
TEST(AttentionBounds, WhatIsLostBelowTheNormalRangeByHand) {
  const double t = 0x1p-40, ds = 4 * t + t * (3 + 8 * t) + 2 * t;
  AttentionRounding rounding;
  rounding.tiny = t;
  const auto b = attention_bounds(one_head(1, 2), rounding, Values{0}, Values{1, 2}, Values{2, -4},
                                  Values{1}, {});
  EXPECT_EQ(b.o, Values{8 * t});
  EXPECT_EQ(b.v, (Values{2 * t, 2 * t}));
  EXPECT_EQ(b.q, Values{3 * ds + 2 * t});
  EXPECT_EQ(b.k, (Values{t, t}));
}

TEST(AttentionGradients, AgreeWithRichardsonDifferences) {
  Attention a = one_head(5, 7);
  a.heads = 2, a.key_dim = 3, a.value_dim = 2, a.softcap = 3, a.mask = {true, 4, -1};
  const Stream123 stream(9, "differences");
  uint64_t next = 0;
  auto drawn = [&](int64_t n) {
    Values v(static_cast<size_t>(n));
    for (double& x : v) x = stream.normal(next++);
    return v;
  };
  const Values q = drawn(5 * 2 * 3), k = drawn(7 * 3), v = drawn(7 * 2), g = drawn(5 * 2 * 2),
               gl = drawn(5 * 2);
  auto loss = [&](const Values& x, const Values& y, const Values& z) {
    const auto r = attention(a, x, y, z);
    double sum = 0;
    for (size_t i = 0; i < g.size(); ++i) sum += g[i] * r.o[i];
    for (size_t i = 0; i < gl.size(); ++i) sum += gl[i] * r.lse[i];
    return sum;
  };
  const auto d = attention_backward(a, q, k, v, g, gl);
  const double h = 1e-3;
  auto differences = [&](int which, const Values& at, const Values& gradient) {
    for (size_t i = 0; i < at.size(); ++i) {
      auto moved = [&](double by) {
        Values x = at;
        x[i] += by;
        return which == 0 ? loss(x, k, v) : which == 1 ? loss(q, x, v) : loss(q, k, x);
      };
      const double coarse = (moved(h) - moved(-h)) / (2 * h),
                   fine = (moved(h / 2) - moved(-h / 2)) / h;
      // Error h^4 phi^(5) / 480 and rounding 3 eps / h.
      EXPECT_NEAR(gradient[i], (4 * fine - coarse) / 3, 1e-10)
          << "input " << which << "[" << i << "]";
    }
  };
  differences(0, q, d.q);
  differences(1, k, d.k);
  differences(2, v, d.v);
}

}  // namespace reference_attention_test
}  // namespace
}  // namespace shardproof::reference
