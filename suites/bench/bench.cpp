// What the judge costs, measured here and now. Ratios name both of their sides and are taken in one
// run, so that they hold on a noisy machine. `scripts/bench --json FILE` writes
//   {"rows": [{"name", "transport", "ranks", "value", "unit", "against"}]}
#include <fmt/format.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <Eigen/Core>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>

#include "oracle/comm/communicator.hpp"
#include "oracle/comm/ledger.hpp"
#include "oracle/comm/mpi.hpp"
#include "oracle/digest/bytes_hash.hpp"
#include "oracle/digest/digest.hpp"
#include "oracle/drift.hpp"
#include "oracle/gate.hpp"
#include "oracle/run.hpp"
#include "reference/linear.hpp"
#include "suites/bench/device_rows.hpp"
#include "suites/bench/file_rows.hpp"
#include "suites/bench/timed_kernel.hpp"

extern char** environ;

namespace shardproof {
namespace {

using Clock = std::chrono::steady_clock;
double seconds_since(Clock::time_point t) {
  return std::chrono::duration<double>(Clock::now() - t).count();
}

double median(std::vector<double> v) {
  std::nth_element(v.begin(), v.begin() + long(v.size() / 2), v.end());
  return v[v.size() / 2];
}

// On a rank: all-reduces of 8 doubles as a gate runs them, through ledger and lockstep. The job
// holds the number of calls; the record the seconds that they took.
std::vector<std::byte> all_reduce_rank(RankHost& host, std::span<const std::byte> job) {
  int calls = 0;
  std::memcpy(&calls, job.data(), sizeof calls);
  host.state->rank = host.rank;
  host.state->size = host.size;
  host.state->phase = Phase::forward;
  host.state->trace = host.trace;
  LedgerDoor ledger(*host.state, *host.door);
  Group all;
  for (int r = 0; r < host.size; ++r) all.members.push_back(r);
  all.me = host.rank;
  all.label = "world";
  all.id = group_id(all.members);
  Communicator world(all, ledger);
  std::vector<double> in(8, host.rank + 1.0), out(8);
  const View x = view_of(reinterpret_cast<std::byte*>(in.data()), DType::f64, {8});
  const View y = view_of(reinterpret_cast<std::byte*>(out.data()), DType::f64, {8});
  for (int i = 0; i < 20; ++i) world.all_reduce(x, y);
  const auto begin = Clock::now();
  for (int i = 0; i < calls; ++i) world.all_reduce(x, y);
  const double seconds = seconds_since(begin);
  if (out[0] != host.size * (host.size + 1) / 2.0)
    throw Infrastructure("the all-reduce that is timed gave a wrong sum");
  std::vector<std::byte> record(sizeof seconds);
  std::memcpy(record.data(), &seconds, sizeof seconds);
  return record;
}

// Microseconds a call: the median of five runs in one world.
double all_reduce_8_doubles(const std::string& transport, int ranks, const std::string& program) {
  WorldSpec spec;
  spec.transport = transport;
  spec.ranks = ranks;
  spec.program = program;
  const auto world = start_world(spec, all_reduce_rank);
  const int calls = transport == "mpi" && ranks > 2 ? 200 : 2000;
  std::vector<double> runs;
  for (int i = 0; i < 5; ++i) {
    const auto outcomes = world->run(std::as_bytes(std::span(&calls, 1)), 1, case_deadline_seconds);
    if (outcomes[0].end != RankOutcome::finished || outcomes[0].record.size() != sizeof(double))
      throw Infrastructure(
          fmt::format("all_reduce_8_doubles did not finish on {} with {} ranks: {}", transport,
                      ranks, outcomes[0].text));
    double seconds;
    std::memcpy(&seconds, outcomes[0].record.data(), sizeof seconds);
    runs.push_back(seconds / calls * 1e6);
  }
  return median(runs);
}

// Checks a second of the smoke tier's cases at 4 ranks, from line to verdict, in a world that
// lives: the median of five passes after a first one.
double checks_per_second(const Registry& registry, const std::string& program,
                         const std::string& family, bool adjoint) {
  Options options;
  options.tier = "smoke";
  options.ranks = {4};
  options.program = program;
  options.controls = false;
  if (!family.empty()) options.patterns = {family};
  for (const Check& c : all_checks())
    if ((c.name == "adjoint") == adjoint && c.name != "gradcheck") options.checks.push_back(c.name);
  const auto due = plan_gate(options, registry);
  Runner runner(options, registry);
  std::vector<double> passes;
  for (int i = 0; i < 6; ++i) {
    int64_t checks = 0;
    const auto begin = Clock::now();
    for (const Due& d : due)
      checks += int64_t(runner.run(d.line, d.checks, d.lane).result.checks.size());
    if (i > 0) passes.push_back(double(checks) / seconds_since(begin));
  }
  return median(passes);
}

// Milliseconds from a line to the verdicts of all its checks, in a world that lives: the median of
// nine runs after a first one.
double case_ms(const Registry& registry, const std::string& program, const std::string& text) {
  Options options;
  options.program = program;
  Runner runner(options, registry);
  const Case line = parse(text, registry);
  const auto checks =
      due_checks(registry.contract(line.contract), line, declared_of(line, registry), {});
  std::vector<double> runs;
  for (int i = 0; i < 10; ++i) {
    const auto begin = Clock::now();
    const Judged j = runner.run(line, checks, lane_of(line));
    const double ms = seconds_since(begin) * 1e3;
    for (const CheckResult& c : j.result.checks)
      if (c.verdict != Verdict::passed)
        throw Infrastructure(
            fmt::format("{} of {} did not pass while it was timed", c.check, text));
    if (i > 0) runs.push_back(ms);
  }
  return median(runs);
}

// Milliseconds of a whole process.
double process_ms(const std::vector<std::string>& words, int repeats) {
  std::vector<double> runs;
  for (int i = 0; i < repeats; ++i) {
    std::vector<char*> argv;
    for (const std::string& w : words) argv.push_back(const_cast<char*>(w.c_str()));
    argv.push_back(nullptr);
    posix_spawn_file_actions_t quiet;
    posix_spawn_file_actions_init(&quiet);
    posix_spawn_file_actions_addopen(&quiet, 1, "/dev/null", 1 /* O_WRONLY */, 0);
    posix_spawn_file_actions_addopen(&quiet, 2, "/dev/null", 1, 0);
    pid_t pid;
    const auto begin = Clock::now();
    if (posix_spawn(&pid, argv[0], &quiet, nullptr, argv.data(), environ) != 0)
      throw Infrastructure("cannot start " + words[0]);
    int status = 0;
    waitpid(pid, &status, 0);
    runs.push_back(seconds_since(begin) * 1e3);
    posix_spawn_file_actions_destroy(&quiet);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
      throw Infrastructure(
          fmt::format("{} did not pass while it was timed", fmt::join(words, " ")));
  }
  return median(runs);
}

// The reference's linear against plain Eigen's product of the same extents, in turns.
double reference_linear_over_eigen(int64_t n) {
  std::vector<double> x(size_t(n * n)), w(size_t(n * n)), b(size_t(n), 0.5);
  for (size_t i = 0; i < x.size(); ++i) x[i] = double(i % 7) - 3, w[i] = double(i % 5) - 2;
  using Matrix = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  std::vector<double> ratios;
  for (int i = 0; i < 5; ++i) {
    auto begin = Clock::now();
    const auto y = reference::linear({n, n, n}, x, w, b);
    const double ours = seconds_since(begin);
    const Eigen::Map<const Matrix> a(x.data(), n, n), c(w.data(), n, n);
    begin = Clock::now();
    const Matrix plain = a * c.transpose();
    const double eigens = seconds_since(begin);
    if (plain(0, 0) + 0.5 != y[0]) throw Infrastructure("the products that are timed differ");
    ratios.push_back(eigens / ours);
  }
  return median(ratios);
}

// ---- Fingerprints

double cpu_seconds() {
  timespec t{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
}

// Bytes a second of CPU time, the best of five: other work on the machine does not count.
template <class Pass>
double bytes_per_second(size_t bytes, const Pass& pass) {
  double best = 0;
  for (int i = 0; i < 5; ++i) {
    const double begin = cpu_seconds();
    pass();
    best = std::max(best, double(bytes) / (cpu_seconds() - begin));
  }
  return best;
}

// Reads and does next to nothing: four vectors of sums side by side.
#if defined(__x86_64__) && defined(__GNUC__)
__attribute__((target_clones("avx2", "default")))
#endif
uint64_t
sum_of_words(const uint64_t* x, size_t n) {
  typedef uint64_t Lanes __attribute__((vector_size(32), aligned(8)));
  Lanes sums[4] = {};
  size_t i = 0;
  for (; i + 16 <= n; i += 16)
    for (size_t k = 0; k < 4; ++k) sums[k] += *reinterpret_cast<const Lanes*>(x + i + 4 * k);
  const Lanes all = sums[0] + sums[1] + sums[2] + sums[3];
  uint64_t sum = all[0] + all[1] + all[2] + all[3];
  for (; i < n; ++i) sum += x[i];
  return sum;
}

void measure_hashes(std::vector<Row>& rows) {
  std::vector<uint64_t> x(size_t(32) << 20);  // 256 MiB: no cache holds it
  for (size_t i = 0; i < x.size(); ++i) x[i] = shardproof_fmix(i) & 0x3fffffff3fffffff;
  const auto bytes = std::as_bytes(std::span(x));
  uint64_t keep = 0;
  const double read =
      bytes_per_second(bytes.size(), [&] { keep += sum_of_words(x.data(), x.size()); });
  const double hash =
      bytes_per_second(bytes.size(), [&] { keep += digest::hash_of_bytes(bytes)[0]; });
  shardproof_hash words = shardproof_hash_plain(SHARDPROOF_F32, SHARDPROOF_RAW);
  words.unit = SHARDPROOF_WORD;
  const double additive = bytes_per_second(bytes.size(), [&] {
    shardproof_digest d{};
    shardproof_digest_run(&d, &words, x.data(), 2 * x.size(), 0);
    keep += d.lane[0];
  });
  if (keep == 1) throw Infrastructure("the sums that are timed came to nothing");
  rows.push_back({"read_bandwidth", "none", 1, read / 1e9, "GB/s",
                  "sum of 256 MiB of words, one core, best of 5"});
  rows.push_back(
      {"replica_hash", "none", 1, hash / read, "ratio", "XXH3 of the same bytes / read_bandwidth"});
  rows.push_back(
      {"additive_digest_words", "none", 1, additive / read, "ratio",
       fmt::format("two lanes, coverage and counts of f32 in words ({}) / read_bandwidth",
                   shardproof_digest_form())});
}

// Two ranks hold copies of 2^30 values, of which one rank has another near the end: what they
// exchange until both know its index. The copies share their pages but for the one that differs.
void measure_location(std::vector<Row>& rows) {
  constexpr int64_t n = int64_t(1) << 30, odd = n - 12345;
  const std::vector<uint16_t> values(size_t(n), 0x3f80);
  struct Told {
    digest::Located found;
    double seconds;
  };
  WorldSpec spec;
  spec.ranks = 2;
  const auto world = start_world(spec, [&](RankHost& host, std::span<const std::byte>) {
    host.state->rank = host.rank, host.state->size = host.size, host.state->trace = host.trace;
    if (host.rank == 1) const_cast<uint16_t*>(values.data())[odd] = 0x4000;
    Group both;
    both.members = {0, 1}, both.me = host.rank, both.label = "world",
    both.id = group_id(both.members);
    LedgerDoor ledger(*host.state, *host.door);
    Communicator copies(both, ledger);
    const auto begin = Clock::now();
    Told told{digest::first_difference(
                  copies, n, 1024,
                  digest::parts_of(digest::hash_of("x", DType::bf16),
                                   reinterpret_cast<const std::byte*>(values.data()))),
              0};
    told.seconds = seconds_since(begin);
    std::vector<std::byte> record(sizeof told);
    std::memcpy(record.data(), &told, sizeof told);
    return record;
  });
  Told told{};
  const auto outcomes = world->run({}, 1, 10 * case_deadline_seconds);
  if (outcomes[0].record.size() == sizeof told)
    std::memcpy(&told, outcomes[0].record.data(), sizeof told);
  if (told.found.index != odd)
    throw Infrastructure(
        fmt::format("the element that differs was not found: {}", outcomes[0].text));
  rows.push_back({"first_difference_2e30", "processes", 2, double(told.found.rounds), "rounds",
                  fmt::format("copies of 2^30 bf16 values, {} bytes a rank and round, {:.2g} s",
                              told.found.bytes, told.seconds)});
}

double drift_seconds(const Registry& registry, const std::string& program) {
  Options options;
  options.program = program;
  DriftOptions given;
  given.steps = 1000;
  const DriftReport report =
      run_drift(parse_drift({"block", "tp=4", "sp=on"}, registry), given, options, registry);
  if (report.drifted() || report.steps != given.steps)
    throw Infrastructure("the training run that is timed drifted: " + report.ended);
  return report.seconds;
}

// Rows that are measured together, and how.
struct Measurement {
  std::vector<std::string> names;
  std::function<void(std::vector<Row>&)> rows;
};

std::vector<Measurement> measurements(const Registry& registry, const std::string& program,
                                      const std::string& command) {
  std::vector<Measurement> list;
  const auto one = [&](const std::string& name, const std::string& transport, int ranks,
                       std::function<double()> value, const std::string& unit,
                       const std::string& against) {
    list.push_back({{name}, [=](std::vector<Row>& rows) {
                      rows.push_back({name, transport, ranks, value(), unit, against});
                    }});
  };
  const std::string
      toy = "attention_ring cp=4 tokens=16 layout=zigzag mask=causal docs=7,1,8",
      ring = "attention_ring tokens=512 heads=8 head_dim=64 dtype=f32 mask=causal layout=zigzag";
  std::vector<std::string> transports{"processes", "threads"};
  if (mpi_missing().empty()) transports.push_back("mpi");
  for (const std::string& transport : transports)
    for (int ranks : {2, 4, 8})
      one(
          "all_reduce_8_doubles", transport, ranks,
          [=] { return all_reduce_8_doubles(transport, ranks, program); }, "us",
          "with ledger and lockstep");
  const auto checks = [&](const std::string& family, bool adjoint) {
    return [&registry, program, family, adjoint] {
      return checks_per_second(registry, program, family, adjoint);
    };
  };
  const auto process = [command](std::vector<std::string> words, int repeats, double unit) {
    words.insert(words.begin(), command);
    return [=] { return process_ms(words, repeats) * unit; };
  };
  one("checks_per_second", "processes", 4, checks("mapping", false), "1/s",
      "smoke tier of mapping; exhaustive adjoint and differences apart");
  one("adjoint_checks_per_second", "processes", 4, checks("mapping", true), "1/s",
      "smoke tier of mapping, adjoint alone");
  one("all_checks_per_second", "processes", 4, checks("", false), "1/s",
      "smoke tier of every family, the same checks");
  one(
      "toy_case_all_checks", "processes", 4,
      [&registry, program, toy] { return case_ms(registry, program, toy); }, "ms",
      fmt::format("every check of {}, controls apart", toy));
  one(
      "attention_ring_512", "processes", 4,
      [&registry, ring] { return seconds_over(fmt::format("{} cp=4", ring), ring, registry); },
      "ratio", fmt::format("forward and backward at cp=4 / at cp=1 of {}", ring));
  one("start_up", "none", 1, process({"--help"}, 9, 1), "ms",
      "whole process of `shardproof --help`, families registered");
  one("smoke_tier", "processes", 4, process({"gate", "--tier", "smoke", "mapping"}, 1, 1e-3), "s",
      "whole process, family mapping, controls included");
  one("smoke_tier_all", "processes", 4, process({"gate", "--tier", "smoke"}, 1, 1e-3), "s",
      "whole process, every family, controls included");
  list.push_back({{"read_bandwidth", "replica_hash", "additive_digest_words"}, measure_hashes});
  list.push_back({{"first_difference_2e30"}, measure_location});
  one(
      "drift_1000_steps", "processes", 4,
      [&registry, program] { return drift_seconds(registry, program); }, "s",
      "block tp=4 sp=on, every gradient and hash of every step judged");
  one(
      "reference_linear_1024", "none", 1, [] { return reference_linear_over_eigen(1024); }, "ratio",
      "plain Eigen double GEMM / reference::linear, one run");
  return list;
}

std::vector<Measurement> measurements_of_files(const Registry& registry, const std::string& folder,
                                               double gib) {
  return {{{"prepare_judge_linears"},
           [&registry, folder](std::vector<Row>& rows) {
             rows.push_back(prepare_judge_linears(registry, folder));
           }},
          {{"judge_memory", "judge_from_disk", "judge_against_reading", "judge_beyond_reference"},
           [&registry, folder, gib](std::vector<Row>& rows) {
             for (Row& row : large_files(registry, folder, gib)) rows.push_back(std::move(row));
           }}};
}

// At once: what comes later may be cut short.
void print(const Row& r, bool first) {
  if (first)
    std::printf("%-28s %-10s %5s %12s  %-6s %s\n", "name", "transport", "ranks", "value", "unit",
                "against");
  std::printf("%-28s %-10s %5d %12.4g  %-6s %s\n", r.name.c_str(), r.transport.c_str(), r.ranks,
              r.value, r.unit.c_str(), r.against.c_str());
  std::fflush(stdout);
}

void write(const std::vector<Row>& rows, const std::string& file) {
  nlohmann::ordered_json out;
  out["rows"] = nlohmann::ordered_json::array();
  for (const Row& r : rows)
    out["rows"].push_back({{"name", r.name},
                           {"transport", r.transport},
                           {"ranks", r.ranks},
                           {"value", r.value},
                           {"unit", r.unit},
                           {"against", r.against}});
  std::ofstream stream(file);
  stream << out.dump(1) << '\n';
  if (!stream.flush()) throw Infrastructure("cannot write " + file);
}

}  // namespace
}  // namespace shardproof

int main(int argc, char** argv) try {
  using namespace shardproof;
  if (argc > 1 && !std::strcmp(argv[1], "--worker")) return mpi_worker(argc, argv, all_reduce_rank);
  std::string file, only, files;
  double gib = 1;
  int64_t device_scale = 0;  // 0: the rows of the host
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if ((word == "--json" || word == "--only") && i + 1 < argc) {
      (word == "--json" ? file : only) = argv[++i];
    } else if (word == "--files" && i + 1 < argc && std::filesystem::is_directory(argv[i + 1])) {
      files = argv[++i];
    } else if (word == "--gib" && i + 1 < argc && std::atof(argv[i + 1]) > 0) {
      gib = std::atof(argv[++i]);
    } else if (word == "--device") {
      device_scale = std::max<int64_t>(device_scale, 1);
    } else if (word == "--scale" && i + 1 < argc && std::atoi(argv[i + 1]) >= 1) {
      device_scale = std::atoi(argv[++i]);
    } else {
      std::fprintf(stderr,
                   "shardproof_bench: expected [--only NAME] [--files DIR [--gib N]] [--json "
                   "FILE], or [--device [--scale N]] [--json FILE], met '%s'\n",
                   argv[i]);
      return 2;
    }
  }
  if (!file.empty() && !std::ofstream(file, std::ios::app)) {
    std::fprintf(
        stderr,
        "shardproof_bench: --json: cannot write to '%s'; name a file in a folder that exists\n",
        file.c_str());
    return 2;
  }
  const auto command = std::filesystem::read_symlink("/proc/self/exe").parent_path() / "shardproof";
  const Registry registry = all_families();
  std::vector<Row> rows;
  const auto put = [&](const Row& row) {
    print(row, rows.empty());
    rows.push_back(row);
  };
  std::vector<Measurement> all;
  if (device_scale > 0)
    device_rows(registry, device_scale, put);
  else
    all = measurements(registry, argv[0], command.string());
  if (!files.empty())
    for (Measurement& m : measurements_of_files(registry, files, gib)) all.push_back(std::move(m));
  for (const Measurement& m : all) {
    std::vector<Row> measured;
    if (only.empty() || std::find(m.names.begin(), m.names.end(), only) != m.names.end())
      m.rows(measured);
    for (const Row& row : measured) put(row);
  }
  if (rows.empty()) {
    std::fprintf(stderr,
                 "shardproof_bench: --only: expected the name of a row, met '%s'; without it all "
                 "rows are printed\n",
                 only.c_str());
    return 2;
  }
  if (!file.empty()) write(rows, file);
  return 0;
} catch (const shardproof::BadInput& e) {
  std::fprintf(stderr, "shardproof_bench: %s\n", e.what());
  return 2;
} catch (const std::exception& e) {
  std::fprintf(stderr, "shardproof_bench: %s\n", e.what());
  return 3;
}
