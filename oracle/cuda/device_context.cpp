#include "oracle/cuda/device_context.hpp"

#include <fmt/format.h>

#include <sched.h>
#include <unistd.h>

#include <charconv>
#include <cstdlib>
#include <cstring>

namespace shardproof {
namespace {

constexpr int yields_first = 100;
constexpr size_t pinned_bytes = size_t(1) << 20, largest_kept = size_t(4) << 20;

// Launchers say which rank of its machine a process is. Forked ranks are all on one, and what the
// environment says is then of the program that forked them.
int local_rank_of(const RankHost& host) {
  if (host.local_rank >= 0) return host.local_rank;
  for (const char* name :
       {"MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID", "LOCAL_RANK"}) {
    const char* text = std::getenv(name);
    int value = 0;
    if (text && std::from_chars(text, text + std::strlen(text), value).ec == std::errc{} &&
        value >= 0)
      return value;
  }
  return host.rank;
}

}  // namespace

DeviceContext::DeviceContext(const DeviceApi& api, int local_rank)
    : api_(api), local_rank_(local_rank) {
  check(api_.count(&devices_), "counting devices");
  if (devices_ < 1) throw DeviceError(no_device, "expected a device, met none");
  check(api_.use(local_rank % devices_), "choosing a device");
  for (Stream& s : streams_) s = create_stream();
  mark_ = create_event();
}
DeviceContext::~DeviceContext() {
  release_kept();
  if (pinned_) release_pinned(pinned_);
  destroy(mark_);
  for (Stream s : streams_) destroy_stream(s);
}

Stream DeviceContext::numbered(int n) const {
  if (n <= side_streams) return streams_.at(size_t(n));
  return watcher_ ? watcher_->own_stream() : nullptr;
}

void DeviceContext::hold(Stream s) const {
  // A hundred times what a kernel of a small case takes, and nothing beside a collective call.
  constexpr int64_t held_ns = 500'000;
  check(api_.spin(s, held_ns), "delaying a stream");
}

void DeviceContext::check(int code, const char* call) const {
  if (code != 0)
    throw DeviceError(
        code, fmt::format("device, {}: expected success, met {}: {}", call, code, api_.text(code)));
}

void DeviceContext::check_memory(int code, size_t bytes) const {
  if (code == out_of_memory)
    throw Infrastructure(
        fmt::format("device=cuda: expected {} bytes of memory for rank {} of this machine, met a "
                    "device without; "
                    "take smaller extents, fewer ranks or a device of its own for each rank",
                    bytes, local_rank_));
  check(code, "allocating memory");
}

// Polite where somebody watches: a transport on the device may wait for a rank that never comes.
void DeviceContext::synchronise(Stream s) const {
  if (watcher_) {
    record(mark_, s);
    int looks = 0;
    for (; !complete(mark_); ++looks) {
      watcher_->look(looks == 0);
      looks < yields_first ? void(::sched_yield()) : void(::usleep(20));
    }
    if (looks > 0) watcher_->looked();
  }
  check(api_.synchronise(s), "synchronising a stream");
}

void DeviceContext::settle() const {
  if (watcher_) watcher_->drain();
  for (Stream s : streams_) check(api_.synchronise(s), "synchronising a stream");
}

std::byte* DeviceContext::allocate(size_t bytes) const {
  void* memory = nullptr;
  check_memory(api_.allocate(&memory, bytes), bytes);
  return static_cast<std::byte*>(memory);
}
void DeviceContext::release(std::byte* memory) const noexcept { api_.release(memory); }

std::byte* DeviceContext::take(size_t bytes) const {
  const auto found = free_.find(bytes);
  if (found == free_.end()) return allocate(bytes);
  return free_.extract(found).mapped();
}
void DeviceContext::give_back(std::byte* memory, size_t bytes) const noexcept try {
  if (bytes > largest_kept) return release(memory);
  given_back_.emplace(bytes, memory);
} catch (const std::bad_alloc&) {
  release(memory);
}
void DeviceContext::recycle() const {
  for (Stream s : streams_) synchronise(s);
  free_.merge(given_back_);
}
void DeviceContext::release_kept() const noexcept {
  for (Kept* kept : {&free_, &given_back_}) {
    for (const auto& [bytes, memory] : *kept) release(memory);
    kept->clear();
  }
}

std::byte* DeviceContext::allocate_pinned(size_t bytes) const {
  void* memory = nullptr;
  check_memory(api_.allocate_pinned(&memory, bytes), bytes);
  return static_cast<std::byte*>(memory);
}
void DeviceContext::release_pinned(std::byte* memory) const noexcept {
  api_.release_pinned(memory);
}

void DeviceContext::copy_in(std::byte* device, const std::byte* host, size_t bytes,
                            Stream s) const {
  if (bytes > 0) check(api_.copy_in(device, host, bytes, s), "copying to the device");
}
void DeviceContext::copy_out(std::byte* host, const std::byte* device, size_t bytes,
                             Stream s) const {
  if (bytes > 0) check(api_.copy_out(host, device, bytes, s), "copying from the device");
}

void DeviceContext::copy_within(std::byte* to, const std::byte* from, size_t bytes,
                                Stream s) const {
  if (bytes > 0) check(api_.copy_within(to, from, bytes, s), "copying on the device");
}

void DeviceContext::bring(std::span<const ToHost> copies, Stream s) const {
  if (!pinned_) pinned_ = allocate_pinned(pinned_bytes);
  // f(copy, its place in pinned memory, null where that is full)
  const auto each = [&](auto f) {
    size_t used = 0;
    for (const ToHost& c : copies) {
      const bool fits = c.bytes <= pinned_bytes - used;
      f(c, fits ? pinned_ + used : nullptr);
      if (fits) used += c.bytes;
    }
  };
  each([&](const ToHost& c, std::byte* pinned) {
    copy_out(pinned ? pinned : c.to, c.from, c.bytes, s);
  });
  synchronise(s);
  each([](const ToHost& c, const std::byte* pinned) {
    if (pinned && c.bytes > 0) std::memcpy(c.to, pinned, c.bytes);
  });
}

void DeviceContext::fill(std::byte* memory, int byte, size_t bytes, Stream s) const {
  if (bytes > 0) check(api_.fill(memory, byte, bytes, s), "filling memory of the device");
}

void DeviceContext::digest(const std::byte* memory, uint64_t elements, const shardproof_hash& hash,
                           DigestParts parts, shardproof_digest* sum, Stream s) const {
  check(api_.digest(memory, elements, hash, 0, parts, sum, s), "taking a digest on the device");
}

void DeviceContext::divide(std::byte* memory, int64_t elements, DType dtype, int ranks,
                           Stream s) const {
  check(api_.divide(memory, elements, dtype, ranks, s), "dividing on the device");
}

Stream DeviceContext::create_stream() const {
  Stream s = nullptr;
  check(api_.create_stream(&s), "creating a stream");
  return s;
}
void DeviceContext::destroy_stream(Stream s) const noexcept { api_.destroy_stream(s); }

Event DeviceContext::create_event() const {
  Event e = nullptr;
  check(api_.create_event(&e), "creating an event");
  return e;
}
void DeviceContext::destroy(Event e) const noexcept { api_.destroy_event(e); }
void DeviceContext::record(Event e, Stream s) const {
  check(api_.record(e, s), "recording an event");
}
void DeviceContext::await(Event e) const { check(api_.await(e), "waiting for an event"); }
bool DeviceContext::complete(Event e) const {
  const int code = api_.query(e);
  if (code == not_ready) return false;
  check(code, "asking for an event");
  return true;
}
void DeviceContext::order(Stream s, Event e) const {
  check(api_.order(s, e), "ordering a stream behind an event");
}

DeviceContext& device_of_rank(const RankHost& host) try {
  thread_local std::unique_ptr<DeviceContext> own;
  if (!own) own = std::make_unique<DeviceContext>(device_module().api, local_rank_of(host));
  return *own;
} catch (const DeviceError& e) {
  throw Infrastructure(fmt::format("rank {} has no device: {}", host.rank, e.what()));
}

}  // namespace shardproof
