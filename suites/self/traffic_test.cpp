// What a contract and a subject say of calls: values that cancel out of every result, traffic of
// the subject's own in place of the contract's, groups by another name. And what is asked of a
// subject that leaves attributes out, or of a line that is too large.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <string>

#include "oracle/cost.hpp"
#include "oracle/gate.hpp"
#include "oracle/overflow.hpp"
#include "oracle/report.hpp"
#include "oracle/run.hpp"

namespace shardproof {
namespace {
namespace traffic_test {

Options quiet(const std::string& pattern) {
  Options o;
  o.patterns = {pattern};
  o.transports = {"processes"};
  o.self = false;
  return o;
}

Report gate(const Registry& registry, const Options& options) {
  Progress silent;
  return run_gate(options, registry, silent);
}

std::string told(const Report& r) {
  std::string text;
  for (const ControlResult& c : r.controls)
    if (c.outcome == ControlResult::escaped || c.outcome == ControlResult::wrong_check)
      text += c.name + " on " + c.witness + ": " + c.reason + "\n";
  for (const std::string& why : no_judgement(r)) text += why + "\n";
  return text;
}

// ---- a maximum that a sum of exponentials is shifted by

// y_t = log sum_v exp x_tv of x [tokens, vocab], vocab cut over tp.
class LogSumExp final : public Kernel {
 public:
  std::unique_ptr<Saved> forward(Rank& rank, std::span<const View> inputs,
                                 std::span<const View> outputs) override {
    rank.require_legal();
    const int64_t tokens = inputs[0].shape[0], own = inputs[0].shape[1];
    const View largest = rank.workspace(DType::f64, {tokens}),
               sum = rank.workspace(DType::f64, {tokens});
    const double* x = inputs[0].as<double>();
    double *m = largest.as<double>(), *s = sum.as<double>(), *y = outputs[0].as<double>();
    for (int64_t t = 0; t < tokens; ++t) m[t] = *std::max_element(x + t * own, x + (t + 1) * own);
    rank.along(Axis::tp).all_reduce(largest, largest, Reduce::max);
    for (int64_t t = 0; t < tokens; ++t) {
      s[t] = 0;
      for (int64_t v = 0; v < own; ++v) s[t] += std::exp(x[t * own + v] - m[t]);
    }
    rank.along(Axis::tp).all_reduce(sum, sum);
    for (int64_t t = 0; t < tokens; ++t) y[t] = m[t] + std::log(s[t]);
    return std::make_unique<Saved>();
  }
};

std::vector<Whole> log_sum_exp(const Case&, std::span<const Whole> in, std::vector<Gauge>* gauges) {
  const Whole& x = in[0];
  const int64_t tokens = x.shape[0], vocab = x.shape[1];
  Whole y{{tokens}, {}};
  Gauge g;
  for (int64_t t = 0; t < tokens; ++t) {
    double sum = 0, largest = 0;
    for (int64_t v = 0; v < vocab; ++v) {
      sum += std::exp(x.value[size_t(t * vocab + v)]);
      largest = std::max(largest, std::abs(x.value[size_t(t * vocab + v)]));
    }
    y.value.push_back(std::log(sum));
    // Exponent, term, sum and logarithm round once for each term at most.
    g.bound.push_back(double(8 * vocab) * (1 + largest));
  }
  if (gauges) *gauges = {g};
  return {y};
}

Contract with_shift(bool cancels) {
  Contract c;
  c.name = "log_sum_exp", c.family = "sample",
  c.summary = "y = log sum exp x over a cut vocabulary";
  for (const auto& [extent, fallback] : {std::pair{"tokens", "5"}, std::pair{"vocab", "24"}}) {
    Key key{extent, fallback, "extent"};
    key.low = 1, key.high = 1 << 20;
    c.keys.push_back(key);
  }
  c.operands = [](const Case& line) {
    const int64_t tokens = line.at("tokens");
    return std::vector<Operand>{
        {"x", Operand::input, {tokens, line.at("vocab")}, {{Axis::tp, S(1)}}},
        {"y", Operand::output, {tokens}, {{Axis::tp, I()}}}};
  };
  c.forward = log_sum_exp;
  c.traffic = [cancels](const Case& line, const std::string&, int) {
    const int64_t n = line.at("tokens");
    Traffic shift{Op::all_reduce, Reduce::max, "tp", false, n},
        sum{Op::all_reduce, Reduce::sum, "tp", false, n};
    shift.cancels = cancels;
    return std::vector<Traffic>{shift, sum};
  };
  c.cases = [](const std::string&) {
    return std::vector<std::string>{"log_sum_exp tp=2", "log_sum_exp tp=4"};
  };
  c.witnesses = {"log_sum_exp tp=2"};
  return c;
}

Registry shifted(bool cancels) {
  Registry r = all_families();
  r.add(with_shift(cancels));
  Declared d;
  d.backward = d.strided = false;
  d.storage = {DType::f64};
  r.add(Subject{"", "log_sum_exp", [] { return std::make_unique<LogSumExp>(); }, d});
  return r;
}

bool at_the_shift(const ControlResult& c) {
  return c.witness.find("@forward.tp.1") != std::string::npos;
}

TEST(Cancelling, OperatorsThatOnlyMoveTheRoundingAreEquivalent) {
  for (const std::string tier : {"smoke", "ci"}) {
    Options o = quiet("sample");
    o.tier = tier;
    const Report r = gate(shifted(true), o);
    EXPECT_EQ(exit_code(r), 0) << tier << "\n" << told(r);
    size_t cancels = 0, left_out = 0;
    for (const ControlResult& c : r.controls) {
      cancels += c.reason == "cancels";
      EXPECT_TRUE(c.reason != "cancels" || at_the_shift(c)) << c.witness;
      left_out += at_the_shift(c) && c.name == "skip" && c.outcome == ControlResult::caught;
    }
    EXPECT_GT(cancels, 0u) << tier;
    EXPECT_TRUE(tier != "ci" || left_out > 0) << "a call that is left out is caught all the same";
  }
}

// Of one rank alone it does not cancel, nor does one that each rank has by itself.
TEST(Cancelling, IsNoExcuseForWhatPartsTheRanks) {
  Options o = quiet("sample");
  o.tier = "ci";
  const Report r = gate(shifted(true), o);
  size_t caught = 0;
  for (const ControlResult& c : r.controls)
    if (at_the_shift(c) &&
        (c.name == "bit_exponent" || c.name == "lost_element" || c.name == "skip_payload")) {
      EXPECT_EQ(c.outcome, ControlResult::caught) << c.name << " " << c.reason;
      ++caught;
    }
  EXPECT_GE(caught, 3u);
}

TEST(Cancelling, UnlessTheContractSaysSo) {
  Options o = quiet("sample");
  o.tier = "ci";
  const Report r = gate(shifted(false), o);
  EXPECT_EQ(exit_code(r), 3);
  EXPECT_TRUE(std::any_of(r.controls.begin(), r.controls.end(), [](const ControlResult& c) {
    return c.name == "scale_p" && c.outcome == ControlResult::escaped && at_the_shift(c);
  })) << told(r);
}

// ---- a sum in halves

// Reduce-scatter and all-gather in place of an all-reduce, where the elements can be cut.
class Halves final : public Kernel {
 public:
  std::unique_ptr<Saved> forward(Rank& rank, std::span<const View> inputs,
                                 std::span<const View> outputs) override {
    const auto flat = [](const View& v) { return view_of(v.data, v.dtype, {v.elements()}); };
    Communicator& group = rank.along(Axis::tp);
    if (inputs[0].elements() % group.size() != 0) {
      group.all_reduce(inputs[0], outputs[0]);
      return std::make_unique<Saved>();
    }
    const View block = rank.workspace(DType::f64, {inputs[0].elements() / group.size()});
    group.reduce_scatter(flat(inputs[0]), block, 0);
    group.all_gather(block, flat(outputs[0]), 0);
    return std::make_unique<Saved>();
  }
  void backward(Rank&, Saved&, std::span<const View> cotangents,
                std::span<const View> gradients) override {
    copy(cotangents[0], gradients[0]);
  }
};

std::vector<Traffic> in_halves(const Case& line, int) {
  const int64_t n = line.at("tokens") * line.at("hidden"), p = line.ranks(Axis::tp);
  if (n % p != 0) return {{Op::all_reduce, Reduce::sum, "tp", false, n}};
  return {{Op::reduce_scatter, Reduce::sum, "tp", false, n},
          {Op::all_gather, Reduce::none, "tp", false, n / p}};
}

Registry with_halves(Declared declared) {
  Registry r = all_families();
  declared.strided = false;
  declared.storage = {DType::f64};
  r.add(Subject{"halves", "mapping_reduce", [] { return std::make_unique<Halves>(); },
                std::move(declared)});
  return r;
}

CheckResult ledger_of(const Registry& registry) {
  Progress silent;
  Options options;
  options.checks = {"ledger"};
  const Report r = run_line(parse("mapping_reduce tp=2 tokens=4 hidden=3 subject=halves", registry),
                            options, registry, silent);
  return r.cases.at(0).checks.at(0);
}

// An order of a sum is free within every bound: copies alone may not part by it. Where a contract
// has none it is equivalent, and nowhere else.
TEST(OwnOrder, IsEquivalentWhereNoResultHasCopies) {
  const auto outcomes = [](const std::string& contract) {
    Options o = quiet(contract);
    o.tier = "smoke";
    std::set<std::string> met;
    for (const ControlResult& c : gate(all_families(), o).controls)
      if (c.name == "own_order") met.insert(std::string(name(c.outcome)) + ": " + c.reason);
    return met;
  };
  EXPECT_EQ(outcomes("vocab_log_softmax"), (std::set<std::string>{"equivalent: no copies"}));
  EXPECT_TRUE(outcomes("vocab_cross_entropy").contains("caught: "));
  EXPECT_FALSE(outcomes("vocab_cross_entropy").contains("equivalent: no copies"));
}

// What leaves every result as it is, and what does so in the base shot alone, is told apart from
// what changes a gradient, the calls, or the next run.
TEST(Operators, AreCaughtWhereverTheyShow) {
  const auto outcomes = [](const std::string& contract, const std::string& op,
                           const std::string& site) {
    Options o = quiet(contract);
    o.tier = "ci";
    std::set<std::string> met;
    for (const ControlResult& c : gate(all_families(), o).controls)
      if (c.name == op && c.witness.find(op + site) != std::string::npos)
        met.insert(name(c.outcome));
    return met;
  };
  const std::set<std::string> caught{"caught"};
  EXPECT_EQ(outcomes("mapping_copy", "scale_p", "@backward"), caught);
  EXPECT_EQ(outcomes("vocab_cross_entropy", "twice", "@forward.tp.1"), caught);
}

TEST(OwnTraffic, TakesThePlaceOfTheContracts) {
  EXPECT_EQ(ledger_of(with_halves({})).verdict, Verdict::failed);
  Declared own;
  own.traffic = in_halves;
  const CheckResult passed = ledger_of(with_halves(own));
  EXPECT_EQ(passed.verdict, Verdict::passed);
  EXPECT_NE(passed.note.find("traffic: the subject's own"), std::string::npos) << passed.note;
  own.traffic = [](const Case& line, int rank) {
    auto calls = in_halves(line, rank);
    std::swap(calls[0], calls[1]);
    return calls;
  };
  EXPECT_EQ(ledger_of(with_halves(own)).verdict, Verdict::failed);
}

// Its calls are broken one by one as those of any subject.
TEST(OwnTraffic, IsJudgedByAWholeGate) {
  Declared own;
  own.traffic = in_halves;
  Options o = quiet("mapping_reduce tp=2 dp=1 cp=1 axis=tp");
  o.tier = "ci";
  const Report r = gate(with_halves(own), o);
  EXPECT_EQ(exit_code(r), 0) << told(r) << closing(r);
  EXPECT_EQ(std::count(r.not_due.begin(), r.not_due.end(),
                       "mapping_reduce subject=halves: the contract's traffic; the subject's own "
                       "is due in its place"),
            1);
  for (const char* call : {"@forward.tp.1", "@forward.tp.2"})
    EXPECT_TRUE(std::any_of(r.controls.begin(), r.controls.end(), [&](const ControlResult& c) {
      return c.outcome == ControlResult::caught &&
             c.witness.find("subject=halves") != std::string::npos &&
             c.witness.find(call) != std::string::npos;
    })) << call;
}

// ---- a group that is named with an axis of one rank

// Sums over all replicas, as a kernel does that asks for tp and dp wherever it runs.
class OverBothAxes final : public Kernel {
  std::unique_ptr<Saved> forward(Rank& rank, std::span<const View> inputs,
                                 std::span<const View> outputs) override {
    rank.along({Axis::tp, Axis::dp}).all_reduce(inputs[0], outputs[0]);
    return std::make_unique<Saved>();
  }
  void backward(Rank&, Saved&, std::span<const View> cotangents,
                std::span<const View> gradients) override {
    copy(cotangents[0], gradients[0]);
  }
};

Registry over_both_axes(Declared declared) {
  Registry r = all_families();
  r.add(Subject{"both", "mapping_reduce", [] { return std::make_unique<OverBothAxes>(); },
                std::move(declared)});
  return r;
}

TEST(Groups, AnAxisOfOneRankIsNoOtherGroup) {
  Options o = quiet("mapping_reduce tp=2 dp=1 cp=1 axis=tp");
  const Report r = gate(over_both_axes({}), o);
  EXPECT_EQ(exit_code(r), 0) << told(r) << closing(r);
  Declared own;
  own.traffic = [](const Case& line, int) {
    return std::vector<Traffic>{{Op::all_reduce, Reduce::sum, "dp,tp", false,
                                 line.at("tokens") * line.at("hidden"), line.dtype()}};
  };
  EXPECT_EQ(exit_code(gate(over_both_axes(own), o)), 0) << told(r);
}

TEST(Groups, AnAxisOfSeveralRanksIs) {
  Progress silent;
  Options options;
  options.checks = {"ledger"};
  const Registry registry = over_both_axes({});
  const Report r = run_line(parse("mapping_reduce tp=2 dp=2 axis=tp subject=both", registry),
                            options, registry, silent);
  EXPECT_EQ(r.cases.at(0).checks.at(0).verdict, Verdict::failed);
}

// ---- cases for subjects that leave attributes out

// The twin as a subject of that name, which does not do what `without` says.
Registry with_subject(const std::string& contract, const std::string& control,
                      std::vector<std::string> without) {
  Registry r = all_families();
  Declared declared;
  declared.without = std::move(without);
  r.add(Subject{"mine", contract, r.control(contract, control).make, declared});
  return r;
}

int code_of_smoke(const Registry& registry, const std::string& contract) {
  Options o = quiet(contract);
  o.tier = "smoke";
  o.subjects = {"mine"};
  return exit_code(gate(registry, o));
}

// A loss that knows no smoothing, as most do, has labels to ignore all the same.
TEST(LeftOut, SmoothingLeavesIgnoredLabelsIn) {
  for (const char* control : {"ignored_gradient_not_zeroed", "ignored_loss_not_zeroed"})
    EXPECT_EQ(code_of_smoke(with_subject("vocab_cross_entropy", control, {"label_smoothing"}),
                            "vocab_cross_entropy"),
              1)
        << control;
}

// A mean of gradients is a wrong call, too, and twins of tier smoke are asked for their calls
// alone: what is told of one that fails is what its values say.
TEST(Smoke, ATwinThatFailsIsAskedAllOfItsChecks) {
  const Registry r = with_subject("linear_row", "row_bias_gradient_averaged", {});
  Options o = quiet("linear_row");
  o.tier = "smoke";
  std::set<std::string> due;
  for (const Due& d : plan_gate(o, r)) due.insert(print_canonical(d.line));
  const Report report = gate(r, o);
  const auto failed = [](const CaseResult& c, const std::string& check) {
    return std::any_of(c.checks.begin(), c.checks.end(), [&](const CheckResult& k) {
      return k.check == check && k.verdict == Verdict::failed;
    });
  };
  int twins = 0;
  for (const CaseResult& c : report.cases) {
    if (!failed(c, "ledger") || due.contains(c.canonical)) continue;
    if (!parse(c.canonical, r).on("sp")) continue;  // the mean of equal gradients is each of them
    ++twins;
    EXPECT_TRUE(failed(c, "gradient")) << c.line;
  }
  EXPECT_GT(twins, 0);
}

// Own extents that are odd: what goes two by two has one left.
TEST(LeftOut, OddExtentsAreAskedWithoutSequenceParallelism) {
  const Registry registry = all_families();
  for (const auto& [contract, key] : {std::pair{"linear_column", "out"}, {"linear_row", "in"}}) {
    std::set<DType> asked;
    for (const std::string& text : registry.contract(contract).cases("ci")) {
      const Case line = parse(text, registry);
      if (!line.on("sp") && line.ranks(Axis::tp) > 1 && line.at(key) / line.ranks(Axis::tp) % 2)
        asked.insert(line.dtype());
    }
    EXPECT_TRUE(asked.count(DType::f64) && asked.count(DType::bf16)) << contract;
  }
}

// ---- more products than can be listed

TEST(Cost, MemoryIsRefusedBeforeProductsAreListed) {
  Registry registry = all_families();
  Contract c = with_shift(true);
  c.gemms = [](const Case&, int) -> std::vector<Gemm> { throw std::logic_error("listed"); };
  registry.add(c);
  registry.add(Subject{"", c.name, [] { return std::make_unique<LogSumExp>(); }, {}});
  const Case small = parse("log_sum_exp tp=2", registry),
             large = parse("log_sum_exp tp=2 tokens=1048576 vocab=1048576", registry);
  EXPECT_THROW(refuse_infeasible(small, {"forward"}, registry), std::logic_error);
  EXPECT_THROW(refuse_infeasible(large, {"forward"}, registry), BadInput);
}

// ---- a deadline counts calls

// Two calls in a pass, and elements that cost next to nothing: 5 ms for each of 2 x passes calls.
TEST(Cost, ADeadlineHasTimeForEachCall) {
  const Registry r = shifted(true);
  const Case line = parse("log_sum_exp tp=2", r), alone = parse("log_sum_exp", r);
  const Declared d = declared_of(line, r);
  Evidence e = plan_case(line, d, {}, r);
  e.shots[0].program = "F0 B0 F0 B0 F0 B0";
  EXPECT_EQ(calls_of(e), 6);
  const double before = deadline_of(e);
  e.shots.insert(e.shots.end(), 999, e.shots[0]);
  EXPECT_EQ(calls_of(e), 6000);
  EXPECT_NEAR(deadline_of(e) - before, 29.97, 0.2);
  EXPECT_EQ(calls_of(plan_case(alone, d, {}, r)), 0);
}

// What `rejection` feeds has no traffic: a contract may state nothing of it, or never end.
TEST(Cost, ALineThatIsRefusedIsAskedForNoTraffic) {
  Registry r = all_families();
  Contract c = with_shift(true);
  c.precondition = [](const Case& line) -> std::optional<Rejected> {
    if (line.at("tokens") == 5) return std::nullopt;
    return Rejected("5 tokens", "others", "use tokens=5");
  };
  c.traffic = [](const Case& line, const std::string&, int) -> std::vector<Traffic> {
    if (line.at("tokens") != 5) throw std::logic_error("asked of a line that is refused");
    return {};
  };
  r.add(c);
  r.add(Subject{"", c.name, [] { return std::make_unique<LogSumExp>(); }, {}});
  const Case refused = parse("log_sum_exp tp=2 tokens=7", r);
  const Evidence e = plan_case(refused, declared_of(refused, r), {"rejection"}, r);
  EXPECT_EQ(calls_of(e), 0);
}

// Each microbatch of each way is a message of its own, between two stages 2 x 2000 in a pass at
// least: deadlines that count products alone leave 30 s to whatever there is.
TEST(Cost, MicrobatchesOfOneTokenHaveTheirTime) {
  const Registry r = all_families();
  const Case line = parse("pipeline_schedule pp=2 tokens=2000 micro_batch_size=1", r);
  const Evidence e = plan_case(line, declared_of(line, r), {"forward"}, r);
  EXPECT_LT(cost_of(e).work / multiplications_per_second, 1);
  EXPECT_GE(deadline_of(e), 30 + 20);
}

std::string refusal(const Registry& r) {
  try {
    plan_gate(quiet("mapping_reduce"), r);
  } catch (const BadInput& e) {
    return e.what();
  }
  return "";
}

TEST(OwnTraffic, APlanThatTheContractDoesNotKnowIsRefused) {
  Declared d;
  d.plan = "halves";
  EXPECT_NE(refusal(with_halves(d))
                .find("subject halves of mapping_reduce: expected nothing, as the contract has no "
                      "other plan"),
            std::string::npos)
      << refusal(with_halves(d));
  d.traffic = in_halves, d.plan = "", d.own_communication = true;
  EXPECT_NE(refusal(with_halves(d)).find("expected one statement of its calls"), std::string::npos);
}

}  // namespace traffic_test
}  // namespace
}  // namespace shardproof
