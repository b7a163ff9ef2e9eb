// The mixer of Mamba-2 between its projections: each channel of x, B and C is filtered, then every
// head is a gated recurrence, and its input is added to what is read.
//
//   x' = conv(x; wx) + bx, b' and c' likewise (conv.hpp)
//   y_t = sum_(s <= t) D(t,s) (c'_t b'_s) x'_s + d x'_t     D: products of decays (scan.hpp)
//
//   x, y [T, heads, head_dim]    b, c [T, groups, state_dim]    a [T, heads]
//   wx [heads, head_dim, width], bx [heads, head_dim]    wb, wc [groups, state_dim, width], ..
//   d [heads]
//
// Head h reads group h / (heads / groups). There is no activation: it acts on one element. Rows of
// padding have y = 0 and no gradient, and add to none. Of absolute values the same sums are the
// magnitudes that error bounds are made of.
#pragma once
#include "reference/conv.hpp"
#include "reference/scan.hpp"

namespace shardproof::reference {

struct Mixer {
  int64_t heads = 1, groups = 1, head_dim = 1, state_dim = 1, width = 1;
};

struct MixerInputs {
  In x, b, c, a, wx, wb, wc, bx, bb, bc, d;
};

Values mixer(const Mixer&, std::span<const int64_t> sequences, const MixerInputs&);

struct MixerGradients {
  Values x, b, c, a, wx, wb, wc, bx, bb, bc, d;
  // Of the recurrence: c' and b' as each head reads them, and their gradients.
  Values read, written, of_read, of_written;
};
MixerGradients mixer_backward(const Mixer&, std::span<const int64_t> sequences, const MixerInputs&,
                              In g);

// How many roundings of the accumulation any one term of a result passes, where a sequence has
// `length` tokens and parameters are summed over `tokens` (README.md). Gradients of b and c are
// those of both, of filters and biases those of all three.
struct MixerRoundings {
  int64_t y, x, group, a, filter, d;
};
MixerRoundings mixer_roundings(const Mixer&, int64_t length, int64_t tokens);

}  // namespace shardproof::reference
