// What twins of tensors in 8 bits share: scales and codes that are computed otherwise. The comment
// above each names the mistake.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "primitives/calls.hpp"
#include "primitives/recipe.hpp"

namespace shardproof::controls {

using namespace primitives;
using Doubles = std::vector<double>;

// ---- Scales, of amax and the healthy scale

// The greatest number of the other format, of another vendor's, and of one that takes the exponent
// of infinities for numbers.
struct OfOtherFormat {
  static double of(const Recipe& r, double amax, double s) {
    const double ratio = e5m2.number(e5m2.last) / e4m3.number(e4m3.last);
    return amax == 0 ? s : r.format.fraction_bits == 3 ? s * ratio : s / ratio;
  }
};
template <int most>
struct GreatestIs {
  static double of(const Recipe&, double amax, double s) { return amax == 0 ? s : most / amax; }
};
struct RoundedUp {
  static double of(const Recipe& r, double amax, double s) {
    const double exact = r.format.number(r.format.last) / amax;
    return amax == 0 || s == exact ? s : 2 * s;
  }
};
struct RoundedToNearest {
  static double of(const Recipe& r, double amax, double s) {
    return amax == 0 ? s : std::exp2(std::round(std::log2(r.format.number(r.format.last) / amax)));
  }
};
struct InHalf {
  static double of(const Recipe&, double, double s) { return round_to(s, DType::bf16); }
};
// Division by zero, and by a small number in its place.
struct OfZeroIsInfinite {
  static double of(const Recipe&, double amax, double s) { return amax == 0 ? INFINITY : s; }
};
struct OfZeroIsOfSmallest {
  static double of(const Recipe& r, double amax, double s) {
    return amax == 0 ? r.format.number(r.format.last) / 1e-12 : s;
  }
};

template <class Change>
void rescale(const Recipe& r, const View& amax, const View& scales) {
  const Doubles most = to_doubles(amax);
  Doubles s = to_doubles(scales);
  for (size_t i = 0; i < s.size(); ++i) s[i] = Change::of(r, most[i], s[i]);
  fill_from(scales, s);
}

// ---- Scales that are used in place of those that are due

// Codes times s where code times 1/s is due.
struct Inverse {
  static Doubles of(const Recipe&, Doubles s) {
    for (double& v : s) v = 1 / v;
    return s;
  }
};
// Quantised by the exact scale, read by the power of two.
struct PowerOfTwoAfterwards {
  static Doubles of(const Recipe&, Doubles s) {
    for (double& v : s) v = std::ldexp(1, std::ilogb(v));
    return s;
  }
};
// The codes as they are.
struct One {
  static Doubles of(const Recipe&, Doubles s) { return Doubles(s.size(), 1); }
};

template <class Change>
View changed(Rank& rank, const Recipe& r, const View& scales) {
  const View other = rank.workspace(scales.dtype, scales.shape);
  fill_from(other, Change::of(r, to_doubles(scales)));
  return other;
}

// ---- Codes

// Of another conversion: Rule::code(format, x s).
template <class Rule>
void converted(const Recipe& r, const View& x, const View& scales, const View& words) {
  const Doubles v = to_doubles(x), s = to_doubles(scales);
  const auto group = size_t(r.group(x.elements()));
  std::vector<uint32_t> word(size_t(words.elements()));
  for (size_t i = 0; i < v.size(); ++i)
    word[i / 4] |= uint32_t(Rule::code(r.format, v[i] * s[i / group])) << (8 * (i % 4));
  Doubles w;
  for (uint32_t each : word) w.push_back(double(int32_t(each)));
  fill_from(words, w);
}
inline int sign_of(double z) { return std::signbit(z) ? 0x80 : 0; }
// The code at or below the magnitude.
inline int floor_of(const EightBits& f, double z) {
  int code = f.code(std::abs(z));
  if (f.number(code) > std::abs(z)) --code;
  return code;
}
struct HalfUp {
  static int code(const EightBits& f, double z) {
    const int below = floor_of(f, z);
    const bool up =
        below < f.last && std::abs(z) - f.number(below) >= f.number(below + 1) - std::abs(z);
    return sign_of(z) | (below + up);
  }
};
struct Truncated {
  static int code(const EightBits& f, double z) { return sign_of(z) | floor_of(f, z); }
};
// In half precision first: what lies next to a tie falls on it.
struct RoundedTwice {
  static int code(const EightBits& f, double z) { return f.code(round_to(z, DType::f16)); }
};
struct SubnormalsFlushed {
  static int code(const EightBits& f, double z) {
    return std::abs(z) < std::ldexp(1, f.lowest()) ? sign_of(z) : f.code(z);
  }
};
// Beyond the greatest number: NaN, as a conversion that does not saturate has it; the low bits of a
// code that is too long; and the greatest from the last exponent on.
struct NotSaturated {
  static int code(const EightBits& f, double z) {
    const double last = f.number(f.last), next = last + last - f.number(f.last - 1);
    return std::abs(z) > (last + next) / 2 ? sign_of(z) | 0x7F : f.code(z);
  }
};
struct Wrapped {
  static int code(const EightBits& f, double z) {
    const double last = f.number(f.last);
    return std::abs(z) <= last ? f.code(z) : sign_of(z) | f.code(std::fmod(std::abs(z), last));
  }
};
struct SaturatedEarly {
  static int code(const EightBits& f, double z) {
    const int last_exponent = f.last >> f.fraction_bits << f.fraction_bits;
    return std::abs(z) >= f.number(last_exponent) ? sign_of(z) | f.last : f.code(z);
  }
};

// Blocks that arrive in the order of ranks are taken in the reverse one.
inline void gather_reversed(Rank& rank, const View& own, const View& all) {
  Communicator& tp = rank.along(Axis::tp);
  const int64_t p = tp.size(), n = own.elements();
  const View arrived = rank.workspace(all.dtype, all.shape);
  all_gather(rank, tp, own, arrived, 0);
  for (int64_t i = 0; i < p; ++i)
    convert(arrived.narrow(0, i * n, n), all.narrow(0, (p - 1 - i) * n, n));
}

inline EightBits other_than(const EightBits& f) { return f.fraction_bits == 3 ? e5m2 : e4m3; }

}  // namespace shardproof::controls
