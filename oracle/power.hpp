// The certificate that a tolerance means something: for each check of a family how near to its
// bound a healthy run came, how far above it the weakest broken one stood, and what the check
// cannot see by its nature.
//
//   margin = ratio of the weakest control / ratio of its healthy twin, each on the control's
//   witness
//
// A bound that is too wide lets its control escape; a bound that is wide lowers the margin, and
// below least_margin nobody is judged (exit 3).
#pragma once
#include <string>
#include <vector>

#include "oracle/verdict.hpp"

namespace shardproof {

struct Power {
  std::string family, check;
  // Healthy runs: how many passed, the worst ratio, on which line. `exact`: every bound was 0.
  int64_t passed = 0;
  double worst_healthy = 0;
  std::string worst_line;
  bool exact = true;
  // Broken runs that this check had to see: caught, and of those with a bound above 0 the weakest.
  int64_t caught = 0;
  std::string weakest, witness;
  double ratio = 0, margin = 0;      // of the weakest; 0 where there is none
  std::vector<std::string> escaped;  // controls that it had to see and did not
  std::string state() const;         // "exact", "seen", "LOW", "BLIND", "no control"
};
// By family in order of appearance, checks in order of appearance; what ran neither way is left
// out.
std::vector<Power> power_of(const Report&);

// What a check cannot see by its nature, and who does.
struct BlindSpot {
  std::string check, fault, seen_by;
};
const std::vector<BlindSpot>& blind_spots();
std::string blind_to(
    const std::string& check);  // "FAULT (seen by X); ..."; "" where nothing is known

// Columns and rows of the table; rows that ask for attention first.
std::vector<std::string> power_columns();
std::vector<std::vector<std::string>> power_rows(const Report&);
// One sentence for each row whose margin is low or whose control escaped; empty where all is well.
std::vector<std::string> power_warnings(const Report&);

}  // namespace shardproof
