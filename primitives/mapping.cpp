// The table of mapping.hpp: each mapping is a map of local tensors and the map that carries
// cotangents back.
#include "primitives/mapping.hpp"

#include "primitives/mapping_maps.hpp"

namespace shardproof {
using namespace mapping;

std::unique_ptr<Kernel> mapping_copy() { return pair(identity, all_reduce); }
std::unique_ptr<Kernel> mapping_reduce() { return pair(all_reduce, identity); }
std::unique_ptr<Kernel> mapping_scaled_reduce() { return pair(scaled_all_reduce, scaled); }
std::unique_ptr<Kernel> mapping_all_reduce() { return pair(all_reduce, all_reduce); }

std::unique_ptr<Kernel> mapping_scatter() { return pair(own_block, all_gather, equal_blocks); }
std::unique_ptr<Kernel> mapping_gather() { return pair(all_gather, own_block, equal_blocks); }
std::unique_ptr<Kernel> mapping_all_gather() {
  return pair(all_gather, reduce_scatter, equal_blocks);
}
std::unique_ptr<Kernel> mapping_reduce_scatter() {
  return pair(reduce_scatter, all_gather, equal_blocks);
}
std::unique_ptr<Kernel> mapping_all_to_all() {
  return pair(exchange, exchange_back, blocks_of_both_dims);
}

std::unique_ptr<Kernel> mapping_slice() { return pair(own_block, block_in_zeros, equal_blocks); }
std::unique_ptr<Kernel> mapping_pad() { return pair(block_in_zeros, own_block, equal_blocks); }
std::unique_ptr<Kernel> mapping_replicate_to_invariant() { return pair(identity, first_rank_only); }
std::unique_ptr<Kernel> mapping_invariant_to_partial() { return pair(first_rank_only, identity); }
std::unique_ptr<Kernel> mapping_replicate_to_partial() {
  return pair(first_rank_only, first_rank_only);
}
std::unique_ptr<Kernel> mapping_reinterpret() { return pair(identity, identity); }

}  // namespace shardproof
