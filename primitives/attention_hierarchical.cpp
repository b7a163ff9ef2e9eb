// All-to-all inside runs of u ranks, ring across the runs.
#include "primitives/attention.hpp"

namespace shardproof::primitives {
namespace {

// Inputs as the ring sees them: tokens of a run, heads of this rank.
struct HierarchicalSaved : Saved {
  explicit HierarchicalSaved(ContextLine c) : ring(std::move(c)) {}
  std::vector<Buffer> exchanged;  // q, k, v
  AttentionSaved ring;
};

int inner_of(const ContextRank& c) { return int(c.line.at("inner")); }
std::vector<int64_t> shape_in_run(const ContextRank& c, const View& by_tokens) {
  return shape_by_heads(by_tokens, inner_of(c), extent_from_end(by_tokens, 2) / inner_of(c));
}

}  // namespace

Communicator& AttentionHierarchical::run(ContextRank& c) { return c.cp.inner(inner_of(c)); }
Communicator& AttentionHierarchical::ring(ContextRank& c) { return c.cp.across(inner_of(c)); }

std::vector<Label> AttentionHierarchical::labels_of_run(const ContextRank& c, int run,
                                                        bool keys) const {
  return labels_of_ranks(c.context, *core_, run * inner_of(c), inner_of(c), keys);
}

std::vector<Label> AttentionHierarchical::keys_of(ContextRank& c, int owner) {
  return labels_of_run(c, owner, true);
}

Buffer AttentionHierarchical::by_heads(ContextRank& c, const View& by_tokens) {
  Buffer exchanged(by_tokens.dtype, shape_in_run(c, by_tokens));
  run(c).all_to_all(by_tokens, exchanged.view(), heads_dim(by_tokens), 0);
  return exchanged;
}

void AttentionHierarchical::by_tokens(ContextRank& c, const Values& values, const View& to) {
  const View all = c.rank.workspace(to.dtype, shape_in_run(c, to));
  write(all, values);
  run(c).all_to_all(all, to, 0, heads_dim(to));
}

std::unique_ptr<Saved> AttentionHierarchical::forward(Rank& rank, std::span<const View> inputs,
                                                      std::span<const View> outputs) {
  auto saved = std::make_unique<HierarchicalSaved>(context_of(rank.line(), inputs.subspan(3)));
  if (auto refused = refused_attention_hierarchical(rank.line())) throw *refused;
  ContextRank c(rank, saved->ring.context);
  for (int i = 0; i < 3; ++i) saved->exchanged.push_back(by_heads(c, inputs[size_t(i)]));
  AttentionSaved& own = saved->ring;
  own.q = saved->exchanged[0].view(), own.k = saved->exchanged[1].view();
  own.v = saved->exchanged[2].view();
  const HeadShape shape{extent_from_end(own.q, 2), extent_from_end(own.k, 2),
                        extent_from_end(own.q, 1), extent_from_end(own.v, 1)};
  own.pass = std::make_unique<AttentionPass>(c.line, *core_, shape, c.single(), to_doubles(own.q),
                                             labels_of_run(c, c.cp.rank() / inner_of(c), false));
  Softmax sum = own.pass->nothing();
  attend(c, own, sum);
  own.o = own.pass->output(sum);
  own.lse = own.pass->lse(sum);
  by_tokens(c, own.o, outputs[0]);
  by_tokens(c, own.lse, with_dim(outputs[1]));
  pairs_ = own.pass->pairs;
  return saved;
}

void AttentionHierarchical::backward(Rank& rank, Saved& state, std::span<const View> cotangents,
                                     std::span<const View> gradients) {
  const AttentionSaved& own = static_cast<const HierarchicalSaved&>(state).ring;
  ContextRank c(rank, own.context);
  const Values g = to_doubles(by_heads(c, cotangents[0]).view());
  Values g_lse;
  if (c.line.on("lse_grad")) g_lse = to_doubles(by_heads(c, with_dim(cotangents[1])).view());
  const Statistics rows = own.pass->statistics(own.o, own.lse, g, g_lse);
  Outgoing d{Values(size_t(own.q.elements())), Values(size_t(own.k.elements())),
             Values(size_t(own.v.elements()))};
  differentiate(c, own, {rows, g}, d);
  by_tokens(c, d.q, gradients[0]);
  by_tokens(c, d.k, gradients[1]);
  by_tokens(c, d.v, gradients[2]);
}

}  // namespace shardproof::primitives
