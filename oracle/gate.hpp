// The main job: which cases, controls and operators are due, and running them.
#pragma once
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "oracle/registry.hpp"
#include "oracle/time_left.hpp"
#include "oracle/verdict.hpp"

namespace shardproof {

// Options of `gate` and `run`, as the command line gives them. Empty lists mean no restriction.
struct Options {
  std::vector<std::string> patterns;  // contract, family or line prefix
  std::string tier = "ci";            // smoke | ci | nightly
  std::vector<int> ranks;
  std::vector<std::string> transports, devices, dtypes, subjects, checks, require;
  std::string report, failed, dump;  // folders
  bool fail_fast = false, dry_run = false, canonical = false, in_process = false, controls = true,
       self = true;          // the self suite runs beside the cases; a single `run` does without
  bool twins_alone = false;  // what leaves broken twins and no case of a subject is not empty
  std::optional<uint64_t> seed;
  int seeds = 1;
  // Keys of what a foreign program computes in.
  std::vector<std::pair<std::string, std::string>> with;
  // Keys, and values of them (KEY=VALUE), that it does not know.
  std::vector<std::string> without;
  bool isolated = true;  // false: an outside launcher made the one world there is
  int jobs = 1;
  double deadline_scale = 1;
  std::string mpiexec;  // launcher and its options
  std::string program;  // argv[0], for replay lines and for starting workers
  std::string command;  // the whole command line, for the report
};

// One thing that is due. The manifest: what ran is compared with it at the end.
struct Due {
  enum What : uint8_t { healthy, named_control, fault_operator } what = healthy;
  Case line;
  std::vector<std::string> checks;  // names, in report order
  std::string control;              // named_control
  std::string lane;                 // "processes.np4"
  bool illegal = false;             // a line that must be refused: check `rejection`
  bool stored = false;              // of fixtures/regressions.txt alone
};

// What the gate says while it runs. All calls come from the parent's one thread.
struct Progress {  // by itself, silent
  virtual ~Progress() = default;
  // Before begin: what is to take time, and what one of it weighs.
  virtual void expect(const Pace&, int64_t /*count*/, double /*weight*/) {}
  virtual void begin(int64_t /*cases*/, int64_t /*controls*/) {}
  virtual void done(const CaseResult&) {}  // as soon as it is judged
  virtual void done(const ControlResult&) {}
  virtual void tried(const Pace&, double /*seconds*/) {}  // a witness
  // What a process, the parent (0) or one of its jobs, runs from now on; "": nothing more.
  virtual void begun(int64_t /*process*/, const std::string& /*line*/) {}
  virtual void tick() {}  // often; draws the progress line when it is time to
};

// Throws BadInput: the option --seed and a seed= that is another one.
[[noreturn]] void refuse_two_seeds(uint64_t of_option, std::string_view of_line);
// Whether the patterns of the options leave a line.
bool selects(const Options&, const Registry&, const Case&);
// Throws BadInput: unknown names, a selection that is seen to be empty.
// `not_due` gets a line for each case, or group of checks of a case, that its subject declares not
// to do; `left_out` the lines of such cases, and of controls that show a bug on such lines alone.
std::vector<Due> plan_gate(const Options&, const Registry&,
                           std::vector<std::string>* not_due = nullptr,
                           std::vector<std::string>* left_out = nullptr);
struct Planned {
  std::vector<Due> due;
  std::vector<std::string> not_due, left_out;
};
Planned planned_gate(const Options&, const Registry&);
Report run_gate(Planned, const Options&, const Registry&, Progress&);
Report run_gate(const Options&, const Registry&, Progress&);
Report run_line(const Case&, const Options&, const Registry&, Progress&);

// What the build can do: transports and devices with the reason where one is missing.
struct Ability {
  std::string name;
  bool available;
  std::string reason;
};
std::vector<Ability> abilities();

}  // namespace shardproof
