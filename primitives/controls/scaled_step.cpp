// Broken twins of a distributed optimizer's step behind a scaled loss: of its scale, of the flag
// that a number is not finite, and of a step that is not taken. The comment above a twin names the
// mistake.
#include <cmath>

#include "oracle/registry.hpp"
#include "primitives/controls/table.hpp"
#include "primitives/controls/values.hpp"
#include "primitives/line.hpp"
#include "primitives/sharded_step.hpp"

namespace shardproof {
namespace {

using namespace primitives;
using controls::change;
using Doubles = std::vector<double>;

double first_of(const View& v) { return to_doubles(v)[0]; }

// ---- The scale

// Gradients are spent as they come.
struct NotUnscaled final : ShardedStep {
  double scale_of_loss(const Case&) const override { return 1; }
};

// The engine divides, and the optimizer once more.
struct UnscaledTwice final : ShardedStep {
  double scale_of_loss(const Case& line) const override {
    return std::pow(ShardedStep::scale_of_loss(line), 2);
  }
};

// The scale grows before gradients of the old one are divided by it.
struct UnscaledByNextScale final : ShardedStep {
  double scale_of_loss(const Case& line) const override { return next_scale(line, false); }
};

// The norm is that of scaled gradients, and what is left of them is unscaled.
struct ClippedBeforeUnscaled final : ShardedStep {
  double scale_of_loss(const Case&) const override { return 1; }
  View clipped(Parallel& p, const FlatBuffer& f, const StepTensors& t,
               const View& gradient) override {
    const View g = ShardedStep::clipped(p, f, t, gradient);
    scale(g, g, 1, ShardedStep::scale_of_loss(p.rank.line()));
    return g;
  }
};

// Each rank backs off by what it has met itself.
class ScaleOfOwnShard final : public ShardedStep {
 public:
  void find_overflow(Parallel& p, const View& gradient, const View& own) override {
    ShardedStep::find_overflow(p, gradient, own);
    own_ = first_of(own) != 0;
  }
  double next_scale(const Case& line, bool) const override {
    return ShardedStep::next_scale(line, own_);
  }

