#include "primitives/bodies.hpp"
#include "primitives/cuda/grid.cuh"

SHARDPROOF_ATTEND_BODIES(SHARDPROOF_KERNEL)
