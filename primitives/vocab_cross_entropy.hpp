// Vocabulary-parallel cross-entropy: rank r of tp holds classes r V/p .. (r+1) V/p - 1 of the
// logits.
//
//   logits [T,V/p], labels [T] on every rank of tp, -100 is ignored; loss [T] on every rank
//   forward   all-reduce max of the greatest logits; all-reduces of sum exp(z - m), of the label's
//             z - m and, where labels are smoothed, of sum (z - m): one number a token each
//   backward  none: every rank has what its classes need (vocab_shard.hpp)
//
// All of it is computed and sent in the accumulation type. The maximum cancels out of every result.
#pragma once
#include "primitives/linear.hpp"

namespace shardproof::primitives {

class VocabCrossEntropy : public Kernel {
 public:
  std::unique_ptr<Saved> forward(Rank&, std::span<const View> inputs,
                                 std::span<const View> outputs) override;
  void backward(Rank&, Saved&, std::span<const View> cotangents,
                std::span<const View> gradients) override;

 protected:
  // Of every token, over the classes of all ranks. `shifted` has no data where nothing is smoothed.
  struct Sums {
    View exps, target, shifted;
  };
  virtual void maximum(Parallel&, const View& own, const View& all) const;
  virtual void sum_of_shifted(Parallel&, const View& own, const View& all) const;
  virtual void losses(Parallel&, const View& labels, const Sums&, const View& loss) const;
  // How many classes the labels are smoothed over, and their share s.
  virtual int64_t classes(const Case&, int64_t own) const;
  virtual double smoothing(const Case&, int64_t classes, bool backward) const;
  // Labels as the two halves read them, those of own classes being first .. first + own - 1.
  virtual View labels_of_forward(Parallel&, const View&, int64_t first, int64_t own) const;
  virtual View labels_of_gradients(Parallel&, const View&, int64_t first, int64_t own) const;
};

}  // namespace shardproof::primitives
