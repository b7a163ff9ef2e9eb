// What the contracts over replicated parameters ask of a line. It follows from the line alone,
// which is equal on all ranks: ranks refuse alike and before the first call.
#include <string>

#include "primitives/line.hpp"
#include "primitives/replicated.hpp"

namespace shardproof::primitives {

std::optional<Rejected> refused_own_tokens(const Case& line) {
  return first_refusal(other_axes(line), uncut_tokens(line));
}

std::optional<Rejected> refused_gradients(const Case& line) {
  return first_refusal(other_axes(line), when(line.at("summed") + line.at("averaged") == 0,
                                              "at least one gradient, summed or averaged",
                                              "summed=0 averaged=0", "give one of them"));
}

std::optional<Rejected> refused_router(const Case& line) { return refused_own_tokens(line); }

namespace {

// Every rank holds whole heads; key heads are cut over tp, or copied where they are fewer.
Refusal heads(const Case& line) {
  const int64_t g = line.at("kv_heads"), p = line.ranks(Axis::tp);
  const std::string both = said(line, "kv_heads") + " tp=" + std::to_string(p);
  return first_refusal(
      undivided(line, "heads", p, "tp"), undivided(line, "heads", g, "kv_heads"),
      when(g % p != 0 && p % g != 0, "kv_heads divisible by tp, or tp by kv_heads", both,
           "a key head is held by one rank or by equally many as every other"),
      when(line.at("kv_replicas") != (g >= p ? 1 : p / g),
           "kv_replicas = tp / kv_heads where that is more than 1, else 1",
           said(line, "kv_replicas"), "leave it out: it follows from the rest"));
}

}  // namespace

std::optional<Rejected> refused_qk_norm(const Case& line) {
  return first_refusal(refused_own_tokens(line), heads(line));
}

std::optional<Rejected> refused_qkv(const Case& line) {
  const int64_t rows = (line.at("heads") + 2 * line.at("kv_heads")) * line.at("head_dim"),
                p = line.ranks(Axis::tp);
  return first_refusal(refused_own_tokens(line), heads(line),
                       when(line.text("form") == "gather" && rows % p != 0,
                            "(heads + 2 kv_heads) head_dim divisible by tp with form=gather",
                            std::to_string(rows) + " rows, tp=" + std::to_string(p),
                            "the fused weight is cut over all ranks: choose another head_dim"));
}

std::optional<Rejected> refused_clip(const Case& line) {
  return first_refusal(other_axes(line), undivided(line, "ffn", line.ranks(Axis::tp), "tp"));
}

std::optional<Rejected> refused_step(const Case& line) { return other_axes(line); }

}  // namespace shardproof::primitives
