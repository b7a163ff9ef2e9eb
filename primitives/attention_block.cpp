#include "primitives/attention_block.hpp"

#include "primitives/gemm.hpp"
#include "primitives/rotary_context.hpp"

namespace shardproof::primitives {
namespace {

// x, w_qkv, [b_qkv], w_out, [b_out].
struct Arguments {
  View x, w_qkv, b_qkv, w_out, b_out;

  Arguments() = default;
  Arguments(const Case& line, std::span<const View> v) {
    size_t next = 0;
    x = v[next++], w_qkv = v[next++];
    if (line.on("bias")) b_qkv = v[next++];
    w_out = v[next++];
    if (line.on("bias")) b_out = v[next++];
  }
};

struct AttentionBlockSaved : Saved {
  Arguments in;
  Kept z, q, k, o;
  std::unique_ptr<Kernel> core;
  std::unique_ptr<Saved> attended;
};

// Columns [first, first + heads d) of the last dim as [.., heads, d].
View as_heads(const View& z, int64_t first, int64_t heads, int64_t dim) {
  View part = z.narrow(last(z), first, heads * dim);
  const int64_t stride = part.strides.back();
  part.shape.back() = heads, part.strides.back() = dim * stride;
  part.shape.push_back(dim), part.strides.push_back(stride);
  return part;
}

std::vector<int64_t> shape_of_statistics(const View& q) {
  return {q.shape.begin(), q.shape.end() - 1};
}

bool in_single(const Parallel& p) { return p.accumulate != DType::f64; }
double base_of(const Case& line) { return number_of(line, "base", 10000); }

}  // namespace

std::vector<Axis> axes_of_weights(const Case& line) {
  std::vector<Axis> axes;
  if (line.text("reduce") == "tp") return axes;
  for (Axis a : {Axis::cp, Axis::dp})
    if (line.ranks(a) > 1) axes.push_back(a);
  return axes;
}

std::optional<Rejected> refused_attention_block(const Case& line) {
  if (auto refused = refused_attention(line)) return refused;
  const int64_t d = line.at("head_dim"), tp = line.ranks(Axis::tp);
  if (d % 2) return Rejected("an even head_dim", std::to_string(d), "features are turned in pairs");
  const ContextLine c(line);
  const int64_t hidden = line.at("hidden"),
                columns = (line.at("heads") + 2 * line.at("kv_heads")) * d;
  if (auto refused = first_refusal(uncountable({c.rows, c.batch * line.ranks(Axis::dp), hidden}),
                                   uncountable({columns, hidden})))
    return refused;
  const int64_t own = c.rows / c.ranks;
  if (line.on("sp") && own % tp)
    return Rejected(
        "rows of a cp rank divisible by tp = " + std::to_string(tp) + " under sp",
        std::to_string(c.rows) + " rows, padding included, over cp=" + std::to_string(c.ranks),
        "choose other lengths: tp cuts what cp has left");
  return {};
}

AttentionBlock::Heads AttentionBlock::heads_of(const Case& line, const View& z) const {
  const int64_t tp = line.ranks(Axis::tp), d = line.at("head_dim"), n = line.at("heads") / tp,
                g = line.at("kv_heads") / tp;
  return {as_heads(z, 0, n, d), as_heads(z, n * d, g, d), as_heads(z, (n + g) * d, g, d)};
}

std::unique_ptr<Kernel> AttentionBlock::core_of(const Case& line) const {
  if (line.text("core") == "ring") return std::make_unique<AttentionRing>();
  return std::make_unique<AttentionAllGather>();
}

std::unique_ptr<Saved> AttentionBlock::attend(Rank& rank, Kernel& core, std::span<const View> in,
                                              std::span<const View> out) {
  return core.forward(rank, in, out);
}

std::vector<int64_t> AttentionBlock::positions(Parallel& p) const {
  std::vector<int64_t> list;
  for (const Label& label :
       AttentionCore().queries(ContextLine(p.rank.line()), p.rank.coordinate(Axis::cp)))
    list.push_back(label.position);
  return list;
}

std::vector<Axis> AttentionBlock::weights_summed_over(const Case& line) const {
  return axes_of_weights(line);
}
std::vector<Axis> AttentionBlock::bias_summed_over(const Case& line) const {
  return axes_of_tokens(line);
}

void AttentionBlock::sum_gradients(Parallel& p, const Parts& parts, const std::vector<Axis>& axes) {
  coalesced_all_reduce(p, parts, axes);
}

std::unique_ptr<Saved> AttentionBlock::forward(Rank& rank, std::span<const View> inputs,
                                               std::span<const View> outputs) {
  const Case& line = rank.line();
  if (auto refused = refused_attention_block(line)) throw *refused;
  Parallel p(rank);
  auto saved = std::make_unique<AttentionBlockSaved>();
  const Arguments& in = saved->in = Arguments(line, inputs);
  auto shape = with_extent(in.x.shape, 0, in.x.shape[0] * (p.sp ? p.tp.size() : 1));
  shape.back() = in.w_qkv.shape[0];
  saved->z = Kept(p.storage, shape);
  up_.forward(p, in.x, in.w_qkv, in.b_qkv, saved->z.view());

  const Heads z = heads_of(line, saved->z.view());
  saved->q = Kept(p.storage, z.q.shape);
  saved->k = Kept(p.storage, z.k.shape);
  shape.back() = in.w_out.shape[1];
  saved->o = Kept(p.storage, shape);
  const auto places = positions(p);
  turn(z.q, places, base_of(line), 1, in_single(p), saved->q.view());
  turn(z.k, places, base_of(line), 1, in_single(p), saved->k.view());

  saved->core = core_of(line);
  const View o = as_heads(saved->o.view(), 0, z.q.shape[z.q.shape.size() - 2], z.q.shape.back()),
             lse = p.workspace(p.storage == DType::f64 ? DType::f64 : DType::f32,
                               shape_of_statistics(z.q));
  const View qkv[] = {saved->q.view(), saved->k.view(), z.v}, results[] = {o, lse};
  saved->attended = attend(rank, *saved->core, qkv, results);
  down_.forward(p, saved->o.view(), in.w_out, in.b_out, outputs[0]);
  return saved;
}

void AttentionBlock::backward(Rank& rank, Saved& saved, std::span<const View> cotangents,
                              std::span<const View> gradients) {
  Parallel p(rank);
  into_running_sums(
      p, gradients, [&](auto own) { gradients_of(p, saved, cotangents[0], own); }, add_into);
}

void AttentionBlock::gradients_of(Parallel& p, Saved& state, const View& g,
                                  std::span<const View> gradients) {
  const Case& line = p.rank.line();
  auto& saved = static_cast<AttentionBlockSaved&>(state);
  const Arguments& in = saved.in;
  const Arguments d(line, gradients);
  Parts weights, bias;
  auto part_of = [&](Parts& parts, const View& gradient) {
    if (!gradient.data) return View{};
    parts.push_back({partial_like(p, gradient), gradient});
    return parts.back().partial;
  };
  const View dw_qkv = part_of(weights, d.w_qkv), db_qkv = part_of(weights, d.b_qkv),
             dw_out = part_of(weights, d.w_out), db_out = part_of(bias, d.b_out);
  auto like = [&](const View& v) { return p.workspace(p.storage, v.shape); };

  const View o = saved.o.view(), go = like(o);
  down_.backward(p, o, in.w_out, g, go, dw_out, View{});
  if (db_out.data) column_sums(g, db_out, p.accumulate);

  const View q = saved.q.view(), k = saved.k.view(), z = saved.z.view();
  const View dq = like(q), dk = like(k), dz = like(z),
             no_lse = p.workspace(DType::f64, shape_of_statistics(q));
  set_zero(no_lse);
  const Heads into = heads_of(line, dz);
  const View cotangents[] = {as_heads(go, 0, q.shape[q.shape.size() - 2], q.shape.back()), no_lse},
             of_core[] = {dq, dk, into.v};
  saved.core->backward(p.rank, *saved.attended, cotangents, of_core);
  const auto places = positions(p);
  turn(dq, places, base_of(line), sense_of_backward(), in_single(p), into.q);
  turn(dk, places, base_of(line), sense_of_backward(), in_single(p), into.k);

  up_.backward(p, in.x, in.w_qkv, dz, d.x, dw_qkv, db_qkv);
  sum_gradients(p, weights, weights_summed_over(line));
  sum_gradients(p, bias, bias_summed_over(line));
}

}  // namespace shardproof::primitives
