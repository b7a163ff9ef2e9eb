// Broken twins of the mixer between two all-to-alls: what each rank takes of the parameters that
// all hold, in which order it has the tokens, and what copies of a group owe. The comment above a
// twin names the mistake.
#include "primitives/mixer_alltoall.hpp"

#include <algorithm>
#include <numeric>

#include "oracle/registry.hpp"
#include "primitives/controls/recurrent.hpp"
#include "primitives/controls/sums.hpp"
#include "primitives/controls/table.hpp"

namespace shardproof {
namespace {

using namespace controls;
using namespace primitives;

using List = std::vector<int64_t>;

// ---- The order of tokens

List in_order_of_ranks(const ContextLine& c) {
  List rows(size_t(c.rows));
  std::iota(rows.begin(), rows.end(), 0);
  return rows;
}
// Rows in zigzag are taken for the row as it is: those that come from ranks, those that go back to
// them, and the same of cotangents and gradients.
template <auto... missed>
struct OrderMissing final : MixerAlltoall {
  List order(const ContextLine& c, Way way) const override {
    return ((way == missed) || ...) ? in_order_of_ranks(c) : MixerAlltoall::order(c, way);
  }
};
// The whole row is put in order where each document was cut by itself.
struct OrderOfTheWholeRow final : MixerAlltoall {
  List order(const ContextLine& c, Way way) const override {
    ContextLine one = c;
    one.documents.clear();
    return MixerAlltoall::order(one, way);
  }
};

// Blocks that come are put together from the last rank to the first.
struct BlocksFromTheLastRank final : MixerAlltoall {
  void tokens_for_heads(Rank& rank, const View& by_tokens, const View& by_heads) override {
    const View came = rank.workspace(by_heads.dtype, by_heads.shape);
    MixerAlltoall::tokens_for_heads(rank, by_tokens, came);
    const int64_t n = by_tokens.shape[0], rows = by_heads.shape[0];
    for (int64_t at = 0; at < rows; at += n)
      convert(came.narrow(0, at, n), by_heads.narrow(0, rows - at - n, n));
  }
};
// Or those that go back are dealt out so.
struct BlocksToTheLastRank final : MixerAlltoall {
  void heads_for_tokens(Rank& rank, const View& by_heads, const View& by_tokens) override {
    const View leaving = rank.workspace(by_heads.dtype, by_heads.shape);
    const int64_t n = by_tokens.shape[0], rows = by_heads.shape[0];
    for (int64_t at = 0; at < rows; at += n)
      convert(by_heads.narrow(0, at, n), leaving.narrow(0, rows - at - n, n));
    MixerAlltoall::heads_for_tokens(rank, leaving, by_tokens);
  }
};

// What is split behind the exchange is split in another order: c where b is due.
struct GroupsForEachOther final : MixerAlltoall {
  std::vector<View> exchanged(Rank& rank, const std::vector<View>& by_tokens) override {
    auto list = MixerAlltoall::exchanged(rank, by_tokens);
    if (list.size() > 1) std::swap(list[1], list[2]);
    return list;
  }
};

// ---- Which heads a rank has

// Heads are dealt in turn, and parameters are cut in blocks.
struct HeadsDealtInTurn final : MixerAlltoall {
  template <class Each>
  static void each_thing(Rank& rank, const View& things, Each each) {
    const int64_t p = rank.along(Axis::cp).size(), own = things.shape[things.shape.size() - 2] / p;
    for (int64_t i = 0; i < own * p; ++i) each(i, i % p * own + i / p);
  }
  void tokens_for_heads(Rank& rank, const View& by_tokens, const View& by_heads) override {
    const View dealt = rank.workspace(by_tokens.dtype, by_tokens.shape);
    const int dim = last(by_tokens) - 1;
    each_thing(rank, by_tokens, [&](int64_t i, int64_t at) {
      convert(by_tokens.narrow(dim, i, 1), dealt.narrow(dim, at, 1));
    });
    MixerAlltoall::tokens_for_heads(rank, dealt, by_heads);
  }
  void heads_for_tokens(Rank& rank, const View& by_heads, const View& by_tokens) override {
    const View dealt = rank.workspace(by_tokens.dtype, by_tokens.shape);
    const int dim = last(by_tokens) - 1;
    MixerAlltoall::heads_for_tokens(rank, by_heads, dealt);
    each_thing(rank, by_tokens, [&](int64_t i, int64_t at) {
      convert(dealt.narrow(dim, at, 1), by_tokens.narrow(dim, i, 1));
    });
  }
};

// Parameters are cut by the rank in the world, as where cp is the only axis.
class SlicesOfWorldRanks final : public MixerAlltoall {
 public:
  std::unique_ptr<Saved> forward(Rank& rank, std::span<const View> inputs,
                                 std::span<const View> outputs) override {
    world_rank_ = rank.world_rank();
    return MixerAlltoall::forward(rank, inputs, outputs);
  }

