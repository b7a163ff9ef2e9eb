// C: is every (query, key) pair visited once, by the rank that is due to?
//
// A query that visits a block twice and another never has as many visits as it should; one whose
// keys are all there may have visited one of them twice. So both are counted: distinct keys by the
// codes of mask_probe.hpp, visits by exp(lse), and their sum over the queries of a rank is held
// against the closed form of the layout (zigzag: l(l+1) + (2p-1) l^2 on every rank, l = T/2p).
#include <fmt/format.h>

#include <limits>
#include <map>

#include "oracle/checks/judging.hpp"
#include "oracle/checks/mask_probe.hpp"

namespace shardproof {
namespace {

struct Count {
  int64_t visits = 0, distinct = 0, head = -1;
};

// Of the first head that a rank holds.
std::map<int, Count> by_rank(const judging::Seen& seen) {
  std::map<int, Count> counts;
  for (const judging::SeenRow& row : seen.rows) {
    Count& c = counts[row.rank];
    if (c.head < 0) c.head = row.head;
    if (row.head != c.head) continue;
    c.visits += row.visits;
    for (uint8_t k : row.keys) c.distinct += k;
  }
  return counts;
}

CheckResult judge(const Evidence& e) {
  const judging::Seen seen = judging::seen_rows(e);
  if (seen.incomplete) return judging::conclude("coverage", 0, {*seen.incomplete});
  std::vector<Finding> findings;
  int64_t compared = 0, total = 0;
  std::map<int, Count> counts = by_rank(seen);
  for (int r = 0; r < e.mesh.world(); ++r) {
    const int64_t due = e.contract->pairs(*e.line, r);
    const Count& met = counts[r];
    compared += due;
    total += due;
    if (met.visits == due && met.distinct == due) continue;
    if (!findings.empty()) {
      findings[0].ranks.push_back(r);
      continue;
    }
    Finding f;
    f.rank = r;
    f.ranks = {r};
    f.ratio = std::numeric_limits<double>::infinity();
    f.message = fmt::format("expected {} (query, key) pairs, met {} visits of {} distinct pairs",
                            due, met.visits, met.distinct);
    f.means = met.visits > met.distinct ? "a block of keys is visited twice"
              : met.distinct < due      ? "a block of keys is never visited, or masked away"
                                        : "more keys are visited than the mask shows";
    findings.push_back(std::move(f));
  }
  CheckResult result = judging::conclude("coverage", compared, std::move(findings));
  result.exact = true;
  if (result.verdict == Verdict::passed)
    result.note = fmt::format("{} pairs, {} on rank 0", total, counts[0].distinct);
  return result;
}

}  // namespace

Check coverage_check() {
  return {.name = "coverage",
          .letter = 'C',
          .asks = "is every (query, key) pair visited once, by the rank that is due to",
          .due = [](const Contract& c, const Case&,
                    const Declared&) { return c.pairs != nullptr && c.visible != nullptr; },
          .plan = judging::plan_mask_probe,
          .judge = judge};
}

}  // namespace shardproof
