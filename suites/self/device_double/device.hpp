// What the parts of the double share.
#pragma once
#include <cstddef>
#include <functional>

#include "oracle/device.hpp"

namespace shardproof::device_double {

// Puts work behind what a stream has to do; it is done when the host waits.
int enqueue(void* stream, std::function<void()> work);
// Work that may have to be tried again: true where it is done.
int enqueue_when(void* stream, std::function<bool()> work);
// The shadow of device memory, where all of it lies in one allocation. Elsewhere the address
// itself, which nobody may touch. For work that is being done.
std::byte* reach(const void* device, size_t bytes);
inline constexpr size_t without_pages = size_t(1) << 30;
int allocate(void** memory, size_t bytes);
void discard(void* memory);             // at once; for work that is being done
int order(void* later, void* earlier);  // streams
int synchronise(void* stream);
const char* text_of(int code);
int fill(void* to, int byte, size_t bytes, void* stream);
const NcclApi& nccl();  // among processes

}  // namespace shardproof::device_double
