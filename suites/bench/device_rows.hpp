// What a device costs, against bare work of the same device in the same run.
#pragma once
#include <functional>

#include "oracle/registry.hpp"
#include "suites/bench/row.hpp"

namespace shardproof {

// Hands out each row once it is measured. Extents are divided by `scale`: 1 measures, a larger one
// rehearses on a device that is none.
void device_rows(const Registry&, int64_t scale, const std::function<void(const Row&)>& put);

}  // namespace shardproof
