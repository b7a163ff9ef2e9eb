// A file as memory, read only: nothing of it is copied, pages come when they are looked at.
#pragma once
#include <cstddef>
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

 private:
  std::string path_;
  const std::byte* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace shardproof::tensors
