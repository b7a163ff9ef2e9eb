// Convolutions and recurrences whose state crosses ranks: what PyTorch computes and numbers that
// can be followed by hand, bounds against float, calls in closed form, refusals; and subjects that
// exchange in another way.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>
#include <set>
#include <tuple>

#include "fixtures/random.hpp"
#include "oracle/cost.hpp"
#include "oracle/drawn.hpp"
#include "oracle/overflow.hpp"
#include "oracle/registry.hpp"
#include "oracle/run.hpp"
#include "primitives/calls.hpp"
#include "primitives/conv_context.hpp"
#include "primitives/scan_context.hpp"
#include "reference/conv.hpp"
#include "reference/scan.hpp"
#include "reference/sequences.hpp"
#include "suites/self/goldens.hpp"
#include "suites/self/run_lines.hpp"
#include "suites/self/tensors.hpp"

namespace shardproof {

void family_recurrent(Registry&);
void controls_recurrent(Registry&);

namespace {
namespace recurrent_test {

using reference::Values;
using List = std::vector<int64_t>;
using goldens::extent;
using goldens::golden;
using goldens::values;

void expect_near(const Values& got, const Values& want, double relative) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i)
    EXPECT_NEAR(got[i], want[i], relative * (1 + std::abs(want[i]))) << i;
}

List sequences_of_documents(const goldens::Golden& g) {
  List list;
  int64_t document = 0;
  for (const int64_t length : goldens::integers(g.at("attributes").at("documents")))
    list.insert(list.end(), size_t(length), document++);
  return list;
}

// ---- References

TEST(ConvReference, AgreesWithPyTorch) {
  const auto g = golden("conv_packed");
  const reference::Conv c{extent(g, "x", 1), extent(g, "w", 1)};
  const List of = sequences_of_documents(g);
  const Values x = values(g, "inputs", "x"), w = values(g, "inputs", "w");
  expect_near(reference::conv(c, of, x, w, values(g, "inputs", "b")), values(g, "outputs", "y"),
              1e-13);
  const auto d = reference::conv_backward(c, of, x, w, values(g, "cotangents", "y"));
  expect_near(d.x, values(g, "gradients", "x"), 1e-13);
  expect_near(d.w, values(g, "gradients", "w"), 1e-13);
  expect_near(d.b, values(g, "gradients", "b"), 1e-13);
}

TEST(ScanReference, AgreesWithPyTorch) {
  const auto g = golden("scan_packed");
  const reference::Scan s{extent(g, "q", 1), extent(g, "q", 2), extent(g, "v", 2)};
  const List of = sequences_of_documents(g);
  const auto in = [&](const char* name) { return values(g, "inputs", name); };
  expect_near(reference::scan(s, of, in("q"), in("k"), in("v"), in("a")), values(g, "outputs", "o"),
              1e-13);
  const auto d = reference::scan_backward(s, of, in("q"), in("k"), in("v"), in("a"),
                                          values(g, "cotangents", "o"));
  expect_near(d.q, values(g, "gradients", "q"), 1e-13);
  expect_near(d.k, values(g, "gradients", "k"), 1e-13);
  expect_near(d.v, values(g, "gradients", "v"), 1e-13);
  expect_near(d.a, values(g, "gradients", "a"), 1e-13);
}

// One channel, w = (10, 1): y_t = 10 x_(t-1) + x_t + 0.5. Padding in the middle is no token.
TEST(ConvReference, ByHand) {
  const List of{0, 0, -1, 1, 1, 1};
  const double nan = std::nan("");
  const Values x{1, 2, nan, 3, 4, 5}, w{10, 1}, b{0.5}, g{1, 2, nan, 3, 4, 5};
  EXPECT_EQ(reference::conv({1, 2}, of, x, w, b), (Values{1.5, 12.5, 0, 3.5, 34.5, 45.5}));
  const auto d = reference::conv_backward({1, 2}, of, x, w, g);
  EXPECT_EQ(d.x, (Values{1 + 20, 2, 0, 3 + 40, 4 + 50, 5}));
  EXPECT_EQ(d.w, (Values{2 * 1 + 4 * 3 + 5 * 4, 1 * 1 + 2 * 2 + 3 * 3 + 4 * 4 + 5 * 5}));
  EXPECT_EQ(d.b, (Values{15}));
}

// One number a state: S = 3, 2 3 + 5 = 11, -1 11 + 7 = -4; o = q S. The last token is another
// document's: S = 9.
TEST(ScanReference, ByHand) {
  const List of{0, 0, 0, -1, 1};
  const double nan = std::nan("");
  const Values q{1, 1, 2, nan, 1}, k{3, 5, 7, nan, 9}, v{1, 1, 1, nan, 1}, a{8, 2, -1, nan, 6},
      g{1, 10, 100, nan, 1};
  EXPECT_EQ(reference::scan({1, 1, 1}, of, q, k, v, a), (Values{3, 11, -8, 0, 9}));
  const auto d = reference::scan_backward({1, 1, 1}, of, q, k, v, a, g);
  // G = 1 + 2 (10 - 200), 10 - 200, 200
  EXPECT_EQ(d.q, (Values{3, 110, -400, 0, 9}));
  EXPECT_EQ(d.k, (Values{-379, -190, 200, 0, 1}));
  EXPECT_EQ(d.v, (Values{3 * -379, 5 * -190, 7 * 200, 0, 9}));
  EXPECT_EQ(d.a, (Values{0, -190 * 3, 200 * 11, 0, 0}));
}

TEST(Sequences, KeepTheirOrderWhereverTheyLie) {
  EXPECT_EQ(reference::places_by_sequence(List{1, 0, 1, -1, 0}),
            (std::vector<std::vector<size_t>>{{1, 4}, {0, 2}}));
}

// ---- Lines

const Registry& family() {
  static const Registry registry = [] {
    Registry r;
    family_recurrent(r);
    controls_recurrent(r);
    return r;
  }();
  return registry;
}
Case line_of(const std::string& text) { return parse(text, family()); }
const Contract& contract_of(const Case& line) { return family().contract(line.contract); }

// "op count dtype hop" of every call that is due on a rank.
std::vector<std::string> calls(const std::string& text, int rank, const std::string& plan = "") {
  const Case line = line_of(text);
  std::vector<std::string> list;
  for (const Traffic& t : contract_of(line).traffic(line, plan, rank))
    list.push_back((t.backward ? "B " : "F ") + std::string(name(t.op)) + " " +
                   std::to_string(t.count) + " " + name(t.dtype) +
                   (t.hop ? " hop " + std::to_string(t.hop) : ""));
  return list;
}
using Calls = std::vector<std::string>;

// 12 rows a rank and 3 of them travel: 3 x 6 numbers, none from the last rank, or back from the
// first.
TEST(ConvTraffic, IsTheHalo) {
  const char* line = "conv_context cp=4";
  EXPECT_EQ(calls(line, 0),
            (Calls{"F shift 18 f64 hop 1", "B shift 0 f64 hop -1", "B all_reduce 30 f64"}));
  EXPECT_EQ(calls(line, 2),
            (Calls{"F shift 18 f64 hop 1", "B shift 18 f64 hop -1", "B all_reduce 30 f64"}));
  EXPECT_EQ(calls(line, 3),
            (Calls{"F shift 0 f64 hop 1", "B shift 18 f64 hop -1", "B all_reduce 30 f64"}));
  EXPECT_EQ(calls("conv_context", 0), Calls{});
  EXPECT_EQ(calls("conv_context cp=4 width=1", 1), (Calls{"B all_reduce 12 f64"}));
}

// 2 rows a rank: 2 from the neighbour, 1 from the one before it. Two channels a rank of tp, two
// sequences a rank of dp.
TEST(ConvTraffic, TakesSeveralHopsWhereRanksHaveFewRows) {
  const char* line = "conv_context cp=4 tokens=8 dtype=bf16 wire=f32";
  EXPECT_EQ(calls(line, 0),
            (Calls{"F shift 12 bf16 hop 1", "F shift 6 bf16 hop 2", "B shift 0 f32 hop -1",
                   "B shift 0 f32 hop -2", "B all_reduce 30 f32"}));
  EXPECT_EQ(calls(line, 2),
            (Calls{"F shift 12 bf16 hop 1", "F shift 0 bf16 hop 2", "B shift 12 f32 hop -1",
                   "B shift 6 f32 hop -2", "B all_reduce 30 f32"}));
  EXPECT_EQ(calls("conv_context cp=2 dp=2 tp=3 seq=8 batch=4", 0),
            (Calls{"F shift 12 f64 hop 1", "B shift 0 f64 hop -1", "B all_reduce 10 f64"}));
}

// Both blocks have rows for another: that of a first goes up the ranks, that of a second down.
TEST(ConvTraffic, InZigzagGoesBothWays) {
  const char* line = "conv_context cp=3 tokens=24 layout=zigzag dtype=bf16 wire=f32";
  EXPECT_EQ(calls(line, 0),
            (Calls{"F shift 18 bf16 hop 1", "F shift 0 bf16 hop -1", "B shift 0 f32 hop -1",
                   "B shift 18 f32 hop 1", "B all_reduce 30 f32"}));
  EXPECT_EQ(calls(line, 1),
            (Calls{"F shift 18 bf16 hop 1", "F shift 18 bf16 hop -1", "B shift 18 f32 hop -1",
                   "B shift 18 f32 hop 1", "B all_reduce 30 f32"}));
  EXPECT_EQ(calls(line, 2),
            (Calls{"F shift 0 bf16 hop 1", "F shift 18 bf16 hop -1", "B shift 18 f32 hop -1",
                   "B shift 0 f32 hop 1", "B all_reduce 30 f32"}));
  EXPECT_EQ(calls("conv_context cp=3 tokens=24 layout=zigzag width=1", 1),
            (Calls{"B all_reduce 12 f64"}));
  EXPECT_EQ(calls(line, 1, "allgather"),
            (Calls{"F all_gather 36 bf16", "B reduce_scatter 108 f32", "B all_reduce 30 f32"}));
}

TEST(ConvTraffic, OfGatheredTails) {
  EXPECT_EQ(calls("conv_context cp=4", 1, "allgather"),
            (Calls{"F all_gather 18 f64", "B reduce_scatter 72 f64", "B all_reduce 30 f64"}));
}

// 6 heads with states of 3 x 2 and a decay each.
TEST(ScanTraffic, IsStatesAndDecays) {
  EXPECT_EQ(calls("scan_context cp=4 dtype=bf16", 1),
            (Calls{"F all_gather 42 f32", "B all_gather 36 f32"}));
  EXPECT_EQ(calls("scan_context cp=2 tp=2 dp=2 seq=8 batch=6", 1),
            (Calls{"F all_gather 63 f64", "B all_gather 54 f64"}));
  EXPECT_EQ(calls("scan_context tp=2", 1), Calls{});
}

TEST(ScanTraffic, OfARingGoesFromRankToRank) {
  EXPECT_EQ(calls("scan_context cp=3", 0, "ring"),
            (Calls{"F shift 36 f64 hop 1", "F shift 0 f64 hop 1", "B shift 0 f64 hop -1",
                   "B shift 0 f64 hop -1"}));
  EXPECT_EQ(calls("scan_context cp=3", 1, "ring"),
            (Calls{"F shift 0 f64 hop 1", "F shift 36 f64 hop 1", "B shift 0 f64 hop -1",
                   "B shift 36 f64 hop -1"}));
}

// 8 tokens in a document: 8 4 B^3 <= 2^24 and (8 8 / 4) 4 3 B^4 + B^4 <= 2^24.
TEST(ScanContract, IntegersFitTheGradientOfDecays) {
  const auto range = [](const std::string& words) {
    const Case line = line_of("scan_context head_dim=4 v_dim=3 " + words);
    return contract_of(line).integer_range(line);
  };
  EXPECT_EQ(range("dtype=f32 docs=8,2"), 17);
  EXPECT_EQ(range("dtype=bf16 docs=8,2"), 1);
  EXPECT_EQ(range("dtype=bf16"), std::nullopt);
  // Of 16 rows 14 are padding, which is no sequence: a token sees itself alone, and B^4 <= 2^24.
  EXPECT_EQ(range("dtype=f32 cp=8 docs=1,1"), 64);
  // Of one token with 1000 features of v: 1000 B^3 <= 2^24 in dq and dk.
  const Case wide = line_of("scan_context dtype=f32 docs=1,1 head_dim=1 v_dim=1000");
  EXPECT_EQ(contract_of(wide).integer_range(wide), 25);
}

TEST(ScanContract, DecaysAreSignsOfIntegersAndBelowOne) {
  const Case line = line_of("scan_context");
  for (const Operand& o : contract_of(line).operands(line)) {
    EXPECT_EQ(bool(o.through), o.name == "a");
    EXPECT_EQ(o.linear, o.name != "a");
    if (o.name != "a") continue;
    EXPECT_EQ(o.through(3, true), 1);
    EXPECT_EQ(o.through(-2, true), -1);
    EXPECT_EQ(o.through(0, false), 0.875);
    EXPECT_EQ(o.through(1e9, false), 1);
    EXPECT_EQ(o.through(-1e9, false), 0.75);
  }
}

TEST(Drawn, PassesTheMapOfItsOperandAndIsRounded) {
  const Case line = line_of("scan_context dtype=bf16 fill=normal");
  const auto operands = contract_of(line).operands(line);
  Feed feed;
  for (const Fill fill : {Fill::normal, Fill::integers}) {
    feed.fill = fill;
    const Operand& a = operands[3];
    Operand plain = a;
    plain.through = nullptr;
    const Values drawn = drawn_whole({line, plain, false, feed, DType::bf16, a.shape}),
                 met = drawn_whole({line, a, false, feed, DType::bf16, a.shape}),
                 cotangent = drawn_whole({line, a, true, feed, DType::bf16, a.shape});
    for (size_t i = 0; i < met.size(); ++i)
      ASSERT_EQ(met[i], round_to(a.through(drawn[i], fill == Fill::integers), DType::bf16));
    EXPECT_EQ(cotangent, drawn_whole({line, plain, true, feed, DType::bf16, a.shape}));
  }
}

// 10^10 pairs of tokens, and 1.3 10^7 outputs of 1024 products each; sizes alone are no reason.
TEST(Cost, CountsPairsOfTokensAndTapsOfAFilter) {
  const auto refuse = [](const std::string& text) { refuse_too_big(line_of(text), {}, family()); };
  EXPECT_THROW(refuse("scan_context tokens=100000 heads=1 fill=normal"), BadInput);
  EXPECT_THROW(refuse("conv_context tokens=200000 channels=64 width=1024 fill=normal"), BadInput);
  EXPECT_NO_THROW(refuse("scan_context tokens=1000 heads=1 fill=normal"));
  EXPECT_NO_THROW(refuse("scan_context seq=10 batch=10000 heads=1 fill=normal"));
  EXPECT_NO_THROW(refuse("conv_context tokens=200000 channels=64 width=4 fill=normal"));
}

std::string refused_by(void (*refuse)(const Case&), const std::string& text) {
  try {
    refuse(line_of(text));
  } catch (const BadInput& e) {
    return e.what();
  }
  return "";
}

// 2^24 tokens of 6 channels of x and of y, 40 bytes an element: 7.5 GiB. Half of them fit.
TEST(Cost, OperandsAloneRefuseALine) {
  const auto refuse = [](const Case& line) { refuse_too_many_elements(line, family()); };
  EXPECT_NE(refused_by(refuse, "conv_context tokens=16777216").find("needs at least 7.5 GiB"),
            std::string::npos);
  EXPECT_EQ(refused_by(refuse, "conv_context tokens=8388608"), "");
}

// 2^20 times 2^36 in each of q, k and v is beyond f32; the line itself is not.
TEST(Cost, ACopyThatLeakMakesLoudIsSaidToBeTheOneThatOverflows) {
  const auto of_leak = [](const Case& line) { refuse_infeasible(line, {"leak"}, family()); };
  const auto of_forward = [](const Case& line) { refuse_infeasible(line, {"forward"}, family()); };
  const std::string line = "scan_context cp=2 docs=5,7 heads=2 dtype=f32 fill=large";
  const std::string told = refused_by(of_leak, line);
  EXPECT_NE(told.find("in the copy for `leak`, of which sequence 0 is 2^36 times itself"),
            std::string::npos)
      << told;
  EXPECT_NE(told.find("use fill=normal, one document or sequence, --check with the others, "),
            std::string::npos)
      << told;
  EXPECT_EQ(refused_by(of_forward, line), "");
}

// A decay of a sequence that is made loud is another decay, and every one of the others is as
// drawn.
TEST(Leak, DecaysStayDecays) {
  for (const char* fill : {"normal", "integers"}) {
    const Case line = line_of("scan_context docs=3,2 heads=2 fill=" + std::string(fill));
    const Evidence e = plan_case(line, Declared{}, {"leak"}, family());
    ASSERT_EQ(e.shots.size(), 3u);
    const Feed& loud = e.shots[1].feeds[0];  // sequence 0
    const Operand& a = e.operands[3];
    const Values drawn = drawn_whole({line, a, false, e.shots[0].feeds[0], DType::f64, a.shape});
    const auto given = std::find_if(loud.given.begin(), loud.given.end(),
                                    [](const auto& g) { return g.operand == 3; });
    ASSERT_NE(given, loud.given.end());
    const bool integers = fill == std::string("integers");
    for (size_t i = 0; i < drawn.size(); ++i)
      EXPECT_EQ(given->value[i], i >= 6 ? drawn[i] : integers ? -drawn[i] : 0.75) << fill << i;
  }
}

std::string refusal(const std::string& text) {
  const Case line = line_of(text);
  const auto refused = contract_of(line).precondition(line);
  return refused ? refused->what() : "";
}
TEST(Refusals, SayWhatToDo) {
  EXPECT_NE(refusal("conv_context cp=2 layout=zigzag docs=8,8").find("zigzag_row"),
            std::string::npos);
  EXPECT_NE(
      refusal("conv_context cp=4 layout=zigzag tokens=16")
          .find("expected width - 1 rows in each of the 8 blocks of a zigzag, met width=4 and "
                "2 rows"),
      std::string::npos);
  EXPECT_EQ(refusal("conv_context cp=4 layout=zigzag tokens=24"), "");
  EXPECT_EQ(refusal("conv_context cp=4 layout=zigzag tokens=8 width=1"), "");
  EXPECT_NE(refusal("conv_context tp=4").find("channels divisible by tp = 4"), std::string::npos);
  EXPECT_NE(refusal("scan_context tp=4").find("heads divisible by tp = 4"), std::string::npos);
  EXPECT_EQ(refusal("conv_context cp=8 width=13 tokens=16"), "");
}

// 2^31 elements are one more than MPI's int counts: of 16 rows of a rank's 4 sequences, on 2 ranks
// of dp, 2^24 channels or heads each; of 2^21 filters of 2^10 taps; of 2^27 values in 16 rows; of
// states with one number more a row of theirs, 2^24 rows of 127 and 4 of a zigzag of 2^23 rows
// of 63.
TEST(Refusals, CountEveryExtent) {
  const std::vector<std::tuple<std::string, std::string, std::string>> table{
      {"conv_context dp=2 batch=8 channels=16777216 width=1 seq=", "16", "15"},
      {"conv_context tokens=2 channels=2097152 width=", "1024", "1023"},
      {"scan_context dp=2 batch=8 heads=16777216 head_dim=1 v_dim=1 seq=", "16", "15"},
      {"scan_context tokens=16 heads=8388608 head_dim=1 v_dim=", "16", "15"},
      {"scan_context tokens=1 heads=16777216 head_dim=1 v_dim=", "127", "126"},
      {"scan_context cp=2 layout=zigzag tokens=4 heads=8388608 head_dim=1 v_dim=", "63", "62"}};
  for (const auto& [line, too_many, most] : table) {
    EXPECT_NE(refusal(line + too_many).find("2147483648 elements"), std::string::npos)
        << line << ": " << refusal(line + too_many);
    EXPECT_EQ(refusal(line + most), "");
  }
}

// ---- Bounds

std::vector<Whole> zeros_of(const std::vector<Operand>& operands, bool outputs) {
  std::vector<Whole> list;
  for (const Operand& o : operands)
    if ((o.role == Operand::output) == outputs)
      list.push_back({o.shape, Values(size_t(product(o.shape)))});
  return list;
}

// Terms on a rank and ranks that add them up: a result sees 4 tokens, or as many as its document
// has, and b; dx of 4 taps comes from the own rank and the next; dw sums the own 6 rows of 2 ranks.
TEST(ConvBounds, CountTermsByHand) {
  const auto gauges = [](const std::string& text, bool backward) {
    const Case line = line_of(text);
    const Contract& c = contract_of(line);
    const auto operands = c.operands(line);
    const auto in = zeros_of(operands, false);
    std::vector<Gauge> list;
    backward ? c.backward(line, in, zeros_of(operands, true), &list) : c.forward(line, in, &list);
    std::vector<std::pair<int64_t, int64_t>> counts;
    for (const Gauge& g : list) counts.emplace_back(g.terms, g.reduced);
    return counts;
  };
  using Counts = std::vector<std::pair<int64_t, int64_t>>;
  EXPECT_EQ(gauges("conv_context cp=2 docs=5,7", false), (Counts{{5, 1}}));
  EXPECT_EQ(gauges("conv_context cp=2 docs=2,2,2,2", false), (Counts{{3, 1}}));
  EXPECT_EQ(gauges("conv_context cp=2 docs=5,7", true), (Counts{{4, 2}, {6, 2}, {6, 2}}));
  EXPECT_EQ(gauges("conv_context cp=2 seq=8 batch=3", true), (Counts{{4, 2}, {12, 2}, {12, 2}}));
}

// n B^2 <= 2^24 for the n tokens of all sequences that dw sums; in f16 2^11 for 4 taps and b.
TEST(ConvContract, IntegersFitTheSumOverTokens) {
  const auto range = [](const std::string& words) {
    const Case line = line_of("conv_context " + words);
    return contract_of(line).integer_range(line);
  };
  EXPECT_EQ(range("dtype=f32 tokens=4096"), 64);
  EXPECT_EQ(range("dtype=f32 seq=8 batch=8"), 512);
  EXPECT_EQ(range("dtype=f16 tokens=4"), 20);
}

// Logarithms have bounds, and a gradient, of their own: seconds before a merge look at them, too.
TEST(RecurrentCases, OfTierSmokeHaveDecaysOfBothKinds) {
  for (const char* contract : {"scan_context", "delta_context"}) {
    std::set<std::string> kinds;
    for (const std::string& words : family().contract(contract).cases("smoke"))
      kinds.insert(line_of(words).text("decay"));
    EXPECT_EQ(kinds, (std::set<std::string>{"factor", "log"})) << contract;
  }
}

// S of 2 tokens on one rank: 2 multiplications and additions each and one product; o: q and d_k
// terms more.
TEST(ScanRoundings, ByHand) {
  const auto n = reference::scan_roundings({1, 3, 2}, 2, 1);
  EXPECT_EQ(n.o, 2 * 3 + 1 + 3 + 1);
  EXPECT_EQ(n.q, 2 * 3 + 1 + 2 + 1);
  EXPECT_EQ(n.k, n.q);
  EXPECT_EQ(n.v, n.o);
  EXPECT_EQ(n.a, 2 * 3 + 1 + 2 + 2 + 6);
}

// A loop in float over the tokens of one head, each product and sum rounded.
Values float_scan(const reference::Scan& s, size_t tokens, const Values& q, const Values& k,
                  const Values& v, const Values& a) {
  const size_t dk = size_t(s.key_dim), dv = size_t(s.value_dim);
  std::vector<float> state(dk * dv);
  Values o(tokens * dv);
  for (size_t t = 0; t < tokens; ++t)
    for (size_t j = 0; j < dv; ++j) {
      float sum = 0;
      for (size_t i = 0; i < dk; ++i) {
        float& m = state[i * dv + j];
        m = float(a[t]) * m + float(k[t * dk + i]) * float(v[t * dv + j]);
        sum += float(q[t * dk + i]) * m;
      }
      o[t * dv + j] = double(sum);
    }
  return o;
}

TEST(ScanBounds, HoldForFloatAndAreNotFarFromIt) {
  const Case line = line_of("scan_context dtype=f32 fill=normal tokens=64 heads=1");
  const reference::Scan s{1, 3, 2};
  const auto operands = contract_of(line).operands(line);
  double worst = 0;
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    Feed feed;
    feed.fill = Fill::normal, feed.seed = seed;
    std::vector<Whole> in;
    for (size_t i = 0; i < 4; ++i)
      in.push_back({operands[i].shape,
                    drawn_whole({line, operands[i], false, feed, DType::f32, operands[i].shape})});
    std::vector<Gauge> gauges;
    const Values want = contract_of(line).forward(line, in, &gauges)[0].value,
                 got = float_scan(s, 64, in[0].value, in[1].value, in[2].value, in[3].value);
    for (size_t i = 0; i < want.size(); ++i) {
      const double bound = gauges[0].bound[i] * 0x1p-24 + 0x1p-24 * std::abs(want[i]);
      ASSERT_LE(std::abs(got[i] - want[i]), bound);
      worst = std::max(worst, std::abs(got[i] - want[i]) / bound);
    }
  }
  EXPECT_GT(worst, 1.0 / 200);
}

