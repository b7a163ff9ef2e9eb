// Feed-forward block Y = N W2^T + b2, N = norm(act(X W1^T + b1)), on the ranks of the tp axis: a
// column-parallel linear, pointwise work on the own FFN columns, a row-parallel linear. It
// communicates at its borders only; a norm between the two adds its statistics, T values each way.
//
//   Z_r [T,f/p] (swiglu: [gate | up], [T,2f/p])   A_r, N_r [T,f/p]
//
// Kept for backward: X_s (under sp the gathered X is not), Z_r in the storage type, and 1/rms of
// each token. A and N are recomputed from Z.
#pragma once
#include <memory>
#include <vector>

#include "primitives/gate.hpp"
#include "primitives/linear.hpp"

namespace shardproof::primitives {

class Mlp : public Kernel {
 public:
  std::unique_ptr<Saved> forward(Rank&, std::span<const View> inputs,
                                 std::span<const View> outputs) override;
  void backward(Rank&, Saved&, std::span<const View> cotangents,
                std::span<const View> gradients) override;

  static constexpr double eps = 1e-6;  // of the norm, as in the contract

 protected:
  virtual Activation pointwise_of(const Case&) const;
  // Row means over the whole FFN dim from sums over the own columns, [T] in the accumulation type:
  // of A^2 in forward, of gamma dN xhat in backward.
  virtual void mean_over_ffn(Parallel&, const View& own_sums, int64_t own_columns,
                             const View& means, Phase);
  virtual std::vector<int64_t> own_rows(const Case&, int64_t rows, int p, int r) const;

 private:
  void gradients_of(Parallel&, Saved&, std::span<const View> cotangents,
                    std::span<const View> gradients);
  Gate gate_of(Parallel&, const View& z, int64_t columns) const;
  void between(Parallel&, const View& z, const View& gamma, const View& n, const View& inverse_rms);
  void recompute(Parallel&, const View& z, const View& gamma, const View& inverse_rms,
                 const View& n);
  void between_backward(Parallel&, const View& z, const View& gamma, const View& inverse_rms,
                        const View& dn, const View& dz, const View& dgamma);
  ColumnParallel first_;
  RowParallel second_;
};

}  // namespace shardproof::primitives
