// The checks in the order in which they are planned, judged and reported.
#include <algorithm>

#include "oracle/checks/judging.hpp"

namespace shardproof {

const std::vector<Check>& all_checks() {
  static const std::vector<Check> checks = {
      forward_check(), gradient_check(), adjoint_check(), gradcheck_check(),  replica_check(),
      ledger_check(),  lockstep_check(), memory_check(),  repeat_check(),     stream_check(),
      mask_check(),    coverage_check(), leak_check(),    accumulate_check(), rejection_check(),
  };
  return checks;
}

const Check& check_named(const std::string& name) {
  std::vector<std::string> names;
  for (const Check& c : all_checks()) {
    if (c.name == name) return c;
    names.push_back(c.name);
  }
  std::string known;
  for (const std::string& n : names) known += (known.empty() ? "" : ", ") + n;
  throw BadInput("check: expected one of " + known + ", met '" + name + "'" +
                 did_you_mean(name, names));
}

}  // namespace shardproof
