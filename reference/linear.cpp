// Three matrix products and one column sum, a block of tokens after the other: what one of them
// reads is still in a cache for the next.
#include "reference/linear.hpp"

#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

namespace shardproof::reference {
namespace {

using Matrix = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using Read = Eigen::Map<const Matrix>;
using Write = Eigen::Map<Matrix>;

constexpr int64_t block = 512;  // tokens

Read matrix(In values, int64_t rows, int64_t columns, const char* name) {
  if (int64_t(values.size()) != rows * columns)
    throw std::invalid_argument(std::string("reference linear: expected ") + name + " of " +
                                std::to_string(rows) + " x " + std::to_string(columns) +
                                " elements, met " + std::to_string(values.size()));
  return Read(values.data(), rows, columns);
}

}  // namespace

Values linear(const LinearShape& s, In x, In w, In b) {
  const Read X = matrix(x, s.tokens, s.in, "x"), W = matrix(w, s.out, s.in, "w");
  if (!b.empty()) matrix(b, 1, s.out, "b");
  Values y;
  y.reserve(size_t(s.tokens * s.out));
  for (int64_t t = 0; t < s.tokens; t += block) {
    const int64_t rows = std::min(block, s.tokens - t);
    y.resize(size_t((t + rows) * s.out));
    Write Y(y.data() + t * s.out, rows, s.out);
    Y.noalias() = X.middleRows(t, rows) * W.transpose();
    if (!b.empty()) Y.rowwise() += matrix(b, 1, s.out, "b").row(0);
  }
  return y;
}

LinearGradients linear_backward(const LinearShape& s, In x, In w, In g) {
  const Read X = matrix(x, s.tokens, s.in, "x"), W = matrix(w, s.out, s.in, "w"),
             G = matrix(g, s.tokens, s.out, "the cotangent of y");
  LinearGradients d{{}, Values(w.size()), Values(size_t(s.out))};
  Write D_w(d.w.data(), s.out, s.in), D_b(d.b.data(), 1, s.out);
  d.x.reserve(x.size());
  for (int64_t t = 0; t < s.tokens; t += block) {
    const int64_t rows = std::min(block, s.tokens - t);
    const auto G_t = G.middleRows(t, rows);
    d.x.resize(size_t((t + rows) * s.in));
    Write(d.x.data() + t * s.in, rows, s.in).noalias() = G_t * W;
    D_w.noalias() += G_t.transpose() * X.middleRows(t, rows);
    for (int64_t r = 0; r < rows; ++r) D_b.row(0) += G_t.row(r);
  }
  return d;
}

Values absolute(In values) {
  Values a(values.begin(), values.end());
  for (double& v : a) v = std::abs(v);
  return a;
}

Values squared(In values) {
  Values a(values.begin(), values.end());
  for (double& v : a) v *= v;
  return a;
}

}  // namespace shardproof::reference
