#include "primitives/gemm.hpp"
#include "primitives/replicated_layers.hpp"

namespace shardproof::primitives {

HeadPlan::HeadPlan(const Case& line)
    : heads(line.at("heads")),
      kv_heads(line.at("kv_heads")),
      dim(line.at("head_dim")),
      p(line.ranks(Axis::tp)),
      rep(line.at("kv_replicas")) {}

int64_t HeadPlan::query_row(int64_t head) const {
  const int64_t shared = heads / kv_heads;
  return head / shared * rows_of_group() + head % shared * dim;
}
int64_t HeadPlan::key_row(int64_t group) const {
  return group * rows_of_group() + heads / kv_heads * dim;
}

namespace {

struct QkvSaved : Saved {
  View x;
  std::vector<View> weights;  // wq, wk, wv, or the fused one
};

View whole_input(Parallel& p, const View& x) {
  if (!p.sp || p.tp.size() == 1) return x;
  const View whole = p.workspace(x.dtype, with_extent(x.shape, 0, x.shape[0] * p.tp.size()));
  all_gather(p.rank, p.tp, x, whole, 0);
  return whole;
}

// Calls each(columns of the fused activation, local view) for the heads of this rank: q, k, v.
template <class Each>
void each_own_head(const Parallel& p, const HeadPlan& h, int64_t first, std::span<const View> local,
                   Each each) {
  const int r = p.tp.rank();
  auto columns = [&](const View& v, int64_t head) {
    return v.narrow(last(v), head * h.dim, h.dim);
  };
  for (int64_t i = 0; i < h.own_heads(); ++i)
    each(h.query_row(r * h.own_heads() + i), columns(local[0], i));
  for (int64_t i = 0; i < h.own_kv(); ++i) {
    each(h.key_row(first + i), columns(local[1], i));
    each(h.value_row(first + i), columns(local[2], i));
  }
}

}  // namespace

void take_gathered_heads(Parallel& p, const View& own, int64_t first, std::span<const View> qkv) {
  const HeadPlan h(p.rank.line());
  const View all = p.workspace(own.dtype, with_extent(own.shape, last(own), h.rows()));
  all_gather(p.rank, p.tp, own, all, last(all));
  each_own_head(p, h, first, qkv, [&](int64_t row, const View& to) {
    convert(all.narrow(last(all), row, h.dim), to);
  });
}

View return_gathered_heads(Parallel& p, std::span<const View> cotangents, int64_t first,
                           int64_t own_rows) {
  const HeadPlan h(p.rank.line());
  const View& like = cotangents[0];
  const View all = p.workspace(p.partial(), with_extent(like.shape, last(like), h.rows())),
             own = p.workspace(p.partial(), with_extent(like.shape, last(like), own_rows));
  set_zero(all);
  each_own_head(p, h, first, cotangents, [&](int64_t row, const View& from) {
    convert(from, all.narrow(last(all), row, h.dim));
  });
  reduce_scatter(p.rank, p.tp, all, own, last(all));
  return own;
}

void ReplicatedQkv::sum_copies(Parallel& p, const Parts& parts) {
  const HeadPlan h(p.rank.line());
  if (h.rep == 1) return coalesced_all_reduce(p, parts, std::vector<Axis>{});
  coalesced_all_reduce(p, parts, p.rank.along(Axis::rep));
}

void ReplicatedQkv::reduce_input_gradient(Parallel& p, const View& of_queries, const View& of_keys,
                                          const View& dx) {
  if (of_keys.data) add_into(of_keys, of_queries);
  const View part = p.workspace(p.partial(), of_queries.shape),
             sum = p.workspace(p.partial(), dx.shape);
  convert(of_queries, part);
  if (p.sp)
    reduce_scatter(p.rank, p.tp, part, sum, 0);
  else
    all_reduce(p.rank, p.tp, part, sum);
  convert(sum, dx);
}

std::unique_ptr<Saved> ReplicatedQkv::forward(Rank& rank, std::span<const View> inputs,
                                              std::span<const View> outputs) {
  if (auto refused = refused_qkv(rank.line())) throw *refused;
  Parallel p(rank);
  auto saved = std::make_unique<QkvSaved>();
  saved->x = inputs[0];
  saved->weights.assign(inputs.begin() + 1, inputs.end());
  if (rank.line().text("form") == "gather") {
    const View whole = whole_input(p, inputs[0]);
    const View own =
        p.workspace(p.storage, with_extent(whole.shape, last(whole), inputs[1].shape[0]));
    gemm(plain(whole), turned(inputs[1]), own, p.accumulate);
    take_gathered_heads(p, own, HeadPlan(rank.line()).first_group(p.tp.rank()), outputs);
    return saved;
  }
  const View whole = whole_input(p, inputs[0]);
  for (size_t i = 0; i < 3; ++i)
    gemm(plain(whole), turned(inputs[i + 1]), outputs[i], p.accumulate);
  return saved;
}

void ReplicatedQkv::backward(Rank& rank, Saved& state, std::span<const View> cotangents,
                             std::span<const View> gradients) {
  Parallel p(rank);
  const auto& saved = static_cast<const QkvSaved&>(state);
  auto partial_dx = [&](const View& g, const View& w, const View& to, bool add) {
    gemm(plain(g), plain(w), to, p.accumulate, nullptr, add);
  };
  into_running_sums(
      p, gradients,
      [&](std::span<const View> own) {
        const View whole = whole_input(p, saved.x);
        const View of_queries = p.workspace(p.accumulate, whole.shape);
        if (rank.line().text("form") == "gather") {
          const int64_t first = HeadPlan(rank.line()).first_group(p.tp.rank());
          const View g = return_gathered_heads(p, cotangents, first, saved.weights[0].shape[0]);
          gemm(turned(g), plain(whole), own[1], p.accumulate);
          partial_dx(g, saved.weights[0], of_queries, false);
          return reduce_input_gradient(p, of_queries, View{}, own[0]);
        }
        gemm(turned(cotangents[0]), plain(whole), own[1], p.accumulate);
        Parts copies;
        for (size_t i : {size_t(1), size_t(2)}) {
          copies.push_back({partial_like(p, own[i + 1]), own[i + 1]});
          gemm(turned(cotangents[i]), plain(whole), copies.back().partial, p.accumulate);
        }
        sum_copies(p, copies);
        const View of_keys = p.workspace(p.accumulate, whole.shape);
        partial_dx(cotangents[0], saved.weights[0], of_queries, false);
        partial_dx(cotangents[1], saved.weights[1], of_keys, false);
        partial_dx(cotangents[2], saved.weights[2], of_keys, true);
        reduce_input_gradient(p, of_queries, of_keys, own[0]);
      },
      add_into);
}

}  // namespace shardproof::primitives
