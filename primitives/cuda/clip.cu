#include "primitives/bodies.hpp"
#include "primitives/cuda/grid.cuh"

SHARDPROOF_CLIP_BODIES(SHARDPROOF_KERNEL)
