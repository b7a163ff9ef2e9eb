#include "reference/block.hpp"

#include "reference/norm.hpp"

namespace shardproof::reference {
namespace {

Values normalised(const NormShape& s, In x, In gamma, In beta) {
  return s.centred ? layer_norm(x, gamma, beta, s.width, s.eps)
                   : rms_norm(x, gamma, s.width, s.eps);
}

NormGradients norm_backward(const NormShape& s, In x, In gamma, In g) {
  return s.centred ? layer_norm_backward(x, gamma, g, s.width, s.eps)
                   : rms_norm_backward(x, gamma, g, s.width, s.eps);
}

Values times(In a, In b) {
  Values c(a.size());
  for (size_t i = 0; i < c.size(); ++i) c[i] = a[i] * b[i];
  return c;
}
Values plus(In a, In b) {
  Values c(a.size());
  for (size_t i = 0; i < c.size(); ++i) c[i] = a[i] + b[i];
  return c;
}

struct Forward {
  Values u, z, a, r;
};

Forward until_second_norm(const BlockShape& s, const BlockInputs& in) {
  Forward f;
  f.u = normalised(s.norm, in.x, in.gamma1, in.beta1);
  f.z = linear(s.first(), f.u, in.w1, in.b1);
  f.a = activate(s.activation, f.z);
  f.r = plus(in.x, times(in.dropout1, linear(s.second(), f.a, in.w2, in.b2)));
  return f;
}

struct UncertainForward {
  Uncertain u, z, a, r;
};

Uncertain stored(Uncertain x, const Rounding& r) {
  store(x, r);
  return x;
}

Uncertain reduced_value(Values value, Loss loss, const Rounding& r) {
  return stored({std::move(value), reduced(std::move(loss), r).error}, r);
}

UncertainForward until_second_norm(const BlockShape& s, const BlockInputs& in, const Rounding& r) {
  UncertainForward f;
  const Uncertain x = certain(in.x);
  f.u = stored(norm(s.norm, x, in.gamma1, in.beta1, r), r);
  f.z = stored({linear(s.first(), f.u.value, in.w1, in.b1),
                linear_loss(s.first(), f.u, in.w1, in.b1, r).error},
               r);
  f.a = stored(activate(s.activation, f.z, r), r);
  const Uncertain m = reduced_value(linear(s.second(), f.a.value, in.w2, in.b2),
                                    linear_loss(s.second(), f.a, in.w2, in.b2, r), r);
  f.r = stored(sum(x, scaled(m, in.dropout1, r), r), r);
  return f;
}

Loss as_loss(const Uncertain& x) { return {x.error, absolute(x.value)}; }

}  // namespace

Values block(const BlockShape& s, const BlockInputs& in) {
  const Values r = until_second_norm(s, in).r;
  return plus(r, times(in.dropout2, normalised(s.norm, r, in.gamma2, in.beta2)));
}

BlockParts<Values> block_backward(const BlockShape& s, const BlockInputs& in, In g) {
  const Forward f = until_second_norm(s, in);
  NormGradients second = norm_backward(s.norm, f.r, in.gamma2, times(in.dropout2, g));
  const Values dr = plus(g, second.x);
  LinearGradients down = linear_backward(s.second(), f.a, in.w2, times(in.dropout1, dr));
  LinearGradients up =
      linear_backward(s.first(), f.u, in.w1, activate_backward(s.activation, f.z, down.x));
  NormGradients first = norm_backward(s.norm, in.x, in.gamma1, up.x);
  return {plus(dr, first.x), std::move(first.gamma),  std::move(first.beta),
          std::move(up.w),   std::move(up.b),         std::move(down.w),
          std::move(down.b), std::move(second.gamma), std::move(second.beta)};
}

Loss block_loss(const BlockShape& s, const BlockInputs& in, const Rounding& r) {
  const Uncertain stream = until_second_norm(s, in, r).r;
  const Uncertain n = stored(norm(s.norm, stream, in.gamma2, in.beta2, r), r);
  return as_loss(sum(stream, scaled(n, in.dropout2, r), r));
}

BlockParts<Loss> block_backward_loss(const BlockShape& s, const BlockInputs& in, In g,
                                     const Rounding& r) {
  const UncertainForward f = until_second_norm(s, in, r);
  const Uncertain cotangent = certain(g);
  BlockParts<Loss> loss;

  NormLosses second =
      norm_backward_loss(s.norm, f.r, in.gamma2, stored(scaled(cotangent, in.dropout2, r), r), r);
  const Uncertain dr = stored(sum(cotangent, stored(second.x, r), r), r),
                  dm = stored(scaled(dr, in.dropout1, r), r);
  LinearLosses down = linear_backward_loss(s.second(), f.a, in.w2, dm, r);
  const Uncertain da = stored(
      {linear_backward(s.second(), f.a.value, in.w2, dm.value).x, std::move(down.x.error)}, r);
  const Uncertain dz = stored(activate_backward(s.activation, f.z, da, r), r);
  LinearLosses up = linear_backward_loss(s.first(), f.u, in.w1, dz, r);
  const Uncertain du =
      reduced_value(linear_backward(s.first(), f.u.value, in.w1, dz.value).x, std::move(up.x), r);
  NormLosses first = norm_backward_loss(s.norm, certain(in.x), in.gamma1, du, r);

  loss.x = as_loss(sum(dr, stored(first.x, r), r));
  loss.gamma1 = reduced(std::move(first.gamma), r);
  loss.beta1 = reduced(std::move(first.beta), r);
  loss.w1 = std::move(up.w);
  loss.b1 = std::move(up.b);
  loss.w2 = std::move(down.w);
  loss.b2 = reduced(std::move(down.b), r);
  loss.gamma2 = reduced(std::move(second.gamma), r);
  loss.beta2 = reduced(std::move(second.beta), r);
  return loss;
}

}  // namespace shardproof::reference
