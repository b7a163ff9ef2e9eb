#include "primitives/expert_line.hpp"

#include <string>

#include "primitives/line.hpp"

namespace shardproof::primitives {

ExpertLine::ExpertLine(const Case& line)
    : axes(with_ranks(line, {Axis::tp, Axis::ep})),
      experts(line.at("experts")),
      choices(line.at("topk")),
      capacity(line.at("capacity")),
      replicated(line.ranks(Axis::tp) > 1 && !line.on("sp")) {
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

}  // namespace

std::optional<Rejected> refused_balance(const Case& line) {
  const int64_t ranks = int64_t(line.ranks(Axis::dp)) * line.ranks(Axis::cp) *
                        line.ranks(Axis::ep) * (line.on("sp") ? line.ranks(Axis::tp) : 1);
  return first_refusal(pipeline(line),
                       undivided(line, "tokens", ranks, line.on("sp") ? "dp*cp*ep*tp" : "dp*cp*ep"),
                       choices_beyond_experts(line));
}

std::optional<Rejected> refused_experts(const Case& line) {
  const int64_t owners = int64_t(line.ranks(Axis::ep)) * line.ranks(Axis::tp),
                ranks = owners * line.ranks(Axis::cp) * line.ranks(Axis::dp);
  return first_refusal(pipeline(line), undivided(line, "experts", owners, "ep*tp"),
                       undivided(line, "tokens", ranks, "dp*cp*ep*tp"),
                       choices_beyond_experts(line), countable(line, {"tokens", "topk", "hidden"}),
                       countable(line, {"tokens", "topk", "out"}),
                       countable(line, {"experts", "out", "hidden"}),
                       when(line.at("capacity") > line.at("tokens") / ranks,
                            "capacity of at most the tokens that a rank dispatches, " +
                                std::to_string(line.at("tokens") / ranks),
                            said(line, "capacity"), "no expert is sent more rows by a rank"));
}

}  // namespace shardproof::primitives
