// Tokens of several sequences that lie in one tensor, told apart by a number each; -1 is padding.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace shardproof::reference {

// The places of each sequence's tokens, in order.
std::vector<std::vector<size_t>> places_by_sequence(std::span<const int64_t> sequences);

}  // namespace shardproof::reference
