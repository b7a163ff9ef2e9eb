#include "primitives/linear_line.hpp"

#include <string>

#include "primitives/line.hpp"

namespace shardproof::primitives {
namespace {

// Rows of dim 0 of what each rank gives to a call over tokens, or gets from it.
int64_t rows_of_call(const Case& line) {
  const int64_t tokens = line.at("seq") > 0 ? line.at("seq") : line.at("tokens");
  return tokens / (int64_t(line.ranks(Axis::dp)) * line.ranks(Axis::cp) *
                   (line.on("sp") ? line.ranks(Axis::tp) : 1));
}

Refusal chunks(const Case& line) {
  const bool cut = line.text("overlap") == "chunks";
  const int64_t n = line.at("chunks"), rows = rows_of_call(line);
  return first_refusal(when(cut && n < 2, "chunks of at least 2 with overlap=chunks",
                            said(line, "chunks"), "leave chunks out for 2, or leave overlap out"),
                       when(!cut && n != 1, "overlap=chunks with " + said(line, "chunks"),
                            said(line, "overlap"), "write overlap=chunks, or leave chunks out"),
                       when(cut && n > rows,
                            "at most as many chunks as a rank has rows in a call over tokens, " +
                                std::to_string(rows),
                            said(line, "chunks"), "use fewer chunks or more tokens"));
}

Refusal attributes(const Case& line) {
  return first_refusal(
      chunks(line),
      when(line.on("skip_bias_add") && !line.on("bias"), "bias=on with skip_bias_add=on",
           "bias=off", "there is no bias to hand back: leave one of them out"),
      when(line.on("frozen") && !line.on("input_grad"), "input_grad=on with frozen=on",
           "input_grad=off", "no gradient is left to compute: leave one of them out"),
      when(
          line.text("overlap") == "ring" && !line.on("sp"), "sp=on with " + said(line, "overlap"),
          "sp=off",
          "what goes round the ring are the ranks' blocks of tokens: write sp=on, or leave overlap "
          "out"));
}

bool fused(const Case& line) { return line.at("heads") > 0 || line.on("swiglu"); }

Refusal heads(const Case& line) {
  const int64_t n = line.at("heads"), g = line.at("kv_heads"), d = line.at("head_dim");
  const int64_t p = line.ranks(Axis::tp);
  if (n == 0)
    return when(g > 0 || d > 0, "heads wherever kv_heads or head_dim is given", "heads=0",
                "write heads=, or leave kv_heads and head_dim out");
  return first_refusal(
      when(line.on("swiglu"), "one kind of fused weight", "heads and swiglu=on",
           "leave one of them out"),
      when(g == 0 || d == 0, "kv_heads and head_dim of at least 1",
           said(line, "kv_heads") + " " + said(line, "head_dim"),
           "leave them out for their defaults"),
      when(g > 0 && n % g != 0, "heads divisible by kv_heads",
           said(line, "heads") + " " + said(line, "kv_heads"),
           "every key head serves equally many query heads"),
      when(line.at("out") != (n + 2 * g) * d, "out = (heads + 2 kv_heads) head_dim",
           said(line, "out"), "leave out= to follow from the heads"),
      undivided(line, "heads", p, "tp"),
      when(g % p != 0, "kv_heads divisible by tp", said(line, "kv_heads") + " " + said(line, "tp"),
           "key heads shared by ranks are not cut by this weight: use fewer ranks"));
}

}  // namespace

std::optional<Rejected> refused_column(const Case& line) {
  const int64_t p = line.ranks(Axis::tp);
  return first_refusal(
      other_axes(line), uncut_tokens(line), attributes(line), heads(line),
      undivided(line, "out", line.on("swiglu") ? 2 * p : p, line.on("swiglu") ? "2*tp" : "tp"),
      when(line.on("sp") && line.on("gather_output"), "gather_output=off with sp=on",
           "gather_output=on",
           "gathered outputs are whole on every rank, tokens are not: leave one out"),
      when(fused(line) && line.on("gather_output"), "gather_output=off for a fused weight",
           "gather_output=on", "blocks would come in the order of ranks, not of parts"),
      countable(line, {"tokens", "in"}), countable(line, {"tokens", "out"}),
      countable(line, {"in", "out"}));
}

std::optional<Rejected> refused_row(const Case& line) {
  return first_refusal(
      other_axes(line), uncut_tokens(line), attributes(line),
      undivided(line, "in", line.ranks(Axis::tp), "tp"),
      when(line.on("sp") && !line.on("input_is_parallel"), "input_is_parallel=on with sp=on",
           "input_is_parallel=off",
           "under sp the input comes from a column-parallel linear, cut by features"),
      countable(line, {"tokens", "in"}), countable(line, {"tokens", "out"}),
      countable(line, {"in", "out"}));
}

std::optional<Rejected> refused_mlp(const Case& line) {
  const std::string& between = line.text("between");
  return first_refusal(
      other_axes(line), uncut_tokens(line), undivided(line, "ffn", line.ranks(Axis::tp), "tp"),
      when(between != "none" && between != "norm_reduced", "between=none or between=norm_reduced",
           "between=" + between,
           "a norm, softmax or top-k over the FFN dim needs all of it and a rank holds "
           "ffn/tp columns; a norm is legal once its statistics are all-reduced "
           "(norm_reduced)"),
      countable(line, {"tokens", "ffn"}), countable(line, {"tokens", "hidden"}),
      countable(line, {"hidden", "ffn"}));
}

std::vector<int64_t> parts_of_line(const Case& line, int64_t rows) {
  if (line.has("heads") && line.at("heads") > 0) {
    const int64_t d = line.at("head_dim"), kv = line.at("kv_heads") * d;
    return {line.at("heads") * d, kv, kv};
  }
  const bool gated =
      line.has("activation") ? line.text("activation") == "swiglu" : line.on("swiglu");
  return gated ? std::vector<int64_t>{rows / 2, rows / 2} : std::vector<int64_t>{rows};
}

}  // namespace shardproof::primitives
