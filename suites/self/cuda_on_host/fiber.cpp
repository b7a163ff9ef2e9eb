#include "suites/self/cuda_on_host/fiber.hpp"

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>

#ifdef __has_feature
#if __has_feature(address_sanitizer)
#define __SANITIZE_ADDRESS__ 1
#endif
#if __has_feature(thread_sanitizer)
#define __SANITIZE_THREAD__ 1
#endif
#endif
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#ifdef __SANITIZE_THREAD__
#include <sanitizer/tsan_interface.h>
#endif

namespace cuda_on_host {
namespace {

#ifdef __x86_64__
// Saves what a call must not change on the stack that is left; takes it from the one that is
// entered.
extern "C" void cuda_on_host_switch(void** left, void* entered);
asm(R"(
.text
.type cuda_on_host_switch, @function
cuda_on_host_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size cuda_on_host_switch, .-cuda_on_host_switch
)");
void change(void*& left, void*& entered) { cuda_on_host_switch(&left, entered); }
#else
void change(ucontext_t& left, ucontext_t& entered) { swapcontext(&left, &entered); }
#endif

// The address sanitizer follows stacks only where it is told of every change.
void leaves([[maybe_unused]] void** fake, [[maybe_unused]] const void* bottom,
            [[maybe_unused]] size_t size) {
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_start_switch_fiber(fake, bottom, size);
#endif
}
void arrives([[maybe_unused]] void* fake, [[maybe_unused]] const void** bottom,
             [[maybe_unused]] size_t* size) {
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(fake, bottom, size);
#endif
}

// So does the thread sanitizer, by a name for each stack.
void* name_stack() {
#ifdef __SANITIZE_THREAD__
  return __tsan_create_fiber(0);
#else
  return nullptr;
#endif
}
void* name_of_this_stack() {
#ifdef __SANITIZE_THREAD__
  return __tsan_get_current_fiber();
#else
  return nullptr;
#endif
}
void goes_to([[maybe_unused]] void* stack) {
#ifdef __SANITIZE_THREAD__
  __tsan_switch_to_fiber(stack, 0);
#endif
}

}  // namespace

Fibers::~Fibers() {
  if (stacks_) ::munmap(stacks_, contexts_.size() * apart);
}

void Fibers::grow(size_t count) {
  if (stacks_) ::munmap(stacks_, contexts_.size() * apart);
  void* memory = ::mmap(nullptr, count * apart, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) std::abort();
  stacks_ = static_cast<char*>(memory);
  contexts_.resize(count);
  while (names_.size() < count) names_.push_back(name_stack());
  for (size_t f = 0; f < count; ++f) ::mprotect(stacks_ + f * apart, page, PROT_NONE);
}

// Tops that lie a multiple of a page apart would share few lines of the first cache.
char* Fibers::top(size_t fiber) const { return bottom(fiber) + apart - page - fiber % 16 * 192; }

void Fibers::prepare(size_t fiber) {
#ifdef __SANITIZE_ADDRESS__
  __asan_unpoison_memory_region(bottom(fiber), apart - page);
#endif
#ifdef __x86_64__
  // Six registers, the address that the switch returns to, and one word: after a call the stack
  // pointer is 8 off a multiple of 16.
  auto* at = reinterpret_cast<uintptr_t*>(top(fiber)) - 8;
  at[6] = reinterpret_cast<uintptr_t>(entry_);
  contexts_[fiber] = at;
#else
  getcontext(&contexts_[fiber]);
  contexts_[fiber].uc_stack.ss_sp = bottom(fiber);
  contexts_[fiber].uc_stack.ss_size = size_t(top(fiber) - bottom(fiber));
  makecontext(&contexts_[fiber], entry_, 0);
#endif
}

void Fibers::require(size_t count) {
  if (count <= contexts_.size()) return;
  grow(count);
  reset();
}

void Fibers::reset() {
  for (size_t f = 0; f < contexts_.size(); ++f) prepare(f);
}

void Fibers::resume(size_t fiber) {
  current_ = fiber;
  void* fake = nullptr;
  leaves(&fake, bottom(fiber), apart - page);
  host_name_ = name_of_this_stack();
  goes_to(names_[fiber]);
  change(host_, contexts_[fiber]);
  arrives(fake, nullptr, nullptr);
}

void Fibers::entered() { arrives(nullptr, &host_bottom_, &host_size_); }

void Fibers::suspend() {
  void* fake = nullptr;
  leaves(&fake, host_bottom_, host_size_);
  goes_to(host_name_);
  change(contexts_[current_], host_);
  arrives(fake, &host_bottom_, &host_size_);
}

bool Fibers::holds(const void* address) const {
  const auto* at = static_cast<const char*>(address);
  return at >= stacks_ && at < stacks_ + contexts_.size() * apart;
}

}  // namespace cuda_on_host
