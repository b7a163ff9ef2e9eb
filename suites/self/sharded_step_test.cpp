// The step of a distributed optimizer: formulas against numbers of PyTorch and by hand, bounds
// against other arrangements of the formulas, shards, calls and refusals that can be followed by
// hand, and what its kernel and its twins do on ranks.
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "fixtures/index_maps.hpp"
#include "fixtures/random.hpp"
#include "fixtures/sharding.hpp"
#include "oracle/registry.hpp"
#include "oracle/run.hpp"
#include "primitives/sharded_step.hpp"
#include "reference/optimizer.hpp"
#include "suites/self/toy_evidence.hpp"

namespace shardproof {

void family_sharded_step(Registry&);
void controls_scaled_step(Registry&);
void controls_sharded_step(Registry&);

namespace {
namespace sharded_step_test {

using Rows = std::vector<int64_t>;
using Doubles = std::vector<double>;
using primitives::FlatBuffer;
using reference::Step;
using reference::StepRule;
using reference::Uncertain;

const Registry& family() {
  static const Registry registry = [] {
    Registry r;
    family_sharded_step(r);
    controls_scaled_step(r);
    controls_sharded_step(r);
    return r;
  }();
  return registry;
}

const Contract& contract() { return family().contract("sharded_step"); }
Case line_of(const std::string& words) { return parse("sharded_step " + words, family()); }

std::string refusal(const std::string& words) {
  const auto refused = contract().precondition(line_of(words));
  return refused ? refused->what() : "";
}

// ---- The formulas

constexpr double u64 = 0x1p-53;

StepRule rule(bool adamw, int64_t step, double decay) {
  return {adamw, 0.125, decay, 0.5, 0.9, 0.95, 0.001, step};
}

Step step_of(const StepRule& r, double u = u64) {
  const Doubles x{1.5, -0.75}, m{0.5, -0.25}, v{0.5, 0.0625};
  return reference::step(r, x, m, v, reference::certain(Doubles{2, -0.125}), {true, true}, u);
}

void expect_near(const Doubles& got, const Doubles& want) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], want[i], 4e-16) << i;
}

// torch.optim.AdamW(lr=1/8, betas=(0.9, 0.95), eps=0.001, weight_decay=..) of PyTorch 2.15 in f64,
// its state set to m, v and step - 1, its gradient to [2, -1/8].
TEST(AdamW, IsThatOfPyTorch) {
  const struct {
    int64_t step;
    double decay;
    Doubles x;
  } seen[] = {{1, 0, {1.2789256781413836, -0.4795901593988817}},
              {1, 0.25, {1.2320506781413836, -0.4561526593988817}},
              {3, 0, {1.3622472000951908, -0.5815800301468363}},
              {3, 0.25, {1.3153722000951908, -0.5581425301468363}},
              {1000, 0, {1.401225873377676, -0.6294502945839154}},
              {1000, 0.25, {1.354350873377676, -0.6060127945839154}}};
  for (const auto& s : seen) {
    const Step got = step_of(rule(true, s.step, s.decay));
    expect_near(got.master.value, s.x);
    expect_near(got.m.value, {0.65, -0.2375});
    expect_near(got.v.value, {0.675, 0.06015625});
  }
}

// From nothing, m^ = g and v^ = g^2: each element moves by lr g / (|g| + eps), and no other sign.
TEST(AdamW, MovesByTheLearningRateInItsFirstStep) {
  const Doubles zero{0, 0};
  const Step got = reference::step(rule(true, 1, 0), zero, zero, zero,
                                   reference::certain(Doubles{4, -0.001}), {true, true}, u64);
  expect_near(got.master.value, {-0.125 * 4 / 4.001, 0.125 / 2});
}

TEST(AdamW, DecaysMatricesAlone) {
  const Doubles x{8, 8}, zero{0, 0};
  const Step got = reference::step(rule(true, 1, 0.25), x, zero, zero, reference::certain(zero),
                                   {true, false}, u64);
  EXPECT_EQ(got.master.value, (Doubles{8 - 8.0 / 32, 8}));
}

// torch.optim.SGD(lr=1/8, momentum=1/2, weight_decay=1/4): m' = m/2 + g + x/4, x' = x - m'/8.
TEST(Sgd, IsThatOfPyTorch) {
  const Step got = step_of(rule(false, 3, 0.25));
  EXPECT_EQ(got.m.value, (Doubles{2.625, -0.4375}));
  EXPECT_EQ(got.master.value, (Doubles{1.171875, -0.6953125}));
  EXPECT_EQ(got.v.size(), 0u);
}

