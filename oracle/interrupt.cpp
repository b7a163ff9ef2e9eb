// The flag behind interrupt.hpp. The handler resets itself (SA_RESETHAND), so an impatient second
// signal acts as if nobody caught it, and system calls are not restarted (no SA_RESTART), so a wait
// for ranks comes back at once.
#include "oracle/interrupt.hpp"

#include <unistd.h>

#include <csignal>

namespace shardproof {

namespace {
volatile std::sig_atomic_t raised = 0;
bool left = false;
void raise_flag(int) { raised = 1; }
void say_and_end(int) {
  constexpr char words[] = "shardproof: INTERRUPTED before its end: nothing was judged\n";
  [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, words, sizeof words - 1);
  _exit(130);
}

void take_signals(void (*handler)(int), int flags) {
  struct sigaction action = {};
  action.sa_handler = handler;
  action.sa_flags = flags;
  sigemptyset(&action.sa_mask);
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
}
}  // namespace

void speak_when_interrupted() { take_signals(say_and_end, 0); }
void catch_interrupts() { take_signals(raise_flag, int(SA_RESETHAND)); }
void only_note_interrupts() { take_signals(raise_flag, 0); }

bool interrupted() { return raised != 0; }

bool work_goes_on() { return left; }
void leave_alone(std::thread work) {
  work.detach();
  left = true;
}

}  // namespace shardproof
