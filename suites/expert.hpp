// How the contract of experts routes tokens, by itself: a kernel is handed the result.
#pragma once
#include <cstdint>
#include <vector>

#include "oracle/contract.hpp"
#include "reference/linear.hpp"

namespace shardproof::experts {

// The experts that each token chooses, [T,k] by token: k different ones, whatever the rule.
//   route=random  each choice uniform among those that are left, by (seed, token, choice)
//   route=skewed  the same among the first k + (E - k) / 2: the others get no token
//   route=even    choice j of token t is (t k + j) mod E
//   route=one     choice j is j: k experts take all tokens
std::vector<int64_t> routing(const Case&, uint64_t seed);

Key topk_key();
Key route_key();
Key experts_key(const char* help);  // left out: three for each member of a group
Key capacity_key();
Operand chosen_operand(const Case&, const Layout& tokens);
Layout tokens_on(const Case&);

// The ranks of ep, and of tp unless the contract cuts each expert over it (`ffn`), are the members
// of an expert group, each of which owns experts; a group has its own block of the tokens. With
// sp=on ranks of tp that cut each expert have shares of the rows that a member is sent.
int64_t members(const Case&);
int64_t shares(const Case&);
int64_t groups(const Case&);
int64_t first_expert(const Case&, int world_rank);
// Of each expert: the most rows that a group sends it.
std::vector<int64_t> most_rows(const Case&, const std::vector<int64_t>& routing);
// Of each own expert of a rank, on the line's seed, rows of padding included.
std::vector<int64_t> own_rows(const Case&, int world_rank);

// Of each choice [T,k], whether its expert takes it: with capacity=C the first C that each rank
// sends it, all first choices of the rank's tokens before all second ones; else all.
std::vector<bool> kept(const Case&, const std::vector<int64_t>& routing);
// A choice that is dropped has weight 0, and no gradient.
void drop(const Case&, const Whole& chosen, reference::Values& of_choices);

// Rows of one rank: those that it sends, that the group sends to its experts from its own share,
// that each share is filled up to where they are gathered, and that its experts compute in all.
// With a capacity these are blocks of that many rows, filled up with zeros.
struct Load {
  int64_t sent = 0, received = 0, block = 0, rows = 0;
};
Load load_of(const Case&, const std::vector<int64_t>& routing, int world_rank);

}  // namespace shardproof::experts
