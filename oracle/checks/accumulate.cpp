// U: may several forwards be in flight? F0 F1 B0 B1 gives the bits of F0 B0 F1 B1.
#include <fmt/format.h>

#include <algorithm>

#include "oracle/checks/judging.hpp"

namespace shardproof {
namespace {

constexpr const char* interleaved = "accumulate:interleaved";
constexpr const char* sequential = "accumulate:sequential";

void plan(const Evidence&, std::vector<Shot>& shots) {
  Shot s;
  s.feeds = {shots.at(0).feeds.at(0), shots.at(0).feeds.at(0)};
  s.feeds[1].seed += 0x9e3779b9;
  s.name = interleaved;
  s.program = "F0 F1 B0 B1";
  shots.push_back(s);
  s.name = sequential;
  s.program = "F0 B0 F1 B1";
  shots.push_back(std::move(s));
}

// Two feeds that give the same results everywhere could not show a state that is overwritten.
bool feeds_differ(const Evidence& e, int shot) {
  const Shot& s = e.shots[size_t(shot)];
  for (const auto& [a, b] : {std::pair{"F0", "F1"}, std::pair{"B0", "B1"}})
    for (int r = 0; r < e.mesh.world(); ++r)
      for (const ResultTensor& t : e.record(r, shot).results) {
        if (t.step != judging::step_of(s, a)) continue;
        const ResultTensor* other =
            e.result(r, shot, judging::step_of(s, b), t.operand, t.gradient);
        if (other && !judging::same_bytes(t, *other)) return true;
      }
  return false;
}

CheckResult judge(const Evidence& e) {
  for (const char* shot : {interleaved, sequential})
    if (auto f = judging::incomplete(e, shot)) return judging::conclude("accumulate", 0, {*f});
  const int mixed = e.find_shot(interleaved), plain = e.find_shot(sequential);
  judging::Agreement total;
  double ratio = 0;
  for (const char* word : {"F0", "F1", "B0", "B1"}) {
    const int step = judging::step_of(e.shots[size_t(mixed)], word);
    judging::Agreement a = judging::same_results(
        e, {mixed, step, plain, judging::step_of(e.shots[size_t(plain)], word)});
    total.compared += a.compared;
    total.spread = std::max(total.spread, a.spread);
    if (!e.declared.deterministic) {
      judging::Judgement j = judging::against_truth(e, mixed, word, word[0] == 'B');
      ratio = std::max(ratio, j.ratio);
      a.findings = std::move(j.findings);
    }
    for (Finding& f : a.findings) {
      f.message += fmt::format("{}{} of F0 F1 B0 B1 against F0 B0 F1 B1",
                               f.message.empty() ? "" : ", ", word);
      f.means =
          "what one forward saved was overwritten or used up by another: keep it in the saved "
          "state, not in the kernel";
      total.findings.push_back(std::move(f));
    }
  }
  if (total.findings.empty() && !feeds_differ(e, plain))
    return judging::conclude(
        "accumulate", 0, {},
        "both feeds give the same results, so state that is overwritten would not show");
  std::string note;
  if (!e.declared.deterministic)
    note = fmt::format("declared not deterministic: spread {}", judging::number(total.spread));
  CheckResult result =
      judging::conclude("accumulate", total.compared, std::move(total.findings), note);
  result.exact = e.declared.deterministic;
  result.ratio = std::max(result.ratio, ratio);
  return result;
}

}  // namespace

Check accumulate_check() {
  return {.name = "accumulate",
          .letter = 'U',
          .asks = "may several forwards be in flight: F0 F1 B0 B1 gives the bits of F0 B0 F1 B1",
          .due = judging::has_gradients,
          .plan = plan,
          .judge = judge};
}

}  // namespace shardproof
