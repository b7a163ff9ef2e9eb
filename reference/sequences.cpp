#include "reference/sequences.hpp"

#include <map>

namespace shardproof::reference {

std::vector<std::vector<size_t>> places_by_sequence(std::span<const int64_t> sequences) {
  std::map<int64_t, std::vector<size_t>> places;
  for (size_t i = 0; i < sequences.size(); ++i)
    if (sequences[i] >= 0) places[sequences[i]].push_back(i);
  std::vector<std::vector<size_t>> lists;
  for (auto& [sequence, list] : places) lists.push_back(std::move(list));
  return lists;
}

}  // namespace shardproof::reference