 private:
  int64_t first(Slice slice, const MixerShape& m) const override {
    MixerShape other = m;
    other.rank = world_rank_ % m.ranks;
    return MixerAlltoall::first(slice, other);
  }
  int64_t world_rank_ = 0;
};

// The filter of a neighbour's heads.
struct FilterOfNeighbour final : MixerAlltoall {
  int64_t first(Slice slice, const MixerShape& m) const override {
    MixerShape other = m;
    if (slice == Slice::filter_of_heads) other.rank = (m.rank + 1) % m.ranks;
    return MixerAlltoall::first(slice, other);
  }
};
// Every rank adds its input by the first heads' d.
struct SkipOfFirstHeads final : MixerAlltoall {
  int64_t first(Slice slice, const MixerShape& m) const override {
    return slice == Slice::skip ? 0 : MixerAlltoall::first(slice, m);
  }
};

// ---- Groups that several ranks work with

// Filters of b and c are cut by rank, as if no group were copied.
struct FilterOfGroupsByRank final : MixerAlltoall {
  int64_t first(Slice slice, const MixerShape& m) const override {
    if (slice != Slice::filter_of_groups) return MixerAlltoall::first(slice, m);
    return m.rank * m.own_groups() % m.groups;
  }
};
// Copies lie g0 g1 g0 g1 in place of g0 g0 g1 g1.
struct GroupsAsTiles final : MixerAlltoall {
  int64_t place_of_copy(const MixerShape& m, int64_t group, int64_t copy) const override {
    return copy * m.groups + group;
  }
};
// Of the groups of a rank each head reads the next one, in place of a run of heads each.
struct GroupsInTurn final : MixerAlltoall {
  bool heads_in_runs() const override { return false; }
};
// Gradients of copies: that of the first is taken for the sum.
struct FirstCopyOnly final : MixerAlltoall {
  void sum_copies(Rank&, const MixerShape& m, const View& copies, const View& gradient) override {
    const int dim = last(gradient) - 1;
    for (int64_t g = 0; g < m.groups; ++g)
      convert(copies.narrow(dim, place_of_copy(m, g, 0), 1), gradient.narrow(dim, g, 1));
  }
};
// Or their mean.
struct CopiesAveraged final : MixerAlltoall {
  void sum_copies(Rank& rank, const MixerShape& m, const View& copies,
                  const View& gradient) override {
    MixerAlltoall::sum_copies(rank, m, copies, gradient);
    scale(gradient, gradient, 1, double(m.copies()));
  }
};
// Parts of that sum travel in the type of activations.
struct CopiesInStorageType final : MixerAlltoall {
  DType type_of_copies(const Case& line) const override { return line.dtype(); }
};

// ---- Whole sequences

// The packed row is taken for one sequence.
List along_the_row(const ContextLine& c, List list) {
  for (size_t i = 0; i < list.size(); ++i)
    if (list[i] >= 0) list[i] = int64_t(i) / c.batch;
  return list;
}
struct FilterAcrossDocuments final : MixerAlltoall {
  List filtered(const ContextLine& c) const override {
    return along_the_row(c, MixerAlltoall::filtered(c));
  }
};
struct StateAcrossDocuments final : MixerAlltoall {
  List remembered(const ContextLine& c) const override {
    return along_the_row(c, MixerAlltoall::remembered(c));
  }
};

// Rows of padding are tokens, each of which sees itself.
struct PaddingMixed final : MixerAlltoall {
  static List of_tokens(List list) {
    for (int64_t& before : list) before = std::max<int64_t>(before, 0);
    return list;
  }
  List filtered(const ContextLine& c) const override {
    return of_tokens(MixerAlltoall::filtered(c));
  }
  List remembered(const ContextLine& c) const override {
    return of_tokens(MixerAlltoall::remembered(c));
  }
};

// Each rank's block is a sequence of its own, as it was before the exchange.
List within_blocks(const ContextLine& c, List list) {
  const int64_t rows = c.rows / Blocks(c).count();
  for (size_t i = 0; i < list.size(); ++i) list[i] = std::min(list[i], int64_t(i) / c.batch % rows);
  return list;
}
struct FilterWithinBlocks final : MixerAlltoall {
  List filtered(const ContextLine& c) const override {
    return within_blocks(c, MixerAlltoall::filtered(c));
  }
};
struct StateWithinBlocks final : MixerAlltoall {
  List remembered(const ContextLine& c) const override {
    return within_blocks(c, MixerAlltoall::remembered(c));
  }
};

// ---- Gradients of parameters

// Of ranks that share a group one hands in the gradients of its filters.
struct GroupFilterOfOneCopy final : MixerAlltoall {
  void sum_gradients(Parallel& p, const Parts& parts, const std::vector<Axis>& axes) override {
    const MixerShape m(p.rank.line(), p.rank.along(Axis::cp));
    for (const size_t of_groups : {1, 2, 4, 5})
      if (m.rank % m.copies() != 0) set_zero(parts[of_groups].partial);
    MixerAlltoall::sum_gradients(p, parts, axes);
  }
};

// The last rank hands in nothing of its d.
struct SkipGradientShort final : MixerAlltoall {
  void skip_gradient(Rank& rank, const View& x, const View& g, const View& reach,
                     const View& sum) override {
    Communicator& cp = rank.along(Axis::cp);
    if (cp.size() == 1 || cp.rank() + 1 < cp.size())
      MixerAlltoall::skip_gradient(rank, x, g, reach, sum);
  }
};

// ---- What catches them

constexpr RowsOf of{"mixer_alltoall"};
const char* const three = "cp=3 tokens=12";
const char* const in_zigzag = "cp=3 tokens=12 layout=zigzag";
const char* const copied_groups = "cp=4 tokens=12 groups=2";
const char* const groups_of_a_rank = "cp=2 tokens=8 heads=8 groups=4";
const char* const documents = "cp=2 docs=5,1,6";

const char* const padded = "cp=3 docs=6,4";
const char* const logarithms = "cp=3 tokens=12 decay=log fill=normal";

using Way = MixerAlltoall::Way;

const Row rows[] = {
    of("order_not_undone", twin<OrderMissing<Way::inputs, Way::cotangent>>, "forward", "ledger",
       "alibaba/rtp-llm 876: a convolution wants its tokens in a run", in_zigzag, "layout=zigzag"),
    of("order_not_redone", twin<OrderMissing<Way::result, Way::gradients>>, "forward", "ledger",
       "what is undone before and not redone behind", in_zigzag, "layout=zigzag"),
    of("order_ignored",
       twin<OrderMissing<Way::inputs, Way::result, Way::cotangent, Way::gradients>>, "forward",
       "ledger", "alibaba/rtp-llm 876: sequences in the order of ranks", in_zigzag,
       "layout=zigzag"),
    of("order_of_the_whole_row", twin<OrderOfTheWholeRow>, "forward", "ledger",
       "NVIDIA-NeMo/Megatron-Bridge 5463, the other way round", "cp=2 docs=5,9 layout=zigzag",
       "2 documents, each in zigzag by itself"),
    of("cotangent_not_put_in_order", twin<OrderMissing<Way::cotangent>>, "gradient,adjoint",
       "forward,ledger", "a backward by hand that leaves out the order", in_zigzag,
       "layout=zigzag"),
    of("gradients_not_put_back", twin<OrderMissing<Way::gradients>>, "gradient,adjoint",
       "forward,ledger", "a backward by hand that leaves out the order", in_zigzag,
       "layout=zigzag"),
    of("blocks_from_the_last_rank", twin<BlocksFromTheLastRank>, "forward", "ledger",
       "received blocks put together from the wrong end", three, "cp >= 2"),
    of("blocks_to_the_last_rank", twin<BlocksToTheLastRank>, "forward", "ledger",
       "blocks dealt out from the wrong end", three, "cp >= 2"),
    of("b_and_c_for_each_other", twin<GroupsForEachOther>, "forward,gradient", "ledger",
       "a fused tensor that is split in another order than it was put together", three, ""),
    of("heads_dealt_in_turn", twin<HeadsDealtInTurn>, "forward", "ledger",
       "heads interleaved over ranks, parameters cut in blocks", three, "2 heads a rank"),
    of("slices_of_world_ranks", twin<SlicesOfWorldRanks>, "forward", "ledger",
       "NVIDIA/TransformerEngine 2179: ranks of the world in place of members",
       "cp=2 tp=2 tokens=8 groups=2", "an axis beside cp that is faster"),
    of("filter_of_neighbour", twin<FilterOfNeighbour>, "forward", "ledger",
       "a slice that is off by one", three, "cp >= 2"),
    of("skip_of_first_heads", twin<SkipOfFirstHeads>, "forward", "ledger",
       "a vector of heads that is not cut", three, "cp >= 2"),
    of("filter_of_groups_by_rank", twin<FilterOfGroupsByRank>, "forward", "ledger",
       "vllm-project/vllm 55091: rank / copies, where ranks share a group", copied_groups,
       "1 < groups < cp"),
    of("groups_as_tiles", twin<GroupsAsTiles>, "forward", "ledger",
       "huggingface/transformers 37533: repeat in place of repeat_interleave", copied_groups,
       "1 < groups < cp"),
    of("groups_in_turn", twin<GroupsInTurn>, "forward", "ledger",
       "huggingface/transformers 37533: repeat in place of repeat_interleave", groups_of_a_rank,
       "2 groups a rank, of 2 heads each"),
    of("first_copy_only", twin<FirstCopyOnly>, "gradient,adjoint", "forward,ledger",
       "the backward of a repeat that takes one of its copies", copied_groups, "groups < cp"),
    of("copies_averaged", twin<CopiesAveraged>, "gradient,adjoint", "forward,ledger",
       "bigcode-project/Megatron-LM 35", copied_groups, "groups < cp"),
    of("copies_in_storage_type", twin<CopiesInStorageType>, "ledger", "forward",
       "parts of a sum that are rounded on their way",
       "cp=4 tokens=12 groups=2 dtype=bf16 wire=f32 fill=normal", "wire wider than dtype"),
    of("filter_across_documents", twin<FilterAcrossDocuments>, "leak,forward", "gradcheck,ledger",
       "PrimeIntellect-ai/prime-rl 3000, huggingface/transformers 46588", documents, "2 documents"),
    of("state_across_documents", twin<StateAcrossDocuments>, "leak,forward", "gradcheck,ledger",
       "PrimeIntellect-ai/prime-rl 3000, NovaSky-AI/SkyRL 2056", documents,
       "2 documents side by side"),
    of("padding_mixed", twin<PaddingMixed>, "forward", "ledger", "a filter over the padded row",
       padded, "rows of padding"),
    of("filter_within_blocks", twin<FilterWithinBlocks>, "forward", "gradcheck,ledger",
       "state-spaces/mamba 597: each block filtered by itself", three, "cp >= 2"),
    of("state_within_blocks", twin<StateWithinBlocks>, "forward", "gradcheck,ledger",
       "state-spaces/mamba 597: each block begins anew", three, "cp >= 2"),
    of("states_shared_by_forwards", twin<StatesInTheLayer<MixerAlltoall>>, "accumulate",
       "forward,gradient,adjoint,ledger", "deepspeedai/DeepSpeed 2800, pytorch/pytorch 139404",
       three, "two forwards in flight"),
    of("decay_as_power_of_two", twin<PowersOfTwo<MixerAlltoall>>, "forward,gradient", "ledger",
       "exp2 of a natural logarithm", logarithms, "decay=log"),
    of("decay_gradient_as_of_logarithm", twin<GradientOfDecays<MixerAlltoall>>, "gradient",
       "forward,adjoint,ledger", "a derivative of exp that is left out", logarithms, "decay=log"),
    of("parameter_gradients_local", twin<GradientLocal<MixerAlltoall>>, "replica,gradient,ledger",
       "forward", "Megatron CP groups: a slice is no shard", three, "cp >= 2"),
    of("parameter_gradients_averaged", twin<GradientAveraged<MixerAlltoall>>, "gradient,adjoint",
       "forward,replica", "EleutherAI/gpt-neox 1259", three, "cp >= 2; ratio 1/cp"),
    of("filter_gradient_summed_twice", twin<FirstSummedTwice<MixerAlltoall>>, "gradient,ledger",
       "forward,replica", "a parameter that two lists name", three, "cp >= 2"),
    of("parameter_gradients_not_summed_over_cp", twin<NotSummedOverCp<MixerAlltoall>>,
       "replica,gradient", "forward", "Megatron CP groups: a slice is no shard",
       "cp=2 dp=2 seq=8 batch=2", "cp >= 2, dp >= 2"),
    of("parameter_gradients_summed_over_tp", twin<SummedOverTp<MixerAlltoall>>, "gradient,ledger",
       "forward", "heads cut over tp, summed like what all ranks of tp hold",
       "cp=2 tp=2 tokens=8 groups=2", "tp >= 2"),
    of("group_filter_of_one_copy", twin<GroupFilterOfOneCopy>, "gradient,adjoint",
       "forward,replica,ledger", "copies that are taken for equal contributions", copied_groups,
       "groups < cp"),
    of("skip_gradient_left_out", twin<LastLeftOut<MixerAlltoall>>, "replica,gradient", "forward",
       "a list of parameters kept by hand", three, "cp >= 2"),
    of("skip_gradient_of_a_rank_missing", twin<SkipGradientShort>, "gradient,adjoint",
       "forward,replica,ledger", "a sum over ranks that ends one too early", three, "cp >= 2"),
};

}  // namespace

void controls_mixer(Registry& registry) { controls::add(registry, rows); }

}  // namespace shardproof
