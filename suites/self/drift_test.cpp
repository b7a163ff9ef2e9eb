// drift: the step, phase, parameter and check that first see each fault of a training run; a run
// without a fault stays within bounds; digest logs of foreign loops.
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <set>
#include <thread>

#include <sys/stat.h>
#include <sys/time.h>
#include <unistd.h>

#include "oracle/device.hpp"
#include "oracle/digest/log.hpp"
#include "oracle/drift.hpp"
#include "oracle/drift_ranks.hpp"
#include "oracle/interrupt.hpp"
#include "oracle/job.hpp"
#include "oracle/self.hpp"
#include "primitives/block.hpp"

namespace shardproof {
namespace {
namespace drift_test {

const Registry& registry() {
  static const Registry r = all_families();
  return r;
}

std::vector<std::string> words_of(const std::string& text) {
  std::vector<std::string> words;
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find(' ', at), text.size());
    words.push_back(text.substr(at, end - at));
    at = end + 1;
  }
  return words;
}

DriftReport drift(const std::string& line, int64_t steps, const std::string& optimizer = "sgd",
                  const std::string& log = "") {
  DriftOptions o;
  o.steps = steps;
  o.optimizer = optimizer;
  o.log = log;
  return run_drift(parse_drift(words_of(line), registry()), o, Options{}, registry());
}

std::string refusal(const std::string& line) {
  try {
    parse_drift(words_of(line), registry());
  } catch (const BadInput& e) {
    return e.what();
  }
  return "";
}

bool saw(const DriftReport& r, const std::string& check) {
  for (const Sighting& s : r.seen)
    if (s.check.find(check) != std::string::npos) return true;
  return false;
}

// ---- Runs without a fault

TEST(Drift, ARunWithoutAFaultStaysWithinItsBounds) {
  for (const char* line : {"block tp=2 sp=on", "block tp=4 sp=on norm=rms dtype=f32",
                           "block tp=2 dp=2 sp=on dtype=bf16", "block tp=2 sp=on microbatches=2",
                           "linear_row tp=4 sp=on", "replicated_qkv tp=4 kv_heads=2",
                           "norm_sequence tp=2 dp=2 sp=on reduce=tp",
                           "vocab_embedding tp=2 dp=2 sp=on microbatches=2"})
    for (const char* optimizer : {"sgd", "adam"}) {
      const DriftReport r = drift(line, 12, optimizer);
      EXPECT_FALSE(r.drifted()) << line << " " << optimizer << " " << r.ended;
      EXPECT_EQ(r.steps, 12);
      EXPECT_GT(r.hashes, 0);
      EXPECT_LT(r.worst_ratio, 1);
      EXPECT_GT(r.worst_ratio, 0) << "nothing was rounded, so nothing was asked";
    }
}

// Those of x, w and b in each of three steps.
TEST(Drift, CountsTheGradientsThatItJudged) {
  EXPECT_EQ(drift("linear_row tp=2", 3).gradients, 3 * 3);
  EXPECT_EQ(drift("linear_row tp=2 microbatches=2", 3).gradients, 3 * (2 + 2));
}

TEST(Drift, RunsOnThreadsToTheSameBits) {
  const DriftReport forked = drift("block tp=2 sp=on", 10),
                    threads = drift("block tp=2 sp=on transport=threads", 10);
  EXPECT_FALSE(threads.drifted()) << threads.ended;
  EXPECT_EQ(forked.last_loss, threads.last_loss);
}

// Four batches that come again, microbatches that follow one another in them, draws that never
// repeat.
TEST(Drift, DataDifferInBatchesAndMicrobatchesAndDrawsInEachOfThem) {
  const Case line = parse("block tp=2 sp=on microbatches=2", registry());
  const Contract& c = registry().contract("block");
  const Operand x = c.operands(line)[0], y = c.operands(line).back();
  ASSERT_EQ(y.role, Operand::output);
  std::set<std::vector<double>> inputs, targets;
  std::set<std::string> draws;
  for (int64_t step = 0; step < 8; ++step)
    for (int64_t m = 0; m < 2; ++m) {
      inputs.insert(drift::input_of(line, x, line.mesh(), step, m).value);
      targets.insert(drift::target_of(line, y, line.mesh(), step, m).value);
      draws.insert(drift::line_of(line, step, m).text("draw"));
    }
  EXPECT_EQ(inputs.size(), 8u);
  EXPECT_EQ(targets.size(), 8u);
  EXPECT_EQ(draws.size(), 16u);
}

// A routing is made, not drawn.
TEST(Drift, DataThatAreMadeDifferInBatchesAndMicrobatchesToo) {
  const Case line = parse("expert_mlp ep=2 microbatches=2", registry());
  bool any = false;
  for (const Operand& o : registry().contract("expert_mlp").operands(line)) {
    if (!o.made || o.role == Operand::output) continue;
    any = true;
    std::set<std::vector<double>> inputs;
    for (int64_t step = 0; step < 8; ++step)
      for (int64_t m = 0; m < 2; ++m)
        inputs.insert(drift::input_of(line, o, line.mesh(), step, m).value);
    EXPECT_EQ(inputs.size(), 8u) << o.name;
  }
  EXPECT_TRUE(any) << "expected an operand that is made";
}

// The worst of more steps is no better.
TEST(Drift, TheWorstRatioIsThatOfAllSteps) {
  double worst = 0;
  for (int64_t steps = 1; steps < 7; ++steps) {
    const double ratio = drift("block tp=2 sp=on dtype=bf16", steps).worst_ratio;
    EXPECT_GE(ratio, worst) << steps;
    worst = ratio;
  }
}

// ---- Samples: microbatch x microbatches x dp; tp and cp do not count

std::vector<ShotRecord> first_step(const std::string& text) {
  const Case line = parse(text, registry());
  WorldSpec spec;
  spec.ranks = line.world();
  const auto world = start_world(spec, drift::rank_main(registry()));
  const drift::Work work{0, 1, print_canonical(line), "", 0, "sgd", 0.1};
  std::vector<ShotRecord> ranks;
  for (const RankOutcome& o : world->run(drift::serialize(work), 1, 30)) {
    auto record = parse_record(o.record);
    EXPECT_TRUE(record && record->shots.at(0).status == ShotRecord::ok) << text << " " << o.text;
    if (record) ranks.push_back(std::move(record->shots.at(0)));
  }
  return ranks;
}

std::vector<double> kept(const ShotRecord& r, int tag, int operand) {
  for (const ResultTensor& t : r.results) {
    std::vector<double> v(t.bytes.size() / 8);
    if (t.step != tag || t.operand != operand || !t.gradient) continue;
    std::memcpy(v.data(), t.bytes.data(), t.bytes.size());
    return v;
  }
  return {};
}

// 16 = 2 * 4 * 2 = 2 * 2 * 4 rows in four microbatches of two rows a rank, or two: one gradient,
// but for what the evaluation of all 16 rows may be off, on each side.
TEST(Samples, FourRanksTwiceAndTwoRanksFourTimesGiveOneGradient) {
  const std::string rest = " samples=16 dropout=0";
  const auto four = first_step("block dp=4 microbatches=2" + rest),
             two = first_step("block dp=2 microbatches=4" + rest),
             more = first_step("block dp=2 tp=2 sp=on microbatches=4" + rest);
  ASSERT_EQ(four.size(), 4u);
  ASSERT_EQ(two.size(), 2u);
  const Case one = parse("block" + rest, registry());
  const Contract& block = registry().contract("block");
  const auto operands = block.operands(one);
  const Mesh alone = one.mesh();
  std::vector<Whole> in;
  for (const Operand& o : operands)
    if (o.role != Operand::output)
      in.push_back(o.role == Operand::parameter ? drift::initial(one, o, alone)
                                                : drift::input_of(one, o, alone, 0, 0));
  const auto y = block.forward(one, in, nullptr);
  Whole cotangent = y[0];
  const Whole target = drift::target_of(one, operands.back(), alone, 0, 0);
  for (size_t i = 0; i < cotangent.value.size(); ++i)
    cotangent.value[i] = (y[0].value[i] - target.value[i]) / double(cotangent.value.size());
  std::vector<Gauge> gauges;
  const auto due = block.backward(one, in, std::vector<Whole>{cotangent}, &gauges);
  for (int k = 1; k + 1 < int(operands.size()); ++k) {
    const auto a = kept(four[0], drift::before_step, k), b = kept(two[0], drift::before_step, k);
    ASSERT_EQ(a.size(), due[size_t(k)].value.size()) << operands[size_t(k)].name;
    ASSERT_EQ(b.size(), a.size());
    bool any = false;
    for (size_t i = 0; i < a.size(); ++i) {
      const double bound = gauges[size_t(k)].bound[i] * 0x1p-53 * 2;
      EXPECT_LE(std::abs(a[i] - b[i]), bound) << operands[size_t(k)].name << i;
      EXPECT_LE(std::abs(a[i] - due[size_t(k)].value[i]), bound) << operands[size_t(k)].name << i;
      any = any || std::abs(a[i]) > bound;
    }
    EXPECT_TRUE(any) << operands[size_t(k)].name << ": nothing but zeros";
  }
  // The norm's gamma is whole on every rank of tp too.
  const auto a = kept(four[0], drift::before_step, 1), c = kept(more[0], drift::before_step, 1);
  ASSERT_EQ(c.size(), a.size());
  for (size_t i = 0; i < a.size(); ++i)
    EXPECT_LE(std::abs(a[i] - c[i]), gauges[1].bound[i] * 0x1p-53 * 2);
}

TEST(Samples, TpAndCpDoNotCountThem) {
  for (const char* mesh : {"dp=2", "dp=2 tp=2", "dp=2 tp=2 sp=on", "dp=2 cp=2", "dp=2 tp=2 cp=2"})
    EXPECT_EQ(
        parse(std::string("block microbatches=4 samples=16 ") + mesh, registry()).at("tokens"), 4)
        << mesh;
}

TEST(Samples, ABatchThatDoesNotDivideIsRefused) {
  EXPECT_NE(refusal("block dp=4 microbatches=2 samples=18")
                .find("samples divisible by microbatches x dp = 8, met samples=18"),
            std::string::npos)
      << refusal("block dp=4 microbatches=2 samples=18");
  EXPECT_NE(refusal("block dp=4 samples=2").find("divisible"), std::string::npos);
  EXPECT_NE(refusal("block dp=2 tokens=8 samples=16").find("leave one"), std::string::npos);
  EXPECT_EQ(refusal("block dp=4 microbatches=2 samples=24"), "");
}

int64_t bytes_on(const std::vector<LedgerEntry>& calls, const std::string& label) {
  int64_t n = 0;
  for (const LedgerEntry& e : calls)
    if (e.label == label) n += logical_bytes(e);
  return n;
}
std::vector<LedgerEntry> parameter_sums(const std::vector<LedgerEntry>& calls) {
  std::vector<LedgerEntry> sums;
  for (const LedgerEntry& e : calls)
    if (e.op == Op::all_reduce) sums.push_back(e);
  return sums;
}

// What a step sends on tp is activations and one coalesced sum of the parameters' gradients; on dp
// one sum of all gradients: (48 * 10 * 2 + 48) / 2 cut elements and 5 * 10 whole ones, in f64.
TEST(Samples, TwiceTheTokensAreTwiceTheBytesOfTpAndTheSameOfDp) {
  const auto once = first_step("block tp=2 dp=2 sp=on tokens=24")[0].ledger,
             twice = first_step("block tp=2 dp=2 sp=on tokens=48")[0].ledger;
  const auto sums = parameter_sums(once), more = parameter_sums(twice);
  ASSERT_EQ(sums.size(), 2u);
  ASSERT_EQ(more.size(), 2u);
  EXPECT_EQ(sums[0].label, "tp");
  EXPECT_EQ(sums[0].count, 50);
  EXPECT_EQ(sums[1].label, "dp");
  EXPECT_EQ(sums[1].count, 554);
  EXPECT_EQ(bytes_on(once, "dp"), 554 * 8);
  EXPECT_EQ(bytes_on(twice, "dp"), 554 * 8);
  EXPECT_EQ(more[0].count, 50);
  const int64_t parameters = logical_bytes(sums[0]);
  EXPECT_GT(bytes_on(once, "tp"), parameters);
  EXPECT_EQ(bytes_on(twice, "tp") - parameters, 2 * (bytes_on(once, "tp") - parameters));
}

// In sums longer than 1/u a wrong gradient looks like any other.
TEST(Drift, SaysNothingWhereNoErrorIsTooLarge) {
  const std::string line =
      "linear_row tp=2 in=4 dtype=bf16 acc=bf16 fill=normal control=row_bias_gradient_times_p@1";
  EXPECT_TRUE(drift(line + " tokens=64", 3, "sgd").drifted());
  const DriftReport r = drift(line + " tokens=512", 3, "sgd");
  EXPECT_FALSE(r.drifted());
  EXPECT_NE(r.without_bound.find("no error is too large here"), std::string::npos);
  const DriftLine parsed = parse_drift({"linear_row", "tp=2"}, registry());
  EXPECT_EQ(drift_text(r, parsed, {}, "shardproof").find("NO JUDGEMENT "), 0u);
  EXPECT_NE(drift_json(r, parsed, {}, "shardproof").find("\"drift\": null"), std::string::npos);
}

// What is drawn passes what the operand says of itself: a decay is none of any sign and size.
TEST(Drift, DataAreWhatTheirOperandsSayOfThem) {
  const Case line = parse("mixer_alltoall cp=2", registry());
  bool any = false;
  for (const Operand& o : registry().contract("mixer_alltoall").operands(line))
    if (o.name == "a") {
      any = true;
      for (double a : drift::input_of(line, o, line.mesh(), 1, 0).value)
        EXPECT_TRUE(0.75 < a && a < 1) << a;
    }
  EXPECT_TRUE(any) << "expected an operand a";
}

// A truth that grows beyond all numbers is nobody's fault, and no step of such a run has passed.
TEST(Drift, ATrainingThatDivergesIsNoVerdict) {
  for (const char* dtype : {"f64", "f32"}) {
    const std::string line = std::string("mlp tp=2 dtype=") + dtype;
    DriftOptions o;
    o.rate = 1e6;
    const DriftLine parsed = parse_drift(words_of(line), registry());
    const DriftReport r = run_drift(parsed, o, Options{}, registry());
    EXPECT_FALSE(r.drifted()) << drift_text(r, parsed, o, "sp");
    EXPECT_LT(r.steps, 100);
    const std::string text = drift_text(r, parsed, o, "sp"), json = drift_json(r, parsed, o, "sp");
    EXPECT_EQ(text.find("NO JUDGEMENT "), 0u) << text;
    EXPECT_NE(text.find("the training diverges: in step "), std::string::npos) << text;
    EXPECT_NE(text.find("use --optimizer adam or smaller extents"), std::string::npos) << text;
    EXPECT_NE(json.find("\"drift\": null"), std::string::npos) << json;
    // A fault before that is told.
    const DriftLine broken =
        parse_drift(words_of(line + " control=replica_bit_flip@0"), registry());
    EXPECT_TRUE(run_drift(broken, o, Options{}, registry()).drifted());
  }
}

TEST(Drift, LearnsSomething) {
  const DriftReport r = drift("block tp=2 sp=on", 100);
  EXPECT_LT(r.last_loss, 0.7 * r.first_loss);
}

// ---- Faults

struct Fault {
  const char *line, *phase, *parameter;
  int64_t step;
  bool hash;  // whether comparing replicas sees it
};

TEST(Drift, NamesStepPhaseAndParameterOfEveryFault) {
  const Fault faults[] = {
      {"block tp=2 sp=on control=norm_gradient_not_summed@20", "after backward", "norm1.gamma", 20,
       true},
      {"block tp=2 sp=on control=norm_gradient_averaged@7", "after backward", "norm1.gamma", 7,
       false},
      {"block tp=4 sp=on control=norm_parameter_left_out@3", "after backward", "norm2.beta", 3,
       true},
      {"block tp=4 sp=on control=norm_parameter_summed_twice@5", "after backward", "norm1.gamma", 5,
       false},
      {"block tp=2 control=redundant_gradient_summed@4", "after backward", "norm1.gamma", 4, false},
      {"block tp=2 sp=on control=dropout_by_local_index@2", "forward", "dropout1.mask", 2, false},
      {"block tp=2 dp=2 sp=on control=dropout_shared_on_shards@3", "forward", "dropout1.mask", 3,
       false},
      {"block tp=2 control=dropout_seeded_by_rank@4", "forward", "dropout1.mask", 4, false},
      {"block tp=2 dp=2 sp=on control=gradient_reduced_after_step@6", "after the step",
       "norm1.gamma", 6, true},
      {"block tp=2 sp=on control=replica_bit_flip@9", "after the step", "norm1.gamma", 9, true},
      {"block tp=2 sp=on control=norm_gradient_not_summed", "after backward", "norm1.gamma", 0,
       true}};
  for (const Fault& f : faults) {
    const DriftReport r = drift(f.line, f.step + 4);
    ASSERT_FALSE(r.seen.empty()) << f.line;
    EXPECT_EQ(r.seen[0].step, f.step) << f.line;
    EXPECT_EQ(r.seen[0].phase, f.phase) << f.line;
    EXPECT_EQ(r.seen[0].finding.tensor, f.parameter) << f.line;
    EXPECT_GE(r.seen[0].finding.rank, 0) << f.line;
    EXPECT_FALSE(r.seen[0].finding.index.empty()) << f.line;
    EXPECT_EQ(saw(r, "hash"), f.hash) << f.line;
    EXPECT_LE(r.worst_ratio, 1) << f.line;  // of what passed
    for (const Sighting& s : r.seen) {
      EXPECT_EQ(s.phase, f.phase) << f.line;
      EXPECT_EQ(s.step, f.step) << f.line;
      EXPECT_EQ(s.of, s.phase == "after backward" ? "gradient of " : "") << f.line;
    }
  }
}

// ---- Every control that a training run can show, at 2 and at 4 ranks

// The witness of a control with its one axis set to so many ranks; "" where it has two axes and so
// a number of ranks of its own.
std::string at_ranks(const std::string& witness, int ranks) {
  std::vector<std::string> words = words_of(witness);
  int axes = 0;
  for (std::string& w : words) {
    const bool axis = w.starts_with("tp=") || w.starts_with("dp=") || w.starts_with("cp=");
    axes += axis;
    if (axis) w = w.substr(0, 3) + std::to_string(ranks);
    if (w.starts_with("kv_heads=")) w = "kv_heads=" + std::to_string(ranks / 2);
  }
  std::string line;
  for (const std::string& w : words) line += (line.empty() ? "" : " ") + w;
  if (axes == 1) return line;
  return parse(witness, registry()).world() == ranks ? witness : "";
}

bool names(const std::string& list, const std::string& check) {
  return ("," + list + ",").find("," + check + ",") != std::string::npos;
}

void expect_caught(const Control& c, const std::string& line) {
  const DriftReport r = drift(line + " control=" + c.name + "@2", 4);
  ASSERT_FALSE(r.seen.empty()) << line << " " << c.name << " " << r.ended;
  EXPECT_EQ(r.seen[0].step, 2) << line << " " << c.name;
  const bool drawn = saw(r, "what is drawn");
  if (names(c.check, "forward") || drawn) {
    EXPECT_EQ(r.seen[0].phase, "forward") << line << " " << c.name;
    EXPECT_EQ(names(c.check, "replica"), drawn) << line << " " << c.name;
    return;
  }
  const bool made = r.seen[0].phase == "at initialisation";  // nothing is judged beyond that
  for (const auto& [check, seen_as] :
       {std::pair{"replica", "hash of replicas"}, {"gradient", "gradient against the reference"}}) {
    const bool due = names(c.check, check), silent = names(c.silent, check);
    EXPECT_TRUE(!(due || silent) || saw(r, seen_as) == due)
        << line << " " << c.name << " " << check;
  }
  EXPECT_TRUE(made || r.seen[0].phase == "after backward") << line << " " << c.name;
}

TEST(Drift, EveryControlIsCaughtByItsCheckInTheStepInWhichItStarts) {
  std::set<std::string> shown, at_two, at_four;
  for (const Control& c : registry().controls()) {
    const Contract& contract = registry().contract(c.contract);
    if (!c.make || on_device(c, registry()) ||
        (contract.family != "norm" && contract.family != "replicated" &&
         contract.family != "block"))
      continue;
    if (parse(c.witness, registry()).text("fill") == "offset") continue;  // training draws its own
    for (int ranks : {2, 4}) {
      const std::string line = at_ranks(c.witness, ranks), name = c.contract + " " + c.name;
      // One key head on two ranks: its group is all of tp, and the sum over tp is the right one.
      if (line.empty() || (c.name == "kv_replica_weight_summed_over_tp" && ranks == 2)) continue;
      try {
        parse_drift(words_of(line), registry());
      } catch (const BadInput&) {
        continue;  // no parameters to train: gradients, clip, step
      }
      shown.insert(name);
      (ranks == 2 ? at_two : at_four).insert(name);
      expect_caught(c, line);
    }
  }
  // norm 8, router 5, q/k-norm 1, qkv 4, block 10; at 2 ranks not those that need two axes (2 of
  // the norm, 1 of the router, 2 of the block) and not the one above.
  EXPECT_EQ(shown.size(), 28u);
  EXPECT_EQ(at_four.size(), 28u);
  EXPECT_EQ(at_two.size(), 22u);
}

// What is drawn is seen first, names the ranks and the axis, and stays silent on a run without the
// fault, on every number of ranks: 2^-60 by chance, also where one draw has 8 bits (30 elements of
// -log2(0.82) bits at 8 ranks).
TEST(Drift, WhatIsDrawnMustDifferOnShardsAndAgreeOnCopies) {
  const DriftReport shared = drift("block tp=4 sp=on control=dropout_by_local_index@2", 4),
                    by_rank = drift("block tp=2 dp=2 control=dropout_seeded_by_rank@1", 3);
  ASSERT_FALSE(shared.seen.empty());
  EXPECT_EQ(shared.seen[0].check, "replica check of what is drawn");
  EXPECT_EQ(shared.seen[0].finding.ranks, (std::vector<int>{0, 1, 2, 3}));
  EXPECT_NE(shared.seen[0].finding.message.find("shards on tp must differ"), std::string::npos);
  EXPECT_TRUE(saw(shared, "forward against the reference"));
  ASSERT_FALSE(by_rank.seen.empty());
  EXPECT_EQ(by_rank.seen[0].check, "replica check of what is drawn");
  EXPECT_NE(by_rank.seen[0].finding.message.find("copies on tp must be equal"), std::string::npos);
  for (const char* line : {"block tp=8 sp=on", "block tp=4 dp=2 sp=on", "block tp=3 sp=on norm=rms",
                           "block dp=4 dtype=bf16", "block tp=2 cp=2 sp=on microbatches=2"}) {
    const DriftReport r = drift(line, 3);
    EXPECT_FALSE(r.drifted()) << line << " " << r.ended;
    EXPECT_GT(r.draws, 0) << line;
    EXPECT_EQ(r.not_judged, "") << line;
  }
  const DriftReport none = drift("block tp=2 sp=on dropout=0", 3);
  EXPECT_EQ(none.draws, 0);
  EXPECT_FALSE(none.drifted());
}

TEST(Drift, EveryFaultOfTheTrainingStepIsCaughtAfterTheStepInWhichItStarts) {
  for (const auto& [name, what] : drift_faults())
    for (const char* mesh : {"dp=2", "tp=2 dp=2 sp=on", "dp=4"})
      for (const char* optimizer : {"sgd", "adam"}) {
        if (name == "optimizer_state_bit_flip" && std::string(optimizer) == "sgd") continue;
        const DriftReport r =
            drift(std::string("block ") + mesh + " control=" + name + "@2", 4, optimizer);
        ASSERT_FALSE(r.seen.empty()) << mesh << " " << name;
        EXPECT_EQ(r.seen[0].step, 2) << mesh << " " << name;
        EXPECT_EQ(r.seen[0].phase, "after the step") << mesh << " " << name;
        EXPECT_TRUE(saw(r, "update") && saw(r, "hash")) << mesh << " " << name;
      }
}

// Dies a millisecond after its last forward: most likely while the parent judges and the rank
// waits.
struct DiesWhileItWaits final : primitives::Block {
  std::unique_ptr<Saved> forward(Rank& rank, std::span<const View> inputs,
                                 std::span<const View> outputs) override {
    const itimerval soon{{0, 0}, {0, 1000}};
    if (rank.world_rank() == 1) setitimer(ITIMER_REAL, &soon, nullptr);
    return Block::forward(rank, inputs, outputs);
  }
};

Registry with_control(const char* name, std::function<std::unique_ptr<Kernel>()> make) {
  Registry r = all_families();
  Control c;
  c.name = name;
  c.contract = "block";
  c.witness = "block tp=2 sp=on";
  c.make = std::move(make);
  r.add(std::move(c));
  return r;
}

TEST(Drift, ARankThatDiesBetweenItsStepsIsNamed) {
  const Registry r =
      with_control("dies_while_it_waits", [] { return std::make_unique<DiesWhileItWaits>(); });
  DriftOptions o;
  o.steps = 2000;
  const DriftLine line = parse_drift(words_of("block tp=2 sp=on control=dies_while_it_waits@0"), r);
  const DriftReport report = run_drift(line, o, Options{}, r);
  EXPECT_TRUE(report.ended.starts_with("rank 1 was killed by SIGALRM")) << report.ended;
  EXPECT_EQ(report.ended.find("in was in"), std::string::npos) << report.ended;
}

struct ThrowsOnRankOne final : primitives::Block {
  std::unique_ptr<Saved> forward(Rank& rank, std::span<const View> inputs,
                                 std::span<const View> outputs) override {
    if (rank.world_rank() == 1) throw std::runtime_error("no workspace is left");
    return Block::forward(rank, inputs, outputs);
  }
};

// Rank 0 waits for a call that never comes, and is let go: what ended is the other's.
TEST(Drift, ARankThatThrowsIsNamedAndNotTheOneThatWaitedForIt) {
  const Registry r = with_control("throws", [] { return std::make_unique<ThrowsOnRankOne>(); });
  DriftOptions o;
  o.steps = 4;
  const DriftReport report =
      run_drift(parse_drift(words_of("block tp=2 sp=on control=throws@2"), r), o, Options{}, r);
  EXPECT_EQ(report.ended_at, 2);
  EXPECT_TRUE(report.ended.starts_with("rank 1 ")) << report.ended;
  EXPECT_NE(report.ended.find("no workspace is left"), std::string::npos) << report.ended;
}

// Sleeps so long before each forward: on all ranks, or on rank 1 alone.
struct Slow : primitives::Block {
  Slow(double seconds, bool alone) : seconds_(seconds), alone_(alone) {}
  std::unique_ptr<Saved> forward(Rank& rank, std::span<const View> inputs,
                                 std::span<const View> outputs) override {
    if (!alone_ || rank.world_rank() == 1)
      std::this_thread::sleep_for(std::chrono::duration<double>(seconds_));
    return Block::forward(rank, inputs, outputs);
  }

