// Judging from files: right answers pass, each kind of broken one is failed by the check that
// exists for it, and files that are not what was asked for are named.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstring>
#include <fstream>
#include <set>
#include <sstream>
#include <thread>

#include "oracle/checks/pairing.hpp"
#include "oracle/device.hpp"
#include "oracle/due.hpp"
#include "oracle/memory_watch.hpp"
#include "oracle/prepared/answer.hpp"
#include "oracle/prepared/prepare.hpp"
#include "suites/self/foreign.hpp"

namespace shardproof::prepared {
namespace {
namespace prepared_test {

using foreign::answer;
using foreign::judged;
using foreign::npy;
using foreign::with;
using tensors::TensorToWrite;
namespace fs = std::filesystem;

const Registry& families() {
  static const Registry r = all_families();
  return r;
}

class Prepared : public testing::Test {
 protected:
  Prepared() : folder(fs::temp_directory_path() / fmt::format("prepared{}", getpid())) {}
  ~Prepared() override { fs::remove_all(folder); }

  void prepare(const std::string& line, const std::vector<std::string>& only = {}) {
    fs::remove_all(folder);
    prepare_case(parse(line, families()), only, folder, families());
  }
  std::string refusal() const {
    try {
      judged(folder, families());
    } catch (const BadInput& e) {
      return e.what();
    }
    return "accepted";
  }
  // One line that names the file and holds the parts.
  void expect_refused(const std::string& file, const std::vector<std::string>& parts) const {
    const std::string said = refusal();
    EXPECT_EQ(said.rfind(path(file), 0), 0u) << said;
    for (const std::string& part : parts)
      EXPECT_NE(said.find(part), std::string::npos) << part << "\n  " << said;
    EXPECT_EQ(said.find('\n'), std::string::npos);
  }
  std::string path(const std::string& name) const { return folder / name; }
  std::string text(const std::string& name) const {
    std::ifstream in(path(name), std::ios::binary);
    std::ostringstream all;
    all << in.rdbuf();
    return all.str();
  }
  void write(const std::string& name, const std::string& all) const {
    std::ofstream(path(name), std::ios::binary) << all;
  }

