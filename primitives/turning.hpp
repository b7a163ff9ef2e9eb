// What rings, and other calls in turns, are made of: places on a ring, and the two buffers of what
// travels.
#pragma once
#include <utility>
#include <vector>

#include "oracle/subject.hpp"

namespace shardproof::primitives {

// a mod p, from 0 to p - 1: a place on a ring.
inline int modulo(int a, int p) { return ((a % p) + p) % p; }

// Two buffers that change places: what is here, and what arrives.
struct Turning {
  View here, next;
  Turning(Rank& rank, DType dtype, const std::vector<int64_t>& shape)
      : here(rank.workspace(dtype, shape)), next(rank.workspace(dtype, shape)) {}
  void turn() { std::swap(here, next); }
};

}  // namespace shardproof::primitives
