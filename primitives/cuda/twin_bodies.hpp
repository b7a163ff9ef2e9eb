// Bodies of the broken kernels (twins.hpp has their table).
#pragma once
#include "primitives/norm_rows.hpp"

namespace shardproof::primitives {

struct CopyWithoutTail {
  static constexpr Shape shape = Shape::elements;
  Tensor from, to;
  template <class F>
  void each_tensor(F f) {
    f(from), f(to);
  }
  SHARDPROOF_HD int64_t count() const { return to.elements / 32 * 32; }
  SHARDPROOF_HD void at(int64_t i) const { to.copy_from(i, from, i); }
};

struct CopyDense {
  static constexpr Shape shape = Shape::elements;
  Tensor from, to;
  template <class F>
  void each_tensor(F f) {
    f(from), f(to);
  }
  SHARDPROOF_HD int64_t count() const { return to.elements; }
  SHARDPROOF_HD void at(int64_t i) const {
    Tensor dense = from;
    dense.dims = 1, dense.shape[0] = from.elements, dense.strides[0] = 1;
    to.copy_from(i, dense, i);
  }
};

struct CopyNarrowOffset {
  static constexpr Shape shape = Shape::elements;
  Tensor from, to;
  template <class F>
  void each_tensor(F f) {
    f(from), f(to);
  }
  SHARDPROOF_HD int64_t count() const { return to.elements; }
  SHARDPROOF_HD void at(int64_t i) const {
    const uint32_t offset = uint32_t(to.place(i) * bytes_of(to.number));
    Tensor element = to;
    element.data = static_cast<char*>(to.data) + offset;
    element.dims = 0;
    element.copy_from(0, from, i);
  }
};

// The healthy body; a device runs it with a team whose sums have no barrier.
struct NormWithoutBarrier : NormForward {};

}  // namespace shardproof::primitives

#define SHARDPROOF_TWIN_BODIES(each) each(CopyWithoutTail) each(CopyDense) each(CopyNarrowOffset)
