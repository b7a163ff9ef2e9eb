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

// A broken walk in place of the right one, in the calls of either linear.
inline primitives::TokenCalls calls_by(std::unique_ptr<primitives::TokenRing> ring) {
  return primitives::TokenCalls(std::move(ring));
}
inline primitives::TokenCalls calls_by(std::unique_ptr<primitives::TokenChunks> chunks) {
  return primitives::TokenCalls(std::make_unique<primitives::TokenRing>(), std::move(chunks));
}
template <class Walk>
std::unique_ptr<Kernel> column_by() {
  return std::make_unique<primitives::LinearColumn>(
      std::make_unique<primitives::ColumnParallel>(calls_by(std::make_unique<Walk>())));
}
template <class Walk>
std::unique_ptr<Kernel> row_by() {
  return std::make_unique<primitives::LinearRow>(
      std::make_unique<primitives::RowParallel>(calls_by(std::make_unique<Walk>())));
}

// Parts are summed in the storage type, whatever the wire is to be.
template <class Walk, class Product>
struct SumInStorageType final : Walk {
  void reduce(primitives::Parallel& p, const Product& product, const View& sum) const override {
    const View narrow = p.workspace(p.storage, sum.shape);
    Walk::reduce(p, product, narrow);
    primitives::convert(narrow, sum);
  }
};

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
