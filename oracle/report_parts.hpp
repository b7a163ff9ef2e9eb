// What the forms of a report share: words for numbers, sums by family and lane, what to show first.
#pragma once
#include <cstdint>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "oracle/printable.hpp"
#include "oracle/verdict.hpp"

namespace shardproof::telling {

inline constexpr int label_width = 11;  // "FAILED     ", "at         ", "replay     "

// A labelled printable line. Text of several lines is indented below the first.
std::string row(const std::string& label, const std::string& text, int width = label_width);
std::string number(double);   // 12, 0.0312, 1.5e-08, inf, nan
std::string ratio(double);    // 0.31, 4.2, 41, 3.1e+05, inf
std::string seconds(double);  // "12 ms", "9.8 s", "34 s"
// Two numbers with as many digits as it takes to tell them apart.
std::pair<std::string, std::string> distinguished(double got, double want);
std::string ranks(const std::vector<int>&);  // "rank 2", "ranks 0, 1", "ranks 0-3, 6"

bool is_numeric(const CheckResult&);  // it compared values: a ratio or an exact bound stands for it
// The check that opens the block of a case: crashed, hung, failed, vacuous, untested, skipped,
// passed, the first of its kind. Null where the case has no check.
const CheckResult* headline(const CaseResult&);
bool lets_pass(Verdict);                     // passed or skipped
bool lets_pass(const std::string& verdict);  // the same by its name

// block() of a case, opened by the check that is given.
std::string block_about(const CaseResult&, const CheckResult& first, const std::string& program);

struct Family {
  std::string name;
  std::set<std::string> contracts;
  Counts counts;
  const ControlResult* weakest = nullptr;  // of those caught by a bound above 0
  double seconds = 0;
};
std::vector<Family> families(const Report&);  // in order of appearance
std::string margin(const Family&);  // "exact", "41 (round_before_reduce)", "" without controls

struct Worst {
  double ratio = 0;
  const CaseResult* on = nullptr;
};
Worst worst_healthy(const Report&);  // of passed checks

// "processes 1 2 3 4 8 proven", "staged, nccl NOT PROVEN (no driver, 35)".
std::vector<std::string> lanes(const Report&);
// What subjects declare that they do not do: "no backward (12)".
std::vector<std::string> not_due(const Report&);
// "12 lines: linear_row tp=2 sp=on, linear_row tp=4 sp=on, ... and 9 more"; "" where none was.
std::string left_out(const Report&);

// Table of the controls: outcome, control, expected check, caught by, ratio, margin, imitates,
// witness. Failures first, then named controls one a row, then operators summed by family.
std::vector<std::string> control_columns();
bool is_number_column(size_t);
std::vector<std::vector<std::string>> control_rows(const Report&);

// "NO JUDGEMENT", "FAILED", "PASSED", and the sentence that follows.
struct Ending {
  std::string word, sentence;
};
Ending ending(const Report&);

}  // namespace shardproof::telling
