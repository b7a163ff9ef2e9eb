// The attention of a transformer layer under tensor, sequence and context parallelism:
//
//   z = x Wqkv^T + bqkv (column), q, k turned by position, o = attention(q, k, v) over cp,
//   y = o Wo^T + bo (row)
//
//   sp=on   x, y [T/(cp tp), h]: the tokens of a cp rank are cut over tp outside the two linears
//   sp=off  x, y [T/cp, h] on every rank of tp
//   inside  z, q, k, v, o of the T/cp tokens of the cp rank and of the heads of the tp rank: tp
//           makes no call there, cp none elsewhere
//
// Columns of z are [query heads | key heads | value heads] of the rank, whole groups of them.
// core=allgather|ring says how keys travel over cp. Where there are fewer key heads than ranks of
// tp, kv_replicas ranks use the same ones:
//
//   form=replica  Wq cut over tp; Wk, Wv of the group on each of its ranks, whose gradients are
//                 summed over these ranks (and over cp and dp) in a call of their own
//   form=gather   one weight, rows [query heads | key head | value head] group by group, cut over
//                 all ranks; its products are gathered and each rank takes its own heads; backward
//                 reduce-scatters their cotangents
//
// Every weight meets the own tokens of a cp rank only: gradients are summed over cp, and over dp,
// in one coalesced call (reduce=tp leaves that to the training step); bo, which is on every rank of
// tp, in another, under sp over tp as well.
//
// Kept for backward: x_s, z (for v), q, k and o in the storage type, and what the core keeps.
#pragma once
#include <memory>
#include <vector>

#include "primitives/attention.hpp"
#include "primitives/replicated_layers.hpp"

namespace shardproof::primitives {

std::optional<Rejected> refused_attention_block(const Case&);
// Over which it sums the gradients of what tp cuts, of key weights that ranks of tp share, and of
// the bias that tp does not cut (axes_of_tokens).
std::vector<Axis> axes_of_weights(const Case&);
std::vector<Axis> axes_of_copies(const Case&);
// Whether query, key and value weights are operands of their own.
bool splits_weights(const Case&);

class AttentionBlock : public Kernel {
 public:
  std::unique_ptr<Saved> forward(Rank&, std::span<const View> inputs,
                                 std::span<const View> outputs) override;
  void backward(Rank&, Saved&, std::span<const View> cotangents,
                std::span<const View> gradients) override;

 protected:
  // Heads [tokens.., heads, d] of a row of columns.
  struct Heads {
    View q, k, v;
  };
  virtual Heads heads_of(const Case&, const View& z) const;
  virtual std::unique_ptr<Kernel> core_of(const Case&) const;
  // The ranks as the core sees them.
  virtual std::unique_ptr<Saved> attend(Rank&, Kernel& core, std::span<const View> in,
                                        std::span<const View> out);
  virtual std::vector<int64_t> positions(Parallel&) const;  // by local token
  virtual int sense_of_backward() const { return -1; }
  virtual std::vector<Axis> weights_summed_over(const Case&) const;
  virtual std::vector<Axis> copies_summed_over(const Case&) const;
  virtual int64_t first_group(const HeadPlan&, int rank) const;  // form=gather: of its key heads
  // Parts of dX that came through the query heads and through the key and value heads.
  virtual void reduce_input_gradient(Parallel&, const View& of_queries, const View& of_keys,
                                     const View& dx);
  virtual std::vector<Axis> bias_summed_over(const Case&) const;
  virtual void sum_gradients(Parallel&, const Parts&, const std::vector<Axis>&);

 private:
  struct Arguments;
  struct BlockSaved;
  void project(Parallel&, const Arguments&, const View& z);
  void project_backward(Parallel&, const Arguments& in, const View& dz, const Arguments& gradients);
  void gradients_of(Parallel&, Saved&, const View& g, std::span<const View> gradients);

  // Its steps apart: the whole input, and what dX owes.
  struct Column : ColumnParallel {
    using ColumnParallel::reduce_input_gradient;
    using ColumnParallel::whole_input;
  };
  Column up_;
  RowParallel down_;
};

}  // namespace shardproof::primitives
