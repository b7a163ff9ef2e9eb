#include "primitives/bodies.hpp"
#include "primitives/cuda/grid.cuh"

SHARDPROOF_ATTENTION_BODIES(SHARDPROOF_KERNEL)
