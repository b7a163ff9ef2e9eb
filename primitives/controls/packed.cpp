// Broken twins of what depends on where documents begin: attention over packed documents, rotary
// positions, the loss of next-token prediction. The comment above a twin names the mistake.
#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>

#include "oracle/registry.hpp"
#include "primitives/attention.hpp"
#include "primitives/calls.hpp"
#include "primitives/controls/table.hpp"
#include "primitives/loss_packed.hpp"
#include "primitives/rotary_context.hpp"
#include "primitives/token_loss.hpp"
#include "primitives/work.hpp"
#include "primitives/zigzag_exchange.hpp"

namespace shardproof {
namespace {

using namespace primitives;

// ---- Labels of attention

// A core whose queries and keys have other labels than they should.
struct OtherLabels : AttentionCore {
  virtual std::vector<Label> labels(const ContextLine&) const = 0;  // by row
  std::vector<Label> queries(const ContextLine& c, int rank) const override {
    return local_labels(c, labels(c), rank);
  }
  std::vector<Label> keys(const ContextLine& c, int rank) const override {
    return local_labels(c, labels(c), rank);
  }
};

// The row is taken for one sequence.
struct BoundaryDropped final : OtherLabels {
  std::vector<Label> labels(const ContextLine& c) const override {
    auto all = labels_of_documents(c);
    int64_t position = 0;
    for (Label& label : all)
      if (label.sequence >= 0) label = {0, position++};
    return all;
  }
};

// Token cu[k+1] is counted to document k.
struct BoundaryOffByOne final : OtherLabels {
  std::vector<Label> labels(const ContextLine& c) const override {
    auto all = labels_of_documents(c);
    for (Label& label : all)
      if (label.sequence > 0 && label.position == 0)
        label = {label.sequence - 1, c.documents[size_t(label.sequence - 1)]};
    return all;
  }
};

// Foreign documents are made unlikely, not left out.
template <int exponent>
struct FiniteBias final : AttentionCore {
  void mask(const MaskRule& rule, const KeyBlock& b, Values& bias) const override {
    AttentionCore::mask(rule, b, bias);
    for (size_t i = 0; i < b.queries.size(); ++i)
      for (size_t j = 0; j < b.keys.size(); ++j)
        if (b.queries[i].sequence >= 0 && b.keys[j].sequence >= 0 &&
            b.queries[i].sequence != b.keys[j].sequence)
          bias[i * b.keys.size() + j] = -std::pow(10.0, exponent);
  }
};

// Data cut document by document, read with the map of the whole row.
struct WholeRowMap final : AttentionCore {
  static std::vector<Label> read(const ContextLine& c, int rank) {
    const auto all = labels_of_documents(c);
    ContextLine row = c;
    row.layout = "zigzag_row";
    return local_labels(row, all, rank);
  }
  std::vector<Label> queries(const ContextLine& c, int rank) const override {
    return read(c, rank);
  }
  std::vector<Label> keys(const ContextLine& c, int rank) const override { return read(c, rank); }
};

// The length of a document is what cp divides of it.
struct LengthFloored final : OtherLabels {
  std::vector<Label> labels(const ContextLine& c) const override {
    auto all = labels_of_documents(c);
    for (Label& label : all)
      if (label.sequence >= 0 &&
          label.position >= c.documents[size_t(label.sequence)] / c.ranks * c.ranks)
        label = {};
    return all;
  }
};

// Padded lengths are taken for the real ones.
struct PaddedLengths final : OtherLabels {
  std::vector<Label> labels(const ContextLine& c) const override {
    ContextLine padded = c;
    for (int64_t& n : padded.documents) n = (n + 2 * c.ranks - 1) / (2 * c.ranks) * (2 * c.ranks);
    return labels_of_documents(padded);
  }
};

// A plan is kept by shape: rows and number of documents. The batch before this one held the same
// documents in the other order.
struct PlanByShape final : OtherLabels {
  std::vector<Label> labels(const ContextLine& c) const override {
    ContextLine earlier = c;
    std::reverse(earlier.documents.begin(), earlier.documents.end());
    plan(earlier);
    return plan(c);
  }
  const std::vector<Label>& plan(const ContextLine& c) const {
    const std::pair shape(c.rows, c.documents.size());
    const auto found = plans_.find(shape);
    return found != plans_.end() ? found->second
                                 : plans_.emplace(shape, labels_of_documents(c)).first->second;
  }
  mutable std::map<std::pair<int64_t, size_t>, std::vector<Label>> plans_;
};

// Keys are told apart by the offsets of the queries.
struct QueryOffsetsForKeys final : OtherLabels {
  std::vector<Label> labels(const ContextLine& c) const override { return labels_of_documents(c); }
};

// ---- Offsets as operands

// Offsets are taken as they come: nobody asks whether they begin at 0, rise and end with the
// tokens.
struct OffsetsUnchecked : AttentionRing {
  ContextLine accepted(const Case& line, std::span<const View> cu_seqlens) const override {
    ContextLine c(line);
    const auto offsets = as_read(cu_seqlens[0]);
    c.documents.clear();
    for (size_t d = 1; d < offsets.size(); ++d)
      c.documents.push_back(std::max<int64_t>(offsets[d] - offsets[d - 1], 0));
    c.key_documents = c.documents;
    return c;
  }
  virtual std::vector<int64_t> as_read(const View& cu_seqlens) const {
    return downloaded(cu_seqlens);
  }
};

// int64 offsets are read as int32: every second one is the upper half of a number.
struct OffsetsNarrow final : OffsetsUnchecked {
  std::vector<int64_t> as_read(const View& cu_seqlens) const override {
    View narrow = cu_seqlens;
    narrow.dtype = DType::i32;
    return downloaded(narrow);
  }
};

// ---- Rows of padding, rows beyond a plan

// Calls visit(row of the view, label) for the own tokens.
template <class Visit>
void each_row(Rank& rank, const View& v, const Visit& visit) {
  const ContextLine c(rank.line());
  const auto labels = AttentionCore().queries(c, rank.coordinate(Axis::cp));
  for (size_t i = 0; i < labels.size(); ++i) visit(v.narrow(0, int64_t(i), 1), labels[i]);
}

void leave_garbage(Rank& rank, const View& v) {
  each_row(rank, v, [](const View& row, const Label& label) {
    if (label.sequence < 0) fill_from(row, Values(size_t(row.elements()), 0.25));
  });
}

// Rows of padding keep what was in the buffer before.
struct PaddingOutputLeft final : AttentionRing {
  std::unique_ptr<Saved> forward(Rank& rank, std::span<const View> inputs,
                                 std::span<const View> outputs) override {
    auto saved = AttentionRing::forward(rank, inputs, outputs);
    leave_garbage(rank, outputs[0]);
    return saved;
  }
};
struct PaddingGradientLeft final : AttentionRing {
  void backward(Rank& rank, Saved& saved, std::span<const View> cotangents,
                std::span<const View> gradients) override {
    AttentionRing::backward(rank, saved, cotangents, gradients);
    for (const View& g : gradients) leave_garbage(rank, g);
  }
};

// Rows are written up to the length of the first document.
struct MaxSeqlenOfFirst final : AttentionRing {
  std::unique_ptr<Saved> forward(Rank& rank, std::span<const View> inputs,
                                 std::span<const View> outputs) override {
    const View o = rank.workspace(outputs[0].dtype, outputs[0].shape);
    const View due[] = {o, outputs[1]};
    auto saved = AttentionRing::forward(rank, inputs, due);
    const int64_t longest = ContextLine(rank.line()).documents.at(0);
    int64_t at = 0;
    each_row(rank, outputs[0], [&](const View& row, const Label& label) {
      if (label.position < longest) copy(o.narrow(0, at, 1), row);
      ++at;
    });
    return saved;
  }
};

// ---- Rotary positions

// Position ids run on across documents.
struct PositionsRunOn final : RotaryContext {
  std::vector<int64_t> positions(const ContextLine& c, int r) const override {
    const auto all = labels_of_documents(c);
    std::vector<int64_t> by_row(all.size());
    int64_t next = 0;
    for (size_t i = 0; i < all.size(); ++i)
      if (all[i].sequence >= 0) by_row[i] = next++;
    std::vector<int64_t> own;
    for (int64_t row : owned_rows(c, c.rows, r)) own.push_back(by_row[size_t(row)]);
    return own;
  }
};

// A table of sines as long as the first forward needed it: what lies behind is turned as its end.
class TableOfFirstForward final : public RotaryContext {
  std::vector<int64_t> positions(const ContextLine& c, int r) const override {
    std::vector<int64_t> list = RotaryContext::positions(c, r);
    if (end_ < 0) end_ = *std::max_element(list.begin(), list.end());
    for (int64_t& position : list) position = std::min(position, end_);
    return list;
  }
  mutable int64_t end_ = -1;
};

// Positions restart on each rank.
struct OffsetLost final : RotaryContext {
  std::vector<int64_t> positions(const ContextLine& c, int r) const override {
    std::vector<int64_t> own(RotaryContext::positions(c, r).size());
    for (size_t i = 0; i < own.size(); ++i) own[i] = int64_t(i) / c.batch;
    return own;
  }
};

// ---- Loss

// Masked tokens are counted.
struct MaskIgnored final : LossPacked {
  Targets targets(const Case& line, const ContextLine& c, int r, int64_t first) const override {
    Targets t = LossPacked::targets(line, c, r, first);
    std::fill(t.weights.begin(), t.weights.end(), 1);
    return t;
  }
};

// The next token is taken inside the local shard.
struct ShiftedAfterSplit final : LossPacked {
  Targets targets(const Case& line, const ContextLine& c, int r, int64_t first) const override {
    Targets t = LossPacked::targets(line, c, r, first);
    const auto rows = owned_rows(c, c.rows, r);
    for (size_t i = 0; i < rows.size(); ++i)
      if (t.next[i] >= 0) t.next[i] = i + 1 < rows.size() ? rows[i + 1] : -1;
    return t;
  }
};

// The last token of a document predicts the first of the next.
struct LabelCrossesDocument final : LossPacked {
  Targets targets(const Case& line, const ContextLine& c, int r, int64_t first) const override {
    Targets t = LossPacked::targets(line, c, r, first);
    const auto all = labels_of_documents(c);
    const auto rows = owned_rows(c, c.rows, r);
    for (size_t i = 0; i < rows.size(); ++i) {
      int64_t next = rows[i] + 1;
      while (next < c.rows && all[size_t(next)].sequence < 0) ++next;
      if (t.next[i] < 0 && all[size_t(rows[i])].sequence >= 0 && next < c.rows) t.next[i] = next;
    }
    return t;
  }
};

// Each rank divides by its own count, and the means are averaged.
struct MeanOfMeans final : LossPacked {
  double normalise(Rank& rank, const View& own, const View& sums, const View& loss) const override {
    Communicator& group = rank.along({Axis::cp, Axis::dp});
    const View mean = rank.workspace(DType::f64, {1}), all = rank.workspace(DType::f64, {1});
    convert(own, sums);
    perform(LossMean{tensor(own), tensor(mean)}, "a mean");
    all_reduce(rank, group, mean, all, Reduce::avg);
    convert(all, loss);
    return group.size();
  }
};

// cp is counted as data: the gradient is multiplied by it, to be undone by a mean that nobody
// takes.
struct LossTimesCp final : LossPacked {
  double normalise(Rank& rank, const View& own, const View& sums, const View& loss) const override {
    return LossPacked::normalise(rank, own, sums, loss) / rank.along(Axis::cp).size();
  }
};

// ---- Exchange of rows

// Documents are cut as one row.
struct DocumentsAsOneRow final : ZigzagExchange {
  std::vector<int64_t> rows_after(const ContextLine& c, int r) const override {
    ContextLine row = c;
    row.layout = "zigzag_row";
    return owned_rows(row, c.rows, r);
  }
};

// ---- What catches them

template <class Core>
std::unique_ptr<Kernel> ring_with() {
  return std::make_unique<AttentionRing>(std::make_unique<Core>());
}

using controls::Row;
using controls::twin;

const char* const ring = "attention_ring";
const char* const rotary = "rotary_context";
const char* const loss = "loss_packed";
const char* const exchange = "zigzag_exchange";
const char* const three = "cp=4 layout=zigzag mask=causal docs=7,1,8";

const Row rows[] = {
    {ring, "boundary_dropped", ring_with<BoundaryDropped>, "leak", "gradcheck,ledger",
     "NVIDIA/Megatron-LM 2357, huggingface/transformers 46634", three, "2 documents"},
    {ring, "boundary_off_by_one", ring_with<BoundaryOffByOne>, "leak", "gradcheck,ledger",
     "offsets of documents read as inclusive", three, "2 documents"},
    {ring, "finite_mask_bias", ring_with<FiniteBias<4>>, "leak", "",
     "foreign documents masked by adding -1e4", three, "2 documents, loud ones", true},
    {ring, "finite_mask_bias_1e9", ring_with<FiniteBias<9>>, "leak", "",
     "foreign documents masked by adding -1e9", three, "2 documents, loud ones", true},
    {ring, "zigzag_whole_row", ring_with<WholeRowMap>, "forward", "gradcheck,ledger",
     "NVIDIA-NeMo/Megatron-Bridge 5463", three, "2 documents of unequal lengths"},
    {ring, "length_floored_by_cp", ring_with<LengthFloored>, "forward", "gradcheck,ledger",
     "NVIDIA/TransformerEngine 1930", three, "a length that cp does not divide"},
    {ring, "padded_for_real_lengths", ring_with<PaddedLengths>, "forward", "ledger",
     "cu_seqlens_padded used as cu_seqlens (8 public reports)", three,
     "padding rows compared: O exactly 0, lse -inf"},
    {ring, "padding_output_not_zeroed", twin<PaddingOutputLeft>, "forward", "gradient,ledger",
     "NVIDIA/TransformerEngine", three, "a gap, finite garbage"},
    {ring, "padding_gradient_not_zeroed", twin<PaddingGradientLeft>, "gradient", "forward,ledger",
     "NVIDIA/TransformerEngine", three, "a gap, finite garbage"},
    {ring, "max_seqlen_too_small", twin<MaxSeqlenOfFirst>, "forward", "gradient,ledger",
     "zhuzilin/ring-flash-attention 78", "cp=2 layout=zigzag mask=causal docs=3,12",
     "the first document is the shorter one"},
    {ring, "metadata_cached", ring_with<PlanByShape>, "forward", "gradcheck,ledger",
     "NVIDIA/TransformerEngine, fused path", "cp=2 layout=zigzag mask=causal docs=5,7",
     "the second of two batches of one shape"},
    {ring, "query_offsets_for_keys", ring_with<QueryOffsetsForKeys>, "leak,forward",
     "gradcheck,ledger", "vllm-project/vllm-omni 3525", "cp=2 docs=7,1,8 kv_docs=5,3,8",
     "documents with other counts of keys than of queries"},
    {ring, "offsets_unchecked", twin<OffsetsUnchecked>, "rejection", "",
     "a packing that ends short, taken as it comes", "cp=2 cu_seqlens=0,7,8,15 tokens=16 index=i32",
     "malformed cu_seqlens as operands"},
    {ring, "offsets_in_32_bits", twin<OffsetsNarrow>, "forward", "ledger",
     "int64 cu_seqlens in a kernel of int32", "cp=2 docs=7,1,8 index=i64", "index=i64"},

    {rotary, "positions_not_reset", twin<PositionsRunOn>, "forward", "gradcheck",
     "NVIDIA/Megatron-LM 5243", "cp=4 layout=zigzag docs=7,1,8", "2 documents"},
    {rotary, "rope_table_of_first_forward", twin<TableOfFirstForward>, "repeat",
     "forward,gradient,ledger",
     "deepspeedai/Megatron-DeepSpeed 410, THUDM/SwissArmyTransformer 165", "cp=2",
     "a kernel object that has served fewer tokens"},
    {rotary, "rope_offset_lost", twin<OffsetLost>, "forward", "gradcheck",
     "NVIDIA/Megatron-LM 5243", "cp=4", "cp >= 2"},

    {exchange, "zigzag_whole_row", twin<DocumentsAsOneRow>, "forward", "adjoint",
     "NVIDIA-NeMo/Megatron-Bridge 5463", "cp=4 docs=7,1,8", "2 documents of unequal lengths"},

    {loss, "loss_mask_ignored", twin<MaskIgnored>, "forward,gradient", "gradcheck,ledger",
     "NVIDIA/Megatron-LM 7452 (9)", "cp=4 layout=zigzag docs=7,1,8", "one masked token"},
    {loss, "mean_of_means", twin<MeanOfMeans>, "forward,gradient", "", "NVIDIA/Megatron-LM 7513",
     "cp=4 layout=zigzag docs=7,1,8", "unequal valid counts"},
    {loss, "loss_times_cp", twin<LossTimesCp>, "gradient", "forward,ledger",
     "NVIDIA/Megatron-LM 906", "cp=4 layout=zigzag docs=7,1,8", "cp >= 2; ratio cp"},
    {loss, "labels_shifted_after_split", twin<ShiftedAfterSplit>, "forward", "gradcheck",
     "huggingface/transformers 36607", "cp=4 layout=zigzag docs=7,1,8",
     "token ids distinct at the seams"},
    {loss, "label_crosses_document", twin<LabelCrossesDocument>, "forward", "gradcheck,ledger",
     "pytorch/torchtitan 4075", "cp=4 layout=zigzag docs=7,1,8", "2 documents"},
};

}  // namespace

void controls_packed(Registry& registry) { controls::add(registry, rows); }

}  // namespace shardproof
