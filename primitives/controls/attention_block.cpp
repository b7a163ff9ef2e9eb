// Broken twins of a layer's attention: what tp, sp and cp are taken for each other, what the
// rotation needs, and what its parameters owe.
#include "primitives/attention_block.hpp"

#include "oracle/registry.hpp"
#include "primitives/controls/table.hpp"

namespace shardproof {
namespace {

using namespace primitives;

// ---- One axis taken for another

// The ranks as a kernel sees them that asks for tp where it means cp.
class TensorForContext final : public Rank {
 public:
  explicit TensorForContext(Rank& rank) : rank_(rank) {}
  const Case& line() const override { return rank_.line(); }
  int world_rank() const override { return rank_.world_rank(); }
  int world_size() const override { return rank_.world_size(); }
  const Mesh& mesh() const override { return rank_.mesh(); }
  Stream stream() const override { return rank_.stream(); }
  Communicator& along(Axis axis) override {
    return rank_.along(axis == Axis::cp ? Axis::tp : axis);
  }
  Communicator& along(const std::vector<Axis>& axes) override { return rank_.along(axes); }
  Communicator& world() override { return rank_.world(); }
  View workspace(DType dtype, std::vector<int64_t> shape) override {
    return rank_.workspace(dtype, std::move(shape));
  }

