// Ranks that throw, die or never come back. The death of one costs its case and nothing else.
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <new>
#include <stdexcept>

#include "suites/self/planted.hpp"

namespace shardproof::planted {
namespace {

volatile bool for_ever = true;      // so that no compiler sees through it
volatile uintptr_t nowhere = 0x10;  // no page of any process

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool sanitized = true;  // ends the process at a request that no machine can meet
#else
constexpr bool sanitized = false;
#endif

// One call that is due, then `act` on one rank while its peers are in the next call.
Make after_one_call(int rank, std::function<void()> act) {
  return forward([=](Rank& r, const View& in, const View& out) {
    reduced(r, in, out);
    if (r.world_rank() == rank) act();
    reduced(r, in, out);
  });
}

// The forward is right; its backward never returns on one rank.
class ExitsInBackward final : public Kernel {
 public:
  std::unique_ptr<Saved> forward(Rank& rank, std::span<const View> inputs,
                                 std::span<const View> outputs) override {
    reduced(rank, inputs[0], outputs[0]);
    return std::make_unique<Saved>();
  }
  void backward(Rank& rank, Saved&, std::span<const View> cotangents,
                std::span<const View> gradients) override {
    if (rank.world_rank() == 1) _exit(0);
    copy(cotangents[0], gradients[0]);
  }
};

[[gnu::noinline]] int deeper(volatile int* above) {
  volatile int here[4096];
  here[0] = above ? above[0] + 1 : 0;
  return (for_ever ? deeper(here) : 0) + here[0];
}

void overflow_the_stack() {
  const rlimit some{1 << 20, 8 << 20};  // an unlimited stack would take all memory first
  setrlimit(RLIMIT_STACK, &some);
  deeper(nullptr);
}

void ask_for_too_much() {
  if (sanitized) throw std::bad_alloc();
  static volatile size_t bytes = size_t(1) << 60;
  ::operator delete(::operator new(bytes));
}

void sleep_for_ever() {
  while (for_ever) pause();
}

// By a process that it did not ask.
void wait_for_the_killer() {
  if (fork() == 0) {
    kill(getppid(), SIGKILL);
    _exit(0);
  }
  sleep_for_ever();
}

// The child comes back, and would be this rank a second time.
void fork_and_go_on() {
  const pid_t child = fork();
  if (child > 0) waitpid(child, nullptr, 0);
}

Deserved crashed(int rank, std::vector<std::string> words) {
  return {"forward", Verdict::crashed, rank, "", std::move(words)};
}

}  // namespace

std::vector<Plant> ranks() {
  const std::string small = "mapping_reduce tp=4 tokens=3 hidden=5";
  return {
      {"throws",
       small,
       after_one_call(1, [] { throw std::runtime_error("no such tile"); }),
       {{"forward", Verdict::failed, 1, "", {"rank 1 threw: no such tile"}},
        {"memory", Verdict::failed, 1, "", {"no such tile"}}}},
      {"throws_a_number",
       small,
       after_one_call(3, [] { throw 5; }),
       {{"forward", Verdict::failed, 3, "", {"rank 3 threw"}}}},
      {"failed_allocation",
       small,
       after_one_call(2, ask_for_too_much),
       {{"forward", Verdict::failed, 2, "", {"rank 2 threw", "bad_alloc"}}}},
      {"segfault",
       small,
       after_one_call(2, [] { *reinterpret_cast<volatile int*>(nowhere) = 1; }),
       {crashed(2, {"SIGSEGV at address 0x10", "forward, after call 1: all_reduce sum"})}},
      {"abort",
       small,
       after_one_call(0, [] { std::abort(); }),
       {crashed(0, {"SIGABRT", "forward, after call 1: all_reduce sum"})}},
      {"exit_0",
       small,
       after_one_call(3, [] { _exit(0); }),
       {crashed(3, {"exit code 0", "forward, after call 1: all_reduce sum"})}},
      {"exit_0_in_backward",
       small,
       [] { return std::make_unique<ExitsInBackward>(); },
       {{"forward", Verdict::crashed, 1, "", {"exit code 0", "backward"}},
        {"gradient", Verdict::crashed, 1, "", {"exit code 0"}}},
       {}},
      {"stack_overflow",
       small,
       after_one_call(1, overflow_the_stack),
       {crashed(1, {"SIGSEGV at address", "forward, after call 1: all_reduce sum"})}},
      {"killed_from_outside",
       small,
       after_one_call(2, wait_for_the_killer),
       {crashed(2, {"SIGKILL", "forward, after call 1: all_reduce sum"})}},
      {"forks_and_goes_on",
       small,
       after_one_call(2, fork_and_go_on),
       {{"forward",
         Verdict::failed,
         2,
         "",
         {"rank 2 threw: the kernel forked, and the child came"}}}},
      {"never_arrives",
       small,
       after_one_call(2, sleep_for_ever),
       {{"forward",
         Verdict::hung,
         2,
         "",
         {"rank 2 made no progress until its deadline", "forward, after call 1: all_reduce sum",
          "rank 0     left", "rank 3     left"}},
        {"lockstep", Verdict::hung, 2}},
       forward_only(),
       false,
       0.03},
  };
}

}  // namespace shardproof::planted
