// What tolerances are worth: an error just above a bound is seen and one below it is not, in every
// comparator that has a bound; a bound that is too wide lets its control escape, and the report
// says so; a margin that is too small judges nobody.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>

#include "oracle/comm/faults.hpp"
#include "oracle/gate_controls.hpp"
#include "oracle/power.hpp"
#include "oracle/report.hpp"
#include "oracle/run.hpp"
#include "primitives/mapping_maps.hpp"
#include "suites/self/toy_evidence.hpp"

namespace shardproof {

void family_mapping(Registry&);

namespace {
namespace power_test {

using namespace toy;

// P -> I over two ranks. Sums of 1000 terms are claimed, so that bounds are many ulps wide and
// fractions of them can be planted.
Contract long_sums(bool integers = true) {
  Contract c = contract({16, 6}, on_tp(P()), on_tp(I()));
  const auto widened = [](auto of) {
    return [of](const Case& line, auto... arguments) {
      auto result = of(line, arguments...);
      std::vector<Gauge>* gauges = std::get<sizeof...(arguments) - 1>(std::tie(arguments...));
      if (gauges) (*gauges)[0].terms = 1000;
      return result;
    };
  };
  c.forward = widened(c.forward);
  c.backward = widened(c.backward);
  if (!integers) {
    c.integer_range = [](const Case&) { return std::optional<int64_t>{}; };
    c.linear = true;
  }
  return c;
}

const std::string normal = "tp=2 dtype=f64 fill=normal";
Locals sum(const Locals& x) { return all_reduce(x); }
Locals same(const Locals& x) { return x; }

// Verdicts with the planted error at half and at twice what is allowed.
template <class Plant>
void expect_sharp(const Plant& plant) {
  EXPECT_EQ(plant(0.95), Verdict::passed);
  EXPECT_EQ(plant(1.05), Verdict::failed);
  EXPECT_EQ(plant(-0.95), Verdict::passed);
  EXPECT_EQ(plant(-1.05), Verdict::failed);
}

Verdict planted_element(const std::string& check, bool gradient, double bounds) {
  Play play(long_sums(), normal, sum, same);
  play.run(check);
  const Feed& feed = play.e.shots[0].feeds[0];
  const Truth& truth = play.e.truth(feed);
  const Operand& o = play.e.operands[gradient ? 0 : 1];
  const Whole& want = (gradient ? truth.gradients : truth.outputs)[0];
  const Gauge& gauge = (gradient ? truth.gradient_gauges : truth.output_gauges)[0];
  const auto bound = bound_of(play.e, feed, o, gradient, want, gauge);
  play.set(1, gradient, 37, want.value[37] + bounds * bound(37));
  return play.judge_again(check).verdict;
}

TEST(Sharp, Forward) {
  expect_sharp([](double bounds) { return planted_element("forward", false, bounds); });
}

TEST(Sharp, Gradient) {
  expect_sharp([](double bounds) { return planted_element("gradient", true, bounds); });
}

// All elements off by that share of the limit of their rms, each far within its own bound.
TEST(Sharp, WholeTensor) {
  expect_sharp([](double limits) {
    Play play(long_sums(), normal, sum, same);
    play.run("forward");
    const Feed& feed = play.e.shots[0].feeds[0];
    const Truth& truth = play.e.truth(feed);
    const Operand& o = play.e.operands[1];
    const auto scale = scale_of(play.e, feed, o, false, truth.outputs[0], truth.output_gauges[0]);
    const double by = limits * rms_limit(96);
    for (int rank : {0, 1})
      for (int64_t i = 0; i < 96; ++i)
        play.set(rank, false, i, truth.outputs[0].value[size_t(i)] + by * scale(i));
    return play.judge_again("forward").verdict;
  });
}

TEST(Sharp, AdjointOnRoundingData) {
  expect_sharp([](double bounds) {
    Play play(long_sums(/*integers=*/false), normal, sum, same);
    play.run("adjoint");
    const int shot = play.e.find_shot("adjoint:probe:1");
    const Feed& feed = play.e.shots[size_t(shot)].feeds[0];
    const Pairing p = pairings_of(play.e, shot, {{}})[0];
    const Whole y = drawn(play.e, feed, 1, /*cotangent=*/true);
    const double weight = double(scaled_weight(play.e, play.e.operands[1].layout));
    const double shift = double(bounds * p.tolerance()) / (weight * y.value[5]);
    play.set(1, false, 5, play.get(1, false, 5, shot) + shift, shot);
    return play.judge_again("adjoint").verdict;
  });
}

TEST(Sharp, Gradcheck) {
  expect_sharp([](double bounds) {
    Play play(long_sums(), normal, sum, same);
    const CheckResult healthy = play.judge("gradcheck");
    EXPECT_EQ(healthy.verdict, Verdict::passed) << healthy.note;
    const int at = play.e.find_shot("gradcheck:at"), moved = play.e.find_shot("gradcheck:x:+2^-2");
    EXPECT_GE(moved, 0) << "a polynomial is differenced with the largest step";
    // v from the planned shots: x is of type P, rank 1 holds the second half of the stack.
    const size_t element = 96 + 11;
    const double v = (play.e.shots[size_t(moved)].feeds[0].given[0].value[element] -
                      play.e.shots[size_t(at)].feeds[0].given[0].value[element]) *
                     4;
    // The gradient of P is R: each rank pairs its copy with its own part of v.
    play.set(1, true, 11, play.get(1, true, 11, at) + bounds * healthy.bound / v, at);
    return play.judge_again("gradcheck").verdict;
  });
}

TEST(Sharp, SumsOverMicrobatches) {
  expect_sharp([](double bounds) {
    Play play(of_microbatches(long_sums(), "1"), normal + " microbatches=2", sum, same);
    play.run("accumulate");
    const Operand& o = play.e.operands[0];
    for (const char* name : {"accumulate:step 1", "accumulate:step 2"}) {
      const int shot = play.e.find_shot(name);
      std::vector<Addend> addends;
      std::vector<double> want(96);
      for (const Feed& feed : play.e.shots[size_t(shot)].feeds) {
        const Truth& t = play.e.truth(feed);
        addends.push_back({feed, &t.gradients[0], &t.gradient_gauges[0]});
        for (size_t i = 0; i < 96; ++i) want[i] += t.gradients[0].value[i];
      }
      const double planted = bounds * bound_of_sum(play.e, o, addends)(50);
      for (int rank : {0, 1}) {
        ResultTensor& result = play.result(rank, shot, true, /*step=*/3);
        for (size_t i = 0; i < 96; ++i) {
          const bool here = i == 50 && rank == 1 && name == std::string("accumulate:step 2");
          store(result.bytes.data() + i * 8, DType::f64, want[i] + (here ? planted : 0));
        }
      }
    }
    return play.judge_again("accumulate").verdict;
  });
}

// ---- A bound that is too wide

// All elements off by 16 unit roundoffs of f32: about five times what a sum over two ranks may be.
void slightly_off(Rank& rank, const View& in, const View& out) {
  mapping::all_reduce(rank, in, out);
  std::vector<double> y = to_doubles(out);
  for (double& v : y) v *= 1 + 0x1p-20;
  fill_from(out, y);
}

// The contract of P -> I with its gauge multiplied: bounds of single elements and the scales of
// their rms are that much wider.
Report gate_with_bounds_times(double factor, const std::string& tier = "ci",
                              const std::string& named = "forward",
                              mapping::Map subject = mapping::all_reduce,
                              mapping::Map sibling = nullptr, mapping::Map broken = slightly_off) {
  Registry registry;
  family_mapping(registry);
  Contract c = registry.contract("mapping_reduce");
  c.name = c.family = "power";
  c.cases = [](const std::string&) {
    return std::vector<std::string>{"power tp=2 dtype=f32 fill=normal tokens=16 hidden=24"};
  };
  c.witnesses.clear();
  c.illegal.clear();
  c.forward = [forward = c.forward, factor](const Case& line, std::span<const Whole> in,
                                            std::vector<Gauge>* gauges) {
    auto y = forward(line, in, gauges);
    if (gauges)
      for (Gauge& g : *gauges) {
        for (double& v : g.magnitude) v *= factor;
        for (double& v : g.squares) v *= factor * factor;
      }
    return y;
  };
  Registry own;
  own.add(c);
  Declared declared;
  declared.backward = false;
  own.add(
      Subject{"", "power", [=] { return mapping::pair(subject, mapping::identity); }, declared});
  Control control;
  control.contract = "power";
  control.name = "slightly_off";
  control.make = [=] { return mapping::pair(broken, mapping::identity); };
  control.check = named;
  control.witness = c.cases("ci")[0];
  control.declared = declared;
  own.add(control);
  if (sibling) {
    c.name = "sibling";
    c.cases = [](const std::string&) {
      return std::vector<std::string>{"sibling tp=2 tokens=16 hidden=24"};
    };
    own.add(c);
    own.add(Subject{"", "sibling", [=] { return mapping::pair(sibling, mapping::identity); },
                    declared});
  }
  Progress silent;
  Options options;
  options.tier = tier;
  options.transports = {"processes"};
  return run_gate(options, own, silent);
}

const Power& forward_of(const std::vector<Power>& all) {
  for (const Power& p : all)
    if (p.check == "forward") return p;
  throw std::logic_error("no row of forward");
}

TEST(Power, ARightBoundSeesItsControl) {
  const Report report = gate_with_bounds_times(1);
  ASSERT_EQ(report.controls.size(), 1u);
  EXPECT_EQ(report.controls[0].outcome, ControlResult::caught) << report.controls[0].reason;
  EXPECT_GE(report.controls[0].margin, least_margin);
  EXPECT_EQ(exit_code(report), 0);
  const Power p = forward_of(power_of(report));
  EXPECT_EQ(p.state(), "seen");
  EXPECT_EQ(p.weakest, "slightly_off");
  EXPECT_GT(p.ratio, 1);
  EXPECT_LT(p.worst_healthy, 1);
  EXPECT_TRUE(power_warnings(report).empty());
}

// Tier smoke shows a twin to the check that it names, and to the others where that one is silent.
TEST(Power, TierSmokeJudgesAControlAsTheOthersDo) {
  const auto told = [](const std::string& tier, double factor, const std::string& named,
                       mapping::Map subject = mapping::all_reduce) {
    const Report r = gate_with_bounds_times(factor, tier, named, subject);
    const ControlResult& c = r.controls.at(0);
    return fmt::format("{} exit {}, caught by '{}', {} cases, margin {}, {}", name(c.outcome),
                       exit_code(r), c.caught_by, r.cases.size(), c.margin, c.reason);
  };
  for (const auto& [factor, named, begin] :
       {std::tuple(1, "forward", "caught exit 0, caught by 'forward'"),
        {10, "forward", "escaped exit 3, caught by ''"},
        {1, "ledger", "wrong_check exit 3, caught by 'forward'"}}) {
    const std::string smoke = told("smoke", factor, named);
    EXPECT_EQ(smoke, told("ci", factor, named));
    EXPECT_TRUE(smoke.starts_with(begin)) << smoke;
  }
  const std::string unjudged = told("smoke", 1, "forward", slightly_off);
  EXPECT_EQ(unjudged, told("ci", 1, "forward", slightly_off));
  EXPECT_TRUE(unjudged.starts_with("unjudged exit 1")) << unjudged;
}

// Twice the sum, whatever the bounds are.
void doubled(Rank& rank, const View& in, const View& out) {
  mapping::all_reduce(rank, in, out);
  std::vector<double> y = to_doubles(out);
  for (double& v : y) v *= 2;
  fill_from(out, y);
}

// Where code of the family is wrong a control may be caught by another check, or do nothing. One
// that does something and is not seen has escaped, and so has any where all that is healthy passes.
TEST(Power, WrongCodeOfTheFamilyLeavesOpenWhatItsControlsDoNotShow) {
  const auto told = [](double factor, const std::string& named, mapping::Map sibling,
                       mapping::Map broken = slightly_off) {
    const Report r =
        gate_with_bounds_times(factor, "ci", named, mapping::all_reduce, sibling, broken);
    return fmt::format("{} exit {}", name(r.controls.at(0).outcome), exit_code(r));
  };
  EXPECT_EQ(told(1, "ledger", doubled), "unjudged exit 1");
  EXPECT_EQ(told(1, "ledger", mapping::all_reduce), "wrong_check exit 3");
  EXPECT_EQ(told(10, "forward", doubled), "escaped exit 3");
  EXPECT_EQ(told(1, "forward", doubled), "caught exit 1");
  EXPECT_EQ(told(1, "forward", doubled, mapping::all_reduce), "unjudged exit 1");
  EXPECT_EQ(told(1, "forward", mapping::all_reduce, mapping::all_reduce), "escaped exit 3");
}

TEST(Power, ABoundTooWideByTenLetsItsControlEscapeAndSaysSo) {
  const Report report = gate_with_bounds_times(10);
  ASSERT_EQ(report.controls.size(), 1u);
  EXPECT_EQ(report.controls[0].outcome, ControlResult::escaped);
  EXPECT_EQ(exit_code(report), 3);
  const Power p = forward_of(power_of(report));
  EXPECT_EQ(p.state(), "BLIND");
  EXPECT_EQ(p.escaped, std::vector<std::string>{"slightly_off"});
  Report again = report;
  again.controls.push_back(again.controls[0]);
  const auto warnings = power_warnings(again);
  EXPECT_TRUE(std::any_of(warnings.begin(), warnings.end(), [](const std::string& w) {
    return w.find("does not see slightly_off (2 times):") != std::string::npos;
  }));
  ASSERT_EQ(power_warnings(report).size(), 1u);
  EXPECT_NE(power_warnings(report)[0].find("does not see slightly_off"), std::string::npos);
  EXPECT_NE(closing(report).find("does not see slightly_off"), std::string::npos);
  EXPECT_NE(report_json(report).find("\"state\":\"BLIND\""), std::string::npos);
  EXPECT_NE(summary_markdown(report).find("BLIND"), std::string::npos);
}

// ---- The table

ControlResult caught(const std::string& name, const std::string& check, double ratio,
                     double margin) {
  ControlResult c;
  c.name = name;
  c.family = "linear";
  c.outcome = ControlResult::caught;
  c.expected_check = c.caught_by = check;
  c.ratio = ratio;
  c.margin = margin;
  c.bound = 1;
  c.catches = {{check, ratio, margin, false}};
  return c;
}

Report with_controls(std::vector<ControlResult> controls) {
  Report report;
  report.complete = true;
  CaseResult healthy;
  healthy.line = "linear_row tp=4";
  healthy.family = "linear";
  CheckResult check;
  check.check = "forward";
  check.verdict = Verdict::passed;
  check.ratio = 0.25;
  healthy.checks = {check};
  report.cases = {healthy};
  report.controls = std::move(controls);
  return report;
}

TEST(Power, AMarginUnderTenJudgesNobody) {
  const Report low = with_controls({caught("near", "forward", 2.25, 9)});
  EXPECT_EQ(exit_code(low), 3);
  EXPECT_EQ(power_of(low)[0].state(), "LOW");
  EXPECT_EQ(power_warnings(low).size(), 1u);
  const Report enough = with_controls({caught("far", "forward", 2.5, 10)});
  EXPECT_EQ(exit_code(enough), 0);
  EXPECT_EQ(power_of(enough)[0].state(), "seen");
  EXPECT_TRUE(power_warnings(enough).empty());
}

TEST(Power, TheWeakestControlSpeaksForItsCheck) {
  const Report report =
      with_controls({caught("far", "forward", 500, 2000), caught("near", "forward", 5, 20),
                     caught("other", "gradient", 3, 12)});
  const auto all = power_of(report);
  ASSERT_EQ(all.size(), 2u);
  EXPECT_EQ(all[0].weakest, "near");
  EXPECT_EQ(all[0].margin, 20);
  EXPECT_EQ(all[0].caught, 2);
  EXPECT_EQ(all[0].worst_healthy, 0.25);
  EXPECT_EQ(all[1].check, "gradient");
  EXPECT_EQ(all[1].passed, 0);
}

// Of the checks that had to fire those that did not are blind, though another one fired.
TEST(Power, ACheckThatStayedSilentBesideAnotherIsBlind) {
  for (const auto& [fired, silent] : {std::pair("forward", "gradient"), {"gradient", "forward"}}) {
    ControlResult half = caught("half", fired, 5, 20);
    half.outcome = ControlResult::wrong_check;
    half.expected_check = "forward,gradient";
    std::vector<std::string> blind;
    for (const Power& p : power_of(with_controls({half})))
      if (p.state() == "BLIND") blind.push_back(p.check);
    EXPECT_EQ(blind, std::vector<std::string>{silent});
  }
}

// A margin that is no number is the weakest of all.
TEST(Power, AMarginOfNaNIsLow) {
  const Report report =
      with_controls({caught("near", "forward", 5, 20), caught("none", "forward", 1, std::nan("")),
                     caught("far", "forward", 500, 2000)});
  EXPECT_EQ(power_of(report)[0].weakest, "none");
  EXPECT_EQ(power_of(report)[0].state(), "LOW");
}

TEST(Power, TheWorstHealthyRunStandsForItsCheck) {
  Report report = with_controls({});
  EXPECT_FALSE(power_of(report)[0].exact);
  CaseResult better = report.cases[0];
  better.line = "linear_row tp=2";
  better.checks[0].ratio = 0.125;
  report.cases.push_back(better);
  EXPECT_EQ(power_of(report)[0].passed, 2);
  EXPECT_EQ(power_of(report)[0].worst_healthy, 0.25);
  EXPECT_EQ(power_of(report)[0].worst_line, "linear_row tp=4");
}

TEST(Power, EveryCheckSaysWhatItCannotSee) {
  for (const Check& c : all_checks()) EXPECT_NE(blind_to(c.name), "") << c.name;
}

// ---- What a control comes to

// A run on two ranks: checks that fail with a ratio, and one that ends otherwise.
Judged run_of(const std::vector<std::pair<std::string, double>>& failing,
              const std::vector<std::pair<std::string, Verdict>>& others = {}) {
  Judged j;
  for (const auto& [name, ratio] : failing) {
    Finding f;
    f.check = name, f.numeric = true, f.ratio = ratio, f.bound = 1;
    CheckResult c;
    c.check = name, c.verdict = Verdict::failed, c.ratio = ratio, c.findings = {f};
    j.result.checks.push_back(c);
  }
  for (const auto& [name, verdict] : others) {
    CheckResult c;
    c.check = name, c.verdict = verdict, c.ratio = 0.5;
    j.result.checks.push_back(c);
  }
  return j;
}

ControlResult concluded(const Judged& broken, const gating::Expectation& expected,
                        const Judged& healthy = run_of({}, {{"forward", Verdict::passed},
                                                            {"gradient", Verdict::passed}})) {
  ControlResult c;
  gating::conclude(c, broken, healthy, expected);
  return c;
}

TEST(Controls, AreCaughtByTheirChecksWhileTheirTwinPasses) {
  const ControlResult c = concluded(run_of({{"forward", 40}, {"gradient", 20}}),
                                    {{"forward", "gradient"}, {"adjoint"}, false});
  EXPECT_EQ(c.outcome, ControlResult::caught) << c.reason;
  EXPECT_EQ(c.margin, 40) << "20 times a bound, twice what the healthy twin has";
  const ControlResult first =
      concluded(run_of({{"forward", 20}, {"gradient", 40}}), {{"forward", "gradient"}, {}, false});
  EXPECT_EQ(first.margin, 40) << "the weaker of both, whichever comes last";
  // A run of which nothing is left to compare is seen, too.
  EXPECT_EQ(
      concluded(run_of({}, {{"forward", Verdict::vacuous}}), {{"forward"}, {}, false}).outcome,
      ControlResult::caught);
  const ControlResult unjudged =
      concluded(run_of({{"forward", 40}}), {{"forward"}, {}, false}, run_of({{"forward", 3}}));
  EXPECT_EQ(unjudged.outcome, ControlResult::unjudged);
}

TEST(Controls, EveryCheckThatIsNamedHasToFire) {
  const auto told = [](const Judged& broken) {
    const ControlResult c = concluded(broken, {{"forward", "gradient"}, {}, false});
    return std::string(name(c.outcome)) + ": " + c.reason;
  };
  EXPECT_EQ(told(run_of({{"forward", 40}}, {{"gradient", Verdict::passed}})),
            "wrong_check: gradient did not see it");
  EXPECT_EQ(told(run_of({{"forward", 40}}, {{"gradient", Verdict::skipped}})),
            "wrong_check: gradient did not see it");
  EXPECT_EQ(told(run_of({{"forward", 40}})), "wrong_check: gradient did not see it");
  EXPECT_EQ(told(run_of({}, {{"forward", Verdict::passed}})),
            "escaped: forward, gradient did not see it");
}

TEST(Controls, ChecksThatMustBeSilentAre) {
  const Judged both = run_of({{"gradient", 40}, {"replica", 40}});
  EXPECT_EQ(concluded(both, {{"gradient"}, {"forward"}, false}).outcome, ControlResult::caught);
  for (const gating::Expectation& expected :
       {gating::Expectation{{"gradient"}, {"forward", "replica"}, false},
        {{"gradient"}, {}, true}}) {
    const ControlResult c = concluded(both, expected);
    EXPECT_EQ(c.outcome, ControlResult::wrong_check);
    EXPECT_EQ(c.reason, "replica fires and must be silent");
  }
}

TEST(Controls, ACrashOrAHangIsNoCatch) {
  for (const Verdict lost : {Verdict::crashed, Verdict::hung}) {
    Judged broken = run_of({{"forward", 40}}, {{"memory", lost}});
    for (CheckResult& check : broken.result.checks)
      if (check.check == "memory") check.findings.emplace_back().message = "rank 1 SIGKILL";
    const ControlResult c = concluded(broken, {{"forward"}, {}, false});
    EXPECT_EQ(c.outcome, ControlResult::wrong_check);
    EXPECT_EQ(c.reason.find(fmt::format("{}, rank 1 SIGKILL: a crash", name(lost))), 0u)
        << c.reason;
  }
}

// Of results the gradients, or the rest; of every rank.
TEST(Controls, ResultsAreComparedOnEveryRank) {
  const auto run = [](int rank, bool gradient, std::byte value) {
    Judged j;
    j.evidence.ranks.resize(2);
    for (RankRecord& r : j.evidence.ranks) {
      r.shots.resize(1);
      for (const bool g : {false, true})
        r.shots[0].results.push_back({int(g), 0, g, DType::f64, {1}, Bytes({std::byte(1)})});
    }
    ResultTensor& t = j.evidence.ranks[size_t(rank)].shots[0].results[gradient];
    t.bytes = Bytes({value});
    return j;
  };
  const Judged plain = run(0, false, std::byte(1));
  for (const int rank : {0, 1})
    for (const bool gradient : {false, true}) {
      EXPECT_FALSE(gating::same_results(run(rank, gradient, std::byte(2)), plain, gradient));
      EXPECT_TRUE(gating::same_results(run(rank, gradient, std::byte(2)), plain, !gradient));
    }
}

// The gradient of an operand in which results are not linear is none that the adjoint pairs.
TEST(Controls, PairedGradientsAreThoseOfLinearOperands) {
  Judged plain;
  plain.evidence.operands.resize(2);
  plain.evidence.operands[1].linear = false;
  plain.evidence.ranks.resize(2);
  for (RankRecord& r : plain.evidence.ranks) {
    r.shots.resize(1);
    for (const bool gradient : {false, true})
      for (const int operand : {0, 1})
        r.shots[0].results.push_back(
            {0, operand, gradient, DType::f64, {1}, Bytes({std::byte(1)})});
  }
  for (size_t i = 0; i < 4; ++i) {
    Judged broken = plain;
    broken.evidence.ranks[1].shots[0].results[i].bytes = Bytes({std::byte(2)});
    EXPECT_EQ(gating::same_paired_gradients(broken, plain), i != 2) << i;
  }
}

// A result that is not there, a trace of memory, an operator that acted in a later shot.
TEST(Controls, WhatIsMissingOrWasSeenLaterIsADifference) {
  Judged plain;
  plain.evidence.ranks.resize(2);
  for (RankRecord& r : plain.evidence.ranks) {
    r.shots.resize(2);
    r.shots[0].results.push_back({0, 0, false, DType::f64, {1}, Bytes({std::byte(1)})});
  }
  EXPECT_TRUE(gating::same_results(plain, plain, false) && gating::same_traces(plain, plain));
  EXPECT_FALSE(gating::any_active(plain));
  Judged more = plain, written = plain, later = plain;
  more.evidence.ranks[1].shots[0].results.push_back(
      {1, 1, false, DType::f64, {1}, Bytes({std::byte(1)})});
  EXPECT_FALSE(gating::same_results(plain, more, false));
  EXPECT_FALSE(gating::same_results(more, plain, false));
  Judged ended = plain;
  ended.evidence.ranks[1].shots[0].status = ShotRecord::threw;
  EXPECT_FALSE(gating::same_results(plain, ended, false));
  written.evidence.ranks[1].shots[0].memory.push_back({"argument", "x", 1, 0, "seen"});
  EXPECT_FALSE(gating::same_traces(written, plain));
  later.evidence.ranks[1].shots[1].active = true;
  EXPECT_TRUE(gating::any_active(later));
}

// ---- Operators

gating::Site site_of(Op op, Phase phase, int p) {
  gating::Site s{phase, "tp", 1, {}, p};
  s.call.op = op, s.call.phase = phase, s.call.number = 1, s.call.label = "tp";
  s.call.reduce = op == Op::all_reduce || op == Op::reduce_scatter ? Reduce::sum : Reduce::none;
  for (int r = 0; r < p; ++r) s.call.members.push_back(r);
  return s;
}

// The first call of the backward is not the first of the forward, nor one that another rank makes.
TEST(Operators, AreHeldToTheDueCallOfTheirPhaseAndRank) {
  Contract c = contract({4, 6}, on_tp(P()), on_tp(I()));
  c.traffic = [](const Case&, const std::string&, int) {
    return std::vector<Traffic>{{Op::all_reduce, Reduce::sum, "tp", false, 24, DType::f64, 0, -1},
                                {Op::all_reduce, Reduce::sum, "tp", true, 7, DType::f64, 0, 1},
                                {Op::all_reduce, Reduce::sum, "tp", true, 9, DType::f64, 0, -1}};
  };
  const auto same = [](const Locals& x) { return x; };
  Play play(std::move(c), "tp=2", same, same);
  play.run("ledger");
  for (RankRecord& r : play.e.ranks)
    r.shots[0].ledger = {site_of(Op::all_reduce, Phase::forward, 2).call,
                         site_of(Op::all_reduce, Phase::backward, 2).call};
  Judged healthy;
  healthy.evidence = play.e;
  const auto due =
      gating::due_at(site_of(Op::all_reduce, Phase::backward, 2), *play.e.line, healthy);
  ASSERT_TRUE(due);
  EXPECT_EQ(due->count, 9);
}

// A call of several ranks is one site, one that a single rank makes is one, too.
TEST(Operators, AreTriedAtTheCallsOfEveryRank) {
  Judged healthy;
  healthy.evidence.ranks.resize(2);
  for (RankRecord& r : healthy.evidence.ranks) r.shots.resize(1);
  LedgerEntry both = site_of(Op::all_reduce, Phase::forward, 2).call, second = both;
  second.number = 2;
  healthy.evidence.ranks[0].shots[0].ledger = {both};
  healthy.evidence.ranks[1].shots[0].ledger = {both, second};
  const auto sites = gating::sites_of(healthy);
  ASSERT_EQ(sites.size(), 2u);
  EXPECT_EQ(sites[0].number, 1);
  EXPECT_EQ(sites[1].number, 2);
  EXPECT_EQ(sites[1].p, 2);
}

// From their smallest number of ranks on, at the calls that they are made for.
TEST(Operators, ApplyWhereTheyCanShow) {
  const auto applies = [](const char* name, Op op, int p, bool rounding = false, int world = 8) {
    return gating::applies(fault_operator(name), site_of(op, Phase::forward, p), rounding, world);
  };
  EXPECT_TRUE(applies("skip", Op::all_reduce, 2));
  EXPECT_FALSE(applies("own_order", Op::all_reduce, 3));
  EXPECT_FALSE(applies("own_order", Op::all_reduce, 2, true));
  EXPECT_TRUE(applies("own_order", Op::all_reduce, 3, true));
  EXPECT_FALSE(applies("own_order", Op::all_gather, 3, true));
  EXPECT_TRUE(applies("wrong_group", Op::all_reduce, 2));
  EXPECT_FALSE(applies("wrong_group", Op::all_reduce, 2, false, 2)) << "there is no other group";
}

// A call that is another is the ledger's, what it makes of the results that of forward and
// gradient.
TEST(Operators, AreDueToTheChecksThatSeeThem) {
  using Checks = std::vector<std::string>;
  const auto due = [](const char* name, Phase phase, bool outputs, bool gradients,
                      bool one_rank = false) {
    return gating::expectation(fault_operator(name), site_of(Op::all_reduce, phase, 2), one_rank,
                               outputs, gradients, true)
        .checks;
  };
  EXPECT_EQ(due("skip", Phase::forward, true, true), (Checks{"ledger", "forward"}));
  EXPECT_EQ(due("skip", Phase::backward, false, true), (Checks{"ledger", "gradient"}));
  EXPECT_EQ(due("skip", Phase::forward, false, true), (Checks{"ledger", "gradient"}));
  EXPECT_EQ(due("skip", Phase::forward, true, true, true), Checks{"lockstep"});
  EXPECT_EQ(due("own_order", Phase::forward, true, false), Checks{"replica"});
  EXPECT_EQ(due("arrival_order", Phase::forward, true, false), Checks{"repeat"});
  // Payloads of the due call: of a linear contract the pairing sees them in the backward, but for
  // single bits.
  EXPECT_EQ(due("scale_p", Phase::forward, true, true), Checks{"forward"});
  EXPECT_EQ(due("scale_p", Phase::backward, false, true), (Checks{"gradient", "adjoint"}));
  EXPECT_EQ(due("bit_sign", Phase::backward, false, true), Checks{"gradient"});
}

// One rank's fault is another than that of all; each call counts by itself only where all do.
TEST(Operators, AreTriedUntilTheirLikeWasCaught) {
  const FaultOperator& skip = fault_operator("skip");
  const auto reduce = site_of(Op::all_reduce, Phase::forward, 2),
             gather = site_of(Op::all_gather, Phase::backward, 2);
  for (const auto& [alike, again, other] : {std::tuple(gating::Sites::every, true, true),
                                            {gating::Sites::call, false, true},
                                            {gating::Sites::kind, false, false}}) {
    gating::Sites sites(alike);
    EXPECT_TRUE(sites.due(skip, reduce, false));
    sites.caught(skip, reduce, false);
    EXPECT_EQ(sites.due(skip, reduce, false), again);
    EXPECT_EQ(sites.due(skip, gather, false), other);
    EXPECT_TRUE(sites.due(skip, reduce, true));
  }
}

// A kernel that reads no argument behind its call does so at all calls of a line's phase and axis;
// another line may take other calls. No other operator that did nothing speaks for its like.
TEST(Operators, AnArgumentThatNobodyReadsSpeaksForItsLineWhereKindsAreAlike) {
  const FaultOperator &in_place = fault_operator("in_place"), &skip = fault_operator("skip");
  const auto reduce = site_of(Op::all_reduce, Phase::forward, 2),
             again = site_of(Op::all_gather, Phase::forward, 2),
             backward = site_of(Op::all_reduce, Phase::backward, 2);
  for (const auto& [alike, due] : {std::pair(gating::Sites::every, true),
                                   {gating::Sites::call, true},
                                   {gating::Sites::kind, false}}) {
    gating::Sites sites(alike);
    sites.harmless(in_place, reduce);
    EXPECT_EQ(sites.due(in_place, again, false), due);
    EXPECT_TRUE(sites.due(in_place, backward, false));
    sites.harmless(skip, reduce);
    EXPECT_TRUE(sites.due(skip, again, false));
    sites.begin_line();
    EXPECT_TRUE(sites.due(in_place, again, false));
  }
}

}  // namespace power_test
}  // namespace
}  // namespace shardproof
