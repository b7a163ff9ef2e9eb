// Sizes that a file claims.
#pragma once
#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

namespace shardproof::tensors {

inline constexpr size_t most_dims = 64;

// Bytes that a shape asks for; empty where 63 bits do not hold them.
inline std::optional<int64_t> bytes_due(const std::vector<int64_t>& shape, size_t width) {
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return 0;
  auto n = int64_t(width);
  for (int64_t extent : shape) {
    if (extent > std::numeric_limits<int64_t>::max() / n) return std::nullopt;
    n *= extent;
  }
  return n;
}

}  // namespace shardproof::tensors
