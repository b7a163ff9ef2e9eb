#include "suites/self/cuda_on_host/block.hpp"

#include <cxxabi.h>
#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <cwchar>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "suites/self/cuda_on_host/fiber.hpp"
#include "suites/self/cuda_on_host/watch.hpp"

cuda_on_host::Extent threadIdx, blockIdx, blockDim, gridDim;

namespace cuda_on_host {
int last_error = 0;

namespace {

constexpr int success = 0, invalid_value = 1, invalid_configuration = 9, launch_failure = 719;
constexpr unsigned most_threads = 1024, most_unasked = 48 << 10, most_dynamic_shared = 227 << 10;

enum class State { ready, at_barrier, at_warp, asleep, done };
struct Thread {
  State state = State::ready;
  int fiber = -1;      // none before its first turn
  unsigned lanes = 0;  // waited for
  int64_t wakes = 0;
  unsigned char shown[16] = {};
  bool vote = false;
};

struct Shared {
  unsigned char* memory = nullptr;
  size_t bytes = 0;
};
void enter();

// What is launched now: one launch at a time.
struct Running {
  const Launch* launch = nullptr;
  Schedule schedule;
  std::mt19937_64 random;
  Fibers fibers{enter};
  std::vector<int> free_fibers;  // the one that was used last comes first
  std::vector<Thread> threads;
  std::vector<Extent> places;
  std::vector<unsigned> turns;
  size_t at_barrier = 0, done = 0;
  unsigned current = 0;
  bool in_kernel = false;
  uint64_t block = 0;
  uint32_t barriers = 0, warp_barriers[most_threads / warp] = {};
  Shared shared;
  int64_t clock = 0, turn = 0, lost = 0;  // lost: in the turns of others
  int looks = 0, looks_a_turn = 0, kilohertz = 1'000'000;
  unsigned votes = 0;                     // of the last barrier
  std::map<const void*, size_t> allowed;  // of dynamic shared memory
  std::string complaint;
} running;
std::mutex one_launch;
int taken = 0, left = 1 << 20;  // allocations

uint64_t threads_of(const Extent& e) { return uint64_t(e.x) * e.y * e.z; }
Extent place_of(uint64_t number, const Extent& e) {
  return {unsigned(number % e.x), unsigned(number / e.x % e.y), unsigned(number / e.x / e.y)};
}
Thread& own() { return running.threads[running.current]; }

// One thread after another that ends on this stack.
void enter() {
  running.fibers.entered();
  while (true) {
    running.launch->call(running.launch->arguments);
    ++running.done;
    own().state = State::done;
    running.free_fibers.push_back(own().fiber);
    running.fibers.suspend();
  }
}

void wait_as(State s) {
  own().state = s;
  running.fibers.suspend();
}

// ---- Shared memory: the thread-local block of the library that holds the kernel

struct Segment {
  const void* kernel;
  size_t module = 0, bytes = 0;
};
int find_segment(dl_phdr_info* info, size_t, void* out) {
  auto& segment = *static_cast<Segment*>(out);
  const auto at = reinterpret_cast<uintptr_t>(segment.kernel) - info->dlpi_addr;
  size_t bytes = 0;
  bool here = false;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& part = info->dlpi_phdr[i];
    if (part.p_type == PT_TLS) bytes = part.p_memsz;
    here = here || (part.p_type == PT_LOAD && at - part.p_vaddr < part.p_memsz);
  }
  if (here) segment.module = info->dlpi_tls_modid, segment.bytes = bytes;
  return here;
}

struct TlsIndex {
  unsigned long module, offset;
};
extern "C" void* __tls_get_addr(TlsIndex*);

Shared shared_memory(const void* kernel) {
  Segment segment{kernel};
  ::dl_iterate_phdr(find_segment, &segment);
  if (segment.bytes == 0) return {};
  TlsIndex index{segment.module, 0};
  return {static_cast<unsigned char*>(__tls_get_addr(&index)), segment.bytes};
}

// NaN in every floating type, signalling in double; far from any index. Before each block all of
// it, which holds the shared memory of every kernel: in the widest stores that there are.
void poison(const Shared& shared) {
  constexpr wchar_t nan = 0x7FF4'7FF4;
  const size_t words = shared.bytes / sizeof nan;
  std::wmemset(reinterpret_cast<wchar_t*>(shared.memory), nan, words);
  std::memcpy(shared.memory + words * sizeof nan, &nan, shared.bytes % sizeof nan);
}

// ---- Turns

void order_turns() {
  auto& turns = running.turns;
  switch (running.schedule.order) {
    case Order::ascending:
    case Order::descending:
      return;  // as they stand
    case Order::shuffled:
    case Order::torn:
      std::shuffle(turns.begin(), turns.end(), running.random);
  }
}

void begin_turns() {
  const size_t count = running.places.size();
  running.threads.assign(count, {});
  running.done = running.at_barrier = 0;
  running.turns.resize(count);
  std::iota(running.turns.begin(), running.turns.end(), 0u);
  if (running.schedule.order == Order::descending)
    std::reverse(running.turns.begin(), running.turns.end());
}

void turn_of(unsigned t) {
  running.current = t;
  threadIdx = running.places[t];
  Thread& thread = running.threads[t];
  if (thread.fiber < 0) {
    thread.fiber = running.free_fibers.back();
    running.free_fibers.pop_back();
  }
  running.in_kernel = true;
  running.fibers.resume(size_t(thread.fiber));
  running.in_kernel = false;
}

// Until nobody can go on without something that only all can bring.
void take_turns() {
  order_turns();
  for (bool any = true; any;) {
    any = false;
    for (unsigned t : running.turns) {
      if (running.threads[t].state != State::ready) continue;
      any = true;
      turn_of(t);
      if (!running.complaint.empty()) return;
    }
    if (running.schedule.order == Order::torn) order_turns();
  }
}

size_t in_state(State s) {
  return size_t(std::count_if(running.threads.begin(), running.threads.end(),
                              [s](const Thread& t) { return t.state == s; }));
}

bool wake_first() {
  int64_t first = INT64_MAX;
  for (const Thread& t : running.threads)
    if (t.state == State::asleep) first = std::min(first, t.wakes);
  for (Thread& t : running.threads)
    if (t.state == State::asleep && t.wakes == first) t.state = State::ready;
  running.clock = first == INT64_MAX ? running.clock : std::max(running.clock, first);
  return first != INT64_MAX;
}

std::string where_threads_are() {
  std::string text = "a barrier that not all threads of the block reach";
  for (auto [state, words] : {std::pair(State::at_barrier, "at __syncthreads"),
                              std::pair(State::at_warp, "in an operation of their warp"),
                              std::pair(State::done, "at the end")})
    if (const size_t n = in_state(state)) text += ", " + std::to_string(n) + " " + words;
  return text;
}

void run_block() {
  begin_turns();
  while (true) {
    take_turns();
    if (!running.complaint.empty() || running.done == running.threads.size()) return;
    if (running.at_barrier == running.threads.size()) {
      running.at_barrier = 0;
      ++running.barriers;
      running.votes = 0;
      for (Thread& t : running.threads) {
        t.state = State::ready;
        running.votes += std::exchange(t.vote, false);
      }
    } else if (!wake_first()) {
      running.complaint = where_threads_are();
      return;
    }
  }
}

// ---- Launches

int refused(const Launch& l) {
  const uint64_t threads = threads_of(l.block);
  if (threads_of(l.grid) == 0 || threads == 0) return invalid_configuration;
  if (l.grid.x > 0x7FFFFFFFu || l.grid.y > 65535 || l.grid.z > 65535) return invalid_configuration;
  if (threads > most_threads || l.block.z > 64) return invalid_configuration;
  const auto allowed = running.allowed.find(l.kernel);
  const size_t most = allowed == running.allowed.end() ? most_unasked : allowed->second;
  return l.dynamic_shared > most ? invalid_value : success;
}

// By the types of its parameters where the library does not export its name.
std::string name_of(const Launch& l) {
  Dl_info found{};
  if (!::dladdr(l.kernel, &found) || !found.dli_sname || found.dli_saddr != l.kernel) {
    const char* list = std::strstr(l.parameters, "Parameters = ");
    return std::string("a kernel of ") + (list ? list + std::strlen("Parameters = ") : "");
  }
  int status = 0;
  const std::unique_ptr<char, void (*)(void*)> name(
      abi::__cxa_demangle(found.dli_sname, nullptr, nullptr, &status), std::free);
  return status == 0 ? name.get() : found.dli_sname;
}

std::vector<uint64_t> order_of_blocks(uint64_t count) {
  std::vector<uint64_t> blocks(count);
  std::iota(blocks.begin(), blocks.end(), uint64_t(0));
  if (running.schedule.order == Order::descending) std::reverse(blocks.begin(), blocks.end());
  if (running.schedule.order >= Order::shuffled)
    std::shuffle(blocks.begin(), blocks.end(), running.random);
  return blocks;
}

// Stacks and places of the threads of a block; a kernel that was stopped has left its own behind.
void make_room(const Extent& block) {
  const size_t count = threads_of(block);
  running.places.resize(count);
  for (size_t t = 0; t < count; ++t) running.places[t] = place_of(t, block);
  if (running.free_fibers.size() >= count) return;
  running.fibers.require(count);
  running.fibers.reset();
  running.free_fibers.resize(std::max(count, running.fibers.count()));
  std::iota(running.free_fibers.begin(), running.free_fibers.end(), 0);
}

void run_grid(const Launch& l) {
  make_room(l.block);
  running.shared = shared_memory(l.kernel);
  forget_accesses();
  looks_closely = running.schedule.watched || running.schedule.order == Order::torn;
  for (uint64_t b : order_of_blocks(threads_of(l.grid))) {
    blockIdx = place_of(b, l.grid);
    running.block = b;
    poison(running.shared);
    run_block();
    if (running.complaint.empty()) continue;
    running.complaint += ", in block " + std::to_string(b) + " of " + name_of(l);
    running.free_fibers.clear();
    return;
  }
}

}  // namespace

