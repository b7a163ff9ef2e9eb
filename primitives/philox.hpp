// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11): four words
// that are a function of a counter and a key. Masks and initial values drawn by the global index of
// an element are the same on every layout, without a stream to save and restore.
#pragma once
#include <array>
#include <cstdint>

#include "primitives/element.hpp"

namespace shardproof::primitives {

struct Words {
  uint32_t word[4];
};

SHARDPROOF_HD inline Words philox4x32(Words counter, uint32_t key0, uint32_t key1) {
  uint32_t* c = counter.word;
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t(0xD2511F53) * c[0], b = uint64_t(0xCD9E8D57) * c[2];
    c[0] = uint32_t(b >> 32) ^ c[1] ^ key0;
    c[1] = uint32_t(b);
    c[2] = uint32_t(a >> 32) ^ c[3] ^ key1;
    c[3] = uint32_t(a);
    key0 += 0x9E3779B9;
    key1 += 0xBB67AE85;
  }
  return counter;
}
inline std::array<uint32_t, 4> philox4x32(std::array<uint32_t, 4> c, std::array<uint32_t, 2> key) {
  const Words w = philox4x32(Words{{c[0], c[1], c[2], c[3]}}, key[0], key[1]);
  return {w.word[0], w.word[1], w.word[2], w.word[3]};
}

// Word of an element: counter (index / 4, site, call), word index mod 4.
SHARDPROOF_HD inline uint32_t word_of(uint64_t seed, uint64_t index, uint32_t site, uint32_t call) {
  const uint64_t block = index / 4;
  const Words counter{{uint32_t(block), uint32_t(block >> 32), site, call}};
  return philox4x32(counter, uint32_t(seed), uint32_t(seed >> 32)).word[index % 4];
}

}  // namespace shardproof::primitives
