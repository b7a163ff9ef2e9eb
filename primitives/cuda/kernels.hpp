// What mappings on a device launch: elementwise work on strided device memory, enqueued on a
// stream. Plain data, so that the device's compiler sees no more of the project than this. Each
// returns the runtime's code, 0 for success.
#pragma once
#include <cstdint>

namespace shardproof::cuda {

inline constexpr int most_dims = 4;

// A tensor of `dims` dims, strides in elements; row-major order of its indices numbers its
// elements.
struct Strided {
  void* data = nullptr;
  int element_bytes = 0;  // 2, 4 or 8
  int dims = 0;
  int64_t shape[most_dims] = {}, strides[most_dims] = {};
  int64_t elements = 0;
};

enum class Number : int { f64, f32, bf16, f16 };

// to[i] = from[i] for all row-major numbers i; shapes may differ, element counts do not.
int copy(const Strided& from, const Strided& to, void* stream);
int set_zero(const Strided&, void* stream);
// x = factor x, the product in double and rounded once.
int scale(const Strided& x, Number, double factor, void* stream);

}  // namespace shardproof::cuda
