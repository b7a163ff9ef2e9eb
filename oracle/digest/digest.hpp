// Fingerprints of tensors on a mesh: what shardproof_digest.h computes for one rank, put together.
//
//   shards     digests of the ranks of a shard axis add up to that of the whole
//   copies     digests of the ranks of a replicated axis are equal; they are gathered and compared,
//              never reduced by a minimum or maximum
//   coverage   the same sum without values: a lost index, or one that two ranks own, changes it
//   where      the first element that differs is found from digests of ever smaller ranges
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "fixtures/dtype.hpp"
#include "fixtures/placement.hpp"
#include "oracle/digest/shardproof_digest.h"

namespace shardproof::digest {

using Digest = shardproof_digest;
using Hash = shardproof_hash;

Hash hash_of(const std::string& tensor, DType, shardproof_mode = SHARDPROOF_RAW);
// Local elements, row-major, with the global index of each.
Digest digest_of(const Hash&, const std::byte* elements, std::span<const int64_t> global);
Digest sum(std::span<const Digest>);
bool same(const Digest&, const Digest&);  // lanes
std::string text(const Digest&);          // 32 hex digits

// Whether the coverage is that of the indices 0 .. n-1, each once.
bool covers(const Digest&, const Hash&, uint64_t units);

// What the ranks hold together, seen from one of them: the sum over the shard axes of the layout.
Digest whole_of(const Mesh&, const Layout&, std::span<const Digest> by_rank, int rank);
// Ranks that part from the majority of those that hold a copy of the same elements, that is of
// those that agree in their place on every axis but the replicated ones.
std::vector<int> parted(const Mesh&, const Layout&, std::span<const Digest> by_rank);

// ---- Where two tensors part

// Digest of the elements of global index begin .. end-1, summed over all ranks.
using RangeDigest = std::function<Digest(int64_t begin, int64_t end)>;
struct Located {
  int64_t index = -1;  // the smallest index whose elements differ; -1: none
  int rounds = 0;      // ceil(log_k n): each of them an exchange of k digests
};
Located first_difference(int64_t elements, int k, const RangeDigest& a, const RangeDigest& b);

}  // namespace shardproof::digest
