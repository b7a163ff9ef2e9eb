// How a fault is planted: a subject that misbehaves in one way, the line that it is judged on, and
// the verdict that it deserves, with what has to be named. It runs through the Runner like anyone's
// kernel, on ranks of their own processes.
//
// After each of them the same Runner judges the healthy subject, which must pass, and no process
// may be left behind.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "oracle/report.hpp"
#include "oracle/run.hpp"
#include "oracle/self.hpp"
#include "suites/self/plain.hpp"

namespace shardproof::planted {

// What the judge has to say. `check` is one that was asked; the others are not looked at.
struct Deserved {
  std::string check;
  Verdict verdict = Verdict::failed;
  int rank = -1;                        // among the ranks of the finding; -1: any
  std::string where = {};               // element in global coordinates
  std::vector<std::string> words = {};  // somewhere in what is printed about the check or the ranks
};

inline Declared forward_only() {
  Declared d;
  d.backward = false;
  return d;
}

struct Plant {
  std::string name;  // of the subject, too
  std::string line;  // contract and keys, without the subject
  Make make;         // null: the healthy subject of the contract
  std::vector<Deserved> deserved;
  Declared declared = forward_only();
  bool all_checks = false;  // every check that is due is asked, and passes where not deserved
  double deadline_scale = 1;
  std::string afterwards = {};  // line of the healthy subject after it; empty: the same line
  // More that must hold of a run; "" when it does.
  std::function<std::string(const Judged&)> also = nullptr;
};

// By theme, each list in its own file.
std::vector<Plant> values();  // wrong numbers, memory
std::vector<Plant> calls();   // collectives out of step
std::vector<Plant> ranks();   // ranks that die, hang, throw
std::vector<Plant> odd_but_right();
std::vector<Plant> vacuous();
std::vector<Plant> gradients();  // wrong alike in reference and subject
std::vector<Plant> draws();      // random streams that do not follow the data
// Those that need more than a subject. Their ranks are healthy, or none.
Planted without_subject(std::string name, std::string (*plant)());
std::vector<Planted> of_the_parent();
std::vector<Planted> of_the_draws();
// A gate on processes, without a word.
Report gate_of(const Registry&);

// Contracts that no family has (names start with "planted_"), with a healthy subject each.
void add_private_contracts(Registry&);
void add_norm_contracts(Registry&);
void add_masked_rows(Registry&);

// All subjects above, the contracts that they are judged by and their plain subjects. Built once,
// before any fork.
const Registry& registry();

// "" or what went wrong. `deadline_scale` is that of the gate around it.
std::string run(const Plant&, double deadline_scale = 1);
std::string differs(const Judged&, const Deserved&);
// A run with its own ranks. `main` is what they run in place of rank_main.
Judged judge(const Case& line, const std::vector<std::string>& checks, RankMain main = nullptr,
             double deadline_scale = 1);
Case line_of(const std::string& line, const std::string& subject);
// Children of this process that were not there before.
class Children {
 public:
  Children();
  std::string left() const;  // "" or their pids

 private:
  std::vector<int> before_;
};

// --- kernels

// Forward only.
Make forward(Map);
// A kernel whose ranks do the same but for one.
Map on_rank(int rank, Map odd, Map others);
// Right, and then changed on one rank.
Map spoilt(Map right, int rank, std::function<void(const View& out)> how);
View like(Rank&, const View&);  // workspace

}  // namespace shardproof::planted
