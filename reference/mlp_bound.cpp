// The MLP's running errors, by the rules of running_error.hpp.
#include <cmath>

#include "reference/mlp.hpp"
#include "reference/running_error.hpp"

namespace shardproof::reference {
namespace {

Uncertain first_linear(const MlpShape& s, const MlpInputs& in, const Rounding& r) {
  const double gamma = gamma_of(double(s.hidden) + 1, r.accumulate);
  Uncertain z{linear(s.first(), in.x, in.w1, in.b1),
              linear(s.first(), times(in.x, gamma), absolute(in.w1), times(in.b1, gamma))};
  store(z, r);
  return z;
}

Uncertain activation(const MlpShape& s, const Uncertain& z, const Rounding& r) {
  const double u = r.accumulate;
  Uncertain a{s.gated ? swiglu(z.value, s.ffn) : activate(s.activation, z.value), {}};
  a.error.resize(a.size());
  if (!s.gated) {
    for (size_t i = 0; i < a.size(); ++i)
      a.error[i] = value_error(s.activation, z.value[i], z.error[i], u);
    return a;
  }
  const size_t f = size_t(s.ffn);
  for (size_t i = 0; i < a.size(); ++i) {
    const size_t gate = i / f * 2 * f + i % f, up = gate + f;
    const double silu = std::abs(activate(Activation::silu, z.value[gate]));
    const double e = value_error(Activation::silu, z.value[gate], z.error[gate], u);
    a.error[i] = product_error(a.value[i], (silu + e) * z.most(up), 1, u);
  }
  return a;
}

Uncertain activation_backward(const MlpShape& s, const Uncertain& z, const Uncertain& da,
                              const Rounding& r) {
  const double u = r.accumulate;
  Uncertain dz{s.gated ? swiglu_backward(z.value, da.value, s.ffn)
                       : activate_backward(s.activation, z.value, da.value),
               {}};
  dz.error.resize(dz.size());
  const size_t f = size_t(s.ffn);
  for (size_t i = 0; i < da.size(); ++i) {
    const size_t gate = s.gated ? i / f * 2 * f + i % f : i, up = gate + f;
    const Activation a = s.gated ? Activation::silu : s.activation;
    const double x = z.value[gate], e = z.error[gate];
    const double steep = std::abs(slope(a, x)) + slope_error(a, x, e, u);
    const double along = da.most(i) * steep;
    dz.error[gate] = product_error(dz.value[gate], s.gated ? along * z.most(up) : along, 2, u);
    if (!s.gated) continue;
    const double silu = std::abs(activate(a, x)) + value_error(a, x, e, u);
    dz.error[up] = product_error(dz.value[up], da.most(i) * silu, 1, u);
  }
  store(dz, r);
  return dz;
}

// xhat = a / rms and the inverse of rms, row by row.
struct Normalised {
  Uncertain xhat, inverse;
};

Normalised normalise(const MlpShape& s, const Uncertain& a, const Rounding& r) {
  const size_t f = size_t(s.ffn), rows = a.size() / f;
  const double u = r.accumulate, gamma = gamma_of(double(f) + r.ranks + 2, u);
  Normalised n{{Values(a.size()), Values(a.size())}, {Values(rows), Values(rows)}};
  for (size_t t = 0; t < rows; ++t) {
    double exact = s.eps, greatest = s.eps;
    for (size_t i = t * f; i < (t + 1) * f; ++i) {
      exact += a.value[i] * a.value[i] / double(f);
      greatest += a.most(i) * a.most(i) / double(f);
    }
    // The mean square is off by at most `greatest - exact + gamma greatest`; with theta that over
    // the exact one, 1 / sqrt(1 - theta) - 1 <= theta / (2 (1 - theta)) for theta < 1.
    const double theta = (greatest - exact + gamma * greatest) / exact;
    n.inverse.value[t] = 1 / std::sqrt(exact);
    n.inverse.error[t] =
        theta < 1 ? n.inverse.value[t] * (theta / (2 * (1 - theta)) + 3 * u) : 1 / std::sqrt(s.eps);
    for (size_t i = t * f; i < (t + 1) * f; ++i) {
      n.xhat.value[i] = a.value[i] * n.inverse.value[t];
      n.xhat.error[i] = product_error(n.xhat.value[i], a.most(i) * n.inverse.most(t), 1, u);
    }
  }
  return n;
}

Uncertain norm(const MlpShape& s, const MlpInputs& in, const Uncertain& a, const Rounding& r) {
  const Normalised h = normalise(s, a, r);
  Uncertain n{Values(a.size()), Values(a.size())};
  for (size_t i = 0; i < n.size(); ++i) {
    const double weight = in.gamma[i % size_t(s.ffn)];
    n.value[i] = weight * h.xhat.value[i];
    n.error[i] = product_error(n.value[i], std::abs(weight) * h.xhat.most(i), 1, r.accumulate);
  }
  return n;
}

struct NormBackward {
  Uncertain da;
  Loss gamma;
};

// da = (t - xhat mean(t xhat)) / rms with t = gamma dn; dgamma = sum over tokens of dn xhat.
NormBackward norm_backward(const MlpShape& s, const MlpInputs& in, const Uncertain& a,
                           const Uncertain& dn, const Rounding& r) {
  const size_t f = size_t(s.ffn), rows = a.size() / f;
  const double u = r.accumulate, gamma_row = gamma_of(double(f) + r.ranks + 3, u),
               gamma_tokens = gamma_of(double(rows) + 1, u);
  const Normalised h = normalise(s, a, r);
  NormBackward d{{Values(a.size()), Values(a.size())}, {Values(f), Values(f)}};
  for (size_t t = 0; t < rows; ++t) {
    double mean = 0, mean_most = 0;
    for (size_t i = t * f; i < (t + 1) * f; ++i) {
      const double weight = in.gamma[i % f], along = dn.value[i] * h.xhat.value[i],
                   along_most = dn.most(i) * h.xhat.most(i);
      mean += weight * along / double(f);
      mean_most += std::abs(weight) * along_most / double(f);
      // Errors of the terms of dgamma, and of the mean below.
      d.gamma.error[i % f] += along_most - std::abs(along) + gamma_tokens * along_most;
      d.gamma.magnitude[i % f] += along_most;
    }
    double mean_error = gamma_row * mean_most;
    for (size_t i = t * f; i < (t + 1) * f; ++i)
      mean_error += std::abs(in.gamma[i % f]) / double(f) *
                    (dn.most(i) * h.xhat.most(i) - std::abs(dn.value[i] * h.xhat.value[i]));
    for (size_t i = t * f; i < (t + 1) * f; ++i) {
      const double weight = std::abs(in.gamma[i % f]);
      const double product = h.xhat.value[i] * mean,
                   product_most = h.xhat.most(i) * (std::abs(mean) + mean_error);
      const double inner = in.gamma[i % f] * dn.value[i] - product;
      const double inner_error = weight * dn.error[i] + product_most - std::abs(product) +
                                 3 * u * (weight * dn.most(i) + product_most);
      d.da.value[i] = inner * h.inverse.value[t];
      d.da.error[i] =
          product_error(d.da.value[i], (std::abs(inner) + inner_error) * h.inverse.most(t), 1, u);
    }
  }
  return d;
}

struct Forward {
  Uncertain z, a, n;
};

Forward until_second_linear(const MlpShape& s, const MlpInputs& in, const Rounding& r) {
  Forward m;
  m.z = first_linear(s, in, r);
  m.a = activation(s, m.z, r);
  m.n = s.normalised ? norm(s, in, m.a, r) : m.a;
  store(m.n, r);
  return m;
}

}  // namespace

Loss mlp_loss(const MlpShape& s, const MlpInputs& in, const Rounding& r) {
  const Uncertain n = until_second_linear(s, in, r).n;
  const double gamma = gamma_of(double(s.ffn) + 1, r.accumulate);
  const Values w2 = absolute(in.w2);
  return reduced({linear(s.second(), factor_error(n, gamma), w2, times(in.b2, gamma)),
                  linear(s.second(), most(n), w2, absolute(in.b2))},
                 r);
}

MlpLosses mlp_backward_loss(const MlpShape& s, const MlpInputs& in, const Uncertain& g,
                            const Rounding& r) {
  const Forward m = until_second_linear(s, in, r);
  MlpLosses loss;
  // Of dN = G W2 the value is needed, of dW2 = G^T N and db2 the losses only.
  LinearLosses second = linear_backward_loss(s.second(), m.n, in.w2, g, r);
  loss.w2 = std::move(second.w);
  loss.b2 = reduced(std::move(second.b), r);

  Uncertain da{linear_backward(s.second(), m.n.value, in.w2, g.value).x, std::move(second.x.error)};
  store(da, r);
  if (s.normalised) {
    NormBackward norm = norm_backward(s, in, m.a, da, r);
    loss.gamma = std::move(norm.gamma);
    da = std::move(norm.da);
  }
  const Uncertain dz = activation_backward(s, m.z, da, r);
  LinearLosses first = linear_backward_loss(s.first(), certain(in.x), in.w1, dz, r);
  loss.w1 = std::move(first.w);
  loss.b1 = std::move(first.b);
  loss.x = reduced(std::move(first.x), r);
  return loss;
}

MlpLosses mlp_backward_loss(const MlpShape& s, const MlpInputs& in, In g, const Rounding& r) {
  return mlp_backward_loss(s, in, certain(g), r);
}

}  // namespace shardproof::reference
