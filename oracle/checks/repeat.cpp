// N: does the same call on the same data give the same bits, also when ranks arrive late, and when
// the kernel object has served other extents, or other data?
//
//   X F0 B0   on a kernel object of its own, X a forward and backward of the line with half as many
//             tokens, or as many as the contract takes: what an object keeps of the extents of its
//             first forward, or of an earlier one, is not what F0 and B0 need. None comes between
//             these two: what a forward keeps in the object is told by `accumulate`, whose feeds
//             have equal extents, and would be read beyond its end here
//   F1 F0     where there is no backward, on a kernel object of its own, F1 on other data: no
//             `accumulate` tells there what an object keeps of a step
#include "oracle/checks/judging.hpp"

namespace shardproof {
namespace {

constexpr const char *again = "repeat", *late = "repeat:delays", *other = "repeat:other extents",
                     *before = "repeat:other data";

// The line with another number of tokens; empty where the contract takes none of a few.
std::optional<Case> with_other_tokens(const Contract& c, const Case& line) {
  const bool rows = line.has("seq") && line.at("seq") > 0;
  if (!line.has("tokens") || (line.has("docs") && !line.text("docs").empty())) return {};
  const int64_t n = line.at(rows ? "seq" : "tokens");
  for (const int64_t m : {n / 2, n / 3, 2 * n, 3 * n}) {
    if (m < 1) continue;
    Case candidate = line;
    if (rows) candidate.set("seq", std::to_string(m));
    candidate.set("tokens", std::to_string(rows ? m * line.at("batch") : m));
    if (!c.precondition || !c.precondition(candidate)) return candidate;
  }
  return {};
}

Shot after_other_data(Shot shot) {
  shot.name = before;
  shot.program = "F1 F0";
  shot.feeds.push_back(shot.feeds.at(0));
  shot.feeds[1].seed += 0x9e3779b9;
  shot.fresh = true;
  return shot;
}

void plan(const Evidence& e, std::vector<Shot>& shots) {
  Shot shot = shots.at(0);
  shot.name = again;
  shots.push_back(shot);
  if (e.mesh.world() > 1) {  // alone, nobody arrives late
    shot.name = late;
    shot.delays = true;
    shots.push_back(shot);
  }
  // What a faulty collective does is seen without it.
  if (!e.line->text("fault").empty()) return;
  if (e.forward_only()) shots.push_back(after_other_data(shots.at(0)));
  if (!e.declared.other_extents) return;
  const auto line = with_other_tokens(*e.contract, *e.line);
  if (!line) return;
  shot.name = other;
  shot.delays = false;
  shot.program = e.forward_only() ? "X F0" : "X F0 B0";
  shot.other = print_canonical(*line);
  shot.fresh = true;
  shots.push_back(std::move(shot));
}

judging::Told told(const Shot& shot) {
  if (shot.delays)
    return {"with ranks that arrive late",
            "the result depends on the order of arrival: a race, or a sum in that order"};
  if (shot.name == before)
    return {"after a forward on other data on the same kernel object",
            "the kernel keeps something of an earlier step that this one has anew: masters, a "
            "moment, a buffer"};
  if (shot.fresh)
    return {"after a forward of other extents on the same kernel object",
            "the kernel keeps something of the extents that it met before: a table, a plan, "
            "a buffer"};
  return {"", "state from an earlier call is left over, a race, or a sum in varying order"};
}

CheckResult judge(const Evidence& e) {
  std::vector<const char*> names;
  for (const char* name : {again, late, before, other})
    if (e.find_shot(name) >= 0) names.push_back(name);
  return judging::same_again(e, "repeat", names, told);
}

}  // namespace

Check repeat_check() {
  return {
      .name = "repeat",
      .letter = 'N',
      .asks =
          "does the same call on the same data give the same bits, also when ranks arrive late, "
          "and after other extents or other data",
      .due = [](const Contract&, const Case&, const Declared&) { return true; },
      .plan = plan,
      .judge = judge};
}

}  // namespace shardproof
