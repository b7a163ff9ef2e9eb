// Load balance of a router whose tokens are cut over ranks, the caller's factor left out.
//
//   probs [T,E] and chosen [T,k] of the own tokens; loss = sum over e of n_e S_e, one number
//   n_e: choices of e by the tokens of all ranks    S_e: the sum of their probs of e
//
// A product of two sums: the counts are summed over the ranks first, then each rank's part sum over
// e of n_e S_e^r is one part of the loss. The ranks' own products would not add up to it. Two
// all-reduces over the axes that cut the tokens (tp under sp, cp, ep, dp), both in the accumulation
// type: counts [E], then the loss. Backward dprobs_te = g n_e, without a call: the counts are kept.
#pragma once
#include <memory>
#include <vector>

#include "primitives/expert_line.hpp"
#include "primitives/work.hpp"

namespace shardproof::primitives {

class ExpertBalance : public Kernel {
 public:
  std::unique_ptr<Saved> forward(Rank&, std::span<const View> inputs,
                                 std::span<const View> outputs) override;
  void backward(Rank&, Saved&, std::span<const View> cotangents,
                std::span<const View> gradients) override;

 protected:
  virtual std::vector<int64_t> own_counts(const std::vector<int64_t>& chosen, int64_t experts,
                                          int64_t choices) const;
  virtual std::vector<Axis> summed_over(const Case&) const;
  virtual void sum_counts(Rank&, Communicator&, const View& own, const View& all) const;
  virtual void sum_loss(Rank&, Communicator&, const View& own, const View& all) const;
};

}  // namespace shardproof::primitives
