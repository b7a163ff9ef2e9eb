// What a device costs, against bare work of the same device in the same run.
#pragma once
#include <vector>

#include "oracle/registry.hpp"
#include "suites/bench/row.hpp"

namespace shardproof {

// Extents are divided by `scale`: 1 measures, a larger one rehearses on a device that is none.
std::vector<Row> device_rows(const Registry&, int64_t scale);

}  // namespace shardproof
