// CUB's sum over a block, as warps make it: each adds up its lanes in pairs of pairs, and the first
// thread adds what the warps have, in their order. Its room may be taken again behind a barrier.
#pragma once
#include <cuda_runtime.h>

namespace cub {

template <class T, int threads>
class BlockReduce {
  static constexpr int warps = (threads + cuda_on_host::warp - 1) / cuda_on_host::warp;

 public:
  struct TempStorage {
    T of_warp[warps];
  };
  explicit BlockReduce(TempStorage& room) : room_(room) {}

  // The first thread has the sum; what the others have is nothing.
  template <class Join>
  T Reduce(T own, Join join) const {
    if (blockDim.x != threads || blockDim.y != 1 || blockDim.z != 1)
      cuda_on_host::stop("a BlockReduce for another number of threads than the block has");
    cuda_on_host::show(&own, sizeof own);
    cuda_on_host::join_warp(cuda_on_host::lanes_there());
    if (cuda_on_host::lane() == 0)
      room_.of_warp[threadIdx.x / cuda_on_host::warp] = over_warp(own, join);
    __syncthreads();
    if (threadIdx.x > 0) return nothing();
    T whole = room_.of_warp[0];
    for (int w = 1; w < warps; ++w) whole = join(whole, room_.of_warp[w]);
    return whole;
  }
  T Sum(T own) const {
    return Reduce(own, [](T a, T b) { return T(a + b); });
  }

 private:
  // Lane l takes lane l + hop, for hops of 1, 2, 4 and so on; what is left in the first is the sum.
  template <class Join>
  static T over_warp(T own, Join join) {
    T of_lane[cuda_on_host::warp] = {own};
    const int lanes = __builtin_popcount(cuda_on_host::lanes_there());
    for (int l = 1; l < lanes; ++l) cuda_on_host::see(l, of_lane + l, sizeof(T));
    for (int hop = 1; hop < lanes; hop *= 2)
      for (int l = 0; l + hop < lanes; l += 2 * hop)
        of_lane[l] = join(of_lane[l], of_lane[l + hop]);
    return of_lane[0];
  }
  static T nothing() {
    T value;
    std::memset(&value, 0xFF, sizeof value);
    return value;
  }
  TempStorage& room_;
};

}  // namespace cub
