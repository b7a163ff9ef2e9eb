// A rank's device: its streams, memory, and calls that throw. One object a rank; it outlives cases.
#pragma once
#include <array>
#include <cstddef>
#include <map>
#include <memory>
#include <span>

#include "oracle/comm/world.hpp"
#include "oracle/device.hpp"

namespace shardproof {

// The calls of the table, checked: DeviceError names the call, its code and the runtime's text.
class DeviceContext {
 public:
  // Device number `local_rank` modulo their count: ranks beyond it share devices.
  DeviceContext(const DeviceApi&, int local_rank);
  ~DeviceContext();
  DeviceContext(const DeviceContext&) = delete;
  DeviceContext& operator=(const DeviceContext&) = delete;

  Stream stream() const { return numbered(0); }
  // The rank's streams by number: 0 its own, then side_streams that a subject may take, then that
  // of a transport which works on one of its own, null where none does.
  static constexpr int streams_by_number = side_streams + 2;
  Stream numbered(int) const;
  // What comes next on the stream begins later than anything that is not ordered behind it ends.
  void hold(Stream) const;
  // Does the rank have a device of its own?
  bool shared() const { return local_rank_ >= devices_; }
  int local_rank() const { return local_rank_; }
  int devices() const { return devices_; }

  void synchronise(Stream) const;
  // A case that stopped half-way: what it left on the streams ends here, before its buffers do.
  void settle() const;
  // A transport that works on streams of its own.
  struct Watcher {
    virtual ~Watcher() = default;
    virtual Stream own_stream() const = 0;
    // Again and again while the host waits in synchronise, `first` once in each; may throw. The
    // wait over, `looked`.
    virtual void look(bool first) = 0;
    virtual void looked() noexcept = 0;
    // Ends what is under way, by waiting a little or by giving it up.
    virtual void drain() noexcept = 0;
  };
  void watched_by(Watcher* w) { watcher_ = w; }  // null: nobody
  // Of the judge's: Infrastructure where the device has no memory left.
  std::byte* allocate(size_t bytes) const;
  void release(std::byte*) const noexcept;
  // Memory of buffers that come again in every shot of a case: what was given back is handed out
  // again for as many bytes, so that a call of the runtime, which may wait for streams, is seldom
  // made. `recycle` waits for the rank's streams: what was given back before it is free behind it.
  std::byte* take(size_t bytes) const;
  void give_back(std::byte*, size_t bytes) const noexcept;
  void recycle() const;
  void release_kept() const noexcept;
  std::byte* allocate_pinned(size_t bytes) const;
  void release_pinned(std::byte*) const noexcept;
  void copy_in(std::byte* device, const std::byte* host, size_t bytes, Stream) const;
  void copy_out(std::byte* host, const std::byte* device, size_t bytes, Stream) const;
  void copy_within(std::byte* to, const std::byte* from, size_t bytes, Stream) const;
  // Copies to the host, there when it returns. They go by way of pinned memory as far as that
  // holds them: the runtime waits for each copy to other memory (CUDA runtime API, memcpy), and
  // where processes share a device every wait costs a turn of all of them.
  struct ToHost {
    std::byte* to;
    const std::byte* from;
    size_t bytes;
  };
  void bring(std::span<const ToHost>, Stream) const;
  void fill(std::byte*, int byte, size_t bytes, Stream) const;
  void digest(const std::byte*, uint64_t elements, const shardproof_hash&, DigestParts,
              shardproof_digest* sum, Stream) const;
  void divide(std::byte*, int64_t elements, DType, int ranks, Stream) const;
  Stream create_stream() const;
  void destroy_stream(Stream) const noexcept;
  Event create_event() const;
  void destroy(Event) const noexcept;
  void record(Event, Stream) const;
  void await(Event) const;
  bool complete(Event) const;
  void order(Stream, Event) const;  // what comes next on the stream is done behind the event
  void check(int code, const char* call) const;

 private:
  void check_memory(int code, size_t bytes) const;
  const DeviceApi& api_;
  int local_rank_ = 0, devices_ = 0;
  std::array<Stream, 1 + side_streams> streams_{};
  Event mark_ = nullptr;                 // of synchronise
  mutable std::byte* pinned_ = nullptr;  // of bring, from its first call on
  using Kept = std::multimap<size_t, std::byte*>;
  mutable Kept free_, given_back_;  // by their bytes
  Watcher* watcher_ = nullptr;
};

// Of the calling rank; made at the first call. Throws Infrastructure where there is none.
DeviceContext& device_of_rank(const RankHost&);

}  // namespace shardproof