// ---- On ranks

// The state goes from rank to rank, each of which waits for the one before.
struct RingScan final : primitives::ScanContext {
  void gather(Rank& rank, const View& own, const View& all, bool) override {
    primitives::convert(own, all.narrow(0, rank.along(Axis::cp).rank(), 1));
  }
  void fold(Rank& rank, const primitives::Summaries& all, const List&, const View& state,
            bool backward) override {
    Communicator& cp = rank.along(Axis::cp);
    const int p = cp.size(), r = cp.rank(), own = backward ? p - 1 - r : r;
    const bool through = passes(primitives::ContextLine(rank.line()))[size_t(r)] != 0;
    const View leaving = rank.workspace(state.dtype, state.shape);
    primitives::set_zero(state);
    for (int tick = 0; tick + 1 < p; ++tick) {
      if (tick == own) hand_on(all, r, through, state, leaving);
      const View none = leaving.narrow(0, 0, 0);
      cp.wait(cp.shift(tick == own ? leaving : none, tick + 1 == own ? state : none,
                       backward ? -1 : 1));
    }
  }
  static void hand_on(const primitives::Summaries& all, int r, bool through, const View& state,
                      const View& leaving) {
    const View part = all.parts.narrow(0, r, 1), decays = all.through.narrow(0, r, 1);
    const int64_t n = state.elements() / decays.elements();
    for (int64_t i = 0; i < state.elements(); ++i) {
      const double before =
          through ? load(decays.flat(i / n), decays.dtype) * load(state.flat(i), state.dtype) : 0;
      store(leaving.flat(i), leaving.dtype, before + load(part.flat(i), part.dtype));
    }
  }
};

