#include "primitives/cuda/twins.hpp"

#include <algorithm>

#include "oracle/too_small.hpp"
#include "primitives/cuda/twin_bodies.hpp"
#include "primitives/mapping.hpp"
#include "primitives/mapping_maps.hpp"
#include "primitives/norm_sequence.hpp"
#include "primitives/work.hpp"

namespace shardproof::primitives::cuda {
namespace {

using mapping::all_reduce;

void order(Stream later, Stream earlier) { check(executor::order(later, earlier), "a wait"); }

// A wait that is missing shows where the streams come in the other order than they usually do. Here
// they usually do by so much that nothing else on the device changes it, and by a fifth of what
// the check `stream` makes one late: it compares with a run in which the twin was right.
void usually_later(Stream stream) {
  constexpr int64_t lead_ns = 100'000;
  check(executor::pause(stream, lead_ns), "a pause");
}

// ---- mapping_copy: forward a copy, backward the healthy all-reduce

void copy_on(Stream stream, const View& from, const View& to) {
  const OnStream elsewhere(stream);
  convert(from, to);
}

template <bool waits_for_input, bool is_waited_for>
void on_side_stream(Rank& rank, const View& in, const View& out) {
  const Stream own = rank.stream(), side = rank.side_stream(1);
  waits_for_input ? order(side, own) : usually_later(side);
  copy_on(side, in, out);
  is_waited_for ? order(own, side) : usually_later(own);
}

void through_a_buffer(Rank& rank, const View& in, const View& out) {
  const Stream own = rank.stream(), side = rank.side_stream(1);
  const View buffer = rank.workspace(in.dtype, in.shape);
  convert(in, buffer);
  order(side, own);
  copy_on(side, buffer, out);
  usually_later(own);
  set_zero(buffer);  // for whoever comes next, with the reader still at it
  order(own, side);
}

template <class Body>
void copied_by(Rank&, const View& in, const View& out) {
  perform(Body{{tensor(in), tensor(out)}}, "a broken copy");
}

// Ranks may share a device, and others need some of it.
void require_memory(size_t bytes) {
  size_t left = 0;
  check(executor::memory_left(&left), "a look at the memory that is left");
  if (left >= bytes + bytes / 4) return;
  const auto mib = [](size_t n) { return std::to_string(n >> 20) + " MiB"; };
  throw MachineTooSmall("expected " + mib(bytes) +
                        " of memory on the device and a quarter more, met " + mib(left) +
                        " left; take a larger device, or fewer ranks and jobs on it");
}

// Rows so far apart that the last begins 4 GiB behind the first. One rank of them makes the
// mistake, so that those who share a device have room for it.
void through_four_gigabytes(Rank& rank, const View& in, const View& out) {
  if (rank.world_rank() > 0) return convert(in, out);
  const int64_t rows = in.shape.at(0), row = in.elements() / std::max<int64_t>(rows, 1),
                apart = (int64_t(1) << 32) / int64_t(size_of(in.dtype)) /
                            std::max<int64_t>(rows - 1, 1) +
                        row;
  require_memory(size_t(apart * (rows - 1) + row) * size_of(in.dtype));
  const Kept memory(in.dtype, {apart * (rows - 1) + row});
  View far = memory.view();
  far.shape = {rows, row}, far.strides = {apart, 1};
  perform(CopyNarrowOffset{{tensor(in), tensor(far)}}, "a broken copy");
  convert(far, out);
}

// ---- norm_sequence: rows by a team without barriers

class HastyNorm final : public NormSequence {
  std::unique_ptr<Saved> forward(Rank& rank, std::span<const View> inputs,
                                 std::span<const View> outputs) override {
    auto saved = NormSequence::forward(rank, inputs, outputs);
    const View& x = inputs[0];
    Parallel p(rank);
    const View statistics = p.workspace(p.accumulate, {x.elements() / x.shape.back(), 2});
    perform(NormWithoutBarrier{{tensor(x), tensor(inputs[1]),
                                inputs.size() > 2 ? tensor(inputs[2]) : Tensor{},
                                tensor(outputs[0]), tensor(statistics), x.shape.back(), norm_eps,
                                rank.line().text("norm") == "layer", p.accumulate == DType::f64}},
            "a broken norm");
    return saved;
  }
};

}  // namespace

std::unique_ptr<Kernel> event_wait_missing() {
  return mapping::pair(on_side_stream<true, false>, all_reduce);
}
std::unique_ptr<Kernel> input_wait_missing() {
  return mapping::pair(on_side_stream<false, true>, all_reduce);
}
std::unique_ptr<Kernel> event_waits_made() {
  return mapping::pair(on_side_stream<true, true>, all_reduce);
}
std::unique_ptr<Kernel> refilled_before_read() {
  return mapping::pair(through_a_buffer, all_reduce);
}
std::unique_ptr<Kernel> tail_unwritten() {
  return mapping::pair(copied_by<CopyWithoutTail>, all_reduce);
}
std::unique_ptr<Kernel> dense_read() { return mapping::pair(copied_by<CopyDense>, all_reduce); }
std::unique_ptr<Kernel> offset_in_32_bits() {
  return mapping::pair(through_four_gigabytes, all_reduce);
}
std::unique_ptr<Kernel> barrier_missing() { return std::make_unique<HastyNorm>(); }

}  // namespace shardproof::primitives::cuda