TEST(Clipping, ScalesToALimitAndTellsHowFarItMayBeOff) {
  const Uncertain g{{3, -4}, {0.5, 0}};
  const Uncertain norm = reference::norm_of(g, 2, 0);
  EXPECT_EQ(norm.value, Doubles{5});
  EXPECT_EQ(norm.error, Doubles{0.5});  // the norm of what the elements are off by
  const Uncertain scaled = reference::clipped(g, norm, 1, 0);
  EXPECT_NEAR(scaled.value[0], 0.6, 1e-6);
  // 3.5 over a norm of 4.5 is the farthest that is allowed for; it is within reach of 3.5 over
  // sqrt(3.5^2 + 4^2), which is due.
  EXPECT_GE(scaled.error[0], 3.5 / std::hypot(3.5, 4) - 0.6);
  EXPECT_LE(scaled.error[0], 3.5 / 4.5 - 0.6 + 0.1);
  EXPECT_EQ(reference::clipped(g, norm, 100, 0).value, g.value);
  EXPECT_EQ(reference::clipped(g, norm, 100, 0).error, g.error);
}

// ---- Bounds: every arrangement in f32 is within them, and none is far below them

struct Moved {
  float x, m, v;
};
using Arrangement = Moved (*)(float x, float m, float v, float g, int step);

// As 1 - beta is small, a beta that is rounded first moves its weight by many roundings.
constexpr double lr = 0.125, decay = 0.25, beta1 = 0.99, beta2 = 0.999, eps = 0.001;

// As PyTorch's single-tensor loop: a decayed x, lerp, roots of corrections apart.
Moved apart(float x, float m, float v, float g, int step) {
  x *= float(1 - lr * decay);
  m += float(1 - beta1) * (g - m);
  v = v * float(beta2) + float(1 - beta2) * g * g;
  const double c1 = 1 - std::pow(beta1, step), root = std::sqrt(1 - std::pow(beta2, step));
  const float under = std::sqrt(v) / float(root) + float(eps);
  return {x - float(lr / c1) * (m / under), m, v};
}

// As fused kernels: betas in f32, 1 - beta of these, corrected moments, decay in the update.
Moved fused(float x, float m, float v, float g, int step) {
  const float b1 = float(beta1), b2 = float(beta2);
  m = b1 * m + (1 - b1) * g;
  v = b2 * v + (1 - b2) * g * g;
  const float c1 = 1 - std::pow(b1, float(step)), c2 = 1 - std::pow(b2, float(step));
  const float update = (m / c1) / (std::sqrt(v / c2) + float(eps)) + float(decay) * x;
  return {x - float(lr) * update, m, v};
}

// Largest share of its bound that an arrangement uses.
double share_used(Arrangement arrangement, int step) {
  constexpr size_t n = 4000;
  Doubles x(n), m(n), v(n), g(n);
  for (size_t i = 0; i < n; ++i) {
    const auto drawn = [&](const char* name) { return float(Stream123(7, name).normal(i)); };
    x[i] = drawn("x"), m[i] = drawn("m"), v[i] = std::abs(drawn("v")), g[i] = drawn("g");
    if (i % 3 == 0) v[i] = 0;  // a first step, or an element that no gradient has met
    if (i % 5 == 0) g[i] *= 0x1p-12;
  }
  const double u = 0x1p-24;
  StepRule by = rule(true, step, decay);
  by.beta1 = beta1, by.beta2 = beta2;
  const Step want =
      reference::step(by, x, m, v, reference::certain(g), std::vector<bool>(n, true), u + u64);
  double share = 0;
  for (size_t i = 0; i < n; ++i) {
    const Moved got = arrangement(float(x[i]), float(m[i]), float(v[i]), float(g[i]), step);
    share = std::max({share, std::abs(got.x - want.master.value[i]) / want.master.error[i],
                      std::abs(got.m - want.m.value[i]) / want.m.error[i],
                      std::abs(got.v - want.v.value[i]) / want.v.error[i]});
  }
  return share;
}

TEST(StepBounds, HoldForEveryArrangementAndAreUsed) {
  for (const int step : {1, 2, 3, 50, 1000})
    for (const Arrangement arrangement : {apart, fused}) {
      EXPECT_LE(share_used(arrangement, step), 1) << step;
      EXPECT_GE(share_used(arrangement, step), 0.05) << step;
    }
}