// Every rank gets the last rows of all, and takes those that it needs.
struct GatheringConv : primitives::ConvContext {
  static int64_t tail(const primitives::Halo& halo) { return std::min(halo.own, halo.reach); }
  static View rows(const View& tails, const primitives::Halo& halo, int hop) {
    const int64_t n = tail(halo), taken = halo.rows(hop);
    return tails.narrow(0, (halo.rank - hop + 1) * n - taken, taken);
  }
  static View tails_like(Rank& rank, const primitives::Halo& halo, const View& all) {
    return rank.workspace(all.dtype,
                          primitives::with_extent(all.shape, 0, tail(halo) * halo.ranks));
  }
  void fetch(Rank& rank, const primitives::Halo& halo, const View& all) override {
    if (halo.ranks == 1 || halo.reach == 0) return;
    const View tails = tails_like(rank, halo, all);
    rank.along(Axis::cp).all_gather(all.narrow(0, halo.reach + halo.own - tail(halo), tail(halo)),
                                    tails, 0);
    for (int hop = 1; hop <= halo.hops() && hop <= halo.rank; ++hop)
      primitives::convert(rows(tails, halo, hop), all.narrow(0, halo.first(hop), halo.rows(hop)));
  }
  void give_back(Rank& rank, const primitives::Halo& halo, const View& all) override {
    if (halo.ranks == 1 || halo.reach == 0) return;
    const View tails = tails_like(rank, halo, all),
               own = rank.workspace(all.dtype, primitives::with_extent(all.shape, 0, tail(halo)));
    primitives::set_zero(tails);
    for (int hop = 1; hop <= halo.hops() && hop <= halo.rank; ++hop)
      primitives::convert(all.narrow(0, halo.first(hop), halo.rows(hop)), rows(tails, halo, hop));
    rank.along(Axis::cp).reduce_scatter(tails, own, 0);
    primitives::add_into(own, all.narrow(0, halo.reach + halo.own - tail(halo), tail(halo)));
  }
};

