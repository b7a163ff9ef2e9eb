// Broken twins of experts that are cut over ranks. The comment above a twin names the mistake.
#include <algorithm>
#include <numeric>
#include <utility>

#include "oracle/registry.hpp"
#include "primitives/controls/sums.hpp"
#include "primitives/controls/table.hpp"
#include "primitives/expert_alltoall.hpp"
#include "primitives/expert_balance.hpp"
#include "primitives/expert_mlp.hpp"
#include "primitives/expert_rows.hpp"
#include "primitives/pointwise.hpp"

namespace shardproof {
namespace {

using namespace controls;
using namespace primitives;

// ---- Weights

// Calls each(row that leaves, its slot, the member that it goes to): rows of zeros have no slot.
template <class Each>
void each_row(const Dispatch& d, const Each& each) {
  size_t row = 0;
  for (size_t member = 0; member < d.sent.size(); ++member)
    for (int64_t n = 0; n < d.sent[member]; ++n, ++row)
      if (d.slots[row] >= 0) each(row, size_t(d.slots[row]), int64_t(member));
}

// Other weights of the slots than the line's.
struct OtherWeights : ExpertAlltoall {
  View weights(Rank& rank, const ExpertSaved& saved) const override {
    const std::vector<double> given = to_doubles(saved.probs);
    const View other = rank.workspace(saved.probs.dtype, saved.probs.shape);
    fill_from(other, changed(rank, saved, given));
    return other;
  }
  virtual std::vector<double> changed(Rank&, const ExpertSaved&,
                                      const std::vector<double>& given) const = 0;
};

// Rows are sorted by expert, their weights are left in the order of tokens.
struct WeightsUnsorted final : OtherWeights {
  std::vector<double> changed(Rank&, const ExpertSaved& saved,
                              const std::vector<double>& given) const override {
    std::vector<double> w(given.size());
    each_row(saved.dispatch,
             [&](size_t row, size_t slot, int64_t) { w[slot] = given[row % given.size()]; });
    return w;
  }
};

// What the experts give is added up as it is.
struct CombinedWithoutWeights final : OtherWeights {
  std::vector<double> changed(Rank&, const ExpertSaved&,
                              const std::vector<double>& given) const override {
    return std::vector<double>(given.size(), 1);
  }
};

// A token goes to a rank once, though it has chosen two experts there: the second is lost.
struct OnceToEachRank final : OtherWeights {
  std::vector<double> changed(Rank& rank, const ExpertSaved& saved,
                              const std::vector<double>& given) const override {
    std::vector<double> w = given;
    const auto choices = size_t(ExpertLine(rank.line()).choices);
    std::vector<int64_t> last(given.size() / choices, -1);  // member, by token
    each_row(saved.dispatch, [&](size_t, size_t slot, int64_t member) {
      if (std::exchange(last[slot / choices], member) == member) w[slot] = 0;
    });
    return w;
  }
};

// A rank takes its share of the rows, as if all were equally many, and drops the others.
struct BeyondShareDropped final : OtherWeights {
  std::vector<double> changed(Rank&, const ExpertSaved& saved,
                              const std::vector<double>& given) const override {
    std::vector<double> w = given;
    std::vector<size_t> taken(saved.dispatch.sent.size());
    each_row(saved.dispatch, [&](size_t, size_t slot, int64_t member) {
      if (taken[size_t(member)]++ >= given.size() / taken.size()) w[slot] = 0;
    });
    return w;
  }
};

// The first rank's numbers of experts are everybody's: what lies beyond them is dropped.
struct GlobalNumberAsOwn final : OtherWeights {
  std::vector<double> changed(Rank&, const ExpertSaved& saved,
                              const std::vector<double>& given) const override {
    std::vector<double> w(given.size());
    each_row(saved.dispatch, [&](size_t, size_t slot, int64_t member) {
      if (member == 0) w[slot] = given[slot];
    });
    return w;
  }
};

// The gate is detached: nothing goes back to the router.
struct ProbGradientLost final : ExpertAlltoall {
  void prob_gradient(Rank&, const ExpertSaved&, const View&, const View& to) const override {
    set_zero(to);
  }
};

// ---- Order

// Experts are dealt to the ranks in turn, their weights are cut in blocks.
struct ExpertsDealtInTurn final : ExpertAlltoall {
  ExpertPlace place_of(int64_t expert, int64_t, int64_t members) const override {
    return {expert % members, expert / members};
  }
};

// Rows arrive by sender and are taken for sorted by expert.
struct LeftBySender final : ExpertAlltoall {
  std::vector<int64_t> order_of(const SentRows& sent, int64_t me) const override {
    auto order = ExpertAlltoall::order_of(sent, me);
    std::iota(order.begin(), order.end(), 0);
    return order;
  }
};

// The backward sorts once more where it has to undo the sort.
struct SortedTwice final : ExpertAlltoall {
  const View& way_back(const ExpertSaved& saved, Phase phase) const override {
    return phase == Phase::backward ? saved.order.view() : ExpertAlltoall::way_back(saved, phase);
  }
};

// The dispatcher keeps the order of the last forward, whichever is to be undone.
struct OrderOfLastForward final : ExpertAlltoall {
  std::unique_ptr<Saved> forward(Rank& rank, std::span<const View> inputs,
                                 std::span<const View> outputs) override {
    backwards_ = false;
    auto saved = ExpertAlltoall::forward(rank, inputs, outputs);
    const auto& places = static_cast<const ExpertSaved&>(*saved).places;
    last_ = Kept(DType::i64, places.view().shape);
    convert(places.view(), last_.view());
    return saved;
  }
  void backward(Rank& rank, Saved& saved, std::span<const View> cotangents,
                std::span<const View> gradients) override {
    backwards_ = true;
    ExpertAlltoall::backward(rank, saved, cotangents, gradients);
  }
  View places_of(const ExpertSaved& saved) const override {
    return backwards_ ? last_.view() : ExpertAlltoall::places_of(saved);
  }
  Kept last_;
  bool backwards_ = false;
};

// Counts are asked for once and kept: right while nothing changes them.
struct CountsAskedOnce final : ExpertAlltoall {
  std::vector<int64_t> all_counts(Rank& rank, Communicator& group,
                                  const std::vector<int64_t>& mine) const override {
    if (kept_.empty()) kept_ = ExpertAlltoall::all_counts(rank, group, mine);
    return kept_;
  }
  mutable std::vector<int64_t> kept_;
};

// ---- Capacity

// Tokens are served in their order, each with all its choices.
struct CapacityByToken final : ExpertAlltoall {
  std::vector<int64_t> by_priority(int64_t slots, int64_t) const override {
    std::vector<int64_t> order(static_cast<size_t>(slots));
    std::iota(order.begin(), order.end(), 0);
    return order;
  }
};

// Second choices are counted from the first place on, and take those of first choices.
struct ChoicesCountedApart final : ExpertAlltoall {
  std::vector<int64_t> rows_within_capacity(Rank& rank, const ExpertLine& line,
                                            const std::vector<int64_t>& by_slot,
                                            Dispatch& d) const override {
    auto counts = ExpertAlltoall::rows_within_capacity(rank, line, by_slot, d);
    std::fill(d.slots.begin(), d.slots.end(), -1);
    std::vector<int64_t> taken(size_t(line.experts * line.choices));
    for (int64_t slot : by_priority(int64_t(by_slot.size()), line.choices)) {
      const int64_t expert = by_slot[size_t(slot)],
                    place = taken[size_t(expert * line.choices + slot % line.choices)]++;
      if (place < line.capacity) d.slots[size_t(expert * line.capacity + place)] = slot;
    }
    return counts;
  }
};

// The mark of a dropped choice is read as a place: the first row.
struct DroppedReadsFirstRow final : ExpertAlltoall {
  View places_of(const ExpertSaved& saved) const override {
    auto places = downloaded(saved.places.view());
    for (int64_t& place : places) place = std::max<int64_t>(place, 0);
    read_ = uploaded(places);
    return read_.view();
  }
  mutable Kept read_;
};

// Rows that no token fills are left as the memory was, since nobody reads their results.
struct PaddingUnwritten final : ExpertAlltoall {
  void take_rows(const View& from, const View& index, const View& to) const override {
    const auto rows = downloaded(index);
    for (size_t i = 0; i < rows.size(); ++i)
      if (rows[i] >= 0) convert(from.narrow(0, rows[i], 1), to.narrow(0, int64_t(i), 1));
  }
};

// ---- Who takes part

// Tokens are the same on all ranks of tp, and each of them dispatches all.
struct DispatchedByEachOfTp final : ExpertAlltoall {
  bool cuts_tokens(const ExpertLine&) const override { return false; }
};

// The share of the tokens is that of the place among the experts' ranks.
struct ShareByExpertRank final : ExpertAlltoall {
  int share_of(Parallel& p) const override { return p.rank.coordinate(Axis::ep); }
};

// An expert without a token has no gradient, and nobody writes a zero.
struct IdleGradientUnwritten final : ExpertAlltoall {
  void idle_expert(const View&) const override {}
};

// A rank without a token is cut off from the graph and leaves the backward early.
struct IdleRankLeaves final : ExpertAlltoall {
  bool takes_part(const ExpertSaved& saved) const override { return saved.dispatch.arriving() > 0; }
};

// Expert gradients go the way of all others: over the whole data-parallel group, in which ranks of
// ep hold other experts.
struct SummedOverExperts final : ExpertAlltoall {
  std::vector<Axis> summed_over(const Case& line) const override {
    std::vector<Axis> axes = ExpertAlltoall::summed_over(line);
    axes.insert(axes.begin(), Axis::ep);
    return axes;
  }
};

// ---- Experts that tp cuts

// A rank's part of the sum is taken for the sum: its own rows of it, in one phase.
template <Phase broken>
struct OwnPartForSum final : ExpertMlp {
  void sum_parts(Parallel& p, const Dispatch& d, const View& results, const View& to,
                 Phase phase) const override {
    if (phase != broken) return ExpertMlp::sum_parts(p, d, results, to, phase);
    convert(results.narrow(0, d.shares > 1 ? p.tp.rank() * d.block : 0, d.block), to);
  }
};

// The block's second linear reduces its result, and the layer reduces it again.
struct SummedTwice final : ExpertMlp {
  void sum_parts(Parallel& p, const Dispatch& d, const View& results, const View& to,
                 Phase phase) const override {
    const View once = p.workspace(to.dtype, to.shape);
    ExpertMlp::sum_parts(p, d, results, once, phase);
    if (phase == Phase::forward)
      all_reduce(p.rank, p.tp, once, to);
    else
      convert(once, to);
  }
};

// Ranks of tp hold rows of their own tokens, compute their part of these, and add up parts of
// different rows.
struct RowsNotGathered final : ExpertMlp {
  View gathered(Parallel& p, const ExpertSaved& saved, const View& arrived) const override {
    const Dispatch& d = saved.dispatch;
    if (d.shares == 1) return arrived;
    const View own = rows_like(p.rank, d.block, arrived),
               all = rows_like(p.rank, d.shares * d.block, arrived);
    set_zero(own);
    convert(arrived, own.narrow(0, 0, d.arriving()));
    for (int64_t i = 0; i < d.shares; ++i) convert(own, all.narrow(0, i * d.block, d.block));
    return all;
  }
};

// Gathered rows lie by rank of tp, and are taken for sorted as their counts are: by rank of ep,
// then of tp.
struct SharesByMember final : ExpertMlp {
  std::vector<int64_t> order_of(const SentRows& sent, int64_t me) const override {
    std::vector<int64_t> first(size_t(sent.members * sent.shares)), order;
    int64_t at = 0;
    for (int64_t a = 0; a < sent.members; ++a)
      for (int64_t i = 0; i < sent.shares; ++i) {
        first[size_t(a * sent.shares + i)] = at;
        at += sent.to(me, a, i);
      }
    for (int64_t e = me * sent.own(); e < (me + 1) * sent.own(); ++e)
      for (int64_t a = 0; a < sent.members; ++a)
        for (int64_t i = 0; i < sent.shares; ++i) {
          int64_t& next = first[size_t(a * sent.shares + i)];
          for (int64_t n = sent.of(a, i, e, 1); n > 0; --n) order.push_back(next++);
        }
    return order;
  }
};

// Tokens that are the same on all ranks of tp are dispatched and gathered like tokens of their own.
struct CopiesGathered final : ExpertMlp {
  bool gathers(const ExpertLine&) const override { return true; }
};

// W1 = [gate; up] is cut in blocks over tp, not each half: with two ranks one has all gates.
struct CutAcrossHalves final : ExpertMlp {
  View first_weight(Parallel& p, const ExpertSaved& saved) const override {
    const View& own = saved.w[0];
    const int64_t ranks = p.tp.size(), rows = own.shape[1], half = rows / 2;
    const View parts = p.workspace(own.dtype, with_extent(own.shape, 1, ranks * rows)),
               whole = p.workspace(own.dtype, parts.shape);
    all_gather(p.rank, p.tp, own, parts, 1);
    for (int64_t i = 0; i < 2 * ranks; ++i)  // gates of all ranks, then their ups
      convert(parts.narrow(1, (i % ranks * 2 + i / ranks) * half, half),
              whole.narrow(1, i * half, half));
    return whole.narrow(1, p.tp.rank() * rows, rows);
  }
};

// Rows are weighed before the experts: as good for linear ones.
struct WeighedBeforeExperts final : ExpertMlp {
  void rows_of_tokens(Rank& rank, const ExpertSaved& saved, const View& x, const View&,
                      const View& to) const override {
    perform(WeighedRows{tensor(x), tensor(saved.probs), tensor(saved.slots.view()), tensor(to),
                        x.shape.back(), ExpertLine(rank.line()).choices, true},
            "weighed rows");
  }
  View weights(Rank& rank, const ExpertSaved& saved) const override {
    const View ones = rank.workspace(saved.probs.dtype, saved.probs.shape);
    perform(Fill{tensor(ones), 1}, "ones");
    return ones;
  }
};

// The gradient of the weights is that of the own part of the results, and nobody adds the others'.
struct ProbGradientOfOwnPart final : ExpertMlp {
  void sum_parts(Parallel& p, const Dispatch& d, const View& results, const View& to,
                 Phase phase) const override {
    if (alone_)
      convert(results, to);
    else
      ExpertMlp::sum_parts(p, d, results, to, phase);
  }
  void from_experts(Parallel& p, Communicator& group, const ExpertSaved& saved,
                    const View& by_expert, const View& to, Phase phase) const override {
    ExpertMlp::from_experts(p, group, saved, by_expert, to, phase);
    if (phase != Phase::forward) return;
    own_ = Kept(to.dtype, to.shape);
    alone_ = true;
    ExpertMlp::from_experts(p, group, saved, by_expert, own_.view(), phase);
    alone_ = false;
  }
  void prob_gradient(Rank& rank, const ExpertSaved& saved, const View& g,
                     const View& to) const override {
    perform(ProbGradient{tensor(g), tensor(own_.view()), tensor(places_of(saved)), tensor(to),
                         g.shape.back(), ExpertLine(rank.line()).choices, true},
            "gradients of weights");
  }
  mutable Kept own_;
  mutable bool alone_ = false;
};

// Experts are taken for copied over tp, where each rank has other columns of them.
struct SummedOverShards final : ExpertMlp {
  std::vector<Axis> summed_over(const Case& line) const override {
    std::vector<Axis> axes = ExpertMlp::summed_over(line);
    axes.insert(axes.begin(), Axis::tp);
    return axes;
  }
};

// Gradients are divided by the ranks that hold other tokens, tp among them, whose rows every rank
// of it has seen.
struct DividedByTp final : ExpertMlp {
  void sum_gradients(Parallel& p, const Parts& parts, const std::vector<Axis>& axes) override {
    ExpertMlp::sum_gradients(p, parts, axes);
    for (const Part& part : parts) scale(part.result, part.result, 1, p.tp.size());
  }
};

// ---- Load balance

// Each rank multiplies its own counts with its own sums, and the products are added up, p times as
// much as if they were means.
struct ProductsOfRanks final : ExpertBalance {
  void sum_counts(Rank& rank, Communicator& group, const View& own,
                  const View& all) const override {
    const View unused = rank.workspace(own.dtype, own.shape);
    all_reduce(rank, group, own, unused);
    scale(own, all, group.size());
  }
};

// Every rank reports its own part.
struct LossOfOwnTokens final : ExpertBalance {
  void sum_loss(Rank& rank, Communicator& group, const View& own, const View& all) const override {
    const View unused = rank.workspace(own.dtype, own.shape);
    all_reduce(rank, group, own, unused);
    convert(own, all);
  }
};

// Of the choices of a token the first is counted alone.
struct FirstChoicesCounted final : ExpertBalance {
  std::vector<int64_t> own_counts(const std::vector<int64_t>& chosen, int64_t experts,
                                  int64_t choices) const override {
    std::vector<int64_t> first;
    for (size_t slot = 0; slot < chosen.size(); slot += size_t(choices))
      first.push_back(chosen[slot]);
    return ExpertBalance::own_counts(first, experts, 1);
  }
};

// Ranks of tp that hold the same tokens are counted like others.
struct CopiesCounted final : ExpertBalance {
  std::vector<Axis> summed_over(const Case& line) const override {
    std::vector<Axis> axes = ExpertBalance::summed_over(line);
    if (line.ranks(Axis::tp) > 1 && !line.on("sp")) axes.insert(axes.begin(), Axis::tp);
    return axes;
  }
};

// The counts are averaged, as a metric would be.
struct CountsAveraged final : ExpertBalance {
  void sum_counts(Rank& rank, Communicator& group, const View& own,
                  const View& all) const override {
    all_reduce(rank, group, own, all, Reduce::avg);
  }
};

// The loss is taken from a detached copy.
struct BalanceDetached final : ExpertBalance {
  void backward(Rank&, Saved&, std::span<const View>, std::span<const View> gradients) override {
    set_zero(gradients[0]);
  }
};

const char* const contract = "expert_alltoall";
const char* const balance = "expert_balance";
const char* const mlp = "expert_mlp";

const Row rows[] = {
    {contract, "expert_weights_unsorted", twin<WeightsUnsorted>, "forward,gradient", "ledger",
     "pytorch/torchtitan 1340", "ep=4", "several experts"},
    {contract, "expert_combined_without_weights", twin<CombinedWithoutWeights>, "forward,gradient",
     "ledger", "a combine that leaves the weights out", "ep=4", "weights that differ from 1"},
    {contract, "expert_once_to_each_rank", twin<OnceToEachRank>, "forward,gradient", "ledger",
     "choices of one token that share a rank taken for one", "ep=2",
     "topk >= 2, two experts a rank"},
    {contract, "expert_rows_beyond_share_dropped", twin<BeyondShareDropped>, "forward,gradient",
     "ledger", "deepspeedai/DeepSpeed 1395, vllm-project/vllm-ascend 14926", "ep=4 route=skewed",
     "more rows to an expert than the mean"},
    {contract, "expert_global_number_as_own", twin<GlobalNumberAsOwn>, "forward,gradient", "ledger",
     "vllm-project/vllm-gaudi 1796", "ep=4", "a rank beyond the first"},
    {contract, "expert_weight_gradient_lost", twin<ProbGradientLost>, "gradient,adjoint",
     "forward,ledger", "davidmrau/mixture-of-experts 27, jingyaogong/minimind 859", "ep=4",
     "any line"},

    {contract, "experts_dealt_in_turn", twin<ExpertsDealtInTurn>, "forward,gradient",
     "adjoint,ledger", "weights cut in blocks, experts dealt round robin", "ep=4 route=even",
     "two experts a rank"},
    {contract, "expert_rows_left_by_sender", twin<LeftBySender>, "forward,gradient",
     "adjoint,ledger", "a rank of several experts that sorts by sender alone", "ep=4",
     "two experts a rank"},
    {contract, "expert_rows_sorted_twice", twin<SortedTwice>, "gradient,adjoint", "forward,ledger",
     "a permutation where its inverse is due", "ep=4", "two experts a rank"},
    {contract, "expert_order_of_last_forward", twin<OrderOfLastForward>, "accumulate",
     "forward,gradient,ledger", "a dispatcher that keeps its maps in the object", "ep=4",
     "two forwards in flight"},

    {contract, "expert_counts_asked_once", twin<CountsAskedOnce>, "accumulate",
     "forward,gradient,adjoint,ledger", "counts of a batch kept for the next", "ep=4 route=even",
     "two forwards; equal counts leave the values right"},
    {contract, "expert_capacity_by_token", twin<CapacityByToken>, "forward,gradient",
     "adjoint,ledger", "tokens served one by one where all first choices come first",
     "ep=4 capacity=2", "choices that are dropped"},
    {contract, "expert_choices_counted_apart", twin<ChoicesCountedApart>, "forward,gradient",
     "adjoint,ledger", "lucidrains/st-moe-pytorch 13", "ep=4 capacity=2",
     "an expert that is a first and a second choice"},
    {contract, "expert_dropped_reads_first_row", twin<DroppedReadsFirstRow>, "forward,gradient",
     "ledger", "NVIDIA/TransformerEngine 2908", "ep=4 capacity=2", "choices that are dropped"},
    {contract, "expert_padding_unwritten", twin<PaddingUnwritten>, "gradient", "forward,ledger",
     "NVIDIA/TransformerEngine 3116, huggingface/transformers 48205", "ep=4 capacity=2",
     "experts that are sent fewer rows than they take"},

    {contract, "expert_tokens_of_each_tp_rank", twin<DispatchedByEachOfTp>, "gradient,ledger",
     "forward", "deepspeedai/DeepSpeed 2074", "tp=2 ep=2", "tp >= 2, sp=off; ratio tp"},
    {contract, "expert_share_by_expert_rank", twin<ShareByExpertRank>, "forward,gradient", "",
     "pytorch/torchtitan 2842", "tp=2 ep=2", "tp and ep, sp=off"},
    {contract, "expert_idle_gradient_unwritten", twin<IdleGradientUnwritten>, "gradient",
     "forward,ledger", "meta-pytorch/MSLK 158", "ep=4 route=skewed", "an expert without tokens"},
    {contract, "expert_idle_rank_leaves", twin<IdleRankLeaves>, "lockstep", "",
     "PaddlePaddle/PaddleFormers 3010, NVIDIA/Megatron-LM 3626", "ep=4 route=skewed",
     "a rank without tokens"},
    {contract, "expert_gradient_over_experts", twin<SummedOverExperts>, "gradient,ledger",
     "forward", "microsoft/Tutel 204", "ep=2 dp=2", "ep >= 2"},
    {contract, "expert_gradient_not_summed", twin<GradientLocal<ExpertAlltoall>>,
     "gradient,replica", "forward", "facebookresearch/fairseq 4220", "ep=2 dp=2", "dp >= 2"},
    {contract, "expert_gradient_averaged", twin<GradientAveraged<ExpertAlltoall>>,
     "gradient,ledger", "forward,replica", "deepspeedai/DeepSpeed 5618, NVIDIA/Megatron-LM 5956",
     "ep=2 dp=2", "dp >= 2; ratio 1/dp"},
    {contract, "expert_gradient_not_summed_over_cp", twin<NotSummedOverCp<ExpertAlltoall>>,
     "gradient,replica", "forward", "Megatron CP groups", "cp=2 ep=2", "cp >= 2"},

    {mlp, "expert_parts_not_summed", twin<OwnPartForSum<Phase::forward>>, "forward", "",
     "sgl-project/sglang 32963", "tp=2 ep=2", "tp >= 2"},
    {mlp, "expert_parts_summed_twice", twin<SummedTwice>, "forward,ledger", "",
     "vllm-project/vllm 49122", "tp=2 ep=2", "tp >= 2; ratio tp with sp=off"},
    {mlp, "expert_row_gradient_not_summed", twin<OwnPartForSum<Phase::backward>>,
     "gradient,replica", "forward", "pytorch/torchtitan 1805, pytorch/torchtitan 4054", "tp=2 ep=2",
     "tp >= 2"},
    {mlp, "expert_row_gradient_sliced", twin<OwnPartForSum<Phase::backward>>, "gradient,ledger",
     "forward", "NVIDIA-NeMo/Automodel 1260", "tp=2 ep=2 sp=on", "tp >= 2, sp=on"},
    {mlp, "expert_rows_not_gathered", twin<RowsNotGathered>, "forward,gradient,ledger", "",
     "vllm-project/tpu-inference 2248", "tp=2 ep=2 sp=on", "tp >= 2, sp=on"},
    {mlp, "expert_shares_by_member", twin<SharesByMember>, "forward,gradient", "ledger",
     "rows gathered over tp in another order than their counts", "tp=2 ep=2 sp=on",
     "tp and ep, sp=on"},
    {mlp, "expert_copies_gathered", twin<CopiesGathered>, "gradient,ledger", "forward",
     "deepspeedai/DeepSpeed 2074", "tp=2 ep=2", "tp >= 2, sp=off; ratio tp of dW"},
    {mlp, "expert_halves_cut_across", twin<CutAcrossHalves>, "forward,gradient", "",
     "sgl-project/sglang 15432, pytorch/torchtitan 4535", "tp=2 ep=2", "tp >= 2, swiglu"},
    {mlp, "expert_weighed_before", twin<WeighedBeforeExperts>, "forward,gradient", "ledger",
     "vllm-project/vllm 16744", "tp=2 ep=2", "an activation that is not linear"},
    {mlp, "expert_weight_gradient_of_part", twin<ProbGradientOfOwnPart>, "gradient,replica",
     "forward", "pytorch/torchtitan 2416", "tp=2", "tp >= 2, sp=off"},
    {mlp, "expert_gradient_over_shards", twin<SummedOverShards>, "gradient,ledger", "forward",
     "NVIDIA/Megatron-LM 5916, NVIDIA/Megatron-LM 1628", "tp=2 ep=2", "tp >= 2"},
    {mlp, "expert_gradient_divided_by_tp", twin<DividedByTp>, "gradient", "forward,ledger",
     "NVIDIA/Megatron-LM 7165, databricks/megablocks 86", "tp=2 ep=2 sp=on", "tp >= 2; ratio 1/tp"},
    {mlp, "expert_second_weight_not_summed", twin<LastLeftOut<ExpertMlp>>, "gradient,replica",
     "forward", "NVIDIA/Megatron-LM 6080", "ep=2 dp=2", "dp >= 2"},
    {mlp, "expert_mlp_not_summed_over_cp", twin<NotSummedOverCp<ExpertMlp>>, "gradient,replica",
     "forward", "Megatron CP groups", "tp=2 cp=2", "cp >= 2"},

    {balance, "balance_of_own_products", twin<ProductsOfRanks>, "forward,gradient", "ledger",
     "means of a layer's load taken rank by rank", "ep=4 route=skewed", "ranks of other loads"},
    {balance, "balance_of_own_tokens", twin<LossOfOwnTokens>, "forward,replica", "gradient,ledger",
     "an auxiliary loss logged by one rank", "ep=4", "p >= 2"},
    {balance, "balance_of_first_choices", twin<FirstChoicesCounted>, "forward,gradient",
     "adjoint,ledger", "deepspeedai/DeepSpeed 5156, huggingface/transformers 28255", "ep=2",
     "topk >= 2"},
    {balance, "balance_counts_copies", twin<CopiesCounted>, "forward,gradient,ledger", "replica",
     "tokens of all tensor-parallel ranks counted", "tp=2 ep=2",
     "tp >= 2, sp=off; ratio tp of the gradient"},
    {balance, "balance_counts_averaged", twin<CountsAveraged>, "forward,gradient,ledger", "replica",
     "a count reduced as a metric", "ep=4", "p >= 2; ratio 1/p"},
    {balance, "balance_detached", twin<BalanceDetached>, "gradient,adjoint", "forward,ledger",
     "jingyaogong/minimind 140", "ep=2", "any line"},
};

}  // namespace

void controls_expert(Registry& registry) { controls::add(registry, rows); }

}  // namespace shardproof
