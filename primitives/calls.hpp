// Collectives as drivers ask for them. On the host the communicator packs views that it cannot send
// as they lie; on a device it takes contiguous memory only, the blocks of the members one after
// another, so they are packed here, into workspace, on the stream of the call. Call sites are the
// drivers'.
#pragma once
#include <span>

#include "oracle/subject.hpp"

namespace shardproof::primitives {

using Site = Communicator::Site;

void all_reduce(Rank&, Communicator&, const View& in, const View& out, Reduce = Reduce::sum,
                Site = Site::current());
void all_gather(Rank&, Communicator&, const View& in, const View& out, int dim,
                Site = Site::current());
void reduce_scatter(Rank&, Communicator&, const View& in, const View& out, int dim,
                    Reduce = Reduce::sum, Site = Site::current());
void all_to_all(Rank&, Communicator&, const View& in, const View& out, int split_dim,
                int concat_dim, std::span<const int64_t> split = {},
                std::span<const int64_t> concat = {}, Site = Site::current());

}  // namespace shardproof::primitives
