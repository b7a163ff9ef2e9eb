// What a warp does with matrices of halves. Lane l of 32: group g = l / 4, place t = l % 4.
//
//   load      four matrices of 8 rows of 8 halves (16 bytes each), row r of matrix m at the address
//             that lane 8 m + r gives; r[m] holds elements (g, 2t) and (g, 2t+1) of matrix m,
//             turned: (2t, g) and (2t+1, g)
//   multiply  d [16, 8] += a [16, 16] b [16, 8], products exact, sums in f32:
//             a[0..3]  (g, 2t..), (g+8, 2t..), (g, 2t+8..), (g+8, 2t+8..)
//             b[0..1]  (2t.., g), (2t+8.., g)
//             d[0..3]  (g, 2t), (g, 2t+1), (g+8, 2t), (g+8, 2t+1)
//
// PTX ISA: ldmatrix, and mma.m16n8k16, from compute capability 8.0 on. All lanes execute each,
// which only volatile says to the compiler: without it a product may be moved to where its sum is
// used, behind a branch that not all lanes take.
#pragma once
#include "primitives/element.hpp"

#ifdef __NVCC__

namespace shardproof::primitives::cuda {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
constexpr bool has_warp_matrices = true;
#else
constexpr bool has_warp_matrices = false;
#endif

template <bool turned>
__device__ inline void load_matrices(uint32_t (&r)[4], const void* row) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  const auto at = unsigned(__cvta_generic_to_shared(row));
  if constexpr (turned)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
#endif
}

template <Number half>
__device__ inline void multiply_matrices(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                         uint32_t b1) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  if constexpr (half == Number::bf16)
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

}  // namespace shardproof::primitives::cuda

#else
#include <warp_matrix.h>  // of whoever reads kernels without nvcc
#endif
