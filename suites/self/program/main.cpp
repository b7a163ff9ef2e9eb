// A program of several test files, and --file=NAME for one of them: what its entry of ctest runs.
// Tests know the file that they stand in; those of other files are added to what --gtest_filter
// leaves out.
#include <gtest/gtest.h>

#include <cstdio>
#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <string_view>

namespace {

using Names = std::set<std::string>;

std::map<std::string, Names> tests_by_file() {
  std::map<std::string, Names> tests;
  const testing::UnitTest& all = *testing::UnitTest::GetInstance();
  for (int s = 0; s < all.total_test_suite_count(); ++s) {
    const testing::TestSuite& suite = *all.GetTestSuite(s);
    for (int t = 0; t < suite.total_test_count(); ++t) {
      const testing::TestInfo& test = *suite.GetTestInfo(t);
      tests[std::filesystem::path(test.file()).stem()].insert(std::string(suite.name()) + "." +
                                                              test.name());
    }
  }
  return tests;
}

// A filter goes by names: two files of a program that share one could not be told apart.
bool told_apart(const std::map<std::string, Names>& tests) {
  std::map<std::string, std::string> seen;
  for (const auto& [file, names] : tests)
    for (const std::string& name : names)
      if (const auto [at, first] = seen.try_emplace(name, file); !first) {
        std::fprintf(stderr, "%s and %s both have a test %s: rename one of them\n",
                     at->second.c_str(), file.c_str(), name.c_str());
        return false;
      }
  return true;
}

std::string leaving_out_others(const std::map<std::string, Names>& tests, const std::string& file,
                               std::string filter) {
  filter += filter.find('-') == std::string::npos ? "-" : ":";
  for (const auto& [other, names] : tests)
    if (other != file)
      for (const std::string& name : names) filter += name + ":";
  return filter;
}

int refused(const std::map<std::string, Names>& tests, std::string_view word) {
  std::fprintf(stderr,
               "expected --file=NAME or an option of GoogleTest, met %s; files of this program:",
               std::string(word).c_str());
  for (const auto& [file, names] : tests) std::fprintf(stderr, " %s", file.c_str());
  std::fprintf(stderr, "\n");
  return 2;
}

}  // namespace

int main(int count, char** words) {
  constexpr std::string_view option = "--file=";
  testing::InitGoogleTest(&count, words);
  const std::map<std::string, Names> tests = tests_by_file();
  if (!told_apart(tests)) return 2;
  for (int w = 1; w < count; ++w) {
    const std::string_view word = words[w];
    const std::string file(word.starts_with(option) ? word.substr(option.size()) : "");
    if (!tests.contains(file)) return refused(tests, word);
    testing::GTEST_FLAG(filter) = leaving_out_others(tests, file, testing::GTEST_FLAG(filter));
  }
  return RUN_ALL_TESTS();
}
