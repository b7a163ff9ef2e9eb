// Collectives over tokens, cut into chunks: each is under way while the product of another chunk is
// made (TransformerEngine's userbuffers by `pipeline`; DeepSpeed-Domino, arXiv 2409.15241).
//
// Each rank's n rows of a call, its own tokens under sp and all tokens without, are cut into
// `chunks` runs, the first n mod chunks of them a row longer.
//
//   gather  all-gather of a run of every rank's rows: those of rank r belong to the rows from r n
//   on reduce  sp=on   reduce-scatter of the products of such rows
//           sp=off  all-reduce of the product of a run
//
// Sums are rounded as those of one call are. The walks and cuts are virtual so that a variant
// replaces one of them.
#pragma once
#include <functional>

#include "primitives/turning.hpp"

namespace shardproof::primitives {

struct Parallel;

class TokenChunks {
 public:
  // What is done with rows of all tokens, from `first` on: multiplied where they have come, made
  // where they are parts of a sum.
  using Rows = std::function<void(int64_t first, const View&)>;
  virtual ~TokenChunks() = default;
  virtual void gather(Parallel&, const View& own, const Rows& multiply) const;
  virtual void reduce(Parallel&, const Rows& product, const View& sum) const;

 protected:
  struct Run {
    int64_t first, rows;
  };
  virtual Run run(const Parallel&, int64_t n, int chunk) const;
  // Where among all tokens the run of an owner, who has n rows, begins.
  virtual int64_t place(const Parallel&, int64_t n, const Run&, int owner) const;

  int owners(const Parallel&) const;
  // The part of a buffer that a run of every owner fills, one owner after another.
  View filled(const Parallel&, const View& room, const Run&) const;
  void each_owner(const Parallel&, int64_t n, const Run&, const View& filled, const Rows&) const;
  Turning rooms(Parallel&, const View& rows) const;
  Ticket start_gather(Parallel&, const View& own, const Run&, const View& filled) const;
  Ticket start_reduce(Parallel&, const View& filled, const Run&, const View& sum) const;
};

}  // namespace shardproof::primitives
