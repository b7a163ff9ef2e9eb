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
  const bool wide = !in_single(line);
  const DType type = accumulation_of(line);
  auto saved = std::make_unique<DeltaSaved>();
  saved->q = inputs[0], saved->k = inputs[1], saved->v = inputs[2], saved->b = inputs[4];
  saved->a = factors(rank, inputs[3], saved->factors);
  saved->reach = uploaded(reach(c, cp.rank()));
  const StateExtents e(saved->q, saved->v, c.batch);
  saved->entering = Kept(type, {e.entries()});
  saved->states = Kept(type, e.of_tokens());
  const View steps = this->steps(rank, saved->b, saved->a), reach = saved->reach.view();
  const Tensor v = tensor(values(rank, saved->v, saved->a, saved->b)),
               states = tensor(saved->states.view());
  const DeltaRule rule = rule_of(e, decays(rank, saved->a), saved->k, steps, reach);
  if (cp.size() > 1) {
    const int64_t n = e.entries() + e.states() * e.key_dim * e.key_dim;
    const View own = rank.workspace(type, {1, n});
    saved->summaries = Kept(type, {cp.size(), n});
    const Summaries mine = summaries(own, e.entries());
    perform(DeltaStates{rule, v, {}, {}, tensor(mine.parts), e.value_dim, wide},
            "the state of a block");
    const Kept within = uploaded(reach_handed_on(c, cp.rank()));
    const DeltaRule handed_on = rule_of(e, decays_handed_on(rank, saved->a), saved->k,
                                        steps_handed_on(rank, steps), within.view());
    perform(DeltaStates{handed_on, {}, {}, {}, tensor(mine.through), e.key_dim, wide},
            "what a block does to a state");
    gather(rank, own, saved->summaries.view(), false);
    fold(rank, summaries(saved->summaries.view(), e.entries()), before(cp.rank(), cp.size()),
         saved->entering.view(), false);
  } else {
    set_zero(saved->entering.view());
  }
  const View running = rank.workspace(type, {e.entries()});
  perform(DeltaStates{rule, v, tensor(saved->entering.view()), states, tensor(running), e.value_dim,
                      wide},
          "states");
  perform(StateProduct{states, tensor(saved->q), rule.chunk.reach, tensor(outputs[0]), e.heads,
                       e.key_dim, e.value_dim, true, wide},
          "what is read from states");
  return saved;
}

void DeltaContext::backward(Rank& rank, Saved& state, std::span<const View> cotangents,
                            std::span<const View> gradients) {
  const auto& saved = static_cast<const DeltaSaved&>(state);
  const Case& line = rank.line();
  Communicator& cp = rank.along(Axis::cp);
  const bool wide = !in_single(line);
  const DType type = accumulation_of(line);
  const StateExtents e(saved.q, saved.v, ContextLine(line).batch);
  const DeltaRule rule =
      rule_of(e, decays(rank, saved.a), saved.k, steps(rank, saved.b, saved.a), saved.reach.view());
  const Tensor q = tensor(saved.q), g = tensor(cotangents[0]);
  const View entering = rank.workspace(type, {e.entries()}),
             running = rank.workspace(type, {1, e.entries()}),
             adjoints = rank.workspace(type, e.of_tokens());
  if (cp.size() > 1) {
    const View all = rank.workspace(type, {cp.size(), e.entries()});
    perform(DeltaAdjoints{rule, q, g, {}, {}, tensor(running), wide},
            "the cotangent of a block's state");
    gather(rank, running, all, true);
    fold(rank, {all, summaries(saved.summaries.view(), e.entries()).through},
         behind(cp.rank(), cp.size()), entering, true);
  } else {
    set_zero(entering);
  }
  perform(DeltaAdjoints{rule, q, g, tensor(entering), tensor(adjoints), tensor(running), wide},
          "cotangents of states");
  const Tensor S = tensor(saved.states.view()), G = tensor(adjoints),
               before = tensor(state_before(rank, saved.entering.view()));
  const Tensor errors = tensor(rank.workspace(type, saved.v.shape)),
               weights = tensor(rank.workspace(type, saved.v.shape)),
               terms = tensor(rank.workspace(type, saved.k.shape));
  const View of_decays = decay_gradient(rank, gradients[3]);
  const char* what = "a gradient of the delta rule";
  const bool by_channel = rule.gates > 1 || e.key_dim == 1;
  perform(StateProduct{S, g, rule.chunk.reach, tensor(gradients[0]), e.heads, e.key_dim,
                       e.value_dim, false, wide},
          what);
  perform(DeltaErrors{rule, tensor(values(rank, saved.v, saved.a, saved.b)), before, S, G, errors,
                      weights, tensor(gradients[2]), wide},
          what);
  perform(DeltaKeys{rule, before, S, G, errors, weights, tensor(gradients[1]),
                    by_channel ? tensor(of_decays) : terms, wide},
          what);
  perform(DeltaSteps{errors, weights, terms, tensor(gradients[4]),
                     by_channel ? Tensor{} : tensor(of_decays), e.key_dim, e.value_dim, wide},
          what);
  hand_out(rank, of_decays, saved.a, gradients[3]);
}

}  // namespace shardproof::primitives
