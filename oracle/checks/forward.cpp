// F: are the outputs what one process computes?
#include "oracle/checks/judging.hpp"

namespace shardproof {
namespace {

CheckResult judge(const Evidence& e) {
  if (auto f = judging::incomplete(e, "base")) return judging::conclude("forward", 0, {*f});
  return judging::conclude("forward", judging::base_against_truth(e, "F0", /*gradient=*/false));
}

}  // namespace

Check forward_check() {
  return {.name = "forward",
          .letter = 'F',
          .asks = "are the outputs what one process computes",
          .due = [](const Contract&, const Case&, const Declared&) { return true; },
          .plan = nullptr,
          .judge = judge};
}

}  // namespace shardproof