// The same of two blocks a rank.
struct GatheringZigzagConv final : GatheringConv {
  // Of a list of all last rows, first and second blocks of each rank side by side, those before a
  // block.
  static std::optional<View> before(const View& tails, const primitives::Halo& halo, bool second) {
    const bool own = second && halo.rank + 1 == halo.ranks;
    const int64_t rank = own ? halo.rank : second ? halo.rank + 1 : halo.rank - 1;
    if (rank < 0) return std::nullopt;
    return tails.narrow(0, (2 * rank + (second && !own)) * halo.reach, halo.reach);
  }
  void fetch_both(Rank& rank, const primitives::Halo& halo, const View& first,
                  const View& second) override {
    const auto shape = [&](int64_t rows) { return primitives::with_extent(first.shape, 0, rows); };
    const View own = rank.workspace(first.dtype, shape(2 * halo.reach)),
               tails = rank.workspace(first.dtype, shape(2 * halo.reach * halo.ranks));
    for (const bool other : {false, true})
      primitives::convert(primitives::last_rows(halo, other ? second : first, halo.reach),
                          own.narrow(0, other * halo.reach, halo.reach));
    rank.along(Axis::cp).all_gather(own, tails, 0);
    for (const bool other : {false, true})
      if (const auto rows = before(tails, halo, other))
        primitives::convert(*rows, (other ? second : first).narrow(0, 0, halo.reach));
  }
  void give_both_back(Rank& rank, const primitives::Halo& halo, const View& first,
                      const View& second) override {
    const auto shape = [&](int64_t rows) { return primitives::with_extent(first.shape, 0, rows); };
    const View own = rank.workspace(first.dtype, shape(2 * halo.reach)),
               tails = rank.workspace(first.dtype, shape(2 * halo.reach * halo.ranks));
    primitives::set_zero(tails);
    for (const bool other : {false, true})
      if (const auto rows = before(tails, halo, other))
        primitives::convert((other ? second : first).narrow(0, 0, halo.reach), *rows);
    rank.along(Axis::cp).reduce_scatter(tails, own, 0);
    for (const bool other : {false, true})
      primitives::add_into(own.narrow(0, other * halo.reach, halo.reach),
                           primitives::last_rows(halo, other ? second : first, halo.reach));
  }
};

