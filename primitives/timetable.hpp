// When each stage of a pipeline works on which microbatch, where forwards and backwards take turns.
//
//   F  a chunk's forward; B  the gradient of its input and, where a schedule does not put it off,
//   of its parameters; W  the gradient of its parameters
//
// A schedule gives each stage an order of its F, B and W. In every tick a stage does the next of
// them once what it needs was there before the tick: F(m,k) needs F(m,k-1), B(m,k) needs B(m,k+1).
// With p stages, v chunks a stage, M microbatches, s the own stage, and F and B by rounds of g
// microbatches, chunk after chunk (backward the last chunk first):
//
//   gpipe        v = 1; all F, then all B, microbatches in their order
//   1f1b         v = 1; p-1-s times F, then F and B in turns, then what is left of B
//   interleaved  v > 1, chunk k on stage k mod p; the same behind 2(p-1-s) + (v-1) g times F;
//                g = M / max(1, floor(M/p)), which has to be whole
//   zero_bubble  the same behind (p-1-s) + (v-1) g times F; behind each B from the s-th on the
//                oldest W, what is left of them in the end (ZB-H1, and ZB1P with v > 1)
//   zbv          v = 2, chunk k on stage k, from p on back on stage 2p-1-k: 2(p-s)-1 times F of the
//                first chunk, s times F of both, p-s times F B W of the last; then F B W of each in
//                turns; s times B of both, p-s times B W of the first, then what is left of W
//                (ZB-V). What is due to a microbatch that there is none of is left out
//
// W takes microbatches and chunks in the order of B.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "oracle/subject.hpp"

namespace shardproof::primitives {

struct Unit {
  int64_t microbatch = 0, chunk = 0;
};

enum class Work : uint8_t { forward, backward, weights };
struct Action {
  Work work = Work::forward;
  Unit unit;
};

struct Plan {
  std::string schedule = "1f1b";
  int64_t stages = 1, rounds = 1;  // chunks a stage: v
  int64_t microbatches = 1;

  int64_t chunks() const { return stages * rounds; }
  bool splits() const { return schedule == "zero_bubble" || schedule == "zbv"; }
  bool turns() const { return schedule == "zbv"; }  // back at the last stage
  int64_t stage_of(int64_t chunk) const;
  int64_t together() const;  // g
};
// Why there is no such plan, from the line.
std::optional<Rejected> refused_plan(const Case&, int64_t microbatches);

std::vector<Action> order_of(const Plan&, int64_t stage);

class Timetable {
 public:
  explicit Timetable(const Plan&);
  Timetable(const Plan&, const std::vector<std::vector<Action>>& orders);  // by stage

  const Plan& plan() const { return plan_; }
  int64_t ticks() const { return int64_t(by_tick_.size()); }
  std::optional<Action> at(int64_t tick, int64_t stage) const;
  // Whose operand the result is; none of the last chunk's forward, the first one's backward and W.
  std::optional<Action> next(const Action&) const;
  // To the stage of that: +1 or -1 over pp; 0 where it is the same, or there is none.
  int64_t hop(const Action&) const;
  bool travels(int64_t tick, int64_t hop) const;  // from any stage

 private:
  bool ready(const Action&, const std::vector<int64_t>& done) const;
  size_t number(const Action&) const;
  Plan plan_;
  std::vector<std::vector<std::optional<Action>>> by_tick_;
};

}  // namespace shardproof::primitives
