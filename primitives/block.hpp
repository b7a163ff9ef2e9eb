// A transformer block without its attention under tensor and sequence parallelism:
//
//   u = norm1(x), z = u W1^T + b1 (column), a = act(z), m = a W2^T + b2 (row)
//   r = x + dropout(m), y = r + dropout(norm2(r))
//
//   sp=on   x, u, m, r, y are [T/p, h] of the rank's tokens; z, a [T, f/p]
//   sp=off  x, u, m, r, y [T, h] on every rank of tp
//
// Gradients of gamma, beta of both norms and of b2 meet the own tokens only under sp: five parts
// that travel over tp in one coalesced call. Over dp and cp nothing is summed here: the training
// step does that, once for all microbatches.
//
// Dropout draws by the global index of the element (Philox, counter (index / 4, site, draw)): the
// mask is a function of the line alone, equal on every layout, and stored nowhere.
#pragma once
#include "primitives/activation.hpp"
#include "primitives/norm_sequence.hpp"
#include "primitives/replicated.hpp"

namespace shardproof::primitives {

std::optional<Rejected> refused_block(const Case&);
double keep_of(const Case&);                   // 1 - dropout
std::vector<Axis> axes_of_block(const Case&);  // over which it sums its replicated parameters

class Block : public Kernel {
 public:
  std::unique_ptr<Saved> forward(Rank&, std::span<const View> inputs,
                                 std::span<const View> outputs) override;
  void backward(Rank&, Saved&, std::span<const View> cotangents,
                std::span<const View> gradients) override;

 protected:
  // Parts in the order norm1.gamma, [norm1.beta], b2, norm2.gamma, [norm2.beta].
  virtual void sum_gradients(Parallel&, const Parts&, const std::vector<Axis>&);
  virtual std::vector<Axis> summed_over(const Case&) const;
  // Row-major number in the whole tensor of the first element of the own tokens.
  virtual uint64_t first_index(Parallel&, int64_t own_elements) const;
  virtual uint64_t seed_of(Rank&) const;  // of the masks: the line's

 private:
  void gradients_of(Parallel&, Saved&, const View& g, std::span<const View> gradients);
  void dropout(Parallel&, const View* a, const View& b, uint32_t site, const View& out) const;
  void add(Parallel&, const View& a, const View& b, const View& out) const;
  ColumnParallel up_;
  RowParallel down_;
};

}  // namespace shardproof::primitives
