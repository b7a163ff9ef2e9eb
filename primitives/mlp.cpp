#include "primitives/mlp.hpp"

#include "primitives/activation.hpp"
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
  Buffer z, inverse_rms;
};

template <class T>
std::vector<T> read(const View& v) {
  const std::vector<double> d = to_doubles(v);
  return std::vector<T>(d.begin(), d.end());
}
template <class T>
void write(const std::vector<T>& values, const View& v) {
  fill_from(v, std::vector<double>(values.begin(), values.end()));
}

// Where gate and up of element (t, j) stand in the rows of Z.
struct Gated {
  int64_t columns;
  size_t gate(int64_t t, int64_t j) const { return size_t(2 * t * columns + j); }
  size_t up(int64_t t, int64_t j) const { return gate(t, j) + size_t(columns); }
};

template <class T>
std::vector<T> activated(const Case& line, Activation act, const std::vector<T>& z, int64_t rows,
                         int64_t columns) {
  std::vector<T> a(size_t(rows * columns));
  if (line.text("activation") != "swiglu") {
    for (size_t i = 0; i < a.size(); ++i) a[i] = activate(act, z[i]);
    return a;
  }
  const Gated at{columns};
  for (int64_t t = 0; t < rows; ++t)
    for (int64_t j = 0; j < columns; ++j)
      a[size_t(t * columns + j)] = activate(act, z[at.gate(t, j)]) * z[at.up(t, j)];
  return a;
}

template <class T>
std::vector<T> activated_backward(const Case& line, Activation act, const std::vector<T>& z,
                                  const std::vector<T>& da, int64_t rows, int64_t columns) {
  std::vector<T> dz(z.size());
  if (line.text("activation") != "swiglu") {
    for (size_t i = 0; i < dz.size(); ++i) dz[i] = da[i] * slope(act, z[i]);
    return dz;
  }
  const Gated at{columns};
  for (int64_t t = 0; t < rows; ++t)
    for (int64_t j = 0; j < columns; ++j) {
      const T d = da[size_t(t * columns + j)];
      dz[at.gate(t, j)] = d * z[at.up(t, j)] * slope(act, z[at.gate(t, j)]);
      dz[at.up(t, j)] = d * activate(act, z[at.gate(t, j)]);
    }
  return dz;
}

template <class T>
void scale_rows(std::vector<T>& a, const std::vector<T>& by_row, const std::vector<T>& by_column) {
  const size_t columns = by_column.size();
  for (size_t i = 0; i < a.size(); ++i) a[i] *= by_row[i / columns] * by_column[i % columns];
}

int64_t rows_of(const View& v) { return v.elements() / v.shape.back(); }

}  // namespace

void Mlp::mean_over_ffn(Parallel& p, const View& own_sums, int64_t own_columns, const View& means,
                        Phase) {
  p.tp.all_reduce(own_sums, means);
  std::vector<double> m = to_doubles(means);
  for (double& value : m) value /= double(own_columns * p.tp.size());
  fill_from(means, m);
}

Activation Mlp::pointwise_of(const Case& line) const { return pointwise(line.text("activation")); }

std::vector<int64_t> Mlp::own_rows(const Case& line, int64_t rows, int p, int r) const {
  return rows_of_line(line, rows, p, r);
}

// N = A, or gamma A / rms with rms^2 = mean A^2 + eps over the FFN dim of all ranks.
template <class T>
void Mlp::between(Parallel& p, const View& z, const View& gamma, const View& n,
                  const View& inverse_rms) {
  const int64_t rows = rows_of(n), columns = n.shape.back();
  std::vector<T> a =
      activated(p.rank.line(), pointwise_of(p.rank.line()), read<T>(z), rows, columns);
  if (!gamma.data) return write(a, n);

  std::vector<T> squares(static_cast<size_t>(rows));
  for (size_t i = 0; i < a.size(); ++i) squares[i / size_t(columns)] += a[i] * a[i];
  const View own = p.workspace(p.accumulate, {rows}), means = p.workspace(p.accumulate, {rows});
  write(squares, own);
  mean_over_ffn(p, own, columns, means, Phase::forward);
  std::vector<T> inverse = read<T>(means);
  for (T& v : inverse) v = T(1) / std::sqrt(v + T(eps));
  write(inverse, inverse_rms);

  scale_rows(a, inverse, read<T>(gamma));
  write(a, n);
}

