// Broken twins of layers whose state crosses ranks: convolutions that read their neighbours' rows,
// recurrences whose state goes on. The comment above a twin names the mistake.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <map>
#include <numeric>

#include "oracle/registry.hpp"
#include "primitives/calls.hpp"
#include "primitives/controls/recurrent.hpp"
#include "primitives/controls/sums.hpp"
#include "primitives/controls/table.hpp"
#include "primitives/conv_context.hpp"
#include "primitives/delta_context.hpp"
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

// The second block of zigzag is filtered as if it followed the first.
struct HaloOfOwnFirstBlock final : ConvContext {
  void fetch_both(Rank& rank, const Halo& halo, const View& first, const View& second) override {
    ConvContext::fetch_both(rank, halo, first, second);
    convert(last_rows(halo, first, halo.reach), second.narrow(0, 0, halo.reach));
  }
};
// The halo of a second block comes from the left, as that of a first.
struct SecondHaloFromLeft final : ConvContext {
  void fetch_both(Rank& rank, const Halo& halo, const View& first, const View& second) override {
    set_zero(halo_rows(halo, first));
    set_zero(halo_rows(halo, second));
    ConvContext::fetch_both(rank, halo, first, second);
  }
  View exchanged(Rank& rank, const Halo& halo, const View& rows, int hop) override {
    return ConvContext::exchanged(rank, halo, rows, std::abs(hop));
  }
};
// The last rank's second block has zeros before it.
struct LastRankWithoutOwnRows final : ConvContext {
  void fetch_both(Rank& rank, const Halo& halo, const View& first, const View& second) override {
    ConvContext::fetch_both(rank, halo, first, second);
    if (halo.rank + 1 == halo.ranks) set_zero(halo_rows(halo, second));
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

// ---- The state of the ranks before

template <class Layer>
struct NothingBefore final : Layer {
  List before(int, int) const override { return {}; }
};
template <class Layer>
struct OwnStateToo final : Layer {
  List before(int r, int) const override { return from_to(0, r + 1); }
};
template <class Layer>
struct AllButTheLast final : Layer {
  List before(int r, int) const override { return from_to(0, std::max(r - 1, 0)); }
};
template <class Layer>
struct FirstRankOnly final : Layer {
  List before(int r, int) const override { return from_to(0, std::min(r, 1)); }
};
template <class Layer>
struct NeighbourOnly final : Layer {
  List before(int r, int) const override { return from_to(std::max(r - 1, 0), r); }
};
template <class Layer>
struct FromTheRight final : Layer {
  List before(int r, int p) const override { return this->behind(r, p); }
};
template <class Layer>
struct OrderTurned final : Layer {
  List before(int r, int p) const override { return turned(Layer::before(r, p)); }
};
template <class Layer>
struct NothingBehind final : Layer {
  List behind(int, int) const override { return {}; }
};
template <class Layer>
struct OwnCotangentToo final : Layer {
  List behind(int r, int p) const override { return turned(from_to(r, p)); }
};
template <class Layer>
struct AllButTheNext final : Layer {
  List behind(int r, int p) const override { return turned(from_to(std::min(r + 2, p), p)); }
};
template <class Layer>
struct OrderBackTurned final : Layer {
  List behind(int r, int p) const override { return turned(Layer::behind(r, p)); }
};

// States are added up as they are.
template <bool back>
struct Undecayed final : ScanContext {
  void fold(Rank& rank, const Summaries& all, const List& chain, const View& state,
            bool backward) override {
    const View ones = copy_of(rank, all.through);
    if (backward == back) fill(ones, 1);
    ScanContext::fold(rank, {all.parts, ones}, chain, state, backward);
  }
};

// A state is multiplied by the decays of the block that made it, not of those that it goes through.
template <class Layer>
struct ThroughOfTheRankBefore final : Layer {
  void fold(Rank& rank, const Summaries& all, const List& chain, const View& state,
            bool backward) override {
    const View late = copy_of(rank, all.through);
    const int64_t p = late.shape[0];
    if (!backward) convert(all.through.narrow(0, 0, p - 1), late.narrow(0, 1, p - 1));
    Layer::fold(rank, {all.parts, late}, chain, state, backward);
  }
};

// The state that enters is taken through the last block once more.
struct DecayedTwice final : ScanContext {
  void fold(Rank& rank, const Summaries& all, const List& chain, const View& state,
            bool backward) override {
    ScanContext::fold(rank, all, chain, state, backward);
    if (backward || chain.empty()) return;
    const View decays = all.through.narrow(0, chain.back(), 1);
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
template <class Layer>
struct ProductOneTokenShort final : Layer {
  View decays_handed_on(Rank& rank, const View& a) const override { return without_first(rank, a); }
};
// The state that enters meets the first token undecayed.
template <class Layer>
struct FirstDecayLeftOut final : Layer {
  View decays(Rank& rank, const View& a) const override { return without_first(rank, a); }
};

// A block's decays are multiplied on where a document begins in it.
struct ProductAcrossDocuments final : ScanContext {
  List passes(const ContextLine& c) const override { return List(size_t(c.ranks), 1); }
};
template <class Layer>
struct ScanAcrossDocuments final : Layer {
  List reach(const ContextLine& c, int r) const override { return along_the_row(c, r); }
  List passes(const ContextLine& c) const override { return List(size_t(c.ranks), 1); }
};
template <class Layer>
struct ScanGoingOnAtTheBorder final : Layer {
  List reach(const ContextLine& c, int r) const override { return going_on_at_the_border(c, r); }
};

// The last state of a forward is where the next one begins.
template <class Layer>
class BeginsWithLastState final : public Layer {
  List reach(const ContextLine& c, int r) const override {
    List list = tokens_before(c, r);
    if (r == 0) list[0] = 1;
    return list;
  }
  void fold(Rank& rank, const Summaries& all, const List& chain, const View& state,
            bool backward) override {
    Layer::fold(rank, all, chain, state, backward);
    if (backward) return;
    const auto [kept, fresh] = last_.try_emplace(state.elements(), state.dtype, state.shape);
    if (!fresh && chain.empty()) convert(kept->second.view(), state);
    Layer::fold(rank, all, from_to(0, all.parts.shape[0]), kept->second.view(), false);
  }
  std::map<int64_t, Kept> last_;
};

// What the first token's decay multiplies is taken for 0.
template <class Layer>
struct GradientsWithoutState final : Layer {
  View state_before(Rank& rank, const View& entering) const override {
    const View zeros = rank.workspace(entering.dtype, entering.shape);
    set_zero(zeros);
    return zeros;
  }
};

// Two blocks of a rank are taken for one: the second follows the first.
template <class Layer>
struct BlocksSideBySide final : Layer {
  int place(const Blocks& b, int r, int i) const override { return r * b.each + i; }
  int64_t row_of(const Blocks&, int64_t place) const override { return place; }
};
// The second blocks are taken in the order of ranks, as the first are.
template <class Layer>
struct SecondBlocksByRank final : Layer {
  int place(const Blocks& b, int r, int i) const override { return i * b.ranks + r; }
  int64_t row_of(const Blocks& b, int64_t place) const override {
    return place % b.ranks * b.each + place / b.ranks;
  }
};
// The places are right, and summaries are looked up as if they lay in the order of places.
template <class Layer>
struct SummariesByPlace final : Layer {
  int64_t row_of(const Blocks&, int64_t place) const override { return place; }
};
// States are rounded to the type of activations on their way.
template <class Layer, bool back>
struct InStorageType final : Layer {
  void gather(Rank& rank, const View& own, const View& all, bool backward) override {
    const View narrow = rank.workspace(rank.line().dtype(), own.shape),
               rounded = rank.workspace(own.dtype, own.shape);
    convert(own, narrow);
    convert(narrow, rounded);
    Layer::gather(rank, backward == back ? rounded : own, all, backward);
  }
};

// ---- The matrices that a delta rule hands on

// What blocks do to a state is left out, as where outer products are summed.
template <bool back>
struct NotTakenThrough final : DeltaContext {
  void take_through(Rank& rank, const Summaries& all, int64_t block, const View& before,
                    const View& after, bool backward) override {
    DeltaContext::take_through(rank, all, block, backward == back ? View{} : before, after,
                               backward);
    if (backward == back && before.data) add_into(before, after);
  }
};

// A state is only decayed on its way through a block, as that of linear attention.
struct DecayedOnly final : DeltaContext {
  View steps_handed_on(Rank& rank, const View& b) const override {
    const View none = rank.workspace(b.dtype, b.shape);
    set_zero(none);
    return none;
  }
};

// The matrix of a block is turned forward, or is not backward.
template <bool back>
struct TurnedWrongly final : DeltaContext {
  void take_through(Rank& rank, const Summaries& all, int64_t block, const View& before,
                    const View& after, bool backward) override {
    DeltaContext::take_through(rank, all, block, before, after,
                               backward == back ? !backward : backward);
  }
};

// Matrices of several blocks are multiplied in the wrong order: T_1 T_2 E_0.
struct MatricesInReverse final : DeltaContext {
  void fold(Rank& rank, const Summaries& all, const List& chain, const View& state,
            bool backward) override {
    if (backward || chain.size() < 2) return DeltaContext::fold(rank, all, chain, state, backward);
    const View zeros = copy_of(rank, all.parts);
    set_zero(zeros);
    set_zero(state);
    View x = rank.workspace(state.dtype, state.shape),
         next = rank.workspace(state.dtype, state.shape);
    for (size_t i = 0; i < chain.size(); ++i) {
      DeltaContext::take_through(rank, all, chain[i], View{}, x, false);
      for (size_t n = chain.size(); n-- > i + 1; std::swap(x, next))
        DeltaContext::take_through(rank, {zeros, all.through}, chain[n], x, next, false);
      add_into(x, state);
    }
  }
};

// The state that enters is taken through the last block once more.
struct TakenThroughTwice final : DeltaContext {
  void fold(Rank& rank, const Summaries& all, const List& chain, const View& state,
            bool backward) override {
    DeltaContext::fold(rank, all, chain, state, backward);
    if (backward || chain.empty()) return;
    const View zeros = copy_of(rank, all.parts);
    set_zero(zeros);
    DeltaContext::take_through(rank, {zeros, all.through}, chain.back(), copy_of(rank, state),
                               state, false);
  }
};

// The matrix of a block is multiplied on where a document begins in it.
struct MatrixAcrossDocuments final : DeltaContext {
  List passes(const ContextLine& c) const override { return List(size_t(c.ranks), 1); }
  List reach_handed_on(const ContextLine& c, int r) const override { return along_the_row(c, r); }
};

// By element what `change` makes of x and of its token's head's y.
template <class Change>
View changed(Rank& rank, const View& x, const View& y, Change change) {
  const View to = copy_of(rank, x);
  const int64_t features = x.elements() / y.elements();
  for (int64_t i = 0; i < x.elements(); ++i)
    store(to.flat(i), to.dtype,
          change(load(x.flat(i), x.dtype), load(y.flat(i / features), y.dtype)));
  return to;
}

// S_t = a S_(t-1) + b k (v - S_(t-1)^T k)^T: what the state has is taken before it is decayed. That
// is the rule with b / a and a v.
struct ErrorBeforeDecay final : DeltaContext {
  View values(Rank& rank, const View& v, const View& a, const View&) const override {
    return changed(rank, v, a, [](double x, double decay) { return x * decay; });
  }
  View steps(Rank& rank, const View& b, const View& a) const override {
    return changed(rank, b, a, [](double x, double decay) { return x / decay; });
  }
};

// The step is taken with v alone: S_t = (I - k k^T) S' + b k v^T.
struct StepOfValuesOnly final : DeltaContext {
  View values(Rank& rank, const View& v, const View&, const View& b) const override {
    return changed(rank, v, b, [](double x, double step) { return x * step; });
  }
  View steps(Rank& rank, const View& b, const View&) const override {
    const View ones = copy_of(rank, b);
    fill(ones, 1);
    return ones;
  }
};

// ---- What catches them

const char* const conv = "conv_context";
const char* const scan = "scan_context";
const char* const delta = "delta_context";
// Three ranks: with two, left and right neighbour are the same, and no state passes a rank.
const char* const rows_of_three = "cp=3 tokens=12 channels=2";
const char* const states_of_three = "cp=3 tokens=12 heads=2";
const char* const few = "cp=4 tokens=8 channels=2";
const char* const border = "cp=2 docs=5,1,6 channels=2";
const char* const conv_in_zigzag = "cp=3 tokens=24 channels=2 layout=zigzag";
const char* const in_zigzag = "cp=3 tokens=18 heads=2 layout=zigzag";
const char* const logarithms = "cp=3 tokens=12 heads=2 decay=log fill=normal";
// Sums of few roundings, and so many that some of them cancel.
const char* const many_values = "cp=4 dtype=bf16 fill=normal tokens=8 heads=12 head_dim=2 v_dim=32";
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
    {conv, "second_halo_of_own_block", twin<HaloOfOwnFirstBlock>, "forward", "ledger",
     "alibaba/rtp-llm 876: a convolution wants its tokens in a run", conv_in_zigzag,
     "layout=zigzag"},
    {conv, "second_halo_from_left", twin<SecondHaloFromLeft>, "forward,ledger", "",
     "one direction for both blocks", conv_in_zigzag, "layout=zigzag"},
    {conv, "last_rank_without_own_rows", twin<LastRankWithoutOwnRows>, "forward", "ledger",
     "fla-org/flash-linear-attention 1221: the last rank reads its own first block", conv_in_zigzag,
     "layout=zigzag"},
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
    {conv, "filter_gradient_summed_over_tp", twin<SummedOverTp<ConvContext>>, "gradient,ledger",
     "forward", "channels cut over tp, summed like what all ranks of tp hold",
     "cp=2 tp=2 tokens=12 channels=2", "tp >= 2"},
    {conv, "filter_gradient_not_summed_over_cp", twin<NotSummedOverCp<ConvContext>>,
     "replica,gradient", "forward", "Megatron CP groups", "cp=2 dp=2 seq=8 batch=2 channels=2",
     "cp >= 2, dp >= 2"},
    {conv, "bias_gradient_left_out", twin<LastLeftOut<ConvContext>>, "replica,gradient", "forward",
     "a list of parameters kept by hand", rows_of_three, "cp >= 2"},

    {scan, "state_not_decayed", twin<Undecayed<false>>, "forward", "ledger",
     "vllm-project/vllm 21783", states_of_three, "cp >= 3"},
    {scan, "state_decayed_by_rank_before", twin<ThroughOfTheRankBefore<ScanContext>>, "forward",
     "ledger", "vllm-project/vllm 21783", states_of_three, "cp >= 3"},
    {scan, "state_decayed_twice", twin<DecayedTwice>, "forward", "ledger",
     "vllm-project/vllm 21783", states_of_three, "cp >= 2"},
    {scan, "decay_product_across_documents", twin<ProductAcrossDocuments>, "leak,forward", "ledger",
     "vllm-project/vllm 23279", "cp=3 docs=6,6 heads=2",
     "a document that begins inside of a block and goes on behind it"},
    {scan, "cotangent_not_decayed", twin<Undecayed<true>>, "gradient,adjoint", "forward,ledger",
     "meta-pytorch/attention-gym 453", states_of_three, "cp >= 3"},
    {scan, "decay_gradient_without_state", twin<GradientsWithoutState<ScanContext>>, "gradient",
     "forward,adjoint,ledger", "state-spaces/mamba 537: incorrect gradients of dA", states_of_three,
     "cp >= 2"},

    {delta, "state_not_taken_through", twin<NotTakenThrough<false>>, "forward", "ledger",
     "MoonshotAI/FlashKDA 9: no transition, where decays are trusted to be strong", states_of_three,
     "cp >= 3"},
    {delta, "state_decayed_only", twin<DecayedOnly>, "forward", "ledger",
     "a chain of linear attention around a delta rule", states_of_three, "cp >= 3"},
    {delta, "matrix_turned", twin<TurnedWrongly<false>>, "forward", "ledger",
     "[d_k, d_k] read by columns", states_of_three, "cp >= 3"},
    {delta, "matrices_in_reverse", twin<MatricesInReverse>, "forward", "ledger",
     "AI-Hypercomputer/maxtext 4932: (A2 A1, A2 B1 + B2), and A1 A2 is another", "cp=4 heads=2",
     "cp >= 4"},
    {delta, "matrix_of_rank_before", twin<ThroughOfTheRankBefore<DeltaContext>>, "forward",
     "ledger", "factors of another block, as vllm-project/vllm 21783", states_of_three, "cp >= 3"},
    {delta, "state_taken_through_twice", twin<TakenThroughTwice>, "forward", "ledger",
     "as vllm-project/vllm 21783", states_of_three, "cp >= 2"},
    {delta, "matrix_across_documents", twin<MatrixAcrossDocuments>, "leak,forward", "ledger",
     "as vllm-project/vllm 23279", "cp=3 docs=6,6 heads=2",
     "a document that begins inside of a block and goes on behind it"},
    {delta, "error_before_decay", twin<ErrorBeforeDecay>, "forward,gradient", "ledger",
     "fla-org/flash-linear-attention 885: the state is decayed first", states_of_three,
     "2 tokens, gate=head"},
    {delta, "step_of_values_only", twin<StepOfValuesOnly>, "forward,gradient", "ledger",
     "b on v and not on what the state has", states_of_three, "2 tokens"},
    {delta, "cotangent_not_taken_through", twin<NotTakenThrough<true>>, "gradient,adjoint",
     "forward,ledger", "meta-pytorch/attention-gym 453", states_of_three, "cp >= 3"},
    {delta, "matrix_not_turned_back", twin<TurnedWrongly<true>>, "gradient,adjoint",
     "forward,ledger", "T in place of T^T in a backward that is the forward's code",
     states_of_three, "cp >= 3"},
    {delta, "gradients_without_state", twin<GradientsWithoutState<DeltaContext>>, "gradient",
     "forward,adjoint,ledger",
     "state-spaces/mamba 537: incorrect gradients of what acts on a state", states_of_three,
     "cp >= 2"},
};

// Of every layer whose state crosses ranks.
template <class Layer>
void add_of_states(Registry& registry, const char* contract) {
  const RowsOf of{contract};
  const Row shared[] = {
      of("state_dropped", twin<NothingBefore<Layer>>, "forward", "ledger",
         "state-spaces/mamba 597, AI-Hypercomputer/maxtext 4932", states_of_three, "cp >= 2"),
      of("state_of_own_rank_too", twin<OwnStateToo<Layer>>, "forward", "ledger",
         "an inclusive scan over ranks in place of an exclusive one", states_of_three, "cp >= 2"),
      of("state_one_rank_short", twin<AllButTheLast<Layer>>, "forward", "ledger",
         "a prefix of ranks that ends one too early", states_of_three, "cp >= 2"),
      of("state_of_first_rank", twin<FirstRankOnly<Layer>>, "forward", "ledger",
         "a broadcast in place of a chain", states_of_three, "cp >= 3"),
      of("state_of_neighbour", twin<NeighbourOnly<Layer>>, "forward", "ledger",
         "fla-org/flash-linear-attention 626: local states sent on before they are whole",
         states_of_three, "cp >= 3"),
      of("state_from_right", twin<FromTheRight<Layer>>, "forward", "ledger",
         "a ring that is turned the other way", states_of_three, "cp >= 2"),
      of("states_in_reverse", twin<OrderTurned<Layer>>, "forward", "ledger",
         "meta-pytorch/attention-gym 453: summaries of ranks are no commutative sum",
         states_of_three, "cp >= 3"),
      of("decay_of_first_token_left_out", twin<FirstDecayLeftOut<Layer>>, "forward,gradient",
         "ledger", "vllm-project/vllm 23279: a cumulative sum from the wrong token",
         states_of_three, "cp >= 2"),
      of("decay_product_one_short", twin<ProductOneTokenShort<Layer>>, "forward", "ledger",
         "vllm-project/vllm 23279, gittensor-ai-lab/sparkinfer 604: a cumulative sum of other "
         "tokens",
         states_of_three, "cp >= 3"),
      of("scan_across_documents", twin<ScanAcrossDocuments<Layer>>, "leak,forward",
         "gradcheck,ledger", "PrimeIntellect-ai/prime-rl 3000, NovaSky-AI/SkyRL 2056", state_border,
         "2 documents"),
      of("scan_beyond_border", twin<ScanGoingOnAtTheBorder<Layer>>, "leak,forward",
         "gradcheck,ledger", "PrimeIntellect-ai/prime-rl 3000: local boundaries are insufficient",
         state_border, "a document that begins with a rank's first token"),
      of("decay_as_power_of_two", twin<PowersOfTwo<Layer>>, "forward,gradient", "ledger",
         "exp2 of a natural logarithm", logarithms, "decay=log"),
      of("decay_gradient_as_of_logarithm", twin<GradientOfDecays<Layer>>, "gradient",
         "forward,adjoint,ledger", "a derivative of exp that is left out", logarithms, "decay=log"),
      of("blocks_side_by_side", twin<BlocksSideBySide<Layer>>, "forward,gradient", "ledger",
         "alibaba/rtp-llm 876: a rank of zigzag has tokens that are no run of the row", in_zigzag,
         "layout=zigzag"),
      of("second_blocks_by_rank", twin<SecondBlocksByRank<Layer>>, "forward,gradient", "ledger",
         "block p + r in place of 2p-1-r", in_zigzag, "layout=zigzag"),
      of("summaries_by_place", twin<SummariesByPlace<Layer>>, "forward,gradient", "ledger",
         "fla-org/flash-linear-attention 1221: what is gathered has to be permuted", in_zigzag,
         "layout=zigzag"),
      of("state_of_earlier_forward", twin<BeginsWithLastState<Layer>>, "repeat", "forward,ledger",
         "a cache of states that is not cleared between batches, tile-ai/TileOPs 1963",
         states_of_three, "two calls"),
      of("states_shared_by_forwards", twin<StatesInTheLayer<Layer>>, "accumulate",
         "forward,gradient,adjoint,ledger", "deepspeedai/DeepSpeed 2800, pytorch/pytorch 139404",
         states_of_three, "two forwards in flight"),
      of("state_in_storage_type", twin<InStorageType<Layer, false>>, "forward", "ledger",
         "fla-org/flash-linear-attention 626: states travel in float32", many_values,
         "bf16, rounding data"),
      of("cotangent_not_passed", twin<NothingBehind<Layer>>, "gradient,adjoint", "forward,ledger",
         "a final state that is detached", states_of_three, "cp >= 2"),
      of("cotangent_of_own_rank_too", twin<OwnCotangentToo<Layer>>, "gradient,adjoint",
         "forward,ledger", "an inclusive scan over ranks in place of an exclusive one",
         states_of_three, "cp >= 2"),
      of("cotangent_one_rank_short", twin<AllButTheNext<Layer>>, "gradient,adjoint",
         "forward,ledger", "a suffix of ranks that begins one too late", states_of_three,
         "cp >= 2"),
      of("cotangents_in_reverse", twin<OrderBackTurned<Layer>>, "gradient,adjoint",
         "forward,ledger", "meta-pytorch/attention-gym 453: the mirror image of the forward",
         states_of_three, "cp >= 3"),
      of("cotangent_in_storage_type", twin<InStorageType<Layer, true>>, "gradient",
         "forward,ledger", "fla-org/flash-linear-attention 626: states travel in float32",
         many_values, "bf16, rounding data"),
  };
  controls::add(registry, shared);
}

}  // namespace

void controls_recurrent(Registry& registry) {
  controls::add(registry, rows);
  add_of_states<ScanContext>(registry, scan);
  add_of_states<DeltaContext>(registry, delta);
}

}  // namespace shardproof
