// R: do the ranks that must hold equal bits hold equal bits?
//
// Values and gradients of type I and R are compared byte for byte on their axes. Integers are exact
// in every order of summation, and two summands commute, so sums that each rank takes in its own
// order part the replicas only on rounding data at three ranks or more: there a shot on normal data
// is added. Copies on devices are compared by the digests that these take of them as well.
//
// What a subject draws by itself (dropout masks, where the contract declares them) is compared,
// too: equal on copies, and the other way round, different on shards (draws.hpp).
#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "oracle/checks/draws.hpp"
#include "oracle/checks/judging.hpp"

namespace shardproof {
namespace {

constexpr const char* rounding_shot = "replica:normal";
constexpr const char* draws_shot = "replica:draws";

std::vector<Axis> replicated_axes(const Layout& layout, const Mesh& mesh) {
  std::vector<Axis> axes;
  for (const auto& [axis, placement] : layout)
    if (equal_bits(placement) && mesh.size(axis) > 1) axes.push_back(axis);
  return axes;
}

bool is_result(const Operand& o, bool gradient, const Declared& declared) {
  if (!gradient) return o.role == Operand::output;
  return declared.backward && o.role != Operand::output && o.role != Operand::index && o.gradient;
}

// Ranks over which some result is replicated: the largest such group.
int widest(std::span<const Operand> operands, const Mesh& mesh, const Declared& declared) {
  int ranks = 1;
  for (const Operand& o : operands)
    for (bool gradient : {false, true}) {
      if (!is_result(o, gradient, declared)) continue;
      const Layout layout = judging::result_layout(o, gradient);
      const auto axes = replicated_axes(layout, mesh);
      for (const auto& group : mesh.holders(layout, axes))
        ranks = std::max(ranks, int(group.size()));
    }
  return ranks;
}

bool due(const Contract& contract, const Case& line, const Declared& declared) {
  if (line.world() == 1) return false;
  if (widest(contract.operands(line), line.mesh(), declared) > 1) return true;
  if (!line.text("fault").empty()) return false;
  const auto looks = looks_at_draws(contract, line);
  return std::any_of(looks.begin(), looks.end(),
                     [](const Look& l) { return !l.copies.empty() || l.judges_shards(); });
}

// One forward for each draw that is looked at. Faults of collectives are not what they ask about:
// of a control they are held back, and a line that is all about one is not asked.
void plan_draws(const Evidence& e, std::vector<Shot>& shots) {
  if (!e.line->text("fault").empty()) return;
  Shot s;
  s.name = draws_shot;
  s.program.clear();
  s.feeds.clear();
  s.fault = false;
  for (const Look& look : looks_at_draws(*e.contract, *e.line))
    for (int k = 0; k < look.times; ++k) {
      s.program += fmt::format("{}F{}", s.feeds.empty() ? "" : " ", s.feeds.size());
      s.feeds.push_back(feed_of_draw(*e.contract, *e.line, look, k, shots.at(0).feeds.at(0)));
    }
  if (!s.feeds.empty()) shots.push_back(std::move(s));
}

void plan(const Evidence& e, std::vector<Shot>& shots) {
  plan_draws(e, shots);
  if (shots.at(0).feeds.at(0).fill != Fill::integers || widest(e.operands, e.mesh, e.declared) < 3)
    return;
  Shot s = shots[0];
  s.name = rounding_shot;
  s.feeds[0].fill = Fill::normal;
  shots.push_back(std::move(s));
}

// On a device its own digest of the memory counts as well as what was fetched from it.
bool same_copies(const ResultTensor& a, const ResultTensor& b) {
  const bool seen = a.on_device && b.on_device;
  return judging::same_bytes(a, b) &&
         (!seen || std::equal(std::begin(a.lanes), std::end(a.lanes), std::begin(b.lanes)));
}

// Members of a group that part from the majority, each with a member of the majority.
std::vector<std::pair<int, int>> dissenters(const Evidence& e, const std::vector<int>& group,
                                            int shot, const ResultTensor& like) {
  std::vector<std::pair<const ResultTensor*, std::vector<int>>> camps;
  for (int r : group) {
    const ResultTensor* t = e.result(r, shot, like.step, like.operand, like.gradient);
    auto camp = std::find_if(camps.begin(), camps.end(),
                             [&](auto& c) { return t && c.first && same_copies(*c.first, *t); });
    if (camp == camps.end())
      camps.push_back({t, {r}});
    else
      camp->second.push_back(r);
  }
  const auto largest = std::max_element(camps.begin(), camps.end(), [](auto& a, auto& b) {
    return a.second.size() < b.second.size();
  });
  std::vector<std::pair<int, int>> apart;
  for (auto& camp : camps)
    if (&camp != &*largest)
      for (int r : camp.second) apart.emplace_back(r, largest->second[0]);
  return apart;
}

}  // namespace

std::string judging::parting_text(std::span<const int> apart, int got, int want,
                                  const std::string& more) {
  return fmt::format("{} part{} from rank {} (want; got: rank {}){}", ranks_text(apart, 0),
                     apart.size() == 1 ? "s" : "", want, got, more.empty() ? "" : ", " + more);
}

Finding judging::parting(const Evidence& e, const std::vector<int>& group, int shot,
                         const ResultTensor& like) {
  const auto apart = dissenters(e, group, shot, like);
  const auto [rank, other] = apart[0];
  const ResultTensor* got = e.result(rank, shot, like.step, like.operand, like.gradient);
  const ResultTensor* want = e.result(other, shot, like.step, like.operand, like.gradient);
  Finding f;
  const bool fetched_alike = got && want && judging::same_bytes(*got, *want);
  if (fetched_alike)
    f.rank = rank, f.message =
                       "digests that the devices took of their memory, while what was "
                       "fetched from it agrees";
  else if (got && want)
    f = judging::difference(e, {got, rank}, {want, other});
  f.tensor = judging::tensor_name(e.operands[size_t(like.operand)], like.gradient);
  f.ranks.clear();
  for (const auto& pair : apart) f.ranks.push_back(pair.first);
  std::sort(f.ranks.begin(), f.ranks.end());
  f.holders = f.ranks;
  f.message = judging::parting_text(f.ranks, rank, other, f.message);
  if (shot != 0) f.message += ", in '" + e.shots[size_t(shot)].name + "'";
  f.means = like.gradient ? "the gradient of a replicated tensor was not summed over its ranks, or "
                            "each rank summed in its own order"
                          : "a result that has to be equal on these ranks was not reduced, or each "
                            "rank summed in its own order";
  return f;
}

namespace {

// Compared, and found first: it says why the results part, too.
void judge_draws(const Evidence& e, judging::Agreement& t, std::string& note) {
  const auto looks = looks_at_draws(*e.contract, *e.line);
  if (looks.empty()) return;
  const int shot = e.find_shot(draws_shot);
  if (shot < 0 && !e.line->text("fault").empty()) return;
  if (shot < 0) {
    note = "what is drawn was not returned, so copies and shards of it were not compared";
    return;
  }
  note = draws_not_judged(looks);
  judging::Agreement drawn;
  if (auto f = judging::incomplete(e, shot))
    drawn.findings.push_back(std::move(*f));
  else
    drawn = judging::same_draws(e, looks, shot, 0);
  t.compared += drawn.compared;
  t.findings.insert(t.findings.begin(), drawn.findings.begin(), drawn.findings.end());
}

CheckResult judge(const Evidence& e) {
  if (auto f = judging::incomplete(e, "base")) return judging::conclude("replica", 0, {*f});
  judging::Agreement t = judging::same_replicas(e, 0);
  // On normal data only where integers saw nothing: the same fault is not told twice.
  if (const int shot = e.find_shot(rounding_shot); shot >= 0 && t.findings.empty()) {
    if (auto f = judging::incomplete(e, rounding_shot))
      return judging::conclude("replica", 0, {*f});
    judging::Agreement more = judging::same_replicas(e, shot);
    t.compared += more.compared;
    t.findings = std::move(more.findings);
  }
  std::string note;
  judge_draws(e, t, note);
  CheckResult result =
      judging::conclude("replica", t.compared, std::move(t.findings), std::move(note));
  result.exact = true;
  return result;
}

}  // namespace

judging::Agreement judging::same_replicas(const Evidence& e, int shot) {
  Agreement t;
  for (const ResultTensor& first : e.record(0, shot).results) {
    const Operand& o = e.operands[size_t(first.operand)];
    const Layout layout = judging::result_layout(o, first.gradient);
    const auto axes = replicated_axes(layout, e.mesh);
    if (axes.empty()) continue;
    bool reported = false;
    for (const auto& group : e.mesh.holders(layout, axes)) {
      const ResultTensor* leader =
          e.result(group[0], shot, first.step, first.operand, first.gradient);
      bool agree = leader != nullptr;
      for (size_t m = 1; m < group.size() && agree; ++m) {
        const ResultTensor* member =
            e.result(group[m], shot, first.step, first.operand, first.gradient);
        agree = member && same_copies(*leader, *member);
      }
      if (leader)
        t.compared +=
            int64_t(leader->bytes.size() / size_of(leader->dtype)) * int64_t(group.size() - 1);
      if (agree) continue;
      Finding f = parting(e, group, shot, first);
      if (reported)
        t.findings.back().ranks.insert(t.findings.back().ranks.end(), f.ranks.begin(),
                                       f.ranks.end());
      else
        t.findings.push_back(std::move(f));
      reported = true;
    }
  }
  return t;
}

Check replica_check() {
  return {
      .name = "replica",
      .letter = 'R',
      .asks = "do ranks that must hold equal values hold equal bits, and shards different draws",
      .due = due,
      .plan = plan,
      .judge = judge};
}

}  // namespace shardproof
