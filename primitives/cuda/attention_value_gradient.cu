#include "primitives/bodies.hpp"
#include "primitives/cuda/grid.cuh"

SHARDPROOF_VALUE_GRADIENT_BODIES(SHARDPROOF_KERNEL)
