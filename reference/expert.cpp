// Loops over tokens, their choices and the elements of the expert's weight.
#include "reference/expert.hpp"

#include <stdexcept>
#include <string>

namespace shardproof::reference {
namespace {

// Calls visit(t, place of (t,j) in chosen, first element of the chosen weight).
template <class Visit>
void each_choice(const ExpertShape& s, In chosen, Visit visit) {
  for (int64_t t = 0; t < s.tokens; ++t)
    for (int64_t j = 0; j < s.choices; ++j) {
      const int64_t slot = t * s.choices + j, expert = int64_t(chosen[size_t(slot)]);
      if (expert < 0 || expert >= s.experts)
        throw std::invalid_argument("reference experts: expected an expert from 0 to " +
                                    std::to_string(s.experts - 1) + ", met " +
                                    std::to_string(expert) + " of token " + std::to_string(t));
      visit(t, size_t(slot), expert * s.out * s.in);
    }
}

}  // namespace

Values choices_of_experts(const BalanceShape& s, In chosen) {
  Values n(size_t(s.experts));
  each_choice({s.tokens, s.choices, s.experts, 0, 0}, chosen,
              [&](int64_t, size_t slot, int64_t) { ++n[size_t(chosen[slot])]; });
  return n;
}

double balance(const BalanceShape& s, In probs, In chosen) {
  const Values n = choices_of_experts(s, chosen);
  double loss = 0;
  for (size_t i = 0; i < probs.size(); ++i) loss += n[i % n.size()] * probs[i];
  return loss;
}

Values balance_backward(const BalanceShape& s, In chosen, double g) {
  const Values n = choices_of_experts(s, chosen);
  Values d(size_t(s.tokens * s.experts));
  for (size_t i = 0; i < d.size(); ++i) d[i] = g * n[i % n.size()];
  return d;
}

Values experts(const ExpertShape& s, In x, In chosen, In probs, In w) {
  Values y(size_t(s.tokens * s.out));
  each_choice(s, chosen, [&](int64_t t, size_t slot, int64_t first) {
    for (int64_t o = 0; o < s.out; ++o) {
      double product = 0;
      for (int64_t i = 0; i < s.in; ++i)
        product += w[size_t(first + o * s.in + i)] * x[size_t(t * s.in + i)];
      y[size_t(t * s.out + o)] += probs[slot] * product;
    }
  });
  return y;
}

ExpertGradients experts_backward(const ExpertShape& s, In x, In chosen, In probs, In w, In g) {
  ExpertGradients d{Values(x.size()), Values(probs.size()), Values(w.size())};
  each_choice(s, chosen, [&](int64_t t, size_t slot, int64_t first) {
    for (int64_t o = 0; o < s.out; ++o)
      for (int64_t i = 0; i < s.in; ++i) {
        const auto of_w = size_t(first + o * s.in + i), of_x = size_t(t * s.in + i);
        const double of_y = g[size_t(t * s.out + o)];
        d.x[of_x] += probs[slot] * of_y * w[of_w];
        d.w[of_w] += probs[slot] * of_y * x[of_x];
        d.probs[slot] += of_y * w[of_w] * x[of_x];
      }
  });
  return d;
}

}  // namespace shardproof::reference
