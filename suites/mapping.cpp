// The mapping family: one tensor x [tokens, hidden] changes its placement on one axis. A row of the
// table binds types, the reference's maps, the call that is due each way and our kernel.
#include "suites/mapping.hpp"

#include "primitives/mapping.hpp"
#include "suites/ours.hpp"

namespace shardproof {
namespace {
using namespace mapping_family;

// ---- The table

const Half as_it_is{[](const Site&, const Ranks& x) { return x; }};
const Half summed{[](const Site&, const Ranks& x) { return reference::all_reduce(x); },
                  Op::all_reduce, true};
const Half summed_and_scaled{[](const Site& s, const Ranks& x) {
                               return reference::scaled(reference::all_reduce(x), s.scale);
                             },
                             Op::all_reduce, true};
const Half scaled{[](const Site& s, const Ranks& x) { return reference::scaled(x, s.scale); },
                  Op::barrier, true};
const Half cut{
    [](const Site& s, const Ranks& x) { return reference::own_block(x, s.dim, s.blocks[s.dim]); }};
const Half padded{[](const Site& s, const Ranks& x) { return reference::in_zeros(x, s.dim); }};
const Half gathered{[](const Site& s, const Ranks& x) { return reference::all_gather(x, s.dim); },
                    Op::all_gather};
const Half summed_and_cut{[](const Site& s, const Ranks& x) {
                            return reference::reduce_scatter(x, s.dim, s.blocks[s.dim]);
                          },
                          Op::reduce_scatter, true};
const Half exchanged{[](const Site& s, const Ranks& x) {
                       return reference::exchange(x, 1 - s.dim, s.dim, s.blocks[1 - s.dim]);
                     },
                     Op::all_to_all};
const Half exchanged_back{[](const Site& s, const Ranks& x) {
                            return reference::exchange(x, s.dim, 1 - s.dim, s.blocks[s.dim]);
                          },
                          Op::all_to_all};
const Half on_first{[](const Site&, const Ranks& x) { return reference::first_only(x); }};
// Whole on every rank and read as a partial sum: the judge adds p equal values up.
const Half counted_p_times{as_it_is.map, Op::barrier, true};

const Row table[] = {
    {"mapping_copy", "I -> R: identity; backward all-reduce", inv, rep, as_it_is, summed, uncut,
     mapping_copy},
    {"mapping_reduce", "P -> I: all-reduce; backward identity", par, inv, summed, as_it_is, uncut,
     mapping_reduce},
    {"mapping_scaled_reduce", "P -> I: scale times the sum; backward scale", par, inv,
     summed_and_scaled, scaled, uncut, mapping_scaled_reduce},
    {"mapping_all_reduce", "P -> R: all-reduce; backward all-reduce", par, rep, summed, summed,
     uncut, mapping_all_reduce},
    {"mapping_scatter", "I -> S: own block; backward all-gather", inv, sha, cut, gathered, one_dim,
     mapping_scatter},
    {"mapping_gather", "S -> I: all-gather; backward own block", sha, inv, gathered, cut, one_dim,
     mapping_gather},
    {"mapping_all_gather", "S -> R: all-gather; backward reduce-scatter", sha, rep, gathered,
     summed_and_cut, one_dim, mapping_all_gather},
    {"mapping_reduce_scatter", "P -> S: reduce-scatter; backward all-gather", par, sha,
     summed_and_cut, gathered, one_dim, mapping_reduce_scatter},
    {"mapping_all_to_all", "S(dim) -> S(other dim): all-to-all; backward all-to-all", sha, sha,
     exchanged, exchanged_back, both_dims, mapping_all_to_all},
    {"mapping_slice", "R -> S: own block; backward own block in zeros", rep, sha, cut, padded,
     one_dim, mapping_slice},
    {"mapping_pad", "S -> P: own block in zeros; backward own block", sha, par, padded, cut,
     one_dim, mapping_pad},
    {"mapping_replicate_to_invariant", "R -> I: identity; backward on rank 0 only", rep, inv,
     as_it_is, on_first, uncut, mapping_replicate_to_invariant},
    {"mapping_invariant_to_partial", "I -> P: on rank 0 only; backward identity", inv, par,
     on_first, as_it_is, uncut, mapping_invariant_to_partial},
    {"mapping_replicate_to_partial", "R -> P: on rank 0 only, both ways", rep, par, on_first,
     on_first, uncut, mapping_replicate_to_partial},
    {"mapping_reinterpret", "R -> P: identity both ways, the value times p", rep, par,
     counted_p_times, counted_p_times, uncut, mapping_reinterpret},
};

bool scales(const Row& row) { return row.forward.map == summed_and_scaled.map; }

// ---- Keys

// The only axis above 1; tp where there is none; open where there are several.
std::string only_axis(const Case& line) {
  std::string only;
  for (Axis a : Mesh::default_order()) {
    if (line.ranks(a) == 1) continue;
    if (!only.empty()) return "";
    only = name(a);
  }
  return only.empty() ? "tp" : only;
}

Key extent_key(const char* name, const char* fallback, int64_t high, const char* help) {
  Key k{name, fallback, help};
  k.low = 1, k.high = high;
  return k;
}

std::vector<Key> keys(const Row& row) {
  // Largest extents keep every element count within the int of MPI and NCCL calls.
  std::vector<Key> list{extent_key("tokens", "24", 1 << 15, "rows of x"),
                        extent_key("hidden", "48", 1 << 15, "columns of x")};
  Key dim{"dim", "0", "dim that is cut or joined: 0 tokens, 1 hidden"};
  dim.choices = {"0", "1"};
  if (row.blocks == uncut) dim.help = "0 or 1, without effect here: nothing is cut or joined";
  if (row.blocks == both_dims) dim.help = "dim that x is sharded along; y along the other";
  list.push_back(dim);
  Key axis{"axis", "", "axis that the mapping works on; left out: the only one above 1"};
  for (Axis a : Mesh::default_order()) axis.choices.emplace_back(name(a));
  axis.derive = only_axis;
  list.push_back(axis);
  if (row.blocks == both_dims) {
    Key split{"split", "equal", "blocks of both dims; uneven: proportional to rank + 1"};
    split.choices = {"equal", "uneven"};
    list.push_back(split);
  }
  if (scales(row)) {
    Key scale{"scale", "1/2", "factor of the sum, a fraction"};
    scale.valid = [](std::string_view s) -> std::string {
      return fraction_of(s).denominator
                 ? ""
                 : "a fraction such as 1/2 or -3/4, not 0, of up to three digits each";
    };
    scale.normal = [](std::string_view s) {
      const Fraction f = fraction_of(s);
      return f.denominator == 1 ? fmt::format("{}", f.numerator)
                                : fmt::format("{}/{}", f.numerator, f.denominator);
    };
    list.push_back(scale);
  }
  return list;
}

// ---- Cases

using Lines = std::vector<std::string>;

std::vector<const char*> dims(const Row& row) {
  if (row.blocks == uncut) return {""};
  return {"", " dim=1"};
}

// At most 64 elements in x and in y, stacked over ranks where partial: every basis vector is tried.
std::string small(const Row& row, int p, std::string_view dim) {
  if (p == 2) return " tokens=4 hidden=6";
  if (p == 3) return " tokens=3 hidden=6";
  if (row.blocks == both_dims) return " tokens=4 hidden=8";
  if (row.blocks == uncut) return " tokens=3 hidden=5";
  return dim.empty() ? " tokens=4 hidden=3" : " tokens=3 hidden=4";
}

Lines smoke(const Row& row) {
  Lines lines;
  const std::string name = row.name;
  for (const char* dim : dims(row))
    for (int p : {2, 4})
      lines.push_back(fmt::format("{} tp={}{}{}", name, p, small(row, p, dim), dim));
  lines.push_back(name + " tp=4 strides=transposed");
  if (row.blocks == both_dims) lines.push_back(name + " tp=4 tokens=11 hidden=13 split=uneven");
  return lines;
}

Lines ci(const Row& row) {
  Lines lines = smoke(row);
  const std::string name = row.name;
  auto add = [&](std::string_view rest) { lines.push_back(fmt::format("{} {}", name, rest)); };
  for (const char* dim : dims(row)) {
    for (int p : {1, 2, 3, 4, 8}) add(fmt::format("tp={}{}", p, dim));
    add(fmt::format("tp=3{} strides=transposed", dim));
    add(fmt::format("tp=4{} dtype=f32", dim));
    add(fmt::format("tp=8{} dtype=bf16", dim));
  }
  for (const char* grid :
       {"tp=2 cp=2 axis=tp", "tp=2 cp=2 axis=cp", "tp=4 cp=2 axis=tp", "tp=4 cp=2 axis=cp",
        "tp=2 cp=4 axis=tp", "tp=2 cp=4 axis=cp", "tp=2 dp=2 axis=dp dtype=f32",
        "tp=4 cp=2 order=cp,tp axis=tp", "tp=2 cp=2 dp=2 axis=cp", "tp=2 axis=cp"})
    add(grid);
  for (const char* rest :
       {"tp=3 dtype=f32 fill=normal", "tp=8 fill=normal", "tp=4 dtype=bf16 fill=normal",
        "cp=4 dtype=f16", "tp=3 dtype=bf16 strides=transposed", "tp=4 strides=expanded"})
    add(rest);
  if (row.blocks == both_dims)
    for (const char* rest :
         {"tp=2 tokens=11 hidden=13 split=uneven", "tp=3 tokens=11 hidden=13 split=uneven dim=1",
          "tp=8 tokens=41 hidden=53 split=uneven",
          "tp=2 cp=4 tokens=11 hidden=13 split=uneven axis=cp",
          "tp=4 tokens=11 hidden=13 split=uneven dtype=f32 strides=transposed"})
      add(rest);
  if (scales(row))
    for (const char* rest : {"scale=3", "tp=4 scale=-3/4", "tp=8 scale=5/8 dtype=bf16",
                             "tp=3 scale=1/3 fill=normal", "tp=4 scale=2/7 fill=normal dtype=f32"})
      add(rest);
  return lines;
}

// The product of meshes, dims, dtypes, fills and strides.
Lines nightly(const Row& row) {
  Lines lines = ci(row);
  for (const char* mesh :
       {"tp=1", "tp=2", "tp=3", "tp=4", "tp=8", "tp=2 cp=2 axis=tp", "tp=2 cp=2 axis=cp",
        "tp=4 cp=2 axis=tp", "tp=4 cp=2 axis=cp", "tp=2 cp=4 axis=tp", "tp=2 cp=4 axis=cp",
        "tp=4 cp=2 order=cp,tp axis=tp", "tp=4 cp=2 order=cp,tp axis=cp", "tp=2 cp=2 dp=2 axis=cp"})
    for (const char* dim : dims(row))
      for (const char* dtype : {"f64", "f32", "bf16", "f16"})
        for (const char* fill : {"integers", "normal", "large", "cancelling"})
          for (const char* strides : {"contiguous", "transposed"})
            lines.push_back(fmt::format("{} {}{} dtype={} fill={} strides={}", row.name, mesh, dim,
                                        dtype, fill, strides));
  return lines;
}

Lines cases(const Row& row, const std::string& tier) {
  return tier == "smoke" ? smoke(row) : tier == "ci" ? ci(row) : nightly(row);
}

Lines illegal(const Row& row) {
  const std::string name = row.name;
  if (row.blocks == uncut) return {};
  Lines lines{name + " tp=2 tokens=5 hidden=6", name + " tp=4 tokens=8 hidden=6 dim=1",
              name + " cp=4 tokens=6 hidden=8"};  // tp=1 would divide it
  if (row.blocks == both_dims)
    for (const char* rest : {" tp=2 tokens=6 hidden=5", " tp=4 tokens=9 hidden=12 split=uneven",
                             " tp=4 tokens=12 hidden=9 split=uneven"})
      lines.push_back(name + rest);
  return lines;
}

Lines witnesses(const Row& row) {
  Lines lines;
  for (int p : {2, 3, 4})
    lines.push_back(fmt::format("{} tp={}{}", row.name, p, small(row, p, "")));
  lines.push_back(fmt::format("{} tp=2 cp=2 axis=tp tokens=4 hidden=6", row.name));
  return lines;
}

Contract contract(const Row& row) {
  Contract c;
  c.name = row.name;
  c.family = "mapping";
  c.summary = row.summary;
  c.linear = true;
  c.keys = keys(row);
  c.precondition = [&row](const Case& line) { return precondition(row, line); };
  c.operands = [&row](const Case& line) { return operands(row, line); };
  c.forward = [&row](const Case& line, std::span<const Whole> inputs, std::vector<Gauge>* gauges) {
    return run(line, layout_before(row, line), layout_after(row, line), row.forward, inputs[0],
               gauges);
  };
  c.backward = [&row](const Case& line, std::span<const Whole>, std::span<const Whole> cotangents,
                      std::vector<Gauge>* gauges) {
    return run(line, dual(layout_after(row, line)), dual(layout_before(row, line)), row.backward,
               cotangents[0], gauges);
  };
  c.traffic = [&row](const Case& line, const std::string&, int rank) {
    return traffic(row, line, rank);
  };
  c.integer_range = integer_range;
  c.cases = [&row](const std::string& tier) { return cases(row, tier); };
  c.illegal = illegal(row);
  c.witnesses = witnesses(row);
  return c;
}

}  // namespace

void family_mapping(Registry& registry) {
  for (const Row& row : table) {
    registry.add(contract(row));
    registry.add(Subject{"", row.name, row.make, {}});
    add_ours_on_device(registry, row.name);
  }
}

}  // namespace shardproof
