// How much memory a judgement takes at its peak, and what of it is the reference's own.
//
//   watch_memory();  ...  const MemoryTold m = memory_told();
//
// Resident memory as the kernel counts it, pages of mapped files included. The reference's own is
// what it adds while it computes, and what is kept of it afterwards; everything else is the
// judge's. Without watch_memory() nothing is looked at. One thread at a time.
#pragma once
#include <cstdint>

namespace shardproof {

void watch_memory();

// While it lives, the reference computes.
class ReferenceWork {
 public:
  ReferenceWork();
  ~ReferenceWork();
  ReferenceWork(const ReferenceWork&) = delete;
  ReferenceWork& operator=(const ReferenceWork&) = delete;
};

// Bytes of the reference's results that are kept from now on; below 0: that were freed just now.
void reference_keeps(int64_t bytes);

struct MemoryTold {
  int64_t peak = 0;              // bytes of the process
  int64_t reference = 0;         // the most that was the reference's own
  int64_t beyond = 0;            // the most that was not
  double reference_seconds = 0;  // of CPU, in which it computed
};
// Throws Infrastructure where the kernel does not say (/proc).
MemoryTold memory_told();

}  // namespace shardproof
