// What the drivers of the primitives ask of an executor: bodies run on tensors, matrix products,
// and memory. A driver is written once; the executor is what it is linked with.
//
//   host/          runs a body at once, a serial loop; products by Eigen
//   cuda/          a kernel on the stream: one thread an element, one block a row; cuBLAS
//   device_double  (suites/self) puts the serial loop, or the kernel with threads in turns, into a
//                  queue in the order of a stream
//
// Each returns the runtime's code, 0 for success. Work on one stream is done in the order in which
// it was given.
#pragma once
#include <cstddef>

#include "primitives/element.hpp"

namespace shardproof::primitives {

// c = a b + bias, or c += a b + bias. a and b are matrices of `columns` columns, or such turned;
// bias a row. Sums are made in f32, in f64 where wide, and rounded to c once.
struct Gemm {
  struct Factor {
    Tensor tensor;
    int64_t rows = 0, columns = 0;  // before it is turned
    bool turned = false;
    int64_t m() const { return turned ? columns : rows; }
    int64_t k() const { return turned ? rows : columns; }
  };
  Factor a, b;
  Tensor c, bias;
  bool add = false, wide = false;
  bool tf32 = false;  // a device may round factors of f32 to TF32
  template <class F>
  void each_tensor(F f) {
    f(a.tensor), f(b.tensor), f(c), f(bias);
  }
};

namespace executor {

inline constexpr int out_of_memory = 2;  // what the runtime says where a device has none left

template <class Body>
int launch(const Body&, void* stream);
int launch(const Gemm&, void* stream);

bool on_device();                // where memory that it allocates lies
int memory_left(size_t* bytes);  // of a device
int allocate(void** memory, size_t bytes, void* stream);
int release(void* memory, void* stream);
// `from` may change once the call has returned.
int upload(void* to, const void* from, size_t bytes, void* stream);
int download(void* to, const void* from, size_t bytes, void* stream);  // there when it returns
// What comes next on `later` is done behind what is on `earlier` by now.
int order(void* later, void* earlier);
// What comes next on the stream begins so much later, where its device takes any time.
int pause(void* stream, int64_t nanoseconds);

}  // namespace executor
}  // namespace shardproof::primitives
