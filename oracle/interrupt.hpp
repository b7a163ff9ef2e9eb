// Ctrl-C, TERM and a terminal that closes (HUP, which nohup takes away) end a run between two
// cases, so that its report can still be written.
#pragma once
#include <chrono>
#include <csignal>
#include <exception>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <thread>

namespace shardproof {

// Until then the first one ends the process with 130 and a line that says so.
void speak_when_interrupted();
// From now on the first of these signals only raises the flag; a second one ends the process.
void catch_interrupts();
// In a process that belongs to another one, which hands signals on and may have been spared the one
// that came from a terminal to both: no signal ends it.
void only_note_interrupts();
// While it is there they wait.
class InterruptsHeld {
 public:
  InterruptsHeld();
  ~InterruptsHeld() { release(); }
  InterruptsHeld(const InterruptsHeld&) = delete;
  void release() const;  // before its end, or in a child that was forked meanwhile

 private:
  sigset_t before_;
};
bool interrupted();
int interrupting_signal();  // 0: none came

// Thrown where what is under way would not be kept.
struct Interrupted : std::exception {
  const char* what() const noexcept override { return "interrupted"; }
};

// Work that was left alone in this process. Its program ends by _exit, so that nothing is taken
// down under it.
bool work_goes_on();
void leave_alone(std::thread);

// What `work` gives, or throws, on a thread of its own; nothing where an interruption comes first:
// then it is left alone and goes on until the process ends. So it owns what it works on, or refers
// to what is there until then. `meanwhile` is called here, again and again.
template <class Work>
auto unless_interrupted(
    Work work, const std::function<void()>& meanwhile = [] {}) -> std::optional<decltype(work())> {
  if (interrupted()) return std::nullopt;
  std::packaged_task<decltype(work())()> task(std::move(work));
  auto result = task.get_future();
  std::thread thread(std::move(task));
  while (result.wait_for(std::chrono::milliseconds(20)) != std::future_status::ready) {
    if (interrupted()) return leave_alone(std::move(thread)), std::nullopt;
    meanwhile();
  }
  thread.join();
  return result.get();
}

}  // namespace shardproof
