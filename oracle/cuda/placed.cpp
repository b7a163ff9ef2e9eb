#include "oracle/cuda/placed.hpp"

#include <utility>

#include "oracle/digest/digest.hpp"

namespace shardproof {

Placed::Placed(Buffer host, const DeviceContext* device) : host_(std::move(host)), device_(device) {
  if (!device_) return;
  bytes_ = host_.snapshot().size();
  mirror_ = device_->take(bytes_);
}
Placed::~Placed() {
  for (std::byte* memory : {mirror_, withdrawn_})
    if (memory) device_->give_back(memory, bytes_);
  if (sum_) device_->give_back(reinterpret_cast<std::byte*>(sum_), sizeof fetched_);
}
Placed::Placed(Placed&& other) noexcept { *this = std::move(other); }
Placed& Placed::operator=(Placed&& other) noexcept {
  std::swap(host_, other.host_);
  std::swap(device_, other.device_);
  std::swap(mirror_, other.mirror_);
  std::swap(withdrawn_, other.withdrawn_);
  std::swap(sum_, other.sum_);
  std::swap(fetched_, other.fetched_);
  std::swap(taken_, other.taken_);
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
void Placed::withdraw() {
  if (!mirror_) return;
  if (!withdrawn_) withdrawn_ = device_->take(bytes_);
  device_->copy_within(withdrawn_, mirror_, bytes_, device_->stream());
  device_->fill(mirror_, 0xEE, bytes_, device_->stream());
}
void Placed::bring_again() const {
  if (withdrawn_) device_->copy_within(mirror_, withdrawn_, bytes_, device_->stream());
}
void Placed::fetch(std::vector<DeviceContext::ToHost>& copies) {
  if (mirror_) copies.push_back({storage(), mirror_, bytes_});
  if (taken_)
    copies.push_back({reinterpret_cast<std::byte*>(&fetched_), reinterpret_cast<std::byte*>(sum_),
                      sizeof fetched_});
}
void Placed::reserve_digest() {
  if (mirror_ && !sum_) sum_ = reinterpret_cast<shardproof_digest*>(device_->take(sizeof fetched_));
}
void Placed::take_digest() {
  const View v = view();
  if (!sum_ || v.elements() == 0 || !v.contiguous()) return;
  taken_ = true;
  device_->fill(reinterpret_cast<std::byte*>(sum_), 0, sizeof fetched_, device_->stream());
  device_->digest(v.data, uint64_t(v.elements()), digest::hash_of_run("", v.dtype, v.elements()),
                  DigestParts::two_lanes, sum_, device_->stream());
}

}  // namespace shardproof
