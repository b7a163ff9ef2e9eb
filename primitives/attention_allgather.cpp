#include "primitives/attention.hpp"

namespace shardproof::primitives {
namespace {

std::vector<int64_t> gathered_shape(const View& own, int ranks) {
  std::vector<int64_t> shape = own.shape;
  shape[0] *= ranks;
  return shape;
}

Values gathered(ContextRank& c, const View& own) {
  const View whole = c.rank.workspace(own.dtype, gathered_shape(own, c.cp.size()));
  c.cp.all_gather(own, whole, 0);
  return to_doubles(whole);
}

Values own_sum(ContextRank& c, const Values& partial, const View& own) {
  const View whole = c.rank.workspace(c.wire, gathered_shape(own, c.cp.size())),
             sum = c.rank.workspace(c.wire, own.shape);
  write(whole, partial);
  c.cp.reduce_scatter(whole, sum, 0);
  return to_doubles(sum);
}

}  // namespace

void AttentionAllGather::attend(ContextRank& c, const AttentionSaved& saved, Softmax& sum) {
  // Keys come in the order of ranks, and their labels with them: nothing is put back in order.
  const auto labels = labels_of_ranks(c.context, *core_, 0, c.cp.size(), true);
  const Values k = gathered(c, saved.k), v = gathered(c, saved.v);
  saved.pass->add(sum, saved.pass->block(labels, c.cp.rank(), -1, c.cp.size(), 0), k, v);
}

void AttentionAllGather::differentiate(ContextRank& c, const AttentionSaved& saved,
                                       const Incoming& in, Outgoing& out) {
  const auto labels = labels_of_ranks(c.context, *core_, 0, c.cp.size(), true);
  const Values k = gathered(c, saved.k), v = gathered(c, saved.v);
  Values dk(k.size()), dv(v.size());
  saved.pass->add_gradients(saved.pass->block(labels, c.cp.rank(), -1, c.cp.size(), 0), in.rows, k,
                            v, in.g, out.q, dk, dv);
  out.k = own_sum(c, dk, saved.k);
  out.v = own_sum(c, dv, saved.v);
}

}  // namespace shardproof::primitives
