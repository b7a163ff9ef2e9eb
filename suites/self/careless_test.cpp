// Kernels that pass a plain comparison and go wrong in training: what of a step outlives it, what
// is read before it is written, what holds in one mode and not in the other. Each is a plain column
// linear with one such mistake, on ranks of their own processes; the named checks must see it.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <set>

#include "oracle/run.hpp"
#include "suites/self/planted.hpp"

namespace shardproof {
namespace {
namespace careless_test {

using planted::PlainColumn;
using Views = std::span<const View>;

// Names of the checks that failed on the lines, one after the other on the same processes.
using Failed = std::set<std::string>;
std::vector<Failed> each_failed(const planted::Make& make, const std::vector<std::string>& lines) {
  Registry r;
  planted::add_plain(r);
  for (const char* contract : {"linear_column", "mapping_scatter", "mapping_copy"})
    r.add(Subject{"careless", contract, make, {}});
  const Options options;
  Runner runner(options, r);
  std::vector<Failed> all;
  for (const std::string& text : lines) {
    const bool named = text.starts_with("mapping");
    const Case line = parse((named ? "" : "linear_column ") + text + " subject=careless", r);
    const Declared declared = declared_of(line, r);
    const Contract& c = r.contract(line.contract);
    const Judged j = runner.run(line, due_checks(c, line, declared, {}), lane_of(line));
    all.emplace_back();
    for (const CheckResult& check : j.result.checks)
      if (check.verdict != Verdict::passed) all.back().insert(check.check);
  }
  return all;
}
Failed failed(const planted::Make& make, const std::string& line) {
  return each_failed(make, {line})[0];
}
template <class K>
planted::Make made() {
  return [] { return std::make_unique<K>(); };
}

TEST(Careless, ThePlainColumnIsRight) {
  for (const char* line : {"tp=2", "tp=2 dp=2", "tp=2 microbatches=2"})
    EXPECT_EQ(failed(made<PlainColumn>(), line), Failed{}) << line;
}

// ---- What outlives a step

// A copy of the weight (transposed, quantised) under a key that the next step's weight has, too.
template <bool by_address>
struct WeightKept : PlainColumn {
  std::unique_ptr<Saved> forward(Rank& rank, Views in, Views out) override {
    std::vector<double>& kept = kept_[by_address ? in[1].data : nullptr];
    if (kept.empty()) kept = to_doubles(in[1]);
    auto saved = PlainColumn::forward(rank, in, out);
    const View w = rank.workspace(in[1].dtype, in[1].shape);
    fill_from(w, kept);
    PlainColumn::forward(rank, std::vector{in[0], w, in[2]}, out);
    return saved;
  }
  std::map<const void*, std::vector<double>> kept_;
};
TEST(Careless, WeightsThatAreKept) {
  const Failed by_address = failed(made<WeightKept<true>>(), "tp=2"),
               at_once = failed(made<WeightKept<false>>(), "tp=2");
  EXPECT_TRUE(at_once.contains("accumulate")) << testing::PrintToString(at_once);
  EXPECT_TRUE(by_address.contains("accumulate")) << testing::PrintToString(by_address);
}

// Forwards that no backward follows (evaluation) leave their states in the queue, with the
// arguments that they hold on to: what lies later where those lay may be what they were.
struct StatesInAQueue : PlainColumn {
  struct State {
    std::vector<std::vector<std::byte>> arguments;
    std::unique_ptr<Saved> saved;
  };
  std::unique_ptr<Saved> forward(Rank& rank, Views in, Views out) override {
    State& s = states_.emplace_back();
    std::vector<View> own;
    for (const View& v : in) {
      s.arguments.emplace_back(v.data, v.data + v.bytes());
      own.push_back(view_of(s.arguments.back().data(), v.dtype, v.shape));
    }
    s.saved = PlainColumn::forward(rank, own, out);
    return std::make_unique<Saved>();
  }
  void backward(Rank& rank, Saved&, Views cotangents, Views gradients) override {
    const State state = std::move(states_.front());
    states_.pop_front();
    PlainColumn::backward(rank, *state.saved, cotangents, gradients);
  }
  std::deque<State> states_;
};
TEST(Careless, StatesInAQueue) {
  const Failed checks = failed(made<StatesInAQueue>(), "tp=2");
  EXPECT_TRUE(checks.contains("accumulate") && checks.contains("repeat"))
      << testing::PrintToString(checks);
}

// Scratch memory of all cases, as large as the first one needs.
struct ScratchOfTheFirstShape : PlainColumn {
  std::unique_ptr<Saved> forward(Rank& rank, Views in, Views out) override {
    static std::vector<double> scratch;
    const View y = rank.workspace(out[0].dtype, out[0].shape);
    auto saved = PlainColumn::forward(rank, in, std::vector{y});
    if (scratch.empty()) scratch.resize(size_t(y.elements()));
    const int64_t n = std::min(y.elements(), int64_t(scratch.size()));
    for (int64_t i = 0; i < n; ++i) scratch[size_t(i)] = load(y.flat(i), y.dtype);
    for (int64_t i = 0; i < n; ++i) store(out[0].flat(i), y.dtype, scratch[size_t(i)]);
    return saved;
  }
};
TEST(Careless, ScratchOfTheFirstShape) {
  const auto by_case =
      each_failed(made<ScratchOfTheFirstShape>(), {"tp=2 tokens=6", "tp=2 tokens=12"});
  EXPECT_EQ(by_case[0], Failed{});
  EXPECT_TRUE(by_case[1].contains("forward") && by_case[1].contains("memory"));
}

// ---- What is read before it is written

// Sums into memory of its own that it never sets to zero. In pages that are new there are zeros; a
// rank keeps what was freed, so that a second call meets what the first has left.
template <size_t bytes>
struct OwnMemoryNotCleared : PlainColumn {
  std::unique_ptr<Saved> forward(Rank& rank, Views in, Views out) override {
    const View y = rank.workspace(out[0].dtype, out[0].shape);
    auto saved = PlainColumn::forward(rank, in, std::vector{y});
    auto* sum = static_cast<double*>(std::malloc(bytes));
    for (int64_t i = 0; i < y.elements(); ++i) sum[i] += load(y.flat(i), y.dtype);
    for (int64_t i = 0; i < y.elements(); ++i) store(out[0].flat(i), y.dtype, sum[i]);
    std::free(sum);
    return saved;
  }
};
TEST(Careless, OwnMemoryThatIsNotCleared) {
  EXPECT_NE(failed(made<OwnMemoryNotCleared<1 << 16>>(), "tp=2"), Failed{});
  EXPECT_NE(failed(made<OwnMemoryNotCleared<1 << 20>>(), "tp=2"), Failed{});
}

// ---- What lies beyond the end

// The last sum takes one element more: a number too small to show would hide it.
TEST(Careless, AnElementBehindTheLastIsAdded) {
  const auto adds = [](Rank& rank, const View& in, const View& out) {
    planted::own_block(rank, in, out);
    const double beyond = load(in.data + in.bytes(), in.dtype);
    store(out.data, out.dtype, load(out.data, out.dtype) + beyond);
  };
  for (const char* dtype : {"f64", "f32", "bf16", "f16"}) {
    const Failed checks = failed([=] { return planted::pair(adds, planted::gathered); },
                                 std::string("mapping_scatter tp=2 fill=normal dtype=") + dtype);
    EXPECT_TRUE(checks.contains("forward")) << dtype << testing::PrintToString(checks);
  }
}

// A copy of one element too many, from one guard to the other.
TEST(Careless, AnElementBehindTheLastIsCopied) {
  const auto copies = [](Rank&, const View& in, const View& out) {
    std::memcpy(out.data, in.data, size_t(in.bytes()) + size_of(in.dtype));
  };
  EXPECT_EQ(failed([=] { return planted::pair(copies, planted::reduced); },
                   "mapping_copy tp=2 tokens=4 hidden=6"),
            Failed{"memory"});
}

// ---- What holds in one mode alone

// Where running sums are kept, the gradient of the input is summed twice.
struct InputGradientTwiceInSteps : PlainColumn {
  void backward(Rank& rank, Saved& saved, Views cotangents, Views gradients) override {
    PlainColumn::backward(rank, saved, cotangents, gradients);
    if (!rank.accumulates()) return;
    std::vector<double> dx = to_doubles(gradients[0]);
    for (double& v : dx) v *= 2;
    fill_from(gradients[0], dx);
  }
};
TEST(Careless, TheGradientOfTheInputInStepsOfMicrobatches) {
  EXPECT_EQ(failed(made<InputGradientTwiceInSteps>(), "tp=2 microbatches=2"), Failed{"accumulate"});
}

// What is left of the first step adds to it in the second.
struct InputGradientTwiceInTheSecondStep : InputGradientTwiceInSteps {
  void backward(Rank& rank, Saved& saved, Views cotangents, Views gradients) override {
    if (rank.accumulates() && ++backwards_ > rank.line().at("microbatches"))
      return InputGradientTwiceInSteps::backward(rank, saved, cotangents, gradients);
    PlainColumn::backward(rank, saved, cotangents, gradients);
  }
  int64_t backwards_ = 0;
};
TEST(Careless, TheGradientOfTheInputInTheSecondStep) {
  EXPECT_EQ(failed(made<InputGradientTwiceInTheSecondStep>(), "tp=2 microbatches=2"),
            Failed{"accumulate"});
}

// So is the bias: the forward of a step leaves it out.
struct NoBiasInSteps : PlainColumn {
  std::unique_ptr<Saved> forward(Rank& rank, Views in, Views out) override {
    auto saved = PlainColumn::forward(rank, in, out);
    if (!rank.accumulates()) return saved;
    const View zero = rank.workspace(in[2].dtype, in[2].shape);
    fill_from(zero, std::vector<double>(size_t(zero.elements()), 0.0));
    PlainColumn::forward(rank, std::vector{in[0], in[1], zero}, out);
    return saved;
  }
};
TEST(Careless, TheOutputInStepsOfMicrobatches) {
  EXPECT_EQ(failed(made<NoBiasInSteps>(), "tp=2 microbatches=2"), Failed{"accumulate"});
}

// A rank whose tokens have no part in the loss. The extents are those of a line of which adjoint
// tries no basis vectors.
const char* tokens_apart = "mapping_scatter tp=2 tokens=16 hidden=10";
bool is_zero(const View& v) {
  const std::vector<double> g = to_doubles(v);
  return std::all_of(g.begin(), g.end(), [](double x) { return x == 0; });
}
void zeros(const View& v) { fill_from(v, std::vector<double>(size_t(v.elements()), 0.0)); }

TEST(Careless, ARankWithoutALossThatSendsNothing) {
  const auto skips = [](Rank& rank, const View& g, const View& dx) {
    is_zero(g) ? zeros(dx) : planted::gathered(rank, g, dx);
  };
  const Failed checks =
      failed([=] { return planted::pair(planted::own_block, skips); }, tokens_apart);
  EXPECT_TRUE(checks.contains("accumulate") && checks.contains("lockstep"))
      << testing::PrintToString(checks);
}

TEST(Careless, ARankWithoutALossThatScalesByItsLargestValue) {
  const auto scales = [](Rank& rank, const View& g, const View& dx) {
    std::vector<double> values = to_doubles(g);
    double largest = 0;
    for (double v : values) largest = std::max(largest, std::abs(v));
    const double power = std::exp2(std::ceil(std::log2(largest)));  // integers stay exact
    for (double& v : values) v = v / power * power;
    const View own = rank.workspace(g.dtype, g.shape);
    fill_from(own, values);
    planted::gathered(rank, own, dx);
  };
  EXPECT_EQ(failed([=] { return planted::pair(planted::own_block, scales); }, tokens_apart),
            Failed{"accumulate"});
}

// The axis that is as large as the right one.
struct SumsOverTheOtherAxis : PlainColumn {
  void backward(Rank& rank, Saved& saved, Views cotangents, Views gradients) override {
    PlainColumn::backward(rank, saved, cotangents, gradients);
    const View dx = rank.workspace(gradients[0].dtype, gradients[0].shape);
    copy(gradients[0], dx);
    rank.along(Axis::dp).all_reduce(dx, gradients[0]);
  }
};
TEST(Careless, AnAxisOfTheSameSize) {
  const Failed checks = failed(made<SumsOverTheOtherAxis>(), "tp=2 dp=2");
  EXPECT_TRUE(checks.contains("ledger") && checks.contains("gradient"))
      << testing::PrintToString(checks);
}

// ---- What is right and slow

// Every call is made and met, and there is always another one.
struct Slow : PlainColumn {
  std::unique_ptr<Saved> forward(Rank& rank, Views in, Views out) override {
    const View one = rank.workspace(in[0].dtype, {1}), sum = rank.workspace(in[0].dtype, {1});
    fill_from(one, std::vector<double>{1});
    for (useconds_t pause = 10'000; pause > 0;) {
      usleep(pause);
      rank.along(Axis::tp).all_reduce(one, sum);
    }
    return PlainColumn::forward(rank, in, out);
  }
};

// Of a case that was cut off by its deadline, "" where nobody is said to be wrong in it.
std::string blamed(const CaseResult& c) {
  std::string cut_off;
  for (const CheckResult& check : c.checks) {
    const std::string told = check.findings.empty() ? "" : check.findings[0].message;
    if (check.verdict == Verdict::hung && cut_off.empty()) cut_off = told;
    if (check.verdict == Verdict::failed) return check.check + " failed: " + told;
  }
  for (const char* part : {"the job's deadline of", "--deadline-scale"})
    if (cut_off.find(part) == cut_off.npos) return fmt::format("no '{}' in {}", part, cut_off);
  for (const std::string& line : c.state)
    if (line.find("compute") != line.npos) return "";
  return "nobody is said to compute";
}

TEST(Careless, ACaseThatIsTooSlowBlamesNoCall) {
  std::string why;
  Registry r;
  planted::add_plain(r);
  r.add(Subject{"slow", "linear_column", made<Slow>(), {}});
  for (const double scale : {0.03, 0.3, 1.}) {
    Options options;
    options.deadline_scale = scale;
    const Case line = parse("linear_column tp=2 subject=slow", r);
    const Contract& c = r.contract(line.contract);
    Runner runner(options, r);
    const Judged j = runner.run(line, due_checks(c, line, declared_of(line, r), {}), lane_of(line));
    if (why = blamed(j.result); why.empty()) return;
  }
  ADD_FAILURE() << why;
}

}  // namespace careless_test
}  // namespace
}  // namespace shardproof
