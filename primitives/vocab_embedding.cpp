#include "primitives/vocab_embedding.hpp"

#include "primitives/vocab_line.hpp"
#include "primitives/vocab_shard.hpp"

namespace shardproof::primitives {
namespace {

struct EmbeddingSaved : Saved {
  View ids;
};

}  // namespace

int64_t VocabEmbedding::first_row(const Parallel& p, int64_t own) const {
  return p.tp.rank() * own;
}
View VocabEmbedding::ids_to_look_up(Parallel&, const View& ids, int64_t, int64_t) const {
  return ids;
}
View VocabEmbedding::ids_to_add_to(Parallel&, const View& ids, int64_t, int64_t) const {
  return ids;
}

View VocabEmbedding::cotangent_of_all_tokens(Parallel& p, const View& own) const {
  if (!p.sp || p.tp.size() == 1) return own;
  const View all = p.workspace(own.dtype, with_extent(own.shape, 0, own.shape[0] * p.tp.size()));
  all_gather(p.rank, p.tp, own, all, 0);
  return all;
}

// inputs ids, w; output y.
std::unique_ptr<Saved> VocabEmbedding::forward(Rank& rank, std::span<const View> inputs,
                                               std::span<const View> outputs) {
  if (auto refused = refused_embedding(rank.line())) throw *refused;
  Parallel p(rank);
  const View &ids = inputs[0], &w = inputs[1], &y = outputs[0];
  auto saved = std::make_unique<EmbeddingSaved>();
  saved->ids = ids;
  const int64_t own = w.shape[0], first = first_row(p, own);
  std::vector<int64_t> shape = ids.shape;
  shape.push_back(w.shape[1]);
  const View part = p.workspace(w.dtype, std::move(shape));
  perform(LookUp{{tensor(ids_to_look_up(p, ids, first, own)), first, own},
                 tensor(w),
                 tensor(part),
                 w.shape[1]},
          "a look-up");
  if (p.sp)
    reduce_scatter(rank, p.tp, part, y, 0);
  else
    all_reduce(rank, p.tp, part, y);
  return saved;
}

void VocabEmbedding::backward(Rank& rank, Saved& state, std::span<const View> cotangents,
                              std::span<const View> gradients) {
  Parallel p(rank);
  const View& ids = static_cast<const EmbeddingSaved&>(state).ids;
  into_running_sums(
      p, gradients,
      [&](std::span<const View> due) {
        const View &dw = due[1], g = cotangent_of_all_tokens(p, cotangents[0]);
        const int64_t own = dw.shape[0], first = first_row(p, own);
        perform(ScatterAdd{{tensor(ids_to_add_to(p, ids, first, own)), first, own},
                           tensor(g),
                           tensor(dw),
                           dw.shape[1],
                           p.accumulate == DType::f64},
                "sums of rows");
      },
      add_into);
}

}  // namespace shardproof::primitives
