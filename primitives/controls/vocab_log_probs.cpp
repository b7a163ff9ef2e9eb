// Broken twins of vocabulary-parallel log-probabilities and entropies. The comment above a twin
// names the mistake.
#include <algorithm>
#include <cmath>

#include "oracle/registry.hpp"
#include "primitives/controls/labels.hpp"
#include "primitives/controls/table.hpp"
#include "primitives/rows.hpp"
#include "primitives/vocab_log_probs.hpp"
#include "primitives/vocab_shard.hpp"

namespace shardproof {
namespace {

using namespace controls;
using List = std::vector<double>;

// ---- Sums over a shard

// Each rank's probabilities add up to 1.
struct ExpsOfShard final : VocabLogProbs {
  void sum_of_exps(Parallel&, const View& own, const View& all) const override {
    convert(own, all);
  }
};
// The label's score is known to the rank that has its class.
struct TargetOfShard final : VocabLogProbs {
  void sum_of_targets(Parallel&, const View& own, const View& all) const override {
    convert(own, all);
  }
};
// Of the entropy each rank adds up its own classes.
struct EntropyOfShard final : VocabLogProbs {
  void sum_of_scores(Parallel&, const View& own, const View& all) const override {
    convert(own, all);
  }
};

// sum exp(x) x of the own classes.
List own_scores(const View& logits, const View& greatest, double temperature) {
  const List z = to_doubles(logits), m = to_doubles(greatest);
  const size_t own = size_t(logits.shape.back());
  List sums(m.size());
  for (size_t i = 0; i < z.size(); ++i) {
    const double x = (z[i] - m[i / own]) / temperature;
    sums[i / own] += std::exp(x) * x;
  }
  return sums;
}
// The backward takes the mean over the own classes for that over all.
struct MeanOfShard final : VocabLogProbs {
  View scores_of_gradients(Parallel& p, const View& logits, const View& greatest,
                           const Sums& sums) const override {
    const View own = p.workspace(p.accumulate, sums.scores.shape);
    fill_from(own, own_scores(logits, greatest, temperature(p.rank.line())));
    return own;
  }
};

// ---- The entropy

// -sum p log p by the derivative of a term, -(log p + 1): p as if the others did not share in it.
struct DerivativeOfTerms final : VocabLogProbs {
  View scores_of_gradients(Parallel& p, const View&, const View&, const Sums& sums) const override {
    List list = to_doubles(sums.exps);
    for (double& sum : list) sum *= std::log(sum) - 1;
    const View own = p.workspace(p.accumulate, sums.scores.shape);
    fill_from(own, list);
    return own;
  }
};
// A backward that knows the log-probabilities alone.
struct EntropyWithoutGradient final : VocabLogProbs {
  View cotangent_of_entropy(Parallel& p, const View& g) const override {
    const View none = p.workspace(g.dtype, g.shape);
    set_zero(none);
    return none;
  }
};
// An entropy that is added up of terms, whatever they are where p is 0.
struct EntropyOfTerms : VocabLogProbs {
  virtual double term(double p, double x) const = 0;
  // What is added to the sum of the terms of a token.
  virtual double rest(double greatest, double exps) const = 0;

  void results(Parallel& p, const View& labels, const View& logits, const Sums& sums,
               std::span<const View> outputs) const override {
    VocabLogProbs::results(p, labels, logits, sums, outputs);
    const double T = temperature(p.rank.line());
    const List z = to_doubles(logits), exps = to_doubles(sums.exps);
    const size_t own = size_t(logits.shape.back());
    List own_max(exps.size(), -HUGE_VAL), terms(exps.size());
    for (size_t i = 0; i < z.size(); ++i) own_max[i / own] = std::max(own_max[i / own], z[i]);
    const View part = p.workspace(p.accumulate, sums.exps.shape),
               all = p.workspace(p.accumulate, sums.exps.shape);
    fill_from(part, own_max);
    maximum(p, part, all);
    const List m = to_doubles(all);
    for (size_t i = 0; i < z.size(); ++i)
      terms[i / own] += term(std::exp((z[i] - m[i / own]) / T) / exps[i / own], z[i] / T);
    fill_from(part, terms);
    sum_of_scores(p, part, all);
    List entropy = to_doubles(all);
    for (size_t t = 0; t < entropy.size(); ++t) entropy[t] += rest(m[t] / T, exps[t]);
    fill_from(outputs[1], entropy);
  }
};
// -p log p by logarithms of probabilities: 0 times -inf where one is 0.
struct LogsOfProbabilities final : EntropyOfTerms {
  double term(double p, double) const override { return -p * std::log(p); }
  double rest(double, double) const override { return 0; }
};
// m + log E - sum p x, in which a logit of -inf is multiplied by 0.
struct MaskedLogitsCounted final : EntropyOfTerms {
  double term(double p, double x) const override { return -p * x; }
  double rest(double greatest, double exps) const override { return greatest + std::log(exps); }
};
// The log-probability as log(exp(x_y) / E): -inf where the label's is 0.
struct LogOfProbability final : VocabLogProbs {
  void results(Parallel& p, const View& labels, const View& logits, const Sums& sums,
               std::span<const View> outputs) const override {
    VocabLogProbs::results(p, labels, logits, sums, outputs);
    const List ids = to_doubles(labels), exps = to_doubles(sums.exps),
               target = to_doubles(sums.target);
    List list(ids.size());
    for (size_t t = 0; t < ids.size(); ++t)
      if (int64_t(ids[t]) != ignored_label) list[t] = std::log(std::exp(target[t]) / exps[t]);
    fill_from(outputs[0], list);
  }
};
// Log-probabilities pass through the type of the logits.
struct RoundedLogProbs final : VocabLogProbs {
  void results(Parallel& p, const View& labels, const View& logits, const Sums& sums,
               std::span<const View> outputs) const override {
    VocabLogProbs::results(p, labels, logits, sums, outputs);
    const View rounded = p.workspace(p.storage, outputs[0].shape);
    convert(outputs[0], rounded);
    convert(rounded, outputs[0]);
  }
};

// ---- The temperature

// Logits as they are, in both halves.
struct TemperatureLeftOut final : VocabLogProbs {
  double temperature(const Case&) const override { return 1; }
};
// What is divided in the forward is not in the backward.
struct GradientNotDivided final : VocabLogProbs {
  double divisor(const Case&) const override { return 1; }
};

// Two subjects, of which the second gives the entropy.
template <class OfEntropy>
struct EntropyBy : VocabLogProbs {
  struct Both : Saved {
    Kept logits;
    std::unique_ptr<Saved> log_probs, entropy;
  };
  virtual View logits_of_entropy(Rank&, const View& logits, Both&) { return logits; }

