#include "primitives/mapping_line.hpp"

#include <algorithm>
#include <numeric>
#include <string>

#include "primitives/line.hpp"

namespace shardproof::mapping {
namespace {

const char* extent_key(int dim) { return dim == 0 ? "tokens" : "hidden"; }

std::string ranks_text(const Case& line) {
  return std::to_string(line.ranks(axis_of(line))) + " ranks of " + name(axis_of(line));
}
std::string extent_text(const Case& line, int dim) {
  return std::string(extent_key(dim)) + "=" + std::to_string(line.at(extent_key(dim)));
}

void require_divisible(const Case& line, int dim) {
  const int64_t ranks = line.ranks(axis_of(line));
  if (line.at(extent_key(dim)) % ranks == 0) return;
  throw Rejected(std::string(extent_key(dim)) + " divisible by the " + ranks_text(line),
                 extent_text(line, dim),
                 "choose a multiple of " + std::to_string(ranks) + " or other ranks");
}

// Shares of 1 : 2 : ... : p leave no rank without an element from 1 + 2 + ... + p elements on.
void require_shares(const Case& line, int dim) {
  const int64_t ranks = line.ranks(axis_of(line)), least = ranks * (ranks + 1) / 2;
  if (line.at(extent_key(dim)) >= least) return;
  throw Rejected(std::string(extent_key(dim)) + " of at least " + std::to_string(least) +
                     " for uneven blocks on the " + ranks_text(line),
                 extent_text(line, dim), "choose a larger extent or split=equal");
}

std::vector<int64_t> proportional(int64_t extent, int ranks) {
  const int64_t whole = int64_t{ranks} * (ranks + 1) / 2;
  std::vector<int64_t> share(size_t(ranks), 0), order(size_t(ranks), 0);
  for (int r = 0; r < ranks; ++r) share[size_t(r)] = extent * (r + 1) / whole;
  std::iota(order.rbegin(), order.rend(), 0);  // later ranks first
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return extent * (a + 1) % whole > extent * (b + 1) % whole;
  });
  int64_t left = extent - std::accumulate(share.begin(), share.end(), int64_t{0});
  for (size_t i = 0; left > 0; ++i, --left) ++share[size_t(order[i])];
  return share;
}

bool uneven(const Case& line) { return line.has("split") && line.text("split") == "uneven"; }

}  // namespace

void stored_as_sent(const Case& line) {
  const std::string& wire = line.text("wire");
  if (!wire.empty() && wire != line.text("dtype"))
    throw Rejected("a mapping that sends values as they are stored", "wire=" + wire,
                   "leave wire= out, or choose that type by dtype=");
}

void equal_blocks(const Case& line) { require_divisible(line, dim_of(line)); }

void blocks_of_both_dims(const Case& line) {
  for (int dim : {dim_of(line), 1 - dim_of(line)})
    uneven(line) ? require_shares(line, dim) : require_divisible(line, dim);
}

Axis axis_of(const Case& line) {
  if (auto axis = axis_from(line.text("axis"))) return *axis;
  throw Rejected("axis of the mesh", "axis=" + line.text("axis"), "name one of tp, cp, dp, ep, pp");
}

int dim_of(const Case& line) {
  const int64_t dim = line.at("dim");
  if (dim == 0 || dim == 1) return int(dim);
  throw Rejected("dim=0 (tokens) or dim=1 (hidden)", "dim=" + std::to_string(dim),
                 "x has two dims");
}

double scale_of(const Case& line) { return primitives::number_of(line, "scale"); }

std::vector<int64_t> block_extents(const Case& line, int dim) {
  const int64_t extent = line.at(extent_key(dim));
  const int ranks = line.ranks(axis_of(line));
  if (uneven(line)) return proportional(extent, ranks);
  return std::vector<int64_t>(size_t(ranks), extent / ranks);
}

}  // namespace shardproof::mapping
