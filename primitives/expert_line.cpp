#include "primitives/expert_line.hpp"

#include <string>

#include "primitives/line.hpp"

namespace shardproof::primitives {
namespace {

bool cuts_ffn(const Case& line) { return line.has("ffn"); }

}  // namespace

ExpertLine::ExpertLine(const Case& line)
    : axes(cuts_ffn(line) ? std::vector{Axis::ep} : with_ranks(line, {Axis::tp, Axis::ep})),
      axes_of_shares(with_ranks(line, {Axis::tp, Axis::ep})),
      experts(line.at("experts")),
      choices(line.at("topk")),
      capacity(line.at("capacity")),
      shares(cuts_ffn(line) && line.on("sp") ? line.ranks(Axis::tp) : 1),
      replicated(!cuts_ffn(line) && line.ranks(Axis::tp) > 1 && !line.on("sp")) {
  if (axes.empty()) axes = {Axis::ep};
}

namespace {

Refusal pipeline(const Case& line) {
  return when(line.ranks(Axis::pp) > 1, "the axes tp, cp, ep and dp only", said(line, "pp"),
              "there is no pipeline axis here: leave pp at 1");
}

Refusal choices_beyond_experts(const Case& line) {
  return when(line.at("topk") > line.at("experts"), "topk of at most experts",
              said(line, "topk") + " " + said(line, "experts"),
              "a token chooses an expert once: take fewer choices");
}

// Rows of all tokens or of all capacities, and the gradients that are summed in one call.
Refusal uncountable(const Case& line) {
  const int64_t E = line.at("experts"), h = line.at("hidden"),
                shares = cuts_ffn(line) ? line.ranks(Axis::tp) : 1;
  const auto rows = first_refusal(countable(line, {"tokens", "topk", "hidden"}),
                                  countable("rows of all capacities, experts*capacity*hidden",
                                            {E, line.at("capacity"), h, shares}));
  if (!cuts_ffn(line))
    return first_refusal(rows, countable(line, {"tokens", "topk", "out"}),
                         countable(line, {"experts", "out", "hidden"}));
  const int64_t weights = line.text("activation") == "swiglu" ? 3 : 2;
  return first_refusal(rows,
                       countable("gradients of all experts, experts*hidden*ffn of each weight",
                                 {E, h, line.at("ffn"), weights}));
}

}  // namespace

std::optional<Rejected> refused_balance(const Case& line) {
  const int64_t ranks = int64_t(line.ranks(Axis::dp)) * line.ranks(Axis::cp) *
                        line.ranks(Axis::ep) * (line.on("sp") ? line.ranks(Axis::tp) : 1);
  return first_refusal(pipeline(line),
                       undivided(line, "tokens", ranks, line.on("sp") ? "dp*cp*ep*tp" : "dp*cp*ep"),
                       choices_beyond_experts(line));
}

std::optional<Rejected> refused_experts(const Case& line) {
  const bool mlp = cuts_ffn(line), cut = !mlp || line.on("sp");
  const int64_t tp = line.ranks(Axis::tp), owners = line.ranks(Axis::ep) * (mlp ? 1 : tp),
                ranks = int64_t(line.ranks(Axis::ep)) * line.ranks(Axis::cp) *
                        line.ranks(Axis::dp) * (cut ? tp : 1);
  return first_refusal(pipeline(line), undivided(line, "experts", owners, mlp ? "ep" : "ep*tp"),
                       mlp ? undivided(line, "ffn", tp, "tp") : Refusal(),
                       undivided(line, "tokens", ranks, cut ? "dp*cp*ep*tp" : "dp*cp*ep"),
                       choices_beyond_experts(line), uncountable(line),
                       when(line.at("capacity") > line.at("tokens") / ranks,
                            "capacity of at most the tokens that a rank dispatches, " +
                                std::to_string(line.at("tokens") / ranks),
                            said(line, "capacity"), "no expert is sent more rows by a rank"));
}

}  // namespace shardproof::primitives
