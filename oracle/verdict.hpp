// What was seen and what follows from it. Plain data: the checks fill it in, the report prints it.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace shardproof {

enum class Verdict : uint8_t { untested, passed, failed, vacuous, skipped, hung, crashed };
const char* name(Verdict);

struct Finding {
  std::string check;           // "gradient"
  std::string tensor;          // "b", "gradient of b"
  std::string message;         // one line when there are no numbers: "3 elements never written"
  std::string means;           // what it means for the author, "" when nothing certain can be said
  std::string where;           // "b[0]" in global coordinates
  std::vector<int64_t> index;  // the same as numbers (stacked axes first)
  int rank = -1;               // of the worst element
  std::vector<int> ranks;      // on which it is wrong, in any element
  std::vector<int> holders;    // of these, on which the element of `where` is; empty: as `ranks`
  bool overdue = false;        // the time of the whole case was up, and nobody's call is blamed
  bool numeric = false;        // got, want, error, bound, ratio hold
  double got = 0, want = 0, error = 0, bound = 0;
  double ratio = 0;  // error / bound; infinity for bound 0 or NaN
  int64_t wrong = 0, compared = 0;
  std::string pattern;  // "all x 4.000 = tp", "block of rank 3", "every 2nd of dim 1"
};

struct CheckResult {
  std::string check;
  Verdict verdict = Verdict::untested;
  double ratio = 0;    // worst healthy or unhealthy ratio; 0 with bound 0: exact
  bool exact = false;  // the bound was 0
  int64_t compared = 0;
  std::string note;               // reason of a skip, spread of a repeat, adjoint ratio
  std::vector<Finding> findings;  // worst first; empty when passed
  // The worst element where there is no finding (a passed check); rank -1: not known.
  double bound = 0;
  int rank = -1;
  std::vector<int64_t> index;
  std::string where;
};

struct CaseResult {
  std::string line, canonical, replay;  // replay without the program's path
  std::string family, contract, lane;   // lane: "processes.np4"
  std::vector<CheckResult> checks;
  std::vector<std::string> state;  // hung or crashed: a line a rank, ready to print; else notes
  double seconds = 0;
  bool steady_known = false, steady = false;
  // Of one forward and backward, summed over the ranks; -1: not known (a rank died).
  int64_t calls = -1, bytes = -1;
};

// What one expected check saw of a control: its ratio and that ratio over the healthy twin's.
struct Catch {
  std::string check;
  double ratio = 0, margin = 0;
  bool exact = false;  // no bound above 0 took part
};

struct ControlResult {
  std::string name, family, contract, lane;
  std::string kind;  // operators: the row of the table; named controls: ""
  std::string imitates, expected_check, caught_by, witness, replay;
  // unjudged: its healthy twin, or what it may share code with, fails by itself, which says nothing
  // about the judge.
  // unproven: this machine is too small for it to show its bug.
  enum Outcome : uint8_t {
    caught,
    escaped,
    wrong_check,
    equivalent,
    unjudged,
    unproven
  } outcome = escaped;
  std::string reason;  // equivalent: inactive, masked, ...; wrong_check: what fired; unproven: why
  bool did_nothing = false;      // escaped: with the results and calls of its healthy twin
  double ratio = 0, margin = 0;  // margin: ratio / worst healthy ratio of the same check
  bool exact = false;            // bound 0: margin is exact
  double bound = 0;
  int rank = -1;
  std::string where;
  std::vector<int64_t> index;
  double seconds = 0;
  std::string canonical;       // of the witness; "": the reports fall back to `witness`
  std::vector<Catch> catches;  // of the expected checks, where caught
};
const char* name(ControlResult::Outcome);

struct Lane {
  std::string name;  // "processes.np4"
  bool proven = false;
  std::string reason;  // why not
};

struct SelfResult {
  int planted = 0, named = 0;
  std::vector<std::string> failures;
  double seconds = 0;
};

struct Report {
  bool complete = false;
  std::string command;
  std::string program;  // how it was started, for replay lines
  std::vector<CaseResult> cases;
  std::vector<ControlResult> controls;
  std::vector<Lane> lanes;
  std::vector<std::string> required;  // --require
  SelfResult self;
  std::map<std::string, std::string> versions;                 // "mpi": "MPICH 4.0.2"
  std::vector<std::pair<std::string, std::string>> placement;  // rank -> host[:device]
  std::string dumped, dump_error;     // what --dump wrote, why it could not; "" nothing
  std::vector<std::string> not_due;   // what subjects declare that they do not do
  std::vector<std::string> left_out;  // lines of cases and controls that are not asked for it
  std::string missing;                // what an incomplete run lacks; "": it did not reach its end
  double wall_seconds = 0;
};

// A caught control whose ratio is not this many times the worst healthy one proves nothing.
inline constexpr double least_margin = 10;
bool weak(const ControlResult&);  // caught, not exact, margin under least_margin (or NaN)

struct Counts {
  int64_t cases = 0, checks = 0;  // case lines; checks, one for each check due on each case
  int64_t passed = 0, failed = 0, vacuous = 0, skipped = 0, untested = 0, hung = 0, crashed = 0;
  int64_t controls = 0, caught = 0, escaped = 0, wrong_check = 0, equivalent = 0, unjudged = 0,
          unproven = 0, weak = 0;
  int64_t blamed() const { return failed + hung + crashed; }
};
void count(const CaseResult&, Counts&);
void count(const ControlResult&, Counts&);
Counts counts(const Report&);

// Why nobody can be blamed, a phrase each; empty: the judge is fit and everything due was judged.
std::vector<std::string> no_judgement(const Report&);
// Said of a run that is not complete, beside what failed until then.
std::string unfinished(const Report&);
// 3 where no_judgement has something to say, else 1 where a subject failed, hung or crashed, else
// 0.
int exit_code(const Report&);

}  // namespace shardproof
