#include "oracle/float_environment.hpp"

#include <cfenv>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace shardproof {
namespace {

constexpr unsigned flush_to_zero = 0x8000, denormals_are_zero = 0x40, masks = 0x1f80,
                   sticky_flags = 0x3f;

FloatEnvironment& met_at_start() {
  static FloatEnvironment met = FloatEnvironment::judged();
  return met;
}

}  // namespace

FloatEnvironment FloatEnvironment::now() {
  FloatEnvironment e;
#if defined(__x86_64__)
  e.control = _mm_getcsr() & ~sticky_flags;
#endif
  e.rounding = std::fegetround();
  return e;
}

FloatEnvironment FloatEnvironment::judged() { return {masks, FE_TONEAREST}; }

void FloatEnvironment::start_judging() {
  met_at_start() = now();
  judged().restore();
}

const FloatEnvironment& FloatEnvironment::at_start() { return met_at_start(); }

void FloatEnvironment::restore() const {
#if defined(__x86_64__)
  _mm_setcsr(control);
#endif
  std::fesetround(rounding);
}

std::string FloatEnvironment::difference(const FloatEnvironment& before) const {
  std::string text;
  const auto say = [&](const std::string& what) { text += (text.empty() ? "" : ", ") + what; };
#if defined(__x86_64__)
  const unsigned changed = control ^ before.control;
  const auto switched = [&](unsigned bit) {
    return control & bit ? " switched on" : " switched off";
  };
  if (changed & flush_to_zero) say(std::string("flush-to-zero") + switched(flush_to_zero));
  if (changed & denormals_are_zero)
    say(std::string("denormals-are-zero") + switched(denormals_are_zero));
  if (changed & masks) say("exception masks changed");
#endif
  if (rounding != before.rounding)
    say("rounding mode changed from " + std::to_string(before.rounding) + " to " +
        std::to_string(rounding));
  return text;
}

}  // namespace shardproof
