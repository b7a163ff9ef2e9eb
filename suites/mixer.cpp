// The mixer of Mamba-2 with an all-to-all on either side of it: what Megatron's layers run under
// context parallelism, on whole sequences of a rank's heads.
#include <algorithm>
#include <optional>

#include "oracle/check.hpp"
#include "oracle/registry.hpp"
#include "primitives/mixer_alltoall.hpp"
#include "reference/mixer.hpp"
#include "suites/ours.hpp"
#include "suites/reading.hpp"
#include "suites/recurrent.hpp"

namespace shardproof {
namespace {

using namespace contexts;
using namespace recurrences;
using linears::choice;
using linears::crossed;
using linears::extent;
using linears::listed;
using linears::range_of_products;
using linears::Relative;
using linears::together;
using linears::whole;
using reference::Values;

enum Input : size_t { x, b, c, a, wx, wb, wc, bx, bb, bc, d, inputs };

reference::Mixer mixer_of(const Case& line) {
  return {line.at("heads"), line.at("groups"), line.at("head_dim"), line.at("state_dim"),
          line.at("width")};
}

int64_t tokens_of(const Case& line) { return rows_of(line, false) * batch_of(line); }

std::vector<Operand> operands(const Case& line) {
  const reference::Mixer m = mixer_of(line);
  const Layout copies{{Axis::dp, I()}, {Axis::cp, I()}, {Axis::tp, S(0)}};
  const auto tokens = [&](const char* name, Operand::Role role, int64_t things, int64_t dim) {
    return Operand{name, role, token_shape(line, false, {things, dim}), on_tokens(line)};
  };
  const auto parameter = [&](const char* name, std::vector<int64_t> shape) {
    return Operand{name, Operand::parameter, std::move(shape), copies};
  };
  std::vector<Operand> list{tokens("x", Operand::input, m.heads, m.head_dim),
                            tokens("b", Operand::input, m.groups, m.state_dim),
                            tokens("c", Operand::input, m.groups, m.state_dim),
                            decays(line),
                            parameter("wx", {m.heads, m.head_dim, m.width}),
                            parameter("wb", {m.groups, m.state_dim, m.width}),
                            parameter("wc", {m.groups, m.state_dim, m.width}),
                            parameter("bx", {m.heads, m.head_dim}),
                            parameter("bb", {m.groups, m.state_dim}),
                            parameter("bc", {m.groups, m.state_dim}),
                            parameter("d", {m.heads}),
                            tokens("y", Operand::output, m.heads, m.head_dim)};
  list[x].contraction = 0;
  return list;
}

// Of what `size` makes of each operand.
template <class Size>
struct Sized {
  std::vector<Values> list;
  Sized(std::span<const Whole> in, const Values& decays, const Size& size) {
    for (size_t i = 0; i < inputs; ++i) list.push_back(size(i == a ? decays : in[i].value));
  }
  reference::MixerInputs operands() const {
    return {list[x],  list[b],  list[c],  list[a],  list[wx], list[wb],
            list[wc], list[bx], list[bb], list[bc], list[d]};
  }
};

Values as_is(const Values& v) { return v; }

Gauge gauge(const Relative& r, int64_t roundings, Values magnitude) {
  Gauge g = linears::gauge_of(r, std::move(magnitude));
  g.terms = roundings;
  return g;
}

// So many roundings of sums, and so many that are stored on the way: x', b', c', and gradients of
// them.
Relative passing(const Case& line, int64_t roundings, int stored) {
  Relative r = Relative(line).sum(roundings);
  for (int i = 0; i < stored; ++i) r = r.stored();
  return r;
}

std::vector<Whole> forward(const Case& line, std::span<const Whole> in,
                           std::vector<Gauge>* gauges) {
  const auto of = sequences(line);
  const auto decays = factors(line, in[a]);
  const auto result = [&](auto size) {
    const Sized sized(in, decays, size);
    return reference::mixer(mixer_of(line), of, sized.operands());
  };
  if (gauges) {
    const int64_t n = reference::mixer_roundings(mixer_of(line), longest(line), 1).y +
                      roundings_of_logarithms(line, in[a]);
    *gauges = listed(gauge(passing(line, n, 3), n, result(reference::absolute)));
  }
  return listed(whole(in[x].shape, result(as_is)));
}

// Ranks of cp that hold one group, where a rank of tp has fewer of them.
int64_t copies(const Case& line) {
  const int64_t groups = line.at("groups") / line.ranks(Axis::tp);
  return groups < ranks(line) ? ranks(line) / groups : 1;
}

std::vector<Gauge> gradient_gauges(const Case& line, std::span<const Whole> in,
                                   reference::MixerGradients m) {
  const int64_t dp = line.ranks(Axis::dp), held = copies(line),
                own = rows_of(line, false) * own_batch(line);
  auto n = reference::mixer_roundings(mixer_of(line), longest(line), own);
  const int64_t more = roundings_of_logarithms(line, in[a]);
  if (in_logarithms(line)) {
    m.a = of_logarithms(line, std::move(m.a), in[a], m.read, m.written, m.of_read, m.of_written);
    n.a = roundings_of_gradient(line, n.a, n.group, line.at("state_dim"));
  }
  // A rank's part of a parameter's gradient is 0 where others have the heads: only so many round.
  const auto summed = [&](int64_t roundings, int stored, int64_t parts, Values magnitude) {
    const Relative own_part = passing(line, roundings, stored);
    const bool travels = ranks(line) * dp > 1;
    return gauge(travels ? own_part.reduced(std::max<int64_t>(parts, 2)) : own_part, roundings,
                 std::move(magnitude));
  };
  const auto of_tokens = [&](int64_t roundings, int64_t parts, Values magnitude) {
    return gauge(passing(line, roundings, 3).reduced(parts), roundings, std::move(magnitude));
  };
  const int64_t filter = n.filter + more;
  return listed(
      of_tokens(n.x + more, 1, std::move(m.x)), of_tokens(n.group + more, held, std::move(m.b)),
      of_tokens(n.group + more, held, std::move(m.c)), of_tokens(n.a + more, 1, std::move(m.a)),
      summed(filter, 3, dp, std::move(m.wx)), summed(filter, 3, dp * held, std::move(m.wb)),
      summed(filter, 3, dp * held, std::move(m.wc)), summed(filter, 3, dp, std::move(m.bx)),
      summed(filter, 3, dp * held, std::move(m.bb)), summed(filter, 3, dp * held, std::move(m.bc)),
      summed(n.d, 1, dp, std::move(m.d)));
}

std::vector<Whole> backward(const Case& line, std::span<const Whole> in, std::span<const Whole> cot,
                            std::vector<Gauge>* gauges) {
  const auto of = sequences(line);
  const auto decays = factors(line, in[a]);
  const auto gradients = [&](auto size) {
    const Sized sized(in, decays, size);
    const Values g = size(cot[0].value);
    return reference::mixer_backward(mixer_of(line), of, sized.operands(), g);
  };
  auto of_in = gradients(as_is);
  if (in_logarithms(line)) times(of_in.a, decays);
  if (gauges) *gauges = gradient_gauges(line, in, gradients(reference::absolute));
  std::vector<Whole> list;
  for (Values* v : {&of_in.x, &of_in.b, &of_in.c, &of_in.a, &of_in.wx, &of_in.wb, &of_in.wc,
                    &of_in.bx, &of_in.bb, &of_in.bc, &of_in.d})
    list.push_back(whole(in[list.size()].shape, std::move(*v)));
  return list;
}

std::vector<Traffic> traffic(const Case& line, const std::string& plan, int) {
  const reference::Mixer m = mixer_of(line);
  const int64_t p = ranks(line), tp = line.ranks(Axis::tp),
                tokens = own_rows(line) * own_batch(line), heads = tokens * m.heads / tp,
                groups = tokens * m.groups / tp * copies(line) * m.state_dim;
  const DType wire = linears::wire_of(line), back = copies(line) > 1 ? wire : line.dtype();
  std::vector<Traffic> due;
  const auto alltoall = [&](bool backward, int64_t count, DType type) {
    if (p > 1) due.push_back(over_cp(Op::all_to_all, backward, count, type));
  };
  // Of what comes by token, and of its gradients.
  const auto inputs = [&](bool backward, DType type) {
    const int64_t all = heads * (m.head_dim + 1) + 2 * groups;
    if (plan == "packed") return alltoall(backward, all, type);
    alltoall(backward, heads * m.head_dim, line.dtype());
    alltoall(backward, groups, type);
    alltoall(backward, groups, type);
    alltoall(backward, heads, line.dtype());
  };
  inputs(false, line.dtype());
  alltoall(false, heads * m.head_dim, line.dtype());
  alltoall(true, heads * m.head_dim, line.dtype());
  inputs(true, back);
  const auto axes = reading::summed_axes(line, false);
  if (!axes.empty())
    due.push_back(
        {Op::all_reduce, Reduce::sum, reading::label(axes), true,
         (m.heads * m.head_dim + 2 * m.groups * m.state_dim) / tp * (m.width + 1) + m.heads / tp,
         wire});
  return due;
}

// x', b' and c' are sums of so many products of two; y one of products of the three, a gradient one
// of five of these numbers and a cotangent, that of a decay of six.
std::optional<int64_t> range(const Case& line) {
  if (in_logarithms(line)) return std::nullopt;
  const reference::Mixer m = mixer_of(line);
  const int64_t length = longest(line), taps = std::min(m.width, length), f = taps + 1,
                read = length * std::max(m.state_dim, m.heads / m.groups * m.head_dim);
  const auto six = range_of_products(
                 line, std::max(tokens_of(line) * (read * f * f + 1), read * f * f * f + f), 6),
             seven = range_of_products(
                 line, length * length / 4 * m.state_dim * m.head_dim * f * f * f + 1, 7);
  return six && seven ? std::optional(std::min(*six, *seven)) : std::nullopt;
}

// All pairs of tokens, as of scan_context, and taps.
double work(const Case& line) {
  const reference::Mixer m = mixer_of(line);
  const double n = double(m.state_dim), dim = double(m.head_dim), tokens = double(tokens_of(line)),
               channels = double(m.heads) * dim + 2 * double(m.groups) * n;
  return tokens * double(longest(line)) * double(m.heads) * (n * dim + 3 * (n + dim)) +
         3 * tokens * channels * double(std::min(m.width, longest(line)));
}

std::vector<Key> keys() {
  std::vector<Key> list = token_keys("48");
  Key heads = extent("heads", "", 1, "each of which has a state; left out: two a rank"),
      groups = extent("groups", "", 1, "of b and c, each read by as many heads; left out: tp");
  heads.derive = [](const Case& line) {
    return std::to_string(2 * line.ranks(Axis::tp) * ranks(line));
  };
  groups.derive = [](const Case& line) { return std::to_string(line.ranks(Axis::tp)); };
  list.push_back(std::move(heads));
  list.push_back(std::move(groups));
  list.push_back(extent("head_dim", "2", 1, "features of x and y, columns of a state"));
  list.push_back(extent("state_dim", "3", 1, "features of b and c, rows of a state"));
  list.push_back(extent("width", "4", 1, "tokens that a filter sees, its own the last", 1024));
  list.push_back(decay_key());
  list.push_back(linears::microbatches_key());
  return list;
}

std::vector<std::string> cases(const std::string& tier) {
  const auto smoke =
      crossed({"mixer_alltoall"}, {"cp=2 docs=5,1,6 layout=zigzag", "cp=4 tokens=16 groups=2",
                                   "cp=2 dtype=bf16 fill=normal tokens=12 heads=8 groups=4",
                                   "cp=2 tp=2 tokens=8 groups=2"});
  if (tier == "smoke") return smoke;
  const std::vector<std::string> ranks{"mixer_alltoall", "mixer_alltoall cp=2",
                                       "mixer_alltoall cp=3", "mixer_alltoall cp=4",
                                       "mixer_alltoall cp=8"};
  const auto ci = together(
      {smoke,
       crossed(ranks, {"tokens=24", "docs=0,5,0,0,14 dtype=f32 fill=normal layout=zigzag_row"}),
       crossed(
           {"mixer_alltoall cp=4"},
           {"groups=4 docs=9,7", "groups=8 tokens=16", "groups=2 dtype=f16 fill=normal tokens=16",
            "dtype=bf16 wire=f32 fill=normal docs=9,7", "dtype=f32 acc=f64 fill=normal tokens=16",
            "strides=transposed docs=9,7 groups=2", "strides=expanded tokens=16 fill=normal",
            "fill=cancelling dtype=f32 tokens=16", "head_dim=1 state_dim=5 tokens=12 width=1",
            "seq=8 batch=3 layout=zigzag",
            "cu_seqlens=0,3,3,13 microbatches=2 dtype=f32 fill=normal", "width=9 tokens=8",
            "dtype=f32 tokens=8 width=2", "decay=log fill=normal docs=9,7 layout=zigzag groups=2",
            "decay=log fill=normal dtype=bf16 tokens=16"}),
       {"mixer_alltoall cp=2 dp=2 seq=8 batch=4 microbatches=2",
        "mixer_alltoall cp=2 tp=2 order=cp,tp dtype=f32 fill=normal tokens=12 groups=4",
        "mixer_alltoall cp=2 strides=expanded_inputs dtype=f32 fill=normal tokens=12",
        "mixer_alltoall cp=4 tp=2 tokens=8 groups=4",
        "mixer_alltoall cp=2 tokens=8 heads=8 groups=4", "mixer_alltoall cp=3 fill=large tokens=12",
        "mixer_alltoall tp=3 tokens=12",
        "mixer_alltoall cp=2 layout=zigzag tokens=16 heads=6 groups=2",
        "mixer_alltoall cp=3 layout=zigzag_row docs=9,1,8",
        "mixer_alltoall cp=8 layout=zigzag docs=9,20 dtype=f32 fill=normal groups=4"}});
  if (tier != "nightly") return ci;
  return together(
      {ci,
       crossed(ranks, {"", "docs=1,2,3,4,5,6,7", "width=13 tokens=24 dtype=f32 fill=normal",
                       "docs=3,9,12 dtype=bf16 fill=normal", "tokens=96 dtype=f32 fill=normal"})});
}

Contract mixer_alltoall() {
  Contract contract;
  contract.name = "mixer_alltoall";
  contract.family = "recurrent";
  contract.summary =
      "Mamba-2's mixer without activation, over cp as Megatron runs it: tokens changed for heads, "
      "filters and recurrence of whole sequences, and back";
  contract.linear = true;
  contract.keys = keys();
  contract.precondition = primitives::refused_mixer;
  contract.operands = operands;
  contract.forward = forward;
  contract.backward = backward;
  contract.traffic = traffic;
  contract.plans = {"packed"};
  contract.further_work = work;
  contract.integer_range = range;
  contract.inexact = logarithms_are_inexact;
  contract.cases = cases;
  contract.sequences = sequences_of;
  contract.illegal =
      crossed({contract.name}, {"cp=2 heads=3", "cp=2 tp=2 heads=6 groups=2", "tp=2 groups=1",
                                "cp=4 heads=12 groups=3", "cp=2 heads=4 groups=3", "cp=4 tokens=10",
                                "cp=2 seq=8 batch=3 tokens=20", "dp=2", "cp=2 docs=7,-1,8",
                                "cp=2 docs=7,1 tokens=9"});
  contract.witnesses =
      crossed({contract.name}, {"cp=2 docs=7,5", "cp=3 tokens=12 layout=zigzag",
                                "cp=4 tokens=12 groups=2", "cp=2 dp=2 seq=8 batch=2"});
  return contract;
}

}  // namespace

void family_mixer(Registry& r) {
  r.add(mixer_alltoall());
  add_ours<primitives::MixerAlltoall>(r, "mixer_alltoall");
}

}  // namespace shardproof
