#include "primitives/recipe.hpp"

#include "primitives/line.hpp"

namespace shardproof::primitives {
namespace {

bool wide(const Recipe& r) { return r.type == DType::f64; }

}  // namespace

Recipe::Recipe(const Case& line, const EightBits& f)
    : format(f),
      power_of_two(line.text("scaling") == "pow2"),
      block(line.at("block")),
      type(accumulation_of(line)) {}

EightBits format_of(const Case& line, const char* key) {
  return line.text(key) == "e5m2" ? e5m2 : e4m3;
}

void roll_history(const View& history, const View& amax, const View& next) {
  const int64_t kept = history.elements() - 1;
  convert(amax, next.narrow(0, 0, 1));
  convert(history.narrow(0, 0, kept), next.narrow(0, 1, kept));
}

void greatest_of(const Recipe& r, const View& x, const View& amax) {
  perform(AbsoluteMaximum{tensor(x), tensor(amax), x.elements() / amax.elements(), wide(r)},
          "amax");
}

void scales_from(const Recipe& r, const View& amax, const View& scales) {
  perform(
      Scales{tensor(amax), tensor(scales), r.format.number(r.format.last), r.power_of_two, wide(r)},
      "scales");
}

void codes_from(const Recipe& r, const View& x, const View& scales, const View& words) {
  perform(
      Quantise{tensor(x), tensor(scales), tensor(words), r.format, r.group(x.elements()), wide(r)},
      "codes");
}

void values_from(const Recipe& r, const View& words, const View& scales, int64_t own,
                 const View& y) {
  perform(Dequantise{tensor(words), tensor(scales), tensor(y), r.format, own, r.group(y.elements()),
                     wide(r)},
          "values of codes");
}

}  // namespace shardproof::primitives
