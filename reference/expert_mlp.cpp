// Expert by expert: the rows that have chosen it go through its block, as in mlp.hpp.
#include "reference/expert_mlp.hpp"

#include <cmath>

#include "reference/running_error.hpp"

namespace shardproof::reference {
namespace {

// An expert's part: slots t k + j that chose it, their tokens' rows, its weights.
struct Part {
  std::vector<size_t> slots;
  Values x;
  MlpInputs in;
  MlpShape shape;
};

// Rows of width h of the slots' tokens, weighed where there are weights.
Values rows_of(const ExpertMlpShape& s, const std::vector<size_t>& slots, In of_tokens,
               In weights = {}) {
  const auto h = size_t(s.hidden);
  Values rows;
  for (size_t slot : slots)
    for (size_t i = 0; i < h; ++i)
      rows.push_back(of_tokens[slot / size_t(s.choices) * h + i] *
                     (weights.empty() ? 1 : weights[slot]));
  return rows;
}

// Calls each(part, first element of its w1, of its w2) for every expert that was chosen.
template <class Each>
void each_part(const ExpertMlpShape& s, const ExpertMlpInputs& in, Each each) {
  const Values n = choices_of_experts({s.tokens, s.choices, s.experts}, in.chosen);
  for (size_t e = 0; e < n.size(); ++e) {
    if (n[e] == 0) continue;
    Part part;
    for (size_t slot = 0; slot < in.chosen.size(); ++slot)
      if (in.chosen[slot] == double(e)) part.slots.push_back(slot);
    part.x = rows_of(s, part.slots, in.x);
    part.shape = s.expert(int64_t(part.slots.size()));
    const auto of_w1 = size_t(part.shape.width() * s.hidden), of_w2 = size_t(s.hidden * s.ffn);
    part.in.x = part.x;
    part.in.w1 = in.w1.subspan(e * of_w1, of_w1), part.in.w2 = in.w2.subspan(e * of_w2, of_w2);
    each(part, e * of_w1, e * of_w2);
  }
}

// Calls each(row of the part, its element, the same of the token's row).
template <class Each>
void each_element(const ExpertMlpShape& s, const Part& part, Each each) {
  const auto h = size_t(s.hidden), k = size_t(s.choices);
  for (size_t row = 0; row < part.slots.size(); ++row)
    for (size_t i = 0; i < h; ++i) each(part.slots[row], row * h + i, part.slots[row] / k * h + i);
}

void put(const Values& own, size_t first, Values& whole) {
  for (size_t i = 0; i < own.size(); ++i) whole[first + i] = own[i];
}
Loss loss_of(size_t elements) { return {Values(elements), Values(elements)}; }
void put(const Loss& own, size_t first, Loss& whole) {
  put(own.error, first, whole.error), put(own.magnitude, first, whole.magnitude);
}

// A sum of products with exact factors, one of its terms: |factor| times what x may be.
void add_term(Loss& sum, size_t at, double factor, const Uncertain& x, size_t i, double gamma) {
  sum.error[at] += std::abs(factor) * (x.error[i] + gamma * x.most(i));
  sum.magnitude[at] += std::abs(factor) * x.most(i);
}

Uncertain results_of(const Part& part, const Rounding& r) {
  Uncertain z{mlp(part.shape, part.in), mlp_loss(part.shape, part.in, r).error};
  store(z, r);
  return z;
}

}  // namespace

Values expert_mlp(const ExpertMlpShape& s, const ExpertMlpInputs& in) {
  Values y(in.x.size());
  each_part(s, in, [&](const Part& part, size_t, size_t) {
    const Values z = mlp(part.shape, part.in);
    each_element(s, part, [&](size_t slot, size_t i, size_t t) { y[t] += in.probs[slot] * z[i]; });
  });
  return y;
}

ExpertMlpGradients expert_mlp_backward(const ExpertMlpShape& s, const ExpertMlpInputs& in, In g) {
  ExpertMlpGradients d{Values(in.x.size()), Values(in.probs.size()), Values(in.w1.size()),
                       Values(in.w2.size())};
  each_part(s, in, [&](const Part& part, size_t of_w1, size_t of_w2) {
    const Values z = mlp(part.shape, part.in), rows = rows_of(s, part.slots, g, in.probs);
    const MlpGradients own = mlp_backward(part.shape, part.in, rows);
    each_element(s, part, [&](size_t slot, size_t i, size_t t) {
      d.x[t] += own.x[i];
      d.probs[slot] += g[t] * z[i];
    });
    put(own.w1, of_w1, d.w1), put(own.w2, of_w2, d.w2);
  });
  return d;
}

Loss expert_mlp_loss(const ExpertMlpShape& s, const ExpertMlpInputs& in, const Rounding& r) {
  const double gamma = gamma_of(double(s.choices) + 1, r.accumulate);
  Loss y = loss_of(in.x.size());
  each_part(s, in, [&](const Part& part, size_t, size_t) {
    const Uncertain z = results_of(part, r);
    each_element(s, part, [&](size_t slot, size_t i, size_t t) {
      add_term(y, t, in.probs[slot], z, i, gamma);
    });
  });
  return y;
}

ExpertMlpLosses expert_mlp_backward_loss(const ExpertMlpShape& s, const ExpertMlpInputs& in, In g,
                                         const Rounding& r) {
  const double of_choices = gamma_of(double(s.choices), r.accumulate),
               of_hidden = gamma_of(double(s.hidden) + 1, r.accumulate);
  ExpertMlpLosses d{loss_of(in.x.size()), loss_of(in.probs.size()), loss_of(in.w1.size()),
                    loss_of(in.w2.size())};
  each_part(s, in, [&](const Part& part, size_t of_w1, size_t of_w2) {
    const Values rows = rows_of(s, part.slots, g, in.probs);
    Uncertain sent{rows, times(rows, r.accumulate)};
    store(sent, r);
    const MlpLosses own = mlp_backward_loss(part.shape, part.in, sent, r);
    put(own.w1, of_w1, d.w1), put(own.w2, of_w2, d.w2);
    Uncertain dx{mlp_backward(part.shape, part.in, rows).x, own.x.error};
    store(dx, r);
    const Uncertain z = results_of(part, r);
    each_element(s, part, [&](size_t slot, size_t i, size_t t) {
      add_term(d.x, t, 1, dx, i, of_choices);
      add_term(d.probs, slot, g[t], z, i, of_hidden);
    });
  });
  return d;
}

}  // namespace shardproof::reference
