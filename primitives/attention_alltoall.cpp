// Tokens for heads, attention over all tokens on the heads of a rank, heads for tokens.
#include "primitives/attention.hpp"

namespace shardproof::primitives {
namespace {

struct AllToAllSaved : Saved {
  explicit AllToAllSaved(ContextLine c) : context(std::move(c)) {}
  ContextLine context;
  View q, k, v;  // as they came, for the shapes of their gradients
  Values k_all, v_all, o,
      lse;  // [all tokens, heads of this rank, ..], tokens in the order of ranks
  std::unique_ptr<AttentionPass> pass;
  std::vector<Label> keys;
};

// Row of the sequence behind each token of the order of ranks.
std::vector<int64_t> rows_in_rank_order(const ContextRank& c) {
  std::vector<int64_t> rows;
  for (int r = 0; r < c.cp.size(); ++r)
    for (int64_t row : owned_rows(c.context, c.context.rows, r)) rows.push_back(row);
  return rows;
}

// Between lse [rows, .., heads] in the order of the sequence and rows in the order of ranks.
void put_in_order(const ContextRank& c, const Values& by_ranks, const View& lse) {
  const auto rows = rows_in_rank_order(c);
  const size_t width = by_ranks.size() / rows.size();
  for (size_t i = 0; i < rows.size(); ++i)
    write(lse.narrow(0, rows[i], 1), std::span(by_ranks).subspan(i * width, width));
}
Values in_rank_order(const ContextRank& c, const View& lse) {
  Values all;
  for (int64_t row : rows_in_rank_order(c))
    for (double x : to_doubles(lse.narrow(0, row, 1))) all.push_back(x);
  return all;
}

}  // namespace

void AttentionAllToAll::tokens_for_heads(ContextRank& c, const View& by_tokens,
                                         const View& by_heads) {
  const auto heads = shares(c, extent_from_end(by_tokens, 2));
  c.cp.all_to_all(by_tokens, by_heads, heads_dim(by_tokens), 0, heads);
}
void AttentionAllToAll::heads_for_tokens(ContextRank& c, const View& by_heads,
                                         const View& by_tokens) {
  const auto heads = shares(c, extent_from_end(by_tokens, 2));
  c.cp.all_to_all(by_heads, by_tokens, 0, heads_dim(by_tokens), {}, heads);
}
std::vector<int64_t> AttentionAllToAll::shares(const ContextRank& c, int64_t heads) const {
  return heads_by_rank(heads, dealt_key_heads(c.line), c.cp.size());
}

void AttentionAllToAll::sum_of_copies(const ContextRank& c, const View& wide,
                                      const View& gradient) {
  sum_copies(c, wide, gradient);
}

// Room for all tokens of them.
View AttentionAllToAll::own_heads(const ContextRank& c, const View& by_tokens) const {
  const int64_t own = shares(c, extent_from_end(by_tokens, 2))[size_t(c.cp.rank())];
  return c.rank.workspace(by_tokens.dtype, shape_by_heads(by_tokens, c.cp.size(), own));
}

View AttentionAllToAll::exchanged(ContextRank& c, const View& by_tokens) {
  const View by_heads = own_heads(c, by_tokens);
  tokens_for_heads(c, by_tokens, by_heads);
  return by_heads;
}

// Values [all tokens, own heads, dim] as a tensor of the own tokens, shaped like `like` except for
// its heads, which are those of all ranks, copies included.
View AttentionAllToAll::home(ContextRank& c, const Values& values, const View& like, int64_t heads,
                             DType dtype) {
  std::vector<int64_t> shape = like.shape;
  shape[shape.size() - 2] = heads;
  const View by_tokens = c.rank.workspace(dtype, shape);
  const View by_heads = own_heads(c, by_tokens);
  write(by_heads, values);
  heads_for_tokens(c, by_heads, by_tokens);
  return by_tokens;
}

std::unique_ptr<Saved> AttentionAllToAll::forward(Rank& rank, std::span<const View> inputs,
                                                  std::span<const View> outputs) {
  auto saved = std::make_unique<AllToAllSaved>(context_of(rank.line(), inputs.subspan(3)));
  if (auto refused = refused_attention_alltoall(rank.line())) throw *refused;
  ContextRank c(rank, saved->context);
  saved->q = inputs[0], saved->k = inputs[1], saved->v = inputs[2];
  const int64_t key_heads = dealt_key_heads(c.line);
  const View q = exchanged(c, saved->q), k = exchanged(c, copied_heads(c, saved->k, key_heads)),
             v = exchanged(c, copied_heads(c, saved->v, key_heads));
  const HeadShape shape{extent_from_end(q, 2), extent_from_end(k, 2), extent_from_end(q, 1),
                        extent_from_end(v, 1)};
  saved->keys = labels_of_ranks(c.context, *core_, 0, c.cp.size(), true);
  saved->pass =
      std::make_unique<AttentionPass>(c.line, *core_, shape, c.single(), to_doubles(q),
                                      labels_of_ranks(c.context, *core_, 0, c.cp.size(), false));
  saved->k_all = to_doubles(k), saved->v_all = to_doubles(v);
  Softmax sum = saved->pass->nothing();
  saved->pass->add(sum, saved->pass->block(saved->keys, c.cp.rank(), -1, c.cp.size(), 0),
                   saved->k_all, saved->v_all);
  saved->o = saved->pass->output(sum);
  saved->lse = saved->pass->lse(sum);
  copy(home(c, saved->o, outputs[0], extent_from_end(outputs[0], 2), c.storage), outputs[0]);
  put_in_order(c, saved->lse, outputs[1]);
  pairs_ = saved->pass->pairs;
  return saved;
}

void AttentionAllToAll::backward(Rank& rank, Saved& state, std::span<const View> cotangents,
                                 std::span<const View> gradients) {
  const auto& saved = static_cast<const AllToAllSaved&>(state);
  ContextRank c(rank, saved.context);
  const Values g = to_doubles(exchanged(c, cotangents[0]));
  const Statistics rows =
      saved.pass->statistics(saved.o, saved.lse, g, in_rank_order(c, cotangents[1]));
  Values dq(saved.pass->q.size()), dk(saved.k_all.size()), dv(saved.v_all.size());
  saved.pass->add_gradients(saved.pass->block(saved.keys, c.cp.rank(), -1, c.cp.size(), 0), rows,
                            saved.k_all, saved.v_all, g, dq, dk, dv);
  copy(home(c, dq, saved.q, extent_from_end(saved.q, 2), c.storage), gradients[0]);
  // Copies of a head are parts of a sum and travel like one.
  const int64_t key_heads = dealt_key_heads(c.line);
  const DType travels = extent_from_end(saved.k, 2) != key_heads ? c.wire : c.storage;
  sum_of_copies(c, home(c, dk, saved.k, key_heads, travels), gradients[1]);
  sum_of_copies(c, home(c, dv, saved.v, key_heads, travels), gradients[2]);
}

}  // namespace shardproof::primitives
