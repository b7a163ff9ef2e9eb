#include "primitives/timetable.hpp"

#include <algorithm>
#include <stdexcept>

#include "primitives/line.hpp"

namespace shardproof::primitives {

int64_t Plan::stage_of(int64_t chunk) const {
  return turns() && chunk >= stages ? chunks() - 1 - chunk : chunk % stages;
}

int64_t Plan::together() const {
  return microbatches / std::max<int64_t>(1, microbatches / stages);
}

std::optional<Rejected> refused_plan(const Case& line, int64_t microbatches) {
  const std::string schedule = line.text("schedule");
  const Plan plan{schedule, line.ranks(Axis::pp), line.at("virtual"), microbatches};
  const bool loops = schedule == "interleaved" || (schedule == "zero_bubble" && plan.rounds > 1);
  return first_refusal(
      when((schedule == "gpipe" || schedule == "1f1b") && plan.rounds > 1,
           "virtual=1 with schedule=" + schedule, said(line, "virtual"),
           "a stage has one chunk there: take schedule=interleaved"),
      when(schedule == "interleaved" && plan.rounds == 1, "virtual=2 or more, interleaved",
           said(line, "virtual"), "with one chunk a stage it is schedule=1f1b"),
      when(plan.turns() && plan.rounds != 2, "virtual=2 with schedule=zbv", said(line, "virtual"),
           "a stage has a chunk on the way there and one on the way back"),
      when(loops &&
               plan.together() * std::max<int64_t>(1, microbatches / plan.stages) != microbatches,
           "microbatches in equal rounds of pp=" + std::to_string(plan.stages) + " or more",
           std::to_string(microbatches) + " microbatches",
           "choose another micro_batch_size: a multiple of the stages, or fewer than twice as "
           "many"));
}

// ---- Orders

namespace {

// One stage's order as it grows. Chunks are the own ones, from 0.
struct Order {
  const Plan& plan;
  int64_t stage;
  std::vector<Action> actions;
  std::vector<Unit> put_off;  // B whose W is to come
  size_t spent = 0;

