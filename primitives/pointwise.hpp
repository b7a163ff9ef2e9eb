// Bodies that compute one element of a result from elements of operands.
#pragma once
#include "primitives/element.hpp"
#include "primitives/philox.hpp"

namespace shardproof::primitives {

// to[i] = from[i] by row-major number: shapes may differ. Bits where the types agree, else rounded
// once.
struct Convert {
  static constexpr Shape shape = Shape::elements;
  Tensor from, to;
  template <class F>
  void each_tensor(F f) {
    f(from), f(to);
  }
  SHARDPROOF_HD int64_t count() const { return to.elements; }
  SHARDPROOF_HD void at(int64_t i) const {
    if (from.number == to.number)
      to.copy_from(i, from, i);
    else
      to.store(i, from.load(i));
  }
};

struct Fill {
  static constexpr Shape shape = Shape::elements;
  Tensor to;
  double value = 0;
  template <class F>
  void each_tensor(F f) {
    f(to);
  }
  SHARDPROOF_HD int64_t count() const { return to.elements; }
  SHARDPROOF_HD void at(int64_t i) const { to.store(i, value); }
};

// to = factor from / divisor, in double, rounded once.
struct Scale {
  static constexpr Shape shape = Shape::elements;
  Tensor from, to;
  double factor = 1, divisor = 1;
  template <class F>
  void each_tensor(F f) {
    f(from), f(to);
  }
  SHARDPROOF_HD int64_t count() const { return to.elements; }
  SHARDPROOF_HD void at(int64_t i) const { to.store(i, factor * from.load(i) / divisor); }
};

// to = a + factor b, in double, rounded once.
struct Combine {
  static constexpr Shape shape = Shape::elements;
  Tensor a, b, to;
  double factor = 1;
  template <class F>
  void each_tensor(F f) {
    f(a), f(b), f(to);
  }
  SHARDPROOF_HD int64_t count() const { return to.elements; }
  SHARDPROOF_HD void at(int64_t i) const { to.store(i, a.load(i) + factor * b.load(i)); }
};

// y = x + b for every row, b of a row's length; without b a conversion.
struct AddRow {
  static constexpr Shape shape = Shape::elements;
  Tensor x, b, y;
  int64_t columns = 1;
  bool wide = false;
  template <class F>
  void each_tensor(F f) {
    f(x), f(b), f(y);
  }
  SHARDPROOF_HD int64_t count() const { return y.elements; }
  template <class A>
  SHARDPROOF_HD void in(int64_t i) const {
    const A x_i = x.load<A>(i);
    y.store(i, b.there() ? A(x_i + b.load<A>(i % columns)) : x_i);
  }
  SHARDPROOF_HD void at(int64_t i) const { wide ? in<double>(i) : in<float>(i); }
};

// out = a + b o mask, without a the product alone; the mask is 1/keep with probability keep, else
// 0, drawn by the global index of the element.
struct Dropout {
  static constexpr Shape shape = Shape::elements;
  Tensor a, b, out;
  double keep = 1;
  uint64_t seed = 0, first = 0;  // global index of element 0
  uint32_t site = 0, draw = 0;
  bool wide = false;
  template <class F>
  void each_tensor(F f) {
    f(a), f(b), f(out);
  }
  SHARDPROOF_HD int64_t count() const { return out.elements; }
  SHARDPROOF_HD double mask(int64_t i) const {
    if (keep == 1) return 1;
    return word_of(seed, first + uint64_t(i), site, draw) < keep * 0x1p32 ? 1 / keep : 0;
  }
  template <class A>
  SHARDPROOF_HD void in(int64_t i) const {
    const A product = b.load<A>(i) * A(mask(i));
    out.store(i, a.there() ? A(a.load<A>(i) + product) : product);
  }
  SHARDPROOF_HD void at(int64_t i) const { wide ? in<double>(i) : in<float>(i); }
};

// Small values by (seed, parameter, index): equal on all ranks.
struct InitialValues {
  static constexpr Shape shape = Shape::elements;
  Tensor to;
  uint64_t seed = 0;
  uint32_t parameter = 0;
  template <class F>
  void each_tensor(F f) {
    f(to);
  }
  SHARDPROOF_HD int64_t count() const { return to.elements; }
  SHARDPROOF_HD void at(int64_t i) const {
    to.store(i, word_of(seed, uint64_t(i), parameter, 0) * 0x1p-33 - 0.25);
  }
};

// sums[j] = sum over rows of g[t,j].
struct ColumnSums {
  static constexpr Shape shape = Shape::columns;
  Tensor g, sums;
  bool wide = false;
  template <class F>
  void each_tensor(F f) {
    f(g), f(sums);
  }
  SHARDPROOF_HD int64_t columns() const { return sums.elements; }
  SHARDPROOF_HD int64_t rows() const { return columns() ? g.elements / columns() : 0; }
  template <class A>
  SHARDPROOF_HD A term(int64_t row, int64_t column) const {
    return g.load<A>(row * columns() + column);
  }
  template <class A>
  SHARDPROOF_HD void put(int64_t column, A sum) const {
    sums.store(column, sum);
  }
};

}  // namespace shardproof::primitives
