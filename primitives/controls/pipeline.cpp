// Broken twins of pipeline parallelism. The comment above a twin names the mistake.
#include <algorithm>

#include "oracle/registry.hpp"
#include "primitives/controls/table.hpp"
#include "primitives/line.hpp"
#include "primitives/pipeline.hpp"

namespace shardproof {
namespace {

using namespace primitives;

// ---- What a forward keeps

// There is one buffer to receive into, and the next microbatch arrives in it.
struct ArrivalBufferReused final : PipelineStages {
  View arrived_rows(const Stage& s, const View& all, int64_t m) const override {
    return all.narrow(0, 0, s.rows_of(m));
  }
};

// Activations inside a stage are saved by reference: the next microbatch computes over them.
struct ActivationsOverwritten final : PipelineStages {
  View inner_rows(const Stage& s, const View& all, int64_t m) const override {
    return all.narrow(0, 0, s.rows_of(m));
  }
};

// The state is taken off the other end of the queue: the last microbatch's first.
struct StateOfAnotherMicrobatch final : PipelineStages {
  int64_t state_of(const Stage& s, int64_t m) const override { return s.microbatches() - 1 - m; }
};

// The stage keeps the states of one pass: those of the next one take their place.
class StatesInTheStage final : public PipelineStages {
 public:
  std::unique_ptr<Saved> forward(Rank& rank, std::span<const View> inputs,
                                 std::span<const View> outputs) override {
    states_ = PipelineStages::forward(rank, inputs, outputs);
    return std::make_unique<Saved>();
  }
  void backward(Rank& rank, Saved&, std::span<const View> cotangents,
                std::span<const View> gradients) override {
    PipelineStages::backward(rank, *states_, cotangents, gradients);
  }

