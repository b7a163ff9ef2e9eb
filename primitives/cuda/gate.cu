#include "primitives/bodies.hpp"
#include "primitives/cuda/grid.cuh"

SHARDPROOF_GATE_BODIES(SHARDPROOF_KERNEL)
