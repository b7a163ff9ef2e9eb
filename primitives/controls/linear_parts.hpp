// Linears around a broken part.
#pragma once
#include <memory>

#include "primitives/linear.hpp"

namespace shardproof::controls {

template <class Part>
std::unique_ptr<Kernel> column_with() {
  return std::make_unique<primitives::LinearColumn>(std::make_unique<Part>());
}
template <class Part>
std::unique_ptr<Kernel> row_with() {
  return std::make_unique<primitives::LinearRow>(std::make_unique<Part>());
}

// Calls over tokens are taken apart, and dW of each block is written over that of the one before
// it: the last one remains.
template <class Part>
struct WeightGradientOverwritten final : Part {
  void add_passing(primitives::Parallel& p, const View& a, const View& b,
                   const View& sum) override {
    primitives::set_zero(sum);
    Part::add_passing(p, a, b, sum);
  }
};

}  // namespace shardproof::controls
