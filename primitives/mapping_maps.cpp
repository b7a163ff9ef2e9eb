#include "primitives/mapping_maps.hpp"

#include <utility>

#include "primitives/calls.hpp"
#include "primitives/work.hpp"

namespace shardproof::mapping {

using primitives::convert;
using primitives::set_zero;

namespace {

class Pair final : public Kernel {
 public:
  Pair(Map forward, Map backward, Precondition precondition)
      : forward_(std::move(forward)),
        backward_(std::move(backward)),
        precondition_(std::move(precondition)) {}

  std::unique_ptr<Saved> forward(Rank& rank, std::span<const View> inputs,
                                 std::span<const View> outputs) override {
    stored_as_sent(rank.line());
    if (precondition_) precondition_(rank.line());
    forward_(rank, inputs[0], outputs[0]);
    return std::make_unique<Saved>();
  }
  void backward(Rank& rank, Saved&, std::span<const View> cotangents,
                std::span<const View> gradients) override {
    backward_(rank, cotangents[0], gradients[0]);
  }

 private:
  Map forward_, backward_;
  Precondition precondition_;
};

void scale(Rank& rank, const View& x) { primitives::scale(x, x, scale_of(rank.line())); }

// x is sharded along `from` and becomes sharded along `to`: what it holds of `to` is cut into the
// receivers' blocks, what arrives are the senders' blocks of `from`.
void exchange_dims(Rank& rank, const View& in, const View& out, int from, int to) {
  const Case& line = rank.line();
  primitives::all_to_all(rank, group(rank), in, out, to, from, block_extents(line, to),
                         block_extents(line, from));
}

}  // namespace

std::unique_ptr<Kernel> pair(Map forward, Map backward, Precondition precondition) {
  return std::make_unique<Pair>(std::move(forward), std::move(backward), std::move(precondition));
}

Communicator& group(Rank& rank) { return rank.along(axis_of(rank.line())); }

View place_of_block(Rank& rank, const View& whole, int64_t extent) {
  return whole.narrow(dim_of(rank.line()), group(rank).rank() * extent, extent);
}

void identity(Rank&, const View& in, const View& out) { convert(in, out); }

void scaled(Rank& rank, const View& in, const View& out) {
  convert(in, out);
  scale(rank, out);
}

void own_block(Rank& rank, const View& in, const View& out) {
  convert(place_of_block(rank, in, out.shape[size_t(dim_of(rank.line()))]), out);
}

void block_in_zeros(Rank& rank, const View& in, const View& out) {
  set_zero(out);
  convert(in, place_of_block(rank, out, in.shape[size_t(dim_of(rank.line()))]));
}

void first_rank_only(Rank& rank, const View& in, const View& out) {
  group(rank).rank() == 0 ? convert(in, out) : set_zero(out);
}

void all_reduce(Rank& rank, const View& in, const View& out) {
  primitives::all_reduce(rank, group(rank), in, out);
}

void scaled_all_reduce(Rank& rank, const View& in, const View& out) {
  all_reduce(rank, in, out);
  scale(rank, out);
}

void all_gather(Rank& rank, const View& in, const View& out) {
  primitives::all_gather(rank, group(rank), in, out, dim_of(rank.line()));
}

void reduce_scatter(Rank& rank, const View& in, const View& out) {
  primitives::reduce_scatter(rank, group(rank), in, out, dim_of(rank.line()));
}

void exchange(Rank& rank, const View& in, const View& out) {
  const int dim = dim_of(rank.line());
  exchange_dims(rank, in, out, dim, 1 - dim);
}

void exchange_back(Rank& rank, const View& in, const View& out) {
  const int dim = dim_of(rank.line());
  exchange_dims(rank, in, out, 1 - dim, dim);
}

}  // namespace shardproof::mapping