  fs::path folder;
};

TensorToWrite* named(std::vector<TensorToWrite>& tensors, const std::string& name) {
  for (TensorToWrite& t : tensors)
    if (t.name == name) return &t;
  ADD_FAILURE() << "expected " << name;
  return nullptr;
}

// The lowest bit of the last element.
void spoil_last(TensorToWrite& t) {
  t.bytes = [was = t.bytes, size = size_of(t.dtype)] {
    auto bytes = was();
    bytes[bytes.size() - size] ^= std::byte{1};
    return bytes;
  };
}

// ---- Right and broken answers

// One line of each contract, of several shots and kinds of operands.
TEST_F(Prepared, RightAnswersOfEveryContractPass) {
  for (const Contract& c : families().contracts()) {
    for (const std::string& text : c.cases("smoke")) {
      const Case line = parse(text, families());
      if (line.world() != 2) continue;
      prepare(text);
      answer(folder, families(), {.arguments = true});
      const Report report = judged(folder, families());
      EXPECT_EQ(exit_code(report), 0) << text;
      EXPECT_TRUE(with(report, Verdict::failed).empty()) << text;
      EXPECT_TRUE(with(report, Verdict::skipped).empty()) << text;
      EXPECT_FALSE(with(report, Verdict::passed).empty()) << text;
      EXPECT_EQ(report.lanes.at(0).name, "files.np2");
      EXPECT_TRUE(report.lanes.at(0).proven) << text;
      break;
    }
  }
}

// What ranks were fed is read from their files: the same bits as those that the fills draw.
TEST_F(Prepared, FilesHoldWhatIsDrawn) {
  for (const Contract& c : families().contracts()) {
    for (const std::string& text : c.cases("smoke")) {
      const Case line = parse(text, families());
      if (line.world() < 4 || line.text("strides") != "contiguous") continue;
      prepare(text);
      const Plan plan = read_case(folder, families()).plan;
      Evidence drawing = plan.evidence, reading = plan.evidence;
      std::vector<std::unique_ptr<tensors::SafetensorsFile>> files;
      for (int r = 0; r < drawing.mesh.world(); ++r)
        files.push_back(std::make_unique<tensors::SafetensorsFile>(path(in_file(r))));
      ResultTensor held;
      reading.fed = [&](int rank, int shot, int feed, int operand) -> const ResultTensor* {
        for (const Step& s : plan.passes[size_t(shot)].steps)
          for (const Named& n : s.takes)
            if (s.feed == feed && n.operand == operand) {
              const tensors::FileTensor* t = (*files[size_t(rank)])->find(n.name);
              held = {feed, operand, n.gradient, *t->dtype, t->shape, Bytes::of_file(t->bytes)};
              return &held;
            }
        return nullptr;
      };
      for (size_t s = 0; s < drawing.shots.size(); ++s)
        for (size_t f = 0; f < drawing.shots[s].feeds.size(); ++f)
          for (int k = 0; k < int(drawing.operands.size()); ++k) {
            const Whole want = drawn(drawing, drawing.shots[s].feeds[f], k, k >= drawing.inputs),
                        got = drawn(reading, reading.shots[s].feeds[f], k, k >= drawing.inputs);
            ASSERT_EQ(got.shape, want.shape) << text;
            ASSERT_EQ(got.value.size(), want.value.size()) << text;
            for (size_t i = 0; i < want.value.size(); ++i)
              ASSERT_TRUE(got.value[i] == want.value[i] ||
                          (std::isnan(got.value[i]) && std::isnan(want.value[i])))
                  << text << " " << drawing.shots[s].name << " "
                  << drawing.operands[size_t(k)].name;
          }
      break;
    }
  }
}

TEST_F(Prepared, BrokenAnswersAreFailedByTheirCheck) {
  struct Row {
    const char *contract, *control, *check;
  };
  for (const Row& row : {Row{"linear_row", "bias_before_reduce", "forward"},
                         {"linear_row", "row_bias_gradient_times_p", "gradient"},
                         {"linear_row", "gather_gemm_swapped", "adjoint"},
                         {"linear_column", "wgrad_overwrites", "accumulate"},
                         {"mapping_gather", "gather_backward_reduces", "adjoint"},
                         {"norm_sequence", "norm_gradient_not_summed", "replica"},
                         {"block", "dropout_shared_on_shards", "replica"},
                         {"attention_ring", "strict_causal", "mask"},
                         {"attention_ring", "ring_step_skipped", "coverage"},
                         {"attention_ring", "finite_mask_bias", "leak"}}) {
    const Control* control = nullptr;
    for (const Control& c : families().controls())
      if (c.contract == row.contract && c.name == row.control) control = &c;
    ASSERT_TRUE(control) << row.contract << " " << row.control;
    Case line = parse(control->witness, families());
    prepare(print(line));
    answer(folder, families());
    EXPECT_EQ(exit_code(judged(folder, families())), 0) << control->witness;
    answer(folder, families(), {.control = row.control});
    const Report report = judged(folder, families());
    EXPECT_EQ(exit_code(report), 1) << row.control;
    const auto failed = with(report, Verdict::failed);
    EXPECT_NE(std::find(failed.begin(), failed.end(), row.check), failed.end())
        << row.control << ": " << fmt::format("{}", fmt::join(failed, ","));
  }
}

// Values that are in range of f16 by themselves, with errors that may carry them beyond.
TEST_F(Prepared, AResultThatItsTypeMayNotHoldIsNotJudged) {
  prepare("pipeline_stages tokens=8 hidden=8 layers=9 dtype=f16 fill=normal");
  const CaseFile c = read_case(folder, families());
  std::vector<TensorToWrite> zeros;
  for (const Pass& pass : c.plan.passes)
    for (const Step& step : pass.steps)
      for (const Named& n : step.gives) {
        const auto shape = c.plan.local_shape_of(n, 0);
        zeros.push_back(foreign::held(n.name, DType::f16, shape,
                                      std::vector<std::byte>(size_t(2 * product(shape)))));
      }
  tensors::write_safetensors(path(out_file(0)), std::move(zeros), {{"case", c.digest}});
  const Report report = judged(folder, families());
  EXPECT_EQ(exit_code(report), 3);
  EXPECT_EQ(with(report, Verdict::skipped), c.plan.checks);
  EXPECT_EQ(report.cases.at(0).checks.at(0).note.find("fill: expected results within 65504"), 0u);
}

TEST_F(Prepared, AnArgumentThatChangedFailsMemory) {
  prepare("linear_row tp=2 sp=on");
  answer(folder, families(), {.arguments = true, .change = [](int rank, auto& tensors) {
                                if (rank != 1) return;
                                TensorToWrite* w = named(tensors, "w");
                                w->bytes = [was = w->bytes] {
                                  auto bytes = was();
                                  bytes[5 * 8 + 7] ^= std::byte{0x80};  // the sign of element 5
                                  return bytes;
                                };
                              }});
  const Report report = judged(folder, families());
  EXPECT_EQ(exit_code(report), 1);
  EXPECT_EQ(with(report, Verdict::failed), std::vector<std::string>{"memory"});
  for (const CheckResult& c : report.cases[0].checks)
    if (c.check == "memory") {
      EXPECT_EQ(c.findings.at(0).rank, 1);
      // w is [7,48], cut along its second dim: local element 5 of rank 1 is w[0,24+5].
      EXPECT_EQ(c.findings.at(0).where, "w[0,29]");
    }
}

// Cotangents are arguments, too.
TEST_F(Prepared, ACotangentThatChangedFailsMemory) {
  prepare("linear_row tp=2 sp=on");
  answer(folder, families(), {.arguments = true, .change = [](int rank, auto& tensors) {
                                if (rank == 0) spoil_last(*named(tensors, "grad.y"));
                              }});
  const Report report = judged(folder, families());
  EXPECT_EQ(with(report, Verdict::failed), std::vector<std::string>{"memory"});
  for (const CheckResult& c : report.cases[0].checks)
    if (c.check == "memory") {
      EXPECT_EQ(c.findings.at(0).tensor, "cotangent of y");
    }
}

// Arguments are compared in pieces of a MiB.
TEST_F(Prepared, AnArgumentThatChangedInItsLastPieceFailsMemory) {
  prepare("mapping_copy tp=2 tokens=512 hidden=384", {"memory"});
  answer(folder, families(), {.arguments = true, .change = [](int rank, auto& tensors) {
                                if (rank == 1) spoil_last(*named(tensors, "x"));
                              }});
  const Report report = judged(folder, families());
  ASSERT_EQ(with(report, Verdict::failed), std::vector<std::string>{"memory"});
  EXPECT_EQ(report.cases[0].checks[0].findings.at(0).where, "x[511,383]");
}

TEST_F(Prepared, NaNIsAFailedCheckAndNoBadFile) {
  prepare("linear_row tp=2 sp=on");
  answer(folder, families(), {.change = [](int rank, auto& tensors) {
           if (rank != 0) return;
           TensorToWrite* y = named(tensors, "y");
           y->bytes = [was = y->bytes] {
             auto bytes = was();
             store(bytes.data(), DType::f64, std::nan(""));
             return bytes;
           };
         }});
  const Report report = judged(folder, families());
  EXPECT_EQ(exit_code(report), 1);
  EXPECT_EQ(with(report, Verdict::failed), std::vector<std::string>{"forward"});
  for (const CheckResult& c : report.cases[0].checks)
    if (c.check == "forward") {
      // Nothing is known of the program's buffers.
      EXPECT_EQ(c.findings.at(0).means, "NaN was returned");
    }
}

// ---- Parts of an answer

TEST_F(Prepared, OneShotIsAnAnswerAndTheRestIsSkippedByName) {
  prepare("linear_row tp=4 sp=on");
  answer(folder, families(), {.change = [](int, auto& tensors) {
           std::erase_if(tensors, [](auto& t) { return t.name.starts_with("shot"); });
         }});
  const Report report = judged(folder, families());
  EXPECT_EQ(exit_code(report), 0);
  EXPECT_EQ(with(report, Verdict::passed),
            (std::vector<std::string>{"forward", "gradient", "replica"}));
  EXPECT_EQ(with(report, Verdict::skipped),
            (std::vector<std::string>{"adjoint", "memory", "accumulate"}));
  const Plan plan = read_case(folder, families()).plan;
  const auto first_of = [&](const std::string& check) {
    for (const Pass& p : plan.passes)
      if (p.name.starts_with(check + ":")) return p.steps[0].prefix;
    return std::string("none");
  };
  EXPECT_EQ(
      not_judged(report),
      (std::vector<std::string>{
          fmt::format("adjoint (the program did not return {}...)", first_of("adjoint")),
          "memory (the program returned none of its arguments; saved under their own names, "
          "they are compared)",
          fmt::format("accumulate (the program did not return {}...)", first_of("accumulate"))}));
  EXPECT_FALSE(report.lanes.at(0).proven);
  EXPECT_NE(std::find(report.not_due.begin(), report.not_due.end(),
                      "ledger, lockstep of files: they hold results and no calls"),
            report.not_due.end());
}

// What reaches what is read off the passes of `mask`.
TEST_F(Prepared, WithoutThePassesOfMaskCoverageIsSkippedToo) {
  prepare("attention_ring cp=2", {"forward", "mask", "coverage"});
  answer(folder, families(), {.change = [](int, auto& tensors) {
           std::erase_if(tensors, [](auto& t) { return t.name.starts_with("shot"); });
         }});
  EXPECT_EQ(with(judged(folder, families()), Verdict::skipped),
            (std::vector<std::string>{"mask", "coverage"}));
}

TEST_F(Prepared, OneCheckThatWasSkippedLeavesTheLaneOpen) {
  prepare("linear_row tp=2 sp=on");
  answer(folder, families());
  const Report report = judged(folder, families());
  EXPECT_EQ(exit_code(report), 0);
  EXPECT_EQ(with(report, Verdict::skipped), std::vector<std::string>{"memory"});
  EXPECT_FALSE(report.lanes.at(0).proven);
  EXPECT_NE(report.lanes.at(0).reason.find("none of its arguments"), std::string::npos);
}

// Of rank 1 are no files of ranks 10 and 11.
TEST_F(Prepared, RanksOfTwoDigits) {
  prepare("mapping_copy tp=12", {"forward"});
  answer(folder, families());
  EXPECT_EQ(refusal(), "accepted");
}

// What a step reads otherwise stands in it.
TEST_F(Prepared, StepsSayTheKeysThatTheyReadOtherwise) {
  prepare("block tp=2 sp=on");
  const Plan plan = read_case(folder, families()).plan;
  std::set<std::string> draws;
  for (const Pass& p : plan.passes)
    for (const Step& s : p.steps)
      for (const auto& [key, value] : s.keys) {
        EXPECT_EQ(key, "draw");
        draws.insert(value);
        EXPECT_NE(text("case.json").find(fmt::format("\"keys\": {{\"draw\": \"{}\"}}", value)),
                  std::string::npos);
      }
  EXPECT_GT(draws.size(), 1u);
}

// What a reader of case.json builds its layouts and groups from.
TEST_F(Prepared, TheCaseStatesDualsOfLayoutsAndAllGroups) {
  const auto holds = [&](const std::string& words) {
    return text("case.json").find(words) != std::string::npos;
  };
  prepare("mapping_copy tp=2 axis=tp");
  EXPECT_TRUE(holds(R"("gradient_layout": ")" + shardproof::text(Layout{{Axis::tp, P()}})));
  EXPECT_FALSE(holds(R"("gradient_layout": ")" + shardproof::text(Layout{{Axis::tp, R()}})));
  prepare("replicated_qkv tp=4 kv_heads=2");
  EXPECT_TRUE(holds(R"("kv": [[0,2], [1,3]])")) << text("case.json");
  EXPECT_TRUE(holds(R"("rep": [[0,1], [2,3]])")) << text("case.json");
}

TEST_F(Prepared, AccumulateAloneNeedsItsBackward) {
  prepare("linear_row tp=2", {"accumulate"});
  EXPECT_EQ(read_case(folder, families()).plan.checks, std::vector<std::string>{"accumulate"});
}

TEST_F(Prepared, StridesAreNoMatterOfFiles) {
  for (const char* strides : {"transposed", "expanded", "expanded_inputs"}) try {
      prepare(std::string("linear_row tp=2 strides=") + strides);
      ADD_FAILURE() << strides;
    } catch (const BadInput& e) {
      EXPECT_NE(std::string(e.what()).find("a file has no strides"), std::string::npos) << e.what();
    }
}

// Replicas are compared on the first pass all the same; what that cannot show is said, and the lane
// is not proven.
TEST_F(Prepared, ReplicasWithoutDataThatRoundAreSaidToBeSo) {
  prepare("linear_row tp=4");
  std::string prefix;
  for (const Pass& p : read_case(folder, families()).plan.passes)
    if (p.name == "replica:normal") prefix = p.steps[0].prefix;
  ASSERT_NE(prefix, "");
  answer(folder, families(), {.arguments = true, .change = [&](int, auto& tensors) {
                                std::erase_if(tensors,
                                              [&](auto& t) { return t.name.starts_with(prefix); });
                              }});
  const Report report = judged(folder, families());
  EXPECT_EQ(exit_code(report), 0);
  EXPECT_TRUE(with(report, Verdict::skipped).empty());
  EXPECT_FALSE(report.lanes.at(0).proven);
  EXPECT_EQ(report.lanes.at(0).reason, fmt::format("the program did not return {}...", prefix));
  for (const CheckResult& c : report.cases.at(0).checks)
    if (c.check == "replica") {
      EXPECT_EQ(c.verdict, Verdict::passed);
      EXPECT_NE(c.note.find(prefix + "..., so replicas were not compared on data that round"),
                std::string::npos)
          << c.note;
    }
}

// A program that does not read the key that numbers draws gives one mask again and again. Masks of
// 12 rows of 10 are 34 bits (0.286 an element): too few to say that two that are equal are so by a
// fault. With 4 times as many rows one draw would do.
TEST_F(Prepared, ADrawThatIsGivenManyTimesCountsOnce) {
  const auto verdict_on = [&](const std::string& line) {
    prepare(line);
    answer(folder, families(),
           {.control = "dropout_by_local_index", .change = [](int, auto& tensors) {
              TensorToWrite* first = nullptr;
              for (TensorToWrite& t : tensors) {
                const size_t slash = t.name.find("/y");
                const bool draw = slash != std::string::npos && t.name.find('.') < slash;
                if (!draw) continue;
                if (!first || t.name.substr(0, t.name.find('.')) !=
                                  first->name.substr(0, first->name.find('.')))
                  first = &t;
                t.bytes = first->bytes;
              }
            }});
    const Report report = judged(folder, families());
    for (const CheckResult& c : report.cases.at(0).checks)
      if (c.check == "replica") return c.verdict;
    return Verdict::untested;
  };
  EXPECT_EQ(verdict_on("block tp=2 sp=on"), Verdict::passed);
  EXPECT_EQ(verdict_on("block tp=2 sp=on tokens=96"), Verdict::failed);
}

TEST_F(Prepared, OnlyTheChecksAskedFor) {
  prepare("linear_row tp=2 sp=on", {"forward"});
  EXPECT_EQ(text("rank0.in.safetensors").find("grad."), std::string::npos);
  EXPECT_EQ(text("rank0.in.safetensors").find("shot"), std::string::npos);
  answer(folder, families());
  const Report report = judged(folder, families());
  EXPECT_EQ(with(report, Verdict::passed), std::vector<std::string>{"forward"});
  EXPECT_EQ(exit_code(report), 0);
  Options options;
  options.checks = {"forward", "mask"};
  Progress silent;
  const auto not_due = prepared::judge_folder(folder, options, families(), silent).not_due;
  EXPECT_TRUE(std::find(not_due.begin(), not_due.end(), "mask: not prepared in any case here") !=
              not_due.end());
  EXPECT_THROW(prepare("linear_row tp=2 sp=on", {"ledger"}), BadInput);
}

// ---- Files that are not what was asked for

class Answered : public Prepared {
 protected:
  Answered() {
    prepare("linear_row tp=2 sp=on", {"forward", "gradient", "memory"});
    answer(folder, families());
  }
  // Of a pass that accumulates; its parameters' gradients are not whole there.
  std::string prefix_of_first_backward_of_a_step() const {
    for (const auto& pass : read_case(folder, families()).plan.passes)
      for (const auto& step : pass.steps)
        if (pass.accumulate && step.backward) return step.prefix;
    ADD_FAILURE() << "expected a pass that accumulates";
    return "";
  }
  void change(const std::function<void(std::vector<TensorToWrite>&)>& edit) {
    answer(folder, families(), {.change = [&](int rank, auto& tensors) {
             if (rank == 1) edit(tensors);
           }});
  }
};

TEST_F(Answered, MissingFiles) {
  EXPECT_EQ(refusal(), "accepted");
  for (const char* name : {"rank1.out.safetensors", "rank0.in.safetensors", "case.json"}) {
    const std::string all = text(name);
    fs::remove(path(name));
    expect_refused(name, {"met nothing there"});
    write(name, all);
  }
  EXPECT_EQ(refusal(), "accepted");
}

TEST_F(Answered, AGradientThatTheLineDoesNotAskIsSaidToBeOne) {
  prepare("linear_row tp=2 frozen=on", {"forward", "gradient"});
  answer(folder, families(), {.change = [](int rank, auto& tensors) {
           if (rank == 1) tensors.push_back(tensors.front()), tensors.back().name = "grad.w";
         }});
  expect_refused("rank1.out.safetensors", {"'grad.w'", "no step of this line gives", "leave it"});
}

TEST_F(Answered, WrongTensors) {
  change([](auto& tensors) { named(tensors, "y")->name = "yy"; });
  expect_refused("rank1.out.safetensors", {"'yy'", "did you mean 'y'"});
  change([](auto& tensors) { std::erase_if(tensors, [](auto& t) { return t.name == "grad.w"; }); });
  expect_refused("rank1.out.safetensors", {"expected tensor 'grad.w'", "--check forward"});
  change([](auto& tensors) {
    std::swap(named(tensors, "y")->shape[0], named(tensors, "y")->shape[1]);
  });
  expect_refused("rank1.out.safetensors", {"tensor 'y' as F64 [12,7], met F64 [7,12]"});
  change([](auto& tensors) {
    *named(tensors, "grad.b") =
        foreign::held("grad.b", DType::f32, {7}, std::vector<std::byte>(28));
  });
  expect_refused("rank1.out.safetensors", {"tensor 'grad.b' as F64 [7], met F32 [7]"});
}

TEST_F(Answered, CutShort) {
  for (const char* name : {"rank1.out.safetensors", "rank1.in.safetensors", "case.json"}) {
    const std::string all = text(name);
    for (const size_t n : {size_t(0), size_t(7), size_t(40), all.size() / 2, all.size() - 1}) {
      write(name, all.substr(0, n));
      expect_refused(name, {"expected"});
    }
    write(name, all);
  }
}

TEST_F(Answered, EveryEditOfTheCaseShows) {
  const std::string all = text("case.json");
  for (size_t at = 0; at < all.size(); at += 37) {
    std::string edited = all;
    edited[at] = edited[at] == '7' ? '8' : '7';
    write("case.json", edited);
    expect_refused("case.json", {"expected"});
  }
  std::string version = all;
  version.replace(version.find("\"version\": 2"), 12, "\"version\": 1");
  write("case.json", version);
  expect_refused("case.json", {"version 2", "met version 1"});
  // Nothing is computed for a line that was made large: its tensors would not fit memory.
  std::string large = all;
  const size_t tokens = large.find(" tokens=24 ", large.find("\"canonical\""));
  ASSERT_NE(tokens, large.npos);
  large.replace(tokens, 11, " tokens=16777216 ");
  write("case.json", large);
  expect_refused("case.json", {"expected what was prepared, met a text whose seal does not hold"});
}

TEST_F(Answered, AnEditOfTheCaseIsToldWithItsLine) {
  const std::string all = text("case.json");
  std::string edited = all;
  edited.replace(edited.find("\"contract\": \"linear_row\""), 24, "\"contract\": \"linear_rox\"");
  const auto line = 1 + std::count(all.begin(), all.begin() + long(all.find("\"contract\"")), '\n');
  write("case.json", edited);
  expect_refused("case.json", {fmt::format("in line {}, met", line), "rox", "edited after that"});
}

TEST_F(Answered, ACaseOfAnotherProgramOrFormatIsNamed) {
  const std::string all = text("case.json");
  std::string other = all;
  const size_t at = other.find("\"shardproof\": \"") + 15;
  other.insert(at, "9");
  write("case.json", other);
  expect_refused("case.json", {"by shardproof", "met version 2 by shardproof '9"});
  other = all;
  other.replace(other.find("shardproof.case"), 15, "shardproof.cast");
  write("case.json", other);
  expect_refused("case.json", {"the format 'shardproof.case'", "shardproof.cast"});
}

// Sealed, and with an input of one of two ranks.
TEST_F(Answered, ACaseNamesAFileOfEachRank) {
  const CaseFile c = read_case(folder, families());
  write("case.json", case_text(c.plan, {c.files[0]}));
  expect_refused("case.json", {"expected what was prepared"});
}

// A further pass is there on every rank, or on none.
TEST_F(Answered, APassThatSomeRanksReturnedIsDueOnAll) {
  prepare("linear_row tp=2 sp=on");
  for (const int without : {0, 1}) {
    answer(folder, families(), {.change = [&](int rank, auto& tensors) {
             if (rank == without)
               std::erase_if(tensors, [](auto& t) { return t.name.starts_with("shot1/"); });
           }});
    expect_refused(out_file(without), {"tensor 'shot1/", "none of that name"});
  }
}

TEST_F(Answered, EveryEditOfAnInputNamesTheTensor) {
  const std::string all = text("rank1.in.safetensors");
  std::string edited = all;
  edited.back() = char(edited.back() ^ 1);
  write("rank1.in.safetensors", edited);
  const tensors::SafetensorsFile file(path("rank1.in.safetensors"));
  expect_refused("rank1.in.safetensors",
                 {"tensor '" + file->tensors().back().name + "'", "edited"});
}

// The same tensors in another file: nothing that they hold was edited, and still it is no file that
// was prepared.
TEST_F(Answered, AnInputWithATensorMoreIsNoneThatWasPrepared) {
  std::vector<TensorToWrite> all;
  tensors::Metadata metadata;
  {
    const tensors::SafetensorsFile file(path("rank1.in.safetensors"));
    metadata = file->metadata();
    for (const tensors::FileTensor& t : file->tensors())
      all.push_back(foreign::held(t.name, *t.dtype, t.shape, {t.bytes.begin(), t.bytes.end()}));
  }
  all.push_back(foreign::held("more", DType::f64, {1}, std::vector<std::byte>(8)));
  tensors::write_safetensors(path("rank1.in.safetensors"), std::move(all), metadata);
  expect_refused("rank1.in.safetensors",
                 {"expected the file as it was prepared, met another one; it was edited"});
}

// The base shot is due, whoever leaves it out.
TEST_F(Answered, NoAnswerAtAllIsNoAnswer) {
  answer(folder, families(), {.change = [](int, auto& tensors) { tensors.clear(); }});
  expect_refused("rank0.out.safetensors", {"met none of that name"});
}

// Running sums are those of parameters; a gradient that the line does not ask is no result.
TEST_F(Answered, OnlyASumOfParametersMayBeHandedInEarly) {
  prepare("linear_column tp=2 microbatches=2 input_grad=off", {"accumulate"});
  const auto with_more = [&](const std::string& of) {
    answer(
        folder, families(), {.change = [&](int rank, auto& tensors) {
          if (rank != 1) return;
          const std::string prefix = prefix_of_first_backward_of_a_step();
          tensors.push_back(foreign::held(prefix + of, DType::f64, {1}, std::vector<std::byte>(8)));
        }});
  };
  with_more("grad.w");
  EXPECT_EQ(refusal(), "accepted");
  with_more("grad.x");
  expect_refused("rank1.out.safetensors", {"grad.x'", "no step of this line gives", "leave it"});
}

TEST_F(Answered, FilesOfTwoRunsAreNotMixed) {
  const std::string out = text("rank1.out.safetensors"), in = text("rank1.in.safetensors");
  prepare("linear_row tp=2 sp=on seed=2", {"forward", "gradient", "memory"});
  answer(folder, families());
  EXPECT_EQ(refusal(), "accepted");
  const std::string own = text("rank1.out.safetensors");
  write("rank1.out.safetensors", out);
  expect_refused("rank1.out.safetensors", {"files of different cases are mixed"});
  write("rank1.out.safetensors", own);
  write("rank1.in.safetensors", in);
  expect_refused("rank1.in.safetensors", {"files of different cases are mixed"});
}

TEST_F(Answered, AnswersOfTwoRunsOfOneCaseAreNotMixed) {
  const std::string digest = read_case(folder, families()).digest;
  const auto say_run = [&](int rank, const tensors::Metadata& run) {
    const std::string name = out_file(rank);
    std::vector<TensorToWrite> all;
    const tensors::SafetensorsFile file(path(name));
    for (const tensors::FileTensor& t : file->tensors())
      all.push_back(foreign::held(t.name, *t.dtype, t.shape, {t.bytes.begin(), t.bytes.end()}));
    tensors::Metadata metadata = run;
    metadata["case"] = digest;
    tensors::write_safetensors(path(name), std::move(all), metadata);
  };
  say_run(1, {{"run", "77c1"}});
  expect_refused("rank0.out.safetensors",
                 {"expected the run '77c1' of rank1.out.safetensors, met none under 'run': answers "
                  "of two runs are mixed, run the program again"});
  say_run(0, {{"run", "77c1"}});
  EXPECT_EQ(refusal(), "accepted");
  say_run(0, {{"run", "5f3a"}});
  expect_refused("rank1.out.safetensors",
                 {"expected the run '5f3a' of rank0.out.safetensors, met '77c1': answers of two "
                  "runs are mixed, run the program again"});
}

// What another program put there is not repeated at length.
TEST_F(Answered, OddFilesGetOneShortLine) {
  const auto is_short = [&](const std::string& file, const std::vector<std::string>& parts) {
    expect_refused(file, parts);
    const std::string said = refusal();
    EXPECT_LT(said.size(), path(file).size() + 250) << said;
    EXPECT_EQ(said.find(path(file), 1), said.npos) << "named twice: " << said;
  };
  const std::string all = text("case.json"), out = text("rank0.out.safetensors");
  const size_t canonical = all.find("\"canonical\": \"");
  write("case.json", std::string(all).replace(canonical, 14, "\"canonical\": 7, \"x\": \""));
  is_short("case.json", {"a text under 'canonical', met 7"});
  fs::resize_file(path("case.json"), size_t(65) << 20);
  is_short("case.json", {"at most 67108864 bytes, met 68157440"});
  fs::remove(path("case.json"));
  fs::create_symlink("case.json", path("case.json"));
  is_short("case.json", {"expected"});
  fs::remove(path("case.json"));
  write("case.json", all);
  const std::string digest = read_case(folder, families()).digest;
  tensors::write_safetensors(path("rank0.out.safetensors"), {}, {{"case", std::string(9999, 'x')}});
  is_short("rank0.out.safetensors", {"files of different cases are mixed"});
  tensors::write_safetensors(path("rank0.out.safetensors"), {},
                             {{"case", digest}, {"rank", std::string(9999, '\n')}});
  is_short("rank0.out.safetensors", {"expected the file of rank 0"});
  write("rank0.out.safetensors", out);
  EXPECT_EQ(refusal(), "accepted");
}

// The same case has the same digest: what was answered before would pass for an answer to it.
TEST_F(Answered, PreparingRemovesWhatWasAnsweredBefore) {
  for (const char* name : {"rank7.out.safetensors", "rankx.out.safetensors", "mine.txt"})
    write(name, "of another world");
  prepare_case(parse("linear_row tp=2 sp=on", families()), {"forward", "gradient", "memory"},
               folder, families());
  for (const char* name :
       {"rank0.out.safetensors", "rank1.out.safetensors", "rank7.out.safetensors"})
    EXPECT_FALSE(fs::exists(path(name))) << name;
  EXPECT_TRUE(fs::exists(path("rankx.out.safetensors")));
  EXPECT_TRUE(fs::exists(path("mine.txt")));
  expect_refused("rank0.out.safetensors", {"met nothing there"});
}

// A program that takes every input that lies there would be fed one of another world.
TEST_F(Answered, PreparingRemovesInputsOfRanksThatTheCaseHasNot) {
  prepare_case(parse("linear_row tp=4 sp=on", families()), {"forward"}, folder, families());
  for (const char* name : {"rank12.in.safetensors", "rank00.in.safetensors", "rank.in.safetensors",
                           "rank2.in.safetensors.mine"})
    write(name, "of another world");
  ASSERT_TRUE(fs::exists(path("rank3.in.safetensors")));
  prepare_case(parse("linear_row tp=2 sp=on", families()), {"forward"}, folder, families());
  std::set<std::string> left;
  for (const auto& entry : fs::directory_iterator(folder)) left.insert(entry.path().filename());
  EXPECT_EQ(left,
            (std::set<std::string>{"case.json", "rank0.in.safetensors", "rank1.in.safetensors",
                                   "rank.in.safetensors", "rank2.in.safetensors.mine"}));
  answer(folder, families());
  EXPECT_EQ(refusal(), "accepted");
}

TEST_F(Answered, AnAnswerWithoutTheDigest) {
  tensors::write_safetensors(path("rank0.out.safetensors"), {});
  expect_refused("rank0.out.safetensors", {"'case' in __metadata__"});
}

TEST_F(Answered, FilesOfTwoRanksAreNotSwapped) {
  const std::string own = text("rank0.in.safetensors");
  write("rank0.in.safetensors", text("rank1.in.safetensors"));
  expect_refused("rank0.in.safetensors", {"expected the file of rank 0, met that of rank 1"});
  write("rank0.in.safetensors", own);
  EXPECT_EQ(refusal(), "accepted");
}

// ---- Arrays of numpy

class Arrays : public Prepared {
 protected:
  // Our kernels, or a twin, answer; what a rank hands in becomes arrays where `moves` says so.
  void answer_by(const std::string& line, const std::string& control,
                 const std::function<bool(int rank, const std::string& tensor)>& moves) {
    prepare(line);
    empty_.clear();
    const std::string digest = read_case(folder, families()).digest;
    answer(folder, families(), {.control = control, .change = [&](int rank, auto& all) {
                                  bool moved = false;
                                  std::erase_if(all, [&](const TensorToWrite& t) {
                                    if (!moves(rank, t.name)) return false;
                                    const char* descr = t.dtype == DType::f64   ? "<f8"
                                                        : t.dtype == DType::f32 ? "<f4"
                                                        : t.dtype == DType::f16 ? "<f2"
                                                                                : "<u2";
                                    write(npy_file(rank, t.name), npy(descr, t.shape, t.bytes()));
                                    return moved = true;
                                  });
                                  if (moved)
                                    write(card_file(rank),
                                          fmt::format("{{\"case\": \"{}\"}}", digest));
                                }});
    for (int r = 0; r < 2; ++r)
      if (const tensors::SafetensorsFile file(path(out_file(r))); file->tensors().empty())
        empty_.push_back(path(out_file(r)));
    for (const std::string& file : empty_) fs::remove(file);
  }
  std::vector<std::string> empty_;  // safetensors of which all became arrays
};

bool all_of_them(int, const std::string&) { return true; }

TEST_F(Arrays, AreAnAnswerLikeAnyOther) {
  for (const char* dtype : {"f64", "f32", "f16", "bf16"}) {
    answer_by(fmt::format("linear_row tp=2 sp=on dtype={}", dtype), "", all_of_them);
    EXPECT_EQ(empty_.size(), 2u);
    EXPECT_TRUE(fs::exists(path("rank1.y.npy")));
    const Report report = judged(folder, families());
    EXPECT_TRUE(with(report, Verdict::failed).empty()) << dtype;
    // Every shot came, so nothing but the arguments is missing.
    EXPECT_EQ(with(report, Verdict::skipped), (std::vector<std::string>{"memory"})) << dtype;
  }
  answer_by("linear_row tp=2 sp=on", "row_bias_gradient_times_p", all_of_them);
  EXPECT_EQ(with(judged(folder, families()), Verdict::failed).at(0), "gradient");
}

TEST_F(Arrays, StandBesideTheOtherForm) {
  answer_by("linear_row tp=2 sp=on", "", [](int rank, const std::string& tensor) {
    return rank == 1 && tensor.ends_with("grad.w");
  });
  EXPECT_TRUE(fs::exists(path("rank1.grad.w.npy")));
  EXPECT_TRUE(fs::exists(path("rank1.shot1.grad.w.npy")));
  EXPECT_TRUE(with(judged(folder, families()), Verdict::failed).empty());
}

// Of a single dim that is longer than one both orders are the same.
TEST_F(Arrays, ARowHasOneOrder) {
  answer_by("linear_row tp=2 sp=on tokens=2", "", all_of_them);
  const std::string all = text("rank1.y.npy");
  std::vector<std::byte> row(7 * 8);
  std::memcpy(row.data(), all.data() + all.size() - row.size(), row.size());
  write("rank1.y.npy", npy("<f8", {1, 7}, row, /*fortran=*/true));
  EXPECT_EQ(refusal(), "accepted");
}

TEST_F(Arrays, WhatIsWrongIsNamed) {
  answer_by("linear_row tp=2 sp=on", "", all_of_them);
  ASSERT_EQ(refusal(), "accepted");
  const std::vector<std::byte> bytes(12 * 7 * 8);  // 24 tokens on 2 ranks
  const std::string right = text("rank1.y.npy"), card = text("rank1.out.json");
  write("rank1.y.npy", npy("<f8", {12, 7}, bytes, /*fortran=*/true));
  expect_refused("rank1.y.npy", {"row-major", "ascontiguousarray"});
  write("rank1.y.npy", npy("<f8", {7, 12}, bytes));
  expect_refused("rank1.y.npy", {"tensor 'y' as F64 [12,7], met <f8 [7,12]"});
  write("rank1.y.npy", npy("<f4", {12, 14}, bytes));
  expect_refused("rank1.y.npy", {"as F64", "<f4"});
  write("rank1.y.npy", right.substr(0, right.size() - 8));
  expect_refused("rank1.y.npy", {"expected 672 bytes"});
  fs::remove(path("rank1.y.npy"));
  expect_refused("rank1.y.npy", {"expected tensor 'y', met none"});
  write("rank1.y.npy", right);
  write("rank1.yy.npy", right);
  expect_refused("rank1.yy.npy", {"'yy'", "did you mean 'y'"});
  fs::remove(path("rank1.yy.npy"));
  fs::remove(path("rank1.out.json"));
  expect_refused("rank1.out.json", {"digest", "nothing there"});
  write("rank1.out.json", "{\"case\": \"0123\"}");
  expect_refused("rank1.out.json", {"met one of 0123"});
  write("rank1.out.json", "{\"case\": 7}");
  expect_refused("rank1.out.json", {"a text under 'case'"});
  write("rank1.out.json", card);
  ASSERT_EQ(refusal(), "accepted");
  tensors::write_safetensors(path("rank1.out.safetensors"),
                             {foreign::held("y", DType::f64, {12, 7}, bytes)},
                             {{"case", read_case(folder, families()).digest}});
  expect_refused("rank1.y.npy", {"in one file", "rank1.out.safetensors"});
  prepare_case(parse("linear_row tp=2 sp=on", families()), {}, folder, families());
  for (const char* name : {"rank1.y.npy", "rank1.out.json", "rank0.shot1.grad.x.npy"})
    EXPECT_FALSE(fs::exists(path(name))) << name;
}

// ---- Files that change while they are judged

struct AtBegin final : Progress {
  explicit AtBegin(std::function<void()> what) : act(std::move(what)) {}
  void begin(int64_t, int64_t) override { act(); }  // every file has been opened
  void done(const CaseResult&) override { ADD_FAILURE() << "a verdict from a file that changed"; }
  void done(const ControlResult&) override {}
  void tick() override {}
  std::function<void()> act;
};

class Changed : public Prepared {
 protected:
  std::string told_when(const std::function<void()>& what) {
    prepare("linear_row tp=2 tokens=64 in=32 out=96");
    answer(folder, families());
    AtBegin progress(what);
    try {
      judge_folder(folder, {}, families(), progress);
    } catch (const BadInput& e) {
      return e.what();
    }
    return "accepted";
  }
};

TEST_F(Changed, CutShortIsNoCrash) {
  for (const char* name :
       {"rank1.out.safetensors", "rank0.out.safetensors", "rank1.in.safetensors"}) {
    uintmax_t whole = 0;
    const std::string said = told_when([&] {
      whole = fs::file_size(path(name));
      fs::resize_file(path(name), 4096);
    });
    EXPECT_EQ(said, fmt::format("{}: expected a file that stays as it is while it is read, met one "
                                "that was cut short from {} to 4096 bytes; wait until its program "
                                "has ended",
                                path(name), whole));
  }
}

// An array of numpy beside the rest of the answer, too.
TEST_F(Changed, AnArrayThatIsCutShortIsTold) {
  prepare("mapping_copy tp=2 tokens=64 hidden=32", {"forward"});
  std::vector<std::byte> bytes;
  answer(folder, families(), {.change = [&](int rank, auto& tensors) {
           if (rank != 1) return;
           bytes = named(tensors, "y")->bytes();
           std::erase_if(tensors, [](auto& t) { return t.name == "y"; });
         }});
  write(npy_file(1, "y"), npy("<f8", {64, 32}, bytes));
  ASSERT_EQ(refusal(), "accepted");
  AtBegin progress([&] { fs::resize_file(path(npy_file(1, "y")), 4096); });
  try {
    judge_folder(folder, {}, families(), progress);
    ADD_FAILURE() << "judged";
  } catch (const BadInput& e) {
    EXPECT_NE(std::string(e.what()).find("rank1.y.npy: expected a file that stays as it is"),
              std::string::npos)
        << e.what();
  }
}

TEST_F(Changed, WrittenToIsTold) {
  const std::string said = told_when([&] {
    std::fstream file(path("rank1.out.safetensors"),
                      std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(-8, std::ios::end);
    file.write("12345678", 8);
  });
  EXPECT_NE(said.find("rank1.out.safetensors: expected a file that stays as it is"), said.npos)
      << said;
  EXPECT_NE(said.find("met one that was written to"), said.npos) << said;
}

// ---- Interrupted in the middle

class Interrupted : public Prepared {
 protected:
  // Kills a process that prepares as soon as `begun` holds. One that was through before this one
  // was given a core to see that is no interrupted one: another is begun.
  void kill_when(
      const std::function<void()>& work, const std::function<bool()>& begun,
      const std::function<void()>& before = [] {}) {
    int status = 0;
    for (int tries = 0; tries < 50 && !WIFSIGNALED(status); ++tries) {
      before();
      const pid_t child = fork();
      if (child == 0) {
        work();
        _exit(0);
      }
      while (!begun() && waitpid(child, &status, WNOHANG) == 0)
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      kill(child, SIGKILL);
      waitpid(child, &status, 0);
    }
    ASSERT_TRUE(WIFSIGNALED(status)) << "it had ended before it was killed";
  }
  void none_there() const { fs::remove_all(folder); }
  void prepare_large() const {
    prepare_case(parse("mapping_copy tp=8 tokens=256 hidden=256", families()), {}, folder,
                 families());
  }
};

TEST_F(Interrupted, ACaseIsNoCaseUntilItIsWhole) {
  kill_when([&] { prepare_large(); }, [&] { return fs::exists(path("rank0.in.safetensors")); },
            [&] { none_there(); });
  expect_refused("case.json",
                 {"nothing there: it was interrupted in this folder", "prepare the folder again"});
  prepare_large();
  expect_refused("rank0.out.safetensors", {"run the program on this folder"});
  // A case that was whole is none while it is prepared again.
  kill_when([&] { prepare_large(); }, [&] { return !fs::exists(path("case.json")); });
  expect_refused("case.json", {"it was interrupted in this folder"});
  write("rank3.in.safetensors.part4711", "half a file");
  prepare_large();
  for (const auto& entry : fs::directory_iterator(folder))
    EXPECT_EQ(entry.path().string().find(".part"), std::string::npos) << entry.path();
}

// Where it lies is no part of a case; what was left behind is named.
TEST_F(Prepared, AFolderMayBeMovedAsAWhole) {
  prepare("linear_row tp=2 sp=on");
  answer(folder, families());
  const fs::path there = folder;
  folder = there.string() + ".moved";
  fs::rename(there, folder);
  EXPECT_EQ(exit_code(judged(folder, families())), 0);
  const fs::path here = fs::current_path();
  fs::current_path(folder);
  EXPECT_EQ(exit_code(judged(".", families())), 0);
  fs::current_path(here);
  for (const char* left : {"rank1.in.safetensors", "case.json"}) {
    fs::remove(path(left));
    expect_refused(left, {"nothing there", "moved or copied in part; bring the file along"});
  }
}

TEST_F(Interrupted, ABatteryIsNoneUntilItIsWhole) {
  Options options;
  options.tier = "smoke";
  options.patterns = {"mapping"};
  options.transports = {"processes"};
  const auto third = [&] {
    std::error_code error;
    for (const auto& entry : fs::directory_iterator(folder, error))
      if (entry.path().filename().string().starts_with("003.")) return true;
    return false;
  };
  kill_when([&] { prepare_battery(options, folder, families()); }, third, [&] { none_there(); });
  expect_refused("battery.json", {"nothing there: it was interrupted in this folder"});
}

// ---- Another world than the case's

TEST_F(Prepared, AnAnswerOfARankTooManyIsRefused) {
  prepare("linear_row tp=2 sp=on");
  answer(folder, families());
  ASSERT_EQ(refusal(), "accepted");
  for (const char* name : {"rank2.out.safetensors", "rank3.y.npy", "rank00.y.npy"}) {
    write(name, "");
    expect_refused(name, {"answers of ranks 0 to 1", "on 2 ranks"});
    fs::remove(path(name));
  }
  ASSERT_EQ(refusal(), "accepted");
}

// ---- Large results

// More wrong elements than are kept to say what they have in common.
TEST_F(Prepared, ThePatternOfVeryManyWrongElementsIsThatOfTheFirst) {
  prepare("mapping_copy tp=2 tokens=512 hidden=384", {"forward"});
  answer(folder, families(), {.change = [](int, auto& all) {
           TensorToWrite& y = *named(all, "y");
           auto bytes = y.bytes();
           for (size_t i = 0; i < bytes.size(); i += 8) {
             double v;
             std::memcpy(&v, &bytes[i], 8);
             v *= 3;
             std::memcpy(&bytes[i], &v, 8);
           }
           y = foreign::held("y", y.dtype, y.shape, std::move(bytes));
         }});
  const Report report = judged(folder, families());
  const Finding& f = report.cases.at(0).checks.at(0).findings.at(0);
  EXPECT_EQ(f.wrong, 2 * 512 * 384);  // more than the 2^18 that are kept
  EXPECT_EQ(f.pattern, "all x 3.000, as far as the first 262144 of them go");
}

TEST(MemoryWatch, TellsTheReferenceFromTheRest) {
  constexpr size_t mib = size_t(1) << 20;
  const auto touched = [](size_t n) { return std::vector<char>(n, 1); };
  watch_memory();
  const int64_t start = memory_told().beyond;
  std::vector<char> kept;
  {
    const ReferenceWork work;
    const auto passing = touched(96 * mib);
    kept = touched(32 * mib);
    EXPECT_EQ(passing.back() + kept.back(), 2);
  }
  reference_keeps(int64_t(kept.size()));
  const MemoryTold reference = memory_told();
  EXPECT_NEAR(double(reference.reference), 128.0 * mib, 16.0 * mib);
  EXPECT_NEAR(double(reference.beyond), double(start), 16.0 * mib);
  const auto own = touched(64 * mib);
  EXPECT_EQ(own.back(), 1);
  EXPECT_NEAR(double(memory_told().beyond), double(start) + 64.0 * mib, 16.0 * mib);
  EXPECT_NEAR(double(memory_told().reference), 128.0 * mib, 16.0 * mib);
  // What the reference gives up was its own while it was there.
  const auto size = int64_t(kept.size());
  std::vector<char>().swap(kept);
  reference_keeps(-size);
  EXPECT_NEAR(double(memory_told().beyond), double(start) + 64.0 * mib, 16.0 * mib);
}

// ---- Batteries

Options rows_on_two_ranks() {
  Options options;
  options.tier = "smoke";
  options.patterns = {"linear_row"};
  options.ranks = {2};
  options.transports = {"processes"};
  return options;
}

// What is chosen holds for witnesses, too.
TEST_F(Prepared, ABatteryHoldsWhatWasChosen) {
  for (const std::vector<std::string>& dtypes : {std::vector<std::string>{}, {"bf16"}}) {
    Options options = rows_on_two_ranks();
    options.dtypes = dtypes;
    fs::remove_all(folder);
    const Battery b = prepare_battery(options, folder, families());
    EXPECT_FALSE(b.members.empty());
    for (const Member& m : b.members) {
      const Case line = parse(m.line, families());
      EXPECT_EQ(line.world(), 2) << m.line;
      EXPECT_TRUE(dtypes.empty() || line.text("dtype") == dtypes[0]) << m.line;
    }
  }
}

// Smoke has sharded_step in f64 alone, and twins of it whose witnesses are in f32 and bf16.
TEST_F(Prepared, ABatteryHoldsWitnessesWhereNoCaseIsLeft) {
  Options options = rows_on_two_ranks();
  options.patterns = {"sharded_step"}, options.dtypes = {"f32", "bf16"};
  options.program = "shardproof";
  try {
    plan_gate(options, families());
    ADD_FAILURE() << "a case of smoke in f32 or bf16: choose another contract here";
  } catch (const BadInput& e) {
    EXPECT_NE(std::string(e.what()).find("there: dtype f64"), std::string::npos) << e.what();
  }
  std::set<std::string> types;
  for (const Member& m : prepare_battery(options, folder, families()).members)
    types.insert(parse(m.line, families()).text("dtype"));
  EXPECT_EQ(types, (std::set<std::string>{"bf16", "f32"}));
}

TEST_F(Prepared, AFolderHoldsOneCaseOrOneBattery) {
  const auto refused = [](const std::string& holds, const std::function<void()>& prepares) {
    try {
      prepares();
      ADD_FAILURE() << "prepared beside " << holds;
    } catch (const BadInput& e) {
      EXPECT_NE(std::string(e.what()).find("a folder without a " + holds), std::string::npos)
          << e.what();
    }
  };
  const Case line = parse("linear_row tp=2", families());
  const auto a_case = [&] { prepare_case(line, {"forward"}, folder, families()); };
  const auto a_battery = [&] { prepare_battery(rows_on_two_ranks(), folder, families()); };
  a_case();
  refused("case.json", a_battery);
  a_case();  // anew
  fs::remove_all(folder);
  fs::create_directories(folder);
  write(battery_name, battery_text({}));
  refused("battery.json", a_case);
  refused("battery.json", a_battery);
}

// Three cases, each of one check.
class SmallBattery : public Prepared {
 protected:
  SmallBattery() {
    fs::remove_all(folder);
    for (const char* check : {"forward", "gradient", "memory"}) {
      const std::string name = fmt::format("{:03}.{}", members.size(), check);
      members.push_back(
          prepare_case(parse("linear_row tp=2", families()), {check}, folder / name, families()));
      EXPECT_EQ(members.back().folder, name);
    }
    write(battery_name, battery_text(members));
  }
  std::vector<Member> members;
};

TEST_F(SmallBattery, IsAskedWhereACheckWasPrepared) {
  const std::string said = refusal();
  EXPECT_EQ(said.rfind(path("000.forward/rank0.out.safetensors"), 0), 0u) << said;
  Progress silent;
  Unjudged others;
  try {
    judge_folder(folder, {}, families(), silent, &others);
    ADD_FAILURE() << "judged without an answer";
  } catch (const BadInput& e) {
    EXPECT_NE(std::string(e.what()).find("(000.forward, 001.gradient, 002.memory)"),
              std::string::npos)
        << e.what();
  }
  for (const Member& m : members) answer(folder / m.folder, families(), {.arguments = true});
  EXPECT_EQ(judged(folder, families()).cases.size(), 3u);
  Options options;
  options.checks = {"gradient"};
  const Report report = judge_folder(folder, options, families(), silent);
  ASSERT_EQ(report.cases.size(), 1u);
  EXPECT_EQ(with(report, Verdict::passed), std::vector<std::string>{"gradient"});
  EXPECT_EQ(exit_code(report), 0);
}

TEST_F(SmallBattery, LiesInFoldersBesideIt) {
  for (const char* elsewhere : {"..", "../000.forward", "000.forward/x", "/tmp"}) {
    std::vector<Member> moved = members;
    moved[1].folder = elsewhere;
    write(battery_name, battery_text(moved));
    expect_refused(battery_name, {"folders beside it", elsewhere});
  }
  std::string edited = battery_text(members);
  edited.replace(edited.find("linear_row tp=2"), 15, "linear_row tp=3");
  write(battery_name, edited);
  expect_refused(battery_name, {"edited after that"});
  std::vector<Member> fewer(members.begin() + 1, members.end());
  fewer[0].digest = members[2].digest;
  write(battery_name, battery_text(fewer));
  for (const Member& m : members) answer(folder / m.folder, families());
  expect_refused("001.gradient/case.json", {"folders of two batteries are mixed"});
}

// What a program computes in goes into every line that does not say it.
TEST_F(Prepared, ABatterySaysWhatItsProgramComputesIn) {
  Options options = rows_on_two_ranks();
  options.with = {{"acc", "f64"}, {"probs", "bf16"}};  // linear_row takes no probs
  for (const Member& m : prepare_battery(options, folder, families()).members) {
    const Case line = parse(m.line, families());
    EXPECT_EQ(line.text("acc"), "f64") << m.line;
  }
}

// In which autograd leaves a gradient of bf16: not one of f64.
TEST_F(Prepared, ABatterySumsInNoNarrowerTypeThanItsLines) {
  Options options = rows_on_two_ranks();
  options.patterns = {"sharded_linear"};
  options.with = {{"local_grad", "bf16"}};
  const Battery b = prepare_battery(options, folder, families());
  int64_t wider = 0, bf16 = 0;
  for (const Member& m : b.members) {
    const Case line = parse(m.line, families());
    const bool half = line.dtype() == DType::bf16;
    EXPECT_EQ(line.text("local_grad"), half ? "bf16" : "") << m.line;
    half ? ++bf16 : ++wider;
  }
  EXPECT_GT(bf16, 0);
  ASSERT_EQ(b.as_they_are.size(), 1u);
  EXPECT_EQ(
      b.as_they_are[0],
      fmt::format("{} lines in a wider dtype: --with local_grad=bf16 goes into the others", wider));
}

// The folder above the one that is meant.
TEST_F(Prepared, AFolderOfSeveralCasesSaysHowToNameOne) {
  fs::create_directories(folder);
  for (const char* name : {"two", "one"})
    prepare_case(parse("linear_row tp=2", families()), {}, folder / name, families());
  const std::string said = refusal();
  EXPECT_EQ(said, fmt::format("{0}: expected the folder of one prepared case or battery, met one "
                              "that holds 2 (one, two); name one of them: judge {0}/one",
                              folder.string()));
}

// What a line says stays.
TEST_F(Prepared, ABatteryLeavesWordsThatALineSays) {
  Options options = rows_on_two_ranks();
  options.tier = "ci", options.ranks = {4};
  options.patterns = {"linear_row wire=f32"};
  options.with = {{"wire", "bf16"}};
  std::set<std::string> wires;
  for (const Member& m : prepare_battery(options, folder, families()).members)
    wires.insert(parse(m.line, families()).text("wire"));
  EXPECT_EQ(wires,
            (std::set<std::string>{"bf16", "f32"}));  // bf16 of the witnesses, which say none
}

// A stored line once failed on ours: another program is not asked it.
TEST_F(Prepared, ABatteryHoldsNoStoredLine) {
  Registry r = families();
  Regression stored;
  stored.line = print_canonical(parse("linear_row tp=2 dtype=f32 grad=bf16 fill=normal", r));
  stored.origin = "of a test";
  r.add(stored);
  Options options = rows_on_two_ranks();
  const auto due = plan_gate(options, r);
  EXPECT_TRUE(std::any_of(due.begin(), due.end(),
                          [](const Due& d) { return d.line.text("grad") == "bf16"; }));
  for (const Member& m : prepare_battery(options, folder, r).members)
    EXPECT_EQ(parse(m.line, r).text("grad"), "") << m.line;
}

// One case with a file that is refused hides nothing of the others.
TEST_F(Prepared, ARefusedAnswerLeavesTheOthersOfABatteryJudged) {
  Options options = rows_on_two_ranks();
  options.without = {"frozen"};  // no gradient of w there
  const Battery b = prepare_battery(options, folder, families());
  const auto less = [](int rank, std::vector<TensorToWrite>& out) {
    if (rank == 1) std::erase_if(out, [](auto& t) { return t.name == "grad.w"; });
  };
  for (const Member& m : b.members) answer(folder / m.folder, families());
  answer(folder / b.members[1].folder, families(), {.change = less});
  expect_refused(b.members[1].folder + "/rank1.out.safetensors", {"grad.w", "none of that name"});
  Progress silent;
  Unjudged others;
  const Report rest = judge_folder(folder, {}, families(), silent, &others);
  EXPECT_TRUE(others.unanswered.empty());
  ASSERT_EQ(others.refused.size(), 1u);
  EXPECT_NE(others.refused[0].find("grad.w"), std::string::npos) << others.refused[0];
  EXPECT_EQ(rest.cases.size(), b.members.size() - 1);
  EXPECT_FALSE(rest.complete);
  EXPECT_EQ(rest.missing, fmt::format("of {} cases 1 refused", b.members.size()));
  EXPECT_FALSE(rest.lanes.at(0).proven);
  for (const Member& m : b.members) answer(folder / m.folder, families(), {.change = less});
  EXPECT_THROW(judge_folder(folder, {}, families(), silent, &others), BadInput);
}

// What the program lacks: a key at any value but its default, or at one value.
TEST_F(Prepared, ABatteryWithoutWhatTheProgramLacks) {
  Options options = rows_on_two_ranks();
  const auto lines = [&] {
    std::vector<Case> parsed;
    fs::remove_all(folder);
    for (const Member& m : prepare_battery(options, folder, families()).members)
      parsed.push_back(parse(m.line, families()));
    return parsed;
  };
  const auto all = lines();
  const auto n = [&](const char* key, const char* value) {
    return std::count_if(all.begin(), all.end(), [&](auto& c) { return c.text(key) == value; });
  };
  ASSERT_GT(n("frozen", "on"), 0);
  ASSERT_GT(n("sp", "off"), n("frozen", "on"));
  options.without = {"frozen"};
  EXPECT_EQ(int64_t(lines().size()), int64_t(all.size()) - n("frozen", "on"));
  options.without = {"sp=off", "microbatches"};
  for (const Case& c : lines()) {
    EXPECT_EQ(c.text("sp"), "on");
    EXPECT_EQ(c.at("microbatches"), 1);
  }
  options.without = {"frosen"};
  EXPECT_THROW(prepare_battery(options, folder, families()), BadInput);
}

TEST_F(Prepared, ABatteryIsJudgedWhole) {
  const Battery b = prepare_battery(rows_on_two_ranks(), folder, families());
  ASSERT_GT(b.members.size(), 3u);
  // Witnesses are among them: each control of the contract at two ranks has its line.
  for (const Control& c : families().controls()) {
    if (c.contract != "linear_row" || on_device(c, families())) continue;
    const Case line = parse(c.witness, families());
    if (line.world() != 2 || families().contract("linear_row").precondition(line)) continue;
    EXPECT_TRUE(std::any_of(b.members.begin(), b.members.end(), [&](auto& m) {
      return m.line == print(line);
    })) << c.witness;
  }
  // So are those on which broken collectives are tried.
  for (const Case& line :
       witnesses_due(families().contract("linear_row"), families(), "processes", "")) {
    if (line.world() != 2) continue;
    EXPECT_TRUE(std::any_of(b.members.begin(), b.members.end(), [&](auto& m) {
      return m.line == print(line);
    })) << print(line);
  }
  for (const Member& m : b.members) answer(folder / m.folder, families(), {.arguments = true});
  const Report report = judged(folder, families());
  EXPECT_EQ(exit_code(report), 0);
  EXPECT_EQ(report.cases.size(), b.members.size());
  fs::remove(folder / b.members[2].folder / "rank0.out.safetensors");
  expect_refused(b.members[2].folder + "/rank0.out.safetensors", {"nothing there"});
  Progress silent;
  Unjudged others;
  const Report rest = judge_folder(folder, {}, families(), silent, &others);
  ASSERT_EQ(others.unanswered.size(), 1u);
  EXPECT_TRUE(others.refused.empty());
  EXPECT_EQ(others.folders, std::vector{b.members[2].folder});
  EXPECT_EQ(unanswered_text(folder, others), others.unanswered[0]);
  EXPECT_EQ(others.unanswered[0].rfind(path(b.members[2].folder + "/rank0.out.safetensors"), 0),
            0u);
  EXPECT_EQ(rest.cases.size(), b.members.size() - 1);
  EXPECT_FALSE(rest.complete);
  EXPECT_FALSE(rest.lanes.at(0).proven);
  EXPECT_EQ(exit_code(rest), 3);
  EXPECT_EQ(no_judgement(rest), std::vector{fmt::format("of {} cases 1 not answered ({})",
                                                        b.members.size(), b.members[2].folder)});
  for (const Member& m : b.members) fs::remove(folder / m.folder / "rank0.out.safetensors");
  try {
    judge_folder(folder, {}, families(), silent, &others);
    ADD_FAILURE() << "a battery without an answer was judged";
  } catch (const BadInput& e) {
    EXPECT_EQ(
        e.what(),
        fmt::format("{0}: expected the program's answers to all cases of the battery, met none "
                    "to {1} of them; run the program on each of these folders ({2}, {3} ... "
                    "{4}), then judge {0} again",
                    folder.string(), b.members.size(), b.members[0].folder, b.members[1].folder,
                    b.members.back().folder));
  }
  for (const Member& m : b.members) answer(folder / m.folder, families(), {.arguments = true});
  const fs::path one = folder / b.members[0].folder, other = folder / b.members[1].folder;
  fs::remove_all(other);
  fs::copy(one, other);
  expect_refused(b.members[1].folder + "/case.json",
                 {"met that of " + b.members[0].folder, "put each back under its name"});
  prepare_case(parse("linear_row tp=2 seed=9", families()), {}, other, families());
  answer(other, families(), {.arguments = true});
  expect_refused(b.members[1].folder + "/case.json", {"folders of two batteries are mixed"});
  fs::remove_all(other);
  expect_refused(b.members[1].folder, {"nothing there", "put it back"});
}

}  // namespace prepared_test
}  // namespace
}  // namespace shardproof::prepared
