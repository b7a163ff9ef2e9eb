// How the contract of experts routes tokens, by itself: a kernel is handed the result.
#pragma once
#include <cstdint>
#include <vector>

#include "oracle/contract.hpp"

namespace shardproof::experts {

// The experts that each token chooses, [T,k] by token: k different ones, whatever the rule.
//   route=random  each choice uniform among those that are left, by (seed, token, choice)
//   route=skewed  the same among the first k + (E - k) / 2: the others get no token
//   route=even    choice j of token t is (t k + j) mod E
//   route=one     choice j is j: k experts take all tokens
std::vector<int64_t> routing(const Case&, uint64_t seed);

Key topk_key();
Key route_key();
Operand chosen_operand(const Case&, const Layout& tokens);

// Of each choice [T,k], whether its expert takes it: with capacity=C the first C that each rank
// sends it, all first choices of the rank's tokens before all second ones; else all.
std::vector<bool> kept(const Case&, const std::vector<int64_t>& routing);

// Rows of one expert group: what a rank sends, and what the group sends to its experts. With
// a capacity these are blocks of that many rows, filled up with zeros.
struct Load {
  int64_t sent = 0, received = 0;
};
Load load_of(const Case&, const std::vector<int64_t>& routing, int world_rank);

}  // namespace shardproof::experts
