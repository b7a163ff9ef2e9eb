// A gradient with the same mistake in reference and subject: nothing that compares the two can see
// it, a derivative can. The contract is LayerNorm y = gamma (x - mean) / sigma over the rows of a
// token shard, with
//
//   dx = (t - mean(t) - xhat mean(t xhat)) / sigma,  t = gamma dy
//
// and its wrong twin leaves mean(t) out.
#include <algorithm>
#include <cmath>

#include "suites/self/planted.hpp"

namespace shardproof::planted {
namespace {

constexpr double eps = 1e-5;

// One row of n features.
struct Row {
  const double *x, *gamma;
  int64_t n;
  double mean = 0, sigma = 0;

  Row(const double* x_, const double* gamma_, int64_t n_) : x(x_), gamma(gamma_), n(n_) {
    for (int64_t j = 0; j < n; ++j) mean += x[j] / double(n);
    double variance = 0;
    for (int64_t j = 0; j < n; ++j) variance += (x[j] - mean) * (x[j] - mean) / double(n);
    sigma = std::sqrt(variance + eps);
  }
  double xhat(int64_t j) const { return (x[j] - mean) / sigma; }

  void backward(const double* dy, bool with_mean, double* dx, double* dgamma) const {
    double m1 = 0, m2 = 0;
    for (int64_t j = 0; j < n; ++j) {
      m1 += gamma[j] * dy[j] / double(n);
      m2 += gamma[j] * dy[j] * xhat(j) / double(n);
      dgamma[j] += dy[j] * xhat(j);
    }
    for (int64_t j = 0; j < n; ++j)
      dx[j] = (gamma[j] * dy[j] - (with_mean ? m1 : 0) - xhat(j) * m2) / sigma;
  }

  // Rounding, in units of u: each mean is a sum of n terms, |xhat| <= kappa = 2 max|x| / sigma, and
  // an error of the mean reaches xhat through 1 / sigma. Generous by the powers of 1 + kappa.
  double condition() const {
    double largest = 0;
    for (int64_t j = 0; j < n; ++j) largest = std::max(largest, std::abs(x[j]));
    return 1 + 2 * largest / sigma;
  }
  double value_bound(int64_t j) const {
    return double(n + 8) * std::pow(condition(), 2) * std::abs(gamma[j]);
  }
  double gradient_bound(const double* dy) const {
    double largest = 0;
    for (int64_t j = 0; j < n; ++j) largest = std::max(largest, std::abs(gamma[j] * dy[j]));
    return 8 * double(n + 8) * std::pow(condition(), 3) * largest / sigma;
  }
};

class Norm final : public Kernel {
 public:
  explicit Norm(bool with_mean) : with_mean_(with_mean) {}

  std::unique_ptr<Saved> forward(Rank&, std::span<const View> in,
                                 std::span<const View> out) override {
    auto saved = std::make_unique<Inputs>();
    saved->x = in[0], saved->gamma = in[1];
    const std::vector<double> x = to_doubles(in[0]), gamma = to_doubles(in[1]);
    std::vector<double> y(x.size());
    const int64_t n = int64_t(gamma.size());
    for (int64_t t = 0; t * n < int64_t(x.size()); ++t) {
      const Row row(x.data() + t * n, gamma.data(), n);
      for (int64_t j = 0; j < n; ++j) y[size_t(t * n + j)] = gamma[size_t(j)] * row.xhat(j);
    }
    fill_from(out[0], y);
    return saved;
  }

  void backward(Rank&, Saved& state, std::span<const View> cotangents,
                std::span<const View> gradients) override {
    const auto& saved = static_cast<const Inputs&>(state);
    const std::vector<double> x = to_doubles(saved.x), gamma = to_doubles(saved.gamma),
                              dy = to_doubles(cotangents[0]);
    std::vector<double> dx(x.size()), dgamma(gamma.size());
    const int64_t n = int64_t(gamma.size());
    for (int64_t at = 0; at < int64_t(x.size()); at += n)
      Row(x.data() + at, gamma.data(), n)
          .backward(dy.data() + at, with_mean_, dx.data() + at, dgamma.data());
    fill_from(gradients[0], dx);
    fill_from(gradients[1], dgamma);  // of the own tokens: partial, as the type R of gamma asks
  }

