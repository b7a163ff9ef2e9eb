// Results of a gate as bytes, for the jobs of `--jobs N`: each is a process with worlds of its own
// that sends what it judged up a pipe.
#pragma once
#include <functional>

#include "oracle/verdict.hpp"

namespace shardproof {

// Runs `work(part, sink)` for part = 0 .. parts-1, each in a process of its own, and hands every result
// to `progress` in the order of arrival. Throws Infrastructure when a part ended without its last word.
struct ResultSink {
  virtual ~ResultSink() = default;
  virtual void put(const CaseResult&) = 0;
  virtual void put(const ControlResult&) = 0;
  virtual void tick() {}
};
void run_parts(int parts, const std::function<void(int part, ResultSink&)>& work, ResultSink& results);

}  // namespace shardproof
