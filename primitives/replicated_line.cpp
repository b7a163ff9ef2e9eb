// What the contracts over replicated parameters ask of a line. It follows from the line alone,
// which is equal on all ranks: ranks refuse alike and before the first call.
#include <string>

#include "primitives/replicated.hpp"

namespace shardproof::primitives {
namespace {

using Refusal = std::optional<Rejected>;

std::string said(const Case& line, const char* key) {
  return std::string(key) + "=" + line.text(key);
}

Refusal unless(bool holds, const std::string& expected, const std::string& met,
               const std::string& advice) {
  if (holds) return {};
  return Rejected(expected, met, advice);
}

template <class... Refusals>
Refusal first_of(Refusals... all) {
  Refusal found;
  ((found || !all ? void() : void(found.emplace(*all))), ...);
  return found;
}

Refusal divided(const Case& line, const char* key, int64_t divisor, const std::string& by) {
  return unless(line.at(key) % divisor == 0,
                std::string(key) + " divisible by " + by + " = " + std::to_string(divisor),
                said(line, key), "choose a multiple of " + std::to_string(divisor));
}

Refusal no_experts(const Case& line) {
  return unless(line.ranks(Axis::ep) == 1 && line.ranks(Axis::pp) == 1,
                "the axes tp, cp and dp only", said(line, "ep") + " " + said(line, "pp"),
                "leave ep and pp at 1");
}

}  // namespace

// Tokens are cut over dp and cp, and over tp under sp; where seq is given it is seq that is cut.
std::optional<Rejected> refused_own_tokens(const Case& line) {
  const bool sp = line.on("sp");
  const int64_t ranks =
      int64_t(line.ranks(Axis::dp)) * line.ranks(Axis::cp) * (sp ? line.ranks(Axis::tp) : 1);
  const int64_t seq = line.at("seq"), batch = line.at("batch");
  return first_of(no_experts(line),
                  unless(seq > 0 || batch == 1, "seq wherever batch is given", said(line, "batch"),
                         "write seq= and batch=, or tokens="),
                  unless(seq == 0 || line.at("tokens") == seq * batch, "tokens = seq*batch",
                         said(line, "tokens"), "leave tokens out, or seq and batch"),
                  divided(line, seq > 0 ? "seq" : "tokens", ranks, sp ? "dp*cp*tp" : "dp*cp"));
}

std::optional<Rejected> refused_gradients(const Case& line) {
  return first_of(no_experts(line), unless(line.at("summed") + line.at("averaged") > 0,
                                           "at least one gradient, summed or averaged",
                                           "summed=0 averaged=0", "give one of them"));
}

std::optional<Rejected> refused_router(const Case& line) { return refused_own_tokens(line); }

namespace {

// Every rank holds whole heads; key heads are cut over tp, or copied where they are fewer.
Refusal heads(const Case& line) {
  const int64_t g = line.at("kv_heads"), p = line.ranks(Axis::tp);
  const std::string both = said(line, "kv_heads") + " tp=" + std::to_string(p);
  return first_of(divided(line, "heads", p, "tp"), divided(line, "heads", g, "kv_heads"),
                  unless(g % p == 0 || p % g == 0, "kv_heads divisible by tp, or tp by kv_heads",
                         both, "a key head is held by one rank or by equally many as every other"),
                  unless(line.at("kv_replicas") == (g >= p ? 1 : p / g),
                         "kv_replicas = tp / kv_heads where that is more than 1, else 1",
                         said(line, "kv_replicas"), "leave it out: it follows from the rest"));
}

}  // namespace

std::optional<Rejected> refused_qk_norm(const Case& line) {
  return first_of(refused_own_tokens(line), heads(line));
}

std::optional<Rejected> refused_qkv(const Case& line) {
  const int64_t rows = (line.at("heads") + 2 * line.at("kv_heads")) * line.at("head_dim"),
                p = line.ranks(Axis::tp);
  return first_of(refused_own_tokens(line), heads(line),
                  unless(line.text("form") != "gather" || rows % p == 0,
                         "(heads + 2 kv_heads) head_dim divisible by tp with form=gather",
                         std::to_string(rows) + " rows, tp=" + std::to_string(p),
                         "the fused weight is cut over all ranks: choose another head_dim"));
}

std::optional<Rejected> refused_clip(const Case& line) {
  return first_of(no_experts(line), divided(line, "ffn", line.ranks(Axis::tp), "tp"));
}

std::optional<Rejected> refused_step(const Case& line) { return no_experts(line); }

}  // namespace shardproof::primitives
