// Gradients as tensors of their own: summed and averaged, measured and clipped, and spent in a
// step.
#include <sstream>

#include "primitives/clip.hpp"
#include "primitives/line.hpp"
#include "primitives/replicated_layers.hpp"

namespace shardproof::primitives {
namespace {

struct Nothing : Saved {};

// Inputs are gradients of class `summed`, then of class `averaged`; results in the same order.
std::vector<Parts> by_class(const Case& line, std::span<const View> from,
                            std::span<const View> to) {
  const size_t summed = size_t(line.at("summed"));
  std::vector<Parts> classes(2);
  for (size_t i = 0; i < from.size(); ++i) classes[i < summed ? 0 : 1].push_back({from[i], to[i]});
  return classes;
}

}  // namespace

std::vector<Axis> axes_named(const Case& line) {
  std::vector<Axis> axes;
  std::istringstream words(line.text("over"));
  for (std::string word; std::getline(words, word, ',');)
    if (const auto axis = axis_from(word)) axes.push_back(*axis);
  return axes;
}

// ---- Sums and means

void ReplicatedGradients::sum(Parallel& p, const Parts& parts, Communicator& group) {
  coalesced_all_reduce(p, parts, group);
}
void ReplicatedGradients::average(Parallel& p, const Parts& parts, Communicator& group) {
  coalesced_all_reduce(p, parts, group, Reduce::avg);
}

std::unique_ptr<Saved> ReplicatedGradients::forward(Rank& rank, std::span<const View> inputs,
                                                    std::span<const View> outputs) {
  if (auto refused = refused_gradients(rank.line())) throw *refused;
  Parallel p(rank);
  Communicator& group = rank.along(axes_named(rank.line()));
  const std::vector<Parts> classes = by_class(rank.line(), inputs, outputs);
  sum(p, classes[0], group);
  average(p, classes[1], group);
  return std::make_unique<Nothing>();
}

// P -> I has the backward I -> R, and the mean of equal copies that of the identity: both hand the
// cotangent on.
void ReplicatedGradients::backward(Rank&, Saved&, std::span<const View> cotangents,
                                   std::span<const View> gradients) {
  for (size_t i = 0; i < gradients.size(); ++i) convert(cotangents[i], gradients[i]);
}

// ---- The norm of all gradients

bool ReplicatedClip::counts_replicated(const Parallel& p) const { return p.tp.rank() == 0; }
bool ReplicatedClip::counts_sharded(const Parallel&) const { return true; }

double max_norm_of(const Case& line) { return number_of(line, "max_norm"); }

// inputs [replicated], [sharded]; outputs norm [1], then both clipped.
std::unique_ptr<Saved> ReplicatedClip::forward(Rank& rank, std::span<const View> inputs,
                                               std::span<const View> outputs) {
  if (auto refused = refused_clip(rank.line())) throw *refused;
  Parallel p(rank);
  const View own = p.workspace(p.accumulate, {1}), total = p.workspace(p.accumulate, {1});
  perform(SumOfSquares{counts_replicated(p) ? tensor(inputs[0]) : Tensor{},
                       counts_sharded(p) ? tensor(inputs[1]) : Tensor{}, tensor(own)},
          "a sum of squares");
  all_reduce(rank, p.tp, own, total);
  perform(SquareRoot{tensor(total), tensor(outputs[0])}, "a norm");
  for (size_t i = 0; i < 2; ++i)
    perform(
        Clipped{tensor(inputs[i]), tensor(total), tensor(outputs[i + 1]), max_norm_of(rank.line())},
        "clipping");
  return std::make_unique<Nothing>();
}

// ---- The step

double rate_of(const Case& line) { return number_of(line, "lr"); }

void ReplicatedStep::update(Parallel& p, const View& w, const View& g, double lr,
                            Communicator& group, const View& next) {
  const View total = p.workspace(p.accumulate, g.shape);
  coalesced_all_reduce(p, Parts{{g, total}}, group);
  combine(w, total, -lr, next);
}

std::unique_ptr<Saved> ReplicatedStep::forward(Rank& rank, std::span<const View> inputs,
                                               std::span<const View> outputs) {
  if (auto refused = refused_step(rank.line())) throw *refused;
  Parallel p(rank);
  update(p, inputs[0], inputs[1], rate_of(rank.line()), rank.along(axes_named(rank.line())),
         outputs[0]);
  return std::make_unique<Nothing>();
}

void ReplicatedStep::backward(Rank& rank, Saved&, std::span<const View> cotangents,
                              std::span<const View> gradients) {
  convert(cotangents[0], gradients[0]);
  scale(cotangents[0], gradients[1], -rate_of(rank.line()));
}

}  // namespace shardproof::primitives
