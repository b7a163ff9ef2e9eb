#include "primitives/gemm.hpp"

#include <stdexcept>
#include <string>

#include "primitives/pointwise.hpp"
#include "primitives/work.hpp"

namespace shardproof::primitives {
namespace {

int64_t columns_of(const View& v) { return v.shape.empty() ? 1 : v.shape.back(); }
int64_t rows_of(const View& v) { return columns_of(v) == 0 ? 0 : v.elements() / columns_of(v); }

Gemm::Factor factor(const Factor& f) {
  return {tensor(f.view), rows_of(f.view), columns_of(f.view), f.turned};
}

std::string text(int64_t rows, int64_t columns) {
  return std::to_string(rows) + " x " + std::to_string(columns);
}

}  // namespace

void gemm(const Factor& a, const Factor& b, const View& c, DType accumulate, const View* bias,
          bool add) {
  Gemm product{factor(a),   factor(b),
               tensor(c),   bias ? tensor(*bias) : Tensor{},
               add,         accumulate == DType::f64,
               InTf32::on()};
  const int64_t m = product.a.m(), k = product.a.k(), n = product.b.k();
  if (k != product.b.m() || rows_of(c) != m || columns_of(c) != n)
    throw std::invalid_argument("gemm: expected C[m,n] = A[m,k] B[k,n], met C[" +
                                text(rows_of(c), columns_of(c)) + "], A[" + text(m, k) + "], B[" +
                                text(product.b.m(), n) +
                                "]; check which factor is to be transposed");
  check(executor::launch(product, OnStream::current()), "a matrix product");
}

void column_sums(const View& g, const View& sums, DType accumulate) {
  perform(ColumnSums{tensor(g), tensor(sums), accumulate == DType::f64}, "column sums");
}

void add_row(const View& x, const View& b, const View& y, DType accumulate) {
  perform(AddRow{tensor(x), tensor(b), tensor(y), columns_of(x), accumulate == DType::f64},
          "a sum of rows");
}

}  // namespace shardproof::primitives
