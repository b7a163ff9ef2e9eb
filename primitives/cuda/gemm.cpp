// A product of tensors as one of the library's: what it cannot take as it lies (strides, types,
// accumulation in f64 of narrower numbers) is packed or widened first; what it cannot write as it
// is asked for goes to scratch in the accumulation type and is rounded once from there.
#include "primitives/cuda/blas.hpp"
#include "primitives/launch.hpp"
#include "primitives/pointwise.hpp"

namespace shardproof::primitives::executor {
namespace {

using cuda::BareGemm;

// Memory until the end of the scope, in order of the stream.
class Scratch {
 public:
  explicit Scratch(void* stream) : stream_(stream) {}
  ~Scratch() {
    if (memory_) release(memory_, stream_);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  int reserve(Number n, int64_t rows, int64_t columns, Tensor& t) {
    t = Tensor{nullptr, n, 1, {rows * columns}, {1}, rows * columns};
    const int code = allocate(&memory_, size_t(rows * columns * bytes_of(n)), stream_);
    t.data = memory_;
    return code;
  }

 private:
  void* memory_ = nullptr;
  void* stream_;
};

// Element (r, c) lies at r row + c column.
struct Steps {
  int64_t row = 0, column = 0;
  bool any = false;
};
Steps steps_of(const Tensor& t, int64_t rows, int64_t columns) {
  if (t.dims == 0) return {columns, 1, true};
  if (t.dims == 1 && columns == 1) return {t.strides[0], 1, true};
  if (t.dims == 1 && rows == 1) return {columns * t.strides[0], t.strides[0], true};
  if (t.dims == 1) return {columns * t.strides[0], t.strides[0], true};
  if (t.dims == 2 && t.shape[1] == columns) return {t.strides[0], t.strides[1], true};
  return {};
}

// As it lies, row by row or column by column; false: it has to be packed.
bool as_it_lies(const Tensor& t, int64_t rows, int64_t columns, BareGemm::Matrix& m) {
  const Steps s = steps_of(t, rows, columns);
  if (!s.any) return false;
  m.data = t.data;
  if (s.column == 1 && s.row >= columns) {
    m.ld = s.row;
    return true;
  }
  if (s.row != 1 || s.column < rows) return false;
  m.ld = s.column;
  m.turned = !m.turned;
  return true;
}

int factor(const Gemm::Factor& f, Number in, Scratch& scratch, BareGemm::Matrix& m, void* stream) {
  m.turned = f.turned;
  if (f.tensor.number == in && as_it_lies(f.tensor, f.rows, f.columns, m)) return 0;
  Tensor packed;
  if (int code = scratch.reserve(in, f.rows, f.columns, packed)) return code;
  m = {packed.data, f.columns, f.turned};
  return launch(Convert{f.tensor, packed}, stream);
}

Number input_type(const Gemm& g) {
  if (g.wide) return Number::f64;
  const Number a = g.a.tensor.number;
  return a == g.b.tensor.number && a != Number::f64 ? a : Number::f32;
}

// A row as a matrix whose rows are all the same memory.
Tensor repeated(const Tensor& row, int64_t rows) {
  return {
      row.data,           row.number, 2, {rows, row.elements}, {0, row.dims ? row.strides[0] : 1},
      rows * row.elements};
}

// From the accumulation type into place.
int deliver(const Gemm& g, const Tensor& product, int64_t columns, void* stream) {
  if (g.add) return launch(Combine{g.c, product, g.c, 1}, stream);
  return launch(AddRow{product, g.bias, g.c, columns, g.wide}, stream);
}

}  // namespace

int launch(const Gemm& g, void* stream) {
  BareGemm bare;
  bare.m = g.a.m(), bare.n = g.b.k(), bare.k = g.a.k();
  if (bare.m == 0 || bare.n == 0) return 0;
  bare.in = input_type(g);
  bare.tf32 = g.tf32 && bare.in == Number::f32;
  Scratch a(stream), b(stream), c(stream);
  if (int code = factor(g.a, bare.in, a, bare.a, stream)) return code;
  if (int code = factor(g.b, bare.in, b, bare.b, stream)) return code;

  const Number sums = g.wide ? Number::f64 : Number::f32;
  const bool writable = (g.c.number == bare.in || g.c.number == sums) &&
                        as_it_lies(g.c, bare.m, bare.n, bare.c) && !bare.c.turned && bare.k > 0;
  const bool biased = g.bias.there();
  if (writable && (!biased || (!g.add && g.bias.number == g.c.number))) {
    bare.out = g.c.number;
    bare.add = g.add || biased;
    if (biased)
      if (int code = launch(Convert{repeated(g.bias, bare.m), g.c}, stream)) return code;
    return cuda::bare_gemm(bare, stream);
  }
  Tensor product;
  if (int code = c.reserve(sums, bare.m, bare.n, product)) return code;
  bare.c = {product.data, bare.n, false};
  bare.out = sums;
  if (int code = bare.k > 0 ? cuda::bare_gemm(bare, stream) : launch(Fill{product, 0}, stream))
    return code;
  return deliver(g, product, bare.n, stream);
}

}  // namespace shardproof::primitives::executor
