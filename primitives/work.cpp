#include "primitives/work.hpp"

#include <stdexcept>
#include <string>

#include "primitives/code_text.hpp"
#include "primitives/pointwise.hpp"

namespace shardproof::primitives {
namespace {

thread_local Stream current_stream = nullptr;
thread_local bool in_tf32 = false;

Number number(DType d) {
  switch (d) {
    case DType::f64:
      return Number::f64;
    case DType::f32:
      return Number::f32;
    case DType::bf16:
      return Number::bf16;
    case DType::f16:
      return Number::f16;
    case DType::i64:
      return Number::i64;
    case DType::i32:
      return Number::i32;
  }
  throw std::invalid_argument("expected a dtype, met number " + std::to_string(int(d)));
}

}  // namespace

OnStream::OnStream(Stream s) : before_(std::exchange(current_stream, s)) {}
OnStream::~OnStream() { current_stream = before_; }
Stream OnStream::current() { return current_stream; }

InTf32::InTf32(bool on) : before_(std::exchange(in_tf32, on)) {}
InTf32::~InTf32() { in_tf32 = before_; }
bool InTf32::on() { return in_tf32; }

// Dims of one element are left out, and neighbours that lie like one dim become one: a contiguous
// tensor of any shape has one.
Tensor tensor(const View& v) {
  Tensor t;
  if (!v.data) return t;
  t.data = v.data;
  t.number = number(v.dtype);
  t.elements = v.elements();
  if (t.elements == 0) return t;
  for (size_t d = 0; d < v.shape.size(); ++d) {
    if (v.shape[d] == 1) continue;
    if (t.dims > 0 && t.strides[t.dims - 1] == v.shape[d] * v.strides[d]) {
      t.shape[t.dims - 1] *= v.shape[d];
      t.strides[t.dims - 1] = v.strides[d];
      continue;
    }
    if (t.dims == most_dims)
      throw std::invalid_argument("expected at most " + std::to_string(most_dims) + " dims, met " +
                                  shape_text(v.shape) + "; pack the tensor first");
    t.shape[t.dims] = v.shape[d];
    t.strides[t.dims] = v.strides[d];
    ++t.dims;
  }
  return t;
}

void check(int code, const char* what) {
  if (code == executor::out_of_memory && executor::on_device())
    throw Infrastructure(std::string("device=cuda: expected memory for ") + what +
                         ", met a device without; take smaller extents, fewer ranks or a device of "
                         "its own for each rank");
  if (code != 0)
    throw std::runtime_error(std::string("device, launching ") + what + ": expected success, met " +
                             std::to_string(code) + ": " + executor::text(code));
}

void convert(const View& from, const View& to) {
  if (from.elements() != to.elements())
    throw std::invalid_argument("expected tensors of one element count to copy, met " +
                                shape_text(from.shape) + " to " + shape_text(to.shape));
  perform(Convert{tensor(from), tensor(to)}, "a copy");
}
void set_zero(const View& v) { perform(Fill{tensor(v), 0}, "zeros"); }
void scale(const View& from, const View& to, double factor, double divisor) {
  perform(Scale{tensor(from), tensor(to), factor, divisor}, "a scale");
}
void combine(const View& a, const View& b, double factor, const View& sum) {
  perform(Combine{tensor(a), tensor(b), tensor(sum), factor}, "a sum");
}
void add_into(const View& own, const View& sum) { combine(sum, own, 1, sum); }

Kept::Kept(DType dtype, std::vector<int64_t> shape) : stream_(OnStream::current()) {
  const size_t bytes = size_t(product(shape)) * size_of(dtype);
  void* memory = nullptr;
  check(executor::allocate(&memory, bytes, stream_), "an allocation");
  view_ = view_of(static_cast<std::byte*>(memory), dtype, std::move(shape),
                  executor::on_device() ? Space::device : Space::host);
}
Kept::~Kept() {
  if (view_.data) executor::release(view_.data, stream_);
}

namespace {

Kept uploaded(DType dtype, const void* values, size_t count) {
  Kept kept(dtype, {int64_t(count)});
  if (count)
    check(executor::upload(kept.view().data, values, count * 8, OnStream::current()), "an upload");
  return kept;
}

}  // namespace

Kept uploaded(std::span<const int64_t> v) { return uploaded(DType::i64, v.data(), v.size()); }
Kept uploaded(std::span<const double> v) { return uploaded(DType::f64, v.data(), v.size()); }

std::vector<int64_t> downloaded(const View& integers) {
  std::vector<int64_t> values(static_cast<size_t>(integers.elements()));
  const Kept dense(DType::i64, {int64_t(values.size())});
  convert(integers, dense.view());
  check(executor::download(values.data(), dense.view().data, values.size() * sizeof(int64_t),
                           OnStream::current()),
        "a download");
  return values;
}

}  // namespace shardproof::primitives