// v' = 0.05 g^2 with g off by all of itself is at least 0: the ratio is as far off as the ends of
// its interval, and finite.
TEST(StepBounds, CoverASecondMomentThatMayBeZero) {
  const Doubles zero{0};
  const Uncertain g{{1e-3}, {1e-3}};
  const Step s = reference::step(rule(true, 1, 0), zero, zero, zero, g, {true}, u64);
  for (const double at : {0.0, 5e-4, 2e-3}) {
    const double moved = -0.125 * at / (at + 0.001);
    EXPECT_LE(std::abs(moved - s.master.value[0]), s.master.error[0]) << at;
  }
  EXPECT_TRUE(std::isfinite(s.master.error[0]));
}

TEST(StepBounds, AreInfiniteWhereACorrectionMayBeZero) {
  const Step s = step_of(rule(true, 3, 0), 0.5);
  EXPECT_TRUE(std::isinf(s.master.error[0]));
  EXPECT_TRUE(std::isfinite(step_of(rule(true, 1 << 30, 0), 0x1p-24).master.error[0]));
}

// 2 microbatches on each of 2 ranks, in any order of sums and shares: within the bound, and not far
// below it.
TEST(StepBounds, CoverSumsOfMicrobatchesAndRanks) {
  constexpr double ranks = 2, n = 2;
  const float third = 1.0f / 3;
  double used = 0;
  for (uint64_t i = 0; i < 4000; ++i) {
    float g[4];
    for (uint64_t k = 0; k < 4; ++k) g[k] = float(Stream123(11, "g").normal(4 * i + k));
    const Doubles sum{double(g[0]) + g[1] + g[2] + g[3]},
        magnitude{std::abs(double(g[0])) + std::abs(g[1]) + std::abs(g[2]) + std::abs(g[3])};
    reference::Rounding r;
    r.wire = 0x1p-24;
    const Uncertain want = reference::sum_of_parts(sum, magnitude, {ranks, n, 1.0 / 3}, r);
    const float behind = ((g[0] + g[1]) + (g[2] + g[3])) * third,
                before = (g[0] * third + g[1] * third) + (g[2] * third + g[3] * third);
    for (const double got : {behind, before})
      used = std::max(used, std::abs(got - want.value[0]) / want.error[0]);
  }
  EXPECT_LE(used, 1);
  EXPECT_GE(used, 0.05);
}

// Of 47 squares, each rounded, and of the gradients below them.
TEST(StepBounds, OfANormCountItsElementsOnce) {
  const Case line = line_of("dp=2 clip=1");
  Evidence e = toy::evidence_of(line, contract());
  Feed& feed = e.shots[0].feeds[0];
  feed.fill = Fill::normal;
  std::vector<Gauge> gauges;
  const auto out = contract().forward(line, drawn_inputs(e, feed), &gauges);
  const double bound = bound_of(e, feed, e.operands.back(), false, out.back(), gauges.back())(0);
  EXPECT_LE(bound, 100 * u64 * out.back().value[0]);
}

TEST(StepBounds, OfOneGradientOfOneRankAreNone) {
  reference::Rounding r;
  r.wire = 0x1p-8;
  EXPECT_EQ(reference::sum_of_parts({3}, Doubles{3}, {}, r).error, Doubles{0});
  EXPECT_GT(reference::sum_of_parts({3}, Doubles{3}, {1, 2, 1}, r).error[0], 0);
}

// ---- The flat buffer

Rows counts(const FlatBuffer& f) {
  Rows all;
  for (int rank = 0; rank < f.ranks; ++rank) all.push_back(f.count(rank));
  return all;
}

// Where pieces lie in a rank's shard, as parameter, first, count.
std::vector<Rows> pieces(const FlatBuffer& f, int rank) {
  std::vector<Rows> list;
  for (const auto& p : f.pieces(rank)) list.push_back({int64_t(p.parameter), p.first, p.count});
  return list;
}

TEST(FlatBuffer, BordersFallInsideOfParameters) {
  // gamma 0-1, w 2-7, b 8-10 in shards 0-2, 3-5, 6-8, 9-10 and one place of padding.
  const FlatBuffer f({{2}, {3, 2}, {3}}, 4, 1);
  EXPECT_EQ(f.first, (Rows{0, 2, 8, 11}));
  EXPECT_EQ(f.matrix, (std::vector<bool>{false, true, false}));
  EXPECT_EQ(f.block, 3);
  EXPECT_EQ(f.padded(), 12);
  EXPECT_EQ(counts(f), (Rows{3, 3, 3, 2}));
  EXPECT_EQ(pieces(f, 0), (std::vector<Rows>{{0, 0, 2}, {1, 2, 1}}));
  EXPECT_EQ(pieces(f, 1), (std::vector<Rows>{{1, 3, 3}}));
  EXPECT_EQ(pieces(f, 2), (std::vector<Rows>{{1, 6, 2}, {2, 8, 1}}));
  EXPECT_EQ(pieces(f, 3), (std::vector<Rows>{{2, 9, 2}}));
}

