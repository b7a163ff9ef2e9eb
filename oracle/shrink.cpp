// Steps: an axis with fewer ranks, a word at its default, a smaller extent, and where one of these
// alone is refused because two keys hang together, both at once. A refused line costs nothing: the
// contract's precondition is asked before any rank runs.
#include "oracle/shrink.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numeric>
#include <set>
#include <sstream>

#include "oracle/check.hpp"
#include "oracle/comm/faults.hpp"
#include "oracle/command.hpp"
#include "oracle/due.hpp"
#include "oracle/interrupt.hpp"
#include "oracle/joined.hpp"
#include "oracle/report.hpp"
#include "oracle/report_parts.hpp"
#include "oracle/run.hpp"

namespace shardproof {

namespace {

// "rank 3 killed by signal 11 in forward, call 2 ...": how it died, not where it stood.
std::string way_to_die(const std::string& message) {
  return class_of(message.substr(0, message.find(" in ")));
}

// "... was released: mismatch: rank 2 differs from the other members": why, not who.
std::string without_names(const std::string& message) {
  const std::string released = "was released: ";
  const size_t at = message.find(released);
  return at == message.npos ? message : message.substr(0, message.find(':', at + released.size()));
}

std::string kind_of(const CheckResult& c, const Finding& f) {
  if (c.verdict == Verdict::hung) return "";
  if (c.verdict == Verdict::crashed) return way_to_die(f.message);
  if (!f.means.empty()) return f.means;
  return class_of(f.pattern.empty() ? without_names(f.message) : f.pattern);
}

Symptom symptom(const CheckResult& c, const Finding& f) {
  return {c.check, f.tensor, kind_of(c, f), c.verdict};
}

// A fault without a pattern may show one in a simpler line: any wrong values of the tensor are it.
bool alike(const CheckResult& c, const Finding& f, const Symptom& wanted) {
  const bool unnamed = wanted.kind.empty() && f.numeric && std::isfinite(f.got);
  return f.tensor == wanted.tensor && (unnamed || kind_of(c, f) == wanted.kind);
}

}  // namespace

std::string class_of(const std::string& pattern) {
  std::string spaced = pattern, text;
  std::replace(spaced.begin(), spaced.end(), ',', ' ');
  std::istringstream words(spaced);
  for (std::string word; words >> word;) {
    if (word.find_first_of("0123456789") != std::string::npos) continue;
    if (word == "copies") word = "copy";
    if (word.size() > 3 && word.back() == 's') word.pop_back();
    text += (text.empty() ? "" : " ") + word;
  }
  return text;
}

std::optional<Symptom> symptom_of(const CaseResult& result) {
  const CheckResult* first = telling::headline(result);
  if (!first || telling::lets_pass(first->verdict)) return {};
  if (first->findings.empty())
    return Symptom{first->check, "", class_of(first->note), first->verdict};
  return symptom(*first, first->findings[0]);
}

bool shows(const CaseResult& result, const Symptom& wanted) {
  for (const CheckResult& c : result.checks) {
    if (c.check != wanted.check || c.verdict != wanted.verdict) continue;
    if (c.findings.empty()) return class_of(c.note) == wanted.kind;
    for (const Finding& f : c.findings)
      if (alike(c, f, wanted)) return true;
  }
  return false;
}

// ---- Simpler lines

namespace {

using Values = std::vector<std::pair<std::string, std::string>>;

Case with(Case line, const Values& values) {
  for (const auto& [key, value] : values) line.set(key, value);
  return line;
}

bool is_axis(const std::string& key) { return axis_from(key).has_value(); }

bool is_under_test(const std::string& key) {
  return key == "subject" || key == "control" || key == "fault" || key == "device";
}

// Keys of the line by what can be done to them.
struct Handles {
  std::vector<std::string> extents, words;  // words: those off their default
};

Handles handles_of(const Case& line, const Registry& registry) {
  Handles h;
  for (const Key& key : keys_of(registry.contract(line.contract))) {
    if (is_axis(key.name) || is_under_test(key.name)) continue;
    const auto at = std::find_if(line.keys.begin(), line.keys.end(),
                                 [&](const auto& k) { return k.first == key.name; });
    if (key.integer())
      h.extents.push_back(key.name);
    else if (at->second != line.defaults[size_t(at - line.keys.begin())])
      h.words.push_back(key.name);
  }
  return h;
}

const std::string& fallback(const Case& line, const std::string& key) {
  for (size_t i = 0; i < line.keys.size(); ++i)
    if (line.keys[i].first == key) return line.defaults[i];
  return line.text(key);
}

int64_t lowest(const Case& line, const std::string& key, const Registry& registry) {
  for (const Key& k : keys_of(registry.contract(line.contract)))
    if (k.name == key) return k.low;
  return 1;
}

// A fault on a rank that is gone moves to the last one that is left.
Case with_rank_of_fault(Case line) {
  if (line.text("fault").empty()) return line;
  FaultSpec fault = parse_fault(line.text("fault"));
  fault.rank = std::min(fault.rank, line.world() - 1);
  line.set("fault", print(fault));
  return line;
}

// Fewer ranks on an axis, with the extents as they are, then with the local ones as they are.
void fewer_ranks(const Case& line, const Handles& h, std::vector<Case>& out) {
  for (Axis axis : {Axis::pp, Axis::ep, Axis::dp, Axis::cp, Axis::tp}) {
    const int p = line.ranks(axis);
    for (int n = 1; n < p; ++n) {
      Values values{{name(axis), std::to_string(n)}};
      out.push_back(with_rank_of_fault(with(line, values)));
      for (const std::string& key : h.extents)
        if (line.at(key) > 0 && line.at(key) % p == 0)
          values.emplace_back(key, std::to_string(line.at(key) / p * n));
      out.push_back(with_rank_of_fault(with(line, values)));
    }
  }
}

// All words at their defaults, then each, then two at once.
void plainer_words(const Case& line, const Handles& h, std::vector<Case>& out) {
  Values all;
  for (const std::string& key : h.words) all.emplace_back(key, fallback(line, key));
  if (all.size() > 1) out.push_back(with(line, all));
  for (const auto& one : all) out.push_back(with(line, {one}));
  for (size_t i = 0; i < all.size(); ++i)
    for (size_t j = i + 1; j < all.size(); ++j) out.push_back(with(line, {all[i], all[j]}));
}

// Smaller values of an extent, ascending: the first few, its divisors, its half, one less.
std::vector<int64_t> smaller(int64_t value, int64_t low) {
  constexpr int64_t few = 8;
  std::set<int64_t> values{value / 2, value - 1};
  for (int64_t v = low; v < low + few; ++v) values.insert(v);
  for (int64_t d = 1; d * d <= value; ++d)
    if (value % d == 0) values.insert({d, value / d});
  std::erase_if(values, [&](int64_t v) { return v < low || v >= value; });
  return {values.begin(), values.end()};
}

void smaller_extents(const Case& line, const Handles& h, const Registry& registry,
                     std::vector<Case>& out) {
  auto over = [&](const std::string& key, int64_t d) {
    return std::pair{key, std::to_string(line.at(key) / d)};
  };
  for (const std::string& key : h.extents)
    for (int64_t v : smaller(line.at(key), lowest(line, key, registry)))
      out.push_back(with(line, {{key, std::to_string(v)}}));
  for (int64_t d : {2, 3, 5}) {
    std::vector<std::string> divided;
    for (const std::string& key : h.extents)
      if (line.at(key) > 0 && line.at(key) % d == 0) divided.push_back(key);
    for (size_t i = 0; i < divided.size(); ++i)
      for (size_t j = i + 1; j < divided.size(); ++j)
        out.push_back(with(line, {over(divided[i], d), over(divided[j], d)}));
  }
}

std::optional<std::vector<int64_t>> list_in(const std::string& value) {
  if (value.find(',') == std::string::npos) return {};
  try {
    return parse_list("", value);
  } catch (const BadInput&) {
    return {};
  }
}

// Shorter lists and smaller members; an extent that is the sum of the list follows.
void shorter_lists(const Case& line, const Handles& h, std::vector<Case>& out) {
  for (const std::string& key : h.words) {
    const auto list = list_in(line.text(key));
    if (!list) continue;
    auto add = [&](const std::vector<int64_t>& less) {
      const int64_t before = std::accumulate(list->begin(), list->end(), int64_t(0)),
                    after = std::accumulate(less.begin(), less.end(), int64_t(0));
      const std::pair shorter{key, joined(less, ",")};
      out.push_back(with(line, {shorter}));
      for (const std::string& extent : h.extents)
        if (line.at(extent) == before)
          out.push_back(with(line, {shorter, {extent, std::to_string(after)}}));
    };
    for (size_t i = 0; i < list->size(); ++i) {
      std::vector<int64_t> less = *list;
      less.erase(less.begin() + std::ptrdiff_t(i));
      if (!less.empty()) add(less);
      for (int64_t v : smaller((*list)[i], 1)) {
        less = *list;
        less[i] = v;
        add(less);
      }
    }
  }
}

}  // namespace

std::vector<Case> simpler(const Case& line, const Registry& registry) {
  const Handles h = handles_of(line, registry);
  std::vector<Case> out;
  fewer_ranks(line, h, out);
  plainer_words(line, h, out);
  shorter_lists(line, h, out);
  smaller_extents(line, h, registry, out);
  return out;
}

// ---- The search

namespace {

// The candidate as its printed line would be read; empty where that is refused.
std::optional<Case> reread(const Case& candidate, const Registry& registry) {
  try {
    Case line = parse(print(candidate), registry);
    check_world(line);
    return line;
  } catch (const BadInput&) {
    return {};
  }
}

}  // namespace

Shrunk shrink(const Case& line, const CaseResult& failing, const Symptom& symptom,
              const Registry& registry, const JudgeLine& judge, int most) {
  Shrunk best{line, failing};
  std::set<std::string> seen{print_canonical(line)};
  auto step = [&] {
    for (const Case& candidate : simpler(best.line, registry)) {
      if (best.judged >= most || interrupted()) return false;
      const auto legal = reread(candidate, registry);
      if (!legal || !seen.insert(print_canonical(*legal)).second) continue;
      const auto result = judge(*legal);
      if (!result) continue;
      ++best.judged;
      if (!shows(*result, symptom)) continue;
      best.line = *legal;
      best.result = *result;
      ++best.kept;
      return true;
    }
    return false;
  };
  while (step()) {
  }
  return best;
}

// ---- The command

namespace {

bool refused(const Case& line, const Registry& registry) {
  return illegal(registry.contract(line.contract), line);
}

// What `run` asks of a line; of a line that its contract refuses, whether the subject does too.
std::vector<std::string> checks_of(const Case& line, const std::vector<std::string>& only,
                                   const Registry& registry) {
  if (refused(line, registry)) return {"rejection"};
  return due_checks(registry.contract(line.contract), line, declared_of(line, registry), only);
}

// Judges lines as `run` would. Lines that are refused stay apart from those that are not.
class LineJudge {
 public:
  LineJudge(const Options& options, const Registry& registry, bool illegal)
      : options_(options), registry_(registry), illegal_(illegal), runner_(options_, registry) {}

