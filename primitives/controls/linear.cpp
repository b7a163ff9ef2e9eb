// Broken twins of the linears and of the MLP. Each replaces one step of the healthy layer; the
// comment above a twin names the mistake.
#include <algorithm>
#include <iterator>
#include <map>

#include "oracle/registry.hpp"
#include "primitives/controls/linear_parts.hpp"
#include "primitives/controls/row_bias.hpp"
#include "primitives/controls/table.hpp"
#include "primitives/gemm.hpp"
#include "primitives/linear.hpp"
#include "primitives/mlp.hpp"

namespace shardproof {
namespace {

using namespace primitives;
using controls::BiasBeforeReduce;
using controls::BiasGradientLocal;

// ---- Column

// The path without a weight gradient returns before the all-reduce of dX.
struct FrozenSkipsReduce final : ColumnParallel {
  void reduce_input_gradient(Parallel& p, const View& partial, const View& dx) override {
    if (!p.rank.line().on("frozen")) return ColumnParallel::reduce_input_gradient(p, partial, dx);
    convert(partial, dx);
  }
};

// The input enters without its cast from I to R: nobody sums dX.
struct InputGradientLocal final : ColumnParallel {
  void reduce_input_gradient(Parallel&, const View& partial, const View& dx) override {
    convert(partial, dx);
  }
};

// The backward of the cast all-reduces, and so does the fused gradient GEMM.
struct InputGradientReducedTwice final : ColumnParallel {
  void reduce_input_gradient(Parallel& p, const View& partial, const View& dx) override {
    ColumnParallel::reduce_input_gradient(p, partial, dx);
    const View once = p.workspace(dx.dtype, dx.shape);
    convert(dx, once);
    p.tp.all_reduce(once, dx);
  }
};

// dW from the tokens that the rank holds, X not gathered again.
struct UngatheredOperand final : ColumnParallel {
  void weight_gradient(Parallel& p, const View& x, const View& g, const View& dw) override {
    gemm(turned(own_block(p, g, 0)), plain(x), dw, p.accumulate);
  }
};

// The input is kept in the layer and not with its own forward: the next one replaces it.
class InputKeptInLayer final : public LinearColumn {
 public:
  std::unique_ptr<Saved> forward(Rank& rank, std::span<const View> inputs,
                                 std::span<const View> outputs) override {
    latest_ = LinearColumn::forward(rank, inputs, outputs);
    return std::make_unique<Saved>();
  }
  void backward(Rank& rank, Saved&, std::span<const View> cotangents,
                std::span<const View> gradients) override {
    LinearColumn::backward(rank, *latest_, cotangents, gradients);
  }

 private:
  std::unique_ptr<Saved> latest_;
};

// States lie in two places of the layer, taken in turn: the third forward takes that of the first.
class StatesInTwoPlaces final : public LinearColumn {
 public:
  std::unique_ptr<Saved> forward(Rank& rank, std::span<const View> inputs,
                                 std::span<const View> outputs) override {
    auto place = std::make_unique<Place>();
    place->number = forwards_++ % std::size(states_);
    states_[place->number] = LinearColumn::forward(rank, inputs, outputs);
    return place;
  }
  void backward(Rank& rank, Saved& saved, std::span<const View> cotangents,
                std::span<const View> gradients) override {
    Saved& state = *states_[static_cast<const Place&>(saved).number];
    LinearColumn::backward(rank, state, cotangents, gradients);
  }

