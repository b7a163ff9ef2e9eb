// What layers share whose state crosses the ranks of cp: a rank makes of the state before a block
// of its tokens T S + E, with T what they do to a state on its way through and E their last state
// from 0 on. All pairs (E, T) are gathered, and each rank folds those of the blocks before;
// backward the same from the right, with the cotangents of states and what is there of T already.
//
// A rank has one block, or two in zigzag: block r of 2p, then block 2p-1-r, side by side in its
// tensors and far apart in the row.
#pragma once
#include <vector>

#include "primitives/recurrences.hpp"
#include "primitives/recurrent_line.hpp"
#include "primitives/work.hpp"

namespace shardproof::primitives {

// What blocks hand to each other, a row each: entries of their states, and T, which is a decay or a
// matrix of a head. Rows lie by rank, those of a rank in the order of its tensors.
struct Summaries {
  View parts, through;
};
// The two where they lie side by side in `all` [blocks, n]: so many entries, then T.
Summaries summaries(const View& all, int64_t entries);

// The extents of a block.
struct StateExtents {
  int64_t tokens, batch, heads, key_dim, value_dim;

  StateExtents(const View& q, const View& v, int64_t batch);
  int64_t states() const { return batch * heads; }
  int64_t entries() const { return states() * key_dim * value_dim; }
  std::vector<int64_t> of_tokens() const { return {tokens, heads, key_dim, value_dim}; }
  Chunk chunk(const View& a, const View& reach) const {
    return {tensor(a), tensor(reach), batch, heads, key_dim, value_dim};
  }
};

// A layer whose decays may come as their logarithms (decay=log): decays of these, and gradients of
// them.
class WithDecays : public Kernel {
 protected:
  virtual void decays_of(Rank&, const View& logarithms, const View& decays);
  virtual void gradient_of_logarithms(Rank&, const View& of_decays, const View& decays,
                                      const View& gradient);
  // What a is of: itself, or `kept`, which is filled.
  View factors(Rank&, const View& a, Kept& kept);
  // Where the gradient of decays is put, from where it is handed out: there, or a workspace.
  View decay_gradient(Rank&, const View& gradient);
  void hand_out(Rank&, const View& of_decays, const View& decays, const View& gradient);
};

class StateContext : public WithDecays {
 protected:
  virtual std::vector<int64_t> reach(const ContextLine&, int r) const;
  // By row of summaries: 1 where a state goes through its block.
  virtual std::vector<int64_t> passes(const ContextLine&) const;
  // Where a rank's i-th block stands in the row, and the row of summaries of the block there.
  virtual int place(const Blocks&, int r, int i) const;
  virtual int64_t row_of(const Blocks&, int64_t place) const;
  // Places of which each takes in the one before: up to a block of p, and back to it.
  virtual std::vector<int64_t> before(int place, int p) const;
  virtual std::vector<int64_t> behind(int place, int p) const;
  virtual void gather(Rank&, const View& own, const View& all, bool backward);
  // The state that enters a block, or leaves it backward, from rows of summaries.
  virtual void fold(Rank&, const Summaries&, const std::vector<int64_t>& chain, const View& state,
                    bool backward) = 0;
  // The states that enter the own blocks [blocks, entries], or leave them backward.
  void fold_all(Rank&, const Blocks&, const Summaries&, const View& states, bool backward);
  // Decays of the own tokens, and those of which T is made.
  virtual View decays(Rank&, const View& a) const;
  virtual View decays_handed_on(Rank&, const View& a) const;
  // The state before the own tokens, as gradients of what acts on it meet it.
  virtual View state_before(Rank&, const View& entering) const;
};

}  // namespace shardproof::primitives
