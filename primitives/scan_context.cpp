#include "primitives/scan_context.hpp"

#include "primitives/work.hpp"

namespace shardproof::primitives {
namespace {

struct ScanSaved : Saved {
  View q, k, v, a;
  Kept reach, factors, entering, states, summaries;
};

}  // namespace

void ScanContext::fold(Rank& rank, const Summaries& all, const std::vector<int64_t>& chain,
                       const View& state, bool) {
  const Kept passing = uploaded(passes(ContextLine(rank.line()))), order = uploaded(chain);
  perform(FoldStates{tensor(all.parts), tensor(all.through), tensor(passing.view()),
                     tensor(order.view()), tensor(state), state.elements() / all.through.shape[1],
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
  saved->q = inputs[0], saved->k = inputs[1], saved->v = inputs[2];
  saved->a = factors(rank, inputs[3], saved->factors);
  saved->reach = uploaded(reach(c, cp.rank()));
  const StateExtents e(inputs[0], inputs[2], c.batch);
  saved->entering = Kept(accumulation_of(line), {e.entries()});
  saved->states = Kept(accumulation_of(line), e.of_tokens());
  const Chunk chunk = e.chunk(decays(rank, saved->a), saved->reach.view());
  const Tensor k = tensor(saved->k), v = tensor(saved->v),
               entering = tensor(saved->entering.view());
  if (cp.size() > 1) {
    const int64_t n = e.entries() + e.states();
    const View own = rank.workspace(accumulation_of(line), {1, n});
    saved->summaries = Kept(own.dtype, {cp.size(), n});
    const Summaries mine = summaries(own, e.entries());
    perform(States{chunk, k, v, {}, {}, tensor(mine.parts), wide}, "the state of a block");
    perform(ChunkDecay{e.chunk(decays_handed_on(rank, saved->a), saved->reach.view()),
                       tensor(mine.through), wide},
            "the decay of a block");
    gather(rank, own, saved->summaries.view(), false);
    fold(rank, summaries(saved->summaries.view(), e.entries()), before(cp.rank(), cp.size()),
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
  const StateExtents e(saved.q, saved.v, ContextLine(line).batch);
  const Chunk chunk = e.chunk(decays(rank, saved.a), saved.reach.view());
  const Tensor q = tensor(saved.q), g = tensor(cotangents[0]);
  const View entering = rank.workspace(accumulation_of(line), {e.entries()}),
             adjoints = rank.workspace(accumulation_of(line), e.of_tokens());
  if (cp.size() > 1) {
    const View own = rank.workspace(accumulation_of(line), {1, e.entries()}),
               all = rank.workspace(own.dtype, {cp.size(), e.entries()});
    perform(Adjoints{chunk, q, g, {}, {}, tensor(own), wide}, "the cotangent of a block's state");
    gather(rank, own, all, true);
    fold(rank, {all, summaries(saved.summaries.view(), e.entries()).through},
         behind(cp.rank(), cp.size()), entering, true);
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
  const View of_decays = decay_gradient(rank, gradients[3]);
  perform(DecayGradient{chunk, S, G, tensor(state_before(rank, saved.entering.view())),
                        tensor(of_decays), wide},
          "the gradient of decays");
  hand_out(rank, of_decays, saved.a, gradients[3]);
}

}  // namespace shardproof::primitives
