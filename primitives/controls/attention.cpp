// Broken twins of context-parallel attention. Each replaces one step of the healthy core or of the
// ring; the comment above a twin names the mistake.
#include "primitives/attention.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "oracle/registry.hpp"
#include "primitives/controls/table.hpp"
#include "primitives/work.hpp"

namespace shardproof {
namespace {

using namespace primitives;

constexpr double infinity = std::numeric_limits<double>::infinity();

// ---- Positions, masks, scales, head maps: self-consistent, seen by the reference alone

// Tokens of a zigzag shard are taken for a block of the sequence.
struct ZigzagAsContiguous final : AttentionCore {
  static std::vector<Label> block_of(int64_t rows, int64_t first, const ContextLine& c, int rank) {
    ContextLine contiguous = c;
    contiguous.layout = "contiguous";
    return local_labels(contiguous, labels_of_sequence(rows, first), rank);
  }
  std::vector<Label> queries(const ContextLine& c, int rank) const override {
    return block_of(c.rows, c.key_rows - c.rows, c, rank);
  }
  std::vector<Label> keys(const ContextLine& c, int rank) const override {
    return block_of(c.key_rows, 0, c, rank);
  }
};

// A query does not see its own position.
struct StrictCausal final : AttentionCore {
  bool sees(const MaskRule& rule, const KeyBlock& b, const Label& q,
            const Label& k) const override {
    return AttentionCore::sees(rule, b, q, k) && k.position != q.position;
  }
};

// The mask is aligned at the first key and not at the last: j <= i in place of j <= i + Sk - Sq.
struct TopLeftCausal final : AttentionCore {
  std::vector<Label> queries(const ContextLine& c, int rank) const override {
    return local_labels(
        c, c.documents.empty() ? labels_of_sequence(c.rows, 0) : labels_of_documents(c), rank);
  }
};

// Heads are dealt to groups in turn.
struct HeadsInTurn final : AttentionCore {
  int64_t kv_head(const HeadShape& s, int64_t head) const override { return head % s.kv_heads; }
};

// 1/sqrt of the features of all heads.
struct ScaleByModelDim final : AttentionCore {
  double scale(const Case&, const HeadShape& s) const override {
    return 1 / std::sqrt(double(s.heads * s.key_dim));
  }
};

// Blocks of other ranks get the window on their local indices.
struct WindowOnLocalIndices final : AttentionCore {
  void mask(const MaskRule& rule, const KeyBlock& b, Values& bias) const override {
    if (b.owner == b.rank) return AttentionCore::mask(rule, b, bias);
    const MaskRule unlimited{rule.causal, {}};
    AttentionCore::mask(unlimited, b, bias);
    for (int64_t i = 0; i < int64_t(b.queries.size()); ++i)
      for (int64_t j = 0; j < int64_t(b.keys.size()); ++j) {
        const bool inside = (rule.window.left < 0 || i - j <= rule.window.left) &&
                            (rule.window.right < 0 || j - i <= rule.window.right);
        if (!inside) bias[size_t(i) * b.keys.size() + size_t(j)] = -infinity;
      }
  }
};

// Blocks of other ranks get no window.
struct WindowOnDiagonalOnly final : AttentionCore {
  void mask(const MaskRule& rule, const KeyBlock& b, Values& bias) const override {
    AttentionCore::mask(b.owner == b.rank ? rule : MaskRule{rule.causal, {}}, b, bias);
  }
};

// ---- Merging blocks

// (O, lse) of two sides as libraries merge them; the result is normalised.
struct Side {
  double lse, inverse;  // 1 / l
};
Side side(const Softmax& s, size_t at) {
  return s.l[at] == 0 ? Side{-infinity, 0} : Side{s.m[at] + std::log(s.l[at]), 1 / s.l[at]};
}

struct MergeOfNormalised : AttentionCore {
  struct Weights {
    double lse, sum, block;
  };
  virtual Weights weights(double sum, double block) const = 0;

