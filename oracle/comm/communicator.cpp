// Typed collectives over the door: check, pack what the door cannot take, call, unpack.
//
// The door moves contiguous memory that holds the members' blocks one after another. A view goes
// through as it is when it is laid out like that already: contiguous, and cut along a dim with no
// extent before it. Every other view travels as a packed temporary. Temporaries that receive start
// as poison: what a transport leaves unwritten reaches the caller as unwritten.
//
// A call in flight belongs to the transport: one that reads `in` late, or writes `out` early, is as
// right as one that copies at once. On the host the caller's bytes are therefore those of its start
// when it waits, and results arrive then.
#include "oracle/comm/communicator.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>

namespace shardproof {

// One side of a call: the caller's view and how it is cut into one block a member. dim -1: not cut.
struct Communicator::Side {
  const View& view;
  int dim = -1;
  int blocks = 1;
  std::span<const int64_t> extents = {};  // of the blocks along dim; empty: equal

  int64_t extent(int block) const {
    return extents.empty() ? view.shape[size_t(dim)] / blocks : extents[size_t(block)];
  }
  bool laid_out_for_the_door() const {
    if (!view.contiguous()) return false;
    for (int d = 0; d < dim; ++d)
      if (view.shape[size_t(d)] != 1) return view.elements() == 0;
    return true;
  }
  // Calls f(block of the view, its offset in packed bytes) in member order.
  template <class F>
  void for_each_block(F f) const {
    if (dim < 0) return f(view, int64_t(0));
    int64_t start = 0, offset = 0;
    for (int b = 0; b < blocks; ++b) {
      const View block = view.narrow(dim, start, extent(b));
      f(block, offset);
      start += extent(b);
      offset += block.bytes();
    }
  }
  std::vector<int64_t> packed_shape() const {
    if (dim < 0) return view.shape;
    if (!extents.empty()) return {view.elements()};
    std::vector<int64_t> shape = view.shape;
    shape[size_t(dim)] = extent(0);
    shape.insert(shape.begin(), blocks);
    return shape;
  }
};

namespace {

using Shape = std::vector<int64_t>;
using Bytes = std::vector<std::byte>;

struct Range {
  const std::byte *first, *end;
};
Range range_of(const View& v) {
  int64_t low = 0, high = 0;
  for (size_t d = 0; d < v.shape.size(); ++d) {
    const int64_t reach = (v.shape[d] - 1) * v.strides[d];
    (reach < 0 ? low : high) += reach;
  }
  const int64_t size = int64_t(size_of(v.dtype));
  return {v.data + low * size, v.data + (high + 1) * size};
}
bool overlap(const View& a, const View& b) {
  if (a.elements() == 0 || b.elements() == 0) return false;
  const Range x = range_of(a), y = range_of(b);
  return x.first < y.end && y.first < x.end;
}
bool same_view(const View& a, const View& b) {
  return a.data == b.data && a.shape == b.shape && a.strides == b.strides;
}

// The result is the input, and the host can copy it. On a device the door does, in stream order.
bool alone(const Call& c, const View& in) {
  return c.group->size() == 1 && in.space != Space::device;
}

int modulo(int64_t a, int p) { return int(((a % p) + p) % p); }

// ---- preconditions

std::string where(const Call& c) {
  return std::string(name(c.op)) + " on " + c.group->label + " at " + file_of(c.file) + ":" +
         std::to_string(c.line);
}
[[noreturn]] void refuse(const Call& c, const std::string& expected, const std::string& met,
                         const std::string& advice) {
  throw std::invalid_argument(where(c) + ": expected " + expected + ", met " + met + "; " + advice);
}

void require_alike(const Call& c, const View& in, const View& out) {
  if (in.dtype != out.dtype)
    refuse(c, std::string("out of dtype ") + name(in.dtype) + " as in", name(out.dtype),
           "convert before the call");
  if ((in.space == Space::device) != (out.space == Space::device))
    refuse(c, "in and out both on the device or both on the host", "one of each",
           "copy one of them over");
}
void require_dim(const Call& c, const char* what, const View& v, int dim) {
  if (dim < 0 || dim >= int(v.shape.size()))
    refuse(c,
           std::string(what) + " from 0 to " + std::to_string(int(v.shape.size()) - 1) +
               " for shape " + shape_text(v.shape),
           std::to_string(dim), "count dims from the outermost, 0");
}
void require_shape(const Call& c, const char* what, std::span<const int64_t> met,
                   std::span<const int64_t> expected, const std::string& reason) {
  if (!std::equal(met.begin(), met.end(), expected.begin(), expected.end()))
    refuse(c, std::string(what) + " of shape " + shape_text(expected) + " (" + reason + ")",
           shape_text(met), "allocate what the operation returns");
}
void require_reduction(const Call& c) {
  if (c.reduce == Reduce::none) refuse(c, "a reduction: sum, avg or max", "none", "name one");
  if (c.reduce == Reduce::avg && !is_float(c.dtype))
    refuse(c, "a floating dtype for avg", name(c.dtype),
           "sum, and divide by the group's size with the rounding that you mean");
}
void require_contiguous(const Call& c, const View& in, const View& out) {
  if (!in.contiguous() || !out.contiguous())
    refuse(c, "contiguous views for the asynchronous form",
           std::string(in.contiguous() ? "a strided out" : "a strided in"),
           "use the blocking form or pack first");
}
void require_blocks(const Call& c, const char* what, std::span<const int64_t> extents,
                    int64_t extent) {
  const int p = c.group->size();
  if (extents.empty()) {
    if (extent % p)
      refuse(c, std::string(what) + " extent divisible by " + std::to_string(p) + " members",
             std::to_string(extent), "give the block extents by member");
    return;
  }
  const bool right =
      int(extents.size()) == p &&
      std::all_of(extents.begin(), extents.end(), [](int64_t e) { return e >= 0; }) &&
      std::accumulate(extents.begin(), extents.end(), int64_t(0)) == extent;
  if (!right)
    refuse(c,
           std::string(what) + " extents of " + std::to_string(p) + " members that add up to " +
               std::to_string(extent),
           shape_text(extents), "one non-negative extent a member, in group order");
}
void require_in_shape_of_out(const Call& c, const View& in, const View& out) {
  require_alike(c, in, out);
  require_shape(c, "out", out.shape, in.shape, "as in");
}
void require_gathered(const Call& c, const View& in, const View& out, int dim) {
  require_alike(c, in, out);
  require_dim(c, "dim", in, dim);
  const int p = c.group->size();
  const bool right = [&] {
    if (out.shape.size() != in.shape.size()) return false;
    for (int d = 0; d < int(in.shape.size()); ++d)
      if (out.shape[size_t(d)] != in.shape[size_t(d)] * (d == dim ? p : 1)) return false;
    return true;
  }();
  if (right) return;
  Shape expected = in.shape;
  expected[size_t(dim)] *= p;
  require_shape(c, "out", out.shape, expected,
                std::to_string(p) + " blocks of in along dim " + std::to_string(dim));
}
void require_scattered(const Call& c, const View& in, const View& out, int dim) {
  require_alike(c, in, out);
  require_dim(c, "dim", in, dim);
  require_reduction(c);
  const int p = c.group->size();
  require_blocks(c, "an in", {}, in.shape[size_t(dim)]);
  const bool right = [&] {
    if (out.shape.size() != in.shape.size()) return false;
    for (int d = 0; d < int(in.shape.size()); ++d)
      if (in.shape[size_t(d)] != out.shape[size_t(d)] * (d == dim ? p : 1)) return false;
    return true;
  }();
  if (right) return;
  Shape expected = in.shape;
  expected[size_t(dim)] /= p;
  require_shape(c, "out", out.shape, expected,
                "in cut into " + std::to_string(p) + " along dim " + std::to_string(dim));
}
// My block to myself has one shape, whichever side it is read from.
void require_exchange(const Call& c, const View& in, const View& out, int split_dim, int concat_dim,
                      std::span<const int64_t> split, std::span<const int64_t> concat) {
  require_alike(c, in, out);
  require_dim(c, "split_dim", in, split_dim);
  require_dim(c, "concat_dim", out, concat_dim);
  require_blocks(c, "a split", split, in.shape[size_t(split_dim)]);
  require_blocks(c, "a concat", concat, out.shape[size_t(concat_dim)]);
  const int p = c.group->size();
  const size_t me = size_t(c.group->me), s = size_t(split_dim), k = size_t(concat_dim);
  Shape sent = in.shape, received = out.shape;
  sent[s] = split.empty() ? in.shape[s] / p : split[me];
  received[k] = concat.empty() ? out.shape[k] / p : concat[me];
  require_shape(
      c, "the block of out from myself", received, sent,
      "the block of in to myself; in " + shape_text(in.shape) + ", out " + shape_text(out.shape));
}

}  // namespace

// ---- packing

struct Communicator::Packed {
  Bytes in_bytes, out_bytes;
  View in_view, out_view;
  bool receives_in_place = false;  // in and out are one view: one temporary

