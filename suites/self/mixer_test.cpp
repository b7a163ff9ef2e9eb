// The mixer between two all-to-alls: what PyTorch computes and numbers that can be followed by
// hand, bounds against float, calls in closed form, refusals; one exchange of everything; twins on
// every line where they can change anything.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <memory>

#include "oracle/cost.hpp"
#include "oracle/drawn.hpp"
#include "oracle/registry.hpp"
#include "primitives/calls.hpp"
#include "primitives/mixer_alltoall.hpp"
#include "reference/mixer.hpp"
#include "suites/attention.hpp"
#include "suites/self/goldens.hpp"
#include "suites/self/run_lines.hpp"

namespace shardproof {

void family_mixer(Registry&);
void controls_mixer(Registry&);

namespace {
namespace mixer_test {

using reference::Values;
using List = std::vector<int64_t>;

const double nan = std::nan("");

void expect_near(const Values& got, const Values& want, double relative) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i)
    EXPECT_NEAR(got[i], want[i], relative * (1 + std::abs(want[i]))) << i;
}

// ---- Reference

TEST(MixerReference, AgreesWithPyTorch) {
  const auto g = goldens::golden("mixer_packed");
  const reference::Mixer m{goldens::extent(g, "x", 1), goldens::extent(g, "b", 1),
                           goldens::extent(g, "x", 2), goldens::extent(g, "b", 2),
                           goldens::extent(g, "wx", 2)};
  List of;
  for (const int64_t length : goldens::integers(g.at("attributes").at("documents")))
    of.insert(of.end(), size_t(length), of.empty() ? 0 : of.back() + 1);
  std::map<std::string, Values> in;
  for (const char* name : {"x", "b", "c", "a", "wx", "wb", "wc", "bx", "bb", "bc", "d"})
    in[name] = goldens::values(g, "inputs", name);
  const reference::MixerInputs inputs{in["x"],  in["b"],  in["c"],  in["a"],  in["wx"], in["wb"],
                                      in["wc"], in["bx"], in["bb"], in["bc"], in["d"]};
  expect_near(reference::mixer(m, of, inputs), goldens::values(g, "outputs", "y"), 1e-13);
  const auto d = reference::mixer_backward(m, of, inputs, goldens::values(g, "cotangents", "y"));
  const std::map<std::string, const Values*> gradients{
      {"x", &d.x},   {"b", &d.b},   {"c", &d.c},   {"a", &d.a},   {"wx", &d.wx}, {"wb", &d.wb},
      {"wc", &d.wc}, {"bx", &d.bx}, {"bb", &d.bb}, {"bc", &d.bc}, {"d", &d.d}};
  for (const auto& [name, got] : gradients) {
    SCOPED_TRACE(name);
    expect_near(*got, goldens::values(g, "gradients", name.c_str()), 1e-13);
  }
}

// One channel of each. x' = 2, 10 1 + 2 + 1 = 13; b' = 2, 2; c' = 1, 1 + 3; S = 2 2 = 4,
// 3 4 + 2 13 = 38; y = 4 + 5 2, 4 38 + 5 13. The last token is another document's.
TEST(MixerReference, ByHand) {
  const List of{0, 0, -1, 1};
  const Values x{1, 2, nan, 3}, b{1, 1, nan, 2}, c{1, 3, nan, 1}, a{9, 3, nan, 9}, wx{10, 1},
      wb{0, 1}, wc{1, 1}, bx{1}, bb{1}, bc{0}, d{5}, g{1, 1, nan, 1};
  const reference::MixerInputs in{x, b, c, a, wx, wb, wc, bx, bb, bc, d};
  const reference::Mixer m{1, 1, 1, 1, 2};
  EXPECT_EQ(reference::mixer(m, of, in), (Values{14, 217, 0, 32}));
  // G = 3 4 + 1, 4; dx' = G b' + d = 31, 13, 8; db' = G x' = 26, 52, 4; dc' = S = 4, 38, 12
  const auto got = reference::mixer_backward(m, of, in, g);
  EXPECT_EQ(got.x, (Values{31 + 10 * 13, 13, 0, 8}));
  EXPECT_EQ(got.b, (Values{26, 52, 0, 4}));
  EXPECT_EQ(got.c, (Values{4 + 38, 38, 0, 12}));
  EXPECT_EQ(got.a, (Values{0, 4 * 4, 0, 0}));
  EXPECT_EQ(got.wx, (Values{13 * 1, 31 * 1 + 13 * 2 + 8 * 3}));
  EXPECT_EQ(got.wb, (Values{52 * 1, 26 * 1 + 52 * 1 + 4 * 2}));
  EXPECT_EQ(got.wc, (Values{38 * 1, 4 * 1 + 38 * 3 + 12 * 1}));
  EXPECT_EQ(got.bx, (Values{31 + 13 + 8}));
  EXPECT_EQ(got.bb, (Values{26 + 52 + 4}));
  EXPECT_EQ(got.bc, (Values{4 + 38 + 12}));
  EXPECT_EQ(got.d, (Values{2 + 13 + 4}));
  EXPECT_EQ(got.read, (Values{1, 4, 0, 1}));
  EXPECT_EQ(got.written, (Values{2, 2, 0, 3}));
  EXPECT_EQ(got.of_read, (Values{4, 38, 0, 12}));
  EXPECT_EQ(got.of_written, (Values{26, 52, 0, 4}));
}

// Two groups of which heads 0, 1 and heads 2, 3 read one are four groups, of which two are equal;
// their gradients add up.
TEST(MixerReference, HeadsOfAGroupAddUp) {
  const List of{0, 0};
  const auto ramp = [](size_t n, double step) {
    Values v(n);
    for (size_t i = 0; i < n; ++i) v[i] = double(i) * step - 1;
    return v;
  };
  const auto twice = [](const Values& v, size_t n) {  // each run of n numbers
    Values all;
    for (size_t i = 0; i < v.size(); i += n)
      for (int copy = 0; copy < 2; ++copy)
        all.insert(all.end(), v.begin() + std::ptrdiff_t(i), v.begin() + std::ptrdiff_t(i + n));
    return all;
  };
  const Values x = ramp(8, 0.25), a{1, 0.5, -1, 2, 0.5, 3, 1, -2}, b = ramp(4, 0.5),
               c = ramp(4, -0.75), wx = ramp(8, 0.5), wb = ramp(4, 0.75), wc = ramp(4, 1.5),
               bx = ramp(4, 1), bb{2, -1}, bc{0.5, 3}, d{1, 2, 3, 4}, g = ramp(8, 0.5);
  const Values b2 = twice(b, 1), c2 = twice(c, 1), wb2 = twice(wb, 2), wc2 = twice(wc, 2),
               bb2 = twice(bb, 1), bc2 = twice(bc, 1);
  const reference::MixerInputs two{x, b, c, a, wx, wb, wc, bx, bb, bc, d},
      four{x, b2, c2, a, wx, wb2, wc2, bx, bb2, bc2, d};
  EXPECT_EQ(reference::mixer({4, 2, 1, 1, 2}, of, two),
            reference::mixer({4, 4, 1, 1, 2}, of, four));
  const auto got = reference::mixer_backward({4, 2, 1, 1, 2}, of, two, g),
             want = reference::mixer_backward({4, 4, 1, 1, 2}, of, four, g);
  EXPECT_EQ(got.x, want.x);
  EXPECT_EQ(got.a, want.a);
  for (size_t t = 0; t < 2; ++t)
    for (size_t group = 0; group < 2; ++group) {
      const size_t at = 4 * t + 2 * group;
      EXPECT_NEAR(got.b[2 * t + group], want.b[at] + want.b[at + 1], 1e-12);
      EXPECT_NEAR(got.c[2 * t + group], want.c[at] + want.c[at + 1], 1e-12);
    }
  EXPECT_NEAR(got.bb[1], want.bb[2] + want.bb[3], 1e-12);
  EXPECT_NEAR(got.wc[0], want.wc[0] + want.wc[2], 1e-12);
}

// 2 tokens, a filter of 2 taps: 3 roundings each. o of one rank, as of the recurrence, and 1.
TEST(MixerRoundings, ByHand) {
  const reference::Mixer m{4, 2, 3, 5, 2};
  const auto n = reference::mixer_roundings(m, 2, 10);
  const int64_t state = 2 * (2 + 1) + 1;
  EXPECT_EQ(n.y, 3 * 3 + (state + 5 + 1) + 1);
  EXPECT_EQ(n.x, 2 * 3 + (state + 5 + 1) + 1 + 2);
  EXPECT_EQ(n.group, 2 * 3 + (state + 3 + 1) + 1 + 2);
  EXPECT_EQ(n.a, 3 * 3 + (state + 2 + 2 + 3 * 5));
  EXPECT_EQ(n.filter, 2 * 3 + (state + 5 + 1) + 1 + 10);
  EXPECT_EQ(n.d, 3 + 10 * 3);
  EXPECT_EQ(reference::mixer_roundings({1, 1, 1, 1, 9}, 2, 1).d,
            3 + 1);  // no more taps than tokens
}

// ---- Lines

const Registry& family() {
  static const Registry registry = [] {
    Registry r;
    family_mixer(r);
    controls_mixer(r);
    return r;
  }();
  return registry;
}
Case line_of(const std::string& text) { return parse(text, family()); }
const Contract& contract_of(const Case& line) { return family().contract(line.contract); }

using Calls = std::vector<std::string>;
Calls calls(const std::string& text, const std::string& plan = "") {
  const Case line = line_of(text);
  Calls list;
  for (const Traffic& t : contract_of(line).traffic(line, plan, 0))
    list.push_back((t.backward ? "B " : "F ") + std::string(name(t.op)) + " " +
                   std::to_string(t.count) + " " + name(t.dtype) + " " + t.label);
  return list;
}

// 12 tokens a rank, 8 heads of 2 and one group of 3 that four ranks work with; (16 + 6) 5 + 8
// parameters.
TEST(MixerTraffic, IsAnExchangeOfEachOperand) {
  EXPECT_EQ(
      calls("mixer_alltoall cp=4 dtype=bf16 wire=f32"),
      (Calls{"F all_to_all 192 bf16 cp", "F all_to_all 144 bf16 cp", "F all_to_all 144 bf16 cp",
             "F all_to_all 96 bf16 cp", "F all_to_all 192 bf16 cp", "B all_to_all 192 bf16 cp",
             "B all_to_all 192 bf16 cp", "B all_to_all 144 f32 cp", "B all_to_all 144 f32 cp",
             "B all_to_all 96 bf16 cp", "B all_reduce 118 f32 cp"}));
  EXPECT_EQ(calls("mixer_alltoall tp=2"), Calls{});
  // Of whole groups no part of a sum travels back.
  EXPECT_EQ(calls("mixer_alltoall cp=4 groups=4 dtype=bf16 wire=f32")[7],
            "B all_to_all 144 bf16 cp");
}

// 4 tokens of each of 3 sequences; 2 of 4 heads, 2 of 4 groups, none of which is copied.
TEST(MixerTraffic, OfSeveralAxes) {
  EXPECT_EQ(calls("mixer_alltoall cp=2 tp=2 dp=2 seq=8 batch=6 heads=4 groups=4"),
            (Calls{"F all_to_all 48 f64 cp", "F all_to_all 72 f64 cp", "F all_to_all 72 f64 cp",
                   "F all_to_all 24 f64 cp", "F all_to_all 48 f64 cp", "B all_to_all 48 f64 cp",
                   "B all_to_all 48 f64 cp", "B all_to_all 72 f64 cp", "B all_to_all 72 f64 cp",
                   "B all_to_all 24 f64 cp", "B all_reduce 82 f64 cp,dp"}));
}

TEST(MixerTraffic, OfOneExchangeOfAll) {
  EXPECT_EQ(
      calls("mixer_alltoall cp=4 dtype=bf16 wire=f32", "packed"),
      (Calls{"F all_to_all 576 bf16 cp", "F all_to_all 192 bf16 cp", "B all_to_all 192 bf16 cp",
             "B all_to_all 576 f32 cp", "B all_reduce 118 f32 cp"}));
}

std::string refusal(const std::string& text) {
  const Case line = line_of(text);
  const auto refused = contract_of(line).precondition(line);
  return refused ? refused->what() : "";
}
TEST(MixerRefusals, SayWhatToDo) {
  const auto holds = [](const std::string& line, const std::string& words) {
    const std::string told = refusal("mixer_alltoall " + line);
    EXPECT_NE(told.find(words), std::string::npos) << line << ": " << told;
  };
  holds("cp=2 tp=2 heads=6", "heads divisible by tp*cp = 4");
  holds("tp=2 heads=4 groups=1", "groups divisible by tp = 2");
  holds("heads=4 groups=3", "heads divisible by groups");
  holds("cp=4 heads=12 groups=3",
        "groups divisible by cp, or cp by them, met 3 groups on a tp rank, cp=4");
  holds("cp=4 heads=24 groups=6", "6 groups on a tp rank, cp=4");
  // One call takes as many elements as MPI counts.
  holds("tokens=2 heads=16777216 head_dim=128 width=1", "a whole operand, 4294967296 elements");
  holds("tokens=1 heads=4194304 head_dim=1 width=1024", "all parameters, ");
  // (2^21 + 2) channels and as many d as heads, a bias and 511 taps; 2 + 4 2^24 channels, 2 d.
  holds("tokens=1 heads=2097152 head_dim=1 state_dim=1 width=511", "all parameters, 2147484672 ");
  holds("tokens=1 heads=2 groups=2 head_dim=1 state_dim=16777216 width=31",
        "all parameters, 2147483776 ");
  // A group of 2^24 features as 8 ranks have it, in 16 rows.
  holds("cp=8 tokens=16 heads=8 head_dim=1 state_dim=16777216 width=1",
        "a whole operand, 2147483648 elements");
  for (const char* legal : {"cp=4 heads=12 groups=2", "cp=4 heads=24 groups=4",
                            "cp=4 heads=24 groups=8", "cp=2 tp=3 heads=6 groups=3",
                            "cp=2 layout=zigzag docs=7,9", "cp=2 layout=zigzag_row docs=7,9",
                            "tokens=1 heads=2097152 head_dim=1 state_dim=1 width=510",
                            "tokens=1 heads=2 groups=2 head_dim=1 state_dim=16777216 width=30",
                            "cp=8 tokens=8 heads=8 head_dim=1 state_dim=16777216 width=1"})
    EXPECT_EQ(refusal(std::string("mixer_alltoall ") + legal), "") << legal;
}

// Of 8 tokens and a filter of 2 taps: x' is at most 3 B^2. 16 tokens sum in dw 8 4 2 3^2 + 1
// products of 6 numbers at most, da (8 8 / 4) 2 4 3^3 + 1 of 7. Of 16 documents of a token x' is at
// most 2 B^2, and dw of the two is the longer sum: 16 (4 2^2 + 1), or with a group of 4 heads
// 16 (4 4 2^2 + 1).
TEST(MixerContract, IntegersFitTheLongestProducts) {
  const auto range = [](const std::string& words, const char* heads = "1") {
    const Case line =
        line_of("mixer_alltoall head_dim=4 state_dim=2 width=2 " + words + " heads=" + heads);
    return contract_of(line).integer_range(line);
  };
  const auto greatest = [](double terms, int factors, int bits) {
    return std::optional<int64_t>(std::floor(std::pow(std::ldexp(1, bits) / terms, 1.0 / factors)));
  };
  const double dw = 16 * (8 * 4 * 9 + 1), da = 16 * 2 * 4 * 27 + 1;
  EXPECT_EQ(range("docs=8,8"), std::min(greatest(dw, 6, 53), greatest(da, 7, 53)));
  EXPECT_EQ(range("docs=8,8 dtype=f32"), greatest(dw, 6, 24));
  EXPECT_EQ(range("docs=8,8 dtype=bf16"), std::nullopt);
  const std::string of_a_token = "docs=1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1";
  EXPECT_EQ(range(of_a_token), greatest(16 * (4 * 4 + 1), 6, 53));
  EXPECT_EQ(range(of_a_token, "4"), greatest(16 * (4 * 4 * 4 + 1), 6, 53));
  EXPECT_EQ(range("docs=8,8 decay=log fill=normal"), std::nullopt);
}

TEST(MixerContract, HeadsAndGroupsFollowTheRanks) {
  EXPECT_EQ(line_of("mixer_alltoall cp=3 tp=2").at("heads"), 12);
  EXPECT_EQ(line_of("mixer_alltoall cp=3 tp=2").at("groups"), 2);
  for (const Operand& o :
       contract_of(line_of("mixer_alltoall")).operands(line_of("mixer_alltoall")))
    EXPECT_EQ(o.linear, o.name != "a");
}

TEST(Cost, CountsPairsOfTokensOfAMixer) {
  const auto refuse = [](const std::string& text) { refuse_too_big(line_of(text), {}, family()); };
  EXPECT_THROW(refuse("mixer_alltoall tokens=100000 heads=1 fill=normal"), BadInput);
  EXPECT_NO_THROW(refuse("mixer_alltoall tokens=500 heads=1 fill=normal"));
}

// ---- Bounds

// One head in float over its tokens: each product and each sum is rounded, and what is stored on
// the way by `store`.
template <class Store>
struct FloatMixer {
  static constexpr size_t dim = 2, n = 3, width = 4;
  using Floats = std::vector<float>;

