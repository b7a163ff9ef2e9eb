#include "primitives/recurrent_line.hpp"

#include <algorithm>

namespace shardproof::primitives {

Blocks::Blocks(const ContextLine& c)
    : ranks(c.ranks), each(c.ranks > 1 && c.layout != "contiguous" ? 2 : 1) {}

View Blocks::of(const View& rows, int i) const {
  const int64_t n = rows.shape[0] / each;
  return rows.narrow(0, i * n, n);
}

namespace {

// A document that is cut by itself lies in 2p blocks of its own, whose states it would pass one by
// one.
Refusal documents_apart(const Case& line) {
  return when(line.text("layout") == "zigzag" && !ContextLine(line).documents.empty(),
              "layout=contiguous or zigzag_row of packed documents", said(line, "layout"),
              "a rank has two blocks of the row there, and two of each document here");
}

// Of two blocks each is asked for its last rows by one other block.
Refusal far_halo(const Case& line, const ContextLine& c) {
  const Blocks blocks(c);
  const int64_t own = c.rows / blocks.count();
  return when(
      blocks.each == 2 && line.at("width") - 1 > own,
      "width - 1 rows in each of the " + std::to_string(blocks.count()) + " blocks of a zigzag",
      said(line, "width") + " and " + std::to_string(own) + " rows",
      "use more tokens, or layout=contiguous, which asks several ranks");
}

// Each head hands on a state and, for each of its rows, `further` numbers at most.
std::optional<Rejected> refused_states(const Case& line, int64_t further) {
  if (Refusal r = refused_context(line)) return r;
  if (Refusal r = first_refusal(documents_apart(line),
                                undivided(line, "heads", line.ranks(Axis::tp), "tp")))
    return r;
  const ContextLine c(line);
  const int64_t n = line.at("heads"), dk = line.at("head_dim"), dv = line.at("v_dim");
  return first_refusal(
      countable(whole_operand, {c.rows, c.batch, line.ranks(Axis::dp), n, std::max(dk, dv)}),
      countable("the states of all blocks", {Blocks(c).count(), c.batch, n, dk, dv + further}));
}

}  // namespace

std::vector<int64_t> tokens_before(const ContextLine& c, int r) {
  std::vector<int64_t> list;
  for (const Label& label : local_labels(
           c, c.documents.empty() ? labels_of_sequence(c.rows, 0) : labels_of_documents(c), r))
    list.push_back(label.sequence < 0 ? -1 : label.position);
  return list;
}

bool decays_are_logarithms(const Case& line) { return line.text("decay") == "log"; }

std::optional<Rejected> refused_conv(const Case& line) {
  if (Refusal r = refused_context(line)) return r;
  if (Refusal r = first_refusal(documents_apart(line),
                                undivided(line, "channels", line.ranks(Axis::tp), "tp")))
    return r;
  const ContextLine c(line);
  if (Refusal r = far_halo(line, c)) return r;
  return first_refusal(
      countable(whole_operand, {c.rows, c.batch, line.ranks(Axis::dp), line.at("channels")}),
      countable(line, {"channels", "width"}));
}

std::optional<Rejected> refused_scan(const Case& line) { return refused_states(line, 1); }
std::optional<Rejected> refused_delta(const Case& line) {
  return refused_states(line, line.at("head_dim"));
}

std::optional<Rejected> refused_mixer(const Case& line) {
  if (Refusal r = refused_context(line)) return r;
  const int64_t tp = line.ranks(Axis::tp), cp = line.ranks(Axis::cp), n = line.at("heads"),
                g = line.at("groups"), groups = g / tp, features = line.at("state_dim");
  if (Refusal r = first_refusal(undivided(line, "heads", tp * cp, "tp*cp"),
                                undivided(line, "groups", tp, "tp"),
                                when(n % g != 0, "heads divisible by groups",
                                     said(line, "heads") + " " + said(line, "groups"),
                                     "every group serves equally many heads")))
    return r;
  if (Refusal r =
          when(groups % cp != 0 && cp % groups != 0, "groups divisible by cp, or cp by them",
               std::to_string(groups) + " groups on a tp rank, " + said(line, "cp"),
               "ranks of cp share a group evenly, or have whole groups"))
    return r;
  const ContextLine c(line);
  const int64_t channels = n * line.at("head_dim") + 2 * g * features;
  return first_refusal(countable(whole_operand, {c.rows, c.batch, line.ranks(Axis::dp),
                                                 std::max(n * line.at("head_dim"),
                                                          std::max(g, tp * cp) * features)}),
                       countable("all parameters", {channels + n, line.at("width") + 1}));
}

}  // namespace shardproof::primitives
