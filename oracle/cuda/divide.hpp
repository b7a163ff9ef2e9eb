// The one sum of the judge on a device: an average over ranks that a transport has not divided yet.
#pragma once
#include <cstdint>

namespace shardproof {

// x = x / ranks on `elements` elements of dtype (the numbers of DType), on a stream; half types are
// divided in float and rounded once, integers towards 0. Returns the runtime's code.
int divide(void* memory, int64_t elements, int dtype, int ranks, void* stream);

}  // namespace shardproof
