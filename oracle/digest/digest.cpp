#include "oracle/digest/digest.hpp"

#include <algorithm>
#include <stdexcept>

namespace shardproof::digest {
namespace {

shardproof_dtype code(DType type) {
  switch (type) {
    case DType::f64:
      return SHARDPROOF_F64;
    case DType::f32:
      return SHARDPROOF_F32;
    case DType::bf16:
      return SHARDPROOF_BF16;
    case DType::f16:
      return SHARDPROOF_F16;
    case DType::i64:
      return SHARDPROOF_I64;
    case DType::i32:
      return SHARDPROOF_I32;
  }
  throw std::invalid_argument("expected a dtype, met none");
}

std::vector<Axis> axes_of(const Layout& layout, bool (*wanted)(Placement::Kind)) {
  std::vector<Axis> axes;
  for (const auto& [axis, placement] : layout)
    if (wanted(placement.kind)) axes.push_back(axis);
  return axes;
}

bool is_copy(Placement::Kind k) { return k == Placement::invariant || k == Placement::replicate; }
bool is_shard(Placement::Kind k) { return k == Placement::shard; }

// Members of a group that part from its largest camp; of equal camps the first rank's is right.
void add_dissenters(std::span<const int> group, std::span<const Digest> by_rank,
                    std::vector<int>& apart) {
  std::vector<std::vector<int>> camps;
  for (int r : group) {
    auto camp = std::find_if(camps.begin(), camps.end(), [&](const auto& c) {
      return same(by_rank[size_t(c[0])], by_rank[size_t(r)]);
    });
    if (camp == camps.end())
      camps.push_back({r});
    else
      camp->push_back(r);
  }
  const auto largest = std::max_element(camps.begin(), camps.end(),
                                        [](auto& a, auto& b) { return a.size() < b.size(); });
  for (auto camp = camps.begin(); camp != camps.end(); ++camp)
    if (camp != largest) apart.insert(apart.end(), camp->begin(), camp->end());
}

}  // namespace

Hash hash_of(const std::string& tensor, DType type, shardproof_mode mode) {
  return shardproof_hash_named(tensor.c_str(), code(type), mode);
}

Digest digest_of(const Hash& hash, const std::byte* elements, std::span<const int64_t> global) {
  Digest d{};
  const size_t size = shardproof_size(hash.dtype);
  for (size_t i = 0; i < global.size(); ++i)
    shardproof_digest_element(&d, &hash, elements + i * size, uint64_t(global[i]));
  return d;
}

Digest sum(std::span<const Digest> parts) {
  Digest total{};
  for (const Digest& d : parts) shardproof_digest_add(&total, &d);
  return total;
}

bool same(const Digest& a, const Digest& b) {
  return a.lane[0] == b.lane[0] && a.lane[1] == b.lane[1];
}

std::string text(const Digest& d) {
  char hex[33];
  std::snprintf(hex, sizeof hex, "%016" PRIx64 "%016" PRIx64, d.lane[0], d.lane[1]);
  return hex;
}

bool covers(const Digest& d, const Hash& hash, uint64_t units) {
  Digest due{};
  for (uint64_t i = 0; i < units; ++i) shardproof_digest_unit(&due, &hash, i, 0);
  return d.coverage[0] == due.coverage[0] && d.coverage[1] == due.coverage[1];
}

Digest whole_of(const Mesh& mesh, const Layout& layout, std::span<const Digest> by_rank, int rank) {
  Digest total{};
  for (int r : mesh.group(axes_of(layout, is_shard), rank))
    shardproof_digest_add(&total, &by_rank[size_t(r)]);
  return total;
}

std::vector<int> parted(const Mesh& mesh, const Layout& layout, std::span<const Digest> by_rank) {
  std::vector<int> apart;
  for (const auto& group : mesh.groups(axes_of(layout, is_copy)))
    add_dissenters(group, by_rank, apart);
  std::sort(apart.begin(), apart.end());
  return apart;
}

Located first_difference(int64_t elements, int k, const RangeDigest& a, const RangeDigest& b) {
  if (k < 2)
    throw std::invalid_argument("expected at least 2 parts a round, met " + std::to_string(k));
  Located found;
  int64_t begin = 0, end = elements;
  while (end - begin > 1) {
    const int64_t width = (end - begin + k - 1) / k;
    ++found.rounds;
    int64_t part = begin;
    while (part < end &&
           same(a(part, std::min(part + width, end)), b(part, std::min(part + width, end))))
      part += width;
    if (part >= end) return found;
    begin = part, end = std::min(part + width, end);
  }
  if (end > begin && !same(a(begin, end), b(begin, end))) found.index = begin;
  return found;
}

}  // namespace shardproof::digest
