// The gated delta rule: what PyTorch computes and numbers that can be followed by hand, bounds
// against float, calls in closed form, data without integers; a ring; bodies and padding.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include "oracle/cost.hpp"
#include "oracle/drawn.hpp"
#include "oracle/registry.hpp"
#include "oracle/run.hpp"
#include "primitives/calls.hpp"
#include "primitives/delta_context.hpp"
#include "reference/delta.hpp"
#include "reference/scan.hpp"
#include "suites/self/goldens.hpp"
#include "suites/self/tensors.hpp"

namespace shardproof {

void family_mixer(Registry&);
void family_recurrent(Registry&);

namespace {
namespace delta_test {

using reference::Values;
using List = std::vector<int64_t>;
using goldens::extent;
using goldens::golden;
using goldens::values;

const double nan = std::nan("");

void expect_near(const Values& got, const Values& want, double relative) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i)
    EXPECT_NEAR(got[i], want[i], relative * (1 + std::abs(want[i]))) << i;
}

// ---- Reference

TEST(DeltaReference, AgreesWithPyTorch) {
  for (const auto& [name, by_channel] :
       {std::pair("delta_packed", false), std::pair("delta_channel_packed", true)}) {
    const auto g = golden(name);
    reference::Delta d{extent(g, "q", 1), extent(g, "q", 2), extent(g, "v", 2)};
    if (by_channel) d.gates = d.key_dim;
    List of;
    for (const int64_t length : goldens::integers(g.at("attributes").at("documents")))
      of.insert(of.end(), size_t(length), of.empty() ? 0 : of.back() + 1);
    const auto in = [&](const char* what) { return values(g, "inputs", what); };
    const auto gradient = [&](const char* what) { return values(g, "gradients", what); };
    expect_near(reference::delta(d, of, in("q"), in("k"), in("v"), in("a"), in("b")),
                values(g, "outputs", "o"), 1e-13);
    const auto out = reference::delta_backward(d, of, in("q"), in("k"), in("v"), in("a"), in("b"),
                                               values(g, "cotangents", "o"));
    expect_near(out.q, gradient("q"), 1e-13);
    expect_near(out.k, gradient("k"), 1e-13);
    expect_near(out.v, gradient("v"), 1e-13);
    expect_near(out.a, gradient("a"), 1e-13);
    expect_near(out.b, gradient("b"), 1e-13);
  }
}

// One number a state. S = 2 3 5 = 30; S' = 7 30 = 210, e = 1 - 2 210 = -419, S = 210 - 3 2 419;
// o = q S. The last token is another document's: S = 1 4 9.
TEST(DeltaReference, ByHand) {
  const List of{0, 0, -1, 1};
  const Values q{1, 10, nan, 1}, k{3, 2, nan, 4}, v{5, 1, nan, 9}, a{8, 7, nan, 6}, b{2, 3, nan, 1},
      g{1, 1, nan, 1};
  EXPECT_EQ(reference::delta({1, 1, 1}, of, q, k, v, a, b), (Values{30, -23040, 0, 36}));
  const auto d = reference::delta_backward({1, 1, 1}, of, q, k, v, a, b, g);
  // G = 1 + 7 (1 - 3 2 2) 10 = -769, 10;  w = G k = -2307, 20;  e = 5, -419
  EXPECT_EQ(d.q, (Values{30, -2304, 0, 36}));
  EXPECT_EQ(d.v, (Values{2 * -2307, 3 * 20, 0, 4}));
  EXPECT_EQ(d.b, (Values{5 * -2307, -419 * 20, 0, 36}));
  EXPECT_EQ(d.k, (Values{2 * -769 * 5, 3 * (10 * -419 - 210 * 20), 0, 9}));
  EXPECT_EQ(d.a, (Values{0, (10 - 3 * 2 * 20) * 30, 0, 0}));  // G' S
}

// Keys at right angles know nothing of each other: the rule is the recurrence of scan.hpp with b v.
TEST(DeltaReference, IsALinearAttentionWhereKeysAreAtRightAngles) {
  const List of{0, 0, 0};
  const Values q{1, 2, 3, 4, 5, 6, 7, 8, 9}, k{2, 0, 0, 0, 3, 0, 0, 0, 5}, v{1, -2, 3},
      a{0.5, -2, 4}, b{2, 3, -1}, bv{2, -6, -3};
  EXPECT_EQ(reference::delta({1, 3, 1}, of, q, k, v, a, b),
            reference::scan({1, 3, 1}, of, q, k, bv, a));
}

// A decay of each feature that is that of the head is that of the head.
TEST(DeltaReference, EqualDecaysOfFeaturesAreOneOfTheHead) {
  const List of{0, 0, 0};
  const Values q{1, 2, 3, 4, 5, 6}, k{1, -1, 2, 0.5, 3, 1}, v{1, 2, 3}, b{0.5, 0.25, 2},
      g{1, -2, 4};
  const auto one = reference::delta_backward({1, 2, 1}, of, q, k, v, Values{2, 3, 0.5}, b, g),
             two = reference::delta_backward({1, 2, 1, 2}, of, q, k, v,
                                             Values{2, 2, 3, 3, 0.5, 0.5}, b, g);
  expect_near(two.k, one.k, 1e-15);
  ASSERT_EQ(two.a.size(), 6u);
  for (size_t t = 0; t < 3; ++t) EXPECT_NEAR(two.a[2 * t] + two.a[2 * t + 1], one.a[t], 1e-12);
}

// Of magnitudes differences are sums: S' = 210, e = 1 + 2 210, S = 210 + 3 2 421.
TEST(DeltaReference, MagnitudesCancelNothing) {
  const reference::Delta d{.magnitudes = true};
  EXPECT_EQ(reference::delta(d, List{0, 0}, Values{1, 10}, Values{3, 2}, Values{5, 1}, Values{8, 7},
                             Values{2, 3}),
            (Values{30, 27360}));
}

// ---- Lines

const Registry& family() {
  static const Registry registry = [] {
    Registry r;
    family_recurrent(r);
    family_mixer(r);
    return r;
  }();
  return registry;
}
Case line_of(const std::string& text) { return parse(text, family()); }
const Contract& contract_of(const Case& line) { return family().contract(line.contract); }

// 6 heads: a state of 3 x 2 and a matrix of 3 x 3 each.
TEST(DeltaTraffic, IsStatesAndMatrices) {
  const auto counts = [](const std::string& text, int rank, const std::string& plan) {
    const Case line = line_of(text);
    List list;
    for (const Traffic& t : contract_of(line).traffic(line, plan, rank)) {
      EXPECT_EQ(t.op, plan == "ring" ? Op::shift : Op::all_gather);
      EXPECT_EQ(t.dtype, DType::f32);
      list.push_back(t.count);
    }
    return list;
  };
  EXPECT_EQ(counts("delta_context cp=4 dtype=bf16", 1, ""), (List{6 * (6 + 9), 6 * 6}));
  EXPECT_EQ(counts("delta_context cp=2 tp=2 dp=2 seq=8 batch=6 dtype=f32 gate=channel", 1, ""),
            (List{3 * 3 * (6 + 9), 3 * 3 * 6}));
  EXPECT_EQ(counts("delta_context tp=2", 1, ""), List{});
  EXPECT_EQ(counts("delta_context cp=3 dtype=f32", 1, "ring"), (List{0, 36, 0, 36}));
  EXPECT_EQ(counts("delta_context cp=4 dtype=bf16", 1, "regather"),
            (List{6 * (6 + 9), 6 * (6 + 9)}));
  // Two blocks a rank: twice the states; up the ranks and down.
  EXPECT_EQ(counts("delta_context cp=4 dtype=f32 layout=zigzag", 1, ""),
            (List{2 * 6 * (6 + 9), 2 * 6 * 6}));
  EXPECT_EQ(counts("delta_context cp=3 dtype=f32 layout=zigzag", 0, "ring"),
            (List{36, 0, 0, 0, 36, 0, 0, 0}));
  EXPECT_EQ(counts("delta_context cp=3 dtype=f32 layout=zigzag", 2, "ring"),
            (List{0, 0, 36, 0, 0, 0, 36, 0}));
}

// States travel in the type that sums are made in, whoever says it: the line or the subject.
TEST(DeltaTraffic, OfASubjectThatSumsInDoubleIsDoubles) {
  Declared doubles;
  doubles.accumulates_in_f64 = true;
  const auto type = [&](const char* text, const Declared& declared) {
    const Case line = line_of(text);
    return traffic_due(contract_of(line), declared, line, 0).at(0).dtype;
  };
  EXPECT_EQ(type("delta_context cp=2 dtype=f32", {}), DType::f32);
  EXPECT_EQ(type("delta_context cp=2 dtype=f32", doubles), DType::f64);
  EXPECT_EQ(type("delta_context cp=2 dtype=f32 acc=f64", {}), DType::f64);
  EXPECT_EQ(type("delta_context cp=2 dtype=f32 acc=f32", doubles), DType::f32);
}

// There are no integers of which no intermediate grows: lines draw numbers, and results round.
TEST(DeltaContract, HasNoExactData) {
  const Case line = line_of("delta_context");
  EXPECT_EQ(line.text("fill"), "normal");
  EXPECT_EQ(line_of("scan_context").text("fill"), "integers");
  EXPECT_FALSE(contract_of(line).has_exact_data());
  EXPECT_THROW(plan_case(line_of("delta_context fill=integers"), Declared{}, {"forward"}, family()),
               BadInput);
}

// Keys of 3 features are no longer than 1, steps and decays are in (0, 1) and (3/4, 1); what is not
// linear in them says so.
TEST(DeltaContract, KeysLengthenNothing) {
  const Case line = line_of("delta_context gate=channel");
  std::map<std::string, Operand> of;
  for (const Operand& o : contract_of(line).operands(line)) of[o.name] = o;
  EXPECT_EQ(of.at("a").shape, (List{48, 6, 3}));
  EXPECT_EQ(of.at("b").shape, (List{48, 6}));
  EXPECT_NEAR(of.at("k").through(1e9, false), 1 / std::sqrt(3.0), 1e-15);
  EXPECT_NEAR(of.at("k").through(-1, false), -std::tanh(1) / std::sqrt(3.0), 1e-15);
  EXPECT_EQ(of.at("a").through(0, false), 0.875);
  EXPECT_EQ(of.at("b").through(0, false), 0.5);
  EXPECT_EQ(of.at("b").through(-1e9, false), 0);
  for (const char* name : {"q", "v"}) EXPECT_TRUE(of.at(name).linear && !of.at(name).through);
  for (const char* name : {"k", "a", "b"}) EXPECT_FALSE(of.at(name).linear) << name;
}

TEST(DeltaContract, RefusesWhatCannotBeCut) {
  const auto refusal = [](const std::string& text) {
    const Case line = line_of(text);
    const auto refused = contract_of(line).precondition(line);
    return refused ? std::string(refused->what()) : "";
  };
  EXPECT_NE(refusal("delta_context cp=2 layout=zigzag docs=7,9").find("zigzag_row"),
            std::string::npos);
  EXPECT_EQ(refusal("delta_context cp=2 layout=zigzag_row docs=7,9"), "");
  EXPECT_NE(refusal("delta_context tp=4").find("heads divisible by tp = 4"), std::string::npos);
  EXPECT_EQ(refusal("delta_context cp=2 head_dim=20000 heads=1 tokens=2 v_dim=1"), "");
  // A matrix of a head on each rank.
  EXPECT_NE(refusal("delta_context cp=8 head_dim=20000 heads=1 tokens=8 v_dim=1")
                .find("the states of all blocks, 3200160000 elements"),
            std::string::npos);
}

TEST(Cost, CountsPairsOfTokensOfADeltaRule) {
  const auto refuse = [](const std::string& text) { refuse_too_big(line_of(text), {}, family()); };
  EXPECT_THROW(refuse("delta_context tokens=100000 heads=1"), BadInput);
  EXPECT_NO_THROW(refuse("delta_context tokens=500 heads=1"));
}

// With decay=log a is the logarithm of what it is without, and its gradient a decay times that.
TEST(DecaysAsLogarithms, AreTheSameLayerInAnotherVariable) {
  for (const char* words :
       {"scan_context fill=normal tokens=7 heads=1", "delta_context docs=3,4 gate=channel heads=1",
        "mixer_alltoall docs=4,3 fill=normal heads=2"}) {
    const Case of_factors = line_of(words),
               of_logarithms = line_of(words + std::string(" decay=log"));
    const Contract& c = contract_of(of_factors);
    const auto operands = c.operands(of_factors), others = c.operands(of_logarithms);
    EXPECT_EQ(others[3].through(0.5, false), std::log(operands[3].through(0.5, false)));
    EXPECT_EQ(others[3].shape, operands[3].shape);
    Feed feed;
    feed.fill = Fill::normal;
    std::vector<Whole> in, cotangents;
    for (const Operand& o : operands) {
      const bool result = o.role == Operand::output;
      (result ? cotangents : in)
          .push_back({o.shape, drawn_whole({of_factors, o, result, feed, DType::f64, o.shape})});
    }
    auto logarithms = in;
    for (double& x : logarithms[3].value) x = std::log(x);
    expect_near(c.forward(of_logarithms, logarithms, nullptr)[0].value,
                c.forward(of_factors, in, nullptr)[0].value, 1e-14);
    auto want = c.backward(of_factors, in, cotangents, nullptr);
    const auto got = c.backward(of_logarithms, logarithms, cotangents, nullptr);
    for (size_t i = 0; i < in[3].value.size(); ++i) want[3].value[i] *= in[3].value[i];
    for (size_t i = 0; i < want.size(); ++i) expect_near(got[i].value, want[i].value, 1e-13);
  }
}

TEST(DecaysAsLogarithms, LeaveNoExactData) {
  const Case line = line_of("scan_context decay=log fill=integers");
  try {
    plan_case(line, Declared{}, {"forward"}, family());
    ADD_FAILURE() << "not refused";
  } catch (const BadInput& e) {
    EXPECT_NE(std::string(e.what()).find("which has decay=log; use fill=normal"), std::string::npos)
        << e.what();
  }
}

// ---- Bounds

// S of 2 tokens on one rank: a decay, 3 products and 3 additions of what is known, b, and into the
// state, a token; o: q and d_k - 1 additions more.
TEST(DeltaRoundings, ByHand) {
  const auto n = reference::delta_roundings({1, 3, 2}, 2, 1);
  const int64_t state = (2 + 2) * (3 + 6);
  EXPECT_EQ(n.o, state + 3 + 1);
  EXPECT_EQ(n.q, state + 2 + 1);
  EXPECT_EQ(n.v, state + 3 + 2);
  EXPECT_EQ(n.k, state + 3 + 2 + 4);
  EXPECT_EQ(n.b, state + 2 * 3 + 2 + 3);
  EXPECT_EQ(n.a, state + 3 + 4 + 6);
  EXPECT_EQ(reference::delta_roundings({1, 3, 2, 3}, 2, 1).a, state + 3 + 4 + 2);
}

// A loop in float over the tokens of one head.
Values float_delta(size_t tokens, const std::vector<Whole>& in) {
  constexpr size_t dk = 3, dv = 2;
  const auto at = [&](size_t operand, size_t i) { return float(in[operand].value[i]); };
  float state[dk][dv] = {};
  Values o(tokens * dv);
  for (size_t t = 0; t < tokens; ++t)
    for (size_t j = 0; j < dv; ++j) {
      float known = 0, read = 0;
      for (size_t i = 0; i < dk; ++i) {
        state[i][j] *= at(3, t);
        known += at(1, t * dk + i) * state[i][j];
      }
      const float added = at(4, t) * (at(2, t * dv + j) - known);
      for (size_t i = 0; i < dk; ++i) {
        state[i][j] += at(1, t * dk + i) * added;
        read += at(0, t * dk + i) * state[i][j];
      }
      o[t * dv + j] = double(read);
    }
  return o;
}

TEST(DeltaBounds, HoldForFloatAndAreNotFarFromIt) {
  const Case line = line_of("delta_context dtype=f32 tokens=32 heads=1");
  const auto operands = contract_of(line).operands(line);
  double worst = 0;
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    Feed feed;
    feed.fill = Fill::normal, feed.seed = seed;
    std::vector<Whole> in;
    for (size_t i = 0; i < 5; ++i)
      in.push_back({operands[i].shape,
                    drawn_whole({line, operands[i], false, feed, DType::f32, operands[i].shape})});
    std::vector<Gauge> gauges;
    const Values want = contract_of(line).forward(line, in, &gauges)[0].value,
                 got = float_delta(32, in);
    for (size_t i = 0; i < want.size(); ++i) {
      const double bound = gauges[0].bound[i] * 0x1p-24 + 0x1p-24 * std::abs(want[i]);
      ASSERT_LE(std::abs(got[i] - want[i]), bound);
      worst = std::max(worst, std::abs(got[i] - want[i]) / bound);
    }
  }
  EXPECT_GT(worst, 1.0 / 500);
}

