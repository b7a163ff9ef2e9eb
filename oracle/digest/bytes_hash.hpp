// XXH3 (128 bits) of a tensor as it lies in memory, for copies of one layout, at the speed of
// reading. Two of one program compare; one that is kept or sent elsewhere should be a digest
// (shardproof_digest.h).
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace shardproof::digest {

using BytesHash = std::array<uint64_t, 2>;
BytesHash hash_of_bytes(std::span<const std::byte>);

}  // namespace shardproof::digest
