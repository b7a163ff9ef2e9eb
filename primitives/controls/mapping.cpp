// Broken twins of the mappings. Each pairs a right or a wrong map with another, as mapping.cpp
// pairs the right ones; the comment above a twin names the bug that it imitates.
//
// The neighbours are the classic mistakes at the same place: a factor p or 1/p, a reduction too
// many or too few, blocks of another rank. A fault that its own transpose shares (mean forward and
// 1/p backward; blocks permuted both ways) leaves the adjoint at exactly 1: only the reference sees
// it.
#include "primitives/mapping.hpp"
#include "primitives/mapping_maps.hpp"

#include "oracle/registry.hpp"

namespace shardproof {
namespace {
using namespace mapping;

using Make = std::function<std::unique_ptr<Kernel>()>;
Make twin(Map forward, Map backward, Precondition precondition = nullptr) {
  return [=] { return pair(forward, backward, precondition); };
}

View workspace_like(Rank& rank, const View& view) { return rank.workspace(view.dtype, view.shape); }

void multiply(const View& view, double factor) {
  for (int64_t i = 0; i < view.elements(); ++i) {
    std::byte* element = view.flat(i);
    store(element, view.dtype, factor * load(element, view.dtype));
  }
}

// ---- Wrong maps

Map after(Map first, Map second) {  // second(first(x)), by way of the result's own storage
  return [=](Rank& rank, const View& in, const View& out) {
    first(rank, in, out);
    const View between = workspace_like(rank, out);
    copy(out, between);
    second(rank, between, out);
  };
}

void all_reduce_mean(Rank& rank, const View& in, const View& out) {
  group(rank).all_reduce(in, out, Reduce::avg);
}

void all_reduce_max(Rank& rank, const View& in, const View& out) {
  group(rank).all_reduce(in, out, Reduce::max);
}

void over_p(Rank& rank, const View& in, const View& out) {
  copy(in, out);
  multiply(out, 1.0 / group(rank).size());
}

void zero(Rank&, const View&, const View& out) { set_zero(out); }

// A contiguous copy is reduced, then the argument itself is returned.
void all_reduce_on_temporary(Rank& rank, const View& in, const View& out) {
  if (in.contiguous()) return all_reduce(rank, in, out);
  const View temporary = workspace_like(rank, in);
  copy(in, temporary);
  all_reduce(rank, temporary, temporary);
  copy(in, out);
}

void all_reduce_in_place(Rank& rank, const View& in, const View& out) {
  if (!in.contiguous()) return all_reduce(rank, in, out);
  all_reduce(rank, in, in);
  copy(in, out);
}

void all_reduce_over_world(Rank& rank, const View& in, const View& out) {
  rank.world().all_reduce(in, out);
}

// Blocks arrive one below the other, [p * n0, n1 / p], and are read as if they stood side by side.
void all_gather_stacked(Rank& rank, const View& in, const View& out) {
  std::vector<int64_t> stacked = in.shape;
  stacked[0] *= group(rank).size();
  const View received = rank.workspace(in.dtype, stacked);
  group(rank).all_gather(in, received, 0);
  copy(view_of(received.data, in.dtype, out.shape, in.space), out);
}

// One-sided reads address peers by their rank in the group where the window is the world's.
void all_gather_of_first_world_ranks(Rank& rank, const View& in, const View& out) {
  std::vector<int64_t> all = in.shape;
  const int dim = dim_of(rank.line());
  all[size_t(dim)] *= rank.world_size();
  const View window = rank.workspace(in.dtype, all);
  rank.world().all_gather(in, window, dim);
  copy(window.narrow(dim, 0, out.shape[size_t(dim)]), out);
}

void all_gather_over_p(Rank& rank, const View& in, const View& out) {
  all_gather(rank, in, out);
  multiply(out, 1.0 / group(rank).size());
}

void reduce_scatter_by_all_reduce(Rank& rank, const View& in, const View& out) {
  const View sum = workspace_like(rank, in);
  all_reduce(rank, in, sum);
  own_block(rank, sum, out);
}

// Block i of the result is block i + 1 of the operand, cyclically (hop = 1), or i - 1 (hop = -1).
void turn_blocks(Rank& rank, const View& in, const View& out, int hop) {
  const int dim = dim_of(rank.line()), p = group(rank).size();
  const int64_t n = in.shape[size_t(dim)] / p;
  for (int i = 0; i < p; ++i)
    copy(in.narrow(dim, (i + hop + p) % p * n, n), out.narrow(dim, i * n, n));
}

void reduce_scatter_to_wrong_owner(Rank& rank, const View& in, const View& out) {
  const View turned = workspace_like(rank, in);
  turn_blocks(rank, in, turned, 1);
  reduce_scatter(rank, turned, out);
}

void all_gather_from_wrong_owner(Rank& rank, const View& in, const View& out) {
  const View gathered = workspace_like(rank, out);
  all_gather(rank, in, gathered);
  turn_blocks(rank, gathered, out, -1);
}

void next_block(Rank& rank, const View& in, const View& out) {
  const View turned = workspace_like(rank, in);
  turn_blocks(rank, in, turned, 1);
  own_block(rank, turned, out);
}

// What arrives is stored block after block along the dim that was cut, and read in the due shape.
void exchange_stacked(Rank& rank, const View& in, const View& out) {
  const int cut = 1 - dim_of(rank.line());
  const View received = rank.workspace(in.dtype, in.shape);
  group(rank).all_to_all(in, received, cut, cut);
  copy(view_of(received.data, in.dtype, out.shape, in.space), out);
}

void exchange_back_stacked(Rank& rank, const View& in, const View& out) {
  const int cut = dim_of(rank.line());
  const View received = rank.workspace(in.dtype, in.shape);
  group(rank).all_to_all(in, received, cut, cut);
  copy(view_of(received.data, in.dtype, out.shape, in.space), out);
}

void all_reduce_unscaled_alone(Rank& rank, const View& in, const View& out) {
  if (group(rank).size() == 1) return copy(in, out);
  scaled_all_reduce(rank, in, out);
}

void scale_before_and_after(Rank& rank, const View& in, const View& out) {
  scaled_all_reduce(rank, in, out);
  multiply(out, scale_of(rank.line()));
}

// ---- Kernels with a memory

// The accumulator of the reduction is allocated once and never cleared.
class AccumulatorKept final : public Kernel {
 public:
  AccumulatorKept(Map forward, Map backward, Precondition precondition)
      : healthy_(pair(std::move(forward), std::move(backward), std::move(precondition))) {}
  std::unique_ptr<Saved> forward(Rank& rank, std::span<const View> inputs,
                                 std::span<const View> outputs) override {
    auto saved = healthy_->forward(rank, inputs, outputs);
    const View& y = outputs[0];
    sum_.resize(size_t(y.elements()), 0.0);
    for (int64_t i = 0; i < y.elements(); ++i) {
      sum_[size_t(i)] += load(y.flat(i), y.dtype);
      store(y.flat(i), y.dtype, sum_[size_t(i)]);
    }
    return saved;
  }
  void backward(Rank& rank, Saved& saved, std::span<const View> cotangents,
                std::span<const View> gradients) override {
    healthy_->backward(rank, saved, cotangents, gradients);
  }

