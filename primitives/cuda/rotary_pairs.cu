#include "primitives/bodies.hpp"
#include "primitives/cuda/grid.cuh"

SHARDPROOF_ROTARY_BODIES(SHARDPROOF_KERNEL)
