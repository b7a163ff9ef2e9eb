#include "primitives/vocab_cross_entropy.hpp"

#include "primitives/line.hpp"
#include "primitives/vocab_line.hpp"
#include "primitives/vocab_shard.hpp"

namespace shardproof::primitives {
namespace {

struct CrossEntropySaved : Saved {
  View logits, labels;
  Kept greatest, exps;
};

}  // namespace

void VocabCrossEntropy::maximum(Parallel& p, const View& own, const View& all) const {
  all_reduce(p.rank, p.tp, own, all, Reduce::max);
}
void VocabCrossEntropy::sum_of_shifted(Parallel& p, const View& own, const View& all) const {
  all_reduce(p.rank, p.tp, own, all);
}
int64_t VocabCrossEntropy::classes(const Case& line, int64_t) const { return line.at("vocab"); }
double VocabCrossEntropy::smoothing(const Case& line, int64_t classes, bool) const {
  return smoothing_of(line, classes);
}
View VocabCrossEntropy::labels_of_forward(Parallel&, const View& labels, int64_t, int64_t) const {
  return labels;
}
View VocabCrossEntropy::labels_of_gradients(Parallel&, const View& labels, int64_t, int64_t) const {
  return labels;
}

void VocabCrossEntropy::losses(Parallel& p, const View& labels, const Sums& sums,
                               const View& loss) const {
  const Case& line = p.rank.line();
  const int64_t over = classes(line, line.at("vocab") / p.tp.size());
  perform(LossOfShards{{tensor(labels)},
                       tensor(sums.exps),
                       tensor(sums.target),
                       tensor(sums.shifted),
                       tensor(loss),
                       smoothing(line, over, false),
                       double(over),
                       p.accumulate == DType::f64},
          "losses of shards");
}

// inputs logits, labels; output loss.
std::unique_ptr<Saved> VocabCrossEntropy::forward(Rank& rank, std::span<const View> inputs,
                                                  std::span<const View> outputs) {
  if (auto refused = refused_vocab_loss(rank.line())) throw *refused;
  Parallel p(rank);
  const bool wide = p.accumulate == DType::f64;
  const View& logits = inputs[0];
  const int64_t own = own_classes(logits), first = first_class(p.tp, logits);
  const View labels = labels_of_forward(p, inputs[1], first, own);
  auto saved = std::make_unique<CrossEntropySaved>();
  saved->logits = logits, saved->labels = inputs[1];
  const std::vector<int64_t> tokens{inputs[1].elements()};
  saved->greatest = Kept(p.accumulate, tokens), saved->exps = Kept(p.accumulate, tokens);
  const auto row = [&] { return p.workspace(p.accumulate, tokens); };
  const bool smoothed = smoothing_of(rank.line(), rank.line().at("vocab")) > 0;

  const View greatest = row();
  perform(ShardMaximum{tensor(logits), tensor(greatest), own, wide}, "greatest logits");
  maximum(p, greatest, saved->greatest.view());

  const Sums part{row(), row(), smoothed ? row() : View{}},
      sums{saved->exps.view(), row(), smoothed ? row() : View{}};
  perform(ShardSums{{tensor(labels), first, own},
                    tensor(logits),
                    tensor(saved->greatest.view()),
                    tensor(part.exps),
                    tensor(part.target),
                    tensor(part.shifted),
                    wide},
          "sums of a shard");
  all_reduce(rank, p.tp, part.exps, sums.exps);
  all_reduce(rank, p.tp, part.target, sums.target);
  if (smoothed) sum_of_shifted(p, part.shifted, sums.shifted);
  losses(p, labels, sums, outputs[0]);
  return saved;
}

void VocabCrossEntropy::backward(Rank& rank, Saved& state, std::span<const View> cotangents,
                                 std::span<const View> gradients) {
  Parallel p(rank);
  const auto& saved = static_cast<const CrossEntropySaved&>(state);
  const int64_t own = own_classes(saved.logits), first = first_class(p.tp, saved.logits);
  const int64_t over = classes(rank.line(), own);
  perform(ShardGradient{{tensor(labels_of_gradients(p, saved.labels, first, own)), first, own},
                        tensor(saved.logits),
                        tensor(cotangents[0]),
                        tensor(saved.greatest.view()),
                        tensor(saved.exps.view()),
                        tensor(gradients[0]),
                        smoothing(rank.line(), over, true),
                        double(over),
                        p.accumulate == DType::f64},
          "gradients of shards");
}

}  // namespace shardproof::primitives