// The gradient of a document's first decay is 0. Of logarithms it comes as a sum over the tokens
// behind of q dq - k dk, in float.
TEST(DeltaBounds, OfLogarithmsHoldWhereTermsCancel) {
  const Case line = line_of("scan_context decay=log dtype=f32 fill=normal tokens=24 heads=1");
  const Contract& c = contract_of(line);
  const auto operands = c.operands(line);
  constexpr size_t T = 24, dk = 3;
  double first = 0;
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    Feed feed;
    feed.fill = Fill::normal, feed.seed = seed;
    std::vector<Whole> in, cotangents;
    for (const Operand& o : operands) {
      const bool result = o.role == Operand::output;
      (result ? cotangents : in)
          .push_back({o.shape, drawn_whole({line, o, result, feed, DType::f32, o.shape})});
    }
    std::vector<Gauge> gauges;
    const auto want = c.backward(line, in, cotangents, &gauges);
    EXPECT_EQ(want[3].value[0], 0);
    float behind = 0;
    for (size_t t = T; t-- > 0;) {
      for (size_t i = t * dk; i < (t + 1) * dk; ++i)
        behind += float(in[0].value[i]) * float(want[0].value[i]) -
                  float(in[1].value[i]) * float(want[1].value[i]);
      const double off = std::abs(double(behind) - want[3].value[t]),
                   bound = gauges[3].bound[t] * 0x1p-24;
      ASSERT_LE(off, bound) << seed << " " << t;
      if (t == 0) first = std::max(first, off);
    }
  }
  EXPECT_GT(first, 0);
}

