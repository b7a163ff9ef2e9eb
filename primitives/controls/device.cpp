// Kernels of a device with a fault that lies in the kernel or its streams, judged with device=cuda
// alone. The kernels themselves are in primitives/cuda/twins.hpp, made by the module of devices.
#include "oracle/device.hpp"
#include "primitives/controls/table.hpp"

namespace shardproof {
namespace {

struct OnDevice {
  const char *contract, *name, *check, *silent, *imitates, *words, *makes_visible;
};

constexpr OnDevice on_devices[] = {
    // A result made on a second stream, as an overlapped copy or product is, without the event that
    // the first stream has to wait for.
    {"mapping_copy", "event_wait_missing", "stream", "ledger, lockstep",
     "a missing cudaStreamWaitEvent behind work on a side stream", "tp=2",
     "the side stream late: right in every run in which it happens to be faster"},
    // The other end of the same pair of events.
    {"mapping_copy", "input_wait_missing", "stream", "ledger, lockstep",
     "a missing cudaStreamWaitEvent before work on a side stream", "tp=2",
     "the rank's stream late"},
    // A buffer of a pool that goes back to it, and is filled again, while its reader is at it.
    {"mapping_copy", "refilled_before_read", "stream", "ledger, lockstep",
     "a missing record_stream on a buffer of the caching allocator", "tp=2",
     "the side stream late"},
    // Blocks of a grid counted by division without rounding up.
    {"mapping_copy", "tail_unwritten", "memory", "ledger, lockstep",
     "a grid of n / 32 warps for n elements", "tp=2 tokens=5 hidden=7",
     "a size that no warp divides"},
    {"mapping_copy", "dense_read", "forward", "ledger, lockstep",
     "a kernel that takes data_ptr of a tensor that is not contiguous", "tp=2 strides=transposed",
     "strided views"},
    // The buffer is that large, the case is not: small tensors show nothing.
    {"mapping_copy", "offset_in_32_bits", "forward", "ledger, lockstep",
     "fla-org/flash-linear-attention 1080", "tp=2", "a buffer of 4 GiB"},
    // Products of f32 as if their factors had 11 bits, in a kernel that says it multiplies in f32.
    {"linear_column", "tf32_undeclared", "forward, gradient", "ledger, lockstep, memory",
     "pytorch/pytorch 61890", "tp=2 dtype=f32 fill=normal", "data of more than 11 bits"},
    {"linear_row", "tf32_undeclared", "forward, gradient", "ledger, lockstep, memory",
     "pytorch/pytorch 61890", "tp=2 dtype=f32 fill=normal", "data of more than 11 bits"},
    {"norm_sequence", "barrier_missing", "forward", "ledger, lockstep",
     "a missing __syncthreads in a block reduction", "tp=2 hidden=320",
     "rows of more elements than a warp has threads"},
};

}  // namespace

void controls_device(Registry& registry) {
  for (const OnDevice& row : on_devices) {
    Control c;
    c.contract = row.contract;
    c.name = row.name;
    c.make = [&row] { return make_device_kernel(row.contract, row.name); };
    c.check = row.check;
    c.silent = row.silent;
    c.imitates = row.imitates;
    c.witness = std::string(row.contract) + " device=cuda " + row.words;
    c.makes_visible = row.makes_visible;
    registry.add(std::move(c));
  }
}

}  // namespace shardproof