template <class Kernel>
Subject planned(const char* contract, const char* plan) {
  Declared declared;
  declared.plan = plan;
  return {plan, contract, [] { return std::make_unique<Kernel>(); }, declared};
}

const Registry& with_plans() {
  static const Registry registry = [] {
    Registry r;
    family_recurrent(r);
    r.add(planned<RingScan>("scan_context", "ring"));
    r.add(planned<GatheringZigzagConv>("conv_context", "allgather"));
    return r;
  }();
  return registry;
}

TEST(Plans, AreKnownToTheGate) {
  Options options;
  options.tier = "smoke";
  EXPECT_NO_THROW(plan_gate(options, with_plans()));
}

TEST(Plans, SubjectsOfThemPassEveryCheck) {
  for (const char* line :
       {"scan_context subject=ring cp=4 tokens=16", "scan_context subject=ring cp=3 docs=5,9,1",
        "scan_context subject=ring cp=2 dp=2 seq=8 batch=2",
        "conv_context subject=allgather cp=4 tokens=16",
        "conv_context subject=allgather cp=4 tokens=8 docs=1,7",
        "conv_context subject=allgather cp=3 width=1",
        "conv_context subject=allgather cp=2 tokens=16 layout=zigzag",
        "conv_context subject=allgather cp=3 docs=9,5,10 layout=zigzag_row"}) {
    const Judged j =
        run_in(with_plans(), line,
               {"forward", "gradient", "adjoint", "ledger", "lockstep", "memory", "accumulate"});
    ASSERT_TRUE(j.completed) << line;
    for (const CheckResult& c : j.result.checks)
      EXPECT_EQ(c.verdict, Verdict::passed) << line << " " << c.check << " " << c.note;
  }
}

