#include "oracle/checks/draws.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "fixtures/sharding.hpp"
#include "oracle/joined.hpp"

namespace shardproof {
namespace {

int operand_named(std::span<const Operand> operands, const std::string& name) {
  for (size_t k = 0; k < operands.size(); ++k)
    if (operands[k].name == name) return int(k);
  throw std::logic_error("Contract::drawn: expected an operand of the line, met " + name);
}

// Which shard a rank holds: its coordinates on the axes that cut the value.
std::vector<int> shard_of(const Mesh& mesh, const std::vector<Axis>& shards, int rank) {
  std::vector<int> at;
  for (Axis a : shards) at.push_back(mesh.coordinate(rank, a));
  return at;
}

int64_t pairs_of_shards(const Mesh& mesh, const std::vector<Axis>& shards) {
  int64_t pairs = 0;
  for (int b = 0; b < mesh.world(); ++b)
    for (int a = 0; a < b; ++a) pairs += shard_of(mesh, shards, a) != shard_of(mesh, shards, b);
  return pairs;
}

int64_t smallest_shard(const Operand& o, const Mesh& mesh) {
  int64_t least = std::numeric_limits<int64_t>::max();
  for (int r = 0; r < mesh.world(); ++r)
    least = std::min(least, product(local_shape(o.shape, o.layout, mesh, r)));
  return least;
}

std::string axes_text(const std::vector<Axis>& axes) {
  std::vector<std::string> names;
  for (Axis a : axes) names.emplace_back(name(a));
  return joined(names);
}

Look look_at(Drawn drawn, std::span<const Operand> operands, const Mesh& mesh) {
  Look look;
  look.operand = operand_named(operands, drawn.output);
  for (const auto& given : drawn.given) operand_named(operands, given.first);
  look.drawn = std::move(drawn);
  for (const auto& [axis, placement] : operands[size_t(look.operand)].layout) {
    if (mesh.size(axis) == 1) continue;
    switch (placement.kind) {
      case Placement::invariant:
      case Placement::replicate:
        look.copies.push_back(axis);
        break;
      case Placement::shard:
      case Placement::varying:
        look.shards.push_back(axis);
        break;
      case Placement::partial:
        break;  // says nothing about either
    }
  }
  return look;
}

// How many draws make a clash by chance unlikely enough, or why no number does.
void count_draws(Look& look, const Operand& o, const Mesh& mesh, size_t looks, bool many) {
  if (look.shards.empty()) return;
  const int64_t elements = smallest_shard(o, mesh);
  const double each = look.drawn.bits * double(elements),
               due = false_clash_bits +
                     std::log2(double(pairs_of_shards(mesh, look.shards)) * double(looks));
  const int most = many ? most_draws : 1;
  look.times = int(std::min(double(most), std::ceil(due / std::max(each, 1e-9))));
  look.bits = each * look.times;
  if (look.bits >= due) return;
  look.not_judged = fmt::format(
      "not applicable: {} of {} {} equal by chance with 2^-{:.3g}, and 2^-{:.3g} "
      "is "
      "due",
      number_of(look.times, "draw"), number_of(elements, "element"), look.times == 1 ? "is" : "are",
      look.bits, due);
  look.times = 1;
}

}  // namespace

std::vector<Look> looks_at_draws(const Contract& contract, const Case& line) {
  std::vector<Look> looks;
  if (!contract.drawn) return looks;
  const Mesh mesh = line.mesh();
  const auto operands = contract.operands(line);
  for (Drawn& d : contract.drawn(line)) looks.push_back(look_at(std::move(d), operands, mesh));
  for (Look& look : looks)
    count_draws(look, operands[size_t(look.operand)], mesh, looks.size(),
                !contract.draw_key.empty());
  std::erase_if(looks, [](const Look& l) { return l.copies.empty() && l.shards.empty(); });
  return looks;
}

std::string draws_not_judged(std::span<const Look> looks) {
  std::vector<std::pair<std::string, std::string>> by_reason;  // names of what is drawn
  for (const Look& look : looks) {
    if (look.not_judged.empty()) continue;
    const std::string why =
        fmt::format("shards on {} must differ, {}", axes_text(look.shards), look.not_judged);
    auto same = std::find_if(by_reason.begin(), by_reason.end(),
                             [&](const auto& r) { return r.first == why; });
    if (same == by_reason.end())
      by_reason.emplace_back(why, look.drawn.name);
    else
      same->second += ", " + look.drawn.name;
  }
  std::string text;
  for (const auto& [why, names] : by_reason)
    text += (text.empty() ? "" : "; ") + names + ": " + why;
  return text;
}

std::vector<std::pair<std::string, std::string>> draw_keys(const Contract& contract,
                                                           const Case& line, int k) {
  for (const Key& key : contract.keys) {
    if (contract.draw_key.empty() || key.name != contract.draw_key) continue;
    const int64_t range = key.high - key.low + 1, from = line.at(key.name) - key.low;
    return {{key.name, std::to_string(key.low + (from + k) % range)}};
  }
  return {};
}

const double* given_value(const Look& look, const std::string& input) {
  for (const auto& [operand, value] : look.drawn.given)
    if (operand == input) return &value;
  return nullptr;
}

Feed feed_of_draw(const Contract& contract, const Case& line, const Look& look, int k, Feed base) {
  const auto operands = contract.operands(line);
  for (size_t i = 0; i < operands.size(); ++i)
    if (const double* v = given_value(look, operands[i].name)) {
      const auto shape = whole_shape(operands[i].shape, operands[i].layout, line.mesh());
      base.given.push_back({int(i), std::vector<double>(size_t(product(shape)), *v)});
    }
  base.keys = draw_keys(contract, line, k);
  return base;
}

namespace judging {
namespace {

// The draws of a look, as the ranks recorded them.
struct Draws {
  const Evidence& e;
  const Look& look;
  int shot = 0, first_step = 0;

