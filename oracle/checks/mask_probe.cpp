#include "oracle/checks/mask_probe.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "fixtures/sharding.hpp"
#include "oracle/checks/judging.hpp"

namespace shardproof::judging {
namespace {

constexpr const char* shot_name = "mask:";

int operand_named(const Evidence& e, const std::string& name) {
  for (size_t i = 0; i < e.operands.size(); ++i)
    if (e.operands[i].name == name) return int(i);
  throw std::logic_error("mask probe of " + e.contract->name + ": expected an operand " + name +
                         ", met none; a contract that states `visible` has q, k, v, o and lse");
}

int64_t last(const Operand& o, int from_end) { return o.shape[o.shape.size() - size_t(from_end)]; }

// Codes up to 2^B are told apart while B bits and the roundings of n_i O_i fit the significand:
// errors of some tens of u on a sum below 2^B stay under a quarter.
int bits_of(DType dtype) {
  switch (dtype) {
    case DType::f64:
      return 40;
    case DType::f32:
      return 12;
    case DType::f16:
      return 6;
    default:
      return 4;
  }
}

struct Probe {
  int q, v, o, lse;
  int64_t keys, heads, channels;
  int bits;
  explicit Probe(const Evidence& e)
      : q(operand_named(e, "q")),
        v(operand_named(e, "v")),
        o(operand_named(e, "o")),
        lse(operand_named(e, "lse")),
        keys(product(e.operands[size_t(v)].shape) /
             (last(e.operands[size_t(v)], 1) * last(e.operands[size_t(v)], 2))),
        heads(last(e.operands[size_t(o)], 2)),
        channels(last(e.operands[size_t(o)], 1)),
        bits(bits_of(e.dtype_of(e.operands[size_t(o)]))) {}
  int64_t shots() const { return (keys + bits * channels - 1) / (bits * channels); }
  int64_t chunk(int64_t key) const { return key / bits; }
  double code(int64_t key) const { return std::ldexp(1.0, int(key % bits)); }
};

// Values of shot s: the code of each key in the channel of its chunk, alike in all value heads.
std::vector<double> codes(const Evidence& e, const Probe& p, int64_t shot) {
  const Operand& v = e.operands[size_t(p.v)];
  std::vector<double> value(size_t(product(v.shape)));
  const int64_t row = last(v, 1) * last(v, 2);
  for (int64_t i = 0; i < int64_t(value.size()); ++i) {
    const int64_t key = i / row, channel = i % p.channels;
    if (p.chunk(key) == shot * p.channels + channel) value[size_t(i)] = p.code(key);
  }
  return value;
}

// lse by query and head of all ranks.
std::vector<double> whole_lse(const Evidence& e, const Probe& p, int shot) {
  const Operand& o = e.operands[size_t(p.lse)];
  std::vector<double> all(size_t(product(o.shape))), local;
  for (int r = 0; r < e.mesh.world(); ++r) {
    const ResultTensor* t = e.result(r, shot, 0, p.lse, false);
    if (!t) continue;
    read(*t, local);
    const auto indices = whole_indices(o.shape, o.layout, e.mesh, r);
    for (size_t i = 0; i < std::min(local.size(), indices.size()); ++i)
      all[size_t(indices[i])] = local[i];
  }
  return all;
}

// Bits of one channel of a row into its keys.
void decode(const Probe& p, int64_t shot, int64_t channel, double o, SeenRow& row) {
  const double sum = o * double(row.visits), whole = std::nearbyint(sum);
  const int64_t first = (shot * p.channels + channel) * p.bits;
  if (first >= p.keys) return;
  if (!(std::abs(sum - whole) <= 0.3) || whole < 0 || whole >= std::ldexp(1.0, p.bits)) {
    row.unreadable = fmt::format(
        "expected the mean of codes below 2^{} times {} visits to be an integer, met {}", p.bits,
        row.visits, number(sum));
    return;
  }
  const auto code = uint64_t(whole);
  for (int64_t b = 0; b < std::min<int64_t>(p.bits, p.keys - first); ++b)
    row.keys[size_t(first + b)] = code >> b & 1;
}

void decode_shot(const Evidence& e, const Probe& p, int64_t number_of_shot, int rank,
                 std::vector<SeenRow>& rows, const std::vector<double>& lse) {
  const Operand& o = e.operands[size_t(p.o)];
  const int shot = e.find_shot(shot_name + std::to_string(number_of_shot));
  const ResultTensor* t = e.result(rank, shot, 0, p.o, false);
  const auto indices = whole_indices(o.shape, o.layout, e.mesh, rank);
  std::vector<double> local;
  if (t) read(*t, local);
  for (size_t i = 0; i < std::min(local.size(), indices.size()); ++i) {
    const size_t at = i / size_t(p.channels);
    if (rows.size() <= at) {
      SeenRow row;
      row.rank = rank;
      row.query = indices[i] / (p.heads * p.channels);
      row.head = indices[i] / p.channels % p.heads;
      row.keys.resize(size_t(p.keys));
      const double n = std::exp(lse[size_t(row.query * p.heads + row.head)]);
      row.visits = std::isfinite(n) && n < 1e15 ? int64_t(std::nearbyint(n)) : 0;
      if (!(std::abs(n - double(row.visits)) <= 0.01 * std::max(1.0, n)))
        row.unreadable = fmt::format(
            "expected lse to be the logarithm of a count, met exp(lse) = {}", number(n));
      rows.push_back(std::move(row));
    }
    SeenRow& row = rows[at];
    if (row.unreadable.empty()) decode(p, number_of_shot, indices[i] % p.channels, local[i], row);
  }
}

}  // namespace

void plan_mask_probe(const Evidence& e, std::vector<Shot>& shots) {
  const Probe p(e);
  const std::string first = std::string(shot_name) + "0";
  if (std::any_of(shots.begin(), shots.end(), [&](const Shot& s) { return s.name == first; }))
    return;
  for (int64_t s = 0; s < p.shots(); ++s) {
    Shot shot;
    shot.name = shot_name + std::to_string(s);
    shot.program = "F0";
    shot.feeds = {shots.at(0).feeds.at(0)};
    shot.feeds[0].given = {
        {p.q, std::vector<double>(size_t(product(e.operands[size_t(p.q)].shape)))},
        {p.v, codes(e, p, s)}};
    shots.push_back(std::move(shot));
  }
}

Seen seen_rows(const Evidence& e) {
  const Probe p(e);
  Seen seen;
  for (int64_t s = 0; s < p.shots(); ++s)
    if ((seen.incomplete = incomplete(e, shot_name + std::to_string(s)))) return seen;
  const auto lse = whole_lse(e, p, e.find_shot(std::string(shot_name) + "0"));
  for (int r = 0; r < e.mesh.world(); ++r) {
    std::vector<SeenRow> rows;
    for (int64_t s = 0; s < p.shots(); ++s) decode_shot(e, p, s, r, rows, lse);
    for (SeenRow& row : rows) seen.rows.push_back(std::move(row));
  }
  return seen;
}

}  // namespace shardproof::judging
