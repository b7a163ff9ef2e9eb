// Rotary position embedding on a shard of a sequence: x, y [rows/p, heads/tp, d], the pair
// (x_i, x_{i+d/2}) turned by position * base^(-2i/d). The position is that of the token in its
// document, wherever the token is stored; padding is turned by 0. No call in either direction.
#pragma once
#include "primitives/attention_line.hpp"

namespace shardproof::primitives {

std::optional<Rejected> refused_rotary(const Case&);

class RotaryContext : public Kernel {
 public:
  std::unique_ptr<Saved> forward(Rank&, std::span<const View> inputs,
                                 std::span<const View> outputs) override;
  void backward(Rank&, Saved&, std::span<const View> cotangents,
                std::span<const View> gradients) override;

 protected:
  // By local token, rank r of cp.
  virtual std::vector<int64_t> positions(const ContextLine&, int r) const;
};

// Turns every token of a view [tokens.., heads, d]; sense -1 turns back.
void turn(const View& x, const std::vector<int64_t>& positions, double base, int sense, bool single,
          const View& y);

}  // namespace shardproof::primitives
