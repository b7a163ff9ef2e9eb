#include "oracle/cuda/placed.hpp"

#include <utility>

namespace shardproof {

Placed::Placed(Buffer host, const DeviceContext* device) : host_(std::move(host)), device_(device) {
  if (!device_) return;
  bytes_ = host_.snapshot().size();
  mirror_ = device_->allocate(bytes_);
}
Placed::~Placed() {
  if (mirror_) device_->release(mirror_);
}
Placed::Placed(Placed&& other) noexcept { *this = std::move(other); }
Placed& Placed::operator=(Placed&& other) noexcept {
  std::swap(host_, other.host_);
  std::swap(device_, other.device_);
  std::swap(mirror_, other.mirror_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

View Placed::view() const {
  View v = host_.view();
  if (!mirror_) return v;
  v.data = mirror_ + Buffer::guard_bytes;
  v.space = Space::device;
  return v;
}

void Placed::send() const {
  if (mirror_) device_->copy_in(mirror_, storage(), bytes_, device_->stream());
}
void Placed::fetch() {
  if (mirror_) device_->copy_out(storage(), mirror_, bytes_, device_->stream());
}

}  // namespace shardproof
