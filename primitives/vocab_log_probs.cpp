#include "primitives/vocab_log_probs.hpp"

#include "primitives/line.hpp"
#include "primitives/vocab_line.hpp"
#include "primitives/vocab_shard.hpp"

namespace shardproof::primitives {
namespace {

struct LogProbsSaved : Saved {
  View logits, labels;
  Kept greatest, exps, scores;
};

}  // namespace

void VocabLogProbs::maximum(Parallel& p, const View& own, const View& all) const {
  all_reduce(p.rank, p.tp, own, all, Reduce::max);
}
void VocabLogProbs::sum_of_exps(Parallel& p, const View& own, const View& all) const {
  all_reduce(p.rank, p.tp, own, all);
}
void VocabLogProbs::sum_of_targets(Parallel& p, const View& own, const View& all) const {
  all_reduce(p.rank, p.tp, own, all);
}
void VocabLogProbs::sum_of_scores(Parallel& p, const View& own, const View& all) const {
  all_reduce(p.rank, p.tp, own, all);
}
double VocabLogProbs::temperature(const Case& line) const {
  return number_of(line, "temperature", 1);
}
double VocabLogProbs::divisor(const Case& line) const { return temperature(line); }
View VocabLogProbs::labels_of_forward(Parallel&, const View& labels, int64_t, int64_t) const {
  return labels;
}
View VocabLogProbs::labels_of_gradients(Parallel&, const View& labels, int64_t, int64_t) const {
  return labels;
}
View VocabLogProbs::cotangent_of_entropy(Parallel&, const View& g) const { return g; }

View VocabLogProbs::scores_of_gradients(Parallel&, const View&, const View&,
                                        const Sums& sums) const {
  return sums.scores;
}

void VocabLogProbs::results(Parallel& p, const View& labels, const View&, const Sums& sums,
                            std::span<const View> outputs) const {
  perform(TokenLogProbs{{tensor(labels)},
                        tensor(sums.exps),
                        tensor(sums.target),
                        tensor(sums.scores),
                        tensor(outputs[0]),
                        tensor(outputs[1]),
                        p.accumulate == DType::f64},
          "log-probabilities and entropies");
}

// inputs logits, labels; outputs log_probs, entropy.
std::unique_ptr<Saved> VocabLogProbs::forward(Rank& rank, std::span<const View> inputs,
                                              std::span<const View> outputs) {
  if (auto refused = refused_log_probs(rank.line())) throw *refused;
  Parallel p(rank);
  const bool wide = p.accumulate == DType::f64;
  const View& logits = inputs[0];
  const int64_t own = own_classes(logits), first = first_class(p.tp, logits);
  const View labels = labels_of_forward(p, inputs[1], first, own);
  const std::vector<int64_t> tokens{inputs[1].elements()};
  auto saved = std::make_unique<LogProbsSaved>();
  saved->logits = logits, saved->labels = inputs[1];
  for (Kept* kept : {&saved->greatest, &saved->exps, &saved->scores})
    *kept = Kept(p.accumulate, tokens);
  const auto row = [&] { return p.workspace(p.accumulate, tokens); };

  const View greatest = row();
  perform(ShardMaximum{tensor(logits), tensor(greatest), own, wide}, "greatest logits");
  maximum(p, greatest, saved->greatest.view());

  const Sums part{row(), row(), row()}, sums{saved->exps.view(), row(), saved->scores.view()};
  perform(ShardScores{{tensor(labels), first, own},
                      tensor(logits),
                      tensor(saved->greatest.view()),
                      tensor(part.exps),
                      tensor(part.target),
                      tensor(part.scores),
                      temperature(rank.line()),
                      wide},
          "sums of a shard");
  sum_of_exps(p, part.exps, sums.exps);
  sum_of_targets(p, part.target, sums.target);
  sum_of_scores(p, part.scores, sums.scores);
  results(p, labels, logits, sums, outputs);
  return saved;
}

void VocabLogProbs::backward(Rank& rank, Saved& state, std::span<const View> cotangents,
                             std::span<const View> gradients) {
  Parallel p(rank);
  const auto& saved = static_cast<const LogProbsSaved&>(state);
  const View greatest = saved.greatest.view(), exps = saved.exps.view();
  const int64_t own = own_classes(saved.logits), first = first_class(p.tp, saved.logits);
  const View scores =
      scores_of_gradients(p, saved.logits, greatest, {exps, View{}, saved.scores.view()});
  perform(LogProbGradient{{tensor(labels_of_gradients(p, saved.labels, first, own)), first, own},
                          tensor(saved.logits),
                          tensor(cotangents[0]),
                          tensor(cotangent_of_entropy(p, cotangents[1])),
                          tensor(greatest),
                          tensor(exps),
                          tensor(scores),
                          tensor(gradients[0]),
                          temperature(rank.line()),
                          divisor(rank.line()),
                          p.accumulate == DType::f64},
          "gradients of shards");
}

}  // namespace shardproof::primitives