// Running sums of three logarithms reach 6: 7 6 and 4 3 roundings more than of the decays
// themselves.
TEST(DeltaBounds, OfLogarithmsCountTheirRunningSums) {
  const auto bound = [](const std::string& words, double a) {
    const Case line =
        line_of("scan_context fill=normal tokens=3 heads=1 head_dim=1 v_dim=1 dtype=f32 " + words);
    std::vector<Whole> in;
    for (const Operand& o : contract_of(line).operands(line))
      if (o.role != Operand::output) in.push_back({o.shape, Values(3, 1)});
    in[3].value = Values(3, a);
    std::vector<Gauge> gauges;
    contract_of(line).forward(line, in, &gauges);
    return std::pair(gauges[0].terms, gauges[0].bound.size());
  };
  EXPECT_EQ(bound("decay=log", -2).first - bound("", std::exp(-2)).first, 7 * 6 + 4 * 3);
  EXPECT_EQ(bound("decay=log", -2).second, 3u);
}

// ---- On ranks

// The state goes from rank to rank, each of which waits for the one before; in zigzag up the ranks
// and, from the last one's second block on, down.
class RingDelta final : public primitives::DeltaContext {
  void gather(Rank& rank, const View& own, const View& all, bool) override {
    const int64_t n = own.shape[0];
    primitives::convert(own, all.narrow(0, rank.along(Axis::cp).rank() * n, n));
  }
  void fold(Rank& rank, const primitives::Summaries& all, const List&, const View& state,
            bool backward) override {
    Communicator& cp = rank.along(Axis::cp);
    const primitives::Blocks blocks{primitives::ContextLine(rank.line())};
    const bool zigzag = blocks.each == 2, second = zigzag && std::exchange(second_, !second_);
    const int p = cp.size(), r = cp.rank(), hop = (zigzag ? second : backward) ? -1 : 1,
              own = hop > 0 ? r : p - 1 - r;
    const int64_t row = r * blocks.each + (zigzag && second != backward);
    const View leaving = rank.workspace(state.dtype, state.shape);
    primitives::set_zero(state);
    if (second && own == 0) take_through(rank, all, first_row_, first_, state, backward);
    for (int tick = 0; tick + 1 < p; ++tick) {
      if (tick == own) take_through(rank, all, row, state, leaving, backward);
      const View none = leaving.narrow(0, 0, 0);
      cp.wait(cp.shift(tick == own ? leaving : none, tick + 1 == own ? state : none, hop));
    }
    first_ = state, first_row_ = row;
  }
  bool second_ = false;
  View first_;
  int64_t first_row_ = 0;
};

