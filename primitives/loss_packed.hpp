// Loss of next-token prediction on packed documents, rows cut over cp, batch over dp.
//
//   logits [rows/p, V]    ids [rows], the same on every rank of cp    loss: one number
//
// A token predicts its successor in the same document: labels are made on the whole row, before it
// is cut. The first prompt * (1 + d mod 3) tokens of document d carry no weight. With sums over the
// tokens of the own dp group, S = sum w loss and N = sum w:
//
//   normalise=tokens  N1 = sum_dp S / max(1, sum_dp N)       one all-reduce of (S, N) over cp and
//   dp normalise=groups  N2 = mean over dp of S / max(1, N)     over cp, then a mean of one over dp
//
// The counts are kept for the backward, which makes no call. Which row predicts which follows from
// the line; the ids are looked up where they lie.
#pragma once
#include "primitives/attention_line.hpp"

namespace shardproof::primitives {

std::optional<Rejected> refused_loss(const Case&);

// Of the own rows: the place of the predicted id among all ids (-1: none) and the weight.
struct Targets {
  std::vector<int64_t> next;
  std::vector<double> weights;
};

class LossPacked : public Kernel {
 public:
  std::unique_ptr<Saved> forward(Rank&, std::span<const View> inputs,
                                 std::span<const View> outputs) override;
  void backward(Rank&, Saved&, std::span<const View> cotangents,
                std::span<const View> gradients) override;

 protected:
  virtual Targets targets(const Case&, const ContextLine&, int r, int64_t first_sequence) const;
  // From the own (S, N) those of the group that the loss is divided over, and the loss. Returns how
  // many such means are averaged.
  virtual double normalise(Rank&, const View& own, const View& sums, const View& loss) const;
};

}  // namespace shardproof::primitives
