// Broken twins of a distributed optimizer's step. The comment above a twin names the mistake.
#include <algorithm>
#include <cmath>
#include <utility>

#include "oracle/registry.hpp"
#include "primitives/controls/table.hpp"
#include "primitives/controls/values.hpp"
#include "primitives/gemm.hpp"
#include "primitives/line.hpp"
#include "primitives/sharded_step.hpp"

namespace shardproof {
namespace {

using namespace primitives;
using controls::change;
using Views = std::vector<View>;
using Doubles = std::vector<double>;

void round_to_type(Parallel& p, const View& v, DType type) {
  const View rounded = p.workspace(type, v.shape);
  convert(v, rounded);
  convert(rounded, v);
}

// ---- Where elements lie

// Each parameter begins at a multiple of the ranks in one buffer and right behind the one before in
// the other.
std::vector<int64_t> each_padded(const FlatBuffer& f) {
  std::vector<int64_t> places;
  int64_t at = 0;
  for (size_t k = 0; k + 1 < f.first.size(); ++k) {
    const int64_t count = f.first[k + 1] - f.first[k];
    places.push_back(std::min(at, f.padded() - count));
    at += (count + f.ranks - 1) / f.ranks * f.ranks;
  }
  return places;
}

struct ParametersPaddedApart final : ShardedStep {
  void unpack_parameters(const FlatBuffer& f, const View& flat, const Views& all) override {
    unpack(each_padded(f), flat, all);
  }
};

struct GradientsPaddedApart final : ShardedStep {
  void pack_gradients(const FlatBuffer& f, const Views& all, const View& flat) override {
    pack(each_padded(f), all, flat);
  }
};

// Gradients in the order in which backward makes them, parameters in that of the model.
struct GradientsInReverse final : ShardedStep {
  void pack_gradients(const FlatBuffer&, const Views& all, const View& flat) override {
    std::vector<int64_t> places(all.size());
    int64_t at = 0;
    for (size_t k = all.size(); k-- > 0; at += all[k].elements()) places[k] = at;
    pack(places, all, flat);
  }
};

// State that was saved by ranks in one order is loaded by them in another.
struct StateOfOtherRank final : ShardedStep {
  View own_state(Parallel& p, const FlatBuffer& f, const View& whole) const override {
    std::vector<Axis> axes = axes_of_shards(p.rank.line());
    std::reverse(axes.begin(), axes.end());
    const int rank = p.rank.along(axes).rank();
    return whole.narrow(0, std::min(f.begin(rank), f.elements() - f.count(f.own)), f.count(f.own));
  }
};

// Shards of equal length without padding, rounded down: the last elements are nobody's.
struct TailLeftOut final : ShardedStep {
  void update_shard(Parallel& p, const FlatBuffer& f, const PieceTensors& own) override {
    ShardedStep::update_shard(p, f, own);
    const int64_t covered = f.elements() / f.ranks * f.ranks, left = f.elements() - covered,
                  first = f.begin(f.own), count = f.count(f.own);
    const int64_t kept = std::clamp<int64_t>(f.elements() - left - first, 0, count);
    const PieceTensors tail = part_of(own, kept, count - kept);
    convert(tail.master, tail.next_master);
    convert(tail.m, tail.next_m);
    if (tail.v.data) convert(tail.v, tail.next_v);
  }
};

// ---- Which parameters decay

// One parameter group a shard, with the decay of the parameter that it begins with.
struct DecayByShard final : ShardedStep {
  bool decays(const FlatBuffer& f, const Piece&) const override {
    const auto pieces = f.pieces(f.own);
    return !pieces.empty() && f.matrix[pieces[0].parameter];
  }
};

// A flat shard has one dim, and what has one dim is taken for a bias: nothing decays.
struct NothingDecays final : ShardedStep {
  bool decays(const FlatBuffer&, const Piece&) const override { return false; }
};

// One group for all: gains and biases decay.
struct VectorsDecay final : ShardedStep {
  bool decays(const FlatBuffer&, const Piece&) const override { return true; }
};

// The ranges of the groups are looked up by the index in the own shard.
struct DecayByLocalIndex final : ShardedStep {
  void update_shard(Parallel& p, const FlatBuffer& f, const PieceTensors& own) override {
    const StepNumbers by = numbers(p.rank.line());
    for (size_t k = 0; k + 1 < f.first.size(); ++k) {
      const int64_t from = std::min(f.first[k], f.count(f.own)),
                    to = std::min(f.first[k + 1], f.count(f.own));
      StepNumbers of_piece = by;
      if (!f.matrix[k]) of_piece.decay = 0;
      update(p, part_of(own, from, to - from), of_piece);
    }
  }
};

// Decay is added to the gradient, as Adam with L2 does, and passes through the moments.
struct DecayInGradient final : ShardedStep {
  void update(Parallel& p, const PieceTensors& t, const StepNumbers& by) override {
    const View g = p.workspace(t.gradient.dtype, t.gradient.shape);
    combine(t.gradient, t.master, by.decay, g);
    PieceTensors coupled = t;
    coupled.gradient = g;
    StepNumbers without = by;
    without.decay = 0;
    ShardedStep::update(p, coupled, without);
  }
};

// ---- Gradients

// A sum where the mean is due, and the other way round.
struct MeanSummed final : ShardedStep {
  void reduce(Parallel& p, Communicator& group, const View& in, const View& out, Reduce) override {
    ShardedStep::reduce(p, group, in, out, Reduce::sum);
  }
};
struct SumAveraged final : ShardedStep {
  void reduce(Parallel& p, Communicator& group, const View& in, const View& out, Reduce) override {
    ShardedStep::reduce(p, group, in, out, Reduce::avg);
  }
};

// The mean is divided by the number of ranks once more, or by that of dp where cp has gradients of
// its own, too.
struct DividedTwice final : ShardedStep {
  void reduce(Parallel& p, Communicator& group, const View& in, const View& out,
              Reduce how) override {
    ShardedStep::reduce(p, group, in, out, how);
    scale(out, out, 1, group.size());
  }
};
struct DividedByDpAlone final : ShardedStep {
  void reduce(Parallel& p, Communicator& group, const View& in, const View& out,
              Reduce how) override {
    ShardedStep::reduce(p, group, in, out, how);
    scale(out, out, group.size(), p.rank.line().ranks(Axis::dp));
  }
};

// Reduced over dp; what cp has seen of the tokens is left out.
struct ReducedOverDpAlone final : ShardedStep {
  void reduce(Parallel& p, Communicator& group, const View& in, const View& out,
              Reduce how) override {
    const View sums = p.workspace(in.dtype, in.shape);
    p.rank.along(Axis::dp).all_reduce(in, sums, how);
    convert(sums.narrow(0, group.rank() * out.elements(), out.elements()), out);
  }
};

// The own gradient steps the own shard.
struct GradientsLeftLocal final : ShardedStep {
  void reduce(Parallel&, Communicator& group, const View& in, const View& out, Reduce) override {
    convert(in.narrow(0, group.rank() * out.elements(), out.elements()), out);
  }
};

// Each copy of a shard is stepped by what its own ranks have seen.
struct CopiesLeftLocal final : ShardedStep {
  void reduce_copies(Parallel&, const View&, Reduce) override {}
};

// Shards are cut by the mesh [cp, dp] where gradients are reduced, by [dp, cp] elsewhere.
struct GradientsOfOtherOwner final : ShardedStep {
  void reduce(Parallel& p, Communicator&, const View& in, const View& out, Reduce how) override {
    std::vector<Axis> axes = axes_of_shards(p.rank.line());
    std::reverse(axes.begin(), axes.end());
    ShardedStep::reduce(p, p.rank.along(axes), in, out, how);
  }
};

// The mean over dp is taken over the ranks of cp as well, whose gradients are parts of one.
struct DividedByCpToo final : ShardedStep {
  double left_to_divide(const Case& line) const override {
    return ShardedStep::left_to_divide(line) * line.ranks(Axis::cp);
  }
};
struct AveragedByEveryCall final : ShardedStep {
  Reduce reduction(const Case&, const std::vector<Axis>&) const override { return Reduce::avg; }
};

// A loss that was divided by its tokens is taken for one that nobody divides.
struct NothingLeftToDivide final : ShardedStep {
  double left_to_divide(const Case&) const override { return 1; }
};

// ---- Microbatches

// The engine divides by their number, and so has the loss.
struct MicrobatchesDividedTwice final : ShardedStep {
  double left_to_divide(const Case& line) const override {
    return ShardedStep::left_to_divide(line) * double(microbatches_of(line));
  }
};

// The gradient of a microbatch takes the place of the sum.
struct LastMicrobatchAlone final : ShardedStep {
  View own_sum(Parallel& p, const FlatBuffer& f, const StepTensors& t, DType type) override {
    const int64_t n = microbatches_of(p.rank.line());
    const View last = p.workspace(type, {f.padded()});
    pack_gradients(f, gradients_of(t, n, n - 1), last);
    return last;
  }
};

// Something is done to what was added up, with each microbatch.
struct SumTouchedByEveryMicrobatch : ShardedStep {
  View own_sum(Parallel& p, const FlatBuffer& f, const StepTensors& t, DType type) override {
    const int64_t n = microbatches_of(p.rank.line());
    const View sum = p.workspace(type, {f.padded()}), more = p.workspace(type, {f.padded()});
    set_zero(sum);
    for (int64_t i = 0; i < n; ++i) {
      pack_gradients(f, gradients_of(t, n, i), more);
      add_into(more, sum);
      touch(p, f, sum, i + 1 == n);
    }
    return sum;
  }
  virtual void touch(Parallel&, const FlatBuffer&, const View& sum, bool last) = 0;
};

// What was added up is scaled with each microbatch, and not only what is added.
struct RunningSumScaled final : SumTouchedByEveryMicrobatch {
  void touch(Parallel& p, const FlatBuffer&, const View& sum, bool last) override {
    const auto n = double(microbatches_of(p.rank.line()));
    scale(sum, sum, 1, n);
    if (last) scale(sum, sum, n);  // which the loss of the mean is divided by
  }
};

// Each microbatch reduces what was added up so far, and not the last one alone.
struct ReducedByEveryMicrobatch : SumTouchedByEveryMicrobatch {
  void touch(Parallel& p, const FlatBuffer& f, const View& sum, bool last) final {
    const Case& line = p.rank.line();
    if (!last && f.ranks > 1) reduce_so_far(p, f, sum, reduction(line, axes_of_shards(line)));
  }
  virtual void reduce_so_far(Parallel&, const FlatBuffer&, const View& sum, Reduce) = 0;

