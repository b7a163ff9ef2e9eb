#include "oracle/digest/digest.hpp"

#include <algorithm>
#include <map>
#include <set>
#include <stdexcept>

#include "fixtures/sharding.hpp"

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
template <class Hash_>
void add_dissenters(std::span<const int> group, std::span<const Hash_> by_rank,
                    std::vector<int>& apart) {
  std::vector<std::vector<int>> camps;
  for (int r : group) {
    auto camp = std::find_if(camps.begin(), camps.end(), [&](const auto& c) {
      return digest::same(by_rank[size_t(c[0])], by_rank[size_t(r)]);
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

template <class Hash_>
std::vector<int> parted_of(const Mesh& mesh, const Layout& layout, std::span<const Hash_> by_rank) {
  std::vector<int> apart;
  for (const auto& group : mesh.holders(layout, axes_of(layout, is_copy)))
    add_dissenters(group, by_rank, apart);
  std::sort(apart.begin(), apart.end());
  return apart;
}

// Rounds of k parts. `first_part(begin, end, width)` is the number of the first part that differs,
// that of the parts where none does.
template <class FirstPart>
Located locate(int64_t elements, int k, const FirstPart& first_part) {
  if (k < 2)
    throw std::invalid_argument("expected at least 2 parts a round, met " + std::to_string(k));
  Located found;
  int64_t begin = 0, end = elements;
  while (begin < end) {
    const int64_t width = (end - begin + k - 1) / k, parts = (end - begin + width - 1) / width;
    ++found.rounds;
    found.bytes = std::max(found.bytes, 8 * parts);
    const int64_t part = first_part(begin, end, width);
    if (part == parts) return found;
    begin += part * width, end = std::min(begin + width, end);
    if (width == 1) break;
  }
  if (begin < end) found.index = begin;
  return found;
}

View words(std::vector<uint64_t>& v) {
  return view_of(reinterpret_cast<std::byte*>(v.data()), DType::i64, {int64_t(v.size())});
}

std::string indices_text(int64_t begin, int64_t end) {
  return end == begin + 1 ? std::to_string(begin) + " is"
                          : std::to_string(begin) + " to " + std::to_string(end - 1) + " are";
}

}  // namespace

Hash hash_of(const std::string& tensor, DType type, shardproof_mode mode) {
  return shardproof_hash_named(tensor.c_str(), code(type), mode);
}

Hash hash_of_run(const std::string& tensor, DType type, int64_t elements) {
  Hash h = hash_of(tensor, type);
  if (elements % int64_t(8 / shardproof_size(h.dtype)) == 0) h.unit = SHARDPROOF_WORD;
  return h;
}

Digest digest_of(const Hash& hash, const std::byte* elements, std::span<const int64_t> global) {
  Digest d{};
  const size_t size = shardproof_size(hash.dtype);
  for (size_t begin = 0, end; begin < global.size(); begin = end) {  // runs of indices
    for (end = begin + 1; end < global.size() && global[end] == global[end - 1] + 1;) ++end;
    shardproof_digest_run(&d, &hash, elements + begin * size, end - begin, uint64_t(global[begin]));
  }
  return d;
}

Digest sum(std::span<const Digest> parts) {
  Digest total{};
  for (const Digest& d : parts) shardproof_digest_add(&total, &d);
  return total;
}

bool same(const BytesHash& a, const BytesHash& b) { return a == b; }
bool same(const Digest& a, const Digest& b) {
  return a.lane[0] == b.lane[0] && a.lane[1] == b.lane[1];
}

std::string text(const Digest& d) {
  char hex[33];
  std::snprintf(hex, sizeof hex, "%016" PRIx64 "%016" PRIx64, d.lane[0], d.lane[1]);
  return hex;
}

// An index adds the same to the coverage whatever stands there: zeros of 8 bytes do, which the
// header takes several at a time.
Digest coverage_of(const Hash& hash, uint64_t units) {
  static const std::vector<std::byte> zeros(8 << 12);
  Hash plain = hash;
  plain.dtype = SHARDPROOF_I64, plain.unit = SHARDPROOF_ELEMENT, plain.mode = SHARDPROOF_RAW;
  Digest due{};
  for (uint64_t at = 0, n; at < units; at += n) {
    n = std::min<uint64_t>(units - at, zeros.size() / 8);
    shardproof_digest_run(&due, &plain, zeros.data(), n, at);
  }
  return due;
}

bool covers(const Digest& d, const Hash& hash, uint64_t units) {
  const Digest due = coverage_of(hash, units);
  return d.coverage[0] == due.coverage[0] && d.coverage[1] == due.coverage[1];
}

std::string cover_fault(const std::string& tensor, int64_t n, std::span<const Holder> holders) {
  using Owners = std::pair<const Holder*, const Holder*>;
  std::vector<Owners> owners{size_t(n)};
  for (const Holder& h : holders)
    for (int64_t i : h.indices) {
      if (i < 0 || i >= n)
        return tensor + ": index " + std::to_string(i) + " of " + h.name + " is none of 0 to " +
               std::to_string(n - 1);
      Owners& o = owners[size_t(i)];
      (o.first ? o.second : o.first) = &h;
    }
  for (size_t begin = 0, end; begin < size_t(n); begin = end) {
    const Owners held = owners[begin];
    for (end = begin; end < size_t(n) && owners[end] == held;) ++end;
    if (held.first && !held.second) continue;
    const std::string which = tensor + ": " + indices_text(int64_t(begin), int64_t(end));
    if (!held.first) return which + " on no rank";
    return which + " on " + held.first->name +
           (held.first == held.second ? " twice" : " and on " + held.second->name);
  }
  return "";
}

std::string cover_fault(const std::string& tensor, int64_t n, std::span<const HeldRange> ranges) {
  std::map<int64_t, std::vector<size_t>> borders{{n, {}}};  // ranges that begin or end there
  for (size_t i = 0; i < ranges.size(); ++i)
    if (ranges[i].begin < ranges[i].end)
      for (int64_t at : {ranges[i].begin, ranges[i].end}) borders[at].push_back(i);
  std::set<size_t> held;
  int64_t begin = 0;
  for (const auto& [end, changing] : borders) {
    if (begin < end && held.size() != 1) {
      const std::string which = tensor + ": " + indices_text(begin, end);
      if (held.empty()) return which + " on no rank";
      return which + " on " + ranges[*held.begin()].name + " and on " + ranges[*held.rbegin()].name;
    }
    begin = end;
    for (size_t i : changing)
      if (!held.erase(i)) held.insert(i);
  }
  return "";
}

std::string cover_fault(const std::string& tensor, std::span<const int64_t> shape,
                        const Layout& layout, const Mesh& mesh) {
  const auto apart = axes_of(layout, [](Placement::Kind k) { return !is_copy(k); });
  std::vector<Holder> holders;  // beside the first copy: the others hold the same by their layout
  for (int r : mesh.group(apart, 0))
    holders.push_back({"rank " + std::to_string(r), whole_indices(shape, layout, mesh, r)});
  return cover_fault(tensor, product(whole_shape(shape, layout, mesh)), holders);
}

Digest whole_of(const Mesh& mesh, const Layout& layout, std::span<const Digest> by_rank, int rank) {
  Digest total{};
  for (int r : mesh.group(axes_of(layout, is_shard), rank))
    shardproof_digest_add(&total, &by_rank[size_t(r)]);
  return total;
}

std::vector<int> parted(const Mesh& mesh, const Layout& layout, std::span<const Digest> by_rank) {
  return parted_of(mesh, layout, by_rank);
}

std::vector<int> parted(const Mesh& mesh, const Layout& layout,
                        std::span<const BytesHash> by_rank) {
  return parted_of(mesh, layout, by_rank);
}

Parts parts_of(const Hash& hash, const std::byte* elements) {
  return [hash, elements](int64_t begin, int64_t end, int64_t width) {
    std::vector<uint64_t> lanes;
    for (int64_t part = begin; part < end; part += width) {
      Digest d{};
      shardproof_digest_run(&d, &hash, elements + size_t(part) * shardproof_size(hash.dtype),
                            uint64_t(std::min(width, end - part)), uint64_t(part));
      lanes.push_back(d.lane[0]);
    }
    return lanes;
  };
}

Located first_difference(int64_t elements, int k, const Parts& a, const Parts& b) {
  return locate(elements, k, [&](int64_t begin, int64_t end, int64_t width) {
    const auto x = a(begin, end, width), y = b(begin, end, width);
    return std::mismatch(x.begin(), x.end(), y.begin()).first - x.begin();
  });
}

Located first_difference(Communicator& copies, int64_t elements, int k, const Parts& own) {
  const int64_t p = copies.size();
  return locate(elements, k, [&](int64_t begin, int64_t end, int64_t width) {
    std::vector<uint64_t> mine = own(begin, end, width);
    const int64_t parts = int64_t(mine.size());
    std::vector<uint64_t> all(size_t(p * parts));
    copies.all_gather(words(mine), words(all), 0);
    int64_t first = parts;
    for (int64_t r = 1; r < p; ++r)
      first = std::min(
          first, std::mismatch(all.begin(), all.begin() + parts, all.begin() + r * parts).first -
                     all.begin());
    return first;
  });
}

}  // namespace shardproof::digest
