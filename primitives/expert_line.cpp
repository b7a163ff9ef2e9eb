// What expert-parallel layers read from a line, and which lines they refuse.
#include "primitives/expert_alltoall.hpp"
#include "primitives/line.hpp"

namespace shardproof::primitives {

ExpertLine::ExpertLine(const Case& line)
    : experts(line.at("experts")),
      choices(line.at("topk")),
      capacity(line.at("capacity")),
      replicated(line.ranks(Axis::tp) > 1 && !line.on("sp")) {
  for (Axis axis : {Axis::tp, Axis::ep})
    if (line.ranks(axis) > 1) axes.push_back(axis);
  if (axes.empty()) axes = {Axis::ep};
}

std::optional<Rejected> refused_experts(const Case& line) {
  const int64_t owners = int64_t(line.ranks(Axis::ep)) * line.ranks(Axis::tp),
                ranks = owners * line.ranks(Axis::cp) * line.ranks(Axis::dp);
  return first_refusal(when(line.ranks(Axis::pp) > 1, "the axes tp, cp, ep and dp only",
                            said(line, "pp"), "there is no pipeline axis here: leave pp at 1"),
                       undivided(line, "experts", owners, "ep*tp"),
                       undivided(line, "tokens", ranks, "dp*cp*ep*tp"),
                       when(line.at("topk") > line.at("experts"), "topk of at most experts",
                            said(line, "topk") + " " + said(line, "experts"),
                            "a token chooses an expert once: take fewer choices"),
                       when(line.at("capacity") > line.at("tokens") / ranks,
                            "capacity of at most the tokens that a rank dispatches, " +
                                std::to_string(line.at("tokens") / ranks),
                            said(line, "capacity"), "no expert is sent more rows by a rank"));
}

}  // namespace shardproof::primitives
