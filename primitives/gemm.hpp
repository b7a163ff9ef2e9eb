// Matrix products of tensors of any floating dtype. A view is read as the matrix of its last dim
// and all leading dims together; it may be strided. Half types are widened, every product and sum
// is made in `accumulate` (f32 or f64), and a result is rounded to its dtype once.
#pragma once
#include "fixtures/tensor.hpp"

namespace shardproof::primitives {

struct Factor {
  const View& view;
  bool turned = false;
};
inline Factor plain(const View& v) { return {v, false}; }
inline Factor turned(const View& v) { return {v, true}; }  // its transpose

// c = a b + bias (a row, or null), or c += where `add`.
void gemm(const Factor& a, const Factor& b, const View& c, DType accumulate,
          const View* bias = nullptr, bool add = false);

// sums[j] = sum of g[t,j] over all leading dims.
void column_sums(const View& g, const View& sums, DType accumulate);

// y = x + b for every row; x and y may differ in dtype. Without b (data null) a conversion.
void add_row(const View& x, const View& b, const View& y, DType accumulate);

}  // namespace shardproof::primitives
