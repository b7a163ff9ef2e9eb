#include "primitives/bodies.hpp"
#include "primitives/cuda/grid.cuh"

SHARDPROOF_VOCAB_BODIES(SHARDPROOF_KERNEL)
