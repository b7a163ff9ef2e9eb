// The check gradcheck: what it must see, how finely, and that healthy kernels give it no reason.
#include <gtest/gtest.h>

#include <cmath>

#include "primitives/mlp.hpp"
#include "suites/self/planted.hpp"
#include "suites/self/toy_evidence.hpp"

namespace shardproof {

void controls_linear(Registry&);
void family_linear(Registry&);
void family_mapping(Registry&);
void family_mlp(Registry&);

namespace {
namespace gradcheck_test {

// An MLP whose gradient of x is off by a factor, or whose output is.
class Scaled final : public Kernel {
 public:
  Scaled(double output, double gradient) : output_(output), gradient_(gradient) {}
  std::unique_ptr<Saved> forward(Rank& rank, std::span<const View> in,
                                 std::span<const View> out) override {
    auto saved = inner_.forward(rank, in, out);
    scale(out[0], output_);
    return saved;
  }
  void backward(Rank& rank, Saved& saved, std::span<const View> cotangents,
                std::span<const View> gradients) override {
    inner_.backward(rank, saved, cotangents, gradients);
    scale(gradients[0], gradient_);
  }

 private:
  static void scale(const View& v, double by) {
    std::vector<double> values = to_doubles(v);
    for (double& x : values) x *= by;
    fill_from(v, values);
  }
  primitives::Mlp inner_;
  double output_, gradient_;
};

// The output of an MLP on a grid of 2^-10: its derivative is zero nearly everywhere.
class Staircase final : public Kernel {
 public:
  std::unique_ptr<Saved> forward(Rank& rank, std::span<const View> in,
                                 std::span<const View> out) override {
    auto saved = inner_.forward(rank, in, out);
    std::vector<double> y = to_doubles(out[0]);
    for (double& v : y) v = std::floor(v * 1024) / 1024;
    fill_from(out[0], y);
    return saved;
  }
  void backward(Rank& rank, Saved& saved, std::span<const View> cotangents,
                std::span<const View> gradients) override {
    inner_.backward(rank, saved, cotangents, gradients);
  }

