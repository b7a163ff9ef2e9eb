// Case lines: parsing and printing are inverse, and a wrong line is refused in one clear line.
//
// The contract here exists for the test only: it has a key of every sort. Expected values follow
// from the documented keys and from Megatron's group tables (fixtures/README.md), not from output.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <random>

#include "oracle/registry.hpp"

namespace shardproof {
namespace {
namespace case_test {

constexpr int64_t lowest = std::numeric_limits<int64_t>::min(),
                  highest = std::numeric_limits<int64_t>::max();

std::string expected_docs(std::string_view value) {
  return value.find_first_not_of("0123456789,") == std::string_view::npos ? ""
                                                                          : "lengths with commas";
}

std::string only_axis_above_one(const Case& line) {
  std::string only;
  for (Axis a : Mesh::default_order())
    if (line.ranks(a) > 1) only = only.empty() ? name(a) : "several";
  return only == "several" ? "" : only.empty() ? "tp" : only;
}

Key integer(const char* name, const char* fallback, int64_t low, int64_t high) {
  Key k{name, fallback, "an integer"};
  k.low = low, k.high = high;
  return k;
}

Key word(const char* name, const char* fallback, std::vector<std::string> choices) {
  Key k{name, fallback, "a word"};
  k.choices = std::move(choices);
  return k;
}

Contract sample() {
  Contract c;
  c.name = "sample_row", c.family = "sample", c.linear = true;
  Key docs{"docs", "", "lengths"}, axis = word("axis", "", {"tp", "cp", "dp", "ep", "pp"});
  docs.valid = expected_docs;
  axis.derive = only_axis_above_one;
  c.keys = {word("sp", "off", {"on", "off"}), integer("tokens", "24", 1, 1 << 20),
            integer("offset", "0", lowest, highest), docs, axis};
  return c;
}

Registry registry() {
  Registry r;
  r.add(sample());
  Contract rounding;
  rounding.name = "curve", rounding.family = "sample";
  r.add(rounding);
  for (const char* name : {"", "mine"}) r.add(Subject{name, "sample_row", nullptr, {}});
  Control control;
  control.name = "bias_before_reduce", control.contract = "sample_row";
  r.add(control);
  control.contract = "curve", control.name = "bends";
  r.add(control);
  return r;
}

const Registry& known() {
  static const Registry r = registry();
  return r;
}

Case read(const std::string& line) { return parse(line, known()); }

bool same(const Case& a, const Case& b) { return a.contract == b.contract && a.keys == b.keys; }

TEST(Case, LeavesDefaultsOut) {
  EXPECT_EQ(print(read("sample_row tp=4 sp=on tokens=12 dtype=f32 fill=normal seed=7")),
            "sample_row tp=4 sp=on tokens=12 dtype=f32 fill=normal seed=7");
  EXPECT_EQ(print(read("sample_row tp=1 sp=off tokens=24 dtype=f64 fill=integers seed=1")),
            "sample_row");
  EXPECT_EQ(print(read("  sample_row\tseed=7   tp=2 ")), "sample_row tp=2 seed=7");
}

TEST(Case, CanonicalNamesEveryKeyInAFixedOrder) {
  EXPECT_EQ(print_canonical(read("sample_row cp=2 docs=7,5")),
            "sample_row tp=1 cp=2 dp=1 ep=1 pp=1 order=tp,cp,ep,dp,pp sp=off tokens=24 offset=0 "
            "docs=7,5 axis=cp dtype=f64 acc= wire= grad= fill=integers seed=1 strides=contiguous "
            "transport=processes device=host subject= control= fault=");
}

TEST(Case, DefaultsOfTheCommonKeys) {
  Case c = read("sample_row");
  for (Axis a : Mesh::default_order()) EXPECT_EQ(c.ranks(a), 1);
  EXPECT_EQ(c.text("fill"), "integers");
  EXPECT_EQ(read("curve").text("fill"), "normal");
  EXPECT_EQ(c.dtype(), DType::f64);
  EXPECT_EQ(c.seed(), 1u);
  EXPECT_EQ(c.text("transport"), "processes");
  EXPECT_EQ(c.text("acc"), "");
  EXPECT_FALSE(c.on("sp"));
  EXPECT_TRUE(c.has("tokens"));
  EXPECT_FALSE(read("curve").has("tokens"));
  EXPECT_THROW(read("curve").text("tokens"), std::out_of_range);
}

// A value of a key, any legal one, the ends of integers among them.
std::string random_value(const Key& key, std::mt19937_64& random) {
  auto below = [&](uint64_t n) { return random() % n; };
  if (key.name == "seed")
    return std::to_string(below(4)   ? random()
                          : below(2) ? 0
                                     : std::numeric_limits<uint64_t>::max());
  if (key.integer()) {
    if (below(3) == 0) return std::to_string(below(2) ? key.low : key.high);
    return std::to_string(std::uniform_int_distribution<int64_t>(key.low, key.high)(random));
  }
  if (!key.choices.empty()) return key.choices[below(key.choices.size())];
  if (key.name == "order") {
    std::vector<std::string> axes = {"tp", "cp", "ep", "dp", "pp"};
    std::shuffle(axes.begin(), axes.end(), random);
    return axes[0] + "," + axes[1] + "," + axes[2] + "," + axes[3] + "," + axes[4];
  }
  if (key.name == "docs") return std::to_string(below(100)) + "," + std::to_string(below(100));
  return key.fallback;
}

// NCCL on the host is the one contradiction that random values run into.
bool contradicts(const std::vector<std::pair<std::string, std::string>>& given) {
  auto value = [&](const char* key, std::string fallback) {
    for (const auto& [name, text] : given)
      if (name == key) fallback = text;
    return fallback;
  };
  return value("transport", "processes") == "nccl" && value("device", "host") == "host";
}

TEST(Case, ParsingAndPrintingAreInverse) {
  std::mt19937_64 random(20240917);
  const std::vector<Key> keys = keys_of(sample());
  int lines = 0;
  while (lines < 3000) {
    std::vector<std::pair<std::string, std::string>> given;
    for (const Key& key : keys)
      if (key.name == "axis" || random() % 3 == 0)
        given.emplace_back(key.name, random_value(key, random));
    if (contradicts(given)) continue;
    std::shuffle(given.begin(), given.end(), random);
    std::string line = "sample_row";
    for (const auto& [key, value] : given) line += " " + key + "=" + value;
    const Case c = read(line);
    for (const auto& [key, value] : given) ASSERT_EQ(c.text(key), value) << line;
    ASSERT_TRUE(same(read(print(c)), c)) << line << "\nprinted as " << print(c);
    ASSERT_TRUE(same(read(print_canonical(c)), c)) << line;
    ASSERT_EQ(print(read(print(c))), print(c));
    ASSERT_EQ(print_canonical(read(print(c))), print_canonical(c));
    ++lines;
  }
}

TEST(Case, HoldsTheEndsOfIntegers) {
  Case c = read("sample_row seed=18446744073709551615 offset=-9223372036854775808");
  EXPECT_EQ(c.seed(), 18446744073709551615u);
  EXPECT_EQ(c.at("offset"), lowest);
  EXPECT_EQ(read("sample_row offset=9223372036854775807").at("offset"), highest);
  EXPECT_EQ(read("sample_row seed=0").seed(), 0u);
  EXPECT_THROW(read("sample_row seed=18446744073709551616"), BadInput);
  EXPECT_THROW(read("sample_row offset=9223372036854775808"), BadInput);
  EXPECT_THROW(read("sample_row seed=-1"), BadInput);
}

TEST(Case, SpellsEqualValuesInOneWay) {
  EXPECT_EQ(print(read("sample_row tp=04 seed=007")), "sample_row tp=4 seed=7");
  EXPECT_EQ(read("sample_row order=cp,tp").text("order"), "cp,tp,ep,dp,pp");
  EXPECT_EQ(print(read("sample_row order=tp,cp")), "sample_row");
}

// Rank numbers by the rule rank = first + size(first) * (second + ...).
TEST(Case, OrderArrangesTheMesh) {
  using Groups = std::vector<std::vector<int>>;
  EXPECT_EQ(read("sample_row tp=2 cp=4 axis=tp").mesh().groups({Axis::tp}),
            (Groups{{0, 1}, {2, 3}, {4, 5}, {6, 7}}));
  EXPECT_EQ(read("sample_row tp=2 cp=4 axis=tp order=cp,tp").mesh().groups({Axis::tp}),
            (Groups{{0, 4}, {1, 5}, {2, 6}, {3, 7}}));
  EXPECT_EQ(read("sample_row tp=2 cp=4 axis=tp").world(), 8);
}

TEST(Case, DerivedFallbackFollowsItsLine) {
  EXPECT_EQ(read("sample_row").text("axis"), "tp");
  Case c = read("sample_row cp=4");
  EXPECT_EQ(c.text("axis"), "cp");
  EXPECT_EQ(print(c), "sample_row cp=4");
  EXPECT_EQ(print(read("sample_row cp=4 axis=cp")), "sample_row cp=4");
  EXPECT_EQ(print(read("sample_row cp=4 axis=dp")), "sample_row cp=4 axis=dp");
  c.set("cp", "1");
  c.set("dp", "2");
  EXPECT_EQ(c.text("axis"), "dp");
  EXPECT_EQ(print(c), "sample_row dp=2");
  EXPECT_EQ(print(read("sample_row tp=2 dp=2 axis=dp")), "sample_row tp=2 dp=2 axis=dp");
}

TEST(Case, FaultsAndControlsAreNamed) {
  EXPECT_EQ(print(read("sample_row tp=2 control=bias_before_reduce")),
            "sample_row tp=2 control=bias_before_reduce");
  EXPECT_EQ(print(read("sample_row tp=4 fault=skip@backward.tp.1@rank2")),
            "sample_row tp=4 fault=skip@backward.tp.1@rank2");
  EXPECT_EQ(print(read("sample_row tp=4 fault=skip@backward.tp.01@rank02")),
            "sample_row tp=4 fault=skip@backward.tp.1@rank2");
  EXPECT_EQ(read("sample_row subject=mine").text("subject"), "mine");
}

struct Wrong {
  const char* line;
  std::vector<const char*> says;  // all of them
};

TEST(Case, RefusesInOneLineThatNamesTheKey) {
  const std::vector<Wrong> table = {
      {"", {"empty line", "expected"}},
      {"tp=2", {"'tp=2'", "contract first"}},
      {"sample_rwo tp=2", {"'sample_rwo'", "did you mean 'sample_row'"}},
      {"sample tp=2", {"family", "sample_row"}},
      {"entirely_other", {"'entirely_other'", "list"}},
      {"sample_row tp", {"'tp'", "key=value"}},
      {"sample_row =2", {"'=2'", "key=value"}},
      {"sample_row tp=2=3", {"'tp=2=3'", "key=value"}},
      {"sample_row curve", {"'curve'", "key=value"}},
      {"sample_row toknes=12", {"'toknes'", "did you mean 'tokens'"}},
      {"sample_row quux=12", {"'quux'", "tokens", "dtype"}},
      {"sample_row tp=2 tp=4", {"'tp'", "once", "twice", "'2'", "'4'"}},
      {"sample_row tp=2 tp=2", {"'tp'", "once", "twice"}},
      {"sample_row tp=0", {"'tp'", "from 1 to 64", "'0'"}},
      {"sample_row tp=65", {"'tp'", "from 1 to 64", "'65'"}},
      {"sample_row tp=two", {"'tp'", "integer", "'two'"}},
      {"sample_row tp=2.0", {"'tp'", "integer", "'2.0'"}},
      {"sample_row tp=+2", {"'tp'", "integer"}},
      {"sample_row tp=", {"'tp'", "value", "default"}},
      {"sample_row axis=", {"'axis'", "value", "default"}},
      {"sample_row tp=99999999999999999999", {"'tp'", "from 1 to 64"}},
      {"sample_row seed=1e3", {"'seed'", "18446744073709551615", "'1e3'"}},
      {"sample_row dtype=fp32", {"'dtype'", "f64 f32 bf16 f16", "did you mean 'f32'"}},
      {"sample_row dtype=e4m3", {"'dtype'", "'e4m3'", "not there yet"}},
      {"sample_row dtype=e5m2", {"'dtype'", "'e5m2'", "not there yet"}},
      {"sample_row scaling=block", {"'scaling'", "not there yet"}},
      {"sample_row overlap=on", {"'overlap'", "not there yet"}},
      {"sample_row chunks=4", {"'chunks'", "not there yet"}},
      {"sample_row graph=on", {"'graph'", "not there yet"}},
      {"sample_row buffers=registered", {"'buffers'", "not there yet"}},
      {"sample_row nodes=2", {"'nodes'", "explain"}},
      {"sample_row sp=yes", {"'sp'", "on off", "'yes'"}},
      {"sample_row fill=ones", {"'fill'", "integers normal large cancelling offset"}},
      {"sample_row docs=a,b", {"'docs'", "lengths with commas", "'a,b'"}},
      {"sample_row order=tp,xp", {"'order'", "axis", "'tp,xp'"}},
      {"sample_row order=tp,tp", {"'order'", "at most once"}},
      {"sample_row tp=2 dp=2", {"'axis'", "axis="}},
      {"sample_row transport=tcp", {"'transport'", "processes threads mpi nccl", "'tcp'"}},
      {"sample_row transport=proceses", {"did you mean 'processes'"}},
      {"sample_row transport=nccl", {"'transport'", "'device'", "device=cuda"}},
      {"sample_row subject=mien", {"'subject'", "did you mean 'mine'"}},
      {"sample_row control=bias_after", {"'control'", "bias_before_reduce", "'bias_after'"}},
      {"sample_row control=bends", {"'control'", "'bends'", "curve"}},
      {"sample_row control=bias_before_reduce@3", {"'control'", "`drift`"}},
      {"sample_row control=bias_before_reduce subject=mine", {"'control'", "'subject'"}},
      {"sample_row control=bias_before_reduce fault=skip@forward.tp.1", {"'control'", "'fault'"}},
      {"sample_row tp=2 fault=skpi@forward.tp.1", {"fault", "skip"}},
      {"sample_row tp=2 fault=skip@forward.tp.1@rank2", {"'fault'", "0 to 1", "rank 2"}},
      {"sample_row dtype=f6\x1b[31m4", {"'dtype'", "'f6\\x1b[31m4'"}},
  };
  for (const Wrong& wrong : table) {
    try {
      read(wrong.line);
      ADD_FAILURE() << "'" << wrong.line << "' was taken";
    } catch (const BadInput& e) {
      std::string text = e.what();
      EXPECT_EQ(text.find('\n'), std::string::npos) << text;
      for (const char* part : wrong.says)
        EXPECT_NE(text.find(part), std::string::npos)
            << "line  " << wrong.line << "\nsays  " << text << "\nnot   " << part;
    }
  }
}

TEST(Case, WorldsThatATransportCannotGiveNameTheMesh) {
  Case c = read("sample_row tp=64 dp=64 axis=tp");
  try {
    check_world(c);
    ADD_FAILURE() << "4096 ranks were taken";
  } catch (const BadInput& e) {
    for (const char* part : {"tp=64", "dp=64", "4096", "processes"})
      EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << e.what();
  }
  EXPECT_THROW(check_world(read("sample_row tp=13 cp=5 axis=tp")), BadInput);
  EXPECT_NO_THROW(check_world(read("sample_row tp=64")));
}

TEST(Values, IntegersAndLists) {
  EXPECT_EQ(parse_integer("k", "-3", -3, 12), -3);
  EXPECT_EQ(parse_integer("k", "12", -3, 12), 12);
  for (const char* wrong : {"13", "-4", "", " 1", "1 ", "0x1", "1.0"})
    EXPECT_THROW(parse_integer("k", wrong, -3, 12), BadInput) << wrong;
  EXPECT_EQ(parse_list("docs", "7,1,10"), (std::vector<int64_t>{7, 1, 10}));
  EXPECT_EQ(parse_list("docs", "-5"), (std::vector<int64_t>{-5}));
  for (const char* wrong : {"", "7,", ",7", "7,,1", "7;1", "7, 1"})
    EXPECT_THROW(parse_list("docs", wrong), BadInput) << wrong;
}

TEST(Nearest, IsAFewSlipsAwayOrABeginning) {
  const std::vector<std::string> names = {"linear_column", "linear_row", "mapping_reduce",
                                          "mapping_reduce_scatter", "mlp"};
  EXPECT_EQ(nearest("linear_rwo", names), "linear_row");       // neighbours swapped
  EXPECT_EQ(nearest("ilnear_rwo", names), "linear_row");       // twice
  EXPECT_EQ(nearest("linaer_colum", names), "linear_column");  // two slips
  EXPECT_EQ(nearest("lin", names), "linear_column");           // begins two, the first of them
  EXPECT_EQ(nearest("mapping_red", names), "mapping_reduce");  // begins two, the closer one
  EXPECT_EQ(nearest("reduce_scatter", names), "mapping_reduce_scatter");
  EXPECT_EQ(nearest("mlpp", names), "mlp");
  EXPECT_EQ(nearest("attention", names), "");
  EXPECT_EQ(nearest("my_linear_row_x", names), "linear_row");
  EXPECT_EQ(nearest("conv_width", {"channels", "width"}), "width");
  EXPECT_EQ(nearest("", names), "");
  EXPECT_EQ(nearest("xy", {"tp", "cp"}), "");  // everything is two slips from two letters
  EXPECT_EQ(nearest("tq", {"cp", "tp"}), "tp");
}

TEST(Registry, NamesHoldNoPatternCharacters) {
  for (const char* name : {"a-b", "a*b", "a?b", "a:b", "a b", "a=b", "a@b"}) {
    Registry r;
    Contract c;
    c.name = name, c.family = "f";
    EXPECT_THROW(r.add(c), std::invalid_argument) << name;
  }
  Registry r = registry();
  EXPECT_THROW(r.add(sample()), std::invalid_argument);
  EXPECT_THROW(r.add(Subject{"mine", "sample_row", nullptr, {}}), std::invalid_argument);
  EXPECT_EQ(r.families(), std::vector<std::string>{"sample"});
}

TEST(Registry, AContractsOwnKeyReplacesACommonOne) {
  Contract c = sample();
  c.name = "half_only";
  c.keys.push_back(word("dtype", "bf16", {"bf16"}));
  Registry r;
  r.add(c);
  EXPECT_EQ(parse("half_only", r).text("dtype"), "bf16");
  EXPECT_THROW(parse("half_only dtype=f64", r), BadInput);
}

// A line that its contract refuses has a mesh, too: of it the refusal is told.
TEST(Case, CopiesOfKeyHeadsSplitTheTensorAxisWhereTheyDivideIt) {
  Contract c = sample();
  c.keys.push_back(integer("kv_replicas", "1", 0, 8));
  Registry r;
  r.add(c);
  for (const auto& [copies, of] : {std::pair{2, 2}, {4, 4}, {3, 1}, {0, 1}})
    EXPECT_EQ(
        parse("sample_row tp=4 kv_replicas=" + std::to_string(copies), r).mesh().size(Axis::rep),
        of)
        << copies;
}

}  // namespace case_test
}  // namespace
}  // namespace shardproof
