#include "primitives/bodies.hpp"
#include "primitives/cuda/grid.cuh"

SHARDPROOF_POINTWISE_BODIES(SHARDPROOF_KERNEL)
