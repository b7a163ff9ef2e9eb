#include "oracle/digest/bytes_hash.hpp"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace shardproof::digest {

BytesHash hash_of_bytes(std::span<const std::byte> bytes) {
  const XXH128_hash_t h = XXH3_128bits(bytes.data(), bytes.size());
  return {h.low64, h.high64};
}

}  // namespace shardproof::digest
