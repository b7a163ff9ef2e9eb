// Every fault operator: what it makes of results and calls on data small enough to follow, when it
// counts as active, and that ranks stay in step. Ranks are threads.
#include "oracle/comm/faults.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <optional>
#include <set>

#include "oracle/case.hpp"
#include "suites/self/thread_door.hpp"

namespace shardproof {
namespace {
namespace faults_test {

using on_threads::Meeting;
using on_threads::run_ranks;
using on_threads::TestRank;
using Shape = std::vector<int64_t>;
using Values = std::vector<double>;

// ---- the text

TEST(FaultText, parsing_and_printing_are_inverse) {
  for (const std::string text :
       {"skip@forward.tp.1", "scale_p@backward.cp.12@rank3", "own_order@forward.tp.*",
        "lost_row@finish.tp,cp.2", "bit_sign@init.world.*@rank0", "stale@backward.cp/2.1"})
    EXPECT_EQ(print(parse_fault(text)), text);
  const FaultSpec s = parse_fault("wrong_group@backward.tp,cp.3@rank5");
  EXPECT_EQ(s.op, "wrong_group");
  EXPECT_EQ(s.phase, Phase::backward);
  EXPECT_EQ(s.axis, "tp,cp");
  EXPECT_EQ(s.number, 3);
  EXPECT_EQ(s.rank, 5);
  EXPECT_EQ(parse_fault("skip@forward.tp.*").number, 0);
  EXPECT_EQ(parse_fault("skip@forward.tp.1").rank, -1);
}

TEST(FaultText, errors_name_the_key_and_what_was_met) {
  const auto refused = [](const std::string& text, const std::vector<std::string>& parts) {
    try {
      parse_fault(text);
      ADD_FAILURE() << "accepted " << text;
    } catch (const BadInput& e) {
      const std::string what = e.what();
      EXPECT_NE(what.find("key 'fault'"), std::string::npos) << what;
      for (const auto& part : parts) EXPECT_NE(what.find(part), std::string::npos) << what;
    }
  };
  refused("skp@forward.tp.1", {"skp", "nearest is 'skip'"});
  refused("", {"OPERATOR@PHASE.AXIS.NUMBER"});
  refused("skip", {"@", "OPERATOR@PHASE.AXIS.NUMBER"});
  refused("skip@forward.tp", {"three parts"});
  refused("skip@sideways.tp.1", {"a phase", "sideways"});
  refused("skip@forward..1", {"label of a group"});
  refused("skip@forward.tp.0", {"from 1", "'0'"});
  refused("skip@forward.tp.-1", {"from 1"});
  refused("skip@forward.tp.1x", {"1x"});
  refused("skip@forward.tp.", {"from 1"});
  refused("skip@forward.tp.1@2", {"rankR"});
  refused("skip@forward.tp.1@rank", {"rankR"});
  refused("skip@forward.tp.1@rank-1", {"rankR"});
  refused("skip@forward.tp.99999999999", {"99999999999"});
}

TEST(FaultTable, has_every_operator_once_and_says_what_it_does) {
  const std::set<std::string> calls = {"skip",         "twice",       "mean_for_sum",
                                       "sum_for_mean", "wrong_group", "world_group",
                                       "wrong_peer",   "hop_short",   "bf16_wire_call"};
  const std::set<std::string> one_rank = {
      "lost_element",   "lost_block",  "lost_row", "element_from_other", "block_from_other",
      "row_from_other", "bit_weight1", "bit_sign", "bit_exponent"};
  const std::set<std::string> others = {"skip_payload",
                                        "mean_payload",
                                        "wrong_group_payload",
                                        "world_group_payload",
                                        "wrong_peer_payload",
                                        "scale_inverse_p",
                                        "scale_p",
                                        "scale_eps",
                                        "rotated",
                                        "reversed",
                                        "stale",
                                        "in_place",
                                        "on_copy",
                                        "early",
                                        "bf16_wire",
                                        "own_order",
                                        "arrival_order"};
  std::set<std::string> met;
  for (const FaultOperator& o : fault_operators()) {
    EXPECT_TRUE(met.insert(o.name).second) << o.name;
    EXPECT_EQ(o.call, calls.contains(o.name)) << o.name;
    EXPECT_EQ(o.one_rank, one_rank.contains(o.name)) << o.name;
    EXPECT_TRUE(calls.contains(o.name) || one_rank.contains(o.name) || others.contains(o.name));
    EXPECT_FALSE(o.kind.empty());
    EXPECT_FALSE(o.does.empty());
    EXPECT_FALSE(o.ops.empty());
    EXPECT_EQ(fault_operator(o.name).name, o.name);
  }
  EXPECT_EQ(met.size(), calls.size() + one_rank.size() + others.size());
}

// ---- one operator on one call

// What a rank saw: the healthy result, the faulty one, its input afterwards, what the ledger below
// (call faults) or above (payload faults) recorded, and whether the operator calls itself active.
struct Seen {
  Values healthy, faulty, input_before, input_after;
  std::vector<LedgerEntry> ledger;
  bool active = false;
  int64_t unwritten = 0;
};

struct Scene {
  Op op = Op::all_reduce;
  Mesh mesh = Mesh({{Axis::tp, 3}});
  DType dtype = DType::f64;
  Reduce reduce = Reduce::sum;
  int hop = 1;
  std::optional<std::function<double(int rank, int64_t i)>> value = {};
  int64_t n = 6;  // elements of the input block: a multiple of the ranks where it is cut
  int shots = 1;  // the last one is looked at