TEST(FlatBuffer, LeavesRanksWithoutElements) {
  EXPECT_EQ(counts(FlatBuffer({{1}, {1, 1}, {1}}, 8, 0)), (Rows{1, 1, 1, 0, 0, 0, 0, 0}));
  // 5 elements over 4 ranks are 2, 2, 1 and none.
  EXPECT_EQ(counts(FlatBuffer({{2}, {1, 2}, {1}}, 4, 3)), (Rows{2, 2, 1, 0}));
  EXPECT_TRUE(pieces(FlatBuffer({{2}, {1, 2}, {1}}, 4, 3), 3).empty());
}

// The judge's shards and the subject's are written apart: they must name the same elements, each
// of them once.
TEST(FlatBuffer, OfJudgeAndSubjectAreTheSame) {
  for (const std::string mesh : {"dp=3", "dp=8", "dp=4 cp=2", "dp=2 cp=2 shard=cp"})
    for (int64_t rows = 1; rows <= 5; ++rows)
      for (int64_t hidden : {1, 2, 7}) {
        const Case line =
            line_of(mesh + " rows=" + std::to_string(rows) + " hidden=" + std::to_string(hidden));
        const int ranks = int(line.ranks(Axis::cp)) *
                          (line.text("shard") == "cp" ? 1 : int(line.ranks(Axis::dp)));
        const FlatBuffer f({{hidden}, {rows, hidden}, {rows}}, ranks, 0);
        for (const Operand& o : contract().operands(line)) {
          if (o.name != "m") continue;
          for (int rank = 0; rank < line.world(); ++rank) {
            const int cp = line.mesh().coordinate(rank, Axis::cp),
                      dp = line.mesh().coordinate(rank, Axis::dp);
            const int r = (line.text("shard") == "cp" ? 0 : dp * int(line.ranks(Axis::cp))) + cp;
            Rows want(size_t(f.count(r)));
            std::iota(want.begin(), want.end(), f.begin(r));
            ASSERT_EQ(whole_indices(o.shape, o.layout, line.mesh(), rank), want)
                << print(line) << ", rank " << rank;
          }
        }
      }
}

// ---- Calls

std::vector<std::string> calls(const std::string& words) {
  const Case line = line_of(words);
  std::vector<std::string> list;
  for (const Traffic& t : contract().traffic(line, "", 0))
    list.push_back(std::string(t.backward ? "B " : "") + name(t.op) + " " + name(t.reduce) + " " +
                   t.label + " " + std::to_string(t.count) + " " + name(t.dtype));
  return list;
}

TEST(StepTraffic, MovesTheFlatBufferWithItsPadding) {
  using Calls = std::vector<std::string>;
  // 47 elements are 12 a rank of 4, 24 a rank of 2, 6 a rank of 8.
  EXPECT_EQ(calls("dp=4 dtype=bf16 wire=f32"),
            (Calls{"reduce_scatter sum dp 48 f32", "all_gather none dp 12 bf16"}));
  EXPECT_EQ(calls("dp=2 reduce=mean clip=1 dtype=bf16"),
            (Calls{"reduce_scatter avg dp 48 bf16", "all_reduce sum dp 1 f32",
                   "all_gather none dp 24 bf16"}));
  EXPECT_EQ(calls("dp=4 cp=2"),
            (Calls{"reduce_scatter sum cp,dp 48 f64", "all_gather none cp,dp 6 f64"}));
  EXPECT_EQ(calls("dp=4 cp=2 shard=cp clip=1"),
            (Calls{"reduce_scatter sum cp 48 f64", "all_reduce sum dp 24 f64",
                   "all_reduce sum cp 1 f64", "all_gather none cp 24 f64"}));
  EXPECT_EQ(calls("dp=2 shard=cp clip=1"), (Calls{"all_reduce sum dp 47 f64"}));
  EXPECT_EQ(calls("clip=1"), Calls{});
  // A mean over dp is a call's where it is one over dp alone; microbatches move nothing more.
  EXPECT_EQ(calls("dp=4 cp=2 reduce=mean_dp microbatches=3 loss=mean"),
            (Calls{"reduce_scatter sum cp,dp 48 f64", "all_gather none cp,dp 6 f64"}));
  EXPECT_EQ(calls("dp=4 cp=2 shard=cp reduce=mean_dp"),
            (Calls{"reduce_scatter sum cp 48 f64", "all_reduce avg dp 24 f64",
                   "all_gather none cp 24 f64"}));
  EXPECT_EQ(calls("dp=4 reduce=mean_dp"),
            (Calls{"reduce_scatter avg dp 48 f64", "all_gather none dp 12 f64"}));
  EXPECT_EQ(calls("cp=4 reduce=mean_dp"),
            (Calls{"reduce_scatter sum cp 48 f64", "all_gather none cp 12 f64"}));
}

