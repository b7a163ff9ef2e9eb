// Broken twins of fully sharded data parallelism. The comment above a twin names the mistake.
#include <algorithm>

#include "oracle/registry.hpp"
#include "primitives/controls/row_bias.hpp"
#include "primitives/controls/table.hpp"
#include "primitives/gemm.hpp"
#include "primitives/sharded.hpp"

namespace shardproof {
namespace {

using namespace primitives;

// ---- Where rows lie

// A parameter begins where the rows of the one before it end, and not behind its padding.
FlatShards without_padding(FlatShards s, int rank) {
  int64_t at = 0;
  for (size_t k = 0; k < s.places.size(); ++k) {
    s.places[k] = at;
    at += s.count(rank) * s.widths[k];
  }
  return s;
}

// The padding of W's gradient is reduced into the place of b's.
struct GradientsUnpadded final : ShardedLinear {
  void pack_gradients(const FlatShards& s, int rank, const Views& whole,
                      const View& flat) override {
    ShardedLinear::pack_gradients(without_padding(s, rank), rank, whole, flat);
  }
};

// The gathered shards are read as if none had padding.
struct ParametersUnpadded final : ShardedLinear {
  void unpack_parameters(const FlatShards& s, int rank, const View& flat,
                         const Views& whole) override {
    ShardedLinear::unpack_parameters(without_padding(s, rank), rank, flat, whole);
  }
};

// Blocks that begin at rank o/p, rounded down; those that the ranks own begin at rank ceil(o/p).
FlatShards rounded_down(FlatShards s) {
  const int64_t rows = s.first.back();
  for (int64_t rank = 0; rank < s.ranks; ++rank) s.first[size_t(rank)] = rank * rows / s.ranks;
  return s;
}

struct GradientRowsRoundedDown final : ShardedLinear {
  void pack_gradients(const FlatShards& s, int rank, const Views& whole,
                      const View& flat) override {
    ShardedLinear::pack_gradients(rounded_down(s), rank, whole, flat);
  }
};

struct ParameterRowsRoundedDown final : ShardedLinear {
  void unpack_parameters(const FlatShards& s, int rank, const View& flat,
                         const Views& whole) override {
    ShardedLinear::unpack_parameters(rounded_down(s), rank, flat, whole);
  }
};

// Packed in one order and unpacked in another.
struct UnpackedInReverse final : ShardedLinear {
  void unpack_gradients(const FlatShards& s, const View& flat, const Views& own) override {
    FlatShards reversed = s;
    int64_t at = 0;
    for (size_t k = s.places.size(); k-- > 0; at += s.count(0) * s.widths[k])
      reversed.places[k] = at;
    ShardedLinear::unpack_gradients(reversed, flat, own);
  }
};

// ---- The sum

// The sum travels in the storage type, whatever type was asked for.
struct ReducedAsStored final : ShardedLinear {
  DType type_on_wire(const Parallel& p) const override { return p.storage; }
};

// A rank's gradient is stored before it is sent in the wider type: what was lost stays lost.
struct StoredBeforeReduced final : ShardedLinear {
  void reduce_gradients(Parallel& p, const FlatShards& s, const Views& whole,
                        const Views& own) override {
    Views stored;
    for (const View& v : whole) {
      stored.push_back(p.workspace(p.storage, v.shape));
      convert(v, stored.back());
    }
    ShardedLinear::reduce_gradients(p, s, stored, own);
  }
};

// The mean over the ranks stands where the sum is due.
struct Averaged : ShardedLinear {
  void reduce(Parallel&, Communicator& group, const View& in, const View& out) override {
    group.reduce_scatter(in, out, 0, Reduce::avg);
  }
};

// The mean is divided by the number of ranks once more.
struct DividedTwice final : Averaged {
  void reduce(Parallel& p, Communicator& group, const View& in, const View& out) override {
    const View mean = p.workspace(out.dtype, out.shape);
    Averaged::reduce(p, group, in, mean);
    scale(mean, out, 1, group.size());
  }
};

View own_block_of(const Communicator& group, const View& all, int64_t elements) {
  return all.narrow(0, group.rank() * elements, elements);
}

// A rank keeps the gradient that its own tokens give to its own rows.
struct LeftLocal final : ShardedLinear {
  void reduce(Parallel&, Communicator& group, const View& in, const View& out) override {
    convert(own_block_of(group, in, out.elements()), out);
  }
};

// Summed over the data-parallel ranks of the mesh; those of cp have seen other tokens.
struct ReducedOverDpAlone final : ShardedLinear {
  void reduce(Parallel& p, Communicator& group, const View& in, const View& out) override {
    const View sums = p.workspace(in.dtype, in.shape);
    p.rank.along(Axis::dp).all_reduce(in, sums);
    convert(own_block_of(group, sums, out.elements()), out);
  }
};

// Each rank of dp keeps what its own shards have summed: the copies part.
struct CopiesLeftLocal final : ShardedLinear {
  void sum_copies(Parallel&, const View&) override {}
};

// The mean over the copies of what is a sum over the shards: divided by the ranks of one axis.
struct CopiesAveraged final : ShardedLinear {
  void sum_copies(Parallel& p, const View& flat) override {
    p.rank.along(Axis::dp).all_reduce(flat, flat, Reduce::avg);
  }
};

// The mesh is flattened with its axes in the other order.
struct FlattenedDpFirst final : ShardedLinear {
  std::vector<Axis> gathered_over(const Case& line) const override {
    std::vector<Axis> axes = axes_of_shards(line);
    std::reverse(axes.begin(), axes.end());
    return axes;
  }
};

// The list of what is reduced was made before the bias was added.
struct BiasLeftOut final : ShardedLinear {
  void reduce_gradients(Parallel& p, const FlatShards& s, const Views& whole,
                        const Views& own) override {
    ShardedLinear::reduce_gradients(p, s, {whole[0]}, {own[0]});
    convert(whole[1].narrow(0, s.first[size_t(s.own)], s.count(s.own)), own[1]);
  }
};

// ---- Inside tensor parallelism

// The own rows of a whole parameter as if dp had cut it first and tp what that leaves.
View cut_over_dp_first(const Parallel& p, const FlatShards& s, const View& whole) {
  const View block = block_of_tp(p, whole);
  const int64_t own = s.count(s.own), ranks = whole.shape[0] / block.shape[0];
  if (ranks == 1) return block.narrow(0, s.first[size_t(s.own)], own);
  return whole.narrow(0, s.first[size_t(s.own)] * ranks + p.tp.rank() * own, own);
}

// Both are cut so: a mesh [dp, tp] whose placements are both Shard(0).
struct CutOverDpFirst : ShardedLinear {
  View own_shard(Parallel& p, const FlatShards& s, const View& whole) const override {
    return cut_over_dp_first(p, s, whole);
  }
  View own_gradient(Parallel& p, const FlatShards& s, const View& whole) const override {
    return cut_over_dp_first(p, s, whole);
  }
};

// Loaded as they are cut, and put together again in the order of the mesh.
struct ReturnedDpFirst final : ShardedLinear {
  View own_gradient(Parallel& p, const FlatShards& s, const View& whole) const override {
    return cut_over_dp_first(p, s, whole);
  }
};

// Gathered from the ranks of another axis of as many ranks.
struct GatheredOverTp final : ShardedLinear {
  std::vector<Axis> gathered_over(const Case&) const override { return {Axis::tp}; }
};

// Summed over the world: blocks of different rows of W, copies of one b.
struct SummedOverTp final : ShardedLinear {
  void sum_copies(Parallel& p, const View& flat) override {
    ShardedLinear::sum_copies(p, flat);
    p.tp.all_reduce(flat, flat);
  }
};

// Divided by the ranks of tp, as a mean over the world is where that over dp was undone.
struct DividedByTp final : ShardedLinear {
  void unpack_gradients(const FlatShards& s, const View& flat, const Views& own) override {
    ShardedLinear::unpack_gradients(s, flat, own);
    for (const View& v : own) scale(v, v, 1, tp_);
  }
  void reduce(Parallel& p, Communicator& group, const View& in, const View& out) override {
    tp_ = p.tp.size();
    ShardedLinear::reduce(p, group, in, out);
  }

