// Reductions over the contributions of members that lie in one memory.
//
// out[i] = ((m_0[i] + m_1[i]) + m_2[i]) + ... in member order, so every member that computes it
// gets the same bits. f64 and f32 are summed in their own type, bf16 and f16 in f32 and rounded
// once; integers in 64 bits, wrapping. avg is that sum divided once by p, before the rounding
// (integers truncate). max keeps the first of equals and lets NaN through: a poisoned element must
// not vanish.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

#include "oracle/comm/door.hpp"

namespace shardproof {

// `out` may be any of the contributions. Contributions are aligned to their element size.
void reduce_members(Reduce, DType, std::span<const std::byte* const> contributions, int64_t count,
                    std::byte* out);

}  // namespace shardproof
