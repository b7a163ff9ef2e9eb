// `shardproof drift`: trains a contract on ranks and says at which step, in which phase, with which
// parameter a run first goes wrong, long before its loss does.
//
// At every step the reference is evaluated at the ranks' own parameters, on their own data. A
// correct run is then within its bounds at every step, however far rounding has taken it from any
// other run; and the first step at which something is out of bounds is the step at which it went
// wrong, not one at which an earlier fault has grown large enough to be seen.
//
//   phase              what is compared
//   at initialisation  hashes of parameters
//   forward          what the kernel draws (dropout masks): equal on copies, different on shards;
//                    outputs with the reference
//   after backward   gradients with the reference, within bounds; hashes of what has to be equal
//   before the step  gradients once the step's own sums (dp, cp) are made: bit for bit
//   after the step   parameters with the optimizer's update of the ranks' own gradients: bit for
//                    bit; hashes of replicas
//
// control=NAME@STEP breaks the run from that step on (steps count from 0): a named control of the
// contract, or one of drift_faults(), which break the training step itself.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "oracle/comm/world.hpp"
#include "oracle/gate.hpp"
#include "oracle/registry.hpp"

namespace shardproof {

struct DriftOptions {
  int64_t steps = 100;
  std::string optimizer = "sgd";  // sgd | adam
  double rate = 0;                // 0: 0.1 for sgd, 0.003 for adam
  std::string log;                // digest log to write, "" none
};

// Faults of the training step, by name.
const std::vector<std::pair<std::string, std::string>>& drift_faults();

// The words of a line whose control may carry a step.
struct DriftLine {
  Case line;            // without control
  std::string control;  // "" none
  int64_t from = 0;
  std::string text() const;  // as it is replayed
};
DriftLine parse_drift(std::vector<std::string> words, const Registry&);

// What a check saw first: of the phase at which the run went wrong, or of a later one.
struct Sighting {
  std::string check;  // "hash of replicas", "gradient against the reference" ...
  int64_t step = 0;
  std::string phase;
  Finding finding;  // tensor is the bare name of the parameter or output
  std::string of;   // "gradient of ", "first moment of ", "" for a value
};

struct DriftReport {
  std::string line;
  int64_t steps = 0;           // that were run
  int64_t asked = 0;           // that were to be run
  bool interrupted = false;    // before these; of what was under way nothing is said
  std::string log_fault;       // why the digest log is not whole; "" it is
  std::vector<Sighting> seen;  // in the order of step and phase; the first is the verdict
  std::string ended;           // why the run ended early: "rank 2 threw ..."
  int64_t ended_at = -1;
  int64_t gradients = 0, hashes = 0;  // compared
  int64_t draws = 0;                  // elements that were drawn, compared
  std::string not_judged;             // what of the draws cannot be, and why
  std::string without_bound;          // a tensor of which any value would do, and why; "" none
  std::string diverged;               // where the truth itself grew beyond numbers; "" nowhere
  double worst_ratio = 0;
  // From the first wrong step on, against a run without the fault that starts there.
  std::vector<std::pair<int64_t, double>> distance;  // rms of parameters, relative
  double replicas_apart = 0;  // largest difference between copies, at the end
  double first_loss = 0, last_loss = 0;
  std::optional<int64_t> loss_told;     // first step at which the loss leaves what is usual
  double loss_off = 0, loss_usual = 0;  // relative, at the last step
  double seconds = 0;

  bool drifted() const { return !seen.empty() || !ended.empty(); }
  bool open() const { return !drifted() && !why_open().empty(); }  // no judgement
  const std::string& why_open() const { return diverged.empty() ? without_bound : diverged; }
};
// `main`: what a rank runs, in place of the registry's; for tests.
DriftReport run_drift(const DriftLine&, const DriftOptions&, const Options&, const Registry&,
                      RankMain main = nullptr);

std::string drift_text(const DriftReport&, const DriftLine&, const DriftOptions&,
                       const std::string& program);
std::string drift_json(const DriftReport&, const DriftLine&, const DriftOptions&,
                       const std::string& program);
// index.html of a run: the block, and the distance by step.
std::string drift_html(const DriftReport&, const DriftLine&, const DriftOptions&,
                       const std::string& program, const std::string& command);

}  // namespace shardproof
