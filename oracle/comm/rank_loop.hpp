// What a rank does with its life: waits for a job, runs it, hands in the record, waits again.
#pragma once
#include <csignal>
#include <exception>

#include "oracle/comm/arena.hpp"
#include "oracle/comm/world.hpp"

namespace shardproof {

// Jobs of one rank until the arena quits. The calling thread is the rank; `threads` says that ranks
// share the process.
void serve(const Arena&, int rank, bool threads, const RankMain&);

// From here on this process keeps up to 64 MiB of what it frees: a page that goes back to the
// system is cleared and mapped again for the next buffer, which costs more than most calls.
void keep_freed_memory();

// A forked process becomes a home of ranks: it dies with its parent, reads nothing, dumps no core,
// leads a process group (so that what it starts can be ended with it), has default signals, and a
// crash writes signal and address into the arena first. `parent` is the pid before the fork.
void become_rank_process(int parent);
// The calling thread reports its crashes as those of `rank`; on a stack of its own, so that a stack
// overflow can be told as well.
void report_crashes(const Arena&, int rank);

// RankPage::threw: what ended the job was thrown by the subject, or by the rank's harness.
inline constexpr uint32_t subject_threw = 1, harness_threw = 2;
// Runs `job`; says its words and who threw, where it ends by an exception.
template <class Job, class Say>
void say_what_is_thrown(Job job, Say say) {
  try {
    job();
  } catch (const Infrastructure& e) {
    say(e.what(), harness_threw);
  } catch (const std::exception& e) {
    say(e.what(), subject_threw);
  } catch (...) {
    say("an exception that is not a std::exception", subject_threw);
  }
}
// Signals by which a crash ends a process.
inline constexpr int crash_signals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT};
// How a handed-in record is checked.
uint64_t checksum(std::span<const std::byte>);

}  // namespace shardproof
