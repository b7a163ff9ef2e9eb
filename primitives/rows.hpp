// Lists of rows as runs: one copy a run in place of one a row.
#pragma once
#include <cstdint>
#include <vector>

namespace shardproof::primitives {

// Calls each(first of a run of consecutive rows, its place in the list, its length).
template <class Each>
void each_run(const std::vector<int64_t>& rows, Each each) {
  for (size_t i = 0; i < rows.size();) {
    size_t n = 1;
    while (i + n < rows.size() && rows[i + n] == rows[i] + int64_t(n)) ++n;
    each(rows[i], int64_t(i), int64_t(n));
    i += n;
  }
}

}  // namespace shardproof::primitives
