// The sum of words, modulo 2^64, by Thrust on the system that the policy names: a device, or CCCL's
// own loops on the host, where a test runs this text.
#pragma once
#include <thrust/reduce.h>

#include <cstdint>

namespace shardproof {

template <class Policy>
uint64_t word_sum(const Policy& policy, const uint64_t* words, uint64_t count) {
  return thrust::reduce(policy, words, words + count, uint64_t(0));
}

}  // namespace shardproof
