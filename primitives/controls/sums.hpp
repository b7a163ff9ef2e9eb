// Twins of layers that sum the gradients of replicated parameters: `sum_gradients` of parts over
// the axes that `summed_over` names. The comment above a twin names the mistake.
#pragma once
#include <vector>

#include "oracle/subject.hpp"
#include "primitives/replicated.hpp"
#include "primitives/work.hpp"

namespace shardproof::controls {

using primitives::convert;
using primitives::Parallel;
using primitives::Part;
using primitives::Parts;

// Nobody's parts are added.
inline void alone(Parallel& p, const Parts& parts) {
  coalesced_all_reduce(p, parts, std::vector<Axis>{});
}

// What is already the sum is summed once more, over axes or a group.
template <class Over>
void sum_again(Parallel& p, const Part& part, Over&& over) {
  const View once = partial_like(p, part.result);
  convert(part.result, once);
  coalesced_all_reduce(p, Parts{{once, part.result}}, over);
}

// The sum over the own tokens is taken for the whole.
template <class Layer>
struct GradientLocal final : Layer {
  void sum_gradients(Parallel& p, const Parts& parts, const std::vector<Axis>&) override {
    alone(p, parts);
  }
};

// The mean over the ranks stands where the sum is due: all ranks agree, and are wrong.
template <class Layer>
struct GradientAveraged final : Layer {
  void sum_gradients(Parallel& p, const Parts& parts, const std::vector<Axis>& axes) override {
    coalesced_all_reduce(p, parts, axes, Reduce::avg);
  }
};

// The list of parameters to sum was written down by hand and ends before the last one.
template <class Layer>
struct LastLeftOut final : Layer {
  void sum_gradients(Parallel& p, const Parts& parts, const std::vector<Axis>& axes) override {
    coalesced_all_reduce(p, Parts(parts.begin(), parts.end() - 1), axes);
    alone(p, {parts.back()});
  }
};

// The first parameter is on two lists, and its sum is summed.
template <class Layer>
struct FirstSummedTwice final : Layer {
  void sum_gradients(Parallel& p, const Parts& parts, const std::vector<Axis>& axes) override {
    coalesced_all_reduce(p, parts, axes);
    sum_again(p, parts[0], axes);
  }
};

// Without sp every rank has seen all tokens, and the gradients are summed all the same.
template <class Layer>
struct WholeGradientSummed final : Layer {
  std::vector<Axis> summed_over(const Case& line) const override {
    std::vector<Axis> axes = Layer::summed_over(line);
    if (!line.on("sp")) axes.insert(axes.begin(), Axis::tp);
    return axes;
  }
};

// Summed over the axis of the weights' gradients in place of the one that cuts the tokens.
template <class Layer>
struct SummedOverDp final : Layer {
  std::vector<Axis> summed_over(const Case&) const override { return {Axis::dp}; }
};

// What tp cuts is summed over it, like what all ranks of tp hold.
template <class Layer>
struct SummedOverTp final : Layer {
  std::vector<Axis> summed_over(const Case& line) const override {
    std::vector<Axis> axes = Layer::summed_over(line);
    axes.insert(axes.begin(), Axis::tp);
    return axes;
  }
};

// Context-parallel ranks hold other tokens of the same sequences, and nobody adds them.
template <class Layer>
struct NotSummedOverCp final : Layer {
  std::vector<Axis> summed_over(const Case& line) const override {
    std::vector<Axis> axes = Layer::summed_over(line);
    std::erase(axes, Axis::cp);
    return axes;
  }
};

}  // namespace shardproof::controls
