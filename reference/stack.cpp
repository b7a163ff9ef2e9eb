#include "reference/stack.hpp"

#include <utility>

namespace shardproof::reference {
namespace {

// X_0 .. X_L
std::vector<Values> activations(const StackInputs& in) {
  std::vector<Values> x{Values(in.x.begin(), in.x.end())};
  for (size_t l = 0; l < in.w.size(); ++l)
    x.push_back(linear(in.layer(), x.back(), in.w[l], in.b[l]));
  return x;
}

// X_0 .. X_{L-1} as they are stored.
std::vector<Uncertain> stored_inputs(const StackInputs& in, const Rounding& r) {
  std::vector<Uncertain> x{certain(in.x)};
  for (size_t l = 0; l + 1 < in.w.size(); ++l) {
    x.push_back({linear(in.layer(), x.back().value, in.w[l], in.b[l]),
                 linear_loss(in.layer(), x.back(), in.w[l], in.b[l], r).error});
    store(x.back(), r);
  }
  return x;
}

}  // namespace

Values stack(const StackInputs& in) { return std::move(activations(in).back()); }

StackGradients stack_backward(const StackInputs& in, In g) {
  const std::vector<Values> x = activations(in);
  StackGradients d{Values(g.begin(), g.end()), std::vector<Values>(in.w.size()),
                   std::vector<Values>(in.w.size())};
  for (size_t l = in.w.size(); l-- > 0;) {
    LinearGradients layer = linear_backward(in.layer(), x[l], in.w[l], d.x);
    d.x = std::move(layer.x), d.w[l] = std::move(layer.w), d.b[l] = std::move(layer.b);
  }
  return d;
}

Loss stack_loss(const StackInputs& in, const Rounding& r) {
  return linear_loss(in.layer(), stored_inputs(in, r).back(), in.w.back(), in.b.back(), r);
}

StackLosses stack_backward_loss(const StackInputs& in, const Uncertain& g, const Rounding& r) {
  const std::vector<Uncertain> x = stored_inputs(in, r);
  StackLosses d{{}, std::vector<Loss>(in.w.size()), std::vector<Loss>(in.w.size())};
  Uncertain cotangent = g;
  for (size_t l = in.w.size(); l-- > 0;) {
    LinearLosses layer = linear_backward_loss(in.layer(), x[l], in.w[l], cotangent, r);
    d.w[l] = reduced(std::move(layer.w), r), d.b[l] = reduced(std::move(layer.b), r);
    cotangent = {linear_backward(in.layer(), x[l].value, in.w[l], cotangent.value).x,
                 layer.x.error};
    store(cotangent, r);
    d.x = std::move(layer.x);
  }
  return d;
}

}  // namespace shardproof::reference
