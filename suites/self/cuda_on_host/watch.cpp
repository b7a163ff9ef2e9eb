// The calls that a compiler of the host puts beside each access to memory under -fsanitize=thread,
// without that sanitizer: accesses of a kernel's threads, of which two to one place are ordered by
// a barrier of the block between them, or by one of the warp.
#include "suites/self/cuda_on_host/watch.hpp"

#include <cstdio>
#include <unordered_map>

#include "suites/self/cuda_on_host/block.hpp"

namespace cuda_on_host {

bool looks_closely = false;

namespace {

struct Access {
  Moment when;
  bool there = false;
};
// Two readers: that of a second thread since the last barrier, and the last one.
struct Place {
  Access written, read, read_too;
};
constexpr uintptr_t of_place = 2;  // bytes: the smallest element
std::unordered_map<uintptr_t, Place> places;

bool ordered(const Access& before, const Moment& now, uintptr_t at) {
  const Moment& then = before.when;
  if (!before.there) return true;
  if (then.block != now.block) return shared(at);  // that of another block is another memory
  if (then.thread == now.thread) return true;
  if (then.barriers != now.barriers) return true;
  return then.thread / warp == now.thread / warp && then.warp_barriers != now.warp_barriers;
}

void refuse(const char* does, const Moment& now, const Access& before, const char* has,
            uintptr_t at) {
  char why[200];
  std::snprintf(why, sizeof why,
                "thread %u %s at %s%#zx what thread %u of block %zu %s without a barrier between",
                now.thread, does, shared(at) ? "shared memory + " : "", size_t(place_of(at)),
                before.when.thread, size_t(before.when.block), has);
  stop(why);
}

void look_at_place(uintptr_t at, const Moment& now, bool writes) {
  Place& place = places[at / of_place];
  if (!ordered(place.written, now, at))
    refuse(writes ? "writes" : "reads", now, place.written, "has written", at);
  if (!writes) {
    if (!ordered(place.read, now, at)) place.read_too = place.read;
    place.read = {now, true};
    return;
  }
  for (const Access& read : {place.read, place.read_too})
    if (!ordered(read, now, at)) refuse("writes", now, read, "has read", at);
  place = {{now, true}, {}, {}};
}

[[gnu::noinline]] void look_closely(const void* address, size_t bytes, bool writes, bool aligned) {
  if (!of_a_kernel(address)) return;
  const auto at = reinterpret_cast<uintptr_t>(address);
  if (aligned && at % bytes != 0) stop("an access at an address that is no multiple of its size");
  visible(32);
  if (!watched()) return;
  const Moment now = moment();
  for (uintptr_t p = at / of_place * of_place; p < at + bytes; p += of_place)
    look_at_place(p, now, writes);
}

[[maybe_unused]] inline void look(const void* address, size_t bytes, bool writes, bool aligned) {
  const bool askew = aligned && reinterpret_cast<uintptr_t>(address) % bytes != 0;
  if (looks_closely || askew) look_closely(address, bytes, writes, aligned);
}

}  // namespace

void forget_accesses() { places.clear(); }

}  // namespace cuda_on_host

#ifdef CUDA_ON_HOST_WATCHES
extern "C" {
#define CUDA_ON_HOST_LOOKS(n)                                                          \
  void __tsan_read##n(void* at) { cuda_on_host::look(at, n, false, true); }            \
  void __tsan_write##n(void* at) { cuda_on_host::look(at, n, true, true); }            \
  void __tsan_unaligned_read##n(void* at) { cuda_on_host::look(at, n, false, false); } \
  void __tsan_unaligned_write##n(void* at) { cuda_on_host::look(at, n, true, false); }
CUDA_ON_HOST_LOOKS(1)
CUDA_ON_HOST_LOOKS(2)
CUDA_ON_HOST_LOOKS(4)
CUDA_ON_HOST_LOOKS(8)
CUDA_ON_HOST_LOOKS(16)
void __tsan_read_range(void* at, unsigned long n) { cuda_on_host::look(at, n, false, false); }
void __tsan_write_range(void* at, unsigned long n) { cuda_on_host::look(at, n, true, false); }
void* __tsan_memcpy(void* to, const void* from, unsigned long n) {
  cuda_on_host::look(from, n, false, false), cuda_on_host::look(to, n, true, false);
  return __builtin_memcpy(to, from, n);
}
void* __tsan_memset(void* to, int byte, unsigned long n) {
  cuda_on_host::look(to, n, true, false);
  return __builtin_memset(to, byte, n);
}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
}
#endif
