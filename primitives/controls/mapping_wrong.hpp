// Wrong maps and wrong kernels that the broken twins of the mappings are made of.
#pragma once
#include <utility>
#include <vector>

#include "primitives/mapping_maps.hpp"
#include "primitives/work.hpp"

namespace shardproof::mapping {

using Make = std::function<std::unique_ptr<Kernel>()>;
inline Make twin(Map forward, Map backward, Precondition precondition = nullptr) {
  return [=] { return pair(forward, backward, precondition); };
}

inline View workspace_like(Rank& rank, const View& view) {
  return rank.workspace(view.dtype, view.shape);
}

inline void multiply(const View& view, double factor) {
  for (int64_t i = 0; i < view.elements(); ++i) {
    std::byte* element = view.flat(i);
    store(element, view.dtype, factor * load(element, view.dtype));
  }
}

inline Map after(Map first, Map second) {  // second(first(x)), by way of the result's own storage
  return [=](Rank& rank, const View& in, const View& out) {
    first(rank, in, out);
    const View between = workspace_like(rank, out);
    copy(out, between);
    second(rank, between, out);
  };
}

inline void all_reduce_mean(Rank& rank, const View& in, const View& out) {
  group(rank).all_reduce(in, out, Reduce::avg);
}

inline void all_reduce_max(Rank& rank, const View& in, const View& out) {
  group(rank).all_reduce(in, out, Reduce::max);
}

inline void over_p(Rank& rank, const View& in, const View& out) {
  copy(in, out);
  multiply(out, 1.0 / group(rank).size());
}

inline void zero(Rank&, const View&, const View& out) { primitives::set_zero(out); }

// A contiguous copy is reduced, then the argument itself is returned.
inline void all_reduce_on_temporary(Rank& rank, const View& in, const View& out) {
  if (in.contiguous()) return all_reduce(rank, in, out);
  const View temporary = workspace_like(rank, in);
  copy(in, temporary);
  all_reduce(rank, temporary, temporary);
  copy(in, out);
}

inline void all_reduce_in_place(Rank& rank, const View& in, const View& out) {
  if (!in.contiguous()) return all_reduce(rank, in, out);
  all_reduce(rank, in, in);
  copy(in, out);
}

inline void all_reduce_over_world(Rank& rank, const View& in, const View& out) {
  rank.world().all_reduce(in, out);
}

// Blocks arrive one below the other, [p * n0, n1 / p], and are read as if they stood side by side.
inline void all_gather_stacked(Rank& rank, const View& in, const View& out) {
  std::vector<int64_t> stacked = in.shape;
  stacked[0] *= group(rank).size();
  const View received = rank.workspace(in.dtype, stacked);
  group(rank).all_gather(in, received, 0);
  copy(view_of(received.data, in.dtype, out.shape, in.space), out);
}

// One-sided reads address peers by their rank in the group where the window is the world's.
inline void all_gather_of_first_world_ranks(Rank& rank, const View& in, const View& out) {
  std::vector<int64_t> all = in.shape;
  const int dim = dim_of(rank.line());
  all[size_t(dim)] *= rank.world_size();
  const View window = rank.workspace(in.dtype, all);
  rank.world().all_gather(in, window, dim);
  copy(window.narrow(dim, 0, out.shape[size_t(dim)]), out);
}

inline void all_gather_over_p(Rank& rank, const View& in, const View& out) {
  all_gather(rank, in, out);
  multiply(out, 1.0 / group(rank).size());
}

inline void reduce_scatter_by_all_reduce(Rank& rank, const View& in, const View& out) {
  const View sum = workspace_like(rank, in);
  all_reduce(rank, in, sum);
  own_block(rank, sum, out);
}

// Block i of the result is block i + 1 of the operand, cyclically (hop = 1), or i - 1 (hop = -1).
inline void turn_blocks(Rank& rank, const View& in, const View& out, int hop) {
  const int dim = dim_of(rank.line()), p = group(rank).size();
  const int64_t n = in.shape[size_t(dim)] / p;
  for (int i = 0; i < p; ++i)
    copy(in.narrow(dim, (i + hop + p) % p * n, n), out.narrow(dim, i * n, n));
}

inline void reduce_scatter_to_wrong_owner(Rank& rank, const View& in, const View& out) {
  const View turned = workspace_like(rank, in);
  turn_blocks(rank, in, turned, 1);
  reduce_scatter(rank, turned, out);
}

inline void all_gather_from_wrong_owner(Rank& rank, const View& in, const View& out) {
  const View gathered = workspace_like(rank, out);
  all_gather(rank, in, gathered);
  turn_blocks(rank, gathered, out, -1);
}

inline void next_block(Rank& rank, const View& in, const View& out) {
  const View turned = workspace_like(rank, in);
  turn_blocks(rank, in, turned, 1);
  own_block(rank, turned, out);
}

// What arrives is stored block after block along the dim that was cut, and read in the due shape.
inline void exchange_stacked(Rank& rank, const View& in, const View& out) {
  const int cut = 1 - dim_of(rank.line());
  const View received = rank.workspace(in.dtype, in.shape);
  group(rank).all_to_all(in, received, cut, cut);
  copy(view_of(received.data, in.dtype, out.shape, in.space), out);
}

inline void exchange_back_stacked(Rank& rank, const View& in, const View& out) {
  const int cut = dim_of(rank.line());
  const View received = rank.workspace(in.dtype, in.shape);
  group(rank).all_to_all(in, received, cut, cut);
  copy(view_of(received.data, in.dtype, out.shape, in.space), out);
}

inline void all_reduce_unscaled_alone(Rank& rank, const View& in, const View& out) {
  if (group(rank).size() == 1) return copy(in, out);
  scaled_all_reduce(rank, in, out);
}

inline void scale_before_and_after(Rank& rank, const View& in, const View& out) {
  scaled_all_reduce(rank, in, out);
  multiply(out, scale_of(rank.line()));
}

// ---- Kernels with a memory, or with tests of their own

// The accumulator of the reduction is allocated once and never cleared.
class AccumulatorKept final : public Kernel {
 public:
  AccumulatorKept(Map forward, Map backward, Precondition precondition)
      : healthy_(pair(std::move(forward), std::move(backward), std::move(precondition))) {}
  std::unique_ptr<Saved> forward(Rank& rank, std::span<const View> inputs,
                                 std::span<const View> outputs) override {
    auto saved = healthy_->forward(rank, inputs, outputs);
    const View& y = outputs[0];
    sum_.resize(size_t(y.elements()), 0.0);
    for (int64_t i = 0; i < y.elements(); ++i) {
      sum_[size_t(i)] += load(y.flat(i), y.dtype);
      store(y.flat(i), y.dtype, sum_[size_t(i)]);
    }
    return saved;
  }
  void backward(Rank& rank, Saved& saved, std::span<const View> cotangents,
                std::span<const View> gradients) override {
    healthy_->backward(rank, saved, cotangents, gradients);
  }