 private:
  Rank& rank_;
};

// Keys come from the ranks that hold other heads of the same tokens.
struct CoreOverTp final : AttentionBlock {
  std::unique_ptr<Saved> attend(Rank& rank, Kernel& core, std::span<const View> in,
                                std::span<const View> out) override {
    TensorForContext other(rank);
    return core.forward(other, in, out);
  }
};

// The shards of sequence parallelism are taken for shards of the context: each attends to itself.
struct ShardsApart final : AttentionCore {
  int64_t shards = 1;
  std::vector<Label> apart(std::vector<Label> labels) const {
    const int64_t tokens = int64_t(labels.size()), own = tokens / shards;
    for (int64_t i = 0; i < tokens; ++i)
      if (labels[size_t(i)].sequence >= 0) labels[size_t(i)].sequence += i / own * tokens;
    return labels;
  }
  std::vector<Label> queries(const ContextLine& c, int rank) const override {
    return apart(AttentionCore::queries(c, rank));
  }
  std::vector<Label> keys(const ContextLine& c, int rank) const override {
    return apart(AttentionCore::keys(c, rank));
  }
};
struct SequenceForContext final : AttentionBlock {
  std::unique_ptr<Kernel> core_of(const Case& line) const override {
    auto core = std::make_unique<ShardsApart>();
    if (line.on("sp")) core->shards = line.ranks(Axis::tp);
    return std::make_unique<AttentionAllGather>(std::move(core));
  }
};

// ---- Positions

// Every cp rank counts its tokens from 0.
struct OffsetLost final : AttentionBlock {
  std::vector<int64_t> positions(Parallel& p) const override {
    std::vector<int64_t> list = AttentionBlock::positions(p);
    for (size_t i = 0; i < list.size(); ++i) list[i] = int64_t(i);
    return list;
  }
};

// dQ and dK are turned on and not back.
struct TurnedOn final : AttentionBlock {
  int sense_of_backward() const override { return 1; }
};

// ---- Rows of the fused weight

// Read as [query | value | key heads].
struct ValueBeforeKey final : AttentionBlock {
  Heads heads_of(const Case& line, const View& z) const override {
    const Heads h = AttentionBlock::heads_of(line, z);
    return {h.q, h.v, h.k};
  }
};

// ---- What gradients owe

struct WeightsLeftLocal final : AttentionBlock {
  std::vector<Axis> weights_summed_over(const Case&) const override { return {}; }
};

struct WeightsAveraged final : AttentionBlock {
  void sum_gradients(Parallel& p, const Parts& parts, const std::vector<Axis>& axes) override {
    coalesced_all_reduce(p, parts, axes, Reduce::avg);
  }
};

// The list of what cp owes was kept by hand.
struct OutWeightForgotten final : AttentionBlock {
  void sum_gradients(Parallel& p, const Parts& parts, const std::vector<Axis>& axes) override {
    if (parts.size() < 2) return AttentionBlock::sum_gradients(p, parts, axes);
    AttentionBlock::sum_gradients(p, Parts(parts.begin(), parts.end() - 1), axes);
    coalesced_all_reduce(p, {parts.back()}, std::vector<Axis>{});
  }
};

// The bias of the row linear is summed over tp, as sequence parallelism asks for, and not over cp.
struct BiasOverTpOnly final : AttentionBlock {
  std::vector<Axis> bias_summed_over(const Case& line) const override {
    std::vector<Axis> axes;
    for (Axis a : AttentionBlock::bias_summed_over(line))
      if (a == Axis::tp) axes.push_back(a);
    return axes;
  }
};

// Without sp every rank of tp has seen all tokens.
struct WholeBiasSummed final : AttentionBlock {
  std::vector<Axis> bias_summed_over(const Case& line) const override {
    std::vector<Axis> axes = AttentionBlock::bias_summed_over(line);
    if (!line.on("sp")) axes.insert(axes.begin(), Axis::tp);
    return axes;
  }
};

// ---- Key heads that ranks of tp share

// The own query heads' part of dWk and dWv is taken for the whole.
struct CopiesLeftLocal final : AttentionBlock {
  std::vector<Axis> copies_summed_over(const Case& line) const override {
    return axes_of_weights(line);
  }
};
struct CopiesAveraged final : AttentionBlock {
  void sum_gradients(Parallel& p, const Parts& parts, const std::vector<Axis>& axes) override {
    const bool copies = !axes.empty() && axes[0] == Axis::rep;
    coalesced_all_reduce(p, parts, axes, copies ? Reduce::avg : Reduce::sum);
  }
};
// Summed over ranks that hold other heads as well.
struct CopiesOverTp final : AttentionBlock {
  std::vector<Axis> copies_summed_over(const Case& line) const override {
    std::vector<Axis> axes = axes_of_copies(line);
    axes[0] = Axis::tp;
    return axes;
  }
};

// What comes through the query heads is reduced over tp, what comes through the key heads is not.
struct InputOfKeysLeftLocal final : AttentionBlock {
  void reduce_input_gradient(Parallel& p, const View& of_queries, const View& of_keys,
                             const View& dx) override {
    const View nothing = p.workspace(of_keys.dtype, of_keys.shape);
    set_zero(nothing);
    AttentionBlock::reduce_input_gradient(p, of_queries, nothing, dx);
    add_into(p.sp ? own_block(p, of_keys, 0) : of_keys, dx);
  }
};

// Key heads are dealt to ranks in turn, query heads in blocks.
struct GroupsInTurn final : AttentionBlock {
  int64_t first_group(const HeadPlan& h, int rank) const override {
    return rank * h.own_kv() % h.kv_heads;
  }
};

using controls::Row;
using controls::twin;

const char* const block = "attention_block";
const char* const shared = "tp=4 kv_heads=2 mask=causal";
const char* const mixed = "tp=2 cp=2 sp=on layout=zigzag mask=causal";

const Row rows[] = {
    {block, "core_over_tp", twin<CoreOverTp>, "forward,ledger", "",
     "a group that is asked for by the wrong name", mixed, "tp = cp > 1"},
    {block, "sp_taken_for_cp", twin<SequenceForContext>, "forward", "gradcheck,ledger",
     "shards of sequence parallelism attended to apart", "tp=2 sp=on mask=causal", "sp=on"},
    {block, "rope_offset_lost", twin<OffsetLost>, "forward", "gradcheck,ledger",
     "NVIDIA/Megatron-LM 5243", mixed, "cp >= 2"},
    {block, "rotary_not_turned_back", twin<TurnedOn>, "gradient", "forward,ledger",
     "a rotation whose backward is its forward", mixed, "positions above 0"},
    {block, "value_rows_before_key_rows", twin<ValueBeforeKey>, "forward", "gradcheck,ledger",
     "a fused weight stored in another order, awslabs/slapo 46", mixed, "any"},
    {block, "weight_gradient_not_summed_over_cp", twin<WeightsLeftLocal>, "replica,gradient,ledger",
     "forward", "Megatron CP groups", mixed, "cp >= 2"},
    {block, "weight_gradient_averaged_over_cp", twin<WeightsAveraged>, "gradient,ledger",
     "forward,replica", "EleutherAI/gpt-neox 1259", mixed, "cp >= 2; ratio 1/cp"},
    {block, "out_weight_left_out", twin<OutWeightForgotten>, "replica,gradient,ledger", "forward",
     "a list of parameters kept by hand", mixed, "cp >= 2"},
    {block, "out_bias_not_summed_over_cp", twin<BiasOverTpOnly>, "replica,gradient,ledger",
     "forward", "NVIDIA/Megatron-LM 20b7a54", mixed, "cp >= 2"},
    {block, "out_bias_summed_without_sp", twin<WholeBiasSummed>, "gradient,ledger",
     "forward,replica", "NVIDIA/Megatron-LM 2632", "tp=2 cp=2 layout=zigzag mask=causal",
     "sp=off; ratio tp"},
    {block, "kv_replica_weight_partial", twin<CopiesLeftLocal>, "replica,gradient,ledger",
     "forward", "bigcode-project/Megatron-LM 35", shared, "kv_heads < tp"},
    {block, "kv_replica_weight_averaged", twin<CopiesAveraged>, "gradient,ledger",
     "forward,replica", "bigcode-project/Megatron-LM 35", shared, "kv_heads < tp; ratio 1/rep"},
    {block, "kv_replica_weight_summed_over_tp", twin<CopiesOverTp>, "gradient,ledger", "forward",
     "bigcode-project/Megatron-LM 35", shared, "1 < kv_heads < tp"},
    {block, "kv_replica_input_partial", twin<InputOfKeysLeftLocal>, "gradient", "forward,ledger",
     "bigcode-project/Megatron-LM 37", shared, "kv_heads < tp"},
    {block, "kv_groups_in_turn", twin<GroupsInTurn>, "forward", "gradcheck,ledger",
     "NVIDIA/TransformerEngine 1044", "tp=4 kv_heads=2 form=gather mask=causal",
     "1 < kv_heads < tp"},
};

}  // namespace

void controls_attention_block(Registry& registry) { controls::add(registry, rows); }

}  // namespace shardproof
