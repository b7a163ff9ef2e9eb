// Fingerprints of device memory (oracle/digest/units.hpp), by kernels.
#pragma once
#include <cstdint>

#include "oracle/digest/shardproof_digest.h"

namespace shardproof {

// What a digest on a device sums up: everything, or one or two lanes of raw bits.
enum class DigestParts : int { all, one_lane, two_lanes };

// Adds the digest of `elements` elements, the first at `first` in the whole tensor, to `sum`, which
// lies on the device. A run that is not one of the hash's units, or lanes of another mode than raw,
// are an invalid value. Returns the runtime's code.
int digest_on_device(const void* memory, uint64_t elements, const shardproof_hash&, uint64_t first,
                     DigestParts, shardproof_digest* sum, void* stream);
// Reads words and does next to nothing with them: what a digest is measured against.
int sum_of_words(const void* memory, uint64_t words, uint64_t* sum, void* stream);

}  // namespace shardproof
