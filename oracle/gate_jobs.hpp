// Results of a gate as bytes, for what is done side by side: each part is a process with worlds of
// its own that sends what it judged up a pipe.
#pragma once
#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "oracle/time_left.hpp"
#include "oracle/verdict.hpp"

namespace shardproof {

// Of a fault that is planted in the judge, or of a transport's own test.
struct SelfVerdict {
  std::string name;
  bool planted = false;
  std::string failure;  // "" it is as it should be
};

// A witness on which every broken call that is due has been tried.
struct Tried {
  Pace pace;
  double seconds = 0;
};

// What a process of a gate has begun to run; "" where it has ended.
struct Begun {
  int64_t process = 0;
  std::string line;
};

struct ResultSink {
  virtual ~ResultSink() = default;
  virtual void put(const CaseResult&) {}
  virtual void put(const ControlResult&) {}
  virtual void put(const SelfVerdict&) {}
  virtual void put(const Tried&) {}
  virtual void put(const Begun&) {}
};

// What a process of its own does, and who is given what it finds.
struct Part {
  std::function<void(ResultSink&)> work;
  std::shared_ptr<ResultSink> results;
};

// Runs all parts at once and hands on every result in the order of arrival; `tick` is called often.
// By part why it ended before it was through, "" where it did not: the others go on.
std::vector<std::string> run_parts(const std::vector<Part>&, const std::function<void()>& tick);

// Numbers from 0 on, each given once, to whichever of the processes forked since asks first; and
// whether one of them has asked all to stop.
class Turns {
 public:
  Turns();
  ~Turns();
  Turns(const Turns&) = delete;
  Turns& operator=(const Turns&) = delete;
  size_t next() { return shared_->next.fetch_add(1); }
  void stop() { shared_->stopped = true; }
  bool stopped() const { return shared_->stopped; }

 private:
  struct Shared {
    std::atomic<size_t> next{0};
    std::atomic<bool> stopped{false};
  };
  Shared* shared_;
};

}  // namespace shardproof
