// Gated delta rule over the tokens of a sequence that is cut over cp in blocks (DeltaNet, Gated
// DeltaNet, Kimi Linear): the state is corrected by what it has in place of v, so that a block does
// more to it than decay it.
//
//   S' = Diag(a_t) S_(t-1),  S_t = S' + b_t k_t (v_t - S'^T k_t)^T,  o_t = S_t^T q_t
//   q, k [rows/p, heads/tp, d_k]    v, o [.., heads/tp, d_v]    b [.., heads/tp]
//   a [.., heads/tp], or [.., heads/tp, d_k] with gate=channel
//
// A block's T (state_context.hpp) is the product of its (I - b k k^T) Diag(a), a matrix [d_k, d_k]
// of a head, which does not commute with that of another block. Backward, w = G_t^T k_t and
// e = v_t - S'^T k_t:
//
//   G_t = q_t g_t^T + Diag(a_(t+1)) (I - b_(t+1) k_(t+1) k_(t+1)^T) G_(t+1)
//   dq_t = S_t g_t   dv_t = b_t w   db_t = w e   dk_t = b_t (G_t e - S' w)
//   da_ti = sum_j ((G_t - b_t k_t w^T) o S_(t-1))_ij, for a decay of a head the sum over i too
//
//   forward   one all-gather of d_k (d_v + d_k) numbers a block, head and sequence
//   backward  one of d_k d_v, taken through T^T
//
// States travel in the type of accumulation, whatever wire= says of sums.
#pragma once
#include <memory>
#include <vector>

#include "primitives/delta_rule.hpp"
#include "primitives/state_context.hpp"

namespace shardproof::primitives {

class DeltaContext : public StateContext {
 public:
  std::unique_ptr<Saved> forward(Rank&, std::span<const View> inputs,
                                 std::span<const View> outputs) override;
  void backward(Rank&, Saved&, std::span<const View> cotangents,
                std::span<const View> gradients) override;

 protected:
  void fold(Rank&, const Summaries&, const std::vector<int64_t>& chain, const View& state,
            bool backward) override;
  // Behind `chain`'s next block: `after` = T before + what the block makes of 0.
  virtual void take_through(Rank&, const Summaries&, int64_t block, const View& before,
                            const View& after, bool backward);
  // What is written to states, and how much of it; of T how much is taken, and from which tokens
  // on.
  virtual View values(Rank&, const View& v, const View& a, const View& b) const;
  virtual View steps(Rank&, const View& b, const View& a) const;
  virtual View steps_handed_on(Rank&, const View& steps) const;
  virtual std::vector<int64_t> reach_handed_on(const ContextLine&, int r) const;
};

}  // namespace shardproof::primitives
