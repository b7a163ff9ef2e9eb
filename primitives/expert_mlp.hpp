// Experts that are feed-forward blocks, cut over ep, each of them over the ranks of tp by its ffn
// dimension (expert tensor parallelism): f_e(x) = W2_e act(W1_e x).
//
//   w1 [E/p,f/q,h] (swiglu: [gate | up], [E/p,2f/q,h]), w2 [E/p,h,f/q] on q ranks of tp
//
// sp=on: each rank of tp dispatches tokens of its own, over ep to those at its own place of tp.
// What arrives at the q ranks is gathered over tp, in blocks as long as the longest, and a rank's
// part of the results reduce-scattered to the blocks that they came in. Counts of all ranks of ep
// and tp come in one gather.
// sp=off: tokens are the same on the ranks of tp, of which each dispatches all; the parts of the
// results are all-reduced over tp.
//
//   forward   X_e; Z1 = X_e W1_e^T, A = act(Z1), parts of Z = A W2_e^T, summed over tp
//   backward  G_e; dA = G_e W2_e, dW2_e = G_e^T A, dZ1 by the slope; dW1_e = dZ1^T X_e, parts of
//             D = dZ1 W1_e, summed over tp
//
// Kept for backward: Z1 in the storage type; A is recomputed. A weight gradient has seen the rows
// of all ranks of tp, and dprobs = <dy, z> the sum: nothing else is summed over tp.
#pragma once
#include "primitives/expert_layer.hpp"
#include "primitives/gate.hpp"

namespace shardproof::primitives {

struct ExpertMlpSaved : ExpertSaved {
  Kept first;  // Z1 by expert [R,f/q], swiglu [R,2f/q]
};

class ExpertMlp : public ExpertLayer {
 protected:
  std::unique_ptr<ExpertSaved> saved() const override { return std::make_unique<ExpertMlpSaved>(); }
  void run_experts(Parallel&, ExpertSaved&, const View& z) override;
  DType result_type(Parallel&) const override;
  void run_backward(Parallel&, const ExpertSaved&, const View& g, const View& dx,
                    std::span<const View> dw) override;
  bool gathers(const ExpertLine&) const override;
  View gathered(Parallel&, const ExpertSaved&, const View& arrived) const override;
  View reduced(Parallel&, const ExpertSaved&, const View& results, Phase) const override;

  virtual View first_weight(Parallel&, const ExpertSaved&) const;
  // results: parts, of all shares where rows are gathered; to: the sum, of the own share.
  virtual void sum_parts(Parallel&, const Dispatch&, const View& results, const View& to,
                         Phase) const;
  virtual View activated(Parallel&, const ExpertMlpSaved&) const;
};

}  // namespace shardproof::primitives
