// Eigen's blocked product on maps of f32 and f64 storage; everything else is widened into a panel.
#include "primitives/gemm.hpp"

#include <Eigen/Core>
#include <stdexcept>
#include <string>

namespace shardproof::primitives {
namespace {

template <class T>
using Matrix = Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
template <class T>
using Map = Eigen::Map<const Matrix<T>>;

int64_t columns_of(const View& v) { return v.shape.empty() ? 1 : v.shape.back(); }
int64_t rows_of(const View& v) { return columns_of(v) == 0 ? 0 : v.elements() / columns_of(v); }

// A matrix in T: the view's own memory where it is that already, else a widened copy.
template <class T>
class Panel {
 public:
  explicit Panel(const Factor& f) : rows_(rows_of(f.view)), columns_(columns_of(f.view)) {
    const View& v = f.view;
    if (v.dtype == dtype_of<T>::value && v.contiguous()) {
      data_ = v.as<T>();
    } else {
      own_.resize(rows_, columns_);
      for (int64_t i = 0; i < rows_ * columns_; ++i) own_.data()[i] = T(load(v.flat(i), v.dtype));
      data_ = own_.data();
    }
    if (f.turned) turn();
  }
  Map<T> map() const { return Map<T>(data_, rows_, columns_); }

 private:
  void turn() {
    Matrix<T> turned = map().transpose();
    own_ = std::move(turned);
    data_ = own_.data();
    std::swap(rows_, columns_);
  }
  int64_t rows_, columns_;
  const T* data_ = nullptr;
  Matrix<T> own_;
};

template <class T>
void write(const Matrix<T>& m, const View& c, bool add) {
  for (int64_t i = 0; i < m.size(); ++i) {
    std::byte* element = c.flat(i);
    const T before = add ? T(load(element, c.dtype)) : T(0);
    store(element, c.dtype, double(before + m.data()[i]));
  }
}

std::string text(Eigen::Index rows, Eigen::Index columns) {
  return std::to_string(rows) + " x " + std::to_string(columns);
}

template <class T>
void multiply(const Factor& fa, const Factor& fb, const View& c, const View* bias, bool add) {
  const Panel<T> pa(fa), pb(fb);
  const Map<T> a = pa.map(), b = pb.map();
  if (a.cols() != b.rows() || rows_of(c) != a.rows() || columns_of(c) != b.cols())
    throw std::invalid_argument("gemm: expected C[m,n] = A[m,k] B[k,n], met C[" +
                                text(rows_of(c), columns_of(c)) + "], A[" +
                                text(a.rows(), a.cols()) + "], B[" + text(b.rows(), b.cols()) +
                                "]; check which factor is to be transposed");
  Matrix<T> product(a.rows(), b.cols());
  product.noalias() = a * b;
  if (bias && bias->data) product.rowwise() += Panel<T>(plain(*bias)).map().row(0);
  write(product, c, add);
}

}  // namespace

void gemm(const Factor& a, const Factor& b, const View& c, DType accumulate, const View* bias,
          bool add) {
  accumulate == DType::f64 ? multiply<double>(a, b, c, bias, add)
                           : multiply<float>(a, b, c, bias, add);
}

void column_sums(const View& g, const View& sums, DType accumulate) {
  auto run = [&](auto zero) {
    using T = decltype(zero);
    const Matrix<T> total = Panel<T>(plain(g)).map().colwise().sum();
    write(total, sums, false);
  };
  accumulate == DType::f64 ? run(double()) : run(float());
}

void add_row(const View& x, const View& b, const View& y, DType accumulate) {
  auto run = [&](auto zero) {
    using T = decltype(zero);
    Matrix<T> sum = Panel<T>(plain(x)).map();
    if (b.data) sum.rowwise() += Panel<T>(plain(b)).map().row(0);
    write(sum, y, false);
  };
  accumulate == DType::f64 ? run(double()) : run(float());
}

}  // namespace shardproof::primitives
