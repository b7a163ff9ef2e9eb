// One case through the whole flow: line -> global tensors -> reference and ranks -> checks ->
// verdict.
#pragma once
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "oracle/check.hpp"
#include "oracle/comm/world.hpp"
#include "oracle/gate.hpp"

namespace shardproof {

// Worlds that live across cases, one for each transport and rank count; a dead one is replaced at
// the next case. Idle ranks sleep.
class Worlds {
 public:
  // What ranks run; empty: rank_main(registry).
  Worlds(const Options&, const Registry&, RankMain = nullptr);
  ~Worlds();
  // `line`: what it is to run next. Throws Infrastructure, once, where a rank ended by itself since
  // the line before.
  World& get(const std::string& transport, int ranks, const std::string& line = "");
  void start(const std::string& transport, int ranks);  // unless there is one
  // The same as `get` throws, of all worlds: behind the last line.
  void require_whole();
  void drop(const std::string& transport);
  const Options& options() const { return options_; }
  std::function<void()> meanwhile = [] {};  // called again and again while ranks are waited for

 private:
  const Options& options_;
  RankMain main_;
  struct Kept {
    std::unique_ptr<World> world;
    std::string last;  // line
  };
  static void require_whole(Kept&);
  std::map<std::pair<std::string, int>, Kept> worlds_;  // by transport and ranks
};

// Reference results of the lines judged last: a control and its healthy twin share them.
class Truths {
 public:
  explicit Truths(const Registry& registry) : registry_(registry) {}
  const Truth& get(const Case&, const Evidence&, const Feed&);
  // What checks keep of a line, for a precision that its subject declares.
  std::shared_ptr<Kept> of_checks(const Case&, const Declared&);
  void trim();  // between cases: a whole gate would otherwise keep every tensor that it drew

 private:
  const Registry& registry_;
  std::map<std::string, std::unique_ptr<Truth>> kept_;
  std::map<std::string, std::shared_ptr<Kept>> of_checks_;
  int64_t elements_ = 0;
};

// What one case gave: the evidence (truth included while the runner lives) and the verdicts.
struct Judged {
  CaseResult result;
  Evidence evidence;
  bool completed = false;  // every rank handed in a whole record
};

class Runner {
 public:
  Runner(const Options&, const Registry&, RankMain = nullptr);
  // Checks by name, in report order. Throws Infrastructure.
  Judged run(const Case&, const std::vector<std::string>& checks, const std::string& lane);
  // What one process computes from the first feed of a case.
  const Truth& truth(const Evidence& e) { return truths_.get(*e.line, e, e.shots[0].feeds[0]); }
  const Registry& registry() const { return registry_; }
  Worlds& worlds() { return worlds_; }
  uint32_t cases_run() const { return number_; }

 private:
  void judge(Judged&, const std::vector<std::string>& checks);
  // What has hung this often is waited for less long from then on: a subject that hangs on every
  // line would cost a gate its deadline on each.
  static constexpr int hangs_waited_for = 2;
  static constexpr double haste = 0.1;  // of the deadline
  const Registry& registry_;
  Worlds worlds_;
  Truths truths_;
  uint32_t number_ = 0;
  std::map<std::string, int> hung_;  // cases, by what was under test
};

// A case as its checks plan it: the base shot, and those that they add. The line outlives it; there
// are no ranks and no truth in it yet. Throws BadInput where integers of the fill leave no exact
// range, or where the case is larger than a judge can hold (cost.hpp).
Evidence plan_case(const Case&, const Declared&, const std::vector<std::string>& checks,
                   const Registry&, std::shared_ptr<Kept> kept = nullptr);
// Why a line leaves no integers exact, where it is not the length of its sums.
std::optional<Contract::Inexact> inexact(const Contract&, const Case&);
// What helps where integers are not exact, in words: "fill=normal or smaller extents".
std::string shorter_sums(const Case&, const Registry&);
// Checks that are due on a healthy case, narrowed by `only` where it is not empty.
std::vector<std::string> due_checks(const Contract&, const Case&, const Declared&,
                                    const std::vector<std::string>& only);
// Declared properties of what the line puts under test (subject or control).
Declared declared_of(const Case&, const Registry&);
std::string lane_of(const Case&);
// The first case on a device loads libraries and makes a context on each rank, one after another
// where they share the device.
inline constexpr double device_deadline_seconds = 120;

// Why a transport with a device cannot be had here for as many ranks; "" where it can.
std::string reason_unavailable(const std::string& transport, const std::string& device,
                               int ranks = 1);
// What ranks of every transport run: jobs of cases, and the transport's own test.
RankMain rank_main(const Registry&);
// "rank 2     left backward after call 6; last: shift ..." a line a rank.
std::string stands(const Trace&);

}  // namespace shardproof