// What a block does to a state is gathered backward as well (and thrown away).
struct RegatheringDelta final : primitives::DeltaContext {
  void gather(Rank& rank, const View& own, const View& all, bool backward) override {
    if (!backward) return DeltaContext::gather(rank, own, all, false);
    const int64_t n = own.shape[1],
                  wide = n + n / rank.line().at("v_dim") * rank.line().at("head_dim");
    const View sent = rank.workspace(own.dtype, {own.shape[0], wide}),
               got = rank.workspace(own.dtype, {all.shape[0], wide});
    primitives::set_zero(sent);
    primitives::convert(own, sent.narrow(1, 0, n));
    DeltaContext::gather(rank, sent, got, true);
    primitives::convert(got.narrow(1, 0, n), all);
  }
};

template <class Kernel>
Subject planned(const char* plan) {
  Declared declared;
  declared.plan = plan;
  return {plan, "delta_context", [] { return std::make_unique<Kernel>(); }, declared};
}

TEST(Plans, OfDeltaRulesPassEveryCheck) {
  Registry registry;
  family_recurrent(registry);
  registry.add(planned<RingDelta>("ring"));
  registry.add(planned<RegatheringDelta>("regather"));
  const Options options;
  Runner runner(options, registry);
  for (const char* text : {"delta_context subject=ring cp=4 tokens=16",
                           "delta_context subject=ring cp=3 docs=5,9,1 gate=channel",
                           "delta_context subject=ring cp=2 dp=2 seq=8 batch=2",
                           "delta_context subject=regather cp=3 docs=5,9,1 gate=channel",
                           "delta_context subject=regather cp=2 tokens=12 layout=zigzag",
                           "delta_context subject=ring cp=3 tokens=12 layout=zigzag",
                           "delta_context subject=ring cp=4 docs=5,9,2 layout=zigzag_row"}) {
    const Case line = parse(text, registry);
    const Judged j = runner.run(
        line, {"forward", "gradient", "adjoint", "ledger", "lockstep", "memory", "accumulate"},
        lane_of(line));
    ASSERT_TRUE(j.completed) << text;
    for (const CheckResult& c : j.result.checks)
      EXPECT_EQ(c.verdict, Verdict::passed) << text << " " << c.check << " " << c.note;
  }
}

