// Broken twins of layers whose state crosses ranks: convolutions that read their neighbours' rows,
// recurrences whose state goes on. The comment above a twin names the mistake.
#include <algorithm>
#include <cstdlib>
#include <map>
#include <numeric>

#include "oracle/registry.hpp"
#include "primitives/calls.hpp"
#include "primitives/controls/sums.hpp"
#include "primitives/controls/table.hpp"
#include "primitives/conv_context.hpp"
#include "primitives/scan_context.hpp"

namespace shardproof {
namespace {

using namespace controls;
using namespace primitives;

using List = std::vector<int64_t>;

List from_to(int64_t first, int64_t behind) {
  List list;
  for (int64_t i = first; i < behind; ++i) list.push_back(i);
  return list;
}
List turned(List list) {
  std::reverse(list.begin(), list.end());
  return list;
}
View copy_of(Rank& rank, const View& v) {
  const View to = rank.workspace(v.dtype, v.shape);
  convert(v, to);
  return to;
}
void fill(const View& v, double value) {
  for (int64_t i = 0; i < v.elements(); ++i) store(v.flat(i), v.dtype, value);
}

// The packed row is taken for one sequence: nothing is reset where a document begins.
List along_the_row(const ContextLine& c, int r) {
  List list = tokens_before(c, r);
  for (size_t i = 0; i < list.size(); ++i)
    if (list[i] >= 0) list[i] = r * int64_t(list.size()) / c.batch + int64_t(i) / c.batch;
  return list;
}
// A document that begins with a rank's first token is taken to go on from the rank before.
List going_on_at_the_border(const ContextLine& c, int r) {
  List list = tokens_before(c, r);
  if (r == 0 || list[0] != 0) return list;
  for (int64_t i = 0; i < int64_t(list.size()) && list[size_t(i)] == i; ++i)
    list[size_t(i)] += int64_t(list.size());
  return list;
}

// ---- Rows of the neighbours

View halo_rows(const Halo& halo, const View& all) { return all.narrow(0, 0, halo.reach); }

// Every rank begins with zeros.
struct HaloMissing final : ConvContext {
  void fetch(Rank&, const Halo& halo, const View& all) override { set_zero(halo_rows(halo, all)); }
};

// A shift in the wrong direction.
struct HaloFromRight final : ConvContext {
  void fetch(Rank& rank, const Halo& halo, const View& all) override {
    set_zero(halo_rows(halo, all));
    ConvContext::fetch(rank, halo, all);
  }
  View exchanged(Rank& rank, const Halo& halo, const View& rows, int hop) override {
    return ConvContext::exchanged(rank, halo, rows, -std::abs(hop));
  }
};

// width - 2 rows are fetched.
struct HaloOneRowShort final : ConvContext {
  void fetch(Rank& rank, const Halo& halo, const View& all) override {
    ConvContext::fetch(rank, halo, all);
    set_zero(all.narrow(0, 0, 1));
  }
};

// The halo is received into a buffer that only the first forward fills.
class HaloOfFirstForward final : public ConvContext {
  void fetch(Rank& rank, const Halo& halo, const View& all) override {
    ConvContext::fetch(rank, halo, all);
    const View own = halo_rows(halo, all);
    const auto [kept, fresh] = buffers_.try_emplace(own.elements(), own.dtype, own.shape);
    fresh ? convert(own, kept->second.view()) : convert(kept->second.view(), own);
  }
  std::map<int64_t, Kept> buffers_;
};

// One neighbour is asked, however few rows it has.
struct OneNeighbourOnly final : ConvContext {
  void fetch(Rank& rank, const Halo& halo, const View& all) override {
    set_zero(halo_rows(halo, all));
    ConvContext::fetch(rank, halo, all);
  }
  View exchanged(Rank& rank, const Halo& halo, const View& rows, int hop) override {
    return hop > 1 ? rows.narrow(0, 0, 0) : ConvContext::exchanged(rank, halo, rows, hop);
  }
};

// Rows of several neighbours lie the nearest first.
struct NearestRowsFirst final : ConvContext {
  void fetch(Rank& rank, const Halo& halo, const View& all) override {
    ConvContext::fetch(rank, halo, all);
    const View right = copy_of(rank, halo_rows(halo, all));
    int64_t at = 0;
    for (int hop = 1; hop <= halo.hops(); at += halo.rows(hop), ++hop)
      convert(right.narrow(0, halo.first(hop), halo.rows(hop)), all.narrow(0, at, halo.rows(hop)));
  }
};

// rows[-0:] are all rows: a filter of width 1 sends the whole block.
struct WholeBlockAtWidthOne final : ConvContext {
  void fetch(Rank& rank, const Halo& halo, const View& all) override {
    if (halo.reach > 0) return ConvContext::fetch(rank, halo, all);
    exchanged(rank, halo, copy_of(rank, all), 1);
  }
};

struct ConvAcrossDocuments final : ConvContext {
  List reach(const ContextLine& c, int r) const override { return along_the_row(c, r); }
};
struct ConvGoingOnAtTheBorder final : ConvContext {
  List reach(const ContextLine& c, int r) const override { return going_on_at_the_border(c, r); }
};

// Every document but the first begins one token late.
struct BeginningOffByOne final : ConvContext {
  List reach(const ContextLine& c, int r) const override {
    List list = tokens_before(c, r);
    const auto labels = local_labels(c, labels_of_documents(c), r);
    for (size_t i = 0; i < list.size(); ++i)
      if (labels[i].sequence > 0) ++list[i];
    return list;
  }
};

// Rows of padding are filtered like tokens.
struct PaddingFiltered final : ConvContext {
  List reach(const ContextLine& c, int r) const override {
    List list = tokens_before(c, r);
    for (int64_t& before : list) before = std::max<int64_t>(before, 0);
    return list;
  }
};

// What the right neighbours made of the own rows is not sent back.
struct HaloNotGivenBack final : ConvContext {
  void give_back(Rank&, const Halo&, const View&) override {}
};

// Gradients of a halo go elsewhere.
struct GivenToTheRight final : ConvContext {
  View exchanged(Rank& rank, const Halo& halo, const View& rows, int hop) override {
    return ConvContext::exchanged(rank, halo, rows, std::abs(hop));
  }
};
struct GivenOneRankTooFar final : ConvContext {
  View exchanged(Rank& rank, const Halo& halo, const View& rows, int hop) override {
    return ConvContext::exchanged(rank, halo, rows, hop < 0 ? hop - 1 : hop);
  }
};
// Or arrive in another way.
struct OverwritesOwnGradient final : ConvContext {
  void add_back(const Halo& halo, const View& arrived, const View& all) const override {
    convert(arrived, last_rows(halo, all, arrived.shape[0]));
  }
};
struct AddedToFirstRows final : ConvContext {
  void add_back(const Halo& halo, const View& arrived, const View& all) const override {
    add_into(arrived, all.narrow(0, halo.reach, arrived.shape[0]));
  }
};

// The filter's gradient leaves out the rows that came from elsewhere.
struct FilterGradientWithoutHalo final : ConvContext {
  View seen(Rank& rank, const Halo& halo, const View& all) const override {
    const View own = copy_of(rank, all);
    set_zero(halo_rows(halo, own));
    return own;
  }
};

// Channels are cut over tp, and their gradients are summed over it.
struct SummedOverTp final : ConvContext {
  std::vector<Axis> summed_over(const Case& line) const override {
    auto axes = ConvContext::summed_over(line);
    axes.insert(axes.begin(), Axis::tp);
    return axes;
  }
};

// ---- The state of the ranks before

struct NothingBefore final : ScanContext {
  List before(int, int) const override { return {}; }
};
struct OwnStateToo final : ScanContext {
  List before(int r, int) const override { return from_to(0, r + 1); }
};
struct AllButTheLast final : ScanContext {
  List before(int r, int) const override { return from_to(0, std::max(r - 1, 0)); }
};
struct FirstRankOnly final : ScanContext {
  List before(int r, int) const override { return from_to(0, std::min(r, 1)); }
};
struct NeighbourOnly final : ScanContext {
  List before(int r, int) const override { return from_to(std::max(r - 1, 0), r); }
};
struct FromTheRight final : ScanContext {
  List before(int r, int p) const override { return behind(r, p); }
};
struct OrderTurned final : ScanContext {
  List before(int r, int p) const override { return turned(ScanContext::before(r, p)); }
};
struct NothingBehind final : ScanContext {
  List behind(int, int) const override { return {}; }
};
struct OwnCotangentToo final : ScanContext {
  List behind(int r, int p) const override { return turned(from_to(r, p)); }
};
struct AllButTheNext final : ScanContext {
  List behind(int r, int p) const override { return turned(from_to(std::min(r + 2, p), p)); }
};
struct OrderBackTurned final : ScanContext {
  List behind(int r, int p) const override { return turned(ScanContext::behind(r, p)); }
};

// States are added up as they are.
template <bool back>
struct Undecayed final : ScanContext {
  void fold(Rank& rank, const Summaries& all, const List& chain, const View& state,
            bool backward) override {
    const View ones = copy_of(rank, all.decays);
    if (backward == back) fill(ones, 1);
    ScanContext::fold(rank, {all.parts, ones}, chain, state, backward);
  }
};

// A state is multiplied by the decays of the block that made it, not of those that it goes through.
struct DecaysOfTheRankBefore final : ScanContext {
  void fold(Rank& rank, const Summaries& all, const List& chain, const View& state,
            bool backward) override {
    const View late = copy_of(rank, all.decays);
    const int64_t p = late.shape[0];
    if (!backward) convert(all.decays.narrow(0, 0, p - 1), late.narrow(0, 1, p - 1));
    ScanContext::fold(rank, {all.parts, late}, chain, state, backward);
  }
};

// The state that enters is taken through the last block once more.
struct DecayedTwice final : ScanContext {
  void fold(Rank& rank, const Summaries& all, const List& chain, const View& state,
            bool backward) override {
    ScanContext::fold(rank, all, chain, state, backward);
    if (backward || chain.empty()) return;
    const View decays = all.decays.narrow(0, chain.back(), 1);
    const int64_t n = state.elements() / decays.elements();
    for (int64_t i = 0; i < state.elements(); ++i)
      store(state.flat(i), state.dtype,
            load(state.flat(i), state.dtype) * load(decays.flat(i / n), decays.dtype));
  }
};

View without_first(Rank& rank, const View& a) {
  const View own = copy_of(rank, a);
  fill(own.narrow(0, 0, 1), 1);
  return own;
}
// The product of a block's decays begins with its second token.
struct ProductOneTokenShort final : ScanContext {
  View decays_handed_on(Rank& rank, const View& a) const override { return without_first(rank, a); }
};
// The state that enters meets the first token undecayed.
struct FirstDecayLeftOut final : ScanContext {
  View decays(Rank& rank, const View& a) const override { return without_first(rank, a); }
};

// A block's decays are multiplied on where a document begins in it.
struct ProductAcrossDocuments final : ScanContext {
  List passes(const ContextLine& c) const override { return List(size_t(c.ranks), 1); }
};
struct ScanAcrossDocuments final : ScanContext {
  List reach(const ContextLine& c, int r) const override { return along_the_row(c, r); }
  List passes(const ContextLine& c) const override { return List(size_t(c.ranks), 1); }
};
struct ScanGoingOnAtTheBorder final : ScanContext {
  List reach(const ContextLine& c, int r) const override { return going_on_at_the_border(c, r); }
};

// The last state of a forward is where the next one begins.
class BeginsWithLastState final : public ScanContext {
  List reach(const ContextLine& c, int r) const override {
    List list = tokens_before(c, r);
    if (r == 0) list[0] = 1;
    return list;
  }
  void fold(Rank& rank, const Summaries& all, const List& chain, const View& state,
            bool backward) override {
    ScanContext::fold(rank, all, chain, state, backward);
    if (backward) return;
    const auto [kept, fresh] = last_.try_emplace(state.elements(), state.dtype, state.shape);
    if (!fresh && chain.empty()) convert(kept->second.view(), state);
    ScanContext::fold(rank, all, from_to(0, all.parts.shape[0]), kept->second.view(), false);
  }
  std::map<int64_t, Kept> last_;
};

// The states of a forward lie in the layer, where the next forward puts its own.
class StatesInTheLayer final : public ScanContext {
 public:
  std::unique_ptr<Saved> forward(Rank& rank, std::span<const View> inputs,
                                 std::span<const View> outputs) override {
    last_ = ScanContext::forward(rank, inputs, outputs);
    return std::make_unique<Saved>();
  }
  void backward(Rank& rank, Saved&, std::span<const View> cotangents,
                std::span<const View> gradients) override {
    ScanContext::backward(rank, *last_, cotangents, gradients);
  }

