// The check gradcheck: what it must see, how finely, and that healthy kernels give it no reason.
#include <gtest/gtest.h>

#include <cmath>

#include "primitives/mlp.hpp"
#include "suites/self/planted.hpp"

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
