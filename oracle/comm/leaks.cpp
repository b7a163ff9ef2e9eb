#include "oracle/comm/leaks.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <new>

extern "C" {
__attribute__((weak)) int __lsan_do_recoverable_leak_check();
__attribute__((weak)) void __sanitizer_set_report_fd(void*);
// What UCX, under MPICH, keeps from MPI_Init on. A leak of ours has none of it on its stack.
const char* __lsan_default_suppressions() {
  return "leak:libucs.so\nleak:libuct.so\nleak:libucp.so\n";
}
}

namespace shardproof {
namespace {

using Count = std::atomic<int>;

// Mapped before anything is forked, so that ranks and jobs of a gate count in one place.
Count* shared_count() {
  void* at =
      mmap(nullptr, sizeof(Count), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  return at == MAP_FAILED ? nullptr : new (at) Count(0);
}
Count* const count = leaks_are_looked_for() ? shared_count() : nullptr;

std::string text_of(int file) {
  std::string text(size_t(std::max<off_t>(lseek(file, 0, SEEK_END), 0)), '\0');
  const ssize_t n = pread(file, text.data(), text.size(), 0);
  text.resize(size_t(std::max<ssize_t>(n, 0)));
  return text;
}

}  // namespace

bool leaks_are_looked_for() {
  return __lsan_do_recoverable_leak_check && __sanitizer_set_report_fd;
}

std::string leaks_of_this_process() {
  if (!leaks_are_looked_for()) return "";
  const int file = memfd_create("leaks", MFD_CLOEXEC);
  if (file >= 0) __sanitizer_set_report_fd(reinterpret_cast<void*>(intptr_t(file)));
  const bool leaks = __lsan_do_recoverable_leak_check() != 0;
  __sanitizer_set_report_fd(reinterpret_cast<void*>(intptr_t(STDERR_FILENO)));
  std::string words = leaks && file >= 0 ? text_of(file) : "";
  if (file >= 0) close(file);
  if (leaks && words.empty()) words = "LeakSanitizer found leaks and could not say which";
  return words;
}

void note_leak(const std::string& whose, const std::string& words) {
  std::fprintf(stderr, "shardproof: %s leaks memory\n%s\n", whose.c_str(), words.c_str());
  std::fflush(stderr);
  if (count) count->fetch_add(1);
}

int leaks_noted() { return count ? count->load() : 0; }

}  // namespace shardproof
