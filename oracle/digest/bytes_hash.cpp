#include "oracle/digest/bytes_hash.hpp"

#include <cstring>

#ifdef SHARDPROOF_XXHASH
#define XXH_INLINE_ALL
#include <xxhash.h>
#else
#include "oracle/digest/shardproof_digest.h"
#endif

namespace shardproof::digest {

#ifdef SHARDPROOF_XXHASH

BytesHash hash_of_bytes(std::span<const std::byte> bytes) {
  const XXH128_hash_t h = XXH3_128bits(bytes.data(), bytes.size());
  return {h.low64, h.high64};
}

std::string name_of_bytes_hash() { return "XXH3"; }

#else

// The last bytes as a word filled up with zeros; the size tells them from bytes that are 0.
BytesHash hash_of_bytes(std::span<const std::byte> bytes) {
  const shardproof_hash hash = shardproof_hash_plain(SHARDPROOF_I64, SHARDPROOF_RAW);
  shardproof_digest d{};
  const size_t words = bytes.size() / 8;
  shardproof_digest_run(&d, &hash, bytes.data(), words, 0);
  uint64_t rest = 0;
  std::memcpy(&rest, bytes.data() + 8 * words, bytes.size() % 8);
  shardproof_digest_unit(&d, &hash, words, rest);
  shardproof_digest_unit(&d, &hash, words + 1, bytes.size());
  return {d.lane[0], d.lane[1]};
}

std::string name_of_bytes_hash() { return "additive digest (built without xxHash)"; }

#endif

}  // namespace shardproof::digest
