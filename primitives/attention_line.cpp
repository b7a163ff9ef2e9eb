#include "primitives/attention_line.hpp"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <numeric>
#include <utility>

#include "primitives/work.hpp"

namespace shardproof::primitives {
namespace {

int64_t rounded_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

int64_t at_or(const Case& line, const char* key, int64_t fallback) {
  return line.has(key) ? line.at(key) : fallback;
}

std::vector<int64_t> list_of(const Case& line, const char* key) {
  if (!line.has(key) || line.text(key).empty()) return {};
  return parse_list(key, line.text(key));
}

std::vector<int64_t> steps_of(const std::vector<int64_t>& offsets) {
  std::vector<int64_t> steps;
  for (size_t d = 1; d < offsets.size(); ++d) steps.push_back(offsets[d] - offsets[d - 1]);
  return steps;
}

// Where documents begin and the last one ends, as the line says or as its lengths add up; empty: no
// documents.
std::vector<int64_t> offsets_of(const Case& line, bool keys) {
  auto offsets = list_of(line, keys ? "cu_seqlens_k" : "cu_seqlens");
  if (!offsets.empty()) return offsets;
  const auto lengths = list_of(line, keys ? "kv_docs" : "docs");
  if (lengths.empty()) return {};
  offsets = {0};
  for (int64_t n : lengths) offsets.push_back(offsets.back() + n);
  return offsets;
}

std::vector<int64_t> documents_of(const Case& line, bool keys = false) {
  return steps_of(offsets_of(line, keys));
}

bool zigzag(const std::string& layout) { return layout != "contiguous"; }

// Chunks r and 2p-1-r of `extent` rows from `first` on.
void append_zigzag(int64_t first, int64_t extent, int p, int r, std::vector<int64_t>& rows) {
  const int64_t chunk = extent / (2 * p);
  for (int64_t i = 0; i < chunk; ++i) rows.push_back(first + r * chunk + i);
  for (int64_t i = 0; i < chunk; ++i) rows.push_back(first + (2 * p - 1 - r) * chunk + i);
}

}  // namespace

int64_t rows_of_documents(const std::string& layout, const std::vector<int64_t>& lengths,
                          int ranks) {
  if (layout != "zigzag")
    return rounded_up(std::accumulate(lengths.begin(), lengths.end(), int64_t(0)),
                      zigzag(layout) ? 2 * ranks : ranks);
  int64_t rows = 0;
  for (int64_t n : lengths) rows += rounded_up(n, 2 * ranks);
  return rows;
}

ContextLine::ContextLine(const Case& line)
    : ranks(line.ranks(Axis::cp)),
      layout(line.text("layout")),
      documents(documents_of(line)),
      batch(at_or(line, "batch", 1) / line.ranks(Axis::dp)) {
  const int64_t seq = at_or(line, "seq", 0);
  rows = seq > 0 ? seq : line.at("tokens");
  if (!documents.empty()) rows = rows_of_documents(layout, documents, ranks);
  key_rows = rows;
  key_documents = documents_of(line, true);
  if (key_documents.empty()) key_documents = documents;
  if (!documents.empty()) key_rows = rows_of_documents(layout, key_documents, ranks);
  if (documents.empty() && line.has("kv_tokens"))
    key_rows = line.at("kv_tokens") / (seq > 0 ? line.at("batch") : 1);
}

ContextLine of_keys(const ContextLine& c) {
  ContextLine keys = c;
  keys.documents = c.key_documents, keys.rows = c.key_rows;
  return keys;
}

std::vector<int64_t> owned_rows(const ContextLine& c, int64_t rows, int r) {
  std::vector<int64_t> owned;
  if (c.layout == "contiguous") {
    owned.resize(size_t(rows / c.ranks));
    std::iota(owned.begin(), owned.end(), r * (rows / c.ranks));
  } else if (c.layout == "zigzag" && !c.documents.empty()) {
    int64_t first = 0;
    for (int64_t n : c.documents) {
      const int64_t padded = rounded_up(n, 2 * c.ranks);
      append_zigzag(first, padded, c.ranks, r, owned);
      first += padded;
    }
  } else {
    append_zigzag(0, rows, c.ranks, r, owned);
  }
  return owned;
}

std::vector<Label> labels_of_documents(const ContextLine& c) {
  std::vector<Label> labels;
  for (size_t d = 0; d < c.documents.size(); ++d) {
    for (int64_t i = 0; i < c.documents[d]; ++i) labels.push_back({int64_t(d), i});
    if (c.layout == "zigzag")
      labels.resize(labels.size() - size_t(c.documents[d]) +
                    size_t(rounded_up(c.documents[d], 2 * c.ranks)));
  }
  labels.resize(size_t(c.rows));
  return labels;
}

std::vector<Label> labels_of_sequence(int64_t rows, int64_t first) {
  std::vector<Label> labels;
  for (int64_t i = 0; i < rows; ++i) labels.push_back({0, first + i});
  return labels;
}

std::vector<Label> local_labels(const ContextLine& c, const std::vector<Label>& by_row, int r) {
  std::vector<Label> labels;
  for (int64_t row : owned_rows(c, int64_t(by_row.size()), r))
    for (int64_t b = 0; b < c.batch; ++b) {
      labels.push_back(by_row[size_t(row)]);
      if (labels.back().sequence >= 0) labels.back().sequence += b;
    }
  return labels;
}

Window window_of(const Case& line) {
  if (!line.has("window") || line.text("window").empty()) return {};
  const auto sides = parse_list("window", line.text("window"));
  return {sides.at(0), sides.at(1)};
}

int64_t copies_of_keys(const Case& line) { return at_or(line, "kv_replicas", 1); }

std::vector<int64_t> dealt(int64_t extent, int ranks) {
  std::vector<int64_t> parts(size_t(ranks), extent / ranks);
  for (int64_t r = 0; r < extent % ranks; ++r) ++parts[size_t(r)];
  return parts;
}

namespace {

// Query heads of a rank of tp, and its key heads.
std::pair<int64_t, int64_t> own_heads(const Case& line) {
  const int64_t tp = line.ranks(Axis::tp);
  return {line.at("heads") / tp, line.at("kv_heads") * copies_of_keys(line) / tp};
}

}  // namespace

int64_t dealt_key_heads(const Case& line) {
  const auto [n, g] = own_heads(line);
  if (!line.has("kv_replicate") || !line.on("kv_replicate")) return g;
  const int64_t p = line.ranks(Axis::cp);
  return n % p ? n : n / std::gcd(n / p, n / g);
}

namespace {

Refusal undivided(const std::string& what, int64_t extent, int64_t divisor, const std::string& by) {
  return when(extent % divisor != 0, what + " divisible by " + by + " = " + std::to_string(divisor),
              std::to_string(extent),
              "choose a multiple of " + std::to_string(divisor) + ", such as " +
                  std::to_string(rounded_up(extent, divisor)));
}

Refusal axes(const Case& line) {
  return first_refusal(
      other_axes(line),
      when(line.ranks(Axis::dp) > 1 && at_or(line, "seq", 0) == 0, "seq and batch where dp > 1",
           said(line, "dp") + " with tokens only", "dp cuts the batch: write seq= and batch="),
      when(at_or(line, "batch", 1) % line.ranks(Axis::dp) != 0,
           "batch divisible by dp = " + line.text("dp"), std::to_string(at_or(line, "batch", 1)),
           "dp cuts the batch: choose a multiple"));
}

// The key that says how many queries, or keys, each document has.
std::string key_of(const Case& line, bool keys) {
  const char *offsets = keys ? "cu_seqlens_k" : "cu_seqlens", *lengths = keys ? "kv_docs" : "docs";
  return list_of(line, offsets).empty() ? lengths : offsets;
}

// `key` is the one that the line has, or the tensor; `total` the key that says how many there are.
Refusal malformed(const std::vector<int64_t>& offsets, const std::string& key,
                  const std::string& total, int64_t tokens) {
  const bool lengths = key.ends_with("docs");
  if (offsets.size() < 2)
    return Rejected(
        key + " of one document at least",
        std::to_string(offsets.size()) + " offsets, which bound none",
        "write where each document begins and the last one ends, such as " + key + "=0,7,16");
  if (offsets[0] != 0)
    return Rejected(key + " that begin with 0",
                    "document 0 beginning at " + std::to_string(offsets[0]),
                    "the first document begins at token 0");
  for (size_t d = 0; d + 1 < offsets.size(); ++d)
    if (offsets[d + 1] < offsets[d])
      return Rejected(key + (lengths ? " of 0 tokens or more each" : " that never fall"),
                      "document " + std::to_string(d) + " of " +
                          std::to_string(offsets[d + 1] - offsets[d]) + " tokens, from " +
                          std::to_string(offsets[d]) + " to " + std::to_string(offsets[d + 1]),
                      "a document has 0 tokens or more");
  if (offsets.back() == 0)
    return Rejected(key + " with one token at least",
                    std::to_string(offsets.size() - 1) +
                        (offsets.size() == 2 ? " document without any" : " documents without any"),
                    "give one of them a token");
  const std::string end = std::to_string(offsets.back());
  return when(offsets.back() != tokens,
              key + (lengths ? " that add up to all " : " that end with all ") +
                  std::to_string(tokens) + " " + total,
              lengths ? "a sum of " + end
                      : "document " + std::to_string(offsets.size() - 2) + " ending at " + end,
              "leave " + total + " out, or write " + total + "=" + end);
}

bool has_offsets(const Case& line) { return line.has("index") && line.text("index") != "off"; }

Refusal said_twice(const Case& line, const char* lengths, const char* offsets) {
  return when(!list_of(line, lengths).empty() && !list_of(line, offsets).empty(),
              std::string(lengths) + " or " + offsets,
              said(line, lengths) + " " + said(line, offsets), "leave one of them out");
}

Refusal documents(const Case& line) {
  const auto queries = offsets_of(line, false), keys = offsets_of(line, true);
  if (Refusal r = first_refusal(said_twice(line, "docs", "cu_seqlens"),
                                said_twice(line, "kv_docs", "cu_seqlens_k")))
    return r;
  const std::string of_queries = key_of(line, false), of_keys = key_of(line, true);
  if (queries.empty())
    return first_refusal(
        when(!keys.empty(), "docs or cu_seqlens wherever " + of_keys + " is given",
             said(line, of_keys.c_str()), "write docs=, the lengths of the queries"),
        when(has_offsets(line), "docs or cu_seqlens wherever cu_seqlens are operands",
             said(line, "index"), "write docs= or cu_seqlens=, or leave index out"));
  if (Refusal r = first_refusal(
          malformed(queries, of_queries, "tokens", line.at("tokens")),
          when(at_or(line, "seq", 0) > 0, "documents in one row of tokens", said(line, "seq"),
               "leave seq and batch out where " + of_queries + " is given")))
    return r;
  if (keys.empty()) return {};
  return first_refusal(
      when(keys.size() != queries.size(),
           "as many documents in " + of_keys + " as in " + of_queries,
           std::to_string(keys.size() - 1) + " and " + std::to_string(queries.size() - 1),
           "every document has queries and keys, 0 of them at least"),
      malformed(keys, of_keys, "kv_tokens", line.at("kv_tokens")));
}

Refusal rows(const Case& line) {
  const int64_t seq = at_or(line, "seq", 0), batch = at_or(line, "batch", 1);
  if (!documents_of(line).empty()) return {};
  if (line.text("layout") == "zigzag_row")
    return Rejected("docs where layout=zigzag_row", "none", "one sequence is cut by layout=zigzag");
  if (Refusal r =
          first_refusal(when(seq == 0 && batch != 1, "seq wherever batch is given",
                             said(line, "batch"), "write seq= and batch=, or tokens="),
                        when(seq > 0 && line.at("tokens") != seq * batch, "tokens = seq*batch",
                             said(line, "tokens"), "leave tokens out, or seq and batch")))
    return r;
  const ContextLine c(line);
  const bool zig = zigzag(c.layout);
  const int64_t divisor = zig ? 2 * c.ranks : c.ranks;
  const std::string by = zig ? "2*cp" : "cp";
  return first_refusal(
      undivided(seq > 0 ? "seq" : "tokens", c.rows, divisor, by),
      when(at_or(line, "kv_tokens", 0) % (seq > 0 ? batch : 1) != 0, "kv_tokens divisible by batch",
           "kv_tokens=" + std::to_string(at_or(line, "kv_tokens", 0)),
           "choose a multiple of batch"),
      undivided("kv_tokens of a sequence", c.key_rows, divisor, by));
}

Refusal masks(const Case& line) {
  const Window w = window_of(line);
  const double softcap = number_of(line, "softcap", 0);
  return first_refusal(
      when(w.left < -1 || w.right < -1, "a window of 0 tokens or more to each side, or -1",
           said(line, "window"), "write window=left,right with -1 for no limit"),
      // Less is 0 in f32, or makes s/c infinite there.
      when(softcap != 0 && softcap < 1e-6, "softcap of 0 (none), or 1e-6 and more",
           said(line, "softcap"), "leave it out for none"),
      when(!documents_of(line).empty() && documents_of(line, true).empty() &&
               at_or(line, "kv_tokens", line.at("tokens")) != line.at("tokens"),
           "kv_docs where packed documents have other counts of keys than of queries",
           said(line, "kv_tokens"), "write kv_docs=, or leave kv_tokens out"));
}

// Where scores of neighbouring keys lie farther apart than exp reaches, softmax is the choice of
// one key: the gradients of q and k are 0 everywhere, and nothing can be wrong with them. Scores
// are products of q and k, or of two inputs and two weights with `hidden` terms each. The scale
// that is usual is taken at every width.
Refusal sharpness(const Case& line) {
  constexpr double most = 1000;
  const bool of_block = line.has("hidden"), large = line.text("fill") == "large";
  if (!large && line.text("scale").empty()) return std::nullopt;
  const double drawn = !large                       ? 1
                       : line.dtype() == DType::f16 ? 0x1p6
                                                    : 0x1p20,
               hidden = of_block ? double(line.at("hidden")) : 1;
  const double size = std::abs(number_of(line, "scale", 1 / std::sqrt(line.at("head_dim")))) *
                      std::pow(drawn, of_block ? 4 : 2) * hidden;
  char met[64];
  std::snprintf(met, sizeof met, "%g", size);
  return when(
      size > most,
      std::string("scores that leave softmax more than one key: |scale| times the size of ") +
          (of_block ? "two inputs, two weights and hidden" : "q and k") + " up to 1000",
      met,
      std::string("beyond it the gradients of q and k are 0 and nothing is judged: choose ") +
          (line.text("scale").empty() ? "fill=normal"
           : large                    ? "a smaller scale, or fill=normal"
                                      : "a smaller scale"));
}

Refusal heads(const Case& line) {
  const int64_t n = line.at("heads"), g = line.at("kv_heads"), tp = line.ranks(Axis::tp);
  const bool copied = line.has("kv_replicas") && tp % g == 0;
  return first_refusal(when(n % g != 0, "heads divisible by kv_heads",
                            said(line, "heads") + " " + said(line, "kv_heads"),
                            "every key head serves equally many query heads"),
                       undivided("heads", n, tp, "tp"),
                       copied ? Refusal() : undivided("kv_heads", g, tp, "tp"),
                       when(copies_of_keys(line) != (copied ? std::max(tp / g, int64_t(1)) : 1),
                            "kv_replicas = tp / kv_heads where that is more than 1, else 1",
                            said(line, "kv_replicas"), "leave it out: it follows from the rest"));
}

Refusal countable_heads(const Case& line) {
  const ContextLine c(line);
  return countable(whole_operand,
                   {std::max(c.rows, c.key_rows), at_or(line, "batch", 1), line.at("heads"),
                    std::max(line.at("head_dim"), at_or(line, "v_dim", 0)), 2});
}

// The cp nearest to the asked one by which both counts are divisible; of two the smaller.
int64_t nearest_legal(int64_t heads, int64_t kv_heads, int64_t asked) {
  const int64_t common = std::gcd(heads, kv_heads);
  int64_t best = 1;
  for (int64_t p = 1; p <= common; ++p)
    if (common % p == 0 && std::abs(p - asked) < std::abs(best - asked)) best = p;
  return best;
}

}  // namespace

ContextLine context_of(const Case& line, std::span<const View> cu_seqlens) {
  ContextLine c(line);
  if (cu_seqlens.empty()) return c;
  const auto lengths = [&](const View& tensor, bool keys) {
    const auto offsets = downloaded(tensor);
    const char* total = keys ? "kv_tokens" : "tokens";
    if (auto refused =
            malformed(offsets, keys ? "cu_seqlens_k" : "cu_seqlens", total, line.at(total)))
      throw *refused;
    return steps_of(offsets);
  };
  c.documents = lengths(cu_seqlens[0], false);
  c.key_documents = cu_seqlens.size() > 1 ? lengths(cu_seqlens[1], true) : c.documents;
  c.rows = rows_of_documents(c.layout, c.documents, c.ranks);
  c.key_rows = rows_of_documents(c.layout, c.key_documents, c.ranks);
  return c;
}

std::optional<Rejected> refused_context(const Case& line) {
  return first_refusal(axes(line), documents(line), rows(line));
}

std::optional<Rejected> refused_attention(const Case& line) {
  if (Refusal r = refused_context(line)) return r;
  return first_refusal(masks(line), heads(line), countable_heads(line), sharpness(line));
}

std::optional<Rejected> refused_attention_alltoall(const Case& line) {
  if (Refusal r = refused_attention(line)) return r;
  const auto [n, g] = own_heads(line);
  const int64_t p = line.ranks(Axis::cp);
  const bool replicate = line.on("kv_replicate");
  const std::string met = std::to_string(n) + " heads and " + std::to_string(g) +
                          " kv_heads on a tp rank, cp=" + std::to_string(p);
  const int64_t most = replicate ? n : g;  // each rank is dealt one at least
  const auto nearest = [](int64_t cp) {
    return "cp=" + std::to_string(cp) + " is the nearest legal";
  };
  if (line.on("uneven_heads"))
    return when(most < p, std::string(replicate ? "heads" : "kv_heads") + " for each rank of cp",
                met, nearest(most) + (n >= p ? "; or copy key heads with kv_replicate=on" : ""));
  const std::string legal = nearest(nearest_legal(n, g, p)),
                    dealt = most >= p ? "; or deal unequal shares with uneven_heads=on" : "";
  return first_refusal(
      when(n % p != 0, "heads divisible by cp", met, legal + dealt),
      when(!replicate && g % p != 0, "kv_heads divisible by cp", met,
           legal + (p % g == 0 ? "; or copy key heads with kv_replicate=on" : "") + dealt),
      when(replicate && g % p != 0 && p % g != 0,
           "kv_heads divisible by cp, or cp by kv_heads where they are copied", met,
           legal + dealt));
}

std::optional<Rejected> refused_attention_hierarchical(const Case& line) {
  if (Refusal r = refused_attention(line)) return r;
  const int64_t p = line.ranks(Axis::cp), u = line.at("inner");
  const auto [n, g] = own_heads(line);
  return first_refusal(
      when(p % u != 0, "inner that divides cp=" + std::to_string(p), said(line, "inner"),
           "choose a divisor"),
      when(n % u != 0 || g % u != 0, "heads and kv_heads divisible by inner",
           std::to_string(n) + " heads and " + std::to_string(g) + " kv_heads on a tp rank, " +
               said(line, "inner"),
           "inner=" + std::to_string(nearest_legal(n, g, u)) + " is the nearest legal"));
}

}  // namespace shardproof::primitives
