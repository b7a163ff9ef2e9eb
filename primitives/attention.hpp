// Context-parallel attention on the p ranks of the cp axis, heads cut over tp.
//
//   q [Tq/p, n, dk]   k [Tk/p, g, dk]   v [Tk/p, g, dv]   o [Tq/p, n, dv]   lse [Tq/p, n]
//   where seq is given: [seq/p, batch/dp, ..]; n, g heads of one tp rank; rows by layout=
//
//   allgather   K, V gathered in rank order; backward gathers them again, dK, dV reduce-scattered
//   ring        K, V of a rank turn p-1 times, one message a hop, two buffers, each hop under way
//               while the block that is here is computed; in backward dK, dV turn p times with
//               them, in the accumulation type, and so come home
//   alltoall    tokens for heads (Ulysses): q, k, v exchanged, n/p heads attend over all tokens, o
//               exchanged back; lse stays cut by heads. With kv_replicate=on key heads are copied
//               to the ranks that read them and their gradients summed over the copies. With
//               uneven_heads=on the first g mod p ranks have one key head more, and its query
//               heads; where they are copied, the first n mod p ranks one query head
//   hierarchical  alltoall inside runs of `inner` ranks, ring across them
//
// Parts of dK and dV travel in f32 under bf16 and f16 (wire= says otherwise); everything else in
// the storage type. lse is f32, f64 under f64.
#pragma once
#include <memory>
#include <utility>
#include <vector>

#include "primitives/attention_core.hpp"
#include "primitives/turning.hpp"

namespace shardproof::primitives {

// Numbers that every step of a kernel needs.
struct ContextRank {
  ContextRank(Rank&, ContextLine);
  Rank& rank;
  const Case& line;
  Communicator& cp;
  ContextLine context;
  DType storage, accumulate, wire;
  bool single() const { return accumulate != DType::f64; }
};

// [tokens.., heads, dim] or [tokens.., heads].
int64_t extent_from_end(const View&, int from_end);
inline int heads_dim(const View& v) { return int(v.shape.size()) - 2; }
// [tokens.., heads] with one dim behind the heads.
View with_dim(View);
// [tokens, .., heads, dim] of a rank -> [ranks tokens, .., heads of the rank, dim].
std::vector<int64_t> shape_by_heads(const View& by_tokens, int ranks, int64_t own_heads);
// Heads of each of the ranks, where a tensor has `heads` of them: equally many for each of the key
// heads that are dealt.
std::vector<int64_t> heads_by_rank(int64_t heads, int64_t dealt_key_heads, int ranks);
// `heads` of them in the place of fewer: head g stands that many times more often, in a row.
View copied_heads(const ContextRank&, const View&, int64_t heads);
// Gradient of copied_heads: the sum over the copies of each head, made in the accumulation type.
void sum_copies(const ContextRank&, const View& wide, const View& gradient);
// Tokens of `count` ranks from `first` on, in the order of ranks.
std::vector<Label> labels_of_ranks(const ContextLine&, const AttentionCore&, int first, int count,
                                   bool keys);

// Rounded once on the way into a view.
void write(const View&, std::span<const double>);
View flat(const View& contiguous);

// Inputs of one forward, and its results in the accumulation type.
struct AttentionSaved : Saved {
  explicit AttentionSaved(ContextLine c) : context(std::move(c)) {}
  ContextLine context;
  View q, k, v;
  Values o, lse;
  std::unique_ptr<AttentionPass> pass;
};

class ContextAttention : public Kernel {
 public:
  explicit ContextAttention(std::unique_ptr<AttentionCore> core);
  std::unique_ptr<Saved> forward(Rank&, std::span<const View> inputs,
                                 std::span<const View> outputs) override;
  void backward(Rank&, Saved&, std::span<const View> cotangents,
                std::span<const View> gradients) override;
  int64_t pairs() const { return pairs_; }  // computed by the last forward on this rank

 protected:
  // What the call is about; throws where it is refused.
  virtual ContextLine accepted(const Case&, std::span<const View> cu_seqlens) const;
  struct Incoming {
    const Statistics& rows;
    const Values& g;
  };
  struct Outgoing {
    Values q, k, v;  // of the own tokens
  };
  virtual void attend(ContextRank&, const AttentionSaved&, Softmax&) = 0;
  virtual void differentiate(ContextRank&, const AttentionSaved&, const Incoming&, Outgoing&) = 0;

