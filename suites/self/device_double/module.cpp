// A device that is none: the table of device.hpp in host memory, as slow and as strict as a device
// may be. Built as a module of its own, so that the judge loads it like the real one.
//
//   memory    addresses of pages that nobody may touch, contents in a shadow: a host access is a
//             SIGSEGV, and so is what a kernel would reach outside of an allocation
//   streams   queues, each as fast as a device may be: work is done when it is enqueued, unless
//             something before it on its stream is not done yet. A spin is not done before the host
//             waits for it. Release waits for all streams, as it does on a device
//   the null stream  is a queue that no one waits for
//
// SHARDPROOF_DOUBLE_STREAMS=lazy  as slow as a device may be: nothing is done before the host waits
//                              for it: a copy that is read too early is not there, a source that is
//                              reused too early is copied as it is then
// SHARDPROOF_DOUBLE_DEVICES=N  there are N devices (1)
// SHARDPROOF_DOUBLE_CODE=N     counting devices gives code N
// SHARDPROOF_DOUBLE_FULL=N     there is no memory left on device N
// SHARDPROOF_DOUBLE_LEFT=BYTES is left of a device's memory when a kernel asks for some of it
// SHARDPROOF_DOUBLE_KERNEL=W   mapping_copy is wrong: host_access, null_stream, past_the_end,
// sticky_code, or sticky_once:FILE, which is so in the one case that can make the file;
// two_streams: it is right, on a side stream with both of its waits
#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "oracle/digest/units.hpp"
#include "primitives/cuda/blas.hpp"
#include "primitives/cuda/device_kernels.hpp"
#include "suites/self/device_double/device.hpp"
#include "suites/self/device_double/work.hpp"