  void merge(Softmax& sum, const Softmax& block, size_t at, size_t dv,
             const KeyBlock&) const override {
    const Side a = side(sum, at), b = side(block, at);
    const Weights w = weights(a.lse, b.lse);
    for (size_t c = at * dv; c < (at + 1) * dv; ++c)
      sum.a[c] = w.sum * a.inverse * sum.a[c] + w.block * b.inverse * block.a[c];
    sum.m[at] = w.lse;
    sum.l[at] = w.lse == -infinity ? 0 : 1;
  }
};

// Exponentials of the sums themselves: infinity over infinity from lse = 710 on.
struct RawExponentials final : MergeOfNormalised {
  Weights weights(double a, double b) const override {
    if (a == -infinity && b == -infinity) return {-infinity, 0, 0};
    const double total = std::exp(a) + std::exp(b);
    return {std::log(total), std::exp(a) / total, std::exp(b) / total};
  }
};

// Relative to the first side, whichever is larger.
struct RelativeToFirst final : MergeOfNormalised {
  Weights weights(double a, double b) const override {
    if (a == -infinity) return {b, 0, b == -infinity ? 0.0 : 1.0};
    const double lse = a + std::log(1 + std::exp(b - a));
    return {lse, std::exp(a - lse), std::exp(b - lse)};
  }
};

// Relative to the larger side, also where both are -inf.
struct BothEmptyUnguarded final : MergeOfNormalised {
  Weights weights(double a, double b) const override {
    const double greatest = std::max(a, b), least = std::min(a, b);
    const double lse = greatest + std::log1p(std::exp(least - greatest));
    return {lse, std::exp(a - lse), std::exp(b - lse)};
  }
};

// lse merged by a maximum, outputs by the weights that follow from it.
struct MergedByMaximum final : MergeOfNormalised {
  Weights weights(double a, double b) const override {
    if (a == -infinity && b == -infinity) return {-infinity, 0, 0};
    const double lse = std::max(a, b);
    return {lse, std::exp(a - lse), std::exp(b - lse)};
  }
};

// Outputs of blocks are averaged.
struct BlocksAveraged final : MergeOfNormalised {
  Weights weights(double a, double b) const override {
    if (a == -infinity) return {b, 0, b == -infinity ? 0.0 : 1.0};
    if (b == -infinity) return {a, 1, 0};
    const double greatest = std::max(a, b);
    return {greatest + std::log(std::exp(a - greatest) + std::exp(b - greatest)), 0.5, 0.5};
  }
};

// The maximum grows and what was accumulated before is not rescaled.
struct AccumulatorNotRescaled final : AttentionCore {
  void merge(Softmax& sum, const Softmax& block, size_t at, size_t dv,
             const KeyBlock& b) const override {
    const Values before(sum.a.begin() + int64_t(at * dv), sum.a.begin() + int64_t((at + 1) * dv));
    const double m = sum.m[at];
    AttentionCore::merge(sum, block, at, dv, b);
    if (m == -infinity || sum.m[at] == m) return;
    const double kept = std::exp(m - sum.m[at]);
    for (size_t c = 0; c < dv; ++c) sum.a[at * dv + c] += (1 - kept) * before[c];
  }
};
struct NothingRescaled final : AttentionCore {
  void merge(Softmax& sum, const Softmax& block, size_t at, size_t dv,
             const KeyBlock& b) const override {
    const Values before(sum.a.begin() + int64_t(at * dv), sum.a.begin() + int64_t((at + 1) * dv));
    const double m = sum.m[at], l = sum.l[at];
    AttentionCore::merge(sum, block, at, dv, b);
    if (m == -infinity || sum.m[at] == m) return;
    const double kept = std::exp(m - sum.m[at]);
    sum.l[at] += (1 - kept) * l;
    for (size_t c = 0; c < dv; ++c) sum.a[at * dv + c] += (1 - kept) * before[c];
  }
};

// ---- Statistics of the backward

// Each block with the lse, or the delta, that it has by itself.
struct BlockLocalLse final : AttentionCore {
  Statistics statistics(const AttentionPass& pass, const KeyBlock& b, const Statistics& merged,
                        std::span<const double> k, std::span<const double> v,
                        std::span<const double>) const override {
    return {pass.lse(pass.attend(b, k, v)), merged.delta};
  }
};
struct BlockLocalDelta final : AttentionCore {
  Statistics statistics(const AttentionPass& pass, const KeyBlock& b, const Statistics& merged,
                        std::span<const double> k, std::span<const double> v,
                        std::span<const double> g) const override {
    const Softmax own = pass.attend(b, k, v);
    return {merged.lse, pass.statistics(pass.output(own), pass.lse(own), g, {}).delta};
  }
};

// lse lies [heads, tokens]; blocks of later ranks read the second half of the tokens as if it were
// packed behind the middle of the buffer.
struct HalfLseView final : AttentionCore {
  Statistics statistics(const AttentionPass& pass, const KeyBlock& b, const Statistics& merged,
                        std::span<const double>, std::span<const double>,
                        std::span<const double>) const override {
    if (b.owner <= b.rank) return merged;
    const size_t heads = size_t(pass.shape.heads), tokens = b.queries.size(), half = tokens / 2;
    Values stored(merged.lse.size());
    for (size_t i = 0; i < tokens; ++i)
      for (size_t h = 0; h < heads; ++h) stored[h * tokens + i] = merged.lse[i * heads + h];
    Statistics read = merged;
    for (size_t i = half; i < tokens; ++i)
      for (size_t h = 0; h < heads; ++h)
        read.lse[i * heads + h] = stored[half + h * half + i - half];
    return read;
  }
};

// ---- The ring

// The last rotation and the last block are left out.
struct StepSkipped final : AttentionRing {
  int steps_forward(int ranks) const override { return std::max(1, ranks - 1); }
};

// Keys and values turn, every step multiplies the own ones.
struct StaleKeysBackward final : AttentionRing {
  bool multiplies_arrived() const override { return false; }
};

// dK, dV turn p-1 times: they end one rank short of home.
struct OneHopShort final : AttentionRing {
  int gradient_hop(int step, int ranks) const override { return step + 1 < ranks ? 1 : 0; }
};

// The last rotation goes to the other neighbour.
struct WrongOwner final : AttentionRing {
  int gradient_hop(int step, int ranks) const override { return step + 1 < ranks ? 1 : -1; }
};

// Only the gradient of the own queries is kept: nothing turns.
struct GradientsStay final : AttentionRing {
  void differentiate(ContextRank& c, const AttentionSaved& saved, const Incoming& in,
                     Outgoing& out) override {
    AttentionRing::differentiate(c, saved, in, out);
    const Values k = to_doubles(saved.k), v = to_doubles(saved.v);
    const auto labels = core_->keys(c.context, c.cp.rank());
    Values dq(out.q.size());
    std::fill(out.k.begin(), out.k.end(), 0), std::fill(out.v.begin(), out.v.end(), 0);
    saved.pass->add_gradients(saved.pass->block(labels, c.cp.rank(), c.cp.rank(), c.cp.size(), 0),
                              in.rows, k, v, in.g, dq, out.k, out.v);
  }
};

// Both rings turn the other way: every block is still visited.
struct RingReversed final : AttentionRing {
  int direction() const override { return -1; }
};

// ---- Views

View as_dense(const View& v) { return view_of(v.data, v.dtype, v.shape, v.space); }

// The cotangent is read as if it were dense: one that stands for a sum is one number at stride 0.
struct CotangentReadDensely final : AttentionRing {
  void backward(Rank& rank, Saved& saved, std::span<const View> cotangents,
                std::span<const View> gradients) override {
    const View dense[] = {as_dense(cotangents[0]), as_dense(cotangents[1])};
    AttentionRing::backward(rank, saved, dense, gradients);
  }
};

// Inputs are: heads that an expand repeats lie in memory once.
struct InputsReadDensely final : AttentionRing {
  std::unique_ptr<Saved> forward(Rank& rank, std::span<const View> inputs,
                                 std::span<const View> outputs) override {
    std::vector<View> dense;
    for (const View& v : inputs) dense.push_back(as_dense(v));
    return AttentionRing::forward(rank, dense, outputs);
  }
};

// ---- All-to-all

// Blocks are put together along the batch, and the buffer is read in the due shape.
struct AllToAllAlongBatch final : AttentionAllToAll {
  void tokens_for_heads(ContextRank& c, const View& by_tokens, const View& by_heads) override {
    std::vector<int64_t> shape = by_heads.shape;
    shape[0] /= c.cp.size(), shape[1] *= c.cp.size();
    c.cp.all_to_all(by_tokens, view_of(by_heads.data, by_heads.dtype, shape), 2, 1);
  }
};

// Ranks that were dealt a head more than heads/cp leave it out.
struct ExtraHeadDropped final : AttentionAllToAll {
  void tokens_for_heads(ContextRank& c, const View& by_tokens, const View& by_heads) override {
    AttentionAllToAll::tokens_for_heads(c, by_tokens, by_heads);
    const int dim = heads_dim(by_heads);
    const int64_t own = extent_from_end(by_heads, 2),
                  kept = extent_from_end(by_tokens, 2) / c.cp.size();
    if (own > kept) set_zero(by_heads.narrow(dim, kept, own - kept));
  }
};

// Counts are right, and rank r's heads are sent from r (heads/cp) on.
struct DisplacedByEqualShares final : AttentionAllToAll {
  void tokens_for_heads(ContextRank& c, const View& by_tokens, const View& by_heads) override {
    const int dim = heads_dim(by_tokens);
    const int64_t heads = extent_from_end(by_tokens, 2), p = c.cp.size();
    const View sent = c.rank.workspace(by_tokens.dtype, by_tokens.shape);
    int64_t at = 0, from = 0;
    for (int64_t n : shares(c, heads)) {
      copy(by_tokens.narrow(dim, from, n), sent.narrow(dim, at, n));
      at += n, from += heads / p;
    }
    AttentionAllToAll::tokens_for_heads(c, sent, by_heads);
  }
};

// Heads that come home lie rank by rank; the receiver takes the last ranks for those with one more.
struct RemainderReadAsLast final : AttentionAllToAll {
  void heads_for_tokens(ContextRank& c, const View& by_heads, const View& by_tokens) override {
    AttentionAllToAll::heads_for_tokens(c, by_heads, by_tokens);
    auto counts = shares(c, extent_from_end(by_tokens, 2));
    Values arrived;
    each_block(by_tokens, counts, [&](const View& block) {
      for (double x : to_doubles(block)) arrived.push_back(x);
    });
    std::reverse(counts.begin(), counts.end());
    std::span<const double> rest = arrived;
    each_block(by_tokens, counts, [&](const View& block) {
      write(block, rest.first(size_t(block.elements())));
      rest = rest.subspan(size_t(block.elements()));
    });
  }
  template <class F>
  static void each_block(const View& v, const std::vector<int64_t>& counts, F f) {
    int64_t at = 0;
    for (int64_t n : counts) f(v.narrow(heads_dim(v), at, n)), at += n;
  }
};

// A key head that ranks hold copies of gets the gradient of the first of them alone.
struct FirstCopyAlone final : AttentionAllToAll {
  void sum_of_copies(const ContextRank&, const View& wide, const View& gradient) override {
    const int dim = heads_dim(wide);
    const int64_t heads = extent_from_end(gradient, 2), copies = extent_from_end(wide, 2) / heads;
    for (int64_t h = 0; h < heads; ++h)
      convert(wide.narrow(dim, h * copies, 1), gradient.narrow(dim, h, 1));
  }
};

// ---- Hierarchical

// Runs that exchange heads are strided, {0,2} and {1,3}, positions are those of {0,1} and {2,3}.
struct InnerGroupStrided final : AttentionHierarchical {
  Communicator& run(ContextRank& c) override {
    return c.cp.across(c.cp.size() / int(c.line.at("inner")));
  }
  Communicator& ring(ContextRank& c) override {
    return c.cp.inner(c.cp.size() / int(c.line.at("inner")));
  }
};

// ---- What catches them

template <class Core>
std::unique_ptr<Kernel> ring_with() {
  return std::make_unique<AttentionRing>(std::make_unique<Core>());
}
template <class Core>
std::unique_ptr<Kernel> gather_with() {
  return std::make_unique<AttentionAllGather>(std::make_unique<Core>());
}
template <class Core>
std::unique_ptr<Kernel> alltoall_with() {
  return std::make_unique<AttentionAllToAll>(std::make_unique<Core>());
}

using controls::Row;
using controls::twin;

const char* const ring = "attention_ring";
const char* const gather = "attention_allgather";
const char* const alltoall = "attention_alltoall";
const char* const zigzag4documents = "cp=4 layout=zigzag mask=causal docs=7,1,8 kv_docs=5,3,12";
const char* const zigzag4 = "cp=4 layout=zigzag mask=causal";
const char* const uneven4 = "cp=4 layout=zigzag mask=causal tokens=16 heads=10 uneven_heads=on";
const char* const copies3 =
    "cp=3 layout=zigzag mask=causal tokens=12 "
    "heads=8 kv_heads=2 kv_replicate=on uneven_heads=on";

const Row rows[] = {
    {ring, "zigzag_as_contiguous", ring_with<ZigzagAsContiguous>, "forward,mask",
     "gradcheck,ledger", "NVIDIA/Megatron-LM 560", zigzag4,
     "causal or a window (full: equivalent)"},
    {gather, "zigzag_as_contiguous", gather_with<ZigzagAsContiguous>, "forward,mask",
     "gradcheck,ledger", "NVIDIA/Megatron-LM 560", zigzag4, "causal or a window"},
    {alltoall, "zigzag_as_contiguous", alltoall_with<ZigzagAsContiguous>, "forward,mask",
     "gradcheck,ledger", "NVIDIA/Megatron-LM 560", zigzag4, "causal or a window"},
    {ring, "lse_raw_exp", ring_with<RawExponentials>, "forward", "ledger",
     "NVIDIA/TransformerEngine 716, jzhang38/EasyContext 14", "cp=4 scale=600",
     "scores beyond the range of exp: 709 in f64, 88 in f32"},
    {ring, "lse_raw_exp_difference", ring_with<RelativeToFirst>, "forward", "ledger",
     "jzhang38/EasyContext 14", "cp=4 scale=600",
     "a later block louder than the first by more than 709"},
    {ring, "lse_both_empty", ring_with<BothEmptyUnguarded>, "forward,gradient", "ledger",
     "NVIDIA/TransformerEngine 1546", "cp=4 mask=causal kv_tokens=16",
     "a row that is empty in the accumulator and in the block: Sq > Sk, or padding"},
    {ring, "blocks_averaged", ring_with<BlocksAveraged>, "forward", "ledger",
     "a public suite's tolerance that admits it", zigzag4, "cp >= 2"},
    {ring, "lse_merged_by_max", ring_with<MergedByMaximum>, "forward", "ledger",
     "a logarithm of a sum taken for a maximum", zigzag4, "cp >= 2"},
    {ring, "no_rescale", ring_with<AccumulatorNotRescaled>, "forward", "ledger",
     "an online softmax whose maximum grows", zigzag4, "a row whose maximum grows"},
    {ring, "no_rescale_sum", ring_with<NothingRescaled>, "forward", "ledger",
     "an online softmax whose maximum grows", zigzag4, "a row whose maximum grows"},
    {ring, "block_local_lse", ring_with<BlockLocalLse>, "gradient", "forward,ledger",
     "tenstorrent/tt-metal 53205", zigzag4, "cp >= 2"},
    {ring, "block_local_delta", ring_with<BlockLocalDelta>, "gradient", "forward,ledger",
     "tenstorrent/tt-metal 53205", zigzag4, "cp >= 2"},
    {ring, "stale_kv_backward", twin<StaleKeysBackward>, "gradient", "forward,ledger",
     "huggingface/diffusers 14265", zigzag4, "cp >= 2"},
    {ring, "dkv_one_hop_short", twin<OneHopShort>, "gradient", "forward",
     "gradients that do not come home", zigzag4, "cp >= 2"},
    {ring, "dkv_wrong_owner", twin<WrongOwner>, "gradient", "forward",
     "gradients that go to the other neighbour", zigzag4, "cp >= 3"},
    {ring, "dkv_local_only", twin<GradientsStay>, "gradient", "forward,ledger",
     "a gradient of the own queries taken for the whole", zigzag4, "cp >= 2"},
    {ring, "half_lse_view", ring_with<HalfLseView>, "gradient", "forward,ledger",
     "NVIDIA/TransformerEngine 498", zigzag4, "zigzag causal, more than one head"},
    {ring, "ring_step_skipped", twin<StepSkipped>, "forward,coverage", "", "a loop over p-1 blocks",
     zigzag4, "full or zigzag (contiguous causal: the last rank only)"},
    {ring, "strict_causal", ring_with<StrictCausal>, "forward,mask", "gradcheck,ledger",
     "Dao-AILab/flash-attention 402", zigzag4, "causal"},
    {gather, "strict_causal", gather_with<StrictCausal>, "forward,mask", "gradcheck,ledger",
     "Dao-AILab/flash-attention 402", zigzag4, "causal"},
    {ring, "top_left_causal", ring_with<TopLeftCausal>, "forward,mask", "gradcheck,ledger",
     "Dao-AILab/flash-attention 402", "cp=2 mask=causal kv_tokens=64", "Sq != Sk, both signs"},
    {gather, "top_left_causal", gather_with<TopLeftCausal>, "forward,mask", "gradcheck,ledger",
     "Dao-AILab/flash-attention 402", "cp=2 mask=causal kv_tokens=16", "Sq != Sk, both signs"},
    {ring, "top_left_causal_packed", ring_with<TopLeftCausal>, "forward,mask", "gradcheck,ledger",
     "Dao-AILab/flash-attention 402", zigzag4documents, "Sq != Sk, both signs in one row"},
    {ring, "gqa_group_map", ring_with<HeadsInTurn>, "forward", "gradcheck,ledger",
     "NVIDIA/TransformerEngine 1044", zigzag4, "1 < kv_heads < heads"},
    {alltoall, "gqa_group_map", alltoall_with<HeadsInTurn>, "forward", "gradcheck,ledger",
     "NVIDIA/TransformerEngine 1044", "cp=2 layout=zigzag mask=causal heads=24 kv_heads=12",
     "1 < kv_heads < heads on the rank"},
    {ring, "window_per_block", ring_with<WindowOnLocalIndices>, "forward,mask", "gradcheck,ledger",
     "PrimeIntellect-ai/prime-rl 2828", "cp=4 mask=causal window=5,0", "left window < T - 1"},
    {ring, "window_lost_off_diagonal", ring_with<WindowOnDiagonalOnly>, "forward,mask",
     "gradcheck,ledger", "PrimeIntellect-ai/prime-rl 2828", "cp=4 mask=causal window=5,0",
     "left window < T - 1"},
    {ring, "scale_by_model_dim", ring_with<ScaleByModelDim>, "forward", "gradcheck,ledger",
     "deepspeedai/DeepSpeed, test reference of FPDT", zigzag4, "more than one head on the rank"},
    {alltoall, "a2a_axis_swapped", twin<AllToAllAlongBatch>, "forward", "ledger",
     "deepspeedai/Megatron-DeepSpeed 406", "cp=2 mask=causal seq=16 batch=3", "batch >= 2"},
    {alltoall, "extra_head_dropped", twin<ExtraHeadDropped>, "forward", "ledger",
     "a loop over heads/cp heads", uneven4, "heads that cp does not divide"},
    {alltoall, "displaced_by_equal_shares", twin<DisplacedByEqualShares>, "forward", "ledger",
     "displacements of an equal all-to-all beside unequal counts", uneven4,
     "heads that cp does not divide"},
    {alltoall, "remainder_read_as_last", twin<RemainderReadAsLast>, "forward", "ledger",
     "two sides that deal the heads left over to other ranks", uneven4,
     "heads that cp does not divide"},
    {alltoall, "copied_key_gradient_not_summed", twin<FirstCopyAlone>, "gradient", "forward,ledger",
     "copies of key heads that are taken for the heads", copies3,
     "kv_replicate=on, more than one copy"},
    {"attention_hierarchical", "inner_group_strided", twin<InnerGroupStrided>, "forward,ledger", "",
     "runs of ranks taken along the other axis of the same group", zigzag4,
     "cp=4, inner=2, causal or a window (full: ledger only)"},
    {ring, "expanded_cotangent_read_densely", twin<CotangentReadDensely>, "gradient",
     "forward,ledger", "Dao-AILab/flash-attention 355, facebookresearch/xformers 282",
     "cp=2 layout=zigzag mask=causal strides=expanded", "a cotangent of stride 0"},
    {ring, "expanded_input_read_densely", twin<InputsReadDensely>, "forward", "ledger",
     "Dao-AILab/flash-attention 355", "cp=2 layout=zigzag mask=causal strides=expanded_inputs",
     "an input of stride 0"},
    {ring, "ring_reversed_full_mask", twin<RingReversed>, "ledger", "forward,gradient",
     "a ring that turns the other way, right in value", "cp=4", "p >= 3", true},
};

}  // namespace

void controls_attention(Registry& registry) { controls::add(registry, rows); }

}  // namespace shardproof
