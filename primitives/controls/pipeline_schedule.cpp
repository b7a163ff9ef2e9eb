// Broken twins of pipeline schedules. The comment above a twin names the mistake.
#include <algorithm>
#include <utility>

#include "oracle/registry.hpp"
#include "primitives/controls/table.hpp"
#include "primitives/gemm.hpp"
#include "primitives/line.hpp"
#include "primitives/pipeline_schedule.hpp"

namespace shardproof {
namespace {

using namespace primitives;

// ---- Which microbatch's activation, which one's cotangent

// The microbatch that was taken last, or its own where none is held.
int64_t newest(const Held& held, Unit u, int64_t i) {
  const std::vector<int64_t> list = held.in_flight(u.chunk, i);
  return list.empty() ? u.microbatch : list.back();
}

// Inputs in flight are taken off the other end of their queue.
struct NewestInFlight final : PipelineSchedule {
  Unit activations_of(const Step& step, Unit u) const override {
    return {newest(step.activations, u, step.layers(u.chunk) - 1), u.chunk};
  }
};

// One closure makes the gradients of weights that are put off: of the microbatch that came last.
struct WeightsOfLatestCotangent final : PipelineSchedule {
  Unit cotangents_of(const Step& step, Unit u) const override {
    return {newest(step.gradients, u, 1), u.chunk};
  }
};
struct WeightsOfLatestInput final : PipelineSchedule {
  Unit activations_of(const Step& step, Unit u) const override {
    return {newest(step.gradients, u, 1), u.chunk};
  }
};

// There is one loss, that of the latest forward, whichever microbatch goes backward.
class LossOfLatestForward final : public PipelineSchedule {
  void after(Step& step, const Action& done) override {
    if (done.work == Work::forward && step.is_last(done.unit)) latest_ = done.unit.microbatch;
  }
  int64_t cotangent_rows_of(const Step&, int64_t) const override { return latest_; }
  int64_t latest_ = 0;
};

// Labels are read from the batch that comes next.
struct LossOfNextMicrobatch final : PipelineSchedule {
  int64_t cotangent_rows_of(const Step& step, int64_t m) const override {
    return (m + 1) % step.microbatches();
  }
};

// What arrives is kept in a ring of buffers, which is too short for what is in flight.
class Ring : public PipelineSchedule {
 protected:
  virtual int64_t length(const Step&, Unit) const = 0;  // 0: as it should be

 private:
  void begin(Step& step) override {
    ring_.clear();
    for (int64_t i = 0; i < step.stage.stages; ++i)
      ring_.push_back(step.p.workspace(step.p.storage, step.leaving.shape));
  }
  View arrival(Step& step, const Action& of) override {
    if (of.work != Work::forward || length(step, of.unit) == 0)
      return PipelineSchedule::arrival(step, of);
    return slot(step, of.unit);
  }
  View activation(Step& step, Unit u, int64_t i) override {
    const bool arrived = u.chunk > 0 && i == 0 && length(step, u) > 0;
    return arrived ? slot(step, u) : PipelineSchedule::activation(step, u, i);
  }
  View slot(const Step& step, Unit u) const {
    return step.filled(ring_[size_t(u.microbatch % length(step, u))], u.microbatch);
  }
  Views ring_;
};

// As many buffers as the stage has forwards ahead of a backward: none for the one that arrives.
struct OneBufferShort final : Ring {
  int64_t length(const Step& step, Unit) const override {
    return step.stage.stages - step.stage.own;
  }
};
// Where the pipeline turns, what a stage hands to itself is a reference to what it has made.
struct TurnByReference final : Ring {
  int64_t length(const Step& step, Unit u) const override {
    return u.chunk == step.stage.stages ? 1 : 0;
  }
};

// What is sent is given up before it has left: the next forward computes over it.
struct SentBehindTheNext final : PipelineSchedule {
  View sent(Step& step, const Action& done, const View& made) override {
    const auto [m, chunk] = done.unit;
    const bool overtaken = done.work == Work::forward && chunk == 0 && step.layers(0) == 1;
    if (overtaken && m + 1 < step.microbatches())
      gemm(plain(step.rows(step.x, m + 1)), turned(step.w[0]), step.filled(step.leaving, m + 1),
           step.p.accumulate, &step.b[0]);
    return made;
  }
};

// Each stage's chunks are numbered from the other end when a backward asks for one.
struct BackwardOfAnotherChunk final : PipelineSchedule {
  View weight(Step& step, int64_t layer, Work work) override {
    const int64_t other = (layer + step.stage.stages) % step.stage.chunks();
    return step.w[size_t(work == Work::backward ? other : layer)];
  }
};

template <class Step>
View stepped(Step& step, int64_t layer) {
  const View& w = step.w[size_t(layer)];
  const View updated = step.p.workspace(w.dtype, w.shape);
  combine(w, step.dw_sum[size_t(layer)], -1, updated);
  return updated;
}

// The optimizer steps at each microbatch: a backward meets weights that its forward has not met.
struct BackwardOfUpdatedWeights final : PipelineSchedule {
  View weight(Step& step, int64_t layer, Work work) override {
    return work == Work::forward ? step.w[size_t(layer)] : stepped(step, layer);
  }
};

// ---- What is made again before a backward

// Knows when it does so.
class MadeAgain : public PipelineSchedule {
 protected:
  bool again_ = false;

