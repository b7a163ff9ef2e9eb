#include "primitives/delta_context.hpp"

namespace shardproof::primitives {
namespace {

struct DeltaSaved : Saved {
  View q, k, v, a, b;
  Kept reach, factors, entering, states, summaries;
};

DeltaRule rule_of(const StateExtents& e, const View& a, const View& k, const View& b,
                  const View& reach) {
  return {e.chunk(a, reach), tensor(k), tensor(b), a.elements() / (e.tokens * e.heads)};
}

}  // namespace

View DeltaContext::values(Rank&, const View& v, const View&, const View&) const { return v; }
View DeltaContext::steps(Rank&, const View& b, const View&) const { return b; }
View DeltaContext::steps_handed_on(Rank&, const View& steps) const { return steps; }
std::vector<int64_t> DeltaContext::reach_handed_on(const ContextLine& c, int r) const {
  return reach(c, r);
}

void DeltaContext::take_through(Rank& rank, const Summaries& all, int64_t block, const View& before,
                                const View& after, bool backward) {
  const Case& line = rank.line();
  const bool passed = before.data && passes(ContextLine(line))[size_t(block)] != 0;
  const Tensor none, part = tensor(all.parts.narrow(0, block, 1)),
                     through = tensor(all.through.narrow(0, block, 1));
  perform(TakeThrough{passed ? through : none, part, passed ? tensor(before) : none, tensor(after),
                      line.at("head_dim"), line.at("v_dim"), backward, !in_single(line)},
          "a state on its way through a block");
}

void DeltaContext::fold(Rank& rank, const Summaries& all, const std::vector<int64_t>& chain,
                        const View& state, bool backward) {
  if (chain.empty()) return set_zero(state);
  const View other = rank.workspace(state.dtype, state.shape);
  // Their turns end with the state's.
  View before, after = chain.size() % 2 ? state : other;
  for (const int64_t block : chain) {
    take_through(rank, all, block, before, after, backward);
    before = after;
    after = before.data == state.data ? other : state;
  }
}

// inputs q, k, v, a, b; output o.
std::unique_ptr<Saved> DeltaContext::forward(Rank& rank, std::span<const View> inputs,
                                             std::span<const View> outputs) {
  const Case& line = rank.line();
  if (auto refused = refused_delta(line)) throw *refused;
  Communicator& cp = rank.along(Axis::cp);
  const ContextLine c(line);
  const Blocks blocks(c);
  const bool wide = !in_single(line);
  const DType type = accumulation_of(line);
  auto saved = std::make_unique<DeltaSaved>();
  saved->q = inputs[0], saved->k = inputs[1], saved->v = inputs[2], saved->b = inputs[4];
  saved->a = factors(rank, inputs[3], saved->factors);
  saved->reach = uploaded(reach(c, cp.rank()));
  const View k = saved->k, v = values(rank, saved->v, saved->a, saved->b),
             b = steps(rank, saved->b, saved->a), a = decays(rank, saved->a),
             reach = saved->reach.view();
  const StateExtents all(saved->q, v, c.batch), e(blocks.of(saved->q, 0), blocks.of(v, 0), c.batch);
  saved->entering = Kept(type, {blocks.each, e.entries()});
  saved->states = Kept(type, all.of_tokens());
  const View entering = saved->entering.view(), states = saved->states.view();
  const auto rule = [&](const View& a, const View& b, const View& reach, int i) {
    return rule_of(e, blocks.of(a, i), blocks.of(k, i), blocks.of(b, i), blocks.of(reach, i));
  };
  if (cp.size() > 1) {
    const int64_t n = e.entries() + e.states() * e.key_dim * e.key_dim;
    const View own = rank.workspace(type, {blocks.each, n}),
               a_on = decays_handed_on(rank, saved->a), b_on = steps_handed_on(rank, b);
    const Kept within = uploaded(reach_handed_on(c, cp.rank()));
    saved->summaries = Kept(type, {blocks.count(), n});
    for (int i = 0; i < blocks.each; ++i) {
      const Summaries mine = summaries(own.narrow(0, i, 1), e.entries());
      perform(DeltaStates{rule(a, b, reach, i),
                          tensor(blocks.of(v, i)),
                          {},
                          {},
                          tensor(mine.parts),
                          e.value_dim,
                          wide},
              "the state of a block");
      perform(DeltaStates{rule(a_on, b_on, within.view(), i),
                          {},
                          {},
                          {},
                          tensor(mine.through),
                          e.key_dim,
                          wide},
              "what a block does to a state");
    }
    gather(rank, own, saved->summaries.view(), false);
    fold_all(rank, blocks, summaries(saved->summaries.view(), e.entries()), entering, false);
  } else {
    set_zero(entering);
  }
  const View running = rank.workspace(type, {blocks.each, e.entries()});
  for (int i = 0; i < blocks.each; ++i)
    perform(DeltaStates{rule(a, b, reach, i), tensor(blocks.of(v, i)),
                        tensor(entering.narrow(0, i, 1)), tensor(blocks.of(states, i)),
                        tensor(running.narrow(0, i, 1)), e.value_dim, wide},
            "states");
  perform(StateProduct{tensor(states), tensor(saved->q), tensor(reach), tensor(outputs[0]), e.heads,
                       e.key_dim, e.value_dim, true, wide},
          "what is read from states");
  return saved;
}

void DeltaContext::backward(Rank& rank, Saved& state, std::span<const View> cotangents,
                            std::span<const View> gradients) {
  const auto& saved = static_cast<const DeltaSaved&>(state);
  const Case& line = rank.line();
  Communicator& cp = rank.along(Axis::cp);
  const ContextLine c(line);
  const Blocks blocks(c);
  const bool wide = !in_single(line);
  const DType type = accumulation_of(line);
  const View q = saved.q, g = cotangents[0], v = values(rank, saved.v, saved.a, saved.b),
             a = decays(rank, saved.a), b = steps(rank, saved.b, saved.a),
             reach = saved.reach.view(), states = saved.states.view();
  const StateExtents all(q, v, c.batch), e(blocks.of(q, 0), blocks.of(v, 0), c.batch);
  const auto rule = [&](int i) {
    return rule_of(e, blocks.of(a, i), blocks.of(saved.k, i), blocks.of(b, i), blocks.of(reach, i));
  };
  const View entering = rank.workspace(type, {blocks.each, e.entries()}),
             running = rank.workspace(type, {blocks.each, e.entries()}),
             adjoints = rank.workspace(type, all.of_tokens());
  if (cp.size() > 1) {
    const View gathered = rank.workspace(type, {blocks.count(), e.entries()});
    for (int i = 0; i < blocks.each; ++i)
      perform(DeltaAdjoints{rule(i),
                            tensor(blocks.of(q, i)),
                            tensor(blocks.of(g, i)),
                            {},
                            {},
                            tensor(running.narrow(0, i, 1)),
                            wide},
              "the cotangent of a block's state");
    gather(rank, running, gathered, true);
    const View through = summaries(saved.summaries.view(), e.entries()).through;
    fold_all(rank, blocks, {gathered, through}, entering, true);
  } else {
    set_zero(entering);
  }
  for (int i = 0; i < blocks.each; ++i)
    perform(DeltaAdjoints{rule(i), tensor(blocks.of(q, i)), tensor(blocks.of(g, i)),
                          tensor(entering.narrow(0, i, 1)), tensor(blocks.of(adjoints, i)),
                          tensor(running.narrow(0, i, 1)), wide},
            "cotangents of states");
  const View before = state_before(rank, saved.entering.view()),
             errors = rank.workspace(type, v.shape), weights = rank.workspace(type, v.shape),
             terms = rank.workspace(type, saved.k.shape);
  const View of_decays = decay_gradient(rank, gradients[3]);
  const bool by_channel = of_decays.shape == saved.k.shape;
  const char* what = "a gradient of the delta rule";
  perform(StateProduct{tensor(states), tensor(g), tensor(reach), tensor(gradients[0]), e.heads,
                       e.key_dim, e.value_dim, false, wide},
          what);
  for (int i = 0; i < blocks.each; ++i) {
    const Tensor entered = tensor(before.narrow(0, i, 1)), S = tensor(blocks.of(states, i)),
                 G = tensor(blocks.of(adjoints, i)), error = tensor(blocks.of(errors, i)),
                 weight = tensor(blocks.of(weights, i));
    perform(DeltaErrors{rule(i), tensor(blocks.of(v, i)), entered, S, G, error, weight,
                        tensor(blocks.of(gradients[2], i)), wide},
            what);
    perform(DeltaKeys{rule(i), entered, S, G, error, weight, tensor(blocks.of(gradients[1], i)),
                      tensor(blocks.of(by_channel ? of_decays : terms, i)), wide},
            what);
  }
  perform(DeltaSteps{tensor(errors), tensor(weights), tensor(terms), tensor(gradients[4]),
                     by_channel ? Tensor{} : tensor(of_decays), e.key_dim, e.value_dim, wide},
          what);
  hand_out(rank, of_decays, saved.a, gradients[3]);
}

}  // namespace shardproof::primitives