 private:
  std::unique_ptr<Kernel> healthy_;
  std::vector<double> sum_;
};
Make accumulator_kept(Map forward, Map backward, Precondition precondition = nullptr) {
  return [=] { return std::make_unique<AccumulatorKept>(forward, backward, precondition); };
}

// The factor that backward multiplies by lies in one slot of the module, which a backward empties:
// of two forwards in flight the second takes the slot of the first, and one backward finds nothing.
class OneSlotForSaved final : public Kernel {
 public:
  std::unique_ptr<Saved> forward(Rank& rank, std::span<const View> inputs,
                                 std::span<const View> outputs) override {
    scaled_all_reduce(rank, inputs[0], outputs[0]);
    slot_ = scale_of(rank.line());
    return std::make_unique<Saved>();
  }
  void backward(Rank&, Saved&, std::span<const View> cotangents,
                std::span<const View> gradients) override {
    copy(cotangents[0], gradients[0]);
    multiply(gradients[0], std::exchange(slot_, 0.0));
  }

 private:
  double slot_ = 0;
};

// Only rank 0 tests that p divides the extent; the others go on with floor(n / p).
class OnlyFirstRankTests final : public Kernel {
 public:
  std::unique_ptr<Saved> forward(Rank& rank, std::span<const View> inputs,
                                 std::span<const View> outputs) override {
    if (rank.world_rank() == 0) equal_blocks(rank.line());
    const int dim = dim_of(rank.line());
    const int64_t n = outputs[0].shape[size_t(dim)] * group(rank).size();
    reduce_scatter(rank, inputs[0].narrow(dim, 0, n), outputs[0]);
    return std::make_unique<Saved>();
  }
  void backward(Rank& rank, Saved&, std::span<const View> cotangents,
                std::span<const View> gradients) override {
    all_gather(rank, cotangents[0], gradients[0]);
  }
};

// Each rank tests the block that it got, not the line: those that hold floor(n / p) go on.
class LocalShapesTested final : public Kernel {
 public:
  std::unique_ptr<Saved> forward(Rank& rank, std::span<const View> inputs,
                                 std::span<const View> outputs) override {
    const int dim = dim_of(rank.line()), p = group(rank).size();
    const int64_t own = inputs[0].shape[size_t(dim)];
    if (own != outputs[0].shape[size_t(dim)] / p) equal_blocks(rank.line());
    all_gather(rank, inputs[0], outputs[0].narrow(dim, 0, own * p));
    return std::make_unique<Saved>();
  }
  void backward(Rank& rank, Saved&, std::span<const View> cotangents,
                std::span<const View> gradients) override {
    reduce_scatter(rank, cotangents[0], gradients[0]);
  }
};

// ---- The twins

struct Adder {
  Registry& registry;
  void operator()(Control c) { registry.add(std::move(c)); }
};

void gathers(Adder add) {
  // An S -> R gather keeps its own slice of the cotangents: what other ranks' uses owe is lost.
  add({"gather_backward_slices",
       "mapping_all_gather",
       twin(all_gather, own_block, equal_blocks),
       "",
       "adjoint",
       "forward",
       false,
       "NVIDIA-NeMo/Megatron-Bridge 4784",
       "mapping_all_gather tp=4 tokens=4 hidden=3",
       "rank-distinct cotangents",
       {}});
  add({"gather_backward_averages",
       "mapping_all_gather",
       twin(
           all_gather,
           [](Rank& rank, const View& in, const View& out) {
             group(rank).reduce_scatter(in, out, dim_of(rank.line()), Reduce::avg);
           },
           equal_blocks),
       "",
       "adjoint,ledger",
       "forward",
       false,
       "neighbour of gather_backward_slices",
       "mapping_all_gather tp=4 tokens=4 hidden=3",
       "p >= 2",
       {}});
  // An S -> I gather sums p equal cotangents: ratio p.
  add({"gather_backward_reduces",
       "mapping_gather",
       twin(all_gather, reduce_scatter, equal_blocks),
       "",
       "adjoint",
       "forward",
       false,
       "NVIDIA/Megatron-LM 8474e6e, THUDM/slime 1748",
       "mapping_gather tp=4 tokens=4 hidden=3",
       "the invariant pairing: ratio p",
       {}});
  // Blocks along dim 0, read with the shape of a concatenation along dim 1.
  for (const char* contract : {"mapping_gather", "mapping_all_gather"}) {
    const Map back =
        contract == std::string("mapping_gather") ? Map(own_block) : Map(reduce_scatter);
    add({"wrong_axis_gather",
         contract,
         twin(all_gather_stacked, back, equal_blocks),
         "",
         "forward",
         "gradient,ledger",
         false,
         "NVIDIA/TransformerEngine 530, deepspeedai/DeepSpeed 5823",
         std::string(contract) + " tp=4 tokens=3 hidden=4 dim=1",
         "p >= 2; at least 2 rows before dim 1",
         {}});
    // The blocks of world ranks 0 .. p-1 in place of the members'.
    add({"local_rank_as_peer",
         contract,
         twin(all_gather_of_first_world_ranks, back, equal_blocks),
         "",
         "forward",
         "gradient",
         false,
         "NVIDIA/TransformerEngine 2179",
         std::string(contract) + " tp=2 dp=2 axis=tp tokens=4 hidden=6",
         "data distinct on dp",
         {}});
    // The gradient of the gather's input is zero: the call is not part of the graph.
    add({"no_backward_edge",
         contract,
         twin(all_gather, zero, equal_blocks),
         "",
         "adjoint",
         "forward",
         false,
         "NVIDIA/Megatron-LM b6ce193, modelscope/ms-swift 9947",
         std::string(contract) + " tp=2 tokens=4 hidden=6",
         "p >= 2: ratio 0",
         {}});
  }
  add({"gather_order_turned",
       "mapping_gather",
       twin(all_gather_from_wrong_owner, own_block, equal_blocks),
       "",
       "forward",
       "gradient,ledger,replica",
       false,
       "neighbour of local_rank_as_peer",
       "mapping_gather tp=3 tokens=3 hidden=6",
       "blocks that differ",
       {}});
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
    add({"reduce_on_temporary",
         contract,
         twin(all_reduce_on_temporary, backward),
         "",
         "forward",
         "gradient,ledger",
         false,
         "NVIDIA/Megatron-LM 5338",
         name + " tp=2 tokens=4 hidden=6 strides=transposed",
         "a strided argument",
         {}});
    // The caller's tensor holds the global sum afterwards.
    add({"reduce_in_place",
         contract,
         twin(all_reduce_in_place, backward),
         "",
         "memory",
         "",
         true,
         "NVIDIA/Megatron-LM 7481",
         name + " tp=2 tokens=4 hidden=6",
         "p >= 2, a contiguous argument",
         {}});
    // The gradient of the argument is zero: the call is not part of the graph.
    add({"no_backward_edge",
         contract,
         twin(all_reduce, zero),
         "",
         "adjoint",
         "forward",
         false,
         "NVIDIA/Megatron-LM b6ce193, modelscope/ms-swift 9947",
         name + " tp=2 tokens=4 hidden=6",
         "p >= 2: ratio 0",
         {}});
    // The world in place of the group of the axis.
    add({"default_group",
         contract,
         twin(all_reduce_over_world, backward),
         "",
         "ledger,forward",
         "gradient",
         false,
         "NVIDIA/Megatron-LM 7452, EleutherAI/gpt-neox 1281",
         name + " tp=2 dp=2 axis=tp tokens=4 hidden=6",
         "two axes",
         {}});
    // A second collective that changes nothing: the sum is equal everywhere, and so is its maximum.
    add({"reduced_again_by_max",
         contract,
         twin(after(all_reduce, all_reduce_max), backward),
         "",
         "ledger",
         "",
         true,
         "redundant idempotent collective",
         name + " tp=2 tokens=4 hidden=6",
         "any p >= 2",
         {}});
    add({"reduced_twice",
         contract,
         twin(after(all_reduce, all_reduce), backward),
         "",
         "ledger,forward",
         "gradient,replica",
         false,
         "neighbour of reduced_again_by_max",
         name + " tp=2 tokens=4 hidden=6",
         "p >= 2: times p",
         {}});
    // The second call adds the first call's result.
    add({"workspace_not_cleared",
         contract,
         accumulator_kept(all_reduce, backward),
         "",
         "repeat",
         "gradient",
         false,
         "huggingface/transformers 48205",
         name + " tp=2 tokens=4 hidden=6",
         "two calls",
         {}});
    add({"reduce_missing",
         contract,
         twin(identity, backward),
         "",
         "forward,ledger,replica",
         "gradient",
         false,
         "neighbour of reduce_on_temporary",
         name + " tp=4 tokens=3 hidden=5",
         "contributions that differ",
         {}});
  }
  // P -> I with the backward of P -> R: ratio p. P -> R with the backward of P -> I: the gradient
  // of a partial tensor is replicate, and each rank holds another one.
  add({"psum_one_convention",
       "mapping_reduce",
       twin(all_reduce, all_reduce),
       "",
       "adjoint",
       "forward,replica",
       false,
       "jax-ml/jax 3970",
       "mapping_reduce tp=2 tokens=4 hidden=6",
       "p >= 2: ratio p",
       {}});
  add({"psum_one_convention_partial",
       "mapping_all_reduce",
       twin(all_reduce, identity),
       "",
       "adjoint,replica",
       "forward",
       false,
       "jax-ml/jax 3970",
       "mapping_all_reduce tp=2 tokens=4 hidden=6",
       "a cotangent drawn for each rank",
       {}});
  add({"reduce_backward_over_p",
       "mapping_reduce",
       twin(all_reduce, over_p),
       "",
       "adjoint",
       "forward,ledger,replica",
       false,
       "neighbour of partial_backward_over_p",
       "mapping_reduce tp=4 tokens=3 hidden=5",
       "p >= 2: ratio 1/p",
       {}});
  add({"mean_for_sum",
       "mapping_reduce",
       twin(all_reduce_mean, identity),
       "",
       "forward,ledger",
       "gradient,replica",
       false,
       "neighbour of default_group",
       "mapping_reduce tp=4 tokens=3 hidden=5",
       "p >= 2",
       {}});
  // Mean forward and 1/p backward are transposes of each other: the adjoint is silent.
  add({"mean_both_ways",
       "mapping_reduce",
       twin(all_reduce_mean, over_p),
       "",
       "forward",
       "adjoint,replica",
       false,
       "a forward error shared with its transpose",
       "mapping_reduce tp=4 tokens=3 hidden=5",
       "p >= 2",
       {}});
}

void scaled_reductions(Adder add) {
  // The shortcut for a group of one returns before the factor is applied.
  add({"size_one_scale_lost",
       "mapping_scaled_reduce",
       twin(all_reduce_unscaled_alone, scaled),
       "",
       "forward",
       "gradient,ledger",
       false,
       "pytorch/xla 9670",
       "mapping_scaled_reduce tokens=4 hidden=6 scale=1/2",
       "p = 1",
       {}});
  add({"scale_lost_backward",
       "mapping_scaled_reduce",
       twin(scaled_all_reduce, identity),
       "",
       "adjoint",
       "forward,ledger,replica",
       false,
       "neighbour of size_one_scale_lost",
       "mapping_scaled_reduce tp=2 tokens=4 hidden=6 scale=1/2",
       "scale other than 1",
       {}});
  add({"scale_applied_twice",
       "mapping_scaled_reduce",
       twin(scale_before_and_after, scaled),
       "",
       "forward",
       "gradient,ledger,replica",
       false,
       "neighbour of size_one_scale_lost",
       "mapping_scaled_reduce tp=2 tokens=4 hidden=6 scale=1/2",
       "scale other than 1",
       {}});
  // A second forward in flight replaces what the first one saved.
  add({"saved_state_overwritten",
       "mapping_scaled_reduce",
       [] { return std::make_unique<OneSlotForSaved>(); },
       "",
       "accumulate",
       "forward,ledger",
       false,
       "deepspeedai/DeepSpeed 2800, pytorch/pytorch 139404",
       "mapping_scaled_reduce tp=2 tokens=4 hidden=6",
       "two forwards in flight: F0 F1 B0 B1",
       {}});
}

void copies(Adder add) {
  const std::string small = "mapping_copy tp=4 tokens=3 hidden=5";
  add({"reduce_on_temporary_backward",
       "mapping_copy",
       twin(identity, all_reduce_on_temporary),
       "",
       "adjoint",
       "forward,ledger",
       false,
       "NVIDIA/Megatron-LM 5338",
       "mapping_copy tp=2 tokens=4 hidden=6 strides=transposed",
       "a strided cotangent",
       {}});
  add({"reduce_in_place_backward",
       "mapping_copy",
       twin(identity, all_reduce_in_place),
       "",
       "memory",
       "",
       true,
       "NVIDIA/Megatron-LM 7481",
       "mapping_copy tp=2 tokens=4 hidden=6",
       "p >= 2, a contiguous cotangent",
       {}});
  add({"default_group_backward",
       "mapping_copy",
       twin(identity, all_reduce_over_world),
       "",
       "ledger,gradient",
       "forward",
       false,
       "NVIDIA/Megatron-LM 7452, EleutherAI/gpt-neox 1281",
       "mapping_copy tp=2 dp=2 axis=tp tokens=4 hidden=6",
       "two axes",
       {}});
  // The all-reduce of the cotangents is forgotten, made twice, or made a mean.
  add({"copy_backward_identity",
       "mapping_copy",
       twin(identity, identity),
       "",
       "adjoint,replica",
       "forward",
       false,
       "neighbour of gather_backward_slices",
       small,
       "rank-distinct cotangents: ratio 1/p",
       {}});
  add({"copy_backward_twice",
       "mapping_copy",
       twin(identity, after(all_reduce, all_reduce)),
       "",
       "adjoint,ledger",
       "forward,replica",
       false,
       "neighbour of gather_backward_reduces",
       small,
       "p >= 2: ratio p",
       {}});
  add({"copy_backward_mean",
       "mapping_copy",
       twin(identity, all_reduce_mean),
       "",
       "adjoint,ledger",
       "forward,replica",
       false,
       "neighbour of partial_backward_over_p",
       small,
       "p >= 2: ratio 1/p",
       {}});
  add({"reduced_again_by_max_backward",
       "mapping_copy",
       twin(identity, after(all_reduce, all_reduce_max)),
       "",
       "ledger",
       "",
       true,
       "redundant idempotent collective",
       small,
       "any p >= 2",
       {}});
}

void scatters(Adder add) {
  const std::string small = "mapping_scatter tp=4 tokens=4 hidden=3";
  // The gradient of an invariant tensor is left to the blocks that each rank has.
  add({"scatter_backward_pads",
       "mapping_scatter",
       twin(own_block, block_in_zeros, equal_blocks),
       "",
       "adjoint,replica",
       "forward",
       false,
       "neighbour of gather_backward_slices",
       small,
       "p >= 2: ratio 1/p",
       {}});
  add({"scatter_backward_reduces",
       "mapping_scatter",
       twin(own_block, after(all_gather, all_reduce), equal_blocks),
       "",
       "adjoint,ledger",
       "forward,replica",
       false,
       "neighbour of gather_backward_reduces",
       small,
       "p >= 2: ratio p",
       {}});
  add({"scatter_next_block",
       "mapping_scatter",
       twin(next_block, all_gather, equal_blocks),
       "",
       "forward",
       "gradient,ledger",
       false,
       "neighbour of local_rank_as_peer",
       "mapping_scatter tp=3 tokens=3 hidden=6",
       "blocks that differ",
       {}});
}

void reduce_scatters(Adder add) {
  const std::string small = "mapping_reduce_scatter tp=4 tokens=4 hidden=3";
  auto one = [&](const char* name, Map forward, Map backward, const char* check, const char* silent,
                 bool alone, const char* imitates, const char* visible) {
    add({name,
         "mapping_reduce_scatter",
         twin(forward, backward, equal_blocks),
         "",
         check,
         silent,
         alone,
         imitates,
         small,
         visible,
         {}});
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
  add({"workspace_not_cleared",
       "mapping_reduce_scatter",
       accumulator_kept(reduce_scatter, all_gather, equal_blocks),
       "",
       "repeat",
       "gradient",
       false,
       "huggingface/transformers 48205",
       small,
       "two calls",
       {}});
  // The ranks that go on wait for one that has refused.
  add({"precondition_on_one_rank",
       "mapping_reduce_scatter",
       [] { return std::make_unique<OnlyFirstRankTests>(); },
       "",
       "rejection",
       "",
       false,
       "awslabs/palace 838",
       "mapping_reduce_scatter tp=2 tokens=5 hidden=6",
       "tokens that p does not divide",
       {}});
  add({"precondition_on_local_shape",
       "mapping_all_gather",
       [] { return std::make_unique<LocalShapesTested>(); },
       "",
       "rejection",
       "",
       false,
       "awslabs/palace 838",
       "mapping_all_gather tp=2 tokens=5 hidden=6",
       "tokens that p does not divide",
       {}});
}

void exchanges(Adder add) {
  // What arrives is joined along the dim that was cut.
  add({"all_to_all_stacked",
       "mapping_all_to_all",
       twin(exchange_stacked, exchange_back, blocks_of_both_dims),
       "",
       "forward",
       "gradient,ledger",
       false,
       "deepspeedai/Megatron-DeepSpeed 406",
       "mapping_all_to_all tp=2 tokens=4 hidden=6",
       "dims cut and joined differ",
       {}});
  add({"all_to_all_backward_stacked",
       "mapping_all_to_all",
       twin(exchange, exchange_back_stacked, blocks_of_both_dims),
       "",
       "adjoint",
       "forward,ledger",
       false,
       "deepspeedai/Megatron-DeepSpeed 406",
       "mapping_all_to_all tp=2 tokens=4 hidden=6 dim=1",
       "dims cut and joined differ",
       {}});
  add({"no_backward_edge",
       "mapping_all_to_all",
       twin(exchange, zero, blocks_of_both_dims),
       "",
       "adjoint",
       "forward",
       false,
       "NVIDIA/Megatron-LM b6ce193, modelscope/ms-swift 9947",
       "mapping_all_to_all tp=2 tokens=4 hidden=6",
       "p >= 2: ratio 0",
       {}});
}

void local_changes_of_type(Adder add) {
  auto one = [&](const char* name, const char* contract, Make make, const char* check,
                 const char* silent, const char* imitates, const char* visible) {
    add({name,
         contract,
         make,
         "",
         check,
         silent,
         false,
         imitates,
         std::string(contract) + " tp=4 tokens=4 hidden=3",
         visible,
         {}});
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
  auto one = [&](const char* name, const char* contract, const char* fault, const char* check,
                 const char* imitates) {
    add({name,
         contract,
         nullptr,
         fault,
         check,
         "",
         true,
         imitates,
         std::string(contract) + " tp=4 fill=normal",
         "fill=normal, p >= 3",
         {}});
  };
  one("replica_sum_order", "mapping_all_reduce", "own_order@forward.tp.*", "replica",
      "pytorch/pytorch 129501");
  one("replica_sum_order", "mapping_reduce", "own_order@forward.tp.*", "replica",
      "pytorch/pytorch 129501");
  one("replica_sum_order", "mapping_copy", "own_order@backward.tp.*", "replica",
      "pytorch/pytorch 129501");
  one("arrival_sum_order", "mapping_all_reduce", "arrival_order@forward.tp.*", "repeat",
      "tenstorrent/tt-metal 39950");
  one("arrival_sum_order", "mapping_reduce_scatter", "arrival_order@forward.tp.*", "repeat",
      "tenstorrent/tt-metal 39950");
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
