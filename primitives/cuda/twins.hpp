// Broken kernels of a device: each imitates a fault that lies in a kernel or a stream. They are
// registered in primitives/controls/device.cpp, which names the check that must catch each; the
// module of devices makes them.
//
//   twin                     of              the fault
//   event_wait_missing       mapping_copy    nobody waits for the side stream that makes the result
//   input_wait_missing       mapping_copy    the side stream does not wait for the argument
//   refilled_before_read     mapping_copy    a buffer is filled again before its reader on the side
//                                            stream is done
//   tail_unwritten           mapping_copy    the grid is rounded down to whole warps
//   dense_read               mapping_copy    a strided view is read as if it had no gaps
//   offset_in_32_bits        mapping_copy    byte offsets wrap at 4 GiB, in a buffer of that size
//                                            on one rank; devices without it are too small
//   barrier_missing          norm_sequence   a block's sum is read before all of its warps have
//                                            written theirs
//
// event_waits_made is healthy: the first two with both of their waits, on the same streams.
#pragma once
#include <memory>

#include "oracle/subject.hpp"

namespace shardproof::primitives::cuda {

std::unique_ptr<Kernel> event_wait_missing();
std::unique_ptr<Kernel> input_wait_missing();
std::unique_ptr<Kernel> event_waits_made();
std::unique_ptr<Kernel> refilled_before_read();
std::unique_ptr<Kernel> tail_unwritten();
std::unique_ptr<Kernel> dense_read();
std::unique_ptr<Kernel> offset_in_32_bits();
std::unique_ptr<Kernel> barrier_missing();

}  // namespace shardproof::primitives::cuda
