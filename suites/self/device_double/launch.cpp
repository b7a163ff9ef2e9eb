// The executor of the double: the bodies that the device's kernels run, in order of the stream. A
// tensor is reached through its allocation:
// what lies outside of it is a SIGSEGV.
#include "primitives/launch.hpp"

#include <algorithm>
#include <cstdlib>
#include <vector>

#include "primitives/bodies.hpp"
#include "primitives/code_text.hpp"
#include "primitives/cuda/blas.hpp"
#include "primitives/cuda/twin_bodies.hpp"
#include "suites/self/device_double/device.hpp"
#include "suites/self/device_double/work.hpp"
#include "suites/self/tensor_core_sum.hpp"

namespace shardproof::primitives {

using device_double::enqueue;
using device_double::reach;

namespace executor {
namespace {

void reach_tensor(Tensor& t) {
  if (!t.there() || t.elements == 0) return;
  int64_t last = 0;
  for (int d = 0; d < t.dims; ++d) last += (t.shape[d] - 1) * t.strides[d];
  t.data = reach(t.data, size_t((last + 1) * bytes_of(t.number)));
}

}  // namespace

template <class Body>
int launch(const Body& body, void* stream) {
  return enqueue(stream, [here = body]() mutable {
    here.each_tensor(reach_tensor);
    device_double::do_body(here);
  });
}

#define SHARDPROOF_QUEUED(Body) template int launch<Body>(const Body&, void*);
SHARDPROOF_BODIES(SHARDPROOF_QUEUED)
SHARDPROOF_TWIN_BODIES(SHARDPROOF_QUEUED)
SHARDPROOF_QUEUED(NormWithoutBarrier)
#undef SHARDPROOF_QUEUED

const char* text(int code) { return device_double::text_of(code); }
bool on_device() { return true; }
int memory_left(size_t* bytes) {
  const char* left = std::getenv("SHARDPROOF_DOUBLE_LEFT");
  *bytes = left ? std::strtoull(left, nullptr, 10) : size_t(1) << 40;
  return 0;
}

// What is as large as no case's tensors stays without pages until it is written to.
int allocate(void** memory, size_t bytes, void* stream) {
  size_t left = 0;
  memory_left(&left);
  if (bytes > left) return out_of_memory;
  const int code = device_double::allocate(memory, bytes);
  return code || bytes >= device_double::without_pages
             ? code
             : device_double::fill(*memory, 0xFF, bytes, stream);
}
int release(void* memory, void* stream) {
  return enqueue(stream, [memory] { device_double::discard(memory); });
}

int upload(void* to, const void* from, size_t bytes, void* stream) {
  const auto* first = static_cast<const std::byte*>(from);
  return enqueue(stream, [to, copy = std::vector<std::byte>(first, first + bytes)] {
    std::memcpy(reach(to, copy.size()), copy.data(), copy.size());
  });
}

int download(void* to, const void* from, size_t bytes, void* stream) {
  const int code = enqueue(stream, [=] { std::memcpy(to, reach(from, bytes), bytes); });
  return code ? code : device_double::synchronise(stream);
}

int order(void* later, void* earlier) { return device_double::order(later, earlier); }
int pause(void*, int64_t) { return 0; }  // work is done when it is enqueued

}  // namespace executor

namespace cuda {
namespace {

Tensor reached(const BareGemm::Matrix& m, Number n, int64_t rows, int64_t columns) {
  if (m.turned) std::swap(rows, columns);
  Tensor t{m.data, n, 2, {rows, columns}, {m.ld, 1}, rows * columns};
  executor::reach_tensor(t);
  if (m.turned) std::swap(t.shape[0], t.shape[1]), std::swap(t.strides[0], t.strides[1]);
  return t;
}

// Toward zero: the farthest that a factor may be from what it was.
template <class A>
A factor(const BareGemm& g, A value) {
  if (!g.tf32) return value;
  return A(same_bits<float>(same_bits<uint32_t>(float(value)) & ~uint32_t((1 << 13) - 1)));
}

// The factors' products: halves on tensor cores, others one after the other.
template <class Left, class Right>
auto sum_of(const BareGemm& g, Left left, Right right) {
  using A = decltype(left(0));
  A sum = 0;
  if (bytes_of(g.in) == 2) {
    for (int64_t l = 0; l < g.k; l += tensor_core_terms)
      sum = A(tensor_core_step(float(sum), int(std::min<int64_t>(tensor_core_terms, g.k - l)),
                               [&](int i) { return double(left(l + i)) * double(right(l + i)); }));
    return sum;
  }
  for (int64_t l = 0; l < g.k; ++l) sum += left(l) * right(l);
  return sum;
}

template <class A>
void multiply(const BareGemm& g) {
  const Tensor a = reached(g.a, g.in, g.m, g.k), b = reached(g.b, g.in, g.k, g.n),
               c = reached(g.c, g.out, g.m, g.n);
  for (int64_t i = 0; i < g.m; ++i)
    for (int64_t j = 0; j < g.n; ++j) {
      const A sum = sum_of(
          g, [&](int64_t l) { return factor(g, a.load<A>(i * g.k + l)); },
          [&](int64_t l) { return factor(g, b.load<A>(l * g.n + j)); });
      c.store(i * g.n + j, g.add ? A(sum + c.load<A>(i * g.n + j)) : sum);
    }
}

}  // namespace

int bare_gemm(const BareGemm& g, void* stream) {
  return enqueue(stream, [g] { g.in == Number::f64 ? multiply<double>(g) : multiply<float>(g); });
}

}  // namespace cuda
}  // namespace shardproof::primitives
