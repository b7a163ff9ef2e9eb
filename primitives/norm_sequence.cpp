#include "primitives/norm_sequence.hpp"

#include "primitives/linear_line.hpp"
#include "primitives/norm_rows.hpp"

namespace shardproof::primitives {
namespace {

int64_t rows_of(const View& x) { return x.elements() / x.shape.back(); }

struct NormSaved : Saved {
  View x, gamma;
  Kept statistics;
};

// gamma, [beta] behind x.
View optional(std::span<const View> views, size_t i) {
  return i < views.size() ? views[i] : View{};
}

}  // namespace

int64_t Norm::first_row(Parallel&, int64_t) const { return 0; }

void Norm::forward(Parallel& p, const View& x, const View& gamma, const View& beta, const View& y,
                   const View& statistics) const {
  perform(NormForward{tensor(x), tensor(gamma), tensor(beta), tensor(y), tensor(statistics),
                      x.shape.back(), norm_eps, centred_, p.accumulate == DType::f64},
          "a norm");
}

void Norm::backward(Parallel& p, const View& x, const View& gamma, const View& statistics,
                    const View& g, const View& dx, const View& dgamma, const View& dbeta) const {
  const bool wide = p.accumulate == DType::f64;
  const int64_t first = first_row(p, rows_of(x));
  if (dx.data)
    perform(NormBackward{tensor(x), tensor(gamma), tensor(statistics), tensor(g), tensor(dx),
                         x.shape.back(), centred_, wide},
            "the gradient of a norm");
  if (dgamma.data)
    perform(NormParameter{tensor(x), tensor(statistics), tensor(g), tensor(dgamma), first, wide},
            "the gradient of gamma");
  if (dbeta.data)
    perform(NormParameter{Tensor{}, Tensor{}, tensor(g), tensor(dbeta), first, wide},
            "the gradient of beta");
}

std::optional<Rejected> refused_norm(const Case& line) { return refused_own_tokens(line); }

std::unique_ptr<Norm> NormSequence::norm_of(const Case& line) const {
  return std::make_unique<Norm>(line.text("norm") == "layer");
}

std::vector<Axis> NormSequence::summed_over(const Case& line) const { return axes_of_tokens(line); }

void NormSequence::sum_gradients(Parallel& p, const Parts& parts, const std::vector<Axis>& axes) {
  coalesced_all_reduce(p, parts, axes);
}

// inputs x, gamma, [beta]; output y.
std::unique_ptr<Saved> NormSequence::forward(Rank& rank, std::span<const View> inputs,
                                             std::span<const View> outputs) {
  if (auto refused = refused_norm(rank.line())) throw *refused;
  Parallel p(rank);
  auto saved = std::make_unique<NormSaved>();
  saved->x = inputs[0];
  saved->gamma = inputs[1];
  saved->statistics = Kept(p.accumulate, {rows_of(inputs[0]), 2});
  norm_of(rank.line())
      ->forward(p, inputs[0], inputs[1], optional(inputs, 2), outputs[0], saved->statistics.view());
  return saved;
}

void NormSequence::backward(Rank& rank, Saved& state, std::span<const View> cotangents,
                            std::span<const View> gradients) {
  Parallel p(rank);
  const auto& saved = static_cast<const NormSaved&>(state);
  into_running_sums(
      p, gradients,
      [&](std::span<const View> own) {
        Parts parts;
        View sums[2];
        for (size_t i = 1; i < own.size(); ++i)
          if (own[i].data) parts.push_back({sums[i - 1] = partial_like(p, own[i]), own[i]});
        norm_of(rank.line())
            ->backward(p, saved.x, saved.gamma, saved.statistics.view(), cotangents[0], own[0],
                       sums[0], sums[1]);
        sum_gradients(p, parts, summed_over(rank.line()));
      },
      add_into);
}

}  // namespace shardproof::primitives
