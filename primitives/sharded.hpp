// Fully sharded data parallelism, alone or inside tensor parallelism: each rank keeps a block of
// rows of every parameter and has more of it only while it computes (ZeRO stage 3; fully_shard of
// PyTorch, FSDP2).
//
//   block      of W and b that is cut by rows, o of them: all (parallel=none); tp cuts first where
//              it has ranks: rows of W and b (parallel=column), columns of W, b on each of its
//              ranks (parallel=row)
//   ranks      shard=all: p = dp cp, all that have tokens of their own, cp the faster, as a mesh
//              [dp, cp] is flattened; shard=cp: p = cp, and each rank of dp has a copy (hybrid)
//   rows       blocks of ceil(o/p), as torch.chunk cuts: the last ranks own fewer, or none
//   flat       a rank's block of W, then its block of b, each filled up with zeros to ceil(o/p)
//              rows: buffers of one size, so that one call moves all parameters
//
//   sharded_linear      Y = X W^T + b on the own tokens
//     forward   all-gather of the flat shard; then that of the linear over tp
//     backward  reshard=on: gathered again; off: what the forward has gathered is kept
//               that of the linear over tp: dX, and the gradients of the own tokens
//               these, cut into p flat blocks: one reduce-scatter, a sum;
//               shard=cp: then one all-reduce of the flat shard over dp
//
// Each rank's gradient is rounded to the wire type, in which it travels over dp and cp, or before
// that to local_grad=, as autograd keeps it in the storage type. Over tp activations are summed in
// the storage type, and the gradient of a row bias, which under sp is a sum of the own tokens, in
// the type in which the rank keeps it. A group of one issues no call.
//
// Where a step has several microbatches
//   sync=each    each is reduced by itself and added into the running sum of the own rows
//   sync=shards  the own rows are added up in the wire type; the copies are summed by the backward
//                that ends the step
//   sync=last    the gradients of the own tokens are added up in the wire type, unsharded; the
//                backward that ends the step reduces
#pragma once
#include <memory>
#include <optional>
#include <vector>

#include "primitives/linear.hpp"

namespace shardproof::primitives {

std::optional<Rejected> refused_sharded_linear(const Case&);

// Axes with ranks over which parameters are cut, and over which they are copied.
std::vector<Axis> axes_of_shards(const Case&);
std::vector<Axis> axes_of_shard_copies(const Case&);

// Where the rows of parameters are: by rank, and in a rank's flat shard.
struct FlatShards {
  int ranks = 1, own = 0;
  std::vector<int64_t> first;   // row of each rank, and behind the last
  std::vector<int64_t> widths;  // elements of a row, by parameter
  std::vector<int64_t> places;  // of each parameter in a flat shard
  int64_t elements = 0;         // of a flat shard

  FlatShards(int64_t rows, int ranks, int own, std::vector<int64_t> widths);
  int64_t rows() const { return first.back(); }
  int64_t count(int rank) const { return first[size_t(rank) + 1] - first[size_t(rank)]; }
};

using Views = std::vector<View>;

// What the microbatches of a step have added up so far. It belongs to the step and to no forward.
class StepSums {
 public:
  void add(const Views&, DType);
  Views views() const;
  void clear() { sums_.clear(); }

 private:
  std::vector<Kept> sums_;
};

struct ShardedSaved : Saved {
  View x;
  Views own;                // the judge keeps arguments alive until the backward that reads them
  std::vector<Kept> whole;  // what was gathered, where it is kept
};

// The gradient of a row bias over tp in the type in which a rank keeps its gradients.
class ShardedRow : public RowParallel {
 protected:
  void bias_gradient(Parallel&, const View& g, const View& whole, const View& db) override;
};

class ShardedLinear : public Kernel {
 public:
  explicit ShardedLinear(std::unique_ptr<ColumnParallel> = std::make_unique<ColumnParallel>(),
                         std::unique_ptr<RowParallel> = std::make_unique<ShardedRow>());
  // inputs x [..,i], w and b own rows, or whole (whole_weight=on); output y [..,o].
  std::unique_ptr<Saved> forward(Rank&, std::span<const View> inputs,
                                 std::span<const View> outputs) override;
  void backward(Rank&, Saved&, std::span<const View> cotangents,
                std::span<const View> gradients) override;

 protected:
  // Axes whose ranks parameters are gathered from.
  virtual std::vector<Axis> gathered_over(const Case&) const;
  // The own shard of a parameter, and of its gradient, that are handed whole.
  virtual View own_shard(Parallel&, const FlatShards&, const View& whole) const;
  virtual View own_gradient(Parallel&, const FlatShards&, const View& whole) const;
  // Rows of a rank from its flat shard to where they belong in the block, and from there into it;
  // the own rows of the sum to where the own gradients are.
  virtual void unpack_parameters(const FlatShards&, int rank, const View& flat, const Views& whole);
  virtual void pack_gradients(const FlatShards&, int rank, const Views& whole, const View& flat);
  virtual void unpack_gradients(const FlatShards&, const View& flat, const Views& own);
  // in [p n], out [n], the sum over all ranks.
  virtual void reduce(Parallel&, Communicator&, const View& in, const View& out);
  // A flat shard, in place, over the ranks that have copies of it.
  virtual void sum_copies(Parallel&, const View& flat);
  // Gradients of the own tokens to the flat shard of their sum over the shards, and on to those of
  // the own rows.
  View sum_over_shards(Parallel&, const FlatShards&, const Views& whole);
  virtual void reduce_gradients(Parallel&, const FlatShards&, const Views& whole, const Views& own);
  virtual DType type_on_wire(const Parallel&) const;
  virtual void add_gradient(const View& own, const View& sum);  // of a microbatch to the step's

  // Where a step reduces once.
  virtual bool ends_step(const Rank&, const ShardedSaved&) const;
  virtual void add_to_step(Parallel&, const Views& part, bool last);
  virtual void end_step(Parallel&, const FlatShards&, const Views& own);

  // Into `whole`, a view for each parameter.
  void gather(Parallel&, const FlatShards&, const Views& own, const Views& whole);
  // What part_of_step made to the gradients of the own rows.
  void finish_gradients(Parallel&, const FlatShards&, const Views& part, const Views& own);

  StepSums step_;

 private:
  Views own_parameters(Parallel&, const FlatShards&, std::span<const View>) const;
  Views own_gradients(Parallel&, const FlatShards&, std::span<const View>) const;
  // dX, and the gradients that the own tokens give to the block.
  Views gradients_of_own_tokens(Parallel&, const FlatShards&, const ShardedSaved&, const View& g,
                                const View& dx);
  // What of these is added up over microbatches: behind the calls that each of them makes.
  Views part_of_step(Parallel&, const FlatShards&, const Views& whole);
  View weight_again(Parallel&, const FlatShards&, const ShardedSaved&);

  std::unique_ptr<ColumnParallel> column_;
  std::unique_ptr<RowParallel> row_;
};

// The shards of a line's parameters, and the ranks that hold them.
FlatShards shards_of(Parallel&);
Communicator& group_of_shards(Parallel&);
// The part of a whole parameter that tp leaves to a rank.
View block_of_tp(const Parallel&, const View& whole);
// Rows [first, first + count) of each parameter in the order in which a flat shard holds them.
void to_flat(const FlatShards&, const Views& rows, int64_t first, int64_t count, const View& flat);
void from_flat(const FlatShards&, const View& flat, const Views& rows, int64_t first,
               int64_t count);

}  // namespace shardproof::primitives
