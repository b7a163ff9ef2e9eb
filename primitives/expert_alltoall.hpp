// Linear experts W_e [o,h] that are cut over ep, and over tp where it has ranks.
//
//   w [E/p,o,h]; forward Z = X_e W_e^T for each own expert; backward dW_e = G_e^T X_e, D = G_e W_e
//
// sp=off, tp > 1: tokens are the same on the ranks of tp, of which each dispatches its share; y and
// the gradients of x and probs are gathered over tp.
#pragma once
#include "primitives/expert_layer.hpp"

namespace shardproof::primitives {

class ExpertAlltoall : public ExpertLayer {
 protected:
  void run_experts(Parallel&, ExpertSaved&, const View& z) override;
  DType result_type(Parallel&) const override;
  void run_backward(Parallel&, const ExpertSaved&, const View& g, const View& dx,
                    std::span<const View> dw) override;
};

}  // namespace shardproof::primitives