void set_schedule(Schedule s) { running.schedule = s; }
const std::string& complaint() { return running.complaint; }
int64_t elapsed() { return running.clock; }
void set_turns_of_others(int looks, int64_t nanoseconds) {
  running.looks_a_turn = looks, running.turn = nanoseconds;
}
int64_t turns_of_others() { return running.lost; }
void set_clock_rate(int kilohertz) { running.kilohertz = kilohertz; }
int clock_rate() { return running.kilohertz; }

int allow_shared(const void* kernel, size_t bytes) {
  const std::lock_guard<std::mutex> hold(one_launch);
  if (bytes > most_dynamic_shared) return last_error = invalid_value;
  running.allowed[kernel] = bytes;
  return success;
}

int launch(const Launch& l) {
  const std::lock_guard<std::mutex> hold(one_launch);
  running.complaint.clear();
  int code = refused(l);
  if (code == success) {
    running.launch = &l;
    running.random.seed(running.schedule.seed);
    running.clock = running.lost = 0, running.looks = 0;
    blockDim = l.block, gridDim = l.grid;
    run_grid(l);
    if (!running.complaint.empty()) code = launch_failure;
  }
  if (code != success) last_error = code;
  return code;
}

int allocated() { return taken; }
void set_allocations_left(int count) { left = count; }
bool take_allocation() {
  if (left == 0) return false;
  return ++taken, --left, true;
}
void give_allocation() { --taken, ++left; }

