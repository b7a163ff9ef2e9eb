// Fully sharded data parallelism: each rank keeps a block of rows of every parameter and has the
// whole of them only while it computes (ZeRO stage 3; fully_shard of PyTorch, FSDP2).
//
//   ranks      shard=all: p = dp cp, all that have tokens of their own, cp the faster, as a mesh
//              [dp, cp] is flattened; shard=cp: p = cp, and each rank of dp has a copy (hybrid)
//   rows       blocks of ceil(o/p), as torch.chunk cuts: the last ranks own fewer, or none
//   flat       a rank's block of W, then its block of b, each filled up with zeros to ceil(o/p)
//              rows: buffers of one size, so that one call moves all parameters
//
//   sharded_linear      Y = X W^T + b on the own tokens
//     forward   all-gather of the flat shard
//     backward  reshard=on: gathered again; off: what the forward has gathered is kept
//               dX = dY W, no call
//               the gradients of the own tokens, cut into p flat blocks: one reduce-scatter, a sum;
//               shard=cp: then one all-reduce of the flat shard over dp
//
// Each rank's gradient is rounded to the wire type, in which it travels, or before that to
// local_grad=, as autograd keeps it in the storage type. A group of one issues no call. Where a
// step has several microbatches each is reduced by itself and added into the running sum of the own
// rows.
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
  int64_t count(int rank) const { return first[size_t(rank) + 1] - first[size_t(rank)]; }
};

using Views = std::vector<View>;

struct ShardedSaved : Saved {
  View x;
  Views own;                // the judge keeps arguments alive until the backward that reads them
  std::vector<Kept> whole;  // what was gathered, where it is kept
};

class ShardedLinear : public Kernel {
 public:
  // inputs x [..,i], w and b own rows; output y [..,o].
  std::unique_ptr<Saved> forward(Rank&, std::span<const View> inputs,
                                 std::span<const View> outputs) override;
  void backward(Rank&, Saved&, std::span<const View> cotangents,
                std::span<const View> gradients) override;

 protected:
  // Axes whose ranks parameters are gathered from.
  virtual std::vector<Axis> gathered_over(const Case&) const;
  // Rows of a rank from its flat shard to where they belong in the whole, and from there into it;
  // the own rows of the sum to where the own gradients are.
  virtual void unpack_parameters(const FlatShards&, int rank, const View& flat, const Views& whole);
  virtual void pack_gradients(const FlatShards&, int rank, const Views& whole, const View& flat);
  virtual void unpack_gradients(const FlatShards&, const View& flat, const Views& own);
  // in [p n], out [n], the sum over all ranks.
  virtual void reduce(Parallel&, Communicator&, const View& in, const View& out);
  // A flat shard, in place, over the ranks that have copies of it.
  virtual void sum_copies(Parallel&, const View& flat);
  // Gradients of the own tokens to those of the own rows.
  virtual void reduce_gradients(Parallel&, const FlatShards&, const Views& whole, const Views& own);
  virtual DType type_on_wire(const Parallel&) const;
  virtual void add_gradient(const View& own, const View& sum);  // of a microbatch to the step's

  // Into `whole`, a view for each parameter.
  void gather(Parallel&, const FlatShards&, const Views& own, const Views& whole);

 private:
  void gradients_of(Parallel&, Saved&, std::span<const View> cotangents,
                    std::span<const View> gradients);
};

// The shards of a line's parameters, and the ranks that hold them.
FlatShards shards_of(Parallel&);
Communicator& group_of_shards(Parallel&);
// Rows [first, first + count) of each parameter in the order in which a flat shard holds them.
void to_flat(const FlatShards&, const Views& rows, int64_t first, int64_t count, const View& flat);
void from_flat(const FlatShards&, const View& flat, const Views& rows, int64_t first,
               int64_t count);

}  // namespace shardproof::primitives
