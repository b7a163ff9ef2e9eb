// Broken twins of the norm. Each replaces one step; the comment above a twin names the mistake.

#include "oracle/registry.hpp"
#include "primitives/controls/table.hpp"
#include "primitives/norm_sequence.hpp"

namespace shardproof {
namespace {

using namespace primitives;

// The sum over the own tokens is taken for the whole.
struct GradientLocal final : NormSequence {
  void sum_gradients(Parallel& p, const Parts& parts, const std::vector<Axis>&) override {
    coalesced_all_reduce(p, parts, std::vector<Axis>{});
  }
};

// The mean over the ranks stands where the sum is due: all ranks agree, and are wrong.
struct GradientAveraged final : NormSequence {
  void sum_gradients(Parallel& p, const Parts& parts, const std::vector<Axis>& axes) override {
    coalesced_all_reduce(p, parts, axes, Reduce::avg);
  }
};

// Without sp every rank has seen all tokens, and the gradients are summed all the same.
struct WholeGradientSummed final : NormSequence {
  std::vector<Axis> summed_over(const Case& line) const override {
    std::vector<Axis> axes = NormSequence::summed_over(line);
    if (!line.on("sp")) axes.insert(axes.begin(), Axis::tp);
    return axes;
  }
};

// Summed over the axis of the weights' gradients in place of the one that cuts the tokens.
struct SummedOverDp final : NormSequence {
  std::vector<Axis> summed_over(const Case&) const override { return {Axis::dp}; }
};

// Context-parallel ranks hold other tokens of the same sequences, and nobody adds them.
struct NotSummedOverCp final : NormSequence {
  std::vector<Axis> summed_over(const Case& line) const override {
    std::vector<Axis> axes = NormSequence::summed_over(line);
    std::erase(axes, Axis::cp);
    return axes;
  }
};

// The list of parameters to sum was written down by hand and ends before the last one.
struct LastLeftOut final : NormSequence {
  void sum_gradients(Parallel& p, const Parts& parts, const std::vector<Axis>& axes) override {
    coalesced_all_reduce(p, Parts(parts.begin(), parts.end() - 1), axes);
    coalesced_all_reduce(p, Parts{parts.back()}, std::vector<Axis>{});
  }
};

// The first parameter is on two lists, and its sum is summed.
struct FirstSummedTwice final : NormSequence {
  void sum_gradients(Parallel& p, const Parts& parts, const std::vector<Axis>& axes) override {
    coalesced_all_reduce(p, parts, axes);
    const View once = partial_like(p, parts[0].result);
    convert(parts[0].result, once);
    coalesced_all_reduce(p, Parts{{once, parts[0].result}}, axes);
  }
};

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

template <class Kernel_>
std::unique_ptr<Kernel> twin() {
  return std::make_unique<Kernel_>();
}

using controls::Row;

const Row rows[] = {
    {"norm_sequence", "norm_gradient_not_summed", twin<GradientLocal>, "replica,gradient",
     "forward", "NVIDIA/Megatron-LM 20b7a54, deepspeedai/Megatron-DeepSpeed 448", "tp=4 sp=on",
     "sp=on, p >= 2, tokens that differ"},
    {"norm_sequence", "norm_gradient_averaged", twin<GradientAveraged>, "gradient",
     "forward,replica", "EleutherAI/gpt-neox 1259", "tp=4 sp=on", "sp=on, p >= 2; ratio 1/p"},
    {"norm_sequence", "redundant_gradient_summed", twin<WholeGradientSummed>, "gradient",
     "forward,replica", "NVIDIA/Megatron-LM 2632", "tp=4", "sp=off, p >= 2; ratio p"},
    {"norm_sequence", "norm_gradient_summed_over_dp", twin<SummedOverDp>, "gradient", "forward",
     "a replicated parameter reduced over the data-parallel axis alone",
     "tp=2 dp=2 sp=on reduce=tp", "tp=2 dp=2 sp=on"},
    {"norm_sequence", "norm_gradient_not_summed_over_cp", twin<NotSummedOverCp>, "replica,gradient",
     "forward", "Megatron CP groups", "tp=2 cp=2 sp=on", "cp >= 2"},
    {"norm_sequence", "norm_parameter_left_out", twin<LastLeftOut>, "replica,gradient", "forward",
     "a list of parameters kept by hand", "tp=4 sp=on", "sp=on, two parameters"},
    {"norm_sequence", "norm_parameter_summed_twice", twin<FirstSummedTwice>, "gradient",
     "forward,replica", "a parameter in two lists of the finalisation", "tp=4 sp=on",
     "sp=on, p >= 2; ratio p"},
    {"norm_sequence", "nondeterministic_replica", twin<EachInItsOwnOrder>, "replica",
     "forward,ledger", "pytorch/pytorch 160169", "tp=4",
     "fill=normal, sp=off: every rank computes the gradient"},
};

}  // namespace

void controls_norm(Registry& registry) { controls::add(registry, rows); }

}  // namespace shardproof