// N again, from Z and the saved 1/rms: no rank is asked.
template <class T>
void Mlp::recompute(Parallel& p, const View& z, const View& gamma, const View& inverse_rms,
                    const View& n) {
  std::vector<T> a =
      activated(p.rank.line(), pointwise_of(p.rank.line()), read<T>(z), rows_of(n), n.shape.back());
  if (gamma.data) scale_rows(a, read<T>(inverse_rms), read<T>(gamma));
  write(a, n);
}

// With t = gamma dN and xhat = A / rms: dA = (t - xhat mean(t xhat)) / rms, the mean over all
// ranks' columns; dgamma = sum over tokens of dN xhat, own columns.
template <class T>
void Mlp::between_backward(Parallel& p, const View& z, const View& gamma, const View& inverse_rms,
                           const View& dn, const View& dz, const View& dgamma) {
  const int64_t rows = rows_of(dn), columns = dn.shape.back();
  const std::vector<T> values = read<T>(z);
  std::vector<T> da = read<T>(dn);
  if (gamma.data) {
    const size_t f = size_t(columns);
    const std::vector<T> inverse = read<T>(inverse_rms), weight = read<T>(gamma);
    std::vector<T> xhat =
        activated(p.rank.line(), pointwise_of(p.rank.line()), values, rows, columns);
    std::vector<T> along(static_cast<size_t>(rows)), dweight(f);
    for (size_t i = 0; i < da.size(); ++i) {
      xhat[i] *= inverse[i / f];
      dweight[i % f] += da[i] * xhat[i];
      da[i] *= weight[i % f];
      along[i / f] += da[i] * xhat[i];
    }
    const View own = p.workspace(p.accumulate, {rows}), means = p.workspace(p.accumulate, {rows});
    write(along, own);
    mean_over_ffn(p, own, columns, means, Phase::backward);
    const std::vector<T> mean = read<T>(means);
    for (size_t i = 0; i < da.size(); ++i) da[i] = (da[i] - xhat[i] * mean[i / f]) * inverse[i / f];
    if (dgamma.data) write(dweight, dgamma);
  }
  write(activated_backward(p.rank.line(), pointwise_of(p.rank.line()), values, da, rows, columns),
        dz);
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
  saved->z = Buffer(p.storage, with_extent(whole, last(in.x), w1.shape[0]));
  saved->inverse_rms = Buffer(p.accumulate, {product(whole) / whole.back()});
  first_.forward(p, in.x, w1, b1, saved->z.view());

  const View n = p.workspace(p.storage, with_extent(whole, last(in.x), in.w2.shape[1]));
  if (p.accumulate == DType::f64)
    between<double>(p, saved->z.view(), in.gamma, n, saved->inverse_rms.view());
  else
    between<float>(p, saved->z.view(), in.gamma, n, saved->inverse_rms.view());
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
  const bool wide = p.accumulate == DType::f64;

  const auto shape = with_extent(z.shape, last(z), in.w2.shape[1]);
  const View n = p.workspace(p.storage, shape), dn = p.workspace(p.storage, shape);
  wide ? recompute<double>(p, z, in.gamma, inverse, n)
       : recompute<float>(p, z, in.gamma, inverse, n);
  second_.backward(p, n, in.w2, cotangents[0], dn, d.w2, d.b2);

  const View dz = p.workspace(p.storage, z.shape);
  wide ? between_backward<double>(p, z, in.gamma, inverse, dn, dz, d.gamma)
       : between_backward<float>(p, z, in.gamma, inverse, dn, dz, d.gamma);

  if (!line.on("whole_weight")) return first_.backward(p, in.x, in.w1, dz, d.x, d.w1, d.b1);
  const auto rows = own_rows(line, in.w1.shape[0], p.tp.size(), p.tp.rank());
  const View w1 = take_rows(p, in.w1, rows), dw1 = p.workspace(d.w1.dtype, w1.shape);
  const View db1 = d.b1.data ? p.workspace(d.b1.dtype, {w1.shape[0]}) : View{};
  first_.backward(p, in.x, w1, dz, d.x, dw1, db1);
  put_rows(dw1, rows, d.w1);
  if (d.b1.data) put_rows(db1, rows, d.b1);
}

}  // namespace shardproof::primitives
