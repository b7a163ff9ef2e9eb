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
// The counts are kept for the backward, which makes no call.
#pragma once
#include "primitives/attention_line.hpp"

namespace shardproof::primitives {

std::optional<Rejected> refused_loss(const Case&);

// Of the own rows: label (-100: none) and weight.
struct Targets {
  std::vector<int64_t> labels;
  std::vector<double> weights;
};

class LossPacked : public Kernel {
 public:
  std::unique_ptr<Saved> forward(Rank&, std::span<const View> inputs,
                                 std::span<const View> outputs) override;
  void backward(Rank&, Saved&, std::span<const View> cotangents,
                std::span<const View> gradients) override;

 protected:
  struct Sums {
    double loss = 0, count = 0;
  };
  virtual Targets targets(const Case&, const ContextLine&, const std::vector<int64_t>& ids, int r,
                          int64_t first_sequence) const;
  // (S, N) of the group that the loss is divided over, and the loss itself.
  struct Normalised {
    double loss, count;
    double groups;  // how many such means are averaged
  };
  virtual Normalised normalise(Rank&, const Sums& own) const;
};

}  // namespace shardproof::primitives