  size_t tokens;
  const std::vector<Whole>& in;
  Store store;
  Floats x, b, c, states;

  FloatMixer(size_t tokens, const std::vector<Whole>& in, Store store)
      : tokens(tokens),
        in(in),
        store(store),
        x(filtered(0, dim)),
        b(filtered(1, n)),
        c(filtered(2, n)),
        states(tokens * n * dim) {
    for (size_t t = 0; t < tokens; ++t)
      for (size_t i = 0; i < n; ++i)
        for (size_t j = 0; j < dim; ++j) {
          const float before = t > 0 ? states[state(t - 1, i, j)] : 0;
          states[state(t, i, j)] = at(3, t) * before + b[t * n + i] * x[t * dim + j];
        }
  }
  float at(size_t operand, size_t i) const { return float(in[operand].value[i]); }
  static size_t state(size_t t, size_t i, size_t j) { return (t * n + i) * dim + j; }
  static size_t tap(size_t channel, size_t lag) { return channel * width + width - 1 - lag; }
  static Values values(const Floats& v) { return {v.begin(), v.end()}; }

  Floats filtered(size_t operand, size_t channels) const {
    Floats out(tokens * channels);
    for (size_t i = 0; i < out.size(); ++i) {
      const size_t t = i / channels, channel = i % channels;
      float sum = at(7 + operand, channel);
      for (size_t lag = 0; lag < width && lag <= t; ++lag)
        sum += at(4 + operand, tap(channel, lag)) * at(operand, i - lag * channels);
      out[i] = float(store(sum));
    }
    return out;
  }
  Values result() const {
    Floats y(tokens * dim);
    for (size_t t = 0; t < tokens; ++t)
      for (size_t j = 0; j < dim; ++j) {
        float read = 0;
        for (size_t i = 0; i < n; ++i) read += c[t * n + i] * states[state(t, i, j)];
        y[t * dim + j] = read + at(10, 0) * x[t * dim + j];
      }
    return values(y);
  }
  // Puts the gradients of an operand, its filter and its bias where they belong.
  void filter_back(size_t operand, const Floats& g, size_t channels,
                   std::vector<Values>& to) const {
    Floats of_x(g.size()), w(channels * width), bias(channels);
    for (size_t i = 0; i < g.size(); ++i) {
      const float stored = float(store(g[i]));
      const size_t t = i / channels, channel = i % channels;
      bias[channel] += stored;
      for (size_t lag = 0; lag < width && lag <= t; ++lag) {
        of_x[i - lag * channels] += at(4 + operand, tap(channel, lag)) * stored;
        w[tap(channel, lag)] += stored * at(operand, i - lag * channels);
      }
    }
    to[operand] = values(of_x), to[4 + operand] = values(w), to[7 + operand] = values(bias);
  }
  std::vector<Values> gradients(const Values& cotangent) const {
    std::vector<Values> to(11);
    Floats G(n * dim), of_x(tokens * dim), of_b(tokens * n), of_c(tokens * n), of_a(tokens), d(1);
    for (size_t t = tokens; t-- > 0;)
      for (size_t j = 0; j < dim; ++j) {
        const float g = float(cotangent[t * dim + j]), own = x[t * dim + j];
        of_x[t * dim + j] = at(10, 0) * g, d[0] += g * own;
        for (size_t i = 0; i < n; ++i) {
          float& G_ij = G[i * dim + j];
          G_ij = (t + 1 < tokens ? at(3, t + 1) * G_ij : 0) + c[t * n + i] * g;
          of_c[t * n + i] += states[state(t, i, j)] * g;
          of_b[t * n + i] += G_ij * own;
          of_x[t * dim + j] += G_ij * b[t * n + i];
          if (t > 0) of_a[t] += G_ij * states[state(t - 1, i, j)];
        }
      }
    filter_back(0, of_x, dim, to), filter_back(1, of_b, n, to), filter_back(2, of_c, n, to);
    to[3] = values(of_a), to[10] = values(d);
    return to;
  }
};

// Of the result, then of each gradient, the worst share of its bound that 20 draws are off by.
template <class Store>
Values worst_shares(const std::string& words, DType type, const Store& store) {
  constexpr size_t tokens = 32;
  const Case line = line_of("mixer_alltoall fill=normal tokens=32 heads=1 " + words);
  const Contract& contract = contract_of(line);
  Values worst(12);
  const auto compare = [&](const Values& got, const Values& want, const Gauge& gauge,
                           double& most) {
    for (size_t i = 0; i < want.size(); ++i) {
      const double bound = gauge.bound[i] * 0x1p-24 + unit_roundoff(type) * std::abs(want[i]);
      const double off = std::abs(store(float(got[i])) - want[i]);
      if (off > 0) most = std::max(most, off / bound);
    }
  };
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    Feed feed;
    feed.fill = Fill::normal, feed.seed = seed;
    std::vector<Whole> in, cotangents;
    for (const Operand& o : contract.operands(line)) {
      const bool result = o.role == Operand::output;
      (result ? cotangents : in)
          .push_back({o.shape, drawn_whole({line, o, result, feed, type, o.shape})});
    }
    std::vector<Gauge> gauges;
    const FloatMixer<Store> met(tokens, in, store);
    const Values y = contract.forward(line, in, &gauges)[0].value;
    compare(met.result(), y, gauges[0], worst[0]);
    const auto want = contract.backward(line, in, cotangents, &gauges);
    const auto got = met.gradients(cotangents[0].value);
    for (size_t i = 0; i < want.size(); ++i)
      compare(got[i], want[i].value, gauges[i], worst[i + 1]);
  }
  return worst;
}

