// What the wrong elements have in common, and what that says to the author of a kernel.
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "oracle/contract.hpp"

namespace shardproof {

struct WrongElement {
  int64_t at;  // denoted index
  int rank;    // that holds it (type P: the first of those that hold a part)
  double got, want;
};

struct Wrongness {
  std::span<const WrongElement> wrong;  // not empty
  int64_t total = 0;                    // of all wrong elements, of which `wrong` may be the first
  int64_t compared = 0;                 // elements, every copy counted
  const Whole* want = nullptr;
  const Operand* operand = nullptr;
  Layout layout;  // of the result
  const Mesh* mesh = nullptr;
  bool gradient = false;  // else a result of the forward, of which no backward is to blame
};

struct Pattern {
  std::string text;   // "all x 4.000 = tp", "block of rank 3, zero", "rows 4..7", "one element"
  std::string means;  // "" when nothing certain can be said
};
Pattern pattern_of(const Wrongness&);

// What NaN everywhere means in buffers of the judge.
inline constexpr const char* means_of_nan =
    "never written (fresh buffers hold NaN), or computed from memory that was never written";

// What is off by so little says: of a result that is wrong by more it says nothing.
inline constexpr const char* means_of_roundings =
    "a rounding more than is due: a division before a sum (a bias / p on each of p ranks), or a "
    "narrower type on the way; or terms are missing that are nearly nothing here";

// What is there is mostly the truth: of a gradient behind a wrong forward it says nothing.
inline constexpr const char* means_of_near =
    "all of it is off, together by less than a fifth: terms that are due as they came were rounded "
    "first (to codes of 8 bits, to a narrower type), have another factor (a decay, a scale), or "
    "some of them are missing or counted too often";

// "tp", "1/tp", "tp*dp", "tp or cp": products of axis sizes that a factor stands for; "" for none.
std::string factor_name(double factor, const Mesh&);
// What a factor between a result and the truth (or between the sides of a pairing) means.
std::string factor_means(double factor, const Mesh&);
std::string factor_text(double factor);  // "4.000", "1.0009766"

}  // namespace shardproof
