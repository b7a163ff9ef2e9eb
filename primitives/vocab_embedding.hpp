// Vocabulary-parallel embedding: rank r of tp holds rows r V/p .. (r+1) V/p - 1 of W [V,h].
//
//   ids [T], below vocab <= V (the rest is padding), on every rank of tp
//   forward    own rows by id, zeros for ids of other ranks: a partial sum with one term that is
//              not 0
//     sp=off   all-reduce, y [T,h] on every rank     sp=on  reduce-scatter over tokens, y [T/p,h]
//   backward   every token's cotangent is added to the row that it named; no call, but under sp=on
//              one all-gather of the cotangent over tokens
//
// What travels keeps the storage type: x + 0 is exact. Over dp and cp nothing is summed.
#pragma once
#include "primitives/linear.hpp"

namespace shardproof::primitives {

class VocabEmbedding : public Kernel {
 public:
  std::unique_ptr<Saved> forward(Rank&, std::span<const View> inputs,
                                 std::span<const View> outputs) override;
  void backward(Rank&, Saved&, std::span<const View> cotangents,
                std::span<const View> gradients) override;

 protected:
  virtual int64_t first_row(const Parallel&, int64_t own) const;  // of own rows
  // Ids as the two halves read them, those of own rows being first .. first + own - 1.
  virtual View ids_to_look_up(Parallel&, const View& ids, int64_t first, int64_t own) const;
  virtual View ids_to_add_to(Parallel&, const View& ids, int64_t first, int64_t own) const;
  virtual View cotangent_of_all_tokens(Parallel&, const View& own) const;
};

}  // namespace shardproof::primitives
