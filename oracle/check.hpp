// One question asked of a subject on a case. A check plans shots before the ranks run and judges
// their records afterwards, in the parent, where no subject can write.
#pragma once
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fixtures/fills.hpp"
#include "oracle/job.hpp"
#include "oracle/verdict.hpp"

namespace shardproof {

// What one process computes from a feed. Inputs and cotangents are whole (stacked over P and V),
// outputs and gradients denoted; all by operand number within their list.
struct Truth {
  std::vector<Whole> inputs, cotangents, outputs, gradients;
  std::vector<Gauge> output_gauges, gradient_gauges;
};

// What checks work out from the reference alone, by name: computed once and shared by the lines
// that differ only in what the reference cannot see, as a control and its healthy twin do.
class Kept {
 public:
  template <class T, class Make>
  const T& get(const std::string& name, const Make& make) {
    std::shared_ptr<const void>& value = values_[name];
    if (!value) value = std::make_shared<const T>(make());
    return *static_cast<const T*>(value.get());
  }

 private:
  std::map<std::string, std::shared_ptr<const void>> values_;
};

// Everything about a case that is known before and after the ranks ran.
struct Evidence {
  const Case* line = nullptr;
  const Contract* contract = nullptr;
  Declared declared;  // of the subject under test
  Mesh mesh;
  std::vector<Operand> operands;  // inputs and parameters, then outputs
  int inputs = 0;                 // how many of them are inputs and parameters
  std::vector<Shot> shots;
  std::vector<RankRecord> ranks;  // by world rank; same order of shots
  // Reference on a feed; computed once and kept.
  std::function<const Truth&(const Feed&)> truth;
  std::shared_ptr<Kept> kept = std::make_shared<Kept>();
  // What a rank was fed by a shot (the value of an input, the cotangent of an output) where a file
  // holds it as it was prepared. Null, or null of it: it is drawn.
  std::function<const ResultTensor*(int rank, int shot, int feed, int operand)> fed;
  bool given_in_files = false;  // a plan leaves out values that feeds give

  int find_shot(const std::string& name) const;  // -1
  const ShotRecord& record(int rank, int shot) const {
    return ranks[size_t(rank)].shots[size_t(shot)];
  }
  // The result of a step on a rank; null when it is not there.
  const ResultTensor* result(int rank, int shot, int step, int operand, bool gradient) const;
  DType dtype_of(const Operand&) const;  // storage type
  bool forward_only() const { return !declared.backward; }
};

struct Check {
  std::string name;
  char letter = '?';
  std::string asks;  // one line for `list`
  std::function<bool(const Contract&, const Case&, const Declared&)> due;
  // Why it is not due on this line, though it is on others of the contract; "" where it is due, or
  // never is. Null: it depends on no line.
  std::function<std::string(const Contract&, const Case&, const Declared&)> left_out = nullptr;
  // May be null: the base shot suffices.
  std::function<void(const Evidence&, std::vector<Shot>&)> plan;
  std::function<CheckResult(const Evidence&)> judge;
};
// In the order in which they are reported. Shot 0 is always "base" (F0 B0, or F0).
const std::vector<Check>& all_checks();
const Check& check_named(const std::string& name);  // throws BadInput with the nearest

// An element passes when it is finite where the truth is and |got - want| <= bound.
struct Compared {
  double worst_ratio = 0;
  bool exact = true;  // every bound was 0
  int64_t compared = 0, wrong = 0;
  std::optional<Finding> finding;  // set when wrong > 0
  bool zeros = true;               // truth and every result are zero: nothing was asked
  int64_t unbounded = 0;           // elements whose allowed error is not finite
  // The element of the worst ratio (of the first one, where all are 0), denoted index.
  int64_t worst_at = -1;
  int worst_rank = -1;
  double worst_bound = 0;
};
// Compares local results of all ranks with the truth of one tensor: type P is summed over its axis
// first, every copy of I and R is compared, in global coordinates. `bound` gives the allowed error
// of a denoted element.
Compared compare(const Evidence&, int shot, int step, int operand, bool gradient, const Whole& want,
                 const std::function<double(int64_t)>& bound);

// oracle/bounds.cpp: the one place where an allowed error is computed.
// False-alarm budget of a whole run: the only number that a person picks.
inline constexpr double false_alarm_budget = 1e-6;
// What a subject declares of its sums on a line without acc=, as if the line said so; nothing: what
// the line means by itself.
std::optional<DType> type_of_sums(const Case&, const Declared&);
// The same where the line leaves it open, to be set in its place: a family counts a bound in units
// of the type of accumulation, those of the wire included, and its calls move states in it.
std::optional<DType> type_left_open(const Case&, const Declared&);
Precision precision_of(const Case&, const Declared&);
// Types that a result passes by the line: of storage, accumulation, wire and gradient, a rank's own
// too.
std::vector<DType> types_passed(const Case&);
// Those of one result.
std::vector<DType> types_of_result(const Evidence&, const Operand&, bool gradient);
// Of one result: a gradient may be kept in a type of its own.
Precision precision_of_result(const Evidence&, const Operand&, bool gradient);
// Integers that a contract promises exact intermediates for, as far as the subject's factors hold
// them.
std::optional<int64_t> exact_range(const Contract&, const Case&, const Declared&);
// Nothing is allowed anywhere: the bound of exact data, and of data that are moved.
struct NoError {
  double operator()(int64_t) const { return 0; }
};
// Allowed error of each element of a result, NoError on exact data. Refers to want and gauge: they
// outlive it. Without a feed the base shot's is meant. An empty gauge means data that are moved and
// not computed: bound 0.
std::function<double(int64_t)> bound_of(const Evidence&, const Operand&, bool gradient,
                                        const Whole& want, const Gauge&);
std::function<double(int64_t)> bound_of(const Evidence&, const Feed&, const Operand&, bool gradient,
                                        const Whole& want, const Gauge&);
// Scale of an element's error: root of its variance proxy, tier A without its factor. Null where A
// is not valid.
std::function<double(int64_t)> scale_of(const Evidence&, const Feed&, const Operand&, bool gradient,
                                        const Whole& want, const Gauge&);
// Largest rms of that many errors, each in its scale.
double rms_limit(int64_t elements);
// Allowed error of a parameter's gradient that is added into across backwards.
struct Addend {
  Feed feed;
  const Whole* want;
  const Gauge* gauge;
};
std::function<double(int64_t)> bound_of_sum(const Evidence&, const Operand&, std::vector<Addend>);
Fill fill_of(const Case&);
// Integers on a linear contract, or within a range in which the contract promises exact
// intermediates.
bool exact_data(const Evidence&, const Feed&);

}  // namespace shardproof
