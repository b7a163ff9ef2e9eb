#include "primitives/line.hpp"
#include "primitives/replicated_layers.hpp"

namespace shardproof::primitives {
namespace {

struct QkNormSaved : Saved {
  View x[2], weight[2];
  Kept statistics[2];
};

}  // namespace

std::vector<Axis> axes_of_heads(const Case& line) {
  return line.text("reduce") == "tp" ? with_ranks(line, {Axis::tp})
                                     : with_ranks(line, {Axis::tp, Axis::cp, Axis::dp});
}

std::vector<Axis> ReplicatedQkNorm::summed_over(const Case& line) const {
  return axes_of_heads(line);
}

// inputs q [T, n_h/p, d], k [T, own key heads, d], their weights [d]; outputs like q and k.
std::unique_ptr<Saved> ReplicatedQkNorm::forward(Rank& rank, std::span<const View> inputs,
                                                 std::span<const View> outputs) {
  if (auto refused = refused_qk_norm(rank.line())) throw *refused;
  Parallel p(rank);
  auto saved = std::make_unique<QkNormSaved>();
  for (size_t i = 0; i < 2; ++i) {
    saved->x[i] = inputs[i];
    saved->weight[i] = inputs[i + 2];
    saved->statistics[i] = Kept(p.accumulate, {inputs[i].elements() / inputs[i].shape.back(), 2});
    Norm(false).forward(p, inputs[i], inputs[i + 2], View{}, outputs[i],
                        saved->statistics[i].view());
  }
  return saved;
}

void ReplicatedQkNorm::backward(Rank& rank, Saved& state, std::span<const View> cotangents,
                                std::span<const View> gradients) {
  Parallel p(rank);
  const auto& saved = static_cast<const QkNormSaved&>(state);
  std::vector<View> own(gradients.begin(), gradients.end());
  const bool accumulates = rank.accumulates();
  Parts parts;
  for (size_t i = 0; i < 2; ++i) {
    if (accumulates) own[i + 2] = fresh_gradient(p, gradients[i + 2]);
    parts.push_back({partial_like(p, own[i + 2]), own[i + 2]});
    Norm(false).backward(p, saved.x[i], saved.weight[i], saved.statistics[i].view(), cotangents[i],
                         own[i], parts[i].partial, View{});
  }
  coalesced_all_reduce(p, parts, summed_over(rank.line()));
  if (accumulates)
    for (size_t i = 2; i < 4; ++i) add_into(own[i], gradients[i]);
}

}  // namespace shardproof::primitives
