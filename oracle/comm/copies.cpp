// What a fork made is told by a handler of the fork itself: a look at the process id with every
// call would cost as much as some calls do.
#include "oracle/comm/copies.hpp"

#include <pthread.h>
#include <unistd.h>

#include <stdexcept>

namespace shardproof {
namespace {

bool is_a_copy = false;

}  // namespace

void watch_for_copies() {
  [[maybe_unused]] static const int once =
      pthread_atfork(nullptr, nullptr, [] { is_a_copy = true; });
  is_a_copy = false;
}

void end_a_copy(Trace* trace) {
  if (!is_a_copy) return;
  if (trace) __atomic_store_n(&trace->copied, true, __ATOMIC_RELEASE);
  _exit(0);
}

void require_no_copy(Trace* trace) {
  end_a_copy(trace);
  if (trace && __atomic_load_n(&trace->copied, __ATOMIC_ACQUIRE))
    throw std::runtime_error(
        "the kernel forked, and the child came back from it to go on as this rank; expected one "
        "process of a rank: let a child call _exit or exec before the kernel returns");
}

}  // namespace shardproof