  View shard_of(Parallel& p, const FlatBuffer& f, const View& sum, Reduce how) {
    const View own = p.workspace(sum.dtype, {f.block});
    reduce(p, group_of_shards(p), sum, own, how);
    return own;
  }
};

// The whole buffer, in place: a sum counts the first microbatch p^(n-1) times. The mean of what is
// equal on all ranks is what it was, and its values are right.
struct BufferReducedByEveryMicrobatch final : ReducedByEveryMicrobatch {
  void reduce_so_far(Parallel& p, const FlatBuffer&, const View& sum, Reduce how) override {
    all_reduce(p.rank, group_of_shards(p), sum, sum, how);
  }
};

// A reduce-scatter in place: the next one finds what was reduced in the own shard, and on the other
// ranks their parts of it.
struct ShardReducedByEveryMicrobatch final : ReducedByEveryMicrobatch {
  void reduce_so_far(Parallel& p, const FlatBuffer& f, const View& sum, Reduce how) override {
    convert(shard_of(p, f, sum, how), sum.narrow(0, f.own * f.block, f.block));
  }
};

// Shards are added up, and the buffer is not cleared behind its reduction: of n microbatches the
// first counts n times.
class BufferNotCleared final : public ReducedByEveryMicrobatch {
 public:
  void reduce_so_far(Parallel& p, const FlatBuffer& f, const View& sum, Reduce how) override {
    shard_ = to_doubles(shard_of(p, f, sum, how));
  }
  void reduce(Parallel& p, Communicator& group, const View& in, const View& out,
              Reduce how) override {
    ShardedStep::reduce(p, group, in, out, how);
    const Doubles before = std::exchange(shard_, {});
    if (!before.empty()) change(out, [&](size_t i, double sum) { return before[i] + sum; });
  }

