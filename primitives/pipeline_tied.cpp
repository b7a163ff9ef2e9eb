// The embedding and the logits at both ends of a pipeline, and the gradient of the table that they
// share.
#include "primitives/gemm.hpp"
#include "primitives/line.hpp"
#include "primitives/pipeline.hpp"
#include "primitives/pointwise.hpp"
#include "primitives/vocab_shard.hpp"

namespace shardproof::primitives {
namespace {

constexpr size_t ids = 0, table_number = 1;

struct TiedSaved : PipelineSaved {
  Kept embedded, last;  // X_0 on the first stage, X_L on the last: [own tokens, h]
};

bool is_first(const Stage& s) { return s.own == 0; }
bool is_last(const Stage& s) { return s.own + 1 == s.stages; }

View rows_of_microbatch(const Stage& s, const View& all, int64_t m) {
  return all.narrow(0, m * s.size, s.rows_of(m));
}

OwnIds all_ids(const View& of, const View& table) { return {tensor(of), 0, table.shape[0]}; }

}  // namespace

std::optional<Rejected> refused_pipeline_tied(const Case& line) {
  return first_refusal(refused_pipeline_stages(line), countable(line, {"vocab", "hidden"}),
                       countable(line, {"tokens", "vocab"}));
}

bool holds_table(const Stage& s) { return is_first(s) || is_last(s); }

Communicator& ends_of(Parallel& p, const Stage& s) {
  Communicator& stages = p.rank.along(Axis::pp);
  return s.stages > 2 ? stages.subgroup({0, int(s.stages) - 1}, "pp:ends") : stages;
}

std::optional<Rejected> PipelineTied::refused(const Case& line) const {
  return refused_pipeline_tied(line);
}

std::unique_ptr<PipelineSaved> PipelineTied::make_saved(Parallel& p, const Stage& s) const {
  auto saved = std::make_unique<TiedSaved>();
  const std::vector<int64_t> shape{s.tokens, p.rank.line().at("hidden")};
  if (is_first(s)) saved->embedded = Kept(p.storage, shape);
  if (is_last(s)) saved->last = Kept(p.storage, shape);
  return saved;
}

uint64_t PipelineTied::seed_of(Rank& rank) const { return rank.line().seed(); }

bool PipelineTied::init(Rank& rank, std::span<const View> parameters) {
  for (size_t k = 0; k < parameters.size(); ++k)
    perform(InitialValues{tensor(parameters[k]), seed_of(rank), uint32_t(k)}, "initial values");
  return true;
}

// ---- Forward

void PipelineTied::begin(Pass& pass) {
  if (!is_first(pass.stage)) return;
  const View &w = pass.saved.inputs[table_number],
             &x = static_cast<TiedSaved&>(pass.saved).embedded.view();
  perform(LookUp{all_ids(pass.saved.inputs[ids], w), tensor(w), tensor(x), w.shape[1]},
          "a look-up");
}

View PipelineTied::first_input(const Stage& s, const PipelineSaved& saved, int64_t m) const {
  return rows_of_microbatch(s, static_cast<const TiedSaved&>(saved).embedded.view(), m);
}

View PipelineTied::last_output(Pass& pass, int64_t m) const {
  return rows_of_microbatch(pass.stage, static_cast<TiedSaved&>(pass.saved).last.view(), m);
}

View PipelineTied::table(Pass& pass) const { return pass.saved.inputs[table_number]; }

void PipelineTied::end(Pass& pass, int64_t m) {
  gemm(plain(last_output(pass, m)), turned(table(pass)), result_rows(pass.stage, pass.result, m),
       pass.p.accumulate);
}

// ---- Backward

void PipelineTied::begin_back(Pass& pass) {
  const Stage& s = pass.stage;
  const int64_t h = pass.p.rank.line().at("hidden");
  if (holds_table(s)) {
    View& sum = pass.sums[table_number];
    sum = partial_like(pass.p, pass.gradients[table_number]);
    set_zero(sum);
  }
  if (is_first(s)) pass.of_embedded = pass.p.workspace(pass.p.storage, {s.tokens, h});
  if (is_last(s)) pass.of_last = pass.p.workspace(pass.p.storage, {s.size, h});
}

View PipelineTied::last_cotangent(Pass& pass, int64_t m) {
  const View g = cotangent_rows(pass.stage, pass.result, m),
             dx = pass.of_last.narrow(0, 0, pass.stage.rows_of(m));
  gemm(turned(g), plain(last_output(pass, m)), pass.sums[table_number], pass.p.accumulate, nullptr,
       /*add=*/true);
  gemm(plain(g), plain(table(pass)), dx, pass.p.accumulate);
  return dx;
}

View PipelineTied::first_gradient(Pass& pass, int64_t m) const {
  return rows_of_microbatch(pass.stage, pass.of_embedded, m);
}

void PipelineTied::add_rows(Pass& pass, const View& of_ids) {
  add_into(of_ids, pass.sums[table_number]);
}

void PipelineTied::end_back(Pass& pass) {
  if (!is_first(pass.stage)) return;
  const View rows = partial_like(pass.p, pass.gradients[table_number]);
  perform(ScatterAdd{all_ids(pass.saved.inputs[ids], rows), tensor(pass.of_embedded), tensor(rows),
                     rows.shape[1], pass.p.accumulate == DType::f64},
          "sums of rows");
  add_rows(pass, rows);
}

// Over dp with the layers' gradients, then over both ends.
void PipelineTied::reduce(Pass& pass, const Parts& layers) {
  Parts parts = layers;
  if (!holds_table(pass.stage)) return PipelineStages::reduce(pass, parts);
  const View &sum = pass.sums[table_number],
             of_stage = partial_like(pass.p, pass.gradients[table_number]);
  parts.insert(parts.begin(), {sum, of_stage});
  PipelineStages::reduce(pass, parts);
  reduce_table(pass, of_stage);
}

void PipelineTied::reduce_table(Pass& pass, const View& of_stage) {
  coalesced_all_reduce(pass.p, Parts{{of_stage, pass.gradients[table_number]}},
                       ends_of(pass.p, pass.stage));
}

}  // namespace shardproof::primitives
