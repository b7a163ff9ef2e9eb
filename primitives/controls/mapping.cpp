// Broken twins of the mappings. Each pairs a right or a wrong map with another, as mapping.cpp
// pairs the right ones; the comment above a twin names the bug that it imitates.
//
// The neighbours are the classic mistakes at the same place: a factor p or 1/p, a reduction too
// many or too few, blocks of another rank. A fault that its own transpose shares (mean forward and
// 1/p backward; blocks permuted both ways) leaves the adjoint at exactly 1: only the reference sees
// it.
#include "oracle/registry.hpp"
#include "primitives/controls/mapping_wrong.hpp"

namespace shardproof {
namespace {
using namespace mapping;

struct Adder {
  Registry& registry;
  void operator()(Control c) { registry.add(std::move(c)); }
};

void gathers(Adder add) {
  // An S -> R gather keeps its own slice of the cotangents: what other ranks' uses owe is lost.
  add({
      .name = "gather_backward_slices",
      .contract = "mapping_all_gather",
      .make = twin(all_gather, own_block, equal_blocks),
      .check = "adjoint",
      .silent = "forward",
      .imitates = "NVIDIA-NeMo/Megatron-Bridge 4784",
      .witness = "mapping_all_gather tp=4 tokens=4 hidden=3",
      .makes_visible = "rank-distinct cotangents",
  });
  add({
      .name = "gather_backward_averages",
      .contract = "mapping_all_gather",
      .make = twin(
          all_gather,
          [](Rank& rank, const View& in, const View& out) {
            group(rank).reduce_scatter(in, out, dim_of(rank.line()), Reduce::avg);
          },
          equal_blocks),
      .check = "adjoint,ledger",
      .silent = "forward",
      .imitates = "neighbour of gather_backward_slices",
      .witness = "mapping_all_gather tp=4 tokens=4 hidden=3",
      .makes_visible = "p >= 2",
  });
  // An S -> I gather sums p equal cotangents: ratio p.
  add({
      .name = "gather_backward_reduces",
      .contract = "mapping_gather",
      .make = twin(all_gather, reduce_scatter, equal_blocks),
      .check = "adjoint",
      .silent = "forward",
      .imitates = "NVIDIA/Megatron-LM 8474e6e, THUDM/slime 1748",
      .witness = "mapping_gather tp=4 tokens=4 hidden=3",
      .makes_visible = "the invariant pairing: ratio p",
  });
  // Blocks along dim 0, read with the shape of a concatenation along dim 1.
  for (const char* contract : {"mapping_gather", "mapping_all_gather"}) {
    const Map back =
        contract == std::string("mapping_gather") ? Map(own_block) : Map(reduce_scatter);
    add({
        .name = "wrong_axis_gather",
        .contract = contract,
        .make = twin(all_gather_stacked, back, equal_blocks),
        .check = "forward",
        .silent = "gradient,ledger",
        .imitates = "NVIDIA/TransformerEngine 530, deepspeedai/DeepSpeed 5823",
        .witness = std::string(contract) + " tp=4 tokens=3 hidden=4 dim=1",
        .makes_visible = "p >= 2; at least 2 rows before dim 1",
    });
    // The blocks of world ranks 0 .. p-1 in place of the members'.
    add({
        .name = "local_rank_as_peer",
        .contract = contract,
        .make = twin(all_gather_of_first_world_ranks, back, equal_blocks),
        .check = "forward",
        .silent = "gradient",
        .imitates = "NVIDIA/TransformerEngine 2179",
        .witness = std::string(contract) + " tp=2 dp=2 axis=tp tokens=4 hidden=6",
        .makes_visible = "data distinct on dp",
    });
    // The gradient of the gather's input is zero: the call is not part of the graph.
    add({
        .name = "no_backward_edge",
        .contract = contract,
        .make = twin(all_gather, zero, equal_blocks),
        .check = "adjoint",
        .silent = "forward",
        .imitates = "NVIDIA/Megatron-LM b6ce193, modelscope/ms-swift 9947",
        .witness = std::string(contract) + " tp=2 tokens=4 hidden=6",
        .makes_visible = "p >= 2: ratio 0",
    });
  }
  add({
      .name = "gather_order_turned",
      .contract = "mapping_gather",
      .make = twin(all_gather_from_wrong_owner, own_block, equal_blocks),
      .check = "forward",
      .silent = "gradient,ledger,replica",
      .imitates = "neighbour of local_rank_as_peer",
      .witness = "mapping_gather tp=3 tokens=3 hidden=6",
      .makes_visible = "blocks that differ",
  });
}

void reductions(Adder add) {
  struct Where {
    const char* contract;
    Map backward;
  };
  const Where wheres[] = {{"mapping_reduce", identity}, {"mapping_all_reduce", all_reduce}};
  for (const auto& [contract, backward] : wheres) {
    const std::string name = contract;
    // The packed copy of a strided argument is reduced, the argument returned.
    add({
        .name = "reduce_on_temporary",
        .contract = contract,
        .make = twin(all_reduce_on_temporary, backward),
        .check = "forward",
        .silent = "gradient,ledger",
        .imitates = "NVIDIA/Megatron-LM 5338",
        .witness = name + " tp=2 tokens=4 hidden=6 strides=transposed",
        .makes_visible = "a strided argument",
    });
    // The caller's tensor holds the global sum afterwards.
    add({
        .name = "reduce_in_place",
        .contract = contract,
        .make = twin(all_reduce_in_place, backward),
        .check = "memory",
        .alone = true,
        .imitates = "NVIDIA/Megatron-LM 7481",
        .witness = name + " tp=2 tokens=4 hidden=6",
        .makes_visible = "p >= 2, a contiguous argument",
    });
    // The gradient of the argument is zero: the call is not part of the graph.
    add({
        .name = "no_backward_edge",
        .contract = contract,
        .make = twin(all_reduce, zero),
        .check = "adjoint",
        .silent = "forward",
        .imitates = "NVIDIA/Megatron-LM b6ce193, modelscope/ms-swift 9947",
        .witness = name + " tp=2 tokens=4 hidden=6",
        .makes_visible = "p >= 2: ratio 0",
    });
    // The world in place of the group of the axis.
    add({
        .name = "default_group",
        .contract = contract,
        .make = twin(all_reduce_over_world, backward),
        .check = "ledger,forward",
        .silent = "gradient",
        .imitates = "NVIDIA/Megatron-LM 7452, EleutherAI/gpt-neox 1281",
        .witness = name + " tp=2 dp=2 axis=tp tokens=4 hidden=6",
        .makes_visible = "two axes",
    });
    // A second collective that changes nothing: the sum is equal everywhere, and so is its maximum.
    add({
        .name = "reduced_again_by_max",
        .contract = contract,
        .make = twin(after(all_reduce, all_reduce_max), backward),
        .check = "ledger",
        .alone = true,
        .imitates = "redundant idempotent collective",
        .witness = name + " tp=2 tokens=4 hidden=6",
        .makes_visible = "any p >= 2",
    });
    add({
        .name = "reduced_twice",
        .contract = contract,
        .make = twin(after(all_reduce, all_reduce), backward),
        .check = "ledger,forward",
        .silent = "gradient,replica",
        .imitates = "neighbour of reduced_again_by_max",
        .witness = name + " tp=2 tokens=4 hidden=6",
        .makes_visible = "p >= 2: times p",
    });
    // The second call adds the first call's result.
    add({
        .name = "workspace_not_cleared",
        .contract = contract,
        .make = accumulator_kept(all_reduce, backward),
        .check = "repeat",
        .silent = "gradient",
        .imitates = "huggingface/transformers 48205",
        .witness = name + " tp=2 tokens=4 hidden=6",
        .makes_visible = "two calls",
    });
    add({
        .name = "reduce_missing",
        .contract = contract,
        .make = twin(identity, backward),
        .check = "forward,ledger,replica",
        .silent = "gradient",
        .imitates = "neighbour of reduce_on_temporary",
        .witness = name + " tp=4 tokens=3 hidden=5",
        .makes_visible = "contributions that differ",
    });
  }
  // P -> I with the backward of P -> R: ratio p. P -> R with the backward of P -> I: the gradient
  // of a partial tensor is replicate, and each rank holds another one.
  add({
      .name = "psum_one_convention",
      .contract = "mapping_reduce",
      .make = twin(all_reduce, all_reduce),
      .check = "adjoint",
      .silent = "forward,replica",
      .imitates = "jax-ml/jax 3970",
      .witness = "mapping_reduce tp=2 tokens=4 hidden=6",
      .makes_visible = "p >= 2: ratio p",
  });
  add({
      .name = "psum_one_convention_partial",
      .contract = "mapping_all_reduce",
      .make = twin(all_reduce, identity),
      .check = "adjoint,replica",
      .silent = "forward",
      .imitates = "jax-ml/jax 3970",
      .witness = "mapping_all_reduce tp=2 tokens=4 hidden=6",
      .makes_visible = "a cotangent drawn for each rank",
  });
  add({
      .name = "reduce_backward_over_p",
      .contract = "mapping_reduce",
      .make = twin(all_reduce, over_p),
      .check = "adjoint",
      .silent = "forward,ledger,replica",
      .imitates = "neighbour of partial_backward_over_p",
      .witness = "mapping_reduce tp=4 tokens=3 hidden=5",
      .makes_visible = "p >= 2: ratio 1/p",
  });
  add({
      .name = "mean_for_sum",
      .contract = "mapping_reduce",
      .make = twin(all_reduce_mean, identity),
      .check = "forward,ledger",
      .silent = "gradient,replica",
      .imitates = "neighbour of default_group",
      .witness = "mapping_reduce tp=4 tokens=3 hidden=5",
      .makes_visible = "p >= 2",
  });
  // Mean forward and 1/p backward are transposes of each other: the adjoint is silent.
  add({
      .name = "mean_both_ways",
      .contract = "mapping_reduce",
      .make = twin(all_reduce_mean, over_p),
      .check = "forward",
      .silent = "adjoint,replica",
      .imitates = "a forward error shared with its transpose",
      .witness = "mapping_reduce tp=4 tokens=3 hidden=5",
      .makes_visible = "p >= 2",
  });
}

void scaled_reductions(Adder add) {
  // The shortcut for a group of one returns before the factor is applied.
  add({
      .name = "size_one_scale_lost",
      .contract = "mapping_scaled_reduce",
      .make = twin(all_reduce_unscaled_alone, scaled),
      .check = "forward",
      .silent = "gradient,ledger",
      .imitates = "pytorch/xla 9670",
      .witness = "mapping_scaled_reduce tokens=4 hidden=6 scale=1/2",
      .makes_visible = "p = 1",
  });
  add({
      .name = "scale_lost_backward",
      .contract = "mapping_scaled_reduce",
      .make = twin(scaled_all_reduce, identity),
      .check = "adjoint",
      .silent = "forward,ledger,replica",
      .imitates = "neighbour of size_one_scale_lost",
      .witness = "mapping_scaled_reduce tp=2 tokens=4 hidden=6 scale=1/2",
      .makes_visible = "scale other than 1",
  });
  add({
      .name = "scale_applied_twice",
      .contract = "mapping_scaled_reduce",
      .make = twin(scale_before_and_after, scaled),
      .check = "forward",
      .silent = "gradient,ledger,replica",
      .imitates = "neighbour of size_one_scale_lost",
      .witness = "mapping_scaled_reduce tp=2 tokens=4 hidden=6 scale=1/2",
      .makes_visible = "scale other than 1",
  });
  // A second forward in flight replaces what the first one saved.
  add({
      .name = "saved_state_overwritten",
      .contract = "mapping_scaled_reduce",
      .make = [] { return std::make_unique<OneSlotForSaved>(); },
      .check = "accumulate",
      .silent = "forward,ledger",
      .imitates = "deepspeedai/DeepSpeed 2800, pytorch/pytorch 139404",
      .witness = "mapping_scaled_reduce tp=2 tokens=4 hidden=6",
      .makes_visible = "two forwards in flight",
  });
}

void copies(Adder add) {
  const std::string small = "mapping_copy tp=4 tokens=3 hidden=5";
  add({
      .name = "reduce_on_temporary_backward",
      .contract = "mapping_copy",
      .make = twin(identity, all_reduce_on_temporary),
      .check = "adjoint",
      .silent = "forward,ledger",
      .imitates = "NVIDIA/Megatron-LM 5338",
      .witness = "mapping_copy tp=2 tokens=4 hidden=6 strides=transposed",
      .makes_visible = "a strided cotangent",
  });
  add({
      .name = "reduce_in_place_backward",
      .contract = "mapping_copy",
      .make = twin(identity, all_reduce_in_place),
      .check = "memory",
      .alone = true,
      .imitates = "NVIDIA/Megatron-LM 7481",
      .witness = "mapping_copy tp=2 tokens=4 hidden=6",
      .makes_visible = "p >= 2, a contiguous cotangent",
  });
  add({
      .name = "default_group_backward",
      .contract = "mapping_copy",
      .make = twin(identity, all_reduce_over_world),
      .check = "ledger,gradient",
      .silent = "forward",
      .imitates = "NVIDIA/Megatron-LM 7452, EleutherAI/gpt-neox 1281",
      .witness = "mapping_copy tp=2 dp=2 axis=tp tokens=4 hidden=6",
      .makes_visible = "two axes",
  });
  // The all-reduce of the cotangents is forgotten, made twice, or made a mean.
  add({
      .name = "copy_backward_identity",
      .contract = "mapping_copy",
      .make = twin(identity, identity),
      .check = "adjoint,replica",
      .silent = "forward",
      .imitates = "neighbour of gather_backward_slices",
      .witness = small,
      .makes_visible = "rank-distinct cotangents: ratio 1/p",
  });
  add({
      .name = "copy_backward_twice",
      .contract = "mapping_copy",
      .make = twin(identity, after(all_reduce, all_reduce)),
      .check = "adjoint,ledger",
      .silent = "forward,replica",
      .imitates = "neighbour of gather_backward_reduces",
      .witness = small,
      .makes_visible = "p >= 2: ratio p",
  });
  add({
      .name = "copy_backward_mean",
      .contract = "mapping_copy",
      .make = twin(identity, all_reduce_mean),
      .check = "adjoint,ledger",
      .silent = "forward,replica",
      .imitates = "neighbour of partial_backward_over_p",
      .witness = small,
      .makes_visible = "p >= 2: ratio 1/p",
  });
  add({
      .name = "reduced_again_by_max_backward",
      .contract = "mapping_copy",
      .make = twin(identity, after(all_reduce, all_reduce_max)),
      .check = "ledger",
      .alone = true,
      .imitates = "redundant idempotent collective",
      .witness = small,
      .makes_visible = "any p >= 2",
  });
}

void scatters(Adder add) {
  const std::string small = "mapping_scatter tp=4 tokens=4 hidden=3";
  // The gradient of an invariant tensor is left to the blocks that each rank has.
  add({
      .name = "scatter_backward_pads",
      .contract = "mapping_scatter",
      .make = twin(own_block, block_in_zeros, equal_blocks),
      .check = "adjoint,replica",
      .silent = "forward",
      .imitates = "neighbour of gather_backward_slices",
      .witness = small,
      .makes_visible = "p >= 2: ratio 1/p",
  });
  add({
      .name = "scatter_backward_reduces",
      .contract = "mapping_scatter",
      .make = twin(own_block, after(all_gather, all_reduce), equal_blocks),
      .check = "adjoint,ledger",
      .silent = "forward,replica",
      .imitates = "neighbour of gather_backward_reduces",
      .witness = small,
      .makes_visible = "p >= 2: ratio p",
  });
  add({
      .name = "scatter_next_block",
      .contract = "mapping_scatter",
      .make = twin(next_block, all_gather, equal_blocks),
      .check = "forward",
      .silent = "gradient,ledger",
      .imitates = "neighbour of local_rank_as_peer",
      .witness = "mapping_scatter tp=3 tokens=3 hidden=6",
      .makes_visible = "blocks that differ",
  });
}

void reduce_scatters(Adder add) {
  const std::string small = "mapping_reduce_scatter tp=4 tokens=4 hidden=3";
  auto one = [&](const char* name, Map forward, Map backward, const char* check, const char* silent,
                 bool alone, const char* imitates, const char* visible) {
    add({
        .name = name,
        .contract = "mapping_reduce_scatter",
        .make = twin(forward, backward, equal_blocks),
        .check = check,
        .silent = silent,
        .alone = alone,
        .imitates = imitates,
        .witness = small,
        .makes_visible = visible,
    });
  };
  // The backward of a sum is no mean.
  one("partial_backward_over_p", reduce_scatter, all_gather_over_p, "adjoint",
      "ledger,replica,forward", false, "pytorch/pytorch 115967", "p >= 2: ratio 1/p");
  // Right values at twice the bytes.
  one("reduce_scatter_as_all_reduce", reduce_scatter_by_all_reduce, all_gather, "ledger", "", true,
      "right values, twice the bytes", "any p >= 2");
  one("slice_without_reduce", own_block, all_gather, "forward,ledger", "gradient", false,
      "neighbour of reduce_on_temporary", "contributions that differ");
  one("blocks_to_wrong_owner", reduce_scatter_to_wrong_owner, all_gather, "forward",
      "gradient,ledger", false, "neighbour of local_rank_as_peer", "blocks that differ");
  // Blocks turned both ways are transposes of each other: the adjoint is silent.
  one("wrong_owner_both_ways", reduce_scatter_to_wrong_owner, all_gather_from_wrong_owner,
      "forward,gradient", "adjoint,ledger,replica", false,
      "a forward error shared with its transpose", "blocks that differ");
  add({
      .name = "workspace_not_cleared",
      .contract = "mapping_reduce_scatter",
      .make = accumulator_kept(reduce_scatter, all_gather, equal_blocks),
      .check = "repeat",
      .silent = "gradient",
      .imitates = "huggingface/transformers 48205",
      .witness = small,
      .makes_visible = "two calls",
  });
  // The ranks that go on wait for one that has refused.
  add({
      .name = "precondition_on_one_rank",
      .contract = "mapping_reduce_scatter",
      .make = [] { return std::make_unique<OnlyFirstRankTests>(); },
      .check = "rejection",
      .imitates = "awslabs/palace 838",
      .witness = "mapping_reduce_scatter tp=2 tokens=5 hidden=6",
      .makes_visible = "tokens that p does not divide",
  });
  add({
      .name = "precondition_on_local_shape",
      .contract = "mapping_all_gather",
      .make = [] { return std::make_unique<LocalShapesTested>(); },
      .check = "rejection",
      .imitates = "awslabs/palace 838",
      .witness = "mapping_all_gather tp=2 tokens=5 hidden=6",
      .makes_visible = "tokens that p does not divide",
  });
}

void exchanges(Adder add) {
  // What arrives is joined along the dim that was cut.
  add({
      .name = "all_to_all_stacked",
      .contract = "mapping_all_to_all",
      .make = twin(exchange_stacked, exchange_back, blocks_of_both_dims),
      .check = "forward",
      .silent = "gradient,ledger",
      .imitates = "deepspeedai/Megatron-DeepSpeed 406",
      .witness = "mapping_all_to_all tp=2 tokens=4 hidden=6",
      .makes_visible = "dims cut and joined differ",
  });
  add({
      .name = "all_to_all_backward_stacked",
      .contract = "mapping_all_to_all",
      .make = twin(exchange, exchange_back_stacked, blocks_of_both_dims),
      .check = "adjoint",
      .silent = "forward,ledger",
      .imitates = "deepspeedai/Megatron-DeepSpeed 406",
      .witness = "mapping_all_to_all tp=2 tokens=4 hidden=6 dim=1",
      .makes_visible = "dims cut and joined differ",
  });
  add({
      .name = "no_backward_edge",
      .contract = "mapping_all_to_all",
      .make = twin(exchange, zero, blocks_of_both_dims),
      .check = "adjoint",
      .silent = "forward",
      .imitates = "NVIDIA/Megatron-LM b6ce193, modelscope/ms-swift 9947",
      .witness = "mapping_all_to_all tp=2 tokens=4 hidden=6",
      .makes_visible = "p >= 2: ratio 0",
  });
}

void local_changes_of_type(Adder add) {
  auto one = [&](const char* name, const char* contract, Make make, const char* check,
                 const char* silent, const char* imitates, const char* visible) {
    add({
        .name = name,
        .contract = contract,
        .make = make,
        .check = check,
        .silent = silent,
        .imitates = imitates,
        .witness = std::string(contract) + " tp=4 tokens=4 hidden=3",
        .makes_visible = visible,
    });
  };
  // Gradients of R -> P divided by p, as if the sum had been a mean.
  one("partial_backward_over_p", "mapping_replicate_to_partial",
      twin(first_rank_only, after(first_rank_only, over_p)), "adjoint", "ledger,replica,forward",
      "pytorch/pytorch 172932", "p >= 2: ratio 1/p");
  one("partial_backward_over_p", "mapping_reinterpret", twin(identity, over_p), "adjoint",
      "ledger,replica,forward", "pytorch/pytorch 172932", "p >= 2: ratio 1/p");
  // A value that is whole on every rank is counted p times in a partial sum.
  one("counted_on_every_rank", "mapping_invariant_to_partial", twin(identity, identity), "forward",
      "gradient,ledger,replica", "neighbour of gather_backward_reduces", "p >= 2: times p");
  one("counted_on_every_rank", "mapping_replicate_to_partial", twin(identity, first_rank_only),
      "forward", "gradient,ledger", "neighbour of gather_backward_reduces", "p >= 2: times p");
  one("gradient_on_every_rank", "mapping_replicate_to_partial", twin(first_rank_only, identity),
      "adjoint", "forward,ledger", "neighbour of gather_backward_reduces", "p >= 2: ratio p");
  one("gradient_on_every_rank", "mapping_replicate_to_invariant", twin(identity, identity),
      "adjoint", "forward,ledger,replica", "neighbour of gather_backward_reduces",
      "p >= 2: ratio p");
  one("value_kept", "mapping_reinterpret", twin(first_rank_only, identity), "forward",
      "gradient,ledger", "neighbour of partial_backward_over_p", "p >= 2: 1/p");
  one("slice_backward_gathers", "mapping_slice", twin(own_block, all_gather, equal_blocks),
      "adjoint,ledger", "forward", "neighbour of gather_backward_reduces",
      "a replicate tensor's gradient is partial: ratio p");
  one("slice_next_block", "mapping_slice", twin(next_block, block_in_zeros, equal_blocks),
      "forward", "gradient,ledger", "neighbour of local_rank_as_peer", "blocks that differ");
  one("pad_gathers", "mapping_pad", twin(all_gather, own_block, equal_blocks), "forward,ledger",
      "gradient", "neighbour of gather_backward_reduces", "p >= 2: times p");
  one("pad_backward_sums", "mapping_pad", twin(block_in_zeros, reduce_scatter, equal_blocks),
      "adjoint,ledger", "forward", "neighbour of gather_backward_reduces", "p >= 2: ratio p");
}

// Healthy mappings on a transport whose ranks sum in orders of their own. Sums of integers, and of
// two numbers, are the same in any order.
void orders_of_summation(Adder add) {
  // Each rank sums from its own part on: within every bound, but replicas differ.
  auto own_order = [&](const char* contract, const char* phase) {
    add({
        .name = "replica_sum_order",
        .contract = contract,
        .fault = std::string("own_order@") + phase + ".tp.*",
        .check = "replica",
        .alone = true,
        .imitates = "pytorch/pytorch 129501",
        .witness = std::string(contract) + " tp=4 fill=normal",
        .makes_visible = "fill=normal, p >= 3",
    });
  };
  own_order("mapping_reduce", "forward");
  own_order("mapping_all_reduce", "forward");
  own_order("mapping_copy", "backward");
  // Sums in the order of arrival: one run is right and its replicas agree. accumulate compares two
  // runs as well and may see the difference too; nothing that looks at one run may.
  for (const char* contract : {"mapping_reduce", "mapping_all_reduce", "mapping_reduce_scatter"})
    add({
        .name = "arrival_sum_order",
        .contract = contract,
        .fault = "arrival_order@forward.tp.*",
        .check = "repeat",
        .silent = "forward,gradient,adjoint,replica,ledger,lockstep,memory",
        .imitates = "tenstorrent/tt-metal 39950",
        .witness = std::string(contract) + " tp=4 fill=normal",
        .makes_visible = "fill=normal, p >= 3",
    });
}

}  // namespace

void controls_mapping(Registry& registry) {
  const Adder add{registry};
  gathers(add);
  reductions(add);
  scaled_reductions(add);
  copies(add);
  scatters(add);
  reduce_scatters(add);
  exchanges(add);
  local_changes_of_type(add);
  orders_of_summation(add);
}

}  // namespace shardproof
