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

// The healthy body, run by a team whose sums have no barrier.
struct NormWithoutBarrier : NormForward {};

// That team where threads of a block come one after the other, each of them for a warp: a sum holds
// what those before it have left, and of those behind it what the row before left.
class OneAfterTheOther {
 public:
  static constexpr int warps = 8, most_sums = 4;
  template <class A>
  using Left = A[most_sums][warps];

  template <class A>
  class Warp {
   public:
    Warp(int number, Left<A>& left) : number_(number), left_(left) {}
    int64_t first() const { return number_; }
    int64_t step() const { return warps; }
    bool leads() const { return number_ == 0; }
    A sum(A own) const {
      A(&of_warp)[warps] = left_[sums_++];
      of_warp[number_] = own;
      A all = 0;
      for (A w : of_warp) all += w;
      return all;
    }

   private:
    int number_;
    Left<A>& left_;
    mutable int sums_ = 0;
  };
};

template <class A>
void rows_without_barrier(const NormForward& body) {
  OneAfterTheOther::Left<A> left = {};
  for (int64_t r = 0; r < body.rows(); ++r)
    for (int w = 0; w < OneAfterTheOther::warps; ++w)
      body.row<A>(r, OneAfterTheOther::Warp<A>(w, left));
}

}  // namespace shardproof::primitives

#define SHARDPROOF_TWIN_BODIES(each) each(CopyWithoutTail) each(CopyDense) each(CopyNarrowOffset)