// The flag of a scaled loss goes to all ranks, those of tp included; what it stops moves nothing.
TEST(StepTraffic, AsksAllRanksWhetherAGradientIsFinite) {
  using Calls = std::vector<std::string>;
  EXPECT_EQ(calls("dp=4 loss_scale=16 clip=1 dtype=bf16"),
            (Calls{"reduce_scatter sum dp 48 bf16", "all_reduce max dp 1 f32",
                   "all_reduce sum dp 1 f32", "all_gather none dp 12 bf16"}));
  EXPECT_EQ(calls("tp=2 cp=2 dp=2 shard=cp loss_scale=16 overflow=on master=loaded"),
            (Calls{"reduce_scatter sum cp 48 f64", "all_reduce sum dp 24 f64",
                   "all_reduce max tp,cp,dp 1 f64"}));
  EXPECT_EQ(calls("tp=2 loss_scale=16"), Calls{"all_reduce max tp 1 f64"});
  EXPECT_EQ(calls("loss_scale=16 overflow=on master=loaded"), Calls{});
}

// ---- Refusals and ranges

TEST(StepRefusals, EveryIllegalLineIsRefusedAndNoCaseIs) {
  for (const std::string& text : contract().illegal)
    EXPECT_TRUE(contract().precondition(parse(text, family()))) << text;
  for (const char* tier : {"smoke", "ci", "nightly"})
    for (const std::string& text : contract().cases(tier))
      EXPECT_FALSE(contract().precondition(parse(text, family()))) << text;
  for (const std::string& text : contract().witnesses)
    EXPECT_FALSE(contract().precondition(parse(text, family()))) << text;
}

TEST(StepRefusals, SayWhatIsWrong) {
  EXPECT_NE(refusal("tp=2 dp=2 clip=1").find("leave clip out"), std::string::npos);
  EXPECT_EQ(refusal("tp=2 dp=2"), "");
  // 46339 (46339 + 1) + 46339 elements are below 2^31 - 1; 46340 of each are not.
  EXPECT_EQ(refusal("dp=2 rows=46339 hidden=46339"), "");
  EXPECT_NE(refusal("dp=2 rows=46340 hidden=46340").find("elements"), std::string::npos);
  EXPECT_NE(refusal("dp=2 overflow=on").find("loss_scale=16 with overflow=on"), std::string::npos);
  EXPECT_NE(refusal("dp=2 grows=on").find("loss_scale=16 with grows=on"), std::string::npos);
  EXPECT_NE(refusal("dp=2 loss_scale=16 overflow=on master=loaded clip=1")
                .find("no clip= with overflow=on"),
            std::string::npos);
  EXPECT_NE(refusal("dp=2 loss_scale=16 overflow=on").find("master=loaded with overflow=on"),
            std::string::npos);
  EXPECT_EQ(refusal("tp=2 dp=2 loss_scale=16 overflow=on master=loaded grows=on"), "");
  EXPECT_EQ(refusal("dp=2 loss_scale=16 clip=1"), "");
  for (const char* words : {"loss_scale=3", "loss_scale=0", "overflow=yes", "clip=0", "clip=-1",
                            "clip=1x", "eps=0", "eps=inf", "lr=0.1", "step=0"})
    EXPECT_THROW(line_of(words), BadInput) << words;
}