// ---- Bodies

// A state of infinities stays in its document: what does not go through is selected, not
// multiplied.
TEST(Fold, DoesNotReadWhatDoesNotGoThrough) {
  Values parts{std::numeric_limits<double>::infinity(), 2, 5}, decays{1, 3, 7}, state{0};
  List passes{1, 0, 1}, chain{0, 1, 2};
  const primitives::FoldStates fold{tensor_of(parts, {3, 1}),
                                    tensor_of(decays, {3, 1}),
                                    tensor_of(passes),
                                    tensor_of(chain),
                                    tensor_of(state, {1}),
                                    1,
                                    true};
  fold.at(0);
  EXPECT_EQ(state[0], 7 * 2 + 5);
}

// Two tokens, one of padding, one of the next document. S = 2 10 + 3 5, then -1 S + 7; 1 11.
TEST(States, OfPaddingAreZeroAndItIsNotRead) {
  const double nan = std::nan("");
  Values a{2, -1, nan, nan}, k{3, 7, nan, 1}, v{5, 1, nan, 11}, entering{10}, states(4, nan),
      leaving{nan};
  List reach{4, 5, -1, 0};
  const primitives::Chunk chunk{tensor_of(a, {4, 1}), tensor_of(reach), 1, 1, 1, 1};
  primitives::States{chunk,
                     tensor_of(k, {4, 1}),
                     tensor_of(v, {4, 1}),
                     tensor_of(entering, {1}),
                     tensor_of(states, {4}),
                     tensor_of(leaving, {1}),
                     true}
      .at(0);
  EXPECT_EQ(states, (Values{35, -28, 0, 11}));
  EXPECT_EQ(leaving, (Values{11}));
}