  std::unique_ptr<Saved> forward(Rank& rank, std::span<const View> inputs,
                                 std::span<const View> outputs) override {
    auto saved = std::make_unique<Both>();
    const View spare = rank.workspace(outputs[0].dtype, outputs[0].shape);
    const View first[] = {outputs[0], spare}, second[] = {spare, outputs[1]};
    saved->log_probs = VocabLogProbs::forward(rank, inputs, first);
    const View in[] = {logits_of_entropy(rank, inputs[0], *saved), inputs[1]};
    saved->entropy = of_entropy_.forward(rank, in, second);
    return saved;
  }
  void backward(Rank& rank, Saved& state, std::span<const View> cotangents,
                std::span<const View> gradients) override {
    Parallel p(rank);
    auto& saved = static_cast<Both&>(state);
    const View none = rank.workspace(cotangents[0].dtype, cotangents[0].shape);
    set_zero(none);
    const View of_first[] = {cotangents[0], none}, of_second[] = {none, cotangents[1]};
    const auto part = [&] { return p.workspace(p.accumulate, gradients[0].shape); };
    const View first[] = {part(), View{}}, second[] = {part(), View{}};
    VocabLogProbs::backward(rank, *saved.log_probs, of_first, first);
    of_entropy_.backward(rank, *saved.entropy, of_second, second);
    add_into(second[0], first[0]);
    convert(first[0], gradients[0]);
  }

