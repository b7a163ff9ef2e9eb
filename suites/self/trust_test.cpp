// What costs one case its verdict costs no other: records that a subject wrote over, references
// that throw, processes of a gate that end, harnesses that fail under a rank.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <csignal>
#include <new>
#include <set>
#include <stdexcept>
#include <thread>

#include "oracle/comm/arena.hpp"
#include "oracle/fit.hpp"
#include "oracle/gate_controls.hpp"
#include "oracle/gate_jobs.hpp"
#include "oracle/interrupt.hpp"
#include "suites/self/planted.hpp"

namespace shardproof {
namespace {
namespace trust_test {

using Checks = std::vector<std::string>;

volatile bool for_ever = true;
const std::string small = "mapping_reduce tp=4 tokens=3 hidden=5";

bool holds(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// ---- Truths

// A subject without a backward asks for no gradients; the next one of the contract may.
TEST(Truths, OfAForwardAloneServeNoBackward) {
  const Case line = planted::line_of(small, "");
  Truths truths(planted::registry());
  const auto gradients = [&](const Declared& declared) {
    const Evidence e = plan_case(line, declared, {"forward"}, planted::registry());
    return truths.get(line, e, e.shots[0].feeds[0]).gradients.size();
  };
  EXPECT_EQ(gradients(planted::forward_only()), 0u);
  EXPECT_EQ(gradients(Declared{}), 1u);
}

// What is allowed of the results and gradients of a line, element by element.
std::vector<double> allowed(const std::string& text, const Declared& declared) {
  const Registry families = all_families();
  const Case line = parse(text, families);
  Truths truths(families);
  const Evidence e = plan_case(line, declared, {"gradient"}, families);
  const Truth& truth = truths.get(line, e, e.shots[0].feeds[0]);
  std::vector<double> all;
  const auto add = [&](size_t operand, bool gradient, const Whole& want, const Gauge& gauge) {
    const auto bound = bound_of(e, e.operands[operand], gradient, want, gauge);
    for (size_t k = 0; k < want.value.size(); ++k) all.push_back(bound(int64_t(k)));
  };
  for (size_t i = 0; i < truth.gradients.size(); ++i)
    add(i, true, truth.gradients[i], truth.gradient_gauges[i]);
  for (size_t i = 0; i < truth.outputs.size(); ++i)
    add(size_t(e.inputs) + i, false, truth.outputs[i], truth.output_gauges[i]);
  return all;
}

// Sums that a subject declares are those of a line that asks for them: what rounds on the wire and
// in storage stays in the bound of a family that counts in units of its accumulation, and what is
// stored in another type is bounded in the units that it was counted in.
TEST(Truths, AreBoundedInTheTypeThatTheSubjectDeclares) {
  Declared doubles, halves;
  doubles.accumulates_in_f64 = true;
  halves.accumulates_in_storage = true;
  const std::tuple<Declared, std::string, std::string> lines[] = {
      {doubles, "norm_sequence tp=2 sp=on dtype=bf16", "f64"},
      {doubles, "norm_sequence tp=2 sp=on dtype=f32", "f64"},
      {doubles, "mlp tp=2 sp=on dtype=bf16", "f64"},
      {doubles, "loss_packed cp=2 dtype=f32", "f64"},
      {doubles, "block tp=2 sp=on dtype=f32", "f64"},
      {halves, "norm_sequence tp=2 sp=on dtype=bf16", "bf16"},
      {halves, "norm_sequence tp=2 sp=on dtype=bf16 grad=f32", "bf16"},
      {halves, "mlp tp=2 sp=on dtype=f16", "f16"},
      {halves, "vocab_cross_entropy tp=2 dtype=bf16", "bf16"},
      {halves, "loss_packed cp=2 dtype=bf16", "bf16"},
      {halves, "attention_ring cp=2 dtype=bf16", "bf16"}};
  for (const auto& [declared, line, type] : lines) {
    EXPECT_EQ(allowed(line, declared), allowed(line + " acc=" + type, {})) << line;
    EXPECT_NE(allowed(line, declared), allowed(line, {})) << line;
  }
  // Of a wider storage halves say nothing.
  EXPECT_EQ(allowed("mlp tp=2 sp=on dtype=f32", halves), allowed("mlp tp=2 sp=on dtype=f32", {}));
}

// A step keeps masters in the type of its sums: where a subject alone declares that, they are drawn
// as ever.
TEST(Truths, OfWhatIsDeclaredAreNotThoseOfTheLineThatSaysIt) {
  const Registry families = all_families();
  Truths truths(families);
  Declared plain, doubles;
  plain.backward = doubles.backward = false;
  doubles.accumulates_in_f64 = true;
  const auto masters = [&](const std::string& text, const Declared& declared) {
    const Case line = parse(text, families);
    const Evidence e = plan_case(line, declared, {"forward"}, families);
    return truths.get(line, e, e.shots[0].feeds[0]).inputs;
  };
  const auto drawn = masters("sharded_step dp=2 dtype=f32", plain);
  const auto same = [](const Whole& a, const Whole& b) { return a.value == b.value; };
  EXPECT_TRUE(std::ranges::equal(masters("sharded_step dp=2 dtype=f32", doubles), drawn, same));
  EXPECT_FALSE(
      std::ranges::equal(masters("sharded_step dp=2 dtype=f32 acc=f64", plain), drawn, same));
}

// ---- Records

// The case as it is judged where the record of rank 1 was changed on its way.
Judged judged_with(const std::function<void(RankRecord&)>& change) {
  const RankMain honest = rank_main(planted::registry());
  return planted::judge(planted::line_of(small, ""), {"forward", "replica", "ledger"},
                        [=](RankHost& host, std::span<const std::byte> job) {
                          auto bytes = honest(host, job);
                          if (host.rank != 1) return bytes;
                          RankRecord record = parse_record(bytes).value();
                          change(record);
                          return serialize(record);
                        });
}

TEST(Records, ThatNoRankCanMakeAreThoseOfACrash) {
  using Change = std::function<void(RankRecord&)>;
  const auto result = [](auto change) {
    return [=](RankRecord& r) { change(r.shots[0].results[0]); };
  };
  const auto call = [](auto change) {
    return [=](RankRecord& r) { change(r.shots[0].ledger[0]); };
  };
  const std::vector<std::pair<std::string, Change>> table = {
      {"met operand 1073741824", result([](ResultTensor& t) { t.operand = 1 << 30; })},
      {"met operand -1", result([](ResultTensor& t) { t.operand = -1; })},
      {"from step 7", result([](ResultTensor& t) { t.step = 7; })},
      {"another dtype (200)", result([](ResultTensor& t) { t.dtype = DType(200); })},
      {"met [1048576]", result([](ResultTensor& t) { t.shape = {1 << 20}; })},
      {"expected 120 B of y, met 0", result([](ResultTensor& t) { t.bytes.resize(0); })},
      {"met operation 77", call([](LedgerEntry& c) { c.op = Op(77); })},
      {"met rank 99", call([](LedgerEntry& c) {
         c.members = {0, 1, 99};
       })},
      {"met rank 4", call([](LedgerEntry& c) { c.from = 4; })},
      {"met rank -2", call([](LedgerEntry& c) { c.to = -2; })},
      {"for each of 4 members, met 5", call([](LedgerEntry& c) { c.send.assign(5, 1); })},
      {"status of a shot, met 200",
       [](RankRecord& r) { r.shots[0].status = ShotRecord::Status(200); }},
      {"expected 2 shots, met 1", [](RankRecord& r) { r.shots.pop_back(); }},
  };
  for (const auto& [says, change] : table) {
    const Judged j = judged_with(change);
    for (const CheckResult& c : j.result.checks) {
      EXPECT_EQ(c.verdict, Verdict::crashed) << says << " " << c.check;
      ASSERT_EQ(c.findings.size(), 1u) << says;
      EXPECT_EQ(c.findings[0].rank, 1) << says;
      EXPECT_TRUE(holds(c.findings[0].message, "does not fit the case") &&
                  holds(c.findings[0].message, says) &&
                  holds(c.findings[0].message, "memory was overwritten"))
          << says << ": " << c.findings[0].message;
    }
  }
  for (const CheckResult& c : judged_with([](RankRecord&) {}).result.checks)
    EXPECT_EQ(c.verdict, Verdict::passed) << c.check;
}

TEST(Records, OfAnotherRankOrCaseAreNoVerdict) {
  for (const auto& change : std::vector<std::function<void(RankRecord&)>>{
           [](RankRecord& r) { r.rank = 0; }, [](RankRecord& r) { ++r.number; }})
    try {
      judged_with(change);
      ADD_FAILURE() << "the record was taken";
    } catch (const Infrastructure& e) {
      EXPECT_TRUE(holds(e.what(), "the channel from the ranks mixes records up")) << e.what();
    }
}

// Rank 1 writes over the record that rank 0 has handed in, in the memory that they share. Where
// that is follows from the trace of rank 1: an arena of as many ranks is laid out alike.
TEST(Records, ThatWereWrittenOverInSharedMemoryAreToldAsSuch) {
  const Case line = planted::line_of("mapping_reduce tp=2 tokens=3 hidden=5", "");
  const Arena alike(2, 1, true);
  const RankMain honest = rank_main(planted::registry());
  const RankMain main = [&](RankHost& host, std::span<const std::byte> job) {
    auto record = honest(host, job);
    if (host.rank != 1) return record;
    const auto mine = [&](const void* there) {
      return reinterpret_cast<std::byte*>(host.trace) +
             (static_cast<const std::byte*>(there) -
              reinterpret_cast<const std::byte*>(&alike.page(1).trace));
    };
    const auto* page = reinterpret_cast<const RankPage*>(mine(&alike.page(0)));
    while (page->finished.load() == 0) usleep(100);
    *mine(alike.record(0)) ^= std::byte(1);
    return record;
  };
  const Judged j = planted::judge(line, {"forward"}, main);
  const CheckResult& c = j.result.checks.at(0);
  EXPECT_EQ(c.verdict, Verdict::crashed);
  ASSERT_EQ(c.findings.size(), 1u);
  EXPECT_TRUE(holds(c.findings[0].message, "rank 0") && holds(c.findings[0].message, "checksum"))
      << c.findings[0].message;
}

// Two die, each by itself.
TEST(Records, OfRanksThatDieTheFirstIsNamedAndAllAreListed) {
  const RankMain main = [](RankHost& host, std::span<const std::byte>) -> std::vector<std::byte> {
    if (host.rank == 1 || host.rank == 2) raise(SIGKILL);
    return {};
  };
  const Judged j = planted::judge(planted::line_of(small, ""), {"forward", "ledger"}, main);
  ASSERT_EQ(j.result.checks.size(), 2u);
  for (const CheckResult& c : j.result.checks) {
    EXPECT_EQ(c.verdict, Verdict::crashed);
    EXPECT_EQ(c.findings.at(0).rank, 1);
    EXPECT_EQ(c.findings.at(0).ranks, (std::vector{1, 2}));
    EXPECT_TRUE(c.findings.at(0).message.starts_with("rank 1 ")) << c.findings.at(0).message;
  }
}

// ---- The harness under a rank

std::string no_judgement_of(const std::function<Judged()>& judge) {
  try {
    return std::string("judged: ") + name(judge().result.checks.at(0).verdict);
  } catch (const Infrastructure& e) {
    return e.what();
  }
}

TEST(Harness, WhatItThrowsOnARankIsNobodysFault) {
  const RankMain main = [](RankHost& host, std::span<const std::byte>) -> std::vector<std::byte> {
    if (host.rank == 2) throw Infrastructure("the record is too long");
    return {};
  };
  const std::string why = no_judgement_of(
      [&] { return planted::judge(planted::line_of(small, ""), {"forward"}, main); });
  EXPECT_EQ(why, "rank 2: the record is too long");
}

// The rank that could not leaves one behind that does not hear of it.
TEST(Harness, WhatItCouldNotDoOnOneRankLeavesNoOtherHanging) {
  const RankMain main = [](RankHost& host, std::span<const std::byte> bytes) {
    const Job job = parse_job(bytes);
    RankRecord record;
    record.rank = host.rank;
    record.number = job.number;
    record.shots.resize(job.shots.size());
    record.shots.at(0).status = ShotRecord::infrastructure;
    record.shots[0].text = "no communicator";
    while (for_ever && host.rank == 2) {
    }
    return serialize(record);
  };
  const std::string why = no_judgement_of(
      [&] { return planted::judge(planted::line_of(small, ""), {"forward"}, main, 0.03); });
  EXPECT_EQ(why, "no communicator");
}

Registry with_contracts(
    const std::vector<std::pair<std::string, std::function<void(Contract&)>>>& list) {
  Registry r;
  for (const auto& [name, change] : list) {
    Contract c = planted::registry().contract("mapping_reduce");
    c.name = name;
    c.family = "sample";
    c.illegal.clear();
    c.witnesses.clear();
    c.cases = [name = name](const std::string&) {
      return std::vector<std::string>{name + " tp=2 tokens=3 hidden=5"};
    };
    if (change) change(c);
    r.add(std::move(c));
    r.add(Subject{"", name, planted::forward(planted::reduced), planted::forward_only()});
  }
  return r;
}

// Memory that runs out where the kernel asks for some is the kernel's failure, elsewhere it is not.
TEST(Harness, MemoryThatItLacksIsNobodysFault) {
  Registry r = with_contracts({{"lacking",
                                [parent = getpid()](Contract& c) {
                                  c.operands = [of = c.operands, parent](const Case& line) {
                                    if (getpid() != parent) throw std::bad_alloc();
                                    return of(line);
                                  };
                                }},
                               {"sound", nullptr}});
  r.add(Subject{"greedy", "sound", []() -> std::unique_ptr<Kernel> { throw std::bad_alloc(); },
                planted::forward_only()});
  const Options options;
  Runner runner(options, r);
  const auto run = [&](const std::string& text) {
    const Case line = parse(text + " tp=2 tokens=3 hidden=5", r);
    return no_judgement_of([&] { return runner.run(line, {"forward"}, lane_of(line)); });
  };
  EXPECT_TRUE(holds(run("lacking"), "expected memory")) << run("lacking");
  EXPECT_EQ(run("sound subject=greedy"), "judged: failed");
  EXPECT_EQ(run("sound"), "judged: passed");
}

// The next line is not blamed on ranks that ended between two lines, and nothing replaces them
// without a word; the line behind it is judged.
TEST(Worlds, SayWhoseRankEndedAfterItsCase) {
  auto* pids = static_cast<std::atomic<pid_t>*>(
      mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  const Options options;
  Runner runner(
      options, planted::registry(),
      [=, honest = rank_main(planted::registry())](RankHost& host, std::span<const std::byte> job) {
        pids[host.rank] = getpid();
        return honest(host, job);
      });
  const Case line = planted::line_of(small, "");
  const auto judged = [&] {
    return no_judgement_of([&] { return runner.run(line, {"forward"}, lane_of(line)); });
  };
  const auto kill_rank = [&](int rank) {
    const pid_t victim = pids[rank];
    kill(victim, SIGKILL);
    siginfo_t info;
    waitid(P_PID, id_t(victim), &info, WEXITED | WNOWAIT);
    return fmt::format(
        "processes, 4 ranks: rank {} (process {}) was killed by signal 9 (SIGKILL) "
        "after its record of {} was in",
        rank, victim, print(line));
  };
  EXPECT_EQ(judged(), "judged: passed");
  runner.worlds().require_whole();
  std::string due = kill_rank(3);
  EXPECT_TRUE(holds(judged(), due)) << due;
  EXPECT_EQ(judged(), "judged: passed");
  due = kill_rank(1);
  std::string end;
  try {
    runner.worlds().require_whole();
  } catch (const Infrastructure& e) {
    end = e.what();
  }
  EXPECT_TRUE(holds(end, due)) << end;
  runner.worlds().require_whole();
  munmap(pids, 4096);
}

// ---- A gate goes on

Options plain(int jobs) {
  Options o;
  o.tier = "smoke";
  o.transports = {"processes"};
  o.controls = o.self = false;
  o.jobs = jobs;
  return o;
}

const CaseResult& of(const Report& report, const std::string& contract) {
  for (const CaseResult& c : report.cases)
    if (c.contract == contract) return c;
  throw std::runtime_error("no case of " + contract);
}

void ends(Contract& c, std::function<void()> how) {
  c.forward = [how = std::move(how)](const Case&, std::span<const Whole>,
                                     std::vector<Gauge>*) -> std::vector<Whole> {
    how();
    return {};
  };
}

void fails(Registry& r, const std::string& contract) {
  const std::string name = contract + "_off";
  Contract c = r.contract(contract);
  c.name = name;
  c.cases = [name](const std::string&) {
    return std::vector<std::string>{name + " tp=2 tokens=3 hidden=5"};
  };
  r.add(std::move(c));
  r.add(Subject{"", name, planted::forward(planted::own_block), planted::forward_only()});
}

TEST(AGate, KeepsItsVerdictsWhereOneCaseThrows) {
  Registry r = with_contracts(
      {{"sound", nullptr}, {"throws", [](Contract& c) {
                              ends(c, [] { throw std::runtime_error("a reference at odds"); });
                            }}});
  for (const int jobs : {1, 2}) {
    Progress silent;
    const Report report = run_gate(plain(jobs), r, silent);
    EXPECT_TRUE(report.complete);
    EXPECT_EQ(report.cases.size(), 2u);
    EXPECT_EQ(of(report, "sound").checks.at(0).verdict, Verdict::passed);
    for (const CheckResult& c : of(report, "throws").checks) {
      EXPECT_EQ(c.verdict, Verdict::untested);
      EXPECT_EQ(c.note, "a reference at odds");
    }
    EXPECT_EQ(exit_code(report), 3);
    EXPECT_EQ(report.lanes.at(0).reason, "a reference at odds");
  }
}

// A reduce over `hidden`, which must be even; what of it a contract gets wrong is in `lines`.
struct Lines {
  std::vector<std::string> cases, witnesses, illegal;
};
Registry at_odds_with_itself(const Lines& lines) {
  Registry r = with_contracts(
      {{"sound", nullptr}, {"odd", [lines](Contract& c) {
                              c.cases = [lines](const std::string&) { return lines.cases; };
                              c.witnesses = lines.witnesses;
                              c.illegal = lines.illegal;
                              c.precondition = [](const Case& line) -> std::optional<Rejected> {
                                if (line.at("hidden") % 2 == 0) return {};
                                return Rejected("hidden divisible by 2",
                                                "hidden=" + line.text("hidden"), "make it even");
                              };
                            }}});
  Subject refuses{"polite", "odd",
                  planted::forward([](Rank& rank, const View& in, const View& out) {
                    rank.require_legal();
                    planted::reduced(rank, in, out);
                  }),
                  planted::forward_only()};
  r.add(std::move(refuses));
  return r;
}

// A contract that refuses a line of its own: the judge cannot say anything there, and no subject is
// blamed, whether it refuses the line as well or takes it.
TEST(AGate, BlamesNoSubjectForALineThatItsContractRefuses) {
  const Registry r =
      at_odds_with_itself({{"odd tp=2 tokens=3 hidden=4", "odd tp=2 tokens=3 hidden=5"}, {}, {}});
  for (const char* subject : {"ours", "polite"}) {
    Options o = plain(1);
    o.subjects = {subject};
    Progress silent;
    const Report report = run_gate(o, r, silent);
    int untested = 0;
    for (const CaseResult& c : report.cases)
      for (const CheckResult& check : c.checks) {
        if (c.line.find("hidden=5") == c.line.npos || c.contract == "sound") {
          EXPECT_EQ(check.verdict, Verdict::passed) << c.line;
          continue;
        }
        ++untested;
        EXPECT_EQ(check.verdict, Verdict::untested) << c.line << check.check;
        EXPECT_EQ(check.note,
                  "odd refuses a line of its own, expected hidden divisible by 2, met hidden=5; "
                  "make it even; mend its lines or its precondition");
      }
    EXPECT_EQ(untested, 1);
    EXPECT_EQ(exit_code(report), 3);
    EXPECT_TRUE(holds(closing(report), "odd refuses a line of its own")) << closing(report);
    EXPECT_FALSE(holds(closing(report), "fail")) << closing(report);
  }
}

TEST(AGate, BlamesNoSubjectForAnIllegalLineThatItsContractTakes) {
  const Registry r = at_odds_with_itself(
      {{"odd tp=2 tokens=3 hidden=4"}, {}, {"odd tp=2 tokens=5 hidden=6", "odd tp=2 hidden=7"}});
  Options o = plain(1);
  o.subjects = {"polite"};
  Progress silent;
  const Report report = run_gate(o, r, silent);
  std::vector<std::string> told;
  for (const CaseResult& c : report.cases)
    for (const CheckResult& check : c.checks)
      if (check.check == "rejection") told.push_back(name(check.verdict) + (": " + check.note));
  std::sort(told.begin(), told.end());
  ASSERT_EQ(told.size(), 2u);
  EXPECT_TRUE(told[0].starts_with("passed")) << told[0];
  EXPECT_EQ(told[1],
            "untested: odd lists the line under `illegal`, and its precondition takes it; "
            "mend the contract");
  EXPECT_EQ(exit_code(report), 3);
}

// Operators are tried on witnesses: one that is refused is the contract's, too.
TEST(AGate, BlamesNoSubjectForAWitnessThatItsContractRefuses) {
  const Registry r =
      at_odds_with_itself({{"odd tp=2 tokens=3 hidden=4"}, {"odd tp=2 tokens=3 hidden=5"}, {}});
  Options o = plain(1);
  o.controls = true;
  o.subjects = {"polite"};
  Progress silent;
  const Report report = run_gate(o, r, silent);
  EXPECT_EQ(exit_code(report), 3);
  for (const CaseResult& c : report.cases)
    for (const CheckResult& check : c.checks)
      EXPECT_EQ(check.verdict,
                c.line.find("hidden=5") == c.line.npos ? Verdict::passed : Verdict::untested)
          << c.line;
}

// A reduce that reduces nothing.
Control off(const std::string& witness) {
  Control c;
  c.name = "off";
  c.contract = witness.substr(0, witness.find(' '));
  c.make = planted::forward(planted::own_block);
  c.declared = planted::forward_only();
  c.check = "forward";
  c.witness = witness;
  return c;
}

// A case that is due is the twin of what is compared with it: controls run no healthy kernel.
TEST(AGate, JudgesACaseOnceWhereItIsATwinToo) {
  Turns healthy;
  Registry r;
  Contract c = with_contracts({{"counted", nullptr}}).contract("counted");
  c.witnesses = c.cases("smoke");
  c.cases = [line = c.witnesses[0]](const std::string&) {
    return std::vector<std::string>{line, line + " fill=normal"};
  };
  r.add(std::move(c));
  const auto counts = [&](Rank& rank, const View& in, const View& out) {
    if (rank.line().text("fault").empty()) healthy.next();
    planted::reduced(rank, in, out);
  };
  r.add(Subject{"", "counted", planted::forward(counts), planted::forward_only()});
  r.add(off("counted tp=2 tokens=3 hidden=5"));
  size_t before = healthy.next();
  for (const char* tier : {"smoke", "ci"}) {
    Options o = plain(1);
    o.tier = tier;
    std::vector<size_t> runs;
    for (const bool controls : {false, true}) {
      o.controls = controls;
      Progress silent;
      const Report report = run_gate(o, r, silent);
      EXPECT_EQ(exit_code(report), 0) << closing(report);
      const size_t after = healthy.next();
      runs.push_back(after - before);
      before = after;
    }
    EXPECT_GT(runs[0], 1u);
    EXPECT_EQ(runs[0], runs[1]) << tier;
  }
}

// Where no case is due, tier smoke asks a twin what its controls are asked, every other tier all.
TEST(AGate, AsksATwinWhatItsControlsAreAsked) {
  Registry r;
  r.add(with_contracts({{"sound", nullptr}}).contract("sound"));
  const auto writes = [](Rank& rank, const View& in, const View& out) {
    planted::reduced(rank, in, out);
    if (rank.line().at("hidden") == 7) in.data[0] ^= std::byte(1);
  };
  r.add(Subject{"", "sound", planted::forward(writes), planted::forward_only()});
  r.add(off("sound tp=2 tokens=3 hidden=7"));
  for (const auto& [tier, code] : {std::pair("smoke", 0), {"ci", 1}}) {
    Options o = plain(1);
    o.controls = true;
    o.tier = tier;
    Progress silent;
    const Report report = run_gate(o, r, silent);
    EXPECT_EQ(exit_code(report), code) << tier << closing(report);
    const auto named = std::find_if(report.controls.begin(), report.controls.end(),
                                    [](const ControlResult& c) { return c.name == "off"; });
    ASSERT_NE(named, report.controls.end());
    EXPECT_EQ(named->outcome, code == 0 ? ControlResult::caught : ControlResult::unjudged);
  }
}

// Twins say nothing of a subject: words that leave them alone leave nothing, unless they are named.
TEST(AGate, IsNotLeftToItsTwinsAlone) {
  Registry r;
  r.add(with_contracts({{"sound", nullptr}}).contract("sound"));
  r.add(Subject{"", "sound", planted::forward(planted::reduced), planted::forward_only()});
  r.add(off("sound tp=2 tokens=3 hidden=7 dtype=f32"));
  Options o = plain(1);
  o.controls = true;
  o.patterns = {"sound", "control=off"};
  EXPECT_EQ(plan_gate(o, r).size(), 1u);
  o.patterns = {"sound"};
  o.dtypes = {"f32"};
  try {
    ADD_FAILURE() << "expected a refusal, met " << plan_gate(o, r).size() << " lines";
  } catch (const BadInput& refused) {
    for (const char* part : {"no case is left by --dtype f32 beside sound", "(there: dtype f64)"})
      EXPECT_TRUE(holds(refused.what(), part)) << refused.what();
  }
}

// Without its healthy twin a control says nothing; no code is said to fail.
// The outcome of a named control on a reduce, in a tier.
ControlResult::Outcome outcome_of(Control broken, const std::string& tier) {
  Registry r;
  r.add(with_contracts({{"sound", nullptr}}).contract("sound"));
  r.add(Subject{"", "sound", planted::forward(planted::reduced), planted::forward_only()});
  r.add(std::move(broken));
  Options o = plain(1);
  o.controls = true;
  o.tier = tier;
  Progress silent;
  for (const ControlResult& c : run_gate(o, r, silent).controls)
    if (c.name == "off") return c.outcome;
  ADD_FAILURE() << "expected the control";
  return ControlResult::unjudged;
}

// A check that has to be silent is asked in tier smoke, too.
TEST(AGate, AsksTheChecksThatMustBeSilent) {
  Control writes = off("sound tp=2 tokens=3 hidden=7");
  writes.make = planted::forward([](Rank& rank, const View& in, const View& out) {
    planted::own_block(rank, in, out);
    in.data[0] ^= std::byte(1);
  });
  for (const char* tier : {"smoke", "ci"}) {
    EXPECT_EQ(outcome_of(writes, tier), ControlResult::caught) << tier;
    Control silent = writes;
    silent.silent = "memory";
    EXPECT_EQ(outcome_of(std::move(silent), tier), ControlResult::wrong_check) << tier;
  }
}

// What a subject throws may be longer than a page of a report.
TEST(Records, HoldTheBeginOfALongMessage) {
  const Registry sound = with_contracts({{"sound", nullptr}});
  Registry r;
  r.add(sound.contract("sound"));
  r.add(Subject{"", "sound", planted::forward([](Rank&, const View&, const View&) {
                  throw std::runtime_error("lost " + std::string(100'000, 'z'));
                }),
                planted::forward_only()});
  Progress silent;
  const Report report = run_gate(plain(1), r, silent);
  ASSERT_EQ(report.cases.size(), 1u);
  size_t told = 0;
  for (const CheckResult& check : report.cases[0].checks)
    for (const Finding& f : check.findings) {
      EXPECT_LT(f.message.size(), 5000u) << check.check;
      told += holds(f.message, "lost zzz") && holds(f.message, "zzz... (100005 bytes)");
    }
  EXPECT_GT(told, 0u);
}

// What is under way is known to whoever waits, of this process and of its jobs.
struct Heard final : Progress {
  void begun(int64_t process, const std::string& line) override {
    processes.insert(process);
    running.erase(process);
    if (!line.empty()) running.insert(process);
    lines.push_back(line);
  }
  void done(const CaseResult&) override { running.erase(0); }
  void tick() override { ticks_in_a_case += running.contains(0); }
  std::set<int64_t> processes, running;
  Checks lines;
  int ticks_in_a_case = 0;
};
TEST(AGate, TellsWhatItRuns) {
  const Registry r = with_contracts({{"first", nullptr}, {"second", nullptr}});
  Heard here, jobs;
  run_gate(plain(1), r, here);
  EXPECT_EQ(here.lines, (Checks{"first tp=2 tokens=3 hidden=5", "second tp=2 tokens=3 hidden=5"}));
  EXPECT_EQ(here.processes, std::set<int64_t>{0});
  EXPECT_GE(here.ticks_in_a_case, 2);
  run_gate(plain(2), r, jobs);
  for (const std::string& each : here.lines)
    EXPECT_EQ(std::count(jobs.lines.begin(), jobs.lines.end(), each), 1) << each;
  EXPECT_FALSE(jobs.processes.contains(0));
  EXPECT_EQ(jobs.running, std::set<int64_t>{}) << "a job that has ended runs nothing";
}

// One that is right in its first run, on both ranks, is told as that one shows it.
TEST(AGate, GivesABrokenRunNoSecondChance) {
  const auto runs = std::make_shared<Turns>();
  Control late = off("sound tp=2 tokens=3 hidden=7");
  late.make = planted::forward([runs](Rank& rank, const View& in, const View& out) {
    runs->next() < 2 ? planted::reduced(rank, in, out) : planted::own_block(rank, in, out);
  });
  EXPECT_EQ(outcome_of(late, "smoke"), ControlResult::escaped);
  EXPECT_EQ(outcome_of(late, "smoke"), ControlResult::caught);
}

Report with_controls(const Registry& r, const std::string& tier = "ci") {
  Options o = plain(1);
  o.controls = true;
  o.tier = tier;
  Progress silent;
  return run_gate(o, r, silent);
}

const ControlResult& named_control(const Report& report, const std::string& name) {
  for (const ControlResult& c : report.controls)
    if (c.name == name) return c;
  throw std::runtime_error("no control " + name);
}

Registry sound_with(const Control& control, Declared declared = planted::forward_only()) {
  Registry r;
  r.add(with_contracts({{"sound", nullptr}}).contract("sound"));
  r.add(Subject{"", "sound", planted::forward(planted::reduced), declared});
  r.add(control);
  return r;
}

// Where code of its family fails by itself, a control that shows nothing of its own may have met
// that, and the failure is what is told.
TEST(AGate, BlamesTheFailureOfAFamilyForWhatItsControlsDoNotShow) {
  Control idle = off("sound tp=2 tokens=3 hidden=7"), noisy = idle;
  idle.make = planted::forward(planted::reduced);
  noisy.silent = "memory";
  noisy.make = planted::forward([](Rank& rank, const View& in, const View& out) {
    planted::own_block(rank, in, out);
    in.data[0] ^= std::byte(1);
  });
  for (const auto& [control, alone] :
       {std::pair{idle, ControlResult::escaped}, {noisy, ControlResult::wrong_check}}) {
    Registry r = sound_with(control);
    const Report healthy = with_controls(r);
    EXPECT_EQ(named_control(healthy, "off").outcome, alone);
    EXPECT_EQ(exit_code(healthy), 3);
    fails(r, "sound");
    const Report failing = with_controls(r);
    const ControlResult& open = named_control(failing, "off");
    EXPECT_EQ(open.outcome, ControlResult::unjudged);
    EXPECT_TRUE(holds(open.reason, "sound_off tp=2 tokens=3 hidden=5 fails by itself"))
        << open.reason;
    EXPECT_EQ(exit_code(failing), 1) << closing(failing);
  }
}

// However many controls are compared with it.
TEST(AGate, TellsATwinThatFailsOnce) {
  Registry r;
  r.add(with_contracts({{"sound", nullptr}}).contract("sound"));
  r.add(Subject{"", "sound", planted::forward([](Rank& rank, const View& in, const View& out) {
                  rank.line().at("hidden") == 7 ? planted::own_block(rank, in, out)
                                                : planted::reduced(rank, in, out);
                }),
                planted::forward_only()});
  Control first = off("sound tp=2 tokens=3 hidden=7"), second = first;
  second.name = "off_too";
  r.add(first);
  r.add(second);
  const Report report = with_controls(r);
  EXPECT_EQ(std::count_if(report.cases.begin(), report.cases.end(),
                          [](const CaseResult& c) { return holds(c.line, "hidden=7"); }),
            1);
  for (const char* control : {"off", "off_too"})
    EXPECT_EQ(named_control(report, control).outcome, ControlResult::unjudged);
  EXPECT_EQ(exit_code(report), 1);
}

// Tier smoke asks a twin what its controls are shown to, and where that fails all that is due.
TEST(AGate, TellsAllThatFailsOfATwin) {
  Registry r;
  r.add(with_contracts({{"sound", nullptr}}).contract("sound"));
  r.add(Subject{"", "sound", planted::forward([](Rank& rank, const View& in, const View& out) {
                  planted::own_block(rank, in, out);
                  in.data[0] ^= std::byte(1);
                }),
                planted::forward_only()});
  r.add(off("sound tp=2 tokens=3 hidden=7"));
  const Report report = with_controls(r, "smoke");
  const auto twin = std::find_if(report.cases.begin(), report.cases.end(),
                                 [](const CaseResult& c) { return holds(c.line, "hidden=7"); });
  ASSERT_NE(twin, report.cases.end());
  for (const char* check : {"forward", "memory"}) {
    const CheckResult* asked = gating::result_of(*twin, check);
    ASSERT_TRUE(asked) << check;
    EXPECT_EQ(asked->verdict, Verdict::failed) << check;
  }
}

// A reference that is wrong is no subject's failure.
TEST(AGate, BlamesNoSubjectWhereTheReferenceHasNoNumber) {
  const Registry r =
      with_contracts({{"lost", [](Contract& c) {
                         c.forward = [of = c.forward](const Case& line, std::span<const Whole> x,
                                                      std::vector<Gauge>* g) {
                           auto y = of(line, x, g);
                           y[0].value.data()[0] = std::nan("");
                           return y;
                         };
                       }}});
  Progress silent;
  const Report report = run_gate(plain(1), r, silent);
  const CheckResult& forward = of(report, "lost").checks.at(0);
  EXPECT_EQ(forward.verdict, Verdict::untested);
  EXPECT_TRUE(holds(forward.note, "the reference is not finite: expected numbers in y"))
      << forward.note;
  EXPECT_EQ(exit_code(report), 3);
}

// Calls that do not pass the door cannot be broken there.
TEST(AGate, BreaksNoCallsOfASubjectThatTalksByItself) {
  const Control broken = off("sound tp=2 tokens=3 hidden=7");
  const auto operators = [](const Report& report) {
    return std::count_if(report.controls.begin(), report.controls.end(),
                         [](const ControlResult& c) { return !c.kind.empty(); });
  };
  EXPECT_GT(operators(with_controls(sound_with(broken))), 0);
  Declared by_itself = planted::forward_only();
  by_itself.own_communication = true;
  EXPECT_EQ(operators(with_controls(sound_with(broken, by_itself))), 0);
}

// A failing case runs again, to say whether it always fails.
TEST(AGate, SaysWhetherAFailureIsSteady) {
  for (const bool always : {true, false}) {
    Registry r;
    r.add(with_contracts({{"sound", nullptr}}).contract("sound"));
    const auto runs = std::make_shared<Turns>();
    r.add(Subject{"", "sound",
                  planted::forward([runs, always](Rank& rank, const View& in, const View& out) {
                    always || runs->next() < 2 ? planted::own_block(rank, in, out)
                                               : planted::reduced(rank, in, out);
                  }),
                  planted::forward_only()});
    Progress silent;
    const Report report = run_gate(plain(1), r, silent);
    EXPECT_EQ(exit_code(report), 1);
    EXPECT_TRUE(of(report, "sound").steady_known);
    EXPECT_EQ(of(report, "sound").steady, always);
  }
}

// What an earlier case left in a process is no steady failure of this one.
TEST(AGate, SaysWhetherAFailureIsSteadyFromAFreshWorld) {
  Registry r;
  Contract c = with_contracts({{"sound", nullptr}}).contract("sound");
  c.cases = [line = c.cases("smoke")[0]](const std::string&) {
    return Checks{line, line + " fill=normal"};
  };
  r.add(std::move(c));
  r.add(Subject{"", "sound", planted::forward([](Rank& rank, const View& in, const View& out) {
                  static bool spoilt = false;
                  spoilt = spoilt || rank.line().text("fill") == "integers";
                  spoilt&& rank.line().text("fill") == "normal" ? planted::own_block(rank, in, out)
                                                                : planted::reduced(rank, in, out);
                }),
                planted::forward_only()});
  Progress silent;
  const Report report = run_gate(plain(1), r, silent);
  ASSERT_EQ(report.cases.size(), 2u);
  EXPECT_EQ(exit_code(report), 1);
  EXPECT_TRUE(report.cases[1].steady_known);
  EXPECT_FALSE(report.cases[1].steady);
}

// One that hung once more would cost its deadline for a word.
TEST(AGate, RunsWhatHungNoSecondTime) {
  Registry r = with_contracts({{"sound", nullptr}});
  r.add(Subject{"hangs", "sound", planted::forward([](Rank&, const View&, const View&) {
                  while (for_ever) usleep(1000);
                }),
                planted::forward_only()});
  Options o = plain(1);
  o.subjects = {"hangs"};
  o.deadline_scale = 0.01;
  Progress silent;
  const Report report = run_gate(o, r, silent);
  ASSERT_EQ(report.cases.size(), 1u);
  EXPECT_EQ(report.cases[0].checks.at(0).verdict, Verdict::hung);
  EXPECT_FALSE(report.cases[0].steady_known);
}

// Of a rank that crashed and one that threw, the first is why the other counts for nothing.
TEST(AGate, BlamesWhoDiedBeforeWhoThrew) {
  Registry r;
  r.add(with_contracts({{"sound", nullptr}}).contract("sound"));
  const auto made = std::make_shared<Turns>();
  r.add(Subject{"", "sound",
                [made]() -> std::unique_ptr<Kernel> {
                  if (made->next() == 0) throw 42;
                  std::abort();
                },
                planted::forward_only()});
  Progress silent;
  const Report report = run_gate(plain(1), r, silent);
  const Finding& f = of(report, "sound").checks.at(0).findings.at(0);
  EXPECT_TRUE(holds(f.message, "SIGABRT")) << f.message;
  EXPECT_EQ(f.ranks, std::vector<int>{f.rank});
  const Checks& state = of(report, "sound").state;
  EXPECT_TRUE(std::any_of(state.begin(), state.end(), [&](const std::string& line) {
    return holds(line, fmt::format("rank {} ", 1 - f.rank)) && holds(line, " threw: ");
  })) << testing::PrintToString(state);
}

// A lane is proven by what ran on it, and an escape ends a run that is to end at the first failure.
TEST(AGate, ThatStopsEarlyProvesNoLaneThatItDidNotReach) {
  Registry r =
      with_contracts({{"first", nullptr}, {"second", [](Contract& c) {
                                             c.cases = [](const std::string&) {
                                               return Checks{"second tp=3 tokens=3 hidden=6"};
                                             };
                                           }}});
  r.add(Subject{"off", "first", planted::forward(planted::own_block), planted::forward_only()});
  r.add(Subject{"off", "second", planted::forward(planted::own_block), planted::forward_only()});
  Options o = plain(1);
  o.subjects = {"off"};
  o.fail_fast = true;
  Progress silent;
  const Report report = run_gate(o, r, silent);
  EXPECT_EQ(report.cases.size(), 1u);
  const auto lane = [&](const std::string& name) {
    return *std::find_if(report.lanes.begin(), report.lanes.end(),
                         [&](const Lane& l) { return l.name == name; });
  };
  EXPECT_TRUE(lane("processes.np2").proven);
  EXPECT_FALSE(lane("processes.np3").proven);
  EXPECT_EQ(lane("processes.np3").reason, "no case of it ran");
}
TEST(AGate, StopsAtAControlThatEscapes) {
  Control idle = off("sound tp=2 tokens=3 hidden=7"), next = idle;
  idle.make = planted::forward(planted::reduced);
  next.name = "next";
  Registry r = sound_with(idle);
  r.add(next);
  Options o = plain(1);
  o.controls = o.fail_fast = true;
  Progress silent;
  const Report report = run_gate(o, r, silent);
  ASSERT_EQ(report.controls.size(), 1u);
  EXPECT_EQ(report.controls[0].outcome, ControlResult::escaped);
  EXPECT_FALSE(report.complete);
}

// However long each takes.
TEST(AGate, ReportsInTheOrderOfWhatIsDue) {
  Registry r = with_contracts({{"first", nullptr}, {"second", nullptr}});
  for (const char* contract : {"first", "second"})
    r.add(Subject{"slow", contract,
                  planted::forward([](Rank& rank, const View& in, const View& out) {
                    if (rank.line().contract == "first") usleep(100'000);
                    planted::reduced(rank, in, out);
                  }),
                  planted::forward_only()});
  Options o = plain(2);
  o.subjects = {"slow"};
  o.checks = {"forward"};
  Heard heard;
  const Report report = run_gate(o, r, heard);
  ASSERT_EQ(report.cases.size(), 2u);
  EXPECT_EQ(report.cases[0].contract, "first");
}

// A process of the judge's own tests that ends is the judge's failure and takes no case with it.
TEST(AGate, KnowsThatAnOwnTestWasLost) {
  Registry r = with_contracts({{"sound", nullptr}});
  r.add(Planted{"ends", [](double) -> std::string { _exit(0); }});
  Options o = plain(1);
  o.self = true;
  Progress silent;
  const Report report = run_gate(o, r, silent);
  EXPECT_EQ(exit_code(report), 3);
  EXPECT_EQ(report.missing, "");
  ASSERT_FALSE(report.self.failures.empty());
  EXPECT_TRUE(holds(report.self.failures[0], "ended before it was through"))
      << report.self.failures[0];
  EXPECT_EQ(of(report, "sound").checks.at(0).verdict, Verdict::passed);
}

TEST(AGate, LeavesAControlOpenWhereItsTwinThrows) {
  Registry r = with_contracts({{"throws", [](Contract& c) {
                                  ends(c, [] { throw std::runtime_error("a reference at odds"); });
                                }}});
  r.add(off("throws tp=2 tokens=3 hidden=5"));
  Options o = plain(1);
  o.controls = true;
  Progress silent;
  const Report report = run_gate(o, r, silent);
  ASSERT_EQ(report.controls.size(), 1u);
  EXPECT_EQ(report.controls[0].outcome, ControlResult::unjudged);
  EXPECT_EQ(report.controls[0].reason, "the healthy twin could not be judged: a reference at odds");
  EXPECT_EQ(exit_code(report), 3);
  EXPECT_FALSE(holds(closing(report), "healthy code fails")) << closing(report);
}

TEST(AGate, KeepsItsVerdictsWhereAProcessOfItEnds) {
  const Registry r = with_contracts(
      {{"sound", nullptr}, {"ends", [](Contract& c) { ends(c, [] { _exit(7); }); }}});
  Progress silent;
  const Report report = run_gate(plain(2), r, silent);
  EXPECT_FALSE(report.complete);
  EXPECT_EQ(of(report, "sound").checks.at(0).verdict, Verdict::passed);
  const CheckResult& lost = of(report, "ends").checks.at(0);
  EXPECT_EQ(lost.verdict, Verdict::untested);
  EXPECT_TRUE(holds(lost.note, "ended before it was through, with status 7")) << lost.note;
  EXPECT_EQ(exit_code(report), 3);
}

TEST(AGate, KnowsOfTheControlsThatWereLostWithAProcess) {
  Registry r = with_contracts(
      {{"sound", nullptr}, {"ends", [](Contract& c) { ends(c, [] { _exit(7); }); }}});
  r.add(off("ends tp=2 tokens=3 hidden=5"));
  Options o = plain(2);
  o.controls = true;
  Progress silent;
  const Report report = run_gate(o, r, silent);
  const ControlResult& lost = named_control(report, "off");
  EXPECT_EQ(lost.outcome, ControlResult::unjudged);
  EXPECT_TRUE(holds(lost.reason, "due, and left no record")) << lost.reason;
  EXPECT_EQ(lost.expected_check, "forward");
  EXPECT_FALSE(report.complete);
  EXPECT_EQ(exit_code(report), 3);
}

TEST(AGate, StopsEverywhereAtTheFirstFailure) {
  constexpr int many = 100;
  Registry r = with_contracts(
      {{"slow", [](Contract& c) {
          c.cases = [](const std::string&) {
            std::vector<std::string> lines;
            for (int seed = 1; seed <= many; ++seed)
              lines.push_back("slow tp=2 tokens=3 hidden=5 seed=" + std::to_string(seed));
            return lines;
          };
          c.forward = [of = c.forward](const Case& line, std::span<const Whole> x,
                                       std::vector<Gauge>* g) {
            std::this_thread::sleep_for(std::chrono::milliseconds(100));
            return of(line, x, g);
          };
        }}});
  fails(r, "slow");
  Options o = plain(2);
  o.fail_fast = true;
  Progress silent;
  const Report report = run_gate(o, r, silent);
  EXPECT_EQ(exit_code(report), 1);
  EXPECT_LT(report.cases.size(), size_t(many));
}

// A part that goes on as if nothing had come, as one does that computes: what it had judged before
// is kept, and it is not waited for.
int interrupted_parts() {
  struct Kept final : ResultSink {
    using ResultSink::put;
    void put(const CaseResult& r) override { line = r.line; }
    std::string line;
  };
  catch_interrupts();
  const auto kept = std::make_shared<Kept>();
  const auto work = [](ResultSink& sink) {
    CaseResult r;
    r.line = "judged before";
    sink.put(r);
    for (;;) pause();
  };
  bool sent = false;
  const auto lost = run_parts({{work, kept}}, [&] {
    if (!sent && !kept->line.empty()) sent = raise(SIGTERM) == 0;
  });
  return interrupted() && kept->line == "judged before" && lost[0].empty() ? 42 : 1;
}

TEST(AGate, WaitsForNoComputationOnceInterrupted) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(30);
    _exit(interrupted_parts());
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_TRUE(WIFEXITED(status)) << "ended by signal " << WTERMSIG(status);
  EXPECT_EQ(WEXITSTATUS(status), 42);
}

// A process that somebody stops, in the middle of what it sends or between two results, while
// nobody stops the gate: it is named with its line, and the others go on.
TEST(AGate, NamesAJobThatIsStopped) {
  struct Kept final : ResultSink {
    using ResultSink::put;
    void put(const CaseResult& r) override { lines.insert(r.line.substr(0, 6)); }
    void put(const Begun& b) override { process = b.process; }
    std::set<std::string> lines;
    int64_t process = 0;
  };
  const auto stops = std::make_shared<Kept>(), goes_on = std::make_shared<Kept>();
  const auto stop = [](ResultSink& sink) {
    sink.put(Begun{getpid(), "linear_row tp=2"});
    raise(SIGSTOP);
  };
  // A pipe holds less than that.
  const auto stop_in_a_word = [](ResultSink& sink) {
    sink.put(Begun{getpid(), "linear_column tp=2"});
    std::thread([] {
      usleep(100'000);
      kill(getpid(), SIGSTOP);
    }).detach();
    CaseResult r;
    r.line.assign(size_t(4) << 20, 'x');
    for (;;) sink.put(r);
  };
  const auto work = [](ResultSink& sink) {
    CaseResult r;
    r.line = "judged";
    sink.put(r);
  };
  const auto lost = run_parts(
      {{stop, stops}, {stop_in_a_word, std::make_shared<ResultSink>()}, {work, goes_on}}, [] {});
  EXPECT_TRUE(holds(lost[0], ") was stopped by SIGSTOP in linear_row tp=2 and nobody")) << lost[0];
  EXPECT_TRUE(holds(lost[1], ") was stopped by SIGSTOP in linear_column tp=2 and nobody"))
      << lost[1];
  EXPECT_EQ(lost[2], "");
  EXPECT_TRUE(goes_on->lines.contains("judged"));
}

// Ctrl-Z, and fg after longer than a stopped job is waited for.
TEST(AGate, ThatIsStoppedAsAWholeGoesOn) {
  int begun[2], over[2];
  ASSERT_EQ(pipe(begun), 0);
  ASSERT_EQ(pipe(over), 0);
  const pid_t gate = fork();
  if (gate == 0) {
    setpgid(0, 0);
    alarm(60);
    const auto work = [&](ResultSink&) {
      (void)!write(begun[1], "x", 1);
      char c = 0;
      (void)!read(over[0], &c, 1);
    };
    const auto lost = run_parts({{work, std::make_shared<ResultSink>()}}, [] {});
    _exit(lost[0].empty() ? 42 : 1);
  }
  char c = 0;
  ASSERT_EQ(read(begun[0], &c, 1), 1);  // the part is at work
  kill(-gate, SIGSTOP);
  int status = 0;
  waitpid(gate, &status, WUNTRACED);
  EXPECT_TRUE(WIFSTOPPED(status));
  std::this_thread::sleep_for(std::chrono::seconds(6));
  kill(-gate, SIGCONT);
  std::this_thread::sleep_for(std::chrono::seconds(1));
  ASSERT_EQ(write(over[1], "x", 1), 1);
  waitpid(gate, &status, 0);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 42);
  for (const int end : {begun[0], begun[1], over[0], over[1]}) close(end);
}

TEST(Turns, AStopIsSeenByEveryProcess) {
  struct Seen final : ResultSink {
    using ResultSink::put;
    void put(const CaseResult& r) override { stopped = r.steady; }
    bool stopped = false;
  };
  const auto seen = std::make_shared<Seen>();
  Turns turns;
  const auto stop = [&](ResultSink&) { turns.stop(); };
  const auto wait = [&](ResultSink& sink) {
    for (int i = 0; i < 10000 && !turns.stopped(); ++i) usleep(1000);
    CaseResult r;
    r.steady = turns.stopped();
    sink.put(r);
  };
  const auto lost = run_parts({{stop, seen}, {wait, seen}}, [] {});
  EXPECT_EQ(lost, (std::vector<std::string>{"", ""}));
  EXPECT_TRUE(seen->stopped);
}

}  // namespace trust_test
}  // namespace
}  // namespace shardproof
