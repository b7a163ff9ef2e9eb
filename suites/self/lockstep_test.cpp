// Lockstep on fingerprints: every field that must agree is compared, who differs is named with both
// call sites, and what may differ in right code does not matter.
#include <gtest/gtest.h>

#include <functional>

#include "oracle/comm/lockstep.hpp"
#include "oracle/comm/standing.hpp"

namespace shardproof {
namespace {
namespace lockstep_test {

Fingerprint calling(int rank, Op op = Op::all_reduce, Reduce reduce = Reduce::sum) {
  Group group{{0, 1, 2, 3}, rank, "tp", 0};
  group.id = group_id(group.members);
  Call call;
  call.op = op;
  call.reduce = reduce;
  call.dtype = DType::f32;
  call.count = 12;
  call.group = &group;
  call.file = "primitives/linear_row.cpp";
  call.line = 41;
  RankState state;
  state.rank = rank;
  state.size = 4;
  state.phase = Phase::backward;
  return fingerprint(call, state, 4, 12);
}

std::vector<Fingerprint> four(Op op = Op::all_reduce, Reduce reduce = Reduce::sum) {
  return {calling(0, op, reduce), calling(1, op, reduce), calling(2, op, reduce),
          calling(3, op, reduce)};
}

TEST(Lockstep, FingerprintHoldsTheCallAndTheBareFileName) {
  const Fingerprint f = calling(2);
  EXPECT_EQ(f.world_rank, 2);
  EXPECT_EQ(f.sequence, 4u);
  EXPECT_EQ(f.phase, Phase::backward);
  EXPECT_EQ(f.count, 12);
  EXPECT_STREQ(f.site, "linear_row.cpp:41");
}

TEST(Lockstep, SiteThatIsTooLongIsCut) {
  const std::string file(300, 'x');
  Group group{{0}, 0, "tp", 0};
  Call call;
  call.group = &group;
  call.file = file.c_str();
  RankState state;
  EXPECT_EQ(std::string(fingerprint(call, state, 0, 0).site), std::string(79, 'x'));
}

TEST(Lockstep, EqualCallsAreSilent) {
  for (Op op : {Op::all_reduce, Op::all_gather, Op::reduce_scatter, Op::all_to_all, Op::broadcast,
                Op::barrier}) {
    EXPECT_FALSE(mismatch(four(op))) << name(op);
  }
}

TEST(Lockstep, SitesAndPhasesMayDiffer) {
  auto members = four();
  std::snprintf(members[1].site, sizeof(members[1].site), "elsewhere.cpp:7");
  members[2].phase = Phase::forward;
  EXPECT_FALSE(mismatch(members));
}

struct Field {
  const char* word;
  std::function<void(Fingerprint&)> change;
};
const std::vector<Field>& fields() {
  static const std::vector<Field> all{
      {"operation", [](Fingerprint& f) { f.op = Op::reduce_scatter; }},
      {"reduction", [](Fingerprint& f) { f.reduce = Reduce::max; }},
      {"dtype", [](Fingerprint& f) { f.dtype = DType::i32; }},
      {"root", [](Fingerprint& f) { f.root_or_hop = 1; }},
      {"count", [](Fingerprint& f) { f.count = 13; }},
      {"sequence", [](Fingerprint& f) { f.sequence = 5; }},
      {"group", [](Fingerprint& f) { f.group ^= 1; }}};
  return all;
}

TEST(Lockstep, EachFieldOnEachRankIsNamed) {
  for (const Field& field : fields()) {
    for (int odd = 0; odd < 4; ++odd) {
      auto members = four();
      field.change(members[size_t(odd)]);
      const auto text = mismatch(members);
      ASSERT_TRUE(text) << field.word << " on rank " << odd;
      const std::string accusation =
          "rank " + std::to_string(odd) + " differs from the other members in " + field.word;
      EXPECT_EQ(text->substr(0, text->find('\n')), accusation);
    }
  }
}

TEST(Lockstep, BothSidesAreShownWithTheirSites) {
  auto members = four();
  members[2] = calling(2, Op::all_gather, Reduce::none);
  std::snprintf(members[2].site, sizeof(members[2].site), "linear_row.cpp:44");
  EXPECT_EQ(*mismatch(members),
            "rank 2 differs from the other members in operation, reduction\n"
            "ranks 0, 1, 3: backward, call 5 on its group: all_reduce sum, 12 x f32, at "
            "linear_row.cpp:41\n"
            "rank 2: backward, call 5 on its group: all_gather, 12 x f32, at linear_row.cpp:44");
}

TEST(Lockstep, ATieAccusesNobody) {
  auto members = four();
  members[0].count = members[1].count = 6;
  const std::string text = *mismatch(members);
  EXPECT_EQ(text.substr(0, text.find('\n')), "members of a group differ in count");
  EXPECT_NE(text.find("ranks 0, 1: "), std::string::npos);
  EXPECT_NE(text.find("ranks 2, 3: "), std::string::npos);
}

// The larger side of those that differ comes before the smaller one; ranks are told in order.
TEST(Lockstep, SeveralThatDifferAreNamedInOrder) {
  std::vector<Fingerprint> six;
  for (int rank = 0; rank < 6; ++rank) six.push_back(calling(rank));
  six[0].count = 1;
  six[1].root_or_hop = six[2].root_or_hop = 3;
  const std::string text = *mismatch(six);
  EXPECT_EQ(text.substr(0, text.find('\n')),
            "ranks 0, 1, 2 differ from the other members in root, count");
  EXPECT_LT(text.find("\nranks 3, 4, 5: "), text.find("\nranks 1, 2: "));
  EXPECT_LT(text.find("\nranks 1, 2: "), text.find("\nrank 0: "));
}

TEST(Lockstep, EachSideThatDiffersAddsItsField) {
  for (const Field& field : fields()) {
    auto members = four();
    members[1].dtype = DType::f64;
    field.change(members[3]);
    const std::string text = *mismatch(members);
    EXPECT_NE(text.find(field.word), std::string::npos) << field.word << "\n" << text;
  }
}

// Counts are a matter of pairs where both exchange in pairs, and in the same way.
TEST(Lockstep, CountsOfDifferentOperationsAreCompared) {
  auto members = four(Op::all_to_all, Reduce::none);
  members[2] = calling(2, Op::shift, Reduce::none);
  members[2].count = 13;
  const std::string text = *mismatch(members);
  EXPECT_EQ(text.substr(0, text.find('\n')),
            "rank 2 differs from the other members in operation, count");
}

TEST(Lockstep, CallsAreShownWithWhatIsTheirs) {
  auto members = four(Op::broadcast, Reduce::none);
  for (Fingerprint& f : members) f.root_or_hop = 1;
  members[3] = calling(3, Op::barrier, Reduce::none);
  members[3].root_or_hop = 1;
  EXPECT_EQ(*mismatch(members),
            "rank 3 differs from the other members in operation\n"
            "ranks 0, 1, 2: backward, call 5 on its group: broadcast from member 1, 12 x f32, at "
            "linear_row.cpp:41\n"
            "rank 3: backward, call 5 on its group: barrier, at linear_row.cpp:41");
}

TEST(Lockstep, ThePairIsShownTheSenderFirst) {
  Fingerprint sender = calling(3, Op::shift, Reduce::none),
              receiver = calling(0, Op::shift, Reduce::none);
  sender.root_or_hop = receiver.root_or_hop = 1;
  sender.count = receiver.count = 5, sender.recv = 6, receiver.recv = 7;
  EXPECT_EQ(*pairwise_mismatch(sender, 5, receiver, 7),
            "rank 3 sends 5 elements to rank 0, which expects 7\n"
            "rank 3: backward, call 5 on its group: shift hop +1, 5 x f32, expects 6, at "
            "linear_row.cpp:41\n"
            "rank 0: backward, call 5 on its group: shift hop +1, 5 x f32, expects 7, at "
            "linear_row.cpp:41");
}

TEST(Lockstep, CountsOfAllToAllAgreePairwiseOnly) {
  auto members = four(Op::all_to_all, Reduce::none);
  members[3].count = 40;
  EXPECT_FALSE(mismatch(members));
  EXPECT_FALSE(pairwise_mismatch(members[3], 10, members[0], 10));
  const auto text = pairwise_mismatch(members[3], 10, members[0], 9);
  ASSERT_TRUE(text);
  EXPECT_EQ(text->substr(0, text->find('\n')),
            "rank 3 sends 10 elements to rank 0, which expects 9");
}

TEST(Lockstep, PeersOfAShiftAgreeOnHopAndDtype) {
  Fingerprint sender = calling(1, Op::shift, Reduce::none),
              receiver = calling(2, Op::shift, Reduce::none);
  sender.root_or_hop = receiver.root_or_hop = 1;
  sender.count = 5;
  EXPECT_FALSE(pairwise_mismatch(sender, 5, receiver, 5));
  EXPECT_TRUE(pairwise_mismatch(sender, 5, receiver, 6));
  receiver.dtype = DType::i32;
  EXPECT_NE(pairwise_mismatch(sender, 5, receiver, 5)->find("ranks 1 and 2 differ in dtype"),
            std::string::npos);
  receiver.dtype = sender.dtype;
  receiver.root_or_hop = -1;
  EXPECT_NE(pairwise_mismatch(sender, 5, receiver, 5)->find("ranks 1 and 2 differ in hop"),
            std::string::npos);
}

TEST(Lockstep, PairsReadTheSameFromBothEnds) {
  Fingerprint low = calling(0, Op::shift, Reduce::none), high = calling(3, Op::all_reduce);
  EXPECT_EQ(*pairwise_mismatch(low, 12, high, 12), *pairwise_mismatch(high, 12, low, 12));
}

// ---- where ranks stand

Trace standing_at(Op op, Trace::State state = Trace::waiting) {
  Trace t;
  t.state = state;
  t.phase = Phase::backward;
  t.op = op;
  t.reduce = op == Op::all_reduce ? Reduce::sum : Reduce::none;
  t.dtype = DType::f32;
  t.hop = 1;
  t.count = 12;
  t.calls_in_phase = 2;
  t.group_size = 4;
  for (int i = 0; i < 4; ++i) t.members[i] = int16_t(2 * i);
  std::snprintf(t.label, sizeof t.label, "cp");
  std::snprintf(t.site, sizeof t.site, "ring.cpp:7");
  return t;
}

TEST(Standing, RanksAndMembersAreListed) {
  EXPECT_EQ(rank_list(std::vector{3}), "rank 3");
  EXPECT_EQ(rank_list(std::vector{0, 2}), "ranks 0, 2");
  EXPECT_EQ(member_text(std::vector{0, 1}), "{0,1}");
  EXPECT_EQ(member_text(std::vector{4, 5, 6}), "{4-6}");
  EXPECT_EQ(member_text(std::vector{0, 1, 3}), "{0,1,3}");
  EXPECT_EQ(member_text(std::vector{2, 1, 0}), "{2,1,0}");
}

TEST(Standing, ACallNamesWhomItIsWith) {
  EXPECT_EQ(last_call(2, standing_at(Op::shift)),
            "shift -> 4 <- 0, 12 x f32, cp{0,2,4,6}, at ring.cpp:7");
  EXPECT_EQ(last_call(0, standing_at(Op::shift)),
            "shift -> 2 <- 6, 12 x f32, cp{0,2,4,6}, at ring.cpp:7");
  EXPECT_EQ(last_call(0, standing_at(Op::broadcast)),
            "broadcast from member 1, 12 x f32, cp{0,2,4,6}, at ring.cpp:7");
  EXPECT_EQ(last_call(0, standing_at(Op::barrier)), "barrier, cp{0,2,4,6}, at ring.cpp:7");
  EXPECT_EQ(last_call(0, Trace{}), "");
}

TEST(Standing, WhatARankDoesAndAfterWhichCall) {
  const std::string call = "all_reduce sum, 12 x f32, cp{0,2,4,6}, at ring.cpp:7";
  const auto said = [](Trace::State state, bool plural = false) {
    return standing(0, standing_at(Op::all_reduce, state), plural);
  };
  EXPECT_EQ(said(Trace::waiting), "waits in call 2 of backward: " + call);
  EXPECT_EQ(said(Trace::waiting, true), "wait in call 2 of backward: " + call);
  EXPECT_EQ(said(Trace::running), "computes in backward after call 2; last: " + call);
  EXPECT_EQ(said(Trace::running, true), "compute in backward after call 2; last: " + call);
  EXPECT_EQ(said(Trace::left), "left backward after call 2; last: " + call);
  EXPECT_EQ(said(Trace::dead), "died in backward after call 2; last: " + call);
  Trace none;
  EXPECT_EQ(standing(0, none), "computes, no call so far");
  none.state = Trace::left;
  EXPECT_EQ(standing(0, none), "left before any call");
  none.state = Trace::dead;
  EXPECT_EQ(standing(0, none), "died before any call");
}

TEST(Standing, RanksThatStandAlikeShareALine) {
  const Trace wait = standing_at(Op::barrier), left = standing_at(Op::barrier, Trace::left);
  EXPECT_EQ(standings({wait, left, wait}),
            "ranks 0, 2 wait in call 2 of backward: barrier, cp{0,2,4,6}, at ring.cpp:7\n"
            "rank 1 left backward after call 2; last: barrier, cp{0,2,4,6}, at ring.cpp:7");
}

TEST(Standing, ThePlaceIsInACallOrAfterOne) {
  EXPECT_EQ(place(standing_at(Op::barrier)), "in call 2 of backward");
  EXPECT_EQ(place(standing_at(Op::barrier, Trace::dead)), "in backward, after call 2");
  EXPECT_EQ(place(Trace{}), "before its first call");
}

TEST(Group, IdentityFollowsFromMembersAndTheirOrder) {
  const std::vector<int> a{0, 1}, b{1, 0}, c{0, 1, 2};
  EXPECT_EQ(group_id(a), group_id(std::vector<int>{0, 1}));
  EXPECT_NE(group_id(a), group_id(b));
  EXPECT_NE(group_id(a), group_id(c));
}

}  // namespace lockstep_test
}  // namespace
}  // namespace shardproof
