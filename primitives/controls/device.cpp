// Kernels of a device with a fault that lies in the kernel or its streams, judged with device=cuda
// alone. The kernels themselves are in primitives/cuda/twins.hpp, made by the module of devices.
#include "oracle/device.hpp"
#include "primitives/controls/table.hpp"

namespace shardproof {
namespace {

// The module makes them.
const controls::Row rows[] = {
    // A result made on a second stream, as an overlapped copy or product is, without the event that
    // the first stream has to wait for.
    {"mapping_copy", "event_wait_missing", nullptr, "stream", "ledger, lockstep",
     "a missing cudaStreamWaitEvent behind work on a side stream", "device=cuda tp=2",
     "the side stream late: right in every run in which it happens to be faster"},
    // The other end of the same pair of events.
    {"mapping_copy", "input_wait_missing", nullptr, "stream", "ledger, lockstep",
     "a missing cudaStreamWaitEvent before work on a side stream", "device=cuda tp=2",
     "the rank's stream late"},
    // A buffer of a pool that goes back to it, and is filled again, while its reader is at it.
    {"mapping_copy", "refilled_before_read", nullptr, "stream", "ledger, lockstep",
     "a missing record_stream on a buffer of the caching allocator", "device=cuda tp=2",
     "the side stream late"},
    // Blocks of a grid counted by division without rounding up.
    {"mapping_copy", "tail_unwritten", nullptr, "memory", "ledger, lockstep",
     "a grid of n / 32 warps for n elements", "device=cuda tp=2 tokens=5 hidden=7",
     "a size that no warp divides"},
    {"mapping_copy", "dense_read", nullptr, "forward", "ledger, lockstep",
     "a kernel that takes data_ptr of a tensor that is not contiguous",
     "device=cuda tp=2 strides=transposed", "strided views"},
    // The buffer is that large, the case is not: small tensors show nothing.
    {"mapping_copy", "offset_in_32_bits", nullptr, "forward", "ledger, lockstep",
     "fla-org/flash-linear-attention 1080", "device=cuda tp=2", "a buffer of 4 GiB on rank 0"},
    // Products of f32 as if their factors had 11 bits, in a kernel that says it multiplies in f32.
    // A library that may take TF32 does not have to where rows are few, or not whole in 16 bytes.
    {"linear_column", "tf32_undeclared", nullptr, "forward, gradient", "ledger, lockstep, memory",
     "pytorch/pytorch 61890", "device=cuda tp=2 tokens=64 in=64 out=128 dtype=f32 fill=normal",
     "data of more than 11 bits"},
    {"linear_row", "tf32_undeclared", nullptr, "forward, gradient", "ledger, lockstep, memory",
     "pytorch/pytorch 61890", "device=cuda tp=2 tokens=64 in=128 out=64 dtype=f32 fill=normal",
     "data of more than 11 bits"},
    {"norm_sequence", "barrier_missing", nullptr, "forward", "ledger, lockstep",
     "a missing __syncthreads in a block reduction", "device=cuda tp=2 hidden=320",
     "rows of more elements than a warp has threads"},
};

}  // namespace

void controls_device(Registry& registry) {
  for (const controls::Row& row : rows) {
    Control c = controls::control_of(row);
    c.make = [&row] { return make_device_kernel(row.contract, row.name); };
    registry.add(std::move(c));
  }
}

}  // namespace shardproof
