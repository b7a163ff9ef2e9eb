// Stacks and the switch between them. `resume` is called on the stack of the host thread, `suspend`
// on one of the others, and each continues where the other was called last.
#pragma once
#ifndef __x86_64__
#include <ucontext.h>
#endif

#include <cstddef>
#include <vector>

namespace cuda_on_host {

class Fibers {
 public:
  explicit Fibers(void (*entry)()) : entry_(entry) {}
  ~Fibers();
  Fibers(const Fibers&) = delete;
  Fibers& operator=(const Fibers&) = delete;

  void require(size_t count);  // so many, each at the entry, which does not return
  void reset();                // all at the entry again
  size_t count() const { return contexts_.size(); }
  void resume(size_t fiber);
  void entered();  // the first that the entry calls
  void suspend();
  bool holds(const void* address) const;  // on one of the stacks

 private:
  static constexpr size_t page = 4096, apart = 17 * page;  // the lowest page faults
#ifdef __x86_64__
  using Context = void*;  // the stack pointer; what else has to stay lies on the stack
#else
  using Context = ucontext_t;
#endif
  void grow(size_t count);
  void prepare(size_t fiber);
  char* bottom(size_t fiber) const { return stacks_ + fiber * apart + page; }
  char* top(size_t fiber) const;

  void (*entry_)();
  char* stacks_ = nullptr;
  std::vector<Context> contexts_;
  Context host_{};
  size_t current_ = 0;
  // For sanitizers.
  const void* host_bottom_ = nullptr;
  size_t host_size_ = 0;
  void* host_name_ = nullptr;
  std::vector<void*> names_;
};

}  // namespace cuda_on_host