 private:
  double tp_ = 1;
};

// Each rank of tp brings b / p to the sum of the products, and b's gradient is divided alike.
struct RowBiasDivided final : ShardedRow {
  void bias_gradient(Parallel& p, const View& g, const View& whole, const View& db) override {
    ShardedRow::bias_gradient(p, g, whole, db);
    scale(db, db, 1, p.tp.size());
  }
};

// reduce_dtype is that of the sum over dp alone: over tp a row bias is summed as it is stored.
struct RowBiasSummedAsStored final : ShardedRow {
  void bias_gradient(Parallel& p, const View& g, const View& whole, const View& db) override {
    RowParallel::bias_gradient(p, g, whole, db);
  }
};

template <class Part>
std::unique_ptr<Kernel> with_row() {
  return std::make_unique<ShardedLinear>(std::make_unique<ColumnParallel>(),
                                         std::make_unique<Part>());
}

// ---- Over microbatches

// The reduced gradient takes the place of the sum: the last microbatch's remains.
struct SumOverwritten final : ShardedLinear {
  void add_gradient(const View& own, const View& sum) override { convert(own, sum); }
};

// The sum is divided by the ranks in place of what is added to it.
struct RunningSumAveraged final : ShardedLinear {
  void add_gradient(const View& own, const View& sum) override {
    scale(sum, sum, 1, ranks_);
    add_into(own, sum);
  }
  void reduce(Parallel& p, Communicator& group, const View& in, const View& out) override {
    ranks_ = group.size();
    ShardedLinear::reduce(p, group, in, out);
  }

