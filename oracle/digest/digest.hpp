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
#include "oracle/comm/communicator.hpp"
#include "oracle/digest/bytes_hash.hpp"
#include "oracle/digest/shardproof_digest.h"

namespace shardproof::digest {

using Digest = shardproof_digest;
using Hash = shardproof_hash;

Hash hash_of(const std::string& tensor, DType, shardproof_mode = SHARDPROOF_RAW);
// The same in words where a run of that many elements is one of words.
Hash hash_of_run(const std::string& tensor, DType, int64_t elements);
// Local elements, row-major, with the global index of each.
Digest digest_of(const Hash&, const std::byte* elements, std::span<const int64_t> global);
Digest sum(std::span<const Digest>);
bool same(const Digest&, const Digest&);  // lanes
bool same(const BytesHash&, const BytesHash&);
std::string text(const Digest&);  // 32 hex digits

// The coverage of the indices 0 .. n-1, each once: what every index adds, run by run.
Digest coverage_of(const Hash&, uint64_t units);
// Whether the coverage is that.
bool covers(const Digest&, const Hash&, uint64_t units);
// Of a layout that leaves elements out or gives one to two ranks: "x: 4 to 7 are on no rank",
// "x: 0 to 3 are on rank 0 and on rank 1"; else "". Copies of one element are no fault.
std::string cover_fault(const std::string& tensor, std::span<const int64_t> shape, const Layout&,
                        const Mesh&);
// The same of any lists of indices below n, each with the name of who holds it.
struct Holder {
  std::string name;
  std::vector<int64_t> indices;
};
std::string cover_fault(const std::string& tensor, int64_t n, std::span<const Holder>);
// The same of ranges [begin, end) below n.
struct HeldRange {
  std::string name;
  int64_t begin = 0, end = 0;
};
std::string cover_fault(const std::string& tensor, int64_t n, std::span<const HeldRange>);

// What the ranks hold together, seen from one of them: the sum over the shard axes of the layout.
Digest whole_of(const Mesh&, const Layout&, std::span<const Digest> by_rank, int rank);
// Ranks that part from the majority of those that hold a copy of the same elements, that is of
// those that agree in their place on every axis but the replicated ones.
std::vector<int> parted(const Mesh&, const Layout&, std::span<const Digest> by_rank);
std::vector<int> parted(const Mesh&, const Layout&, std::span<const BytesHash> by_rank);

// ---- Where two tensors part

// What is exchanged of a tensor: one lane for each part of `width` elements of begin .. end-1 (the
// last may be shorter).
using Parts = std::function<std::vector<uint64_t>(int64_t begin, int64_t end, int64_t width)>;
// Of elements 0 .. n-1 that lie one after another.
Parts parts_of(const Hash&, const std::byte* elements);

struct Located {
  int64_t index = -1;  // the smallest index whose elements differ; -1: none
  int rounds = 0;      // ceil(log_k n)
  int64_t bytes = 0;   // that a rank hands out in a round, at most: 8 k
};
Located first_difference(int64_t elements, int k, const Parts& a, const Parts& b);
// Among the copies that the members hold: a collective call, one all-gather a round. Every member
// learns the same.
Located first_difference(Communicator& copies, int64_t elements, int k, const Parts& own);

}  // namespace shardproof::digest
