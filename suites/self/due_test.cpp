// What a subject declares that it does not do: not due, counted, and no skip.
#include "oracle/due.hpp"

#include <gtest/gtest.h>

#include <algorithm>

namespace shardproof {
namespace {

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
  std::vector<std::string> not_due;
};
Plan planned(const Options& o, const Registry& r) {
  Plan p;
  p.due = plan_gate(o, r, &p.not_due);
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
}

TEST(Due, NothingLeftIsNoSelection) {
  Declared f64_only;
  f64_only.storage = {DType::f64};
  Options bf16 = smoke();
  bf16.dtypes = {"bf16"};
  const std::string why = refused(bf16, with(named("mine", "linear_column", f64_only)));
  EXPECT_NE(why.find("linear_column subject=mine: dtype=bf16"), std::string::npos) << why;
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
}

}  // namespace
}  // namespace shardproof
