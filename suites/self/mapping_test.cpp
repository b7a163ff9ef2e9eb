// What the mapping family states, before any rank runs: its lines, its types, its traffic, and that
// its reference is a pair of adjoint maps. Expected numbers are worked out by hand.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <set>

#include "fixtures/sharding.hpp"
#include "oracle/registry.hpp"
#include "primitives/mapping_line.hpp"

namespace shardproof {

void family_mapping(Registry&);
void controls_mapping(Registry&);

namespace {
namespace mapping_test {

const Registry& family() {
  static const Registry registry = [] {
    Registry r;
    family_mapping(r);
    controls_mapping(r);
    return r;
  }();
  return registry;
}

Case line_of(const std::string& text) { return parse(text, family()); }
const Contract& contract_of(const Case& line) { return family().contract(line.contract); }

Whole forward(const std::string& text, std::vector<double> x) {
  const Case line = line_of(text);
  const Whole in{{}, std::move(x)};
  return contract_of(line).forward(line, {&in, 1}, nullptr)[0];
}
Whole backward(const std::string& text, std::vector<double> dy) {
  const Case line = line_of(text);
  const Whole cotangent{{}, std::move(dy)};
  return contract_of(line).backward(line, {}, {&cotangent, 1}, nullptr)[0];
}

std::vector<double> basis(size_t n, size_t i) {
  std::vector<double> e(n, 0.0);
  e[i] = 1;
  return e;
}

// Elements of the whole of a tensor: stacked where partial.
size_t elements(const Operand& o, const Case& line, bool cotangent) {
  return size_t(product(whole_shape(o.shape, cotangent ? dual(o.layout) : o.layout, line.mesh())));
}

// <a, b> = <a, sum of b's stack>: a is what one of the two denotes, b the whole of its dual.
double paired(const std::vector<double>& denoted, const std::vector<double>& whole) {
  double s = 0;
  for (size_t i = 0; i < whole.size(); ++i) s += denoted[i % denoted.size()] * whole[i];
  return s;
}

// ---- Lines

TEST(Mapping, HasEveryRowOfTheTypeTable) { EXPECT_EQ(family().contracts().size(), 15u); }

TEST(Mapping, LinesOfEveryTierAreLegalAndDistinct) {
  for (const std::string tier : {"smoke", "ci", "nightly"}) {
    std::set<std::string> seen;
    size_t lines = 0;
    for (const Contract& c : family().contracts())
      for (const std::string& text : c.cases(tier)) {
        const Case line = line_of(text);
        EXPECT_FALSE(c.precondition(line)) << text;
        seen.insert(print_canonical(line));
        ++lines;
      }
    if (tier == "smoke") {
      EXPECT_GE(lines, 40u);
      EXPECT_EQ(seen.size(), lines);
    }
    if (tier == "ci") {
      EXPECT_GE(seen.size(), 300u);
      EXPECT_LE(seen.size(), 500u);
    }
  }
}

TEST(Mapping, SmokeTriesEveryBasisVectorOfEachContractAtTwoAndFourRanks) {
  for (const Contract& c : family().contracts()) {
    std::set<int> ranks;
    for (const std::string& text : c.cases("smoke")) {
      const Case line = line_of(text);
      const auto operands = c.operands(line);
      if (std::max(elements(operands[0], line, false), elements(operands[1], line, true)) <= 64)
        ranks.insert(line.world());
    }
    EXPECT_EQ(ranks, (std::set{2, 4})) << c.name;
  }
}

TEST(Mapping, DefaultsAreLegalAtTheFixedRankCounts) {
  for (const Contract& c : family().contracts())
    for (int p : {1, 2, 3, 4, 8})
      for (int dim : {0, 1}) {
        const Case line =
            line_of(c.name + " tp=" + std::to_string(p) + " dim=" + std::to_string(dim));
        EXPECT_FALSE(c.precondition(line)) << print(line);
      }
}

TEST(Mapping, AxisIsTheOnlyOneAboveOne) {
  EXPECT_EQ(line_of("mapping_copy").text("axis"), "tp");
  EXPECT_EQ(line_of("mapping_copy dp=3").text("axis"), "dp");
  EXPECT_EQ(line_of("mapping_copy tp=2 axis=cp").text("axis"), "cp");
  EXPECT_THROW(line_of("mapping_copy tp=2 dp=2"), BadInput);
}

TEST(Mapping, ScaleIsAFractionInLowestTerms) {
  EXPECT_EQ(line_of("mapping_scaled_reduce scale=6/8").text("scale"), "3/4");
  EXPECT_EQ(line_of("mapping_scaled_reduce scale=-4/2").text("scale"), "-2");
  for (const char* wrong : {"0", "1/0", "0.5", "1/2/3", "/2", "1/", "--1", "1234"})
    EXPECT_THROW(line_of(std::string("mapping_scaled_reduce scale=") + wrong), BadInput) << wrong;
}

// A rank that fails the test when anything is asked of it but its line.
struct LineOnly final : Rank {
  explicit LineOnly(const Case& l) : line_(l), mesh_(l.mesh()) {}
  const Case& line() const override { return line_; }
  int world_rank() const override { return met(), 0; }
  int world_size() const override { return met(), 1; }
  const Mesh& mesh() const override { return met(), mesh_; }
  Stream stream() const override { return met(), nullptr; }
  [[noreturn]] Communicator& along(Axis) override { refuse(); }
  [[noreturn]] Communicator& along(const std::vector<Axis>&) override { refuse(); }
  [[noreturn]] Communicator& world() override { refuse(); }
  View workspace(DType, std::vector<int64_t>) override { refuse(); }
  void met() const { ADD_FAILURE() << "a precondition asked for more than the line"; }
  [[noreturn]] static void refuse() { throw std::logic_error("communication before the refusal"); }
  const Case& line_;
  Mesh mesh_;
};

TEST(Mapping, IllegalLinesAreRefusedByContractAndKernelFromTheLineAlone) {
  int lines = 0;
  for (const Contract& c : family().contracts())
    for (const std::string& text : c.illegal) {
      const Case line = line_of(text);
      EXPECT_TRUE(c.precondition(line)) << text;
      LineOnly rank(line);
      const std::vector<View> none(1);
      EXPECT_THROW(family().subject(c.name, "").make()->forward(rank, none, none), Rejected)
          << text;
      ++lines;
    }
  EXPECT_GE(lines, 7 * 3);  // seven contracts cut or join a dim
}

// ---- The reference

// Rows of A and of its transpose, one basis vector after the other.
TEST(Mapping, ReferenceHalvesAreAdjointOnEveryPairOfBasisVectors) {
  for (const Contract& c : family().contracts())
    for (const char* rest :
         {" tp=1 tokens=3 hidden=5", " tp=2 tokens=2 hidden=4", " tp=3 tokens=3 hidden=6",
          " tp=4 tokens=4 hidden=8", " tp=3 tokens=6 hidden=3 dim=1"}) {
      const std::string text = c.name + rest;
      const Case line = line_of(text);
      const auto operands = c.operands(line);
      const size_t n = elements(operands[0], line, false), m = elements(operands[1], line, true);
      std::vector<std::vector<double>> image, pulled;
      for (size_t i = 0; i < n; ++i) image.push_back(forward(text, basis(n, i)).value);
      for (size_t j = 0; j < m; ++j) pulled.push_back(backward(text, basis(m, j)).value);
      int entries = 0;
      for (size_t i = 0; i < n; ++i)
        for (size_t j = 0; j < m; ++j) {
          const double a = paired(image[i], basis(m, j));
          ASSERT_EQ(a, paired(pulled[j], basis(n, i))) << text << " x " << i << " dy " << j;
          entries += a != 0;
        }
      EXPECT_GE(entries, int(std::max(n, m))) << text;  // no element of x or dy is lost
    }
}

TEST(Mapping, ReferenceOnTwoRanksByHand) {
  const std::vector<double> rows{1, 2, 10, 20};  // partial [1,2] on two ranks, or a whole [2,2]
  using Values = std::vector<double>;
  const std::string partial = " tp=2 tokens=1 hidden=2", whole = " tp=2 tokens=2 hidden=2";
  EXPECT_EQ(forward("mapping_reduce" + partial, rows).value, (Values{11, 22}));
  EXPECT_EQ(backward("mapping_reduce" + partial, {3, 4}).value, (Values{3, 4}));
  EXPECT_EQ(forward("mapping_scaled_reduce scale=-1/2" + partial, rows).value, (Values{-5.5, -11}));
  EXPECT_EQ(backward("mapping_scaled_reduce scale=-1/2" + partial, {3, 4}).value,
            (Values{-1.5, -2}));
  EXPECT_EQ(forward("mapping_all_reduce" + partial, rows).value, (Values{11, 22}));
  EXPECT_EQ(backward("mapping_all_reduce" + partial, rows).value, (Values{11, 22}));
  EXPECT_EQ(forward("mapping_copy" + partial, {3, 4}).value, (Values{3, 4}));
  EXPECT_EQ(backward("mapping_copy" + partial, rows).value, (Values{11, 22}));
  EXPECT_EQ(forward("mapping_reinterpret" + partial, {3, 4}).value, (Values{6, 8}));
  EXPECT_EQ(backward("mapping_reinterpret" + partial, {3, 4}).value, (Values{6, 8}));
  EXPECT_EQ(forward("mapping_replicate_to_partial" + partial, {3, 4}).value, (Values{3, 4}));
  // What only moves denotes the same tensor before and after.
  for (const char* moves : {"mapping_scatter", "mapping_gather", "mapping_all_gather",
                            "mapping_all_to_all", "mapping_slice", "mapping_pad"})
    for (const char* dim : {"", " dim=1"})
      EXPECT_EQ(forward(moves + whole + dim, rows).value, rows) << moves;
  EXPECT_EQ(backward("mapping_all_gather" + whole, {1, 2, 3, 4, 10, 20, 30, 40}).value,
            (Values{11, 22, 33, 44}));
  EXPECT_EQ(forward("mapping_reduce_scatter" + whole, {1, 2, 3, 4, 10, 20, 30, 40}).value,
            (Values{11, 22, 33, 44}));
}

// Four ranks hold 1, 2, 3, 4; tp is the fastest axis, so {1,2} and {3,4} are its groups.
TEST(Mapping, OtherAxesEachHaveTheirOwnList) {
  const std::vector<double> x{1, 2, 3, 4};
  const std::string grid = "mapping_reduce tp=2 cp=2 tokens=1 hidden=1";
  EXPECT_EQ(forward(grid + " axis=tp", x).value, (std::vector<double>{3, 7}));
  EXPECT_EQ(forward(grid + " axis=cp", x).value, (std::vector<double>{4, 6}));
  EXPECT_EQ(forward(grid + " axis=tp order=cp,tp", x).value, (std::vector<double>{4, 6}));
  EXPECT_EQ(forward(grid + " axis=tp", x).shape, (std::vector<int64_t>{2, 1, 1}));
  EXPECT_EQ(forward("mapping_reduce tp=2 axis=cp tokens=1 hidden=1", {1, 2}).value,
            (std::vector<double>{1, 2}));
}

TEST(Mapping, GaugesCarrySumsOfMagnitudesAndSquares) {
  const Case line = line_of("mapping_scaled_reduce tp=3 tokens=1 hidden=1 scale=-1/2");
  const Whole x{{3, 1, 1}, {1, -2, 3}};
  std::vector<Gauge> gauges;
  contract_of(line).forward(line, {&x, 1}, &gauges);
  ASSERT_EQ(gauges.size(), 1u);
  EXPECT_EQ(gauges[0].magnitude, std::vector<double>{3});  // (1 + 2 + 3) / 2
  EXPECT_EQ(gauges[0].squares, std::vector<double>{3.5});  // (1 + 4 + 9) / 4
  EXPECT_EQ(gauges[0].reduced, 3);
}

// ---- Exact ranges

TEST(Mapping, IntegersKeepSumsOverRanksExact) {
  auto range = [](const std::string& text) {
    const Case line = line_of(text);
    return contract_of(line).integer_range(line);
  };
  EXPECT_EQ(range("mapping_reduce tp=8 dtype=bf16"), 32);                  // 8 B <= 2^8
  EXPECT_EQ(range("mapping_all_reduce tp=3 dtype=bf16"), 85);              // 3 B <= 2^8
  EXPECT_EQ(range("mapping_scaled_reduce tp=8 dtype=f16 scale=3/4"), 85);  // 24 B <= 2^11
  EXPECT_EQ(range("mapping_scaled_reduce tp=2 scale=1/3"), std::nullopt);  // thirds are not exact
  for (const Contract& c : family().contracts())
    for (const char* dtype : {"f64", "f32", "bf16", "f16"})
      EXPECT_GE(range(c.name + " tp=8 dtype=" + dtype), 3) << c.name << dtype;
}

// ---- Traffic

std::vector<Traffic> traffic_of(const std::string& text, int rank = 0) {
  const Case line = line_of(text);
  return contract_of(line).traffic(line, "", rank);
}

// 12 elements on 4 ranks: what a rank hands in is 12 for all-reduce and reduce-scatter, and its
// block of 3 for all-gather and all-to-all.
TEST(Mapping, TrafficOfTwelveElementsOnFourRanks) {
  struct Due {
    const char* contract;
    std::vector<std::tuple<Op, bool, int64_t>> calls;
  };
  const Due table[] = {
      {"mapping_copy", {{Op::all_reduce, true, 12}}},
      {"mapping_reduce", {{Op::all_reduce, false, 12}}},
      {"mapping_scaled_reduce", {{Op::all_reduce, false, 12}}},
      {"mapping_all_reduce", {{Op::all_reduce, false, 12}, {Op::all_reduce, true, 12}}},
      {"mapping_scatter", {{Op::all_gather, true, 3}}},
      {"mapping_gather", {{Op::all_gather, false, 3}}},
      {"mapping_all_gather", {{Op::all_gather, false, 3}, {Op::reduce_scatter, true, 12}}},
      {"mapping_reduce_scatter", {{Op::reduce_scatter, false, 12}, {Op::all_gather, true, 3}}},
      {"mapping_slice", {}},
      {"mapping_pad", {}},
      {"mapping_replicate_to_invariant", {}},
      {"mapping_invariant_to_partial", {}},
      {"mapping_replicate_to_partial", {}},
      {"mapping_reinterpret", {}},
  };
  for (const Due& due : table) {
    const auto met = traffic_of(std::string(due.contract) + " dp=4 tokens=4 hidden=3 dtype=f32");
    ASSERT_EQ(met.size(), due.calls.size()) << due.contract;
    for (size_t i = 0; i < met.size(); ++i) {
      EXPECT_EQ(std::tuple(met[i].op, met[i].backward, met[i].count), due.calls[i]) << due.contract;
      EXPECT_EQ(met[i].label, "dp");
      EXPECT_EQ(met[i].dtype, DType::f32);
      const bool sums = met[i].op == Op::all_reduce || met[i].op == Op::reduce_scatter;
      EXPECT_EQ(met[i].reduce, sums ? Reduce::sum : Reduce::none);
    }
  }
}

TEST(Mapping, GroupsOfOneAreDueNoCall) {
  for (const Contract& c : family().contracts()) {
    EXPECT_TRUE(traffic_of(c.name).empty()) << c.name;
    EXPECT_TRUE(traffic_of(c.name + " tp=4 axis=cp").empty()) << c.name;
  }
}

// Three rows as 1 + 2 and six columns as 2 + 4: rank 0 sends 1 x 6 and gets back 3 x 2.
TEST(Mapping, TrafficOfUnevenBlocksDiffersByRank) {
  const std::string text = "mapping_all_to_all tp=2 tokens=3 hidden=6 split=uneven";
  auto counts = [&](const std::string& t, int rank) {
    std::vector<int64_t> n;
    for (const Traffic& call : traffic_of(t, rank)) n.push_back(call.count);
    return n;
  };
  EXPECT_EQ(counts(text, 0), (std::vector<int64_t>{6, 6}));
  EXPECT_EQ(counts(text, 1), (std::vector<int64_t>{12, 12}));
  EXPECT_EQ(counts("mapping_all_to_all tp=4 tokens=4 hidden=8", 3), (std::vector<int64_t>{8, 8}));
}

TEST(Mapping, UnevenBlocksOfKernelAndJudgeAgree) {
  for (int p = 1; p <= 8; ++p)
    for (int64_t n = p * (p + 1) / 2; n <= 64; ++n) {
      const Case line = line_of("mapping_all_to_all split=uneven tp=" + std::to_string(p) +
                                " tokens=" + std::to_string(n));
      const auto blocks = mapping::block_extents(line, 0);
      ASSERT_EQ(std::accumulate(blocks.begin(), blocks.end(), int64_t{0}), n);
      for (int r = 0; r < p; ++r)
        ASSERT_EQ(blocks[size_t(r)], int64_t(uneven_map().owned(n, p, r).size()))
            << n << " on " << p;
    }
}

// ---- Controls

TEST(Mapping, ControlsHaveALegalWitnessUnlessTheyAreAboutRefusal) {
  for (const Control& c : family().controls()) {
    const Case line = line_of(c.witness);
    EXPECT_EQ(line.contract, c.contract) << c.name;
    EXPECT_FALSE(c.imitates.empty()) << c.name;
    EXPECT_NE(bool(c.make), !c.fault.empty()) << c.name;
    EXPECT_EQ(contract_of(line).precondition(line).has_value(), c.check == "rejection") << c.name;
  }
}

// A mapping has no type of its own on the wire: contract and kernel refuse another one.
TEST(MappingWire, OfAnotherTypeIsRefused) {
  for (const char* name : {"mapping_copy", "mapping_all_reduce", "mapping_scatter"}) {
    const Case narrow = line_of(std::string(name) + " tp=2 dtype=f32 wire=bf16"),
               same = line_of(std::string(name) + " tp=2 dtype=f32 wire=f32");
    const auto& precondition = family().contract(name).precondition;
    EXPECT_TRUE(precondition(narrow).has_value()) << name;
    EXPECT_FALSE(precondition(same).has_value()) << name;
    EXPECT_THROW(mapping::stored_as_sent(narrow), Rejected);
    EXPECT_NO_THROW(mapping::stored_as_sent(same));
  }
}

}  // namespace mapping_test
}  // namespace
}  // namespace shardproof
