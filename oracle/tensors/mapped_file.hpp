// A file as memory, read only: nothing of it is copied, pages come when they are looked at.
//
// Somebody may cut the file short, or its disk may fail, while it is looked at: then the kernel has
// no page to give and sends SIGBUS. It is caught here: the rest of the file reads as zeros, and
// require_whole() says which file it was, so that nothing is concluded from what was read.
#pragma once
#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <ctime>
#include <span>
#include <string>

namespace shardproof::tensors {

// Gives the pages of a part of a mapped file back; what is read again comes from the file again.
void give_pages_back(std::span<const std::byte> part);

class MappedFile {
 public:
  // BadInput where there is no such file, or something that is no regular file.
  explicit MappedFile(std::string path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const std::string& path() const { return path_; }
  std::span<const std::byte> bytes() const { return {data_, size_}; }

  // BadInput where the file lost bytes, or was written to, since it was opened. Another file that
  // was put in its place is none of these: what was opened is still there.
  void require_whole() const;
  // What `reader` makes of the bytes, whose pages are given back then; where it refuses them, a
  // change of the file is told first.
  template <class Reader>
  auto read(const Reader& reader) const {
    try {
      auto made = reader();
      give_pages_back(bytes());
      return made;
    } catch (...) {
      require_whole();
      throw;
    }
  }

 private:
  friend bool lost_page_at(const void* address);
  std::string path_;
  const std::byte* data_ = nullptr;
  size_t size_ = 0;
  dev_t device_ = 0;
  ino_t node_ = 0;
  timespec written_{};
  std::atomic<bool> lost_ = false;           // a page was asked for that is no longer there
  std::atomic<MappedFile*> next_ = nullptr;  // all that are open, for the handler
};

}  // namespace shardproof::tensors
