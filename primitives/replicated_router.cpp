#include "primitives/gemm.hpp"
#include "primitives/pointwise.hpp"
#include "primitives/replicated_layers.hpp"

namespace shardproof::primitives {
namespace {

struct RouterSaved : Saved {
  View x, w;
};

}  // namespace

std::vector<Axis> ReplicatedRouter::summed_over(const Case& line) const {
  return axes_of_tokens(line);
}

void ReplicatedRouter::sum_gradients(Parallel& p, const Parts& parts,
                                     const std::vector<Axis>& axes) {
  coalesced_all_reduce(p, parts, axes);
}

uint64_t ReplicatedRouter::seed_of(Rank& rank) const { return rank.line().seed(); }

bool ReplicatedRouter::init(Rank& rank, std::span<const View> parameters) {
  for (size_t k = 0; k < parameters.size(); ++k)
    perform(InitialValues{tensor(parameters[k]), seed_of(rank), uint32_t(k)}, "initial values");
  return true;
}

// inputs x, w, [b]; output y.
std::unique_ptr<Saved> ReplicatedRouter::forward(Rank& rank, std::span<const View> inputs,
                                                 std::span<const View> outputs) {
  if (auto refused = refused_router(rank.line())) throw *refused;
  Parallel p(rank);
  auto saved = std::make_unique<RouterSaved>();
  saved->x = inputs[0];
  saved->w = inputs[1];
  const View b = inputs.size() > 2 ? inputs[2] : View{};
  gemm(plain(inputs[0]), turned(inputs[1]), outputs[0], p.accumulate, &b);
  return saved;
}

void ReplicatedRouter::backward(Rank& rank, Saved& state, std::span<const View> cotangents,
                                std::span<const View> gradients) {
  Parallel p(rank);
  const auto& saved = static_cast<const RouterSaved&>(state);
  const View& g = cotangents[0];
  into_running_sums(
      p, gradients,
      [&](std::span<const View> own) {
        gemm(plain(g), plain(saved.w), own[0], p.accumulate);
        Parts parts;
        for (size_t i = 1; i < own.size(); ++i)
          if (own[i].data) parts.push_back({partial_like(p, own[i]), own[i]});
        gemm(turned(g), plain(saved.x), parts[0].partial, p.accumulate);
        if (parts.size() > 1) column_sums(g, parts[1].partial, p.accumulate);
        sum_gradients(p, parts, summed_over(rank.line()));
      },
      add_into);
}

}  // namespace shardproof::primitives
