#include "primitives/block.hpp"

#include "primitives/gate.hpp"
#include "primitives/gemm.hpp"
#include "primitives/line.hpp"
#include "primitives/pointwise.hpp"

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
  Kept u, z, r, statistics1, statistics2;
};

int64_t rows_of(const View& v) { return v.elements() / v.shape.back(); }

Norm norm_of(const Case& line) { return Norm(line.text("norm") == "layer"); }

bool wide(const Parallel& p) { return p.accumulate == DType::f64; }

Gate gate_of(const Parallel& p, const View& z) {
  return {tensor(z), pointwise(p.rank.line().text("activation")), false, z.shape.back()};
}
void activated(const Parallel& p, const View& z, const View& a) {
  perform(Activated{gate_of(p, z), Tensor{}, Tensor{}, tensor(a), wide(p)}, "an activation");
}
void activated_backward(const Parallel& p, const View& z, const View& da, const View& dz) {
  perform(ActivatedBackward{gate_of(p, z), tensor(da), Tensor{}, Tensor{}, Tensor{}, tensor(dz),
                            wide(p)},
          "the gradient of an activation");
}

}  // namespace

double keep_of(const Case& line) { return 1 - number_of(line, "dropout"); }

std::vector<Axis> axes_of_block(const Case& line) {
  if (line.ranks(Axis::tp) == 1 || !line.on("sp")) return {};
  return {Axis::tp};
}

namespace {

std::optional<Rejected> refused_samples(const Case& line) {
  const int64_t samples = line.at("samples"), m = line.at("microbatches"),
                dp = line.ranks(Axis::dp);
  if (samples == 0) return {};
  if (samples % (m * dp) != 0)
    return Rejected("samples divisible by microbatches x dp = " + std::to_string(m * dp),
                    "samples=" + line.text("samples"),
                    "choose a multiple of " + std::to_string(m * dp));
  if (line.at("tokens") * m != samples)
    return Rejected("samples = tokens x microbatches = " + std::to_string(line.at("tokens") * m),
                    "samples=" + line.text("samples"), "leave one of the two out");
  return {};
}

}  // namespace

std::optional<Rejected> refused_block(const Case& line) {
  if (auto refused = refused_samples(line)) return refused;
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

uint64_t Block::seed_of(Rank& rank) const { return rank.line().seed(); }

// out = a + dropout(b); without a dropout(b).
void Block::dropout(Parallel& p, const View* a, const View& b, uint32_t site,
                    const View& out) const {
  const Case& line = p.rank.line();
  perform(Dropout{a ? tensor(*a) : Tensor{}, tensor(b), tensor(out), keep_of(line), seed_of(p.rank),
                  first_index(p, b.elements()), site, uint32_t(line.at("draw")), wide(p)},
          "dropout");
}
void Block::add(Parallel& p, const View& a, const View& b, const View& out) const {
  perform(Dropout{tensor(a), tensor(b), tensor(out), 1, 0, 0, 0, 0, wide(p)}, "a sum");
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
  saved->u = Kept(p.storage, in.x.shape);
  saved->r = Kept(p.storage, in.x.shape);
  saved->z = Kept(p.storage, whole);
  saved->statistics1 = Kept(p.accumulate, {rows, 2});
  saved->statistics2 = Kept(p.accumulate, {rows, 2});
  const View u = saved->u.view(), z = saved->z.view(), r = saved->r.view();

  norm_of(line).forward(p, in.x, in.gamma1, in.beta1, u, saved->statistics1.view());
  up_.forward(p, u, in.w1, in.b1, z);
  const View a = p.workspace(p.storage, whole), m = p.workspace(p.storage, in.x.shape);
  activated(p, z, a);
  down_.forward(p, a, in.w2, in.b2, m);
  dropout(p, &in.x, m, 1, r);

  const View n = p.workspace(p.storage, in.x.shape);
  norm_of(line).forward(p, r, in.gamma2, in.beta2, n, saved->statistics2.view());
  dropout(p, &r, n, 2, outputs[0]);
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
  dropout(p, nullptr, g, 2, dn);
  norm_of(line).backward(p, r, in.gamma2, saved.statistics2.view(), dn, dr_norm, dgamma2, dbeta2);
  add(p, g, dr_norm, dr);
  dropout(p, nullptr, dr, 1, dm);

  const View a = like(z), da = like(z), dz = like(z), du = like(u);
  activated(p, z, a);
  down_.backward(p, a, in.w2, dm, da, d.w2, View{});
  if (db2.data) column_sums(dm, db2, p.accumulate);
  activated_backward(p, z, da, dz);
  up_.backward(p, u, in.w1, dz, du, d.w1, d.b1);

  const View dx_norm = like(in.x);
  norm_of(line).backward(p, in.x, in.gamma1, saved.statistics1.view(), du, dx_norm, dgamma1,
                         dbeta1);
  if (d.x.data) add(p, dr, dx_norm, d.x);
  sum_gradients(p, parts, summed_over(line));
}

}  // namespace shardproof::primitives
