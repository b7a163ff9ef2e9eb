// Layer normalisation and root-mean-square normalisation over the last dim of a rank's own tokens.
// The mathematics is local: every rank holds whole rows. What is not local are the gradients of the
// two parameters, sums over all tokens: where tokens are cut over an axis (tp under sequence
// parallelism, cp, dp) each rank has the sum over its own, and the parts are summed in one call.
//
//   x, y [T_local, h]; gamma, beta [h] on every rank; beta for layer norm only
//   saved: mean and 1/sqrt(var + eps) of each row, in the accumulation type
//
// sp=off: the tokens are on every rank of tp, gradients are whole there and nothing is summed.
// reduce=tp leaves the sums over cp and dp to the training step: gradients stay partial there.
#pragma once
#include <memory>
#include <vector>

#include "primitives/replicated.hpp"

namespace shardproof::primitives {

inline constexpr double norm_eps = 1e-5;

// The norm of a rank's own rows.
class Norm {
 public:
  explicit Norm(bool centred) : centred_(centred) {}
  virtual ~Norm() = default;
  bool centred() const { return centred_; }
  // statistics [rows, 2]
  virtual void forward(Parallel&, const View& x, const View& gamma, const View& beta, const View& y,
                       const View& statistics) const;
  // dgamma and dbeta are sums over the own rows; any of the three may be without data.
  void backward(Parallel&, const View& x, const View& gamma, const View& statistics, const View& g,
                const View& dx, const View& dgamma, const View& dbeta) const;

 protected:
  // The row with which a rank's sums over its rows begin; they go on in order, round the end.
  virtual int64_t first_row(Parallel&, int64_t rows) const;

 private:
  bool centred_;
};
std::optional<Rejected> refused_norm(const Case&);

// The norm as a subject of the contract norm_sequence.
class NormSequence : public Kernel {
 public:
  std::unique_ptr<Saved> forward(Rank&, std::span<const View> inputs,
                                 std::span<const View> outputs) override;
  void backward(Rank&, Saved&, std::span<const View> cotangents,
                std::span<const View> gradients) override;

 protected:
  virtual std::unique_ptr<Norm> norm_of(const Case&) const;
  virtual std::vector<Axis> summed_over(const Case&) const;
  virtual void sum_gradients(Parallel&, const Parts&, const std::vector<Axis>&);
};

}  // namespace shardproof::primitives
