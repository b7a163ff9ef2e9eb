// Maps on device views. The communicator takes contiguous device memory only, cut along its
// outermost dim; other views are packed into workspace first, the blocks of the members one after
// another, and unpacked behind the call, all on the rank's stream.
#include "primitives/cuda/mapping_cuda.hpp"

#include <numeric>
#include <string>
#include <vector>

#include "primitives/cuda/kernels.hpp"
#include "primitives/mapping_maps.hpp"

namespace shardproof::cuda {
namespace {

using mapping::block_extents;
using mapping::dim_of;
using mapping::group;
using mapping::place_of_block;

Strided strided(const View& v) {
  if (v.shape.size() > size_t(most_dims))
    throw std::invalid_argument("expected at most " + std::to_string(most_dims) + " dims, met " +
                                shape_text(v.shape));
  Strided s;
  s.data = v.data;
  s.element_bytes = int(size_of(v.dtype));
  s.dims = int(v.shape.size());
  std::copy(v.shape.begin(), v.shape.end(), s.shape);
  std::copy(v.strides.begin(), v.strides.end(), s.strides);
  s.elements = v.elements();
  return s;
}

Number number(DType d) {
  switch (d) {
    case DType::f64:
      return Number::f64;
    case DType::f32:
      return Number::f32;
    case DType::bf16:
      return Number::bf16;
    case DType::f16:
      return Number::f16;
    default:
      throw std::invalid_argument(std::string("expected a floating dtype, met ") + name(d));
  }
}

void check(int code, const char* what) {
  if (code != 0)
    throw std::runtime_error(std::string("device, launching ") + what +
                             ": expected success, met code " + std::to_string(code));
}

void copy(Rank& rank, const View& from, const View& to) {
  check(cuda::copy(strided(from), strided(to), rank.stream()), "a copy");
}
void set_zero(Rank& rank, const View& v) {
  check(cuda::set_zero(strided(v), rank.stream()), "zeros");
}
void scale(Rank& rank, const View& v) {
  check(cuda::scale(strided(v), number(v.dtype), mapping::scale_of(rank.line()), rank.stream()),
        "a scale");
}

// Blocks of a view along a dim, by member, and where each lies in a packed row of them.
std::vector<int64_t> equal(const View& v, int dim, int p) {
  return std::vector<int64_t>(size_t(p), v.shape[size_t(dim)] / p);
}
template <class F>
void for_each_block(const View& v, int dim, const std::vector<int64_t>& extents, const View& packed,
                    F f) {
  int64_t start = 0, offset = 0;
  for (int64_t extent : extents) {
    const View block = v.narrow(dim, start, extent);
    f(block, packed.narrow(0, offset, block.elements()));
    start += extent;
    offset += block.elements();
  }
}
View pack(Rank& rank, const View& v, int dim, const std::vector<int64_t>& extents) {
  const View packed = rank.workspace(v.dtype, {v.elements()});
  for_each_block(v, dim, extents, packed,
                 [&](const View& block, const View& at) { copy(rank, block, at); });
  return packed;
}
void unpack(Rank& rank, const View& packed, const View& v, int dim,
            const std::vector<int64_t>& extents) {
  for_each_block(v, dim, extents, packed,
                 [&](const View& block, const View& at) { copy(rank, at, block); });
}
std::vector<int64_t> elements(const View& v, int dim, std::vector<int64_t> extents) {
  for (int64_t& e : extents) e *= v.elements() / v.shape[size_t(dim)];
  return extents;
}

// ---- Maps without communication

void identity(Rank& rank, const View& in, const View& out) { copy(rank, in, out); }
void scaled(Rank& rank, const View& in, const View& out) {
  copy(rank, in, out);
  scale(rank, out);
}
void own_block(Rank& rank, const View& in, const View& out) {
  copy(rank, place_of_block(rank, in, out.shape[size_t(dim_of(rank.line()))]), out);
}
void block_in_zeros(Rank& rank, const View& in, const View& out) {
  set_zero(rank, out);
  copy(rank, in, place_of_block(rank, out, in.shape[size_t(dim_of(rank.line()))]));
}
void first_rank_only(Rank& rank, const View& in, const View& out) {
  group(rank).rank() == 0 ? copy(rank, in, out) : set_zero(rank, out);
}

// ---- One collective each

void all_reduce(Rank& rank, const View& in, const View& out) {
  Communicator& ranks = group(rank);
  if (in.contiguous() && out.contiguous()) return ranks.all_reduce(in, out);
  const View sum = rank.workspace(in.dtype, {in.elements()});
  copy(rank, in, sum);
  ranks.all_reduce(sum, sum);
  copy(rank, sum, out);
}
void scaled_all_reduce(Rank& rank, const View& in, const View& out) {
  all_reduce(rank, in, out);
  scale(rank, out);
}
void all_gather(Rank& rank, const View& in, const View& out) {
  Communicator& ranks = group(rank);
  const int dim = dim_of(rank.line());
  const View own = pack(rank, in, dim, {in.shape[size_t(dim)]});
  const View all = rank.workspace(out.dtype, {out.elements()});
  ranks.all_gather(own, all, 0);
  unpack(rank, all, out, dim, equal(out, dim, ranks.size()));
}
void reduce_scatter(Rank& rank, const View& in, const View& out) {
  Communicator& ranks = group(rank);
  const int dim = dim_of(rank.line());
  const View all = pack(rank, in, dim, equal(in, dim, ranks.size()));
  const View own = rank.workspace(out.dtype, {out.elements()});
  ranks.reduce_scatter(all, own, 0);
  unpack(rank, own, out, dim, {out.shape[size_t(dim)]});
}

// x is sharded along `from` and becomes sharded along `to`: what it holds of `to` is cut into the
// receivers' blocks, what arrives are the senders' blocks of `from`.
void exchange_dims(Rank& rank, const View& in, const View& out, int from, int to) {
  Communicator& ranks = group(rank);
  const auto send = block_extents(rank.line(), to), receive = block_extents(rank.line(), from);
  const View sent = pack(rank, in, to, send);
  const View received = rank.workspace(out.dtype, {out.elements()});
  ranks.all_to_all(sent, received, 0, 0, elements(in, to, send), elements(out, from, receive));
  unpack(rank, received, out, from, receive);
}
void exchange(Rank& rank, const View& in, const View& out) {
  const int dim = dim_of(rank.line());
  exchange_dims(rank, in, out, dim, 1 - dim);
}
void exchange_back(Rank& rank, const View& in, const View& out) {
  const int dim = dim_of(rank.line());
  exchange_dims(rank, in, out, 1 - dim, dim);
}

}  // namespace

// ---- The table of primitives/mapping.hpp

using mapping::pair;

std::unique_ptr<Kernel> mapping_copy() { return pair(identity, all_reduce); }
std::unique_ptr<Kernel> mapping_reduce() { return pair(all_reduce, identity); }
std::unique_ptr<Kernel> mapping_scaled_reduce() { return pair(scaled_all_reduce, scaled); }
std::unique_ptr<Kernel> mapping_all_reduce() { return pair(all_reduce, all_reduce); }
std::unique_ptr<Kernel> mapping_scatter() {
  return pair(own_block, all_gather, mapping::equal_blocks);
}
std::unique_ptr<Kernel> mapping_gather() {
  return pair(all_gather, own_block, mapping::equal_blocks);
}
std::unique_ptr<Kernel> mapping_all_gather() {
  return pair(all_gather, reduce_scatter, mapping::equal_blocks);
}
std::unique_ptr<Kernel> mapping_reduce_scatter() {
  return pair(reduce_scatter, all_gather, mapping::equal_blocks);
}
std::unique_ptr<Kernel> mapping_all_to_all() {
  return pair(exchange, exchange_back, mapping::blocks_of_both_dims);
}
std::unique_ptr<Kernel> mapping_slice() {
  return pair(own_block, block_in_zeros, mapping::equal_blocks);
}
std::unique_ptr<Kernel> mapping_pad() {
  return pair(block_in_zeros, own_block, mapping::equal_blocks);
}
std::unique_ptr<Kernel> mapping_replicate_to_invariant() { return pair(identity, first_rank_only); }
std::unique_ptr<Kernel> mapping_invariant_to_partial() { return pair(first_rank_only, identity); }
std::unique_ptr<Kernel> mapping_replicate_to_partial() {
  return pair(first_rank_only, first_rank_only);
}
std::unique_ptr<Kernel> mapping_reinterpret() { return pair(identity, identity); }

}  // namespace shardproof::cuda
