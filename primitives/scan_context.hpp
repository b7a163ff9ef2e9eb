// Gated linear recurrence over the tokens of a sequence that is cut over cp in blocks, a state of
// each head that crosses the ranks:
//
//   S_t = a_t S_(t-1) + k_t v_t^T,  o_t = S_t^T q_t,  S = 0 before the first token of a document
//   q, k [rows/p, heads/tp, d_k]    v, o [.., heads/tp, d_v]    a [.., heads/tp]
//
// A rank makes of the state before its block A S + E, with A the product of its decays (nothing
// goes through where a document begins) and E its last state from 0 on. All pairs (E, A) are
// gathered, and each rank folds those before it. Backward the same from the right, with the
// cotangents G of states and the decays that are there already:
//
//   G_t = a_(t+1) G_(t+1) + q_t g_t^T
//   dq_t = S_t g_t   dk_t = G_t v_t   dv_t = G_t^T k_t   da_t = <G_t, S_(t-1)>
//
//   forward   one all-gather of d_k d_v + 1 numbers a block, head and sequence
//   backward  one of d_k d_v
//
// States travel in the type of accumulation, whatever wire= says of sums.
#pragma once
#include <memory>
#include <vector>

#include "primitives/state_context.hpp"

namespace shardproof::primitives {

class ScanContext : public StateContext {
 public:
  std::unique_ptr<Saved> forward(Rank&, std::span<const View> inputs,
                                 std::span<const View> outputs) override;
  void backward(Rank&, Saved&, std::span<const View> cotangents,
                std::span<const View> gradients) override;

 protected:
  void fold(Rank&, const Summaries&, const std::vector<int64_t>& chain, const View& state,
            bool backward) override;
};

}  // namespace shardproof::primitives
