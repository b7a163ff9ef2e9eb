#include "primitives/bodies.hpp"
#include "primitives/cuda/grid.cuh"

SHARDPROOF_EIGHT_BITS_BODIES(SHARDPROOF_KERNEL)