 private:
  OfEntropy of_entropy_;
};
// The entropy of logits from before the division.
struct EntropyUntempered final : EntropyBy<TemperatureLeftOut> {};

// ---- Logits

// The log-probabilities left exp(x) / E where the logits were, of which the entropy is taken.
struct EntropyOfProbabilities final : EntropyBy<VocabLogProbs> {
  View logits_of_entropy(Rank& rank, const View& logits, Both& saved) override {
    Parallel p(rank);
    List z = to_doubles(logits);
    const size_t own = size_t(logits.shape.back());
    const View part = p.workspace(DType::f64, {logits.elements() / int64_t(own)}),
               all = p.workspace(DType::f64, part.shape);
    List sums(z.size() / own, -HUGE_VAL);
    for (size_t i = 0; i < z.size(); ++i) sums[i / own] = std::max(sums[i / own], z[i]);
    fill_from(part, sums);
    maximum(p, part, all);
    const List m = to_doubles(all);
    std::fill(sums.begin(), sums.end(), 0.0);
    for (size_t i = 0; i < z.size(); ++i) {
      z[i] = std::exp((z[i] - m[i / own]) / temperature(rank.line()));
      sums[i / own] += z[i];
    }
    fill_from(part, sums);
    sum_of_exps(p, part, all);
    const List E = to_doubles(all);
    for (size_t i = 0; i < z.size(); ++i) z[i] /= E[i / own];
    saved.logits = Kept(logits.dtype, logits.shape);
    fill_from(saved.logits.view(), z);
    return saved.logits.view();
  }
};

// The caller's logits are divided where they lie.
struct LogitsDividedInPlace final : VocabLogProbs {
  struct WithLogits : Saved {
    Kept logits;
    std::unique_ptr<Saved> of;
  };
  std::unique_ptr<Saved> forward(Rank& rank, std::span<const View> inputs,
                                 std::span<const View> outputs) override {
    const View& logits = inputs[0];
    auto saved = std::make_unique<WithLogits>();
    saved->logits = Kept(logits.dtype, logits.shape);
    convert(logits, saved->logits.view());
    const View in[] = {saved->logits.view(), inputs[1]};
    saved->of = VocabLogProbs::forward(rank, in, outputs);
    List list = to_doubles(logits);
    for (double& z : list) z /= temperature(rank.line());
    fill_from(logits, list);
    return saved;
  }
  void backward(Rank& rank, Saved& saved, std::span<const View> cotangents,
                std::span<const View> gradients) override {
    VocabLogProbs::backward(rank, *static_cast<WithLogits&>(saved).of, cotangents, gradients);
  }
};

// ---- What catches them

constexpr RowsOf of{"vocab_log_probs"};

const Row rows[] = {
    of("local_maximum", twin<LocalMaximum<VocabLogProbs>>, "forward,gradient", "",
       "the maximum of a shard taken for that of the row", "tp=4", "p >= 2"),
    of("exps_of_shard", twin<ExpsOfShard>, "forward,gradient,ledger", "",
       "a softmax over a shard of the vocabulary", "tp=4", "p >= 2"),
    of("target_of_shard", twin<TargetOfShard>, "forward,replica,ledger", "gradient",
       "a label's logit that stays with its rank", "tp=4", "p >= 2"),
    of("entropy_of_shard", twin<EntropyOfShard>, "forward,replica,ledger", "",
       "NVIDIA-NeMo/RL 1200: an entropy over the own part of the vocabulary", "tp=4", "p >= 2"),
    of("mean_of_shard", twin<MeanOfShard>, "gradient,gradcheck", "forward,replica,ledger",
       "a sum over the vocabulary that the backward takes of its own shard", "tp=4", "p >= 2"),
    of("derivative_of_terms", twin<DerivativeOfTerms>, "gradient,gradcheck",
       "forward,replica,ledger", "the derivative of p log p for that of an entropy of a softmax",
       "tp=4", ""),
    of("entropy_without_gradient", twin<EntropyWithoutGradient>, "gradient,gradcheck",
       "forward,replica,ledger", "huggingface/trl 6625", "tp=4", ""),
    of("logs_of_probabilities", twin<LogsOfProbabilities>, "forward", "gradient",
       "ByteDance-Seed/VeOmni 720", "tp=4 masked=3 dtype=f32", "a probability that is 0"),
    of("masked_logits_counted", twin<MaskedLogitsCounted>, "forward", "gradient",
       "NovaSky-AI/SkyRL 2259", "tp=4 masked=3 mask_logit=inf", "a logit of -inf"),
    of("log_of_probability", twin<LogOfProbability>, "forward", "gradient,replica,ledger",
       "NVIDIA/Megatron-LM 5522", "tp=4 masked=3 dtype=f32", "a probability that is 0"),
    of("rounded_log_probs", twin<RoundedLogProbs>, "forward", "gradient,replica,ledger",
       "log-probabilities in the type of the model", "tp=4 dtype=bf16", "a type narrower than f32"),
    of("temperature_left_out", twin<TemperatureLeftOut>, "forward,gradient", "replica,ledger",
       "NVIDIA-NeMo/RL 935, radixark/miles 68", "tp=4 temperature=0.7", "a temperature"),
    of("gradient_not_divided", twin<GradientNotDivided>, "gradient,gradcheck",
       "forward,replica,ledger", "logits divided outside of the graph", "tp=4 temperature=0.7",
       "a temperature"),
    of("entropy_untempered", twin<EntropyUntempered>, "forward,gradient", "replica",
       "OpenRLHF/OpenRLHF 1319", "tp=4 temperature=0.7", "a temperature"),
    of("entropy_of_probabilities", twin<EntropyOfProbabilities>, "forward,gradient", "replica",
       "verl-project/verl 1672, 2484: logits overwritten before the entropy", "tp=4", ""),
    {"vocab_log_probs", "logits_divided_in_place", twin<LogitsDividedInPlace>, "memory",
     "forward,gradient,ledger", "OpenRLHF/OpenRLHF 1319: a division in place",
     "tp=4 temperature=0.7", "a temperature", true},
    of("target_not_masked", twin<TargetNotMasked<VocabLogProbs>>, "forward,gradient",
       "replica,ledger", "the target mask of a vocabulary-parallel loss left out", "tp=4",
       "p >= 2"),
    of("gradient_of_own_labels_alone", twin<GradientOfOwnLabelsAlone<VocabLogProbs>>, "gradient",
       "forward,replica,ledger", "modelscope/ms-swift 9947", "tp=4", "p >= 2"),
    of("ignored_gradient_not_zeroed", twin<IgnoredGradientLeft<VocabLogProbs>>, "gradient",
       "forward,replica,ledger", "a row of an ignored label left with its softmax",
       "tp=4 ignored=5", "a label of -100"),
    of("ignored_log_prob_not_zeroed", twin<IgnoredResultLeft<VocabLogProbs>>, "forward",
       "gradient,replica,ledger", "a label of -100 taken for one of another rank", "tp=4 ignored=5",
       "a label of -100"),
};

}  // namespace

void controls_vocab_log_probs(Registry& registry) { controls::add(registry, rows); }

}  // namespace shardproof
