// Every family under GoogleTest: one test a case, on every transport and rank count, with every
// check that is due. The program is a parent: it starts ranks and makes the one assertion about
// them; ranks themselves know nothing of GoogleTest, and it never runs under MPI.
//
//   shardproof_families --lane=mapping.processes.np4              the cases of one ctest entry
//   shardproof_families --gtest_filter='linear.mpi.*'             any others
//   shardproof_families --ctest                                   the entries, in CMake's language
//
// Exit codes are this process's own decision: 77, which ctest shows as skipped, only where the
// build has no such transport; a selection of nothing, and a number of tests that is not the number
// of cases that were due, are failures.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <optional>
#include <set>

#include "oracle/report.hpp"
#include "oracle/run.hpp"
#include "oracle/worker.hpp"

namespace shardproof {
namespace {

constexpr int skipped_code = 77;
constexpr int rank_counts[] = {1, 2, 3, 4, 8};
constexpr const char* transports[] = {"processes", "threads", "mpi"};

// "mapping.processes.np4"
struct Entry {
  std::string family, transport;
  int ranks = 0;
  std::string name() const { return fmt::format("{}.{}.np{}", family, transport, ranks); }
};

std::optional<Entry> entry_from(const std::string& name) {
  const size_t first = name.find('.'), last = name.rfind(".np");
  if (first == std::string::npos || last == std::string::npos || last <= first) return {};
  Entry e{name.substr(0, first), name.substr(first + 1, last - first - 1), 0};
  e.ranks = std::atoi(name.c_str() + last + 3);
  return e.name() == name && e.ranks > 0 ? std::optional(e) : std::nullopt;
}

// Of worlds of `ranks` alone, where they are given.
std::vector<Due> cases_of(const Registry& registry, const std::string& tier,
                          const std::string& family, const std::string& transport,
                          const std::vector<int>& ranks = {}) {
  Options options;
  options.tier = tier;
  options.patterns = {family};
  options.transports = {transport};
  options.ranks = ranks;
  options.controls = false;
  return plan_gate(options, registry);
}

// --- entries

// The fixed counts, and those that cases of the family have beyond them.
std::set<int> counts_of(const std::vector<Due>& due) {
  std::set<int> counts(std::begin(rank_counts), std::end(rank_counts));
  for (const Due& d : due) counts.insert(d.line.world());
  return counts;
}

// Processes and parallel jobs starve MPI ranks, whose waits poll: their entries run alone, but for
// one rank, which waits for nobody. Forked ranks of small cases wait for each other most of the
// time: four of them keep one core busy. ctest counts halves of a core (scripts/entries.cmake).
int half_processors(const Entry& e, bool nightly) {
  const bool forked = e.transport != std::string("mpi");
  return 2 * (forked && !nightly ? (e.ranks + 3) / 4 : e.ranks);
}

std::string entry_text(const Entry& e, const std::string& tier, const std::string& program) {
  const bool smoke = e.transport == "processes" && (e.ranks == 2 || e.ranks == 4);
  const bool nightly = tier == "nightly";
  const std::string name = e.name() + (nightly ? ".nightly" : "");
  return fmt::format(
      "add_test([[{}]] [[{}]] [[--lane={}]] [[--tier={}]])\n"
      "set_tests_properties([[{}]] PROPERTIES LABELS [[np{};{};{};{}{}]] PROCESSORS {} TIMEOUT 600 "
      "SKIP_RETURN_CODE {}{})\n",
      name, program, e.name(), tier, name, e.ranks, e.transport, e.family, tier,
      smoke && !nightly ? ";smoke" : "", half_processors(e, nightly), skipped_code,
      e.transport == "mpi" && e.ranks > 1 ? " RUN_SERIAL TRUE" : "");
}

int print_entries(const Registry& registry, const std::string& tier) {
  const std::string program = std::filesystem::read_symlink("/proc/self/exe").string();
  for (const std::string& family : registry.families()) {
    const auto counts = counts_of(cases_of(registry, tier, family, "processes"));
    for (const char* transport : transports)
      for (int ranks : counts)
        fmt::print("{}", entry_text({family, transport, ranks}, tier, program));
  }
  return 0;
}

// --- cases

// The command that lies beside this program, for replay lines.
std::string command_beside() {
  const auto self = std::filesystem::read_symlink("/proc/self/exe").parent_path() / "shardproof";
  std::error_code e;
  const auto near = std::filesystem::relative(self, e);
  return e || near.empty() ? self.string() : near.string();
}

// A line as a name that no filter reads as a pattern.
std::string test_name(const Due& d, std::set<std::string>& taken) {
  std::string name = print(d.line);
  for (char& c : name)
    if (!std::isalnum(static_cast<unsigned char>(c)) && c != '=' && c != ',') c = '_';
  if (d.illegal) name += "_is_refused";
  while (!taken.insert(name).second) name += "_";
  return name;
}

class CaseTest : public testing::Test {
 public:
  CaseTest(Runner& runner, const Due& due) : runner_(runner), due_(due) {}
  void TestBody() override {
    const CaseResult result = runner_.run(due_.line, due_.checks, due_.lane).result;
    const bool passed =
        !result.checks.empty() && std::all_of(result.checks.begin(), result.checks.end(),
                                              [](auto& c) { return c.verdict == Verdict::passed; });
    EXPECT_TRUE(passed) << block(result, command_beside());
  }

