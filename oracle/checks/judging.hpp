// What the checks share: how results are read, how a verdict follows from findings, words for
// ranks.
#pragma once
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "oracle/check.hpp"

namespace shardproof {

Check forward_check();
Check gradient_check();
Check adjoint_check();
Check gradcheck_check();
Check replica_check();
Check ledger_check();
Check lockstep_check();
Check memory_check();
Check repeat_check();
Check stream_check();
Check mask_check();
Check coverage_check();
Check leak_check();
Check accumulate_check();
Check rejection_check();

namespace judging {

Layout result_layout(const Operand&,
                     bool gradient);  // a gradient has the dual of the value's layout
// grad= says that of a parameter's gradient.
DType result_dtype(const Evidence&, const Operand&, bool gradient);
std::string tensor_name(const Operand&, bool gradient);  // "y", "gradient of x"
std::string ranks_text(std::span<const int> ranks,
                       int world);  // "rank 2", "ranks 0-3, 5", "every rank"
std::vector<int64_t> coordinates(int64_t index, std::span<const int64_t> shape);
// Shortest form that a reader can tell apart; a NaN has no sign.
std::string number(double, int digits = 9);
std::string why_released(const ShotRecord&);  // without where ranks stood
std::string what_ended(const ShotRecord&);    // "threw: no memory"
bool has_gradients(const Contract&, const Case&, const Declared&);

void read(const ResultTensor&, std::vector<double>& values);
// The same of `count` elements from `first` on: large results are read in pieces.
void read(const ResultTensor&, size_t first, size_t count, std::vector<double>& values);
void read(const ResultTensor&, size_t first, size_t count, double* values);
// What was looked at in another way than by read(): pages of a file are given back now and then.
void looked_at(const ResultTensor&, size_t first, size_t count);
int step_of(const Shot&, std::string_view word);  // place of "B0" in the program; -1
// A finding when a shot was not run to its end on every rank, with the words of the rank that ended
// by itself, else of the first one.
std::optional<Finding> incomplete(const Evidence&, int shot);
std::optional<Finding> incomplete(const Evidence&, const std::string& shot);

// A result whose bytes ought to equal another's.
struct ByteResult {
  const ResultTensor* tensor = nullptr;
  int rank = 0;
};
// Where two results differ, as a finding: the first element that does, in global coordinates, with
// both values. `error` is the largest difference of all.
Finding difference(const Evidence&, const ByteResult& got, const ByteResult& want);
bool same_bytes(const ResultTensor&, const ResultTensor&);

// Results of one step in one shot against those of another, bit for bit on every rank.
struct Steps {
  int shot_got, step_got, shot_want, step_want;
};
struct Agreement {
  int64_t compared = 0;
  std::vector<Finding> findings;
  double spread = 0;  // largest |difference|
};
Agreement same_results(const Evidence&, const Steps&);
// The shots of these names, which repeat the base one, against it: bit for bit, or
// within the bound where the subject declares itself not deterministic. `told` says of a shot what
// was different, and what a difference means.
struct Told {
  std::string with, means;
};
CheckResult same_again(const Evidence&, const std::string& check,
                       std::span<const char* const> names, Told (*told)(const Shot&));
// Results of type I and R of one shot, byte for byte over their ranks (replica.cpp).
Agreement same_replicas(const Evidence&, int shot);
// "ranks 1, 3 part from rank 0 (want; got: rank 1)", and what more is to be said.
std::string parting_text(std::span<const int> apart, int got, int want, const std::string& more);
// Calls that are due on a rank in a forward, or in a backward that ends its step or does not
// (ledger.cpp), and whether one that was met is the due one.
std::vector<LedgerEntry> due_calls(const Evidence&, int rank, bool backward, bool ends_step = true);
bool is_due(const LedgerEntry& met, const LedgerEntry& due);
// Which ranks of a group part from the others in a result that all of them hold, and where.
Finding parting(const Evidence&, const std::vector<int>& group, int shot, const ResultTensor& like);

// rms of the errors of a tensor, each in its scale (whole_tensor.cpp). Empty where no scale is
// valid or a result is missing.
struct WholeTensor {
  double rms = 0, limit = 1;
  std::optional<Finding> finding;  // where rms > limit
  double ratio() const { return rms / limit; }
};
std::optional<WholeTensor> whole_tensor(const Evidence&, int shot, int step, int operand,
                                        bool gradient, const Whole& want,
                                        const std::function<double(int64_t)>& scale);

// Passed where something was compared and nothing was found; vacuous where nothing was compared.
CheckResult conclude(const std::string& check, int64_t compared, std::vector<Finding>,
                     std::string note = "");

// Every result of a step (values or gradients) against the truth of a feed.
struct Judgement {
  int64_t compared = 0;
  bool exact = true;
  double ratio = 0;
  std::vector<Finding> findings;
  std::string vacuous;  // why nothing was proven, "" where something was
  double bound = 0;     // of the worst element
  int rank = -1;
  std::vector<int64_t> index;
  std::string where;
};
// How many of them `leak` puts between the data of a sequence and what it makes of them (leak.cpp).
int binary_orders_of_loud(const Case&);
// One that says nothing where a contract gives none.
const Gauge& gauge_of(const std::vector<Gauge>&, size_t k);
// Said of a tensor with elements whose error has no bound.
std::string without_bound(const std::string& tensor);
// What to change in a line whose results are zero or equal whatever a subject does.
std::string values_that_can_be_wrong(const Case& line);
Judgement against_truth(const Evidence&, int shot, std::string_view word, bool gradient);
// The same of the base shot; what is off, and tells nothing by its values, is told by the contract.
Judgement base_against_truth(const Evidence&, std::string_view word, bool gradient);
CheckResult conclude(const std::string& check, Judgement, std::string note = "");

}  // namespace judging
}  // namespace shardproof
