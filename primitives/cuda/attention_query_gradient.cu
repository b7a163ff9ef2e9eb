#include "primitives/bodies.hpp"
#include "primitives/cuda/grid.cuh"

SHARDPROOF_QUERY_GRADIENT_BODIES(SHARDPROOF_KERNEL)
