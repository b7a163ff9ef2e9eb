#include "primitives/mapping_maps.hpp"

#include <cstring>
#include <utility>

namespace shardproof::mapping {
namespace {

class Pair final : public Kernel {
 public:
  Pair(Map forward, Map backward, Precondition precondition)
      : forward_(std::move(forward)),
        backward_(std::move(backward)),
        precondition_(std::move(precondition)) {}

  std::unique_ptr<Saved> forward(Rank& rank, std::span<const View> inputs,
                                 std::span<const View> outputs) override {
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

void scale(const View& view, double factor) {
  for (int64_t i = 0; i < view.elements(); ++i) {
    std::byte* element = view.flat(i);
    store(element, view.dtype, factor * load(element, view.dtype));
  }
}

// x is sharded along `from` and becomes sharded along `to`: what it holds of `to` is cut into the
// receivers' blocks, what arrives are the senders' blocks of `from`.
void exchange_dims(Rank& rank, const View& in, const View& out, int from, int to) {
  const Case& line = rank.line();
  group(rank).all_to_all(in, out, to, from, block_extents(line, to), block_extents(line, from));
}

}  // namespace

std::unique_ptr<Kernel> pair(Map forward, Map backward, Precondition precondition) {
  return std::make_unique<Pair>(std::move(forward), std::move(backward), std::move(precondition));
}

Communicator& group(Rank& rank) { return rank.along(axis_of(rank.line())); }

View place_of_block(Rank& rank, const View& whole, int64_t extent) {
  return whole.narrow(dim_of(rank.line()), group(rank).rank() * extent, extent);
}

void set_zero(const View& view) {  // zero is all bits clear in every dtype
  for (int64_t i = 0; i < view.elements(); ++i) std::memset(view.flat(i), 0, size_of(view.dtype));
}

void identity(Rank&, const View& in, const View& out) { copy(in, out); }

void scaled(Rank& rank, const View& in, const View& out) {
  copy(in, out);
  scale(out, scale_of(rank.line()));
}

void own_block(Rank& rank, const View& in, const View& out) {
  copy(place_of_block(rank, in, out.shape[size_t(dim_of(rank.line()))]), out);
}

void block_in_zeros(Rank& rank, const View& in, const View& out) {
  set_zero(out);
  copy(in, place_of_block(rank, out, in.shape[size_t(dim_of(rank.line()))]));
}

void first_rank_only(Rank& rank, const View& in, const View& out) {
  group(rank).rank() == 0 ? copy(in, out) : set_zero(out);
}

void all_reduce(Rank& rank, const View& in, const View& out) { group(rank).all_reduce(in, out); }

void scaled_all_reduce(Rank& rank, const View& in, const View& out) {
  all_reduce(rank, in, out);
  scale(out, scale_of(rank.line()));
}

void all_gather(Rank& rank, const View& in, const View& out) {
  group(rank).all_gather(in, out, dim_of(rank.line()));
}

void reduce_scatter(Rank& rank, const View& in, const View& out) {
  group(rank).reduce_scatter(in, out, dim_of(rank.line()));
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