// ---- Bodies

// Of one head with states of one number: two tokens, one of padding, one of the next document.
struct FourTokens {
  Values a{2, -1, nan, nan}, k{3, 2, nan, 4}, b{1, 5, nan, 2};
  List reach{4, 5, -1, 0};
  primitives::DeltaRule rule() {
    return {{tensor_of(a, {4, 1}), tensor_of(reach), 1, 1, 1, 1},
            tensor_of(k, {4, 1}),
            tensor_of(b, {4, 1}),
            1};
  }
};

// S' = 20, e = 1 - 60, S = 20 - 177; S' = 157, e = 7 - 314, S = 157 - 5 2 307; 2 4 11.
TEST(DeltaStates, OfPaddingAreZeroAndItIsNotRead) {
  FourTokens t;
  Values v{1, 7, nan, 11}, entering{10}, states(4, nan), running{nan};
  primitives::DeltaStates body{t.rule(),
                               tensor_of(v, {4, 1}),
                               tensor_of(entering, {1}),
                               tensor_of(states, {4}),
                               tensor_of(running, {1}),
                               1,
                               true};
  body.at(0);
  EXPECT_EQ(states, (Values{-157, -2913, 0, 88}));
  EXPECT_EQ(running, (Values{88}));
}

// Without values: (1 - 9) 2, (1 - 20) -1, and nothing over the beginning of a document.
TEST(DeltaStates, WithoutValuesAreWhatAStateIsMultipliedBy) {
  FourTokens t;
  Values running{nan};
  primitives::DeltaStates body{t.rule(), {}, {}, {}, tensor_of(running, {1}), 1, true};
  body.at(0);
  EXPECT_EQ(running, (Values{0}));
  t.reach = {4, 5, 6, 7};
  t.a = {2, -1, 1, 1}, t.b = {1, 5, 0, 0}, t.k = {3, 2, 0, 0};
  body.at(0);
  EXPECT_EQ(running, (Values{(1 - 9) * 2 * (1 - 20) * -1}));
}