 private:
  double ranks_ = 1;
};

// ---- Where a step reduces once

// Every backward takes itself for the last and clears what was added up before it.
struct OnlyLastReduced final : ShardedLinear {
  void add_to_step(Parallel& p, const Views& part, bool last) override {
    step_.clear();
    ShardedLinear::add_to_step(p, part, last);
  }
};

// What is added up is reduced by the first backward, and no more in this step.
struct OnlyFirstReduced final : ShardedLinear {
  void add_to_step(Parallel& p, const Views& part, bool last) override {
    if (seen_++ == 0) ShardedLinear::add_to_step(p, part, last);
    if (last) seen_ = 0;
  }

 private:
  int64_t seen_ = 0;
};

// The switch does nothing: the sum is right, and each backward makes the calls that are due once.
struct EveryOneReduced final : ShardedLinear {
  bool ends_step(const Rank&, const ShardedSaved&) const override { return true; }
};

// The same, and what was reduced stays in what is added up: the first microbatch counts n times.
struct ReducedAgainAtTheEnd final : ShardedLinear {
  bool ends_step(const Rank& rank, const ShardedSaved&) const override {
    last_ = rank.ends_step();
    return true;
  }
  void end_step(Parallel& p, const FlatShards& s, const Views& own) override {
    finish_gradients(p, s, step_.views(), own);
    if (last_) step_.clear();
  }

 private:
  mutable bool last_ = false;
};

// The sum is reduced before the last microbatch is added to it: of that each rank has its own part.
class LastLeftLocal final : public ShardedLinear {
 public:
  void add_to_step(Parallel& p, const Views& part, bool last) override {
    if (last)
      last_ = part;
    else
      ShardedLinear::add_to_step(p, part, last);
  }
  void end_step(Parallel& p, const FlatShards& s, const Views& own) override {
    ShardedLinear::end_step(p, s, own);
    for (size_t k = 0; k < own.size(); ++k)
      add_into(last_[k].narrow(0, s.first[size_t(s.own)], s.count(s.own)), own[k]);
  }

 private:
  Views last_;
};

// Added up in the storage type: what a microbatch adds below its last bit is lost.
struct AddedUpAsStored final : ShardedLinear {
  void add_to_step(Parallel& p, const Views& part, bool) override { step_.add(part, p.storage); }
};

// What a step has added up is still there when the next one begins.
struct NotCleared final : ShardedLinear {
  void end_step(Parallel& p, const FlatShards& s, const Views& own) override {
    finish_gradients(p, s, step_.views(), own);
  }
};

// W adds up in a buffer of its own, b in the gradient that each backward replaces.
class BiasOfLastAlone final : public ShardedLinear {
 public:
  void add_to_step(Parallel& p, const Views& part, bool last) override {
    const bool first = step_.views().empty();
    ShardedLinear::add_to_step(p, part, last);
    if (!first) convert(part[1], step_.views()[1]);
  }
};

// The forward of the last microbatch says that the next backward reduces: right where that is its
// own.
class LastToldByForward final : public ShardedLinear {
 public:
  std::unique_ptr<Saved> forward(Rank& rank, std::span<const View> inputs,
                                 std::span<const View> outputs) override {
    if (rank.accumulates()) last_ = ++forwards_ % rank.line().at("microbatches") == 0;
    return ShardedLinear::forward(rank, inputs, outputs);
  }
  bool ends_step(const Rank&, const ShardedSaved&) const override { return last_; }

