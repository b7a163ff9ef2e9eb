// Broken twins of a step of Muon. The comment above a twin names the mistake.
#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include "oracle/registry.hpp"
#include "primitives/bodies.hpp"
#include "primitives/controls/table.hpp"
#include "primitives/muon_step.hpp"

namespace shardproof {
namespace {

using namespace primitives;

std::vector<double> sums_of_squares(const Views& all) {
  std::vector<double> sums;
  for (const View& v : all) {
    sums.push_back(0);
    for (double x : to_doubles(v)) sums.back() += x * x;
  }
  return sums;
}

// ---- What of the whole a shard is taken for

// Each rank orthogonalises its own shard.
struct ShardsOrthogonalised final : MuonStep {
  Views directions_made_orthogonal(Parallel& p, const std::vector<CutMatrix>& list,
                                   const Views& u) override {
    return orthogonalised(p, list, u, /*summed=*/false);
  }
};

// Each rank divides its shard by the norm of that before the shards are gathered.
struct ShardsNormalised final : MuonStep {
  Views directions_made_orthogonal(Parallel& p, const std::vector<CutMatrix>& list,
                                   const Views& u) override {
    const auto squares = sums_of_squares(u);
    for (size_t k = 0; k < u.size(); ++k)
      if (squares[k] > 0) scale(u[k], u[k], 1, std::sqrt(squares[k]));
    return MuonStep::directions_made_orthogonal(p, list, u);
  }
};

// The whole is divided by the norm of the own shard.
struct NormOfOwnShard final : MuonStep {
  void sum_squares(Parallel& p, const View& own, const View& total) override {
    MuonStep::sum_squares(p, own, total);
    convert(own, total);
  }
};

// Norms are added, and not their squares.
struct NormsAdded final : MuonStep {
  void sum_squares(Parallel& p, const View& own, const View& total) override {
    const View roots = p.workspace(own.dtype, own.shape);
    perform(SquareRoot{tensor(own), tensor(roots)}, "norms");
    MuonStep::sum_squares(p, roots, total);
    std::vector<double> sums = to_doubles(total);
    for (double& sum : sums) sum *= sum;
    fill_from(total, sums);
  }
};

// The scale is that of a matrix of the extents that the rank has.
struct ScaleOfShard final : MuonStep {
  double scale_of(Parallel& p, const CutMatrix& m, const View& shard) const override {
    CutMatrix own = m;
    own.rows = std::max<int64_t>(1, shard.shape[0]), own.columns = shard.shape[1];
    return MuonStep::scale_of(p, own, shard);
  }
};

// The scale is that of the shards with their padding, all ranks' together.
struct ScaleOfPadded final : MuonStep {
  double scale_of(Parallel& p, const CutMatrix& m, const View& shard) const override {
    CutMatrix padded = m;
    padded.rows = m.block() * m.ranks;
    return MuonStep::scale_of(p, padded, shard);
  }
};

// ---- Gram matrices

// Each rank iterates with the Gram matrix of its own shard.
struct GramLeftLocal final : MuonStep {
  void sum_grams(Parallel& p, const View& own, const View& total) override {
    MuonStep::sum_grams(p, own, total);
    convert(own, total);
  }
};

// Summed in the first iteration, and left local in those behind it.
class GramSummedOnce final : public MuonStep {
  void sum_squares(Parallel& p, const View& own, const View& total) override {
    first_ = true;
    MuonStep::sum_squares(p, own, total);
  }
  void sum_grams(Parallel& p, const View& own, const View& total) override {
    MuonStep::sum_grams(p, own, total);
    if (!std::exchange(first_, false)) convert(own, total);
  }
  bool first_ = true;
};

struct GramAveraged final : MuonStep {
  void sum_grams(Parallel& p, const View& own, const View& total) override {
    p.tp.all_reduce(own, total, Reduce::avg);
  }
};

// Summed over the ranks of dp as well, which have the same matrices.
struct GramSummedOverDp final : MuonStep {
  void sum_grams(Parallel& p, const View& own, const View& total) override {
    MuonStep::sum_grams(p, own, total);
    p.rank.along(Axis::dp).all_reduce(total, total);
  }
};

// On the side that is shorter in the own shard, which tp cuts: blocks of X X^T on the diagonal.
struct GramOnSideOfShard final : MuonStep {
  bool turned(Parallel&, const CutMatrix&, const View& x) const override {
    return x.shape[0] > x.shape[1];
  }
};

// ---- Where the shards of the whole lie

// Shards are laid out from the last rank to the first.
struct GatheredInReverse final : MuonStep {
  void unpack_shard(const CutMatrix& m, int rank, const View& flat, const View& whole) override {
    MuonStep::unpack_shard(m, m.ranks - 1 - rank, flat, whole);
  }
};

// One below the other, whatever dim is cut.
struct GatheredAlongRows final : MuonStep {
  void unpack_shard(const CutMatrix& m, int rank, const View& flat, const View& whole) override {
    const int64_t elements = product(m.shape(rank)), across = m.cut == 0 ? m.columns : m.rows;
    convert(flat.narrow(0, 0, elements),
            shaped(whole, {whole.elements()}).narrow(0, m.first(rank) * across, elements));
  }
};

// The direction travels in the type of the parameters: in these, which are rounded as it was,
// little of that is left to see.
struct GatheredAsStored final : MuonStep {
  void gather(Parallel& p, const View& shard, const View& all) override {
    const View sent = p.workspace(p.storage, shard.shape), came = p.workspace(p.storage, all.shape);
    convert(shard, sent);
    MuonStep::gather(p, sent, came);
    convert(came, all);
  }
};

// A matrix that is iterated as its transpose comes back as that.
struct NotTurnedBack final : MuonStep {
  Views directions_made_orthogonal(Parallel& p, const std::vector<CutMatrix>& list,
                                   const Views& u) override {
    const Views o = MuonStep::directions_made_orthogonal(p, list, u);
    Views back;
    for (size_t k = 0; k < o.size(); ++k) {
      View transposed = o[k];
      if (list[k].rows > list[k].columns) {
        std::swap(transposed.shape[0], transposed.shape[1]);
        std::swap(transposed.strides[0], transposed.strides[1]);
      }
      back.push_back(p.workspace(p.accumulate, o[k].shape));
      convert(transposed, back[k]);
    }
    return back;
  }
};

// ---- The iteration

struct OneIterationFewer final : MuonStep {
  MuonNumbers numbers(const Case& line) const override {
    MuonNumbers n = MuonStep::numbers(line);
    --n.iterations;
    return n;
  }
};
struct OneIterationMore final : MuonStep {
  MuonNumbers numbers(const Case& line) const override {
    MuonNumbers n = MuonStep::numbers(line);
    ++n.iterations;
    return n;
  }
};

// The quintic that converges to 1, as the expansion of the polar factor gives it.
struct ConvergingCoefficients final : MuonStep {
  MuonNumbers numbers(const Case& line) const override {
    MuonNumbers n = MuonStep::numbers(line);
    n.a = 15.0 / 8, n.b = -5.0 / 4, n.c = 3.0 / 8;
    return n;
  }
};

// What was flattened has one dim and is taken for a vector: plain momentum.
struct NotOrthogonalised final : MuonStep {
  Views directions_made_orthogonal(Parallel&, const std::vector<CutMatrix>&,
                                   const Views& u) override {
    return u;
  }
};

// norm + eps in place of the greater of the two.
struct EpsAdded final : MuonStep {
  void normalise(Parallel&, const View& u, const View& square, double eps, const View& x) override {
    scale(u, x, 1, std::sqrt(to_doubles(square)[0]) + eps);
  }
};

// A direction of any length is brought to norm 1.
struct EpsLeftOut final : MuonStep {
  void normalise(Parallel& p, const View& u, const View& square, double, const View& x) override {
    MuonStep::normalise(p, u, square, 0, x);
  }
};

// ---- The momentum

struct NesterovLeftOut final : MuonStep {
  MuonNumbers numbers(const Case& line) const override {
    MuonNumbers n = MuonStep::numbers(line);
    n.nesterov = false;
    return n;
  }
};

// The momentum looks ahead, and the direction does so once more.
struct NesterovTwice final : MuonStep {
  void direction(Parallel& p, const View& g, const View& m, const View& next_m,
                 const View& u) override {
    MuonStep::direction(p, g, m, next_m, u);
    combine(g, u, numbers(p.rank.line()).momentum, u);
  }
};

// The gradient itself is orthogonalised, and the momentum is kept for nothing.
struct MomentumNotSpent final : MuonStep {
  void direction(Parallel& p, const View& g, const View& m, const View& next_m,
                 const View& u) override {
    MuonStep::direction(p, g, m, next_m, u);
    convert(g, u);
  }
};

// An average where a sum is due.
struct GradientDampened final : MuonStep {
  MuonNumbers numbers(const Case& line) const override {
    MuonNumbers n = MuonStep::numbers(line);
    n.weight = 1 - n.momentum;
    return n;
  }
};

// Kept in the type of the parameters.
struct MomentumAsStored final : MuonStep {
  void direction(Parallel& p, const View& g, const View& m, const View& next_m,
                 const View& u) override {
    MuonStep::direction(p, g, m, next_m, u);
    const View rounded = p.workspace(p.storage, next_m.shape);
    convert(next_m, rounded);
    convert(rounded, next_m);
  }
};

// Gradients are orthogonalised, and the momentum adds these up.
struct OrthogonalisedBeforeMomentum final : MuonStep {
  void direction(Parallel& p, const View& g, const View& m, const View& next_m,
                 const View& u) override {
    const CutMatrix whole{g.shape[0], g.shape[1]};
    MuonStep::direction(p, orthogonalised(p, {whole}, {g}, /*summed=*/false)[0], m, next_m, u);
  }
  Views directions_made_orthogonal(Parallel&, const std::vector<CutMatrix>&,
                                   const Views& u) override {
    return u;
  }
};

// The momentum advances once for each half of a step.
struct MomentumTwiceAStep final : MuonStep {
  void direction(Parallel& p, const View& g, const View& m, const View& next_m,
                 const View& u) override {
    const View half = p.workspace(g.dtype, g.shape), between = p.workspace(m.dtype, m.shape);
    scale(g, half, 1, 2);
    MuonStep::direction(p, half, m, between, u);
    MuonStep::direction(p, half, between, next_m, u);
  }
};

// The momentum of the first step is used in every one.
class MomentumOfFirstStep final : public MuonStep {
  void direction(Parallel& p, const View& g, const View& m, const View& next_m,
                 const View& u) override {
    auto& kept = kept_[m.shape];
    if (kept.empty()) kept = to_doubles(m);
    const View first = p.workspace(m.dtype, m.shape);
    fill_from(first, kept);
    MuonStep::direction(p, g, first, next_m, u);
  }
  std::map<std::vector<int64_t>, std::vector<double>> kept_;
};

// ---- Gradients

struct GradientsLeftLocal final : MuonStep {
  void reduce(Parallel&, Communicator&, const View& in, const View& out) override {
    convert(in, out);
  }
};

struct GradientsAveraged final : MuonStep {
  void reduce(Parallel&, Communicator& data, const View& in, const View& out) override {
    data.all_reduce(in, out, Reduce::avg);
  }
};

// What was reduced is reduced again.
struct GradientsReducedTwice final : MuonStep {
  void reduce(Parallel& p, Communicator& data, const View& in, const View& out) override {
    MuonStep::reduce(p, data, in, out);
    data.all_reduce(out, out);
  }
};

// What cp has seen of the tokens is left out.
struct ReducedOverDpAlone final : MuonStep {
  void reduce(Parallel& p, Communicator&, const View& in, const View& out) override {
    p.rank.along(Axis::dp).all_reduce(in, out);
  }
};

// Copies over tp have the same gradient, and it is added up.
struct CopiesSummedOverTp final : MuonStep {
  void reduce(Parallel& p, Communicator& data, const View& in, const View& out) override {
    MuonStep::reduce(p, data, in, out);
    p.tp.all_reduce(out, out);
  }
};

// In the type of the parameters, whatever type was asked for.
struct GradientsReducedAsStored final : MuonStep {
  void reduce(Parallel& p, Communicator& data, const View& in, const View& out) override {
    const View sent = p.workspace(p.storage, in.shape), sum = p.workspace(p.storage, out.shape);
    convert(in, sent);
    MuonStep::reduce(p, data, sent, sum);
    convert(sum, out);
  }
};

// Each data rank has the sum of its own part of the flat buffer; the rest of the matrix that it
// orthogonalises is its own gradient.
struct OwnPartReduced final : MuonStep {
  void reduce(Parallel& p, Communicator& data, const View& in, const View& out) override {
    const View sum = p.workspace(in.dtype, in.shape);
    MuonStep::reduce(p, data, in, sum);
    convert(in, out);
    const int64_t part = in.elements() / data.size(), first = data.rank() * part;
    convert(sum.narrow(0, first, part), out.narrow(0, first, part));
  }
};

// ---- The update

// Of the shard that was turned: columns over rows.
struct ScaleOfTranspose final : MuonStep {
  double scale_of(Parallel& p, const CutMatrix& m, const View& shard) const override {
    CutMatrix transposed = m;
    std::swap(transposed.rows, transposed.columns);
    return MuonStep::scale_of(p, transposed, shard);
  }
};

struct ScaleLeftOut final : MuonStep {
  double scale_of(Parallel&, const CutMatrix&, const View&) const override { return 1; }
};

// The scale of matched RMS comes on top of the original one.
struct ScaledTwice final : MuonStep {
  double scale_of(Parallel& p, const CutMatrix& m, const View& shard) const override {
    return MuonStep::scale_of(p, m, shard) *
           std::sqrt(std::max(1.0, double(m.rows) / double(m.columns)));
  }
};

// The decayed parameter is assigned to a name that nobody reads.
struct NothingDecays final : MuonStep {
  MuonNumbers numbers(const Case& line) const override {
    MuonNumbers n = MuonStep::numbers(line);
    n.decay = 0;
    return n;
  }
};

// What is decayed is the parameter behind its update.
struct UpdateDecays final : MuonStep {
  void update(Parallel& p, const View& w, const View& o, double by_scale,
              const View& next) override {
    const MuonNumbers by = numbers(p.rank.line());
    const View moved = p.workspace(p.accumulate, w.shape);
    combine(w, o, -by.lr * by_scale, moved);
    scale(moved, next, 1 - by.lr * by.decay);
  }
};

// The decay is scaled as the direction is.
struct DecayScaled final : MuonStep {
  void update(Parallel& p, const View& w, const View& o, double by_scale,
              const View& next) override {
    const MuonNumbers by = numbers(p.rank.line());
    const View decayed = p.workspace(p.accumulate, w.shape);
    scale(w, decayed, 1 - by.lr * by_scale * by.decay);
    combine(decayed, o, -by.lr * by_scale, next);
  }
};

// The parameter is part of the gradient, and decays through the momentum.
class DecayInGradient final : public MuonStep {
 public:
  std::unique_ptr<Saved> forward(Rank& rank, std::span<const View> inputs,
                                 std::span<const View> outputs) override {
    parameters_ = MuonTensors(inputs, outputs).w;
    at_ = 0;
    return MuonStep::forward(rank, inputs, outputs);
  }

