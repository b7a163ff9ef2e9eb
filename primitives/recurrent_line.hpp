// What the primitives whose tokens depend on the tokens before them read from a case line.
#pragma once
#include "primitives/attention_line.hpp"

namespace shardproof::primitives {

// The blocks of a line: one of a rank, or two in zigzag, r and 2p-1-r of 2p, side by side in its
// tensors.
struct Blocks {
  int ranks, each;  // blocks of a rank
  explicit Blocks(const ContextLine&);
  int count() const { return ranks * each; }
  View of(const View& rows, int i) const;  // of a rank's tensor its i-th block
};

// By token of rank r: how many tokens of its own document come before it, -1 where it is padding.
std::vector<int64_t> tokens_before(const ContextLine&, int r);

bool decays_are_logarithms(const Case&);

std::optional<Rejected> refused_conv(const Case&);
std::optional<Rejected> refused_scan(const Case&);
std::optional<Rejected> refused_delta(const Case&);
std::optional<Rejected> refused_mixer(const Case&);

}  // namespace shardproof::primitives
