// The norm family: layer norm and RMS norm of a rank's own tokens. The rows are local; the
// gradients of gamma and beta are sums over all tokens, summed over the ranks that cut them.
#include <algorithm>

#include "fixtures/sharding.hpp"
#include "oracle/registry.hpp"
#include "primitives/norm_sequence.hpp"
#include "reference/norm.hpp"
#include "suites/ours.hpp"
#include "suites/reading.hpp"
#include "suites/replicated.hpp"

namespace shardproof {
namespace {

using namespace linears;
using namespace replicated;

bool centred(const Case& c) { return c.text("norm") == "layer"; }
reference::NormShape shape_of(const Case& c) {
  return {c.at("hidden"), reading::norm_eps, centred(c), !offset_data(c)};
}

std::vector<Operand> operands(const Case& c) {
  const auto x = token_shape(c, c.at("hidden"));
  const Layout tokens = tokens_on(tokens_on_tp(c)), parameter = parameter_of_tokens(c);
  std::vector<Operand> list{{"x", Operand::input, x, tokens, true, last(x)},
                            {"gamma", Operand::parameter, {c.at("hidden")}, parameter}};
  if (centred(c)) list.push_back({"beta", Operand::parameter, {c.at("hidden")}, parameter});
  list.push_back({"y", Operand::output, x, tokens, true, 0});
  return list;
}

reference::In beta_of(std::span<const Whole> in) {
  return in.size() > 2 ? reference::In(in[2].value) : reference::In();
}

std::vector<Whole> forward(const Case& c, std::span<const Whole> in, std::vector<Gauge>* gauges) {
  const auto s = shape_of(c);
  if (gauges) {
    const Precision p = precision_of(c, Declared{});
    *gauges = {gauge_of(reference::norm(s, reference::certain(in[0].value), in[1].value,
                                        beta_of(in), rounding_of(c, p, 1)),
                        p)};
  }
  return listed(whole(
      in[0].shape,
      centred(c) ? reference::layer_norm(in[0].value, in[1].value, beta_of(in), s.width, s.eps)
                 : reference::rms_norm(in[0].value, in[1].value, s.width, s.eps)));
}

std::vector<Whole> backward(const Case& c, std::span<const Whole> in, std::span<const Whole> cot,
                            std::vector<Gauge>* gauges) {
  const auto s = shape_of(c);
  auto d =
      centred(c)
          ? reference::layer_norm_backward(in[0].value, in[1].value, cot[0].value, s.width, s.eps)
          : reference::rms_norm_backward(in[0].value, in[1].value, cot[0].value, s.width, s.eps);
  auto out = listed(whole(in[0].shape, std::move(d.x)), whole(in[1].shape, std::move(d.gamma)));
  if (centred(c)) out.push_back(whole(in[2].shape, std::move(d.beta)));
  if (!gauges) return out;
  const Precision p = precision_of(c, Declared{});
  const auto r = rounding_of(c, p, ranks_of(c, reading::axes_of_tokens(c)));
  const auto loss = reference::norm_backward_loss(s, reference::certain(in[0].value), in[1].value,
                                                  reference::certain(cot[0].value), r);
  *gauges = {gauge_of(loss.x, p), gauge_of(reference::reduced(loss.gamma, r), p)};
  if (centred(c)) gauges->push_back(gauge_of(reference::reduced(loss.beta, r), p));
  return out;
}

std::vector<Traffic> traffic(const Case& c, const std::string&, int) {
  return coalesced(c, reading::axes_of_tokens(c), c.at("hidden") * (centred(c) ? 2 : 1));
}

std::vector<Key> keys() {
  std::vector<Key> list = token_keys();
  list.push_back(extent("hidden", "10", 1, "values of a row"));
  list.push_back(norm_key());
  list.push_back(sp_key());
  list.push_back(reduce_key());
  list.push_back(microbatches_key());
  return list;
}

std::vector<std::string> cases(const std::string& tier) {
  const auto smoke = together(
      {crossed({"norm_sequence"},
               {"tp=2 sp=on", "tp=4 sp=on", "tp=4", "tp=2 sp=on norm=rms", "tp=4 sp=on norm=rms",
                "tp=2 norm=rms", "tp=2 sp=on dtype=bf16", "tp=4 sp=on dtype=f32",
                "tp=2 sp=on dtype=f32 fill=offset", "cp=2", "tp=2 dp=2 sp=on",
                "tp=2 dp=2 sp=on reduce=tp", "tp=2 sp=on microbatches=2"})});
  if (tier == "smoke") return smoke;
  const std::vector<std::string> norms{"", "norm=rms"};
  const auto ci = together(
      {smoke,
       crossed(crossed({"norm_sequence", "norm_sequence tp=2", "norm_sequence tp=3",
                        "norm_sequence tp=4", "norm_sequence tp=8"},
                       {"", "sp=on"}),
               norms),
       crossed(crossed({"norm_sequence tp=3 sp=on", "norm_sequence tp=8 sp=on"}, norms),
               {"dtype=f32", "dtype=bf16", "dtype=f16", "dtype=bf16 wire=f32", "dtype=f32 acc=f64",
                "fill=large", "fill=cancelling dtype=f32", "fill=offset", "fill=offset dtype=bf16",
                "strides=transposed"}),
       crossed(crossed({"norm_sequence tp=2 cp=2", "norm_sequence tp=2 dp=2",
                        "norm_sequence tp=2 cp=2 dp=2 order=dp,cp,tp", "norm_sequence tp=4 dp=2",
                        "norm_sequence tp=2 dp=4", "norm_sequence cp=4"},
                       {"sp=on", "sp=on reduce=tp"}),
               norms),
       crossed({"norm_sequence tp=2 sp=on"},
               {"seq=8 batch=3", "microbatches=3 dtype=f32", "microbatches=2 dtype=bf16 grad=f32",
                "tokens=48 hidden=33", "hidden=1 norm=rms", "hidden=130", "seq=8 batch=3 norm=rms",
                "hidden=130 dtype=f32 fill=offset"}),
       {"norm_sequence cp=2 dp=2", "norm_sequence tp=2 dp=2 sp=on reduce=tp microbatches=2",
        "norm_sequence tp=2 dp=2 sp=on seq=8 batch=3",
        "norm_sequence tp=4 sp=on strides=expanded"}});
  if (tier != "nightly") return ci;
  return together({ci, crossed(crossed({"norm_sequence tp=5 sp=on tokens=240",
                                        "norm_sequence tp=8 sp=on tokens=240 hidden=130",
                                        "norm_sequence tp=6 sp=on"},
                                       norms),
                               {"dtype=f32", "dtype=bf16", "dtype=f32 seed=2"})});
}

Contract norm_sequence() {
  Contract c;
  c.name = "norm_sequence";
  c.family = "norm";
  c.summary = "layer norm or RMS norm of the own tokens; gradients of gamma and beta summed";
  c.keys = keys();
  c.precondition = primitives::refused_norm;
  c.operands = operands;
  c.forward = forward;
  c.backward = backward;
  c.traffic = traffic;
  c.integer_range = [](const Case&) { return std::optional<int64_t>(); };
  c.cases = cases;
  c.illegal = {"norm_sequence tp=4 sp=on tokens=10",
               "norm_sequence tp=2 seq=8 batch=3 tokens=20",
               "norm_sequence tp=2 sp=on seq=3 batch=2",
               "norm_sequence dp=2 tokens=9",
               "norm_sequence tp=2 batch=2",
               "norm_sequence tp=2 ep=2"};
  c.witnesses = {"norm_sequence tp=2 sp=on", "norm_sequence tp=3 sp=on", "norm_sequence tp=4 sp=on",
                 "norm_sequence tp=2 dp=2 sp=on"};
  return c;
}

}  // namespace

namespace replicated {

Key copies_key() {
  Key rep{"kv_replicas", "", "ranks of tp that hold the same key heads: tp = kv x rep"};
  rep.low = 1, rep.high = 64;
  rep.derive = [](const Case& c) {
    const int64_t p = c.ranks(Axis::tp), g = c.at("kv_heads");
    return std::to_string(g < p && p % g == 0 ? p / g : 1);
  };
  return rep;
}

Key norm_key() {
  Key k{"norm", "layer", "layer: mean and variance; rms: root mean square, no beta; eps 1e-5"};
  k.choices = {"layer", "rms"};
  return k;
}

bool offset_data(const Case& c) { return fill_of(c) == Fill::offset; }

Key sp_key() { return toggle("sp", "off", "sequence parallel: tokens are cut over tp"); }

Key reduce_key() {
  Key k{"reduce", "all", "the layer sums gradients over all axes that cut tokens, or over tp only"};
  k.choices = {"all", "tp"};
  return k;
}

Placement tokens_on_tp(const Case& c) { return c.on("sp") ? S(0) : I(); }

Layout parameter_of_tokens(const Case& c) {
  const Placement outside = c.text("reduce") == "all" ? I() : R();
  return {{Axis::dp, outside}, {Axis::cp, outside}, {Axis::tp, I()}};
}

int64_t ranks_of(const Case& c, const std::vector<Axis>& axes) {
  int64_t ranks = 1;
  for (Axis a : axes) ranks *= c.mesh().size(a);
  return ranks;
}

reference::Rounding rounding_of(const Case& c, const Precision& p, int64_t ranks) {
  reference::Rounding r;
  const double u = unit_roundoff(DType::f64);
  r.accumulate = p.u_acc + u;
  r.store = p.u_out + u;
  r.wire = std::max(p.u_wire, p.u_acc) + u;
  r.tiny = smallest_subnormal(c.dtype()) / 2;
  r.wire_tiny = smallest_subnormal(wire_of(c)) / 2;
  r.ranks = int(ranks);
  return r;
}

Gauge gauge_of(const reference::Loss& loss, const Precision& p) {
  Gauge g;
  g.magnitude = loss.magnitude;
  for (double e : loss.error) g.bound.push_back(e / p.u_acc);
  return g;
}

Gauge gauge_of(const reference::Uncertain& x, const Precision& p) {
  return gauge_of(reference::Loss{x.error, reference::absolute(x.value)}, p);
}

std::vector<Traffic> coalesced(const Case& c, const std::vector<Axis>& axes, int64_t count,
                               bool backward, Reduce reduce) {
  if (axes.empty() || count == 0) return {};
  Traffic t = call(Op::all_reduce, backward, count, wire_of(c));
  t.label = reading::label(axes);
  t.reduce = reduce;
  return {t};
}

Whole denoted(const Operand& o, const Layout& layout, const Mesh& mesh, const Whole& stacked) {
  const auto all = stacked_axes(layout, mesh, false), left = stacked_axes(layout, mesh, true);
  const int64_t elements = product(o.shape);
  Whole sum{denoted_shape(o.shape, layout, mesh), {}};
  sum.value.resize(size_t(product(sum.shape)));
  for (size_t i = 0; i < stacked.value.size(); ++i) {
    int64_t place = int64_t(i) / elements, stack = 0, stride = 1;
    for (size_t a = all.size(); a-- > 0; place /= mesh.size(all[a]))
      if (std::find(left.begin(), left.end(), all[a]) != left.end()) {
        stack += place % mesh.size(all[a]) * stride;
        stride *= mesh.size(all[a]);
      }
    sum.value[size_t(stack * elements) + i % size_t(elements)] += stacked.value[i];
  }
  return sum;
}

Whole absolute(const Whole& w) { return {w.shape, reference::absolute(w.value)}; }
Whole squared(const Whole& w) { return {w.shape, reference::squared(w.value)}; }

}  // namespace replicated

void family_norm(Registry& r) {
  r.add(norm_sequence());
  add_ours<primitives::NormSequence>(r, "norm_sequence");
}

}  // namespace shardproof