 private:
  std::unique_ptr<Saved> last_;
};

// What the first token's decay multiplies is taken for 0.
struct DecayGradientWithoutState final : ScanContext {
  View state_before(Rank& rank, const View& entering) const override {
    const View zeros = rank.workspace(entering.dtype, entering.shape);
    set_zero(zeros);
    return zeros;
  }
};

// States are rounded to the type of activations on their way.
template <bool back>
struct InStorageType final : ScanContext {
  void gather(Rank& rank, const View& own, const View& all, bool backward) override {
    const View narrow = rank.workspace(rank.line().dtype(), own.shape),
               rounded = rank.workspace(own.dtype, own.shape);
    convert(own, narrow);
    convert(narrow, rounded);
    ScanContext::gather(rank, backward == back ? rounded : own, all, backward);
  }
};

// ---- What catches them

const char* const conv = "conv_context";
const char* const scan = "scan_context";
// Three ranks: with two, left and right neighbour are the same, and no state passes a rank.
const char* const rows_of_three = "cp=3 tokens=12 channels=2";
const char* const states_of_three = "cp=3 tokens=12 heads=2";
const char* const few = "cp=4 tokens=8 channels=2";
const char* const border = "cp=2 docs=5,1,6 channels=2";
const char* const state_border = "cp=2 docs=5,1,6 heads=2";

const Row rows[] = {
    {conv, "halo_missing", twin<HaloMissing>, "forward,ledger", "", "state-spaces/mamba 597",
     rows_of_three, "cp >= 2"},
    {conv, "halo_from_right", twin<HaloFromRight>, "forward,ledger", "",
     "open-lm-engine/lm-engine 451: a permutation of ranks", rows_of_three, "cp >= 2"},
    {conv, "halo_one_row_short", twin<HaloOneRowShort>, "forward", "ledger",
     "fla-org/flash-linear-attention 774", rows_of_three, "cp >= 2"},
    {conv, "halo_of_first_forward", twin<HaloOfFirstForward>, "accumulate",
     "forward,gradient,ledger", "a receive buffer kept by shape", rows_of_three,
     "a second forward on other data"},
    {conv, "halo_of_one_neighbour", twin<OneNeighbourOnly>, "forward,ledger", "",
     "fla-org/flash-linear-attention 1254, 1140", few, "fewer rows on a rank than width - 1"},
    {conv, "halo_nearest_first", twin<NearestRowsFirst>, "forward", "ledger",
     "fla-org/flash-linear-attention 1140", few, "rows of two neighbours"},
    {conv, "halo_at_width_one", twin<WholeBlockAtWidthOne>, "ledger", "forward,gradient",
     "fla-org/flash-linear-attention 1211", "cp=3 tokens=12 channels=2 width=1", "width=1"},
    {conv, "conv_across_documents", twin<ConvAcrossDocuments>, "leak,forward", "gradcheck,ledger",
     "PrimeIntellect-ai/prime-rl 3000, huggingface/transformers 46588", border, "2 documents"},
    {conv, "conv_beyond_border", twin<ConvGoingOnAtTheBorder>, "leak,forward", "gradcheck,ledger",
     "pytorch/torchtitan 3892, meta-pytorch/attention-gym 416", border,
     "a document that begins with a rank's first token"},
    {conv, "conv_boundary_off_by_one", twin<BeginningOffByOne>, "leak,forward", "gradcheck,ledger",
     "offsets of documents read as inclusive", border, "2 documents"},
    {conv, "conv_of_padding", twin<PaddingFiltered>, "forward", "ledger",
     "a convolution over the padded row", "cp=3 docs=6,4 channels=2", "rows of padding"},
    {conv, "halo_not_given_back", twin<HaloNotGivenBack>, "gradient,adjoint,ledger", "forward",
     "state-spaces/mamba 597: and in reverse for the backward", rows_of_three, "cp >= 2"},
    {conv, "halo_given_to_right", twin<GivenToTheRight>, "gradient,adjoint,ledger", "forward",
     "open-lm-engine/lm-engine 451", rows_of_three, "cp >= 2"},
    {conv, "halo_given_too_far", twin<GivenOneRankTooFar>, "gradient,adjoint,ledger", "forward",
     "a hop counted from 1", rows_of_three, "cp >= 3"},
    {conv, "halo_gradient_overwrites", twin<OverwritesOwnGradient>, "gradient,adjoint",
     "forward,ledger", "fla-org/flash-linear-attention 714", rows_of_three, "cp >= 2"},
    {conv, "halo_gradient_to_first_rows", twin<AddedToFirstRows>, "gradient,adjoint",
     "forward,ledger", "fla-org/flash-linear-attention 1140", rows_of_three,
     "more rows than width - 1"},
    {conv, "filter_gradient_without_halo", twin<FilterGradientWithoutHalo>, "gradient,adjoint",
     "forward,replica,ledger", "fla-org/flash-linear-attention 568", rows_of_three, "cp >= 2"},
    {conv, "filter_gradient_not_summed", twin<GradientLocal<ConvContext>>,
     "replica,gradient,ledger", "forward", "Megatron CP groups", rows_of_three, "cp >= 2"},
    {conv, "filter_gradient_averaged", twin<GradientAveraged<ConvContext>>, "gradient,adjoint",
     "forward,replica", "EleutherAI/gpt-neox 1259", rows_of_three, "cp >= 2; ratio 1/cp"},
    {conv, "filter_gradient_summed_over_tp", twin<SummedOverTp>, "gradient,ledger", "forward",
     "channels cut over tp, summed like what all ranks of tp hold",
     "cp=2 tp=2 tokens=12 channels=2", "tp >= 2"},
    {conv, "filter_gradient_not_summed_over_cp", twin<NotSummedOverCp<ConvContext>>,
     "replica,gradient", "forward", "Megatron CP groups", "cp=2 dp=2 seq=8 batch=2 channels=2",
     "cp >= 2, dp >= 2"},
    {conv, "bias_gradient_left_out", twin<LastLeftOut<ConvContext>>, "replica,gradient", "forward",
     "a list of parameters kept by hand", rows_of_three, "cp >= 2"},

    {scan, "state_dropped", twin<NothingBefore>, "forward", "ledger", "state-spaces/mamba 597",
     states_of_three, "cp >= 2"},
    {scan, "state_of_own_rank_too", twin<OwnStateToo>, "forward", "ledger",
     "an inclusive scan over ranks in place of an exclusive one", states_of_three, "cp >= 2"},
    {scan, "state_one_rank_short", twin<AllButTheLast>, "forward", "ledger",
     "a prefix of ranks that ends one too early", states_of_three, "cp >= 2"},
    {scan, "state_of_first_rank", twin<FirstRankOnly>, "forward", "ledger",
     "a broadcast in place of a chain", states_of_three, "cp >= 3"},
    {scan, "state_of_neighbour", twin<NeighbourOnly>, "forward", "ledger",
     "fla-org/flash-linear-attention 626: local states sent on before they are whole",
     states_of_three, "cp >= 3"},
    {scan, "state_from_right", twin<FromTheRight>, "forward", "ledger",
     "a ring that is turned the other way", states_of_three, "cp >= 2"},
    {scan, "states_in_reverse", twin<OrderTurned>, "forward", "ledger",
     "meta-pytorch/attention-gym 453: summaries of ranks are no commutative sum", states_of_three,
     "cp >= 3"},
    {scan, "state_not_decayed", twin<Undecayed<false>>, "forward", "ledger",
     "vllm-project/vllm 21783", states_of_three, "cp >= 3"},
    {scan, "state_decayed_by_rank_before", twin<DecaysOfTheRankBefore>, "forward", "ledger",
     "vllm-project/vllm 21783", states_of_three, "cp >= 3"},
    {scan, "state_decayed_twice", twin<DecayedTwice>, "forward", "ledger",
     "vllm-project/vllm 21783", states_of_three, "cp >= 2"},
    {scan, "decay_of_first_token_left_out", twin<FirstDecayLeftOut>, "forward,gradient", "ledger",
     "vllm-project/vllm 23279: a cumulative sum from the wrong token", states_of_three, "cp >= 2"},
    {scan, "decay_product_one_short", twin<ProductOneTokenShort>, "forward", "ledger",
     "vllm-project/vllm 23279: a cumulative sum from the wrong token", states_of_three, "cp >= 3"},
    {scan, "decay_product_across_documents", twin<ProductAcrossDocuments>, "leak,forward", "ledger",
     "vllm-project/vllm 23279", "cp=3 docs=6,6 heads=2",
     "a document that begins inside of a block and goes on behind it"},
    {scan, "scan_across_documents", twin<ScanAcrossDocuments>, "leak,forward", "gradcheck,ledger",
     "PrimeIntellect-ai/prime-rl 3000, NovaSky-AI/SkyRL 2056", state_border, "2 documents"},
    {scan, "scan_beyond_border", twin<ScanGoingOnAtTheBorder>, "leak,forward", "gradcheck,ledger",
     "PrimeIntellect-ai/prime-rl 3000: local boundaries are insufficient", state_border,
     "a document that begins with a rank's first token"},
    {scan, "state_of_earlier_forward", twin<BeginsWithLastState>, "repeat", "forward,ledger",
     "a cache of states that is not cleared between batches", states_of_three, "two calls"},
    {scan, "states_shared_by_forwards", twin<StatesInTheLayer>, "accumulate",
     "forward,gradient,adjoint,ledger", "deepspeedai/DeepSpeed 2800, pytorch/pytorch 139404",
     states_of_three, "two forwards in flight"},
    {scan, "state_in_storage_type", twin<InStorageType<false>>, "forward", "ledger",
     "fla-org/flash-linear-attention 626: states travel in float32",
     "cp=4 dtype=bf16 fill=normal v_dim=5", "bf16, rounding data"},
    {scan, "cotangent_not_passed", twin<NothingBehind>, "gradient,adjoint", "forward,ledger",
     "a final state that is detached", states_of_three, "cp >= 2"},
    {scan, "cotangent_of_own_rank_too", twin<OwnCotangentToo>, "gradient,adjoint", "forward,ledger",
     "an inclusive scan over ranks in place of an exclusive one", states_of_three, "cp >= 2"},
    {scan, "cotangent_one_rank_short", twin<AllButTheNext>, "gradient,adjoint", "forward,ledger",
     "a suffix of ranks that begins one too late", states_of_three, "cp >= 2"},
    {scan, "cotangents_in_reverse", twin<OrderBackTurned>, "gradient,adjoint", "forward,ledger",
     "meta-pytorch/attention-gym 453: the mirror image of the forward", states_of_three, "cp >= 3"},
    {scan, "cotangent_not_decayed", twin<Undecayed<true>>, "gradient,adjoint", "forward,ledger",
     "meta-pytorch/attention-gym 453", states_of_three, "cp >= 3"},
    {scan, "cotangent_in_storage_type", twin<InStorageType<true>>, "gradient", "forward,ledger",
     "fla-org/flash-linear-attention 626: states travel in float32",
     "cp=4 dtype=bf16 fill=normal v_dim=5", "bf16, rounding data"},
    {scan, "decay_gradient_without_state", twin<DecayGradientWithoutState>, "gradient",
     "forward,adjoint,ledger", "state-spaces/mamba 537: incorrect gradients of dA", states_of_three,
     "cp >= 2"},
};

}  // namespace

void controls_recurrent(Registry& registry) { controls::add(registry, rows); }

}  // namespace shardproof
