// A tensor in 8 bits: what a line says of it, and the steps from values to codes and back. amax and
// scales are computed and sent in the accumulation type.
#pragma once
#include <vector>

#include "primitives/eight_bits.hpp"
#include "primitives/work.hpp"

namespace shardproof::primitives {

struct Recipe {
  EightBits format;
  bool power_of_two = false;
  int64_t block = 0;  // 0: one scale of all
  DType type;         // of amax and scales

  Recipe(const Case&, const EightBits& format);
  bool one_scale() const { return block == 0; }
  // Elements that share a scale, of `elements` in all; how many scales these have.
  int64_t group(int64_t elements) const { return one_scale() ? elements : block; }
  int64_t scales(int64_t elements) const { return one_scale() ? 1 : elements / block; }
};
EightBits format_of(const Case&, const char* key);  // e4m3 or e5m2

// next = amax, history but for its oldest, which is the last.
void roll_history(const View& history, const View& amax, const View& next);
// amax of each group of x; scales of these; codes of x, four in a word of i32; values of codes.
void greatest_of(const Recipe&, const View& x, const View& amax);
void scales_from(const Recipe&, const View& amax, const View& scales);
void codes_from(const Recipe&, const View& x, const View& scales, const View& words);
// y holds blocks of `own` elements, the words of each behind those of the one before.
void values_from(const Recipe&, const View& words, const View& scales, int64_t own, const View& y);

}  // namespace shardproof::primitives
