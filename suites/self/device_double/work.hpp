// What kernels of a device do, done at once in host memory: by loops (by_loops.cpp), or by the
// kernels themselves with threads in turns (by_grid.cpp, suites/self/cuda_on_host).
#pragma once
#include <cstdint>

#include "oracle/cuda/digest.hpp"

namespace shardproof::device_double {

template <class Body>
void do_body(const Body&);  // of primitives/bodies.hpp, and twins
// Adds to `sum`. What cannot be asked is refused by the double before.
void do_digest(const void* memory, uint64_t elements, const shardproof_hash&, uint64_t first,
               DigestParts, shardproof_digest* sum);
void do_divide(void* memory, int64_t elements, int dtype, int ranks);

}  // namespace shardproof::device_double
