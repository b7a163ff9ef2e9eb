#include "oracle/time_left.hpp"

#include <algorithm>

namespace shardproof {

void TimeLeft::due(const Pace& pace, int64_t count, double weight) {
  Spent& spent = of_[key(pace)];
  spent.due += count;
  spent.weight = weight;
}

void TimeLeft::done(const Pace& pace, double seconds) {
  Spent& spent = of_[key(pace)];
  ++spent.done;
  spent.seconds += seconds;
}

// Seconds of one of weight 1; 0: none was met.
double TimeLeft::of_likes(Pace::What what, std::optional<bool> alone) const {
  double seconds = 0, weights = 0;
  for (const auto& [key, spent] : of_) {
    if (std::get<Pace::What>(key) != what || (alone && std::get<bool>(key) != *alone)) continue;
    seconds += spent.seconds;
    weights += double(spent.done) * spent.weight;
  }
  return weights > 0 ? seconds / weights : 0;
}

// At its own mean; a sampled witness at that of cases; at that of the other place, as likes go here
// and there; by its weight.
std::optional<double> TimeLeft::mean(const Key& key, const Spent& own) const {
  const auto& [what, alone, contract] = key;
  if (own.done > 0) return own.seconds / double(own.done);
  if (what == Pace::a_sampled_witness && of_likes(what, alone) == 0)
    if (const auto cases = of_.find({Pace::a_case, alone, contract}); cases != of_.end())
      return mean(cases->first, cases->second);
  const double here = of_likes(what, alone), there = of_likes(what, !alone);
  const auto other = of_.find({what, !alone, contract});
  if (other != of_.end() && other->second.done > 0)
    return other->second.seconds / double(other->second.done) *
           (here > 0 && there > 0 ? here / there : 1);
  if (here == 0 && there == 0) return std::nullopt;
  return (here > 0 ? here : there) * own.weight;
}

std::optional<double> TimeLeft::seconds(double elapsed) const {
  const bool begun_alone = std::any_of(of_.begin(), of_.end(), [](const auto& entry) {
    return std::get<bool>(entry.first) && entry.second.done > 0;
  });
  double left_together = 0, left_alone = 0, spent_together = 0, spent_alone = 0;
  for (const auto& [key, spent] : of_) {
    const bool alone = std::get<bool>(key);
    (alone ? spent_alone : spent_together) += spent.seconds;
    if (spent.left() == 0) continue;
    const auto each = mean(key, spent);
    if (!each) return std::nullopt;
    // Until it has begun, what runs alone is taken to have the processors that others share now.
    (alone && begun_alone ? left_alone : left_together) += double(spent.left()) * *each;
  }
  // Side by side more is done in a second than one process does, less what nobody counts.
  const double together = elapsed - spent_alone;
  const double at_once = together > 0 && spent_together > 0 ? spent_together / together : 1;
  const double left = left_together / at_once + left_alone;
  if (left > 8 * elapsed) return std::nullopt;  // from so little nothing can be told
  return left;
}

}  // namespace shardproof