 private:
  double seconds_;
  bool alone_;
};

DriftReport slow_run(double seconds, bool alone, int64_t steps, double deadline_scale) {
  const Registry r = with_control("slow", [=] { return std::make_unique<Slow>(seconds, alone); });
  DriftOptions o;
  o.steps = steps;
  Options options;
  options.deadline_scale = deadline_scale;
  return run_drift(parse_drift(words_of("block tp=2 control=slow"), r), o, options, r);
}

// The deadline of 1.5 s is one of a step, not of as many as ranks make before the parent looks.
TEST(Drift, StepsTogetherMayTakeLongerThanADeadline) {
  const DriftReport r = slow_run(0.15, /*alone=*/false, 6, 0.05);
  EXPECT_EQ(r.ended, "");
  EXPECT_EQ(r.steps, 6);
  EXPECT_GT(r.seconds, 2);  // dropout is looked at in forwards of its own
}

// Whichever deadline ends a rank that may only be slow, the option that moves it is named.
TEST(Drift, ADeadlineNamesTheOptionThatMovesIt) {
  for (const double seconds : {0.4, 3.0}) {  // of a call, of the job: 0.2 s and 0.6 s
    const DriftReport r = slow_run(seconds, /*alone=*/true, 2, 0.02);
    EXPECT_NE(r.ended.find("--deadline-scale"), std::string::npos) << r.ended;
  }
}

TEST(Drift, RefusesAStepThatNoDeadlineHolds) {
  EXPECT_NE(refusal("block tp=2 tokens=16384 hidden=4096 ffn=16384").find("a case of at most"),
            std::string::npos);
}

const Sighting* sighting(const DriftReport& r, const std::string& check,
                         const std::string& tensor) {
  for (const Sighting& s : r.seen)
    if (s.check.find(check) != std::string::npos && s.finding.tensor == tensor) return &s;
  return nullptr;
}

// Of w [out, in], cut over tp, ranks 0 and 2 hold one half and ranks 1 and 3 the other. One bit of
// rank 3's differs from rank 1's; rank 0, which is first, holds other elements.
TEST(Drift, ACopyIsHeldAgainstOneOfItsOwnElements) {
  const DriftReport r = drift("linear_row tp=2 dp=2 control=replica_bit_flip@2", 3);
  const Sighting *hash = sighting(r, "hash", "w"), *update = sighting(r, "update", "w");
  ASSERT_TRUE(hash && update);
  for (const Sighting* s : {hash, update}) {
    EXPECT_EQ(s->finding.rank, 3) << s->check;
    EXPECT_EQ(s->finding.ranks, std::vector<int>{3}) << s->check;
    EXPECT_EQ(s->finding.wrong, 1) << s->check;
  }
  EXPECT_EQ(hash->finding.holders, std::vector<int>{3});
}

// Both halves part where each rank is updated with its own gradient: ranks 2 and 3 do, of which
// rank 2 alone holds the element that is shown.
TEST(Drift, HoldersAreThoseOfTheElementThatIsShown) {
  const DriftReport r = drift("linear_row tp=2 dp=2 control=gradient_reduced_after_step@2", 3);
  const Sighting* hash = sighting(r, "hash", "w");
  ASSERT_TRUE(hash);
  EXPECT_EQ(hash->finding.rank, 2);
  EXPECT_EQ(hash->finding.ranks, (std::vector<int>{2, 3}));
  EXPECT_EQ(hash->finding.holders, std::vector<int>{2});
}

TEST(Drift, AFaultThatIsNotReachedIsNoDrift) {
  EXPECT_FALSE(drift("block tp=2 sp=on control=norm_gradient_not_summed@20", 20).drifted());
}

// The sum that is left out is 1/2 of the gradient on average: the distance grows from the first
// wrong step on, while the loss stays within what the run's own steps differ by.
TEST(Drift, FollowsARunOnAndSaysWhatTheLossShows) {
  const DriftReport r = drift("block tp=2 sp=on control=norm_gradient_not_summed@10", 40);
  ASSERT_EQ(r.distance.size(), 30u);
  EXPECT_EQ(r.distance.front().first, 10);
  EXPECT_GT(r.distance.front().second, 0);
  EXPECT_GT(r.distance.back().second, 2 * r.distance.front().second);
  EXPECT_GT(r.replicas_apart, 0);
  EXPECT_FALSE(r.loss_told);
}

// One element of one parameter parts, and stays apart: every copy is given the same update.
TEST(Drift, TellsHowFarCopiesAreApartWhicheverPart) {
  EXPECT_GT(drift("block tp=4 control=replica_bit_flip@2", 4).replicas_apart, 0);
}

// Beside it the run goes on without the fault, from the step in which that is seen: usual is how
// far its losses lie apart, of 8 steps in a row at most.
TEST(Drift, UsualIsHowFarTheLossesOfARightRunLieApart) {
  std::vector<double> losses;
  for (int64_t steps = 3; steps <= 14; ++steps)
    losses.push_back(drift("block tp=2 sp=on", steps).last_loss);
  double apart = 0;
  for (auto first = losses.begin(); first + 8 <= losses.end(); ++first) {
    const auto [least, most] = std::minmax_element(first, first + 8);
    apart = std::max(apart, *most - *least);
  }
  const DriftReport r = drift("block tp=2 sp=on control=norm_gradient_not_summed@2", 14);
  EXPECT_NEAR(r.loss_usual, apart / losses.back(), 1e-9);
  EXPECT_NEAR(r.loss_off, std::abs(r.last_loss - losses.back()) / losses.back(), 1e-9);
}

// The loss of a step is taken before its update, so that one step that goes wrong in the backward
// cannot show in it, and is beside no other step whose loss says what is usual.
TEST(Drift, OfTheLastStepTheLossSaysWhatItCan) {
  const auto told = [](const std::string& words, int64_t steps) {
    const DriftReport r = drift(words, steps);
    const std::string text =
        drift_text(r, parse_drift(words_of(words), registry()), {}, "shardproof");
    const size_t at = text.find("loss  ");
    return at == std::string::npos ? "" : text.substr(at, text.find('\n', at) - at);
  };
  const std::string backward = told("block tp=2 sp=on control=norm_gradient_averaged@3", 4);
  EXPECT_NE(backward.find("cannot tell yet: that of step 3 was taken before the wrong update"),
            std::string::npos)
      << backward;
  const std::string forward = told("linear_row tp=2 control=bias_before_reduce@3", 4);
  EXPECT_NE(forward.find("at step 3 it is "), std::string::npos) << forward;
  EXPECT_NE(forward.find("more --steps show whether"), std::string::npos) << forward;
  for (const std::string& one : {backward, forward})
    EXPECT_EQ(one.find("apart"), std::string::npos) << one;
  EXPECT_NE(told("block tp=2 sp=on control=norm_gradient_averaged@3", 6).find(" % apart"),
            std::string::npos);
}

// One bit of a first moment m moves the next update by rate * 2^-52 |m| / ..., not by what a state
// of another age would: the run beside it begins with the ranks' own.
TEST(Drift, SeesTheOptimizersStateAndFollowsFromIt) {
  const DriftReport r = drift("block tp=4 control=optimizer_state_bit_flip@3", 8, "adam");
  ASSERT_FALSE(r.seen.empty());
  EXPECT_EQ(r.seen[0].step, 3);
  EXPECT_EQ(r.seen[0].phase, "after the step");
  EXPECT_EQ(r.seen[0].of, "first moment of ");
  EXPECT_EQ(r.seen[0].finding.tensor, "norm1.gamma");
  EXPECT_EQ(r.seen[0].finding.rank, 3);
  EXPECT_TRUE(saw(r, "hash") && saw(r, "update"));
  ASSERT_EQ(r.distance.size(), 5u);
  EXPECT_LT(r.distance.back().second, 1e-12);
  EXPECT_THROW(drift("block tp=4 control=optimizer_state_bit_flip@3", 8), BadInput);
}

TEST(Drift, ParametersMadePerRankPartAtInitialisation) {
  for (int64_t step : {0, 3}) {
    const DriftReport r = drift(
        "replicated_router tp=4 sp=on control=replica_initialised_per_rank@" + std::to_string(step),
        step + 3);
    ASSERT_FALSE(r.seen.empty());
    EXPECT_EQ(r.seen[0].step, step);
    EXPECT_EQ(r.seen[0].phase, "at initialisation");
    EXPECT_EQ(r.seen[0].finding.tensor, "w");
    EXPECT_EQ(r.seen[0].finding.ranks, (std::vector<int>{1, 2, 3}));
    for (const Sighting& s : r.seen) EXPECT_EQ(s.check, "hash of replicas");
  }
}

TEST(Drift, JsonHoldsTheFixedKeys) {
  const std::string words = "block tp=2 sp=on control=norm_gradient_not_summed@3";
  const DriftLine line = parse_drift(words_of(words), registry());
  const std::string json = drift_json(drift(words, 5), line, DriftOptions{}, "shardproof");
  for (const char* part : {"\"first_step\": 3,", "\"phase\": \"after backward\",",
                           "\"parameter\": \"norm1.gamma\",", "\"rank\": ", "\"index\": ["})
    EXPECT_NE(json.find(part), std::string::npos) << part << "\n" << json;
  const std::string none = drift_json(drift("block tp=2", 2), line, DriftOptions{}, "shardproof");
  EXPECT_NE(none.find("\"first_step\": null"), std::string::npos);
}

// A run that was interrupted says of how many steps it speaks, and that it speaks of no more.
TEST(Drift, InterruptedIsNoVerdict) {
  const auto told = [](const char* words, int64_t steps) {
    const DriftLine line = parse_drift(words_of(words), registry());
    const DriftReport r = drift(words, steps);
    return drift_text(r, line, {}, "sp") + drift_json(r, line, {}, "sp") +
           drift_html(r, line, {}, "sp", "sp drift");
  };
  const auto holds = [](const std::string& text, const char* part) {
    return text.find(part) != std::string::npos;
  };
  const std::string whole = told("block tp=2", 2);
  EXPECT_TRUE(holds(whole, "NO DRIFT   ") && holds(whole, "\"complete\": true"));
  EXPECT_EXIT(
      {
        catch_interrupts();
        std::raise(SIGTERM);
        const std::string cut = told("block tp=2", 7);
        const bool right = !holds(cut, "NO DRIFT   ") && holds(cut, "after 0 of 7 steps") &&
                           holds(cut, "\"complete\": false") && holds(cut, "\"drift\": null") &&
                           holds(cut, "\"word\":\"INTERRUPTED\"") &&
                           holds(cut, "\"complete\":false");
        std::_Exit(right ? 0 : 1);
      },
      testing::ExitedWithCode(0), "");
}

TEST(Drift, RefusesWhatCannotBeTrained) {
  EXPECT_NE(refusal("mapping_copy tp=2").find("parameters"), std::string::npos);
  EXPECT_NE(refusal("block tp=2 transport=nccl"), "");
  EXPECT_NE(refusal("block tp=2 control=norm_gradient_averaged@x").find("control"),
            std::string::npos);
  EXPECT_NE(refusal("block tp=2 control=norm_gradient_averaged@-1").find("control"),
            std::string::npos);
  EXPECT_NE(refusal("block tp=2 control=unknown@1").find("control of block"), std::string::npos);
  for (const char* nameless : {"block tp=2 control=@2", "block tp=2 control="})
    EXPECT_NE(refusal(nameless).find("control=NAME@STEP"), std::string::npos) << nameless;
  EXPECT_NE(refusal("block tp=3 sp=on ffn=10").find("ffn divisible"), std::string::npos);
  EXPECT_NE(refusal("block tp=2 control=unknown@1").find("replica_bit_flip"), std::string::npos);
  EXPECT_NE(refusal("block tp=2 sp=on control=gradient_reduced_after_step@1").find("dp or cp"),
            std::string::npos);
  EXPECT_EQ(refusal("block tp=2 sp=on control=norm_gradient_averaged@1"), "");
  const std::string twice =
      refusal("block tp=2 sp=on control=norm_gradient_averaged@1 control=norm_gradient_not_summed");
  EXPECT_NE(twice.find("expected it once"), std::string::npos) << twice;
  EXPECT_NE(twice.find("'control=norm_gradient_not_summed'"), std::string::npos) << twice;
}

// The harness under a rank: nobody's kernel is to blame.
struct HarnessFails final : primitives::Block {
  std::unique_ptr<Saved> forward(Rank&, std::span<const View>, std::span<const View>) override {
    throw Infrastructure("no memory is left for a buffer");
  }
};

TEST(Drift, AFailureOfTheHarnessIsNoVerdict) {
  Registry r = all_families();
  Control fails;
  fails.name = "harness_fails";
  fails.contract = "block";
  fails.witness = "block tp=2 sp=on";
  fails.make = [] { return std::make_unique<HarnessFails>(); };
  r.add(std::move(fails));
  DriftOptions o;
  o.steps = 2;
  const DriftLine line = parse_drift(words_of("block tp=2 sp=on control=harness_fails@1"), r);
  EXPECT_THROW(run_drift(line, o, Options{}, r), Infrastructure);
}

// A rank whose record was written over: nothing is read of what it lacks.
// Two steps where the first results of rank 1 are changed on their way.
DriftReport drift_with(const std::function<void(std::vector<ResultTensor>&)>& change) {
  const RankMain honest = drift::rank_main(registry());
  const RankMain main = [=](RankHost& host, std::span<const std::byte> job) {
    auto bytes = honest(host, job);
    auto record = parse_record(bytes);
    if (host.rank != 1 || !record || record->shots.empty()) return bytes;
    change(record->shots[0].results);
    return serialize(*record);
  };
  DriftOptions o;
  o.steps = 2;
  return run_drift(parse_drift(words_of("block tp=2 sp=on"), registry()), o, Options{}, registry(),
                   main);
}

// Lacking is also what is there as the gradient in place of the value, or the other way.
TEST(Drift, ARecordThatLacksAResultIsToldAsOverwritten) {
  using Results = std::vector<ResultTensor>;
  std::vector<std::function<void(Results&)>> changes;
  for (const int tag :
       {int(drift::after_backward), int(drift::before_step), int(drift::after_step)}) {
    const auto is = [=](const ResultTensor& t) { return t.step == tag && t.operand == 1; };
    changes.push_back([=](Results& all) { std::erase_if(all, is); });
    changes.push_back([=](Results& all) {
      const auto t = std::find_if(all.begin(), all.end(), is);
      t->gradient = !t->gradient;
    });
  }
  changes.push_back([](Results& all) {  // the output of the first microbatch
    std::find_if(all.begin(), all.end(), [](const ResultTensor& t) {
      return t.step == drift::microbatch && !t.gradient;
    })->bytes.resize(8);
  });
  for (size_t i = 0; i < changes.size(); ++i) {
    const DriftReport r = drift_with(changes[i]);
    EXPECT_EQ(r.ended,
              "rank 1 handed in a record that does not fit the step: its memory was overwritten")
        << i;
    EXPECT_EQ(r.ended_at, 0) << i;
  }
}

// Parameters that were written to behind their update: each is told, with the element that is the
// furthest off, a NaN before any number, and the first of several.
TEST(Drift, EveryParameterThatWasWrittenToIsTold) {
  const DriftReport r = drift_with([](std::vector<ResultTensor>& all) {
    for (ResultTensor& t : all) {
      if (t.step != drift::after_step || t.operand > 2) continue;
      const auto put = [&](size_t i, double v) { store(t.bytes.data() + 8 * i, t.dtype, v); };
      put(1, 1e6), put(2, std::nan("")), put(3, std::nan(""));
    }
  });
  std::vector<std::string> told;
  for (const Sighting& s : r.seen) {
    if (s.check.find("update") == std::string::npos) continue;
    told.push_back(s.finding.tensor);
    EXPECT_EQ(s.finding.rank, 1);
    EXPECT_EQ(s.finding.wrong, 3);
    EXPECT_TRUE(std::isnan(s.finding.got));
    EXPECT_TRUE(std::isinf(s.finding.error));
    EXPECT_EQ(s.finding.index, std::vector<int64_t>{2});
  }
  EXPECT_EQ(told, (std::vector<std::string>{"norm1.gamma", "norm1.beta"}));
}

// ---- The optimizer, by hand

TEST(DriftOptimizer, SgdAndTheFirstStepsOfAdam) {
  std::vector<double> p{1, 2};
  drift::Optimizer sgd("sgd", 0.5);
  sgd.step(0, p, std::vector<double>{2, -4}, DType::f64);
  EXPECT_EQ(p, (std::vector<double>{0, 4}));
  // The first step of Adam is rate * sign(g), up to eps / |g|: both means are unbiased to g and
  // g^2.
  std::vector<double> q{1, 1};
  drift::Optimizer adam("adam", 0.25);
  adam.step(0, q, std::vector<double>{3, -0.5}, DType::f64);
  EXPECT_NEAR(q[0], 0.75, 1e-8);
  EXPECT_NEAR(q[1], 1.25, 1e-8);
  // The second, with gradient 0: m = 0.09 g / (1 - 0.81), v = 0.000999 g^2 / (1 - 0.998001).
  adam.step(0, q, std::vector<double>{0, 0}, DType::f64);
  const double ratio = (0.09 / 0.19) / std::sqrt(0.000999 / 0.001999);
  EXPECT_NEAR(q[0], 0.75 - 0.25 * ratio, 1e-7);
  EXPECT_NEAR(q[1], 1.25 + 0.25 * ratio, 1e-7);
}

// ---- Logs

class DriftLogs : public ::testing::Test {
 protected:
  std::filesystem::path folder =
      std::filesystem::temp_directory_path() / ("drift_test." + std::to_string(getpid()));
  void SetUp() override { std::filesystem::create_directories(folder); }
  void TearDown() override { std::filesystem::remove_all(folder); }
  std::string path(const char* name) const { return (folder / name).string(); }
};

std::string written(int64_t step, const char* phase, const char* tensor, const char* axis,
                    const std::string& place, const shardproof_hash& h,
                    const shardproof_digest& d) {
  char* text = nullptr;
  size_t size = 0;
  std::FILE* f = open_memstream(&text, &size);
  shardproof_digest_write(f, step, phase, tensor, axis, place.c_str(), &h, &d);
  std::fclose(f);
  std::string line(text, size);
  std::free(text);
  return line;
}

// As a foreign training loop would log: [2,4] f32, cut over tp by rows, copied over dp.
std::string record(int64_t step, const char* tensor, int tp, int dp, float first,
                   int64_t row_offset = 0, const char* phase = "backward") {
  const shardproof_hash h = shardproof_hash_named(tensor, SHARDPROOF_F32, SHARDPROOF_RAW);
  shardproof_digest d{};
  const float x[4] = {first, 2, 3, 4};
  const int64_t shape[] = {2, 4}, start[] = {tp + row_offset, 0}, extent[] = {1, 4};
  shardproof_digest_block(&d, &h, x, 2, shape, start, extent);
  return written(step, phase, tensor, "tp:S,dp:I", std::to_string(tp) + "," + std::to_string(dp), h,
                 d);
}

// One row of a tensor of 4 columns.
std::string block_record(int tp, std::vector<int64_t> shape, int64_t row, float first) {
  const shardproof_hash h = shardproof_hash_named("w", SHARDPROOF_F32, SHARDPROOF_RAW);
  shardproof_digest d{};
  const float x[4] = {first, 2, 3, 4};
  const int64_t start[] = {row, 0}, extent[] = {1, 4};
  shardproof_digest_block(&d, &h, x, 2, shape.data(), start, extent);
  return written(0, "backward", "w", "tp:S", std::to_string(tp), h, d);
}

// On two tp and two dp ranks; `odd` is what rank tp=0,dp=1 has in place of 1.
std::string tensor_of(int64_t step, const char* tensor, float odd = 1) {
  return record(step, tensor, 0, 0, 1) + record(step, tensor, 1, 0, 5) +
         record(step, tensor, 0, 1, odd) + record(step, tensor, 1, 1, 5);
}
std::string step_of(int64_t step, float odd = 1) { return tensor_of(step, "w", odd); }

TEST_F(DriftLogs, OfTwoRunsNameTheFirstStepAtWhichTheyPart) {
  drift("block tp=2 sp=on", 8, "sgd", path("a"));
  drift("block tp=2 sp=on", 8, "sgd", path("same"));
  drift("block tp=2 sp=on control=norm_gradient_averaged@5", 8, "sgd", path("b"));
  const auto a = digest::read_log(path("a")), b = digest::read_log(path("b"));
  EXPECT_TRUE(digest::compare_logs(a, digest::read_log(path("same"))).findings.empty());
  const auto report = digest::compare_logs(a, b);
  ASSERT_FALSE(report.findings.empty());
  EXPECT_EQ(report.findings[0].step, 5);
  EXPECT_EQ(report.findings[0].phase, "backward");
  EXPECT_EQ(report.findings[0].tensor, "norm1.gamma");
  EXPECT_TRUE(digest::judge_log(b).findings.empty());  // its replicas agree
  // Without sp a rank sums the gradients of all tokens itself: no less right, and rounded
  // elsewhere.
  drift("block tp=2", 2, "sgd", path("whole"));
  const auto settings = digest::compare_logs(a, digest::read_log(path("whole")));
  ASSERT_FALSE(settings.findings.empty());
  EXPECT_TRUE(settings.findings[0].means.ends_with("part in right programs too"));
}

// From step 3 on the twin makes w anew, once, and on the ranks whose stream is another one: rank 0
// goes on with what it has trained.
TEST_F(DriftLogs, ABrokenInitialisationActsOnceAndWhereItIsBroken) {
  drift("replicated_router tp=4 sp=on control=replica_initialised_per_rank@3", 6, "sgd",
        path("log"));
  const auto log = digest::read_log(path("log"));
  const auto lane = [&](int64_t step, const char* phase) {  // of rank 0
    for (const auto& l : log.lines)
      if (l.step == step && l.phase == phase && l.place == std::vector<int64_t>{0})
        return std::pair(l.digest.lane[0], l.digest.lane[1]);
    return std::pair(uint64_t(0), uint64_t(0));
  };
  std::set<int64_t> made;
  for (const auto& l : log.lines)
    if (l.phase == "init") made.insert(l.step);
  EXPECT_EQ(made, (std::set<int64_t>{0, 3}));
  ASSERT_NE(lane(3, "init").first, 0u);
  EXPECT_EQ(lane(3, "init"), lane(2, "step"));
  EXPECT_NE(lane(3, "init"), lane(0, "init"));
}

TEST_F(DriftLogs, OnAFullDiskAreSaidNotToBeWhole) {
  EXPECT_EQ(drift("block tp=2", 2, "sgd", path("a")).log_fault, "");
  EXPECT_EQ(drift("block tp=2", 2, "sgd", "/dev/full").log_fault, std::strerror(ENOSPC));
}

TEST_F(DriftLogs, OfOneRunNameTheCopyThatParts) {
  drift("block tp=2 sp=on control=norm_gradient_not_summed@3", 6, "sgd", path("a"));
  const auto report = digest::judge_log(digest::read_log(path("a")));
  ASSERT_FALSE(report.findings.empty());
  EXPECT_EQ(report.findings[0].step, 3);
  EXPECT_EQ(report.findings[0].phase, "backward");
  EXPECT_EQ(report.findings[0].tensor, "norm1.gamma");
}

TEST(DriftLog, OfAForeignLoop) {
  const auto good = digest::parse_log(step_of(0) + step_of(1), "log");
  EXPECT_TRUE(digest::judge_log(good).findings.empty());
  const auto parted = digest::judge_log(digest::parse_log(step_of(0) + step_of(1, 9), "log"));
  ASSERT_EQ(parted.findings.size(), 1u);
  EXPECT_EQ(parted.findings[0].step, 1);
  EXPECT_EQ(parted.findings[0].rank, "tp=0,dp=1");
  EXPECT_EQ(parted.findings[0].tensor, "w");
}

TEST(DriftLog, SeesIndicesThatNobodyOrTwoRanksOwn) {
  // Rank 1 of tp logs row 0 again.
  const std::string twice = record(0, "w", 0, 0, 1) + record(0, "w", 1, 0, 5, -1);
  const auto report = digest::judge_log(digest::parse_log(twice, "log"));
  ASSERT_EQ(report.findings.size(), 1u);
  EXPECT_NE(report.findings[0].what.find("0 to 7, each once"), std::string::npos);
  EXPECT_EQ(report.findings[0].tensor, "w");
  EXPECT_NE(report.findings[0].what.find("w: 0 to 3 are on tp=0,dp=0 and on tp=1,dp=0"),
            std::string::npos)
      << report.findings[0].what;
  // Rank 1 logs the third row of [3,4] and nobody the second.
  const std::string lost = block_record(0, {3, 4}, 0, 1) + block_record(1, {3, 4}, 2, 5);
  const auto other = digest::judge_log(digest::parse_log(lost, "log"));
  ASSERT_EQ(other.findings.size(), 1u);
  EXPECT_NE(other.findings[0].what.find("w: 4 to 7 are on no rank"), std::string::npos)
      << other.findings[0].what;
}

// A dropout mask, logged with local indices: ranks that draw the same are named.
TEST(DriftLog, RanksThatNeedNumbersOfTheirOwnAndDrawTheSame) {
  auto mask = [](int tp, float first) {
    const shardproof_hash h = shardproof_hash_named("mask", SHARDPROOF_F32, SHARDPROOF_RAW);
    shardproof_digest d{};
    const float x[4] = {first, 1, 0, 1};
    shardproof_digest_run(&d, &h, x, 4, 0);
    return written(3, "forward", "mask", "tp:D", std::to_string(tp), h, d);
  };
  EXPECT_TRUE(
      digest::judge_log(digest::parse_log(mask(0, 1) + mask(1, 0), "log")).findings.empty());
  const auto same = digest::judge_log(digest::parse_log(mask(0, 1) + mask(1, 1), "log"));
  ASSERT_EQ(same.findings.size(), 1u);
  EXPECT_EQ(same.findings[0].step, 3);
  EXPECT_EQ(same.findings[0].rank, "tp=1");
  EXPECT_NE(same.findings[0].what.find("tp=0"), std::string::npos);
}

// The first row is another in b. Sums of another layout may well be; what was moved may not.
TEST(DriftLog, OfAnotherLayoutOnlyWhatOwesEqualBitsIsCompared) {
  auto two = [](const char* phase, float odd) {
    return digest::parse_log(
        record(4, "w", 0, 0, odd, 0, phase) + record(4, "w", 1, 0, 5, 0, phase), "two");
  };
  auto four = [](const char* phase) {
    std::string text;
    for (int tp : {0, 1})
      for (int dp : {0, 1}) text += record(4, "w", tp, dp, tp ? 5 : 1, 0, phase);
    return digest::parse_log(text, "four");
  };
  EXPECT_TRUE(digest::compare_logs(two("backward", 1), four("backward")).refused.empty());
  const auto refused = digest::compare_logs(two("backward", 2), four("backward"));
  EXPECT_TRUE(refused.findings.empty());
  EXPECT_NE(refused.refused.find("step 4, phase backward, tensor w as tp:S2,dp:I1 in two and "
                                 "tp:S2,dp:I2 in four: sums in another order"),
            std::string::npos)
      << refused.refused;
  for (const char* moved : {"init", "input"})
    EXPECT_EQ(digest::compare_logs(two(moved, 2), four(moved)).findings.size(), 1u) << moved;
  EXPECT_EQ(digest::compare_logs(two("backward", 2), four("backward"), true).findings.size(), 1u);
  // Of one layout every difference counts, that of a second copy too.
  auto copies = [](float second) {
    return digest::parse_log(record(4, "w", 0, 0, 1) + record(4, "w", 0, 1, second), "copies");
  };
  const auto copy = digest::compare_logs(copies(1), copies(2));
  ASSERT_EQ(copy.findings.size(), 1u);
  EXPECT_EQ(copy.findings[0].rank, "tp=0,dp=1");
  EXPECT_EQ(digest::compare_logs(two("backward", 2), two("backward", 1)).findings.size(), 1u);
}

TEST(DriftLog, SeesNumbersThatAreNotFinite) {
  const auto report = digest::judge_log(
      digest::parse_log(record(0, "w", 0, 0, NAN) + record(0, "w", 1, 0, INFINITY), "log"));
  ASSERT_FALSE(report.findings.empty());
  EXPECT_NE(report.findings[0].what.find("1 NaN and 0 infinite"), std::string::npos);
  const auto infinite = digest::judge_log(
      digest::parse_log(record(0, "w", 0, 0, 1) + record(0, "w", 1, 0, -INFINITY), "log"));
  ASSERT_EQ(infinite.findings.size(), 1u);
  EXPECT_EQ(infinite.findings[0].what, "0 NaN and 1 infinite of 4 elements");
  EXPECT_EQ(infinite.findings[0].rank, "tp=1,dp=0");
}

TEST(DriftLog, AnotherLayoutOfTheSameTensorIsTheSame) {
  // One rank that holds both rows, against two that hold one each.
  const shardproof_hash h = shardproof_hash_named("w", SHARDPROOF_F32, SHARDPROOF_RAW);
  shardproof_digest d{};
  const float x[8] = {1, 2, 3, 4, 5, 2, 3, 4};
  shardproof_digest_run(&d, &h, x, 8, 0);
  const auto one = digest::parse_log(written(0, "backward", "w", "tp:S", "0", h, d), "one"),
             two = digest::parse_log(step_of(0), "two");
  EXPECT_TRUE(digest::compare_logs(one, two).findings.empty());
}

std::string without(std::string text, const std::string& piece) {
  const size_t at = text.find(piece);
  EXPECT_NE(at, std::string::npos);
  return text.erase(at, piece.size());
}

// What one log lacks mid-run is no agreement, in either order, whichever rank it is of.
TEST(DriftLog, OfTwoRunsARecordThatOneLacksIsNamed) {
  const auto all = digest::parse_log(step_of(0) + step_of(1) + step_of(2), "A");
  const auto both_ways = [&](const digest::Log& cut, auto&& judge) {
    judge(digest::compare_logs(all, cut));
    judge(digest::compare_logs(cut, all));
  };
  // The first shard: those that are left begin at index 4.
  const auto shard = digest::parse_log(
      step_of(0) + without(step_of(1), record(1, "w", 0, 0, 1)) + step_of(2), "X");
  both_ways(shard, [](const digest::LogReport& r) {
    ASSERT_EQ(r.findings.size(), 1u);
    EXPECT_EQ(r.findings[0].step, 1);
    EXPECT_TRUE(r.findings[0].what.starts_with("X: the indices are not 0 to"))
        << r.findings[0].what;
  });
  // The last shard, or a second copy: what is left could be a whole, but is not all there is.
  for (const int dp : {0, 1}) {
    const auto last = digest::parse_log(
        step_of(0) + without(step_of(1), record(1, "w", 1, dp, 5)) + step_of(2), "X");
    both_ways(last, [&](const digest::LogReport& r) {
      EXPECT_TRUE(r.findings.empty());
      const std::string told =
          "step 1, phase backward: tp=1,dp=" + std::to_string(dp) + " of w is in A and not in X";
      EXPECT_NE(r.refused.find(told), std::string::npos) << r.refused;
    });
  }
  // The last of two copies: in that step the layout could be one of a single rank.
  const auto two_copies = [](int64_t step) {
    return record(step, "w", 0, 0, 1) + record(step, "w", 0, 1, 1);
  };
  const auto one = digest::compare_logs(
      digest::parse_log(two_copies(0) + two_copies(1) + two_copies(2), "A"),
      digest::parse_log(two_copies(0) + record(1, "w", 0, 0, 1) + two_copies(2), "X"));
  EXPECT_NE(one.refused.find("tp=0,dp=1 of w is in A and not in X"), std::string::npos);
  // A tensor on all ranks.
  const auto tensor = digest::parse_log(step_of(0) + tensor_of(1, "v") + step_of(2), "X");
  both_ways(tensor, [](const digest::LogReport& r) {
    EXPECT_NE(r.refused.find("step 1, phase backward: w of A is not in X"), std::string::npos)
        << r.refused;
  });
  // One that ends with the first ranks of its first tensor judges nothing; other numbers there are
  // a drift.
  const auto one_step = digest::parse_log(step_of(0), "A");
  for (const float first : {1.f, 2.f}) {
    const auto begun = digest::parse_log(record(0, "w", 0, 0, first), "X");
    for (const auto& r :
         {digest::compare_logs(one_step, begun), digest::compare_logs(begun, one_step)}) {
      EXPECT_EQ(r.findings.empty(), first == 1.f);
      EXPECT_EQ(r.cut, first == 1.f);
      EXPECT_TRUE(!r.cut || r.proven == -1) << r.proven;
    }
  }
  // Where a run only ended earlier nothing is lost.
  both_ways(digest::parse_log(step_of(0) + step_of(1), "X"), [](const digest::LogReport& r) {
    EXPECT_TRUE(r.findings.empty() && r.refused.empty()) << r.refused;
  });
}

// Of what a log does not hold nothing is said: neither that it drifts nor that it does not.
TEST(DriftLog, ALogThatEndsEarlyProvesOnlyWhatItHolds) {
  const std::string v = tensor_of(2, "v"),
                    all = step_of(0) + tensor_of(1, "v") + step_of(1) + v + step_of(2);
  const auto proven_to = [](const digest::LogReport& r, bool cut, int64_t step) {
    const std::string told = digest::log_text(r, {}), object = digest::log_json(r, {});
    EXPECT_TRUE(r.findings.empty() && r.refused.empty()) << r.refused;
    EXPECT_EQ(r.cut, cut);
    EXPECT_EQ(r.proven, step);
    EXPECT_EQ(told.starts_with("NO DRIFT"), !cut) << told;
    EXPECT_EQ(told.find("no drift up to step " + std::to_string(step)) != std::string::npos, cut)
        << told;
    EXPECT_NE(object.find(cut ? "\"drift\": null" : "\"drift\": false"), std::string::npos)
        << object;
    EXPECT_NE(object.find("\"proven_to\": " + std::to_string(step)), std::string::npos) << object;
  };
  const auto a = digest::parse_log(all, "A");
  proven_to(digest::judge_log(a), false, 2);
  proven_to(digest::compare_logs(a, a), false, 2);
  const std::string two = all.substr(0, all.find(v)), no_w = without(all, step_of(2)),
                    no_rank = without(all, record(2, "w", 1, 1, 5)),
                    no_end = all.substr(0, all.size() - 9);
  for (const std::string& text : {two, no_w, no_rank, no_end}) {
    const auto t = digest::parse_log(text, "T");
    proven_to(digest::compare_logs(a, t), true, 1);
    proven_to(digest::compare_logs(t, a), true, 1);
  }
  for (const std::string& text : {no_w, no_rank, no_end})
    proven_to(digest::judge_log(digest::parse_log(text, "T")), true, 1);
  // Only one step holds v: it may be one of those that are logged once.
  proven_to(digest::judge_log(digest::parse_log(without(all, v), "T")), false, 2);
  // A drift before the end is one.
  const auto parted = digest::compare_logs(a, digest::parse_log(step_of(0, 9), "T"));
  ASSERT_FALSE(parted.findings.empty());
  EXPECT_TRUE(digest::log_text(parted, {}).starts_with("DRIFT "));
  // Not one step that is whole.
  const auto none = digest::judge_log(digest::parse_log(no_end.substr(0, 300), "T"));
  EXPECT_EQ(none.proven, -1);
  EXPECT_NE(digest::log_text(none, {}).find("no step is there whole"), std::string::npos);
}

TEST(DriftLog, OfTwoRunsEachIsJudgedAlone) {
  const std::string all = step_of(0) + step_of(1) + step_of(2);
  const auto a = digest::parse_log(all, "A");
  const auto first = [&](const std::string& text) {
    const auto x = digest::parse_log(text, "X");
    const auto one = digest::compare_logs(a, x), other = digest::compare_logs(x, a);
    EXPECT_EQ(one.findings.size(), 1u);
    EXPECT_EQ(other.findings.size(), 1u);
    return one.findings.empty() || other.findings.empty() || one.findings[0].step != 1
               ? ""
               : one.findings[0].what;
  };
  const std::string repeated = record(1, "w", 1, 1, 5);
  EXPECT_EQ(first(step_of(0) + step_of(1) + repeated + step_of(2)), "X: line 9 repeats a rank");
  // The counts of one record of step 1, the second copy's first shard, are others.
  const auto counted = [&](const std::string& from, const std::string& to) {
    std::string text = all;
    const size_t at = text.find(from, text.find("step=1", text.find("rank=0,1")));
    return first(text.replace(text.find(from, text.find("rank=0,1", at)), from.size(), to));
  };
  EXPECT_EQ(counted(" nan=0", " nan=3"),
            "A 4 elements, 0 NaN, 0 infinite, 0 -0, X 4 elements, 3 NaN, 0 infinite, 0 -0");
  EXPECT_EQ(counted(" inf=0", " inf=3"),
            "A 4 elements, 0 NaN, 0 infinite, 0 -0, X 4 elements, 0 NaN, 3 infinite, 0 -0");
  EXPECT_EQ(counted(" negzero=0", " negzero=3"),
            "A 4 elements, 0 NaN, 0 infinite, 0 -0, X 4 elements, 0 NaN, 0 infinite, 3 -0");
  EXPECT_EQ(counted("elements=4", "elements=0"),
            "A 4 elements, 0 NaN, 0 infinite, 0 -0, X 0 elements, 0 NaN, 0 infinite, 0 -0");
}

std::string with_ranks(std::string text, const std::string& from, const std::string& to) {
  for (size_t at = 0; (at = text.find(from, at)) != std::string::npos; at += to.size())
    text.replace(at, from.size(), to);
  return text;
}

// A comparison of those that are there misses nobody. Their coordinates tell of a rank in between,
// the counts behind the axes of the last one too.
TEST(DriftLog, ARankThatLogsNothingIsMissed) {
  const std::string whole = step_of(0) + tensor_of(0, "v") + step_of(1) + tensor_of(1, "v");
  const auto judged = [](const std::string& text) {
    return digest::judge_log(digest::parse_log(text, "log"));
  };
  const digest::LogReport all = judged(whole);
  EXPECT_EQ(all.refused, "");
  EXPECT_NE(digest::log_text(all, {}).find("2 steps, 4 tensors compared, ranks: dp 2, tp 2"),
            std::string::npos);
  // One rank of v is never logged, while w is.
  std::string no_v = whole;
  for (int64_t step : {0, 1}) no_v = without(no_v, record(step, "v", 1, 1, 5));
  EXPECT_NE(judged(no_v).refused.find("expected a record of each of 4 ranks (tp:S2,dp:I2), met "
                                      "step 0, phase backward: 3 of v in log, and that of "
                                      "tp=1,dp=1 is not there"),
            std::string::npos)
      << judged(no_v).refused;
  // Nobody logs on dp=1: without counts that is a mesh of two ranks.
  std::string no_copy;
  for (int64_t step : {0, 1}) no_copy += record(step, "w", 0, 0, 1) + record(step, "w", 1, 0, 5);
  EXPECT_EQ(judged(no_copy).refused, "");
  EXPECT_EQ(judged(no_copy).mesh, "dp 1, tp 2");
  const std::string told = judged(with_ranks(no_copy, "dp:I ", "dp:I2 ")).refused;
  EXPECT_NE(told.find("of tp=0,dp=1 is not there"), std::string::npos) << told;
  EXPECT_EQ(judged(with_ranks(whole, "tp:S,dp:I ", "tp:S2,dp:I2 ")).refused, "");
  // The indices of a shard that nobody logged are not left out by the layout.
  std::string no_first;
  for (int64_t step : {0, 1}) no_first += record(step, "w", 1, 0, 5);
  EXPECT_TRUE(judged(no_first).findings.empty());
  EXPECT_NE(judged(no_first).refused.find("of tp=0,dp=0 is not there"), std::string::npos);
  // A drift is one whoever is missing.
  EXPECT_FALSE(
      judged(without(step_of(0, 9), record(0, "w", 1, 1, 5)) + step_of(1)).findings.empty());
}

TEST(DriftLog, OfOneRankAloneIsNoJudgement) {
  const auto log = digest::parse_log(record(0, "w", 0, 0, 1) + record(1, "w", 0, 0, 2), "log");
  const digest::LogReport r = digest::judge_log(log);
  EXPECT_TRUE(r.findings.empty() && r.one_rank);
  EXPECT_EQ(digest::log_text(r, {log}).find("NO JUDGEMENT log   one rank wrote it"), 0u);
  EXPECT_NE(digest::log_json(r, {log}).find("\"drift\": null"), std::string::npos);
  EXPECT_FALSE(digest::compare_logs(log, log).one_rank);  // two runs can be compared
  const auto nan = digest::judge_log(digest::parse_log(record(0, "w", 0, 0, NAN), "log"));
  EXPECT_EQ(digest::log_text(nan, {log}).find("DRIFT "), 0u);
}

TEST(DriftLog, ATruncatedLogIsReadToItsLastWholeRecord) {
  const std::string all = step_of(0) + step_of(1) + step_of(2, 9);
  const std::string cut = all.substr(0, all.size() - 30);
  const auto log = digest::parse_log(cut, "log");
  EXPECT_EQ(log.lines.size(), 11u);
  EXPECT_NE(log.truncated.find("line 11"), std::string::npos);
  // Of the last step one rank is missing: nothing is said about it.
  const auto report = digest::judge_log(log);
  EXPECT_TRUE(report.findings.empty());
  EXPECT_EQ(report.notes.size(), 2u);
}

std::string reading(const std::string& text) {
  try {
    digest::parse_log(text, "log");
  } catch (const BadInput& e) {
    return e.what();
  }
  return "";
}

// Names of a log are anyone's: what a terminal would obey is not handed to it.
TEST(DriftLog, NamesReachTheTerminalAsTextOnly) {
  const char* name = "w\x1b[31m\a";
  const auto one = [&](float first) {
    return digest::parse_log(record(0, name, 0, 0, first), "log");
  };
  const auto parted = digest::compare_logs(one(1), one(2));
  ASSERT_EQ(parted.findings.size(), 1u);
  const std::string told = digest::log_text(parted, {one(1), one(2)});
  EXPECT_NE(told.find("w\\x1b[31m\\x07"), std::string::npos) << told;
  EXPECT_EQ(told.find_first_of("\x1b\a"), std::string::npos);
  const auto lacking = digest::compare_logs(
      digest::parse_log(record(0, name, 0, 0, 1) + record(0, name, 1, 0, 5), "A"),
      digest::parse_log(record(0, name, 0, 0, 1) + record(1, name, 1, 0, 5), "X"));
  EXPECT_EQ(lacking.refused.find_first_of("\x1b\a"), std::string::npos);
  EXPECT_NE(lacking.refused, "");
}

// A record may claim any number of elements: what they owe is computed for as many as the length of
// the log earns, and the rest is said to be left out.
TEST(DriftLog, ClaimsOfElementsBeyondItsLengthAreNotCounted) {
  const auto claiming = [](const std::string& elements, int tensors) {
    std::string text;
    for (int t = 0; t < tensors; ++t) {
      std::string line = record(0, ("w" + std::to_string(t)).c_str(), 0, 0, 1);
      line.replace(line.find("elements=4"), 10, "elements=" + elements);
      text += line;
    }
    return digest::judge_log(digest::parse_log(text, "log"));
  };
  const auto one = claiming("1099511627776", 1), many = claiming("16777216", 40),
             few = claiming("16777216", 2);
  EXPECT_TRUE(one.findings.empty());
  ASSERT_EQ(one.notes.size(), 1u);
  EXPECT_TRUE(one.notes[0].starts_with("of 1 records of a tensor it was not asked"))
      << one.notes[0];
  // 2^27 steps and 2^17 for each of 40 records pay for 8 times 2^24.
  EXPECT_EQ(many.findings.size(), 8u);
  ASSERT_EQ(many.notes.size(), 1u);
  EXPECT_TRUE(many.notes[0].starts_with("of 32 records")) << many.notes[0];
  EXPECT_EQ(few.findings.size(), 2u);
  EXPECT_TRUE(few.notes.empty());
}

TEST_F(DriftLogs, AreRegularFiles) {
  ASSERT_EQ(mkfifo(path("pipe").c_str(), 0600), 0);
  for (const std::string& place : {path("pipe"), folder.string()}) try {
      digest::read_log(place);
      ADD_FAILURE() << "read " << place;
    } catch (const BadInput& e) {
      EXPECT_NE(std::string(e.what()).find("--logs: expected a regular file, met '" + place),
                std::string::npos)
          << e.what();
    }
  for (const auto& [name, why] : {std::pair(path("nothing"), "No such file or directory"),
                                  {path(std::string(300, 'l').c_str()), "File name too long"}})
    try {
      digest::read_log(name);
      ADD_FAILURE() << "read " << name;
    } catch (const BadInput& e) {
      EXPECT_NE(std::string(e.what()).find(std::string("' (") + why + ")"), std::string::npos)
          << e.what();
    }
}

TEST(DriftLog, WhatIsNoRecordIsRefusedWithLineAndColumn) {
  const std::string good = step_of(0), line = record(1, "w", 0, 0, 1);
  auto with = [&](const std::string& from, const std::string& to) {
    std::string bad = line;
    bad.replace(bad.find(from), from.size(), to);
    return reading(good + bad);
  };
  // "step=1 phase=backward tensor=w axis=tp:S,dp:I rank=0,0 digest=...": columns counted by hand.
  EXPECT_EQ(with("step=1", "step=x").substr(0, 9), "log:5:6: ");
  EXPECT_EQ(with("phase=", "phas=").substr(0, 9), "log:5:8: ");
  EXPECT_EQ(with("tp:S", "tp:Q").substr(0, 10), "log:5:37: ");
  EXPECT_EQ(with("rank=0,0", "rank=0,z").substr(0, 10), "log:5:54: ");
  EXPECT_EQ(with("rank=0,0", "rank=0").substr(0, 10), "log:5:52: ");
  EXPECT_EQ(with("dp:I ", "dp:I0 ").substr(0, 10), "log:5:37: ");
  EXPECT_EQ(with("tp:S,", "tp:S2x,").substr(0, 10), "log:5:37: ");
  EXPECT_NE(with("tp:S,dp:I rank=0,0", "tp:S2,dp:I2 rank=0,2")
                .find("log:5:56: expected a rank of dp below 2"),
            std::string::npos);
  EXPECT_NE(with("rank=0,0", "rank=0,99999999").find("expected a rank up to 16777215"),
            std::string::npos);
  EXPECT_NE(with("dtype=f32", "dtype=f31").find("one of f64, f32"), std::string::npos);
  EXPECT_NE(with("unit=element", "unit=element more").find("the end of the line"),
            std::string::npos);
  EXPECT_NE(reading("").find("log:1:1: expected a digest log"), std::string::npos);
  EXPECT_NE(reading("hello\n").find("log:1:1: expected step="), std::string::npos);
}

// A log that was packed or written again on its way: the cause and the way back are told.
TEST(DriftLog, WhatALogHasBecomeOnItsWayIsNamed) {
  const std::string good = record(0, "w", 0, 0, 1);
  std::string windows = good, wide, wide_big;
  windows.insert(windows.size() - 1, "\r");
  for (char c : good) wide += {c, '\0'}, wide_big += {'\0', c};
  std::string mac = good;
  mac.back() = '\r';
  const auto named = [](const std::string& text, const char* what, const char* todo) {
    EXPECT_NE(reading(text).find(what), std::string::npos) << reading(text);
    EXPECT_NE(reading(text).find(todo), std::string::npos) << reading(text);
  };
  named(good + windows, "log:2:", "tr -d '\\r'");
  named(windows, "a line that ends with CR LF", "tr -d '\\r'");
  named(mac, "lines that end with CR", "tr '\\r' '\\n'");
  named("\xef\xbb\xbf" + good, "log:1:1: ", "byte order mark");
  named(good + "\xef\xbb\xbf" + good, "log:2:1: ", "byte order mark");  // put behind one another
  for (const std::string& text :
       {"\xff\xfe" + wide, "\xfe\xff" + wide_big, wide, wide_big, "\xff\xfe" + wide.substr(0, 40)})
    named(text, "UTF-16", "iconv -f UTF-16");
  named("\x1f\x8b\x08", "gzip", "gunzip");
  named("\x1f\x8b\x08\nmore\n", "gzip", "gunzip");
  named("\x28\xb5\x2f\xfd", "zstd", "unpack");
  named("\xfd\x37zXZ", "xz", "unpack");
  named("BZh9", "bzip2", "unpack");
  named("PK\x03\x04", "zip", "unpack");
  EXPECT_NE(reading(good.substr(0, good.size() - 1) + " \n").find("the end of the line, met ' '"),
            std::string::npos)
      << reading(good.substr(0, good.size() - 1) + " \n");
}

}  // namespace drift_test
}  // namespace
}  // namespace shardproof
