// Kernels that show what the host's blocks see and refuse: each as it should be, and broken. They
// return the code of their launch.
#pragma once
#include <cstdint>

namespace cuda_on_host::planted {

// to[i] = n - 1 - from[i] by way of shared memory, n = threads
int mirror(const float* from, float* to, unsigned threads, bool with_barrier);
// The sum over rounds of what the next thread puts into shared memory, which is taken again.
int rounds(float* sum, unsigned threads, bool both_barriers);
// to[lane] = lane ^ 1 by way of shared memory, in one warp
int by_warp(int* to, bool with_barrier);
// The first `readers` threads read a place; behind a barrier, where there is one, `writer` changes
// it
int read_and_changed(float* to, unsigned readers, unsigned writer, bool with_barrier);
int last_block_wins(int* to, unsigned blocks);
int read_at(const char* f32, float* to);
int divergent_barrier(unsigned threads, unsigned left_out);
int early_end(unsigned threads, unsigned left_out);  // a barrier that an ended thread misses
int read_before_write(double* f64, float* f32, uint16_t* half, int64_t* integer);
// What lane l has of lane values 100 + l: sync from 5, down by 3, up by 3, xor 9, in groups of 16
int shuffles(int* to, int width);
int shuffle_outside_of_mask();
int shuffle_without_all_lanes();
int count(unsigned blocks, unsigned threads, unsigned long long* sum, bool atomic);
// A warp's matrices (primitives/cuda/warp_matrix.cuh): lane l's row lies at rows + l apart, and its
// four registers go to to[4 l]; those of a product are a[4 l], b[2 l] and d[4 l].
int load_matrices(const uint16_t* rows, unsigned apart, uint32_t* to, bool turned);
int multiply_matrices(const uint32_t* a, const uint32_t* b, float* d, bool bf16);
int grid_of(unsigned x, unsigned y, unsigned z, unsigned threads, unsigned z_threads,
            unsigned shared);
int count_cycles_by_the_clock(int64_t cycles);  // whoever's turn it is
float widened(uint16_t half, bool bf16);
uint16_t rounded(float value, bool bf16);
int last_code();  // and sets it back

}  // namespace cuda_on_host::planted
