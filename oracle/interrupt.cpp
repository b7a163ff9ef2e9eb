// The flag behind interrupt.hpp. The handler resets itself (SA_RESETHAND), so an impatient second
// signal acts as if nobody caught it, and system calls are not restarted (no SA_RESTART), so a wait
// for ranks comes back at once.
#include "oracle/interrupt.hpp"

#include <csignal>

namespace shardproof {

namespace {
volatile std::sig_atomic_t raised = 0;
bool left = false;
void raise_flag(int) { raised = 1; }
}  // namespace

void catch_interrupts() {
  struct sigaction action = {};
  action.sa_handler = raise_flag;
  action.sa_flags = int(SA_RESETHAND);
  sigemptyset(&action.sa_mask);
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
}

bool interrupted() { return raised != 0; }

bool work_goes_on() { return left; }
void leave_alone(std::thread work) {
  work.detach();
  left = true;
}

}  // namespace shardproof
