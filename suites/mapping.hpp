// What a row of the mapping family is, and what follows from it on a case: operands, reference,
// traffic, preconditions. mapping.cpp holds the table.
//
// The reference is applied on lists of local values: the ranks of `axis` that share their place on
// all other axes. On those other axes x is varying, so the list is taken once for each of them.
#pragma once
#include <fmt/format.h>

#include <cmath>
#include <numeric>

#include "fixtures/fills.hpp"
#include "fixtures/sharding.hpp"
#include "oracle/registry.hpp"
#include "reference/regions.hpp"

namespace shardproof::mapping_family {

using reference::Array;
using reference::Ranks;

// What the reference's maps take from a case.
struct Site {
  int ranks = 1;
  int dim = 0;                     // that x is sharded along; all-to-all moves to 1 - dim
  std::vector<int64_t> blocks[2];  // extents by rank along tokens and hidden
  double scale = 1;
};
using Map = Ranks (*)(const Site&, const Ranks&);

// One direction of a mapping. rounds: its values are sums or products, not moved bits.
struct Half {
  Map map;
  Op call = Op::barrier;  // due on groups of 2 or more; barrier: none
  bool rounds = false;
};

constexpr auto inv = Placement::invariant, rep = Placement::replicate, par = Placement::partial,
               sha = Placement::shard;

enum Blocks : uint8_t { uncut, one_dim, both_dims };  // dims that are cut into blocks

struct Row {
  const char *name, *summary;
  Placement::Kind from, to;
  Half forward, backward;
  Blocks blocks;
  std::unique_ptr<Kernel> (*make)();
};

// ---- Reading a line

inline constexpr const char* extent_keys[] = {"tokens", "hidden"};

inline Axis axis_of(const Case& line) { return *axis_from(line.text("axis")); }
inline std::vector<int64_t> shape_of(const Case& line) {
  return {line.at("tokens"), line.at("hidden")};
}
inline const IndexMap& map_of(const Case& line) {
  return line.has("split") && line.text("split") == "uneven" ? uneven_map() : contiguous_map();
}

struct Fraction {
  int64_t numerator = 0, denominator = 0;
};
// "3", "-3/4"; up to three digits each. 0/0 where the text is none.
inline Fraction fraction_of(std::string_view text) {
  auto digits = [](std::string_view s) {
    const bool number = !s.empty() && s.size() <= 3 && s.find_first_not_of("0123456789") == s.npos;
    return number ? std::stoll(std::string(s)) : 0;
  };
  const bool negative = text.starts_with('-');
  if (negative) text.remove_prefix(1);
  const size_t slash = text.find('/');
  const int64_t n = digits(text.substr(0, slash));
  const int64_t d = slash == text.npos ? 1 : digits(text.substr(slash + 1));
  if (n == 0 || d == 0) return {};
  return {(negative ? -n : n) / std::gcd(n, d), d / std::gcd(n, d)};
}

inline Site site_of(const Case& line) {
  Site s;
  s.ranks = line.ranks(axis_of(line));
  s.dim = int(line.at("dim"));
  for (int dim : {0, 1})
    for (int r = 0; r < s.ranks; ++r)
      s.blocks[dim].push_back(
          int64_t(map_of(line).owned(shape_of(line)[size_t(dim)], s.ranks, r).size()));
  if (line.has("scale")) {
    const Fraction f = fraction_of(line.text("scale"));
    s.scale = double(f.numerator) / double(f.denominator);
  }
  return s;
}

inline Layout layout_of(const Case& line, Placement::Kind kind, int dim) {
  Placement p{kind, -1, nullptr};
  if (kind == sha) p = S(dim, map_of(line));
  return {{axis_of(line), p}};
}
inline Layout layout_before(const Row& row, const Case& line) {
  return layout_of(line, row.from, int(line.at("dim")));
}
inline Layout layout_after(const Row& row, const Case& line) {
  const int dim = int(line.at("dim"));
  return layout_of(line, row.to, row.blocks == both_dims ? 1 - dim : dim);
}

inline std::vector<Operand> operands(const Row& row, const Case& line) {
  Operand x{"x", Operand::input, shape_of(line), layout_before(row, line)};
  Operand y{"y", Operand::output, shape_of(line), layout_after(row, line)};
  // `cancelling` pairs what the reduction adds: the ranks of a partial x.
  const auto stacked = stacked_axes(x.layout, line.mesh(), /*denoted=*/false);
  for (size_t i = 0; i < stacked.size(); ++i)
    if (row.from == par && stacked[i] == axis_of(line)) x.contraction = int(i);
  return {x, y};
}

// ---- The reference

// Values of the ranks of an axis lie [outer, ranks where partial, inner, tokens * hidden] in a
// whole: axes outside and inside of it in the stack.
struct Stack {
  int64_t outer = 1, inner = 1;
};
inline Stack stack_of(const Case& line) {
  const Mesh mesh = line.mesh();
  Stack s;
  bool inside = false;
  for (Axis a : stacked_axes({}, mesh, /*denoted=*/false)) {
    if (a == axis_of(line))
      inside = true;
    else
      (inside ? s.inner : s.outer) *= mesh.size(a);
  }
  return s;
}

inline Ranks local_values(const Site& s, const Placement& type, const std::vector<Array>& given) {
  switch (type.kind) {
    case Placement::partial:
      return given;
    case Placement::shard:
      return reference::blocks(given[0], type.dim, s.blocks[type.dim]);
    default:
      return reference::copies(given[0], s.ranks);
  }
}
inline Array denoted(const Placement& type, const Ranks& y) {
  switch (type.kind) {
    case Placement::partial:
      return reference::total(y);
    case Placement::shard:
      return reference::joined(y, type.dim);
    default:
      return y[0];
  }
}

inline Whole apply(const Case& line, const Site& site, const Layout& before, const Layout& after,
                   Map map, const Whole& x) {
  const std::vector<int64_t> shape = shape_of(line);
  const Placement &from = before[0].second, &to = after[0].second;
  const Stack stack = stack_of(line);
  const int64_t n = product(shape), lists = from.kind == par ? site.ranks : 1;
  Whole y{denoted_shape(shape, after, line.mesh()), {}};
  for (int64_t o = 0; o < stack.outer; ++o)
    for (int64_t i = 0; i < stack.inner; ++i) {
      std::vector<Array> given;
      for (int64_t r = 0; r < lists; ++r) {
        const auto first = x.value.begin() + ((o * lists + r) * stack.inner + i) * n;
        given.push_back({shape, {first, first + n}});
      }
      const Array value = denoted(to, map(site, local_values(site, from, given)));
      y.value.insert(y.value.end(), value.value.begin(), value.value.end());
    }
  return y;
}

template <class F>
inline Whole each(Whole w, F f) {
  for (double& v : w.value) v = f(v);
  return w;
}

// The maps have coefficients 0, 1 and scale: the same maps with |scale| and scale^2 carry |x| and
// x^2 to the sums of |terms| and of squared terms.
inline Gauge gauge_of(const Case& line, const Layout& before, const Layout& after, const Half& half,
                      const Whole& x) {
  if (!half.rounds) return {};
  Site site = site_of(line);
  const double scale = site.scale;
  Gauge g;
  site.scale = std::abs(scale);
  g.magnitude =
      apply(line, site, before, after, half.map, each(x, [](double v) { return std::abs(v); }))
          .value;
  site.scale = scale * scale;
  g.squares =
      apply(line, site, before, after, half.map, each(x, [](double v) { return v * v; })).value;
  const bool reduces = half.call != Op::barrier;
  g.reduced = reduces ? site.ranks : 1;
  g.independent = !line.has("scale");                          // one rounded scale for all elements
  g.terms = line.has("scale") ? 2 : reduces ? 1 : site.ranks;  // rounded scale times the sum
  return g;
}

inline std::vector<Whole> run(const Case& line, const Layout& before, const Layout& after,
                              const Half& half, const Whole& x, std::vector<Gauge>* gauges) {
  if (gauges) *gauges = {gauge_of(line, before, after, half, x)};
  return {apply(line, site_of(line), before, after, half.map, x)};
}

// ---- Traffic: closed forms in elements of a rank's own buffer, n = tokens * hidden

inline int64_t sent(Op op, const Site& s, int64_t n, int dim, int r) {
  switch (op) {
    case Op::all_gather:
      return n / s.ranks;  // own block
    case Op::all_to_all:
      return n / std::accumulate(s.blocks[dim].begin(), s.blocks[dim].end(), int64_t{0}) *
             s.blocks[dim][size_t(r)];  // own block of the dim it leaves
    default:
      return n;  // all-reduce, reduce-scatter
  }
}

inline std::vector<Traffic> traffic(const Row& row, const Case& line, int rank) {
  const Site site = site_of(line);
  const int64_t n = product(shape_of(line));
  const int r = line.mesh().coordinate(rank, axis_of(line));
  std::vector<Traffic> due;
  if (site.ranks == 1) return due;
  for (const bool back : {false, true}) {
    const Op op = (back ? row.backward : row.forward).call;
    if (op == Op::barrier) continue;
    const bool sums = op == Op::all_reduce || op == Op::reduce_scatter;
    const int leaves = back ? 1 - site.dim : site.dim;
    Traffic t{op,   sums ? Reduce::sum : Reduce::none, name(axis_of(line)),
              back, sent(op, site, n, leaves, r),      line.dtype()};
    due.push_back(t);
  }
  return due;
}

// ---- Preconditions

inline std::optional<Rejected> refused_dim(const Case& line, int dim) {
  const int64_t extent = line.at(extent_keys[dim]), p = line.ranks(axis_of(line));
  const std::string met = fmt::format("{}={}", extent_keys[dim], extent);
  if (&map_of(line) == &uneven_map()) {
    if (extent >= p * (p + 1) / 2) return {};
    return Rejected(fmt::format("{} >= 1+2+..+{} = {} where blocks are uneven", extent_keys[dim], p,
                                p * (p + 1) / 2),
                    met, "choose a larger extent or split=equal");
  }
  if (extent % p == 0) return {};
  return Rejected(fmt::format("{} divisible by {}={}", extent_keys[dim], name(axis_of(line)), p),
                  met, "choose a multiple or another number of ranks");
}

inline std::optional<Rejected> precondition(const Row& row, const Case& line) {
  if (const std::string& wire = line.text("wire"); !wire.empty() && wire != line.text("dtype"))
    return Rejected("a mapping that sends values as they are stored", "wire=" + wire,
                    "leave wire= out, or choose that type by dtype=");
  const int dim = int(line.at("dim"));
  if (row.blocks == uncut) return {};
  if (auto refused = refused_dim(line, dim)) return refused;
  return row.blocks == both_dims ? refused_dim(line, 1 - dim) : std::nullopt;
}

// Payloads sum p terms (reinterpret: the judge does); a scale n/d is exact where d is a power of 2
// and n times the sum an integer of the format.
inline std::optional<int64_t> integer_range(const Case& line) {
  const int64_t p = line.ranks(axis_of(line));
  if (!line.has("scale")) return exact_range(line.dtype(), p, 1);
  const Fraction f = fraction_of(line.text("scale"));
  if ((f.denominator & (f.denominator - 1)) != 0) return {};
  return exact_range(line.dtype(), std::abs(f.numerator) * p, 1);
}

}  // namespace shardproof::mapping_family
