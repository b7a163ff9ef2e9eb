// U: may several forwards be in flight, and do gradients of microbatches add up?
//
//   F0 F1 B0 B1             gives the bits of F0 B0 F1 B1, whose second half gives its own truth by
//                           the calls of the first
//   F0 B0 F1 B1 ...         in a step of n microbatches (microbatches=n) the gradients of
//   parameters
//                           are running sums, zero at the step's start: after the last backward
//                           they hold the sum of n truths. A second step on other data, its sums
//                           zeroed again, must not remember the first.
#include <fmt/format.h>

#include <algorithm>

#include "oracle/checks/judging.hpp"
#include "oracle/joined.hpp"

namespace shardproof {
namespace {

constexpr const char* interleaved = "accumulate:interleaved";
constexpr const char* sequential = "accumulate:sequential";
constexpr const char* steps[] = {"accumulate:step 1", "accumulate:step 2"};

int microbatches_of(const Evidence& e) {
  return e.line->has("microbatches") ? int(e.line->at("microbatches")) : 1;
}

Feed reseeded(Feed f, int n) {
  f.seed += uint64_t(n) * 0x9e3779b9;
  return f;
}

void plan(const Evidence& e, std::vector<Shot>& shots) {
  const Feed base = shots.at(0).feeds.at(0);
  Shot s;
  s.feeds = {base, reseeded(base, 1)};
  s.name = interleaved;
  s.program = "F0 F1 B0 B1";
  shots.push_back(s);
  s.name = sequential;
  s.program = "F0 B0 F1 B1";
  shots.push_back(s);
  const int n = microbatches_of(e);
  if (n < 2) return;
  s.accumulate = true;
  s.program.clear();
  for (int m = 0; m < n; ++m) s.program += fmt::format("{}F{} B{}", m ? " " : "", m, m);
  for (int step = 0; step < 2; ++step) {
    s.name = steps[step];
    s.feeds.clear();
    for (int m = 0; m < n; ++m) s.feeds.push_back(reseeded(base, step * n + m));
    shots.push_back(s);
  }
}

// ---- Forwards in flight

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

struct Tally {
  int64_t compared = 0;
  bool exact = true;
  double ratio = 0, spread = 0;
  std::vector<Finding> findings;
  std::string vacuous;
};

void judge_order(const Evidence& e, Tally& total) {
  const int mixed = e.find_shot(interleaved), plain = e.find_shot(sequential);
  total.exact = e.declared.deterministic;
  for (const char* word : {"F0", "F1", "B0", "B1"}) {
    const int step = judging::step_of(e.shots[size_t(mixed)], word);
    judging::Agreement a = judging::same_results(
        e, {mixed, step, plain, judging::step_of(e.shots[size_t(plain)], word)});
    total.compared += a.compared;
    total.spread = std::max(total.spread, a.spread);
    if (!e.declared.deterministic) {
      judging::Judgement j = judging::against_truth(e, mixed, word, word[0] == 'B');
      total.ratio = std::max(total.ratio, j.ratio);
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
}

// Both orders may go wrong alike: where the first forward and backward are right, the second ones of a
// step are held against their own truth, too.
void judge_second(const Evidence& e, Tally& total) {
  const int plain = e.find_shot(sequential);
  for (const auto& [first, second] : {std::pair{"F0", "F1"}, std::pair{"B0", "B1"}}) {
    const bool gradient = first[0] == 'B';
    if (!judging::against_truth(e, plain, first, gradient).findings.empty()) return;
    judging::Judgement j = judging::against_truth(e, plain, second, gradient);
    total.compared += j.compared;
    total.exact = total.exact && j.exact;
    total.ratio = std::max(total.ratio, j.ratio);
    for (Finding& f : j.findings) {
      f.message += fmt::format("{}{} of F0 B0 F1 B1", f.message.empty() ? "" : ", ", second);
      f.means =
          "right the first time and wrong the second: something of the first forward was kept, or "
          "the data of the first do not show what is wrong: another seed may";
      total.findings.push_back(std::move(f));
    }
  }
}

LedgerEntry without_number(LedgerEntry entry) {
  entry.number = 0;
  return entry;
}
LedgerEntry without_sizes(LedgerEntry entry) {
  entry.count = 0;
  entry.send.clear(), entry.recv.clear();
  return without_number(std::move(entry));
}

// The second forward and backward of a step make the calls of the first. How much each of them moves
// may follow from what its feed makes: a routing.
void judge_calls(const Evidence& e, Tally& total) {
  if (e.declared.own_communication) return;
  const int plain = e.find_shot(sequential);
  const bool sized_by_data = std::any_of(e.operands.begin(), e.operands.end(),
                                         [](const Operand& o) { return o.made != nullptr; });
  const auto alike = [&](const LedgerEntry& met, const LedgerEntry& due, bool first) {
    return sized_by_data && !first ? without_sizes(met) == without_sizes(due)
                                   : without_number(met) == without_number(due);
  };
  for (int r = 0; r < e.mesh.world(); ++r) {
    const auto &once = e.record(r, 0).ledger, &twice = e.record(r, plain).ledger;
    size_t i = 0;
    while (i < twice.size() && i < 2 * once.size() &&
           alike(twice[i], once[i % once.size()], i < once.size()))
      ++i;
    if (i == twice.size() && i == 2 * once.size()) continue;
    Finding f;
    f.check = "accumulate";
    f.rank = r;
    f.ranks = {r};
    const std::string met = i < twice.size() ? text(twice[i]) : "no further call";
    const std::string due = i < 2 * once.size() ? text(once[i % once.size()]) : "no further call";
    f.message = twice.size() == 2 * once.size()
                    ? fmt::format("call {} of the {} of F0 B0 F1 B1 is another than that of F0 B0: {}; there {}",
                                  i + 1, twice.size(), met, due)
                    : fmt::format("F0 B0 F1 B1 makes {}, expected twice the {} of F0 B0; the first that differs: {}; there {}",
                                  number_of(int64_t(twice.size()), "call"), once.size(), met, due);
    f.means = i < once.size() ? "a forward or backward makes other calls when others follow it"
                              : "the second forward or backward of a step makes other calls than the first";
    total.findings.push_back(std::move(f));
    return;
  }
}

// ---- Sums over microbatches

// The sum of the truths of a step, and what it is allowed to be off.
struct Sum {
  Whole want;
  std::vector<Addend> addends;
};

Sum sum_of_truths(const Evidence& e, const Shot& step, size_t operand) {
  Sum sum;
  for (const Feed& feed : step.feeds) {
    const Truth& truth = e.truth(feed);
    const Whole& g = truth.gradients.at(operand);
    if (sum.want.value.empty()) sum.want = {g.shape, std::vector<double>(g.value.size(), 0.0)};
    for (size_t i = 0; i < g.value.size(); ++i) sum.want.value[i] += g.value[i];
    sum.addends.push_back({feed, &g, &judging::gauge_of(truth.gradient_gauges, operand)});
  }
  return sum;
}

std::string meaning(int step) {
  return step == 0
             ? "the gradients of the microbatches do not add up: one of them was written over "
               "the others, or left out, or is wrong by itself on data unlike the base ones: "
               "another seed may show it"
             : "the sum is not that of this step alone: something of the step before it was "
               "kept, in the kernel or in its buffers, or one gradient is wrong on data unlike "
               "those before: another seed may show it";
}

void judge_sums(const Evidence& e, int step, Tally& total) {
  const int at = e.find_shot(steps[step]), n = microbatches_of(e);
  const Shot& shot = e.shots[size_t(at)];
  const int last = judging::step_of(shot, fmt::format("B{}", n - 1));
  for (int k = 0; k < e.inputs; ++k) {
    const Operand& o = e.operands[size_t(k)];
    if (o.role != Operand::parameter || !o.gradient) continue;
    const Sum sum = sum_of_truths(e, shot, size_t(k));
    Compared c = compare(e, at, last, k, true, sum.want, bound_of_sum(e, o, sum.addends));
    total.compared += c.compared;
    total.exact = total.exact && c.exact;
    total.ratio = std::max(total.ratio, c.worst_ratio);
    if (!c.finding && c.unbounded > 0)
      total.vacuous = judging::without_bound(judging::tensor_name(o, true));
    if (!c.finding) continue;
    c.finding->message =
        fmt::format("{}{} after {} in step {}", c.finding->message,
                    c.finding->message.empty() ? "" : ", ", shot.program, step + 1);
    c.finding->means = meaning(step);
    total.findings.push_back(std::move(*c.finding));
  }
}

CheckResult judge(const Evidence& e) {
  for (const Shot& s : e.shots)
    if (s.name.starts_with("accumulate:"))
      if (auto f = judging::incomplete(e, s.name)) return judging::conclude("accumulate", 0, {*f});
  for (const char* shot : {interleaved, sequential})
    if (auto f = judging::incomplete(e, shot)) return judging::conclude("accumulate", 0, {*f});
  Tally total;
  judge_order(e, total);
  if (total.findings.empty()) judge_second(e, total);
  if (total.findings.empty()) judge_calls(e, total);
  if (microbatches_of(e) > 1)
    for (int step : {0, 1})
      if (total.findings.empty()) judge_sums(e, step, total);
  if (total.findings.empty() && !feeds_differ(e, e.find_shot(sequential)))
    return judging::conclude(
        "accumulate", 0, {},
        "both feeds give the same results, so state that is overwritten would not show");
  std::string note;
  if (!e.declared.deterministic)
    note = fmt::format("declared not deterministic: spread {}", judging::number(total.spread));
  CheckResult result =
      judging::conclude("accumulate", total.compared, std::move(total.findings), note);
  result.exact = total.exact;
  result.ratio = std::max(result.ratio, total.ratio);
  if (result.verdict == Verdict::passed && !total.vacuous.empty()) {
    result.verdict = Verdict::vacuous;
    result.note = total.vacuous;
  }
  return result;
}

}  // namespace

Check accumulate_check() {
  return {.name = "accumulate",
          .letter = 'U',
          .asks =
              "may several forwards be in flight: F0 F1 B0 B1 gives the bits of F0 B0 F1 B1; do "
              "gradients of microbatches add up",
          .due = judging::has_gradients,
          .plan = plan,
          .judge = judge};
}

}  // namespace shardproof
