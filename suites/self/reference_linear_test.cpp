// The references of linears, activations, norms and the MLP: small numbers that can be followed by
// hand, then PyTorch's autograd (fixtures/goldens), then the running error against float.
#include <gtest/gtest.h>

#include <cmath>

#include "fixtures/random.hpp"
#include "reference/activation.hpp"
#include "reference/linear.hpp"
#include "reference/mlp.hpp"
#include "reference/norm.hpp"
#include "suites/self/goldens.hpp"

namespace shardproof::reference {
namespace {
namespace reference_linear_test {

void expect_near(const Values& got, const Values& want, double relative) {
  ASSERT_EQ(got.size(), want.size());
  double largest = 0;
  for (double w : want) largest = std::max(largest, std::abs(w));
  for (size_t i = 0; i < want.size(); ++i)
    EXPECT_LE(std::abs(got[i] - want[i]), relative * std::max(largest, 1e-300)) << "element " << i;
}

// ---- By hand

TEST(ReferenceLinear, ProductsAndSumsOfTwoTokens) {
  // X = [1 2; 3 4], W = [1 0; 0 1; 1 1], b = [10 20 30]
  const Values x{1, 2, 3, 4}, w{1, 0, 0, 1, 1, 1}, b{10, 20, 30};
  EXPECT_EQ(linear({2, 2, 3}, x, w, b), (Values{11, 22, 33, 13, 24, 37}));
  EXPECT_EQ(linear({2, 2, 3}, x, w, {}), (Values{1, 2, 3, 3, 4, 7}));
  const auto d = linear_backward({2, 2, 3}, x, w, Values{1, 0, 2, 0, 1, 3});
  EXPECT_EQ(d.x, (Values{3, 2, 3, 4}));          // [1 0] + 2 [1 1]; [0 1] + 3 [1 1]
  EXPECT_EQ(d.w, (Values{1, 2, 3, 4, 11, 16}));  // token 1; token 2; 2 x_1 + 3 x_2
  EXPECT_EQ(d.b, (Values{1, 1, 5}));
}

// 1300 tokens are more than two blocks of them. Integers, of which every order makes one sum.
TEST(ReferenceLinear, TokensInBlocksAreTokensInARow) {
  const LinearShape s{1300, 5, 3};
  Values x(1300 * 5), w(15), g(1300 * 3), b{1, 2, -3}, y, dx, dw(15), db(3);
  for (size_t i = 0; i < x.size(); ++i) x[i] = double(i * 37 % 23) - 11;
  for (size_t i = 0; i < w.size(); ++i) w[i] = double(i * 5 % 9) - 4;
  for (size_t i = 0; i < g.size(); ++i) g[i] = double(i * 31 % 17) - 8;
  for (size_t t = 0; t < 1300; ++t) {
    for (size_t o = 0; o < 3; ++o) {
      double sum = 0;
      for (size_t i = 0; i < 5; ++i) sum += x[t * 5 + i] * w[o * 5 + i];
      y.push_back(sum + b[o]);
      for (size_t i = 0; i < 5; ++i) dw[o * 5 + i] += g[t * 3 + o] * x[t * 5 + i];
      db[o] += g[t * 3 + o];
    }
    for (size_t i = 0; i < 5; ++i) {
      double sum = 0;
      for (size_t o = 0; o < 3; ++o) sum += g[t * 3 + o] * w[o * 5 + i];
      dx.push_back(sum);
    }
  }
  EXPECT_EQ(linear(s, x, w, b), y);
  const LinearGradients d = linear_backward(s, x, w, g);
  EXPECT_EQ(d.x, dx);
  EXPECT_EQ(d.w, dw);
  EXPECT_EQ(d.b, db);
}

TEST(ReferenceLinear, SizesThatDoNotFitAreRefused) {
  EXPECT_THROW(linear({2, 2, 3}, Values(3), Values(6), {}), std::invalid_argument);
  EXPECT_THROW(linear_backward({2, 2, 3}, Values(4), Values(6), Values(5)), std::invalid_argument);
}

TEST(ReferenceActivation, IdentitiesThatHoldForEveryArgument) {
  for (double x : {-9.0, -2.5, -1.0, -0.125, 0.0, 0.5, 1.75, 4.0}) {
    // Phi(x) + Phi(-x) = 1 and sigma(x) + sigma(-x) = 1, so f(x) - f(-x) = x.
    for (Activation a : {Activation::gelu, Activation::gelu_tanh, Activation::silu}) {
      EXPECT_NEAR(activate(a, x) - activate(a, -x), x, 1e-15 * std::max(1.0, std::abs(x)));
      EXPECT_NEAR(slope(a, x) + slope(a, -x), 1, 16 * 0x1p-53);
    }
    EXPECT_EQ(activate(Activation::identity, x), x);
    EXPECT_EQ(slope(Activation::identity, x), 1);
  }
  for (Activation a : {Activation::gelu, Activation::gelu_tanh, Activation::silu}) {
    EXPECT_EQ(activate(a, 0), 0);
    EXPECT_EQ(slope(a, 0), 0.5);
  }
}

// Phi(1) = 0.841344746068542948585 (Abramowitz and Stegun, table 26.1); sigma(ln 3) = 3/4.
TEST(ReferenceActivation, ValuesOfTables) {
  EXPECT_NEAR(activate(Activation::gelu, 1), 0.841344746068542949, 2e-16);
  EXPECT_NEAR(activate(Activation::silu, std::log(3.0)), 0.75 * std::log(3.0), 2e-16);
}

TEST(ReferenceActivation, SlopesAreTheDerivativesAndCurvatureBoundsTheirs) {
  const double h = 1e-3;
  for (Activation a : {Activation::gelu, Activation::gelu_tanh, Activation::silu}) {
    double curvature = 0;
    for (double x = -8; x <= 8; x += 0.01) {
      // Richardson: error of order h^4.
      const double coarse = (activate(a, x + h) - activate(a, x - h)) / (2 * h),
                   fine = (activate(a, x + h / 2) - activate(a, x - h / 2)) / h;
      EXPECT_NEAR(slope(a, x), (4 * fine - coarse) / 3, 1e-11);
      curvature = std::max(curvature, std::abs(slope(a, x + h) - slope(a, x - h)) / (2 * h));
    }
    EXPECT_LE(curvature, greatest_curvature(a));
    EXPECT_GE(curvature, 0.95 * greatest_curvature(a));
  }
}

TEST(ReferenceActivation, TheTwoGelusDifferByLessThanFiveInTenThousand) {
  double most = 0;
  for (double x = -6; x <= 6; x += 0.001)
    most = std::max(most,
                    std::abs(activate(Activation::gelu, x) - activate(Activation::gelu_tanh, x)));
  EXPECT_GT(most, 4.7e-4);
  EXPECT_LT(most, 4.74e-4);
}

TEST(ReferenceActivation, SwigluGatesTheFirstHalfOfARow) {
  const double g = std::log(3.0);  // silu(g) = 3/4 g, silu'(g) = 3/4 (1 + g/4)
  expect_near(swiglu(Values{g, 0, 2, 5}, 2), {1.5 * g, 0}, 1e-15);
  expect_near(swiglu_backward(Values{g, 0, 2, 5}, Values{10, 4}, 2),
              {20 * 0.75 * (1 + g / 4), 4 * 5 * 0.5, 10 * 0.75 * g, 0}, 1e-15);
  EXPECT_THROW(swiglu(Values(5), 2), std::invalid_argument);
}

TEST(ReferenceNorm, LayerNormOfTwoValuesIsTheirOrder) {
  const Values x{1, 3}, gamma{2, 5}, beta{10, 20};
  EXPECT_EQ(layer_norm(x, gamma, beta, 2, 0), (Values{8, 25}));  // xhat = -1, 1
  const auto d = layer_norm_backward(x, gamma, Values{1, 10}, 2, 0);
  EXPECT_EQ(d.x, (Values{0, 0}));  // the order does not move
  EXPECT_EQ(d.gamma, (Values{-1, 10}));
  EXPECT_EQ(d.beta, (Values{1, 10}));
}

TEST(ReferenceNorm, RmsNormOfOneAndSeven) {
  const Values x{1, 7}, gamma{1, 1};  // mean square 25
  expect_near(rms_norm(x, gamma, 2, 0), {0.2, 1.4}, 1e-15);
  const auto d = rms_norm_backward(x, gamma, Values{1, 0}, 2, 0);
  expect_near(d.x, {0.196, -0.028}, 1e-15);  // (1 - 0.2 * 0.1) / 5, -1.4 * 0.1 / 5
  expect_near(d.gamma, {0.2, 0}, 1e-15);
  EXPECT_TRUE(d.beta.empty());
}

// X = [1 2], W1 = [1 1; 1 0], b1 = [0 1] -> Z = [3 2]; identity; W2 = [1 -1; 2 0], b2 = [5 7].
TEST(ReferenceMlp, IdentityIsTwoLinears) {
  MlpShape s{1, 2, 2};
  s.activation = Activation::identity;
  const Values x{1, 2}, w1{1, 1, 1, 0}, b1{0, 1}, w2{1, -1, 2, 0}, b2{5, 7};
  const MlpInputs in{x, w1, b1, {}, w2, b2};
  EXPECT_EQ(mlp(s, in), (Values{6, 13}));
  const auto d = mlp_backward(s, in, Values{1, 10});
  EXPECT_EQ(d.w2, (Values{3, 2, 30, 20}));
  EXPECT_EQ(d.b1, (Values{21, -1}));  // dN = [1 + 20, -1]
  EXPECT_EQ(d.x, (Values{20, 21}));
}

// ---- PyTorch

using goldens::extent;
using goldens::golden;
using goldens::values;

constexpr double agreement = 1e-13;

void expect_gradient(const goldens::Golden& g, const char* tensor, const Values& got) {
  SCOPED_TRACE(tensor);
  expect_near(got, values(g, "gradients", tensor), agreement);
}

TEST(Goldens, Linear) {
  const auto g = golden("linear");
  const LinearShape s{extent(g, "x", 0), extent(g, "x", 1), extent(g, "w", 0)};
  const Values x = values(g, "inputs", "x"), w = values(g, "inputs", "w"),
               b = values(g, "inputs", "b");
  expect_near(linear(s, x, w, b), values(g, "outputs", "y"), agreement);
  const auto d = linear_backward(s, x, w, values(g, "cotangents", "y"));
  expect_gradient(g, "x", d.x);
  expect_gradient(g, "w", d.w);
  expect_gradient(g, "b", d.b);
}

TEST(Goldens, BothGelus) {
  for (const auto& [name, a] :
       {std::pair{"gelu_exact", Activation::gelu}, std::pair{"gelu_tanh", Activation::gelu_tanh}}) {
    SCOPED_TRACE(name);
    const auto g = golden(name);
    const Values x = values(g, "inputs", "x");
    expect_near(activate(a, x), values(g, "outputs", "y"), agreement);
    expect_gradient(g, "x", activate_backward(a, x, values(g, "cotangents", "y")));
  }
}

TEST(Goldens, GeluMlp) {
  const auto g = golden("gelu_mlp");
  const MlpShape s{extent(g, "x", 0), extent(g, "x", 1), extent(g, "w1", 0)};
  const Values x = values(g, "inputs", "x"), w1 = values(g, "inputs", "w1"),
               b1 = values(g, "inputs", "b1"), w2 = values(g, "inputs", "w2"),
               b2 = values(g, "inputs", "b2");
  const MlpInputs in{x, w1, b1, {}, w2, b2};
  expect_near(mlp(s, in), values(g, "outputs", "y"), agreement);
  const auto d = mlp_backward(s, in, values(g, "cotangents", "y"));
  expect_gradient(g, "x", d.x);
  expect_gradient(g, "w1", d.w1);
  expect_gradient(g, "b1", d.b1);
  expect_gradient(g, "w2", d.w2);
  expect_gradient(g, "b2", d.b2);
}

TEST(Goldens, SwigluMlp) {
  const auto g = golden("swiglu_mlp");
  MlpShape s{extent(g, "x", 0), extent(g, "x", 1), extent(g, "w2", 1)};
  s.gated = true;
  ASSERT_EQ(extent(g, "w1", 0), 2 * s.ffn);
  const Values x = values(g, "inputs", "x"), w1 = values(g, "inputs", "w1"),
               w2 = values(g, "inputs", "w2");
  const MlpInputs in{x, w1, {}, {}, w2, {}};
  expect_near(mlp(s, in), values(g, "outputs", "y"), agreement);
  const auto d = mlp_backward(s, in, values(g, "cotangents", "y"));
  expect_gradient(g, "x", d.x);
  expect_gradient(g, "w1", d.w1);
  expect_gradient(g, "w2", d.w2);
}

TEST(Goldens, LayerNorm) {
  const auto g = golden("layernorm");
  const int64_t n = extent(g, "x", 1);
  const double eps = g.at("attributes").at("eps");
  const Values x = values(g, "inputs", "x"), gamma = values(g, "inputs", "gamma");
  expect_near(layer_norm(x, gamma, values(g, "inputs", "beta"), n, eps), values(g, "outputs", "y"),
              agreement);
  const auto d = layer_norm_backward(x, gamma, values(g, "cotangents", "y"), n, eps);
  expect_gradient(g, "x", d.x);
  expect_gradient(g, "gamma", d.gamma);
  expect_gradient(g, "beta", d.beta);
}

TEST(Goldens, RmsNorm) {
  const auto g = golden("rmsnorm");
  const int64_t n = extent(g, "x", 1);
  const double eps = g.at("attributes").at("eps");
  const Values x = values(g, "inputs", "x"), gamma = values(g, "inputs", "gamma");
  expect_near(rms_norm(x, gamma, n, eps), values(g, "outputs", "y"), agreement);
  const auto d = rms_norm_backward(x, gamma, values(g, "cotangents", "y"), n, eps);
  expect_gradient(g, "x", d.x);
  expect_gradient(g, "gamma", d.gamma);
}

// ---- The running error: a float computation by plain loops stays inside, and not by far

using Floats = std::vector<float>;

Values normal(const char* name, int64_t n) {
  const Stream123 stream(11, name);
  Values v(static_cast<size_t>(n));
  for (size_t i = 0; i < v.size(); ++i) v[i] = float(stream.normal(i));
  return v;
}
Floats narrow(In v) { return Floats(v.begin(), v.end()); }

// y[t,o] = sum_i x[t,i] w[o,i] + b[o]
Floats float_linear(const LinearShape& s, const Floats& x, const Floats& w, const Floats& b) {
  Floats y(static_cast<size_t>(s.tokens * s.out));
  for (int64_t t = 0; t < s.tokens; ++t)
    for (int64_t o = 0; o < s.out; ++o) {
      float sum = 0;
      for (int64_t i = 0; i < s.in; ++i) sum += x[size_t(t * s.in + i)] * w[size_t(o * s.in + i)];
      y[size_t(t * s.out + o)] = b.empty() ? sum : sum + b[size_t(o)];
    }
  return y;
}

float float_sigmoid(float x) { return 1 / (1 + std::exp(-x)); }
float float_activation(Activation a, float x) {
  if (a == Activation::gelu) return 0.5f * x * (1 + std::erf(x / std::sqrt(2.0f)));
  if (a == Activation::silu) return x * float_sigmoid(x);
  return 0.5f * x * (1 + std::tanh(0.7978845608f * (x + 0.044715f * x * x * x)));
}

Floats float_mlp(const MlpShape& s, const MlpInputs& in) {
  const Floats z = float_linear(s.first(), narrow(in.x), narrow(in.w1), narrow(in.b1));
  Floats a(static_cast<size_t>(s.tokens * s.ffn));
  for (int64_t t = 0; t < s.tokens; ++t) {
    float squares = 0;
    for (int64_t j = 0; j < s.ffn; ++j) {
      const float* row = &z[size_t(t * s.width())];
      float& v = a[size_t(t * s.ffn + j)];
      v = s.gated ? float_activation(Activation::silu, row[j]) * row[s.ffn + j]
                  : float_activation(s.activation, row[j]);
      squares += v * v;
    }
    const float scale = 1 / std::sqrt(squares / float(s.ffn) + float(s.eps));
    for (int64_t j = 0; s.normalised && j < s.ffn; ++j)
      a[size_t(t * s.ffn + j)] *= scale * float(in.gamma[size_t(j)]);
  }
  return float_linear(s.second(), a, narrow(in.w2), narrow(in.b2));
}

TEST(MlpLoss, AFloatComputationStaysInsideAndTheBoundIsFarBelowTheValues) {
  for (Activation a : {Activation::gelu, Activation::gelu_tanh, Activation::silu})
    for (bool gated : {false, true})
      for (bool normalised : {false, true}) {
        MlpShape s{6, 40, 56, a, gated, normalised};
        const Values x = normal("x", 6 * 40), w1 = normal("w1", s.width() * 40),
                     b1 = normal("b1", s.width()), gamma = normal("gamma", 56),
                     w2 = normal("w2", 40 * 56), b2 = normal("b2", 40);
        const MlpInputs in{x, w1, b1, gamma, w2, b2};
        const Values y = mlp(s, in);
        const Floats got = float_mlp(s, in);
        Rounding r;
        r.accumulate = 0x1p-24;
        const Loss loss = mlp_loss(s, in, r);
        double worst = 0, largest = 0;
        for (size_t i = 0; i < y.size(); ++i) {
          worst = std::max(worst, std::abs(double(got[i]) - y[i]) / loss.error[i]);
          largest = std::max(largest, loss.error[i] / loss.magnitude[i]);
        }
        EXPECT_LE(worst, 1);
        EXPECT_GT(worst, 0) << "float cannot be exact here";
        EXPECT_LT(largest, 2e-3) << "a bound that sees nothing";
      }
}

// Doubling every unit roundoff doubles the loss to first order.
TEST(MlpLoss, GrowsWithTheUnitRoundoffAndWithTheRanks) {
  MlpShape s{3, 5, 4, Activation::gelu};
  const Values x = normal("x", 15), w1 = normal("w1", 20), w2 = normal("w2", 20),
               g = normal("g", 15);
  const MlpInputs in{x, w1, {}, {}, w2, {}};
  Rounding one, two;
  one.accumulate = one.store = one.wire = 0x1p-30;
  two.accumulate = two.store = two.wire = 0x1p-29;
  one.ranks = two.ranks = 4;
  const Loss a = mlp_loss(s, in, one), b = mlp_loss(s, in, two);
  const MlpLosses da = mlp_backward_loss(s, in, g, one), db = mlp_backward_loss(s, in, g, two);
  Rounding alone = one;
  alone.ranks = 1;
  const Loss c = mlp_loss(s, in, alone);
  for (size_t i = 0; i < a.error.size(); ++i) {
    EXPECT_NEAR(b.error[i] / a.error[i], 2, 1e-6);
    EXPECT_NEAR(db.x.error[i] / da.x.error[i], 2, 1e-6);
    EXPECT_NEAR(a.error[i] - c.error[i], 4 * 0x1p-30 * a.magnitude[i], 1e-6 * a.error[i]);
  }
}

}  // namespace reference_linear_test
}  // namespace
}  // namespace shardproof::reference
