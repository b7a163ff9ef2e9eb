// Which keys each query saw, read off the outputs of probes.
//
// With Q = 0 all scores are equal: P_ij = 1/n_i on the n_i keys that query i sees, lse_i = log n_i.
// With V_j = 2^b for b < B in one channel and 0 elsewhere, n_i O_i is an integer whose bits name
// the keys: the mask itself, key by key. B keys fit into a channel, dv channels into a shot.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "oracle/check.hpp"

namespace shardproof::judging {

void plan_mask_probe(const Evidence&, std::vector<Shot>&);  // once, whoever asks first

// One query and head on the rank that holds its output.
struct SeenRow {
  int rank = 0;
  int64_t query = 0, head = 0;
  int64_t visits = 0;         // exp(lse): keys counted as often as they were visited
  std::vector<uint8_t> keys;  // 1 where seen
  std::string unreadable;     // why the outputs are no mean of codes; "" where they are
};
struct Seen {
  std::vector<SeenRow> rows;
  std::optional<Finding> incomplete;
};
Seen seen_rows(const Evidence&);

}  // namespace shardproof::judging
