// What a killed run leaves behind is removed by the next one, and nothing else is.
#include "oracle/comm/run_folder.hpp"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <set>

#include "oracle/comm/world.hpp"

namespace shardproof {
namespace {
namespace run_folder_test {

namespace fs = std::filesystem;

class RunFolders : public testing::Test {
 protected:
  RunFolders() : parent(fs::temp_directory_path() / ("run_folder" + std::to_string(getpid()))) {
    fs::remove_all(parent);
    fs::create_directory(parent);
  }
  ~RunFolders() override { fs::remove_all(parent); }

  std::string made_with(const std::string& name, const std::string& file) const {
    fs::create_directory(parent / name);
    std::ofstream(parent / name / file) << text(file);
    return name;
  }
  std::string text(const std::string& file) const {
    return file == "owner" ? "another boot\n" : "";
  }
  std::set<std::string> there() const {
    std::set<std::string> names;
    for (const auto& entry : fs::directory_iterator(parent)) names.insert(entry.path().filename());
    return names;
  }
  // By a process that is killed while it has it; its name.
  std::string left_behind() const {
    const std::set<std::string> before = there();
    const pid_t child = fork();
    if (child == 0) {
      const RunFolder mine(parent);
      std::ofstream(mine.path() + "/page.1") << "a page";
      raise(SIGKILL);
    }
    int status = 0;
    waitpid(child, &status, 0);
    EXPECT_TRUE(WIFSIGNALED(status));
    for (const std::string& name : there())
      if (!before.contains(name)) return name;
    ADD_FAILURE() << "the child left nothing behind";
    return "";
  }
  const fs::path parent;
};

TEST_F(RunFolders, AreGoneWithTheirObject) {
  std::string path;
  {
    const RunFolder one(parent), other(parent);
    path = one.path();
    EXPECT_TRUE(fs::is_directory(path));
    EXPECT_TRUE(path.starts_with((parent / "shardproof.").string())) << path;
    EXPECT_EQ(there().size(), 2u);
  }
  EXPECT_EQ(there(), std::set<std::string>{});
}

TEST_F(RunFolders, OfKilledRunsAreRemovedByTheNext) {
  const std::string left = left_behind();
  const RunFolder next(parent);
  EXPECT_FALSE(there().contains(left));
  EXPECT_EQ(there().size(), 1u);
}

TEST_F(RunFolders, OfOthersAreLeftAlone) {
  const RunFolder alive(parent);
  const std::set<std::string> kept{
      fs::path(alive.path()).filename(),
      made_with("shardproof.report", "report.json"),  // a user's own
      made_with("shardproof.begun", "owner.new"),     // about to be held
      made_with("shardproof.remote", "owner"),        // by another system that shares the files
      made_with("unrelated", "file"),
  };
  const std::string left = left_behind();
  fs::rename(parent / left, parent / "renamed");
  fs::create_directory_symlink(parent / "renamed", parent / left);  // leads elsewhere
  {
    const RunFolder next(parent);
    std::set<std::string> now = kept;
    now.insert({"renamed", left, fs::path(next.path()).filename()});
    EXPECT_EQ(there(), now);
  }
  EXPECT_TRUE(fs::exists(parent / "renamed" / "page.1"));
}

TEST_F(RunFolders, ThatCannotBeMadeSaySo) {
  try {
    const RunFolder none(parent / "none");
    ADD_FAILURE() << "made " << none.path();
  } catch (const Infrastructure& e) {
    EXPECT_NE(std::string(e.what()).find("set TMPDIR"), std::string::npos) << e.what();
  }
}

}  // namespace run_folder_test
}  // namespace
}  // namespace shardproof
