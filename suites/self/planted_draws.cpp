// Random streams that do not follow the data, and a judge that would not see them. The contract is
// y = x o mask on rows cut over tp, with copies on dp; an element of the mask is 0 or 1 with equal
// chances, by its global index.
#include <fmt/format.h>

#include "fixtures/random.hpp"
#include "oracle/checks/draws.hpp"
#include "suites/self/planted.hpp"

namespace shardproof::planted {
namespace {

double mask(uint64_t seed, int64_t index) {
  return double(philox({uint32_t(index), 0, 0, 0}, {uint32_t(seed), uint32_t(seed >> 32)})[0] & 1);
}

// Where the rank's stream begins, and its seed.
struct Streams {
  std::function<int64_t(Rank&, int64_t elements)> first;
  std::function<uint64_t(Rank&)> seed;
};

int64_t by_shard(Rank& rank, int64_t elements) { return rank.coordinate(Axis::tp) * elements; }
int64_t from_the_start(Rank&, int64_t) { return 0; }
uint64_t of_the_line(Rank& rank) { return rank.line().seed(); }
uint64_t of_the_rank(Rank& rank) { return of_the_line(rank) + uint64_t(rank.world_rank()); }

Make masked(Streams streams) {
  return forward([streams](Rank& rank, const View& in, const View& out) {
    const int64_t first = streams.first(rank, in.elements());
    for (int64_t i = 0; i < in.elements(); ++i)
      store(out.flat(i), out.dtype,
            load(in.flat(i), in.dtype) * mask(streams.seed(rank), first + i));
  });
}

Contract masked_rows(const Registry& r, const std::string& name, bool declares_draws) {
  Contract c = r.contract("mapping_copy");
  c.name = name;
  c.family = "planted";
  c.cases = [](const std::string&) { return std::vector<std::string>{}; };
  c.witnesses.clear();
  c.illegal.clear();
  c.traffic = [](const Case&, const std::string&, int) { return std::vector<Traffic>{}; };
  c.operands = [](const Case& line) {
    const std::vector<int64_t> shape{line.at("tokens"), line.at("hidden")};
    const Layout rows{{Axis::dp, I()}, {Axis::tp, S(0)}};
    return std::vector<Operand>{{"x", Operand::input, shape, rows},
                                {"y", Operand::output, shape, rows}};
  };
  c.forward = [](const Case& line, std::span<const Whole> in, std::vector<Gauge>* gauges) {
    Whole y = in[0];
    for (size_t i = 0; i < y.value.size(); ++i) y.value[i] *= mask(line.seed(), int64_t(i));
    if (gauges) *gauges = {Gauge{}};
    return std::vector<Whole>{y};
  };
  if (declares_draws)
    c.drawn = [](const Case&) { return std::vector<Drawn>{{"mask", "y", {{"x", 1}}, 1}}; };
  return c;
}

// Shards of 80 elements with one stream pass a judge to whom the contract declares no draws: what
// catches them is the inequality, and without it the control escapes and nobody is judged.
std::string judge_without_the_inequality() {
  const auto gate_with = [](bool declares_draws) {
    Registry r;
    r.add(masked_rows(registry(), "masked", declares_draws));
    r.add(Subject{"", "masked", masked({by_shard, of_the_line}), forward_only()});
    Control shared;
    shared.name = "mask_shared_on_shards";
    shared.contract = "masked";
    shared.make = masked({from_the_start, of_the_line});
    shared.declared = forward_only();
    shared.check = "replica";
    shared.imitates = "one random stream on all shards";
    shared.witness = "masked tp=2 dp=2 axis=tp tokens=16 hidden=10";
    r.add(std::move(shared));
    return gate_of(r);
  };
  const Report with = gate_with(true), without = gate_with(false);
  if (with.controls.size() != 1 || with.controls[0].outcome != ControlResult::caught ||
      exit_code(with) != 0)
    return "declared draws: expected the control caught and exit 0, met\n" + controls_table(with);
  const ControlResult::Outcome outcome = without.controls.at(0).outcome;
  if (outcome == ControlResult::caught || exit_code(without) != 3)
    return "undeclared draws: expected the control not caught and exit 3, met\n" +
           controls_table(without);
  return "";
}

}  // namespace

void add_masked_rows(Registry& r) {
  r.add(masked_rows(r, "planted_masked_rows", true));
  r.add(Subject{"", "planted_masked_rows", masked({by_shard, of_the_line}), forward_only()});
}

std::vector<Plant> draws() {
  const std::string contract = "planted_masked_rows tp=2 dp=2 axis=tp",
                    line = contract + " tokens=16 hidden=10";
  return {
      {"one_stream_on_all_shards",
       line,
       masked({from_the_start, of_the_line}),
       {{"replica", Verdict::failed, 1, "mask[8,0]", {"shards on tp must differ", "2^-80"}}}},
      {"a_stream_for_each_rank",
       line,
       masked({by_shard, of_the_rank}),
       {{"replica", Verdict::failed, 2, "", {"mask", "copies on dp must be equal"}}}},
      // Six elements are equal by chance once in 64 lines: nobody is blamed.
      {"shards_too_short_to_differ",
       contract + " tokens=4 hidden=3",
       masked({from_the_start, of_the_line}),
       {{"replica", Verdict::passed, -1, "", {"not applicable", "2^-6"}}}},
  };
}

std::vector<Planted> of_the_draws() {
  return {without_subject("judge_without_the_inequality", judge_without_the_inequality)};
}

}  // namespace shardproof::planted