 private:
  Runner& runner_;
  const Due& due_;
};

void add_tests(Runner& runner, const std::vector<Due>& due, const std::string& family) {
  std::set<std::string> taken;
  for (const Due& d : due) {
    const std::string suite = family + "." + d.lane, name = test_name(d, taken);
    testing::RegisterTest(suite.c_str(), name.c_str(), nullptr, nullptr, __FILE__, __LINE__,
                          [&runner, &d]() -> testing::Test* { return new CaseTest(runner, d); });
  }
}

int run_tests(size_t due) {
  const testing::UnitTest& all = *testing::UnitTest::GetInstance();
  const int failed = RUN_ALL_TESTS();
  if (testing::GTEST_FLAG(list_tests)) return failed;
  const size_t ran = size_t(all.successful_test_count() + all.failed_test_count());
  if (ran == 0) {
    fmt::print(stderr, "expected a selection of cases, met one that holds none\n");
    return 1;
  }
  if (due > 0 && ran != due) {
    fmt::print(stderr, "expected the {} cases that are due, met {} that ran\n", due, ran);
    return 1;
  }
  return failed;
}

int run_entry(const std::string& name, const std::string& tier, const Registry& registry) {
  const auto entry = entry_from(name);
  if (!entry) {
    fmt::print(stderr, "--lane: expected FAMILY.TRANSPORT.npN, met '{}'; --ctest prints all\n",
               name);
    return 2;
  }
  const std::string missing = reason_unavailable(entry->transport, "host");
  if (!missing.empty()) {
    fmt::print("skipped: {} ({})\n", name, missing);
    return skipped_code;
  }
  const Options options;
  Runner runner(options, registry);
  const std::vector<Due> due =
      cases_of(registry, tier, entry->family, entry->transport, {entry->ranks});
  add_tests(runner, due, entry->family);
  testing::GTEST_FLAG(filter) = name + ".*";
  return run_tests(due.size());
}

int run_all(const std::string& tier, const Registry& registry) {
  const Options options;
  Runner runner(options, registry);
  std::vector<std::vector<Due>> lists;
  for (const std::string& family : registry.families())
    for (const char* transport : transports)
      if (reason_unavailable(transport, "host").empty())
        lists.push_back(cases_of(registry, tier, family, transport));
  for (const auto& due : lists)
    if (!due.empty()) add_tests(runner, due, registry.contract(due[0].line.contract).family);
  return run_tests(0);
}

// The value of --NAME=VALUE, where it is there.
std::optional<std::string> option(int argc, char** argv, const std::string& name) {
  const std::string head = "--" + name;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word == head) return "";
    if (word.starts_with(head + "=")) return word.substr(head.size() + 1);
  }
  return std::nullopt;
}

int run(int argc, char** argv) {
  const Registry registry = all_families();
  if (argc > 1 && std::string(argv[1]) == "--worker") return worker_main(argc, argv, registry);
  testing::InitGoogleTest(&argc, argv);
  const std::string tier = option(argc, argv, "tier").value_or("ci");
  if (option(argc, argv, "ctest")) return print_entries(registry, tier);
  if (const auto lane = option(argc, argv, "lane")) return run_entry(*lane, tier, registry);
  return run_all(tier, registry);
}

}  // namespace
}  // namespace shardproof

int main(int argc, char** argv) {
  try {
    return shardproof::run(argc, argv);
  } catch (const std::exception& e) {
    fmt::print(stderr, "shardproof_families: {}\n", e.what());
    return 1;
  }
}
