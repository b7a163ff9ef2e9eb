// The one product that a device's library is asked for: C = op(A) op(B) + beta C on row-major
// matrices, op by a flag, all numbers of A and B of one type. Accumulated in f64 for f64, else in
// f32; C of the type of A and B, or f32.
#pragma once
#include <string>

#include "primitives/element.hpp"

namespace shardproof::primitives::cuda {

struct BareGemm {
  struct Matrix {
    void* data = nullptr;
    int64_t ld = 1;  // elements between rows
    bool turned = false;
  };
  Matrix a, b, c;
  Number in = Number::f64, out = Number::f64;
  int64_t m = 0, n = 0, k = 0;
  bool add = false;   // beta = 1
  bool tf32 = false;  // factors of f32 may be rounded to TF32
};
// Returns the runtime's code; one that only the library has, behind those.
int bare_gemm(const BareGemm&, void* stream);
inline constexpr int blas_codes = 10'000;
const char* text_of(int code);  // of both
// The same of contiguous matrices: c [m, n] = op(a) op(b).
inline int contiguous_gemm(Number number, int64_t m, int64_t n, int64_t k, const void* a,
                           bool a_turned, const void* b, bool b_turned, void* c, void* stream) {
  BareGemm g;
  g.a = {const_cast<void*>(a), a_turned ? m : k, a_turned};
  g.b = {const_cast<void*>(b), b_turned ? k : n, b_turned};
  g.c = {c, n, false};
  g.in = g.out = number;
  g.m = m, g.n = n, g.k = k;
  return bare_gemm(g, stream);
}
// What a handle of the library says of itself, as lines "cuBLAS.NAME=VALUE"; without a device why
// there is none.
std::string blas_settings();

}  // namespace shardproof::primitives::cuda
