#include "oracle/tensors/mapped_file.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "oracle/case.hpp"

namespace shardproof::tensors {

MappedFile::MappedFile(std::string path) : path_(std::move(path)) {
  const auto refuse = [this](const char* met) {
    throw BadInput(fmt::format("{}: expected a file that can be read, met {}", path_, met));
  };
  // A pipe of that name would otherwise wait for its writer.
  const int fd = open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) refuse(errno == ENOENT ? "nothing there" : std::strerror(errno));
  struct stat s {};
  if (fstat(fd, &s) != 0 || !S_ISREG(s.st_mode)) {
    close(fd);
    refuse("something that is no regular file");
  }
  size_ = size_t(s.st_size);
  void* at = size_ == 0 ? nullptr : mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, fd, 0);
  const int error = errno;
  close(fd);
  if (at == MAP_FAILED) refuse(std::strerror(error));
  data_ = static_cast<const std::byte*>(at);
}

MappedFile::~MappedFile() {
  if (data_) munmap(const_cast<std::byte*>(data_), size_);
}

void give_pages_back(std::span<const std::byte> part) {
  const auto page = uintptr_t(sysconf(_SC_PAGESIZE));
  const auto begin = (uintptr_t(part.data()) + page - 1) / page * page,
             end = uintptr_t(part.data() + part.size()) / page * page;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
}

}  // namespace shardproof::tensors