namespace shardproof {
namespace {

constexpr int success = 0, invalid_value = 1, illegal_address = 700;
constexpr std::byte fresh{0xEE};  // what memory holds before it is written

// The shadow of an allocation: pages that come when they are written to.
class Shadow {
 public:
  Shadow() = default;
  explicit Shadow(size_t bytes) : bytes_(bytes) {
    void* p = ::mmap(nullptr, bytes_ + 1, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p != MAP_FAILED) data_ = static_cast<std::byte*>(p);
    if (data_ && bytes_ < device_double::without_pages) std::memset(data_, int(fresh), bytes_);
  }
  ~Shadow() {
    if (data_) ::munmap(data_, bytes_ + 1);
  }
  Shadow(Shadow&& other) noexcept { *this = std::move(other); }
  Shadow& operator=(Shadow&& other) noexcept {
    std::swap(data_, other.data_), std::swap(bytes_, other.bytes_);
    return *this;
  }
  std::byte* data() const { return data_; }
  size_t size() const { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};
struct Block {
  size_t reserved = 0;
  Shadow shadow;
};
struct Queue {
  std::deque<std::function<bool()>> work;  // true: done
  uint64_t enqueued = 0, done = 0;
};
struct Mark {
  Queue* queue = nullptr;
  uint64_t number = 0;
};

bool broken = false;  // every later call fails
int used = 0;         // the device
std::recursive_mutex lock;
using Hold = std::lock_guard<std::recursive_mutex>;
std::map<std::byte*, Block>& blocks() {
  static std::map<std::byte*, Block> all;
  return all;
}
Queue null_stream;
std::set<Queue*>& queues() {
  static std::set<Queue*> all{&null_stream};
  return all;
}

Queue& queue_of(Stream s) { return s ? *static_cast<Queue*>(s) : null_stream; }

// True where all work up to that number is done.
bool advance(Queue& q, uint64_t number) {
  while (q.done < number) {
    if (!q.work.front()()) return false;
    q.work.pop_front();
    ++q.done;
  }
  return true;
}

int host_waits = 0;  // for something: spins are over then

class Waits {
 public:
  Waits() { ++host_waits; }
  ~Waits() { --host_waits; }
  Waits(const Waits&) = delete;
  Waits& operator=(const Waits&) = delete;
};

bool lazy() {
  static const char* streams = std::getenv("SHARDPROOF_DOUBLE_STREAMS");
  return streams && std::string(streams) == "lazy";
}

// All that can be done by now is done.
void pump() {
  static bool pumping = false;
  if (lazy() || pumping) return;
  pumping = true;
  for (bool more = true; more;) {
    more = false;
    for (Queue* q : queues()) {
      const uint64_t before = q->done;
      advance(*q, q->enqueued);
      more = more || q->done != before;
    }
  }
  pumping = false;
}

void run_until(Queue& q, uint64_t number) {
  {
    const Waits waits;
    while (!advance(q, number)) ::sched_yield();
  }
  pump();
}

}  // namespace

namespace device_double {

int enqueue_when(void* s, std::function<bool()> work) {
  Hold hold(lock);
  Queue& q = queue_of(s);
  q.work.push_back(std::move(work));
  ++q.enqueued;
  pump();
  return success;
}
int enqueue(void* s, std::function<void()> work) {
  return enqueue_when(s, [work = std::move(work)] {
    work();
    return true;
  });
}

std::byte* reach(const void* device, size_t bytes) {
  auto* p = static_cast<std::byte*>(const_cast<void*>(device));
  auto after = blocks().upper_bound(p);
  if (after == blocks().begin()) return p;
  auto& [start, block] = *std::prev(after);
  const size_t offset = size_t(p - start);
  return offset + bytes <= block.shadow.size() ? block.shadow.data() + offset : p;
}

}  // namespace device_double

namespace {

using device_double::enqueue, device_double::enqueue_when, device_double::reach;

int devices_there() {
  const char* text = std::getenv("SHARDPROOF_DOUBLE_DEVICES");
  return text ? std::atoi(text) : 1;
}
int count(int* devices) {
  const char* code = std::getenv("SHARDPROOF_DOUBLE_CODE");
  *devices = devices_there();
  return code ? std::atoi(code) : success;
}

int allocate(void** memory, size_t bytes) {
  Hold hold(lock);
  if (const char* full = std::getenv("SHARDPROOF_DOUBLE_FULL"); full && std::atoi(full) == used)
    return out_of_memory;
  const size_t page = 4096, reserved = (bytes + page) / page * page;
  void* p = ::mmap(nullptr, reserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) return out_of_memory;
  Shadow shadow(bytes);
  if (!shadow.data()) {
    ::munmap(p, reserved);
    return out_of_memory;
  }
  blocks()[static_cast<std::byte*>(p)] = {reserved, std::move(shadow)};
  *memory = p;
  return success;
}

int release(void* memory) {
  Hold hold(lock);
  auto found = blocks().find(static_cast<std::byte*>(memory));
  if (found == blocks().end()) return invalid_value;
  for (Queue* q : queues()) run_until(*q, q->enqueued);
  ::munmap(memory, found->second.reserved);
  blocks().erase(found);
  return success;
}

int copy_in(void* to, const void* from, size_t bytes, Stream s) {
  return enqueue(s, [=] { std::memcpy(reach(to, bytes), from, bytes); });
}
int copy_out(void* to, const void* from, size_t bytes, Stream s) {
  return enqueue(s, [=] { std::memcpy(to, reach(from, bytes), bytes); });
}
int copy_within(void* to, const void* from, size_t bytes, Stream s) {
  return enqueue(s, [=] { std::memmove(reach(to, bytes), reach(from, bytes), bytes); });
}
int fill(void* to, int byte, size_t bytes, Stream s) {
  return enqueue(s, [=] { std::memset(reach(to, bytes), byte, bytes); });
}

int synchronise(Stream s) {
  Hold hold(lock);
  if (broken) return illegal_address;
  run_until(queue_of(s), queue_of(s).enqueued);
  return success;
}
int record(Event e, Stream s) {
  Hold hold(lock);
  *static_cast<Mark*>(e) = {&queue_of(s), queue_of(s).enqueued};
  return success;
}
int await(Event e) {
  Hold hold(lock);
  if (const Mark& m = *static_cast<Mark*>(e); m.queue) run_until(*m.queue, m.number);
  return success;
}

int query(Event e) {
  Hold hold(lock);
  if (broken) return illegal_address;
  const Mark& m = *static_cast<Mark*>(e);
  const Waits waits;
  return !m.queue || advance(*m.queue, m.number) ? success : not_ready;
}
int order(Stream s, Event e) {
  const Mark m = *static_cast<Mark*>(e);
  if (!m.queue) return success;
  return enqueue_when(s, [m] { return advance(*m.queue, m.number); });
}
int spin(Stream s, int64_t) {
  return enqueue_when(s, [] { return host_waits > 0; });
}
int take_digest(const void* memory, uint64_t elements, const shardproof_hash& hash, uint64_t first,
                DigestParts parts, shardproof_digest* sum, Stream s) {
  digest::Units u;
  if (!digest::Units::of(hash, nullptr, elements, first, u)) return invalid_value;
  if (parts != DigestParts::all && hash.mode != SHARDPROOF_RAW) return invalid_value;
  return enqueue(s, [=] {
    device_double::do_digest(reach(memory, size_t(elements) * shardproof_size(hash.dtype)),
                             elements, hash, first, parts,
                             reinterpret_cast<shardproof_digest*>(reach(sum, sizeof *sum)));
  });
}
int divide(void* memory, int64_t elements, DType dtype, int ranks, Stream s) {
  return enqueue(s, [=] {
    device_double::do_divide(reach(memory, size_t(elements) * size_of(dtype)), elements, int(dtype),
                             ranks);
  });
}

const char* text(int code) {
  thread_local std::string text;
  text = "code " + std::to_string(code) + " of the double";
  return text.c_str();
}

constexpr DeviceApi api = {
    .count = count,
    .use =
        [](int device) {
          used = device;
          return device < devices_there() ? success : invalid_value;
        },
    .allocate = allocate,
    .release = release,
    .allocate_pinned =
        [](void** memory, size_t bytes) {
          *memory = std::malloc(bytes);
          if (!*memory) return out_of_memory;
          std::memset(*memory, int(fresh), bytes);
          return success;
        },
    .release_pinned =
        [](void* memory) {
          std::free(memory);
          return success;
        },
    .copy_in = copy_in,
    .copy_out = copy_out,
    .copy_within = copy_within,
    .fill = fill,
    .create_stream =
        [](Stream* s) {
          Hold hold(lock);
          auto* q = new Queue;
          queues().insert(q);
          *s = q;
          return success;
        },
    .destroy_stream =
        [](Stream s) {
          Hold hold(lock);
          queues().erase(static_cast<Queue*>(s));
          delete static_cast<Queue*>(s);
          return success;
        },
    .synchronise = synchronise,
    .create_event =
        [](Event* e) {
          *e = new Mark;
          return success;
        },
    .destroy_event =
        [](Event e) {
          delete static_cast<Mark*>(e);
          return success;
        },
    .record = record,
    .await = await,
    .query = query,
    .order = order,
    .divide = divide,
    .text = text,
    .spin = spin,
    .digest = take_digest,
};

constexpr DeviceBench bench = {
    .sum_of_words =
        [](const void* memory, uint64_t words, uint64_t* sum, Stream s) {
          return enqueue(s, [=] {
            const std::byte* x = reach(memory, words * 8);
            uint64_t all = 0, word = 0;
            for (uint64_t i = 0; i < words; ++i) std::memcpy(&word, x + 8 * i, 8), all += word;
            std::memcpy(reach(sum, 8), &all, 8);
          });
        },
    .gemm =
        [](DType dtype, int64_t m, int64_t n, int64_t k, const void* a, bool a_turned,
           const void* b, bool b_turned, void* c, Stream s) {
          return primitives::cuda::contiguous_gemm(primitives::Number(int(dtype)), m, n, k, a,
                                                   a_turned, b, b_turned, c, s);
        },
};

}  // namespace

// ---- For the executor

namespace device_double {
int allocate(void** memory, size_t bytes) { return shardproof::allocate(memory, bytes); }
int synchronise(void* stream) { return shardproof::synchronise(stream); }
const char* text_of(int code) { return text(code); }
int order(void* later, void* earlier) {
  Mark m;
  record(&m, earlier);
  return shardproof::order(later, &m);
}
void discard(void* memory) {
  Hold hold(lock);
  auto found = blocks().find(static_cast<std::byte*>(memory));
  if (found == blocks().end()) return;
  ::munmap(memory, found->second.reserved);
  blocks().erase(found);
}
int fill(void* to, int byte, size_t bytes, void* stream) {
  return shardproof::fill(to, byte, bytes, stream);
}
}  // namespace device_double

// ---- mapping_copy with a mistake, forward and backward the identity

namespace {

void copy_wrongly(const std::string& how, Rank& rank, const View& in, const View& out) {
  const size_t bytes = size_t(in.bytes());
  if (how == "host_access") {
    std::memcpy(out.data, in.data, bytes);
  } else if (how == "null_stream") {
    copy_within(out.data, in.data, bytes, nullptr);
  } else if (how == "sticky_code") {
    broken = true;  // as after a write to a wrong address
  } else {          // past_the_end: into the guard zone
    copy_within(out.data, in.data, bytes, rank.stream());
    fill(out.data + bytes, 0, 8, rank.stream());
  }
}

class Wrong final : public Kernel {
 public:
  explicit Wrong(std::string how) : how_(std::move(how)) {}
  std::unique_ptr<Saved> forward(Rank& rank, std::span<const View> inputs,
                                 std::span<const View> outputs) override {
    copy_wrongly(how_, rank, inputs[0], outputs[0]);
    return std::make_unique<Saved>();
  }
  void backward(Rank& rank, Saved&, std::span<const View> cotangents,
                std::span<const View> gradients) override {
    copy_wrongly(how_, rank, cotangents[0], gradients[0]);
  }

