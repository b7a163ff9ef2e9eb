// Token log-probabilities and entropies of a policy, vocabulary-parallel, as reinforcement learning
// takes them of its logits: rank r of tp holds classes r V/p .. (r+1) V/p - 1.
//
//   logits [T,V/p], labels [T] on every rank of tp, -100 is ignored; log_probs, entropy [T] on
//   every rank, of softmax(logits / temperature)
//   forward   all-reduce max of the greatest logits; with x = (z - m) / temperature all-reduces of
//             sum exp(x), of the label's x and of sum exp(x) x: one number a token each
//   backward  none: every rank has what its classes need (vocab_shard.hpp)
//
// All of it is computed and sent in the accumulation type. The maximum cancels out of every result.
#pragma once
#include "primitives/linear.hpp"

namespace shardproof::primitives {

class VocabLogProbs : public Kernel {
 public:
  std::unique_ptr<Saved> forward(Rank&, std::span<const View> inputs,
                                 std::span<const View> outputs) override;
  void backward(Rank&, Saved&, std::span<const View> cotangents,
                std::span<const View> gradients) override;

 protected:
  // Of every token, over the classes of all ranks.
  struct Sums {
    View exps, target, scores;
  };
  virtual void maximum(Parallel&, const View& own, const View& all) const;
  virtual void sum_of_exps(Parallel&, const View& own, const View& all) const;
  virtual void sum_of_targets(Parallel&, const View& own, const View& all) const;
  virtual void sum_of_scores(Parallel&, const View& own, const View& all) const;
  // outputs log_probs, entropy.
  virtual void results(Parallel&, const View& labels, const View& logits, const Sums&,
                       std::span<const View> outputs) const;

  // The temperature of x, and that by which a gradient of x becomes one of z.
  virtual double temperature(const Case&) const;
  virtual double divisor(const Case&) const;
  // Labels as the two halves read them, those of own classes being first .. first + own - 1.
  virtual View labels_of_forward(Parallel&, const View&, int64_t first, int64_t own) const;
  virtual View labels_of_gradients(Parallel&, const View&, int64_t first, int64_t own) const;
  // What the backward takes for the cotangent of the entropy, and for sum exp(x) x.
  virtual View cotangent_of_entropy(Parallel&, const View&) const;
  virtual View scores_of_gradients(Parallel&, const View& logits, const View& greatest,
                                   const Sums&) const;
};

}  // namespace shardproof::primitives
