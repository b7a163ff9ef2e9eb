#include "primitives/bodies.hpp"
#include "primitives/cuda/grid.cuh"

SHARDPROOF_KEY_GRADIENT_BODIES(SHARDPROOF_KERNEL)