 private:
  std::string how_;
};

std::unique_ptr<Kernel> copy_or_wrong() {
  const char* set = std::getenv("SHARDPROOF_DOUBLE_KERNEL");
  const std::string how = set ? set : "", once = "sticky_once:";
  if (how == "two_streams") return cuda::made<primitives::cuda::event_waits_made>();
  if (how.starts_with(once)) {
    if (::open(how.substr(once.size()).c_str(), O_CREAT | O_EXCL, 0600) >= 0)
      return std::make_unique<Wrong>("sticky_code");
  } else if (set) {
    return std::make_unique<Wrong>(how);
  }
  return cuda::made<mapping_copy>();
}

}  // namespace
}  // namespace shardproof

extern "C" const shardproof::DeviceModule* shardproof_device_module() {
  using namespace shardproof;
  static auto kernels = [] {
    auto list = cuda::device_kernels;
    for (DeviceKernel& k : list)
      if (k.contract == std::string("mapping_copy") && !*k.control) k.make = copy_or_wrong;
    return list;
  }();
  static const DeviceModule module{DeviceModule::current,
                                   "a double of a device",
                                   api,
                                   device_double::nccl(),
                                   bench,
                                   kernels,
                                   [] { return std::string("driver=none\n"); }};
  return &module;
}