// ---- Of a thread

int lane() { return int(running.current % warp); }
unsigned lanes_there() {
  const size_t first = running.current / warp * warp, rest = running.threads.size() - first;
  return rest >= warp ? ~0u : (1u << rest) - 1;
}

void join_block() {
  ++running.at_barrier;
  wait_as(State::at_barrier);
}

unsigned join_block_counting(bool vote) {
  own().vote = vote;
  join_block();
  return running.votes;
}

void join_warp(unsigned lanes, bool orders) {
  lanes &= lanes_there();
  if (!(lanes >> lane() & 1u)) stop("an operation of a warp by a lane outside of its own mask");
  Thread* first = &running.threads[running.current / warp * warp];
  own().lanes = lanes;
  for (int l = 0; l < warp; ++l) {
    if (!(lanes >> l & 1u) || l == lane()) continue;
    if (first[l].state != State::at_warp || first[l].lanes != lanes) return wait_as(State::at_warp);
  }
  if (orders) ++running.warp_barriers[running.current / warp];
  for (int l = 0; l < warp; ++l)
    if (lanes >> l & 1u) first[l].state = State::ready;
}

void show(const void* value, size_t bytes) { std::memcpy(own().shown, value, bytes); }
void see(int lane, void* value, size_t bytes) {
  std::memcpy(value, running.threads[running.current / warp * warp + unsigned(lane)].shown, bytes);
}

void sleep(unsigned nanoseconds) {
  own().wakes = running.clock + nanoseconds;
  wait_as(State::asleep);
}
int64_t now() {
  sleep(1000);
  if (running.looks_a_turn > 0 && ++running.looks % running.looks_a_turn == 0) {
    running.clock += running.turn;
    running.lost += running.turn;
  }
  return running.clock;
}

void visible(unsigned one_in) {
  if (running.schedule.order == Order::torn && running.random() % one_in == 0)
    wait_as(State::ready);
}

void stop(const char* why) {
  running.complaint = why;
  while (true) wait_as(State::done);
}

// ---- For what watches

bool can_watch() {
#ifdef CUDA_ON_HOST_WATCHES
  return true;
#else
  return false;
#endif
}
bool watched() { return running.schedule.watched; }
Moment moment() {
  return {running.block, running.current, running.barriers,
          running.warp_barriers[running.current / warp]};
}
bool of_a_kernel(const void* address) {
  const auto* at = static_cast<const Extent*>(address);  // .x, which kernels read alone
  return running.in_kernel && !running.fibers.holds(address) && at != &threadIdx &&
         at != &blockIdx && at != &blockDim && at != &gridDim;
}
bool shared(uintptr_t address) {
  return address - reinterpret_cast<uintptr_t>(running.shared.memory) < running.shared.bytes;
}
uintptr_t place_of(uintptr_t address) {
  return shared(address) ? address - reinterpret_cast<uintptr_t>(running.shared.memory) : address;
}

}  // namespace cuda_on_host
