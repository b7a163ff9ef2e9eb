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

// How tp cuts W.
bool by_columns(const Case& line) { return line.text("parallel") == "row"; }
bool by_rows(const Case& line) { return line.text("parallel") == "column"; }
bool sums_once_a_step(const Case& line) { return line.text("sync") != "each"; }

// Elements of a row of the block of W, and of b.
std::vector<int64_t> widths_of(const Case& line) {
  std::vector<int64_t> widths{line.at("in") / (by_columns(line) ? line.ranks(Axis::tp) : 1)};
  if (line.on("bias")) widths.push_back(1);
  return widths;
}

int64_t rows_of(const Case& line) {
  return line.at("out") / (by_rows(line) ? line.ranks(Axis::tp) : 1);
}

int64_t rows_of_a_block(int64_t rows, int64_t ranks) { return (rows + ranks - 1) / ranks; }

// No other rank has a part of what this one has: nothing travels.
bool is_alone(const Case& line) {
  return axes_of_shards(line).empty() && axes_of_shard_copies(line).empty();
}

Refusal uncut_by_tp(const Case& line) {
  const int64_t tp = line.ranks(Axis::tp);
  if (by_rows(line)) return undivided(line, "out", tp, "tp");
  if (by_columns(line)) return undivided(line, "in", tp, "tp");
  return first_refusal(
      when(tp > 1, "parallel=column or parallel=row with tp above 1", said(line, "tp"),
           "say which way tp cuts W, or leave tp at 1"),
      when(line.on("sp"), "parallel=column or parallel=row with sp=on", said(line, "parallel"),
           "tokens are cut over tp where a linear is: leave one of them out"));
}

}  // namespace