TEST(MixerBounds, HoldForFloatAndAreNotFarFromIt) {
  for (const double share :
       worst_shares("dtype=f32", DType::f32, [](float x) { return double(x); })) {
    EXPECT_LE(share, 1);
    EXPECT_GT(share, 1.0 / 1000);
  }
}

// In bf16 what is stored on the way is most of the error.
TEST(MixerBounds, HoldForWhatIsStoredInHalves) {
  const auto rounded = [](float x) { return round_to(double(x), DType::bf16); };
  for (const double share : worst_shares("dtype=bf16", DType::bf16, rounded)) {
    EXPECT_LE(share, 1);
    EXPECT_GT(share, 1.0 / 100);
  }
}

// ---- On ranks

// Everything that comes by token travels in one exchange: of each token what each rank gets of it
// lies side by side.
class PackedMixer final : public primitives::MixerAlltoall {
  // Calls each(view, its columns of [.., p, all of them]).
  template <class Each>
  static int64_t each_part(const std::vector<View>& views, int64_t p, const Each& each) {
    int64_t at = 0;
    for (const View& v : views) {
      const int64_t n = v.shape.back() * v.shape[v.shape.size() - 2] / p;
      each(v, at, n);
      at += n;
    }
    return at;
  }
  static std::vector<int64_t> shape_of(const View& v, int64_t rows, int64_t p, int64_t features) {
    std::vector<int64_t> shape = v.shape;
    shape[0] = rows, shape[shape.size() - 2] = p, shape.back() = features;
    return shape;
  }
  // From parts that `p_in` ranks share to parts that `p_out` do: one of them is 1.
  static std::vector<View> turned(Rank& rank, const std::vector<View>& from, int64_t p_in,
                                  int64_t p_out, DType type) {
    const int64_t rows = from[0].shape[0], more = rows * p_in / p_out,
                  features = each_part(from, p_in, [](const View&, int64_t, int64_t) {});
    const View sent = rank.workspace(type, shape_of(from[0], rows, p_in, features)),
               got = rank.workspace(type, shape_of(from[0], more, p_out, features));
    const int last = int(sent.shape.size()) - 1;
    each_part(from, p_in, [&](const View& v, int64_t at, int64_t n) {
      primitives::convert(v, sent.narrow(last, at, n));
    });
    primitives::all_to_all(rank, rank.along(Axis::cp), sent, got, p_in > 1 ? last - 1 : 0,
                           p_in > 1 ? 0 : last - 1);
    std::vector<View> list;
    each_part(from, p_in, [&](const View& v, int64_t at, int64_t n) {
      list.push_back(rank.workspace(
          v.dtype, shape_of(v, more, v.shape[v.shape.size() - 2] * p_out / p_in, v.shape.back())));
      primitives::convert(got.narrow(last, at, n), list.back());
    });
    return list;
  }
  std::vector<View> exchanged(Rank& rank, const std::vector<View>& by_tokens) override {
    const int64_t p = rank.along(Axis::cp).size();
    if (p == 1 || by_tokens.size() == 1) return MixerAlltoall::exchanged(rank, by_tokens);
    return turned(rank, by_tokens, p, 1, by_tokens[0].dtype);
  }
  std::vector<View> returned(Rank& rank, const std::vector<View>& by_heads) override {
    const int64_t p = rank.along(Axis::cp).size();
    if (p == 1 || by_heads.size() == 1) return MixerAlltoall::returned(rank, by_heads);
    return turned(rank, by_heads, 1, p, by_heads[1].dtype);
  }
};

