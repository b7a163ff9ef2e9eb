// A judge that cries wolf is not believed: healthy kernels on fresh data of every format, each
// check that is due, and not one finding. `shardproof gate --seeds N --seed M` is the same on any
// lines.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "oracle/run.hpp"

namespace shardproof {

void family_linear(Registry&);
void family_mapping(Registry&);
void family_mlp(Registry&);

namespace {
namespace false_alarms_test {

constexpr int64_t due_checks_in_all = 10000;

const std::vector<std::string> lines = {
    "mapping_reduce tp=3 fill=normal",
    "mapping_reduce tp=8 fill=normal",
    "mapping_copy tp=4 fill=large",
    "mapping_reduce_scatter tp=2 fill=cancelling",
    "mapping_all_gather tp=3 fill=normal",
    "linear_column tp=3 sp=on fill=normal",
    "linear_column tp=2 fill=normal microbatches=2",
    "linear_column tp=8 gather_output=on fill=cancelling",
    "linear_row tp=3 sp=on fill=normal",
    "linear_row tp=8 fill=large",
    "linear_row tp=2 dp=2 sp=on fill=normal microbatches=3",
    "linear_row tp=4 in=512 fill=normal",
    "mlp tp=2 sp=on",
    "mlp tp=4 activation=swiglu",
};

struct Tally {
  int64_t checks = 0, alarms = 0;
  double worst = 0;
  std::string worst_line;
};

void add(const CaseResult& result, Tally& t) {
  for (const CheckResult& c : result.checks) {
    ++t.checks;
    if (c.ratio > t.worst) t.worst = c.ratio, t.worst_line = result.line + " " + c.check;
    if (c.verdict == Verdict::passed) continue;
    ++t.alarms;
    ADD_FAILURE() << result.line << ": " << c.check << " " << name(c.verdict) << " " << c.note
                  << (c.findings.empty() ? "" : c.findings[0].message);
  }
}

TEST(FalseAlarms, NoneInTenThousandHealthyChecks) {
  Registry registry;
  family_mapping(registry);
  family_linear(registry);
  family_mlp(registry);
  const Options options;
  Runner runner(options, registry);
  std::map<std::string, Tally> by_dtype;
  int64_t checks = 0;
  for (int seed = 1001; checks < due_checks_in_all && !HasFailure(); ++seed) {
    const int64_t before = checks;
    for (const std::string& text : lines)
      for (const std::string dtype : {"f64", "f32", "bf16"}) {
        const Case line =
            parse(text + " dtype=" + dtype + " seed=" + std::to_string(seed), registry);
        const auto due =
            due_checks(registry.contract(line.contract), line, declared_of(line, registry), {});
        const Judged j = runner.run(line, due, lane_of(line));
        add(j.result, by_dtype[dtype]);
        checks += int64_t(j.result.checks.size());
      }
    ASSERT_GT(checks, before) << "no check is due";
  }
  EXPECT_EQ(by_dtype.size(), 3u);
  for (const auto& [dtype, t] : by_dtype) {
    EXPECT_EQ(t.alarms, 0) << dtype;
    EXPECT_GT(t.checks, due_checks_in_all / 5) << dtype;
    EXPECT_LE(t.worst, 1) << dtype << " " << t.worst_line;
    EXPECT_GT(t.worst, 0.01) << dtype << ": bounds this wide see nothing";
    RecordProperty("worst_healthy_ratio_" + dtype, std::to_string(t.worst));
  }
}

}  // namespace false_alarms_test
}  // namespace
}  // namespace shardproof
