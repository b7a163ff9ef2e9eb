// Broken twins of fully sharded data parallelism. The comment above a twin names the mistake.
#include <algorithm>

#include "oracle/registry.hpp"
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

// ---- Over microbatches, and with forwards in flight

// The reduced gradient takes the place of the sum: the last microbatch's remains.
struct SumOverwritten final : ShardedLinear {
  void add_gradient(const View& own, const View& sum) override { convert(own, sum); }
};

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

    {"sharded_linear", "sharded_sum_overwritten", twin<SumOverwritten>, "accumulate",
     "forward,gradient", "instructlab/training 414", "dp=2 microbatches=2",
     "2 microbatches in one step"},
    {"sharded_linear", "sharded_whole_parameters_in_one_buffer", twin<OneBuffer>, "accumulate",
     "forward,gradient,adjoint,repeat,ledger", "pytorch/pytorch 136861", "dp=2 reshard=off",
     "two forwards in flight"},
};

}  // namespace

void controls_sharded(Registry& registry) { controls::add(registry, rows); }

}  // namespace shardproof
