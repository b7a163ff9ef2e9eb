// Hash of a tensor as it lies in memory, for copies of one layout: at the speed of reading where
// xxHash is there (XXH3, 128 bits), else the additive digest of its words. Two of one program
// compare; one that is kept or sent elsewhere should be a digest (shardproof_digest.h).
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace shardproof::digest {

using BytesHash = std::array<uint64_t, 2>;
BytesHash hash_of_bytes(std::span<const std::byte>);
std::string name_of_bytes_hash();  // "XXH3", "additive digest (built without xxHash)"

}  // namespace shardproof::digest
