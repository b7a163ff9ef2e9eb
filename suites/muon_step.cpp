// A step of Muon on matrices that tensor parallelism cuts. What is judged is whether every matrix
// moves by the orthogonalised direction of the whole of it, whoever holds which part, and whether
// all ranks end with the same matrices.
#include <algorithm>
#include <cmath>

#include "fixtures/index_maps.hpp"
#include "oracle/check.hpp"
#include "oracle/registry.hpp"
#include "primitives/muon_step.hpp"
#include "reference/muon.hpp"
#include "suites/ours.hpp"
#include "suites/reading.hpp"
#include "suites/replicated.hpp"
#include "suites/step_keys.hpp"

namespace shardproof {
namespace {

using namespace linears;
using namespace replicated;
using reference::MatrixExtents;
using reference::Values;

// ---- What is read from a line

bool owned_by_one(const Case& c) { return c.text("owner") == "one"; }
bool by_gram(const Case& c) { return c.text("form") == "gram"; }
bool is_cut(const Case& c) { return c.text("cut") != "none" && c.ranks(Axis::tp) > 1; }

std::vector<Axis> data_axes(const Case& c) { return reading::with_ranks(c, {Axis::cp, Axis::dp}); }
int64_t data_ranks(const Case& c) { return int64_t(c.ranks(Axis::dp)) * c.ranks(Axis::cp); }
int data_rank(const Case& c, int rank) {
  const Mesh mesh = c.mesh();
  return mesh.coordinate(rank, Axis::dp) * int(c.ranks(Axis::cp)) + mesh.coordinate(rank, Axis::cp);
}

MatrixExtents matrix(const Case& c, int64_t k) {
  const int64_t rows = c.at("rows"), other = c.at("hidden") + k;
  return k % 2 == 0 ? MatrixExtents{rows, other} : MatrixExtents{other, rows};
}

// Of a matrix: the extent that tp cuts, the other one, and the part that a rank has of the first.
struct Cut {
  int64_t extent, across, block;

