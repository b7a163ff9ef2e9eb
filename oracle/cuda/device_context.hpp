// A rank's device: one stream, memory, and calls that throw. One object a rank; it outlives cases.
#pragma once
#include <cstddef>
#include <memory>

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

  Stream stream() const { return stream_; }
  void synchronise(Stream) const;
  // Of the judge's: Infrastructure where the device has no memory left.
  std::byte* allocate(size_t bytes) const;
  void release(std::byte*) const noexcept;
  std::byte* allocate_pinned(size_t bytes) const;
  void release_pinned(std::byte*) const noexcept;
  void copy_in(std::byte* device, const std::byte* host, size_t bytes, Stream) const;
  void copy_out(std::byte* host, const std::byte* device, size_t bytes, Stream) const;
  void copy_within(std::byte* to, const std::byte* from, size_t bytes, Stream) const;
  Event create_event() const;
  void destroy(Event) const noexcept;
  void record(Event, Stream) const;
  void await(Event) const;

 private:
  void check(int code, const char* call) const;
  void check_memory(int code, size_t bytes) const;
  const DeviceApi& api_;
  Stream stream_ = nullptr;
};

// Of the calling rank; made at the first call. Throws Infrastructure where there is none.
DeviceContext& device_of_rank(int rank);

}  // namespace shardproof
