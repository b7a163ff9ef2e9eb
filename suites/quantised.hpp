// Delayed scaling, as both contracts of the quantised family state it: a scale comes from the
// greatest amax of earlier steps, and the own step's becomes the newest of the next history.
//
//   s = greatest / max(history),  next = amax, history[0], .., history[h-2]
//
// (TransformerEngine's DelayedScaling with margin 0 and amax_compute_algo "max", where the newest
// is the first.)
#pragma once
#include <vector>

#include "oracle/contract.hpp"

namespace shardproof::delayed {

Key history_key();
// Amaxes of earlier steps, alike on all ranks of these axes.
Operand operand(const Case&, const char* name, Operand::Role, const std::vector<Axis>& alike,
                bool gradient = false);
// The greatest of the steps is this one, four times the next ones.
std::vector<double> drawn(const Case&, const Operand&, uint64_t seed, int64_t range,
                          int64_t greatest);
// Of each history of a stack.
Whole rolled(const Case&, const Whole& history, const std::vector<double>& amax);

}  // namespace shardproof::delayed
