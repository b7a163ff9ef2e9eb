// Causal depthwise convolution over the tokens of a sequence that is cut over cp in blocks: every
// channel is filtered by itself, and a token sees the width - 1 tokens before it in its document.
//
//   y_t[c] = b[c] + sum_(lag < width) w[c, width-1-lag] x_(t-lag)[c]
//   x, y [rows/p, channels/tp]    w [channels/tp, width], b [channels/tp] on every rank of cp, dp
//
// A rank needs the last width - 1 rows before its own, the halo. They come from its left
// neighbours, of more than one where a rank has fewer rows:
//
//   forward   shift +1, +2, ... of the last rows, until width - 1 are there; the last rank sends 0
//   backward  shift -1, -2, ... of the halo's gradient in the wire type, added to the own rows'
//             one all-reduce of dw and db over cp and dp
//
// In zigzag a rank has two blocks, each with a halo (width - 1 rows at most of what a block has):
// that of the first comes from the left, that of the second from the right, from the second block
// there, but for the last rank, whose second block follows its first: shift +1 and shift -1, and
// back.
#pragma once
#include <memory>
#include <vector>

#include "primitives/recurrent_line.hpp"
#include "primitives/replicated.hpp"

namespace shardproof::primitives {

// Rows that travel between blocks of `own` rows, of which each reads `reach` before it: hop h
// brings those of the h-th block before.
struct Halo {
  int64_t own = 0, reach = 0;
  int rank = 0, ranks = 1;

  int hops() const;
  int64_t rows(int hop) const;
  int64_t first(int hop) const;  // place in the halo
  bool sends(int hop) const { return rank + hop >= 0 && rank + hop < ranks; }
};

// Of the halo and the own rows, the last n.
View last_rows(const Halo&, const View& all, int64_t n);

class ConvContext : public Kernel {
 public:
  std::unique_ptr<Saved> forward(Rank&, std::span<const View> inputs,
                                 std::span<const View> outputs) override;
  void backward(Rank&, Saved&, std::span<const View> cotangents,
                std::span<const View> gradients) override;

 protected:
  virtual std::vector<int64_t> reach(const ContextLine&, int r) const;
  // `all`: the halo, then the own rows, which are there.
  virtual void fetch(Rank&, const Halo&, const View& all);
  virtual void give_back(Rank&, const Halo&, const View& all);
  // The halos of two blocks.
  virtual void fetch_both(Rank&, const Halo&, const View& first, const View& second);
  virtual void give_both_back(Rank&, const Halo&, const View& first, const View& second);
  // The rows that the gradient of w is a sum over; `all` as the forward left it.
  virtual View seen(Rank&, const Halo&, const View& all) const;
  virtual std::vector<Axis> summed_over(const Case&) const;
  virtual void sum_gradients(Parallel&, const Parts&, const std::vector<Axis>&);

  // One hop: `rows` of a rank go `hop` ranks on, and those that come are handed out; none where
  // there is no such rank.
  virtual View exchanged(Rank&, const Halo&, const View& rows, int hop);
  // Gradients of a neighbour's halo to those of the own rows.
  virtual void add_back(const Halo&, const View& arrived, const View& all) const;

 private:
  void gradients_of(Parallel&, Saved&, const View& g, std::span<const View> gradients);
};

}  // namespace shardproof::primitives
