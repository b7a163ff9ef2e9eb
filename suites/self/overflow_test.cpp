// Results that a type cannot hold refuse the line; an infinity in place of one that it holds is a
// finding. Largest numbers by hand: f16 (2 - 2^-10) 2^15 = 65504, bf16 and f32 nearly 2^128.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "oracle/overflow.hpp"
#include "oracle/report.hpp"
#include "oracle/run.hpp"
#include "suites/self/toy_evidence.hpp"

namespace shardproof {
namespace {
namespace overflow_test {

using namespace toy;

constexpr double infinity = std::numeric_limits<double>::infinity();

// ---- One result

struct Value {
  double value, bound = 0;
  std::string keys = "dtype=f16 fill=normal";
  bool gradient = false;
  std::optional<DType> called = {};  // of a call of both phases
};

Key type_key(const char* name) {
  Key key{name, "", "a type"};
  key.choices = {"f64", "f32", "bf16", "f16"};
  return key;
}

// x is a parameter, y an output.
std::string refusal(const Value& v) {
  Contract c = contract({1}, {}, {});
  c.operands = [operands = c.operands](const Case& line) {
    auto list = operands(line);
    list[0].role = Operand::parameter;
    return list;
  };
  c.keys.push_back(type_key("local_grad"));
  if (v.called)
    c.traffic = [type = *v.called](const Case&, const std::string&, int) {
      return std::vector<Traffic>{{Op::all_reduce, Reduce::sum, "tp", false, 1, type}};
    };
  Registry registry;
  registry.add(c);
  const Case line = parse("toy " + v.keys, registry);
  Evidence e;
  e.line = &line, e.contract = &c, e.mesh = line.mesh();
  e.operands = c.operands(line), e.inputs = 1;
  try {
    require_in_range(e, e.operands[v.gradient ? 0 : 1], v.gradient, {{1}, {v.value}},
                     [&](int64_t) { return v.bound; });
  } catch (const BeyondRange& refused) {
    return refused.what();
  }
  return "";
}
bool refuses(const Value& v) { return !refusal(v).empty(); }

TEST(Range, IsThatOfTheTypeAndOfWhatRoundingsMayAdd) {
  EXPECT_FALSE(refuses({65504}));
  EXPECT_FALSE(refuses({-65504}));
  EXPECT_TRUE(refuses({65505}));
  EXPECT_TRUE(refuses({-65505}));
  EXPECT_FALSE(refuses({65000, 504}));
  EXPECT_TRUE(refuses({65000, 505}));
  // Up to half of it nothing is near, however little a bound says; above, a bound as large does.
  EXPECT_FALSE(refuses({32752, infinity}));
  EXPECT_TRUE(refuses({32753, infinity}));
  // What is no number is due as it is.
  EXPECT_FALSE(refuses({-infinity}));
}

TEST(Range, EachTypeThatAResultPassesHasItsOwn) {
  EXPECT_FALSE(refuses({1e30, 0, "dtype=f32"}));
  EXPECT_TRUE(refuses({3.5e38, 0, "dtype=f32"}));
  EXPECT_TRUE(refuses({3.5e38, 0, "dtype=bf16"}));
  EXPECT_FALSE(refuses({3.5e38, 0, "dtype=f64"}));
  EXPECT_TRUE(refuses({7e4, 0, "dtype=f32 acc=f16"}));
  EXPECT_TRUE(refuses({7e4, 0, "dtype=f32 wire=f16"}));
  EXPECT_FALSE(refuses({7e4, 0, "dtype=f32 wire=bf16"}));
  // Types of gradients are those of gradients.
  for (const char* key : {"grad=f16", "local_grad=f16"}) {
    EXPECT_TRUE(refuses({7e4, 0, std::string("dtype=f32 ") + key, true})) << key;
    EXPECT_FALSE(refuses({7e4, 0, std::string("dtype=f32 ") + key, false})) << key;
  }
  EXPECT_TRUE(refuses({7e4, 0, "dtype=f16 grad=f32", true}));  // it travels in f16
  EXPECT_FALSE(refuses({7e4, 0, "dtype=f16 grad=f32 wire=f32", true}));
}

// Two ranks whose one call is of the storage type round nothing to that of the wire.
TEST(Range, AWireThatNoCallIsOfHoldsAnything) {
  const std::string line = "dtype=f32 wire=f16 tp=2";
  EXPECT_FALSE(refuses({7e4, 0, line}));
  EXPECT_TRUE(refuses({7e4, 0, line, false, DType::f16}));
  EXPECT_FALSE(refuses({7e4, 0, line, false, DType::f32}));
  EXPECT_TRUE(refuses({7e4, 0, line + " acc=f16", false, DType::f32}));
}

TEST(Range, ARefusalSaysWhichResultAndWhatToDo) {
  const std::string value = refusal({-7e4}),
                    gradient = refusal({65000, 600, "dtype=f16 fill=normal", true});
  for (const char* words : {"within 65504, the largest f16", "where y is -70000;",
                            "use smaller extents or a wider type"})
    EXPECT_NE(value.find(words), value.npos) << value;
  EXPECT_NE(gradient.find("where the gradient of x is 65000, which roundings may carry beyond;"),
            gradient.npos)
      << gradient;
  const std::string cancelling = refusal({-7e4, 0, "dtype=f16 fill=cancelling"});
  EXPECT_NE(cancelling.find("use fill=normal, smaller"), cancelling.npos) << cancelling;
}

// Three of 30000: each microbatch is in range, their sum is not.
TEST(Range, IsAskedOfSumsOverMicrobatches) {
  for (const auto& [each, beyond] : {std::pair{10000.0, false}, {30000.0, true}}) {
    Contract c = of_microbatches(contract({1}, {}, {}), "3");
    c.backward = [each = each](const Case&, std::span<const Whole>, std::span<const Whole>,
                               std::vector<Gauge>* gauges) {
      Gauge g;
      g.magnitude = {each}, g.squares = {each * each};
      if (gauges) *gauges = {g};
      return std::vector<Whole>{{{1}, {each}}};
    };
    const auto same = [](const Locals& x) { return x; };
    Play play(c, "dtype=f16 fill=normal", same,
              [each = each](const Locals& y) { return Locals(y.size(), {each}); });
    if (beyond)
      EXPECT_THROW(play.judge("accumulate"), BeyondRange);
    else
      EXPECT_NO_THROW(play.judge("accumulate"));
  }
}

// ---- Whole cases: y = 2^power x

class Doubling final : public Kernel {
 public:
  explicit Doubling(bool overflows) : overflows_(overflows) {}
  std::unique_ptr<Saved> forward(Rank& rank, std::span<const View> in,
                                 std::span<const View> out) override {
    rank.require_legal();
    multiply(rank, in[0], out[0]);
    if (overflows_) fill_from(out[0], std::vector<double>(8, infinity));
    return std::make_unique<Saved>();
  }
  void backward(Rank& rank, Saved&, std::span<const View> cotangents,
                std::span<const View> gradients) override {
    multiply(rank, cotangents[0], gradients[0]);
  }