// x' in units of lr decay = 1/32: 32 of x, 1 of its decay, 2 of m, 4 of each rank's g. B times all
// of them is at most 2^8 in bf16.
TEST(StepRanges, KeepSgdExact) {
  const auto range = [](const std::string& words) {
    return contract().integer_range(line_of(words));
  };
  EXPECT_EQ(range("rule=sgd dtype=bf16 dp=4"), 256 / (32 + 1 + 2 + 4 * 4));
  EXPECT_EQ(range("rule=sgd dtype=bf16 dp=8"), 256 / (32 + 1 + 2 + 4 * 8));
  // A mean over 4 has quarters of these.
  EXPECT_EQ(range("rule=sgd dtype=f16 dp=4 reduce=mean"), 2048 / (4 * (32 + 1 + 2) + 4 * 4));
  EXPECT_EQ(range("rule=sgd dtype=bf16 dp=8 reduce=mean"), std::nullopt);
  // 2 microbatches on each of 4 ranks, of which two are of one mean.
  EXPECT_EQ(range("rule=sgd dtype=f16 dp=2 cp=2 reduce=mean_dp microbatches=2"),
            2048 / (2 * (32 + 1 + 2) + 4 * 8));
  EXPECT_EQ(range("rule=sgd dtype=f16 dp=2 cp=2 reduce=mean_dp microbatches=2 loss=mean"),
            2048 / (4 * (32 + 1 + 2) + 4 * 8));
  // A loss that was scaled by 16 leaves sixteenths.
  EXPECT_EQ(range("rule=sgd dtype=f16 dp=2 loss_scale=16"), 2048 / (16 * (32 + 1 + 2) + 4 * 2));
  EXPECT_EQ(range("rule=sgd dp=2 microbatches=3 loss=mean"), std::nullopt);
  EXPECT_EQ(range("rule=sgd dp=3 reduce=mean"), std::nullopt);
  EXPECT_EQ(range("rule=sgd dp=2 clip=1"), std::nullopt);
  EXPECT_EQ(range("dp=2"), std::nullopt);
}

// Data under the rule have the range's integers, and then nothing is allowed anywhere.
TEST(StepRanges, AreUsedByEveryTier) {
  for (const char* tier : {"smoke", "ci"}) {
    int exact = 0;
    for (const std::string& text : contract().cases(tier)) {
      const Case line = parse(text, family());
      exact += line.text("fill") == "integers" && contract().integer_range(line).has_value();
    }
    EXPECT_GE(exact, tier == std::string("smoke") ? 2 : 20) << tier;
  }
}

// ---- On ranks

Judged run(const std::string& words, const std::vector<std::string>& checks) {
  static Options options;
  static Runner runner(options, family());
  static std::vector<std::unique_ptr<Case>> lines;  // evidence points at its line
  lines.push_back(std::make_unique<Case>(line_of(words)));
  return runner.run(*lines.back(), checks, lane_of(*lines.back()));
}

Doubles output(const Judged& j, int rank, const std::string& name) {
  Doubles values;
  for (size_t o = 0; o < j.evidence.operands.size(); ++o) {
    if (j.evidence.operands[o].name != name) continue;
    const ResultTensor* t = j.evidence.result(rank, 0, 0, int(o), /*gradient=*/false);
    for (size_t i = 0; t && i < t->bytes.size(); i += size_of(t->dtype))
      values.push_back(load(t->bytes.data() + i, t->dtype));
  }
  return values;
}

TEST(StepOnRanks, ARankWithoutElementsTakesPartInEveryCall) {
  const Judged j = run("dp=4 rows=1 hidden=1 rule=sgd clip=1", {"forward", "ledger", "memory"});
  ASSERT_TRUE(j.completed);
  for (const CheckResult& c : j.result.checks) EXPECT_EQ(c.verdict, Verdict::passed) << c.check;
  EXPECT_EQ(output(j, 2, "next_m").size(), 1u);
  EXPECT_EQ(output(j, 3, "next_m").size(), 0u);
  EXPECT_EQ(output(j, 3, "next_w").size(), 1u);
  EXPECT_EQ(j.evidence.ranks[3].shots.at(0).ledger.size(), 3u);
}