  static View reserve(Bytes& bytes, const Side& side) {
    const size_t needed = size_t(side.view.bytes());
    if (bytes.size() < needed) bytes.resize(needed);
    return view_of(bytes.data(), side.view.dtype, side.packed_shape());
  }
  static void require_host(const Call& c, const View& v) {
    if (v.space == Space::device)
      refuse(c, "a contiguous device view, cut along its outermost dim", shape_text(v.shape),
             "pack it on the device first");
  }
  const View& send(const Call& c, const Side& in, const View& out) {
    const bool may_alias = c.op == Op::all_reduce || c.op == Op::broadcast;
    const bool disturbed = overlap(in.view, out) && !(may_alias && same_view(in.view, out));
    if (in.laid_out_for_the_door() && !disturbed) return in.view;
    require_host(c, in.view);
    in_view = reserve(in_bytes, in);
    in.for_each_block(
        [&](const View& block, int64_t offset) { pack(block, in_view.data + offset); });
    receives_in_place = may_alias && same_view(in.view, out);
    return in_view;
  }
  const View& receive(const Call& c, const Side& out, bool in_place = true) {
    if (receives_in_place) return in_view;
    if (out.laid_out_for_the_door() && (in_place || out.view.space == Space::device))
      return out.view;
    require_host(c, out.view);
    out_view = reserve(out_bytes, out);
    fill_with_poison(out_view);
    return out_view;
  }
  static void deliver(const View& received, const Side& out) {
    if (received.data == out.view.data) return;
    out.for_each_block(
        [&](const View& block, int64_t offset) { unpack(received.data + offset, block); });
  }
};

namespace {

// Of the bytes that a view denotes, in its order; 0 for one of a device.
uint64_t bits_of(const View& v) {
  if (v.space == Space::device || v.elements() == 0) return 0;
  Bytes packed;
  const std::byte* data = v.data;
  if (!v.contiguous()) {
    packed.resize(size_t(v.bytes()));
    pack(v, packed.data());
    data = packed.data();
  }
  uint64_t bits = 0;
  const auto mix = [&](uint64_t word) {
    bits = (bits ^ word) * 0x9e3779b97f4a7c15;
    bits ^= bits >> 32;
  };
  const size_t size = size_t(v.bytes());
  for (size_t at = 0; at < size; at += 8) {
    uint64_t word = 0;
    std::memcpy(&word, data + at, std::min<size_t>(8, size - at));
    mix(word);
  }
  return bits;
}

}  // namespace

// A call in flight whose caller has gone on: everything that wait needs, owned.
struct Communicator::Pending {
  Packed packed;
  Call call;
  View in, out;  // the caller's
  uint64_t in_bits = 0, out_bits = 0;
  const View* received = nullptr;  // where the door puts it: a temporary, or `out` on a device
};

Communicator::Communicator(Group group, Door& door, Stream stream)
    : group_(std::move(group)), door_(door), stream_(stream), scratch_(new Packed) {}
Communicator::~Communicator() = default;

Call Communicator::call(Op op, Reduce reduce, const View& in, int root_or_hop,
                        const Site& site) const {
  Call c;
  c.op = op;
  c.reduce = reduce;
  c.dtype = in.dtype;
  c.count = in.elements();
  c.root_or_hop = root_or_hop;
  c.group = &group_;
  c.file = site.file_name();
  c.line = int(site.line());
  return c;
}

void Communicator::run(const Call& c, const Side& in, const Side& out) {
  scratch_->receives_in_place = false;
  const View& sent = scratch_->send(c, in, out.view);
  const View& received = scratch_->receive(c, out);
  door_.wait(door_.start(c, sent, received, stream_), stream_);
  Packed::deliver(received, out);
}

Ticket Communicator::begin(const Call& c, const View& in, const View& out) {
  auto pending = std::make_unique<Pending>();
  pending->call = c;
  pending->in = in;
  pending->out = out;
  pending->in_bits = bits_of(in);
  pending->out_bits = bits_of(out);
  const View& sent = pending->packed.send(c, Side{pending->in}, pending->out);
  pending->received = &pending->packed.receive(c, Side{pending->out}, /*in_place=*/false);
  const Ticket t = door_.start(c, sent, *pending->received, stream_);
  pending_.emplace(t, std::move(pending));
  return t;
}

void Communicator::wait(Ticket t) {
  auto node = pending_.extract(t);
  if (node.empty())
    throw std::invalid_argument("wait on " + group_.label + ": expected a ticket in flight, met " +
                                std::to_string(t) +
                                "; wait once for each start, on the communicator that started it");
  const Pending* pending = node.mapped().get();
  if (!pending) return;  // completed at its start
  const bool in_kept = bits_of(pending->in) == pending->in_bits,
             out_kept = bits_of(pending->out) == pending->out_bits;
  door_.wait(t, stream_);
  if (!in_kept || !out_kept)
    refuse(pending->call,
           std::string(in_kept ? "out" : "in") + " untouched from its start to its wait",
           "other bytes in it", "the transport may still read or write it; wait first");
  Packed::deliver(*pending->received, Side{pending->out});
}

// A ticket of a call that needed no other rank. The top bit keeps it apart from the door's.
Ticket Communicator::completed() {
  const Ticket t = (Ticket(1) << 63) | ++completed_;
  pending_.emplace(t, nullptr);
  return t;
}

// ---- the calls

void Communicator::all_reduce(const View& in, const View& out, Reduce reduce, Site site) {
  const Call c = call(Op::all_reduce, reduce, in, 0, site);
  require_in_shape_of_out(c, in, out);
  require_reduction(c);
  if (alone(c, in)) return copy(in, out);
  run(c, Side{in}, Side{out});
}

void Communicator::all_gather(const View& in, const View& out, int dim, Site site) {
  const Call c = call(Op::all_gather, Reduce::none, in, 0, site);
  require_gathered(c, in, out, dim);
  if (alone(c, in)) return copy(in, out);
  run(c, Side{in}, Side{out, dim, size()});
}

void Communicator::reduce_scatter(const View& in, const View& out, int dim, Reduce reduce,
                                  Site site) {
  const Call c = call(Op::reduce_scatter, reduce, in, 0, site);
  require_scattered(c, in, out, dim);
  if (alone(c, in)) return copy(in, out);
  run(c, Side{in, dim, size()}, Side{out});
}

void Communicator::all_to_all(const View& in, const View& out, int split_dim, int concat_dim,
                              std::span<const int64_t> split, std::span<const int64_t> concat,
                              Site site) {
  Call c = call(Op::all_to_all, Reduce::none, in, 0, site);
  require_exchange(c, in, out, split_dim, concat_dim, split, concat);
  if (alone(c, in)) return copy(in, out);
  const Side from{in, split_dim, size(), split}, to{out, concat_dim, size(), concat};
  const auto elements_by_member = [&](const Side& side) {
    int64_t others = 1;  // product of the extents beside the cut one
    for (int d = 0; d < int(side.view.shape.size()); ++d)
      if (d != side.dim) others *= side.view.shape[size_t(d)];
    Shape elements(size_t(size()), 0);
    for (int i = 0; i < size(); ++i) elements[size_t(i)] = others * side.extent(i);
    return elements;
  };
  c.send = elements_by_member(from);
  c.recv = elements_by_member(to);
  run(c, from, to);
}

Ticket Communicator::shift(const View& in, const View& out, int hop, Site site) {
  const Call c = call(Op::shift, Reduce::none, in, hop, site);
  require_alike(c, in, out);
  if (size() > 1 && modulo(hop, size()) != 0) return begin(c, in, out);
  if (in.elements() != out.elements())  // my own block comes back
    refuse(c,
           "out of " + std::to_string(in.elements()) +
               " elements, as in, since the shift ends "
               "where it began",
           std::to_string(out.elements()), "allocate what the operation returns");
  if (!alone(c, in)) return begin(c, in, out);
  copy(in, out);
  return completed();
}

void Communicator::broadcast(const View& inout, int root, Site site) {
  const Call c = call(Op::broadcast, Reduce::none, inout, root, site);
  if (root < 0 || root >= size())
    refuse(c, "a root from 0 to " + std::to_string(size() - 1), std::to_string(root),
           "name the member by its place in the group, not by its world rank");
  if (size() == 1) return;
  run(c, Side{inout}, Side{inout});
}

void Communicator::barrier(Site site) {
  if (size() == 1) return;
  const View nothing = view_of(nullptr, DType::f64, {0});
  run(call(Op::barrier, Reduce::none, nothing, 0, site), Side{nothing}, Side{nothing});
}

Ticket Communicator::start_all_reduce(const View& in, const View& out, Reduce reduce, Site site) {
  const Call c = call(Op::all_reduce, reduce, in, 0, site);
  require_in_shape_of_out(c, in, out);
  require_reduction(c);
  require_contiguous(c, in, out);
  if (!alone(c, in)) return begin(c, in, out);
  copy(in, out);
  return completed();
}

Ticket Communicator::start_all_gather(const View& in, const View& out, Site site) {
  const Call c = call(Op::all_gather, Reduce::none, in, 0, site);
  require_gathered(c, in, out, 0);
  require_contiguous(c, in, out);
  if (!alone(c, in)) return begin(c, in, out);
  copy(in, out);
  return completed();
}

Ticket Communicator::start_reduce_scatter(const View& in, const View& out, Reduce reduce,
                                          Site site) {
  const Call c = call(Op::reduce_scatter, reduce, in, 0, site);
  require_scattered(c, in, out, 0);
  require_contiguous(c, in, out);
  if (!alone(c, in)) return begin(c, in, out);
  copy(in, out);
  return completed();
}

// ---- parts of the group

int Communicator::runs_of(int inner) const {
  if (inner < 1 || size() % inner)
    throw std::invalid_argument("inner runs of " + group_.label + ": expected a divisor of its " +
                                std::to_string(size()) + " members, met " + std::to_string(inner) +
                                "; every run has the same length");
  return size() / inner;
}

Communicator& Communicator::inner(int inner) {
  if (runs_of(inner) == 1) return *this;
  std::vector<int> members(static_cast<size_t>(inner));
  std::iota(members.begin(), members.end(), group_.me / inner * inner);
  return subgroup(std::move(members), group_.label + "/" + std::to_string(inner));
}

Communicator& Communicator::across(int inner) {
  const int runs = runs_of(inner);
  if (inner == 1) return *this;
  std::vector<int> members;
  for (int run = 0; run < runs; ++run) members.push_back(run * inner + group_.me % inner);
  return subgroup(std::move(members), group_.label + "%" + std::to_string(inner));
}

Communicator& Communicator::subgroup(std::vector<int> places, const std::string& label) {
  const auto mine = std::find(places.begin(), places.end(), group_.me);
  std::vector<int> sorted = places;
  std::sort(sorted.begin(), sorted.end());
  const bool distinct = std::adjacent_find(sorted.begin(), sorted.end()) == sorted.end();
  const bool inside = !sorted.empty() && sorted.front() >= 0 && sorted.back() < size();
  if (mine == places.end() || !distinct || !inside) {
    std::vector<int64_t> met(places.begin(), places.end());
    throw std::invalid_argument(
        "subgroup of " + group_.label + ": expected distinct places from 0 to " +
        std::to_string(size() - 1) + " that hold mine, " + std::to_string(group_.me) + ", met " +
        shape_text(met) + "; every member names the same places");
  }
  auto& part = parts_[{label, places}];
  if (!part) {
    Group g;
    for (int place : places) g.members.push_back(group_.members[size_t(place)]);
    g.me = int(mine - places.begin());
    g.label = label;
    g.id = group_id(g.members);
    part = std::make_unique<Communicator>(std::move(g), door_, stream_);
  }
  return *part;
}

}  // namespace shardproof
