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
  const Blocks blocks(c);
  const bool wide = !in_single(line);
  const DType type = accumulation_of(line);
  auto saved = std::make_unique<ScanSaved>();
  saved->q = inputs[0], saved->k = inputs[1], saved->v = inputs[2];
  saved->a = factors(rank, inputs[3], saved->factors);
  saved->reach = uploaded(reach(c, cp.rank()));
  const View q = saved->q, k = saved->k, v = saved->v, reach = saved->reach.view(),
             a = decays(rank, saved->a);
  const StateExtents all(q, v, c.batch), e(blocks.of(q, 0), blocks.of(v, 0), c.batch);
  saved->entering = Kept(type, {blocks.each, e.entries()});
  saved->states = Kept(type, all.of_tokens());
  const View entering = saved->entering.view(), states = saved->states.view();
  if (cp.size() > 1) {
    const int64_t n = e.entries() + e.states();
    const View own = rank.workspace(type, {blocks.each, n}),
               handed_on = decays_handed_on(rank, saved->a);
    saved->summaries = Kept(type, {blocks.count(), n});
    for (int i = 0; i < blocks.each; ++i) {
      const Summaries mine = summaries(own.narrow(0, i, 1), e.entries());
      const View within = blocks.of(reach, i);
      perform(States{e.chunk(blocks.of(a, i), within),
                     tensor(blocks.of(k, i)),
                     tensor(blocks.of(v, i)),
                     {},
                     {},
                     tensor(mine.parts),
                     wide},
              "the state of a block");
      perform(ChunkDecay{e.chunk(blocks.of(handed_on, i), within), tensor(mine.through), wide},
              "the decay of a block");
    }
    gather(rank, own, saved->summaries.view(), false);
    fold_all(rank, blocks, summaries(saved->summaries.view(), e.entries()), entering, false);
  } else {
    set_zero(entering);
  }
  for (int i = 0; i < blocks.each; ++i)
    perform(States{e.chunk(blocks.of(a, i), blocks.of(reach, i)),
                   tensor(blocks.of(k, i)),
                   tensor(blocks.of(v, i)),
                   tensor(entering.narrow(0, i, 1)),
                   tensor(blocks.of(states, i)),
                   {},
                   wide},
            "states");
  perform(StateProduct{tensor(states), tensor(q), tensor(reach), tensor(outputs[0]), e.heads,
                       e.key_dim, e.value_dim, true, wide},
          "what is read from states");
  return saved;
}

void ScanContext::backward(Rank& rank, Saved& state, std::span<const View> cotangents,
                           std::span<const View> gradients) {
  const auto& saved = static_cast<const ScanSaved&>(state);
  const Case& line = rank.line();
  Communicator& cp = rank.along(Axis::cp);
  const ContextLine c(line);
  const Blocks blocks(c);
  const bool wide = !in_single(line);
  const DType type = accumulation_of(line);
  const View q = saved.q, g = cotangents[0], reach = saved.reach.view(), a = decays(rank, saved.a),
             states = saved.states.view();
  const StateExtents all(q, saved.v, c.batch), e(blocks.of(q, 0), blocks.of(saved.v, 0), c.batch);
  const View entering = rank.workspace(type, {blocks.each, e.entries()}),
             adjoints = rank.workspace(type, all.of_tokens());
  const auto chunk = [&](int i) { return e.chunk(blocks.of(a, i), blocks.of(reach, i)); };
  if (cp.size() > 1) {
    const View own = rank.workspace(type, {blocks.each, e.entries()}),
               gathered = rank.workspace(type, {blocks.count(), e.entries()});
    for (int i = 0; i < blocks.each; ++i)
      perform(Adjoints{chunk(i),
                       tensor(blocks.of(q, i)),
                       tensor(blocks.of(g, i)),
                       {},
                       {},
                       tensor(own.narrow(0, i, 1)),
                       wide},
              "the cotangent of a block's state");
    gather(rank, own, gathered, true);
    const View through = summaries(saved.summaries.view(), e.entries()).through;
    fold_all(rank, blocks, {gathered, through}, entering, true);
  } else {
    set_zero(entering);
  }
  for (int i = 0; i < blocks.each; ++i)
    perform(Adjoints{chunk(i),
                     tensor(blocks.of(q, i)),
                     tensor(blocks.of(g, i)),
                     tensor(entering.narrow(0, i, 1)),
                     tensor(blocks.of(adjoints, i)),
                     {},
                     wide},
            "cotangents of states");
  const Tensor S = tensor(states), G = tensor(adjoints);
  const auto product = [&](const Tensor& m, const View& x, bool turned, const View& to) {
    perform(StateProduct{m, tensor(x), tensor(reach), tensor(to), e.heads, e.key_dim, e.value_dim,
                         turned, wide},
            "a gradient of a recurrence");
  };
  product(S, g, false, gradients[0]);
  product(G, saved.v, false, gradients[1]);
  product(G, saved.k, true, gradients[2]);
  const View of_decays = decay_gradient(rank, gradients[3]),
             before = state_before(rank, saved.entering.view());
  for (int i = 0; i < blocks.each; ++i)
    perform(DecayGradient{chunk(i), tensor(blocks.of(states, i)), tensor(blocks.of(adjoints, i)),
                          tensor(before.narrow(0, i, 1)), tensor(blocks.of(of_decays, i)), wide},
            "the gradient of decays");
  hand_out(rank, of_decays, saved.a, gradients[3]);
}

}  // namespace shardproof::primitives
