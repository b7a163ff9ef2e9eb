// What replicated parameters and their gradients have to be, on whole tensors, in double.
#pragma once
#include <cstdint>
#include <vector>

#include "reference/linear.hpp"

namespace shardproof::reference {

// sqrt of the sum of squares of all gradients, each logical element once.
double global_norm(const std::vector<In>& gradients);
// min(1, limit / (norm + 1e-6)): what every gradient is multiplied by.
double clip_factor(double norm, double limit);

// Q, K and V of X by one weight each; query heads are equally shared by key heads.
struct Heads {
  int64_t tokens = 0, hidden = 0, heads = 1, kv_heads = 1, dim = 1;
  int64_t query_rows() const { return heads * dim; }
  int64_t key_rows() const { return kv_heads * dim; }
  int64_t rows() const { return query_rows() + 2 * key_rows(); }
};
// The rows of a fused weight, group by group: query heads of the group, its key head, its value
// head. order[i] is the row of [all of Q | all of K | all of V] that is row i of the fused one.
std::vector<int64_t> grouped_rows(const Heads&);

}  // namespace shardproof::reference
