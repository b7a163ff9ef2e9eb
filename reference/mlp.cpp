#include "reference/mlp.hpp"

namespace shardproof::reference {
namespace {

struct Intermediates {
  Values z, a, n;
};

Intermediates until_second_linear(const MlpShape& s, const MlpInputs& in) {
  Intermediates m;
  m.z = linear(s.first(), in.x, in.w1, in.b1);
  m.a = s.gated ? swiglu(m.z, s.ffn) : activate(s.activation, m.z);
  m.n = s.normalised ? rms_norm(m.a, in.gamma, s.ffn, s.eps) : m.a;
  return m;
}

}  // namespace

Values mlp(const MlpShape& s, const MlpInputs& in) {
  return linear(s.second(), until_second_linear(s, in).n, in.w2, in.b2);
}

MlpGradients mlp_backward(const MlpShape& s, const MlpInputs& in, In g) {
  const Intermediates m = until_second_linear(s, in);
  MlpGradients d;
  LinearGradients second = linear_backward(s.second(), m.n, in.w2, g);
  d.w2 = std::move(second.w);
  d.b2 = std::move(second.b);
  Values da = std::move(second.x);
  if (s.normalised) {
    NormGradients norm = rms_norm_backward(m.a, in.gamma, da, s.ffn, s.eps);
    d.gamma = std::move(norm.gamma);
    da = std::move(norm.x);
  }
  const Values dz =
      s.gated ? swiglu_backward(m.z, da, s.ffn) : activate_backward(s.activation, m.z, da);
  LinearGradients first = linear_backward(s.first(), in.x, in.w1, dz);
  d.x = std::move(first.x);
  d.w1 = std::move(first.w);
  d.b1 = std::move(first.b);
  return d;
}

}  // namespace shardproof::reference
