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
// core=allgather|ring says how keys travel over cp.
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
#include "primitives/replicated.hpp"

namespace shardproof::primitives {

std::optional<Rejected> refused_attention_block(const Case&);
// Over which it sums the gradients of what tp cuts, and of the bias that it does not cut.
std::vector<Axis> axes_of_weights(const Case&);

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
  virtual std::vector<Axis> bias_summed_over(const Case&) const;
  virtual void sum_gradients(Parallel&, const Parts&, const std::vector<Axis>&);

 private:
  void gradients_of(Parallel&, Saved&, const View& g, std::span<const View> gradients);
  ColumnParallel up_;
  RowParallel down_;
};

}  // namespace shardproof::primitives
