// The truth of the mapping family: the p ranks of one axis in one process, as a list of p local
// tensors in double. A region maps the list before it to the list after it.
//
//   list         of a type            local value of rank r
//   copies       invariant, replicate the whole
//   blocks       shard of dim         block r
//   (given)      partial              free: the list denotes its sum
//
// Under <x, y> = sum_r <x_r, y_r> the maps are adjoint in pairs:
//
//   identity - identity     all_reduce - all_reduce      all_gather - reduce_scatter
//   own_block - in_zeros    first_only - first_only      exchange(i, j) - exchange(j, i)
//   scaled - scaled
//
// An invariant list carries the weight 1/p, which is what turns identity into the adjoint of
// all_reduce (partial -> invariant) and own_block into that of all_gather (shard -> invariant).
#pragma once
#include <cstdint>
#include <span>
#include <vector>

namespace shardproof::reference {

struct Array {
  std::vector<int64_t> shape;
  std::vector<double> value;  // row-major
  bool operator==(const Array&) const = default;
};
using Ranks = std::vector<Array>;          // by rank
using Extents = std::span<const int64_t>;  // of a dim, by rank

// From a whole tensor to local values, and back to what they denote.
Ranks copies(const Array& whole, int ranks);
Ranks blocks(const Array& whole, int dim, Extents);
Array joined(const Ranks&, int dim);
Array total(const Ranks&);

Ranks all_reduce(const Ranks&);                        // sum on every rank
Ranks all_gather(const Ranks&, int dim);               // concatenation on every rank
Ranks reduce_scatter(const Ranks&, int dim, Extents);  // own block of the sum
Ranks own_block(const Ranks&, int dim, Extents);       // own block of the own value
Ranks in_zeros(const Ranks&, int dim);                 // own block at its place, else 0
Ranks first_only(const Ranks&);                        // rank 0 keeps its value, others 0
Ranks scaled(const Ranks&, double factor);
// Shards of join_dim become shards of split_dim: rank b receives from every rank a the block b of
// a's value along split_dim and joins what it received along join_dim.
Ranks exchange(const Ranks&, int split_dim, int join_dim, Extents split);

}  // namespace shardproof::reference
