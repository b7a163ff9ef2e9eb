// Experts that are feed-forward blocks: the reference on numbers that can be followed by hand and
// against PyTorch, bounds to first order and against float, ranges of integers.
#include <gtest/gtest.h>

#include <cmath>

#include "fixtures/sharding.hpp"
#include "oracle/registry.hpp"
#include "reference/expert_mlp.hpp"
#include "suites/self/goldens.hpp"

namespace shardproof {

void family_expert_mlp(Registry&);

namespace {
namespace expert_mlp_test {

using reference::Activation;
using reference::expert_mlp;
using reference::expert_mlp_backward;
using reference::ExpertMlpInputs;
using reference::ExpertMlpShape;
using reference::Values;

const Registry& families() {
  static const Registry registry = [] {
    Registry r;
    family_expert_mlp(r);
    return r;
  }();
  return registry;
}
Case line_of(const std::string& words) { return parse("expert_mlp " + words, families()); }
const Contract& contract() { return families().contract("expert_mlp"); }

void expect_near(const Values& got, const Values& want, double relative) {
  ASSERT_EQ(got.size(), want.size());
  double most = 0;
  for (double v : want) most = std::max(most, std::abs(v));
  for (size_t i = 0; i < want.size(); ++i) EXPECT_NEAR(got[i], want[i], relative * most) << i;
}

// ---- The reference

// X = [1 2; 3 4]; expert 0 has W1 = [1 0], W2 = [1; 2], expert 1 [0 1] and [3; 1], nothing chooses
// expert 2. Token 0 chooses 0 and 1, token 1 the two in the other order.
TEST(ReferenceExpertMlp, LinearOnesByHand) {
  const ExpertMlpShape s{2, 2, 3, 2, 1, Activation::identity};
  const Values x{1, 2, 3, 4}, chosen{0, 1, 1, 0}, probs{2, 3, 5, 7}, w1{1, 0, 0, 1, 9, 9},
      w2{1, 2, 3, 1, 9, 9};
  const ExpertMlpInputs in{x, chosen, probs, w1, w2};
  // 2 (1) [1 2] + 3 (2) [3 1]; 5 (4) [3 1] + 7 (3) [1 2]
  EXPECT_EQ(expert_mlp(s, in), (Values{20, 10, 81, 62}));
  const auto d = expert_mlp_backward(s, in, Values{1, 0, 0, 10});
  EXPECT_EQ(d.probs, (Values{1, 6, 40, 60}));
  // Of expert 0, dA is 2 (1) and 70 (2), of expert 1 3 (3) and 50 (1).
  EXPECT_EQ(d.x, (Values{2, 9, 140, 50}));
  EXPECT_EQ(d.w1, (Values{2 * 1 + 140 * 3, 2 * 2 + 140 * 4, 9 * 1 + 50 * 3, 9 * 2 + 50 * 4, 0, 0}));
  EXPECT_EQ(d.w2, (Values{2 * 1, 70 * 3, 3 * 2, 50 * 4, 0, 0}));
}

// silu(0) = 0 with the slope 1/2: a closed gate passes nothing and has a gradient, and it is the
// first half of W1.
TEST(ReferenceExpertMlp, AClosedGateHasAGradient) {
  ExpertMlpShape s{1, 1, 1, 1, 1, Activation::silu, true};
  const Values one{1}, chosen{0}, probs{5}, w1{0, 3}, w2{2};
  const ExpertMlpInputs in{one, chosen, probs, w1, w2};
  EXPECT_EQ(expert_mlp(s, in), Values{0});
  const auto d = expert_mlp_backward(s, in, one);
  EXPECT_EQ(d.w1, (Values{5 * 2 * 3 * 0.5, 0}));
  EXPECT_EQ(d.x, Values{0});
  EXPECT_EQ(d.w2, Values{0});
  EXPECT_EQ(d.probs, Values{0});
}

TEST(ReferenceExpertMlp, GoldenOfSwiglu) {
  using goldens::extent;
  using goldens::values;
  const auto g = goldens::golden("expert_swiglu");
  const ExpertMlpShape s{extent(g, "x", 0),
                         extent(g, "chosen", 1),
                         extent(g, "w1", 0),
                         extent(g, "x", 1),
                         extent(g, "w2", 2),
                         Activation::silu,
                         true};
  const Values x = values(g, "inputs", "x"), chosen = values(g, "inputs", "chosen"),
               probs = values(g, "inputs", "probs"), w1 = values(g, "inputs", "w1"),
               w2 = values(g, "inputs", "w2");
  const ExpertMlpInputs in{x, chosen, probs, w1, w2};
  expect_near(expert_mlp(s, in), values(g, "outputs", "y"), 1e-13);
  const auto d = expert_mlp_backward(s, in, values(g, "cotangents", "y"));
  expect_near(d.x, values(g, "gradients", "x"), 1e-13);
  expect_near(d.probs, values(g, "gradients", "probs"), 1e-13);
  expect_near(d.w1, values(g, "gradients", "w1"), 1e-13);
  expect_near(d.w2, values(g, "gradients", "w2"), 1e-13);
}

// ---- The contract

// Both tokens choose expert 0 first, which takes one row of a rank: token 1 gives nothing there.
TEST(ExpertMlp, DroppedChoicesGiveNothingAndGetNoGradient) {
  const Case line =
      line_of("tokens=2 topk=1 experts=2 hidden=1 ffn=1 route=one capacity=1 activation=identity");
  const std::vector<Whole> in{{{2, 1}, {2, 3}},
                              {{2, 1}, {0, 0}},
                              {{2, 1}, {5, 7}},
                              {{2, 1, 1}, {11, 1}},
                              {{2, 1, 1}, {13, 1}}};
  EXPECT_EQ(contract().forward(line, in, nullptr)[0].value, (Values{5 * 13 * 11 * 2, 0}));
  const auto d = contract().backward(line, in, std::vector<Whole>{{{2, 1}, {1, 1}}}, nullptr);
  EXPECT_EQ(d[0].value, (Values{5 * 13 * 11, 0}));
  EXPECT_EQ(d[2].value, (Values{13 * 11 * 2, 0}));
  EXPECT_EQ(d[3].value, (Values{5 * 13 * 2, 0}));
  EXPECT_EQ(d[4].value, (Values{5 * 11 * 2, 0}));
}

// Four factors: of y k h f terms, of dprobs h f h, of dW h T.
TEST(ExpertMlp, IntegersKeepItsSumsExact) {
  // 2 (3) 4 = 24, 3 (4) 3 = 36, 6 (3) = 18: 36 B^4 <= 2^24 up to B = 26.
  const std::string words = "tokens=6 topk=2 hidden=3 ffn=4 experts=3 dtype=f32 activation=";
  EXPECT_EQ(contract().integer_range(line_of(words + "identity")), 26);
  EXPECT_EQ(contract().integer_range(line_of(words + "gelu")), std::nullopt);
  // 24 tokens in two microbatches: 144 B^4 up to B = 18.
  EXPECT_EQ(contract().integer_range(line_of("tokens=24 topk=2 hidden=3 ffn=4 experts=3 dtype=f32 "
                                             "microbatches=2 activation=identity")),
            18);
}

TEST(ExpertMlp, HalvesOfEachExpertAreCut) {
  const Case line = line_of("tp=2 ep=2 ffn=4 hidden=1 experts=2 topk=1");
  const Operand w1 = contract().operands(line)[3], w2 = contract().operands(line)[4];
  EXPECT_EQ(w1.shape, (std::vector<int64_t>{2, 8, 1}));
  EXPECT_EQ(w2.shape, (std::vector<int64_t>{2, 1, 4}));
  // Of expert 0, gates 0 and 1 and ups 4 and 5 lie on the first rank, with columns 0 and 1 of W2.
  const Mesh mesh = line.mesh();
  EXPECT_EQ(whole_indices(w1.shape, w1.layout, mesh, 0), (std::vector<int64_t>{0, 1, 4, 5}));
  EXPECT_EQ(whole_indices(w1.shape, w1.layout, mesh, 3), (std::vector<int64_t>{10, 11, 14, 15}));
  EXPECT_EQ(whole_indices(w2.shape, w2.layout, mesh, 0), (std::vector<int64_t>{0, 1}));
  EXPECT_EQ(whole_indices(w2.shape, w2.layout, mesh, 3), (std::vector<int64_t>{6, 7}));
}

// ---- Bounds

// Ones through one linear expert of one column a rank, in bf16. A row is rounded as Z1, as A, as
// the part that each of two ranks sends and as Z: 5 times by 2^-8.
TEST(Bounds, OfCutExpertsToFirstOrder) {
  const Case line = line_of(
      "tp=2 tokens=4 topk=1 experts=1 hidden=1 ffn=2 route=one dtype=bf16 fill=normal "
      "activation=identity");
  const Values ones(4, 1.0);
  const std::vector<Whole> in{{{4, 1}, ones},
                              {{4, 1}, Values(4)},
                              {{4, 1}, ones},
                              {{1, 2, 1}, {0.5, 0.5}},
                              {{1, 1, 2}, {1, 1}}};
  const double u = 0x1p-24, bf16 = 0x1p-8, second = 16 * bf16 * bf16;
  std::vector<Gauge> y, d;
  contract().forward(line, in, &y);
  for (double b : y[0].bound) EXPECT_NEAR(b * u, 5 * bf16, second);
  contract().backward(line, in, std::vector<Whole>{{{4, 1}, ones}}, &d);
  // G is rounded before it travels; dA, dZ1, two parts and D then.
  EXPECT_NEAR(d[0].bound[0] * u, 6 * bf16, 2 * second);
  EXPECT_NEAR(d[2].bound[0] * u, 5 * bf16, second);
  // Four rows: dW1 = dZ1 X has G, dA and dZ1, dW2 = G A has G, Z1 and A, of 1/2.
  EXPECT_NEAR(d[3].bound[0] * u, 4 * 3 * bf16, 4 * second);
  EXPECT_NEAR(d[4].bound[0] * u, 4 * 3 * bf16 / 2, 4 * second);
}

// Copies on dp add what each has seen: two ranks' rows, and two parts on the wire.
TEST(Bounds, OfCopiesAreSummed) {
  const auto bound = [](const char* words) {
    const Case line = line_of(std::string("tokens=4 topk=1 experts=1 hidden=1 ffn=1 route=one "
                                          "dtype=bf16 fill=normal activation=identity ") +
                              words);
    const std::vector<Whole> in{{{4, 1}, Values(4, 1.0)},
                                {{4, 1}, Values(4)},
                                {{4, 1}, Values(4, 1.0)},
                                {{1, 1, 1}, {1}},
                                {{1, 1, 1}, {1}}};
    std::vector<Gauge> d;
    contract().backward(line, in, std::vector<Whole>{{{4, 1}, Values(4, 1.0)}}, &d);
    return d[3].bound[0] * 0x1p-24;
  };
  EXPECT_NEAR(bound(""), 4 * 3 * 0x1p-8, 1e-3);
  EXPECT_NEAR(bound("dp=2"), 4 * (3 + 2) * 0x1p-8, 2e-3);
}

}  // namespace expert_mlp_test
}  // namespace
}  // namespace shardproof
