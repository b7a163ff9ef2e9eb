#include "reference/mixer.hpp"

#include <algorithm>

namespace shardproof::reference {
namespace {

using Sequences = std::span<const int64_t>;

Conv of_heads(const Mixer& m) { return {m.heads * m.head_dim, m.width}; }
Conv of_groups(const Mixer& m) { return {m.groups * m.state_dim, m.width}; }
Scan recurrence(const Mixer& m) { return {m.heads, m.state_dim, m.head_dim}; }

// Where a head's features begin in a row of groups.
size_t of_group(const Mixer& m, size_t row, size_t head) {
  const size_t group = head / size_t(m.heads / m.groups);
  return (row * size_t(m.groups) + group) * size_t(m.state_dim);
}

// Calls visit(place by head, place by group) for each feature of each head.
template <class Visit>
void each_feature(const Mixer& m, size_t rows, const Visit& visit) {
  const size_t heads = size_t(m.heads), n = size_t(m.state_dim);
  for (size_t t = 0; t < rows; ++t)
    for (size_t h = 0; h < heads; ++h)
      for (size_t i = 0; i < n; ++i) visit((t * heads + h) * n + i, of_group(m, t, h) + i);
}

Values by_head(const Mixer& m, size_t rows, const Values& by_group) {
  Values all(rows * size_t(m.heads * m.state_dim));
  each_feature(m, rows, [&](size_t head, size_t group) { all[head] = by_group[group]; });
  return all;
}
Values by_group(const Mixer& m, size_t rows, const Values& by_head) {
  Values sums(rows * size_t(m.groups * m.state_dim));
  each_feature(m, rows, [&](size_t head, size_t group) { sums[group] += by_head[head]; });
  return sums;
}

// x', and b' and c' by head.
struct Filtered {
  Values x, b, c;
};
Filtered filtered(const Mixer& m, Sequences of, const MixerInputs& in) {
  return {conv(of_heads(m), of, in.x, in.wx, in.bx),
          by_head(m, of.size(), conv(of_groups(m), of, in.b, in.wb, in.bb)),
          by_head(m, of.size(), conv(of_groups(m), of, in.c, in.wc, in.bc))};
}

}  // namespace

Values mixer(const Mixer& m, Sequences of, const MixerInputs& in) {
  const Filtered f = filtered(m, of, in);
  Values y = scan(recurrence(m), of, f.c, f.b, f.x, in.a);
  const size_t heads = size_t(m.heads), dim = size_t(m.head_dim);
  for (size_t i = 0; i < y.size(); ++i) y[i] += in.d[i / dim % heads] * f.x[i];
  return y;
}

MixerGradients mixer_backward(const Mixer& m, Sequences of, const MixerInputs& in, In g) {
  Filtered f = filtered(m, of, in);
  ScanGradients s = scan_backward(recurrence(m), of, f.c, f.b, f.x, in.a, g);
  const size_t heads = size_t(m.heads), dim = size_t(m.head_dim);
  Values d(heads);
  for (size_t i = 0; i < f.x.size(); ++i) {
    if (of[i / (heads * dim)] < 0) continue;
    s.v[i] += in.d[i / dim % heads] * g[i];
    d[i / dim % heads] += g[i] * f.x[i];
  }
  ConvGradients x = conv_backward(of_heads(m), of, in.x, in.wx, s.v),
                b = conv_backward(of_groups(m), of, in.b, in.wb, by_group(m, of.size(), s.k)),
                c = conv_backward(of_groups(m), of, in.c, in.wc, by_group(m, of.size(), s.q));
  return {std::move(x.x), std::move(b.x), std::move(c.x), std::move(s.a), std::move(x.w),
          std::move(b.w), std::move(c.w), std::move(x.b), std::move(b.b), std::move(c.b),
          std::move(d),   std::move(f.c), std::move(f.b), std::move(s.q), std::move(s.k)};
}

MixerRoundings mixer_roundings(const Mixer& m, int64_t length, int64_t tokens) {
  const int64_t taps = std::min(m.width, length), filter = taps + 1, shared = m.heads / m.groups;
  const ScanRoundings n = scan_roundings(recurrence(m), length, 1);
  const int64_t of_x = 2 * filter + n.v + 1,
                of_group = 2 * filter + std::max(n.q, n.k) + shared - 1;
  return {3 * filter + n.o + 1,
          of_x + taps,
          of_group + taps,
          3 * filter + n.a,
          std::max(of_x, of_group) + tokens,
          filter + tokens * m.head_dim};
}

}  // namespace shardproof::reference
