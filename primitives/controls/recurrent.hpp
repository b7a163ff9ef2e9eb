// Twins of any layer that has states and decays. The comment above a twin names the mistake.
#pragma once
#include <cmath>
#include <memory>

#include "oracle/subject.hpp"
#include "primitives/work.hpp"

namespace shardproof::controls {

inline View copy_of(Rank& rank, const View& v) {
  const View to = rank.workspace(v.dtype, v.shape);
  primitives::convert(v, to);
  return to;
}

// The states of a forward lie in the layer, where the next forward puts its own.
template <class Layer>
class StatesInTheLayer final : public Layer {
 public:
  std::unique_ptr<Saved> forward(Rank& rank, std::span<const View> inputs,
                                 std::span<const View> outputs) override {
    last_ = Layer::forward(rank, inputs, outputs);
    return std::make_unique<Saved>();
  }
  void backward(Rank& rank, Saved&, std::span<const View> cotangents,
                std::span<const View> gradients) override {
    Layer::backward(rank, *last_, cotangents, gradients);
  }

 private:
  std::unique_ptr<Saved> last_;
};

// exp2 of natural logarithms.
template <class Layer>
struct PowersOfTwo final : Layer {
  void decays_of(Rank& rank, const View& logarithms, const View& decays) override {
    const View scaled = copy_of(rank, logarithms);
    primitives::scale(logarithms, scaled, std::log(2.0));
    Layer::decays_of(rank, scaled, decays);
  }
};
// The gradient of a decay is handed out as that of its logarithm.
template <class Layer>
struct GradientOfDecays final : Layer {
  void gradient_of_logarithms(Rank&, const View& of_decays, const View&,
                              const View& gradient) override {
    primitives::convert(of_decays, gradient);
  }
};

}  // namespace shardproof::controls
