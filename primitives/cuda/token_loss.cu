#include "primitives/bodies.hpp"
#include "primitives/cuda/grid.cuh"

SHARDPROOF_LOSS_BODIES(SHARDPROOF_KERNEL)
