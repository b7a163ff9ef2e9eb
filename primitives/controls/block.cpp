// Broken twins of the block: what its replicated parameters owe, and its dropout. In `drift` they
// break a training run at the step that control=NAME@STEP gives.
#include "primitives/block.hpp"
#include "oracle/registry.hpp"
#include "primitives/controls/sums.hpp"
#include "primitives/controls/table.hpp"

namespace shardproof {
namespace {

using namespace controls;
using namespace primitives;

// The sum is made once the gradient has been handed over: what the step sees is the rank's own
// part.
struct ReducedAfterHandOver final : Block {
  void sum_gradients(Parallel& p, const Parts& parts, const std::vector<Axis>& axes) override {
    Parts late;
    for (const Part& part : parts) late.push_back({part.partial, partial_like(p, part.result)});
    alone(p, parts);
    coalesced_all_reduce(p, late, axes);
  }
};

// Masks by the element's place on the rank: the same pattern on every rank's tokens.
struct DropoutByLocalIndex final : Block {
  uint64_t first_index(Parallel&, int64_t) const override { return 0; }
};

// A random stream for each place in the batch, shared by the ranks that cut its tokens.
struct DropoutSharedOnShards final : Block {
  uint64_t first_index(Parallel& p, int64_t own_elements) const override {
    const uint64_t due = Block::first_index(p, own_elements);
    return p.sp ? due - uint64_t(p.tp.rank() * own_elements) : due;
  }
};

// A random stream for each device, also where devices hold copies of the same tokens.
struct DropoutSeededByRank final : Block {
  uint64_t seed_of(Rank& rank) const override {
    return Block::seed_of(rank) + uint64_t(rank.world_rank());
  }
};

const Row rows[] = {
    {"block", "norm_gradient_not_summed", twin<GradientLocal<Block>>, "replica,gradient", "forward",
     "NVIDIA/Megatron-LM 20b7a54, deepspeedai/Megatron-DeepSpeed 448", "tp=2 sp=on", "sp=on"},
    {"block", "norm_gradient_averaged", twin<GradientAveraged<Block>>, "gradient",
     "forward,replica", "EleutherAI/gpt-neox 1259", "tp=2 sp=on", "sp=on; ratio 1/p"},
    {"block", "norm_parameter_left_out", twin<LastLeftOut<Block>>, "replica,gradient", "forward",
     "a list of parameters kept by hand", "tp=2 sp=on", "sp=on"},
    {"block", "norm_parameter_summed_twice", twin<FirstSummedTwice<Block>>, "gradient",
     "forward,replica", "a parameter on two lists of the finalisation", "tp=2 sp=on",
     "sp=on; ratio p"},
    {"block", "norm_gradient_summed_over_dp", twin<SummedOverDp<Block>>, "gradient,ledger",
     "forward", "a replicated parameter reduced over the data-parallel axis alone",
     "tp=2 dp=2 sp=on", "two axes, sp=on"},
    {"block", "redundant_gradient_summed", twin<WholeGradientSummed<Block>>, "gradient,ledger",
     "forward,replica", "NVIDIA/Megatron-LM 2632", "tp=2", "sp=off; ratio p"},
    {"block", "gradient_reduced_after_hand_over", twin<ReducedAfterHandOver>, "replica,gradient",
     "forward,ledger", "a hook that reduces after the optimizer's has run", "tp=2 sp=on", "sp=on"},
    {"block", "dropout_by_local_index", twin<DropoutByLocalIndex>, "replica,forward,gradient",
     "ledger", "a mask that follows the layout", "tp=2 sp=on", "sp=on, dropout above 0"},
    {"block", "dropout_shared_on_shards", twin<DropoutSharedOnShards>, "replica", "ledger",
     "PaddlePaddle/PaddleFleetX 1005", "tp=2 dp=2 sp=on", "sp=on, dropout above 0"},
    {"block", "dropout_seeded_by_rank", twin<DropoutSeededByRank>, "replica", "ledger",
     "tenstorrent/tt-metal 55947", "tp=2", "sp=off, dropout above 0"},
};

}  // namespace

void controls_block(Registry& registry) { controls::add(registry, rows); }

}  // namespace shardproof
