// The tensors of a failing case, read back: what was fed, what came out and what is true fit
// together as the contract says, global and per rank.
#include <fcntl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <functional>
#include <set>
#include <sstream>

#include "oracle/dump.hpp"
#include "oracle/gate.hpp"
#include "oracle/interrupt.hpp"
#include "oracle/registry.hpp"
#include "oracle/tensors/safetensors.hpp"

namespace shardproof {
namespace {
namespace dump_test {

namespace fs = std::filesystem;
using tensors::SafetensorsFile;

const Registry& registry() {
  static const Registry r = all_families();
  return r;
}

class Dump : public testing::Test {
 protected:
  Dump() {
    std::string name = fs::temp_directory_path() / "dump_test_XXXXXX";
    folder_ = mkdtemp(name.data());
    options_.dump = folder_;
    options_.program = "shardproof";
  }
  ~Dump() override { fs::remove_all(folder_); }

  Report run(const std::string& line) {
    Progress silent;
    return run_line(parse(line, registry()), options_, registry(), silent);
  }
  std::vector<fs::path> folders() const {
    std::vector<fs::path> all;
    for (const auto& entry : fs::directory_iterator(folder_)) all.push_back(entry.path());
    return all;
  }
  std::string file(const std::string& name) const { return folders().at(0) / name; }

