// What changed between the reports of two runs: `shardproof diff OLD NEW`.
//
// Compared is what both hold: checks by canonical line and name, controls by line and name, lanes
// by name. What is in one of them only is said; of what is in NEW alone that is lost which does not
// pass, since OLD does not know it to fail.
//
//   lost      a check that let a gate pass and does not now, one that passed and is skipped now; a
//             control that was caught and is not; a margin that fell below 10; a lane that was
//             proven; a check or control of NEW alone that does not let a gate pass; a run of the
//             same selection that passed as a whole, or one that is no judgement now; all, where
//             NEW did not run to its end or holds none of the checks of OLD
//   noted     ratios and margins that are worse by 3x, calls or bytes that changed, what was gained
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "oracle/report_read.hpp"

namespace shardproof {

struct Change {
  std::string what;           // "verdict", "control", "margin", "lane", "ratio", "traffic"
  std::string on;             // "LINE   gradient", "bias_before_reduce on LINE", "mpi.np8"
  std::string before, after;  // "passed", "41", "12 calls, 1152 bytes"
  std::string replay;         // a line to paste, "" where there is none
  double weight = 0;          // of the same kind, the greater comes first
};

// What only one of the two holds.
struct Alone {
  int64_t checks = 0, lines = 0, controls = 0;
  std::string first_line;
  int64_t not_passed = 0;  // of the checks; skipped ones apart
  std::string first_not_passed;
  std::vector<std::string> lanes;
  bool any() const { return checks > 0 || controls > 0 || !lanes.empty(); }
};

struct ReportDiff {
  std::string old_path, new_path, old_verdict, new_verdict;
  bool old_complete = false, new_complete = false;
  int64_t checks = 0, controls = 0;  // in both
  std::vector<Change> lost, worse, changed, gained;
  Alone only_old, only_new;
};

ReportDiff diff_reports(const EarlierReport& before, const EarlierReport& after);
std::string diff_text(const ReportDiff&);
std::string diff_markdown(const ReportDiff&);

}  // namespace shardproof
