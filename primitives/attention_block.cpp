#include "primitives/attention_block.hpp"

#include "primitives/gemm.hpp"
#include "primitives/line.hpp"
#include "primitives/rotary_context.hpp"

namespace shardproof::primitives {
namespace {

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

// Columns of q, k and v in those of z.
std::vector<View> parts_of(const Case& line, const View& z) {
  const HeadPlan h(line);
  const int64_t q = h.own_heads() * h.dim, k = h.own_kv() * h.dim;
  return {z.narrow(last(z), 0, q), z.narrow(last(z), q, k), z.narrow(last(z), q + k, k)};
}

bool gathers(const Case& line) { return line.text("form") == "gather"; }

bool in_single(const Parallel& p) { return p.accumulate != DType::f64; }
double base_of(const Case& line) { return number_of(line, "base", 10000); }

}  // namespace

// x, weights, biases, w_out, [b_out]; weights and biases are one each, or those of q, k and v.
struct AttentionBlock::Arguments {
  View x, w_out, b_out;
  std::vector<View> w, b;  // b: views without data where bias=off

  Arguments() = default;
  Arguments(const Case& line, std::span<const View> v) {
    const size_t n = splits_weights(line) ? 3 : 1;
    const bool bias = line.on("bias");
    size_t next = 0;
    x = v[next++];
    for (size_t i = 0; i < n; ++i) w.push_back(v[next++]);
    for (size_t i = 0; i < n; ++i) b.push_back(bias ? v[next++] : View{});
    w_out = v[next++];
    if (bias) b_out = v[next++];
  }
};

struct AttentionBlock::BlockSaved : Saved {
  Arguments in;
  Kept z, q, k, o;
  std::unique_ptr<Kernel> core;
  std::unique_ptr<Saved> attended;
};

bool splits_weights(const Case& line) { return copies_of_keys(line) > 1 && !gathers(line); }

std::vector<Axis> axes_of_copies(const Case& line) {
  std::vector<Axis> axes = axes_of_weights(line);
  axes.insert(axes.begin(), Axis::rep);
  return axes;
}

std::vector<Axis> axes_of_weights(const Case& line) {
  return line.text("reduce") == "tp" ? std::vector<Axis>{} : with_ranks(line, {Axis::cp, Axis::dp});
}

std::optional<Rejected> refused_attention_block(const Case& line) {
  if (auto refused = refused_attention(line)) return refused;
  const int64_t d = line.at("head_dim"), tp = line.ranks(Axis::tp);
  if (d % 2) return Rejected("an even head_dim", std::to_string(d), "features are turned in pairs");
  const ContextLine c(line);
  const int64_t hidden = line.at("hidden"),
                columns = (line.at("heads") + 2 * line.at("kv_heads")) * d;
  if (gathers(line) && columns % tp)
    return Rejected("(heads + 2 kv_heads) head_dim divisible by tp with form=gather",
                    std::to_string(columns) + " rows, tp=" + std::to_string(tp),
                    "the fused weight is cut over all ranks: choose another head_dim");
  if (auto refused =
          first_refusal(countable(whole_operand, {c.rows, c.batch, line.ranks(Axis::dp), hidden}),
                        countable(whole_operand, {columns, hidden})))
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
  const HeadPlan h(line);
  const int64_t d = h.dim, n = h.own_heads(), g = h.own_kv();
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
std::vector<Axis> AttentionBlock::copies_summed_over(const Case& line) const {
  return axes_of_copies(line);
}
std::vector<Axis> AttentionBlock::bias_summed_over(const Case& line) const {
  return axes_of_tokens(line);
}

int64_t AttentionBlock::first_group(const HeadPlan& h, int rank) const {
  return h.first_group(rank);
}

void AttentionBlock::reduce_input_gradient(Parallel& p, const View& of_queries, const View& of_keys,
                                           const View& dx) {
  add_into(of_keys, of_queries);
  const View partial = p.workspace(p.partial(), of_queries.shape);
  convert(of_queries, partial);
  up_.reduce_input_gradient(p, partial, dx);
}

void AttentionBlock::sum_gradients(Parallel& p, const Parts& parts, const std::vector<Axis>& axes) {
  coalesced_all_reduce(p, parts, axes);
}

// z = x Wqkv^T + bqkv of the own heads.
void AttentionBlock::project(Parallel& p, const Arguments& in, const View& z) {
  const Case& line = p.rank.line();
  if (gathers(line)) {
    const View own = p.workspace(p.storage, with_extent(z.shape, last(z), in.w[0].shape[0]));
    up_.forward(p, in.x, in.w[0], in.b[0], own);
    return take_gathered_heads(p, own, first_group(HeadPlan(line), p.tp.rank()), parts_of(line, z));
  }
  if (in.w.size() == 1) return up_.forward(p, in.x, in.w[0], in.b[0], z);
  const View whole = up_.whole_input(p, in.x);
  const auto parts = parts_of(line, z);
  for (size_t i = 0; i < parts.size(); ++i)
    gemm(plain(whole), turned(in.w[i]), parts[i], p.accumulate, &in.b[i]);
}

// Gradients of x, and of weights and biases in `d` before they are summed.
void AttentionBlock::project_backward(Parallel& p, const Arguments& in, const View& dz,
                                      const Arguments& d) {
  const Case& line = p.rank.line();
  if (gathers(line)) {
    const View own = return_gathered_heads(
        p, parts_of(line, dz), first_group(HeadPlan(line), p.tp.rank()), in.w[0].shape[0]);
    return up_.backward(p, in.x, in.w[0], own, d.x, d.w[0], d.b[0]);
  }
  if (in.w.size() == 1) return up_.backward(p, in.x, in.w[0], dz, d.x, d.w[0], d.b[0]);
  const View whole = up_.whole_input(p, in.x), of_queries = p.workspace(p.accumulate, whole.shape),
             of_keys = p.workspace(p.accumulate, whole.shape);
  const auto parts = parts_of(line, dz);
  for (size_t i = 0; i < parts.size(); ++i) {
    if (d.w[i].data) gemm(turned(parts[i]), plain(whole), d.w[i], p.accumulate);
    if (d.b[i].data) column_sums(parts[i], d.b[i], p.accumulate);
    gemm(plain(parts[i]), plain(in.w[i]), i == 0 ? of_queries : of_keys, p.accumulate, nullptr,
         i == 2);
  }
  reduce_input_gradient(p, of_queries, of_keys, d.x);
}

std::unique_ptr<Saved> AttentionBlock::forward(Rank& rank, std::span<const View> inputs,
                                               std::span<const View> outputs) {
  const Case& line = rank.line();
  if (auto refused = refused_attention_block(line)) throw *refused;
  Parallel p(rank);
  auto saved = std::make_unique<BlockSaved>();
  const Arguments& in = saved->in = Arguments(line, inputs);
  auto shape = with_extent(in.x.shape, 0, in.x.shape[0] * (p.sp ? p.tp.size() : 1));
  const HeadPlan heads(line);
  shape.back() = (heads.own_heads() + 2 * heads.own_kv()) * heads.dim;
  saved->z = Kept(p.storage, shape);
  project(p, in, saved->z.view());

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
  auto& saved = static_cast<BlockSaved&>(state);
  const Arguments& in = saved.in;
  const Arguments d(line, gradients);
  Arguments partial = d;
  Parts weights, copies, bias;
  auto part_of = [&](Parts& parts, const View& gradient) {
    if (!gradient.data) return View{};
    parts.push_back({partial_like(p, gradient), gradient});
    return parts.back().partial;
  };
  for (size_t i = 0; i < d.w.size(); ++i)
    for (auto [own, to] : {std::pair(&d.w[i], &partial.w[i]), std::pair(&d.b[i], &partial.b[i])})
      *to = part_of(i == 0 ? weights : copies, *own);
  const View dw_out = part_of(weights, d.w_out), db_out = part_of(bias, d.b_out);
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

  project_backward(p, in, dz, partial);
  sum_gradients(p, weights, weights_summed_over(line));
  sum_gradients(p, copies, copies_summed_over(line));
  sum_gradients(p, bias, bias_summed_over(line));
}

}  // namespace shardproof::primitives