  int64_t chunk(int64_t own) const {
    return plan.turns() && own == 1 ? plan.chunks() - 1 - stage : own * plan.stages + stage;
  }
  void add(Work work, Unit unit) {
    if (unit.microbatch < plan.microbatches) actions.push_back({work, unit});
  }
  // The n-th forward or backward of a stage that takes g microbatches through each chunk.
  Unit nth(int64_t n, int64_t g, bool backward) const {
    const int64_t in_round = n % (g * plan.rounds), own = in_round / g;
    return {n / (g * plan.rounds) * g + in_round % g,
            chunk(backward ? plan.rounds - 1 - own : own)};
  }
  void weights() {
    if (spent < put_off.size()) add(Work::weights, put_off[spent++]);
  }
};

int64_t forwards_first(const Plan& p, int64_t stage) {
  const int64_t behind = p.stages - 1 - stage;
  if (p.schedule == "gpipe") return p.microbatches;
  if (p.rounds == 1) return behind;
  return (p.schedule == "interleaved" ? 2 : 1) * behind + (p.rounds - 1) * p.together();
}

std::vector<Action> one_by_one(const Plan& p, int64_t stage) {
  Order o{p, stage, {}, {}};
  const int64_t all = p.microbatches * p.rounds, g = p.rounds == 1 ? p.microbatches : p.together(),
                first = std::min(all, forwards_first(p, stage));
  for (int64_t n = 0; n < first; ++n) o.add(Work::forward, o.nth(n, g, false));
  for (int64_t n = 0; n < all; ++n) {
    if (first + n < all) o.add(Work::forward, o.nth(first + n, g, false));
    o.add(Work::backward, o.nth(n, g, true));
    if (!p.splits()) continue;
    o.put_off.push_back(o.nth(n, g, true));
    if (n >= stage) o.weights();
  }
  while (o.spent < o.put_off.size()) o.weights();
  return std::move(o.actions);
}

// Counts of each chunk's F, B and W; what is counted beyond the last microbatch is left out.
std::vector<Action> there_and_back(const Plan& p, int64_t stage) {
  Order o{p, stage, {}, {}};
  const int64_t counted = std::max(2 * p.stages - 1, p.microbatches);
  int64_t f[2] = {}, b[2] = {}, w[2] = {};
  const auto forward = [&](int own) { o.add(Work::forward, {f[own]++, o.chunk(own)}); };
  const auto backward = [&](int own) { o.add(Work::backward, {b[own]++, o.chunk(own)}); };
  const auto weights = [&](int own) { o.add(Work::weights, {w[own]++, o.chunk(own)}); };
  for (int64_t n = 0; n < 2 * (p.stages - stage) - 1; ++n) forward(0);
  for (int64_t n = 0; n < stage; ++n) forward(1), forward(0);
  for (int64_t n = 0; n < p.stages - stage; ++n) forward(1), backward(1), weights(1);
  while (f[1] < f[0] || f[0] < counted) {
    if (f[0] < counted) forward(0);
    backward(0), weights(0), forward(1), backward(1), weights(1);
  }
  for (int64_t n = 0; n < stage; ++n) backward(0), backward(1);
  for (int64_t n = 0; n < p.stages - stage; ++n) backward(0), weights(0);
  for (int own : {1, 0})
    while (w[own] < b[own]) weights(own);
  return std::move(o.actions);
}

}  // namespace

std::vector<Action> order_of(const Plan& p, int64_t stage) {
  return p.turns() ? there_and_back(p, stage) : one_by_one(p, stage);
}

// ---- Ticks

namespace {

std::vector<std::vector<Action>> orders_of(const Plan& p) {
  std::vector<std::vector<Action>> all;
  for (int64_t stage = 0; stage < p.stages; ++stage) all.push_back(order_of(p, stage));
  return all;
}

}  // namespace

Timetable::Timetable(const Plan& plan) : Timetable(plan, orders_of(plan)) {}

Timetable::Timetable(const Plan& plan, const std::vector<std::vector<Action>>& orders)
    : plan_(plan) {
  constexpr int64_t never = -1;
  std::vector<int64_t> done(size_t(3 * plan.chunks() * plan.microbatches), never);
  std::vector<size_t> at(orders.size(), 0);
  const auto unfinished = [&] {
    for (size_t s = 0; s < orders.size(); ++s)
      if (at[s] < orders[s].size()) return true;
    return false;
  };
  while (unfinished()) {
    std::vector<std::optional<Action>> now(orders.size());
    for (size_t s = 0; s < orders.size(); ++s)
      if (at[s] < orders[s].size() && ready(orders[s][at[s]], done)) now[s] = orders[s][at[s]++];
    bool moved = false;
    for (const auto& action : now)
      if (action) done[number(*action)] = ticks(), moved = true;
    if (!moved) throw std::logic_error("orders of which no stage can go on");
    by_tick_.push_back(std::move(now));
  }
}

size_t Timetable::number(const Action& a) const {
  return size_t((int64_t(a.work) * plan_.chunks() + a.unit.chunk) * plan_.microbatches +
                a.unit.microbatch);
}

bool Timetable::ready(const Action& a, const std::vector<int64_t>& done) const {
  const auto has = [&](Work work, int64_t chunk) {
    return done[number({work, {a.unit.microbatch, chunk}})] >= 0;
  };
  if (a.work == Work::forward) return a.unit.chunk == 0 || has(Work::forward, a.unit.chunk - 1);
  if (a.work == Work::weights) return has(Work::backward, a.unit.chunk);
  return has(Work::forward, a.unit.chunk) &&
         (a.unit.chunk + 1 == plan_.chunks() || has(Work::backward, a.unit.chunk + 1));
}

std::optional<Action> Timetable::at(int64_t tick, int64_t stage) const {
  return by_tick_[size_t(tick)][size_t(stage)];
}

std::optional<Action> Timetable::next(const Action& a) const {
  Action after = a;
  after.unit.chunk += a.work == Work::forward ? 1 : -1;
  const bool inside = after.unit.chunk >= 0 && after.unit.chunk < plan_.chunks();
  return inside && a.work != Work::weights ? std::optional(after) : std::nullopt;
}

int64_t Timetable::hop(const Action& a) const {
  const auto after = next(a);
  if (!after) return 0;
  const int64_t here = plan_.stage_of(a.unit.chunk), there = plan_.stage_of(after->unit.chunk);
  if (here == there) return 0;
  if (plan_.turns()) return there - here;
  return a.work == Work::forward ? 1 : -1;
}

bool Timetable::travels(int64_t tick, int64_t to) const {
  const auto& now = by_tick_[size_t(tick)];
  return std::any_of(now.begin(), now.end(),
                     [&](const auto& action) { return action && hop(*action) == to; });
}

}  // namespace shardproof::primitives