 private:
  static void multiply(Rank& rank, const View& from, const View& to) {
    std::vector<double> values = to_doubles(from);
    for (double& v : values) v = std::ldexp(v, int(rank.line().at("power")));
    fill_from(to, values);
  }
  bool overflows_;
};

Contract doubling(const std::vector<std::string>& cases) {
  Contract c = contract({8}, {}, {});
  c.name = c.family = "doubling", c.summary = "y = 2^power x";
  Key power{"power", "0", "doublings"};
  power.low = 0, power.high = 200;
  c.keys.push_back(power);
  const auto scaled = [](const Case& line, const Whole& x, std::vector<Gauge>* gauges) {
    Whole y = x;
    Gauge g;
    for (double& v : y.value) {
      v = std::ldexp(v, int(line.at("power")));
      g.magnitude.push_back(std::abs(v)), g.squares.push_back(v * v);
    }
    if (gauges) *gauges = {g};
    return std::vector<Whole>{y};
  };
  c.forward = [=](const Case& line, std::span<const Whole> x, std::vector<Gauge>* gauges) {
    return scaled(line, x[0], gauges);
  };
  c.backward = [=](const Case& line, std::span<const Whole>, std::span<const Whole> y,
                   std::vector<Gauge>* gauges) { return scaled(line, y[0], gauges); };
  c.integer_range = nullptr;
  c.cases = [cases](const std::string&) { return cases; };
  return c;
}

Registry doubled(const std::vector<std::string>& cases, bool overflows = false) {
  Registry r;
  r.add(doubling(cases));
  r.add(Subject{"", "doubling", [=] { return std::make_unique<Doubling>(overflows); }, {}});
  return r;
}

const std::string within = "doubling power=10 dtype=f16 fill=normal",
                  beyond = "doubling power=18 dtype=f16 fill=normal";

Options quiet() {
  Options o;
  o.transports = {"processes"};
  o.self = o.controls = false;
  return o;
}

TEST(Overflow, AHealthyKernelIsRefusedAndNotFailed) {
  const Registry r = doubled({});
  Progress silent;
  const auto judged = [&](const std::string& line) {
    return run_line(parse(line, r), quiet(), r, silent);
  };
  EXPECT_EQ(exit_code(judged(within)), 0);
  EXPECT_THROW(judged(beyond), BeyondRange);
  EXPECT_THROW(judged("doubling power=130 dtype=bf16 fill=normal"), BeyondRange);
  for (const auto& [line, refused] : {std::pair{within, false}, {beyond, true}})
    if (refused)
      EXPECT_THROW(refuse_infeasible(parse(line, r), {"forward"}, r), BeyondRange);
    else
      EXPECT_NO_THROW(refuse_infeasible(parse(line, r), {"forward"}, r));
}

// Terms of a result that may be larger than it.
std::vector<Whole> with_terms(std::vector<Whole> values, std::vector<Gauge>* gauges, double terms) {
  if (gauges) (*gauges)[0].magnitude.assign(8, terms);
  return values;
}
Contract terms_of_result(double terms) {
  Contract c = doubling({});
  c.forward = [terms, last = c.forward](const Case& line, std::span<const Whole> x,
                                        std::vector<Gauge>* gauges) {
    return with_terms(last(line, x, gauges), gauges, terms);
  };
  return c;
}
Contract terms_of_gradient(double terms) {
  Contract c = doubling({});
  c.backward = [terms, last = c.backward](const Case& line, std::span<const Whole> x,
                                          std::span<const Whole> y, std::vector<Gauge>* gauges) {
    return with_terms(last(line, x, y, gauges), gauges, terms);
  };
  return c;
}

Registry alone(Contract c) {
  Registry r;
  r.add(std::move(c));
  r.add(Subject{"", "doubling", [] { return std::make_unique<Doubling>(false); }, {}});
  return r;
}
bool refuses(Contract c, const std::string& keys) {
  const Registry r = alone(std::move(c));
  try {
    refuse_infeasible(parse("doubling " + keys, r), {"forward"}, r);
  } catch (const BadInput&) {
    return true;
  }
  return false;
}

// A gradient of 2^18 where the result is in range; terms of 10^5 where their sum is. What has no
// gradient has none that is too large, and terms in other types than f16 hold errors of
// activations, which are far from met.
TEST(Overflow, GradientsAndTermsAreAskedOfAsWell) {
  Contract steep = doubling({});
  steep.backward = [backward = steep.backward](Case line, std::span<const Whole> x,
                                               std::span<const Whole> y, std::vector<Gauge>* g) {
    line.set("power", "18");
    return backward(line, x, y, g);
  };
  EXPECT_TRUE(refuses(steep, "dtype=f16 fill=normal"));
  EXPECT_FALSE(refuses(steep, "dtype=bf16 fill=normal"));
  steep.operands = [operands = steep.operands](const Case& line) {
    auto list = operands(line);
    list[0].gradient = false;
    return list;
  };
  EXPECT_FALSE(refuses(steep, "dtype=f16 fill=normal"));
  EXPECT_TRUE(refuses(terms_of_result(1e5), "dtype=f16 fill=offset"));
  EXPECT_FALSE(refuses(terms_of_result(1e5), "dtype=bf16 fill=offset"));
  EXPECT_TRUE(refuses(terms_of_gradient(1e5), "dtype=f16 fill=offset"));
  EXPECT_FALSE(refuses(doubling({}), "dtype=f16 fill=offset"));
  EXPECT_FALSE(refuses(terms_of_result(1e39), "dtype=f32 fill=large"));
}

// lse of an empty row.
TEST(Overflow, AnInfinityThatIsDueHasAnyTerms) {
  Contract empty = doubling({});
  empty.forward = [last = empty.forward](const Case& line, std::span<const Whole> x,
                                         std::vector<Gauge>* gauges) {
    auto y = last(line, x, gauges);
    y[0].value[3] = -infinity;
    if (gauges) (*gauges)[0].magnitude[3] = infinity;
    return y;
  };
  EXPECT_FALSE(refuses(empty, "dtype=f16 fill=offset"));
}

// A line that costs more than a start of ranks is looked at where f16 makes that likely; what it
// comes to is held to its types when it is judged, gradients as well as results.
TEST(Overflow, OfLargeLinesHalfPrecisionIsLookedAt) {
  Contract costly = doubling({});
  costly.further_work = [](const Case&) { return 1e10; };
  costly.forward = [](const Case&, std::span<const Whole> x, std::vector<Gauge>*) {
    return std::vector<Whole>{x[0]};
  };
  const Registry r = alone(std::move(costly));
  const std::string half = "doubling power=18 dtype=f16 fill=normal",
                    wide = "doubling power=130 dtype=bf16 fill=normal";
  EXPECT_THROW(refuse_infeasible(parse(half, r), {"gradient"}, r), BeyondRange);
  EXPECT_NO_THROW(refuse_infeasible(parse(wide, r), {"gradient"}, r));
  Truths truths(r);
  const Case line = parse(wide, r);
  const Evidence e = plan_case(line, {}, {"gradient"}, r);
  const Feed& base = e.shots[0].feeds[0];
  EXPECT_THROW(require_in_range(e, base, truths.get(line, e, base)), BeyondRange);
}

// Lines of a contract are not computed before they are judged: one costs no other its verdict.
TEST(Overflow, AGateSkipsTheLineAndSaysWhy) {
  const Registry r = doubled({within, beyond});
  Progress silent;
  const Report report = run_gate(quiet(), r, silent);
  EXPECT_EQ(exit_code(report), 0);
  ASSERT_EQ(report.cases.size(), 2u);
  for (const CaseResult& c : report.cases)
    for (const CheckResult& check : c.checks) {
      const bool skipped = c.line == beyond;
      EXPECT_EQ(check.verdict, skipped ? Verdict::skipped : Verdict::passed)
          << c.line << check.check;
      EXPECT_EQ(check.note.find("fill: expected results within 65504") == 0, skipped) << check.note;
    }
  const auto lane = std::find_if(report.lanes.begin(), report.lanes.end(),
                                 [](const Lane& l) { return l.name == "processes.np1"; });
  ASSERT_NE(lane, report.lanes.end());
  EXPECT_FALSE(lane->proven);
}

TEST(Overflow, AnInfinityInPlaceOfAResultInRangeIsFailed) {
  const Registry r = doubled({within}, /*overflows=*/true);
  Progress silent;
  const Report report = run_gate(quiet(), r, silent);
  EXPECT_EQ(exit_code(report), 1);
  const auto& checks = report.cases.at(0).checks;
  const auto forward = std::find_if(checks.begin(), checks.end(),
                                    [](const CheckResult& c) { return c.check == "forward"; });
  ASSERT_NE(forward, checks.end());
  EXPECT_EQ(forward->verdict, Verdict::failed);
  ASSERT_FALSE(forward->findings.empty());
  EXPECT_EQ(forward->findings[0].got, infinity);
  EXPECT_EQ(forward->findings[0].wrong, 8);
}

// What a gate would skip: bounds are wide on some of these.
TEST(Overflow, NoLineOfATierIsBeyondItsTypes) {
  const Registry r = all_families();
  Truths truths(r);
  int asked = 0;
  for (const Contract& c : r.contracts())
    for (const std::string& text : c.cases("nightly")) {
      const Case line = parse(text, r);
      const auto types = types_passed(line);
      if (std::find(types.begin(), types.end(), DType::f16) == types.end()) continue;
      if (c.precondition && c.precondition(line)) continue;
      const Evidence e = plan_case(line, declared_of(line, r), {}, r);
      truths.trim();
      const Feed& base = e.shots[0].feeds[0];
      EXPECT_NO_THROW(require_in_range(e, base, truths.get(line, e, base))) << text;
      ++asked;
    }
  EXPECT_GT(asked, 100);
}

// y along A x is as large as A x, and B y beyond f16 long before either is: 2^12 of 2^12.
TEST(Overflow, AProbeAlongAResultIsOfTheSizeOfOtherCotangents) {
  const Registry r = doubled({});
  Progress silent;
  const Report report =
      run_line(parse("doubling power=12 dtype=f16 fill=normal", r), quiet(), r, silent);
  EXPECT_EQ(exit_code(report), 0);
}

}  // namespace overflow_test
}  // namespace
}  // namespace shardproof
