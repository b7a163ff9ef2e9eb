// The flag behind interrupt.hpp. An impatient second signal acts as if nobody caught it; one that
// comes within half a second is the first one again: `timeout` sends it to its child and to the
// child's group. System calls are not restarted (no SA_RESTART), so a wait for ranks comes back at
// once.
#include "oracle/interrupt.hpp"

#include <unistd.h>

#include <atomic>
#include <csignal>
#include <ctime>

namespace shardproof {

namespace {
volatile std::sig_atomic_t raised = 0;
bool left = false;
std::atomic<int64_t> first_at{0};  // 0: none came

void raise_flag(int signal) { raised = signal; }
void raise_flag_once(int signal) {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  const int64_t ms = int64_t(now.tv_sec) * 1000 + now.tv_nsec / 1'000'000;
  // Two signals may come to two threads at once.
  int64_t first = 0;
  if (first_at.compare_exchange_strong(first, ms)) {
    raised = signal;
  } else if (ms - first >= 500) {
    std::signal(signal, SIG_DFL);
    std::raise(signal);
  }
}
void say_and_end(int) {
  constexpr char words[] = "shardproof: INTERRUPTED before its end: nothing was judged\n";
  [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, words, sizeof words - 1);
  _exit(130);
}

// One that a parent ignores stays ignored: that is what nohup asks for.
bool ignored(int signal) {
  struct sigaction now = {};
  return sigaction(signal, nullptr, &now) == 0 && now.sa_handler == SIG_IGN;
}
void take_signals(void (*handler)(int)) {
  struct sigaction action = {};
  action.sa_handler = handler;
  sigemptyset(&action.sa_mask);
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
  if (!ignored(SIGHUP)) sigaction(SIGHUP, &action, nullptr);
}
}  // namespace

void speak_when_interrupted() { take_signals(say_and_end); }
void catch_interrupts() { take_signals(raise_flag_once); }
void only_note_interrupts() { take_signals(raise_flag); }

InterruptsHeld::InterruptsHeld() {
  sigset_t held;
  sigemptyset(&held);
  sigaddset(&held, SIGINT);
  sigaddset(&held, SIGTERM);
  sigaddset(&held, SIGHUP);
  sigprocmask(SIG_BLOCK, &held, &before_);
}
void InterruptsHeld::release() const { sigprocmask(SIG_SETMASK, &before_, nullptr); }

bool interrupted() { return raised != 0; }
int interrupting_signal() { return raised; }

bool work_goes_on() { return left; }
void leave_alone(std::thread work) {
  work.detach();
  left = true;
}

}  // namespace shardproof
