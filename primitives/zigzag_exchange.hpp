// Rows of a shard from blocks to zigzag: a loader hands out blocks of the row, balanced attention
// wants chunks r and 2p-1-r of each document. x, y [rows/p, features]; one all-to-all of the rows
// that change hands, each rank sending what the other will own; backward sends them back.
#pragma once
#include "primitives/attention_line.hpp"

namespace shardproof::primitives {

std::optional<Rejected> refused_exchange(const Case&);

class ZigzagExchange : public Kernel {
 public:
  std::unique_ptr<Saved> forward(Rank&, std::span<const View> inputs,
                                 std::span<const View> outputs) override;
  void backward(Rank&, Saved&, std::span<const View> cotangents,
                std::span<const View> gradients) override;

 protected:
  // Rows that rank r owns afterwards.
  virtual std::vector<int64_t> rows_after(const ContextLine&, int r) const;

 private:
  void exchange(Rank&, const View& from, const View& to, bool back);
};

}  // namespace shardproof::primitives
