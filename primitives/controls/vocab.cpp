// Broken twins of the vocabulary-parallel embedding and cross-entropy. The comment above a twin
// names the mistake.
#include <algorithm>
#include <cmath>
#include <set>

#include "oracle/registry.hpp"
#include "primitives/controls/labels.hpp"
#include "primitives/controls/table.hpp"
#include "primitives/vocab_cross_entropy.hpp"
#include "primitives/vocab_embedding.hpp"
#include "primitives/vocab_line.hpp"
#include "primitives/vocab_log_softmax.hpp"
#include "primitives/vocab_shard.hpp"

namespace shardproof {
namespace {

using namespace controls;

// ---- Which ids are own

// Both halves read ids as `read` has them.
template <View (*read)(Parallel&, const View&, int64_t, int64_t)>
struct IdsReadAs final : VocabEmbedding {
  View ids_to_look_up(Parallel& p, const View& ids, int64_t first, int64_t own) const override {
    return read(p, ids, first, own);
  }
  View ids_to_add_to(Parallel& p, const View& ids, int64_t first, int64_t own) const override {
    return read(p, ids, first, own);
  }
};

// The output is masked, the cotangent is not.
struct MaskLeftOutOfBackward final : VocabEmbedding {
  View ids_to_add_to(Parallel& p, const View& ids, int64_t first, int64_t own) const override {
    return clamped(p, ids, first, own);
  }
};

// The end of the range is own, too: the first id of the next rank is read from the last own row.
View inclusive(Parallel& p, const View& ids, int64_t first, int64_t own) {
  return rewritten(p, ids, [=](int64_t id) { return id == first + own ? id - 1 : id; });
}

// Rows are cut of the padded table, ranges of the vocabulary without its padding.
struct RangeOfUnpadded final : VocabEmbedding {
  int64_t first_row(const Parallel& p, int64_t) const override {
    return p.tp.rank() * p.rank.line().at("vocab") / p.tp.size();
  }
};

// The rank in the world stands for the rank on the axis.
struct RangeOfWorldRank final : VocabEmbedding {
  int64_t first_row(const Parallel& p, int64_t own) const override {
    return p.rank.world_rank() * own;
  }
};

// Rows of one rank, ids of the next.
struct RangeOfNextRank final : VocabEmbedding {
  int64_t first_row(const Parallel& p, int64_t own) const override {
    return (p.tp.rank() + 1) % p.tp.size() * own;
  }
};

// int64 ids are read as int32: every second one is the upper half of a number.
View narrow(Parallel&, const View& ids, int64_t, int64_t) {
  View halves = ids;
  halves.dtype = DType::i32;
  return halves;
}

// ---- Sums of rows

// dW[id_t] = g_t: the last token of an id is all that remains.
struct DuplicatesOverwritten final : VocabEmbedding {
  View ids_to_add_to(Parallel& p, const View& ids, int64_t, int64_t) const override {
    std::vector<double> list = to_doubles(ids);
    std::set<double> seen;
    for (auto id = list.rbegin(); id != list.rend(); ++id)
      if (!seen.insert(*id).second) *id = -1;
    const View last_of_each = p.workspace(ids.dtype, ids.shape);
    fill_from(last_of_each, list);
    return last_of_each;
  }
};

// Each rank adds the cotangents of its own tokens, to its own rows alone.
struct CotangentNotGathered final : VocabEmbedding {
  View cotangent_of_all_tokens(Parallel& p, const View& own) const override {
    if (!p.sp) return own;
    const int64_t block = own.shape[0];
    const View all = p.workspace(own.dtype, with_extent(own.shape, 0, block * p.tp.size()));
    set_zero(all);
    convert(own, all.narrow(0, block * p.tp.rank(), block));
    return all;
  }
};

// Cotangents of all ranks are summed, though each rank of tp has the whole one.
struct CotangentSummed final : VocabEmbedding {
  View cotangent_of_all_tokens(Parallel& p, const View& own) const override {
    if (p.sp) return VocabEmbedding::cotangent_of_all_tokens(p, own);
    const View sum = p.workspace(own.dtype, own.shape);
    all_reduce(p.rank, p.tp, own, sum);
    return sum;
  }
};

// ---- The maximum

// exp(z) as it is.
struct MaximumNotSubtracted final : VocabCrossEntropy {
  void maximum(Parallel& p, const View& own, const View& all) const override {
    VocabCrossEntropy::maximum(p, own, all);
    set_zero(all);
  }
};

// -log(exp(z_y - m) / E): the probability of a label that is far from the maximum is 0.
struct LogOfProbability final : VocabCrossEntropy {
  void losses(Parallel&, const View& labels, const Sums& s, const View& loss) const override {
    const auto ids = to_doubles(labels), exps = to_doubles(s.exps), target = to_doubles(s.target);
    std::vector<double> list(ids.size());
    for (size_t t = 0; t < ids.size(); ++t)
      if (int64_t(ids[t]) != ignored_label) list[t] = -std::log(std::exp(target[t]) / exps[t]);
    fill_from(loss, list);
  }
};

// ---- Smoothing

// The mean of z - m is taken of the own classes, and of as many.
struct SmoothingOfPartition final : VocabCrossEntropy {
  int64_t classes(const Case&, int64_t own) const override { return own; }
  void sum_of_shifted(Parallel&, const View& own, const View& all) const override {
    convert(own, all);
  }
};

// The sum stays local and is divided by all classes.
struct SmoothingSumNotReduced final : VocabCrossEntropy {
  void sum_of_shifted(Parallel&, const View& own, const View& all) const override {
    convert(own, all);
  }
};

// The sum is reduced and divided by the own classes.
struct SmoothingOverOwnClasses final : VocabCrossEntropy {
  int64_t classes(const Case&, int64_t own) const override { return own; }
};

// alpha for alpha V/(V-1) and the other way round, in both halves or in the backward alone.
double other_convention(const Case& line, int64_t classes) {
  Case other = line;
  other.set("smoothing", line.text("smoothing") == "all" ? "others" : "all");
  return smoothing_of(other, classes);
}
struct ConventionMixed final : VocabCrossEntropy {
  double smoothing(const Case& line, int64_t classes, bool) const override {
    return other_convention(line, classes);
  }
};
struct ConventionOfBackward final : VocabCrossEntropy {
  double smoothing(const Case& line, int64_t classes, bool backward) const override {
    return backward ? other_convention(line, classes) : smoothing_of(line, classes);
  }
};

// The backward knows nothing of the smoothing.
struct BackwardNotSmoothed final : VocabCrossEntropy {
  double smoothing(const Case& line, int64_t classes, bool backward) const override {
    return backward ? 0 : smoothing_of(line, classes);
  }
};

// ---- Logits

// A forward on other logits than the caller's, which its backward reads once more.
struct OnOtherLogits : VocabCrossEntropy {
  struct WithLogits : Saved {
    Kept logits;
    std::unique_ptr<Saved> of;
  };
  std::unique_ptr<Saved> forward_on(Rank& rank, Kept logits, std::span<const View> inputs,
                                    std::span<const View> outputs) {
    auto saved = std::make_unique<WithLogits>();
    saved->logits = std::move(logits);
    const View in[] = {saved->logits.view(), inputs[1]};
    saved->of = VocabCrossEntropy::forward(rank, in, outputs);
    return saved;
  }
  void backward(Rank& rank, Saved& saved, std::span<const View> cotangents,
                std::span<const View> gradients) override {
    VocabCrossEntropy::backward(rank, *static_cast<WithLogits&>(saved).of, cotangents, gradients);
  }
};

// The logits were gathered, and each rank takes the whole for its shard: E counts every class p
// times, the loss is log p too large.
struct GatheredForShards final : OnOtherLogits {
  std::unique_ptr<Saved> forward(Rank& rank, std::span<const View> inputs,
                                 std::span<const View> outputs) override {
    Parallel p(rank);
    const View& own = inputs[0];
    Kept all(own.dtype, whole_shape(p, own));
    all_gather(rank, p.tp, own, all.view(), last(own));
    return forward_on(rank, std::move(all), inputs, outputs);
  }
  void backward(Rank& rank, Saved& saved, std::span<const View> cotangents,
                std::span<const View> gradients) override {
    Parallel p(rank);
    const View& own = gradients[0];
    const View all[] = {p.workspace(own.dtype, whole_shape(p, own)), View{}};
    OnOtherLogits::backward(rank, saved, cotangents, all);
    convert(own_block(p, all[0], last(own)), own);
  }
  static std::vector<int64_t> whole_shape(const Parallel& p, const View& own) {
    return with_extent(own.shape, last(own), own.shape.back() * p.tp.size());
  }
};

// The maximum is subtracted where the caller's logits lie.
struct LogitsShiftedInPlace final : OnOtherLogits {
  std::unique_ptr<Saved> forward(Rank& rank, std::span<const View> inputs,
                                 std::span<const View> outputs) override {
    const View& logits = inputs[0];
    Kept as_they_were(logits.dtype, logits.shape);
    convert(logits, as_they_were.view());
    auto saved = forward_on(rank, std::move(as_they_were), inputs, outputs);
    auto values = to_doubles(logits);
    const auto own = logits.shape.back();
    for (auto row = values.begin(); row != values.end(); row += own) {
      const double greatest = *std::max_element(row, row + own);
      std::for_each(row, row + own, [=](double& z) { z -= greatest; });
    }
    fill_from(logits, values);
    return saved;
  }
};

// ---- Log-softmax

// The cotangent is handed on: right behind a loss of labels whose own backward knows the softmax,
// and wrong for every other use of y.
struct CotangentHandedOn final : VocabLogSoftmax {
  void backward(Rank&, Saved&, std::span<const View> cotangents,
                std::span<const View> gradients) override {
    convert(cotangents[0], gradients[0]);
  }
};

// A class takes its share of the cotangents of its own rank alone.
struct CotangentsOfShard final : VocabLogSoftmax {
  void sum_of_cotangents(Parallel&, const View& own, const View& all) const override {
    convert(own, all);
  }
};

// Each rank's probabilities add up to 1.
struct SoftmaxOfShard final : VocabLogSoftmax {
  void sum_of_exps(Parallel&, const View& own, const View& all) const override {
    convert(own, all);
  }
};

// Sums of ranks that subtracted different maxima.
struct MaximumOfShard final : VocabLogSoftmax {
  void maximum(Parallel&, const View& own, const View& all) const override { convert(own, all); }
};

// ---- What catches them

const char* const table = "vocab_embedding";
const char* const loss = "vocab_cross_entropy";
const char* const softmax = "vocab_log_softmax";
const char* const smoothed = "tp=4 label_smoothing=0.1";

const Row rows[] = {
    {table, "duplicates_overwritten", twin<DuplicatesOverwritten>, "gradient,adjoint",
     "forward,replica,ledger", "rows written in place of added, index_put_ without accumulate",
     "tp=4 sp=on", "an id that two tokens name"},
    {table, "mask_left_out", twin<IdsReadAs<clamped>>, "forward,gradient", "adjoint,ledger",
     "the mask of VocabParallelEmbedding left out", "tp=4", "p >= 2"},
    {table, "mask_left_out_of_backward", twin<MaskLeftOutOfBackward>, "gradient,adjoint",
     "forward,replica,ledger", "an output masked outside of the graph", "tp=4", "p >= 2"},
    {table, "range_inclusive", twin<IdsReadAs<inclusive>>, "forward", "adjoint,ledger",
     "the last id of a range read as inclusive", "tp=4 vocab=8",
     "the first id of a rank that is not the first"},
    {table, "range_of_unpadded_vocabulary", twin<RangeOfUnpadded>, "forward", "adjoint,ledger",
     "a vocabulary padded for one half of the code", "tp=4 vocab=45 padded_vocab=48",
     "ids that two ranks take for theirs"},
    {table, "range_of_world_rank", twin<RangeOfWorldRank>, "forward", "adjoint,ledger",
     "NVIDIA/TransformerEngine 2179", "tp=2 dp=2", "two axes"},
    {table, "range_of_next_rank", twin<RangeOfNextRank>, "forward", "adjoint,ledger",
     "rows and ranges cut by other orders of the ranks", "tp=4", "p >= 2"},
    {table, "ids_in_32_bits", twin<IdsReadAs<narrow>>, "forward", "ledger",
     "int64 ids in a kernel of int32", "tp=4", "index=i64"},
    {table, "cotangent_not_gathered", twin<CotangentNotGathered>, "gradient,adjoint", "forward",
     "NVIDIA/TransformerEngine 178", "tp=4 sp=on", "sp=on, p >= 2"},
    {table, "cotangent_summed", twin<CotangentSummed>, "gradient,adjoint", "forward,replica",
     "a sum over tp where every rank has the whole cotangent", "tp=4", "sp=off, p >= 2; ratio p"},

    {loss, "local_maximum", twin<LocalMaximum<VocabCrossEntropy>>, "forward,gradient", "",
     "the maximum of a shard taken for that of the row", "tp=4", "p >= 2"},
    {loss, "maximum_not_subtracted", twin<MaximumNotSubtracted>, "forward", "ledger",
     "exp of logits as they are", "tp=4 fill=large", "large logits"},
    {loss, "log_of_probability", twin<LogOfProbability>, "forward", "gradient,replica,ledger",
     "NVIDIA/Megatron-LM 5522", "tp=4 fill=large", "large logits"},
    {loss, "smoothing_of_partition", twin<SmoothingOfPartition>, "forward,gradient,replica", "",
     "NVIDIA/Megatron-LM 737, 7464, 7452 (1)", smoothed, "smoothing, p >= 2"},
    {loss, "smoothing_sum_not_reduced", twin<SmoothingSumNotReduced>, "forward,replica", "gradient",
     "NVIDIA/Megatron-LM 737", smoothed, "smoothing, p >= 2"},
    {loss, "smoothing_over_own_classes", twin<SmoothingOverOwnClasses>, "forward,gradient",
     "replica,ledger", "NVIDIA/Megatron-LM 7464", smoothed, "smoothing, p >= 2"},
    {loss, "smoothing_convention_mixed", twin<ConventionMixed>, "forward,gradient",
     "gradcheck,replica,ledger", "alpha on all classes or on all others", smoothed, "smoothing"},
    {loss, "smoothing_convention_of_backward", twin<ConventionOfBackward>, "gradient",
     "forward,replica,ledger", "alpha on all classes or on all others",
     "tp=4 smoothing=others label_smoothing=0.1", "smoothing"},
    {loss, "backward_not_smoothed", twin<BackwardNotSmoothed>, "gradient", "forward,replica,ledger",
     "a backward written before the smoothing", smoothed, "smoothing"},
    {loss, "target_not_masked", twin<TargetNotMasked<VocabCrossEntropy>>, "forward,gradient",
     "replica,ledger", "the target mask of a vocabulary-parallel loss left out", "tp=4", "p >= 2"},
    {loss, "gradient_of_own_labels_alone", twin<GradientOfOwnLabelsAlone<VocabCrossEntropy>>,
     "gradient", "forward,replica,ledger", "modelscope/ms-swift 9947", "tp=4", "p >= 2"},
    {loss, "ignored_gradient_not_zeroed", twin<IgnoredGradientLeft<VocabCrossEntropy>>, "gradient",
     "forward,replica,ledger", "a row of an ignored label left with its softmax", "tp=4 ignored=5",
     "a label of -100"},
    {loss, "ignored_loss_not_zeroed", twin<IgnoredResultLeft<VocabCrossEntropy>>, "forward",
     "gradient,replica,ledger", "a label of -100 taken for one of another rank", "tp=4 ignored=5",
     "a label of -100"},
    {loss, "gathered_logits_for_shards", twin<GatheredForShards>, "forward,gradient", "replica",
     "NVIDIA/Megatron-LM 7452 (2)", "tp=4", "p >= 2; loss + log p"},
    {loss, "logits_shifted_in_place", twin<LogitsShiftedInPlace>, "memory",
     "forward,gradient,ledger", "NVIDIA/Megatron-LM, vocab_parallel_cross_entropy of f32 logits",
     "tp=4", "f32 logits are handed on as they are", true},

    {softmax, "log_softmax_backward_identity", twin<CotangentHandedOn>, "gradient,gradcheck,ledger",
     "forward", "pytorch/pytorch 190746", "tp=4", "cotangents of a token that do not add up to 0"},
    {softmax, "log_softmax_cotangents_of_shard", twin<CotangentsOfShard>,
     "gradient,gradcheck,ledger", "forward", "neighbour of pytorch/pytorch 190746", "tp=4",
     "p >= 2"},
    {softmax, "log_softmax_of_shard", twin<SoftmaxOfShard>, "forward,gradient,ledger", "",
     "a softmax over a shard of the vocabulary", "tp=4", "p >= 2"},
    {softmax, "log_softmax_local_maximum", twin<MaximumOfShard>, "forward,gradient,ledger", "",
     "the maximum of a shard taken for that of the row", "tp=4", "p >= 2"},
};

}  // namespace

void controls_vocab(Registry& registry) { controls::add(registry, rows); }

}  // namespace shardproof
