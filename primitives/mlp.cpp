#include "primitives/mlp.hpp"

#include "primitives/linear_line.hpp"

namespace shardproof::primitives {
namespace {

// Which argument is which: x, w1, [b1], [gamma], w2, [b2].
struct Arguments {
  View x, w1, b1, gamma, w2, b2;

  Arguments() = default;
  Arguments(const Case& line, std::span<const View> views) {
    size_t next = 0;
    const bool bias = line.on("bias");
    x = views[next++];
    w1 = views[next++];
    if (bias) b1 = views[next++];
    if (line.text("between") != "none") gamma = views[next++];
    w2 = views[next++];
    if (bias) b2 = views[next++];
  }
};

struct MlpSaved : Saved {
  Arguments in;
  Kept z, inverse_rms;
};

int64_t rows_of(const View& v) { return v.elements() / v.shape.back(); }
bool wide(const Parallel& p) { return p.accumulate == DType::f64; }

}  // namespace

void Mlp::mean_over_ffn(Parallel& p, const View& own_sums, int64_t own_columns, const View& means,
                        Phase) {
  all_reduce(p.rank, p.tp, own_sums, means);
  scale(means, means, 1, double(own_columns * p.tp.size()));
}

Activation Mlp::pointwise_of(const Case& line) const { return pointwise(line.text("activation")); }

std::vector<int64_t> Mlp::own_rows(const Case& line, int64_t rows, int p, int r) const {
  return rows_of_line(line, rows, p, r);
}

Gate Mlp::gate_of(Parallel& p, const View& z, int64_t columns) const {
  const Case& line = p.rank.line();
  return {tensor(z), pointwise_of(line), line.text("activation") == "swiglu", columns};
}

// N = A, or gamma A / rms with rms^2 = mean A^2 + eps over the FFN dim of all ranks.
void Mlp::between(Parallel& p, const View& z, const View& gamma, const View& n,
                  const View& inverse_rms) {
  const int64_t rows = rows_of(n), columns = n.shape.back();
  if (gamma.data) {
    const View own = p.workspace(p.accumulate, {rows}), means = p.workspace(p.accumulate, {rows});
    perform(ActivatedSquares{gate_of(p, z, columns), tensor(own), wide(p)}, "sums of squares");
    mean_over_ffn(p, own, columns, means, Phase::forward);
    perform(InverseRoot{tensor(means), tensor(inverse_rms), eps, wide(p)}, "inverse roots");
  }
  recompute(p, z, gamma, inverse_rms, n);
}

// N again, from Z and the saved 1/rms: no rank is asked.
void Mlp::recompute(Parallel& p, const View& z, const View& gamma, const View& inverse_rms,
                    const View& n) {
  perform(Activated{gate_of(p, z, n.shape.back()), tensor(inverse_rms), tensor(gamma), tensor(n),
                    wide(p)},
          "an activation");
}

// With t = gamma dN and xhat = A / rms: dA = (t - xhat mean(t xhat)) / rms, the mean over all
// ranks' columns; dgamma = sum over tokens of dN xhat, own columns.
void Mlp::between_backward(Parallel& p, const View& z, const View& gamma, const View& inverse_rms,
                           const View& dn, const View& dz, const View& dgamma) {
  const int64_t rows = rows_of(dn), columns = dn.shape.back();
  const Gate gate = gate_of(p, z, columns);
  View means;
  if (gamma.data) {
    const View own = p.workspace(p.accumulate, {rows});
    means = p.workspace(p.accumulate, {rows});
    perform(AlongValue{gate, tensor(dn), tensor(gamma), tensor(inverse_rms), tensor(own), wide(p)},
            "sums along rows");
    mean_over_ffn(p, own, columns, means, Phase::backward);
    if (dgamma.data)
      perform(GammaOfGate{gate, tensor(dn), tensor(inverse_rms), tensor(dgamma), wide(p)},
              "the gradient of gamma");
  }
  perform(ActivatedBackward{gate, tensor(dn), tensor(gamma), tensor(inverse_rms), tensor(means),
                            tensor(dz), wide(p)},
          "the gradient of an activation");
}

std::unique_ptr<Saved> Mlp::forward(Rank& rank, std::span<const View> inputs,
                                    std::span<const View> outputs) {
  if (auto refused = refused_mlp(rank.line())) throw *refused;
  Parallel p(rank);
  const Case& line = rank.line();
  auto saved = std::make_unique<MlpSaved>();
  const Arguments& in = saved->in = Arguments(line, inputs);
  const int64_t tokens = in.x.shape[0] * (p.sp ? p.tp.size() : 1);
  const std::vector<int64_t> whole = with_extent(in.x.shape, 0, tokens);

  View w1 = in.w1, b1 = in.b1;
  if (line.on("whole_weight")) {
    const auto rows = own_rows(line, in.w1.shape[0], p.tp.size(), p.tp.rank());
    w1 = take_rows(p, in.w1, rows);
    if (b1.data) b1 = take_rows(p, in.b1, rows);
  }
  saved->z = Kept(p.storage, with_extent(whole, last(in.x), w1.shape[0]));
  saved->inverse_rms = Kept(p.accumulate, {product(whole) / whole.back()});
  first_.forward(p, in.x, w1, b1, saved->z.view());

  const View n = p.workspace(p.storage, with_extent(whole, last(in.x), in.w2.shape[1]));
  between(p, saved->z.view(), in.gamma, n, saved->inverse_rms.view());
  second_.forward(p, n, in.w2, in.b2, outputs[0]);
  return saved;
}

void Mlp::backward(Rank& rank, Saved& state, std::span<const View> cotangents,
                   std::span<const View> gradients) {
  Parallel p(rank);
  into_running_sums(
      p, gradients, [&](auto own) { gradients_of(p, state, cotangents, own); }, add_into);
}

void Mlp::gradients_of(Parallel& p, Saved& state, std::span<const View> cotangents,
                       std::span<const View> gradients) {
  const Case& line = p.rank.line();
  const auto& saved = static_cast<const MlpSaved&>(state);
  const Arguments& in = saved.in;
  const Arguments d(line, gradients);
  const View z = saved.z.view(), inverse = saved.inverse_rms.view();

  const auto shape = with_extent(z.shape, last(z), in.w2.shape[1]);
  const View n = p.workspace(p.storage, shape), dn = p.workspace(p.storage, shape);
  recompute(p, z, in.gamma, inverse, n);
  second_.backward(p, n, in.w2, cotangents[0], dn, d.w2, d.b2);

  const View dz = p.workspace(p.storage, z.shape);
  between_backward(p, z, in.gamma, inverse, dn, dz, d.gamma);

  if (!line.on("whole_weight")) return first_.backward(p, in.x, in.w1, dz, d.x, d.w1, d.b1);
  const auto rows = own_rows(line, in.w1.shape[0], p.tp.size(), p.tp.rank());
  const View w1 = take_rows(p, in.w1, rows), dw1 = p.workspace(d.w1.dtype, w1.shape);
  const View db1 = d.b1.data ? p.workspace(d.b1.dtype, {w1.shape[0]}) : View{};
  first_.backward(p, in.x, w1, dz, d.x, dw1, db1);
  put_rows(dw1, rows, d.w1);
  if (d.b1.data) put_rows(db1, rows, d.b1);
}

}  // namespace shardproof::primitives
