// U: may several forwards be in flight, and do gradients of microbatches add up?
//
//   F0 F1 F2 B1 B0 B2       gives the bits of F0 B0 (the base shot) and of F1 B1 F2 B2, whose F1 B1
//                           gives its own truth and which makes the calls of F0 B0 twice. The
//                           third forward takes the place of the first in a pool of two; the order
//                           of the backwards is neither that of a queue nor that of a stack, and
//                           what the last forward was given is there until the end. In B1 the
//                           cotangents of the first half of the tokens are zero.
//   F0 B0 F1 B1 ...         in a step of n microbatches (microbatches=n) the gradients of
//   F0 F1 ... B0 B1 ...     parameters are running sums, zero at the step's start: after the last
//                           backward they hold the sum of n truths. Outputs, and gradients that are
//                           no sums, are held against their own. The second step, on other data,
//                           its sums zeroed again, must not remember the first. Each microbatch
//                           makes the calls of one, but for those that are due once a step: the
//                           last backward makes them.
#include <fmt/format.h>

#include <algorithm>
#include <sstream>

#include "oracle/checks/judging.hpp"
#include "oracle/joined.hpp"
#include "oracle/overflow.hpp"

namespace shardproof {
namespace {

constexpr const char* interleaved = "accumulate:interleaved";
constexpr const char* sequential = "accumulate:sequential";
constexpr const char* steps[] = {"accumulate:step 1", "accumulate:step 2"};

int microbatches_of(const Evidence& e) {
  return e.line->has("microbatches") ? int(e.line->at("microbatches")) : 1;
}

// The first after the base has tokens without a loss, and with them ranks that have nothing to say.
Feed reseeded(Feed f, int n) {
  f.seed += uint64_t(n) * 0x9e3779b9;
  f.silent_half = n == 1;
  return f;
}

void plan(const Evidence& e, std::vector<Shot>& shots) {
  const Feed base = shots.at(0).feeds.at(0);
  Shot s;
  s.feeds = {base, reseeded(base, 1), reseeded(base, 2)};
  s.name = interleaved;
  s.program = "F0 F1 F2 B1 B0 B2";
  shots.push_back(s);
  s.name = sequential;
  s.program = "F1 B1 F2 B2";
  shots.push_back(s);
  const int n = microbatches_of(e);
  if (n < 2) return;
  s.accumulate = true;
  std::string forwards, backwards, pairs;
  for (int m = 0; m < n; ++m) {
    forwards += fmt::format("F{} ", m);
    backwards += fmt::format("{}B{}", m ? " " : "", m);
    pairs += fmt::format("{}F{} B{}", m ? " " : "", m, m);
  }
  for (int step = 0; step < 2; ++step) {
    s.name = steps[step];
    s.program = step == 0 ? pairs : forwards + backwards;
    s.feeds.clear();
    for (int m = 0; m < n; ++m) s.feeds.push_back(reseeded(base, step * n + m));
    shots.push_back(s);
  }
}

// ---- Forwards in flight

// A word of the interleaved shot, and the shot in which it stands alone.
struct Alone {
  const char* word;
  int shot;
};

std::vector<Alone> words_alone(const Evidence& e) {
  const int pairs = e.find_shot(sequential);
  return {{"F0", 0}, {"F1", pairs}, {"F2", pairs}, {"B0", 0}, {"B1", pairs}, {"B2", pairs}};
}

bool results_differ(const Evidence& e, const Alone& a, const Alone& b) {
  const int step_a = judging::step_of(e.shots[size_t(a.shot)], a.word),
            step_b = judging::step_of(e.shots[size_t(b.shot)], b.word);
  for (int r = 0; r < e.mesh.world(); ++r)
    for (const ResultTensor& t : e.record(r, a.shot).results) {
      if (t.step != step_a) continue;
      const ResultTensor* other = e.result(r, b.shot, step_b, t.operand, t.gradient);
      if (other && !judging::same_bytes(t, *other)) return true;
    }
  return false;
}

// Feeds that give the same results everywhere could not show a state that is overwritten.
bool feeds_differ(const Evidence& e) {
  const std::vector<Alone> words = words_alone(e);
  for (const auto& [i, j] : {std::pair{0, 1}, std::pair{1, 2}, std::pair{0, 2}})
    if (!results_differ(e, words[size_t(i)], words[size_t(j)]) &&
        !results_differ(e, words[size_t(i + 3)], words[size_t(j + 3)]))
      return false;
  return true;
}

struct Tally {
  int64_t compared = 0;
  bool exact = true;
  double ratio = 0, spread = 0;
  std::vector<Finding> findings;
  std::string vacuous;
};

// Where the base shot is wrong by itself, `forward` and `gradient` say so.
bool wrong_alone(const Evidence& e, const Alone& a) {
  return a.shot == 0 && !judging::against_truth(e, 0, a.word, a.word[0] == 'B').findings.empty();
}

void judge_order(const Evidence& e, Tally& total) {
  const int mixed = e.find_shot(interleaved);
  total.exact = e.declared.deterministic;
  for (const Alone& alone : words_alone(e)) {
    const char* word = alone.word;
    const Shot &in_flight = e.shots[size_t(mixed)], &by_itself = e.shots[size_t(alone.shot)];
    judging::Agreement a = judging::same_results(
        e,
        {mixed, judging::step_of(in_flight, word), alone.shot, judging::step_of(by_itself, word)});
    total.compared += a.compared;
    total.spread = std::max(total.spread, a.spread);
    if (!e.declared.deterministic) {
      judging::Judgement j = judging::against_truth(e, mixed, word, word[0] == 'B');
      total.ratio = std::max(total.ratio, j.ratio);
      a.findings = std::move(j.findings);
    }
    if (!a.findings.empty() && e.declared.deterministic && wrong_alone(e, alone)) continue;
    for (Finding& f : a.findings) {
      f.message += fmt::format("{}{} of {} against {}", f.message.empty() ? "" : ", ", word,
                               in_flight.program, by_itself.program);
      f.means =
          word[0] == 'F'
              ? "right the first time and wrong the second or third: something of a forward before "
                "it was kept"
              : "what one forward saved was overwritten or used up by another: keep it in the "
                "saved state, not in the kernel";
      total.findings.push_back(std::move(f));
    }
  }
}

// Both orders may go wrong alike: where the base forward and backward are right, those on other
// data are held against their own truth, too.
void judge_second(const Evidence& e, Tally& total) {
  const int pairs = e.find_shot(sequential);
  for (const Alone& second : {Alone{"F1", pairs}, Alone{"B1", pairs}}) {
    const bool gradient = second.word[0] == 'B';
    judging::Judgement j = judging::against_truth(e, pairs, second.word, gradient);
    if (!j.findings.empty() && wrong_alone(e, {gradient ? "B0" : "F0", 0})) return;
    total.compared += j.compared;
    total.exact = total.exact && j.exact;
    total.ratio = std::max(total.ratio, j.ratio);
    for (Finding& f : j.findings) {
      f.message += fmt::format("{}{} of {}", f.message.empty() ? "" : ", ", second.word,
                               e.shots[size_t(pairs)].program);
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

bool sized_by_data(const Evidence& e) {
  return std::any_of(e.operands.begin(), e.operands.end(),
                     [](const Operand& o) { return o.made != nullptr; });
}

// Two pairs of forward and backward make the calls of the base shot twice. How much each of them
// moves may follow from what its feed makes: a routing.
void judge_calls(const Evidence& e, Tally& total) {
  if (e.declared.own_communication) return;
  const int plain = e.find_shot(sequential);
  const std::string& program = e.shots[size_t(plain)].program;
  const bool sized = sized_by_data(e);
  const auto alike = [&](const LedgerEntry& met, const LedgerEntry& due) {
    return sized ? without_sizes(met) == without_sizes(due)
                 : without_number(met) == without_number(due);
  };
  for (int r = 0; r < e.mesh.world(); ++r) {
    const auto &once = e.record(r, 0).ledger, &twice = e.record(r, plain).ledger;
    size_t i = 0;
    while (i < twice.size() && i < 2 * once.size() && alike(twice[i], once[i % once.size()])) ++i;
    if (i == twice.size() && i == 2 * once.size()) continue;
    Finding f;
    f.check = "accumulate";
    f.rank = r;
    f.ranks = {r};
    const std::string met = i < twice.size() ? text(twice[i]) : "no further call";
    const std::string due = i < 2 * once.size() ? text(once[i % once.size()]) : "no further call";
    f.message =
        twice.size() == 2 * once.size()
            ? fmt::format("call {} of the {} of {} is another than that of F0 B0: {}; there {}",
                          i + 1, twice.size(), program, met, due)
            : fmt::format(
                  "{} makes {}, expected twice the {} of F0 B0; the first that differs: {}; there "
                  "{}",
                  program, number_of(int64_t(twice.size()), "call"), once.size(), met, due);
    f.means = i < once.size()
                  ? "a forward or backward makes other calls when others follow it"
                  : "the second forward or backward of a step makes other calls than the first";
    total.findings.push_back(std::move(f));
    return;
  }
}

// ---- Calls of a step

// Whether a rank made these calls, sizes apart where they follow from the data of a feed.
size_t as_due(const Evidence& e, const std::vector<LedgerEntry>& met,
              const std::vector<LedgerEntry>& due) {
  const bool sized = sized_by_data(e);
  size_t i = 0;
  for (; i < met.size() && i < due.size(); ++i) {
    LedgerEntry call = met[i];
    if (sized) call.count = due[i].count;
    if (!judging::is_due(call, due[i])) break;
  }
  return i;
}

// Those of the words of a program; what is due once a step is due of its last backward.
std::vector<LedgerEntry> due_of_program(const Evidence& e, int rank, const std::string& program,
                                        const std::string& last) {
  std::vector<LedgerEntry> all;
  std::istringstream words(program);
  for (std::string word; words >> word;)
    for (LedgerEntry& call : judging::due_calls(e, rank, word[0] == 'B', word == last))
      all.push_back(std::move(call));
  return all;
}

// One that is due has no call site.
std::string text_of(const std::vector<LedgerEntry>& calls, size_t i) {
  if (i == calls.size()) return "no further call";
  const std::string all = text(calls[i]);
  return calls[i].site.empty() ? all.substr(0, all.rfind(", at ")) : all;
}

// Where one forward and backward make the due calls (else `ledger` says so), a step makes those of
// its microbatches.
void judge_calls_of_step(const Evidence& e, int step, Tally& total) {
  if (e.declared.own_communication || (!e.contract->traffic && !e.declared.traffic)) return;
  const int at = e.find_shot(steps[step]);
  const Shot& shot = e.shots[size_t(at)];
  const std::string last = fmt::format("B{}", microbatches_of(e) - 1);
  for (int r = 0; r < e.mesh.world(); ++r) {
    const auto once = due_of_program(e, r, "F0 B0", "B0"),
               due = due_of_program(e, r, shot.program, last);
    const auto &base = e.record(r, 0).ledger, &met = e.record(r, at).ledger;
    if (base.size() != once.size() || as_due(e, base, once) != once.size()) return;
    const size_t i = as_due(e, met, due);
    if (i == met.size() && i == due.size()) continue;
    Finding f;
    f.check = "accumulate";
    f.rank = r;
    f.ranks = {r};
    f.message =
        fmt::format("{} in step {} makes {}, due are {}; the first that differs: {}; due {}",
                    shot.program, step + 1, number_of(int64_t(met.size()), "call"), due.size(),
                    text_of(met, i), text_of(due, i));
    f.means =
        met.size() > due.size()
            ? "a microbatch that others of its step follow makes a call that is due once a step"
            : "a microbatch of a step leaves out a call, or makes another";
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
               "the others, left out, or counted too often, or is wrong by itself on data unlike "
               "the base ones: another seed may show it"
             : "the sum is not that of this step alone: something of the step before it was "
               "kept, in the kernel or in its buffers, or what a forward set was read by the "
               "backward of another, or one gradient is wrong on data unlike those before: "
               "another seed may show it";
}

void keep(Compared c, const std::string& tensor, const std::string& when, const std::string& means,
          Tally& total) {
  total.compared += c.compared;
  total.exact = total.exact && c.exact;
  total.ratio = std::max(total.ratio, c.worst_ratio);
  if (!c.finding && c.unbounded > 0) total.vacuous = judging::without_bound(tensor);
  if (!c.finding) return;
  c.finding->message += (c.finding->message.empty() ? "" : ", ") + when;
  c.finding->means = means;
  total.findings.push_back(std::move(*c.finding));
}

// What each microbatch has of its own: outputs, and the gradients that are no sums.
void judge_each(const Evidence& e, int step, Tally& total) {
  const int at = e.find_shot(steps[step]);
  const Shot& shot = e.shots[size_t(at)];
  for (int m = 0; m < microbatches_of(e); ++m) {
    const Feed& feed = shot.feeds[size_t(m)];
    const Truth& truth = e.truth(feed);
    for (int k = 0; k < int(e.operands.size()); ++k) {
      const Operand& o = e.operands[size_t(k)];
      const bool gradient = k < e.inputs;
      if (gradient && (o.role != Operand::input || !o.gradient)) continue;
      const size_t i = size_t(gradient ? k : k - e.inputs);
      const Whole& want = (gradient ? truth.gradients : truth.outputs).at(i);
      const Gauge& gauge =
          judging::gauge_of(gradient ? truth.gradient_gauges : truth.output_gauges, i);
      const std::string word = fmt::format("{}{}", gradient ? "B" : "F", m);
      keep(compare(e, at, judging::step_of(shot, word), k, gradient, want,
                   bound_of(e, feed, o, gradient, want, gauge)),
           judging::tensor_name(o, gradient),
           fmt::format("{} of {} in step {}", word, shot.program, step + 1),
           "right where gradients are written over and wrong where they are running sums, or wrong "
           "on data unlike the base ones: another seed may show it",
           total);
    }
  }
}

void judge_sums(const Evidence& e, int step, Tally& total) {
  const int at = e.find_shot(steps[step]), n = microbatches_of(e);
  const Shot& shot = e.shots[size_t(at)];
  const int last = judging::step_of(shot, fmt::format("B{}", n - 1));
  for (int k = 0; k < e.inputs; ++k) {
    const Operand& o = e.operands[size_t(k)];
    if (o.role != Operand::parameter || !o.gradient) continue;
    const Sum sum = sum_of_truths(e, shot, size_t(k));
    const auto bound = bound_of_sum(e, o, sum.addends);
    require_in_range(e, o, /*gradient=*/true, sum.want, bound);
    keep(compare(e, at, last, k, true, sum.want, bound), judging::tensor_name(o, true),
         fmt::format("after {} in step {}", shot.program, step + 1), meaning(step), total);
  }
}

CheckResult judge(const Evidence& e) {
  for (const Shot& s : e.shots)
    if (s.name.starts_with("accumulate:"))
      if (auto f = judging::incomplete(e, s.name)) return judging::conclude("accumulate", 0, {*f});
  for (const char* shot : {"base", interleaved, sequential})
    if (auto f = judging::incomplete(e, shot)) return judging::conclude("accumulate", 0, {*f});
  Tally total;
  judge_order(e, total);
  if (total.findings.empty()) judge_second(e, total);
  if (total.findings.empty()) judge_calls(e, total);
  if (microbatches_of(e) > 1)
    for (int step : {0, 1})
      if (total.findings.empty())
        judge_sums(e, step, total), judge_each(e, step, total), judge_calls_of_step(e, step, total);
  if (total.findings.empty() && !feeds_differ(e))
    return judging::conclude(
        "accumulate", 0, {},
        fmt::format(
            "two feeds give the same results, so state that is overwritten would not show; {}",
            judging::values_that_can_be_wrong(*e.line)));
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
  return {
      .name = "accumulate",
      .letter = 'U',
      .asks =
          "may several forwards be in flight: F0 F1 F2 B1 B0 B2 gives the bits of each alone; do "
          "gradients of microbatches add up",
      .due = judging::has_gradients,
      .plan = plan,
      .judge = judge};
}

}  // namespace shardproof
