#include "primitives/sharded.hpp"

#include <algorithm>
#include <numeric>
#include <string>

#include "primitives/gemm.hpp"
#include "primitives/line.hpp"

namespace shardproof::primitives {

// ---- What is read from a line

std::vector<Axis> axes_of_shards(const Case& line) {
  return line.text("shard") == "all" ? with_ranks(line, {Axis::cp, Axis::dp})
                                     : with_ranks(line, {Axis::cp});
}

std::vector<Axis> axes_of_shard_copies(const Case& line) {
  return line.text("shard") == "all" ? std::vector<Axis>{} : with_ranks(line, {Axis::dp});
}

namespace {

// Elements of a row of W, and of b.
std::vector<int64_t> widths_of(const Case& line) {
  std::vector<int64_t> widths{line.at("in")};
  if (line.on("bias")) widths.push_back(1);
  return widths;
}

int64_t rows_of_a_block(int64_t rows, int64_t ranks) { return (rows + ranks - 1) / ranks; }

}  // namespace

std::optional<Rejected> refused_sharded_linear(const Case& line) {
  int64_t ranks = 1;
  for (Axis a : axes_of_shards(line)) ranks *= line.ranks(a);
  const std::vector<int64_t> widths = widths_of(line);
  return first_refusal(
      other_axes(line),
      when(line.ranks(Axis::tp) > 1, "the axes dp and cp only", said(line, "tp"),
           "parameters are cut over dp and cp, not over tp as well: leave tp at 1"),
      uncut_tokens(line), countable(line, {"tokens", "in"}), countable(line, {"tokens", "out"}),
      countable("all flat shards", {ranks, rows_of_a_block(line.at("out"), ranks),
                                    std::accumulate(widths.begin(), widths.end(), int64_t(0))}));
}

// ---- Flat shards

FlatShards::FlatShards(int64_t rows, int p, int r, std::vector<int64_t> row_widths)
    : ranks(p), own(r), widths(std::move(row_widths)) {
  const int64_t block = rows_of_a_block(rows, p);
  for (int64_t rank = 0; rank <= p; ++rank) first.push_back(std::min(rank * block, rows));
  for (int64_t width : widths) {
    places.push_back(elements);
    elements += block * width;
  }
}

FlatShards shards_of(Parallel& p) {
  const Communicator& group = group_of_shards(p);
  const Case& line = p.rank.line();
  return {line.at("out"), group.size(), group.rank(), widths_of(line)};
}

Communicator& group_of_shards(Parallel& p) {
  const std::vector<Axis> axes = axes_of_shards(p.rank.line());
  return axes.empty() ? p.rank.along(Axis::cp) : p.rank.along(axes);
}

namespace {

template <class Each>
void each_parameter(const FlatShards& s, const Views& rows, int64_t first, int64_t count,
                    const View& flat, Each each) {
  for (size_t k = 0; k < rows.size(); ++k)
    each(rows[k].narrow(0, first, count), flat.narrow(0, s.places[k], count * s.widths[k]));
}

View block_of(const FlatShards& s, const View& all, int rank) {
  return all.narrow(0, rank * s.elements, s.elements);
}

}  // namespace

void to_flat(const FlatShards& s, const Views& rows, int64_t first, int64_t count,
             const View& flat) {
  each_parameter(s, rows, first, count, flat, convert);
}

void from_flat(const FlatShards& s, const View& flat, const Views& rows, int64_t first,
               int64_t count) {
  each_parameter(s, rows, first, count, flat,
                 [](const View& row, const View& at) { convert(at, row); });
}

void ShardedLinear::unpack_parameters(const FlatShards& s, int rank, const View& flat,
                                      const Views& whole) {
  from_flat(s, flat, whole, s.first[size_t(rank)], s.count(rank));
}
void ShardedLinear::pack_gradients(const FlatShards& s, int rank, const Views& whole,
                                   const View& flat) {
  to_flat(s, whole, s.first[size_t(rank)], s.count(rank), flat);
}
void ShardedLinear::unpack_gradients(const FlatShards& s, const View& flat, const Views& own) {
  from_flat(s, flat, own, 0, s.count(s.own));
}

// ---- The calls

std::vector<Axis> ShardedLinear::gathered_over(const Case& line) const {
  return axes_of_shards(line);
}
DType ShardedLinear::type_on_wire(const Parallel& p) const { return p.wire; }

void ShardedLinear::gather(Parallel& p, const FlatShards& s, const Views& own, const Views& whole) {
  const View flat = p.workspace(p.storage, {s.elements}),
             all = p.workspace(p.storage, {s.ranks * s.elements});
  set_zero(flat);
  to_flat(s, own, 0, s.count(s.own), flat);
  all_gather(p.rank, p.rank.along(gathered_over(p.rank.line())), flat, all, 0);
  for (int rank = 0; rank < s.ranks; ++rank)
    unpack_parameters(s, rank, block_of(s, all, rank), whole);
}

void ShardedLinear::reduce(Parallel& p, Communicator& group, const View& in, const View& out) {
  reduce_scatter(p.rank, group, in, out, 0);
}

void ShardedLinear::reduce_gradients(Parallel& p, const FlatShards& s, const Views& whole,
                                     const Views& own) {
  const DType wire = type_on_wire(p);
  const View all = p.workspace(wire, {s.ranks * s.elements}), sum = p.workspace(wire, {s.elements});
  set_zero(all);
  for (int rank = 0; rank < s.ranks; ++rank) pack_gradients(s, rank, whole, block_of(s, all, rank));
  if (s.ranks > 1)
    reduce(p, group_of_shards(p), all, sum);
  else
    convert(all, sum);
  sum_copies(p, sum);
  unpack_gradients(s, sum, own);
}

void ShardedLinear::sum_copies(Parallel& p, const View& flat) {
  for (Axis axis : axes_of_shard_copies(p.rank.line()))
    all_reduce(p.rank, p.rank.along(axis), flat, flat);
}

void ShardedLinear::add_gradient(const View& own, const View& sum) { add_into(own, sum); }

// ---- The layer

namespace {

std::vector<int64_t> whole_shape(const Case& line, const View& own) {
  return with_extent(own.shape, 0, line.at("out"));
}

}  // namespace

std::unique_ptr<Saved> ShardedLinear::forward(Rank& rank, std::span<const View> inputs,
                                              std::span<const View> outputs) {
  if (auto refused = refused_sharded_linear(rank.line())) throw *refused;
  Parallel p(rank);
  const FlatShards s = shards_of(p);
  auto saved = std::make_unique<ShardedSaved>();
  saved->x = inputs[0];
  saved->own.assign(inputs.begin() + 1, inputs.end());
  Views whole = saved->own;
  if (s.ranks > 1) {
    for (View& v : whole) {
      const auto shape = whole_shape(rank.line(), v);
      if (rank.line().on("reshard")) {
        v = p.workspace(p.storage, shape);
      } else {
        saved->whole.emplace_back(p.storage, shape);
        v = saved->whole.back().view();
      }
    }
    gather(p, s, saved->own, whole);
  }
  const View b = whole.size() > 1 ? whole[1] : View{};
  gemm(plain(saved->x), turned(whole[0]), outputs[0], p.accumulate, &b);
  return saved;
}

void ShardedLinear::backward(Rank& rank, Saved& state, std::span<const View> cotangents,
                             std::span<const View> gradients) {
  Parallel p(rank);
  into_running_sums(
      p, gradients, [&](auto own) { gradients_of(p, state, cotangents, own); },
      [&](const View& own, const View& sum) { add_gradient(own, sum); });
}

void ShardedLinear::gradients_of(Parallel& p, Saved& state, std::span<const View> cotangents,
                                 std::span<const View> gradients) {
  const Case& line = p.rank.line();
  const auto& saved = static_cast<const ShardedSaved&>(state);
  const FlatShards s = shards_of(p);
  const View& g = cotangents[0];

  View w = saved.own[0];
  if (!saved.whole.empty()) {
    w = saved.whole[0].view();
  } else if (s.ranks > 1) {
    Views whole;
    for (const View& own : saved.own)
      whole.push_back(p.workspace(p.storage, whole_shape(line, own)));
    gather(p, s, saved.own, whole);
    w = whole[0];
  }
  gemm(plain(g), plain(w), gradients[0], p.accumulate);
  if (line.on("frozen")) return;

  const bool alone = s.ranks == 1 && axes_of_shard_copies(line).empty();
  const DType type = type_of_key(line, "local_grad", alone ? p.accumulate : type_on_wire(p));
  const Views own(gradients.begin() + 1, gradients.end());
  Views whole;
  for (const View& v : own) whole.push_back(p.workspace(type, whole_shape(line, v)));
  gemm(turned(g), plain(saved.x), whole[0], p.accumulate);
  if (whole.size() > 1) column_sums(g, whole[1], p.accumulate);
  if (!alone) return reduce_gradients(p, s, whole, own);
  for (size_t k = 0; k < own.size(); ++k) convert(whole[k], own[k]);
}

}  // namespace shardproof::primitives
