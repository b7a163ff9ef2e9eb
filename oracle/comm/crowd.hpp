// Deadlines count the clock: where many processes share a core, a rank that works may miss one.
#pragma once
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string>
#include <thread>

namespace shardproof {

// How many processes want each core, over the last minute or at this moment.
inline double crowding() {
  double minute = 0;
  unsigned running = 0;
  if (std::FILE* file = std::fopen("/proc/loadavg", "r")) {
    if (std::fscanf(file, "%lf %*f %*f %u", &minute, &running) != 2) minute = running = 0;
    std::fclose(file);
  }
  return std::max(minute, double(running)) / std::max(1u, std::thread::hardware_concurrency());
}

inline constexpr double most_deadline_scale = 1000;  // that a command takes

// Time to hand in a record, of a rank that waited when its world was given up, over that of one
// that computed: it only has to be given a core to hear of it, and is no rank that hangs.
inline constexpr int graces_of_one_that_waited = 10;

// Behind a deadline that has passed, of a run whose deadlines are so many times the usual ones; ""
// where no more than two share a core.
inline std::string crowded_text(double of_a_core, double scale) {
  if (of_a_core <= 2) return "";
  const double times = std::ceil(of_a_core);
  return fmt::format(
      " ({:.0f} processes want each core, and deadlines count the clock: is it only slow? "
      "--deadline-scale {:g} would let it end)",
      times, std::min(times * scale, most_deadline_scale));
}

// The same behind a deadline at which ranks computed: an endless loop looks like a long one.
inline std::string hung_or_slow_text(double of_a_core, double scale) {
  const std::string crowded = crowded_text(of_a_core, scale);
  return crowded.empty() ? " (hung, or only too slow: a larger --deadline-scale tells which)"
                         : crowded;
}

}  // namespace shardproof
