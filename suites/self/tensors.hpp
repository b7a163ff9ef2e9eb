// Numbers of a test as tensors of a body, which writes into them.
#pragma once
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "primitives/work.hpp"

namespace shardproof {

inline primitives::Tensor tensor_of(std::vector<double>& v, std::vector<int64_t> shape) {
  return primitives::tensor(
      view_of(reinterpret_cast<std::byte*>(v.data()), DType::f64, std::move(shape)));
}
inline primitives::Tensor tensor_of(std::vector<int64_t>& v) {
  return primitives::tensor(
      view_of(reinterpret_cast<std::byte*>(v.data()), DType::i64, {int64_t(v.size())}));
}

}  // namespace shardproof