  std::optional<CaseResult> operator()(const Case& line, const std::vector<std::string>& only) {
    if (refused(line, registry_) != illegal_) return {};
    if (line.text("control").empty() && !not_due(line, registry_).empty()) return {};
    const auto checks = checks_of(line, only, registry_);
    if (checks.empty()) return {};
    try {
      if (!illegal_) check_legal(line, registry_);
      CaseResult result = runner_.run(line, checks, lane_of(line)).result;
      if (interrupted()) return {};  // its ranks may have been ended for that
      return result;
    } catch (const BadInput& e) {
      refusal_ = e.what();
      return {};
    } catch (const Interrupted&) {
      return {};
    }
  }
  const std::string& refusal() const { return refusal_; }  // of the last line that was refused

 private:
  const Options options_;
  const Registry& registry_;
  bool illegal_;
  Runner runner_;
  std::string refusal_;
};

void check_available(const Case& line) {
  const std::string why =
      reason_unavailable(line.text("transport"), line.text("device"), line.world());
  if (!why.empty())
    throw Infrastructure(
        fmt::format("expected a machine that can run {}, met none: {}", lane_of(line), why));
}

CaseResult first_judgement(LineJudge& judge, const Case& line, const Options& options,
                           const Registry& registry) {
  if (auto result = judge(line, options.checks)) return *result;
  if (interrupted()) throw Interrupted();
  check_legal(line, registry);
  if (std::string why = not_due(line, registry); !why.empty())
    throw BadInput(fmt::format(
        "{}: expected a line that the subject does, met one that it declares not to do ({})",
        print(line), why));
  if (!judge.refusal().empty()) throw BadInput(judge.refusal());
  throw BadInput(fmt::format("--check: expected a check that is due on {}, met {}", print(line),
                             joined(options.checks, ", ")));
}

// Ranks that hang cost a deadline each time: a tenth of it for candidates (a second where nothing
// slows the ranks down), and few of them.
Options hurried(Options options) {
  options.deadline_scale =
      std::min(options.deadline_scale, std::max(0.1, options.deadline_scale / 10));
  return options;
}
constexpr int most_hung = 40;

std::string told(const Shrunk& s, const Case& from, const Symptom& symptom, double seconds,
                 bool steady, const Options& options) {
  auto show = [&](const Case& line) {
    return options.canonical ? print_canonical(line) : print(line);
  };
  const CheckResult* about = telling::headline(s.result);
  for (const CheckResult& c : s.result.checks)
    if (c.check == symptom.check) about = &c;
  std::string text = telling::row("from", show(from));
  text += telling::row("minimal", show(s.line));
  text +=
      telling::row("judged", fmt::format("{}, {} kept   {}", number_of(s.judged, "simpler line"),
                                         s.kept, telling::seconds(seconds)));
  if (!steady)
    text += telling::row("note",
                         "the minimal line failed once and not when it was judged again: "
                         "the fault is intermittent");
  return text + telling::block_about(s.result, *about, options.program);
}

}  // namespace

ShrinkOutcome shrink_line(const Case& line, const Options& options, const Registry& registry) {
  using Clock = std::chrono::steady_clock;
  const auto begin = Clock::now();
  check_world(line);
  check_available(line);
  const bool illegal = refused(line, registry);
  if (illegal && line.text("control").empty()) check_legal(line, registry);
  LineJudge judge(options, registry, illegal);
  const CaseResult first = first_judgement(judge, line, options, registry);
  const auto symptom = symptom_of(first);
  if (!symptom) return {false, passed_line(first)};

  // One check is asked alone where it alone sees the fault.
  std::vector<std::string> only = options.checks;
  const bool hung = symptom->verdict == Verdict::hung;
  LineJudge hasty(hung ? hurried(options) : options, registry, illegal);
  if (const auto alone = hasty(line, {symptom->check}); alone && shows(*alone, *symptom))
    only = {symptom->check};
  Shrunk shrunk = shrink(
      line, first, *symptom, registry, [&](const Case& c) { return hasty(c, only); },
      hung ? most_hung : 1000);
  const auto again = judge(shrunk.line, options.checks);
  const bool seen_again = again && shows(*again, *symptom);
  if (seen_again) shrunk.result = *again;
  const bool steady = seen_again || interrupted();  // which says nothing of the line
  const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  return {true, told(shrunk, line, *symptom, seconds, steady, options)};
}

}  // namespace shardproof
