// Broken twins of everything that sums, averages, measures or spends gradients of replicated
// parameters. The comment above a twin names the mistake.
#include <algorithm>

#include "oracle/registry.hpp"
#include "primitives/controls/sums.hpp"
#include "primitives/controls/table.hpp"
#include "primitives/replicated_layers.hpp"

namespace shardproof {
namespace {

using namespace controls;
using namespace primitives;

// ---- The coalesced call

// The list of what travels together ends before the last one.
struct LastOfCallLeftOut final : ReplicatedGradients {
  void sum(Parallel& p, const Parts& parts, Communicator& group) override {
    coalesced_all_reduce(p, Parts(parts.begin(), parts.end() - 1), group);
    alone(p, {parts.back()});
  }
};

// One is on two lists.
struct FirstOfCallSummedTwice final : ReplicatedGradients {
  void sum(Parallel& p, const Parts& parts, Communicator& group) override {
    ReplicatedGradients::sum(p, parts, group);
    sum_again(p, parts[0], group);
  }
};

// The group of the weights' gradients in place of the one that is asked for.
struct CallOverDp final : ReplicatedGradients {
  void sum(Parallel& p, const Parts& parts, Communicator&) override {
    coalesced_all_reduce(p, parts, p.rank.along(Axis::dp));
  }
};

// Both classes through the same call: a sum of what is whole on every rank.
struct AveragedSummed final : ReplicatedGradients {
  void average(Parallel& p, const Parts& parts, Communicator& group) override {
    coalesced_all_reduce(p, parts, group);
  }
};

// Both classes through the same call: a mean of what are parts of a sum.
struct SummedAveraged final : ReplicatedGradients {
  void sum(Parallel& p, const Parts& parts, Communicator& group) override {
    coalesced_all_reduce(p, parts, group, Reduce::avg);
  }
};

// Packed in one order and unpacked in another.
struct UnpackedInReverse final : ReplicatedGradients {
  void sum(Parallel& p, const Parts& parts, Communicator& group) override {
    int64_t n = 0;
    for (const Part& part : parts) n += part.result.elements();
    const View own = p.workspace(p.wire, {n}), total = p.workspace(p.wire, {n});
    int64_t at = 0;
    for (const Part& part : parts) {
      convert(part.partial, own.narrow(0, at, part.partial.elements()));
      at += part.partial.elements();
    }
    group.all_reduce(own, total);
    at = 0;
    for (size_t i = parts.size(); i-- > 0; at += parts[i].result.elements())
      convert(total.narrow(0, at, parts[i].result.elements()), parts[i].result);
  }
};

// ---- Router

// The bias was added to the layer later and never to the list.
struct BiasLeftOut final : ReplicatedRouter {
  void sum_gradients(Parallel& p, const Parts& parts, const std::vector<Axis>& axes) override {
    coalesced_all_reduce(p, {parts[0]}, axes);
    alone(p, Parts(parts.begin() + 1, parts.end()));
  }
};

// A random stream seeded by the rank, as a dropout's is.
struct SeededByRank final : ReplicatedRouter {
  uint64_t seed_of(Rank& rank) const override {
    return rank.line().seed() + uint64_t(rank.world_rank());
  }
};

// ---- Heads

// The sum over tp hangs on the flag that says that tokens are cut, and heads are cut anyway.
struct SumOnlyWithSp final : ReplicatedQkNorm {
  std::vector<Axis> summed_over(const Case& line) const override {
    std::vector<Axis> axes = ReplicatedQkNorm::summed_over(line);
    if (!line.on("sp")) std::erase(axes, Axis::tp);
    return axes;
  }
};

// Copies of a key head's weight, each with the gradient of its own query heads.
struct CopiesLeftLocal final : ReplicatedQkv {
  void sum_copies(Parallel& p, const Parts& parts) override { alone(p, parts); }
};

struct CopiesAveraged final : ReplicatedQkv {
  void sum_copies(Parallel& p, const Parts& parts) override {
    coalesced_all_reduce(p, parts, p.rank.along(Axis::rep), Reduce::avg);
  }
};

// Groups of key heads are mixed: every rank receives the sum over all of them.
struct CopiesSummedOverTp final : ReplicatedQkv {
  void sum_copies(Parallel& p, const Parts& parts) override {
    coalesced_all_reduce(p, parts, p.tp);
  }
};

// The keys' part of dX is added to the sum of the queries' after it was reduced.
struct KeyInputLocal final : ReplicatedQkv {
  void reduce_input_gradient(Parallel& p, const View& of_queries, const View& of_keys,
                             const View& dx) override {
    ReplicatedQkv::reduce_input_gradient(p, of_queries, View{}, dx);
    if (of_keys.data) add_into(p.sp ? own_block(p, of_keys, 0) : of_keys, dx);
  }
};

// ---- Norm of all gradients, and the step

struct CountsDuplicates final : ReplicatedClip {
  bool counts_replicated(const Parallel&) const override { return true; }
};

struct CountsFirstShardOnly final : ReplicatedClip {
  bool counts_sharded(const Parallel& p) const override { return p.tp.rank() == 0; }
};

// The step takes the gradient as the backward left it; the all-reduce comes after.
struct ReducedAfterStep final : ReplicatedStep {
  void update(Parallel& p, const View& w, const View& g, double lr, Communicator& group,
              const View& next) override {
    std::vector<double> v = to_doubles(w);
    const std::vector<double> own = to_doubles(g);
    for (size_t i = 0; i < v.size(); ++i) v[i] -= lr * own[i];
    fill_from(next, v);
    const View late = p.workspace(p.accumulate, g.shape);
    coalesced_all_reduce(p, Parts{{g, late}}, group);
  }
};

// The sum is spent as if it were the mean.
struct StepOfMean final : ReplicatedStep {
  void update(Parallel& p, const View& w, const View& g, double lr, Communicator& group,
              const View& next) override {
    ReplicatedStep::update(p, w, g, lr / group.size(), group, next);
  }
};

const Row rows[] = {
    {"replicated_gradients", "gradient_left_out_of_call", twin<LastOfCallLeftOut>,
     "forward,replica", "repeat", "a list of parameters kept by hand", "tp=4", "p >= 2"},
    {"replicated_gradients", "gradient_summed_twice", twin<FirstOfCallSummedTwice>, "forward",
     "replica", "a parameter on two lists of the finalisation", "tp=4", "p >= 2; ratio p"},
    {"replicated_gradients", "gradient_summed_over_wrong_axis", twin<CallOverDp>, "forward,ledger",
     "repeat", "NVIDIA/Megatron-LM 7452", "tp=2 dp=2 over=tp", "two axes"},
    {"replicated_gradients", "averaged_class_summed", twin<AveragedSummed>, "forward,ledger",
     "replica", "one call for both classes of parameters", "tp=4", "p >= 2; ratio p"},
    {"replicated_gradients", "summed_class_averaged", twin<SummedAveraged>, "forward,ledger",
     "replica", "EleutherAI/gpt-neox 1259", "tp=4", "p >= 2; ratio 1/p"},
    {"replicated_gradients", "gradients_unpacked_in_reverse", twin<UnpackedInReverse>, "forward",
     "ledger,replica", "pack and unpack that walk two containers", "tp=2",
     "gradients of different sizes"},

    {"replicated_router", "router_gradient_not_summed", twin<GradientLocal<ReplicatedRouter>>,
     "replica,gradient", "forward", "NVIDIA/Megatron-LM 599, pytorch/torchtitan 2387", "tp=4 sp=on",
     "sp=on"},
    {"replicated_router", "weight_gradient_not_summed_over_cp",
     twin<NotSummedOverCp<ReplicatedRouter>>, "replica,adjoint", "forward", "Megatron CP groups",
     "tp=2 cp=2", "cp=2 tp=2; ratio 1/cp"},
    {"replicated_router", "redundant_gradient_summed", twin<WholeGradientSummed<ReplicatedRouter>>,
     "gradient,adjoint", "forward,replica", "NVIDIA/Megatron-LM 2632", "tp=4",
     "sp=off, p >= 2; ratio p"},
    {"replicated_router", "router_bias_left_out", twin<BiasLeftOut>, "replica,gradient", "forward",
     "a list of parameters kept by hand", "tp=4 sp=on", "sp=on"},
    {"replicated_router", "replica_initialised_per_rank", twin<SeededByRank>, "replica",
     "forward,gradient,adjoint,ledger", "NVIDIA-NeMo/Megatron-Bridge 5396", "tp=2 sp=on",
     "a subject that makes its own parameters"},

    {"replicated_qk_norm", "qk_norm_sum_only_with_sp", twin<SumOnlyWithSp>, "replica,gradient",
     "forward", "NVIDIA/Megatron-LM 7452 (11)", "tp=4", "sp=off"},

    {"replicated_qkv", "kv_replica_weight_partial", twin<CopiesLeftLocal>, "gradient,replica",
     "forward", "bigcode-project/Megatron-LM 35", "tp=4 kv_heads=2", "kv_heads < tp"},
    {"replicated_qkv", "kv_replica_weight_averaged", twin<CopiesAveraged>, "gradient",
     "forward,replica", "bigcode-project/Megatron-LM 35", "tp=4 kv_heads=2", "kv_heads < tp"},
    {"replicated_qkv", "kv_replica_weight_summed_over_tp", twin<CopiesSummedOverTp>, "gradient",
     "forward,replica", "bigcode-project/Megatron-LM 35", "tp=4 kv_heads=2", "1 < kv_heads < tp"},
    {"replicated_qkv", "kv_replica_input_partial", twin<KeyInputLocal>, "gradient",
     "forward,replica", "bigcode-project/Megatron-LM 37", "tp=2 kv_heads=1 sp=on",
     "kv_heads < tp; sp=on leaves the replicas silent"},

    {"replicated_clip", "norm_counts_duplicates", twin<CountsDuplicates>, "forward", "",
     "NVIDIA/Megatron-LM 5916", "tp=2", "one gradient replicated, one sharded", true},
    {"replicated_clip", "norm_counts_first_shard_only", twin<CountsFirstShardOnly>, "forward", "",
     "NVIDIA/Megatron-LM 7452 (8)", "tp=2", "one gradient replicated, one sharded", true},

    {"replicated_step", "gradient_reduced_after_step", twin<ReducedAfterStep>, "forward,replica",
     "ledger,gradient", "an optimizer hook that runs before the gradients' hook", "tp=4",
     "p >= 2; same calls"},
    {"replicated_step", "step_of_mean", twin<StepOfMean>, "forward", "ledger,replica",
     "a sum spent as a mean", "tp=4", "p >= 2"},
};

}  // namespace

void controls_replicated(Registry& registry) { controls::add(registry, rows); }

}  // namespace shardproof
