// A stack of linears between an embedding and logits that share one table.
//
//   X_t = W[id_t],  Z = X_L W^T        W [V,h], X_l [T,h] as in stack.hpp, Z [T,V]
//   dW = dZ^T X_L + sum over the tokens of each id of dX_t
#pragma once
#include <cstdint>

#include "reference/stack.hpp"

namespace shardproof::reference {

struct TiedInputs {
  std::vector<int64_t> ids;
  int64_t vocab = 0, hidden = 0;
  In table;
  std::vector<In> w, b;  // by layer
};
struct TiedGradients {
  Values table;
  std::vector<Values> w, b;
};
Values tied(const TiedInputs&);
TiedGradients tied_backward(const TiedInputs&, In g);

// As stack_loss and stack_backward_loss; the table's gradient is a sum over `parts` ranks.
Loss tied_loss(const TiedInputs&, const Rounding&);
struct TiedLosses {
  Loss table;
  std::vector<Loss> w, b;
};
TiedLosses tied_backward_loss(const TiedInputs&, In g, const Rounding&, int parts);

}  // namespace shardproof::reference
