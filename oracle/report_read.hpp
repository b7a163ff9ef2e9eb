// A report.json of an earlier run as later commands need it: `diff`, `gate --failed`.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace shardproof {

inline constexpr int report_schema = 1;

struct EarlierCheck {
  std::string line, shown, check, verdict, replay;  // line: canonical; shown: as one reads it
  std::optional<double> ratio;                      // of checks that compare numbers
  std::optional<int64_t> calls, bytes;              // of the whole case
};

struct EarlierControl {
  std::string line, shown, control, outcome, replay;
  std::optional<double> margin;  // of one that was caught; infinite where exact
  bool exact = false;
  bool weak() const;  // verdict.hpp's
};

struct EarlierLane {
  std::string name, reason;
  bool proven = false;
};

struct EarlierReport {
  std::string path, verdict, program;
  std::vector<std::string> reasons;
  bool complete = false;
  std::vector<EarlierCheck> checks;
  std::vector<EarlierControl> controls;
  std::vector<EarlierLane> lanes;
};

// `place` is a report.json or the folder that holds one. Throws BadInput with `source` in front:
// nothing there, no report of Shardproof, another schema, an entry that lacks a field, a file that
// is cut short or larger than any report.
EarlierReport read_report(const std::string& place, const std::string& source);

}  // namespace shardproof