 private:
  primitives::Mlp inner_;
};

const Registry& registry() {
  static const Registry all = [] {
    Registry r;
    family_mapping(r);
    family_linear(r);
    family_mlp(r);
    controls_linear(r);
    const auto add = [&](const char* name, std::function<std::unique_ptr<Kernel>()> make) {
      r.add(Subject{name, "mlp", std::move(make), {}});
    };
    add("off_slightly", [] { return std::make_unique<Scaled>(1, 1 + 1e-8); });
    add("off_within", [] { return std::make_unique<Scaled>(1, 1 + 1e-9); });
    add("off_by_rounding", [] { return std::make_unique<Scaled>(1, 1 + 0x1p-50); });
    add("forward_doubled", [] { return std::make_unique<Scaled>(2, 1); });
    add("zero_gradient", [] { return std::make_unique<Scaled>(1, 0); });
    add("nothing", [] { return std::make_unique<Scaled>(0, 1); });
    add("staircase", [] { return std::make_unique<Staircase>(); });
    return r;
  }();
  return all;
}

CheckResult judge(const std::string& text) {
  const Options options;
  Runner runner(options, registry());
  const Case line = parse(text, registry());
  const Judged j = runner.run(line, {"gradcheck"}, lane_of(line));
  EXPECT_EQ(j.result.checks.size(), 1u);
  return j.result.checks.at(0);
}

bool is_due(const std::string& text) {
  const Case line = parse(text, registry());
  const auto due =
      due_checks(registry().contract(line.contract), line, declared_of(line, registry()), {});
  return std::find(due.begin(), due.end(), "gradcheck") != due.end();
}

bool says(const CheckResult& c, const std::string& words) {
  for (const Finding& f : c.findings)
    if ((f.message + f.pattern + f.means).find(words) != std::string::npos) return true;
  return c.note.find(words) != std::string::npos;
}

TEST(Gradcheck, AMistakeThatReferenceAndSubjectShareIsSeenAlone) {
  for (const planted::Plant& p : planted::gradients()) EXPECT_EQ(planted::run(p), "") << p.name;
}

TEST(Gradcheck, HealthyKernelsPass) {
  for (const std::string line :
       {"mlp tp=2", "mlp tp=4 sp=on activation=swiglu", "mlp tp=3 activation=gelu_tanh",
        "mlp activation=silu", "mlp tp=2 dp=2 between=norm_reduced", "linear_column tp=4 sp=on",
        "linear_row tp=2 dp=2 sp=on", "mapping_reduce tp=3", "mapping_gather tp=2"}) {
    const CheckResult c = judge(line);
    EXPECT_EQ(c.verdict, Verdict::passed) << line << " " << c.note;
    EXPECT_LT(c.ratio, 1) << line;
    EXPECT_GT(c.compared, 0) << line;
  }
}

TEST(Gradcheck, NoFalseAlarmOverSeeds) {
  for (int seed = 1; seed <= 30; ++seed)
    for (const std::string line : {"mlp tp=2", "mlp tp=2 activation=swiglu between=norm_reduced"}) {
      const CheckResult c = judge(line + " seed=" + std::to_string(seed));
      EXPECT_EQ(c.verdict, Verdict::passed) << line << " seed " << seed;
    }
}

TEST(Gradcheck, AMissingReductionReadsOneOverP) {
  const CheckResult c = judge("linear_column tp=4 control=dx_left_local");
  EXPECT_EQ(c.verdict, Verdict::failed);
  const CheckResult twice = judge("linear_column tp=4 control=double_dx_reduce");
  EXPECT_EQ(twice.verdict, Verdict::failed);
  EXPECT_TRUE(says(twice, "x 4.000 = tp")) << twice.findings.at(0).pattern;
}

// D2 in double resolves about 1e-12 of a smooth function; the bounds of an MLP leave more open.
TEST(Gradcheck, SeesSmallRelativeErrors) {
  EXPECT_EQ(judge("mlp tp=2 subject=off_slightly").verdict, Verdict::failed);
  EXPECT_EQ(judge("mlp tp=2 subject=off_by_rounding").verdict, Verdict::passed);
}

// Of what passes the tensor that is furthest off speaks.
TEST(Gradcheck, TellsTheWorstOfItsTensors) {
  const CheckResult healthy = judge("mlp tp=2"), off = judge("mlp tp=2 subject=off_within");
  EXPECT_EQ(off.verdict, Verdict::passed);
  EXPECT_EQ(off.where, "along a random direction of x");
  EXPECT_GT(off.ratio, healthy.ratio);
}

TEST(Gradcheck, ComparesWithTheSubjectsOwnForward) {
  const CheckResult c = judge("mlp tp=2 subject=forward_doubled");
  EXPECT_EQ(c.verdict, Verdict::failed);
  EXPECT_TRUE(says(c, "x 0.500")) << c.findings.at(0).pattern;
}

TEST(Gradcheck, AGradientOfZeroIsNoGradient) {
  EXPECT_EQ(judge("mlp tp=2 subject=zero_gradient").verdict, Verdict::failed);
}

// A slope of zero is one that a gradient may differ from.
TEST(Gradcheck, AGradientOfNothingIsWrong) {
  EXPECT_EQ(judge("mlp tp=2 subject=nothing").verdict, Verdict::failed);
}

TEST(Gradcheck, AForwardThatIsNotSmoothIsNamed) {
  const CheckResult c = judge("mlp tp=2 subject=staircase");
  EXPECT_EQ(c.verdict, Verdict::failed);
  EXPECT_TRUE(says(c, "not smooth")) << c.findings.at(0).message;
}

// ---- By hand: y = x on two ranks, whose steps are 2^-2, as it has no fifth derivative

using toy::Locals;
using toy::on_tp;

Locals same(const Locals& x) { return x; }

// A sum whose terms are 10^4 times as large, at one point or at all of them.
Contract loud(std::optional<std::vector<double>> at) {
  Contract c = toy::contract({4, 6}, on_tp(P()), on_tp(I()));
  c.forward = [at, last = c.forward](const Case& line, std::span<const Whole> in,
                                     std::vector<Gauge>* gauges) {
    auto y = last(line, in, gauges);
    if (gauges && (!at || *at == in[0].value)) {
      for (double& v : (*gauges)[0].magnitude) v *= 1e4;
      for (double& v : (*gauges)[0].squares) v *= 1e8;
    }
    return y;
  };
  return c;
}
Locals summed(const Locals& x) { return toy::all_reduce(x); }
CheckResult passed(toy::Play& play) {
  CheckResult r = play.judge("gradcheck");
  EXPECT_EQ(r.verdict, Verdict::passed) << r.note;
  return r;
}

// D2(h/2) is off by 3 eps/(h/2) = 24 eps at h = 2^-2, eps being what phi is off at x, x + hv or
// x - hv, whichever is most.
TEST(Gradcheck, AllowsWhatRoundingLeavesOpenAtEachPoint) {
  toy::Play everywhere(loud({}), "tp=2", summed, same);
  const double bound = passed(everywhere).bound;
  const Evidence& e = everywhere.e;
  const std::vector<double> y = e.truth(e.shots[1].feeds[0]).cotangents[0].value;
  double most = 0;
  for (const char* shot : {"gradcheck:at", "gradcheck:x:+2^-2", "gradcheck:x:-2^-2"}) {
    const Feed& there = e.shots.at(size_t(e.find_shot(shot))).feeds[0];
    const Truth& t = e.truth(there);
    const auto of_y = bound_of(e, there, e.operands[1], false, t.outputs[0], t.output_gauges[0]);
    double eps = 0;
    for (int64_t i = 0; i < 24; ++i) eps += of_y(i) * std::abs(y[size_t(i)]);
    most = std::max(most, eps);
    toy::Play one(loud(there.given[0].value), "tp=2", summed, same);
    EXPECT_NEAR(passed(one).bound, 24 * eps, 0.01 * bound) << shot;
  }
  EXPECT_NEAR(bound, 24 * most, 0.01 * bound);
  toy::Play nowhere(loud(std::vector<double>()), "tp=2", summed, same);
  EXPECT_LT(passed(nowhere).bound, 0.01 * bound);
}

// y = x + x^5: D2(h) is off by h^4 phi5/480, so that D2(h/2) is off by a fifteenth of what lies
// between them.
TEST(Gradcheck, AllowsWhatStepsLeaveOpen) {
  auto x = std::make_shared<Locals>();
  const auto quintic = [=](Locals y) {
    *x = y;
    for (auto& part : y)
      for (double& v : part) v += std::pow(v, 5);
    return y;
  };
  const auto slope = [=](Locals g) {
    for (size_t r = 0; r < g.size(); ++r)
      for (size_t i = 0; i < g[r].size(); ++i) g[r][i] *= 1 + 5 * std::pow((*x)[r][i], 4);
    return g;
  };
  toy::Play play(toy::contract({4, 6}, on_tp(I()), on_tp(I())), "tp=2", quintic, slope);
  EXPECT_NEAR(passed(play).ratio, 1 / 15.0, 1e-3);
}

// A gradient that sums 10^12 terms may be off by what they round, and by no more.
TEST(Gradcheck, AllowsWhatTheBoundOfTheGradientLeavesOpen) {
  for (const auto& [off, verdict] : {std::pair{1e-11, Verdict::passed}, {1e-2, Verdict::failed}}) {
    Contract c = toy::contract({4, 6}, on_tp(P()), on_tp(I()));
    c.backward = [last = c.backward](const Case& line, std::span<const Whole> x,
                                     std::span<const Whole> y, std::vector<Gauge>* gauges) {
      auto g = last(line, x, y, gauges);
      if (gauges) (*gauges)[0].terms = 1'000'000'000'000;
      return g;
    };
    toy::Play play(std::move(c), "tp=2", summed,
                   [off = off](const Locals& y) { return toy::scaled(y, 1 + off); });
    EXPECT_EQ(play.judge("gradcheck").verdict, verdict) << off;
  }
}

// lse of an empty row is infinite wherever x is: it has no part in phi.
TEST(Gradcheck, LeavesOutWhatIsInfiniteByDefinition) {
  Contract c = toy::contract({4, 6}, on_tp(P()), on_tp(I()));
  c.forward = [last = c.forward](const Case& line, std::span<const Whole> x,
                                 std::vector<Gauge>* gauges) {
    auto y = last(line, x, gauges);
    y[0].value[3] = -INFINITY;
    return y;
  };
  const auto with = [](double third, Locals values) {
    for (auto& part : values) part[3] = third;
    return values;
  };
  toy::Play play(
      std::move(c), "tp=2", [=](const Locals& x) { return with(-INFINITY, summed(x)); },
      [=](const Locals& y) { return with(0, y); });
  EXPECT_GT(passed(play).compared, 0);
}

// A runner keeps what the reference says of a line, for its controls: of another line it knows
// nothing.
TEST(Gradcheck, ALineIsJudgedAsIfItWereTheOnlyOne) {
  const Options options;
  Runner runner(options, registry());
  for (const std::string text :
       {"mlp tp=2", "mlp tp=2 seed=2", "mlp tp=2 subject=off_slightly",
        "mlp tp=2 strides=transposed", "mlp tp=2 activation=swiglu", "mlp tp=4", "linear_row tp=2",
        "linear_row tp=2 fill=normal", "mlp tp=2"}) {
    const Case line = parse(text, registry());
    const CheckResult together = runner.run(line, {"gradcheck"}, lane_of(line)).result.checks.at(0),
                      alone = judge(text);
    EXPECT_EQ(together.verdict, alone.verdict) << text;
    EXPECT_EQ(together.ratio, alone.ratio) << text;
    EXPECT_EQ(together.bound, alone.bound) << text;
  }
}

TEST(Gradcheck, IsDueInDoubleOnSmallCasesOfOneHost) {
  EXPECT_TRUE(is_due("mlp tp=2"));
  EXPECT_TRUE(is_due("linear_column tp=4"));
  EXPECT_FALSE(is_due("mlp tp=2 dtype=f32"));
  EXPECT_TRUE(is_due("mlp tp=2 wire=f32"));
  EXPECT_FALSE(is_due("mlp tp=2 wire=bf16"));
  EXPECT_FALSE(is_due("mlp tp=2 transport=mpi"));
  EXPECT_FALSE(is_due("mlp tp=2 tokens=2400"));
  EXPECT_FALSE(is_due("linear_row tp=2 frozen=on input_grad=off"));
}

}  // namespace gradcheck_test
}  // namespace
}  // namespace shardproof
