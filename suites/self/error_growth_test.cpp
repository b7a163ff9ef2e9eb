// How errors grow with the number of ranks, against what the bounds say: a row of attention merges
// one block of keys a rank (reference/attention.cpp), a row-parallel linear sums one part a rank.
// Measured errors stay below bounds at 1, 2, 4 and 8 ranks, and the bounds grow as derived.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "fixtures/sharding.hpp"
#include "oracle/check.hpp"
#include "oracle/registry.hpp"
#include "oracle/run.hpp"
#include "suites/attention.hpp"

namespace shardproof {

void family_attention(Registry&);
void family_linear(Registry&);

namespace {
namespace error_growth_test {

const Registry& families() {
  static const Registry registry = [] {
    Registry r;
    family_attention(r);
    family_linear(r);
    return r;
  }();
  return registry;
}

// Of one result: root mean square of the error and of the truth, worst error over bound, and the
// sum of the bounds.
struct Growth {
  double error = 0, size = 0, ratio = 0, bound = 0;
};
using ByTensor = std::map<std::string, Growth>;

// Errors of a result on all ranks that hold it; what is due as an infinity has no error.
Growth growth_of(const Evidence& e, int operand, bool gradient, const Whole& want,
                 const Gauge& gauge) {
  const Operand& o = e.operands[size_t(operand)];
  const auto bound = bound_of(e, o, gradient, want, gauge);
  Growth g;
  double errors = 0, sizes = 0;
  int64_t count = 0;
  for (int r = 0; r < e.mesh.world(); ++r) {
    const ResultTensor* t = e.result(r, 0, gradient ? 1 : 0, operand, gradient);
    if (!t) continue;
    Buffer local(t->dtype, {int64_t(t->bytes.size() / size_of(t->dtype))});
    unpack(t->bytes.data(), local.view());
    const auto got = to_doubles(local.view());
    const auto at = whole_indices(o.shape, gradient ? dual(o.layout) : o.layout, e.mesh, r);
    for (size_t i = 0; i < at.size(); ++i) {
      const double due = want.value[size_t(at[i])];
      if (std::isinf(due)) continue;
      errors += (got[i] - due) * (got[i] - due), sizes += due * due, ++count;
      g.ratio = std::max(g.ratio, std::abs(got[i] - due) / bound(at[i]));
    }
  }
  for (size_t i = 0; i < want.value.size(); ++i)
    if (std::isfinite(want.value[i])) g.bound += bound(int64_t(i));
  g.error = std::sqrt(errors / double(count)), g.size = std::sqrt(sizes / double(count));
  return g;
}

ByTensor measured(const std::string& text) {
  static Options options;
  static Runner runner(options, families());
  static Truths truths(families());
  const Case line = parse(text, families());
  const Judged j = runner.run(line, {"forward", "gradient"}, lane_of(line));
  for (const CheckResult& c : j.result.checks) EXPECT_EQ(c.verdict, Verdict::passed) << text;
  const Evidence& e = j.evidence;
  const Truth& truth = truths.get(line, e, e.shots[0].feeds[0]);
  ByTensor all;
  for (int i = 0; i < int(e.operands.size()); ++i) {
    const bool output = i >= e.inputs;
    const size_t k = size_t(output ? i - e.inputs : i);
    const auto& gauges = output ? truth.output_gauges : truth.gradient_gauges;
    if (gauges[k].bound.empty() && gauges[k].magnitude.empty()) continue;
    all[(output ? "" : "d") + e.operands[size_t(i)].name] =
        growth_of(e, i, !output, (output ? truth.outputs : truth.gradients)[k], gauges[k]);
  }
  return all;
}

constexpr int counts[] = {1, 2, 4, 8};

std::map<int, ByTensor> by_ranks(const std::string& words, const std::string& axis) {
  std::map<int, ByTensor> all;
  double worst = 0;
  for (int p : counts) {
    all[p] = measured(fmt::format("{} {}={}", words, axis, p));
    std::string text;
    for (const auto& [name, g] : all[p]) {
      EXPECT_LE(g.ratio, 1) << words << " " << name << " at " << p;
      EXPECT_GT(g.error, 0) << words << " " << name << " at " << p;
      worst = std::max(worst, g.ratio);
      text += fmt::format("  {} {:.2g}", name, g.error / g.size);
    }
    fmt::print("{} {}={}: relative rms error{}\n", words, axis, p, text);
  }
  fmt::print("{}: worst healthy ratio {:.2g}\n", words, worst);
  return all;
}

// With n_i = keys + 4 p in the bounds of O and lse, and p parts of dK and dV on the wire: from 2
// ranks on every further rank adds as much as the one before.
void expect_affine(const std::map<int, ByTensor>& all, const std::string& tensor) {
  auto bound = [&](int p) { return all.at(p).at(tensor).bound; };
  const double first = bound(4) - bound(2), second = bound(8) - bound(4);
  EXPECT_GT(first, 0) << tensor;
  EXPECT_NEAR(second / first, 2, 0.02) << tensor;
}

const char* const attention_words = " layout=zigzag mask=causal tokens=48 v_dim=5";

TEST(ErrorGrowth, AttentionStaysBelowBoundsThatGrowByTheMergedBlocks) {
  for (const char* contract : {"attention_ring", "attention_allgather"})
    for (const char* dtype : {"f32", "bf16"}) {
      const auto all =
          by_ranks(fmt::format("{}{} dtype={}", contract, attention_words, dtype), "cp");
      for (const char* tensor : {"o", "lse", "dk", "dv"}) expect_affine(all, tensor);
    }
}

// A merged block costs a row 4 roundings more, which enter O_i twice: with u = 2^-24,
// |O| may be off by 2 u 4 (p' - p) sum_j P_ij |V_j| more at p' ranks than at p.
TEST(ErrorGrowth, AnotherRankAddsTwiceFourRoundingsToEachElementOfO) {
  auto bounds = [&](int p) {
    const Case line =
        parse(fmt::format("attention_ring{} dtype=f32 cp={}", attention_words, p), families());
    const Contract& c = families().contract(line.contract);
    std::vector<Whole> in;
    for (int i = 0; i < 3; ++i) {
      const Operand o = c.operands(line)[size_t(i)];
      in.push_back({o.shape, draw_whole({Fill::normal, 1, 0, -1}, o.name, DType::f32, o.shape)});
    }
    std::vector<Gauge> gauges;
    c.forward(line, in, &gauges);
    auto a = contexts::attention_of(line);
    auto sizes = in[2].value;
    for (double& v : sizes) v = std::abs(v);
    return std::pair(gauges[0].bound, reference::attention(a, in[0].value, in[1].value, sizes).o);
  };
  const auto [two, sizes] = bounds(2);
  const auto eight = bounds(8).first;
  // Counted in unit roundoffs; the reference's own 2^-53 is a 2^-29th of one.
  for (size_t i = 0; i < two.size(); ++i)
    EXPECT_NEAR((eight[i] - two[i]) / (2 * 4 * 6 * sizes[i]), 1, 1e-5) << i;
}

// p parts rounded on the wire: gamma_{K/p} + p u, so that in bf16 with f32 accumulation the bound
// is the wire's alone.
TEST(ErrorGrowth, RowParallelSumsGrowWithThePartsOnTheWire) {
  for (const char* dtype : {"f32", "bf16"})
    by_ranks(fmt::format("linear_row sp=on tokens=48 in=64 out=10 fill=normal dtype={}", dtype),
             "tp");
}

}  // namespace error_growth_test
}  // namespace
}  // namespace shardproof
