// Broken twins of a tensor that is gathered in 8 bits. The comment above a twin names the mistake.
#include <algorithm>
#include <cmath>
#include <utility>

#include "primitives/controls/eight_bits.hpp"
#include "primitives/controls/table.hpp"
#include "primitives/quantised_gather.hpp"

namespace shardproof {
namespace {

using namespace controls;
using namespace primitives;

// ---- The amax

// Each rank scales its shard by its own amax, and by its own scale what it gathers.
struct AmaxLocal final : QuantisedGather {
  void reduce_amax(Rank&, Communicator&, const View& own, const View& all) override {
    convert(own, all);
  }
};

template <Axis... axes>
struct AmaxOver final : QuantisedGather {
  std::vector<Axis> reduced_over(const Case& line) const override {
    std::vector<Axis> over;
    for (Axis axis : {axes...})
      if (line.ranks(axis) > 1) over.push_back(axis);
    return over;
  }
};
// The group of the data-parallel ranks, which do not gather from each other.
using AmaxOverDp = AmaxOver<Axis::dp, Axis::cp>;
using AmaxOverTp = AmaxOver<Axis::tp>;
// A group that was not given is the world.
using AmaxOverWorld = AmaxOver<Axis::tp, Axis::cp, Axis::dp>;

// The sum of the ranks' amaxes: all agree, and use a part of the range.
struct AmaxSummed final : QuantisedGather {
  void reduce_amax(Rank& rank, Communicator& group, const View& own, const View& all) override {
    all_reduce(rank, group, own, all);
  }
};

// The smallest of the ranks' amaxes.
struct AmaxOfSmallest final : QuantisedGather {
  void reduce_amax(Rank& rank, Communicator& group, const View& own, const View& all) override {
    const View negative = rank.workspace(own.dtype, own.shape);
    scale(own, negative, -1);
    all_reduce(rank, group, negative, all, Reduce::max);
    scale(all, all, -1);
  }
};

// The greatest value in place of the greatest magnitude.
struct AmaxSigned final : QuantisedGather {
  void own_amax(const Recipe& r, const View& x, const View& amax) override {
    const Doubles v = to_doubles(x);
    const auto group = r.group(x.elements());
    Doubles most;
    for (auto at = v.begin(); at != v.end(); at += group)
      most.push_back(*std::max_element(at, at + group));
    fill_from(amax, most);
  }
};

// The amax is rounded to bf16 on its way, up where that is nearer.
struct AmaxInBf16 final : QuantisedGather {
  void own_amax(const Recipe& r, const View& x, const View& amax) override {
    QuantisedGather::own_amax(r, x, amax);
    Doubles v = to_doubles(amax);
    for (double& a : v) a = round_to(a, DType::bf16);
    fill_from(amax, v);
  }
};

// The shard is quantised by its own scale before the common one is known, and once more after.
struct QuantisedTwice final : QuantisedGather {
  void quantise(Rank& rank, const Recipe& r, const View& x, const View& scales,
                const View& words) override {
    const int64_t n = x.elements();
    const View own = rank.workspace(r.type, {r.scales(n)}),
               first = rank.workspace(r.type, own.shape), once = rank.workspace(r.type, {n});
    own_amax(r, x, own);
    scales_of(r, own, first);
    QuantisedGather::quantise(rank, r, x, first, words);
    dequantise(rank, r, words, first, n, once);
    QuantisedGather::quantise(rank, r, once, scales, words);
  }
};

// ---- The scale

// Scales that are computed from the healthy ones.
template <class Change>
struct OtherScales : QuantisedGather {
  void scales_of(const Recipe& r, const View& amax, const View& scales) override {
    QuantisedGather::scales_of(r, amax, scales);
    rescale<Change>(r, amax, scales);
  }
};
// Where other scales are used than those that are handed on.
template <class Change>
struct Dequantised : QuantisedGather {
  void dequantise(Rank& rank, const Recipe& r, const View& words, const View& scales, int64_t own,
                  const View& y) override {
    QuantisedGather::dequantise(rank, r, words, changed<Change>(rank, r, scales), own, y);
  }
};

// The scales of a row lie in the order of columns.
struct ScalesTransposed final : QuantisedGather {
  void dequantise(Rank& rank, const Recipe& r, const View& words, const View& scales, int64_t own,
                  const View& y) override {
    const Doubles given = to_doubles(scales);
    const size_t columns = size_t(rank.line().at("hidden") / r.block),
                 rows = given.size() / columns;
    Doubles s;
    for (size_t i = 0; i < given.size(); ++i) s.push_back(given[i % rows * columns + i / rows]);
    const View other = rank.workspace(scales.dtype, scales.shape);
    fill_from(other, s);
    QuantisedGather::dequantise(rank, r, words, other, own, y);
  }
};

// The scale is multiplied with where the quotient is due, on the way in.
struct QuantisedByInverse final : QuantisedGather {
  void quantise(Rank& rank, const Recipe& r, const View& x, const View& scales,
                const View& words) override {
    QuantisedGather::quantise(rank, r, x, changed<Inverse>(rank, r, scales), words);
  }
};

// 1/s lies in a buffer of the object and is that of the forward before.
struct ScaleStale final : QuantisedGather {
  void dequantise(Rank& rank, const Recipe& r, const View& words, const View& scales, int64_t own,
                  const View& y) override {
    const Doubles now = to_doubles(scales);
    if (last_.size() != now.size()) last_ = now;
    const View before = rank.workspace(scales.dtype, scales.shape);
    fill_from(before, std::exchange(last_, now));
    QuantisedGather::dequantise(rank, r, words, before, own, y);
  }
  Doubles last_;
};

// ---- Codes

template <class Rule>
struct Converted : QuantisedGather {
  void quantise(Rank&, const Recipe& r, const View& x, const View& scales,
                const View& words) override {
    converted<Rule>(r, x, scales, words);
  }
};
struct ScalesReversed final : QuantisedGather {
  void gather_scales(Rank& rank, const View& own, const View& all) override {
    gather_reversed(rank, own, all);
  }
};
struct CodesReversed final : QuantisedGather {
  void gather_codes(Rank& rank, const View& own, const View& all) override {
    gather_reversed(rank, own, all);
  }
};

// Each code travels in a word of its own: right values, four times the bytes.
struct GatheredUnpacked final : QuantisedGather {
  void gather_codes(Rank& rank, const View& own, const View& all) override {
    Communicator& tp = rank.along(Axis::tp);
    const View codes = rank.workspace(DType::i32, {4 * own.elements()}),
               arrived = rank.workspace(DType::i32, {4 * all.elements()});
    Doubles each, packed;
    for (double w : to_doubles(own))
      for (int k = 0; k < 4; ++k) each.push_back(uint32_t(int32_t(w)) >> (8 * k) & 0xFF);
    fill_from(codes, each);
    all_gather(rank, tp, codes, arrived, 0);
    const Doubles got = to_doubles(arrived);
    for (size_t i = 0; i < got.size(); i += 4) {
      uint32_t word = 0;
      for (size_t k = 0; k < 4; ++k) word |= uint32_t(got[i + k]) << (8 * k);
      packed.push_back(double(int32_t(word)));
    }
    fill_from(all, packed);
  }
};

// ---- Delayed scaling

template <int place>  // -1: the oldest
struct OneOfHistory final : QuantisedGather {
  View amax_of_history(Rank& rank, const Recipe& r, const View& history) override {
    const int64_t at = place < 0 ? history.elements() - 1 : place;
    return QuantisedGather::amax_of_history(rank, r, history.narrow(0, at, 1));
  }
};
using NewestOfHistory = OneOfHistory<0>;
using OldestOfHistory = OneOfHistory<-1>;

// The window is rolled first: this step's amax counts, and the oldest no longer.
struct RolledFirst final : QuantisedGather {
  void roll(const View& history, const View& amax, const View& next) override {
    QuantisedGather::roll(history, amax, next);
    next_ = next;
  }
  View amax_of_history(Rank& rank, const Recipe& r, const View&) override {
    return QuantisedGather::amax_of_history(rank, r, next_);
  }
  View next_;
};
struct RolledBackwards final : QuantisedGather {
  void roll(const View& history, const View& amax, const View& next) override {
    const int64_t kept = history.elements() - 1;
    convert(history.narrow(0, 1, kept), next.narrow(0, 0, kept));
    convert(amax, next.narrow(0, kept, 1));
  }
};
// The newest is written over, the others stay where they are.
struct NotRolled final : QuantisedGather {
  void roll(const View& history, const View& amax, const View& next) override {
    convert(history, next);
    convert(amax, next.narrow(0, 0, 1));
  }
};
// A pointer to the old window: the amax of the step is lost.
struct HistoryNotUpdated final : QuantisedGather {
  void roll(const View& history, const View&, const View& next) override { convert(history, next); }
};

// ---- The gradient

// Where the forward saturated nothing flows back.
struct MaskedWhereSaturated final : QuantisedGather {
  void quantise(Rank& rank, const Recipe& r, const View& x, const View& scales,
                const View& words) override {
    QuantisedGather::quantise(rank, r, x, scales, words);
    const Doubles v = to_doubles(x);
    const double s = to_doubles(scales)[0];
    passed_.clear();
    for (double each : v) passed_.push_back(std::abs(each) * s <= r.format.number(r.format.last));
  }
  void own_gradient(Rank& rank, const View& g, const View& dx) override {
    QuantisedGather::own_gradient(rank, g, dx);
    Doubles d = to_doubles(dx);
    for (size_t i = 0; i < d.size(); ++i) d[i] *= passed_[i];
    fill_from(dx, d);
  }
  Doubles passed_;
};

// The scale of the forward is kept, and used on the way back.
struct KeepsScale : QuantisedGather {
  void quantise(Rank& rank, const Recipe& r, const View& x, const View& scales,
                const View& words) override {
    QuantisedGather::quantise(rank, r, x, scales, words);
    scale_ = to_doubles(scales)[0];
  }
  double scale_ = 1;
};
// The product with s is differentiated, the quotient is not.
struct GradientTimesScale final : KeepsScale {
  void own_gradient(Rank& rank, const View& g, const View& dx) override {
    QuantisedGather::own_gradient(rank, g, dx);
    scale(dx, dx, scale_);
  }
};
struct GradientByForwardScale final : KeepsScale {
  void quantise_gradient(Rank& rank, const Recipe& r, const View& g, const View& dx) override {
    const View scales = rank.workspace(r.type, {1}),
               words = rank.workspace(DType::i32, {words_of(g.elements())});
    fill_from(scales, Doubles{scale_});
    QuantisedGather::quantise(rank, r, g, scales, words);
    dequantise(rank, r, words, scales, g.elements(), dx);
  }
};

// Acts while a gradient is quantised.
struct InBackward : QuantisedGather {
  void quantise_gradient(Rank& rank, const Recipe& r, const View& g, const View& dx) override {
    backward_ = true;
    QuantisedGather::quantise_gradient(rank, r, g, dx);
    backward_ = false;
  }
  bool backward_ = false;
};

// The gradient's amax stays that of the rank.
struct GradientAmaxLocal final : InBackward {
  void reduce_amax(Rank& rank, Communicator& group, const View& own, const View& all) override {
    if (backward_) return convert(own, all);
    QuantisedGather::reduce_amax(rank, group, own, all);
  }
};

// The gradient is rounded to another format than its own; scaled for it all the same; or its codes
// are read as those of the other.
struct GradientInForwardFormat final : QuantisedGather {
  void quantise_gradient(Rank& rank, const Recipe& r, const View& g, const View& dx) override {
    Recipe other = r;
    other.format = other_than(r.format);
    QuantisedGather::quantise_gradient(rank, other, g, dx);
  }
};
struct GradientScaledForOther final : InBackward {
  void scales_of(const Recipe& r, const View& amax, const View& scales) override {
    Recipe other = r;
    if (backward_) other.format = other_than(r.format);
    QuantisedGather::scales_of(other, amax, scales);
  }
};
struct ReadAsOther final : QuantisedGather {
  void dequantise(Rank& rank, const Recipe& r, const View& words, const View& scales, int64_t own,
                  const View& y) override {
    Recipe other = r;
    if (r.format.fraction_bits == 2) other.format = e4m3;
    QuantisedGather::dequantise(rank, other, words, scales, own, y);
  }
};

// The own rows of a gradient of which every rank has a part; and the sum of one that is whole.
struct GradientLeftPartial final : QuantisedGather {
  void own_gradient(Rank& rank, const View& g, const View& dx) override {
    convert(g.narrow(0, rank.along(Axis::tp).rank() * dx.shape[0], dx.shape[0]), dx);
  }
};
struct WholeGradientSummed final : QuantisedGather {
  void own_gradient(Rank& rank, const View& g, const View& dx) override {
    reduce_scatter(rank, rank.along(Axis::tp), g, dx, 0);
  }
};

constexpr const char* contract = "quantised_gather";
const Row rows[] = {
    {contract, "amax_local", twin<AmaxLocal>, "forward,replica,ledger", "gradient",
     "NVIDIA/TransformerEngine 74", "tp=2", "amaxes of ranks that differ"},
    {contract, "amax_over_data_parallel", twin<AmaxOverDp>, "forward,replica,ledger", "gradient",
     "NVIDIA/Megatron-LM 442", "tp=2 dp=2", "tp and dp"},
    {contract, "amax_over_tensor_parallel", twin<AmaxOverTp>, "forward,replica,ledger", "gradient",
     "NVIDIA/TransformerEngine 656", "tp=2 dp=2", "dp >= 2"},
    {contract, "amax_over_world", twin<AmaxOverWorld>, "forward,ledger", "gradient,replica",
     "NVIDIA/TransformerEngine 150", "tp=2 dp=2 over=tp", "ranks that do not share a scale"},
    {contract, "amax_summed", twin<AmaxSummed>, "forward,ledger", "gradient,replica",
     "a sum of amaxes where their maximum is due", "tp=4", "any line"},
    {contract, "amax_of_smallest", twin<AmaxOfSmallest>, "forward", "gradient,replica,ledger",
     "Azure/MS-AMP 111", "tp=4", "amaxes of ranks that differ"},
    {contract, "amax_signed", twin<AmaxSigned>, "forward", "gradient,replica,ledger",
     "a maximum without the magnitude", "tp=2 seed=2", "a greatest element that is negative"},
    {contract, "amax_in_bf16", twin<AmaxInBf16>, "forward", "gradient,replica,ledger",
     "pytorch/ao 4725", "tp=2 dtype=f32", "scaling=exact, or an amax next to a power of two"},
    {contract, "quantised_twice", twin<QuantisedTwice>, "forward", "gradient,replica,ledger",
     "NVIDIA/TensorRT-LLM 6794", "tp=4", "scales of ranks that are no powers of two apart"},

    {contract, "scale_of_e4m3_for_e5m2", twin<OtherScales<OfOtherFormat>>, "forward",
     "gradient,replica,ledger", "448 for E5M2, 57344 for E4M3", "tp=2 format=e5m2",
     "the scale itself: E5M2 at 448 rounds as well but for its smallest numbers"},
    {contract, "scale_of_e5m2_for_e4m3", twin<OtherScales<OfOtherFormat>>, "forward",
     "gradient,replica,ledger", "57344 for E4M3", "tp=2 scaling=pow2", "format=e4m3"},
    {contract, "scale_of_fnuz", twin<OtherScales<GreatestIs<240>>>, "forward",
     "gradient,replica,ledger", "vllm-project/vllm 50467, ROCm/TransformerEngine 485", "tp=2",
     "format=e4m3"},
    {contract, "scale_beyond_infinity", twin<OtherScales<GreatestIs<98304>>>, "forward",
     "gradient,replica,ledger", "kohya-ss/musubi-tuner 192", "tp=2 format=e5m2", "format=e5m2"},
    {contract, "scale_rounded_up", twin<OtherScales<RoundedUp>>, "forward",
     "gradient,replica,ledger", "ROCm/aiter 3212, microsoft/onnxruntime 32122", "tp=2 scaling=pow2",
     "scaling=pow2"},
    {contract, "scale_rounded_to_nearest", twin<OtherScales<RoundedToNearest>>, "forward",
     "gradient,replica,ledger", "vllm-project/vllm 43557", "tp=2 scaling=pow2",
     "a quotient nearer to the power of two above"},
    {contract, "scale_in_bf16", twin<OtherScales<InHalf>>, "forward", "gradient,replica,ledger",
     "a scale in the storage type", "tp=2 dtype=f32", "scaling=exact"},
    {contract, "scale_of_zero_infinite", twin<OtherScales<OfZeroIsInfinite>>, "forward",
     "gradient,ledger", "pytorch/ao 4714, pytorch/ao 4762", "tp=2 block=5 zero_rows=7",
     "a block of zeros"},
    {contract, "scale_of_zero_clamped", twin<OtherScales<OfZeroIsOfSmallest>>, "forward",
     "gradient,replica,ledger", "vllm-project/vllm 58032", "tp=2 history=3 fresh=on",
     "a history of zeros"},
    {contract, "scale_left_out", twin<Dequantised<One>>, "forward", "gradient,replica,ledger",
     "Lightricks/LTX-2 172", "tp=2", "a scale other than 1"},
    {contract, "scale_inverted", twin<Dequantised<Inverse>>, "forward", "gradient,replica,ledger",
     "code times scale where code over scale is due", "tp=2", "a scale other than 1"},
    {contract, "scale_inverted_in", twin<QuantisedByInverse>, "forward", "gradient,replica,ledger",
     "meta-pytorch/tritonbench 1145", "tp=2", "a scale other than 1"},
    {contract, "scale_rounded_afterwards", twin<Dequantised<PowerOfTwoAfterwards>>, "forward",
     "gradient,replica,ledger", "huggingface/transformers 46763", "tp=2",
     "a scale that is no power of two"},
    {contract, "scale_stale", twin<ScaleStale>, "accumulate", "forward,gradient,replica,ledger",
     "NVIDIA/TransformerEngine 1083, NVIDIA/TransformerEngine 2044", "tp=2",
     "a second forward of other data"},
    {contract, "scales_transposed", twin<ScalesTransposed>, "forward", "gradient,replica,ledger",
     "vllm-project/vime 133", "tp=2 block=5", "blocks of a row"},
    {contract, "scales_in_other_order", twin<ScalesReversed>, "forward", "gradient,replica,ledger",
     "vllm-project/vllm 53242", "tp=4 block=5", "block above 0"},

    {contract, "codes_in_other_order", twin<CodesReversed>, "forward", "gradient,replica,ledger",
     "gathered bytes cut in another order than they came", "tp=4", "any line"},
    {contract, "codes_rounded_half_up", twin<Converted<HalfUp>>, "forward",
     "gradient,replica,ledger", "sgl-project/sglang 40581", "tp=2 scaling=pow2 dtype=bf16",
     "ties: few bits and a power of two"},
    {contract, "codes_truncated", twin<Converted<Truncated>>, "forward", "gradient,replica,ledger",
     "a conversion that cuts the fraction off", "tp=2", "any line"},
    {contract, "codes_rounded_twice", twin<Converted<RoundedTwice>>, "forward",
     "gradient,replica,ledger", "openvinotoolkit/openvino 30057", "tp=2 scaling=pow2 ties=on",
     "elements next to a tie"},
    {contract, "codes_subnormals_flushed", twin<Converted<SubnormalsFlushed>>, "forward",
     "gradient,replica,ledger", "JuliaMath/Float8s.jl 22", "tp=2",
     "elements that are 2^-14 of the greatest"},
    {contract, "codes_not_saturated", twin<Converted<NotSaturated>>, "forward", "gradient,ledger",
     "jax-ml/ml_dtypes 260, uxlfoundation/oneDNN 5626", "tp=2 history=4",
     "elements beyond the history"},
    {contract, "codes_wrapped", twin<Converted<Wrapped>>, "forward", "gradient,replica,ledger",
     "the low bits of a code that is too long", "tp=2 history=4", "elements beyond the history"},
    {contract, "codes_saturated_early", twin<Converted<SaturatedEarly>>, "forward",
     "gradient,replica,ledger", "sgl-project/sglang 40581", "tp=2",
     "elements in the last exponent"},
    {contract, "codes_gathered_unpacked", twin<GatheredUnpacked>, "ledger",
     "forward,gradient,replica", "NVIDIA/TransformerEngine 2637", "tp=2", "bytes", true},

    {contract, "history_newest_alone", twin<NewestOfHistory>, "forward", "gradient,replica,ledger",
     "meta-pytorch/float8_experimental 31", "tp=2 history=4", "a greatest that is not the newest"},
    {contract, "history_oldest_alone", twin<OldestOfHistory>, "forward", "gradient,replica,ledger",
     "an index that is off by the window", "tp=2 history=4", "a greatest that is not the oldest"},
    {contract, "history_rolled_first", twin<RolledFirst>, "forward", "gradient,replica,ledger",
     "this step counted among the earlier ones", "tp=2 history=3", "an amax above the history's"},
    {contract, "history_rolled_backwards", twin<RolledBackwards>, "forward",
     "gradient,replica,ledger", "a roll in the other direction", "tp=2 history=3",
     "two steps or more"},
    {contract, "history_not_rolled", twin<NotRolled>, "forward", "gradient,replica,ledger",
     "the newest written over, the others left", "tp=2 history=3", "two steps or more"},
    {contract, "history_not_updated", twin<HistoryNotUpdated>, "forward", "gradient,replica,ledger",
     "NVIDIA/TransformerEngine 2044, pytorch/torchtitan 698", "tp=2 history=3", "any history"},
    {contract, "history_amax_local", twin<AmaxLocal>, "forward,replica,ledger", "gradient",
     "NVIDIA/TransformerEngine 74", "tp=2 history=4", "amaxes of ranks that differ"},

    {contract, "gradient_masked_where_saturated", twin<MaskedWhereSaturated>, "gradient",
     "forward,replica,ledger", "pytorch/ao 4806", "tp=2 history=4 output=shard",
     "elements beyond the history"},
    {contract, "gradient_times_scale", twin<GradientTimesScale>, "gradient",
     "forward,replica,ledger", "the scale's product differentiated alone", "tp=2",
     "a scale other than 1"},
    {contract, "gradient_by_forward_scale", twin<GradientByForwardScale>, "gradient,ledger",
     "forward,replica", "a scale of the forward used for its gradient",
     "tp=2 output=shard grad_format=e5m2", "scales that differ"},
    {contract, "gradient_amax_local", twin<GradientAmaxLocal>, "gradient,ledger", "forward,replica",
     "AMD-AGI/Primus 669", "tp=2 output=shard grad_format=e5m2", "amaxes of ranks that differ"},
    {contract, "gradient_in_forward_format", twin<GradientInForwardFormat>, "gradient",
     "forward,replica,ledger", "NVIDIA/TransformerEngine 1134",
     "tp=2 output=shard grad_format=e5m2", "formats that differ"},
    {contract, "gradient_scaled_for_e4m3", twin<GradientScaledForOther>, "gradient",
     "forward,replica,ledger", "448 for E5M2", "tp=2 output=shard grad_format=e5m2 spread=3",
     "elements that are 2^-23 of the greatest: others round alike"},
    {contract, "gradient_scaled_for_e5m2", twin<GradientScaledForOther>, "gradient",
     "forward,replica,ledger", "57344 for E4M3", "tp=2 output=shard grad_format=e4m3",
     "grad_format=e4m3"},
    {contract, "gradient_read_as_e4m3", twin<ReadAsOther>, "gradient", "forward,replica,ledger",
     "NVIDIA/TransformerEngine 3352", "tp=2 output=shard grad_format=e5m2", "grad_format=e5m2"},
    {contract, "gradient_left_partial", twin<GradientLeftPartial>, "gradient,ledger",
     "forward,replica", "own rows of a gradient of which every rank has a part", "tp=2",
     "output=replicate"},
    {contract, "gradient_summed_whole", twin<WholeGradientSummed>, "gradient,ledger",
     "forward,replica", "a gather whose gradient is summed again", "tp=2 output=invariant",
     "output=invariant; ratio tp"},
};

}  // namespace

void controls_quantised(Registry& registry) { add(registry, rows); }

}  // namespace shardproof
