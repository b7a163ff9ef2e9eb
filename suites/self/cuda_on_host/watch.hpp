// What the accesses of a kernel are held against (watch.cpp).
#pragma once
#include <cstddef>
#include <cstdint>

namespace cuda_on_host {

// Where a thread stands: how many barriers of its block and its warp it has passed.
struct Moment {
  uint64_t block = 0;
  uint32_t thread = 0, barriers = 0, warp_barriers = 0;
};
Moment moment();
bool watched();                         // by the schedule
extern bool looks_closely;              // at any access, not only at those askew
bool of_a_kernel(const void* address);  // called in one, and of memory that others may have
bool shared(uintptr_t address);
uintptr_t place_of(uintptr_t address);  // within shared memory where it lies there

void forget_accesses();  // a launch begins

}  // namespace cuda_on_host