// 10 + 1 11 = 21, nothing over the beginning; then 7 and -1 (1 - 20) 7 = 133, + 15, times 2 (1 -
// 9).
TEST(DeltaAdjoints, OfPaddingAreZeroAndItIsNotRead) {
  FourTokens t;
  Values q{3, 7, nan, 1}, g{5, 1, nan, 11}, entering{10}, adjoints(4, nan), running{nan};
  primitives::DeltaAdjoints body{t.rule(),
                                 tensor_of(q, {4, 1}),
                                 tensor_of(g, {4, 1}),
                                 tensor_of(entering, {1}),
                                 tensor_of(adjoints, {4}),
                                 tensor_of(running, {1}),
                                 true};
  body.at(0);
  EXPECT_EQ(adjoints, (Values{148, 7, 0, 21}));
  EXPECT_EQ(running, (Values{-16 * 148}));
}

// [[1, 2], [3, 4]] or turned, times (1, 10), plus (100, 200); without a matrix the part alone, and
// what would go through is not read.
TEST(TakeThrough, ReadsAMatrixEitherWay) {
  Values m{1, 2, 3, 4}, part{100, 200}, before{1, 10}, after(2, nan);
  primitives::TakeThrough body{tensor_of(m, {1, 4}),
                               tensor_of(part, {1, 2}),
                               tensor_of(before, {2}),
                               tensor_of(after, {2}),
                               2,
                               1,
                               false,
                               true};
  const auto result = [&] {
    for (int64_t i = 0; i < 2; ++i) body.at(i);
    return after;
  };
  EXPECT_EQ(result(), (Values{121, 243}));
  body.turned = true;
  EXPECT_EQ(result(), (Values{131, 242}));
  body.m = body.before = {};
  EXPECT_EQ(result(), (Values{100, 200}));
}

}  // namespace delta_test
}  // namespace
}  // namespace shardproof