  Cut(const Case& c, int64_t k) {
    const MatrixExtents m = matrix(c, k);
    const bool rows = c.text("cut") == "rows";
    extent = rows ? m.rows : m.columns, across = rows ? m.columns : m.rows;
    block = (extent + c.ranks(Axis::tp) - 1) / c.ranks(Axis::tp);
  }
  int64_t count(int tp) const { return std::clamp<int64_t>(extent - tp * block, 0, block); }
};

int64_t elements_on(const Case& c, int64_t k, int rank) {
  const MatrixExtents m = matrix(c, k);
  if (!is_cut(c)) return m.rows * m.columns;
  const Cut cut(c, k);
  return cut.count(c.mesh().coordinate(rank, Axis::tp)) * cut.across;
}

std::vector<int64_t> owned(const Case& c, int64_t owner) {
  std::vector<int64_t> list;
  for (int64_t k = 0; k < c.at("matrices"); ++k)
    if (!owned_by_one(c) || k % data_ranks(c) == owner) list.push_back(k);
  return list;
}

reference::MuonRule rule(const Case& c) {
  reference::MuonRule r;
  r.momentum = reading::number(c, "mu"), r.average = c.on("average");
  r.lr = reading::number(c, "lr"), r.decay = reading::number(c, "decay");
  r.eps = reading::number(c, "eps");
  r.nesterov = c.on("nesterov"), r.match_rms = c.text("scale") == "match_rms_adamw";
  r.iterations = c.at("ns_steps");
  return r;
}

// ---- The contract

Placement on_tp(const Case& c, int64_t k) {
  if (c.text("cut") == "none") return I();
  return S(c.text("cut") == "rows" ? 0 : 1, chunk_map(Cut(c, k).block));
}

Layout matrix_on(const Case& c, int64_t k, const Placement& data) {
  return {{Axis::tp, on_tp(c, k)}, {Axis::dp, data}, {Axis::cp, data}};
}

// On the data rank that the matrix belongs to: all rows, on the others none.
Layout state_on(const Case& c, int64_t k) {
  if (!owned_by_one(c)) return matrix_on(c, k, I());
  const int64_t owner = k % data_ranks(c), cp = c.ranks(Axis::cp);
  return {{Axis::tp, on_tp(c, k)},
          {Axis::dp, S(0, on_rank_map(owner / cp))},
          {Axis::cp, S(0, on_rank_map(owner % cp))}};
}

std::vector<Operand> operands(const Case& c) {
  std::vector<Operand> list;
  const auto each = [&](const std::string& name, Operand::Role role, auto layout, bool state) {
    for (int64_t k = 0; k < c.at("matrices"); ++k) {
      const MatrixExtents m = matrix(c, k);
      Operand o{name + std::to_string(k), role, {m.rows, m.columns}, layout(k)};
      o.fixed_dtype = state, o.dtype_override = accumulation_of(c);
      if (role == Operand::input && name != "w" && k < c.at("tiny"))
        o.factor = [](int64_t) { return 0x1p-100; };
      list.push_back(o);
    }
  };
  const auto on = [&](const Placement& data) {
    return [&c, data](int64_t k) { return matrix_on(c, k, data); };
  };
  const auto state = [&](int64_t k) { return state_on(c, k); };
  each("w", Operand::input, on(I()), false);
  each("g", Operand::input, on(P()), false);
  each("m", Operand::input, state, true);
  each("next_w", Operand::output, on(I()), false);
  each("next_m", Operand::output, state, true);
  return list;
}

reference::MuonStep step(const Case& c, std::span<const Whole> in, int64_t k) {
  const int64_t n = c.at("matrices"), p = data_ranks(c);
  const auto r = rounding_of(c, precision_of(c, Declared{}), p);
  const Operand g = operands(c)[size_t(n + k)];
  const Whole& parts = in[size_t(n + k)];
  const auto gradient = reference::sum_of_parts(
      denoted(g, g.layout, c.mesh(), parts).value,
      denoted(g, g.layout, c.mesh(), absolute(parts)).value, {double(p)}, r);
  return reference::muon_step(rule(c), matrix(c, k), in[size_t(k)].value,
                              in[size_t(2 * n + k)].value, gradient, double(c.ranks(Axis::tp)),
                              r.accumulate);
}

std::vector<Whole> forward(const Case& c, std::span<const Whole> in, std::vector<Gauge>* gauges) {
  const auto n = size_t(c.at("matrices"));
  std::vector<Whole> out(2 * n);
  if (gauges) gauges->assign(2 * n, Gauge{});
  for (size_t k = 0; k < n; ++k) {
    reference::MuonStep s = step(c, in, int64_t(k));
    for (auto [at, result] : {std::pair(k, &s.x), std::pair(n + k, &s.m)}) {
      if (gauges) (*gauges)[at] = gauge_of(*result, precision_of(c, Declared{}));
      const MatrixExtents m = matrix(c, int64_t(k));
      out[at] = whole({m.rows, m.columns}, std::move(result->value));
    }
  }
  return out;
}

// ---- Calls

// Elements of a flat buffer's part on a rank: of all matrices, or the most that an owner has.
int64_t part(const Case& c, int rank) {
  int64_t most = 0;
  for (int64_t owner = 0; owner < (owned_by_one(c) ? data_ranks(c) : 1); ++owner) {
    int64_t n = 0;
    for (int64_t k : owned(c, owner)) n += elements_on(c, k, rank);
    most = std::max(most, n);
  }
  return most;
}

std::vector<Traffic> over_tp(const Case& c, const std::vector<int64_t>& own) {
  std::vector<Traffic> due;
  if (!is_cut(c) || own.empty()) return due;
  const auto add = [&](Op op, int64_t count) {
    due.push_back(call(op, false, count, accumulation_of(c)));
    due.back().label = "tp";
    due.back().reduce = op == Op::all_reduce ? Reduce::sum : Reduce::none;
  };
  int64_t shards = 0, grams = 0;
  for (int64_t k : own) {
    const Cut cut(c, k);
    shards += cut.block * cut.across, grams += cut.across * cut.across;
  }
  if (!by_gram(c)) {
    add(Op::all_gather, shards);
    return due;
  }
  add(Op::all_reduce, int64_t(own.size()));
  for (int64_t i = 0; i < c.at("ns_steps"); ++i) add(Op::all_reduce, grams);
  return due;
}

std::vector<Traffic> traffic(const Case& c, const std::string&, int rank) {
  std::vector<Traffic> due;
  const auto add = [&](Op op, int64_t count, DType type, Reduce reduce) {
    if (data_ranks(c) == 1) return;
    due.push_back(call(op, false, count, type));
    due.back().label = reading::label(data_axes(c));
    due.back().reduce = reduce;
  };
  const int64_t own = part(c, rank);
  if (owned_by_one(c))
    add(Op::reduce_scatter, own * data_ranks(c), wire_of(c), Reduce::sum);
  else
    add(Op::all_reduce, own, wire_of(c), Reduce::sum);
  for (const Traffic& t : over_tp(c, owned(c, data_rank(c, rank)))) due.push_back(t);
  if (owned_by_one(c)) add(Op::all_gather, own, c.dtype(), Reduce::none);
  return due;
}

// ---- Products

std::vector<Gemm> gemms(const Case& c, int rank) {
  std::vector<Gemm> list;
  for (int64_t k : owned(c, data_rank(c, rank))) {
    const MatrixExtents m = matrix(c, k);
    int64_t side = std::min(m.rows, m.columns), other = std::max(m.rows, m.columns);
    if (is_cut(c) && by_gram(c)) {
      const Cut cut(c, k);
      side = cut.across, other = cut.count(c.mesh().coordinate(rank, Axis::tp));
    }
    for (int64_t i = 0; i < c.at("ns_steps"); ++i) {
      list.push_back({"A = X X^T", false, side, side, other});
      list.push_back({"A^2", false, side, side, side});
      list.push_back({"(b A + c A^2) X", false, side, other, side});
    }
  }
  return list;
}

// ---- Lines

std::vector<Key> keys() {
  return {
      extent("rows", "7", 1, "rows of matrices 0, 2, ..., columns of 1, 3, ..."),
      extent("hidden", "4", 1, "the other extent of matrix 0, one more for each next one"),
      extent("matrices", "3", 1, "how many", 16),
      choice("cut", "rows", {"rows", "columns", "none"},
             "what of each matrix tp cuts; none: each of its ranks has all of it"),
      choice("form", "gather", {"gather", "gram"},
             "the direction is gathered over tp, or Gram matrices are summed in each iteration"),
      choice("owner", "all", {"all", "one"},
             "data ranks that a matrix is stepped by: all; one, which hands it to the others"),
      step_keys::momentum(),
      toggle("average", "off", "the gradient enters the momentum with weight 1 - mu, not 1"),
      toggle("nesterov", "on", "the direction is g + mu m', not m'"),
      extent("ns_steps", "5", 1, "iterations of Newton and Schulz", 16),
      positive("eps", "0.0000001", "the least norm that a direction is divided by"),
      choice("scale", "original", {"original", "match_rms_adamw"},
             "sqrt(max(1, rows / columns)), or 0.2 sqrt(max(rows, columns))"),
      step_keys::step_size(),
      step_keys::decay("weight decay, decoupled"),
      extent("tiny", "0", 0,
             "so many of the matrices have 2^-100 of a gradient and momentum: eps is their norm",
             16)};
}

std::vector<std::string> cases(const std::string& tier) {
  const auto smoke = crossed({"muon_step"}, {"tp=2", "tp=4 cut=columns form=gram dtype=f32",
                                             "tp=2 dp=2 owner=one tiny=1 dtype=bf16 wire=f32"});
  if (tier == "smoke") return smoke;
  const auto ci = together(
      {smoke,
       crossed({"muon_step", "muon_step tp=2", "muon_step tp=3", "muon_step tp=8", "muon_step dp=3",
                "muon_step tp=2 dp=2 cp=2"},
               {"", "form=gram cut=columns dtype=f32", "form=gram owner=one",
                "owner=one dtype=bf16 wire=f32 scale=match_rms_adamw"}),
       // 5, 3 and 1 rows over 8 ranks, matrices of rank 1, and owners without a matrix.
       crossed({"muon_step tp=8", "muon_step tp=4 dp=2 owner=one matrices=1"},
               {"rows=5 form=gram", "rows=3 hidden=1", "rows=1 hidden=1 form=gram dtype=f32"}),
       crossed({"muon_step tp=4", "muon_step tp=2 dp=2 owner=one form=gram"},
               {"cut=columns", "cut=none", "average=on nesterov=off dtype=f32",
                "average=on mu=1/2 eps=64", "tiny=2 dtype=f32", "dtype=f16 wire=f32",
                "strides=transposed", "rows=3 hidden=9 scale=match_rms_adamw", "lr=1 decay=0",
                "tiny=2 eps=1e-40 dtype=f32 acc=f64", "ns_steps=1 dtype=f32", "dtype=f32 acc=f64",
                "fill=large", "dtype=f32 fill=cancelling"}),
       {"muon_step dp=8 owner=one", "muon_step dp=4 owner=one matrices=5 rows=6", "muon_step dp=2",
        "muon_step cp=2 owner=one dtype=f32", "muon_step dp=2 cp=2 owner=one order=dp,cp",
        "muon_step tp=2 dp=2 order=dp,tp form=gram", "muon_step cp=4 dtype=f32"}});
  if (tier != "nightly") return ci;
  return together({ci, crossed({"muon_step tp=8 rows=65 hidden=33", "muon_step tp=5",
                                "muon_step tp=3 cp=2 rows=31 hidden=50"},
                               {"", "form=gram", "form=gram cut=columns owner=one",
                                "owner=one average=on scale=match_rms_adamw"})});
}

Contract muon_step() {
  Contract c;
  c.name = "muon_step";
  c.family = "sharded";
  c.summary = "matrices that tp cuts moved by their orthogonalised momentum (Muon)";
  c.keys = keys();
  c.precondition = primitives::refused_muon_step;
  c.operands = operands;
  c.forward = forward;
  c.traffic = traffic;
  c.gemms = gemms;
  c.cases = cases;
  c.illegal = {"muon_step dp=2 ep=2",
               "muon_step dp=2 pp=2",
               "muon_step tp=2 dp=2 dtype=bf16",
               "muon_step dp=2 dtype=f32 wire=f16",
               "muon_step tp=2 dtype=f32 acc=bf16",
               "muon_step tp=2 tiny=1 eps=1e-25 dtype=f32"};
  c.witnesses = {
      "muon_step tp=2 form=gram ns_steps=2 matrices=2", "muon_step dp=3 owner=one matrices=4",
      "muon_step tp=4 cut=columns form=gram ns_steps=1", "muon_step tp=2 dp=2 owner=one eps=64"};
  return c;
}

}  // namespace

void family_muon_step(Registry& r) {
  r.add(muon_step());
  add_ours<primitives::MuonStep>(r, "muon_step");
}

}  // namespace shardproof
