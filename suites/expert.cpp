// Experts that are cut over ranks: tokens travel to the experts that they have chosen and back.
//
// How many rows a rank is sent follows from the routing, which is an operand, made from the line
// and the seed of a feed. So the calls that are due have a closed form: the routing is made once
// more from the line's own seed, whose feed is the one that the ledger is held to.
#include "suites/expert.hpp"

#include <algorithm>
#include <numeric>
#include <string>

#include "fixtures/random.hpp"
#include "oracle/check.hpp"
#include "oracle/registry.hpp"
#include "primitives/expert_alltoall.hpp"
#include "reference/expert.hpp"
#include "reference/running_error.hpp"
#include "suites/linear.hpp"
#include "suites/ours.hpp"
#include "suites/reading.hpp"
#include "suites/replicated.hpp"

namespace shardproof {
namespace experts {

namespace {

struct Rule {
  int64_t tokens, choices, experts;
  std::string route;
  uint64_t seed;
  bool operator==(const Rule&) const = default;
};

std::vector<int64_t> made_by(const Rule& r) {
  const bool even = r.route == "even", draws = r.route == "random" || r.route == "skewed";
  const int64_t k = r.choices, open = r.route == "skewed" ? k + (r.experts - k) / 2 : r.experts;
  const Stream123 stream(r.seed, "routing");
  std::vector<int64_t> chosen, left(static_cast<size_t>(open));
  for (int64_t t = 0; t < r.tokens; ++t) {
    std::iota(left.begin(), left.end(), 0);
    for (int64_t j = 0; j < k; ++j) {
      if (!draws || j >= open) {  // the latter on a line that is refused
        chosen.push_back((even ? t * k + j : j) % r.experts);
        continue;
      }
      const auto at = size_t(stream.below(uint64_t(t * k + j), open - j));
      chosen.push_back(left[at]);
      std::swap(left[at], left[size_t(open - j - 1)]);
    }
  }
  return chosen;
}

}  // namespace

// Traffic asks for the same one rank by rank: the last is kept.
std::vector<int64_t> routing(const Case& c, uint64_t seed) {
  thread_local Rule rule{};
  thread_local std::vector<int64_t> last;
  const Rule due{c.at("tokens"), c.at("topk"), c.at("experts"), c.text("route"), seed};
  if (!(rule == due)) last = made_by(due), rule = due;
  return last;
}

Key topk_key() {
  return linears::extent("topk", "2", 1, "experts that a token chooses, all different", 64);
}

Key route_key() {
  Key route{"route", "random",
            "who chooses whom: random; even; skewed: some experts idle; one: all choose the same"};
  route.choices = {"random", "even", "skewed", "one"};
  return route;
}

Operand chosen_operand(const Case& c, const Layout& tokens) {
  Operand chosen{"chosen", Operand::index, {c.at("tokens"), c.at("topk")}, tokens, false};
  chosen.dtype_override = DType::i64, chosen.fixed_dtype = true;
  chosen.made = [c](uint64_t seed) {
    const auto all = routing(c, seed);
    return std::vector<double>(all.begin(), all.end());
  };
  return chosen;
}

namespace {

bool cuts_ffn(const Case& c) { return c.has("ffn"); }  // over tp, which cuts no experts then

// The place of a rank in its expert group, whose first axis is tp where that cuts experts.
int64_t member_of(const Case& c, int rank) {
  const Mesh mesh = c.mesh();
  if (cuts_ffn(c)) return mesh.coordinate(rank, Axis::ep);
  return int64_t(mesh.coordinate(rank, Axis::ep)) * c.ranks(Axis::tp) +
         mesh.coordinate(rank, Axis::tp);
}
int64_t group_of(const Case& c, int rank) {
  const Mesh mesh = c.mesh();
  return int64_t(mesh.coordinate(rank, Axis::dp)) * c.ranks(Axis::cp) +
         mesh.coordinate(rank, Axis::cp);
}
// Parts of a group's tokens, each of which one rank dispatches, by member and share.
int64_t own_tokens_of(const Case& c) { return c.at("tokens") / groups(c) / members(c) / shares(c); }

// Rows that each expert gets from a group, or from one share of it.
std::vector<int64_t> rows_of_experts(const Case& c, const std::vector<int64_t>& routing,
                                     int64_t group, std::optional<int64_t> share = {}) {
  const auto slots = size_t(int64_t(routing.size()) / groups(c)),
             of_rank = size_t(own_tokens_of(c) * c.at("topk"));
  const std::vector<bool> takes = kept(c, routing);
  std::vector<int64_t> rows(static_cast<size_t>(c.at("experts")));
  for (size_t i = size_t(group) * slots; i < size_t(group + 1) * slots; ++i)
    if (takes[i] && (!share || int64_t(i / of_rank) % shares(c) == *share))
      ++rows[size_t(routing[i])];
  return rows;
}

}  // namespace

int64_t members(const Case& c) {
  return int64_t(c.ranks(Axis::ep)) * (cuts_ffn(c) ? 1 : c.ranks(Axis::tp));
}
int64_t shares(const Case& c) { return cuts_ffn(c) && c.on("sp") ? c.ranks(Axis::tp) : 1; }
int64_t groups(const Case& c) { return int64_t(c.ranks(Axis::dp)) * c.ranks(Axis::cp); }
int64_t first_expert(const Case& c, int rank) {
  return member_of(c, rank) * (c.at("experts") / members(c));
}

std::vector<int64_t> most_rows(const Case& c, const std::vector<int64_t>& routing) {
  std::vector<int64_t> most(static_cast<size_t>(c.at("experts")));
  for (int64_t g = 0; g < groups(c); ++g) {
    const auto of_group = rows_of_experts(c, routing, g);
    for (size_t e = 0; e < most.size(); ++e) most[e] = std::max(most[e], of_group[e]);
  }
  return most;
}

std::vector<bool> kept(const Case& c, const std::vector<int64_t>& routing) {
  const int64_t k = c.at("topk"), capacity = c.at("capacity"), own = own_tokens_of(c);
  std::vector<bool> takes(routing.size(), capacity == 0);
  if (capacity == 0) return takes;
  for (int64_t first = 0; first < c.at("tokens"); first += own) {
    std::vector<int64_t> rows(static_cast<size_t>(c.at("experts")));
    for (int64_t j = 0; j < k; ++j)
      for (int64_t t = first; t < first + own; ++t) {
        const auto slot = size_t(t * k + j);
        takes[slot] = rows[size_t(routing[slot])]++ < capacity;
      }
  }
  return takes;
}

void drop(const Case& c, const Whole& chosen, reference::Values& of_choices) {
  const auto takes = kept(c, {chosen.value.begin(), chosen.value.end()});
  for (size_t i = 0; i < of_choices.size(); ++i)
    if (!takes[i]) of_choices[i] = 0;
}

std::vector<int64_t> own_rows(const Case& c, int rank) {
  const int64_t own = c.at("experts") / members(c), first = first_expert(c, rank),
                padded = c.at("capacity") * members(c) * shares(c);
  const auto rows = rows_of_experts(c, routing(c, c.seed()), group_of(c, rank));
  if (padded > 0) return std::vector<int64_t>(size_t(own), padded);
  return {rows.begin() + first, rows.begin() + first + own};
}

Load load_of(const Case& c, const std::vector<int64_t>& routing, int world_rank) {
  const int64_t s = shares(c), own = c.at("experts") / members(c),
                first = first_expert(c, world_rank);
  if (const int64_t rows = c.at("experts") * c.at("capacity"); rows > 0)
    return {rows, rows, rows, s * rows};
  Load load{own_tokens_of(c) * c.at("topk")};
  const int64_t mine = s > 1 ? c.mesh().coordinate(world_rank, Axis::tp) : 0;
  for (int64_t i = 0; i < s; ++i) {
    const auto rows = rows_of_experts(c, routing, group_of(c, world_rank), i);
    const int64_t n = std::accumulate(rows.begin() + first, rows.begin() + first + own, int64_t(0));
    if (i == mine) load.received = n;
    load.block = std::max(load.block, n), load.rows += n;
  }
  return load;
}

Layout tokens_on(const Case& c) {
  return {{Axis::dp, S(0)},
          {Axis::cp, S(0)},
          {Axis::ep, S(0)},
          {Axis::tp, c.ranks(Axis::tp) > 1 && !c.on("sp") ? I() : S(0)}};
}

Key experts_key(const char* of_ranks) {
  Key count = linears::extent("experts", "", 1, of_ranks);
  count.derive = [](const Case& c) { return std::to_string(3 * members(c)); };
  return count;
}

Key capacity_key() {
  return linears::extent("capacity", "0", 0,
                         "rows that an expert takes of each rank, the rest is dropped; 0: all");
}

}  // namespace experts

namespace {

using namespace experts;
using linears::crossed;
using linears::extent;
using linears::gauge_of;
using linears::Relative;
using linears::together;
using linears::whole;
using reference::Values;

// ---- Operands

bool replicated_tokens(const Case& c) { return c.ranks(Axis::tp) > 1 && !c.on("sp"); }

std::vector<Operand> operands(const Case& c) {
  const int64_t T = c.at("tokens"), k = c.at("topk");
  const Layout owners{{Axis::dp, I()}, {Axis::cp, I()}, {Axis::ep, S(0)}, {Axis::tp, S(0)}};
  return {
      {"x", Operand::input, {T, c.at("hidden")}, tokens_on(c)},
      chosen_operand(c, tokens_on(c)),
      {"probs", Operand::input, {T, k}, tokens_on(c)},
      {"w", Operand::parameter, {c.at("experts"), c.at("out"), c.at("hidden")}, owners, true, 1},
      {"y", Operand::output, {T, c.at("out")}, tokens_on(c), true, 0}};
}

// ---- Reference

reference::ExpertShape shape_of(const Case& c) {
  return {c.at("tokens"), c.at("topk"), c.at("experts"), c.at("hidden"), c.at("out")};
}

Values weights_of(const Case& c, std::span<const Whole> in) {
  Values w = in[2].value;
  drop(c, in[1], w);
  return w;
}

// Rows that are results are rounded before they travel: those of Z, and, where a kernel weighs rows
// before the experts and not behind them, those that leave.
std::vector<Whole> forward(const Case& c, std::span<const Whole> in, std::vector<Gauge>* gauges) {
  const Values weights = weights_of(c, in);
  const auto of = [&](auto size) {
    return reference::experts(shape_of(c), size(in[0].value), in[1].value, size(weights),
                              size(in[3].value));
  };
  if (gauges)
    *gauges = {gauge_of(Relative(c).stored().sum(c.at("hidden")).stored().sum(c.at("topk")),
                        of(reference::absolute))};
  return {whole({c.at("tokens"), c.at("out")}, of([](const Values& v) { return v; }))};
}

std::vector<Whole> backward(const Case& c, std::span<const Whole> in, std::span<const Whole> cot,
                            std::vector<Gauge>* gauges) {
  const Values weights = weights_of(c, in);
  const auto of = [&](auto size) {
    auto d = reference::experts_backward(shape_of(c), size(in[0].value), in[1].value, size(weights),
                                         size(in[3].value), size(cot[0].value));
    drop(c, in[1], d.probs);
    return d;
  };
  auto d = of([](const Values& v) { return v; });
  if (gauges) {
    auto m = of(reference::absolute);
    const Relative sent = Relative(c).stored();
    // Of dW each expert sums its own rows, in each of the groups that its copies belong to.
    const auto rows = most_rows(c, {in[1].value.begin(), in[1].value.end()});
    Gauge dw;
    const size_t elements = m.w.size() / rows.size();
    for (size_t i = 0; i < m.w.size(); ++i)
      dw.bound.push_back(sent.sum(rows[i / elements]).reduced(groups(c)).of(m.w[i]));
    dw.magnitude = std::move(m.w);
    *gauges = {gauge_of(sent.sum(c.at("out")).stored().sum(c.at("topk")), std::move(m.x)),
               {},
               gauge_of(sent.sum(c.at("hidden")).sum(c.at("out")), std::move(m.probs)),
               std::move(dw)};
  }
  return {whole(in[0].shape, std::move(d.x)),
          {},
          whole(in[2].shape, std::move(d.probs)),
          whole(in[3].shape, std::move(d.w))};
}

// ---- Traffic

std::vector<Traffic> traffic(const Case& c, const std::string&, int rank) {
  const Load load = load_of(c, routing(c, c.seed()), rank);
  const int64_t h = c.at("hidden"), o = c.at("out"), own = c.at("tokens") / groups(c) / members(c);
  const std::string group = c.ranks(Axis::tp) == 1 ? "ep" : c.ranks(Axis::ep) == 1 ? "tp" : "tp,ep";
  std::vector<Traffic> due;
  const auto call = [&](Op op, const std::string& label, bool backward, int64_t count, DType type) {
    due.push_back({op, Reduce::none, label, backward, count, type});
  };
  if (c.at("capacity") == 0) call(Op::all_gather, group, false, c.at("experts"), DType::i64);
  call(Op::all_to_all, group, false, load.sent * h, c.dtype());
  call(Op::all_to_all, group, false, load.received * o, c.dtype());
  if (replicated_tokens(c)) call(Op::all_gather, "tp", false, own * o, c.dtype());
  call(Op::all_to_all, group, true, load.sent * o, c.dtype());
  call(Op::all_to_all, group, true, load.received * h, c.dtype());
  if (replicated_tokens(c)) {
    call(Op::all_gather, "tp", true, own * h, c.dtype());
    call(Op::all_gather, "tp", true, own * c.at("topk"), c.dtype());
  }
  for (const Traffic& t : replicated::coalesced(c, reading::summed_axes(c, false),
                                                c.at("experts") / members(c) * o * h))
    due.push_back(t);
  return due;
}

// ---- Keys and lines

std::vector<Key> keys() {
  return {extent("tokens", "48", 1, "rows of x"),
          extent("hidden", "10", 1, "columns of x"),
          extent("out", "7", 1, "columns of y"),
          experts_key("experts; left out: three for each rank of ep and tp"),
          topk_key(),
          route_key(),
          capacity_key(),
          replicated::sp_key(),
          linears::microbatches_key()};
}

// The line of two microbatches has few tokens for many experts: each microbatch leaves others of
// them idle, whose sums stay.
std::vector<std::string> cases(const std::string& tier) {
  const auto smoke =
      crossed({"expert_alltoall"},
              {"ep=2", "ep=4", "ep=4 route=skewed topk=3", "ep=2 route=one topk=1", "ep=2 dp=2",
               "tp=2 ep=2", "tp=2 ep=2 sp=on", "ep=2 microbatches=2 experts=12 tokens=8",
               "ep=4 dtype=bf16 fill=normal", "ep=2 capacity=5", "ep=4 capacity=2 route=skewed"});
  if (tier == "smoke") return smoke;
  const std::vector<std::string> ranks{"expert_alltoall", "expert_alltoall ep=2",
                                       "expert_alltoall ep=3", "expert_alltoall ep=4",
                                       "expert_alltoall ep=8"};
  const auto ci =
      together({smoke,
                crossed(ranks, {"", "route=even", "route=skewed", "route=one", "fill=normal",
                                "dtype=f32 fill=normal topk=3", "strides=transposed"}),
                crossed({"expert_alltoall tp=2 ep=2 dp=2", "expert_alltoall tp=4 sp=on",
                         "expert_alltoall tp=2 ep=4 order=ep,tp", "expert_alltoall cp=2 ep=2 dp=2",
                         "expert_alltoall tp=4 ep=2 sp=on", "expert_alltoall tp=3"},
                        {"", "route=skewed", "dtype=f32 fill=normal", "dtype=bf16 fill=normal",
                         "capacity=1 topk=3"}),
                crossed(ranks, {"capacity=2", "capacity=3 route=one topk=3 dtype=f32 fill=normal",
                                "capacity=6 route=even strides=transposed"}),
                crossed({"expert_alltoall ep=4"},
                        {"dtype=f16 fill=normal", "dtype=bf16 topk=1", "strides=expanded",
                         "strides=expanded_inputs", "experts=4", "experts=4 topk=4", "seed=2",
                         "tokens=4 topk=1", "fill=cancelling", "dtype=f32 fill=large",
                         "tokens=96 hidden=33 out=17 dtype=f32 fill=normal"}),
                {"expert_alltoall ep=2 dp=2 microbatches=2 dtype=bf16 grad=f32 fill=normal",
                 "expert_alltoall ep=2 dp=2 dtype=bf16 wire=f32 grad=f32 fill=normal",
                 "expert_alltoall ep=4 topk=12 route=random"}});
  if (tier != "nightly") return ci;
  return together(
      {ci, crossed(crossed({"expert_alltoall ep=8", "expert_alltoall ep=6",
                            "expert_alltoall tp=2 ep=4 sp=on", "expert_alltoall tp=2 ep=2 cp=2"},
                           {"route=random topk=4", "route=skewed", "route=one topk=3"}),
                   {"dtype=f32 fill=normal", "dtype=f16 fill=normal", "strides=transposed seed=3",
                    "tokens=192 hidden=65 out=33 fill=normal"})});
}

std::vector<Gemm> gemms(const Case& c, int rank) {
  const auto rows = own_rows(c, rank);
  const int64_t h = c.at("hidden"), o = c.at("out"), first = first_expert(c, rank);
  std::vector<Gemm> list;
  for (size_t e = 0; e < rows.size(); ++e) {
    const std::string number = std::to_string(first + int64_t(e));
    list.push_back({"Z = X W^T of expert " + number, false, rows[e], o, h});
    list.push_back({"dW = G^T X of expert " + number, true, o, h, rows[e]});
    list.push_back({"dX = G W of expert " + number, true, rows[e], h, o});
  }
  return list;
}

Contract expert_alltoall() {
  Contract c;
  c.name = "expert_alltoall";
  c.family = "expert";
  c.summary = "tokens to the experts that they have chosen and back, by two all-to-alls";
  c.linear = true;
  c.keys = keys();
  c.precondition = primitives::refused_experts;
  c.operands = operands;
  c.forward = forward;
  c.backward = backward;
  c.traffic = traffic;
  // Sums of products of three factors; an expert gets a token once.
  c.integer_range = [](const Case& line) {
    const int64_t k = line.at("topk"), h = line.at("hidden"), o = line.at("out");
    return linears::range_of_products(
        line, std::max({k * h, k * o, h * o, line.at("tokens") * line.at("microbatches")}), 3);
  };
  c.cases = cases;
  c.gemms = gemms;
  c.illegal = {"expert_alltoall ep=2 experts=5",
               "expert_alltoall ep=4 tokens=10",
               "expert_alltoall ep=2 experts=4 topk=5",
               "expert_alltoall tp=2 ep=2 experts=6",
               "expert_alltoall tp=2 tokens=9",
               "expert_alltoall ep=2 dp=2 tokens=6",
               "expert_alltoall ep=2 pp=2",
               "expert_alltoall ep=4 capacity=13"};
  c.witnesses = {"expert_alltoall ep=2",      "expert_alltoall ep=3",
                 "expert_alltoall ep=4",      "expert_alltoall ep=2 dp=2",
                 "expert_alltoall tp=2 ep=2", "expert_alltoall ep=4 capacity=2"};
  return c;
}

}  // namespace

void family_expert(Registry& r) {
  r.add(expert_alltoall());
  add_ours<primitives::ExpertAlltoall>(r, "expert_alltoall");
}

}  // namespace shardproof
