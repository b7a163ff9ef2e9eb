// Large results are read in pieces.
#pragma once
#include <algorithm>
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "fixtures/places.hpp"
#include "oracle/check.hpp"

namespace shardproof::judging {

// Calls visit(first, count) for each piece of `n` elements. A result that lies in a file may be
// larger than what memory should hold of it as doubles and indices; a piece of it stays in a cache.
inline constexpr size_t piece = size_t(1) << 13;
template <class Visit>
void each_piece(size_t n, Visit visit, size_t of = piece) {
  for (size_t first = 0; first < n; first += of) visit(first, std::min(of, n - first));
}
// Bytes of a file after which its pages are given back: a call costs as much as to read a page.
inline constexpr size_t block = size_t(1) << 20;
// A piece of what a rank holds of a result, or, of type P, of what the ranks of its group hold
// together.
struct Part {
  int rank = 0;
  std::vector<int> ranks;          // more than one: type P
  const Places* places = nullptr;  // of all elements, denoted
  size_t first = 0;                // local element with which the piece begins
  std::vector<double> got;
  std::vector<double>
      sum_magnitude;  // type P: sum of |parts|, for the error of the judge's own sum

  // Denoted, of each element of the piece.
  std::vector<int64_t> indices() const {
    std::vector<int64_t> all;
    places->read(first, got.size(), all);
    return all;
  }
};
// Every piece of every copy, in the order of ranks (compare.cpp). Stops with a finding where a
// result is missing.
std::optional<Finding> each_part(const Evidence&, int shot, int step, int operand, bool gradient,
                                 const std::function<void(const Part&)>& visit);

}  // namespace shardproof::judging
