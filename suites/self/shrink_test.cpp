// Minimal lines whose form follows from when they fail: the search on judges made of a predicate,
// then the command on ranks.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cmath>
#include <csignal>
#include <set>

#include "oracle/registry.hpp"
#include "oracle/shrink.hpp"

namespace shardproof {
namespace {
namespace shrink_test {

Key extent(const char* name, const char* fallback, int64_t low = 1) {
  Key key{name, fallback, "extent"};
  key.low = low, key.high = 1 << 20;
  return key;
}

// out is cut over tp, tokens over cp and, where it is given, docs adds up to tokens.
Contract toy() {
  Contract c;
  c.name = "toy", c.family = "sample", c.linear = true;
  Key mask{"mask", "full", "words"}, docs{"docs", "", "a list"};
  mask.choices = {"full", "causal"};
  docs.valid = [](std::string_view) { return std::string(); };
  c.keys = {extent("tokens", "24"), extent("in", "7"), extent("out", "48"), mask, docs};
  c.precondition = [](const Case& line) -> std::optional<Rejected> {
    int64_t sum = line.at("tokens");
    if (!line.text("docs").empty()) {
      sum = 0;
      for (int64_t doc : parse_list("docs", line.text("docs"))) sum += doc;
    }
    if (line.at("out") % line.ranks(Axis::tp) == 0 &&
        line.at("tokens") % line.ranks(Axis::cp) == 0 && sum == line.at("tokens"))
      return {};
    return Rejected("divisible extents", "others", "choose multiples");
  };
  return c;
}

Registry sample() {
  Registry r;
  r.add(toy());
  r.add(Subject{"", "toy", nullptr, {}});
  return r;
}

CaseResult failing(const std::string& pattern, const std::string& tensor = "y") {
  CheckResult check;
  check.check = "forward";
  check.verdict = Verdict::failed;
  Finding f;
  f.check = "forward", f.tensor = tensor, f.pattern = pattern, f.numeric = true;
  check.findings = {f};
  CaseResult result;
  result.checks = {check};
  return result;
}
CaseResult passing() {
  CheckResult check;
  check.check = "forward";
  check.verdict = Verdict::passed;
  CaseResult result;
  result.checks = {check};
  return result;
}

bool legal(const Case& line, const Registry& r) {
  return !r.contract(line.contract).precondition(line);
}

using Fails = std::function<bool(const Case&)>;

JudgeLine judge_of(const Registry& r, const Fails& fails) {
  return [&r, fails](const Case& line) -> std::optional<CaseResult> {
    if (!legal(line, r)) return {};
    return fails(line) ? failing("all") : passing();
  };
}

std::string minimal(const std::string& line, const Registry& r, const Fails& fails) {
  const CaseResult first = failing("all");
  return print(shrink(parse(line, r), first, *symptom_of(first), r, judge_of(r, fails)).line);
}

TEST(Shrink, PatternsThatDifferInNumbersAreOneClass) {
  EXPECT_EQ(class_of("block of rank 3"), class_of("blocks of ranks 0, 1"));
  EXPECT_EQ(class_of("copy of rank 1"), class_of("copies of ranks 0-2, 5"));
  EXPECT_EQ(class_of("rows 4..7, zero"), class_of("row 3, zero"));
  EXPECT_EQ(class_of("all x 4.000 = tp"), class_of("all x 2.000 = tp"));
  EXPECT_NE(class_of("all x 4.000 = tp"), class_of("all x 0.250 = 1/tp"));
  EXPECT_NE(class_of("row 3"), class_of("column 3"));
  EXPECT_NE(class_of("row 3"), class_of("row 3, zero"));
}

TEST(Shrink, WhatAlwaysFailsEndsAtOneRankAndUnitExtents) {
  EXPECT_EQ(minimal("toy tp=4 dp=2 order=dp,tp mask=causal dtype=bf16 fill=normal seed=7", sample(),
                    [](const Case&) { return true; }),
            "toy tokens=1 in=1 out=1");
}

TEST(Shrink, KeepsWhatTheFaultNeeds) {
  const Registry r = sample();
  // An even out of at least 3 at the least two ranks: 4.
  EXPECT_EQ(minimal("toy tp=8", r,
                    [](const Case& c) { return c.ranks(Axis::tp) >= 2 && c.at("out") >= 3; }),
            "toy tp=2 tokens=1 in=1 out=4");
  EXPECT_EQ(minimal("toy tp=4 mask=causal strides=transposed dtype=f32", r,
                    [](const Case& c) { return c.text("mask") == "causal" && c.at("in") > 2; }),
            "toy tokens=1 in=3 out=1 mask=causal");
}

// 16 is no multiple of 3: the local extent has to be kept for 8 ranks to become 3.
TEST(Shrink, RanksShrinkTogetherWithTheExtentsThatTheyCut) {
  EXPECT_EQ(
      minimal("toy tp=8 out=16", sample(), [](const Case& c) { return c.ranks(Axis::tp) >= 3; }),
      "toy tp=3 tokens=1 in=1 out=3");
}

TEST(Shrink, AListShrinksTogetherWithItsSum) {
  EXPECT_EQ(minimal("toy tokens=18 docs=7,1,10", sample(),
                    [](const Case& c) { return c.text("docs").find(',') != std::string::npos; }),
            "toy tokens=2 in=1 out=1 docs=1,1");
}

TEST(Shrink, TheRankOfAFaultFollowsTheWorld) {
  EXPECT_EQ(minimal("toy tp=4 fault=skip@forward.tp.1@rank3", sample(),
                    [](const Case& c) { return c.world() >= 2; }),
            "toy tp=2 tokens=1 in=1 out=2 fault=skip@forward.tp.1@rank1");
}

// Key heads and query heads are cut by the same ranks and divide each other. Where they are equally
// many, kv_heads stands at its default.
TEST(Shrink, KeysThatHangTogether) {
  EXPECT_EQ(minimal("linear_column tp=4 heads=16 kv_heads=8", all_families(),
                    [](const Case& c) { return c.ranks(Axis::tp) >= 2 && c.at("heads") > 0; }),
            "linear_column tp=2 heads=2 head_dim=1 tokens=1 in=1");
}

TEST(Shrink, AnotherFaultIsNotFollowed) {
  const Registry r = sample();
  const CaseResult first = failing("all x 4.000 = tp");
  auto judge = [&](const Case& line) -> std::optional<CaseResult> {
    if (!legal(line, r)) return {};
    if (line.text("dtype") == "f64") return failing("block of rank 1");      // of another kind
    if (line.ranks(Axis::tp) == 1) return failing("all x 4.000 = tp", "z");  // of another tensor
    return failing("all x 2.000 = tp");
  };
  EXPECT_EQ(print(shrink(parse("toy tp=4 dtype=f32", r), first, *symptom_of(first), r, judge).line),
            "toy tp=2 tokens=1 in=1 out=2 dtype=f32");
}

// Faults that come and go with the line, so that no order of steps is the right one by luck.
TEST(Shrink, NoSimplerLineFailsAndTheSearchRepeats) {
  const Registry r = sample();
  for (uint64_t salt = 1; salt <= 8; ++salt) {
    const Fails fails = [salt](const Case& c) {
      uint64_t h = 0xcbf29ce484222325 ^ salt;
      for (char letter : print_canonical(c)) h = (h ^ uint64_t(letter)) * 0x100000001b3;
      return (h >> 17) % 4 == 0;
    };
    const std::string from = "toy tp=4 cp=2 mask=causal dtype=f32 seed=3";
    const Case least = parse(minimal(from, r, fails), r);
    EXPECT_EQ(minimal(from, r, fails), print(least));
    EXPECT_NE(print(least), from) << "salt " << salt << ": a quarter of all lines fail";
    for (const Case& candidate : simpler(least, r)) {
      std::optional<Case> line;
      try {
        line = parse(print(candidate), r);
      } catch (const BadInput&) {
        continue;
      }
      EXPECT_FALSE(legal(*line, r) && fails(*line)) << print(least) << " -> " << print(*line);
    }
  }
}

TEST(Shrink, ExtentsThatHangTogetherAreDividedTogether) {
  EXPECT_EQ(minimal("toy tokens=24 in=12", sample(),
                    [](const Case& c) { return c.at("tokens") == 2 * c.at("in"); }),
            "toy tokens=2 in=1 out=1");
}

TEST(Shrink, NoLineIsJudgedTwice) {
  const Registry r = sample();
  std::set<std::string> seen;
  const Fails fails = [&](const Case& c) {
    EXPECT_TRUE(seen.insert(print_canonical(c)).second) << print(c);
    return c.at("tokens") % 3 == 0;
  };
  minimal("toy tp=4 cp=2 mask=causal", r, fails);
  EXPECT_GT(seen.size(), 10u);
}

// The same wrong tensor under another check, or another verdict, is another fault.
TEST(Shrink, TheCheckAndItsVerdictAreTheFaults) {
  const CaseResult first = failing("all");
  const Symptom wanted = *symptom_of(first);
  CaseResult of_gradient = first, hung = first;
  of_gradient.checks[0].check = "gradient";
  hung.checks[0].verdict = Verdict::hung;
  EXPECT_TRUE(shows(first, wanted));
  EXPECT_FALSE(shows(of_gradient, wanted));
  EXPECT_FALSE(shows(hung, wanted));
}

CaseResult of(Verdict verdict, const std::vector<Finding>& findings, const std::string& note = "") {
  CheckResult check;
  check.check = "forward", check.verdict = verdict, check.findings = findings, check.note = note;
  CaseResult result;
  result.checks = {check};
  return result;
}
CaseResult told(Verdict verdict, const std::string& message) {
  Finding f;
  f.check = "forward", f.message = message;
  return of(verdict, {f});
}
bool alike(const CaseResult& met, const CaseResult& wanted) {
  return shows(met, *symptom_of(wanted));
}

// A hang has no kind, and wrong values without a pattern have none either.
TEST(Shrink, WrongValuesAreNoHang) {
  EXPECT_FALSE(
      alike(failing("all x 4.000 = tp", ""), told(Verdict::hung, "rank 1 made no progress")));
}

TEST(Shrink, WhereValuesHaveNoPatternAnyWrongOnesAreTheFault) {
  const CaseResult unnamed = failing("");
  EXPECT_TRUE(alike(failing("block of rank 3"), unnamed));
  EXPECT_FALSE(alike(unnamed, failing("block of rank 3")));
  CaseResult nan = failing("NaN");
  nan.checks[0].findings[0].got = std::nan("");
  EXPECT_FALSE(alike(nan, unnamed));
  CaseResult unwritten = failing("3 elements never written");
  unwritten.checks[0].findings[0].numeric = false;
  EXPECT_FALSE(alike(unwritten, unnamed));
}

TEST(Shrink, TheFaultMayBeAnyOfWhatTheCheckFound) {
  const Finding y = failing("all").checks[0].findings[0],
                z = failing("row 3", "z").checks[0].findings[0];
  EXPECT_TRUE(alike(of(Verdict::failed, {z, y}), of(Verdict::failed, {y})));
  EXPECT_FALSE(alike(of(Verdict::failed, {z}), of(Verdict::failed, {y})));
}

TEST(Shrink, WhatAFindingMeansGoesBeforeItsPattern) {
  const auto meaning = [](const std::string& means, const std::string& pattern) {
    CaseResult result = failing(pattern);
    result.checks[0].findings[0].means = means;
    return result;
  };
  EXPECT_TRUE(alike(meaning("a sum is missing", "row 3"), meaning("a sum is missing", "all")));
  EXPECT_FALSE(alike(meaning("a sum is missing", "all"), meaning("summed again", "all")));
}

TEST(Shrink, RanksAndPlacesOfADeathOrAReleaseMayDiffer) {
  const std::string died = "rank 3 killed by SIGSEGV in forward, call 2: all_reduce sum";
  const CaseResult crash = told(Verdict::crashed, died);
  EXPECT_TRUE(alike(told(Verdict::crashed, "rank 1 killed by SIGSEGV in backward"), crash));
  EXPECT_FALSE(alike(told(Verdict::crashed, "rank 3 killed by SIGABRT in forward"), crash));
  EXPECT_FALSE(alike(told(Verdict::failed, died), crash));
  const CaseResult released =
      told(Verdict::failed, "rank 0 was released: mismatch: rank 2 differs from the other members");
  EXPECT_TRUE(alike(
      told(Verdict::failed, "rank 1 was released: mismatch: members of a group differ"), released));
  EXPECT_FALSE(
      alike(told(Verdict::failed, "rank 0 was released: deadlock: every rank waits"), released));
  EXPECT_TRUE(alike(told(Verdict::hung, "rank 0 waits in backward"),
                    told(Verdict::hung, "rank 1 made no progress until its deadline")));
}

TEST(Shrink, AVerdictWithoutAFindingHasItsReason) {
  const CaseResult vacuous = of(Verdict::vacuous, {}, "2 of 2 bounds are infinite");
  EXPECT_TRUE(alike(of(Verdict::vacuous, {}, "8 of 8 bounds are infinite"), vacuous));
  EXPECT_FALSE(alike(of(Verdict::vacuous, {}, "nothing was compared"), vacuous));
}

TEST(Shrink, WhatPassesOrIsSkippedIsNoFault) {
  EXPECT_FALSE(symptom_of(passing()));
  EXPECT_FALSE(symptom_of(of(Verdict::skipped, {}, "no such device")));
  EXPECT_FALSE(symptom_of(CaseResult{}));
  EXPECT_TRUE(symptom_of(of(Verdict::untested, {}, "its ranks are gone")));
}

TEST(Shrink, RanksComeBeforeWordsAndWordsBeforeExtents) {
  const Case line = parse("toy tp=2 cp=2 ep=2 dp=2 pp=2 mask=causal", sample());
  const std::vector<Case> lines = simpler(line, sample());
  const auto first = [&](auto is_simpler) {
    return std::find_if(lines.begin(), lines.end(), is_simpler) - lines.begin();
  };
  const auto axis = [&](Axis a) { return first([a](const Case& c) { return c.ranks(a) == 1; }); };
  const auto word = first([](const Case&c) { return c.text("mask") == "full"; }),
             extent = first([](const Case&c) { return c.world() == 32 && c.at("in") < 7; });
  EXPECT_LT(axis(Axis::pp), axis(Axis::ep));
  EXPECT_LT(axis(Axis::ep), axis(Axis::dp));
  EXPECT_LT(axis(Axis::dp), axis(Axis::cp));
  EXPECT_LT(axis(Axis::cp), axis(Axis::tp));
  EXPECT_LT(axis(Axis::tp), word);
  EXPECT_LT(word, extent);
  EXPECT_LT(size_t(extent), lines.size());
}

TEST(Shrink, WordsThatHangTogetherArePlainTogether) {
  const Registry r = sample();
  const auto plain = [](const Case& c) {
    return std::array{c.text("mask") == "full", c.text("dtype") == "f64",
                      c.text("fill") == "integers"};
  };
  const std::string from = "toy mask=causal dtype=f32 fill=normal";
  EXPECT_EQ(minimal(from, r,
                    [&](const Case& c) {
                      const auto [mask, dtype, fill] = plain(c);
                      return mask == dtype && !fill;
                    }),
            "toy tokens=1 in=1 out=1 fill=normal");
  EXPECT_EQ(minimal(from, r,
                    [&](const Case& c) {
                      const auto [mask, dtype, fill] = plain(c);
                      return mask == dtype && dtype == fill;
                    }),
            "toy tokens=1 in=1 out=1");
}

// No extent is a divisor that one can be divided by here: both become a third and a fifth only.
TEST(Shrink, ExtentsAreDividedByThreeAndByFive) {
  for (const int64_t by : {3, 5}) {
    const std::string from = fmt::format("toy tokens={} in={}", 7 * by, 11 * by);
    EXPECT_EQ(minimal(from, sample(),
                      [by](const Case& c) {
                        return (c.at("tokens") == 7 * by && c.at("in") == 11 * by) ||
                               (c.at("tokens") == 7 && c.at("in") == 11);
                      }),
              "toy tokens=7 in=11 out=1");
  }
}

TEST(Shrink, AnExtentMayGoToItsDivisors) {
  EXPECT_EQ(minimal("toy tokens=221", sample(),
                    [](const Case& c) { return c.at("tokens") == 221 || c.at("tokens") == 17; }),
            "toy tokens=17 in=1 out=1");
}

// 110 divides 221 as little as any number near it.
TEST(Shrink, AnExtentMayGoToItsHalf) {
  EXPECT_EQ(minimal("toy tokens=221", sample(),
                    [](const Case& c) { return c.at("tokens") == 221 || c.at("tokens") == 110; }),
            "toy tokens=110 in=1 out=1");
}

TEST(Shrink, AnExtentThatMayBeNothingGoesToNothing) {
  Contract c = toy();
  c.keys.push_back(extent("spare", "4", 0));
  Registry r;
  r.add(c);
  r.add(Subject{"", "toy", nullptr, {}});
  EXPECT_EQ(minimal("toy", r, [](const Case&) { return true; }), "toy tokens=1 in=1 out=1 spare=0");
}

// What is told is the last line that failed, and how many were asked for it.
TEST(Shrink, KeepsTheResultOfTheLineAndCounts) {
  const Registry r = sample();
  const CaseResult first = failing("all");
  int judged = 0, failed = 0;
  auto judge = [&](const Case& line) -> std::optional<CaseResult> {
    if (!legal(line, r)) return {};
    ++judged;
    if (line.ranks(Axis::tp) < 2) return passing();
    ++failed;
    CaseResult result = failing("all");
    result.line = print(line);
    return result;
  };
  const Shrunk s = shrink(parse("toy tp=4", r), first, *symptom_of(first), r, judge);
  EXPECT_EQ(s.result.line, print(s.line));
  EXPECT_EQ(s.judged, judged);
  EXPECT_EQ(s.kept, failed);
  EXPECT_GT(s.kept, 0);
  EXPECT_GT(s.judged, s.kept);
}

TEST(Shrink, StopsAtTheMostThatItMayJudge) {
  const Registry r = sample();
  const CaseResult first = failing("all");
  int judged = 0;
  auto judge = [&](const Case&) -> std::optional<CaseResult> {
    ++judged;
    return passing();
  };
  EXPECT_EQ(shrink(parse("toy tp=8", r), first, *symptom_of(first), r, judge, 5).judged, 5);
  EXPECT_EQ(judged, 5);
}

// ---- The command

struct Ended {
  int code;
  std::string out, err;
};

Ended call(std::vector<std::string> words, Registry registry = all_families()) {
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  testing::internal::CaptureStdout();
  testing::internal::CaptureStderr();
  Ended ended{main(int(words.size()), argv.data(), std::move(registry)), "", ""};
  ended.out = testing::internal::GetCapturedStdout();
  ended.err = testing::internal::GetCapturedStderr();
  return ended;
}

bool holds(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// The text of a row of what was said.
std::string row(const std::string& text, const std::string& label) {
  const size_t at = text.find(label);
  if (at == std::string::npos) return "";
  const size_t begin = text.find_first_not_of(' ', at + label.size());
  return text.substr(begin, text.find('\n', begin) - begin);
}

// b is summed p times: it takes two ranks, and nothing else.
TEST(ShrinkCommand, ABrokenTwin) {
  Ended ended = call({"shardproof", "shrink", "linear_row", "tp=4", "sp=on", "dtype=f32", "seed=9",
                      "control=bias_before_reduce"});
  EXPECT_EQ(ended.code, 1) << ended.err;
  const std::string line = row(ended.out, "minimal");
  EXPECT_TRUE(holds(line, "linear_row tp=2 ")) << ended.out;
  for (const char* gone : {"sp=", "dtype=", "seed="}) EXPECT_FALSE(holds(line, gone)) << line;
  EXPECT_TRUE(holds(line, "control=bias_before_reduce"));
  EXPECT_TRUE(holds(ended.out, "FAILED"));
  EXPECT_TRUE(holds(ended.out, "shardproof run " + line));
  EXPECT_EQ(call({"shardproof", "run", line}).code, 1);
  // Of the minimal line every check is told, not the one alone that the search asked.
  EXPECT_TRUE(holds(row(ended.out, "passed"), "ledger")) << ended.out;
  const Ended canonical = call({"shardproof", "shrink", "linear_row", "tp=4", "sp=on", "dtype=f32",
                                "seed=9", "control=bias_before_reduce", "--canonical"});
  EXPECT_EQ(canonical.code, 1);
  EXPECT_EQ(row(canonical.out, "minimal"), print_canonical(parse(line, all_families())));
}

TEST(ShrinkCommand, AFaultyCollective) {
  Ended ended = call({"shardproof", "shrink", "linear_row tp=4 fault=scale_p@forward.tp.1@rank3",
                      "--check", "forward"});
  EXPECT_EQ(ended.code, 1) << ended.err;
  EXPECT_TRUE(holds(row(ended.out, "minimal"), "linear_row tp=2 ")) << ended.out;
}

class DiesOnThirdRank final : public Kernel {
 public:
  std::unique_ptr<Saved> forward(Rank& rank, std::span<const View>,
                                 std::span<const View>) override {
    if (rank.world_rank() == 2) std::raise(SIGKILL);
    return std::make_unique<Saved>();
  }
};

// It takes three ranks to have a third one; with fewer the outputs are never written, which is
// another fault.
TEST(ShrinkCommand, ASubjectThatDies) {
  Registry r = all_families();
  Declared declared;
  declared.backward = false;
  r.add(
      Subject{"dies", "linear_row", [] { return std::make_unique<DiesOnThirdRank>(); }, declared});
  Ended ended = call({"shardproof", "shrink", "linear_row tp=8 dtype=bf16 subject=dies"}, r);
  EXPECT_EQ(ended.code, 1) << ended.err;
  EXPECT_EQ(row(ended.out, "minimal"), "linear_row tp=3 tokens=1 in=3 out=1 subject=dies");
  EXPECT_TRUE(holds(ended.out, "CRASHED")) << ended.out;
}

// Asleep: what spins takes from the others the core that its line is judged on.
class SleepsOnSecondRank final : public Kernel {
 public:
  std::unique_ptr<Saved> forward(Rank& rank, std::span<const View>,
                                 std::span<const View>) override {
    while (rank.world_rank() == 1) ::pause();
    return std::make_unique<Saved>();
  }
};

TEST(ShrinkCommand, ASubjectThatHangs) {
  Registry r = all_families();
  Declared declared;
  declared.backward = false;
  r.add(Subject{"sleeps", "linear_row", [] { return std::make_unique<SleepsOnSecondRank>(); },
                declared});
  Ended ended = call(
      {"shardproof", "shrink", "linear_row tp=4 sp=on subject=sleeps", "--deadline-scale", "0.03"},
      r);
  EXPECT_EQ(ended.code, 1) << ended.err;
  EXPECT_EQ(row(ended.out, "minimal"), "linear_row tp=2 tokens=1 in=2 out=1 subject=sleeps");
  EXPECT_TRUE(holds(ended.out, "HUNG")) << ended.out;
}

// Wrong the first time that a line runs, and right from then on: seen by all of its processes.
class WrongOnce final : public Kernel {
 public:
  static std::atomic<bool>* seen() {
    static auto* const all = static_cast<std::atomic<bool>*>(
        mmap(nullptr, most, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
    return all;
  }
  std::unique_ptr<Saved> forward(Rank& rank, std::span<const View> in,
                                 std::span<const View> out) override {
    const std::string line = fmt::format("{} {}", print_canonical(rank.line()), rank.world_rank());
    if (!asked_) wrong_ = !seen()[std::hash<std::string>{}(line) % most].exchange(true);
    asked_ = true;
    auto values = to_doubles(in[0]);
    if (wrong_) values[0] += 1;
    fill_from(out[0], values);
    return std::make_unique<Saved>();
  }

 private:
  static constexpr size_t most = 1 << 20;
  bool asked_ = false, wrong_ = false;
};

TEST(ShrinkCommand, AFaultThatIsNotSeenAgainIsSaidToComeAndGo) {
  WrongOnce::seen();
  Registry r = all_families();
  Declared declared;
  declared.backward = false;
  r.add(Subject{"once", "mapping_copy", [] { return std::make_unique<WrongOnce>(); }, declared});
  const Ended ended = call({"shardproof", "shrink", "mapping_copy tp=2 subject=once"}, r);
  EXPECT_EQ(ended.code, 1) << ended.err;
  EXPECT_EQ(row(ended.out, "note"),
            "the minimal line failed once and not when it was judged again: the fault is "
            "intermittent");
  EXPECT_TRUE(holds(ended.out, "\nFAILED     mapping_copy ")) << ended.out;
  // One check alone did not show it, so that all of them were asked of each line.
  EXPECT_TRUE(holds(row(ended.out, "passed"), "memory")) << ended.out;
}

std::string sleeps_on;  // as it is printed

class SleepsOnOneLine final : public Kernel {
 public:
  std::unique_ptr<Saved> forward(Rank& rank, std::span<const View>,
                                 std::span<const View>) override {
    while (print(rank.line()) == sleeps_on) ::pause();
    return std::make_unique<Saved>();
  }
};

// A line that hangs costs its deadline: few simpler ones are asked, though none of these hangs.
TEST(ShrinkCommand, OfALineThatHangsFewSimplerOnesAreAsked) {
  Registry r = all_families();
  Declared declared;
  declared.backward = false;
  r.add(Subject{"sleeps", "linear_row", [] { return std::make_unique<SleepsOnOneLine>(); },
                declared});
  sleeps_on = print(parse("linear_row out=24 dtype=f32 fill=normal bias=off subject=sleeps", r));
  const Ended ended = call({"shardproof", "shrink", sleeps_on, "--deadline-scale", "0.03"}, r);
  EXPECT_EQ(ended.code, 1) << ended.err;
  EXPECT_EQ(row(ended.out, "judged").find("40 simpler lines, 0 kept "), 0u) << ended.out;
}

TEST(ShrinkCommand, ALineThatPasses) {
  Ended ended = call({"shardproof", "shrink", "linear_row", "tp=2"});
  EXPECT_EQ(ended.code, 0) << ended.err;
  EXPECT_TRUE(holds(ended.out, "PASSED")) << ended.out;
}

TEST(ShrinkCommand, WrongCallsAreOneLine) {
  for (const auto& [words, says] : std::vector<std::pair<std::vector<std::string>, std::string>>{
           {{"shrink"}, "empty line"},
           {{"shrink", "linear_row", "tp=4", "in=10"}, "in divisible by tp"},
           {{"shrink", "linear_row", "tp=x"}, "'tp'"},
           {{"shrink", "linear_row", "--check", "forwrad"}, "forward"},
           {{"shrink", "linear_row", "--report", "x"}, "--report"}}) {
    std::vector<std::string> all{"shardproof"};
    all.insert(all.end(), words.begin(), words.end());
    Ended ended = call(all);
    EXPECT_EQ(ended.code, 2) << ended.out;
    EXPECT_EQ(std::count(ended.err.begin(), ended.err.end(), '\n'), 1) << ended.err;
    EXPECT_TRUE(holds(ended.err, says)) << ended.err;
  }
}

}  // namespace shrink_test
}  // namespace
}  // namespace shardproof
