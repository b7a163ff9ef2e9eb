#include "primitives/bodies.hpp"
#include "primitives/cuda/grid.cuh"

SHARDPROOF_NORM_BODIES(SHARDPROOF_KERNEL)
