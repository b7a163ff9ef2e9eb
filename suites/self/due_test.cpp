// What a subject declares that it does not do: not due, counted, and no skip.
#include "oracle/due.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <set>
#include <string>

#include "oracle/device.hpp"

namespace shardproof {
namespace {
namespace due_test {

struct Nothing : Kernel {
  std::unique_ptr<Saved> forward(Rank&, std::span<const View>, std::span<const View>) override {
    return nullptr;
  }
};

Subject named(const std::string& name, const std::string& contract, Declared declared = {}) {
  Subject s;
  s.name = name;
  s.contract = contract;
  s.make = [] { return std::make_unique<Nothing>(); };
  s.declared = std::move(declared);
  return s;
}

Registry with(Subject s) {
  Registry r = all_families();
  r.add(std::move(s));
  return r;
}

Options smoke() {
  Options o;
  o.tier = "smoke";
  o.transports = {"processes"};
  return o;
}

struct Plan {
  std::vector<Due> due;
  std::vector<std::string> not_due, left_out;
};
Plan planned(const Options& o, const Registry& r) {
  Plan p;
  p.due = plan_gate(o, r, &p.not_due, &p.left_out);
  return p;
}
bool any(const Plan& p, const std::function<bool(const Due&)>& is) {
  return std::any_of(p.due.begin(), p.due.end(), is);
}
int64_t times(const Plan& p, const std::string& text) {
  return std::count(p.not_due.begin(), p.not_due.end(), text);
}

std::string refused(const Options& o, const Registry& r) {
  try {
    plan_gate(o, r);
  } catch (const BadInput& e) {
    return e.what();
  }
  return "";
}

TEST(Due, UsersSubjectsAloneAreJudgedAndTheirContractsControls) {
  const Registry r = with(named("mine", "linear_column"));
  const Plan p = planned(smoke(), r);
  for (const std::string& why : p.not_due)  // it declares to do all there is
    EXPECT_TRUE(why.starts_with("gradcheck: ")) << why;
  for (const Due& d : p.due) {
    EXPECT_EQ(d.line.contract, "linear_column");
    EXPECT_EQ(d.line.text("subject"), d.what == Due::healthy ? "mine" : "");
  }
  EXPECT_TRUE(any(p, [](const Due& d) { return d.what == Due::healthy; }));
  EXPECT_TRUE(any(p, [](const Due& d) { return d.what == Due::named_control; }));
}

TEST(Due, OursAreJudgedWhereAskedForAndWhereNobodyElseIs) {
  Options both = smoke();
  both.patterns = {"mapping_copy", "linear_column"};
  Options ours = both;
  ours.subjects = {"ours"};
  const Plan asked = planned(ours, with(named("mine", "linear_column")));
  EXPECT_TRUE(any(asked, [](const Due& d) { return d.line.contract == "mapping_copy"; }));
  EXPECT_FALSE(any(asked, [](const Due& d) { return d.line.text("subject") == "mine"; }));
  const Plan alone = planned(both, all_families());
  EXPECT_TRUE(any(alone, [](const Due& d) { return d.line.contract == "mapping_copy"; }));
}

TEST(Due, TypesThatAreNotDeclaredAreCounted) {
  Declared f64_only;
  f64_only.storage = {DType::f64};
  const Plan all = planned(smoke(), with(named("mine", "linear_column")));
  const Plan p = planned(smoke(), with(named("mine", "linear_column", f64_only)));
  int64_t bf16 = 0, f32 = 0;
  for (const Due& d : all.due) {
    bf16 += d.what == Due::healthy && d.line.dtype() == DType::bf16;
    f32 += d.what == Due::healthy && d.line.dtype() == DType::f32;
  }
  ASSERT_GT(bf16, 0);
  ASSERT_GT(f32, 0);
  EXPECT_EQ(times(p, "linear_column subject=mine: dtype=bf16"), bf16);
  EXPECT_EQ(times(p, "linear_column subject=mine: dtype=f32"), f32);
  EXPECT_EQ(int64_t(p.due.size()), int64_t(all.due.size()) - bf16 - f32);
}

TEST(Due, StridesAndWordsThatAreNotDeclared) {
  Declared d;
  d.strided = false;
  d.without = {"gather_output=on", "heads"};
  Options ci = smoke();
  ci.tier = "ci";
  const Plan p = planned(ci, with(named("mine", "linear_column", d)));
  EXPECT_GT(times(p, "linear_column subject=mine: strides=transposed"), 0);
  EXPECT_GT(times(p, "linear_column subject=mine: gather_output=on"), 0);
  EXPECT_GT(times(p, "linear_column subject=mine: heads"), 0);
  EXPECT_FALSE(any(p, [](const Due& due) {
    return due.what == Due::healthy && (due.line.text("strides") == "transposed" ||
                                        due.line.on("gather_output") || due.line.at("heads") > 0);
  }));
}

// A twin on a line with sp=on is caught where the subject is never asked: it is none of its own.
TEST(Due, ControlsOnLinesThatNoSubjectDoesAreLeftOut) {
  Declared d;
  d.without = {"sp=on"};
  const auto controls = [](const Plan& p, bool sp) {
    return std::count_if(p.due.begin(), p.due.end(), [&](const Due& due) {
      return due.what == Due::named_control && due.line.on("sp") == sp;
    });
  };
  const Plan all = planned(smoke(), with(named("mine", "linear_column"))),
             less = planned(smoke(), with(named("mine", "linear_column", d)));
  EXPECT_TRUE(all.left_out.empty());
  ASSERT_GT(controls(all, true), 0);
  ASSERT_GT(controls(all, false), 0);
  EXPECT_EQ(controls(less, true), 0);
  EXPECT_EQ(controls(less, false), controls(all, false));
  const auto of_controls =
      std::count_if(less.left_out.begin(), less.left_out.end(),
                    [](auto& line) { return line.find("control=") != line.npos; });
  EXPECT_EQ(of_controls, controls(all, true));
  EXPECT_EQ(int64_t(less.left_out.size()) - of_controls,
            times(less, "linear_column subject=mine: sp=on"));
  // Beside one that does it they are.
  Registry both = with(named("mine", "linear_column", d));
  both.add(named("other", "linear_column"));
  EXPECT_EQ(controls(planned(smoke(), both), true), controls(all, true));
}

// One that is refused is a check that was never judged: no gate of that tier passes.
TEST(Due, EveryLineOfATierIsTakenByItsContract) {
  const Registry r = all_families();
  for (const Contract& c : r.contracts())
    for (const char* tier : {"smoke", "ci", "nightly"})
      for (const std::string& text : c.cases(tier)) {
        const auto refused = c.precondition ? c.precondition(parse(text, r)) : std::nullopt;
        EXPECT_FALSE(refused) << tier << ": " << text << ": " << refused->what();
      }
}

// What a check sees in one type it sees in another, with another bound.
TEST(Due, ControlsStayWhereTheirTypeIsNotDeclared) {
  Declared bf16;
  bf16.storage = {DType::bf16};
  const auto controls = [](const Plan& p) {
    return std::count_if(p.due.begin(), p.due.end(),
                         [](const Due& d) { return d.what == Due::named_control; });
  };
  EXPECT_EQ(controls(planned(smoke(), with(named("mine", "linear_column", bf16)))),
            controls(planned(smoke(), with(named("mine", "linear_column")))));
}

// A check that is asked of other lines of the contract is not left out of one unsaid.
TEST(Due, ChecksThatALineIsNotAskedHaveTheirReason) {
  const Registry r = all_families();
  const auto left_out = [&](const std::string& line) {
    return checks_left_out(parse(line, r), r, {});
  };
  using Texts = std::vector<std::string>;
  EXPECT_EQ(left_out("linear_row tp=2"), Texts());
  EXPECT_EQ(left_out("linear_row tp=2 dtype=f32"), Texts{"gradcheck: asked in f64"});
  EXPECT_EQ(left_out("linear_row tp=2 fill=large"),
            Texts{"gradcheck: asked of fill=integers and normal"});
  EXPECT_EQ(left_out("linear_row tp=2 transport=mpi"), Texts{"gradcheck: asked on one host"});
  // x 24 x 150, w 2 x 150, b 2 and y 24 x 2: 3950 elements; 50 more columns are beyond 4096.
  EXPECT_EQ(left_out("linear_row tp=2 tokens=24 in=150 out=2"), Texts());
  EXPECT_EQ(left_out("linear_row tp=2 tokens=24 in=200 out=2"),
            Texts{"gradcheck: asked of 4096 elements at most"});
  EXPECT_EQ(left_out("attention_ring cp=2 scale=20"),
            Texts{"gradcheck: asked where values vary more slowly than its steps"});
  EXPECT_EQ(left_out("replicated_clip tp=2"), Texts());  // has no gradient
  EXPECT_EQ(checks_left_out(parse("linear_row dtype=f32", r), r, {"forward"}), Texts());
}

TEST(Due, WithoutABackwardItsChecksAreNotDue) {
  Declared d;
  d.backward = false;
  const Plan p = planned(smoke(), with(named("mine", "mapping_gather", d)));
  EXPECT_FALSE(any(p, [](const Due& due) {
    return due.what == Due::healthy &&
           std::find(due.checks.begin(), due.checks.end(), "gradient") != due.checks.end();
  }));
  ASSERT_FALSE(p.not_due.empty());
  EXPECT_NE(p.not_due[0].find("mapping_gather subject=mine: gradient, adjoint"), std::string::npos)
      << p.not_due[0];
  // A line that is asked for one of them says it once.
  const Registry r = with(named("mine", "mapping_gather", d));
  EXPECT_EQ(checks_unasked(parse("mapping_gather tp=2 subject=mine", r), r, {"gradient"}),
            std::vector<std::string>{"mapping_gather subject=mine: gradient"});
}

// A contract that has none says it for its subjects; one that says otherwise is refused.
TEST(Due, ABackwardIsTheContractsWord) {
  const Registry unsaid = with(named("mine", "pipeline_schedule"));
  EXPECT_FALSE(unsaid.subject("pipeline_schedule", "mine").declared.backward);
  EXPECT_TRUE(with(named("mine", "linear_row")).subject("linear_row", "mine").declared.backward);
  Declared d;
  d.backward = false;
  EXPECT_EQ(refused(smoke(), with(named("mine", "pipeline_schedule", d))), "");
  d.backward = true;
  const std::string why = refused(smoke(), with(named("mine", "pipeline_schedule", d)));
  EXPECT_NE(why.find("expected no backward, as pipeline_schedule has none"), std::string::npos)
      << why;
  // Whoever comes first.
  Registry late;
  late.add(named("mine", "one_call"));
  Contract c;
  c.name = "one_call", c.family = "none";
  late.add(c);
  EXPECT_FALSE(late.subject("one_call", "mine").declared.backward);
}

TEST(Due, NothingLeftIsNoSelection) {
  Declared f64_only;
  f64_only.storage = {DType::f64};
  Options bf16 = smoke();
  bf16.dtypes = {"bf16"};
  const std::string why = refused(bf16, with(named("mine", "mlp", f64_only)));
  EXPECT_NE(why.find("mlp subject=mine: dtype=bf16"), std::string::npos) << why;
}

TEST(Due, SubjectsThatCannotBeJudgedAreRefused) {
  EXPECT_NE(
      refused(smoke(), with(named("mine", "linear_colum"))).find("did you mean 'linear_column'"),
      std::string::npos);
  Declared d;
  d.without = {"gather_outptu=on"};
  EXPECT_NE(refused(smoke(), with(named("mine", "linear_column", d)))
                .find("did you mean 'gather_output'"),
            std::string::npos);
  Declared none;
  none.storage = {};
  EXPECT_NE(refused(smoke(), with(named("mine", "linear_column", none))).find("storage"),
            std::string::npos);
  Subject empty = named("mine", "linear_column");
  Declared twice;
  twice.plan = "allgather";
  twice.traffic = [](const Case&, int) { return std::vector<Traffic>{}; };
  EXPECT_NE(refused(smoke(), with(named("mine", "conv_context", twice)))
                .find("met Declared::traffic beside plan 'allgather'"),
            std::string::npos);
  empty.make = nullptr;
  EXPECT_NE(refused(smoke(), with(std::move(empty))).find("Subject::make"), std::string::npos);
}

TEST(Due, WitnessesFollowTheDeclaration) {
  const Registry plain = with(named("mine", "linear_column"));
  const Contract& c = plain.contract("linear_column");
  EXPECT_EQ(witnesses_due(c, plain, "processes", "mine").size(), c.witnesses.size());

  Declared d;
  d.storage = {DType::bf16, DType::f32};
  d.without = {"gather_output"};
  const Registry narrow = with(named("mine", "linear_column", d));
  bool two_ranks = false;
  for (const Case& line : witnesses_due(c, narrow, "processes", "mine")) {
    EXPECT_EQ(line.dtype(), DType::f32) << print(line);
    EXPECT_FALSE(line.on("gather_output")) << print(line);
    two_ranks = two_ranks || line.world() == 2;  // the contract's own one gathers its output
  }
  EXPECT_TRUE(two_ranks);

  // No case stands for a shape that another witness has.
  Contract both = c;
  both.witnesses = {"linear_column tp=2", "linear_column tp=2 gather_output=on"};
  EXPECT_EQ(witnesses_due(both, narrow, "processes", "mine").size(), 1u);
}

// In bf16 a scan of many tokens has no integers that stay exact, so that it proves nothing.
TEST(Due, WitnessesAreExactWhereTheyAreIntegers) {
  Declared d;
  d.storage = {DType::bf16};
  const Registry narrow = with(named("mine", "scan_context", d));
  Contract c = narrow.contract("scan_context");
  c.witnesses = {"scan_context cp=2 tokens=48", "scan_context cp=3 docs=1,1,1",
                 "scan_context cp=4 tokens=48 fill=normal"};
  c.cases = [](const std::string&) { return std::vector<std::string>{}; };
  std::vector<int> worlds;
  for (const Case& line : witnesses_due(c, narrow, "processes", "mine"))
    worlds.push_back(line.world());
  EXPECT_EQ(worlds, (std::vector<int>{3, 4}));
}

// A contract that names none is tried on cases of its own, one of each shape.
TEST(Due, WithoutWitnessesCasesStandForThem) {
  const Registry families = all_families();
  Contract c = families.contract("mapping_copy");
  c.witnesses.clear();
  std::multiset<std::string> shapes;
  for (const Case& line : witnesses_due(c, families, "processes", "")) {
    EXPECT_EQ(line.dtype(), DType::f64);
    int axes = 0;
    for (Axis a : {Axis::tp, Axis::cp, Axis::dp, Axis::ep, Axis::pp}) axes += line.ranks(a) > 1;
    shapes.insert(std::to_string(line.world()) + "x" + std::to_string(axes));
  }
  EXPECT_EQ(shapes, (std::multiset<std::string>{"2x1", "3x1", "4x1", "4x2"}));
  c.cases = [](const std::string&) {
    return std::vector<std::string>{"mapping_copy tp=2 dtype=bf16", "mapping_copy tp=2"};
  };
  const auto lines = witnesses_due(c, families, "processes", "");
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_EQ(lines[0].dtype(), DType::f64);
}

// ---- What a gate has to ask, counted apart from the plan

std::multiset<std::string> canonical(const Plan& p, const std::function<bool(const Due&)>& is) {
  std::multiset<std::string> lines;
  for (const Due& d : p.due)
    if (is(d)) lines.insert(print_canonical(d.line));
  return lines;
}

TEST(Plan, HoldsEveryLineOfItsTierOnceAndEveryIllegalOne) {
  const Registry families = all_families();
  for (const std::string tier : {"smoke", "ci"}) {
    Options o = smoke();
    o.tier = tier;
    const Plan p = planned(o, families);
    std::set<std::string> legal, illegal;
    for (const Contract& c : families.contracts()) {
      for (const std::string& text : c.cases(tier))
        legal.insert(print_canonical(parse(text, families)));
      for (const std::string& text : c.illegal)
        illegal.insert(print_canonical(parse(text, families)));
    }
    const auto is_case = [](const Due& d) { return d.what == Due::healthy && !d.stored; };
    EXPECT_EQ(canonical(p, [&](const Due& d) { return is_case(d) && !d.illegal; }),
              std::multiset<std::string>(legal.begin(), legal.end()))
        << tier;
    EXPECT_EQ(canonical(p, [&](const Due& d) { return is_case(d) && d.illegal; }),
              std::multiset<std::string>(illegal.begin(), illegal.end()))
        << tier;
  }
}

TEST(Plan, HoldsEveryControlOnItsWitness) {
  const Registry families = all_families();
  std::multiset<std::string> due;
  for (const Control& c : families.controls()) {
    if (on_device(c, families)) continue;
    Case line = parse(c.witness, families);
    line.set("control", c.name);
    due.insert(print_canonical(line));
  }
  EXPECT_EQ(canonical(planned(smoke(), families),
                      [](const Due& d) { return d.what == Due::named_control; }),
            due);
}

// What once failed stays due, unless a tier has the line by itself.
TEST(Plan, HoldsEveryStoredLine) {
  const Registry families = all_families();
  const Plan p = planned(smoke(), families);
  size_t stored = 0;
  for (const Regression& r : families.regressions()) {
    const Case line = parse(r.line, families);
    if (line.text("transport") != "processes" || line.text("device") != "host") continue;
    EXPECT_TRUE(any(p, [&](const Due& d) {
      return d.what == Due::healthy && print_canonical(d.line) == print_canonical(line);
    })) << r.line;
  }
  for (const Due& d : p.due) stored += d.stored;
  EXPECT_GT(stored, 0u);
  for (const Due& d : p.due)
    EXPECT_TRUE(!d.stored || std::any_of(families.regressions().begin(),
                                         families.regressions().end(), [&](const Regression& r) {
                                           return print_canonical(parse(r.line, families)) ==
                                                  print_canonical(d.line);
                                         }));
}

TEST(Plan, SeveralSeedsAreDifferentOnes) {
  Options o = smoke();
  o.patterns = {"mapping_copy tp=2"};
  o.controls = false;
  o.seed = 7, o.seeds = 3;
  std::map<std::string, std::set<uint64_t>> seeds;
  for (const Due& d : planned(o, all_families()).due) {
    Case line = d.line;
    line.set("seed", "1");
    if (!d.illegal && !d.stored) seeds[print_canonical(line)].insert(d.line.seed());
  }
  EXPECT_FALSE(seeds.empty());
  for (const auto& [line, drawn] : seeds) EXPECT_EQ(drawn, (std::set<uint64_t>{7, 8, 9})) << line;
}

TEST(Due, OwnCommunicationIsNotProven) {
  Declared d;
  d.own_communication = true;
  const Registry r = with(named("mine", "linear_column", d));
  const Plan p = planned(smoke(), r);
  std::vector<std::string> names;
  for (const Lane& lane : unproven(smoke(), r, p.due)) {
    EXPECT_FALSE(lane.proven);
    EXPECT_EQ(lane.reason, "linear_column subject=mine communicates by itself");
    names.push_back(lane.name);
  }
  EXPECT_EQ(names, (std::vector<std::string>{"ledger", "operators"}));
  EXPECT_TRUE(unproven(smoke(), with(named("mine", "linear_column")),
                       planned(smoke(), with(named("mine", "linear_column"))).due)
                  .empty());
  // Without a witness operators break nothing, which is told where controls are asked for.
  Declared none;
  none.without = {"tp"};
  const Registry alone = with(named("mine", "linear_column", none));
  for (const bool controls : {true, false}) {
    Options o = smoke();
    o.controls = controls;
    EXPECT_EQ(unproven(o, alone, p.due).size(), size_t(controls));
  }
  // Of lines that are refused nobody asks for calls.
  std::vector<Due> illegal = p.due;
  std::erase_if(illegal, [](const Due& d) { return !d.illegal; });
  ASSERT_FALSE(illegal.empty());
  EXPECT_TRUE(unproven(smoke(), r, illegal).empty());
}

}  // namespace due_test
}  // namespace
}  // namespace shardproof
