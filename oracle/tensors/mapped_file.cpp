#include "oracle/tensors/mapped_file.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>
#include <mutex>

#include "oracle/case.hpp"

namespace shardproof::tensors {
namespace {

std::atomic<MappedFile*> open_files = nullptr;
std::mutex changing;  // of the list; the handler only reads it
struct sigaction before;

uintptr_t page_size() {
  static const auto size = uintptr_t(sysconf(_SC_PAGESIZE));
  return size;
}

}  // namespace

// Puts zeros from the page of the address to the end of the file that holds it. Only what a signal
// handler may do.
bool lost_page_at(const void* address) {
  const auto at = uintptr_t(address) / page_size() * page_size();
  for (MappedFile* f = open_files; f; f = f->next_) {
    const auto begin = uintptr_t(f->data_), end = begin + f->size_;
    if (at < begin || at >= end) continue;
    f->lost_ = true;
    return mmap(reinterpret_cast<void*>(at), end - at, PROT_READ,
                MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != MAP_FAILED;
  }
  return false;
}

namespace {

// A fault of anyone else ends as it would have ended without this handler.
void on_bus_error(int signal, siginfo_t* info, void* context) {
  const int error = errno;
  const bool ours = lost_page_at(info->si_addr);
  errno = error;
  if (ours) return;
  if (before.sa_flags & SA_SIGINFO) return before.sa_sigaction(signal, info, context);
  if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN)
    return before.sa_handler(signal);
  ::sigaction(signal, &before, nullptr);  // the access faults again
}

void catch_bus_errors() {
  static const bool caught = [] {
    page_size();
    struct sigaction action {};
    action.sa_sigaction = on_bus_error;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    sigemptyset(&action.sa_mask);
    return ::sigaction(SIGBUS, &action, &before) == 0;
  }();
  (void)caught;
}

}  // namespace

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
  device_ = s.st_dev, node_ = s.st_ino, written_ = s.st_mtim;
  void* at = size_ == 0 ? nullptr : mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, fd, 0);
  const int error = errno;
  close(fd);  // a battery has more files than a process may hold open
  if (at == MAP_FAILED) refuse(std::strerror(error));
  data_ = static_cast<const std::byte*>(at);
  catch_bus_errors();
  const std::lock_guard lock(changing);
  next_ = open_files.load();
  open_files = this;
}

MappedFile::~MappedFile() {
  {
    const std::lock_guard lock(changing);
    std::atomic<MappedFile*>* link = &open_files;
    while (*link != this) link = &link->load()->next_;
    *link = next_.load();
  }
  if (data_) munmap(const_cast<std::byte*>(data_), size_);
}

void MappedFile::require_whole() const {
  struct stat s {};
  const bool known = stat(path_.c_str(), &s) == 0 && s.st_dev == device_ && s.st_ino == node_;
  const auto refuse = [this](const std::string& met) {
    throw BadInput(
        fmt::format("{}: expected a file that stays as it is while it is read, met {}; wait until "
                    "its program has ended",
                    path_, met));
  };
  if (known && size_t(s.st_size) < size_)
    refuse(fmt::format("one that was cut short from {} to {} bytes", size_, s.st_size));
  if (lost_) refuse("one with a part that could no longer be read");
  if (known && (size_t(s.st_size) != size_ || s.st_mtim.tv_sec != written_.tv_sec ||
                s.st_mtim.tv_nsec != written_.tv_nsec))
    refuse("one that was written to");
}

void give_pages_back(std::span<const std::byte> part) {
  const auto page = page_size();
  const auto begin = (uintptr_t(part.data()) + page - 1) / page * page,
             end = uintptr_t(part.data() + part.size()) / page * page;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
}

}  // namespace shardproof::tensors
