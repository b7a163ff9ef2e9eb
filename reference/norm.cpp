// Both norms are y = gamma xhat with xhat = (x - m) / s; they differ in whether m is the mean or 0.
// With t = gamma g the gradient is  dx = (t - [mean t] - xhat mean(t xhat)) / s, the bracket for
// layer_norm only.
#include "reference/norm.hpp"

#include <cmath>
#include <stdexcept>

namespace shardproof::reference {
namespace {

struct Row {
  double centre = 0, scale = 1;  // m and s
};

Row statistics(const double* x, size_t n, double eps, bool centred) {
  Row r;
  if (centred)
    for (size_t j = 0; j < n; ++j) r.centre += x[j] / double(n);
  double square = 0;
  for (size_t j = 0; j < n; ++j) square += (x[j] - r.centre) * (x[j] - r.centre);
  r.scale = std::sqrt(square / double(n) + eps);
  return r;
}

size_t rows_of(In x, In gamma, int64_t width) {
  if (width <= 0 || x.size() % size_t(width) || int64_t(gamma.size()) != width)
    throw std::invalid_argument("reference norm: x must be rows of as many values as gamma has");
  return x.size() / size_t(width);
}

Values forward(In x, In gamma, In beta, int64_t width, double eps, bool centred) {
  const size_t rows = rows_of(x, gamma, width), n = size_t(width);
  Values y(x.size());
  for (size_t t = 0; t < rows; ++t) {
    const Row r = statistics(&x[t * n], n, eps, centred);
    for (size_t j = 0; j < n; ++j)
      y[t * n + j] = gamma[j] * (x[t * n + j] - r.centre) / r.scale + (beta.empty() ? 0 : beta[j]);
  }
  return y;
}

NormGradients backward(In x, In gamma, In g, int64_t width, double eps, bool centred) {
  const size_t rows = rows_of(x, gamma, width), n = size_t(width);
  NormGradients d{Values(x.size()), Values(n), Values(centred ? n : 0)};
  for (size_t t = 0; t < rows; ++t) {
    const double *xt = &x[t * n], *gt = &g[t * n];
    const Row r = statistics(xt, n, eps, centred);
    double mean = 0, along = 0;  // of t, and of t xhat
    for (size_t j = 0; j < n; ++j) {
      const double xhat = (xt[j] - r.centre) / r.scale, tj = gamma[j] * gt[j];
      mean += tj / double(n);
      along += tj * xhat / double(n);
      d.gamma[j] += gt[j] * xhat;
      if (centred) d.beta[j] += gt[j];
    }
    for (size_t j = 0; j < n; ++j) {
      const double xhat = (xt[j] - r.centre) / r.scale;
      d.x[t * n + j] = (gamma[j] * gt[j] - (centred ? mean : 0) - xhat * along) / r.scale;
    }
  }
  return d;
}

}  // namespace

Values layer_norm(In x, In gamma, In beta, int64_t width, double eps) {
  return forward(x, gamma, beta, width, eps, true);
}
NormGradients layer_norm_backward(In x, In gamma, In g, int64_t width, double eps) {
  return backward(x, gamma, g, width, eps, true);
}
Values rms_norm(In x, In gamma, int64_t width, double eps) {
  return forward(x, gamma, {}, width, eps, false);
}
NormGradients rms_norm_backward(In x, In gamma, In g, int64_t width, double eps) {
  return backward(x, gamma, g, width, eps, false);
}

}  // namespace shardproof::reference
