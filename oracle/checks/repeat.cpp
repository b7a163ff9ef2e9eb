// N: does the same call on the same data give the same bits, also when ranks arrive late?
#include "oracle/checks/judging.hpp"

namespace shardproof {
namespace {

const char* const shot_names[] = {"repeat", "repeat:delays"};

// Alone, nobody arrives late.
std::span<const char* const> shots_of(const Evidence& e) {
  return std::span(shot_names).first(e.mesh.world() == 1 ? 1 : 2);
}

void plan(const Evidence& e, std::vector<Shot>& shots) {
  Shot again = shots.at(0);
  again.name = shot_names[0];
  shots.push_back(again);
  if (shots_of(e).size() == 1) return;
  again.name = shot_names[1];
  again.delays = true;
  shots.push_back(std::move(again));
}

CheckResult judge(const Evidence& e) {
  return judging::same_again(e, "repeat", shots_of(e), [](const Shot& shot) -> judging::Told {
    if (shot.delays)
      return {"with ranks that arrive late",
              "the result depends on the order of arrival: a race, or a sum in that order"};
    return {"", "state from an earlier call is left over, a race, or a sum in varying order"};
  });
}

}  // namespace

Check repeat_check() {
  return {
      .name = "repeat",
      .letter = 'N',
      .asks = "does the same call on the same data give the same bits, also when ranks arrive late",
      .due = [](const Contract&, const Case&, const Declared&) { return true; },
      .plan = plan,
      .judge = judge};
}

}  // namespace shardproof