 private:
  void make_again(Step& step, Unit u) override {
    again_ = true;
    PipelineSchedule::make_again(step, u);
    again_ = false;
  }
};

// By a forward of weights that this step's gradients have moved already.
struct MadeAgainOfUpdatedWeights final : MadeAgain {
  View weight(Step& step, int64_t layer, Work) override {
    return again_ ? stepped(step, layer) : step.w[size_t(layer)];
  }
};

// From what came into the chunk last, which is another microbatch's.
struct MadeAgainOfLatestInput final : MadeAgain {
  View activation(Step& step, Unit u, int64_t i) override {
    if (again_ && i == 0) u.microbatch = newest(step.activations, u, 0);
    return PipelineSchedule::activation(step, u, i);
  }
};

// Each layer is run on what came into the chunk.
struct MadeAgainOfChunksInput final : MadeAgain {
  View activation(Step& step, Unit u, int64_t i) override {
    return PipelineSchedule::activation(step, u, again_ ? 0 : i);
  }
};

// Without the setting of the forward, in a type that has fewer bits.
struct MadeAgainNarrower final : PipelineSchedule {
  void make_again(Step& step, Unit u) override {
    PipelineSchedule::make_again(step, u);
    for (int64_t i = 1; i < step.layers(u.chunk); ++i) {
      const View made = activation(step, u, i);
      const View narrow = step.p.workspace(DType::bf16, made.shape);
      convert(made, narrow);
      convert(narrow, made);
    }
  }
};

// ---- Sums over microbatches

// One that works on its stage's sums.
class OfSums : public PipelineSchedule {
 protected:
  static Views own_sums(const Step& step) {
    Views own;
    for (size_t l = 0; l < step.w.size(); ++l)
      for (const View& sum : {step.dw_sum[l], step.db_sum[l]})
        if (sum.data) own.push_back(sum);
    return own;
  }
  // Without a call.
  static void hand_out(Step& step, const Parts& parts) {
    coalesced_all_reduce(step.p, parts, std::vector<Axis>{});
  }
};

// Of what is put off, nobody makes what is left when the last backward is done.
struct DeferredDropped final : PipelineSchedule {
  void add_weight_gradient(Step& step, Unit u, int64_t layer, const View& x,
                           const View& g) override {
    if (u.microbatch + step.stage.own < step.microbatches())
      PipelineSchedule::add_weight_gradient(step, u, layer, x, g);
  }
};

// What is put off takes the place of the sum.
struct DeferredOverwrites final : PipelineSchedule {
  void add_weight_gradient(Step& step, Unit u, int64_t layer, const View& x,
                           const View& g) override {
    set_zero(step.dw_sum[size_t(layer)]);
    PipelineSchedule::add_weight_gradient(step, u, layer, x, g);
  }
};

// Gradients are added up in the storage type, whatever type they were asked for in.
struct SummedAsStored final : PipelineSchedule {
  DType type_of_sums(const Step& step) const override { return step.p.storage; }
};

// A flag of the step says that the sum has its gradient already.
struct FirstMicrobatchAlone final : PipelineSchedule {
  void add_weight_gradient(Step& step, Unit u, int64_t layer, const View& x,
                           const View& g) override {
    if (u.microbatch == 0) PipelineSchedule::add_weight_gradient(step, u, layer, x, g);
  }
};

// Each chunk's first backward begins the stage's gradients anew.
struct ZeroedByEachChunk final : OfSums {
  void add_weight_gradient(Step& step, Unit u, int64_t layer, const View& x,
                           const View& g) override {
    if (u.microbatch == 0 && layer == step.first_layer(u.chunk))
      for (const View& sum : own_sums(step)) set_zero(sum);
    PipelineSchedule::add_weight_gradient(step, u, layer, x, g);
  }
};

// A loop of as many microbatches as there are stages, at least: their number is clipped to the
// last one, whose gradients come in again.
struct BubblesCounted final : PipelineSchedule {
  void add_weight_gradient(Step& step, Unit u, int64_t layer, const View& x,
                           const View& g) override {
    const int64_t missing = step.stage.stages - step.microbatches(),
                  again =
                      u.microbatch + 1 == step.microbatches() ? std::max<int64_t>(0, missing) : 0;
    for (int64_t n = 0; n <= again; ++n)
      PipelineSchedule::add_weight_gradient(step, u, layer, x, g);
  }
};

// ---- The scale of the loss

struct NotDivided final : PipelineSchedule {
  double divisor(const Step&, int64_t) const override { return 1; }
};
// By the schedule, and by a loss that has its share of the step already.
struct DividedTwice final : PipelineSchedule {
  double divisor(const Step& step, int64_t) const override {
    return double(step.microbatches() * step.microbatches());
  }
};
struct DividedByStages final : PipelineSchedule {
  double divisor(const Step& step, int64_t) const override { return double(step.stage.stages); }
};
// The last microbatch is no full one, and is not counted.
struct DividedByFullMicrobatches final : PipelineSchedule {
  double divisor(const Step& step, int64_t) const override {
    return double(step.stage.tokens / step.stage.size);
  }
};
// Each microbatch's loss is a mean of its own rows: those of a short one count for more.
struct MeanOfMeans final : PipelineSchedule {
  double divisor(const Step& step, int64_t m) const override {
    return PipelineSchedule::divisor(step, m) * double(step.stage.rows_of(m)) /
           double(step.stage.size);
  }
};
// A hook of each stage divides what it hands back.
struct DividedAtEachStage final : PipelineSchedule {
  View sent(Step& step, const Action& done, const View& made) override {
    if (done.work == Work::backward) scale(made, made, 1, double(step.microbatches()));
    return made;
  }
};

// ---- Over dp

// The reduction is made once and behind some action; what comes later stays with its rank.
class ReducedEarly : public OfSums {
 protected:
  virtual bool last(const Step&, const Action&) const = 0;

