// Broken twins of a linear with factors in 8 bits. The comment above a twin names the mistake.
#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

#include "primitives/controls/eight_bits.hpp"
#include "primitives/controls/table.hpp"
#include "primitives/quantised_linear.hpp"

namespace shardproof {
namespace {

using namespace controls;
using namespace primitives;

// Names the tensors, and the phase in which a step is asked.
struct Linear8 : QuantisedLinear {
  using QuantisedLinear::Of;
  void backward(Rank& rank, Saved& saved, std::span<const View> cotangents,
                std::span<const View> gradients) override {
    backward_ = true;
    QuantisedLinear::backward(rank, saved, cotangents, gradients);
    backward_ = false;
  }
  bool backward_ = false;
};
using Of = Linear8::Of;
constexpr Of X = Of::x, W = Of::w, G = Of::g;

// ---- amax

// Each rank scales its part by its own amax: it is never reduced.
template <Of of>
struct AmaxLocal final : Linear8 {
  void reduce_amax(Rank& rank, Of o, const std::vector<Axis>& axes, const View& own,
                   const View& all) override {
    if (o == of) return convert(own, all);
    Linear8::reduce_amax(rank, o, axes, own, all);
  }
};

// Reduced over these axes, whatever the line says.
template <Of of, Axis... axes>
struct AmaxOver final : Linear8 {
  std::vector<Axis> reduced_over(const Case& line, Of o) const override {
    if (o != of) return Linear8::reduced_over(line, o);
    std::vector<Axis> over;
    for (Axis axis : {axes...})
      if (line.ranks(axis) > 1) over.push_back(axis);
    return over;
  }
};

// The sum of the ranks' amaxes: all agree, and use a part of the range.
struct AmaxSummed final : Linear8 {
  void reduce_amax(Rank& rank, Of, const std::vector<Axis>& axes, const View& own,
                   const View& all) override {
    all_reduce(rank, rank.along(axes), own, all);
  }
};

// A maximum that is already whole is taken once more.
struct AmaxReducedTwice final : Linear8 {
  void reduce_amax(Rank& rank, Of of, const std::vector<Axis>& axes, const View& own,
                   const View& all) override {
    const View once = rank.workspace(own.dtype, own.shape);
    Linear8::reduce_amax(rank, of, axes, own, once);
    Linear8::reduce_amax(rank, of, axes, once, all);
  }
};

// The greatest value in place of the greatest magnitude.
struct AmaxSigned final : Linear8 {
  void own_amax(const Recipe&, Of, const View& x, const View& amax) override {
    const Doubles v = to_doubles(x);
    fill_from(amax, Doubles{*std::max_element(v.begin(), v.end())});
  }
};

// The amax is rounded to bf16 on its way.
template <Of of>
struct AmaxInBf16 final : Linear8 {
  void own_amax(const Recipe& r, Of o, const View& x, const View& amax) override {
    Linear8::own_amax(r, o, x, amax);
    Doubles v = to_doubles(amax);
    for (double& a : v)
      if (o == of) a = round_to(a, DType::bf16);
    fill_from(amax, v);
  }
};

// ---- Amaxes of earlier steps

// The newest is not among them yet, or the oldest is gone too early.
template <int missing_first, int missing_last>
struct PartOfHistory final : Linear8 {
  View amax_of_history(Rank& rank, const Recipe& r, Of of, const View& history) override {
    const int64_t left = history.elements() - missing_first - missing_last;
    return Linear8::amax_of_history(rank, r, of, history.narrow(0, missing_first, left));
  }
};
using AStepLate = PartOfHistory<1, 0>;
using WindowShort = PartOfHistory<0, 1>;

// Rolled before it is asked: the own step counts.
struct OwnStepCounted final : Linear8 {
  void roll(Of of, const View& history, const View& amax, const View& next) override {
    Linear8::roll(of, history, amax, next);
    next_ = next;
  }
  View amax_of_history(Rank& rank, const Recipe& r, Of of, const View&) override {
    return Linear8::amax_of_history(rank, r, of, next_);
  }
  View next_;
};

// The newest comes in at the other end.
struct RolledBackwards final : Linear8 {
  void roll(Of, const View& history, const View& amax, const View& next) override {
    const int64_t kept = history.elements() - 1;
    convert(history.narrow(0, 1, kept), next.narrow(0, 0, kept));
    convert(amax, next.narrow(0, kept, 1));
  }
};

// What is seen in the backward enters no history.
struct GradientNotNoted final : Linear8 {
  void roll(Of of, const View& history, const View& amax, const View& next) override {
    of == G ? convert(history, next) : Linear8::roll(of, history, amax, next);
  }
};

// ---- Scales and formats

template <Of of, class Change>
struct OtherScales final : Linear8 {
  void scales_of(const Recipe& r, Of o, const View& amax, const View& scales) override {
    Linear8::scales_of(r, o, amax, scales);
    if (o == of) rescale<Change>(r, amax, scales);
  }
};

// What the product is multiplied by, in place of 1/s.
template <Of of, class Change>
struct Epilogue final : Linear8 {
  void dequantise(Rank& rank, const Recipe& r, Of o, const View& words, const View& scales,
                  const View& y) override {
    Linear8::dequantise(rank, r, o, words, o == of ? changed<Change>(rank, r, scales) : scales, y);
  }
};
// 1/s is applied to the sum, and to the factor that it belonged to.
struct Twice {
  static Doubles of(const Recipe&, Doubles s) {
    for (double& v : s) v *= v;
    return s;
  }
};

// Multiplied with 1/s, which was to be kept for the way back.
template <Of of>
struct QuantisedByInverse final : Linear8 {
  void quantise(Rank& rank, const Recipe& r, Of o, const View& x, const View& scales,
                const View& words) override {
    Linear8::quantise(rank, r, o, x, o == of ? changed<Inverse>(rank, r, scales) : scales, words);
  }
};

// The scale of another tensor, in one place of two.
template <Of kept, Of used, bool in_backward>
struct ScaleOfOther final : Linear8 {
  void scales_of(const Recipe& r, Of o, const View& amax, const View& scales) override {
    Linear8::scales_of(r, o, amax, scales);
    if (o == kept) scale_ = to_doubles(scales);
  }
  void dequantise(Rank& rank, const Recipe& r, Of o, const View& words, const View& scales,
                  const View& y) override {
    if (o != used || backward_ != in_backward)
      return Linear8::dequantise(rank, r, o, words, scales, y);
    const View other = rank.workspace(scales.dtype, scales.shape);
    fill_from(other, scale_);
    Linear8::dequantise(rank, r, o, words, other, y);
  }
  Doubles scale_;
};
using InputScaleTwice = ScaleOfOther<X, W, false>;
using InputGradientByInputScale = ScaleOfOther<X, W, true>;

// Codes and values of the gradient by the scale of X: nothing is computed for it.
struct GradientByInputScale final : Linear8 {
  void scales_of(const Recipe& r, Of o, const View& amax, const View& scales) override {
    Linear8::scales_of(r, o, amax, scales);
    if (o == X) scale_ = to_doubles(scales);
    if (o == G) fill_from(scales, scale_);
  }
  Doubles scale_;
};

// A tensor in the format of another.
template <Of of>
struct OtherFormat final : Linear8 {
  Recipe recipe(const Case& line, Of o) const override {
    Recipe r = Linear8::recipe(line, o);
    if (o == of) r.format = other_than(r.format);
    return r;
  }
};

// The option reaches the weight alone: the others keep exact scales.
struct PowerOfTwoOfWeightAlone final : Linear8 {
  Recipe recipe(const Case& line, Of o) const override {
    Recipe r = Linear8::recipe(line, o);
    r.power_of_two &= o == W;
    return r;
  }
};

// What is rounded for the other format's range; codes that are read as the other's.
struct GradientScaledForOther final : Linear8 {
  void scales_of(const Recipe& r, Of o, const View& amax, const View& scales) override {
    Recipe other = r;
    if (o == G) other.format = other_than(r.format);
    Linear8::scales_of(other, o, amax, scales);
  }
};
struct GradientReadAsOther final : Linear8 {
  void dequantise(Rank& rank, const Recipe& r, Of o, const View& words, const View& scales,
                  const View& y) override {
    Recipe other = r;
    if (o == G) other.format = other_than(r.format);
    Linear8::dequantise(rank, other, o, words, scales, y);
  }
};

// ---- Codes

template <Of of, class Rule>
struct Converted final : Linear8 {
  void quantise(Rank& rank, const Recipe& r, Of o, const View& x, const View& scales,
                const View& words) override {
    if (o == of) return converted<Rule>(r, x, scales, words);
    Linear8::quantise(rank, r, o, x, scales, words);
  }
};

// Each rank's codes by its own scale first, and by the common one after.
struct InputQuantisedTwice final : Linear8 {
  void quantise(Rank& rank, const Recipe& r, Of o, const View& x, const View& scales,
                const View& words) override {
    if (o != X) return Linear8::quantise(rank, r, o, x, scales, words);
    const View amax = rank.workspace(r.type, scales.shape),
               first = rank.workspace(r.type, scales.shape), once = rank.workspace(r.type, x.shape);
    own_amax(r, o, x, amax);
    scales_of(r, o, amax, first);
    Linear8::quantise(rank, r, o, x, first, words);
    dequantise(rank, r, o, words, first, once);
    Linear8::quantise(rank, r, o, once, scales, words);
  }
};

struct CodesReversed final : Linear8 {
  void gather_codes(Rank& rank, Of, const View& own, const View& all) override {
    gather_reversed(rank, own, all);
  }
};
struct ScalesReversed final : Linear8 {
  void gather_scales(Rank& rank, Of, const View& own, const View& all) override {
    gather_reversed(rank, own, all);
  }
};

// Values are gathered as they are stored and quantised afterwards, each rank all of them: right, at
// twice the bytes and more.
template <Of of>
struct GatheredBeforeQuantising final : Linear8 {
  bool gathered(const Case& line, Of o) const override {
    return o != of && Linear8::gathered(line, o);
  }
  Copies copies(Rank& rank, Of o, const View& x) override {
    if (o != of || !Linear8::gathered(rank.line(), o)) return Linear8::copies(rank, o, x);
    Communicator& tp = rank.along(Axis::tp);
    const View all = rank.workspace(x.dtype, with_extent(x.shape, 0, x.shape[0] * tp.size()));
    all_gather(rank, tp, x, all, 0);
    return Linear8::copies(rank, o, all);
  }
};

// ---- What is kept

// Codes of the weight that the object computed first: nobody says that the weight has changed.
struct WeightCodesStale final : Linear8 {
  void quantise(Rank& rank, const Recipe& r, Of o, const View& x, const View& scales,
                const View& words) override {
    Linear8::quantise(rank, r, o, x, scales, words);
    if (o != W) return;
    if (words_.size() != size_t(words.elements()))
      words_ = to_doubles(words), scales_ = to_doubles(scales);
    fill_from(words, words_), fill_from(scales, scales_);
  }
  Doubles words_, scales_;
};
// The copy of it that the backward reads.
struct WeightTransposeStale final : Linear8 {
  void dequantise(Rank& rank, const Recipe& r, Of o, const View& words, const View& scales,
                  const View& y) override {
    if (o == W && backward_) {
      if (words_.size() != size_t(words.elements()))
        words_ = to_doubles(words), scales_ = to_doubles(scales);
      fill_from(words, words_), fill_from(scales, scales_);
    }
    Linear8::dequantise(rank, r, o, words, scales, y);
  }
  Doubles words_, scales_;
};
// 1/s of the forward before.
template <Of of>
struct ScaleStale final : Linear8 {
  void dequantise(Rank& rank, const Recipe& r, Of o, const View& words, const View& scales,
                  const View& y) override {
    if (o != of || backward_) return Linear8::dequantise(rank, r, o, words, scales, y);
    const Doubles now = to_doubles(scales);
    if (last_.size() != now.size()) last_ = now;
    const View before = rank.workspace(scales.dtype, scales.shape);
    fill_from(before, std::exchange(last_, now));
    Linear8::dequantise(rank, r, o, words, before, y);
  }
  Doubles last_;
};
// Codes lie in the layer and not with their forward: the next one replaces them.
struct CodesKeptInLayer final : Linear8 {
  std::unique_ptr<Saved> forward(Rank& rank, std::span<const View> inputs,
                                 std::span<const View> outputs) override {
    latest_ = Linear8::forward(rank, inputs, outputs);
    return std::make_unique<Saved>();
  }
  void backward(Rank& rank, Saved&, std::span<const View> cotangents,
                std::span<const View> gradients) override {
    Linear8::backward(rank, *latest_, cotangents, gradients);
  }
  std::unique_ptr<Saved> latest_;
};

// ---- Copies along the other dim, where blocks have scales

// Row-wise codes and scales serve the product that sums over the rows, too.
template <Of of>
struct OneCopy final : Linear8 {
  Copies copies(Rank& rank, Of o, const View& x) override {
    if (o != of) return Linear8::copies(rank, o, x);
    return {codes(rank, o, x, false), {}};
  }
};
// The other copy is made of what the first one has left.
template <Of of>
struct CopyOfRounded final : Linear8 {
  Copies copies(Rank& rank, Of o, const View& x) override {
    Copies c = Linear8::copies(rank, o, x);
    if (o != of) return c;
    const View rounded = rank.workspace(x.dtype, x.shape);
    dequantise(rank, recipe(rank.line(), o), o, c.along.words.view(), c.along.scales.view(),
               rounded);
    c.across = codes(rank, o, rounded, true);
    return c;
  }
};
// Codes of the other copy, scales of the first.
template <Of of>
struct ScalesOfFirstCopy final : Linear8 {
  Copies copies(Rank& rank, Of o, const View& x) override {
    Copies c = Linear8::copies(rank, o, x);
    if (o == of) convert(c.along.scales.view(), c.across.scales.view());
    return c;
  }
};
// Blocks over the rows where the product sums over the columns, and the other way round.
template <Of of>
struct CopiesExchanged final : Linear8 {
  Copies copies(Rank& rank, Of o, const View& x) override {
    Copies c = Linear8::copies(rank, o, x);
    if (o == of) std::swap(c.along, c.across);
    return c;
  }
};

// Squares of W whose scales are read in the order of the transpose.
struct SquaresTransposed final : Linear8 {
  void dequantise(Rank& rank, const Recipe& r, Of o, const View& words, const View& scales,
                  const View& y) override {
    if (o != W || !backward_) return Linear8::dequantise(rank, r, o, words, scales, y);
    const Doubles given = to_doubles(scales);
    const size_t rows = size_t(y.shape[0]), columns = size_t(y.shape[1]);
    Doubles turned;
    for (size_t i = 0; i < given.size(); ++i)
      turned.push_back(given[i % rows * columns + i / rows]);
    const View other = rank.workspace(scales.dtype, scales.shape);
    fill_from(other, turned);
    Linear8::dequantise(rank, r, o, words, other, y);
  }
};
// A weight in blocks of rows, where nobody says that they are squares.
struct SquaresAsRows final : Linear8 {
  Recipe recipe(const Case& line, Of of) const override { return {line, of == G ? e5m2 : e4m3}; }
  View in_order(const Case&, Of, const View& x, bool) const override { return x; }
  Copies copies(Rank& rank, Of of, const View& x) override {
    if (of != W) return Linear8::copies(rank, of, x);
    return {codes(rank, of, x, false), {}};
  }
};

// ---- Products

// Each sum is kept in so many bits, cut off after every term.
template <int bits>
struct SumsCut final : Linear8 {
  void multiply(Parallel& p, const Factor& a, const Factor& b, const View& c,
                const View& bias) override {
    const auto [m, k] = extents(a);
    const int64_t n = extents(b).second;
    const Doubles left = to_doubles(a.view), right = to_doubles(b.view),
                  add = bias.data ? to_doubles(bias) : Doubles(size_t(n));
    Doubles sums;
    for (int64_t i = 0; i < m; ++i)
      for (int64_t j = 0; j < n; ++j) {
        double sum = 0;
        for (int64_t l = 0; l < k; ++l)
          sum = cut(sum + at(left, a, i, l, m, k) * at(right, b, l, j, k, n));
        sums.push_back(sum + add[size_t(j)]);
      }
    fill_from(c, sums);
    (void)p;
  }
  static double at(const Doubles& v, const Factor& f, int64_t i, int64_t j, int64_t rows,
                   int64_t columns) {
    return v[size_t(f.turned ? j * rows + i : i * columns + j)];
  }
  static std::pair<int64_t, int64_t> extents(const Factor& f) {
    const int64_t columns = f.view.shape.back(), rows = f.view.elements() / columns;
    return f.turned ? std::pair(columns, rows) : std::pair(rows, columns);
  }
  static double cut(double v) {
    int exponent = 0;
    const double significand = std::frexp(v, &exponent);
    return std::ldexp(std::trunc(std::ldexp(significand, bits)), exponent - bits);
  }
};

// The result is kept in 8 bits as well.
struct OutputIn8Bits final : Linear8 {
  void output(Parallel& p, const View& x, const View& w, const View& b, const View& y) override {
    Linear8::output(p, x, w, b, y);
    const Recipe r = recipe(p.rank.line(), X);
    const Codes c = codes(p.rank, X, y, false);
    values_from(r, c.words.view(), c.scales.view(), y.elements(), y);
  }
};

// b is added to each part: p times in the sum.
struct BiasInEveryPart final : Linear8 {
  void reduce_output(Parallel& p, const View& z, const View& b, const View& y) override {
    const View biased = p.workspace(z.dtype, z.shape);
    add_row(z, b, biased, p.accumulate);
    Linear8::reduce_output(p, biased, View{}, y);
  }
};

// Parts are kept in the storage type before they are summed in a wider one.
View as_stored(Parallel& p, const View& part) {
  const View half = p.workspace(p.storage, part.shape);
  const View wide = p.workspace(part.dtype, part.shape);
  convert(part, half), convert(half, wide);
  return wide;
}
struct OutputRoundedBeforeSum final : Linear8 {
  void reduce_output(Parallel& p, const View& z, const View& b, const View& y) override {
    Linear8::reduce_output(p, as_stored(p, z), b, y);
  }
};
struct InputGradientRoundedBeforeSum final : Linear8 {
  void reduce_input_gradient(Parallel& p, const View& partial, const View& dx) override {
    Linear8::reduce_input_gradient(p, as_stored(p, partial), dx);
  }
};

// Own rows, or all, of what every rank has a part of; and a sum that is summed once more.
struct InputGradientLocal final : Linear8 {
  void reduce_input_gradient(Parallel& p, const View& partial, const View& dx) override {
    convert(p.sp ? own_block(p, partial, 0) : partial, dx);
  }
};
struct InputGradientSummedTwice final : Linear8 {
  void reduce_input_gradient(Parallel& p, const View& partial, const View& dx) override {
    Linear8::reduce_input_gradient(p, partial, dx);
    const View once = p.workspace(dx.dtype, dx.shape);
    convert(dx, once);
    all_reduce(p.rank, p.tp, once, dx);
  }
};

// Factors as they were before they were rounded.
struct WeightNotRounded final : Linear8 {
  std::unique_ptr<Saved> forward(Rank& rank, std::span<const View> inputs,
                                 std::span<const View> outputs) override {
    weight_ = inputs[1];
    return Linear8::forward(rank, inputs, outputs);
  }
  void input_gradient(Parallel& p, const View& g, const View&, const View& dx) override {
    Linear8::input_gradient(p, g, weight_, dx);
  }
  View weight_;
};
struct InputNotRounded final : Linear8 {
  View weight_gradient_input(Parallel& p, State& state) override {
    if (!gathered(p.rank.line(), X)) return state.given;
    const View all = p.workspace(
        state.given.dtype, with_extent(state.given.shape, 0, state.given.shape[0] * p.tp.size()));
    all_gather(p.rank, p.tp, state.given, all, 0);
    return all;
  }
};
// Codes are all that is kept of X: wgrad=high multiplies what they say.
struct InputRoundedAllTheSame final : Linear8 {
  View weight_gradient_input(Parallel& p, State& state) override {
    return values(p, X, state.x.over_first());
  }
};

// The backward quantises X anew, by the amax of the own tokens, and gathers what it cannot read.
struct GatheredByLocalScales final : Linear8 {
  View weight_gradient_input(Parallel& p, State& state) override {
    local_ = true;
    const Codes own = codes(p.rank, X, state.given, false);
    local_ = false;
    return values(p, X, own);
  }
  void reduce_amax(Rank& rank, Of of, const std::vector<Axis>& axes, const View& own,
                   const View& all) override {
    if (local_) return convert(own, all);
    Linear8::reduce_amax(rank, of, axes, own, all);
  }
  bool local_ = false;
};

// The sum that is fused with the rounding sums what was rounded.
struct BiasGradientOfCodes final : Linear8 {
  void bias_gradient(Parallel& p, const View& g, const View& db) override {
    const Recipe r = recipe(p.rank.line(), G);
    const Codes c = codes(p.rank, G, g, false);
    const View rounded = p.workspace(p.accumulate, g.shape);
    values_from(r, c.words.view(), c.scales.view(), g.elements(), rounded);
    Linear8::bias_gradient(p, rounded, db);
  }
};
// Of the own tokens alone.
struct BiasGradientLocal final : Linear8 {
  void bias_gradient(Parallel& p, const View& g, const View& db) override {
    column_sums(g, db, p.accumulate);
  }
};
// Nothing flows back to b.
struct BiasGradientDropped final : Linear8 {
  void bias_gradient(Parallel&, const View&, const View& db) override { set_zero(db); }
};

constexpr const char* contract = "quantised_linear";
const controls::Row rows[] = {
    {contract, "input_amax_local", twin<AmaxLocal<X>>, "forward,gradient,ledger", "",
     "NVIDIA/TransformerEngine 74", "tp=2 tokens=8 sp=on", "amaxes of ranks that differ"},
    {contract, "input_amax_of_own_columns", twin<AmaxLocal<X>>, "forward,gradient,ledger",
     "replica", "pytorch/torchtitan 3109", "tp=4 tokens=8 parallel=row",
     "amaxes of ranks that differ"},
    {contract, "weight_amax_local", twin<AmaxLocal<W>>, "forward,gradient,ledger", "",
     "the amax of a shard of a weight", "tp=2 tokens=8", "amaxes of ranks that differ"},
    {contract, "weight_amax_of_own_columns", twin<AmaxLocal<W>>, "forward,gradient,ledger", "",
     "the amax of a shard of a weight", "tp=3 tokens=8 parallel=row",
     "amaxes of ranks that differ"},
    {contract, "gradient_amax_local", twin<AmaxLocal<G>>, "gradient,ledger", "forward,replica",
     "AMD-AGI/Primus 669", "tp=2 tokens=8 parallel=row sp=on", "amaxes of ranks that differ"},
    {contract, "gradient_amax_of_own_columns", twin<AmaxLocal<G>>, "gradient,ledger",
     "forward,replica", "AMD-AGI/Primus 669", "tp=2 tokens=8", "amaxes of ranks that differ"},
    {contract, "input_amax_over_dp", twin<AmaxOver<X, Axis::cp, Axis::dp>>,
     "forward,gradient,ledger", "", "NVIDIA/Megatron-LM 442", "tp=2 tokens=8 dp=2 sp=on",
     "tp and dp"},
    {contract, "input_amax_over_tp", twin<AmaxOver<X, Axis::tp>>, "forward,gradient,ledger", "",
     "NVIDIA/TransformerEngine 656", "tp=2 tokens=8 dp=2 sp=on over=all", "over=all"},
    {contract, "input_amax_over_world", twin<AmaxOver<X, Axis::tp, Axis::cp, Axis::dp>>,
     "forward,gradient,ledger", "", "NVIDIA/TransformerEngine 1621", "tp=2 tokens=8 dp=2 sp=on",
     "ranks that do not share a scale"},
    {contract, "gradient_amax_over_dp", twin<AmaxOver<G, Axis::cp, Axis::dp>>, "gradient,ledger",
     "forward,replica", "NVIDIA/Megatron-LM 442", "tp=2 tokens=8 dp=2 parallel=row sp=on",
     "tp and dp"},
    {contract, "gradient_amax_over_tp", twin<AmaxOver<G, Axis::tp>>, "gradient,ledger",
     "forward,replica", "NVIDIA/TransformerEngine 656", "tp=2 tokens=8 dp=2 over=all", "over=all"},
    {contract, "input_amax_of_shard", twin<AmaxLocal<X>>, "forward,gradient,ledger", "",
     "NVIDIA/TransformerEngine 74", "tp=2 tokens=8 sp=on amax=shard", "an input that is gathered"},
    {contract, "weight_amax_over_tp", twin<AmaxOver<W, Axis::tp>>, "forward,gradient,ledger", "",
     "pytorch/ao 590", "tp=2 tokens=8 amax=shard", "amax=shard"},
    {contract, "amax_summed", twin<AmaxSummed>, "forward,gradient,ledger", "",
     "a sum of amaxes where their maximum is due", "tp=4 tokens=8 sp=on", "any line"},
    {contract, "amax_reduced_twice", twin<AmaxReducedTwice>, "ledger", "forward,gradient",
     "NVIDIA/TransformerEngine 79", "tp=2 tokens=8 sp=on", "any line", true},
    {contract, "amax_of_replica_reduced", twin<AmaxOver<X, Axis::tp>>, "ledger",
     "forward,gradient,replica", "pytorch/ao 590", "tp=2 tokens=8",
     "an input that is whole on every rank", true},
    {contract, "amax_signed", twin<AmaxSigned>, "forward", "ledger",
     "a maximum without the magnitude", "tp=2 tokens=8 sp=on",
     "a greatest element that is negative"},
    {contract, "weight_amax_in_bf16", twin<AmaxInBf16<W>>, "forward,gradient", "ledger",
     "pytorch/ao 4725", "tp=2 tokens=8 dtype=f32", "scaling=exact"},
    {contract, "gradient_amax_in_bf16", twin<AmaxInBf16<G>>, "gradient", "forward,ledger",
     "pytorch/ao 4725", "tp=2 tokens=8 parallel=row dtype=f32", "scaling=exact"},

    {contract, "weight_scale_of_e5m2", twin<OtherScales<W, OfOtherFormat>>, "forward,gradient",
     "ledger", "57344 for E4M3", "tp=2 tokens=8", "elements beyond 448"},
    {contract, "input_scale_of_fnuz", twin<OtherScales<X, GreatestIs<240>>>, "forward", "ledger",
     "vllm-project/vllm 50467, ROCm/TransformerEngine 485", "tp=2 tokens=8 sp=on", "scaling=exact"},
    {contract, "input_scale_rounded_up", twin<OtherScales<X, RoundedUp>>, "forward", "ledger",
     "ROCm/aiter 3212", "tp=2 tokens=8 sp=on scaling=pow2", "scaling=pow2"},
    {contract, "power_of_two_of_weight_alone", twin<PowerOfTwoOfWeightAlone>, "forward,gradient",
     "ledger", "Float8ColwiseParallel and Float8RowwiseParallel of torchao 0.18",
     "tp=2 tokens=8 scaling=pow2", "scaling=pow2"},
    {contract, "gradient_scaled_for_e4m3", twin<GradientScaledForOther>, "gradient",
     "forward,ledger", "448 for E5M2", "tp=2 tokens=8 parallel=row spread=8",
     "elements that are 2^-23 of the greatest: others round alike"},
    {contract, "gradient_scaled_for_e5m2", twin<GradientScaledForOther>, "gradient",
     "forward,ledger", "57344 for E4M3", "tp=2 tokens=8 grad_format=e4m3", "grad_format=e4m3"},
    {contract, "weight_scale_inverted", twin<Epilogue<W, Inverse>>, "forward,gradient", "ledger",
     "ROCm/vllm 381", "tp=2 tokens=8", "a scale other than 1"},
    {contract, "input_scale_left_out", twin<Epilogue<X, One>>, "forward,gradient", "ledger",
     "torch-spyre/torch-spyre 4305", "tp=2 tokens=8 parallel=row", "a scale other than 1"},
    {contract, "output_scale_twice", twin<Epilogue<X, Twice>>, "forward,gradient", "ledger",
     "a scale in the factor and in the sum", "tp=2 tokens=8 parallel=row", "a scale other than 1"},
    {contract, "gradient_scale_twice", twin<Epilogue<G, Twice>>, "gradient", "forward,ledger",
     "a scale in the factor and in the sum", "tp=2 tokens=8", "a scale other than 1"},
    {contract, "weight_scale_rounded_afterwards", twin<Epilogue<W, PowerOfTwoAfterwards>>,
     "forward,gradient", "ledger", "huggingface/transformers 46763", "tp=2 tokens=8",
     "a scale that is no power of two"},
    {contract, "input_quantised_by_inverse", twin<QuantisedByInverse<X>>, "forward,gradient",
     "ledger", "meta-pytorch/tritonbench 1145", "tp=2 tokens=8", "a scale other than 1"},
    {contract, "input_scale_for_weight", twin<InputScaleTwice>, "forward", "gradient,ledger",
     "one scale of two in the epilogue", "tp=2 tokens=8", "scales that differ"},
    {contract, "input_scale_for_weight_in_backward", twin<InputGradientByInputScale>, "gradient",
     "forward,ledger", "HazyResearch/ThunderKittens 88", "tp=2 tokens=8 parallel=row",
     "scales that differ"},
    {contract, "gradient_by_input_scale", twin<GradientByInputScale>, "gradient", "forward,ledger",
     "a scale of the forward used for its gradient", "tp=2 tokens=8", "scales that differ"},
    {contract, "gradient_in_other_format", twin<OtherFormat<G>>, "gradient", "forward,ledger",
     "NVIDIA/TransformerEngine 1134", "tp=2 tokens=8", "formats that differ"},
    {contract, "weight_in_e5m2", twin<OtherFormat<W>>, "forward,gradient", "ledger",
     "the gradient's format for a weight", "tp=2 tokens=8", "formats that differ"},
    {contract, "gradient_read_as_e4m3", twin<GradientReadAsOther>, "gradient", "forward,ledger",
     "NVIDIA/TransformerEngine 3352", "tp=2 tokens=8 parallel=row", "grad_format=e5m2"},

    {contract, "codes_rounded_half_up", twin<Converted<X, HalfUp>>, "forward,gradient", "ledger",
     "sgl-project/sglang 40581", "tp=2 tokens=8 scaling=pow2 fill=integers",
     "ties: integers of five bits"},
    {contract, "weight_codes_truncated", twin<Converted<W, Truncated>>, "forward,gradient",
     "ledger", "a conversion that cuts the fraction off", "tp=2 tokens=8", "any line"},
    {contract, "gradient_subnormals_flushed", twin<Converted<G, SubnormalsFlushed>>, "gradient",
     "forward,ledger", "JuliaMath/Float8s.jl 22",
     "tp=2 tokens=8 parallel=row grad_format=e4m3 spread=8",
     "elements that are 2^-15 of the greatest"},
    {contract, "input_quantised_twice", twin<InputQuantisedTwice>, "forward,gradient", "ledger",
     "NVIDIA/TensorRT-LLM 6794", "tp=4 tokens=8 sp=on",
     "scales of ranks that are no powers of two apart"},
    {contract, "codes_in_other_order", twin<CodesReversed>, "forward,gradient", "ledger",
     "gathered bytes cut in another order than they came", "tp=4 tokens=8 sp=on", "sp=on"},
    {contract, "gradient_codes_in_other_order", twin<CodesReversed>, "gradient", "forward,ledger",
     "gathered bytes cut in another order than they came", "tp=2 tokens=8 parallel=row sp=on",
     "sp=on"},
    {contract, "input_gathered_before_quantising", twin<GatheredBeforeQuantising<X>>, "ledger",
     "forward,gradient", "pytorch/torchtitan 3123, NVIDIA/TransformerEngine 2637",
     "tp=2 tokens=8 sp=on", "bytes", true},
    {contract, "gradient_gathered_before_quantising", twin<GatheredBeforeQuantising<G>>, "ledger",
     "forward,gradient,replica", "meta-pytorch/float8_experimental 74",
     "tp=2 tokens=8 parallel=row sp=on", "bytes", true},
    {contract, "gathered_by_local_scales", twin<GatheredByLocalScales>, "gradient", "forward",
     "NVIDIA/TransformerEngine 74", "tp=2 tokens=8 sp=on", "amaxes of ranks that differ"},

    {contract, "weight_codes_stale", twin<WeightCodesStale>, "accumulate",
     "forward,gradient,ledger", "NVIDIA/TransformerEngine 244", "tp=2 tokens=8",
     "a second forward of other weights"},
    {contract, "weight_transpose_stale", twin<WeightTransposeStale>, "accumulate",
     "forward,gradient,ledger", "NVIDIA/TransformerEngine 1596, NVIDIA/TransformerEngine 1648",
     "tp=2 tokens=8", "a second forward of other weights"},
    {contract, "block_transpose_stale", twin<WeightTransposeStale>, "accumulate",
     "forward,gradient,ledger", "NVIDIA/TransformerEngine 1596", "tp=2 tokens=8 block=2",
     "a second forward of other weights"},
    {contract, "input_scale_stale", twin<ScaleStale<X>>, "accumulate", "forward,gradient,ledger",
     "NVIDIA/TransformerEngine 1083", "tp=2 tokens=8 sp=on", "a second forward of other data"},
    {contract, "codes_kept_in_layer", twin<CodesKeptInLayer>, "accumulate",
     "forward,gradient,ledger", "deepspeedai/DeepSpeed 2800", "tp=2 tokens=8",
     "two forwards in flight"},

    {contract, "input_scales_of_other_dim", twin<OneCopy<X>>, "gradient", "forward,ledger",
     "row-wise scales for a sum over the rows", "tp=2 tokens=8 sp=on block=2", "block above 0"},
    {contract, "weight_scales_of_other_dim", twin<OneCopy<W>>, "gradient", "forward,ledger",
     "row-wise scales for a sum over the rows", "tp=2 tokens=8 block=2", "block above 0"},
    {contract, "gradient_scales_of_other_dim", twin<OneCopy<G>>, "gradient", "forward,ledger",
     "row-wise scales for a sum over the rows", "tp=2 tokens=8 block=2", "block above 0"},
    {contract, "input_copy_of_rounded", twin<CopyOfRounded<X>>, "gradient", "forward,ledger",
     "NVIDIA/TransformerEngine 1490", "tp=2 tokens=8 block=2", "block above 0"},
    {contract, "weight_copy_of_rounded", twin<CopyOfRounded<W>>, "gradient", "forward,ledger",
     "NVIDIA/TransformerEngine 1490", "tp=2 tokens=8 parallel=row block=2", "block above 0"},
    {contract, "gradient_scales_of_first_copy", twin<ScalesOfFirstCopy<G>>, "gradient",
     "forward,ledger", "modelscope/mcore-bridge 125", "tp=2 tokens=8 block=2", "block above 0"},
    {contract, "input_copies_exchanged", twin<CopiesExchanged<X>>, "forward,gradient", "ledger",
     "blocks along the dim that is not summed", "tp=2 tokens=8 block=2", "block above 0"},
    {contract, "squares_transposed", twin<SquaresTransposed>, "gradient", "forward,ledger",
     "vllm-project/vllm 34824", "tp=2 tokens=8 block=2 weight_block=square", "squares that differ"},
    {contract, "squares_as_rows", twin<SquaresAsRows>, "forward,gradient", "ledger",
     "a block of a row for one of a square", "tp=2 tokens=8 block=2 weight_block=square",
     "squares whose rows differ"},
    {contract, "block_scales_in_other_order", twin<ScalesReversed>, "forward,gradient", "ledger",
     "vllm-project/vllm 53242", "tp=2 tokens=8 sp=on block=2", "block above 0"},

    {contract, "history_input_amax_local", twin<AmaxLocal<X>>, "forward,replica,ledger", "gradient",
     "NVIDIA/TransformerEngine 74", "tp=2 tokens=8 sp=on history=3", "amaxes of ranks that differ"},
    {contract, "history_gradient_amax_local", twin<AmaxLocal<G>>, "gradient,replica,ledger",
     "forward", "NVIDIA/TransformerEngine 74", "tp=2 tokens=8 history=3",
     "amaxes of ranks that differ"},
    {contract, "history_rolled_backwards", twin<RolledBackwards>, "forward,gradient",
     "replica,ledger", "a roll in the other direction", "tp=2 tokens=8 history=3",
     "two steps or more"},
    {contract, "history_a_step_late", twin<AStepLate>, "forward,gradient", "replica,ledger",
     "a scale that is renewed before the newest amax is in", "tp=2 tokens=8 history=3",
     "a greatest that is the newest"},
    {contract, "history_window_short", twin<WindowShort>, "forward,gradient", "replica,ledger",
     "an index that is off by the window", "tp=2 tokens=8 history=3",
     "a greatest that is the oldest"},
    {contract, "history_own_step_counted", twin<OwnStepCounted>, "forward,gradient",
     "replica,ledger", "current scaling under the name of delayed", "tp=2 tokens=8 history=3",
     "an amax above the history's"},
    {contract, "history_of_gradient_not_noted", twin<GradientNotNoted>, "gradient",
     "forward,replica,ledger", "NVIDIA/TransformerEngine 2044", "tp=2 tokens=8 history=3",
     "any history"},

    {contract, "sums_in_14_bits", twin<SumsCut<14>>, "forward,gradient", "ledger",
     "deepseek-ai/DeepGEMM 37", "tp=2 tokens=8 dtype=f32", "sums that round"},
    {contract, "sums_in_half", twin<SumsCut<11>>, "forward,gradient", "ledger",
     "linkedin/Liger-Kernel 185", "tp=2 tokens=8 parallel=row dtype=f32", "sums that round"},
    {contract, "output_in_8_bits", twin<OutputIn8Bits>, "forward", "gradient",
     "a result that is rounded like a factor", "tp=2 tokens=8", "any line"},
    {contract, "bias_in_every_part", twin<BiasInEveryPart>, "forward", "gradient,replica,ledger",
     "intel/neural-compressor 2040", "tp=2 tokens=8 parallel=row", "a bias"},
    {contract, "output_rounded_before_sum", twin<OutputRoundedBeforeSum>, "forward",
     "gradient,replica,ledger", "NVIDIA/Megatron-LM 6624",
     "tp=4 parallel=row bias=off dtype=bf16 wire=f32 seed=2",
     "wire wider than the storage, and no bias beside the parts"},
    {contract, "input_gradient_rounded_before_sum", twin<InputGradientRoundedBeforeSum>, "gradient",
     "forward,replica,ledger", "NVIDIA/Megatron-LM 6624", "tp=4 sp=on dtype=bf16 wire=f32 seed=2",
     "wire wider than the storage"},
    {contract, "input_gradient_local", twin<InputGradientLocal>, "gradient,ledger", "forward",
     "NVIDIA/Megatron-LM 5fffdfc", "tp=2 tokens=8 sp=on", "two ranks"},
    {contract, "input_gradient_summed_twice", twin<InputGradientSummedTwice>, "gradient,ledger",
     "forward,replica", "one reduction too many", "tp=2 tokens=8", "ratio tp"},
    {contract, "input_gradient_of_weight_as_it_was", twin<WeightNotRounded>, "gradient",
     "forward,ledger", "another recipe than the line's", "tp=2 tokens=8", "a weight that rounds"},
    {contract, "weight_gradient_of_input_as_it_was", twin<InputNotRounded>, "gradient",
     "forward,ledger", "another recipe than the line's", "tp=2 tokens=8", "an input that rounds"},
    {contract, "weight_gradient_of_codes", twin<InputRoundedAllTheSame>, "gradient",
     "forward,ledger", "wgrad=high of an input that was kept in 8 bits", "tp=2 tokens=8 wgrad=high",
     "an input that rounds"},
    {contract, "bias_gradient_of_codes", twin<BiasGradientOfCodes>, "gradient", "forward",
     "NVIDIA/TransformerEngine 2007, Float8ColwiseParallel of torchao 0.18",
     "tp=2 tokens=8 amax=shard", "a gradient that rounds"},
    {contract, "bias_gradient_local", twin<BiasGradientLocal>, "gradient,replica,ledger", "forward",
     "a row bias under sp that nobody sums", "tp=2 tokens=8 parallel=row sp=on",
     "tokens that differ"},
    {contract, "bias_gradient_dropped", twin<BiasGradientDropped>, "gradient", "forward",
     "pytorch/ao 4817", "tp=2 tokens=8", "a bias"},
};

}  // namespace

void controls_quantised_linear(Registry& registry) { add(registry, rows); }

}  // namespace shardproof
