// Whose a folder is says a lock on a file in it, which the system lets go when its owner ends,
// however it ends, and in whichever container. It tells nothing across machines that share a file
// system, so that the file names the boot of the system that knows of the lock.
#include "oracle/comm/run_folder.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>

#include <fmt/format.h>

#include "oracle/case.hpp"
#include "oracle/comm/world.hpp"

namespace shardproof {
namespace {

namespace fs = std::filesystem;
constexpr const char* prefix = "shardproof.";
constexpr const char* owner_name = "owner";

std::string text_of(const std::string& path) {
  std::ifstream in(path);
  return {std::istreambuf_iterator<char>(in), {}};
}
std::string this_boot() { return text_of("/proc/sys/kernel/random/boot_id"); }

bool is_own_folder(const fs::path& path) {
  struct stat s {};
  return ::lstat(path.c_str(), &s) == 0 && S_ISDIR(s.st_mode) && s.st_uid == ::geteuid();
}

// One that holds no such file is being made, or is of another program.
void remove_if_left(const fs::path& folder) {
  const std::string owner = folder / owner_name;
  const int fd = ::open(owner.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
  if (fd < 0) return;
  std::error_code e;
  if (const std::string boot = text_of(owner);
      !boot.empty() && boot == this_boot() && ::flock(fd, LOCK_EX | LOCK_NB) == 0)
    fs::remove_all(folder, e);
  ::close(fd);
}

void remove_left_ones(const std::string& parent) {
  std::error_code e;
  for (fs::directory_iterator at(parent, e), end; !e && at != end; at.increment(e))
    if (at->path().filename().string().starts_with(prefix) && is_own_folder(at->path()))
      remove_if_left(at->path());
}

// Locked before it has its name: nobody finds one that is held by nobody yet.
int owned(const std::string& folder) {
  const std::string name = folder + "/" + owner_name, early = name + ".new";
  const int fd = ::open(early.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  const std::string boot = this_boot();
  if (fd < 0 || ::flock(fd, LOCK_EX | LOCK_NB) != 0 ||
      ::write(fd, boot.data(), boot.size()) != ssize_t(boot.size()))
    return fd;
  ::rename(early.c_str(), name.c_str());
  return fd;
}

}  // namespace

RunFolder::RunFolder(const std::string& parent) : path_(parent + "/" + prefix + "XXXXXX") {
  remove_left_ones(parent);
  if (!::mkdtemp(path_.data()))
    throw Infrastructure(
        fmt::format("run directory: expected a folder that can be made as {}, met '{}'; set "
                    "TMPDIR to one that can be written to",
                    path_, std::strerror(errno)));
  owner_ = owned(path_);
}

std::string RunFolder::socket_path() const {
  const std::string path = path_ + "/parent";
  if (path.size() >= sizeof sockaddr_un::sun_path)
    throw Infrastructure(
        fmt::format("run directory: expected a path under {} characters, met {}; set TMPDIR to a "
                    "shorter one",
                    sizeof sockaddr_un::sun_path, path));
  return path;
}

std::string parent_of_run_folders() {
  const char* temporary = std::getenv("TMPDIR");
  return temporary && *temporary ? temporary : "/tmp";
}

void check_run_folders() try {
  static_cast<void>(RunFolder(parent_of_run_folders()).socket_path());
} catch (const Infrastructure& e) {
  throw BadInput(e.what());
}

RunFolder::~RunFolder() {
  std::error_code e;
  fs::remove_all(path_, e);
  if (owner_ >= 0) ::close(owner_);
}

}  // namespace shardproof
