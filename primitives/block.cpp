#include "primitives/block.hpp"

#include "primitives/gemm.hpp"
#include "primitives/philox.hpp"

namespace shardproof::primitives {
namespace {

// x, norm1.gamma, [norm1.beta], w1, b1, w2, b2, norm2.gamma, [norm2.beta].
struct Arguments {
  View x, gamma1, beta1, w1, b1, w2, b2, gamma2, beta2;

  Arguments() = default;
  Arguments(const Case& line, std::span<const View> v) {
    const bool layer = line.text("norm") == "layer";
    size_t next = 0;
    x = v[next++], gamma1 = v[next++];
    if (layer) beta1 = v[next++];
    w1 = v[next++], b1 = v[next++], w2 = v[next++], b2 = v[next++], gamma2 = v[next++];
    if (layer) beta2 = v[next++];
  }
};

struct BlockSaved : Saved {
  Arguments in;
  Buffer u, z, r, statistics1, statistics2;
};

int64_t rows_of(const View& v) { return v.elements() / v.shape.back(); }

Norm norm_of(const Case& line) { return Norm(line.text("norm") == "layer"); }

// out = a + b o c, each operation rounded to the accumulation type; without a, b o c.
template <class T>
void combine(const View* a, const View& b, const std::vector<double>& c, const View& out) {
  std::vector<double> v = to_doubles(b);
  const std::vector<double> other = a ? to_doubles(*a) : std::vector<double>();
  for (size_t i = 0; i < v.size(); ++i) {
    const T product = T(v[i]) * T(c[i]);
    v[i] = a ? T(T(other[i]) + product) : product;
  }
  fill_from(out, v);
}
void combine(const Parallel& p, const View* a, const View& b, const std::vector<double>& c,
             const View& out) {
  p.accumulate == DType::f64 ? combine<double>(a, b, c, out) : combine<float>(a, b, c, out);
}
void add(const Parallel& p, const View& a, const View& b, const View& out) {
  combine(p, &a, b, std::vector<double>(size_t(b.elements()), 1.0), out);
}

template <class T, class Function>
void each(const View& x, const View& y, Function f) {
  std::vector<double> v = to_doubles(x);
  for (double& value : v) value = f(T(value));
  fill_from(y, v);
}

template <class T>
void activated(Activation act, const View& z, const View& a) {
  each<T>(z, a, [&](T x) { return activate(act, x); });
}
template <class T>
void activated_backward(Activation act, const View& z, const View& da, const View& dz) {
  const std::vector<double> g = to_doubles(da);
  size_t i = 0;
  each<T>(z, dz, [&](T x) { return T(g[i++]) * slope(act, x); });
}

}  // namespace

double keep_of(const Case& line) { return 1 - std::stod(line.text("dropout")); }

std::vector<Axis> axes_of_block(const Case& line) {
  if (line.ranks(Axis::tp) == 1 || !line.on("sp")) return {};
  return {Axis::tp};
}

std::optional<Rejected> refused_block(const Case& line) {
  if (auto refused = refused_own_tokens(line)) return refused;
  const int64_t p = line.ranks(Axis::tp);
  if (line.at("ffn") % p == 0) return {};
  return Rejected("ffn divisible by tp = " + std::to_string(p), "ffn=" + line.text("ffn"),
                  "choose a multiple of " + std::to_string(p));
}

std::vector<Axis> Block::summed_over(const Case& line) const { return axes_of_block(line); }

void Block::sum_gradients(Parallel& p, const Parts& parts, const std::vector<Axis>& axes) {
  coalesced_all_reduce(p, parts, axes);
}

// Tokens are cut over dp first, then cp, then tp.
uint64_t Block::first_index(Parallel& p, int64_t own_elements) const {
  const Mesh& mesh = p.rank.mesh();
  const int64_t outer =
      int64_t(p.rank.coordinate(Axis::dp)) * mesh.size(Axis::cp) + p.rank.coordinate(Axis::cp);
  const int64_t place = p.sp ? outer * p.tp.size() + p.tp.rank() : outer;
  return uint64_t(place * own_elements);
}

// 1/keep with probability keep, else 0.
std::vector<double> Block::dropout(Parallel& p, int64_t elements, uint32_t site) const {
  const Case& line = p.rank.line();
  const double keep = keep_of(line), limit = keep * 0x1p32;
  const uint64_t first = first_index(p, elements);
  std::vector<double> factor(size_t(elements), 1.0);
  if (keep == 1) return factor;
  for (size_t i = 0; i < factor.size(); ++i)
    factor[i] =
        word_of(line.seed(), first + i, site, uint32_t(line.at("draw"))) < limit ? 1 / keep : 0;
  return factor;
}

std::unique_ptr<Saved> Block::forward(Rank& rank, std::span<const View> inputs,
                                      std::span<const View> outputs) {
  if (auto refused = refused_block(rank.line())) throw *refused;
  Parallel p(rank);
  const Case& line = rank.line();
  auto saved = std::make_unique<BlockSaved>();
  const Arguments& in = saved->in = Arguments(line, inputs);
  const int64_t rows = rows_of(in.x);
  auto whole = with_extent(in.x.shape, 0, in.x.shape[0] * (p.sp ? p.tp.size() : 1));
  whole.back() = in.w1.shape[0];
  saved->u = Buffer(p.storage, in.x.shape);
  saved->r = Buffer(p.storage, in.x.shape);
  saved->z = Buffer(p.storage, whole);
  saved->statistics1 = Buffer(p.accumulate, {rows, 2});
  saved->statistics2 = Buffer(p.accumulate, {rows, 2});
  const View u = saved->u.view(), z = saved->z.view(), r = saved->r.view();

  norm_of(line).forward(p, in.x, in.gamma1, in.beta1, u, saved->statistics1.view());
  up_.forward(p, u, in.w1, in.b1, z);
  const View a = p.workspace(p.storage, whole), m = p.workspace(p.storage, in.x.shape);
  const Activation act = pointwise(line.text("activation"));
  p.accumulate == DType::f64 ? activated<double>(act, z, a) : activated<float>(act, z, a);
  down_.forward(p, a, in.w2, in.b2, m);
  combine(p, &in.x, m, dropout(p, m.elements(), 1), r);

  const View n = p.workspace(p.storage, in.x.shape);
  norm_of(line).forward(p, r, in.gamma2, in.beta2, n, saved->statistics2.view());
  combine(p, &r, n, dropout(p, n.elements(), 2), outputs[0]);
  return saved;
}

void Block::backward(Rank& rank, Saved& saved, std::span<const View> cotangents,
                     std::span<const View> gradients) {
  Parallel p(rank);
  into_running_sums(
      p, gradients, [&](auto own) { gradients_of(p, saved, cotangents[0], own); }, add_into);
}

void Block::gradients_of(Parallel& p, Saved& state, const View& g,
                         std::span<const View> gradients) {
  const Case& line = p.rank.line();
  const auto& saved = static_cast<const BlockSaved&>(state);
  const Arguments& in = saved.in;
  const Arguments d(line, gradients);
  const View u = saved.u.view(), z = saved.z.view(), r = saved.r.view();
  auto like = [&](const View& v) { return p.workspace(p.storage, v.shape); };
  Parts parts;
  auto part_of = [&](const View& gradient) {
    if (!gradient.data) return View{};
    parts.push_back({partial_like(p, gradient), gradient});
    return parts.back().partial;
  };
  const View dgamma1 = part_of(d.gamma1), dbeta1 = part_of(d.beta1), db2 = part_of(d.b2),
             dgamma2 = part_of(d.gamma2), dbeta2 = part_of(d.beta2);

  const View dn = like(g), dr_norm = like(g), dr = like(g), dm = like(g);
  combine(p, nullptr, g, dropout(p, g.elements(), 2), dn);
  norm_of(line).backward(p, r, in.gamma2, saved.statistics2.view(), dn, dr_norm, dgamma2, dbeta2);
  add(p, g, dr_norm, dr);
  combine(p, nullptr, dr, dropout(p, dr.elements(), 1), dm);

  const View a = like(z), da = like(z), dz = like(z), du = like(u);
  const Activation act = pointwise(line.text("activation"));
  const bool wide = p.accumulate == DType::f64;
  wide ? activated<double>(act, z, a) : activated<float>(act, z, a);
  down_.backward(p, a, in.w2, dm, da, d.w2, View{});
  if (db2.data) column_sums(dm, db2, p.accumulate);
  wide ? activated_backward<double>(act, z, da, dz) : activated_backward<float>(act, z, da, dz);
  up_.backward(p, u, in.w1, dz, du, d.w1, d.b1);

  const View dx_norm = like(in.x);
  norm_of(line).backward(p, in.x, in.gamma1, saved.statistics1.view(), du, dx_norm, dgamma1,
                         dbeta1);
  if (d.x.data) add(p, dr, dx_norm, d.x);
  sum_gradients(p, parts, summed_over(line));
}

}  // namespace shardproof::primitives
