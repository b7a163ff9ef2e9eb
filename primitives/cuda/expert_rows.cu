#include "primitives/bodies.hpp"
#include "primitives/cuda/grid.cuh"

SHARDPROOF_EXPERT_BODIES(SHARDPROOF_KERNEL)
