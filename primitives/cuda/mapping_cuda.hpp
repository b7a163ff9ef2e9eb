// The mapping family (primitives/mapping.hpp has its table) on device memory: every tensor is a
// device view, elementwise work is enqueued on the rank's stream, and one collective a map is asked
// of the communicator, which orders it behind that stream. No host synchronisation is made here.
#pragma once
#include <memory>

#include "oracle/subject.hpp"

namespace shardproof::cuda {

std::unique_ptr<Kernel> mapping_copy();
std::unique_ptr<Kernel> mapping_reduce();
std::unique_ptr<Kernel> mapping_scaled_reduce();
std::unique_ptr<Kernel> mapping_all_reduce();
std::unique_ptr<Kernel> mapping_scatter();
std::unique_ptr<Kernel> mapping_gather();
std::unique_ptr<Kernel> mapping_all_gather();
std::unique_ptr<Kernel> mapping_reduce_scatter();
std::unique_ptr<Kernel> mapping_all_to_all();
std::unique_ptr<Kernel> mapping_slice();
std::unique_ptr<Kernel> mapping_pad();
std::unique_ptr<Kernel> mapping_replicate_to_invariant();
std::unique_ptr<Kernel> mapping_invariant_to_partial();
std::unique_ptr<Kernel> mapping_replicate_to_partial();
std::unique_ptr<Kernel> mapping_reinterpret();

}  // namespace shardproof::cuda
