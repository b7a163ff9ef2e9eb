// Twins of the bias of any row-parallel linear. The comment above a twin names the mistake.
#pragma once
#include "primitives/gemm.hpp"
#include "primitives/linear.hpp"

namespace shardproof::controls {

using primitives::Parallel;
using primitives::RowParallel;

// b is added to each partial product: p times in the sum.
struct BiasBeforeReduce final : RowParallel {
  void reduce_and_add_bias(Parallel& p, const View& z, const View& b, const View& y) override {
    const View biased = p.workspace(z.dtype, z.shape);
    primitives::add_row(z, b, biased, p.accumulate);
    RowParallel::reduce_and_add_bias(p, biased, View{}, y);
  }
};

// db of the own tokens is taken for the whole.
struct BiasGradientLocal final : RowParallel {
  void bias_gradient(Parallel& p, const View& g, const View&, const View& db) override {
    primitives::column_sums(g, db, p.accumulate);
  }
};

}  // namespace shardproof::controls