 private:
  Doubles shard_;
};

// Added up in the storage type: what a microbatch adds below its last bit is lost.
struct AddedUpAsStored final : ShardedStep {
  View own_sum(Parallel& p, const FlatBuffer& f, const StepTensors& t, DType type) override {
    const View stored = ShardedStep::own_sum(p, f, t, p.storage),
               sum = p.workspace(type, stored.shape);
    convert(stored, sum);
    return sum;
  }
};

// The sum travels in the storage type, whatever type was asked for.
struct ReducedAsStored final : ShardedStep {
  DType type_on_wire(const Parallel& p) const override { return p.storage; }
};

// ---- The norm

// Of the own shard alone.
struct NormOfOwnShard final : ShardedStep {
  void sum_squares(Parallel& p, const FlatBuffer& f, const View& own, const View& total) override {
    const View unused = p.workspace(own.dtype, own.shape);
    ShardedStep::sum_squares(p, f, own, unused);
    convert(own, total);
  }
};

// Each rank counts what all of them have: the sum is p times the square.
struct NormCountedByEveryRank final : ShardedStep {
  void sum_squares(Parallel& p, const FlatBuffer& f, const View& own, const View& total) override {
    ShardedStep::sum_squares(p, f, own, total);
    scale(total, total, f.ranks);
  }
};

// Summed over the copies of the shards as well.
struct NormCountsCopies final : ShardedStep {
  void sum_squares(Parallel& p, const FlatBuffer& f, const View& own, const View& total) override {
    ShardedStep::sum_squares(p, f, own, total);
    p.rank.along(Axis::dp).all_reduce(total, total);
  }
};

// Norms are added, and not their squares.
struct NormsAdded final : ShardedStep {
  void sum_squares(Parallel& p, const FlatBuffer& f, const View& own, const View& total) override {
    const View root = p.workspace(own.dtype, own.shape);
    fill_from(root, Doubles{std::sqrt(to_doubles(own)[0])});
    ShardedStep::sum_squares(p, f, root, total);
    change(total, [](size_t, double sum) { return sum * sum; });
  }
};

// Each rank scales its own gradient before it is summed.
struct ClippedBeforeReduced final : ShardedStep {
  void pack_gradients(const FlatBuffer& f, const Views& all, const View& flat) override {
    ShardedStep::pack_gradients(f, all, flat);
    double squares = 0;
    for (double g : to_doubles(flat)) squares += g * g;
    scale(flat, flat, std::min(1.0, 1 / (std::sqrt(squares) + 1e-6)));
  }
};

// The norm is told and nothing is scaled.
struct NormNotSpent final : ShardedStep {
  View clipped(Parallel& p, const FlatBuffer& f, const StepTensors& t,
               const View& gradient) override {
    ShardedStep::clipped(p, f, t, gradient);
    return gradient;
  }
};

// ---- The update

// The step is counted after the update.
struct CountedAfterUpdate final : ShardedStep {
  StepNumbers numbers(const Case& line) const override {
    StepNumbers n = ShardedStep::numbers(line);
    const double step = double(line.at("step")) - 1;
    n.correction1 = 1 - std::pow(n.beta1, step), n.correction2 = 1 - std::pow(n.beta2, step);
    return n;
  }
};

// A counter that every parameter of the shard advances: from the second one on it is ahead.
struct CountedByParameter final : ShardedStep {
  void update_shard(Parallel& p, const FlatBuffer& f, const PieceTensors& own) override {
    StepNumbers by = numbers(p.rank.line());
    double step = double(p.rank.line().at("step"));
    for (const Piece& piece : f.pieces(f.own)) {
      by.correction1 = 1 - std::pow(by.beta1, step), by.correction2 = 1 - std::pow(by.beta2, step);
      StepNumbers of_piece = by;
      if (!decays(f, piece)) of_piece.decay = 0;
      update(p, part_of(own, piece.first - f.begin(f.own), piece.count), of_piece);
      ++step;
    }
  }
};

// sqrt(v^ + eps) in place of sqrt(v^) + eps.
struct EpsInsideRoot final : ShardedStep {
  void update(Parallel& p, const PieceTensors& t, const StepNumbers& by) override {
    ShardedStep::update(p, t, by);
    const Doubles x = to_doubles(t.master), m = to_doubles(t.next_m), v = to_doubles(t.next_v);
    change(t.next_master, [&](size_t i, double) {
      return x[i] * (1 - by.lr * by.decay) -
             by.lr * m[i] / by.correction1 / std::sqrt(v[i] / by.correction2 + by.eps);
    });
  }
};

// sqrt(v) + eps under both corrections: eps is divided, too.
struct EpsCorrected final : ShardedStep {
  StepNumbers numbers(const Case& line) const override {
    StepNumbers n = ShardedStep::numbers(line);
    n.eps /= std::sqrt(n.correction2);
    return n;
  }
};

// The second moment takes the gradient as the backward left it.
struct SecondMomentOfOwnGradient final : ShardedStep {
  View reduced_gradient(Parallel& p, const FlatBuffer& f, const StepTensors& t) override {
    const View all = p.workspace(p.accumulate, {f.padded()});
    pack(f.first, t.gradients, all);
    local_ = to_doubles(all.narrow(0, f.begin(f.own), f.count(f.own)));
    return ShardedStep::reduced_gradient(p, f, t);
  }
  void update_shard(Parallel& p, const FlatBuffer& f, const PieceTensors& own) override {
    ShardedStep::update_shard(p, f, own);
    const StepNumbers by = numbers(p.rank.line());
    const Doubles v = to_doubles(own.v);
    change(own.next_v, [&](size_t i, double) {
      return by.beta2 * v[i] + (1 - by.beta2) * local_[i] * local_[i];
    });
  }

