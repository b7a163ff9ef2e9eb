// `gate --model FILE`: the structure of a published model, from its Hugging Face config.json, as
// case lines for one parallel layout.
//
// What decides whether a layer is cut rightly is its structure: heads to key heads, FFN to hidden,
// gated or not, biases, how many of each a rank owns. The lines keep that and scale the sizes down.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "oracle/json.hpp"
#include "oracle/registry.hpp"

namespace shardproof {

struct Model {
  std::string source, type;  // the file; model_type, "" where it says none
  int64_t hidden = 0, heads = 0, kv_heads = 0, head_dim = 0, ffn = 0, vocab = 0;
  int64_t layers = 0, positions = 0;  // 0: the file does not say
  int64_t experts = 0, topk = 0;      // of an MLP; a token's; 0: there are none
  std::string activation;             // as the key of the same name: gelu gelu_tanh silu swiglu
  std::string norm;                   // layer, rms
  bool qkv_bias = false, out_bias = false, mlp_bias = false;
  std::vector<std::string> notes;  // where something stands for what no contract takes
};

// Keys that are not needed are ignored. BadInput names the key that is missing, of a wrong type,
// out of range or in contradiction.
Model model_from(const JsonValue& config, const std::string& source);
Model read_model(const std::string& path);

struct ParallelLayout {
  int tp = 1, cp = 1, dp = 1;
};
// Why tp ranks cannot cut the model: "28 heads are not divisible by tp=8"; "" where they can.
std::string refused_tp(const Model&, int tp);
// Throws BadInput with the reason and the nearest numbers of ranks that can.
void check_layout(const Model&, const ParallelLayout&);

// Rows of the embedding: the least multiple of 128 tp that holds the vocabulary, as Megatron pads
// it.
int64_t padded_vocab(int64_t vocab, int tp);

// The structure in small. Exact: heads / kv_heads, kv heads of a rank up to two, ffn / hidden up to
// rounding to a multiple of tp, experts of a rank up to three and those of a token.
struct SmallModel {
  ParallelLayout layout;
  int64_t hidden, heads, kv_heads, head_dim, ffn, vocab, tokens;
  int64_t experts, topk;  // 0: none, or such as tp does not cut
  std::string activation, norm;
  bool qkv_bias, out_bias, mlp_bias;
  bool whole_kv;  // fewer key heads than ranks: each rank holds the key heads that it uses
};
SmallModel scaled_down(const Model&, const ParallelLayout&);

struct ModelLine {
  std::string part;  // "query, key and value weight"
  std::string line;
};
// Lines for every contract of the table of parts that the registry has and that the layout is about
// (attention over cp needs a cp axis); all are legal.
std::vector<ModelLine> lines_of(const SmallModel&, const Registry&);

// What `gate --model` does: the registry narrowed to the model's contracts, with these lines in
// place of their own cases, and what to say first.
struct ModelGate {
  Registry registry;
  std::string text;
};
// Empty tp: each of 2, 4 and 8 that can cut the model. `selects`: which lines the gate's patterns
// leave, so that no others are spoken of; null: all.
ModelGate model_gate(const Model&, const std::vector<int>& tp, int cp, int dp, const Registry&,
                     const std::function<bool(const Case&)>& selects = nullptr);

}  // namespace shardproof
