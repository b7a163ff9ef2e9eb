// E: are the subject's streams ordered by events, or only by how fast they happen to be? On a
// device each stream of the rank is made late in turn: the rank's own, those that a subject may
// take (Rank::side_stream), and the transport's where it has one. Its arguments come late as well.
// A wait that is missing shows as a result that differs; a stream that the subject made by itself
// is not held, but what it does not wait for is.
#include <array>

#include "oracle/checks/judging.hpp"
#include "oracle/cuda/device_context.hpp"

namespace shardproof {
namespace {

constexpr std::array<const char*, DeviceContext::streams_by_number> shot_names = {
    "stream:own", "stream:side1", "stream:side2", "stream:transport"};

std::span<const char* const> shots_of(const Evidence& e) {
  const bool of_transport = e.line->text("transport") == "nccl";
  return std::span(shot_names).first(shot_names.size() - !of_transport);
}

void plan(const Evidence& e, std::vector<Shot>& shots) {
  const auto names = shots_of(e);
  for (size_t n = 0; n < names.size(); ++n) {
    Shot held = shots.at(0);
    held.name = names[n];
    held.held_stream = int(n);
    shots.push_back(std::move(held));
  }
}

judging::Told told(const Shot& shot) {
  static constexpr const char* late[] = {
      "with the rank's stream late", "with the side stream 1 late", "with the side stream 2 late",
      "with the transport's stream late"};
  return {late[shot.held_stream],
          "work on two streams that no event orders: a wait is missing, or a buffer is written "
          "again before its reader on the other stream is done"};
}

CheckResult judge(const Evidence& e) { return judging::same_again(e, "stream", shots_of(e), told); }

}  // namespace

Check stream_check() {
  return {.name = "stream",
          .letter = 'E',
          .asks = "on a device: does the result stay the same with each stream late in turn",
          .due = [](const Contract&, const Case& line, const Declared&) { return on_device(line); },
          .plan = plan,
          .judge = judge};
}

}  // namespace shardproof