 private:
  int64_t forwards_ = 0;
  bool last_ = false;
};

// ---- Forwards in flight

// Whole parameters live in one buffer of the layer: the next forward gathers into it.
class OneBuffer final : public ShardedLinear {
 public:
  std::unique_ptr<Saved> forward(Rank& rank, std::span<const View> inputs,
                                 std::span<const View> outputs) override {
    auto saved = ShardedLinear::forward(rank, inputs, outputs);
    buffer_ = std::move(static_cast<ShardedSaved&>(*saved).whole);
    return saved;
  }
  void backward(Rank& rank, Saved& state, std::span<const View> cotangents,
                std::span<const View> gradients) override {
    auto& saved = static_cast<ShardedSaved&>(state);
    std::swap(saved.whole, buffer_);
    ShardedLinear::backward(rank, state, cotangents, gradients);
    std::swap(saved.whole, buffer_);
  }

 private:
  std::vector<Kept> buffer_;
};

using controls::Row;
using controls::twin;

const Row rows[] = {
    {"sharded_linear", "sharded_gradients_unpadded", twin<GradientsUnpadded>, "gradient,adjoint",
     "forward,ledger,lockstep", "deepspeedai/DeepSpeed 848", "dp=4", "p does not divide the rows"},
    {"sharded_linear", "sharded_parameters_unpadded", twin<ParametersUnpadded>, "forward",
     "ledger,lockstep", "deepspeedai/DeepSpeed 8158", "dp=2", "p does not divide the rows"},
    {"sharded_linear", "sharded_gradient_rows_rounded_down", twin<GradientRowsRoundedDown>,
     "gradient,adjoint", "forward,ledger,lockstep", "pytorch/torchtitan 4593", "dp=3",
     "p does not divide the rows"},
    {"sharded_linear", "sharded_parameter_rows_rounded_down", twin<ParameterRowsRoundedDown>,
     "forward", "ledger,lockstep", "pytorch/torchtitan 4593", "dp=4 out=5",
     "p does not divide the rows"},
    {"sharded_linear", "sharded_unpacked_in_reverse", twin<UnpackedInReverse>, "gradient,adjoint",
     "forward,ledger,lockstep", "deepspeedai/DeepSpeed 2343", "dp=4 out=16",
     "parameters of different sizes"},

    {"sharded_linear", "sharded_gradient_reduced_as_stored", twin<ReducedAsStored>,
     "gradient,ledger", "forward,lockstep", "pytorch/pytorch 190626",
     "dp=4 tokens=96 dtype=bf16 wire=f32 fill=cancelling",
     "wire wider than storage, sums that cancel"},
    {"sharded_linear", "sharded_gradient_stored_before_reduced", twin<StoredBeforeReduced>,
     "gradient", "forward,ledger,lockstep", "NVIDIA/Megatron-LM 6624",
     "dp=4 tokens=96 dtype=bf16 wire=f32 fill=cancelling",
     "wire wider than storage, sums that cancel"},
    {"sharded_linear", "sharded_gradient_averaged", twin<Averaged>, "gradient,adjoint,ledger",
     "forward,lockstep", "meta-pytorch/torchtune 2172, verl-project/verl-SpeCo 29", "dp=4",
     "p >= 2; ratio 1/p"},
    {"sharded_linear", "sharded_gradient_divided_twice", twin<DividedTwice>, "gradient,adjoint",
     "forward,lockstep", "ByteDance-Seed/VeOmni 1079", "dp=2", "p >= 2; ratio 1/p^2"},
    {"sharded_linear", "sharded_gradient_left_local", twin<LeftLocal>, "gradient,adjoint",
     "forward", "deepspeedai/DeepSpeed 4321", "dp=4", "p >= 2"},
    {"sharded_linear", "sharded_gradient_reduced_over_dp_alone", twin<ReducedOverDpAlone>,
     "gradient,ledger", "forward", "pytorch/torchtitan 685", "dp=2 cp=2", "two axes"},
    {"sharded_linear", "sharded_copies_left_local", twin<CopiesLeftLocal>, "gradient,replica",
     "forward", "NVIDIA-NeMo/Automodel 3135", "dp=2 cp=2 shard=cp", "copies over dp"},
    {"sharded_linear", "sharded_every_gradient_left_local", twin<CopiesLeftLocal>,
     "gradient,replica", "forward", "verl-project/verl 7493", "dp=4 shard=cp",
     "copies over dp, no shards"},
    {"sharded_linear", "sharded_copies_averaged", twin<CopiesAveraged>, "gradient,adjoint",
     "forward,replica", "pytorch/pytorch 155903", "dp=2 cp=2 shard=cp", "copies over dp"},
    {"sharded_linear", "sharded_mesh_flattened_dp_first", twin<FlattenedDpFirst>, "forward",
     "lockstep", "a mesh [dp, cp] that is flattened as [cp, dp]", "dp=2 cp=2", "two axes"},
    {"sharded_linear", "sharded_bias_left_out", twin<BiasLeftOut>, "gradient,adjoint",
     "forward,ledger", "a list of parameters kept by hand", "dp=4", "p >= 2"},

    {"sharded_linear", "sharded_cut_over_dp_first", twin<CutOverDpFirst>, "forward,gradient",
     "ledger,lockstep", "pytorch/pytorch 129229, 126697",
     "tp=2 dp=2 parallel=column whole_weight=on", "tp and dp cut the same dim"},
    {"sharded_linear", "sharded_rows_returned_dp_first", twin<ReturnedDpFirst>, "gradient,adjoint",
     "forward,ledger,lockstep", "pytorch/pytorch 129206, 150490",
     "tp=2 dp=2 parallel=column whole_weight=on", "tp and dp cut the same dim"},
    {"sharded_linear", "sharded_gathered_over_tp", twin<GatheredOverTp>, "forward", "",
     "pytorch/pytorch 102280", "tp=2 dp=2 parallel=column sp=on",
     "as many ranks of tp as of shards"},
    {"sharded_linear", "sharded_gradient_summed_over_tp", twin<SummedOverTp>, "gradient,ledger",
     "forward", "pytorch/torchtitan 105", "tp=2 dp=2 parallel=column sp=on", "ranks of tp"},
    {"sharded_linear", "sharded_row_bias_summed_over_tp", twin<SummedOverTp>, "gradient,ledger",
     "forward", "pytorch/torchtitan 105", "tp=2 dp=2 parallel=row sp=on", "b on each rank of tp"},
    {"sharded_linear", "sharded_gradient_divided_by_tp", twin<DividedByTp>, "gradient,adjoint",
     "forward,ledger", "meta-pytorch/torchtune 2420", "tp=2 dp=2 parallel=column sp=on",
     "ranks of tp"},
    {"sharded_linear", "sharded_row_bias_divided_by_tp", with_row<RowBiasDivided>,
     "gradient,adjoint", "forward,ledger", "pytorch/torchtitan 4332",
     "tp=2 dp=2 parallel=row sp=on", "ranks of tp"},
    {"sharded_linear", "sharded_row_bias_before_reduce", with_row<controls::BiasBeforeReduce>,
     "forward", "ledger", "huggingface/text-generation-inference 1036",
     "tp=2 dp=2 parallel=row sp=on", "ranks of tp"},
    {"sharded_linear", "sharded_row_bias_gradient_local", with_row<controls::BiasGradientLocal>,
     "gradient,replica", "forward", "NVIDIA/Megatron-LM 236", "tp=2 dp=2 parallel=row sp=on",
     "sp=on"},
    {"sharded_linear", "sharded_row_bias_summed_as_stored", with_row<RowBiasSummedAsStored>,
     "gradient,ledger", "forward,lockstep", "pytorch/pytorch 190626",
     "tp=2 dp=2 parallel=row sp=on tokens=96 dtype=bf16 wire=f32 grad=f32 fill=normal",
     "wire wider than storage, sums over tp"},

    {"sharded_linear", "sharded_sum_overwritten", twin<SumOverwritten>, "accumulate",
     "forward,gradient", "instructlab/training 414", "dp=2 microbatches=2",
     "2 microbatches in one step"},
    {"sharded_linear", "sharded_running_sum_averaged", twin<RunningSumAveraged>, "accumulate",
     "forward,gradient,adjoint", "NVIDIA/Megatron-LM 3023", "dp=2 microbatches=2",
     "2 microbatches in one step"},
    {"sharded_linear", "sharded_only_last_microbatch_reduced", twin<OnlyLastReduced>, "accumulate",
     "forward,gradient,ledger", "NVIDIA/Megatron-LM 7186, allenai/open-instruct 1498",
     "dp=2 microbatches=2 sync=last", "2 microbatches in one step"},
    {"sharded_linear", "sharded_copies_of_last_microbatch_summed", twin<OnlyLastReduced>,
     "accumulate", "forward,gradient,ledger", "NVIDIA/Megatron-LM 7186",
     "dp=2 cp=2 shard=cp microbatches=2 sync=shards", "2 microbatches in one step"},
    {"sharded_linear", "sharded_only_first_microbatch_reduced", twin<OnlyFirstReduced>,
     "accumulate", "forward,gradient,ledger", "InfiniTensor/InfiniTrain 213",
     "dp=2 microbatches=2 sync=last", "2 microbatches in one step"},
    {"sharded_linear", "sharded_last_microbatch_left_local", twin<LastLeftLocal>, "accumulate",
     "forward,gradient,ledger", "deepspeedai/DeepSpeed 7985", "dp=2 microbatches=2 sync=last",
     "2 microbatches in one step"},
    {"sharded_linear", "sharded_every_microbatch_reduced", twin<EveryOneReduced>, "accumulate",
     "forward,gradient,ledger", "NVIDIA/cosmos-framework 161", "dp=2 microbatches=2 sync=last",
     "the calls of a step"},
    {"sharded_linear", "sharded_copies_of_every_microbatch_summed", twin<EveryOneReduced>,
     "accumulate", "forward,gradient,ledger", "NVIDIA/cosmos-framework 161",
     "dp=2 cp=2 shard=cp microbatches=2 sync=shards", "the calls of a step"},
    {"sharded_linear", "sharded_reduced_again_at_the_end", twin<ReducedAgainAtTheEnd>, "accumulate",
     "forward,gradient,ledger", "a reduction in every microbatch of a sum that is kept",
     "dp=2 microbatches=2 sync=last", "microbatches in one step"},
    {"sharded_linear", "sharded_added_up_as_stored", twin<AddedUpAsStored>, "accumulate",
     "forward,gradient,ledger", "ISEEKYAN/Megatron-LM 149",
     "dp=2 microbatches=4 sync=last dtype=bf16 wire=f32 grad=f32 fill=normal",
     "wire wider than storage, several microbatches"},
    {"sharded_linear", "sharded_shards_added_up_as_stored", twin<AddedUpAsStored>, "accumulate",
     "forward,gradient,ledger", "pytorch/pytorch 194628",
     "dp=2 shard=cp microbatches=4 sync=shards dtype=bf16 wire=f32 grad=f32 fill=normal",
     "wire wider than storage, several microbatches"},
    {"sharded_linear", "sharded_step_not_cleared", twin<NotCleared>, "accumulate",
     "forward,gradient,ledger", "deepspeedai/DeepSpeed 6550, NVIDIA/Megatron-LM 4609",
     "dp=2 microbatches=2 sync=last", "2 steps, compared after each"},
    {"sharded_linear", "sharded_bias_of_last_microbatch_alone", twin<BiasOfLastAlone>, "accumulate",
     "forward,gradient,ledger", "NVIDIA/Megatron-LM 6357", "dp=2 microbatches=2 sync=last",
     "2 microbatches in one step"},
    {"sharded_linear", "sharded_last_told_by_forward", twin<LastToldByForward>, "accumulate",
     "forward,gradient,ledger", "huggingface/picotron 5", "dp=2 microbatches=2 sync=last",
     "F0 F1 .. B0 B1 .."},

    {"sharded_linear", "sharded_whole_parameters_in_one_buffer", twin<OneBuffer>, "accumulate",
     "forward,gradient,adjoint,repeat,ledger", "pytorch/pytorch 136861", "dp=2 reshard=off",
     "two forwards in flight"},
};

}  // namespace

void controls_sharded(Registry& registry) { controls::add(registry, rows); }

}  // namespace shardproof
