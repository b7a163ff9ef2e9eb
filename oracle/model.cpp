// config.json -> Model -> the same structure in small -> case lines.
//
// Published files use two families of keys, hidden_size ... and n_embd ..., and older names of the
// same things; the tables below hold them. What a file leaves to the code of its model (biases of
// Qwen2, gates of Gemma) is filled in by model_type.
#include "oracle/model.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <functional>
#include <set>

#include "oracle/command.hpp"
#include "oracle/joined.hpp"
#include "oracle/report_parts.hpp"

namespace shardproof {

namespace {

// ---- Reading

struct Names {
  const char* what;
  std::vector<std::string> keys;  // the hidden_size family's name, the n_embd family's, others
  int64_t most;
};

const Names hidden_names{"hidden", {"hidden_size", "n_embd", "d_model", "n_embed"}, 1 << 20};
const Names heads_names{"heads", {"num_attention_heads", "n_head", "n_heads"}, 1024};
const Names kv_names{"kv_heads", {"num_key_value_heads", "num_kv_heads"}, 1024};
const Names head_dim_names{"head_dim", {"head_dim"}, 1 << 14};
const Names ffn_names{
    "ffn", {"intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"}, 1 << 22};
const Names vocab_names{"vocab", {"vocab_size"}, 1 << 26};
const Names layers_names{"layers", {"num_hidden_layers", "n_layer", "n_layers"}, 1 << 14};
const Names positions_names{"positions", {"max_position_embeddings", "n_positions"}, 1 << 30};
const Names experts_names{
    "experts", {"num_local_experts", "num_experts", "n_routed_experts"}, 1 << 16};
const Names topk_names{"topk", {"num_experts_per_tok", "num_experts_per_token"}, 64};
const std::vector<std::string> activation_keys{"hidden_activation", "hidden_act",
                                               "activation_function", "activation"};

class Reader {
 public:
  Reader(const JsonValue& config, std::string source)
      : config_(config), source_(std::move(source)) {}

  [[noreturn]] void refuse(const std::string& expected, const std::string& met) const {
    throw BadInput(fmt::format("{}: expected {}, met {}", source_, expected, met));
  }

  // A member that is there and not null.
  const JsonValue* given(const std::string& key) const {
    const JsonValue* v = config_.find(key);
    return v && v->kind != JsonValue::null ? v : nullptr;
  }

  std::optional<int64_t> integer(const Names& names) const {
    std::optional<int64_t> found;
    std::string first;
    for (const std::string& key : names.keys) {
      const JsonValue* v = given(key);
      if (!v) continue;
      if (v->kind != JsonValue::integer || v->whole < 1 || v->whole > names.most)
        refuse(fmt::format("key '{}' to be an integer from 1 to {}", key, names.most), shown(*v));
      if (found && *found != v->whole)
        refuse(fmt::format("keys '{}' and '{}' to agree", first, key),
               fmt::format("{} and {}", *found, v->whole));
      if (!found) first = key;
      found = v->whole;
    }
    return found;
  }

  int64_t needed(const Names& names) const {
    if (auto value = integer(names)) return *value;
    const bool other = names.keys.size() > 1 && given("n_embd");
    std::vector<std::string> rest = names.keys;
    const std::string key = rest[other ? 1 : 0];
    std::erase(rest, key);
    refuse(fmt::format("key '{}'{}", key,
                       rest.empty() ? "" : fmt::format(" (or {})", joined(rest, ", "))),
           "none of this name with a value");
  }

  std::optional<bool> flag(const std::string& key) const {
    const JsonValue* v = given(key);
    if (!v) return {};
    if (v->kind != JsonValue::boolean)
      refuse(fmt::format("key '{}' to be true or false", key), shown(*v));
    return v->truth;
  }

  std::string word(const std::string& key) const {
    const JsonValue* v = given(key);
    if (!v) return "";
    if (v->kind != JsonValue::text) refuse(fmt::format("key '{}' to be a text", key), shown(*v));
    return v->words;
  }