const Registry& with_plan() {
  static const Registry registry = [] {
    Registry r;
    family_mixer(r);
    Declared declared;
    declared.plan = "packed";
    r.add({"packed", "mixer_alltoall", [] { return std::make_unique<PackedMixer>(); }, declared});
    return r;
  }();
  return registry;
}

TEST(MixerPlans, OfOneExchangePassEveryCheck) {
  for (const char* line : {"cp=4 tokens=16", "cp=4 docs=5,9,2 groups=2 layout=zigzag",
                           "cp=2 docs=3,1,4", "cp=2 dp=2 seq=8 batch=2 groups=2",
                           "cp=3 tokens=12 layout=zigzag dtype=bf16 wire=f32 "
                           "fill=normal",
                           "cp=2 tp=2 tokens=8 heads=4", "tokens=6"}) {
    const Judged j =
        run_in(with_plan(), std::string("mixer_alltoall subject=packed ") + line,
               {"forward", "gradient", "adjoint", "ledger", "lockstep", "memory", "accumulate"});
    ASSERT_TRUE(j.completed) << line;
    for (const CheckResult& c : j.result.checks)
      EXPECT_EQ(c.verdict, Verdict::passed) << line << " " << c.check << " " << c.note;
  }
}

// ---- Twins

// What decides whether a twin can differ on a line.
struct Told {
  explicit Told(const Case& line)
      : p(line.ranks(Axis::cp)),
        tp(line.ranks(Axis::tp)),
        heads(line.at("heads") / line.ranks(Axis::tp)),
        groups(line.at("groups") / line.ranks(Axis::tp)),
        width(line.at("width")),
        zigzag(p > 1 && line.text("layout") != "contiguous"),
        by_document(contexts::packed(line) && line.text("layout") == "zigzag"),
        wider_wire(line.text("wire") == "f32" && line.dtype() == DType::bf16),
        alone(line.ranks(Axis::dp) == 1),
        logarithms(line.text("decay") == "log") {
    for (const PackedToken& t : contexts::labels_of(line, false)) positions.push_back(t);
    blocks = p * (zigzag ? 2 : 1), batch = contexts::batch_of(line);
    const Mesh mesh = line.mesh();
    for (int r = 0; r < mesh.world(); ++r)
      if (r % p != mesh.coordinate(r, Axis::cp)) cp_is_not_fastest = true;
  }
  bool copied() const { return groups < p; }
  bool several_documents() const {
    return std::any_of(positions.begin(), positions.end(),
                       [](const PackedToken& t) { return t.document > 0; });
  }
  bool has_padding() const {
    return std::any_of(positions.begin(), positions.end(),
                       [](const PackedToken& t) { return t.document < 0; });
  }
  // A document that begins right behind another: padding hands on no state.
  bool documents_touch() const {
    for (size_t i = size_t(batch); i < positions.size(); ++i)
      if (positions[i].document > 0 && positions[i].position == 0 &&
          positions[i - size_t(batch)].document >= 0)
        return batch == 1;
    return false;
  }
  // A block that begins inside of a document.
  bool cut_document() const {
    const int64_t rows = int64_t(positions.size()) / batch, n = rows / blocks;
    for (int64_t row = n; row < rows; row += n)
      if (positions[size_t(row * batch)].document >= 0 &&
          positions[size_t(row * batch)].position > 0)
        return true;
    return false;
  }
  int64_t p, tp, heads, groups, width, blocks = 1, batch = 1;
  bool zigzag, by_document, wider_wire, alone, logarithms, cp_is_not_fastest = false;
  std::vector<PackedToken> positions;
};

