// Tier W: the root mean square of the errors of a whole tensor, each in its own statistical scale.
// An error that is small in every element and the same in all of them (a scale that is off by a few
// units, an accumulator that truncates) stays below any bound of single elements; their rms does
// not.
#include <fmt/format.h>

#include <cmath>
#include <limits>

#include "fixtures/sharding.hpp"
#include "oracle/checks/judging.hpp"

namespace shardproof::judging {
namespace {

// What the ranks hold together: parts of type P added, one of equal copies taken. Empty where a
// result is missing.
std::vector<double> denoted_values(const Evidence& e, int shot, int step, int operand,
                                   bool gradient) {
  const Operand& o = e.operands[size_t(operand)];
  const Layout layout = result_layout(o, gradient);
  std::vector<double> sum(size_t(product(denoted_shape(o.shape, layout, e.mesh)))), local;
  std::vector<bool> taken(size_t(product(whole_shape(o.shape, layout, e.mesh))));
  for (int r = 0; r < e.mesh.world(); ++r) {
    const ResultTensor* t = e.result(r, shot, step, operand, gradient);
    const auto whole = whole_indices(o.shape, layout, e.mesh, r),
               denoted = denoted_indices(o.shape, layout, e.mesh, r);
    if (!t || t->bytes.size() != whole.size() * size_of(t->dtype)) return {};
    read(*t, local);
    for (size_t i = 0; i < whole.size(); ++i)
      if (!taken[size_t(whole[i])]) {
        taken[size_t(whole[i])] = true;
        sum[size_t(denoted[i])] += local[i];
      }
  }
  return sum;
}

double rms_in_scale(const std::vector<double>& got, const Whole& want,
                    const std::function<double(int64_t)>& scale) {
  double sum = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    const double error = got[i] - want.value[i];
    if (error != 0) sum += std::pow(error / scale(int64_t(i)), 2);
  }
  return std::sqrt(sum / double(got.size()));
}

}  // namespace

std::optional<WholeTensor> whole_tensor(const Evidence& e, int shot, int step, int operand,
                                        bool gradient, const Whole& want,
                                        const std::function<double(int64_t)>& scale) {
  if (!scale) return std::nullopt;
  const auto got = denoted_values(e, shot, step, operand, gradient);
  if (got.empty() || got.size() != want.value.size()) return std::nullopt;
  WholeTensor w;
  w.rms = rms_in_scale(got, want, scale);
  w.limit = rms_limit(int64_t(got.size()));
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
  f.wrong = f.compared = int64_t(got.size());
  f.message = fmt::format(
      "every element is within its own bound; the rms of {} errors in their statistical scales is "
      "{}, at most {} with rounding to nearest",
      got.size(), number(w.rms), number(w.limit));
  f.means =
      "all elements are off alike: a factor that is slightly wrong, sums in a narrower type, or an "
      "accumulator that truncates (declare truncates = true where that is meant)";
  w.finding = std::move(f);
  return w;
}

}  // namespace shardproof::judging
