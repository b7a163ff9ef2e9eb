// Bodies of the broken kernels (twins.hpp has their table): the healthy body, less what is broken.
#pragma once
#include "primitives/norm_rows.hpp"
#include "primitives/pointwise.hpp"

namespace shardproof::primitives {

struct CopyWithoutTail : Convert {
  SHARDPROOF_HD int64_t count() const { return to.elements / 32 * 32; }
};

struct CopyDense : Convert {
  SHARDPROOF_HD void at(int64_t i) const {
    Tensor dense = from;
    dense.dims = 1, dense.shape[0] = from.elements, dense.strides[0] = 1;
    to.copy_from(i, dense, i);
  }
};

struct CopyNarrowOffset : Convert {
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