  std::unique_ptr<AttentionCore> core_;
  int64_t pairs_ = 0;
};

class AttentionAllGather : public ContextAttention {
 public:
  explicit AttentionAllGather(
      std::unique_ptr<AttentionCore> core = std::make_unique<AttentionCore>())
      : ContextAttention(std::move(core)) {}

 protected:
  void attend(ContextRank&, const AttentionSaved&, Softmax&) override;
  void differentiate(ContextRank&, const AttentionSaved&, const Incoming&, Outgoing&) override;
};

class AttentionRing : public ContextAttention {
 public:
  explicit AttentionRing(std::unique_ptr<AttentionCore> core = std::make_unique<AttentionCore>())
      : ContextAttention(std::move(core)) {}

 protected:
  void attend(ContextRank&, const AttentionSaved&, Softmax&) override;
  void differentiate(ContextRank&, const AttentionSaved&, const Incoming&, Outgoing&) override;

  virtual Communicator& ring(ContextRank&);                     // the ranks that keys turn on
  virtual std::vector<Label> keys_of(ContextRank&, int owner);  // owner: a place on that ring
  virtual int direction() const { return 1; }
  virtual int steps_forward(int ranks) const { return ranks; }
  // The hop of dK, dV after a step; 0: they stay.
  virtual int gradient_hop(int /*step*/, int /*ranks*/) const { return direction(); }
  // Whether a backward step multiplies the keys and values that arrived, or the own ones.
  virtual bool multiplies_arrived() const { return true; }
};

class AttentionAllToAll : public Kernel {
 public:
  explicit AttentionAllToAll(
      std::unique_ptr<AttentionCore> core = std::make_unique<AttentionCore>())
      : core_(std::move(core)) {}
  std::unique_ptr<Saved> forward(Rank&, std::span<const View> inputs,
                                 std::span<const View> outputs) override;
  void backward(Rank&, Saved&, std::span<const View> cotangents,
                std::span<const View> gradients) override;
  int64_t pairs() const { return pairs_; }

 protected:
  // [tokens/p, .., heads, dim] <-> [tokens, .., heads of the rank, dim], tokens in the order of
  // ranks.
  virtual void tokens_for_heads(ContextRank&, const View& by_tokens, const View& by_heads);
  virtual void heads_for_tokens(ContextRank&, const View& by_heads, const View& by_tokens);
  // Of a tensor of `heads`: how many each rank has.
  std::vector<int64_t> shares(const ContextRank&, int64_t heads) const;
  // The gradient of key heads from those of their copies.
  virtual void sum_of_copies(const ContextRank&, const View& wide, const View& gradient);

 private:
  View own_heads(const ContextRank&, const View& by_tokens) const;
  View exchanged(ContextRank&, const View& by_tokens);
  View home(ContextRank&, const Values&, const View& like, int64_t heads, DType);
  std::unique_ptr<AttentionCore> core_;
  int64_t pairs_ = 0;
};

// Runs of `inner` ranks u exchange tokens for heads, the P = p/u runs form a ring. With zigzag the
// tokens of a run are the shard of a P-rank zigzag, so runs are contiguous on cp. lse goes home
// with a fifth exchange.
class AttentionHierarchical : public AttentionRing {
 public:
  explicit AttentionHierarchical(
      std::unique_ptr<AttentionCore> core = std::make_unique<AttentionCore>())
      : AttentionRing(std::move(core)) {}
  std::unique_ptr<Saved> forward(Rank&, std::span<const View> inputs,
                                 std::span<const View> outputs) override;
  void backward(Rank&, Saved&, std::span<const View> cotangents,
                std::span<const View> gradients) override;

 protected:
  Communicator& ring(ContextRank&) override;
  std::vector<Label> keys_of(ContextRank&, int owner) override;
  virtual Communicator& run(ContextRank&);  // the ranks that exchange heads

 private:
  std::vector<Label> labels_of_run(const ContextRank&, int run, bool keys) const;
  Buffer by_heads(ContextRank&, const View& by_tokens);
  void by_tokens(ContextRank&, const Values& by_heads, const View& to);
};

}  // namespace shardproof::primitives