 private:
  std::unique_ptr<Saved> states_;
};

// ---- Which microbatch, which layer

View counted_from_the_end(const Stage& s, const View& all, int64_t m) {
  return all.narrow(0, s.tokens - m * s.size - s.rows_of(m), s.rows_of(m));
}

// Results are put together in another order than microbatches were cut in.
struct ResultsInReverse final : PipelineStages {
  View result_rows(const Stage& s, const View& y, int64_t m) const override {
    return counted_from_the_end(s, y, m);
  }
};

// The loss of a microbatch is taken against the data of another.
struct CotangentOfAnotherMicrobatch final : PipelineStages {
  View cotangent_rows(const Stage& s, const View& g, int64_t m) const override {
    return g.narrow(0, (m + 1) % s.microbatches() * s.size, s.rows_of(m));
  }
};

// As many microbatches as are full: what is left over is not computed.
struct TailCutOff final : PipelineStages {
  Stage stage_of(Rank& rank) const override {
    Stage s(rank);
    s.tokens -= s.tokens % s.size;
    return s;
  }
};

// A stage's chunks are numbered from its last layer on.
int64_t in_another_chunk(const Stage& s, int64_t layer) {
  const int64_t each = s.layers / s.chunks(), chunk = layer / each;
  const int64_t other = (s.rounds - 1 - chunk / s.stages) * s.stages + chunk % s.stages;
  return other * each + layer % each;
}

// The layers of a stage's chunks are exchanged: each meets the parameters of the other.
struct ChunksExchanged final : PipelineStages {
  int64_t parameters_of(const Stage& s, int64_t layer) const override {
    return in_another_chunk(s, layer);
  }
};

// Only the last stage numbers its chunks the other way round.
struct ChunksOfTheLastStageExchanged final : PipelineStages {
  int64_t parameters_of(const Stage& s, int64_t layer) const override {
    return s.own + 1 == s.stages ? in_another_chunk(s, layer) : layer;
  }
};

// A stage without layers has nothing to give.
struct EmptyStageGivesZero final : PipelineStages {
  void pass_on(const View&, const View& out) const override { set_zero(out); }
};

// Microbatches go backward the other way round than the other stages and the line have it.
struct OrderOfItsOwn final : PipelineStages {
  Stage stage_of(Rank& rank) const override {
    Stage s(rank);
    s.last_first = !s.last_first;
    return s;
  }
};

// ---- Sums over microbatches

// The gradient of a microbatch takes the place of the sum.
struct GradientOverwritten final : PipelineStages {
  void weight_gradient(Pass& pass, int64_t m, const View& x, const View& g, const View& dw,
                       const View& db) override {
    set_zero(dw), set_zero(db);
    PipelineStages::weight_gradient(pass, m, x, g, dw, db);
  }
};

// Weight gradients are put off until there is time, and nobody makes those of the last microbatch.
struct LastDeferredGradientDropped final : PipelineStages {
  void weight_gradient(Pass& pass, int64_t m, const View& x, const View& g, const View& dw,
                       const View& db) override {
    if (m + 1 < pass.stage.microbatches()) PipelineStages::weight_gradient(pass, m, x, g, dw, db);
  }
};

// Gradients are added up in the storage type, whatever type they were asked for in.
struct SummedAsStored final : PipelineStages {
  DType type_of_sums(const Parallel& p) const override { return p.storage; }
};

// Divided by the number of microbatches, as if each loss were a mean over all of them.
struct DividedByMicrobatches final : PipelineStages {
  void reduce(Pass& pass, const Parts& parts) override {
    for (const Part& part : parts)
      scale(part.partial, part.partial, 1, double(pass.stage.microbatches()));
    PipelineStages::reduce(pass, parts);
  }
};

// What the steps before have summed is divided again at each.
struct RunningSumDivided final : PipelineStages {
  void add_gradient(const View& own, const View& sum) override {
    PipelineStages::add_gradient(own, sum);
    scale(sum, sum, 1, 2);
  }
};

// The last pass of a step takes the place of the sum.
struct SumOverwritten final : PipelineStages {
  void add_gradient(const View& own, const View& sum) override { convert(own, sum); }
};

// Gradients grow by the loss's factor at every stage that they pass.
struct ScaledAtEachStage final : PipelineStages {
  void input_gradient(Pass& pass, Unit u, const View& dx) override {
    if (u.chunk > 0) scale(dx, dx, 1, double(pass.stage.microbatches()));
  }
};

// ---- Between the stages

// What is received is no leaf that asks for a gradient: nothing flows back to the stage before.
struct DetachedBetweenStages final : PipelineStages {
  void input_gradient(Pass&, Unit u, const View& dx) override {
    if (u.chunk > 0) set_zero(dx);
  }
};

// The same where the ring closes alone: from the first stage back to the last.
struct DetachedBetweenRounds final : PipelineStages {
  void input_gradient(Pass& pass, Unit u, const View& dx) override {
    if (u.chunk > 0 && u.chunk % pass.stage.stages == 0) set_zero(dx);
  }
};

// The first stage has nobody to send a gradient to, and makes none.
struct InputGradientNotReturned final : PipelineStages {
  void input_gradient(Pass&, Unit u, const View& dx) override {
    if (u.chunk == 0) set_zero(dx);
  }
};

// One buffer holds the last gradient that was made, whichever microbatch is sent.
class StaleGradientSent final : public PipelineStages {
  void input_gradient(Pass& pass, Unit u, const View& dx) override {
    if (u.chunk == 0) return;
    Kept made(dx.dtype, dx.shape);
    convert(dx, made.view());
    if (u.microbatch % pass.stage.microbatches() > 0) convert(last_.view(), dx);
    last_ = std::move(made);
  }
  Kept last_;
};

// ---- Over dp

// A stage's gradients are reduced on the flag of a schedule that only the first stage passes.
struct ReducedOnTheFirstStage final : PipelineStages {
  void reduce(Pass& pass, const Parts& parts) override {
    if (pass.stage.own == 0) return PipelineStages::reduce(pass, parts);
    coalesced_all_reduce(pass.p, parts, std::vector<Axis>{});
  }
};

// Copies of a stage keep what their own tokens give.
struct LeftLocal final : PipelineStages {
  void reduce(Pass& pass, const Parts& parts) override {
    coalesced_all_reduce(pass.p, parts, std::vector<Axis>{});
  }
};

struct Averaged final : PipelineStages {
  void reduce(Pass& pass, const Parts& parts) override {
    coalesced_all_reduce(pass.p, parts, with_ranks(pass.p.rank.line(), {Axis::dp}), Reduce::avg);
  }
};

// ---- The table at both ends

// Each end keeps its own part: the copies part, too.
struct TableLeftApart final : PipelineTied {
  void reduce_table(Pass& pass, const View& of_stage) override {
    coalesced_all_reduce(pass.p, Parts{{of_stage, pass.gradients[1]}}, std::vector<Axis>{});
  }
};

struct TableAveraged final : PipelineTied {
  void reduce_table(Pass& pass, const View& of_stage) override {
    coalesced_all_reduce(pass.p, Parts{{of_stage, pass.gradients[1]}}, ends_of(pass.p, pass.stage),
                         Reduce::avg);
  }
};

// Summed by the hook of the embedding and by that of the logits: on one stage both find one tensor.
struct TableSummedTwice final : PipelineTied {
  void reduce_table(Pass& pass, const View& of_stage) override {
    const View once = pass.p.workspace(of_stage.dtype, of_stage.shape);
    coalesced_all_reduce(pass.p, Parts{{of_stage, once}}, ends_of(pass.p, pass.stage));
    if (pass.stage.stages == 1) scale(once, once, 2);
    coalesced_all_reduce(pass.p, Parts{{once, pass.gradients[1]}}, ends_of(pass.p, pass.stage));
  }
};

// Over all stages; those between hold no table, and give zeros.
struct TableSummedOverAllStages final : PipelineTied {
  void reduce(Pass& pass, const Parts& layers) override {
    PipelineTied::reduce(pass, layers);
    if (holds_table(pass.stage)) return;
    const int64_t elements = pass.p.rank.line().at("vocab") * pass.p.rank.line().at("hidden");
    const View zeros = pass.p.workspace(pass.p.wire, {elements});
    set_zero(zeros);
    pass.p.rank.along(Axis::pp).all_reduce(zeros, zeros);
  }
  void reduce_table(Pass& pass, const View& of_stage) override {
    coalesced_all_reduce(pass.p, Parts{{of_stage, pass.gradients[1]}}, pass.p.rank.along(Axis::pp));
  }
};

// Only the first stage's gradient is the sum: the last one steps by its own part.
struct TableSumOnTheFirstStage final : PipelineTied {
  void reduce_table(Pass& pass, const View& of_stage) override {
    PipelineTied::reduce_table(pass, of_stage);
    if (pass.stage.own > 0) convert(of_stage, pass.gradients[1]);
  }
};

// The shared weight is on no stage's list of what is reduced over dp.
struct TableNotReducedOverDp final : PipelineTied {
  void reduce(Pass& pass, const Parts& layers) override {
    PipelineStages::reduce(pass, layers);
    if (holds_table(pass.stage)) reduce_table(pass, pass.sums[1]);
  }
};

// Logits take the gradient, the embedding that is looked up gives none.
struct RowsGiveNoGradient final : PipelineTied {
  void add_rows(Pass&, const View&) override {}
};

// The embedding's part takes the place of the logits' on a stage that has both.
struct RowsOverwriteLogits final : PipelineTied {
  void add_rows(Pass& pass, const View& of_ids) override { convert(of_ids, pass.sums[1]); }
};

// Each stage makes its parameters from a random stream of its own.
struct TableInitialisedPerStage final : PipelineTied {
  uint64_t seed_of(Rank& rank) const override {
    return PipelineTied::seed_of(rank) + uint64_t(rank.coordinate(Axis::pp));
  }
};

// The last stage makes its copy once and computes with it ever after.
class StaleTable final : public PipelineTied {
  View table(Pass& pass) const override {
    const View now = PipelineTied::table(pass);
    if (!copy_.view().data) {
      copy_ = Kept(now.dtype, now.shape);
      convert(now, copy_.view());
    }
    return copy_.view();
  }
  mutable Kept copy_;
};

using controls::Row;
using controls::twin;

const char* const small = "pp=2 tokens=8 micro_batch_size=2 layers=4";
const char* const interleaved = "pp=2 virtual=2 tokens=8 micro_batch_size=2 layers=4";

const Row rows[] = {
    {"pipeline_stages", "pipeline_arrival_buffer_reused", twin<ArrivalBufferReused>,
     "gradient,adjoint", "forward,ledger,lockstep,replica",
     "deepspeedai/DeepSpeed 2800, pytorch/pytorch 185331",
     "pp=2 tokens=5 micro_batch_size=2 layers=3", "2 microbatches"},
    {"pipeline_stages", "pipeline_activations_overwritten", twin<ActivationsOverwritten>,
     "gradient,adjoint", "forward,ledger,lockstep", "an activation that is saved by reference",
     "pp=2 tokens=5 micro_batch_size=2 layers=4", "2 microbatches, 2 layers a stage"},
    {"pipeline_stages", "pipeline_state_of_another_microbatch", twin<StateOfAnotherMicrobatch>,
     "gradient,adjoint", "forward,ledger,lockstep",
     "a queue of states that is taken off at its other end", small, "2 microbatches"},
    {"pipeline_stages", "pipeline_states_in_the_stage", twin<StatesInTheStage>, "accumulate",
     "forward,gradient,adjoint,repeat,ledger", "pytorch/pytorch 139404", small,
     "two forwards in flight"},

    {"pipeline_stages", "pipeline_results_in_reverse", twin<ResultsInReverse>, "forward,adjoint",
     "ledger,lockstep", "deepspeedai/DeepSpeed 5729", "pp=2 tokens=5 micro_batch_size=2 layers=3",
     "2 microbatches"},
    {"pipeline_stages", "pipeline_cotangent_of_another_microbatch",
     twin<CotangentOfAnotherMicrobatch>, "gradient,adjoint", "forward,ledger,lockstep",
     "deepspeedai/DeepSpeed 5729", small, "2 microbatches"},
    {"pipeline_stages", "pipeline_tail_cut_off", twin<TailCutOff>, "forward", "lockstep",
     "pytorch/pytorch 126600", "pp=2 tokens=5 micro_batch_size=2 layers=3",
     "tokens that the microbatch does not divide"},
    {"pipeline_stages", "pipeline_chunks_exchanged", twin<ChunksExchanged>, "forward",
     "ledger,lockstep", "hpcaitech/ColossalAI 4348", interleaved, "2 chunks a stage"},
    {"pipeline_stages", "pipeline_chunks_of_the_last_stage_exchanged",
     twin<ChunksOfTheLastStageExchanged>, "forward", "ledger,lockstep",
     "an offset of layers that one stage counts otherwise", interleaved, "2 chunks a stage"},
    {"pipeline_stages", "pipeline_empty_stage_gives_zero", twin<EmptyStageGivesZero>, "forward",
     "ledger,lockstep", "a stage that was given no layers",
     "pp=4 tokens=4 micro_batch_size=2 layers=3", "fewer layers than stages"},
    {"pipeline_stages", "pipeline_order_of_its_own", twin<OrderOfItsOwn>, "ledger",
     "forward,gradient,adjoint,lockstep", "a stage that pops the last microbatch first",
     "pp=2 tokens=5 micro_batch_size=2 layers=3", "a smaller last microbatch"},

    {"pipeline_stages", "pipeline_gradient_overwritten", twin<GradientOverwritten>,
     "gradient,adjoint", "forward,ledger,lockstep", "NVIDIA-NeMo/Automodel 3530", small,
     "2 microbatches"},
    {"pipeline_stages", "pipeline_last_deferred_gradient_dropped",
     twin<LastDeferredGradientDropped>, "gradient,adjoint", "forward,ledger,lockstep",
     "pytorch/pytorch 139415", small, "2 microbatches"},
    {"pipeline_stages", "pipeline_summed_as_stored", twin<SummedAsStored>, "gradient",
     "forward,ledger,lockstep", "gradients of microbatches added up in bf16, as autograd does",
     "pp=2 layers=1 tokens=96 micro_batch_size=3 dtype=bf16 fill=cancelling",
     "many microbatches, sums that cancel, storage narrower than accumulation"},
    {"pipeline_stages", "pipeline_divided_by_microbatches", twin<DividedByMicrobatches>,
     "gradient,adjoint", "forward,ledger,lockstep,replica", "pytorch/pytorch 144352", small,
     "2 microbatches; ratio 1/microbatches"},
    {"pipeline_stages", "pipeline_running_sum_divided", twin<RunningSumDivided>, "accumulate",
     "forward,gradient,adjoint,ledger", "pytorch/torchtitan 1733",
     "pp=2 tokens=6 micro_batch_size=3 layers=3 microbatches=2", "2 passes in one step"},
    {"pipeline_stages", "pipeline_sum_overwritten", twin<SumOverwritten>, "accumulate",
     "forward,gradient,adjoint,ledger", "ServiceNow/Fast-LLM 550",
     "pp=2 tokens=6 micro_batch_size=3 layers=3 microbatches=2", "2 passes in one step"},
    {"pipeline_stages", "pipeline_scaled_at_each_stage", twin<ScaledAtEachStage>,
     "gradient,adjoint", "forward,ledger,lockstep", "pytorch/torchtitan 2972", small,
     "2 stages; ratio 1/microbatches a stage"},

    {"pipeline_stages", "pipeline_detached_between_stages", twin<DetachedBetweenStages>,
     "gradient,adjoint", "forward,ledger,lockstep", "a received tensor that asks for no gradient",
     small, "2 stages"},
    {"pipeline_stages", "pipeline_detached_between_rounds", twin<DetachedBetweenRounds>,
     "gradient,adjoint", "forward,ledger,lockstep",
     "a chunk whose received input asks for no gradient", interleaved, "2 chunks a stage"},
    {"pipeline_stages", "pipeline_input_gradient_not_returned", twin<InputGradientNotReturned>,
     "gradient,adjoint", "forward,ledger,lockstep", "a first stage without an input gradient",
     small, "an input that takes a gradient"},
    {"pipeline_stages", "pipeline_stale_gradient_sent", twin<StaleGradientSent>, "gradient,adjoint",
     "forward,ledger,lockstep", "pytorch/pytorch 139404", small, "2 microbatches"},

    {"pipeline_stages", "pipeline_reduced_on_the_first_stage", twin<ReducedOnTheFirstStage>,
     "gradient,replica,ledger", "forward", "huggingface/picotron 5",
     "pp=2 dp=2 tokens=8 micro_batch_size=2 layers=3", "copies over dp, 2 stages"},
    {"pipeline_stages", "pipeline_left_local", twin<LeftLocal>, "gradient,replica,ledger",
     "forward", "huggingface/picotron 5", "pp=2 dp=2 tokens=8 micro_batch_size=2 layers=3",
     "copies over dp"},
    {"pipeline_stages", "pipeline_averaged", twin<Averaged>, "gradient,adjoint,ledger",
     "forward,replica", "meta-pytorch/torchtune 2172",
     "pp=2 dp=2 tokens=8 micro_batch_size=2 layers=3", "copies over dp; ratio 1/dp"},

    {"pipeline_tied", "pipeline_table_left_apart", twin<TableLeftApart>, "gradient,replica,ledger",
     "forward", "uw-syfi/piper 13", "pp=2 tokens=5 micro_batch_size=3 layers=2",
     "2 copies of the table"},
    {"pipeline_tied", "pipeline_table_averaged", twin<TableAveraged>, "gradient,ledger",
     "forward,replica,lockstep", "an all-reduce that divides by its group, as DDP's does",
     "pp=3 tokens=5 micro_batch_size=3 layers=3", "2 copies of the table; ratio 1/2"},
    {"pipeline_tied", "pipeline_table_summed_twice", twin<TableSummedTwice>, "gradient,ledger",
     "forward,replica,lockstep", "the embedding and the logits each reduce what they share",
     "pp=2 tokens=5 micro_batch_size=3 layers=2", "2 copies of the table; ratio 2"},
    {"pipeline_tied", "pipeline_table_summed_twice_on_one_stage", twin<TableSummedTwice>,
     "gradient", "forward", "one tensor on both lists of what is reduced",
     "tokens=5 micro_batch_size=3 layers=2", "one stage that is first and last; ratio 2"},
    {"pipeline_tied", "pipeline_table_summed_over_all_stages", twin<TableSummedOverAllStages>,
     "ledger", "forward,gradient,replica", "the group of all stages where both ends are meant",
     "pp=3 tokens=5 micro_batch_size=3 layers=3", "3 stages"},
    {"pipeline_tied", "pipeline_table_sum_on_the_first_stage", twin<TableSumOnTheFirstStage>,
     "gradient,replica", "forward,ledger,lockstep", "NVIDIA/Megatron-LM 656",
     "pp=4 tokens=4 micro_batch_size=3", "2 copies of the table"},
    {"pipeline_tied", "pipeline_table_not_reduced_over_dp", twin<TableNotReducedOverDp>,
     "gradient,replica,ledger", "forward", "NVIDIA/Megatron-LM 844",
     "pp=2 dp=2 tokens=8 micro_batch_size=3 layers=2", "copies over dp"},
    {"pipeline_tied", "pipeline_rows_give_no_gradient", twin<RowsGiveNoGradient>, "gradient",
     "forward,replica,ledger,lockstep", "NVIDIA/TransformerEngine 3437",
     "pp=2 tokens=5 micro_batch_size=3 layers=2", "both parts of the table's gradient"},
    {"pipeline_tied", "pipeline_rows_overwrite_logits", twin<RowsOverwriteLogits>, "gradient",
     "forward,ledger", "NVIDIA/TransformerEngine 3437", "tokens=5 micro_batch_size=3 layers=2",
     "one stage that is first and last"},
    {"pipeline_tied", "pipeline_table_initialised_per_stage", twin<TableInitialisedPerStage>,
     "replica", "forward,gradient,ledger", "uw-syfi/piper 25",
     "pp=3 tokens=5 micro_batch_size=3 layers=3", "a subject that makes its own parameters"},
    {"pipeline_tied", "pipeline_stale_table", twin<StaleTable>, "accumulate", "forward,gradient",
     "NVIDIA/Megatron-LM 656", "pp=2 tokens=5 micro_batch_size=3 layers=2",
     "a second forward on another table"},
};

}  // namespace

void controls_pipeline(Registry& registry) { controls::add(registry, rows); }

}  // namespace shardproof
