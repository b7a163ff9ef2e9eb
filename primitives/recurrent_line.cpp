#include "primitives/recurrent_line.hpp"

#include <algorithm>

namespace shardproof::primitives {
namespace {

Refusal out_of_order(const Case& line) {
  return when(line.text("layout") != "contiguous", "layout=contiguous", said(line, "layout"),
              "a rank's state is that behind the tokens of the ranks before it: exchange the rows "
              "first, as zigzag_exchange does");
}

// A document that is cut by itself lies in 2p blocks of its own, whose states it would pass one by
// one.
Refusal documents_apart(const Case& line) {
  return when(line.text("layout") == "zigzag" && !ContextLine(line).documents.empty(),
              "layout=contiguous or zigzag_row of packed documents", said(line, "layout"),
              "a rank has two blocks of the row there, and two of each document here");
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
      countable("the states of all ranks", {c.ranks, c.batch, n, dk, dv + further}));
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
  if (Refusal r = first_refusal(out_of_order(line),
                                undivided(line, "channels", line.ranks(Axis::tp), "tp")))
    return r;
  const ContextLine c(line);
  return first_refusal(
      countable(whole_operand, {c.rows, c.batch, line.ranks(Axis::dp), line.at("channels")}),
      countable(line, {"channels", "width"}));
}

std::optional<Rejected> refused_scan(const Case& line) { return refused_states(line, 1); }
std::optional<Rejected> refused_delta(const Case& line) {
  return refused_states(line, line.at("head_dim"));
}

}  // namespace shardproof::primitives
