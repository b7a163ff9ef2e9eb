// The kernels that a module of devices offers, by contract.
#pragma once
#include <array>

#include "oracle/device.hpp"
#include "primitives/cuda/mapping_cuda.hpp"

namespace shardproof::cuda {

inline constexpr std::array device_kernels = {
    DeviceKernel{"mapping_copy", mapping_copy},
    DeviceKernel{"mapping_reduce", mapping_reduce},
    DeviceKernel{"mapping_scaled_reduce", mapping_scaled_reduce},
    DeviceKernel{"mapping_all_reduce", mapping_all_reduce},
    DeviceKernel{"mapping_scatter", mapping_scatter},
    DeviceKernel{"mapping_gather", mapping_gather},
    DeviceKernel{"mapping_all_gather", mapping_all_gather},
    DeviceKernel{"mapping_reduce_scatter", mapping_reduce_scatter},
    DeviceKernel{"mapping_all_to_all", mapping_all_to_all},
    DeviceKernel{"mapping_slice", mapping_slice},
    DeviceKernel{"mapping_pad", mapping_pad},
    DeviceKernel{"mapping_replicate_to_invariant", mapping_replicate_to_invariant},
    DeviceKernel{"mapping_invariant_to_partial", mapping_invariant_to_partial},
    DeviceKernel{"mapping_replicate_to_partial", mapping_replicate_to_partial},
    DeviceKernel{"mapping_reinterpret", mapping_reinterpret},
};

}  // namespace shardproof::cuda