 private:
  std::unique_ptr<Kernel> healthy_;
  std::vector<double> sum_;
};
inline Make accumulator_kept(Map forward, Map backward, Precondition precondition = nullptr) {
  return [=] { return std::make_unique<AccumulatorKept>(forward, backward, precondition); };
}

// The factor that backward multiplies by lies in one slot of the module, which a backward empties:
// of two forwards in flight the second takes the slot of the first, and one backward finds nothing.
class OneSlotForSaved final : public Kernel {
 public:
  std::unique_ptr<Saved> forward(Rank& rank, std::span<const View> inputs,
                                 std::span<const View> outputs) override {
    scaled_all_reduce(rank, inputs[0], outputs[0]);
    slot_ = scale_of(rank.line());
    return std::make_unique<Saved>();
  }
  void backward(Rank&, Saved&, std::span<const View> cotangents,
                std::span<const View> gradients) override {
    copy(cotangents[0], gradients[0]);
    multiply(gradients[0], std::exchange(slot_, 0.0));
  }

 private:
  double slot_ = 0;
};

// Only rank 0 tests that p divides the extent; the others go on with floor(n / p).
class OnlyFirstRankTests final : public Kernel {
 public:
  std::unique_ptr<Saved> forward(Rank& rank, std::span<const View> inputs,
                                 std::span<const View> outputs) override {
    if (rank.world_rank() == 0) equal_blocks(rank.line());
    const int dim = dim_of(rank.line());
    const int64_t n = outputs[0].shape[size_t(dim)] * group(rank).size();
    reduce_scatter(rank, inputs[0].narrow(dim, 0, n), outputs[0]);
    return std::make_unique<Saved>();
  }
  void backward(Rank& rank, Saved&, std::span<const View> cotangents,
                std::span<const View> gradients) override {
    all_gather(rank, cotangents[0], gradients[0]);
  }
};

// Each rank tests the block that it got, not the line: those that hold floor(n / p) go on.
class LocalShapesTested final : public Kernel {
 public:
  std::unique_ptr<Saved> forward(Rank& rank, std::span<const View> inputs,
                                 std::span<const View> outputs) override {
    const int dim = dim_of(rank.line()), p = group(rank).size();
    const int64_t own = inputs[0].shape[size_t(dim)];
    if (own != outputs[0].shape[size_t(dim)] / p) equal_blocks(rank.line());
    all_gather(rank, inputs[0], outputs[0].narrow(dim, 0, own * p));
    return std::make_unique<Saved>();
  }
  void backward(Rank& rank, Saved&, std::span<const View> cotangents,
                std::span<const View> gradients) override {
    reduce_scatter(rank, cotangents[0], gradients[0]);
  }
};

}  // namespace shardproof::mapping
