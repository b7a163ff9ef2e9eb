// The additive digest as threads compute it that share the units of a run among them: one text for
// the host and the kernels of a device. Sums are integers, so that it does not matter who adds
// which unit: the parts of all threads are what shardproof_digest_run gives.
#pragma once
#include "oracle/digest/shardproof_digest.h"

namespace shardproof::digest {

#ifdef __CUDACC__
#define SHARDPROOF_DIGEST_HD __host__ __device__
#else
#define SHARDPROOF_DIGEST_HD
#endif

// A run: `units` of the hash's unit that lie one after another, the first at index `first` in
// units.
struct Units {
  const unsigned char* data = nullptr;
  uint64_t units = 0, first = 0, of_unit = 1;  // elements of a unit
  shardproof_hash hash{};

  // False where unit word is asked for and the run is not one of words.
  SHARDPROOF_DIGEST_HD static bool of(const shardproof_hash& h, const void* data, uint64_t elements,
                                      uint64_t first, Units& u) {
    u.data = static_cast<const unsigned char*>(data);
    u.hash = h;
    u.of_unit = h.unit == SHARDPROOF_WORD ? 8 / shardproof_size(h.dtype) : 1;
    u.units = elements / u.of_unit, u.first = first / u.of_unit;
    return elements % u.of_unit == 0 && first % u.of_unit == 0;
  }

  // Units begin, begin + step, ... with all that a digest counts.
  SHARDPROOF_DIGEST_HD void add(uint64_t begin, uint64_t step, shardproof_digest& sum) const {
    const size_t size = shardproof_size(hash.dtype);
    for (uint64_t i = begin; i < units; i += step) {
      uint64_t bits = 0;
      for (uint64_t j = 0; j < of_unit; ++j) {
        const uint64_t element = shardproof_load(data + (i * of_unit + j) * size, size);
        bits |= shardproof_counted(&sum, &hash, element) << (j * 8 * size % 64);
      }
      shardproof_digest_unit(&sum, &hash, first + i, bits);
    }
  }

  // The same, the first `lanes` of it alone, of bits as they are (mode raw): what tells copies
  // apart. Two fmix a unit and lane, one load.
  template <int lanes>
  SHARDPROOF_DIGEST_HD void add_lanes(uint64_t begin, uint64_t step,
                                      uint64_t (&sums)[lanes]) const {
    const size_t size = hash.unit == SHARDPROOF_WORD ? 8 : shardproof_size(hash.dtype);
    for (uint64_t i = begin; i < units; i += step) {
      const uint64_t bits = shardproof_load(data + i * size, size);
      for (int lane = 0; lane < lanes; ++lane)
        sums[lane] += shardproof_mix(hash.salt[lane], first + i, bits);
    }
  }
};

}  // namespace shardproof::digest
