// What the strategies share: reading operands, writing results, the statistics of a backward.
#include "primitives/attention.hpp"

namespace shardproof::primitives {
namespace {

DType type_of_key(const Case& line, const char* key, DType fallback) {
  return dtype_from(line.text(key)).value_or(fallback);
}

DType accumulation(const Case& line) {
  const bool wide =
      line.dtype() == DType::f64 || type_of_key(line, "acc", DType::f32) == DType::f64;
  return wide ? DType::f64 : DType::f32;
}

}  // namespace

ContextRank::ContextRank(Rank& r, ContextLine c)
    : rank(r),
      line(r.line()),
      cp(r.along(Axis::cp)),
      context(std::move(c)),
      storage(r.line().dtype()),
      accumulate(accumulation(r.line())),
      wire(type_of_key(r.line(), "wire", accumulate)) {}

int64_t extent_from_end(const View& v, int from_end) {
  return v.shape[v.shape.size() - size_t(from_end)];
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
