// A shot that repeats the base one: what `repeat` and `stream` ask of it.
#include <fmt/format.h>

#include <algorithm>

#include "oracle/checks/judging.hpp"

namespace shardproof::judging {
namespace {

std::vector<std::string> words_of(const Evidence& e) {
  return e.forward_only() ? std::vector<std::string>{"F0"} : std::vector<std::string>{"F0", "B0"};
}

void judge_shot(const Evidence& e, int shot, const Told& told, Agreement& total,
                Judgement& bounded) {
  for (const std::string& word : words_of(e)) {
    Agreement a =
        same_results(e, {shot, step_of(e.shots[size_t(shot)], word), 0, step_of(e.shots[0], word)});
    total.compared += a.compared;
    total.spread = std::max(total.spread, a.spread);
    if (e.declared.deterministic) {
      for (Finding& f : a.findings) {
        if (!told.with.empty())
          f.message = f.message.empty() ? told.with : f.message + ", " + told.with;
        f.means = told.means;
        total.findings.push_back(std::move(f));
      }
      continue;
    }
    Judgement j = against_truth(e, shot, word, word[0] == 'B');
    bounded.exact = bounded.exact && j.exact;
    bounded.ratio = std::max(bounded.ratio, j.ratio);
    std::move(j.findings.begin(), j.findings.end(), std::back_inserter(total.findings));
  }
}

}  // namespace

CheckResult same_again(const Evidence& e, const std::string& check,
                       std::span<const char* const> names, Told (*told)(const Shot&)) {
  if (auto f = incomplete(e, "base")) return conclude(check, 0, {*f});
  Agreement total;
  Judgement bounded;
  for (const char* name : names) {
    if (auto f = incomplete(e, name)) return conclude(check, 0, {*f});
    const int shot = e.find_shot(name);
    judge_shot(e, shot, told(e.shots[size_t(shot)]), total, bounded);
  }
  std::string note;
  if (!e.declared.deterministic)
    note = fmt::format("declared not deterministic: spread {} between runs", number(total.spread));
  CheckResult result = conclude(check, total.compared, std::move(total.findings), note);
  result.exact = e.declared.deterministic || bounded.exact;
  if (!e.declared.deterministic) result.ratio = std::max(result.ratio, bounded.ratio);
  return result;
}

}  // namespace shardproof::judging