const std::map<std::string, std::function<bool(const Told&)>>& can_differ() {
  const auto always = [](const Told&) { return true; };
  const auto on_ranks = [](const Told& t) { return t.p > 1; };
  const auto parts = [](const Told& t) { return t.p > 1 || !t.alone; };
  const auto zigzag = [](const Told& t) { return t.zigzag; };
  const auto copied = [](const Told& t) { return t.copied(); };
  const auto several_copied = [](const Told& t) { return t.copied() && t.groups > 1; };
  static const std::map<std::string, std::function<bool(const Told&)>> table{
      {"order_not_undone", zigzag},
      {"order_not_redone", zigzag},
      {"order_ignored", zigzag},
      {"order_of_the_whole_row",
       [](const Told& t) { return t.by_document && t.p > 1 && t.several_documents(); }},
      {"cotangent_not_put_in_order", zigzag},
      {"gradients_not_put_back", zigzag},
      {"blocks_from_the_last_rank", on_ranks},
      {"blocks_to_the_last_rank", on_ranks},
      {"b_and_c_for_each_other", always},
      {"heads_dealt_in_turn", [](const Told& t) { return t.p > 1 && t.heads > t.p; }},
      {"slices_of_world_ranks", [](const Told& t) { return t.cp_is_not_fastest; }},
      {"filter_of_neighbour", on_ranks},
      {"skip_of_first_heads", on_ranks},
      {"filter_of_groups_by_rank", several_copied},
      {"groups_as_tiles", several_copied},
      {"groups_in_turn", [](const Told& t) { return t.groups > t.p && t.heads > t.groups; }},
      {"first_copy_only", copied},
      {"copies_averaged", copied},
      {"copies_in_storage_type", [](const Told& t) { return t.copied() && t.wider_wire; }},
      {"filter_across_documents",
       [](const Told& t) { return t.batch == 1 && t.several_documents() && t.width > 1; }},
      {"state_across_documents", [](const Told& t) { return t.documents_touch(); }},
      {"padding_mixed", [](const Told& t) { return t.has_padding(); }},
      {"states_shared_by_forwards", always},
      {"decay_as_power_of_two", [](const Told& t) { return t.logarithms; }},
      {"decay_gradient_as_of_logarithm", [](const Told& t) { return t.logarithms; }},
      {"parameter_gradients_summed_over_tp", [](const Told& t) { return t.tp > 1; }},
      {"group_filter_of_one_copy", copied},
      {"filter_within_blocks", [](const Told& t) { return t.cut_document() && t.width > 1; }},
      {"state_within_blocks", [](const Told& t) { return t.cut_document(); }},
      {"parameter_gradients_local", parts},
      {"parameter_gradients_averaged", parts},
      {"filter_gradient_summed_twice", parts},
      {"parameter_gradients_not_summed_over_cp", on_ranks},
      {"skip_gradient_left_out", parts},
      {"skip_gradient_of_a_rank_missing", on_ranks},
  };
  return table;
}

