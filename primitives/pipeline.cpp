#include "primitives/pipeline.hpp"

#include <algorithm>

#include "primitives/gemm.hpp"
#include "primitives/line.hpp"

namespace shardproof::primitives {

// ---- What is read from a line

std::optional<Rejected> refused_pipeline_stages(const Case& line) {
  const std::vector<Axis> others = with_ranks(line, {Axis::tp, Axis::cp, Axis::ep});
  return first_refusal(
      when(!others.empty(), "the axes pp and dp only",
           others.empty() ? "" : said(line, name(others[0])),
           "layers lie on stages and tokens on ranks of dp: leave tp, cp and ep at 1"),
      undivided(line, "tokens", line.ranks(Axis::dp), "dp"), countable(line, {"tokens", "hidden"}),
      countable(line, {"layers", "hidden", "hidden"}));
}

Stage::Stage(Rank& rank)
    : Stage(rank.along(Axis::pp).size(), rank.along(Axis::pp).rank(), rank.line().at("virtual"),
            rank.line().at("layers"), rank.line().at("tokens") / rank.line().ranks(Axis::dp),
            rank.line().at("micro_batch_size")) {
  const Case& line = rank.line();
  last_first = line.has("backward_order") && line.text("backward_order") == "lifo";
}

Stage::Stage(int64_t p, int64_t s, int64_t v, int64_t l, int64_t t, int64_t n)
    : stages(p), own(s), rounds(v), layers(l), tokens(t), size(std::min(n, t)) {}

int64_t Stage::ticks() const {
  const int64_t last = microbatches() - 1;
  return last / stages * chunks() + last % stages + chunks();
}

int64_t Stage::rows_of(int64_t m) const { return std::min(size, tokens - m * size); }

// At tick t stage s is t - s ticks into its work: in each group of p microbatches, chunk by chunk.
std::optional<Unit> Stage::forward_at(int64_t tick) const {
  const int64_t mine = tick - own;
  if (mine < 0) return {};
  const int64_t round = mine / stages % rounds;
  const Unit unit{mine / chunks() * stages + mine % stages, round * stages + own};
  return unit.microbatch < microbatches() ? std::optional(unit) : std::nullopt;
}

std::optional<Unit> Stage::backward_at(int64_t tick) const {
  Stage mirrored = *this;
  mirrored.own = stages - 1 - own;
  auto unit = mirrored.forward_at(tick);
  if (!unit) return {};
  unit->chunk = chunks() - 1 - unit->chunk;
  if (last_first) unit->microbatch = microbatches() - 1 - unit->microbatch;
  return unit;
}

int64_t first_layer_of(const Stage& s, int64_t chunk) {
  return chunk * (s.layers / s.chunks()) + std::min(chunk, s.layers % s.chunks());
}

namespace {

View rows_of_microbatch(const Stage& s, const View& all, int64_t m) {
  return all.narrow(0, m * s.size, s.rows_of(m));
}

bool is_last(const Stage& s, Unit u) { return u.chunk + 1 == s.chunks(); }

template <class Each>
void each_own_layer(const Stage& s, Each each) {
  for (int64_t chunk = s.own; chunk < s.chunks(); chunk += s.stages)
    for (int64_t l = first_layer_of(s, chunk); l < first_layer_of(s, chunk + 1); ++l)
      each(chunk, l);
}

// One tick after another: `compute` a unit and give what leaves the stage, `place` what the next
// unit is given by another chunk. Views without rows: nothing.
template <class At, class Compute, class Place>
void in_ticks(Parallel& p, const Stage& s, int hop, At at, Compute compute, Place place) {
  Communicator& group = p.rank.along(Axis::pp);
  for (int64_t tick = 0, ticks = s.ticks(); tick < ticks; ++tick) {
    const std::optional<Unit> unit = at(tick), next = at(tick + 1);
    const View leaving = compute(unit, tick);
    if (tick + 1 < ticks) group.wait(group.shift(leaving, place(next, tick + 1), hop));
  }
}

}  // namespace

// ---- Steps

std::optional<Rejected> PipelineStages::refused(const Case& line) const {
  return refused_pipeline_stages(line);
}
std::unique_ptr<PipelineSaved> PipelineStages::make_saved(Parallel&, const Stage&) const {
  return std::make_unique<PipelineSaved>();
}

View PipelineStages::first_input(const Stage& s, const PipelineSaved& saved, int64_t m) const {
  return rows_of_microbatch(s, saved.inputs[0], m);
}
View PipelineStages::last_output(Pass& pass, int64_t m) const {
  return result_rows(pass.stage, pass.result, m);
}
View PipelineStages::last_cotangent(Pass& pass, int64_t m) {
  return cotangent_rows(pass.stage, pass.result, m);
}
View PipelineStages::first_gradient(Pass& pass, int64_t m) const {
  return rows_of_microbatch(pass.stage, pass.gradients[0], m);
}

View PipelineStages::arrived_rows(const Stage& s, const View& all, int64_t m) const {
  return rows_of_microbatch(s, all, m);
}
View PipelineStages::inner_rows(const Stage& s, const View& all, int64_t m) const {
  return rows_of_microbatch(s, all, m);
}
View PipelineStages::result_rows(const Stage& s, const View& y, int64_t m) const {
  return rows_of_microbatch(s, y, m);
}
View PipelineStages::cotangent_rows(const Stage& s, const View& g, int64_t m) const {
  return rows_of_microbatch(s, g, m);
}

void PipelineStages::pass_on(const View& in, const View& out) const { convert(in, out); }

void add_layer_gradients(Parallel& p, const View& x, const View& g, const View& dw,
                         const View& db) {
  const DType type = p.accumulate;
  const View column = p.workspace(type, db.shape);
  column_sums(g, column, type);
  add_into(column, db);
  if (dw.dtype == type) return gemm(turned(g), plain(x), dw, type, nullptr, /*add=*/true);
  const View product = p.workspace(type, dw.shape);
  gemm(turned(g), plain(x), product, type);
  add_into(product, dw);
}

DType type_of_stage_sums(const Parallel& p) {
  return type_of_key(p.rank.line(), "local_grad", p.accumulate);
}

void PipelineStages::weight_gradient(Pass& pass, int64_t, const View& x, const View& g,
                                     const View& dw, const View& db) {
  add_layer_gradients(pass.p, x, g, dw, db);
}

DType PipelineStages::type_of_sums(const Parallel& p) const { return type_of_stage_sums(p); }

void PipelineStages::input_gradient(Pass&, Unit, const View&) {}

void PipelineStages::reduce(Pass& pass, const Parts& parts) {
  coalesced_all_reduce(pass.p, parts, with_ranks(pass.p.rank.line(), {Axis::dp}));
}

void PipelineStages::add_gradient(const View& own, const View& sum) { add_into(own, sum); }

// ---- Forward

std::unique_ptr<Saved> PipelineStages::forward(Rank& rank, std::span<const View> inputs,
                                               std::span<const View> outputs) {
  if (auto why = refused(rank.line())) throw *why;
  Parallel p(rank);
  const Stage s = stage_of(rank);
  const int64_t h = rank.line().at("hidden");
  auto saved = make_saved(p, s);
  saved->inputs.assign(inputs.begin(), inputs.end());
  for (int64_t r = 0; r < s.rounds; ++r)
    saved->arrived.emplace_back(p.storage, std::vector{s.tokens, h});
  saved->inner.resize(size_t(s.layers));
  each_own_layer(s, [&](int64_t chunk, int64_t l) {
    if (l > first_layer_of(s, chunk)) saved->inner[size_t(l)] = Kept(p.storage, {s.tokens, h});
  });
  Pass pass{p, s, *saved, outputs[0]};
  pass.leaving = p.workspace(p.storage, {s.size, h});
  begin(pass);
  const View nothing = pass.leaving.narrow(0, 0, 0);
  in_ticks(
      p, s, +1, [&](int64_t tick) { return s.forward_at(tick); },
      [&](auto unit, int64_t) { return unit ? compute(pass, *unit) : nothing; },
      [&](auto next, int64_t) {
        return next && next->chunk > 0 ? input_of(pass, *next, next->microbatch) : nothing;
      });
  return saved;
}

View PipelineStages::input_of(Pass& pass, Unit u, int64_t m) {
  const Stage& s = pass.stage;
  if (u.chunk == 0) return first_input(s, pass.saved, m);
  return arrived_rows(s, pass.saved.arrived[size_t(u.chunk / s.stages)].view(), m);
}

View PipelineStages::compute(Pass& pass, Unit u) {
  const Stage& s = pass.stage;
  const View out = is_last(s, u) ? last_output(pass, u.microbatch)
                                 : pass.leaving.narrow(0, 0, s.rows_of(u.microbatch));
  const int64_t first = first_layer_of(s, u.chunk), behind = first_layer_of(s, u.chunk + 1);
  View x = input_of(pass, u, u.microbatch);
  if (first == behind) pass_on(x, out);
  for (int64_t l = first; l < behind; ++l) {
    const int64_t of = parameters_of(s, l);
    const View y =
        l + 1 == behind ? out : inner_rows(s, pass.saved.inner[size_t(l + 1)].view(), u.microbatch);
    gemm(plain(x), turned(pass.saved.inputs[weight_of(of)]), y, pass.p.accumulate,
         &pass.saved.inputs[bias_of(of)]);
    x = y;
  }
  if (!is_last(s, u)) return out;
  end(pass, u.microbatch);
  return out.narrow(0, 0, 0);
}

// ---- Backward

void PipelineStages::backward(Rank& rank, Saved& state, std::span<const View> cotangents,
                              std::span<const View> gradients) {
  Parallel p(rank);
  into_running_sums(
      p, gradients, [&](auto own) { gradients_of(p, state, cotangents, own); },
      [&](const View& own, const View& sum) { add_gradient(own, sum); });
}

void PipelineStages::gradients_of(Parallel& p, Saved& state, std::span<const View> cotangents,
                                  std::span<const View> gradients) {
  const Stage s = stage_of(p.rank);
  const auto block = [&] { return p.workspace(p.storage, {s.size, p.rank.line().at("hidden")}); };
  Pass pass{p, s, static_cast<PipelineSaved&>(state), cotangents[0], gradients};
  for (View* v :
       {&pass.leaving, &pass.arriving[0], &pass.arriving[1], &pass.scratch[0], &pass.scratch[1]})
    *v = block();
  const View nothing = pass.leaving.narrow(0, 0, 0);
  make_sums(pass);
  begin_back(pass);
  in_ticks(
      p, s, -1, [&](int64_t tick) { return s.backward_at(tick); },
      [&](auto unit, int64_t tick) {
        return unit ? compute_back(pass, *unit, pass.arriving[size_t(tick % 2)]) : nothing;
      },
      [&](auto next, int64_t tick) {
        return next && !is_last(s, *next)
                   ? pass.arriving[size_t(tick % 2)].narrow(0, 0, s.rows_of(next->microbatch))
                   : nothing;
      });
  end_back(pass);
  reduce(pass, pass.parts);
}

void PipelineStages::make_sums(Pass& pass) {
  const DType kept = type_of_sums(pass.p);
  pass.sums.resize(pass.gradients.size());
  each_own_layer(pass.stage, [&](int64_t, int64_t l) {
    for (size_t i : {weight_of(l), bias_of(l)}) {
      pass.sums[i] = pass.p.workspace(kept, pass.gradients[i].shape);
      set_zero(pass.sums[i]);
      pass.parts.push_back({pass.sums[i], pass.gradients[i]});
    }
  });
}

View PipelineStages::compute_back(Pass& pass, Unit u, const View& arrived) {
  const Stage& s = pass.stage;
  const int64_t rows = s.rows_of(u.microbatch), first = first_layer_of(s, u.chunk),
                state = state_of(s, u.microbatch);
  View g = is_last(s, u) ? last_cotangent(pass, u.microbatch) : arrived.narrow(0, 0, rows);
  const View out =
      u.chunk == 0 ? first_gradient(pass, u.microbatch) : pass.leaving.narrow(0, 0, rows);
  if (first == first_layer_of(s, u.chunk + 1)) pass_on(g, out);
  for (int64_t l = first_layer_of(s, u.chunk + 1); l-- > first;) {
    const size_t w = weight_of(parameters_of(s, l)), b = bias_of(parameters_of(s, l));
    const View x = l == first ? input_of(pass, u, state)
                              : inner_rows(s, pass.saved.inner[size_t(l)].view(), state);
    weight_gradient(pass, u.microbatch, x, g, pass.sums[w], pass.sums[b]);
    const View dx = l == first ? out : pass.scratch[size_t(l % 2)].narrow(0, 0, rows);
    gemm(plain(g), plain(pass.saved.inputs[w]), dx, pass.p.accumulate);
    g = dx;
  }
  input_gradient(pass, u, out);
  return u.chunk == 0 ? out.narrow(0, 0, 0) : out;
}

}  // namespace shardproof::primitives
