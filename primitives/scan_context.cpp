#include "primitives/scan_context.hpp"

#include <algorithm>

#include "primitives/calls.hpp"
#include "primitives/work.hpp"

namespace shardproof::primitives {
namespace {

struct ScanSaved : Saved {
  View q, k, v, a;
  Kept reach, entering, states, summaries;
};

// The extents of a rank's block.
struct Extents {
  int64_t tokens, batch, heads, key_dim, value_dim;

  Extents(const View& q, const View& v, int64_t batch)
      : tokens(q.elements() / q.shape.back() / q.shape[q.shape.size() - 2]),
        batch(batch),
        heads(q.shape[q.shape.size() - 2]),
        key_dim(q.shape.back()),
        value_dim(v.shape.back()) {}
  int64_t decays() const { return batch * heads; }
  int64_t entries() const { return decays() * key_dim * value_dim; }
  std::vector<int64_t> states() const { return {tokens, heads, key_dim, value_dim}; }
  Chunk chunk(const View& a, const View& reach) const {
    return {tensor(a), tensor(reach), batch, heads, key_dim, value_dim};
  }
};

Summaries summaries(const View& all, const Extents& e) {
  return {all.narrow(1, 0, e.entries()), all.narrow(1, e.entries(), e.decays())};
}

}  // namespace

std::vector<int64_t> ScanContext::reach(const ContextLine& c, int r) const {
  return tokens_before(c, r);
}

std::vector<int64_t> ScanContext::passes(const ContextLine& c) const {
  std::vector<int64_t> list;
  for (int r = 0; r < c.ranks; ++r) {
    const auto of_block = tokens_before(c, r);
    list.push_back(*std::min_element(of_block.begin(), of_block.end()) > 0);
  }
  return list;
}

std::vector<int64_t> ScanContext::before(int r, int) const {
  std::vector<int64_t> list;
  for (int i = 0; i < r; ++i) list.push_back(i);
  return list;
}

std::vector<int64_t> ScanContext::behind(int r, int p) const {
  std::vector<int64_t> list;
  for (int i = p - 1; i > r; --i) list.push_back(i);
  return list;
}

void ScanContext::gather(Rank& rank, const View& own, const View& all, bool) {
  all_gather(rank, rank.along(Axis::cp), own, all, 0);
}

View ScanContext::decays(Rank&, const View& a) const { return a; }
View ScanContext::decays_handed_on(Rank&, const View& a) const { return a; }
View ScanContext::state_before(Rank&, const View& entering) const { return entering; }

void ScanContext::fold(Rank& rank, const Summaries& all, const std::vector<int64_t>& chain,
                       const View& state, bool) {
  const Kept passing = uploaded(passes(ContextLine(rank.line()))), order = uploaded(chain);
  perform(FoldStates{tensor(all.parts), tensor(all.decays), tensor(passing.view()),
                     tensor(order.view()), tensor(state), state.elements() / all.decays.shape[1],
                     !in_single(rank.line())},
          "the states of other ranks");
}

// inputs q, k, v, a; output o.
std::unique_ptr<Saved> ScanContext::forward(Rank& rank, std::span<const View> inputs,
                                            std::span<const View> outputs) {
  const Case& line = rank.line();
  if (auto refused = refused_scan(line)) throw *refused;
  Communicator& cp = rank.along(Axis::cp);
  const ContextLine c(line);
  const bool wide = !in_single(line);
  auto saved = std::make_unique<ScanSaved>();
  saved->q = inputs[0], saved->k = inputs[1], saved->v = inputs[2], saved->a = inputs[3];
  saved->reach = uploaded(reach(c, cp.rank()));
  const Extents e(inputs[0], inputs[2], c.batch);
  saved->entering = Kept(accumulation_of(line), {e.entries()});
  saved->states = Kept(accumulation_of(line), e.states());
  const Chunk chunk = e.chunk(decays(rank, saved->a), saved->reach.view());
  const Tensor k = tensor(saved->k), v = tensor(saved->v),
               entering = tensor(saved->entering.view());
  if (cp.size() > 1) {
    const int64_t n = e.entries() + e.decays();
    const View own = rank.workspace(accumulation_of(line), {1, n});
    saved->summaries = Kept(own.dtype, {cp.size(), n});
    const Summaries mine = summaries(own, e);
    perform(States{chunk, k, v, {}, {}, tensor(mine.parts), wide}, "the state of a block");
    perform(ChunkDecay{e.chunk(decays_handed_on(rank, saved->a), saved->reach.view()),
                       tensor(mine.decays), wide},
            "the decay of a block");
    gather(rank, own, saved->summaries.view(), false);
    fold(rank, summaries(saved->summaries.view(), e), before(cp.rank(), cp.size()),
         saved->entering.view(), false);
  } else {
    set_zero(saved->entering.view());
  }
  perform(States{chunk, k, v, entering, tensor(saved->states.view()), {}, wide}, "states");
  perform(StateProduct{tensor(saved->states.view()), tensor(saved->q), chunk.reach,
                       tensor(outputs[0]), e.heads, e.key_dim, e.value_dim, true, wide},
          "what is read from states");
  return saved;
}

void ScanContext::backward(Rank& rank, Saved& state, std::span<const View> cotangents,
                           std::span<const View> gradients) {
  const auto& saved = static_cast<const ScanSaved&>(state);
  const Case& line = rank.line();
  Communicator& cp = rank.along(Axis::cp);
  const bool wide = !in_single(line);
  const Extents e(saved.q, saved.v, ContextLine(line).batch);
  const Chunk chunk = e.chunk(decays(rank, saved.a), saved.reach.view());
  const Tensor q = tensor(saved.q), g = tensor(cotangents[0]);
  const View entering = rank.workspace(accumulation_of(line), {e.entries()}),
             adjoints = rank.workspace(accumulation_of(line), e.states());
  if (cp.size() > 1) {
    const View own = rank.workspace(accumulation_of(line), {1, e.entries()}),
               all = rank.workspace(own.dtype, {cp.size(), e.entries()});
    perform(Adjoints{chunk, q, g, {}, {}, tensor(own), wide}, "the cotangent of a block's state");
    gather(rank, own, all, true);
    fold(rank, {all, summaries(saved.summaries.view(), e).decays}, behind(cp.rank(), cp.size()),
         entering, true);
  } else {
    set_zero(entering);
  }
  perform(Adjoints{chunk, q, g, tensor(entering), tensor(adjoints), {}, wide},
          "cotangents of states");
  const Tensor S = tensor(saved.states.view()), G = tensor(adjoints);
  const auto product = [&](const Tensor& m, const Tensor& x, bool turned, const View& to) {
    perform(
        StateProduct{m, x, chunk.reach, tensor(to), e.heads, e.key_dim, e.value_dim, turned, wide},
        "a gradient of a recurrence");
  };
  product(S, g, false, gradients[0]);
  product(G, tensor(saved.v), false, gradients[1]);
  product(G, tensor(saved.k), true, gradients[2]);
  perform(DecayGradient{chunk, S, G, tensor(state_before(rank, saved.entering.view())),
                        tensor(gradients[3]), wide},
          "the gradient of decays");
}

}  // namespace shardproof::primitives
