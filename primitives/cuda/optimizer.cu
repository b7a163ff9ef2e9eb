#include "primitives/bodies.hpp"
#include "primitives/cuda/grid.cuh"

SHARDPROOF_OPTIMIZER_BODIES(SHARDPROOF_KERNEL)
