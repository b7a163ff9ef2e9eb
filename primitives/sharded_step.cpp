#include "primitives/sharded_step.hpp"

#include <algorithm>
#include <cmath>
#include <string>

#include "primitives/bodies.hpp"
#include "primitives/line.hpp"

namespace shardproof::primitives {

// ---- What is read from a line

namespace {

struct Nothing : Saved {};

constexpr size_t parameters_of_a_layer = 3;  // gamma, w, b

bool is_adam(const Case& line) { return line.text("rule") == "adamw"; }
bool keeps_masters(const Case& line) { return line.text("master") == "kept"; }
bool clips(const Case& line) { return !line.text("clip").empty(); }
bool has_scaler(const Case& line) { return line.text("loss_scale") != "off"; }

bool averages_over(const Case& line, Axis axis) {
  const std::string& how = line.text("reduce");
  return how == "mean" || (how == "mean_dp" && axis == Axis::dp);
}

}  // namespace

int64_t microbatches_of(const Case& line) { return line.at("microbatches"); }

std::optional<Rejected> refused_sharded_step(const Case& line) {
  int64_t ranks = 1;
  for (Axis a : axes_of_shards(line)) ranks *= line.ranks(a);
  const int64_t elements = line.at("hidden") + (line.at("hidden") + 1) * line.at("rows");
  return first_refusal(
      other_axes(line),
      when(clips(line) && line.ranks(Axis::tp) > 1, "tp=1 with clip=", said(line, "tp"),
           "a norm spans what tp cuts, which replicated_clip judges: leave clip out"),
      when(line.on("overflow") && !has_scaler(line), "loss_scale=16 with overflow=on",
           said(line, "loss_scale"), "without a scaler nobody asks whether a number is finite"),
      when(line.on("grows") && !has_scaler(line), "loss_scale=16 with grows=on",
           said(line, "loss_scale"), "there is no scale that grows"),
      when(
          keeps_masters(line) && line.on("overflow"), "master=loaded with overflow=on",
          said(line, "master"),
          "of a step that is not taken, parameters that are not their masters would be due as they "
          "are or as masters make them"),
      when(clips(line) && line.on("overflow"), "no clip= with overflow=on", said(line, "clip"),
           "a step that is not taken has no norm: leave clip out"),
      countable("the flat buffer", {ranks, (elements + ranks - 1) / ranks}));
}

// ---- The flat buffer

FlatBuffer::FlatBuffer(const std::vector<std::vector<int64_t>>& shapes, int p, int r)
    : ranks(p), own(r) {
  int64_t at = 0;
  for (const std::vector<int64_t>& shape : shapes) {
    first.push_back(at);
    matrix.push_back(shape.size() > 1);
    at += product(shape);
  }
  first.push_back(at);
  block = (at + p - 1) / p;
}

int64_t FlatBuffer::begin(int rank) const { return std::min(rank * block, elements()); }

std::vector<Piece> FlatBuffer::pieces(int rank) const {
  std::vector<Piece> list;
  for (size_t k = 0; k + 1 < first.size(); ++k) {
    const int64_t from = std::max(first[k], begin(rank)),
                  to = std::min(first[k + 1], begin(rank + 1));
    if (from < to) list.push_back({k, from, to - from});
  }
  return list;
}

StepTensors::StepTensors(const Case& line, std::span<const View> in, std::span<const View> out) {
  const auto take = [](std::span<const View>& from) {
    const View next = from.front();
    from = from.subspan(1);
    return next;
  };
  for (size_t k = 0; k < parameters_of_a_layer; ++k) parameters.push_back(take(in));
  for (size_t k = 0; k < parameters_of_a_layer; ++k) gradients.push_back(take(in));
  for (size_t k = 0; k < parameters_of_a_layer; ++k) next.push_back(take(out));
  if (keeps_masters(line)) master = take(in);
  m = take(in), next_master = take(out), next_m = take(out);
  if (is_adam(line)) v = take(in), next_v = take(out);
  if (clips(line)) norm = take(out);
  if (has_scaler(line)) next_scale = take(out);
}

void pack(const std::vector<int64_t>& places, const std::vector<View>& all, const View& flat) {
  set_zero(flat);
  for (size_t k = 0; k < all.size(); ++k)
    convert(all[k], flat.narrow(0, places[k], all[k].elements()));
}

void unpack(const std::vector<int64_t>& places, const View& flat, const std::vector<View>& all) {
  for (size_t k = 0; k < all.size(); ++k)
    convert(flat.narrow(0, places[k], all[k].elements()), all[k]);
}

PieceTensors part_of(const PieceTensors& own, int64_t first, int64_t count) {
  PieceTensors part = own;
  for (View* v : {&part.master, &part.m, &part.v, &part.gradient, &part.next_master, &part.next_m,
                  &part.next_v})
    if (v->data) *v = v->narrow(0, first, count);
  return part;
}

Communicator& group_over(Parallel& p, const std::vector<Axis>& axes) {
  return axes.empty() ? p.rank.along(Axis::cp) : p.rank.along(axes);
}

std::vector<Axis> axes_of_step(const Case& line) {
  return with_ranks(line, {Axis::tp, Axis::cp, Axis::dp});
}

FlatBuffer ShardedStep::flat_of(Parallel& p, const StepTensors& t) const {
  const Communicator& group = group_of_shards(p);
  std::vector<std::vector<int64_t>> shapes;
  for (const View& v : t.parameters) shapes.push_back(v.shape);
  return {shapes, group.size(), group.rank()};
}

// ---- Gradients

std::vector<Axis> ShardedStep::gathered_over(const Case& line) const {
  return axes_of_shards(line);
}

DType ShardedStep::type_on_wire(const Parallel& p) const { return p.wire; }

void ShardedStep::pack_gradients(const FlatBuffer& f, const std::vector<View>& all,
                                 const View& flat) {
  pack(f.first, all, flat);
}

void ShardedStep::reduce(Parallel& p, Communicator& group, const View& in, const View& out,
                         Reduce how) {
  reduce_scatter(p.rank, group, in, out, 0, how);
}

void ShardedStep::reduce_copies(Parallel& p, const View& shard, Reduce how) {
  for (Axis axis : axes_of_shard_copies(p.rank.line()))
    all_reduce(p.rank, p.rank.along(axis), shard, shard, how);
}

std::vector<View> gradients_of(const StepTensors& t, int64_t microbatches, int64_t which) {
  std::vector<View> all = t.gradients;
  if (microbatches > 1)
    for (View& g : all) g = g.narrow(0, which, 1);
  return all;
}

View ShardedStep::own_sum(Parallel& p, const FlatBuffer& f, const StepTensors& t, DType type) {
  const int64_t n = microbatches_of(p.rank.line());
  const View sum = p.workspace(type, {f.padded()});
  pack_gradients(f, gradients_of(t, n, 0), sum);
  const View more = n > 1 ? p.workspace(type, {f.padded()}) : View();
  for (int64_t i = 1; i < n; ++i) {
    pack_gradients(f, gradients_of(t, n, i), more);
    add_into(more, sum);
  }
  return sum;
}

Reduce ShardedStep::reduction(const Case& line, const std::vector<Axis>& axes) const {
  for (Axis axis : axes)
    if (!averages_over(line, axis)) return Reduce::sum;
  return Reduce::avg;
}

// One call over dp and cp sums both where only one of them is averaged.
double ShardedStep::left_to_divide(const Case& line) const {
  double divisor = line.text("loss") == "mean" ? double(microbatches_of(line)) : 1;
  const std::vector<Axis> axes = axes_of_shards(line);
  if (reduction(line, axes) == Reduce::sum)
    for (Axis axis : axes)
      if (averages_over(line, axis)) divisor *= line.ranks(axis);
  return divisor;
}

View ShardedStep::reduced_gradient(Parallel& p, const FlatBuffer& f, const StepTensors& t) {
  const Case& line = p.rank.line();
  const bool alone = f.ranks == 1 && axes_of_shard_copies(line).empty();
  const DType wire = alone ? p.accumulate : type_on_wire(p);
  const View all = own_sum(p, f, t, wire);
  View own = all;
  if (f.ranks > 1) {
    own = p.workspace(wire, {f.block});
    reduce(p, group_of_shards(p), all, own, reduction(line, axes_of_shards(line)));
  }
  reduce_copies(p, own, reduction(line, axes_of_shard_copies(line)));
  const View gradient = p.workspace(p.accumulate, {f.count(f.own)});
  convert(own.narrow(0, 0, f.count(f.own)), gradient);
  const double divisor = left_to_divide(line) * scale_of_loss(line);
  if (divisor != 1) scale(gradient, gradient, 1, divisor);
  return gradient;
}

// ---- A scaled loss

double ShardedStep::scale_of_loss(const Case& line) const {
  return has_scaler(line) ? number_of(line, "loss_scale") : 1;
}

void ShardedStep::find_overflow(Parallel&, const View& gradient, const View& own) {
  perform(NotFinite{tensor(gradient), tensor(own)}, "a look for what is not finite");
}

void ShardedStep::agree(Parallel& p, const View& own, const View& all) {
  const std::vector<Axis> axes = axes_of_step(p.rank.line());
  if (axes.empty()) return convert(own, all);
  all_reduce(p.rank, p.rank.along(axes), own, all, Reduce::max);
}

double ShardedStep::next_scale(const Case& line, bool overflow) const {
  const double scale = number_of(line, "loss_scale");
  return overflow ? scale / 2 : line.on("grows") ? scale * 2 : scale;
}

bool ShardedStep::overflows(Parallel& p, const StepTensors& t, const View& gradient) {
  const View own = p.workspace(p.accumulate, {1}), all = p.workspace(p.accumulate, {1});
  find_overflow(p, gradient, own);
  agree(p, own, all);
  const bool overflow = downloaded(all)[0] != 0;
  perform(Fill{tensor(t.next_scale), next_scale(p.rank.line(), overflow)}, "a scale of the loss");
  return overflow;
}

void ShardedStep::keep(Parallel&, const FlatBuffer&, const StepTensors& t,
                       const PieceTensors& own) {
  convert(own.master, own.next_master);
  convert(own.m, own.next_m);
  if (own.v.data) convert(own.v, own.next_v);
  for (size_t k = 0; k < t.parameters.size(); ++k) convert(t.parameters[k], t.next[k]);
}

// ---- The norm

void ShardedStep::sum_squares(Parallel& p, const FlatBuffer& f, const View& own,
                              const View& total) {
  if (f.ranks == 1) return convert(own, total);
  all_reduce(p.rank, group_over(p, gathered_over(p.rank.line())), own, total);
}

View ShardedStep::clipped(Parallel& p, const FlatBuffer& f, const StepTensors& t,
                          const View& gradient) {
  const View own = p.workspace(p.accumulate, {1}), total = p.workspace(p.accumulate, {1}),
             scaled = p.workspace(p.accumulate, gradient.shape);
  perform(SumOfSquares{tensor(gradient), Tensor{}, tensor(own)}, "a sum of squares");
  sum_squares(p, f, own, total);
  perform(SquareRoot{tensor(total), tensor(t.norm)}, "a norm");
  perform(
      Clipped{tensor(gradient), tensor(total), tensor(scaled), number_of(p.rank.line(), "clip")},
      "clipping");
  return scaled;
}

// ---- The update

StepNumbers ShardedStep::numbers(const Case& line) const {
  StepNumbers n;
  n.lr = number_of(line, "lr"), n.decay = number_of(line, "decay");
  n.momentum = 0.5, n.beta1 = 0.9, n.beta2 = 0.95, n.eps = number_of(line, "eps");
  const double step = double(line.at("step"));
  n.correction1 = 1 - std::pow(n.beta1, step), n.correction2 = 1 - std::pow(n.beta2, step);
  return n;
}

bool ShardedStep::decays(const FlatBuffer& f, const Piece& piece) const {
  return f.matrix[piece.parameter];
}

View ShardedStep::own_state(Parallel&, const FlatBuffer& f, const View& whole) const {
  return whole.narrow(0, f.begin(f.own), f.count(f.own));
}

// Before the first step masters are what was loaded into the parameters.
View ShardedStep::own_master(Parallel& p, const FlatBuffer& f, const StepTensors& t) {
  if (t.master.data)
    return p.rank.line().text("state") == "whole" ? own_state(p, f, t.master) : t.master;
  const View own = own_shard_of_parameters(p, f, t).narrow(0, 0, f.count(f.own)),
             master = p.workspace(p.accumulate, own.shape);
  convert(own, master);
  return master;
}

View ShardedStep::own_shard_of_parameters(Parallel& p, const FlatBuffer& f, const StepTensors& t) {
  const View all = p.workspace(p.storage, {f.padded()});
  pack(f.first, t.parameters, all);
  return all.narrow(0, f.own * f.block, f.block);
}

PieceTensors ShardedStep::own_tensors(Parallel& p, const FlatBuffer& f, const StepTensors& t) {
  const bool whole = p.rank.line().text("state") == "whole";
  const auto own = [&](const View& v) { return whole && v.data ? own_state(p, f, v) : v; };
  return {own_master(p, f, t), own(t.m), own(t.v), View{}, t.next_master, t.next_m, t.next_v};
}

void ShardedStep::update(Parallel& p, const PieceTensors& t, const StepNumbers& by) {
  const bool wide = p.accumulate == DType::f64;
  const Tensor x = tensor(t.master), m = tensor(t.m), g = tensor(t.gradient),
               next_x = tensor(t.next_master), next_m = tensor(t.next_m);
  if (t.v.data)
    perform(AdamStep{x, m, tensor(t.v), g, next_x, next_m, tensor(t.next_v), by, wide},
            "a step of AdamW");
  else
    perform(MomentumStep{x, m, g, next_x, next_m, by, wide}, "a step of SGD");
}

void ShardedStep::update_shard(Parallel& p, const FlatBuffer& f, const PieceTensors& own) {
  const StepNumbers by = numbers(p.rank.line());
  for (const Piece& piece : f.pieces(f.own)) {
    StepNumbers of_piece = by;
    if (!decays(f, piece)) of_piece.decay = 0;
    update(p, part_of(own, piece.first - f.begin(f.own), piece.count), of_piece);
  }
}

// ---- Parameters

void ShardedStep::gather(Parallel& p, const FlatBuffer&, const StepTensors&, const View& shard,
                         const View& all) {
  all_gather(p.rank, group_over(p, gathered_over(p.rank.line())), shard, all, 0);
}

void ShardedStep::unpack_parameters(const FlatBuffer& f, const View& flat,
                                    const std::vector<View>& all) {
  unpack(f.first, flat, all);
}

void ShardedStep::spread(Parallel& p, const FlatBuffer& f, const StepTensors& t, const View& own) {
  const View shard = p.workspace(p.storage, {f.block});
  set_zero(shard);
  convert(own, shard.narrow(0, 0, f.count(f.own)));
  View all = shard;
  if (f.ranks > 1) {
    all = p.workspace(p.storage, {f.padded()});
    gather(p, f, t, shard, all);
  }
  unpack_parameters(f, all, t.next);
}

std::unique_ptr<Saved> ShardedStep::forward(Rank& rank, std::span<const View> inputs,
                                            std::span<const View> outputs) {
  const Case& line = rank.line();
  if (auto refused = refused_sharded_step(line)) throw *refused;
  Parallel p(rank);
  const StepTensors t(line, inputs, outputs);
  const FlatBuffer f = flat_of(p, t);
  PieceTensors own = own_tensors(p, f, t);
  own.gradient = reduced_gradient(p, f, t);
  if (has_scaler(line) && overflows(p, t, own.gradient)) {
    keep(p, f, t, own);
    return std::make_unique<Nothing>();
  }
  if (clips(line)) own.gradient = clipped(p, f, t, own.gradient);
  update_shard(p, f, own);
  spread(p, f, t, own.next_master);
  return std::make_unique<Nothing>();
}

}  // namespace shardproof::primitives
