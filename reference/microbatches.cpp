#include "reference/microbatches.hpp"

#include <algorithm>
#include <cmath>

namespace shardproof::reference {
namespace {

In rows(In all, int64_t first, int64_t count, int64_t hidden) {
  return all.subspan(size_t(first * hidden), size_t(count * hidden));
}

void append(Values& to, const Values& more) { to.insert(to.end(), more.begin(), more.end()); }

void add(std::vector<Values>& sums, const std::vector<Values>& more) {
  for (size_t l = 0; l < sums.size(); ++l)
    for (size_t i = 0; i < sums[l].size(); ++i) sums[l][i] += more[l][i];
}

Values divided(In dy, double divisor) {
  Values g;
  for (double v : dy) g.push_back(v / divisor);
  return g;
}

StackStep nothing_yet(const StackInputs& in) {
  StackStep step;
  for (size_t l = 0; l < in.w.size(); ++l) {
    step.d.w.emplace_back(in.w[l].size(), 0.0);
    step.d.b.emplace_back(in.b[l].size(), 0.0);
  }
  return step;
}

}  // namespace

StackStep stack_step(const StackInputs& in, In dy, int64_t groups, int64_t size, double divisor) {
  StackStep step = nothing_yet(in);
  const int64_t own = in.tokens / groups;
  for (int64_t group = 0; group < groups; ++group)
    for (int64_t at = 0; at < own; at += size) {
      const int64_t first = group * own + at, count = std::min(size, own - at);
      StackInputs microbatch = in;
      microbatch.tokens = count, microbatch.x = rows(in.x, first, count, in.hidden);
      const Values g = divided(rows(dy, first, count, in.hidden), divisor);
      const StackGradients d = stack_backward(microbatch, g);
      append(step.y, stack(microbatch));
      append(step.d.x, d.x);
      add(step.d.w, d.w), add(step.d.b, d.b);
    }
  return step;
}

Uncertain divided_cotangent(In dy, double divisor, const Rounding& r) {
  Uncertain g = certain(divided(dy, divisor));
  if (divisor == 1) return g;
  for (size_t i = 0; i < g.size(); ++i) g.error[i] = r.accumulate * std::abs(g.value[i]);
  store(g, r);
  return g;
}

}  // namespace shardproof::reference
