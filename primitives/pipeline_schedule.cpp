#include "primitives/pipeline_schedule.hpp"

#include <algorithm>
#include <utility>

#include "primitives/gemm.hpp"
#include "primitives/line.hpp"

namespace shardproof::primitives {

std::optional<Rejected> refused_pipeline_schedule(const Case& line) {
  if (auto refused = refused_pipeline_stages(line)) return refused;
  const int64_t tokens = line.at("tokens") / line.ranks(Axis::dp),
                size = line.at("micro_batch_size");
  return refused_plan(line, (tokens + size - 1) / size);
}

namespace {

struct Nothing : Saved {};

Plan plan_of(Rank& rank) {
  const Stage s(rank);
  return {rank.line().text("schedule"), s.stages, s.rounds, s.microbatches()};
}

}  // namespace

// ---- What is held

View Held::take(Parallel& p, const std::vector<int64_t>& shape, const Place& place) {
  if (free_.empty()) {
    free_.push_back(blocks_.size());
    blocks_.push_back(p.workspace(p.storage, shape));
  }
  const auto lowest = std::min_element(free_.begin(), free_.end());
  by_place_[place] = *lowest;
  free_.erase(lowest);
  order_.push_back(place);
  return at(place);
}

void Held::release(const Place& place) {
  const auto held = by_place_.find(place);
  if (held == by_place_.end()) return;
  free_.push_back(held->second);
  by_place_.erase(held);
  order_.erase(std::find(order_.begin(), order_.end(), place));
}

std::vector<int64_t> Held::in_flight(int64_t chunk, int64_t i) const {
  std::vector<int64_t> list;
  for (const Place& place : order_)
    if (place.chunk == chunk && place.i == i) list.push_back(place.microbatch);
  return list;
}

PipelineSchedule::Step::Step(Rank& rank, Timetable times, std::span<const View> inputs,
                             std::span<const View> outputs)
    : p(rank), stage(rank), table(std::move(times)), recompute(rank.line().on("recompute")) {
  const int64_t h = rank.line().at("hidden");
  x = inputs[0], y = outputs[0], dx = outputs[1], dy = inputs.back();
  for (size_t i = 1; i + 1 < inputs.size(); i += 2) {
    w.push_back(inputs[i]), b.push_back(inputs[i + 1]);
    dw.push_back(outputs[i + 1]), db.push_back(outputs[i + 2]);
  }
  dw_sum.resize(w.size()), db_sum.resize(w.size());
  leaving = p.workspace(p.storage, {stage.size, h});
}

View PipelineSchedule::Step::rows(const View& all, int64_t m) const {
  return all.narrow(0, m * stage.size, stage.rows_of(m));
}
View PipelineSchedule::Step::filled(const View& block, int64_t m) const {
  return block.narrow(0, 0, stage.rows_of(m));
}
View PipelineSchedule::Step::take(Held& held, const Place& place) {
  return filled(held.take(p, leaving.shape, place), place.microbatch);
}
View PipelineSchedule::Step::at(const Held& held, const Place& place) const {
  return filled(held.at(place), place.microbatch);
}

// ---- The step

Timetable PipelineSchedule::timetable_of(Rank& rank) const { return Timetable(plan_of(rank)); }

std::unique_ptr<Saved> PipelineSchedule::forward(Rank& rank, std::span<const View> inputs,
                                                 std::span<const View> outputs) {
  if (auto why = refused_pipeline_schedule(rank.line())) throw *why;
  Step step(rank, timetable_of(rank), inputs, outputs);
  Parts parts;
  make_sums(step, parts);
  begin(step);
  for (int64_t tick = 0; tick < step.table.ticks(); ++tick) {
    const auto action = step.table.at(tick, step.stage.own);
    const View made = action ? perform(step, *action) : step.nothing();
    if (action) after(step, *action);
    hand_on(step, tick, made);
  }
  reduce(step, parts);
  return std::make_unique<Nothing>();
}

void PipelineSchedule::make_sums(Step& step, Parts& parts) {
  const auto zeros = [&](const View& result) {
    const View sum = step.p.workspace(type_of_sums(step), result.shape);
    set_zero(sum);
    parts.push_back({sum, result});
    return sum;
  };
  for (int64_t chunk = 0; chunk < step.stage.chunks(); ++chunk) {
    if (step.table.plan().stage_of(chunk) != step.stage.own) continue;
    for (int64_t l = step.first_layer(chunk); l < step.first_layer(chunk + 1); ++l) {
      step.dw_sum[size_t(l)] = zeros(step.dw[size_t(l)]);
      step.db_sum[size_t(l)] = zeros(step.db[size_t(l)]);
    }
  }
}

DType PipelineSchedule::type_of_sums(const Step& step) const { return type_of_stage_sums(step.p); }

View PipelineSchedule::perform(Step& step, const Action& action) {
  if (action.work == Work::forward) return run_forward(step, action.unit);
  if (action.work == Work::backward) return run_backward(step, action.unit);
  run_weights(step, action.unit);
  return step.nothing();
}

void PipelineSchedule::reduce(Step& step, const Parts& parts) {
  coalesced_all_reduce(step.p, parts, with_ranks(step.p.rank.line(), {Axis::dp}));
}

// ---- Between the stages

void PipelineSchedule::hand_on(Step& step, int64_t tick, const View& made) {
  Communicator& pp = step.p.rank.along(Axis::pp);
  const auto action = step.table.at(tick, step.stage.own);
  const int64_t mine = action ? step.table.hop(*action) : 0;
  const auto next = action ? step.table.next(*action) : std::nullopt;
  if (next && mine == 0) convert(sent(step, *action, made), arrival(step, *next));
  std::vector<Ticket> under_way;
  for (int hop : {+1, -1}) {
    if (!step.table.travels(tick, hop)) continue;
    const View leaves = mine == hop ? sent(step, *action, made) : step.nothing();
    under_way.push_back(pp.shift(leaves, arriving(step, tick, hop), hop));
  }
  for (Ticket ticket : under_way) pp.wait(ticket);
}

View PipelineSchedule::arriving(Step& step, int64_t tick, int64_t hop) {
  const int64_t p = step.stage.stages, from = (step.stage.own - hop + p) % p;
  const auto action = step.table.at(tick, from);
  const bool comes = action && step.table.hop(*action) == hop;
  return comes ? arrival(step, *step.table.next(*action)) : step.nothing();
}

View PipelineSchedule::arrival(Step& step, const Action& of) {
  const auto [m, chunk] = of.unit;
  return of.work == Work::forward ? step.take(step.activations, {m, chunk, 0})
                                  : step.take(step.gradients, {m, chunk, step.layers(chunk)});
}

// ---- Forward

View PipelineSchedule::activation(Step& step, Unit u, int64_t i) {
  if (u.chunk == 0 && i == 0) return step.rows(step.x, u.microbatch);
  return step.at(step.activations, {u.microbatch, u.chunk, i});
}

void PipelineSchedule::make_inner(Step& step, Unit u) {
  for (int64_t i = 1; i < step.layers(u.chunk); ++i) {
    const int64_t layer = step.first_layer(u.chunk) + i - 1;
    const View x = activation(step, u, i - 1),
               to = step.take(step.activations, {u.microbatch, u.chunk, i});
    gemm(plain(x), turned(weight(step, layer, Work::forward)), to, step.p.accumulate,
         &step.b[size_t(layer)]);
  }
}

void PipelineSchedule::drop_inner(Step& step, Unit u) {
  for (int64_t i = 1; i < step.layers(u.chunk); ++i)
    step.activations.release({u.microbatch, u.chunk, i});
}

View PipelineSchedule::run_forward(Step& step, Unit u) {
  const int64_t n = step.layers(u.chunk), last = step.first_layer(u.chunk) + n - 1;
  const View out =
      step.is_last(u) ? output_rows(step, u.microbatch) : step.filled(step.leaving, u.microbatch);
  make_inner(step, u);
  if (n == 0)
    convert(activation(step, u, 0), out);
  else
    gemm(plain(activation(step, u, n - 1)), turned(weight(step, last, Work::forward)), out,
         step.p.accumulate, &step.b[size_t(last)]);
  if (step.recompute) drop_inner(step, u);
  return step.is_last(u) ? step.nothing() : out;
}

// ---- Backward

double PipelineSchedule::divisor(const Step& step, int64_t) const {
  return step.p.rank.line().text("loss") == "mean" ? double(step.microbatches()) : 1;
}

View PipelineSchedule::cotangent(Step& step, Unit u, int64_t i) {
  const Place place{u.microbatch, u.chunk, i};
  if (!step.is_last(u) || i < step.layers(u.chunk)) return step.at(step.gradients, place);
  const View dy = step.rows(step.dy, cotangent_rows_of(step, u.microbatch));
  const double by = divisor(step, u.microbatch);
  if (by == 1) return dy;
  if (!step.gradients.holds(place)) scale(dy, step.take(step.gradients, place), 1, by);
  return step.at(step.gradients, place);
}

View PipelineSchedule::run_backward(Step& step, Unit u) {
  const int64_t n = step.layers(u.chunk), first = step.first_layer(u.chunk);
  const View out =
      u.chunk == 0 ? step.rows(step.dx, u.microbatch) : step.filled(step.leaving, u.microbatch);
  if (step.recompute) make_again(step, u);
  View g = cotangent(step, u, n);
  if (n == 0) convert(g, out);
  for (int64_t i = n; i-- > 0;) {
    const View to = i == 0 ? out : step.take(step.gradients, {u.microbatch, u.chunk, i});
    gemm(plain(g), plain(weight(step, first + i, Work::backward)), to, step.p.accumulate);
    g = to;
  }
  if (!step.table.plan().splits()) run_weights(step, u);
  return u.chunk == 0 ? step.nothing() : out;
}

void PipelineSchedule::run_weights(Step& step, Unit u) {
  for (int64_t i = 0; i < step.layers(u.chunk); ++i)
    add_weight_gradient(step, u, step.first_layer(u.chunk) + i,
                        activation(step, activations_of(step, u), i),
                        cotangent(step, cotangents_of(step, u), i + 1));
  release(step, u);
}

void PipelineSchedule::add_weight_gradient(Step& step, Unit, int64_t layer, const View& x,
                                           const View& g) {
  add_layer_gradients(step.p, x, g, step.dw_sum[size_t(layer)], step.db_sum[size_t(layer)]);
}

void PipelineSchedule::release(Step& step, Unit u) {
  for (int64_t i = 0; i <= step.layers(u.chunk); ++i) {
    step.activations.release({u.microbatch, u.chunk, i});
    step.gradients.release({u.microbatch, u.chunk, i});
  }
}

}  // namespace shardproof::primitives
