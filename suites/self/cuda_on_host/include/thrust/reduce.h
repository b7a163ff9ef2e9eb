// Thrust's sum on a policy of CUDA: scratch from the policy's allocator, the sum by a loop.
// Thrust's own text runs on CCCL's system of the host in cccl_test.
#pragma once
#include <cuda_runtime.h>

namespace thrust {

template <class Policy, class T>
T reduce(const Policy& policy, const T* first, const T* last, T sum) {
  const auto bytes = std::ptrdiff_t(sizeof(T));
  char* scratch = policy.memory->allocate(bytes);
  for (; first != last; ++first) sum += *first;
  policy.memory->deallocate(scratch, size_t(bytes));
  return sum;
}

}  // namespace thrust
