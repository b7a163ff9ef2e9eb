// The attention of a layer: its reference by hand and by differences, and which axis is asked for
// what on ranks.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "fixtures/random.hpp"
#include "fixtures/sharding.hpp"
#include "oracle/registry.hpp"
#include "oracle/run.hpp"
#include "reference/attention_block.hpp"

namespace shardproof {

void family_attention_block(Registry&);
void family_mlp(Registry&);
void family_norm(Registry&);
void controls_attention_block(Registry&);

namespace {
namespace attention_block_test {

using reference::AttentionBlockInputs;
using reference::AttentionBlockShape;
using reference::Values;

AttentionBlockShape causal(int64_t tokens, int64_t hidden, int64_t heads, int64_t kv_heads,
                           int64_t dim) {
  AttentionBlockShape s;
  s.hidden = hidden;
  s.core.heads = heads, s.core.kv_heads = kv_heads;
  s.core.key_dim = s.core.value_dim = dim;
  s.core.mask.causal = true;
  for (int64_t t = 0; t < tokens; ++t) s.core.queries.push_back({0, t});
  s.core.keys = s.core.queries;
  return s;
}

void expect_near(const Values& got, const Values& want) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < want.size(); ++i) EXPECT_NEAR(got[i], want[i], 1e-14) << i;
}

// Wq = Wk = 0, Wv = Wo = 1: token i is the mean of the tokens up to it, and bo.
TEST(ReferenceAttentionBlock, EqualScoresAverageTheTokens) {
  const AttentionBlockShape s = causal(3, 2, 1, 1, 2);
  const Values x{3, 1, 6, -1, 12, 9}, w{0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 1}, b(6), out{1, 0, 0, 1},
      shift{10, 20};
  const AttentionBlockInputs in{x, w, b, out, shift};
  expect_near(attention_block(s, in), {13, 21, 14.5, 20, 17, 23});
  // dX_j = sum over i >= j of dY_i / (i + 1), dWo = sum of dY_i O_i^T, dbo = sum of dY_i.
  const Values g{1, 0, 1, 0, 1, 6};
  const auto d = attention_block_backward(s, in, g);
  expect_near(d.x, {11.0 / 6, 2, 5.0 / 6, 2, 1.0 / 3, 2});
  expect_near(d.w_out, {3 + 4.5 + 7, 1 + 0 + 3, 6 * 7, 6 * 3});
  expect_near(d.b_out, {3, 6});
  // dWv = sum of dV_j x_j^T, dbv = sum of dV_j.
  EXPECT_NEAR(d.w_qkv[8], 3 * 11.0 / 6 + 6 * 5.0 / 6 + 12.0 / 3, 1e-14);
  EXPECT_NEAR(d.w_qkv[11], 2 * (1 - 1 + 9), 1e-14);
  EXPECT_NEAR(d.b_qkv[4], 3, 1e-14);
}

// q and k are (1, 0) on every token, turned by 1 rad a position: scores are cosines of distances.
TEST(ReferenceAttentionBlock, ScoresTurnWithTheDistance) {
  AttentionBlockShape s = causal(2, 1, 1, 1, 2);
  s.core.scale = 2;
  const Values x{8, 4}, w{0, 0, 0, 0, 1, 0}, b{1, 0, 1, 0, 0, 0}, out{1, 0};
  const double far = std::exp(2 * std::cos(1.0)), near = std::exp(2.0);
  expect_near(attention_block(s, {x, w, b, out, {}}), {8, (8 * far + 4 * near) / (far + near)});
}

TEST(ReferenceAttentionBlock, GradientsAgreeWithRichardsonDifferences) {
  const AttentionBlockShape s = causal(5, 3, 2, 1, 2);
  const Stream123 stream(3, "attention block");
  uint64_t next = 0;
  auto drawn = [&](int64_t n) {
    Values v(static_cast<size_t>(n));
    for (double& e : v) e = stream.normal(next++) / 2;
    return v;
  };
  std::vector<Values> in{drawn(15), drawn(8 * 3), drawn(8), drawn(3 * 4), drawn(3)};
  const Values g = drawn(15);
  auto inputs = [&] { return AttentionBlockInputs{in[0], in[1], in[2], in[3], in[4]}; };
  auto loss = [&] {
    const Values y = attention_block(s, inputs());
    double sum = 0;
    for (size_t i = 0; i < g.size(); ++i) sum += g[i] * y[i];
    return sum;
  };
  const auto d = attention_block_backward(s, inputs(), g);
  const std::vector<Values> gradients{d.x, d.w_qkv, d.b_qkv, d.w_out, d.b_out};
  const double h = 1e-3;
  for (size_t k = 0; k < in.size(); ++k)
    for (size_t i = 0; i < in[k].size(); ++i) {
      auto moved = [&, at = in[k][i]](double by) {
        in[k][i] = at + by;
        const double value = loss();
        in[k][i] = at;
        return value;
      };
      const double coarse = (moved(h) - moved(-h)) / (2 * h),
                   fine = (moved(h / 2) - moved(-h / 2)) / h;
      // Error h^4 phi^(5) / 480 and rounding 3 eps / h.
      EXPECT_NEAR(gradients[k][i], (4 * fine - coarse) / 3, 1e-10) << k << "[" << i << "]";
    }
}

// ---- On ranks

const Registry& families() {
  static const Registry registry = [] {
    Registry r;
    family_attention_block(r);
    family_mlp(r);
    family_norm(r);
    controls_attention_block(r);
    return r;
  }();
  return registry;
}

struct Ran {
  std::vector<std::string> forward, backward;  // calls of rank 0
  std::string failed;                          // checks that did not pass
};
Ran run(const std::string& text) {
  static Options options;
  static Runner runner(options, families());
  const Case line = parse(text, families());
  const Judged j = runner.run(line, {"forward", "ledger"}, lane_of(line));
  Ran ran;
  for (const CheckResult& c : j.result.checks)
    if (c.verdict != Verdict::passed) ran.failed += c.check + " ";
  for (const LedgerEntry& e : j.evidence.record(0, 0).ledger)
    (e.phase == Phase::forward ? ran.forward : ran.backward).push_back(e.label + " " + name(e.op));
  return ran;
}
using Calls = std::vector<std::string>;

TEST(AttentionBlockOnRanks, TheCoreAsksCpAndTheLinearsAskTp) {
  const std::string line = "attention_block tp=2 cp=2 sp=on layout=zigzag mask=causal";
  const Ran gathers = run(line), turns = run(line + " core=ring");
  EXPECT_EQ(gathers.failed + turns.failed, "");
  EXPECT_EQ(gathers.forward,
            (Calls{"tp all_gather", "cp all_gather", "cp all_gather", "tp reduce_scatter"}));
  EXPECT_EQ(turns.forward, (Calls{"tp all_gather", "cp shift", "tp reduce_scatter"}));
  // One sum of what tp cuts over cp, one of the bias that it does not.
  EXPECT_EQ(turns.backward,
            (Calls{"tp all_gather", "cp shift", "cp shift", "cp shift", "tp all_gather",
                   "tp reduce_scatter", "cp all_reduce", "tp,cp all_reduce"}));
}

TEST(AttentionBlockOnRanks, WhatMeetsTokensOneByOneAsksCpForNothing) {
  EXPECT_EQ(run("mlp cp=4").forward, Calls{});
  EXPECT_EQ(run("norm_sequence cp=4").forward, Calls{});
  for (const std::string& call : run("mlp tp=2 cp=2 sp=on").forward)
    EXPECT_EQ(call.substr(0, 3), "tp ");
}

// Four ranks of tp, two key heads: ranks 0, 1 hold the first and sum its gradients, and cp sums
// with them. Gathered, no weight is shared.
TEST(AttentionBlockOnRanks, RanksThatShareKeyHeadsSumTheirGradientsOnce) {
  const std::string line = "attention_block tp=4 kv_heads=2 mask=causal";
  const Ran replica = run(line), gather = run(line + " form=gather");
  EXPECT_EQ(replica.failed + gather.failed, "");
  EXPECT_EQ(replica.forward, (Calls{"tp all_reduce"}));
  EXPECT_EQ(replica.backward, (Calls{"tp all_reduce", "rep all_reduce"}));
  EXPECT_EQ(gather.forward, (Calls{"tp all_gather", "tp all_reduce"}));
  EXPECT_EQ(gather.backward, (Calls{"tp reduce_scatter", "tp all_reduce"}));
  const Ran both = run("attention_block tp=2 cp=2 kv_heads=1 mask=causal");
  EXPECT_EQ(both.failed, "");
  EXPECT_EQ(Calls(both.backward.end() - 2, both.backward.end()),
            (Calls{"rep,cp all_reduce", "cp all_reduce"}));
}

// Rows of d = 2: rank 2 of 4 has query heads 4, 5 and, like rank 3, key head 1; the fused weight
// q0 .. q3 k0 v0 q4 .. q7 k1 v1 is cut in blocks of three heads.
TEST(AttentionBlockOnRanks, RowsOfKeyHeadsThatRanksShare) {
  const auto rows = [](const std::string& words, size_t operand, int rank) {
    const Case line =
        parse("attention_block tp=4 kv_heads=2 head_dim=2 hidden=1 " + words, families());
    const Operand o = families().contract(line.contract).operands(line)[operand];
    return whole_indices(o.shape, o.layout, line.mesh(), rank);
  };
  using Rows = std::vector<int64_t>;
  EXPECT_EQ(rows("", 1, 2), (Rows{8, 9, 10, 11}));
  for (size_t part : {2, 3})
    for (int rank : {2, 3}) EXPECT_EQ(rows("", part, rank), (Rows{2, 3}));
  EXPECT_EQ(rows("form=gather", 1, 2), (Rows{12, 13, 14, 15, 16, 17}));
}

// With sequence parallelism alone the core sees the keys of every rank of tp, and asks cp nothing.
TEST(AttentionBlockOnRanks, SequenceParallelismIsNoContextParallelism) {
  const std::string line = "attention_block tp=4 sp=on mask=causal";
  const Ran whole = run(line), apart = run(line + " control=sp_taken_for_cp");
  EXPECT_EQ(whole.failed, "");
  EXPECT_EQ(whole.forward, (Calls{"tp all_gather", "tp reduce_scatter"}));
  EXPECT_EQ(whole.backward,
            (Calls{"tp all_gather", "tp all_gather", "tp reduce_scatter", "tp all_reduce"}));
  EXPECT_EQ(apart.failed, "forward ");
  EXPECT_EQ(apart.forward, whole.forward);
}

}  // namespace attention_block_test
}  // namespace
}  // namespace shardproof
