// What is cut by the vocabulary: shapes, refusals, traffic, labels; numbers that can be followed by
// hand, PyTorch's autograd, and what broken twins are off by, on ranks.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <span>

#include "fixtures/random.hpp"
#include "fixtures/sharding.hpp"
#include "oracle/registry.hpp"
#include "reference/embedding.hpp"
#include "reference/loss.hpp"
#include "suites/self/goldens.hpp"
#include "suites/self/on_threads.hpp"

namespace shardproof {

void family_vocab(Registry&);
void family_vocab_log_probs(Registry&);
void controls_vocab(Registry&);
void controls_vocab_log_probs(Registry&);

namespace {
namespace vocab_test {

using on_threads::Numbers;
using on_threads::Outcome;
using Shape = std::vector<int64_t>;

const Registry& family() {
  static const Registry registry = [] {
    Registry r;
    family_vocab(r), family_vocab_log_probs(r);
    controls_vocab(r), controls_vocab_log_probs(r);
    return r;
  }();
  return registry;
}

Case line_of(const std::string& text) { return parse(text, family()); }
const Contract& contract_of(const Case& line) { return family().contract(line.contract); }

Operand operand(const std::string& text, const std::string& name) {
  const Case line = line_of(text);
  for (const Operand& o : contract_of(line).operands(line))
    if (o.name == name) return o;
  ADD_FAILURE() << text << " has no operand " << name;
  return {};
}
Shape local(const std::string& text, const std::string& name, int rank = 0) {
  const Operand o = operand(text, name);
  return local_shape(o.shape, o.layout, line_of(text).mesh(), rank);
}

std::string refusal(const std::string& text) {
  const Case line = line_of(text);
  const auto refused = contract_of(line).precondition(line);
  return refused ? refused->what() : "";
}

void expect_near(const Numbers& got, const Numbers& want, double within) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < want.size(); ++i) EXPECT_NEAR(got[i], want[i], within) << "element " << i;
}

// ---- What the contracts state

TEST(VocabShapes, RowsAndClassesAreCutTokensAreNot) {
  const std::string table = "vocab_embedding tp=4 seq=8 batch=2 vocab=45 padded_vocab=48 hidden=5";
  EXPECT_EQ(local(table, "ids"), (Shape{8, 2}));
  EXPECT_EQ(local(table, "w"), (Shape{12, 5}));
  EXPECT_EQ(local(table, "y"), (Shape{8, 2, 5}));
  EXPECT_EQ(local(table + " sp=on", "ids"), (Shape{8, 2}));
  EXPECT_EQ(local(table + " sp=on", "y"), (Shape{2, 2, 5}));
  const std::string loss = "vocab_cross_entropy tp=4 seq=8 batch=2 vocab=12 dtype=bf16";
  EXPECT_EQ(local(loss, "logits"), (Shape{8, 2, 3}));
  EXPECT_EQ(local(loss, "labels"), (Shape{8, 2}));
  EXPECT_EQ(local(loss, "loss"), (Shape{8, 2}));
  EXPECT_EQ(operand(loss, "loss").dtype_override, DType::f32);
}

TEST(VocabRefusals, EveryIllegalLineIsRefusedAndNoCaseIs) {
  for (const Contract& c : family().contracts()) {
    EXPECT_GE(c.illegal.size(), 7u);
    for (const std::string& text : c.illegal) EXPECT_NE(refusal(text), "") << text;
    for (const char* tier : {"smoke", "ci", "nightly"})
      for (const std::string& text : c.cases(tier)) EXPECT_EQ(refusal(text), "") << text;
    for (const std::string& text : c.witnesses) EXPECT_EQ(refusal(text), "") << text;
  }
}

TEST(VocabRefusals, AVocabularyIsPaddedOrDivides) {
  EXPECT_NE(refusal("vocab_embedding tp=4 vocab=45").find("padded_vocab=45"), std::string::npos);
  EXPECT_EQ(refusal("vocab_embedding tp=4 vocab=45 padded_vocab=48"), "");
  EXPECT_NE(refusal("vocab_cross_entropy tp=4 vocab=45").find("vocab=45"), std::string::npos);
  for (const char* alpha : {"1", "-0.1", "x", "1.5"})
    EXPECT_THROW(line_of(std::string("vocab_cross_entropy label_smoothing=") + alpha), BadInput)
        << alpha;
  for (const char* temperature : {"0", "-1", "x", "nan", "inf", "1e7", ""})
    EXPECT_THROW(line_of(std::string("vocab_log_probs temperature=") + temperature), BadInput)
        << temperature;
}

TEST(VocabTraffic, CallsInTheirOrder) {
  const auto calls = [](const std::string& text) {
    const Case line = line_of(text);
    std::vector<std::string> list;
    for (const Traffic& t : contract_of(line).traffic(line, "", 0))
      list.push_back(std::string(t.backward ? "B " : "F ") + name(t.op) + " " + name(t.reduce) +
                     " " + std::to_string(t.count) + " " + name(t.dtype));
    return list;
  };
  using Calls = std::vector<std::string>;
  EXPECT_EQ(calls("vocab_embedding tp=4 tokens=12 hidden=5 dtype=bf16"),
            (Calls{"F all_reduce sum 60 bf16"}));
  EXPECT_EQ(calls("vocab_embedding tp=4 dp=2 tokens=24 hidden=5 sp=on"),
            (Calls{"F reduce_scatter sum 60 f64", "B all_gather none 15 f64"}));
  EXPECT_EQ(
      calls("vocab_cross_entropy tp=4 tokens=12 dtype=bf16"),
      (Calls{"F all_reduce max 12 f32", "F all_reduce sum 12 f32", "F all_reduce sum 12 f32"}));
  EXPECT_EQ(calls("vocab_cross_entropy tp=4 tokens=12 label_smoothing=0.1").size(), 4u);
  EXPECT_EQ(calls("vocab_cross_entropy tp=4 tokens=12 label_smoothing=0").size(), 3u);
  EXPECT_EQ(calls("vocab_cross_entropy label_smoothing=0.1"), Calls{});
  EXPECT_EQ(
      calls("vocab_log_softmax tp=4 dp=2 tokens=24 dtype=bf16"),
      (Calls{"F all_reduce max 12 f32", "F all_reduce sum 12 f32", "B all_reduce sum 12 f32"}));
  EXPECT_EQ(calls("vocab_log_softmax dp=2"), Calls{});
  EXPECT_EQ(calls("vocab_log_probs tp=4 dp=2 tokens=24 dtype=bf16"),
            (Calls{"F all_reduce max 12 f32", "F all_reduce sum 12 f32", "F all_reduce sum 12 f32",
                   "F all_reduce sum 12 f32"}));
  EXPECT_EQ(calls("vocab_log_probs dp=2"), Calls{});
}

TEST(VocabLabels, AreDrawnOrStatedWithIgnoredOnes) {
  EXPECT_TRUE(operand("vocab_cross_entropy tp=2", "labels").stated.empty());
  const Operand labels = operand("vocab_cross_entropy tp=2 tokens=6 vocab=4 ignored=3", "labels");
  ASSERT_EQ(labels.stated.size(), 6u);
  for (size_t t = 0; t < 6; ++t)
    if (t % 3 == 2)
      EXPECT_EQ(labels.stated[t], -100);
    else
      EXPECT_TRUE(labels.stated[t] >= 0 && labels.stated[t] < 4) << labels.stated[t];
}

// They name rows and classes of all ranks, and none of the padding.
TEST(VocabLabels, AreDrawnFromTheWholeVocabularyInTheTypeOfTheLine) {
  for (const auto& [line, name] :
       {std::pair("vocab_embedding tp=4 vocab=45 padded_vocab=48 index=", "ids"),
        {"vocab_cross_entropy tp=5 vocab=45 index=", "labels"}})
    for (const auto& [index, type] : {std::pair("i32", DType::i32), {"i64", DType::i64}}) {
      const Operand o = operand(line + std::string(index), name);
      EXPECT_EQ(o.below, 45);
      EXPECT_EQ(o.dtype_override, type);
      EXPECT_TRUE(o.fixed_dtype);
    }
}

// 24 terms of at most 10 within 2^8, of 11 not; two microbatches: 48 terms of 5.
TEST(VocabContract, IntegersKeepSumsOfRowsExact) {
  const auto range = [](const std::string& text) {
    const Case line = line_of(text);
    return contract_of(line).integer_range(line);
  };
  EXPECT_EQ(range("vocab_embedding dtype=bf16"), 10);
  EXPECT_EQ(range("vocab_embedding dtype=bf16 microbatches=2"), 5);
  EXPECT_EQ(range("vocab_embedding dtype=bf16 tokens=264"), std::nullopt);
}

TEST(VocabContract, GaugesCountTheTokensOfAnId) {
  const Case line = line_of("vocab_embedding tp=2 tokens=4 vocab=2 hidden=1 dtype=f32 fill=normal");
  const std::vector<Whole> in{{{4}, {1, 0, 1, 1}}, {{2, 1}, {7, 9}}}, cot{{{4, 1}, {1, -2, 3, -8}}};
  std::vector<Gauge> gauges;
  const auto d = contract_of(line).backward(line, in, cot, &gauges);
  EXPECT_TRUE(d[0].value.empty());
  EXPECT_EQ(d[1].value, (Numbers{-2, -4}));
  EXPECT_EQ(gauges[1].magnitude, (Numbers{2, 12}));
  EXPECT_EQ(gauges[1].terms, 3);
  EXPECT_EQ(contract_of(line).forward(line, in, &gauges)[0].value, (Numbers{9, 7, 9, 9}));
  EXPECT_TRUE(gauges[0].magnitude.empty()) << "rows are moved, not computed";
}

TEST(ReferenceEmbedding, AnIdOutsideOfTheTableIsAnError) {
  const int64_t ids[] = {0, 3};
  EXPECT_THROW(reference::embedding(Numbers{1, 2, 3}, ids, 1), std::invalid_argument);
  EXPECT_THROW(reference::embedding_backward(ids, 3, 1, Numbers{1, 2}), std::invalid_argument);
}

// ---- By hand, on ranks

// By ours, or by the twin that the line names.
Outcome on_ranks(const std::string& text, const std::vector<Numbers>& inputs,
                 const std::vector<Numbers>& cotangents) {
  const Case line = line_of(text);
  const std::string& twin = line.text("control");
  const auto make = [&] {
    return twin.empty() ? family().subject(line.contract, "").make()
                        : family().control(line.contract, twin).make();
  };
  const Outcome run = on_threads::run_kernels(line, contract_of(line).operands(line), make, inputs,
                                              cotangents, [](int, Kernel&) {});
  for (const std::string& why : run.thrown) EXPECT_EQ(why, "") << text;
  return run;
}
Outcome embedded(const std::string& words, const Numbers& ids, const Numbers& w, const Numbers& g) {
  return on_ranks("vocab_embedding " + words, {ids, w}, {g});
}
Outcome losses(const std::string& words, const Numbers& logits, const Numbers& labels,
               const Numbers& g) {
  return on_ranks("vocab_cross_entropy " + words, {logits, labels}, {g});
}

// Rows (1,2) .. (7,8) and two of padding; id 3 is named twice, 1 by nobody.
TEST(EmbeddingOnRanks, SharedIdsAddUpAndPaddingTakesNothing) {
  const Numbers w{1, 2, 3, 4, 5, 6, 7, 8, 100, 100, 100, 100}, ids{3, 0, 3, 2, 2, 3},
      g{1, 10, 2, 20, 3, 30, 4, 40, 5, 50, 6, 60};
  for (const char* words : {"tp=1", "tp=2", "tp=3", "tp=6", "tp=2 sp=on", "tp=3 sp=on",
                            "tp=3 sp=on index=i32", "tp=2 dtype=bf16"}) {
    SCOPED_TRACE(words);
    const Outcome run =
        embedded(std::string(words) + " tokens=6 vocab=4 padded_vocab=6 hidden=2", ids, w, g);
    EXPECT_EQ(run.outputs[0], (Numbers{7, 8, 1, 2, 7, 8, 5, 6, 5, 6, 7, 8}));
    EXPECT_EQ(run.gradients[1], (Numbers{2, 20, 0, 0, 9, 90, 10, 100, 0, 0, 0, 0}));
  }
}

// p = (1, 1, 2)/4. With alpha 3/10 the label's share of the target is 8/10 and 1/10 for each other
// where all classes get alpha/V, 7/10 and 15/100 where the others share alpha alone; the loss is
// the cross-entropy to it, and dz = p - target.
TEST(CrossEntropyOnRanks, IsThatOfTheSmoothedTarget) {
  const Numbers z{0, 0, std::log(2.0)}, twice{z[0], z[1], z[2], z[0], z[1], z[2]};
  const double p[] = {0.25, 0.25, 0.5};
  struct How {
    const char* words;
    Numbers target;
  };
  for (const auto& [words, target] :
       {How{"label_smoothing=0", {0, 0, 1}}, How{"label_smoothing=0.3", {0.1, 0.1, 0.8}},
        How{"label_smoothing=0.3 smoothing=others", {0.15, 0.15, 0.7}}})
    for (const char* tp : {"tp=1 ", "tp=3 "}) {
      SCOPED_TRACE(std::string(tp) + words);
      const Outcome run =
          losses(std::string(tp) + "tokens=2 vocab=3 " + words, twice, {2, -100}, {8, 8});
      double loss = 0;
      Numbers dz(6);
      for (size_t j = 0; j < 3; ++j) loss -= target[j] * std::log(p[j]);
      for (size_t j = 0; j < 3; ++j) dz[j] = 8 * (p[j] - target[j]);
      EXPECT_NEAR(run.outputs[0][0], loss, 1e-15);
      EXPECT_EQ(run.outputs[0][1], 0) << "an ignored label";
      expect_near(run.gradients[0], dz, 4e-15);
      for (size_t j = 3; j < 6; ++j) EXPECT_EQ(run.gradients[0][j], 0) << "an ignored label";
      EXPECT_NEAR(run.gradients[0][0] + run.gradients[0][1] + run.gradients[0][2], 0, 4e-15);
    }
}

TEST(CrossEntropyOnRanks, AgreesWithPyTorch) {
  for (const char* name : {"cross_entropy", "cross_entropy_smoothed"})
    for (const char* tp : {"tp=1", "tp=2", "tp=4", "tp=8"}) {
      SCOPED_TRACE(std::string(name) + " " + tp);
      const auto g = goldens::golden(name);
      const int64_t tokens = goldens::extent(g, "logits", 0), V = goldens::extent(g, "logits", 1);
      const Outcome run =
          losses(std::string(tp) + " tokens=" + std::to_string(tokens) +
                     " vocab=" + std::to_string(V) + " label_smoothing=" +
                     std::to_string(double(g.at("attributes").at("label_smoothing"))),
                 goldens::values(g, "inputs", "logits"), goldens::values(g, "inputs", "labels"),
                 goldens::values(g, "cotangents", "loss"));
      expect_near(run.outputs[0], goldens::values(g, "outputs", "loss"), 1e-14);
      const Numbers& dz = run.gradients[0];
      expect_near(dz, goldens::values(g, "gradients", "logits"), 1e-14);
      for (int64_t t = 0; t < tokens; ++t)
        EXPECT_NEAR(std::accumulate(dz.begin() + t * V, dz.begin() + (t + 1) * V, 0.0), 0, 1e-14);
    }
}

// exp(2^20) is no number, and exp(-2^20) is 0: the loss is 2^20 all the same, or log 2 where both
// logits are as large.
TEST(CrossEntropyOnRanks, LargeLogitsAreNoSpecialCase) {
  for (const char* dtype : {"", " dtype=f32"}) {
    const Outcome run = losses(std::string("tp=2 tokens=2 vocab=2") + dtype,
                               {0x1p20, 0, 0x1p20, 0x1p20}, {1, 0}, {1, 1});
    EXPECT_EQ(run.outputs[0][0], 0x1p20);
    EXPECT_NEAR(run.outputs[0][1], std::log(2.0), *dtype ? 1e-7 : 1e-15);
    EXPECT_EQ(run.gradients[0], (Numbers{1, -1, -0.5, 0.5}));
  }
}

// ---- Broken twins: what they are off by

// 24 tokens of 32 classes, cotangents of 1; token t is of class 5 t mod 32.
Outcome of_normals(const std::string& words) {
  const Stream123 stream(7, "logits");
  Numbers logits(24 * 32), labels(24);
  for (size_t i = 0; i < logits.size(); ++i) logits[i] = stream.normal(i);
  for (size_t t = 0; t < labels.size(); ++t) labels[t] = double(5 * t % 32);
  return losses("tokens=24 vocab=32 " + words, logits, labels, Numbers(24, 1));
}

TEST(CrossEntropyTwins, GatheredLogitsTakenForShardsCostLogP) {
  for (int p : {2, 4, 8}) {
    const std::string words = "tp=" + std::to_string(p);
    Numbers due = of_normals(words).outputs[0];
    for (double& loss : due) loss += std::log(double(p));
    expect_near(of_normals(words + " control=gathered_logits_for_shards").outputs[0], due, 1e-14);
  }
}

// Smoothed over V/p classes in place of V, a class that is not the label is off by
// alpha/(V/p - 1) - alpha/(V - 1); the label, which is left 1 - alpha, by nothing.
TEST(CrossEntropyTwins, SmoothingOverAPartitionIsOffByItsShare) {
  const double alpha = 0.1, V = 32;
  for (int p : {2, 4, 8}) {
    const std::string words =
        "tp=" + std::to_string(p) + " smoothing=others label_smoothing=0.1 control=";
    Numbers due = of_normals(words).gradients[0];
    for (size_t t = 0; t < 24; ++t)
      for (size_t j = 0; j < 32; ++j)
        if (j != 5 * t % 32) due[t * 32 + j] -= alpha / (V / p - 1) - alpha / (V - 1);
    expect_near(of_normals(words + "smoothing_of_partition").gradients[0], due, 1e-15);
  }
}

Outcome log_probabilities(const std::string& words, const Numbers& logits, const Numbers& g) {
  return on_ranks("vocab_log_softmax " + words, {logits}, {g});
}

// p = (1, 1, 2)/4, beside it the same logits far away. G = 1 + 2 + 5 = 8, then 0.
TEST(LogSoftmaxOnRanks, IsThatOfTheWholeRow) {
  const double log2 = std::log(2.0), far = 1000;
  const Numbers z{0, 0, log2, far, far, far + log2}, g{1, 2, 5, 3, -4, 1};
  for (const char* tp : {"tp=1", "tp=3"})
    for (const auto& [dtype, within] : {std::pair("", 1e-12), {" dtype=f32", 1e-4}}) {
      SCOPED_TRACE(std::string(tp) + dtype);
      const Outcome run = log_probabilities(std::string(tp) + " tokens=2 vocab=3" + dtype, z, g);
      expect_near(run.outputs[0], {-2 * log2, -2 * log2, -log2, -2 * log2, -2 * log2, -log2},
                  within);
      expect_near(run.gradients[0], {1 - 2, 2 - 2, 5 - 4, 3, -4, 1}, within);
    }
}

// A class that takes nothing of the others' cotangents is off by p G; one that takes those of its
// rank, by p times what other ranks have of G.
TEST(LogSoftmaxTwins, AreOffByTheirShareOfTheCotangents) {
  const Numbers z{0, 0, std::log(2.0), 0}, g{1, 2, 5, 2};
  const std::string words = "tp=2 tokens=1 vocab=4 control=log_softmax_";
  expect_near(log_probabilities(words + "backward_identity", z, g).gradients[0], g, 0);
  expect_near(log_probabilities(words + "cotangents_of_shard", z, g).gradients[0],
              {1 - 0.2 * 3, 2 - 0.2 * 3, 5 - 0.4 * 7, 2 - 0.2 * 7}, 1e-15);
}

// Cotangents of log-probabilities and of entropies.
Outcome policy(const std::string& words, const Numbers& logits, const Numbers& labels,
               const Numbers& a, const Numbers& b) {
  return on_ranks("vocab_log_probs " + words, {logits, labels}, {a, b});
}

// p = (1, 1, 2)/4, so that H = 3/2 log 2 and log p + H = (-1, -1, 1)/2 log 2: without a
// temperature, with logits that have it as a factor, and far away. The second label is ignored.
TEST(LogProbsOnRanks, AreThoseOfTheTemperedPolicy) {
  const double log2 = std::log(2.0);
  for (const char* tp : {"tp=1", "tp=3"})
    for (const double T : {1.0, 0.7, 4.0})
      for (const auto& [far, within] : {std::pair(0.0, 1e-15), {4096.0, 1e-11}}) {
        SCOPED_TRACE(std::string(tp) + " temperature " + std::to_string(T));
        Numbers z{0, 0, log2, 0, 0, log2};
        for (double& each : z) each = far + T * each;
        const Outcome run = policy(std::string(tp) + " tokens=2 vocab=3 temperature=" +
                                       (T == 0.7 ? "0.7" : std::to_string(int(T))),
                                   z, {2, -100}, {8, 8}, {4, 16});
        expect_near(run.outputs[0], {-log2, 0}, within);
        expect_near(run.outputs[1], {1.5 * log2, 1.5 * log2}, within);
        expect_near(run.gradients[0],
                    {(-2 + 0.5 * log2) / T, (-2 + 0.5 * log2) / T, (4 - log2) / T, 2 * log2 / T,
                     2 * log2 / T, -4 * log2 / T},
                    100 * within);
      }
}

TEST(LogProbsOnRanks, AgreeWithPyTorch) {
  const auto g = goldens::golden("log_probs");
  const int64_t tokens = goldens::extent(g, "logits", 0), V = goldens::extent(g, "logits", 1);
  for (const char* tp : {"tp=1", "tp=2", "tp=4", "tp=8"}) {
    SCOPED_TRACE(tp);
    const Outcome run = policy(
        std::string(tp) + " tokens=" + std::to_string(tokens) + " vocab=" + std::to_string(V) +
            " temperature=" + std::to_string(double(g.at("attributes").at("temperature"))),
        goldens::values(g, "inputs", "logits"), goldens::values(g, "inputs", "labels"),
        goldens::values(g, "cotangents", "log_probs"), goldens::values(g, "cotangents", "entropy"));
    expect_near(run.outputs[0], goldens::values(g, "outputs", "log_probs"), 1e-14);
    expect_near(run.outputs[1], goldens::values(g, "outputs", "entropy"), 1e-14);
    expect_near(run.gradients[0], goldens::values(g, "gradients", "logits"), 1e-14);
  }
}

// p = (1, 0, 1)/2 of logits that are far apart, or none at all: H = log 2, and a label whose
// probability is 0 has a log-probability all the same.
TEST(LogProbsOnRanks, AProbabilityOfZeroHasNoPartInTheEntropy) {
  const double log2 = std::log(2.0);
  for (const double masked : {-0x1p14, -HUGE_VAL})
    for (const char* tp : {"tp=1", "tp=3"})
      for (const auto& [dtype, within] : {std::pair("", 1e-15), {" dtype=f32", 1e-7}}) {
        SCOPED_TRACE(std::string(tp) + dtype);
        const Outcome run = policy(std::string(tp) + " tokens=2 vocab=3" + dtype,
                                   {1, masked, 1, 1, masked, 1}, {1, 0}, {1, 1}, {1, 1});
        EXPECT_EQ(run.outputs[0][0],
                  *dtype ? float(float(masked - 1) - float(log2)) : masked - 1 - log2);
        expect_near(run.outputs[1], {log2, log2}, within);
        expect_near(run.gradients[0], {-0.5, 1, -0.5, 0.5, 0, -0.5}, within);
      }
}

// Of p = (1, 1, 2)/4 on 2 ranks with 2 classes each, p = (1, 1, 2, 0..)/4: by the derivative of its
// terms p is off by p (H - 1); by the mean over the own classes by p times that of the others.
TEST(LogProbsTwins, AreOffByWhatTheBackwardTakesForTheMean) {
  const double log2 = std::log(2.0);
  const Numbers z{0, 0, log2, 0}, p{0.2, 0.2, 0.4, 0.2};
  const std::string words = "tp=2 tokens=1 vocab=4 control=";
  // x - m = (-1, -1, 0, -1) log 2, whose mean under p is -0.6 log 2.
  const double mean = -0.6 * log2, H = std::log(2.5) - mean;
  Numbers due(4), by_terms(4), by_shard(4);
  for (size_t j = 0; j < 4; ++j) {
    const double x = z[j] - log2, of_shard = j < 2 ? -0.4 * log2 : -0.2 * log2;
    due[j] = -p[j] * (x - mean);
    by_terms[j] = -p[j] * (std::log(p[j]) + 1);
    by_shard[j] = -p[j] * (x - of_shard);
    EXPECT_NEAR(std::log(p[j]) + H, x - mean, 1e-15);
  }
  const auto gradient = [&](const std::string& control) {
    return policy(words + control, z, {0}, {0}, {1}).gradients[0];
  };
  expect_near(gradient(""), due, 1e-15);
  expect_near(gradient("derivative_of_terms"), by_terms, 1e-15);
  expect_near(gradient("mean_of_shard"), by_shard, 1e-15);
  expect_near(gradient("entropy_without_gradient"), Numbers(4), 0);
}

TEST(EmbeddingTwins, OfTokensOfOneIdTheLastRemains) {
  const Numbers ids{1, 0, 1, 1}, w{0, 0}, g{1, 2, 4, 8};
  const std::string words = "tp=2 tokens=4 vocab=2 hidden=1";
  EXPECT_EQ(embedded(words, ids, w, g).gradients[1], (Numbers{2, 13}));
  EXPECT_EQ(embedded(words + " control=duplicates_overwritten", ids, w, g).gradients[1],
            (Numbers{2, 8}));
}

// Id 1 is the end of rank 0's range: rank 0 adds its row to that of rank 1.
TEST(EmbeddingTwins, AnInclusiveRangeIsReadTwice) {
  const Numbers ids{0, 1}, w{10, 20}, g{1, 2};
  const std::string words = "tp=2 tokens=2 vocab=2 hidden=1";
  const Outcome run = embedded(words + " control=range_inclusive", ids, w, g);
  EXPECT_EQ(run.outputs[0], (Numbers{10, 30}));
  EXPECT_EQ(run.gradients[1], (Numbers{3, 2}));
}

// ---- Bounds

struct InFloat {
  std::vector<float> loss, dz;
};

// The formulas of the header, every operation in float; cotangents of 1.
InFloat in_float(const Numbers& z, std::span<const int64_t> labels, size_t V, float s) {
  InFloat r;
  for (size_t t = 0; t < labels.size(); ++t) {
    std::vector<float> row(z.begin() + ptrdiff_t(t * V), z.begin() + ptrdiff_t((t + 1) * V));
    const float m = *std::max_element(row.begin(), row.end());
    float E = 0, Z = 0;
    for (float x : row) E += std::exp(x - m), Z += x - m;
    const float nll = std::log(E) - (row[size_t(labels[t])] - m), even = std::log(E) - Z / float(V);
    r.loss.push_back((1 - s) * nll + s * even);
    for (size_t j = 0; j < V; ++j)
      r.dz.push_back(std::exp(row[j] - m) / E - (int64_t(j) == labels[t] ? 1 - s : 0) -
                     s / float(V));
  }
  return r;
}

double worst_ratio(const std::vector<float>& met, const Numbers& due, const Numbers& bound) {
  double worst = 0;
  for (size_t i = 0; i < due.size(); ++i)
    worst = std::max(worst, std::abs(double(met[i]) - due[i]) / bound[i]);
  return worst;
}

// Never beyond its bound, and not far below: a loss within 1/200 somewhere, a gradient within 1/20.
TEST(Bounds, HoldForFloatAndAreNotWide) {
  constexpr size_t tokens = 64;
  for (const size_t V : {8u, 512u})
    for (const double scale : {1.0, 30.0})
      for (const double offset : {0.0, 4096.0})
        for (const float s : {0.0f, 0.1f}) {
          const Stream123 stream(3, "logits");
          Numbers z(tokens * V);
          for (size_t i = 0; i < z.size(); ++i)
            z[i] = double(float(offset + scale * stream.normal(i)));
          std::vector<int64_t> labels;
          for (size_t t = 0; t < tokens; ++t)
            labels.push_back(int64_t(stream.below(z.size() + t, V)));
          const auto bound = reference::shifted_cross_entropy_errors(
              z, labels, int64_t(V), double(s), 0x1p-24 + 0x1p-53, 0x1p-149);
          const InFloat met = in_float(z, labels, V, s);
          const double loss = worst_ratio(
                           met.loss, reference::cross_entropy(z, labels, int64_t(V), double(s)),
                           bound.loss),
                       dz = worst_ratio(met.dz,
                                        reference::cross_entropy_backward(
                                            z, labels, int64_t(V), double(s), Numbers(tokens, 1)),
                                        bound.logits);
          SCOPED_TRACE(std::to_string(V) + " classes, scale " + std::to_string(scale) +
                       ", offset " + std::to_string(offset) + ", s " + std::to_string(s));
          EXPECT_LE(loss, 1);
          EXPECT_GE(loss, 0.005);
          EXPECT_LE(dz, 1);
          EXPECT_GE(dz, 0.05);
        }
}

// y, and dz by exp(z - m) / E or, where `by_exp_of_y`, by exp(y); every operation in float.
InFloat log_softmax_in_float(const Numbers& z, const Numbers& g, size_t V, bool by_exp_of_y) {
  InFloat r;
  for (size_t first = 0; first < z.size(); first += V) {
    const std::vector<float> row(z.begin() + ptrdiff_t(first), z.begin() + ptrdiff_t(first + V));
    const float m = *std::max_element(row.begin(), row.end());
    float E = 0, G = 0;
    for (float x : row) E += std::exp(x - m);
    for (size_t j = 0; j < V; ++j) G += float(g[first + j]);
    for (size_t j = 0; j < V; ++j) {
      const float y = (row[j] - m) - std::log(E);
      r.loss.push_back(y);
      r.dz.push_back(float(g[first + j]) -
                     (by_exp_of_y ? std::exp(y) : std::exp(row[j] - m) / E) * G);
    }
  }
  return r;
}

// Within bounds by either formula, and within 1/50 and 1/20 of them somewhere.
TEST(Bounds, OfLogProbabilitiesHoldForFloatAndAreNotWide) {
  constexpr size_t tokens = 64;
  for (const size_t V : {2u, 8u, 512u})
    for (const double scale : {1.0, 30.0})
      for (const double offset : {0.0, 4096.0})
        for (const bool by_exp_of_y : {false, true}) {
          const Stream123 stream(3, "logits");
          Numbers z(tokens * V), g(tokens * V);
          for (size_t i = 0; i < z.size(); ++i) {
            z[i] = double(float(offset + scale * stream.normal(i)));
            g[i] = double(float(stream.normal(z.size() + i)));
          }
          const double u = 0x1p-24 + 0x1p-53;
          const auto bound = reference::log_softmax_errors(z, int64_t(V), g, u, u, 0x1p-149);
          const InFloat met = log_softmax_in_float(z, g, V, by_exp_of_y);
          const double y = worst_ratio(met.loss, reference::log_softmax(z, int64_t(V)), bound.y),
                       dz = worst_ratio(met.dz, reference::log_softmax_backward(z, int64_t(V), g),
                                        bound.logits);
          SCOPED_TRACE(std::to_string(V) + " classes, scale " + std::to_string(scale) +
                       ", offset " + std::to_string(offset) + (by_exp_of_y ? ", exp(y)" : ""));
          EXPECT_LE(y, 1);
          EXPECT_GE(y, 0.02);
          EXPECT_LE(dz, 1);
          EXPECT_GE(dz, 0.05);
        }
}

enum class Form { shifted, plain, of_logs };

// The three forms of the entropy, with x = z / T or z times 1/T, every operation in float.
struct PolicyInFloat {
  std::vector<float> log_probs, entropy, dz;

