// A tensor that is cut by rows over tp, quantised to 8 bits, gathered in them, and dequantised.
//
//   forward   amax = max |x| of the own block, all-reduced (max) over the axes of `over`
//             s = greatest / amax (448 of e4m3, 57344 of e5m2), or the power of two at or below
//             codes of x s, four in a word of i32, all-gathered over tp
//             y = code / s of all blocks; outputs y, s
//   block=B   B elements of a row share a scale: nothing is reduced, scales are gathered as well
//   history=h delayed scaling: s comes from the greatest amax of the h earlier steps, the newest
//             first; the amax of this step takes the first place and the oldest is dropped
//   backward  straight through: dx is the own rows of the cotangent, reduce-scattered over tp where
//             output=replicate; grad_format= quantises it with its own amax, over the same axes
//
// amax and scales are computed and sent in the accumulation type. The steps are virtual so that a
// variant replaces one of them.
#pragma once
#include <memory>
#include <optional>
#include <vector>

#include "primitives/linear.hpp"
#include "primitives/recipe.hpp"

namespace shardproof::primitives {

std::optional<Rejected> refused_quantised(const Case&);

class QuantisedGather : public Kernel {
 public:
  std::unique_ptr<Saved> forward(Rank&, std::span<const View> inputs,
                                 std::span<const View> outputs) override;
  void backward(Rank&, Saved&, std::span<const View> cotangents,
                std::span<const View> gradients) override;

 protected:
  virtual std::vector<Axis> reduced_over(const Case&) const;
  virtual void own_amax(const Recipe&, const View& x, const View& amax);
  // amax of all ranks, [scales of x].
  virtual View amax_of(Rank&, const Recipe&, const View& x);
  virtual void reduce_amax(Rank&, Communicator&, const View& own, const View& all);
  // next: the amax of this step, then all but the last of history.
  virtual View amax_of_history(Rank&, const Recipe&, const View& history);
  virtual void roll(const View& history, const View& amax, const View& next);
  virtual void scales_of(const Recipe&, const View& amax, const View& scales);
  virtual void quantise(Rank&, const Recipe&, const View& x, const View& scales, const View& words);
  virtual void dequantise(Rank&, const Recipe&, const View& words, const View& scales, int64_t own,
                          const View& y);
  virtual void gather_codes(Rank&, const View& own, const View& all);
  virtual void gather_scales(Rank&, const View& own, const View& all);
  virtual void own_gradient(Rank&, const View& g, const View& dx);
  virtual void quantise_gradient(Rank&, const Recipe&, const View& g, const View& dx);
};

}  // namespace shardproof::primitives
