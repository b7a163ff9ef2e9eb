// Broken twins and broken collectives: what is expected of one, and whether it was caught.
#pragma once
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "oracle/comm/faults.hpp"
#include "oracle/run.hpp"
#include "oracle/verdict.hpp"

namespace shardproof::gating {

// Everything that left a rank in the base shot, byte for byte: outputs, or gradients.
bool same_results(const Judged&, const Judged&, bool gradient);
// The gradients of operands in which results are linear, which the adjoint pairs.
bool same_paired_gradients(const Judged&, const Judged&);
bool same_traces(const Judged&, const Judged&);
// What a call overwrites is the subject's business where it is a buffer of its own: whether an
// argument was written to, as the ranks compared them byte for byte.
bool argument_written(const Judged&);
bool any_active(const Judged&);  // a fault took effect

const CheckResult* result_of(const CaseResult&, const std::string& check);  // null: not asked
std::string firing(const CaseResult&);  // checks that did not pass, by comma
bool lost_ranks(const CaseResult&);
// Something in it could not be judged, and nothing in it is to blame.
bool left_open(const CaseResult&);

struct Expectation {
  std::vector<std::string> checks, silent;
  bool alone = false;
};
// Outcome, reason and numbers of a control, from its run and that of its healthy twin.
void conclude(ControlResult&, const Judged& broken, const Judged& healthy, const Expectation&);

// ---- Operators

// A call that an operator breaks.
struct Site {
  Phase phase;
  std::string axis;
  int number;
  LedgerEntry call;  // of the first rank that makes it
  int p;
  auto key() const { return std::tuple(int(phase), axis, number); }
};
std::vector<Site> sites_of(const Judged& healthy);
// The call at a site as it is due; null where none is.
std::optional<Traffic> due_at(const Site&, const Case&, const Judged& healthy);
bool applies(const FaultOperator&, const Site&, bool rounding, int world);
// It leaves the calls alone and changes a result on all ranks: what cancels out of every result
// when it is equal on the members of a group may stay so.
bool stays_equal(const FaultOperator&);
// The named check of an operator at a site, from where the result differs; `paired_differ`: in a
// gradient that the adjoint pairs, where it is due. Its basis vectors survive bf16 on the wire, and
// a single flipped bit may hide from its dots: there it is not asked.
Expectation expectation(const FaultOperator&, const Site&, bool one_rank, bool outputs_differ,
                        bool gradients_differ, bool paired_differ);

// At which sites an operator is tried: at every one, or only until it was caught once among those
// that are alike: of one kind of operator, or of one operator, phase and call. Where kinds are
// alike, an argument that nobody reads behind its call speaks for those of the same line, phase and
// axis.
class Sites {
 public:
  enum Alike : uint8_t { every, kind, call };
  explicit Sites(Alike alike) : alike_(alike) {}

  bool due(const FaultOperator& op, const Site& site, bool one_rank) const {
    if (alike_ == kind && op.kind == "in_place" && unread_.contains({site.phase, site.axis}))
      return false;
    return alike_ == every || !caught_.contains(key(op, site, one_rank));
  }
  void caught(const FaultOperator& op, const Site& site, bool one_rank) {
    caught_.insert(key(op, site, one_rank));
  }
  void begin_line() { unread_.clear(); }
  void harmless(const FaultOperator& op, const Site& site) {
    if (op.kind == "in_place") unread_.emplace(site.phase, site.axis);
  }

 private:
  std::string key(const FaultOperator&, const Site&, bool one_rank) const;
  Alike alike_;
  std::set<std::string> caught_;
  std::set<std::pair<Phase, std::string>> unread_;
};

}  // namespace shardproof::gating
