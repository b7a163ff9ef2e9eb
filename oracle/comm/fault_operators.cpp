// The fault operators, step by step, and the table that puts the steps together.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <numeric>

#include "fixtures/random.hpp"
#include "oracle/comm/fault_steps.hpp"

namespace shardproof {

// ---- the bench

Group Bench::group_of(std::vector<int> members, std::string label) const {
  Group g;
  g.me = int(std::find(members.begin(), members.end(), state.rank) - members.begin());
  g.id = group_id(members);
  g.members = std::move(members);
  g.label = std::move(label);
  return g;
}

const Group* Bench::whole_world() {
  if (!world_) {
    std::vector<int> all(size_t(state.size), 0);
    std::iota(all.begin(), all.end(), 0);
    world_ = std::make_unique<Group>(group_of(std::move(all), "world"));
  }
  return world_.get();
}

const Group* Bench::same_sized_other(const Group& g) {
  auto [known, fresh] = others_.try_emplace(g.members);
  if (fresh && state.mesh) known->second = find_other(g);
  return known->second.get();
}

namespace {
std::vector<int> sorted(std::vector<int> v) { return std::sort(v.begin(), v.end()), v; }
}  // namespace

bool Bench::cuts_the_world(const Group& g) const {
  if (!state.mesh) return true;
  std::vector<Axis> all = state.mesh->order();
  all.insert(all.end(), {Axis::kv, Axis::rep});
  for (unsigned set = 0; set < 1u << all.size(); ++set) {
    std::vector<Axis> axes;
    for (size_t i = 0; i < all.size(); ++i)
      if (set >> i & 1) axes.push_back(all[i]);
    if (sorted(state.mesh->group(axes, state.rank)) == sorted(g.members)) return true;
  }
  return false;
}

std::unique_ptr<Group> Bench::find_other(const Group& g) const {
  const std::vector<Axis>& order = state.mesh->order();
  for (int wanted = 1; wanted <= int(order.size()); ++wanted)
    for (unsigned set = 1; set < 1u << order.size(); ++set) {
      std::vector<Axis> axes;
      std::string label;
      for (size_t i = 0; i < order.size(); ++i)
        if (set >> i & 1) {
          axes.push_back(order[i]);
          label += (label.empty() ? "" : ",") + std::string(name(order[i]));
        }
      if (int(axes.size()) != wanted) continue;
      std::vector<int> members = state.mesh->group(axes, state.rank);
      if (int(members.size()) != g.size() || sorted(members) == sorted(g.members)) continue;
      return std::make_unique<Group>(group_of(std::move(members), std::move(label)));
    }
  return nullptr;
}

void Bench::call(const Call& c, const View& in, const View& out, Stream s) {
  next.wait(next.start(c, in, out, s), s);
}

namespace {

using Bytes = std::vector<std::byte>;

int modulo(int64_t a, int p) { return int(((a % p) + p) % p); }

// ---- contiguous views as bytes and numbers

Bytes bytes_of(const View& v) {
  Bytes b(size_t(v.bytes()));
  if (!b.empty()) std::memcpy(b.data(), v.data, b.size());
  return b;
}
void overwrite(const View& v, const Bytes& b) {
  const size_t n = std::min(b.size(), size_t(v.bytes()));
  if (n > 0) std::memcpy(v.data, b.data(), n);
}
bool holds(const View& v, const Bytes& b) {
  return b.size() == size_t(v.bytes()) &&
         (b.empty() || std::memcmp(v.data, b.data(), b.size()) == 0);
}
std::byte* element(const View& v, int64_t i) { return v.data + i * int64_t(size_of(v.dtype)); }
double value(const View& v, int64_t i) { return load(element(v, i), v.dtype); }

struct Range {
  int64_t first = 0, count = 0;
};
// The element that an edit hits: non-zero, finite and as large as any, so that its loss shows.
template <class Eligible>
int64_t largest(const View& v, Eligible eligible) {
  int64_t at = -1;
  double most = 0;
  for (int64_t i = 0, n = v.elements(); i < n; ++i) {
    const double x = value(v, i), size = std::fabs(x);
    if (size > most && std::isfinite(x) && eligible(x)) {
      most = size;
      at = i;
    }
  }
  return at;
}
int64_t largest(const View& v) {
  return largest(v, [](double) { return true; });
}

// ---- fetching from others: called by every member

void keep_own(Bench&, Flight& f) { f.own = bytes_of(f.in); }

Call extra(const Flight& f, Op op, const View& in, int hop = 0) {
  Call c = f.call;
  c.op = op;
  c.reduce = Reduce::none;
  c.dtype = in.dtype;
  c.count = in.elements();
  c.root_or_hop = hop;
  c.send.clear();
  c.recv.clear();
  return c;
}

std::vector<int64_t> counts_of_members(Bench& b, const Flight& f, int64_t mine) {
  std::vector<int64_t> counts(size_t(f.p()), 0);
  const View in = view_of(reinterpret_cast<std::byte*>(&mine), DType::i64, {1});
  const View out = view_of(reinterpret_cast<std::byte*>(counts.data()), DType::i64, {f.p()});
  b.call(extra(f, Op::all_gather, in), in, out, f.stream);
  return counts;
}

// `data` of member me - hop; sizes may differ.
void fetch_shifted(Bench& b, Flight& f, const View& data, int hop) {
  const auto counts = counts_of_members(b, f, data.elements());
  const int64_t count = counts[size_t(modulo(f.me() - hop, f.p()))];
  f.foreign.resize(size_t(count) * size_of(data.dtype));
  const View out = view_of(f.foreign.data(), data.dtype, {count});
  b.call(extra(f, Op::shift, data, hop), data, out, f.stream);
  f.fetched = true;
}

void fetch_all(Bench& b, Flight& f, const View& data) {
  f.foreign.resize(size_t(data.bytes()) * size_t(f.p()));
  const View out = view_of(f.foreign.data(), data.dtype, {f.p(), data.elements()});
  b.call(extra(f, Op::all_gather, data), data, out, f.stream);
  f.fetched = true;
}
void fetch_inputs(Bench& b, Flight& f) { fetch_all(b, f, f.in); }

void fetch_result_of_next(Bench& b, Flight& f) { fetch_shifted(b, f, f.out, -1); }

// The block that travels the other way round the ring.
void fetch_from_wrong_peer(Bench& b, Flight& f) {
  if (modulo(2 * int64_t(f.call.root_or_hop), f.p()) != 0)
    fetch_shifted(b, f, f.in, -f.call.root_or_hop);
}

// Blocks of unequal size fit the members that they were cut for, and no others.
bool fits_any_group(const Call& c) {
  const auto equal = [](const std::vector<int64_t>& v) {
    return std::all_of(v.begin(), v.end(), [&](int64_t e) { return e == v.front(); });
  };
  return equal(c.send) && equal(c.recv);
}
const Group* wrong_group(Bench& b, const Flight& f) {
  return fits_any_group(f.call) ? b.same_sized_other(*f.call.group) : nullptr;
}
const Group* world_group(Bench& b, const Flight& f) {
  return f.p() < b.state.size && b.cuts_the_world(*f.call.group) ? b.whole_world() : nullptr;
}

// Whether all members of another group hold as much as this rank does: a call whose counts differ
// from stage to stage, or that a stage has nothing to send in, fits its own group alone. Every
// member comes to the same answer.
bool fits(Bench& b, const Flight& f, const Group& g) {
  std::array<int64_t, 2> mine{f.in.elements(), f.out.elements()};
  std::vector<int64_t> all(size_t(2 * g.size()), 0);
  const View in = view_of(reinterpret_cast<std::byte*>(mine.data()), DType::i64, {2});
  const View out = view_of(reinterpret_cast<std::byte*>(all.data()), DType::i64, {2 * g.size()});
  Call c = extra(f, Op::all_gather, in);
  c.group = &g;
  b.call(c, in, out, f.stream);
  for (size_t i = 0; i < all.size(); ++i)
    if (all[i] != mine[i % 2]) return false;
  return f.call.op != Op::shift || mine[0] == mine[1];
}

void fetch_over(Bench& b, Flight& f, const Group* g) {
  if (!g || !fits(b, f, *g)) return;
  Call c = f.call;
  c.group = g;
  f.foreign.resize(size_t(f.out.bytes()));
  b.call(c, f.in, view_of(f.foreign.data(), f.out.dtype, f.out.shape), f.stream);
  f.fetched = true;
}
void fetch_over_wrong_group(Bench& b, Flight& f) { fetch_over(b, f, wrong_group(b, f)); }
void fetch_over_world(Bench& b, Flight& f) { fetch_over(b, f, world_group(b, f)); }

void fetch_rotated(Bench& b, Flight& f) {
  if (f.call.op == Op::reduce_scatter) return fetch_shifted(b, f, f.out, 1);
  if (f.call.op != Op::all_to_all) return;
  const auto counts = counts_of_members(b, f, f.out.elements());
  const bool alike =
      std::adjacent_find(counts.begin(), counts.end(), std::not_equal_to<>()) == counts.end();
  if (alike) fetch_shifted(b, f, f.out, 1);
}
void fetch_reversed(Bench& b, Flight& f) {
  if (f.call.op == Op::reduce_scatter) fetch_all(b, f, f.out);
}

// ---- making another call: on the faulty rank

void no_call(Bench& b, Flight& f) {
  f.issued = false;
  b.active = true;
}
void call_over(Bench& b, Flight& f, const Group* g) {
  if (!g) return;
  f.made.group = g;
  b.active = true;
}
void call_over_wrong_group(Bench& b, Flight& f) { call_over(b, f, wrong_group(b, f)); }
void call_over_world(Bench& b, Flight& f) { call_over(b, f, world_group(b, f)); }

void reduce_with(Bench& b, Flight& f, Reduce r) {
  if (!is_float(f.call.dtype)) return;
  f.made.reduce = r;
  b.active = true;
}
void mean_for_sum(Bench& b, Flight& f) { reduce_with(b, f, Reduce::avg); }
void sum_for_mean(Bench& b, Flight& f) { reduce_with(b, f, Reduce::sum); }

void reverse_hop(Bench& b, Flight& f) {
  if (modulo(2 * int64_t(f.call.root_or_hop), f.p()) == 0) return;  // the same peer either way
  f.made.root_or_hop = -f.call.root_or_hop;
  b.active = true;
}

// Distance round the ring by the shorter way; one less of it. From a neighbour that is no call.
void shorten_hop(Bench& b, Flight& f) {
  int distance = modulo(f.call.root_or_hop, f.p());
  if (2 * distance > f.p()) distance -= f.p();
  if (distance == 0) return;
  if (std::abs(distance) == 1) return no_call(b, f);
  f.made.root_or_hop = distance > 0 ? distance - 1 : distance + 1;
  b.active = true;
}

// A copy of `from` in another dtype, in storage of the flight.
View converted(const View& from, DType dtype, Bytes& storage) {
  storage.resize(size_t(from.elements()) * size_of(dtype));
  const View to = view_of(storage.data(), dtype, from.shape);
  for (int64_t i = 0, n = from.elements(); i < n; ++i) store(element(to, i), dtype, value(from, i));
  return to;
}

void call_in_bf16(Bench& b, Flight& f) {
  if (!is_float(f.call.dtype) || f.call.dtype == DType::bf16) return;
  f.made.dtype = DType::bf16;
  f.sent = converted(f.in, DType::bf16, f.sent_bytes);
  f.received = f.in.data == f.out.data ? f.sent : converted(f.out, DType::bf16, f.received_bytes);
  b.active = true;
}
void widen_result(Bench&, Flight& f) {
  if (f.received.dtype == f.out.dtype) return;
  for (int64_t i = 0, n = f.out.elements(); i < n; ++i)
    store(element(f.out, i), f.out.dtype, value(f.received, i));
}

void round_payload_to_bf16(Bench& b, Flight& f) {
  if (!is_float(f.call.dtype) || f.call.dtype == DType::bf16) return;
  const View rounded = view_of((f.sent_bytes = f.own).data(), f.in.dtype, f.in.shape);
  for (int64_t i = 0, n = rounded.elements(); i < n; ++i) {
    const double x = value(rounded, i);
    if (!std::isnan(x)) store(element(rounded, i), rounded.dtype, round_to(x, DType::bf16));
  }
  if (f.sent_bytes == f.own) return;
  b.active = true;
  f.sent = rounded;
}

// The result lands where nobody looks: the caller reads what its buffer held before.
void receive_aside(Bench&, Flight& f) {
  f.received_bytes = bytes_of(f.out);
  f.received = view_of(f.received_bytes.data(), f.out.dtype, f.out.shape);
}
void leave_aside(Bench& b, Flight& f) { b.active = b.active || !holds(f.out, f.received_bytes); }

// ---- editing results: on the faulty rank

// What a member holds of the result before anyone else has spoken; the rest is unwritten.
void own_contribution(Bench&, Flight& f) {
  const size_t me = size_t(f.me()), size = size_of(f.out.dtype);
  const auto part = [&](int64_t first, int64_t count) {
    const auto from = f.own.begin() + first * int64_t(size);
    return Bytes(from, from + count * int64_t(size));
  };
  const auto sum_before = [&](const std::vector<int64_t>& v) {
    return std::accumulate(v.begin(), v.begin() + int64_t(me), int64_t(0));
  };
  const auto place = [&](int64_t first, const Bytes& bytes) {
    if (!bytes.empty()) std::memcpy(element(f.out, first), bytes.data(), bytes.size());
  };
  const int64_t n = f.in.elements(), m = f.out.elements();
  switch (f.call.op) {
    case Op::all_reduce:
    case Op::broadcast:
      return overwrite(f.out, f.own);
    case Op::shift:
      fill_with_poison(f.out);
      return overwrite(f.out, f.own);
    case Op::reduce_scatter:
      return place(0, part(int64_t(me) * m, m));
    case Op::all_gather:
      fill_with_poison(f.out);
      return place(int64_t(me) * n, f.own);
    case Op::all_to_all:
      fill_with_poison(f.out);
      return place(sum_before(f.call.recv),
                   part(sum_before(f.call.send), std::min(f.call.send[me], f.call.recv[me])));
    case Op::barrier:
      return;
  }
}
void own_if_short(Bench& b, Flight& f) {
  if (!f.issued) own_contribution(b, f);
}

// A reduction of what is reduced already. A reduce-scatter's result goes back to its place in the
// input, as it does where the buffer is reduced in place, and the whole is reduced again.
void reduce_again(Bench& b, Flight& f) {
  b.active = true;
  if (f.call.op == Op::all_reduce) return b.call(f.call, f.out, f.out, f.stream);
  const View again = view_of(f.own.data(), f.in.dtype, {f.in.elements()});
  const int64_t n = f.out.elements();
  if (n > 0) std::memcpy(element(again, f.me() * n), f.out.data, size_t(f.out.bytes()));
  b.call(f.call, again, f.out, f.stream);
}

void take_fetched(Bench&, Flight& f) {
  if (f.fetched) overwrite(f.out, f.foreign);
}

void scale(const View& v, double factor) {
  if (!is_float(v.dtype)) return;
  for (int64_t i = 0, n = v.elements(); i < n; ++i) {
    const double x = value(v, i);
    if (!std::isnan(x)) store(element(v, i), v.dtype, x * factor);
  }
}
void scale_inverse_p(Bench&, Flight& f) { scale(f.out, 1.0 / f.p()); }
void scale_p(Bench&, Flight& f) { scale(f.out, f.p()); }
void scale_eps(Bench&, Flight& f) {
  scale(f.out, 1 + (size_of(f.out.dtype) == 2 ? 1.0 / 128 : 1.0 / 1024));
}
void swap_mean(Bench&, Flight& f) {
  scale(f.out, f.call.reduce == Reduce::avg ? f.p() : 1.0 / f.p());
}

// Elements of member i's block in the result.
Range block_from(const Flight& f, int i) {
  if (f.call.op == Op::all_to_all) {
    const auto& recv = f.call.recv;
    return {std::accumulate(recv.begin(), recv.begin() + i, int64_t(0)), recv[size_t(i)]};
  }
  const int64_t n = f.out.elements(), p = f.p();
  return {n * i / p, n * (i + 1) / p - n * i / p};
}
// The blocks of a concatenation in another order of members.
void reorder(const Flight& f, int (*member_at)(int place, int p)) {
  const Bytes whole = bytes_of(f.out);
  const size_t size = size_of(f.out.dtype);
  std::byte* to = f.out.data;
  for (int place = 0; place < f.p(); ++place) {
    const Range r = block_from(f, member_at(place, f.p()));
    if (r.count > 0) std::memcpy(to, whole.data() + size_t(r.first) * size, size_t(r.count) * size);
    to += size_t(r.count) * size;
  }
}
void rotate_blocks(Bench& b, Flight& f) {
  if (f.fetched) return take_fetched(b, f);
  if (f.call.op == Op::reduce_scatter) return;
  reorder(f, [](int place, int p) { return (place + p - 1) % p; });
}
void reverse_blocks(Bench&, Flight& f) {
  if (f.call.op != Op::reduce_scatter)
    return reorder(f, [](int place, int p) { return p - 1 - place; });
  const size_t n = size_t(f.out.bytes());
  if (n > 0) std::memcpy(f.out.data, f.foreign.data() + size_t(f.p() - 1 - f.me()) * n, n);
}

// A shift hands out the block that the shift before it brought, which is how a ring reads a buffer
// that the next step has not refilled; any other call what its site returned on other data, of
// an exchange whose sizes follow from the data as much as fits.
void deliver_stale(Bench& b, Flight& f) {
  Bytes fresh = bytes_of(f.out);
  if (b.priming) {
    b.primed.emplace(f.number, std::move(fresh));
    return;
  }
  const Bytes* old = nullptr;
  if (const auto p = b.primed.find(f.number); p != b.primed.end()) old = &p->second;
  Bytes* last = nullptr;
  if (f.call.op == Op::shift) {
    last = &b.shifted[{site_text(f.call.file, f.call.line), f.call.root_or_hop}];
    if (last->size() == fresh.size()) old = last;
  }
  const bool fits = old && (old->size() == fresh.size() || f.call.op == Op::all_to_all);
  if (f.faulted && f.acts && fits) overwrite(f.out, *old);
  if (last) *last = std::move(fresh);
}

void zero(const View& v, Range r) {
  for (int64_t i = r.first; i < r.first + r.count; ++i) store(element(v, i), v.dtype, 0.0);
}
Range row_around(const View& v, int64_t at) {
  if (v.shape.size() < 2) return {0, v.elements()};
  const int64_t row = v.shape.back();
  return {at / row * row, row};
}
Range block_around(const Flight& f, int64_t at) {
  for (int i = 0; i < f.p(); ++i)
    if (const Range r = block_from(f, i); at >= r.first && at < r.first + r.count) return r;
  return {};
}
void lose_element(Bench&, Flight& f) {
  if (const int64_t at = largest(f.out); at >= 0) zero(f.out, {at, 1});
}
void lose_block(Bench&, Flight& f) {
  if (const int64_t at = largest(f.out); at >= 0) zero(f.out, block_around(f, at));
}
void lose_row(Bench&, Flight& f) {
  if (const int64_t at = largest(f.out); at >= 0) zero(f.out, row_around(f.out, at));
}

// The part of a range that the fetched result of another rank holds as well.
Range shared_with_fetched(const Flight& f, Range r) {
  const int64_t theirs = int64_t(f.foreign.size() / size_of(f.out.dtype));
  return {r.first, std::clamp(theirs - r.first, int64_t(0), r.count)};
}
bool differs_from_fetched(const Flight& f, Range r) {
  const size_t size = size_of(f.out.dtype);
  return r.count > 0 &&
         std::memcmp(element(f.out, r.first), f.foreign.data() + size_t(r.first) * size,
                     size_t(r.count) * size) != 0;
}
void take_range(const Flight& f, Range r) {
  const size_t size = size_of(f.out.dtype);
  std::memcpy(element(f.out, r.first), f.foreign.data() + size_t(r.first) * size,
              size_t(r.count) * size);
}
void element_from_other(Bench&, Flight& f) {
  int64_t best = -1;
  for (int64_t i = 0, n = f.out.elements(); i < n; ++i) {
    const Range one = shared_with_fetched(f, {i, 1});
    if (!differs_from_fetched(f, one) || value(f.out, i) == 0) continue;
    if (best < 0 || std::fabs(value(f.out, i)) > std::fabs(value(f.out, best))) best = i;
  }
  if (best >= 0) take_range(f, {best, 1});
}
// False: nothing of the range is another one there.
bool took_from_other(const Flight& f, Range r) {
  r = shared_with_fetched(f, r);
  if (!differs_from_fetched(f, r)) return false;
  take_range(f, r);
  return true;
}
void block_from_other(Bench&, Flight& f) {
  for (int i = 0; i < f.p(); ++i)
    if (took_from_other(f, block_from(f, i))) return;
}
void row_from_other(Bench&, Flight& f) {
  const int64_t row = f.out.shape.empty() ? 1 : f.out.shape.back();
  for (int64_t at = 0, n = f.out.elements(); at < n; at += row)
    if (took_from_other(f, {at, row})) return;
}

void flip(const View& v, int64_t i, int bit) {
  uint64_t bits = 0;
  std::memcpy(&bits, element(v, i), size_of(v.dtype));
  bits ^= uint64_t(1) << bit;
  std::memcpy(element(v, i), &bits, size_of(v.dtype));
}
// The bit of weight 1 of an integral value, wherever the format keeps it: 3 <-> 2, 1 -> 0.
void flip_weight_one(Bench&, Flight& f) {
  const double exact_below = std::ldexp(1.0, significand_bits(f.out.dtype));
  const int64_t at =
      largest(f.out, [&](double x) { return x == std::trunc(x) && std::fabs(x) < exact_below; });
  if (!is_float(f.out.dtype) || at < 0) return;
  const double x = value(f.out, at);
  const double flipped = double(int64_t(std::fabs(x)) ^ 1);
  store(element(f.out, at), f.out.dtype, std::copysign(flipped, x));
}
void flip_sign(Bench&, Flight& f) {
  const int64_t at = largest(f.out);
  if (is_float(f.out.dtype) && at >= 0) flip(f.out, at, int(8 * size_of(f.out.dtype)) - 1);
}
// The fraction field has one bit less than the significand: above it is the exponent's lowest.
void flip_exponent(Bench&, Flight& f) {
  const int64_t at = largest(f.out);
  if (is_float(f.out.dtype) && at >= 0) flip(f.out, at, significand_bits(f.out.dtype) - 1);
}

// The caller's input becomes the work buffer of the call. What of a gathered result lands there is
// the next member's block: one's own would change nothing.
void overwrite_input(Bench& b, Flight& f) {
  if (f.in.data == f.out.data) return;
  const Range part = f.call.op == Op::all_gather ? block_from(f, (f.me() + 1) % f.p())
                                                 : Range{0, f.out.elements()};
  const int64_t at = f.call.op == Op::reduce_scatter ? f.me() * f.out.elements() : 0;
  const int64_t count = std::min(part.count, f.in.elements() - at);
  if (count > 0)
    std::memcpy(element(f.in, at), element(f.out, part.first), size_t(count) * size_of(f.in.dtype));
  b.active = b.active || !holds(f.in, f.own);
}

// The sum of all members' inputs in a given order, in the accumulation type of a transport: f32
// for the half types, rounded once.
template <class Acc>
void sum_in_order(Flight& f, const std::vector<int>& order) {
  const int64_t stride = f.in.elements();
  const int64_t first = f.call.op == Op::reduce_scatter ? f.me() * f.out.elements() : 0;
  const View all = view_of(f.foreign.data(), f.in.dtype, {f.p() * stride});
  for (int64_t i = 0, n = f.out.elements(); i < n; ++i) {
    Acc sum = Acc(value(all, order[0] * stride + first + i));
    for (size_t k = 1; k < order.size(); ++k) sum += Acc(value(all, order[k] * stride + first + i));
    if (f.call.reduce == Reduce::avg) sum /= Acc(f.p());
    store(element(f.out, i), f.out.dtype, double(sum));
  }
}
void sum_in_order_of(Flight& f, const std::vector<int>& order) {
  if (!is_float(f.out.dtype)) return;
  if (f.out.dtype == DType::f64) return sum_in_order<double>(f, order);
  sum_in_order<float>(f, order);
}
void sum_from_own_on(Bench&, Flight& f) {
  std::vector<int> order(size_t(f.p()), 0);
  for (int k = 0; k < f.p(); ++k) order[size_t(k)] = (f.me() + k) % f.p();
  sum_in_order_of(f, order);
}
// Equal on all ranks within a call. The first shot sums in the order of members; a later one in the
// first of p orders that rounds otherwise, each with another last to arrive, whose place alone
// decides at p = 3, and the others shuffled.
void sum_as_arrived(Bench& b, Flight& f) {
  const int p = f.p();
  std::vector<int> order(static_cast<size_t>(p));
  std::iota(order.begin(), order.end(), 0);
  sum_in_order_of(f, order);
  if (b.shots <= 1) return;
  const Bytes first = bytes_of(f.out);
  for (int turn = 0; turn < p && holds(f.out, first); ++turn) {
    const int last = modulo(b.shots + f.number + turn, p);
    order.clear();
    for (int k = 0; k < p; ++k)
      if (k != last) order.push_back(k);
    for (int k = p - 2; k > 0; --k) {
      const auto bits =
          philox({uint32_t(b.shots), uint32_t(f.number), uint32_t(k), 0}, {0x0a771a1, 0});
      std::swap(order[size_t(k)], order[bits[0] % uint32_t(k + 1)]);
    }
    order.push_back(last);
    sum_in_order_of(f, order);
  }
}

// ---- the table

using Row = FaultRow;

Row call_fault(const char* name, const char* kind, std::vector<Op> ops, const char* does, Steps s) {
  Row r{{}, s};
  r.op.name = name;
  r.op.kind = kind;
  r.op.call = true;
  r.op.does = does;
  r.op.ops = std::move(ops);
  return r;
}
Row payload_fault(const char* name, const char* kind, std::vector<Op> ops, const char* does,
                  Steps s) {
  Row r = call_fault(name, kind, std::move(ops), does, s);
  r.op.call = false;
  return r;
}
Row on_one_rank(Row r) { return r.op.one_rank = true, r; }
Row from_p(int p, Row r) { return r.op.smallest_p = p, r; }
Row with_rounding(Row r) { return r.op.needs_rounding = true, r; }
Row where_reducing(std::vector<Reduce> reduces, Row r) {
  r.op.any_reduce = false;
  r.op.reduces = std::move(reduces);
  return r;
}

std::vector<Row> all_rows() {
  const std::vector<Op> reductions = {Op::all_reduce, Op::reduce_scatter};
  const std::vector<Op> placed = {Op::all_gather, Op::reduce_scatter, Op::all_to_all};
  const std::vector<Op> between_peers = {Op::reduce_scatter, Op::all_to_all, Op::shift};
  const std::vector<Op> moves = {Op::all_gather, Op::all_to_all, Op::shift, Op::broadcast};
  const std::vector<Op> separate = {Op::all_reduce, Op::reduce_scatter, Op::all_gather,
                                    Op::all_to_all, Op::shift};
  const std::vector<Op> but_shift = {Op::all_reduce, Op::reduce_scatter, Op::all_gather,
                                     Op::all_to_all, Op::broadcast};
  const std::vector<Op> any = {Op::all_reduce, Op::reduce_scatter, Op::all_gather,
                               Op::all_to_all, Op::shift,          Op::broadcast};
  const auto sums = std::vector{Reduce::sum, Reduce::avg};
  return {
      call_fault("skip", "skip", but_shift,
                 "no call; the own contribution is the result, what others owe is unwritten",
                 {.before = keep_own, .issue = no_call, .edit = own_contribution}),
      call_fault("twice", "twice", reductions, "the result is reduced once more",
                 {.before = keep_own, .edit = reduce_again}),
      where_reducing({Reduce::sum}, call_fault("mean_for_sum", "mean", reductions,
                                               "avg in place of sum", {.issue = mean_for_sum})),
      where_reducing({Reduce::avg}, call_fault("sum_for_mean", "mean", reductions,
                                               "sum in place of avg", {.issue = sum_for_mean})),
      call_fault("wrong_group", "wrong_group", any,
                 "the call goes to another group of the mesh of the same size",
                 {.issue = call_over_wrong_group}),
      call_fault("world_group", "wrong_group", {Op::all_reduce},
                 "the call goes to the world in place of the axis", {.issue = call_over_world}),
      from_p(3, call_fault("wrong_peer", "wrong_peer", {Op::shift}, "the ring turns the other way",
                           {.issue = reverse_hop})),
      call_fault("hop_short", "wrong_peer", {Op::shift},
                 "one hop short: from a neighbour the own block stays and no call is made",
                 {.before = keep_own, .issue = shorten_hop, .edit = own_if_short}),
      with_rounding(call_fault("bf16_wire_call", "bf16_wire", any,
                               "the call is made in bf16 and its result widened",
                               {.issue = call_in_bf16, .edit = widen_result})),

      payload_fault("skip_payload", "skip", any,
                    "the own contribution is the result, what others owe is unwritten",
                    {.before = keep_own, .edit = own_contribution}),
      where_reducing(sums, payload_fault("mean_payload", "mean", reductions,
                                         "a sum divided by p; an average multiplied by p",
                                         {.edit = swap_mean})),
      payload_fault("wrong_group_payload", "wrong_group", separate,
                    "the result of another group of the mesh of the same size",
                    {.before = fetch_over_wrong_group, .edit = take_fetched}),
      payload_fault("world_group_payload", "wrong_group", {Op::all_reduce},
                    "the result over the world in place of the axis",
                    {.before = fetch_over_world, .edit = take_fetched}),
      from_p(3, payload_fault("wrong_peer_payload", "wrong_peer", {Op::shift},
                              "the block that comes the other way round the ring",
                              {.before = fetch_from_wrong_peer, .edit = take_fetched})),
      payload_fault("scale_inverse_p", "scale", moves, "the result times 1/p",
                    {.edit = scale_inverse_p}),
      payload_fault("scale_p", "scale", any, "the result times p", {.edit = scale_p}),
      payload_fault("scale_eps", "scale", any, "the result times 1 + 1/1024 (bf16, f16: 1 + 1/128)",
                    {.edit = scale_eps}),
      payload_fault(
          "rotated", "rotated", placed,
          "blocks go to the next owner: a gather's to the next place, others to the next rank",
          {.after = fetch_rotated, .edit = rotate_blocks}),
      payload_fault("reversed", "reversed", placed,
                    "members in reversed order in a concatenation or in the assignment of blocks",
                    {.after = fetch_reversed, .edit = reverse_blocks}),
      payload_fault("stale", "stale", any,
                    "what the site returned on other data; of a ring, the block of the step before",
                    {.edit = deliver_stale}),
      on_one_rank(payload_fault("lost_element", "lost", any, "one element of one rank is zero",
                                {.edit = lose_element})),
      on_one_rank(payload_fault("lost_block", "lost", any, "one member's block on one rank is zero",
                                {.edit = lose_block})),
      on_one_rank(payload_fault("lost_row", "lost", any,
                                "one run along the last dim on one rank is zero",
                                {.edit = lose_row})),
      on_one_rank(payload_fault("element_from_other", "lost", between_peers,
                                "one element of one rank is that of the next rank's result",
                                {.after = fetch_result_of_next, .edit = element_from_other})),
      on_one_rank(payload_fault("block_from_other", "lost", between_peers,
                                "one block of one rank is that of the next rank's result",
                                {.after = fetch_result_of_next, .edit = block_from_other})),
      on_one_rank(payload_fault("row_from_other", "lost", between_peers,
                                "one run along the last dim of one rank is that of the next "
                                "rank's result",
                                {.after = fetch_result_of_next, .edit = row_from_other})),
      on_one_rank(payload_fault("bit_weight1", "bit", any,
                                "the bit of weight 1 flipped in one integral element of one rank",
                                {.edit = flip_weight_one})),
      on_one_rank(payload_fault("bit_sign", "bit", any,
                                "the sign flipped in one element of one rank",
                                {.edit = flip_sign})),
      on_one_rank(payload_fault("bit_exponent", "bit", any,
                                "the lowest exponent bit flipped in one element of one rank",
                                {.edit = flip_exponent})),
      payload_fault("in_place", "in_place", separate,
                    "the result overwrites the caller's input too",
                    {.before = keep_own, .edit = overwrite_input}),
      payload_fault("on_copy", "on_copy", reductions,
                    "a temporary is reduced and the original returned",
                    {.before = keep_own, .edit = own_contribution}),
      payload_fault("early", "early", any,
                    "the result is read before the call is complete: the buffer as it was",
                    {.issue = receive_aside, .edit = leave_aside}),
      with_rounding(payload_fault("bf16_wire", "bf16_wire", any,
                                  "the payload rounded to bf16 and widened again",
                                  {.before = keep_own, .issue = round_payload_to_bf16})),
      with_rounding(from_p(
          3,
          where_reducing(sums, payload_fault("own_order", "own_order", {Op::all_reduce},
                                             "each rank sums from its own part on",
                                             {.before = fetch_inputs, .edit = sum_from_own_on})))),
      with_rounding(from_p(
          3, where_reducing(
                 sums, payload_fault("arrival_order", "arrival_order", reductions,
                                     "parts are summed in an order that changes from run to run",
                                     {.before = fetch_inputs, .edit = sum_as_arrived})))),
  };
}

}  // namespace

const std::vector<FaultRow>& fault_rows() {
  static const std::vector<FaultRow> table = all_rows();
  return table;
}

}  // namespace shardproof
