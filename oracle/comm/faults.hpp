// Operators that break a collective of any subject without touching its source.
//
//   fault=OPERATOR@PHASE.AXIS.NUMBER[@rankR]     fault=skip@backward.tp.1@rank2
//
// Call faults change which call is made (above the ledger); payload faults leave the calls alone
// and edit buffers (below the ledger). The table of operators is at the end of fault_operators.cpp;
// what each of them is equivalent to, and where, is in README.md.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "oracle/comm/ledger.hpp"

namespace shardproof {

struct FaultSpec {
  std::string op;  // "skip", "skip_payload", "scale_p" ...
  Phase phase = Phase::forward;
  std::string axis = "tp";  // label of the group
  int number = 1;           // 0: every site of the phase and axis ("*" in the text)
  int rank = -1;            // world rank; -1: all
};
FaultSpec parse_fault(const std::string& text);  // throws BadInput naming the key `fault`
std::string print(const FaultSpec&);

struct FaultOperator {
  std::string name, kind;  // kind: the row of the table ("skip", "twice", "lost" ...)
  bool call = false;       // a call fault (else payload)
  bool one_rank = false;   // acts on one rank by default (lost, bit)
  std::string does;        // one line for `list`
  std::vector<Op> ops;     // the operations that it can be applied to
  bool any_reduce = true;  // else `reduces` lists where it is meaningful
  std::vector<Reduce> reduces;
  int smallest_p = 2;
  bool needs_rounding = false;  // bf16 wire, own order: needs fill=normal
};
const std::vector<FaultOperator>& fault_operators();
const FaultOperator& fault_operator(const std::string& name);  // throws BadInput with the nearest

// Decorator that applies `spec` at its site. `groups` gives the groups of the mesh through this
// rank for wrong-group operators. With priming(true) results are recorded for `stale` and nothing
// is changed. active() says whether a call or a payload byte was changed so far.
class FaultDoor : public Door {
 public:
  FaultDoor(FaultSpec spec, RankState& state, Door& next);
  ~FaultDoor() override;
  Ticket start(const Call&, const View& in, const View& out, Stream) override;
  void wait(Ticket, Stream) override;
  void priming(bool);
  bool active() const;
  void new_shot();  // call counters restart

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Decorator that sleeps a random time (0 to 200 us, Philox of seed, rank and call number) before
// start and before wait.
class DelayDoor : public Door {
 public:
  DelayDoor(uint64_t seed, RankState& state, Door& next)
      : seed_(seed), state_(state), next_(next) {}
  Ticket start(const Call&, const View& in, const View& out, Stream) override;
  void wait(Ticket, Stream) override;
  void enable(bool on) { on_ = on; }

 private:
  void pause();
  uint64_t seed_, count_ = 0;
  RankState& state_;
  Door& next_;
  bool on_ = false;
};

}  // namespace shardproof