 private:
  struct Place : Saved {
    size_t number = 0;
  };
  std::unique_ptr<Saved> states_[2];
  size_t forwards_ = 0;
};

// A weight that is handed whole is cut as one block: gate against gate, queries against the keys
// of other groups.
struct CutAsOneBlock final : LinearColumn {
  std::vector<int64_t> own_rows(const Case&, int64_t rows, int p, int r) const override {
    return rows_of_parts({rows}, p, r);
  }
};

// Every rank cuts the bias at rank 0's place.
struct BiasOfRankZero final : LinearColumn {
  std::vector<int64_t> own_bias_rows(const Case& line, int64_t rows, int p, int) const override {
    return own_rows(line, rows, p, 0);
  }
};

// The gathered output is used alike on all ranks, yet its backward sums their equal cotangents.
struct OutputGradientSummed final : LinearColumn {
  void split_output_gradient(Parallel& p, const View& whole, const View& own) override {
    p.tp.reduce_scatter(whole, own, last(whole));
  }
};

// The bias is handed back and added as well.
struct SkippedBiasAdded final : LinearColumn {
  std::unique_ptr<Saved> forward(Rank& rank, std::span<const View> inputs,
                                 std::span<const View> outputs) override {
    auto saved = LinearColumn::forward(rank, inputs, outputs);
    Parallel p(rank);
    const View without = p.workspace(outputs[0].dtype, outputs[0].shape);
    convert(outputs[0], without);
    add_row(without, inputs[2], outputs[0], p.accumulate);
    return saved;
  }
};

// Each microbatch's gradient is written over the sum: the last one remains.
struct SumOverwritten final : LinearColumn {
  void add_gradient(const View& own, const View& sum) override { convert(own, sum); }
};

// A gradient that is there is taken for complete: the first microbatch's remains.
struct SumAddedOnce final : LinearColumn {
  void add_gradient(const View& own, const View& sum) override {
    const std::vector<double> there = to_doubles(sum);
    if (std::all_of(there.begin(), there.end(), [](double v) { return v == 0; }))
      add_into(own, sum);
  }
};

// The sum is kept in the layer and never cleared: a step begins with the one before it.
class SumKeptInLayer final : public LinearColumn {
  void add_gradient(const View& own, const View& sum) override {
    std::vector<double>& kept = kept_[sum.shape];
    kept.resize(size_t(own.elements()));
    const std::vector<double> more = to_doubles(own);
    for (size_t i = 0; i < kept.size(); ++i) kept[i] += more[i];
    fill_from(sum, kept);
  }
  std::map<std::vector<int64_t>, std::vector<double>> kept_;  // w and b differ in shape
};

// ---- Row

// Partial products are rounded to bf16 and then summed at full precision.
struct RoundBeforeReduce final : RowParallel {
  void partial_product(Parallel& p, const View& x, const View& w, const View& z) override {
    RowParallel::partial_product(p, x, w, z);
    for (int64_t i = 0; i < z.elements(); ++i) {
      std::byte* element = z.flat(i);
      store(element, z.dtype, round_to(load(element, z.dtype), DType::bf16));
    }
  }
};

// The cotangent of all tokens is summed on every rank, then over the ranks again.
struct BiasGradientTimesP final : RowParallel {
  void bias_gradient(Parallel& p, const View&, const View& whole, const View& db) override {
    reduce_bias_gradient(p, whole, p.tp, db);
  }
};

// db is summed where the gradients of weights are: over dp in place of tp.
struct BiasSummedOverDp final : RowParallel {
  void bias_gradient(Parallel& p, const View& g, const View&, const View& db) override {
    reduce_bias_gradient(p, g, p.rank.along(Axis::dp), db);
  }
};

// db is summed over the ranks once a step, when the forward says that its microbatch is the last; a
// backward that comes after that forward sums what was summed again.
struct BiasGradientLocalInSteps final : RowParallel {
  void bias_gradient(Parallel& p, const View& g, const View& whole, const View& db) override {
    if (!p.rank.accumulates()) return RowParallel::bias_gradient(p, g, whole, db);
    column_sums(g, db, p.accumulate);
  }
};
class BiasReducedWithLastForward final : public LinearRow {
 public:
  BiasReducedWithLastForward() : LinearRow(std::make_unique<BiasGradientLocalInSteps>()) {}
  std::unique_ptr<Saved> forward(Rank& rank, std::span<const View> inputs,
                                 std::span<const View> outputs) override {
    if (rank.accumulates()) last_ = ++forwards_ % rank.line().at("microbatches") == 0;
    return LinearRow::forward(rank, inputs, outputs);
  }
  void backward(Rank& rank, Saved& saved, std::span<const View> cotangents,
                std::span<const View> gradients) override {
    LinearRow::backward(rank, saved, cotangents, gradients);
    if (!rank.accumulates() || !last_) return;
    const View &sum = gradients[2], own = rank.workspace(sum.dtype, sum.shape);
    copy(sum, own);
    rank.along(Axis::tp).all_reduce(own, sum);
  }

