// What the strategies share: reading operands, writing results, the statistics of a backward.
#include "primitives/attention.hpp"

#include "primitives/work.hpp"

namespace shardproof::primitives {
ContextRank::ContextRank(Rank& r, ContextLine c)
    : rank(r),
      line(r.line()),
      cp(r.along(Axis::cp)),
      context(std::move(c)),
      storage(r.line().dtype()),
      accumulate(accumulation_of(r.line())),
      // One rank sends nothing: its sums meet no wire's type.
      wire(cp.size() > 1 ? type_of_key(r.line(), "wire", accumulate) : accumulate) {}

int64_t extent_from_end(const View& v, int from_end) {
  return v.shape[v.shape.size() - size_t(from_end)];
}

View with_dim(View v) {
  v.shape.push_back(1), v.strides.push_back(1);
  return v;
}

std::vector<int64_t> shape_by_heads(const View& by_tokens, int ranks, int64_t own_heads) {
  std::vector<int64_t> shape = by_tokens.shape;
  shape[0] *= ranks;
  shape[shape.size() - 2] = own_heads;
  return shape;
}

std::vector<int64_t> heads_by_rank(int64_t heads, int64_t dealt_key_heads, int ranks) {
  std::vector<int64_t> parts = dealt(dealt_key_heads, ranks);
  for (int64_t& n : parts) n *= heads / dealt_key_heads;
  return parts;
}

View copied_heads(const ContextRank& c, const View& v, int64_t heads) {
  const int64_t copies = heads / extent_from_end(v, 2);
  if (copies == 1) return v;
  std::vector<int64_t> shape = v.shape;
  shape[shape.size() - 2] = heads;
  const View wide = c.rank.workspace(v.dtype, shape);
  for (int64_t h = 0; h < heads; ++h)
    convert(v.narrow(heads_dim(v), h / copies, 1), wide.narrow(heads_dim(v), h, 1));
  return wide;
}

void sum_copies(const ContextRank& c, const View& wide, const View& gradient) {
  const int64_t heads = extent_from_end(gradient, 2), copies = extent_from_end(wide, 2) / heads;
  if (copies == 1) return convert(wide, gradient);
  const View sum = c.rank.workspace(c.accumulate, gradient.shape);
  set_zero(sum);
  for (int64_t h = 0; h < heads * copies; ++h)
    add_into(wide.narrow(heads_dim(wide), h, 1), sum.narrow(heads_dim(sum), h / copies, 1));
  convert(sum, gradient);
}

std::vector<Label> labels_of_ranks(const ContextLine& line, const AttentionCore& core, int first,
                                   int count, bool keys) {
  std::vector<Label> all;
  for (int r = first; r < first + count; ++r)
    for (const Label& label : keys ? core.keys(line, r) : core.queries(line, r))
      all.push_back(label);
  return all;
}

void write(const View& to, std::span<const double> values) { fill_from(to, values); }

View flat(const View& v) { return view_of(v.data, v.dtype, {v.elements()}, v.space); }

ContextAttention::ContextAttention(std::unique_ptr<AttentionCore> core) : core_(std::move(core)) {}

ContextLine ContextAttention::accepted(const Case& line, std::span<const View> cu_seqlens) const {
  ContextLine c = context_of(line, cu_seqlens);
  if (auto refused = refused_attention(line)) throw *refused;
  return c;
}

// inputs q, k, v, [cu_seqlens, [cu_seqlens_k]]; outputs o, lse.
std::unique_ptr<Saved> ContextAttention::forward(Rank& rank, std::span<const View> inputs,
                                                 std::span<const View> outputs) {
  auto saved = std::make_unique<AttentionSaved>(accepted(rank.line(), inputs.subspan(3)));
  ContextRank c(rank, saved->context);
  saved->q = inputs[0], saved->k = inputs[1], saved->v = inputs[2];
  const HeadShape shape{extent_from_end(saved->q, 2), extent_from_end(saved->k, 2),
                        extent_from_end(saved->q, 1), extent_from_end(saved->v, 1)};
  saved->pass =
      std::make_unique<AttentionPass>(c.line, *core_, shape, c.single(), to_doubles(saved->q),
                                      core_->queries(c.context, c.cp.rank()));
  Softmax sum = saved->pass->nothing();
  attend(c, *saved, sum);
  saved->o = saved->pass->output(sum);
  saved->lse = saved->pass->lse(sum);
  write(outputs[0], saved->o);
  write(outputs[1], saved->lse);
  pairs_ = saved->pass->pairs;
  return saved;
}

void ContextAttention::backward(Rank& rank, Saved& state, std::span<const View> cotangents,
                                std::span<const View> gradients) {
  const auto& saved = static_cast<const AttentionSaved&>(state);
  ContextRank c(rank, saved.context);
  const Values g = to_doubles(cotangents[0]);
  const Statistics rows = saved.pass->statistics(saved.o, saved.lse, g, to_doubles(cotangents[1]));
  Outgoing d{Values(size_t(saved.q.elements())), Values(size_t(saved.k.elements())),
             Values(size_t(saved.v.elements()))};
  differentiate(c, saved, {rows, g}, d);
  write(gradients[0], d.q);
  write(gradients[1], d.k);
  write(gradients[2], d.v);
}

}  // namespace shardproof::primitives
