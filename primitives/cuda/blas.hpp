// The one product that a device's library is asked for: C = op(A) op(B) + beta C on row-major
// matrices, op by a flag, all numbers of A and B of one type. Accumulated in f64 for f64, else in
// f32; C of the type of A and B, or f32.
#pragma once
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
  bool add = false;  // beta = 1
};
int bare_gemm(const BareGemm&, void* stream);

}  // namespace shardproof::primitives::cuda
