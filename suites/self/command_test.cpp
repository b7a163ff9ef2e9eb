// The program from outside: exit codes, one clear line for a wrong call, and what list and explain
// say. SHARDPROOF_PROGRAM names the program; else it is the one beside this test.
#include <fcntl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <thread>

#include "oracle/comm/mpi.hpp"
#include "oracle/command.hpp"
#include "oracle/gate.hpp"
#include "oracle/prepared/prepare.hpp"
#include "oracle/registry.hpp"
#include "oracle/report.hpp"
#include "oracle/tensors/safetensors.hpp"

namespace shardproof {
namespace {

namespace fs = std::filesystem;
using Words = std::vector<std::string>;

std::string program() {
  if (const char* given = std::getenv("SHARDPROOF_PROGRAM")) return given;
  return fs::read_symlink("/proc/self/exe").parent_path() / "shardproof";
}

// A folder that is gone afterwards.
struct Folder {
  fs::path path;
  Folder() {
    std::string name = fs::temp_directory_path() / "shardproof-command-XXXXXX";
    path = mkdtemp(name.data());
  }
  ~Folder() { fs::remove_all(path); }
  std::string operator/(const char* name) const { return path / name; }
};

std::string text_of(const fs::path& file) {
  std::ostringstream text;
  text << std::ifstream(file).rdbuf();
  return text.str();
}

struct Ended {
  int code = -1;  // exit code, or 128 + signal
  std::string out, err;
};

[[noreturn]] void become(const Words& words, const std::string& out, const std::string& err) {
  if (out.empty())
    close(STDOUT_FILENO);
  else
    dup2(open(out.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600), STDOUT_FILENO);
  dup2(open(err.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600), STDERR_FILENO);
  std::string self = program();
  std::vector<char*> argv = {self.data()};
  Words copy = words;
  for (std::string& word : copy) argv.push_back(word.data());
  argv.push_back(nullptr);
  execv(self.c_str(), argv.data());
  _exit(126);
}

// With out empty, standard output is closed. `during` gets the process while it runs.
template <class During>
Ended start(const Words& words, const std::string& out, During during) {
  Folder folder;
  std::string err = folder / "err";
  pid_t child = fork();
  if (child == 0) become(words, out, err);
  during(child);
  int status = 0;
  waitpid(child, &status, 0);
  Ended ended;
  ended.code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  ended.err = text_of(err);
  return ended;
}

Ended call(const Words& words) {
  Folder folder;
  std::string out = folder / "out";
  Ended ended = start(words, out, [](pid_t) {});
  ended.out = text_of(out);
  return ended;
}

bool holds(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// A contract that leaves no key open whatever the mesh is.
const char* const contract = "linear_row";

// Row-parallel shape: x [T, in] S(1), W [out, in] S(1), b [out] I; y [T, out] I by one all-reduce.
Contract row_parallel() {
  Contract c;
  c.name = "row", c.family = "sample", c.linear = true, c.summary = "y = x W^T + b";
  for (const char* extent : {"tokens", "in", "out"}) {
    Key key{extent, "8", "extent"};
    key.low = 1, key.high = 1 << 20;
    c.keys.push_back(key);
  }
  c.precondition = [](const Case& line) -> std::optional<Rejected> {
    if (line.at("in") % line.ranks(Axis::tp) == 0) return {};
    return Rejected("in divisible by tp", "in=" + line.text("in"), "choose a multiple");
  };
  c.operands = [](const Case& line) {
    int64_t tokens = line.at("tokens"), in = line.at("in"), out = line.at("out");
    Operand x{"x", Operand::input, {tokens, in}, {{Axis::tp, S(1)}, {Axis::dp, S(0)}}};
    Operand w{"W", Operand::parameter, {out, in}, {{Axis::tp, S(1)}, {Axis::dp, R()}}};
    Operand b{"b", Operand::parameter, {out}, {{Axis::tp, I()}, {Axis::dp, R()}}};
    Operand y{"y", Operand::output, {tokens, out}, {{Axis::tp, I()}, {Axis::dp, S(0)}}};
    return std::vector<Operand>{x, w, b, y};
  };
  // Nothing runs here; that there is one is all that is asked.
  c.backward = [](const Case&, std::span<const Whole>, std::span<const Whole>,
                  std::vector<Gauge>*) { return std::vector<Whole>(); };
  c.traffic = [](const Case& line, const std::string&, int) {
    std::vector<Traffic> due;
    if (line.ranks(Axis::tp) > 1)
      due.push_back({Op::all_reduce, Reduce::sum, "tp", false,
                     line.at("tokens") / line.ranks(Axis::dp) * line.at("out"), line.dtype()});
    return due;
  };
  c.gemms = [](const Case& line, int) {
    Gemm y{"Y = X W^T"};
    y.m = line.at("tokens"), y.n = line.at("out"), y.k = line.at("in") / line.ranks(Axis::tp);
    return std::vector<Gemm>{y};
  };
  c.integer_range = [](const Case&) { return std::optional<int64_t>(3); };
  return c;
}

class Command : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_EQ(access(program().c_str(), X_OK), 0) << "expected the program at " << program()
                                                  << "; build it, or name it in SHARDPROOF_PROGRAM";
  }
};

struct Wrong {
  Words words;
  Words says;  // parts of the one line on standard error
};

TEST_F(Command, AWrongCallIsOneLineAndExitTwo) {
  const std::string c = contract;
  Folder folder;
  const std::string file = folder / "file";
  std::ofstream(file) << "no folder";
  const std::vector<Wrong> table = {
      {{}, {"command", "gate, run, list, explain"}},
      {{"gaet"}, {"'gaet'", "did you mean 'gate'"}},
      {{"gate", "--tire", "smoke"}, {"--tire", "did you mean '--tier'"}},
      {{"gate", "linear,norm"}, {"'linear,norm'", "blanks between them"}},
      {{"gate", "--tier", "smok"}, {"--tier", "smoke", "'smok'"}},
      {{"gate", "--tier"}, {"--tier"}},
      {{"gate", "--tier", "ci", "--tier", "smoke"}, {"--tier", "once", "ci, smoke"}},
      {{"gate", "--ranks", "two"}, {"--ranks", "integer", "'two'"}},
      {{"gate", "--ranks", "0"}, {"--ranks", "from 1", "'0'"}},
      {{"gate", c, "--ranks", "61"}, {"--ranks 61 beside " + c, "(there: ranks 1, 2, 3, 4, 8)"}},
      {{"gate", "--ranks", "61", "--tier", "smoke"}, {"empty", "--ranks 61", "(there: ranks 2"}},
      {{"gate", "linear", "tp=2", "bias=off", "cp=3", "dp=1"},
       {"empty", "left by cp=3 beside linear tp=2 bias=off"}},
      {{"gate", ""}, {"PATTERN", "met ''"}},
      {{"gate", "mapping", "  "}, {"PATTERN", "met '  '"}},
      {{"gate", "--transport", "proceses"}, {"--transport", "did you mean 'processes'"}},
      {{"gate", "--device", "gpu"}, {"--device", "host", "cuda", "'gpu'"}},
      {{"gate", "--dtype", "fp32"}, {"--dtype", "did you mean 'f32'"}},
      {{"gate", "--dtype", "e4m3"}, {"--dtype", "not there yet"}},
      {{"gate", "--subject", "nobody"}, {"--subject", "'nobody'"}},
      {{"gate", "--without", "layout"}, {"--without", "does not take; it is one of prepare"}},
      {{"gate", "--check", "forwrad"}, {"forwrad", "forward"}},
      {{"gate", "--require", "proceses.np4"}, {"--require", "proceses.np4", "processes"}},
      {{"gate", "--require", "processes.np0"}, {"--require", "processes.np0"}},
      {{"gate", "--require", "processes."}, {"--require", "processes."}},
      {{"gate", c, "--ranks", "2", "--transport", "processes", "--require", "processes.np3"},
       {"--require", "(processes.np2)", "processes.np3"}},
      {{"gate", "--check", "forward,"}, {"--check", "'forward,'"}},
      {{"gate", "--check=forward,,gradient"}, {"--check", "'forward,,gradient'"}},
      {{"run", c, "--check", ",forward"}, {"--check", "',forward'"}},
      {{"gate", "--seed", "18446744073709551615", "--seeds", "2"},
       {"--seeds", "18446744073709551615", "'2'"}},
      {{"gate", "linear_row", "--ranks", "2", "3"}, {"met '3'", "--ranks 2,3"}},
      {{"judge", ""}, {"judge: expected a DIR, met ''"}},
      {{"run", "linear_row", "tp=2", "control="}, {"'control'", "a name", "leave the key out"}},
      {{"explain", "linear_row", "subject="}, {"'subject'", "a name", "list linear_row"}},
      {{"shrink", "linear_row", "fault="}, {"'fault'", "a name", "leave the key out"}},
      {{"run", "linear_column", "tokens=1048576"}, {"4.0 GiB", "smaller extents"}},
      {{"run", "norm_sequence", "tokens=16777216"}, {"4.0 GiB", "smaller extents"}},
      {{"run", "expert_balance", "ep=4", "tokens=16777216", "experts=16777216", "topk=64"},
       {"integers stay exact", "smaller extents"}},
      {{"run", "scan_context", "cp=2", "decay=log"},
       {"fill=integers is the default of scan_context", "none with decay=log; use fill=normal"}},
      {{"run", "scan_context", "plan=ring"}, {"'plan'", "(ring, regather)", "Declared::plan"}},
      {{"run", "scan_context", "tp=2", "sp=on"}, {"'sp'", "does not take; it takes tp cp"}},
      {{"run", "linear_row", "plan=ring"}, {"'plan'", "it takes tp cp"}},
      {{"run", "attention_ring", "tokens=16384"}, {"multiplications", "smaller extents"}},
      {{"run", "attention_ring", "docs=0,0"},
       {"docs with one token at least", "met 2 documents without any", "give one of them"}},
      {{"run", "mixer_alltoall", "docs=0"}, {"docs with one token", "met 1 document without any"}},
      {{"run", "attention_ring", "docs=5,4", "tokens=8"},
       {"docs that add up to all 8 tokens", "met a sum of 9", "tokens=9"}},
      {{"run", "attention_ring", "docs=5,-1"},
       {"docs of 0 tokens", "document 1 of -1 tokens, from 5 to 4;"}},
      {{"run", "attention_ring", "docs=5,4", "cu_seqlens_k=1,4,8"},
       {"cu_seqlens_k that begin with 0", "document 0 beginning at 1"}},
      {{"run", "attention_ring", "docs=5,4", "cu_seqlens_k=0,4,8", "kv_tokens=9"},
       {"cu_seqlens_k that end with all 9 kv_tokens", "document 1 ending at 8", "kv_tokens=8"}},
      {{"run", "attention_ring", "docs=5,4", "kv_docs=4,4", "kv_tokens=9"},
       {"kv_docs that add up to all 9 kv_tokens", "met a sum of 8"}},
      {{"run", "attention_ring", "cu_seqlens=0,5,9", "cu_seqlens_k=0,9"},
       {"as many documents in cu_seqlens_k as in cu_seqlens", "met 1 and 2"}},
      {{"run", "attention_ring", "cu_seqlens_k=0,9"},
       {"wherever cu_seqlens_k is given", "met cu_seqlens_k=0,9"}},
      {{"run", "attention_ring", "scale=1e6", "fill=large"}, {"a smaller scale, or fill=normal"}},
      {{"explain", "attention_ring", "docs=4,4", "kv_docs=9223372036854775807,9"},
       {"'kv_docs'", "at most 16777216 each and in all", "9223372036854775807,9"}},
      {{"run", "attention_ring", "docs=16777216,1"},
       {"'docs'", "at most 16777216 each and in all", "16777216,1"}},
      {{"run", "attention_ring", "docs=5,5", "window=0,9223372036854775807"},
       {"'window'", "at most 16777216 each", "0,9223372036854775807"}},
      {{"explain", "attention_block", "tokens=16777216", "hidden=16777216", "heads=16777216",
        "kv_heads=16777216", "head_dim=16777216"},
       {"2147483647", "2^63 or more elements", "smaller extents"}},
      {{"explain", "attention_block", "hidden=16777216", "heads=64"},
       {"2147483647", "elements", "smaller extents"}},
      {{"explain", "rotary_context", "tokens=16777216", "heads=16777216", "head_dim=16777216"},
       {"2147483647", "2^63 or more elements"}},
      {{"run", "attention_block", "base=0"}, {"'base'", "from 1e-06", "'0'"}},
      {{"run", "rotary_context", "base=-1"}, {"'base'", "from 1e-06", "'-1'"}},
      {{"run", "attention_ring", "scale=1e308"}, {"'scale'", "to 1e+06", "'1e308'"}},
      {{"run", "mapping_copy", "tp=2", "transport=mpi", "tokens=8192", "hidden=4096"},
       {"smaller extents"}},
      {{"run", "linear_row", "tp=2", "dtype=f16", "fill=large"},
       {"fill", "65504", "f16", "fill=normal"}},
      {{"run", "attention_alltoall", "tp=2", "dtype=f16", "fill=large", "head_dim=64"},
       {"fill", "65504", "gradient of"}},
      {{"run", "expert_mlp", "tp=2", "dtype=f32", "fill=large"},
       {"fill", "3.40282e+38", "f32", "fill=normal"}},
      {{"run", "pipeline_stages", "layers=20", "dtype=f16", "fill=normal"},
       {"within 65504, the largest f16", "where the gradient of w", "smaller extents"}},
      {{"run", "pipeline_schedule", "tokens=12", "micro_batch_size=4", "loss=mean"},
       {"exact in f64", "with a mean over 3 microbatches, which are no power of two;",
        "use fill=normal, loss=sum or another micro_batch_size"}},
      {{"shrink", "pipeline_stages", "layers=20", "dtype=f16", "fill=normal"}, {"within 65504"}},
      {{"run", "linear_row", "tp=2", "in=70000", "dtype=f16", "fill=offset"},
       {"fill", "65504", "f16", "fill=normal"}},
      {{"gate", "--in-process"}, {"--in-process", "--transport threads"}},
      {{"gate", "--in-process", "--transport", "mpi"}, {"--in-process", "mpi"}},
      {{"gate", "--seed", "-1"}, {"--seed", "18446744073709551615", "'-1'"}},
      {{"gate", "--seeds", "0"}, {"--seeds", "from 1", "'0'"}},
      {{"run", c, "seed=4", "--seed", "3"}, {"--seed 3 beside seed=4", "leave one out"}},
      {{"drift", c, "seed=1", "--seed", "3"}, {"--seed 3 beside seed=1"}},
      {{"drift", c, "--json", "-"}, {"--json: expected the name of a file, met '-'"}},
      {{"gate", c, "seed=1", "--seed", "4"}, {"--seed 4 beside seed=1", "leave one out"}},
      {{"gate", "--jobs", "x"}, {"--jobs", "integer", "'x'"}},
      {{"gate", "--deadline-scale", "nan"}, {"--deadline-scale", "number", "'nan'"}},
      {{"gate", "--deadline-scale", "0"}, {"--deadline-scale", "'0'"}},
      {{"gate", "--report", file}, {"--report", file}},
      {{"gate", "--report", "/dev/null/x"}, {"--report", "/dev/null/x"}},
      // Answered before anything is planned: the family is not looked at yet.
      {{"gate", "no_such_family", "--report", "/dev/null"}, {"--report", "/dev/null"}},
      {{"gate", "no_such_family", "--dump", file + "/below"}, {"--dump", file + "/below"}},
      {{"gate", "--failed", folder / "none"}, {folder / "none"}},
      {{"gate", "no_such_family"}, {"'no_such_family'"}},
      {{"run"}, {"empty line"}},
      {{"run", ""}, {"empty line"}},
      {{"run", c.substr(0, c.size() - 1)}, {"did you mean"}},
      {{"run", c, "tp=2", "tp=2"}, {"'tp'", "twice"}},
      {{"run", c + " tp=2 tp=2"}, {"'tp'", "twice"}},
      {{"run", c, "tp=65"}, {"'tp'", "from 1 to 64", "'65'"}},
      {{"run", c, "tp=64", "dp=64"}, {"tp=64", "dp=64", "4096"}},
      {{"run", c, "dtype=e5m2"}, {"'dtype'", "not there yet"}},
      {{"run", c, "nodes=2"}, {"'nodes'", "explain"}},
      {{"run", c, "fault=skpi@forward.tp.1"}, {"'fault'", "'skip'"}},
      {{"run", c, "control=nothing"}, {"'control'", "'nothing'"}},
      {{"run", c, "subject=nobody"}, {"'subject'", "'nobody'"}},
      {{"run", c, "--check", "gradeint"}, {"gradeint", "gradient"}},
      {{"run", c, "--transport", "mpi"}, {"--transport", "transport="}},
      {{"run", c, "--tp", "4"}, {"--tp", "keys of the line have no dashes: tp=4"}},
      {{"help", "gat"}, {"'gat'", "did you mean 'gate'"}},
      {{"drift"}, {"--logs A [B]", "met neither"}},
      {{"drift", file}, {"--logs A [B]", file}},
      {{"run", c, "--in-process"}, {"--in-process", "transport=threads"}},
      {{"list", "no_such_thing"}, {"'no_such_thing'"}},
      {{"list", "zero", "no_such_thing"},
       {"'zero no_such_thing'", "words that nothing has together"}},
      {{"list", "--table", "nowhere"}, {"'nowhere'", "one that selects nothing"}},
      {{"list", "cp=65"}, {"'cp=65'", "one that selects nothing"}},
      {{"list", "layout=sideways"}, {"'layout=sideways'", "one that selects nothing"}},
      {{"run", "pipeline_schedule", "pp=2", "virtual=2", "control=schedule_one_more_ahead"},
       {"expected virtual=1", "control schedule_one_more_ahead was not asked"}},
      {{"explain"}, {"empty line"}},
      {{"explain", c, "tp=4", "nodes=3"}, {"'nodes'", "divisor", "4 ranks"}},
      {{"explain", c, "tp=4", "nodes=0"}, {"'nodes'", "from 1"}},
      {{"prepare"}, {"LINE DIR", "met nothing"}},
      {{"prepare", c}, {"LINE DIR", "the last one is the folder"}},
      {{"prepare", c, "tp=2"}, {"DIR", "'tp=2'"}},
      {{"prepare", c, "tp=2", file}, {"DIR", file, "name another"}},
      {{"prepare", "--tier", "smoke", c}, {"a folder as the last word", "'" + c + "'"}},
      {{"prepare", c, "tp=2", "linear"}, {"a folder as the last word", "'linear'"}},
      {{"prepare", c, "tp=2", "transport=mpi", folder / "new"}, {"'transport'", "transport=mpi"}},
      {{"prepare", c, "--check", "ledger", folder / "new"}, {"--check", "ledger"}},
      {{"prepare", c, "--ranks", "2", folder / "new"}, {"--ranks", "--tier"}},
      {{"prepare", c, "--with", "acc=f64", folder / "new"}, {"--with", "--tier"}},
      {{"prepare", c, "--without", "sp", folder / "new"}, {"--without", "--tier"}},
      {{"prepare", "--tier", "smoke", c, "--without", "no_key", folder / "new"},
       {"--without", "'no_key'"}},
      {{"prepare", "--tier", "smoke", c, "--with", "tp=2", folder / "new"},
       {"--with", "acc=", "local_grad=", "'tp=2'"}},
      {{"prepare", "--tier", "smoke", c, "--with", "acc=f31", folder / "new"},
       {"--with", "f32", "'acc=f31'"}},
      {{"prepare", "norm_sequence", "tokens=16777216", "hidden=16777216", folder / "new"},
       {"memory of this machine", "8192 TiB", "smaller extents"}},
      {{"prepare", "linear_row", "tp=2", "dtype=f16", "fill=large", folder / "new"},
       {"fill", "65504", "f16", "fill=normal"}},
      {{"prepare", "pipeline_stages", "layers=20", "dtype=f16", "fill=normal", folder / "new"},
       {"within 65504, the largest f16", "where the gradient of w", "use smaller extents"}},
      {{"prepare", "expert_mlp", "tp=2", "dtype=f32", "fill=large", folder / "new"},
       {"fill", "3.40282e+38", "f32", "fill=normal"}},
      {{"prepare", "--tier", "smok", folder / "new"}, {"--tier", "'smok'"}},
      {{"prepare", "--tier", "smoke", "no_such_family", folder / "new"}, {"'no_such_family'"}},
      {{"judge"}, {"one DIR", "met 0"}},
      {{"judge", folder / "new"}, {folder / "new/case.json", "nothing there"}},
      {{"judge", file}, {file}},
  };
  for (const Wrong& wrong : table) {
    Ended ended = call(wrong.words);
    std::string called;
    for (const std::string& word : wrong.words) called += " '" + word + "'";
    EXPECT_EQ(ended.code, 2) << called << "\n" << ended.err;
    EXPECT_EQ(ended.out, "") << called;
    EXPECT_EQ(std::count(ended.err.begin(), ended.err.end(), '\n'), 1) << called << "\n"
                                                                       << ended.err;
    EXPECT_FALSE(fs::exists(folder / "new")) << called << " left a folder behind";
    for (const std::string& part : wrong.says)
      EXPECT_TRUE(holds(ended.err, part)) << called << "\nsays " << ended.err << "not  " << part;
  }
}

// Once, before any case; where no rank of MPI is due it does not matter.
TEST_F(Command, AFolderThatMpiRanksCannotMeetInIsRefused) {
  if (!mpi_missing().empty()) GTEST_SKIP() << mpi_missing();
  const Folder folder;
  const std::string report = folder / "report", out = folder / "out", err = folder / "err",
                    long_one = folder / std::string(120, 'x').c_str();
  fs::create_directories(long_one);
  const auto called = [&](const std::string& temporary, const std::string& words) {
    return WEXITSTATUS(std::system(fmt::format("TMPDIR={} {} {} --report {} > {} 2> {}", temporary,
                                               program(), words, report, out, err)
                                       .c_str()));
  };
  for (const std::string& temporary : {folder / "none", long_one}) {
    for (const char* words : {"gate linear_row --tier smoke --transport mpi",
                              "run linear_row tp=2 transport=mpi --check forward"}) {
      EXPECT_EQ(called(temporary, words), 2) << words << "\n" << text_of(err);
      EXPECT_EQ(text_of(out), "");
      EXPECT_TRUE(holds(text_of(err), temporary) && holds(text_of(err), "set TMPDIR to"))
          << text_of(err);
      EXPECT_FALSE(fs::exists(report)) << words << " left a folder behind";
    }
  }
  EXPECT_EQ(called(folder / "none", "run linear_row tp=2 --check forward"), 0) << text_of(err);
}

// What a run leaves undone is refused; what is only spelled another way is not.
TEST_F(Command, WordsThatMeanNothingMoreAreTaken) {
  const Words lines[] = {{"run", "--", contract, "tp=2"},
                         {"run", contract, "tp=2", "subject=ours"},
                         {"run", contract, "tp=2", "--check=forward"}};
  for (const Words& words : lines) EXPECT_EQ(call(words).code, 0) << words[1];
  EXPECT_EQ(call({"gate", contract, "subject=ours", "--dry-run"}).code, 0);
}

TEST_F(Command, ALineOfAReportThatIsNoneOfTheProgramIsShownWithTheReport) {
  const Folder folder;
  Report report;
  CaseResult& c = report.cases.emplace_back();
  c.line = c.canonical = "linear_row tp=2 an_older_key=3";
  c.checks.emplace_back();
  c.checks[0].check = "forward", c.checks[0].verdict = Verdict::failed;
  write_report(report, folder / "old");
  const Ended ended = call({"gate", "--failed", folder / "old"});
  EXPECT_EQ(ended.code, 2);
  for (const std::string& part : {folder / "old", c.line, std::string("'an_older_key'")})
    EXPECT_TRUE(holds(ended.err, part)) << ended.err;
}

TEST_F(Command, AReportWithoutFailuresLeavesNothingToRunAgain) {
  Folder folder;
  ASSERT_EQ(call({"run", contract, "tp=2", "--report", folder / "r"}).code, 0);
  const Ended again = call({"gate", "--failed", folder / "r"});
  EXPECT_EQ(again.code, 2);
  EXPECT_TRUE(holds(again.err, "nothing failed")) << again.err;
}

// A run that ended early has not shown that nothing is wrong.
TEST_F(Command, AReportOfARunThatEndedEarlyIsNotTakenForAWholeOne) {
  Folder folder;
  const auto cut_short = [&](const char* name, Words words) {
    words.insert(words.end(), {"--report", folder / name});
    EXPECT_NE(call(words).code, 2);
    const std::string report = folder / name + "/report.json";
    std::string text = text_of(report);
    text.replace(text.find("\"complete\": true"), 16, "\"complete\": false");
    std::ofstream(report) << text;
  };
  cut_short("passed", {"run", contract, "tp=2"});
  const Ended none = call({"gate", "--failed", folder / "passed"});
  EXPECT_EQ(none.code, 2);
  EXPECT_TRUE(holds(none.err, "did not reach its end and in which nothing had failed until then"))
      << none.err;
  cut_short("failed", {"run", contract, "tp=2", "control=row_bias_gradient_times_p"});
  const Ended some = call({"gate", "--failed", folder / "failed", "--dry-run"});
  EXPECT_EQ(some.code, 0) << some.err;
  EXPECT_TRUE(holds(some.out, "what that run left unjudged, as it did not reach its end"))
      << some.out;
}

// Ranks that are threads of the program that a debugger holds stay so when a line is replayed.
TEST_F(Command, AReplayKeepsRanksInTheProcess) {
  const Ended ended = call({"run", "linear_row", "tp=2", "control=row_bias_gradient_times_p",
                            "transport=threads", "--in-process"});
  EXPECT_EQ(ended.code, 1) << ended.err;
  EXPECT_TRUE(
      holds(ended.out,
            " transport=threads control=row_bias_gradient_times_p --in-process --check gradient\n"))
      << ended.out;
}

TEST_F(Command, WhatFailedIsChosenFromAsEverythingElse) {
  Folder folder;
  ASSERT_EQ(call({"run", "linear_row", "tp=2", "control=row_bias_gradient_times_p", "--report",
                  folder / "r"})
                .code,
            1);
  const auto again = [&](Words more) {
    Words words{"gate", "--failed", folder / "r", "--dry-run"};
    words.insert(words.end(), more.begin(), more.end());
    return call(words).code;
  };
  for (const Words& chosen :
       {Words{}, Words{"linear_row"}, Words{"linear", "tp=2"}, Words{"--ranks", "2"},
        Words{"--transport", "processes"}, Words{"--subject", "ours"}})
    EXPECT_EQ(again(chosen), 0) << (chosen.empty() ? "" : chosen[0]);
  for (const Words& other :
       {Words{"norm"}, Words{"linear_row", "tp=4"}, Words{"--ranks", "8"}, Words{"--dtype", "bf16"},
        Words{"--transport", "threads"}, Words{"--subject", "cuda"}, Words{"--seed", "9"},
        Words{"--seeds", "2"}})
    EXPECT_EQ(again(other), 2) << other[0];
}

// A twin that was run by itself is nobody's control, on its witness or not; a broken run is one.
TEST_F(Command, WhatFailedIsAgainWhatItWas) {
  Folder folder;
  const Registry families = all_families();
  ASSERT_EQ(call({"run", "linear_row", "tp=2", "control=row_bias_gradient_times_p", "--report",
                  folder / "r"})
                .code,
            1);
  const Ended twin = call({"gate", "--failed", folder / "r", "--dry-run"});
  EXPECT_TRUE(twin.out.starts_with("case ")) << twin.out;
  Report earlier;
  earlier.controls.emplace_back().outcome = ControlResult::escaped;
  earlier.controls[0].canonical =
      print_canonical(parse("mapping_reduce tp=2 fault=skip@forward.tp.1", families));
  write_report(earlier, folder / "e");
  Options again;
  again.failed = folder / "e";
  again.self = false;
  Progress silent;
  const Report report = run_gate(again, families, silent);
  EXPECT_EQ(report.cases.size(), 0u);
  ASSERT_EQ(report.controls.size(), 1u);
  EXPECT_EQ(report.controls[0].outcome, ControlResult::caught) << report.controls[0].reason;
}

// What a shell inherited from a launcher that has gone.
TEST_F(Command, RanksThatNobodyStartedAreNotWaitedFor) {
  setenv("PMI_RANK", "0", 1);
  setenv("PMI_SIZE", "2", 1);
  const Ended alone = call({"run", contract, "tp=2"});
  unsetenv("PMI_RANK");
  unsetenv("PMI_SIZE");
  EXPECT_EQ(alone.code, 0) << alone.err;
}

// Another MPI's variables make no world of this one: every rank says so, also one that would wait
// for rank 0.
TEST_F(Command, ALauncherThatIsNotThereIsNamedWithItsVariables) {
  if (!mpi_missing().empty()) GTEST_SKIP() << mpi_missing();
  for (const char* rank : {"0", "1"}) {
    setenv("OMPI_COMM_WORLD_RANK", rank, 1);
    setenv("OMPI_COMM_WORLD_SIZE", "2", 1);
    const Ended strayed = call({"run", contract, "tp=2", "transport=mpi"});
    unsetenv("OMPI_COMM_WORLD_RANK");
    unsetenv("OMPI_COMM_WORLD_SIZE");
    EXPECT_EQ(strayed.code, 3) << strayed.err;
    EXPECT_TRUE(holds(strayed.err, "OMPI_COMM_WORLD_RANK and OMPI_COMM_WORLD_SIZE") &&
                holds(strayed.err, "unset"))
        << strayed.err;
  }
}

// Ranks of a launcher whose command line holds `mark`, with the number that it gave them.
std::vector<pid_t> launched(const std::string& mark, const char* rank) {
  std::vector<pid_t> found;
  for (const auto& entry : fs::directory_iterator("/proc")) {
    const pid_t pid = std::atoi(entry.path().filename().c_str());
    if (pid <= 0 || !holds(text_of(entry.path() / "cmdline"), mark)) continue;
    const std::string said = '\0' + text_of(entry.path() / "environ");
    for (const char* variable : {"PMI_RANK", "OMPI_COMM_WORLD_RANK"})
      if (holds(said, '\0' + fmt::format("{}={}", variable, rank) + '\0')) {
        found.push_back(pid);
        break;
      }
  }
  return found;
}

// A rank of an outside launcher that nothing is heard of any more ends the run at its deadline.
TEST_F(Command, ALaunchedRankThatFallsSilentIsNotWaitedForForEver) {
  if (!mpi_missing().empty()) GTEST_SKIP() << mpi_missing();
  Folder folder;
  const std::string report = folder / "report", log = folder / "log";
  const std::string gate = fmt::format(
      "mpiexec -n 2 {} gate mapping_reduce --transport mpi --deadline-scale 0.1 --report {} > {} "
      "2>&1",
      program(), report, log);
  std::atomic<int> status = -1;
  std::thread launcher([&] { status = std::system(gate.c_str()); });
  // Once rank 0 has processes for the judge's own tests, the ranks have met.
  const auto patience = [](const auto& met) {
    for (int i = 0; i < 600 && !met(); ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    return met();
  };
  const bool begun = patience([&] { return launched(report, "0").size() > 1; });
  const auto silent = launched(report, "1");
  for (const pid_t rank : silent) kill(rank, SIGSTOP);
  const bool ended = patience([&] { return status != -1; });
  for (const pid_t rank : silent) kill(rank, SIGKILL);
  launcher.join();
  EXPECT_TRUE(begun && ended && silent.size() == 1);
  // A launcher ORs the codes of its ranks: that of rank 0, and where it kills rank 1 and still
  // hears of its end, the signal.
  const int code = WEXITSTATUS(status);
  EXPECT_TRUE(code == 1 || code == (1 | SIGKILL)) << code;
  EXPECT_TRUE(holds(text_of(log), "rank 1 handed in no record within its deadline"))
      << text_of(log);
}

// Planted faults crash in processes that a rank forked: no rank died, and none says so.
TEST_F(Command, UnderALauncherNobodySpeaksOfAnEndWhereNoRankDied) {
  if (!mpi_missing().empty()) GTEST_SKIP() << mpi_missing();
  Folder folder;
  const std::string out = folder / "out", err = folder / "err";
  const std::string gate = fmt::format(
      "mpiexec -n 2 {} gate mapping_reduce tp=2 --tier smoke --transport mpi > {} 2> {}", program(),
      out, err);
  const int status = std::system(gate.c_str());
  EXPECT_EQ(WEXITSTATUS(status), 0) << text_of(out);
  EXPECT_TRUE(holds(text_of(out), "faults planted in the judge")) << text_of(out);
  EXPECT_FALSE(holds(text_of(err), "the run ends here")) << text_of(err);
}

// One all-reduce over tp is due forward: cp has no call, and nothing was broken.
TEST_F(Command, AFaultThatMeetsNoCallIsSaid) {
  const Ended inert = call({"run", contract, "tp=2", "fault=skip@forward.cp.1"});
  EXPECT_EQ(inert.code, 0) << inert.err;
  EXPECT_TRUE(holds(inert.out, "fault=skip@forward.cp.1 changed nothing")) << inert.out;
  const Ended met = call({"run", contract, "tp=2", "fault=skip@forward.tp.1"});
  EXPECT_EQ(met.code, 1) << met.err;
  EXPECT_FALSE(holds(met.out, "changed nothing")) << met.out;
}

TEST_F(Command, ALaneIsNotProvenByRefusalsAlone) {
  const Ended refusals =
      call({"gate", "--tier", "smoke", "--ranks", "8", "--require", "processes.np8"});
  EXPECT_EQ(refusals.code, 3) << refusals.out;
}

TEST_F(Command, ADriftControlBeyondTheRunIsRefused) {
  const Ended beyond =
      call({"drift", "block", "tp=2", "control=norm_gradient_averaged@5", "--steps", "5"});
  EXPECT_EQ(beyond.code, 2) << beyond.out;
  EXPECT_TRUE(holds(beyond.err, "0 to 4")) << beyond.err;
}

TEST_F(Command, ARefusedCallLeavesNoFolder) {
  Folder folder;
  const std::string report = folder / "report";
  EXPECT_EQ(call({"gate", "no_such_family", "--report", report}).code, 2);
  EXPECT_EQ(call({"gate", "--tier", "smoke", "--ranks", "61", "--report", report}).code, 2);
  EXPECT_EQ(call({"run", contract, "tp=65", "--report", report}).code, 2);
  EXPECT_FALSE(fs::exists(report));
}

TEST_F(Command, HelpNamesTheCommandsAndExitCodes) {
  Ended ended = call({"--help"});
  EXPECT_EQ(ended.code, 0);
  for (const char* part : {"gate", "run", "list", "explain", "130"})
    EXPECT_TRUE(holds(ended.out, part));
  EXPECT_EQ(call({"gate", "--help"}).code, 0);
  EXPECT_TRUE(holds(call({"gate", "--help"}).out, "[PATTERN...]"));
  EXPECT_FALSE(holds(call({"list", "--help"}).out, "..."));
  EXPECT_TRUE(holds(call({"run", "--help"}).out, "--check"));
  EXPECT_EQ(call({"help"}).out, ended.out);
  EXPECT_EQ(call({"help", "gate"}).out, call({"gate", "--help"}).out);
}

// Dots stand behind what may be given more than once.
TEST_F(Command, HelpShowsWhichOptionsTakeSeveralValues) {
  const std::string help = call({"gate", "--help"}).out;
  for (const char* several : {"--ranks N ...  ", "--check NAME ...  ", "--require LANE ...  "})
    EXPECT_TRUE(holds(help, several)) << several << help;
  for (const char* one : {"--tier NAME  ", "--report DIR  ", "--jobs N  "})
    EXPECT_TRUE(holds(help, one)) << one << help;
}

TEST_F(Command, AListOfASectionIsAllOfIt) {
  const std::string all = call({"list"}).out;
  for (const char* name : {"families", "checks", "operators", "lanes"}) {
    const Ended ended = call({"list", name});
    ASSERT_EQ(ended.code, 0) << ended.err;
    EXPECT_GT(std::count(ended.out.begin(), ended.out.end(), '\n'), 4) << ended.out;
    EXPECT_TRUE(holds(all, ended.out)) << ended.out;
  }
}

TEST_F(Command, VersionIsOneLine) {
  const Ended ended = call({"--version"});
  EXPECT_EQ(ended.code, 0) << ended.err;
  EXPECT_TRUE(ended.out.starts_with("shardproof ")) << ended.out;
  for (const char* part : {"compiler " __VERSION__, "eigen ", "runs processes, threads"})
    EXPECT_TRUE(holds(ended.out, part)) << ended.out;
  EXPECT_EQ(std::count(ended.out.begin(), ended.out.end(), '\n'), 1) << ended.out;
  const Ended more = call({"--version", "2"});
  EXPECT_EQ(more.code, 2);
  EXPECT_TRUE(holds(more.err, "--version: expected nothing behind it")) << more.err;
}

TEST_F(Command, ListNamesEverything) {
  Ended ended = call({"list"});
  EXPECT_EQ(ended.code, 0) << ended.err;
  Registry r = all_families();
  for (const auto& c : r.contracts()) EXPECT_TRUE(holds(ended.out, c.name)) << c.name;
  for (const auto& c : r.controls()) EXPECT_TRUE(holds(ended.out, "control=" + c.name)) << c.name;
  for (const char* part :
       {"families", "checks", "fault operators", "lanes", "gradient", "skip", "seed=1"})
    EXPECT_TRUE(holds(ended.out, part)) << part;
}

TEST_F(Command, ListNarrows) {
  Ended ended = call({"list", "lost_element"});
  EXPECT_EQ(ended.code, 0);
  EXPECT_TRUE(holds(ended.out, "lost_element"));
  EXPECT_FALSE(holds(ended.out, "families"));
}

TEST_F(Command, ListFindsContractsByWhatTheySay) {
  Ended ended = call({"list", "fp8"});
  EXPECT_EQ(ended.code, 0) << ended.err;
  EXPECT_TRUE(holds(ended.out, "quantised_linear"));
  EXPECT_FALSE(holds(ended.out, "scan_context"));
}

// By the value of a key, by a description, by several words that hold together.
TEST_F(Command, ListFindsValuesAndDescriptions) {
  for (const Words& words : {Words{"zbv"}, Words{"zero_bubble"}, Words{"zero", "bubble"},
                             Words{"vpp"}, Words{"VPP", "zero"}, Words{"144530"}}) {
    Words call_words{"list"};
    call_words.insert(call_words.end(), words.begin(), words.end());
    const Ended ended = call(call_words);
    EXPECT_EQ(ended.code, 0) << ended.err;
    EXPECT_TRUE(holds(ended.out, "  pipeline_schedule\n")) << words[0];
    EXPECT_FALSE(holds(ended.out, "linear_row")) << words[0];
  }
  // What is no name shows the rows that say it.
  const Ended value = call({"list", "zbv"});
  EXPECT_TRUE(holds(value.out, "    schedule=1f1b (gpipe|1f1b|interleaved|zero_bubble|zbv)"));
  EXPECT_TRUE(holds(value.out, "    (more: list pipeline_schedule)\n")) << value.out;
  EXPECT_FALSE(holds(value.out, "hidden=")) << value.out;
  EXPECT_FALSE(holds(value.out, "control=")) << value.out;
  // A word of a line finds those that take it, by their own keys or by those of every line.
  const Ended zigzag = call({"list", "layout=zigzag"}), cp = call({"list", "cp=4"}),
              both = call({"list", "cp=4", "layout=zigzag"});
  EXPECT_TRUE(holds(zigzag.out, "  attention_ring\n") && holds(zigzag.out, "    layout="));
  EXPECT_FALSE(holds(zigzag.out, "  linear_row\n")) << zigzag.out;
  EXPECT_TRUE(holds(cp.out, "  attention_ring\n") && holds(cp.out, "    cp=1 (1..64)"));
  EXPECT_FALSE(holds(cp.out, "  pipeline_stages\n")) << cp.out;
  EXPECT_TRUE(holds(both.out, "  attention_ring\n") && !holds(both.out, "keys of every line"));
  // Within a word of a sentence nothing is found.
  EXPECT_EQ(call({"list", "turns"}).code, 0);
  EXPECT_EQ(call({"list", "urns"}).code, 2);
}

// A plan is no key of a line: the row says where a subject names it.
TEST_F(Command, ListFindsContractsByTheirPlans) {
  const std::string row = "    traffic plans beside the default (Declared::plan): ";
  for (const Words& words :
       {Words{"list", "regather"}, Words{"list", "traffic", "plans", "gated"}}) {
    const Ended ended = call(words);
    EXPECT_EQ(ended.code, 0) << ended.err;
    EXPECT_TRUE(holds(ended.out, "  scan_context\n") && holds(ended.out, "  delta_context\n"));
    EXPECT_TRUE(holds(ended.out, row + "ring regather\n    (more: list scan_context)\n"))
        << ended.out;
    EXPECT_FALSE(holds(ended.out, "conv_context") || holds(ended.out, "heads=")) << ended.out;
  }
  EXPECT_TRUE(holds(call({"list", "ring"}).out, row + "ring regather\n"));
  EXPECT_TRUE(holds(call({"list", "conv_context"}).out, row + "allgather\n"));
  EXPECT_FALSE(holds(call({"list", "linear_row"}).out, "traffic plans"));
  EXPECT_TRUE(holds(call({"list", "regathr"}).err, "did you mean 'regather'?"));
}

TEST_F(Command, ExplainFoldsProductsOfIterations) {
  Ended ended = call({"explain", "muon_step", "matrices=1", "ns_steps=5"});
  EXPECT_EQ(ended.code, 0) << ended.err;
  EXPECT_TRUE(holds(ended.out, "M=4 N=4 K=7   5 times\n")) << ended.out;
}

TEST_F(Command, TableNamesEachContractOnce) {
  Ended ended = call({"list", "--table"});
  EXPECT_EQ(ended.code, 0) << ended.err;
  const auto contracts = all_families().contracts();
  for (const auto& c : contracts) {
    const std::string name = "`" + c.name + "`";
    const size_t at = ended.out.find(name);
    ASSERT_NE(at, std::string::npos) << name;
    EXPECT_EQ(ended.out.find(name, at + 1), std::string::npos) << name;
  }
}

void add_asked_on(Registry& r, const char* name, const char* family, const char* line) {
  Contract c = row_parallel();
  c.name = name, c.family = family;
  c.cases = [line](const std::string&) { return std::vector<std::string>{line}; };
  r.add(c);
  r.add(Subject{"", name, nullptr, {}});
}

// Contracts of a family that are asked the same share a row; others do not.
TEST_F(Command, TableHasARowForWhatIsAskedTheSame) {
  Registry r;
  add_asked_on(r, "row", "linear", "row tp=2");
  add_asked_on(r, "alike", "linear", "alike tp=2");
  add_asked_on(r, "on_four", "linear", "on_four tp=4");
  add_asked_on(r, "elsewhere", "norm", "elsewhere tp=2");
  const std::string table = list_table(r, "");
  for (const char* begin :
       {"`row` `alike` | 2 | all |", "`on_four` | 4 | all |", "`elsewhere` | 2 | all |"})
    EXPECT_TRUE(holds(table, std::string("\n| ") + begin)) << table;
}

// A cell says only what differs from the rank counts of its row: one rank makes no call and has no
// replica, and a check that is asked in f64 alone is asked on the ranks of the lines in f64.
TEST_F(Command, TableHasTheRankCountsOfARowOnce) {
  Registry r;
  add_asked_on(r, "row", "linear", "row");
  Contract c = row_parallel();
  c.name = "both";
  c.cases = [](const std::string&) {
    return std::vector<std::string>{"both", "both tp=2", "both tp=4 dtype=f32"};
  };
  r.add(c);
  r.add(Subject{"", "both", nullptr, {}});
  const std::string table = list_table(r, "");
  EXPECT_TRUE(table.starts_with("| primitive | ranks | forward | gradient | adjoint | gradcheck |"))
      << table;
  EXPECT_TRUE(holds(table, "`row` | 1 | all | all | all | all |")) << table;
  EXPECT_TRUE(holds(table, "`both` | 1 2 4 | all | all | all | 1 2 |")) << table;
  const size_t both = table.find("`both`");
  EXPECT_NE(table.find(" >1 | >1 | all | all |", both), std::string::npos) << table;
}

// Columns follow from what the rows are asked, and so do those of a device.
TEST_F(Command, TableHasAColumnForEachCheckThatARowIsAsked) {
  const Ended fp8 = call({"list", "--table", "fp8"});
  EXPECT_TRUE(holds(fp8.out, "`quantised_linear`")) << fp8.err;
  EXPECT_FALSE(holds(fp8.out, "`scan_context`")) << fp8.out;
  EXPECT_TRUE(call({"list", "--table", "mapping_copy"})
                  .out.starts_with(
                      "| primitive | ranks | forward | gradient | adjoint | gradcheck | replica "
                      "| ledger | lockstep | memory | repeat | accumulate |\n|---|"));
  const auto head = [](const char* words) {
    Contract c = row_parallel();
    c.cases = [words](const std::string&) { return std::vector<std::string>{words}; };
    Registry r;
    r.add(c);
    r.add(Subject{"", "row", nullptr, {}});
    r.add(Subject{"cuda", "row", nullptr, {}});
    const std::string table = list_table(r, "");
    return table.substr(0, table.find('\n'));
  };
  EXPECT_TRUE(holds(head("row tp=2 device=cuda"), "| stream |"));
  EXPECT_FALSE(holds(head("row tp=2"), "| stream |"));
  EXPECT_FALSE(holds(head("row"), "| ledger |"));  // one rank makes no call
}

TEST_F(Command, RunJudgesOneLineQuotedOrNot) {
  const std::string c = contract;
  Ended apart = call({"run", c, "tp=2", "--check", "forward"});
  Ended quoted = call({"run", "--check", "forward", c + " tp=2"});
  EXPECT_EQ(apart.code, 0) << apart.out << apart.err;
  EXPECT_EQ(quoted.code, 0) << quoted.out << quoted.err;
  for (const Ended& ended : {apart, quoted}) {
    EXPECT_TRUE(holds(ended.out, "PASSED"));
    EXPECT_TRUE(holds(ended.out, c + " tp=2"));
    EXPECT_TRUE(holds(ended.out, "forward"));
    EXPECT_FALSE(holds(ended.out, "gradient"));
  }
  EXPECT_TRUE(
      holds(call({"run", c, "tp=2", "--canonical"}).out, "transport=processes device=host"));
}

TEST_F(Command, ABrokenTwinFailsAndAReplayLineIsShown) {
  const auto controls = all_families().controls();
  auto broken = std::find_if(controls.begin(), controls.end(), [](const Control& control) {
    return control.check == "forward" && control.make != nullptr;
  });
  ASSERT_NE(broken, controls.end());
  Folder folder;
  Ended ended =
      call({"run", broken->witness + " control=" + broken->name, "--report", folder / "report"});
  EXPECT_EQ(ended.code, 1) << ended.out << ended.err;
  EXPECT_TRUE(holds(ended.out, "FAILED"));
  EXPECT_TRUE(holds(ended.out, program() + " run " + broken->contract));
  EXPECT_TRUE(holds(text_of(folder / "report/report.json"), "\"complete\": true"));
}

// A path that holds a blank stands in the replay line as a shell has to read it.
TEST_F(Command, AReplayLineQuotesTheProgram) {
  Folder folder;
  fs::create_directory(folder / "a b");
  const std::string link = folder / "a b/shardproof";
  fs::create_symlink(program(), link);
  const char* before = std::getenv("SHARDPROOF_PROGRAM");
  const std::string given = before ? before : "";
  setenv("SHARDPROOF_PROGRAM", link.c_str(), 1);
  const Ended broken = call({"run", "linear_row", "tp=2", "control=row_bias_gradient_times_p"});
  before ? setenv("SHARDPROOF_PROGRAM", given.c_str(), 1) : unsetenv("SHARDPROOF_PROGRAM");
  EXPECT_EQ(broken.code, 1) << broken.err;
  EXPECT_TRUE(holds(broken.out, "'" + link + "' run linear_row")) << broken.out;
}

// On this line the twin draws what the healthy kernel draws.
TEST_F(Command, ADriftControlThatIsNotSeenIsSaid) {
  const Ended unseen =
      call({"drift", "block", "tp=2", "control=dropout_by_local_index@1", "--steps", "3"});
  EXPECT_EQ(unseen.code, 0) << unseen.out;
  EXPECT_TRUE(holds(unseen.out, "dropout_by_local_index was not caught on this line"))
      << unseen.out;
  const Ended healthy = call({"drift", "block", "tp=2", "--steps", "3"});
  EXPECT_FALSE(holds(healthy.out, "not caught")) << healthy.out;
}

TEST_F(Command, DryRunRunsNothing) {
  Ended ended = call({"gate", "--tier", "smoke", "--dry-run", "--ranks", "2"});
  EXPECT_EQ(ended.code, 0) << ended.err;
  EXPECT_TRUE(holds(ended.out, "tp=2"));
  EXPECT_FALSE(holds(ended.out, "tp=4"));
  EXPECT_TRUE(holds(ended.out, "nothing was run"));
}

TEST_F(Command, ClosedOutputIsNoError) {
  EXPECT_EQ(start({"list"}, "", [](pid_t) {}).code, 0);
  Folder folder;
  const std::string pipe = folder / "pipe";
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  std::thread reader([&] { close(open(pipe.c_str(), O_RDONLY)); });  // reads nothing and leaves
  Ended ended = start({"list"}, pipe, [](pid_t) {});
  reader.join();
  EXPECT_EQ(ended.code, 0) << ended.err;
  EXPECT_EQ(ended.err, "");
}

TEST_F(Command, OutputThatCannotBeWrittenIsNoJudgement) {
  if (access("/dev/full", W_OK) != 0) GTEST_SKIP() << "this machine has no /dev/full";
  for (const Words& words : {Words{"list"},
                             {"run", "linear_row", "tp=2"},
                             {"explain", "linear_row"},
                             {"gate", "--help"}}) {
    Ended ended = start(words, "/dev/full", [](pid_t) {});
    EXPECT_EQ(ended.code, 3) << words[0];
    EXPECT_EQ(ended.err,
              "shardproof: standard output: expected to write what is said, met 'No space left on "
              "device'; it is not whole\n")
        << words[0];
  }
}

// A limit on the size of a file stands for a disk that is full.
TEST_F(Command, FilesThatCannotBeWrittenAreNoJudgement) {
  Folder folder;
  const std::string failing = "control=row_bias_gradient_times_p";
  const std::vector<std::pair<Words, Words>> table = {
      {{"run", "linear_row", "tp=2", "--report", folder / "report"},
       {"expected to write", "report/report.json", "File too large"}},
      {{"run", "linear_row", "tp=2", failing, "--dump", folder / "dump"},
       {"--dump", "can be written", "File too large"}},
      {{"prepare", "linear_row", "tp=2", folder / "prepared"},
       {"rank0.in.safetensors", "can be written", "File too large"}},
      {{"drift", "block", "tp=2", "--steps", "2", "--report", folder / "drift"},
       {"expected to write", "drift/index.html", "File too large"}}};
  for (const auto& [words, says] : table) {
    rlimit before{};
    getrlimit(RLIMIT_FSIZE, &before);
    const rlimit small{1024, before.rlim_max};
    setrlimit(RLIMIT_FSIZE, &small);
    const Ended ended = start(words, "/dev/null", [](pid_t) {});
    setrlimit(RLIMIT_FSIZE, &before);
    EXPECT_EQ(ended.code, 3) << words[0];
    for (const std::string& part : says)
      EXPECT_TRUE(holds(ended.err, part)) << part << " in " << ended.err;
    EXPECT_FALSE(holds(ended.err, "be read")) << ended.err;
  }
  for (const auto& entry : fs::recursive_directory_iterator(folder.path))
    EXPECT_FALSE(holds(entry.path().filename(), ".part")) << entry.path();
}

TEST_F(Command, AnInterruptedGateSaysSo) {
  Folder folder;
  const std::string report = folder / "report";
  Ended ended = start({"gate", "linear", "--tier", "nightly", "--report", report}, folder / "out",
                      [&](pid_t child) {
                        // The folder appears just before the run begins.
                        for (int i = 0; i < 6000 && !fs::exists(report); ++i)
                          std::this_thread::sleep_for(std::chrono::milliseconds(20));
                        std::this_thread::sleep_for(std::chrono::milliseconds(500));
                        kill(child, SIGINT);
                      });
  EXPECT_EQ(ended.code, 130) << ended.err;
  EXPECT_TRUE(holds(text_of(report + "/report.json"), "\"complete\": false"));
  EXPECT_TRUE(holds(text_of(folder / "out"), "the judge's own tests did not end"))
      << text_of(folder / "out");
}

std::vector<pid_t> children_of(pid_t process) {
  const std::string id = std::to_string(process);
  std::ifstream list("/proc/" + id + "/task/" + id + "/children");
  return {std::istream_iterator<pid_t>(list), {}};
}
bool has_children(pid_t process) { return !children_of(process).empty(); }
// Of a core, as its own work.
double seconds_of(pid_t process) {
  std::ifstream stat("/proc/" + std::to_string(process) + "/stat");
  std::string word;
  std::getline(stat, word, ')');  // behind the name of the program, which may hold anything
  for (int field = 3; field <= 14; ++field) stat >> word;
  return stat ? std::stod(word) / double(sysconf(_SC_CLK_TCK)) : 0;
}

TEST_F(Command, AnInterruptedRunSaysSo) {
  Folder folder;
  using Clock = std::chrono::steady_clock;
  Clock::duration apart{};
  const auto interrupt = [&](pid_t child) {
    for (int i = 0; i < 60000 && !has_children(child); ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    const auto first = Clock::now();
    kill(child, SIGTERM);  // as `timeout` does: to the child, and to its group as well
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    kill(child, SIGTERM);
    apart = Clock::now() - first;
  };
  Ended ended;
  // Half a second apart they are two, one of somebody who does not want to wait.
  for (int tries = 0; tries == 0 || (tries < 10 && apart > std::chrono::milliseconds(400)); ++tries)
    ended = start({"run", "attention_ring", "cp=2", "tokens=2000"}, folder / "out", interrupt);
  EXPECT_EQ(ended.code, 130) << ended.err;
  EXPECT_TRUE(holds(text_of(folder / "out"), "INTERRUPTED after 0 cases"))
      << text_of(folder / "out");
}

// A terminal that closes, unless nohup stands before the command.
TEST_F(Command, AClosedTerminalInterrupts) {
  for (const bool nohup : {false, true}) {
    SCOPED_TRACE(nohup);
    Folder folder;
    bool goes_on = false;
    const auto before = signal(SIGHUP, nohup ? SIG_IGN : SIG_DFL);
    const Ended ended =
        start({"run", "attention_ring", "cp=2", "tokens=2000"}, folder / "out", [&](pid_t child) {
          for (int i = 0; i < 60000 && !has_children(child); ++i)
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
          kill(child, SIGHUP);
          if (!nohup) return;
          std::this_thread::sleep_for(std::chrono::milliseconds(300));
          goes_on = has_children(child);
          kill(child, SIGTERM);
        });
    signal(SIGHUP, before);
    EXPECT_EQ(goes_on, nohup);
    EXPECT_EQ(ended.code, 130) << ended.err;
    EXPECT_TRUE(holds(text_of(folder / "out"), "INTERRUPTED after 0 cases"))
        << text_of(folder / "out");
  }
}

// Not hung, or only too slow: no deadline would help.
TEST_F(Command, ARankThatWasStoppedIsSaidToBe) {
  Folder folder;
  const Ended ended =
      start({"run", "attention_ring", "cp=2", "tokens=2000", "--deadline-scale", "0.02"},
            folder / "out", [](pid_t child) {
              const auto computes = [&] {
                const std::vector<pid_t> ranks = children_of(child);
                return ranks.size() == 2 && seconds_of(ranks[0]) >= 0.2;
              };
              for (int i = 0; i < 60000 && !computes(); ++i)
                std::this_thread::sleep_for(std::chrono::milliseconds(1));
              kill(children_of(child).at(0), SIGSTOP);
            });
  EXPECT_EQ(ended.code, 1);
  const std::string said = text_of(folder / "out");
  EXPECT_TRUE(holds(said, "rank 0 was stopped by SIGSTOP and nobody continued it; it ")) << said;
}

// Ranks that are ended with it are no crash of a subject.
TEST_F(Command, AnInterruptedShrinkBlamesNobody) {
  Folder folder;
  const Ended ended =
      start({"shrink", "attention_ring", "cp=2", "tokens=2000"}, folder / "out", [](pid_t child) {
        for (int i = 0; i < 60000 && !has_children(child); ++i)
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
        kill(child, SIGTERM);
      });
  EXPECT_EQ(ended.code, 130) << ended.err;
  EXPECT_EQ(ended.err, "shardproof: INTERRUPTED before its end: nothing was judged\n");
  EXPECT_FALSE(holds(text_of(folder / "out"), "CRASHED")) << text_of(folder / "out");
}

// Before a command waits for its cases, and where it waits for none.
TEST_F(Command, AnInterruptedPrepareSaysSo) {
  Folder folder;
  const Ended ended = start({"prepare", "linear", "--tier", "nightly", folder / "battery"},
                            folder / "out", [&](pid_t child) {
                              for (int i = 0; i < 60000 && !fs::exists(folder / "battery"); ++i)
                                std::this_thread::sleep_for(std::chrono::milliseconds(1));
                              kill(child, SIGTERM);
                            });
  EXPECT_EQ(ended.code, 130);
  EXPECT_EQ(ended.err, "shardproof: INTERRUPTED before its end: nothing was judged\n");
}

// A signal to the gate alone, as `kill` and a CI's runner send it, reaches the processes that
// judge.
TEST_F(Command, AGateThatIsKilledEndsItsJobs) {
  Folder folder;
  using Clock = std::chrono::steady_clock;
  Clock::time_point asked;
  const std::string report = folder / "report", out = folder / "out";
  const Ended ended = start({"gate", "block", "--tier", "nightly", "--transport", "processes",
                             "--jobs", "2", "--report", report},
                            out, [&](pid_t child) {
                              const auto judges = [&] {  // by ranks of its own
                                return std::ranges::any_of(children_of(child), has_children);
                              };
                              for (int i = 0; i < 6000 && !judges(); ++i)
                                std::this_thread::sleep_for(std::chrono::milliseconds(20));
                              asked = Clock::now();
                              kill(child, SIGTERM);
                            });
  EXPECT_LT(Clock::now() - asked, std::chrono::seconds(15));
  EXPECT_EQ(ended.code, 130) << ended.err;
  EXPECT_TRUE(holds(text_of(report + "/report.json"), "\"complete\": false"));
}

// Not the gate: one of its processes. What that had not judged is missing, and it says whose deed.
TEST_F(Command, AJobThatIsSentASignalIsNamedWithIt) {
  Folder folder;
  pid_t job = 0;
  const std::string out = folder / "out";
  const Ended ended = start(
      {"gate", "block", "--tier", "ci", "--ranks", "2", "--transport", "processes", "--jobs", "2"},
      out, [&](pid_t child) {
        for (int i = 0; i < 6000 && job == 0; ++i) {
          std::this_thread::sleep_for(std::chrono::milliseconds(20));
          for (const pid_t one : children_of(child))
            if (has_children(one)) job = one;
        }
        kill(job, SIGTERM);
      });
  EXPECT_EQ(ended.code, 3);
  const std::string said = text_of(out), words = fmt::format("(process {}) was sent SIGTERM", job);
  EXPECT_TRUE(holds(said, words)) << words << "\n" << said;
  EXPECT_FALSE(holds(said, "the judge missed")) << said;
}

// A battery of a case that is judged at once and of one whose truth takes minutes. Their answers
// are zeros of the right shapes.
TEST_F(Command, AnInterruptedJudgeKeepsWhatItJudgedBefore) {
  const Registry families = all_families();
  Folder folder;
  std::vector<prepared::Member> members;
  for (const auto& [name, line] :
       {std::pair{"000.linear_row", "linear_row tp=2"},
        std::pair{"001.attention_ring", "attention_ring cp=2 tokens=65536 heads=1 head_dim=8"}}) {
    const fs::path member = folder / name;
    members.push_back(prepared::prepare_case(parse(line, families), {"forward"}, member, families));
    const prepared::CaseFile c = prepared::read_case(member, families);
    for (int r = 0; r < 2; ++r) {
      std::vector<tensors::TensorToWrite> zeros;
      for (const prepared::Named& n : c.plan.passes.at(0).steps.at(0).gives) {
        const auto shape = c.plan.local_shape_of(n, r);
        const auto bytes = size_t(product(shape)) * size_of(c.plan.dtype_of(n));
        zeros.push_back(
            {n.name, c.plan.dtype_of(n), shape, [bytes] { return std::vector<std::byte>(bytes); }});
      }
      tensors::write_safetensors(member / prepared::out_file(r), zeros, {{"case", c.digest}});
    }
  }
  tensors::write_text(folder / "battery.json", prepared::battery_text(members));
  using Clock = std::chrono::steady_clock;
  Clock::time_point asked;
  const std::string report = folder / "report", out = folder / "out";
  const Ended ended = start({"judge", folder.path, "--report", report}, out, [&](pid_t child) {
    // Files are open from before the first verdict, in the order of the cases, until that of their
    // own case.
    bool judged = false;
    for (int i = 0; i < 60000 && !judged; ++i) {
      const std::string open_files = text_of("/proc/" + std::to_string(child) + "/maps");
      judged = holds(open_files, "/001.attention_ring/rank1.out") &&
               !holds(open_files, "/000.linear_row/rank1.out");
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    EXPECT_TRUE(judged);
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    asked = Clock::now();
    kill(child, SIGTERM);
  });
  EXPECT_LT(Clock::now() - asked, std::chrono::seconds(15));
  EXPECT_EQ(ended.code, 130) << ended.err;
  const std::string told = text_of(report + "/report.json");
  EXPECT_TRUE(holds(told, "\"complete\": false"));
  EXPECT_TRUE(holds(told, "linear_row tp=2") && !holds(told, "attention_ring"));
  EXPECT_TRUE(holds(told, "interrupted after 1 of 2 cases"));
  EXPECT_TRUE(holds(text_of(out), "INTERRUPTED after 1 case with 1 check")) << text_of(out);
}

// ---- what is shown of words from outside

TEST_F(Command, AFolderIsShownWithoutWhatSteersATerminal) {
  Folder folder;
  for (Words words :
       {Words{"prepare", contract, "tp=2", "--check", "forward", folder / "a\x1b[31m\nb'c"},
        {"prepare", "--tier", "smoke", "--check", "forward", "mapping_copy",
         folder / "b\x1b[31m\nb'c"}}) {
    const Ended ended = call(words);
    EXPECT_EQ(ended.code, 0) << ended.err;
    EXPECT_EQ(std::count(ended.out.begin(), ended.out.end(), '\n'), 1) << ended.out;
    EXPECT_FALSE(holds(ended.out, "\x1b")) << ended.out;
    EXPECT_TRUE(holds(ended.out, "\\x1b[31m\\x0ab'c   next: ")) << ended.out;
    // What is to be pasted names the folder.
    const std::string script = folder / "script";
    std::ofstream(script) << "test -d " << ended.out.substr(ended.out.rfind(" judge ") + 7);
    EXPECT_EQ(std::system(("bash " + script).c_str()), 0) << text_of(script);
  }
}

// ---- explain, on a contract whose numbers are known by hand

std::string explained(const std::string& line, int nodes = 0) {
  Registry r;
  r.add(row_parallel());
  r.add(Subject{"", "row", nullptr, {}});
  return explain_text(parse(line, r), nodes, r);
}

// Without runs of blanks: columns may move.
std::string squeezed(const std::string& text) {
  std::string s;
  for (char c : text)
    if (c != ' ' || s.empty() || s.back() != ' ') s += c;
  return s;
}

// 4096 x 8192 x 2 B = 64 MiB; a ring sends 2(p-1)/p of it: 64, 96, 112 MiB a rank at p = 2, 4, 8.
TEST(Explain, BytesOfAnAllReduce) {
  const char* ring[] = {"64 MiB", "96 MiB", "112 MiB"};
  for (int i = 0; i < 3; ++i) {
    std::string text = squeezed(
        explained("row tokens=4096 in=8192 out=8192 dtype=bf16 tp=" + std::to_string(2 << i)));
    EXPECT_TRUE(holds(
        text, "forward multiply Y = X W^T M=4096 N=8192 K=" + std::to_string(8192 / (2 << i))))
        << text;
    EXPECT_TRUE(holds(text, "call 1 all_reduce sum tp 33554432 x bf16 logical 64 MiB, ring " +
                                std::string(ring[i]) + " a rank"))
        << text;
    EXPECT_TRUE(holds(text, "backward no call")) << text;
  }
}

TEST(Explain, GroupsShapesAndWhatIsOwed) {
  std::string text = squeezed(explained("row tp=2 dp=2 tokens=6 in=8 out=5", 2));
  for (const char* part :
       {"world 4 ranks, order tp,cp,ep,dp,pp, 2 nodes of 2", "groups tp {0,1} {2,3} within a node",
        "groups dp {0,2} {1,3} crosses nodes", "input x [6,8] tp:S(1) dp:S(0) [3,4]",
        "parameter W [5,8] tp:S(1) dp:R [5,4]", "output y [6,5] tp:I dp:S(0) [3,5]",
        "owed W: the sum of its gradient over dp {0,2} {1,3}",
        "owed b: the sum of its gradient over dp {0,2} {1,3}", "forward tier E, exact",
        "integers of [-3,3]"})
    EXPECT_TRUE(holds(text, part)) << text << "\nnot " << part;
  EXPECT_FALSE(holds(text, "over tp")) << text;
}

TEST(Explain, NothingIsOwedOnOneAxisOfShardsAndInvariants) {
  EXPECT_TRUE(holds(squeezed(explained("row tp=4 fill=normal")), "owed nothing"));
  EXPECT_TRUE(holds(squeezed(explained("row tp=4 fill=normal")), "forward tier D"));
}

// Blocks of ceil and floor: 6 tokens over 4 ranks are 2, 2, 1, 1.
TEST(Explain, UnequalLocalShapesNameTheirRanks) {
  EXPECT_TRUE(holds(squeezed(explained("row dp=4 tokens=6")), "[2,8] on {0,1}, [1,8] on {2,3}"));
}

TEST(Explain, RefusesWhatTheContractRefuses) {
  EXPECT_THROW(explained("row tp=3"), BadInput);
  EXPECT_THROW(explained("row tp=64 dp=64 pp=2 in=64"), BadInput);
}

// 0 where nothing was lost, 1 where a verdict was, 2 where there is no report.
TEST_F(Command, DiffComparesTwoReports) {
  Folder folder;
  const std::string before = folder / "before", after = folder / "after", line = contract;
  ASSERT_EQ(call({"run", line, "tp=2", "--report", before}).code, 0);
  EXPECT_TRUE(fs::exists(before + "/index.html"));
  const Ended same = call({"diff", before, before + "/report.json"});
  EXPECT_EQ(same.code, 0) << same.err;
  EXPECT_TRUE(holds(same.out, "nothing lost")) << same.out;
  std::string text = text_of(before + "/report.json");
  const std::string verdict = "\"check\":\"gradient\",\"verdict\":\"";
  const size_t at = text.find(verdict);
  ASSERT_NE(at, std::string::npos);
  text.replace(at + verdict.size(), 6, "failed");
  fs::create_directory(after);
  std::ofstream(after + "/report.json") << text;
  const Ended lost = call({"diff", before, after});
  EXPECT_EQ(lost.code, 1) << lost.err;
  EXPECT_TRUE(
      holds(lost.out, "LOST       verdict  linear_row tp=2   gradient   passed -> failed\n"))
      << lost.out;
  const Ended tables = call({"diff", before, after, "--markdown"});
  EXPECT_EQ(tables.code, 1);
  EXPECT_TRUE(tables.out.starts_with("## Shardproof: LOST\n")) << tables.out;
  EXPECT_EQ(call({"diff", after, before}).code, 0);
  for (const Words& wrong :
       {Words{"diff", before}, {"diff", before, after, after}, {"diff", before, folder / "none"}}) {
    const Ended refused = call(wrong);
    EXPECT_EQ(refused.code, 2);
    EXPECT_EQ(refused.out, "");
    EXPECT_EQ(std::count(refused.err.begin(), refused.err.end(), '\n'), 1) << refused.err;
  }
}

// A page of drift shows a run: of logs there is an object only.
TEST_F(Command, DriftWritesAPageOfARun) {
  Folder folder;
  const std::string page = folder / "report/index.html";
  const Ended ended =
      call({"drift", "linear_row", "tp=2", "--steps", "3", "--report", folder / "report"});
  EXPECT_EQ(ended.code, 0) << ended.err;
  EXPECT_TRUE(holds(text_of(page), "\"word\":\"NO DRIFT\"")) << ended.out;
  const Ended logs = call({"drift", "--logs", folder / "log", "--report", folder / "other"});
  EXPECT_EQ(logs.code, 2);
  EXPECT_TRUE(holds(logs.err, "--report: expected together with a line")) << logs.err;
  EXPECT_FALSE(fs::exists(folder / "other"));
}

// A log that ends early is no judgement of what it lacks; what it shows to drift is one.
TEST_F(Command, LogsThatEndEarlyAreNoJudgementOfTheRest) {
  Folder folder;
  const auto log = [&](const char* name, const char* line, const char* steps) {
    EXPECT_NE(call({"drift", line, "--steps", steps, "--log", folder / name}).code, 2);
    return folder / name;
  };
  const std::string a = log("a", "linear_row tp=2", "4"), t = log("t", "linear_row tp=2", "3"),
                    other = log("other", "linear_row tp=2 seed=2", "3");
  EXPECT_EQ(call({"drift", "--logs", a, a}).code, 0);
  for (const Words& cut : {Words{a, t}, {t, a}}) {
    const Ended ended = call({"drift", "--logs", cut[0], cut[1]});
    EXPECT_EQ(ended.code, 3);
    EXPECT_TRUE(ended.out.starts_with("NO JUDGEMENT ") && holds(ended.out, "no drift up to step 2"))
        << ended.out;
  }
  EXPECT_EQ(call({"drift", "--logs", a, other}).code, 1);
}

// A value is echoed as far as it can be read.
TEST_F(Command, LongValuesAreCutInTheErrorLine) {
  std::string offsets = "cu_seqlens=1";
  for (int i = 2; i <= 20001; ++i) offsets += "," + std::to_string(i);
  const std::string lengths = "docs=7" + std::string(40000, ',');
  for (const Words& words : {Words{"run", "attention_ring", offsets},
                             {"run", "attention_ring", offsets, "docs=7,1"},
                             {"explain", "attention_ring", lengths},
                             {"run", "linear_row", "subject=" + offsets},
                             {"gate", "--transport", offsets},
                             {"run", "linear_row", "tp=2", "--check", offsets},
                             {offsets},
                             {"run", offsets},
                             {"run", "linear_row", offsets},
                             {"gate", "--model", offsets},
                             {"gate", offsets}}) {
    const Ended ended = call(words);
    EXPECT_EQ(ended.code, 2) << words[0];
    EXPECT_LT(ended.err.size(), 1000u) << words[0] << ' ' << words.back().substr(0, 20);
  }
  const Ended twice = call({"run", "attention_ring", offsets, "docs=7,1"});
  EXPECT_TRUE(holds(twice.err, "(20001 entries)")) << twice.err;
}

// Each document is disturbed in a shot of its own, with data of all of them: counted before any is
// drawn.
TEST_F(Command, ManyDocumentsAreRefusedBeforeTheirDataAreDrawn) {
  std::string docs = "docs=1";
  for (int i = 1; i < 4000; ++i) docs += ",1";
  rusage before{}, after{};
  getrusage(RUSAGE_CHILDREN, &before);
  const Ended ran = call({"run", "attention_ring", docs}),
              prepared = call({"prepare", "attention_ring", docs + ",999999", "/dev/null/x"}),
              explained = call({"explain", "attention_ring", docs});
  getrusage(RUSAGE_CHILDREN, &after);
  EXPECT_EQ(ran.code, 2);
  EXPECT_TRUE(holds(ran.err, "4.0 GiB") && holds(ran.err, "(4000 entries)")) << ran.err;
  EXPECT_EQ(prepared.code, 2);
  EXPECT_TRUE(holds(prepared.err, "memory of this machine")) << prepared.err;
  EXPECT_EQ(explained.code, 0) << explained.err;
  EXPECT_TRUE(holds(explained.out, "\nrun        refuses it: expected a case of at most 4.0 GiB"))
      << explained.err;
  EXPECT_LT(after.ru_utime.tv_sec - before.ru_utime.tv_sec, 10);
}

// Advice does not name what the line has already.
TEST_F(Command, AdvisesWhatTheLineHasNot) {
  const auto advice = [](Words words) {
    const Ended ended = call(words);
    EXPECT_EQ(ended.code, 2) << ended.out;
    return ended.err.substr(std::min(ended.err.rfind("; "), ended.err.size()));
  };
  const std::string scale = advice({"run", "attention_ring", "cp=2", "scale=1e6", "fill=normal"}),
                    wide = advice({"run", "attention_block", "fill=integers"});
  EXPECT_TRUE(scale.ends_with("choose a smaller scale\n")) << scale;
  EXPECT_EQ(wide, "; use fill=normal\n");  // no extents make its values integers
  const std::string narrow =
      advice({"run", "linear_row", "fill=integers", "dtype=bf16", "in=4096"});
  EXPECT_TRUE(holds(narrow, "smaller extents or a wider dtype")) << narrow;
}

// What a line is not asked is said with its reason, by `run` and `explain`.
TEST_F(Command, ChecksThatALineIsNotAskedAreSaid) {
  const Ended ran = call({"run", "linear_row", "tp=2", "dtype=f32"});
  EXPECT_EQ(ran.code, 0) << ran.err;
  EXPECT_TRUE(holds(ran.out, "\nnot due    gradcheck: asked in f64\n")) << ran.out;
  const Ended wide = call({"explain", "attention_block", "tp=32", "heads=32"});
  EXPECT_TRUE(holds(wide.out, "gradcheck    not due: asked of 4096 elements at most\n"))
      << wide.out;
  const Ended other = call({"run", "linear_row", "tp=2", "--check", "mask,forward"});
  EXPECT_TRUE(holds(other.out,
                    "\nnot due    mask: nothing on this line for it to ask (does every query see"))
      << other.out;
  Folder folder;
  const Ended prepared =
      call({"prepare", "linear_row", "tp=2", "--check", "mask,forward", folder / "p"});
  EXPECT_TRUE(holds(prepared.out, "\nnot due    mask: nothing on this line for it to ask"))
      << prepared.out;
  const Ended gate = call({"gate", "norm", "--tier", "smoke", "--check", "mask,forward"});
  EXPECT_TRUE(holds(gate.out, "mask: nothing on these lines for it to ask")) << gate.out;
  const Ended forward_only = call({"run", "replicated_clip", "tp=2"});
  EXPECT_TRUE(
      holds(forward_only.out, "\nnot due    replicated_clip: gradient, gradcheck, accumulate\n"))
      << forward_only.out;
  const Ended told = call({"explain", "replicated_clip", "tp=2"});
  EXPECT_TRUE(holds(
      told.out, "accumulate   not due: the contract has no backward: forward judges all results\n"))
      << told.out;
  const Ended asked = call({"run", "linear_row", "tp=2", "dtype=f32", "--check", "gradcheck"});
  EXPECT_EQ(asked.code, 2);
  EXPECT_TRUE(holds(asked.err, "met gradcheck: asked in f64; `explain`")) << asked.err;
}

// A run that fails leaves its tensors where they are asked for; a folder that cannot be is refused
// before anything runs.
TEST_F(Command, DumpWritesWhatFailed) {
  Folder folder;
  const Ended failed = call({"run", "linear_row", "tp=2", "sp=on",
                             "control=row_bias_gradient_times_p", "--dump", folder / "tensors"});
  EXPECT_EQ(failed.code, 1) << failed.err;
  EXPECT_TRUE(holds(failed.out, "\ndumped     1 of 1 case that did not pass, in ")) << failed.out;
  EXPECT_FALSE(fs::is_empty(folder / "tensors"));
  std::ofstream(folder / "file") << "x";
  const Ended refused =
      call({"gate", "mapping_copy", "--tier", "smoke", "--dump", folder / "file"});
  EXPECT_EQ(refused.code, 2);
  EXPECT_TRUE(holds(refused.err, "--dump: expected a folder")) << refused.err;
  EXPECT_EQ(refused.out, "");
}

}  // namespace
}  // namespace shardproof
