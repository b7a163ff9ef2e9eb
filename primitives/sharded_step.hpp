// The step of a distributed optimizer: each data-parallel rank keeps masters and moments of a part
// of the parameters and updates that part (ZeRO stages 1 and 2; Megatron's DistributedOptimizer).
//
//   flat     all parameters one behind the other, filled up with zeros to a multiple of p: p shards
//            of equal length, whose borders fall inside of parameters. The last ranks own fewer
//            elements, or none
//   ranks    shard=all: p = dp cp, cp the faster, as a mesh [dp, cp] is flattened; shard=cp: p =
//            cp, and each rank of dp has a copy of shard and state
//
//   sharded_step
//     gradients, in the wire type: those of microbatches are added up; one reduce-scatter;
//     shard=cp:
//              then one all-reduce over dp of the own shard. A sum, the mean over all ranks
//              (reduce=mean), or over dp of what is summed over cp (reduce=mean_dp): an average
//              where it is over all ranks of the call, else the sum, which is divided behind it.
//              There a mean of microbatches (loss=mean) is divided, too
//     loss_scale=
//              the gradient is divided by it. A flag, 1 where an element of the own shard is
//              infinite or no number: one all-reduce over all ranks, its maximum. Where it is 1,
//              every tensor stays as it was, the scale is halved, and the step ends here. Else the
//              scale is doubled where it is due (grows=on)
//     clip=    squares of the own shard: one all-reduce over the shards; the gradient is scaled to
//              a norm of at most that
//     update   masters and moments of the own shard, in the accumulation type: AdamW, or SGD with
//              momentum. Matrices decay, vectors (gains, biases) do not
//     masters  rounded to the storage type: one all-gather
//
// A group of one issues no call. There is no backward.
#pragma once
#include <memory>
#include <optional>
#include <vector>

#include "primitives/optimizer.hpp"
#include "primitives/sharded.hpp"

namespace shardproof::primitives {

std::optional<Rejected> refused_sharded_step(const Case&);

// A part of one parameter: elements [first, first + count) of the flat buffer.
struct Piece {
  size_t parameter = 0;
  int64_t first = 0, count = 0;
};

// Where parameters and shards lie in the flat buffer.
struct FlatBuffer {
  int ranks = 1, own = 0;
  std::vector<int64_t> first;  // element of each parameter, and behind the last
  std::vector<bool> matrix;    // by parameter
  int64_t block = 0;           // elements of a shard, padding and all

  FlatBuffer(const std::vector<std::vector<int64_t>>& shapes, int ranks, int own);
  int64_t elements() const { return first.back(); }
  int64_t padded() const { return block * ranks; }
  int64_t begin(int rank) const;  // of a rank's elements
  int64_t count(int rank) const { return begin(rank + 1) - begin(rank); }
  std::vector<Piece> pieces(int rank) const;  // of the parameters in a rank's shard
};

// Operands by name. Parameters in the order gamma, w, b.
struct StepTensors {
  std::vector<View> parameters, gradients;  // of several microbatches: [microbatches, ..]
  View master, m, v;                        // as they are handed; no data where there is none
  std::vector<View> next;
  View next_master, next_m, next_v, norm, next_scale;

  StepTensors(const Case&, std::span<const View> inputs, std::span<const View> outputs);
};

// Tensors of one piece. Without v it is SGD.
struct PieceTensors {
  View master, m, v, gradient, next_master, next_m, next_v;
};

class ShardedStep : public Kernel {
 public:
  std::unique_ptr<Saved> forward(Rank&, std::span<const View> inputs,
                                 std::span<const View> outputs) override;

 protected:
  virtual FlatBuffer flat_of(Parallel&, const StepTensors&) const;
  // Ranks that the own shard is gathered from and counted with.
  virtual std::vector<Axis> gathered_over(const Case&) const;
  virtual DType type_on_wire(const Parallel&) const;
  virtual StepNumbers numbers(const Case&) const;
  virtual bool decays(const FlatBuffer&, const Piece&) const;

  // Gradients of the own microbatches, added up in the flat buffer.
  virtual View own_sum(Parallel&, const FlatBuffer&, const StepTensors&, DType);
  // How a call over these axes reduces, and what of a mean is left behind all calls.
  virtual Reduce reduction(const Case&, const std::vector<Axis>&) const;
  virtual double left_to_divide(const Case&) const;
  virtual double scale_of_loss(const Case&) const;  // that gradients come with

  // Tensors of all parameters into the flat buffer, and out of it.
  virtual void pack_gradients(const FlatBuffer&, const std::vector<View>& all, const View& flat);
  virtual void unpack_parameters(const FlatBuffer&, const View& flat, const std::vector<View>& all);
  // in [p block], out [block].
  virtual void reduce(Parallel&, Communicator&, const View& in, const View& out, Reduce);
  virtual void reduce_copies(Parallel&, const View& shard, Reduce);
  // The reduced gradient of the own elements, in the accumulation type.
  virtual View reduced_gradient(Parallel&, const FlatBuffer&, const StepTensors&);
  // 1 where a number of the own gradient is not finite; then the greatest of all ranks.
  virtual void find_overflow(Parallel&, const View& gradient, const View& own);
  virtual void agree(Parallel&, const View& own, const View& all);
  virtual double next_scale(const Case&, bool overflow) const;
  // A step that is not taken.
  virtual void keep(Parallel&, const FlatBuffer&, const StepTensors&, const PieceTensors& own);
  // The own part of a state that is handed whole.
  virtual View own_state(Parallel&, const FlatBuffer&, const View& whole) const;
  virtual View own_master(Parallel&, const FlatBuffer&, const StepTensors&);
  virtual void sum_squares(Parallel&, const FlatBuffer&, const View& own, const View& total);
  virtual View clipped(Parallel&, const FlatBuffer&, const StepTensors&, const View& gradient);
  virtual void update(Parallel&, const PieceTensors&, const StepNumbers&);
  virtual void update_shard(Parallel&, const FlatBuffer&, const PieceTensors& own);
  // shard [block] of the new parameters, all [p block].
  virtual void gather(Parallel&, const FlatBuffer&, const StepTensors&, const View& shard,
                      const View& all);

  PieceTensors own_tensors(Parallel&, const FlatBuffer&, const StepTensors&);
  // Whether any rank has met one, of which the scale is told.
  bool overflows(Parallel&, const StepTensors&, const View& gradient);
  // Masters of the own shard, or what is in their place, to the parameters of every rank.
  void spread(Parallel&, const FlatBuffer&, const StepTensors&, const View& own);
  View own_shard_of_parameters(Parallel&, const FlatBuffer&, const StepTensors&);  // stored [block]
};

// Of one rank where there are no axes.
Communicator& group_over(Parallel&, const std::vector<Axis>&);
std::vector<Axis> axes_of_step(const Case&);  // all that have ranks, fastest first
int64_t microbatches_of(const Case&);
// Gradients of one microbatch.
std::vector<View> gradients_of(const StepTensors&, int64_t microbatches, int64_t which);
void pack(const std::vector<int64_t>& places, const std::vector<View>& all, const View& flat);
void unpack(const std::vector<int64_t>& places, const View& flat, const std::vector<View>& all);
// Elements [first, first + count) of the own shard's tensors.
PieceTensors part_of(const PieceTensors&, int64_t first, int64_t count);

}  // namespace shardproof::primitives
