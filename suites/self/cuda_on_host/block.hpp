// Grids of CUDA on the host: blocks one after another, the threads of a block in turns. Each thread
// has a stack of its own; it keeps the turn until it waits for others, at a barrier of its block or
// its warp. What a device leaves open is left open here as well, and chosen by a schedule: whatever
// a kernel's result depends on beside its arguments shows as a difference between two of them.
//
// Shared memory is thread-local memory of the library that holds the kernels, and holds NaN where a
// block begins. Kernels therefore lie in a library that has no other thread-local variables.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

namespace cuda_on_host {

struct Extent {
  unsigned x = 1, y = 1, z = 1;
};

enum class Order {
  ascending,   // by number, each up to its next barrier
  descending,  // the same from the last to the first
  shuffled,    // another permutation between any two barriers, blocks too
  torn,        // and a turn may end wherever a thread does what others can see
};
struct Schedule {
  Order order = Order::ascending;
  uint64_t seed = 0;
  // Two accesses of which one is a write and that no barrier orders stop the kernel, in whatever
  // order they came.
  bool watched = false;
};
void set_schedule(Schedule);  // for all later launches
bool can_watch();             // not where a sanitizer of the compiler watches already

// Of a kernel that was stopped: what was expected and met, with kernel and block. "" after a launch
// that went well.
const std::string& complaint();

struct Launch {
  Extent grid, block;
  size_t dynamic_shared = 0;
  void (*call)(const void* arguments);
  const void* arguments;
  const void* kernel;
  const char* parameters;  // their types
};
// Returns the runtime's code: a launch that it would refuse (9, 1), or one that was stopped (719).
int launch(const Launch&);
// How much dynamic shared memory a kernel may be launched with, where that is more than 48 KiB.
int allow_shared(const void* kernel, size_t bytes);
extern int last_error;  // the last code that was not 0; who asks sets it back
int64_t elapsed();      // nanoseconds, of the clock of the last launch
// Of a device that others have a turn on, for all later launches: every so many looks at the clock
// it has gone on by so much more. None: it is the kernel's own.
void set_turns_of_others(int looks, int64_t nanoseconds);
int64_t turns_of_others();           // of the clock of the last launch
void set_clock_rate(int kilohertz);  // that the device says it has, 1'000'000
int clock_rate();

// Allocations that have not been released; and how many more there may be.
int allocated();
void set_allocations_left(int);

// ---- For the headers in include/, called by a thread of a kernel

inline constexpr int warp = 32;
void join_block();
unsigned join_block_counting(bool vote);              // how many threads of the block say yes
void join_warp(unsigned lanes, bool orders = false);  // those of the mask; memory, too?
// Values of up to 16 bytes that lanes show each other: between two joins of the same lanes.
void show(const void* value, size_t bytes);
void see(int lane, void* value, size_t bytes);
void sleep(unsigned nanoseconds);  // of a clock that only sleep and `now` move
int64_t now();
// What comes next may be seen by others: of so many a torn turn ends before one.
void visible(unsigned one_in = 4);
bool take_allocation();  // false: none is left
void give_allocation();
void stop(const char* why);  // does not come back
int lane();
unsigned lanes_there();  // a mask of the caller's warp

}  // namespace cuda_on_host

// Of the thread that has the turn.
extern cuda_on_host::Extent threadIdx, blockIdx, blockDim, gridDim;