 private:
  bool own_ = false;
};

// The step is left out and the scale stays: the next one overflows, too.
struct ScaleNotHalved final : ShardedStep {
  double next_scale(const Case& line, bool) const override {
    return ShardedStep::next_scale(line, false);
  }
};

// ---- The flag

// Ranks that part take part in every call all the same: parameters are gathered by all of them.
struct EachOnItsOwn : ShardedStep {
  void keep(Parallel& p, const FlatBuffer& f, const StepTensors& t,
            const PieceTensors& own) override {
    ShardedStep::keep(p, f, t, own);
    spread(p, f, t, own_shard_of_parameters(p, f, t).narrow(0, 0, f.count(f.own)));
  }
};

// Nobody is told: the rank that owns the element leaves its shard as it is, the others step theirs.
struct OverflowOfOwnShard final : EachOnItsOwn {
  void agree(Parallel&, const View& own, const View& all) override { convert(own, all); }
};

// The flag is read before the call that reduces it has ended.
struct FlagReadTooEarly final : EachOnItsOwn {
  void agree(Parallel& p, const View& own, const View& all) override {
    const double before = first_of(own);
    ShardedStep::agree(p, own, all);
    fill_from(all, Doubles{before});
  }
};

// Told to the ranks of dp and cp, which reduce the gradient: other ranks of tp step.
struct FlagKeptFromTp final : ShardedStep {
  void agree(Parallel& p, const View& own, const View& all) override {
    const std::vector<Axis> axes = with_ranks(p.rank.line(), {Axis::cp, Axis::dp});
    all_reduce(p.rank, group_over(p, axes), own, all, Reduce::max);
  }
};

// The first rank decides for all of them.
struct FlagOfFirstRank final : ShardedStep {
  void agree(Parallel& p, const View& own, const View& all) override {
    convert(own, all);
    group_over(p, axes_of_step(p.rank.line())).broadcast(all, 0);
  }
};

// The mean of the flags, of which a whole number is made.
struct FlagAveraged final : ShardedStep {
  void agree(Parallel& p, const View& own, const View& all) override {
    all_reduce(p.rank, group_over(p, axes_of_step(p.rank.line())), own, all, Reduce::avg);
  }
};

// Asked for NaN alone: an infinite gradient passes, and makes NaN of masters and moments.
struct InfinityPasses final : ShardedStep {
  void find_overflow(Parallel&, const View& gradient, const View& own) override {
    bool nan = false;
    for (const double g : to_doubles(gradient)) nan |= std::isnan(g);
    fill_from(own, Doubles{nan ? 1.0 : 0.0});
  }
};

// What is not finite is taken for 0, and the step is taken with it.
struct OverflowZeroed final : ShardedStep {
  View reduced_gradient(Parallel& p, const FlatBuffer& f, const StepTensors& t) override {
    const View g = ShardedStep::reduced_gradient(p, f, t);
    change(g, [](size_t, double x) { return std::isfinite(x) ? x : 0; });
    return g;
  }
};

// ---- A step that is not taken

// Parameters stay, moments have been moved: from then on they are not finite.
struct MomentsMoveAllTheSame final : ShardedStep {
  void keep(Parallel& p, const FlatBuffer& f, const StepTensors& t,
            const PieceTensors& own) override {
    update_shard(p, f, own);
    PieceTensors masters = own;
    masters.m = own.next_m;
    if (own.v.data) masters.v = own.next_v;
    ShardedStep::keep(p, f, t, masters);
  }
};

// A step by a gradient of zeros in place of none: moments and matrices decay.
struct StepOfNothing final : ShardedStep {
  void keep(Parallel& p, const FlatBuffer& f, const StepTensors& t,
            const PieceTensors& own) override {
    ShardedStep::keep(p, f, t, own);
    set_zero(own.gradient);
    update_shard(p, f, own);
  }
};

using controls::Row;
using controls::twin;

constexpr controls::RowsOf of{"sharded_step"};

const Row rows[] = {
    of("step_not_unscaled", twin<NotUnscaled>, "forward", "ledger,lockstep,replica",
       "a scale that only the loss knows", "dp=2 loss_scale=16 rule=sgd fill=integers",
       "a scaled loss"),
    of("step_unscaled_twice", twin<UnscaledTwice>, "forward", "ledger,lockstep,replica",
       "THUDM/slime 1842", "dp=2 loss_scale=16 rule=sgd", "a scaled loss"),
    of("step_unscaled_by_next_scale", twin<UnscaledByNextScale>, "forward",
       "ledger,lockstep,replica", "deepspeedai/DeepSpeed 8588",
       "dp=2 loss_scale=16 grows=on rule=sgd", "a scale that changes"),
    of("step_clipped_before_unscaled", twin<ClippedBeforeUnscaled>, "forward",
       "ledger,lockstep,replica", "Lightning-AI/pytorch-lightning 9599, NVIDIA/apex 1512",
       "dp=2 loss_scale=16 clip=1", "a scaled loss and a norm"),
    of("step_scale_of_own_shard", twin<ScaleOfOwnShard>, "forward,replica", "ledger,lockstep",
       "facebookresearch/fairseq2 1374", "dp=4 loss_scale=16 overflow=on master=loaded", "p >= 2"),
    of("step_scale_not_halved", twin<ScaleNotHalved>, "forward", "ledger,lockstep,replica",
       "a scale that only grows", "dp=2 loss_scale=16 overflow=on master=loaded",
       "a step that is not taken"),

    of("step_overflow_of_own_shard", twin<OverflowOfOwnShard>, "forward,replica,ledger", "",
       "facebookresearch/fairscale 754", "dp=4 loss_scale=16 overflow=on master=loaded", "p >= 2"),
    of("step_overflow_read_too_early", twin<FlagReadTooEarly>, "forward,replica,ledger", "",
       "pytorch/pytorch 115710", "dp=4 loss_scale=16 overflow=on master=loaded", "p >= 2"),
    of("step_overflow_kept_from_tp", twin<FlagKeptFromTp>, "forward,replica,ledger", "",
       "hpcaitech/ColossalAI 18", "tp=2 dp=2 loss_scale=16 overflow=on master=loaded",
       "ranks of tp"),
    of("step_overflow_of_first_rank", twin<FlagOfFirstRank>, "forward,ledger", "lockstep",
       "ecmwf/WeatherGenerator 2718", "dp=4 loss_scale=16 overflow=on master=loaded", "p >= 2"),
    of("step_overflow_averaged", twin<FlagAveraged>, "forward,ledger", "lockstep",
       "a flag that is averaged like the loss", "dp=4 loss_scale=16 overflow=on master=loaded",
       "p >= 2"),
    of("step_infinity_passes", twin<InfinityPasses>, "forward,ledger", "lockstep",
       "a gradient that is asked for NaN alone", "dp=2 loss_scale=16 overflow=on master=loaded",
       "a step that is not taken"),
    of("step_overflow_zeroed", twin<OverflowZeroed>, "forward,ledger", "lockstep,replica",
       "a gradient that nan_to_num has passed over", "dp=2 loss_scale=16 overflow=on master=loaded",
       "a step that is not taken"),

    of("step_moments_move_all_the_same", twin<MomentsMoveAllTheSame>, "forward", "ledger,lockstep",
       "marin-community/levanter 973", "dp=2 loss_scale=16 overflow=on master=loaded",
       "a step that is not taken"),
    of("step_of_nothing", twin<StepOfNothing>, "forward", "ledger,lockstep,replica",
       "updates times 0 in place of none", "dp=2 loss_scale=16 overflow=on master=loaded",
       "a step that is not taken"),
};

}  // namespace

void controls_scaled_step(Registry& registry) { controls::add(registry, rows); }

}  // namespace shardproof
