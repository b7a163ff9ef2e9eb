#include "suites/bench/file_rows.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <ctime>
#include <filesystem>
#include <fstream>

#include "fixtures/sharding.hpp"
#include "oracle/checks/pairing.hpp"
#include "oracle/memory_watch.hpp"
#include "oracle/prepared/answer.hpp"
#include "oracle/prepared/prepare.hpp"
#include "suites/self/foreign.hpp"

namespace shardproof {
namespace {

namespace fs = std::filesystem;
using namespace prepared;

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Of all threads: other work on the machine does not count.
double cpu_seconds() {
  timespec t{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
}

// A folder below another one that is gone afterwards.
struct Folder {
  explicit Folder(const std::string& below) {
    std::string name = fs::path(below) / "shardproof-bench-XXXXXX";
    if (!mkdtemp(name.data()))
      throw BadInput(fmt::format(
          "--files: expected a folder that can be written, met '{}'; name another", below));
    path = name;
  }
  ~Folder() { fs::remove_all(path); }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  std::string path;
};

void require_passed(const Report& report, const std::string& what) {
  if (exit_code(report) != 0)
    throw Infrastructure(fmt::format("{} did not pass while it was timed", what));
}

// ---- A large case

// Short rows: the products of the reference are then the smallest part of the work.
Case large_line(const Registry& registry, int64_t tokens) {
  return parse(fmt::format("linear_column tp=4 sp=on dtype=f32 in=48 out=64 tokens={}", tokens),
               registry);
}

// Of all inputs and answers.
double bytes_of(const Plan& plan) {
  double bytes = 0;
  for (int r = 0; r < plan.evidence.mesh.world(); ++r)
    for (const Pass& pass : plan.passes)
      for (const Step& step : pass.steps)
        for (const auto* list : {&step.takes, &step.gives})
          for (const Named& n : *list)
            bytes +=
                double(product(plan.local_shape_of(n, r)) * int64_t(size_of(plan.dtype_of(n))));
  return bytes;
}

// Bytes grow with tokens but for those of the parameters, which are few.
int64_t tokens_for(const Registry& registry, double bytes) {
  constexpr int64_t few = 4096;
  const double each = bytes_of(plan_of(large_line(registry, few), {}, registry)) / few;
  return std::max<int64_t>(1, std::llround(bytes / each / few)) * few;
}

std::vector<Whole> results_of(const Evidence& e, const Feed& feed, bool backward) {
  std::vector<Whole> inputs, cotangents;
  for (int k = 0; k < e.inputs; ++k) inputs.push_back(drawn(e, feed, k, false));
  if (!backward) return e.contract->forward(*e.line, inputs, nullptr);
  for (int k = e.inputs; k < int(e.operands.size()); ++k)
    cotangents.push_back(drawn(e, feed, k, true));
  return e.contract->backward(*e.line, inputs, cotangents, nullptr);
}

// What a rank holds of a result, all of a sum on the first rank that adds to it.
std::vector<std::byte> part_of(const Plan& plan, const Whole& whole, const Named& n, int rank) {
  const Layout layout = plan.layout_of(n);
  const DType dtype = plan.dtype_of(n);
  const auto at = denoted_indices(plan.evidence.operands[size_t(n.operand)].shape, layout,
                                  plan.evidence.mesh, rank);
  std::vector<std::byte> bytes(at.size() * size_of(dtype));
  if (!leads(layout, plan.evidence.mesh, rank)) return bytes;
  for (size_t i = 0; i < at.size(); ++i)
    store(&bytes[i * size_of(dtype)], dtype, whole.value[size_t(at[i])]);
  return bytes;
}

// Hands in what one process computes, a file a tensor, so that each step is computed once. On exact
// data it is right to the last bit.
void answer_by_reference(const std::string& folder, const Registry& registry) {
  const CaseFile c = read_case(folder, registry);
  const Evidence& e = c.plan.evidence;
  const auto write = [&](const std::string& name, const std::string& bytes) {
    const std::string path = fs::path(folder) / name;
    std::ofstream file(path, std::ios::binary);
    if (!file.write(bytes.data(), std::streamsize(bytes.size())).flush())
      throw Infrastructure(
          fmt::format("{}: expected a file that can be written, met a full disk", path));
  };
  for (size_t p = 0; p < c.plan.passes.size(); ++p)
    for (const Step& step : c.plan.passes[p].steps) {
      const auto results = results_of(e, e.shots[p].feeds[size_t(step.feed)], step.backward);
      for (const Named& n : step.gives)
        for (int r = 0; r < e.mesh.world(); ++r)
          write(npy_file(r, n.name),
                foreign::npy(
                    "<f4", c.plan.local_shape_of(n, r),
                    part_of(c.plan, results.at(size_t(n.operand - (step.backward ? 0 : e.inputs))),
                            n, r)));
    }
  for (int r = 0; r < e.mesh.world(); ++r)
    write(card_file(r), fmt::format("{{\"case\": \"{}\"}}", c.digest));
}

struct Spent {
  double cpu = 0, wall = 0;  // seconds
};

template <class Work>
Spent spent_by(Work work) {
  const double cpu = cpu_seconds(), wall = now();
  work();
  return {cpu_seconds() - cpu, now() - wall};
}

struct Judging {
  MemoryTold memory;
  Spent spent;
};

// In a process of its own, whose memory is that of judging alone.
Judging judge_apart(const std::string& folder, const Registry& registry) {
  int ends[2];
  if (pipe(ends) != 0) throw Infrastructure("expected a pipe, met none");
  const pid_t child = fork();
  if (child == 0) {
    try {
      watch_memory();
      Judging j;
      j.spent = spent_by(
          [&] { require_passed(foreign::judged(folder, registry), "the case of large files"); });
      j.memory = memory_told();
      _exit(::write(ends[1], &j, sizeof j) == sizeof j ? 0 : 1);
    } catch (const std::exception& e) {
      std::fprintf(stderr, "shardproof_bench: %s\n", e.what());
    }
    _exit(1);
  }
  close(ends[1]);
  Judging j;
  const bool told = read(ends[0], &j, sizeof j) == sizeof j;
  close(ends[0]);
  waitpid(child, nullptr, 0);
  if (!told) throw Infrastructure("the case of large files was not judged to its end");
  return j;
}

double bytes_below(const std::string& folder) {
  double bytes = 0;
  for (const auto& entry : fs::directory_iterator(folder)) bytes += double(entry.file_size());
  return bytes;
}

Spent read_and_hash(const std::string& folder) {
  return spent_by([&] {
    for (const auto& entry : fs::directory_iterator(folder))
      digest_of(tensors::MappedFile(entry.path()));
  });
}

// Files are written out and leave the memory of the system, so that they are read from the disk
// next. A file system in memory keeps them.
void leave_memory(const std::string& folder) {
  for (const auto& entry : fs::directory_iterator(folder)) {
    const int fd = open(entry.path().c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) continue;
    fsync(fd);
    posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    close(fd);
  }
}

}  // namespace

Row prepare_judge_linears(const Registry& registry, const std::string& below) {
  Options options;
  options.tier = "smoke";
  options.patterns = {"linear"};
  options.ranks = {4};
  options.transports = {"processes"};
  std::vector<double> runs;
  size_t cases = 0;
  for (int i = 0; i < 3; ++i) {
    const Folder folder(below);
    double begin = now();
    const Battery battery = prepare_battery(options, folder.path, registry);
    double seconds = now() - begin;
    for (const Member& m : battery.members)
      foreign::answer(fs::path(folder.path) / m.folder, registry, {.arguments = true});
    begin = now();
    const Report report = foreign::judged(folder.path, registry);
    runs.push_back(seconds + now() - begin);
    require_passed(report, "the battery of linears");
    cases = report.cases.size();
  }
  std::sort(runs.begin(), runs.end());
  return {
      "prepare_judge_linears",
      "files",
      4,
      runs[1],
      "s",
      fmt::format("prepare and judge of the smoke tier of linear, {} cases, answers not counted",
                  cases)};
}

std::vector<Row> large_files(const Registry& registry, const std::string& below, double gib) {
  const double bytes = gib * 0x1p30, free = double(fs::space(below).available);
  if (free < 1.1 * bytes)
    throw BadInput(
        fmt::format("--files: expected {:.2g} GiB of disk for --gib {:g}, met {:.2g} GiB free in "
                    "'{}'; name another folder, or fewer GiB",
                    1.1 * gib, gib, free / 0x1p30, below));
  const Folder folder(below);
  const Case line = large_line(registry, tokens_for(registry, bytes));
  prepare_case(line, {}, folder.path, registry);
  answer_by_reference(folder.path, registry);
  leave_memory(folder.path);
  const Spent cold = read_and_hash(folder.path);
  leave_memory(folder.path);
  const Judging from_disk = judge_apart(folder.path, registry);
  read_and_hash(folder.path);  // from here on files lie in memory, as far as it goes
  const Judging j = judge_apart(folder.path, registry);
  const Spent reading = read_and_hash(folder.path);
  const auto mib = [](int64_t n) { return double(n) / 0x1p20; };
  const std::string of =
      fmt::format("{} ({:.2f} GiB of files)", print(line), bytes_below(folder.path) / 0x1p30);
  return {
      {"judge_memory", "files", 4, mib(j.memory.beyond), "MiB",
       fmt::format("that judge holds beyond the reference's own, of {:.0f} in all: {}",
                   mib(j.memory.peak), of)},
      {"judge_from_disk", "files", 4, from_disk.spent.wall / cold.wall, "ratio",
       fmt::format("judge, {:.2f} s / reading and hashing, {:.2f} s, both from the disk: {}",
                   from_disk.spent.wall, cold.wall, of)},
      {"judge_against_reading", "files", 4, j.spent.cpu / reading.cpu, "ratio",
       fmt::format("judge, {:.2f} s of CPU / reading and hashing, {:.2f} s, both from memory: {}",
                   j.spent.cpu, reading.cpu, of)},
      {"judge_beyond_reference", "files", 4,
       (j.spent.cpu - j.memory.reference_seconds) / reading.cpu, "ratio",
       fmt::format("the same without the {:.2f} s in which the reference computed",
                   j.memory.reference_seconds)}};
}

}  // namespace shardproof
