// Logs of fingerprints, one line for each (step, phase, tensor, axis, rank), as shardproof_digest.h
// writes them from a training loop of anyone's:
//
//   step=20 phase=backward tensor=w1 axis=tp:S4,dp:I2 rank=3,0 digest=... coverage=... elements=...
//
// Of one log: is every rank there, are copies equal, is every index there once, are the numbers
// finite, do ranks that need numbers of their own (dropout masks) have them. Of two: at which step,
// in which phase, with which tensor do the runs part.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "oracle/digest/digest.hpp"

namespace shardproof::digest {

struct LogLine {
  int64_t number = 0;  // in its file, from 1
  int64_t step = 0;
  std::string phase, tensor;
  std::vector<std::pair<std::string, char>> axes;  // name, 'S', 'I' or 'D'
  std::vector<int64_t> ranks;                      // of each; 0 where the record does not say
  std::vector<int64_t> place;                      // on them
  Digest digest{};
  Hash hash{};
  bool comparable_with(const LogLine&) const;  // same dtype, mode and unit
};
struct Log {
  std::string path;
  std::vector<LogLine> lines;  // as they stand in the file
  std::string truncated;       // what was left out at the end; "" nothing
};
// A last line without its end is left out and told. Anything else that is no record is refused:
// BadInput "FILE:LINE:COLUMN: expected ..., met ...".
Log read_log(const std::string& path);
Log parse_log(const std::string& text, const std::string& path);

struct LogFinding {
  int64_t step = 0;
  std::string phase, tensor, what, means;
  std::string rank;  // place on the axes, "tp=3"; "" where it is all of them
};
struct LogReport {
  std::vector<LogFinding> findings;  // in the order of step, phase and tensor
  std::vector<std::string> notes;
  std::string refused;    // a record that is not there, or two layouts that owe no equal bits; ""
  std::string mesh;       // "dp 2, tp 4": the ranks that wrote them
  bool one_rank = false;  // alone: there is no copy to compare and no shard to add
  bool cut = false;       // a log ends within a step, or before the other one
  int64_t proven = -1;    // the last step that every log holds whole; -1: not one
  int64_t tensors = 0, steps = 0;  // records of a tensor at a step and phase; steps
};
LogReport judge_log(const Log&);
// Floating sums round by the order in which a layout adds them: between two layouts only what is
// moved (phases "init" and "input"), integers and, as the caller says, `exact` sums owe equal bits.
LogReport compare_logs(const Log& a, const Log& b, bool exact = false);

std::string log_text(const LogReport&, const std::vector<Log>&);
std::string log_json(const LogReport&, const std::vector<Log>&);

}  // namespace shardproof::digest
