// Products of the host: Eigen's blocked one on maps of f32 and f64 storage; everything else is
// widened into a panel.
#include <Eigen/Core>

#include "primitives/launch.hpp"

namespace shardproof::primitives::executor {
namespace {

template <class T>
using Matrix = Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
template <class T>
using Map = Eigen::Map<const Matrix<T>>;

template <class T>
constexpr Number number_of = sizeof(T) == 8 ? Number::f64 : Number::f32;

bool contiguous(const Tensor& t) { return t.dims == 0 || (t.dims == 1 && t.strides[0] == 1); }

// A matrix in T: the tensor's own memory where it is that already, else a widened copy.
template <class T>
class Panel {
 public:
  explicit Panel(const Gemm::Factor& f) : rows_(f.rows), columns_(f.columns) {
    if (f.tensor.number == number_of<T> && contiguous(f.tensor)) {
      data_ = static_cast<const T*>(f.tensor.data);
    } else {
      own_.resize(rows_, columns_);
      for (int64_t i = 0; i < rows_ * columns_; ++i) own_.data()[i] = f.tensor.load<T>(i);
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
void multiply(const Gemm& g) {
  const Panel<T> a(g.a), b(g.b);
  Matrix<T> product(g.a.m(), g.b.k());
  product.noalias() = a.map() * b.map();
  if (g.bias.there())
    product.rowwise() += Panel<T>({g.bias, 1, g.bias.elements, false}).map().row(0);
  for (int64_t i = 0; i < product.size(); ++i) {
    const T before = g.add ? g.c.load<T>(i) : T(0);
    g.c.store(i, T(before + product.data()[i]));
  }
}

}  // namespace

int launch(const Gemm& g, void*) {
  g.wide ? multiply<double>(g) : multiply<float>(g);
  return 0;
}

}  // namespace shardproof::primitives::executor
