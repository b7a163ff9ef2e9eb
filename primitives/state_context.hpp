// What layers share whose state crosses the ranks of cp: a rank makes of the state before its block
// T S + E, with T what its tokens do to a state on its way through and E its last state from 0 on.
// All pairs (E, T) are gathered, and each rank folds those before it; backward the same from the
// right, with the cotangents of states and what is there of T already.
#pragma once
#include <vector>

#include "primitives/recurrences.hpp"
#include "primitives/recurrent_line.hpp"
#include "primitives/work.hpp"

namespace shardproof::primitives {

// What blocks hand to each other, by rank: entries of their states, and T, which is a decay or a
// matrix of a head.
struct Summaries {
  View parts, through;
};
// The two where they lie side by side in `all` [ranks, n]: so many entries, then T.
Summaries summaries(const View& all, int64_t entries);

// The extents of a rank's block.
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

class StateContext : public Kernel {
 protected:
  // decay=log: decays of what comes as their logarithms, and gradients of these.
  virtual void decays_of(Rank&, const View& logarithms, const View& decays);
  virtual void gradient_of_logarithms(Rank&, const View& of_decays, const View& decays,
                                      const View& gradient);
  // What a is of: itself, or `kept`, which is filled.
  View factors(Rank&, const View& a, Kept& kept);
  // Where the gradient of decays is put, from where it is handed out: there, or a workspace.
  View decay_gradient(Rank&, const View& gradient);
  void hand_out(Rank&, const View& of_decays, const View& decays, const View& gradient);

  virtual std::vector<int64_t> reach(const ContextLine&, int r) const;
  // By rank: 1 where a state goes through its block.
  virtual std::vector<int64_t> passes(const ContextLine&) const;
  // Ranks of which each takes in the one before: up to the block of rank r, and back to it.
  virtual std::vector<int64_t> before(int r, int p) const;
  virtual std::vector<int64_t> behind(int r, int p) const;
  virtual void gather(Rank&, const View& own, const View& all, bool backward);
  // The state that enters a block, or leaves it backward.
  virtual void fold(Rank&, const Summaries&, const std::vector<int64_t>& chain, const View& state,
                    bool backward) = 0;
  // Decays of the own tokens, and those of which T is made.
  virtual View decays(Rank&, const View& a) const;
  virtual View decays_handed_on(Rank&, const View& a) const;
  // The state before the own tokens, as gradients of what acts on it meet it.
  virtual View state_before(Rank&, const View& entering) const;
};

}  // namespace shardproof::primitives
