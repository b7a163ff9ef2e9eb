// Broken twins of experts that are cut over ranks. The comment above a twin names the mistake.
#include <algorithm>
#include <numeric>

#include "oracle/registry.hpp"
#include "primitives/controls/sums.hpp"
#include "primitives/controls/table.hpp"
#include "primitives/expert_alltoall.hpp"

namespace shardproof {
namespace {

using namespace controls;
using namespace primitives;

// ---- Weights

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
    const auto& slots = saved.dispatch.slots;
    for (size_t row = 0; row < slots.size(); ++row) w[size_t(slots[row])] = given[row];
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
    const int64_t choices = ExpertLine(rank.line()).choices;
    std::vector<int64_t> last(given.size() / size_t(choices), -1);  // member, by token
    size_t row = 0;
    for (size_t member = 0; member < saved.dispatch.sent.size(); ++member)
      for (int64_t n = 0; n < saved.dispatch.sent[member]; ++n) {
        const auto slot = size_t(saved.dispatch.slots[row++]);
        int64_t& of_token = last[slot / size_t(choices)];
        if (of_token == int64_t(member)) w[slot] = 0;
        of_token = int64_t(member);
      }
    return w;
  }
};

// An expert takes its share of the rows, as if all were equally many, and drops the others.
struct BeyondCapacityDropped final : OtherWeights {
  std::vector<double> changed(Rank& rank, const ExpertSaved& saved,
                              const std::vector<double>& given) const override {
    std::vector<double> w = given;
    const ExpertLine line(rank.line());
    const int64_t members = int64_t(saved.dispatch.sent.size()),
                  capacity = (int64_t(given.size()) + line.experts - 1) / line.experts;
    size_t row = 0;
    for (int64_t member = 0; member < members; ++member) {
      const int64_t open = capacity * line.experts / members;
      for (int64_t n = 0; n < saved.dispatch.sent[size_t(member)]; ++n, ++row)
        if (n >= open) w[size_t(saved.dispatch.slots[row])] = 0;
    }
    return w;
  }
};

// The first rank's numbers of experts are everybody's: what lies beyond them is dropped.
struct GlobalNumberAsOwn final : OtherWeights {
  std::vector<double> changed(Rank&, const ExpertSaved& saved,
                              const std::vector<double>& given) const override {
    std::vector<double> w(given.size());
    for (int64_t row = 0; row < saved.dispatch.sent[0]; ++row) {
      const auto slot = size_t(saved.dispatch.slots[size_t(row)]);
      w[slot] = given[slot];
    }
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
  std::vector<int64_t> order_of(const std::vector<int64_t>& counts, int64_t experts,
                                int64_t me) const override {
    auto order = ExpertAlltoall::order_of(counts, experts, me);
    std::iota(order.begin(), order.end(), 0);
    return order;
  }
};

// The backward sorts once more where it has to undo the sort.
struct SortedTwice final : ExpertAlltoall {
  const View& way_back(const ExpertSaved& saved, bool backward) const override {
    return backward ? saved.order.view() : ExpertAlltoall::way_back(saved, backward);
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

const char* const contract = "expert_alltoall";

const Row rows[] = {
    {contract, "expert_weights_unsorted", twin<WeightsUnsorted>, "forward,gradient", "ledger",
     "pytorch/torchtitan 1340", "ep=4", "several experts"},
    {contract, "expert_combined_without_weights", twin<CombinedWithoutWeights>, "forward,gradient",
     "ledger", "a combine that leaves the weights out", "ep=4", "weights that differ from 1"},
    {contract, "expert_once_to_each_rank", twin<OnceToEachRank>, "forward,gradient", "ledger",
     "choices of one token that share a rank taken for one", "ep=2",
     "topk >= 2, two experts a rank"},
    {contract, "expert_capacity_drops", twin<BeyondCapacityDropped>, "forward,gradient", "ledger",
     "deepspeedai/DeepSpeed 1395, vllm-project/vllm-ascend 14926", "ep=4 route=skewed",
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

    {contract, "expert_tokens_of_each_tp_rank", twin<DispatchedByEachOfTp>, "gradient,ledger",
     "forward", "deepspeedai/DeepSpeed 2074", "tp=2 ep=2", "tp >= 2, sp=off; ratio tp"},
    {contract, "expert_share_by_expert_rank", twin<ShareByExpertRank>, "forward,gradient", "",
     "pytorch/torchtitan 2842", "tp=2 ep=2", "tp and ep, sp=off"},
    {contract, "expert_idle_gradient_unwritten", twin<IdleGradientUnwritten>, "gradient",
     "forward,ledger", "deepspeedai/DeepSpeed 5066", "ep=4 route=skewed",
     "an expert without tokens"},
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
};

}  // namespace

void controls_expert(Registry& registry) { controls::add(registry, rows); }

}  // namespace shardproof
