// What a mapping reads from its case line, and what it asks of it. All of it follows from the line,
// which is equal on all ranks, and from no local shape, which is not: ranks refuse alike.
#pragma once
#include <cstdint>
#include <vector>

#include "oracle/subject.hpp"

namespace shardproof::mapping {

// Preconditions: throw Rejected.
void stored_as_sent(const Case&);       // no type of its own on the wire
void equal_blocks(const Case&);         // the ranks of the axis divide the extent of `dim`
void blocks_of_both_dims(const Case&);  // all-to-all: equal blocks of both dims, or uneven ones

Axis axis_of(const Case&);
int dim_of(const Case&);       // the sharded dim; all-to-all: of x, y has the other one
double scale_of(const Case&);  // "1/2"

// Block extents of a dim by rank of the axis. Uneven ones are proportional to rank + 1: floors
// first, then one more by largest remainder, later ranks before earlier ones.
std::vector<int64_t> block_extents(const Case&, int dim);

}  // namespace shardproof::mapping