// Backward: 10 + 1 11, nothing over the start of its document, then 7 and -1 7 + 3 5, 2 times that.
TEST(Adjoints, OfPaddingAreZeroAndItIsNotRead) {
  const double nan = std::nan("");
  Values a{2, -1, nan, nan}, q{3, 7, nan, 1}, g{5, 1, nan, 11}, entering{10}, adjoints(4, nan),
      leaving{nan};
  List reach{4, 5, -1, 0};
  const primitives::Chunk chunk{tensor_of(a, {4, 1}), tensor_of(reach), 1, 1, 1, 1};
  primitives::Adjoints{chunk,
                       tensor_of(q, {4, 1}),
                       tensor_of(g, {4, 1}),
                       tensor_of(entering, {1}),
                       tensor_of(adjoints, {4}),
                       tensor_of(leaving, {1}),
                       true}
      .at(0);
  EXPECT_EQ(adjoints, (Values{8, 7, 0, 21}));
  EXPECT_EQ(leaving, (Values{16}));
}

// [[1, 2], [3, 4]] times (1, 10), or turned.
TEST(StateProduct, ReadsAStateEitherWayAndNoPadding) {
  const double nan = std::nan("");
  Values m{1, 2, 3, 4, nan, nan, nan, nan}, x{1, 10, nan, nan}, out(4, nan);
  List reach{0, -1};
  primitives::StateProduct product{tensor_of(m, {2, 1, 2, 2}),
                                   tensor_of(x, {2, 1, 2}),
                                   tensor_of(reach),
                                   tensor_of(out, {2, 1, 2}),
                                   1,
                                   2,
                                   2,
                                   false,
                                   true};
  for (int64_t i = 0; i < 4; ++i) product.at(i);
  EXPECT_EQ(out, (Values{21, 43, 0, 0}));
  product.turned = true;
  for (int64_t i = 0; i < 4; ++i) product.at(i);
  EXPECT_EQ(out, (Values{31, 42, 0, 0}));
}

// 3 rows before a block of 2: two of the neighbour, one of the block before it.
TEST(Halos, LieTheFarthestFirst) {
  const primitives::Halo halo{2, 3, 2, 4};
  EXPECT_EQ(halo.hops(), 2);
  EXPECT_EQ(halo.rows(1), 2);
  EXPECT_EQ(halo.first(1), 1);
  EXPECT_EQ(halo.rows(2), 1);
  EXPECT_EQ(halo.first(2), 0);
  EXPECT_TRUE(halo.sends(1));
  EXPECT_FALSE(halo.sends(2));
  EXPECT_TRUE(halo.sends(-2));
  EXPECT_FALSE(halo.sends(-3));
  EXPECT_EQ((primitives::Halo{2, 0, 2, 4}).hops(), 0);
  EXPECT_EQ((primitives::Halo{1, 9, 2, 4}).hops(), 3);
}

}  // namespace recurrent_test
}  // namespace
}  // namespace shardproof
