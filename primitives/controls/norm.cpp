// Broken twins of the norm: those of sums.hpp, and its own.
#include <algorithm>
#include <cmath>

#include "oracle/registry.hpp"
#include "primitives/controls/sums.hpp"
#include "primitives/controls/table.hpp"
#include "primitives/norm_sequence.hpp"

namespace shardproof {
namespace {

using namespace controls;
using namespace primitives;

// Every rank sums over all tokens in an order of its own, as atomics do.
struct OwnOrder final : Norm {
  using Norm::Norm;
  int64_t first_row(Parallel& p, int64_t rows) const override {
    return p.tp.rank() * rows / p.tp.size();
  }
};
struct EachInItsOwnOrder final : NormSequence {
  std::unique_ptr<Norm> norm_of(const Case& line) const override {
    return std::make_unique<OwnOrder>(line.text("norm") == "layer");
  }
};

// The variance is mean x^2 - mean^2, which loses all that the two have in common.
struct UncentredVariance final : Norm {
  using Norm::Norm;
  void forward(Parallel& p, const View& x, const View& gamma, const View& beta, const View& y,
               const View& statistics) const override {
    if (p.accumulate == DType::f64)
      rows<double>(x, gamma, beta, y, statistics);
    else
      rows<float>(x, gamma, beta, y, statistics);
  }

 private:
  template <class A>
  static void rows(const View& x, const View& gamma, const View& beta, const View& y,
                   const View& statistics) {
    const int64_t n = x.shape.back();
    for (int64_t first = 0; first < x.elements(); first += n) {
      const auto element = [&](int64_t j) { return A(load(x.flat(first + j), x.dtype)); };
      A mean = 0, square = 0;
      for (int64_t j = 0; j < n; ++j) mean += element(j), square += element(j) * element(j);
      mean /= A(n);
      const A variance = square / A(n) - mean * mean;
      const A inverse = 1 / std::sqrt(std::max(variance, A(0)) + A(norm_eps));
      for (int64_t j = 0; j < n; ++j) {
        const A scaled = A(load(gamma.flat(j), gamma.dtype)) * ((element(j) - mean) * inverse);
        const A shift = beta.data ? A(load(beta.flat(j), beta.dtype)) : A(0);
        store(y.flat(first + j), y.dtype, double(scaled + shift));
      }
      store(statistics.flat(2 * (first / n)), statistics.dtype, double(mean));
      store(statistics.flat(2 * (first / n) + 1), statistics.dtype, double(inverse));
    }
  }
};
struct VarianceInOnePass final : NormSequence {
  std::unique_ptr<Norm> norm_of(const Case&) const override {
    return std::make_unique<UncentredVariance>(true);
  }
};

const Row rows[] = {
    {"norm_sequence", "norm_gradient_not_summed", twin<GradientLocal<NormSequence>>,
     "replica,gradient", "forward",
     "NVIDIA/Megatron-LM 20b7a54, deepspeedai/Megatron-DeepSpeed 448", "tp=4 sp=on",
     "sp=on, p >= 2, tokens that differ"},
    {"norm_sequence", "norm_gradient_averaged", twin<GradientAveraged<NormSequence>>, "gradient",
     "forward,replica", "EleutherAI/gpt-neox 1259", "tp=4 sp=on", "sp=on, p >= 2; ratio 1/p"},
    {"norm_sequence", "redundant_gradient_summed", twin<WholeGradientSummed<NormSequence>>,
     "gradient", "forward,replica", "NVIDIA/Megatron-LM 2632", "tp=4", "sp=off, p >= 2; ratio p"},
    {"norm_sequence", "norm_gradient_summed_over_dp", twin<SummedOverDp<NormSequence>>, "gradient",
     "forward", "a replicated parameter reduced over the data-parallel axis alone",
     "tp=2 dp=2 sp=on reduce=tp", "tp=2 dp=2 sp=on"},
    {"norm_sequence", "norm_gradient_not_summed_over_cp", twin<NotSummedOverCp<NormSequence>>,
     "replica,gradient", "forward", "Megatron CP groups", "tp=2 cp=2 sp=on", "cp >= 2"},
    {"norm_sequence", "norm_parameter_left_out", twin<LastLeftOut<NormSequence>>,
     "replica,gradient", "forward", "a list of parameters kept by hand", "tp=4 sp=on",
     "sp=on, two parameters"},
    {"norm_sequence", "norm_parameter_summed_twice", twin<FirstSummedTwice<NormSequence>>,
     "gradient", "forward,replica", "a parameter in two lists of the finalisation", "tp=4 sp=on",
     "sp=on, p >= 2; ratio p"},
    {"norm_sequence", "nondeterministic_replica", twin<EachInItsOwnOrder>, "replica",
     "forward,ledger", "pytorch/pytorch 160169", "tp=4",
     "fill=normal, sp=off: every rank computes the gradient"},
    {"norm_sequence", "variance_in_one_pass", twin<VarianceInOnePass>, "forward,gradient",
     "replica,ledger", "tracel-ai/burn 5607, apache/tvm 19592, tenstorrent/tt-metal 45968",
     "tp=2 sp=on dtype=f32 fill=offset", "fill=offset: a mean of 2^12 beside a variance of 1"},
};

}  // namespace

void controls_norm(Registry& registry) { controls::add(registry, rows); }

}  // namespace shardproof
