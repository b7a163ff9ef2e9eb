// Published models as layouts and lines. Expected numbers are arithmetic on the published extents;
// the padded vocabularies are those of a multiple of 128 tp (Megatron-LM's
// vocab_size_with_padding).
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <set>

#include "oracle/gate.hpp"
#include "oracle/model.hpp"
#include "oracle/run.hpp"

namespace shardproof {
namespace {
namespace model_test {

namespace fs = std::filesystem;

std::string model_path(const std::string& name) {
  return fs::path(__FILE__).parent_path() / "../../fixtures/models" / (name + ".json");
}
Model published(const std::string& name) { return read_model(model_path(name)); }

bool holds(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const BadInput& e) {
    return e.what();
  }
  return "accepted";
}

Model model_of(const std::string& text) { return model_from(parse_json(text, "m.json"), "m.json"); }

// A llama-style file with one key replaced, added (last) or, with an empty value, left out.
std::string config(const std::string& key = "", const std::string& value = "") {
  std::vector<std::pair<std::string, std::string>> keys{
      {"hidden_size", "64"},       {"num_attention_heads", "8"}, {"num_key_value_heads", "4"},
      {"intermediate_size", "96"}, {"vocab_size", "1000"},       {"hidden_act", "\"silu\""}};
  bool found = key.empty();
  for (auto& [k, v] : keys)
    if (k == key) v = value, found = true;
  if (!found) keys.emplace_back(key, value);
  std::string text;
  for (const auto& [k, v] : keys)
    if (!v.empty()) text += (text.empty() ? "\"" : ",\n\"") + k + "\": " + v;
  return "{" + text + "}";
}

// ---- Reading

TEST(Model, BothFamiliesOfKeys) {
  const Model llama = published("llama-3-8b");
  EXPECT_EQ(llama.hidden, 4096);
  EXPECT_EQ(llama.heads, 32);
  EXPECT_EQ(llama.kv_heads, 8);
  EXPECT_EQ(llama.head_dim, 128);
  EXPECT_EQ(llama.ffn, 14336);
  EXPECT_EQ(llama.activation, "swiglu");
  EXPECT_FALSE(llama.qkv_bias || llama.out_bias || llama.mlp_bias);

  const Model gpt2 = published("gpt2");
  EXPECT_EQ(gpt2.hidden, 768);
  EXPECT_EQ(gpt2.kv_heads, 12);
  EXPECT_EQ(gpt2.head_dim, 64);
  EXPECT_EQ(gpt2.ffn, 3072);  // n_inner is null: 4 hidden
  EXPECT_EQ(gpt2.activation, "gelu_tanh");
  EXPECT_TRUE(gpt2.qkv_bias && gpt2.out_bias && gpt2.mlp_bias);

  EXPECT_EQ(published("starcoder-mqa").kv_heads, 1);
  EXPECT_EQ(published("llama-3.2-3b").head_dim, 128);
  const Model qwen = published("qwen2.5-7b");
  EXPECT_TRUE(qwen.qkv_bias);
  EXPECT_FALSE(qwen.out_bias || qwen.mlp_bias);
}

TEST(Model, OtherPublishedForms) {
  EXPECT_EQ(model_of("{\"text_config\": " + config() + ", \"vision_config\": {}}").hidden, 64);
  EXPECT_EQ(model_of(config("num_key_value_heads", "")).kv_heads, 8);
  EXPECT_EQ(model_of(config("num_key_value_heads", "null")).kv_heads, 8);
  EXPECT_EQ(model_of(config("head_dim", "16")).head_dim, 16);
  EXPECT_EQ(model_of(config("hidden_act", "\"gelu_new\"")).activation, "gelu_tanh");
  EXPECT_TRUE(model_of(config("attention_bias", "true")).out_bias);
  EXPECT_EQ(model_of(config("rope_scaling", "{\"factor\": [1, 2.5, null]}")).hidden, 64);
  const Model sparse = model_of(config("num_local_experts", "8"));
  EXPECT_FALSE(sparse.notes.empty());
  EXPECT_EQ(sparse.experts, 8);
  EXPECT_EQ(model_of(config("num_experts", "0")).experts, 0);
  const Model mixtral = published("mixtral-8x7b");
  EXPECT_EQ(mixtral.experts, 8);
  EXPECT_EQ(mixtral.topk, 2);
}

TEST(Model, RefusesWithTheKey) {
  const std::vector<std::tuple<std::string, std::string, std::string>> wrong{
      {"hidden_size", "", "'hidden_size'"},
      {"num_attention_heads", "", "'num_attention_heads'"},
      {"intermediate_size", "", "'intermediate_size'"},
      {"intermediate_size", "null", "'intermediate_size'"},
      {"vocab_size", "", "'vocab_size'"},
      {"hidden_act", "", "'hidden_act'"},
      {"hidden_size", "\"64\"", "the text '64'"},
      {"hidden_size", "64.5", "the number 64.5"},
      {"hidden_size", "true", "met true"},
      {"hidden_size", "[64]", "met a list"},
      {"hidden_size", "-64", "met -64"},
      {"hidden_size", "0", "met 0"},
      {"hidden_size", "1000000000000", "from 1 to 1048576"},
      {"hidden_size", "100000000000000000000", "'hidden_size'"},
      {"vocab_size", "1e9", "'vocab_size'"},
      {"num_key_value_heads", "3", "divisible by kv_heads"},
      {"num_key_value_heads", "16", "divisible by kv_heads"},
      {"num_attention_heads", "12", "hidden divisible by heads"},
      {"hidden_act", "\"gleu\"", "'gleu'"},
      {"hidden_act", "1", "'hidden_act'"},
      {"attention_bias", "\"no\"", "'attention_bias'"},
      {"n_embd", "128", "'hidden_size' and 'n_embd' to agree"},
      {"intermediate_size", "4000000", "within a factor"},
      {"num_experts", "\"8\"", "'num_experts'"},
  };
  for (const auto& [key, value, says] : wrong) {
    const std::string met = refusal([&, k = key, v = value] { model_of(config(k, v)); });
    EXPECT_TRUE(holds(met, says) && holds(met, "m.json")) << key << ": " << value << "\n" << met;
    EXPECT_FALSE(holds(met, "\n")) << met;
  }
  std::string both = config("num_experts", "4");
  both.insert(both.size() - 1, ", \"num_experts_per_tok\": 5");
  EXPECT_TRUE(holds(refusal([&] { model_of(both); }), "at most all experts"));
  // n_embd without n_head is of the other family.
  EXPECT_TRUE(holds(refusal([] { model_of("{\"n_embd\": 8}"); }), "'n_head'"));
  EXPECT_TRUE(holds(refusal([] { model_of("[1]"); }), "met a list"));
}

TEST(Model, RefusesWhatIsNoJson) {
  const std::vector<std::pair<std::string, std::string>> wrong{
      {"", "line 1, column 1"},
      {"{\"hidden_size\": 64", "line 1, column 19"},  // 18 characters, then the end
      {"{\n \"a\": 1,\n \"b\": x}", "line 3, column 7"},
      {"{\"a\": 1} }", "line 1, column 10"},
      {"{\"a\": 1, \"a\": 2}", "'a' twice"},
      {"{\"b\": {\"a\": 1, \"a\": 1}}", "'a' twice"},
      {"{\"a\": 1e999}", "line 1"},
      {"{\"a\": \"\xff\"}", "line 1"},
      {std::string(100, '['), "at most 64"},
      {std::string((size_t(16) << 20) + 1, ' '), "at most 16777216 bytes"},
  };
  for (const auto& [text, says] : wrong) {
    const std::string met = refusal([&, t = text] { model_of(t); });
    EXPECT_TRUE(holds(met, says)) << text.substr(0, 40) << "\n" << met;
    EXPECT_FALSE(holds(met, "\n")) << met;
  }
  EXPECT_EQ(parse_json("{\"a\": {\"x\": 1}, \"b\": {\"x\": 2}}", "").members.size(), 2u);
  EXPECT_TRUE(holds(refusal([] { read_model("/no/such/file.json"); }), "/no/such/file.json"));
  EXPECT_TRUE(holds(refusal([] { read_model("/"); }), "no file"));
}

// Every cut of a right file is refused: nothing is read from half a file.
TEST(Model, RefusesEveryTruncation) {
  const std::string whole = config();
  for (size_t n = 0; n < whole.size(); ++n)
    EXPECT_NE(refusal([&] { model_of(whole.substr(0, n)); }), "accepted") << n;
}

// Mutations of a right file: refused by its own kind of error, or a model whose lines are legal.
TEST(Model, MutationsAreRefusedOrLegal) {
  const Registry all = all_families();
  uint64_t state = 1;
  auto next = [&](uint64_t n) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (state >> 33) % n;
  };
  const std::string letters = "0123456789-.eE\"{}[],: ntrf\\\n\xff";
  int accepted = 0;
  for (int i = 0; i < 1500; ++i) {
    std::string text = config();
    for (uint64_t edits = 1 + next(3); edits > 0; --edits) {
      const size_t at = next(text.size());
      if (next(3) == 0)
        text.erase(at, 1 + next(4));
      else
        text[at] = letters[next(letters.size())];
    }
    try {
      const Model m = model_of(text);
      ++accepted;
      if (refused_tp(m, 2).empty() && i % 8 == 0) lines_of(scaled_down(m, {2, 1, 1}), all);
    } catch (const BadInput&) {
    }
  }
  EXPECT_GT(accepted, 10);
  EXPECT_LT(accepted, 1490);
}

// ---- Layouts

TEST(Model, VocabularyOfGpt2) {
  EXPECT_EQ(padded_vocab(50257, 1), 50304);
  EXPECT_EQ(padded_vocab(50257, 2), 50432);
  EXPECT_EQ(padded_vocab(50257, 4), 50688);
  EXPECT_EQ(padded_vocab(50257, 8), 51200);
  EXPECT_EQ(padded_vocab(128256, 2), 128256);  // 501 x 256
}

// 28 heads and 4 key heads; ffn 18944 = 2^9 x 37.
TEST(Model, QwenOnEightRanks) {
  const Model qwen = published("qwen2.5-7b");
  for (int tp : {1, 2, 4}) EXPECT_EQ(refused_tp(qwen, tp), "");
  const std::string met = refusal([&] { check_layout(qwen, {8, 1, 1}); });
  EXPECT_TRUE(holds(met, "28 heads")) << met;
  EXPECT_TRUE(holds(met, "tp=4")) << met;
}

TEST(Model, OtherLayouts) {
  // 12 heads: 3 and 6 divide them, and ffn 3072 = 2^10 x 3.
  const Model gpt2 = published("gpt2");
  const std::string met = refusal([&] { check_layout(gpt2, {5, 1, 1}); });
  EXPECT_TRUE(holds(met, "tp=4") && holds(met, "tp=6")) << met;
  // 8 key heads under 16 and 64 ranks are shared, 24 heads on 16 ranks are not cut.
  EXPECT_EQ(refused_tp(published("llama-3-70b"), 16), "");
  EXPECT_TRUE(holds(refused_tp(published("llama-3.2-3b"), 16), "24 heads"));
  // One key head: any divisor of 48.
  for (int tp : {2, 3, 16, 48}) EXPECT_EQ(refused_tp(published("starcoder-mqa"), tp), "") << tp;
  EXPECT_TRUE(holds(refused_tp(model_of(config("intermediate_size", "98")), 4), "ffn 98"));
}

// ---- In small

TEST(Model, RatiosStay) {
  for (const char* name : {"gpt2", "gpt3-175b", "llama-3-70b", "llama-3-8b", "llama-3.2-3b",
                           "mistral-7b-v0.1", "mixtral-8x7b", "qwen2.5-7b", "starcoder-mqa"})
    for (int tp : {1, 2, 4, 8}) {
      const Model m = published(name);
      if (!refused_tp(m, tp).empty()) continue;
      const SmallModel s = scaled_down(m, {tp, 1, 2});
      SCOPED_TRACE(std::string(name) + " tp=" + std::to_string(tp));
      EXPECT_EQ(s.heads * m.kv_heads, s.kv_heads * m.heads);
      EXPECT_EQ(s.hidden * m.heads * m.head_dim, m.hidden * s.heads * s.head_dim);
      // To the nearest multiple of tp.
      EXPECT_LE(std::abs(s.ffn * m.hidden - m.ffn * s.hidden), m.hidden * tp);
      EXPECT_EQ(s.heads % tp, 0);
      EXPECT_EQ(s.ffn % tp, 0);
      EXPECT_EQ(s.vocab % tp, 0);
      EXPECT_EQ(s.tokens % (2 * tp), 0);
      // A rank that owns several key heads does in small, too.
      EXPECT_TRUE(m.kv_heads < 2 * tp || s.kv_heads / tp >= 2);
      EXPECT_LE(s.hidden, 256);
    }
  // 7 query heads to a key head, ffn / hidden = 37 / 7.
  const SmallModel qwen = scaled_down(published("qwen2.5-7b"), {4, 1, 1});
  EXPECT_EQ(qwen.heads, 28);
  EXPECT_EQ(qwen.kv_heads, 4);
  EXPECT_EQ(qwen.hidden, 56);
  EXPECT_EQ(qwen.ffn, 296);
}

TEST(Model, LinesCarryTheStructure) {
  const Registry all = all_families();
  auto of = [&](const char* name, ParallelLayout layout) {
    std::string text;
    for (const ModelLine& l : lines_of(scaled_down(published(name), layout), all))
      text += l.line + "\n";
    return text;
  };
  const std::string qwen = of("qwen2.5-7b", {4, 1, 1});
  EXPECT_TRUE(holds(qwen, "linear_column tp=4 heads=28 kv_heads=4 head_dim=2")) << qwen;
  EXPECT_TRUE(holds(qwen, "activation=swiglu bias=off")) << qwen;
  EXPECT_TRUE(holds(qwen, "hidden=56 ffn=296")) << qwen;
  EXPECT_TRUE(holds(qwen, "sp=on")) << qwen;
  const std::string gpt2 = of("gpt2", {2, 2, 1});
  EXPECT_TRUE(holds(gpt2, "mlp tp=2 cp=2")) << gpt2;
  EXPECT_TRUE(holds(gpt2, "activation=gelu_tanh")) << gpt2;
  EXPECT_FALSE(holds(gpt2, "hidden=8 ffn=32 activation=gelu_tanh bias=off")) << gpt2;
  EXPECT_TRUE(holds(gpt2, "attention_ring tp=2 cp=2 seq=8 batch=2 ")) << gpt2;
  EXPECT_TRUE(holds(gpt2, "attention_block tp=2 cp=2 seq=8 batch=2 ")) << gpt2;
  // Without a cp axis only the layer around the core is left.
  EXPECT_TRUE(holds(qwen, "attention_block tp=4 seq=8 batch=2 ")) << qwen;
  EXPECT_FALSE(holds(qwen, "attention_ring")) << qwen;
  // 48 heads of one key head that 4 ranks share, copied once more where cp exchanges heads.
  const std::string shared = of("starcoder-mqa", {4, 2, 1});
  EXPECT_TRUE(holds(shared,
                    "attention_ring tp=4 cp=2 seq=16 batch=2 layout=zigzag heads=48 "
                    "kv_heads=1 head_dim=2"))
      << shared;
  EXPECT_TRUE(holds(shared, "attention_alltoall tp=4 cp=2")) << shared;
  EXPECT_TRUE(holds(shared, "kv_replicate=on")) << shared;
  // Shared key heads: the fused weight of linear_column cannot be cut, the query weight can; a
  // layer's attention copies key weights or gathers what they gave.
  const std::string query = of("starcoder-mqa", {4, 1, 1});
  EXPECT_TRUE(holds(query, "linear_column tp=4 tokens=12 in=96 out=96")) << query;
  EXPECT_TRUE(holds(query, "kv_heads=1 head_dim=2 mask=causal")) << query;
  EXPECT_TRUE(holds(shared, "attention_block tp=4 cp=2")) << shared;
  EXPECT_TRUE(holds(shared, "form=gather")) << shared;
  EXPECT_TRUE(holds(refusal([&] { of("gpt2", {4, 8, 4}); }), "ranks"));
}

// 8 experts on 2 ranks: three each in small, on 8 ranks one each, on 3 ranks none are cut.
TEST(Model, ExpertsAreCutLikeTheRest) {
  const Registry all = all_families();
  auto of = [&](const std::string& name, ParallelLayout layout) {
    std::string text;
    for (const ModelLine& l : lines_of(scaled_down(published(name), layout), all))
      if (l.part == "router" || l.part.starts_with("experts") || l.part == "load balance")
        text += l.line + "\n";
    return text;
  };
  const std::string two = of("mixtral-8x7b", {2, 1, 2}), eight = of("mixtral-8x7b", {8, 1, 1});
  EXPECT_TRUE(holds(two, "expert_alltoall tp=2 dp=2 tokens=")) << two;
  EXPECT_TRUE(holds(eight, "expert_alltoall tp=8") && holds(eight, "experts=8")) << eight;
  EXPECT_TRUE(holds(two, "expert_mlp tp=2 dp=2")) << two;
  EXPECT_TRUE(holds(two, "replicated_router tp=2 dp=2")) << two;
  EXPECT_TRUE(holds(two, "expert_balance tp=2 dp=2") && holds(two, "sp=on")) << two;
  EXPECT_EQ(of("llama-3-8b", {2, 1, 1}), "");
  const Model mixtral = published("mixtral-8x7b"), sparse = model_of(config("num_experts", "60"));
  EXPECT_EQ(scaled_down(mixtral, {2, 1, 1}).experts, 6);
  EXPECT_EQ(scaled_down(mixtral, {2, 1, 1}).topk, 2);
  EXPECT_EQ(scaled_down(mixtral, {1, 1, 1}).experts, 3);
  EXPECT_EQ(scaled_down(sparse, {8, 1, 1}).experts, 0);
  EXPECT_EQ(scaled_down(sparse, {4, 1, 1}).experts, 12);
}

TEST(Model, ExpertsOfAStoredModelHold) {
  static const Registry all = all_families();
  static Options options;
  static Runner runner(options, all);
  int judged = 0;
  for (const auto& [tp, cp, dp] : {std::tuple{1, 1, 2}, {2, 1, 1}, {2, 2, 1}, {4, 1, 1}, {8, 1, 1}})
    for (const ModelLine& l : lines_of(scaled_down(published("mixtral-8x7b"), {tp, cp, dp}), all)) {
      const Case line = parse(l.line, all);
      if (all.contract(line.contract).family != "expert") continue;
      const auto due = due_checks(all.contract(line.contract), line, declared_of(line, all), {});
      for (const CheckResult& c : runner.run(line, due, lane_of(line)).result.checks)
        EXPECT_EQ(c.verdict, Verdict::passed) << l.line << ": " << c.check << " " << c.note;
      ++judged;
    }
  EXPECT_EQ(judged, 3 * (2 + 4 * 4));  // three contracts, in two variants, with sp in four
}

TEST(Model, TheGateJudgesTheseLinesAlone) {
  const Registry all = all_families();
  const Model m = published("llama-3-8b");
  const ModelGate gate = model_gate(m, {2, 4}, 1, 1, all);
  Options options;
  options.tier = "smoke";
  options.controls = false;
  std::set<std::string> due, expected;
  for (const Due& d : plan_gate(options, gate.registry)) due.insert(print(d.line));
  for (int tp : {2, 4})
    for (const ModelLine& l : lines_of(scaled_down(m, {tp, 1, 1}), all)) expected.insert(l.line);
  EXPECT_EQ(due, expected);
  EXPECT_EQ(gate.registry.subjects().size(), gate.registry.ours());
  EXPECT_TRUE(holds(gate.text, "llama-3-8b.json"));
  EXPECT_TRUE(holds(gate.text, "--cp 2 or 4")) << gate.text;
  EXPECT_FALSE(holds(model_gate(m, {2}, 2, 1, all).text, "--cp 2 or 4"));
  EXPECT_THROW(model_gate(published("qwen2.5-7b"), {4, 8}, 1, 1, all), BadInput);
}

// On up to 8 ranks; all checks that are due. Models that are alike in small share lines, which are
// judged once, and those of ctest's entry model.starcoder-mqa.cp2 by that, with their twins.
TEST(Model, AttentionOfEveryStoredModelHoldsOverCp) {
  static const Registry all = all_families();
  static Options options;
  static Runner runner(options, all);
  std::set<std::string> seen;
  for (const char* name : {"gpt2", "gpt3-175b", "llama-3-70b", "llama-3-8b", "llama-3.2-3b",
                           "mistral-7b-v0.1", "qwen2.5-7b", "starcoder-mqa"}) {
    const Model m = published(name);
    for (const auto& [tp, cp] : {std::pair{1, 2}, {2, 2}, {4, 2}, {1, 4}, {2, 4}}) {
      ASSERT_EQ(refused_tp(m, tp), "");
      const bool elsewhere = name == std::string("starcoder-mqa") && cp == 2;
      std::set<std::string> judged;
      for (const ModelLine& l : lines_of(scaled_down(m, {tp, cp, 1}), all)) {
        const Case line = parse(l.line, all);
        if (all.contract(line.contract).family != "attention") continue;
        judged.insert(line.contract);
        if (elsewhere || !seen.insert(print(line)).second) continue;
        const auto due = due_checks(all.contract(line.contract), line, declared_of(line, all), {});
        for (const CheckResult& c : runner.run(line, due, lane_of(line)).result.checks)
          EXPECT_EQ(c.verdict, Verdict::passed) << l.line << ": " << c.check << " " << c.note;
      }
      // Exchanges in runs of two ask for heads that these divide.
      EXPECT_GE(judged.size(), 4u) << name << " tp=" << tp << " cp=" << cp;
    }
  }
}

// ---- The command

struct Ended {
  int code;
  std::string out, err;
};

Ended call(std::vector<std::string> words) {
  words.insert(words.begin(), "shardproof");
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  testing::internal::CaptureStdout();
  testing::internal::CaptureStderr();
  Ended ended{main(int(words.size()), argv.data(), all_families()), "", ""};
  ended.out = testing::internal::GetCapturedStdout();
  ended.err = testing::internal::GetCapturedStderr();
  return ended;
}

TEST(ModelCommand, DryRunShowsTheModelAndItsLines) {
  const Ended ended =
      call({"gate", "--model", model_path("gpt2"), "--tp", "2", "--dp", "2", "--dry-run"});
  EXPECT_EQ(ended.code, 0) << ended.err;
  for (const char* part : {"gpt2.json", "50432", "case     mlp tp=2 dp=2", "nothing was run"})
    EXPECT_TRUE(holds(ended.out, part)) << part << "\n" << ended.out;
}

TEST(ModelCommand, SpeaksOfWhatItsPatternLeavesAlone) {
  const std::vector<std::string> words{"--model", model_path("gpt2"), "--tp", "2", "--cp",
                                       "2",       "--dry-run"};
  auto asked = [&](const std::string& pattern) {
    std::vector<std::string> all{"gate", pattern};
    all.insert(all.end(), words.begin(), words.end());
    return call(all);
  };
  const Ended ended = asked("attention_ring");
  EXPECT_EQ(ended.code, 0) << ended.err;
  EXPECT_TRUE(holds(ended.out, "attention, ring    attention_ring tp=2 cp=2")) << ended.out;
  EXPECT_EQ(ended.out.find("runs"), ended.out.rfind("runs")) << ended.out;
  for (const char* other : {"MLP", "mlp", "norm_sequence", "attention_allgather"})
    EXPECT_FALSE(holds(ended.out, other)) << other << "\n" << ended.out;
  const Ended family = asked("attention");
  EXPECT_TRUE(holds(family.out, "attention_alltoall")) << family.out;
  EXPECT_FALSE(holds(family.out, "MLP")) << family.out;
}

TEST(ModelCommand, RunsAPart) {
  const Ended ended = call({"gate", "linear_row", "--model", model_path("qwen2.5-7b"), "--tp", "2",
                            "--check", "forward,gradient"});
  EXPECT_EQ(ended.code, 0) << ended.out << ended.err;
  EXPECT_TRUE(holds(ended.out, "PASSED")) << ended.out;
}

TEST(ModelCommand, WrongCallsAreOneLine) {
  const std::string gpt2 = model_path("gpt2"), qwen = model_path("qwen2.5-7b");
  const std::vector<std::pair<std::vector<std::string>, std::string>> wrong{
      {{"gate", "--tp", "2"}, "--model"},
      {{"gate", "--model"}, "--model"},
      {{"gate", "--model", "/no/such.json"}, "/no/such.json"},
      {{"gate", "--model", gpt2, "--tp", "0"}, "--tp"},
      {{"gate", "--model", gpt2, "--tp", "65"}, "--tp"},
      {{"gate", "--model", gpt2, "--tp", "two"}, "'two'"},
      {{"gate", "--model", qwen, "--tp", "8"}, "28 heads"},
      {{"gate", "--model", gpt2, "--tp", "4", "--cp", "32"}, "ranks"},
      {{"gate", "mapping", "--model", gpt2}, "met 'mapping', of which it has none"},
      {{"gate", "tp=2 sharded_step", "--model", gpt2},
       "met 'sharded_step', of which it has none; with these ranks it has lines of "},
      {{"gate", "attention_ring", "--model", gpt2}, "met 'attention_ring', of which it has none"},
      {{"gate", "mappign", "--model", gpt2}, "as `shardproof list` names them, met 'mappign'"},
      {{"gate", "--model", gpt2, "--failed", "x"}, "--failed"},
  };
  for (const auto& [words, says] : wrong) {
    const Ended ended = call(words);
    EXPECT_EQ(ended.code, 2) << ended.out;
    EXPECT_EQ(ended.out, "");
    EXPECT_EQ(std::count(ended.err.begin(), ended.err.end(), '\n'), 1) << ended.err;
    EXPECT_TRUE(holds(ended.err, says)) << ended.err;
  }
}

}  // namespace model_test
}  // namespace
}  // namespace shardproof
