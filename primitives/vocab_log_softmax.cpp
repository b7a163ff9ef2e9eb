#include "primitives/vocab_log_softmax.hpp"

#include "primitives/vocab_line.hpp"
#include "primitives/vocab_shard.hpp"

namespace shardproof::primitives {
namespace {

struct LogSoftmaxSaved : Saved {
  View logits;
  Kept greatest, exps;
};

}  // namespace

void VocabLogSoftmax::maximum(Parallel& p, const View& own, const View& all) const {
  all_reduce(p.rank, p.tp, own, all, Reduce::max);
}
void VocabLogSoftmax::sum_of_exps(Parallel& p, const View& own, const View& all) const {
  all_reduce(p.rank, p.tp, own, all);
}
void VocabLogSoftmax::sum_of_cotangents(Parallel& p, const View& own, const View& all) const {
  all_reduce(p.rank, p.tp, own, all);
}

// input logits; output y.
std::unique_ptr<Saved> VocabLogSoftmax::forward(Rank& rank, std::span<const View> inputs,
                                                std::span<const View> outputs) {
  if (auto refused = refused_vocab_loss(rank.line())) throw *refused;
  Parallel p(rank);
  const bool wide = p.accumulate == DType::f64;
  const View& logits = inputs[0];
  const int64_t own = logits.shape.back();
  const std::vector<int64_t> tokens{logits.elements() / own};
  auto saved = std::make_unique<LogSoftmaxSaved>();
  saved->logits = logits;
  saved->greatest = Kept(p.accumulate, tokens), saved->exps = Kept(p.accumulate, tokens);
  const View greatest = saved->greatest.view(), exps = saved->exps.view(),
             part = p.workspace(p.accumulate, tokens), sum = p.workspace(p.accumulate, tokens);
  perform(ShardMaximum{tensor(logits), tensor(part), own, wide}, "greatest logits");
  maximum(p, part, greatest);
  perform(ShardExps{tensor(logits), tensor(greatest), tensor(sum), own, wide},
          "exponentials of a shard");
  sum_of_exps(p, sum, exps);
  perform(LogProbabilities{tensor(logits), tensor(greatest), tensor(exps), tensor(outputs[0]), own,
                           wide},
          "log-probabilities");
  return saved;
}

void VocabLogSoftmax::backward(Rank& rank, Saved& state, std::span<const View> cotangents,
                               std::span<const View> gradients) {
  Parallel p(rank);
  const bool wide = p.accumulate == DType::f64;
  const auto& saved = static_cast<const LogSoftmaxSaved&>(state);
  const int64_t own = saved.logits.shape.back();
  const std::vector<int64_t> tokens{saved.logits.elements() / own};
  const View part = p.workspace(p.accumulate, tokens), total = p.workspace(p.accumulate, tokens);
  perform(CotangentSum{tensor(cotangents[0]), tensor(part), own, wide}, "cotangents of a shard");
  sum_of_cotangents(p, part, total);
  perform(
      LogSoftmaxGradient{tensor(saved.logits), tensor(cotangents[0]), tensor(saved.greatest.view()),
                         tensor(saved.exps.view()), tensor(total), tensor(gradients[0]), own, wide},
      "gradients of log-probabilities");
}

}  // namespace shardproof::primitives