// One parameter alone, from zero on and without decay: m' is the gradient that was spent, x' = -m'.
TEST(StepReference, SpendsTheShareThatALineAsksFor) {
  // w has one element; the 8 microbatches of 4 ranks give it 1, 2, 4, .. 128.
  const struct {
    const char* words;
    double share;
  } asked[] = {{"reduce=sum", 1},
               {"reduce=mean", 1 / 4.0},
               {"reduce=mean_dp", 1 / 2.0},
               {"reduce=mean_dp loss=mean", 1 / 4.0},
               {"reduce=mean loss=mean", 1 / 8.0}};
  for (const auto& a : asked) {
    const Case line = line_of(std::string("dp=2 cp=2 microbatches=2 rows=1 hidden=1 rule=sgd "
                                          "master=loaded lr=1 decay=0 ") +
                              a.words);
    std::vector<Whole> in;
    for (const Operand& o : contract().operands(line)) {
      if (o.role != Operand::input) continue;
      in.push_back({whole_shape(o.shape, o.layout, line.mesh()), {}});
      Doubles& values = in.back().value;
      values.assign(size_t(product(in.back().shape)), 0);
      if (o.name == "g_w")
        for (size_t i = 0; i < values.size(); ++i) values[i] = double(1 << i);
    }
    const auto out = contract().forward(line, in, nullptr);
    EXPECT_EQ(out.at(1).value, Doubles{-255 * a.share}) << a.words;
    EXPECT_EQ(out.at(0).value, Doubles{0}) << a.words;
  }
}

std::vector<Whole> counted(const Case& line) {
  std::vector<Whole> in;
  double next = 1;
  for (const Operand& o : contract().operands(line)) {
    if (o.role != Operand::input) continue;
    in.push_back({whole_shape(o.shape, o.layout, line.mesh()), {}});
    for (int64_t i = product(in.back().shape); i > 0; --i) in.back().value.push_back(next++);
  }
  return in;
}

// 4 of a microbatch on each of 2 ranks are a gradient of 8 / 16; x = m = 0 and no decay.
TEST(StepReference, DividesByTheScaleOfTheLoss) {
  for (const bool grows : {false, true}) {
    const Case line = line_of(std::string("dp=2 rows=1 hidden=1 rule=sgd master=loaded lr=1 "
                                          "decay=0 loss_scale=16 grows=") +
                              (grows ? "on" : "off"));
    std::vector<Whole> in = counted(line);
    for (Whole& w : in) std::fill(w.value.begin(), w.value.end(), w.shape.size() > 1 ? 4 : 0);
    const auto out = contract().forward(line, in, nullptr);
    EXPECT_EQ(out.at(0).value, Doubles{-0.5});
    EXPECT_EQ(out.back().value, Doubles{grows ? 32.0 : 16.0});
  }
}

// Whatever is not finite, in whichever gradient of whichever rank: all that goes in comes out, and
// half of the scale.
TEST(StepReference, LeavesEverythingAsItIsWhereAGradientIsNotFinite) {
  const Case line = line_of("tp=2 dp=2 rows=2 hidden=3 loss_scale=1024 grows=on");
  enum { gamma, w, b, g_gamma, g_w, g_b, master, m, v };
  for (const size_t gradient : {g_gamma, g_w, g_b})
    for (const double met : {double(INFINITY), double(-INFINITY), double(NAN)})
      for (const size_t at : {0, 1}) {
        std::vector<Whole> in = counted(line);
        Doubles& values = in.at(gradient).value;
        values.at(at * (values.size() - 1)) = met;
        std::vector<Gauge> gauges;
        const auto out = contract().forward(line, in, &gauges);
        ASSERT_EQ(out.size(), 7u);
        const size_t from[] = {gamma, w, b, master, m, v};
        for (size_t i = 0; i < 6; ++i) EXPECT_EQ(out[i].value, in[from[i]].value) << i;
        EXPECT_EQ(out[6].value, Doubles{512});
        EXPECT_EQ(gauges.size(), 7u);
      }
  // Beyond every float, and finite.
  std::vector<Whole> in = counted(line);
  in.at(g_w).value.at(0) = 1e300;
  EXPECT_EQ(contract().forward(line, in, nullptr).back().value, Doubles{2048});
}

// One element of one rank, whatever the mesh: the last of b on the first rank of dp and cp and the
// last of tp.
TEST(StepOperands, OneElementIsInfinite) {
  for (const char* words : {"", "dp=3", "tp=2 cp=2 dp=2", "tp=2 cp=2 dp=2 order=dp,cp,tp",
                            "dp=2 microbatches=3", "cp=2 shard=cp microbatches=2"}) {
    const Case line = line_of(std::string(words) + " loss_scale=16 overflow=on master=loaded");
    const Mesh mesh = line.mesh();
    int met = 0;
    for (const Operand& o : contract().operands(line)) {
      EXPECT_EQ(bool(o.factor), o.name == "g_b") << o.name;
      if (!o.factor) continue;
      for (int rank = 0; rank < mesh.world(); ++rank) {
        const Rows places = whole_indices(o.shape, o.layout, mesh, rank);
        for (size_t i = 0; i < places.size(); ++i) {
          if (o.factor(places[i]) == 1) continue;
          EXPECT_EQ(o.factor(places[i]), INFINITY);
          EXPECT_EQ(i, places.size() - 1) << words;
          EXPECT_EQ(mesh.coordinate(rank, Axis::dp) + mesh.coordinate(rank, Axis::cp), 0) << words;
          EXPECT_EQ(mesh.coordinate(rank, Axis::tp), line.ranks(Axis::tp) - 1) << words;
          ++met;
        }
      }
    }
    EXPECT_EQ(met, 1) << words;
  }
}

