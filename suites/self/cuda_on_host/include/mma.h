// Warp matrices of 16 x 16 x 16 with half factors and sums in float. Which lane holds which element
// of a fragment is left open by CUDA and chosen here as nobody would guess it. A sum is made in
// float in the order of k; a device's units may make it in another order and another precision.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace nvcuda::wmma {

struct matrix_a;
struct matrix_b;
struct accumulator;
struct row_major;
struct col_major;
enum layout_t { mem_row_major, mem_col_major };

namespace detail {

inline constexpr int side = 16, elements = side * side, of_lane = elements / cuda_on_host::warp;
// The element's place in row-major order: a permutation, since 77 is odd.
inline int place(int lane, int i) { return (77 * (lane * of_lane + i) + 31) % elements; }

inline void whole_warp() { cuda_on_host::join_warp(cuda_on_host::lanes_there()); }
inline void want_whole_warp() {
  if (cuda_on_host::lanes_there() != ~0u) cuda_on_host::stop("a warp matrix in a part of a warp");
}
// A pointer of 32 bytes' alignment and rows of a multiple of 16 bytes.
template <class T>
void want_placed(const T* memory, unsigned apart) {
  if (reinterpret_cast<uintptr_t>(memory) % 32 != 0 || apart * sizeof(T) % 16 != 0)
    cuda_on_host::stop("a warp matrix whose memory is not aligned as it must be");
}
template <class T>
size_t offset(int place, unsigned apart, bool by_rows, const T*) {
  const auto row = unsigned(place / side), column = unsigned(place % side);
  return by_rows ? size_t(row) * apart + column : size_t(column) * apart + row;
}

// The whole of a fragment, put together from what all lanes show.
template <class Fragment>
void gather(const Fragment& own, float (&whole)[elements]) {
  const Fragment* at = &own;
  cuda_on_host::show(&at, sizeof at);
  whole_warp();
  for (int lane = 0; lane < cuda_on_host::warp; ++lane) {
    cuda_on_host::see(lane, &at, sizeof at);
    for (int i = 0; i < of_lane; ++i) whole[place(lane, i)] = float(at->x[i]);
  }
  whole_warp();
}

}  // namespace detail

template <class Use, int m, int n, int k, class T, class Layout = void>
struct fragment {
  static_assert(m == 16 && n == 16 && k == 16);
  static constexpr int num_elements = detail::of_lane;
  using element_type = T;
  T x[num_elements];
};

template <class Use, class T, class Layout>
void fill_fragment(fragment<Use, 16, 16, 16, T, Layout>& f, const T& value) {
  for (T& x : f.x) x = value;
}

template <class Use, class T, class Layout>
void load_matrix_sync(fragment<Use, 16, 16, 16, T, Layout>& f, const T* from, unsigned apart) {
  detail::want_whole_warp(), detail::want_placed(from, apart);
  detail::whole_warp();
  for (int i = 0; i < f.num_elements; ++i)
    f.x[i] = from[detail::offset(detail::place(cuda_on_host::lane(), i), apart,
                                 std::is_same_v<Layout, row_major>, from)];
  detail::whole_warp();
}
template <class T>
void load_matrix_sync(fragment<accumulator, 16, 16, 16, T>& f, const T* from, unsigned apart,
                      layout_t layout) {
  detail::want_whole_warp(), detail::want_placed(from, apart);
  detail::whole_warp();
  for (int i = 0; i < f.num_elements; ++i)
    f.x[i] = from[detail::offset(detail::place(cuda_on_host::lane(), i), apart,
                                 layout == mem_row_major, from)];
  detail::whole_warp();
}
template <class T>
void store_matrix_sync(T* to, const fragment<accumulator, 16, 16, 16, T>& f, unsigned apart,
                       layout_t layout) {
  detail::want_whole_warp(), detail::want_placed(to, apart);
  detail::whole_warp();
  for (int i = 0; i < f.num_elements; ++i)
    to[detail::offset(detail::place(cuda_on_host::lane(), i), apart, layout == mem_row_major, to)] =
        f.x[i];
  detail::whole_warp();
}

template <class T, class LayoutA, class LayoutB>
void mma_sync(fragment<accumulator, 16, 16, 16, float>& d,
              const fragment<matrix_a, 16, 16, 16, T, LayoutA>& a,
              const fragment<matrix_b, 16, 16, 16, T, LayoutB>& b,
              const fragment<accumulator, 16, 16, 16, float>& c) {
  detail::want_whole_warp();
  float whole_a[detail::elements], whole_b[detail::elements];
  detail::gather(a, whole_a);
  detail::gather(b, whole_b);
  for (int i = 0; i < d.num_elements; ++i) {
    const int at = detail::place(cuda_on_host::lane(), i), row = at / 16, column = at % 16;
    float sum = c.x[i];
    for (int l = 0; l < 16; ++l) sum += whole_a[row * 16 + l] * whole_b[l * 16 + column];
    d.x[i] = sum;
  }
}

}  // namespace nvcuda::wmma
