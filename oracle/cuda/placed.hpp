// A buffer of the judge where the line's tensors live. On the host it is the buffer itself. On a
// device it is an allocation that mirrors the buffer's whole storage, guards and gaps included:
// `send` makes the device hold what the host holds, `fetch` brings it back, and whatever is asked
// of a buffer (unwritten elements, guards, changed arguments) is asked of what lay on the device.
#pragma once
#include "oracle/cuda/device_context.hpp"

namespace shardproof {

class Placed {
 public:
  Placed() = default;
  // null: on the host. The device outlives the buffer, and holds nothing of it before send.
  Placed(Buffer, const DeviceContext*);
  ~Placed();
  Placed(Placed&&) noexcept;
  Placed& operator=(Placed&&) noexcept;

  Buffer& host() { return host_; }
  const Buffer& host() const { return host_; }
  View view() const;  // for the subject
  void send() const;  // enqueued on the rank's stream
  // What has to be brought to the host (DeviceContext::bring) before host() is read.
  void fetch(std::vector<DeviceContext::ToHost>&);
  // The digest of a contiguous view as it lies on the device, raw, by its place in the view; in
  // words where its length is one of words. Enqueued, there after the next fetch. Room for it is
  // made before the subject is called: an allocation may wait for streams that are late.
  void reserve_digest();
  void take_digest();  // nothing without room
  const shardproof_digest* digest() const { return taken_ ? &fetched_ : nullptr; }
  // Takes away what was sent, and brings it again: between the two lies whatever else is put on the
  // rank's stream. Other streams that do not wait for it meet 0xEE.
  void withdraw();
  void bring_again() const;

 private:
  std::byte* storage() const { return host_.view().data - Buffer::guard_bytes; }
  Buffer host_;
  const DeviceContext* device_ = nullptr;
  std::byte *mirror_ = nullptr, *withdrawn_ = nullptr;
  shardproof_digest* sum_ = nullptr;  // on the device
  shardproof_digest fetched_{};
  bool taken_ = false;
  size_t bytes_ = 0;
};

}  // namespace shardproof
