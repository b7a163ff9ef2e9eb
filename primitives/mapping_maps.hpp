// The maps that mappings are made of, on local tensors, and the kernel that pairs two of them.
// Views may be strided. Nothing is saved between forward and backward: the maps are linear.
#pragma once
#include <functional>
#include <memory>

#include "oracle/subject.hpp"
#include "primitives/mapping_line.hpp"

namespace shardproof::mapping {

using Map = std::function<void(Rank&, const View& in, const View& out)>;
using Precondition = std::function<void(const Case&)>;

std::unique_ptr<Kernel> pair(Map forward, Map backward, Precondition = nullptr);

Communicator& group(Rank&);                                     // the ranks of the line's axis
View place_of_block(Rank&, const View& whole, int64_t extent);  // where the own block of dim lies

// Without communication. own_block and block_in_zeros cut and fill equal blocks of dim.
void identity(Rank&, const View& in, const View& out);
void scaled(Rank&, const View& in, const View& out);
void own_block(Rank&, const View& in, const View& out);
void block_in_zeros(Rank&, const View& in, const View& out);
void first_rank_only(Rank&, const View& in,
                     const View& out);  // rank 0 of the axis, zeros elsewhere

// One collective each, on the ranks of the axis.
void all_reduce(Rank&, const View& in, const View& out);
void scaled_all_reduce(Rank&, const View& in, const View& out);
void all_gather(Rank&, const View& in, const View& out);
void reduce_scatter(Rank&, const View& in, const View& out);
void exchange(Rank&, const View& in, const View& out);       // shards of dim -> of the other dim
void exchange_back(Rank&, const View& in, const View& out);  // and back: both block lists swapped

}  // namespace shardproof::mapping