 private:
  const JsonValue& config_;
  std::string source_;
};

// Models that see and hear keep the numbers of their text model one level down.
const JsonValue& text_part(const JsonValue& config) {
  for (const std::string& key : hidden_names.keys)
    if (config.find(key)) return config;
  const JsonValue* text = config.find("text_config");
  return text && text->kind == JsonValue::object ? *text : config;
}

int64_t kv_heads_of(const Reader& in, int64_t heads) {
  const bool one = in.flag("multi_query").value_or(false) &&
                   !in.flag("new_decoder_architecture").value_or(false);
  return one ? 1 : in.integer(kv_names).value_or(heads);
}

// GPT-2 writes null and Falcon and BLOOM write nothing where the FFN is four times as wide.
int64_t ffn_of(const Reader& in, const Model& m) {
  const bool four = in.given("n_embd") || m.type == "falcon" || m.type == "bloom";
  if (auto value = in.integer(ffn_names)) return *value;
  return four ? 4 * m.hidden : in.needed(ffn_names);
}

// Word of a file -> key of the contract; a note where only the structure is the same.
struct Activation {
  const char *word, *key, *note;
};
const Activation activations[] = {
    {"silu", "silu", ""},
    {"swish", "silu", ""},
    {"gelu", "gelu", ""},
    {"gelu_new", "gelu_tanh", ""},
    {"gelu_fast", "gelu_tanh", ""},
    {"gelu_pytorch_tanh", "gelu_tanh", ""},
    {"quick_gelu", "gelu_tanh", "gelu_tanh stands for quick_gelu"},
    {"relu", "gelu", "gelu stands for relu"},
    {"relu2", "gelu", "gelu stands for relu2"},
};

std::string activation_word(const Reader& in, const Model& m) {
  for (const std::string& key : activation_keys)
    if (std::string word = in.word(key); !word.empty()) return word;
  if (m.type == "bloom") return "gelu_new";  // in its code, not in its file
  in.refuse("key 'hidden_act' or 'activation_function'", "neither with a value");
}

// A file does not say whether the FFN is gated: SiLU always is, and Gemma's tanh GELU.
void read_activation(const Reader& in, Model& m) {
  const std::string word = activation_word(in, m);
  const bool gemma = m.type.starts_with("gemma");
  for (const Activation& a : activations) {
    if (word != a.word) continue;
    const bool gated = std::string(a.key) == "silu" || gemma;
    m.activation = gated ? "swiglu" : a.key;
    if (*a.note) m.notes.push_back(a.note);
    if (gemma) m.notes.push_back("swiglu stands for a gate through " + word);
    return;
  }
  std::vector<std::string> known;
  for (const Activation& a : activations) known.push_back(a.word);
  in.refuse(fmt::format("an activation of {}", joined(known, " ")), "'" + word + "'");
}

// What the file says, else what the code of its model does: GPT-2's kin have biases everywhere,
// gated models none, Qwen2 on query, key and value only, GPT-J in its FFN only.
void read_biases(const Reader& in, Model& m) {
  bool everywhere = m.activation != "swiglu";
  for (const char* key : {"use_bias", "enable_bias", "bias"})
    if (auto given = in.flag(key)) everywhere = *given;
  const bool attention = m.type != "gptj" && m.type != "codegen" && everywhere;
  m.qkv_bias = in.flag("attention_bias").value_or(attention || m.type.starts_with("qwen2"));
  m.out_bias = in.flag("attention_bias").value_or(attention);
  m.mlp_bias = in.flag("mlp_bias").value_or(everywhere);
}

// A file of a dense model may say 0.
void read_experts(const Reader& in, Model& m) {
  for (const std::string& key : experts_names.keys)
    if (const JsonValue* v = in.given(key); v && v->kind == JsonValue::integer && v->whole == 0)
      return;
  m.experts = in.integer(experts_names).value_or(0);
  if (m.experts == 0) return;
  m.topk = in.integer(topk_names).value_or(std::min<int64_t>(2, m.experts));
  if (m.topk > m.experts)
    in.refuse("a token to choose at most all experts",
              fmt::format("topk={} and experts={}", m.topk, m.experts));
}

void read_notes(const Reader& in, Model& m) {
  if (m.experts > 0)
    m.notes.push_back("one MLP stands for dense layers and shared experts, as wide as the others");
  if (in.given("kv_lora_rank"))
    m.notes.push_back("plain key and value heads stand for the latent ones");
}

// In small, a ratio becomes a size: what no published model is near is a slip of the file.
void check_ratios(const Reader& in, const Model& m) {
  constexpr int64_t most = 256;
  auto near = [&](const char* a, int64_t x, const char* b, int64_t y) {
    if (x > most * y || y > most * x)
      in.refuse(fmt::format("{} and {} within a factor of {}", a, b, most),
                fmt::format("{} and {}", x, y));
  };
  if (m.kv_heads > m.heads || m.heads % m.kv_heads != 0)
    in.refuse("heads divisible by kv_heads", fmt::format("{} and {}", m.heads, m.kv_heads));
  near("heads", m.heads, "kv_heads", m.kv_heads);
  near("ffn", m.ffn, "hidden", m.hidden);
  near("hidden", m.hidden, "heads*head_dim", m.heads * m.head_dim);
}

int64_t head_dim_of(const Reader& in, const Model& m) {
  if (auto value = in.integer(head_dim_names)) return *value;
  if (m.hidden % m.heads != 0)
    in.refuse("hidden divisible by heads where head_dim is not given",
              fmt::format("hidden={} and heads={}", m.hidden, m.heads));
  return m.hidden / m.heads;
}

}  // namespace

Model model_from(const JsonValue& file, const std::string& source) {
  if (file.kind != JsonValue::object)
    throw BadInput(fmt::format("{}: expected an object with hidden_size or n_embd, met {}", source,
                               shown(file)));
  const Reader in(text_part(file), source);
  Model m;
  m.source = std::filesystem::path(source).filename();
  m.type = in.word("model_type");
  m.hidden = in.needed(hidden_names);
  m.heads = in.needed(heads_names);
  m.kv_heads = kv_heads_of(in, m.heads);
  m.head_dim = head_dim_of(in, m);
  m.ffn = ffn_of(in, m);
  m.vocab = in.needed(vocab_names);
  m.layers = in.integer(layers_names).value_or(0);
  m.positions = in.integer(positions_names).value_or(0);
  read_activation(in, m);
  m.norm = in.given("rms_norm_eps") ? "rms" : "layer";
  read_biases(in, m);
  read_experts(in, m);
  read_notes(in, m);
  check_ratios(in, m);
  return m;
}

Model read_model(const std::string& path) { return model_from(read_json(path), path); }

// ---- Layouts

std::string refused_tp(const Model& m, int tp) {
  if (m.heads % tp != 0) return fmt::format("{} heads are not divisible by tp={}", m.heads, tp);
  if (m.kv_heads % tp != 0 && tp % m.kv_heads != 0)
    return fmt::format("{} kv_heads are no multiple and no divisor of tp={}", m.kv_heads, tp);
  if (m.ffn % tp != 0) return fmt::format("ffn {} is not divisible by tp={}", m.ffn, tp);
  return "";
}

void check_layout(const Model& m, const ParallelLayout& layout) {
  const std::string reason = refused_tp(m, layout.tp);
  if (reason.empty()) return;
  constexpr int most = 64;
  int below = layout.tp - 1, above = layout.tp + 1;
  while (!refused_tp(m, below).empty()) --below;  // 1 is always legal
  while (above <= most && !refused_tp(m, above).empty()) ++above;
  throw BadInput(fmt::format(
      "--tp: expected ranks that can cut {}, met tp={}: {}; the nearest: "
      "tp={}{}",
      m.source, layout.tp, reason, below, above <= most ? fmt::format(", tp={}", above) : ""));
}

namespace {

int64_t next_multiple(int64_t x, int64_t of) { return (x + of - 1) / of * of; }
int64_t nearest_multiple(int64_t x, int64_t of) { return std::max(of, (x + of / 2) / of * of); }

}  // namespace

int64_t padded_vocab(int64_t vocab, int tp) { return next_multiple(vocab, int64_t(128) * tp); }

// ---- In small

namespace {

// Divisible by the ranks, and unlike every other extent: equal ones hide a swap.
int64_t small_tokens(const SmallModel& s) {
  const int64_t ranks = int64_t(s.layout.tp) * s.layout.cp * s.layout.dp;
  const std::set<int64_t> taken{s.hidden,
                                s.ffn,
                                2 * s.ffn,
                                s.vocab,
                                s.heads * s.head_dim,
                                (s.heads + 2 * s.kv_heads) * s.head_dim};
  int64_t k = 3;
  while (k * ranks < 12 || taken.contains(k * ranks)) k += 2;
  return k * ranks;
}

// Heads that nothing can take away leave a model large: no published one is near this.
void check_small(const Model& m, const SmallModel& s) {
  constexpr int64_t most = 1 << 22;
  if (s.hidden * s.ffn > most)
    throw BadInput(
        fmt::format("{}: expected heads, kv_heads, hidden and ffn whose ratios fit into "
                    "a small model, met hidden {} and ffn {} at the least",
                    m.source, s.hidden, s.ffn));
}

}  // namespace

SmallModel scaled_down(const Model& m, const ParallelLayout& layout) {
  const int tp = layout.tp;
  SmallModel s{};
  s.layout = layout;
  s.whole_kv = m.kv_heads % tp != 0;
  s.kv_heads = s.whole_kv ? m.kv_heads : tp * std::min<int64_t>(2, m.kv_heads / tp);
  s.heads = m.heads / m.kv_heads * s.kv_heads;
  s.head_dim = 2;
  const int64_t width = s.heads * s.head_dim, model_width = m.heads * m.head_dim;
  s.hidden = std::max<int64_t>(2, m.hidden * width / model_width);
  s.ffn = nearest_multiple(s.hidden * m.ffn / m.hidden, tp);
  check_small(m, s);
  // One multiple of 4 tp in place of 128 tp, and not the vocabulary's hundreds of times hidden.
  s.vocab = next_multiple(std::min(m.vocab * s.hidden / m.hidden, 6 * s.hidden) + 1, 4 * tp);
  s.tokens = small_tokens(s);
  if (m.experts > 0 && m.experts % tp == 0) {
    s.experts = tp * std::min<int64_t>(3, m.experts / tp);
    // Where experts are left out, a token does not choose all that there are.
    s.topk =
        std::min(m.topk, s.experts < m.experts ? std::max<int64_t>(1, s.experts - 1) : s.experts);
  }
  s.activation = m.activation, s.norm = m.norm;
  s.qkv_bias = m.qkv_bias, s.out_bias = m.out_bias, s.mlp_bias = m.mlp_bias;
  return s;
}

// ---- Lines

namespace {

const char* switched(bool on) { return on ? "on" : "off"; }

// A layer of the model as words of a line of a contract. A contract joins by a row here; one that
// the registry does not have is left out, and one whose words are empty is not due for the layout.
struct Part {
  const char *contract, *name;
  std::function<std::string(const SmallModel&)> words;
  bool sp = true;  // takes sequence parallelism
};

std::string qkv(const SmallModel& s) {
  const std::string weight =
      s.whole_kv ? fmt::format("out={}", s.heads * s.head_dim)
                 : fmt::format("heads={} kv_heads={} head_dim={}", s.heads, s.kv_heads, s.head_dim);
  return fmt::format("tokens={} {} in={} bias={}", s.tokens, weight, s.hidden,
                     switched(s.qkv_bias));
}

// Causal, in 2 cp chunks, so that ranks share the work evenly; under sp tp cuts what cp has left.
std::string heads_of_tokens(const SmallModel& s) {
  return fmt::format("seq={} batch={} heads={} kv_heads={} head_dim={} mask=causal layout=zigzag",
                     2 * s.layout.cp * std::max(2, s.layout.tp), 2 * s.layout.dp, s.heads,
                     s.kv_heads, s.head_dim);
}

std::string attention(const SmallModel& s) { return s.layout.cp == 1 ? "" : heads_of_tokens(s); }

int64_t kv_heads_of_rank(const SmallModel& s) { return s.whole_kv ? 1 : s.kv_heads / s.layout.tp; }

// Heads are exchanged for tokens: those of a tp rank are dealt to cp as well, with their key heads
// or with copies of these.
std::string attention_by_heads(const SmallModel& s) {
  const int64_t n = s.heads / s.layout.tp, g = kv_heads_of_rank(s), cp = s.layout.cp;
  if (attention(s).empty() || n < cp) return "";
  const bool even = n % cp == 0 && (g % cp == 0 || cp % g == 0);
  return fmt::format("{}{}{}", attention(s), g < cp ? " kv_replicate=on" : "",
                     even ? "" : " uneven_heads=on");
}

// Exchanged in runs of two ranks, turning across the runs.
std::string attention_by_both(const SmallModel& s) {
  const bool cut = s.layout.cp % 2 == 0 && s.heads / s.layout.tp % 2 == 0;
  return cut && kv_heads_of_rank(s) % 2 == 0 ? attention(s) + " inner=2" : "";
}

// Weights are drawn with variance 1, so that q and k have that of hidden: this scale gives scores
// of order one, as trained weights do. Larger ones leave the bound of a half type open.
std::string attention_with_linears(const SmallModel& s) {
  return fmt::format("{} hidden={} bias={} scale={:.2g}", heads_of_tokens(s), s.hidden,
                     switched(s.qkv_bias), 1 / (double(s.hidden) * std::sqrt(double(s.head_dim))));
}

// The fused weight cut over all ranks, where its rows can be.
std::string attention_gathered(const SmallModel& s) {
  const bool cut = (s.heads + 2 * s.kv_heads) * s.head_dim % s.layout.tp == 0;
  return s.whole_kv && cut ? attention_with_linears(s) + " form=gather" : "";
}

const std::vector<Part>& parts() {
  static const std::vector<Part> all{
      {"vocab_embedding", "embedding",
       [](const SmallModel& s) {
         return fmt::format("tokens={} hidden={} vocab={} padded_vocab={}", s.tokens, s.hidden,
                            s.vocab - 1, s.vocab);
       }},
      {"norm_sequence", "norm",
       [](const SmallModel& s) {
         return fmt::format("tokens={} hidden={} norm={}", s.tokens, s.hidden, s.norm);
       }},
      {"linear_column", "query, key, value", qkv},
      {"attention_ring", "attention, ring", attention, false},
      {"attention_allgather", "attention, gather", attention, false},
      {"attention_alltoall", "attention, heads", attention_by_heads, false},
      {"attention_hierarchical", "attention, both", attention_by_both, false},
      {"attention_block", "attention, linears", attention_with_linears},
      {"attention_block", "attention, gathered", attention_gathered},
      {"linear_row", "attention output",
       [](const SmallModel& s) {
         return fmt::format("tokens={} in={} out={} bias={}", s.tokens, s.heads * s.head_dim,
                            s.hidden, switched(s.out_bias));
       }},
      {"mlp", "MLP",
       [](const SmallModel& s) {
         return fmt::format("tokens={} hidden={} ffn={} activation={} bias={}", s.tokens, s.hidden,
                            s.ffn, s.activation, switched(s.mlp_bias));
       }},
      {"replicated_router", "router",
       [](const SmallModel& s) {
         return s.experts == 0 ? ""
                               : fmt::format("tokens={} hidden={} experts={} bias=off", s.tokens,
                                             s.hidden, s.experts);
       }},
      {"expert_alltoall", "experts",
       [](const SmallModel& s) {
         return s.experts == 0 ? ""
                               : fmt::format("tokens={} hidden={} out={} experts={} topk={}",
                                             s.tokens, s.hidden, s.ffn, s.experts, s.topk);
       }},
      {"expert_mlp", "experts, FFN cut",
       [](const SmallModel& s) {
         return s.experts == 0
                    ? ""
                    : fmt::format("tokens={} hidden={} ffn={} activation={} experts={} topk={}",
                                  s.tokens, s.hidden, s.ffn, s.activation, s.experts, s.topk);
       }},
      {"expert_balance", "load balance",
       [](const SmallModel& s) {
         return s.experts == 0
                    ? ""
                    : fmt::format("tokens={} experts={} topk={}", s.tokens, s.experts, s.topk);
       }},
      {"linear_column", "output layer",
       [](const SmallModel& s) {
         return fmt::format("tokens={} in={} out={} bias=off", s.tokens, s.hidden, s.vocab);
       }},
      {"vocab_cross_entropy", "loss",
       [](const SmallModel& s) { return fmt::format("tokens={} vocab={}", s.tokens, s.vocab); },
       false},
  };
  return all;
}

std::string mesh_words(const ParallelLayout& l) {
  std::string words;
  for (const auto& [axis, n] : {std::pair{"tp", l.tp}, {"cp", l.cp}, {"dp", l.dp}})
    if (n > 1) words += fmt::format(" {}={}", axis, n);
  return words;
}

// The default numbers (integers where the contract is linear), then rounding in a half type; with
// sequence parallelism where there is a tp axis.
std::vector<std::string> variants(const Part& part, const SmallModel& s) {
  const std::string rounded = " dtype=bf16 fill=normal";
  if (!part.sp || s.layout.tp == 1) return {"", rounded};
  return {"", " sp=on", rounded, " sp=on" + rounded};
}

bool has_contract(const Registry& registry, const std::string& name) {
  return std::any_of(registry.contracts().begin(), registry.contracts().end(),
                     [&](const Contract& c) { return c.name == name; });
}

}  // namespace

std::vector<ModelLine> lines_of(const SmallModel& s, const Registry& registry) {
  std::vector<ModelLine> lines;
  for (const Part& part : parts()) {
    const std::string words = part.words(s);
    if (words.empty() || !has_contract(registry, part.contract)) continue;
    for (const std::string& variant : variants(part, s)) {
      const Case line =
          parse(part.contract + mesh_words(s.layout) + " " + words + variant, registry);
      check_world(line);
      check_legal(line, registry);
      lines.push_back({part.name, print(line)});
    }
  }
  return lines;
}

// ---- The gate

namespace {

Registry narrowed(const Registry& all, const std::vector<ModelLine>& lines) {
  std::map<std::string, std::vector<std::string>> by_contract;
  for (const ModelLine& l : lines) by_contract[parse(l.line, all).contract].push_back(l.line);
  Registry r;
  for (Contract c : all.contracts()) {
    if (!by_contract.contains(c.name)) continue;
    c.cases = [own = by_contract[c.name]](const std::string&) { return own; };
    c.illegal.clear();
    r.add(std::move(c));
  }
  for (size_t i = 0; i < all.subjects().size(); ++i) {
    if (by_contract.contains(all.subjects()[i].contract)) r.add(all.subjects()[i]);
    if (i + 1 == all.ours()) r.ours_end_here();
  }
  for (const Control& c : all.controls())
    if (by_contract.contains(c.contract)) r.add(c);
  for (const Planted& p : all.planted()) r.add(p);
  return r;
}

std::string model_text(const Model& m) {
  std::string text =
      fmt::format("{}{}: hidden {}, heads {} of {}, kv_heads {}, ffn {} {}, vocab {}", m.source,
                  m.type.empty() ? "" : " (" + m.type + ")", m.hidden, m.heads, m.head_dim,
                  m.kv_heads, m.ffn, m.activation, m.vocab);
  text += m.experts > 0 ? fmt::format(", {} experts, {} of a token", m.experts, m.topk) : "";
  text += m.layers > 0 ? fmt::format(", {} layers", m.layers) : "";
  text = telling::row("model", text);
  for (const std::string& note : m.notes) text += telling::row("note", note);
  return text;
}

bool has_part(const std::vector<ModelLine>& lines, const char* contract) {
  return std::any_of(lines.begin(), lines.end(),
                     [&](const ModelLine& l) { return l.line.starts_with(contract); });
}

// `lines` of the layout, and those of them that are asked for.
std::string layout_text(const Model& m, const SmallModel& s, const std::vector<ModelLine>& all,
                        const std::vector<ModelLine>& lines) {
  const ParallelLayout& l = s.layout;
  const int64_t padded = padded_vocab(m.vocab, l.tp);
  std::string text = telling::row(
      "layout", fmt::format("tp={} cp={} dp={}: {} heads, {} kv_heads and {} of ffn a rank; vocab "
                            "padded to {} = {} x 128 tp",
                            l.tp, l.cp, l.dp, m.heads / l.tp,
                            s.whole_kv ? fmt::format("1 of {}", m.kv_heads)
                                       : std::to_string(m.kv_heads / l.tp),
                            m.ffn / l.tp, padded, padded / (int64_t(128) * l.tp)));
  text += telling::row(
      "in small", fmt::format("hidden {}, heads {} of {}, kv_heads {}, ffn {}, vocab {}, tokens {}",
                              s.hidden, s.heads, s.head_dim, s.kv_heads, s.ffn, s.vocab, s.tokens));
  if (l.cp == 1 && (lines.size() == all.size() || has_part(lines, "attention")))
    text += telling::row("note", "attention over a context axis is left out: --cp 2 or 4 runs it");
  if (s.whole_kv && has_part(lines, "linear_column"))
    text +=
        telling::row("note", "ranks share key heads: of query, key, value only the query is cut");
  for (size_t i = 0; i < lines.size(); ++i) {
    if (i > 0 && lines[i].part == lines[i - 1].part) continue;
    const auto same = std::count_if(lines.begin(), lines.end(),
                                    [&](const ModelLine& l) { return l.part == lines[i].part; });
    text += telling::row(
        "runs", fmt::format("{:<18} {}   and {} more", lines[i].part, lines[i].line, same - 1));
  }
  return text;
}

std::vector<int> tp_that_cut(const Model& m) {
  std::vector<int> list;
  for (int tp : {2, 4, 8})
    if (refused_tp(m, tp).empty()) list.push_back(tp);
  return list.empty() ? std::vector<int>{1} : list;
}

}  // namespace

ModelGate model_gate(const Model& m, const std::vector<int>& tp, int cp, int dp,
                     const Registry& registry, const std::function<bool(const Case&)>& selects) {
  ModelGate gate{{}, model_text(m)};
  std::vector<ModelLine> all;
  for (int ranks : tp.empty() ? tp_that_cut(m) : tp) {
    const ParallelLayout layout{ranks, cp, dp};
    check_layout(m, layout);
    const SmallModel small = scaled_down(m, layout);
    const std::vector<ModelLine> lines = lines_of(small, registry);
    std::vector<ModelLine> asked;
    for (const ModelLine& l : lines)
      if (!selects || selects(parse(l.line, registry))) asked.push_back(l);
    gate.text += layout_text(m, small, lines, asked);
    all.insert(all.end(), lines.begin(), lines.end());
  }
  gate.registry = narrowed(registry, all);
  return gate;
}

}  // namespace shardproof
