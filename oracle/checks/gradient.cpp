// G: are the gradients what one process computes?
#include "oracle/checks/judging.hpp"

namespace shardproof {
namespace {

CheckResult judge(const Evidence& e) {
  if (auto f = judging::incomplete(e, "base")) return judging::conclude("gradient", 0, {*f});
  return judging::conclude("gradient", judging::base_against_truth(e, "B0", /*gradient=*/true));
}

}  // namespace

Check gradient_check() {
  return {.name = "gradient",
          .letter = 'G',
          .asks = "are the gradients what one process computes",
          .due = judging::has_gradients,
          .plan = nullptr,
          .judge = judge};
}

}  // namespace shardproof