 private:
  void begin(Step&) override { reduced_ = false; }
  void after(Step& step, const Action& done) override {
    if (reduced_ || !last(step, done)) return;
    reduced_ = true;
    Parts sums;
    for (const View& sum : own_sums(step)) sums.push_back({sum, sum});
    PipelineSchedule::reduce(step, sums);
  }
  void reduce(Step& step, const Parts& parts) override { hand_out(step, parts); }
  bool reduced_ = false;
};

// As soon as the last backward is counted, those of weights being none.
struct ReducedBeforeDeferred final : ReducedEarly {
  bool last(const Step& step, const Action& done) const override {
    return done.work == Work::backward && done.unit.microbatch + 1 == step.microbatches();
  }
};
// The last forward arms the reduction, and the next backward, which is another microbatch's, fires.
class ReducedBehindLastForward final : public ReducedEarly {
  bool last(const Step& step, const Action& done) const override {
    if (done.work == Work::forward) armed_ = done.unit.microbatch + 1 == step.microbatches();
    return armed_ && done.work == Work::backward;
  }
  mutable bool armed_ = false;
};

// Gradients of weights that are split off pass no hook that reduces them.
struct LeftLocal final : OfSums {
  void reduce(Step& step, const Parts& parts) override { hand_out(step, parts); }
};

struct AveragedOverDp final : PipelineSchedule {
  void reduce(Step& step, const Parts& parts) override {
    coalesced_all_reduce(step.p, parts, with_ranks(step.p.rank.line(), {Axis::dp}), Reduce::avg);
  }
};

// What is to save the reductions of all microbatches but the last one has no effect.
class ReducedEachMicrobatch final : public OfSums {
  void begin(Step& step) override {
    total_.clear();
    for (const View& sum : own_sums(step)) {
      total_.push_back({sum, step.p.workspace(sum.dtype, sum.shape)});
      set_zero(total_.back().result);
    }
  }
  void after(Step& step, const Action& done) override {
    if (done.work != Work::backward) return;
    Parts reduced;
    for (const Part& part : total_)
      reduced.push_back({part.partial, step.p.workspace(part.partial.dtype, part.partial.shape)});
    PipelineSchedule::reduce(step, reduced);
    for (size_t i = 0; i < total_.size(); ++i) {
      add_into(reduced[i].result, total_[i].result);
      set_zero(total_[i].partial);
    }
  }
  void reduce(Step& step, const Parts& parts) override {
    for (const Part& part : total_) convert(part.result, part.partial);
    hand_out(step, parts);
  }
  Parts total_;
};

// ---- Schedules

// All forwards before the first backward: each stage holds every microbatch.
struct AllForwardsFirst final : PipelineSchedule {
  Timetable timetable_of(Rank& rank) const override {
    Plan plan = PipelineSchedule::timetable_of(rank).plan();
    plan.schedule = "gpipe";
    return Timetable(plan);
  }
};

// One forward more before the first backward. It states its calls, as a kernel with a schedule of
// its own does: their order is all that is left to say that it holds a microbatch more.
struct OneMoreAhead final : PipelineSchedule {
  static Timetable ahead(const Plan& plan) {
    std::vector<std::vector<Action>> orders;
    for (int64_t stage = 0; stage < plan.stages; ++stage) {
      auto order = order_of(plan, stage);
      const auto backward = std::find_if(order.begin(), order.end(), is_of<Work::backward>),
                 forward = std::find_if(backward, order.end(), is_of<Work::forward>);
      if (forward != order.end()) std::rotate(backward, forward, forward + 1);
      orders.push_back(std::move(order));
    }
    return {plan, orders};
  }
  template <Work work>
  static bool is_of(const Action& a) {
    return a.work == work;
  }
  Timetable timetable_of(Rank& rank) const override {
    return ahead(PipelineSchedule::timetable_of(rank).plan());
  }
  // Of a line without dp.
  static std::vector<Traffic> traffic(const Case& line, int rank) {
    const Stage stage(line.ranks(Axis::pp), line.mesh().coordinate(rank, Axis::pp),
                      line.at("virtual"), line.at("layers"), line.at("tokens"),
                      line.at("micro_batch_size"));
    const Timetable table =
        ahead({line.text("schedule"), stage.stages, stage.rounds, stage.microbatches()});
    std::vector<Traffic> due;
    for (int64_t tick = 0; tick < table.ticks(); ++tick)
      for (int hop : {+1, -1}) {
        if (!table.travels(tick, hop)) continue;
        const auto action = table.at(tick, stage.own);
        const bool mine = action && table.hop(*action) == hop;
        const int64_t rows = mine ? stage.rows_of(action->unit.microbatch) : 0;
        due.push_back(
            {Op::shift, Reduce::none, "pp", false, rows * line.at("hidden"), line.dtype(), hop});
      }
    return due;
  }
};

// Interleaved stages that run ahead as those with one chunk do: by one forward for each stage.
struct HalfTheLead final : PipelineSchedule {
  Timetable timetable_of(Rank& rank) const override {
    const Plan plan = PipelineSchedule::timetable_of(rank).plan();
    Plan other = plan;
    other.schedule = "zero_bubble";
    std::vector<std::vector<Action>> orders;
    for (int64_t stage = 0; stage < plan.stages; ++stage) {
      orders.push_back(order_of(other, stage));
      std::erase_if(orders.back(), [](const Action& a) { return a.work == Work::weights; });
    }
    return {plan, orders};
  }
};

using controls::Row;
using controls::twin;

constexpr controls::RowsOf of{"pipeline_schedule"};

const char* const small = "pp=2 tokens=8 micro_batch_size=2 layers=4";
const char* const split = "pp=2 schedule=zero_bubble tokens=8 micro_batch_size=2 layers=4";
const char* const again = "pp=2 recompute=on tokens=8 micro_batch_size=2 layers=6";
const char* const again_rounded =
    "pp=2 recompute=on tokens=8 micro_batch_size=2 layers=6 dtype=f32 fill=normal";
const char* const interleaved =
    "pp=2 schedule=interleaved virtual=2 tokens=8 micro_batch_size=2 layers=4";
const char* const mean = "pp=3 loss=mean tokens=8 micro_batch_size=2 layers=3";
const char* const uneven = "pp=2 loss=mean tokens=7 micro_batch_size=2 layers=3";
const char* const copies = "pp=2 dp=2 tokens=16 micro_batch_size=2 layers=2";
const char* const split_copies =
    "pp=2 dp=2 schedule=zero_bubble tokens=16 micro_batch_size=2 layers=2";

const Row rows[] = {
    of("schedule_newest_in_flight", twin<NewestInFlight>, "forward", "ledger,lockstep",
       "pytorch/pytorch 127796", small, "2 microbatches in flight"),
    of("schedule_weights_of_latest_cotangent", twin<WeightsOfLatestCotangent>, "forward",
       "ledger,lockstep", "pytorch/pytorch 128983", split, "a weight gradient that is put off"),
    of("schedule_weights_of_latest_input", twin<WeightsOfLatestInput>, "forward", "ledger,lockstep",
       "pytorch/pytorch 128983", split, "a weight gradient that is put off"),
    of("schedule_loss_of_latest_forward", twin<LossOfLatestForward>, "forward", "ledger,lockstep",
       "deepspeedai/DeepSpeed 3900", "pp=2 schedule=gpipe tokens=8 micro_batch_size=2 layers=3",
       "2 microbatches in flight on the last stage, which 1F1B never has"),
    of("schedule_loss_of_next_microbatch", twin<LossOfNextMicrobatch>, "forward", "ledger,lockstep",
       "deepspeedai/DeepSpeed 5729", small, "2 microbatches"),
    of("schedule_one_buffer_short", twin<OneBufferShort>, "forward", "ledger,lockstep",
       "deepspeedai/DeepSpeed 2800", small, "a microbatch that arrives before a backward"),
    of("schedule_turn_by_reference", twin<TurnByReference>, "forward", "ledger,lockstep",
       "an activation that a stage hands to itself without a copy",
       "pp=2 schedule=zbv virtual=2 tokens=8 micro_batch_size=2 layers=4",
       "2 microbatches in flight behind the turn"),
    of("schedule_sent_behind_the_next", twin<SentBehindTheNext>, "forward", "ledger,lockstep",
       "NVIDIA/Megatron-LM 4047", "pp=2 tokens=8 micro_batch_size=2 layers=2", "2 microbatches"),
    of("schedule_backward_of_another_chunk", twin<BackwardOfAnotherChunk>, "forward",
       "ledger,lockstep", "hpcaitech/ColossalAI 4348", interleaved, "2 chunks a stage"),
    of("schedule_backward_of_updated_weights", twin<BackwardOfUpdatedWeights>, "forward",
       "ledger,lockstep", "msr-fiddle/pipedream 22", small, "2 microbatches"),

    of("schedule_made_again_of_updated_weights", twin<MadeAgainOfUpdatedWeights>, "forward",
       "ledger,lockstep",
       "an optimizer that steps at each microbatch, before its layers are run again", again,
       "a chunk of 2 layers, 2 microbatches"),
    of("schedule_made_again_of_latest_input", twin<MadeAgainOfLatestInput>, "forward",
       "ledger,lockstep", "a checkpoint that keeps one input for all microbatches", again,
       "2 microbatches in flight on a stage that has a chunk of 2 layers and is not the first"),
    of("schedule_made_again_of_chunks_input", twin<MadeAgainOfChunksInput>, "forward",
       "ledger,lockstep", "NVIDIA/Megatron-LM 290", again, "a chunk of 3 layers"),
    of("schedule_made_again_narrower", twin<MadeAgainNarrower>, "forward", "ledger,lockstep",
       "NVIDIA/Megatron-LM 7538, NVIDIA/TransformerEngine 787", again_rounded,
       "a chunk of 2 layers, storage wider than bf16"),

    of("schedule_deferred_dropped", twin<DeferredDropped>, "forward", "ledger,lockstep",
       "sail-sg/zero-bubble-pipeline-parallelism 56", split,
       "weight gradients that are left when the last backward is done"),
    of("schedule_deferred_overwrites", twin<DeferredOverwrites>, "forward", "ledger,lockstep",
       "NVIDIA/TransformerEngine 3552", split, "2 microbatches"),
    of("schedule_summed_as_stored", twin<SummedAsStored>, "forward", "ledger,lockstep",
       "gradients of microbatches added up in bf16, as autograd does",
       "pp=2 layers=1 tokens=96 micro_batch_size=3 dtype=bf16 fill=cancelling",
       "many microbatches, sums that cancel, storage narrower than accumulation"),
    of("schedule_first_microbatch_alone", twin<FirstMicrobatchAlone>, "forward", "ledger,lockstep",
       "AMD-AGI/Primus 1046", small, "2 microbatches"),
    of("schedule_zeroed_by_each_chunk", twin<ZeroedByEachChunk>, "forward", "ledger,lockstep",
       "NVIDIA-NeMo/Automodel 3530", interleaved, "2 chunks a stage"),
    of("schedule_bubbles_counted", twin<BubblesCounted>, "forward", "ledger,lockstep",
       "pytorch/torchtitan 775, AMD-AGI/Primus 1003", "pp=4 tokens=5 micro_batch_size=2 layers=4",
       "fewer microbatches than stages"),

    of("schedule_not_divided", twin<NotDivided>, "forward", "ledger,lockstep",
       "deepspeedai/DeepSpeed 7773", mean, "loss=mean; ratio microbatches"),
    of("schedule_divided_twice", twin<DividedTwice>, "forward", "ledger,lockstep",
       "areal-project/AReaL 1273", mean, "loss=mean; ratio 1/microbatches"),
    of("schedule_divided_by_stages", twin<DividedByStages>, "forward", "ledger,lockstep",
       "the number of stages where that of microbatches is meant", mean,
       "another number of stages than of microbatches"),
    of("schedule_divided_by_full_microbatches", twin<DividedByFullMicrobatches>, "forward",
       "ledger,lockstep", "a number of microbatches that is rounded down", uneven,
       "a smaller last microbatch"),
    of("schedule_mean_of_means", twin<MeanOfMeans>, "forward", "ledger,lockstep",
       "bigscience-workshop/Megatron-DeepSpeed 169", uneven, "a smaller last microbatch"),
    of("schedule_divided_at_each_stage", twin<DividedAtEachStage>, "forward", "ledger,lockstep",
       "deepspeedai/DeepSpeed 8154", small, "2 stages; ratio 1/microbatches a stage"),

    of("schedule_reduced_before_deferred", twin<ReducedBeforeDeferred>, "forward,replica", "",
       "pytorch/pytorch 134052, NVIDIA/Megatron-LM 1012", split_copies,
       "copies over dp, weight gradients that are put off"),
    of("schedule_reduced_behind_last_forward", twin<ReducedBehindLastForward>, "forward,replica",
       "", "meta-pytorch/torchrec 4758", copies, "copies over dp, 2 microbatches in flight"),
    of("schedule_left_local", twin<LeftLocal>, "forward,replica,ledger", "",
       "pytorch/pytorch 144530", split_copies, "copies over dp"),
    of("schedule_averaged_over_dp", twin<AveragedOverDp>, "forward,ledger", "replica",
       "meta-pytorch/torchtune 2172", copies, "copies over dp; ratio 1/dp"),
    of("schedule_reduced_each_microbatch", twin<ReducedEachMicrobatch>, "ledger", "forward,replica",
       "NVIDIA/cosmos-framework 161", copies, "copies over dp, 2 microbatches"),

    of("schedule_all_forwards_first", twin<AllForwardsFirst>, "ledger", "forward,lockstep",
       "1F1B that holds as many microbatches as GPipe", small, "more microbatches than stages"),
    of("schedule_half_the_lead", twin<HalfTheLead>, "ledger", "forward,lockstep",
       "NVIDIA/Megatron-LM 169, NVIDIA/Megatron-LM 675", interleaved, "2 stages of 2 chunks"),
};

}  // namespace

void controls_pipeline_schedule(Registry& registry) {
  controls::add(registry, rows);
  Control ahead = controls::control_of(
      of("schedule_one_more_ahead", twin<OneMoreAhead>, "ledger", "forward,lockstep",
         "a warm-up of as many forwards as there are stages behind, and one", small,
         "2 microbatches, a kernel that states its calls"));
  ahead.declared.traffic = OneMoreAhead::traffic;
  registry.add(std::move(ahead));
}

}  // namespace shardproof
