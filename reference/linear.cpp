// Three matrix products and one column sum.
#include "reference/linear.hpp"

#include <Eigen/Core>
#include <cmath>
#include <stdexcept>
#include <string>

namespace shardproof::reference {
namespace {

using Matrix = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using Read = Eigen::Map<const Matrix>;
using Write = Eigen::Map<Matrix>;

Read matrix(In values, int64_t rows, int64_t columns, const char* name) {
  if (int64_t(values.size()) != rows * columns)
    throw std::invalid_argument(std::string("reference linear: expected ") + name + " of " +
                                std::to_string(rows) + " x " + std::to_string(columns) +
                                " elements, met " + std::to_string(values.size()));
  return Read(values.data(), rows, columns);
}

}  // namespace

Values linear(const LinearShape& s, In x, In w, In b) {
  Values y(size_t(s.tokens * s.out));
  Write Y(y.data(), s.tokens, s.out);
  Y.noalias() = matrix(x, s.tokens, s.in, "x") * matrix(w, s.out, s.in, "w").transpose();
  if (!b.empty()) Y.rowwise() += matrix(b, 1, s.out, "b").row(0);
  return y;
}

LinearGradients linear_backward(const LinearShape& s, In x, In w, In g) {
  const Read X = matrix(x, s.tokens, s.in, "x"), W = matrix(w, s.out, s.in, "w"),
             G = matrix(g, s.tokens, s.out, "the cotangent of y");
  LinearGradients d{Values(x.size()), Values(w.size()), Values(size_t(s.out))};
  Write(d.x.data(), s.tokens, s.in).noalias() = G * W;
  Write(d.w.data(), s.out, s.in).noalias() = G.transpose() * X;
  Write(d.b.data(), 1, s.out) = G.colwise().sum();
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