 private:
  Doubles local_;
};

// Moments are kept in the type of the parameters, or masters are.
struct MomentsAsStored final : ShardedStep {
  void update_shard(Parallel& p, const FlatBuffer& f, const PieceTensors& own) override {
    ShardedStep::update_shard(p, f, own);
    round_to_type(p, own.next_m, p.storage);
    if (own.v.data) round_to_type(p, own.next_v, p.storage);
  }
};
struct MastersAsStored final : ShardedStep {
  void update_shard(Parallel& p, const FlatBuffer& f, const PieceTensors& own) override {
    ShardedStep::update_shard(p, f, own);
    round_to_type(p, own.next_master, p.storage);
  }
};

// The step begins at the parameter as it is stored: what earlier steps have added below its last
// digit is lost.
struct StepOfStoredParameter final : ShardedStep {
  View own_master(Parallel& p, const FlatBuffer& f, const StepTensors& t) override {
    const View own = own_shard_of_parameters(p, f, t).narrow(0, 0, f.count(f.own)),
               master = p.workspace(p.accumulate, own.shape);
    convert(own, master);
    return master;
  }
};

// Masters were made of the parameters before others were loaded into these.
class MastersOfFirstParameters final : public ShardedStep {
 public:
  View own_master(Parallel& p, const FlatBuffer& f, const StepTensors& t) override {
    const View master = ShardedStep::own_master(p, f, t);
    if (kept_.size() != size_t(master.elements())) kept_ = to_doubles(master);
    const View first = p.workspace(master.dtype, master.shape);
    fill_from(first, kept_);
    return first;
  }

