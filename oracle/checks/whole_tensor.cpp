// Tier W: the root mean square of the errors of a whole tensor, each in its own statistical scale.
// An error that is small in every element and the same in all of them (a scale that is off by a few
// units, an accumulator that truncates) stays below any bound of single elements; their rms does
// not.
#include <fmt/format.h>

#include <cmath>
#include <limits>

#include "fixtures/sharding.hpp"
#include "oracle/checks/judging.hpp"
#include "oracle/checks/pieces.hpp"

namespace shardproof::judging {
namespace {

// Of what the ranks hold together: parts of type P added, the first of equal copies taken. Empty
// where a result is missing.
std::optional<double> rms_in_scale(const Evidence& e, int shot, int step, int operand,
                                   bool gradient, const Whole& want,
                                   const std::function<double(int64_t)>& scale) {
  std::vector<bool> taken(want.value.size());
  double sum = 0;
  const auto missing = each_part(e, shot, step, operand, gradient, [&](const Part& part) {
    const auto indices = part.indices();
    for (size_t i = 0; i < part.got.size(); ++i) {
      const size_t at = size_t(indices[i]);
      if (taken[at]) continue;
      taken[at] = true;
      if (part.got[i] == want.value[at]) continue;  // an infinity that is due, too
      const double error = part.got[i] - want.value[at];
      sum += std::pow(error / scale(int64_t(at)), 2);
    }
  });
  if (missing || taken.empty()) return std::nullopt;
  return std::sqrt(sum / double(taken.size()));
}

}  // namespace

std::optional<WholeTensor> whole_tensor(const Evidence& e, int shot, int step, int operand,
                                        bool gradient, const Whole& want,
                                        const std::function<double(int64_t)>& scale) {
  if (!scale) return std::nullopt;
  const auto rms = rms_in_scale(e, shot, step, operand, gradient, want, scale);
  if (!rms) return std::nullopt;
  const auto elements = int64_t(want.value.size());
  WholeTensor w;
  w.rms = *rms;
  w.limit = rms_limit(elements);
  if (w.rms <= w.limit) return w;
  const Operand& o = e.operands[size_t(operand)];
  Finding f;
  f.tensor = tensor_name(o, gradient);
  f.where = "rms over " + tensor_name(o, gradient);
  f.numeric = true;
  f.got = f.error = w.rms;
  f.want = 0;
  f.bound = w.limit;
  f.ratio = std::isfinite(w.rms) ? w.ratio() : std::numeric_limits<double>::infinity();
  f.wrong = f.compared = elements;
  f.message = fmt::format(
      "every element is within its own bound; the rms of {} errors in their statistical scales is "
      "{}, at most {} with rounding to nearest",
      elements, number(w.rms), number(w.limit));
  f.means =
      "all elements are off alike: a factor that is slightly wrong, sums in a narrower type, or an "
      "accumulator that truncates (declare truncates = true where that is meant)";
  w.finding = std::move(f);
  return w;
}

}  // namespace shardproof::judging