 private:
  MuonNumbers numbers(const Case& line) const override {
    MuonNumbers n = MuonStep::numbers(line);
    n.decay = 0;
    return n;
  }
  void direction(Parallel& p, const View& g, const View& m, const View& next_m,
                 const View& u) override {
    const View coupled = p.workspace(g.dtype, g.shape);
    combine(g, parameters_[at_++], MuonStep::numbers(p.rank.line()).decay, coupled);
    MuonStep::direction(p, coupled, m, next_m, u);
  }
  Views parameters_;
  size_t at_ = 0;
};

// ---- Owners and copies

// Of the copies, that of the first data rank alone decays.
struct OneCopyDecays final : MuonStep {
  void update(Parallel& p, const View& w, const View& o, double by_scale,
              const View& next) override {
    MuonStep::update(p, w, o, by_scale, next);
    if (group_of_data(p).rank() == 0) return;
    const View kept = p.workspace(p.accumulate, w.shape);
    convert(w, kept);
    combine(kept, o, -numbers(p.rank.line()).lr * by_scale, next);
  }
};

// What the owners hand out is read one owner further.
struct PartsOfNextOwner final : MuonStep {
  void publish(Parallel& p, const View& own, const View& all) override {
    const View came = p.workspace(all.dtype, all.shape);
    MuonStep::publish(p, own, came);
    const int64_t block = own.elements(), rest = all.elements() - block;
    convert(came.narrow(0, block, rest), all.narrow(0, 0, rest));
    convert(came.narrow(0, 0, block), all.narrow(0, rest, block));
  }
};

// Handed out before they are updated.
struct HandedOutBeforeUpdate final : MuonStep {
  void update(Parallel&, const View& w, const View&, double, const View& next) override {
    convert(w, next);
  }
};

// What the others hand out is gathered and not copied to the parameters.
struct OthersStayStale final : MuonStep {
  std::unique_ptr<Saved> forward(Rank& rank, std::span<const View> inputs,
                                 std::span<const View> outputs) override {
    auto saved = MuonStep::forward(rank, inputs, outputs);
    Parallel p(rank);
    const MuonTensors t(inputs, outputs);
    for (size_t k = 0; k < t.w.size(); ++k)
      if (owner_of(k, group_of_data(p).size()) != group_of_data(p).rank())
        convert(t.w[k], t.next_w[k]);
    return saved;
  }
};

// Matrices are dealt out in full rounds: those behind the last one are nobody's.
struct LastRoundLeftOut final : MuonStep {
  std::unique_ptr<Saved> forward(Rank& rank, std::span<const View> inputs,
                                 std::span<const View> outputs) override {
    auto saved = MuonStep::forward(rank, inputs, outputs);
    Parallel p(rank);
    const MuonTensors t(inputs, outputs);
    const auto ranks = size_t(group_of_data(p).size());
    for (size_t k = t.w.size() / ranks * ranks; k < t.w.size(); ++k) convert(t.w[k], t.next_w[k]);
    return saved;
  }
};

using controls::Row;
using controls::twin;

constexpr controls::RowsOf of{"muon_step"};

const Row rows[] = {
    of("muon_shards_orthogonalised", twin<ShardsOrthogonalised>, "forward,ledger", "replica",
       "deepspeedai/DeepSpeed 8437, NVIDIA/Megatron-LM 5961, MoonshotAI/Moonlight 27", "tp=2",
       "p >= 2"),
    of("muon_shards_normalised", twin<ShardsNormalised>, "forward", "ledger,lockstep,replica",
       "a direction that is brought to norm 1 where it is cut", "tp=2", "p >= 2"),
    of("muon_norm_of_own_shard", twin<NormOfOwnShard>, "forward", "ledger,lockstep",
       "pytorch/xla 4796", "tp=2 form=gram", "p >= 2"),
    of("muon_norms_added", twin<NormsAdded>, "forward", "ledger,lockstep,replica",
       "laekov/fastmoe 65", "tp=2 form=gram", "p >= 2"),
    of("muon_scale_of_shard", twin<ScaleOfShard>, "forward", "ledger,lockstep,replica",
       "MoonshotAI/Moonlight 31, NVIDIA/Megatron-LM 6380", "tp=2 scale=match_rms_adamw", "p >= 2"),
    of("muon_scale_of_padded", twin<ScaleOfPadded>, "forward", "ledger,lockstep,replica",
       "NVIDIA/Megatron-LM 7236", "tp=2", "p does not divide the rows"),
    of("muon_gram_left_local", twin<GramLeftLocal>, "forward", "ledger,lockstep",
       "deepspeedai/DeepSpeed 8437", "tp=2 form=gram", "p >= 2"),
    of("muon_gram_summed_once", twin<GramSummedOnce>, "forward", "ledger,lockstep",
       "a sum that is hoisted out of the loop that it belongs to", "tp=2 form=gram",
       "two iterations"),
    of("muon_gram_averaged", twin<GramAveraged>, "forward,ledger", "lockstep,replica",
       "meta-pytorch/torchtune 2172", "tp=2 form=gram", "p >= 2"),
    of("muon_gram_summed_over_dp", twin<GramSummedOverDp>, "forward,ledger", "lockstep,replica",
       "ByteDance-Seed/VeOmni 184", "tp=2 dp=2 form=gram", "copies over dp"),
    of("muon_gram_on_side_of_shard", twin<GramOnSideOfShard>, "forward,ledger", "lockstep,replica",
       "microsoft/dion 114", "tp=2 form=gram rows=6 matrices=1",
       "shards that are wide of a matrix that is tall"),
    of("muon_gathered_in_reverse", twin<GatheredInReverse>, "forward", "ledger,lockstep,replica",
       "NVIDIA/Megatron-LM 7162", "tp=2", "p >= 2"),
    of("muon_gathered_along_rows", twin<GatheredAlongRows>, "forward", "ledger,lockstep,replica",
       "microsoft/dion 114", "tp=2 cut=columns", "columns that are cut"),
    of("muon_gathered_as_stored", twin<GatheredAsStored>, "ledger", "lockstep,replica",
       "NVIDIA/Megatron-LM 1428", "tp=2 dtype=bf16 lr=1", "a direction wider than storage"),
    of("muon_not_turned_back", twin<NotTurnedBack>, "forward", "ledger,lockstep,replica",
       "a result that is copied back before it is turned back", "dp=2",
       "a matrix with more rows than columns"),
    of("muon_one_iteration_fewer", twin<OneIterationFewer>, "forward", "ledger,lockstep,replica",
       "a loop over range(1, steps)", "tp=2", "p >= 2"),
    of("muon_one_iteration_more", twin<OneIterationMore>, "forward,ledger", "lockstep,replica",
       "a loop that ends behind its last step", "tp=2 form=gram", "p >= 2"),
    of("muon_converging_coefficients", twin<ConvergingCoefficients>, "forward",
       "ledger,lockstep,replica", "coefficients of another Newton-Schulz iteration",
       "dp=2 dtype=f32", "f32"),
    of("muon_not_orthogonalised", twin<NotOrthogonalised>, "forward", "lockstep,replica",
       "deepspeedai/DeepSpeed 8461", "dp=2", "p >= 2"),
    of("muon_eps_added", twin<EpsAdded>, "forward", "ledger,lockstep,replica",
       "an eps that is added as Adam does", "dp=2 eps=1", "eps that is not small"),
    of("muon_eps_left_out", twin<EpsLeftOut>, "forward", "ledger,lockstep,replica",
       "NVIDIA-NeMo/Emerging-Optimizers 229, microsoft/dion 24", "dp=2 tiny=1", "a norm below eps"),
    of("muon_nesterov_left_out", twin<NesterovLeftOut>, "forward", "ledger,lockstep,replica",
       "zichongli5/NorMuon 5, PaddlePaddle/Paddle 12231", "dp=2",
       "momentum that is not the gradient"),
    of("muon_nesterov_twice", twin<NesterovTwice>, "forward", "ledger,lockstep,replica",
       "oysteijo/simd_neuralnet 17", "dp=2 mu=1/2", "momentum that is not the gradient"),
    of("muon_momentum_not_spent", twin<MomentumNotSpent>, "forward", "ledger,lockstep,replica",
       "google-deepmind/optax 1170", "dp=2", "momentum that is not the gradient"),
    of("muon_gradient_dampened", twin<GradientDampened>, "forward", "ledger,lockstep,replica",
       "lerp_ in place of mul_ and add_ on a state of the other convention", "dp=2",
       "momentum that is not the gradient"),
    of("muon_momentum_as_stored", twin<MomentumAsStored>, "forward", "ledger,lockstep,replica",
       "deepspeedai/DeepSpeed 7746", "dp=2 dtype=bf16 wire=f32", "momentum wider than storage"),
    of("muon_orthogonalised_before_momentum", twin<OrthogonalisedBeforeMomentum>, "forward",
       "ledger,lockstep,replica", "an optimizer around another one in the wrong order", "dp=2",
       "momentum"),
    of("muon_momentum_twice_a_step", twin<MomentumTwiceAStep>, "forward", "ledger,lockstep,replica",
       "deepspeedai/DeepSpeed 8443", "dp=2", "momentum"),
    of("muon_momentum_of_first_step", twin<MomentumOfFirstStep>, "repeat", "ledger,lockstep",
       "NVIDIA/Megatron-LM 2625", "dp=2", "two steps of one optimizer"),
    of("muon_gradient_left_local", twin<GradientsLeftLocal>, "forward,replica,ledger", "",
       "deepspeedai/DeepSpeed 4321", "dp=2", "p >= 2"),
    of("muon_gradient_averaged", twin<GradientsAveraged>, "forward,ledger", "lockstep,replica",
       "meta-pytorch/torchtune 2172", "dp=2", "p >= 2"),
    of("muon_gradient_reduced_twice", twin<GradientsReducedTwice>, "forward,ledger",
       "lockstep,replica", "hamishivi/tmax 9", "dp=2", "p >= 2"),
    of("muon_gradient_reduced_over_dp_alone", twin<ReducedOverDpAlone>, "forward,ledger,replica",
       "lockstep", "pytorch/torchtitan 685", "dp=2 cp=2", "two axes"),
    of("muon_copies_summed_over_tp", twin<CopiesSummedOverTp>, "forward,ledger", "lockstep,replica",
       "gradients of replicated parameters that are summed over tp as well", "tp=2 dp=2 cut=none",
       "copies over tp"),
    of("muon_gradient_reduced_as_stored", twin<GradientsReducedAsStored>, "forward,ledger",
       "lockstep,replica", "pytorch/pytorch 190626", "dp=2 dtype=bf16 wire=f32",
       "wire wider than storage"),
    of("muon_own_part_reduced", twin<OwnPartReduced>, "forward,replica", "ledger,lockstep",
       "deepspeedai/DeepSpeed 7807", "dp=2", "p >= 2"),
    of("muon_scale_of_transpose", twin<ScaleOfTranspose>, "forward", "ledger,lockstep,replica",
       "keras-team/keras 21885", "dp=2", "a matrix that is not square"),
    of("muon_scale_left_out", twin<ScaleLeftOut>, "forward", "ledger,lockstep,replica",
       "kozistr/pytorch_optimizer 371", "dp=2 scale=match_rms_adamw", "a scale that is not 1"),
    of("muon_scaled_twice", twin<ScaledTwice>, "forward", "ledger,lockstep,replica",
       "kozistr/pytorch_optimizer 371, NVIDIA/Megatron-LM 3715", "dp=2 scale=match_rms_adamw",
       "a matrix with more rows than columns"),
    of("muon_nothing_decays", twin<NothingDecays>, "forward", "ledger,lockstep,replica",
       "tinygrad/tinygrad 17708", "dp=2", "decay above 0"),
    of("muon_update_decays", twin<UpdateDecays>, "forward", "ledger,lockstep,replica",
       "a decay behind the update", "dp=2 dtype=f32", "decay above 0"),
    of("muon_decay_scaled", twin<DecayScaled>, "forward", "ledger,lockstep,replica",
       "a scale that is put into the learning rate", "dp=2", "decay above 0"),
    of("muon_decay_in_gradient", twin<DecayInGradient>, "forward", "ledger,lockstep,replica",
       "deepspeedai/DeepSpeed 482", "dp=2", "decay above 0"),
    of("muon_one_copy_decays", twin<OneCopyDecays>, "forward,replica", "ledger,lockstep",
       "copies that part since one rank alone decays", "dp=2", "decay above 0"),
    of("muon_parts_of_next_owner", twin<PartsOfNextOwner>, "forward", "ledger,lockstep,replica",
       "NVIDIA/Megatron-LM 7162", "dp=2 owner=one", "p >= 2"),
    of("muon_handed_out_before_update", twin<HandedOutBeforeUpdate>, "forward",
       "ledger,lockstep,replica", "NVIDIA/Megatron-LM 5707, NVIDIA/Megatron-LM 950",
       "dp=2 owner=one", "p >= 2"),
    of("muon_others_stay_stale", twin<OthersStayStale>, "forward,replica", "ledger,lockstep",
       "NVIDIA/Megatron-LM 6920", "dp=2 owner=one", "p >= 2"),
    of("muon_last_round_left_out", twin<LastRoundLeftOut>, "forward", "ledger,lockstep,replica",
       "KellerJordan/Muon 30", "dp=2 owner=one", "p does not divide the matrices"),
};

}  // namespace

void controls_muon(Registry& registry) { controls::add(registry, rows); }

}  // namespace shardproof