  double at(int rank, int64_t i) const {
    return value ? (*value)(rank, i) : (rank + 1) * 10 + double(i);
  }
};

Shape out_shape(const Scene& s, int p) {
  if (s.op == Op::all_gather) return {s.n * p / 2, 2};
  if (s.op == Op::reduce_scatter) return {s.n / p / 2, 2};
  return {s.n / 2, 2};
}

void perform(const Scene& s, Communicator& c, const View& in, const View& out) {
  switch (s.op) {
    case Op::all_reduce:
      return c.all_reduce(in, out, s.reduce);
    case Op::all_gather:
      return c.all_gather(in, out, 0);
    case Op::reduce_scatter:
      return c.reduce_scatter(in, out, 0, s.reduce);
    case Op::all_to_all:
      return c.all_to_all(in, out, 0, 0);
    case Op::shift:
      return c.wait(c.shift(in, out, s.hop));
    case Op::broadcast:
      copy(in, out);
      return c.broadcast(out, 1);
    case Op::barrier:
      return c.barrier();
  }
}

std::vector<Seen> play(const std::string& fault, const Scene& s,
                       std::vector<std::string>* thrown = nullptr) {
  std::vector<Seen> seen(static_cast<size_t>(s.mesh.world()));
  const auto errors = run_ranks(s.mesh, [&](TestRank& r) {
    Seen& mine = seen[size_t(r.state.rank)];
    const FaultSpec spec = parse_fault(fault);
    const bool call = fault_operator(spec.op).call;
    FaultDoor below(spec, r.state, r.transport);
    LedgerDoor ledger(r.state, call ? static_cast<Door&>(r.transport) : below);
    FaultDoor above(spec, r.state, ledger);
    FaultDoor& door = call ? above : below;
    Communicator healthy(r.group(Axis::tp), r.transport);
    Communicator faulty(r.group(Axis::tp), call ? static_cast<Door&>(above) : ledger);
    Buffer in(s.dtype, {s.n / 2, 2}), want(s.dtype, out_shape(s, healthy.size()));
    Buffer got(s.dtype, out_shape(s, healthy.size()));
    Values values;
    for (int64_t i = 0; i < s.n; ++i) values.push_back(s.at(r.state.rank, i));
    fill_from(in.view(), values);
    mine.input_before = to_doubles(in.view());
    perform(s, healthy, in.view(), want.view());
    mine.healthy = to_doubles(want.view());
    for (int shot = 0; shot < s.shots; ++shot) {
      door.new_shot();
      got.poison();
      ledger.take();
      perform(s, faulty, in.view(), got.view());
    }
    mine.unwritten = got.unwritten().count;
    mine.faulty = to_doubles(got.view());
    mine.input_after = to_doubles(in.view());
    mine.ledger = ledger.take();
    mine.active = door.active();
    // The ranks are still in step: the next healthy call is answered by everyone.
    perform(s, healthy, in.view(), want.view());
  });
  for (size_t r = 0; r < errors.size(); ++r)
    if (thrown)
      thrown->push_back(errors[r]);
    else
      EXPECT_EQ(errors[r], "") << fault << " rank " << r;
  return seen;
}

Values times(Values v, double factor) {
  for (double& x : v) x *= factor;
  return v;
}
Values input(const Scene& s, int rank) {
  Values v;
  for (int64_t i = 0; i < s.n; ++i) v.push_back(s.at(rank, i));
  return v;
}
Values part(const Values& v, int64_t first, int64_t count) {
  return {v.begin() + first, v.begin() + first + count};
}

void expect_active(const std::vector<Seen>& seen, bool active = true) {
  for (size_t r = 0; r < seen.size(); ++r) EXPECT_EQ(seen[r].active, active) << "rank " << r;
}

const auto data_ops = {Op::all_reduce, Op::all_gather, Op::reduce_scatter,
                       Op::all_to_all, Op::shift,      Op::broadcast};

// ---- call faults

TEST(CallFault, skip_makes_no_call_and_returns_the_own_contribution) {
  for (Op op : {Op::all_reduce, Op::all_gather, Op::reduce_scatter, Op::all_to_all}) {
    const Scene s{.op = op};
    const auto seen = play("skip@forward.tp.1", s);
    expect_active(seen);
    for (int r = 0; r < 3; ++r) {
      const Seen& x = seen[size_t(r)];
      EXPECT_TRUE(x.ledger.empty());
      if (op == Op::all_reduce) {
        EXPECT_EQ(x.faulty, input(s, r));
      }
      if (op == Op::reduce_scatter) {
        EXPECT_EQ(x.faulty, part(input(s, r), 2 * r, 2));
      }
      if (op == Op::all_gather) {
        EXPECT_EQ(part(x.faulty, 6 * r, 6), input(s, r));
        EXPECT_EQ(x.unwritten, 12);
      }
      if (op == Op::all_to_all) {
        EXPECT_EQ(part(x.faulty, 2 * r, 2), part(input(s, r), 2 * r, 2));
        EXPECT_EQ(x.unwritten, 4);
      }
    }
  }
}

TEST(CallFault, twice_reduces_the_result_again) {
  for (const auto& x : play("twice@forward.tp.1", {})) {
    EXPECT_EQ(x.faulty, times(x.healthy, 3));  // p equal values
    EXPECT_EQ(x.ledger.size(), 2u);
    EXPECT_TRUE(x.active);
  }
  const Scene s{.op = Op::reduce_scatter};
  const auto seen = play("twice@forward.tp.1", s);
  for (int r = 0; r < 3; ++r) {
    Values want = seen[size_t(r)].healthy;  // the sum with the own part replaced by the sum
    for (size_t i = 0; i < 2; ++i) want[i] += want[i] - s.at(r, 2 * r + int64_t(i));
    EXPECT_EQ(seen[size_t(r)].faulty, want);
    EXPECT_EQ(seen[size_t(r)].ledger.size(), 2u);
  }
  // An idempotent reduction keeps its value: only the ledger can see it.
  for (const auto& x : play("twice@forward.tp.1", {.reduce = Reduce::max})) {
    EXPECT_EQ(x.faulty, x.healthy);
    EXPECT_EQ(x.ledger.size(), 2u);
    EXPECT_TRUE(x.active);
  }
}

TEST(CallFault, mean_and_sum_are_swapped) {
  for (const auto& x : play("mean_for_sum@forward.tp.1", {})) {
    EXPECT_EQ(x.faulty, times(x.healthy, 1.0 / 3));
    EXPECT_EQ(x.ledger.at(0).reduce, Reduce::avg);
  }
  for (const auto& x : play("sum_for_mean@forward.tp.1", {.reduce = Reduce::avg})) {
    for (size_t i = 0; i < 6; ++i) EXPECT_DOUBLE_EQ(x.faulty[i], 3 * x.healthy[i]);
    EXPECT_EQ(x.ledger.at(0).reduce, Reduce::sum);
  }
  expect_active(play("mean_for_sum@forward.tp.1", {.reduce = Reduce::max}), false);
  expect_active(play("sum_for_mean@forward.tp.1", {}), false);
}

// Ranks of 2x2: tp groups {0,1} {2,3}, cp groups {0,2} {1,3}.
TEST(CallFault, wrong_group_calls_the_other_axis) {
  const Mesh grid({{Axis::tp, 2}, {Axis::cp, 2}});
  for (Op op : {Op::all_reduce, Op::all_gather, Op::reduce_scatter, Op::all_to_all, Op::shift}) {
    const Scene s{.op = op, .mesh = grid, .n = 4};
    const auto seen = play("wrong_group@forward.tp.1", s);
    expect_active(seen);
    for (int r = 0; r < 4; ++r) {
      const Seen& x = seen[size_t(r)];
      EXPECT_EQ(x.ledger.at(0).members, grid.group({Axis::cp}, r));
      EXPECT_EQ(x.ledger.at(0).label, "cp");
      const int peer = (r + 2) % 4, first = std::min(r, peer), second = first + 2;
      const Values a = input(s, first), b = input(s, second);
      const int64_t at = r == first ? 0 : 2;
      Values want;
      if (op == Op::all_reduce)
        for (size_t i = 0; i < 4; ++i) want.push_back(a[i] + b[i]);
      if (op == Op::all_gather) (want = a).insert(want.end(), b.begin(), b.end());
      if (op == Op::reduce_scatter)
        want = {a[size_t(at)] + b[size_t(at)], a[size_t(at) + 1] + b[size_t(at) + 1]};
      if (op == Op::all_to_all)
        want = {a[size_t(at)], a[size_t(at) + 1], b[size_t(at)], b[size_t(at) + 1]};
      if (op == Op::shift) want = input(s, peer);
      EXPECT_EQ(x.faulty, want) << name(op) << " rank " << r;
    }
  }
  // No other group of that size: one axis alone, or 2x4.
  expect_active(play("wrong_group@forward.tp.1", {}), false);
  expect_active(
      play("wrong_group@forward.tp.1", {.mesh = Mesh({{Axis::tp, 2}, {Axis::cp, 4}}), .n = 4}),
      false);
}

TEST(CallFault, world_group_sums_over_everyone) {
  const Mesh grid({{Axis::tp, 2}, {Axis::cp, 2}});
  const auto seen = play("world_group@forward.tp.1", {.mesh = grid});
  expect_active(seen);
  for (const Seen& x : seen) {
    for (int64_t i = 0; i < 6; ++i) EXPECT_EQ(x.faulty[size_t(i)], 100 + 4 * i);  // 10+20+30+40
    EXPECT_EQ(x.ledger.at(0).members, (std::vector{0, 1, 2, 3}));
    EXPECT_EQ(x.ledger.at(0).label, "world");
  }
  expect_active(play("world_group@forward.tp.1", {}), false);  // the axis is the world
}

TEST(CallFault, wrong_peer_and_hop_short_turn_the_ring) {
  const Mesh ring({{Axis::tp, 4}});
  const auto expect_from = [&](const std::string& fault, int hop, int distance, bool active) {
    const Scene s{.op = Op::shift, .mesh = ring, .hop = hop};
    const auto seen = play(fault + "@forward.tp.1", s);
    expect_active(seen, active);
    for (int r = 0; r < 4; ++r)
      EXPECT_EQ(seen[size_t(r)].faulty, input(s, (r - distance + 8) % 4))
          << fault << " hop " << hop;
    return seen;
  };
  EXPECT_EQ(expect_from("wrong_peer", 1, -1, true)[0].ledger.at(0).to, 3);
  expect_from("wrong_peer", -1, 1, true);
  expect_from("wrong_peer", 2, 2, false);
  expect_from("wrong_peer_payload", 1, -1, true);
  expect_from("wrong_peer_payload", 2, 2, false);
  EXPECT_TRUE(expect_from("hop_short", 1, 0, true)[0].ledger.empty());
  EXPECT_TRUE(expect_from("hop_short", 3, 0, true)[0].ledger.empty());
  EXPECT_EQ(expect_from("hop_short", 2, 1, true)[0].ledger.at(0).hop, 1);
  expect_active(play("wrong_peer@forward.tp.1", {.op = Op::shift, .mesh = Mesh({{Axis::tp, 2}})}),
                false);
}

// 1 + 2^-10 needs 11 bits: bf16 keeps 8.
double needs_rounding(int rank, int64_t i) {
  return (rank + 1) * (1 + std::ldexp(1.0, -10)) + double(i);
}

TEST(CallFault, bf16_wire_rounds_what_travels) {
  for (Op op : {Op::all_gather, Op::shift, Op::all_to_all, Op::broadcast})
    for (const std::string fault : {"bf16_wire_call", "bf16_wire"}) {
      const Scene s{.op = op, .value = needs_rounding};
      for (const Seen& x : play(fault + "@forward.tp.1", s)) {
        ASSERT_EQ(x.faulty.size(), x.healthy.size());
        for (size_t i = 0; i < x.faulty.size(); ++i)
          EXPECT_EQ(x.faulty[i], std::round(x.healthy[i])) << fault << " " << name(op);
        EXPECT_EQ(x.ledger.at(0).dtype, fault == "bf16_wire" ? DType::f64 : DType::bf16);
        EXPECT_EQ(x.input_after, x.input_before);
        EXPECT_TRUE(x.active);
      }
    }
  // Integers up to 256 and bf16 payloads are exact; the call form still changes the call.
  expect_active(play("bf16_wire@forward.tp.1", {}), false);
  expect_active(play("bf16_wire@forward.tp.1", {.dtype = DType::bf16}), false);
  expect_active(play("bf16_wire_call@forward.tp.1", {}), true);
  expect_active(play("bf16_wire_call@forward.tp.1", {.dtype = DType::bf16}), false);
  expect_active(play("bf16_wire_call@forward.tp.1", {.dtype = DType::i32}), false);
}

TEST(CallFault, on_one_rank_the_others_notice) {
  for (const std::string op : {"skip", "twice", "mean_for_sum", "bf16_wire_call"}) {
    std::vector<std::string> thrown;
    play(op + "@forward.tp.1@rank1", {}, &thrown);
    EXPECT_TRUE(std::any_of(thrown.begin(), thrown.end(), [](const auto& t) { return !t.empty(); }))
        << op;
  }
}

// ---- payload faults

// Reads like the table: fault, operation, and what rank r sees.
void expect_each(const std::string& fault, const Scene& s,
                 const std::function<Values(int rank, const std::vector<Seen>&)>& want) {
  const auto seen = play(fault + "@forward.tp.1", s);
  for (int r = 0; r < int(seen.size()); ++r) {
    const Seen& x = seen[size_t(r)];
    EXPECT_EQ(x.faulty, want(r, seen)) << fault << " " << name(s.op) << " rank " << r;
    EXPECT_EQ(x.active, x.faulty != x.healthy) << fault << " " << name(s.op) << " rank " << r;
    EXPECT_EQ(x.ledger.size(), 1u) << "the calls of the subject stay as they are";
  }
}

TEST(PayloadFault, scales) {
  for (Op op : data_ops) {
    expect_each("scale_p", {.op = op},
                [](int r, auto& seen) { return times(seen[size_t(r)].healthy, 3); });
    expect_each("scale_eps",
                {.op = op, .value = [](int r, int64_t i) { return 1024.0 * (r + 2 + double(i)); }},
                [](int r, auto& seen) { return times(seen[size_t(r)].healthy, 1025.0 / 1024); });
    expect_each("scale_eps",
                {.op = op,
                 .dtype = DType::bf16,
                 .value = [](int r, int64_t) { return r == 2 ? 2.0 : 1.0; }},
                [](int r, auto& seen) { return times(seen[size_t(r)].healthy, 129.0 / 128); });
  }
  const Scene four{.op = Op::all_gather, .mesh = Mesh({{Axis::tp, 4}})};
  expect_each("scale_inverse_p", four,
              [](int r, auto& seen) { return times(seen[size_t(r)].healthy, 0.25); });
  const Mesh four_ranks({{Axis::tp, 4}});
  expect_each("mean_payload", {.mesh = four_ranks},
              [](int r, auto& seen) { return times(seen[size_t(r)].healthy, 0.25); });
  expect_each("mean_payload", {.mesh = four_ranks, .reduce = Reduce::avg},
              [](int r, auto& seen) { return times(seen[size_t(r)].healthy, 4); });
  expect_active(play("scale_p@forward.tp.1", {.dtype = DType::i64}), false);
}

TEST(PayloadFault, own_contributions) {
  for (const std::string fault : {"skip_payload", "on_copy"}) {
    Scene s{.op = Op::all_reduce};
    expect_each(fault, s, [&](int r, auto&) { return input(s, r); });
    s.op = Op::reduce_scatter;
    expect_each(fault, s, [&](int r, auto&) { return part(input(s, r), 2 * r, 2); });
  }
  Scene s{.op = Op::shift};
  expect_each("skip_payload", s, [&](int r, auto&) { return input(s, r); });
  s.op = Op::broadcast;
  expect_each("skip_payload", s, [&](int r, auto&) { return input(s, r); });
  s.op = Op::all_gather;
  const auto seen = play("skip_payload@forward.tp.1", s);
  expect_active(seen);
  for (int r = 0; r < 3; ++r) {
    EXPECT_EQ(part(seen[size_t(r)].faulty, 6 * r, 6), input(s, r));
    EXPECT_EQ(seen[size_t(r)].unwritten, 12);
  }
  // Redundant copies, averaged: every contribution is the result.
  expect_active(
      play("on_copy@forward.tp.1",
           {.reduce = Reduce::avg, .value = [](int, int64_t i) { return 1.0 + double(i); }}),
      false);
}

TEST(PayloadFault, blocks_in_other_places) {
  for (int p : {2, 3, 4}) {
    Scene s{.op = Op::all_gather, .mesh = Mesh({{Axis::tp, p}}), .n = 2 * p};
    const auto gathered = [&](auto member_at) {
      Values v;
      for (int place = 0; place < p; ++place)
        for (double x : input(s, member_at(place))) v.push_back(x);
      return v;
    };
    expect_each("rotated", s,
                [&](int, auto&) { return gathered([&](int i) { return (i + p - 1) % p; }); });
    expect_each("reversed", s,
                [&](int, auto&) { return gathered([&](int i) { return p - 1 - i; }); });
    for (Op op : {Op::reduce_scatter, Op::all_to_all}) {
      s.op = op;
      expect_each("rotated", s,
                  [&](int r, auto& seen) { return seen[size_t((r + p - 1) % p)].healthy; });
    }
    s.op = Op::reduce_scatter;
    expect_each("reversed", s, [&](int r, auto& seen) { return seen[size_t(p - 1 - r)].healthy; });
    s.op = Op::all_to_all;
    expect_each("reversed", s, [&](int r, auto& seen) {
      Values v;
      for (int i = p - 1; i >= 0; --i)
        for (double x : part(seen[size_t(r)].healthy, 2 * i, 2)) v.push_back(x);
      return v;
    });
  }
}

TEST(PayloadFault, results_of_another_group) {
  const Mesh grid({{Axis::tp, 2}, {Axis::cp, 2}});
  const Scene s{.mesh = grid, .n = 4};
  expect_each("wrong_group_payload", s, [&](int r, auto&) {
    Values v = input(s, r);
    for (size_t i = 0; i < v.size(); ++i) v[i] += s.at((r + 2) % 4, int64_t(i));
    return v;
  });
  expect_each("world_group_payload", s, [&](int, auto&) { return Values{100, 104, 108, 112}; });
  const Scene ring{.op = Op::shift, .mesh = grid};
  expect_each("wrong_group_payload", ring, [&](int r, auto&) { return input(ring, (r + 2) % 4); });
}

// Sums of other lengths on other rows of the grid; a line, whose first member sends and whose last
// one receives: their calls fit no other group, and are left as they are.
TEST(PayloadFault, of_another_group_needs_equal_counts) {
  const Mesh grid({{Axis::tp, 2}, {Axis::cp, 2}});
  for (const std::string fault : {"wrong_group_payload", "world_group_payload"}) {
    const auto errors = run_ranks(grid, [&](TestRank& r) {
      FaultDoor door(parse_fault(fault + "@forward.tp.*"), r.state, r.transport);
      Communicator tp(r.group(Axis::tp), door);
      const int row = grid.coordinate(r.state.rank, Axis::cp), me = tp.rank();
      Buffer part(DType::f64, {1 + row}), sum(DType::f64, {1 + row});
      fill_from(part.view(), Values(size_t(1 + row), r.state.rank + 1.0));
      tp.all_reduce(part.view(), sum.view());
      EXPECT_EQ(to_doubles(sum.view()), Values(size_t(1 + row), row == 0 ? 1 + 2 : 3 + 4));
      Buffer leaving(DType::f64, {me == 0 ? 2 : 0}), arriving(DType::f64, {me == 0 ? 0 : 2});
      fill_from(leaving.view(), Values(me == 0 ? 2 : 0, 10.0 + row));
      tp.wait(tp.shift(leaving.view(), arriving.view(), 1));
      EXPECT_EQ(to_doubles(arriving.view()), Values(me == 0 ? 0 : 2, 10.0 + row));
      EXPECT_FALSE(door.active());
    });
    for (const auto& e : errors) EXPECT_EQ(e, "") << fault;
  }
}

// Both ends of three ranks sum, and the one between makes no call: nobody asks the world.
TEST(PayloadFault, of_the_world_needs_a_call_on_every_rank) {
  for (const std::string fault : {"world_group_payload", "world_group"}) {
    const auto errors = run_ranks(Mesh({{Axis::tp, 3}}), [&](TestRank& r) {
      if (r.state.rank == 1) return;
      FaultDoor door(parse_fault(fault + "@forward.tp:ends.1"), r.state, r.transport);
      Communicator tp(r.group(Axis::tp), door);
      Buffer part(DType::f64, {1}), sum(DType::f64, {1});
      fill_from(part.view(), Values{r.state.rank + 1.0});
      tp.subgroup({0, 2}, "tp:ends").all_reduce(part.view(), sum.view());
      EXPECT_EQ(to_doubles(sum.view()), Values{1 + 3});
      EXPECT_FALSE(door.active());
    });
    for (const auto& e : errors) EXPECT_EQ(e, "") << fault;
  }
}

// The largest element of the result is the one that is hit, on world rank 0 alone.
TEST(PayloadFault, losses_on_one_rank) {
  const auto value = [](int rank, int64_t i) { return i == 3 ? 50.0 : double(rank + 1 + i); };
  const auto but = [](Values v, std::vector<size_t> lost) {
    for (size_t i : lost) v[i] = 0;
    return v;
  };
  for (Op op : {Op::all_reduce, Op::shift}) {
    const Scene s{.op = op, .value = value};
    const auto expect_lost = [&](const std::string& fault, std::vector<size_t> lost) {
      expect_each(fault, s, [&](int r, auto& seen) {
        return r == 0 ? but(seen[0].healthy, lost) : seen[size_t(r)].healthy;
      });
      const auto seen = play(fault + "@forward.tp.1@rank2", s);
      EXPECT_EQ(seen[0].faulty, seen[0].healthy);
      EXPECT_EQ(seen[2].faulty, but(seen[2].healthy, lost));
    };
    expect_lost("lost_element", {3});
    expect_lost("lost_row", {2, 3});    // rows of two
    expect_lost("lost_block", {2, 3});  // three blocks of two
  }
  const Scene gather{.op = Op::all_gather, .value = [](int rank, int64_t i) {
                       return rank == 1 ? 9.0 : 1.0 + double(i);
                     }};
  expect_each("lost_block", gather, [&](int r, auto& seen) {
    return r == 0 ? but(seen[0].healthy, {6, 7, 8, 9, 10, 11}) : seen[size_t(r)].healthy;
  });
  expect_active(play("lost_element@forward.tp.1", {.value = [](int, int64_t) { return 0.0; }}),
                false);
}

TEST(PayloadFault, losses_to_another_rank) {
  for (Op op : {Op::reduce_scatter, Op::all_to_all, Op::shift}) {
    const Scene s{.op = op};
    const auto one = play("element_from_other@forward.tp.1", s);
    int differ = 0;
    for (size_t i = 0; i < one[0].faulty.size(); ++i)
      if (one[0].faulty[i] != one[0].healthy[i]) {
        ++differ;
        EXPECT_EQ(one[0].faulty[i], one[1].healthy[i]);
      }
    EXPECT_EQ(differ, 1) << name(op);
    EXPECT_TRUE(one[0].active);
    EXPECT_EQ(one[1].faulty, one[1].healthy);
    EXPECT_FALSE(one[1].active);
  }
  const Scene s{.op = Op::shift};
  expect_each("block_from_other", s, [&](int r, auto& seen) {
    Values v = seen[size_t(r)].healthy;
    if (r == 0) std::copy_n(seen[1].healthy.begin(), 2, v.begin());
    return v;
  });
  // A row of [6, 2], half of a member's block.
  expect_each("row_from_other", {.op = Op::shift, .n = 12}, [&](int r, auto& seen) {
    Values v = seen[size_t(r)].healthy;
    if (r == 0) std::copy_n(seen[1].healthy.begin(), 2, v.begin());
    return v;
  });
  expect_active(play("element_from_other@forward.tp.1",
                     {.op = Op::shift, .value = [](int, int64_t) { return 4.0; }}),
                false);
}

TEST(PayloadFault, bits) {
  const auto value = [](int, int64_t i) { return i == 4 ? 3.0 : 1.0; };
  for (DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16})
    for (Op op : {Op::shift, Op::all_to_all}) {
      Scene s{.op = op, .dtype = dtype, .value = op == Op::shift ? value : [](int, int64_t) {
                return 3.0;
              }};
      const size_t at = op == Op::shift ? 4 : 0;
      const auto expect_flip = [&](const std::string& fault, double to) {
        expect_each(fault, s, [&](int r, auto& seen) {
          Values v = seen[size_t(r)].healthy;
          if (r == 0) v[at] = to;
          return v;
        });
      };
      expect_flip("bit_weight1", 2);  // 11 -> 10
      expect_flip("bit_sign", -3);
      // 3 = 1.5 * 2^1; the biased exponent 1 + (2^k - 1) is even, so its lowest bit goes up.
      expect_flip("bit_exponent", 6);
    }
  // 1 -> 0, and 2.5 has no bit to lose that an integer has.
  expect_each("bit_weight1",
              {.op = Op::shift, .value = [](int, int64_t i) { return i == 2 ? 1.0 : 2.5; }},
              [](int r, auto& seen) {
                Values v = seen[size_t(r)].healthy;
                if (r == 0) v[2] = 0;
                return v;
              });
  expect_active(play("bit_weight1@forward.tp.1",
                     {.op = Op::shift, .value = [](int, int64_t) { return 2.5; }}),
                false);
  expect_active(play("bit_sign@forward.tp.1", {.op = Op::shift, .dtype = DType::i64}), false);
}

TEST(PayloadFault, in_place_writes_over_the_argument_and_leaves_the_result) {
  for (Op op : {Op::all_reduce, Op::all_gather, Op::reduce_scatter, Op::all_to_all, Op::shift}) {
    const auto seen = play("in_place@forward.tp.1", {.op = op});
    for (const Seen& x : seen) {
      EXPECT_EQ(x.faulty, x.healthy) << name(op);
      EXPECT_NE(x.input_after, x.input_before) << name(op);
      EXPECT_TRUE(x.active);
      if (op == Op::all_reduce) {
        EXPECT_EQ(x.input_after, x.healthy);
      }
    }
  }
}

TEST(PayloadFault, early_reads_the_buffer_as_it_was) {
  for (Op op : {Op::all_reduce, Op::all_gather, Op::reduce_scatter, Op::all_to_all, Op::shift})
    for (const Seen& x : play("early@forward.tp.1", {.op = op})) {
      EXPECT_EQ(x.unwritten, int64_t(x.healthy.size())) << name(op);
      EXPECT_TRUE(x.active);
    }
  const Scene s{.op = Op::broadcast};
  expect_each("early", s, [&](int r, auto&) { return input(s, r); });
}

// ---- stale

struct Replay {
  Values result;
  bool active;
};
// A priming run on `old` data, then a run on `fresh` data: the results of `calls` calls, rank 0.
std::vector<Replay> replay(const std::string& fault, Op op, double old, double fresh, int calls) {
  std::vector<Replay> results;
  const Scene s{.op = op};
  const auto errors = run_ranks(s.mesh, [&](TestRank& r) {
    FaultDoor door(parse_fault(fault), r.state, r.transport);
    Communicator tp(r.group(Axis::tp), door);
    for (const bool priming : {true, false}) {
      door.new_shot();
      door.priming(priming);
      for (int c = 0; c < calls; ++c) {
        Buffer in(DType::f64, {3, 2}), out(DType::f64, out_shape(s, 3));
        fill_from(in.view(), Values(6, (priming ? old : fresh) + 10 * c + 100 * tp.rank()));
        perform(s, tp, in.view(), out.view());
        if (!priming && tp.rank() == 0) results.push_back({to_doubles(out.view()), door.active()});
        if (priming) {
          EXPECT_FALSE(door.active());
        }
      }
    }
  });
  for (const auto& e : errors) EXPECT_EQ(e, "");
  return results;
}

TEST(Stale, returns_what_the_site_returned_on_other_data) {
  const auto seen = replay("stale@forward.tp.2", Op::all_reduce, 1, 2, 3);
  EXPECT_EQ(seen[0].result, Values(6, 2 * 3 + 300));
  EXPECT_FALSE(seen[0].active);
  EXPECT_EQ(seen[1].result, Values(6, 11 * 3 + 300));  // primed with 1 + 10
  EXPECT_TRUE(seen[1].active);
  EXPECT_EQ(seen[2].result, Values(6, 22 * 3 + 300));
  EXPECT_FALSE(
      replay("stale@forward.tp.*", Op::all_reduce, 5, 5, 2)[1].active);  // the same data twice
}

// In a priming run other operators are held back, too: `replay` asks that none is active there.
TEST(Priming, holds_every_operator_back) {
  const auto seen = replay("scale_p@forward.tp.1", Op::all_reduce, 1, 2, 1);
  EXPECT_TRUE(seen[0].active);
}

TEST(Stale, of_a_ring_is_the_block_of_the_step_before) {
  // Rank 0 receives from rank 2: fresh + 10 * step + 200.
  const auto seen = replay("stale@forward.tp.2", Op::shift, 1, 2, 3);
  EXPECT_EQ(seen[0].result, Values(6, 202));
  EXPECT_EQ(seen[1].result, Values(6, 202));
  EXPECT_EQ(seen[2].result, Values(6, 222));
  EXPECT_TRUE(seen[1].active);
  // Every step: each hands out what truly came one step before, not what was handed out.
  const auto all = replay("stale@forward.tp.*", Op::shift, 1, 2, 3);
  EXPECT_EQ(all[0].result, Values(6, 201));
  EXPECT_EQ(all[1].result, Values(6, 202));
  EXPECT_EQ(all[2].result, Values(6, 212));
}

// Each of two members sends one row to either; on fresh data two to the first, one to the other.
TEST(Stale, of_an_exchange_of_other_sizes_is_what_fits) {
  const Mesh mesh({{Axis::tp, 2}});
  std::vector<Values> seen(2);
  const auto errors = run_ranks(mesh, [&](TestRank& r) {
    FaultDoor door(parse_fault("stale@forward.tp.1"), r.state, r.transport);
    Communicator tp(r.group(Axis::tp), door);
    for (const bool priming : {true, false}) {
      door.new_shot();
      door.priming(priming);
      const std::vector<int64_t> split{priming ? 1 : 2, 1};
      const int64_t own = split[size_t(tp.rank())];
      const std::vector<int64_t> concat{own, own};
      Buffer in(DType::f64, {split[0] + split[1]}), out(DType::f64, {2 * own});
      fill_from(in.view(),
                Values(size_t(split[0] + split[1]), (priming ? 1 : 7) + 100 * tp.rank()));
      tp.all_to_all(in.view(), out.view(), 0, 0, split, concat);
      EXPECT_EQ(door.active(), !priming);
      seen[size_t(tp.rank())] = to_doubles(out.view());
    }
  });
  for (const auto& e : errors) EXPECT_EQ(e, "");
  EXPECT_EQ(seen[0], (Values{1, 101, 107, 107}));
  EXPECT_EQ(seen[1], (Values{1, 101}));
}

// ---- orders of summation

// 2^53 + 1 + 1: one way round each 1 is lost, the other way they survive as 2.
double order_matters(int rank, int64_t) { return rank == 0 ? 0x1p53 : 1; }

TEST(OwnOrder, parts_the_replicas_where_rounding_depends_on_the_order) {
  const auto seen = play("own_order@forward.tp.1", {.value = order_matters});
  EXPECT_EQ(seen[0].healthy, Values(6, 0x1p53));
  EXPECT_EQ(seen[0].faulty, Values(6, 0x1p53));      // (2^53 + 1) + 1
  EXPECT_EQ(seen[1].faulty, Values(6, 0x1p53 + 2));  // (1 + 1) + 2^53
  EXPECT_EQ(seen[2].faulty, Values(6, 0x1p53));      // (1 + 2^53) + 1
  EXPECT_FALSE(seen[0].active);
  EXPECT_TRUE(seen[1].active);
  for (DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16})
    for (Reduce reduce : {Reduce::sum, Reduce::avg})
      expect_active(play("own_order@forward.tp.1",
                         {.dtype = dtype,
                          .reduce = reduce,
                          .value = [](int r, int64_t i) { return 3.0 * (r + double(i)); }}),
                    false);
  expect_active(
      play("own_order@forward.tp.1", {.mesh = Mesh({{Axis::tp, 2}}), .value = order_matters}),
      false);
  expect_active(play("own_order@forward.tp.1", {.reduce = Reduce::max, .value = order_matters}),
                false);
}

TEST(ArrivalOrder, replicas_agree_and_runs_do_not) {
  std::set<double> sums;
  for (int shots : {1, 2, 3}) {
    const auto seen = play("arrival_order@forward.tp.1", {.value = order_matters, .shots = shots});
    EXPECT_EQ(seen[0].faulty, seen[1].faulty);
    EXPECT_EQ(seen[0].faulty, seen[2].faulty);
    sums.insert(seen[0].faulty[0]);
  }
  EXPECT_EQ(sums, (std::set<double>{0x1p53, 0x1p53 + 2}));  // large last once in three runs
  expect_active(play("arrival_order@forward.tp.1", {.shots = 3}), false);
}

// 2^53, 1 and 1.5: 2^53 + 4 where the 1 comes last, else 2^53 + 2.
TEST(ArrivalOrder, of_a_later_run_rounds_otherwise_where_one_does) {
  const auto value = [](int rank, int64_t) { return rank == 0 ? 0x1p53 : rank == 1 ? 1 : 1.5; };
  const auto sum = [&](int shots) {
    return play("arrival_order@forward.tp.1", {.value = value, .shots = shots})[0].faulty[0];
  };
  EXPECT_EQ(sum(1), 0x1p53 + 2);
  for (int shots = 2; shots < 14; ++shots) EXPECT_EQ(sum(shots), 0x1p53 + 4) << shots;
}

// ---- sites

TEST(Site, is_named_by_phase_axis_and_number) {
  const Mesh grid({{Axis::tp, 2}, {Axis::cp, 2}});
  const auto changed = [&](const std::string& fault) {
    std::string calls;  // which of the calls of rank 0 came out wrong
    const auto errors = run_ranks(grid, [&](TestRank& r) {
      FaultDoor door(parse_fault(fault), r.state, r.transport);
      Communicator tp(r.group(Axis::tp), door), cp(r.group(Axis::cp), door);
      for (int shot = 0; shot < 2; ++shot) {
        door.new_shot();
        for (const Phase phase : {Phase::forward, Phase::backward})
          for (const int call : {1, 2}) {
            r.state.phase = phase;
            for (Communicator* c : {&tp, &cp}) {
              Buffer in(DType::f64, {2}), out(DType::f64, {2});
              fill_from(in.view(), Values{1, 1});
              c->all_reduce(in.view(), out.view());
              if (r.state.rank == 0 && to_doubles(out.view()) != Values{2, 2})
                calls += std::string(name(phase)) + "." + c->group().label + "." +
                         std::to_string(call) + " ";
            }
          }
      }
    });
    for (const auto& e : errors) EXPECT_EQ(e, "");
    return calls;
  };
  EXPECT_EQ(changed("scale_p@forward.tp.1"), "forward.tp.1 forward.tp.1 ");  // one a shot
  EXPECT_EQ(changed("scale_p@backward.cp.2"), "backward.cp.2 backward.cp.2 ");
  EXPECT_EQ(changed("scale_p@forward.tp.3"), "");
  EXPECT_EQ(changed("scale_p@forward.dp.1"), "");
  EXPECT_EQ(changed("scale_p@backward.tp.*"),
            "backward.tp.1 backward.tp.2 backward.tp.1 backward.tp.2 ");
  EXPECT_EQ(changed("scale_p@forward.tp.1@rank0"), "forward.tp.1 forward.tp.1 ");
  EXPECT_EQ(changed("scale_p@forward.tp.1@rank3"), "");
}

// Every operator on every operation, dtype and rank count: ranks stay in step, what is not in its
// table is left alone, and active() says exactly whether something was changed.
TEST(Table, every_operator_everywhere) {
  const std::vector<Mesh> meshes = {Mesh({{Axis::tp, 2}}), Mesh({{Axis::tp, 3}}),
                                    Mesh({{Axis::tp, 2}, {Axis::cp, 2}})};
  for (const FaultOperator& o : fault_operators())
    for (Op op : data_ops)
      for (const Mesh& mesh : meshes)
        for (DType dtype : {DType::f64, DType::bf16, DType::i64}) {
          Scene s{.op = op, .mesh = mesh, .dtype = dtype, .n = 12};
          const auto seen = play(o.name + "@forward.tp.1", s);
          const bool listed = std::find(o.ops.begin(), o.ops.end(), op) != o.ops.end();
          for (const Seen& x : seen) {
            const bool same_bytes =
                x.faulty.size() == x.healthy.size() && x.unwritten == 0 && x.faulty == x.healthy;
            const bool changed = !same_bytes || x.input_after != x.input_before;
            const std::string where =
                o.name + " " + name(op) + " p=" + std::to_string(mesh.size(Axis::tp));
            EXPECT_FALSE(x.active && !listed) << where;
            EXPECT_FALSE(changed && !x.active) << where;
            EXPECT_FALSE(x.active && !changed && !o.call) << where;
            if (!o.call) {
              EXPECT_EQ(x.ledger.size(), 1u);
            }
          }
        }
}

TEST(Table, blocks_of_unequal_size_stay_in_step) {
  const Shape cut = {1, 3, 0};  // rows of member i; every member also has that many columns for i
  for (const FaultOperator& o : fault_operators()) {
    if (o.call && o.name != "twice" && o.name != "skip") continue;
    const auto errors = run_ranks(Mesh({{Axis::tp, 3}}), [&](TestRank& r) {
      FaultDoor door(parse_fault(o.name + "@forward.tp.*"), r.state, r.transport);
      Communicator tp(r.group(Axis::tp), door), healthy(r.group(Axis::tp), r.transport);
      const size_t me = size_t(tp.rank());
      Buffer rows(DType::f64, {cut[me], 4}), columns(DType::f64, {4, cut[me]});
      fill_from(rows.view(), Values(size_t(cut[me] * 4), double(me + 1)));
      tp.all_to_all(rows.view(), columns.view(), 1, 0, cut, cut);
      const size_t from = (me + 2) % 3;
      Buffer block(DType::f64, {cut[from], 4});
      tp.wait(tp.shift(rows.view(), block.view(), 1));
      Buffer sum(DType::f64, {1});
      fill_from(sum.view(), Values{1});
      healthy.all_reduce(sum.view(), sum.view());
      EXPECT_EQ(to_doubles(sum.view()), Values{3});
    });
    for (const auto& e : errors) EXPECT_EQ(e, "") << o.name;
  }
}

TEST(Device, buffers_out_of_reach_are_said_to_be) {
  struct Silent : Door {
    Ticket start(const Call&, const View&, const View&, Stream) override { return 1; }
    void wait(Ticket, Stream) override {}
  } silent;
  RankState state;
  state.phase = Phase::forward;
  Group g;
  g.members = {0, 1};
  g.label = "tp";
  Call c;
  c.op = Op::all_reduce;
  c.reduce = Reduce::sum;
  c.group = &g;
  const View far = view_of(nullptr, DType::f64, {2}, Space::device);
  FaultDoor edits(parse_fault("scale_p@forward.tp.1"), state, silent);
  EXPECT_THROW(edits.start(c, far, far, nullptr), Infrastructure);
  FaultDoor swaps(parse_fault("mean_for_sum@forward.tp.1"), state, silent);
  EXPECT_NO_THROW(swaps.wait(swaps.start(c, far, far, nullptr), nullptr));
  EXPECT_TRUE(swaps.active());
}

}  // namespace faults_test
}  // namespace
}  // namespace shardproof
