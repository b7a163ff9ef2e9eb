// What the linears and the MLP ask of a case line. It follows from the line, which is equal on all
// ranks, and from no local shape: ranks refuse alike and before the first call.
#pragma once
#include <cstdint>
#include <optional>
#include <vector>

#include "oracle/subject.hpp"

namespace shardproof::primitives {

std::optional<Rejected> refused_column(const Case&);
std::optional<Rejected> refused_row(const Case&);
std::optional<Rejected> refused_mlp(const Case&);

// Rows of W by part: one part, gate and up, or query, key and value heads.
std::vector<int64_t> parts_of_line(const Case&, int64_t rows);

}  // namespace shardproof::primitives