 private:
  Doubles kept_;
};

// ---- Parameters

// Gathered before the update: every rank has the parameters of the step before.
struct GatheredBeforeUpdate final : ShardedStep {
  void gather(Parallel& p, const FlatBuffer& f, const StepTensors& t, const View&,
              const View& all) override {
    ShardedStep::gather(p, f, t, own_shard_of_parameters(p, f, t), all);
  }
};

// The last rank reads the first shard before it has come.
struct FirstShardStaleOnLastRank final : ShardedStep {
  void gather(Parallel& p, const FlatBuffer& f, const StepTensors& t, const View& shard,
              const View& all) override {
    ShardedStep::gather(p, f, t, shard, all);
    if (f.own != f.ranks - 1) return;
    const View before = p.workspace(p.storage, {f.padded()});
    pack(f.first, t.parameters, before);
    convert(before.narrow(0, 0, f.block), all.narrow(0, 0, f.block));
  }
};

// The own shard was staged after the call, into a buffer that nobody reads.
struct OwnShardOfOldParameters final : ShardedStep {
  void gather(Parallel& p, const FlatBuffer& f, const StepTensors& t, const View& shard,
              const View& all) override {
    ShardedStep::gather(p, f, t, shard, all);
    convert(own_shard_of_parameters(p, f, t), all.narrow(0, f.own * f.block, f.block));
  }
};

// The mesh is flattened with its axes in the other order.
struct GatheredDpFirst final : ShardedStep {
  std::vector<Axis> gathered_over(const Case& line) const override {
    std::vector<Axis> axes = axes_of_shards(line);
    std::reverse(axes.begin(), axes.end());
    return axes;
  }
};

using controls::Row;
using controls::twin;

constexpr controls::RowsOf of{"sharded_step"};

const Row rows[] = {
    of("step_parameters_padded_apart", twin<ParametersPaddedApart>, "forward",
       "ledger,lockstep,replica", "NVIDIA/Megatron-LM 5077, PufferAI/PufferLib 691",
       "dp=4 rule=sgd fill=integers", "p does not divide a parameter"),
    of("step_gradients_padded_apart", twin<GradientsPaddedApart>, "forward",
       "ledger,lockstep,replica", "NVIDIA/Megatron-LM 5077", "dp=4 rule=sgd fill=integers",
       "p does not divide a parameter"),
    of("step_gradients_in_reverse", twin<GradientsInReverse>, "forward", "ledger,lockstep,replica",
       "deepspeedai/DeepSpeed 2343", "dp=2 rule=sgd fill=integers",
       "parameters of different sizes"),
    of("step_state_of_other_rank", twin<StateOfOtherRank>, "forward", "ledger,lockstep,replica",
       "NVIDIA/Megatron-LM 7162", "dp=2 cp=2 state=whole rule=sgd fill=integers", "two axes"),
    of("step_tail_left_out", twin<TailLeftOut>, "forward", "ledger,lockstep,replica",
       "KellerJordan/Muon 28", "dp=4 rule=sgd fill=integers", "p does not divide all elements"),

    of("step_decay_by_shard", twin<DecayByShard>, "forward", "ledger,lockstep,replica",
       "verl-project/verl 7215", "dp=2 rule=sgd fill=integers",
       "a border of groups inside of a shard"),
    of("step_nothing_decays", twin<NothingDecays>, "forward", "ledger,lockstep,replica",
       "mlfoundations/open_clip 358", "dp=2 rule=sgd fill=integers", "decay above 0"),
    of("step_vectors_decay", twin<VectorsDecay>, "forward", "ledger,lockstep,replica",
       "NVIDIA-NeMo/Speech 12123, ServiceNow/Fast-LLM 542", "dp=2 rule=sgd fill=integers",
       "gains and biases"),
    of("step_decay_by_local_index", twin<DecayByLocalIndex>, "forward", "ledger,lockstep,replica",
       "pytorch/pytorch 101343", "dp=4 rule=sgd fill=integers",
       "shards that begin inside of a matrix"),
    of("step_decay_in_gradient", twin<DecayInGradient>, "forward", "ledger,lockstep,replica",
       "nntrainer/nntrainer 3565, deepspeedai/DeepSpeed 482", "dp=2", "decay above 0, AdamW"),

    of("step_mean_summed", twin<MeanSummed>, "forward,ledger", "lockstep,replica",
       "a sum that is spent as the mean that it was meant to be",
       "dp=4 reduce=mean rule=sgd fill=integers", "p >= 2"),
    of("step_sum_averaged", twin<SumAveraged>, "forward,ledger", "lockstep,replica",
       "meta-pytorch/torchtune 2172", "dp=4 rule=sgd fill=integers", "p >= 2"),
    of("step_mean_divided_twice", twin<DividedTwice>, "forward", "ledger,lockstep,replica",
       "hamishivi/tmax 9, ByteDance-Seed/VeOmni 1079", "dp=4 reduce=mean rule=sgd fill=integers",
       "p >= 2"),
    of("step_mean_divided_by_dp_alone", twin<DividedByDpAlone>, "forward",
       "ledger,lockstep,replica", "deepspeedai/DeepSpeed 5555, deepspeedai/DeepSpeed 6546",
       "dp=2 cp=2 reduce=mean rule=sgd fill=integers", "two axes"),
    of("step_gradient_reduced_over_dp_alone", twin<ReducedOverDpAlone>, "forward,ledger",
       "lockstep,replica", "pytorch/torchtitan 685", "dp=2 cp=2 rule=sgd fill=integers",
       "two axes"),
    of("step_gradient_left_local", twin<GradientsLeftLocal>, "forward,ledger", "replica",
       "deepspeedai/DeepSpeed 4321", "dp=4 rule=sgd fill=integers", "p >= 2"),
    of("step_copies_left_local", twin<CopiesLeftLocal>, "forward,replica,ledger", "",
       "NVIDIA-NeMo/Automodel 3135", "dp=2 cp=2 shard=cp rule=sgd fill=integers",
       "copies of shards"),
    of("step_gradient_reduced_as_stored", twin<ReducedAsStored>, "forward,ledger",
       "lockstep,replica", "pytorch/pytorch 190626", "dp=4 dtype=bf16 wire=f32",
       "wire wider than storage"),

    of("step_gradient_of_other_owner", twin<GradientsOfOtherOwner>, "forward", "replica",
       "a mesh [dp, cp] that is flattened as [cp, dp]", "dp=2 cp=2 rule=sgd fill=integers",
       "two axes"),

    of("step_cp_left_out_of_mean_dp", twin<ReducedOverDpAlone>, "forward,ledger",
       "lockstep,replica", "pytorch/torchtitan 685",
       "dp=2 cp=2 reduce=mean_dp rule=sgd fill=integers", "two axes"),
    of("step_mean_dp_divided_by_cp_too", twin<DividedByCpToo>, "forward", "ledger,lockstep,replica",
       "deepspeedai/DeepSpeed 4530, hamishivi/tmax 9",
       "dp=2 cp=2 reduce=mean_dp rule=sgd fill=integers", "ranks of cp"),
    of("step_shards_averaged_for_mean_dp", twin<AveragedByEveryCall>, "forward,ledger",
       "lockstep,replica", "deepspeedai/DeepSpeed 4530",
       "dp=2 cp=2 shard=cp reduce=mean_dp rule=sgd fill=integers", "ranks of cp"),
    of("step_mean_dp_not_divided", twin<NothingLeftToDivide>, "forward", "ledger,lockstep,replica",
       "deepspeedai/DeepSpeed 5248", "dp=2 cp=2 reduce=mean_dp rule=sgd fill=integers",
       "a mean over dp in a call over both"),

    of("step_microbatches_not_divided", twin<NothingLeftToDivide>, "forward",
       "ledger,lockstep,replica", "agokrani/distillKitPlus 5",
       "dp=2 microbatches=2 loss=mean rule=sgd fill=integers", "2 microbatches in one step"),
    of("step_microbatches_divided_twice", twin<MicrobatchesDividedTwice>, "forward",
       "ledger,lockstep,replica", "huggingface/accelerate 3533",
       "dp=2 microbatches=2 loss=mean rule=sgd fill=integers", "2 microbatches in one step"),
    of("step_last_microbatch_alone", twin<LastMicrobatchAlone>, "forward",
       "ledger,lockstep,replica", "instructlab/training 414",
       "dp=2 microbatches=2 rule=sgd fill=integers", "2 microbatches in one step"),
    of("step_running_sum_scaled", twin<RunningSumScaled>, "forward", "ledger,lockstep,replica",
       "NVIDIA/Megatron-LM 6773", "dp=2 microbatches=2 loss=mean rule=sgd",
       "2 microbatches in one step"),
    of("step_buffer_reduced_by_every_microbatch", twin<BufferReducedByEveryMicrobatch>,
       "forward,ledger", "lockstep,replica", "hpcaitech/ColossalAI 247",
       "dp=2 microbatches=2 rule=sgd fill=integers", "2 microbatches in one step"),
    of("step_buffer_averaged_by_every_microbatch", twin<BufferReducedByEveryMicrobatch>, "ledger",
       "forward,lockstep,replica", "hpcaitech/ColossalAI 247, where it is a mean",
       "dp=2 microbatches=2 reduce=mean rule=sgd fill=integers", "the calls of a step"),
    of("step_shard_reduced_by_every_microbatch", twin<ShardReducedByEveryMicrobatch>,
       "forward,ledger", "lockstep,replica", "a reduce-scatter in place, with every microbatch",
       "dp=2 microbatches=2 reduce=mean rule=sgd fill=integers", "2 microbatches in one step"),
    of("step_buffer_not_cleared", twin<BufferNotCleared>, "forward,ledger", "lockstep,replica",
       "NVIDIA/Megatron-LM 6660", "dp=2 microbatches=3 rule=sgd fill=integers",
       "several microbatches in one step"),
    of("step_microbatches_added_up_as_stored", twin<AddedUpAsStored>, "forward",
       "ledger,lockstep,replica", "ISEEKYAN/Megatron-LM 149",
       "dp=2 microbatches=4 dtype=bf16 wire=f32", "wire wider than storage, several microbatches"),

    of("step_norm_of_own_shard", twin<NormOfOwnShard>, "forward,replica", "ledger,lockstep",
       "pytorch/xla 4796, karpathy/llm.c 524", "dp=4 clip=1", "p >= 2"),
    of("step_norm_counted_by_every_rank", twin<NormCountedByEveryRank>, "forward",
       "ledger,lockstep,replica", "modelscope/twinkle 290", "dp=4 clip=1", "p >= 2"),
    of("step_norm_counts_copies", twin<NormCountsCopies>, "forward,ledger", "lockstep,replica",
       "ByteDance-Seed/VeOmni 184", "dp=2 cp=2 shard=cp clip=1", "copies of shards"),
    of("step_norms_added", twin<NormsAdded>, "forward", "ledger,lockstep,replica",
       "laekov/fastmoe 65", "dp=4 clip=1", "p >= 2"),
    of("step_clipped_before_reduced", twin<ClippedBeforeReduced>, "forward",
       "ledger,lockstep,replica", "mindspore-lab/mindcv 603", "dp=2 clip=1", "p >= 2"),
    of("step_norm_not_spent", twin<NormNotSpent>, "forward", "ledger,lockstep,replica",
       "deepspeedai/DeepSpeed 6480", "dp=2 clip=1", "a norm above the limit"),

    of("step_counted_after_update", twin<CountedAfterUpdate>, "forward", "ledger,lockstep,replica",
       "deepspeedai/DeepSpeed 5104", "dp=2", "bias correction that is not yet 1"),
    of("step_counted_by_parameter", twin<CountedByParameter>, "forward", "ledger,lockstep,replica",
       "deepspeedai/DeepSpeed 1823, deepspeedai/DeepSpeed 8471", "dp=2",
       "several parameters in a shard"),
    of("step_eps_inside_root", twin<EpsInsideRoot>, "forward", "ledger,lockstep,replica",
       "FluxML/Flux.jl 448", "dp=2 dtype=f32", "f32, eps 0.001"),
    of("step_eps_corrected", twin<EpsCorrected>, "forward", "ledger,lockstep,replica",
       "pytorch/pytorch 2060", "dp=2 dtype=f32", "a small number of steps"),
    of("step_second_moment_of_own_gradient", twin<SecondMomentOfOwnGradient>, "forward",
       "ledger,lockstep,replica", "a second moment that is fed by a hook before the sum", "dp=2",
       "p >= 2"),
    of("step_moments_as_stored", twin<MomentsAsStored>, "forward", "ledger,lockstep,replica",
       "nntrainer/nntrainer 3565", "dp=2 dtype=bf16 wire=f32", "moments wider than storage"),
    of("step_masters_as_stored", twin<MastersAsStored>, "forward", "ledger,lockstep,replica",
       "NVIDIA/Megatron-LM 1359", "dp=2 dtype=bf16 wire=f32", "masters wider than storage"),
    of("step_of_stored_parameter", twin<StepOfStoredParameter>, "forward",
       "ledger,lockstep,replica", "NVIDIA/apex 1728", "dp=2 dtype=bf16 wire=f32",
       "masters that are not the parameters"),
    of("step_masters_of_first_parameters", twin<MastersOfFirstParameters>, "repeat",
       "ledger,lockstep", "NovaSky-AI/SkyRL 2149, NVIDIA/apex 42, NVIDIA/Megatron-LM 5071",
       "dp=2 master=loaded rule=sgd fill=integers", "two steps of one optimizer"),

    of("step_gathered_before_update", twin<GatheredBeforeUpdate>, "forward",
       "ledger,lockstep,replica", "NVIDIA/Megatron-LM 950", "dp=2 rule=sgd fill=integers",
       "p >= 2"),
    of("step_first_shard_stale_on_last_rank", twin<FirstShardStaleOnLastRank>, "forward,replica",
       "ledger,lockstep", "NVIDIA/Megatron-LM 6920", "dp=4 rule=sgd fill=integers", "p >= 2"),
    of("step_own_shard_of_old_parameters", twin<OwnShardOfOldParameters>, "forward,replica",
       "ledger,lockstep", "NVIDIA/Megatron-LM 6920", "dp=2 rule=sgd fill=integers", "p >= 2"),
    of("step_gathered_dp_first", twin<GatheredDpFirst>, "forward", "replica",
       "a mesh [dp, cp] that is flattened as [cp, dp]", "dp=2 cp=2 rule=sgd fill=integers",
       "two axes"),
};

}  // namespace

void controls_sharded_step(Registry& registry) { controls::add(registry, rows); }

}  // namespace shardproof