  PolicyInFloat(const Numbers& z, std::span<const int64_t> labels, size_t V, float T, Form form,
                const Numbers& a, const Numbers& b) {
    for (size_t t = 0; t < labels.size(); ++t) {
      std::vector<float> x(z.begin() + ptrdiff_t(t * V), z.begin() + ptrdiff_t((t + 1) * V));
      for (float& each : x) each = form == Form::plain ? each * (1 / T) : each / T;
      const float m = *std::max_element(x.begin(), x.end());
      float E = 0, mean = 0, H = 0;
      for (float each : x) E += std::exp(each - m);
      const float L = std::log(E);
      const auto p = [&](size_t j) {
        return form == Form::of_logs ? std::exp((x[j] - m) - L) : std::exp(x[j] - m) / E;
      };
      for (size_t j = 0; j < V; ++j)
        mean += p(j) * (form == Form::shifted ? x[j] - m
                        : form == Form::plain ? x[j]
                                              : (x[j] - m) - L);
      H = form == Form::shifted ? L - mean : form == Form::plain ? (m + L) - mean : -mean;
      entropy.push_back(H);
      log_probs.push_back((x[size_t(labels[t])] - m) - L);
      for (size_t j = 0; j < V; ++j) {
        const float slope = form == Form::shifted ? (x[j] - m) - mean
                            : form == Form::plain ? x[j] - mean
                                                  : ((x[j] - m) - L) + H;
        const float here = int64_t(j) == labels[t] ? 1 : 0;
        dz.push_back((float(a[t]) * (here - p(j)) - float(b[t]) * (p(j) * slope)) / T);
      }
    }
  }
};

// Within bounds by each form, and within 1/50 of them, and 1/200 of the entropy's, somewhere.
TEST(Bounds, OfLogProbsAndEntropiesHoldForFloatAndAreNotWide) {
  constexpr size_t tokens = 64;
  for (const size_t V : {2u, 8u, 512u})
    for (const double scale : {1.0, 8.0})
      for (const double offset : {0.0, 64.0})
        for (const float T : {1.0f, 0.7f, 4.0f}) {
          const Stream123 stream(3, "logits");
          Numbers z(tokens * V), a(tokens), b(tokens);
          for (size_t i = 0; i < z.size(); ++i)
            z[i] = double(float(offset + scale * stream.normal(i)));
          std::vector<int64_t> labels;
          for (size_t t = 0; t < tokens; ++t) {
            labels.push_back(int64_t(stream.below(z.size() + t, V)));
            a[t] = double(float(stream.normal(2 * z.size() + t)));
            b[t] = double(float(stream.normal(3 * z.size() + t)));
          }
          const auto due = reference::log_probs(z, labels, int64_t(V), double(T));
          const auto of_z = reference::log_probs_backward(z, labels, int64_t(V), double(T), a, b);
          const auto bound = reference::log_probs_errors(z, labels, int64_t(V), double(T), a, b,
                                                         0x1p-24 + 0x1p-53, 0x1p-149);
          double log_probs = 0, entropy = 0, dz = 0;
          for (const Form form : {Form::shifted, Form::plain, Form::of_logs}) {
            const PolicyInFloat met(z, labels, V, T, form, a, b);
            log_probs =
                std::max(log_probs, worst_ratio(met.log_probs, due.log_probs, bound.log_probs));
            entropy = std::max(entropy, worst_ratio(met.entropy, due.entropy, bound.entropy));
            dz = std::max(dz, worst_ratio(met.dz, of_z, bound.logits));
          }
          SCOPED_TRACE(std::to_string(V) + " classes, scale " + std::to_string(scale) +
                       ", offset " + std::to_string(offset) + ", temperature " + std::to_string(T));
          EXPECT_LE(log_probs, 1);
          EXPECT_GE(log_probs, 0.02);
          EXPECT_LE(entropy, 1);
          EXPECT_GE(entropy, 0.005);
          EXPECT_LE(dz, 1);
          EXPECT_GE(dz, 0.02);
        }
}

// Sums longer than 1/u, or exponents off by whole units: no error is too large, and no bound is
// NaN.
TEST(Bounds, KnowNothingWhereEverySumMayBeWrong) {
  const Numbers z{0x1p20, 0, -0x1p20, 1, 2, 3};
  const int64_t labels[] = {1, 2};
  for (const double u : {0x1p-1, 0x1p-8, 0x1p-53}) {
    const auto e = reference::shifted_cross_entropy_errors(z, labels, 3, 0.1, u, 0x1p-149);
    const auto y = reference::log_softmax_errors(z, 3, z, u, u, 0x1p-149);
    const Numbers ones{1, 1};
    const auto policy = reference::log_probs_errors(z, labels, 3, 1, ones, ones, u, 0x1p-149);
    for (const Numbers& list :
         {e.loss, e.logits, y.y, y.logits, policy.log_probs, policy.entropy, policy.logits})
      for (double bound : list) {
        EXPECT_GT(bound, 0);
        EXPECT_EQ(std::isinf(bound), u == 0.5) << u << " " << bound;
      }
  }
}

}  // namespace vocab_test
}  // namespace
}  // namespace shardproof
