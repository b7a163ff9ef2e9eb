// A folder in which a run and its ranks find each other, gone with the object. A killed run leaves
// its own behind: whoever makes the next one beside it removes it.
#pragma once
#include <string>

namespace shardproof {

// The folder in which they are made: TMPDIR, or /tmp.
std::string parent_of_run_folders();
// Throws BadInput where none can be made there, or its socket could have no name.
void check_run_folders();

class RunFolder {
 public:
  explicit RunFolder(const std::string& parent);  // makes parent/shardproof.XXXXXX
  ~RunFolder();
  RunFolder(const RunFolder&) = delete;
  RunFolder& operator=(const RunFolder&) = delete;
  const std::string& path() const { return path_; }
  // On which ranks call back. Throws Infrastructure where its path is too long for one.
  std::string socket_path() const;

 private:
  std::string path_;
  int owner_ = -1;
};

}  // namespace shardproof