// Rank 3 alone owns the element, rank 0 alone was given it, and all of them keep what they have.
TEST(StepOnRanks, NoneTakesAStepThatOverflows) {
  const Judged j = run("dp=4 loss_scale=16 overflow=on master=loaded grows=on",
                       {"forward", "replica", "ledger"});
  ASSERT_TRUE(j.completed);
  for (const CheckResult& c : j.result.checks) EXPECT_EQ(c.verdict, Verdict::passed) << c.check;
  for (int rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(output(j, rank, "next_scale"), Doubles{8}) << rank;
    for (const char* name : {"next_gamma", "next_w", "next_b", "next_master", "next_m", "next_v"})
      for (const double x : output(j, rank, name)) EXPECT_TRUE(std::isfinite(x)) << name;
    EXPECT_EQ(j.evidence.ranks[size_t(rank)].shots.at(0).ledger.size(), 2u) << rank;
  }
}

// Parameters of every rank are the masters of all ranks, one behind the other, rounded once.
TEST(StepOnRanks, ParametersAreTheMastersRounded) {
  const Judged j = run("dp=3 dtype=bf16 wire=f32", {"forward"});
  Doubles masters;
  for (int rank = 0; rank < 3; ++rank)
    for (double x : output(j, rank, "next_master")) masters.push_back(round_to(x, DType::bf16));
  ASSERT_EQ(masters.size(), 47u);
  for (int rank = 0; rank < 3; ++rank) {
    Doubles all;
    for (const char* name : {"next_gamma", "next_w", "next_b"}) {
      const Doubles part = output(j, rank, name);
      all.insert(all.end(), part.begin(), part.end());
    }
    EXPECT_EQ(all, masters) << rank;
  }
}

// Second moments are drawn without a sign.
TEST(StepOnRanks, SecondMomentsAreNotNegative) {
  const Judged j = run("dp=2", {"forward"});
  for (int rank = 0; rank < 2; ++rank) {
    const Doubles v = output(j, rank, "next_v"), m = output(j, rank, "next_m");
    ASSERT_FALSE(v.empty());
    for (double x : v) EXPECT_GT(x, 0);
    EXPECT_TRUE(std::any_of(m.begin(), m.end(), [](double x) { return x < 0; }));
  }
}

// An optimizer that keeps the masters of its first step is right in that step, and in every one on
// the same parameters.
TEST(StepOnRanks, MastersOfAnEarlierStepAreSeenByASecondStepOnOtherData) {
  const Judged j = run("dp=2 master=loaded rule=sgd control=step_masters_of_first_parameters",
                       {"forward", "repeat"});
  EXPECT_EQ(j.result.checks.at(0).verdict, Verdict::passed);
  ASSERT_EQ(j.result.checks.at(1).verdict, Verdict::failed);
  EXPECT_NE(j.result.checks.at(1).findings.at(0).message.find("other data"), std::string::npos);
  EXPECT_EQ(run("dp=2 master=loaded rule=sgd", {"repeat"}).result.checks.at(0).verdict,
            Verdict::passed);
}

// What is small in a step stands far above what is allowed, in f32 as well.
TEST(StepOnRanks, SmallMistakesStandFarAboveTheBound) {
  for (const char* name :
       {"step_eps_inside_root", "step_eps_corrected", "step_vectors_decay", "step_decay_by_shard",
        "step_counted_after_update", "step_decay_in_gradient"}) {
    const Judged j = run(std::string("dp=2 dtype=f32 control=") + name, {"forward"});
    EXPECT_EQ(j.result.checks.at(0).verdict, Verdict::failed) << name;
    EXPECT_GE(j.result.checks.at(0).ratio, 30) << name;
  }
}

}  // namespace sharded_step_test
}  // namespace
}  // namespace shardproof
