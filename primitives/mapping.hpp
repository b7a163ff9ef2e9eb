// The mapping family: what moves one tensor x [tokens, hidden] from one placement on an axis to
// another, forward, and its cotangent back. On every other axis each rank works for itself.
//
//   mapping                   x -> y   forward          backward         dy -> dx
//   mapping_copy              I -> R   identity         all-reduce       P -> I
//   mapping_reduce            P -> I   all-reduce       identity         I -> R
//   mapping_scaled_reduce     P -> I   s all-reduce     s identity       I -> R
//   mapping_all_reduce        P -> R   all-reduce       all-reduce       P -> R
//   mapping_scatter           I -> S   own block        all-gather       S -> I
//   mapping_gather            S -> I   all-gather       own block        I -> S
//   mapping_all_gather        S -> R   all-gather       reduce-scatter   P -> S
//   mapping_reduce_scatter    P -> S   reduce-scatter   all-gather       S -> R
//   mapping_all_to_all        S -> S'  all-to-all       all-to-all back  S' -> S
//   mapping_slice             R -> S   own block        block in zeros   S -> P
//   mapping_pad               S -> P   block in zeros   own block        R -> S
//   mapping_replicate_to_invariant     R -> I   identity      rank 0 only   I -> P
//   mapping_invariant_to_partial       I -> P   rank 0 only   identity      R -> I
//   mapping_replicate_to_partial       R -> P   rank 0 only   rank 0 only   R -> P
//   mapping_reinterpret                R -> P   identity      identity      R -> P   (value times
//   p)
//
// I and R hold the same bits and differ in what the gradient is; names follow the types, since the
// same name means different pairs in different libraries.
#pragma once
#include <memory>

#include "oracle/subject.hpp"

namespace shardproof {

std::unique_ptr<Kernel> mapping_copy();
std::unique_ptr<Kernel> mapping_reduce();
std::unique_ptr<Kernel> mapping_scaled_reduce();
std::unique_ptr<Kernel> mapping_all_reduce();
std::unique_ptr<Kernel> mapping_scatter();
std::unique_ptr<Kernel> mapping_gather();
std::unique_ptr<Kernel> mapping_all_gather();
std::unique_ptr<Kernel> mapping_reduce_scatter();
std::unique_ptr<Kernel> mapping_all_to_all();
std::unique_ptr<Kernel> mapping_slice();
std::unique_ptr<Kernel> mapping_pad();
std::unique_ptr<Kernel> mapping_replicate_to_invariant();
std::unique_ptr<Kernel> mapping_invariant_to_partial();
std::unique_ptr<Kernel> mapping_replicate_to_partial();
std::unique_ptr<Kernel> mapping_reinterpret();

}  // namespace shardproof