 private:
  struct Inputs : Saved {
    View x, gamma;
  };
  bool with_mean_;
};

Contract norm(const Registry& r, const std::string& name, bool with_mean) {
  Contract c = r.contract("mapping_copy");
  c.name = name;
  c.family = "planted";
  c.linear = false;
  c.cases = [](const std::string&) { return std::vector<std::string>{}; };
  c.witnesses.clear();
  c.illegal.clear();
  c.precondition = nullptr;
  c.integer_range = nullptr;
  c.traffic = [](const Case&, const std::string&, int) { return std::vector<Traffic>{}; };
  c.operands = [](const Case& line) {
    const int64_t T = line.at("tokens"), n = line.at("hidden");
    return std::vector<Operand>{{"x", Operand::input, {T, n}, {{Axis::tp, S(0)}}},
                                {"gamma", Operand::parameter, {n}, {{Axis::tp, R()}}},
                                {"y", Operand::output, {T, n}, {{Axis::tp, S(0)}}}};
  };
  c.forward = [](const Case&, std::span<const Whole> in, std::vector<Gauge>* gauges) {
    const int64_t n = in[1].shape[0];
    Whole y{in[0].shape, std::vector<double>(in[0].value.size())};
    Gauge g;
    g.bound.resize(y.value.size());
    for (size_t i = 0; i < y.value.size(); ++i) {
      const int64_t j = int64_t(i) % n;
      const Row row(in[0].value.data() + int64_t(i) - j, in[1].value.data(), n);
      y.value[i] = in[1].value[size_t(j)] * row.xhat(j);
      g.bound[i] = row.value_bound(j);
    }
    if (gauges) *gauges = {g};
    return std::vector<Whole>{y};
  };
  c.backward = [with_mean](const Case&, std::span<const Whole> in, std::span<const Whole> cot,
                           std::vector<Gauge>* gauges) {
    const int64_t n = in[1].shape[0];
    std::vector<Whole> d{{in[0].shape, std::vector<double>(in[0].value.size())},
                         {in[1].shape, std::vector<double>(in[1].value.size())}};
    Gauge gx, ggamma;
    gx.bound.resize(d[0].value.size());
    ggamma.bound.resize(d[1].value.size());
    for (int64_t at = 0; at < int64_t(d[0].value.size()); at += n) {
      const Row row(in[0].value.data() + at, in[1].value.data(), n);
      const double* dy = cot[0].value.data() + at;
      row.backward(dy, with_mean, d[0].value.data() + at, d[1].value.data());
      for (int64_t j = 0; j < n; ++j) {
        gx.bound[size_t(at + j)] = row.gradient_bound(dy);
        ggamma.bound[size_t(j)] +=
            double(n + 8 + in[0].shape[0]) * std::pow(row.condition(), 2) * std::abs(dy[j]);
      }
    }
    if (gauges) *gauges = {gx, ggamma};
    return d;
  };
  return c;
}

Make make_norm(bool with_mean) {
  return [with_mean] { return std::make_unique<Norm>(with_mean); };
}

// Adds in the second step of two microbatches what it added in the first: on the same data nothing
// would be wrong.
class RepeatsItsFirstStep final : public Kernel {
 public:
  std::unique_ptr<Saved> forward(Rank& rank, std::span<const View> in,
                                 std::span<const View> out) override {
    return healthy_.forward(rank, in, out);
  }

  void backward(Rank& rank, Saved& saved, std::span<const View> cotangents,
                std::span<const View> gradients) override {
    if (!rank.accumulates()) return healthy_.backward(rank, saved, cotangents, gradients);
    const std::vector<double> before = to_doubles(gradients[1]);
    healthy_.backward(rank, saved, cotangents, gradients);
    std::vector<double> dw = to_doubles(gradients[1]);
    if (first_step_.size() < 2) {
      for (size_t i = 0; i < dw.size(); ++i) dw[i] -= before[i];
      return first_step_.push_back(dw);
    }
    dw = before;
    for (size_t i = 0; i < dw.size(); ++i) dw[i] += first_step_[repeated_ % 2][i];
    ++repeated_;
    fill_from(gradients[1], dw);
  }

 private:
  PlainColumn healthy_;
  std::vector<std::vector<double>> first_step_;  // what each microbatch adds to dW
  size_t repeated_ = 0;
};

}  // namespace

void add_norm_contracts(Registry& r) {
  for (const bool with_mean : {true, false}) {
    const std::string name = with_mean ? "planted_norm" : "planted_norm_without_mean";
    r.add(norm(r, name, with_mean));
    r.add(Subject{"", name, make_norm(with_mean), {}});
  }
}

std::vector<Plant> gradients() {
  const std::string keys = " tp=2 tokens=6 hidden=5 fill=normal";
  return {{"shared_wrong_gradient",
           "planted_norm_without_mean" + keys,
           nullptr,
           {{"gradcheck",
             Verdict::failed,
             -1,
             "along a random direction of x",
             {"not the derivative"}}},
           {},
           true,
           1,
           "planted_norm" + keys},
          {"first_step_repeated",
           "linear_column tp=2 microbatches=2",
           [] { return std::make_unique<RepeatsItsFirstStep>(); },
           {{"accumulate", Verdict::failed, -1, "", {"in step 2"}}, {"gradient", Verdict::passed}},
           {}}};
}

}  // namespace shardproof::planted
