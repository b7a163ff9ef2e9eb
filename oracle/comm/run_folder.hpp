// A folder in which a run and its ranks find each other, gone with the object. A killed run leaves
// its own behind: whoever makes the next one beside it removes it.
#pragma once
#include <string>

namespace shardproof {

class RunFolder {
 public:
  explicit RunFolder(const std::string& parent);  // makes parent/shardproof.XXXXXX
  ~RunFolder();
  RunFolder(const RunFolder&) = delete;
  RunFolder& operator=(const RunFolder&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  int owner_ = -1;
};

}  // namespace shardproof
