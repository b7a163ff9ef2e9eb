// N: does the same call on the same data give the same bits, also when ranks arrive late?
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "oracle/checks/judging.hpp"

namespace shardproof {
namespace {

const char* const shot_names[] = {"repeat", "repeat:delays"};

void plan(const Evidence& e, std::vector<Shot>& shots) {
  Shot again = shots.at(0);
  again.name = shot_names[0];
  shots.push_back(again);
  if (e.mesh.world() == 1) return;
  again.name = shot_names[1];
  again.delays = true;
  shots.push_back(std::move(again));
}

std::vector<std::string> words_of(const Evidence& e) {
  return e.forward_only() ? std::vector<std::string>{"F0"} : std::vector<std::string>{"F0", "B0"};
}

// Bit for bit, or, for a subject that declares itself not deterministic, within the bound.
void judge_shot(const Evidence& e, int shot, judging::Agreement& total,
                judging::Judgement& bounded) {
  for (const std::string& word : words_of(e)) {
    const int step = judging::step_of(e.shots[0], word);
    judging::Agreement a = judging::same_results(e, {shot, step, 0, step});
    total.compared += a.compared;
    total.spread = std::max(total.spread, a.spread);
    if (e.declared.deterministic) {
      for (Finding& f : a.findings) {
        if (e.shots[size_t(shot)].delays)
          f.message = f.message.empty() ? "with ranks that arrive late"
                                        : f.message + ", with ranks that arrive late";
        f.means =
            e.shots[size_t(shot)].delays
                ? "the result depends on the order of arrival: a race, or a sum in that order"
                : "state from an earlier call is left over, a race, or a sum in varying order";
        total.findings.push_back(std::move(f));
      }
      continue;
    }
    judging::Judgement j = judging::against_truth(e, shot, word, word[0] == 'B');
    bounded.exact = bounded.exact && j.exact;
    bounded.ratio = std::max(bounded.ratio, j.ratio);
    std::move(j.findings.begin(), j.findings.end(), std::back_inserter(total.findings));
  }
}

CheckResult judge(const Evidence& e) {
  if (auto f = judging::incomplete(e, "base")) return judging::conclude("repeat", 0, {*f});
  judging::Agreement total;
  judging::Judgement bounded;
  for (const char* name : shot_names) {
    if (e.mesh.world() == 1 && name == shot_names[1]) continue;
    if (auto f = judging::incomplete(e, name)) return judging::conclude("repeat", 0, {*f});
    judge_shot(e, e.find_shot(name), total, bounded);
  }
  std::string note;
  if (!e.declared.deterministic)
    note = fmt::format("declared not deterministic: spread {} between runs",
                       judging::number(total.spread));
  CheckResult result = judging::conclude("repeat", total.compared, std::move(total.findings), note);
  result.exact = e.declared.deterministic || bounded.exact;
  if (!e.declared.deterministic) result.ratio = std::max(result.ratio, bounded.ratio);
  return result;
}

}  // namespace

Check repeat_check() {
  return {
      .name = "repeat",
      .letter = 'N',
      .asks = "does the same call on the same data give the same bits, also when ranks arrive late",
      .due = [](const Contract&, const Case&, const Declared&) { return true; },
      .plan = plan,
      .judge = judge};
}

}  // namespace shardproof
