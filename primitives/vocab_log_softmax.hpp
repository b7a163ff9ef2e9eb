// Vocabulary-parallel log-softmax: rank r of tp holds classes r V/p .. (r+1) V/p - 1.
//
//   logits, y [T,V/p]
//   forward   all-reduce max of the greatest logits, all-reduce of sum exp(z - m)
//   backward  all-reduce of the sum of a token's cotangents: whoever uses y, each class takes its
//             share of all of them
//
// One number a token each, computed and sent in the accumulation type. The maximum cancels out.
#pragma once
#include "primitives/linear.hpp"

namespace shardproof::primitives {

class VocabLogSoftmax : public Kernel {
 public:
  std::unique_ptr<Saved> forward(Rank&, std::span<const View> inputs,
                                 std::span<const View> outputs) override;
  void backward(Rank&, Saved&, std::span<const View> cotangents,
                std::span<const View> gradients) override;

 protected:
  // Of every token, over the classes of all ranks.
  virtual void maximum(Parallel&, const View& own, const View& all) const;
  virtual void sum_of_exps(Parallel&, const View& own, const View& all) const;
  virtual void sum_of_cotangents(Parallel&, const View& own, const View& all) const;
};

}  // namespace shardproof::primitives