// The checks that a twin names find it wherever it can differ, and no check finds anything
// elsewhere. The adjoint is asked of exact data: in halves one operand's share of a result drowns
// in what all the others round.
TEST(MixerTwins, AreCaughtOnEveryLineWhereTheyDiffer) {
  const char* const lines[] = {
      "cp=2 docs=5,1,6 layout=zigzag groups=2",
      "cp=2 docs=4,4 width=1",
      "cp=3 docs=5,1,6 layout=zigzag_row",
      "cp=4 tokens=16 groups=2 layout=zigzag",
      "cp=4 tokens=8 heads=4",
      "cp=2 tp=2 tokens=8 heads=8 groups=4",
      "cp=2 tokens=8 heads=8 groups=4",
      "cp=2 tp=2 order=cp,tp tokens=8",
      "cp=2 dp=2 seq=8 batch=2",
      "cp=4 tokens=16 groups=2 dtype=bf16 wire=f32 fill=normal",
      "cp=3 tokens=6 decay=log fill=normal",
      "docs=3,4",
  };
  for (const Control& twin : family().controls()) {
    const auto of = can_differ().find(twin.name);
    ASSERT_NE(of, can_differ().end()) << twin.name;
    for (const char* words : lines) {
      const std::string text = std::string("mixer_alltoall ") + words + " control=" + twin.name;
      const Case line = line_of(text);
      const Told told(line);
      const bool differs = of->second(told);
      std::vector<std::string> checks;
      for (const char* check :
           {"forward", "gradient", "adjoint", "ledger", "replica", "leak", "accumulate"}) {
        const std::string all = "," + twin.check + ",", one = check;
        const bool named = all.find("," + one + ",") != std::string::npos;
        if (differs && !named) continue;
        if (one == "adjoint" && line.text("fill") != "integers") continue;
        if (one == "leak" && !told.several_documents()) continue;
        if (one == "replica" && line.mesh().world() == 1) continue;
        checks.push_back(one);
      }
      const Judged j = run_in(family(), text, checks);
      ASSERT_TRUE(j.completed) << text;
      for (const CheckResult& c : j.result.checks)
        EXPECT_EQ(std::string(name(c.verdict)), name(differs ? Verdict::failed : Verdict::passed))
            << text << " " << c.check;
    }
  }
}

}  // namespace mixer_test
}  // namespace
}  // namespace shardproof
