// Linux keeps the highest resident size since it was last reset (VmHWM). It is read and reset where
// the reference begins and where it ends, so that each stretch has a peak of its own.
#include "oracle/memory_watch.hpp"

#include <algorithm>
#include <ctime>
#include <fstream>
#include <string>

#include "oracle/comm/door.hpp"

namespace shardproof {
namespace {

// Of this thread: other work on the machine does not count.
double cpu_seconds() {
  timespec t{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
}

struct Resident {
  int64_t now = 0, highest = 0;
};

struct Watch {
  bool on = false;
  int64_t kept = 0;      // of the reference's results
  int64_t resident = 0;  // when the reference began
  double since = 0;
  int depth = 0;
  MemoryTold told;
} watch;

// Sizes since the last call, or since the process began.
Resident take() {
  Resident r;
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    for (const auto& [name, to] : {std::pair{"VmRSS:", &r.now}, std::pair{"VmHWM:", &r.highest}})
      if (line.starts_with(name)) *to = std::stoll(line.substr(6)) * 1024;
  std::ofstream reset("/proc/self/clear_refs");
  reset << "5" << std::flush;
  if (!reset || r.highest == 0)
    throw Infrastructure(
        "expected /proc/self/status and /proc/self/clear_refs of Linux, which say what memory a "
        "process takes, met none; leave --verbose out");
  watch.told.peak = std::max(watch.told.peak, r.highest);
  return r;
}

void end_of_a_stretch(const Resident& r) {
  watch.told.beyond = std::max(watch.told.beyond, r.highest - watch.kept);
}

}  // namespace

void watch_memory() {
  watch = {};
  watch.on = true;
  take();
  watch.told = {};
}

ReferenceWork::ReferenceWork() {
  if (!watch.on || watch.depth++ > 0) return;
  const Resident r = take();
  end_of_a_stretch(r);
  watch.resident = r.now;
  watch.since = cpu_seconds();
}

ReferenceWork::~ReferenceWork() {
  if (!watch.on || --watch.depth > 0) return;
  watch.told.reference_seconds += cpu_seconds() - watch.since;
  try {
    const Resident r = take();
    watch.told.reference = std::max(watch.told.reference, r.highest - watch.resident + watch.kept);
  } catch (const std::exception&) {  // the next look says so
  }
}

// What is given up was there until now: it counts in the stretch that ends here.
void reference_keeps(int64_t bytes) {
  try {
    if (watch.on && watch.depth == 0 && bytes < 0) end_of_a_stretch(take());
  } catch (const std::exception&) {  // the next look says so
  }
  watch.kept += bytes;
  watch.told.reference = std::max(watch.told.reference, watch.kept);
}

MemoryTold memory_told() {
  end_of_a_stretch(take());
  return watch.told;
}

}  // namespace shardproof