 private:
  int64_t forwards_ = 0;
  bool last_ = false;
};

void divided(const View& sums, int64_t by, const View& result) {
  std::vector<double> each = to_doubles(sums);
  for (double& value : each) value /= double(by);
  fill_from(result, each);
}

// Each rank adds b/p to its product, which sums to b; the gradient follows that division, though
// nobody sums it.
struct BiasSharesOfRanks final : RowParallel {
  void reduce_and_add_bias(Parallel& p, const View& z, const View& b, const View& y) override {
    const View share = p.workspace(p.accumulate, b.shape), biased = p.workspace(z.dtype, z.shape);
    divided(b, p.tp.size(), share);
    add_row(z, share, biased, p.accumulate);
    RowParallel::reduce_and_add_bias(p, biased, View{}, y);
  }
  void bias_gradient(Parallel& p, const View& g, const View& whole, const View& db) override {
    const View due = p.workspace(p.accumulate, db.shape);
    RowParallel::bias_gradient(p, g, whole, due);
    divided(due, p.tp.size(), db);
  }
};

// The mean over the ranks stands where the sum over their tokens is due.
struct BiasGradientAveraged final : RowParallel {
  void bias_gradient(Parallel& p, const View& g, const View&, const View& db) override {
    const View own = p.workspace(p.partial(), db.shape), mean = p.workspace(p.partial(), db.shape);
    column_sums(g, own, p.accumulate);
    all_reduce(p.rank, p.tp, own, mean, Reduce::avg);
    convert(mean, db);
  }
};

// Without sp every rank has seen all tokens, and db is summed all the same.
struct WholeBiasGradientSummed final : RowParallel {
  void bias_gradient(Parallel& p, const View& g, const View&, const View& db) override {
    reduce_bias_gradient(p, g, p.tp, db);
  }
};

// dX_r = gather(dY_s W_r) in place of gather(dY_s) W_r: each block meets another rank's columns.
struct GatherGemmSwapped final : RowParallel {
  void input_gradient(Parallel& p, const View& g, const View&, const View& w,
                      const View& dx) override {
    const View own = p.workspace(dx.dtype, with_extent(dx.shape, 0, g.shape[0]));
    gemm(plain(g), plain(w), own, p.accumulate);
    p.tp.all_gather(own, dx, 0);
  }
};

// ---- MLP

// A norm over the FFN dim with the statistics of the shard.
struct LocalStatistics final : Mlp {
  void mean_over_ffn(Parallel&, const View& sums, int64_t columns, const View& means,
                     Phase) override {
    divided(sums, columns, means);
  }
};

// The statistics of the forward are summed, the mean of the backward is not.
struct LocalStatisticsBackward final : Mlp {
  void mean_over_ffn(Parallel& p, const View& sums, int64_t columns, const View& means,
                     Phase phase) override {
    if (phase == Phase::forward) return Mlp::mean_over_ffn(p, sums, columns, means, phase);
    divided(sums, columns, means);
  }
};

struct MlpCutAsOneBlock final : Mlp {
  std::vector<int64_t> own_rows(const Case&, int64_t rows, int p, int r) const override {
    return rows_of_parts({rows}, p, r);
  }
};

// The tanh form where the exact one is meant: off by up to 4.73e-4.
struct TanhForExact final : Mlp {
  Activation pointwise_of(const Case&) const override { return Activation::gelu_tanh; }
};

// ---- What catches them

using controls::column_with;
using controls::Row;
using controls::row_with;
using controls::twin;

const Row rows[] = {
    {"linear_column", "frozen_skips_dx_reduce", column_with<FrozenSkipsReduce>, "gradient",
     "forward", "NVIDIA/Megatron-LM 5fffdfc", "tp=2 frozen=on", "frozen=on, sp=off, p >= 2"},
    {"linear_column", "dx_left_local", column_with<InputGradientLocal>,
     "adjoint,gradient,gradcheck", "forward",
     "an input used by each rank alone whose gradient is not summed", "tp=4", "p >= 2"},
    {"linear_column", "double_dx_reduce", column_with<InputGradientReducedTwice>,
     "adjoint,gradient", "forward", "both all-reduces of the input gradient present", "tp=4",
     "sp=off, p >= 2; ratio p"},
    {"linear_column", "ungathered_operand", column_with<UngatheredOperand>, "gradient", "forward",
     "NVIDIA/TransformerEngine 178", "tp=2 sp=on", "sp=on, p >= 2"},
    {"linear_column", "input_kept_in_layer", twin<InputKeptInLayer>, "accumulate",
     "forward,gradient,adjoint,repeat", "deepspeedai/DeepSpeed 2800, pytorch/pytorch 139404",
     "tp=2 sp=on", "two forwards in flight"},
    {"linear_column", "saved_state_pool_of_two", twin<StatesInTwoPlaces>, "accumulate",
     "forward,gradient,adjoint,repeat", "neighbour of input_kept_in_layer", "tp=2 sp=on",
     "three forwards in flight"},
    {"linear_column", "qkv_contiguous", twin<CutAsOneBlock>, "forward", "adjoint,ledger",
     "awslabs/slapo 46", "tp=2 heads=8 kv_heads=4 whole_weight=on", "p >= 2, kv_heads < heads"},
    {"linear_column", "fused_gate_up_contiguous", twin<CutAsOneBlock>, "forward", "adjoint,ledger",
     "NVIDIA/Megatron-LM 360", "tp=4 swiglu=on whole_weight=on", "p >= 2"},
    {"linear_column", "column_bias_of_rank_zero", twin<BiasOfRankZero>, "forward", "ledger",
     "Megatron layer exercises", "tp=2 whole_weight=on", "random bias"},
    {"linear_column", "gather_output_backward_reduces", twin<OutputGradientSummed>,
     "adjoint,gradient", "forward", "NVIDIA/Megatron-LM 8474e6e, THUDM/slime 1748",
     "tp=4 gather_output=on", "p >= 2; ratio p"},
    {"linear_column", "skipped_bias_added", twin<SkippedBiasAdded>, "forward", "ledger",
     "a bias left to the caller that the layer adds as well", "tp=2 skip_bias_add=on",
     "random bias"},

    {"linear_column", "wgrad_overwrites", twin<SumOverwritten>, "accumulate", "forward,gradient",
     "NVIDIA/Megatron-LM 6357", "tp=2 microbatches=2", "2 microbatches in one step"},
    {"linear_column", "wgrad_adds_once", twin<SumAddedOnce>, "accumulate", "forward,gradient",
     "NVIDIA/Megatron-LM 6357", "tp=2 microbatches=2", "2 microbatches in one step"},
    {"linear_column", "dirty_accumulator", twin<SumKeptInLayer>, "accumulate", "forward,gradient",
     "NVIDIA/Megatron-LM 4609", "tp=2 microbatches=2", "2 steps, compared after each"},

    {"linear_row", "bias_before_reduce", row_with<BiasBeforeReduce>, "forward", "ledger",
     "huggingface/text-generation-inference 1036", "tp=4", "bias as large as the output"},
    {"linear_row", "round_before_reduce", row_with<RoundBeforeReduce>, "forward",
     "gradient,ledger,replica", "NVIDIA/Megatron-LM 6624", "tp=4 in=64 dtype=f32 fill=normal",
     "fill=normal, K <= 512"},
    {"linear_row", "row_bias_gradient_times_p", row_with<BiasGradientTimesP>, "gradient",
     "forward,ledger,replica", "a bias gradient of all tokens, summed over the ranks again",
     "tp=4 sp=on", "sp=on"},
    {"linear_row", "bias_summed_over_dp", row_with<BiasSummedOverDp>, "gradient", "forward",
     "a replicated parameter reduced over the data-parallel axis alone", "tp=2 dp=2 sp=on",
     "tp=2 dp=2 sp=on"},
    {"linear_row", "row_bias_reduced_with_last_forward", twin<BiasReducedWithLastForward>,
     "accumulate", "forward,gradient,ledger,repeat", "meta-pytorch/torchrec 4758",
     "tp=2 sp=on microbatches=2", "all forwards of a step before its backwards"},
    {"linear_row", "row_bias_gradient_local", row_with<BiasGradientLocal>, "gradient,replica",
     "forward", "NVIDIA/Megatron-LM 20b7a54", "tp=4 sp=on", "sp=on"},
    {"linear_row", "row_bias_gradient_over_p", row_with<BiasSharesOfRanks>, "gradient,adjoint",
     "forward,replica,ledger", "pytorch/torchtitan 4332, pytorch/pytorch 110898", "tp=4",
     "p >= 2; ratio 1/p"},
    {"linear_row", "row_bias_gradient_averaged", row_with<BiasGradientAveraged>,
     "gradient,adjoint,ledger", "forward,replica", "EleutherAI/gpt-neox 1259", "tp=4 sp=on",
     "sp=on; ratio 1/p"},
    {"linear_row", "row_bias_gradient_summed_whole", row_with<WholeBiasGradientSummed>, "gradient",
     "forward,replica", "NVIDIA/Megatron-LM 2632", "tp=4", "sp=off, p >= 2; ratio p"},
    {"linear_row", "gather_gemm_swapped", row_with<GatherGemmSwapped>, "adjoint", "forward",
     "huggingface/nanotron 172", "tp=2 sp=on", "sp=on, p >= 2"},

    {"mlp", "ffn_norm_local_statistics", twin<LocalStatistics>, "forward", "replica",
     "Megatron layer exercises", "tp=4 between=norm_reduced", "p >= 2"},
    {"mlp", "ffn_norm_local_statistics_backward", twin<LocalStatisticsBackward>,
     "gradient,gradcheck", "forward,replica", "a statistic summed in forward and not in backward",
     "tp=4 between=norm_reduced", "p >= 2"},
    {"mlp", "fused_gate_up_contiguous", twin<MlpCutAsOneBlock>, "forward", "ledger,replica",
     "NVIDIA/Megatron-LM 360", "tp=4 activation=swiglu whole_weight=on", "p >= 2"},
    {"mlp", "gelu_tanh_for_exact", twin<TanhForExact>, "forward,gradient", "ledger,replica",
     "two formulas under one name", "tp=2", "f32 or f64"},
};

}  // namespace

void controls_linear(Registry& registry) { controls::add(registry, rows); }

}  // namespace shardproof
