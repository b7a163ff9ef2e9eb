// Broken twins of pipeline schedules. The comment above a twin names the mistake.
#include "oracle/registry.hpp"
#include "primitives/controls/table.hpp"
#include "primitives/pipeline_schedule.hpp"

namespace shardproof {

void controls_pipeline_schedule(Registry&) {}

}  // namespace shardproof
