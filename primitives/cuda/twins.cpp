#include "primitives/cuda/twins.hpp"

#include <cstdlib>
#include <string>

#include "primitives/cuda/twin_bodies.hpp"
#include "primitives/mapping.hpp"
#include "primitives/mapping_maps.hpp"
#include "primitives/norm_sequence.hpp"
#include "primitives/work.hpp"

namespace shardproof::primitives::cuda {
namespace {

std::string twin() {
  const char* named = std::getenv("SHARDPROOF_DEVICE_TWIN");
  return named ? named : "";
}

// ---- mapping_copy: forward a copy, backward the healthy all-reduce

Stream other_stream() {
  thread_local Stream other = nullptr;
  if (!other) check(executor::create_stream(&other), "a stream");
  return other;
}

void on_other_stream(Rank&, const View& in, const View& out) {
  const OnStream elsewhere(other_stream());
  convert(in, out);
}

void through_a_buffer(Rank& rank, const View& in, const View& out) {
  const View buffer = rank.workspace(in.dtype, in.shape);
  convert(in, buffer);
  check(executor::synchronise(OnStream::current()), "a wait");
  {
    const OnStream reader(other_stream());
    convert(buffer, out);
  }
  set_zero(buffer);
  check(executor::synchronise(OnStream::current()), "a wait");
  check(executor::synchronise(other_stream()), "a wait");
}

template <class Body>
void copied_by(Rank&, const View& in, const View& out) {
  perform(Body{tensor(in), tensor(out)}, "a broken copy");
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

std::unique_ptr<Kernel> mapping_copy_or_twin() {
  using mapping::all_reduce;
  const std::string name = twin();
  if (name == "event_wait_missing") return mapping::pair(on_other_stream, all_reduce);
  if (name == "refilled_before_read") return mapping::pair(through_a_buffer, all_reduce);
  if (name == "tail_unwritten") return mapping::pair(copied_by<CopyWithoutTail>, all_reduce);
  if (name == "dense_read") return mapping::pair(copied_by<CopyDense>, all_reduce);
  if (name == "offset_in_32_bits") return mapping::pair(copied_by<CopyNarrowOffset>, all_reduce);
  return mapping_copy();
}

std::unique_ptr<Kernel> norm_sequence_or_twin() {
  if (twin() == "barrier_missing") return std::make_unique<HastyNorm>();
  return std::make_unique<NormSequence>();
}

}  // namespace shardproof::primitives::cuda
