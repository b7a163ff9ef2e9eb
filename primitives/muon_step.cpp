#include "primitives/muon_step.hpp"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "primitives/bodies.hpp"
#include "primitives/gemm.hpp"
#include "primitives/line.hpp"

namespace shardproof::primitives {

// ---- What is read from a line

namespace {

struct Nothing : Saved {};

bool owned_by_one(const Case& line) { return line.text("owner") == "one"; }

int cut_dim(const Case& line) {
  const std::string& cut = line.text("cut");
  return cut == "rows" ? 0 : cut == "columns" ? 1 : -1;
}

bool in_half(DType d) { return size_of(d) == 2; }

// Squares of 2^-100 are no numbers of f32, and a norm of such values is 0: eps has to be above it.
constexpr double least_eps_of_tiny = 1e-20;
bool loses_tiny_norms(const Case& line) {
  return line.at("tiny") > 0 && accumulation_of(line) == DType::f32 &&
         number_of(line, "eps") < least_eps_of_tiny;
}

}  // namespace

std::vector<Axis> data_axes(const Case& line) { return with_ranks(line, {Axis::cp, Axis::dp}); }

std::optional<Rejected> refused_muon_step(const Case& line) {
  const DType wire = type_of_key(line, "wire", line.dtype());
  const int64_t edge = line.at("hidden") + line.at("matrices"), count = line.at("matrices");
  int64_t ranks = line.ranks(Axis::tp);
  for (Axis a : data_axes(line)) ranks *= line.ranks(a);
  return first_refusal(
      other_axes(line),
      when(
          in_half(wire) && !data_axes(line).empty(), "a wire of f32 or f64 with dp or cp",
          "wire of " + std::string(name(wire)),
          "five iterations make up to 860 times as much of what a gradient is off by, and no bound "
          "says anything: add wire=f32"),
      when(in_half(type_of_key(line, "acc", DType::f64)), "acc=f32 or acc=f64", said(line, "acc"),
           "no bound says anything of iterations in half precision: leave acc out"),
      when(loses_tiny_norms(line), "eps of 1e-20 or more with tiny in f32", said(line, "eps"),
           "squares of 2^-100 vanish in f32, so that no norm is left but eps: raise it, or add "
           "acc=f64"),
      countable("all matrices of all ranks",
                {ranks, count, std::max(edge, line.at("rows")), line.at("rows") + edge}));
}

// ---- Matrices and flat buffers

int64_t CutMatrix::block() const {
  const int64_t extent = cut == 0 ? rows : columns;
  return (extent + ranks - 1) / ranks;
}

int64_t CutMatrix::first(int rank) const {
  return std::min(rank * block(), cut == 0 ? rows : columns);
}

std::vector<int64_t> CutMatrix::shape(int rank) const {
  if (cut < 0) return whole();
  return with_extent(whole(), cut, count(rank));
}

int64_t CutMatrix::padded() const {
  return product(cut < 0 ? whole() : with_extent(whole(), cut, block()));
}

MuonTensors::MuonTensors(std::span<const View> in, std::span<const View> out) {
  const size_t n = in.size() / 3;
  const auto part = [n](std::span<const View> of, size_t k) {
    return Views(of.begin() + ptrdiff_t(k * n), of.begin() + ptrdiff_t((k + 1) * n));
  };
  w = part(in, 0), g = part(in, 1), m = part(in, 2);
  next_w = part(out, 0), next_m = part(out, 1);
}

Communicator& group_of_data(Parallel& p) { return group_over(p, data_axes(p.rank.line())); }

View shaped(View v, std::vector<int64_t> shape) {
  v.strides = row_major(shape);
  v.shape = std::move(shape);
  return v;
}

OwnedBuffer laid_out(const Views& shards, const std::vector<std::vector<size_t>>& by_owner) {
  OwnedBuffer b;
  b.places.resize(shards.size());
  for (const auto& of_owner : by_owner) {
    int64_t at = 0;
    for (size_t k : of_owner) at += shards[k].elements();
    b.block = std::max(b.block, at);
  }
  for (size_t r = 0; r < by_owner.size(); ++r) {
    int64_t at = int64_t(r) * b.block;
    for (size_t k : by_owner[r]) b.places[k] = std::exchange(at, at + shards[k].elements());
  }
  return b;
}

MuonNumbers MuonStep::numbers(const Case& line) const {
  MuonNumbers n;
  n.momentum = number_of(line, "mu");
  n.weight = line.on("average") ? 1 - n.momentum : 1;
  n.lr = number_of(line, "lr"), n.decay = number_of(line, "decay");
  n.eps = number_of(line, "eps");
  n.nesterov = line.on("nesterov"), n.iterations = line.at("ns_steps");
  return n;
}

std::vector<CutMatrix> MuonStep::matrices(Parallel& p) const {
  const Case& line = p.rank.line();
  std::vector<CutMatrix> list;
  for (int64_t k = 0; k < line.at("matrices"); ++k) {
    CutMatrix m{line.at("rows"), line.at("hidden") + k, cut_dim(line), p.tp.size(), p.tp.rank()};
    if (k % 2 == 1) std::swap(m.rows, m.columns);
    list.push_back(m);
  }
  return list;
}

MuonStep::Indices MuonStep::owned(Parallel& p, size_t matrices, int rank) const {
  const bool one = owned_by_one(p.rank.line());
  const int ranks = group_of_data(p).size();
  Indices list;
  for (size_t k = 0; k < matrices; ++k)
    if (!one || owner_of(k, ranks) == rank) list.push_back(k);
  return list;
}

std::vector<MuonStep::Indices> MuonStep::by_owner(Parallel& p, size_t matrices) const {
  std::vector<Indices> list;
  const int owners = owned_by_one(p.rank.line()) ? group_of_data(p).size() : 1;
  for (int r = 0; r < owners; ++r) list.push_back(owned(p, matrices, r));
  return list;
}

// ---- Gradients

void MuonStep::reduce(Parallel& p, Communicator& data, const View& in, const View& out) {
  if (owned_by_one(p.rank.line()))
    reduce_scatter(p.rank, data, in, out, 0);
  else
    all_reduce(p.rank, data, in, out);
}

Views MuonStep::reduced_gradients(Parallel& p, const MuonTensors& t) {
  Communicator& data = group_of_data(p);
  const auto owners = by_owner(p, t.g.size());
  const OwnedBuffer b = laid_out(t.g, owners);
  const size_t own_part = owners.size() > 1 ? size_t(data.rank()) : 0;
  const bool alone = data.size() == 1;
  const DType wire = alone ? p.accumulate : p.wire;
  const View all = p.workspace(wire, {b.block * int64_t(owners.size())});
  pack(b.places, t.g, all);
  View sum = all;
  if (!alone) {
    sum = p.workspace(wire, {b.block});
    reduce(p, data, all, sum);
  }
  Views own;
  for (size_t k : owners[own_part]) {
    own.push_back(p.workspace(p.accumulate, t.g[k].shape));
    const int64_t place = b.places[k] - int64_t(own_part) * b.block;
    convert(sum.narrow(0, place, own.back().elements()), own.back());
  }
  return own;
}

void MuonStep::direction(Parallel& p, const View& g, const View& m, const View& next_m,
                         const View& u) {
  const MuonNumbers by = numbers(p.rank.line());
  const View weighed = p.workspace(p.accumulate, g.shape);
  scale(g, weighed, by.weight);
  combine(weighed, m, by.momentum, next_m);
  if (by.nesterov)
    combine(weighed, next_m, by.momentum, u);
  else
    convert(next_m, u);
}

// ---- Over tp

void MuonStep::gather(Parallel& p, const View& shard, const View& all) {
  all_gather(p.rank, p.tp, shard, all, 0);
}

void MuonStep::unpack_shard(const CutMatrix& m, int rank, const View& flat, const View& whole) {
  const int64_t elements = product(m.shape(rank));
  convert(flat.narrow(0, 0, elements), whole.narrow(m.cut, m.first(rank), m.count(rank)));
}

Views MuonStep::gathered(Parallel& p, const std::vector<CutMatrix>& list, const Views& shards) {
  std::vector<int64_t> places;
  int64_t block = 0;
  for (const CutMatrix& m : list) places.push_back(std::exchange(block, block + m.padded()));
  Views whole;
  if (list.empty()) return whole;
  const View own = p.workspace(p.accumulate, {block}),
             all = p.workspace(p.accumulate, {p.tp.size() * block});
  pack(places, shards, own);
  gather(p, own, all);
  for (size_t k = 0; k < list.size(); ++k) {
    whole.push_back(p.workspace(p.accumulate, list[k].whole()));
    for (int r = 0; r < p.tp.size(); ++r)
      unpack_shard(list[k], r, all.narrow(0, r * block + places[k], list[k].padded()),
                   whole.back());
  }
  return whole;
}

View MuonStep::own_part(Parallel&, const CutMatrix& m, const View& whole) {
  return m.cut < 0 ? whole : whole.narrow(m.cut, m.first(m.own), m.count(m.own));
}

void MuonStep::sum_squares(Parallel& p, const View& own, const View& total) {
  all_reduce(p.rank, p.tp, own, total);
}

void MuonStep::sum_grams(Parallel& p, const View& own, const View& total) {
  all_reduce(p.rank, p.tp, own, total);
}

// ---- Newton-Schulz

bool MuonStep::turned(Parallel& p, const CutMatrix& m, const View&) const {
  return by_gram(p.rank.line()) && m.cut >= 0 ? m.cut == 0 : m.rows > m.columns;
}

void MuonStep::normalise(Parallel&, const View& u, const View& square, double eps, const View& x) {
  perform(Normalised{tensor(u), tensor(square), tensor(x), eps}, "a normalisation");
}

void MuonStep::iterate(Parallel& p, const View& gram, bool is_turned, const View& x,
                       const View& next) {
  const MuonNumbers by = numbers(p.rank.line());
  const View square = p.workspace(p.accumulate, gram.shape),
             factor = p.workspace(p.accumulate, gram.shape);
  gemm(plain(gram), plain(gram), square, p.accumulate);
  scale(gram, factor, by.b);
  combine(factor, square, by.c, factor);
  scale(x, next, by.a);
  if (x.elements() == 0) return;
  if (is_turned)
    gemm(plain(x), plain(factor), next, p.accumulate, nullptr, /*add=*/true);
  else
    gemm(plain(factor), plain(x), next, p.accumulate, nullptr, /*add=*/true);
}

namespace {

void gram_of(Parallel& p, const View& x, bool is_turned, const View& gram) {
  if (x.elements() == 0) return set_zero(gram);
  if (is_turned)
    gemm(turned(x), plain(x), gram, p.accumulate);
  else
    gemm(plain(x), turned(x), gram, p.accumulate);
}

}  // namespace

Views MuonStep::normalised(Parallel& p, const Views& u, bool summed) {
  const auto count = int64_t(u.size());
  View squares = p.workspace(p.accumulate, {count});
  for (int64_t k = 0; k < count; ++k)
    perform(SumOfSquares{tensor(u[size_t(k)]), Tensor{}, tensor(squares.narrow(0, k, 1))},
            "a sum of squares");
  if (summed) {
    const View total = p.workspace(p.accumulate, {count});
    sum_squares(p, squares, total);
    squares = total;
  }
  const double eps = numbers(p.rank.line()).eps;
  Views x;
  for (int64_t k = 0; k < count; ++k) {
    x.push_back(p.workspace(p.accumulate, u[size_t(k)].shape));
    normalise(p, u[size_t(k)], squares.narrow(0, k, 1), eps, x.back());
  }
  return x;
}

Views MuonStep::iterated(Parallel& p, const std::vector<CutMatrix>& list, const Views& x,
                         bool summed) {
  std::vector<int64_t> sides, places;
  int64_t elements = 0;
  for (size_t k = 0; k < x.size(); ++k) {
    sides.push_back(x[k].shape[turned(p, list[k], x[k]) ? 1 : 0]);
    places.push_back(std::exchange(elements, elements + sides[k] * sides[k]));
  }
  View grams = p.workspace(p.accumulate, {elements});
  const auto gram = [&](size_t k) {
    return shaped(grams.narrow(0, places[k], sides[k] * sides[k]), {sides[k], sides[k]});
  };
  for (size_t k = 0; k < x.size(); ++k) gram_of(p, x[k], turned(p, list[k], x[k]), gram(k));
  if (summed) {
    const View total = p.workspace(p.accumulate, {elements});
    sum_grams(p, grams, total);
    grams = total;
  }
  Views next;
  for (size_t k = 0; k < x.size(); ++k) {
    next.push_back(p.workspace(p.accumulate, x[k].shape));
    iterate(p, gram(k), turned(p, list[k], x[k]), x[k], next[k]);
  }
  return next;
}

Views MuonStep::orthogonalised(Parallel& p, const std::vector<CutMatrix>& list, const Views& u,
                               bool summed) {
  if (list.empty()) return {};
  Views x = normalised(p, u, summed);
  const int64_t iterations = numbers(p.rank.line()).iterations;
  for (int64_t i = 0; i < iterations; ++i) x = iterated(p, list, x, summed);
  return x;
}

Views MuonStep::directions_made_orthogonal(Parallel& p, const std::vector<CutMatrix>& list,
                                           const Views& u) {
  const bool cut = cut_dim(p.rank.line()) >= 0 && p.tp.size() > 1;
  if (!cut || by_gram(p.rank.line())) return orthogonalised(p, list, u, cut);
  Views o = orthogonalised(p, list, gathered(p, list, u), false);
  for (size_t k = 0; k < list.size(); ++k) o[k] = own_part(p, list[k], o[k]);
  return o;
}

// ---- The update

double MuonStep::scale_of(Parallel& p, const CutMatrix& m, const View&) const {
  const double rows = double(m.rows), columns = double(m.columns);
  if (p.rank.line().text("scale") == "match_rms_adamw")
    return 0.2 * std::sqrt(std::max(rows, columns));
  return std::sqrt(std::max(1.0, rows / columns));
}

void MuonStep::update(Parallel& p, const View& w, const View& o, double by_scale,
                      const View& next) {
  const MuonNumbers by = numbers(p.rank.line());
  const View decayed = p.workspace(p.accumulate, w.shape);
  scale(w, decayed, 1 - by.lr * by.decay);
  combine(decayed, o, -by.lr * by_scale, next);
}

void MuonStep::publish(Parallel& p, const View& own, const View& all) {
  all_gather(p.rank, group_of_data(p), own, all, 0);
}

void MuonStep::hand_out(Parallel& p, const Views& own, const MuonTensors& t) {
  const int rank = group_of_data(p).rank();
  const auto owners = by_owner(p, t.w.size());
  if (owners.size() == 1) {
    for (size_t k = 0; k < own.size(); ++k) convert(own[k], t.next_w[k]);
    return;
  }
  const OwnedBuffer b = laid_out(t.w, owners);
  const View part = p.workspace(p.storage, {b.block}),
             all = p.workspace(p.storage, {b.block * int64_t(owners.size())});
  set_zero(part);
  for (size_t i = 0; i < own.size(); ++i)
    convert(own[i],
            part.narrow(0, b.places[owners[size_t(rank)][i]] - rank * b.block, own[i].elements()));
  publish(p, part, all);
  unpack(b.places, all, t.next_w);
}

Views MuonStep::directions(Parallel& p, const MuonTensors& t, const Indices& own) {
  const Views g = reduced_gradients(p, t);
  Views u;
  for (size_t i = 0; i < own.size(); ++i) {
    u.push_back(p.workspace(p.accumulate, g[i].shape));
    direction(p, g[i], t.m[own[i]], t.next_m[own[i]], u[i]);
  }
  return u;
}

std::unique_ptr<Saved> MuonStep::forward(Rank& rank, std::span<const View> inputs,
                                         std::span<const View> outputs) {
  if (auto refused = refused_muon_step(rank.line())) throw *refused;
  Parallel p(rank);
  const MuonTensors t(inputs, outputs);
  const Indices own = owned(p, t.w.size(), group_of_data(p).rank());
  const std::vector<CutMatrix> all = matrices(p);
  std::vector<CutMatrix> list;
  for (size_t k : own) list.push_back(all[k]);
  const Views o = directions_made_orthogonal(p, list, directions(p, t, own));
  Views next;
  for (size_t i = 0; i < own.size(); ++i) {
    const View& w = t.w[own[i]];
    next.push_back(p.workspace(p.storage, w.shape));
    update(p, w, o[i], scale_of(p, list[i], w), next[i]);
  }
  hand_out(p, next, t);
  return std::make_unique<Nothing>();
}

}  // namespace shardproof::primitives