  const Operand& shown_by() const { return e.operands[size_t(look.operand)]; }
  const ResultTensor* of(int rank, int k) const {
    return e.result(rank, shot, first_step + k, look.operand, false);
  }
  // Elements of the smaller of two shards; 0 where one is missing.
  int64_t common(int a, int b) const {
    const ResultTensor *x = of(a, 0), *y = of(b, 0);
    if (!x || !y) return 0;
    return int64_t(std::min(x->bytes.size(), y->bytes.size()) / size_of(x->dtype));
  }
  // Whether two draws agree on the elements that both have.
  bool equal(const ResultTensor* x, const ResultTensor* y) const {
    return x && y &&
           std::memcmp(x->bytes.data(), y->bytes.data(),
                       std::min(x->bytes.size(), y->bytes.size())) == 0;
  }
  // Draws of a rank that differ from one another: a program that knows nothing of the key that
  // numbers them gives one draw many times, which is evidence once.
  int different(int rank) const {
    int n = 0;
    for (int k = 0; k < look.times; ++k) {
      bool known = false;
      for (int j = 0; j < k && !known; ++j) known = equal(of(rank, j), of(rank, k));
      n += !known;
    }
    return n;
  }
  // Whether b drew what a drew, each time, element by element, and not by chance.
  bool repeats(int a, int b) const {
    if (common(a, b) == 0) return false;
    for (int k = 0; k < look.times; ++k)
      if (!equal(of(a, k), of(b, k))) return false;
    return look.bits * different(a) >= false_clash_bits * look.times;
  }
};

// One finding for all groups and draws in which copies part, with the first element of the first.
void copies_agree(const Draws& d, Agreement& found) {
  std::optional<Finding> first;
  for (int k = 0; k < d.look.times; ++k)
    for (const auto& group : d.e.mesh.groups(d.look.copies)) {
      const ResultTensor* leader = d.of(group[0], k);
      bool agree = leader != nullptr;
      for (size_t m = 1; m < group.size() && agree; ++m) {
        const ResultTensor* member = d.of(group[m], k);
        agree = member && same_bytes(*leader, *member);
        found.compared += int64_t(leader->bytes.size() / size_of(leader->dtype));
      }
      if (agree || !leader) continue;
      Finding f = parting(d.e, group, d.shot, *leader);
      if (!first) {
        first = std::move(f);
        continue;
      }
      for (int r : f.ranks)
        if (std::find(first->ranks.begin(), first->ranks.end(), r) == first->ranks.end())
          first->ranks.push_back(r);
    }
  if (!first) return;
  std::sort(first->ranks.begin(), first->ranks.end());
  first->tensor = d.look.drawn.name;
  if (!first->where.empty()) first->where.replace(0, d.shown_by().name.size(), d.look.drawn.name);
  first->message += fmt::format("; copies on {} must be equal", axes_text(d.look.copies));
  first->means =
      "what is drawn follows the rank where it has to follow the data: copies of one value part";
  found.findings.push_back(std::move(*first));
}

// Axes on which two ranks hold different shards.
std::vector<Axis> apart(const Draws& d, int a, int b) {
  std::vector<Axis> axes;
  for (Axis axis : d.look.shards)
    if (d.e.mesh.coordinate(a, axis) != d.e.mesh.coordinate(b, axis)) axes.push_back(axis);
  return axes;
}

Finding repeated(const Draws& d, int a, int b, std::vector<int> ranks) {
  const Operand& o = d.shown_by();
  const int draws = d.different(a);
  Finding f;
  f.tensor = d.look.drawn.name;
  f.rank = b;
  f.holders = {b};
  f.ranks = std::move(ranks);
  f.ratio = std::numeric_limits<double>::infinity();
  f.wrong = f.compared = d.common(a, b);
  const auto whole = whole_indices(o.shape, o.layout, d.e.mesh, b);
  f.where = index_text(f.tensor, whole.at(0), o.shape, o.layout, d.e.mesh, /*denoted=*/false);
  f.index = coordinates(whole.at(0), whole_shape(o.shape, o.layout, d.e.mesh));
  f.message = fmt::format(
      "{} hold equal draws where shards on {} must differ: from here on rank {} repeats what rank "
      "{} "
      "drew, in {} (by chance: 2^-{:.0f})",
      ranks_text(f.ranks, 0), axes_text(apart(d, a, b)), b, a, number_of(draws, "draw"),
      d.look.bits * draws / d.look.times);
  f.means =
      "the random stream does not follow the shard: different parts of one tensor drop the same "
      "places";
  return f;
}

void shards_differ(const Draws& d, Agreement& found) {
  const int world = d.e.mesh.world();
  int first_a = -1, first_b = -1;
  std::vector<int> ranks;
  for (int b = 0; b < world; ++b)
    for (int a = 0; a < b; ++a) {
      if (shard_of(d.e.mesh, d.look.shards, a) == shard_of(d.e.mesh, d.look.shards, b)) continue;
      found.compared += d.common(a, b) * d.look.times;
      if (!d.repeats(a, b)) continue;
      if (first_b < 0) first_a = a, first_b = b;
      for (int r : {a, b})
        if (std::find(ranks.begin(), ranks.end(), r) == ranks.end()) ranks.push_back(r);
    }
  if (first_b < 0) return;
  std::sort(ranks.begin(), ranks.end());
  found.findings.push_back(repeated(d, first_a, first_b, std::move(ranks)));
}

}  // namespace

Agreement same_draws(const Evidence& e, std::span<const Look> looks, int shot, int first_step) {
  Agreement found;
  for (const Look& look : looks) {
    const Draws d{e, look, shot, first_step};
    if (!look.copies.empty()) copies_agree(d, found);
    if (look.judges_shards()) shards_differ(d, found);
    first_step += look.times;
  }
  return found;
}

}  // namespace judging
}  // namespace shardproof
