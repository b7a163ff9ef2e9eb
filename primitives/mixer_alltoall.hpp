// The mixer of Mamba-2 under context parallelism as Megatron runs it: tokens are cut over cp, an
// all-to-all changes them for heads, every rank runs filters and recurrence of its heads over whole
// sequences, and an all-to-all brings the results back to the tokens.
//
//   x' = conv(x; wx) + bx, b' and c' likewise
//   S_t = a_t S_(t-1) + b'_t x'_t^T,  y_t = S_t^T c'_t + d x'_t
//
//   x, y [rows/p, heads/tp, head_dim]    a [rows/p, heads/tp]
//   b, c [rows/p, groups/tp, state_dim]
//
//   on every rank of cp and dp, which takes its slice:
//   wx [heads/tp, head_dim, width]    wb, wc [groups/tp, state_dim, width]    d [heads/tp]
//   bx [heads/tp, head_dim]           bb, bc [groups/tp, state_dim]
//
// Where a rank of tp has fewer groups than cp has ranks, each is sent to all ranks that have heads
// of it: copies lie side by side, and rank r works with group r / copies. The gradients of copies
// are parts of a sum and travel in the wire type.
//
//   forward   all-to-all of x, of b, of c, of a; of y
//   backward  all-to-all of y's cotangent; of the gradients of x, b, c, a; one all-reduce of the
//             parameters' over cp and dp, zero outside of a rank's slice
//
// x', b', c' and their gradients are stored in the type of activations, states and sums are made in
// that of accumulation. The steps are virtual so that a variant replaces one of them.
#pragma once
#include <array>
#include <memory>
#include <vector>

#include "primitives/replicated.hpp"
#include "primitives/state_context.hpp"

namespace shardproof::primitives {

// Of a rank of tp, and of its ranks of cp.
struct MixerShape {
  int64_t ranks, rank;  // of cp
  int64_t heads, groups, head_dim, state_dim, width, batch;

  MixerShape(const Case&, const Communicator& cp);
  int64_t copies() const { return groups < ranks ? ranks / groups : 1; }
  int64_t own_heads() const { return heads / ranks; }
  int64_t own_groups() const { return groups * copies() / ranks; }
};

struct MixerSaved;

class MixerAlltoall : public WithDecays {
 public:
  std::unique_ptr<Saved> forward(Rank&, std::span<const View> inputs,
                                 std::span<const View> outputs) override;
  void backward(Rank&, Saved&, std::span<const View> cotangents,
                std::span<const View> gradients) override;

  // What is put in order, and of what a rank takes its slice.
  enum class Way { inputs, result, cotangent, gradients };
  enum class Slice { filter_of_heads, filter_of_groups, skip };

 protected:
  // By row that comes from the ranks, or goes to them, one rank behind the other, its place in the
  // row of tokens.
  virtual std::vector<int64_t> order(const ContextLine&, Way) const;
  // [rows/p, (batch), things, features] <-> [rows, (batch), things/p, features], by rank.
  virtual void tokens_for_heads(Rank&, const View& by_tokens, const View& by_heads);
  virtual void heads_for_tokens(Rank&, const View& by_heads, const View& by_tokens);
  // Operands that change hands together: x, b, c, a, or their gradients.
  virtual std::vector<View> exchanged(Rank&, const std::vector<View>& by_tokens);
  virtual std::vector<View> returned(Rank&, const std::vector<View>& by_heads);

  View copied(Rank&, const MixerShape&, const View& groups) const;
  // Where the copy of a group lies among those of all groups.
  virtual int64_t place_of_copy(const MixerShape&, int64_t group, int64_t copy) const;
  virtual void sum_copies(Rank&, const MixerShape&, const View& copies, const View& gradient);
  virtual DType type_of_copies(const Case&) const;  // on their way back
  // Whether the heads of a group lie side by side.
  virtual bool heads_in_runs() const { return true; }

  // The first of the heads, or groups, whose parameters a rank works with.
  virtual int64_t first(Slice, const MixerShape&) const;

  // By token of all rows: how many of its document a filter, or a state, has before it.
  virtual std::vector<int64_t> filtered(const ContextLine&) const;
  virtual std::vector<int64_t> remembered(const ContextLine&) const;

  // The gradient of d of the own heads, and what is summed over ranks.
  virtual void skip_gradient(Rank&, const View& x, const View& g, const View& reach,
                             const View& sum);
  virtual std::vector<Axis> summed_over(const Case&) const;
  virtual void sum_gradients(Parallel&, const Parts&, const std::vector<Axis>&);

 private:
  void take(Rank&, const MixerShape&, std::span<const View> inputs, MixerSaved&);
  // Of a parameter of x, b or c (operands 0, 1, 2) the slice of the own n heads or groups.
  View own(const View& parameter, const MixerShape&, size_t operand, int64_t n) const;
  void gradients_of(Parallel&, MixerSaved&, const View& g, std::span<const View> inputs,
                    std::span<const View> rest);
  std::array<View, 3> back_through_states(Parallel&, const MixerShape&, const MixerSaved&,
                                          const View& g, const View& of_a);
  View back_through_filter(Parallel&, const MixerShape&, const MixerSaved&, size_t operand,
                           const View& g, const Parts&);
  void give_back(Parallel&, const MixerShape&, std::vector<View> by_heads,
                 std::span<const View> inputs, const View& of_a);
};

}  // namespace shardproof::primitives
