// Broken kernels of a device: each imitates a fault that lies in a kernel or a stream, and is
// judged in the place of the healthy one where SHARDPROOF_DEVICE_TWIN names it.
//
//   twin                     of              the fault                                    caught by
//   event_wait_missing       mapping_copy    the result is made on a stream nobody joins   memory
//   refilled_before_read     mapping_copy    a buffer is filled again before its reader    forward
//                                            on another stream is done
//   tail_unwritten           mapping_copy    the grid is rounded down to whole warps       memory
//   dense_read               mapping_copy    a strided view is read as if it had no gaps   forward
//   offset_in_32_bits        mapping_copy    byte offsets wrap at 4 GiB                    forward
//   barrier_missing          norm_sequence   a block's sum is read before all of its       forward,
//                                            warps have written theirs                     repeat
//
// A double of a device shows the first four; the fifth wants a tensor of 4 GiB, the last a race.
#pragma once
#include <memory>

#include "oracle/subject.hpp"

namespace shardproof::primitives::cuda {

std::unique_ptr<Kernel> mapping_copy_or_twin();
std::unique_ptr<Kernel> norm_sequence_or_twin();

}  // namespace shardproof::primitives::cuda
