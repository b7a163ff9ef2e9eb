// Work on tensors, as drivers name it. It goes to the stream of the calling thread, in the order in
// which it is asked for; on the host it is done when the call returns. Views may be strided.
#pragma once
#include <span>
#include <utility>
#include <vector>

#include "oracle/subject.hpp"
#include "primitives/launch.hpp"

namespace shardproof::primitives {

// The stream that the calling thread's work goes to while the scope lives; null, the host's,
// outside of any.
class OnStream {
 public:
  explicit OnStream(Stream);
  ~OnStream();
  OnStream(const OnStream&) = delete;
  OnStream& operator=(const OnStream&) = delete;
  static Stream current();

 private:
  Stream before_;
};

// While the scope lives, whether products of the calling thread may round factors of f32 to TF32.
class InTf32 {
 public:
  explicit InTf32(bool);
  ~InTf32();
  InTf32(const InTf32&) = delete;
  InTf32& operator=(const InTf32&) = delete;
  static bool on();

 private:
  bool before_;
};

Tensor tensor(const View&);  // no data: none
void check(int code, const char* what);

template <class Body>
void perform(const Body& body, const char* what) {
  check(executor::launch(body, OnStream::current()), what);
}

// By row-major number: shapes may differ. Bits where the types agree, else rounded once.
void convert(const View& from, const View& to);
void set_zero(const View&);
// to = factor from / divisor, and sum = a + factor b: in double, rounded once.
void scale(const View& from, const View& to, double factor, double divisor = 1);
void combine(const View& a, const View& b, double factor, const View& sum);
void add_into(const View& own, const View& sum);  // sum += own

// Memory of the executor, filled with NaN: what a forward keeps for its backward.
class Kept {
 public:
  Kept() = default;
  Kept(DType, std::vector<int64_t> shape);
  ~Kept();
  Kept(Kept&& other) noexcept { swap(other); }
  Kept& operator=(Kept&& other) noexcept {
    swap(other);
    return *this;
  }
  const View& view() const { return view_; }

 private:
  void swap(Kept& other) noexcept {
    std::swap(view_, other.view_);
    std::swap(stream_, other.stream_);
  }
  View view_;
  Stream stream_ = nullptr;
};
Kept uploaded(std::span<const int64_t>);                // [n] of i64
Kept uploaded(std::span<const double>);                 // [n] of f64
std::vector<int64_t> downloaded(const View& integers);  // waits for the stream

}  // namespace shardproof::primitives
