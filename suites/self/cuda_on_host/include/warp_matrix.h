// Matrices of a warp (primitives/cuda/warp_matrix.cuh), put together from what its lanes show. Sums
// are cut off as a tensor core's are. An address that is no multiple of 16 stops the kernel, as it
// does on a device.
#pragma once
#include <cuda_runtime.h>

#include "primitives/element.hpp"
#include "suites/self/tensor_core_sum.hpp"

namespace shardproof::primitives::cuda {

constexpr bool has_warp_matrices = true;

template <bool turned>
void load_matrices(uint32_t (&r)[4], const void* row) {
  if (reinterpret_cast<uintptr_t>(row) % 16 != 0)
    cuda_on_host::stop("a row of a warp's matrix at an address that is no multiple of 16");
  cuda_on_host::join_warp(~0u);
  cuda_on_host::show(&row, sizeof row);
  cuda_on_host::join_warp(~0u);
  const int group = cuda_on_host::lane() / 4, place = cuda_on_host::lane() % 4;
  for (int m = 0; m < 4; ++m) {
    uint16_t pair[2];
    for (int e = 0; e < 2; ++e) {
      const int across = turned ? group : 2 * place + e, down = turned ? 2 * place + e : group;
      const uint16_t* at = nullptr;
      cuda_on_host::see(8 * m + down, &at, sizeof at);
      pair[e] = at[across];
    }
    r[m] = pair[0] | uint32_t(pair[1]) << 16;
  }
  cuda_on_host::join_warp(~0u);
}

template <Number half>
float half_of(uint32_t pair, int e) {
  const auto bits = uint16_t(pair >> 16 * e);
  return half == Number::bf16 ? widened_bf16(bits) : widened_f16(bits);
}

template <Number half>
void multiply_matrices(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const int group = cuda_on_host::lane() / 4, place = cuda_on_host::lane() % 4;
  uint32_t b[2] = {b0, b1}, factors[4][4];  // of the lanes of the group
  cuda_on_host::show(&a, sizeof a);
  cuda_on_host::join_warp(~0u);
  for (int t = 0; t < 4; ++t) cuda_on_host::see(4 * group + t, &factors[t], sizeof a);
  cuda_on_host::join_warp(~0u);
  cuda_on_host::show(&b, sizeof b);
  cuda_on_host::join_warp(~0u);
  for (int i = 0; i < 4; ++i) {
    const int below = i / 2, column = 2 * place + i % 2;
    double terms[16];
    for (int k = 0; k < 16; ++k) {
      uint32_t other[2];
      cuda_on_host::see(4 * column + k % 8 / 2, &other, sizeof other);
      const uint32_t factor = factors[k % 8 / 2][below + k / 8 * 2];
      terms[k] = double(half_of<half>(factor, k % 2)) * double(half_of<half>(other[k / 8], k % 2));
    }
    for (int k = 0; k < 16; k += tensor_core_terms)
      d[i] = tensor_core_step(d[i], tensor_core_terms, [&](int t) { return terms[k + t]; });
  }
  cuda_on_host::join_warp(~0u);
}

}  // namespace shardproof::primitives::cuda
