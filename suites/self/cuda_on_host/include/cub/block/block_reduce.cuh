// CUB's sum over a block, as warps make it: each adds up its lanes by halves, and the first thread
// adds what the warps have, in their order. Its room may be taken again behind a barrier.
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
    const int warp = int(threadIdx.x) / cuda_on_host::warp, lane = cuda_on_host::lane();
    const int there = threads - warp * cuda_on_host::warp;  // of this warp, at most 32
    for (int hop = 1; hop < cuda_on_host::warp; hop *= 2) {
      const T other = __shfl_down_sync(cuda_on_host::lanes_there(), own,
                                       lane + hop < there ? unsigned(hop) : 0u);
      if (lane + hop < there && lane + hop < cuda_on_host::warp) own = join(own, other);
    }
    if (lane == 0) room_.of_warp[warp] = own;
    __syncthreads();
    if (threadIdx.x > 0) return nothing();
    for (int w = 1; w < warps; ++w) own = join(own, room_.of_warp[w]);
    return own;
  }
  T Sum(T own) const {
    return Reduce(own, [](T a, T b) { return T(a + b); });
  }

 private:
  static T nothing() {
    T value;
    std::memset(&value, 0xFF, sizeof value);
    return value;
  }
  TempStorage& room_;
};

}  // namespace cub