std::optional<Rejected> refused_sharded_linear(const Case& line) {
  if (auto refused = first_refusal(other_axes(line), uncut_by_tp(line), uncut_tokens(line)))
    return refused;
  int64_t ranks = 1;
  for (Axis a : axes_of_shards(line)) ranks *= line.ranks(a);
  const std::vector<int64_t> widths = widths_of(line);
  return first_refusal(
      countable(line, {"tokens", "in"}), countable(line, {"tokens", "out"}),
      countable("all flat shards", {ranks, rows_of_a_block(rows_of(line), ranks),
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
  return {rows_of(line), group.size(), group.rank(), widths_of(line)};
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

View shard_of_rank(const FlatShards& s, const View& all, int rank) {
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
    unpack_parameters(s, rank, shard_of_rank(s, all, rank), whole);
}

void ShardedLinear::reduce(Parallel& p, Communicator& group, const View& in, const View& out) {
  reduce_scatter(p.rank, group, in, out, 0);
}

View ShardedLinear::sum_over_shards(Parallel& p, const FlatShards& s, const Views& whole) {
  const DType wire = type_on_wire(p);
  const View all = p.workspace(wire, {s.ranks * s.elements}), sum = p.workspace(wire, {s.elements});
  set_zero(all);
  for (int rank = 0; rank < s.ranks; ++rank)
    pack_gradients(s, rank, whole, shard_of_rank(s, all, rank));
  if (s.ranks > 1)
    reduce(p, group_of_shards(p), all, sum);
  else
    convert(all, sum);
  return sum;
}

void ShardedLinear::sum_copies(Parallel& p, const View& flat) {
  for (Axis axis : axes_of_shard_copies(p.rank.line()))
    all_reduce(p.rank, p.rank.along(axis), flat, flat);
}

void ShardedLinear::reduce_gradients(Parallel& p, const FlatShards& s, const Views& whole,
                                     const Views& own) {
  const View sum = sum_over_shards(p, s, whole);
  sum_copies(p, sum);
  unpack_gradients(s, sum, own);
}

// ---- A step of several microbatches

void StepSums::add(const Views& parts, DType type) {
  const bool first = sums_.empty();
  for (size_t k = 0; k < parts.size(); ++k) {
    if (first) sums_.emplace_back(type, parts[k].shape);
    const View& sum = sums_[k].view();
    if (first)
      convert(parts[k], sum);
    else
      add_into(parts[k], sum);
  }
}

Views StepSums::views() const {
  Views all;
  for (const Kept& sum : sums_) all.push_back(sum.view());
  return all;
}

Views ShardedLinear::part_of_step(Parallel& p, const FlatShards& s, const Views& whole) {
  const Case& line = p.rank.line();
  if (line.text("sync") != "shards" || is_alone(line)) return whole;
  return {sum_over_shards(p, s, whole)};
}

void ShardedLinear::finish_gradients(Parallel& p, const FlatShards& s, const Views& part,
                                     const Views& own) {
  const Case& line = p.rank.line();
  if (is_alone(line)) {
    for (size_t k = 0; k < own.size(); ++k) convert(part[k], own[k]);
  } else if (line.text("sync") == "shards") {
    sum_copies(p, part[0]);
    unpack_gradients(s, part[0], own);
  } else {
    reduce_gradients(p, s, part, own);
  }
}

void ShardedLinear::add_gradient(const View& own, const View& sum) { add_into(own, sum); }

bool ShardedLinear::ends_step(const Rank& rank, const ShardedSaved&) const {
  return rank.ends_step();
}
void ShardedLinear::add_to_step(Parallel& p, const Views& part, bool) {
  step_.add(part, type_on_wire(p));
}
void ShardedLinear::end_step(Parallel& p, const FlatShards& s, const Views& own) {
  finish_gradients(p, s, step_.views(), own);
  step_.clear();
}

// ---- The layer

namespace {

// Of a parameter of the block, whose own rows are these.
std::vector<int64_t> block_shape(const FlatShards& s, const View& own) {
  return with_extent(own.shape, 0, s.rows());
}

DType type_of_own_gradient(const Parallel& p, DType otherwise) {
  return type_of_key(p.rank.line(), "local_grad", otherwise);
}

// Activations are summed over tp in the storage type.
Parallel over_tp(const Parallel& p) {
  Parallel of = p;
  of.wire = p.storage;
  return of;
}

}  // namespace

void ShardedRow::bias_gradient(Parallel& p, const View& g, const View& whole, const View& db) {
  Parallel of = p;
  of.wire = type_of_own_gradient(p, type_of_key(p.rank.line(), "wire", p.storage));
  RowParallel::bias_gradient(of, g, whole, db);
}

ShardedLinear::ShardedLinear(std::unique_ptr<ColumnParallel> column,
                             std::unique_ptr<RowParallel> row)
    : column_(std::move(column)), row_(std::move(row)) {}

View block_of_tp(const Parallel& p, const View& whole) {
  const Case& line = p.rank.line();
  if (by_rows(line)) return own_block(p, whole, 0);
  return by_columns(line) && last(whole) > 0 ? own_block(p, whole, 1) : whole;
}

View ShardedLinear::own_shard(Parallel& p, const FlatShards& s, const View& whole) const {
  return block_of_tp(p, whole).narrow(0, s.first[size_t(s.own)], s.count(s.own));
}

View ShardedLinear::own_gradient(Parallel& p, const FlatShards& s, const View& whole) const {
  return ShardedLinear::own_shard(p, s, whole);
}

Views ShardedLinear::own_parameters(Parallel& p, const FlatShards& s,
                                    std::span<const View> parameters) const {
  Views own(parameters.begin(), parameters.end());
  if (p.rank.line().on("whole_weight"))
    for (View& v : own) v = own_shard(p, s, v);
  return own;
}

// The gradient of a parameter that was handed whole: own rows, zeros elsewhere.
Views ShardedLinear::own_gradients(Parallel& p, const FlatShards& s,
                                   std::span<const View> gradients) const {
  Views own(gradients.begin(), gradients.end());
  if (!p.rank.line().on("whole_weight")) return own;
  for (View& v : own) {
    if (!p.rank.accumulates()) set_zero(v);
    v = own_gradient(p, s, v);
  }
  return own;
}

std::unique_ptr<Saved> ShardedLinear::forward(Rank& rank, std::span<const View> inputs,
                                              std::span<const View> outputs) {
  const Case& line = rank.line();
  if (auto refused = refused_sharded_linear(line)) throw *refused;
  Parallel p(rank), tp = over_tp(p);
  const FlatShards s = shards_of(p);
  auto saved = std::make_unique<ShardedSaved>();
  saved->x = inputs[0];
  saved->own = own_parameters(p, s, inputs.subspan(1));
  Views whole = saved->own;
  if (s.ranks > 1) {
    for (View& v : whole) {
      if (line.on("reshard")) {
        v = p.workspace(p.storage, block_shape(s, v));
      } else {
        saved->whole.emplace_back(p.storage, block_shape(s, v));
        v = saved->whole.back().view();
      }
    }
    gather(p, s, saved->own, whole);
  }
  const View b = whole.size() > 1 ? whole[1] : View{};
  if (by_columns(line))
    row_->forward(tp, saved->x, whole[0], b, outputs[0]);
  else
    column_->forward(tp, saved->x, whole[0], b, outputs[0]);
  return saved;
}

View ShardedLinear::weight_again(Parallel& p, const FlatShards& s, const ShardedSaved& saved) {
  if (!saved.whole.empty()) return saved.whole[0].view();
  if (s.ranks == 1) return saved.own[0];
  Views whole;
  for (const View& own : saved.own) whole.push_back(p.workspace(p.storage, block_shape(s, own)));
  gather(p, s, saved.own, whole);
  return whole[0];
}

Views ShardedLinear::gradients_of_own_tokens(Parallel& p, const FlatShards& s,
                                             const ShardedSaved& saved, const View& g,
                                             const View& dx) {
  const Case& line = p.rank.line();
  const View w = weight_again(p, s, saved);
  const DType type = type_of_own_gradient(p, is_alone(line) ? p.accumulate : type_on_wire(p));
  Views whole;
  for (const View& own : saved.own)
    if (!line.on("frozen")) whole.push_back(p.workspace(type, block_shape(s, own)));
  const View dw = whole.empty() ? View{} : whole[0], db = whole.size() > 1 ? whole[1] : View{};
  Parallel tp = over_tp(p);
  if (by_columns(line))
    row_->backward(tp, saved.x, w, g, dx, dw, db);
  else
    column_->backward(tp, saved.x, w, g, dx, dw, db);
  return whole;
}

void ShardedLinear::backward(Rank& rank, Saved& state, std::span<const View> cotangents,
                             std::span<const View> gradients) {
  Parallel p(rank);
  const FlatShards s = shards_of(p);
  const auto& saved = static_cast<const ShardedSaved&>(state);
  const Views whole = gradients_of_own_tokens(p, s, saved, cotangents[0], gradients[0]);
  if (whole.empty()) return;

  const Views part = part_of_step(p, s, whole), own = own_gradients(p, s, gradients.subspan(1));
  if (!rank.accumulates()) return finish_gradients(p, s, part, own);
  Views fresh;
  for (const View& v : own) fresh.push_back(fresh_gradient(p, v));
  if (sums_once_a_step(rank.line())) {
    const bool last = ends_step(rank, saved);
    add_to_step(p, part, last);
    if (!last) return;
    end_step(p, s, fresh);
  } else {
    finish_gradients(p, s, part, fresh);
  }
  for (size_t k = 0; k < own.size(); ++k) add_gradient(fresh[k], own[k]);
}

}  // namespace shardproof::primitives
