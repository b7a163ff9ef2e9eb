#include "primitives/bodies.hpp"
#include "primitives/cuda/grid.cuh"

SHARDPROOF_RECURRENCE_BODIES(SHARDPROOF_KERNEL)