  fs::path folder_;
  Options options_;
};

std::vector<double> values(const SafetensorsFile& f, const std::string& name) {
  const tensors::FileTensor* t = f->find(name);
  if (!t) throw std::out_of_range(name);
  std::vector<double> list;
  for (size_t at = 0; at < t->bytes.size(); at += size_of(*t->dtype))
    list.push_back(load(t->bytes.data() + at, *t->dtype));
  return list;
}
std::vector<double> times(double factor, std::vector<double> list) {
  for (double& v : list) v *= factor;
  return list;
}
// Columns [from, to) of a row-major matrix.
std::vector<double> columns(const std::vector<double>& whole, size_t width, size_t from,
                            size_t to) {
  std::vector<double> part;
  for (size_t row = 0; row < whole.size() / width; row++)
    part.insert(part.end(), whole.begin() + std::ptrdiff_t(row * width + from),
                whole.begin() + std::ptrdiff_t(row * width + to));
  return part;
}

// The row linear cuts x [tokens, in] along `in`; its twin sums the bias gradient p times.
TEST_F(Dump, HoldsWhatWasFedWhatCameOutAndWhatIsTrue) {
  const Report report =
      run("linear_row tp=2 tokens=4 in=6 out=3 control=row_bias_gradient_times_p sp=on");
  ASSERT_EQ(folders().size(), 1u);
  EXPECT_EQ(report.dumped, "1 of 1 case that did not pass, in " + folder_.string());
  const SafetensorsFile global(file("global.safetensors"));
  EXPECT_EQ(global->metadata().at("line"), report.cases[0].canonical);
  EXPECT_EQ(global->find("x")->shape, (std::vector<int64_t>{4, 6}));
  EXPECT_EQ(values(global, "got.y"), values(global, "want.y"));
  EXPECT_EQ(values(global, "got.grad.b"), times(2, values(global, "want.grad.b")));
  // y = x W^T + b from what was fed, so `want` is the truth and not what came out.
  const auto x = values(global, "x"), w = values(global, "w"), b = values(global, "b"),
             y = values(global, "want.y");
  for (size_t i = 0; i < 4; i++)
    for (size_t j = 0; j < 3; j++) {
      double sum = b[j];
      for (size_t k = 0; k < 6; k++) sum += x[i * 6 + k] * w[j * 6 + k];
      EXPECT_EQ(y[i * 3 + j], sum);
    }
  std::vector<double> rows;
  for (const size_t rank : {0, 1}) {
    const SafetensorsFile own(file(fmt::format("rank{}.safetensors", rank)));
    EXPECT_EQ(values(own, "x"), columns(x, 6, 3 * rank, 3 * rank + 3));
    EXPECT_EQ(values(own, "want.y"), values(own, "got.y"));
    const auto part = values(own, "got.y");  // sp=on: rows of y
    rows.insert(rows.end(), part.begin(), part.end());
  }
  EXPECT_EQ(rows, y);
  std::ostringstream finding;
  finding << std::ifstream(file("finding.txt")).rdbuf();
  EXPECT_TRUE(finding.str().starts_with("FAILED     linear_row tp=2 ")) << finding.str();
}

// R -> P: the value is due on one rank only, and what the ranks return is summed. The twin returns
// it on every rank.
TEST_F(Dump, PartialResultsAreSummedAndNoRankIsDueAPart) {
  run("mapping_replicate_to_partial tp=2 tokens=2 hidden=3 control=counted_on_every_rank");
  const SafetensorsFile global(file("global.safetensors")), own(file("rank1.safetensors"));
  EXPECT_EQ(values(global, "want.y"), values(global, "x"));
  EXPECT_EQ(values(global, "got.y"), times(2, values(global, "x")));
  EXPECT_EQ(own->find("want.y"), nullptr);
  EXPECT_EQ(values(own, "got.y"), values(own, "x"));
}

TEST_F(Dump, OfACaseThatPassesIsNothing) {
  EXPECT_EQ(run("linear_row tp=2").dumped, "");
  EXPECT_TRUE(folders().empty());
}

// A rank that died returned nothing; what it was fed is what one wants then.
TEST_F(Dump, OfARankThatDiedHoldsWhatItWasFed) {
  Runner runner(options_, registry());
  const Case line = parse("linear_row tp=2 tokens=4", registry());
  Judged j = runner.run(line, {"forward"}, "processes.np2");
  j.evidence.ranks.clear();
  Dumps dumps(folder_);
  dumps.add(j, runner.truth(j.evidence), "shardproof");
  const SafetensorsFile global(file("global.safetensors")), own(file("rank0.safetensors"));
  EXPECT_TRUE(global->find("want.y") && own->find("x") && own->find("grad.y"));
  EXPECT_FALSE(global->find("got.y") || own->find("got.y"));
}

// Rank 1 of two died: its rows are no numbers, the others are there.
TEST_F(Dump, WhatNoRankReturnedIsNaN) {
  Runner runner(options_, registry());
  const Case line = parse("linear_row tp=2 tokens=4 in=6 out=3 sp=on", registry());
  Judged j = runner.run(line, {"forward"}, "processes.np2");
  j.evidence.ranks[1].shots[0].results.clear();
  Dumps dumps(folder_);
  dumps.add(j, runner.truth(j.evidence), "shardproof");
  const SafetensorsFile global(file("global.safetensors"));
  const auto got = values(global, "got.y"), want = values(global, "want.y");
  for (size_t i = 0; i < 12; ++i)
    EXPECT_TRUE(i < 6 ? got[i] == want[i] : std::isnan(got[i])) << i << ": " << got[i];
}

// Ids are no numbers of a half type.
TEST_F(Dump, IndicesKeepTheirType) {
  run("vocab_embedding tp=2 vocab=600 dtype=bf16 control=mask_left_out");
  for (const char* name : {"global.safetensors", "rank0.safetensors"}) {
    const SafetensorsFile f(file(name));
    EXPECT_EQ(f->find("ids")->dtype, DType::i64) << name;
    EXPECT_EQ(f->find("w")->dtype, DType::bf16) << name;
  }
}

struct Nothing : Kernel {
  std::unique_ptr<Saved> forward(Rank& rank, std::span<const View>,
                                 std::span<const View> outputs) override {
    rank.require_legal();
    for (const View& y : outputs) fill_from(y, std::vector<double>(size_t(y.elements())));
    return std::make_unique<Saved>();
  }
  void backward(Rank&, Saved&, std::span<const View>, std::span<const View>) override {}
};

template <class K>
Registry with_subject(const char* name) {
  Registry families = all_families();
  Subject subject;
  subject.name = name, subject.contract = "linear_column";
  subject.make = [] { return std::make_unique<K>(); };
  families.add(subject);
  return families;
}

// Lines that a gate runs for their controls alone fail like any other.
TEST_F(Dump, IsOfEveryCaseThatAGateTellsOf) {
  const Registry families = with_subject<Nothing>("nothing");
  options_.patterns = {"linear_column sp=on"};
  options_.ranks = {2, 3};  // on 3 there are witnesses of controls and no cases
  options_.tier = "smoke";
  options_.self = false;
  Progress silent;
  const Report report = run_gate(options_, families, silent);
  int64_t failed = 0;
  for (const CaseResult& c : report.cases)
    failed += std::any_of(c.checks.begin(), c.checks.end(), [](const CheckResult& check) {
      return check.check == "forward" && check.verdict == Verdict::failed;
    });
  ASSERT_GT(failed, 1);
  EXPECT_EQ(report.dumped,
            fmt::format("{0} of {0} cases that did not pass, in {1}", failed, folder_.string()));
  EXPECT_EQ(int64_t(folders().size()), failed);
}

TEST_F(Dump, IsBoundedAndSaysSo) {
  Runner runner(options_, registry());
  const Case line = parse("linear_row tp=2 tokens=4", registry());
  Judged j = runner.run(line, {"forward"}, "processes.np2");
  Dumps dumps(folder_);
  for (int i = 0; i < Dumps::most_cases + 3; i++) {
    j.result.canonical = "linear_row " + std::to_string(i);
    dumps.add(j, runner.truth(j.evidence), "shardproof");
  }
  EXPECT_EQ(folders().size(), size_t(Dumps::most_cases));
  EXPECT_EQ(dumps.told(), "20 of 23 cases that did not pass, in " + folder_.string() +
                              "; at most 20 are written");
}

// Its first tensors are longer than the files that it may write.
pid_t killed_while_it_writes(const std::function<void()>& dump) {
  const pid_t writer = fork();
  if (writer == 0) {
    std::signal(SIGXFSZ, SIG_DFL);
    const rlimit few{1000, 1000};
    setrlimit(RLIMIT_FSIZE, &few);
    dump();
    _exit(0);
  }
  int status = 0;
  waitpid(writer, &status, 0);
  EXPECT_TRUE(WIFSIGNALED(status));
  return writer;
}

// What a process had begun that was killed goes with the run, and is said.
TEST_F(Dump, HoldsWholeFoldersAndNoOthers) {
  Runner runner(options_, registry());
  const Case line = parse("linear_row tp=2 tokens=200", registry());
  Judged j = runner.run(line, {"forward"}, "processes.np2");
  const Truth& truth = runner.truth(j.evidence);
  {
    Dumps dumps(folder_);
    dumps.add(j, truth, "shardproof");
    dumps.add(j, truth, "shardproof");  // the line again, over the first
    j.result.canonical = "killed";
    killed_while_it_writes([&] { dumps.add(j, truth, "shardproof"); });
    EXPECT_EQ(folders().size(), 2u);
    EXPECT_EQ(dumps.told(), "2 of 3 cases that did not pass, in " + folder_.string() +
                                "; 1 left out, cut short as the run ended");
  }
  ASSERT_EQ(folders().size(), 1u);
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(folders()[0]))
    names.insert(entry.path().filename());
  EXPECT_EQ(names, (std::set<std::string>{"finding.txt", "global.safetensors", "rank0.safetensors",
                                          "rank1.safetensors"}));
}

// What a run leaves that was killed while it wrote goes with the next one that dumps there; what
// another run fills does not, nor what nobody here has named so.
TEST_F(Dump, OfARunThatWasKilledIsClearedByTheNextOne) {
  Runner runner(options_, registry());
  const Case line = parse("linear_row tp=2 tokens=200", registry());
  const Judged j = runner.run(line, {"forward"}, "processes.np2");
  const Truth& truth = runner.truth(j.evidence);
  const pid_t killed = killed_while_it_writes([&] { Dumps(folder_).add(j, truth, "shardproof"); });
  ASSERT_EQ(folders().size(), 1u);
  const std::string left = folders()[0].filename();

  const pid_t lives = fork();
  if (lives == 0) {
    pause();
    _exit(0);
  }
  const std::string name = left.substr(0, left.rfind(".part")),
                    of_another = fmt::format("{}0.part{}", name, lives),
                    locked = fmt::format("{}1.part{}", name, killed);
  const std::vector<std::string> kept{of_another, locked, fmt::format(".mine.part{}", killed),
                                      fmt::format(".mine-1.part{}", killed), left.substr(1)};
  for (const std::string& folder : kept) fs::create_directories(folder_ / folder);
  const int held = open((folder_ / locked).c_str(), O_RDONLY | O_DIRECTORY);
  ASSERT_EQ(flock(held, LOCK_EX | LOCK_NB), 0);
  { const Dumps next(folder_); }
  close(held);
  kill(lives, SIGKILL);
  waitpid(lives, nullptr, 0);
  std::set<std::string> names;
  for (const fs::path& folder : folders()) names.insert(folder.filename());
  EXPECT_EQ(names, std::set<std::string>(kept.begin(), kept.end()));
  { const Dumps last(folder_); }
  EXPECT_EQ(folders().size(), 3u);
}

struct Interrupts : Nothing {
  std::unique_ptr<Saved> forward(Rank& rank, std::span<const View> inputs,
                                 std::span<const View> outputs) override {
    kill(getppid(), SIGTERM);
    sleep(1);
    return Nothing::forward(rank, inputs, outputs);
  }
};

// Ranks that were ended with the run did not fail, and nothing is said of them.
TEST_F(Dump, IsNotOfWhatWasUnderWayWhenTheRunWasInterrupted) {
  const Registry families = with_subject<Interrupts>("interrupts");
  const Case line = parse("linear_column tp=2 subject=interrupts", families);
  EXPECT_EXIT(
      {
        catch_interrupts();
        Progress silent;
        const Report report = run_line(line, options_, families, silent);
        std::_Exit(interrupted() && report.cases.empty() && report.dumped.empty() ? 0 : 1);
      },
      testing::ExitedWithCode(0), "");
  EXPECT_TRUE(folders().empty());
}

TEST_F(Dump, ThatCannotBeWrittenIsToldNotThrown) {
  std::ofstream(folder_ / "file") << "x";
  options_.dump = folder_ / "file";
  const Report report = run("linear_row tp=2 control=row_bias_gradient_times_p sp=on");
  EXPECT_NE(report.dump_error, "");
  EXPECT_TRUE(report.dumped.starts_with("0 of 1 case")) << report.dumped;
}

TEST(DumpFolder, IsNamedAfterItsLineAndNowhereElse) {
  EXPECT_TRUE(folder_name("linear_row tp=2 sp=on", "c").starts_with("linear_row_tp=2_sp=on-"));
  std::set<std::string> names;
  for (const std::string line : {"../../etc/x", "/root", "..", "", "a", "a\nb", "x y/z", "\xff"}) {
    const std::string name = folder_name(line, line);
    EXPECT_EQ(name.find_first_of(std::string("/\\\n \0\xff", 6)), std::string::npos) << name;
    EXPECT_NE(name[0], '.');
    names.insert(name);
  }
  EXPECT_EQ(names.size(), 8u);
  EXPECT_LT(folder_name(std::string(5000, 'x'), "c").size(), 100u);
  EXPECT_NE(folder_name("same", "one"), folder_name("same", "two"));
}

}  // namespace dump_test
}  // namespace
}  // namespace shardproof
