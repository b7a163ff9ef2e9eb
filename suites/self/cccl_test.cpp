// What runs on a device by Thrust, on CCCL's system of loops on the host, against a plain loop.
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "fixtures/random.hpp"

#if __has_include(<thrust/reduce.h>)
#include <thrust/execution_policy.h>

#include "oracle/cuda/word_sum.hpp"

namespace shardproof {
namespace {

TEST(OnCcclsHostSystem, TheSumOfWordsIsThatOfALoop) {
  static_assert(THRUST_DEVICE_SYSTEM == THRUST_DEVICE_SYSTEM_CPP);
  const Stream123 stream(7, "words");
  for (uint64_t count : {0, 1, 2, 255, 256, 257, 100'003}) {
    std::vector<uint64_t> words(count);
    uint64_t want = 0;
    for (uint64_t i = 0; i < count; ++i) want += words[i] = stream.bits(i)[0];
    EXPECT_EQ(word_sum(thrust::device, words.data(), count), want) << count;
  }
}

}  // namespace
}  // namespace shardproof
#else
TEST(OnCcclsHostSystem, TheSumOfWordsIsThatOfALoop) {
  GTEST_SKIP() << "no headers of CCCL: they come with the CUDA Toolkit";
}
#endif
