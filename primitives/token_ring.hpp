// Collectives over tokens, taken apart: p-1 shifts around tp, each under way while the product of
// another block is made (Wang et al., "Overlap Communication with Dependent Computation via
// Decomposition", ASPLOS 2023; PyTorch's async tensor parallelism; TransformerEngine's userbuffers
// with ring exchange). A block is the tokens of one rank of tp, its owner.
//
//   gather   at step s rank r holds the block of rank r - s; its own one is the first
//   reduce   at step s rank r adds its part of the block of rank r - 1 - s to the sum that has come
//            from rank r - 1; its own block is the last, and then the sum is home
//
// A part is rounded to the type of the sum when it is made, and the sum at each of p-1 additions.
// The walks are virtual so that a variant replaces one of them.
#pragma once
#include <functional>

#include "primitives/turning.hpp"

namespace shardproof::primitives {

struct Parallel;

class TokenRing {
 public:
  // What is done with the block of an owner: multiplied where it comes past, made where it is a
  // part of a sum.
  using Block = std::function<void(int owner, const View&)>;
  virtual ~TokenRing() = default;
  virtual void gather(Parallel&, const View& own, const Block& multiply) const;
  virtual void reduce(Parallel&, const Block& product, const View& sum) const;

 protected:
  // What is under way has come, and is what is here now.
  virtual void arrive(Parallel&, Ticket, Turning&, bool last) const;
};

}  // namespace shardproof::primitives
