// The kernels of the replicated family, one a contract.
//
//   ReplicatedGradients  sum_i = all-reduce(g_i), mean_i = average(a_i): two coalesced calls
//   ReplicatedRouter     Y = X W^T + b on the own tokens, W and b on every rank
//   ReplicatedQkNorm     RMS norm of query and key heads, one weight for all heads each
//   ReplicatedQkv        Q, K, V = X Wq^T, X Wk^T, X Wv^T with fewer key heads than ranks
//   ReplicatedClip       norm of all gradients, each counted once; gradients scaled to at most it
//   ReplicatedStep       w' = w - lr sum of g over the ranks
#pragma once
#include <memory>

#include "primitives/norm_sequence.hpp"
#include "primitives/replicated.hpp"

namespace shardproof::primitives {

class ReplicatedGradients : public Kernel {
 public:
  std::unique_ptr<Saved> forward(Rank&, std::span<const View> inputs,
                                 std::span<const View> outputs) override;
  void backward(Rank&, Saved&, std::span<const View> cotangents,
                std::span<const View> gradients) override;

 protected:
  virtual void sum(Parallel&, const Parts&, Communicator&);
  virtual void average(Parallel&, const Parts&, Communicator&);
};

class ReplicatedRouter : public Kernel {
 public:
  std::unique_ptr<Saved> forward(Rank&, std::span<const View> inputs,
                                 std::span<const View> outputs) override;
  void backward(Rank&, Saved&, std::span<const View> cotangents,
                std::span<const View> gradients) override;
  // Small values by (seed, parameter, index): equal on all ranks.
  bool init(Rank&, std::span<const View> parameters) override;

 protected:
  virtual std::vector<Axis> summed_over(const Case&) const;
  virtual void sum_gradients(Parallel&, const Parts&, const std::vector<Axis>&);
  virtual uint64_t seed_of(Rank&) const;
};

class ReplicatedQkNorm : public Kernel {
 public:
  std::unique_ptr<Saved> forward(Rank&, std::span<const View> inputs,
                                 std::span<const View> outputs) override;
  void backward(Rank&, Saved&, std::span<const View> cotangents,
                std::span<const View> gradients) override;

 protected:
  virtual std::vector<Axis> summed_over(const Case&) const;
};
// tp always, since heads are cut over it with and without sp; cp and dp as reduce= says.
std::vector<Axis> axes_of_heads(const Case&);

// form=replica: each rank holds the key and value weights of its group; gradients are summed over
// the ranks that hold the same. form=gather: one weight, cut over all ranks by rows [query heads of
// the group | its key head | its value head] group by group; what it gives is gathered, and each
// rank takes its own.
class ReplicatedQkv : public Kernel {
 public:
  std::unique_ptr<Saved> forward(Rank&, std::span<const View> inputs,
                                 std::span<const View> outputs) override;
  void backward(Rank&, Saved&, std::span<const View> cotangents,
                std::span<const View> gradients) override;

 protected:
  virtual void sum_copies(Parallel&, const Parts&);  // of dWk and dWv
  virtual void reduce_input_gradient(Parallel&, const View& of_queries, const View& of_keys,
                                     const View& dx);
};

class ReplicatedClip : public Kernel {
 public:
  std::unique_ptr<Saved> forward(Rank&, std::span<const View> inputs,
                                 std::span<const View> outputs) override;

 protected:
  // Whether this rank counts the gradients that all ranks of tp hold, and its shards of the others.
  virtual bool counts_replicated(const Parallel&) const;
  virtual bool counts_sharded(const Parallel&) const;
};

class ReplicatedStep : public Kernel {
 public:
  std::unique_ptr<Saved> forward(Rank&, std::span<const View> inputs,
                                 std::span<const View> outputs) override;
  void backward(Rank&, Saved&, std::span<const View> cotangents,
                std::span<const View> gradients) override;

 protected:
  virtual void update(Parallel&, const View& w, const View& g, double lr, Communicator&,
                      const View& next);
};

double rate_of(const Case&);                // lr=1/8
double max_norm_of(const Case&);            // max_norm=1
std::vector<Axis> axes_named(const Case&);  // over=tp,cp

// Heads on a rank of tp, and how the ranks share key heads.
struct HeadPlan {
  int64_t heads, kv_heads, dim, p, rep;  // rep ranks hold the same key heads
  explicit HeadPlan(const Case&);
  int64_t own_heads() const { return heads / p; }
  int64_t own_kv() const { return kv_heads * rep / p; }
  int64_t rows_of_group() const { return (heads / kv_heads + 2) * dim; }
  int64_t rows() const { return kv_heads * rows_of_group(); }
  // Row of the fused weight at which a head begins.
  int64_t query_row(int64_t head) const;
  int64_t key_row(int64_t group) const;
  int64_t value_row(int64_t group) const { return key_row(group) + dim; }
  int64_t first_group(int r) const { return r / rep * own_kv(); }
};

// form=gather: what the ranks' rows of the fused weight gave, gathered, and own heads taken out of
// it, the key heads from group `first` on; own [.., rows/p], q, k, v [.., heads dim].
void take_gathered_heads(Parallel&, const View& own, int64_t first, std::span<const View> qkv);
// Back: cotangents put at their places and reduced to those of the own rows, in the wire type; the
// ranks that share a key head add theirs up.
View return_gathered_heads(Parallel&, std::span<const View> cotangents, int64_t first,
                           int64_t own_rows);

}  // namespace shardproof::primitives
